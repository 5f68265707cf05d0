//! Activations quantised to int8, per row and block of 32 columns.
//!
//! For a block with largest magnitude `amax`: `d = amax / 127`, `q = round(x * (127 / amax))`, ties
//! to even, all in float32. A block whose `amax` is below 2^-100 counts as zero. A block with an
//! infinity or NaN gets `d = NaN`, so that the outputs say so. Each row is a function of itself.

use crate::lanes::{Kernel, LANES, Lanes, prefetch_write};
use crate::memory::Plain;
use crate::rowops::{activate, norm_factor};
use dunlin_backend::Activation;
use std::ops::Range;

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

/// Rows are split into tiles of 8, 4, 2 and 1 rows: the width of the one that begins so many rows
/// before the end. Blocks of a tile lie together: block `b` of row `first + i` is at
/// `first * blocks + b * width + i`.
#[inline(always)]
fn tile_width(rows_left: usize) -> usize {
    match rows_left {
        TILE.. => TILE,
        4.. => 4,
        2.. => 2,
        _ => 1,
    }
}

/// How many tiles `rows` rows are.
pub(crate) fn tile_count(rows: usize) -> usize {
    rows / TILE + (rows % TILE).count_ones() as usize
}

/// First row and width of tile `index` of `rows` rows.
pub(crate) fn tile(index: usize, rows: usize) -> (usize, usize) {
    let whole = rows / TILE;
    let mut first = index.min(whole) * TILE;
    for _ in whole..index {
        first += tile_width(rows - first);
    }
    (first, tile_width(rows - first))
}

/// Where the first of the `blocks` blocks of row `row` is, and the step from one to the next.
pub(crate) fn place(row: usize, rows: usize, blocks: usize) -> (usize, usize) {
    let whole = rows / TILE * TILE;
    let mut first = row.min(whole) / TILE * TILE;
    while row >= first + tile_width(rows - first) {
        first += tile_width(rows - first);
    }
    (first * blocks + (row - first), tile_width(rows - first))
}

/// Quantises one tile, of the rows or of their norms.
pub(crate) struct Quantise<'a> {
    /// First row of the tile, and floats from row to row.
    pub x: *const f32,
    pub stride: usize,
    pub blocks: usize,
    pub width: usize,
    pub out: *mut ActBlock,
    /// Weight and epsilon of a root mean square norm over the whole row, to be taken first.
    pub norm: Option<(&'a [f32], f32)>,
}

impl Kernel for Quantise<'_> {
    /// # Safety
    /// `x` has `width` rows of `32 * blocks` readable floats, `out` room for `width * blocks`; a
    /// norm's weight has `32 * blocks` floats.
    #[inline(always)]
    unsafe fn run<L: Lanes>(self) {
        for row in 0..self.width {
            let out = self.out.wrapping_add(row);
            for b in 0..self.blocks {
                prefetch_write(out.wrapping_add(b * self.width).cast());
            }
            // SAFETY: within the bounds promised above.
            unsafe {
                let x = self.x.add(row * self.stride);
                let Some((weight, eps)) = self.norm else {
                    quantise_row::<L>(x, self.blocks, out, self.width);
                    continue;
                };
                let factor = L::splat(norm_factor::<L>(x, 32 * self.blocks, eps));
                for b in 0..self.blocks {
                    let (x, w) = (x.add(b * 32), weight.as_ptr().add(b * 32));
                    let low = L::load(x).mul(factor).mul(L::load(w));
                    let high = L::load(x.add(LANES)).mul(factor).mul(L::load(w.add(LANES)));
                    quantise_block(low, high, &mut *out.add(b * self.width));
                }
            }
        }
    }
}

/// Quantises `activation(gate) * up` for some blocks of all rows of a chunk, whose first row is the
/// first of a tile.
pub(crate) struct GateQuantise {
    /// Those blocks of the first row, and floats from row to row, alike in both.
    pub gate: *const f32,
    pub up: *const f32,
    pub stride: usize,
    pub rows: usize,
    pub activation: Activation,
    /// Which of the `all` blocks of a row.
    pub blocks: Range<usize>,
    pub all: usize,
    /// The chunk's first block.
    pub out: *mut ActBlock,
}

impl Kernel for GateQuantise {
    /// # Safety
    /// `gate` and `up` have `rows` rows with those blocks readable, `out` room for `rows * all`.
    #[inline(always)]
    unsafe fn run<L: Lanes>(self) {
        for index in 0..tile_count(self.rows) {
            let (first, width) = tile(index, self.rows);
            for b in self.blocks.clone() {
                let out = self.out.wrapping_add(first * self.all + b * width);
                for row in 0..width {
                    prefetch_write(out.wrapping_add(row).cast());
                }
                for row in 0..width {
                    let start = (first + row) * self.stride + (b - self.blocks.start) * 32;
                    // SAFETY: within the bounds promised above.
                    unsafe {
                        let (low, high) = (self.value::<L>(start), self.value::<L>(start + LANES));
                        quantise_block(low, high, &mut *out.add(row));
                    }
                }
            }
        }
    }
}

impl GateQuantise {
    /// # Safety
    /// 16 floats from `at` on are readable in both.
    #[inline(always)]
    unsafe fn value<L: Lanes>(&self, at: usize) -> L {
        // SAFETY: the caller's promise.
        let (x, up) = unsafe { (L::load(self.gate.add(at)), L::load(self.up.add(at))) };
        activate(x, self.activation).mul(up)
    }
}

/// Quantises one row into every `step`-th block from `out` on.
///
/// # Safety
/// `x` points to `32 * blocks` readable floats; the blocks are writable.
#[inline(always)]
pub(crate) unsafe fn quantise_row<L: Lanes>(
    x: *const f32,
    blocks: usize,
    out: *mut ActBlock,
    step: usize,
) {
    for b in 0..blocks {
        // SAFETY: the caller's promise.
        unsafe {
            let (low, high) = (L::load(x.add(b * 32)), L::load(x.add(b * 32 + LANES)));
            quantise_block(low, high, &mut *out.add(b * step));
        }
    }
}

#[inline(always)]
fn quantise_block<L: Lanes>(low: L, high: L, out: &mut ActBlock) {
    const TINY: f32 = f32::from_bits((127 - 100) << 23);
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_block_of_every_row_has_one_place() {
        for rows in 1..40 {
            let blocks = 3;
            let mut taken = vec![false; rows * blocks];
            for index in 0..tile_count(rows) {
                let (first, width) = tile(index, rows);
                for row in first..first + width {
                    let (start, step) = place(row, rows, blocks);
                    for b in 0..blocks {
                        let at = start + b * step;
                        assert_eq!(at, first * blocks + b * width + (row - first));
                        assert!(!std::mem::replace(&mut taken[at], true), "{row} of {rows}");
                    }
                }
            }
            assert!(taken.iter().all(|t| *t), "{rows}");
        }
    }
}
