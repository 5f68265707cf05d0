//! What a node is told at start: who it is, who its peers are, its limits and its times.

use crate::address::{Incarnation, NodeName};
use crate::faults::Faults;
use std::collections::BTreeMap;
use std::hash::{BuildHasher, Hasher};
use std::time::Duration;

/// Everything [`crate::Node::start`] needs besides a transport.
#[derive(Debug, Clone)]
pub struct NodeOptions {
    pub name: NodeName,
    /// Name of the cluster; nodes of another one are refused.
    pub cluster: String,
    /// Must be higher than that of every earlier life of this name.
    pub incarnation: Incarnation,
    /// `host:port`; port 0 takes a free one.
    pub listen: String,
    /// Where each other node can be dialled; tried in order. Host names are resolved per dial.
    pub peers: BTreeMap<NodeName, Vec<String>>,
    /// Who grants leases. Without one (and on the head itself) the lease is always live.
    pub head: Option<NodeName>,
    /// Version of the keys that messages carry (KV block hashes and such); must be equal.
    pub schema: u32,
    pub limits: Limits,
    pub timing: Timing,
    /// Seeds the dial jitter; two runs with the same seeds dial alike.
    pub seed: u64,
    /// Tells this process from another one with the same name and incarnation.
    pub life: u64,
    /// Armed only by an explicit flag or a simulation.
    pub faults: Faults,
}

impl NodeOptions {
    /// Incarnation 1, no peers, default limits and times, random `seed` and `life`.
    pub fn new(name: NodeName, cluster: impl Into<String>, listen: impl Into<String>) -> Self {
        Self {
            name,
            cluster: cluster.into(),
            incarnation: Incarnation(1),
            listen: listen.into(),
            peers: BTreeMap::new(),
            head: None,
            schema: 1,
            limits: Limits::default(),
            timing: Timing::default(),
            seed: random(),
            life: random(),
            faults: Faults::none(),
        }
    }

    pub fn peer(mut self, name: NodeName, address: impl Into<String>) -> Self {
        self.peers.entry(name).or_default().push(address.into());
        self
    }
}

/// Bounds. Queues are counted in bytes, with [`Limits::MESSAGE_OVERHEAD`] added per message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// One message of the control plane. Checked before sending and on receipt.
    pub message_bytes: usize,
    /// One payload of the data plane. Checked before sending and on receipt.
    pub flow_frame_bytes: usize,
    /// Mail for one peer that is not acknowledged yet; `Overloaded` beyond.
    pub peer_queue_bytes: usize,
    /// The part of it on one lane (an address always uses the same of 8), and at the receiver
    /// the calls of one mailbox that are not answered yet.
    pub mailbox_bytes: usize,
    /// Frames that wait in a flow's receiver.
    pub flow_frames: usize,
    /// Flows that one peer may have open.
    pub flows_per_peer: usize,
    /// Links in the hello phase.
    pub pending_hellos: usize,
}

impl Limits {
    pub const MESSAGE_OVERHEAD: usize = 128;
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            message_bytes: 8 << 20,
            flow_frame_bytes: 64 << 20,
            peer_queue_bytes: 64 << 20,
            mailbox_bytes: 32 << 20,
            flow_frames: 8,
            flows_per_peer: 1024,
            pending_hellos: 64,
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Timing {
    pub heartbeat_ms: u64,
    /// A link on which nothing was heard for so long is dead.
    pub dead_ms: u64,
    /// A lost link may be replaced for so long before calls in flight fail with `NodeDown`.
    pub resume_ms: u64,
    /// A node that has not heard the head for so long must stop serving.
    pub lease_ms: u64,
    /// The whole of connecting and greeting.
    pub dial_ms: u64,
    /// From connected to the end of the hello, on the accepting side.
    pub hello_ms: u64,
    pub backoff_first_ms: u64,
    pub backoff_max_ms: u64,
    /// How long the first send on a flow waits for a link.
    pub flow_open_ms: u64,
}

impl Default for Timing {
    fn default() -> Self {
        Self {
            heartbeat_ms: 200,
            dead_ms: 1000,
            resume_ms: 2000,
            lease_ms: 1500,
            dial_ms: 2000,
            hello_ms: 1000,
            backoff_first_ms: 50,
            backoff_max_ms: 1000,
            flow_open_ms: 3000,
        }
    }
}

pub(crate) fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

/// Randomness from the standard library's hasher keys: enough to tell processes apart.
fn random() -> u64 {
    std::collections::hash_map::RandomState::new().build_hasher().finish()
}
