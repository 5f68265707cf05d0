//! `dunlin faults run`, `resolve`, `replay`: one run with its folder, or many with a summary.

use super::many::{self, Many};
use super::runner::{self, Job, Runner};
use super::{HowArgs, PlanArgs, exit_code, folder, judge, mode_name};
use crate::signals::{INTERRUPTED, Signals};
use anyhow::{Context, Result, bail, ensure};
use dunlin_faults::fault::Mode;
use dunlin_faults::plan::Plan;
use dunlin_faults::process::{How, Progress};
use dunlin_faults::record::Record;
use dunlin_faults::report::{Outcome, Report};
use dunlin_faults::resolved::Resolved;
use indicatif::{ProgressBar, ProgressStyle};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Carry a plan out: once, for many seeds, or over its sweep.
///
/// One run writes a folder with everything that was seen and a page, report.html. Many write a
/// summary page, and a folder for each run that did not pass. The last lines repeat what failed.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  dunlin faults run plans/kill-worker.toml                      the plan's own seed
  dunlin faults run plans/kill-worker.toml --mode process --seed 3
  dunlin faults run plans/swarm.toml --seeds 1..500 --jobs 2    a half-open range
  dunlin faults run plans/kill-worker.toml --set fault.kill.when.token=17
  dunlin faults run plans/kill-worker.toml --compare .dunlin/faults/kill-worker-sim-1

Exit codes: 0 PASS, 1 FAIL, 2 INVALID, 3 the plan or the command line is wrong.")]
pub struct RunArgs {
    #[command(flatten)]
    plan: PlanArgs,
    /// Seed of the one run [default: the plan's]
    #[arg(long, conflicts_with = "seeds")]
    seed: Option<u64>,
    /// One run for each seed of this half-open range
    #[arg(long, value_name = "A..B", value_parser = seeds)]
    seeds: Option<(u64, u64)>,
    /// Folder for what comes of it [default: .dunlin/faults/NAME-MODE-SEED]
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// Runs at once [default: in the simulator one a core, with processes one]
    #[arg(long, value_name = "N")]
    jobs: Option<usize>,
    /// Folder of an earlier run to draw beside this one [default: the plan's `report.compare`]
    #[arg(long, value_name = "DIR", conflicts_with = "seeds")]
    compare: Option<PathBuf>,
}

/// Make every draw of a plan and write down what is left: a list of concrete events.
///
/// The file can be read, edited, and carried out again with `replay`.
#[derive(Debug, clap::Args)]
pub struct ResolveArgs {
    #[command(flatten)]
    plan: PlanArgs,
    /// [default: the plan's]
    #[arg(long)]
    seed: Option<u64>,
    /// [default: standard output]
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
}

/// Carry out a resolved plan: the same faults, the same requests.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Example:
  dunlin faults replay .dunlin/faults/swarm-sim-1..500/seed-77/resolved.toml")]
pub struct ReplayArgs {
    /// resolved.toml of a run's folder, or what `resolve` wrote
    resolved: PathBuf,
    /// Folder for what comes of it [default: .dunlin/faults/NAME-MODE-SEED]
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
}

/// `A..B`, half-open and not empty.
pub fn seeds(text: &str) -> Result<(u64, u64), String> {
    let bad = || format!("{text:?} is no range of seeds: write A..B, half-open, like 1..500");
    let (from, to) = text.split_once("..").ok_or_else(bad)?;
    let range = (from.trim().parse().map_err(|_| bad())?, to.trim().parse().map_err(|_| bad())?);
    if range.0 < range.1 { Ok(range) } else { Err(bad()) }
}

/// How many runs are made at once if nobody says so.
pub fn jobs(asked: Option<usize>, mode: Mode) -> Result<usize> {
    ensure!(asked != Some(0), "--jobs must be at least 1");
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    Ok(asked.unwrap_or(if mode == Mode::Sim { cores } else { 1 }))
}

/// Node processes are this program.
pub fn how() -> Result<How> {
    let binary = std::env::current_exe().context("finding this program for the node processes")?;
    Ok(How { binary, ..How::default() })
}

pub async fn run(args: RunArgs) -> Result<ExitCode> {
    let (plan, mode) = args.plan.how.load(&args.plan.plan)?;
    let sweeps = !plan.sweep.is_empty() && args.seed.is_none() && args.seeds.is_none();
    if sweeps {
        return sweep(args, plan, mode).await;
    }
    if let Some((from, to)) = args.seeds {
        let name = format!("{from}..{to}");
        let out =
            args.out.clone().unwrap_or_else(|| folder::default(&plan.name, mode_name(mode), &name));
        let repro = repro(&args.plan.plan, &args.plan.how, mode) + &format!(" --seeds {name}");
        let many = Many { plan: plan.name.clone(), mode, repro, out, total: Some(to - from) };
        let plan = Arc::new(plan);
        let jobs_of = (from..to).map(|seed| Job { plan: plan.clone(), mode, seed, at: Vec::new() });
        let runner = Runner { how: Arc::new(how()?), keep: many.out.clone() };
        return many::seeds(many, &runner, jobs_of, jobs(args.jobs, mode)?, None).await;
    }
    let seed = args.seed.unwrap_or(plan.seed);
    let resolved = plan.resolve(seed, mode)?;
    let compare = args.compare.or_else(|| plan.report.compare.as_ref().map(PathBuf::from));
    let repro = runner::repro(&resolved);
    one(&resolved, repro, Some(plan.text()), args.out, compare.as_deref()).await
}

/// The line that says what to do again, but for the seed.
fn repro(plan: &Path, how: &HowArgs, mode: Mode) -> String {
    let sets: String = how.set.iter().map(|(key, value)| format!(" --set {key}={value}")).collect();
    format!("dunlin faults run {} --mode {}{sets}", plan.display(), mode_name(mode))
}

async fn sweep(args: RunArgs, plan: Plan, mode: Mode) -> Result<ExitCode> {
    let cells = plan.cells();
    let index = |cell: &[(String, String)]| -> Vec<usize> {
        plan.sweep
            .iter()
            .map(|axis| {
                let value = cell.iter().find(|(key, _)| *key == axis.key).map(|(_, v)| v);
                axis.values.iter().position(|v| Some(v) == value).unwrap_or(0)
            })
            .collect()
    };
    let mut work = Vec::with_capacity(cells.len());
    for cell in &cells {
        let plan = plan.cell(cell)?;
        let seed = plan.seed;
        work.push(Job { plan: Arc::new(plan), mode, seed, at: index(cell) });
    }
    let out =
        args.out.clone().unwrap_or_else(|| folder::default(&plan.name, mode_name(mode), "sweep"));
    let repro = repro(&args.plan.plan, &args.plan.how, mode);
    let total = Some(work.len() as u64);
    let many = Many { plan: plan.name.clone(), mode, repro, out, total };
    let runner = Runner { how: Arc::new(how()?), keep: many.out.clone() };
    let jobs = jobs(args.jobs, mode)?;
    many::seeds(many, &runner, work.into_iter(), jobs, Some(&plan.sweep)).await
}

pub fn resolve(args: &ResolveArgs) -> Result<ExitCode> {
    let (plan, mode) = args.plan.how.load(&args.plan.plan)?;
    let resolved = plan.resolve(args.seed.unwrap_or(plan.seed), mode)?.to_toml()?;
    match &args.out {
        None => print!("{resolved}"),
        Some(path) => {
            std::fs::write(path, resolved)
                .with_context(|| format!("writing {}", path.display()))?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

pub async fn replay(args: ReplayArgs) -> Result<ExitCode> {
    let repro = format!("dunlin faults replay {}", args.resolved.display());
    one(&load(&args.resolved)?, repro, None, args.out, None).await
}

pub fn load(path: &Path) -> Result<Resolved> {
    let file = if path.is_dir() { path.join("resolved.toml") } else { path.to_path_buf() };
    let text = std::fs::read_to_string(&file)
        .with_context(|| format!("reading the resolved plan {}", file.display()))?;
    Ok(Resolved::from_toml(&text, &file.display().to_string())?)
}

/// One run: carried out, judged, written down, and told.
async fn one(
    resolved: &Resolved,
    repro: String,
    plan: Option<&str>,
    out: Option<PathBuf>,
    compare: Option<&Path>,
) -> Result<ExitCode> {
    // Read first: a wrong folder should not cost a run.
    let earlier = compare.map(folder::read).transpose()?;
    let mut signals = Signals::catch()?;
    let bar = ProgressBar::new_spinner();
    let style = ProgressStyle::with_template("{spinner} {elapsed} {msg}");
    bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_spinner()));
    bar.enable_steady_tick(Duration::from_millis(120));
    let mut how = how()?;
    let told = bar.clone();
    how.progress = Some(Arc::new(move |at: &Progress| told.set_message(in_words(at))));
    let began = Instant::now();
    let work = runner::carry_out(resolved.clone(), Arc::new(how));
    let Some(record) = signals.or(work).await else {
        bar.finish_and_clear();
        return Ok(ExitCode::from(INTERRUPTED));
    };
    bar.finish_and_clear();
    let record = match record {
        Ok(record) => Record { repro, ..record },
        Err(why) => {
            eprintln!("INVALID: {why}");
            return Ok(exit_code(Outcome::Invalid));
        }
    };
    let (report, _) = judge::judge(resolved, &record);
    let earlier = earlier.as_ref().map(|(resolved, record)| judge::judge(resolved, record).0);
    let seed = resolved.seed.to_string();
    let default = || folder::default(&resolved.name, mode_name(resolved.mode), &seed);
    let out = out.unwrap_or_else(default);
    let page = folder::write(&out, plan, resolved, &report, earlier.as_ref())?;
    tell(&report, &page, began.elapsed());
    Ok(exit_code(report.verdict))
}

fn in_words(at: &Progress) -> String {
    let faults = match at.active.as_slice() {
        [] => String::new(),
        active => format!(", broken: {}", active.join(" ")),
    };
    let Progress { phase, ended, requests, tokens, .. } = at;
    format!("{phase}: {ended}/{requests} requests, {tokens} tokens{faults}")
}

/// What a person reads in the terminal.
fn tell(report: &Report<'_>, page: &Path, took: Duration) {
    let (record, m) = (report.record, &report.metrics);
    let time =
        |us: Option<u64>| us.map_or("-".to_string(), |us| format!("{:.1} ms", us as f64 / 1e3));
    println!(
        "{}  {} ({}, seed {}) in {:.1} s",
        report.verdict,
        record.plan,
        mode_name(record.mode),
        record.seed,
        took.as_secs_f64()
    );
    for (run, figures) in record.faults.iter().zip(&m.faults).take(40) {
        let at = time(run.began_us);
        let proof = run.proof.as_deref().unwrap_or("no proof");
        println!(
            "  {:<18} {:<18} at {at}: {}; MTTD {}, MTTR {}; {proof}",
            run.fault.id,
            run.kind().name(),
            figures.seen,
            time(figures.mttd_us),
            time(figures.mttr_us)
        );
    }
    println!(
        "  {} of {} accepted requests ended well, {} tokens, {} lost, {} repeated; longest gap {}",
        m.ended_well,
        m.accepted,
        m.tokens,
        m.lost_tokens,
        m.duplicated_tokens,
        time(m.longest_gap_us)
    );
    for why in &report.why {
        println!("  {why}");
    }
    println!("  report: {}", page.display());
    println!("  repeat: {}", record.repro);
}

/// A plan and a seed, or a resolved plan: what `shrink` starts from.
pub fn from_either(
    resolved: Option<&Path>,
    plan: Option<&Path>,
    seed: Option<u64>,
    how: &HowArgs,
) -> Result<Resolved> {
    match (resolved, plan) {
        (Some(resolved), None) => load(resolved),
        (None, Some(plan)) => {
            let (plan, mode) = how.load(plan)?;
            Ok(plan.resolve(seed.unwrap_or(plan.seed), mode)?)
        }
        _ => bail!("name a resolved plan, or --plan PLAN with --seed N"),
    }
}
