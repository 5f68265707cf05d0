//! The short way of drawn tokens: from the shard that draws them to all others of its replica.
//!
//! The long way leads over the scheduler, which hears of them as well. But where it has planned the
//! next step already, whose places wait for these tokens (see `drawn.rs`), the first stage can go on
//! as soon as it has them. One frame a step that draws, with the replica's epoch and the step.
//!
//! Invariants: frames are taken in the order of their steps, and whoever is about to run a step
//! takes all that have come, so that no more wait than there are steps in flight.

use super::drawn::{Drawn, token_of};
use super::flows::{Doing, SENDS_TOKENS, TAKES_TOKENS, flow_id, label};
use crate::messages::{Place, ReplicaPlan, ShardPlace};
use bytes::{BufMut, Bytes, BytesMut};
use dunlin_model::engine::{Batch, Sampled};
use dunlin_runtime::{FlowClass, FlowFrame, FlowReceiver, FlowSender, Node};
use std::sync::Arc;
use std::time::Duration;
use tokio::runtime::Handle;
use tokio::time::{Instant, timeout_at};

/// Tag of these frames.
const DRAWN: u64 = 0;
/// Bytes of a request and its token.
const ENTRY: usize = 12;

pub struct Feedback {
    doing: Arc<Doing>,
    epoch: u64,
    deadline: Duration,
    drawn: Drawn,
    /// On every shard but the one that draws.
    from: Option<(String, FlowReceiver)>,
    /// On that one.
    to: Vec<(String, FlowSender)>,
    handle: Handle,
}

/// The shard of the plan that draws.
pub fn source(plan: &ReplicaPlan) -> Option<&ShardPlace> {
    plan.shards.iter().find(|place| place.spec.last && place.spec.rank == 0)
}

impl Feedback {
    /// The ends of shard `index` of `plan`; to be called on the runtime. Opening never waits.
    pub fn open(
        node: &Node,
        plan: &ReplicaPlan,
        index: usize,
        (deadline, doing): (Duration, Arc<Doing>),
    ) -> Self {
        let at = |place: &ShardPlace| (place.stage, place.spec.rank);
        let own = at(&plan.shards[index]);
        let source = source(plan);
        let draws = source.is_some_and(|source| at(source) == own);
        let from = source.filter(|_| !draws).map(|source| {
            let id = flow_id(plan, "tok", at(source), own);
            (label(source), node.accept_flow(&source.node, id))
        });
        let others = plan.shards.iter().filter(|place| draws && at(place) != own);
        let to = others.map(|place| {
            let id = flow_id(plan, "tok", own, at(place));
            (label(place), node.open_flow(&place.node, id, FlowClass::Activations))
        });
        let (to, handle) = (to.collect(), Handle::current());
        let (epoch, drawn) = (plan.epoch.0, Drawn::default());
        Self { doing, epoch, deadline, drawn, from, to, handle }
    }

    /// Puts the tokens that earlier steps drew into the places of `batch`; waits for those that
    /// have not come yet.
    pub async fn fill(&mut self, batch: &mut Batch, places: &[Place]) -> Result<(), String> {
        if let Some((from, flow)) = &mut self.from {
            let wanted = places.iter().map(|place| place.step).max();
            let until = Instant::now() + self.deadline;
            let failed = |error| format!("waits for the tokens of {from}: {error}");
            while let Some(frame) = flow.try_recv().await {
                let frame = frame.map_err(|error| failed(error.to_string()))?;
                take(&mut self.drawn, self.epoch, frame).map_err(failed)?;
            }
            while let Some(step) = wanted.filter(|step| !self.drawn.has(*step)) {
                self.doing.set(TAKES_TOKENS);
                let frame = timeout_at(until, flow.recv()).await;
                let late = |_| failed(format!("nothing within {} ms", self.deadline.as_millis()));
                let frame = frame.map_err(late)?.map_err(|error| failed(error.to_string()))?;
                let came = take(&mut self.drawn, self.epoch, frame).map_err(failed)?;
                if came > step {
                    return Err(failed(format!("those of step {came} came, not of step {step}")));
                }
            }
        }
        self.drawn.fill(batch, places)
    }

    /// [`Self::fill`] for device threads.
    pub fn blocking_fill(&mut self, batch: &mut Batch, places: &[Place]) -> Result<(), String> {
        if let Some((from, flow)) = &mut self.from {
            let wanted = places.iter().map(|place| place.step).max();
            let until = Instant::now() + self.deadline;
            let failed = |error| format!("waits for the tokens of {from}: {error}");
            while let Some(frame) = flow.blocking_try_recv() {
                let frame = frame.map_err(|error| failed(error.to_string()))?;
                take(&mut self.drawn, self.epoch, frame).map_err(failed)?;
            }
            while let Some(step) = wanted.filter(|step| !self.drawn.has(*step)) {
                self.doing.set(TAKES_TOKENS);
                let left = until.saturating_duration_since(Instant::now());
                let frame = flow.blocking_recv(left).map_err(|error| failed(error.to_string()))?;
                let came = take(&mut self.drawn, self.epoch, frame).map_err(failed)?;
                if came > step {
                    return Err(failed(format!("those of step {came} came, not of step {step}")));
                }
            }
        }
        self.drawn.fill(batch, places)
    }

    /// Keeps what a step drew here; what [`Self::send`] is to send of it.
    pub fn keep(&mut self, step: u64, sampled: &[Sampled]) -> Option<FlowFrame> {
        if sampled.is_empty() {
            return None;
        }
        self.drawn.keep(step, sampled);
        let (epoch, tag) = (self.epoch, DRAWN);
        (!self.to.is_empty()).then(|| FlowFrame { epoch, step, tag, payload: encode(sampled) })
    }

    /// Sends what was drawn to the other shards.
    pub async fn send(&self, drawn: Option<FlowFrame>) -> Result<(), String> {
        let Some(frame) = drawn else { return Ok(()) };
        self.doing.set(SENDS_TOKENS);
        for (to, flow) in &self.to {
            let sent = flow.send(frame.clone()).await;
            sent.map_err(|error| format!("sends its tokens to {to}: {error}"))?;
        }
        Ok(())
    }

    /// [`Self::send`] for device threads.
    pub fn blocking_send(&self, drawn: Option<FlowFrame>) -> Result<(), String> {
        if drawn.is_none() {
            return Ok(());
        }
        self.handle.block_on(self.send(drawn))
    }
}

/// Keeps what a frame brings; returns the step that drew it.
fn take(drawn: &mut Drawn, epoch: u64, frame: FlowFrame) -> Result<u64, String> {
    if (frame.epoch, frame.tag) != (epoch, DRAWN) {
        return Err(format!("it is in epoch {}, this shard in epoch {epoch}", frame.epoch));
    }
    drawn.put(frame.step, decode(&frame.payload)?.into_iter());
    Ok(frame.step)
}

fn encode(sampled: &[Sampled]) -> Bytes {
    let mut bytes = BytesMut::with_capacity(sampled.len() * ENTRY);
    for (request, token) in sampled.iter().map(token_of) {
        bytes.put_u64_le(request);
        bytes.put_u32_le(token);
    }
    bytes.freeze()
}

fn decode(payload: &[u8]) -> Result<Vec<(u64, u32)>, String> {
    let bad = || format!("{} bytes are no list of tokens", payload.len());
    let (entries, []) = payload.as_chunks::<ENTRY>() else { return Err(bad()) };
    let entry = |entry: &[u8; ENTRY]| {
        let (request, token) = (entry.first_chunk()?, entry.last_chunk()?);
        Some((u64::from_le_bytes(*request), u32::from_le_bytes(*token)))
    };
    entries.iter().map(entry).collect::<Option<_>>().ok_or_else(bad)
}

#[cfg(test)]
mod tests {
    use super::*;
    use dunlin_model::engine::SampleFailure;

    #[test]
    fn tokens_come_back_as_they_were_sent_and_nothing_else_is_taken() {
        let prompt_logprobs = Vec::new();
        let one = |request, token| {
            let prompt_logprobs = prompt_logprobs.clone();
            Sampled { request, token, logprob: None, prompt_logprobs }
        };
        let sampled = [one(u64::MAX, Ok(7)), one(3, Err(SampleFailure::NotFinite))];
        let payload = encode(&sampled);
        assert_eq!(decode(&payload), Ok(vec![(u64::MAX, 7), (3, 0)]));
        assert!(decode(&payload[1..]).is_err());
        let mut drawn = Drawn::default();
        let frame = |epoch, tag| FlowFrame { epoch, step: 9, tag, payload: payload.clone() };
        assert!(take(&mut drawn, 2, frame(1, DRAWN)).is_err());
        assert!(take(&mut drawn, 2, frame(2, DRAWN + 1)).is_err());
        assert!(!drawn.has(9));
        assert_eq!(take(&mut drawn, 2, frame(2, DRAWN)), Ok(9));
        assert!(drawn.has(9));
    }
}
