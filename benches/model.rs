//! How fast a whole model runs on this machine: prefill and decode of one sequence, engine level.
//!
//! `cargo bench --bench model -- --model FILE --threads 2`. No server, no actors: one
//! transformer engine is stepped directly, as `llama-bench` does it, with the same two tests. A
//! prompt of random tokens runs in one step on an empty store (`pp512`), and single tokens run one
//! after another from position 0 (`tg128`). Loading and one warm-up of each test are not counted.
//! Greedy drawing is counted, which `llama-bench` leaves out.
//!
//! Beside decode stands what memory delivers: the read bandwidth of all threads together, measured
//! in the same process, and the share of it that reading every weight once per token takes.
//!
//! `--contexts 128,1024,4096,8192` measures how decode grows instead: a prompt fills the context
//! but for its last tokens, and those are made one by one.

use clap::Parser;
use dunlin_backend::Backend;
use dunlin_cpu::{CpuBackend, CpuOptions};
use dunlin_model::engine::{Alone, Batch, BatchSeq, Engine, SampleSpec, StageOutput, StageSpec};
use dunlin_model::loader::ModelFiles;
use dunlin_model::sampling::SamplingParams;
use dunlin_model::stage::{StageWeights, kv_block_bytes};
use dunlin_model::transformer::TransformerEngine;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

const BLOCK_TOKENS: usize = 16;
/// Tokens made at the end of each context.
const GROWN_TOKENS: u32 = 16;
/// Tokens of one step while a context is filled.
const CHUNK_TOKENS: u32 = 512;

/// Measure prefill and decode of one sequence on a model, without a server.
#[derive(Debug, Parser)]
#[command(name = "model")]
struct Args {
    /// Model to measure: a GGUF file or a folder with safetensors
    #[arg(long)]
    model: PathBuf,
    /// Threads that compute
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..=1024))]
    threads: u32,
    /// Tokens of the prompt in the prefill test
    #[arg(long, default_value_t = 512, value_parser = clap::value_parser!(u32).range(1..=65536))]
    prompt: u32,
    /// Tokens generated in the decode test
    #[arg(long, default_value_t = 128, value_parser = clap::value_parser!(u32).range(1..=65536))]
    generate: u32,
    /// Repeats of each test; the medians are shown
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=1000))]
    runs: u32,
    /// Measure decode at these contexts (in tokens) instead, such as 128,1024,4096,8192
    #[arg(long, value_delimiter = ',', value_parser = clap::value_parser!(u32).range(32..=1 << 20))]
    contexts: Vec<u32>,
    /// Print one JSON object instead of text
    #[arg(long)]
    json: bool,
    /// Passed by `cargo bench`; has no effect
    #[arg(long, hide = true)]
    bench: bool,
}

fn main() -> anyhow::Result<()> {
    let args = Args::parse();
    let files = ModelFiles::open(&args.model)?;
    let threads = args.threads as usize;
    let options = CpuOptions { threads, ..CpuOptions::default() };
    if !args.contexts.is_empty() {
        return growth(&files, options, &args);
    }
    let mut subject = Subject::load(&files, options, args.prompt.max(args.generate), args.prompt)?;

    // Bandwidth before and after, so that a busy moment does not make decode look better.
    let mut bandwidth = read_bandwidth(threads);
    subject.prefill(args.prompt)?;
    subject.decode(args.generate)?;
    let (mut prefill, mut decode) = (Vec::new(), Vec::new());
    for _ in 0..args.runs {
        prefill.push(subject.prefill(args.prompt)?);
        decode.push(subject.decode(args.generate)?);
    }
    bandwidth = bandwidth.max(read_bandwidth(threads));

    let share = subject.decode_bytes.map(|bytes| bytes as f64 * median(&decode) / bandwidth);
    if args.json {
        let report = serde_json::json!({
            "model": args.model,
            "backend": subject.backend.info().description,
            "threads": args.threads,
            "prompt_tokens": args.prompt,
            "generated_tokens": args.generate,
            "prefill_tokens_per_second": prefill,
            "decode_tokens_per_second": decode,
            "read_bandwidth_bytes_per_second": bandwidth,
            "decode_bytes_per_token": subject.decode_bytes,
            "decode_share_of_bandwidth": share,
            "kv_bytes_per_token": subject.kv_bytes_per_token,
        });
        println!("{report}");
        return Ok(());
    }
    println!("{}, {}", args.model.display(), subject.backend.info().description);
    println!("prefill {:5}: {}", args.prompt, spread(&prefill));
    println!("decode  {:5}: {}", args.generate, spread(&decode));
    println!("read bandwidth: {:.1} GB/s", bandwidth / 1e9);
    if let (Some(bytes), Some(share)) = (subject.decode_bytes, share) {
        let percent = 100.0 * share;
        println!("decode reads {:.1} MB a token: {percent:.0} % of it", bytes as f64 / 1e6);
    }
    Ok(())
}

/// Decode at several contexts, of which the model may not reach all.
fn growth(files: &ModelFiles, options: CpuOptions, args: &Args) -> anyhow::Result<()> {
    let (limit, mut contexts) = (files.spec().context, args.contexts.clone());
    contexts.sort_unstable();
    contexts.retain(|context| {
        let reached = *context as usize <= limit;
        if !reached {
            eprintln!("{context}: the model ends at {limit} tokens");
        }
        reached
    });
    let Some(longest) = contexts.last() else { anyhow::bail!("no context to measure") };
    let mut subject = Subject::load(files, options, *longest, CHUNK_TOKENS)?;
    subject.decode(GROWN_TOKENS)?;
    let (mut filled, mut rows) = (0, Vec::new());
    for context in contexts {
        let first = context - GROWN_TOKENS;
        while filled < first {
            let end = first.min(filled + CHUNK_TOKENS);
            subject.step(subject.prompt(filled..end), filled)?;
            filled = end;
        }
        let mut ms = Vec::new();
        for _ in 0..args.runs {
            ms.push(1e3 / subject.decode_from(first, GROWN_TOKENS)?);
        }
        if !args.json {
            let kv_mb = subject.kv_bytes_per_token as f64 * f64::from(context) / 1e6;
            println!("context {context:6}: {:6.2} ms a token, {kv_mb:.1} MB of KV", median(&ms));
        }
        rows.push(serde_json::json!({"context": context, "ms_per_token": ms}));
    }
    if args.json {
        println!("{}", serde_json::json!({"model": args.model, "contexts": rows}));
    }
    Ok(())
}

/// A whole model in one engine.
struct Subject {
    backend: Arc<CpuBackend>,
    engine: TransformerEngine<CpuBackend>,
    vocab: u32,
    /// Weight bytes that one token reads; unknown where experts are chosen per token.
    decode_bytes: Option<u64>,
    kv_bytes_per_token: u64,
}

impl Subject {
    /// For sequences of at most `tokens` tokens, run at most `step` at once.
    fn load(
        files: &ModelFiles,
        options: CpuOptions,
        tokens: u32,
        step: u32,
    ) -> anyhow::Result<Self> {
        let backend = Arc::new(CpuBackend::new(options)?);
        let spec = files.spec();
        let stage = StageSpec::whole(
            spec.layers,
            (tokens as usize).div_ceil(BLOCK_TOKENS),
            BLOCK_TOKENS,
            step as usize,
        );
        let weights = Arc::new(StageWeights::load(backend.as_ref(), files, &stage)?);
        let mut bytes = weights.bytes(backend.as_ref());
        if let (Some(embedding), Some(_)) = (&weights.embedding, &weights.head) {
            // A separate embedding gives one row a token.
            bytes -= backend.weight_bytes(embedding);
        }
        let decode_bytes = spec.moe.is_none().then_some(bytes);
        let block_bytes = kv_block_bytes(spec, &stage, options.kv_dtype());
        let kv_bytes_per_token = block_bytes / BLOCK_TOKENS as u64;
        let engine = TransformerEngine::new(backend.clone(), weights, stage)?;
        let vocab = u32::try_from(spec.vocab)?;
        Ok(Self { backend, engine, vocab, decode_bytes, kv_bytes_per_token })
    }

    /// Tokens per second of a prompt run in one step.
    fn prefill(&mut self, tokens: u32) -> anyhow::Result<f64> {
        let ids = self.prompt(0..tokens);
        let start = Instant::now();
        self.step(ids, 0)?;
        Ok(f64::from(tokens) / start.elapsed().as_secs_f64())
    }

    /// Any ids do; a multiplicative step keeps them apart and the same in every run.
    fn prompt(&self, positions: Range<u32>) -> Vec<u32> {
        positions.map(|i| i.wrapping_mul(2_654_435_761) % self.vocab).collect()
    }

    /// Tokens per second of single tokens from an empty context on.
    fn decode(&mut self, tokens: u32) -> anyhow::Result<f64> {
        self.decode_from(0, tokens)
    }

    /// The same behind what the context holds, each token drawn from the one before.
    fn decode_from(&mut self, first: u32, tokens: u32) -> anyhow::Result<f64> {
        let mut token = 1 % self.vocab;
        let start = Instant::now();
        for position in first..first + tokens {
            token = self.step(vec![token], position)?;
        }
        Ok(f64::from(tokens) / start.elapsed().as_secs_f64())
    }

    /// Runs tokens from `position` on and draws the next greedily.
    fn step(&mut self, tokens: Vec<u32>, position: u32) -> anyhow::Result<u32> {
        let end = position as usize + tokens.len();
        let sample = SampleSpec {
            params: SamplingParams::default(),
            prompt: Vec::new(),
            output: Vec::new(),
            forbidden: Vec::new(),
        };
        let seq = BatchSeq {
            request: 1,
            tokens,
            position,
            blocks: (0..u32::try_from(end.div_ceil(BLOCK_TOKENS))?).collect(),
            sample: Some(sample),
            prompt_logprobs: None,
        };
        let batch = Batch { seqs: vec![seq], copies: Vec::new() };
        let drawn = match self.engine.step(&batch, None, &mut Alone)? {
            StageOutput::Sampled(drawn) => drawn,
            StageOutput::Hidden(_) => anyhow::bail!("the last stage gave activations"),
        };
        let first = drawn.first().ok_or_else(|| anyhow::anyhow!("no token was drawn"))?;
        first.token.map_err(|why| anyhow::anyhow!("no token could be drawn: {why:?}"))
    }
}

/// Bytes per second that all threads together read from 256 MiB, more than the caches hold.
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
                    std::hint::black_box(sums)
                });
            }
        });
        best = best.min(start.elapsed().as_secs_f64());
    }
    (buffer.len() * 8) as f64 / best
}

fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let (low, high) = (sorted.get((sorted.len().max(1) - 1) / 2), sorted.get(sorted.len() / 2));
    (low.copied().unwrap_or(f64::NAN) + high.copied().unwrap_or(f64::NAN)) / 2.0
}

fn spread(values: &[f64]) -> String {
    let low = values.iter().copied().fold(f64::INFINITY, f64::min);
    let high = values.iter().copied().fold(0.0, f64::max);
    let count = values.len();
    format!("{:.1} tokens/s (median of {count}, {low:.1} to {high:.1})", median(values))
}
