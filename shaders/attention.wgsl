// Paged causal attention with an online softmax over tiles of 16 keys, in ascending order from the
// tile of the first visible key: a row's result depends on its position and its sequence alone.
//
// A workgroup has 16 threads for each of HEADS query heads of one row. Thread t scores key t of the
// tile; then it owns the vec4s i = t (mod 16) of the head's output: lines marked @own stand for one
// line each.

@group(0) @binding(0) var<storage, read> arena: array<u32>;
@group(0) @binding(1) var<storage, read> q: array<f32>;
@group(0) @binding(2) var<storage, read> keys: array<vec4<f32>>;
@group(0) @binding(3) var<storage, read> values: array<vec4<f32>>;
@group(0) @binding(4) var<storage, read_write> out: array<f32>;

struct Params {
    // Arena offset of [position, offset of its block table] of each row.
    rows: u32,
    // Arena offset of the KV head (within this store) of each query head; NONE: another store's.
    heads_of: u32,
    heads: u32,
    // KV heads in this store.
    kv_heads: u32,
    block_tokens: u32,
    q_stride: u32,
    out_stride: u32,
    // 0: all.
    window: u32,
    scale: f32,
    // 0: none.
    softcap: f32,
}
var<immediate> p: Params;

const NONE = 0xffffffffu;
const LOWEST = -3.0e38;

var<workgroup> scores: array<f32, 16 * HEADS>;
var<workgroup> shares: array<f32, 16 * HEADS>;

fn query(at: u32, i: u32) -> vec4<f32> {
    let e = 4u * i;
    if (DIM % 4u == 0u) {
        return vec4<f32>(q[at + e], q[at + e + 1u], q[at + e + 2u], q[at + e + 3u]);
    }
    // The store is zero beyond DIM, so what is read there only has to be finite.
    let last = at + DIM - 1u;
    return vec4<f32>(q[at + e], q[min(at + e + 1u, last)], q[min(at + e + 2u, last)], q[min(at + e + 3u, last)]);
}

fn store(to: u32, i: u32, result: vec4<f32>) {
    for (var c = 0u; c < 4u; c++) {
        if (4u * i + c < DIM) {
            out[to + 4u * i + c] = result[c];
        }
    }
}

@compute @workgroup_size(16, HEADS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_id) local: vec3<u32>) {
    let t = local.x;
    let slot = local.y % HEADS;
    let row = group.y;
    let wanted = group.x * HEADS + slot;
    // Threads of a head past the last work along, so that barriers are met by all; so do those of
    // a head whose keys lie in another store.
    let head = min(wanted, p.heads - 1u);
    let kv_head = arena[p.heads_of + head];
    let here = wanted < p.heads && kv_head != NONE;
    let lane_head = select(0u, kv_head, here);
    let position = arena[p.rows + 2u * row];
    if (position == NONE) {
        return;
    }
    let table = arena[p.rows + 2u * row + 1u];
    var first = 0u;
    if (p.window != 0u && position + 1u > p.window) {
        first = position + 1u - p.window;
    }
    let origin = row * p.q_stride + head * DIM;

    // The first HELD vec4s of the query stay in registers, a line marked @held for each.
@held    let q$ = query(origin, $u);
    var top = LOWEST;
    var total = 0.0;
@own    var sum$ = vec4<f32>(0.0);
@own    // Past the head's end a thread works on some other element, and drops it.
@own    let own$ = min(t + 16u * $u, DIM4 - 1u);
    for (var tile = first / 16u; tile <= position / 16u; tile++) {
        let token = tile * 16u;
        let block = arena[table + token / p.block_tokens];
        let base = ((block * p.kv_heads + lane_head) * p.block_tokens + token % p.block_tokens) * DIM4;
        var score = LOWEST;
        if (token + t >= first && token + t <= position) {
            var s = vec4<f32>(0.0);
            let key = base + t * DIM4;
@held            s = fma(q$, keys[key + $u], s);
            for (var i = HELD; i < DIM4; i++) {
                s = fma(query(origin, i), keys[key + i], s);
            }
            score = ((s.x + s.y) + (s.z + s.w)) * p.scale;
            if (p.softcap != 0.0) {
                score = p.softcap * tanh_(score / p.softcap);
            }
        }
        scores[16u * slot + t] = score;
        workgroupBarrier();
        var next = top;
        for (var j = 0u; j < 16u; j++) {
            next = max(next, scores[16u * slot + j]);
        }
        shares[16u * slot + t] = exp_(score - next);
        workgroupBarrier();
        let keep = exp_(top - next);
        top = next;
        total *= keep;
@own        sum$ *= keep;
        // Slots that were never written may hold anything: they are not read.
        let begin = max(first, token) - token;
        let end = min(position, token + 15u) - token;
        for (var j = begin; j <= end; j++) {
            let share = shares[16u * slot + j];
            total += share;
@own            sum$ = fma(vec4<f32>(share), values[base + j * DIM4 + own$], sum$);
        }
    }
    let to = row * p.out_stride + head * DIM;
    if (here) {
@own        store(to, t + 16u * $u, sum$ / total);
    }
}
