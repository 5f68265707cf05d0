//! One peer as this node sees it: its life, the link to it, and the mail in both directions.
//!
//! All state is behind one short lock; tasks of `link.rs` move bytes. A session outlives its
//! links (see `session.rs`). A call made while the peer is away waits for it; a cast does not.

use crate::address::{Address, Incarnation, NodeName};
use crate::flow::Flows;
use crate::frame::{self, Hello, LANES, Outcome, Stamp, Target};
use crate::mailbox::{CallError, CastError};
use crate::membership::{Admission, Life, Me, Situation};
use crate::options::{Limits, ms};
use crate::prng::fnv;
use crate::session::{Cost, Incoming, Outgoing, Verdict};
use crate::signal::Signal;
use crate::transport::{Link, OutFrame};
use bytes::{Bytes, BytesMut};
use parking_lot::Mutex;
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use tokio::sync::{Notify, oneshot};
use tokio::time::Instant;

pub(crate) struct PeerShell {
    pub name: NodeName,
    pub limits: Limits,
    pub flows: Flows,
    /// The current link, for flows and for those who wait for one.
    pub view: Signal<Option<View>>,
    /// Wakes the task that dials.
    pub wake: Notify,
    lane_ready: [Notify; LANES],
    state: Mutex<State>,
    clock: Instant,
    /// Milliseconds on `clock` when anything was last received on the current link.
    heard_ms: AtomicU64,
    /// Highest incarnation seen.
    incarnation: AtomicU64,
}

#[derive(Clone)]
pub(crate) struct View {
    pub token: u64,
    pub link: Arc<dyn Link>,
}

struct State {
    addresses: Vec<String>,
    life: Option<Life>,
    /// The handshake that may still become the link.
    joining: Option<(u64, bool)>,
    link: Option<Up>,
    out: Outgoing<Item>,
    inc: Incoming,
    /// Calls made while there was no link.
    waiting: VecDeque<(usize, Item)>,
    waiting_bytes: usize,
    pending: BTreeMap<u64, Pending>,
    next: u64,
    /// While the link is lost: until when the session may be resumed.
    resume_until: Option<Instant>,
    since: Instant,
    reason: String,
    last_error: Option<String>,
    rtt: Option<Duration>,
    lost_packets: u64,
    granted_until: Option<Instant>,
    closing: bool,
}

struct Up {
    token: u64,
    dialled: bool,
    /// `None` for the node's own mail, which needs no link.
    link: Option<Arc<dyn Link>>,
}

/// A message on its way out.
#[derive(Debug, Clone)]
pub(crate) struct Item {
    kind: u8,
    id: u64,
    expires: Option<Instant>,
    tail: Bytes,
    body: Bytes,
}

impl Cost for Item {
    fn cost(&self) -> usize {
        self.tail.len() + self.body.len() + Limits::MESSAGE_OVERHEAD
    }
}

type CallOutcome = Result<Bytes, Failure>;

/// What became of a call that has no reply.
pub(crate) enum Failure {
    Down(String),
    Told(Outcome),
}

struct Pending {
    answer: oneshot::Sender<CallOutcome>,
    waiting: bool,
}

/// How a peer stands, for `dunlin status` and metrics.
#[derive(Debug, Clone, PartialEq)]
pub struct PeerStatus {
    pub node: NodeName,
    /// Highest incarnation seen; `None` before the first link.
    pub incarnation: Option<Incarnation>,
    pub up: bool,
    /// In the present state for so long.
    pub since: Duration,
    /// Round trip of heartbeats.
    pub rtt: Option<Duration>,
    /// Time since anything was received; large while the peer is slow or gone.
    pub last_heard: Option<Duration>,
    pub lost_packets: u64,
    /// Bytes of mail that it has not acknowledged.
    pub queued_bytes: usize,
    /// As head: until when the peer may believe that its lease is live.
    pub lease_granted: Option<Duration>,
    /// Why it is down, or the last dial or hello that failed.
    pub last_error: Option<String>,
}

impl PeerShell {
    pub fn new(name: NodeName, addresses: Vec<String>, limits: Limits) -> Arc<Self> {
        let now = Instant::now();
        let state = State {
            addresses,
            life: None,
            joining: None,
            link: None,
            out: Outgoing::new(1),
            inc: Incoming::default(),
            waiting: VecDeque::new(),
            waiting_bytes: 0,
            pending: BTreeMap::new(),
            next: 1,
            resume_until: None,
            since: now,
            reason: "not connected yet".into(),
            last_error: None,
            rtt: None,
            lost_packets: 0,
            granted_until: None,
            closing: false,
        };
        Arc::new(Self {
            name,
            limits,
            flows: Flows::new(limits),
            view: Signal::new(None),
            wake: Notify::new(),
            lane_ready: std::array::from_fn(|_| Notify::new()),
            state: Mutex::new(state),
            clock: now,
            heard_ms: AtomicU64::new(0),
            incarnation: AtomicU64::new(0),
        })
    }

    // ---- mail out --------------------------------------------------------------------------

    /// Queues a call. The receiver yields once; dropping the guard forgets the call.
    pub fn call(
        self: &Arc<Self>,
        to: &Address,
        target: &Target,
        body: Bytes,
        deadline: Duration,
    ) -> Result<(CallGuard, oneshot::Receiver<CallOutcome>), CallError> {
        let lane = lane_of(&target.role, &target.instance);
        let mut state = self.state.lock();
        if state.closing {
            let reason = "this node is shutting down".into();
            return Err(CallError::NodeDown { to: to.clone(), reason });
        }
        let id = state.fresh();
        let item = Item {
            kind: frame::KIND_CALL,
            id,
            expires: Some(Instant::now() + deadline),
            tail: frame::target_tail(target),
            body,
        };
        if let Some(detail) = state.no_room(lane, item.cost(), &self.limits) {
            return Err(CallError::Overloaded { to: to.clone(), detail });
        }
        let (answer, receiver) = oneshot::channel();
        let waiting = state.link.is_none();
        state.pending.insert(id, Pending { answer, waiting });
        if waiting {
            state.waiting_bytes += item.cost();
            state.waiting.push_back((lane, item));
        } else {
            state.out.push(lane, item);
        }
        drop(state);
        let wake = if waiting { &self.wake } else { &self.lane_ready[lane] };
        wake.notify_one();
        Ok((CallGuard { peer: self.clone(), id }, receiver))
    }

    pub fn cast(&self, to: &Address, target: &Target, body: Bytes) -> Result<(), CastError> {
        let lane = lane_of(&target.role, &target.instance);
        let tail = frame::target_tail(target);
        let item = Item { kind: frame::KIND_CAST, id: 0, expires: None, tail, body };
        let mut state = self.state.lock();
        if state.link.is_none() || state.closing {
            let reason = state.reason.clone();
            return Err(CastError::NodeDown { to: to.clone(), reason });
        }
        if let Some(detail) = state.no_room(lane, item.cost(), &self.limits) {
            return Err(CastError::Overloaded { to: to.clone(), detail });
        }
        state.out.push(lane, item);
        drop(state);
        self.lane_ready[lane].notify_one();
        Ok(())
    }

    pub fn answer(&self, lane: usize, session: u64, id: u64, outcome: Outcome, body: Bytes) {
        let ok = outcome.code == frame::Code::Ok;
        let cost = body.len() + Limits::MESSAGE_OVERHEAD;
        let mut state = self.state.lock();
        if state.inc.id != session {
            return;
        }
        let refused = if body.len() > self.limits.message_bytes {
            let limit = self.limits.message_bytes;
            let detail = format!("the reply has {} bytes, the limit is {limit}", body.len());
            Some(Outcome { code: frame::Code::TooBig, detail })
        } else if ok {
            state
                .no_room(lane, cost, &self.limits)
                .map(|detail| Outcome { code: frame::Code::Overloaded, detail })
        } else {
            None
        };
        // The refusal itself is small and always has room: no call may hang.
        let (outcome, body) = match refused {
            Some(outcome) => (outcome, Bytes::new()),
            None => (outcome, body),
        };
        let tail = frame::outcome_tail(&outcome);
        state.out.push(lane, Item { kind: frame::KIND_ANSWER, id, expires: None, tail, body });
        drop(state);
        self.lane_ready[lane].notify_one();
    }

    pub fn undelivered(&self, lane: usize, session: u64, to: &Target, outcome: Outcome) {
        let tail = frame::undelivered_tail(to, &outcome);
        let kind = frame::KIND_UNDELIVERED;
        let item = Item { kind, id: 0, expires: None, tail, body: Bytes::new() };
        let mut state = self.state.lock();
        if state.inc.id != session || state.no_room(lane, item.cost(), &self.limits).is_some() {
            return;
        }
        state.out.push(lane, item);
        drop(state);
        self.lane_ready[lane].notify_one();
    }

    /// The next frames of a lane, as long as `token` is the link.
    pub async fn next_frames(
        &self,
        token: u64,
        lane: usize,
        stamp: Stamp,
    ) -> Option<Vec<OutFrame>> {
        /// Enough for QUIC to fill its packets, small enough to keep a lane's memory low.
        const BATCH_BYTES: usize = 256 << 10;
        loop {
            let ready = self.lane_ready[lane].notified();
            let batch = {
                let mut state = self.state.lock();
                if state.link.as_ref().map(|up| up.token) != Some(token) {
                    return None;
                }
                state.out.next_batch(lane, BATCH_BYTES)
            };
            if batch.is_empty() {
                ready.await;
                continue;
            }
            let mut arena = BytesMut::with_capacity(batch.len() * 128);
            let now = Instant::now();
            let frames = batch.into_iter().map(|(seq, item)| {
                let left = item.expires.map_or(0, |at| {
                    let left = at.saturating_duration_since(now).as_millis();
                    // A fraction of a millisecond is still time.
                    u32::try_from(left).unwrap_or(u32::MAX).max(u32::from(at > now))
                });
                frame::put_mail_head(&mut arena, stamp, item.kind, seq, item.id, left);
                arena.extend_from_slice(&item.tail);
                OutFrame { head: arena.split().freeze(), body: item.body }
            });
            return Some(frames.collect());
        }
    }

    // ---- mail in ---------------------------------------------------------------------------

    /// Judges a message by its number; `None` if its link is no longer the link.
    pub fn received(&self, token: u64, lane: usize, seq: u64) -> Option<(Verdict, u64)> {
        let mut state = self.state.lock();
        if state.link.as_ref().map(|up| up.token) != Some(token) {
            return None;
        }
        Some((state.inc.receive(lane, seq), state.inc.id))
    }

    pub fn acked(&self, token: u64, received: &[u64; LANES]) {
        let mut state = self.state.lock();
        if state.link.as_ref().map(|up| up.token) == Some(token) {
            state.out.ack(received);
        }
    }

    /// The node's own mail needs no acknowledgement from afar.
    pub fn ack_lane(&self, lane: usize, upto: u64) {
        let mut received = [0; LANES];
        received[lane] = upto;
        self.state.lock().out.ack(&received);
    }

    pub fn counts(&self) -> [u64; LANES] {
        self.state.lock().inc.received
    }

    pub fn answered(&self, id: u64, outcome: Outcome, body: Bytes) {
        let pending = self.state.lock().pending.remove(&id);
        if let Some(pending) = pending {
            let ok = outcome.code == frame::Code::Ok;
            let _ = pending.answer.send(if ok { Ok(body) } else { Err(Failure::Told(outcome)) });
        }
    }

    pub fn heard(&self) {
        self.heard_ms.store(self.clock.elapsed().as_millis() as u64, Ordering::Relaxed);
    }

    pub fn silent_ms(&self) -> u64 {
        let now = self.clock.elapsed().as_millis() as u64;
        now.saturating_sub(self.heard_ms.load(Ordering::Relaxed))
    }

    pub fn incarnation(&self) -> Incarnation {
        Incarnation(self.incarnation.load(Ordering::Acquire))
    }

    // ---- joining ---------------------------------------------------------------------------

    /// This node is connected by its own dial: reserves the handshake. `None` if a link came up
    /// meanwhile or another handshake is ahead.
    pub fn greet(&self, me: &Me) -> Option<(u64, Hello)> {
        let mut state = self.state.lock();
        if state.link.is_some() || state.joining.is_some() || state.closing {
            return None;
        }
        let token = state.fresh();
        state.joining = Some((token, true));
        Some((token, state.hello(me, &self.name)))
    }

    /// A handshake failed.
    pub fn abandon(&self, token: u64) {
        let mut state = self.state.lock();
        if state.joining.is_some_and(|(t, _)| t == token) {
            state.joining = None;
        }
    }

    /// A peer's hello came in on a link that it dialled: admits or refuses it. On admission the
    /// old link, if there was one, is over; with whom it was is returned.
    pub fn admit(
        &self,
        me: &Me,
        hello: &Hello,
        resume_ms: u64,
    ) -> Result<(u64, Hello, Option<Incarnation>), frame::Refusal> {
        let heard_ms_ago = self.silent_ms();
        let mut state = self.state.lock();
        let situation = match (&state.link, state.joining) {
            (Some(up), _) => Situation::Linked { dialled_by_me: up.dialled, heard_ms_ago },
            (None, Some((_, true))) => Situation::Greeting,
            _ => Situation::Apart,
        };
        let admission = match crate::membership::admit(me, state.life, situation, hello) {
            Ok(admission) => admission,
            Err(refusal) => {
                if refusal.code != frame::RefusalCode::Busy {
                    state.last_error = Some(refusal.to_string());
                }
                return Err(refusal);
            }
        };
        let token = state.fresh();
        state.joining = Some((token, false));
        let old = state.link.take();
        let replaced = old.as_ref().map(|_| self.incarnation());
        if let Some(up) = old {
            if let Some(link) = up.link {
                link.close(crate::transport::CloseReason::new(
                    crate::transport::CloseCode::Replaced,
                    format!("replaced by a new link with {}", hello.incarnation),
                ));
            }
            state.since = Instant::now();
            state.resume_until = Some(Instant::now() + ms(resume_ms));
            self.wake.notify_one();
            state.reason = "a new link takes its place".into();
            self.view.set(None);
        }
        let failed = self.meet(&mut state, admission, hello);
        let reply = state.hello(me, &self.name);
        drop(state);
        fail_all(failed, &over_reason(admission, hello));
        Ok((token, reply, replaced))
    }

    /// The peer welcomed this node's dial. Returns the session for the closing `Ready`.
    pub fn welcomed(&self, me: &Me, token: u64, hello: &Hello) -> Result<u64, frame::Refusal> {
        let mut state = self.state.lock();
        if state.joining.is_none_or(|(t, _)| t != token) || state.closing {
            let (ours, theirs) = ("another link came first".into(), hello.node.to_string());
            return Err(frame::Refusal { code: frame::RefusalCode::Busy, ours, theirs });
        }
        let admission = crate::membership::admit(me, state.life, Situation::Apart, hello)?;
        let mut failed = self.meet(&mut state, admission, hello);
        failed.extend(state.follow(hello.out_session));
        let session = state.out.id;
        drop(state);
        fail_all(failed, &over_reason(admission, hello));
        Ok(session)
    }

    /// The dialler is ready and sends `session` from now on.
    pub fn ready(&self, session: u64) {
        let failed = self.state.lock().follow(session);
        fail_all(failed, "the peer gave up the session");
    }

    /// Goes on with the old session or starts a new one.
    fn meet(&self, state: &mut State, admission: Admission, hello: &Hello) -> Vec<Pending> {
        let resumed = admission == Admission::SameLife && hello.in_session == state.out.id;
        if admission == Admission::NewLife {
            state.life = Some(Life { incarnation: hello.incarnation, nonce: hello.life });
            state.inc = Incoming::default();
            self.incarnation.store(hello.incarnation.0, Ordering::Release);
        }
        if resumed {
            state.out.ack(&hello.received);
            state.out.rewind();
            return Vec::new();
        }
        state.end_session()
    }

    /// The handshake `token` is complete: this is the link now. False if it came too late.
    pub fn up(&self, token: u64, link: Option<Arc<dyn Link>>, dialled: bool) -> bool {
        let mut state = self.state.lock();
        if link.is_some() && (state.joining.is_none_or(|(t, _)| t != token) || state.closing) {
            return false;
        }
        state.joining = None;
        state.link = Some(Up { token, dialled, link: link.clone() });
        state.since = Instant::now();
        state.resume_until = None;
        state.last_error = None;
        self.heard();
        for (lane, item) in std::mem::take(&mut state.waiting) {
            // Calls that gave up meanwhile are not sent.
            if let Some(pending) = state.pending.get_mut(&item.id) {
                pending.waiting = false;
                state.out.push(lane, item);
            }
        }
        state.waiting_bytes = 0;
        drop(state);
        if let Some(link) = link {
            self.view.set(Some(View { token, link }));
        }
        self.lane_ready.iter().for_each(Notify::notify_one);
        true
    }

    /// The link `token` has ended. `over`: the peer's life is known to be over, or this node's.
    /// False if it was not the link any more.
    pub fn down(&self, token: Option<u64>, reason: &str, over: bool, resume_ms: u64) -> bool {
        let mut state = self.state.lock();
        let current = state.link.as_ref().map(|up| up.token);
        let was_up = current.is_some() && (token.is_none() || token == current);
        if was_up {
            if let Some(link) = state.link.take().and_then(|up| up.link) {
                link.close(crate::transport::CloseReason::new(
                    crate::transport::CloseCode::Lost,
                    reason,
                ));
            }
            state.since = Instant::now();
            state.reason = reason.to_owned();
            state.last_error = Some(reason.to_owned());
            state.resume_until = Some(Instant::now() + ms(resume_ms));
            self.view.set(None);
        }
        let failed = match over && (was_up || token.is_none()) {
            true => state.end_session(),
            false => Vec::new(),
        };
        drop(state);
        fail_all(failed, reason);
        if was_up {
            self.lane_ready.iter().for_each(Notify::notify_one);
            self.wake.notify_one();
        }
        was_up
    }

    /// When the lost session can no longer be resumed.
    pub fn resume_until(&self) -> Option<Instant> {
        self.state.lock().resume_until
    }

    /// The time to resume is over: calls in flight fail.
    pub fn give_up(&self) {
        let mut state = self.state.lock();
        if state.link.is_some() {
            return;
        }
        let failed = state.end_session();
        let reason = state.reason.clone();
        drop(state);
        fail_all(failed, &reason);
    }

    /// No more mail, and every call fails.
    pub fn close(&self, reason: &str) {
        let mut state = self.state.lock();
        state.closing = true;
        state.reason = reason.to_owned();
        let mut failed = state.end_session();
        failed.extend(std::mem::take(&mut state.pending).into_values());
        state.waiting.clear();
        drop(state);
        fail_all(failed, reason);
    }

    // ---- status ----------------------------------------------------------------------------

    pub fn is_up(&self) -> bool {
        self.state.lock().link.is_some()
    }

    pub fn down_reason(&self) -> Option<String> {
        let state = self.state.lock();
        state.link.is_none().then(|| match &state.last_error {
            Some(error) => error.clone(),
            None => state.reason.clone(),
        })
    }

    pub fn addresses(&self) -> Vec<String> {
        self.state.lock().addresses.clone()
    }

    pub fn set_addresses(&self, addresses: Vec<String>) {
        self.state.lock().addresses = addresses;
        self.wake.notify_one();
    }

    pub fn failed(&self, error: String) {
        self.state.lock().last_error = Some(error);
    }

    pub fn measured(&self, rtt: Duration, lost_packets: u64) {
        let mut state = self.state.lock();
        state.rtt = Some(rtt);
        state.lost_packets = lost_packets;
    }

    pub fn granted(&self, lease_ms: u64) {
        self.state.lock().granted_until = Some(Instant::now() + ms(lease_ms));
    }

    pub fn status(&self) -> PeerStatus {
        let silent = Duration::from_millis(self.silent_ms());
        let state = self.state.lock();
        let now = Instant::now();
        PeerStatus {
            node: self.name.clone(),
            incarnation: state.life.map(|life| life.incarnation),
            up: state.link.is_some(),
            since: now.saturating_duration_since(state.since),
            rtt: state.rtt,
            last_heard: state.life.map(|_| silent),
            lost_packets: state.lost_packets,
            queued_bytes: state.out.bytes() + state.waiting_bytes,
            lease_granted: state.granted_until.map(|at| at.saturating_duration_since(now)),
            last_error: state.last_error.clone(),
        }
    }
}

impl State {
    fn fresh(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    fn no_room(&self, lane: usize, cost: usize, limits: &Limits) -> Option<String> {
        let total = self.out.bytes() + self.waiting_bytes + cost;
        if total > limits.peer_queue_bytes {
            let limit = limits.peer_queue_bytes;
            return Some(format!("{total} bytes are queued for the node, the limit is {limit}"));
        }
        let lane = self.out.lane_bytes(lane) + cost;
        let limit = limits.mailbox_bytes;
        (lane > limit).then(|| format!("{lane} bytes are queued for it, the limit is {limit}"))
    }

    fn hello(&self, me: &Me, to: &NodeName) -> Hello {
        Hello {
            cluster: me.cluster.clone(),
            node: me.name.clone(),
            dialled: to.clone(),
            incarnation: me.incarnation,
            life: me.life,
            schema: me.schema,
            out_session: self.out.id,
            in_session: self.inc.id,
            received: self.inc.received,
        }
    }

    /// Ends the outgoing session. Calls that were in it are returned to be failed; calls that
    /// were never sent stay, for whichever life comes next.
    #[must_use]
    fn end_session(&mut self) -> Vec<Pending> {
        let id = self.fresh();
        self.out.end(id);
        self.resume_until = None;
        self.sent_calls()
    }

    /// The peer sends session `id` from now on. If that is a new one, answers of the old one are
    /// lost: the calls that wait for them are returned to be failed.
    #[must_use]
    fn follow(&mut self, id: u64) -> Vec<Pending> {
        let new = self.inc.id != id;
        self.inc.follow(id);
        if new { self.sent_calls() } else { Vec::new() }
    }

    fn sent_calls(&mut self) -> Vec<Pending> {
        let sent: Vec<u64> =
            self.pending.iter().filter(|(_, p)| !p.waiting).map(|(id, _)| *id).collect();
        sent.into_iter().filter_map(|id| self.pending.remove(&id)).collect()
    }
}

/// Why calls fail when two lives meet and do not go on with their session.
fn over_reason(admission: Admission, hello: &Hello) -> String {
    match admission {
        Admission::NewLife => format!("it was started again as {}", hello.incarnation),
        Admission::SameLife => "the link was lost for too long".into(),
    }
}

fn fail_all(calls: Vec<Pending>, reason: &str) {
    for call in calls {
        let _ = call.answer.send(Err(Failure::Down(reason.to_owned())));
    }
}

fn lane_of(role: &str, instance: &str) -> usize {
    (fnv(&[role, instance]) % LANES as u64) as usize
}

/// Forgets its call when dropped.
pub(crate) struct CallGuard {
    peer: Arc<PeerShell>,
    id: u64,
}

impl Drop for CallGuard {
    fn drop(&mut self) {
        let mut state = self.peer.state.lock();
        state.pending.remove(&self.id);
        if let Some(at) = state.waiting.iter().position(|(_, item)| item.id == self.id) {
            if let Some((_, item)) = state.waiting.remove(at) {
                state.waiting_bytes -= item.cost();
            }
        }
    }
}
