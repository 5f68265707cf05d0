//! Quantised weights times int8 activations, with the integers from tiles.

use super::{CODE_BYTES, TILE_ROWS, TILE_SUMS, Tiles};
use crate::activations::ActBlock;
use crate::lanes::{Kernel, LANES, Lanes};
use crate::linear::{
    Input, Job, Panels, ROW_CHUNK, codes, fast_tile, finish, has_minimum, offset_term, scale_min,
};
use crate::weight::{Format, Scales};
use std::marker::PhantomData;

/// Walks panels over chunks of rows: tiles of rows in pairs, and what is left of them in lanes. For
/// all forms but [`Scales::Halves`], whose blocks have two scales.
pub(crate) struct TileFast<F, T> {
    pub job: Job,
    pub input: Input,
    pub panels: Panels,
    pub form: PhantomData<(F, T)>,
}

impl<F: Format, T: Tiles> Kernel for TileFast<F, T> {
    /// # Safety
    /// As [`crate::linear`]'s kernels, on a processor that has the unit.
    #[inline(always)]
    unsafe fn run<L: Lanes>(self) {
        let Self { job, input, panels, .. } = self;
        // SAFETY: `panel` and the rows of each tile exist; the unit is there.
        unsafe {
            let mut unit = T::enter();
            for start in (0..input.rows).step_by(ROW_CHUNK) {
                let end = input.rows.min(start + ROW_CHUNK);
                for panel in panels.clone() {
                    let mut row = start;
                    while end - row >= 2 * TILE_ROWS {
                        tiles::<L, F, T, 2>(&mut unit, &job, &input, panel, row);
                        row += 2 * TILE_ROWS;
                    }
                    if end - row >= TILE_ROWS {
                        tiles::<L, F, T, 1>(&mut unit, &job, &input, panel, row);
                        row += TILE_ROWS;
                    }
                    if end - row >= 4 {
                        fast_tile::<L, F, 4>(&job, &input, panel, row);
                        row += 4;
                    }
                    if end - row >= 2 {
                        fast_tile::<L, F, 2>(&job, &input, panel, row);
                        row += 2;
                    }
                    if end > row {
                        fast_tile::<L, F, 1>(&job, &input, panel, row);
                    }
                }
            }
            unit.leave();
        }
    }
}

/// A block's codes, one a byte.
#[repr(align(64))]
struct Codes([u8; CODE_BYTES]);

/// Sums of two tiles.
#[repr(align(64))]
struct Sums([i32; 2 * TILE_SUMS]);

/// One panel over `N` tiles of rows.
///
/// # Safety
/// As [`TileFast::run`]; the rows from `row` on are `N` whole tiles of the quantised input.
#[inline(always)]
unsafe fn tiles<L: Lanes, F: Format, T: Tiles, const N: usize>(
    unit: &mut T,
    job: &Job,
    input: &Input,
    panel: usize,
    row: usize,
) {
    let l = &job.layout;
    let mut acc = [[L::splat(0.0); TILE_ROWS]; N];
    let (mut wide, mut sums) = (Codes([0; CODE_BYTES]), Sums([0; 2 * TILE_SUMS]));
    // SAFETY: the panel, its blocks and the tiles' activations exist.
    unsafe {
        let base = job.weight.add(panel * l.panel);
        for b in 0..l.blocks {
            let packed = base.add(l.place::<F>(b).codes);
            let code_bytes = match F::NIBBLES {
                true => {
                    for (g, w) in codes::<L, F>(packed).into_iter().enumerate() {
                        L::i_store(w, wide.0.as_mut_ptr().add(g * 64));
                    }
                    wide.0.as_ptr()
                }
                false => packed,
            };
            let a: [*const ActBlock; N] = std::array::from_fn(|n| {
                input.acts.add((row + n * TILE_ROWS) * l.blocks + b * TILE_ROWS)
            });
            unit.products(a, code_bytes, sums.0.as_mut_ptr());
            let (scale, min) = scale_min::<L, F>(l, base, b);
            for n in 0..N {
                for (t, acc) in acc[n].iter_mut().enumerate() {
                    let block = &*a[n].add(t);
                    let sum = sums.0.as_ptr().add(n * TILE_SUMS + t * LANES);
                    let dot = L::i_add(L::i_load(sum.cast()), L::i_splat(offset_term::<F>(block)));
                    let dot = L::to_f32(dot);
                    *acc = scale.mul(L::splat(block.d)).fma(dot, *acc);
                    if has_minimum::<F>() {
                        *acc = min.fma(L::splat(block.sum), *acc);
                    }
                }
            }
        }
        for (n, acc) in acc.into_iter().enumerate() {
            finish(job, panel, row + n * TILE_ROWS, acc);
        }
    }
}

/// Whether blocks of a form are products of 32 columns under one scale.
pub(crate) fn whole_blocks<F: Format>() -> bool {
    !matches!(F::SCALES, Scales::Halves)
}
