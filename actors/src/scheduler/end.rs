//! How sequences move on and end.

use super::core::{Measure, Output, Scheduler};
use super::sequence::{Phase, Queue, Slot};
use crate::kv::{Kv, KvError};
use crate::messages::{FailureCode, FinishReason, SchedulerEvent};
use dunlin_model::sampling::TokenLogprob;
use std::time::Duration;

impl Scheduler {
    /// Takes a drawn token: reports it, and ends the sequence where it was the last one. A stop
    /// token is reported like any other; what is shown of it is the gateway's affair.
    pub(super) fn draw(
        &mut self,
        kv: &mut Kv,
        now: Duration,
        slot: Slot,
        token: u32,
        logprob: Option<TokenLogprob>,
        out: &mut Vec<Output>,
    ) -> Result<(), KvError> {
        let Some(seq) = self.seqs[slot].as_mut() else { return Ok(()) };
        let position = seq.output_len();
        seq.tokens.push(token);
        if !seq.moved {
            seq.moved = true;
            let began = seq.scheduled.unwrap_or(now);
            out.push(Output::Measured(Measure::Prefilled(now.saturating_sub(began))));
        }
        if std::mem::take(&mut seq.suspect) {
            self.suspect = None;
        }
        self.totals.drawn_tokens += 1;
        self.tenants.charge_drawn(seq.tenant);
        out.push(Output::Event(SchedulerEvent::Tokens {
            request: seq.request,
            attempt: seq.attempt,
            position,
            ids: vec![token],
            logprobs: logprob.into_iter().collect(),
            cached_tokens: seq.cached_tokens.take(),
        }));
        let (stopped, full) = (seq.stop_tokens.contains(&token), seq.known() >= seq.limit);
        match (stopped, full) {
            (true, _) => self.finish(kv, slot, FinishReason::Stop, out),
            (_, true) => self.finish(kv, slot, FinishReason::Length, out),
            _ => Ok(()),
        }
    }

    pub(super) fn finish(
        &mut self,
        kv: &mut Kv,
        slot: Slot,
        reason: FinishReason,
        out: &mut Vec<Output>,
    ) -> Result<(), KvError> {
        let Some(seq) = self.seqs[slot].as_ref() else { return Ok(()) };
        let (request, attempt) = (seq.request, seq.attempt);
        out.push(Output::Event(SchedulerEvent::Finished { request, attempt, reason }));
        out.push(Output::Measured(Measure::Ended(reason)));
        self.end(kv, slot, true)
    }

    /// Fails one request. Its KV is not trusted any more, not even what it shared: if a block is
    /// the cause, the next request must not hit it.
    pub(super) fn fail(
        &mut self,
        kv: &mut Kv,
        slot: Slot,
        code: FailureCode,
        message: String,
        out: &mut Vec<Output>,
    ) -> Result<(), KvError> {
        let Some(seq) = self.seqs[slot].as_ref() else { return Ok(()) };
        let (request, attempt) = (seq.request, seq.attempt);
        out.push(Output::Event(SchedulerEvent::Failed { request, attempt, code, message }));
        self.end(kv, slot, false)
    }

    /// Ends a live attempt, wherever it is. Its blocks go when no step in flight uses them.
    pub(super) fn end(&mut self, kv: &mut Kv, slot: Slot, trusted: bool) -> Result<(), KvError> {
        let Some(seq) = self.seqs[slot].as_mut() else { return Ok(()) };
        self.by_request.remove(&seq.request);
        self.tenants.close(seq.tenant);
        match seq.phase {
            Phase::Waiting(queue) => {
                self.unqueue(slot, queue);
                self.vacate(slot);
                Ok(())
            }
            Phase::Running(run) => {
                seq.phase = Phase::Ending { run, trusted };
                self.running.retain(|&other| other != slot);
                self.suspect = self.suspect.filter(|&other| other != slot);
                self.ending.push(slot);
                if run.in_flight == 0 { self.close(kv, slot) } else { Ok(()) }
            }
            Phase::Ending { .. } => Ok(()),
        }
    }

    /// Gives an ended sequence's blocks back.
    pub(super) fn close(&mut self, kv: &mut Kv, slot: Slot) -> Result<(), KvError> {
        self.ending.retain(|&other| other != slot);
        let seq = self.seqs[slot].as_ref().map(|seq| &seq.phase);
        if let Some(&Phase::Ending { run, trusted }) = seq {
            self.vacate(slot);
            return if trusted { kv.release(run.table) } else { kv.discard(run.table) };
        }
        Ok(())
    }

    pub(super) fn unqueue(&mut self, slot: Slot, queue: Queue) {
        let Some(seq) = self.seqs[slot].as_ref() else { return };
        match queue {
            Queue::Fresh => self.tenants.remove(seq.tenant, seq.arrival),
            Queue::Resumed => drop(self.resumed.remove(&seq.arrival)),
            Queue::Suspect => drop(self.suspects.remove(&seq.arrival)),
        }
    }

    fn vacate(&mut self, slot: Slot) {
        self.seqs[slot] = None;
        self.vacant.push(slot);
    }
}
