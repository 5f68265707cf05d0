// The token of each row, by a workgroup: greedy, or by temperature, min-p, top-k and top-p. Nothing
// is sorted: top-k and top-p look for the step (of a halving) where the count or the weight of the
// likelier tokens reaches what is wanted, two bits at a time; among tokens of equal steps lower ids
// come first.

@group(0) @binding(0) var<storage, read> arena: array<u32>;
@group(0) @binding(1) var<storage, read> logits: array<u32>;
@group(0) @binding(2) var<storage, read> parts: array<vec4<u32>>;
@group(0) @binding(3) var<storage, read_write> results: array<u32>;

struct Params {
    // Arena offset of [mode, scale, bound, top_k, whether top_p, its share, random (low, high)] of
    // each row.
    draws: u32,
    cols: u32,
    stride: u32,
    pieces: u32,
}
var<immediate> p: Params;

const GREEDY = 0u;
const SKIP = 2u;
const THREADS = 128u;
const NEVER = 0x7e000000u;

// What is kept: fewer steps than `limit`, or as many and an id of at most `last`.
struct Kept {
    origin: u32,
    greatest: f32,
    scale: f32,
    limit: u32,
    last: u32,
}

// Whole numbers of 64 bits: (low, high).
var<workgroup> sums: array<vec2<u32>, 384>;
var<workgroup> totals: array<vec2<u32>, 3>;
var<workgroup> found: u32;

fn add(a: vec2<u32>, b: vec2<u32>) -> vec2<u32> {
    let low = a.x + b.x;
    return vec2<u32>(low, a.y + b.y + select(0u, 1u, low < a.x));
}

fn minus(a: vec2<u32>, b: vec2<u32>) -> vec2<u32> {
    return vec2<u32>(a.x - b.x, a.y - b.y - select(0u, 1u, a.x < b.x));
}

fn less(a: vec2<u32>, b: vec2<u32>) -> bool {
    return a.y < b.y || (a.y == b.y && a.x < b.x);
}

fn product(a: u32, b: u32) -> vec2<u32> {
    let ll = (a & 0xffffu) * (b & 0xffffu);
    let lh = (a & 0xffffu) * (b >> 16u);
    let hl = (a >> 16u) * (b & 0xffffu);
    let middle = (ll >> 16u) + (lh & 0xffffu) + (hl & 0xffffu);
    let high = (a >> 16u) * (b >> 16u) + (lh >> 16u) + (hl >> 16u) + (middle >> 16u);
    return vec2<u32>((ll & 0xffffu) | (middle << 16u), high);
}

// The upper 64 bits of a product.
fn high_product(a: vec2<u32>, b: vec2<u32>) -> vec2<u32> {
    let m = product(a.x, b.y);
    let n = product(a.y, b.x);
    let low = add(add(vec2<u32>(product(a.x, b.x).y, 0u), vec2<u32>(m.x, 0u)), vec2<u32>(n.x, 0u));
    let high = add(add(product(a.y, b.y), vec2<u32>(low.y, 0u)), vec2<u32>(m.y, 0u));
    return add(high, vec2<u32>(n.y, 0u));
}

// r * x / 2^16
fn scaled(r: u32, x: u32) -> u32 {
    return (r >> 16u) * x + (((r & 0xffffu) * x) >> 16u);
}

// 2^(40 - steps / 2^25)
fn weight(steps: u32) -> vec2<u32> {
    let fraction = steps & 0x1ffffffu;
    let x = 65536u - (fraction >> 9u);
    var m = 9620607u + scaled(2034856u, x);
    m = 59953470u + scaled(m, x);
    m = 257867405u + scaled(m, x);
    m = 744265486u + scaled(m, x);
    m = 1073741824u + scaled(m, x);
    m -= ((((m >> 15u) * (fraction & 511u)) >> 9u) * 45426u) >> 17u;
    let low = m << 9u;
    let high = m >> 23u;
    let n = steps >> 25u;
    if (n == 0u) {
        return vec2<u32>(low, high);
    }
    if (n < 32u) {
        return vec2<u32>((low >> n) | (high << (32u - n)), high >> n);
    }
    return vec2<u32>(high >> (n - 32u), 0u);
}

fn steps_of(k: Kept, id: u32) -> u32 {
    let bits = logits[k.origin + id];
    let halvings = min((k.greatest - bitcast<f32>(bits)) * k.scale, 63.0);
    return select(u32(halvings * 33554432.0), NEVER, bits == MINUS_INFINITY);
}

fn keeps(k: Kept, steps: u32, id: u32) -> bool {
    return steps < k.limit || (steps == k.limit && id <= k.last);
}

fn unit(steps: u32, by_weight: bool) -> vec2<u32> {
    if (by_weight) {
        return weight(steps);
    }
    return vec2<u32>(1u, 0u);
}

// Adds up what each thread brings, into `totals`.
fn reduce(t: u32, a: vec2<u32>, b: vec2<u32>, c: vec2<u32>) {
    sums[3u * t] = a;
    sums[3u * t + 1u] = b;
    sums[3u * t + 2u] = c;
    workgroupBarrier();
    if (t < 3u) {
        var sum = vec2<u32>(0u);
        for (var i = t; i < 3u * THREADS; i += 3u) {
            sum = add(sum, sums[i]);
        }
        totals[t] = sum;
    }
    workgroupBarrier();
}

// All that is kept.
fn total(t: u32, k: Kept, by_weight: bool) -> vec2<u32> {
    var sum = vec2<u32>(0u);
    for (var id = t; id < p.cols; id += THREADS) {
        let steps = steps_of(k, id);
        if (keeps(k, steps, id)) {
            sum = add(sum, unit(steps, by_weight));
        }
    }
    reduce(t, sum, vec2<u32>(0u), vec2<u32>(0u));
    return totals[0];
}

// (fewest steps up to which tokens hold `need`, what those with fewer steps hold)
fn search(t: u32, k: Kept, need: vec2<u32>, by_weight: bool) -> vec3<u32> {
    var prefix = 0u;
    var before = vec2<u32>(0u);
    for (var round = 0u; round < 16u; round++) {
        let shift = 30u - 2u * round;
        let above = ~((4u << shift) - 1u);
        var a = vec2<u32>(0u);
        var b = vec2<u32>(0u);
        var c = vec2<u32>(0u);
        for (var id = t; id < p.cols; id += THREADS) {
            let steps = steps_of(k, id);
            if ((steps & above) == prefix && keeps(k, steps, id)) {
                let digit = (steps >> shift) & 3u;
                let more = unit(steps, by_weight);
                a = add(a, select(vec2<u32>(0u), more, digit == 0u));
                b = add(b, select(vec2<u32>(0u), more, digit == 1u));
                c = add(c, select(vec2<u32>(0u), more, digit == 2u));
            }
        }
        reduce(t, a, b, c);
        var digit = 0u;
        for (; digit < 3u; digit++) {
            let next = add(before, totals[digit]);
            if (!less(next, need)) {
                break;
            }
            before = next;
        }
        prefix |= digit << shift;
    }
    return vec3<u32>(prefix, before);
}

// What all threads before this one hold, of what each wrote into `sums[thread]`.
fn held_before(t: u32) -> vec2<u32> {
    var sum = vec2<u32>(0u);
    for (var i = 0u; i < t; i++) {
        sum = add(sum, sums[i]);
    }
    return sum;
}

// The id of the `count`th kept token of exactly so many steps. Threads own runs of ids.
fn nth(t: u32, k: Kept, steps: u32, count: u32) -> u32 {
    let each = (p.cols + THREADS - 1u) / THREADS;
    let begin = min(t * each, p.cols);
    let end = min(begin + each, p.cols);
    var own = 0u;
    for (var id = begin; id < end; id++) {
        own += u32(steps_of(k, id) == steps && keeps(k, steps, id));
    }
    if (t == 0u) {
        found = NONE;
    }
    sums[t] = vec2<u32>(own, 0u);
    workgroupBarrier();
    var rest = count - held_before(t).x;
    if (rest >= 1u && rest <= own) {
        for (var id = begin; id < end; id++) {
            rest -= u32(steps_of(k, id) == steps && keeps(k, steps, id));
            if (rest == 0u) {
                found = id;
                break;
            }
        }
    }
    workgroupBarrier();
    let result = found;
    workgroupBarrier();
    return result;
}

// The fewest tokens of this weight that hold `need`; at least one.
fn fewest(each: vec2<u32>, need: vec2<u32>) -> u32 {
    var too_few = 0u;
    var enough = 0x400000u;
    while (enough - too_few > 1u) {
        let middle = (enough + too_few) / 2u;
        let all = add(product(each.x, middle), vec2<u32>(0u, each.y * middle));
        if (less(all, need)) {
            too_few = middle;
        } else {
            enough = middle;
        }
    }
    return enough;
}

@compute @workgroup_size(128)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_id) local: vec3<u32>) {
    let t = local.x;
    let row = group.x;
    let at = p.draws + 8u * row;
    let mode = arena[at];
    if (mode == SKIP) {
        return;
    }
    var best = vec4<u32>(0u, NONE, 0u, 0u);
    for (var i = 0u; i < p.pieces; i++) {
        let part = parts[row * p.pieces + i];
        // Pieces ascend, so the first of equals has the lowest id.
        if (part.x > best.x) {
            best = vec4<u32>(part.xy, best.zw);
        }
        best.z |= part.z;
    }
    let sound = best.z == 0u && best.y != NONE && is_finite(ordered(best.x));
    if (!sound || mode == GREEDY) {
        if (t == 0u) {
            results[row] = select(NONE, best.y, sound);
        }
        return;
    }
    let greatest = bitcast<f32>(ordered(best.x));
    var k = Kept(row * p.stride, greatest, bitcast<f32>(arena[at + 1u]), arena[at + 2u], NONE);
    if (arena[at + 3u] != 0u) {
        let count = min(arena[at + 3u], total(t, k, false).x);
        let cut = search(t, k, vec2<u32>(count, 0u), false);
        k.last = nth(t, k, cut.x, count - cut.y);
        k.limit = cut.x;
    }
    if (arena[at + 4u] != 0u) {
        let all = total(t, k, true);
        let share = arena[at + 5u];
        let low = product(all.x, share);
        let need = add(product(all.y, share), vec2<u32>(low.y + select(0u, 1u, low.x != 0u), 0u));
        let cut = search(t, k, need, true);
        k.last = nth(t, k, cut.x, fewest(weight(cut.x), minus(need, cut.yz)));
        k.limit = cut.x;
    }
    // Threads own runs of ids, and the random number falls into one of them.
    let each = (p.cols + THREADS - 1u) / THREADS;
    let begin = min(t * each, p.cols);
    let end = min(begin + each, p.cols);
    var own = vec2<u32>(0u);
    for (var id = begin; id < end; id++) {
        let steps = steps_of(k, id);
        if (keeps(k, steps, id)) {
            own = add(own, weight(steps));
        }
    }
    if (t == 0u) {
        found = NONE;
    }
    sums[t] = own;
    workgroupBarrier();
    let random = vec2<u32>(arena[at + 6u], arena[at + 7u]);
    let target_ = high_product(random, held_before(THREADS));
    let before = held_before(t);
    if (!less(target_, before) && less(target_, add(before, own))) {
        var rest = minus(target_, before);
        for (var id = begin; id < end; id++) {
            let steps = steps_of(k, id);
            if (keeps(k, steps, id)) {
                let w = weight(steps);
                if (less(rest, w)) {
                    found = id;
                    break;
                }
                rest = minus(rest, w);
            }
        }
    }
    workgroupBarrier();
    if (t == 0u) {
        results[row] = found;
    }
}
