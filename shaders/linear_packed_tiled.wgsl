// Many rows: a workgroup makes 32 rows of 32 output columns, as in linear_tiled.wgsl. What it unpacks into
// workgroup memory are bytes.

// [block][column]
var<workgroup> firsts: array<vec4<u32>, 128>;
var<workgroup> seconds: array<vec4<u32>, 128>;
// Both scales, and what is added.
var<workgroup> factors: array<vec3<f32>, 128>;

@compute @workgroup_size(32, 4)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_id) local: vec3<u32>) {
    let tile = group.x;
    let lane = local.x;
    let part = local.y;
    if (idle(32u * group.y, 32u)) {
        return;
    }
    let first = 32u * group.y + 8u * part;
@row    let at$r = min(first + $ru, p.rows - 1u) * p.x_stride;
@row    var sum$r = 0.0;
    for (var begin = 0u; begin < p.w.blocks; begin += 4u) {
        workgroupBarrier();
        if (begin + part < p.w.blocks) {
            let w = packed_at(tile, begin + part, lane);
            let to = 32u * part + lane;
            firsts[to] = w.first;
            seconds[to] = w.second;
            factors[to] = vec3<f32>(w.scale, w.low);
        }
        workgroupBarrier();
        for (var b = begin; b < min(begin + 4u, p.w.blocks); b++) {
            let i = 32u * (b - begin) + lane;
            let w = Packed(firsts[i], seconds[i], factors[i].xy, factors[i].z);
@row            let block$r = at$r + b;
@row            sum$r = more(w, x[2u * block$r], x[2u * block$r + 1u], x_scales[block$r], sum$r);
        }
    }
@row    store(first + $ru, tile * TILE + lane, sum$r);
}
