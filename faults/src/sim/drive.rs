//! The loop of a run: boots the cluster, sends the workload, begins and ends faults, restarts
//! nodes, through the phases to the end.

use super::clients::Clients;
use super::cluster::{Cluster, state};
use super::shared::{Order, Shared};
use super::{Setup, SimError, rest};
use crate::catalog::{Hits, row};
use crate::fault::{Fault, Kind, Mode};
use crate::gauges::Gauges;
use crate::heal;
use crate::record::{Event, NodeInfo, Phases, Record, RequestInfo, What};
use crate::resolved::RequestSpec;
use crate::schedule::Due;
use dunlin_actors::facts;
use dunlin_actors::messages::{
    PlacementCall, PlacementProtocol, PlacementReply, ReplicaStatus, RequestId, RouterCall,
    RouterCast, RouterProtocol, RouterReply, RouterStatus,
};
use dunlin_actors::{placement, router};
use dunlin_runtime::faults::names;
use dunlin_runtime::transport::memory::Counters;
use dunlin_runtime::{Address, Node, NodeName};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;
use tokio::time::Instant;

/// Far more than a healthy cluster needs to come up.
const BOOT_WITHIN: Duration = Duration::from_secs(60);
const CALL: Duration = Duration::from_secs(2);
/// How often the settle phase looks whether all is well again.
const LOOK: u64 = 100_000;
/// How often the nodes' queues are looked at.
const SAMPLE: u64 = 250_000;
/// A fault that is noticed later than this after its end was not noticed.
const NOTICE_US: u64 = 10_000_000;

pub struct Driver {
    pub setup: Arc<Setup>,
    pub cluster: Cluster,
    pub shared: Arc<Shared>,
    /// What is to be done at a time.
    pub agenda: BTreeMap<(u64, u64), Timed>,
    next: u64,
    pub begun: Instant,
    pub live: BTreeMap<usize, Live>,
    pub requests: BTreeMap<u64, RequestInfo>,
    pub healed: bool,
    /// Faults that the heal has left, and the nodes that they hold.
    pub stays: BTreeSet<usize>,
    pub outside: BTreeSet<String>,
    gauges: Gauges,
    sample_at: u64,
}

pub enum Timed {
    Arrive(usize),
    /// Requests that a fault sends: number, what, and the id under which.
    Extra(Box<RequestSpec>, u64),
    Start(String),
    /// The next round of a churn.
    Churn(usize),
}

/// What an active fault needs to be ended and proved.
#[derive(Default)]
pub struct Live {
    pub before: Vec<((NodeName, NodeName), Counters)>,
    pub task: Option<tokio::task::JoinHandle<()>>,
    pub rounds: u64,
    pub nodes: Vec<String>,
    pub slowed: Vec<u64>,
}

pub async fn run(setup: &Setup, seed: u64, faults: &[Fault]) -> Result<Record, SimError> {
    let setup = Arc::new(setup.clone());
    let phases = setup.phases;
    let model = setup.config.cluster.model.clone();
    let shared = Shared::new(seed, faults, phases.warmup_us, model);
    let mut driver = Driver {
        cluster: Cluster::new(setup.clone(), seed, shared.clone()),
        setup: setup.clone(),
        shared: shared.clone(),
        agenda: BTreeMap::new(),
        next: 0,
        begun: Instant::now(),
        live: BTreeMap::new(),
        requests: BTreeMap::new(),
        healed: false,
        stays: BTreeSet::new(),
        outside: BTreeSet::new(),
        gauges: Gauges::new(&setup.config),
        sample_at: 0,
    };
    driver.boot().await?;
    shared.with(|inner| inner.begin());
    driver.begun = Instant::now();
    for (index, request) in setup.requests.iter().enumerate() {
        driver.at(request.arrival_us, Timed::Arrive(index));
    }
    let chaos_end = phases.warmup_us + phases.chaos_us;
    driver.until(phases.warmup_us, |_| false).await;
    driver.until(chaos_end, Driver::nothing_left).await;
    let chaos_us = shared.us();
    driver.heal();
    let settle_end = chaos_us + phases.settle_us;
    let settled = driver.settle(settle_end).await;
    let rest = rest::gather(&mut driver).await;
    let stuck = match driver.shared.clients().open() {
        0 => None,
        _ => Some(rest::who_waits(&driver).await),
    };
    let settle_us = shared.us();
    driver.finish();
    let trace = driver.trace();
    let ended = Phases { warmup_us: phases.warmup_us.min(chaos_us), chaos_us, settle_us };
    let (events, mut runs) =
        shared.with(|inner| (std::mem::take(&mut inner.events), std::mem::take(&mut inner.runs)));
    for run in &mut runs {
        run.detected_us = run.began_us.and_then(|began| detected(&events, began, run.ended_us));
    }
    let record = Record {
        plan: setup.name.clone(),
        mode: Mode::Sim,
        seed,
        repro: setup.repro.clone(),
        env: env(&setup),
        nodes: nodes(&setup),
        phases: ended,
        requests: std::mem::take(&mut driver.requests),
        faults: runs,
        events,
        outside: std::mem::take(&mut driver.outside),
        rest: settled.then_some(rest),
        stuck,
        trace_hash: Some(format!("{trace:016x}")),
    };
    Ok(record)
}

impl Driver {
    pub fn at(&mut self, us: u64, what: Timed) {
        self.next += 1;
        self.agenda.insert((us, self.next), what);
    }

    pub fn start_at(&mut self, us: u64, node: &str) {
        self.at(us, Timed::Start(node.to_string()));
    }

    async fn boot(&mut self) -> Result<(), SimError> {
        for name in self.cluster.names() {
            self.cluster.start(&name);
        }
        let begun = Instant::now();
        let wanted = self.wanted();
        loop {
            self.work();
            let all = self.cluster.lives.values().all(|life| life.running.is_some());
            if all
                && let Some(status) = self.status().await
                && status.replicas.len() as u64 >= wanted
            {
                return Ok(());
            }
            let waited = begun.elapsed();
            if waited > BOOT_WITHIN {
                let reason = rest::who_waits(self).await;
                return Err(SimError::Start { waited, reason });
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    /// Replicas that the cluster file asks for, of the core once there is one.
    pub fn wanted(&self) -> u64 {
        heal::wanted(&self.setup.config, &self.outside)
    }

    /// Is the node one that is to be well after the heal?
    pub fn is_core(&self, node: &str) -> bool {
        !self.outside.contains(node)
    }

    /// Works until this time or until `done`.
    async fn until(&mut self, end_us: u64, done: impl Fn(&Self) -> bool) {
        loop {
            self.work();
            if self.shared.us() >= end_us || done(self) {
                return;
            }
            self.sample();
            let next = self.shared.with(|inner| inner.schedule.next_us());
            let agenda = self.agenda.keys().next().map(|(us, _)| *us);
            let known = next.into_iter().chain(agenda).chain([end_us, self.sample_at]);
            let next = known.min().unwrap_or(end_us);
            let at = self.begun + Duration::from_micros(next);
            let shared = self.shared.clone();
            tokio::select! {
                biased;
                () = shared.wake.notified() => {}
                () = tokio::time::sleep_until(at) => {}
            }
        }
    }

    /// Looks at every node's queues, now and then.
    fn sample(&mut self) {
        let now = self.shared.us();
        if now < self.sample_at {
            return;
        }
        self.sample_at = now + SAMPLE;
        let mut found = Vec::new();
        for (name, life) in &self.cluster.lives {
            match &life.running {
                None => self.gauges.gone(name),
                Some(running) => {
                    for peer in running.host.node().peers() {
                        let bytes = peer.queued_bytes as u64;
                        self.gauges.mail(name, peer.node.as_str(), bytes, &mut found);
                    }
                }
            }
        }
        self.record(found);
    }

    fn record(&self, found: Vec<What>) {
        self.shared.with(|inner| found.into_iter().for_each(|what| inner.push(what)));
    }

    /// No request is open or to come, no fault is in force or to come by the clock.
    fn nothing_left(&self) -> bool {
        self.agenda.is_empty()
            && self.shared.clients().open() == 0
            && self.shared.with(|inner| {
                let open = |run: &crate::record::FaultRun| {
                    run.began_us.is_some() && run.ended_us.is_none()
                };
                inner.orders.is_empty()
                    && inner.schedule.next_us().is_none()
                    && !inner.runs.iter().any(open)
            })
            && self.cluster.lives.values().all(|life| life.running.is_some())
    }

    /// Does all that is due now.
    fn work(&mut self) {
        loop {
            self.shared.with(|inner| inner.tick());
            let order = self.shared.with(|inner| inner.orders.pop_front());
            if let Some(order) = order {
                self.obey(order);
                continue;
            }
            let now = self.shared.us();
            match self.agenda.first_key_value() {
                Some(((at, _), _)) if *at <= now => {}
                _ => return,
            }
            if let Some((_, what)) = self.agenda.pop_first() {
                self.perform(what);
            }
        }
    }

    fn obey(&mut self, order: Order) {
        match order {
            Order::Due(Due::Begin(index)) => self.begin(index),
            Order::Due(Due::End(index)) => self.end(index),
            Order::Cancel(number) => self.cancel(number),
            Order::Started { node, life, result } => {
                let failed = result.is_err();
                if self.cluster.started(&node, life, result) {
                    self.mended(&node);
                } else if failed {
                    self.restart(&node);
                }
            }
            Order::Escalated { node, life, reason } => {
                tracing::debug!(node, reason, "escalated");
                self.died(&node, life, "its actors gave up");
            }
            Order::Drained { node, life } => self.died(&node, life, "it has drained"),
            Order::Published => self.ask_placement(),
        }
    }

    fn perform(&mut self, what: Timed) {
        match what {
            Timed::Arrive(index) => {
                let setup = self.setup.clone();
                let (Some(request), Some(reference)) =
                    (setup.requests.get(index), setup.references.get(index))
                else {
                    return;
                };
                self.submit(request, request.number, reference);
            }
            Timed::Extra(request, id) => {
                let own = id == request.number;
                let reference = match own {
                    true => super::oracle::answer(&self.setup.spec, &request),
                    false => Vec::new(),
                };
                self.submit(&request, id, &reference);
            }
            Timed::Start(node) => self.cluster.start(&node),
            Timed::Churn(index) => self.churn(index),
        }
    }

    fn submit(&mut self, request: &RequestSpec, id: u64, reference: &[u32]) {
        let cancels = request.cancel_after.is_some();
        let reference = reference.iter().map(u32::to_string).collect();
        self.requests.insert(
            request.number,
            RequestInfo {
                router_id: (id == request.number).then_some(id),
                tenant: request.tenant.clone(),
                prompt_tokens: request.prompt.len() as u32,
                max_tokens: request.max_tokens,
                cancels,
                deadline_us: request.deadline_us,
                reference,
            },
        );
        let gateway = self.gateway(request.number);
        Clients::submit(&self.shared, gateway, request, id, false);
    }

    /// Gateways take turns; a client tries the next one where nobody listens.
    pub fn gateway(&self, number: u64) -> Option<(Node, NodeName)> {
        let all = &self.cluster.gateways;
        let first = number as usize % all.len().max(1);
        let order = all.iter().cycle().skip(first).take(all.len());
        let node = order.into_iter().find_map(|name| self.cluster.node(name))?;
        Some((node.clone(), self.setup.config.cluster.head.clone()))
    }

    /// The client is gone: its gateway tells the router.
    pub fn cancel(&mut self, number: u64) {
        let Some(at) = self.shared.clients().read(number, |client| client.at.clone()) else {
            return;
        };
        let Some(node) = self.cluster.node(&at) else { return };
        let head = self.setup.config.cluster.head.clone();
        let to = Address::new(head, router::ROLE, router::INSTANCE);
        let cast = RouterCast::Cancel { request: RequestId(number), stopped: false };
        let _ = node.cast::<RouterProtocol>(&to, &cast);
    }

    /// A process has ended, not by a kill of ours.
    fn died(&mut self, node: &str, life: u64, why: &str) {
        if self.cluster.lives.get(node).is_some_and(|l| l.incarnation == life) {
            self.kill(node, why);
            if !self.cluster.is_held(node) {
                self.restart(node);
            }
        }
    }

    /// The process ends now; its gateway's clients lose their connection.
    pub fn kill(&mut self, node: &str, why: &str) -> Option<u64> {
        let life = self.cluster.kill(node)?;
        Clients::lose(&self.shared, node, "connection_lost", why);
        Some(life)
    }

    pub fn restart(&mut self, node: &str) {
        if let Some(at) = self.cluster.restart_at(node) {
            self.start_at(at, node);
        }
    }

    /// The node is up: faults that took it down are over.
    fn mended(&mut self, node: &str) {
        let mends = match self.cluster.lives.get_mut(node) {
            Some(life) => std::mem::take(&mut life.mends),
            None => return,
        };
        for index in mends {
            let down = self.cluster.lives.values().any(|life| life.mends.contains(&index));
            if !down {
                self.shared.with(|inner| inner.over(index));
            }
        }
    }

    /// The chaos is over.
    fn heal(&mut self) {
        self.healed = true;
        self.choose_core();
        let stays = self.stays.clone();
        self.shared.with(|inner| inner.heal(&stays));
        self.work();
        let now = self.shared.us();
        for node in self.cluster.pardon(&self.outside) {
            self.start_at(now, &node);
        }
    }

    /// What stays broken, if the plan heals a core alone.
    fn choose_core(&mut self) {
        let names = self.cluster.names();
        let found = self.shared.with(|inner| inner.holds(&names));
        let holds: Vec<heal::Hold> = found.values().cloned().collect();
        let Setup { config, phases, tolerance, .. } = &*self.setup;
        self.outside = heal::outside(config, phases, tolerance, &holds);
        let stays = found.iter().filter(|(_, hold)| hold.stays(&self.outside));
        self.stays = stays.map(|(index, _)| *index).collect();
        // A pause is written down up to the planned heal only.
        for index in &self.stays {
            let nodes = self.live.get(index).map(|live| live.nodes.clone()).unwrap_or_default();
            self.shared.with(|inner| {
                let Some(run) = inner.runs.get(*index) else { return };
                let lasts = run.began_us.zip(run.fault.lasts_us).map(|(from, us)| from + us);
                if run.fault.kind == Kind::ProcessPause
                    && let Some(end) = lasts
                {
                    let until = self.begun + Duration::from_micros(end);
                    nodes.iter().for_each(|node| inner.pause(node, Some(until)));
                }
            });
        }
    }

    /// After all was judged: reads back what the faults did that have stayed.
    fn finish(&mut self) {
        let left = self.shared.with(|inner| {
            let orders = std::mem::take(&mut inner.orders);
            inner.heal(&BTreeSet::new());
            std::mem::replace(&mut inner.orders, orders)
        });
        for order in left {
            let Order::Due(Due::End(index)) = order else { continue };
            let kind = self.shared.with(|inner| inner.runs.get(index).map(|run| run.kind()));
            if kind.is_some_and(|kind| row(kind).hits == Hits::Link) {
                self.end(index);
            }
        }
    }

    /// Works until all has been well for a lease's time (what was lost without a word is noticed by
    /// then); false if it is not by the end.
    async fn settle(&mut self, end_us: u64) -> bool {
        let lease_us = self.setup.config.membership.lease_ms * 1000;
        let mut since = None;
        loop {
            self.work();
            let well = self.quiet().await;
            let now = self.shared.us();
            since = if well { since.or(Some(now)) } else { None };
            if since.is_some_and(|since| now - since > lease_us) {
                return true;
            }
            if now >= end_us {
                return false;
            }
            self.until((now + LOOK).min(end_us), |_| false).await;
        }
    }

    async fn quiet(&mut self) -> bool {
        let of_core = |what: &Timed| match what {
            Timed::Start(node) => self.is_core(node),
            Timed::Churn(index) => !self.stays.contains(index),
            Timed::Arrive(_) | Timed::Extra(..) => true,
        };
        if self.shared.clients().open() > 0 || self.agenda.values().any(of_core) {
            return false;
        }
        let linked = |node: &Node| {
            node.peers().iter().all(|peer| peer.up || !self.is_core(peer.node.as_str()))
        };
        let mut core = self.cluster.lives.iter().filter(|(name, _)| self.is_core(name));
        let up = core.all(|(_, life)| {
            life.running.as_ref().is_some_and(|running| linked(running.host.node()))
        });
        if !up {
            return false;
        }
        let wanted = self.wanted();
        let Some(status) = self.status().await else { return false };
        let (mut found, head) = (Vec::new(), self.cluster.head().to_string());
        self.gauges.router(&head, &status, &mut found);
        for replica in &status.replicas {
            self.gauges.scheduler(&head, &replica.info.replica, &replica.load, &mut found);
        }
        self.record(found);
        let core = |r: &&ReplicaStatus| heal::serves(&r.info.served_by, &self.outside);
        let core: Vec<&ReplicaStatus> = status.replicas.iter().filter(core).collect();
        status.open_requests == 0
            && core.len() as u64 >= wanted
            && core.iter().all(|replica| replica.load.kv_blocks_live == 0)
    }

    pub async fn status(&self) -> Option<RouterStatus> {
        let head = self.cluster.node(self.cluster.head())?;
        let to = head.address(router::ROLE, router::INSTANCE);
        match head.call::<RouterProtocol>(&to, &RouterCall::Status, CALL).await {
            Ok(RouterReply::Status(status)) => Some(status),
            _ => None,
        }
    }

    /// What placement has published goes into the record.
    fn ask_placement(&self) {
        let Some(head) = self.cluster.node(self.cluster.head()).cloned() else { return };
        let shared = self.shared.clone();
        tokio::spawn(async move {
            let to = head.address(placement::ROLE, placement::INSTANCE);
            let call = PlacementCall::Status;
            let answer = head.call::<PlacementProtocol>(&to, &call, CALL).await;
            let Ok(PlacementReply::Status(states)) = answer else { return };
            for replica in states.into_iter().filter(|replica| replica.state == "ready") {
                let shards = rest::placed(&replica);
                if !shards.is_empty() {
                    let (epoch, replica) = (replica.epoch.0, replica.replica);
                    shared.push(What::Placement { replica, epoch, shards });
                }
            }
        });
    }

    /// Hash over every frame and every event, with their times.
    fn trace(&self) -> u64 {
        let mut hash = blake3::Hasher::new();
        hash.update(&self.cluster.network.trace().to_le_bytes());
        self.shared.with(|inner| {
            for event in &inner.events {
                hash.update(&event.us.to_le_bytes());
                trace_what(&mut hash, &event.what);
            }
        });
        let mut first = [0; 8];
        first.copy_from_slice(&hash.finalize().as_bytes()[..8]);
        u64::from_le_bytes(first)
    }
}

fn trace_what(hash: &mut blake3::Hasher, what: &What) {
    let mut feed = |tag: u8, texts: &[&str], numbers: &[u64]| {
        hash.update(&[tag]);
        for text in texts {
            hash.update(&(text.len() as u64).to_le_bytes()).update(text.as_bytes());
        }
        for number in numbers {
            hash.update(&number.to_le_bytes());
        }
    };
    match what {
        What::Submitted { request } => feed(0, &[], &[*request]),
        What::Accepted { request } => feed(1, &[], &[*request]),
        What::Refused { request, code } => feed(2, &[code], &[*request]),
        What::Token { request, position, id } => {
            feed(3, &[id], &[*request, u64::from(*position)]);
        }
        What::Ended { request, code, message } => feed(4, &[code, message], &[*request]),
        What::Fact { node, name, subject, key, value } => {
            feed(5, &[node, name, subject], &[*key, *value]);
        }
        What::Node { node, state } => feed(6, &[node, state], &[]),
        What::Gauge { node, name, value } => feed(7, &[node, name], &[value.to_bits()]),
        What::Placement { replica, epoch, shards } => {
            feed(8, &[replica], &[*epoch]);
            for shard in shards {
                let numbers = [shard.stage as u64, shard.rank as u64];
                feed(9, &[&shard.node, &shard.device], &numbers);
            }
        }
        What::Served { request, model, served_by } => {
            feed(10, &[model], &[*request]);
            served_by.iter().for_each(|place| feed(11, &[place], &[]));
        }
    }
}

/// When the system first said that something is wrong.
fn detected(events: &[Event], began: u64, ended: Option<u64>) -> Option<u64> {
    const SIGNS: [&str; 8] = [
        names::PEER_DOWN,
        names::FRAME_REFUSED,
        names::ACTOR_RESTARTED,
        names::LEASE_EXPIRED,
        facts::STEP_FAILED,
        facts::REPLICA_DOWN,
        facts::STALE_REFUSED,
        facts::PLAN_MISMATCH,
    ];
    let until = ended.unwrap_or(began).saturating_add(NOTICE_US);
    let sign = events.iter().find(|event| {
        let fact = matches!(&event.what, What::Fact { name, .. } if SIGNS.contains(&&**name));
        fact && event.us >= began && event.us <= until
    });
    sign.map(|event| event.us)
}

fn env(setup: &Setup) -> BTreeMap<String, String> {
    let pairs = [
        ("engine", "hash".to_string()),
        ("model", setup.config.cluster.model.clone()),
        ("version", env!("CARGO_PKG_VERSION").to_string()),
    ];
    pairs.into_iter().map(|(key, value)| (key.to_string(), value)).collect()
}

fn nodes(setup: &Setup) -> Vec<NodeInfo> {
    let head = &setup.config.cluster.head;
    let info = |(name, node): (&NodeName, &dunlin_runtime::config::NodeConfig)| NodeInfo {
        name: name.to_string(),
        role: if name == head { "head" } else { "worker" }.to_string(),
        devices: node.devices.clone(),
    };
    setup.config.nodes.iter().map(info).collect()
}

impl Driver {
    /// Writes a node's state down, as the injector sees it.
    pub fn note(&self, node: &str, what: &str) {
        self.shared.push(state(node, what));
    }
}
