//! Weights in device memory: still quantised, in the layout that `shaders/weights.wgsl` reads.
//!
//! Rows lie in tiles of 32, interleaved word by word, so that neighbouring lanes read neighbouring
//! words. A row's codes are vec4s (16 bytes): nibbles, bytes or floats of 32-wide blocks, then, for
//! k-quants, one header a 256-wide super-block. What does not fill vec4s (scales, fifth bits) is in
//! a buffer of words. A matrix too large for one binding is cut into chunks of whole tiles.

use crate::gpu::{Buffer, Gpu};
use crate::tensor::{shape, word};
use dunlin_backend::quant::{SubBlock, sub_block};
use dunlin_backend::{BackendError, DType, HostTensor, Part};
use half::f16;
use std::ops::Range;
use std::sync::Arc;

/// Rows of a tile.
pub(crate) const TILE: usize = 32;

/// A matrix on the device.
pub struct WgpuWeight {
    pub(crate) layout: Layout,
    pub(crate) chunks: Vec<Chunk>,
}

/// Rows of a matrix that share a binding.
pub(crate) struct Chunk {
    pub rows: Range<usize>,
    pub codes: Buffer,
    pub scales: Buffer,
}

/// Where a matrix's elements lie.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Layout {
    pub dtype: DType,
    pub rows: usize,
    pub cols: usize,
    /// 32-wide blocks of a row.
    pub blocks: usize,
    /// vec4s of a row in `codes`, words of a row in `scales`.
    pub code_stride: usize,
    pub scale_stride: usize,
    /// Where the part's first block lies within its super-block.
    pub first_sub: usize,
}

impl WgpuWeight {
    pub(crate) fn new(gpu: &Arc<Gpu>, t: &HostTensor, part: &Part) -> Result<Self, BackendError> {
        let layout = Layout::new(t, part)?;
        let tile_bytes = layout.code_stride.max(layout.scale_stride.div_ceil(4)) * 16 * TILE;
        let most = usize::try_from(gpu.binding_bytes()).unwrap_or(usize::MAX);
        let tiles = (most / tile_bytes.max(1)).max(1);
        let mut chunks = Vec::new();
        for first in (0..layout.rows).step_by(tiles * TILE) {
            let rows = first..layout.rows.min(first + tiles * TILE);
            let (codes, scales) = pack(t, part, &layout, rows.clone());
            let upload = |words: &[u32]| {
                let buffer = gpu.storage((words.len() * 4) as u64, &t.name)?;
                gpu.fill(&buffer, words)?;
                Ok(buffer)
            };
            chunks.push(Chunk { rows, codes: upload(&codes)?, scales: upload(&scales)? });
        }
        Ok(Self { layout, chunks })
    }

    /// Whether elements are codes that fit bytes.
    pub(crate) fn is_quantised(&self) -> bool {
        self.layout.dtype.block_elements() > 1
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.chunks.iter().map(|c| c.codes.bytes + c.scales.bytes).sum()
    }

    /// The words of `struct Weight` in the shaders.
    pub(crate) fn params(&self) -> [u32; 4] {
        let l = &self.layout;
        [word(l.blocks), word(l.code_stride), word(l.scale_stride), word(l.first_sub)]
    }
}

impl Layout {
    fn new(t: &HostTensor, part: &Part) -> Result<Self, BackendError> {
        let Part { rows, cols } = part;
        let fits = |r: &Range<usize>, n| r.start <= r.end && r.end <= n;
        let whole = t.dtype.block_elements() == 1 || (cols.start % 32 == 0 && cols.end % 32 == 0);
        if !fits(rows, t.rows) || !fits(cols, t.cols) || !whole {
            return Err(shape(
                "weight",
                format!("part {rows:?} x {cols:?} of '{}' [{}, {}]", t.name, t.rows, t.cols),
            ));
        }
        let blocks = cols.len().div_ceil(32);
        let first_sub = cols.start / 32 % 8;
        let supers = (first_sub + blocks).div_ceil(8);
        let (code_stride, scale_stride) = match t.dtype {
            DType::F32 => (8 * blocks, 0),
            DType::F16 | DType::BF16 => (4 * blocks, 0),
            DType::Q8_0 => (2 * blocks, blocks.div_ceil(2)),
            DType::Q4_0 => (blocks, blocks.div_ceil(2)),
            DType::Q4_1 => (blocks, blocks),
            DType::Q5_0 => (blocks, blocks + blocks.div_ceil(2)),
            DType::Q5_1 => (blocks, 2 * blocks),
            DType::Q4_K => (blocks + supers, 0),
            DType::Q5_K => (blocks + supers, blocks),
            DType::Q6_K => (blocks + supers, 2 * blocks + supers),
        };
        Ok(Self {
            dtype: t.dtype,
            rows: rows.len(),
            cols: cols.len(),
            blocks,
            code_stride,
            scale_stride,
            first_sub,
        })
    }
}

/// Codes and scales of `rows` of the part, padded with zeros to whole tiles.
fn pack(t: &HostTensor, part: &Part, layout: &Layout, rows: Range<usize>) -> (Vec<u32>, Vec<u32>) {
    let padded = rows.len().next_multiple_of(TILE);
    let mut codes = vec![0; padded * layout.code_stride * 4];
    let mut scales = vec![0; padded * layout.scale_stride];
    for (r, row) in rows.enumerate() {
        let mut to = RowWriter {
            codes: &mut codes,
            scales: &mut scales,
            code_base: r / TILE * layout.code_stride * TILE + r % TILE,
            scale_base: r / TILE * layout.scale_stride * TILE + r % TILE,
        };
        let source = t.row(part.rows.start + row);
        if t.dtype.block_elements() == 1 {
            floats(&mut to, layout.dtype, source, &part.cols);
        } else {
            quantised(&mut to, layout, source, part.cols.start / 32);
        }
    }
    (codes, scales)
}

/// Writes one row's vec4s and words to their interleaved places.
struct RowWriter<'a> {
    codes: &'a mut [u32],
    scales: &'a mut [u32],
    code_base: usize,
    scale_base: usize,
}

impl RowWriter<'_> {
    /// Word `w` of the row's codes, four to a vec4.
    fn code(&mut self, w: usize, value: u32) {
        self.codes[(self.code_base + w / 4 * TILE) * 4 + w % 4] = value;
    }

    fn scale(&mut self, w: usize, value: u32) {
        self.scales[self.scale_base + w * TILE] = value;
    }

    /// Half-word `n` from word `first` on.
    fn half(&mut self, first: usize, n: usize, value: u32) {
        self.scales[self.scale_base + (first + n / 2) * TILE] |= value << (16 * (n % 2));
    }
}

fn floats(to: &mut RowWriter<'_>, dtype: DType, source: &[u8], cols: &Range<usize>) {
    let wide = dtype.block_bytes();
    let bytes = &source[cols.start * wide..cols.end * wide];
    for (w, chunk) in bytes.chunks(4).enumerate() {
        let mut word = [0; 4];
        word[..chunk.len()].copy_from_slice(chunk);
        to.code(w, u32::from_le_bytes(word));
    }
}

fn quantised(to: &mut RowWriter<'_>, layout: &Layout, source: &[u8], first: usize) {
    let dtype = layout.dtype;
    let (subs, bytes) = (dtype.block_elements() / 32, dtype.block_bytes());
    let blocks = layout.blocks;
    for b in 0..blocks {
        let block = &source[(first + b) / subs * bytes..][..bytes];
        let sub = (first + b) % subs;
        let SubBlock { codes, .. } = sub_block(dtype, block, sub);
        match dtype {
            DType::Q8_0 => {
                for (j, four) in codes.chunks_exact(4).enumerate() {
                    // Back to signed bytes.
                    to.code(8 * b + j, u32_at(four, 0) ^ 0x8080_8080);
                }
                to.half(0, b, u16_at(block, 0));
            }
            DType::Q4_0 => {
                nibbles(to, b, &codes);
                to.half(0, b, u16_at(block, 0));
            }
            DType::Q4_1 => {
                nibbles(to, b, &codes);
                to.scale(b, u32_at(block, 0));
            }
            DType::Q5_0 => {
                nibbles(to, b, &codes);
                to.scale(b, fifth_bits(&codes));
                to.half(blocks, b, u16_at(block, 0));
            }
            DType::Q5_1 => {
                nibbles(to, b, &codes);
                to.scale(2 * b, u32_at(block, 0));
                to.scale(2 * b + 1, fifth_bits(&codes));
            }
            DType::Q4_K => nibbles(to, b, &codes),
            DType::Q5_K => {
                nibbles(to, b, &codes);
                to.scale(b, fifth_bits(&codes));
            }
            DType::Q6_K => {
                nibbles(to, b, &codes);
                to.scale(2 * b, upper_bits(&codes[..16]));
                to.scale(2 * b + 1, upper_bits(&codes[16..]));
            }
            DType::F32 | DType::F16 | DType::BF16 => unreachable!("not a quantised type"),
        }
        let head = match dtype {
            DType::Q4_K | DType::Q5_K => 0,
            DType::Q6_K => 192,
            _ => continue,
        };
        if b > 0 && sub > 0 {
            continue;
        }
        let index = (layout.first_sub + b) / 8;
        for w in 0..4 {
            to.code(4 * (blocks + index) + w, u32_at(block, head + 4 * w));
        }
        if dtype == DType::Q6_K {
            let d = f16::from_le_bytes([block[208], block[209]]).to_f32();
            to.scale(2 * blocks + index, d.to_bits());
        }
    }
}

/// Byte i of word j: element 4j+i in its low nibble, 16+4j+i in its high one.
fn nibbles(to: &mut RowWriter<'_>, b: usize, codes: &[u8; 32]) {
    for j in 0..4 {
        let byte = |i: usize| (codes[4 * j + i] & 15) | (codes[16 + 4 * j + i] << 4);
        to.code(4 * b + j, u32::from_le_bytes([byte(0), byte(1), byte(2), byte(3)]));
    }
}

/// Bit 4 of each code.
fn fifth_bits(codes: &[u8; 32]) -> u32 {
    codes.iter().enumerate().map(|(i, c)| u32::from((c >> 4) & 1) << i).sum()
}

/// Bits 4 and 5 of each of 16 codes.
fn upper_bits(codes: &[u8]) -> u32 {
    codes.iter().enumerate().map(|(i, c)| u32::from((c >> 4) & 3) << (2 * i)).sum()
}

fn u16_at(bytes: &[u8], at: usize) -> u32 {
    u32::from(u16::from_le_bytes([bytes[at], bytes[at + 1]]))
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}
