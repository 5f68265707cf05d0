// Rotates the pairs of every head. Cosines and sines come from the host, made in float64, as pairs
// [row][i] in the arena: adapters' own sin is too coarse for large angles.

@group(0) @binding(0) var<storage, read> arena: array<u32>;
@group(0) @binding(1) var<storage, read_write> x: array<f32>;

struct Params {
    table: u32,
    // Pairs of one head, and of one row.
    half: u32,
    pairs: u32,
    stride: u32,
    // Elements (i, i + half) if zero, else (2i, 2i + 1).
    interleaved: u32,
}
var<immediate> p: Params;

@compute @workgroup_size(32)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_id) local: vec3<u32>) {
    let pair = group.x * 32u + local.x;
    if (pair >= p.pairs) {
        return;
    }
    let head = pair / p.half;
    let i = pair % p.half;
    let angle = p.table + 2u * (group.y * p.half + i);
    let cosine = bitcast<f32>(arena[angle]);
    let sine = bitcast<f32>(arena[angle + 1u]);
    let at = group.y * p.stride + 2u * head * p.half;
    let a = at + select(i, 2u * i, p.interleaved != 0u);
    let b = at + select(i + p.half, 2u * i + 1u, p.interleaved != 0u);
    let u = x[a];
    let v = x[b];
    x[a] = fma(u, cosine, -(v * sine));
    x[b] = fma(u, sine, v * cosine);
}
