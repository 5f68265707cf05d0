// out[row, o] = sum over k of x[row, k] * weight[o, k] (+ bias[o])
//
// Every variant of this kernel sums in one order, whatever the rows of the call, so that all give
// the same bits: within a segment of 8 blocks (256 elements) lane j of a vec4 adds the elements
// k = j (mod 4) in ascending order, one fused multiply-add each; segments are added in ascending
// order; the four lanes last.
//
// The variants are in linear_rows.wgsl, linear_split.wgsl and linear_tiled.wgsl; this is what they
// share. linear_packed.wgsl, with int8 activations, is another arithmetic: its lines are marked
// @packed, those of the others @plain.
//
// With `experts` set, row r is scaled by shares[r, expert], skipped where that is zero, and added
// to what `out` holds if `accumulate` is set.

@group(0) @binding(0) var<storage, read> codes: array<vec4<u32>>;
@group(0) @binding(1) var<storage, read> scales: array<u32>;
@plain @group(0) @binding(2) var<storage, read> x: array<vec4<f32>>;
@plain @group(0) @binding(3) var<storage, read> bias: array<f32>;
@plain @group(0) @binding(4) var<storage, read> shares: array<f32>;
@plain @group(0) @binding(5) var<storage, read_write> out: array<f32>;
@packed @group(0) @binding(2) var<storage, read> x: array<vec4<u32>>;
@packed @group(0) @binding(3) var<storage, read> x_scales: array<vec2<f32>>;
@packed @group(0) @binding(4) var<storage, read> bias: array<f32>;
@packed @group(0) @binding(5) var<storage, read> shares: array<f32>;
@packed @group(0) @binding(6) var<storage, read_write> out: array<f32>;

struct Params {
    w: Weight,
    rows: u32,
    // vec4s of a row of x (blocks, where it is int8); floats of a row of out.
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

@plain fn load(at: u32) -> Block {
@plain     return Block(x[at], x[at + 1u], x[at + 2u], x[at + 3u], x[at + 4u], x[at + 5u], x[at + 6u], x[at + 7u]);
@plain }

@plain fn chain(w: Block, v: Block, before: vec4<f32>) -> vec4<f32> {
@plain     var s = fma(w.a, v.a, before);
@plain     s = fma(w.b, v.b, s);
@plain     s = fma(w.c, v.c, s);
@plain     s = fma(w.d, v.d, s);
@plain     s = fma(w.e, v.e, s);
@plain     s = fma(w.f, v.f, s);
@plain     s = fma(w.g, v.g, s);
@plain     return fma(w.h, v.h, s);
@plain }

@plain fn store(row: u32, column: u32, sum: vec4<f32>) {
@packed fn store(row: u32, column: u32, sum: f32) {
    if (row >= p.rows || column >= p.outs) {
        return;
    }
    let at = row * p.out_stride + p.out_first + column;
@plain    var y = (sum.x + sum.y) + (sum.z + sum.w);
@packed    var y = sum;
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
