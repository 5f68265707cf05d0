//! An in-memory network: many nodes in one process, with seeded faults on every directed path.
//!
//! Works on tokio's paused clock. On a current-thread runtime every run with the same seed is the
//! same: each direction draws from a generator of its own, in sending order, and no hash map's
//! order reaches a decision. It behaves as QUIC would: loss is lateness, a lane keeps its order, a
//! partition holds what is under way and a link that outlives it delivers late. All rules and
//! holds can be changed while nodes run, and [`MemoryNetwork::counters`] proves what they did.

mod link;
mod path;

use super::{BindError, BoxFuture, CloseCode, CloseReason, Endpoint, Link, Transport};
use crate::address::NodeName;
use crate::signal::Signal;
use link::LinkState;
use parking_lot::Mutex;
use path::{Broken, Gates, Pair, Path};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use tokio::sync::mpsc;
use tokio::time::Instant;

pub use super::rules::Rules;
pub use path::Counters;

/// Links that wait to be accepted.
const ACCEPT_QUEUE: usize = 64;

/// The network that endpoints share. Cheap to clone. It is itself the [`Transport`] of all nodes.
#[derive(Clone)]
pub struct MemoryNetwork(Arc<Shared>);

struct Shared {
    seed: u64,
    net: Mutex<Net>,
    /// What is held, apart from the rest because receivers wait on it.
    gates: Signal<Gates>,
}

struct Net {
    rules: Rules,
    paths: BTreeMap<Pair, Path>,
    listeners: BTreeMap<String, Listener>,
    links: Vec<Weak<LinkState>>,
    next_port: u32,
    born: Instant,
    trace: u64,
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
            rules: Rules::default(),
            paths: BTreeMap::new(),
            listeners: BTreeMap::new(),
            links: Vec::new(),
            next_port: 1,
            born: Instant::now(),
            trace: seed,
        };
        let gates = Signal::new(Gates::default());
        Self(Arc::new(Shared { seed, net: Mutex::new(net), gates }))
    }

    // ---- rules ------------------------------------------------------------------------------

    /// Sets the rules for every direction that has none of its own.
    pub fn set_rules(&self, rules: Rules) {
        self.0.net.lock().rules = rules;
    }

    /// Sets the rules for what `from` sends to `to` from now on.
    pub fn set_rules_between(&self, from: &NodeName, to: &NodeName, rules: Rules) {
        self.change_rules_between(from, to, |own| *own = rules);
    }

    /// Changes some of the rules for what `from` sends to `to`: several faults can share a path.
    pub fn change_rules_between(
        &self,
        from: &NodeName,
        to: &NodeName,
        change: impl FnOnce(&mut Rules),
    ) {
        let net = &mut *self.0.net.lock();
        let common = net.rules;
        let path = self.0.path(net, &(from.clone(), to.clone()));
        change(path.rules.get_or_insert(common));
    }

    /// The direction goes back to the rules that all share.
    pub fn clear_rules_between(&self, from: &NodeName, to: &NodeName) {
        let net = &mut *self.0.net.lock();
        self.0.path(net, &(from.clone(), to.clone())).rules = None;
    }

    // ---- holds ------------------------------------------------------------------------------

    /// Holds everything that `from` sends to `to` until the cut is mended. One way.
    pub fn cut(&self, from: &NodeName, to: &NodeName) {
        self.0.gates.update(|gates| gates.cut.insert((from.clone(), to.clone())));
    }

    /// Ends a cut. One way.
    pub fn mend(&self, from: &NodeName, to: &NodeName) {
        self.0.gates.update(|gates| gates.cut.remove(&(from.clone(), to.clone())));
    }

    /// Cuts both ways.
    pub fn partition(&self, a: &NodeName, b: &NodeName) {
        self.cut(a, b);
        self.cut(b, a);
    }

    /// Ends the cuts between `a` and `b`, both ways.
    pub fn heal(&self, a: &NodeName, b: &NodeName) {
        self.mend(a, b);
        self.mend(b, a);
    }

    /// Ends every cut.
    pub fn heal_all(&self) {
        self.0.gates.update(|gates| {
            let any = !gates.cut.is_empty();
            gates.cut.clear();
            any
        });
    }

    /// Holds everything that `from` sends to `to`; [`Self::unclog`] delivers it all at once.
    pub fn clog(&self, from: &NodeName, to: &NodeName) {
        self.0.gates.update(|gates| gates.clogged.insert((from.clone(), to.clone())));
    }

    pub fn unclog(&self, from: &NodeName, to: &NodeName) {
        self.0.gates.update(|gates| gates.clogged.remove(&(from.clone(), to.clone())));
    }

    /// The node is stopped, as SIGSTOP does it, as far as the network can see: what it sends and
    /// what is sent to it is held, and delivered at once on [`Self::resume`].
    pub fn pause(&self, node: &NodeName) {
        self.0.gates.update(|gates| gates.paused.insert(node.clone()));
    }

    pub fn resume(&self, node: &NodeName) {
        self.0.gates.update(|gates| gates.paused.remove(node));
    }

    /// Ends all rules and holds. What is broken, half open or crashed stays so.
    pub fn calm(&self) {
        let mut net = self.0.net.lock();
        net.rules = Rules::default();
        net.paths.values_mut().for_each(|path| path.rules = None);
        drop(net);
        self.0.gates.set(Gates::default());
    }

    // ---- what happens once ------------------------------------------------------------------

    /// Breaks every link between `a` and `b`; both ends see a reset.
    pub fn reset(&self, a: &NodeName, b: &NodeName) {
        for link in self.links_of(a, b) {
            let reason = CloseReason::new(CloseCode::Lost, "reset by the network");
            link.end(0, &reason);
            link.end(1, &reason);
        }
    }

    /// `at` loses the state of its links with `peer`, and `peer` is not told: what it sends goes
    /// nowhere until it notices the silence, or `at` dials afresh. Says how many links there were.
    pub fn half_open(&self, at: &NodeName, peer: &NodeName) -> usize {
        let links = self.links_of(at, peer);
        for link in &links {
            link.dead.store(true, Ordering::Release);
            let reason = CloseReason::new(CloseCode::Lost, "the connection's state was lost");
            if let Some(me) = link.names.iter().position(|name| name == at) {
                link.end(me, &reason);
            }
            self.0.count(&(peer.clone(), at.clone()), |counters| counters.half_opened += 1);
        }
        links.len()
    }

    /// `from` goes on under another address, as behind a NAT that forgot it: QUIC migrates, so
    /// nothing is to be seen but the count. Says how many links there were.
    pub fn rebind(&self, from: &NodeName, to: &NodeName) -> usize {
        let links = self.links_of(from, to).len();
        self.0.count(&(from.clone(), to.clone()), |counters| counters.rebound += links as u64);
        links
    }

    /// The node vanishes without a word, like `kill -9` seen over UDP: what it sends and what is
    /// sent to it goes nowhere, for ever. Its name may bind again.
    pub fn crash(&self, node: &NodeName) {
        for link in self.links().into_iter().filter(|link| link.names.contains(node)) {
            link.dead.store(true, Ordering::Release);
        }
        self.0.net.lock().listeners.retain(|_, listener| {
            let other = listener.name != *node;
            listener.alive.fetch_and(other, Ordering::AcqRel);
            other
        });
    }

    // ---- proofs -----------------------------------------------------------------------------

    /// What the direction has seen since the start.
    pub fn counters(&self, from: &NodeName, to: &NodeName) -> Counters {
        let net = self.0.net.lock();
        net.paths.get(&(from.clone(), to.clone())).map_or_else(Counters::default, |p| p.counters)
    }

    /// Hash over all frames so far, in sending order: who to whom, when, and every byte.
    pub fn trace(&self) -> u64 {
        self.0.net.lock().trace
    }

    /// Frames sent, and frames lost or links reset by rules, on all paths.
    pub fn counts(&self) -> (u64, u64) {
        let net = self.0.net.lock();
        let all = net.paths.values().map(|path| path.counters);
        all.fold((0, 0), |(frames, lost), c| (frames + c.frames, lost + c.lost + c.reset))
    }

    fn links(&self) -> Vec<Arc<LinkState>> {
        self.0.net.lock().links.iter().filter_map(Weak::upgrade).collect()
    }

    /// Those that still carry something.
    fn links_of(&self, a: &NodeName, b: &NodeName) -> Vec<Arc<LinkState>> {
        let mut links = self.links();
        links.retain(|link| link.names.contains(a) && link.names.contains(b) && link.is_live());
        links
    }
}

impl Transport for MemoryNetwork {
    fn bind<'a>(
        &'a self,
        name: &'a NodeName,
        listen: &'a str,
    ) -> BoxFuture<'a, Result<Arc<dyn Endpoint>, BindError>> {
        Box::pin(async move { link::bind(self, name, listen) })
    }
}

impl Shared {
    fn path<'a>(&self, net: &'a mut Net, pair: &Pair) -> &'a mut Path {
        net.paths.entry(pair.clone()).or_insert_with(|| Path::new(self.seed, pair))
    }

    fn count(&self, pair: &Pair, count: impl FnOnce(&mut Counters)) {
        count(&mut self.path(&mut self.net.lock(), pair).counters);
    }

    /// When a frame that is sent now arrives, if nothing holds it.
    fn arrival(
        &self,
        pair: &Pair,
        class: super::LaneClass,
        bytes: usize,
    ) -> Result<Instant, Broken> {
        let net = &mut *self.net.lock();
        let common = net.rules;
        let path = self.path(net, pair);
        let rules = path.rules.unwrap_or(common);
        path.arrival(Instant::now(), class, bytes, &rules)
    }

    /// Takes a frame that is sent into the trace.
    fn traced(&self, pair: &Pair, parts: [&[u8]; 2]) {
        let mut net = self.net.lock();
        let mut hash = net.trace ^ net.born.elapsed().as_micros() as u64;
        let mut mix = |word: u64| {
            hash = (hash ^ word).wrapping_mul(0x9e37_79b9_7f4a_7c15);
            hash ^= hash >> 29;
        };
        for bytes in [pair.0.as_str().as_bytes(), pair.1.as_str().as_bytes(), parts[0], parts[1]] {
            mix(bytes.len() as u64);
            for chunk in bytes.chunks(8) {
                let mut word = [0; 8];
                word[..chunk.len()].copy_from_slice(chunk);
                mix(u64::from_le_bytes(word));
            }
        }
        net.trace = hash;
    }

    /// Waits until nothing is held between the two.
    async fn pass(&self, pair: &Pair) {
        let Some(hold) = self.gates.with(|gates| gates.hold(pair)) else { return };
        self.count(pair, |counters| counters.held(hold));
        self.gates.until(|gates| gates.hold(pair).is_none().then_some(())).await;
    }
}
