//! What carries frames between nodes: links made of one-way, ordered lanes.
//!
//! Two implementations: [`quic`] for real networks and [`memory`] for many nodes in one process.
//! A transport moves opaque frames; it knows nothing of hellos, calls or flows, and it neither
//! retries nor reconnects: a link that breaks stays broken.

pub mod memory;
pub mod quic;
mod rules;

use crate::address::NodeName;
use bytes::Bytes;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

pub type BoxFuture<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;

/// Makes a node's endpoint.
pub trait Transport: Send + Sync + 'static {
    /// Listens on `listen` as the node `name`.
    fn bind<'a>(
        &'a self,
        name: &'a NodeName,
        listen: &'a str,
    ) -> BoxFuture<'a, Result<Arc<dyn Endpoint>, BindError>>;
}

/// One node's place on the network.
pub trait Endpoint: Send + Sync + 'static {
    /// Where peers can dial this endpoint (the port is real even if port 0 was asked for).
    fn local_address(&self) -> String;

    /// Connects to `peer`; a host name in `address` is resolved anew at every dial.
    fn dial<'a>(
        &'a self,
        peer: &'a NodeName,
        address: &'a str,
    ) -> BoxFuture<'a, Result<Arc<dyn Link>, DialError>>;

    /// The next link that a peer dialled; `None` once the endpoint is closed.
    fn accept(&self) -> BoxFuture<'_, Option<Arc<dyn Link>>>;

    /// Closes every link, tells the peers, and waits (bounded) until they had a chance to hear it.
    fn close(&self, reason: CloseReason) -> BoxFuture<'_, ()>;
}

/// A live connection to one peer.
pub trait Link: Send + Sync + 'static {
    /// Node names that the peer has proved it may use.
    fn proven_names(&self) -> Vec<String>;

    /// Opens a lane towards the peer. It exists for the peer once a frame was sent on it.
    fn open(&self, class: LaneClass) -> BoxFuture<'_, Result<Box<dyn FrameSink>, LinkError>>;

    /// The next lane that the peer opened.
    fn accept(&self) -> BoxFuture<'_, Result<Box<dyn FrameSource>, LinkError>>;

    /// Ends the link; the peer sees `reason`. Later calls change nothing.
    fn close(&self, reason: CloseReason);

    /// Waits until the link has ended, by whatever cause.
    fn closed(&self) -> BoxFuture<'_, CloseReason>;

    fn stats(&self) -> LinkStats;
}

/// The sending end of a lane. Dropping it without `finish` resets the lane.
pub trait FrameSink: Send {
    /// Hands frames over in order; waits while the peer does not read. If the future is dropped
    /// before it is ready, the lane must not be used again.
    fn send(&mut self, frames: Vec<OutFrame>) -> BoxFuture<'_, Result<(), LinkError>>;

    /// Marks a clean end after the frames sent so far.
    fn finish(&mut self);
}

/// The receiving end of a lane. Dropping it tells the sender to stop.
pub trait FrameSource: Send + Sync {
    /// The next frame; `None` after a clean end. A frame longer than `limit` is an error. A future
    /// that is dropped loses no frame.
    fn recv(&mut self, limit: usize) -> BoxFuture<'_, Result<Option<Bytes>, LinkError>>;

    /// The same source, where a thread can wait for it by itself: the runtime's threads need not be
    /// woken for a frame, only to wake another.
    fn blocking(&mut self) -> Option<&mut dyn BlockingSource> {
        None
    }
}

/// See [`FrameSource::blocking`].
pub trait BlockingSource: Send {
    /// As [`FrameSource::recv`]; `Ok(Err(Late))` if nothing came before `until`.
    fn recv_until(&mut self, limit: usize, until: Instant) -> Result<Timely, LinkError>;
}

/// What came in time: a frame, or the clean end.
pub type Timely = Result<Option<Bytes>, Late>;

/// Nothing came in time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Late;

/// A frame to send: `head` and `body` are adjacent on the wire.
#[derive(Debug, Clone)]
pub struct OutFrame {
    pub head: Bytes,
    pub body: Bytes,
}

impl OutFrame {
    pub fn len(&self) -> usize {
        self.head.len() + self.body.len()
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// What a lane carries; earlier variants go first when a link is short of bandwidth.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum LaneClass {
    Heartbeat,
    Mail,
    Activations,
    Kv,
    Weights,
}

impl LaneClass {
    /// Higher goes first.
    pub fn priority(self) -> i32 {
        match self {
            Self::Heartbeat => 50,
            Self::Mail => 40,
            Self::Activations => 30,
            Self::Kv => 20,
            Self::Weights => 10,
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct LinkStats {
    /// As the transport measures it.
    pub rtt: Option<Duration>,
    pub lost_packets: u64,
}

/// Why a link ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CloseReason {
    pub code: CloseCode,
    pub text: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CloseCode {
    /// The node at one end stops: its session is over.
    Shutdown,
    /// A newer link or life took its place.
    Replaced,
    /// The hello was refused.
    Refused,
    /// The peer broke the protocol.
    Protocol,
    /// Declared dead: silence, a reset, or the local supervisor's word.
    Lost,
}

impl CloseReason {
    pub fn new(code: CloseCode, text: impl Into<String>) -> Self {
        Self { code, text: text.into() }
    }
}

impl std::fmt::Display for CloseReason {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.text)
    }
}

impl CloseCode {
    pub(crate) fn to_wire(self) -> u32 {
        match self {
            Self::Shutdown => 1,
            Self::Replaced => 2,
            Self::Refused => 3,
            Self::Protocol => 4,
            Self::Lost => 5,
        }
    }

    pub(crate) fn from_wire(code: u64) -> Self {
        match code {
            1 => Self::Shutdown,
            2 => Self::Replaced,
            3 => Self::Refused,
            4 => Self::Protocol,
            _ => Self::Lost,
        }
    }
}

/// Why a frame was not sent or received.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum LinkError {
    #[error("the link is down: {0}")]
    Down(CloseReason),
    #[error("the peer stopped reading this lane")]
    Stopped,
    #[error("the peer reset this lane")]
    Reset,
    #[error("the lane ended in the middle of a frame")]
    Truncated,
    #[error("a frame of {size} bytes is over the limit of {limit}")]
    TooBig { size: usize, limit: usize },
}

/// Why an endpoint could not be made.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum BindError {
    #[error("{address} is not an address to listen on: {detail}")]
    Address { address: String, detail: String },
    #[error("{address} is already in use{}; stop that process or choose another port", held_by(.holder))]
    InUse {
        address: String,
        /// `name (pid N)`, where it could be found.
        holder: Option<String>,
    },
    #[error("cannot listen on {address}: {detail}")]
    Socket { address: String, detail: String },
    #[error("the certificate or key of node {node} cannot be used: {detail}")]
    Certificate { node: NodeName, detail: String },
}

fn held_by(holder: &Option<String>) -> String {
    holder.as_ref().map(|h| format!(" by {h}")).unwrap_or_default()
}

/// Why a dial failed. All are worth another try later.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DialError {
    #[error("{address}: cannot resolve: {detail}")]
    Resolve { address: String, detail: String },
    #[error("{address}: no answer: {detail}")]
    Unreachable { address: String, detail: String },
    #[error("{address}: not authenticated: {detail}")]
    Untrusted { address: String, detail: String },
    #[error("this endpoint is closed")]
    Closed,
}
