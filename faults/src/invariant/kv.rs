//! The KV cache and memory: I7 to I11.

use super::Found;
use super::case::Case;
use crate::events::wanted::KV_MISMATCH;
use crate::fault::{Expect, Kind, Mode};
use crate::record::{What, gauges};
use dunlin_actors::facts::{AUDIT_FAILED, PREFIX_HIT};
use std::collections::BTreeMap;

pub(super) fn conservation(case: &Case<'_>, found: &mut Found) {
    for fact in case.facts_of(AUDIT_FAILED) {
        found.add("audit", fact.us, None, format!("{}: {}", fact.node, fact.subject));
    }
    let Some(rest) = &case.record.rest else { return };
    let at = case.end_us();
    for (replica, (sum, total)) in &rest.blocks {
        if sum != total {
            let what = format!("{replica}: free + cached + live = {sum} of {total} blocks");
            found.add("blocks", at, None, what);
        }
    }
    for audit in &rest.audits {
        found.add("audit", at, None, audit.clone());
    }
}

pub(super) fn quiesce_clean(case: &Case<'_>, found: &mut Found) {
    let at = case.end_us();
    let Some(rest) = &case.record.rest else {
        found.add("never-settled", at, None, "the cluster never came to rest");
        return;
    };
    let held = [
        ("open-requests", rest.open_requests, "requests are open"),
        ("waiting", rest.waiting_requests, "requests wait"),
        ("live-blocks", rest.live_blocks, "blocks are held by no request"),
    ];
    for (slug, count, what) in held {
        if count > 0 {
            found.add(slug, at, None, format!("{count} {what}"));
        }
    }
    for (queue, count) in &rest.queued {
        found.add("queued", at, None, format!("{count} left in {queue}"));
    }
}

pub(super) fn memory_bound(case: &Case<'_>, found: &mut Found) {
    let mut books: BTreeMap<(&str, &str), f64> = BTreeMap::new();
    for event in &case.record.events {
        let What::Gauge { node, name, value } = &event.what else { continue };
        books.insert((node, name), *value);
        let of = |name| books.get(&(node.as_str(), name)).copied();
        let used = of(gauges::MEMORY_USED);
        let (reserved, free) = (of(gauges::MEMORY_RESERVED), of(gauges::MEMORY_FREE));
        if let (Some(used), Some(reserved)) = (used, reserved)
            && used > reserved
        {
            let what = format!("{node} uses {used:.0} of {reserved:.0} reserved bytes");
            found.add("over-reserved", event.us, None, what);
        }
        if let (Some(reserved), Some(free)) = (reserved, free)
            && reserved > free
        {
            let what = format!("{node} reserved {reserved:.0} bytes, {free:.0} were free");
            found.add("over-free", event.us, None, what);
        }
    }
}

const DATA: [Kind; 3] = [Kind::BitsKv, Kind::KvStale, Kind::KvSwap];

pub(super) fn content(case: &Case<'_>, found: &mut Found) {
    let mismatches: Vec<u64> = case.facts_of(KV_MISMATCH).map(|fact| fact.us).collect();
    for fact in case.facts_of(KV_MISMATCH) {
        if !case.fired().any(|(began, run)| DATA.contains(&run.kind()) && began <= fact.us) {
            let what = format!("{}: {}", fact.node, fact.subject);
            found.add("mismatch", fact.us, case.number(fact.key), what);
        }
    }
    // A fault that the plan says is refused must have been seen.
    for (began, run) in case.fired() {
        let must = matches!(run.expect(), Expect::Refused | Expect::FailedOnce);
        let seen = mismatches.iter().any(|us| *us >= began);
        if must && DATA.contains(&run.kind()) && !seen {
            let what = format!("{}: nobody noticed that the content is wrong", run.fault.id);
            found.add("unnoticed", began, None, what);
        }
    }
}

/// A hit must be explained by a request of the same tenant, itself included (a replay), that began
/// with the same tokens: only such a one can have left those blocks.
pub(super) fn tenant_isolation(case: &Case<'_>, found: &mut Found) {
    // In the process mode prompts go as text, so that the tokens are not known here.
    if case.record.mode == Mode::Process {
        return;
    }
    let specs = case.resolved.requests_by_number();
    let tokens = |number: u64| -> Option<Vec<u32>> {
        let spec = specs.get(&number)?;
        let answer = case.info(number).into_iter().flat_map(|info| &info.reference);
        let answer = answer.map_while(|id| id.parse().ok());
        Some(spec.prompt.iter().copied().chain(answer).collect())
    };
    for hit in case.facts_of(PREFIX_HIT) {
        let Some(number) = case.number(hit.key) else { continue };
        let (Some(own), Some(info)) = (tokens(number), case.info(number)) else { continue };
        let same = |other: &Vec<u32>| other.iter().zip(&own).take_while(|(a, b)| a == b).count();
        let explains = |(other, theirs): (&u64, &crate::record::RequestInfo)| {
            let began = case.streams.get(other).map_or(u64::MAX, |stream| stream.begin_us());
            theirs.tenant == info.tenant
                && began <= hit.us
                && tokens(*other).is_some_and(|other| same(&other) as u64 >= hit.value)
        };
        if !case.record.requests.iter().any(explains) {
            let what = format!("{} tokens came from a cache of another tenant", hit.value);
            found.add("foreign-hit", hit.us, Some(number), what);
        }
    }
}
