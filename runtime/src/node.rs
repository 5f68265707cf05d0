//! A node: its endpoint, its peers, its mailboxes. The shell around the pure cores.

use crate::address::{Address, Incarnation, NodeName, Peer};
use crate::codec;
use crate::faults::{Action, Faults, Site, names};
use crate::flow::{FlowClass, FlowId, FlowReceiver, FlowSender};
use crate::frame::{self, Content, LANES, Refusal, Stamp, Target};
use crate::lane::Guard;
use crate::lease::LeaseHolder;
use crate::link::{self, Lanes};
use crate::mailbox::{
    Arrival, CallError, CastError, Export, ExportError, Exports, Inbound, Protocol,
};
use crate::membership::Me;
use crate::options::{NodeOptions, ms};
use crate::peer::{Failure, PeerShell, PeerStatus};
use crate::prng::fnv;
use crate::transport::{BindError, CloseCode, CloseReason, Endpoint, Link, LinkStats, Transport};
use bytes::Bytes;
use parking_lot::{Mutex, RwLock};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;
use tokio::runtime::Handle;
use tokio::sync::{Notify, Semaphore, broadcast, watch};
use tokio::task::AbortHandle;
use tokio::time::Instant;

/// Events that a slow watcher may fall behind by.
const EVENT_QUEUE: usize = 1024;

/// One node of the cluster. Many can live in one process. Cheap to clone; the last clone's drop
/// ends the node as a crash would, [`Node::shutdown`] ends it so that its peers know at once.
#[derive(Clone)]
pub struct Node(Arc<Owner>);

struct Owner(Arc<Core>);

impl Drop for Owner {
    fn drop(&mut self) {
        self.0.stop("the node was dropped");
    }
}

/// What a node learns about its peers, in order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PeerEvent {
    /// There is a link now. A higher incarnation than before means that all the peer knew is gone.
    Up { peer: Peer },
    /// There is none any more. What was sent to the same life is delivered if it comes back in
    /// time; calls in flight fail if it does not.
    Down { peer: Peer, reason: String },
    /// A cast that was accepted for sending reached the node but not its actor.
    Undelivered { error: CastError },
}

/// May this node go on serving?
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Lease {
    /// This node is the head, or there is none.
    Permanent,
    Live {
        until: Instant,
    },
    /// The head was not heard in time: stop serving until it is.
    Expired {
        since: Instant,
    },
}

impl Lease {
    pub fn is_live(&self) -> bool {
        !matches!(self, Self::Expired { .. })
    }
}

/// Why a node did not start. Nothing is left running.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum StartError {
    #[error("node {node}: {error}")]
    Bind { node: NodeName, error: BindError },
    #[error("node {node} is listed as its own peer")]
    SelfPeer { node: NodeName },
    #[error("node {node}: the head {head} is not among its peers")]
    UnknownHead { node: NodeName, head: NodeName },
    #[error("node {node}: {name} is {value}, it must be {must}")]
    Option { node: NodeName, name: &'static str, value: u64, must: &'static str },
    /// A fault plan has it fail.
    #[error("node {node}: {text}")]
    Injected { node: NodeName, text: String },
}

impl Node {
    /// Listens, and begins to dial the peers. Runs on the tokio runtime of the caller.
    pub async fn start(
        options: NodeOptions,
        transport: Arc<dyn Transport>,
    ) -> Result<Node, StartError> {
        check(&options)?;
        let guard = Guard::new(options.name.clone(), options.faults.clone());
        if let Some(Action::Fail { text, .. }) =
            options.faults.decide(Site::Start { node: &options.name })
        {
            guard.tell(names::FAULT_DONE, "start refused", 0, 0);
            return Err(StartError::Injected { node: options.name, text });
        }
        let endpoint = transport
            .bind(&options.name, &options.listen)
            .await
            .map_err(|error| StartError::Bind { node: options.name.clone(), error })?;
        let core = Core::new(options, endpoint, guard);
        core.spawn(core.clone().accept_links());
        for lane in 0..LANES {
            core.spawn(core.clone().own_mail(lane));
        }
        core.spawn(core.clone().watch_lease());
        let peers: Vec<_> = core.peers.read().values().cloned().collect();
        for peer in peers {
            core.spawn(link::keep_linked(core.clone(), peer));
        }
        Ok(Node(Arc::new(Owner(core))))
    }

    pub fn name(&self) -> &NodeName {
        &self.core().me.name
    }

    pub fn incarnation(&self) -> Incarnation {
        self.core().me.incarnation
    }

    /// Where peers can dial this node.
    pub fn local_address(&self) -> String {
        self.core().endpoint.local_address()
    }

    /// Where this node's actors ask for injected faults and tell what happens.
    pub fn faults(&self) -> &Faults {
        &self.core().options.faults
    }

    /// An address on this node.
    pub fn address(&self, role: &str, instance: &str) -> Address {
        Address::new(self.name().clone(), role, instance)
    }

    /// Registers a mailbox. The handler must not block: it hands over to an actor.
    pub fn export<P: Protocol>(
        &self,
        role: &str,
        instance: &str,
        handler: impl Fn(Inbound<P>) + Send + Sync + 'static,
    ) -> Result<Export, ExportError> {
        self.core().exports.export(role, instance, handler)
    }

    /// Asks and waits for the answer, no longer than `deadline`. While the peer is away the call
    /// waits for it. After an error other than `Overloaded`, `Version`, `TooBig` or `Encode` the
    /// message may or may not have been handled.
    pub async fn call<P: Protocol>(
        &self,
        to: &Address,
        msg: &P::Call,
        deadline: Duration,
    ) -> Result<P::Reply, CallError> {
        let body = codec::encode(msg)
            .map_err(|e| CallError::Encode { to: to.clone(), detail: e.to_string() })?;
        if let Some(detail) = self.too_big(&body) {
            return Err(CallError::TooBig { to: to.clone(), detail });
        }
        let no_node = || CallError::NodeDown { to: to.clone(), reason: self.no_such(&to.node) };
        let peer = self.core().peer(&to.node).ok_or_else(no_node)?;
        let target = target::<P>(to);
        let (_guard, answer) = peer.call(to, &target, body, deadline)?;
        let body = match tokio::time::timeout(deadline, answer).await {
            Ok(Ok(Ok(body))) => body,
            Ok(Ok(Err(Failure::Told(outcome)))) => {
                return Err(CallError::from_outcome(to.clone(), outcome, deadline));
            }
            Ok(Ok(Err(Failure::Down(reason)))) => {
                return Err(CallError::NodeDown { to: to.clone(), reason });
            }
            Ok(Err(_)) => {
                let reason = "this node is shutting down".into();
                return Err(CallError::NodeDown { to: to.clone(), reason });
            }
            Err(_) => {
                return Err(match peer.down_reason() {
                    Some(reason) => CallError::NodeDown { to: to.clone(), reason },
                    None => {
                        let after_ms = deadline.as_millis() as u64;
                        CallError::Deadline { to: to.clone(), after_ms }
                    }
                });
            }
        };
        codec::decode(&body)
            .map_err(|e| CallError::Decode { to: to.clone(), detail: format!("the reply: {e}") })
    }

    /// Sends without waiting. Ordered per (this node, address). Refused at once while the peer is
    /// down or too much is queued for it.
    pub fn cast<P: Protocol>(&self, to: &Address, msg: &P::Cast) -> Result<(), CastError> {
        let body = codec::encode(msg)
            .map_err(|e| CastError::Encode { to: to.clone(), detail: e.to_string() })?;
        if let Some(detail) = self.too_big(&body) {
            return Err(CastError::TooBig { to: to.clone(), detail });
        }
        let no_node = || CastError::NodeDown { to: to.clone(), reason: self.no_such(&to.node) };
        let peer = self.core().peer(&to.node).ok_or_else(no_node)?;
        peer.cast(to, &target::<P>(to), body)
    }

    /// What happens to peers from now on.
    pub fn watch(&self) -> broadcast::Receiver<PeerEvent> {
        self.core().events.subscribe()
    }

    /// All peers, by name.
    pub fn peers(&self) -> Vec<PeerStatus> {
        self.core().peers.read().values().map(|peer| peer.status()).collect()
    }

    /// Whether this node's lease is live.
    pub fn lease(&self) -> watch::Receiver<Lease> {
        self.core().lease.subscribe()
    }

    /// Adds a peer or changes where it is dialled.
    pub fn add_peer(&self, name: NodeName, addresses: Vec<String>) {
        let core = self.core();
        if name == core.me.name {
            return;
        }
        let mut peers = core.peers.write();
        if let Some(peer) = peers.get(&name) {
            return peer.set_addresses(addresses);
        }
        let peer = PeerShell::new(name.clone(), addresses, core.options.limits, &core.guard);
        peers.insert(name, peer.clone());
        drop(peers);
        core.spawn(link::keep_linked(core.clone(), peer));
    }

    /// Someone knows better than the detector that this life of the peer is over (its parent saw
    /// it exit): drops the link and fails the calls at once.
    pub fn declare_down(&self, node: &NodeName, reason: &str) {
        let core = self.core();
        let peer = core.peers.read().get(node).cloned();
        let Some(peer) = peer else { return };
        if peer.down(None, reason, true, 0) {
            let incarnation = peer.incarnation();
            core.peer_down(Peer { node: node.clone(), incarnation }, reason);
        }
    }

    /// The sending end of a flow; opens with its first frame.
    ///
    /// A node that is not among the peers is as good as one that is down.
    pub fn open_flow(&self, to: &NodeName, flow: FlowId, class: FlowClass) -> FlowSender {
        let core = self.core();
        let local = *to == core.me.name;
        let peer = core.peer_or_lost(to);
        let how = (local, core.options.timing.flow_open_ms);
        FlowSender::new(peer, flow, class, core.stamp, how, core.handle.clone())
    }

    /// The receiving end of a flow; may be called before or after the peer opens it. A second
    /// call for the same flow takes over from the first.
    pub fn accept_flow(&self, from: &NodeName, flow: FlowId) -> FlowReceiver {
        let core = self.core();
        FlowReceiver::new(core.peer_or_lost(from), flow, core.handle.clone())
    }

    /// Ends the node: peers see it at once, calls fail. Idempotent.
    pub async fn shutdown(&self) {
        let core = self.core();
        let reason = format!("{} is shutting down", core.me.name);
        core.endpoint.close(CloseReason::new(CloseCode::Shutdown, reason.clone())).await;
        core.stop(&reason);
    }

    /// Ends the node without a word to its peers, as the end of its process would.
    pub fn crash(&self) {
        self.core().stop("the process has ended");
    }

    fn core(&self) -> &Arc<Core> {
        &self.0.0
    }

    fn too_big(&self, body: &Bytes) -> Option<String> {
        let (size, limit) = (body.len(), self.core().options.limits.message_bytes);
        (size > limit).then(|| format!("a message of {size} bytes is over the limit of {limit}"))
    }

    fn no_such(&self, node: &NodeName) -> String {
        format!("{} knows no node {node}", self.name())
    }
}

impl std::fmt::Debug for Node {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Node({} {})", self.name(), self.incarnation())
    }
}

fn target<P: Protocol>(to: &Address) -> Target {
    Target {
        role: to.role.clone(),
        instance: to.instance.clone(),
        protocol: P::NAME.to_owned(),
        version: P::VERSION,
    }
}

fn check(options: &NodeOptions) -> Result<(), StartError> {
    let node = options.name.clone();
    if options.peers.contains_key(&node) {
        return Err(StartError::SelfPeer { node });
    }
    if let Some(head) = &options.head
        && *head != node
        && !options.peers.contains_key(head)
    {
        return Err(StartError::UnknownHead { node, head: head.clone() });
    }
    let timing = &options.timing;
    let wrong =
        |name, value, must| Err(StartError::Option { node: node.clone(), name, value, must });
    if timing.heartbeat_ms == 0 {
        return wrong("heartbeat_ms", 0, "at least 1");
    }
    if timing.dead_ms < 2 * timing.heartbeat_ms {
        return wrong("dead_ms", timing.dead_ms, "at least twice heartbeat_ms");
    }
    if timing.lease_ms < 2 * timing.heartbeat_ms {
        return wrong("lease_ms", timing.lease_ms, "at least twice heartbeat_ms");
    }
    let message_bytes = options.limits.message_bytes;
    if message_bytes > codec::MAX_BODY_BYTES {
        return wrong("message_bytes", message_bytes as u64, "at most 64 MiB");
    }
    Ok(())
}

/// What all tasks of a node share.
pub(crate) struct Core {
    pub me: Me,
    pub stamp: Stamp,
    pub guard: Arc<Guard>,
    pub options: NodeOptions,
    pub endpoint: Arc<dyn Endpoint>,
    pub handle: Handle,
    pub peers: RwLock<BTreeMap<NodeName, Arc<PeerShell>>>,
    /// This node's own mail takes the same way as any other, minus the network.
    own: Arc<PeerShell>,
    exports: Exports,
    events: broadcast::Sender<PeerEvent>,
    lease: watch::Sender<Lease>,
    holders: Mutex<BTreeMap<NodeName, LeaseHolder>>,
    clock: Instant,
    renewed: Notify,
    hellos: Arc<Semaphore>,
    /// The head knows another process of this node's name and incarnation.
    second: AtomicBool,
    /// `None` once the node has stopped.
    tasks: Mutex<Option<Vec<AbortHandle>>>,
}

impl Core {
    fn new(options: NodeOptions, endpoint: Arc<dyn Endpoint>, guard: Arc<Guard>) -> Arc<Self> {
        let me = Me {
            name: options.name.clone(),
            cluster: options.cluster.clone(),
            incarnation: options.incarnation,
            life: options.life,
            schema: options.schema,
        };
        let peers = options.peers.iter().map(|(name, addresses)| {
            let peer = PeerShell::new(name.clone(), addresses.clone(), options.limits, &guard);
            (name.clone(), peer)
        });
        let now = Instant::now();
        let lease = match &options.head {
            Some(head) if *head != options.name => Lease::Expired { since: now },
            _ => Lease::Permanent,
        };
        let own = PeerShell::new(options.name.clone(), Vec::new(), options.limits, &guard);
        own.up(0, None, true);
        Arc::new(Self {
            stamp: Stamp { cluster: fnv(&[&options.cluster]), incarnation: options.incarnation },
            peers: RwLock::new(peers.collect()),
            guard,
            me,
            endpoint,
            handle: Handle::current(),
            own,
            exports: Exports::default(),
            events: broadcast::Sender::new(EVENT_QUEUE),
            lease: watch::Sender::new(lease),
            holders: Mutex::new(BTreeMap::new()),
            clock: now,
            renewed: Notify::new(),
            hellos: Arc::new(Semaphore::new(options.limits.pending_hellos.max(1))),
            second: AtomicBool::new(false),
            tasks: Mutex::new(Some(Vec::new())),
            options,
        })
    }

    fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        let mut tasks = self.tasks.lock();
        let Some(tasks) = tasks.as_mut() else { return };
        tasks.retain(|task| !task.is_finished());
        tasks.push(self.handle.spawn(task).abort_handle());
    }

    fn stop(&self, reason: &str) {
        for task in self.tasks.lock().take().into_iter().flatten() {
            task.abort();
        }
        let peers: Vec<_> = self.peers.read().values().cloned().collect();
        for peer in peers.iter().chain([&self.own]) {
            peer.close(reason);
            peer.down(None, reason, true, 0);
        }
    }

    fn peer(&self, name: &NodeName) -> Option<Arc<PeerShell>> {
        if *name == self.me.name {
            return Some(self.own.clone());
        }
        self.peers.read().get(name).cloned()
    }

    fn peer_or_lost(&self, name: &NodeName) -> Arc<PeerShell> {
        let (limits, guard) = (self.options.limits, &self.guard);
        self.peer(name).unwrap_or_else(|| PeerShell::new(name.clone(), Vec::new(), limits, guard))
    }

    async fn accept_links(self: Arc<Self>) {
        while let Some(link) = self.endpoint.accept().await {
            let Ok(permit) = self.hellos.clone().try_acquire_owned() else {
                link.close(CloseReason::new(CloseCode::Refused, "too many links at once"));
                continue;
            };
            let core = self.clone();
            self.spawn(async move {
                link::accept(core, link).await;
                drop(permit);
            });
        }
    }

    /// The node's mail to itself.
    async fn own_mail(self: Arc<Self>, lane: usize) {
        let from = Peer { node: self.me.name.clone(), incarnation: self.me.incarnation };
        while let Some(frames) = self.own.next_frames(0, lane, self.stamp).await {
            for draft in frames {
                match frame::decode(draft.into_content()) {
                    Ok((_, frame::Frame::Mail(mail))) => {
                        self.deliver(&self.own, from.clone(), lane, 0, mail.content);
                        self.own.ack_lane(lane, mail.seq + 1);
                    }
                    other => tracing::error!(?other, "a frame to oneself cannot be read"),
                }
            }
        }
    }

    pub fn deliver(
        &self,
        peer: &Arc<PeerShell>,
        from: Peer,
        lane: usize,
        session: u64,
        content: Content,
    ) {
        let (to, body, call) = match content {
            Content::Cast { to, body } => (to, body, None),
            Content::Call { id, deadline_ms, to, body } => {
                (to, body, Some((id, ms(deadline_ms.into()))))
            }
            Content::Answer { id, outcome, body } => return peer.answered(id, outcome, body),
            Content::Undelivered { to, outcome } => {
                let to = Address::new(peer.name.clone(), to.role, to.instance);
                let error = CastError::from_outcome(to, outcome);
                tracing::debug!(%error, "a cast was not taken");
                return self.emit(PeerEvent::Undelivered { error });
            }
        };
        let arrival = Arrival { from, peer: peer.clone(), lane, session, to, body, call };
        self.exports.deliver(arrival, self.options.limits.mailbox_bytes);
    }

    // ---- links -----------------------------------------------------------------------------

    pub fn link_up(
        self: Arc<Self>,
        peer: Arc<PeerShell>,
        link: Arc<dyn Link>,
        token: u64,
        lanes: Lanes,
    ) {
        let who = Peer { node: peer.name.clone(), incarnation: peer.incarnation() };
        tracing::info!(node = %self.me.name, peer = %who, "link up");
        if let Some(holder) = self.holders.lock().get_mut(&peer.name) {
            holder.new_link();
        }
        if self.options.head.as_ref() == Some(&peer.name) && self.second.swap(false, Relaxed) {
            self.others(&peer.name).iter().for_each(|other| other.wake.notify_one());
        }
        self.guard.tell(names::PEER_UP, who.node.as_str(), who.incarnation.0, 0);
        self.emit(PeerEvent::Up { peer: who.clone() });
        let core = self.clone();
        self.spawn(async move {
            let reason = link::run(core.clone(), peer.clone(), link, token, lanes).await;
            let over = reason.code == CloseCode::Shutdown;
            let resume_ms = core.options.timing.resume_ms;
            if peer.down(Some(token), &reason.text, over, resume_ms) {
                core.peer_down(who, &reason.text);
            }
        });
    }

    /// Whom its head refuses as the second process of a life lets go of everybody else as well: who
    /// met it first would keep the first one out.
    pub fn stand_back(&self, by: &NodeName, refusal: &Refusal) {
        if self.options.head.as_ref() != Some(by) || self.second.swap(true, Relaxed) {
            return;
        }
        tracing::error!(
            node = %self.me.name, %refusal,
            "another process of this node runs; this one waits until it is gone"
        );
        let reason = format!("{} {} is a second process", self.me.name, self.me.incarnation);
        for peer in self.others(by) {
            peer.part(&reason);
            if peer.down(None, &reason, true, 0) {
                let incarnation = peer.incarnation();
                self.peer_down(Peer { node: peer.name.clone(), incarnation }, &reason);
            }
        }
    }

    /// Must it leave this peer alone for now?
    pub fn stands_back_from(&self, peer: &NodeName) -> bool {
        self.second.load(Relaxed) && self.options.head.as_ref() != Some(peer)
    }

    fn others(&self, than: &NodeName) -> Vec<Arc<PeerShell>> {
        self.peers.read().values().filter(|peer| peer.name != *than).cloned().collect()
    }

    pub fn peer_down(&self, who: Peer, reason: &str) {
        tracing::info!(node = %self.me.name, peer = %who, reason, "link down");
        self.guard.tell(names::PEER_DOWN, who.node.as_str(), who.incarnation.0, 0);
        self.emit(PeerEvent::Down { peer: who, reason: reason.to_owned() });
    }

    fn emit(&self, event: PeerEvent) {
        // Nobody watching is fine.
        let _ = self.events.send(event);
    }

    // ---- leases ----------------------------------------------------------------------------

    fn now_ms(&self) -> u64 {
        self.clock.elapsed().as_millis() as u64
    }

    pub fn lease_sent(&self, peer: &PeerShell, seq: u64) {
        let now = self.now_ms();
        self.holders.lock().entry(peer.name.clone()).or_default().sent(seq, now);
    }

    pub fn lease_answered(&self, peer: &PeerShell, seq: u64, lease_ms: u32, stats: &LinkStats) {
        let now = self.now_ms();
        let mut holders = self.holders.lock();
        let holder = holders.entry(peer.name.clone()).or_default();
        let Some(rtt_ms) = holder.answered(seq, lease_ms.into(), now) else { return };
        let until = holder.until_ms();
        drop(holders);
        let rtt = stats.rtt.unwrap_or(ms(rtt_ms));
        peer.measured(rtt, stats.lost_packets);
        metrics::gauge!("dunlin_quic_rtt_seconds", "peer" => peer.name.to_string())
            .set(rtt.as_secs_f64());
        metrics::counter!("dunlin_quic_lost_packets_total", "peer" => peer.name.to_string())
            .absolute(stats.lost_packets);
        if self.options.head.as_ref() == Some(&peer.name) {
            let until = self.clock + ms(until);
            if until > Instant::now() {
                let before = self.lease.send_replace(Lease::Live { until });
                if !before.is_live() {
                    self.guard.tell(names::LEASE_LIVE, "", 0, 0);
                }
                self.renewed.notify_one();
            }
        }
    }

    /// As head: the lease that goes out with the answer to a heartbeat.
    pub fn grant(&self, peer: &PeerShell) -> u32 {
        if self.options.head.as_ref() != Some(&self.me.name) {
            return 0;
        }
        let lease_ms = self.options.timing.lease_ms;
        peer.granted(lease_ms);
        u32::try_from(lease_ms).unwrap_or(u32::MAX)
    }

    /// Lets the lease run out.
    async fn watch_lease(self: Arc<Self>) {
        loop {
            let now = *self.lease.borrow();
            let until = match now {
                Lease::Live { until } => Some(until),
                Lease::Permanent => return,
                Lease::Expired { .. } => None,
            };
            tokio::select! {
                biased;
                _ = self.renewed.notified() => {}
                _ = link::until(until) => {
                    tracing::warn!(node = %self.me.name, "the lease ran out");
                    let since = until.unwrap_or_else(Instant::now);
                    self.lease.send_replace(Lease::Expired { since });
                    self.guard.tell(names::LEASE_EXPIRED, "", 0, 0);
                }
            }
        }
    }
}
