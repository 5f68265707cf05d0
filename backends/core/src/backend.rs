//! The op-level trait that one forward pass (crate `dunlin-model`) is generic over.
//!
//! Contract for every backend:
//! - Activations are float32, row-major `[rows, cols]`, one row per token of the step.
//! - Ops enqueue in program order; [`Backend::download`] and [`Backend::sample`] wait. A host backend may run at once.
//! - **Batch invariance**: each output row is a function of its own input row (and of its own
//!   sequence's KV) alone, bit for bit: fixed reduction order, fixed KV tile of [`KV_TILE`]
//!   tokens, no atomics, no dependence on how many rows share the call or on thread count.
//! - Nothing allocates per op after [`Backend::tensor`] made the workspaces.

use crate::draw::{self, Samples, Want};
use crate::{BackendError, HostTensor};
use std::ops::Range;

/// Tokens in one attention tile. The online softmax moves by a fixed whole number of tiles at
/// multiples of the absolute position, on every backend. A KV block holds a whole number of tiles,
/// so the order of reductions never depends on the block size.
pub const KV_TILE: usize = 16;

/// Which arithmetic a backend uses for linear layers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Precision {
    /// Dequantised weights, float32 activations: the oracle.
    Exact,
    /// Quantised weights times int8 activations (per row and 32-wide block).
    Fast,
}

impl Precision {
    /// What KV stores hold unless something else is asked for.
    pub const fn kv(self) -> KvDtype {
        match self {
            Precision::Exact => KvDtype::F32,
            Precision::Fast => KvDtype::F16,
        }
    }
}

/// How keys and values are kept between steps. Other types are other cache contents: blocks of one
/// never serve another.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum KvDtype {
    F32,
    /// IEEE half precision, rounded to nearest even when written.
    F16,
    /// Int8 with one float32 scale per token and head, for keys and for values.
    Int8,
}

impl KvDtype {
    pub const ALL: [KvDtype; 3] = [KvDtype::F32, KvDtype::F16, KvDtype::Int8];

    /// As `cluster.toml` names it.
    pub const fn name(self) -> &'static str {
        match self {
            KvDtype::F32 => "f32",
            KvDtype::F16 => "f16",
            KvDtype::Int8 => "int8",
        }
    }

    /// Bytes of one token's keys and values of one head in one layer.
    pub const fn head_bytes(self, head_dim: usize) -> usize {
        2 * match self {
            KvDtype::F32 => 4 * head_dim,
            KvDtype::F16 => 2 * head_dim,
            KvDtype::Int8 => head_dim + size_of::<f32>(),
        }
    }
}

/// What a device is and how much it can hold.
#[derive(Debug, Clone, serde::Serialize, serde::Deserialize)]
pub struct DeviceInfo {
    /// As written in `cluster.toml`: `cpu`, `cuda:0`, `wgpu:0`.
    pub id: String,
    /// For people: adapter or processor, and the instruction path in use.
    pub description: String,
    pub total_bytes: u64,
    pub free_bytes: u64,
}

/// The part of a stored matrix that a shard needs (tensor parallelism slices rows or columns).
/// Column ranges begin and end on multiples of 32.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Part {
    pub rows: Range<usize>,
    pub cols: Range<usize>,
}

impl Part {
    /// The whole of `t`.
    pub fn all(t: &HostTensor) -> Self {
        Self { rows: 0..t.rows, cols: 0..t.cols }
    }
}

/// Shape of one shard's paged KV store.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KvSpec {
    pub layers: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    pub blocks: usize,
    /// Tokens per block; a multiple of [`KV_TILE`].
    pub block_tokens: usize,
}

/// The bit of a KV entry that [`Backend::kv_flip`] flips.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KvBit {
    /// Of the values, not of the keys.
    pub value: bool,
    pub head: usize,
    /// Element within the head.
    pub element: usize,
    bit: usize,
}

impl KvSpec {
    /// Which entry of `slot` of `block` in `layer` the bit is of, as [`Backend::kv_flip`] counts.
    ///
    /// # Errors
    /// There is no such slot.
    pub fn bit(
        &self,
        layer: usize,
        block: u32,
        slot: usize,
        bit: u32,
    ) -> Result<KvBit, BackendError> {
        if layer >= self.layers || block as usize >= self.blocks || slot >= self.block_tokens {
            let detail = format!("slot {slot} of block {block} of layer {layer}");
            return Err(BackendError::Shape { op: "kv_flip", detail });
        }
        let half = self.kv_heads * self.head_dim;
        let entry = (bit / 32) as usize % (2 * half);
        let (head, element) = (entry % half / self.head_dim, entry % self.head_dim);
        Ok(KvBit { value: entry >= half, head, element, bit: bit as usize % 32 })
    }
}

impl KvBit {
    /// Which bit of an element of `width` bits it is. Signs and exponents are on top, whatever the
    /// width.
    pub fn within(&self, width: usize) -> usize {
        (self.bit + width).saturating_sub(32)
    }
}

/// How rotary pairs are laid out in a head of `d` elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub enum RopeStyle {
    /// Pairs `(i, i + d/2)`: Hugging Face checkpoints, GGUF "NEOX".
    HalfSplit,
    /// Pairs `(2i, 2i + 1)`: llama-family GGUF files, whose q and k rows are permuted.
    Interleaved,
}

/// Rotary embedding of one kind of layer: `angle(pos, i) = pos * inv_freq[i]` in float32.
#[derive(Debug, Clone, PartialEq)]
pub struct Rope {
    pub style: RopeStyle,
    pub head_dim: usize,
    /// Length `head_dim / 2`; scaling (linear, llama3) is already applied.
    pub inv_freq: std::sync::Arc<[f32]>,
}

/// Gated activation of a feed-forward block.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub enum Activation {
    /// `x * sigmoid(x)`
    Silu,
    /// Gaussian error linear unit, tanh form.
    GeluTanh,
}

/// Rows of one sequence within a step.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SeqRows {
    /// Rows of the step's activations that belong to this sequence, in position order.
    pub rows: Range<usize>,
    /// Position of the first of those rows.
    pub position: usize,
    /// KV block table: block `i` holds positions `i*block_tokens ..`. Covers all rows.
    pub blocks: Vec<u32>,
}

/// Attention hyper-parameters of one layer (of this tensor rank: local head counts).
#[derive(Debug, Clone, PartialEq)]
pub struct AttentionParams {
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    pub scale: f32,
    /// Query at position `p` sees keys at `p - window + 1 ..= p`; `None` is full causal.
    pub window: Option<usize>,
    /// `cap * tanh(score / cap)` where set.
    pub softcap: Option<f32>,
    /// For each local query head, its local KV head (GQA; uneven under tensor parallelism).
    pub kv_head_of: Vec<usize>,
}

/// One weight of a [`Backend::linear`] call: `out = x * weight^T (+ bias)`.
pub struct LinearPart<'a, B: Backend> {
    pub weight: &'a B::Weight,
    /// One row of `out.cols` elements.
    pub bias: Option<&'a B::Tensor>,
    pub out: &'a mut B::Tensor,
}

/// A root mean square norm over whole rows, as the first half of a fused op.
pub struct Norm<'a, B: Backend> {
    /// One row of as many elements as the input has columns.
    pub weight: &'a B::Tensor,
    pub cols: usize,
    pub eps: f32,
}

/// Weights of a dense feed-forward block: `down(activation(gate(x)) * up(x))`.
pub struct FeedForward<'a, B: Backend> {
    pub gate: &'a B::Weight,
    pub up: &'a B::Weight,
    pub down: &'a B::Weight,
    pub activation: Activation,
}

/// Room for what is between the products of [`Backend::feed_forward`].
pub struct FeedForwardRoom<'a, B: Backend> {
    pub normed: &'a mut B::Tensor,
    pub gate: &'a mut B::Tensor,
    pub up: &'a mut B::Tensor,
}

/// Weights of one mixture-of-experts block, one matrix per expert.
pub struct Experts<'a, B: Backend> {
    pub gate: &'a [B::Weight],
    pub up: &'a [B::Weight],
    pub down: &'a [B::Weight],
    pub top_k: usize,
    /// Divide the chosen probabilities by their sum.
    pub normalise: bool,
    pub activation: Activation,
}

/// A device that can run the ops of a transformer. See the module's contract.
pub trait Backend: Send + Sync + Sized + 'static {
    /// Float32 activations `[rows <= capacity, cols]`.
    type Tensor: Send + Sync;
    /// An immutable matrix in device memory; shared by shards across restarts through `Arc`.
    type Weight: Send + Sync;
    /// One shard's KV store.
    type Kv: Send;

    fn info(&self) -> DeviceInfo;

    /// Uploads `part` of `t`, kept quantised and repacked as the device likes it.
    fn weight(&self, t: &HostTensor, part: &Part) -> Result<Self::Weight, BackendError>;
    /// Bytes that `weight` occupies on the device.
    fn weight_bytes(&self, w: &Self::Weight) -> u64;
    /// A zeroed tensor with room for `capacity` rows; `rows` starts at `capacity`.
    fn tensor(&self, capacity: usize, cols: usize) -> Result<Self::Tensor, BackendError>;
    /// Sets how many rows are in use (`<= capacity`).
    fn set_rows(&self, t: &mut Self::Tensor, rows: usize) -> Result<(), BackendError>;
    fn kv(&self, spec: &KvSpec) -> Result<Self::Kv, BackendError>;
    /// What its KV stores hold.
    fn kv_dtype(&self) -> KvDtype {
        KvDtype::F32
    }

    /// Host to device; sets the row count from `src.len() / cols`.
    fn upload(&self, src: &[f32], dst: &mut Self::Tensor) -> Result<(), BackendError>;
    /// Device to host, after all enqueued work: the rows in use, row-major.
    fn download(&self, t: &Self::Tensor, out: &mut Vec<f32>) -> Result<(), BackendError>;

    /// `out[i] = table[ids[i]] * scale`.
    fn embed(
        &self,
        table: &Self::Weight,
        ids: &[u32],
        scale: f32,
        out: &mut Self::Tensor,
    ) -> Result<(), BackendError>;

    /// Root mean square norm over each `segment` of a row (a whole row, or one head):
    /// `out = x / sqrt(mean(x^2) + eps) * weight`. `weight` is one row of `segment` elements.
    fn rms_norm(
        &self,
        x: &Self::Tensor,
        weight: &Self::Tensor,
        eps: f32,
        segment: usize,
        out: &mut Self::Tensor,
    ) -> Result<(), BackendError>;

    /// The same in place (per-head q/k norms).
    fn rms_norm_inplace(
        &self,
        x: &mut Self::Tensor,
        weight: &Self::Tensor,
        eps: f32,
        segment: usize,
    ) -> Result<(), BackendError>;

    /// `x += delta`.
    fn add(&self, x: &mut Self::Tensor, delta: &Self::Tensor) -> Result<(), BackendError>;

    /// Several weights over one input (fused QKV, fused gate and up).
    fn linear(
        &self,
        x: &Self::Tensor,
        parts: &mut [LinearPart<'_, Self>],
    ) -> Result<(), BackendError>;

    /// Rotates every head of every row; `positions[row]` is absolute.
    fn rope(
        &self,
        x: &mut Self::Tensor,
        positions: &[u32],
        rope: &Rope,
    ) -> Result<(), BackendError>;

    /// Stores the rows' keys and values at their positions in layer `layer` (local index).
    fn kv_write(
        &self,
        kv: &mut Self::Kv,
        layer: usize,
        k: &Self::Tensor,
        v: &Self::Tensor,
        seqs: &[SeqRows],
    ) -> Result<(), BackendError>;

    /// Paged causal attention with an online softmax over whole tiles of [`KV_TILE`] keys.
    fn attention(
        &self,
        q: &Self::Tensor,
        kv: &Self::Kv,
        layer: usize,
        seqs: &[SeqRows],
        params: &AttentionParams,
        out: &mut Self::Tensor,
    ) -> Result<(), BackendError>;

    /// `gate = activation(gate) * up`.
    fn gated(
        &self,
        gate: &mut Self::Tensor,
        up: &Self::Tensor,
        activation: Activation,
    ) -> Result<(), BackendError>;

    // Ops that follow each other in every layer. Each is the ops it names, to the bit; a backend may
    // do them in one go. `room` is what lies between them: nothing can be told of it afterwards.

    /// [`Backend::rms_norm`], then [`Backend::linear`].
    fn norm_linear(
        &self,
        x: &Self::Tensor,
        norm: &Norm<'_, Self>,
        room: &mut Self::Tensor,
        parts: &mut [LinearPart<'_, Self>],
    ) -> Result<(), BackendError> {
        self.rms_norm(x, norm.weight, norm.eps, norm.cols, room)?;
        self.linear(room, parts)
    }

    /// [`Backend::rope`] of queries and keys, then [`Backend::kv_write`].
    #[allow(clippy::too_many_arguments)]
    fn rope_write(
        &self,
        (q, k, v): (&mut Self::Tensor, &mut Self::Tensor, &Self::Tensor),
        positions: &[u32],
        rope: &Rope,
        kv: &mut Self::Kv,
        layer: usize,
        seqs: &[SeqRows],
    ) -> Result<(), BackendError> {
        self.rope(q, positions, rope)?;
        self.rope(k, positions, rope)?;
        self.kv_write(kv, layer, k, v, seqs)
    }

    /// [`Backend::attention`] into `room`, then [`Backend::linear`] of it into `delta`; with a
    /// residual stream, that is added to it and nothing can be told of `delta`.
    #[allow(clippy::too_many_arguments)]
    fn attention_linear(
        &self,
        q: &Self::Tensor,
        (kv, layer): (&Self::Kv, usize),
        seqs: &[SeqRows],
        params: &AttentionParams,
        weight: &Self::Weight,
        room: &mut Self::Tensor,
        delta: &mut Self::Tensor,
        residual: Option<&mut Self::Tensor>,
    ) -> Result<(), BackendError> {
        self.attention(q, kv, layer, seqs, params, room)?;
        self.linear(room, &mut [LinearPart { weight, bias: None, out: &mut *delta }])?;
        residual.map_or(Ok(()), |x| self.add(x, delta))
    }

    /// `delta = down(activation(gate(h)) * up(h))` with `h = norm(x)`: [`Backend::norm_linear`],
    /// [`Backend::gated`], [`Backend::linear`]. With `add`, that is added to `x` and nothing can be
    /// told of `delta`.
    fn feed_forward(
        &self,
        x: &mut Self::Tensor,
        norm: &Norm<'_, Self>,
        weights: &FeedForward<'_, Self>,
        room: FeedForwardRoom<'_, Self>,
        delta: &mut Self::Tensor,
        add: bool,
    ) -> Result<(), BackendError> {
        let FeedForwardRoom { normed, gate, up } = room;
        let mut parts = [
            LinearPart { weight: weights.gate, bias: None, out: &mut *gate },
            LinearPart { weight: weights.up, bias: None, out: &mut *up },
        ];
        self.norm_linear(x, norm, normed, &mut parts)?;
        self.gated(gate, up, weights.activation)?;
        let down = LinearPart { weight: weights.down, bias: None, out: &mut *delta };
        self.linear(gate, &mut [down])?;
        if add { self.add(x, delta) } else { Ok(()) }
    }

    /// `out = sum over the top_k experts e of softmax(router)[e] * ffn_e(x)`; `router` is
    /// `[rows, experts]`. Ties go to the lower expert index; experts add in ascending index.
    fn experts(
        &self,
        x: &Self::Tensor,
        router: &Self::Tensor,
        experts: &Experts<'_, Self>,
        out: &mut Self::Tensor,
    ) -> Result<(), BackendError>;

    /// `out[i] = x[rows[i]]`.
    fn gather(
        &self,
        x: &Self::Tensor,
        rows: &[u32],
        out: &mut Self::Tensor,
    ) -> Result<(), BackendError>;

    /// Draws the tokens of rows of logits, or reads rows back, and waits as [`Backend::download`]
    /// does. `wants` has one entry for each row in use. The logits may be changed. Drawn tokens are
    /// those of [`draw::draw`], to the bit; a backend without a way of its own draws on the host.
    fn sample(
        &self,
        logits: &mut Self::Tensor,
        wants: &[Want],
        out: &mut Samples,
    ) -> Result<(), BackendError> {
        self.download(logits, &mut out.logits)?;
        let values = out.logits.len();
        let cols = values.checked_div(wants.len()).unwrap_or(0);
        if cols * wants.len() != values {
            let detail = format!("{values} logits in {} rows", wants.len());
            return Err(BackendError::Shape { op: "sample", detail });
        }
        draw::sample_rows(cols, wants, out);
        Ok(())
    }

    /// Copies whole KV blocks (copy-on-write), all layers.
    fn kv_copy(&self, kv: &mut Self::Kv, pairs: &[(u32, u32)]) -> Result<(), BackendError>;

    /// Does `work`, which ends a step, where it keeps the calling thread from the next one least: a
    /// backend with threads that would wait meanwhile lets one of them do it. It is done once, before
    /// the next step has run, and in the order of calls.
    fn beside(&self, work: Box<dyn FnOnce() + Send>) {
        work();
    }

    // What follows serves integrity checks and fault injection; a backend may do without.

    /// A [`checksum`](crate::checksum) over the weight's bytes as they lie in device memory; the same
    /// for the same bytes on a device of the same kind.
    fn weight_sum(&self, _w: &Self::Weight) -> Option<u64> {
        None
    }

    /// Flips bit `bit` (below 32) of the 4-byte word `word` of a weight in device memory; gives the
    /// word before and after, read back. No op may run meanwhile.
    fn weight_flip(
        &self,
        _w: &Self::Weight,
        _word: u64,
        _bit: u32,
    ) -> Result<(u32, u32), BackendError> {
        Err(cannot("weight_flip"))
    }

    /// Flips bit `bit` of the entry (keys, then values) of `slot` of `block` in `layer` (local
    /// index); gives the element before and after, read back. There are 32 bits to an element:
    /// narrower ones have the upper of them, and the lowest for what is below. `bit` is taken modulo
    /// the size.
    fn kv_flip(
        &self,
        _kv: &mut Self::Kv,
        _layer: usize,
        _block: u32,
        _slot: usize,
        _bit: u32,
    ) -> Result<(u32, u32), BackendError> {
        Err(cannot("kv_flip"))
    }

    /// Everything that a block holds, all layers, in a form of the backend's own.
    fn kv_read(&self, _kv: &Self::Kv, _block: u32) -> Result<Vec<u8>, BackendError> {
        Err(cannot("kv_read"))
    }

    /// Puts back what [`Backend::kv_read`] gave.
    fn kv_put(&self, _kv: &mut Self::Kv, _block: u32, _content: &[u8]) -> Result<(), BackendError> {
        Err(cannot("kv_put"))
    }

    /// Gives up the device, as if it had been unplugged: what is asked of it from now on is
    /// [`BackendError::DeviceLost`], until it is opened anew.
    fn lose(&self) -> Result<(), BackendError> {
        Err(cannot("lose"))
    }
}

fn cannot(op: &'static str) -> BackendError {
    BackendError::Shape { op, detail: "this backend cannot do it".into() }
}
