//! Which replica runs where, and in which epoch: a state machine that anyone can drive.
//!
//! Each replica walks `waiting -> loading -> starting -> ready`; whatever breaks it sends it back
//! with a higher epoch. Every state that is not `ready` has a reason. A replica that breaks more
//! often than its restart intensity allows rests before it is tried again.

use super::planner::{PlanLimits, ReplicaWant, plan, plan_by_itself};
use crate::messages::{
    NodeDescription, ReplicaEpoch, ReplicaInfo, ReplicaPlan, ReplicaState, RequestId,
};
use dunlin_runtime::{NodeName, Peer};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::Duration;

/// How often a replica may break before it rests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Intensity {
    pub max: usize,
    pub within: Duration,
    /// How long it rests then.
    pub rest: Duration,
}

/// What happened.
#[derive(Debug, Clone)]
pub enum Input {
    NodeUp {
        peer: Peer,
        description: NodeDescription,
    },
    NodeDown {
        peer: Peer,
        reason: String,
    },
    /// The node wants to leave: it gets nothing new; what runs there may finish.
    NodeDraining {
        node: NodeName,
    },
    /// The router has forgotten every replica and request: all are placed anew, so that the work
    /// of before is fenced off.
    RouterRestarted,
    Loaded {
        replica: String,
        epoch: ReplicaEpoch,
        node: NodeName,
        result: Result<(), String>,
    },
    Leading {
        replica: String,
        epoch: ReplicaEpoch,
        result: Result<ReplicaInfo, String>,
    },
    Broken {
        replica: String,
        epoch: ReplicaEpoch,
        reason: String,
        suspects: Vec<RequestId>,
    },
    Tick,
}

/// What to do about it.
#[derive(Debug, Clone, PartialEq)]
pub enum Output {
    Load {
        node: NodeName,
        plan: ReplicaPlan,
    },
    Lead {
        node: NodeName,
        plan: ReplicaPlan,
    },
    Retire {
        node: NodeName,
        replica: String,
        epoch: ReplicaEpoch,
    },
    Up(ReplicaInfo),
    Down {
        replica: String,
        epoch: ReplicaEpoch,
        reason: String,
        suspects: Vec<RequestId>,
    },
    Draining {
        replica: String,
        epoch: ReplicaEpoch,
    },
    /// For the log: a decision and why.
    Note(String),
    /// The configuration cannot work as it stands.
    Impossible(String),
}

/// The head's view of nodes and replicas.
pub struct Placement {
    model: Arc<dyn crate::engines::Engines>,
    limits: PlanLimits,
    intensity: Intensity,
    /// Nodes that have devices and must be there before the planner plans by itself.
    expected: BTreeSet<NodeName>,
    wants_known: bool,
    nodes: BTreeMap<NodeName, (Peer, NodeDescription)>,
    /// Nodes that are about to leave; nothing new is placed on them in this life.
    draining: BTreeSet<NodeName>,
    replicas: BTreeMap<String, Replica>,
    next_epoch: u64,
}

struct Replica {
    want: ReplicaWant,
    epoch: ReplicaEpoch,
    state: State,
    since: Duration,
    breaks: VecDeque<Duration>,
}

enum State {
    Waiting { reason: String },
    Loading { plan: ReplicaPlan, pending: BTreeSet<NodeName> },
    Starting { plan: ReplicaPlan },
    Ready { plan: ReplicaPlan },
    Resting { until: Duration, reason: String },
    Failed { reason: String },
}

impl Placement {
    /// `wants` empty: the planner makes replicas once all `expected` nodes are there.
    /// `first_epoch` is higher than any that an earlier life of this head gave out.
    pub fn new(
        model: Arc<dyn crate::engines::Engines>,
        wants: Vec<ReplicaWant>,
        expected: BTreeSet<NodeName>,
        limits: PlanLimits,
        intensity: Intensity,
        first_epoch: u64,
    ) -> Self {
        let mut core = Self {
            model,
            limits,
            intensity,
            expected,
            wants_known: !wants.is_empty(),
            nodes: BTreeMap::new(),
            draining: BTreeSet::new(),
            replicas: BTreeMap::new(),
            next_epoch: first_epoch,
        };
        core.add(wants, Duration::ZERO);
        core
    }

    /// Feeds one input; what must be done comes back in order.
    pub fn handle(&mut self, now: Duration, input: Input) -> Vec<Output> {
        let mut out = Vec::new();
        match input {
            Input::NodeUp { peer, description } => self.node_up(now, peer, description, &mut out),
            Input::NodeDown { peer, reason } => {
                if self.nodes.get(&peer.node).is_some_and(|(known, _)| *known == peer) {
                    self.nodes.remove(&peer.node);
                    self.draining.remove(&peer.node);
                    self.lose_node(now, &peer.node, &reason, &mut out);
                }
            }
            Input::NodeDraining { node } => self.drain_node(node, &mut out),
            Input::RouterRestarted => {
                let all: Vec<String> = self.replicas.keys().cloned().collect();
                for replica in all {
                    let reason = "the router was restarted".to_string();
                    self.break_replica(now, &replica, reason, Vec::new(), false, &mut out);
                }
            }
            Input::Loaded { replica, epoch, node, result } => {
                self.loaded(now, &replica, epoch, &node, result, &mut out)
            }
            Input::Leading { replica, epoch, result } => {
                self.leading(now, &replica, epoch, result, &mut out)
            }
            Input::Broken { replica, epoch, reason, suspects } => {
                let current = self.replicas.get(&replica).is_some_and(|r| r.epoch == epoch);
                if current {
                    self.break_replica(now, &replica, reason, suspects, true, &mut out);
                }
            }
            Input::Tick => {}
        }
        self.advance(now, &mut out);
        out
    }

    /// For `status`: where each replica is and why.
    pub fn states(&self, now: Duration) -> Vec<ReplicaState> {
        self.replicas
            .values()
            .map(|r| {
                let (state, reason) = match &r.state {
                    State::Waiting { reason } => ("waiting", reason.clone()),
                    State::Loading { pending, .. } => {
                        ("loading", format!("waits for {}", join(pending.iter())))
                    }
                    State::Starting { plan } => {
                        ("starting", format!("waits for the scheduler on {}", plan.leader()))
                    }
                    State::Ready { .. } => ("ready", String::new()),
                    State::Resting { reason, .. } => ("resting", reason.clone()),
                    State::Failed { reason } => ("failed", reason.clone()),
                };
                ReplicaState {
                    replica: r.want.name.clone(),
                    epoch: r.epoch,
                    state: state.into(),
                    reason,
                    since_ms: u64::try_from((now - r.since.min(now)).as_millis())
                        .unwrap_or(u64::MAX),
                    shards: r
                        .want
                        .stages
                        .iter()
                        .flatten()
                        .map(|(node, device)| format!("{node}/{device}"))
                        .collect(),
                }
            })
            .collect()
    }

    fn add(&mut self, wants: Vec<ReplicaWant>, now: Duration) {
        for want in wants {
            let reason = "nothing has been tried yet".into();
            let state = State::Waiting { reason };
            let epoch = ReplicaEpoch(self.next_epoch);
            let replica = Replica { want, epoch, state, since: now, breaks: VecDeque::new() };
            self.replicas.insert(replica.want.name.clone(), replica);
        }
    }

    fn node_up(
        &mut self,
        now: Duration,
        peer: Peer,
        description: NodeDescription,
        out: &mut Vec<Output>,
    ) {
        let name = peer.node.clone();
        if let Some((known, _)) = self.nodes.get(&name) {
            if known.incarnation > peer.incarnation {
                return;
            }
            if *known != peer {
                let reason = "the node was started anew".to_string();
                self.lose_node(now, &name, &reason, out);
            }
        }
        if self.nodes.insert(name.clone(), (peer.clone(), description)).map(|n| n.0) != Some(peer) {
            self.draining.remove(&name);
        }
        // A replica that could not be placed may fit now.
        for replica in self.replicas.values_mut() {
            if matches!(replica.state, State::Failed { .. }) && replica.want.nodes().contains(&name)
            {
                replica.state = State::Waiting { reason: format!("node '{name}' has come") };
                replica.since = now;
            }
        }
    }

    fn drain_node(&mut self, node: NodeName, out: &mut Vec<Output>) {
        for replica in self.replicas.values().filter(|r| r.want.nodes().contains(&node)) {
            if matches!(replica.state, State::Ready { .. }) {
                let (replica, epoch) = (replica.want.name.clone(), replica.epoch);
                out.push(Output::Draining { replica, epoch });
            }
        }
        self.draining.insert(node);
    }

    fn lose_node(&mut self, now: Duration, node: &NodeName, reason: &str, out: &mut Vec<Output>) {
        let hit: Vec<String> = self
            .replicas
            .values()
            .filter(|r| r.want.nodes().contains(node))
            .map(|r| r.want.name.clone())
            .collect();
        for replica in hit {
            let reason = format!("node '{node}' is down: {reason}");
            self.break_replica(now, &replica, reason, Vec::new(), false, out);
        }
    }

    fn loaded(
        &mut self,
        now: Duration,
        name: &str,
        epoch: ReplicaEpoch,
        node: &NodeName,
        result: Result<(), String>,
        out: &mut Vec<Output>,
    ) {
        let Some(replica) = self.replicas.get_mut(name).filter(|r| r.epoch == epoch) else {
            return;
        };
        let State::Loading { plan, pending } = &mut replica.state else { return };
        if let Err(reason) = result {
            let reason = format!("node '{node}' could not load its part: {reason}");
            return self.break_replica(now, name, reason, Vec::new(), true, out);
        }
        pending.remove(node);
        if pending.is_empty() {
            let plan = plan.clone();
            out.push(Output::Lead { node: plan.leader().clone(), plan: plan.clone() });
            replica.state = State::Starting { plan };
            replica.since = now;
        }
    }

    fn leading(
        &mut self,
        now: Duration,
        name: &str,
        epoch: ReplicaEpoch,
        result: Result<ReplicaInfo, String>,
        out: &mut Vec<Output>,
    ) {
        let Some(replica) = self.replicas.get_mut(name).filter(|r| r.epoch == epoch) else {
            return;
        };
        let State::Starting { plan } = &replica.state else { return };
        match result {
            Ok(info) => {
                replica.state = State::Ready { plan: plan.clone() };
                replica.since = now;
                out.push(Output::Note(format!("replica {name} is ready (epoch {})", epoch.0)));
                out.push(Output::Up(info));
            }
            Err(reason) => {
                let reason = format!("its scheduler did not start: {reason}");
                self.break_replica(now, name, reason, Vec::new(), true, out);
            }
        }
    }

    /// Takes the replica down in every state; `counts` towards its restart intensity.
    fn break_replica(
        &mut self,
        now: Duration,
        name: &str,
        reason: String,
        suspects: Vec<RequestId>,
        counts: bool,
        out: &mut Vec<Output>,
    ) {
        let Some(replica) = self.replicas.get_mut(name) else { return };
        let plan = match &replica.state {
            State::Loading { plan, .. } | State::Starting { plan } | State::Ready { plan } => plan,
            State::Waiting { .. } | State::Resting { .. } | State::Failed { .. } => return,
        };
        for node in replica.want.nodes() {
            if self.nodes.contains_key(&node) {
                let (replica, epoch) = (plan.replica.clone(), plan.epoch);
                out.push(Output::Retire { node, replica, epoch });
            }
        }
        out.push(Output::Down {
            replica: name.into(),
            epoch: replica.epoch,
            reason: reason.clone(),
            suspects,
        });
        if counts {
            replica.breaks.push_back(now);
        }
        while replica.breaks.front().is_some_and(|t| *t + self.intensity.within < now) {
            replica.breaks.pop_front();
        }
        replica.since = now;
        replica.state = if replica.breaks.len() > self.intensity.max {
            let (n, within) = (replica.breaks.len(), self.intensity.within);
            replica.breaks.clear();
            let reason = format!("broke {n} times within {within:?}, last: {reason}");
            out.push(Output::Note(format!("replica {name} rests: {reason}")));
            State::Resting { until: now + self.intensity.rest, reason }
        } else {
            State::Waiting { reason }
        };
    }

    /// Moves every replica that can move.
    fn advance(&mut self, now: Duration, out: &mut Vec<Output>) {
        let descriptions: BTreeMap<NodeName, NodeDescription> = self
            .nodes
            .iter()
            .filter(|(name, _)| !self.draining.contains(*name))
            .map(|(name, (_, d))| (name.clone(), d.clone()))
            .collect();
        if !self.wants_known && self.expected.iter().all(|n| descriptions.contains_key(n)) {
            let (wants, why) = plan_by_itself(&descriptions, self.model.shape(), &self.limits);
            out.push(Output::Note(format!("planned by itself: {why}")));
            self.wants_known = true;
            self.add(wants, now);
        }
        for replica in self.replicas.values_mut() {
            if let State::Resting { until, .. } = replica.state
                && now >= until
            {
                replica.state = State::Waiting { reason: "has rested".into() };
                replica.since = now;
            }
            let State::Waiting { reason } = &mut replica.state else { continue };
            let missing: Vec<NodeName> = replica
                .want
                .nodes()
                .into_iter()
                .filter(|n| !descriptions.contains_key(n))
                .collect();
            if !missing.is_empty() {
                *reason = format!("waits for node {}", join(missing.iter()));
                continue;
            }
            self.next_epoch += 1;
            replica.epoch = ReplicaEpoch(self.next_epoch);
            replica.since = now;
            let shape = self.model.shape();
            match plan(&replica.want, replica.epoch, &descriptions, shape, &self.limits) {
                Ok(plan) => {
                    let pending: BTreeSet<NodeName> = replica.want.nodes().into_iter().collect();
                    for node in &pending {
                        out.push(Output::Load { node: node.clone(), plan: plan.clone() });
                    }
                    replica.state = State::Loading { plan, pending };
                }
                Err(error) => {
                    out.push(Output::Impossible(error.to_string()));
                    replica.state = State::Failed { reason: error.to_string() };
                }
            }
        }
    }
}

fn join<'a>(names: impl Iterator<Item = &'a NodeName>) -> String {
    names.map(|n| format!("'{n}'")).collect::<Vec<_>>().join(", ")
}
