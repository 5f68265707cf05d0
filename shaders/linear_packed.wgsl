// The product with activations as int8 (quantise.wgsl): whole numbers within a block of 32, and one
// chain of fused multiply-adds over the blocks in ascending order, whatever the rows of the call. A
// thread makes some rows of some output columns, as in linear_rows.wgsl.

// Codes that fit a signed byte, in the order of the activations; an element is scale * code + low.
struct Packed {
    first: vec4<u32>,
    second: vec4<u32>,
    // Of each half.
    scale: vec2<f32>,
    low: f32,
}

fn dot16(w: vec4<u32>, v: vec4<u32>) -> i32 {
    return (dot4I8Packed(w.x, v.x) + dot4I8Packed(w.y, v.y))
        + (dot4I8Packed(w.z, v.z) + dot4I8Packed(w.w, v.w));
}

fn nibbles(q: vec4<u32>) -> vec4<u32> {
    return q & vec4<u32>(0x0f0f0f0fu);
}

// Bits 4j .. 4j+3 of `high` as bit 4 of the bytes of word j, for four words.
fn fifths(high: u32) -> vec4<u32> {
    let four = (vec4<u32>(high) >> vec4<u32>(0u, 4u, 8u, 12u)) & vec4<u32>(15u);
    return ((four * 0x00204081u) & vec4<u32>(0x01010101u)) << vec4<u32>(4u);
}

@one fn more(w: Packed, a: vec4<u32>, b: vec4<u32>, s: vec2<f32>, sum: f32) -> f32 {
@one    let whole = dot16(w.first, a) + dot16(w.second, b);
@one    return fma(w.scale.x * s.x, f32(whole), fma(w.low, s.y, sum));
@one }
@two fn more(w: Packed, a: vec4<u32>, b: vec4<u32>, s: vec2<f32>, sum: f32) -> f32 {
@two    let part = fma(w.scale.x * s.x, f32(dot16(w.first, a)), sum);
@two    return fma(w.scale.y * s.x, f32(dot16(w.second, b)), part);
@two }

@compute @workgroup_size(LANES)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_id) local: vec3<u32>) {
    let tile = group.x;
    let lane = local.x;
    let first = group.y * ROWS;
    if (idle(first, ROWS)) {
        return;
    }
@row    let at$r = min(first + $ru, p.rows - 1u) * p.x_stride;
@row@col    var sum$r_$c = 0.0;
    for (var b = 0u; b < p.w.blocks; b++) {
@col        let w$c = packed_at(tile, b, lane + $cu * LANES);
@row        let a$r = x[2u * (at$r + b)];
@row        let b$r = x[2u * (at$r + b) + 1u];
@row        let s$r = x_scales[at$r + b];
@row@col        sum$r_$c = more(w$c, a$r, b$r, s$r, sum$r_$c);
    }
@row@col    store(first + $ru, tile * TILE + lane + $cu * LANES, sum$r_$c);
}
