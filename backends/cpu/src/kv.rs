//! The paged key-value store, laid out for lanes.
//!
//! A block of a layer holds, for each KV head, its keys as tiles `[head_dim][16 tokens]` (a lane is
//! a token of `q . k`) and then, for each KV head, its values as `[token][head_dim]` (a lane is an
//! element), rows padded to whole vectors. Int8 elements have a float32 scale per token and head:
//! those of the keys lie behind all values, those of the values behind them. What a block holds
//! beyond the tokens written to it is never used, whatever it is.

use crate::element::{KvElement, kv_element_bytes};
use crate::lanes::{Kernel, LANES, Lanes, prefetch_write};
use crate::memory::{Buf, free_bytes};
use crate::tensor::{CpuTensor, same, shape};
use dunlin_backend::{BackendError, KV_TILE, KvDtype, KvSpec, SeqRows};

/// One shard's KV store. Memory is taken from the system as blocks are first written.
pub struct CpuKv {
    pub(crate) spec: KvSpec,
    pub(crate) data: Buf<u8>,
    pub(crate) layout: KvLayout,
}

/// Where things are, in bytes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct KvLayout {
    pub dtype: KvDtype,
    /// Tiles of 16 tokens in a block.
    pub tiles: usize,
    pub head_dim: usize,
    /// Of an element.
    pub element: usize,
    /// From one token's values to the next.
    pub value_stride: usize,
    pub key_head: usize,
    pub value_head: usize,
    /// From a block's keys to its values, to the scales of keys and of values, and to the next.
    pub values: usize,
    pub key_scales: usize,
    pub value_scales: usize,
    pub block: usize,
    pub layer: usize,
}

impl CpuKv {
    pub(crate) fn new(spec: &KvSpec, dtype: KvDtype) -> Result<Self, BackendError> {
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
        let layout = KvLayout::new(spec, dtype).ok_or_else(|| refuse(None))?;
        let bytes = layout.layer.checked_mul(spec.layers).ok_or_else(|| refuse(None))?;
        if bytes as u64 > free_bytes() {
            return Err(refuse(Some(bytes)));
        }
        let data = Buf::new(bytes, &format!("a KV pool of {} blocks", spec.blocks), false)?;
        Ok(Self { spec: spec.clone(), data, layout })
    }

    pub fn spec(&self) -> &KvSpec {
        &self.spec
    }

    pub fn dtype(&self) -> KvDtype {
        self.layout.dtype
    }

    /// Rows of keys and values on their way into layer `layer`, which [`CpuKv::check`] accepted.
    pub(crate) fn write<'a>(
        &mut self,
        layer: usize,
        k: &'a CpuTensor,
        v: &'a CpuTensor,
    ) -> Write<'a> {
        let start = layer * self.layout.layer;
        Write { k, v, layout: self.layout, layer: self.data[start..].as_mut_ptr() }
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
        let layout = &self.layout;
        let flipped = self.spec.bit(layer, block, slot, bit)?;
        let (head, inside) = (flipped.head, flipped.element);
        let (tile, token) = (slot / KV_TILE, slot % KV_TILE);
        let blocks = vec![block; tile + 1];
        // The table repeats the block, so tile `tile` of it is that of the block itself.
        let at = match flipped.value {
            false => {
                layout.key_tile(&blocks, tile, head) + (token + inside * KV_TILE) * layout.element
            }
            true => {
                layout.value_tile(&blocks, tile, head)
                    + token * layout.value_stride
                    + inside * layout.element
            }
        };
        let (width, start) = (layout.element, layer * layout.layer + at);
        let place = &mut self.data[start..start + width];
        let read = |place: &[u8]| place.iter().rev().fold(0, |v, byte| v << 8 | u32::from(*byte));
        let before = read(place);
        let at = flipped.within(8 * width);
        place[at / 8] ^= 1 << (at % 8);
        Ok((before, read(place)))
    }

    /// The block's bytes, layer after layer.
    pub(crate) fn read(&self, block: u32) -> Result<Vec<u8>, BackendError> {
        Ok(self.ranges("kv_read", block)?.flat_map(|r| &self.data[r]).copied().collect())
    }

    pub(crate) fn put(&mut self, block: u32, content: &[u8]) -> Result<(), BackendError> {
        let places = self.ranges("kv_put", block)?;
        let need = self.layout.block * self.spec.layers;
        if content.len() != need {
            let detail = format!("{} bytes for a block of {need}", content.len());
            return Err(shape("kv_put", detail));
        }
        for (place, bytes) in places.zip(content.chunks_exact(self.layout.block.max(1))) {
            self.data[place].copy_from_slice(bytes);
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
    fn new(spec: &KvSpec, dtype: KvDtype) -> Option<Self> {
        let element = kv_element_bytes(dtype);
        let value_stride = spec.head_dim.checked_next_multiple_of(LANES)?.checked_mul(element)?;
        let key_head = spec.head_dim.checked_mul(element)?.checked_mul(spec.block_tokens)?;
        let value_head = value_stride.checked_mul(spec.block_tokens)?;
        let values = key_head.checked_mul(spec.kv_heads)?;
        let key_scales = values.checked_add(value_head.checked_mul(spec.kv_heads)?)?;
        let scales = match dtype {
            KvDtype::Int8 => {
                size_of::<f32>().checked_mul(spec.block_tokens)?.checked_mul(spec.kv_heads)?
            }
            KvDtype::F32 | KvDtype::F16 => 0,
        };
        let value_scales = key_scales.checked_add(scales)?;
        let block = value_scales.checked_add(scales)?;
        Some(Self {
            dtype,
            tiles: spec.block_tokens / KV_TILE,
            head_dim: spec.head_dim,
            element,
            value_stride,
            key_head,
            value_head,
            values,
            key_scales,
            value_scales,
            block,
            layer: block.checked_mul(spec.blocks)?,
        })
    }

    /// Offset, within a layer, of the keys of tile `tile` of a sequence, for one KV head.
    #[inline(always)]
    pub fn key_tile(&self, blocks: &[u32], tile: usize, head: usize) -> usize {
        let block = blocks[tile / self.tiles] as usize;
        block * self.block
            + head * self.key_head
            + tile % self.tiles * (self.head_dim * KV_TILE * self.element)
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

    /// Offsets, within a layer, of the scales of the tile's keys and of its values (16 floats each).
    /// Only where elements have scales.
    #[inline(always)]
    pub fn scale_tiles(&self, blocks: &[u32], tile: usize, head: usize) -> (usize, usize) {
        let block = blocks[tile / self.tiles] as usize * self.block;
        let at = (head * self.tiles + tile % self.tiles) * (KV_TILE * size_of::<f32>());
        (block + self.key_scales + at, block + self.value_scales + at)
    }
}

/// Stores rows of sequences.
#[derive(Clone, Copy)]
pub(crate) struct Write<'a> {
    pub k: &'a CpuTensor,
    pub v: &'a CpuTensor,
    pub layout: KvLayout,
    /// The layer's first byte.
    pub layer: *mut u8,
}

// SAFETY: each row of a sequence is written by one task, to a place of its own.
unsafe impl Sync for Write<'_> {}

/// Some rows of one sequence.
pub(crate) struct WriteRows<'a, E> {
    pub write: Write<'a>,
    pub seq: &'a SeqRows,
    pub rows: std::ops::Range<usize>,
    pub element: std::marker::PhantomData<E>,
}

impl<E: KvElement> Kernel for WriteRows<'_, E> {
    /// # Safety
    /// [`CpuKv::check`] accepted the sequence, which has these rows; nobody else writes them. The
    /// layer's elements are of type `E`.
    #[inline(always)]
    unsafe fn run<L: Lanes>(self) {
        let Self { write: w, seq, rows, .. } = self;
        let (layout, d) = (w.layout, w.layout.head_dim);
        for row in rows {
            let position = seq.position + (row - seq.rows.start);
            let (tile, token) = (position / KV_TILE, position % KV_TILE);
            for head in 0..w.k.cols / d {
                let k = w.k.row(row)[head * d..][..d].as_ptr();
                let v = w.v.row(row)[head * d..][..d].as_ptr();
                let key = layout.key_tile(&seq.blocks, tile, head) + token * E::BYTES;
                let value =
                    layout.value_tile(&seq.blocks, tile, head) + token * layout.value_stride;
                // An element a cache line or two: all are asked for before the first is written.
                for e in (0..d).step_by(LINE.div_ceil(KV_TILE * E::BYTES)) {
                    prefetch_write(w.layer.wrapping_add(key + e * KV_TILE * E::BYTES));
                }
                // SAFETY: the block is in the store, and the offsets within the block.
                unsafe {
                    let value_scale = E::write::<L>(v, d, w.layer.add(value), 1);
                    let key_scale = E::write::<L>(k, d, w.layer.add(key), KV_TILE);
                    if E::SCALED {
                        let (keys, values) = layout.scale_tiles(&seq.blocks, tile, head);
                        let at = |tile: usize| w.layer.add(tile).cast::<f32>().add(token);
                        at(keys).write_unaligned(key_scale);
                        at(values).write_unaligned(value_scale);
                    }
                }
            }
        }
    }
}

/// Bytes of a cache line.
const LINE: usize = 64;
