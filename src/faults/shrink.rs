//! `dunlin faults shrink`: the least that still fails in the same way.

use super::run::{from_either, how};
use super::{HowArgs, exit_code, folder, judge, mode_name, runner};
use crate::signals::{INTERRUPTED, Signals};
use anyhow::{Context, Result};
use dunlin_faults::report::Outcome;
use dunlin_faults::resolved::Resolved;
use dunlin_faults::shrink::{self, ShrinkError, Shrunk};
use dunlin_faults::verdict::{self, Fingerprint};
use indicatif::{ProgressBar, ProgressStyle};
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use tokio::runtime::Handle;

/// Make a failing run smaller: fewer faults, shorter ones, fewer and shorter requests.
///
/// Keeps a step only if the same invariant breaks in the same way. Writes the folder of what is
/// left; its resolved.toml is what to replay. Ctrl-C ends early with the smallest so far.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  dunlin faults shrink --plan plans/swarm.toml --seed 77
  dunlin faults shrink .dunlin/faults/swarm-sim-1..500/seed-77/resolved.toml --runs 2000

Exit codes: 1 it still fails and was shrunk, 0 it does not fail, 3 a file is wrong.")]
pub struct ShrinkArgs {
    /// A resolved plan
    #[arg(conflicts_with = "plan")]
    resolved: Option<PathBuf>,
    /// A fault plan instead
    #[arg(long)]
    plan: Option<PathBuf>,
    /// Its seed [default: the plan's]
    #[arg(long, requires = "plan")]
    seed: Option<u64>,
    #[command(flatten)]
    how: HowArgs,
    /// Try at most so many runs
    #[arg(long, default_value_t = 500)]
    runs: u32,
    /// Folder for the smallest run [default: .dunlin/faults/NAME-MODE-SEED-small]
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
}

pub async fn run(args: ShrinkArgs) -> Result<ExitCode> {
    let start = from_either(args.resolved.as_deref(), args.plan.as_deref(), args.seed, &args.how)?;
    let out = args.out.clone().unwrap_or_else(|| {
        let seed = format!("{}-small", start.seed);
        folder::default(&start.name, mode_name(start.mode), &seed)
    });
    let how = Arc::new(how()?);
    let stop = Arc::new(AtomicBool::new(false));
    let search = {
        let (how, stop, budget) = (how.clone(), stop.clone(), args.runs);
        tokio::task::spawn_blocking(move || search(&start, budget, how, &stop))
    };
    let mut signals = Signals::catch()?;
    let mut search = Box::pin(search);
    let found = match signals.or(&mut search).await {
        Some(found) => found,
        None => {
            // The run that is going on is the last one.
            stop.store(true, Ordering::Relaxed);
            match signals.or(&mut search).await {
                Some(found) => found,
                None => return Ok(ExitCode::from(INTERRUPTED)),
            }
        }
    };
    let shrunk = match found.context("shrinking panicked")? {
        Ok(shrunk) => shrunk,
        Err(e @ ShrinkError::Passes) => {
            println!("{e}");
            return Ok(exit_code(Outcome::Pass));
        }
    };
    finish(&shrunk, &out, how).await
}

fn search(
    start: &Resolved,
    budget: u32,
    how: Arc<dunlin_faults::process::How>,
    stop: &AtomicBool,
) -> Result<Shrunk, ShrinkError> {
    let bar = ProgressBar::new(u64::from(budget.max(1)));
    let style = ProgressStyle::with_template("{bar:40} {pos}/{len} runs, {msg}");
    bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
    bar.enable_steady_tick(Duration::from_millis(200));
    let mut first = None;
    let mut try_one = |resolved: &Resolved| {
        if stop.load(Ordering::Relaxed) {
            return None;
        }
        let found = fingerprint(resolved, how.clone());
        bar.inc(1);
        first = first.take().or(found.clone());
        if found.is_some() && found == first {
            let (faults, requests) = (resolved.faults.len(), resolved.requests.len());
            bar.set_message(format!("fails with {faults} faults and {requests} requests"));
        }
        found
    };
    let shrunk = shrink::shrink(start, budget, &mut try_one);
    bar.finish_and_clear();
    shrunk
}

/// How the run fails, if it does.
fn fingerprint(resolved: &Resolved, how: Arc<dunlin_faults::process::How>) -> Option<Fingerprint> {
    let record = Handle::current().block_on(runner::carry_out(resolved.clone(), how)).ok()?;
    let verdict = verdict::judge(resolved, &record);
    if verdict.outcome == Outcome::Fail { verdict.fingerprint } else { None }
}

/// Runs the smallest once more for its folder, and tells it.
async fn finish(
    shrunk: &Shrunk,
    out: &std::path::Path,
    how: Arc<dunlin_faults::process::How>,
) -> Result<ExitCode> {
    println!("{} fails still, after {} runs:", shrunk.fingerprint, shrunk.runs);
    for line in &shrunk.story {
        println!("  {line}");
    }
    if shrunk.cut_short {
        println!("  cut short: --runs {} may find less", u64::from(shrunk.runs) * 4);
    }
    let resolved = &shrunk.resolved;
    let file = out.join("resolved.toml");
    match runner::carry_out(resolved.clone(), how).await {
        Ok(mut record) => {
            record.repro = format!("dunlin faults replay {}", file.display());
            let (report, _) = judge::judge(resolved, &record);
            let page = folder::write(out, None, resolved, &report, None)?;
            println!("  report: {}", page.display());
        }
        Err(why) => {
            std::fs::create_dir_all(out)?;
            folder::put(out, "resolved.toml", &resolved.to_toml()?)?;
            println!("  the last run could not be made: {why}");
        }
    }
    println!("  repeat: dunlin faults replay {}", file.display());
    Ok(exit_code(Outcome::Fail))
}
