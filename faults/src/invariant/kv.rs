//! The KV cache and memory: I7 to I11.

use super::Found;
use super::case::Case;
use crate::events::wanted::KV_MISMATCH;
use crate::fault::{Expect, Kind, Mode};
use crate::record::{What, gauges};
use dunlin_actors::facts::{
    AUDIT_FAILED, MEMORY_RESERVED, PREEMPTED, PREFIX_HIT, REQUEST_REPLAYED,
};
use std::collections::{BTreeMap, BTreeSet};

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
    for fact in case.facts_of(MEMORY_RESERVED).filter(|fact| fact.key > fact.value) {
        let (node, shard, bytes, free) = (fact.node, fact.subject, fact.key, fact.value);
        let what = format!("{node}: {shard} reserved {bytes} bytes, its device had {free} free");
        found.add("over-free", fact.us, None, what);
    }
    let mut books: BTreeMap<(&str, &str), f64> = BTreeMap::new();
    for event in &case.record.events {
        let What::Gauge { node, name, value } = &event.what else { continue };
        books.insert((node, name), *value);
        let of = |name| books.get(&(node.as_str(), name)).copied();
        let used = of(gauges::MEMORY_USED);
        if let (Some(used), Some(reserved)) = (used, of(gauges::MEMORY_RESERVED))
            && used > reserved
        {
            let what = format!("{node} uses {used:.0} of {reserved:.0} reserved bytes");
            found.add("over-reserved", event.us, None, what);
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

/// A hit must be explained by an earlier request of the same tenant that began with the same tokens,
/// or by the request itself if it was computed before (a replay, a preemption): only such a one can
/// have left those blocks.
pub(super) fn tenant_isolation(case: &Case<'_>, found: &mut Found) {
    // In the process mode prompts go as text, so that the tokens are not known here.
    if case.record.mode == Mode::Process {
        return;
    }
    let owners = Owners::of(case);
    let mut again: BTreeSet<u64> = BTreeSet::new();
    for fact in &case.facts {
        if fact.name == REQUEST_REPLAYED || fact.name == PREEMPTED {
            again.insert(fact.key);
        }
        if fact.name != PREFIX_HIT || again.contains(&fact.key) {
            continue;
        }
        let Some(number) = case.number(fact.key) else { continue };
        if !owners.explain(case, number, fact.us, fact.value) {
            let what = format!("{} tokens came from a cache of another tenant", fact.value);
            found.add("foreign-hit", fact.us, Some(number), what);
        }
    }
}

/// Whose blocks could hold what: prompt and answer of each request, by tenant and first token.
struct Owners<'a> {
    tokens: BTreeMap<u64, Vec<u32>>,
    by_head: BTreeMap<(&'a str, u32), Vec<u64>>,
    /// Tenants with requests whose tokens are not known (a burst's): they explain anything.
    unknown: BTreeSet<&'a str>,
}

impl<'a> Owners<'a> {
    fn of(case: &Case<'a>) -> Self {
        let (mut tokens, mut by_head) = (BTreeMap::new(), BTreeMap::new());
        let mut unknown = BTreeSet::new();
        for (number, info) in &case.record.requests {
            let Some(spec) = case.specs.get(number) else {
                unknown.insert(info.tenant.as_str());
                continue;
            };
            let answer = info.reference.iter().map_while(|id| id.parse().ok());
            let all: Vec<u32> = spec.prompt.iter().copied().chain(answer).collect();
            if let Some(head) = all.first() {
                let key = (info.tenant.as_str(), *head);
                by_head.entry(key).or_insert_with(Vec::new).push(*number);
            }
            tokens.insert(*number, all);
        }
        Self { tokens, by_head, unknown }
    }

    fn explain(&self, case: &Case<'_>, number: u64, us: u64, hit: u64) -> bool {
        let (Some(own), Some(info)) = (self.tokens.get(&number), case.info(number)) else {
            return true;
        };
        if self.unknown.contains(info.tenant.as_str()) {
            return true;
        }
        let head = own.first().copied().unwrap_or(0);
        let alike = self.by_head.get(&(info.tenant.as_str(), head)).into_iter().flatten();
        alike.filter(|other| **other != number).any(|other| {
            let began = case.streams.get(other).map_or(u64::MAX, |stream| stream.begin_us());
            let theirs = self.tokens.get(other).map(Vec::as_slice).unwrap_or_default();
            let same = theirs.iter().zip(own).take_while(|(a, b)| a == b).count();
            began <= us && same as u64 >= hit
        })
    }
}
