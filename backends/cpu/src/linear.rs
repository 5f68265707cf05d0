//! Matrix products: `out[row][n] = sum over k of x[row][k] * weight[n][k] (+ bias[n])`.
//!
//! One lane computes one output element, and a kernel walks a panel of 16 output rows over a tile
//! of 1, 2, 4 or 8 input rows. What a lane does never depends on the tile:
//!
//! - fast, quantised: per block `acc = fma(dw * dx, idot, acc)`, then with a minimum
//!   `acc = fma(m, dx * sum(q), acc)`; `idot` is an exact integer below 2^24 (for 16-wide scales
//!   `sc0 * idot0 + sc1 * idot1`);
//! - exact, and plain floats: `acc = fma(w[k], x[k], acc)`, `k` ascending, `w[k]` dequantised.
//!
//! A bias is added last, and where a product is to be added to what is there, the sum is one addition.

// Indices run over several register arrays at once, whose loops the compiler unrolls.
#![allow(clippy::needless_range_loop)]

use crate::activations::{ActBlock, GateQuantise, Quantise, tile, tile_count};
use crate::backend::CpuBackend;
use crate::element::{BF16, Element, F16, F32};
#[cfg(target_arch = "x86_64")]
use crate::lanes::dispatch_wide;
use crate::lanes::{Codes, Kernel, LANES, Lanes, dispatch, prefetch};
use crate::memory::Buf;
use crate::path::Path;
use crate::pool::Pool;
use crate::tensor::CpuTensor;
use crate::tiles::{TILE_ROWS, TileFast, Unit, whole_blocks};
use crate::weight::{CpuWeight, Form, Format, Layout, Scales, format};
use dunlin_backend::{Activation, BackendError, LinearPart, Precision};
use std::marker::PhantomData;

/// Multiply-adds below which an op is not worth waking another thread.
const INLINE_WORK: usize = 50_000;

/// Activations below which one thread quantises alone.
const INLINE_QUANTISED: usize = 8_192;

/// Input rows that a task keeps in the second-level cache while it walks its panels.
pub(crate) const ROW_CHUNK: usize = 64;

/// Weights that one call may fuse; more are taken in several goes.
const MOST_JOBS: usize = 8;

/// One weight over all input rows.
#[derive(Clone, Copy)]
pub(crate) struct Job {
    pub weight: *const u8,
    pub layout: Layout,
    panels: usize,
    out: *mut f32,
    out_stride: usize,
    /// One padded row, or null.
    bias: *const f32,
    add: bool,
}

/// The input rows, in the forms that the weights need.
#[derive(Clone, Copy)]
pub(crate) struct Input {
    x: *const f32,
    stride: usize,
    pub rows: usize,
    /// Null in exact mode and where no weight is quantised.
    pub acts: *const ActBlock,
}

/// One weight of [`linear`], with its output.
pub(crate) struct Product<'a> {
    pub weight: &'a CpuWeight,
    pub bias: Option<&'a CpuTensor>,
    pub out: &'a mut CpuTensor,
    /// Add to what is in `out`.
    pub add: bool,
}

/// A norm over whole rows before a product: weight and epsilon.
pub(crate) type RowNorm<'a> = Option<(&'a [f32], f32)>;

impl Input {
    /// Plain rows; quantised ones where `acts` is not null.
    pub fn of(x: &CpuTensor, acts: *const ActBlock) -> Self {
        Self { x: x.data.as_ptr(), stride: x.stride, rows: x.rows, acts }
    }

    /// Quantised rows alone, for products of quantised weights in fast mode.
    pub fn quantised(rows: usize, acts: *const ActBlock) -> Self {
        Self { x: std::ptr::null(), stride: 0, rows, acts }
    }

    /// `rows` rows from `start` on, which is the first of a tile; a row has `blocks` blocks.
    fn part(&self, start: usize, rows: usize, blocks: usize) -> Self {
        let (x, stride) = (self.x.wrapping_add(start * self.stride), self.stride);
        Self { x, stride, rows, acts: self.acts.wrapping_add(start * blocks) }
    }
}

impl<'a> Product<'a> {
    pub fn of(p: &'a mut LinearPart<'_, CpuBackend>) -> Self {
        Self { weight: p.weight, bias: p.bias, out: &mut *p.out, add: false }
    }
}

impl Job {
    fn of(p: Product<'_>) -> Self {
        Self {
            weight: p.weight.data.as_ptr(),
            layout: p.weight.layout,
            panels: p.weight.panels(),
            out: p.out.data.as_mut_ptr(),
            out_stride: p.out.stride,
            bias: p.bias.map_or(std::ptr::null(), |b| b.data.as_ptr()),
            add: p.add,
        }
    }
}

/// What the ops of a backend share.
pub(crate) struct Context<'a> {
    pub path: Path,
    pub precision: Precision,
    /// What multiplies tiles, where something does.
    pub tiles: Option<Unit>,
    pub pool: &'a mut Pool,
    pub acts: &'a mut Buf<ActBlock>,
}

/// Computes all products over `x`. Shapes were checked: every weight has `x.cols` columns, every
/// output `x.rows` rows of the weight's row count, every bias one row as long. `quantised` says
/// whether any weight is.
pub(crate) fn linear<'a>(
    cx: &mut Context<'_>,
    x: &CpuTensor,
    quantised: bool,
    products: impl Iterator<Item = Product<'a>>,
) -> Result<(), BackendError> {
    if x.rows == 0 {
        return Ok(());
    }
    let mut acts = std::ptr::null();
    if quantised && cx.precision == Precision::Fast {
        acts = quantise(cx, x, None)?;
    }
    multiply(cx, Input::of(x, acts), x.cols, products);
    Ok(())
}

/// [`linear`] over rows that are there in the forms that the weights need, of `cols` columns.
pub(crate) fn multiply<'a>(
    cx: &mut Context<'_>,
    input: Input,
    cols: usize,
    products: impl Iterator<Item = Product<'a>>,
) {
    let mut jobs: [Option<Job>; MOST_JOBS] = [None; MOST_JOBS];
    let mut count = 0;
    for p in products {
        jobs[count] = Some(Job::of(p));
        count += 1;
        if count == MOST_JOBS {
            run_jobs(cx, input, cols, &jobs[..count]);
            count = 0;
        }
    }
    run_jobs(cx, input, cols, &jobs[..count]);
}

/// Quantises all rows, or their norms, into the context's scratch, tile by tile.
pub(crate) fn quantise(
    cx: &mut Context<'_>,
    x: &CpuTensor,
    norm: RowNorm<'_>,
) -> Result<*const ActBlock, BackendError> {
    let blocks = x.cols / 32;
    cx.acts.ensure(x.rows * blocks, "quantised activations")?;
    let (path, out) = (cx.path, Shared(cx.acts.as_mut_ptr()));
    let one_tile = |index: usize| {
        let (first, width) = tile(index, x.rows);
        let kernel = Quantise {
            // SAFETY: row `first` is one of the tensor's rows.
            x: unsafe { x.data.as_ptr().add(first * x.stride) },
            stride: x.stride,
            blocks,
            width,
            // SAFETY: the scratch has room for `rows * blocks`; tiles are disjoint.
            out: unsafe { out.at(first * blocks) },
            norm,
        };
        // SAFETY: the path was checked; the kernel stays within its tile of both buffers.
        unsafe { dispatch(path, kernel) }
    };
    if x.rows * x.cols < INLINE_QUANTISED {
        (0..tile_count(x.rows)).for_each(one_tile);
    } else {
        cx.pool.run(tile_count(x.rows), &one_tile);
    }
    Ok(cx.acts.as_ptr())
}

/// `activation(gate) * up` of quantised rows of `cols` columns, quantised into `out`: block `b` of a
/// row are columns `32 b ..` of it. The tensors of both products are scratch; both weights are
/// quantised and have as many rows, a multiple of 32.
pub(crate) fn gate_up(
    cx: &mut Context<'_>,
    input: Input,
    cols: usize,
    [gate, up]: [Product<'_>; 2],
    activation: Activation,
    out: &mut Buf<ActBlock>,
) -> Result<(), BackendError> {
    let (blocks, all) = (cols / 32, gate.out.cols / 32);
    out.ensure(input.rows * all, "quantised activations")?;
    let group = all.div_ceil(cx.pool.threads() * 8).clamp(1, 8);
    let tasks = all.div_ceil(group);
    let work = 2 * all * 32 * cols * input.rows;
    let (path, precision) = (cx.path, cx.precision);
    let tiles = cx.tiles.filter(|_| input.rows >= TILE_ROWS);
    let shared = SharedJobs { input, jobs: [Job::of(gate), Job::of(up)], out: out.as_mut_ptr() };
    let task = |index: usize| {
        let SharedJobs { input, jobs, out } = shared.get();
        let part = index * group..all.min((index + 1) * group);
        // Weights of up lie elsewhere than those of gate, which the processor does not foresee.
        let ahead = jobs[1].weight.wrapping_add(2 * part.start * jobs[1].layout.panel);
        (0..16).for_each(|line| prefetch(ahead.wrapping_add(line * 64)));
        for start in (0..input.rows).step_by(ROW_CHUNK) {
            let rows = ROW_CHUNK.min(input.rows - start);
            let chunk = input.part(start, rows, blocks);
            // The columns of this task side by side, over those of the chunk before: so they stay in
            // this core's cache.
            let (first, stride) = (part.start * 32 * ROW_CHUNK.min(input.rows), part.len() * 32);
            let [gate, up] = jobs.map(|job| {
                let room = job.out.wrapping_add(first);
                let out = room.wrapping_sub(part.start * 32);
                let job = Job { out, out_stride: stride, ..job };
                run_panels((path, precision, tiles), job, chunk, 2 * part.start..2 * part.end);
                room
            });
            let kernel = GateQuantise {
                gate,
                up,
                stride,
                rows,
                activation,
                blocks: part.clone(),
                all,
                out: out.wrapping_add(start * all),
            };
            // SAFETY: the path was checked; this task alone uses this room of the tensors, which have
            // at least `rows * all * 32` floats, and these of the `rows * all` blocks.
            unsafe { dispatch(path, kernel) };
        }
    };
    if work < INLINE_WORK {
        (0..tasks).for_each(task)
    } else {
        cx.pool.run(tasks, &task)
    }
    Ok(())
}

/// What the tasks of [`gate_up`] share.
#[derive(Clone, Copy)]
struct SharedJobs {
    input: Input,
    jobs: [Job; 2],
    out: *mut ActBlock,
}

// SAFETY: tasks read the input and the weights, and write disjoint columns and blocks.
unsafe impl Sync for SharedJobs {}

impl SharedJobs {
    fn get(&self) -> Self {
        *self
    }
}

#[derive(Clone, Copy)]
struct Shared<T>(*mut T);
// SAFETY: tasks use disjoint ranges.
unsafe impl<T> Sync for Shared<T> {}
impl<T> Shared<T> {
    /// # Safety
    /// `offset` lies within the buffer.
    unsafe fn at(&self, offset: usize) -> *mut T {
        // SAFETY: the caller's promise.
        unsafe { self.0.add(offset) }
    }
}

/// What the tasks of one go share.
struct Plan<'a> {
    input: Input,
    jobs: &'a [Option<Job>],
    /// Panels in a task.
    group: usize,
    tiles: Option<Unit>,
}

// SAFETY: tasks read the input and the weights, and write disjoint panels of the outputs.
unsafe impl Sync for Plan<'_> {}

fn run_jobs(cx: &mut Context<'_>, input: Input, cols: usize, jobs: &[Option<Job>]) {
    let panels: usize = jobs.iter().flatten().map(|j| j.panels).sum();
    let group = panels.div_ceil(cx.pool.threads() * 8).clamp(1, 16);
    let tasks: usize = jobs.iter().flatten().map(|j| j.panels.div_ceil(group)).sum();
    let (path, precision) = (cx.path, cx.precision);
    // Fewer rows than a tile has are as fast in lanes.
    let tiles = cx.tiles.filter(|_| input.rows >= TILE_ROWS);
    let plan = Plan { input, jobs, group, tiles };
    let task = |index: usize| plan.task(path, precision, index);
    if panels * LANES * cols * input.rows < INLINE_WORK {
        (0..tasks).for_each(task);
    } else {
        cx.pool.run(tasks, &task);
    }
}

impl Plan<'_> {
    /// Finds the panels of task `index` and runs the kernel of their form over them.
    fn task(&self, path: Path, precision: Precision, mut index: usize) {
        for job in self.jobs.iter().flatten() {
            let tasks = job.panels.div_ceil(self.group);
            if index >= tasks {
                index -= tasks;
                continue;
            }
            let first = index * self.group;
            let panels = first..job.panels.min(first + self.group);
            return run_panels((path, precision, self.tiles), *job, self.input, panels);
        }
    }
}

/// Runs the kernel of the job's form over some of its panels.
fn run_panels(how: (Path, Precision, Option<Unit>), job: Job, input: Input, panels: Panels) {
    let (path, precision, tiles) = how;
    macro_rules! run {
        ($kernel:ident<$f:ty>) => {{
            let form = PhantomData::<$f>;
            // SAFETY: the path was checked, and shapes by the caller of `linear`.
            unsafe { dispatch(path, $kernel { job, input, panels, form }) }
        }};
    }
    macro_rules! quantised {
        ($f:ident) => {
            match (precision, tiles.filter(|_| whole_blocks::<format::$f>())) {
                #[cfg(target_arch = "x86_64")]
                (Precision::Fast, Some(Unit::Amx)) => {
                    let form = PhantomData::<(format::$f, crate::tiles::amx::Amx)>;
                    // SAFETY: as above; where there is AMX there is AVX-512, and both were found
                    // when the backend was made.
                    unsafe { dispatch_wide(TileFast { job, input, panels, form }) }
                }
                #[cfg(test)]
                (Precision::Fast, Some(Unit::Soft)) => {
                    let form = PhantomData::<(format::$f, crate::tiles::Soft)>;
                    let kernel = TileFast { job, input, panels, form };
                    // SAFETY: as above. Two kinds of lanes will do.
                    unsafe {
                        match path {
                            #[cfg(target_arch = "x86_64")]
                            Path::Avx512 => dispatch_wide(kernel),
                            _ => kernel.run::<crate::lanes::Scalar>(),
                        }
                    }
                }
                (Precision::Fast, _) => run!(Fast<format::$f>),
                (Precision::Exact, _) => run!(Exact<format::$f>),
            }
        };
    }
    match job.layout.form {
        Form::Q4_0 => quantised!(Q4_0),
        Form::Q4_1 => quantised!(Q4_1),
        Form::Q4K => quantised!(Q4K),
        Form::Q8_0 => quantised!(Q8_0),
        Form::Q5_0 => quantised!(Q5_0),
        Form::Q5_1 => quantised!(Q5_1),
        Form::Q5K => quantised!(Q5K),
        Form::Q6K => quantised!(Q6K),
        Form::F32 => run!(Float<F32>),
        Form::F16 => run!(Float<F16>),
        Form::BF16 => run!(Float<BF16>),
    }
}

pub(crate) type Panels = std::ops::Range<usize>;

/// Defines a kernel that walks panels over chunks of rows, in tiles of the given widths.
macro_rules! panel_kernel {
    ($(#[$doc:meta])* $name:ident<$bound:ident>, $tile:ident, [$($width:literal),*]) => {
        $(#[$doc])*
        struct $name<F> {
            job: Job,
            input: Input,
            panels: Panels,
            form: PhantomData<F>,
        }

        impl<F: $bound> Kernel for $name<F> {
            /// # Safety
            /// The pointers of job and input are valid for the shapes they state.
            #[inline(always)]
            unsafe fn run<L: Lanes>(self) {
                let mut start = 0;
                while start < self.input.rows {
                    let end = self.input.rows.min(start + ROW_CHUNK);
                    for panel in self.panels.clone() {
                        let mut row = start;
                        while row < end {
                            // SAFETY: `panel` and the rows of the tile exist.
                            unsafe {
                                $(if end - row >= $width {
                                    $tile::<L, F, $width>(&self.job, &self.input, panel, row);
                                    row += $width;
                                    continue;
                                })*
                            }
                        }
                    }
                    start = end;
                }
            }
        }
    };
}

panel_kernel! {
    /// Quantised weights times int8 activations.
    Fast<Format>, fast_tile, [8, 4, 2, 1]
}
panel_kernel! {
    /// Dequantised weights times float32 activations.
    Exact<Format>, exact_tile, [4, 1]
}
panel_kernel! {
    /// Plain float weights times float32 activations.
    Float<Element>, float_tile, [8, 4, 1]
}

/// Adds the bias, and what is there where that is asked, and stores the rows of a finished tile.
///
/// # Safety
/// As the kernels; rows `row..row + T` and panel `panel` exist.
#[inline(always)]
pub(crate) unsafe fn finish<L: Lanes, const T: usize>(
    job: &Job,
    panel: usize,
    row: usize,
    acc: [L; T],
) {
    // SAFETY: output rows and the bias row are padded to whole vectors.
    unsafe {
        for (t, mut v) in acc.into_iter().enumerate() {
            if !job.bias.is_null() {
                v = v.add(L::load(job.bias.add(panel * LANES)));
            }
            let out = job.out.add((row + t) * job.out_stride + panel * LANES);
            if job.add {
                v = L::load(out).add(v);
            }
            v.store(out);
        }
    }
}

/// Scale (of the block, or of the superblock for [`Scales::Halves`]) and minimum of 16 rows.
///
/// # Safety
/// `panel` points to a panel of this layout, which has block `b`.
#[inline(always)]
pub(crate) unsafe fn scale_min<L: Lanes, F: Format>(
    l: &Layout,
    panel: *const u8,
    b: usize,
) -> (L, L) {
    // SAFETY: scales and supers of block `b` lie within the panel.
    unsafe {
        let place = l.place::<F>(b);
        let (scale, supers) = (panel.add(place.scales), panel.add(place.supers));
        match F::SCALES {
            Scales::Half => (L::load_f16(scale), L::splat(-0.0)),
            Scales::HalfMin => (L::load_f16(scale), L::load_f16(scale.add(32))),
            Scales::Super => {
                let sc = L::to_f32(L::i_load_u8(scale));
                let m = L::to_f32(L::i_load_u8(scale.add(16)));
                let min = L::load_f16(supers.add(32)).mul(m).neg();
                (L::load_f16(supers).mul(sc), min)
            }
            Scales::Halves => (L::load_f16(supers), L::splat(-0.0)),
        }
    }
}

/// The 32 codes of 16 rows: register `g` holds columns `4g..4g + 4`.
///
/// # Safety
/// `p` points to the codes of one block.
#[inline(always)]
pub(crate) unsafe fn codes<L: Lanes, F: Format>(p: *const u8) -> [L::I; 8] {
    // SAFETY: a block has `CODE_BYTES / 64` groups of 64 bytes.
    unsafe {
        if F::NIBBLES {
            let g =
                [L::i_load(p), L::i_load(p.add(64)), L::i_load(p.add(128)), L::i_load(p.add(192))];
            [
                L::low_nibbles(g[0]),
                L::low_nibbles(g[1]),
                L::low_nibbles(g[2]),
                L::low_nibbles(g[3]),
                L::high_nibbles(g[0]),
                L::high_nibbles(g[1]),
                L::high_nibbles(g[2]),
                L::high_nibbles(g[3]),
            ]
        } else {
            [
                L::i_load(p),
                L::i_load(p.add(64)),
                L::i_load(p.add(128)),
                L::i_load(p.add(192)),
                L::i_load(p.add(256)),
                L::i_load(p.add(320)),
                L::i_load(p.add(384)),
                L::i_load(p.add(448)),
            ]
        }
    }
}

/// # Safety
/// As the kernels; rows `row..row + T` are one tile of the quantised input.
#[inline(always)]
pub(crate) unsafe fn fast_tile<L: Lanes, F: Format, const T: usize>(
    job: &Job,
    input: &Input,
    panel: usize,
    row: usize,
) {
    let l = &job.layout;
    let mut acc = [L::splat(0.0); T];
    // SAFETY: the panel, its blocks and the tile's activations exist.
    unsafe {
        let base = job.weight.add(panel * l.panel);
        let mut acts = input.acts.add(row * l.blocks);
        // The first tile of a chunk asks for the next panel, which comes behind this one.
        let ahead = if row.is_multiple_of(ROW_CHUNK) { l.panel } else { 0 };
        for b in 0..l.blocks {
            if T > 1 {
                let bytes = F::CODE_BYTES + F::SCALE_BYTES;
                let next = base.wrapping_add(ahead + l.first + b * bytes);
                for line in 0..bytes.div_ceil(64) {
                    prefetch(next.wrapping_add(line * 64));
                }
            }
            let w = codes::<L, F>(base.add(l.place::<F>(b).codes));
            let (scale, min) = scale_min::<L, F>(l, base, b);
            for t in 0..T {
                let a = &*acts.add(t);
                let dot = L::to_f32(block_dot::<L, F, T>(l, base, b, &w, a));
                acc[t] = scale.mul(L::splat(a.d)).fma(dot, acc[t]);
                if has_minimum::<F>() {
                    acc[t] = min.fma(L::splat(a.sum), acc[t]);
                }
            }
            acts = acts.add(T);
        }
        finish(job, panel, row, acc);
    }
}

/// Whether blocks of a form have a minimum.
pub(crate) const fn has_minimum<F: Format>() -> bool {
    matches!(F::SCALES, Scales::HalfMin | Scales::Super)
}

/// What the offset of a form's codes adds to the sum over a block.
#[inline(always)]
pub(crate) fn offset_term<F: Format>(a: &ActBlock) -> i32 {
    match F::OFFSET {
        8 => a.minus8,
        16 => a.minus16,
        128 => a.minus128,
        _ => 0,
    }
}

/// The exact integer that a block contributes before its scales.
///
/// # Safety
/// As [`fast_tile`].
#[inline(always)]
unsafe fn block_dot<L: Lanes, F: Format, const T: usize>(
    l: &Layout,
    panel: *const u8,
    b: usize,
    w: &[L::I; 8],
    a: &ActBlock,
) -> L::I {
    let q = a.q.as_ptr();
    let chains = if T >= 4 { 1 } else { 2 };
    // SAFETY: a block has 32 activations and two rows of 16 int8 scales.
    unsafe {
        if matches!(F::SCALES, Scales::Halves) {
            let scale = panel.add(l.place::<F>(b).scales);
            let [w0, w1, w2, w3, w4, w5, w6, w7] = *w;
            let low = L::dot(F::CODES, chains, &[w0, w1, w2, w3], q, a.minus32[0]);
            let high = L::dot(F::CODES, chains, &[w4, w5, w6, w7], q.add(16), a.minus32[1]);
            let low = L::i_mul(low, L::i_load_i8(scale));
            return L::i_add(low, L::i_mul(high, L::i_load_i8(scale.add(16))));
        }
        let subtracted = L::SIGNED_BYTES && matches!(F::CODES, Codes::Byte);
        let bias = if subtracted { 0 } else { offset_term::<F>(a) };
        L::dot(F::CODES, chains, w, q, bias)
    }
}

/// # Safety
/// As the kernels; rows `row..row + T` exist.
#[inline(always)]
unsafe fn exact_tile<L: Lanes, F: Format, const T: usize>(
    job: &Job,
    input: &Input,
    panel: usize,
    row: usize,
) {
    let l = &job.layout;
    let mut acc = [L::splat(0.0); T];
    let offset = L::i_splat(-F::OFFSET);
    // SAFETY: the panel, its blocks and the rows' 32 columns per block exist.
    unsafe {
        let base = job.weight.add(panel * l.panel);
        let x = input.x.add(row * input.stride);
        for b in 0..l.blocks {
            let w = codes::<L, F>(base.add(l.place::<F>(b).codes));
            let (scale, min) = scale_min::<L, F>(l, base, b);
            let mut scales = [scale, scale];
            if matches!(F::SCALES, Scales::Halves) {
                let sc = base.add(l.place::<F>(b).scales);
                scales = [
                    scale.mul(L::to_f32(L::i_load_i8(sc))),
                    scale.mul(L::to_f32(L::i_load_i8(sc.add(16)))),
                ];
            }
            for (g, w) in w.into_iter().enumerate() {
                macro_rules! column {
                    ($j:literal) => {
                        let code = L::to_f32(L::i_add(L::byte::<$j>(w), offset));
                        // The product is exact, so this is `scale * code + min` of `quant.rs`.
                        let value = scales[g / 4].fma(code, min);
                        for t in 0..T {
                            let x = *x.add(t * input.stride + b * 32 + g * 4 + $j);
                            acc[t] = value.fma(L::splat(x), acc[t]);
                        }
                    };
                }
                column!(0);
                column!(1);
                column!(2);
                column!(3);
            }
        }
        finish(job, panel, row, acc);
    }
}

/// # Safety
/// As the kernels; rows `row..row + T` exist.
#[inline(always)]
unsafe fn float_tile<L: Lanes, E: Element, const T: usize>(
    job: &Job,
    input: &Input,
    panel: usize,
    row: usize,
) {
    let mut acc = [L::splat(0.0); T];
    // SAFETY: the panel's columns and the rows' exist.
    unsafe {
        let base = job.weight.add(panel * job.layout.panel);
        let x = input.x.add(row * input.stride);
        for k in 0..job.layout.blocks {
            let w = E::load::<L>(base.add(k * LANES * E::BYTES));
            for t in 0..T {
                acc[t] = w.fma(L::splat(*x.add(t * input.stride + k)), acc[t]);
            }
        }
        finish(job, panel, row, acc);
    }
}
