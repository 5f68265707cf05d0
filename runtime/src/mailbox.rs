//! Mailboxes: what a node exports to its peers, and the typed ends of calls and casts.
//!
//! A handler runs on the task that read the message. It must not block: it hands over to an
//! actor. A panic in it is caught; the caller gets `ActorDown`. Every call is answered exactly
//! once, if not by the actor then by the [`ReplyPort`] it dropped.

use crate::address::{Address, Peer};
use crate::codec::{self, CodecError};
use crate::frame::{Code, Outcome, Target};
use crate::peer::PeerShell;
use bytes::Bytes;
use parking_lot::RwLock;
use serde::{Serialize, de::DeserializeOwned};
use std::collections::BTreeMap;
use std::marker::PhantomData;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;
use tokio::time::Instant;

/// The messages of a kind of actor. Both ends must have the same `VERSION`.
pub trait Protocol: 'static {
    const NAME: &'static str;
    const VERSION: u16;
    type Cast: Serialize + DeserializeOwned + Send + 'static;
    type Call: Serialize + DeserializeOwned + Send + 'static;
    type Reply: Serialize + DeserializeOwned + Send + 'static;
}

/// A message as the handler gets it.
pub enum Inbound<P: Protocol> {
    Cast { from: Peer, msg: P::Cast },
    Call { from: Peer, msg: P::Call, reply: ReplyPort<P::Reply> },
}

/// Where a call's answer goes. Dropped without an answer, it tells the caller `NoReply`, or
/// `ActorDown` if the drop comes from a panic or the mailbox is gone.
pub struct ReplyPort<R> {
    raw: RawPort,
    reply: PhantomData<fn(R)>,
}

impl<R: Serialize> ReplyPort<R> {
    pub fn send(mut self, reply: R) {
        match codec::encode(&reply) {
            Ok(body) => self.raw.answer(Code::Ok, String::new(), body),
            Err(error) => self.raw.answer(Code::Encode, error.to_string(), Bytes::new()),
        }
    }
}

impl<R> ReplyPort<R> {
    /// Time until the caller gives up; an answer after that is lost.
    pub fn time_left(&self) -> Duration {
        self.raw.expires.saturating_duration_since(Instant::now())
    }
}

impl<R> std::fmt::Debug for ReplyPort<R> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "ReplyPort(call {})", self.raw.id)
    }
}

/// Keeps a mailbox registered; dropping it unregisters.
#[must_use = "dropping an Export unregisters its mailbox"]
#[derive(Debug)]
pub struct Export {
    exports: Exports,
    role: String,
    instance: String,
    alive: Arc<AtomicBool>,
}

impl Drop for Export {
    fn drop(&mut self) {
        self.alive.store(false, Ordering::Release);
        let mut all = self.exports.0.write();
        if let Some(instances) = all.get_mut(&self.role) {
            instances.remove(&self.instance);
            if instances.is_empty() {
                all.remove(&self.role);
            }
        }
    }
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ExportError {
    #[error("{role}/{instance} is already exported by this node")]
    Taken { role: String, instance: String },
    #[error("role, instance and protocol name may have 512 bytes each")]
    NameTooLong,
}

/// Why a call has no reply.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CallError {
    #[error("{to}: node {} is down: {reason}", .to.node)]
    NodeDown { to: Address, reason: String },
    #[error("{to}: no such actor, or it ended before it answered")]
    ActorDown { to: Address },
    #[error("{to}: {detail}")]
    Decode { to: Address, detail: String },
    #[error("{to}: no answer within {after_ms} ms")]
    Deadline { to: Address, after_ms: u64 },
    #[error("{to}: overloaded: {detail}")]
    Overloaded { to: Address, detail: String },
    #[error("{to}: the actor dropped the call without an answer")]
    NoReply { to: Address },
    #[error("{to}: other protocol version: {detail}")]
    Version { to: Address, detail: String },
    #[error("{to}: {detail}")]
    TooBig { to: Address, detail: String },
    #[error("{to}: {detail}")]
    Encode { to: Address, detail: String },
}

/// Why a cast was not taken. After `Ok`, it is delivered unless the peer's life ends
/// ([`crate::PeerEvent::Down`]) or its actor does not take it ([`crate::PeerEvent::Undelivered`]).
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CastError {
    #[error("{to}: node {} is down: {reason}", .to.node)]
    NodeDown { to: Address, reason: String },
    #[error("{to}: no such actor")]
    ActorDown { to: Address },
    #[error("{to}: {detail}")]
    Decode { to: Address, detail: String },
    #[error("{to}: overloaded: {detail}")]
    Overloaded { to: Address, detail: String },
    #[error("{to}: other protocol version: {detail}")]
    Version { to: Address, detail: String },
    #[error("{to}: {detail}")]
    TooBig { to: Address, detail: String },
    #[error("{to}: {detail}")]
    Encode { to: Address, detail: String },
}

impl CallError {
    pub(crate) fn from_outcome(to: Address, outcome: Outcome, after: Duration) -> Self {
        let detail = outcome.detail;
        match outcome.code {
            Code::ActorDown => Self::ActorDown { to },
            Code::Ok | Code::Decode => Self::Decode { to, detail },
            Code::NoReply => Self::NoReply { to },
            Code::Deadline => Self::Deadline { to, after_ms: after.as_millis() as u64 },
            Code::Overloaded => Self::Overloaded { to, detail },
            Code::Version => Self::Version { to, detail },
            Code::TooBig => Self::TooBig { to, detail },
            Code::Encode => Self::Encode { to, detail },
        }
    }
}

impl CastError {
    pub(crate) fn from_outcome(to: Address, outcome: Outcome) -> Self {
        let detail = outcome.detail;
        match outcome.code {
            Code::Overloaded => Self::Overloaded { to, detail },
            Code::Version => Self::Version { to, detail },
            Code::TooBig => Self::TooBig { to, detail },
            Code::Encode => Self::Encode { to, detail },
            Code::Ok | Code::Decode => Self::Decode { to, detail },
            Code::ActorDown | Code::NoReply | Code::Deadline => Self::ActorDown { to },
        }
    }
}

/// A node's mailboxes by role and instance.
#[derive(Clone, Default)]
pub(crate) struct Exports(Arc<RwLock<ByRole>>);

type ByRole = BTreeMap<String, BTreeMap<String, Arc<Mailbox>>>;

impl std::fmt::Debug for Exports {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let all = self.0.read();
        f.debug_map().entries(all.iter().map(|(role, i)| (role, i.len()))).finish()
    }
}

struct Mailbox {
    protocol: &'static str,
    version: u16,
    handler: Box<Handler>,
    /// Bytes of calls not answered yet.
    bytes: AtomicUsize,
    alive: Arc<AtomicBool>,
}

type Handler = dyn Fn(Peer, Bytes, Option<RawPort>) -> Result<(), CodecError> + Send + Sync;

/// The untyped end of a call.
pub(crate) struct RawPort {
    call: Option<Arc<Mailbox>>,
    peer: Arc<PeerShell>,
    lane: usize,
    /// The caller's session: an answer to an ended one is dropped.
    session: u64,
    id: u64,
    bytes: usize,
    expires: Instant,
}

impl RawPort {
    fn answer(&mut self, code: Code, detail: String, body: Bytes) {
        let Some(mailbox) = self.call.take() else { return };
        mailbox.bytes.fetch_sub(self.bytes, Ordering::AcqRel);
        self.peer.answer(self.lane, self.session, self.id, Outcome { code, detail }, body);
    }
}

impl Drop for RawPort {
    fn drop(&mut self) {
        let alive = self.call.as_ref().is_some_and(|m| m.alive.load(Ordering::Acquire));
        let gone = !alive || std::thread::panicking();
        let code = if gone { Code::ActorDown } else { Code::NoReply };
        self.answer(code, String::new(), Bytes::new());
    }
}

/// A call or cast that has arrived.
pub(crate) struct Arrival {
    pub from: Peer,
    pub peer: Arc<PeerShell>,
    pub lane: usize,
    pub session: u64,
    pub to: Target,
    pub body: Bytes,
    /// Call id and time left; `None` for a cast.
    pub call: Option<(u64, Duration)>,
}

impl Exports {
    pub fn export<P: Protocol>(
        &self,
        role: &str,
        instance: &str,
        handler: impl Fn(Inbound<P>) + Send + Sync + 'static,
    ) -> Result<Export, ExportError> {
        if ![role, instance, P::NAME].into_iter().all(crate::frame::fits) {
            return Err(ExportError::NameTooLong);
        }
        let alive = Arc::new(AtomicBool::new(true));
        let mailbox = Mailbox {
            protocol: P::NAME,
            version: P::VERSION,
            handler: Box::new(move |from, body, port| {
                match port {
                    None => handler(Inbound::Cast { from, msg: codec::decode(&body)? }),
                    Some(mut raw) => match codec::decode(&body) {
                        Ok(msg) => {
                            let reply = ReplyPort { raw, reply: PhantomData };
                            handler(Inbound::Call { from, msg, reply });
                        }
                        Err(error) => raw.answer(Code::Decode, error.to_string(), Bytes::new()),
                    },
                }
                Ok(())
            }),
            bytes: AtomicUsize::new(0),
            alive: alive.clone(),
        };
        let mut all = self.0.write();
        let instances = all.entry(role.to_owned()).or_default();
        if instances.contains_key(instance) {
            let (role, instance) = (role.to_owned(), instance.to_owned());
            return Err(ExportError::Taken { role, instance });
        }
        instances.insert(instance.to_owned(), Arc::new(mailbox));
        let (role, instance) = (role.to_owned(), instance.to_owned());
        Ok(Export { exports: self.clone(), role, instance, alive })
    }

    /// Runs the handler, or answers why not.
    pub fn deliver(&self, arrival: Arrival, mailbox_bytes: usize) {
        let Arrival { from, peer, lane, session, to, body, call } = arrival;
        let refuse = |code, detail: String| {
            let outcome = Outcome { code, detail };
            match call {
                Some((id, _)) => peer.answer(lane, session, id, outcome, Bytes::new()),
                None => peer.undelivered(lane, session, &to, outcome),
            }
        };
        let found = self.0.read().get(&to.role).and_then(|i| i.get(&to.instance)).cloned();
        let Some(mailbox) = found else { return refuse(Code::ActorDown, String::new()) };
        if (mailbox.protocol, mailbox.version) != (to.protocol.as_str(), to.version) {
            let detail = format!(
                "sender speaks {} {}, receiver {} {}",
                to.protocol, to.version, mailbox.protocol, mailbox.version
            );
            return refuse(Code::Version, detail);
        }
        let port = match call {
            None => None,
            Some((_, left)) if left.is_zero() => return refuse(Code::Deadline, String::new()),
            Some((id, left)) => {
                let bytes = body.len() + crate::options::Limits::MESSAGE_OVERHEAD;
                let held = mailbox.bytes.fetch_add(bytes, Ordering::AcqRel) + bytes;
                metrics::gauge!("dunlin_mailbox_bytes", "role" => to.role.clone()).set(held as f64);
                if held > mailbox_bytes {
                    mailbox.bytes.fetch_sub(bytes, Ordering::AcqRel);
                    let detail =
                        format!("{held} bytes of calls wait, the limit is {mailbox_bytes}");
                    return refuse(Code::Overloaded, detail);
                }
                Some(RawPort {
                    call: Some(mailbox.clone()),
                    peer: peer.clone(),
                    lane,
                    session,
                    id,
                    bytes,
                    expires: Instant::now() + left,
                })
            }
        };
        let done = catch_unwind(AssertUnwindSafe(|| (mailbox.handler)(from, body, port)));
        match done {
            Ok(Ok(())) => {}
            Ok(Err(error)) => refuse(Code::Decode, error.to_string()),
            // A call's port was dropped in the panic and has answered.
            Err(_) if call.is_some() => {}
            Err(_) => refuse(Code::ActorDown, "its handler panicked".into()),
        }
    }
}
