//! Where injected faults enter, and where what happens is told to whoever injects them.
//!
//! Every place that can fail on purpose asks [`Faults::decide`], every event that a fault plan may
//! wait for or check is told with [`Faults::tell`]. While nothing is armed both are one test of a
//! `None`: no allocation, no lock. What to do about a [`Site`] is decided by a [`FaultHook`], which
//! lives outside this crate; the same hook serves a simulation and a real process.

use crate::address::NodeName;
use crate::transport::LaneClass;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

/// A node's access to its fault hook, if one is armed. Cheap to clone.
#[derive(Clone, Default)]
pub struct Faults(Option<Arc<dyn FaultHook>>);

/// Decides what happens at a site, and hears of everything. Called from actors and device threads:
/// it must be quick and must not block.
pub trait FaultHook: Send + Sync + 'static {
    /// What is to go wrong here, if anything.
    fn decide(&self, site: &Site<'_>) -> Option<Action>;

    fn observe(&self, fact: &Fact);
}

/// A place where a fault may enter.
#[derive(Debug, Clone, Copy)]
pub enum Site<'a> {
    /// The node process begins its start.
    Start { node: &'a NodeName },
    /// An actor has taken a message from its mailbox and is about to handle it.
    Message { node: &'a NodeName, role: &'a str, instance: &'a str, message: &'static str },
    /// A frame is about to leave for `to`, above TLS. `message` is the protocol of a control-plane
    /// frame, `flow` on the data plane.
    FrameOut { node: &'a NodeName, to: &'a NodeName, lane: LaneClass, message: &'a str },
    /// A device is about to load the weights of a stage.
    Load { node: &'a NodeName, device: &'a str, stage: usize, rank: usize },
    /// A device is about to run a step; `requests` are the sequences in it.
    Step {
        node: &'a NodeName,
        replica: &'a str,
        stage: usize,
        rank: usize,
        epoch: u64,
        step: u64,
        requests: &'a [u64],
    },
}

/// What goes wrong. Each variant says at which sites it has a meaning; elsewhere it is ignored.
#[derive(Debug, Clone, PartialEq)]
pub enum Action {
    /// Message, Step: the thread of control panics with this text.
    Panic(String),
    /// Message, Step: nothing happens for so long, then it goes on.
    Hang(Duration),
    /// Message, FrameOut, Step, Load: takes so much longer.
    Delay(Duration),
    /// Start, Load, Step: fails with this text. A sticky failure stays until the process ends.
    Fail { text: String, sticky: bool },
    /// Load, Step: the device has no memory left; this many bytes were asked for.
    OutOfMemory { bytes: u64 },
    /// FrameOut: this byte of the frame (modulo its length) is XORed with `mask`.
    Corrupt { at: u64, mask: u8 },
    /// FrameOut: only so many bytes of it (modulo its length) are sent.
    Truncate { keep: u64 },
    /// FrameOut: it is sent twice.
    Duplicate,
    /// FrameOut: an earlier frame of the same lane is sent again in front of it; with none kept,
    /// nothing happens and the hook is told no proof.
    Stale,
    /// Step: bit `bit` of the KV entry at (`layer`, `position`) of one of the step's sequences is
    /// flipped before the step.
    FlipKv { request: u64, layer: u64, position: u64, bit: u32 },
    /// Load, Step: bit `bit` of weight number `index` (modulo how many there are) is flipped.
    FlipWeight { index: u64, bit: u32 },
    /// Step, last stage: the logits of this request are NaN.
    NotFinite { request: u64 },
    /// Step: two entries of the request's block table are exchanged before the step.
    SwapBlocks { request: u64, a: u64, b: u64 },
    /// Step: the write into this request's newest block is lost, so that it keeps old content.
    StaleBlock { request: u64 },
}

/// Something that happened. `name` is from the catalogue ([`names`] here, the actors' own in
/// `dunlin_actors::facts`); what `subject`, `key` and `value` mean is said beside each name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fact {
    pub node: NodeName,
    pub name: &'static str,
    pub subject: String,
    pub key: u64,
    pub value: u64,
}

/// Facts that the runtime tells.
pub mod names {
    /// A link to `subject` is up; `key` is the peer's incarnation.
    pub const PEER_UP: &str = "peer.up";
    /// The link to `subject` is gone; `key` is the incarnation that was lost.
    pub const PEER_DOWN: &str = "peer.down";
    /// A frame or hello of `subject` was refused; `value` counts the refusals of this node.
    pub const FRAME_REFUSED: &str = "frame.refused";
    /// The actor at `subject` (path in the supervision tree) was restarted; `key` is which time.
    pub const ACTOR_RESTARTED: &str = "actor.restarted";
    /// The supervisor at `subject` gave up: its restart intensity was crossed.
    pub const ESCALATED: &str = "supervisor.escalated";
    /// This node's lease ended.
    pub const LEASE_EXPIRED: &str = "lease.expired";
    /// This node's lease is live (again).
    pub const LEASE_LIVE: &str = "lease.live";
    /// A fault took effect at a site: `subject` is the action's proof text, `key` as the action
    /// says (bytes, bit before, entries exchanged).
    pub const FAULT_DONE: &str = "fault.done";
}

impl Faults {
    pub const fn none() -> Self {
        Self(None)
    }

    pub fn armed(hook: Arc<dyn FaultHook>) -> Self {
        Self(Some(hook))
    }

    pub fn is_armed(&self) -> bool {
        self.0.is_some()
    }

    #[inline]
    pub fn decide(&self, site: Site<'_>) -> Option<Action> {
        self.0.as_ref()?.decide(&site)
    }

    /// `fact` runs only while a hook is armed.
    #[inline]
    pub fn tell(&self, fact: impl FnOnce() -> Fact) {
        if let Some(hook) = &self.0 {
            hook.observe(&fact());
        }
    }
}

impl fmt::Debug for Faults {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.is_armed() { "Faults(armed)" } else { "Faults(none)" })
    }
}
