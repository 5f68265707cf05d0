//! Frames: what every lane carries, and their bytes.
//!
//! Every frame lies in an envelope: `version u16, checksum u32, number u64`. The version comes
//! first for ever, so that any two versions can tell each other apart; the number counts the
//! frames of the lane, from 0. The checksum is CRC-32 over all but itself and the version. QUIC
//! authenticates what is on the wire, so this one guards what lies between: our own buffers and
//! whatever a fault plan does above TLS. A CRC detects every change within 32 adjacent bits for
//! certain, and others but for one in 2^32.
//!
//! The content of all but flow frames begins with `kind u8, cluster u64, incarnation u64`, and is
//! judged on them before anything behind is looked at; then come the kind's fields. Integers are
//! little endian, strings `u16` length and UTF-8. Decoding is bounded, allocates no more than the
//! frame's own length and never panics. Bodies are slices of the frame: no copy.

use crate::address::{Incarnation, NodeName};
use crate::mutation::mutated;
use bytes::{Buf, BufMut, Bytes, BytesMut};

/// Rises with every change of the wire format; peers of another version are refused.
pub const PROTOCOL_VERSION: u16 = 2;
pub(crate) const MAGIC: [u8; 4] = *b"DNLN";
/// Mail lanes per direction; an address always uses the same one, which keeps its order.
pub(crate) const LANES: usize = 8;
const MAX_STRING: usize = 512;
/// Longest part of a mail frame that is not body.
pub(crate) const MAX_MAIL_HEAD: usize = 64 + 3 * (2 + MAX_STRING) + 2;
/// Longest hello or heartbeat.
pub(crate) const MAX_SMALL_FRAME: usize = 4096;
/// Bytes in front of every frame's content.
pub(crate) const ENVELOPE: usize = 14;
/// Bytes of a flow frame's content that are not payload.
pub(crate) const FLOW_HEAD: usize = 24;

/// What stands at the head of every frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Stamp {
    pub cluster: u64,
    pub incarnation: Incarnation,
}

#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Frame {
    Hello(Hello),
    Welcome(Hello),
    Refuse(Refusal),
    /// The dialler's last word: the link is up, and this is the session it sends.
    Ready {
        out_session: u64,
    },
    /// First on a mail lane.
    OpenMail {
        lane: u8,
    },
    /// First on a flow's lane.
    OpenFlow {
        flow: u64,
        class: u8,
    },
    Ping {
        seq: u64,
        received: [u64; LANES],
    },
    /// Answers a ping; `lease_ms` is 0 where the sender grants no lease.
    Pong {
        seq: u64,
        lease_ms: u32,
        received: [u64; LANES],
    },
    /// Mail that arrived, between heartbeats.
    Ack {
        received: [u64; LANES],
    },
    Mail(Mail),
}

/// Who speaks, to whom, and how far the two have heard each other.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Hello {
    pub cluster: String,
    pub node: NodeName,
    pub dialled: NodeName,
    pub incarnation: Incarnation,
    /// Tells two processes apart that claim the same incarnation.
    pub life: u64,
    pub schema: u32,
    /// The session that this side sends.
    pub out_session: u64,
    /// The peer's session that this side last received, and how many messages of each lane.
    pub in_session: u64,
    pub received: [u64; LANES],
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum RefusalCode {
    ProtocolVersion,
    Cluster,
    Schema,
    /// The peer's certificate does not carry the name it claims, or it is not who was dialled.
    Identity,
    UnknownNode,
    StaleIncarnation,
    /// Both dialled at once; the other link is being set up.
    Busy,
    Malformed,
    /// Another process of that name and incarnation has the link.
    Twin,
}

/// A hello was refused. Both values are named so that either end's log suffices.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{} refused: here {ours}, there {theirs}", what(.code))]
pub struct Refusal {
    pub code: RefusalCode,
    /// At the refusing node.
    pub ours: String,
    /// What the refused node said.
    pub theirs: String,
}

fn what(code: &RefusalCode) -> &'static str {
    match code {
        RefusalCode::ProtocolVersion => "protocol version",
        RefusalCode::Cluster => "cluster",
        RefusalCode::Schema => "key schema version",
        RefusalCode::Identity => "node name",
        RefusalCode::UnknownNode => "unknown node",
        RefusalCode::StaleIncarnation => "incarnation",
        RefusalCode::Busy => "second link",
        RefusalCode::Malformed => "malformed hello",
        RefusalCode::Twin => "incarnation of another process",
    }
}

/// A message of the control plane. `seq` numbers its lane within the session.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Mail {
    pub seq: u64,
    pub content: Content,
}

#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Content {
    Cast {
        to: Target,
        body: Bytes,
    },
    Call {
        id: u64,
        deadline_ms: u32,
        to: Target,
        body: Bytes,
    },
    Answer {
        id: u64,
        outcome: Outcome,
        body: Bytes,
    },
    /// A cast that was not taken.
    Undelivered {
        to: Target,
        outcome: Outcome,
    },
}

/// Role, instance and protocol of a mailbox.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Target {
    pub role: String,
    pub instance: String,
    pub protocol: String,
    pub version: u16,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Outcome {
    pub code: Code,
    pub detail: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Code {
    Ok,
    Decode,
    ActorDown,
    NoReply,
    Deadline,
    Overloaded,
    Version,
    TooBig,
    Encode,
}

/// Why bytes are not a frame of ours. The `kind` labels `dunlin_frames_refused_total`.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum FrameError {
    #[error("a frame's checksum is {found:08x}, its bytes make {wanted:08x}")]
    Checksum { found: u32, wanted: u32 },
    #[error("frame {number} of a lane came before frame {expected}")]
    Gap { number: u64, expected: u64 },
    #[error("a frame ends after {have} bytes in the middle of a field")]
    Short { have: usize },
    #[error("{left} bytes are left after the frame")]
    Trailing { left: usize },
    #[error("protocol version {theirs}, this node speaks {ours}")]
    Version { ours: u16, theirs: u16 },
    #[error("a frame of another cluster (stamp {theirs:016x}, ours {ours:016x})")]
    Cluster { ours: u64, theirs: u64 },
    #[error("a frame of incarnation {theirs}, the link is with {ours}")]
    Incarnation { ours: Incarnation, theirs: Incarnation },
    #[error("not a Dunlin hello")]
    Magic,
    #[error("unknown {what} {value}")]
    Unknown { what: &'static str, value: u64 },
    #[error("a text of {0} bytes is too long or not UTF-8")]
    Text(usize),
    #[error("this frame does not belong on this lane")]
    Unexpected,
}

impl FrameError {
    pub(crate) fn kind(&self) -> &'static str {
        match self {
            Self::Checksum { .. } => "checksum",
            Self::Gap { .. } => "gap",
            Self::Short { .. } => "short",
            Self::Trailing { .. } => "trailing",
            Self::Version { .. } => "version",
            Self::Cluster { .. } => "cluster",
            Self::Incarnation { .. } => "incarnation",
            Self::Magic => "magic",
            Self::Unknown { .. } => "unknown",
            Self::Text(_) => "text",
            Self::Unexpected => "unexpected",
        }
    }
}

/// Writes the envelope, for which `head` has [`ENVELOPE`] bytes in front.
pub(crate) fn seal(head: &mut BytesMut, body: &[u8], number: u64) {
    let mut front = [0; ENVELOPE];
    front[..2].copy_from_slice(&PROTOCOL_VERSION.to_le_bytes());
    front[6..].copy_from_slice(&number.to_le_bytes());
    let (_, content) = head.split_at(ENVELOPE);
    let sum = checksum(&[&front[6..], content, body]);
    front[2..6].copy_from_slice(&sum.to_le_bytes());
    head[..ENVELOPE].copy_from_slice(&front);
}

/// Checks the envelope; returns the frame's number in its lane and its content.
pub(crate) fn open(frame: Bytes) -> Result<(u64, Bytes), FrameError> {
    let mut from = Reader(frame);
    let theirs = from.u16()?;
    if theirs != PROTOCOL_VERSION {
        return Err(FrameError::Version { ours: PROTOCOL_VERSION, theirs });
    }
    let found = from.u32()?;
    let wanted = checksum(&[&from.0]);
    if found != wanted && !mutated("skip-checksum") {
        return Err(FrameError::Checksum { found, wanted });
    }
    Ok((from.u64()?, from.rest()))
}

fn checksum(parts: &[&[u8]]) -> u32 {
    let mut hasher = crc32fast::Hasher::new();
    parts.iter().for_each(|part| hasher.update(part));
    hasher.finalize()
}

/// A head that has room for the envelope and nothing else yet.
fn head(capacity: usize) -> BytesMut {
    let mut to = BytesMut::with_capacity(ENVELOPE + capacity);
    to.put_bytes(0, ENVELOPE);
    to
}

/// What a fault plan calls a frame with this content: the protocol of a cast or call, `answer`,
/// `undelivered`, or what the link itself says (`hello`, `ping`, ...).
pub(crate) fn message_of(content: &[u8]) -> &str {
    match content.first().copied().unwrap_or(0) {
        1..=4 => "hello",
        5 | 6 => "open",
        7 => "ping",
        8 => "pong",
        9 => "ack",
        KIND_ANSWER => "answer",
        KIND_UNDELIVERED => "undelivered",
        KIND_CAST | KIND_CALL => protocol_of(content).unwrap_or("unknown"),
        _ => "unknown",
    }
}

/// The third string of a cast's or call's target.
fn protocol_of(content: &[u8]) -> Option<&str> {
    let mut rest = content.get(MAIL_HEAD..)?;
    let mut text = None;
    for _ in 0..3 {
        let (len, behind) = rest.split_first_chunk::<2>()?;
        let (this, behind) = behind.split_at_checked(usize::from(u16::from_le_bytes(*len)))?;
        (text, rest) = (Some(this), behind);
    }
    std::str::from_utf8(text?).ok()
}

/// Encodes a frame, with room for its envelope in front. Mail that is sent goes through
/// [`put_mail_head`] instead, to spare its body a copy.
pub(crate) fn encode(stamp: Stamp, frame: &Frame) -> BytesMut {
    let mut to = head(192);
    match frame {
        Frame::Hello(hello) => put_hello(&mut to, stamp, 1, hello),
        Frame::Welcome(hello) => put_hello(&mut to, stamp, 2, hello),
        Frame::Refuse(refusal) => {
            put_stamp(&mut to, stamp, 3);
            to.put_u8(refusal.code as u8);
            put_str(&mut to, &refusal.ours);
            put_str(&mut to, &refusal.theirs);
        }
        Frame::Ready { out_session } => {
            put_stamp(&mut to, stamp, 4);
            to.put_u64_le(*out_session);
        }
        Frame::OpenMail { lane } => {
            put_stamp(&mut to, stamp, 5);
            to.put_u8(*lane);
        }
        Frame::OpenFlow { flow, class } => {
            put_stamp(&mut to, stamp, 6);
            to.put_u64_le(*flow);
            to.put_u8(*class);
        }
        Frame::Ping { seq, received } => {
            put_stamp(&mut to, stamp, 7);
            to.put_u64_le(*seq);
            received.iter().for_each(|n| to.put_u64_le(*n));
        }
        Frame::Pong { seq, lease_ms, received } => {
            put_stamp(&mut to, stamp, 8);
            to.put_u64_le(*seq);
            to.put_u32_le(*lease_ms);
            received.iter().for_each(|n| to.put_u64_le(*n));
        }
        Frame::Ack { received } => {
            put_stamp(&mut to, stamp, 9);
            received.iter().for_each(|n| to.put_u64_le(*n));
        }
        Frame::Mail(mail) => {
            let (kind, id, deadline_ms, tail, body) = match &mail.content {
                Content::Cast { to, body } => (KIND_CAST, 0, 0, target_tail(to), body.clone()),
                Content::Call { id, deadline_ms, to, body } => {
                    (KIND_CALL, *id, *deadline_ms, target_tail(to), body.clone())
                }
                Content::Answer { id, outcome, body } => {
                    (KIND_ANSWER, *id, 0, outcome_tail(outcome), body.clone())
                }
                Content::Undelivered { to, outcome } => {
                    (KIND_UNDELIVERED, 0, 0, undelivered_tail(to, outcome), Bytes::new())
                }
            };
            // Only tests encode mail here.
            put_mail(&mut to, stamp, kind, mail.seq, id, deadline_ms);
            to.put_slice(&tail);
            to.put_slice(&body);
        }
    }
    to
}

pub(crate) const KIND_CAST: u8 = 16;
pub(crate) const KIND_CALL: u8 = 17;
pub(crate) const KIND_ANSWER: u8 = 18;
pub(crate) const KIND_UNDELIVERED: u8 = 19;

/// Bytes of a mail frame's content in front of its kind's tail.
const MAIL_HEAD: usize = 37;

/// The front of a mail frame, room for its envelope included; the kind's tail and the body follow.
pub(crate) fn put_mail_head(
    to: &mut BytesMut,
    stamp: Stamp,
    kind: u8,
    seq: u64,
    id: u64,
    deadline_ms: u32,
) {
    to.put_bytes(0, ENVELOPE);
    put_mail(to, stamp, kind, seq, id, deadline_ms);
}

fn put_mail(to: &mut BytesMut, stamp: Stamp, kind: u8, seq: u64, id: u64, deadline_ms: u32) {
    put_stamp(to, stamp, kind);
    to.put_u64_le(seq);
    to.put_u64_le(id);
    to.put_u32_le(deadline_ms);
}

pub(crate) fn target_tail(target: &Target) -> Bytes {
    let mut to = BytesMut::with_capacity(64);
    put_target(&mut to, target);
    to.freeze()
}

pub(crate) fn outcome_tail(outcome: &Outcome) -> Bytes {
    let mut to = BytesMut::with_capacity(3 + outcome.detail.len());
    to.put_u8(outcome.code as u8);
    put_str(&mut to, &outcome.detail);
    to.freeze()
}

pub(crate) fn undelivered_tail(target: &Target, outcome: &Outcome) -> Bytes {
    let mut to = BytesMut::with_capacity(96);
    put_target(&mut to, target);
    to.put_u8(outcome.code as u8);
    put_str(&mut to, &outcome.detail);
    to.freeze()
}

/// Reads a frame's content; the stamp's cluster and incarnation are the caller's to judge.
pub(crate) fn decode(content: Bytes) -> Result<(Stamp, Frame), FrameError> {
    let mut from = Reader(content);
    let kind = from.u8()?;
    let stamp = Stamp { cluster: from.u64()?, incarnation: Incarnation(from.u64()?) };
    let frame = match kind {
        1 => Frame::Hello(from.hello()?),
        2 => Frame::Welcome(from.hello()?),
        3 => Frame::Refuse(Refusal {
            code: from.refusal_code()?,
            ours: from.text()?,
            theirs: from.text()?,
        }),
        4 => Frame::Ready { out_session: from.u64()? },
        5 => match from.u8()? {
            lane if usize::from(lane) < LANES => Frame::OpenMail { lane },
            lane => return Err(FrameError::Unknown { what: "mail lane", value: lane.into() }),
        },
        6 => Frame::OpenFlow { flow: from.u64()?, class: from.u8()? },
        7 => Frame::Ping { seq: from.u64()?, received: from.counts()? },
        8 => Frame::Pong { seq: from.u64()?, lease_ms: from.u32()?, received: from.counts()? },
        9 => Frame::Ack { received: from.counts()? },
        KIND_CAST..=KIND_UNDELIVERED => {
            let (seq, id, deadline_ms) = (from.u64()?, from.u64()?, from.u32()?);
            let content = match kind {
                KIND_CAST => Content::Cast { to: from.target()?, body: from.rest() },
                KIND_CALL => {
                    Content::Call { id, deadline_ms, to: from.target()?, body: from.rest() }
                }
                KIND_ANSWER => Content::Answer { id, outcome: from.outcome()?, body: from.rest() },
                _ => Content::Undelivered { to: from.target()?, outcome: from.outcome()? },
            };
            Frame::Mail(Mail { seq, content })
        }
        other => return Err(FrameError::Unknown { what: "frame kind", value: other.into() }),
    };
    match from.0.len() {
        0 => Ok((stamp, frame)),
        left => Err(FrameError::Trailing { left }),
    }
}

/// The front of a flow frame, room for its envelope included; the payload follows. The flow's lane
/// carried the stamp already.
pub(crate) fn flow_head(epoch: u64, step: u64, tag: u64) -> BytesMut {
    let mut to = head(FLOW_HEAD);
    to.put_u64_le(epoch);
    to.put_u64_le(step);
    to.put_u64_le(tag);
    to
}

/// (epoch, step, tag, payload) of a flow frame's content.
pub(crate) fn read_flow(content: Bytes) -> Result<(u64, u64, u64, Bytes), FrameError> {
    let mut from = Reader(content);
    Ok((from.u64()?, from.u64()?, from.u64()?, from.rest()))
}

fn put_stamp(to: &mut BytesMut, stamp: Stamp, kind: u8) {
    to.put_u8(kind);
    to.put_u64_le(stamp.cluster);
    to.put_u64_le(stamp.incarnation.0);
}

/// Cuts at a character boundary what no peer would accept; callers keep theirs shorter.
fn put_str(to: &mut BytesMut, text: &str) {
    let mut end = text.len().min(MAX_STRING);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    to.put_u16_le(end as u16);
    to.put_slice(&text.as_bytes()[..end]);
}

fn put_target(to: &mut BytesMut, target: &Target) {
    put_str(to, &target.role);
    put_str(to, &target.instance);
    put_str(to, &target.protocol);
    to.put_u16_le(target.version);
}

fn put_hello(to: &mut BytesMut, stamp: Stamp, kind: u8, hello: &Hello) {
    put_stamp(to, stamp, kind);
    to.put_slice(&MAGIC);
    put_str(to, &hello.cluster);
    put_str(to, hello.node.as_str());
    put_str(to, hello.dialled.as_str());
    to.put_u64_le(hello.incarnation.0);
    to.put_u64_le(hello.life);
    to.put_u32_le(hello.schema);
    to.put_u64_le(hello.out_session);
    to.put_u64_le(hello.in_session);
    hello.received.iter().for_each(|n| to.put_u64_le(*n));
}

/// Longest role, instance or protocol name.
pub(crate) fn fits(text: &str) -> bool {
    text.len() <= MAX_STRING
}

struct Reader(Bytes);

impl Reader {
    fn need(&self, bytes: usize) -> Result<(), FrameError> {
        match self.0.len() {
            have if have < bytes => Err(FrameError::Short { have }),
            _ => Ok(()),
        }
    }

    fn u8(&mut self) -> Result<u8, FrameError> {
        self.need(1)?;
        Ok(self.0.get_u8())
    }

    fn u16(&mut self) -> Result<u16, FrameError> {
        self.need(2)?;
        Ok(self.0.get_u16_le())
    }

    fn u32(&mut self) -> Result<u32, FrameError> {
        self.need(4)?;
        Ok(self.0.get_u32_le())
    }

    fn u64(&mut self) -> Result<u64, FrameError> {
        self.need(8)?;
        Ok(self.0.get_u64_le())
    }

    fn text(&mut self) -> Result<String, FrameError> {
        let len = usize::from(self.u16()?);
        if len > MAX_STRING {
            return Err(FrameError::Text(len));
        }
        self.need(len)?;
        let bytes = self.0.split_to(len);
        std::str::from_utf8(&bytes).map(str::to_owned).map_err(|_| FrameError::Text(len))
    }

    fn name(&mut self) -> Result<NodeName, FrameError> {
        let text = self.text()?;
        NodeName::new(&text).map_err(|_| FrameError::Text(text.len()))
    }

    fn counts(&mut self) -> Result<[u64; LANES], FrameError> {
        let mut counts = [0; LANES];
        for count in &mut counts {
            *count = self.u64()?;
        }
        Ok(counts)
    }

    fn hello(&mut self) -> Result<Hello, FrameError> {
        self.need(MAGIC.len())?;
        if self.0.split_to(MAGIC.len())[..] != MAGIC {
            return Err(FrameError::Magic);
        }
        Ok(Hello {
            cluster: self.text()?,
            node: self.name()?,
            dialled: self.name()?,
            incarnation: Incarnation(self.u64()?),
            life: self.u64()?,
            schema: self.u32()?,
            out_session: self.u64()?,
            in_session: self.u64()?,
            received: self.counts()?,
        })
    }

    fn target(&mut self) -> Result<Target, FrameError> {
        Ok(Target {
            role: self.text()?,
            instance: self.text()?,
            protocol: self.text()?,
            version: self.u16()?,
        })
    }

    fn outcome(&mut self) -> Result<Outcome, FrameError> {
        use Code::*;
        let value = self.u8()?;
        let codes = [Ok, Decode, ActorDown, NoReply, Deadline, Overloaded, Version, TooBig, Encode];
        let code = codes.into_iter().find(|c| *c as u8 == value);
        let code = code.ok_or(FrameError::Unknown { what: "outcome", value: value.into() })?;
        Result::Ok(Outcome { code, detail: self.text()? })
    }

    fn refusal_code(&mut self) -> Result<RefusalCode, FrameError> {
        use RefusalCode::*;
        let value = self.u8()?;
        let codes = [
            ProtocolVersion,
            Cluster,
            Schema,
            Identity,
            UnknownNode,
            StaleIncarnation,
            Busy,
            Malformed,
            Twin,
        ];
        let code = codes.into_iter().find(|c| *c as u8 == value);
        code.ok_or(FrameError::Unknown { what: "refusal", value: value.into() })
    }

    fn rest(&mut self) -> Bytes {
        std::mem::take(&mut self.0)
    }
}

#[cfg(test)]
#[path = "frame_tests.rs"]
mod tests;
