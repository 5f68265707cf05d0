//! Who decides and who is there: I12, I13, I14, I22.

use super::Found;
use super::case::Case;
use crate::fault::{Kind, Mode};
use crate::record::{PlacedShard, Record, What};
use dunlin_actors::facts::{
    EPOCH_BUMPED, REPLICA_DOWN, REPLICA_UP, REQUEST_REPLAYED, STEP_FAILED, TOKEN_LOGGED,
};
use dunlin_runtime::faults::names::{LEASE_EXPIRED, PEER_DOWN, PEER_UP};
use std::collections::BTreeMap;

pub(super) fn one_authority(case: &Case<'_>, found: &mut Found) {
    let head = case.head();
    let restarts = case.head_losses();
    let mut epochs: BTreeMap<&str, (u64, u64)> = BTreeMap::new();
    for fact in &case.facts {
        let of_head = [EPOCH_BUMPED, REPLICA_UP, TOKEN_LOGGED].contains(&fact.name);
        if of_head && !head.is_empty() && fact.node != head {
            let what = format!("{} decided {} and is not the head", fact.node, fact.name);
            found.add("not-head", fact.us, None, what);
        }
        if fact.name != EPOCH_BUMPED {
            continue;
        }
        if let Some((last, at)) = epochs.get(fact.subject)
            && fact.key <= *last
            && !restarts.iter().any(|restart| at <= restart && *restart <= fact.us)
        {
            let what = format!("{}: epoch {} came after {last}", fact.subject, fact.key);
            found.add("epoch-fell", fact.us, None, what);
        }
        epochs.insert(fact.subject, (fact.key, fact.us));
    }
}

pub(super) fn one_incarnation(case: &Case<'_>, found: &mut Found) {
    // What each node saw last of each peer; a node that went down starts with a clean slate.
    let mut seen: BTreeMap<(&str, &str), u64> = BTreeMap::new();
    // Starts of each node so far, and in which of its lives an incarnation was seen first. Only the
    // simulator knows them as they happen.
    let mut lives: BTreeMap<&str, u64> = BTreeMap::new();
    let mut lived: BTreeMap<(&str, u64), u64> = BTreeMap::new();
    for event in &case.record.events {
        match &event.what {
            What::Node { node, state } if state == "down" => {
                seen.retain(|(observer, _), _| observer != node);
            }
            What::Node { node, state } if state == "starting" => {
                *lives.entry(node).or_insert(0) += 1;
            }
            What::Fact { node, name, subject, key, .. } if name == PEER_UP => {
                let last = seen.entry((node, subject)).or_insert(0);
                if key < last {
                    let what = format!("{node} took incarnation {key} of {subject} after {last}");
                    found.add("went-back", event.us, None, what);
                }
                *last = (*last).max(*key);
                let life = lives.get(subject.as_str()).copied().unwrap_or(0);
                let first = *lived.entry((subject, *key)).or_insert(life);
                if life > first && case.record.mode == Mode::Sim {
                    let what =
                        format!("{node} took incarnation {key} of {subject} in a later life");
                    found.add("reused", event.us, None, what);
                }
            }
            _ => {}
        }
    }
}

pub(super) fn placement_valid(case: &Case<'_>, found: &mut Found) {
    let mut down: BTreeMap<&str, u64> = BTreeMap::new();
    let slack = 2 * case.lease_us();
    for event in &case.record.events {
        match &event.what {
            What::Node { node, state } if state == "down" => {
                down.entry(node).or_insert(event.us);
            }
            What::Node { node, .. } => {
                down.remove(node.as_str());
            }
            What::Placement { replica, epoch, shards } => {
                if let Err(what) = covers(shards) {
                    let what = format!("{replica} epoch {epoch}: {what}");
                    found.add("layers", event.us, None, what);
                }
                // A death that nobody can know of yet is not held against it.
                let dead = shards.iter().find(|shard| {
                    down.get(shard.node.as_str()).is_some_and(|since| since + slack < event.us)
                });
                if let Some(dead) = dead {
                    let what = format!(
                        "{replica} epoch {epoch}: stage {} lies on {}, which is down",
                        dead.stage, dead.node
                    );
                    found.add("dead-node", event.us, None, what);
                }
            }
            _ => {}
        }
    }
}

/// Does each layer from 0 lie in one stage, and do the ranks of a stage agree on its layers?
fn covers(shards: &[PlacedShard]) -> Result<(), String> {
    let mut stages: BTreeMap<usize, (u64, u64)> = BTreeMap::new();
    for shard in shards {
        let layers = stages.entry(shard.stage).or_insert(shard.layers);
        if *layers != shard.layers {
            return Err(format!("the ranks of stage {} hold different layers", shard.stage));
        }
    }
    let mut next = 0;
    for (stage, (from, to)) in &stages {
        if *from != next || to <= from {
            return Err(format!("stage {stage} holds layers {from}..{to}, {next} is next"));
        }
        next = *to;
    }
    if next == 0 { Err("it holds no layers".to_string()) } else { Ok(()) }
}

pub(super) fn wall_clock_free(case: &Case<'_>, found: &mut Found) {
    let window = case.options().clock_window_us;
    let jumps = case.fired().filter(|(_, run)| run.kind() == Kind::ClockJump);
    for (began, run) in jumps {
        // Only where nothing else can be the cause: no other fault from well before to the end.
        let others = case.fired().any(|(other, another)| {
            another.kind() != Kind::ClockJump
                && other <= began + window
                && case.until(another).max(other) + 5 * window >= began
        });
        if others {
            continue;
        }
        let decisions = [LEASE_EXPIRED, PEER_DOWN, REPLICA_DOWN, STEP_FAILED, REQUEST_REPLAYED];
        let after = case.facts.iter().find(|fact| {
            decisions.contains(&fact.name) && (began..began + window).contains(&fact.us)
        });
        if let Some(fact) = after {
            let what = format!("{}: {} at {} followed", run.fault.id, fact.name, fact.node);
            found.add("decision", fact.us, None, what);
        }
    }
}

/// I22 over two runs of one seed, with and without the clock jumps: their traces are the same.
pub fn same_without_clock(with: &Record, without: &Record) -> Result<(), String> {
    match (&with.trace_hash, &without.trace_hash) {
        (Some(a), Some(b)) if a == b => Ok(()),
        (Some(a), Some(b)) => Err(format!("the trace is {a} with clock jumps, {b} without")),
        _ => Err("one of the runs has no trace hash; only the simulator makes one".to_string()),
    }
}
