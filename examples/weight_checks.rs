//! What the checks of weights cost: `cargo run --release --example weight_checks -- MODEL.gguf`.
//!
//! Prints, as medians of nine: a warm load of the whole model on the CPU with and without comparing
//! every tensor with the manifest; making the manifest; and summing up the loaded weights, which a
//! shard's restart does.

use std::path::Path;
use std::time::{Duration, Instant};

use dunlin_cpu::{CpuBackend, CpuOptions};
use dunlin_model::engine::StageSpec;
use dunlin_model::loader::ModelFiles;
use dunlin_model::manifest::Manifest;
use dunlin_model::stage::StageWeights;

fn main() -> anyhow::Result<()> {
    let path = std::env::args().nth(1).ok_or_else(|| anyhow::anyhow!("name a model file"))?;
    let plain = ModelFiles::open(Path::new(&path))?;
    let threads = std::thread::available_parallelism().map_or(1, |n| n.get());
    let mut held = plain.clone();
    held.hold_to(Manifest::make(&plain, threads));
    let stage = StageSpec {
        layers: 0..plain.spec().layers,
        first: true,
        last: true,
        rank: 0,
        ranks: 1,
        kv_blocks: 1,
        block_tokens: 16,
        max_tokens: 16,
    };
    let backend = CpuBackend::new(CpuOptions::default())?;
    let weights = StageWeights::load(&backend, &held, &stage)?;
    let (mut load, mut checked, mut made, mut summed) = (vec![], vec![], vec![], vec![]);
    // Alternating, so that both see the same machine.
    for _ in 0..9 {
        load.push(timed(|| StageWeights::load(&backend, &plain, &stage).map(drop))?);
        checked.push(timed(|| StageWeights::load(&backend, &held, &stage).map(drop))?);
        made.push(timed(|| Ok::<_, anyhow::Error>(drop(Manifest::make(&plain, threads))))?);
        summed.push(timed(|| {
            weights.verify(&backend).map_err(|c| anyhow::anyhow!("'{}' changed", c.tensor))
        })?);
    }
    println!("{} MB on {threads} threads", plain.bytes() / 1_000_000);
    for (what, times) in [
        ("load, nothing compared", &mut load),
        ("load, every tensor compared", &mut checked),
        ("making the manifest", &mut made),
        ("summing up the weights in memory", &mut summed),
    ] {
        times.sort();
        println!("{what:34} {:8.1?} (best {:.1?})", times[times.len() / 2], times[0]);
    }
    Ok(())
}

fn timed<E>(work: impl FnOnce() -> Result<(), E>) -> Result<Duration, E> {
    let begun = Instant::now();
    work()?;
    Ok(begun.elapsed())
}
