// A thread makes some rows of some output columns, as in linear_rows.wgsl.

@compute @workgroup_size(LANES)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_id) local: vec3<u32>) {
    let tile = group.x;
    let lane = local.x;
    let first = group.y * ROWS;
    if (idle(first, ROWS)) {
        return;
    }
@row    let at$r = min(first + $ru, p.rows - 1u) * p.x_stride;
@row@col    var sum$r_$c = 0.0;
    for (var b = 0u; b < p.w.blocks; b++) {
@col        let w$c = packed_at(tile, b, lane + $cu * LANES);
@row        let a$r = x[2u * (at$r + b)];
@row        let b$r = x[2u * (at$r + b) + 1u];
@row        let s$r = x_scales[at$r + b];
@row@col        sum$r_$c = more(w$c, a$r, b$r, s$r, sum$r_$c);
    }
@row@col    store(first + $ru, tile * TILE + lane + $cu * LANES, sum$r_$c);
}
