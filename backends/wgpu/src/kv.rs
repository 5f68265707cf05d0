//! One shard's KV store on the device: for each layer, buffers of keys and of values
//! `[block][head][token][element]`, heads padded to whole vec4s, elements of one type
//! (`shaders/kv/`). Where a layer is too large for one binding it is cut by KV heads.

use crate::gpu::{Buffer, Gpu};
use crate::kernels::Kernel;
use crate::record::Recorder;
use crate::tensor::{WgpuTensor, same, shape, word};
use dunlin_backend::{BackendError, KV_TILE, KvDtype, KvSpec, SeqRows};
use std::ops::Range;
use std::sync::Arc;

/// See the module.
pub struct WgpuKv {
    pub(crate) spec: KvSpec,
    pub(crate) dtype: KvDtype,
    pub(crate) layers: Vec<Vec<Store>>,
}

/// Some KV heads of one layer.
pub(crate) struct Store {
    pub heads: Range<usize>,
    pub keys: Buffer,
    pub values: Buffer,
}

/// Marks a row that is nobody's, and the head that a group lacks.
pub(crate) const NONE: u32 = u32::MAX;

impl WgpuKv {
    pub(crate) fn new(gpu: &Arc<Gpu>, spec: &KvSpec, dtype: KvDtype) -> Result<Self, BackendError> {
        let KvSpec { layers, kv_heads, head_dim, blocks, block_tokens } = *spec;
        let sizes = block_tokens > 0
            && block_tokens.is_multiple_of(KV_TILE)
            && head_dim > 0
            && kv_heads > 0;
        if !sizes {
            return Err(shape(
                "kv",
                format!(
                    "{kv_heads} heads of {head_dim}, blocks of {block_tokens} tokens; blocks are \
                     multiples of {KV_TILE}"
                ),
            ));
        }
        let refuse = |need: u64, free: u64| BackendError::OutOfMemory {
            device: gpu.id.clone(),
            what: format!("a KV pool of {blocks} blocks"),
            need,
            free,
        };
        let head = [token_words(dtype, head_dim), size_of::<u32>(), block_tokens, blocks]
            .iter()
            .try_fold(1u64, |n, &f| n.checked_mul(f as u64));
        let all = head.and_then(|h| h.checked_mul(2 * kv_heads as u64)?.checked_mul(layers as u64));
        let (Some(head), Some(all)) = (head, all) else {
            return Err(refuse(u64::MAX, gpu.free_bytes()));
        };
        if all > gpu.free_bytes() {
            return Err(refuse(all, gpu.free_bytes()));
        }
        let most = gpu.binding_bytes();
        if head > most {
            return Err(refuse(head, most));
        }
        let heads_each = usize::try_from(most / head.max(1)).unwrap_or(kv_heads).min(kv_heads);
        let layer = || {
            let stores = (0..kv_heads).step_by(heads_each).map(|first| {
                let heads = first..kv_heads.min(first + heads_each);
                let bytes = head * heads.len() as u64;
                let make = || gpu.storage(bytes, "a KV pool");
                Ok(Store { heads, keys: make()?, values: make()? })
            });
            stores.collect::<Result<Vec<_>, BackendError>>()
        };
        let layers = (0..layers).map(|_| layer()).collect::<Result<_, _>>()?;
        Ok(Self { spec: spec.clone(), dtype, layers })
    }

    pub fn spec(&self) -> &KvSpec {
        &self.spec
    }

    pub fn dtype(&self) -> KvDtype {
        self.dtype
    }

    pub(crate) fn write(
        &self,
        rec: &mut Recorder,
        layer: usize,
        k: &WgpuTensor,
        v: &WgpuTensor,
        seqs: &[SeqRows],
    ) -> Result<(), BackendError> {
        const OP: &str = "kv_write";
        let width = self.spec.kv_heads * self.spec.head_dim;
        same(OP, "columns of k", k.cols, width)?;
        same(OP, "columns of v", v.cols, width)?;
        self.check(OP, layer, k.rows.min(v.rows), seqs)?;
        let tokens = self.spec.block_tokens;
        let rows = seqs.iter().map(|s| s.rows.end).max().unwrap_or(0);
        let mut slots = vec![NONE; 2 * rows];
        for s in seqs {
            for (i, row) in s.rows.clone().enumerate() {
                let position = s.position + i;
                slots[2 * row] = s.blocks[position / tokens];
                slots[2 * row + 1] = word(position % tokens);
            }
        }
        rec.begin(slots.len())?;
        let (at, arena) = (rec.put(&slots), rec.arena());
        let dim = word(self.spec.head_dim);
        for store in &self.layers[layer] {
            let heads = word(store.heads.len());
            let params =
                [at, heads, word(store.heads.start), word(tokens), word(k.stride), word(v.stride)];
            let size = ((heads * dim.div_ceil(4)).div_ceil(32), word(rows));
            let read = [&*arena, &k.buffer, &v.buffer];
            let write = [&store.keys, &store.values];
            let kernel = Kernel::KvWrite { dim, kept: self.dtype };
            rec.dispatch(kernel, &read, &write, &params, size)?;
        }
        Ok(())
    }

    /// Copies blocks `from -> to` in all layers, as if in the order given.
    pub(crate) fn copy(
        &self,
        rec: &mut Recorder,
        pairs: &[(u32, u32)],
    ) -> Result<(), BackendError> {
        let blocks = self.spec.blocks;
        for &(from, to) in pairs {
            if from as usize >= blocks || to as usize >= blocks {
                return Err(shape("kv_copy", format!("block {from} or {to} is not of {blocks}")));
            }
        }
        for run in independent(pairs) {
            let flat: Vec<u32> = run.iter().flat_map(|&(from, to)| [from, to]).collect();
            rec.begin(flat.len())?;
            let (at, arena) = (rec.put(&flat), rec.arena());
            for store in self.layers.iter().flatten() {
                let per_token = store.heads.len() * token_words(self.dtype, self.spec.head_dim);
                // Whole vec4s, since a block's tokens are a multiple of a tile's.
                let block = word(per_token * self.spec.block_tokens / 4);
                let write = [&store.keys, &store.values];
                let size = (block.div_ceil(32), word(run.len()));
                rec.dispatch(Kernel::KvCopy, &[&arena], &write, &[at, block], size)?;
            }
        }
        Ok(())
    }

    /// Refuses sequences whose rows are out of order, past `rows`, or not covered by known blocks.
    pub(crate) fn check(
        &self,
        op: &'static str,
        layer: usize,
        rows: usize,
        seqs: &[SeqRows],
    ) -> Result<(), BackendError> {
        let spec = &self.spec;
        if layer >= spec.layers {
            return Err(shape(op, format!("layer {layer} of {}", spec.layers)));
        }
        let mut free = 0;
        for (i, s) in seqs.iter().enumerate() {
            if s.rows.start < free || s.rows.end < s.rows.start || s.rows.end > rows {
                let have = &s.rows;
                let want = format!("rows ascend without overlap below {rows}");
                return Err(shape(op, format!("sequence {i} has rows {have:?}; {want}")));
            }
            free = s.rows.end;
            let end = s.position.checked_add(s.rows.len());
            let need = end.map(|e| e.div_ceil(spec.block_tokens));
            let Some(used) = need.and_then(|n| s.blocks.get(..n)) else {
                let (have, tokens) = (s.blocks.len(), spec.block_tokens);
                return Err(shape(
                    op,
                    format!("sequence {i} ends at {end:?}, {have} blocks of {tokens} tokens"),
                ));
            };
            if let Some(b) = used.iter().find(|b| **b as usize >= spec.blocks) {
                return Err(shape(op, format!("sequence {i}: block {b} of {}", spec.blocks)));
            }
        }
        Ok(())
    }
}

/// Words of the keys, or of the values, of one token and head.
pub(crate) fn token_words(dtype: KvDtype, head_dim: usize) -> usize {
    let vectors = head_dim.div_ceil(4);
    match dtype {
        KvDtype::F32 => 4 * vectors,
        KvDtype::F16 => 2 * vectors,
        KvDtype::Int8 => vectors + 1,
    }
}

/// Cuts pairs into runs within which the order does not matter.
fn independent(pairs: &[(u32, u32)]) -> Vec<&[(u32, u32)]> {
    let mut runs = Vec::new();
    let mut start = 0;
    for (i, &(from, to)) in pairs.iter().enumerate() {
        let clash = |&(f, t): &(u32, u32)| t == from || t == to || f == to;
        if pairs[start..i].iter().any(clash) {
            runs.push(&pairs[start..i]);
            start = i;
        }
    }
    if start < pairs.len() {
        runs.push(&pairs[start..]);
    }
    runs
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_keep_the_order_where_it_matters() {
        let pairs = [(0, 1), (2, 3), (1, 4), (5, 2), (6, 2)];
        assert_eq!(independent(&pairs), [&pairs[..2], &pairs[2..4], &pairs[4..]]);
        assert!(independent(&[]).is_empty());
    }
}
