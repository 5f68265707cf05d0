// What each piece of each row holds: (order of the greatest logit, the lowest id that has it, whether
// something is not finite).

@group(0) @binding(0) var<storage, read> logits: array<u32>;
@group(0) @binding(1) var<storage, read_write> parts: array<vec4<u32>>;

struct Params {
    cols: u32,
    stride: u32,
    pieces: u32,
    // Zero where something was added since the first scan: what that found counts on, and
    // -infinity is a token that was forbidden.
    first: u32,
}
var<immediate> p: Params;

const PIECE = 4096u;

var<workgroup> found: array<vec3<u32>, 64>;

fn better(a: vec3<u32>, b: vec3<u32>) -> vec3<u32> {
    let b_wins = b.x > a.x || (b.x == a.x && b.y < a.y);
    return vec3<u32>(select(a.xy, b.xy, b_wins), a.z | b.z);
}

@compute @workgroup_size(64)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(local_invocation_id) local: vec3<u32>,
@subgroup    @builtin(subgroup_id) subgroup: u32,
@subgroup    @builtin(num_subgroups) subgroups: u32,
@subgroup    @builtin(subgroup_invocation_id) lane: u32,
) {
    let t = local.x;
    let end = min((group.x + 1u) * PIECE, p.cols);
    var best = vec3<u32>(0u, NONE, 0u);
    for (var i = group.x * PIECE + t; i < end; i += 64u) {
        let bits = logits[group.y * p.stride + i];
        let bad = !is_finite(bits) && (p.first != 0u || bits != MINUS_INFINITY);
        best = better(best, vec3<u32>(order(bits), i, u32(bad)));
    }
@plain    let members = 64u;
@plain    found[t] = best;
@subgroup    let members = subgroups;
@subgroup    let top = subgroupMax(best.x);
@subgroup    let id = subgroupMin(select(NONE, best.y, best.x == top));
@subgroup    let bad = subgroupMax(best.z);
@subgroup    if (lane == 0u) {
@subgroup        found[subgroup] = vec3<u32>(top, id, bad);
@subgroup    }
    workgroupBarrier();
    if (t == 0u) {
        var all = found[0];
        for (var i = 1u; i < members; i++) {
            all = better(all, found[i]);
        }
        let at = group.y * p.pieces + group.x;
        if (p.first == 0u) {
            all.z |= parts[at].z;
        }
        parts[at] = vec4<u32>(all, 0u);
    }
}
