//! Once all is healed: L1 to L6.

use super::Found;
use super::case::Case;
use crate::fault::Kind;
use dunlin_actors::facts::PREFIX_HIT;
use std::collections::BTreeMap;

pub(super) fn progress(case: &Case<'_>, found: &mut Found) {
    let (healed, bound) = (case.record.phases.chaos_us, case.options().progress_us);
    for (&request, stream) in &case.streams {
        if stream.refused.is_some() {
            continue;
        }
        // From the heal on, or its start if that is later: no stretch without a sign of life.
        let mut last = healed.max(stream.begin_us());
        let signs = stream.tokens.iter().map(|(us, _, _)| *us);
        let end = stream.ended_us().unwrap_or_else(|| case.end_us());
        for us in signs.filter(|us| *us > healed).chain([end]) {
            if us > last + bound {
                let what = format!("nothing came for {} ms after the heal", (us - last) / 1000);
                found.add("stalled", us, Some(request), what);
                break;
            }
            last = last.max(us);
        }
    }
}

pub(super) fn agreement(case: &Case<'_>, found: &mut Found) {
    let Some(rest) = &case.record.rest else { return };
    let mut said: BTreeMap<&str, (&str, u64)> = BTreeMap::new();
    for (node, view) in &rest.views {
        for (peer, incarnation) in view {
            let (first, known) = said.entry(peer).or_insert((node, *incarnation));
            if *known != *incarnation {
                let what = format!(
                    "of {peer}, {first} knows incarnation {known} and {node} {incarnation}"
                );
                found.add("views", case.end_us(), None, what);
            }
        }
        for other in rest.views.keys().filter(|other| *other != node) {
            if !view.contains_key(other) {
                let what = format!("{node} does not know that {other} is there");
                found.add("missing", case.end_us(), None, what);
            }
        }
    }
}

pub(super) fn capacity(case: &Case<'_>, found: &mut Found) {
    let Some(rest) = &case.record.rest else { return };
    if rest.replicas_up < rest.replicas_wanted {
        let what = format!("{} of {} replicas serve", rest.replicas_up, rest.replicas_wanted);
        found.add("replicas", case.end_us(), None, what);
    }
}

pub(super) fn backlog(case: &Case<'_>, found: &mut Found) {
    let Some(rest) = &case.record.rest else {
        found.add("never-settled", case.end_us(), None, "the backlog never drained");
        return;
    };
    if rest.waiting_requests > 0 {
        let what = format!("{} requests still wait", rest.waiting_requests);
        found.add("waiting", case.end_us(), None, what);
    }
    // Weights that were changed on purpose stay changed.
    let changed = case.fired().any(|(_, run)| run.kind() == Kind::BitsWeight);
    if !rest.probe_right && !changed {
        found.add("probe", case.end_us(), None, "a fresh request was not answered rightly");
    }
}

/// Where prompts that share blocks were hit before the chaos, they are hit after it.
pub(super) fn cache_returns(case: &Case<'_>, found: &mut Found) {
    const ENOUGH: usize = 6;
    let phases = case.record.phases;
    let hits = |from: u64, to: u64| {
        case.facts_of(PREFIX_HIT).any(|hit| hit.value > 0 && (from..to).contains(&hit.us))
    };
    if !hits(0, phases.warmup_us) || hits(phases.chaos_us, u64::MAX) {
        return;
    }
    let block = usize::try_from(case.block_tokens()).unwrap_or(usize::MAX);
    let after = case.resolved.requests.iter().filter(|spec| {
        let stream = case.streams.get(&spec.number);
        stream.is_some_and(|s| s.begin_us() > phases.chaos_us && s.finished())
    });
    // Requests that begin with the very block of an earlier one of the same tenant.
    let mut heads: BTreeMap<(&str, &[u32]), usize> = BTreeMap::new();
    for spec in after {
        if let Some(head) = spec.prompt.get(..block) {
            *heads.entry((&spec.tenant, head)).or_insert(0) += 1;
        }
    }
    if heads.values().any(|count| *count >= ENOUGH) {
        let what = "prompts that begin alike were hit before the chaos and are not any more";
        found.add("cold", case.end_us(), None, what);
    }
}

pub(super) fn no_deadlock(case: &Case<'_>, found: &mut Found) {
    if let Some(stuck) = &case.record.stuck {
        found.add("stuck", case.end_us(), None, stuck.clone());
    }
}
