// out[row, o] = sum over k of x[row, k] * weight[o, k] (+ bias[o])
//
// Every variant of this kernel sums in one order, whatever the rows of the call, so that all give
// the same bits: within a segment of 8 blocks (256 elements) lane j of a vec4 adds the elements
// k = j (mod 4) in ascending order, one fused multiply-add each; segments are added in ascending
// order; the four lanes last.
//
// This variant has no barrier: a thread makes ROWS rows of one output column. Software adapters
// are fast at it, and large products on any.
//
// With `experts` set, row r is scaled by shares[r, expert], skipped where that is zero, and added
// to what `out` holds if `accumulate` is set.

@group(0) @binding(0) var<storage, read> codes: array<vec4<u32>>;
@group(0) @binding(1) var<storage, read> scales: array<u32>;
@group(0) @binding(2) var<storage, read> x: array<vec4<f32>>;
@group(0) @binding(3) var<storage, read> bias: array<f32>;
@group(0) @binding(4) var<storage, read> shares: array<f32>;
@group(0) @binding(5) var<storage, read_write> out: array<f32>;

struct Params {
    w: Weight,
    rows: u32,
    // vec4s of a row of x; floats of a row of out.
    x_stride: u32,
    out_stride: u32,
    // The column of `out` where this chunk of the weight begins, and how many it has.
    out_first: u32,
    outs: u32,
    has_bias: u32,
    // Zero but for a mixture of experts: their count is the row length of `shares`.
    experts: u32,
    share_stride: u32,
    expert: u32,
    accumulate: u32,
}
var<immediate> p: Params;

fn chain(w: Block, at: u32, before: vec4<f32>) -> vec4<f32> {
    var s = fma(w.a, x[at], before);
    s = fma(w.b, x[at + 1u], s);
    s = fma(w.c, x[at + 2u], s);
    s = fma(w.d, x[at + 3u], s);
    s = fma(w.e, x[at + 4u], s);
    s = fma(w.f, x[at + 5u], s);
    s = fma(w.g, x[at + 6u], s);
    return fma(w.h, x[at + 7u], s);
}

fn store(row: u32, column: u32, sum: vec4<f32>) {
    if (row >= p.rows || column >= p.outs) {
        return;
    }
    let at = row * p.out_stride + p.out_first + column;
    var y = (sum.x + sum.y) + (sum.z + sum.w);
    if (p.has_bias != 0u) {
        y += bias[p.out_first + column];
    }
    if (p.experts != 0u) {
        let share = shares[row * p.share_stride + p.expert];
        if (share == 0.0) {
            return;
        }
        if (p.accumulate != 0u) {
            y = fma(share, y, out[at]);
        }
    }
    out[at] = y;
}

// Whether none of the rows wants this expert.
fn idle(first: u32, count: u32) -> bool {
    if (p.experts == 0u) {
        return false;
    }
    for (var row = first; row < min(first + count, p.rows); row++) {
        if (shares[row * p.share_stride + p.expert] != 0.0) {
            return false;
        }
    }
    return true;
}

@compute @workgroup_size(32)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_id) local: vec3<u32>) {
    let tile = group.x;
    let lane = local.x;
    let first = group.y * ROWS;
    if (idle(first, ROWS)) {
        return;
    }
    var at: array<u32, ROWS>;
    var total: array<vec4<f32>, ROWS>;
    for (var r = 0u; r < ROWS; r++) {
        at[r] = min(first + r, p.rows - 1u) * p.x_stride;
        total[r] = vec4<f32>(0.0);
    }
    for (var segment = 0u; segment < p.w.blocks; segment += 8u) {
        var sum: array<vec4<f32>, ROWS>;
        for (var r = 0u; r < ROWS; r++) {
            sum[r] = vec4<f32>(0.0);
        }
        for (var b = segment; b < min(segment + 8u, p.w.blocks); b++) {
            let w = block_at(tile, b, lane);
            for (var r = 0u; r < ROWS; r++) {
                sum[r] = chain(w, at[r] + 8u * b, sum[r]);
            }
        }
        for (var r = 0u; r < ROWS; r++) {
            total[r] += sum[r];
        }
    }
    for (var r = 0u; r < ROWS; r++) {
        store(first + r, tile * TILE + lane, total[r]);
    }
}
