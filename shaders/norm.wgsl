// Root mean square norm of one segment of one row by a workgroup of LANES threads:
// out = x / sqrt(mean(x^2) + eps) * weight. Thread t adds the elements i = t (mod LANES) in
// ascending order; the threads' sums are added in ascending order. `load` is x's or, in place, out's.

struct Params {
    segment: u32,
    x_stride: u32,
    out_stride: u32,
    eps: f32,
}
var<immediate> p: Params;

var<workgroup> part: array<f32, LANES>;

@compute @workgroup_size(LANES)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_id) local: vec3<u32>) {
    let lane = local.x;
    let origin = group.y * p.x_stride + group.x * p.segment;
    let to = group.y * p.out_stride + group.x * p.segment;
    var sum = 0.0;
    for (var i = lane; i < p.segment; i += LANES) {
        let v = load(origin + i);
        sum = fma(v, v, sum);
    }
    part[lane] = sum;
    workgroupBarrier();
    var total = 0.0;
    for (var i = 0u; i < LANES; i++) {
        total += part[i];
    }
    let scale = 1.0 / sqrt(total / f32(p.segment) + p.eps);
    for (var i = lane; i < p.segment; i += LANES) {
        out[to + i] = load(origin + i) * scale * weight[i];
    }
}
