// What all quantised types share. A weight's rows lie in tiles of 32, interleaved, so that
// neighbouring lanes (rows) read neighbouring words; `b` counts 32-wide blocks within the part.
// The layouts are made by backends/wgpu/src/pack.rs.

const TILE = 32u;

struct Weight {
    // 32-wide blocks of a row.
    blocks: u32,
    // vec4s of one row in `codes`, and words of one row in `scales`.
    code_stride: u32,
    scale_stride: u32,
    // Where the first block lies within its 256-wide super-block.
    first_sub: u32,
}

// 32 consecutive elements.
struct Block {
    a: vec4<f32>, b: vec4<f32>, c: vec4<f32>, d: vec4<f32>,
    e: vec4<f32>, f: vec4<f32>, g: vec4<f32>, h: vec4<f32>,
}

fn code_at(tile: u32, i: u32, lane: u32) -> vec4<u32> {
    return codes[(tile * p.w.code_stride + i) * TILE + lane];
}

fn scale_at(tile: u32, i: u32, lane: u32) -> u32 {
    return scales[(tile * p.w.scale_stride + i) * TILE + lane];
}

// Bytes of `q`, masked.
fn bytes(q: u32, mask: u32) -> vec4<u32> {
    return (vec4<u32>(q) >> vec4<u32>(0u, 8u, 16u, 24u)) & vec4<u32>(mask);
}

// `scale * code + min`: exact for all types but for the rounding of `+ min`.
fn values(code: vec4<u32>, scale: f32, low: f32) -> vec4<f32> {
    // Through i32: some processors have no conversion from u32.
    return fma(vec4<f32>(vec4<i32>(code)), vec4<f32>(scale), vec4<f32>(low));
}

// Element 4j+i is the low nibble of byte i of word j; 16+4j+i its high one.
fn nibble_block(q: vec4<u32>, scale: f32, low: f32) -> Block {
    let u = q >> vec4<u32>(4u);
    return Block(
        values(bytes(q.x, 15u), scale, low), values(bytes(q.y, 15u), scale, low),
        values(bytes(q.z, 15u), scale, low), values(bytes(q.w, 15u), scale, low),
        values(bytes(u.x, 15u), scale, low), values(bytes(u.y, 15u), scale, low),
        values(bytes(u.z, 15u), scale, low), values(bytes(u.w, 15u), scale, low),
    );
}

// Bits 4j .. 4j+3 of `high`, as bit 4 of a code.
fn fifth(high: u32, j: u32) -> vec4<u32> {
    return ((vec4<u32>(high >> (4u * j)) >> vec4<u32>(0u, 1u, 2u, 3u)) & vec4<u32>(1u)) << vec4<u32>(4u);
}

fn five_bit_block(q: vec4<u32>, high: u32, scale: f32, low: f32) -> Block {
    let u = q >> vec4<u32>(4u);
    return Block(
        values(bytes(q.x, 15u) | fifth(high, 0u), scale, low),
        values(bytes(q.y, 15u) | fifth(high, 1u), scale, low),
        values(bytes(q.z, 15u) | fifth(high, 2u), scale, low),
        values(bytes(q.w, 15u) | fifth(high, 3u), scale, low),
        values(bytes(u.x, 15u) | fifth(high, 4u), scale, low),
        values(bytes(u.y, 15u) | fifth(high, 5u), scale, low),
        values(bytes(u.z, 15u) | fifth(high, 6u), scale, low),
        values(bytes(u.w, 15u) | fifth(high, 7u), scale, low),
    );
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
