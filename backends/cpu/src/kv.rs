//! The paged key-value store, laid out for lanes.
//!
//! A block of a layer holds, for each KV head, its keys as tiles `[head_dim][16 tokens]` (a lane is
//! a token of `q . k`) and then, for each KV head, its values as `[token][head_dim]` (a lane is an
//! element), rows padded to whole vectors. What a block holds beyond the tokens written to it is
//! never used, whatever it is.

use crate::lanes::LANES;
use crate::memory::{Buf, free_bytes};
use crate::tensor::{CpuTensor, same, shape};
use dunlin_backend::{BackendError, KV_TILE, KvSpec, SeqRows};

/// One shard's KV store, float32. Memory is taken from the system as blocks are first written.
pub struct CpuKv {
    pub(crate) spec: KvSpec,
    pub(crate) data: Buf<f32>,
    pub(crate) layout: KvLayout,
}

/// Where things are, in floats.
#[derive(Debug, Clone, Copy)]
pub(crate) struct KvLayout {
    /// Tiles of 16 tokens in a block.
    pub tiles: usize,
    pub head_dim: usize,
    /// Floats from one token's values to the next.
    pub value_stride: usize,
    pub key_head: usize,
    pub value_head: usize,
    /// From a block's keys to its values, and from block to block.
    pub values: usize,
    pub block: usize,
    pub layer: usize,
}

impl CpuKv {
    pub(crate) fn new(spec: &KvSpec) -> Result<Self, BackendError> {
        let whole_tiles = spec.block_tokens > 0 && spec.block_tokens.is_multiple_of(KV_TILE);
        if !whole_tiles || spec.head_dim == 0 || spec.kv_heads == 0 {
            return Err(shape(
                "kv",
                format!("{spec:?}: blocks hold a multiple of {KV_TILE} tokens, heads an element"),
            ));
        }
        let refuse = |need: Option<usize>| BackendError::OutOfMemory {
            device: "cpu".into(),
            what: format!("a KV pool of {} blocks", spec.blocks),
            need: need.map_or(u64::MAX, |n| n as u64),
            free: free_bytes(),
        };
        let layout = KvLayout::new(spec).ok_or_else(|| refuse(None))?;
        let floats = layout.layer.checked_mul(spec.layers).ok_or_else(|| refuse(None))?;
        let bytes = floats.checked_mul(size_of::<f32>());
        if bytes.is_none_or(|b| b as u64 > free_bytes()) {
            return Err(refuse(bytes));
        }
        let data = Buf::new(floats, &format!("a KV pool of {} blocks", spec.blocks), false)?;
        Ok(Self { spec: spec.clone(), data, layout })
    }

    pub fn spec(&self) -> &KvSpec {
        &self.spec
    }

    /// Copies blocks `from -> to` in all layers, in the order given.
    pub(crate) fn copy(&mut self, pairs: &[(u32, u32)]) -> Result<(), BackendError> {
        let blocks = self.spec.blocks;
        for &(from, to) in pairs {
            if from as usize >= blocks || to as usize >= blocks {
                return Err(shape("kv_copy", format!("block {from} or {to} is not of {blocks}")));
            }
        }
        for layer in 0..self.spec.layers {
            for &(from, to) in pairs {
                let at = |b: u32| layer * self.layout.layer + b as usize * self.layout.block;
                let from = at(from);
                self.data.copy_within(from..from + self.layout.block, at(to));
            }
        }
        Ok(())
    }

    /// Fault injection: flips a bit of a token's keys (head by head) or, beyond them, values.
    pub(crate) fn flip(
        &mut self,
        layer: usize,
        block: u32,
        slot: usize,
        bit: u32,
    ) -> Result<(u32, u32), BackendError> {
        let (spec, layout) = (&self.spec, &self.layout);
        if layer >= spec.layers || block as usize >= spec.blocks || slot >= spec.block_tokens {
            let detail = format!("slot {slot} of block {block} of layer {layer}");
            return Err(shape("kv_flip", detail));
        }
        let half = spec.kv_heads * spec.head_dim;
        let element = (bit / 32) as usize % (2 * half);
        let (head, inside) = (element % half / spec.head_dim, element % spec.head_dim);
        let (tile, token) = (slot / KV_TILE, slot % KV_TILE);
        let blocks = vec![block; tile + 1];
        // The table repeats the block, so tile `tile` of it is that of the block itself.
        let at = match element < half {
            true => layout.key_tile(&blocks, tile, head) + token + inside * KV_TILE,
            false => layout.value_tile(&blocks, tile, head) + token * layout.value_stride + inside,
        };
        let value = &mut self.data[layer * layout.layer + at];
        let before = value.to_bits();
        *value = f32::from_bits(before ^ 1 << (bit % 32));
        Ok((before, value.to_bits()))
    }

    /// The block's bytes, layer after layer.
    pub(crate) fn read(&self, block: u32) -> Result<Vec<u8>, BackendError> {
        let ranges = self.ranges("kv_read", block)?;
        Ok(ranges.flat_map(|r| &self.data[r]).flat_map(|value| value.to_le_bytes()).collect())
    }

    pub(crate) fn put(&mut self, block: u32, content: &[u8]) -> Result<(), BackendError> {
        let places = self.ranges("kv_put", block)?.flatten();
        let need = self.layout.block * self.spec.layers * size_of::<f32>();
        if content.len() != need {
            let detail = format!("{} bytes for a block of {need}", content.len());
            return Err(shape("kv_put", detail));
        }
        for (at, bytes) in places.zip(content.chunks_exact(4)) {
            self.data[at] = f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
        }
        Ok(())
    }

    fn ranges(
        &self,
        op: &'static str,
        block: u32,
    ) -> Result<impl Iterator<Item = std::ops::Range<usize>> + use<>, BackendError> {
        if block as usize >= self.spec.blocks {
            return Err(shape(op, format!("block {block} of {}", self.spec.blocks)));
        }
        let (size, layer) = (self.layout.block, self.layout.layer);
        let begin = move |l: usize| l * layer + block as usize * size;
        Ok((0..self.spec.layers).map(move |l| begin(l)..begin(l) + size))
    }

    /// Refuses sequences whose rows are out of order, past `rows`, or not covered by known blocks.
    pub(crate) fn check(
        &self,
        op: &'static str,
        layer: usize,
        rows: usize,
        seqs: &[SeqRows],
    ) -> Result<(), BackendError> {
        if layer >= self.spec.layers {
            return Err(shape(op, format!("layer {layer} of {}", self.spec.layers)));
        }
        let mut free = 0;
        for (i, s) in seqs.iter().enumerate() {
            if s.rows.start < free || s.rows.end < s.rows.start || s.rows.end > rows {
                return Err(shape(
                    op,
                    format!(
                        "sequence {i} has rows {:?}; rows ascend without overlap below {rows}",
                        s.rows
                    ),
                ));
            }
            free = s.rows.end;
            let end = s.position.checked_add(s.rows.len());
            let need = end.map(|e| e.div_ceil(self.spec.block_tokens));
            if need.is_none_or(|n| n > s.blocks.len()) {
                return Err(shape(
                    op,
                    format!(
                        "sequence {i} ends at {end:?}, its {} blocks of {} tokens do not reach",
                        s.blocks.len(),
                        self.spec.block_tokens
                    ),
                ));
            }
            let used = &s.blocks[..need.unwrap_or(0)];
            if let Some(b) = used.iter().find(|b| **b as usize >= self.spec.blocks) {
                return Err(shape(op, format!("sequence {i}: block {b} of {}", self.spec.blocks)));
            }
        }
        Ok(())
    }

    /// Refuses keys or values of the wrong width.
    pub(crate) fn check_width(&self, op: &'static str, t: &CpuTensor) -> Result<(), BackendError> {
        same(op, "columns", t.cols, self.spec.kv_heads * self.spec.head_dim)
    }
}

impl KvLayout {
    /// `None` where the numbers overflow.
    fn new(spec: &KvSpec) -> Option<Self> {
        let value_stride = spec.head_dim.checked_next_multiple_of(LANES)?;
        let key_head = spec.head_dim.checked_mul(spec.block_tokens)?;
        let value_head = value_stride.checked_mul(spec.block_tokens)?;
        let values = key_head.checked_mul(spec.kv_heads)?;
        let block = values.checked_add(value_head.checked_mul(spec.kv_heads)?)?;
        Some(Self {
            tiles: spec.block_tokens / KV_TILE,
            head_dim: spec.head_dim,
            value_stride,
            key_head,
            value_head,
            values,
            block,
            layer: block.checked_mul(spec.blocks)?,
        })
    }

    /// Offset, within a layer, of the keys of tile `tile` of a sequence, for one KV head.
    #[inline(always)]
    pub fn key_tile(&self, blocks: &[u32], tile: usize, head: usize) -> usize {
        let block = blocks[tile / self.tiles] as usize;
        block * self.block + head * self.key_head + tile % self.tiles * (self.head_dim * KV_TILE)
    }

    /// Offset, within a layer, of the values of the first token of tile `tile`.
    #[inline(always)]
    pub fn value_tile(&self, blocks: &[u32], tile: usize, head: usize) -> usize {
        let block = blocks[tile / self.tiles] as usize;
        block * self.block
            + self.values
            + head * self.value_head
            + tile % self.tiles * (self.value_stride * KV_TILE)
    }
}

/// Stores the rows of all sequences, for one KV head. Plain copies: every path is the same.
pub(crate) struct Write<'a> {
    pub k: &'a CpuTensor,
    pub v: &'a CpuTensor,
    pub seqs: &'a [SeqRows],
    pub layout: KvLayout,
    /// The layer's first float.
    pub layer: *mut f32,
}

// SAFETY: each head of the layer is written by one task.
unsafe impl Sync for Write<'_> {}

impl Write<'_> {
    /// # Safety
    /// [`CpuKv::check`] accepted the sequences; nobody else touches this head of the layer.
    pub unsafe fn head(&self, head: usize) {
        let d = self.layout.head_dim;
        for s in self.seqs {
            for (i, row) in s.rows.clone().enumerate() {
                let position = s.position + i;
                let (tile, token) = (position / KV_TILE, position % KV_TILE);
                let k = &self.k.row(row)[head * d..][..d];
                let v = &self.v.row(row)[head * d..][..d];
                let key = self.layout.key_tile(&s.blocks, tile, head) + token;
                let value = self.layout.value_tile(&s.blocks, tile, head)
                    + token * self.layout.value_stride;
                // SAFETY: the block is in the store, and the offsets within the block.
                unsafe {
                    for (e, k) in k.iter().enumerate() {
                        *self.layer.add(key + e * KV_TILE) = *k;
                    }
                    std::ptr::copy_nonoverlapping(v.as_ptr(), self.layer.add(value), d);
                }
            }
        }
    }
}
