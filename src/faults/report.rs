//! `dunlin faults report`: the page of a run's folder anew, or of two runs beside each other.

use super::{folder, judge};
use anyhow::{Context, Result};
use std::path::PathBuf;
use std::process::ExitCode;

/// Judge a run's folder again and write its page; with a second folder, compare the two.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  dunlin faults report .dunlin/faults/kill-worker-sim-7
  dunlin faults report after before --out compared.html      `before` is drawn beside `after`")]
pub struct ReportArgs {
    /// Folder of a run
    run: PathBuf,
    /// Folder of an earlier run
    earlier: Option<PathBuf>,
    /// The page [default: report.html in the run's folder, compared.html for two]
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
    /// Print what the page shows as JSON instead
    #[arg(long)]
    json: bool,
}

pub fn run(args: &ReportArgs) -> Result<ExitCode> {
    let (resolved, record) = folder::read(&args.run)?;
    let (report, _) = judge::judge(&resolved, &record);
    let before = args.earlier.as_deref().map(folder::read).transpose()?;
    let before = before.as_ref().map(|(resolved, record)| judge::judge(resolved, record).0);
    if args.json {
        println!("{}", report.json(before.as_ref())?);
        return Ok(super::exit_code(report.verdict));
    }
    let name = if before.is_some() { "compared.html" } else { "report.html" };
    let path = args.out.clone().unwrap_or_else(|| args.run.join(name));
    std::fs::write(&path, report.html(before.as_ref()))
        .with_context(|| format!("writing {}", path.display()))?;
    println!("{}: {}", report.verdict, path.display());
    Ok(super::exit_code(report.verdict))
}
