//! What the ops of one transformer cost on an adapter, beside what a copy and a product of square
//! matrices reach on it in the same run.
//!
//! `cargo bench -p dunlin-wgpu --bench kernels -- [DEVICE]`: a random model in the shape of
//! SmolLM2-135M (Q4_1 layers, Q8_0 head), decoded and prefilled with synthetic activations. `DEVICE`
//! is `wgpu:0` unless given; `types` compares the element types instead. Figures are the best of
//! several runs, since other work only adds time; "busy" is processor time per core, which a busy
//! machine disturbs less, and means something for software adapters only.

use bytes::Bytes;
use dunlin_backend::{
    Activation, AttentionParams, Backend, BackendError, DType, HostTensor, KvSpec, LinearPart,
    Part, Rope, RopeStyle, SeqRows,
};
use dunlin_wgpu::{WgpuBackend, WgpuKv, WgpuTensor, WgpuWeight};
use std::time::{Duration, Instant};

const HIDDEN: usize = 576;
const INNER: usize = 1536;
const LAYERS: usize = 30;
const HEADS: usize = 9;
const KV_HEADS: usize = 3;
const HEAD_DIM: usize = 64;
const VOCAB: usize = 49_152;
const CONTEXT: usize = 1024;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let id = std::env::args().find(|a| a.starts_with("wgpu:")).unwrap_or("wgpu:0".into());
    let b = WgpuBackend::open(&id)?;
    println!("{id}: {}", b.info().description);
    let (copy, product) = ceilings(&b)?;
    println!(
        "copy of {} MiB {} (read and written); product of {SIDE}^3 {}",
        (COPY_ROWS * COPY_COLS * 4) >> 20,
        rate(2.0 * 4.0 * (COPY_ROWS * COPY_COLS) as f64, copy, "GB/s"),
        rate(2.0 * (SIDE as f64).powi(3), product, "GFLOP/s"),
    );
    let copy = 2.0 * 4.0 * (COPY_ROWS * COPY_COLS) as f64 / copy.1.as_secs_f64();
    let product = 2.0 * (SIDE as f64).powi(3) / product.1.as_secs_f64();
    if std::env::args().any(|a| a == "types") {
        return types(&b);
    }
    let mut model = Model::new(&b)?;
    println!("weights: {:.1} MB in {} layers and a head", model.bytes as f64 / 1e6, LAYERS);
    for (rows, past) in [(1, 0), (1, 255), (1, 1000), (4, 255), (64, 0)] {
        let (step, busy) = model.step(rows, past)?;
        let bytes = model.bytes as f64;
        let flops = 2.0 * model.elements as f64 * rows as f64;
        println!(
            "{rows} rows after {past}: {:.1} ms (busy {:.1} ms); {:.0} MB of weights at {}, {:.2} \
             of the copy; {:.2} GFLOP at {}, {:.2} of the product",
            step.as_secs_f64() * 1e3,
            busy.as_secs_f64() * 1e3,
            bytes / 1e6,
            rate(bytes, (step, busy), "GB/s"),
            bytes / busy.as_secs_f64() / copy,
            flops / 1e9,
            rate(flops, (step, busy), "GFLOP/s"),
            flops / busy.as_secs_f64() / product,
        );
        for (what, (time, busy)) in model.parts(rows, past)? {
            let (time, busy) = (time.as_secs_f64() * 1e3, busy.as_secs_f64() * 1e3);
            println!("    {what:<28} {time:>8.2} ms a step, busy {busy:>8.2} ms");
        }
    }
    Ok(())
}

const COPY_ROWS: usize = 16_384;
const COPY_COLS: usize = 1024;
const SIDE: usize = 512;

/// What the adapter reaches with work that anyone would write the same: all rows of a tensor picked
/// into another, and a product of two square float32 matrices.
fn ceilings(b: &WgpuBackend) -> Result<(Times, Times), BackendError> {
    let mut small = b.tensor(1, 32)?;
    let one = b.tensor(1, 32)?;
    let mut out = Vec::new();
    let all: Vec<u32> = (0..COPY_ROWS as u32).collect();
    let (from, mut to) = (b.tensor(COPY_ROWS, COPY_COLS)?, b.tensor(COPY_ROWS, COPY_COLS)?);
    let copy = best(4, || {
        b.gather(&from, &all, &mut to)?;
        b.add(&mut small, &one)?;
        b.download(&small, &mut out)
    })?;
    let t = matrix(1, DType::F32, SIDE, SIDE);
    let weight = b.weight(&t, &Part::all(&t))?;
    let (x, mut y) = (b.tensor(SIDE, SIDE)?, b.tensor(SIDE, SIDE)?);
    let product = best(4, || {
        linear(b, &x, &weight, &mut y)?;
        b.add(&mut small, &one)?;
        b.download(&small, &mut out)
    })?;
    Ok((copy, product))
}

/// `amount` by the clock, and by processor time per core.
fn rate(amount: f64, (clock, busy): Times, unit: &str) -> String {
    let per = |t: Duration| amount / t.as_secs_f64() / 1e9;
    format!("{:.2} {unit} (busy {:.2})", per(clock), per(busy))
}

struct Layer {
    q: WgpuWeight,
    k: WgpuWeight,
    v: WgpuWeight,
    o: WgpuWeight,
    gate: WgpuWeight,
    up: WgpuWeight,
    down: WgpuWeight,
}

struct Model<'a> {
    b: &'a WgpuBackend,
    layers: Vec<Layer>,
    head: WgpuWeight,
    norm: WgpuTensor,
    kv: WgpuKv,
    bytes: u64,
    elements: usize,
    params: AttentionParams,
    rope: Rope,
}

/// Activations of a step of some rows.
struct Work {
    x: WgpuTensor,
    normed: WgpuTensor,
    q: WgpuTensor,
    k: WgpuTensor,
    v: WgpuTensor,
    attended: WgpuTensor,
    delta: WgpuTensor,
    gate: WgpuTensor,
    up: WgpuTensor,
    last: WgpuTensor,
    logits: WgpuTensor,
    seqs: Vec<SeqRows>,
    positions: Vec<u32>,
}

type Part1<'a> = (&'static str, Box<dyn FnMut(&mut Work) -> Result<(), BackendError> + 'a>);

impl<'a> Model<'a> {
    fn new(b: &'a WgpuBackend) -> Result<Self, BackendError> {
        let load = |seed: usize, dtype, rows, cols| {
            let t = matrix(seed as u64, dtype, rows, cols);
            b.weight(&t, &Part::all(&t))
        };
        let q4 = |seed, rows, cols| load(seed, DType::Q4_1, rows, cols);
        let layer = |i| {
            Ok(Layer {
                q: q4(8 * i, HEADS * HEAD_DIM, HIDDEN)?,
                k: q4(8 * i + 1, KV_HEADS * HEAD_DIM, HIDDEN)?,
                v: q4(8 * i + 2, KV_HEADS * HEAD_DIM, HIDDEN)?,
                o: q4(8 * i + 3, HIDDEN, HEADS * HEAD_DIM)?,
                gate: q4(8 * i + 4, INNER, HIDDEN)?,
                up: q4(8 * i + 5, INNER, HIDDEN)?,
                down: q4(8 * i + 6, HIDDEN, INNER)?,
            })
        };
        let layers = (0..LAYERS).map(layer).collect::<Result<Vec<_>, BackendError>>()?;
        let head = load(999, DType::Q8_0, VOCAB, HIDDEN)?;
        let all = |l: &Layer| -> u64 {
            let each = [&l.q, &l.k, &l.v, &l.o, &l.gate, &l.up, &l.down];
            each.map(|w| b.weight_bytes(w)).iter().sum()
        };
        let bytes = layers.iter().map(all).sum::<u64>() + b.weight_bytes(&head);
        let mut norm = b.tensor(1, HIDDEN)?;
        b.upload(&[1.0; HIDDEN], &mut norm)?;
        let kv = b.kv(&KvSpec {
            layers: LAYERS,
            kv_heads: KV_HEADS,
            head_dim: HEAD_DIM,
            blocks: CONTEXT.div_ceil(16) + 4,
            block_tokens: 16,
        })?;
        let params = AttentionParams {
            heads: HEADS,
            kv_heads: KV_HEADS,
            head_dim: HEAD_DIM,
            scale: 0.125,
            window: None,
            softcap: None,
            kv_head_of: (0..HEADS).map(|h| h / 3).collect(),
        };
        let inv_freq = (0..32).map(|i| 1e5f32.powf(-(i as f32) / 32.0)).collect();
        let rope = Rope { style: RopeStyle::Interleaved, head_dim: HEAD_DIM, inv_freq };
        let per_layer = HIDDEN * HEAD_DIM * (2 * HEADS + 2 * KV_HEADS) + 3 * HIDDEN * INNER;
        let elements = LAYERS * per_layer + VOCAB * HIDDEN;
        Ok(Self { b, layers, head, norm, kv, bytes, elements, params, rope })
    }

    fn work(&self, rows: usize, past: usize) -> Result<Work, BackendError> {
        let tensor = |cols| self.b.tensor(rows, cols);
        let mut x = tensor(HIDDEN)?;
        let data: Vec<f32> = (0..rows * HIDDEN).map(|i| (i % 17) as f32 * 0.1 - 0.8).collect();
        self.b.upload(&data, &mut x)?;
        let blocks = (0..(past + rows).div_ceil(16) as u32).collect();
        // Each row stands for the last of its own sequence where a batch decodes.
        let seqs = vec![SeqRows { rows: 0..rows, position: past, blocks }];
        Ok(Work {
            x,
            normed: tensor(HIDDEN)?,
            q: tensor(HEADS * HEAD_DIM)?,
            k: tensor(KV_HEADS * HEAD_DIM)?,
            v: tensor(KV_HEADS * HEAD_DIM)?,
            attended: tensor(HEADS * HEAD_DIM)?,
            delta: tensor(HIDDEN)?,
            gate: tensor(INNER)?,
            up: tensor(INNER)?,
            last: self.b.tensor(1, HIDDEN)?,
            logits: self.b.tensor(1, VOCAB)?,
            positions: (past as u32..).take(rows).collect(),
            seqs,
        })
    }

    /// The best time of a whole step with one row of logits.
    fn step(&mut self, rows: usize, past: usize) -> Result<Times, BackendError> {
        let mut w = self.work(rows, past)?;
        let mut out = Vec::new();
        best(4, || {
            for i in 0..LAYERS {
                self.layer(i, &mut w)?;
            }
            let b = self.b;
            b.gather(&w.x, &[0], &mut w.last)?;
            b.rms_norm_inplace(&mut w.last, &self.norm, 1e-5, HIDDEN)?;
            linear(b, &w.last, &self.head, &mut w.logits)?;
            b.download(&w.logits, &mut out)
        })
    }

    fn layer(&mut self, i: usize, w: &mut Work) -> Result<(), BackendError> {
        let (b, l) = (self.b, &self.layers[i]);
        b.rms_norm(&w.x, &self.norm, 1e-5, HIDDEN, &mut w.normed)?;
        linear(b, &w.normed, &l.q, &mut w.q)?;
        linear(b, &w.normed, &l.k, &mut w.k)?;
        linear(b, &w.normed, &l.v, &mut w.v)?;
        b.rope(&mut w.q, &w.positions, &self.rope)?;
        b.rope(&mut w.k, &w.positions, &self.rope)?;
        b.kv_write(&mut self.kv, i, &w.k, &w.v, &w.seqs)?;
        b.attention(&w.q, &self.kv, i, &w.seqs, &self.params, &mut w.attended)?;
        linear(b, &w.attended, &l.o, &mut w.delta)?;
        b.add(&mut w.x, &w.delta)?;
        b.rms_norm(&w.x, &self.norm, 1e-5, HIDDEN, &mut w.normed)?;
        linear(b, &w.normed, &l.gate, &mut w.gate)?;
        linear(b, &w.normed, &l.up, &mut w.up)?;
        b.gated(&mut w.gate, &w.up, Activation::Silu)?;
        linear(b, &w.gate, &l.down, &mut w.delta)?;
        b.add(&mut w.x, &w.delta)
    }

    /// The best time of each kind of op, all layers of it in one submission.
    fn parts(
        &mut self,
        rows: usize,
        past: usize,
    ) -> Result<Vec<(&'static str, Times)>, BackendError> {
        let mut w = self.work(rows, past)?;
        let Self { b, layers, head, norm, kv, params, rope, .. } = self;
        let (b, kv) = (*b, &*kv);
        let mut parts: Vec<Part1<'_>> = vec![
            (
                "products, layers",
                Box::new(|w| {
                    for l in layers.iter() {
                        linear(b, &w.normed, &l.q, &mut w.q)?;
                        linear(b, &w.normed, &l.k, &mut w.k)?;
                        linear(b, &w.normed, &l.v, &mut w.v)?;
                        linear(b, &w.attended, &l.o, &mut w.delta)?;
                        linear(b, &w.normed, &l.gate, &mut w.gate)?;
                        linear(b, &w.normed, &l.up, &mut w.up)?;
                        linear(b, &w.gate, &l.down, &mut w.delta)?;
                    }
                    Ok(())
                }),
            ),
            ("product, head (one row)", Box::new(|w| linear(b, &w.last, head, &mut w.logits))),
            (
                "attention",
                Box::new(|w| {
                    (0..LAYERS).try_for_each(|i| {
                        b.attention(&w.q, kv, i, &w.seqs, params, &mut w.attended)
                    })
                }),
            ),
            (
                "rotary",
                Box::new(|w| {
                    (0..LAYERS).try_for_each(|_| {
                        b.rope(&mut w.q, &w.positions, rope)?;
                        b.rope(&mut w.k, &w.positions, rope)
                    })
                }),
            ),
            (
                "norms, sums, activations",
                Box::new(|w| {
                    (0..LAYERS).try_for_each(|_| {
                        b.rms_norm(&w.x, norm, 1e-5, HIDDEN, &mut w.normed)?;
                        b.rms_norm(&w.x, norm, 1e-5, HIDDEN, &mut w.normed)?;
                        b.add(&mut w.x, &w.delta)?;
                        b.add(&mut w.x, &w.delta)?;
                        b.gated(&mut w.gate, &w.up, Activation::Silu)
                    })
                }),
            ),
        ];
        let mut out = Vec::new();
        let mut times = Vec::new();
        for (what, run) in &mut parts {
            let spent = best(3, || {
                run(&mut w)?;
                b.download(&w.k, &mut out)
            })?;
            times.push((*what, spent));
        }
        Ok(times)
    }
}

/// Time on the clock, and processor time per core.
type Times = (Duration, Duration);

/// The best of some runs after a first, which compiles.
fn best(
    runs: usize,
    mut work: impl FnMut() -> Result<(), BackendError>,
) -> Result<Times, BackendError> {
    work()?;
    let cores = std::thread::available_parallelism().map_or(1, |n| n.get()) as u32;
    let (mut clock, mut busy) = (Duration::MAX, Duration::MAX);
    for _ in 0..runs {
        let (start, used) = (Instant::now(), processor_time());
        work()?;
        clock = clock.min(start.elapsed());
        busy = busy.min((processor_time() - used) / cores);
    }
    Ok((clock, busy))
}

/// Of all threads of this process.
fn processor_time() -> Duration {
    let mut t = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the call writes one `timespec`.
    unsafe { libc::clock_gettime(libc::CLOCK_PROCESS_CPUTIME_ID, &mut t) };
    Duration::new(t.tv_sec as u64, t.tv_nsec as u32)
}

/// One product of each element type, for one row and for sixteen.
fn types(b: &WgpuBackend) -> Result<(), Box<dyn std::error::Error>> {
    const SHAPE: (usize, usize) = (8192, 1024);
    use DType::*;
    for dtype in [F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, Q4_K, Q5_K, Q6_K] {
        let t = matrix(1, dtype, SHAPE.0, SHAPE.1);
        let w = b.weight(&t, &Part::all(&t))?;
        for rows in [1, 16] {
            let (x, mut y) = (b.tensor(rows, SHAPE.1)?, b.tensor(rows, SHAPE.0)?);
            let mut small = b.tensor(1, SHAPE.1)?;
            let mut out = Vec::new();
            let (clock, busy) = best(4, || {
                linear(b, &x, &w, &mut y)?;
                b.gather(&x, &[0], &mut small)?;
                b.download(&small, &mut out)
            })?;
            let per = |t: Duration| (rows * SHAPE.0 * SHAPE.1) as f64 / t.as_secs_f64() / 1e9;
            println!(
                "{dtype:?} [{}, {}] x {rows}: {:.2} ms, busy {:.2} ms, {:.2} (busy {:.2}) G \
                 multiply-adds/s",
                SHAPE.0,
                SHAPE.1,
                clock.as_secs_f64() * 1e3,
                busy.as_secs_f64() * 1e3,
                per(clock),
                per(busy)
            );
        }
    }
    Ok(())
}

fn linear(
    b: &WgpuBackend,
    x: &WgpuTensor,
    weight: &WgpuWeight,
    out: &mut WgpuTensor,
) -> Result<(), BackendError> {
    b.linear(x, &mut [LinearPart { weight, bias: None, out }])
}

fn matrix(seed: u64, dtype: DType, rows: usize, cols: usize) -> HostTensor {
    let mut s = seed | 1;
    let mut data = vec![0u8; rows * dtype.row_bytes(cols).expect("whole blocks")];
    for c in data.chunks_exact_mut(2) {
        s = s.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        c.copy_from_slice(&((s >> 40) as u16).to_le_bytes());
    }
    // Scales of about a hundredth.
    for block in data.chunks_exact_mut(dtype.block_bytes()) {
        block[..2].copy_from_slice(&0x2100u16.to_le_bytes());
        if dtype == DType::Q4_1 {
            block[2..4].copy_from_slice(&0xa800u16.to_le_bytes());
        }
    }
    HostTensor::new("bench", dtype, rows, cols, Bytes::from(data)).expect("whole blocks")
}
