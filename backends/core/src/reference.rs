//! The plainest backend: every operation as its formula, one loop after another.
//!
//! It is what the other backends are compared with, so it prefers being obviously right over
//! being fast: weights are dequantised a row at a time, sums run in float64 over ascending
//! indices and round once to float32, softmax sees all its scores at once. Each output row is a
//! function of its own input alone, so batch invariance holds by construction.
//!
//! It only knows [`Precision::Exact`](crate::Precision::Exact) and never checks for free memory.

mod attention;
mod experts;

use crate::{
    Activation, AttentionParams, Backend, BackendError, DeviceInfo, Experts, HostTensor, KvSpec,
    LinearPart, Part, Rope, RopeStyle, SeqRows, quant,
};

pub use attention::ReferenceKv;

/// The plain backend. Holds nothing.
#[derive(Debug, Clone, Copy, Default)]
pub struct Reference;

/// Rows of float32 values.
#[derive(Debug, Clone, PartialEq)]
pub struct ReferenceTensor {
    pub data: Vec<f32>,
    pub rows: usize,
    pub cols: usize,
    capacity: usize,
}

/// Part of a stored matrix, still quantised.
#[derive(Debug, Clone)]
pub struct ReferenceWeight {
    /// The part's rows, all columns.
    rows: HostTensor,
    /// The part's columns.
    cols: std::ops::Range<usize>,
}

impl ReferenceTensor {
    fn row(&self, row: usize) -> &[f32] {
        &self.data[row * self.cols..(row + 1) * self.cols]
    }

    fn row_mut(&mut self, row: usize) -> &mut [f32] {
        &mut self.data[row * self.cols..(row + 1) * self.cols]
    }

    fn resize(&mut self, op: &'static str, rows: usize) -> Result<(), BackendError> {
        let capacity = self.capacity;
        require(op, rows <= capacity, || format!("{rows} rows, room for {capacity}"))?;
        self.rows = rows;
        self.data.resize(rows * self.cols, 0.0);
        Ok(())
    }
}

impl ReferenceWeight {
    fn row_count(&self) -> usize {
        self.rows.rows
    }

    fn col_count(&self) -> usize {
        self.cols.len()
    }

    /// Row `row` of the part, dequantised. `whole` is scratch.
    fn dequantised<'a>(&self, row: usize, whole: &'a mut Vec<f32>) -> &'a [f32] {
        whole.resize(self.rows.cols, 0.0);
        quant::dequantize_row(self.rows.dtype, self.rows.row(row), whole);
        &whole[self.cols.clone()]
    }
}

impl Backend for Reference {
    type Tensor = ReferenceTensor;
    type Weight = ReferenceWeight;
    type Kv = ReferenceKv;

    fn info(&self) -> DeviceInfo {
        DeviceInfo {
            id: "reference".into(),
            description: "plain loops in float64, for comparison".into(),
            total_bytes: u64::MAX,
            free_bytes: u64::MAX,
        }
    }

    fn weight(&self, t: &HostTensor, part: &Part) -> Result<ReferenceWeight, BackendError> {
        let (rows, cols) = (&part.rows, &part.cols);
        let fits = |r: &std::ops::Range<usize>, n| r.start <= r.end && r.end <= n;
        require("weight", fits(rows, t.rows) && fits(cols, t.cols), || {
            format!("part {rows:?} x {cols:?} of '{}' [{}, {}]", t.name, t.rows, t.cols)
        })?;
        Ok(ReferenceWeight { rows: t.slice_rows(rows.clone()), cols: cols.clone() })
    }

    fn weight_bytes(&self, w: &ReferenceWeight) -> u64 {
        w.rows.data.len() as u64
    }

    fn tensor(&self, capacity: usize, cols: usize) -> Result<ReferenceTensor, BackendError> {
        let data = vec![0.0; capacity * cols];
        Ok(ReferenceTensor { data, rows: capacity, cols, capacity })
    }

    fn set_rows(&self, t: &mut ReferenceTensor, rows: usize) -> Result<(), BackendError> {
        t.resize("set_rows", rows)
    }

    fn kv(&self, spec: &KvSpec) -> Result<ReferenceKv, BackendError> {
        ReferenceKv::new(spec)
    }

    fn upload(&self, src: &[f32], dst: &mut ReferenceTensor) -> Result<(), BackendError> {
        let (len, cols) = (src.len(), dst.cols);
        require("upload", cols > 0 && len % cols == 0, || format!("{len} values, {cols} columns"))?;
        dst.resize("upload", len / cols)?;
        dst.data.copy_from_slice(src);
        Ok(())
    }

    fn download(&self, t: &ReferenceTensor, out: &mut Vec<f32>) -> Result<(), BackendError> {
        out.clear();
        out.extend_from_slice(&t.data);
        Ok(())
    }

    fn embed(
        &self,
        table: &ReferenceWeight,
        ids: &[u32],
        scale: f32,
        out: &mut ReferenceTensor,
    ) -> Result<(), BackendError> {
        require("embed", table.col_count() == out.cols, || {
            format!("table has {} columns, out {}", table.col_count(), out.cols)
        })?;
        out.resize("embed", ids.len())?;
        let mut whole = Vec::new();
        for (row, &id) in ids.iter().enumerate() {
            let id = id as usize;
            let have = table.row_count();
            require("embed", id < have, || format!("row {id} of a table of {have}"))?;
            let values = table.dequantised(id, &mut whole);
            for (o, v) in out.row_mut(row).iter_mut().zip(values) {
                *o = v * scale;
            }
        }
        Ok(())
    }

    fn rms_norm(
        &self,
        x: &ReferenceTensor,
        weight: &ReferenceTensor,
        eps: f32,
        segment: usize,
        out: &mut ReferenceTensor,
    ) -> Result<(), BackendError> {
        require("rms_norm", x.cols == out.cols, || format!("{} to {} columns", x.cols, out.cols))?;
        out.resize("rms_norm", x.rows)?;
        out.data.copy_from_slice(&x.data);
        self.rms_norm_inplace(out, weight, eps, segment)
    }

    fn rms_norm_inplace(
        &self,
        x: &mut ReferenceTensor,
        weight: &ReferenceTensor,
        eps: f32,
        segment: usize,
    ) -> Result<(), BackendError> {
        let fits = segment > 0 && x.cols.is_multiple_of(segment) && weight.data.len() == segment;
        require("rms_norm", fits, || {
            let have = weight.data.len();
            format!("segments of {segment} in {} columns, weight of {have}", x.cols)
        })?;
        for values in x.data.chunks_exact_mut(segment) {
            let squares: f64 = values.iter().map(|v| f64::from(*v) * f64::from(*v)).sum();
            let scale = 1.0 / (squares / segment as f64 + f64::from(eps)).sqrt();
            for (v, w) in values.iter_mut().zip(&weight.data) {
                *v = (f64::from(*v) * scale * f64::from(*w)) as f32;
            }
        }
        Ok(())
    }

    fn add(&self, x: &mut ReferenceTensor, delta: &ReferenceTensor) -> Result<(), BackendError> {
        same_shape("add", x, delta)?;
        for (x, d) in x.data.iter_mut().zip(&delta.data) {
            *x += d;
        }
        Ok(())
    }

    fn linear(
        &self,
        x: &ReferenceTensor,
        parts: &mut [LinearPart<'_, Self>],
    ) -> Result<(), BackendError> {
        for part in parts {
            matmul(x, part.weight, part.bias, part.out)?;
        }
        Ok(())
    }

    fn rope(
        &self,
        x: &mut ReferenceTensor,
        positions: &[u32],
        rope: &Rope,
    ) -> Result<(), BackendError> {
        let (dim, half) = (rope.head_dim, rope.head_dim / 2);
        let fits = dim > 0 && x.cols.is_multiple_of(dim) && positions.len() == x.rows;
        require("rope", fits && rope.inv_freq.len() == half, || {
            let (p, f) = (positions.len(), rope.inv_freq.len());
            format!("[{}, {}] with {p} positions, heads of {dim}, {f} angles", x.rows, x.cols)
        })?;
        for (row, &position) in positions.iter().enumerate() {
            for head in x.row_mut(row).chunks_exact_mut(dim) {
                for (i, &freq) in rope.inv_freq.iter().enumerate() {
                    let angle = f64::from(position as f32 * freq);
                    let (sin, cos) = (libm::sin(angle), libm::cos(angle));
                    let (a, b) = match rope.style {
                        RopeStyle::HalfSplit => (i, i + half),
                        RopeStyle::Interleaved => (2 * i, 2 * i + 1),
                    };
                    let (x, y) = (f64::from(head[a]), f64::from(head[b]));
                    head[a] = (x * cos - y * sin) as f32;
                    head[b] = (x * sin + y * cos) as f32;
                }
            }
        }
        Ok(())
    }

    fn kv_write(
        &self,
        kv: &mut ReferenceKv,
        layer: usize,
        k: &ReferenceTensor,
        v: &ReferenceTensor,
        seqs: &[SeqRows],
    ) -> Result<(), BackendError> {
        kv.write(layer, k, v, seqs)
    }

    fn attention(
        &self,
        q: &ReferenceTensor,
        kv: &ReferenceKv,
        layer: usize,
        seqs: &[SeqRows],
        params: &AttentionParams,
        out: &mut ReferenceTensor,
    ) -> Result<(), BackendError> {
        attention::attend(q, kv, layer, seqs, params, out)
    }

    fn gated(
        &self,
        gate: &mut ReferenceTensor,
        up: &ReferenceTensor,
        activation: Activation,
    ) -> Result<(), BackendError> {
        same_shape("gated", gate, up)?;
        for (g, u) in gate.data.iter_mut().zip(&up.data) {
            *g = activate(*g, *u, activation);
        }
        Ok(())
    }

    fn experts(
        &self,
        x: &ReferenceTensor,
        router: &ReferenceTensor,
        experts: &Experts<'_, Self>,
        out: &mut ReferenceTensor,
    ) -> Result<(), BackendError> {
        experts::mix(x, router, experts, out)
    }

    fn gather(
        &self,
        x: &ReferenceTensor,
        rows: &[u32],
        out: &mut ReferenceTensor,
    ) -> Result<(), BackendError> {
        require("gather", x.cols == out.cols, || format!("{} to {} columns", x.cols, out.cols))?;
        out.resize("gather", rows.len())?;
        for (to, &from) in rows.iter().enumerate() {
            let from = from as usize;
            require("gather", from < x.rows, || format!("row {from} of {}", x.rows))?;
            out.row_mut(to).copy_from_slice(x.row(from));
        }
        Ok(())
    }

    fn kv_copy(&self, kv: &mut ReferenceKv, pairs: &[(u32, u32)]) -> Result<(), BackendError> {
        kv.copy(pairs)
    }
}

/// `out = x * weight^T + bias`, sums in float64.
fn matmul(
    x: &ReferenceTensor,
    weight: &ReferenceWeight,
    bias: Option<&ReferenceTensor>,
    out: &mut ReferenceTensor,
) -> Result<(), BackendError> {
    let (rows, cols) = (weight.row_count(), weight.col_count());
    let fits = x.cols == cols && out.cols == rows && bias.is_none_or(|b| b.data.len() == rows);
    require("linear", fits, || {
        format!("x has {} columns, weight is [{rows}, {cols}], out has {}", x.cols, out.cols)
    })?;
    out.resize("linear", x.rows)?;
    let mut whole = Vec::new();
    for o in 0..rows {
        let w = weight.dequantised(o, &mut whole);
        let bias = bias.map_or(0.0, |b| f64::from(b.data[o]));
        for row in 0..x.rows {
            out.data[row * rows + o] = (dot(x.row(row), w) + bias) as f32;
        }
    }
    Ok(())
}

/// `activation(gate) * up`.
fn activate(gate: f32, up: f32, activation: Activation) -> f32 {
    let g = f64::from(gate);
    let value = match activation {
        Activation::Silu => g / (1.0 + libm::exp(-g)),
        Activation::GeluTanh => {
            const ROOT_2_OVER_PI: f64 = 0.797_884_560_802_865_4;
            0.5 * g * (1.0 + libm::tanh(ROOT_2_OVER_PI * (g + 0.044_715 * g * g * g)))
        }
    };
    (value * f64::from(up)) as f32
}

fn dot(a: &[f32], b: &[f32]) -> f64 {
    a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum()
}

fn same_shape(
    op: &'static str,
    a: &ReferenceTensor,
    b: &ReferenceTensor,
) -> Result<(), BackendError> {
    require(op, (a.rows, a.cols) == (b.rows, b.cols), || {
        format!("[{}, {}] with [{}, {}]", a.rows, a.cols, b.rows, b.cols)
    })
}

fn require(
    op: &'static str,
    ok: bool,
    detail: impl FnOnce() -> String,
) -> Result<(), BackendError> {
    if ok { Ok(()) } else { Err(BackendError::Shape { op, detail: detail() }) }
}

#[cfg(test)]
mod tests;
