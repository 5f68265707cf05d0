//! The part of fault injection that lives in a node process: connects to the runner, holds what it
//! arms, tells it every fact, and answers what it asks.
//!
//! It exists only in a node that was started with `--faults SOCKET`. It runs on two threads of its
//! own, so that it still hears and tells when the node's other threads hang. Telling never blocks:
//! what does not fit the queue is counted and the count is told.

use super::wire::{FromNode, NodeState, ToNode, now_us};
use crate::armory::Armory;
use crate::fault::{Fault, Kind};
use crate::schedule::Schedule;
use dunlin_actors::messages::{
    PlacementCall, PlacementProtocol, PlacementReply, RouterCall, RouterProtocol, RouterReply,
    SchedulerCall, SchedulerProtocol, SchedulerReply,
};
use dunlin_actors::{placement, router, scheduler};
use dunlin_runtime::faults::names::FAULT_DONE;
use dunlin_runtime::{Action, Address, Fact, FaultHook, Faults, Node, NodeName, Site};
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, BufWriter, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, OnceLock};
use std::time::Duration;
use tokio::runtime::Handle;

/// Facts that may wait for the socket.
const QUEUE: usize = 1 << 16;
/// Within a node; longer ones do not answer.
const CALL_DEADLINE: Duration = Duration::from_secs(2);

/// Why a node that was told to take faults did not start.
#[derive(Debug, thiserror::Error)]
pub enum InsideError {
    #[error(
        "--faults {socket}: {reason}\n  = help: it is the socket of a running `dunlin faults run`, \
         which passes it by itself; leave the flag out otherwise"
    )]
    Socket { socket: PathBuf, reason: String },
}

/// What carries a fault out that has no [`Site`]: links, the wall clock.
pub trait Reach: Send + Sync + 'static {
    /// Begins it; says what was read back at once, if anything. `None`: not mine.
    fn begin(&self, fault: &Fault) -> Option<Option<String>>;

    /// Ends it, and says what it did in all.
    fn end(&self, fault: &Fault) -> Option<String>;
}

/// A node's connection to the runner. Cheap to clone.
#[derive(Clone)]
pub struct Inside(Arc<Shared>);

struct Shared {
    armory: Mutex<Armory>,
    /// Faults whose triggers are sites of this node.
    watched: Mutex<Vec<(Fault, Schedule)>>,
    /// Faults that are held by `reach`.
    reached: Mutex<Vec<Fault>>,
    reach: OnceLock<Arc<dyn Reach>>,
    /// Whether anything is armed or watched: the locks are spared otherwise.
    armed: AtomicBool,
    /// Requests of each shard's last step.
    running: Mutex<BTreeMap<String, Vec<u64>>>,
    out: SyncSender<FromNode>,
    lost: AtomicU64,
    node: OnceLock<(Node, Handle)>,
}

impl Inside {
    /// Connects, says who this is, and waits until the runner lets it go on; a runner that wants
    /// the node to stay away lets it wait.
    pub fn connect(socket: &Path, node: &NodeName) -> Result<Inside, InsideError> {
        let failed = |reason: String| InsideError::Socket { socket: socket.into(), reason };
        let stream = UnixStream::connect(socket).map_err(|e| failed(e.to_string()))?;
        let read = stream.try_clone().map_err(|e| failed(e.to_string()))?;
        let (out, queue) = sync_channel(QUEUE);
        let shared = Arc::new(Shared {
            armory: Mutex::new(Armory::new(0)),
            watched: Mutex::default(),
            reached: Mutex::default(),
            reach: OnceLock::new(),
            armed: AtomicBool::new(false),
            running: Mutex::default(),
            out,
            lost: AtomicU64::new(0),
            node: OnceLock::new(),
        });
        let mut stream = BufWriter::new(stream);
        let hello = FromNode::Hello { node: node.to_string(), pid: std::process::id() };
        write(&mut stream, &hello)
            .and_then(|()| stream.flush())
            .map_err(|e| failed(e.to_string()))?;
        let mut lines = BufReader::new(read).lines();
        let first = lines.next().ok_or_else(|| failed("the runner hung up".into()))?;
        let first = first.map_err(|e| failed(e.to_string()))?;
        match serde_json::from_str(&first) {
            Ok(ToNode::Go { seed, faults }) => {
                *shared.armory.lock() = Armory::new(seed);
                faults.into_iter().for_each(|fault| shared.arm(fault));
            }
            _ => return Err(failed(format!("the runner answered {first:.100}"))),
        }
        let spawn = |name: &str, body: Box<dyn FnOnce() + Send>| {
            let thread = std::thread::Builder::new().name(name.to_string()).spawn(body);
            thread.map(drop).map_err(|e| failed(e.to_string()))
        };
        let teller = shared.clone();
        spawn("faults-tell", Box::new(move || tell_all(&teller, &queue, stream)))?;
        let listener = shared.clone();
        spawn("faults-hear", Box::new(move || listener.hear_all(lines)))?;
        Ok(Inside(shared))
    }

    /// For the node's options.
    pub fn faults(&self) -> Faults {
        Faults::armed(self.0.clone())
    }

    /// What carries out the faults that have no site; before the node starts.
    pub fn set_reach(&self, reach: Arc<dyn Reach>) {
        let waiting: Vec<Fault> = std::mem::take(&mut *self.0.reached.lock());
        let _ = self.0.reach.set(reach);
        waiting.into_iter().for_each(|fault| self.0.arm(fault));
    }

    /// From now on the runner's questions can be answered.
    pub fn attach(&self, node: Node, runtime: Handle) {
        let _ = self.0.node.set((node, runtime));
    }
}

impl FaultHook for Shared {
    fn decide(&self, site: &Site<'_>) -> Option<Action> {
        if let Site::Step { replica, stage, rank, requests, .. } = site {
            self.note_running(replica, (*stage, *rank), requests);
        }
        if !self.armed.load(Ordering::Relaxed) {
            return None;
        }
        self.reach_sites(site);
        let hit = self.armory.lock().decide(site)?;
        let action = format!("{:?}", hit.action);
        self.tell(FromNode::Hit { us: now_us(), fault: hit.fault, action });
        Some(hit.action)
    }

    fn observe(&self, fact: &Fact) {
        let fault = match fact.name == FAULT_DONE || self.armed.load(Ordering::Relaxed) {
            true => self.armory.lock().observe(fact),
            false => None,
        };
        self.tell(FromNode::Fact {
            us: now_us(),
            name: fact.name.to_string(),
            subject: fact.subject.clone(),
            key: fact.key,
            value: fact.value,
            fault,
        });
    }
}

impl Shared {
    fn tell(&self, message: FromNode) {
        if self.out.try_send(message).is_err() {
            self.lost.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn note_running(&self, replica: &str, (stage, rank): (usize, usize), requests: &[u64]) {
        let shard = format!("{replica}/{stage}/{rank}");
        let mut running = self.running.lock();
        if running.get(&shard).is_some_and(|before| before == requests) {
            return;
        }
        running.insert(shard.clone(), requests.to_vec());
        drop(running);
        self.tell(FromNode::Running { us: now_us(), shard, requests: requests.to_vec() });
    }

    /// Arms what begins at this very site.
    fn reach_sites(&self, site: &Site<'_>) {
        let mut watched = self.watched.lock();
        if watched.is_empty() {
            return;
        }
        let mut met = Vec::new();
        watched.retain_mut(|(fault, schedule)| {
            let reached = schedule.reach(0, site);
            if reached {
                met.push(fault.clone());
            }
            !reached
        });
        drop(watched);
        for fault in met {
            self.tell(FromNode::Reached { us: now_us(), fault: fault.id.clone() });
            if has_site(fault.kind) {
                self.arm(fault);
            }
        }
    }

    fn arm(&self, fault: Fault) {
        if has_site(fault.kind) {
            self.armory.lock().arm(fault);
            self.armed.store(true, Ordering::Relaxed);
            return;
        }
        // Sockets that are opened belong to the node's runtime.
        let _inside = self.node.get().map(|(_, runtime)| runtime.enter());
        let begun = match self.reach.get() {
            Some(reach) => reach.begin(&fault),
            None => Some(None),
        };
        match begun {
            Some(proof) => {
                if let Some(text) = proof {
                    self.tell(FromNode::Proof { us: now_us(), fault: fault.id.clone(), text });
                }
                self.reached.lock().push(fault);
            }
            None => tracing::warn!(fault = fault.id, kind = fault.kind.name(), "not taken here"),
        }
    }

    fn disarm(&self, id: &str) {
        let mut armory = self.armory.lock();
        armory.disarm(id);
        let mut watched = self.watched.lock();
        watched.retain(|(fault, _)| fault.id != id);
        self.armed.store(!armory.is_empty() || !watched.is_empty(), Ordering::Relaxed);
        drop((armory, watched));
        let mut reached = self.reached.lock();
        let Some(at) = reached.iter().position(|fault| fault.id == id) else { return };
        let fault = reached.remove(at);
        drop(reached);
        if let Some(text) = self.reach.get().and_then(|reach| reach.end(&fault)) {
            self.tell(FromNode::Proof { us: now_us(), fault: fault.id, text });
        }
    }

    fn hear_all(self: Arc<Self>, lines: impl Iterator<Item = std::io::Result<String>>) {
        for line in lines.map_while(Result::ok) {
            match serde_json::from_str(&line) {
                Ok(ToNode::Go { .. }) => {}
                Ok(ToNode::Arm(fault)) => self.arm(fault),
                Ok(ToNode::Disarm(id)) => self.disarm(&id),
                Ok(ToNode::Watch(fault)) => {
                    let schedule = Schedule::new(std::slice::from_ref(&fault), 0);
                    self.watched.lock().push((fault, schedule));
                    self.armed.store(true, Ordering::Relaxed);
                }
                Ok(ToNode::Name { number, id }) => self.armory.lock().name_request(number, id),
                Ok(ToNode::Ask { id, replicas }) => {
                    let Some((node, runtime)) = self.node.get() else {
                        self.tell(FromNode::Answer { id, state: Box::default() });
                        continue;
                    };
                    let (shared, node) = (self.clone(), node.clone());
                    runtime.spawn(async move {
                        let state = Box::new(look(&node, &replicas, true).await);
                        shared.tell(FromNode::Answer { id, state });
                    });
                }
                Ok(ToNode::Sample { replicas }) => {
                    let Some((node, runtime)) = self.node.get() else { continue };
                    let (shared, node) = (self.clone(), node.clone());
                    runtime.spawn(async move {
                        let state = Box::new(look(&node, &replicas, false).await);
                        shared.tell(FromNode::Sample { us: now_us(), state });
                    });
                }
                Err(error) => tracing::warn!(%error, "the fault runner said {line:.100}"),
            }
        }
        // Nobody is left who would end what is armed.
        tracing::warn!("the fault runner is gone: nothing is armed any more");
        let held: Vec<String> = self.reached.lock().iter().map(|fault| fault.id.clone()).collect();
        held.iter().for_each(|id| self.disarm(id));
        *self.armory.lock() = Armory::new(0);
        self.watched.lock().clear();
        self.armed.store(false, Ordering::Relaxed);
    }
}

/// Is it carried out at a site of a node?
pub(super) fn has_site(kind: Kind) -> bool {
    Armory::takes(kind) || kind == Kind::StreamStall
}

fn write(to: &mut impl Write, message: &FromNode) -> std::io::Result<()> {
    serde_json::to_writer(&mut *to, message)?;
    to.write_all(b"\n")
}

/// Writes what is told until the runner is gone; then takes it and drops it.
fn tell_all(shared: &Shared, queue: &Receiver<FromNode>, mut stream: BufWriter<UnixStream>) {
    let mut listening = true;
    while let Ok(first) = queue.recv() {
        if !listening {
            continue;
        }
        let lost = shared.lost.swap(0, Ordering::Relaxed);
        let lost = (lost > 0).then_some(FromNode::Lost(lost));
        let mut written = Ok(());
        for message in lost.into_iter().chain([first]).chain(queue.try_iter().take(256)) {
            written = written.and_then(|()| write(&mut stream, &message));
        }
        listening = written.and_then(|()| stream.flush()).is_ok();
    }
}

/// The node's books: its peers, its schedulers, on the head router and placement.
async fn look(node: &Node, replicas: &[String], audits: bool) -> NodeState {
    let peers = node.peers();
    let mut state = NodeState { incarnation: node.incarnation().0, ..NodeState::default() };
    for peer in &peers {
        if let Some(incarnation) = peer.incarnation.filter(|_| peer.up) {
            state.peers.insert(peer.node.to_string(), incarnation.0);
        }
        if peer.queued_bytes > 0 {
            state.queued.insert(peer.node.to_string(), peer.queued_bytes as u64);
        }
    }
    for replica in replicas {
        let to = node.address(scheduler::ROLE, replica);
        let load = node.call::<SchedulerProtocol>(&to, &SchedulerCall::Status, CALL_DEADLINE).await;
        // No scheduler of that name is here.
        let Ok(SchedulerReply::Status(load)) = load else { continue };
        let found = if audits { audit(node, &to).await } else { Vec::new() };
        state.schedulers.insert(replica.clone(), (load, found));
    }
    let to = node.address(router::ROLE, router::INSTANCE);
    if let Ok(RouterReply::Status(status)) =
        node.call::<RouterProtocol>(&to, &RouterCall::Status, CALL_DEADLINE).await
    {
        state.router = Some(status);
    }
    if !audits {
        return state;
    }
    let to = node.address(placement::ROLE, placement::INSTANCE);
    if let Ok(PlacementReply::Status(states)) =
        node.call::<PlacementProtocol>(&to, &PlacementCall::Status, CALL_DEADLINE).await
    {
        state.replicas = states;
    }
    state
}

/// What a scheduler's audit finds.
async fn audit(node: &Node, to: &Address) -> Vec<String> {
    match node.call::<SchedulerProtocol>(to, &SchedulerCall::Audit, CALL_DEADLINE).await {
        Ok(SchedulerReply::Audit(Ok(()))) => Vec::new(),
        Ok(SchedulerReply::Audit(Err(found))) => found,
        Ok(_) => vec!["it answered beside the point".to_string()],
        Err(error) => vec![format!("it did not answer: {error}")],
    }
}
