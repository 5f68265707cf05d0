//! `dunlin faults soak`: fresh random runs until the time is over.

use super::many::{Many, Tally};
use super::run::{how, jobs};
use super::runner::{Job, Runner};
use super::{HowArgs, folder, mode_name};
use crate::signals::Signals;
use anyhow::{Result, ensure};
use dunlin_faults::plan::parse_duration;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Random runs until the time is over; keeps every run that does not pass.
///
/// Seeds are fresh each time: they begin at a number made of the clock, which is printed. Ctrl-C
/// ends early, with the summary of what was made.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  dunlin faults soak --budget 10m
  dunlin faults soak --budget 8h --plan plans/swarm.toml --mode process --out nightly")]
pub struct SoakArgs {
    /// How long: 90s, 10m, 8h
    #[arg(long, default_value = "10m", value_parser = budget)]
    budget: Duration,
    /// A fault plan with a [swarm]
    #[arg(long, default_value = "plans/swarm.toml")]
    plan: PathBuf,
    #[command(flatten)]
    how: HowArgs,
    /// Begin at this seed instead of a fresh one
    #[arg(long)]
    seed: Option<u64>,
    /// Runs at once [default: in the simulator one a core, with processes one]
    #[arg(long, value_name = "N")]
    jobs: Option<usize>,
    /// Folder for the summary and the runs that did not pass [default: .dunlin/faults/...]
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
}

fn budget(text: &str) -> Result<Duration, String> {
    let us = parse_duration(text).filter(|us| *us > 0);
    us.map(Duration::from_micros).ok_or_else(|| format!("{text:?} is no time: write 90s, 10m, 8h"))
}

pub async fn run(args: SoakArgs) -> Result<ExitCode> {
    let (plan, mode) = args.how.load(&args.plan)?;
    ensure!(
        plan.swarm.is_some() || args.seed.is_some(),
        "{}: without a [swarm] every seed has the same faults; add one, or name a --seed",
        plan.file()
    );
    let base = args.seed.unwrap_or_else(fresh_seed);
    let out = args
        .out
        .unwrap_or_else(|| folder::default(&plan.name, mode_name(mode), &format!("soak-{base}")));
    eprintln!("soak: {} in mode {}, seeds from {base}", plan.name, mode_name(mode));
    let repro = format!(
        "dunlin faults soak --plan {} --mode {} --seed {base} --budget {}s",
        args.plan.display(),
        mode_name(mode),
        args.budget.as_secs()
    );
    let many = Many { plan: plan.name.clone(), mode, repro, out, total: None };
    let plan = Arc::new(plan);
    let work = (base..).map(|seed| Job { plan: plan.clone(), mode, seed, at: Vec::new() });
    let runner = Runner { how: Arc::new(how()?), keep: many.out.clone() };
    let mut signals = Signals::catch()?;
    let mut tally = Tally::new(None);
    let began = std::time::Instant::now();
    let all = runner.all(work, jobs(args.jobs, mode)?, |finished| {
        tally.add(finished);
        began.elapsed() < args.budget
    });
    let in_time = tokio::time::timeout(args.budget, all);
    if signals.or(in_time).await.is_none() {
        eprintln!("interrupted");
    }
    tally.close(&many, None)
}

/// Below 2^53, as everything that goes through TOML and JSON.
fn fresh_seed() -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    (now.as_millis() as u64).wrapping_mul(1000) % (1 << 52)
}
