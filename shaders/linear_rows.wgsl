// Without a barrier: a thread makes some rows of some output columns. Software adapters are fast at
// it. A line marked @row stands for one line a row, one marked @col for one a column; $r and $c are
// their numbers.

@compute @workgroup_size(LANES)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_id) local: vec3<u32>) {
    let tile = group.x;
    let lane = local.x;
    let first = group.y * ROWS;
    if (idle(first, ROWS)) {
        return;
    }
@row    let at$r = min(first + $ru, p.rows - 1u) * p.x_stride;
@row@col    var total$r_$c = vec4<f32>(0.0);
    for (var segment = 0u; segment < p.w.blocks; segment += 8u) {
@row@col        var sum$r_$c = vec4<f32>(0.0);
        for (var b = segment; b < min(segment + 8u, p.w.blocks); b++) {
@col            let w$c = block_at(tile, b, lane + $cu * LANES);
@row            let v$r = load(at$r + 8u * b);
@row@col            sum$r_$c = chain(w$c, v$r, sum$r_$c);
        }
@row@col        total$r_$c += sum$r_$c;
    }
@row@col    store(first + $ru, tile * TILE + lane + $cu * LANES, total$r_$c);
}
