//! Activations quantised to int8, per row and block of 32 columns.
//!
//! For a block with largest magnitude `amax`: `d = amax / 127`, `q = round(x * (127 / amax))`, ties
//! to even, all in float32. A block whose `amax` is below 2^-100 counts as zero. A block with an
//! infinity or NaN gets `d = NaN`, so that the outputs say so. Each row is a function of itself.

use crate::lanes::{Kernel, LANES, Lanes};
use crate::memory::Plain;

/// Rows that a kernel takes at once; see [`tiles`].
pub(crate) const TILE: usize = 8;

/// One block of one row, with the terms that weight formats need: one cache line.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub(crate) struct ActBlock {
    pub q: [i8; 32],
    /// Scale.
    pub d: f32,
    /// `d * sum(q)`: what a format's minimum is multiplied with.
    pub sum: f32,
    /// `-offset * sum(q)` for the offsets 8, 16 and 128.
    pub minus8: i32,
    pub minus16: i32,
    pub minus128: i32,
    /// `-32 * sum` of each half of `q`.
    pub minus32: [i32; 2],
    pub unused: i32,
}

impl ActBlock {
    /// A block of zeros.
    pub const ZERO: Self = Self {
        q: [0; 32],
        d: 0.0,
        sum: 0.0,
        minus8: 0,
        minus16: 0,
        minus128: 0,
        minus32: [0; 2],
        unused: 0,
    };
}

// SAFETY: integers and floats only, no padding, alignment 64.
unsafe impl Plain for ActBlock {}

/// Splits `rows` into tiles of 8, 4, 2 and 1 rows: `(first row, width)` of the one at `row`.
/// Blocks of a tile lie together: block `b` of row `first + i` is at `first * blocks + b * width +
/// i`.
#[inline(always)]
pub(crate) fn tile_width(rows_left: usize) -> usize {
    match rows_left {
        TILE.. => TILE,
        4.. => 4,
        2.. => 2,
        _ => 1,
    }
}

/// Quantises one tile.
pub(crate) struct Quantise {
    /// First row of the tile, and floats from row to row.
    pub x: *const f32,
    pub stride: usize,
    pub blocks: usize,
    pub width: usize,
    pub out: *mut ActBlock,
}

impl Kernel for Quantise {
    /// # Safety
    /// `x` has `width` rows of `32 * blocks` readable floats, `out` room for `width * blocks`.
    #[inline(always)]
    unsafe fn run<L: Lanes>(self) {
        for row in 0..self.width {
            for b in 0..self.blocks {
                // SAFETY: within the bounds promised above.
                unsafe {
                    let x = self.x.add(row * self.stride + b * 32);
                    quantise_block::<L>(x, &mut *self.out.add(b * self.width + row));
                }
            }
        }
    }
}

/// # Safety
/// `x` points to 32 readable floats.
#[inline(always)]
unsafe fn quantise_block<L: Lanes>(x: *const f32, out: &mut ActBlock) {
    const TINY: f32 = f32::from_bits((127 - 100) << 23);
    // SAFETY: 32 floats are readable.
    let (low, high) = unsafe { (L::load(x), L::load(x.add(LANES))) };
    // Bits of magnitudes compare like the magnitudes, with infinities and NaN on top.
    let amax = L::i_largest(L::i_max(low.abs_bits(), high.abs_bits()));
    let amax = f32::from_bits(amax as u32);
    let (d, inverse) = if amax < TINY {
        (0.0, 0.0)
    } else if amax <= f32::MAX {
        (amax / 127.0, 127.0 / amax)
    } else {
        out.q = [0; 32];
        (f32::NAN, f32::NAN)
    };
    let mut sums = [0i32; 2];
    if !d.is_nan() {
        let low = low.mul(L::splat(inverse)).to_i32();
        let high = high.mul(L::splat(inverse)).to_i32();
        // SAFETY: `q` has 32 bytes.
        unsafe {
            L::i_store_i8(low, out.q.as_mut_ptr());
            L::i_store_i8(high, out.q.as_mut_ptr().add(LANES));
        }
        sums = [L::i_sum(low), L::i_sum(high)];
    }
    let sum = sums[0] + sums[1];
    out.d = d;
    out.sum = d * sum as f32;
    out.minus8 = -8 * sum;
    out.minus16 = -16 * sum;
    out.minus128 = -128 * sum;
    out.minus32 = [-32 * sums[0], -32 * sums[1]];
}
