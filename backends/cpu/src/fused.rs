//! Ops that follow each other in every layer, done in one go.
//!
//! Each gives the bits of the ops it is made of. What it saves are waits of all threads for each
//! other, and rows of floats that one core writes and another reads only to round them to int8: a
//! norm gives int8 at once, the tasks of gate and up go on to their activation and its int8, those
//! of attention quantise the heads that they computed, and a product adds itself to the residual
//! stream. Where the weights are no blocks of int8, or in exact mode, the plain ops run one by one.

use crate::activations::ActBlock;
use crate::attention::{self, Attend, Run};
use crate::backend::{CpuBackend, INLINE_ELEMENTS, Inner, RowsMut};
use crate::element::with_kv_element;
use crate::kv::{CpuKv, Write, WriteRows};
use crate::lanes::dispatch;
use crate::linear::{Context, Input, Product, gate_up, linear, multiply, quantise};
use crate::pool::Pool;
use crate::rope::{self, Rotate};
use crate::tensor::{CpuTensor, same, shape};
use crate::weight::CpuWeight;
use dunlin_backend::{
    AttentionParams, Backend, BackendError, FeedForward, FeedForwardRoom, LinearPart, Norm,
    Precision, Rope, SeqRows,
};
use std::marker::PhantomData;
use std::ops::Range;

/// Rows of a sequence that one task rotates and writes to the KV store.
const ROWS_PER_TASK: usize = 16;

impl CpuBackend {
    /// Whether all these weights are multiplied with int8.
    fn takes_int8<'a>(&self, mut weights: impl Iterator<Item = &'a CpuWeight>) -> bool {
        self.precision == Precision::Fast && weights.all(|w| !w.layout.form.is_float())
    }

    pub(crate) fn norm_then_linear(
        &self,
        x: &CpuTensor,
        norm: &Norm<'_, Self>,
        room: &mut CpuTensor,
        parts: &mut [LinearPart<'_, Self>],
    ) -> Result<(), BackendError> {
        if !self.takes_int8(parts.iter().map(|p| p.weight)) {
            self.rms_norm(x, norm.weight, norm.eps, norm.cols, room)?;
            return self.linear(room, parts);
        }
        check_norm(x, norm)?;
        check_parts(x, parts)?;
        if x.rows == 0 {
            return Ok(());
        }
        let Inner { pool, acts, .. } = &mut *self.inner();
        let mut cx = self.context(pool, acts);
        let acts = quantise(&mut cx, x, Some((norm.weight.row(0), norm.eps)))?;
        let input = Input::quantised(x.rows, acts);
        multiply(&mut cx, input, x.cols, parts.iter_mut().map(Product::of));
        Ok(())
    }

    pub(crate) fn rotate_and_write(
        &self,
        (q, k, v): (&mut CpuTensor, &mut CpuTensor, &CpuTensor),
        positions: &[u32],
        rope: &Rope,
        (kv, layer): (&mut CpuKv, usize),
        seqs: &[SeqRows],
    ) -> Result<(), BackendError> {
        const OP: &str = "rope_write";
        rope::check(q, positions, rope)?;
        rope::check(k, positions, rope)?;
        kv.check_width(OP, k)?;
        kv.check_width(OP, v)?;
        kv.check(OP, layer, k.rows.min(v.rows), seqs)?;
        let mut inner = self.inner();
        let Inner { ropes, pool, .. } = &mut *inner;
        let table = ropes.get(rope, positions);
        let (Some(factors), true) = (table.kept(positions), covers(seqs, k.rows)) else {
            drop(inner);
            self.rope(q, positions, rope)?;
            self.rope(k, positions, rope)?;
            return self.kv_write(kv, layer, k, v, seqs);
        };
        let rotated = [(RowsMut::of(q), q.cols), (RowsMut::of(k), k.cols)];
        let write = kv.write(layer, k, v);
        let few = k.rows * k.cols < INLINE_ELEMENTS / 8;
        each_rows(pool, few, seqs, &|seq, rows| {
            for row in rows.clone() {
                for (data, cols) in &rotated {
                    let factors = factors(positions[row]);
                    // SAFETY: row `row` of the tensor, which is this task's alone.
                    let row = unsafe { std::slice::from_raw_parts_mut(data.at(row), *cols) };
                    // SAFETY: the path was checked; `rope::check` found whole heads.
                    unsafe { dispatch(self.path, Rotate { row, factors, style: rope.style }) };
                }
            }
            // SAFETY: the sequences were checked; their rows are apart.
            unsafe { self.write_rows(write, seq, rows) };
        });
        Ok(())
    }

    pub(crate) fn write(
        &self,
        (kv, layer): (&mut CpuKv, usize),
        k: &CpuTensor,
        v: &CpuTensor,
        seqs: &[SeqRows],
    ) -> Result<(), BackendError> {
        const OP: &str = "kv_write";
        kv.check_width(OP, k)?;
        kv.check_width(OP, v)?;
        kv.check(OP, layer, k.rows.min(v.rows), seqs)?;
        let write = kv.write(layer, k, v);
        // Writes of keys miss the caches: few are worth another thread.
        let few = k.rows * k.cols < INLINE_ELEMENTS / 8;
        each_rows(&mut self.inner().pool, few, seqs, &|seq, rows| {
            // SAFETY: the sequences were checked; their rows are apart.
            unsafe { self.write_rows(write, seq, rows) };
        });
        Ok(())
    }

    /// # Safety
    /// As [`WriteRows`], with rows of the sequence that nobody else writes.
    unsafe fn write_rows(&self, write: Write<'_>, seq: &SeqRows, rows: Range<usize>) {
        with_kv_element!(write.layout.dtype, E => {
            let kernel = WriteRows::<E> { write, seq, rows, element: PhantomData };
            // SAFETY: the path was checked; the rest is the caller's promise.
            unsafe { dispatch(self.path, kernel) }
        });
    }

    /// Attention, into blocks of int8 too where that is asked: all rows are of some sequence then,
    /// and heads whole blocks.
    pub(crate) fn attend(
        &self,
        inner: &mut Inner,
        q: &CpuTensor,
        (kv, layer): (&CpuKv, usize),
        (seqs, params): (&[SeqRows], &AttentionParams),
        out: &mut CpuTensor,
        int8: bool,
    ) -> Result<(), BackendError> {
        attention::check(q, kv, params, out)?;
        kv.check("attention", layer, q.rows, seqs)?;
        out.set_rows("attention", q.rows)?;
        let mut acts = std::ptr::null_mut();
        if int8 {
            inner.acts.ensure(q.rows * (q.cols / 32), "quantised activations")?;
            acts = inner.acts.as_mut_ptr();
        }
        let attend = Attend {
            q,
            layer: kv.data[layer * kv.layout.layer..].as_ptr(),
            layout: kv.layout,
            seqs,
            params,
            out: out.data.as_mut_ptr(),
            out_stride: out.stride,
            acts,
        };
        let Inner { pool, tasks, .. } = inner;
        attention::plan(tasks, pool.threads(), seqs, params);
        pool.run(tasks.len(), &|i| {
            with_kv_element!(kv.layout.dtype, E => {
                let kernel = Run::<E>(attend, &tasks[i], PhantomData);
                // SAFETY: path, shapes and sequences were checked; tasks are disjoint.
                unsafe { dispatch(self.path, kernel) }
            });
        });
        Ok(())
    }

    #[allow(clippy::too_many_arguments)]
    pub(crate) fn attend_then_linear(
        &self,
        q: &CpuTensor,
        (kv, layer): (&CpuKv, usize),
        (seqs, params): (&[SeqRows], &AttentionParams),
        weight: &CpuWeight,
        room: &mut CpuTensor,
        delta: &mut CpuTensor,
        residual: Option<&mut CpuTensor>,
    ) -> Result<(), BackendError> {
        let int8 = self.takes_int8([weight].into_iter())
            && params.head_dim.is_multiple_of(32)
            && covers(seqs, q.rows);
        let inner = &mut *self.inner();
        self.attend(inner, q, (kv, layer), (seqs, params), room, int8)?;
        let acts = int8.then(|| inner.acts.as_ptr());
        let mut cx = self.context(&mut inner.pool, &mut inner.acts);
        let add = residual.is_some();
        product(&mut cx, room, acts, weight, residual.unwrap_or(delta), add)
    }

    pub(crate) fn whole_feed_forward(
        &self,
        x: &mut CpuTensor,
        norm: &Norm<'_, Self>,
        weights: &FeedForward<'_, Self>,
        room: FeedForwardRoom<'_, Self>,
        delta: &mut CpuTensor,
        add: bool,
    ) -> Result<(), BackendError> {
        const OP: &str = "feed_forward";
        let FeedForward { gate: gate_w, up: up_w, down, activation } = *weights;
        let FeedForwardRoom { normed, gate, up } = room;
        let mut parts = [
            LinearPart { weight: gate_w, bias: None, out: &mut *gate },
            LinearPart { weight: up_w, bias: None, out: &mut *up },
        ];
        let whole = gate_w.rows == up_w.rows && gate_w.rows.is_multiple_of(32);
        if !whole || !self.takes_int8([gate_w, up_w, down].into_iter()) {
            self.norm_then_linear(x, norm, normed, &mut parts)?;
            self.gated(gate, up, activation)?;
            let Inner { pool, acts, .. } = &mut *self.inner();
            let mut cx = self.context(pool, acts);
            return product(&mut cx, gate, None, down, if add { x } else { delta }, add);
        }
        check_norm(x, norm)?;
        check_parts(x, &mut parts)?;
        let out = if add { &mut *x } else { &mut *delta };
        same(OP, "columns of down", down.cols, gate_w.rows)?;
        same(OP, "columns of out", out.cols, down.rows)?;
        let rows = parts[0].out.rows;
        out.set_rows(OP, rows)?;
        if rows == 0 {
            return Ok(());
        }
        let Inner { pool, acts, gated, .. } = &mut *self.inner();
        let mut cx = self.context(pool, acts);
        let acts = quantise(&mut cx, x, Some((norm.weight.row(0), norm.eps)))?;
        let [gate, up] = &mut parts;
        let products = [Product::of(gate), Product::of(up)];
        let input = Input::quantised(rows, acts);
        gate_up(&mut cx, input, x.cols, products, activation, gated)?;
        let out = if add { x } else { delta };
        let product = Product { weight: down, bias: None, out, add };
        let input = Input::quantised(rows, gated.as_ptr());
        multiply(&mut cx, input, down.cols, std::iter::once(product));
        Ok(())
    }
}

/// One product of rows, which may be quantised already, stored or added.
fn product(
    cx: &mut Context<'_>,
    x: &CpuTensor,
    acts: Option<*const ActBlock>,
    weight: &CpuWeight,
    out: &mut CpuTensor,
    add: bool,
) -> Result<(), BackendError> {
    const OP: &str = "linear";
    same(OP, "columns of the weight", weight.cols, x.cols)?;
    same(OP, "columns of out", out.cols, weight.rows)?;
    if add {
        same(OP, "rows of what is added to", out.rows, x.rows)?;
    }
    out.set_rows(OP, x.rows)?;
    let product = std::iter::once(Product { weight, bias: None, out, add });
    match acts {
        Some(acts) if x.rows > 0 => {
            multiply(cx, Input::quantised(x.rows, acts), x.cols, product);
            Ok(())
        }
        _ => linear(cx, x, !weight.layout.form.is_float(), product),
    }
}

/// Calls `f` for every sequence's rows, some at a time.
fn each_rows(
    pool: &mut Pool,
    few: bool,
    seqs: &[SeqRows],
    f: &(impl Fn(&SeqRows, Range<usize>) + Sync),
) {
    let tasks = |s: &SeqRows| s.rows.len().div_ceil(ROWS_PER_TASK);
    let task = |mut index: usize| {
        for seq in seqs {
            if index < tasks(seq) {
                let start = seq.rows.start + index * ROWS_PER_TASK;
                return f(seq, start..seq.rows.end.min(start + ROWS_PER_TASK));
            }
            index -= tasks(seq);
        }
    };
    let count = seqs.iter().map(tasks).sum();
    if few { (0..count).for_each(task) } else { pool.run(count, &task) }
}

/// Whether all of `rows` rows are some sequence's.
fn covers(seqs: &[SeqRows], rows: usize) -> bool {
    seqs.iter().map(|s| s.rows.len()).sum::<usize>() == rows
}

fn check_norm(x: &CpuTensor, norm: &Norm<'_, CpuBackend>) -> Result<(), BackendError> {
    const OP: &str = "rms_norm";
    same(OP, "columns of the norm", norm.cols, x.cols)?;
    same(OP, "columns of the weight", norm.weight.cols, x.cols)?;
    if norm.weight.rows == 0 {
        return Err(shape(OP, "a norm without a weight".into()));
    }
    Ok(())
}

/// Checks shapes, gives the outputs their rows, and says whether any weight is quantised.
pub(crate) fn check_parts(
    x: &CpuTensor,
    parts: &mut [LinearPart<'_, CpuBackend>],
) -> Result<bool, BackendError> {
    const OP: &str = "linear";
    let mut quantised = false;
    for p in parts.iter_mut() {
        same(OP, "columns of the weight", p.weight.cols, x.cols)?;
        same(OP, "columns of out", p.out.cols, p.weight.rows)?;
        if let Some(bias) = p.bias {
            same(OP, "columns of the bias", bias.cols, p.weight.rows)?;
            same(OP, "rows of the bias", bias.rows, 1)?;
        }
        p.out.set_rows(OP, x.rows)?;
        quantised |= !p.weight.layout.form.is_float();
    }
    Ok(quantised)
}
