//! One span of 64 keys, for all queries that walk it together: scores, the step of the softmax, and the
//! sum of values.

// Indices run over several register arrays at once, whose loops the compiler unrolls.
#![allow(clippy::needless_range_loop)]

use super::Attend;
use crate::activations::ActBlock;
use crate::element::{Element, KvElement};
use crate::lanes::{LANES, Lanes, load_part, store_part};
use crate::math::{exp, tanh};
use dunlin_backend::KV_TILE;
use std::ops::Range;

/// Tiles of one step of the softmax.
pub(super) const SPAN_TILES: usize = 4;
pub(super) const SPAN: usize = SPAN_TILES * KV_TILE;

/// Scores of a query with the keys of a span, then the weights of its values.
pub(super) type Weights = [f32; SPAN];

/// One head of one row, and how far its softmax has come.
#[derive(Clone, Copy)]
pub(super) struct Query<L> {
    pub q: *const f32,
    /// Where the result goes; holds the running sum until then.
    pub out: *mut f32,
    /// Its first block of int8, and the step to the next; no step where none is wanted.
    pub acts: *mut ActBlock,
    pub step: usize,
    /// Visible keys are `first..=position`.
    pub first: usize,
    pub position: usize,
    pub largest: f32,
    /// The largest score of the span at hand.
    pub here: f32,
    /// Sum of weights, per lane.
    pub sums: L,
}

impl<L> Query<L> {
    /// The visible keys of the span that starts at `start`.
    #[inline(always)]
    fn seen(&self, start: usize) -> Range<usize> {
        let first = self.first.saturating_sub(start).min(SPAN);
        first..(self.position + 1).saturating_sub(start).min(SPAN).max(first)
    }
}

/// Where the keys of one span lie. Tiles behind the last visible one repeat it.
#[derive(Clone, Copy)]
pub(super) struct Span {
    pub start: usize,
    pub keys: [*const u8; SPAN_TILES],
    pub values: [*const u8; SPAN_TILES],
    /// From one token's values to the next.
    pub value_stride: usize,
    pub key_scales: [*const f32; SPAN_TILES],
    pub value_scales: [*const f32; SPAN_TILES],
}

/// Runs `$body` for groups of `$n` queries, from `$first` on, until all `$count` are done.
macro_rules! in_groups {
    ($lanes:ident, $count:expr, $first:ident, $n:ident => $body:expr) => {{
        let mut $first = 0;
        if $lanes::REGISTERS >= 32 {
            const $n: usize = 6;
            while $count - $first >= $n {
                $body;
                $first += $n;
            }
        }
        if $lanes::REGISTERS >= 8 {
            const $n: usize = 3;
            while $count - $first >= $n {
                $body;
                $first += $n;
            }
        }
        const $n: usize = 1;
        while $first < $count {
            $body;
            $first += $n;
        }
    }};
}

/// Scores of all queries with the keys of the span, which are elements `E`.
///
/// # Safety
/// As [`super::attend`]; the span's tiles have 16 tokens of `d` elements each.
#[inline(always)]
pub(super) unsafe fn products<L: Lanes, E: Element>(
    d: usize,
    span: &Span,
    queries: &[Query<L>],
    scores: &mut [Weights],
) {
    in_groups!(L, queries.len(), first, N => {
        let some: [&Query<L>; N] = std::array::from_fn(|n| &queries[first + n]);
        let scores = &mut scores[first..first + N];
        let seen = some.map(|q| q.seen(span.start));
        let high = seen.iter().filter(|s| !s.is_empty()).map(|s| s.end).max().unwrap_or(0);
        if high > 0 {
            let q = some.map(|q| q.q);
            // SAFETY: the caller's promise.
            unsafe {
                if L::REGISTERS >= 32 || N == 1 {
                    dots::<L, E, N, SPAN_TILES>(d, span, 0, q, scores);
                } else {
                    for m in (0..high.div_ceil(KV_TILE)).step_by(2) {
                        dots::<L, E, N, 2>(d, span, m, q, scores);
                    }
                }
            }
        }
    });
}

/// Products of `N` queries with the keys of tiles `first..first + M` of the span.
///
/// # Safety
/// As [`products`].
#[inline(always)]
unsafe fn dots<L: Lanes, E: Element, const N: usize, const M: usize>(
    d: usize,
    span: &Span,
    first: usize,
    q: [*const f32; N],
    scores: &mut [Weights],
) {
    let mut acc = [[L::splat(0.0); N]; M];
    let keys: [*const u8; M] = std::array::from_fn(|m| span.keys[first + m]);
    for e in 0..d {
        // SAFETY: element `e` of the tiles' keys and of the queries.
        unsafe {
            let mut k = [L::splat(0.0); M];
            for m in 0..M {
                k[m] = E::load::<L>(keys[m].add(e * LANES * E::BYTES));
            }
            for n in 0..N {
                let q = L::splat(*q[n].add(e));
                for m in 0..M {
                    acc[m][n] = k[m].fma(q, acc[m][n]);
                }
            }
        }
    }
    for n in 0..N {
        for m in 0..M {
            // SAFETY: a tile has 16 scores.
            unsafe { acc[m][n].store(scores[n][(first + m) * KV_TILE..].as_mut_ptr()) };
        }
    }
}

/// Takes the span's scores into the softmaxes, and puts the weights of its values in their place.
///
/// # Safety
/// As [`super::attend`].
#[inline(always)]
pub(super) unsafe fn soften<L: Lanes, E: KvElement>(
    a: &Attend<'_>,
    span: &Span,
    queries: &mut [Query<L>],
    weights: &mut [Weights],
) {
    // First all maxima, then all weights: neither query waits for the other's.
    for (query, weights) in queries.iter_mut().zip(&mut *weights) {
        let seen = query.seen(span.start);
        if !seen.is_empty() {
            // SAFETY: the caller's promise.
            query.here = unsafe { scale::<L, E>(a, span, &seen, weights) };
        }
    }
    for (query, weights) in queries.iter_mut().zip(weights) {
        if !query.seen(span.start).is_empty() {
            // SAFETY: the caller's promise.
            unsafe {
                let shrink = weigh::<L, E>(span, query, weights);
                if shrink != 1.0 {
                    multiply(query.out, a.layout.head_dim, L::splat(shrink));
                }
            }
        }
    }
}

/// Scales and caps the scores of one query, hides those of keys that it does not see, and gives the
/// largest.
///
/// # Safety
/// As [`super::attend`].
#[inline(always)]
unsafe fn scale<L: Lanes, E: KvElement>(
    a: &Attend<'_>,
    span: &Span,
    seen: &Range<usize>,
    scores: &mut Weights,
) -> f32 {
    let scale = L::splat(a.params.scale);
    let mut s = [L::splat(0.0); SPAN_TILES];
    // SAFETY: a tile has 16 scores, and 16 scales where elements have them.
    unsafe {
        for m in 0..SPAN_TILES {
            s[m] = L::load(scores[m * KV_TILE..].as_ptr());
            if E::SCALED {
                s[m] = s[m].mul(L::load(span.key_scales[m]));
            }
            s[m] = s[m].mul(scale);
        }
        if let Some(cap) = a.params.softcap {
            s = s.map(|s| tanh(s.div(L::splat(cap))).mul(L::splat(cap)));
        }
        if *seen != (0..SPAN) {
            for m in 0..SPAN_TILES {
                let start = m * KV_TILE;
                let (lo, hi) = (seen.start.saturating_sub(start), seen.end.saturating_sub(start));
                let hidden = L::splat(f32::NEG_INFINITY);
                s[m] = s[m].keep(lo.min(KV_TILE), hi.min(KV_TILE), hidden);
            }
        }
        for m in 0..SPAN_TILES {
            s[m].store(scores[m * KV_TILE..].as_mut_ptr());
        }
    }
    s[0].max(s[1]).max(s[2].max(s[3])).largest()
}

/// Turns the scores of one query into weights, and gives what its sum so far is multiplied with.
///
/// # Safety
/// As [`super::attend`].
#[inline(always)]
unsafe fn weigh<L: Lanes, E: KvElement>(
    span: &Span,
    query: &mut Query<L>,
    weights: &mut Weights,
) -> f32 {
    let largest = if query.largest > query.here { query.largest } else { query.here };
    let mut p = [L::splat(0.0); SPAN_TILES];
    for m in 0..SPAN_TILES {
        // SAFETY: a tile has 16 scores.
        let s = unsafe { L::load(weights[m * KV_TILE..].as_ptr()) };
        p[m] = exp(s.sub(L::splat(largest)));
    }
    // `exp(0)` is 1, and multiplying by 1 changes no bit, so an unchanged maximum costs nothing.
    let shrink = match largest == query.largest {
        true => 1.0,
        false => exp(L::splat(query.largest - largest)).largest(),
    };
    query.sums = query.sums.fma(L::splat(shrink), p[0].add(p[1]).add(p[2].add(p[3])));
    query.largest = largest;
    for m in 0..SPAN_TILES {
        // SAFETY: the tile has 16 scales, the array 16 floats for it.
        unsafe {
            if E::SCALED {
                p[m] = p[m].mul(L::load(span.value_scales[m]));
            }
            p[m].store(weights.as_mut_ptr().add(m * KV_TILE));
        }
    }
    shrink
}

/// Adds the span's values, which are elements `E`, times their weights to the sums of all queries.
///
/// # Safety
/// As [`products`].
#[inline(always)]
pub(super) unsafe fn add_values<L: Lanes, E: Element>(
    d: usize,
    span: &Span,
    queries: &[Query<L>],
    weights: &[Weights],
) {
    in_groups!(L, queries.len(), first, N => {
        let some: [&Query<L>; N] = std::array::from_fn(|n| &queries[first + n]);
        let weights: [&Weights; N] = std::array::from_fn(|n| &weights[first + n]);
        // SAFETY: the caller's promise.
        unsafe { add_group::<L, E, N>(d, span, some, weights) };
    });
}

/// [`add_values`] for `N` queries, each in the order of the keys: what only some see lies before and
/// behind what all see.
///
/// # Safety
/// As [`products`].
#[inline(always)]
unsafe fn add_group<L: Lanes, E: Element, const N: usize>(
    d: usize,
    span: &Span,
    queries: [&Query<L>; N],
    weights: [&Weights; N],
) {
    let seen = queries.map(|q| q.seen(span.start));
    let outs = queries.map(|q| q.out);
    let from = seen.iter().map(|s| s.start).max().unwrap_or(0).min(SPAN);
    let to = seen.iter().map(|s| s.end).min().unwrap_or(0).max(from);
    // SAFETY: the caller's promise.
    unsafe {
        if seen.iter().all(|s| *s == (from..to)) {
            return add_keys::<L, E, N>(d, span, from..to, weights, outs);
        }
        for n in 0..N {
            let before = seen[n].start..seen[n].end.min(from);
            add_keys::<L, E, 1>(d, span, before, [weights[n]], [outs[n]]);
        }
        add_keys::<L, E, N>(d, span, from..to, weights, outs);
        for n in 0..N {
            let behind = seen[n].start.max(to)..seen[n].end;
            add_keys::<L, E, 1>(d, span, behind, [weights[n]], [outs[n]]);
        }
    }
}

/// `out += sum over j in seen of weights[j] * values[j]`, `j` ascending, for `N` queries.
///
/// # Safety
/// As [`products`]; the outputs have `d` floats.
#[inline(always)]
unsafe fn add_keys<L: Lanes, E: Element, const N: usize>(
    d: usize,
    span: &Span,
    seen: Range<usize>,
    weights: [&Weights; N],
    outs: [*mut f32; N],
) {
    if seen.is_empty() {
        return;
    }
    let mut e = 0;
    // SAFETY: elements below `d` of the outputs; values are padded to whole vectors.
    unsafe {
        if L::REGISTERS >= 32 || N == 1 {
            while e + 4 * LANES <= d {
                add_part::<L, E, N, 4>(span, &seen, weights, outs, e, 4 * LANES);
                e += 4 * LANES;
            }
        } else {
            while e + 2 * LANES <= d {
                add_part::<L, E, N, 2>(span, &seen, weights, outs, e, 2 * LANES);
                e += 2 * LANES;
            }
        }
        while e < d {
            let n = LANES.min(d - e);
            add_part::<L, E, N, 1>(span, &seen, weights, outs, e, n);
            e += n;
        }
    }
}

/// [`add_keys`] for the `width` elements from `e` on, which fill `V` vectors.
///
/// # Safety
/// As [`add_keys`].
#[inline(always)]
unsafe fn add_part<L: Lanes, E: Element, const N: usize, const V: usize>(
    span: &Span,
    seen: &Range<usize>,
    weights: [&Weights; N],
    outs: [*mut f32; N],
    e: usize,
    width: usize,
) {
    let part = |v: usize| LANES.min(width - v * LANES);
    let mut acc = [[L::splat(0.0); V]; N];
    // SAFETY: the caller's promise.
    unsafe {
        for n in 0..N {
            for v in 0..V {
                acc[n][v] = load_part::<L>(outs[n].add(e + v * LANES), part(v));
            }
        }
        for m in seen.start / KV_TILE..seen.end.div_ceil(KV_TILE) {
            let start = m * KV_TILE;
            let tile = span.values[m].add(e * E::BYTES);
            for j in seen.start.max(start)..seen.end.min(start + KV_TILE) {
                let row = tile.add((j - start) * span.value_stride);
                let mut x = [L::splat(0.0); V];
                for v in 0..V {
                    x[v] = E::load::<L>(row.add(v * LANES * E::BYTES));
                }
                for n in 0..N {
                    let w = L::splat(weights[n][j]);
                    for v in 0..V {
                        acc[n][v] = w.fma(x[v], acc[n][v]);
                    }
                }
            }
        }
        for n in 0..N {
            for v in 0..V {
                store_part(acc[n][v], outs[n].add(e + v * LANES), part(v));
            }
        }
    }
}

/// `p[i] *= by` over `n` floats.
///
/// # Safety
/// `p` points to `n` floats.
#[inline(always)]
unsafe fn multiply<L: Lanes>(p: *mut f32, n: usize, by: L) {
    for e in (0..n).step_by(LANES) {
        let part = LANES.min(n - e);
        // SAFETY: `part` floats from `e` on are within `n`.
        unsafe {
            store_part(load_part::<L>(p.add(e), part).mul(by), p.add(e), part);
        }
    }
}

/// `p[i] /= by` over `n` floats.
///
/// # Safety
/// `p` points to `n` floats.
#[inline(always)]
pub(super) unsafe fn divide<L: Lanes>(p: *mut f32, n: usize, by: L) {
    for e in (0..n).step_by(LANES) {
        let part = LANES.min(n - e);
        // SAFETY: `part` floats from `e` on are within `n`.
        unsafe {
            store_part(load_part::<L>(p.add(e), part).div(by), p.add(e), part);
        }
    }
}
