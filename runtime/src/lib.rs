//! Node processes and what connects them: configuration, QUIC links, mailboxes, supervision,
//! membership, telemetry.
//!
//! This crate knows nothing of inference: no token, no tensor, no model.

pub mod address;
pub mod certs;
pub mod codec;
pub mod config;
pub mod faults;
mod flow;
mod frame;
mod lane;
mod lease;
mod link;
mod mailbox;
mod membership;
mod mutation;
mod node;
mod options;
mod peer;
mod prng;
pub mod procs;
mod session;
mod signal;
pub mod supervise;
pub mod telemetry;
pub mod transport;
pub mod wall;

pub use address::{Address, BadName, Incarnation, NodeName, Peer};
pub use codec::CodecError;
pub use faults::{Action, Fact, FaultHook, Faults, Site};
pub use flow::{FlowClass, FlowError, FlowFrame, FlowId, FlowReceiver, FlowSender};
pub use frame::{FrameError, PROTOCOL_VERSION, Refusal, RefusalCode};
pub use mailbox::{CallError, CastError, Export, ExportError, Inbound, Protocol, ReplyPort};
pub use mutation::mutated;
#[cfg(feature = "mutations")]
pub use mutation::with_mutation;
pub use node::{Lease, Node, PeerEvent, StartError};
pub use options::{Limits, NodeOptions, Timing};
pub use peer::PeerStatus;
pub use transport::memory::MemoryNetwork;
pub use transport::quic::{QuicOptions, QuicTransport};
pub use transport::{BindError, Transport};
