//! A run's folder: everything that repeats it and everything that was seen.
//!
//!     verdict.json   verdict, invariants, metrics        report.html    the page
//!     plan.toml      as it was written                   resolved.toml  every draw made
//!     record.json    what the run left behind            faults.jsonl   each fault and its proof
//!     history.jsonl  what clients saw                    metrics.csv    one row
//!     env.json       versions, commit, seed              trace.hash     in the simulator

use anyhow::{Context, Result};
use dunlin_faults::record::{Record, What};
use dunlin_faults::report::Report;
use dunlin_faults::report::summary::RunBrief;
use dunlin_faults::report::sweep::{Sweep, SweepCell};
use dunlin_faults::resolved::Resolved;
use serde::Serialize;
use std::path::{Path, PathBuf};

/// Where runs go if nobody says so; beside the nodes' logs, which git ignores.
pub fn default(name: &str, mode: &str, seeds: &str) -> PathBuf {
    let tame = |text: &str| -> String {
        text.chars()
            .map(|c| if c.is_ascii_alphanumeric() || "-_.".contains(c) { c } else { '-' })
            .collect()
    };
    Path::new(".dunlin/faults").join(format!("{}-{mode}-{}", tame(name), tame(seeds)))
}

/// Writes the folder and returns the page's path.
pub fn write(
    folder: &Path,
    plan: Option<&str>,
    resolved: &Resolved,
    report: &Report<'_>,
    earlier: Option<&Report<'_>>,
) -> Result<PathBuf> {
    let record = report.record;
    std::fs::create_dir_all(folder)
        .with_context(|| format!("making the folder {}", folder.display()))?;
    if let Some(plan) = plan {
        put(folder, "plan.toml", plan)?;
    }
    put(folder, "resolved.toml", &resolved.to_toml()?)?;
    put(folder, "verdict.json", &report.json(earlier)?)?;
    put(folder, "record.json", &serde_json::to_string(record)?)?;
    put(folder, "env.json", &serde_json::to_string_pretty(&record.env)?)?;
    put(folder, "faults.jsonl", &lines(record.faults.iter())?)?;
    put(folder, "history.jsonl", &lines(history(record))?)?;
    put(folder, "metrics.csv", &one_row(report))?;
    if let Some(hash) = &record.trace_hash {
        put(folder, "trace.hash", hash)?;
    }
    put(folder, "report.html", &report.html(earlier))
}

/// Record and resolved plan of an earlier run.
pub fn read(folder: &Path) -> Result<(Resolved, Record)> {
    let path = |name: &str| folder.join(name);
    let text = |name: &str| {
        let mend = "is it the folder of a run?";
        std::fs::read_to_string(path(name))
            .with_context(|| format!("reading {}: {mend}", path(name).display()))
    };
    let resolved = text("resolved.toml")?;
    let resolved = Resolved::from_toml(&resolved, &path("resolved.toml").display().to_string())?;
    let record = serde_json::from_str(&text("record.json")?)
        .with_context(|| format!("{} is not a run's record", path("record.json").display()))?;
    Ok((resolved, record))
}

pub fn put(folder: &Path, name: &str, text: &str) -> Result<PathBuf> {
    let path = folder.join(name);
    let end = if text.ends_with('\n') || text.is_empty() { "" } else { "\n" };
    std::fs::write(&path, format!("{text}{end}"))
        .with_context(|| format!("writing {}", path.display()))?;
    Ok(path)
}

fn lines<T: Serialize>(items: impl Iterator<Item = T>) -> Result<String> {
    let mut text = String::new();
    for item in items {
        text += &serde_json::to_string(&item)?;
        text.push('\n');
    }
    Ok(text)
}

/// The clients' side.
fn history(record: &Record) -> impl Iterator<Item = &dunlin_faults::record::Event> {
    record.events.iter().filter(|event| {
        matches!(
            event.what,
            What::Submitted { .. }
                | What::Accepted { .. }
                | What::Refused { .. }
                | What::Token { .. }
                | What::Ended { .. }
        )
    })
}

/// The run as a sweep of one cell, so that its columns are a sweep's.
fn one_row(report: &Report<'_>) -> String {
    let record = report.record;
    let cell = SweepCell { at: Vec::new(), run: RunBrief::of(report) };
    let (plan, repro) = (record.plan.clone(), record.repro.clone());
    Sweep { plan, mode: record.mode, repro, axes: Vec::new(), cells: vec![cell] }.csv()
}
