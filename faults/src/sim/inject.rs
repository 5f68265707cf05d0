//! Faults that have no site: processes, links, clocks, membership, clients. Each is begun, read
//! back, ended and undone here; those with a site are armed where the hook asks.

use super::clients::Clients;
use super::drive::{Driver, Live, Timed};
use super::shared::{LONG, Shared};
use crate::armory::Armory;
use crate::draw::draw;
use crate::fault::{Fault, Kind, Target};
use crate::resolved::RequestSpec;
use dunlin_runtime::transport::memory::{Counters, Rules};
use dunlin_runtime::{Faults, Incarnation, MemoryNetwork, Node, NodeName};
use std::sync::Arc;
use std::time::Duration;
use tokio::time::Instant;

/// Numbers of requests that faults send begin here.
pub const EXTRA: u64 = 1_000_000;
/// Where ghosts listen: nobody dials them.
const GHOST: &str = "ghost:0";

/// Kinds that have no site; [`Driver::begin`] has each of them.
pub fn carries_out(kind: Kind) -> bool {
    use Kind::*;
    matches!(
        kind,
        ProcessKill
            | ProcessStop
            | ProcessPause
            | ControlChurn
            | ControlDupId
            | ControlSkew
            | TimerLate
            | ClockJump
            | LinkPartition
            | LinkDelay
            | LinkLoss
            | LinkBandwidth
            | LinkClog
            | LinkRebind
            | ConnHalfOpen
            | ClientDisconnect
            | ClientSlowReader
            | ClientBurst
            | ClientMalformed
    )
}

impl Driver {
    pub fn begin(&mut self, index: usize) {
        let Some(fault) = self.fault(index) else { return };
        self.live.insert(index, Live::default());
        use Kind::*;
        match fault.kind {
            ProcessKill | ProcessStop => self.begin_kill(index, &fault),
            ProcessPause => self.begin_pause(index, &fault),
            ProcessStartFail => self.begin_start_fail(index, &fault),
            ControlChurn => {
                let rounds = fault.params.count.unwrap_or(3);
                self.live.entry(index).or_default().rounds = rounds;
                self.churn(index);
            }
            ControlDupId | ControlSkew => self.begin_ghost(index, &fault),
            TimerLate => self.begin_late(index, &fault),
            ClockJump => {
                let ms = fault.params.ms.unwrap_or(3_600_000);
                let before = self.cluster.wall_ms;
                self.cluster.wall_ms += ms;
                let moved = self.cluster.wall_ms - before;
                self.prove(index, format!("the wall clock moved by {moved} ms"));
                self.over(index);
            }
            LinkPartition | LinkDelay | LinkLoss | LinkBandwidth | LinkClog | LinkRebind
            | ConnHalfOpen => self.begin_link(index, &fault),
            ClientDisconnect => self.disconnect(index, &fault),
            ClientSlowReader => self.begin_slow_reader(index, &fault),
            ClientBurst => self.burst(index, &fault),
            ClientMalformed => self.malformed(index, &fault),
            _ => debug_assert!(Armory::takes(fault.kind), "{} has no injector", fault.kind.name()),
        }
    }

    pub fn end(&mut self, index: usize) {
        let Some(fault) = self.fault(index) else { return };
        let mut live = self.live.remove(&index).unwrap_or_default();
        // What makes time lumpy, or keeps a ghost alive.
        if let Some(task) = live.task.take() {
            task.abort();
        }
        use Kind::*;
        match fault.kind {
            ProcessKill | ProcessStop | ProcessStartFail => {
                let now = self.shared.us();
                for node in self.cluster.release(index) {
                    self.start_at(now, &node);
                }
            }
            ProcessPause => {
                for node in &live.nodes {
                    let Ok(name) = NodeName::new(node) else { continue };
                    self.cluster.network.resume(&name);
                    self.shared.with(|inner| inner.pause(node, None));
                    if self.cluster.node(node).is_some() {
                        self.note(node, "up");
                    }
                }
            }
            LinkPartition | LinkDelay | LinkLoss | LinkBandwidth | LinkClog | LinkRebind
            | ConnHalfOpen => self.end_link(index, &fault, &live),
            ClientSlowReader => {
                for number in live.slowed {
                    if let Some(most) = Clients::speed_up(&self.shared, number)
                        && most > 0
                    {
                        self.prove(index, format!("request {number}: {most} events unread"));
                    }
                }
            }
            _ => {}
        }
    }

    fn fault(&self, index: usize) -> Option<Fault> {
        self.shared.with(|inner| inner.runs.get(index).map(|run| run.fault.clone()))
    }

    fn prove(&self, index: usize, proof: String) {
        self.shared.with(|inner| inner.prove(index, proof));
    }

    fn missed(&self, index: usize) {
        self.shared.with(|inner| inner.missed(index));
    }

    fn over(&self, index: usize) {
        self.shared.with(|inner| inner.over(index));
    }

    fn nodes_of(&self, fault: &Fault) -> Vec<String> {
        let all = self.cluster.names();
        self.shared.with(|inner| inner.nodes_of(fault, &all))
    }

    // ---- processes --------------------------------------------------------------------------

    fn begin_kill(&mut self, index: usize, fault: &Fault) {
        let nodes = self.nodes_of(fault);
        let gentle = fault.kind == Kind::ProcessStop
            || fault.params.signal.as_deref().is_some_and(|signal| signal == "TERM");
        let mut proofs = Vec::new();
        for node in &nodes {
            // One that is down already is kept down: it dies at its start, so to say.
            if fault.lasts_us.is_some() {
                self.cluster.hold(node, index);
                if self.cluster.node(node).is_none() {
                    proofs.push(format!("{node}: is down already, and stays so"));
                }
            }
            if gentle {
                if self.cluster.stop(node) {
                    proofs.push(format!("{node}: asked to end, drains"));
                }
            } else if let Some(life) = self.kill(node, "the process was killed") {
                proofs.push(format!("{node}: life {life} is gone"));
                if fault.lasts_us.is_none() {
                    self.restart(node);
                }
            } else {
                continue;
            }
            if fault.lasts_us.is_none()
                && let Some(life) = self.cluster.lives.get_mut(node)
            {
                life.mends.push(index);
            }
        }
        if proofs.is_empty() {
            return self.missed(index);
        }
        self.prove(index, proofs.join("; "));
    }

    fn begin_pause(&mut self, index: usize, fault: &Fault) {
        let lasts = fault.lasts_us.map_or(LONG, Duration::from_micros);
        // The heal ends it at the latest, and what sleeps then must not sleep on.
        let phases = self.setup.phases;
        let chaos_end = self.begun + Duration::from_micros(phases.warmup_us + phases.chaos_us);
        let until = (Instant::now() + lasts).min(chaos_end);
        let mut paused = Vec::new();
        for node in self.nodes_of(fault) {
            if self.cluster.node(&node).is_none() {
                continue;
            }
            let Ok(name) = NodeName::new(&node) else { continue };
            self.cluster.network.pause(&name);
            self.shared.with(|inner| inner.pause(&node, Some(until)));
            self.note(&node, "paused");
            paused.push(node);
        }
        if paused.is_empty() {
            return self.missed(index);
        }
        self.prove(index, format!("{}: nothing is scheduled any more", paused.join(", ")));
        self.live.entry(index).or_default().nodes = paused;
    }

    fn begin_start_fail(&mut self, index: usize, fault: &Fault) {
        for node in self.nodes_of(fault) {
            if self.kill(&node, "the process was killed").is_some() {
                self.restart(&node);
            }
            if let Some(life) = self.cluster.lives.get_mut(&node) {
                life.mends.push(index);
            }
        }
    }

    /// One round: the node is killed, comes back, and is killed again.
    pub fn churn(&mut self, index: usize) {
        let Some(fault) = self.fault(index) else { return };
        let pause = fault.params.p50_us.unwrap_or(300_000);
        let rounds = self.live.get(&index).map_or(0, |live| live.rounds);
        if rounds == 0 || (self.healed && !self.stays.contains(&index)) {
            return self.over(index);
        }
        let mut killed = false;
        for node in self.nodes_of(&fault) {
            if let Some(life) = self.kill(&node, "the process was killed") {
                killed = true;
                self.prove(index, format!("{node}: life {life} is gone"));
                self.restart(&node);
            }
        }
        if killed && let Some(live) = self.live.get_mut(&index) {
            live.rounds -= 1;
        }
        let next = self.shared.us() + pause + 300_000;
        self.at(next, Timed::Churn(index));
    }

    // ---- membership -------------------------------------------------------------------------

    /// A second node of the same name dials all others: as an earlier life, or from another
    /// version.
    fn begin_ghost(&mut self, index: usize, fault: &Fault) {
        let head = self.cluster.head().to_string();
        let name = match &fault.target {
            Target::Node(node) => node.clone(),
            _ => match self.cluster.names().into_iter().find(|node| *node != head) {
                Some(node) => node,
                None => head,
            },
        };
        let Some((node_name, own)) = self.cluster.config_of(&name) else { return };
        let mut options = self.cluster.options(&node_name, &own);
        let lives = self.cluster.lives.get(&name);
        let (life, reached) = lives.map_or((1, 1), |life| (life.incarnation, life.reached));
        options.listen = GHOST.into();
        options.seed = draw(self.cluster.seed, &fault.id, 1);
        options.life = draw(self.cluster.seed, &fault.id, 2);
        options.faults = Faults::none();
        match fault.kind {
            Kind::ControlSkew => {
                options.schema += 1;
                options.incarnation = Incarnation(life + 1);
            }
            // As a copy of the node's disk counts that was made before it last came up: a higher
            // number than its peers know would be no earlier life but the next one. One of the very
            // same number has its test among those of the links.
            _ => options.incarnation = Incarnation(reached.saturating_sub(1)),
        }
        let (network, shared) = (self.cluster.network.clone(), self.shared.clone());
        let task = tokio::spawn(haunt(options, network, shared, index));
        self.live.entry(index).or_default().task = Some(task);
    }

    // ---- clocks -----------------------------------------------------------------------------

    /// Time passes in lumps: timers that end inside one are late by up to its length.
    fn begin_late(&mut self, index: usize, fault: &Fault) {
        let most = fault.params.ms.unwrap_or(40).clamp(2, 10_000) as u64;
        let (shared, seed, id) = (self.shared.clone(), self.cluster.seed, fault.id.clone());
        let task = tokio::spawn(async move {
            for count in 0.. {
                let gap = 1 + draw(seed, &id, 2 * count) % most;
                let lump = 1 + draw(seed, &id, 2 * count + 1) % most;
                tokio::time::sleep(Duration::from_millis(gap)).await;
                tokio::time::advance(Duration::from_millis(lump)).await;
                let proof = format!("{lump} ms passed at once, and more");
                shared.with(|inner| inner.prove(index, proof));
            }
        });
        self.live.entry(index).or_default().task = Some(task);
    }

    // ---- links ------------------------------------------------------------------------------

    fn begin_link(&mut self, index: usize, fault: &Fault) {
        let pairs = self.pairs(fault);
        let network = self.cluster.network.clone();
        let counted = |pair: &(NodeName, NodeName)| network.counters(&pair.0, &pair.1);
        let before = pairs.iter().map(|pair| (pair.clone(), counted(pair))).collect();
        self.live.entry(index).or_default().before = before;
        let mut links = 0;
        for (from, to) in &pairs {
            match fault.kind {
                Kind::LinkPartition => network.cut(from, to),
                Kind::LinkClog => network.clog(from, to),
                Kind::LinkRebind => links += network.rebind(from, to),
                Kind::ConnHalfOpen => links += network.half_open(from, to),
                _ => network.change_rules_between(from, to, |rules| change(rules, fault)),
            }
        }
        if links > 0 {
            self.prove(index, format!("{links} links ({})", fault.kind.name()));
        }
        if matches!(fault.kind, Kind::LinkRebind | Kind::ConnHalfOpen) {
            self.over(index);
        }
    }

    fn end_link(&mut self, index: usize, fault: &Fault, live: &Live) {
        let network = &self.cluster.network;
        let mut proofs = Vec::new();
        for ((from, to), before) in &live.before {
            match fault.kind {
                Kind::LinkPartition => network.mend(from, to),
                Kind::LinkClog => network.unclog(from, to),
                Kind::LinkRebind | Kind::ConnHalfOpen => {}
                _ => network.change_rules_between(from, to, |rules| restore(rules, fault.kind)),
            }
            let now = network.counters(from, to);
            let (what, count) = effect(fault.kind, before, &now);
            if count > 0 {
                proofs.push(format!("{from} to {to}: {count} frames {what}"));
            }
        }
        if !proofs.is_empty() {
            self.prove(index, proofs.join("; "));
        }
    }

    fn pairs(&self, fault: &Fault) -> Vec<(NodeName, NodeName)> {
        let names = self.cluster.names();
        let named: Vec<(String, String)> = match &fault.target {
            Target::Links(links) => links.clone(),
            Target::All => {
                let of = |a: &String| names.iter().map(|b| (a.clone(), b.clone())).collect();
                names.iter().flat_map(|a| -> Vec<(String, String)> { of(a) }).collect()
            }
            _ => {
                let hit = self.nodes_of(fault);
                let both = |a: &String| -> Vec<(String, String)> {
                    let others = names.iter().filter(|b| *b != a);
                    others.flat_map(|b| [(a.clone(), b.clone()), (b.clone(), a.clone())]).collect()
                };
                hit.iter().flat_map(both).collect()
            }
        };
        let pair = |(a, b): &(String, String)| {
            (a != b).then(|| Some((NodeName::new(a).ok()?, NodeName::new(b).ok()?)))?
        };
        named.iter().filter_map(pair).collect()
    }

    // ---- clients ----------------------------------------------------------------------------

    fn targets(&self, fault: &Fault) -> Vec<u64> {
        let open = self.shared.clients().open_numbers();
        match &fault.target {
            Target::Request(number) => vec![*number],
            _ if fault.params.count.is_some() => {
                let take = fault.params.count.unwrap_or(1) as usize;
                open.into_iter().take(take).collect()
            }
            _ => open,
        }
    }

    fn disconnect(&mut self, index: usize, fault: &Fault) {
        let mut left = Vec::new();
        for number in self.targets(fault) {
            if Clients::leave(&self.shared, number) {
                self.cancel(number);
                if let Some(info) = self.requests.get_mut(&number) {
                    info.cancels = true;
                }
                left.push(number.to_string());
            }
        }
        if left.is_empty() {
            return self.missed(index);
        }
        self.prove(index, format!("clients of requests {} have left", left.join(", ")));
        self.over(index);
    }

    fn begin_slow_reader(&mut self, index: usize, fault: &Fault) {
        let pause = Duration::from_micros(fault.params.p50_us.unwrap_or(50_000).max(1));
        for number in self.targets(fault) {
            if Clients::slow_down(&self.shared, number, pause) {
                self.live.entry(index).or_default().slowed.push(number);
            }
        }
    }

    /// Copies of the workload's requests, all at once.
    fn burst(&mut self, index: usize, fault: &Fault) {
        let count = fault.params.count.unwrap_or(16);
        let (setup, now) = (self.setup.clone(), self.shared.us());
        if setup.requests.is_empty() {
            return;
        }
        for at in 0..count {
            let pick = draw(self.cluster.seed, &fault.id, at) as usize % setup.requests.len();
            let number = EXTRA + index as u64 * 10_000 + at;
            let like = &setup.requests[pick];
            let request =
                RequestSpec { number, arrival_us: now, cancel_after: None, ..like.clone() };
            self.at(now, Timed::Extra(Box::new(request), number));
        }
        self.prove(index, format!("{count} requests at once"));
        self.over(index);
    }

    /// Requests that must be refused: one that no replica can hold, and one under an id in use.
    fn malformed(&mut self, index: usize, fault: &Fault) {
        let (setup, now) = (self.setup.clone(), self.shared.us());
        let Some(like) = setup.requests.first() else { return };
        let base = EXTRA + index as u64 * 10_000 + 5_000;
        for at in 0..u64::from(fault.times) {
            let mut request = RequestSpec {
                number: base + at,
                arrival_us: now,
                cancel_after: None,
                ..like.clone()
            };
            let open = self.shared.clients().open_numbers();
            // Only what the router has accepted is in use.
            let taken = open
                .iter()
                .find(|n| self.shared.clients().read(**n, |client| client.accepted) == Some(true));
            let id = match (at % 2, taken) {
                (1, Some(number)) => *number,
                _ => {
                    request.max_tokens = 10_000_000;
                    request.number
                }
            };
            self.at(now, Timed::Extra(Box::new(request), id));
        }
        self.prove(index, format!("{} requests that cannot be served", fault.times));
        self.over(index);
    }
}

fn change(rules: &mut Rules, fault: &Fault) {
    let params = &fault.params;
    let us = Duration::from_micros;
    match fault.kind {
        Kind::LinkDelay => {
            rules.delay = us(params.p50_us.unwrap_or(5_000));
            rules.delay_p99 = us(params.p99_us.unwrap_or(0));
        }
        Kind::LinkLoss => rules.loss = params.p.unwrap_or(0.05),
        Kind::LinkBandwidth => rules.bits_per_second = params.bits_per_second.unwrap_or(1_000_000),
        _ => {}
    }
}

fn restore(rules: &mut Rules, kind: Kind) {
    match kind {
        Kind::LinkDelay => {
            (rules.delay, rules.delay_p99) = (super::cluster::PATH, Duration::ZERO);
        }
        Kind::LinkLoss => rules.loss = 0.0,
        Kind::LinkBandwidth => rules.bits_per_second = 0,
        _ => {}
    }
}

/// What the path's counters say that was done, and how often.
fn effect(kind: Kind, before: &Counters, now: &Counters) -> (&'static str, u64) {
    match kind {
        Kind::LinkPartition => ("held by the cut", now.cut - before.cut),
        Kind::LinkClog => ("clogged", now.clogged - before.clogged),
        Kind::LinkDelay => ("delayed", now.delayed - before.delayed),
        Kind::LinkLoss => ("lost", now.lost - before.lost),
        Kind::LinkBandwidth => ("throttled", now.throttled - before.throttled),
        _ => ("changed", 0),
    }
}

/// Keeps the second node of a name alive, and writes down how it was refused.
async fn haunt(
    options: dunlin_runtime::NodeOptions,
    network: MemoryNetwork,
    shared: Arc<Shared>,
    index: usize,
) {
    let name = options.name.clone();
    let Ok(ghost) = Node::start(options, Arc::new(network)).await else { return };
    loop {
        tokio::time::sleep(Duration::from_millis(20)).await;
        let said = ghost.peers().into_iter().find_map(|peer| {
            let error = peer.last_error.filter(|error| error.contains("refused"));
            error.filter(|_| !peer.up)
        });
        if let Some(said) = said {
            shared.with(|inner| inner.prove(index, format!("second {name}: {said}")));
        }
    }
}
