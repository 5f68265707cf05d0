//! Faults that have no site in a node: its links, at the UDP socket, and its wall clock.

use super::inside;
use crate::fault::{Fault, Kind, Target};
use dunlin_runtime::transport::quic::{QuicTransport, WireCounters, WireFaults};
use dunlin_runtime::{NodeName, wall};
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant, UNIX_EPOCH};

/// What a node process can be reached by.
pub struct Reach {
    node: NodeName,
    wire: WireFaults,
    transport: OnceLock<Arc<QuicTransport>>,
    /// What had happened on each line when a fault began, by its id.
    before: Mutex<BTreeMap<String, Vec<(NodeName, WireCounters)>>>,
}

impl Reach {
    pub fn new(node: NodeName) -> Arc<Reach> {
        let seed = node.as_str().bytes().fold(7, |hash, byte| hash * 31 + u64::from(byte));
        Arc::new(Reach {
            node,
            wire: WireFaults::new(seed),
            transport: OnceLock::new(),
            before: Mutex::default(),
        })
    }

    /// For the transport's options.
    pub fn wire(&self) -> WireFaults {
        self.wire.clone()
    }

    pub fn set_transport(&self, transport: Arc<QuicTransport>) {
        let _ = self.transport.set(transport);
    }

    /// Peers that this node sends to on the fault's links.
    fn peers(&self, fault: &Fault) -> Vec<NodeName> {
        let Target::Links(links) = &fault.target else { return Vec::new() };
        let own = links.iter().filter(|(from, _)| from == self.node.as_str());
        own.filter_map(|(_, to)| NodeName::new(to).ok()).collect()
    }

    fn on_links(&self, fault: &Fault) -> Option<String> {
        let params = &fault.params;
        let us = |us: Option<u64>| Duration::from_micros(us.unwrap_or(0));
        let (mut before, mut proofs) = (Vec::new(), Vec::new());
        for peer in self.peers(fault) {
            before.push((peer.clone(), self.wire.counters(&peer)));
            match fault.kind {
                Kind::LinkPartition => self.wire.cut(&peer),
                Kind::LinkClog => self.wire.clog(&peer),
                Kind::LinkDelay => self.wire.change_rules(&peer, |rules| {
                    rules.delay = us(params.p50_us);
                    rules.delay_p99 = us(params.p99_us);
                }),
                Kind::LinkLoss => {
                    self.wire.change_rules(&peer, |rules| rules.loss = params.p.unwrap_or(0.01));
                }
                Kind::LinkBandwidth => self.wire.change_rules(&peer, |rules| {
                    rules.bits_per_second = params.bits_per_second.unwrap_or(1_000_000);
                }),
                Kind::ConnHalfOpen => {
                    let count = self.transport.get().map_or(0, |t| t.half_open(&peer));
                    if count > 0 {
                        proofs.push(format!("dropped {count} connections with {peer} in silence"));
                    }
                }
                _ => {}
            }
        }
        self.before.lock().insert(fault.id.clone(), before);
        (!proofs.is_empty()).then(|| proofs.join(", "))
    }

    fn off_links(&self, fault: &Fault) -> Option<String> {
        let before = self.before.lock().remove(&fault.id)?;
        let mut proofs = Vec::new();
        for (peer, then) in before {
            let now = self.wire.counters(&peer);
            let (count, what) = match fault.kind {
                Kind::LinkPartition => (now.cut - then.cut, "dropped"),
                Kind::LinkClog => (now.clogged - then.clogged, "held"),
                Kind::LinkDelay => (now.delayed - then.delayed, "delayed"),
                Kind::LinkLoss => (now.lost - then.lost, "lost"),
                // All go through the bucket; how many had to wait shows how narrow it was.
                Kind::LinkBandwidth => (now.datagrams - then.datagrams, "limited"),
                Kind::ConnHalfOpen => (now.half_open - then.half_open, "not delivered"),
                _ => (0, ""),
            };
            match fault.kind {
                Kind::LinkPartition => self.wire.mend(&peer),
                Kind::LinkClog => self.wire.unclog(&peer),
                Kind::LinkDelay => self.wire.change_rules(&peer, |rules| {
                    (rules.delay, rules.delay_p99) = (Duration::ZERO, Duration::ZERO);
                }),
                Kind::LinkLoss => self.wire.change_rules(&peer, |rules| rules.loss = 0.0),
                Kind::LinkBandwidth => {
                    self.wire.change_rules(&peer, |rules| rules.bits_per_second = 0);
                }
                _ => {}
            }
            if count > 0 {
                let all = now.datagrams - then.datagrams;
                let mut text = format!("{what} {count} of {all} datagrams to {peer}");
                if fault.kind == Kind::LinkBandwidth {
                    let (waited, dropped) =
                        (now.throttled - then.throttled, now.overflowed - then.overflowed);
                    let bytes = now.bytes - then.bytes;
                    text.push_str(&format!(
                        " ({bytes} bytes; {waited} waited, {dropped} were dropped)"
                    ));
                }
                proofs.push(text);
            }
        }
        (!proofs.is_empty()).then(|| proofs.join(", "))
    }

    /// Moves the target's connections to another port: each at the end that dialled it, the only one
    /// that QUIC lets move.
    fn rebind(&self, fault: &Fault) -> Option<String> {
        let transport = self.transport.get()?;
        let hit = |node: &NodeName| match &fault.target {
            Target::Node(name) => node.as_str() == name,
            _ => true,
        };
        let own = hit(&self.node);
        let peers = self.wire.peers().into_iter().filter(|peer| own || hit(peer));
        let moved = peers.filter_map(|peer| {
            let port = transport.rebind(&peer).ok().flatten()?;
            Some(format!("sends to {peer} from port {port}"))
        });
        let moved: Vec<String> = moved.collect();
        (!moved.is_empty()).then(|| moved.join(", "))
    }
}

impl inside::Reach for Reach {
    fn begin(&self, fault: &Fault) -> Option<Option<String>> {
        match fault.kind {
            Kind::ClockJump => Some(Some(jump(fault.params.ms.unwrap_or(0)))),
            Kind::LinkRebind => Some(self.rebind(fault)),
            Kind::LinkPartition
            | Kind::LinkDelay
            | Kind::LinkLoss
            | Kind::LinkBandwidth
            | Kind::LinkClog
            | Kind::ConnHalfOpen => Some(self.on_links(fault)),
            _ => None,
        }
    }

    fn end(&self, fault: &Fault) -> Option<String> {
        self.off_links(fault)
    }
}

/// Moves the wall clock and reads both clocks back.
fn jump(ms: i64) -> String {
    let millis = || {
        let since = wall::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        i128::try_from(since.as_millis()).unwrap_or(0)
    };
    let (before, at) = (millis(), Instant::now());
    let off = wall::jump(ms);
    let moved = millis() - before;
    let passed = at.elapsed().as_micros();
    format!("the wall clock moved by {moved} ms in {passed} us, and is {off} ms off")
}
