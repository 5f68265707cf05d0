//! `dunlin bench`: loads an OpenAI-compatible endpoint and reports what its clients saw.
//!
//! How it measures: clocks are the client's. A request's time runs from when it was due (before
//! its connection is opened) to its stream's end. TTFT ends with the first chunk that holds text,
//! ITL is the gap between such chunks, tokens are counted by the server's `usage`. Chunks that one
//! read delivers have gaps of 0: where tokens come that fast, TPOT is the figure to trust. The load
//! generator shares this machine's cores with the server if the server runs here.
//!
//! Several concurrencies are run one after the other and printed as rows of one table. Where the
//! endpoint's own `/metrics` tell of steps, the report says what a step took and how much of it the
//! device was at work: replicas of that node only.
//!
//! With `--device` there is no endpoint: [`device`] measures what a device reaches by itself.
//!
//! [`plan`] draws the requests and [`stats`] computes the figures, [`intrude`] those of a long prompt
//! among running streams, [`server`] reads the server's own; this file sends and prints.

pub mod device;
mod intrude;
mod plan;
mod server;
mod stats;
#[cfg(test)]
mod tests;

use crate::client::{Client, ClientError, EventStream};
use anyhow::{Context, Result, bail, ensure};
use clap::Args;
use indicatif::{ProgressBar, ProgressStyle};
use intrude::Intruder;
use plan::{Arrivals, Lengths, Options, Planned};
use serde_json::{Value, json};
use server::Steps;
use stats::{Outcome, Report, Sample, Slo, Spread};
use std::collections::VecDeque;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::Mutex;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep_until, timeout};

#[derive(Debug, Clone, Args)]
pub struct BenchArgs {
    /// The endpoint, such as http://127.0.0.1:8080 [default: the cluster of the config]
    #[arg(long)]
    pub url: Option<String>,
    /// Measure this device instead, without a cluster: cpu, wgpu:0, ...
    #[arg(long, value_name = "DEVICE", conflicts_with = "url")]
    pub device: Option<String>,
    /// Sent as `Authorization: Bearer` [default: $DUNLIN_API_KEY]
    #[arg(long, hide_default_value = true)]
    pub api_key: Option<String>,
    /// Name of the model to ask for [default: the first that the endpoint lists]
    #[arg(long)]
    model_name: Option<String>,
    /// How many requests to measure
    #[arg(long, short = 'n', default_value_t = 64)]
    requests: usize,
    /// How many requests of each stream to measure, instead: `--requests` follows `-c`
    #[arg(long, conflicts_with_all = ["requests", "rate"])]
    per_stream: Option<usize>,
    /// Requests sent before, and not measured
    #[arg(long, default_value_t = 2)]
    warmup: usize,
    /// Keep this many requests going at all times; several, such as 1,4,16: a row of figures each
    #[arg(long, short = 'c', default_value = "4", value_delimiter = ',', conflicts_with = "rate")]
    concurrency: Vec<usize>,
    /// Send requests as a Poisson process, this many a second, instead
    #[arg(long)]
    rate: Option<f64>,
    /// Send requests in batches of this many instead, each when the one before is done, all of a
    /// batch computed to its longest output and only the asked tokens counted: static batching
    #[arg(long, value_name = "N", conflicts_with_all = ["concurrency", "rate", "per_stream"])]
    #[arg(conflicts_with_all = ["intrude", "disconnect"])]
    static_batches: Option<usize>,
    /// Prompt length in tokens: N, uniform:LOW..HIGH or lognormal:MEDIAN,SIGMA,MAX
    #[arg(long, default_value = "128")]
    prompt_tokens: Lengths,
    /// Output length in tokens, likewise; stop tokens are ignored to reach it
    #[arg(long, default_value = "64")]
    output_tokens: Lengths,
    /// Share of requests whose prompts begin alike
    #[arg(long, default_value_t = 0.0)]
    shared_prefix: f64,
    /// Length of what is shared
    #[arg(long, default_value_t = 64)]
    prefix_tokens: u32,
    /// How many different prefixes are shared
    #[arg(long, default_value_t = 1)]
    prefix_groups: u32,
    /// Share of requests whose client hangs up before the end
    #[arg(long, default_value_t = 0.0)]
    disconnect: f64,
    /// Prompts are drawn from these token ids
    #[arg(long, value_name = "LOW..HIGH", default_value = "1000..20000", value_parser = id_range)]
    token_ids: (u32, u32),
    /// 0 is greedy; else requests are seeded one by one
    #[arg(long, default_value_t = 0.0)]
    temperature: f32,
    /// Draws the whole load
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Longest wait for one request, in seconds
    #[arg(long, default_value_t = 600.0)]
    timeout: f64,
    /// A prompt of so many tokens that arrives so many seconds after the run began: how long
    /// the others' gaps are meanwhile, against before
    #[arg(long, value_name = "TOKENS@SECONDS", conflicts_with = "rate")]
    intrude: Option<Intruder>,
    /// Objective for goodput: time to first token
    #[arg(long)]
    slo_ttft_ms: Option<f64>,
    /// Objective for goodput: mean time per output token after the first
    #[arg(long)]
    slo_tpot_ms: Option<f64>,
    /// Objective for goodput: whole request
    #[arg(long)]
    slo_e2e_ms: Option<f64>,
    /// Write the figures to this file
    #[arg(long)]
    pub json: Option<PathBuf>,
}

fn id_range(text: &str) -> Result<(u32, u32), String> {
    let bad = || format!("{text:?} is no range of token ids: use LOW..HIGH");
    let (low, high) = text.split_once("..").ok_or_else(bad)?;
    let range = (low.parse().map_err(|_| bad())?, high.parse().map_err(|_| bad())?);
    if range.0 < range.1 { Ok(range) } else { Err(bad()) }
}

/// Runs the load against `url` and prints the report; fails if no request got through.
pub async fn run(args: &BenchArgs, url: &str) -> Result<()> {
    let rows = rows(args)?;
    let key = args.api_key.clone().or_else(|| std::env::var("DUNLIN_API_KEY").ok());
    let client = Client::new(url, key)?;
    let model = match &args.model_name {
        Some(model) => model.clone(),
        None => first_model(&client).await?,
    };
    let sender = Arc::new(Sender {
        client,
        model,
        temperature: args.temperature,
        seed: args.seed,
        limit: Duration::from_secs_f64(args.timeout),
    });
    let slo = Slo { ttft_ms: args.slo_ttft_ms, tpot_ms: args.slo_tpot_ms, e2e_ms: args.slo_e2e_ms };
    let mut figures = Vec::new();
    for (number, options) in rows.iter().enumerate() {
        let (report, steps) = measure_row(&sender, args, options, slo).await?;
        if rows.len() > 1 {
            if number == 0 {
                println!("{} at {}, seed {}", sender.model, sender.client.authority(), args.seed);
                println!("{}", row_head());
            }
            println!("{}", row_of(options, &report, steps.as_ref()));
        } else {
            print(&sender, options, &report);
            if let Some(steps) = &steps {
                println!("{steps}");
            }
        }
        ensure!(report.done + report.hung_up > 0, "no request got an answer");
        figures.push(as_json(&sender, options, &report, steps.as_ref()));
    }
    if let Some(path) = &args.json {
        let figures = if figures.len() == 1 { figures.remove(0) } else { Value::Array(figures) };
        let text = serde_json::to_string_pretty(&figures)?;
        std::fs::write(path, text + "\n").with_context(|| format!("writing {}", path.display()))?;
    }
    Ok(())
}

/// One run, its warm-up before it.
async fn measure_row(
    sender: &Arc<Sender>,
    args: &BenchArgs,
    options: &Options,
    slo: Slo,
) -> Result<(Report, Option<Steps>)> {
    // Warm-up requests have a seed of their own, so that they warm no measured prefix.
    let warmup = Options {
        requests: args.warmup,
        disconnect: 0.0,
        seed: !args.seed,
        arrivals: match options.arrivals {
            Arrivals::Closed { .. } => options.arrivals,
            Arrivals::Poisson { .. } => Arrivals::Closed { concurrency: 1 },
            Arrivals::Batches { size } => Arrivals::Closed { concurrency: size },
        },
        ..options.clone()
    };
    let (samples, _) = drive(sender, &warmup, None, &ProgressBar::hidden()).await;
    if let Some(Outcome::Failed(kind)) = samples.first().map(|s| &s.outcome) {
        bail!("a warm-up request failed: {kind}");
    }
    let bar = ProgressBar::new(options.requests as u64);
    let style = ProgressStyle::with_template("{bar:40} {pos}/{len} requests, {elapsed}, {msg}");
    bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
    let before = Steps::read(&sender.client).await;
    let (mut samples, wall) = drive(sender, options, args.intrude, &bar).await;
    let after = Steps::read(&sender.client).await;
    bar.finish_and_clear();
    if args.intrude.is_some() {
        let intruder = samples.pop().context("the intruding request")?;
        println!("{}", intrude::judge(&samples, &intruder)?);
    }
    Ok((stats::report(&samples, wall, slo), Steps::between(before, after)))
}

/// What to run: one row, or one for each concurrency.
fn rows(args: &BenchArgs) -> Result<Vec<Options>> {
    for (name, share) in [("shared-prefix", args.shared_prefix), ("disconnect", args.disconnect)] {
        ensure!((0.0..=1.0).contains(&share), "--{name} is a share: 0 to 1, not {share}");
    }
    let positive = |value: f64| value.is_finite() && value > 0.0;
    ensure!(positive(args.timeout), "--timeout must be more than 0");
    ensure!(args.requests > 0, "--requests must be at least 1");
    ensure!(args.per_stream != Some(0), "--per-stream must be at least 1");
    let options = |arrivals, requests, row: usize| Options {
        requests,
        arrivals,
        prompt: args.prompt_tokens,
        output: args.output_tokens,
        shared_prefix: args.shared_prefix,
        prefix_tokens: args.prefix_tokens,
        prefix_groups: args.prefix_groups,
        disconnect: args.disconnect,
        ids: args.token_ids,
        // No row finds the prompts of another in a cache.
        seed: args.seed.wrapping_add(row as u64),
    };
    if let Some(per_second) = args.rate {
        ensure!(positive(per_second), "--rate must be more than 0");
        return Ok(vec![options(Arrivals::Poisson { per_second }, args.requests, 0)]);
    }
    if let Some(size) = args.static_batches {
        ensure!(size > 0, "--static-batches must be at least 1");
        return Ok(vec![options(Arrivals::Batches { size }, args.requests, 0)]);
    }
    ensure!(!args.concurrency.contains(&0), "--concurrency must be at least 1");
    let row = |(row, &concurrency): (usize, &usize)| {
        let requests = args.per_stream.map_or(args.requests, |each| each * concurrency);
        options(Arrivals::Closed { concurrency }, requests, row)
    };
    Ok(args.concurrency.iter().enumerate().map(row).collect())
}

async fn first_model(client: &Client) -> Result<String> {
    let models = client.get("/v1/models").await?;
    let id = models["data"][0]["id"].as_str();
    Ok(id.context("the endpoint lists no model; name one with --model-name")?.to_owned())
}

/// What all requests of a run share.
struct Sender {
    client: Client,
    model: String,
    temperature: f32,
    seed: u64,
    limit: Duration,
}

/// Sends a whole run. Returns what was seen, an intruder last, and how long it took, in seconds.
async fn drive(
    sender: &Arc<Sender>,
    options: &Options,
    intruder: Option<Intruder>,
    bar: &ProgressBar,
) -> (Vec<Sample>, f64) {
    let planned: VecDeque<_> = plan::plan(options).into_iter().enumerate().collect();
    let begun = Instant::now();
    let mut tasks = JoinSet::new();
    let intruding = intruder.map(|intruder| {
        let (sender, request) = (sender.clone(), intruder.request(options));
        tokio::spawn(async move {
            sleep_until(begun + intruder.after).await;
            sender.measure(usize::MAX, request, (begun, Instant::now())).await
        })
    });
    match options.arrivals {
        Arrivals::Closed { concurrency } => {
            drive_closed(sender, &mut tasks, planned, concurrency, begun, bar);
        }
        Arrivals::Poisson { .. } => {
            for (number, request) in planned {
                let (sender, bar) = (sender.clone(), bar.clone());
                tasks.spawn(async move {
                    // Counted from when it was due, so that a late sender hides nothing.
                    let due = begun + Duration::from_secs_f64(request.due);
                    sleep_until(due).await;
                    let sample = sender.measure(number, request, (begun, due)).await;
                    bar.inc(1);
                    vec![sample]
                });
            }
        }
        Arrivals::Batches { size } => {
            let (sender, bar) = (sender.clone(), bar.clone());
            tasks.spawn(async move { drive_batches(&sender, planned, size, begun, &bar).await });
        }
    }
    let mut samples: Vec<_> = tasks.join_all().await.into_iter().flatten().collect();
    let wall = begun.elapsed().as_secs_f64();
    if let Some(intruding) = intruding {
        samples.extend(intruding.await);
    }
    (samples, wall)
}

/// As many workers as requests are kept going.
fn drive_closed(
    sender: &Arc<Sender>,
    tasks: &mut JoinSet<Vec<Sample>>,
    planned: VecDeque<(usize, Planned)>,
    concurrency: usize,
    begun: Instant,
    bar: &ProgressBar,
) {
    let queue = Arc::new(Mutex::new(planned));
    for _ in 0..concurrency {
        let (sender, queue, bar) = (sender.clone(), queue.clone(), bar.clone());
        tasks.spawn(async move {
            let mut samples = Vec::new();
            loop {
                let next = queue.lock().await.pop_front();
                let Some((number, request)) = next else { return samples };
                let due = Instant::now();
                samples.push(sender.measure(number, request, (begun, due)).await);
                bar.inc(1);
            }
        });
    }
}

/// A batch starts when the one before has ended.
async fn drive_batches(
    sender: &Arc<Sender>,
    mut planned: VecDeque<(usize, Planned)>,
    size: usize,
    begun: Instant,
    bar: &ProgressBar,
) -> Vec<Sample> {
    let mut samples = Vec::new();
    while !planned.is_empty() {
        let batch = planned.drain(..size.min(planned.len())).collect();
        let mut tasks = JoinSet::new();
        drive_closed(sender, &mut tasks, batch, size, begun, bar);
        samples.extend(tasks.join_all().await.into_iter().flatten());
    }
    samples
}

impl Sender {
    /// `run`: when the run began; `begun`: when this request was due.
    async fn measure(
        &self,
        number: usize,
        request: Planned,
        (run, begun): (Instant, Instant),
    ) -> Sample {
        let mut sample = Sample { sent: (begun - run).as_secs_f64(), ..Sample::default() };
        let seen = self.follow(number, &request, begun, &mut sample);
        sample.outcome = match timeout(self.limit, seen).await {
            Ok(Ok(outcome)) => outcome,
            Ok(Err(error)) => Outcome::Failed(kind(&error)),
            Err(_) => Outcome::Failed("client time-out".into()),
        };
        sample.elapsed = begun.elapsed().as_secs_f64();
        sample
    }

    async fn follow(
        &self,
        number: usize,
        request: &Planned,
        begun: Instant,
        sample: &mut Sample,
    ) -> Result<Outcome, ClientError> {
        let body = json!({
            "model": self.model,
            "prompt": request.prompt,
            "max_tokens": request.computed_tokens,
            "ignore_eos": true,
            "temperature": self.temperature,
            "seed": self.seed.wrapping_add(number as u64) >> 1,
            "stream": true,
            "stream_options": {"include_usage": true},
        });
        let mut stream = self.client.stream("/v1/completions", &body).await?;
        let mut last = begun;
        for chunk in 0.. {
            if request.hang_up_after.is_some_and(|after| chunk >= after) {
                return Ok(Outcome::HungUp);
            }
            if !next_text(&mut stream, sample).await? {
                break;
            }
            if chunk >= request.output_tokens {
                continue; // Padding: computed, but nobody asked for it.
            }
            let now = Instant::now();
            let gap = (now - last).as_secs_f64();
            last = now;
            match sample.ttft {
                None => sample.ttft = Some((now - begun).as_secs_f64()),
                Some(_) => {
                    sample.gaps.push(gap);
                    sample.ends.push(sample.sent + (now - begun).as_secs_f64());
                }
            }
        }
        sample.output_tokens = sample.output_tokens.min(request.output_tokens.into());
        Ok(Outcome::Done)
    }
}

/// Reads up to the next chunk with text; `false` at the stream's end. Takes in usage.
async fn next_text(stream: &mut EventStream, sample: &mut Sample) -> Result<bool, ClientError> {
    while let Some(event) = stream.next().await? {
        let usage = &event["usage"];
        if usage.is_object() {
            let count = |value: &Value| value.as_u64().unwrap_or(0);
            sample.prompt_tokens = count(&usage["prompt_tokens"]);
            sample.output_tokens = count(&usage["completion_tokens"]);
            sample.cached_tokens = count(&usage["prompt_tokens_details"]["cached_tokens"]);
        }
        if event["choices"][0]["text"].as_str().is_some_and(|text| !text.is_empty()) {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Few kinds, so that they can be counted.
fn kind(error: &ClientError) -> String {
    match error {
        ClientError::Refused { status, code, message, .. } => {
            let why = code.as_ref().unwrap_or(message);
            format!("{} {why}", status.as_u16())
        }
        ClientError::Failed { code, message } => {
            format!("in the stream: {}", code.as_ref().unwrap_or(message))
        }
        ClientError::Connect { source, .. } => format!("connect: {}", source.kind()),
        ClientError::Http { .. } => "connection lost".into(),
        other => other.to_string(),
    }
}

fn print(sender: &Sender, options: &Options, report: &Report) {
    let load = match options.arrivals {
        Arrivals::Closed { concurrency } => format!("{concurrency} at a time"),
        Arrivals::Poisson { per_second } => format!("Poisson, {per_second} a second"),
        Arrivals::Batches { size } => format!("padded batches of {size}"),
    };
    println!("{} at {}, {load}, seed {}", sender.model, sender.client.authority(), options.seed);
    println!(
        "requests     {} done, {} hung up (planned), {} failed, in {:.2} s",
        report.done, report.hung_up, report.failed, report.wall_s
    );
    for (kind, count) in &report.errors {
        println!("  failed     {count} x {kind}");
    }
    println!(
        "tokens       {} prompt ({} cached), {} output, {:.2} per chunk",
        report.prompt_tokens, report.cached_tokens, report.output_tokens, report.tokens_per_chunk
    );
    println!(
        "throughput   {:.2} requests/s, {:.1} output tokens/s, {:.1} total tokens/s",
        report.requests_per_s, report.output_tokens_per_s, report.total_tokens_per_s
    );
    let Slo { ttft_ms, tpot_ms, e2e_ms } = report.slo;
    let asked: Vec<String> = [("TTFT", ttft_ms), ("TPOT", tpot_ms), ("end-to-end", e2e_ms)]
        .iter()
        .filter_map(|(name, limit)| limit.map(|ms| format!("{name} <= {ms} ms")))
        .collect();
    if !asked.is_empty() {
        println!(
            "goodput      {:.2} requests/s, {:.1} output tokens/s ({} of {} with {})",
            report.goodput_requests_per_s,
            report.goodput_tokens_per_s,
            report.good,
            report.done,
            asked.join(", ")
        );
    }
    println!();
    let names = ["mean", "p50", "p90", "p95", "p99", "max"];
    println!("{:<12}{}", "ms", names.map(|name| format!("{name:>10}")).concat());
    for (name, spread) in [
        ("TTFT", &report.ttft_ms),
        ("ITL", &report.itl_ms),
        ("TPOT", &report.tpot_ms),
        ("end-to-end", &report.e2e_ms),
    ] {
        println!("{name:<12}{}", row(spread));
    }
}

fn row_head() -> String {
    let names = ["streams", "tok/s", "TTFT p50", "p99", "ITL p50", "p99", "step", "beside"];
    names.map(|name| format!("{name:>10}")).concat() + "  (ms; beside the device, of a step)"
}

fn row_of(options: &Options, report: &Report, steps: Option<&Steps>) -> String {
    let Arrivals::Closed { concurrency } = options.arrivals else { return String::new() };
    let (ttft, itl) = (&report.ttft_ms, &report.itl_ms);
    let figures = [report.output_tokens_per_s, ttft.p50, ttft.p99, itl.p50, itl.p99];
    let server = steps.map(|s| format!("{:>10.2}{:>9.1}%", s.mean_ms(), s.beside_percent()));
    format!("{concurrency:>10}{}", figures.map(|f| format!("{f:>10.2}")).concat())
        + &server.unwrap_or_default()
        + &if report.failed > 0 { format!("  {} failed", report.failed) } else { String::new() }
}

fn row(spread: &Spread) -> String {
    let Spread { mean, p50, p90, p95, p99, max, .. } = *spread;
    [mean, p50, p90, p95, p99, max].map(|ms| format!("{ms:>10.2}")).concat()
}

fn as_json(sender: &Sender, options: &Options, report: &Report, steps: Option<&Steps>) -> Value {
    json!({
        "schema": "dunlin-bench/1",
        "model": sender.model,
        "endpoint": sender.client.authority(),
        "temperature": sender.temperature,
        "load": format!("{options:?}"),
        "seed": options.seed,
        "report": report,
        "steps": steps.map(Steps::as_json),
    })
}
