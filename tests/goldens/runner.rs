//! One sequence through a whole model on any backend.

use dunlin_backend::{Backend, KvSpec, SeqRows, Want};
use dunlin_model::engine::{Alone, Collective, StageSpec};
use dunlin_model::forward::{self, Row, Rows, Workspace};
use dunlin_model::stage::StageWeights;
use dunlin_model::weights::WeightSource;

const BLOCK_TOKENS: usize = 16;
/// Most tokens run at once.
pub const CHUNK: usize = 64;

pub struct Runner<B: Backend> {
    backend: B,
    weights: StageWeights<B>,
    kv: B::Kv,
    workspace: Workspace<B>,
    blocks: u32,
}

impl<B: Backend> Runner<B> {
    /// For sequences of at most `tokens` tokens.
    pub fn new(backend: B, model: &dyn WeightSource, tokens: usize) -> Self {
        Self::rank(backend, model, tokens, 0, 1)
    }

    /// One tensor rank of `ranks`.
    pub fn rank(
        backend: B,
        model: &dyn WeightSource,
        tokens: usize,
        rank: usize,
        ranks: usize,
    ) -> Self {
        let layers = model.spec().layers;
        let blocks = tokens.div_ceil(BLOCK_TOKENS);
        let stage = StageSpec {
            layers: 0..layers,
            first: true,
            last: true,
            rank,
            ranks,
            kv_blocks: blocks,
            block_tokens: BLOCK_TOKENS,
            max_tokens: CHUNK,
        };
        let weights = StageWeights::load(&backend, model, &stage).expect("weights");
        let kv = backend.kv(&KvSpec {
            layers,
            kv_heads: weights.split.kv_heads.len(),
            head_dim: weights.spec.head_dim,
            blocks,
            block_tokens: BLOCK_TOKENS,
        });
        let workspace = Workspace::new(&backend, &weights, CHUNK).expect("a workspace");
        let blocks = u32::try_from(blocks).expect("few blocks");
        Self { kv: kv.expect("a KV store"), backend, weights, workspace, blocks }
    }

    /// Logits of positions `from..` of `ids`, run from the start.
    pub fn logits(&mut self, ids: &[u32], from: usize) -> Vec<Vec<f32>> {
        self.logits_with(ids, from, CHUNK, &mut Alone)
    }

    /// The same in chunks of `chunk` tokens, with the other ranks of a group. Blocks lie in
    /// descending order, so that nothing holds only for a contiguous store.
    pub fn logits_with(
        &mut self,
        ids: &[u32],
        from: usize,
        chunk: usize,
        group: &mut dyn Collective,
    ) -> Vec<Vec<f32>> {
        let mut rows = Vec::new();
        for (index, part) in ids.chunks(chunk).enumerate() {
            let position = index * chunk;
            let seqs = [SeqRows {
                rows: 0..part.len(),
                position,
                blocks: (0..self.blocks).rev().collect(),
            }];
            let positions: Vec<u32> = (position..).take(part.len()).map(|p| p as u32).collect();
            let wanted: Vec<u32> =
                (0..part.len()).filter(|i| position + i >= from).map(|i| i as u32).collect();
            let (backend, weights, ws) = (&self.backend, &self.weights, &mut self.workspace);
            ws.begin(backend, part.len()).expect("room");
            forward::embed(backend, weights, part, ws).expect("embed");
            let place = Rows { seqs: &seqs, positions: &positions };
            forward::layers(backend, weights, &place, &mut self.kv, group, ws).expect("layers");
            let wants = vec![Want::Logits; wanted.len()];
            forward::logits(backend, weights, (&wanted, &wants), group, ws, |_, row| {
                let Row::Logits(row) = row else { unreachable!("no token was asked for") };
                rows.push(row.to_vec());
            })
            .expect("logits");
        }
        rows
    }
}

/// The likeliest token, the lowest of equals.
pub fn argmax(logits: &[f32]) -> u32 {
    let mut best = 0;
    for (i, v) in logits.iter().enumerate() {
        if *v > logits[best] {
            best = i;
        }
    }
    best as u32
}

/// Kullback-Leibler divergence of `other` from `oracle`, in nats.
pub fn divergence(oracle: &[f32], other: &[f32]) -> f64 {
    let (p, q) = (log_softmax(oracle), log_softmax(other));
    p.iter().zip(&q).map(|(p, q)| p.exp() * (p - q)).sum()
}

fn log_softmax(logits: &[f32]) -> Vec<f64> {
    let max = f64::from(logits.iter().copied().fold(f32::NEG_INFINITY, f32::max));
    let sum: f64 = logits.iter().map(|v| (f64::from(*v) - max).exp()).sum();
    logits.iter().map(|v| f64::from(*v) - max - sum.ln()).collect()
}
