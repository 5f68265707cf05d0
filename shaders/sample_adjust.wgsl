// Adds biases to logits and forbids tokens: a thread does one row, in the order given.

@group(0) @binding(0) var<storage, read> arena: array<u32>;
@group(0) @binding(1) var<storage, read_write> logits: array<u32>;

struct Params {
    // Arena offset of [offset, count of additions, count of forbidden] of each row. At `offset` lie
    // pairs (id, float), then ids.
    lists: u32,
    rows: u32,
    cols: u32,
    stride: u32,
}
var<immediate> p: Params;

@compute @workgroup_size(32)
fn main(@builtin(global_invocation_id) global: vec3<u32>) {
    let row = global.x;
    if (row >= p.rows) {
        return;
    }
    var at = arena[p.lists + 3u * row];
    for (var i = 0u; i < arena[p.lists + 3u * row + 1u]; i++) {
        let id = arena[at];
        if (id < p.cols) {
            let logit = bitcast<f32>(logits[row * p.stride + id]);
            logits[row * p.stride + id] = bitcast<u32>(logit + bitcast<f32>(arena[at + 1u]));
        }
        at += 2u;
    }
    for (var i = 0u; i < arena[p.lists + 3u * row + 2u]; i++) {
        let id = arena[at];
        if (id < p.cols) {
            logits[row * p.stride + id] = MINUS_INFINITY;
        }
        at += 1u;
    }
}
