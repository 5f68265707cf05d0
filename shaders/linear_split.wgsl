// One row: four threads share an output column, each with every fourth segment, so that a narrow
// product fills an adapter. The first of them adds the segments in order.

var<workgroup> partial: array<vec4<f32>, 128>;

@compute @workgroup_size(32, 4)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_id) local: vec3<u32>) {
    let tile = group.x;
    let lane = local.x;
    let part = local.y;
    let row = group.y;
    if (idle(row, 1u)) {
        return;
    }
    var total = vec4<f32>(0.0);
    for (var segment = 0u; segment < p.w.blocks; segment += 32u) {
        let begin = segment + 8u * part;
        var sum = vec4<f32>(0.0);
        for (var b = begin; b < min(begin + 8u, p.w.blocks); b++) {
            sum = chain(block_at(tile, b, lane), load(row * p.x_stride + 8u * b), sum);
        }
        partial[32u * part + lane] = sum;
        workgroupBarrier();
        if (part == 0u) {
            for (var n = 0u; n < 4u && segment + 8u * n < p.w.blocks; n++) {
                total += partial[32u * n + lane];
            }
        }
        workgroupBarrier();
    }
    if (part == 0u) {
        store(row, tile * TILE + lane, total);
    }
}
