//! Runs: one of them from its plan to its verdict, and many of them at once.

use super::{folder, judge};
use anyhow::Result;
use dunlin_faults::fault::Mode;
use dunlin_faults::plan::Plan;
use dunlin_faults::process::{self, How};
use dunlin_faults::record::Record;
use dunlin_faults::report::summary::RunBrief;
use dunlin_faults::report::{Metrics, Outcome};
use dunlin_faults::resolved::Resolved;
use dunlin_faults::sim;
use std::path::PathBuf;
use std::sync::Arc;
use tokio::task::JoinSet;

/// One run to be made.
#[derive(Clone)]
pub struct Job {
    pub plan: Arc<Plan>,
    pub mode: Mode,
    pub seed: u64,
    /// Its place in a sweep.
    pub at: Vec<usize>,
}

/// How runs are made and what is kept of them.
#[derive(Clone)]
pub struct Runner {
    pub how: Arc<How>,
    /// Runs that do not pass get a folder in here.
    pub keep: PathBuf,
}

pub struct Finished {
    pub brief: RunBrief,
    pub at: Vec<usize>,
    /// Situations of the "sometimes" list that this run was in.
    pub covered: Vec<String>,
    pub folder: Option<PathBuf>,
}

/// Carries a resolved plan out.
///
/// # Errors
/// In words, where the run could not even begin: that is no verdict on the system.
pub async fn carry_out(resolved: Resolved, how: Arc<How>) -> Result<Record, String> {
    match resolved.mode {
        Mode::Process => process::run(&resolved, &how).await.map_err(|e| e.to_string()),
        Mode::Sim => {
            let simulated = tokio::task::spawn_blocking(move || sim::run_resolved(&resolved)).await;
            let simulated =
                simulated.map_err(|e| format!("the simulator panicked: {}", said(e)))?;
            simulated.map_err(|e| e.to_string())
        }
    }
}

/// What a task that panicked said.
fn said(error: tokio::task::JoinError) -> String {
    match error.try_into_panic() {
        Ok(panic) => {
            let text = panic.downcast_ref::<String>().cloned();
            text.or_else(|| panic.downcast_ref::<&str>().map(ToString::to_string))
                .unwrap_or_else(|| "without a word".to_string())
        }
        Err(error) => error.to_string(),
    }
}

impl Runner {
    /// One run, judged; its folder is written if it did not pass.
    async fn one(self, job: Job) -> Finished {
        let resolved = match job.plan.resolve(job.seed, job.mode) {
            Ok(resolved) => resolved,
            Err(e) => return unmade(&job, None, e.to_string()),
        };
        let record = match carry_out(resolved.clone(), self.how.clone()).await {
            Ok(record) => Record { repro: repro(&resolved), ..record },
            Err(why) => return unmade(&job, Some(&resolved), why),
        };
        let place = self.keep.join(format!("seed-{}", place(&job)));
        let judged = tokio::task::spawn_blocking(move || {
            let (report, covered) = judge::judge(&resolved, &record);
            let brief = RunBrief::of(&report);
            let text = Some(job.plan.text());
            let folder = if brief.verdict == Outcome::Pass {
                None
            } else {
                folder::write(&place, text, &resolved, &report, None).ok().map(|_| place)
            };
            Finished { brief, at: job.at, covered, folder }
        });
        match judged.await {
            Ok(finished) => finished,
            Err(e) => std::panic::resume_unwind(e.into_panic()),
        }
    }

    /// All jobs, `at_once` of them at a time. `done` hears of each; when it returns false no
    /// further run begins, and those of real processes are ended.
    pub async fn all(
        &self,
        mut jobs: impl Iterator<Item = Job>,
        at_once: usize,
        mut done: impl FnMut(Finished) -> bool,
    ) {
        let mut running = JoinSet::new();
        for job in jobs.by_ref().take(at_once.max(1)) {
            running.spawn(self.clone().one(job));
        }
        while let Some(result) = running.join_next().await {
            match result {
                Ok(finished) => {
                    if !done(finished) {
                        return;
                    }
                }
                Err(e) if e.is_panic() => std::panic::resume_unwind(e.into_panic()),
                Err(_) => {}
            }
            if let Some(job) = jobs.next() {
                running.spawn(self.clone().one(job));
            }
        }
    }
}

fn place(job: &Job) -> String {
    let at = job.at.iter().map(|at| format!("-{at}"));
    at.fold(job.seed.to_string(), |name, at| name + &at)
}

/// The line that repeats a run of a plan.
pub fn repro(resolved: &Resolved) -> String {
    let sets = resolved.set.iter().map(|(key, value)| format!(" --set '{key}={value}'"));
    let (mode, seed) = (super::mode_name(resolved.mode), resolved.seed);
    let sets = sets.collect::<String>();
    format!("dunlin faults run {} --mode {mode} --seed {seed}{sets}", resolved.plan)
}

/// A run that could not be made shows nothing.
fn unmade(job: &Job, resolved: Option<&Resolved>, why: String) -> Finished {
    let repro = resolved.map_or_else(|| format!("dunlin faults check {}", job.plan.file()), repro);
    let brief = RunBrief {
        seed: job.seed,
        verdict: Outcome::Invalid,
        why: vec![why],
        repro,
        metrics: Metrics::default(),
        proven: Vec::new(),
    };
    Finished { brief, at: job.at.clone(), covered: Vec::new(), folder: None }
}
