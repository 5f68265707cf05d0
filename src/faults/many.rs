//! Many runs: a bar while they are made, then a summary, its page, and a line for each that failed.

use super::runner::{Finished, Job, Runner};
use super::{exit_code, folder};
use crate::signals::Signals;
use anyhow::{Context, Result};
use dunlin_faults::fault::Mode;
use dunlin_faults::plan::Axis;
use dunlin_faults::report::summary::Summary;
use dunlin_faults::report::{Outcome, sweep};
use indicatif::{ProgressBar, ProgressStyle};
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

/// Failing runs that are listed in the terminal; all of them are in the summary.
const LISTED: usize = 20;

/// What the runs are called and where they go.
pub struct Many {
    pub plan: String,
    pub mode: Mode,
    pub repro: String,
    pub out: PathBuf,
    /// How many there will be; `None`: until the time is over.
    pub total: Option<u64>,
}

/// What came of them so far.
pub struct Tally {
    pub finished: Vec<Finished>,
    began: Instant,
    bar: ProgressBar,
}

impl Tally {
    pub fn new(total: Option<u64>) -> Tally {
        let (bar, template) = match total {
            Some(total) => (ProgressBar::new(total), "{bar:40} {pos}/{len} runs, {msg}"),
            None => (ProgressBar::new_spinner(), "{spinner} {elapsed} {pos} runs, {msg}"),
        };
        let style = ProgressStyle::with_template(template);
        bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
        bar.enable_steady_tick(Duration::from_millis(200));
        Tally { finished: Vec::new(), began: Instant::now(), bar }
    }

    pub fn add(&mut self, finished: Finished) {
        if finished.brief.verdict != Outcome::Pass && self.count(finished.brief.verdict) < LISTED {
            let brief = &finished.brief;
            let why = brief.why.first().map_or("", String::as_str);
            self.bar.suspend(|| eprintln!("{} seed {}: {why}", brief.verdict, brief.seed));
        }
        self.finished.push(finished);
        self.bar.inc(1);
        let count = |v| self.count(v);
        let rate = self.finished.len() as f64 / self.began.elapsed().as_secs_f64().max(1e-3);
        self.bar.set_message(format!(
            "{rate:.1}/s: {} passed, {} failed, {} invalid",
            count(Outcome::Pass),
            count(Outcome::Fail),
            count(Outcome::Invalid)
        ));
    }

    fn count(&self, verdict: Outcome) -> usize {
        self.finished.iter().filter(|f| f.brief.verdict == verdict).count()
    }

    /// Writes the summary (or the sweep's pages), tells it, and gives the exit code.
    pub fn close(mut self, many: &Many, axes: Option<&[Axis]>) -> Result<ExitCode> {
        self.bar.finish_and_clear();
        let took = self.began.elapsed().as_secs_f64();
        std::fs::create_dir_all(&many.out)
            .with_context(|| format!("making the folder {}", many.out.display()))?;
        // By seed, whatever order they ended in.
        self.finished.sort_by(|a, b| (a.brief.seed, &a.at).cmp(&(b.brief.seed, &b.at)));
        let page = match axes {
            Some(axes) => self.write_sweep(many, axes)?,
            None => self.write_summary(many, took)?,
        };
        let count = |v| self.count(v);
        println!(
            "{} runs of {} in {took:.1} s ({:.0} a minute): {} passed, {} failed, {} invalid",
            self.finished.len(),
            many.plan,
            self.finished.len() as f64 * 60.0 / took.max(1e-3),
            count(Outcome::Pass),
            count(Outcome::Fail),
            count(Outcome::Invalid)
        );
        println!("  report: {}", page.display());
        let not_passed = || self.finished.iter().filter(|f| f.brief.verdict != Outcome::Pass);
        for finished in not_passed().take(LISTED) {
            let brief = &finished.brief;
            println!("  {}: {}", brief.verdict, brief.why.join("; "));
            println!("    {}", brief.repro);
            if let Some(folder) = &finished.folder {
                println!("    {}", folder.join("report.html").display());
            }
        }
        if let Some(more) = not_passed().count().checked_sub(LISTED).filter(|n| *n > 0) {
            println!("  and {more} more in the report");
        }
        let worst = match () {
            () if count(Outcome::Fail) > 0 => Outcome::Fail,
            () if count(Outcome::Invalid) > 0 || self.finished.is_empty() => Outcome::Invalid,
            () => Outcome::Pass,
        };
        Ok(exit_code(worst))
    }

    fn write_summary(&self, many: &Many, took: f64) -> Result<PathBuf> {
        let runs = self.finished.iter().map(|f| f.brief.clone()).collect();
        let mut summary = Summary::new(&many.plan, many.mode, &many.repro, took, runs);
        summary.coverage = self.coverage();
        folder::put(&many.out, "summary.json", &serde_json::to_string(&summary)?)?;
        folder::put(&many.out, "report.html", &summary.html())
    }

    fn coverage(&self) -> BTreeMap<String, u64> {
        let met = |id: &str| {
            self.finished.iter().filter(|f| f.covered.iter().any(|covered| covered == id)).count()
        };
        let moments = super::judge::moments();
        moments.map(|(id, what)| (format!("{id}: {what}"), met(id) as u64)).collect()
    }

    fn write_sweep(&self, many: &Many, axes: &[Axis]) -> Result<PathBuf> {
        let axes =
            axes.iter().map(|a| sweep::Axis { name: a.key.clone(), values: a.values.clone() });
        let cells = self
            .finished
            .iter()
            .map(|f| sweep::SweepCell { at: f.at.clone(), run: f.brief.clone() });
        let sweep = sweep::Sweep {
            plan: many.plan.clone(),
            mode: many.mode,
            repro: many.repro.clone(),
            axes: axes.collect(),
            cells: cells.collect(),
        };
        folder::put(&many.out, "metrics.csv", &sweep.csv())?;
        folder::put(&many.out, "sweep.json", &serde_json::to_string(&sweep)?)?;
        folder::put(&many.out, "report.html", &sweep.html())
    }
}

/// Makes all the runs; Ctrl-C ends early, with the summary of what was made.
pub async fn seeds(
    many: Many,
    runner: &Runner,
    work: impl Iterator<Item = Job>,
    at_once: usize,
    axes: Option<&[Axis]>,
) -> Result<ExitCode> {
    let mut signals = Signals::catch()?;
    let mut tally = Tally::new(many.total);
    let all = runner.all(work, at_once, |finished| {
        tally.add(finished);
        true
    });
    let ended = signals.or(all).await;
    if ended.is_none() {
        eprintln!("interrupted");
    }
    tally.close(&many, axes)
}
