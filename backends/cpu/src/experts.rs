//! Mixture of experts: routes rows to experts, expert by expert in ascending order.
//!
//! A row's result is `out = fma(weight, ffn(x), out)` over its chosen experts in ascending order,
//! from zero; which other rows chose an expert changes nothing.

use crate::backend::CpuBackend;
use crate::lanes::dispatch;
use crate::linear::{Context, Product, linear};
use crate::rowops::{Add, Gated, Softmax};
use crate::tensor::{CpuTensor, same, shape};
use dunlin_backend::{BackendError, Experts};

const OP: &str = "experts";

/// Buffers of this op, kept from call to call.
#[derive(Default)]
pub(crate) struct Scratch {
    /// Per row and expert: its weight, or negative where the row did not choose it.
    weights: Vec<f32>,
    /// Probabilities of one row, and the experts by falling probability.
    probs: Vec<f32>,
    order: Vec<usize>,
    /// Rows of the expert at hand.
    rows: Vec<usize>,
    x: Option<CpuTensor>,
    gate: Option<CpuTensor>,
    up: Option<CpuTensor>,
    down: Option<CpuTensor>,
}

pub(crate) fn check(
    x: &CpuTensor,
    router: &CpuTensor,
    e: &Experts<'_, CpuBackend>,
    out: &CpuTensor,
) -> Result<(), BackendError> {
    let n = router.cols;
    same(OP, "rows of the router", router.rows, x.rows)?;
    for (what, list) in [("gate", e.gate), ("up", e.up), ("down", e.down)] {
        same(OP, what, list.len(), n)?;
    }
    if e.top_k == 0 || e.top_k > n {
        return Err(shape(OP, format!("top_k = {} of {n} experts", e.top_k)));
    }
    for ((gate, up), down) in e.gate.iter().zip(e.up).zip(e.down) {
        same(OP, "columns of gate", gate.cols, x.cols)?;
        same(OP, "columns of up", up.cols, x.cols)?;
        same(OP, "rows of up", up.rows, gate.rows)?;
        same(OP, "columns of down", down.cols, gate.rows)?;
        same(OP, "rows of down", down.rows, out.cols)?;
    }
    Ok(())
}

pub(crate) fn run(
    cx: &mut Context<'_>,
    s: &mut Scratch,
    x: &CpuTensor,
    router: &CpuTensor,
    e: &Experts<'_, CpuBackend>,
    out: &mut CpuTensor,
) -> Result<(), BackendError> {
    s.route(cx, router, e);
    let used = out.rows * out.stride;
    out.data[..used].fill(0.0);
    for index in 0..router.cols {
        s.rows.clear();
        s.rows.extend((0..x.rows).filter(|r| s.weights[r * router.cols + index] >= 0.0));
        if s.rows.is_empty() {
            continue;
        }
        let (gate_w, up_w, down_w) = (&e.gate[index], &e.up[index], &e.down[index]);
        let rows = s.rows.len();
        let xs = room(&mut s.x, rows, x.cols)?;
        for (to, from) in s.rows.iter().enumerate() {
            xs.row_mut(to).copy_from_slice(x.row(*from));
        }
        let gate = room(&mut s.gate, rows, gate_w.rows)?;
        let up = room(&mut s.up, rows, up_w.rows)?;
        let down = room(&mut s.down, rows, down_w.rows)?;
        let quantised = !gate_w.layout.form.is_float() || !up_w.layout.form.is_float();
        let first = [
            Product { weight: gate_w, bias: None, out: &mut *gate, add: false },
            Product { weight: up_w, bias: None, out: &mut *up, add: false },
        ];
        linear(cx, xs, quantised, first.into_iter())?;
        let kernel = Gated {
            gate: gate.data.as_mut_ptr(),
            up: up.data.as_ptr(),
            activation: e.activation,
            vectors: rows * gate.stride / 16,
        };
        // SAFETY: the path was checked; both tensors have `rows` padded rows of one width.
        unsafe { dispatch(cx.path, kernel) };
        let quantised = !down_w.layout.form.is_float();
        let product = Product { weight: down_w, bias: None, out: &mut *down, add: false };
        linear(cx, gate, quantised, std::iter::once(product))?;
        for (from, to) in s.rows.iter().enumerate() {
            let kernel = Add {
                x: out.data.as_mut_ptr().wrapping_add(to * out.stride),
                delta: down.data.as_ptr().wrapping_add(from * down.stride),
                factor: s.weights[to * router.cols + index],
                vectors: down.stride / 16,
            };
            // SAFETY: the path was checked; rows of both tensors are padded to the same width.
            unsafe { dispatch(cx.path, kernel) };
        }
    }
    Ok(())
}

impl Scratch {
    /// Chooses each row's experts and their weights.
    fn route(&mut self, cx: &Context<'_>, router: &CpuTensor, e: &Experts<'_, CpuBackend>) {
        let n = router.cols;
        self.weights.clear();
        self.weights.resize(router.rows * n, -1.0);
        for (row, weights) in self.weights.chunks_exact_mut(n).enumerate() {
            self.probs.clear();
            self.probs.extend_from_slice(router.row(row));
            // SAFETY: the path was checked; the slice is the kernel's.
            unsafe { dispatch(cx.path, Softmax(&mut self.probs)) };
            self.order.clear();
            self.order.extend(0..n);
            let probs = &self.probs;
            self.order.sort_unstable_by(|&a, &b| probs[b].total_cmp(&probs[a]).then(a.cmp(&b)));
            let chosen = &mut self.order[..e.top_k];
            chosen.sort_unstable();
            let total: f32 = chosen.iter().fold(0.0, |sum, &i| sum + probs[i]);
            for &i in chosen.iter() {
                weights[i] = if e.normalise { probs[i] / total } else { probs[i] };
            }
        }
    }
}

/// A scratch tensor of `rows` rows and `cols` columns, made anew only where the old one is too
/// small.
fn room(
    slot: &mut Option<CpuTensor>,
    rows: usize,
    cols: usize,
) -> Result<&mut CpuTensor, BackendError> {
    let old = slot.take().filter(|t| t.cols == cols && t.capacity >= rows);
    let t = match old {
        Some(t) => t,
        None => CpuTensor::new(rows.next_power_of_two(), cols)?,
    };
    let t = slot.insert(t);
    t.set_rows(OP, rows)?;
    Ok(t)
}
