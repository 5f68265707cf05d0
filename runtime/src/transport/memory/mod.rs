//! An in-memory network: many nodes in one process, with seeded delay, loss and partitions.
//!
//! Works on tokio's paused clock. On a current-thread runtime every run with the same seed is the
//! same: draws are made in sending order, and no hash map's order reaches a decision. A lossy
//! frame resets its link, as a broken path would; a partition holds what is under way, and a link
//! that outlives it delivers late, as a retransmitting transport does.

use super::{
    BindError, BoxFuture, CloseReason, DialError, Endpoint, FrameSink, FrameSource, LaneClass,
    Link, LinkError, LinkStats, OutFrame, Transport,
};
use crate::address::NodeName;
use crate::prng::Prng;
use crate::signal::Signal;
use crate::transport::CloseCode;
use bytes::{Bytes, BytesMut};
use parking_lot::Mutex;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;
use tokio::sync::{Semaphore, mpsc};
use tokio::time::Instant;

/// Bytes a lane holds before its sender waits.
const LANE_WINDOW: usize = 1 << 20;
/// Links that wait to be accepted.
const ACCEPT_QUEUE: usize = 64;

/// The network that endpoints share. Cheap to clone. It is itself the [`Transport`] of all nodes.
#[derive(Clone)]
pub struct MemoryNetwork(Arc<Shared>);

/// How the network treats what crosses it.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Rules {
    /// One way.
    pub delay: Duration,
    /// Added to the delay, uniform in [0, jitter).
    pub jitter: Duration,
    /// Chance that a frame is lost, which resets its link.
    pub loss: f64,
}

struct Shared {
    net: Mutex<Net>,
    /// What is cut, apart from the rest because senders wait on it.
    cut: Signal<BTreeSet<(NodeName, NodeName)>>,
}

struct Net {
    rng: Prng,
    rules: Rules,
    pair_rules: BTreeMap<(NodeName, NodeName), Rules>,
    listeners: BTreeMap<String, Listener>,
    links: Vec<Weak<LinkState>>,
    next_port: u32,
    frames: u64,
    lost: u64,
}

struct Listener {
    name: NodeName,
    /// False after a crash: the endpoint neither dials nor accepts any more.
    alive: Arc<AtomicBool>,
    incoming: mpsc::Sender<Arc<dyn Link>>,
}

impl MemoryNetwork {
    pub fn new(seed: u64) -> Self {
        let net = Net {
            rng: Prng::new(seed),
            rules: Rules::default(),
            pair_rules: BTreeMap::new(),
            listeners: BTreeMap::new(),
            links: Vec::new(),
            next_port: 1,
            frames: 0,
            lost: 0,
        };
        Self(Arc::new(Shared { net: Mutex::new(net), cut: Signal::new(BTreeSet::new()) }))
    }

    /// Sets the rules for every direction that has none of its own.
    pub fn set_rules(&self, rules: Rules) {
        self.0.net.lock().rules = rules;
    }

    /// Sets the rules for what `from` sends to `to`.
    pub fn set_rules_between(&self, from: &NodeName, to: &NodeName, rules: Rules) {
        self.0.net.lock().pair_rules.insert((from.clone(), to.clone()), rules);
    }

    /// Holds everything that `from` sends to `to` until [`Self::heal`]. One way.
    pub fn cut(&self, from: &NodeName, to: &NodeName) {
        self.0.cut.update(|cut| cut.insert((from.clone(), to.clone())));
    }

    /// Cuts both ways.
    pub fn partition(&self, a: &NodeName, b: &NodeName) {
        self.cut(a, b);
        self.cut(b, a);
    }

    /// Ends the cuts between `a` and `b`, both ways.
    pub fn heal(&self, a: &NodeName, b: &NodeName) {
        self.0.cut.update(|cut| {
            let there = cut.remove(&(a.clone(), b.clone()));
            cut.remove(&(b.clone(), a.clone())) || there
        });
    }

    pub fn heal_all(&self) {
        self.0.cut.set(BTreeSet::new());
    }

    /// Breaks every link between `a` and `b`; both ends see a reset.
    pub fn reset(&self, a: &NodeName, b: &NodeName) {
        let links: Vec<_> = self.0.net.lock().links.iter().filter_map(Weak::upgrade).collect();
        for link in links {
            if link.names.contains(a) && link.names.contains(b) {
                let reason = CloseReason::new(CloseCode::Lost, "reset by the network");
                link.end(0, &reason);
                link.end(1, &reason);
            }
        }
    }

    /// The node vanishes without a word, like `kill -9` seen over UDP: what it sends and what is
    /// sent to it goes nowhere, for ever. Its name may bind again.
    pub fn crash(&self, node: &NodeName) {
        let links: Vec<_> = self.0.net.lock().links.iter().filter_map(Weak::upgrade).collect();
        for link in links.into_iter().filter(|link| link.names.contains(node)) {
            link.dead.store(true, Ordering::Release);
        }
        self.0.net.lock().listeners.retain(|_, listener| {
            let other = listener.name != *node;
            listener.alive.fetch_and(other, Ordering::AcqRel);
            other
        });
    }

    /// Frames sent and frames lost so far.
    pub fn counts(&self) -> (u64, u64) {
        let net = self.0.net.lock();
        (net.frames, net.lost)
    }
}

impl Transport for MemoryNetwork {
    fn bind<'a>(
        &'a self,
        name: &'a NodeName,
        listen: &'a str,
    ) -> BoxFuture<'a, Result<Arc<dyn Endpoint>, BindError>> {
        Box::pin(async move {
            let mut net = self.0.net.lock();
            let mut address = listen.to_owned();
            if let Some(host) = listen.strip_suffix(":0") {
                address = format!("{host}:{}", net.next_port);
                net.next_port += 1;
            }
            if let Some(other) = net.listeners.get(&address) {
                let holder = Some(format!("node {}", other.name));
                return Err(BindError::InUse { address, holder });
            }
            let (incoming, accepted) = mpsc::channel(ACCEPT_QUEUE);
            let alive = Arc::new(AtomicBool::new(true));
            let listener = Listener { name: name.clone(), alive: alive.clone(), incoming };
            net.listeners.insert(address.clone(), listener);
            Ok(Arc::new(MemoryEndpoint {
                network: self.clone(),
                name: name.clone(),
                alive,
                address,
                accepted: tokio::sync::Mutex::new(accepted),
            }) as Arc<dyn Endpoint>)
        })
    }
}

struct MemoryEndpoint {
    network: MemoryNetwork,
    name: NodeName,
    alive: Arc<AtomicBool>,
    address: String,
    accepted: tokio::sync::Mutex<mpsc::Receiver<Arc<dyn Link>>>,
}

impl Endpoint for MemoryEndpoint {
    fn local_address(&self) -> String {
        self.address.clone()
    }

    fn dial<'a>(
        &'a self,
        _peer: &'a NodeName,
        address: &'a str,
    ) -> BoxFuture<'a, Result<Arc<dyn Link>, DialError>> {
        Box::pin(async move {
            let unreachable = |detail: &str| DialError::Unreachable {
                address: address.to_owned(),
                detail: detail.to_owned(),
            };
            let find = || {
                let net = self.network.0.net.lock();
                net.listeners.get(address).map(|l| (l.name.clone(), l.incoming.clone()))
            };
            if !self.alive.load(Ordering::Acquire) {
                std::future::pending::<()>().await;
            }
            let (there, _) = find().ok_or_else(|| unreachable("nobody listens"))?;
            // A handshake needs both directions; a partition leaves the dial waiting.
            self.network.0.pass(&self.name, &there).await;
            self.network.0.pass(&there, &self.name).await;
            let (there, incoming) = find().ok_or_else(|| unreachable("nobody listens"))?;
            let (ours, theirs) = MemoryLink::pair(&self.network, &self.name, &there);
            incoming.try_send(Arc::new(theirs)).map_err(|_| unreachable("it accepts no more"))?;
            Ok(Arc::new(ours) as Arc<dyn Link>)
        })
    }

    fn accept(&self) -> BoxFuture<'_, Option<Arc<dyn Link>>> {
        Box::pin(async move { self.accepted.lock().await.recv().await })
    }

    fn close(&self, reason: CloseReason) -> BoxFuture<'_, ()> {
        let mut net = self.network.0.net.lock();
        if self.alive.load(Ordering::Acquire) {
            net.listeners.remove(&self.address);
        }
        let links: Vec<_> = net.links.iter().filter_map(Weak::upgrade).collect();
        drop(net);
        for link in links {
            if let Some(me) = link.names.iter().position(|name| *name == self.name) {
                link.end(me, &reason);
            }
        }
        Box::pin(async {})
    }
}

impl Drop for MemoryEndpoint {
    fn drop(&mut self) {
        let mut net = self.network.0.net.lock();
        let mine = |listener: &Listener| Arc::ptr_eq(&listener.alive, &self.alive);
        if net.listeners.get(&self.address).is_some_and(mine) {
            net.listeners.remove(&self.address);
        }
    }
}

/// What both ends of a link share.
struct LinkState {
    network: MemoryNetwork,
    names: [NodeName; 2],
    /// As each end knows it.
    ended: [Signal<Option<CloseReason>>; 2],
    /// One of the two nodes has crashed: nothing passes any more, not even an end.
    dead: AtomicBool,
}

impl LinkState {
    /// Ends the link, at node number `me` at least.
    fn end(&self, me: usize, reason: &CloseReason) {
        let dead = self.dead.load(Ordering::Acquire);
        for (i, ended) in self.ended.iter().enumerate().filter(|(i, _)| *i == me || !dead) {
            ended.update(|ended| {
                let first = ended.is_none();
                ended.get_or_insert_with(|| match i == me {
                    true => CloseReason::new(reason.code, format!("closed here: {}", reason.text)),
                    false => reason.clone(),
                });
                first
            });
        }
    }

    fn error(&self, me: usize) -> Option<LinkError> {
        self.ended[me].get().map(LinkError::Down)
    }

    async fn until_ended(&self, me: usize) -> CloseReason {
        self.ended[me].until(Clone::clone).await
    }
}

/// One end of a link.
struct MemoryLink {
    state: Arc<LinkState>,
    me: usize,
    out: mpsc::UnboundedSender<MemorySource>,
    lanes: tokio::sync::Mutex<mpsc::UnboundedReceiver<MemorySource>>,
}

impl MemoryLink {
    fn pair(network: &MemoryNetwork, a: &NodeName, b: &NodeName) -> (Self, Self) {
        let state = Arc::new(LinkState {
            network: network.clone(),
            names: [a.clone(), b.clone()],
            ended: [Signal::new(None), Signal::new(None)],
            dead: AtomicBool::new(false),
        });
        let mut net = network.0.net.lock();
        net.links.retain(|link| link.strong_count() > 0);
        net.links.push(Arc::downgrade(&state));
        let (to_b, from_a) = mpsc::unbounded_channel();
        let (to_a, from_b) = mpsc::unbounded_channel();
        let end = |me, out, lanes| Self {
            state: state.clone(),
            me,
            out,
            lanes: tokio::sync::Mutex::new(lanes),
        };
        (end(0, to_b, from_b), end(1, to_a, from_a))
    }

    fn peer(&self) -> &NodeName {
        &self.state.names[1 - self.me]
    }
}

impl Link for MemoryLink {
    fn proven_names(&self) -> Vec<String> {
        vec![self.peer().to_string()]
    }

    fn open(&self, _class: LaneClass) -> BoxFuture<'_, Result<Box<dyn FrameSink>, LinkError>> {
        Box::pin(async move {
            if let Some(error) = self.state.error(self.me) {
                return Err(error);
            }
            let (frames, queue) = mpsc::unbounded_channel();
            let window = Arc::new(Semaphore::new(LANE_WINDOW));
            let source = MemorySource {
                state: self.state.clone(),
                from: 1 - self.me,
                queue,
                window: window.clone(),
            };
            let me = (self.state.names[self.me].clone(), self.peer().clone());
            Ok(Box::new(MemorySink {
                state: self.state.clone(),
                me: self.me,
                path: me,
                frames: Some(frames),
                window,
                announce: Some((self.out.clone(), source)),
                last: None,
            }) as Box<dyn FrameSink>)
        })
    }

    fn accept(&self) -> BoxFuture<'_, Result<Box<dyn FrameSource>, LinkError>> {
        Box::pin(async move {
            let mut lanes = self.lanes.lock().await;
            tokio::select! {
                biased;
                lane = lanes.recv() => match lane {
                    Some(mut source) => {
                        source.from = 1 - self.me;
                        Ok(Box::new(source) as Box<dyn FrameSource>)
                    }
                    None => Err(LinkError::Down(self.state.until_ended(self.me).await)),
                },
                reason = self.state.until_ended(self.me) => Err(LinkError::Down(reason)),
            }
        })
    }

    fn close(&self, reason: CloseReason) {
        self.state.end(self.me, &reason);
    }

    fn closed(&self) -> BoxFuture<'_, CloseReason> {
        Box::pin(self.state.until_ended(self.me))
    }

    fn stats(&self) -> LinkStats {
        LinkStats::default()
    }
}

enum Sent {
    Frame(Instant, Bytes),
    Finished(Instant),
}

struct MemorySink {
    state: Arc<LinkState>,
    me: usize,
    path: (NodeName, NodeName),
    frames: Option<mpsc::UnboundedSender<Sent>>,
    window: Arc<Semaphore>,
    /// The other end, until the first frame makes it known to the peer.
    announce: Option<(mpsc::UnboundedSender<MemorySource>, MemorySource)>,
    /// When the frame before arrives: a lane keeps its order.
    last: Option<Instant>,
}

impl MemorySink {
    fn arrival(&mut self) -> Result<Instant, LinkError> {
        let network = &self.state.network;
        let mut net = network.0.net.lock();
        net.frames += 1;
        let rules = net.pair_rules.get(&self.path).copied().unwrap_or(net.rules);
        if rules.loss > 0.0 && net.rng.unit() < rules.loss {
            net.lost += 1;
            drop(net);
            let reason = CloseReason::new(CloseCode::Lost, "a frame was lost");
            self.state.end(1 - self.me, &reason);
            self.state.end(self.me, &reason);
            return Err(LinkError::Down(reason));
        }
        let jitter = match rules.jitter {
            Duration::ZERO => Duration::ZERO,
            jitter => jitter.mul_f64(net.rng.unit()),
        };
        let at = Instant::now() + rules.delay + jitter;
        let at = self.last.map_or(at, |last| last.max(at));
        self.last = Some(at);
        Ok(at)
    }
}

impl FrameSink for MemorySink {
    fn send(&mut self, frames: Vec<OutFrame>) -> BoxFuture<'_, Result<(), LinkError>> {
        Box::pin(async move {
            if let Some((out, source)) = self.announce.take() {
                let _ = out.send(source);
            }
            for frame in frames {
                if let Some(error) = self.state.error(self.me) {
                    return Err(error);
                }
                let permits = frame.len().clamp(1, LANE_WINDOW) as u32;
                tokio::select! {
                    biased;
                    reason = self.state.until_ended(self.me) => return Err(LinkError::Down(reason)),
                    permit = self.window.clone().acquire_many_owned(permits) => match permit {
                        Ok(permit) => permit.forget(),
                        Err(_) => return Err(LinkError::Stopped),
                    },
                }
                let at = self.arrival()?;
                let mut bytes = BytesMut::with_capacity(frame.len());
                bytes.extend_from_slice(&frame.head);
                bytes.extend_from_slice(&frame.body);
                let queue = self.frames.as_ref().ok_or(LinkError::Reset)?;
                queue.send(Sent::Frame(at, bytes.freeze())).map_err(|_| LinkError::Stopped)?;
            }
            Ok(())
        })
    }

    fn finish(&mut self) {
        let at = self.last.unwrap_or_else(Instant::now);
        if let Some(frames) = self.frames.take() {
            let _ = frames.send(Sent::Finished(at));
        }
    }
}

struct MemorySource {
    state: Arc<LinkState>,
    /// Index of the sending node.
    from: usize,
    queue: mpsc::UnboundedReceiver<Sent>,
    window: Arc<Semaphore>,
}

impl MemorySource {
    async fn next(&mut self) -> Result<Option<Bytes>, LinkError> {
        let sent = self.queue.recv().await;
        let at = match &sent {
            Some(Sent::Frame(at, _) | Sent::Finished(at)) => *at,
            None => return Err(LinkError::Reset),
        };
        tokio::time::sleep_until(at).await;
        let names = &self.state.names;
        self.state.network.0.pass(&names[self.from], &names[1 - self.from]).await;
        if self.state.dead.load(Ordering::Acquire) {
            std::future::pending::<()>().await;
        }
        match sent {
            Some(Sent::Frame(_, bytes)) => {
                self.window.add_permits(bytes.len().clamp(1, LANE_WINDOW));
                Ok(Some(bytes))
            }
            _ => Ok(None),
        }
    }
}

impl FrameSource for MemorySource {
    fn recv(&mut self, limit: usize) -> BoxFuture<'_, Result<Option<Bytes>, LinkError>> {
        Box::pin(async move {
            let (state, from) = (self.state.clone(), self.from);
            let frame = tokio::select! {
                biased;
                reason = state.until_ended(1 - from) => Err(LinkError::Down(reason)),
                frame = self.next() => frame,
            }?;
            match frame {
                Some(bytes) if bytes.len() > limit => {
                    Err(LinkError::TooBig { size: bytes.len(), limit })
                }
                frame => Ok(frame),
            }
        })
    }
}

impl Drop for MemorySource {
    fn drop(&mut self) {
        self.window.close();
    }
}

impl Shared {
    /// Waits until nothing is cut between the two.
    async fn pass(&self, from: &NodeName, to: &NodeName) {
        let path = (from.clone(), to.clone());
        self.cut.until(|cut| (!cut.contains(&path)).then_some(())).await;
    }
}
