//! What the ops of one transformer cost on an adapter, beside what a copy and a product of square
//! matrices reach on it in the same run.
//!
//! `cargo bench -p dunlin-wgpu --bench kernels -- [DEVICE]`: see `dunlin_suite::roofline`. `DEVICE` is
//! `wgpu:0` unless given; `fast` computes as fast mode does, `f32`, `f16` and `int8` are types of KV;
//! `types` compares the element types of weights instead, `experts` a mixture in both arithmetics.
//! "Busy" is processor time per core, which means something for software adapters only.

use dunlin_backend::{Activation, Backend, DType, Experts, KvDtype, LinearPart, Part, Precision};
use dunlin_suite::random::{Random, matrix};
use dunlin_suite::roofline::{Ceilings, Meter, Model, Rate, STEPS, Shape, Times};
use dunlin_wgpu::{Product, WgpuBackend, WgpuOptions};
use std::time::Duration;

const METER: Meter = Meter { runs: 4, busy: Some(processor_time) };

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let id = std::env::args().find(|a| a.starts_with("wgpu:")).unwrap_or("wgpu:0".into());
    let precision = match std::env::args().any(|a| a == "fast") {
        true => Precision::Fast,
        false => Precision::Exact,
    };
    let kv = KvDtype::ALL.into_iter().find(|kv| std::env::args().any(|a| a == kv.name()));
    let b = WgpuBackend::open_with(&id, &WgpuOptions { precision, kv, ..WgpuOptions::default() })?;
    println!("{id}: {}", b.info().description);
    println!("{:?}", b.tuning());
    if std::env::args().any(|a| a == "types") {
        return types(&b);
    }
    if std::env::args().any(|a| a == "experts") {
        return mixture(&id);
    }
    let ceilings = Ceilings::measure(&b, METER)?;
    let Ceilings { copy, read, product, round_trip } = &ceilings;
    for (what, rate, unit) in
        [("copy", copy, "GB/s"), ("read", read, "GB/s"), ("product", product, "GFLOP/s")]
    {
        println!("{what}: {:.2} {unit}, {}", rate.per_second() / 1e9, times(&rate.times));
    }
    println!("round trip: {}", times(round_trip));
    let mut model = Model::new(&b, Shape::SMOLLM2_135M)?;
    println!("weights: {:.1} MB", model.bytes as f64 / 1e6);
    for step in STEPS {
        let cost = model.step(step, METER)?;
        println!(
            "{}: {}; {:.0} MB at {:.2} GB/s, {:.2} of the copy; {:.2} GFLOP at {:.2} GFLOP/s, \
             {:.2} of the product",
            cost.what,
            times(&cost.times),
            cost.bytes / 1e6,
            cost.bytes_per_second() / 1e9,
            cost.bytes_per_second() / copy.per_second(),
            cost.operations / 1e9,
            cost.operations_per_second() / 1e9,
            cost.operations_per_second() / product.per_second(),
        );
        for (what, spent) in model.parts(step, METER)? {
            println!("    {what:<28} {}", times(&spent));
        }
    }
    Ok(())
}

fn times(t: &Times) -> String {
    let ms = |d: Duration| d.as_secs_f64() * 1e3;
    format!("{:.2} ms (busy {:.2} ms)", ms(t.clock), ms(t.best()))
}

/// Of all threads of this process, per core.
fn processor_time() -> Duration {
    let mut t = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the call writes one `timespec`.
    unsafe { libc::clock_gettime(libc::CLOCK_PROCESS_CPUTIME_ID, &mut t) };
    let cores = std::thread::available_parallelism().map_or(1, |n| n.get()) as u32;
    Duration::new(t.tv_sec as u64, t.tv_nsec as u32) / cores
}

/// One product of each element type, for one row and for sixteen.
fn types(b: &WgpuBackend) -> Result<(), Box<dyn std::error::Error>> {
    const SHAPE: (usize, usize) = (8192, 1024);
    for dtype in DType::ALL {
        let t = matrix(&mut Random::new(1), dtype, SHAPE.0, SHAPE.1);
        let weight = b.weight(&t, &Part::all(&t))?;
        for rows in [1, 16] {
            let (x, mut out) = (b.tensor(rows, SHAPE.1)?, b.tensor(rows, SHAPE.0)?);
            let mut small = b.tensor(1, SHAPE.1)?;
            let mut host = Vec::new();
            let spent = METER.best(|| {
                b.linear(&x, &mut [LinearPart { weight: &weight, bias: None, out: &mut out }])?;
                b.gather(&x, &[0], &mut small)?;
                b.download(&small, &mut host)
            })?;
            let rate = Rate { amount: (rows * SHAPE.0 * SHAPE.1) as f64, times: spent };
            let per_second = rate.per_second() / 1e9;
            println!(
                "{dtype:?} [{}, {}] x {rows}: {}, {per_second:.2} G multiply-adds/s",
                SHAPE.0,
                SHAPE.1,
                times(&spent)
            );
        }
    }
    Ok(())
}

/// Two of eight experts in the size of the default model's feed-forward block.
fn mixture(id: &str) -> Result<(), Box<dyn std::error::Error>> {
    const HIDDEN: usize = 576;
    const INNER: usize = 1536;
    const COUNT: usize = 8;
    for precision in [Precision::Exact, Precision::Fast] {
        let options = WgpuOptions { precision, ..WgpuOptions::default() };
        let mut b = WgpuBackend::open_with(id, &options)?;
        if precision == Precision::Fast {
            b.use_packed(Product::Rows(1, 4), Product::Rows(4, 4));
        }
        let list = |rows, cols| {
            let one = |seed| {
                let t = matrix(&mut Random::new(seed), DType::Q4_0, rows, cols);
                b.weight(&t, &Part::all(&t))
            };
            (0..COUNT as u64).map(one).collect::<Result<Vec<_>, _>>()
        };
        let (gate, up, down) = (list(INNER, HIDDEN)?, list(INNER, HIDDEN)?, list(HIDDEN, INNER)?);
        let experts = Experts {
            gate: &gate,
            up: &up,
            down: &down,
            top_k: 2,
            normalise: true,
            activation: Activation::Silu,
        };
        for rows in [1, 16] {
            let (mut x, mut router) = (b.tensor(rows, HIDDEN)?, b.tensor(rows, COUNT)?);
            let mut out = b.tensor(rows, HIDDEN)?;
            b.upload(&Random::new(7).floats(rows * HIDDEN), &mut x)?;
            b.upload(&Random::new(8).floats(rows * COUNT), &mut router)?;
            let mut host = Vec::new();
            let spent = METER.best(|| {
                b.experts(&x, &router, &experts, &mut out)?;
                b.download(&out, &mut host)
            })?;
            println!("{precision:?}, {rows} rows: {}", times(&spent));
        }
    }
    Ok(())
}
