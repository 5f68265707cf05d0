//! How each kind is carried out on real processes. One task a fault: it does it, reads back that it
//! was done, waits for its end, and undoes it.

use super::board::{Board, FactSeen, Seen as BoardSeen};
use super::client::{self, Gateway, Orders};
use super::cluster::Cluster;
use super::hub::Hub;
use super::inside::has_site;
use super::wire::now_us;
use super::{Note, http, signals};
use crate::fault::{Fault, Kind, Target, Trigger};
use crate::resolved::RequestSpec;
use dunlin_actors::facts;
use dunlin_runtime::faults::names;
use rustix::process::Signal;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::mpsc::UnboundedSender;
use tokio::sync::{oneshot, watch};

/// For the system to do what was asked of it: end a process, stop it, start it again.
const PATIENCE: Duration = Duration::from_secs(60);
/// One cycle of a process that runs only a share of the time. Well below any lease.
const SLOW_CYCLE: Duration = Duration::from_millis(24);
/// How long a node's word may take to reach the runner on a busy machine.
const LATE: Duration = Duration::from_millis(200);
/// Of a fault that repeats, so many effects are written down.
const MOST_PROOFS: usize = 8;
/// Numbers of requests that faults send begin here.
pub const EXTRA: u64 = 1_000_000;

/// What injectors work with.
#[derive(Clone)]
pub struct Tools {
    pub board: Arc<Board>,
    pub hub: Hub,
    pub cluster: Arc<Cluster>,
    pub gateway: Gateway,
    pub notes: UnboundedSender<Note>,
    pub orders: Arc<BTreeMap<u64, watch::Sender<Orders>>>,
    pub requests: Arc<BTreeMap<u64, RequestSpec>>,
    pub nodes: Vec<String>,
}

/// One fault's story, told to the run.
pub struct Story {
    pub index: usize,
    pub fault: Fault,
    notes: UnboundedSender<Note>,
}

/// Resolves when the schedule ends the fault.
pub type End = oneshot::Receiver<()>;

impl Story {
    pub fn new(index: usize, fault: Fault, notes: UnboundedSender<Note>) -> Self {
        Self { index, fault, notes }
    }

    fn began(&self) {
        self.began_at(now_us());
    }

    fn began_at(&self, us: u64) {
        let _ = self.notes.send(Note::Began { index: self.index, us });
    }

    fn proof(&self, text: String) {
        let _ = self.notes.send(Note::Proven { index: self.index, text });
    }

    fn state(&self, node: &str, state: &str) {
        let (node, state) = (node.to_string(), state.to_string());
        let _ = self.notes.send(Note::State { us: now_us(), node, state });
    }
}

/// Nodes that the fault hits: for a link the ones that send on it, for a shard every node, since
/// only the nodes know where it is.
pub fn nodes_of(target: &Target, all: &[String]) -> Vec<String> {
    match target {
        Target::Node(node) | Target::Actor { node, .. } => vec![node.clone()],
        Target::Links(links) => {
            let from: BTreeSet<&String> = links.iter().map(|(a, _)| a).collect();
            from.into_iter().cloned().collect()
        }
        Target::Shard { .. } | Target::Request(_) | Target::All => all.to_vec(),
    }
}

/// Nodes whose processes the fault hits: for a request or a shard, where its steps ran last.
async fn processes_of(tools: &Tools, target: &Target) -> Vec<String> {
    let look = |seen: &BoardSeen| {
        let here = |shard: &str, requests: &[u64]| match target {
            Target::Request(number) => seen.ids.get(number).is_some_and(|id| requests.contains(id)),
            Target::Shard { replica, stage, rank } => shard == format!("{replica}/{stage}/{rank}"),
            _ => false,
        };
        let steps = seen.running.iter().filter(|((_, shard), requests)| here(shard, requests));
        let nodes: BTreeSet<String> = steps.map(|((node, _), _)| node.clone()).collect();
        (!nodes.is_empty()).then(|| nodes.into_iter().collect())
    };
    match target {
        // The client's token may be here before the node's word of the step.
        Target::Request(_) | Target::Shard { .. } => {
            tools.board.wait(Duration::from_millis(300), look).await.unwrap_or_default()
        }
        other => nodes_of(other, &tools.nodes),
    }
}

/// Carries it out; returns when it is over and undone.
pub async fn inject(tools: Tools, story: Story, end: End) {
    use Kind::*;
    let kind = story.fault.kind;
    match kind {
        ProcessKill | ProcessStop => kill(&tools, &story, end).await,
        ProcessPause => pause(&tools, &story, end).await,
        ProcessSlow => slow(&tools, &story, end).await,
        ProcessStartFail => start_fail(&tools, &story, end).await,
        ControlChurn => churn(&tools, &story).await,
        ControlDupId => twin(&tools, &story, &[], end).await,
        ControlSkew => {
            let set = [("cluster.name".to_string(), "\"another-cluster\"".to_string())];
            twin(&tools, &story, &set, end).await;
        }
        ClientDisconnect => disconnect(&tools, &story, end).await,
        ClientSlowReader => slow_reader(&tools, &story, end).await,
        ClientBurst => burst(&tools, &story).await,
        ClientMalformed => malformed(&tools, &story).await,
        _ if has_site(kind) => rules(&tools, &story, end).await,
        // Links, sockets, clocks: the nodes do it, and say what they read back.
        _ => reach(&tools, &story, end).await,
    }
    let _ = tools.notes.send(Note::Ended { index: story.index, us: now_us() });
}

// ---- processes ---------------------------------------------------------------------------------

async fn kill(tools: &Tools, story: &Story, end: End) {
    let fault = &story.fault;
    let signal = match fault.kind {
        Kind::ProcessStop => Signal::TERM,
        _ => fault.params.signal.as_deref().and_then(signals::named).unwrap_or(Signal::KILL),
    };
    let nodes = processes_of(tools, &fault.target).await;
    let away = fault.lasts_us.is_some();
    if away {
        nodes.iter().for_each(|node| tools.hub.hold(node, &fault.id));
    }
    let mut hit = Vec::new();
    story.began();
    for node in &nodes {
        let readies = tools.board.read(|seen| seen.nodes.get(node).map_or(0, |n| n.readies));
        if let Some(pid) = tools.board.pid(node)
            && signals::send(pid, signal)
        {
            let state = if signal == Signal::TERM { "draining" } else { "down" };
            story.state(node, state);
            hit.push((node.clone(), pid, readies));
        }
    }
    let mut proofs = Vec::new();
    for (node, pid, _) in &hit {
        if let Some(how) = exit_of(tools, node, *pid).await {
            proofs.push(format!("{node}: process {pid} {how}"));
        }
    }
    if !proofs.is_empty() && proofs.len() == hit.len() {
        story.proof(proofs.join("; "));
    }
    if away {
        let _ = end.await;
        nodes.iter().for_each(|node| tools.hub.release(node, &fault.id));
    }
    for (node, _, readies) in &hit {
        ready_again(tools, node, *readies).await;
    }
}

/// How this process ended, once it has.
async fn exit_of(tools: &Tools, node: &str, pid: u32) -> Option<String> {
    let look = |seen: &BoardSeen| {
        let exits = &seen.nodes.get(node)?.exits;
        exits.iter().find(|(of, _)| *of == pid).map(|(_, how)| how.clone())
    };
    tools.board.wait(PATIENCE, look).await
}

async fn ready_again(tools: &Tools, node: &str, readies: u32) {
    let look = |seen: &BoardSeen| {
        seen.nodes.get(node).filter(|node| node.readies > readies && node.ready).map(|_| ())
    };
    tools.board.wait(PATIENCE, look).await;
}

async fn pause(tools: &Tools, story: &Story, end: End) {
    let nodes = processes_of(tools, &story.fault.target).await;
    let mut stopped = Vec::new();
    story.began();
    for node in nodes {
        if let Some(pid) = tools.board.pid(&node)
            && signals::send(pid, Signal::STOP)
        {
            story.state(&node, "paused");
            stopped.push((node, pid));
        }
    }
    // From here on dropping this future must not leave a process stopped.
    let _thaw = Thaw(stopped.iter().map(|(_, pid)| *pid).collect());
    let mut proofs = Vec::new();
    for (node, pid) in &stopped {
        for _ in 0..200 {
            if signals::state(*pid) == Some('T') {
                proofs.push(format!("{node}: process {pid} in state T"));
                break;
            }
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }
    if !proofs.is_empty() && proofs.len() == stopped.len() {
        story.proof(proofs.join("; "));
    }
    let _ = end.await;
    for (node, pid) in &stopped {
        if signals::send(*pid, Signal::CONT) {
            story.state(node, "up");
        }
    }
}

/// Lets processes go on, whatever happens.
struct Thaw(Vec<u32>);

impl Drop for Thaw {
    fn drop(&mut self) {
        self.0.iter().for_each(|pid| _ = signals::send(*pid, Signal::CONT));
    }
}

/// Runs for one part of a cycle out of `factor`.
async fn slow(tools: &Tools, story: &Story, mut end: End) {
    let nodes = processes_of(tools, &story.fault.target).await;
    let factor = story.fault.params.factor.unwrap_or(4.0).max(1.01);
    let run = SLOW_CYCLE.div_f64(factor);
    let rest = SLOW_CYCLE - run;
    let steps = |tools: &Tools| {
        tools.board.read(|seen| {
            let of = |node: &String| seen.steps.get(node).cloned().unwrap_or_default();
            nodes.iter().map(of).collect::<Vec<_>>()
        })
    };
    let before = steps(tools);
    story.began();
    let mut cycles = 0u32;
    loop {
        let pids: Vec<u32> = nodes.iter().filter_map(|node| tools.board.pid(node)).collect();
        let thaw = Thaw(pids.clone());
        pids.iter().for_each(|pid| _ = signals::send(*pid, Signal::STOP));
        tokio::time::sleep(rest).await;
        drop(thaw);
        cycles += 1;
        tokio::select! {
            _ = &mut end => break,
            () = tokio::time::sleep(run) => {}
        }
    }
    let after = steps(tools);
    let mut proofs = Vec::new();
    for ((node, before), after) in nodes.iter().zip(&before).zip(&after) {
        let during = after.get(before.len()..).unwrap_or_default();
        if let (Some(then), Some(now)) = (mean(before), mean(during)) {
            proofs.push(format!("{node}: a step took {now:.0} us instead of {then:.0} us"));
        }
    }
    let stopped = format!("stopped {cycles} times for {rest:?} of {SLOW_CYCLE:?}");
    // Without a step in it there was nothing to be slow.
    if !proofs.is_empty() {
        story.proof(format!("{stopped}; {}", proofs.join("; ")));
    }
}

fn mean(values: &[u64]) -> Option<f64> {
    (!values.is_empty()).then(|| values.iter().sum::<u64>() as f64 / values.len() as f64)
}

/// Kills the node; its next starts are refused `times` times, or until the heal.
async fn start_fail(tools: &Tools, story: &Story, mut end: End) {
    let fault = &story.fault;
    let (mut proofs, mut over) = (Vec::new(), false);
    story.began();
    for node in nodes_of(&fault.target, &tools.nodes) {
        let state = tools.board.read(|seen| seen.nodes.get(&node).cloned()).unwrap_or_default();
        // Each life of the process counts its own sites: one refusal a life.
        let once = Fault { times: 1, ..fault.clone() };
        tools.hub.arm_start(&once, &node);
        let Some(pid) = state.pid.filter(|pid| signals::send(*pid, Signal::KILL)) else { continue };
        story.state(&node, "down");
        exit_of(tools, &node, pid).await;
        let want = state.exits.len() + 1 + fault.times as usize;
        let all = |seen: &BoardSeen| {
            seen.nodes.get(&node).filter(|node| node.exits.len() >= want).map(drop)
        };
        tokio::select! {
            biased;
            _ = tools.board.wait(PATIENCE * 10, all) => {}
            _ = &mut end, if !over => over = true,
        }
        tools.hub.disarm(&fault.id);
        let exits = tools.board.read(|seen| seen.nodes.get(&node).map(|node| node.exits.clone()));
        let own = exits.unwrap_or_default().into_iter().skip(state.exits.len() + 1);
        for (pid, how) in own.take(MOST_PROOFS) {
            if how.contains("injected") {
                proofs.push(format!("{node}: process {pid} {how}"));
            }
        }
        // Told to end, it leaves the rest to the heal.
        if !over {
            ready_again(tools, &node, state.readies).await;
        }
    }
    if !proofs.is_empty() {
        story.proof(proofs.join("; "));
    }
}

/// Kills the node and waits until it is back, again and again.
async fn churn(tools: &Tools, story: &Story) {
    let params = &story.fault.params;
    let pause = Duration::from_micros(params.p50_us.unwrap_or(300_000));
    let mut proofs = Vec::new();
    story.began();
    for _ in 0..params.count.unwrap_or(3) {
        for node in nodes_of(&story.fault.target, &tools.nodes) {
            let readies = tools.board.read(|seen| seen.nodes.get(&node).map_or(0, |n| n.readies));
            let Some(pid) = tools.board.pid(&node) else { continue };
            signals::send(pid, Signal::KILL);
            story.state(&node, "down");
            if exit_of(tools, &node, pid).await.is_some() {
                proofs.push(format!("{node}: process {pid} is gone"));
            }
            ready_again(tools, &node, readies).await;
        }
        tokio::time::sleep(pause).await;
    }
    if !proofs.is_empty() {
        story.proof(proofs.join("; "));
    }
}

/// A second process with the same name tries to join.
async fn twin(tools: &Tools, story: &Story, set: &[(String, String)], end: End) {
    let worker = || {
        let head = tools.cluster.site.config.cluster.head.as_str();
        tools.nodes.iter().find(|node| node.as_str() != head).or(tools.nodes.first()).cloned()
    };
    let node = match &story.fault.target {
        Target::Node(node) => Some(node.clone()),
        _ => worker(),
    };
    let Some(node) = node else { return };
    let from = tools.board.read(|seen| seen.facts.len());
    story.began();
    let twin = match tools.cluster.twin(&node, &story.fault.id, set) {
        Ok(twin) => twin,
        Err(error) => return tracing::warn!(%error, "no twin of {node}"),
    };
    let refused = |fact: &FactSeen| fact.name == names::FRAME_REFUSED;
    let told = tools.board.wait(Duration::from_secs(10), |seen| {
        let fact = seen.facts.get(from..)?.iter().find(|fact| refused(fact))?;
        Some(format!("{} refused {} ({} so far)", fact.node, fact.subject, fact.value))
    });
    // The refusing node's log says it too, with the reason.
    let marks = ["StaleIncarnation", "stale", "cluster", "another-cluster"];
    let logged = async {
        loop {
            tokio::time::sleep(Duration::from_millis(100)).await;
            for at in &tools.nodes {
                let log = tools.cluster.site.log(at);
                let line = log.lines().rev().find(|line| {
                    line.contains("hello refused") && marks.iter().any(|mark| line.contains(mark))
                });
                if let Some(line) = line {
                    return format!("{at} logged: {line}");
                }
            }
        }
    };
    let proof = tokio::select! {
        Some(text) = told => Some(text),
        text = logged => Some(text),
        () = tokio::time::sleep(Duration::from_secs(10)) => None,
    };
    if let Some(text) = proof {
        story.proof(format!("second process of {node} ({}): {text}", twin.name));
    }
    if story.fault.lasts_us.is_some() {
        let _ = end.await;
    }
    drop(twin);
}

// ---- rules in the nodes ------------------------------------------------------------------------

/// Arms it in the nodes; begins when it first hits. A hit that had no effect (a bit of a sequence
/// with nothing written yet) is no hit: it is armed again.
async fn rules(tools: &Tools, story: &Story, mut end: End) {
    let fault = &story.fault;
    let nodes = nodes_of(&fault.target, &tools.nodes);
    let (facts_from, steps) = tools.board.read(|seen| (seen.facts.len(), seen.steps.clone()));
    let hits = |seen: &BoardSeen| seen.hits.get(&fault.id).map_or(0, Vec::len);
    let lasting = matches!(fault.kind, Kind::ActorSlow | Kind::DeviceSlow);
    // The node whose site triggered it has armed it already, for that very site.
    let mut armed = matches!(fault.when, Trigger::Site { .. } | Trigger::Message { .. });
    let mut over = false;
    let mut proof = None;
    while !over && proof.is_none() {
        let wanted = tools.board.read(hits) + if lasting { 1 } else { fault.times.max(1) as usize };
        if !std::mem::take(&mut armed) {
            tools.hub.arm(fault, &nodes);
        }
        let all = tools.board.wait(PATIENCE * 10, |seen| (hits(seen) >= wanted).then_some(()));
        tokio::select! {
            biased;
            _ = all => {}
            _ = &mut end => over = true,
        }
        if lasting && !over {
            let _ = (&mut end).await;
            over = true;
        }
        if over {
            tools.hub.disarm(&fault.id);
            // A hit of the last moment is still on its way.
            tools.board.wait(LATE, |seen| (hits(seen) > 0).then_some(())).await;
        }
        if tools.board.read(hits) == 0 {
            break;
        }
        proof = match lasting {
            true => tools.board.read(|seen| slower(fault, seen, &steps)),
            false => proven(tools, fault, facts_from).await,
        };
        if !over && proof.is_none() {
            tools.hub.disarm(&fault.id);
        }
    }
    // What hangs does so until the fault's own end.
    if !over && fault.lasts_us.is_some() {
        let _ = end.await;
    }
    tools.hub.disarm(&fault.id);
    if let Some(text) = proof {
        story.proof(format!("hit {} times; {text}", tools.board.read(hits)));
    }
}

/// What the node read back, or what can only have come of it.
async fn proven(tools: &Tools, fault: &Fault, facts_from: usize) -> Option<String> {
    let look = |seen: &BoardSeen| {
        let told = seen.proofs.get(&fault.id).and_then(|proofs| {
            proofs.last().map(|last| format!("{last} ({} times)", proofs.len()))
        });
        told.or_else(|| consequence(fault.kind, seen.facts.get(facts_from..).unwrap_or_default()))
    };
    let within = match fault.kind {
        // A hang shows when somebody has waited long enough.
        Kind::ActorHang | Kind::DeviceHang => Duration::from_secs(10),
        // It is told once the frame has left.
        Kind::StreamStall => {
            Duration::from_micros(fault.lasts_us.unwrap_or(0)) + Duration::from_secs(5)
        }
        _ => Duration::from_millis(700),
    };
    tools.board.wait(within, look).await
}

/// A fact that can only come of the fault.
fn consequence(kind: Kind, facts: &[FactSeen]) -> Option<String> {
    let wanted: &[&str] = match kind {
        Kind::ActorPanic => {
            &[names::ACTOR_RESTARTED, facts::REPLICA_DOWN, facts::STEP_FAILED, names::ESCALATED]
        }
        Kind::DeviceLaunchError | Kind::DeviceOom => &[facts::STEP_FAILED, facts::REPLICA_DOWN],
        Kind::ActorHang | Kind::DeviceHang => &[facts::STEP_FAILED, facts::REPLICA_DOWN],
        // What waits on a flow that stalls gives up before the frame has left.
        Kind::StreamStall => &[facts::STEP_FAILED, facts::REPLICA_DOWN],
        Kind::FrameCorrupt | Kind::FrameTruncate => &[names::FRAME_REFUSED],
        _ => &[],
    };
    let found = facts.iter().find(|fact| wanted.contains(&fact.name.as_str()))?;
    Some(format!("{} told {} {}", found.node, found.name, found.subject))
}

/// Steps that took longer than before.
fn slower(fault: &Fault, seen: &BoardSeen, before: &BTreeMap<String, Vec<u64>>) -> Option<String> {
    if fault.kind == Kind::ActorSlow {
        return seen.proofs.get(&fault.id).and_then(|proofs| proofs.last().cloned()).or_else(
            || {
                let hits = seen.hits.get(&fault.id)?;
                hits.last().map(|last| format!("{} messages waited; the last: {last}", hits.len()))
            },
        );
    }
    let slowed = seen.steps.iter().find_map(|(node, steps)| {
        let old = before.get(node).cloned().unwrap_or_default();
        let (then, now) = (mean(&old)?, mean(steps.get(old.len()..)?)?);
        (now > then).then(|| format!("{node}: a step took {now:.0} us instead of {then:.0} us"))
    });
    slowed.or_else(|| seen.proofs.get(&fault.id).and_then(|proofs| proofs.last().cloned()))
}

/// Arms it in the nodes that do it by themselves.
async fn reach(tools: &Tools, story: &Story, end: End) {
    let fault = &story.fault;
    let nodes = match fault.kind {
        // Whichever end has dialled moves.
        Kind::LinkRebind => tools.nodes.clone(),
        _ => nodes_of(&fault.target, &tools.nodes),
    };
    story.began();
    tools.hub.arm(fault, &nodes);
    let once = matches!(fault.kind, Kind::LinkRebind | Kind::ClockJump);
    if !once {
        let _ = end.await;
    } else {
        tools.board.wait(Duration::from_secs(5), |seen| seen.proofs.get(&fault.id).map(drop)).await;
    }
    tools.hub.disarm(&fault.id);
    let count = nodes.len();
    let all = |seen: &BoardSeen| {
        let proofs = seen.proofs.get(&fault.id)?;
        (proofs.len() >= count).then(|| proofs.join("; "))
    };
    let mut proof = tools.board.wait(Duration::from_secs(2), all).await;
    if proof.is_none() {
        proof = tools.board.read(|seen| seen.proofs.get(&fault.id).map(|p| p.join("; ")));
    }
    if let Some(text) = proof {
        story.proof(text);
    }
}

// ---- clients -----------------------------------------------------------------------------------

/// The open requests that a client fault hits: the one named, or all. Waits until there is one;
/// `None` if there is none any more.
async fn requests_of(tools: &Tools, target: &Target, within: Duration) -> Option<Vec<u64>> {
    let look = |seen: &BoardSeen| match target {
        Target::Request(number) if seen.open.contains(number) => Some(Some(vec![*number])),
        Target::Request(number) if seen.over.contains(number) => Some(None),
        Target::Request(_) => None,
        _ if seen.open.is_empty() => None,
        _ => Some(Some(seen.open.iter().copied().collect())),
    };
    tools.board.wait(within, look).await.flatten()
}

async fn disconnect(tools: &Tools, story: &Story, end: End) {
    let count = story.fault.params.count.unwrap_or(0);
    let after = u32::try_from(count).unwrap_or(u32::MAX);
    let hit = tokio::select! {
        hit = requests_of(tools, &story.fault.target, PATIENCE * 10) => hit,
        _ = end => None,
    };
    let Some(hit) = hit else { return };
    let ended_from = tools.board.read(|seen| seen.facts.len());
    story.began();
    for number in &hit {
        if let Some(orders) = tools.orders.get(number) {
            orders.send_modify(|orders| orders.hang_up_after = Some(after));
        }
    }
    for number in hit {
        let gone = |seen: &BoardSeen| (!seen.open.contains(&number)).then_some(());
        tools.board.wait(PATIENCE, gone).await;
        let seen_by_server = |seen: &BoardSeen| {
            let id = seen.ids.get(&number)?;
            let facts = seen.facts.get(ended_from..)?;
            let ended = |fact: &&FactSeen| fact.name == facts::REQUEST_ENDED && fact.key == *id;
            facts.iter().find(ended).map(|fact| fact.subject.clone())
        };
        match tools.board.wait(Duration::from_secs(5), seen_by_server).await {
            Some(how) if how == "cancelled" => {
                story.proof(format!("the router saw request {number} end as cancelled"));
            }
            // It was over before the client left.
            Some(_) => {}
            None => story.proof(format!("the client of request {number} closed its connection")),
        }
    }
}

async fn slow_reader(tools: &Tools, story: &Story, end: End) {
    let wait = Duration::from_micros(story.fault.params.p50_us.unwrap_or(100_000));
    let within = story.fault.lasts_us.map_or(PATIENCE, Duration::from_micros);
    let Some(hit) = requests_of(tools, &story.fault.target, within).await else { return };
    let set = |slow: Option<Duration>| {
        for number in &hit {
            if let Some(orders) = tools.orders.get(number) {
                orders.send_modify(|orders| orders.slow = slow);
            }
        }
    };
    story.began();
    set(Some(wait));
    let look = |seen: &BoardSeen| {
        let text = |number| seen.proofs.get(&format!("client {number}"))?.last().cloned();
        hit.iter().find_map(text)
    };
    let waited = async {
        if let Some(text) = tools.board.wait(PATIENCE, look).await {
            story.proof(format!("{wait:?} before each read; {text}"));
        }
        std::future::pending::<()>().await;
    };
    tokio::select! {
        _ = end => {}
        () = waited => {}
        _ = all_ended(tools, &hit) => {}
    }
    set(None);
}

async fn all_ended(tools: &Tools, hit: &[u64]) {
    let look =
        |seen: &BoardSeen| (!hit.iter().any(|number| seen.open.contains(number))).then_some(());
    tools.board.wait(PATIENCE * 10, look).await;
}

/// Copies of the workload's requests, all at once.
async fn burst(tools: &Tools, story: &Story) {
    let count = story.fault.params.count.unwrap_or(16);
    let known: Vec<&RequestSpec> = tools.requests.values().collect();
    if known.is_empty() {
        return;
    }
    story.began();
    let (_give, orders) = watch::channel(Orders::default());
    let mut tasks = Vec::new();
    for at in 0..count {
        let like = known[usize::try_from(at).unwrap_or(0) % known.len()];
        let number = EXTRA + story.index as u64 * 10_000 + at;
        let request = RequestSpec { number, cancel_after: None, ..(*like).clone() };
        let of = like.number;
        let _ = tools.notes.send(Note::Extra { request: request.clone(), like: Some(of) });
        tasks.push(client::start(
            tools.gateway.clone(),
            request,
            "burst".into(),
            0,
            orders.clone(),
            tools.notes.clone(),
        ));
    }
    let mut answered = 0;
    for task in tasks {
        answered += usize::from(task.await.is_ok());
    }
    story.proof(format!("{answered} of {count} requests at once were sent and answered"));
}

/// What is no request, in ways that break naive servers.
fn malformed_bodies(gateway: &Gateway) -> Vec<(&'static str, Vec<u8>)> {
    let host = gateway.address;
    // With a good key, so that it is the body that is refused.
    let key = gateway.keys.values().next();
    let key = key.map(|key| format!("Authorization: Bearer {key}\r\n")).unwrap_or_default();
    let post = |length: String, body: &[u8]| {
        let mut bytes = format!(
            "POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n{key}\
             Content-Type: application/json\r\nContent-Length: {length}\r\n\r\n"
        )
        .into_bytes();
        bytes.extend_from_slice(body);
        bytes
    };
    let body = |text: &[u8]| post(text.len().to_string(), text);
    let deep = "[".repeat(100_000);
    vec![
        ("no JSON", body(b"{\"model\": ")),
        ("not UTF-8", body(b"{\"prompt\": \"\xff\xfe\"}")),
        ("a number for a prompt", body(b"{\"prompt\": 7}")),
        ("deep nesting", body(deep.as_bytes())),
        ("a negative length", post("-1".into(), b"{}")),
        ("no HTTP", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03 hello\r\n\r\n".to_vec()),
        ("an endless count", body(b"{\"prompt\": \"x\", \"max_tokens\": 1e300}")),
    ]
}

async fn malformed(tools: &Tools, story: &Story) {
    let count = usize::try_from(story.fault.params.count.unwrap_or(1)).unwrap_or(1);
    let bodies = malformed_bodies(&tools.gateway);
    let mut proofs = Vec::new();
    story.began();
    for (what, bytes) in bodies.iter().cycle().take(count.max(1)) {
        let sent = http::send_raw(tools.gateway.address, bytes);
        match tokio::time::timeout(Duration::from_secs(10), sent).await {
            Ok(Ok(answer)) if (400..500).contains(&answer.status) => {
                proofs.push(format!("{what}: {}", answer.status));
            }
            // Closed without an answer: refused as well, as what is not HTTP may be.
            Ok(Err(_)) if *what == "no HTTP" => proofs.push(format!("{what}: closed")),
            Ok(Ok(answer)) => tracing::warn!(what, status = answer.status, "was not refused"),
            Ok(Err(error)) => tracing::warn!(what, %error, "was not answered"),
            Err(_) => tracing::warn!(what, "was not answered in time"),
        }
    }
    if proofs.len() == count.max(1) {
        story.proof(proofs.join("; "));
    }
}
