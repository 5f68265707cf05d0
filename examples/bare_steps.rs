//! What a decode step takes where nothing but the engine runs: no scheduler, actors or sockets.
//!
//!     cargo run --release --example bare_steps -- MODEL.gguf
//!
//! So many sequences of `--from` tokens go on token by token, all in one batch, as a replica's
//! device runs them. `tools/runtime_ratios overhead` sets these figures beside those of a served
//! cluster with the same lengths; the difference is what the runtime costs, the cores it takes
//! from the model included.

use clap::Parser;
use dunlin_cpu::{CpuBackend, CpuOptions};
use dunlin_model::engine::{Alone, Batch, BatchSeq, Engine, SampleSpec, StageOutput, StageSpec};
use dunlin_model::loader::ModelFiles;
use dunlin_model::sampling::SamplingParams;
use dunlin_model::stage::StageWeights;
use dunlin_model::transformer::TransformerEngine;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

const BLOCK_TOKENS: u32 = 16;

#[derive(Debug, Parser)]
struct Args {
    model: PathBuf,
    /// Threads that compute
    #[arg(long, default_value_t = 2)]
    threads: usize,
    /// Sequences in a batch, one run each
    #[arg(long, value_delimiter = ',', default_value = "1,32")]
    streams: Vec<u32>,
    /// Tokens that a sequence has at first
    #[arg(long, default_value_t = 16)]
    from: u32,
    /// Steps of a run
    #[arg(long, default_value_t = 128)]
    steps: u32,
}

fn main() -> anyhow::Result<()> {
    let args = Args::parse();
    let files = ModelFiles::open(&args.model)?;
    let options = CpuOptions { threads: args.threads, ..CpuOptions::default() };
    let backend = Arc::new(CpuBackend::new(options)?);
    let blocks = (args.from + args.steps).div_ceil(BLOCK_TOKENS);
    let most = args.streams.iter().copied().max().unwrap_or(1).max(args.from);
    let spec = files.spec();
    let stage = StageSpec::whole(
        spec.layers,
        (blocks * most) as usize,
        BLOCK_TOKENS as usize,
        most as usize,
    );
    let weights = Arc::new(StageWeights::load(backend.as_ref(), &files, &stage)?);
    let mut engine = TransformerEngine::new(backend, weights, stage)?;
    for &streams in &args.streams {
        let seq = |index: u32, tokens: Vec<u32>, position| BatchSeq {
            request: index.into(),
            tokens,
            position,
            blocks: (index * blocks..(index + 1) * blocks).collect(),
            sample: Some(greedy()),
            prompt_logprobs: None,
        };
        let mut last = Vec::new();
        for index in 0..streams {
            let prompt = (0..args.from).map(|i| 1000 + index * 97 + i * 31).collect();
            last.extend(step(&mut engine, vec![seq(index, prompt, 0)])?);
        }
        let begun = Instant::now();
        for position in args.from..args.from + args.steps {
            let next = last.iter().zip(0..).map(|(id, index)| seq(index, vec![*id], position));
            let seqs = next.collect();
            last = step(&mut engine, seqs)?;
        }
        let ms = begun.elapsed().as_secs_f64() * 1e3 / f64::from(args.steps);
        println!("{streams} {ms:.3} ms a step");
    }
    Ok(())
}

fn greedy() -> SampleSpec {
    let params = SamplingParams::default();
    SampleSpec { params, prompt: Vec::new(), output: Vec::new(), forbidden: Vec::new() }
}

fn step(engine: &mut dyn Engine, mut seqs: Vec<BatchSeq>) -> anyhow::Result<Vec<u32>> {
    for seq in &mut seqs {
        let end = seq.position + seq.tokens.len() as u32;
        seq.blocks.truncate(end.div_ceil(BLOCK_TOKENS) as usize);
    }
    let StageOutput::Sampled(drawn) =
        engine.step(&Batch { seqs, copies: Vec::new() }, None, &mut Alone)?
    else {
        anyhow::bail!("the whole model gave activations");
    };
    let token = |one: &dunlin_model::engine::Sampled| {
        one.token.map_err(|why| anyhow::anyhow!("no token was drawn: {why:?}"))
    };
    drawn.iter().map(token).collect()
}
