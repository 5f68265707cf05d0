//! The [`Backend`] trait over this crate's kernels: checks shapes, splits rows among threads.

use crate::activations::ActBlock;
use crate::attention::Task;
use crate::experts;
use crate::fused::check_parts;
use crate::kv::CpuKv;
use crate::lanes::{Kernel, LANES, dispatch};
use crate::linear::{Context, Product, linear};
use crate::memory::{Arena, Buf, free_bytes, total_bytes};
use crate::pool::Pool;
use crate::rope::{Rotate, Tables};
use crate::rowops::{Add, Gated, RmsNorm};
use crate::tensor::{CpuTensor, same, shape};
use crate::tiles::Unit;
use crate::weight::CpuWeight;
use crate::{CpuError, Path, rope};
use dunlin_backend::{
    Activation, AttentionParams, Backend, BackendError, DeviceInfo, Experts, FeedForward,
    FeedForwardRoom, HostTensor, KvDtype, KvSpec, LinearPart, Norm, Part, Precision, Rope, Samples,
    SeqRows, Want, checksum, draw,
};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// How to make a [`CpuBackend`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CpuOptions {
    /// Threads that compute, the calling one included; at least 1.
    pub threads: usize,
    pub precision: Precision,
    /// What KV stores hold; `None`: float16 in fast mode, float32 in exact mode.
    pub kv: Option<KvDtype>,
    /// `None`: what the environment variable `DUNLIN_CPU` says, else the fastest there is.
    pub path: Option<Path>,
}

impl Default for CpuOptions {
    /// All processors, fast, fastest path.
    fn default() -> Self {
        Self {
            threads: std::thread::available_parallelism().map_or(1, |n| n.get()),
            precision: Precision::Fast,
            kv: None,
            path: None,
        }
    }
}

impl CpuOptions {
    /// The type of KV stores that these options ask for.
    pub fn kv_dtype(&self) -> KvDtype {
        self.kv.unwrap_or(self.precision.kv())
    }
}

/// A CPU as a device. Ops run at once, on the calling thread and the backend's own workers; calls
/// from several threads take turns. Any number of backends may live in a process.
pub struct CpuBackend {
    pub(crate) path: Path,
    pub(crate) precision: Precision,
    kv: KvDtype,
    tiles: Option<Unit>,
    threads: usize,
    inner: Mutex<Inner>,
}

/// What one op at a time uses.
pub(crate) struct Inner {
    pub pool: Pool,
    arena: Arena,
    pub acts: Buf<ActBlock>,
    /// What a feed-forward block has between its products.
    pub gated: Buf<ActBlock>,
    pub ropes: Tables,
    pub tasks: Vec<Task>,
    experts: experts::Scratch,
}

/// Elements below which a row op stays on the calling thread.
pub(crate) const INLINE_ELEMENTS: usize = 8_192;

impl CpuBackend {
    /// Starts the worker threads.
    pub fn new(options: CpuOptions) -> Result<Self, CpuError> {
        let path = Path::choose(options.path)?;
        let pool = Pool::new(options.threads)?;
        Ok(Self {
            path,
            precision: options.precision,
            kv: options.kv_dtype(),
            tiles: (path == Path::Amx).then_some(Unit::Amx),
            threads: options.threads,
            inner: Mutex::new(Inner {
                pool,
                arena: Arena::default(),
                acts: Buf::empty(),
                gated: Buf::empty(),
                ropes: Tables::default(),
                tasks: Vec::new(),
                experts: experts::Scratch::default(),
            }),
        })
    }

    #[cfg(test)]
    pub(crate) fn with_tiles(self, tiles: Option<Unit>) -> Self {
        Self { tiles, ..self }
    }

    /// The instruction path in use.
    pub fn path(&self) -> Path {
        self.path
    }

    pub fn precision(&self) -> Precision {
        self.precision
    }

    /// A panic in an op leaves only scratch behind, so a poisoned lock is as good as any.
    pub(crate) fn inner(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Runs one kernel per row, on all threads where there is enough to do.
    fn each_row<K: Kernel>(&self, rows: usize, cols: usize, kernel: impl Fn(usize) -> K + Sync) {
        // SAFETY: the path was checked in `new`; the kernel touches its own row.
        let one = |row: usize| unsafe { dispatch(self.path, kernel(row)) };
        if rows * cols < INLINE_ELEMENTS {
            (0..rows).for_each(one);
            return;
        }
        let mut inner = self.inner();
        let group = rows.div_ceil(4 * inner.pool.threads());
        inner.pool.run(rows.div_ceil(group), &|task| {
            (task * group..rows.min((task + 1) * group)).for_each(one);
        });
    }

    fn norm(
        &self,
        x: Rows,
        out: RowsMut,
        weight: &CpuTensor,
        eps: f32,
        segment: usize,
    ) -> Result<(), BackendError> {
        const OP: &str = "rms_norm";
        same(OP, "columns of the weight", weight.cols, segment)?;
        if weight.rows == 0 || segment == 0 || !x.cols.is_multiple_of(segment) {
            return Err(shape(OP, format!("{} columns in segments of {segment}", x.cols)));
        }
        self.each_row(x.rows, x.cols, |row| RmsNorm {
            x: x.at(row),
            out: out.at(row),
            weight: weight.row(0),
            segments: x.cols / segment,
            eps,
        });
        Ok(())
    }
}

/// Rows that tasks read.
#[derive(Clone, Copy)]
struct Rows {
    data: *const f32,
    stride: usize,
    rows: usize,
    cols: usize,
}

/// Tokens that tasks draw, each its own.
#[derive(Clone, Copy)]
struct Tokens(*mut Option<u32>);

// SAFETY: each task writes a token of its own.
unsafe impl Sync for Tokens {}

impl Tokens {
    fn at(&self, i: usize) -> *mut Option<u32> {
        self.0.wrapping_add(i)
    }
}

/// Rows that tasks write, each its own.
#[derive(Clone, Copy)]
pub(crate) struct RowsMut {
    data: *mut f32,
    stride: usize,
}

// SAFETY: tasks only read.
unsafe impl Sync for Rows {}
// SAFETY: each task writes rows of its own.
unsafe impl Sync for RowsMut {}

impl Rows {
    fn of(t: &CpuTensor) -> Self {
        Self { data: t.data.as_ptr(), stride: t.stride, rows: t.rows, cols: t.cols }
    }
    fn at(&self, row: usize) -> *const f32 {
        self.data.wrapping_add(row * self.stride)
    }
}

impl RowsMut {
    pub fn of(t: &mut CpuTensor) -> Self {
        Self { data: t.data.as_mut_ptr(), stride: t.stride }
    }
    pub fn at(&self, row: usize) -> *mut f32 {
        self.data.wrapping_add(row * self.stride)
    }
}

impl Backend for CpuBackend {
    type Tensor = CpuTensor;
    type Weight = CpuWeight;
    type Kv = CpuKv;

    fn info(&self) -> DeviceInfo {
        let threads = self.threads;
        DeviceInfo {
            id: "cpu".into(),
            description: format!("{}, {} path, {threads} threads", processor(), self.path.name()),
            total_bytes: total_bytes(),
            free_bytes: free_bytes(),
        }
    }

    fn weight(&self, t: &HostTensor, part: &Part) -> Result<CpuWeight, BackendError> {
        let Inner { arena, pool, .. } = &mut *self.inner();
        CpuWeight::pack(t, part, arena, pool)
    }

    fn weight_bytes(&self, w: &CpuWeight) -> u64 {
        w.data.len() as u64
    }

    fn tensor(&self, capacity: usize, cols: usize) -> Result<CpuTensor, BackendError> {
        CpuTensor::new(capacity, cols)
    }

    fn set_rows(&self, t: &mut CpuTensor, rows: usize) -> Result<(), BackendError> {
        t.set_rows("set_rows", rows)
    }

    fn kv_dtype(&self) -> KvDtype {
        self.kv
    }

    fn kv(&self, spec: &KvSpec) -> Result<CpuKv, BackendError> {
        CpuKv::new(spec, self.kv)
    }

    fn upload(&self, src: &[f32], dst: &mut CpuTensor) -> Result<(), BackendError> {
        const OP: &str = "upload";
        if dst.cols == 0 || !src.len().is_multiple_of(dst.cols) {
            return Err(shape(OP, format!("{} elements in rows of {}", src.len(), dst.cols)));
        }
        dst.set_rows(OP, src.len() / dst.cols)?;
        for (i, row) in src.chunks_exact(dst.cols).enumerate() {
            dst.row_mut(i).copy_from_slice(row);
        }
        Ok(())
    }

    fn download(&self, t: &CpuTensor, out: &mut Vec<f32>) -> Result<(), BackendError> {
        out.clear();
        out.reserve(t.rows * t.cols);
        for i in 0..t.rows {
            out.extend_from_slice(t.row(i));
        }
        Ok(())
    }

    fn embed(
        &self,
        table: &CpuWeight,
        ids: &[u32],
        scale: f32,
        out: &mut CpuTensor,
    ) -> Result<(), BackendError> {
        const OP: &str = "embed";
        same(OP, "columns of out", out.cols, table.cols)?;
        if let Some(id) = ids.iter().find(|id| **id as usize >= table.rows) {
            return Err(shape(OP, format!("token {id} is not in a table of {} rows", table.rows)));
        }
        out.set_rows(OP, ids.len())?;
        for (i, id) in ids.iter().enumerate() {
            table.row_into(*id as usize, scale, out.row_mut(i));
        }
        Ok(())
    }

    fn rms_norm(
        &self,
        x: &CpuTensor,
        weight: &CpuTensor,
        eps: f32,
        segment: usize,
        out: &mut CpuTensor,
    ) -> Result<(), BackendError> {
        same("rms_norm", "columns of out", out.cols, x.cols)?;
        out.set_rows("rms_norm", x.rows)?;
        self.norm(Rows::of(x), RowsMut::of(out), weight, eps, segment)
    }

    fn rms_norm_inplace(
        &self,
        x: &mut CpuTensor,
        weight: &CpuTensor,
        eps: f32,
        segment: usize,
    ) -> Result<(), BackendError> {
        let out = RowsMut::of(x);
        self.norm(Rows { data: out.data, ..Rows::of(x) }, out, weight, eps, segment)
    }

    fn add(&self, x: &mut CpuTensor, delta: &CpuTensor) -> Result<(), BackendError> {
        same("add", "rows of delta", delta.rows, x.rows)?;
        same("add", "columns of delta", delta.cols, x.cols)?;
        let (rows, cols, vectors) = (x.rows, x.cols, x.stride / LANES);
        let (x, delta) = (RowsMut::of(x), Rows::of(delta));
        self.each_row(rows, cols, |row| Add {
            x: x.at(row),
            delta: delta.at(row),
            factor: 1.0,
            vectors,
        });
        Ok(())
    }

    fn linear(
        &self,
        x: &CpuTensor,
        parts: &mut [LinearPart<'_, Self>],
    ) -> Result<(), BackendError> {
        let quantised = check_parts(x, parts)?;
        let products = parts.iter_mut().map(|p| Product::of(p));
        let inner = &mut *self.inner();
        linear(&mut self.context(&mut inner.pool, &mut inner.acts), x, quantised, products)
    }

    fn rope(&self, x: &mut CpuTensor, positions: &[u32], rope: &Rope) -> Result<(), BackendError> {
        rope::check(x, positions, rope)?;
        let Inner { ropes, pool, .. } = &mut *self.inner();
        let table = ropes.get(rope, positions);
        let (cols, style, data) = (x.cols, rope.style, RowsMut::of(x));
        let rotate = |row: usize, factors: &[f32]| {
            // SAFETY: row `row` of the tensor, which nobody else touches meanwhile.
            let row = unsafe { std::slice::from_raw_parts_mut(data.at(row), cols) };
            // SAFETY: the path was checked; `rope::check` found whole heads.
            unsafe { dispatch(self.path, Rotate { row, factors, style }) };
        };
        if let Some(kept) = table.kept(positions)
            && positions.len() * cols >= INLINE_ELEMENTS
        {
            let group = positions.len().div_ceil(4 * pool.threads());
            pool.run(positions.len().div_ceil(group), &|task| {
                let rows = task * group..positions.len().min((task + 1) * group);
                rows.for_each(|row| rotate(row, kept(positions[row])));
            });
            return Ok(());
        }
        for (row, position) in positions.iter().enumerate() {
            rotate(row, table.row(*position));
        }
        Ok(())
    }

    fn kv_write(
        &self,
        kv: &mut CpuKv,
        layer: usize,
        k: &CpuTensor,
        v: &CpuTensor,
        seqs: &[SeqRows],
    ) -> Result<(), BackendError> {
        self.write((kv, layer), k, v, seqs)
    }

    fn attention(
        &self,
        q: &CpuTensor,
        kv: &CpuKv,
        layer: usize,
        seqs: &[SeqRows],
        params: &AttentionParams,
        out: &mut CpuTensor,
    ) -> Result<(), BackendError> {
        self.attend(&mut self.inner(), q, (kv, layer), (seqs, params), out, false)
    }

    fn gated(
        &self,
        gate: &mut CpuTensor,
        up: &CpuTensor,
        activation: Activation,
    ) -> Result<(), BackendError> {
        same("gated", "rows of up", up.rows, gate.rows)?;
        same("gated", "columns of up", up.cols, gate.cols)?;
        let (rows, cols, vectors) = (gate.rows, gate.cols, gate.stride / LANES);
        let (gate, up) = (RowsMut::of(gate), Rows::of(up));
        self.each_row(rows, cols, |row| Gated {
            gate: gate.at(row),
            up: up.at(row),
            activation,
            vectors,
        });
        Ok(())
    }

    fn norm_linear(
        &self,
        x: &CpuTensor,
        norm: &Norm<'_, Self>,
        room: &mut CpuTensor,
        parts: &mut [LinearPart<'_, Self>],
    ) -> Result<(), BackendError> {
        self.norm_then_linear(x, norm, room, parts)
    }

    fn rope_write(
        &self,
        qkv: (&mut CpuTensor, &mut CpuTensor, &CpuTensor),
        positions: &[u32],
        rope: &Rope,
        kv: &mut CpuKv,
        layer: usize,
        seqs: &[SeqRows],
    ) -> Result<(), BackendError> {
        self.rotate_and_write(qkv, positions, rope, (kv, layer), seqs)
    }

    fn attention_linear(
        &self,
        q: &CpuTensor,
        (kv, layer): (&CpuKv, usize),
        seqs: &[SeqRows],
        params: &AttentionParams,
        weight: &CpuWeight,
        room: &mut CpuTensor,
        delta: &mut CpuTensor,
        residual: Option<&mut CpuTensor>,
    ) -> Result<(), BackendError> {
        let (kv, seqs) = ((kv, layer), (seqs, params));
        self.attend_then_linear(q, kv, seqs, weight, room, delta, residual)
    }

    fn feed_forward(
        &self,
        x: &mut CpuTensor,
        norm: &Norm<'_, Self>,
        weights: &FeedForward<'_, Self>,
        room: FeedForwardRoom<'_, Self>,
        delta: &mut CpuTensor,
        add: bool,
    ) -> Result<(), BackendError> {
        self.whole_feed_forward(x, norm, weights, room, delta, add)
    }

    fn experts(
        &self,
        x: &CpuTensor,
        router: &CpuTensor,
        e: &Experts<'_, Self>,
        out: &mut CpuTensor,
    ) -> Result<(), BackendError> {
        experts::check(x, router, e, out)?;
        out.set_rows("experts", x.rows)?;
        let inner = &mut *self.inner();
        let mut cx = self.context(&mut inner.pool, &mut inner.acts);
        experts::run(&mut cx, &mut inner.experts, x, router, e, out)
    }

    fn gather(&self, x: &CpuTensor, rows: &[u32], out: &mut CpuTensor) -> Result<(), BackendError> {
        const OP: &str = "gather";
        same(OP, "columns of out", out.cols, x.cols)?;
        if let Some(row) = rows.iter().find(|r| **r as usize >= x.rows) {
            return Err(shape(OP, format!("row {row} of {}", x.rows)));
        }
        out.set_rows(OP, rows.len())?;
        for (i, row) in rows.iter().enumerate() {
            out.row_mut(i).copy_from_slice(x.row(*row as usize));
        }
        Ok(())
    }

    fn sample(
        &self,
        logits: &mut CpuTensor,
        wants: &[Want],
        out: &mut Samples,
    ) -> Result<(), BackendError> {
        same("sample", "number of wants", wants.len(), logits.rows)?;
        let (rows, cols) = (RowsMut::of(logits), logits.cols);
        out.tokens.clear();
        out.tokens.resize(wants.len(), None);
        let tokens = Tokens(out.tokens.as_mut_ptr());
        self.inner().pool.run(wants.len(), &|i| {
            let Want::Token(how) = &wants[i] else { return };
            // SAFETY: the tensor has this row, and it is this task's alone.
            let row = unsafe { std::slice::from_raw_parts_mut(rows.at(i), cols) };
            let token = draw::draw(row, how);
            // SAFETY: as many tokens as wants, and this one is this task's.
            unsafe { tokens.at(i).write(token) };
        });
        out.logits.clear();
        for (i, _) in wants.iter().enumerate().filter(|(_, want)| **want == Want::Logits) {
            out.logits.extend_from_slice(logits.row(i));
        }
        Ok(())
    }

    fn beside(&self, work: Box<dyn FnOnce() + Send>) {
        self.inner().pool.beside(work);
    }

    fn kv_copy(&self, kv: &mut CpuKv, pairs: &[(u32, u32)]) -> Result<(), BackendError> {
        kv.copy(pairs)
    }

    fn weight_sum(&self, w: &CpuWeight) -> Option<u64> {
        Some(checksum(&w.data))
    }

    fn weight_flip(&self, w: &CpuWeight, word: u64, bit: u32) -> Result<(u32, u32), BackendError> {
        // Ops over weights hold this lock as well.
        let _still = self.inner();
        w.flip(word, bit)
    }

    fn kv_flip(
        &self,
        kv: &mut CpuKv,
        layer: usize,
        block: u32,
        slot: usize,
        bit: u32,
    ) -> Result<(u32, u32), BackendError> {
        kv.flip(layer, block, slot, bit)
    }

    fn kv_read(&self, kv: &CpuKv, block: u32) -> Result<Vec<u8>, BackendError> {
        kv.read(block)
    }

    fn kv_put(&self, kv: &mut CpuKv, block: u32, content: &[u8]) -> Result<(), BackendError> {
        kv.put(block, content)
    }
}

impl CpuBackend {
    pub(crate) fn context<'a>(
        &self,
        pool: &'a mut Pool,
        acts: &'a mut Buf<ActBlock>,
    ) -> Context<'a> {
        Context { path: self.path, precision: self.precision, tiles: self.tiles, pool, acts }
    }
}

/// The processor's name, where the system tells it.
fn processor() -> String {
    let info = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let name = info.lines().find_map(|l| l.strip_prefix("model name")?.split_once(':'));
    name.map_or(std::env::consts::ARCH.to_owned(), |(_, name)| name.trim().to_owned())
}
