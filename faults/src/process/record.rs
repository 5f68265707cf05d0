//! What a run has seen, as the [`Record`] that everything else reads.

use super::board::FactSeen;
use super::client::Seen;
use super::inject;
use super::run::Run;
use crate::fault::{Fault, Kind, Mode, Target};
use crate::record::{Event, NodeInfo, Phases, PlacedShard, Record, RequestInfo, What};
use crate::resolved::{RequestSpec, Resolved};
use dunlin_actors::facts;
use dunlin_actors::messages::{ReplicaState, ShardPlace};
use dunlin_runtime::faults::names;
use std::collections::{BTreeMap, BTreeSet};

impl Run<'_> {
    pub fn record(&mut self, phases: Phases) -> Record {
        let config = &self.cluster.site.config;
        let head = config.cluster.head.as_str();
        let info =
            |(name, node): (&dunlin_runtime::NodeName, &dunlin_runtime::config::NodeConfig)| {
                NodeInfo {
                    name: name.to_string(),
                    role: if name.as_str() == head { "head" } else { "worker" }.into(),
                    devices: node.devices.clone(),
                }
            };
        let nodes = config.nodes.iter().map(info).collect();
        let mut events = std::mem::take(&mut self.events);
        events.sort_by_key(|event| event.us);
        let lives = lives(&events);
        let numbers: BTreeMap<u64, u64> =
            self.board.read(|seen| seen.ids.iter().map(|(number, id)| (*id, *number)).collect());
        let mut faults = std::mem::take(&mut self.faults);
        for (index, run) in faults.iter_mut().enumerate() {
            let Some(began) = run.began_us else { continue };
            let open = |number: &u64| {
                lives.get(number).is_some_and(|(from, to)| *from <= began && began <= *to)
            };
            let ids = self.touched.get(&index).cloned().unwrap_or_default();
            let mut hit: BTreeSet<u64> = match &run.fault.target {
                Target::Request(number) => [*number].into(),
                _ => ids.iter().filter_map(|id| numbers.get(id).copied()).collect(),
            };
            hit.retain(open);
            run.touched = hit.into_iter().collect();
        }
        // Requests that were never sent are none.
        self.requests.retain(|number, _| lives.contains_key(number));
        Record {
            plan: self.plan.name.clone(),
            mode: Mode::Process,
            seed: self.plan.seed,
            repro: repro(self.plan),
            env: self.env(),
            nodes,
            phases,
            requests: std::mem::take(&mut self.requests),
            faults,
            events,
            outside: self.outside.clone(),
            rest: None,
            stuck: None,
            trace_hash: None,
        }
    }

    fn env(&self) -> BTreeMap<String, String> {
        let cores = std::thread::available_parallelism().map_or(0, |cores| cores.get());
        let cpu = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        let cpu = cpu.lines().find_map(|line| line.strip_prefix("model name")?.split_once(": "));
        let lost = self.board.read(|seen| seen.facts_lost);
        BTreeMap::from([
            ("version".into(), env!("CARGO_PKG_VERSION").into()),
            ("os".into(), format!("{} {}", std::env::consts::OS, std::env::consts::ARCH)),
            ("cores".into(), cores.to_string()),
            ("cpu".into(), cpu.map(|(_, name)| name.to_string()).unwrap_or_default()),
            ("model".into(), self.gateway.model.clone()),
            ("facts_lost".into(), lost.to_string()),
        ])
    }
}

pub fn placement(state: &ReplicaState) -> What {
    let shard = |place: &ShardPlace| PlacedShard {
        node: place.node.to_string(),
        device: place.device.clone(),
        stage: place.stage,
        rank: place.spec.rank,
        layers: (place.spec.layers.start as u64, place.spec.layers.end as u64),
    };
    What::Placement {
        replica: state.replica.clone(),
        epoch: state.epoch.0,
        shards: state.places.iter().map(shard).collect(),
    }
}

/// The answer of a request that nothing disturbed.
pub fn undisturbed(request: &RequestSpec, seen: &[Seen]) -> Result<RequestInfo, String> {
    let mut info = info(request);
    for what in seen {
        match what {
            Seen::Token { text, .. } => info.reference.push(text.clone()),
            Seen::Usage { prompt_tokens, .. } => info.prompt_tokens = *prompt_tokens,
            Seen::Refused { code } => return Err(format!("refused with {code}")),
            Seen::Ended { code, .. } if code == "finished" => return Ok(info),
            Seen::Ended { code, message } => return Err(format!("{code}: {message}")),
            Seen::Submitted | Seen::Accepted { .. } | Seen::Unread(_) => {}
        }
    }
    Err("it has no end".into())
}

pub fn info(request: &RequestSpec) -> RequestInfo {
    RequestInfo {
        router_id: None,
        tenant: request.tenant.clone(),
        prompt_tokens: u32::try_from(request.prompt.len()).unwrap_or(u32::MAX),
        max_tokens: request.max_tokens,
        cancels: request.cancel_after.is_some(),
        deadline_us: request.deadline_us,
        reference: Vec::new(),
    }
}

/// From when to when each request was open.
fn lives(events: &[Event]) -> BTreeMap<u64, (u64, u64)> {
    let mut lives = BTreeMap::new();
    for event in events {
        match &event.what {
            What::Submitted { request } => {
                lives.entry(*request).or_insert((event.us, u64::MAX));
            }
            What::Ended { request, .. } | What::Refused { request, .. } => {
                if let Some(life) = lives.get_mut(request) {
                    life.1 = life.1.min(event.us);
                }
            }
            _ => {}
        }
    }
    lives
}

/// Is this shard on what the fault hits?
pub fn on_target(fault: &Fault, nodes: &[String]) -> impl Fn(&str, &str) -> bool {
    let (target, all) = (fault.target.clone(), nodes.to_vec());
    move |node, shard| match &target {
        Target::Shard { replica, stage, rank } => shard == format!("{replica}/{stage}/{rank}"),
        Target::Links(links) => links.iter().any(|(a, b)| a == node || b == node),
        Target::Request(_) => false,
        other => inject::nodes_of(other, &all).iter().any(|hit| hit == node),
    }
}

/// Does the system show by this fact that it has noticed a fault of this kind?
pub fn detects(kind: Kind, fact: &FactSeen) -> bool {
    let name = fact.name.as_str();
    let ended_badly = || name == facts::REQUEST_ENDED && fact.subject != "finished";
    match kind {
        Kind::ClientDisconnect | Kind::LogitsNan => ended_badly() || name == facts::STEP_FAILED,
        Kind::FrameCorrupt | Kind::FrameTruncate | Kind::FrameDup | Kind::FrameStale => {
            let refusals = [names::FRAME_REFUSED, facts::STALE_REFUSED, names::PEER_DOWN];
            refusals.contains(&name) || name == facts::STEP_FAILED
        }
        Kind::ControlDupId | Kind::ControlSkew => name == names::FRAME_REFUSED,
        _ => [
            names::PEER_DOWN,
            names::ACTOR_RESTARTED,
            names::ESCALATED,
            names::LEASE_EXPIRED,
            facts::STEP_FAILED,
            facts::REPLICA_DOWN,
            facts::PLAN_MISMATCH,
            facts::AUDIT_FAILED,
        ]
        .contains(&name),
    }
}

fn repro(plan: &Resolved) -> String {
    let mut line = format!("dunlin faults run {} --mode process --seed {}", plan.plan, plan.seed);
    for (key, value) in &plan.set {
        line.push_str(&format!(" --set '{key}={value}'"));
    }
    line
}
