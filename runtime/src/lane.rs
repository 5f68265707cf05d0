//! A lane's two ends above the transport: envelopes, and where frame faults enter.
//!
//! The sending end numbers and seals every frame, the receiving end refuses what is damaged and
//! drops what it has had before, both counted. It is the same for both transports, and above TLS:
//! what a fault plan changes here no cipher repairs. With no hook armed a send costs one test of
//! an `Option` and keeps nothing.

use crate::address::NodeName;
use crate::faults::{Action, Fact, Faults, Site, names};
use crate::frame::{self, ENVELOPE, FrameError};
use crate::mutation::mutated;
use crate::transport::{
    FrameSink, FrameSource, LaneClass, Late, Link, LinkError, OutFrame, Timely,
};
use bytes::{Buf, Bytes, BytesMut};
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

/// Frames kept for `Action::Stale`, and their bytes together, while a hook is armed.
const KEPT_FRAMES: usize = 4;
const KEPT_BYTES: usize = 1 << 20;

/// What the lanes of a node share: who it is, its fault hook, its count of refusals.
#[derive(Debug)]
pub(crate) struct Guard {
    pub node: NodeName,
    pub faults: Faults,
    refused: AtomicU64,
}

impl Guard {
    pub fn new(node: NodeName, faults: Faults) -> Arc<Self> {
        Arc::new(Self { node, faults, refused: AtomicU64::new(0) })
    }

    /// Counts and tells that something of `from` was refused.
    pub fn refused(&self, from: &str, reason: &'static str) {
        metrics::counter!("dunlin_frames_refused_total", "reason" => reason).increment(1);
        let value = self.refused.fetch_add(1, Ordering::Relaxed) + 1;
        self.tell(names::FRAME_REFUSED, from, 0, value);
    }

    pub fn tell(&self, name: &'static str, subject: &str, key: u64, value: u64) {
        self.faults.tell(|| Fact {
            node: self.node.clone(),
            name,
            subject: subject.to_owned(),
            key,
            value,
        });
    }
}

/// A frame that is not sealed yet: `head` begins with room for the envelope.
#[derive(Debug)]
pub(crate) struct Draft {
    pub head: BytesMut,
    pub body: Bytes,
}

impl Draft {
    fn seal(mut self, number: u64) -> OutFrame {
        frame::seal(&mut self.head, &self.body, number);
        OutFrame { head: self.head.freeze(), body: self.body }
    }

    /// What a receiver would find in the envelope.
    pub fn into_content(mut self) -> Bytes {
        self.head.advance(ENVELOPE.min(self.head.len()));
        self.head.extend_from_slice(&self.body);
        self.head.freeze()
    }
}

/// The sending end.
pub(crate) struct LaneOut {
    sink: Box<dyn FrameSink>,
    next: u64,
    gate: Option<Box<Gate>>,
}

impl LaneOut {
    pub async fn open(
        link: &Arc<dyn Link>,
        class: LaneClass,
        guard: &Arc<Guard>,
        to: &NodeName,
    ) -> Result<Self, LinkError> {
        let sink = link.open(class).await?;
        let gate = guard.faults.is_armed().then(|| {
            let (link, guard, to) = (link.clone(), guard.clone(), to.clone());
            Box::new(Gate { link, guard, to, class, kept: VecDeque::new() })
        });
        Ok(Self { sink, next: 0, gate })
    }

    /// As [`FrameSink::send`].
    pub async fn send(&mut self, drafts: Vec<Draft>) -> Result<(), LinkError> {
        let first = self.next;
        self.next += drafts.len() as u64;
        let frames = drafts.into_iter().zip(first..).map(|(draft, number)| draft.seal(number));
        match &mut self.gate {
            None => self.sink.send(frames.collect()).await,
            Some(gate) => gate.send(&mut self.sink, frames.collect()).await,
        }
    }

    pub fn finish(&mut self) {
        self.sink.finish();
    }
}

/// Asks the hook about every frame, and does what it says.
struct Gate {
    link: Arc<dyn Link>,
    guard: Arc<Guard>,
    to: NodeName,
    class: LaneClass,
    kept: VecDeque<OutFrame>,
}

impl Gate {
    async fn send(
        &mut self,
        sink: &mut Box<dyn FrameSink>,
        frames: Vec<OutFrame>,
    ) -> Result<(), LinkError> {
        let mut out = Vec::with_capacity(frames.len());
        let mut done = Vec::new();
        for frame in frames {
            let action = self.decide(&frame);
            let message = || self.message(&frame).to_owned();
            match action {
                Some(Action::Delay(wait)) => {
                    sink.send(std::mem::take(&mut out)).await?;
                    let text = format!("{} to {} held", message(), self.to);
                    // Told at once: what waits for the frame may give up meanwhile.
                    self.guard.tell(names::FAULT_DONE, &text, wait.as_micros() as u64, 0);
                    tokio::select! {
                        biased;
                        reason = self.link.closed() => return Err(LinkError::Down(reason)),
                        _ = tokio::time::sleep(wait) => {}
                    }
                    out.push(frame.clone());
                }
                Some(Action::Corrupt { at, mask }) => {
                    let at = (at % frame.len().max(1) as u64) as usize;
                    done.push((format!("{} to {} changed", message(), self.to), at as u64));
                    out.push(changed(&frame, |bytes| {
                        if let Some(byte) = bytes.get_mut(at) {
                            *byte ^= mask;
                        }
                    }));
                }
                Some(Action::Truncate { keep }) => {
                    let keep = (keep % frame.len().max(1) as u64) as usize;
                    done.push((format!("{} to {} cut", message(), self.to), keep as u64));
                    out.push(changed(&frame, |bytes| bytes.truncate(keep)));
                }
                Some(Action::Duplicate) => {
                    done.push((format!("{} to {} doubled", message(), self.to), 2));
                    out.extend([frame.clone(), frame.clone()]);
                }
                Some(Action::Stale) => {
                    if let Some(old) = self.kept.front() {
                        let old_message = self.message(old);
                        done.push((format!("old {old_message} to {}", self.to), number(old)));
                        out.push(old.clone());
                    }
                    out.push(frame.clone());
                }
                _ => out.push(frame.clone()),
            }
            self.keep(frame);
        }
        sink.send(out).await?;
        for (text, key) in done {
            self.guard.tell(names::FAULT_DONE, &text, key, 0);
        }
        Ok(())
    }

    fn decide(&self, frame: &OutFrame) -> Option<Action> {
        self.guard.faults.decide(Site::FrameOut {
            node: &self.guard.node,
            to: &self.to,
            lane: self.class,
            message: self.message(frame),
        })
    }

    fn message<'a>(&self, frame: &'a OutFrame) -> &'a str {
        match self.class {
            LaneClass::Heartbeat | LaneClass::Mail => {
                frame::message_of(frame.head.get(ENVELOPE..).unwrap_or_default())
            }
            LaneClass::Activations | LaneClass::Kv | LaneClass::Weights => "flow",
        }
    }

    fn keep(&mut self, frame: OutFrame) {
        let bytes = |kept: &VecDeque<OutFrame>| kept.iter().map(OutFrame::len).sum::<usize>();
        self.kept.push_back(frame);
        while self.kept.len() > KEPT_FRAMES || bytes(&self.kept) > KEPT_BYTES {
            self.kept.pop_front();
        }
    }
}

/// The number that a sealed frame carries.
fn number(frame: &OutFrame) -> u64 {
    let bytes = frame.head.get(6..ENVELOPE).and_then(|bytes| bytes.try_into().ok());
    bytes.map_or(0, u64::from_le_bytes)
}

fn changed(frame: &OutFrame, change: impl FnOnce(&mut Vec<u8>)) -> OutFrame {
    let mut bytes = [&frame.head[..], &frame.body[..]].concat();
    change(&mut bytes);
    OutFrame { head: Bytes::from(bytes), body: Bytes::new() }
}

/// The receiving end.
pub(crate) struct LaneIn {
    source: Box<dyn FrameSource>,
    next: u64,
    guard: Arc<Guard>,
    from: String,
}

/// Why a lane gave no frame.
#[derive(Debug)]
pub(crate) enum LaneError {
    Link(LinkError),
    /// What came is not what was sent; nothing behind it may be used.
    Frame(FrameError),
}

impl LaneIn {
    pub fn new(source: Box<dyn FrameSource>, guard: &Arc<Guard>, from: &str) -> Self {
        Self { source, next: 0, guard: guard.clone(), from: from.to_owned() }
    }

    /// The content of the next frame, of `limit` bytes at most; `None` after a clean end. Frames
    /// that came before are dropped.
    pub async fn recv(&mut self, limit: usize) -> Result<Option<Bytes>, LaneError> {
        loop {
            let received = self.source.recv(limit.saturating_add(ENVELOPE)).await;
            let Some(frame) = received.map_err(LaneError::Link)? else { return Ok(None) };
            if let Some(content) = self.judge(frame)? {
                return Ok(Some(content));
            }
        }
    }

    /// Whether [`Self::recv_until`] can be used.
    pub fn is_blocking(&mut self) -> bool {
        self.source.blocking().is_some()
    }

    /// [`Self::recv`] for threads that may block, where [`Self::is_blocking`].
    pub fn recv_until(&mut self, limit: usize, until: Instant) -> Result<Timely, LaneError> {
        loop {
            let Some(source) = self.source.blocking() else { return Ok(Err(Late)) };
            let received = source.recv_until(limit.saturating_add(ENVELOPE), until);
            let frame = match received.map_err(LaneError::Link)? {
                Ok(Some(frame)) => frame,
                Ok(None) => return Ok(Ok(None)),
                Err(Late) => return Ok(Err(Late)),
            };
            if let Some(content) = self.judge(frame)? {
                return Ok(Ok(Some(content)));
            }
        }
    }

    /// The content of a frame; `None` if it came before.
    fn judge(&mut self, frame: Bytes) -> Result<Option<Bytes>, LaneError> {
        let (number, content) = frame::open(frame).map_err(LaneError::Frame)?;
        if number < self.next && !mutated("accept-stale-flow") {
            self.guard.refused(&self.from, "duplicate");
            return Ok(None);
        }
        if number > self.next {
            let expected = self.next;
            return Err(LaneError::Frame(FrameError::Gap { number, expected }));
        }
        self.next = self.next.max(number + 1);
        Ok(Some(content))
    }
}

impl std::fmt::Display for LaneError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Link(error) => error.fmt(f),
            Self::Frame(error) => error.fmt(f),
        }
    }
}

#[cfg(test)]
#[path = "lane_tests.rs"]
mod tests;
