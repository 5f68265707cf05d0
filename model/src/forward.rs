//! The forward pass: one for every model family and every backend.
//!
//! Read it top to bottom: [`embed`], then [`layers`] (attention, feed-forward), then [`logits`],
//! from which the device draws tokens where it can.
//! Activations live in a [`Workspace`] made once; rows are the tokens of a step, sequences side by
//! side. Nothing here knows which device computes, where weights came from, or who asked.

use crate::engine::{Collective, EngineError};
use crate::spec::ModelSpec;
use crate::stage::{FfnWeights, LayerWeights, StageWeights};
use dunlin_backend::{
    AttentionParams, Backend, BackendError, Experts, FeedForward, FeedForwardRoom, LinearPart,
    Norm, Samples, SeqRows, Want,
};

/// Most bytes of logits computed at once.
const LOGITS_BYTES: usize = 16 << 20;

/// Activations of one shard. Capacity is the most tokens of a step.
pub struct Workspace<B: Backend> {
    /// The residual stream, `[tokens, hidden]`.
    pub x: B::Tensor,
    normed: B::Tensor,
    q: B::Tensor,
    k: B::Tensor,
    v: B::Tensor,
    attended: B::Tensor,
    /// What a sub-block adds to the residual stream.
    delta: B::Tensor,
    gate: B::Tensor,
    up: B::Tensor,
    router: B::Tensor,
    /// Rows that need logits, a few at a time.
    picked: B::Tensor,
    picked_normed: B::Tensor,
    logits: B::Tensor,
    logit_rows: usize,
    host: Vec<f32>,
    samples: Samples,
}

impl<B: Backend> Workspace<B> {
    pub fn new(
        backend: &B,
        weights: &StageWeights<B>,
        tokens: usize,
    ) -> Result<Self, BackendError> {
        let (spec, split) = (&weights.spec, &weights.split);
        let dim = spec.head_dim;
        let make = |cols| backend.tensor(tokens, cols);
        let logit_rows = (LOGITS_BYTES / (split.vocab.len().max(1) * 4)).clamp(1, 64).min(tokens);
        let last = weights.output_norm.is_some();
        let head = |cols| backend.tensor(if last { logit_rows } else { 1 }, cols);
        Ok(Self {
            x: make(spec.hidden)?,
            normed: make(spec.hidden)?,
            q: make(split.heads.len() * dim)?,
            k: make(split.kv_heads.len() * dim)?,
            v: make(split.kv_heads.len() * dim)?,
            attended: make(split.heads.len() * dim)?,
            delta: make(spec.hidden)?,
            gate: make(split.ffn.len())?,
            up: make(split.ffn.len())?,
            router: make(spec.moe.as_ref().map_or(1, |m| m.experts))?,
            picked: head(spec.hidden)?,
            picked_normed: head(spec.hidden)?,
            logits: head(if last { split.vocab.len() } else { 1 })?,
            logit_rows,
            host: Vec::new(),
            samples: Samples::default(),
        })
    }

    /// Sets how many rows the coming step uses.
    pub fn begin(&mut self, backend: &B, tokens: usize) -> Result<(), BackendError> {
        let all = [
            &mut self.x,
            &mut self.normed,
            &mut self.q,
            &mut self.k,
            &mut self.v,
            &mut self.attended,
            &mut self.delta,
            &mut self.gate,
            &mut self.up,
            &mut self.router,
        ];
        all.into_iter().try_for_each(|t| backend.set_rows(t, tokens))
    }

    /// Device bytes of a workspace for these sizes, roughly.
    pub fn bytes(spec: &ModelSpec, tokens: usize) -> u64 {
        let ffn = spec.moe.as_ref().map_or(spec.ffn, |m| m.ffn);
        let width = 4 * spec.hidden + 4 * spec.heads * spec.head_dim + 2 * ffn;
        (tokens * width * 4 + LOGITS_BYTES) as u64
    }
}

/// Where the rows of a step belong.
pub struct Rows<'a> {
    pub seqs: &'a [SeqRows],
    /// Absolute position of every row.
    pub positions: &'a [u32],
}

/// Token embeddings into the residual stream.
pub fn embed<B: Backend>(
    backend: &B,
    weights: &StageWeights<B>,
    ids: &[u32],
    ws: &mut Workspace<B>,
) -> Result<(), EngineError> {
    let Some(table) = &weights.embedding else {
        return Err(EngineError::BadBatch("this stage has no embedding and got no input".into()));
    };
    Ok(backend.embed(table, ids, weights.spec.embed_scale, &mut ws.x)?)
}

/// All layers of the stage, in place on the residual stream.
pub fn layers<B: Backend>(
    backend: &B,
    weights: &StageWeights<B>,
    rows: &Rows<'_>,
    kv: &mut B::Kv,
    group: &mut dyn Collective,
    ws: &mut Workspace<B>,
) -> Result<(), EngineError> {
    for (index, layer) in weights.layers.iter().enumerate() {
        attention(backend, weights, layer, index, rows, kv, group, ws)?;
        feed_forward(backend, weights, layer, group, ws)?;
    }
    Ok(())
}

/// `x += post_norm(out(attend(rope(qkv(norm(x))))))`
#[allow(clippy::too_many_arguments)]
fn attention<B: Backend>(
    backend: &B,
    weights: &StageWeights<B>,
    layer: &LayerWeights<B>,
    index: usize,
    rows: &Rows<'_>,
    kv: &mut B::Kv,
    group: &mut dyn Collective,
    ws: &mut Workspace<B>,
) -> Result<(), EngineError> {
    let spec = &weights.spec;
    let bias = |i: usize| layer.qkv_bias.as_ref().map(|b| &b[i]);
    backend.norm_linear(
        &ws.x,
        &norm(spec, &layer.attn_norm),
        &mut ws.normed,
        &mut [
            LinearPart { weight: &layer.q, bias: bias(0), out: &mut ws.q },
            LinearPart { weight: &layer.k, bias: bias(1), out: &mut ws.k },
            LinearPart { weight: &layer.v, bias: bias(2), out: &mut ws.v },
        ],
    )?;
    if let Some([q_norm, k_norm]) = &layer.qk_norm {
        backend.rms_norm_inplace(&mut ws.q, q_norm, spec.rms_eps, spec.head_dim)?;
        backend.rms_norm_inplace(&mut ws.k, k_norm, spec.rms_eps, spec.head_dim)?;
    }
    let rope = if layer.local { &weights.rope_local } else { &weights.rope };
    let qkv = (&mut ws.q, &mut ws.k, &ws.v);
    backend.rope_write(qkv, rows.positions, rope, kv, index, rows.seqs)?;
    let at_once = group.size() == 1 && layer.post_attn_norm.is_none();
    backend.attention_linear(
        &ws.q,
        (kv, index),
        rows.seqs,
        &attention_params(weights, layer.local),
        &layer.attn_out,
        &mut ws.attended,
        &mut ws.delta,
        at_once.then_some(&mut ws.x),
    )?;
    match at_once {
        true => Ok(()),
        false => add_delta(backend, layer.post_attn_norm.as_ref(), spec, group, ws),
    }
}

/// `x += post_norm(down(activation(gate(h)) * up(h)))` with `h = norm(x)`, dense or a mixture.
fn feed_forward<B: Backend>(
    backend: &B,
    weights: &StageWeights<B>,
    layer: &LayerWeights<B>,
    group: &mut dyn Collective,
    ws: &mut Workspace<B>,
) -> Result<(), EngineError> {
    let spec = &weights.spec;
    let norm = norm(spec, &layer.ffn_norm);
    match &layer.ffn {
        FfnWeights::Dense { gate, up, down } => {
            let weights = FeedForward { gate, up, down, activation: spec.activation };
            let at_once = group.size() == 1 && layer.post_ffn_norm.is_none();
            let Workspace { x, normed, gate, up, delta, .. } = &mut *ws;
            let room = FeedForwardRoom { normed, gate, up };
            backend.feed_forward(x, &norm, &weights, room, delta, at_once)?;
            if at_once {
                return Ok(());
            }
        }
        FfnWeights::Mixture { router, gate, up, down } => {
            backend.rms_norm(&ws.x, norm.weight, norm.eps, norm.cols, &mut ws.normed)?;
            let moe = spec.moe.as_ref().ok_or_else(|| no_moe(spec))?;
            let mut out = [LinearPart { weight: router, bias: None, out: &mut ws.router }];
            backend.linear(&ws.normed, &mut out)?;
            let experts = Experts {
                gate,
                up,
                down,
                top_k: moe.top_k,
                normalise: moe.normalise,
                activation: spec.activation,
            };
            backend.experts(&ws.normed, &ws.router, &experts, &mut ws.delta)?;
        }
    }
    add_delta(backend, layer.post_ffn_norm.as_ref(), spec, group, ws)
}

fn norm<'a, B: Backend>(spec: &ModelSpec, weight: &'a B::Tensor) -> Norm<'a, B> {
    Norm { weight, cols: spec.hidden, eps: spec.rms_eps }
}

/// Sums the ranks' shares of a sub-block, norms the sum where the family does, and adds it.
fn add_delta<B: Backend>(
    backend: &B,
    post_norm: Option<&B::Tensor>,
    spec: &ModelSpec,
    group: &mut dyn Collective,
    ws: &mut Workspace<B>,
) -> Result<(), EngineError> {
    if group.size() > 1 {
        backend.download(&ws.delta, &mut ws.host)?;
        group.all_reduce(&mut ws.host)?;
        backend.upload(&ws.host, &mut ws.delta)?;
    }
    if let Some(norm) = post_norm {
        backend.rms_norm_inplace(&mut ws.delta, norm, spec.rms_eps, spec.hidden)?;
    }
    Ok(backend.add(&mut ws.x, &ws.delta)?)
}

/// What came of a picked row.
pub enum Row<'a> {
    /// Its logits over the whole vocabulary, where they were wanted.
    Logits(&'a mut [f32]),
    /// The token drawn on the device; `None` where the logits were not finite.
    Token(Option<u32>),
}

/// Whether a device can draw from its own logits: it has all of them, as they are.
pub fn draws_on_device<B: Backend>(weights: &StageWeights<B>) -> bool {
    weights.stage.ranks == 1 && weights.spec.final_softcap.is_none()
}

/// Final norm and head over the picked rows, a few at a time; `wants` has one entry for each, and
/// tokens only where [`draws_on_device`]. `each` gets the index into `picked` and what came of that
/// row, on every rank.
pub fn logits<B: Backend>(
    backend: &B,
    weights: &StageWeights<B>,
    (picked, wants): (&[u32], &[Want]),
    group: &mut dyn Collective,
    ws: &mut Workspace<B>,
    mut each: impl FnMut(usize, Row<'_>),
) -> Result<(), EngineError> {
    let spec = &weights.spec;
    let head = weights.head.as_ref().or(weights.embedding.as_ref());
    let (Some(output_norm), Some(head)) = (&weights.output_norm, head) else {
        return Err(EngineError::BadBatch("this stage has no head".into()));
    };
    let chunks = picked.chunks(ws.logit_rows).zip(wants.chunks(ws.logit_rows));
    for (chunk_index, (chunk, wants)) in chunks.enumerate() {
        for tensor in [&mut ws.picked, &mut ws.picked_normed, &mut ws.logits] {
            backend.set_rows(tensor, chunk.len())?;
        }
        backend.gather(&ws.x, chunk, &mut ws.picked)?;
        let mut out = [LinearPart { weight: head, bias: None, out: &mut ws.logits }];
        backend.norm_linear(
            &ws.picked,
            &norm(spec, output_norm),
            &mut ws.picked_normed,
            &mut out,
        )?;
        let first = chunk_index * ws.logit_rows;
        let Samples { tokens, logits } = &mut ws.samples;
        if group.size() > 1 {
            backend.download(&ws.logits, &mut ws.host)?;
            *logits = group.all_gather(chunk.len(), &ws.host)?;
            *tokens = vec![None; chunk.len()];
        } else {
            backend.sample(&mut ws.logits, wants, &mut ws.samples)?;
        }
        let mut rows = ws.samples.logits.chunks_exact_mut(spec.vocab);
        for (i, (want, token)) in (first..).zip(wants.iter().zip(&ws.samples.tokens)) {
            let row = match want {
                Want::Token(_) => Row::Token(*token),
                Want::Logits => {
                    let Some(row) = rows.next() else { break };
                    if let Some(cap) = spec.final_softcap {
                        row.iter_mut().for_each(|v| *v = cap * libm::tanhf(*v / cap));
                    }
                    Row::Logits(row)
                }
            };
            each(i, row);
        }
    }
    Ok(())
}

fn attention_params<B: Backend>(weights: &StageWeights<B>, local: bool) -> AttentionParams {
    let (spec, split) = (&weights.spec, &weights.split);
    let group = spec.heads / spec.kv_heads;
    AttentionParams {
        heads: split.heads.len(),
        kv_heads: split.kv_heads.len(),
        head_dim: spec.head_dim,
        scale: spec.attention_scale,
        window: if local { spec.window } else { None },
        softcap: spec.attention_softcap,
        kv_head_of: (0..split.heads.len()).map(|head| head / group).collect(),
    }
}

fn no_moe(spec: &ModelSpec) -> EngineError {
    EngineError::BadBatch(format!(
        "{:?} has experts but no mixture in its description",
        spec.family
    ))
}
