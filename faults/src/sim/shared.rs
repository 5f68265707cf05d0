//! What the nodes' fault hooks and the driver share: events, armed faults, triggers.

use crate::armory::Armory;
use crate::fault::{Fault, Kind};
use crate::heal::Hold;
use crate::record::{Event, FaultRun, What};
use crate::schedule::{Due, Schedule};
use dunlin_actors::facts::{REPLICA_UP, TOKEN_DELIVERED};
use dunlin_runtime::{Action, Fact, FaultHook, Site};
use parking_lot::Mutex;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use tokio::sync::Notify;
use tokio::time::Instant;

pub struct Shared {
    inner: Mutex<Inner>,
    /// Something is in `orders`, or due.
    pub wake: Notify,
    pub(super) clients: super::clients::Clients,
    /// Name of the model that is served.
    pub model: String,
}

/// What the driver is asked to do.
pub enum Order {
    Due(Due),
    /// The client has what it wanted.
    Cancel(u64),
    /// A node's start has ended.
    Started {
        node: String,
        life: u64,
        result: Result<super::cluster::Running, String>,
    },
    /// A node's own tree gave up: its process ends.
    Escalated {
        node: String,
        life: u64,
        reason: String,
    },
    /// A node that was asked to leave has drained.
    Drained {
        node: String,
        life: u64,
    },
    /// Placement is to be asked what it has published.
    Published,
}

pub struct Inner {
    /// When the workload began.
    begun: Option<Instant>,
    pub events: Vec<Event>,
    pub armory: Armory,
    pub schedule: Schedule,
    pub runs: Vec<FaultRun>,
    pub orders: VecDeque<Order>,
    pub paused: BTreeMap<String, Instant>,
    /// Node and requests of each shard's last step, by `REPLICA/STAGE/RANK`.
    pub running: BTreeMap<String, (String, Vec<u64>)>,
    pub open: BTreeSet<u64>,
    /// The last thing that each node's actors told, for who waits for whom.
    pub last: BTreeMap<String, (u64, &'static str, String)>,
    /// Some site may matter: a fault is armed or waits for a site.
    watching: bool,
    waits_for_sites: bool,
}

impl Shared {
    pub fn new(seed: u64, faults: &[Fault], opens_us: u64, model: String) -> Arc<Self> {
        use crate::fault::Trigger;
        let run = |fault: &Fault| FaultRun {
            fault: fault.clone(),
            began_us: None,
            ended_us: None,
            proof: None,
            detected_us: None,
            touched: Vec::new(),
        };
        let site = |f: &Fault| matches!(f.when, Trigger::Message { .. } | Trigger::Site { .. });
        let inner = Inner {
            begun: None,
            events: Vec::new(),
            armory: Armory::new(seed),
            schedule: Schedule::new(faults, opens_us),
            runs: faults.iter().map(run).collect(),
            orders: VecDeque::new(),
            paused: BTreeMap::new(),
            running: BTreeMap::new(),
            open: BTreeSet::new(),
            last: BTreeMap::new(),
            watching: false,
            waits_for_sites: faults.iter().any(site),
        };
        let clients = Default::default();
        Arc::new(Self { inner: Mutex::new(inner), wake: Notify::new(), clients, model })
    }

    pub fn with<T>(&self, act: impl FnOnce(&mut Inner) -> T) -> T {
        act(&mut self.inner.lock())
    }

    pub fn order(&self, order: Order) {
        self.inner.lock().orders.push_back(order);
        self.wake.notify_one();
    }

    pub fn push(&self, what: What) {
        self.inner.lock().push(what);
    }

    pub fn us(&self) -> u64 {
        self.inner.lock().us()
    }
}

impl Inner {
    /// The workload begins now.
    pub fn begin(&mut self) {
        self.begun = Some(Instant::now());
        self.watching = self.waits_for_sites;
    }

    pub fn us(&self) -> u64 {
        self.begun.map_or(0, |begun| begun.elapsed().as_micros() as u64)
    }

    pub fn push(&mut self, what: What) {
        let us = self.us();
        self.events.push(Event { us, what });
    }

    /// What begins or ends by now. Faults that work at sites are in force from here on.
    pub fn tick(&mut self) -> bool {
        if self.begun.is_none() {
            return false;
        }
        let now = self.us();
        let due = self.schedule.tick(now);
        let any = !due.is_empty();
        for due in due {
            self.edge(due, now);
        }
        any
    }

    /// Ends all that is in force, but for what `stays`; nothing begins any more.
    pub fn heal(&mut self, stays: &BTreeSet<usize>) {
        let now = self.us();
        for due in self.schedule.heal(stays) {
            self.edge(due, now);
        }
        self.waits_for_sites = false;
        self.watching = !self.armory.is_empty() || !self.paused.is_empty();
    }

    fn edge(&mut self, due: Due, now: u64) {
        match due {
            Due::Begin(index) => {
                let touched = self.touched(index);
                let Some(run) = self.runs.get_mut(index) else { return };
                run.began_us = Some(now);
                run.touched = touched;
                if Armory::takes(run.fault.kind) {
                    self.armory.arm(run.fault.clone());
                }
            }
            Due::End(index) => {
                let Some(run) = self.runs.get_mut(index) else { return };
                run.ended_us.get_or_insert(now);
                if Armory::takes(run.fault.kind) {
                    self.armory.disarm(&run.fault.id);
                }
            }
        }
        self.watching = self.waits_for_sites || !self.armory.is_empty() || !self.paused.is_empty();
        self.orders.push_back(Order::Due(due));
    }

    pub fn pause(&mut self, node: &str, until: Option<Instant>) {
        match until {
            Some(until) => drop(self.paused.insert(node.to_string(), until)),
            None => drop(self.paused.remove(node)),
        }
        self.watching = self.waits_for_sites || !self.armory.is_empty() || !self.paused.is_empty();
    }

    /// What each fault that is in force holds.
    pub fn holds(&self, all: &[String]) -> BTreeMap<usize, Hold> {
        let open = |run: &FaultRun| run.began_us.is_some() && run.ended_us.is_none();
        let runs = self.runs.iter().enumerate().filter(|(_, run)| open(run));
        let hold = |run: &FaultRun| Hold::of(&run.fault.target, || self.nodes_of(&run.fault, all));
        runs.map(|(index, run)| (index, hold(run))).collect()
    }

    /// What was read back to show that the fault took effect; the first words stay.
    pub fn prove(&mut self, index: usize, proof: impl Into<String>) {
        if let Some(run) = self.runs.get_mut(index) {
            run.proof.get_or_insert_with(|| proof.into());
        }
    }

    /// It is over, of itself.
    pub fn over(&mut self, index: usize) {
        let now = self.us();
        self.schedule.ended(index, now);
        if let Some(run) = self.runs.get_mut(index) {
            run.ended_us.get_or_insert(now);
        }
    }

    /// There was nothing to hit: it did not begin after all.
    pub fn missed(&mut self, index: usize) {
        self.over(index);
        if let Some(run) = self.runs.get_mut(index) {
            (run.began_us, run.ended_us) = (None, None);
        }
    }

    /// Nodes that a fault hits.
    pub fn nodes_of(&self, fault: &Fault, all: &[String]) -> Vec<String> {
        use crate::fault::Target;
        let on = |wanted: &dyn Fn(&str, &[u64]) -> bool| {
            let hit = self.running.iter().filter(|(shard, (_, requests))| wanted(shard, requests));
            let nodes: BTreeSet<String> = hit.map(|(_, (node, _))| node.clone()).collect();
            nodes.into_iter().collect::<Vec<_>>()
        };
        match &fault.target {
            Target::Node(node) | Target::Actor { node, .. } => vec![node.clone()],
            Target::Shard { replica, stage, rank } => {
                let name = format!("{replica}/{stage}/{rank}");
                on(&|shard, _| shard == name)
            }
            Target::Links(links) => {
                let nodes: BTreeSet<&String> = links.iter().map(|(from, _)| from).collect();
                nodes.into_iter().cloned().collect()
            }
            Target::Request(number) => on(&|_, requests| requests.contains(number)),
            Target::All => all.to_vec(),
        }
    }

    /// Open requests with a stage, block or link on the target.
    fn touched(&self, index: usize) -> Vec<u64> {
        use crate::fault::Target;
        let Some(run) = self.runs.get(index) else { return Vec::new() };
        let fault = &run.fault;
        let nodes: BTreeSet<String> = match &fault.target {
            Target::Request(number) => return vec![*number],
            Target::All => return self.open.iter().copied().collect(),
            Target::Links(links) => links.iter().flat_map(|(a, b)| [a, b]).cloned().collect(),
            _ => self.nodes_of(fault, &[]).into_iter().collect(),
        };
        // The head's router and the shards' own nodes carry every request of a replica.
        let hit = |node: &String| nodes.contains(node);
        let replicas: BTreeSet<&str> = self
            .running
            .iter()
            .filter(|(_, (node, _))| hit(node))
            .filter_map(|(shard, _)| shard.split('/').next())
            .collect();
        let of = |shard: &String| shard.split('/').next().is_some_and(|r| replicas.contains(r));
        let requests = self.running.iter().filter(|(shard, _)| of(shard));
        let all: BTreeSet<u64> = requests.flat_map(|(_, (_, ids))| ids.iter().copied()).collect();
        all.intersection(&self.open).copied().collect()
    }
}

/// The fault hook of one life of a node. A life that is over is not heard any more.
pub struct Hook {
    pub shared: Arc<Shared>,
    pub node: String,
    pub alive: AtomicBool,
}

impl FaultHook for Hook {
    fn decide(&self, site: &Site<'_>) -> Option<Action> {
        if !self.alive.load(Ordering::Relaxed) {
            return None;
        }
        let mut inner = self.shared.inner.lock();
        if let Site::Step { replica, stage, rank, requests, .. } = site {
            inner.note_running(&self.node, replica, (*stage, *rank), requests);
        }
        if !inner.watching {
            return None;
        }
        let now = inner.us();
        if inner.waits_for_sites && inner.begun.is_some() && inner.schedule.reach(now, site) {
            inner.tick();
            self.shared.wake.notify_one();
        }
        if matches!(site, Site::Message { .. } | Site::Step { .. })
            && let Some(until) = inner.paused.get(&self.node)
        {
            let left = until.saturating_duration_since(Instant::now());
            if !left.is_zero() {
                return Some(Action::Hang(left));
            }
        }
        let hit = inner.armory.decide(site)?;
        // A frame or a message is not told of otherwise; what happens at devices is read back.
        let lasting = inner.runs.iter().position(|run| run.fault.id == hit.fault);
        if let Some(index) = lasting
            && inner.runs[index].fault.kind == Kind::ProcessStartFail
        {
            inner.prove(index, format!("{}: its start was refused", self.node));
        }
        Some(hit.action)
    }

    fn observe(&self, fact: &Fact) {
        if !self.alive.load(Ordering::Relaxed) {
            return;
        }
        let mut inner = self.shared.inner.lock();
        let now = inner.us();
        if let Some(fault) = inner.armory.observe(fact)
            && let Some(index) = inner.runs.iter().position(|run| run.fault.id == fault)
        {
            inner.prove(index, fact.subject.clone());
        }
        if fact.name != TOKEN_DELIVERED {
            let last = (now, fact.name, fact.subject.clone());
            inner.last.insert(format!("{}/{}", self.node, fact.name), last);
        }
        inner.push(What::Fact {
            node: self.node.clone(),
            name: fact.name.to_string(),
            subject: fact.subject.clone(),
            key: fact.key,
            value: fact.value,
        });
        if fact.name == REPLICA_UP {
            inner.orders.push_back(Order::Published);
            self.shared.wake.notify_one();
        }
        if inner.begun.is_some() {
            inner.schedule.observe(now, fact.name, &fact.subject, fact.key, fact.value);
            // Progress triggers are in force from this very moment on.
            if inner.schedule.next_us().is_some_and(|at| at <= now) && inner.tick() {
                self.shared.wake.notify_one();
            }
        }
    }
}

impl Inner {
    fn note_running(
        &mut self,
        node: &str,
        replica: &str,
        (stage, rank): (usize, usize),
        requests: &[u64],
    ) {
        use std::fmt::Write;
        let mut shard = String::with_capacity(replica.len() + 8);
        let _ = write!(shard, "{replica}/{stage}/{rank}");
        let entry = self.running.entry(shard).or_default();
        if entry.0 != node {
            entry.0 = node.to_string();
        }
        entry.1.clear();
        entry.1.extend_from_slice(requests);
    }
}

/// So long does a pause last whose end the plan leaves to the heal.
pub const LONG: Duration = Duration::from_secs(3600);
