// Merges what attention.wgsl left of each split, for one head of one row a workgroup; thread t owns
// the vec4s i = t (mod 16).

@group(0) @binding(0) var<storage, read> arena: array<u32>;
@group(0) @binding(1) var<storage, read> parts: array<vec4<f32>>;
@group(0) @binding(2) var<storage, read_write> out: array<f32>;

struct Params {
    // As in attention.wgsl.
    rows: u32,
    // Arena offset of the query heads that have a result here.
    heads_of: u32,
    heads: u32,
    splits: u32,
    out_stride: u32,
    window: u32,
}
var<immediate> p: Params;

@compute @workgroup_size(16)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_id) local: vec3<u32>) {
    let row = group.y;
    let head = arena[p.heads_of + group.x];
    let own = row_at(p.rows + ROW_WORDS * row);
    if (own.slot == NONE) {
        return;
    }
    let begin = first_key(own, p.window) / SPLIT;
    let origin = (row * p.heads + head) * p.splits;
    for (var i = local.x; i < DIM4; i += 16u) {
        var top = LOWEST;
        var total = 0.0;
        var sum = vec4<f32>(0.0);
        for (var split = begin; split <= own.slot / SPLIT; split++) {
            let at = (origin + split) * (DIM4 + 1u);
            let state = parts[at];
            let m = merging(top, state.x, split == begin);
            total = merged(m, vec4<f32>(total), vec4<f32>(state.y)).x;
            top = m.z;
            sum = merged(m, sum, parts[at + 1u + i]);
        }
        let result = sum / total;
        for (var c = 0u; c < 4u; c++) {
            if (4u * i + c < DIM) {
                out[row * p.out_stride + head * DIM + 4u * i + c] = result[c];
            }
        }
    }
}
