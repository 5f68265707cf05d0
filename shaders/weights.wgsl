// What all element types share. A weight's rows lie in tiles of 32, interleaved, so that
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
