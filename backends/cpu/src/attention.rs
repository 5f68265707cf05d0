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
//! Queries that share keys are taken up to six at a time: each key and value is loaded (and widened)
//! once for all of them, and sums stay in registers. How many share a load changes no bit.

use crate::activations::{ActBlock, place, quantise_row};
use crate::element::KvElement;
use crate::kv::{CpuKv, KvLayout};
use crate::lanes::{Kernel, Lanes};
use crate::tensor::{CpuTensor, same, shape};
use dunlin_backend::{AttentionParams, BackendError, KV_TILE, SeqRows};
use std::marker::PhantomData;

mod plan;
mod span;
pub(crate) use plan::{Task, plan};
use span::{Query, SPAN, SPAN_TILES, Span, add_values, divide, products, soften};

/// Queries that walk the keys together.
const MOST_QUERIES: usize = 48;

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
            here: f32::NEG_INFINITY,
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
    let mut weights = [[0.0; SPAN]; MOST_QUERIES];
    let weights = &mut weights[..queries.len()];
    // SAFETY: tiles up to that of `last` are in the table.
    unsafe {
        for start in (first / SPAN * SPAN..=last).step_by(SPAN) {
            let span = find::<E>(a, blocks, kv_head, start, last);
            products::<L, E>(d, &span, queries, weights);
            soften::<L, E>(a, &span, queries, weights);
            add_values::<L, E>(d, &span, queries, weights);
        }
        for q in queries {
            divide(q.out, d, L::splat(q.sums.sum()));
            if q.step > 0 {
                quantise_row::<L>(q.out, d / 32, q.acts, q.step);
            }
        }
    }
}

/// Finds the span that starts at `start`, of a sequence whose last visible key is `last`.
///
/// # Safety
/// As [`Run::run`]; the table reaches to `last`.
#[inline(always)]
unsafe fn find<E: KvElement>(
    a: &Attend<'_>,
    blocks: &[u32],
    kv_head: usize,
    start: usize,
    last: usize,
) -> Span {
    let tile = |m: usize| (start / KV_TILE + m).min(last / KV_TILE);
    // SAFETY: these places are within the layer.
    let at = |offset: usize| unsafe { a.layer.add(offset) };
    let scales: [(usize, usize); SPAN_TILES] = match E::SCALED {
        true => std::array::from_fn(|m| a.layout.scale_tiles(blocks, tile(m), kv_head)),
        false => [(0, 0); SPAN_TILES],
    };
    Span {
        start,
        keys: std::array::from_fn(|m| at(a.layout.key_tile(blocks, tile(m), kv_head))),
        values: std::array::from_fn(|m| at(a.layout.value_tile(blocks, tile(m), kv_head))),
        value_stride: a.layout.value_stride,
        key_scales: scales.map(|(keys, _)| at(keys).cast()),
        value_scales: scales.map(|(_, values)| at(values).cast()),
    }
}
