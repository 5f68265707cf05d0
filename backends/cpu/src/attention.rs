//! Paged causal attention with an online softmax over spans of four tiles, 64 keys.
//!
//! Per query row and head, span by span in position order: scores `s = fma(k[d], q[d], s)` over `d`
//! ascending, times the scale of an int8 key, times the scale, soft-capped; `m' = max(m, max s)`;
//! `p = exp(s - m')`; `l = l * exp(m - m') + p` per lane; `o = o * exp(m - m')`, then
//! `o = fma(p[j], v[j], o)` for the visible keys `j` in order, `p[j]` times the scale of an int8
//! value. At the end `o / sum(l)`. Spans are cut at multiples of 64 of the absolute position and
//! those without a visible key are skipped, so neither block size nor chunk boundaries matter. Keys
//! that are not visible are never read into a result, whatever they hold.
//!
//! Where the result goes into a product of int8, each task quantises its own heads at the end.
//!
//! Queries that share keys are taken up to six at a time: each key and value is loaded (and widened) once
//! for all of them, and sums stay in registers. How many share a load changes no bit.

// Indices run over several register arrays at once, whose loops the compiler unrolls.
#![allow(clippy::needless_range_loop)]

use crate::activations::{ActBlock, place, quantise_row};
use crate::element::KvElement;
use crate::kv::{CpuKv, KvLayout};
use crate::lanes::{Kernel, LANES, Lanes, load_part, store_part};
use crate::math::{exp, tanh};
use crate::tensor::{CpuTensor, same, shape};
use dunlin_backend::{AttentionParams, BackendError, KV_TILE, SeqRows};
use std::marker::PhantomData;
use std::ops::Range;

/// Query rows in one task: they share the tiles that the cache holds.
pub(crate) const ROWS_PER_TASK: usize = 16;

/// Queries that walk the keys together.
const MOST_QUERIES: usize = 48;

/// Tiles of one step of the softmax.
const SPAN_TILES: usize = 4;
const SPAN: usize = SPAN_TILES * KV_TILE;

/// Query rows of one sequence, over the query heads of one KV head (or over one of them).
#[derive(Debug, Clone)]
pub(crate) struct Task {
    pub seq: usize,
    pub rows: Range<usize>,
    pub kv_head: usize,
    pub heads: Range<usize>,
}

/// Refuses shapes that do not fit each other.
pub(crate) fn check(
    q: &CpuTensor,
    kv: &CpuKv,
    p: &AttentionParams,
    out: &CpuTensor,
) -> Result<(), BackendError> {
    const OP: &str = "attention";
    same(OP, "head_dim", p.head_dim, kv.spec.head_dim)?;
    same(OP, "kv_heads", p.kv_heads, kv.spec.kv_heads)?;
    same(OP, "columns of q", q.cols, p.heads.saturating_mul(p.head_dim))?;
    same(OP, "columns of out", out.cols, q.cols)?;
    same(OP, "length of kv_head_of", p.kv_head_of.len(), p.heads)?;
    if let Some(bad) = p.kv_head_of.iter().find(|h| **h >= p.kv_heads) {
        return Err(shape(OP, format!("kv_head_of names head {bad} of {}", p.kv_heads)));
    }
    if p.window == Some(0) {
        return Err(shape(OP, "a window of 0 sees no key".into()));
    }
    Ok(())
}

/// Lists the tasks of one call: one per KV head and some rows, or per query head where that has the
/// threads done sooner.
pub(crate) fn plan(tasks: &mut Vec<Task>, threads: usize, seqs: &[SeqRows], p: &AttentionParams) {
    tasks.clear();
    let chunks: usize = seqs.iter().map(|s| s.rows.len().div_ceil(ROWS_PER_TASK)).sum();
    // Loading a key costs about what one query's product with it does.
    let together = (chunks * p.kv_heads).div_ceil(threads) * (1 + p.heads.div_ceil(p.kv_heads));
    let apart = (chunks * p.heads).div_ceil(threads) * 2;
    for (seq, s) in seqs.iter().enumerate() {
        // Last rows first: they see most keys, and the pool ends with the small tasks.
        for start in s.rows.clone().step_by(ROWS_PER_TASK).rev() {
            let rows = start..s.rows.end.min(start + ROWS_PER_TASK);
            if apart < together {
                for (head, &kv_head) in p.kv_head_of.iter().enumerate() {
                    tasks.push(Task { seq, rows: rows.clone(), kv_head, heads: head..head + 1 });
                }
            } else {
                for kv_head in 0..p.kv_heads {
                    tasks.push(Task { seq, rows: rows.clone(), kv_head, heads: 0..p.heads });
                }
            }
        }
    }
}

/// What the tasks of one call share.
#[derive(Clone, Copy)]
pub(crate) struct Attend<'a> {
    pub q: &'a CpuTensor,
    /// The layer's first byte.
    pub layer: *const u8,
    pub layout: KvLayout,
    pub seqs: &'a [SeqRows],
    pub params: &'a AttentionParams,
    pub out: *mut f32,
    pub out_stride: usize,
    /// Where the rows go as blocks of int8 too, or null. Heads are whole blocks then.
    pub acts: *mut ActBlock,
}

// SAFETY: tasks read queries and keys, and write disjoint pieces of the output.
unsafe impl Sync for Attend<'_> {}

/// One task, over a store of elements `E`.
pub(crate) struct Run<'a, E>(pub Attend<'a>, pub &'a Task, pub PhantomData<E>);

impl<E: KvElement> Kernel for Run<'_, E> {
    /// # Safety
    /// Shapes and sequences were checked; tasks of one call do not overlap.
    #[inline(always)]
    unsafe fn run<L: Lanes>(self) {
        let Run(a, task, _) = self;
        let seq = &a.seqs[task.seq];
        let d = a.layout.head_dim;
        let none = Query {
            q: std::ptr::null(),
            out: std::ptr::null_mut(),
            acts: std::ptr::null_mut(),
            step: 0,
            first: 0,
            position: 0,
            largest: f32::NEG_INFINITY,
            sums: L::splat(0.0),
        };
        let mut queries = [none; MOST_QUERIES];
        let mut count = 0;
        for row in task.rows.clone() {
            let position = seq.position + (row - seq.rows.start);
            let (start, step) = match a.acts.is_null() {
                true => (0, 0),
                false => place(row, a.q.rows, a.q.cols / 32),
            };
            for head in task.heads.clone() {
                if a.params.kv_head_of[head] != task.kv_head {
                    continue;
                }
                queries[count] = Query {
                    q: a.q.row(row)[head * d..].as_ptr(),
                    // SAFETY: the output has this row and head.
                    out: unsafe { a.out.add(row * a.out_stride + head * d) },
                    acts: a.acts.wrapping_add(start + head * d / 32 * step),
                    step,
                    first: a.params.window.map_or(0, |w| (position + 1).saturating_sub(w)),
                    position,
                    ..none
                };
                count += 1;
                if count == MOST_QUERIES {
                    // SAFETY: as this function.
                    unsafe { attend::<L, E>(&a, &seq.blocks, task.kv_head, &mut queries) };
                    count = 0;
                }
            }
        }
        if count > 0 {
            // SAFETY: as this function.
            unsafe { attend::<L, E>(&a, &seq.blocks, task.kv_head, &mut queries[..count]) };
        }
    }
}

/// One head of one row, and how far its softmax has come.
#[derive(Clone, Copy)]
struct Query<L> {
    q: *const f32,
    /// Where the result goes; holds the running sum until then.
    out: *mut f32,
    /// Its first block of int8, and the step to the next; no step where none is wanted.
    acts: *mut ActBlock,
    step: usize,
    /// Visible keys are `first..=position`.
    first: usize,
    position: usize,
    largest: f32,
    /// Sum of weights, per lane.
    sums: L,
}

/// Where the keys of one span lie. Tiles behind the last visible one repeat it.
struct Span {
    start: usize,
    keys: [*const u8; SPAN_TILES],
    values: [*const u8; SPAN_TILES],
    key_scales: [*const f32; SPAN_TILES],
    value_scales: [*const f32; SPAN_TILES],
}

/// Attends all queries to the keys of one KV head.
///
/// # Safety
/// As [`Run::run`].
#[inline(always)]
unsafe fn attend<L: Lanes, E: KvElement>(
    a: &Attend<'_>,
    blocks: &[u32],
    kv_head: usize,
    queries: &mut [Query<L>],
) {
    let d = a.layout.head_dim;
    let (mut first, mut last) = (usize::MAX, 0);
    for q in &*queries {
        first = first.min(q.first);
        last = last.max(q.position);
        // SAFETY: the head's output.
        unsafe { std::slice::from_raw_parts_mut(q.out, d).fill(0.0) };
    }
    // SAFETY: tiles up to that of `last` are in the table.
    unsafe {
        for start in (first / SPAN * SPAN..=last).step_by(SPAN) {
            let tile = |m: usize| (start / KV_TILE + m).min(last / KV_TILE);
            let at = |offset: usize| a.layer.add(offset);
            let scales: [(usize, usize); SPAN_TILES] = match E::SCALED {
                true => std::array::from_fn(|m| a.layout.scale_tiles(blocks, tile(m), kv_head)),
                false => [(0, 0); SPAN_TILES],
            };
            let span = Span {
                start,
                keys: std::array::from_fn(|m| at(a.layout.key_tile(blocks, tile(m), kv_head))),
                values: std::array::from_fn(|m| at(a.layout.value_tile(blocks, tile(m), kv_head))),
                key_scales: scales.map(|(keys, _)| at(keys).cast()),
                value_scales: scales.map(|(_, values)| at(values).cast()),
            };
            let mut done = 0;
            if L::REGISTERS >= 32 {
                while let Some(some) = queries[done..].first_chunk_mut::<6>() {
                    step::<L, E, 6>(a, &span, some);
                    done += 6;
                }
            }
            if L::REGISTERS >= 8 {
                while let Some(some) = queries[done..].first_chunk_mut::<3>() {
                    step::<L, E, 3>(a, &span, some);
                    done += 3;
                }
            }
            for one in &mut queries[done..] {
                step::<L, E, 1>(a, &span, std::array::from_mut(one));
            }
        }
        for q in queries {
            divide(q.out, d, L::splat(q.sums.sum()));
            if q.step > 0 {
                quantise_row::<L>(q.out, d / 32, q.acts, q.step);
            }
        }
    }
}

/// Weights of the 64 values of a span, for one query.
type Weights = [f32; SPAN];

/// Takes one span into the softmaxes of `N` queries.
///
/// # Safety
/// As [`Run::run`].
#[inline(always)]
unsafe fn step<L: Lanes, E: KvElement, const N: usize>(
    a: &Attend<'_>,
    span: &Span,
    queries: &mut [Query<L>; N],
) {
    let mut seen: [Range<usize>; N] = std::array::from_fn(|_| 0..0);
    let (mut from, mut to, mut low, mut high) = (0, SPAN, SPAN, 0);
    for n in 0..N {
        let start = queries[n].first.saturating_sub(span.start);
        let end = (queries[n].position + 1).saturating_sub(span.start).min(SPAN);
        seen[n] = start..end.max(start);
        // What all see, and what any sees.
        (from, to) = (from.max(start), to.min(end));
        if start < end {
            (low, high) = (low.min(start), high.max(end));
        }
    }
    if low >= high {
        return;
    }
    let mut weights = [[0.0f32; SPAN]; N];
    // SAFETY: the span's tiles have 16 tokens of `head_dim` elements each.
    unsafe {
        let mut scores = [[L::splat(0.0); SPAN_TILES]; N];
        if L::REGISTERS >= 32 || N == 1 {
            dots::<L, E, N, SPAN_TILES>(a, span, 0, queries, &mut scores);
        } else {
            for m in (0..high.div_ceil(KV_TILE)).step_by(2) {
                dots::<L, E, N, 2>(a, span, m, queries, &mut scores);
            }
        }
        for n in 0..N {
            if !seen[n].is_empty() {
                let shrink =
                    weigh::<L, E>(a, span, &mut queries[n], &seen[n], scores[n], &mut weights[n]);
                if shrink != 1.0 {
                    multiply(queries[n].out, a.layout.head_dim, L::splat(shrink));
                }
            }
        }
        let outs = std::array::from_fn(|n| queries[n].out);
        let all = std::array::from_fn(|n| &weights[n]);
        if N == 1 {
            return add_values::<L, E, N>(a, span, seen[0].clone(), &all, outs);
        }
        // In the order of the keys: what only some see lies before and behind what all see.
        let to = to.max(from.min(SPAN));
        for part in 0..3 {
            if part == 1 {
                add_values::<L, E, N>(a, span, from..to, &all, outs);
                continue;
            }
            for n in 0..N {
                let Range { start, end } = seen[n].clone();
                let own = if part == 0 { start..end.min(from) } else { start.max(to)..end };
                add_values::<L, E, 1>(a, span, own, &[&weights[n]], [queries[n].out]);
            }
        }
    }
}

/// Products of `N` queries with the keys of tiles `first..first + M` of the span.
///
/// # Safety
/// As [`step`].
#[inline(always)]
unsafe fn dots<L: Lanes, E: KvElement, const N: usize, const M: usize>(
    a: &Attend<'_>,
    span: &Span,
    first: usize,
    queries: &[Query<L>; N],
    scores: &mut [[L; SPAN_TILES]; N],
) {
    let mut acc = [[L::splat(0.0); N]; M];
    let keys: [*const u8; M] = std::array::from_fn(|m| span.keys[first + m]);
    let q: [*const f32; N] = std::array::from_fn(|n| queries[n].q);
    for e in 0..a.layout.head_dim {
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
            scores[n][first + m] = acc[m][n];
        }
    }
}

/// Takes a span's scores into the softmax, gives the weights of its values, and what the sum so far
/// is multiplied with.
///
/// # Safety
/// As [`step`].
#[inline(always)]
unsafe fn weigh<L: Lanes, E: KvElement>(
    a: &Attend<'_>,
    span: &Span,
    query: &mut Query<L>,
    seen: &Range<usize>,
    mut s: [L; SPAN_TILES],
    weights: &mut Weights,
) -> f32 {
    let scale = L::splat(a.params.scale);
    for m in 0..SPAN_TILES {
        if E::SCALED {
            // SAFETY: the tile has 16 scales.
            s[m] = s[m].mul(unsafe { L::load(span.key_scales[m]) });
        }
        s[m] = s[m].mul(scale);
        if let Some(cap) = a.params.softcap {
            s[m] = tanh(s[m].div(L::splat(cap))).mul(L::splat(cap));
        }
        let start = m * KV_TILE;
        let (lo, hi) = (seen.start.saturating_sub(start), seen.end.saturating_sub(start));
        s[m] = s[m].keep(lo.min(KV_TILE), hi.min(KV_TILE), L::splat(f32::NEG_INFINITY));
    }
    let here = s[0].max(s[1]).max(s[2].max(s[3])).largest();
    let largest = if query.largest > here { query.largest } else { here };
    let mut p = s;
    for m in 0..SPAN_TILES {
        p[m] = exp(s[m].sub(L::splat(largest)));
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

/// `out += sum over j in seen of weights[j] * values[j]`, `j` ascending, for `N` queries.
///
/// # Safety
/// As [`step`]; the outputs have `head_dim` floats.
#[inline(always)]
unsafe fn add_values<L: Lanes, E: KvElement, const N: usize>(
    a: &Attend<'_>,
    span: &Span,
    seen: Range<usize>,
    weights: &[&Weights; N],
    outs: [*mut f32; N],
) {
    if seen.is_empty() {
        return;
    }
    let d = a.layout.head_dim;
    let mut e = 0;
    // SAFETY: elements below `d` of the outputs; values are padded to whole vectors.
    unsafe {
        if L::REGISTERS >= 32 || N == 1 {
            while e + 4 * LANES <= d {
                add_part::<L, E, N, 4>(a, span, &seen, weights, outs, e, 4 * LANES);
                e += 4 * LANES;
            }
        } else {
            while e + 2 * LANES <= d {
                add_part::<L, E, N, 2>(a, span, &seen, weights, outs, e, 2 * LANES);
                e += 2 * LANES;
            }
        }
        while e < d {
            let n = LANES.min(d - e);
            add_part::<L, E, N, 1>(a, span, &seen, weights, outs, e, n);
            e += n;
        }
    }
}

/// [`add_values`] for the `width` elements from `e` on, which fill `V` vectors.
///
/// # Safety
/// As [`add_values`].
#[inline(always)]
unsafe fn add_part<L: Lanes, E: KvElement, const N: usize, const V: usize>(
    a: &Attend<'_>,
    span: &Span,
    seen: &Range<usize>,
    weights: &[&Weights; N],
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
                let row = tile.add((j - start) * a.layout.value_stride);
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
unsafe fn divide<L: Lanes>(p: *mut f32, n: usize, by: L) {
    for e in (0..n).step_by(LANES) {
        let part = LANES.min(n - e);
        // SAFETY: `part` floats from `e` on are within `n`.
        unsafe {
            store_part(load_part::<L>(p.add(e), part).div(by), p.add(e), part);
        }
    }
}
