//! What a backend reaches: a copy and a plain product, and the steps of a transformer beside them in
//! the same run.
//!
//! The model is a random one of a given shape, with synthetic activations. It runs the ops of the
//! forward pass in its order, and every kind of op alone. Figures are the best of several runs, since
//! other work only adds time. What is measured is the calling process; nothing is checked here.

use crate::random::{Random, matrix};
use dunlin_backend::{
    Activation, AttentionParams, Backend, BackendError, DType, Draw, KvDtype, KvSpec, LinearPart,
    Part, Rope, RopeStyle, Samples, SeqRows, Want,
};
use std::time::{Duration, Instant};

/// Sizes of a dense model.
#[derive(Debug, Clone, Copy)]
pub struct Shape {
    pub hidden: usize,
    pub inner: usize,
    pub layers: usize,
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    pub vocab: usize,
    /// Element types of layers and of the head.
    pub dtypes: (DType, DType),
}

impl Shape {
    /// SmolLM2-135M as Q4_1 files have it.
    pub const SMOLLM2_135M: Shape = Shape {
        hidden: 576,
        inner: 1536,
        layers: 30,
        heads: 9,
        kv_heads: 3,
        head_dim: 64,
        vocab: 49_152,
        dtypes: (DType::Q4_1, DType::Q8_0),
    };

    /// A step of such a model, with one row of logits, that took `times`.
    pub fn cost(&self, step: Step, weight_bytes: u64, kv: KvDtype, times: Times) -> Cost {
        let Step { rows, past } = step;
        let own = self.hidden * self.head_dim * 2 * (self.heads + self.kv_heads)
            + 3 * self.hidden * self.inner;
        let products = (rows * self.layers * own + self.vocab * self.hidden) as f64;
        let attended = rows as f64 * (past as f64 + (rows as f64 + 1.0) / 2.0);
        let attention = 2.0 * (self.layers * self.heads * self.head_dim) as f64 * attended;
        let entry = self.layers * self.kv_heads * kv.head_bytes(self.head_dim);
        Cost {
            what: format!("{rows} rows after {past}"),
            bytes: (weight_bytes + (entry * (rows + past)) as u64) as f64,
            operations: 2.0 * (products + attention),
            times,
        }
    }
}

/// How long something took by the clock, and in processor time per core where that is asked for: a
/// busy machine disturbs it less, and for a device in software it is what an idle one would take.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Times {
    pub clock: Duration,
    pub busy: Option<Duration>,
}

/// Takes times.
#[derive(Debug, Clone, Copy)]
pub struct Meter {
    pub runs: usize,
    /// Processor time of this process so far, per core.
    pub busy: Option<fn() -> Duration>,
}

/// What a device reaches with work that anyone would write the same.
#[derive(Debug, Clone, Copy)]
pub struct Ceilings {
    /// All rows of a tensor picked into another; bytes are those read and written.
    pub copy: Rate,
    /// One row times a large float32 matrix; bytes are the matrix's.
    pub read: Rate,
    /// Two square float32 matrices.
    pub product: Rate,
    /// Handing over one small op and having its result on the host.
    pub round_trip: Times,
}

/// An amount (bytes or operations) and the time it took.
#[derive(Debug, Clone, Copy)]
pub struct Rate {
    pub amount: f64,
    pub times: Times,
}

/// A step of the model, or one kind of op of it.
#[derive(Debug, Clone)]
pub struct Cost {
    pub what: String,
    /// Of weights and KV, read once.
    pub bytes: f64,
    /// Multiplications and additions.
    pub operations: f64,
    pub times: Times,
}

/// Rows of a step, and how many tokens stand before the first of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Step {
    pub rows: usize,
    pub past: usize,
}

/// Steps worth looking at: decoding at some contexts, a small batch, a chunk of a prompt.
pub const STEPS: [Step; 5] = [
    Step { rows: 1, past: 0 },
    Step { rows: 1, past: 255 },
    Step { rows: 1, past: 1000 },
    Step { rows: 4, past: 255 },
    Step { rows: 64, past: 0 },
];

const COPY: (usize, usize) = (16_384, 1024);
const READ: (usize, usize) = (4096, 4096);
const SIDE: usize = 512;
const BLOCK_TOKENS: usize = 16;

impl Rate {
    /// Per second, by whichever time is less disturbed.
    pub fn per_second(&self) -> f64 {
        self.amount / self.times.best().as_secs_f64().max(1e-9)
    }
}

impl Times {
    /// Processor time where it was taken, else the clock's.
    pub fn best(&self) -> Duration {
        self.busy.unwrap_or(self.clock)
    }
}

impl Cost {
    pub fn bytes_per_second(&self) -> f64 {
        Rate { amount: self.bytes, times: self.times }.per_second()
    }

    pub fn operations_per_second(&self) -> f64 {
        Rate { amount: self.operations, times: self.times }.per_second()
    }
}

impl Ceilings {
    pub fn bytes_per_second(&self) -> f64 {
        self.copy.per_second().max(self.read.per_second())
    }

    /// Takes about a second on a slow device.
    pub fn measure<B: Backend>(b: &B, meter: Meter) -> Result<Self, BackendError> {
        let mut small = b.tensor(1, 32)?;
        let one = b.tensor(1, 32)?;
        let mut out = Vec::new();
        // A small op behind what is measured, so that its result is what is waited for.
        let mut wait = |b: &B| {
            b.add(&mut small, &one)?;
            b.download(&small, &mut out)
        };
        let round_trip = meter.best(|| wait(b))?;
        let all: Vec<u32> = (0..COPY.0 as u32).collect();
        let (from, mut to) = (b.tensor(COPY.0, COPY.1)?, b.tensor(COPY.0, COPY.1)?);
        let copy = meter.best(|| {
            b.gather(&from, &all, &mut to)?;
            wait(b)
        })?;
        drop((from, to));
        let mut product = |(outs, cols): (usize, usize), rows: usize| {
            let t = matrix(&mut Random::new(1), DType::F32, outs, cols);
            let weight = b.weight(&t, &Part::all(&t))?;
            let (x, mut y) = (b.tensor(rows, cols)?, b.tensor(rows, outs)?);
            meter.best(|| {
                linear(b, &x, &weight, &mut y)?;
                wait(b)
            })
        };
        let read = product(READ, 1)?;
        let square = product((SIDE, SIDE), SIDE)?;
        let bytes = |(rows, cols): (usize, usize)| (4 * rows * cols) as f64;
        Ok(Self {
            copy: Rate { amount: 2.0 * bytes(COPY), times: copy },
            read: Rate { amount: bytes(READ), times: read },
            product: Rate { amount: 2.0 * (SIDE as f64).powi(3), times: square },
            round_trip,
        })
    }
}

impl Meter {
    /// The best of some runs after a first, which may compile.
    pub fn best(
        &self,
        mut work: impl FnMut() -> Result<(), BackendError>,
    ) -> Result<Times, BackendError> {
        work()?;
        let mut best = Times { clock: Duration::MAX, busy: self.busy.map(|_| Duration::MAX) };
        for _ in 0..self.runs.max(1) {
            let (start, used) = (Instant::now(), self.busy.map(|busy| busy()));
            work()?;
            best.clock = best.clock.min(start.elapsed());
            if let (Some(busy), Some(used), Some(least)) = (self.busy, used, best.busy) {
                best.busy = Some(least.min(busy().saturating_sub(used)));
            }
        }
        Ok(best)
    }
}

struct Layer<B: Backend> {
    q: B::Weight,
    k: B::Weight,
    v: B::Weight,
    o: B::Weight,
    gate: B::Weight,
    up: B::Weight,
    down: B::Weight,
}

/// A random model on a device.
pub struct Model<'a, B: Backend> {
    b: &'a B,
    shape: Shape,
    layers: Vec<Layer<B>>,
    head: B::Weight,
    norm: B::Tensor,
    kv: B::Kv,
    /// Of the weights in device memory.
    pub bytes: u64,
    params: AttentionParams,
    rope: Rope,
}

/// Activations of a step.
struct Work<B: Backend> {
    x: B::Tensor,
    normed: B::Tensor,
    q: B::Tensor,
    k: B::Tensor,
    v: B::Tensor,
    attended: B::Tensor,
    delta: B::Tensor,
    gate: B::Tensor,
    up: B::Tensor,
    last: B::Tensor,
    logits: B::Tensor,
    seqs: Vec<SeqRows>,
    positions: Vec<u32>,
    wants: Vec<Want>,
    samples: Samples,
}

type Run<'a, B> = Box<dyn FnMut(&mut Work<B>) -> Result<(), BackendError> + 'a>;

impl<'a, B: Backend> Model<'a, B> {
    /// With room for the largest of [`STEPS`].
    pub fn new(b: &'a B, shape: Shape) -> Result<Self, BackendError> {
        let Shape { hidden, inner, heads, kv_heads, head_dim, vocab, .. } = shape;
        let load = |seed: usize, dtype, rows, cols| {
            let t = matrix(&mut Random::new(seed as u64), dtype, rows, cols);
            b.weight(&t, &Part::all(&t))
        };
        let own = |seed, rows, cols| load(seed, shape.dtypes.0, rows, cols);
        let layer = |i| {
            Ok(Layer {
                q: own(8 * i, heads * head_dim, hidden)?,
                k: own(8 * i + 1, kv_heads * head_dim, hidden)?,
                v: own(8 * i + 2, kv_heads * head_dim, hidden)?,
                o: own(8 * i + 3, hidden, heads * head_dim)?,
                gate: own(8 * i + 4, inner, hidden)?,
                up: own(8 * i + 5, inner, hidden)?,
                down: own(8 * i + 6, hidden, inner)?,
            })
        };
        let layers = (0..shape.layers).map(layer).collect::<Result<Vec<_>, BackendError>>()?;
        let head = load(999, shape.dtypes.1, vocab, hidden)?;
        let all = |l: &Layer<B>| -> u64 {
            let each = [&l.q, &l.k, &l.v, &l.o, &l.gate, &l.up, &l.down];
            each.map(|w| b.weight_bytes(w)).iter().sum()
        };
        let bytes = layers.iter().map(all).sum::<u64>() + b.weight_bytes(&head);
        let mut norm = b.tensor(1, hidden)?;
        b.upload(&vec![1.0; hidden], &mut norm)?;
        let room = STEPS.iter().map(|s| s.rows + s.past).max().unwrap_or(0);
        let kv = b.kv(&KvSpec {
            layers: shape.layers,
            kv_heads,
            head_dim,
            blocks: room.div_ceil(BLOCK_TOKENS),
            block_tokens: BLOCK_TOKENS,
        })?;
        let params = AttentionParams {
            heads,
            kv_heads,
            head_dim,
            scale: 1.0 / (head_dim as f32).sqrt(),
            window: None,
            softcap: None,
            kv_head_of: (0..heads).map(|h| h * kv_heads / heads).collect(),
        };
        let half = head_dim / 2;
        let inv_freq = (0..half).map(|i| libm::powf(1e5, -(i as f32) / half as f32)).collect();
        let rope = Rope { style: RopeStyle::Interleaved, head_dim, inv_freq };
        Ok(Self { b, shape, layers, head, norm, kv, bytes, params, rope })
    }

    /// A whole step, with one row of logits and the token drawn from it.
    pub fn step(&mut self, step: Step, meter: Meter) -> Result<Cost, BackendError> {
        let mut w = self.work(step)?;
        let times = meter.best(|| {
            for i in 0..self.shape.layers {
                self.layer(i, &mut w)?;
            }
            let b = self.b;
            b.gather(&w.x, &[step.rows as u32 - 1], &mut w.last)?;
            b.rms_norm_inplace(&mut w.last, &self.norm, 1e-5, self.shape.hidden)?;
            linear(b, &w.last, &self.head, &mut w.logits)?;
            b.sample(&mut w.logits, &w.wants, &mut w.samples)
        })?;
        Ok(self.shape.cost(step, self.bytes, self.b.kv_dtype(), times))
    }

    fn work(&self, Step { rows, past }: Step) -> Result<Work<B>, BackendError> {
        let Shape { hidden, inner, heads, kv_heads, head_dim, vocab, .. } = self.shape;
        let tensor = |cols| self.b.tensor(rows, cols);
        let mut x = tensor(hidden)?;
        let data: Vec<f32> = (0..rows * hidden).map(|i| (i % 17) as f32 * 0.1 - 0.8).collect();
        self.b.upload(&data, &mut x)?;
        let blocks = (0..(past + rows).div_ceil(BLOCK_TOKENS) as u32).collect();
        let greedy = Draw::greedy();
        Ok(Work {
            x,
            normed: tensor(hidden)?,
            q: tensor(heads * head_dim)?,
            k: tensor(kv_heads * head_dim)?,
            v: tensor(kv_heads * head_dim)?,
            attended: tensor(heads * head_dim)?,
            delta: tensor(hidden)?,
            gate: tensor(inner)?,
            up: tensor(inner)?,
            last: self.b.tensor(1, hidden)?,
            logits: self.b.tensor(1, vocab)?,
            positions: (past as u32..).take(rows).collect(),
            seqs: vec![SeqRows { rows: 0..rows, position: past, blocks }],
            wants: vec![Want::Token(greedy)],
            samples: Samples::default(),
        })
    }

    fn layer(&mut self, i: usize, w: &mut Work<B>) -> Result<(), BackendError> {
        let (b, l, hidden) = (self.b, &self.layers[i], self.shape.hidden);
        b.rms_norm(&w.x, &self.norm, 1e-5, hidden, &mut w.normed)?;
        qkv(b, l, w)?;
        b.rope(&mut w.q, &w.positions, &self.rope)?;
        b.rope(&mut w.k, &w.positions, &self.rope)?;
        b.kv_write(&mut self.kv, i, &w.k, &w.v, &w.seqs)?;
        b.attention(&w.q, &self.kv, i, &w.seqs, &self.params, &mut w.attended)?;
        linear(b, &w.attended, &l.o, &mut w.delta)?;
        b.add(&mut w.x, &w.delta)?;
        b.rms_norm(&w.x, &self.norm, 1e-5, hidden, &mut w.normed)?;
        gate_up(b, l, w)?;
        b.gated(&mut w.gate, &w.up, Activation::Silu)?;
        linear(b, &w.gate, &l.down, &mut w.delta)?;
        b.add(&mut w.x, &w.delta)
    }

    /// Every kind of op, all layers of it at once.
    pub fn parts(
        &mut self,
        step: Step,
        meter: Meter,
    ) -> Result<Vec<(&'static str, Times)>, BackendError> {
        let mut w = self.work(step)?;
        let Self { b, shape, layers, head, norm, kv, params, rope, .. } = self;
        let (b, hidden, count) = (*b, shape.hidden, shape.layers);
        let runs: Vec<(&'static str, Run<'_, B>)> = vec![
            (
                "products of layers",
                Box::new(|w| {
                    layers.iter().try_for_each(|l| {
                        qkv(b, l, w)?;
                        linear(b, &w.attended, &l.o, &mut w.delta)?;
                        gate_up(b, l, w)?;
                        linear(b, &w.gate, &l.down, &mut w.delta)
                    })
                }),
            ),
            ("head (one row)", Box::new(|w| linear(b, &w.last, head, &mut w.logits))),
            (
                "attention",
                Box::new(|w| {
                    (0..count).try_for_each(|i| {
                        b.attention(&w.q, kv, i, &w.seqs, params, &mut w.attended)
                    })
                }),
            ),
            (
                "rotary",
                Box::new(|w| {
                    (0..count).try_for_each(|_| {
                        b.rope(&mut w.q, &w.positions, rope)?;
                        b.rope(&mut w.k, &w.positions, rope)
                    })
                }),
            ),
            (
                "norms, sums, activations",
                Box::new(|w| {
                    (0..count).try_for_each(|_| {
                        b.rms_norm(&w.x, norm, 1e-5, hidden, &mut w.normed)?;
                        b.rms_norm(&w.x, norm, 1e-5, hidden, &mut w.normed)?;
                        b.add(&mut w.x, &w.delta)?;
                        b.add(&mut w.x, &w.delta)?;
                        b.gated(&mut w.gate, &w.up, Activation::Silu)
                    })
                }),
            ),
            ("drawing", Box::new(|w| b.sample(&mut w.logits, &w.wants, &mut w.samples))),
        ];
        let mut out = Vec::new();
        let mut times = Vec::new();
        for (what, mut run) in runs {
            let spent = meter.best(|| {
                run(&mut w)?;
                b.download(&w.last, &mut out)
            })?;
            times.push((what, spent));
        }
        Ok(times)
    }
}

fn qkv<B: Backend>(b: &B, l: &Layer<B>, w: &mut Work<B>) -> Result<(), BackendError> {
    let mut parts = [
        LinearPart { weight: &l.q, bias: None, out: &mut w.q },
        LinearPart { weight: &l.k, bias: None, out: &mut w.k },
        LinearPart { weight: &l.v, bias: None, out: &mut w.v },
    ];
    b.linear(&w.normed, &mut parts)
}

fn gate_up<B: Backend>(b: &B, l: &Layer<B>, w: &mut Work<B>) -> Result<(), BackendError> {
    let mut parts = [
        LinearPart { weight: &l.gate, bias: None, out: &mut w.gate },
        LinearPart { weight: &l.up, bias: None, out: &mut w.up },
    ];
    b.linear(&w.normed, &mut parts)
}

fn linear<B: Backend>(
    b: &B,
    x: &B::Tensor,
    weight: &B::Weight,
    out: &mut B::Tensor,
) -> Result<(), BackendError> {
    b.linear(x, &mut [LinearPart { weight, bias: None, out }])
}
