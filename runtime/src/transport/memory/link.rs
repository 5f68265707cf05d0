//! Endpoints, links and lanes of the in-memory network.

use super::path::{Broken, Pair};
use super::{ACCEPT_QUEUE, Listener, MemoryNetwork};
use crate::address::NodeName;
use crate::signal::Signal;
use crate::transport::{
    BindError, BoxFuture, CloseCode, CloseReason, DialError, Endpoint, FrameSink, FrameSource,
    LaneClass, Link, LinkError, LinkStats, OutFrame,
};
use bytes::{Bytes, BytesMut};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use tokio::sync::{Semaphore, mpsc};
use tokio::time::Instant;

/// Bytes a lane holds before its sender waits.
const LANE_WINDOW: usize = 1 << 20;

pub(super) fn bind(
    network: &MemoryNetwork,
    name: &NodeName,
    listen: &str,
) -> Result<Arc<dyn Endpoint>, BindError> {
    let mut net = network.0.net.lock();
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
        network: network.clone(),
        name: name.clone(),
        alive,
        address,
        accepted: tokio::sync::Mutex::new(accepted),
    }))
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
            travel(&self.network, &(self.name.clone(), there.clone())).await;
            travel(&self.network, &(there, self.name.clone())).await;
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

/// A packet of a handshake. One that no retry brings through never arrives; the dial times out.
async fn travel(network: &MemoryNetwork, pair: &Pair) {
    match network.0.arrival(pair, LaneClass::Heartbeat, 0) {
        Ok(at) if at > Instant::now() => tokio::time::sleep_until(at).await,
        Ok(_) => {}
        Err(Broken) => std::future::pending().await,
    }
    network.0.pass(pair).await;
}

/// What both ends of a link share.
pub(super) struct LinkState {
    pub network: MemoryNetwork,
    pub names: [NodeName; 2],
    /// As each end knows it.
    ended: [Signal<Option<CloseReason>>; 2],
    /// One of the two nodes has crashed or forgot the link: nothing passes any more, not even an
    /// end.
    pub dead: AtomicBool,
}

impl LinkState {
    pub fn is_live(&self) -> bool {
        !self.dead.load(Ordering::Acquire) && self.ended.iter().all(|end| end.get().is_none())
    }

    /// Ends the link, at node number `me` at least.
    pub fn end(&self, me: usize, reason: &CloseReason) {
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

    fn open(&self, class: LaneClass) -> BoxFuture<'_, Result<Box<dyn FrameSink>, LinkError>> {
        Box::pin(async move {
            if let Some(error) = self.state.error(self.me) {
                return Err(error);
            }
            let (frames, queue) = mpsc::unbounded_channel();
            let window = Arc::new(Semaphore::new(LANE_WINDOW));
            let path = Arc::new((self.state.names[self.me].clone(), self.peer().clone()));
            let source = MemorySource {
                state: self.state.clone(),
                to: 1 - self.me,
                path: path.clone(),
                queue,
                window: window.clone(),
            };
            Ok(Box::new(MemorySink {
                state: self.state.clone(),
                me: self.me,
                class,
                path,
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
                    Some(source) => Ok(Box::new(source) as Box<dyn FrameSource>),
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
    class: LaneClass,
    path: Arc<Pair>,
    frames: Option<mpsc::UnboundedSender<Sent>>,
    window: Arc<Semaphore>,
    /// The other end, until the first frame makes it known to the peer.
    announce: Option<(mpsc::UnboundedSender<MemorySource>, MemorySource)>,
    /// When the frame before arrives: a lane keeps its order.
    last: Option<Instant>,
}

impl MemorySink {
    fn arrival(&mut self, bytes: usize) -> Result<Instant, LinkError> {
        match self.state.network.0.arrival(&self.path, self.class, bytes) {
            Ok(at) => {
                let at = self.last.map_or(at, |last| last.max(at));
                self.last = Some(at);
                Ok(at)
            }
            Err(Broken) => {
                let reason = CloseReason::new(CloseCode::Lost, "the path was lost");
                self.state.end(1 - self.me, &reason);
                self.state.end(self.me, &reason);
                Err(LinkError::Down(reason))
            }
        }
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
                let at = self.arrival(frame.len())?;
                if self.state.dead.load(Ordering::Acquire) {
                    let network = &self.state.network.0;
                    network.count(&self.path, |counters| counters.dropped += 1);
                    continue;
                }
                self.state.network.0.traced(&self.path, [&frame.head, &frame.body]);
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
    /// Number of the receiving node.
    to: usize,
    path: Arc<Pair>,
    queue: mpsc::UnboundedReceiver<Sent>,
    window: Arc<Semaphore>,
}

impl MemorySource {
    async fn next(&mut self) -> Result<Option<Bytes>, LinkError> {
        let sent = self.queue.recv().await;
        let at = match &sent {
            Some(Sent::Frame(at, _) | Sent::Finished(at)) => *at,
            // What the other end did as it died is not to be seen here.
            None if self.state.dead.load(Ordering::Acquire) => std::future::pending().await,
            None => return Err(LinkError::Reset),
        };
        tokio::time::sleep_until(at).await;
        let network = &self.state.network.0;
        network.pass(&self.path).await;
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
            let (state, to) = (self.state.clone(), self.to);
            let frame = tokio::select! {
                biased;
                reason = state.until_ended(to) => Err(LinkError::Down(reason)),
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
        if !self.state.dead.load(Ordering::Acquire) {
            self.window.close();
        }
    }
}
