//! Makes a failing run smaller and keeps the same failure: fewer faults, then shorter ones, then
//! less workload.
//!
//! Delta debugging (Zeller and Hildebrandt 2002) over a closure that runs a candidate and returns
//! its [`Fingerprint`]; only a candidate with the very same fingerprint is kept. It is bounded by
//! the number of runs. In the simulator the result fails for certain; in real processes it failed
//! once.

use crate::fault::{Fault, Target, Trigger};
use crate::resolved::{RequestSpec, Resolved};
use crate::verdict::Fingerprint;
use std::collections::BTreeSet;

/// A smaller run that fails in the same way.
#[derive(Debug, Clone, PartialEq)]
pub struct Shrunk {
    pub resolved: Resolved,
    pub fingerprint: Fingerprint,
    /// How often something was run.
    pub runs: u32,
    /// What was made smaller, for people: `faults 7 -> 1`.
    pub story: Vec<String>,
    /// The budget ended before nothing more could be taken away.
    pub cut_short: bool,
}

#[derive(Debug, thiserror::Error)]
pub enum ShrinkError {
    #[error("the run does not fail (any more); there is nothing to shrink")]
    Passes,
}

/// Shrinks `start` with at most `budget` runs (at least 1).
pub fn shrink(
    start: &Resolved,
    budget: u32,
    run: &mut dyn FnMut(&Resolved) -> Option<Fingerprint>,
) -> Result<Shrunk, ShrinkError> {
    let fingerprint = run(start).ok_or(ShrinkError::Passes)?;
    let mut search = Search { best: start.clone(), fingerprint, runs: 1, budget, run };
    let mut story = Vec::new();
    let mut step = |what: &str, before: u64, after: u64| {
        if before != after {
            story.push(format!("{what} {before} -> {after}"));
        }
    };
    let count = |items: usize| items as u64;

    let before = count(search.best.faults.len());
    faults(&mut search);
    step("faults", before, count(search.best.faults.len()));
    let before = duration(&search.best);
    durations(&mut search);
    step("fault time in ms", before / 1000, duration(&search.best) / 1000);
    let before = count(search.best.requests.len());
    requests(&mut search);
    step("requests", before, count(search.best.requests.len()));
    let before = tokens(&search.best);
    lengths(&mut search);
    step("tokens", before, tokens(&search.best));
    // What no longer happens needs no time either; and fewer requests may need fewer faults.
    phases(&mut search);
    let before = count(search.best.faults.len());
    faults(&mut search);
    step("faults", before, count(search.best.faults.len()));

    let cut_short = search.spent();
    let Search { best, fingerprint, runs, .. } = search;
    Ok(Shrunk { resolved: best, fingerprint, runs, story, cut_short })
}

struct Search<'a> {
    best: Resolved,
    fingerprint: Fingerprint,
    runs: u32,
    budget: u32,
    run: &'a mut dyn FnMut(&Resolved) -> Option<Fingerprint>,
}

impl Search<'_> {
    fn spent(&self) -> bool {
        self.runs >= self.budget
    }

    /// Takes the candidate if it fails in the same way.
    fn attempt(&mut self, candidate: Resolved) -> bool {
        if self.spent() || candidate == self.best {
            return false;
        }
        self.runs += 1;
        let same = (self.run)(&candidate).as_ref() == Some(&self.fingerprint);
        if same {
            self.best = candidate;
        }
        same
    }
}

/// ddmin: the smallest subset (to single removals) that `keeps` accepts, `items` being accepted.
fn ddmin<T: Clone>(items: &[T], keeps: &mut dyn FnMut(&[T]) -> bool) -> Vec<T> {
    let mut best = items.to_vec();
    if best.is_empty() || keeps(&[]) {
        return Vec::new();
    }
    let mut parts = 2;
    while best.len() >= 2 {
        let size = best.len().div_ceil(parts);
        let chunks: Vec<Vec<T>> = best.chunks(size).map(<[T]>::to_vec).collect();
        let alone = chunks.iter().find(|chunk| chunk.len() < best.len() && keeps(chunk));
        if let Some(chunk) = alone {
            (best, parts) = (chunk.clone(), 2);
            continue;
        }
        let without = |index: usize| -> Vec<T> {
            let others = chunks.iter().enumerate().filter(|(at, _)| *at != index);
            others.flat_map(|(_, chunk)| chunk.clone()).collect()
        };
        // With two parts a complement is the other part, which was tried.
        let rest = (0..chunks.len()).filter(|_| parts > 2).map(without).find(|rest| keeps(rest));
        if let Some(rest) = rest {
            best = rest;
            parts = (parts - 1).max(2);
        } else if parts < best.len() {
            parts = (parts * 2).min(best.len());
        } else {
            break;
        }
    }
    best
}

fn faults(search: &mut Search<'_>) {
    let all = search.best.faults.clone();
    ddmin(&all, &mut |kept: &[Fault]| {
        let candidate = Resolved { faults: rooted(kept), ..search.best.clone() };
        // Of a set that is the best already, the answer is known.
        candidate == search.best || search.attempt(candidate)
    });
}

/// Without those that wait for a fault that is not there.
fn rooted(faults: &[Fault]) -> Vec<Fault> {
    let mut kept = faults.to_vec();
    loop {
        let ids: BTreeSet<String> = kept.iter().map(|fault| fault.id.clone()).collect();
        let before = kept.len();
        kept.retain(|fault| match &fault.when {
            Trigger::After { fault: other, .. } => ids.contains(other),
            _ => true,
        });
        if kept.len() == before {
            return kept;
        }
    }
}

fn duration(resolved: &Resolved) -> u64 {
    resolved.faults.iter().filter_map(|fault| fault.lasts_us).sum()
}

/// Each fault for half as long, as often as the failure stays; and fewer firings.
fn durations(search: &mut Search<'_>) {
    for at in 0..search.best.faults.len() {
        let change = |search: &mut Search<'_>, change: &dyn Fn(&mut Fault) -> bool| {
            let mut candidate = search.best.clone();
            let changed = candidate.faults.get_mut(at).is_some_and(change);
            changed && search.attempt(candidate)
        };
        change(search, &|fault| {
            let many = fault.times > 1;
            fault.times = 1;
            many
        });
        while change(search, &|fault| match fault.lasts_us {
            Some(us) if us > 1000 => {
                fault.lasts_us = Some((us / 2).max(1000));
                true
            }
            _ => false,
        }) {}
    }
}

/// Requests that a fault names must stay.
fn named(faults: &[Fault]) -> BTreeSet<u64> {
    let of_trigger = |fault: &Fault| match fault.when {
        Trigger::Token { request, .. } => request,
        _ => None,
    };
    let of_target = |fault: &Fault| match fault.target {
        Target::Request(number) => Some(number),
        _ => None,
    };
    faults.iter().flat_map(|fault| of_trigger(fault).into_iter().chain(of_target(fault))).collect()
}

fn requests(search: &mut Search<'_>) {
    let named = named(&search.best.faults);
    let all = search.best.requests.clone();
    let (fixed, free): (Vec<RequestSpec>, Vec<RequestSpec>) =
        all.into_iter().partition(|request| named.contains(&request.number));
    ddmin(&free, &mut |kept: &[RequestSpec]| {
        let mut requests: Vec<RequestSpec> = fixed.iter().chain(kept).cloned().collect();
        requests.sort_by_key(|request| (request.arrival_us, request.number));
        let candidate = Resolved { requests, ..search.best.clone() };
        candidate == search.best || search.attempt(candidate)
    });
}

fn tokens(resolved: &Resolved) -> u64 {
    let of = |request: &RequestSpec| request.prompt.len() as u64 + u64::from(request.max_tokens);
    resolved.requests.iter().map(of).sum()
}

/// All outputs, then all prompts, half as long.
fn lengths(search: &mut Search<'_>) {
    while halve(search, &|request| request.max_tokens = request.max_tokens.div_ceil(2)) {}
    while halve(search, &|request| request.prompt.truncate(request.prompt.len().div_ceil(2))) {}
}

fn halve(search: &mut Search<'_>, change: &dyn Fn(&mut RequestSpec)) -> bool {
    let mut candidate = search.best.clone();
    candidate.requests.iter_mut().for_each(change);
    search.attempt(candidate)
}

/// A shorter chaos phase.
fn phases(search: &mut Search<'_>) {
    loop {
        let mut candidate = search.best.clone();
        if candidate.phases.chaos_us <= 1_000_000 {
            return;
        }
        candidate.phases.chaos_us /= 2;
        if !search.attempt(candidate) {
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fault::Kind;
    use crate::invariant::tests::good;
    use proptest::prelude::*;

    fn big(faults: usize, requests: u64) -> Resolved {
        let (mut resolved, _) = good().parts();
        let one = resolved.faults[0].clone();
        let request = resolved.requests[0].clone();
        resolved.faults = (0..faults)
            .map(|at| Fault {
                id: format!("f{at}"),
                lasts_us: Some(4_000_000),
                times: 3,
                kind: if at == 5 { Kind::ProcessPause } else { Kind::ProcessKill },
                ..one.clone()
            })
            .collect();
        resolved.requests = (0..requests)
            .map(|number| RequestSpec { number, max_tokens: 64, ..request.clone() })
            .collect();
        resolved
    }

    fn print(invariant: &str) -> Option<Fingerprint> {
        Some(Fingerprint { invariant: invariant.into(), slug: "x".into() })
    }

    #[test]
    fn one_fault_and_one_request_are_found() {
        let start = big(12, 40);
        let mut run = |candidate: &Resolved| {
            let cause = candidate.faults.iter().any(|fault| {
                fault.kind == Kind::ProcessPause && fault.lasts_us.is_some_and(|us| us > 300_000)
            });
            let victim = candidate.requests.iter().any(|r| r.number == 17 && r.max_tokens >= 9);
            if cause && victim { print("I2") } else { None }
        };
        let shrunk = shrink(&start, 500, &mut run).unwrap();
        assert_eq!(shrunk.resolved.faults.len(), 1);
        assert_eq!(shrunk.resolved.faults[0].id, "f5");
        assert_eq!(shrunk.resolved.faults[0].times, 1);
        assert_eq!(shrunk.resolved.faults[0].lasts_us, Some(500_000));
        assert_eq!(shrunk.resolved.requests.len(), 1);
        assert_eq!(shrunk.resolved.requests[0].max_tokens, 16);
        assert_eq!(shrunk.resolved.requests[0].prompt.len(), 1);
        assert!(!shrunk.cut_short && shrunk.runs < 120, "{} runs", shrunk.runs);
        assert!(shrunk.story.iter().any(|line| line == "faults 12 -> 1"), "{:?}", shrunk.story);
        assert!(run(&shrunk.resolved).is_some());
    }

    #[test]
    fn another_failure_is_not_taken_for_the_same() {
        let start = big(4, 3);
        // Alone, each fault fails in another way.
        let mut run = |candidate: &Resolved| {
            if candidate.faults.len() >= 2 { print("I2") } else { print("I8") }
        };
        let shrunk = shrink(&start, 500, &mut run).unwrap();
        assert_eq!(shrunk.resolved.faults.len(), 2);
        assert_eq!(shrunk.fingerprint.invariant, "I2");
    }

    #[test]
    fn what_waits_for_a_fault_goes_with_it() {
        let mut start = big(3, 1);
        start.faults[1].when =
            Trigger::After { fault: "f0".into(), edge: crate::fault::Edge::Start, delay_us: 5 };
        let mut seen_orphan = false;
        let mut run = |candidate: &Resolved| {
            let has = |id: &str| candidate.fault(id).is_some();
            seen_orphan |= has("f1") && !has("f0");
            if has("f1") { print("I2") } else { None }
        };
        let shrunk = shrink(&start, 100, &mut run).unwrap();
        let ids: Vec<&str> = shrunk.resolved.faults.iter().map(|fault| fault.id.as_str()).collect();
        assert_eq!(ids, ["f0", "f1"]);
        assert!(!seen_orphan);
    }

    #[test]
    fn the_budget_and_a_passing_run_end_it() {
        let start = big(12, 40);
        let mut runs = 0;
        let mut run = |_: &Resolved| {
            runs += 1;
            print("I2")
        };
        let shrunk = shrink(&start, 3, &mut run).unwrap();
        assert!(shrunk.cut_short);
        assert_eq!((shrunk.runs, runs), (3, 3));
        assert!(shrink(&start, 100, &mut |_| None).is_err());
    }

    proptest! {
        /// ddmin finds any small cause, and its answer is minimal: taking one away loses it.
        #[test]
        fn ddmin_is_minimal(n in 1usize..40, cause in prop::collection::btree_set(0usize..40, 1..4)) {
            let items: Vec<usize> = (0..n).collect();
            let cause: BTreeSet<usize> = cause.into_iter().filter(|at| *at < n).collect();
            let holds = |kept: &[usize]| cause.iter().all(|at| kept.contains(at));
            let found = ddmin(&items, &mut |kept| holds(kept));
            prop_assert_eq!(found, cause.into_iter().collect::<Vec<_>>());
        }
    }
}
