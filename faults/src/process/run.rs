//! One run, from the first process to the last: phases, triggers, and the record.

use super::board::{Board, FactSeen};
use super::client::{self, Gateway, Orders, Seen};
use super::cluster::Cluster;
use super::cluster::Site;
use super::hub::Hub;
use super::inject::{self, EXTRA, Story, Tools};
use super::record::{detects, info, on_target, placement, undisturbed};
use super::wire::{FromNode, ToNode, now_us};
use super::{How, Note, ProcessError, Progress, rest, signals};
use crate::fault::{Fault, Trigger};
use crate::gauges::Gauges;
use crate::record::{Event, FaultRun, Phases, Record, RequestInfo, What};
use crate::resolved::{RequestSpec, Resolved};
use crate::schedule::{Due, Schedule};
use dunlin_actors::facts;
use dunlin_actors::messages::ReplicaState;
use dunlin_runtime::procs::ProcessEvent;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::sync::{oneshot, watch};
use tokio::task::JoinSet;

/// Requests of the baseline that are open at once.
const BASELINE_AT_ONCE: usize = 8;
/// A cluster that does not serve so long after its processes are ready is broken.
const SERVES_WITHIN: Duration = Duration::from_secs(120);
/// Numbers of questions about placements begin here.
const PLACING: u64 = 1 << 32;
/// How often the nodes' books are sampled.
const SAMPLE_US: u64 = 500_000;
const TICK: Duration = Duration::from_millis(100);

pub struct Run<'a> {
    pub plan: &'a Resolved,
    how: &'a How,
    pub notes: UnboundedSender<Note>,
    inbox: UnboundedReceiver<Note>,
    pub board: Arc<Board>,
    pub hub: Hub,
    pub cluster: Arc<Cluster>,
    pub gateway: Gateway,
    pub nodes: Vec<String>,
    pub schedule: Schedule,
    /// Monotonic time at which the workload began; `None` before.
    pub origin_us: Option<u64>,
    phase: &'static str,
    pub events: Vec<Event>,
    pub faults: Vec<FaultRun>,
    /// Cluster ids of the requests on the target when the fault began.
    pub touched: BTreeMap<usize, Vec<u64>>,
    pub requests: BTreeMap<u64, RequestInfo>,
    unsent: BTreeSet<u64>,
    pub active: BTreeMap<usize, oneshot::Sender<()>>,
    pub injecting: BTreeMap<usize, AbortAtEnd>,
    /// Nodes that the heal leaves broken.
    pub outside: BTreeSet<String>,
    /// Nodes whose supervisors have given up.
    pub gave_up: BTreeSet<String>,
    gauges: Gauges,
    sample_at: u64,
    /// Questions to the head about a replica that came up: when, which, at which epoch.
    placing: BTreeMap<u64, (u64, String, u64)>,
    tokens: u64,
    ended: usize,
}

/// Kills the cluster when the run is over or dropped, whoever else still knows it.
struct KillAtEnd(Arc<Cluster>);

impl Drop for KillAtEnd {
    fn drop(&mut self) {
        self.0.kill();
    }
}

pub struct AbortAtEnd(pub tokio::task::JoinHandle<()>);

impl Drop for AbortAtEnd {
    fn drop(&mut self) {
        self.0.abort();
    }
}

pub async fn run(plan: &Resolved, how: &How) -> Result<Record, ProcessError> {
    let site = Site::prepare(plan, &how.binary, &how.env)?;
    let (notes, inbox) = unbounded_channel();
    let (hub, listening) = Hub::listen(&site.socket, plan.seed, notes.clone()).map_err(|e| {
        ProcessError::Prepare { what: "the runner's socket", reason: e.to_string() }
    })?;
    let _listening = AbortAtEnd(listening);
    let (gateway, nodes) = (site.gateway()?, site.nodes());
    let cluster = Arc::new(site.start(notes.clone()));
    let _kill = KillAtEnd(cluster.clone());
    let fault_run = |fault: &Fault| FaultRun {
        fault: fault.clone(),
        began_us: None,
        ended_us: None,
        proof: None,
        detected_us: None,
        touched: Vec::new(),
    };
    let mut run = Run {
        plan,
        how,
        notes,
        inbox,
        board: Board::new(),
        hub,
        cluster: cluster.clone(),
        gateway,
        nodes,
        schedule: Schedule::new(&plan.faults, plan.phases.warmup_us),
        origin_us: None,
        phase: "start",
        events: Vec::new(),
        faults: plan.faults.iter().map(fault_run).collect(),
        touched: BTreeMap::new(),
        requests: BTreeMap::new(),
        unsent: plan.requests.iter().map(|request| request.number).collect(),
        active: BTreeMap::new(),
        injecting: BTreeMap::new(),
        outside: BTreeSet::new(),
        gave_up: BTreeSet::new(),
        gauges: Gauges::new(&cluster.site.config),
        sample_at: 0,
        placing: BTreeMap::new(),
        tokens: 0,
        ended: 0,
    };
    let result = run.all().await;
    if let Some(folder) = &how.keep_logs
        && let Err(error) = cluster.site.keep_logs(folder)
    {
        tracing::warn!(%error, "the logs could not be kept");
    }
    result
}

impl Run<'_> {
    async fn all(&mut self) -> Result<Record, ProcessError> {
        let cluster = self.cluster.clone();
        self.drive(cluster.ready()).await?;
        self.serves().await?;
        self.phase = "baseline";
        self.baseline().await?;
        let phases = self.workload().await;
        self.phase = "rest";
        let (phases, rest) = self.settle(phases).await;
        self.end_what_stayed().await;
        let mut record = self.record(phases);
        record.rest = rest;
        Ok(record)
    }

    /// Hears notes until `work` is done.
    pub async fn drive<T>(&mut self, work: impl Future<Output = T>) -> T {
        tokio::pin!(work);
        let mut tick = tokio::time::interval(TICK);
        loop {
            tokio::select! {
                biased;
                Some(note) = self.inbox.recv() => self.hear(note),
                done = &mut work => return done,
                _ = tick.tick() => {
                    self.sample();
                    self.report();
                }
            }
        }
    }

    /// Waits until the gateway answers and every configured replica takes requests.
    async fn serves(&mut self) -> Result<(), ProcessError> {
        let gateway = self.gateway.clone();
        let (model, ready) = {
            let waiting = async {
                loop {
                    if rest::all_serve(&gateway).await {
                        return;
                    }
                    tokio::time::sleep(Duration::from_millis(20)).await;
                }
            };
            let ready = self.drive(tokio::time::timeout(SERVES_WITHIN, waiting)).await;
            (self.drive(gateway.get("/v1/models")).await, ready)
        };
        let failed = |reason: &str, run: &Self| ProcessError::Start {
            reason: reason.to_string(),
            story: run.cluster.site.story(),
        };
        if ready.is_err() {
            return Err(failed("not every replica serves", self));
        }
        let model = model.and_then(|(_, v)| v["data"][0]["id"].as_str().map(str::to_string));
        self.gateway.model = model.ok_or_else(|| failed("/v1/models names none", self))?;
        Ok(())
    }

    /// Asks for every request once, with nothing broken.
    async fn baseline(&mut self) -> Result<(), ProcessError> {
        let mut left = self.plan.requests.clone();
        left.reverse();
        let mut asking: JoinSet<(RequestSpec, Vec<Seen>)> = JoinSet::new();
        loop {
            while asking.len() < BASELINE_AT_ONCE
                && let Some(request) = left.pop()
            {
                let gateway = self.gateway.clone();
                asking.spawn(async move {
                    let (_keep, mut orders) = watch::channel(Orders::default());
                    let mut seen = Vec::new();
                    let whole = RequestSpec { cancel_after: None, ..request.clone() };
                    let mut tell = |_, what| seen.push(what);
                    gateway.follow(&whole, "baseline", &mut orders, &mut tell).await;
                    (request, seen)
                });
            }
            let Some(done) = self.drive(asking.join_next()).await else { return Ok(()) };
            let Ok((request, seen)) = done else { continue };
            let number = request.number;
            let info = undisturbed(&request, &seen).map_err(|reason| ProcessError::Baseline {
                request: number,
                reason,
                story: self.cluster.site.story(),
            })?;
            self.requests.insert(number, info);
        }
    }

    /// Warm-up and chaos: sends the requests and carries out the faults. Says when which ended.
    async fn workload(&mut self) -> Phases {
        let origin = now_us();
        self.origin_us = Some(origin);
        for node in self.nodes.clone() {
            self.event(0, What::Node { node, state: "up".into() });
        }
        self.first_placements().await;
        let mut orders = BTreeMap::new();
        let mut clients = JoinSet::new();
        for request in &self.plan.requests {
            let (give, take) = watch::channel(Orders::default());
            orders.insert(request.number, give);
            let begin = origin + request.arrival_us;
            let salt = request.tenant.clone();
            let (gateway, notes) = (self.gateway.clone(), self.notes.clone());
            let client = client::start(gateway, request.clone(), salt, begin, take, notes);
            let guard = AbortAtEnd(client);
            clients.spawn(async move {
                let mut guard = guard;
                let _ = (&mut guard.0).await;
            });
        }
        let tools = Tools {
            board: self.board.clone(),
            hub: self.hub.clone(),
            cluster: self.cluster.clone(),
            gateway: self.gateway.clone(),
            notes: self.notes.clone(),
            orders: Arc::new(orders),
            requests: Arc::new(self.plan.requests.iter().map(|r| (r.number, r.clone())).collect()),
            nodes: self.nodes.clone(),
        };
        let warmup_us = self.plan.phases.warmup_us;
        let until_us = warmup_us + self.plan.phases.chaos_us;
        self.phase = "warmup";
        loop {
            let now = self.elapsed_us();
            if now >= warmup_us && self.phase == "warmup" {
                self.phase = "chaos";
                self.watch_sites();
            }
            self.sample();
            for due in self.schedule.tick(now) {
                self.due(due, &tools);
            }
            if now >= until_us || (now >= warmup_us && self.nothing_left()) {
                break;
            }
            let next = self.schedule.next_us().unwrap_or(until_us).min(until_us);
            let wait = Duration::from_micros(next.saturating_sub(now)).min(TICK);
            tokio::select! {
                biased;
                Some(note) = self.inbox.recv() => {
                    self.hear(note);
                    // What came with it belongs to the same moment.
                    while let Ok(note) = self.inbox.try_recv() {
                        self.hear(note);
                    }
                }
                () = tokio::time::sleep(wait) => self.report(),
            }
        }
        let chaos_us = self.elapsed_us();
        self.phase = "settle";
        self.heal(&tools).await;
        drop(tools);
        let settle = Duration::from_micros(self.plan.phases.settle_us);
        let answered = async { while clients.join_next().await.is_some() {} };
        let _ = self.drive(tokio::time::timeout(settle, answered)).await;
        Phases { warmup_us, chaos_us, settle_us: 0 }
    }

    /// Where the replicas lie when the workload begins.
    async fn first_placements(&mut self) {
        let head = self.cluster.site.config.cluster.head.to_string();
        let id = PLACING - 1;
        self.hub.tell(&head, ToNode::Ask { id, replicas: Vec::new() });
        let board = self.board.clone();
        let answer = board.wait(Duration::from_secs(5), |seen| seen.answers.get(&id).cloned());
        for state in self.drive(answer).await.unwrap_or_default().replicas {
            if !state.places.is_empty() {
                self.event(0, placement(&state));
            }
        }
    }

    /// Every request has ended and no fault is in force or has a time to begin at.
    fn nothing_left(&self) -> bool {
        self.unsent.is_empty()
            && self.board.read(|seen| seen.open.is_empty())
            && self.active.is_empty()
            && self.schedule.next_us().is_none()
    }

    async fn settle(&mut self, mut phases: Phases) -> (Phases, Option<crate::record::Rest>) {
        // From now: reading proofs back has taken time that was not the system's.
        let until = self.elapsed_us() + self.plan.phases.settle_us;
        let (rest, settled) = rest::settle(self, until).await;
        if !settled {
            tracing::warn!(?rest, "the cluster never came to rest");
        }
        phases.settle_us = self.elapsed_us();
        (phases, settled.then_some(rest))
    }

    /// Faults that begin at a site are armed in the nodes from the start: only they see it.
    fn watch_sites(&self) {
        let sites =
            |fault: &&Fault| matches!(fault.when, Trigger::Site { .. } | Trigger::Message { .. });
        for fault in self.plan.faults.iter().filter(sites) {
            self.hub.watch(fault, &self.nodes);
        }
    }

    /// The request of the workload with this number.
    pub fn spec(&self, number: u64) -> Option<RequestSpec> {
        self.plan.requests.iter().find(|request| request.number == number).cloned()
    }

    pub fn elapsed_us(&self) -> u64 {
        self.origin_us.map_or(0, |origin| now_us().saturating_sub(origin))
    }

    fn event(&mut self, us: u64, what: What) {
        self.events.push(Event { us, what });
    }

    fn report(&self) {
        let Some(progress) = &self.how.progress else { return };
        let active = self.active.keys().filter_map(|index| self.faults.get(*index));
        progress(&Progress {
            phase: self.phase,
            us: self.elapsed_us(),
            requests: self.plan.requests.len(),
            ended: self.ended,
            open: self.board.read(|seen| seen.open.len()),
            tokens: self.tokens,
            active: active.map(|run| run.fault.id.clone()).collect(),
        });
    }

    // ---- faults --------------------------------------------------------------------------------

    pub fn due(&mut self, due: Due, tools: &Tools) {
        match due {
            Due::Begin(index) => {
                let Some(run) = self.faults.get(index) else { return };
                let story = Story::new(index, run.fault.clone(), self.notes.clone());
                let (end, ended) = oneshot::channel();
                self.active.insert(index, end);
                let injecting = tokio::spawn(inject::inject(tools.clone(), story, ended));
                self.injecting.insert(index, AbortAtEnd(injecting));
            }
            Due::End(index) => {
                if let Some(end) = self.active.remove(&index) {
                    let _ = end.send(());
                }
            }
        }
    }

    fn began(&mut self, index: usize, us: u64) {
        let since = us.saturating_sub(self.origin_us.unwrap_or(us));
        let Some(run) = self.faults.get_mut(index) else { return };
        if run.began_us.is_some() {
            return;
        }
        run.began_us = Some(since);
        let hit = on_target(&run.fault, &self.nodes);
        let touched = self.board.read(|seen| {
            let here = seen.running.iter().filter(|((node, shard), _)| hit(node, shard));
            here.flat_map(|(_, requests)| requests.clone()).collect::<BTreeSet<u64>>()
        });
        self.touched.insert(index, touched.into_iter().collect());
    }

    fn detect(&mut self, us: u64, fact: &FactSeen) {
        for run in &mut self.faults {
            let active = run.began_us.is_some_and(|began| began <= us)
                && run.ended_us.is_none_or(|ended| us <= ended + 10_000_000);
            if active && run.detected_us.is_none() && detects(run.fault.kind, fact) {
                run.detected_us = Some(us);
            }
        }
    }

    // ---- what is heard -------------------------------------------------------------------------

    fn hear(&mut self, note: Note) {
        match note {
            Note::Node { node, said } => self.said(node, said),
            Note::Client { request, us, seen } => self.client(request, us, seen),
            Note::Extra { request, like } => {
                let known = like.and_then(|like| self.requests.get(&like)).cloned();
                let info = known.unwrap_or_else(|| info(&request));
                self.requests.insert(request.number, RequestInfo { router_id: None, ..info });
            }
            Note::Process(event) => self.process(event),
            Note::GaveUp { node, reason } => {
                tracing::warn!(node, reason, "a node is not restarted any more");
                self.gave_up.insert(node.clone());
                let us = self.elapsed_us();
                self.event(us, What::Node { node, state: "given up".into() });
            }
            Note::State { us, node, state } => {
                let us = self.since(us);
                self.event(us, What::Node { node, state });
            }
            Note::Began { index, us } => self.began(index, us),
            Note::Proven { index, text } => {
                if let Some(run) = self.faults.get_mut(index) {
                    run.proof = Some(text);
                }
            }
            Note::Ended { index, us } => {
                let us = self.since(us);
                self.active.remove(&index);
                self.schedule.ended(index, us);
                if let Some(run) = self.faults.get_mut(index) {
                    run.ended_us = run.began_us.map(|began| us.max(began));
                }
            }
        }
    }

    fn since(&self, us: u64) -> u64 {
        self.origin_us.map_or(0, |origin| us.saturating_sub(origin))
    }

    fn said(&mut self, node: String, said: FromNode) {
        match said {
            FromNode::Fact { us, name, subject, key, value, fault } => {
                let seen = FactSeen { us, node, name, subject, key, value };
                self.fact(seen, fault);
            }
            FromNode::Hit { us, fault, action } => {
                self.board.change(|seen| seen.hits.entry(fault.clone()).or_default().push(action));
                if let Some(index) = self.index(&fault) {
                    self.began(index, us);
                }
            }
            FromNode::Reached { us, fault } => {
                let us = self.since(us);
                if let Some(index) = self.index(&fault) {
                    self.schedule.trigger(index, us);
                }
            }
            FromNode::Proof { fault, text, .. } => {
                let text = format!("{node}: {text}");
                self.board.change(|seen| seen.proofs.entry(fault).or_default().push(text));
            }
            FromNode::Running { shard, requests, .. } => {
                self.board.change(|seen| drop(seen.running.insert((node, shard), requests)));
            }
            FromNode::Answer { id, state } if self.placing.contains_key(&id) => {
                self.placed(id, &state.replicas);
            }
            FromNode::Answer { id, state } => {
                self.board.change(|seen| drop(seen.answers.insert(id, *state)));
            }
            FromNode::Sample { us, state } => {
                let us = self.since(us);
                let mut found = Vec::new();
                let all: BTreeSet<&String> =
                    state.peers.keys().chain(state.queued.keys()).collect();
                for peer in all {
                    let bytes = state.queued.get(peer).copied().unwrap_or(0);
                    self.gauges.mail(&node, peer, bytes, &mut found);
                }
                for (replica, (load, _)) in &state.schedulers {
                    self.gauges.scheduler(&node, replica, load, &mut found);
                }
                if let Some(router) = &state.router {
                    self.gauges.router(&node, router, &mut found);
                }
                found.into_iter().for_each(|what| self.event(us, what));
            }
            FromNode::Lost(count) => {
                tracing::warn!(node, count, "facts did not fit the queue to the runner");
                self.board.change(|seen| seen.facts_lost += count);
            }
            FromNode::Hello { .. } => {}
        }
    }

    /// Asks every node for its books now and then, and the system for its memory.
    fn sample(&mut self) {
        let (now, us) = (now_us(), self.elapsed_us());
        if self.origin_us.is_none() || now < self.sample_at {
            return;
        }
        self.sample_at = now + SAMPLE_US;
        let replicas = rest::replica_names(&self.cluster.site.config);
        self.hub.tell_all(&ToNode::Sample { replicas });
        let mut found = Vec::new();
        for node in &self.nodes {
            let pid = self.board.pid(node);
            if let Some(bytes) = pid.and_then(signals::private) {
                self.gauges.memory(node, bytes, &mut found);
            }
        }
        found.into_iter().for_each(|what| self.event(us, what));
    }

    /// Asks the head where a replica lies that has come up.
    fn ask_placement(&mut self, us: u64, node: &str, replica: &str, epoch: u64) {
        let id = PLACING + self.events.len() as u64;
        if self.hub.tell(node, ToNode::Ask { id, replicas: Vec::new() }) {
            self.placing.insert(id, (us, replica.to_string(), epoch));
        }
    }

    fn placed(&mut self, id: u64, replicas: &[ReplicaState]) {
        let Some((us, replica, epoch)) = self.placing.remove(&id) else { return };
        let found = replicas.iter().find(|r| r.replica == replica && r.epoch.0 == epoch);
        if let Some(state) = found.filter(|state| !state.places.is_empty()) {
            self.event(us, placement(state));
        }
    }

    fn index(&self, fault: &str) -> Option<usize> {
        self.faults.iter().position(|run| run.fault.id == fault)
    }

    fn fact(&mut self, fact: FactSeen, fault: Option<String>) {
        self.board.change(|seen| {
            if fact.name == facts::STEP_DONE {
                seen.steps.entry(fact.node.clone()).or_default().push(fact.value);
            }
            if let Some(fault) = fault {
                let text = format!("{}: {}", fact.node, fact.subject);
                seen.proofs.entry(fault).or_default().push(text);
            }
            seen.facts.push(fact.clone());
        });
        if fact.name == facts::MEMORY_RESERVED {
            let (us, mut found) = (self.since(fact.us), Vec::new());
            self.gauges.reserved(&fact.node, &fact.subject, fact.key, &mut found);
            found.into_iter().for_each(|what| self.event(us, what));
        }
        let loads = [facts::MEMORY_RESERVED, facts::WEIGHTS_LOADED, facts::WEIGHTS_REFUSED];
        // What was loaded before the workload is compared with what is loaded later.
        let early = loads.contains(&fact.name.as_str());
        let known = self.origin_us.is_some_and(|origin| origin <= fact.us);
        if !known && !early {
            return;
        }
        let us = self.since(fact.us);
        if !known {
            let FactSeen { node, name, subject, key, value, .. } = fact;
            return self.event(0, What::Fact { node, name, subject, key, value });
        }
        self.detect(us, &fact);
        // Tokens trigger when a client has them; the router's word of the same would count twice.
        if fact.name != facts::TOKEN_DELIVERED {
            self.schedule.observe(us, &fact.name, &fact.subject, fact.key, fact.value);
        }
        let FactSeen { node, name, subject, key, value, .. } = fact;
        if name == facts::REPLICA_UP {
            self.ask_placement(us, &node, &subject, key);
        }
        self.event(us, What::Fact { node, name, subject, key, value });
    }

    fn process(&mut self, event: ProcessEvent) {
        let us = self.elapsed_us();
        let (node, state) = match event {
            ProcessEvent::Started { name, pid } => {
                self.board.change(|seen| {
                    let node = seen.nodes.entry(name.clone()).or_default();
                    (node.pid, node.ready) = (Some(pid), false);
                    node.starts += 1;
                });
                (name, "starting")
            }
            ProcessEvent::Ready { name, .. } => {
                self.board.change(|seen| {
                    let node = seen.nodes.entry(name.clone()).or_default();
                    node.ready = true;
                    node.readies += 1;
                });
                (name, "up")
            }
            ProcessEvent::Exited { name, how } => {
                self.gauges.gone(&name);
                self.board.change(|seen| {
                    let node = seen.nodes.entry(name.clone()).or_default();
                    node.ready = false;
                    if let Some(pid) = node.pid.take() {
                        node.exits.push((pid, how));
                    }
                    seen.running.retain(|(of, _), _| *of != name);
                });
                (name, "down")
            }
            ProcessEvent::Restarting { .. } => return,
        };
        if self.origin_us.is_some() {
            self.event(us, What::Node { node, state: state.into() });
        }
    }

    fn client(&mut self, request: u64, us: u64, seen: Seen) {
        let us = self.since(us);
        let what = match seen {
            Seen::Submitted => {
                self.unsent.remove(&request);
                self.board.change(|seen| _ = seen.open.insert(request));
                What::Submitted { request }
            }
            Seen::Accepted { id } => {
                if let Some(id) = id {
                    self.board.change(|seen| _ = seen.ids.insert(request, id));
                    self.hub.tell_all(&ToNode::Name { number: request, id });
                    if let Some(info) = self.requests.get_mut(&request) {
                        info.router_id = Some(id);
                    }
                }
                What::Accepted { request }
            }
            Seen::Refused { code } => {
                self.over(request);
                What::Refused { request, code }
            }
            Seen::Token { position, text } => {
                self.tokens += 1;
                self.board.change(|seen| _ = seen.tokens.insert(request, position + 1));
                let (key, value) = (request, position.into());
                self.schedule.observe(us, facts::TOKEN_DELIVERED, "", key, value);
                What::Token { request, position, id: text }
            }
            Seen::Usage { served_by, model, .. } => What::Served { request, model, served_by },
            Seen::Ended { code, message } => {
                self.over(request);
                What::Ended { request, code, message }
            }
            Seen::Unread(bytes) => {
                if bytes > 0 {
                    let text = format!("{bytes} bytes waited in the client's socket");
                    let key = format!("client {request}");
                    self.board.change(|seen| seen.proofs.entry(key).or_default().push(text));
                }
                return;
            }
        };
        self.event(us, what);
    }

    fn over(&mut self, request: u64) {
        let was_open = self.board.change(|seen| {
            seen.over.insert(request);
            seen.open.remove(&request)
        });
        self.ended += usize::from(was_open);
    }
}

/// Is it a request that a fault sent?
pub fn is_extra(number: u64) -> bool {
    number >= EXTRA
}
