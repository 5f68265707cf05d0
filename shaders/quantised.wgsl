// What all quantised types share: each says how a block's codes become signed bytes (types/q*.wgsl);
// products of bytes take those, all else the floats that they stand for.

// Codes that fit a signed byte, in the order of the elements; an element is scale * code + low.
struct Packed {
    first: vec4<u32>,
    second: vec4<u32>,
    // Of each half.
    scale: vec2<f32>,
    low: f32,
}

fn block_at(tile: u32, b: u32, lane: u32) -> Block {
    let w = packed_at(tile, b, lane);
    return Block(
        elements(w.first.x, w.scale.x, w.low), elements(w.first.y, w.scale.x, w.low),
        elements(w.first.z, w.scale.x, w.low), elements(w.first.w, w.scale.x, w.low),
        elements(w.second.x, w.scale.y, w.low), elements(w.second.y, w.scale.y, w.low),
        elements(w.second.z, w.scale.y, w.low), elements(w.second.w, w.scale.y, w.low),
    );
}

// Bytes are sign-extended by an arithmetic shift. One rounding an element.
fn elements(q: u32, scale: f32, low: f32) -> vec4<f32> {
    let up = vec4<u32>(q) << vec4<u32>(24u, 16u, 8u, 0u);
    return fma(vec4<f32>(bitcast<vec4<i32>>(up) >> vec4<u32>(24u)), vec4<f32>(scale), vec4<f32>(low));
}

// Element 4j+i is the low nibble of byte i of word j; 16+4j+i its high one.
fn nibbles(q: vec4<u32>) -> vec4<u32> {
    return q & vec4<u32>(0x0f0f0f0fu);
}

// Bits 4j .. 4j+3 of `high` as bit 4 of the bytes of word j, for four words.
fn fifths(high: u32) -> vec4<u32> {
    let four = (vec4<u32>(high) >> vec4<u32>(0u, 4u, 8u, 12u)) & vec4<u32>(15u);
    return ((four * 0x00204081u) & vec4<u32>(0x01010101u)) << vec4<u32>(4u);
}

// Float16 number `b` of a row that packs two in a word.
fn half_scale(tile: u32, first: u32, b: u32, lane: u32) -> f32 {
    let pair = unpack2x16float(scale_at(tile, first + b / 2u, lane));
    return select(pair.x, pair.y, (b & 1u) == 1u);
}

// Scale and minimum of sub-block `sub` of a Q4_K or Q5_K super-block. `head` is the block's own
// header: d and dmin, then twelve bytes of six-bit scales and minima (ggml's get_scale_min_k4).
fn k_scale(head: vec4<u32>, sub: u32) -> vec2<f32> {
    let d = unpack2x16float(head.x);
    let shift = 8u * (sub & 3u);
    let a = head.y >> shift;
    let b = head.z >> shift;
    let c = head.w >> shift;
    let scale = select((c & 15u) | ((a >> 2u) & 48u), a & 63u, sub < 4u);
    let low = select(((c >> 4u) & 15u) | ((b >> 2u) & 48u), b & 63u, sub < 4u);
    return vec2<f32>(d.x * f32(scale), -(d.y * f32(low)));
}
