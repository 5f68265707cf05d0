//! `dunlin faults`: break a cluster on purpose, and judge what came of it.
//!
//! The crate `dunlin-faults` reads plans, carries them out and judges the record. This folder is
//! its command line: which runs, how many at once, what is printed, where files go, exit codes.

mod folder;
mod judge;
mod kinds;
mod many;
mod report;
mod run;
mod runner;
mod shrink;
mod soak;

use anyhow::Result;
use clap::Subcommand;
use dunlin_faults::fault::Mode;
use dunlin_faults::plan::Plan;
use dunlin_faults::report::Outcome;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// Exit code for a plan, a file or a command line that is wrong.
const WRONG: u8 = 3;

/// Break a cluster on purpose, and prove what held.
///
/// A fault plan (TOML) says what to break, when and where, and the load meanwhile. A run carries it
/// out, in the simulator (many nodes in this process, virtual time, one seed) or on real node
/// processes of this machine, checks every invariant, and writes a report. docs/faults.md teaches
/// how to write one.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Exit codes:
  0  PASS      every fault took effect, and everything that must hold held
  1  FAIL      an invariant does not hold; the line that repeats the run is printed
  2  INVALID   nothing was shown: a fault never fired or left no proof, or the run could not begin
  3            the command line, the plan or a file is wrong

Examples:
  dunlin faults kinds                                       what can be broken
  dunlin faults check plans/*.toml                          are these plans right?
  dunlin faults run plans/kill-worker.toml --mode sim       one run, with a report
  dunlin faults run plans/kill-worker.toml --mode process   the same on real processes
  dunlin faults run plans/swarm.toml --seeds 1..500         500 random runs
  dunlin faults soak --budget 10m                           random runs until the time is over
  dunlin faults shrink --plan plans/swarm.toml --seed 77    the least that still fails")]
pub struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    Check(CheckArgs),
    Run(run::RunArgs),
    Resolve(run::ResolveArgs),
    Replay(run::ReplayArgs),
    Shrink(shrink::ShrinkArgs),
    Soak(soak::SoakArgs),
    Report(report::ReportArgs),
    Kinds(kinds::KindsArgs),
}

/// Read plans and their cluster files, and say what is wrong with them.
///
/// Checks what a run would refuse: unknown keys, kinds, nodes and events, parameters that a kind
/// does not take, kinds that a mode cannot inject. Errors name file, line and the mend.
#[derive(Debug, clap::Args)]
struct CheckArgs {
    /// Fault plans
    #[arg(required = true, value_name = "PLAN")]
    plans: Vec<PathBuf>,
}

/// Which plan, in which mode, with what set over it.
#[derive(Debug, Clone, clap::Args)]
struct PlanArgs {
    /// The fault plan
    plan: PathBuf,
    #[command(flatten)]
    how: HowArgs,
}

#[derive(Debug, Clone, clap::Args)]
struct HowArgs {
    /// sim: this process, virtual time; process: real node processes [default: the plan's first]
    #[arg(long, value_parser = mode)]
    mode: Option<Mode>,
    /// Set one value over the plan's, like --set fault.kill.when.token=17 (faults by their id)
    #[arg(long = "set", value_name = "KEY=VALUE", value_parser = key_value)]
    set: Vec<(String, String)>,
}

fn mode(text: &str) -> Result<Mode, String> {
    match text {
        "sim" => Ok(Mode::Sim),
        "process" => Ok(Mode::Process),
        _ => Err("the modes are sim and process".to_string()),
    }
}

fn key_value(text: &str) -> Result<(String, String), String> {
    let (key, value) = text.split_once('=').ok_or("write it as KEY=VALUE")?;
    Ok((key.trim().to_string(), value.trim().to_string()))
}

fn mode_name(mode: Mode) -> &'static str {
    match mode {
        Mode::Sim => "sim",
        Mode::Process => "process",
    }
}

impl HowArgs {
    /// The plan with everything set, and the mode.
    fn load(&self, plan: &Path) -> Result<(Plan, Mode)> {
        let mut plan = Plan::read(plan)?;
        for (key, value) in &self.set {
            plan.set(key, value)?;
        }
        let first = plan.modes.first().copied().unwrap_or(Mode::Sim);
        let mode = self.mode.unwrap_or(first);
        anyhow::ensure!(
            plan.modes.contains(&mode),
            "{}: the plan is not for mode {:?}; its `modes` are {}",
            plan.file(),
            mode_name(mode),
            plan.modes.iter().map(|m| mode_name(*m)).collect::<Vec<_>>().join(", ")
        );
        Ok((plan, mode))
    }
}

pub async fn run(args: Args) -> Result<ExitCode> {
    let result = match args.command {
        Command::Check(args) => check(&args),
        Command::Run(args) => run::run(args).await,
        Command::Resolve(args) => run::resolve(&args),
        Command::Replay(args) => run::replay(args).await,
        Command::Shrink(args) => shrink::run(args).await,
        Command::Soak(args) => soak::run(args).await,
        Command::Report(args) => report::run(&args),
        Command::Kinds(args) => kinds::run(&args),
    };
    Ok(result.unwrap_or_else(|e| {
        eprintln!("error: {}", crate::explain(&e));
        ExitCode::from(WRONG)
    }))
}

/// How a wrong command line ends: clap's own way, but for `dunlin faults`, where 2 is a verdict.
pub fn refuse(error: &clap::Error) -> ! {
    let faults = std::env::args_os().nth(1).is_some_and(|first| first == "faults");
    if faults && error.use_stderr() {
        let _ = error.print();
        std::process::exit(i32::from(WRONG));
    }
    error.exit()
}

fn exit_code(verdict: Outcome) -> ExitCode {
    ExitCode::from(match verdict {
        Outcome::Pass => 0,
        Outcome::Fail => 1,
        Outcome::Invalid => 2,
    })
}

fn check(args: &CheckArgs) -> Result<ExitCode> {
    let mut wrong = 0;
    for path in &args.plans {
        match checked(path) {
            Ok(line) => println!("{}: {line}", path.display()),
            Err(e) => {
                wrong += 1;
                eprintln!("error: {}", crate::explain(&e));
            }
        }
    }
    if wrong > 0 {
        eprintln!("{wrong} of {} plans are wrong", args.plans.len());
        return Ok(ExitCode::from(WRONG));
    }
    Ok(ExitCode::SUCCESS)
}

/// One line about a plan that is right: also its draws are made, in each of its modes.
fn checked(path: &Path) -> Result<String> {
    let plan = Plan::read(path)?;
    for mode in &plan.modes {
        plan.resolve(plan.seed, *mode)?;
    }
    let cells = plan.cells();
    for cell in cells.iter().filter(|cell| !cell.is_empty()).take(1) {
        plan.cell(cell)?;
    }
    let mut line = format!("{} faults, {} requests", plan.faults.len(), plan.workload.requests);
    if plan.swarm.is_some() {
        line += ", a swarm";
    }
    if cells.len() > 1 {
        line += &format!(", a sweep of {} cells", cells.len());
    }
    let modes: Vec<_> = plan.modes.iter().map(|m| mode_name(*m)).collect();
    Ok(format!("{line}; {}", modes.join(", ")))
}
