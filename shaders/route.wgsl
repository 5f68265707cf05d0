// Shares of the experts of each row: softmax of the router's row, zero but for the top_k likeliest
// (ties: the lower index), divided by their sum where `normalise` is set. A thread does one row.

@group(0) @binding(0) var<storage, read> router: array<f32>;
@group(0) @binding(1) var<storage, read_write> shares: array<f32>;

struct Params {
    rows: u32,
    experts: u32,
    // Floats of a row, of router and shares alike.
    stride: u32,
    top_k: u32,
    normalise: u32,
}
var<immediate> p: Params;

@compute @workgroup_size(32)
fn main(@builtin(global_invocation_id) id: vec3<u32>) {
    if (id.x >= p.rows) {
        return;
    }
    let at = id.x * p.stride;
    var top = router[at];
    for (var e = 1u; e < p.experts; e++) {
        top = max(top, router[at + e]);
    }
    var all = 0.0;
    for (var e = 0u; e < p.experts; e++) {
        all += exp_(router[at + e] - top);
        shares[at + e] = 0.0;
    }
    var chosen = 0.0;
    for (var n = 0u; n < p.top_k; n++) {
        var best = p.experts;
        for (var e = 0u; e < p.experts; e++) {
            // A chosen expert's share is not zero, see below.
            if (shares[at + e] == 0.0 && (best == p.experts || router[at + e] > router[at + best])) {
                best = e;
            }
        }
        // Never zero: zero means not chosen.
        let share = max(exp_(router[at + best] - top), 1.0e-30);
        shares[at + best] = share;
        chosen += share;
    }
    let whole = select(all, chosen, p.normalise != 0u);
    for (var e = 0u; e < p.experts; e++) {
        shares[at + e] /= whole;
    }
}
