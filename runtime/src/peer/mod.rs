//! One peer as this node sees it: its life, the link to it, and the mail in both directions.
//!
//! All state is behind one short lock; tasks of `link.rs` move bytes. A session outlives its
//! links (see `session.rs`). A call made while the peer is away waits for it; a cast does not.

mod join;
mod mail;

use crate::address::{Incarnation, NodeName};
use crate::flow::Flows;
use crate::frame::{Hello, LANES, Outcome};
use crate::lane::Guard;
use crate::membership::{Life, Me};
use crate::options::{Limits, ms};
use crate::session::{Cost, Incoming, Outgoing};
use crate::signal::Signal;
use crate::transport::{CloseCode, CloseReason, Link};
use bytes::Bytes;
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
    /// This node's.
    pub guard: Arc<Guard>,
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
    /// Links lost so far, and how long the last one lived.
    losses: (u64, Duration),
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
    pub fn new(
        name: NodeName,
        addresses: Vec<String>,
        limits: Limits,
        guard: &Arc<Guard>,
    ) -> Arc<Self> {
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
            losses: (0, Duration::ZERO),
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
            guard: guard.clone(),
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

    /// Tells the peer that this node's part in their session is over. The link is then [`down`].
    ///
    /// [`down`]: PeerShell::down
    pub fn part(&self, reason: &str) {
        let link = self.state.lock().link.as_ref().and_then(|up| up.link.clone());
        if let Some(link) = link {
            link.close(CloseReason::new(CloseCode::Shutdown, reason));
        }
    }

    pub fn is_up(&self) -> bool {
        self.state.lock().link.is_some()
    }

    /// How many links were lost so far, and how long the last one lived.
    pub fn losses(&self) -> (u64, Duration) {
        self.state.lock().losses
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
    /// The peer's known life has the link, or may come back to its session.
    fn held(&self) -> bool {
        self.link.is_some() || self.resume_until.is_some()
    }

    /// The link is gone.
    fn lost(&mut self) {
        let now = Instant::now();
        self.losses = (self.losses.0 + 1, now.saturating_duration_since(self.since));
        self.since = now;
    }

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

fn fail_all(calls: Vec<Pending>, reason: &str) {
    for call in calls {
        let _ = call.answer.send(Err(Failure::Down(reason.to_owned())));
    }
}
