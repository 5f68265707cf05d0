//! PASS, FAIL, or INVALID: what a run is worth.
//!
//! FAIL: an invariant did not hold. INVALID: the run proves nothing, because a fault of the plan
//! never fired or could not be shown to have taken effect, or because something was broken before
//! the first fault. INVALID is not PASS. A fault that the swarm drew may miss (its request is over,
//! no frame came its way) and is then listed; one that the plan names may not.

use crate::invariant::{self, Breach, Case};
use crate::measure::{self, Corruption};
use crate::record::{FaultRun, Record};
use crate::resolved::{FailOn, Resolved};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fmt;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "UPPERCASE")]
pub enum Outcome {
    Pass,
    Fail,
    Invalid,
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Outcome::Pass => "PASS",
            Outcome::Fail => "FAIL",
            Outcome::Invalid => "INVALID",
        })
    }
}

/// What two failures have in common if they are the same: the invariant and the kind of breach.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Fingerprint {
    pub invariant: String,
    pub slug: String,
}

impl fmt::Display for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.invariant, self.slug)
    }
}

/// One row of the invariant table.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CheckRow {
    pub id: String,
    pub name: String,
    pub statement: String,
    pub breaches: usize,
}

/// Everything that was judged.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Verdict {
    pub outcome: Outcome,
    /// Why, in one line.
    pub reason: String,
    /// Of the first breach, for `shrink` and for telling failures apart.
    pub fingerprint: Option<Fingerprint>,
    pub checks: Vec<CheckRow>,
    /// Ids of invariants that the plan switched off.
    pub off: Vec<String>,
    /// In the order of time.
    pub breaches: Vec<Breach>,
    /// Faults of the plan that never fired; faults that fired without proof.
    pub never_fired: Vec<String>,
    pub unverified: Vec<String>,
    /// Random faults that never fired or hit nothing: `swarm-3 (frame.dup)`.
    #[serde(default)]
    pub missed: Vec<String>,
    /// Breaches from before the first fault.
    pub baseline: Vec<Breach>,
    /// Faults that fired and are proven, or named in the plan, by kind.
    pub fired: BTreeMap<String, u64>,
    /// What came of faults whose outcome is measured.
    #[serde(default)]
    pub measured: Option<Corruption>,
    /// Ids of the 'sometimes' list that this run hit; see [`crate::coverage`].
    pub coverage: Vec<String>,
    pub repro: String,
}

/// Drawn at random, not named in the plan.
fn is_random(run: &FaultRun) -> bool {
    run.fault.id.starts_with("swarm-") || run.fault.id.starts_with("buggify-")
}

/// Judges one run.
pub fn judge(resolved: &Resolved, record: &Record) -> Verdict {
    let case = Case::new(resolved, record);
    let mut checks = Vec::new();
    let mut breaches = Vec::new();
    for (invariant, found) in invariant::check_all(&case) {
        checks.push(CheckRow {
            id: invariant.id.to_string(),
            name: invariant.name.to_string(),
            statement: invariant.statement.to_string(),
            breaches: found.len(),
        });
        breaches.extend(found);
    }
    // Stable: of one moment, in the order of the invariants.
    breaches.sort_by_key(|breach| breach.at_us);
    let first_fault = record.faults.iter().filter_map(|run| run.began_us).min();
    let early = |breach: &&Breach| {
        !resolved.faults.is_empty() && first_fault.is_none_or(|first| breach.at_us < first)
    };
    let baseline: Vec<Breach> = breaches.iter().filter(early).cloned().collect();
    let names = |keep: &dyn Fn(&FaultRun) -> bool| {
        let kept = record.faults.iter().filter(|run| keep(run));
        kept.map(|run| run.fault.id.clone()).collect::<Vec<String>>()
    };
    let mut never_fired = names(&|run| run.began_us.is_none() && !is_random(run));
    let told = |id: &String| record.faults.iter().any(|run| run.fault.id == *id);
    let silent = resolved.faults.iter().map(|fault| &fault.id).filter(|id| !told(id));
    never_fired.extend(silent.cloned());
    let unproven = |run: &FaultRun| run.began_us.is_some() && run.proof.is_none();
    let unverified = names(&|run| unproven(run) && !is_random(run));
    let missed = |run: &&FaultRun| is_random(run) && (run.began_us.is_none() || unproven(run));
    let of_kind = |run: &FaultRun| format!("{} ({})", run.fault.id, run.kind().name());
    let missed: Vec<String> = record.faults.iter().filter(missed).map(of_kind).collect();
    let mut fired = BTreeMap::new();
    let hit = |run: &&FaultRun| run.began_us.is_some() && !(is_random(run) && unproven(run));
    for run in record.faults.iter().filter(hit) {
        *fired.entry(run.kind().name().to_string()).or_insert(0) += 1;
    }
    let mut verdict = Verdict {
        outcome: Outcome::Pass,
        reason: String::new(),
        fingerprint: None,
        checks,
        off: resolved.invariants.off.iter().cloned().collect(),
        breaches,
        never_fired,
        unverified,
        missed,
        baseline,
        fired,
        measured: measure::corruption(&case),
        coverage: crate::coverage::hit(&case).into_iter().map(str::to_string).collect(),
        repro: record.repro.clone(),
    };
    decide(&mut verdict, resolved);
    verdict
}

fn decide(verdict: &mut Verdict, resolved: &Resolved) {
    let fails_on = |what| resolved.report.fail_on.contains(&what);
    if let Some(first) = verdict.breaches.first() {
        let (invariant, slug) = (first.invariant.clone(), first.slug.clone());
        verdict.fingerprint = Some(Fingerprint { invariant, slug });
    }
    let of = |breach: &Breach| {
        let request = breach.request.map(|n| format!(" (request {n})")).unwrap_or_default();
        let at = breach.at_us as f64 / 1e6;
        format!("{} at {at:.3} s{request}: {}", breach.invariant, breach.what)
    };
    let (outcome, reason) = if let Some(first) = verdict.baseline.first() {
        (Outcome::Invalid, format!("broken before the first fault: {}", of(first)))
    } else if let Some(first) = verdict.breaches.first().filter(|_| fails_on(FailOn::Invariant)) {
        (Outcome::Fail, of(first))
    } else if !verdict.never_fired.is_empty() && fails_on(FailOn::FaultNeverFired) {
        (Outcome::Invalid, format!("never fired: {}", verdict.never_fired.join(", ")))
    } else if !verdict.unverified.is_empty() && fails_on(FailOn::UnverifiedFault) {
        (Outcome::Invalid, format!("no proof of: {}", verdict.unverified.join(", ")))
    } else {
        let fired: u64 = verdict.fired.values().sum();
        let measured = verdict.measured.map(|found| format!("; {found}")).unwrap_or_default();
        let held = verdict.checks.len();
        (Outcome::Pass, format!("{held} invariants held under {fired} faults{measured}"))
    };
    (verdict.outcome, verdict.reason) = (outcome, reason);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::invariant::tests::{Run, good};

    #[test]
    fn a_good_run_passes() {
        let (resolved, record) = good().parts();
        let verdict = judge(&resolved, &record);
        assert_eq!(verdict.outcome, Outcome::Pass, "{verdict:#?}");
        assert_eq!(verdict.fingerprint, None);
        assert_eq!(verdict.fired["process.kill"], 1);
    }

    #[test]
    fn a_breach_after_the_fault_fails_with_its_fingerprint() {
        let (resolved, mut record) = good().parts();
        record.stuck = Some("r0 waits for a".into());
        let verdict = judge(&resolved, &record);
        assert_eq!(verdict.outcome, Outcome::Fail);
        assert_eq!(verdict.fingerprint.map(|f| f.to_string()).as_deref(), Some("L6/stuck"));
        assert!(verdict.reason.contains("r0 waits for a"));
    }

    #[test]
    fn what_proves_nothing_is_invalid() {
        let (resolved, mut record) = good().parts();
        record.faults[0].proof = None;
        let verdict = judge(&resolved, &record);
        assert_eq!((verdict.outcome, &*verdict.unverified[0]), (Outcome::Invalid, "kill"));

        let (resolved, mut record) = good().parts();
        record.faults[0].began_us = None;
        let verdict = judge(&resolved, &record);
        assert_eq!((verdict.outcome, &*verdict.never_fired[0]), (Outcome::Invalid, "kill"));

        let (resolved, mut record) = good().parts();
        record.faults.clear();
        assert_eq!(judge(&resolved, &record).outcome, Outcome::Invalid, "a fault is not told of");

        let (mut resolved, mut record) = good().parts();
        record.faults[0].proof = None;
        resolved.report.fail_on.clear();
        assert_eq!(judge(&resolved, &record).outcome, Outcome::Pass, "as the plan says");
    }

    #[test]
    fn a_broken_baseline_is_invalid() {
        let mut run: Run = good();
        run.fact(10, "a", "audit.failed", "a block is both free and held", 0, 0);
        let (resolved, record) = run.parts();
        let verdict = judge(&resolved, &record);
        assert_eq!(verdict.outcome, Outcome::Invalid, "{}", verdict.reason);
        assert_eq!(verdict.baseline.len(), 1);
    }

    #[test]
    fn a_random_fault_may_miss() {
        let (mut resolved, mut record) = good().parts();
        let mut missed = record.faults[0].clone();
        missed.fault.id = "swarm-3".into();
        missed.proof = None;
        resolved.faults.push(missed.fault.clone());
        record.faults.push(missed);
        let verdict = judge(&resolved, &record);
        assert_eq!(verdict.outcome, Outcome::Pass);
        assert_eq!(verdict.missed, ["swarm-3 (process.kill)"]);
        assert_eq!(verdict.fired["process.kill"], 1, "one hit nothing");
        record.faults[1].began_us = None;
        assert_eq!(judge(&resolved, &record).missed.len(), 1);
    }
}
