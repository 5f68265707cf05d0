//! Weights as the kernels like them: panels of 16 interleaved rows, one row per vector lane.
//!
//! A quantised panel holds the scales of its superblocks, then its blocks of 32 columns in order, each
//! its scales and its codes; two blocks together, scales first, where scales fill half a cache line:
//!
//!   supers  per superblock, each for 16 rows: `d`, `dmin` (f16), or `d`
//!   scales  per block, each for 16 rows: `d` (f16), or `d`, `m` (f16), or 8-bit `sc`, `m`
//!   codes   4 or 8 groups of 64 bytes, four codes of each of the 16 rows;
//!           nibbles: group g holds columns 4g..4g+4 (low) and 16+4g.. (high) of every row
//!           bytes:   group g holds columns 4g..4g+4 of every row
//!
//! So a product reads one stream: with the scales of all blocks behind all codes, two streams a few
//! KiB apart were read at a third of the speed of memory.
//!
//! A panel of plain floats holds the 16 rows' elements column by column. Rows that a matrix lacks
//! in its last panel are zero. Nothing is rounded on the way: [`CpuWeight::row_into`] gives the
//! bits of `dequantize_row`.

use crate::lanes::{Codes, LANES};
use crate::memory::{ALIGN, Arena, Piece, free_bytes};
use crate::pool::Pool;
use crate::tensor::shape;
use dunlin_backend::quant::{SUB_BLOCK, scale_min_k4, sub_block};
use dunlin_backend::{BackendError, DType, HostTensor, Part};
use half::{bf16, f16};
use std::ops::Range;
use std::sync::atomic::{AtomicU32, Ordering};

/// An immutable matrix in the CPU backend's form.
pub struct CpuWeight {
    pub(crate) rows: usize,
    pub(crate) cols: usize,
    pub(crate) layout: Layout,
    pub(crate) data: Piece,
}

/// What a kernel needs to know to walk the panels.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Layout {
    pub form: Form,
    /// Blocks in a row (columns, for plain floats).
    pub blocks: usize,
    /// Blocks of the first superblock that lie before the slice.
    pub phase: usize,
    /// Offset of the first block in a panel, and the panel's size.
    pub first: usize,
    pub panel: usize,
}

/// Offsets in a panel of what belongs to a block.
pub(crate) struct Place {
    pub supers: usize,
    pub scales: usize,
    pub codes: usize,
}

impl Layout {
    /// Where block `b` is.
    #[inline(always)]
    pub fn place<F: Format>(&self, b: usize) -> Place {
        self.place_of(F::CODE_BYTES, F::SCALE_BYTES, F::SUPER_BYTES, b)
    }

    #[inline(always)]
    fn place_of(&self, codes: usize, scales: usize, supers: usize, b: usize) -> Place {
        let together = if scales.is_multiple_of(ALIGN) { 1 } else { 2 };
        let (group, member) = (b / together, b % together);
        let start = self.first + group * together * (codes + scales);
        Place {
            supers: (self.phase + b) / 8 * supers,
            scales: start + member * scales,
            codes: start + together * scales + member * codes,
        }
    }
}

/// How a stored type is held.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Form {
    Q4_0,
    Q4_1,
    Q4K,
    Q8_0,
    Q5_0,
    Q5_1,
    Q5K,
    Q6K,
    F32,
    F16,
    BF16,
}

/// How the scales of a quantised form are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Scales {
    /// `d` in float16.
    Half,
    /// `d` and `m` in float16: `d * q + m`.
    HalfMin,
    /// Six-bit `sc`, `m` per block under float16 `d`, `dmin`: `(d * sc) * q - (dmin * m)`.
    Super,
    /// Two int8 `sc` per block under float16 `d`: `(d * sc) * q`.
    Halves,
}

/// A quantised form, known to the compiler.
pub(crate) trait Format {
    const NIBBLES: bool;
    const CODES: Codes;
    const OFFSET: i32;
    const SCALES: Scales;
    const CODE_BYTES: usize = if Self::NIBBLES { 256 } else { 512 };
    const SCALE_BYTES: usize = if matches!(Self::SCALES, Scales::HalfMin) { 64 } else { 32 };
    const SUPER_BYTES: usize = match Self::SCALES {
        Scales::Half | Scales::HalfMin => 0,
        Scales::Super | Scales::Halves => 64,
    };
}

macro_rules! formats {
    ($($name:ident: $nibbles:literal, $codes:ident, $offset:literal, $scales:ident;)*) => {
        /// The quantised forms as types.
        pub(crate) mod format {
            use super::*;
            $(pub(crate) struct $name;
            impl Format for $name {
                const NIBBLES: bool = $nibbles;
                const CODES: Codes = Codes::$codes;
                const OFFSET: i32 = $offset;
                const SCALES: Scales = Scales::$scales;
            })*
        }
        impl Form {
            /// Constants of a quantised form; `None` for plain floats.
            fn quantised(self) -> Option<Traits> {
                match self {
                    $(Form::$name => Some(Traits::of::<format::$name>()),)*
                    Form::F32 | Form::F16 | Form::BF16 => None,
                }
            }
        }
    };
}

formats! {
    Q4_0: true, Nibble, 8, Half;
    Q4_1: true, Nibble, 0, HalfMin;
    Q4K: true, Nibble, 0, Super;
    Q8_0: false, Byte, 128, Half;
    Q5_0: false, Six, 16, Half;
    Q5_1: false, Six, 0, HalfMin;
    Q5K: false, Six, 0, Super;
    Q6K: false, Six, 32, Halves;
}

/// The constants of a [`Format`], as values.
#[derive(Clone, Copy)]
struct Traits {
    nibbles: bool,
    offset: i32,
    scales: Scales,
    code_bytes: usize,
    scale_bytes: usize,
    super_bytes: usize,
}

impl Traits {
    fn of<F: Format>() -> Self {
        Self {
            nibbles: F::NIBBLES,
            offset: F::OFFSET,
            scales: F::SCALES,
            code_bytes: F::CODE_BYTES,
            scale_bytes: F::SCALE_BYTES,
            super_bytes: F::SUPER_BYTES,
        }
    }
}

impl Form {
    fn of(dtype: DType) -> Self {
        match dtype {
            DType::F32 => Form::F32,
            DType::F16 => Form::F16,
            DType::BF16 => Form::BF16,
            DType::Q8_0 => Form::Q8_0,
            DType::Q4_0 => Form::Q4_0,
            DType::Q4_1 => Form::Q4_1,
            DType::Q5_0 => Form::Q5_0,
            DType::Q5_1 => Form::Q5_1,
            DType::Q4_K => Form::Q4K,
            DType::Q5_K => Form::Q5K,
            DType::Q6_K => Form::Q6K,
        }
    }

    /// Whether the form is one of plain floats.
    pub fn is_float(self) -> bool {
        self.quantised().is_none()
    }

    fn float_bytes(self) -> usize {
        if self == Form::F32 { 4 } else { 2 }
    }
}

impl CpuWeight {
    /// Repacks `part` of `t` into a piece of `arena`, on all threads of `pool`.
    pub(crate) fn pack(
        t: &HostTensor,
        part: &Part,
        arena: &mut Arena,
        pool: &mut Pool,
    ) -> Result<Self, BackendError> {
        check_part(t, part)?;
        let (rows, cols) = (part.rows.len(), part.cols.len());
        let layout = Layout::new(Form::of(t.dtype), t.dtype, &part.cols);
        let panels = rows.div_ceil(LANES);
        let bytes = layout.panel.saturating_mul(panels);
        let (what, free) = (format!("weight '{}'", t.name), free_bytes());
        if bytes as u64 > free {
            let (device, need) = ("cpu".into(), bytes as u64);
            return Err(BackendError::OutOfMemory { device, what, need, free });
        }
        let mut data = arena.take(bytes, &what)?;
        let base = Shared(data.as_mut_ptr());
        pool.run(panels, &|p| {
            // SAFETY: panel `p` is a range of the buffer that no other task touches.
            let panel =
                unsafe { std::slice::from_raw_parts_mut(base.at(p * layout.panel), layout.panel) };
            let first = part.rows.start + p * LANES;
            for lane in 0..LANES.min(part.rows.end - first) {
                layout.pack_row(t.dtype, t.row(first + lane), &part.cols, panel, lane);
            }
        });
        Ok(Self { rows, cols, layout, data })
    }

    pub fn rows(&self) -> usize {
        self.rows
    }

    pub fn cols(&self) -> usize {
        self.cols
    }

    pub(crate) fn panels(&self) -> usize {
        self.rows.div_ceil(LANES)
    }

    /// Fault injection: flips one bit of the packed bytes. The caller sees to it that no op runs.
    pub(crate) fn flip(&self, word: u64, bit: u32) -> Result<(u32, u32), BackendError> {
        let words = self.data.len() / 4;
        let at = usize::try_from(word).ok().filter(|word| *word < words);
        let at = at.ok_or_else(|| shape("weight_flip", format!("word {word} of {words}")))?;
        let place = self.data.as_ptr().wrapping_add(at * 4).cast_mut().cast::<u32>();
        // SAFETY: the word lies in the piece, which is aligned to 64 bytes and is memory of our own
        // allocation; it is read and written atomically, and no slice of it is in use.
        let place = unsafe { AtomicU32::from_ptr(place) };
        let before = place.fetch_xor(1 << (bit % 32), Ordering::SeqCst);
        Ok((before, place.load(Ordering::SeqCst)))
    }

    /// Dequantises row `row` times `factor` into `out` (`cols` elements).
    pub(crate) fn row_into(&self, row: usize, factor: f32, out: &mut [f32]) {
        let panel = &self.data[row / LANES * self.layout.panel..][..self.layout.panel];
        let lane = row % LANES;
        let Some(traits) = self.layout.form.quantised() else {
            let size = self.layout.form.float_bytes();
            for (k, o) in out.iter_mut().enumerate() {
                let b = &panel[(k * LANES + lane) * size..][..size];
                *o = factor
                    * match self.layout.form {
                        Form::F16 => f16::from_le_bytes([b[0], b[1]]).to_f32(),
                        Form::BF16 => bf16::from_le_bytes([b[0], b[1]]).to_f32(),
                        _ => f32::from_le_bytes([b[0], b[1], b[2], b[3]]),
                    };
            }
            return;
        };
        for (b, out) in out.chunks_exact_mut(SUB_BLOCK).enumerate() {
            let (scale, min) = self.layout.scale_min(traits, panel, b, lane);
            let codes = &panel[self.layout.place_in(traits, b).codes..][..traits.code_bytes];
            for (k, o) in out.iter_mut().enumerate() {
                let code = if traits.nibbles {
                    let byte = codes[(k % 16) / 4 * 64 + lane * 4 + k % 4];
                    (byte >> (4 * (k / 16))) & 15
                } else {
                    codes[k / 4 * 64 + lane * 4 + k % 4]
                };
                let value = scale[k / 16] * (code as i32 - traits.offset) as f32 + min;
                *o = value * factor;
            }
        }
    }
}

/// A pointer that tasks share, each for its own range.
#[derive(Clone, Copy)]
struct Shared(*mut u8);
// SAFETY: tasks write disjoint ranges.
unsafe impl Sync for Shared {}
impl Shared {
    /// # Safety
    /// `offset` lies within the buffer.
    unsafe fn at(&self, offset: usize) -> *mut u8 {
        // SAFETY: the caller's promise.
        unsafe { self.0.add(offset) }
    }
}

fn check_part(t: &HostTensor, part: &Part) -> Result<(), BackendError> {
    let inside = |r: &Range<usize>, n: usize| r.start < r.end && r.end <= n;
    let whole_blocks = t.dtype.block_elements() == 1
        || (part.cols.start | part.cols.end).is_multiple_of(SUB_BLOCK);
    if inside(&part.rows, t.rows) && inside(&part.cols, t.cols) && whole_blocks {
        return Ok(());
    }
    Err(shape(
        "weight",
        format!(
            "rows {:?} and columns {:?} are no slice of '{}' [{}, {}] of {:?} \
             (columns of quantised types are sliced at multiples of 32)",
            part.rows, part.cols, t.name, t.rows, t.cols, t.dtype
        ),
    ))
}

impl Layout {
    fn new(form: Form, dtype: DType, cols: &Range<usize>) -> Self {
        let Some(t) = form.quantised() else {
            let panel = (cols.len() * LANES * form.float_bytes()).next_multiple_of(ALIGN);
            return Self { form, blocks: cols.len(), phase: 0, first: 0, panel };
        };
        let blocks = cols.len() / SUB_BLOCK;
        let per_super = dtype.block_elements() / SUB_BLOCK;
        let phase = cols.start / SUB_BLOCK % per_super;
        let count = if t.super_bytes == 0 { 0 } else { (phase + blocks).div_ceil(per_super) };
        let first = (count * t.super_bytes).next_multiple_of(ALIGN);
        let scales = (blocks * t.scale_bytes).next_multiple_of(ALIGN);
        let panel = first + scales + blocks * t.code_bytes;
        Self { form, blocks, phase, first, panel }
    }

    fn pack_row(
        &self,
        dtype: DType,
        row: &[u8],
        cols: &Range<usize>,
        panel: &mut [u8],
        lane: usize,
    ) {
        let Some(t) = self.form.quantised() else {
            let size = self.form.float_bytes();
            let row = &row[cols.start * size..cols.end * size];
            for (to, from) in panel.chunks_exact_mut(LANES * size).zip(row.chunks_exact(size)) {
                to[lane * size..][..size].copy_from_slice(from);
            }
            return;
        };
        let (wide, bytes) = (dtype.block_elements(), dtype.block_bytes());
        let mut put = |at: usize, from: &[u8]| panel[at..at + from.len()].copy_from_slice(from);
        for b in 0..self.blocks {
            let element = cols.start + b * SUB_BLOCK;
            let block = &row[element / wide * bytes..][..bytes];
            let sub = element % wide / SUB_BLOCK;
            let codes = sub_block(dtype, block, sub).codes;
            let place = self.place_in(t, b);
            let at = place.codes + lane * 4;
            for g in 0..t.code_bytes / 64 {
                let mut four = [0u8; 4];
                for (j, c) in four.iter_mut().enumerate() {
                    *c = codes[4 * g + j];
                    if t.nibbles {
                        *c |= codes[16 + 4 * g + j] << 4;
                    }
                }
                put(at + g * 64, &four);
            }
            let (scales, supers) = (place.scales, place.supers);
            match t.scales {
                Scales::Half => put(scales + 2 * lane, &block[..2]),
                Scales::HalfMin => {
                    put(scales + 2 * lane, &block[..2]);
                    put(scales + 32 + 2 * lane, &block[2..4]);
                }
                Scales::Super => {
                    let (sc, m) = scale_min_k4(&block[4..16], sub);
                    put(scales + lane, &[sc]);
                    put(scales + 16 + lane, &[m]);
                    put(supers + 2 * lane, &block[..2]);
                    put(supers + 32 + 2 * lane, &block[2..4]);
                }
                Scales::Halves => {
                    put(scales + lane, &block[192 + 2 * sub..][..1]);
                    put(scales + 16 + lane, &block[193 + 2 * sub..][..1]);
                    put(supers + 2 * lane, &block[208..210]);
                }
            }
        }
    }

    fn place_in(&self, t: Traits, b: usize) -> Place {
        self.place_of(t.code_bytes, t.scale_bytes, t.super_bytes, b)
    }

    /// Scales of the two halves and minimum of block `b` of one lane.
    fn scale_min(&self, t: Traits, panel: &[u8], b: usize, lane: usize) -> ([f32; 2], f32) {
        let half = |at: usize| f16::from_le_bytes([panel[at], panel[at + 1]]).to_f32();
        let Place { scales, supers, .. } = self.place_in(t, b);
        match t.scales {
            Scales::Half => ([half(scales + 2 * lane); 2], -0.0),
            Scales::HalfMin => ([half(scales + 2 * lane); 2], half(scales + 32 + 2 * lane)),
            Scales::Super => {
                let (sc, m) = (panel[scales + lane] as f32, panel[scales + 16 + lane] as f32);
                ([half(supers + 2 * lane) * sc; 2], -(half(supers + 32 + 2 * lane) * m))
            }
            Scales::Halves => {
                let d = half(supers + 2 * lane);
                ([lane, 16 + lane].map(|at| d * (panel[scales + at] as i8) as f32), -0.0)
            }
        }
    }
}
