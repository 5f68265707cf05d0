//! How much is done and how much waits: I15, I16, I17.

use super::Found;
use super::case::Case;
use crate::record::{What, gauges};
use dunlin_actors::facts::{
    DRAIN, REPLICA_DOWN, REQUEST_ACCEPTED, REQUEST_ENDED, REQUEST_REPLAYED, TOKEN_DELIVERED,
};
use dunlin_runtime::faults::names::{ACTOR_RESTARTED, ESCALATED, PEER_DOWN};
use std::collections::{BTreeMap, BTreeSet};

pub(super) fn restart_intensity(case: &Case<'_>, found: &mut Found) {
    let options = case.options();
    let (max, within) = (options.restart_max as usize, options.restart_within_us);
    if max == 0 || within == 0 {
        return;
    }
    let mut restarts: BTreeMap<(&str, &str), Vec<u64>> = BTreeMap::new();
    for fact in case.facts_of(ACTOR_RESTARTED) {
        restarts.entry((fact.node, fact.subject)).or_default().push(fact.us);
    }
    for event in &case.record.events {
        if let What::Node { node, state } = &event.what
            && state == "starting"
            // The heal starts what its supervisor has given up, as an operator would.
            && event.us < case.record.phases.chaos_us
        {
            restarts.entry((node, "process")).or_default().push(event.us);
        }
    }
    for ((node, who), times) in restarts {
        // The first start of a process is no restart.
        let allowed = if who == "process" { max + 1 } else { max };
        let burst = times
            .windows(allowed + 1)
            .find(|window| window.first().zip(window.last()).is_some_and(|(a, b)| b - a < within));
        let Some(last) = burst.and_then(|window| window.last()) else { continue };
        let escalated =
            case.facts_of(ESCALATED).any(|fact| fact.node == node && fact.us >= times[0]);
        if !escalated {
            let what = format!(
                "{node}: {who} was restarted {} times within {} s and nobody gave up",
                allowed + 1,
                within / 1_000_000
            );
            found.add("not-escalated", *last, None, what);
        }
    }
}

pub(super) fn bounded_work(case: &Case<'_>, found: &mut Found) {
    let losses = [REPLICA_DOWN, PEER_DOWN, DRAIN];
    let told = case.facts.iter().filter(|fact| losses.contains(&fact.name)).count() as u64;
    let hits: u64 = case.fired().map(|(_, run)| u64::from(run.fault.times)).sum();
    let recoveries = told + hits;
    let mut delivered: BTreeMap<u64, u64> = BTreeMap::new();
    let mut replays: BTreeMap<u64, u64> = BTreeMap::new();
    for fact in &case.facts {
        match fact.name {
            TOKEN_DELIVERED => *delivered.entry(fact.key).or_insert(0) += 1,
            REQUEST_REPLAYED => {
                let count = replays.entry(fact.key).or_insert(0);
                *count += 1;
                let number = case.number(fact.key);
                if *count == recoveries + 1 {
                    let what =
                        format!("it was handed out again {count} times, {recoveries} losses");
                    found.add("replays", fact.us, number, what);
                }
                let prompt = number.and_then(|number| case.info(number)).map(|i| i.prompt_tokens);
                let Some(prompt) = prompt.filter(|prompt| *prompt > 0) else { continue };
                let most = u64::from(prompt) + delivered.get(&fact.key).copied().unwrap_or(0);
                if fact.value > most {
                    let what = format!("{} tokens are computed anew, it has {most}", fact.value);
                    found.add("recomputed", fact.us, number, what);
                }
            }
            _ => {}
        }
    }
}

pub(super) fn bounded_queues(case: &Case<'_>, found: &mut Found) {
    open_requests(case, found);
    let mut limits: BTreeMap<(&str, &str), f64> = BTreeMap::new();
    for event in &case.record.events {
        match &event.what {
            What::Gauge { node, name, value } => {
                if let Some(queue) = name.strip_prefix(gauges::LIMIT) {
                    limits.insert((node, queue), *value);
                } else if let Some(queue) = name.strip_prefix(gauges::QUEUE)
                    && let Some(limit) = limits.get(&(node.as_str(), queue))
                    && value > limit
                {
                    let what = format!("{node}: {queue} holds {value:.0}, its limit is {limit:.0}");
                    found.add("over-limit", event.us, None, what);
                }
            }
            What::Ended { request, code, .. } if code == "overloaded" => {
                let accepted = case.streams.get(request).is_some_and(|s| !s.accepted.is_empty());
                if accepted {
                    let what = "it was accepted, then ended as overloaded";
                    found.add("late-refusal", event.us, Some(*request), what);
                }
            }
            _ => {}
        }
    }
}

/// The router never has more requests open than the cluster file allows.
fn open_requests(case: &Case<'_>, found: &mut Found) {
    let most = case.config.as_ref().map_or(usize::MAX, |c| c.limits.max_open_requests as usize);
    let losses = case.head_losses();
    let mut open: BTreeSet<u64> = BTreeSet::new();
    let mut last = 0;
    for fact in &case.facts {
        // A new router knows none.
        if losses.iter().any(|us| (last..=fact.us).contains(us)) {
            open.clear();
        }
        last = fact.us + 1;
        match fact.name {
            REQUEST_ACCEPTED => _ = open.insert(fact.key),
            REQUEST_ENDED => _ = open.remove(&fact.key),
            _ => continue,
        }
        if open.len() > most {
            let what = format!("{} requests are open, {most} are allowed", open.len());
            return found.add("over-limit", fact.us, case.number(fact.key), what);
        }
    }
}
