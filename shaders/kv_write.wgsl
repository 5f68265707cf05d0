// Stores keys and values of the rows at their slots. The store is [block][head][token][element],
// a head's elements padded with zeros to whole vec4s (DIM elements in DIM4 vec4s), each kept as
// kv/*.wgsl has it. Lines marked @scaled are for types whose heads have a scale.

@group(0) @binding(0) var<storage, read> arena: array<u32>;
@group(0) @binding(1) var<storage, read> k: array<f32>;
@group(0) @binding(2) var<storage, read> v: array<f32>;
@group(0) @binding(3) var<storage, read_write> keys: array<Kept>;
@group(0) @binding(4) var<storage, read_write> values: array<Kept>;

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

fn vector(i: u32, at: u32, key: bool) -> vec4<f32> {
    let e = 4u * i;
    return vec4<f32>(element(e, at, key), element(e + 1u, at, key), element(e + 2u, at, key), element(e + 3u, at, key));
}

@scaled // Bits of a head's scale, and what its elements are multiplied with. An infinity or NaN makes
@scaled // the scale NaN: by bits, since drivers may take it that there is nothing to be found.
@scaled fn scale_of(at: u32, key: bool) -> vec2<u32> {
@scaled     var top = 0u;
@scaled     for (var i = 0u; i < DIM; i++) {
@scaled         top = max(top, bitcast<u32>(element(i, at, key)) & 0x7fffffffu);
@scaled     }
@scaled     if (top < 0x0d800000u) {
@scaled         return vec2<u32>(0u);
@scaled     }
@scaled     if (top >= 0x7f800000u) {
@scaled         return vec2<u32>(0x7fc00000u, 0u);
@scaled     }
@scaled     let largest = bitcast<f32>(top);
@scaled     return bitcast<vec2<u32>>(vec2<f32>(largest / 127.0, 127.0 / largest));
@scaled }

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
    let to = ((block * p.heads + head) * p.block_tokens + token) * STRIDE;
    let ka = row * p.k_stride + (p.first_head + head) * DIM;
    let va = row * p.v_stride + (p.first_head + head) * DIM;
@exact    keys[to + i] = kept(vector(i, ka, true));
@exact    values[to + i] = kept(vector(i, va, false));
@scaled    let ks = scale_of(ka, true);
@scaled    let vs = scale_of(va, false);
@scaled    keys[to + i] = kept(vector(i, ka, true) * bitcast<f32>(ks.y));
@scaled    values[to + i] = kept(vector(i, va, false) * bitcast<f32>(vs.y));
@scaled    if (i == 0u) {
@scaled        keys[to + DIM4] = ks.x;
@scaled        values[to + DIM4] = vs.x;
@scaled    }
}
