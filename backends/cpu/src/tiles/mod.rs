//! Integer matrix products in tiles: what Intel's AMX computes, and the same in plain Rust.
//!
//! A tile product multiplies 8 rows of int8 activations with one block (16 rows, 32 columns of
//! codes) of a weight panel, exactly, in integers. Scales are applied afterwards, in lanes, by the
//! chain of `linear.rs`: so this path gives the bits of the others.
//!
//! Nothing here is trusted: [`Amx`](amx::Amx) is used only where the processor and the system say
//! that they have it and, at start, a set of random products comes out as [`Soft`] computes it.

#[cfg(target_arch = "x86_64")]
pub(crate) mod amx;
mod product;
pub(crate) use product::{TileFast, whole_blocks};

use crate::activations::ActBlock;
use std::sync::OnceLock;

/// Rows of activations in a tile.
pub(crate) const TILE_ROWS: usize = 8;

/// Bytes of one block's codes: 8 groups of 64, four codes of each of 16 weight rows.
pub(crate) const CODE_BYTES: usize = 512;

/// Sums of one tile: row by row, 16 each.
pub(crate) const TILE_SUMS: usize = TILE_ROWS * 16;

/// Which unit multiplies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Unit {
    Amx,
    /// Far slower than lanes: for tests.
    #[cfg(test)]
    Soft,
}

/// A unit that multiplies tiles.
pub(crate) trait Tiles: 'static {
    /// Sets the shapes of this thread's tiles. [`Tiles::leave`] must follow.
    ///
    /// # Safety
    /// The processor has the unit.
    unsafe fn enter() -> Self;

    /// `out[n][row][lane] = sum over k of a[n][row].q[k] * codes[k / 4][lane][k % 4]` for `N` tiles
    /// of activations (1 or 2), each of [`TILE_ROWS`] blocks in a row.
    ///
    /// # Safety
    /// Every `a` points to 8 blocks, `codes` to [`CODE_BYTES`] bytes, `out` to `N` times
    /// [`TILE_SUMS`] sums.
    unsafe fn products<const N: usize>(
        &mut self,
        a: [*const ActBlock; N],
        codes: *const u8,
        out: *mut i32,
    );

    /// Gives this thread's tiles back.
    ///
    /// # Safety
    /// As [`Tiles::enter`].
    unsafe fn leave(self);
}

/// The five tile instructions in plain Rust, as the manual defines them.
pub(crate) struct Soft {
    registers: [[u8; 1024]; 8],
    shapes: [Shape; 8],
}

/// Rows, and bytes of a row.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct Shape {
    pub rows: usize,
    pub bytes: usize,
}

/// Which register holds what, and its shape: sums in 0 and 1, activations in 2 and 3, codes in 4.
pub(crate) const SHAPES: [Shape; 8] = {
    let sums = Shape { rows: TILE_ROWS, bytes: 64 };
    let activations = Shape { rows: TILE_ROWS, bytes: 32 };
    let codes = Shape { rows: CODE_BYTES / 64, bytes: 64 };
    let none = Shape { rows: 0, bytes: 0 };
    [sums, sums, activations, activations, codes, none, none, none]
};

const BYTES_OF_BLOCK: usize = size_of::<ActBlock>();

impl Tiles for Soft {
    unsafe fn enter() -> Self {
        Self { registers: [[0; 1024]; 8], shapes: SHAPES }
    }

    unsafe fn products<const N: usize>(
        &mut self,
        a: [*const ActBlock; N],
        codes: *const u8,
        out: *mut i32,
    ) {
        // SAFETY: the caller's promise covers what the shapes take.
        unsafe {
            self.load(4, codes, 64);
            for (n, a) in a.into_iter().enumerate() {
                self.zero(n);
                self.load(2 + n, a.cast(), BYTES_OF_BLOCK);
                self.dot(n, 2 + n, 4);
                self.store(n, out.add(n * TILE_SUMS).cast(), 64);
            }
        }
    }

    unsafe fn leave(self) {}
}

impl Soft {
    /// `tilezero`
    fn zero(&mut self, tile: usize) {
        self.registers[tile] = [0; 1024];
    }

    /// `tileloadd`
    ///
    /// # Safety
    /// Rows of the tile's shape, `stride` bytes apart, are readable.
    unsafe fn load(&mut self, tile: usize, from: *const u8, stride: usize) {
        let Shape { rows, bytes } = self.shapes[tile];
        self.registers[tile] = [0; 1024];
        for row in 0..rows {
            let to = &mut self.registers[tile][row * 64..][..bytes];
            // SAFETY: the caller's promise.
            unsafe {
                std::ptr::copy_nonoverlapping(from.add(row * stride), to.as_mut_ptr(), bytes);
            }
        }
    }

    /// `tilestored`
    ///
    /// # Safety
    /// Rows of the tile's shape, `stride` bytes apart, are writable.
    unsafe fn store(&self, tile: usize, to: *mut u8, stride: usize) {
        let Shape { rows, bytes } = self.shapes[tile];
        for row in 0..rows {
            let from = &self.registers[tile][row * 64..][..bytes];
            // SAFETY: the caller's promise.
            unsafe {
                std::ptr::copy_nonoverlapping(from.as_ptr(), to.add(row * stride), bytes);
            }
        }
    }

    /// `tdpbsud`: signed bytes of `a` times unsigned bytes of `b`, in groups of four.
    fn dot(&mut self, sums: usize, a: usize, b: usize) {
        let word = |register: &[u8; 1024], at: usize| -> [u8; 4] {
            [register[at], register[at + 1], register[at + 2], register[at + 3]]
        };
        for row in 0..self.shapes[a].rows {
            for group in 0..self.shapes[a].bytes / 4 {
                let signed = word(&self.registers[a], row * 64 + group * 4);
                for lane in 0..self.shapes[sums].bytes / 4 {
                    let unsigned = word(&self.registers[b], group * 64 + lane * 4);
                    let at = row * 64 + lane * 4;
                    let mut sum = i32::from_le_bytes(word(&self.registers[sums], at));
                    for (x, w) in signed.into_iter().zip(unsigned) {
                        sum = sum.wrapping_add(i32::from(x as i8) * i32::from(w));
                    }
                    self.registers[sums][at..at + 4].copy_from_slice(&sum.to_le_bytes());
                }
            }
        }
    }
}

/// Whether AMX is there and computes what it should; asked once in a process.
pub(crate) fn amx_works() -> bool {
    static WORKS: OnceLock<bool> = OnceLock::new();
    *WORKS.get_or_init(|| {
        #[cfg(target_arch = "x86_64")]
        if amx::allowed() {
            // SAFETY: processor and system have the unit.
            let works = unsafe { agrees::<amx::Amx>() };
            if !works {
                tracing::warn!(
                    "AMX gives wrong products on this processor; it is not used (the path below \
                     it is). Please report this"
                );
            }
            return works;
        }
        false
    })
}

/// Compares a handful of random products with [`Soft`], one and two tiles at a time.
///
/// # Safety
/// The processor has the unit.
unsafe fn agrees<T: Tiles>() -> bool {
    let mut state = 0x9e37_79b9_7f4a_7c15u64;
    let mut byte = || {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 56) as u8
    };
    let mut good = true;
    for round in 0..16 {
        let blank = ActBlock::ZERO;
        let mut a = [[blank; TILE_ROWS]; 2];
        // Extremes first: full codes and largest activations.
        for q in a.iter_mut().flatten().flat_map(|block| &mut block.q) {
            *q = if round == 0 { -127 } else { (byte() as i8).max(-127) };
        }
        let mut codes = [0u8; CODE_BYTES];
        codes.iter_mut().for_each(|code| *code = if round == 0 { 255 } else { byte() });
        let (mut got, mut want) = ([0i32; 2 * TILE_SUMS], [1i32; 2 * TILE_SUMS]);
        // SAFETY: all buffers have the sizes that products take.
        unsafe {
            let (mut unit, mut soft) = (T::enter(), Soft::enter());
            let tiles = [a[0].as_ptr(), a[1].as_ptr()];
            unit.products(tiles, codes.as_ptr(), got.as_mut_ptr());
            soft.products(tiles, codes.as_ptr(), want.as_mut_ptr());
            good &= got == want;
            unit.products([tiles[1]], codes.as_ptr(), got.as_mut_ptr());
            good &= got[..TILE_SUMS] == want[TILE_SUMS..];
            unit.leave();
            soft.leave();
        }
    }
    good
}

#[cfg(test)]
mod tests;
