//! The 'sometimes' list: rare moments that many runs together must have met. A nightly run that
//! never met one of them did not test what it says it tests.

use crate::fault::Kind;
use crate::invariant::Case;
use dunlin_actors::facts::{
    DRAIN, EPOCH_BUMPED, EVICTED, PREEMPTED, PREFIX_HIT, REPLICA_DOWN, REPLICA_UP,
    REQUEST_ACCEPTED, REQUEST_REPLAYED, STALE_REFUSED, STEP_PLANNED, TOKEN_DELIVERED,
};
use dunlin_runtime::faults::names::{ESCALATED, LEASE_EXPIRED, PEER_DOWN};
use std::collections::BTreeMap;

/// One moment.
pub struct Sometimes {
    pub id: &'static str,
    pub statement: &'static str,
    /// What it needs that is not built yet; such a one is not demanded.
    pub needs: Option<&'static str>,
    met: fn(&Case<'_>) -> bool,
}

const fn moment(
    id: &'static str,
    statement: &'static str,
    met: fn(&Case<'_>) -> bool,
) -> Sometimes {
    Sometimes { id, statement, needs: None, met }
}

pub static ALL: [Sometimes; 14] = [
    moment("replay-at-0", "a request is replayed before its first token", |case| {
        replays(case).any(|replay| replay.delivered == 0)
    }),
    moment("replay-mid-block", "a request is replayed in the middle of a block", |case| {
        let block = case.block_tokens();
        replays(case).any(|r| r.delivered > 0 && !(r.prompt + r.delivered).is_multiple_of(block))
    }),
    moment("replay-at-edge", "a request is replayed at the edge of a block", |case| {
        let block = case.block_tokens();
        replays(case).any(|r| r.delivered > 0 && (r.prompt + r.delivered).is_multiple_of(block))
    }),
    moment("loss-in-prefill", "a replica is lost while a prompt is computed", |case| {
        replays(case).any(|replay| replay.delivered == 0 && replay.stepped)
    }),
    moment("preempted-in-recovery", "a sequence is preempted while a replica is down", |case| {
        let outages = outages(case);
        case.facts_of(PREEMPTED)
            .any(|fact| outages.iter().any(|(a, b)| (*a..*b).contains(&fact.us)))
    }),
    moment("fault-in-recovery", "a second fault begins while a replica is down", |case| {
        let outages = outages(case);
        // The fault that made the outage began before it.
        case.fired().any(|(began, _)| outages.iter().any(|(a, b)| *a < began && began < *b))
    }),
    Sometimes {
        id: "drafter-restarted",
        statement: "the drafter is restarted between draft and verify",
        needs: Some("a drafter"),
        met: |_| false,
    },
    moment(
        "epoch-in-flight",
        "an epoch rises while messages of the old one are on their way",
        |case| {
            let bumps: Vec<u64> = case.facts_of(EPOCH_BUMPED).map(|fact| fact.us).collect();
            case.facts_of(STALE_REFUSED)
                .any(|fact| bumps.iter().any(|bump| (*bump..bump + 5_000_000).contains(&fact.us)))
        },
    ),
    moment("evict-races-hit", "a block is evicted within 10 ms of a prefix hit", |case| {
        let hits: Vec<(u64, &str)> = case.facts_of(PREFIX_HIT).map(|f| (f.us, f.node)).collect();
        case.facts_of(EVICTED)
            .any(|e| hits.iter().any(|(us, node)| *node == e.node && us.abs_diff(e.us) <= 10_000))
    }),
    moment("cancel-races-finish", "a request finishes although its client cancels it", |case| {
        case.streams.iter().any(|(request, stream)| {
            stream.finished() && case.info(*request).is_some_and(|info| info.cancels)
        })
    }),
    moment("gone-in-replay", "a client leaves between a replay and the next token", |case| {
        replays(case).any(|replay| {
            let end = case.number(replay.id).and_then(|n| case.streams.get(&n)?.ends.first());
            end.is_some_and(|(us, code, _)| {
                ["cancelled", "gone"].contains(code)
                    && *us >= replay.us
                    && replay.next_token.is_none_or(|token| token > *us)
            })
        })
    }),
    moment("heal-before-lease", "a cut heals just before a lease would have ended", |case| {
        let lease = case.lease_us();
        case.fired().any(|(began, run)| {
            let cut = matches!(
                run.kind(),
                Kind::LinkPartition | Kind::LinkClog | Kind::ProcessPause | Kind::ConnHalfOpen
            );
            let until = case.until(run);
            let near = (lease / 2..=lease).contains(&until.saturating_sub(began));
            let noticed = |name| {
                case.facts_of(name).any(|fact| (began..until + lease / 2).contains(&fact.us))
            };
            cut && near && !noticed(LEASE_EXPIRED) && !noticed(PEER_DOWN)
        })
    }),
    moment("escalated", "a supervisor gives up and its parent takes over", |case| {
        case.facts_of(ESCALATED).next().is_some()
    }),
    moment("slow-drained", "a slow node is drained", |case| {
        let slow = [Kind::ProcessSlow, Kind::DeviceSlow];
        case.facts_of(DRAIN).any(|fact| case.fired_kind(&slow, fact.us, fact.us))
    }),
];

/// Ids of the moments that this run met.
pub fn hit(case: &Case<'_>) -> Vec<&'static str> {
    ALL.iter().filter(|moment| (moment.met)(case)).map(|moment| moment.id).collect()
}

/// Those that none of the runs met and that can be met, from what each run's verdict lists.
pub fn missed<'a>(hits: impl IntoIterator<Item = &'a str>) -> Vec<&'static Sometimes> {
    let hits: Vec<&str> = hits.into_iter().collect();
    ALL.iter().filter(|moment| moment.needs.is_none() && !hits.contains(&moment.id)).collect()
}

struct Replay {
    us: u64,
    id: u64,
    prompt: u64,
    delivered: u64,
    /// A step was planned between acceptance and loss.
    stepped: bool,
    next_token: Option<u64>,
}

fn replays(case: &Case<'_>) -> std::vec::IntoIter<Replay> {
    let mut prompts: BTreeMap<u64, u64> = BTreeMap::new();
    let mut delivered: BTreeMap<u64, u64> = BTreeMap::new();
    let mut steps_at: BTreeMap<u64, u64> = BTreeMap::new();
    let mut steps = 0u64;
    let mut found: Vec<Replay> = Vec::new();
    for fact in &case.facts {
        match fact.name {
            STEP_PLANNED => steps += 1,
            REQUEST_ACCEPTED => {
                prompts.insert(fact.key, fact.value);
                steps_at.insert(fact.key, steps);
            }
            TOKEN_DELIVERED => {
                *delivered.entry(fact.key).or_insert(0) += 1;
                let open = found.iter_mut().rev().find(|replay| replay.id == fact.key);
                if let Some(replay) = open {
                    replay.next_token.get_or_insert(fact.us);
                }
            }
            REQUEST_REPLAYED => found.push(Replay {
                us: fact.us,
                id: fact.key,
                prompt: prompts.get(&fact.key).copied().unwrap_or(0),
                delivered: delivered.get(&fact.key).copied().unwrap_or(0),
                stepped: steps_at.get(&fact.key).is_some_and(|at| steps > *at),
                next_token: None,
            }),
            _ => {}
        }
    }
    found.into_iter()
}

/// From each replica's loss until it serves again.
fn outages(case: &Case<'_>) -> Vec<(u64, u64)> {
    let mut open: BTreeMap<String, u64> = BTreeMap::new();
    let mut found = Vec::new();
    for fact in &case.facts {
        match fact.name {
            REPLICA_DOWN => {
                // `REPLICA: reason`.
                let replica = fact.subject.split(':').next().unwrap_or(fact.subject);
                open.entry(replica.to_string()).or_insert(fact.us);
            }
            REPLICA_UP => {
                if let Some(from) = open.remove(fact.subject) {
                    found.push((from, fact.us));
                }
            }
            _ => {}
        }
    }
    found.extend(open.into_values().map(|from| (from, u64::MAX)));
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fault::Expect;
    use crate::invariant::tests::{Run, good};
    use crate::record::What;
    use dunlin_runtime::faults::names;

    fn hits(run: &Run) -> Vec<&'static str> {
        hit(&Case::new(&run.resolved, &run.record))
    }

    /// Makes one moment come about.
    type Meeting = (&'static str, fn(&mut Run));

    /// How each moment comes about in an otherwise good run.
    const MEETINGS: [Meeting; 13] = [
        ("replay-at-0", |run| {
            run.fact(1_550_000, "front", REQUEST_REPLAYED, "lost", 101, 8);
        }),
        ("replay-mid-block", |_| {}),
        ("replay-at-edge", |run| {
            // Eight of the prompt and four of the answer: three blocks.
            run.fact(2_250_000, "front", REQUEST_REPLAYED, "lost", 101, 12);
        }),
        ("loss-in-prefill", |run| {
            run.fact(1_550_000, "front", REQUEST_REPLAYED, "lost", 101, 8);
        }),
        ("preempted-in-recovery", |run| run.fact(2_100_000, "b", PREEMPTED, "", 101, 0)),
        ("fault-in-recovery", |run| {
            run.fault("second", Kind::LinkLoss, 2_300_000, Expect::Masked);
        }),
        ("epoch-in-flight", |run| run.fact(2_100_000, "front", STALE_REFUSED, "Tokens", 0, 0)),
        ("evict-races-hit", |run| {
            run.fact(3_000_000, "b", PREFIX_HIT, "", 102, 4);
            run.fact(3_000_500, "b", EVICTED, "", 0, 2);
        }),
        ("cancel-races-finish", |run| {
            run.record.requests.values_mut().for_each(|info| info.cancels = true);
        }),
        ("gone-in-replay", |run| {
            run.drop_events(|what| {
                matches!(what, What::Ended { request: 1, .. })
                    || matches!(what, What::Token { request: 1, position: 3.., .. })
                    || matches!(what, What::Fact { name, key: 101, value: 3.., .. }
                        if name == TOKEN_DELIVERED)
            });
            let (code, message) = ("gone".into(), String::new());
            run.push(2_100_000, What::Ended { request: 1, code, message });
        }),
        ("heal-before-lease", |run| {
            run.fault("cut", Kind::LinkPartition, 6_000_000, Expect::Masked);
            run.record.faults[1].ended_us = Some(6_900_000);
        }),
        ("escalated", |run| run.fact(3_000_000, "a", names::ESCALATED, "node", 0, 0)),
        ("slow-drained", |run| {
            run.fault("slow", Kind::DeviceSlow, 6_000_000, Expect::Masked);
            run.fact(6_050_000, "a", DRAIN, "begun", 0, 1);
        }),
    ];

    #[test]
    fn each_moment_is_seen_where_it_is_and_not_elsewhere() {
        assert_eq!(hits(&good()), ["replay-mid-block"]);
        for (id, meet) in MEETINGS {
            let mut run = good();
            meet(&mut run);
            assert!(hits(&run).contains(&id), "{id} not in {:?}", hits(&run));
        }
        for moment in ALL.iter().filter(|moment| moment.needs.is_none()) {
            assert!(MEETINGS.iter().any(|(id, _)| *id == moment.id), "{} is untested", moment.id);
        }
    }

    #[test]
    fn what_was_never_met_is_missed() {
        let met: Vec<&str> = MEETINGS.iter().map(|(id, _)| *id).collect();
        assert!(missed(met.iter().copied()).is_empty());
        assert_eq!(missed(met.iter().copied().skip(1))[0].id, "replay-at-0");
    }
}
