// Stores keys and values of the rows at their slots. The store is [block][head][token][element],
// a head's elements padded with zeros to whole vec4s (DIM elements in DIM4 vec4s).

@group(0) @binding(0) var<storage, read> arena: array<u32>;
@group(0) @binding(1) var<storage, read> k: array<f32>;
@group(0) @binding(2) var<storage, read> v: array<f32>;
@group(0) @binding(3) var<storage, read_write> keys: array<vec4<f32>>;
@group(0) @binding(4) var<storage, read_write> values: array<vec4<f32>>;

struct Params {
    // Arena offset of [block, token in block] of each row; NONE where a row is nobody's.
    slots: u32,
    heads: u32,
    // The first of these heads within a row of k and v.
    first_head: u32,
    block_tokens: u32,
    k_stride: u32,
    v_stride: u32,
}
var<immediate> p: Params;

const NONE = 0xffffffffu;

fn element(i: u32, at: u32, key: bool) -> f32 {
    if (i >= DIM) {
        return 0.0;
    }
    if (key) {
        return k[at + i];
    }
    return v[at + i];
}

@compute @workgroup_size(32)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_id) local: vec3<u32>) {
    let row = group.y;
    let n = group.x * 32u + local.x;
    let head = n / DIM4;
    let i = n % DIM4;
    let block = arena[p.slots + 2u * row];
    if (head >= p.heads || block == NONE) {
        return;
    }
    let token = arena[p.slots + 2u * row + 1u];
    let to = ((block * p.heads + head) * p.block_tokens + token) * DIM4 + i;
    let ka = row * p.k_stride + (p.first_head + head) * DIM;
    let va = row * p.v_stride + (p.first_head + head) * DIM;
    let e = 4u * i;
    keys[to] = vec4<f32>(element(e, ka, true), element(e + 1u, ka, true), element(e + 2u, ka, true), element(e + 3u, ka, true));
    values[to] = vec4<f32>(element(e, va, false), element(e + 1u, va, false), element(e + 2u, va, false), element(e + 3u, va, false));
}
