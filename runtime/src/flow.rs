//! The data plane: long-lived, one-way flows of frames between nodes.
//!
//! A flow is a lane of its own. Its sender opens the lane with the first frame, waits while the
//! receiver does not read, and after a lost link reports `LinkDown` once and opens anew with the
//! next frame. Frames under way when a link breaks are lost; the receiver is told `LinkDown`
//! between what came before and what comes after. Frames of an older life of the sender are
//! refused, and so are damaged ones, which end the link. Payloads are not copied here; the transport makes one copy into the frame.

use crate::address::{Incarnation, NodeName};
use crate::frame::{self, FLOW_HEAD, Frame, Stamp};
use crate::lane::{Draft, LaneError, LaneIn, LaneOut};
use crate::options::{Limits, ms};
use crate::peer::PeerShell;
use crate::signal::Signal;
use crate::transport::{BoxFuture, CloseCode, CloseReason, LaneClass, Late, Link, LinkError};
use bytes::Bytes;
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::future::poll_fn;
use std::pin::pin;
use std::sync::Arc;
use std::task::Poll;
use std::time::{Duration, Instant};
use tokio::runtime::Handle;
use tokio::sync::{OwnedMutexGuard, mpsc};

/// Names a flow between two nodes and one direction; both ends derive it from the same plan.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct FlowId(pub u64);

/// What a flow carries; earlier classes go first on a busy link.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum FlowClass {
    Activations,
    Kv,
    Weights,
}

impl FlowClass {
    fn lane(self) -> LaneClass {
        match self {
            Self::Activations => LaneClass::Activations,
            Self::Kv => LaneClass::Kv,
            Self::Weights => LaneClass::Weights,
        }
    }
}

/// One unit of a flow. The three numbers are the actors' own, for fencing and matching.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FlowFrame {
    pub epoch: u64,
    pub step: u64,
    pub tag: u64,
    pub payload: Bytes,
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum FlowError {
    /// Frames under way may be lost. Using the flow again reopens it.
    #[error("flow {flow:016x} with {peer}: the link is down: {reason}")]
    LinkDown { peer: NodeName, flow: u64, reason: String },
    /// The other end was dropped. It may be opened again.
    #[error("flow {flow:016x} with {peer}: closed by the other end")]
    Closed { peer: NodeName, flow: u64 },
    #[error("flow {flow:016x} with {peer}: nothing within {after_ms} ms")]
    Deadline { peer: NodeName, flow: u64, after_ms: u64 },
    #[error("flow {flow:016x} with {peer}: a payload of {size} bytes is over the limit of {limit}")]
    TooBig { peer: NodeName, flow: u64, size: usize, limit: usize },
}

/// The sending end. One frame at a time; concurrent sends queue up in turn.
pub struct FlowSender {
    peer: Arc<PeerShell>,
    flow: FlowId,
    class: FlowClass,
    stamp: Stamp,
    open_ms: u64,
    handle: Handle,
    path: tokio::sync::Mutex<Path>,
}

enum Path {
    /// Both ends are on this node.
    Local(Arc<Slot>),
    Closed,
    /// On the link `.0`.
    Lane(u64, LaneOut),
    /// A write on it is under way; kept here so that a dropped `send` leaves no half frame.
    Busy(BoxFuture<'static, Written>),
}

type Written = (u64, LaneOut, Result<(), LinkError>);

impl FlowSender {
    pub(crate) fn new(
        peer: Arc<PeerShell>,
        flow: FlowId,
        class: FlowClass,
        stamp: Stamp,
        (local, open_ms): (bool, u64),
        handle: Handle,
    ) -> Self {
        let path = match local {
            true => Path::Local(peer.flows.slot(flow)),
            false => Path::Closed,
        };
        let path = tokio::sync::Mutex::new(path);
        Self { peer, flow, class, stamp, open_ms, handle, path }
    }

    /// Hands a frame over; waits while the peer does not read. A future dropped before it is ready
    /// may have sent its frame or not; if it began, the next send completes it first.
    pub async fn send(&self, frame: FlowFrame) -> Result<(), FlowError> {
        let (size, limit) = (frame.payload.len(), self.peer.limits.flow_frame_bytes);
        if size > limit {
            let (peer, flow) = (self.peer.name.clone(), self.flow.0);
            return Err(FlowError::TooBig { peer, flow, size, limit });
        }
        let mut path = self.path.lock().await;
        if let Path::Local(slot) = &*path {
            let event = Event::Frame(self.stamp.incarnation, frame);
            if slot.tx.send(event).await.is_err() {
                *path = Path::Local(self.peer.flows.slot(self.flow));
                return Err(self.closed());
            }
            return Ok(());
        }
        self.complete(&mut path).await?;
        let (token, mut sink) = match std::mem::replace(&mut *path, Path::Closed) {
            Path::Lane(token, sink) => {
                if self.peer.view.get().map(|view| view.token) != Some(token) {
                    let reason = self.peer.down_reason();
                    return Err(self.link_down(
                        reason.unwrap_or_else(|| "frames of the old link may be lost".into()),
                    ));
                }
                (token, sink)
            }
            _ => self.open().await?,
        };
        let head = frame::flow_head(frame.epoch, frame.step, frame.tag);
        let frames = vec![Draft { head, body: frame.payload }];
        *path = Path::Busy(Box::pin(async move {
            let sent = sink.send(frames).await;
            (token, sink, sent)
        }));
        self.complete(&mut path).await
    }

    /// Ends the write that is under way, if one is.
    async fn complete(&self, path: &mut Path) -> Result<(), FlowError> {
        let Path::Busy(write) = path else { return Ok(()) };
        let (token, sink, sent) = write.await;
        match sent {
            Ok(()) => {
                *path = Path::Lane(token, sink);
                Ok(())
            }
            Err(error) => {
                *path = Path::Closed;
                Err(self.failed(error))
            }
        }
    }

    /// [`Self::send`] for device threads; panics on a tokio worker thread.
    pub fn blocking_send(&self, frame: FlowFrame) -> Result<(), FlowError> {
        self.handle.block_on(self.send(frame))
    }

    async fn open(&self) -> Result<(u64, LaneOut), FlowError> {
        let up = self.peer.view.until(Clone::clone);
        let view = tokio::time::timeout(ms(self.open_ms), up).await.ok();
        let Some(view) = view else {
            let reason = self.peer.down_reason().unwrap_or_else(|| "no link".into());
            return Err(self.link_down(reason));
        };
        let (class, guard) = (self.class.lane(), &self.peer.guard);
        let mut sink = LaneOut::open(&view.link, class, guard, &self.peer.name)
            .await
            .map_err(|error| self.failed(error))?;
        let open = Frame::OpenFlow { flow: self.flow.0, class: self.class as u8 };
        let head = frame::encode(self.stamp, &open);
        sink.send(vec![Draft { head, body: Bytes::new() }])
            .await
            .map_err(|error| self.failed(error))?;
        Ok((view.token, sink))
    }

    fn failed(&self, error: LinkError) -> FlowError {
        match error {
            LinkError::Stopped => self.closed(),
            other => self.link_down(other.to_string()),
        }
    }

    fn closed(&self) -> FlowError {
        FlowError::Closed { peer: self.peer.name.clone(), flow: self.flow.0 }
    }

    fn link_down(&self, reason: String) -> FlowError {
        FlowError::LinkDown { peer: self.peer.name.clone(), flow: self.flow.0, reason }
    }
}

impl Drop for FlowSender {
    fn drop(&mut self) {
        match self.path.get_mut() {
            Path::Lane(_, sink) => sink.finish(),
            Path::Local(slot) => {
                // A full queue tells the receiver nothing; it then waits for its own deadline.
                let _ = slot.tx.try_send(Event::Finished);
                self.peer.flows.forget_unclaimed(self.flow, slot);
            }
            Path::Closed | Path::Busy(_) => {}
        }
    }
}

/// The receiving end.
pub struct FlowReceiver {
    peer: Arc<PeerShell>,
    flow: FlowId,
    slot: Arc<Slot>,
    events: mpsc::Receiver<Event>,
    handle: Handle,
    /// The lane that feeds this receiver, where it reads the lane itself.
    lane: Option<Feed>,
    /// The link over which the flow's lane is expected, once there was one.
    link: Option<u64>,
    /// The last link whose end was reported; later links have higher numbers.
    over: Option<u64>,
}

impl FlowReceiver {
    pub(crate) fn new(peer: Arc<PeerShell>, flow: FlowId, handle: Handle) -> Self {
        let (slot, events) = peer.flows.claim(flow);
        let link = peer.view.with(|view| view.as_ref().map(|view| view.token));
        Self { peer, flow, slot, events, handle, lane: None, link, over: None }
    }

    /// The next frame. Cancel-safe: a dropped future loses no frame.
    ///
    /// A lane tells of its link's end by itself. Where the lane's first frame was lost with the
    /// link there is no lane to tell it, so the link is watched as well.
    pub async fn recv(&mut self) -> Result<FlowFrame, FlowError> {
        loop {
            let event = match &mut self.lane {
                Some(lane) => Ok(lane.next().await),
                None => self.event().await,
            };
            if let Some(result) = self.take(event) {
                return result;
            }
        }
    }

    /// What a lane's task tells, or that the link has gone which was to bring the first lane.
    async fn event(&mut self) -> Result<Event, FlowError> {
        let (peer, flow) = (&self.peer, self.flow.0);
        loop {
            let before = self.link;
            let changed = peer.view.until(|view| {
                let now = view.as_ref().map(|view| view.token);
                (now != before).then_some(now)
            });
            tokio::select! {
                biased;
                event = self.events.recv() => return Ok(event.unwrap_or(Event::Finished)),
                now = changed => {
                    self.link = now;
                    // While a lane feeds the receiver, it tells.
                    if before <= self.over || self.slot.turn.try_lock().is_err() {
                        continue;
                    }
                    self.over = before;
                    let reason = "the link ended before the flow's first frame".to_owned();
                    return Err(FlowError::LinkDown { peer: peer.name.clone(), flow, reason });
                }
            }
        }
    }

    /// The result that an event is, if it is one.
    fn take(&mut self, event: Result<Event, FlowError>) -> Option<Result<FlowFrame, FlowError>> {
        let (peer, flow) = (&self.peer, self.flow.0);
        let event = match event {
            Ok(event) => event,
            Err(error) => return Some(Err(error)),
        };
        match event {
            Event::Lane(lane) => {
                self.link = Some(lane.token);
                self.lane = Some(*lane);
                None
            }
            Event::Frame(incarnation, frame) if incarnation >= peer.incarnation() => {
                Some(Ok(frame))
            }
            Event::Frame(..) => {
                peer.guard.refused(peer.name.as_str(), "stale_flow");
                None
            }
            Event::Broken(link, reason) => {
                self.lane = None;
                if Some(link) <= self.over {
                    return None;
                }
                self.over = Some(link);
                Some(Err(FlowError::LinkDown { peer: peer.name.clone(), flow, reason }))
            }
            Event::Finished => {
                self.lane = None;
                Some(Err(FlowError::Closed { peer: peer.name.clone(), flow }))
            }
        }
    }

    /// What is there already; `None`: nothing yet.
    pub async fn try_recv(&mut self) -> Option<Result<FlowFrame, FlowError>> {
        let mut next = pin!(self.recv());
        poll_fn(|cx| match next.as_mut().poll(cx) {
            Poll::Ready(result) => Poll::Ready(Some(result)),
            Poll::Pending => Poll::Ready(None),
        })
        .await
    }

    /// [`Self::recv`] for device threads, bounded in time; panics on a tokio worker thread.
    pub fn blocking_recv(&mut self, deadline: Duration) -> Result<FlowFrame, FlowError> {
        // As good as never, where it is too far to be counted.
        let far = Duration::from_secs(365 * 86400);
        let until = Instant::now() + deadline.min(far);
        let handle = self.handle.clone();
        loop {
            let event = match &mut self.lane {
                Some(lane) => lane.next_until(until).map(Ok),
                // Looked at first, so that a frame which is there costs no timer.
                None => handle.block_on(async {
                    let left = until.saturating_duration_since(Instant::now());
                    tokio::time::timeout(left, self.event()).await.ok()
                }),
            };
            let Some(event) = event else {
                return Err(FlowError::Deadline {
                    peer: self.peer.name.clone(),
                    flow: self.flow.0,
                    after_ms: deadline.as_millis() as u64,
                });
            };
            if let Some(result) = self.take(event) {
                return result;
            }
        }
    }

    /// [`Self::try_recv`] for device threads; panics on a tokio worker thread.
    pub fn blocking_try_recv(&mut self) -> Option<Result<FlowFrame, FlowError>> {
        match self.blocking_recv(Duration::ZERO) {
            Err(FlowError::Deadline { .. }) => None,
            result => Some(result),
        }
    }
}

impl Drop for FlowReceiver {
    fn drop(&mut self) {
        self.peer.flows.remove(self.flow, &self.slot);
    }
}

enum Event {
    Frame(Incarnation, FlowFrame),
    /// A lane for the receiver to read by itself; it tells the rest.
    Lane(Box<Feed>),
    /// The link of this number ended.
    Broken(u64, String),
    Finished,
}

/// Where the lanes of one flow meet their receiver.
struct Slot {
    tx: mpsc::Sender<Event>,
    rx: Mutex<Option<mpsc::Receiver<Event>>>,
    claimed: Signal<bool>,
    /// Held by the lane that feeds the receiver: a reopened flow waits for the end of the old.
    turn: Arc<tokio::sync::Mutex<()>>,
}

/// A lane that feeds a receiver.
struct Feed {
    peer: Arc<PeerShell>,
    flow: FlowId,
    incarnation: Incarnation,
    source: LaneIn,
    link: Arc<dyn Link>,
    token: u64,
    _turn: OwnedMutexGuard<()>,
}

impl Feed {
    fn limit(&self) -> usize {
        self.peer.limits.flow_frame_bytes.saturating_add(FLOW_HEAD)
    }

    async fn next(&mut self) -> Event {
        let received = self.source.recv(self.limit()).await;
        self.judge(received)
    }

    /// [`Self::next`] for threads; `None` if nothing came in time.
    fn next_until(&mut self, until: Instant) -> Option<Event> {
        match self.source.recv_until(self.limit(), until) {
            Ok(Err(Late)) => None,
            Ok(Ok(received)) => Some(self.judge(Ok(received))),
            Err(error) => Some(self.judge(Err(error))),
        }
    }

    fn judge(&self, received: Result<Option<Bytes>, LaneError>) -> Event {
        let peer = &self.peer;
        peer.heard();
        let read = match received {
            Ok(Some(bytes)) => frame::read_flow(bytes),
            Ok(None) => return Event::Finished,
            Err(LaneError::Frame(error)) => Err(error),
            Err(LaneError::Link(error)) => return Event::Broken(self.token, error.to_string()),
        };
        match read {
            Ok((epoch, step, tag, payload)) => {
                Event::Frame(self.incarnation, FlowFrame { epoch, step, tag, payload })
            }
            Err(error) => {
                peer.guard.refused(peer.name.as_str(), error.kind());
                let text = format!("flow {:016x}: {error}", self.flow.0);
                self.link.close(CloseReason::new(CloseCode::Protocol, text.clone()));
                Event::Broken(self.token, text)
            }
        }
    }
}

/// The flows that come from one peer.
pub(crate) struct Flows {
    limits: Limits,
    slots: Mutex<BTreeMap<FlowId, Arc<Slot>>>,
}

impl Flows {
    pub fn new(limits: Limits) -> Self {
        Self { limits, slots: Mutex::new(BTreeMap::new()) }
    }

    fn fresh(&self) -> Arc<Slot> {
        let (tx, rx) = mpsc::channel(self.limits.flow_frames.max(1));
        Arc::new(Slot {
            tx,
            rx: Mutex::new(Some(rx)),
            claimed: Signal::new(false),
            turn: Arc::default(),
        })
    }

    fn slot(&self, flow: FlowId) -> Arc<Slot> {
        self.slots.lock().entry(flow).or_insert_with(|| self.fresh()).clone()
    }

    /// Takes the receiving end; a second claim takes over from the first.
    fn claim(&self, flow: FlowId) -> (Arc<Slot>, mpsc::Receiver<Event>) {
        let mut slots = self.slots.lock();
        let mut slot = slots.entry(flow).or_insert_with(|| self.fresh()).clone();
        let taken = slot.rx.lock().take();
        let rx = match taken {
            Some(rx) => rx,
            None => {
                slot = self.fresh();
                slots.insert(flow, slot.clone());
                match slot.rx.lock().take() {
                    Some(rx) => rx,
                    None => mpsc::channel(1).1,
                }
            }
        };
        slot.claimed.set(true);
        (slot, rx)
    }

    fn remove(&self, flow: FlowId, slot: &Arc<Slot>) {
        let mut slots = self.slots.lock();
        if slots.get(&flow).is_some_and(|s| Arc::ptr_eq(s, slot)) {
            slots.remove(&flow);
        }
    }

    fn forget_unclaimed(&self, flow: FlowId, slot: &Arc<Slot>) {
        if !slot.claimed.get() {
            self.remove(flow, slot);
        }
    }

    /// Feeds the receiver from a lane until either ends, or gives it the lane if it can read it
    /// itself. Nothing is read before there is a receiver: until then the peer's frames wait on its
    /// side.
    pub async fn pump(
        peer: &Arc<PeerShell>,
        flow: FlowId,
        incarnation: Incarnation,
        mut source: LaneIn,
        (link, token): (Arc<dyn Link>, u64),
    ) {
        let flows = &peer.flows;
        if flows.slots.lock().len() >= flows.limits.flows_per_peer
            && !flows.slots.lock().contains_key(&flow)
        {
            tracing::warn!(peer = %peer.name, flow = flow.0, "too many flows: refused");
            return peer.guard.refused(peer.name.as_str(), "too_many_flows");
        }
        let slot = flows.slot(flow);
        let ready = async {
            slot.claimed.until(|claimed| claimed.then_some(())).await;
            slot.turn.clone().lock_owned().await
        };
        let turn = tokio::select! {
            biased;
            turn = ready => turn,
            _ = link.closed() => return flows.forget_unclaimed(flow, &slot),
        };
        let itself = source.is_blocking();
        let mut feed =
            Feed { peer: peer.clone(), flow, incarnation, source, link, token, _turn: turn };
        if itself {
            let _ = slot.tx.send(Event::Lane(Box::new(feed))).await;
            return;
        }
        loop {
            let event = tokio::select! {
                biased;
                _ = slot.tx.closed() => return,
                event = feed.next() => event,
            };
            let over = !matches!(event, Event::Frame(..));
            let stale = !over && incarnation < peer.incarnation();
            if stale || slot.tx.send(event).await.is_err() || over {
                return;
            }
        }
    }
}
