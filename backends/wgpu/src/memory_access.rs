//! Device memory as it is: read, changed and put back from the host, for integrity checks and fault
//! injection. Each call waits; ops that were recorded before run first.

use crate::gpu::{Buffer, Gpu};
use crate::kv::{Store, WgpuKv, token_words};
use crate::pack::WgpuWeight;
use crate::record::Recorder;
use crate::tensor::shape;
use dunlin_backend::{BackendError, KvDtype, checksum};
use std::ops::Range;

/// Bytes read at once: bounds the host's staging memory.
const PIECE: u64 = 4 << 20;

/// The sum of a weight's bytes, or of its pieces' sums where there are several.
pub(crate) fn weight_sum(rec: &mut Recorder, w: &WgpuWeight) -> Result<u64, BackendError> {
    let mut sums = Vec::new();
    for buffer in w.chunks.iter().flat_map(|c| [&c.codes, &c.scales]) {
        for start in (0..buffer.bytes).step_by(PIECE as usize) {
            let part = start..buffer.bytes.min(start + PIECE);
            rec.read(&[(buffer, part)], |bytes| sums.push(checksum(bytes)))?;
        }
    }
    let bytes: Vec<u8> = sums.iter().flat_map(|sum| sum.to_le_bytes()).collect();
    Ok(checksum(&bytes))
}

/// Flips a bit of a word of a weight: codes, then scales, chunk after chunk.
pub(crate) fn weight_flip(
    gpu: &Gpu,
    rec: &mut Recorder,
    w: &WgpuWeight,
    word: u64,
    bit: u32,
) -> Result<(u32, u32), BackendError> {
    let mut rest = word;
    for buffer in w.chunks.iter().flat_map(|c| [&c.codes, &c.scales]) {
        if rest < buffer.bytes / 4 {
            return flip(gpu, rec, buffer, rest, 1 << (bit % 32));
        }
        rest -= buffer.bytes / 4;
    }
    Err(shape("weight_flip", format!("word {word} of {}", w.bytes() / 4)))
}

impl WgpuKv {
    /// Flips a bit of an entry, as [`Backend::kv_flip`](dunlin_backend::Backend::kv_flip) has it.
    pub(crate) fn flip(
        &self,
        gpu: &Gpu,
        rec: &mut Recorder,
        (layer, block, slot): (usize, u32, usize),
        bit: u32,
    ) -> Result<(u32, u32), BackendError> {
        let spec = &self.spec;
        let flipped = spec.bit(layer, block, slot, bit)?;
        let (head, inside) = (flipped.head, flipped.element);
        let own = |s: &&Store| s.heads.contains(&head);
        let store = self.layers[layer].iter().find(own);
        let store = store.ok_or_else(|| shape("kv_flip", format!("head {head} is nowhere")))?;
        let local = head - store.heads.start;
        let token = (block as usize * store.heads.len() + local) * spec.block_tokens + slot;
        let width = match self.dtype {
            KvDtype::F32 => 32,
            KvDtype::F16 => 16,
            KvDtype::Int8 => 8,
        };
        let each = 32 / width;
        let word = token * token_words(self.dtype, spec.head_dim) + inside / each;
        let shift = width * (inside % each);
        let at = shift + flipped.within(width);
        let buffer = if flipped.value { &store.values } else { &store.keys };
        let (before, after) = flip(gpu, rec, buffer, word as u64, 1 << at)?;
        let entry = |word: u32| (word >> shift) & (u32::MAX >> (32 - width));
        Ok((entry(before), entry(after)))
    }

    /// The block's bytes: layer after layer, keys and then values of each store.
    pub(crate) fn read(&self, rec: &mut Recorder, block: u32) -> Result<Vec<u8>, BackendError> {
        let mut all = Vec::new();
        rec.read(&self.places("kv_read", block)?, |bytes| all.extend_from_slice(bytes))?;
        Ok(all)
    }

    pub(crate) fn put(
        &self,
        gpu: &Gpu,
        rec: &mut Recorder,
        block: u32,
        content: &[u8],
    ) -> Result<(), BackendError> {
        let places = self.places("kv_put", block)?;
        let need: u64 = places.iter().map(|(_, part)| part.end - part.start).sum();
        if content.len() as u64 != need {
            let detail = format!("{} bytes for a block of {need}", content.len());
            return Err(shape("kv_put", detail));
        }
        rec.begin(0)?;
        rec.submit()?;
        let mut rest = content;
        for (buffer, part) in places {
            let (bytes, after) = rest.split_at((part.end - part.start) as usize);
            gpu.queue.write_buffer(&buffer.raw, part.start, bytes);
            rest = after;
        }
        gpu.check()
    }

    fn places(
        &self,
        op: &'static str,
        block: u32,
    ) -> Result<Vec<(&Buffer, Range<u64>)>, BackendError> {
        if block as usize >= self.spec.blocks {
            return Err(shape(op, format!("block {block} of {}", self.spec.blocks)));
        }
        let words = self.spec.block_tokens * token_words(self.dtype, self.spec.head_dim);
        let mut places = Vec::new();
        for store in self.layers.iter().flatten() {
            let bytes = (4 * words * store.heads.len()) as u64;
            let part = u64::from(block) * bytes..(u64::from(block) + 1) * bytes;
            places.extend([(&store.keys, part.clone()), (&store.values, part)]);
        }
        Ok(places)
    }
}

/// Flips bits of a word; gives it before and after, read back.
fn flip(
    gpu: &Gpu,
    rec: &mut Recorder,
    buffer: &Buffer,
    word: u64,
    bits: u32,
) -> Result<(u32, u32), BackendError> {
    let part = 4 * word..4 * word + 4;
    let mut read = || {
        let mut value = [0; 4];
        rec.read(&[(buffer, part.clone())], |bytes| value.copy_from_slice(bytes))?;
        Ok::<_, BackendError>(u32::from_le_bytes(value))
    };
    let before = read()?;
    gpu.queue.write_buffer(&buffer.raw, part.start, &(before ^ bits).to_le_bytes());
    Ok((before, read()?))
}
