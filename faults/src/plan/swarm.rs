//! The random part: for each run a subset of the kinds (each on with chance 1/2), and faults of
//! them at random times on random targets, inside what the tolerance promises to mask.
//!
//! The tolerance is kept against the cluster file's placement: at no time are more than
//! `nodes_down` nodes out of service, and (`keep`) the head and every node of at least one replica
//! are in service. A node counts as out from the start of a fault that takes it out until
//! [`RECOVERY_US`] after its end, because a replica that comes back has to load.

use super::target::nodes_hit;
use super::{Plan, Swarm};
use crate::catalog::{self, Hits, Lasts, Param, ROWS, Row};
use crate::draw::Draws;
use crate::events::MESSAGES;
use crate::fault::{Fault, Kind, Mode, Params, Target, Trigger};
use crate::resolved::Keep;
use std::collections::BTreeSet;

/// After a fault's end its nodes still count as out of service for so long.
pub const RECOVERY_US: u64 = 3_000_000;
/// Draws before a place in time is left empty because the tolerance allows nothing.
const TRIES: u64 = 12;
const MOST: u64 = 10_000;
/// Roles of actors that a swarm hits: those whose loss is masked.
const ROLES: [&str; 3] = ["shard", "scheduler", "agent"];

/// A fault that was drawn, and how long it stands in the books.
struct Drawn {
    from: u64,
    to: u64,
    /// Nodes that it takes out, until `to` and [`RECOVERY_US`] more.
    down: BTreeSet<String>,
}

pub(super) fn draw(plan: &Plan, swarm: &Swarm, seed: u64, mode: Mode) -> Vec<Fault> {
    let kinds = kinds(swarm, seed, mode);
    let mut faults = Vec::new();
    let mut books: Vec<Drawn> = Vec::new();
    let mut gaps = Draws::new(seed, "swarm/gaps");
    let end = plan.phases.warmup_us.saturating_add(plan.phases.chaos_us);
    let mut at = plan.phases.warmup_us;
    for number in 0..MOST {
        at = at.saturating_add(gaps.gap(swarm.mean_gap_us as f64) as u64);
        if at >= end || kinds.is_empty() {
            break;
        }
        let draws = Draws::new(seed, format!("swarm/{number}"));
        let active = books.iter().filter(|drawn| drawn.from <= at && at < drawn.to).count();
        if active as u64 >= swarm.max_active {
            continue;
        }
        let found = (0..TRIES).find_map(|turn| {
            let mut own = draws.sub(&format!("try/{turn}"));
            let kind = weighted(&kinds, &mut own)?;
            let drawn = one(plan, kind, number, at, end, &own)?;
            fits(plan, &books, &drawn.1).then_some(drawn)
        });
        if let Some((fault, book)) = found {
            faults.push(fault);
            books.push(book);
        }
    }
    if let Some((on, fires)) = swarm.buggify {
        faults.extend(buggify(plan, seed, on, fires));
    }
    faults
}

/// The kinds that are on in this run, with their weights.
fn kinds(swarm: &Swarm, seed: u64, mode: Mode) -> Vec<(Kind, u64)> {
    let named = !swarm.kinds.is_empty();
    let all: Vec<(Kind, u64)> = if named {
        swarm.kinds.clone()
    } else {
        ROWS.iter().map(|row| (row.kind, u64::from(row.weight))).collect()
    };
    let usable = |(kind, weight): &(Kind, u64)| *weight > 0 && catalog::row(*kind).in_mode(mode);
    let usable: Vec<(Kind, u64)> = all.into_iter().filter(usable).collect();
    let on = |kind: Kind| Draws::new(seed, format!("swarm/kind/{}", kind.name())).chance(0.5);
    let chosen: Vec<(Kind, u64)> = usable.iter().copied().filter(|(kind, _)| on(*kind)).collect();
    // A run without any kind would test nothing.
    if chosen.is_empty() { usable } else { chosen }
}

fn weighted(kinds: &[(Kind, u64)], draws: &mut Draws) -> Option<Kind> {
    let total: u64 = kinds.iter().map(|(_, weight)| weight).sum();
    let mut left = draws.below(total);
    for (kind, weight) in kinds {
        if left < *weight {
            return Some(*kind);
        }
        left -= weight;
    }
    None
}

fn one(
    plan: &Plan,
    kind: Kind,
    number: u64,
    at: u64,
    end: u64,
    draws: &Draws,
) -> Option<(Fault, Drawn)> {
    let row = catalog::row(kind);
    let target = target(plan, row, draws)?;
    let lasts_us = match row.lasts {
        Lasts::Once => None,
        // From a tenth of a second to five, even on a logarithmic scale.
        _ => Some((1e5 * 50f64.powf(draws.sub("for").unit())) as u64),
    };
    let params = params(plan, row, draws);
    let churn = match kind {
        Kind::ControlChurn => 1_000_000 * params.count.unwrap_or(3),
        _ => 0,
    };
    let to = at + lasts_us.unwrap_or(0) + churn;
    if to >= end {
        return None;
    }
    let times = if row.repeats { 1 + draws.sub("times").below(3) as u32 } else { 1 };
    let down = if takes_out(row) { nodes_hit(&target, &plan.config) } else { BTreeSet::new() };
    let fault = Fault {
        id: format!("swarm-{number}"),
        kind,
        target,
        when: Trigger::At { us: at },
        lasts_us,
        times: if matches!(row.hits, Hits::Link) { times } else { 1 },
        params,
        expect: row.expect,
    };
    Some((fault, Drawn { from: at, to: to.max(at + 1), down }))
}

/// Does the kind take its node, its replica or its link out for a while?
fn takes_out(row: &Row) -> bool {
    let slow = matches!(
        row.kind,
        Kind::ProcessSlow
            | Kind::ActorSlow
            | Kind::DeviceSlow
            | Kind::LinkDelay
            | Kind::LinkLoss
            | Kind::LinkBandwidth
            | Kind::LinkRebind
            | Kind::TimerLate
            | Kind::ClockJump
            | Kind::ControlDupId
            | Kind::ControlSkew
    );
    !slow && row.hits != Hits::Client
}

fn target(plan: &Plan, row: &Row, draws: &Draws) -> Option<Target> {
    let mut own = draws.sub("target");
    let head = plan.config.cluster.head.to_string();
    let nodes: Vec<String> = plan.config.nodes.keys().map(|name| name.to_string()).collect();
    let workers: Vec<String> = nodes.iter().filter(|name| **name != head).cloned().collect();
    let mut shards = Vec::new();
    for replica in &plan.config.replicas {
        for (stage, group) in replica.stages.iter().enumerate() {
            for rank in 0..group.len() {
                shards.push(Target::Shard { replica: replica.name.clone(), stage, rank });
            }
        }
    }
    match row.hits {
        Hits::Node => Some(Target::Node(own.pick(&workers)?.clone())),
        Hits::Shard => own.pick(&shards).cloned(),
        Hits::Actor => match *own.pick(&ROLES)? {
            "shard" => own.pick(&shards).cloned(),
            "agent" => {
                let (node, role) = (own.pick(&workers)?.clone(), "agent".to_string());
                Some(Target::Actor { node, role, instance: String::new() })
            }
            role => {
                let replica = own.pick(&plan.config.replicas)?;
                let node = replica.stages.first()?.first()?.node.to_string();
                let (role, instance) = (role.to_string(), replica.name.clone());
                Some(Target::Actor { node, role, instance })
            }
        },
        Hits::Link => links(&nodes, &workers, row.kind, &mut own),
        Hits::Client if matches!(row.kind, Kind::ClientBurst | Kind::ClientMalformed) => {
            Some(Target::All)
        }
        Hits::Client => Some(Target::Request(own.below(plan.workload.requests))),
    }
}

fn links(nodes: &[String], workers: &[String], kind: Kind, own: &mut Draws) -> Option<Target> {
    let one = own.pick(workers)?.clone();
    let others: Vec<String> = nodes.iter().filter(|name| **name != one).cloned().collect();
    let other = own.pick(&others)?.clone();
    let (there, back) = ((one.clone(), other.clone()), (other, one.clone()));
    let single = matches!(
        kind,
        Kind::FrameCorrupt | Kind::FrameTruncate | Kind::FrameDup | Kind::FrameStale
    );
    Some(Target::Links(match own.below(if single { 2 } else { 4 }) {
        0 => vec![there],
        1 => vec![back],
        2 => vec![there, back],
        // The node from everybody.
        _ => others
            .iter()
            .flat_map(|b| [(one.clone(), b.clone()), (b.clone(), one.clone())])
            .collect(),
    }))
}

fn params(plan: &Plan, row: &Row, draws: &Draws) -> Params {
    let lease_us = plan.config.membership.lease_ms.saturating_mul(1000);
    let mut params = Params::default();
    for take in row.takes {
        let mut own = draws.sub(take.param.name());
        match take.param {
            Param::Factor => params.factor = Some(2.0 + own.below(7) as f64),
            Param::Delay => {
                let p50 = own.range(1_000, 20_000);
                // Far below the lease: no false death is to come of it.
                let most = (lease_us / 4).max(p50 + 1);
                (params.p50_us, params.p99_us) = (Some(p50), Some(own.range(p50, most)));
            }
            Param::P => params.p = Some(own.range(5, 100) as f64 / 1000.0),
            Param::BitsPerSecond => params.bits_per_second = Some(own.range(1_000_000, 50_000_000)),
            Param::Bytes => params.bytes = Some(1 << own.range(20, 34)),
            Param::Ms if row.kind == Kind::TimerLate => {
                let most = (lease_us / 1000 / 8).max(2);
                params.ms = i64::try_from(own.range(1, most)).ok();
            }
            Param::Ms => {
                let ms = i64::try_from(own.range(1, 7_200_000)).unwrap_or(1);
                params.ms = Some(if own.chance(0.5) { -ms } else { ms });
            }
            Param::Message if row.hits == Hits::Link => {
                // Half of the time any frame.
                params.message = if own.chance(0.5) {
                    own.pick(&MESSAGES[1..]).map(|name| name.to_string())
                } else {
                    None
                };
            }
            Param::Nth => params.nth = Some(own.range(1, 6)),
            Param::Count => params.count = Some(own.range(1, 9)),
            // The mode draws these where they fire; the rest keeps its default.
            _ => {}
        }
    }
    // A stall of everything is a clog.
    if row.kind == Kind::StreamStall {
        params.message = Some("flow".to_string());
    }
    params
}

/// Would everything that tolerance keeps still be there?
fn fits(plan: &Plan, books: &[Drawn], new: &Drawn) -> bool {
    if new.down.is_empty() {
        return true;
    }
    let mut down = new.down.clone();
    for old in books.iter().filter(|old| !old.down.is_empty()) {
        let overlaps = old.from < new.to + RECOVERY_US && new.from < old.to + RECOVERY_US;
        if overlaps {
            down.extend(old.down.iter().cloned());
        }
    }
    let head = plan.config.cluster.head.as_str();
    if down.len() as u64 > u64::from(plan.tolerance.nodes_down) || down.contains(head) {
        return false;
    }
    match plan.tolerance.keep {
        Keep::Head => true,
        Keep::StageAndHead => {
            let live = |replica: &dunlin_runtime::config::ReplicaConfig| {
                replica.stages.iter().flatten().all(|shard| !down.contains(shard.node.as_str()))
            };
            let spare = plan
                .config
                .nodes
                .iter()
                .any(|(name, node)| !node.devices.is_empty() && !down.contains(name.as_str()));
            // Without replicas in the file the planner places on any node that is left.
            if plan.config.replicas.is_empty() {
                spare
            } else {
                plan.config.replicas.iter().any(live)
            }
        }
    }
}

/// Small delays at fault points: each point is on with chance `on`; where it is, it is hit a few
/// times, as if each visit were hit with chance `fires`. (FoundationDB's BUGGIFY, made concrete.)
fn buggify(plan: &Plan, seed: u64, on: f64, fires: f64) -> Vec<Fault> {
    let mut faults = Vec::new();
    for replica in &plan.config.replicas {
        for (stage, group) in replica.stages.iter().enumerate() {
            for rank in 0..group.len() {
                let point = format!("{}/{stage}/{rank}", replica.name);
                let mut draws = Draws::new(seed, format!("buggify/{point}"));
                if fires <= 0.0 || !draws.chance(on) {
                    continue;
                }
                let mut nth = 0;
                for hit in 0..3 {
                    nth += 1 + draws.gap(1.0 / fires) as u64;
                    let us = draws.range(100, 20_000);
                    faults.push(Fault {
                        id: format!("buggify-{}-{stage}-{rank}-{hit}", replica.name),
                        kind: Kind::ActorSlow,
                        target: Target::Shard { replica: replica.name.clone(), stage, rank },
                        when: Trigger::Step { replica: Some(replica.name.clone()), step: nth },
                        lasts_us: Some(50_000),
                        times: 1,
                        params: Params { p50_us: Some(us), p99_us: Some(us), ..Params::default() },
                        expect: catalog::row(Kind::ActorSlow).expect,
                    });
                }
            }
        }
    }
    faults
}
