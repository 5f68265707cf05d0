//! Wire faults of a real process: what happens to the datagrams that it sends to each peer.
//!
//! Only what leaves is touched, so every directed path is in the hands of exactly one process.
//! Both nodes of a pair use their listening sockets for all their connections, so an address tells
//! whose a datagram is; addresses are learnt as links come up and migrate. No root is needed.

use crate::address::NodeName;
use crate::prng::Prng;
use crate::transport::rules::Rules;
use parking_lot::Mutex;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::Notify;
use tokio::time::Instant;

/// What waits for bandwidth for longer is dropped, as a full router queue does.
const ROUTER_QUEUE: Duration = Duration::from_millis(500);
/// Bytes that delays and clogs may hold together; more is dropped.
const HELD_BYTES: usize = 64 << 20;
/// UDP and IP headers.
const OVERHEAD: usize = 48;

/// Handle on the faults of one node's socket; see [`super::QuicOptions::wire`]. Cheap to clone;
/// everything can be changed while the node runs.
#[derive(Clone)]
pub struct WireFaults(pub(super) Arc<Shared>);

/// What happened to the datagrams that went to one peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Serialize, serde::Deserialize)]
pub struct WireCounters {
    /// All that QUIC handed over.
    pub datagrams: u64,
    pub bytes: u64,
    pub delayed: u64,
    pub lost: u64,
    pub corrupted: u64,
    /// Waited for bandwidth.
    pub throttled: u64,
    /// Dropped because too much waited.
    pub overflowed: u64,
    pub cut: u64,
    pub clogged: u64,
    /// Sent from a port other than the one listened on.
    pub rebound: u64,
    /// Of connections whose state was dropped here, in both directions; never delivered.
    pub half_open: u64,
}

pub(super) struct Shared {
    pub state: Mutex<State>,
    /// Something is due earlier than before.
    pub changed: Notify,
}

pub(super) struct State {
    names: BTreeMap<SocketAddr, NodeName>,
    lines: BTreeMap<NodeName, Line>,
    rng: Prng,
    /// By when it is due, then in order.
    queue: BTreeMap<(Instant, u64), Datagram>,
    next: u64,
    held_bytes: usize,
    /// Of connections whose state was dropped.
    forgotten: BTreeSet<ConnectionId>,
}

/// What goes to one peer.
#[derive(Default)]
struct Line {
    rules: Rules,
    cut: bool,
    clogged: bool,
    moved: bool,
    /// In a burst of losses.
    bad: bool,
    /// When the link has sent what was handed over.
    free: Option<Instant>,
    /// When the last one is due: a path keeps its order.
    last: Option<Instant>,
    held: VecDeque<Datagram>,
    counters: WireCounters,
    /// Connection ids that this node last used towards the peer, and the peer towards it.
    ids: [Option<ConnectionId>; 2],
}

/// All of ours have this length.
type ConnectionId = [u8; 8];

/// A datagram that is not sent at once.
#[derive(Debug, Clone)]
pub(super) struct Datagram {
    pub to: SocketAddr,
    pub ecn: Option<quinn::udp::EcnCodepoint>,
    pub src_ip: Option<IpAddr>,
    pub moved: bool,
    pub bytes: Vec<u8>,
}

/// What is to be done with a whole batch.
pub(super) enum Batch {
    /// As it is, from the alternative socket if `moved`.
    Send { moved: bool },
    /// Each of its datagrams on its own; what is not sent now is dropped or kept here.
    Done { now: Vec<Datagram> },
}

impl WireFaults {
    pub fn new(seed: u64) -> Self {
        let state = State {
            names: BTreeMap::new(),
            lines: BTreeMap::new(),
            rng: Prng::new(seed),
            queue: BTreeMap::new(),
            next: 0,
            held_bytes: 0,
            forgotten: BTreeSet::new(),
        };
        Self(Arc::new(Shared { state: Mutex::new(state), changed: Notify::new() }))
    }

    /// The address is the peer's. Links that come up do this by themselves.
    pub fn name(&self, peer: &NodeName, address: SocketAddr) {
        let mut state = self.0.state.lock();
        if state.names.get(&address) != Some(peer) {
            state.names.insert(address, peer.clone());
        }
    }

    /// Rules for what this node sends to `peer` from now on.
    pub fn set_rules(&self, peer: &NodeName, rules: Rules) {
        self.change_rules(peer, |own| *own = rules);
    }

    /// Changes some of the rules: several faults can share a path.
    pub fn change_rules(&self, peer: &NodeName, change: impl FnOnce(&mut Rules)) {
        self.line(peer, |line| change(&mut line.rules));
    }

    /// Drops everything that this node sends to `peer`. For both ways do it at both nodes.
    pub fn cut(&self, peer: &NodeName) {
        self.line(peer, |line| line.cut = true);
    }

    pub fn mend(&self, peer: &NodeName) {
        self.line(peer, |line| line.cut = false);
    }

    /// Holds everything that this node sends to `peer`; [`Self::unclog`] releases it at once.
    pub fn clog(&self, peer: &NodeName) {
        self.line(peer, |line| line.clogged = true);
    }

    pub fn unclog(&self, peer: &NodeName) {
        let state = &mut *self.0.state.lock();
        let Some(line) = state.lines.get_mut(peer) else { return };
        line.clogged = false;
        let now = Instant::now();
        for datagram in line.held.drain(..) {
            state.next += 1;
            state.queue.insert((now, state.next), datagram);
        }
        self.0.changed.notify_one();
    }

    /// Ends all rules, cuts and clogs.
    pub fn calm(&self) {
        let peers: Vec<_> = self.0.state.lock().lines.keys().cloned().collect();
        for peer in peers {
            self.set_rules(&peer, Rules::default());
            self.mend(&peer);
            self.unclog(&peer);
        }
    }

    /// Peers whose addresses are known.
    pub fn peers(&self) -> Vec<NodeName> {
        let names: BTreeSet<NodeName> = self.0.state.lock().names.values().cloned().collect();
        names.into_iter().collect()
    }

    pub fn counters(&self, peer: &NodeName) -> WireCounters {
        self.0.state.lock().lines.get(peer).map_or_else(WireCounters::default, |l| l.counters)
    }

    /// From now on datagrams to the peer leave from another port.
    pub(super) fn moved(&self, peer: &NodeName) {
        self.line(peer, |line| line.moved = true);
    }

    /// Nothing of the connection with the peer passes any more, in either direction.
    pub(super) fn forget(&self, peer: &NodeName) {
        let state = &mut *self.0.state.lock();
        if let Some(line) = state.lines.get_mut(peer) {
            state.forgotten.extend(line.ids.iter_mut().filter_map(Option::take));
        }
    }

    fn line(&self, peer: &NodeName, change: impl FnOnce(&mut Line)) {
        change(self.0.state.lock().lines.entry(peer.clone()).or_default());
    }
}

impl std::fmt::Debug for WireFaults {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("WireFaults")
    }
}

impl State {
    /// Judges what QUIC wants to send.
    pub fn send(&mut self, transmit: &quinn::udp::Transmit<'_>, now: Instant) -> Batch {
        let to = transmit.destination;
        let Some(peer) = self.names.get(&to) else { return Batch::Send { moved: false } };
        let line = self.lines.entry(peer.clone()).or_default();
        let size = transmit.segment_size.unwrap_or(transmit.contents.len()).max(1);
        let plain = line.is_plain() && self.forgotten.is_empty();
        let mut ready = Vec::new();
        for bytes in transmit.contents.chunks(size) {
            line.counters.datagrams += 1;
            line.counters.bytes += bytes.len() as u64;
            line.counters.rebound += u64::from(line.moved);
            let id = connection_id(bytes);
            if id.is_some_and(|id| self.forgotten.contains(&id)) {
                line.counters.half_open += 1;
                continue;
            }
            line.ids[0] = id.or(line.ids[0]);
            if plain {
                continue;
            }
            let (ecn, src_ip, moved) = (transmit.ecn, transmit.src_ip, line.moved);
            let mut datagram = Datagram { to, ecn, src_ip, moved, bytes: bytes.to_vec() };
            let held = self.held_bytes + bytes.len() <= HELD_BYTES;
            match line.judge(&mut datagram.bytes, now, &mut self.rng) {
                Fate::Drop => {}
                Fate::Now => ready.push(datagram),
                Fate::Hold | Fate::At(_) if !held => line.counters.overflowed += 1,
                Fate::Hold => {
                    self.held_bytes += bytes.len();
                    line.held.push_back(datagram);
                }
                Fate::At(due) => {
                    self.held_bytes += bytes.len();
                    self.next += 1;
                    self.queue.insert((due, self.next), datagram);
                }
            }
        }
        match plain {
            true => Batch::Send { moved: line.moved },
            false => Batch::Done { now: ready },
        }
    }

    /// Judges a datagram that came in: false if it may not be seen.
    pub fn receive(&mut self, from: SocketAddr, bytes: &[u8]) -> bool {
        let Some(line) = self.names.get(&from).and_then(|peer| self.lines.get_mut(peer)) else {
            return true;
        };
        let id = connection_id(bytes);
        if id.is_some_and(|id| self.forgotten.contains(&id)) {
            line.counters.half_open += 1;
            return false;
        }
        line.ids[1] = id.or(line.ids[1]);
        true
    }

    pub fn next_due(&self) -> Option<Instant> {
        self.queue.first_key_value().map(|((due, _), _)| *due)
    }

    pub fn take_due(&mut self, now: Instant) -> Option<Datagram> {
        let entry = self.queue.first_entry().filter(|entry| entry.key().0 <= now)?;
        let datagram = entry.remove();
        self.held_bytes = self.held_bytes.saturating_sub(datagram.bytes.len());
        Some(datagram)
    }
}

enum Fate {
    Drop,
    Now,
    Hold,
    At(Instant),
}

impl Line {
    fn is_plain(&self) -> bool {
        let waiting = self.last.is_some_and(|last| last > Instant::now());
        self.rules == Rules::default() && !self.cut && !self.clogged && !waiting
    }

    fn judge(&mut self, bytes: &mut [u8], now: Instant, rng: &mut Prng) -> Fate {
        if self.cut {
            self.counters.cut += 1;
            return Fate::Drop;
        }
        if self.rules.draw_loss(&mut self.bad, rng) {
            self.counters.lost += 1;
            return Fate::Drop;
        }
        if self.rules.corrupt > 0.0 && rng.unit() < self.rules.corrupt && !bytes.is_empty() {
            self.counters.corrupted += 1;
            let at = (rng.next() % bytes.len() as u64) as usize;
            bytes[at] ^= (rng.next() as u8).max(1);
        }
        if self.clogged {
            self.counters.clogged += 1;
            return Fate::Hold;
        }
        let mut due = now;
        let busy = self.rules.transmission(bytes.len() + OVERHEAD);
        if !busy.is_zero() {
            let start = self.free.map_or(now, |free| free.max(now));
            if start - now > ROUTER_QUEUE {
                self.counters.overflowed += 1;
                return Fate::Drop;
            }
            self.counters.throttled += u64::from(start > now);
            due = start + busy;
            self.free = Some(due);
        }
        let delay = self.rules.draw_delay(rng);
        self.counters.delayed += u64::from(!delay.is_zero());
        due = self.last.map_or(due + delay, |last| last.max(due + delay));
        self.last = Some(due);
        if due > now { Fate::At(due) } else { Fate::Now }
    }
}

/// The destination of a packet with a short header (RFC 9000, 17.3); handshakes have none.
fn connection_id(bytes: &[u8]) -> Option<ConnectionId> {
    let (first, rest) = bytes.split_first()?;
    if first & 0x80 != 0 {
        return None;
    }
    rest.first_chunk::<8>().copied()
}
