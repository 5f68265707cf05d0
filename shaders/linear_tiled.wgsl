// Many rows: a workgroup makes 32 rows of 32 output columns. Its threads unpack four blocks of each
// column into workgroup memory, then each makes eight rows of one column from them. Lines marked
// @row stand for one line a row. Float16 weights may lie there as what they are (Held), where the adapter
// has float16 of its own: half the memory, the same bits.

// [block][vec4][column]: 16 KiB, what every adapter has.
var<workgroup> unpacked: array<Held, 1024>;

fn held(i: u32) -> vec4<f32> {
    return vec4<f32>(unpacked[i]);
}

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
@row    var total$r = vec4<f32>(0.0);
    for (var segment = 0u; segment < p.w.blocks; segment += 8u) {
@row        var sum$r = vec4<f32>(0.0);
        for (var begin = segment; begin < min(segment + 8u, p.w.blocks); begin += 4u) {
            workgroupBarrier();
            if (begin + part < p.w.blocks) {
                let w = block_at(tile, begin + part, lane);
                let to = 256u * part + lane;
                unpacked[to] = Held(w.a);
                unpacked[to + 32u] = Held(w.b);
                unpacked[to + 64u] = Held(w.c);
                unpacked[to + 96u] = Held(w.d);
                unpacked[to + 128u] = Held(w.e);
                unpacked[to + 160u] = Held(w.f);
                unpacked[to + 192u] = Held(w.g);
                unpacked[to + 224u] = Held(w.h);
            }
            workgroupBarrier();
            for (var b = begin; b < min(begin + 4u, p.w.blocks); b++) {
                let i = 256u * (b - begin) + lane;
                let w = Block(
                    held(i), held(i + 32u), held(i + 64u), held(i + 96u),
                    held(i + 128u), held(i + 160u), held(i + 192u), held(i + 224u),
                );
@row                sum$r = chain(w, load(at$r + 8u * b), sum$r);
            }
        }
@row        total$r += sum$r;
    }
@row    store(first + $ru, tile * TILE + lane, total$r);
}
