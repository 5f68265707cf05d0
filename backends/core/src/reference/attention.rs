//! The reference's KV store and attention.

use super::{ReferenceTensor, dot, require};
use crate::{AttentionParams, BackendError, KV_TILE, KvSpec, SeqRows};

/// Keys and values of all layers, `[layer][block][token][kv_head][head_dim]`.
#[derive(Debug)]
pub struct ReferenceKv {
    spec: KvSpec,
    keys: Vec<f32>,
    values: Vec<f32>,
}

impl ReferenceKv {
    pub(super) fn new(spec: &KvSpec) -> Result<Self, BackendError> {
        let sizes = spec.block_tokens > 0 && spec.block_tokens.is_multiple_of(KV_TILE);
        require("kv", sizes, || {
            format!("blocks of {} tokens; must be a multiple of {KV_TILE}", spec.block_tokens)
        })?;
        let all = spec.layers * spec.blocks * spec.block_tokens * spec.kv_heads * spec.head_dim;
        Ok(Self { spec: spec.clone(), keys: vec![0.0; all], values: vec![0.0; all] })
    }

    pub(super) fn write(
        &mut self,
        layer: usize,
        k: &ReferenceTensor,
        v: &ReferenceTensor,
        seqs: &[SeqRows],
    ) -> Result<(), BackendError> {
        let width = self.spec.kv_heads * self.spec.head_dim;
        require("kv_write", k.cols == width && v.cols == width && k.rows == v.rows, || {
            format!("k [{}, {}], v [{}, {}], want {width} columns", k.rows, k.cols, v.rows, v.cols)
        })?;
        for seq in seqs {
            require("kv_write", seq.rows.end <= k.rows, || {
                format!("rows {:?} of {}", seq.rows, k.rows)
            })?;
            for (i, row) in seq.rows.clone().enumerate() {
                let at = self.entry(layer, seq, seq.position + i)?;
                self.keys[at..at + width].copy_from_slice(k.row(row));
                self.values[at..at + width].copy_from_slice(v.row(row));
            }
        }
        Ok(())
    }

    pub(super) fn copy(&mut self, pairs: &[(u32, u32)]) -> Result<(), BackendError> {
        let spec = &self.spec;
        let block = spec.block_tokens * spec.kv_heads * spec.head_dim;
        for &(from, to) in pairs {
            let (from, to) = (from as usize, to as usize);
            require("kv_copy", from < spec.blocks && to < spec.blocks, || {
                format!("block {from} to {to}, there are {}", spec.blocks)
            })?;
            for layer in 0..spec.layers {
                let at = |b| (layer * spec.blocks + b) * block;
                self.keys.copy_within(at(from)..at(from) + block, at(to));
                self.values.copy_within(at(from)..at(from) + block, at(to));
            }
        }
        Ok(())
    }

    /// Index of the first element that belongs to `position` of `seq` in `layer`.
    fn entry(&self, layer: usize, seq: &SeqRows, position: usize) -> Result<usize, BackendError> {
        let spec = &self.spec;
        let block = seq.blocks.get(position / spec.block_tokens).map(|b| *b as usize);
        match block {
            Some(block) if block < spec.blocks && layer < spec.layers => {
                let token = (layer * spec.blocks + block) * spec.block_tokens;
                let token = token + position % spec.block_tokens;
                Ok(token * spec.kv_heads * spec.head_dim)
            }
            _ => Err(BackendError::Shape {
                op: "kv",
                detail: format!(
                    "position {position} is in block {block:?}, layer {layer}; the store has {} \
                     blocks, {} layers",
                    spec.blocks, spec.layers
                ),
            }),
        }
    }
}

/// Causal attention of every row over the keys of its sequence up to itself.
pub(super) fn attend(
    q: &ReferenceTensor,
    kv: &ReferenceKv,
    layer: usize,
    seqs: &[SeqRows],
    params: &AttentionParams,
    out: &mut ReferenceTensor,
) -> Result<(), BackendError> {
    let (heads, dim) = (params.heads, params.head_dim);
    let shapes = q.cols == heads * dim
        && out.cols == q.cols
        && params.kv_heads == kv.spec.kv_heads
        && dim == kv.spec.head_dim
        && params.kv_head_of.len() == heads
        && params.kv_head_of.iter().all(|h| *h < params.kv_heads);
    require("attention", shapes, || {
        format!("q has {} columns, out {}; {params:?}; {:?}", q.cols, out.cols, kv.spec)
    })?;
    out.resize("attention", q.rows)?;
    for seq in seqs {
        require("attention", seq.rows.end <= q.rows, || {
            format!("rows {:?} of {}", seq.rows, q.rows)
        })?;
        for (i, row) in seq.rows.clone().enumerate() {
            let position = seq.position + i;
            let first = params.window.map_or(0, |w| (position + 1).saturating_sub(w));
            let entries = (first..=position)
                .map(|p| kv.entry(layer, seq, p))
                .collect::<Result<Vec<_>, _>>()?;
            for head in 0..heads {
                let offset = params.kv_head_of[head] * dim;
                let query = &q.row(row)[head * dim..(head + 1) * dim];
                let weights = softmax(entries.iter().map(|at| {
                    let key = &kv.keys[at + offset..at + offset + dim];
                    capped(dot(query, key) * f64::from(params.scale), params.softcap)
                }));
                let to = &mut out.row_mut(row)[head * dim..(head + 1) * dim];
                for (d, to) in to.iter_mut().enumerate() {
                    let terms = entries.iter().zip(&weights);
                    let sum: f64 =
                        terms.map(|(at, w)| w * f64::from(kv.values[at + offset + d])).sum();
                    *to = sum as f32;
                }
            }
        }
    }
    Ok(())
}

pub(super) fn softmax(scores: impl Iterator<Item = f64>) -> Vec<f64> {
    let mut values: Vec<f64> = scores.collect();
    let max = values.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    values.iter_mut().for_each(|v| *v = libm::exp(*v - max));
    let sum: f64 = values.iter().sum();
    values.iter_mut().for_each(|v| *v /= sum);
    values
}

fn capped(score: f64, softcap: Option<f32>) -> f64 {
    match softcap.map(f64::from) {
        Some(cap) => cap * libm::tanh(score / cap),
        None => score,
    }
}
