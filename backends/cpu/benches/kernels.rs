//! What the ops of one transformer cost on this machine, op by op, beside what memory can deliver.
//!
//! `cargo bench -p dunlin-cpu --bench kernels -- [threads] [fast|exact] [decode|chunks|prefill]
//! [f32|f16|int8]`:
//! a random model in the shape of SmolLM2-135M (Q4_1, Q8_0 head), decoded and prefilled with
//! synthetic activations; figures are the best of several runs, since other work only ever adds
//! time. On one thread the clock is that thread's own processor time, which a busy machine hardly
//! disturbs. `DUNLIN_CPU` chooses the instruction path.
//!
//! Prefill is compared with the fastest integer product measured in the same run: weights of one
//! kind that stay in the second-level cache, 64 rows, the same arithmetic and the same bits. Attention is
//! compared with multiply-adds of float32 in registers, and a step of many rows with both: the share
//! of its time that it would take if products and attention ran at these rates.
//!
//! `chunks`: a few tokens of a long prompt beside 8 streams that decode, and what a token adds.

use bytes::Bytes;
use dunlin_backend::quant::dequantize_row;
use dunlin_backend::{
    Activation, AttentionParams, Backend, DType, FeedForward, FeedForwardRoom, HostTensor, KvDtype,
    KvSpec, LinearPart, Norm, Part, Rope, RopeStyle, SeqRows,
};
use dunlin_cpu::{CpuBackend, CpuKv, CpuOptions, CpuTensor, CpuWeight, Precision};
use std::collections::BTreeMap;
use std::hint::black_box;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

const HIDDEN: usize = 576;
const INNER: usize = 1536;
const LAYERS: usize = 30;
const HEADS: usize = 9;
const KV_HEADS: usize = 3;
const HEAD_DIM: usize = 64;
const VOCAB: usize = 49_152;
/// Tokens in the KV store.
const CONTEXT: usize = 32 * 288;

/// Whether times are those of the processor.
static ALONE: AtomicBool = AtomicBool::new(false);

/// A point in time.
fn now() -> Duration {
    static START: std::sync::LazyLock<Instant> = std::sync::LazyLock::new(Instant::now);
    #[cfg(target_os = "linux")]
    if ALONE.load(Ordering::Relaxed) {
        let mut t = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        // SAFETY: the clock exists on Linux and writes one `timespec`.
        unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &mut t) };
        return Duration::new(t.tv_sec as u64, t.tv_nsec as u32);
    }
    START.elapsed()
}

fn main() {
    let threads = std::env::args().find_map(|a| a.parse().ok()).unwrap_or(2);
    let bandwidth = read_bandwidth(threads);
    ALONE.store(threads == 1, Ordering::Relaxed);
    println!("read bandwidth: {:.1} GB/s on {threads} threads", bandwidth / 1e9);
    let only = |name: &str| std::env::args().any(|a| a == name);
    for precision in [Precision::Fast, Precision::Exact] {
        if precision == Precision::Fast && only("exact")
            || precision == Precision::Exact && only("fast")
        {
            continue;
        }
        let kv = KvDtype::ALL.into_iter().find(|kv| only(kv.name()));
        let options = CpuOptions { threads, precision, kv, path: None };
        let b = CpuBackend::new(options).expect("backend");
        let kv = options.kv_dtype().name();
        println!("\n{} ({precision:?}, {kv} KV)", b.info().description);
        naive_twin(&b);
        let bounds = Bounds { bandwidth, products: product_rate(&b), floats: float_rate(threads) };
        println!("multiply-adds of float32 in registers: {:.0} GFLOP/s", bounds.floats / 1e9);
        let mut m = Model::new(&b);
        println!("weights: {:.1} MB", m.bytes as f64 / 1e6);
        let some = ["decode", "chunks", "prefill"].into_iter().any(only);
        if !some || only("decode") {
            for (sequences, past) in
                [(1, 0), (1, 255), (1, 1000), (1, 4000), (4, 255), (16, 255), (32, 255)]
            {
                m.measure(&Step { decodes: sequences, at: past, chunk: 0, past: 0 }, &bounds);
            }
        }
        if !some || only("chunks") {
            for (chunk, past) in [(9, 500), (9, 2000), (9, 3900), (4, 2000), (32, 2000)] {
                m.measure(&Step { decodes: 8, at: 255, chunk, past }, &bounds);
            }
        }
        if !some || only("prefill") {
            for past in [0, 3584] {
                m.measure(&Step { decodes: 0, at: 0, chunk: 512, past }, &bounds);
            }
        }
    }
}

/// What this machine does at best, a second.
struct Bounds {
    /// Bytes read.
    bandwidth: f64,
    /// Operations of integer products, and of float32.
    products: f64,
    floats: f64,
}

/// Multiply-adds of float32 a second, twice, that all threads together do in registers.
fn float_rate(threads: usize) -> f64 {
    const ROUNDS: usize = 400_000;
    let mut best = f64::MAX;
    let mut lanes = 0;
    for _ in 0..5 {
        let start = now();
        let one = || {
            #[cfg(target_arch = "x86_64")]
            if is_x86_feature_detected!("avx512f") {
                // SAFETY: the processor has it.
                return unsafe { wide_chains(ROUNDS) };
            }
            chains::<8>(ROUNDS)
        };
        lanes = std::thread::scope(|s| {
            let others: Vec<_> = (1..threads).map(|_| s.spawn(one)).collect();
            let mine = one();
            others.into_iter().for_each(|o| assert_eq!(o.join().expect("no panic"), mine));
            mine
        });
        best = best.min((now() - start).as_secs_f64());
    }
    (2 * CHAINS * lanes * ROUNDS * threads) as f64 / best
}

/// Sums that do not wait for each other.
const CHAINS: usize = 12;

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
unsafe fn wide_chains(rounds: usize) -> usize {
    use std::arch::x86_64::*;
    let (x, mut sums) = (_mm512_set1_ps(black_box(0.5)), [_mm512_set1_ps(1.0); CHAINS]);
    for _ in 0..rounds {
        for s in &mut sums {
            *s = _mm512_fmadd_ps(*s, x, x);
        }
    }
    black_box(sums);
    16
}

/// As many in plain Rust, which takes what the target has without asking.
fn chains<const LANES: usize>(rounds: usize) -> usize {
    let (x, mut sums) = (black_box(0.5f32), [[1.0f32; LANES]; CHAINS]);
    for _ in 0..rounds {
        for s in sums.as_flattened_mut() {
            *s = s.mul_add(x, x);
        }
    }
    black_box(sums);
    LANES
}

/// Bytes per second that all threads together read from a buffer larger than the caches.
fn read_bandwidth(threads: usize) -> f64 {
    let buffer = vec![1u64; 32 << 20];
    let mut best = f64::MAX;
    for _ in 0..5 {
        let start = Instant::now();
        std::thread::scope(|s| {
            for part in buffer.chunks(buffer.len().div_ceil(threads)) {
                s.spawn(move || {
                    let mut sums = [0u64; 16];
                    for c in part.chunks_exact(16) {
                        for (s, c) in sums.iter_mut().zip(c) {
                            *s = s.wrapping_add(*c);
                        }
                    }
                    black_box(sums)
                });
            }
        });
        best = best.min(start.elapsed().as_secs_f64());
    }
    (buffer.len() * 8) as f64 / best
}

/// One product against the plainest loop over dequantised rows.
fn naive_twin(b: &CpuBackend) {
    let t = matrix(1, DType::Q4_1, INNER, HIDDEN);
    let w = b.weight(&t, &Part::all(&t)).expect("weight");
    let mut x = b.tensor(1, HIDDEN).expect("tensor");
    let data: Vec<f32> = (0..HIDDEN).map(|i| (i % 17) as f32 - 8.0).collect();
    b.upload(&data, &mut x).expect("upload");
    let mut out = b.tensor(1, INNER).expect("tensor");
    let fast = best(50, || {
        b.linear(&x, &mut [LinearPart { weight: &w, bias: None, out: &mut out }]).expect("linear");
    });
    let mut row = vec![0.0; HIDDEN];
    let naive = best(5, || {
        for r in 0..INNER {
            dequantize_row(t.dtype, t.row(r), &mut row);
            let sum: f32 = row.iter().zip(&data).map(|(w, x)| w * x).sum();
            black_box(sum);
        }
    });
    let ratio = naive.as_secs_f64() / fast.as_secs_f64();
    println!("Q4_1 [{INNER}, {HIDDEN}] in cache: {fast:.1?}, naive {naive:.1?}, {ratio:.0} times");
}

/// Multiply-adds a second, twice: the fastest product in cache.
fn product_rate(b: &CpuBackend) -> f64 {
    let (outs, cols, rows) = (1024, 576, 64);
    let mut x = b.tensor(rows, cols).expect("tensor");
    let data: Vec<f32> = (0..rows * cols).map(|i| (i % 29) as f32 - 14.0).collect();
    b.upload(&data, &mut x).expect("upload");
    let mut out = b.tensor(rows, outs).expect("tensor");
    let mut rate = |dtype| {
        let t = matrix(1, dtype, outs, cols);
        let weight = b.weight(&t, &Part::all(&t)).expect("weight");
        let time = best(50, || one_linear(b, &x, &weight, &mut out));
        let rate = (2 * outs * cols * rows) as f64 / time.as_secs_f64();
        println!("{dtype:?} [{outs}, {cols}] in cache, {rows} rows: {:.0} GOP/s", rate / 1e9);
        rate
    };
    [DType::Q4_0, DType::Q4_1, DType::Q8_0].map(&mut rate).into_iter().fold(0.0, f64::max)
}

fn best(runs: usize, mut f: impl FnMut()) -> Duration {
    let once = |f: &mut dyn FnMut()| {
        let start = now();
        f();
        now() - start
    };
    (0..runs).map(|_| once(&mut f)).min().expect("a run")
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

/// Sequences that decode on top of `at` tokens each, and behind them a chunk of a prompt of which
/// `past` tokens are done.
struct Step {
    decodes: usize,
    at: usize,
    chunk: usize,
    past: usize,
}

impl Step {
    fn rows(&self) -> usize {
        self.decodes + self.chunk
    }

    /// Rows whose logits are wanted: a chunk by itself is the end of its prompt.
    fn drawn(&self) -> usize {
        if self.decodes == 0 { 1 } else { self.decodes }
    }

    fn seqs(&self) -> Vec<SeqRows> {
        let each = (self.at + 1).div_ceil(16) as u32;
        let blocks =
            |first: u32, tokens: usize| (first..first + tokens.div_ceil(16) as u32).collect();
        let decoding = (0..self.decodes).map(|i| SeqRows {
            rows: i..i + 1,
            position: self.at,
            blocks: blocks(i as u32 * each, self.at + 1),
        });
        let chunk = SeqRows {
            rows: self.decodes..self.rows(),
            position: self.past,
            blocks: blocks(self.decodes as u32 * each, self.past + self.chunk),
        };
        decoding.chain((self.chunk > 0).then_some(chunk)).collect()
    }

    /// Operations of products and of attention.
    fn work(&self) -> (f64, f64) {
        let layers = LAYERS * HIDDEN * (2 * (HEADS + KV_HEADS) * HEAD_DIM + 3 * INNER);
        let chunk: usize = (self.past + 1..=self.past + self.chunk).sum();
        let keys = chunk + self.decodes * (self.at + 1);
        let products = 2.0 * (self.rows() * layers + self.drawn() * VOCAB * HIDDEN) as f64;
        (products, 4.0 * (LAYERS * HEADS * HEAD_DIM * keys) as f64)
    }
}

struct Layer {
    q: CpuWeight,
    k: CpuWeight,
    v: CpuWeight,
    o: CpuWeight,
    gate: CpuWeight,
    up: CpuWeight,
    down: CpuWeight,
}

struct Model<'a> {
    b: &'a CpuBackend,
    layers: Vec<Layer>,
    head: CpuWeight,
    norm: CpuTensor,
    kv: CpuKv,
    bytes: u64,
    params: AttentionParams,
    rope: Rope,
}

/// Runs `f` and books its time under `what`.
fn book<T>(
    times: &mut BTreeMap<&'static str, Duration>,
    what: &'static str,
    f: impl FnOnce() -> T,
) {
    let start = now();
    f();
    *times.entry(what).or_default() += now() - start;
}

impl<'a> Model<'a> {
    fn new(b: &'a CpuBackend) -> Self {
        let load = |seed: usize, dtype, rows, cols| {
            let t = matrix(seed as u64, dtype, rows, cols);
            b.weight(&t, &Part::all(&t)).expect("weight")
        };
        let q4 = |seed, rows, cols| load(seed, DType::Q4_1, rows, cols);
        let layers: Vec<Layer> = (0..LAYERS)
            .map(|i| Layer {
                q: q4(8 * i, HEADS * HEAD_DIM, HIDDEN),
                k: q4(8 * i + 1, KV_HEADS * HEAD_DIM, HIDDEN),
                v: q4(8 * i + 2, KV_HEADS * HEAD_DIM, HIDDEN),
                o: q4(8 * i + 3, HIDDEN, HEADS * HEAD_DIM),
                gate: q4(8 * i + 4, INNER, HIDDEN),
                up: q4(8 * i + 5, INNER, HIDDEN),
                down: q4(8 * i + 6, HIDDEN, INNER),
            })
            .collect();
        let head = load(999, DType::Q8_0, VOCAB, HIDDEN);
        let all = |l: &Layer| -> u64 {
            [&l.q, &l.k, &l.v, &l.o, &l.gate, &l.up, &l.down]
                .map(|w| b.weight_bytes(w))
                .iter()
                .sum()
        };
        let bytes = layers.iter().map(all).sum::<u64>() + b.weight_bytes(&head);
        let mut norm = b.tensor(1, HIDDEN).expect("tensor");
        b.upload(&vec![1.0; HIDDEN], &mut norm).expect("upload");
        let spec = KvSpec {
            layers: LAYERS,
            kv_heads: KV_HEADS,
            head_dim: HEAD_DIM,
            blocks: CONTEXT / 16,
            block_tokens: 16,
        };
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
        let kv = b.kv(&spec).expect("kv");
        Self { b, layers, head, norm, kv, bytes, params, rope }
    }

    fn measure(&mut self, step: &Step, bounds: &Bounds) {
        let alone = Step { chunk: 0, ..*step };
        let added = step.chunk > 0 && step.decodes > 0;
        let (mut best, mut without) = ((Duration::MAX, BTreeMap::new()), Duration::MAX);
        for _ in 0..if step.chunk > 32 { 4 } else { 20 } {
            if added {
                without = without.min(self.timed(&alone).0);
            }
            best = best.min(self.timed(step));
        }
        let (total, times) = best;
        let seconds = total.as_secs_f64();
        let rows = step.rows();
        match step.decodes {
            0 => print!("{} rows after {}", step.chunk, step.past),
            n => print!("{n} sequences at {}", step.at),
        }
        if added {
            print!(" and {} rows after {}", step.chunk, step.past);
        }
        println!(": {:.2} ms, {:.0} tokens/s", seconds * 1e3, rows as f64 / seconds);
        let list: Vec<String> =
            times.iter().map(|(k, t)| format!("{k} {:.2}", t.as_secs_f64() * 1e3)).collect();
        println!("    ms: {}", list.join(", "));
        if added {
            let each = total.saturating_sub(without).as_secs_f64() * 1e3 / step.chunk as f64;
            println!(
                "    without the chunk {:.2} ms: {each:.2} ms a token of it",
                without.as_secs_f64() * 1e3
            );
        }
        if step.chunk == 0 {
            let read = self.bytes as f64 / seconds;
            let share = 100.0 * read / bounds.bandwidth;
            println!("    weights at {:.1} GB/s, {share:.0} % of reading", read / 1e9);
        }
        let (products, attention) = step.work();
        let bound = products / bounds.products + attention / bounds.floats;
        println!(
            "    products {:.1} GOP, attention {:.1} GFLOP: {:.0} % of the best product's rate \
             ({:.0} % with attention), {:.0} % of both bounds",
            products / 1e9,
            attention / 1e9,
            100.0 * products / seconds / bounds.products,
            100.0 * (products + attention) / seconds / bounds.products,
            100.0 * bound / seconds
        );
    }

    fn timed(&mut self, step: &Step) -> (Duration, BTreeMap<&'static str, Duration>) {
        let mut times = BTreeMap::new();
        let start = now();
        self.step(step, &mut times);
        (now() - start, times)
    }

    /// The ops of one forward pass.
    fn step(&mut self, step: &Step, t: &mut BTreeMap<&'static str, Duration>) {
        let b = self.b;
        let (rows, drawn, seqs) = (step.rows(), step.drawn(), step.seqs());
        let tensor = |cols| b.tensor(rows, cols).expect("tensor");
        let (mut x, mut y, mut n) = (tensor(HIDDEN), tensor(HIDDEN), tensor(HIDDEN));
        let mut q = tensor(HEADS * HEAD_DIM);
        let (mut k, mut v) = (tensor(KV_HEADS * HEAD_DIM), tensor(KV_HEADS * HEAD_DIM));
        let (mut a, mut g, mut u) = (tensor(HEADS * HEAD_DIM), tensor(INNER), tensor(INNER));
        let some = |cols| b.tensor(drawn, cols).expect("tensor");
        let (mut last, mut last_normed) = (some(HIDDEN), some(HIDDEN));
        let mut logits = b.tensor(drawn, VOCAB).expect("tensor");
        let ids: Vec<u32> = (0..rows as u32).collect();
        let lasts: Vec<u32> = seqs.iter().map(|s| s.rows.end as u32 - 1).take(drawn).collect();
        let position = |s: &SeqRows| s.position as u32..(s.position + s.rows.len()) as u32;
        let positions: Vec<u32> = seqs.iter().flat_map(position).collect();
        let params = &self.params;
        let norm = Norm { weight: &self.norm, cols: HIDDEN, eps: 1e-5 };
        book(t, "embed", || b.embed(&self.head, &ids, 1.0, &mut x).expect("embed"));
        for (i, l) in self.layers.iter().enumerate() {
            book(t, "norm, qkv", || {
                let mut parts = [
                    LinearPart { weight: &l.q, bias: None, out: &mut q },
                    LinearPart { weight: &l.k, bias: None, out: &mut k },
                    LinearPart { weight: &l.v, bias: None, out: &mut v },
                ];
                b.norm_linear(&x, &norm, &mut y, &mut parts).expect("norm_linear");
            });
            book(t, "rope, kv", || {
                let qkv = (&mut q, &mut k, &v);
                b.rope_write(qkv, &positions, &self.rope, &mut self.kv, i, &seqs).expect("write");
            });
            book(t, "attention, o, add", || {
                let (kv, x) = ((&self.kv, i), Some(&mut x));
                b.attention_linear(&q, kv, &seqs, params, &l.o, &mut a, &mut y, x).expect("o");
            });
            book(t, "feed forward", || {
                let (gate, up, down) = (&l.gate, &l.up, &l.down);
                let weights = FeedForward { gate, up, down, activation: Activation::Silu };
                let room = FeedForwardRoom { normed: &mut n, gate: &mut g, up: &mut u };
                b.feed_forward(&mut x, &norm, &weights, room, &mut y, true).expect("feed forward");
            });
        }
        b.gather(&x, &lasts, &mut last).expect("gather");
        book(t, "norm, head", || {
            let mut parts = [LinearPart { weight: &self.head, bias: None, out: &mut logits }];
            b.norm_linear(&last, &norm, &mut last_normed, &mut parts).expect("head");
        });
    }
}

fn one_linear(b: &CpuBackend, x: &CpuTensor, weight: &CpuWeight, out: &mut CpuTensor) {
    b.linear(x, &mut [LinearPart { weight, bias: None, out }]).expect("linear");
}
