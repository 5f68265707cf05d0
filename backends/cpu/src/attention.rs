//! Paged causal attention with an online softmax over tiles of 16 keys.
//!
//! Per query row and head, tile by tile in position order: scores `s = fma(k[d], q[d], s)` over `d`
//! ascending, times the scale, soft-capped; `m' = max(m, max s)`; `p = exp(s - m')`;
//! `l = l * exp(m - m') + p` per lane; `o = o * exp(m - m')`, then `o = fma(p[j], v[j], o)` for the
//! visible keys `j` in order. At the end `o / sum(l)`. Tiles are cut at multiples of 16 of the
//! absolute position and those without a visible key are skipped, so neither block size nor chunk
//! boundaries matter. Keys that are not visible are never read into a result, whatever they hold.

// Indices run over several register arrays at once, whose loops the compiler unrolls.
#![allow(clippy::needless_range_loop)]

use crate::kv::{CpuKv, KvLayout};
use crate::lanes::{Kernel, LANES, Lanes, load_part, store_part};
use crate::math::{exp, tanh};
use crate::tensor::{CpuTensor, same, shape};
use dunlin_backend::{AttentionParams, BackendError, KV_TILE, SeqRows};
use std::ops::Range;

/// Query rows in one task: they share the tiles that the cache holds.
pub(crate) const ROWS_PER_TASK: usize = 16;

/// Queries that a kernel takes at once.
const MOST_QUERIES: usize = 4;

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

/// Lists the tasks of one call, at least a few per thread where there is enough to do.
pub(crate) fn plan(tasks: &mut Vec<Task>, threads: usize, seqs: &[SeqRows], p: &AttentionParams) {
    tasks.clear();
    let chunks: usize = seqs.iter().map(|s| s.rows.len().div_ceil(ROWS_PER_TASK)).sum();
    let by_head = chunks * p.kv_heads < 4 * threads;
    for (seq, s) in seqs.iter().enumerate() {
        // Last rows first: they see most keys, and the pool ends with the small tasks.
        for start in s.rows.clone().step_by(ROWS_PER_TASK).rev() {
            let rows = start..s.rows.end.min(start + ROWS_PER_TASK);
            if by_head {
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
    /// The layer's first float.
    pub layer: *const f32,
    pub layout: KvLayout,
    pub seqs: &'a [SeqRows],
    pub params: &'a AttentionParams,
    pub out: *mut f32,
    pub out_stride: usize,
}

// SAFETY: tasks read queries and keys, and write disjoint pieces of the output.
unsafe impl Sync for Attend<'_> {}

/// One task.
pub(crate) struct Run<'a>(pub Attend<'a>, pub &'a Task);

impl Kernel for Run<'_> {
    /// # Safety
    /// Shapes and sequences were checked; tasks of one call do not overlap.
    #[inline(always)]
    unsafe fn run<L: Lanes>(self) {
        let Run(a, task) = self;
        let seq = &a.seqs[task.seq];
        let d = a.layout.head_dim;
        let none = Query { q: std::ptr::null(), out: std::ptr::null_mut(), first: 0, position: 0 };
        let mut queries = [none; MOST_QUERIES];
        let mut count = 0;
        for row in task.rows.clone() {
            let position = seq.position + (row - seq.rows.start);
            for head in task.heads.clone() {
                if a.params.kv_head_of[head] != task.kv_head {
                    continue;
                }
                queries[count] = Query {
                    q: a.q.row(row)[head * d..].as_ptr(),
                    // SAFETY: the output has this row and head.
                    out: unsafe { a.out.add(row * a.out_stride + head * d) },
                    first: a.params.window.map_or(0, |w| (position + 1).saturating_sub(w)),
                    position,
                };
                count += 1;
                if count == MOST_QUERIES {
                    // SAFETY: as this function.
                    unsafe { attend::<L, 4, 2>(&a, &seq.blocks, task.kv_head, &queries) };
                    count = 0;
                }
            }
        }
        // Few queries have few chains to interleave, so they look at several tiles at once.
        // SAFETY: as this function.
        unsafe {
            let [q0, q1, q2, _] = queries;
            match count {
                1 => attend::<L, 1, 4>(&a, &seq.blocks, task.kv_head, &[q0]),
                2 => attend::<L, 2, 2>(&a, &seq.blocks, task.kv_head, &[q0, q1]),
                3 => attend::<L, 3, 2>(&a, &seq.blocks, task.kv_head, &[q0, q1, q2]),
                _ => {}
            }
        }
    }
}

/// One head of one row.
#[derive(Clone, Copy)]
struct Query {
    q: *const f32,
    /// Where the result goes; holds the running sum until then.
    out: *mut f32,
    /// Visible keys are `first..=position`.
    first: usize,
    position: usize,
}

/// Attends `N` queries to the keys of one KV head, `M` tiles' scores at a time.
///
/// # Safety
/// As [`Run::run`].
#[inline(always)]
unsafe fn attend<L: Lanes, const N: usize, const M: usize>(
    a: &Attend<'_>,
    blocks: &[u32],
    kv_head: usize,
    queries: &[Query; N],
) {
    let d = a.layout.head_dim;
    let mut tile = queries[0].first / KV_TILE;
    let mut last = 0;
    for q in queries {
        tile = tile.min(q.first / KV_TILE);
        last = last.max(q.position / KV_TILE);
        // SAFETY: the head's output.
        unsafe { std::slice::from_raw_parts_mut(q.out, d).fill(0.0) };
    }
    let mut state = [State { largest: f32::NEG_INFINITY, sums: L::splat(0.0) }; N];
    // SAFETY: tiles up to `last` are in the table; each has 16 tokens of `d` elements.
    unsafe {
        while tile <= last {
            let mut keys = [a.layer; M];
            for (m, keys) in keys.iter_mut().enumerate() {
                let tile = last.min(tile + m);
                *keys = a.layer.add(a.layout.key_tile(blocks, tile, kv_head));
            }
            let mut scores = [[L::splat(0.0); N]; M];
            for e in 0..d {
                for m in 0..M {
                    let k = L::load(keys[m].add(e * LANES));
                    for n in 0..N {
                        let q = L::splat(*queries[n].q.add(e));
                        scores[m][n] = k.fma(q, scores[m][n]);
                    }
                }
            }
            for m in 0..M {
                let tile = tile + m;
                if tile > last {
                    break;
                }
                let values = a.layer.add(a.layout.value_tile(blocks, tile, kv_head));
                // All weights first: their long chains of operations overlap.
                let none = Weights { of: [0.0; LANES], shrink: L::splat(1.0), visible: 0..0 };
                let mut parts: [Weights<L>; N] = std::array::from_fn(|_| none.clone());
                let mut whole = true;
                for n in 0..N {
                    let start = tile * KV_TILE;
                    let visible = queries[n].first.saturating_sub(start)
                        ..(queries[n].position + 1).saturating_sub(start).min(KV_TILE);
                    whole &= visible == (0..KV_TILE);
                    parts[n].visible = visible;
                    if !parts[n].visible.is_empty() {
                        state[n].weigh(a.params, scores[m][n], &mut parts[n]);
                    }
                }
                let done = if whole && N > 1 {
                    accumulate_all(&a.layout, &parts, values, queries)
                } else {
                    0
                };
                for n in 0..N {
                    if !parts[n].visible.is_empty() {
                        accumulate(&a.layout, &parts[n], values, queries[n].out, done);
                    }
                }
            }
            tile += M;
        }
        for n in 0..N {
            let total = L::splat(state[n].sums.sum());
            divide(queries[n].out, d, total);
        }
    }
}

/// Running state of one query's softmax.
#[derive(Clone, Copy)]
struct State<L> {
    largest: f32,
    /// Sum of weights, per lane.
    sums: L,
}

/// What one tile adds to one query.
#[derive(Clone)]
struct Weights<L> {
    of: [f32; LANES],
    /// What the sum so far is multiplied with.
    shrink: L,
    visible: Range<usize>,
}

impl<L: Lanes> State<L> {
    /// Takes a tile's scores into the softmax and gives the weights of its values.
    #[inline(always)]
    fn weigh(&mut self, params: &AttentionParams, scores: L, weights: &mut Weights<L>) {
        let mut s = scores.mul(L::splat(params.scale));
        if let Some(cap) = params.softcap {
            s = tanh(s.div(L::splat(cap))).mul(L::splat(cap));
        }
        let Range { start, end } = weights.visible;
        let s = s.keep(start, end, L::splat(f32::NEG_INFINITY));
        let here = s.largest();
        let largest = if self.largest > here { self.largest } else { here };
        let p = exp(s.sub(L::splat(largest)));
        // SAFETY: the array has 16 floats.
        unsafe { p.store(weights.of.as_mut_ptr()) };
        // `exp(0)` is 1, and multiplying by 1 changes no bit, so an unchanged maximum costs nothing.
        weights.shrink = if largest == self.largest {
            L::splat(1.0)
        } else {
            exp(L::splat(self.largest - largest))
        };
        self.sums = self.sums.fma(weights.shrink, p);
        self.largest = largest;
    }
}

/// [`accumulate`] for queries that all see the whole tile, loading each value once. Returns how
/// many elements are done: whole pairs of vectors.
///
/// # Safety
/// As [`attend`]; `values` points to the tile's values.
#[inline(always)]
unsafe fn accumulate_all<L: Lanes, const N: usize>(
    layout: &KvLayout,
    weights: &[Weights<L>; N],
    values: *const f32,
    queries: &[Query; N],
) -> usize {
    let mut e = 0;
    // SAFETY: elements below `head_dim` of outputs and values.
    unsafe {
        while e + 2 * LANES <= layout.head_dim {
            let mut acc = [[L::splat(0.0); 2]; N];
            for n in 0..N {
                let out = queries[n].out.add(e);
                acc[n] = [L::load(out), L::load(out.add(LANES))];
                acc[n] = [acc[n][0].mul(weights[n].shrink), acc[n][1].mul(weights[n].shrink)];
            }
            for j in 0..KV_TILE {
                let v = values.add(j * layout.value_stride + e);
                let (v0, v1) = (L::load(v), L::load(v.add(LANES)));
                for n in 0..N {
                    let w = L::splat(weights[n].of[j]);
                    acc[n] = [w.fma(v0, acc[n][0]), w.fma(v1, acc[n][1])];
                }
            }
            for n in 0..N {
                let out = queries[n].out.add(e);
                acc[n][0].store(out);
                acc[n][1].store(out.add(LANES));
            }
            e += 2 * LANES;
        }
    }
    e
}

/// `out = out * shrink + sum over j of weights[j] * values[j]`, `j` ascending, for the elements
/// from `e` on.
///
/// # Safety
/// `values` points to the tile's values, `out` to the head's output.
#[inline(always)]
unsafe fn accumulate<L: Lanes>(
    layout: &KvLayout,
    weights: &Weights<L>,
    values: *const f32,
    out: *mut f32,
    mut e: usize,
) {
    let Weights { of, shrink, visible } = weights;
    let d = layout.head_dim;
    // SAFETY: elements below `d` of the output; values are padded to whole vectors.
    unsafe {
        while e + 4 * LANES <= d {
            let mut acc = [*shrink; 4];
            for (i, acc) in acc.iter_mut().enumerate() {
                *acc = L::load(out.add(e + i * LANES)).mul(*shrink);
            }
            for j in visible.clone() {
                let w = L::splat(of[j]);
                let v = values.add(j * layout.value_stride + e);
                for (i, acc) in acc.iter_mut().enumerate() {
                    *acc = w.fma(L::load(v.add(i * LANES)), *acc);
                }
            }
            for (i, acc) in acc.iter().enumerate() {
                acc.store(out.add(e + i * LANES));
            }
            e += 4 * LANES;
        }
        while e < d {
            let n = LANES.min(d - e);
            let mut acc = load_part::<L>(out.add(e), n).mul(*shrink);
            for j in visible.clone() {
                let v = L::load(values.add(j * layout.value_stride + e));
                acc = L::splat(of[j]).fma(v, acc);
            }
            store_part(acc, out.add(e), n);
            e += n;
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
