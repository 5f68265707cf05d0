//! Reports: one self-contained HTML page (style and figures inside, no scripts, nothing fetched)
//! and the same as JSON, of one run; a matrix page of a sweep; a summary page of many seeds.
//!
//! A report reads a [`Record`] and what was judged of it, and decides nothing itself: the verdict
//! and the invariants come with it. Text from plans, nodes and clients is escaped.

mod client;
mod figures;
mod html;
pub mod metrics;
mod page;
pub mod summary;
mod svg;
pub mod sweep;
mod tables;

use crate::invariant::Breach;
use crate::measure::Corruption;
use crate::record::Record;
use crate::resolved::Resolved;
pub use crate::verdict::Outcome;
use crate::verdict::Verdict;
pub use metrics::{Metrics, Slo};
use serde::{Deserialize, Serialize};

/// What was found of one invariant.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct InvariantRow {
    pub id: String,
    pub name: String,
    pub statement: String,
    pub state: InvariantState,
    /// How much was checked, or why nothing was.
    pub checked: String,
    /// Each violation, in words.
    pub violations: Vec<String>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum InvariantState {
    Held,
    Violated,
    /// The plan switched it off.
    NotChecked,
}

/// A judged run: what a page is made of.
#[derive(Debug, Clone, Serialize)]
pub struct Report<'a> {
    pub schema: &'static str,
    pub verdict: Outcome,
    /// Why it is not a pass, one line each.
    pub why: Vec<String>,
    /// The plan's own words about itself.
    pub about: String,
    pub slo: Slo,
    pub metrics: Metrics,
    pub invariants: Vec<InvariantRow>,
    /// What came of faults that may change tokens by design.
    pub measured: Option<Corruption>,
    #[serde(skip)]
    pub record: &'a Record,
}

/// Reasons that a page's head lists.
const MOST_REASONS: usize = 8;

impl<'a> Report<'a> {
    /// Of a run that was judged.
    pub fn of(resolved: &Resolved, record: &'a Record, verdict: &Verdict) -> Report<'a> {
        let slo = Slo {
            ttft_us: Some(resolved.report.slo_ttft_us),
            gap_us: Some(resolved.report.slo_gap_us),
            stall_us: Some(resolved.invariants.stall_us),
        };
        let mut why = Vec::new();
        if verdict.outcome != Outcome::Pass {
            why.push(verdict.reason.clone());
            let more = verdict.breaches.iter().skip(1).map(in_words);
            why.extend(more.take(MOST_REASONS - 1));
        }
        let invariants = invariant_rows(verdict);
        let mut report = Report::new(record, verdict.outcome, why, invariants, slo);
        report.about = resolved.about.clone();
        report.measured = verdict.measured;
        report
    }

    pub fn new(
        record: &'a Record,
        verdict: Outcome,
        why: Vec<String>,
        invariants: Vec<InvariantRow>,
        slo: Slo,
    ) -> Report<'a> {
        let metrics = metrics::metrics(record, slo);
        let about = String::new();
        let schema = "fault-report/1";
        let measured = None;
        Report { schema, verdict, why, about, slo, metrics, invariants, measured, record }
    }

    /// The page. `earlier` is drawn beside it and its figures are compared.
    pub fn html(&self, earlier: Option<&Report<'_>>) -> String {
        page::page(self, earlier)
    }

    /// What the page shows, for programs; `earlier`'s metrics beside it.
    ///
    /// # Errors
    /// Those of serde_json; none is known to happen.
    pub fn json(&self, earlier: Option<&Report<'_>>) -> Result<String, serde_json::Error> {
        let record = self.record;
        let mut value = serde_json::to_value(self)?;
        let more = serde_json::json!({
            "plan": record.plan,
            "mode": record.mode,
            "seed": record.seed,
            "repro": record.repro,
            "env": record.env,
            "phases": record.phases,
            "faults": record.faults,
            "rest": record.rest,
            "stuck": record.stuck,
            "trace_hash": record.trace_hash,
            "compared_with": earlier.map(|e| serde_json::json!({
                "plan": e.record.plan, "seed": e.record.seed, "metrics": e.metrics,
            })),
        });
        if let (Some(all), serde_json::Value::Object(more)) = (value.as_object_mut(), more) {
            all.extend(more);
        }
        serde_json::to_string_pretty(&value)
    }
}

fn in_words(breach: &Breach) -> String {
    let request = breach.request.map(|n| format!(" (request {n})")).unwrap_or_default();
    let at = svg::duration(breach.at_us as f64);
    format!("{} at {at}{request}: {}", breach.invariant, breach.what)
}

fn invariant_rows(verdict: &Verdict) -> Vec<InvariantRow> {
    let checked = verdict.checks.iter().map(|check| {
        let mine = verdict.breaches.iter().filter(|breach| breach.invariant == check.id);
        let held = check.breaches == 0;
        InvariantRow {
            id: check.id.clone(),
            name: check.name.clone(),
            statement: check.statement.clone(),
            state: if held { InvariantState::Held } else { InvariantState::Violated },
            checked: String::new(),
            violations: mine.map(in_words).collect(),
        }
    });
    let off = verdict.off.iter().map(|id| {
        let known = crate::invariant::find(id);
        InvariantRow {
            id: id.clone(),
            name: known.map_or("", |invariant| invariant.name).to_string(),
            statement: known.map_or("", |invariant| invariant.statement).to_string(),
            state: InvariantState::NotChecked,
            checked: "switched off by the plan".to_string(),
            violations: Vec::new(),
        }
    });
    checked.chain(off).collect()
}
