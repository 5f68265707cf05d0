// out[row] = table[ids[row]] * scale, for the ids that lie in this chunk of the table.

@group(0) @binding(0) var<storage, read> codes: array<vec4<u32>>;
@group(0) @binding(1) var<storage, read> scales: array<u32>;
@group(0) @binding(2) var<storage, read> arena: array<u32>;
@group(0) @binding(3) var<storage, read_write> out: array<vec4<f32>>;

struct Params {
    w: Weight,
    // Offset of the ids in the arena.
    ids: u32,
    // Table rows of this chunk.
    first: u32,
    count: u32,
    // vec4s of a row of out.
    out_stride: u32,
    scale: f32,
}
var<immediate> p: Params;

@compute @workgroup_size(32)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_id) local: vec3<u32>) {
    let b = group.x * 32u + local.x;
    let id = arena[p.ids + group.y];
    if (b >= p.w.blocks || id < p.first || id - p.first >= p.count) {
        return;
    }
    let row = id - p.first;
    let w = block_at(row / TILE, b, row % TILE);
    let at = group.y * p.out_stride + 8u * b;
    out[at] = w.a * p.scale;
    out[at + 1u] = w.b * p.scale;
    out[at + 2u] = w.c * p.scale;
    out[at + 3u] = w.d * p.scale;
    out[at + 4u] = w.e * p.scale;
    out[at + 5u] = w.f * p.scale;
    out[at + 6u] = w.g * p.scale;
    out[at + 7u] = w.h * p.scale;
}
