// Paged causal attention with an online softmax over tiles of 16 keys, in ascending order from the
// tile of the first visible key, and begun anew at every multiple of SPLIT keys: what splits give is
// merged in ascending order (merge.wgsl), here or, so that a long context fills an adapter, by
// attention_merge.wgsl. So a row's result depends on its position and its sequence alone.
//
// A workgroup has 16 threads for each of SLOTS groups of QUERIES query heads that read one KV head.
// Thread t scores key t of the tile; then it owns the vec4s i = t (mod 16) of the heads' output.
// Lines marked @own stand for one line each, @held for one line each vec4 of the query that stays in
// registers, @q for one line each query head of the group.
//
// Keys and values are kept as kv/*.wgsl has it; lines marked @scaled are for types whose heads have a
// scale.

@group(0) @binding(0) var<storage, read> arena: array<u32>;
@group(0) @binding(1) var<storage, read> q: array<f32>;
@group(0) @binding(2) var<storage, read> keys: array<Kept>;
@group(0) @binding(3) var<storage, read> values: array<Kept>;
// The result, or the splits' results: [row][head][split][largest score, sum of shares, -, -, elements].
@group(0) @binding(4) var<storage, read_write> out: array<f32>;

struct Params {
    // Arena offset of the rows.
    rows: u32,
    // Arena offset of [KV head (within this store), query heads] of each group; NONE: no more heads.
    groups_of: u32,
    groups: u32,
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
    // Query heads, and splits that each has room for.
    heads: u32,
    splits: u32,
}
var<immediate> p: Params;

var<workgroup> scores: array<f32, 16 * SLOTS * QUERIES>;
var<workgroup> shares: array<f32, 16 * SLOTS * QUERIES>;

fn query(at: u32, i: u32) -> vec4<f32> {
    let e = 4u * i;
    if (DIM % 4u == 0u) {
        return vec4<f32>(q[at + e], q[at + e + 1u], q[at + e + 2u], q[at + e + 3u]);
    }
    // The store is zero beyond DIM, so what is read there only has to be finite.
    let last = at + DIM - 1u;
    return vec4<f32>(q[at + e], q[min(at + e + 1u, last)], q[min(at + e + 2u, last)], q[min(at + e + 3u, last)]);
}

fn capped(dot: vec4<f32>) -> f32 {
    let score = ((dot.x + dot.y) + (dot.z + dot.w)) * p.scale;
    if (p.softcap == 0.0) {
        return score;
    }
    return p.softcap * tanh_(score / p.softcap);
}

@whole fn store(to: u32, i: u32, result: vec4<f32>) {
@whole    for (var c = 0u; c < 4u; c++) {
@whole        if (4u * i + c < DIM) {
@whole            out[to + 4u * i + c] = result[c];
@whole        }
@whole    }
@whole }
@part fn store(to: u32, i: u32, result: vec4<f32>) {
@part    if (i < DIM4) {
@part        for (var c = 0u; c < 4u; c++) {
@part            out[to + 4u + 4u * i + c] = result[c];
@part        }
@part    }
@part }

@compute @workgroup_size(16, SLOTS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_id) local: vec3<u32>) {
    let t = local.x;
    let slot = local.y % SLOTS;
    let row = group.y;
    let blocks_of_groups = (p.groups + SLOTS - 1u) / SLOTS;
    let wanted = (group.x % blocks_of_groups) * SLOTS + slot;
    // Threads of a group past the last work along, so that barriers are met by all.
    let at = p.groups_of + (QUERIES + 1u) * min(wanted, p.groups - 1u);
    let kv_head = arena[at];
    let own = row_at(p.rows + ROW_WORDS * row);
    if (own.slot == NONE) {
        return;
    }
    let first = first_key(own, p.window);
@whole    let begin_split = first / SPLIT;
@whole    let end_split = own.slot / SPLIT;
@part    let begin_split = group.x / blocks_of_groups;
@part    let end_split = begin_split;
@part    if (begin_split < first / SPLIT || begin_split > own.slot / SPLIT) {
@part        return;
@part    }
@q    let named$q = arena[at + 1u + $qu];
@q    // A group's missing heads repeat its first one, and drop what comes of it.
@q    let head$q = select(named$q, arena[at + 1u], named$q == NONE);
@q    let origin$q = row * p.q_stride + head$q * DIM;
@held{
@q    let q$q_$h = query(origin$q, $hu);
@}
@q    var top$q = LOWEST;
@q    var total$q = 0.0;
@own{
@q    var sum$q_$o = vec4<f32>(0.0);
    // Past the head's end a thread works on some other element, and drops it.
    let own$o = min(t + 16u * $ou, DIM4 - 1u);
@}
    for (var split = begin_split; split <= end_split; split++) {
@q        var t$q = LOWEST;
@q        var l$q = 0.0;
@own{
@q        var s$q_$o = vec4<f32>(0.0);
@}
        let begin_tile = max(first, split * SPLIT) / 16u;
        let end_tile = min(own.slot, split * SPLIT + SPLIT - 1u) / 16u;
        for (var tile = begin_tile; tile <= end_tile; tile++) {
            let token = tile * 16u;
            let block = arena[own.table + token / p.block_tokens];
            let base = ((block * p.kv_heads + kv_head) * p.block_tokens + token % p.block_tokens) * STRIDE;
@q            var score$q = LOWEST;
            if (token + t >= first && sees(own, token + t)) {
                let key = base + t * STRIDE;
@q                var d$q = vec4<f32>(0.0);
@held{
                let k$h = floats(keys[key + $hu]);
@q                d$q = fma(q$q_$h, k$h, d$q);
@}
                for (var i = HELD; i < DIM4; i++) {
                    let k = floats(keys[key + i]);
@q                    d$q = fma(query(origin$q, i), k, d$q);
                }
@scaled@q                d$q *= bitcast<f32>(keys[key + DIM4]);
@q                score$q = capped(d$q);
            }
@q            let row$q = 16u * (QUERIES * slot + $qu);
@q            scores[row$q + t] = score$q;
            workgroupBarrier();
@q            var next$q = t$q;
            for (var j = 0u; j < 16u; j++) {
@q                next$q = max(next$q, scores[row$q + j]);
            }
@q            shares[row$q + t] = exp_(score$q - next$q);
            workgroupBarrier();
@q            let keep$q = exp_(t$q - next$q);
@q            t$q = next$q;
@q            l$q *= keep$q;
@own{
@q            s$q_$o *= keep$q;
@}
            // Slots that were never written may hold anything: they are not read.
            let begin = max(first, token) - token;
            let end = min(own.slot, token + 15u) - token;
            for (var j = begin; j <= end; j++) {
@q                var share$q = shares[row$q + j];
@q                l$q += share$q;
@scaled                let scale = bitcast<f32>(values[base + j * STRIDE + DIM4]);
@scaled@q                share$q *= scale;
@own{
                let v$o = floats(values[base + j * STRIDE + own$o]);
@q                s$q_$o = fma(vec4<f32>(share$q), v$o, s$q_$o);
@}
            }
        }
        let fresh = split == begin_split;
@q        let m$q = merging(top$q, t$q, fresh);
@q        total$q = merged(m$q, vec4<f32>(total$q), vec4<f32>(l$q)).x;
@q        top$q = m$q.z;
@own{
@q        sum$q_$o = merged(m$q, sum$q_$o, s$q_$o);
@}
    }
    if (wanted < p.groups) {
@whole@q        let to$q = row * p.out_stride + head$q * DIM;
@part@q        let to$q = ((row * p.heads + head$q) * p.splits + begin_split) * (4u * DIM4 + 4u);
@own{
@whole@q        if (named$q != NONE) { store(to$q, t + 16u * $ou, sum$q_$o / total$q); }
@part@q        if (named$q != NONE) { store(to$q, t + 16u * $ou, sum$q_$o); }
@}
@part@q        if (named$q != NONE && t == 0u) { out[to$q] = top$q; out[to$q + 1u] = total$q; }
    }
}
