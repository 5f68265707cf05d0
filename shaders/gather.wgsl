// out[i] = x[rows[i]]

@group(0) @binding(0) var<storage, read> arena: array<u32>;
@group(0) @binding(1) var<storage, read> x: array<vec4<f32>>;
@group(0) @binding(2) var<storage, read_write> out: array<vec4<f32>>;

struct Params {
    rows: u32,
    // vec4s of a row, of x and out alike.
    stride: u32,
}
var<immediate> p: Params;

@compute @workgroup_size(32)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_id) local: vec3<u32>) {
    let i = group.x * 32u + local.x;
    if (i < p.stride) {
        out[group.y * p.stride + i] = x[arena[p.rows + group.y] * p.stride + i];
    }
}
