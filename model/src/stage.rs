//! The weights of one stage (and tensor rank) on a device, and how much room they take.

use crate::engine::StageSpec;
use crate::error::LoadError;
use crate::spec::{ModelSpec, RopeScaling, RopeSpec};
use crate::split::{RankSplit, SplitError, plan_split};
use crate::weights::{WeightId, WeightSource, has_weight, norms_lack_one, tensor_of, weight};
use dunlin_backend::{Backend, BackendError, HostTensor, KvDtype, Part, Rope, quant};
use std::cell::RefCell;
use std::collections::BTreeSet;
use std::sync::Arc;

/// Everything immutable that a shard computes with; shared by its lives.
pub struct StageWeights<B: Backend> {
    pub spec: ModelSpec,
    /// Which part of the model this is (its KV sizes do not matter here).
    pub stage: StageSpec,
    pub split: RankSplit,
    /// On the first stage.
    pub embedding: Option<B::Weight>,
    pub layers: Vec<LayerWeights<B>>,
    /// On the last stage.
    pub output_norm: Option<B::Tensor>,
    /// On the last stage, unless it is the first one too and the head is tied.
    pub head: Option<B::Weight>,
    pub rope: Rope,
    pub rope_local: Rope,
    /// Name of each of [`Self::matrices`] in its file, and the sum of its bytes on the device.
    loaded: Vec<(String, Option<u64>)>,
}

/// One transformer block.
pub struct LayerWeights<B: Backend> {
    pub local: bool,
    pub attn_norm: B::Tensor,
    pub q: B::Weight,
    pub k: B::Weight,
    pub v: B::Weight,
    pub qkv_bias: Option<[B::Tensor; 3]>,
    /// q, then k.
    pub qk_norm: Option<[B::Tensor; 2]>,
    pub attn_out: B::Weight,
    pub post_attn_norm: Option<B::Tensor>,
    pub ffn_norm: B::Tensor,
    pub ffn: FfnWeights<B>,
    pub post_ffn_norm: Option<B::Tensor>,
}

pub enum FfnWeights<B: Backend> {
    Dense { gate: B::Weight, up: B::Weight, down: B::Weight },
    Mixture { router: B::Weight, gate: Vec<B::Weight>, up: Vec<B::Weight>, down: Vec<B::Weight> },
}

/// Why a stage could not be loaded.
#[derive(Debug, thiserror::Error)]
pub enum StageError {
    #[error(transparent)]
    Load(#[from] LoadError),
    #[error(transparent)]
    Backend(#[from] BackendError),
    #[error("tensor parallelism: {0}")]
    Split(#[from] SplitError),
    #[error(
        "the stage wants layers {begin}..{end} and rank {rank} of {ranks}; \
         the model has {have} layers"
    )]
    Stage { begin: usize, end: usize, rank: usize, ranks: usize, have: usize },
    #[error(
        "tensor '{name}' is [{rows}, {cols}], the model's shape asks for [{want_rows}, {want_cols}]"
    )]
    Shape { name: String, rows: usize, cols: usize, want_rows: usize, want_cols: usize },
    #[error("the weights could not be verified: {0}")]
    Verify(String),
}

/// A matrix that no longer is on the device what was loaded.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Changed {
    pub tensor: String,
    pub was: u64,
    pub is: u64,
}

impl<B: Backend> StageWeights<B> {
    /// Reads and uploads the stage's part of the model. Meanwhile every tensor of it is compared
    /// with what the source says it must be; one that differs is refused.
    pub fn load(
        backend: &B,
        source: &dyn WeightSource,
        stage: &StageSpec,
    ) -> Result<Self, StageError> {
        let verify = || verify_tensors(source, stage);
        std::thread::scope(|scope| {
            let verified = scope.spawn(verify);
            let weights = Self::upload(backend, source, stage);
            let verified = verified.join();
            let weights = weights?;
            match verified {
                Ok(verified) => verified.map(|()| weights),
                Err(_) => Err(StageError::Verify("the thread that did it panicked".into())),
            }
        })
    }

    fn upload(
        backend: &B,
        source: &dyn WeightSource,
        stage: &StageSpec,
    ) -> Result<Self, StageError> {
        let spec = source.spec().clone();
        let (begin, end, have) = (stage.layers.start, stage.layers.end, spec.layers);
        if begin > end || end > have || stage.rank >= stage.ranks {
            let (rank, ranks) = (stage.rank, stage.ranks);
            return Err(StageError::Stage { begin, end, rank, ranks, have });
        }
        let split = plan_split(&spec, stage.ranks)?.swap_remove(stage.rank);
        let loaded = RefCell::default();
        let loader = Loader { backend, source, spec: &spec, split: &split, loaded: &loaded };
        let tied = is_tied(source);
        let (vocab, hidden) = (spec.vocab, spec.hidden);
        let embedding = match stage.first {
            true => Some(loader.matrix(WeightId::TokenEmbedding, vocab, hidden, 0..vocab, None)?),
            false => None,
        };
        let head = match stage.last && !shares_embedding(tied, stage) {
            true => {
                let id = if tied { WeightId::TokenEmbedding } else { WeightId::Output };
                Some(loader.matrix(id, vocab, hidden, split.vocab.clone(), None)?)
            }
            false => None,
        };
        let output_norm = match stage.last {
            true => Some(loader.norm(WeightId::OutputNorm, hidden)?),
            false => None,
        };
        let layers = stage.layers.clone().map(|l| loader.layer(l)).collect::<Result<_, _>>()?;
        let rope = expand_rope(&spec.rope, spec.head_dim);
        let rope_local =
            spec.rope_local.as_ref().map_or(rope.clone(), |r| expand_rope(r, spec.head_dim));
        Ok(Self {
            stage: stage.clone(),
            split,
            embedding,
            layers,
            output_norm,
            head,
            rope,
            rope_local,
            spec,
            loaded: loaded.into_inner(),
        })
    }

    /// Every matrix, in the order in which they were loaded.
    pub fn matrices(&self) -> Vec<&B::Weight> {
        let mut all: Vec<&B::Weight> = self.embedding.iter().chain(&self.head).collect();
        for layer in &self.layers {
            all.extend([&layer.q, &layer.k, &layer.v, &layer.attn_out]);
            match &layer.ffn {
                FfnWeights::Dense { gate, up, down } => all.extend([gate, up, down]),
                FfnWeights::Mixture { router, gate, up, down } => {
                    all.push(router);
                    all.extend(gate.iter().chain(up).chain(down));
                }
            }
        }
        all
    }

    /// What matrix `index` of [`Self::matrices`] is called in its file.
    pub fn name_of(&self, index: usize) -> &str {
        self.loaded.get(index).map_or("", |(name, _)| name)
    }

    /// Sums up every matrix on the device and compares with what was loaded.
    pub fn verify(&self, backend: &B) -> Result<(), Changed> {
        for (matrix, (tensor, was)) in self.matrices().into_iter().zip(&self.loaded) {
            if let (Some(was), Some(is)) = (*was, backend.weight_sum(matrix))
                && was != is
            {
                return Err(Changed { tensor: tensor.clone(), was, is });
            }
        }
        Ok(())
    }

    /// A hash over the names and sums of all matrices, as they were loaded; `None` where the backend
    /// sums up none of them.
    pub fn fingerprint(&self) -> Option<u64> {
        let mut hash = blake3::Hasher::new();
        let mut any = false;
        for (name, sum) in &self.loaded {
            hash.update(&(name.len() as u64).to_le_bytes()).update(name.as_bytes());
            hash.update(&sum.unwrap_or_default().to_le_bytes());
            any |= sum.is_some();
        }
        let mut first = [0; 8];
        hash.finalize_xof().fill(&mut first);
        any.then(|| u64::from_le_bytes(first))
    }

    /// Whether these are the weights that `stage` computes with.
    pub fn serve(&self, stage: &StageSpec) -> bool {
        let part = |s: &StageSpec| (s.layers.clone(), s.first, s.last, s.rank, s.ranks);
        part(&self.stage) == part(stage)
    }

    /// Device bytes of the matrices (norms are small).
    pub fn bytes(&self, backend: &B) -> u64 {
        self.matrices().into_iter().map(|w| backend.weight_bytes(w)).sum()
    }
}

/// Bytes of the matrices of a stage's (and rank's) part in the file's own form: what loading it
/// needs on a device that keeps weights as they are.
pub fn stage_bytes(source: &dyn WeightSource, stage: &StageSpec) -> u64 {
    use WeightId::*;
    let spec = source.spec();
    let size = |id| weight(source, id).map_or(0, |t| t.data.len() as u128);
    // A refused split is reported when it is planned; here its sizes are those of an even one.
    let split = plan_split(spec, stage.ranks).ok().and_then(|s| s.get(stage.rank).cloned());
    let share = |part: fn(&RankSplit) -> usize, all: usize| match &split {
        Some(split) => (part(split) as u128, all.max(1) as u128),
        None => (1, stage.ranks.max(1) as u128),
    };
    let of = |bytes: u128, (part, all): (u128, u128)| bytes * part / all;
    let heads = share(|s| s.heads.len(), spec.heads);
    let kv_heads = share(|s| s.kv_heads.len(), spec.kv_heads);
    let ffn = share(|s| s.ffn.len(), spec.moe.as_ref().map_or(spec.ffn, |moe| moe.ffn));
    let vocab = share(|s| s.vocab.len(), spec.vocab);
    let mut total = 0;
    for l in stage.layers.clone() {
        total += of(size(Q(l)) + size(AttnOut(l)), heads) + of(size(K(l)) + size(V(l)), kv_heads);
        let experts = spec.moe.as_ref().map_or(0, |moe| moe.experts);
        total += match experts {
            0 => of(size(Gate(l)) + size(Up(l)) + size(Down(l)), ffn),
            _ => size(Router(l)),
        };
        for e in 0..experts {
            let bytes = size(ExpertGate(l, e)) + size(ExpertUp(l, e)) + size(ExpertDown(l, e));
            total += of(bytes, ffn);
        }
    }
    let tied = is_tied(source);
    if stage.first {
        total += size(TokenEmbedding);
    }
    if stage.last && !shares_embedding(tied, stage) {
        total += of(size(if tied { TokenEmbedding } else { Output }), vocab);
    }
    u64::try_from(total).unwrap_or(u64::MAX)
}

fn is_tied(source: &dyn WeightSource) -> bool {
    source.spec().tied_head || !has_weight(source, WeightId::Output)
}

/// Whether the head is the embedding table itself, held once.
fn shares_embedding(tied: bool, stage: &StageSpec) -> bool {
    tied && stage.first && stage.last && stage.ranks == 1
}

/// Bytes of one KV block of the stage: keys and values of type `dtype`.
pub fn kv_block_bytes(spec: &ModelSpec, stage: &StageSpec, dtype: KvDtype) -> u64 {
    let kv_heads = plan_split(spec, stage.ranks)
        .ok()
        .and_then(|splits| splits.get(stage.rank).map(|s| s.kv_heads.len()))
        .unwrap_or(spec.kv_heads);
    let per_token = stage.layers.len() * kv_heads * dtype.head_bytes(spec.head_dim);
    (per_token * stage.block_tokens) as u64
}

/// Expands a rope description to inverse frequencies, in float64 and rounded once.
pub fn expand_rope(rope: &RopeSpec, head_dim: usize) -> Rope {
    let half = head_dim / 2;
    let inv_freq = (0..half)
        .map(|i| {
            let base = libm::pow(rope.theta, -((2 * i) as f64) / head_dim as f64);
            scaled(base, i, &rope.scaling) as f32
        })
        .collect();
    Rope { style: rope.style, head_dim, inv_freq }
}

fn scaled(base: f64, index: usize, scaling: &RopeScaling) -> f64 {
    match scaling {
        RopeScaling::None => base,
        RopeScaling::Linear { factor } => base / factor,
        RopeScaling::Factors(factors) => base / factors.get(index).map_or(1.0, |f| f64::from(*f)),
        // Llama 3.1: long wavelengths are divided, short ones kept, those between blended.
        RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_context } => {
            let wavelength = 2.0 * std::f64::consts::PI / base;
            let turns = *original_context as f64 / wavelength;
            let smooth = (turns - low_freq_factor) / (high_freq_factor - low_freq_factor);
            let smooth = smooth.clamp(0.0, 1.0);
            base / factor * (1.0 - smooth) + base * smooth
        }
    }
}

/// Compares every tensor that the stage reads with what the source says it must be.
fn verify_tensors(source: &dyn WeightSource, stage: &StageSpec) -> Result<(), StageError> {
    let mut seen = BTreeSet::new();
    for id in stage_ids(source, stage) {
        // What the model lacks, or has in another shape, is the upload's to refuse.
        let Ok(tensor) = tensor_of(source, id) else { continue };
        if seen.insert(tensor.name.clone()) {
            source.verify(&tensor)?;
        }
    }
    Ok(())
}

/// Everything that a stage may read, absent tensors included.
fn stage_ids(source: &dyn WeightSource, stage: &StageSpec) -> Vec<WeightId> {
    use WeightId::*;
    let mut ids = Vec::new();
    if stage.first {
        ids.push(TokenEmbedding);
    }
    if stage.last {
        ids.extend([OutputNorm, if is_tied(source) { TokenEmbedding } else { Output }]);
    }
    let experts = source.spec().moe.as_ref().map_or(0, |moe| moe.experts);
    for l in stage.layers.clone() {
        ids.extend([AttnNorm(l), Q(l), K(l), V(l), AttnOut(l), FfnNorm(l)]);
        ids.extend([QBias(l), KBias(l), VBias(l), QNorm(l), KNorm(l)]);
        ids.extend([PostAttnNorm(l), PostFfnNorm(l), Gate(l), Up(l), Down(l), Router(l)]);
        let expert = |e| [ExpertGate(l, e), ExpertUp(l, e), ExpertDown(l, e)];
        ids.extend((0..experts).flat_map(expert));
    }
    ids.into_iter().filter(|id| has_weight(source, *id)).collect()
}

struct Loader<'a, B: Backend> {
    backend: &'a B,
    source: &'a dyn WeightSource,
    spec: &'a ModelSpec,
    split: &'a RankSplit,
    /// See [`StageWeights::loaded`].
    loaded: &'a RefCell<Vec<(String, Option<u64>)>>,
}

impl<B: Backend> Loader<'_, B> {
    fn layer(&self, l: usize) -> Result<LayerWeights<B>, StageError> {
        let (spec, split) = (self.spec, self.split);
        let (hidden, dim) = (spec.hidden, spec.head_dim);
        let cut = |heads: &std::ops::Range<usize>| heads.start * dim..heads.end * dim;
        let (q_rows, kv_rows) = (cut(&split.heads), cut(&split.kv_heads));
        let (q_all, kv_all) = (spec.heads * dim, spec.kv_heads * dim);
        let qkv_bias = match spec.qkv_bias {
            true => Some([
                self.vector(WeightId::QBias(l), q_all, q_rows.clone())?,
                self.vector(WeightId::KBias(l), kv_all, kv_rows.clone())?,
                self.vector(WeightId::VBias(l), kv_all, kv_rows.clone())?,
            ]),
            false => None,
        };
        let qk_norm = match spec.qk_norm {
            true => {
                Some([self.norm(WeightId::QNorm(l), dim)?, self.norm(WeightId::KNorm(l), dim)?])
            }
            false => None,
        };
        let post = |id| match spec.post_norms {
            true => self.norm(id, hidden).map(Some),
            false => Ok(None),
        };
        Ok(LayerWeights {
            local: spec.is_local(l),
            attn_norm: self.norm(WeightId::AttnNorm(l), hidden)?,
            q: self.matrix(WeightId::Q(l), q_all, hidden, q_rows.clone(), None)?,
            k: self.matrix(WeightId::K(l), kv_all, hidden, kv_rows.clone(), None)?,
            v: self.matrix(WeightId::V(l), kv_all, hidden, kv_rows, None)?,
            qkv_bias,
            qk_norm,
            attn_out: self.matrix(WeightId::AttnOut(l), hidden, q_all, 0..hidden, Some(q_rows))?,
            post_attn_norm: post(WeightId::PostAttnNorm(l))?,
            ffn_norm: self.norm(WeightId::FfnNorm(l), hidden)?,
            ffn: self.ffn(l)?,
            post_ffn_norm: post(WeightId::PostFfnNorm(l))?,
        })
    }

    fn ffn(&self, l: usize) -> Result<FfnWeights<B>, StageError> {
        let (hidden, cut) = (self.spec.hidden, self.split.ffn.clone());
        let Some(moe) = &self.spec.moe else {
            let ffn = self.spec.ffn;
            return Ok(FfnWeights::Dense {
                gate: self.matrix(WeightId::Gate(l), ffn, hidden, cut.clone(), None)?,
                up: self.matrix(WeightId::Up(l), ffn, hidden, cut.clone(), None)?,
                down: self.matrix(WeightId::Down(l), hidden, ffn, 0..hidden, Some(cut))?,
            });
        };
        let (experts, ffn) = (moe.experts, moe.ffn);
        let every = |f: &dyn Fn(usize) -> Result<B::Weight, StageError>| {
            (0..experts).map(f).collect::<Result<Vec<_>, _>>()
        };
        Ok(FfnWeights::Mixture {
            router: self.matrix(WeightId::Router(l), experts, hidden, 0..experts, None)?,
            gate: every(&|e| {
                self.matrix(WeightId::ExpertGate(l, e), ffn, hidden, cut.clone(), None)
            })?,
            up: every(&|e| self.matrix(WeightId::ExpertUp(l, e), ffn, hidden, cut.clone(), None))?,
            down: every(&|e| {
                let id = WeightId::ExpertDown(l, e);
                self.matrix(id, hidden, ffn, 0..hidden, Some(cut.clone()))
            })?,
        })
    }

    /// Rows `rows` (and columns `cols`, all if `None`) of a matrix that must be
    /// `[all_rows, all_cols]`.
    fn matrix(
        &self,
        id: WeightId,
        all_rows: usize,
        all_cols: usize,
        rows: std::ops::Range<usize>,
        cols: Option<std::ops::Range<usize>>,
    ) -> Result<B::Weight, StageError> {
        let tensor = self.checked(id, all_rows, all_cols)?;
        let cols = cols.unwrap_or(0..all_cols);
        let matrix = self.backend.weight(&tensor, &Part { rows, cols })?;
        let sum = self.backend.weight_sum(&matrix);
        self.loaded.borrow_mut().push((tensor.name, sum));
        Ok(matrix)
    }

    fn norm(&self, id: WeightId, len: usize) -> Result<B::Tensor, StageError> {
        let add = if norms_lack_one(self.source) { 1.0 } else { 0.0 };
        self.row(id, len, 0..len, add)
    }

    fn vector(
        &self,
        id: WeightId,
        len: usize,
        cut: std::ops::Range<usize>,
    ) -> Result<B::Tensor, StageError> {
        self.row(id, len, cut, 0.0)
    }

    fn row(
        &self,
        id: WeightId,
        len: usize,
        cut: std::ops::Range<usize>,
        add: f32,
    ) -> Result<B::Tensor, StageError> {
        let tensor = self.checked(id, 1, len)?;
        let mut values = vec![0.0; len];
        quant::dequantize_row(tensor.dtype, tensor.row(0), &mut values);
        values.iter_mut().for_each(|v| *v += add);
        let values = &values[cut];
        let mut row = self.backend.tensor(1, values.len())?;
        self.backend.upload(values, &mut row)?;
        Ok(row)
    }

    fn checked(&self, id: WeightId, rows: usize, cols: usize) -> Result<HostTensor, StageError> {
        let tensor = weight(self.source, id)?;
        if (tensor.rows, tensor.cols) != (rows, cols) {
            return Err(StageError::Shape {
                name: tensor.name,
                rows: tensor.rows,
                cols: tensor.cols,
                want_rows: rows,
                want_cols: cols,
            });
        }
        Ok(tensor)
    }
}

/// What several shards or several lives of one shard share.
pub type SharedStage<B> = Arc<StageWeights<B>>;
