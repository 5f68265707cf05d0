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

use crate::record::Record;
pub use metrics::{Metrics, Slo};
use serde::{Deserialize, Serialize};

/// What a run showed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "UPPERCASE")]
pub enum Outcome {
    Pass,
    /// An invariant does not hold.
    Fail,
    /// Nothing was shown: a fault never fired or left no proof, or the run was broken without it.
    Invalid,
}

impl Outcome {
    pub fn name(self) -> &'static str {
        match self {
            Outcome::Pass => "PASS",
            Outcome::Fail => "FAIL",
            Outcome::Invalid => "INVALID",
        }
    }
}

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
    /// It has no meaning in this mode or for this plan.
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
    #[serde(skip)]
    pub record: &'a Record,
}

impl<'a> Report<'a> {
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
        Report { schema, verdict, why, about, slo, metrics, invariants, record }
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
