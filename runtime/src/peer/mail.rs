//! Mail to and from a peer.

use super::{CallOutcome, Failure, Item, PeerShell, Pending};
use crate::address::Address;
use crate::frame::{self, LANES, Outcome, Stamp, Target};
use crate::lane::Draft;
use crate::mailbox::{CallError, CastError};
use crate::options::Limits;
use crate::prng::fnv;
use crate::session::{Cost, Verdict};
use bytes::{Bytes, BytesMut};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::oneshot;
use tokio::time::Instant;

impl PeerShell {
    /// Queues a call. The receiver yields once; dropping the guard forgets the call.
    pub fn call(
        self: &Arc<Self>,
        to: &Address,
        target: &Target,
        body: Bytes,
        deadline: Duration,
    ) -> Result<(CallGuard, oneshot::Receiver<CallOutcome>), CallError> {
        let lane = lane_of(&target.role, &target.instance);
        let mut state = self.state.lock();
        if state.closing {
            let reason = "this node is shutting down".into();
            return Err(CallError::NodeDown { to: to.clone(), reason });
        }
        let id = state.fresh();
        let item = Item {
            kind: frame::KIND_CALL,
            id,
            expires: Some(Instant::now() + deadline),
            tail: frame::target_tail(target),
            body,
        };
        if let Some(detail) = state.no_room(lane, item.cost(), &self.limits) {
            return Err(CallError::Overloaded { to: to.clone(), detail });
        }
        let (answer, receiver) = oneshot::channel();
        let waiting = state.link.is_none();
        state.pending.insert(id, Pending { answer, waiting });
        if waiting {
            state.waiting_bytes += item.cost();
            state.waiting.push_back((lane, item));
        } else {
            state.out.push(lane, item);
        }
        drop(state);
        let wake = if waiting { &self.wake } else { &self.lane_ready[lane] };
        wake.notify_one();
        Ok((CallGuard { peer: self.clone(), id }, receiver))
    }

    pub fn cast(&self, to: &Address, target: &Target, body: Bytes) -> Result<(), CastError> {
        let lane = lane_of(&target.role, &target.instance);
        let tail = frame::target_tail(target);
        let item = Item { kind: frame::KIND_CAST, id: 0, expires: None, tail, body };
        let mut state = self.state.lock();
        if state.link.is_none() || state.closing {
            let reason = state.reason.clone();
            return Err(CastError::NodeDown { to: to.clone(), reason });
        }
        if let Some(detail) = state.no_room(lane, item.cost(), &self.limits) {
            return Err(CastError::Overloaded { to: to.clone(), detail });
        }
        state.out.push(lane, item);
        drop(state);
        self.lane_ready[lane].notify_one();
        Ok(())
    }

    pub fn answer(&self, lane: usize, session: u64, id: u64, outcome: Outcome, body: Bytes) {
        let ok = outcome.code == frame::Code::Ok;
        let cost = body.len() + Limits::MESSAGE_OVERHEAD;
        let mut state = self.state.lock();
        if state.inc.id != session {
            return;
        }
        let refused = if body.len() > self.limits.message_bytes {
            let limit = self.limits.message_bytes;
            let detail = format!("the reply has {} bytes, the limit is {limit}", body.len());
            Some(Outcome { code: frame::Code::TooBig, detail })
        } else if ok {
            state
                .no_room(lane, cost, &self.limits)
                .map(|detail| Outcome { code: frame::Code::Overloaded, detail })
        } else {
            None
        };
        // The refusal itself is small and always has room: no call may hang.
        let (outcome, body) = match refused {
            Some(outcome) => (outcome, Bytes::new()),
            None => (outcome, body),
        };
        let tail = frame::outcome_tail(&outcome);
        state.out.push(lane, Item { kind: frame::KIND_ANSWER, id, expires: None, tail, body });
        drop(state);
        self.lane_ready[lane].notify_one();
    }

    pub fn undelivered(&self, lane: usize, session: u64, to: &Target, outcome: Outcome) {
        let tail = frame::undelivered_tail(to, &outcome);
        let kind = frame::KIND_UNDELIVERED;
        let item = Item { kind, id: 0, expires: None, tail, body: Bytes::new() };
        let mut state = self.state.lock();
        if state.inc.id != session || state.no_room(lane, item.cost(), &self.limits).is_some() {
            return;
        }
        state.out.push(lane, item);
        drop(state);
        self.lane_ready[lane].notify_one();
    }

    /// The next frames of a lane, as long as `token` is the link.
    pub async fn next_frames(&self, token: u64, lane: usize, stamp: Stamp) -> Option<Vec<Draft>> {
        /// Enough for QUIC to fill its packets, small enough to keep a lane's memory low.
        const BATCH_BYTES: usize = 256 << 10;
        loop {
            let ready = self.lane_ready[lane].notified();
            let batch = {
                let mut state = self.state.lock();
                if state.link.as_ref().map(|up| up.token) != Some(token) {
                    return None;
                }
                state.out.next_batch(lane, BATCH_BYTES)
            };
            if batch.is_empty() {
                ready.await;
                continue;
            }
            let mut arena = BytesMut::with_capacity(batch.len() * 128);
            let now = Instant::now();
            let frames = batch.into_iter().map(|(seq, item)| {
                let left = item.expires.map_or(0, |at| {
                    let left = at.saturating_duration_since(now).as_millis();
                    // A fraction of a millisecond is still time.
                    u32::try_from(left).unwrap_or(u32::MAX).max(u32::from(at > now))
                });
                frame::put_mail_head(&mut arena, stamp, item.kind, seq, item.id, left);
                arena.extend_from_slice(&item.tail);
                Draft { head: arena.split(), body: item.body }
            });
            return Some(frames.collect());
        }
    }

    // ---- mail in ---------------------------------------------------------------------------

    /// Judges a message by its number; `None` if its link is no longer the link.
    pub fn received(&self, token: u64, lane: usize, seq: u64) -> Option<(Verdict, u64)> {
        let mut state = self.state.lock();
        if state.link.as_ref().map(|up| up.token) != Some(token) {
            return None;
        }
        Some((state.inc.receive(lane, seq), state.inc.id))
    }

    pub fn acked(&self, token: u64, received: &[u64; LANES]) {
        let mut state = self.state.lock();
        if state.link.as_ref().map(|up| up.token) == Some(token) {
            state.out.ack(received);
        }
    }

    /// The node's own mail needs no acknowledgement from afar.
    pub fn ack_lane(&self, lane: usize, upto: u64) {
        let mut received = [0; LANES];
        received[lane] = upto;
        self.state.lock().out.ack(&received);
    }

    pub fn counts(&self) -> [u64; LANES] {
        self.state.lock().inc.received
    }

    pub fn answered(&self, id: u64, outcome: Outcome, body: Bytes) {
        let pending = self.state.lock().pending.remove(&id);
        if let Some(pending) = pending {
            let ok = outcome.code == frame::Code::Ok;
            let _ = pending.answer.send(if ok { Ok(body) } else { Err(Failure::Told(outcome)) });
        }
    }
}

fn lane_of(role: &str, instance: &str) -> usize {
    (fnv(&[role, instance]) % LANES as u64) as usize
}

/// Forgets its call when dropped.
pub(crate) struct CallGuard {
    peer: Arc<PeerShell>,
    id: u64,
}

impl Drop for CallGuard {
    fn drop(&mut self) {
        let mut state = self.peer.state.lock();
        state.pending.remove(&self.id);
        let at = state.waiting.iter().position(|(_, item)| item.id == self.id);
        if let Some((_, item)) = at.and_then(|at| state.waiting.remove(at)) {
            state.waiting_bytes -= item.cost();
        }
    }
}
