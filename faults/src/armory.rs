//! Which armed fault hits which [`Site`], and with what [`Action`].
//!
//! Pure but for its counters: no clock, no I/O. The simulator has one for all nodes; in the process
//! mode each node process has its own. A fault is armed when it begins and disarmed when it ends;
//! in between, the `nth` matching site and the ones after it are hit, `times` times in all.
//!
//! What is done to whole processes, links, clocks and clients is not decided here.

use crate::draw::{draw, log_normal};
use crate::fault::{Fault, Kind, Target};
use dunlin_actors::facts::STEP_DONE;
use dunlin_runtime::faults::names::FAULT_DONE;
use dunlin_runtime::{Action, Fact, Site};
use std::collections::BTreeMap;
use std::time::Duration;

/// How long an actor or device hangs where the plan does not say: for good.
const FOR_GOOD: Duration = Duration::from_secs(3600);
/// A step's time until one was measured.
const STEP_US: u64 = 1_000;

#[derive(Debug, Default)]
pub struct Armory {
    seed: u64,
    armed: Vec<Armed>,
    /// Sticky failures: everything on this device fails until its process ends.
    stuck: Vec<Stuck>,
    /// Shortest step of each shard, `REPLICA/STAGE/RANK`, in microseconds.
    step_us: BTreeMap<String, u64>,
    /// Id that a request of the workload has inside the cluster.
    ids: BTreeMap<u64, u64>,
    /// Hits whose effect was not told yet, by node, oldest first.
    unproven: BTreeMap<String, Vec<String>>,
}

#[derive(Debug)]
struct Armed {
    fault: Fault,
    /// Matching sites so far.
    seen: u64,
    fired: u32,
    /// The shard that was hit last, of kinds that a step may be unable to carry out.
    doubtful: Option<(String, usize, usize)>,
}

#[derive(Debug)]
struct Stuck {
    fault: String,
    node: String,
    stage: usize,
    rank: usize,
    text: String,
}

/// A fault that hits a site.
#[derive(Debug, Clone, PartialEq)]
pub struct Hit {
    /// The fault's id.
    pub fault: String,
    pub action: Action,
}

impl Armory {
    pub fn new(seed: u64) -> Self {
        Self { seed, ..Self::default() }
    }

    /// Does a fault of this kind work through sites in every mode? In processes `stream.stall`
    /// does besides; in memory the network holds the frames.
    pub fn takes(kind: Kind) -> bool {
        use Kind::*;
        matches!(
            kind,
            ProcessSlow
                | ProcessStartFail
                | ActorPanic
                | ActorHang
                | ActorSlow
                | FrameCorrupt
                | FrameTruncate
                | FrameDup
                | FrameStale
                | StreamStall
                | DeviceOom
                | DeviceLaunchError
                | DeviceHang
                | DeviceSlow
                | BitsKv
                | BitsWeight
                | LogitsNan
                | KvStale
                | KvSwap
        )
    }

    pub fn arm(&mut self, fault: Fault) {
        self.armed.push(Armed { fault, seen: 0, fired: 0, doubtful: None });
    }

    pub fn disarm(&mut self, fault: &str) {
        self.armed.retain(|armed| armed.fault.id != fault);
    }

    pub fn is_empty(&self) -> bool {
        self.armed.is_empty() && self.stuck.is_empty()
    }

    /// How often the fault has fired since it was armed.
    pub fn fired(&self, fault: &str) -> u32 {
        let found = self.armed.iter().find(|armed| armed.fault.id == fault);
        found.map_or(0, |armed| armed.fired)
    }

    /// The node's process has ended: what stuck to its devices is gone.
    pub fn process_ended(&mut self, node: &str) {
        self.stuck.retain(|stuck| stuck.node != node);
        self.unproven.remove(node);
    }

    /// Request number `number` of the workload is known inside the cluster as `id`.
    pub fn name_request(&mut self, number: u64, id: u64) {
        self.ids.insert(number, id);
    }

    /// Learns step times. For [`FAULT_DONE`], says whose effect it proves: the latest hit on that
    /// node that has no proof yet.
    pub fn observe(&mut self, fact: &Fact) -> Option<String> {
        match fact.name {
            STEP_DONE => {
                let least = self.step_us.entry(fact.subject.clone()).or_insert(fact.value);
                *least = (*least).min(fact.value);
                None
            }
            FAULT_DONE => {
                let waiting = self.unproven.get_mut(fact.node.as_str())?;
                if waiting.is_empty() { None } else { Some(waiting.remove(0)) }
            }
            _ => None,
        }
    }

    pub fn decide(&mut self, site: &Site<'_>) -> Option<Hit> {
        if let Some(hit) = self.stuck(site) {
            return Some(hit);
        }
        for at in 0..self.armed.len() {
            let armed = &mut self.armed[at];
            let fault = &armed.fault;
            if !fits(fault, site, &self.ids) {
                continue;
            }
            armed.seen += 1;
            // A hit whose effect was not told by the shard's next step had none (nothing written
            // yet, one block only, a part of a prompt that draws no token): it does not count.
            let shard = shard_of(site);
            if shard.is_some() && armed.doubtful == shard {
                armed.doubtful = None;
                let node = node_of(site);
                let waiting = self.unproven.entry(node.to_string()).or_default();
                if let Some(at) = waiting.iter().position(|id| *id == armed.fault.id) {
                    waiting.remove(at);
                    armed.fired = armed.fired.saturating_sub(1);
                }
            }
            let fault = &armed.fault;
            let lasting =
                matches!(fault.kind, Kind::ActorSlow | Kind::DeviceSlow | Kind::ProcessSlow);
            let early = armed.seen < fault.params.nth.unwrap_or(1);
            if early || (!lasting && armed.fired >= fault.times) {
                continue;
            }
            let count = u64::from(armed.fired);
            let Some(action) = action(fault, site, self.seed, count, &self.step_us, &self.ids)
            else {
                continue;
            };
            armed.fired += 1;
            use Kind::{BitsKv, KvStale, KvSwap, LogitsNan};
            if matches!(armed.fault.kind, BitsKv | KvStale | KvSwap | LogitsNan) {
                armed.doubtful = shard;
            }
            let fault = &armed.fault;
            let hit = Hit { fault: fault.id.clone(), action };
            self.note(site, &hit);
            return Some(hit);
        }
        None
    }

    fn stuck(&self, site: &Site<'_>) -> Option<Hit> {
        let (node, stage, rank) = match site {
            Site::Load { node, stage, rank, .. } | Site::Step { node, stage, rank, .. } => {
                (node.as_str(), *stage, *rank)
            }
            _ => return None,
        };
        let stuck =
            self.stuck.iter().find(|s| s.node == node && s.stage == stage && s.rank == rank)?;
        let action = Action::Fail { text: stuck.text.clone(), sticky: true };
        Some(Hit { fault: stuck.fault.clone(), action })
    }

    fn note(&mut self, site: &Site<'_>, hit: &Hit) {
        self.unproven.entry(node_of(site).to_string()).or_default().push(hit.fault.clone());
        if let (
            Action::Fail { text, sticky: true },
            Site::Load { node, stage, rank, .. } | Site::Step { node, stage, rank, .. },
        ) = (&hit.action, site)
        {
            self.stuck.push(Stuck {
                fault: hit.fault.clone(),
                node: node.to_string(),
                stage: *stage,
                rank: *rank,
                text: text.clone(),
            });
        }
    }
}

fn node_of<'a>(site: &Site<'a>) -> &'a str {
    match site {
        Site::Start { node }
        | Site::Message { node, .. }
        | Site::FrameOut { node, .. }
        | Site::Load { node, .. }
        | Site::Step { node, .. } => node.as_str(),
    }
}

/// The shard whose step this is: node, stage, rank.
fn shard_of(site: &Site<'_>) -> Option<(String, usize, usize)> {
    match site {
        Site::Step { node, stage, rank, .. } => Some((node.to_string(), *stage, *rank)),
        _ => None,
    }
}

/// Is this a site where the fault's kind has a meaning, and its target?
fn fits(fault: &Fault, site: &Site<'_>, ids: &BTreeMap<u64, u64>) -> bool {
    use Kind::*;
    let kind = match site {
        Site::Start { .. } => matches!(fault.kind, ProcessStartFail),
        Site::Message { .. } => matches!(fault.kind, ActorPanic | ActorHang | ActorSlow),
        Site::FrameOut { .. } => {
            matches!(fault.kind, FrameCorrupt | FrameTruncate | FrameDup | FrameStale | StreamStall)
        }
        Site::Load { .. } => matches!(fault.kind, DeviceOom | BitsWeight),
        Site::Step { .. } => matches!(
            fault.kind,
            DeviceOom
                | DeviceLaunchError
                | DeviceHang
                | DeviceSlow
                | ProcessSlow
                | BitsKv
                | BitsWeight
                | LogitsNan
                | KvStale
                | KvSwap
        ),
    };
    kind && target_fits(&fault.target, site, ids) && message_fits(fault, site)
}

fn target_fits(target: &Target, site: &Site<'_>, ids: &BTreeMap<u64, u64>) -> bool {
    match target {
        Target::All => true,
        Target::Node(node) => node_of(site) == node,
        Target::Actor { node, role, instance } => {
            let here = node_of(site) == node;
            match site {
                Site::Message { role: r, instance: i, .. } => {
                    here && r == role && (instance.is_empty() || i == instance)
                }
                Site::Step { replica, stage, rank, .. } => {
                    let own = || shard(replica, *stage, *rank);
                    here && role == "shard" && (instance.is_empty() || own() == *instance)
                }
                Site::Load { .. } => here && role == "shard",
                _ => false,
            }
        }
        Target::Shard { replica, stage, rank } => match site {
            Site::Message { role, instance, .. } => {
                *role == "shard" && *instance == shard(replica, *stage, *rank)
            }
            Site::Step { replica: r, stage: s, rank: k, .. } => {
                r == replica && s == stage && k == rank
            }
            Site::Load { stage: s, rank: k, .. } => s == stage && k == rank,
            _ => false,
        },
        Target::Links(links) => match site {
            Site::FrameOut { node, to, .. } => {
                links.iter().any(|(a, b)| node.as_str() == a && to.as_str() == b)
            }
            _ => false,
        },
        Target::Request(number) => match site {
            Site::Step { requests, .. } => requests.contains(ids.get(number).unwrap_or(number)),
            _ => false,
        },
    }
}

fn message_fits(fault: &Fault, site: &Site<'_>) -> bool {
    let Some(wanted) = &fault.params.message else { return true };
    match site {
        Site::Message { message, .. } => message == wanted,
        Site::FrameOut { message, .. } => message == wanted,
        _ => true,
    }
}

fn shard(replica: &str, stage: usize, rank: usize) -> String {
    format!("{replica}/{stage}/{rank}")
}

/// What the fault does here the `count`th time; `None` if this site cannot carry it out.
fn action(
    fault: &Fault,
    site: &Site<'_>,
    seed: u64,
    count: u64,
    step_us: &BTreeMap<String, u64>,
    ids: &BTreeMap<u64, u64>,
) -> Option<Action> {
    let params = &fault.params;
    let random = |salt: u64| draw(seed, &fault.id, count.wrapping_mul(16) + salt);
    let lasting = fault.lasts_us.map_or(FOR_GOOD, Duration::from_micros);
    let text = || format!("injected: {} ({})", fault.kind.name(), fault.id);
    let request = || hit_request(fault, site, ids, random(0));
    Some(match fault.kind {
        Kind::ProcessStartFail => Action::Fail { text: text(), sticky: false },
        Kind::ActorPanic => Action::Panic(text()),
        Kind::ActorHang | Kind::DeviceHang => Action::Hang(lasting),
        Kind::ActorSlow => {
            let p50 = params.p50_us.unwrap_or(1_000);
            let p99 = params.p99_us.unwrap_or(p50);
            Action::Delay(Duration::from_micros(log_normal(p50, p99, seed, &fault.id, count)))
        }
        Kind::DeviceSlow | Kind::ProcessSlow => {
            let Site::Step { replica, stage, rank, .. } = site else { return None };
            let own = step_us.get(&shard(replica, *stage, *rank)).copied().unwrap_or(STEP_US);
            let more = (params.factor.unwrap_or(4.0) - 1.0).max(0.0);
            Action::Delay(Duration::from_micros((own.max(100) as f64 * more) as u64))
        }
        Kind::FrameCorrupt => Action::Corrupt { at: random(1), mask: (random(2) as u8).max(1) },
        Kind::FrameTruncate => Action::Truncate { keep: random(1) },
        Kind::FrameDup => Action::Duplicate,
        Kind::FrameStale => Action::Stale,
        Kind::StreamStall => Action::Delay(lasting),
        Kind::DeviceOom => Action::OutOfMemory { bytes: params.bytes.unwrap_or(1 << 30) },
        Kind::DeviceLaunchError => {
            Action::Fail { text: text(), sticky: params.sticky.unwrap_or(false) }
        }
        Kind::BitsKv => Action::FlipKv {
            request: request()?,
            layer: params.layer.unwrap_or_else(|| random(1)),
            position: params.position.unwrap_or_else(|| random(2)),
            bit: params.bit.unwrap_or((random(3) % 32) as u32),
        },
        Kind::BitsWeight => Action::FlipWeight {
            index: params.index.unwrap_or_else(|| random(1)),
            bit: params.bit.unwrap_or((random(3) % 32) as u32),
        },
        Kind::LogitsNan => Action::NotFinite { request: request()? },
        Kind::KvStale => Action::StaleBlock { request: request()? },
        Kind::KvSwap => Action::SwapBlocks { request: request()?, a: random(1), b: random(2) },
        _ => return None,
    })
}

/// The request that is hit: the target if it is one, else any of the step's.
fn hit_request(
    fault: &Fault,
    site: &Site<'_>,
    ids: &BTreeMap<u64, u64>,
    random: u64,
) -> Option<u64> {
    let Site::Step { requests, .. } = site else { return None };
    if let Target::Request(number) = &fault.target {
        return Some(*ids.get(number).unwrap_or(number));
    }
    let at = (random % requests.len().max(1) as u64) as usize;
    requests.get(at).copied()
}

#[cfg(test)]
#[path = "armory_tests.rs"]
mod tests;
