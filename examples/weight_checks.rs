//! What the checks of weights cost: `cargo run --release --example weight_checks -- MODEL.gguf`.
//!
//! Prints, as means of twenty: a warm load of the whole model on the CPU with and without comparing
//! every tensor with the manifest; making the manifest; and summing up the loaded weights, which a
//! shard's restart does.

use std::path::Path;
use std::time::Duration;

use dunlin_cpu::{CpuBackend, CpuOptions};
use dunlin_model::engine::StageSpec;
use dunlin_model::loader::ModelFiles;
use dunlin_model::manifest::Manifest;
use dunlin_model::stage::StageWeights;

const TIMES: u32 = 20;

fn main() -> anyhow::Result<()> {
    let path = std::env::args().nth(1).ok_or_else(|| anyhow::anyhow!("name a model file"))?;
    let plain = ModelFiles::open(Path::new(&path))?;
    let threads = std::thread::available_parallelism().map_or(1, |n| n.get());
    let mut held = plain.clone();
    held.hold_to(Manifest::make(&plain, threads));
    let stage = StageSpec::whole(plain.spec().layers, 1, 16, 16);
    let backend = CpuBackend::new(CpuOptions::default())?;
    let weights = StageWeights::load(&backend, &held, &stage)?;
    println!("{} MB on {threads} threads; processor time", plain.bytes() / 1_000_000);
    // Each alone, since processor time has coarse ticks, and so often that these do not matter.
    mean("load, nothing compared", || StageWeights::load(&backend, &plain, &stage).map(drop))?;
    mean("load, every tensor compared", || StageWeights::load(&backend, &held, &stage).map(drop))?;
    mean("making the manifest", || {
        let _ = Manifest::make(&plain, threads);
        anyhow::Ok(())
    })?;
    mean("summing up the weights in memory", || {
        weights.verify(&backend).map_err(|c| anyhow::anyhow!("'{}' changed", c.tensor))
    })?;
    Ok(())
}

fn mean<E>(what: &str, work: impl Fn() -> Result<(), E>) -> Result<(), E> {
    let begun = processor_time();
    for _ in 0..TIMES {
        work()?;
    }
    println!("{what:34} {:8.1?}", (processor_time() - begun) / TIMES);
    Ok(())
}

/// Of all threads of this process so far, in ticks of 10 ms (`man 5 proc`, `stat`).
fn processor_time() -> Duration {
    let text = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
    // The second field is the program's name, in brackets, and may hold spaces.
    let fields = text.rsplit(')').next().unwrap_or_default().split_whitespace();
    let ticks: u64 = fields.skip(11).take(2).filter_map(|field| field.parse::<u64>().ok()).sum();
    Duration::from_millis(ticks * 10)
}
