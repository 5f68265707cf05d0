//! The [`Backend`] trait: checks shapes and records kernels.

use crate::adapter::{self, WgpuError, WgpuOptions};
use crate::attend::{self, Mask};
use crate::experts;
use crate::gpu::{Buffer, Counts, Gpu};
use crate::kernels::Kernel;
use crate::kv::WgpuKv;
use crate::memory_access;
use crate::pack::WgpuWeight;
use crate::packed;
use crate::record::Recorder;
use crate::sample;
use crate::tensor::{WgpuTensor, same, shape, word};
use crate::tune::Tuning;
use dunlin_backend::{
    Activation, AttentionParams, Backend, BackendError, DeviceInfo, Experts, HostTensor, KvDtype,
    KvSpec, LinearPart, Part, Precision, Rope, RopeStyle, Samples, SeqRows, Want,
};
use parking_lot::Mutex;
use std::sync::Arc;

/// A graphics adapter as a device. Ops are recorded and run at the next download; calls from
/// several threads take turns.
pub struct WgpuBackend {
    pub(crate) gpu: Arc<Gpu>,
    /// Bound where a kernel takes a buffer that a call does not have.
    pub(crate) nothing: Buffer,
    pub(crate) tuning: Tuning,
    pub(crate) precision: Precision,
    pub(crate) kv: KvDtype,
    inner: Mutex<Inner>,
}

struct Inner {
    rec: Recorder,
    experts: experts::Scratch,
    packed: packed::Scratch,
    splits: attend::Scratch,
    draws: sample::Scratch,
    rotations: Rotations,
}

impl WgpuBackend {
    /// Opens the adapter that `id` names: `wgpu:0`, `wgpu:vulkan:0`, or `wgpu:` and a part of its
    /// name.
    pub fn open(id: &str) -> Result<Self, WgpuError> {
        Self::open_with(id, &WgpuOptions::default())
    }

    /// The same, with what is not the adapter's to say.
    pub fn open_with(id: &str, options: &WgpuOptions) -> Result<Self, WgpuError> {
        let gpu = adapter::open(id, options)?;
        let refused = |e: BackendError| WgpuError::Refused {
            id: id.to_owned(),
            adapter: gpu.description.clone(),
            reason: e.to_string(),
        };
        let nothing = gpu.storage(16, "a placeholder").map_err(refused)?;
        let rec = Recorder::new(gpu.clone()).map_err(refused)?;
        let tuning = Tuning::start(gpu.software);
        let (experts, packed, splits, draws, rotations) = Default::default();
        let inner = Mutex::new(Inner { rec, experts, packed, splits, draws, rotations });
        let precision = options.precision;
        let kv = options.kv.unwrap_or(precision.kv());
        let mut made = Self { gpu: gpu.clone(), nothing, tuning, precision, kv, inner };
        made.tune().map_err(refused)?;
        Ok(made)
    }

    /// The variants of kernels in use.
    pub fn tuning(&self) -> Tuning {
        self.tuning
    }

    /// What was asked of the driver since the device was opened.
    pub fn counts(&self) -> Counts {
        self.gpu.counts()
    }

    /// Whether the device is lost or has failed: nothing but opening it anew mends that.
    pub fn broken(&self) -> bool {
        self.gpu.check().is_err()
    }

    /// Whether products with quantised weights take activations as int8.
    pub(crate) fn multiplies_bytes(&self) -> bool {
        self.precision == Precision::Fast && self.tuning.packed.is_some()
    }

    /// Attention of rows that are nodes of trees: bit `i` of `ancestors[row]` is set where its
    /// sequence's row `i` is the row itself or an ancestor. The kernels have this room for verifying
    /// drafts; nothing drafts yet.
    #[doc(hidden)]
    #[allow(clippy::too_many_arguments)]
    pub fn attend_trees(
        &self,
        q: &WgpuTensor,
        kv: &WgpuKv,
        layer: usize,
        (seqs, ancestors): (&[SeqRows], &[u32]),
        params: &AttentionParams,
        out: &mut WgpuTensor,
    ) -> Result<(), BackendError> {
        let Inner { rec, splits, .. } = &mut *self.inner.lock();
        kv.attend(self, (rec, splits), q, layer, (seqs, Mask::Tree(ancestors)), params, out)
    }

    /// Records an element-wise kernel over the rows of `x` in use.
    pub(crate) fn flat(
        &self,
        rec: &mut Recorder,
        kernel: Kernel,
        y: &Buffer,
        x: &WgpuTensor,
    ) -> Result<(), BackendError> {
        let count = x.vectors();
        let groups = count.div_ceil(32).min(4096);
        rec.dispatch(kernel, &[y], &[&x.buffer], &[count, groups * 32], (groups, 1))
    }

    pub(crate) fn gate_kernel(activation: Activation) -> Kernel {
        match activation {
            Activation::Silu => Kernel::GatedSilu,
            Activation::GeluTanh => Kernel::GatedGelu,
        }
    }
}

/// One row of a bias, or none.
#[derive(Clone, Copy)]
pub(crate) enum Bias<'a> {
    None,
    Row(&'a WgpuTensor),
}

/// How a product takes part in a mixture of experts.
pub(crate) struct Mix<'a> {
    pub shares: &'a WgpuTensor,
    pub expert: usize,
    /// Add the share to what is there.
    pub accumulate: bool,
}

/// Activations of a product, as they are and, where it is to multiply bytes, as int8.
#[derive(Clone, Copy)]
pub(crate) struct Input<'a> {
    pub x: &'a WgpuTensor,
    pub packed: Option<(&'a Buffer, &'a Buffer)>,
}

/// Records `out = x * weight^T (+ bias)`.
pub(crate) fn linear_part(
    backend: &WgpuBackend,
    rec: &mut Recorder,
    input: Input<'_>,
    weight: &WgpuWeight,
    bias: Bias<'_>,
    mix: Option<Mix<'_>>,
    out: &mut WgpuTensor,
) -> Result<(), BackendError> {
    const OP: &str = "linear";
    let (x, layout) = (input.x, &weight.layout);
    same(OP, "columns of x", x.cols, layout.cols)?;
    same(OP, "columns of out", out.cols, layout.rows)?;
    out.set_rows(OP, x.rows)?;
    let bias_buffer = match bias {
        Bias::None => &backend.nothing,
        Bias::Row(b) => {
            same(OP, "columns of the bias", b.cols, layout.rows)?;
            same(OP, "rows of the bias", b.rows, 1)?;
            &b.buffer
        }
    };
    let shares = mix.as_ref().map_or(&backend.nothing, |m| &m.shares.buffer);
    let packed = input.packed.filter(|_| weight.is_quantised());
    let (kernel, rows) = match packed {
        Some(_) => backend.tuning.packed_product(x.rows).packed_kernel(layout.dtype),
        None => backend.tuning.kernel(layout.dtype, x.rows),
    };
    for chunk in &weight.chunks {
        let w = weight.params();
        let params = [
            w[0],
            w[1],
            w[2],
            w[3],
            word(x.rows),
            word(x.stride / if packed.is_some() { 32 } else { 4 }),
            word(out.stride),
            word(chunk.rows.start),
            word(chunk.rows.len()),
            u32::from(matches!(bias, Bias::Row(_))),
            u32::from(mix.is_some()),
            mix.as_ref().map_or(0, |m| word(m.shares.stride)),
            mix.as_ref().map_or(0, |m| word(m.expert)),
            u32::from(mix.as_ref().is_some_and(|m| m.accumulate)),
        ];
        let size = (word(chunk.rows.len()).div_ceil(32), word(x.rows).div_ceil(rows));
        let write = [&out.buffer];
        match packed {
            Some((codes, scales)) => {
                let read = [&chunk.codes, &chunk.scales, codes, scales, bias_buffer, shares];
                rec.dispatch(kernel, &read, &write, &params, size)?;
            }
            None => {
                let read = [&chunk.codes, &chunk.scales, &x.buffer, bias_buffer, shares];
                rec.dispatch(kernel, &read, &write, &params, size)?;
            }
        }
    }
    Ok(())
}

/// Cosines and sines of the step's positions, made once a step for each kind of layer.
#[derive(Default)]
struct Rotations {
    made: Vec<Rotation>,
}

struct Rotation {
    inv_freq: Arc<[f32]>,
    positions: Vec<u32>,
    /// Bits of (cos, sin).
    table: Vec<u32>,
}

impl Rotations {
    /// Kinds of rotary embedding in one model (two), for as many engines as share a device.
    const KEPT: usize = 4;

    /// Pairs (cos, sin) `[row][i]`, as bits.
    fn of(&mut self, rope: &Rope, positions: &[u32]) -> &[u32] {
        let known = self.made.iter().position(|made| {
            let same = Arc::ptr_eq(&made.inv_freq, &rope.inv_freq);
            (same || made.inv_freq == rope.inv_freq) && made.positions == positions
        });
        let index = known.unwrap_or_else(|| {
            if self.made.len() == Self::KEPT {
                self.made.remove(0);
            }
            let mut table = Vec::with_capacity(2 * positions.len() * rope.inv_freq.len());
            for position in positions {
                for freq in rope.inv_freq.iter() {
                    let angle = f64::from(*position as f32 * freq);
                    table.push((libm::cos(angle) as f32).to_bits());
                    table.push((libm::sin(angle) as f32).to_bits());
                }
            }
            let (inv_freq, positions) = (rope.inv_freq.clone(), positions.to_vec());
            self.made.push(Rotation { inv_freq, positions, table });
            self.made.len() - 1
        });
        &self.made[index].table
    }
}

impl Backend for WgpuBackend {
    type Tensor = WgpuTensor;
    type Weight = WgpuWeight;
    type Kv = WgpuKv;

    fn info(&self) -> DeviceInfo {
        DeviceInfo {
            id: self.gpu.id.clone(),
            description: self.gpu.description.clone(),
            total_bytes: self.gpu.total_bytes(),
            free_bytes: self.gpu.free_bytes(),
        }
    }

    fn weight(&self, t: &HostTensor, part: &Part) -> Result<WgpuWeight, BackendError> {
        WgpuWeight::new(&self.gpu, t, part)
    }

    fn weight_bytes(&self, w: &WgpuWeight) -> u64 {
        w.bytes()
    }

    fn tensor(&self, capacity: usize, cols: usize) -> Result<WgpuTensor, BackendError> {
        WgpuTensor::new(&self.gpu, capacity, cols)
    }

    fn set_rows(&self, t: &mut WgpuTensor, rows: usize) -> Result<(), BackendError> {
        t.set_rows("set_rows", rows)
    }

    fn kv_dtype(&self) -> KvDtype {
        self.kv
    }

    fn kv(&self, spec: &KvSpec) -> Result<WgpuKv, BackendError> {
        WgpuKv::new(&self.gpu, spec, self.kv)
    }

    fn upload(&self, src: &[f32], dst: &mut WgpuTensor) -> Result<(), BackendError> {
        const OP: &str = "upload";
        if dst.cols == 0 || !src.len().is_multiple_of(dst.cols) {
            return Err(shape(OP, format!("{} elements in rows of {}", src.len(), dst.cols)));
        }
        dst.set_rows(OP, src.len() / dst.cols)?;
        let rec = &mut self.inner.lock().rec;
        // The copy runs before whatever is submitted next, so recorded work has to go first.
        rec.begin(0)?;
        rec.submit()?;
        let queue = &self.gpu.queue;
        if dst.stride == dst.cols {
            queue.write_buffer(&dst.buffer.raw, 0, bytemuck::cast_slice(src));
        } else {
            let mut padded = vec![0.0f32; dst.rows * dst.stride];
            for (to, from) in padded.chunks_exact_mut(dst.stride).zip(src.chunks_exact(dst.cols)) {
                to[..dst.cols].copy_from_slice(from);
            }
            queue.write_buffer(&dst.buffer.raw, 0, bytemuck::cast_slice(&padded));
        }
        self.gpu.check()
    }

    fn download(&self, t: &WgpuTensor, out: &mut Vec<f32>) -> Result<(), BackendError> {
        out.clear();
        out.reserve(t.rows * t.cols);
        let bytes = (t.rows * t.stride * size_of::<f32>()) as u64;
        self.inner.lock().rec.read(&[(&t.buffer, 0..bytes)], |values| {
            for row in bytemuck::cast_slice::<_, f32>(values).chunks_exact(t.stride) {
                out.extend_from_slice(&row[..t.cols]);
            }
        })
    }

    fn embed(
        &self,
        table: &WgpuWeight,
        ids: &[u32],
        scale: f32,
        out: &mut WgpuTensor,
    ) -> Result<(), BackendError> {
        const OP: &str = "embed";
        let layout = &table.layout;
        same(OP, "columns of out", out.cols, layout.cols)?;
        if let Some(id) = ids.iter().find(|id| **id as usize >= layout.rows) {
            return Err(shape(OP, format!("token {id} is not in a table of {} rows", layout.rows)));
        }
        out.set_rows(OP, ids.len())?;
        let rec = &mut self.inner.lock().rec;
        rec.begin(ids.len())?;
        let (at, arena) = (rec.put(ids), rec.arena());
        let size = (word(layout.blocks).div_ceil(32), word(ids.len()));
        for chunk in &table.chunks {
            let w = table.params();
            let params = [
                w[0],
                w[1],
                w[2],
                w[3],
                at,
                word(chunk.rows.start),
                word(chunk.rows.len()),
                word(out.stride / 4),
                scale.to_bits(),
            ];
            let read = [&chunk.codes, &chunk.scales, &*arena];
            rec.dispatch(Kernel::Embed(layout.dtype), &read, &[&out.buffer], &params, size)?;
        }
        Ok(())
    }

    fn rms_norm(
        &self,
        x: &WgpuTensor,
        weight: &WgpuTensor,
        eps: f32,
        segment: usize,
        out: &mut WgpuTensor,
    ) -> Result<(), BackendError> {
        const OP: &str = "rms_norm";
        same(OP, "columns of out", out.cols, x.cols)?;
        out.set_rows(OP, x.rows)?;
        let size = norm_size(x, weight, segment)?;
        let params = [word(segment), word(x.stride), word(out.stride), eps.to_bits()];
        let kernel = Kernel::Norm { in_place: false, lanes: self.tuning.norm_lanes };
        let rec = &mut self.inner.lock().rec;
        rec.begin(0)?;
        rec.dispatch(kernel, &[&x.buffer, &weight.buffer], &[&out.buffer], &params, size)
    }

    fn rms_norm_inplace(
        &self,
        x: &mut WgpuTensor,
        weight: &WgpuTensor,
        eps: f32,
        segment: usize,
    ) -> Result<(), BackendError> {
        let size = norm_size(x, weight, segment)?;
        let params = [word(segment), word(x.stride), word(x.stride), eps.to_bits()];
        let kernel = Kernel::Norm { in_place: true, lanes: self.tuning.norm_lanes };
        let rec = &mut self.inner.lock().rec;
        rec.begin(0)?;
        rec.dispatch(kernel, &[&weight.buffer], &[&x.buffer], &params, size)
    }

    fn add(&self, x: &mut WgpuTensor, delta: &WgpuTensor) -> Result<(), BackendError> {
        same("add", "rows of delta", delta.rows, x.rows)?;
        same("add", "columns of delta", delta.cols, x.cols)?;
        let rec = &mut self.inner.lock().rec;
        rec.begin(0)?;
        self.flat(rec, Kernel::Add, &delta.buffer, x)
    }

    fn linear(
        &self,
        x: &WgpuTensor,
        parts: &mut [LinearPart<'_, Self>],
    ) -> Result<(), BackendError> {
        let Inner { rec, packed, .. } = &mut *self.inner.lock();
        rec.begin(0)?;
        let bytes = self.multiplies_bytes() && parts.iter().any(|p| p.weight.is_quantised());
        let packed = if bytes { Some(packed.of(&self.gpu, rec, x)?) } else { None };
        for part in parts {
            let x = Input { x, packed };
            let bias = part.bias.map_or(Bias::None, Bias::Row);
            linear_part(self, rec, x, part.weight, bias, None, part.out)?;
        }
        Ok(())
    }

    fn rope(&self, x: &mut WgpuTensor, positions: &[u32], rope: &Rope) -> Result<(), BackendError> {
        const OP: &str = "rope";
        let (dim, half) = (rope.head_dim, rope.head_dim / 2);
        same(OP, "positions", positions.len(), x.rows)?;
        same(OP, "angles", rope.inv_freq.len(), half)?;
        if dim == 0 || !dim.is_multiple_of(2) || !x.cols.is_multiple_of(dim) {
            return Err(shape(OP, format!("{} columns in heads of {dim}", x.cols)));
        }
        let Inner { rec, rotations, .. } = &mut *self.inner.lock();
        let table = rotations.of(rope, positions);
        rec.begin(table.len())?;
        let (at, arena) = (rec.put(table), rec.arena());
        let pairs = word(x.cols / 2);
        let interleaved = u32::from(rope.style == RopeStyle::Interleaved);
        let params = [at, word(half), pairs, word(x.stride), interleaved];
        let size = (pairs.div_ceil(32), word(x.rows));
        rec.dispatch(Kernel::Rope, &[&arena], &[&x.buffer], &params, size)
    }

    fn kv_write(
        &self,
        kv: &mut WgpuKv,
        layer: usize,
        k: &WgpuTensor,
        v: &WgpuTensor,
        seqs: &[SeqRows],
    ) -> Result<(), BackendError> {
        kv.write(&mut self.inner.lock().rec, layer, k, v, seqs)
    }

    fn attention(
        &self,
        q: &WgpuTensor,
        kv: &WgpuKv,
        layer: usize,
        seqs: &[SeqRows],
        params: &AttentionParams,
        out: &mut WgpuTensor,
    ) -> Result<(), BackendError> {
        let Inner { rec, splits, .. } = &mut *self.inner.lock();
        kv.attend(self, (rec, splits), q, layer, (seqs, Mask::Causal), params, out)
    }

    fn gated(
        &self,
        gate: &mut WgpuTensor,
        up: &WgpuTensor,
        activation: Activation,
    ) -> Result<(), BackendError> {
        same("gated", "rows of up", up.rows, gate.rows)?;
        same("gated", "columns of up", up.cols, gate.cols)?;
        let rec = &mut self.inner.lock().rec;
        rec.begin(0)?;
        self.flat(rec, Self::gate_kernel(activation), &up.buffer, gate)
    }

    fn experts(
        &self,
        x: &WgpuTensor,
        router: &WgpuTensor,
        experts: &Experts<'_, Self>,
        out: &mut WgpuTensor,
    ) -> Result<(), BackendError> {
        let Inner { rec, experts: scratch, packed, .. } = &mut *self.inner.lock();
        experts::run(self, rec, (scratch, packed), x, router, experts, out)
    }

    fn gather(
        &self,
        x: &WgpuTensor,
        rows: &[u32],
        out: &mut WgpuTensor,
    ) -> Result<(), BackendError> {
        const OP: &str = "gather";
        same(OP, "columns of out", out.cols, x.cols)?;
        if let Some(row) = rows.iter().find(|r| **r as usize >= x.rows) {
            return Err(shape(OP, format!("row {row} of {}", x.rows)));
        }
        out.set_rows(OP, rows.len())?;
        let rec = &mut self.inner.lock().rec;
        rec.begin(rows.len())?;
        let (at, arena) = (rec.put(rows), rec.arena());
        let stride = word(x.stride / 4);
        let size = (stride.div_ceil(32), word(rows.len()));
        rec.dispatch(Kernel::Gather, &[&*arena, &x.buffer], &[&out.buffer], &[at, stride], size)
    }

    fn sample(
        &self,
        logits: &mut WgpuTensor,
        wants: &[Want],
        out: &mut Samples,
    ) -> Result<(), BackendError> {
        let Inner { rec, draws, .. } = &mut *self.inner.lock();
        sample::run(self, rec, draws, logits, wants, out)
    }

    fn kv_copy(&self, kv: &mut WgpuKv, pairs: &[(u32, u32)]) -> Result<(), BackendError> {
        kv.copy(&mut self.inner.lock().rec, pairs)
    }

    fn weight_sum(&self, w: &WgpuWeight) -> Option<u64> {
        memory_access::weight_sum(&mut self.inner.lock().rec, w).ok()
    }

    fn weight_flip(&self, w: &WgpuWeight, word: u64, bit: u32) -> Result<(u32, u32), BackendError> {
        memory_access::weight_flip(&self.gpu, &mut self.inner.lock().rec, w, word, bit)
    }

    fn kv_flip(
        &self,
        kv: &mut WgpuKv,
        layer: usize,
        block: u32,
        slot: usize,
        bit: u32,
    ) -> Result<(u32, u32), BackendError> {
        kv.flip(&self.gpu, &mut self.inner.lock().rec, (layer, block, slot), bit)
    }

    fn kv_read(&self, kv: &WgpuKv, block: u32) -> Result<Vec<u8>, BackendError> {
        kv.read(&mut self.inner.lock().rec, block)
    }

    fn kv_put(&self, kv: &mut WgpuKv, block: u32, content: &[u8]) -> Result<(), BackendError> {
        kv.put(&self.gpu, &mut self.inner.lock().rec, block, content)
    }

    fn lose(&self) -> Result<(), BackendError> {
        self.gpu.device.destroy();
        Ok(())
    }
}

/// Workgroups of a norm: segments of a row, rows.
fn norm_size(
    x: &WgpuTensor,
    weight: &WgpuTensor,
    segment: usize,
) -> Result<(u32, u32), BackendError> {
    const OP: &str = "rms_norm";
    same(OP, "columns of the weight", weight.cols, segment)?;
    if weight.rows == 0 || segment == 0 || !x.cols.is_multiple_of(segment) {
        return Err(shape(OP, format!("{} columns in segments of {segment}", x.cols)));
    }
    Ok((word(x.cols / segment), word(x.rows)))
}
