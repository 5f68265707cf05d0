//! Which replica runs where, and in which epoch: a state machine that anyone can drive.
//!
//! Each replica walks `waiting -> loading -> starting -> ready`; whatever breaks it sends it back
//! with a higher epoch. Every state that is not `ready` has a reason. A replica that breaks more
//! often than its restart intensity allows rests before it is tried again.
//!
//! A replica whose node stays away is planned onto the survivors, if they can hold its layers, and
//! returns to where it is configured once that node has been back for a while.

use super::planner::{
    PlanLimits, ReplicaWant, Taken, less_taken, plan, plan_by_itself, substitute,
};
use crate::messages::{
    NodeDescription, ReplicaEpoch, ReplicaInfo, ReplicaPlan, ReplicaState, RequestId, ShardPlace,
};
use dunlin_runtime::{NodeName, Peer, mutated};
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

/// When a replica leaves its configured devices, and when it returns.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Replan {
    /// A node must be away for so long first: it may be about to come back.
    pub after: Duration,
    /// All its nodes must be back for so long before a replica returns to them.
    pub back_after: Duration,
}

impl Default for Replan {
    fn default() -> Self {
        Self { after: Duration::from_secs(5), back_after: Duration::from_secs(10) }
    }
}

/// What happened.
#[derive(Debug, Clone)]
pub enum Input {
    NodeUp {
        peer: Peer,
        description: NodeDescription,
        /// Replicas that run there already: an earlier life of placement put them there.
        hosted: Vec<ReplicaPlan>,
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
    replan: Replan,
    /// Nodes that have devices and must be there before the planner plans by itself.
    expected: BTreeSet<NodeName>,
    wants_known: bool,
    nodes: BTreeMap<NodeName, (Peer, NodeDescription)>,
    /// What each node said that it runs when it was last described.
    hosted: BTreeMap<NodeName, Vec<ReplicaPlan>>,
    /// Nodes that are about to leave; nothing new is placed on them in this life.
    draining: BTreeSet<NodeName>,
    replicas: BTreeMap<String, Replica>,
    next_epoch: u64,
}

struct Replica {
    /// As configured.
    want: ReplicaWant,
    /// Where it stands in instead, while nodes of `want` are away.
    stand_in: Option<ReplicaWant>,
    /// Not placed in this life of placement: what runs of it may be taken over as it is.
    adoptable: bool,
    /// Since when nodes of `want` are missing, or all there, as last seen.
    missing: Option<Duration>,
    whole: Option<Duration>,
    epoch: ReplicaEpoch,
    state: State,
    since: Duration,
    breaks: VecDeque<Duration>,
}

impl Replica {
    fn new(want: ReplicaWant, epoch: ReplicaEpoch, now: Duration) -> Self {
        let state = State::Waiting { reason: "nothing has been tried yet".into() };
        let breaks = VecDeque::new();
        Self {
            want,
            stand_in: None,
            adoptable: false,
            missing: None,
            whole: None,
            epoch,
            state,
            since: now,
            breaks,
        }
    }

    /// Where it is, or is being, placed.
    fn placed(&self) -> &ReplicaWant {
        self.stand_in.as_ref().unwrap_or(&self.want)
    }

    fn plan(&self) -> Option<&ReplicaPlan> {
        match &self.state {
            State::Loading { plan, .. } | State::Starting { plan } | State::Ready { plan } => {
                Some(plan)
            }
            State::Waiting { .. } | State::Resting { .. } | State::Failed { .. } => None,
        }
    }

    /// The plan under which all nodes of it say that they run this replica, at most once.
    fn adopt(
        &mut self,
        hosted: &BTreeMap<NodeName, Vec<ReplicaPlan>>,
        there: &BTreeMap<NodeName, NodeDescription>,
    ) -> Option<ReplicaPlan> {
        if !self.adoptable {
            return None;
        }
        let named = |plan: &&ReplicaPlan| plan.replica == self.want.name;
        let newest = hosted.values().flatten().filter(named).max_by_key(|plan| plan.epoch)?;
        let runs = |node: &NodeName| {
            let runs = hosted.get(node).is_some_and(|plans| plans.contains(newest));
            runs && there.contains_key(node)
        };
        if !newest.shards.iter().all(|place| runs(&place.node)) {
            return None;
        }
        let plan = newest.clone();
        self.adoptable = false;
        let mut stages = vec![Vec::new(); plan.stages];
        for place in &plan.shards {
            stages[place.stage].push((place.node.clone(), place.device.clone()));
        }
        if stages != self.want.stages {
            self.stand_in = Some(ReplicaWant { stages, ..self.want.clone() });
        }
        Some(plan)
    }

    /// The configured nodes that are not there; keeps the times since when.
    fn missing(
        &mut self,
        now: Duration,
        there: &BTreeMap<NodeName, NodeDescription>,
    ) -> Vec<NodeName> {
        let mut missing = self.want.nodes();
        missing.retain(|node| !there.contains_key(node));
        if missing.is_empty() {
            self.missing = None;
            self.whole.get_or_insert(now);
        } else {
            self.whole = None;
            self.missing.get_or_insert(now);
        }
        missing
    }
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
        (intensity, replan): (Intensity, Replan),
        first_epoch: u64,
    ) -> Self {
        let mut core = Self {
            model,
            limits,
            intensity,
            replan,
            expected,
            wants_known: !wants.is_empty(),
            nodes: BTreeMap::new(),
            hosted: BTreeMap::new(),
            draining: BTreeSet::new(),
            replicas: BTreeMap::new(),
            next_epoch: first_epoch,
        };
        core.add(wants, Duration::ZERO);
        core
    }

    /// This life follows on another one of the same head, whose router still knows what runs: a
    /// replica that is found running whole is taken over in its epoch, and its streams go on.
    pub fn adopting(mut self) -> Self {
        self.replicas.values_mut().for_each(|replica| replica.adoptable = true);
        self
    }

    /// Feeds one input; what must be done comes back in order.
    pub fn handle(&mut self, now: Duration, input: Input) -> Vec<Output> {
        let mut out = Vec::new();
        match input {
            Input::NodeUp { peer, description, hosted } => {
                self.hosted.insert(peer.node.clone(), hosted);
                self.node_up(now, peer, description, &mut out);
            }
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
                self.replicas.values_mut().for_each(|replica| replica.adoptable = false);
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
                let places = match &r.state {
                    State::Loading { plan, .. }
                    | State::Starting { plan }
                    | State::Ready { plan } => plan.shards.clone(),
                    _ => Vec::new(),
                };
                ReplicaState {
                    places,
                    replica: r.want.name.clone(),
                    epoch: r.epoch,
                    state: state.into(),
                    reason,
                    since_ms: u64::try_from((now - r.since.min(now)).as_millis())
                        .unwrap_or(u64::MAX),
                    shards: r
                        .placed()
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
            let replica = Replica::new(want, ReplicaEpoch(self.next_epoch), now);
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
        for replica in self.replicas.values().filter(|r| r.placed().nodes().contains(&node)) {
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
            .filter(|r| r.placed().nodes().contains(node))
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
        let Some(plan) = replica.plan() else { return };
        for node in replica.placed().nodes() {
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
        let there: BTreeMap<NodeName, NodeDescription> = self
            .nodes
            .iter()
            .filter(|(name, _)| !self.draining.contains(*name))
            .map(|(name, (_, d))| (name.clone(), d.clone()))
            .collect();
        if !self.wants_known && self.expected.iter().all(|n| there.contains_key(n)) {
            let (wants, why) = plan_by_itself(&there, self.model.shape(), &self.limits);
            out.push(Output::Note(format!("planned by itself: {why}")));
            self.wants_known = true;
            self.add(wants, now);
        }
        self.send_home(now, &there, out);
        let names: Vec<String> = self.replicas.keys().cloned().collect();
        for name in names {
            self.make_room(now, &name, &there, out);
            let taken = self.taken_beside(&name);
            let ready = |r: &Replica| matches!(r.state, State::Ready { .. });
            let last = !self.replicas.iter().any(|(other, r)| *other != name && ready(r));
            let Some(replica) = self.replicas.get_mut(&name) else { continue };
            if let State::Resting { until, .. } = replica.state
                && now >= until
            {
                replica.state = State::Waiting { reason: "has rested".into() };
                replica.since = now;
            }
            if !matches!(replica.state, State::Waiting { .. }) {
                continue;
            }
            let missing = replica.missing(now, &there);
            if let Some(plan) = replica.adopt(&self.hosted, &there) {
                out.push(Output::Note(format!("replica {name} runs: it is taken over")));
                out.push(Output::Lead { node: plan.leader().clone(), plan: plan.clone() });
                replica.epoch = plan.epoch;
                replica.since = now;
                replica.state = State::Starting { plan };
                continue;
            }
            let shape = self.model.shape();
            replica.stand_in = None;
            if !missing.is_empty() {
                let mut reason = format!("waits for node {}", join(missing.iter()));
                if replica.missing.is_some_and(|since| now >= since + self.replan.after) {
                    match substitute(&replica.want, &there, &taken, last, shape, &self.limits) {
                        Ok(stand_in) => replica.stand_in = Some(stand_in),
                        Err(why) => reason = format!("{reason}; {why}"),
                    }
                }
                if replica.stand_in.is_none() {
                    replica.state = State::Waiting { reason };
                    continue;
                }
                let places = replica.placed().places();
                let text = format!("replica {name} is planned onto {places}: it {reason}");
                out.push(Output::Note(text));
            }
            self.next_epoch += u64::from(!mutated("same-epoch"));
            replica.adoptable = false;
            replica.epoch = ReplicaEpoch(self.next_epoch);
            replica.since = now;
            match plan(replica.placed(), replica.epoch, &there, shape, &self.limits) {
                Ok(plan) => {
                    let pending: BTreeSet<NodeName> =
                        replica.placed().nodes().into_iter().collect();
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

    /// Takes down each stand-in whose configured nodes have been back for long enough; the rest of
    /// [`Self::advance`] then places it where it belongs.
    fn send_home(
        &mut self,
        now: Duration,
        there: &BTreeMap<NodeName, NodeDescription>,
        out: &mut Vec<Output>,
    ) {
        let mut home = Vec::new();
        for (name, replica) in &mut self.replicas {
            if replica.stand_in.is_some()
                && replica.missing(now, there).is_empty()
                && replica.whole.is_some_and(|since| now >= since + self.replan.back_after)
            {
                home.push(name.clone());
            }
        }
        for name in home {
            let reason = "its configured nodes are back".to_string();
            self.break_replica(now, &name, reason, Vec::new(), false, out);
        }
    }

    /// A replica that can be placed as configured goes before stand-ins on its devices: those that
    /// leave too little memory are taken down.
    fn make_room(
        &mut self,
        now: Duration,
        name: &str,
        there: &BTreeMap<NodeName, NodeDescription>,
        out: &mut Vec<Output>,
    ) {
        let Some(replica) = self.replicas.get(name) else { return };
        let waits = matches!(replica.state, State::Waiting { .. });
        if !waits || !replica.want.nodes().iter().all(|node| there.contains_key(node)) {
            return;
        }
        let devices: BTreeSet<_> = replica.want.stages.iter().flatten().cloned().collect();
        let in_the_way = |r: &Replica| {
            let plan = r.stand_in.as_ref().and_then(|_| r.plan());
            let on = |p: &ShardPlace| devices.contains(&(p.node.clone(), p.device.clone()));
            plan.is_some_and(|plan| plan.shards.iter().any(on))
        };
        let others = self.replicas.iter().filter(|(other, r)| *other != name && in_the_way(r));
        let others: Vec<String> = others.map(|(other, _)| other.clone()).collect();
        if others.is_empty() {
            return;
        }
        let less = less_taken(there, &self.taken_beside(name));
        let shape = self.model.shape();
        if plan(&replica.want, replica.epoch, &less, shape, &self.limits).is_err() {
            for other in others {
                let reason = format!("replica {name} needs the device it stood in on");
                self.break_replica(now, &other, reason, Vec::new(), false, out);
            }
        }
    }

    /// Device bytes that the plans of all replicas but this one use.
    fn taken_beside(&self, name: &str) -> Taken {
        let others = self.replicas.iter().filter(|(other, _)| other.as_str() != name);
        let mut taken = Taken::new();
        for place in others.filter_map(|(_, r)| r.plan()).flat_map(|plan| &plan.shards) {
            let shape = self.model.shape();
            let kv = place.spec.kv_blocks as u64 * shape.kv_block_bytes(&place.spec);
            *taken.entry((place.node.clone(), place.device.clone())).or_default() +=
                shape.stage_bytes(&place.spec) + kv;
        }
        taken
    }
}

fn join<'a>(names: impl Iterator<Item = &'a NodeName>) -> String {
    names.map(|n| format!("'{n}'")).collect::<Vec<_>>().join(", ")
}
