//! What schedulers report and clients ask for: tokens in order, and the end of a request.

use super::fleet::{Slot, unfenced};
use super::log::{Open, PromptReport};
use super::{Note, Output, Router};
use crate::messages::{
    Attempt, FailureCode, FinishReason, ReplicaEpoch, RequestId, SchedulerCast, SchedulerEvent,
    StreamEvent,
};
use dunlin_model::sampling::TokenLogprob;
use dunlin_runtime::{NodeName, mutated};
use std::time::Duration;

impl Router {
    pub(super) fn event(&mut self, replica: &str, epoch: ReplicaEpoch, event: SchedulerEvent) {
        let Some(slot) = self.fleet.current(replica, epoch) else {
            return self.note(Note::Stale { kind: "epoch" });
        };
        match event {
            SchedulerEvent::Load(load) => {
                if let Some(replica) = self.fleet.get_mut(slot) {
                    replica.load = load;
                }
            }
            SchedulerEvent::KvEvents { seq, stored, removed } => {
                if !self.fleet.kv_events(slot, seq, &stored, &removed) {
                    self.note(Note::IndexForgotten { replica: replica.into() });
                }
            }
            SchedulerEvent::PromptLogprobs { request, attempt, logprobs } => {
                if self.is_current(slot, request, attempt, true) {
                    self.prompt_logprobs(request, logprobs);
                }
            }
            SchedulerEvent::Tokens { request, attempt, position, ids, logprobs, cached_tokens } => {
                if self.is_current(slot, request, attempt, true) {
                    let open = self.open.get_mut(&request);
                    if let (Some(open), Some(cached)) = (open, cached_tokens) {
                        open.cached_tokens.get_or_insert(cached);
                    }
                    self.tokens(request, (epoch, attempt), position, ids, logprobs);
                }
            }
            SchedulerEvent::Finished { request, attempt, reason } => {
                if self.is_current(slot, request, attempt, false) {
                    self.finished(request, reason);
                }
            }
            SchedulerEvent::Failed { request, attempt, code, message } => {
                if self.is_current(slot, request, attempt, false) {
                    self.release(request);
                    self.fail(request, code, message);
                }
            }
        }
    }

    /// The client is gone, or its gateway found a stop string (`stopped`).
    pub(super) fn cancel(&mut self, id: RequestId, stopped: bool) {
        if !self.open.contains_key(&id) {
            if !self.ended.contains(id) {
                self.early_cancels.insert(id);
            }
            return;
        }
        if stopped {
            return self.finish(id, FinishReason::Stop);
        }
        self.end(id, "abort", |open| StreamEvent::Cancelled { usage: open.usage() });
        self.totals.cancelled += 1;
    }

    pub(super) fn gateway_down(&mut self, node: &NodeName, lost: Duration) {
        // What came later came from the node's next life.
        let behind = self
            .open
            .iter()
            .filter(|(_, open)| open.request.reply_to.node == *node && open.accepted <= lost);
        for id in behind.map(|(id, _)| *id).collect::<Vec<_>>() {
            self.cancel(id, false);
        }
    }

    pub(super) fn finish(&mut self, id: RequestId, reason: FinishReason) {
        let outcome = match reason {
            FinishReason::Stop => "stop",
            FinishReason::Length => "length",
        };
        let Some(open) = self.open.get(&id) else { return };
        let length = open.output.len() as f64;
        let mean = &mut self.totals.output_tokens;
        *mean += (length - *mean) / self.totals.finished.saturating_add(1).min(64) as f64;
        self.end(id, outcome, |open| StreamEvent::Finished {
            reason,
            usage: open.usage(),
            served_by: std::mem::take(&mut open.served_by),
        });
        self.totals.finished += 1;
    }

    pub(super) fn fail(&mut self, id: RequestId, code: FailureCode, message: String) {
        self.end(id, "error", |open| StreamEvent::Failed { code, message, usage: open.usage() });
        self.totals.failed += 1;
    }

    /// Takes a request off its replica without telling the replica, which is done with it.
    pub(super) fn release(&mut self, id: RequestId) {
        let Some(open) = self.open.get_mut(&id) else { return };
        if let Some(share) = open.share.take() {
            self.fleet.release(id, share);
            self.waiting.insert(open.arrival, id);
        }
    }

    /// Takes a request off its replica and has the replica drop it.
    pub(super) fn recall(&mut self, id: RequestId) {
        let Some(open) = self.open.get(&id) else { return };
        if let Some(share) = &open.share
            && let Some(to) = self.fleet.scheduler(share)
        {
            let (epoch, attempt) = (share.epoch, open.attempt());
            let cast = SchedulerCast::Cancel { epoch, request: id, attempt };
            self.out.push(Output::Send { to, cast });
        }
        self.release(id);
    }

    /// The one way out: leaves nothing of the request but its id, and sends its terminal event.
    fn end(
        &mut self,
        id: RequestId,
        outcome: &'static str,
        event: impl FnOnce(&mut Open) -> StreamEvent,
    ) {
        self.recall(id);
        let Some(mut open) = self.open.remove(&id) else { return };
        self.waiting.remove(&open.arrival);
        self.deadlines.remove(&(open.deadline, id));
        self.log_tokens -= open.reserved_tokens();
        self.ended.insert(id);
        let event = event(&mut open);
        let usage = open.usage();
        let elapsed = self.now.saturating_sub(open.accepted);
        let to_first_token = open.first_token.map(|at| at.saturating_sub(open.accepted));
        let attempts = open.attempt;
        if mutated("end-twice") {
            self.deliver(open.request.reply_to.clone(), id, event.clone());
        }
        self.deliver(open.request.reply_to, id, event);
        self.note(Note::Ended { request: id, outcome, usage, elapsed, to_first_token, attempts });
    }

    /// Whether a report is about the attempt that is running there. If it is not, and the
    /// scheduler is `working` on it, the scheduler is told (again) to drop it: a cancel may have
    /// been lost.
    fn is_current(&mut self, slot: Slot, id: RequestId, attempt: Attempt, working: bool) -> bool {
        let open = self.open.get(&id);
        let here = open.and_then(|o| o.share.as_ref()).is_some_and(|share| share.slot == slot);
        if here && open.is_some_and(|open| open.attempt() == attempt) {
            return true;
        }
        if unfenced() && open.is_some() {
            return true;
        }
        let known = open.is_none_or(|open| attempt <= open.attempt());
        self.note(Note::Stale { kind: if open.is_some() { "attempt" } else { "ended" } });
        // One that was never handed out is nonsense; to cancel it would cancel the one that runs.
        if working
            && known
            && let Some(replica) = self.fleet.get(slot)
        {
            let epoch = replica.info.epoch;
            let to = replica.info.scheduler.clone();
            let cast = SchedulerCast::Cancel { epoch, request: id, attempt };
            self.out.push(Output::Send { to, cast });
        }
        false
    }

    fn prompt_logprobs(&mut self, id: RequestId, mut logprobs: Vec<TokenLogprob>) {
        let Some(open) = self.open.get_mut(&id) else { return };
        let PromptReport::Collecting(got) = &mut open.prompt_report else { return };
        let want = open.request.prompt.len().saturating_sub(1);
        got.append(&mut logprobs);
        if got.len() < want {
            return;
        }
        if got.len() > want {
            let reason = format!("{} prompt logprobs for {want} tokens", got.len());
            return self.gap(id, reason);
        }
        let all = std::mem::take(got);
        open.prompt_report = PromptReport::Delivered;
        let to = open.request.reply_to.clone();
        self.deliver(to, id, StreamEvent::PromptLogprobs(all));
    }

    fn tokens(
        &mut self,
        id: RequestId,
        from: (ReplicaEpoch, Attempt),
        position: u32,
        mut ids: Vec<u32>,
        mut logprobs: Vec<TokenLogprob>,
    ) {
        let Some(open) = self.open.get_mut(&id) else { return };
        if ids.is_empty() {
            return;
        }
        let next = open.position();
        let position = if mutated("trust-reports") { next } else { position };
        if position > next {
            return self.gap(id, format!("tokens at position {position}, expected {next}"));
        }
        if !logprobs.is_empty() && logprobs.len() != ids.len() {
            let reason = format!("{} logprobs for {} tokens", logprobs.len(), ids.len());
            return self.gap(id, reason);
        }
        if matches!(open.prompt_report, PromptReport::Collecting(_)) {
            return self.gap(id, "tokens before the prompt's logprobs".into());
        }
        // Drop what is known already, and what lies beyond the request's own end.
        let known = ((next - position) as usize).min(ids.len());
        let logged = &open.output[position as usize..];
        let differs = ids.iter().zip(logged).position(|(new, old)| new != old);
        ids.drain(..known);
        logprobs.drain(..known.min(logprobs.len()));
        let room = open.request.max_tokens.saturating_sub(next) as usize;
        let stop = ids.iter().position(|t| open.request.stop_tokens.contains(t));
        let ended = open.complete() == Some(FinishReason::Stop);
        let keep = if ended { 0 } else { room.min(stop.map_or(usize::MAX, |at| at + 1)) };
        ids.truncate(keep);
        logprobs.truncate(keep);
        if known > 0 {
            self.note(Note::Duplicate { request: id, tokens: known });
        }
        if let Some(at) = differs {
            // Bounded by `known`, hence by the output's length.
            self.note(Note::Diverged { request: id, position: position + at as u32 });
        }
        if !ids.is_empty() {
            self.log_and_deliver(id, from, ids, logprobs);
        }
    }

    fn log_and_deliver(
        &mut self,
        id: RequestId,
        (epoch, attempt): (ReplicaEpoch, Attempt),
        ids: Vec<u32>,
        logprobs: Vec<TokenLogprob>,
    ) {
        let Some(open) = self.open.get_mut(&id) else { return };
        let position = open.position();
        open.output.extend_from_slice(&ids);
        open.first_token.get_or_insert(self.now);
        let lost_at = open.trouble.moved();
        if let Some(share) = &mut open.share {
            self.fleet.progress(share, ids.len() as u64);
            if let Some(replica) = self.fleet.get(share.slot) {
                for server in &replica.info.served_by {
                    if !open.served_by.contains(server) {
                        open.served_by.push(server.clone());
                    }
                }
            }
        }
        let to = open.request.reply_to.clone();
        let tokens = ids.len() as u32;
        self.note(Note::Logged { request: id, position, tokens, epoch, attempt });
        self.deliver(to, id, StreamEvent::Tokens { position, ids, logprobs });
        if mutated("deliver-before-log") {
            let last = self.out.len() - 1;
            self.out.swap(last - 1, last);
        }
        if let Some(at) = lost_at {
            self.note(Note::Resumed { request: id, after: self.now.saturating_sub(at) });
        }
    }

    fn finished(&mut self, id: RequestId, reason: FinishReason) {
        let Some(open) = self.open.get(&id) else { return };
        if matches!(open.prompt_report, PromptReport::Collecting(_)) {
            return self.gap(id, "finished before the prompt's logprobs".into());
        }
        let full = open.share.as_ref().and_then(|share| self.fleet.get(share.slot)).is_some_and(
            // A replica may stop one short: the last token's KV is never needed.
            |replica| open.len() + 1 >= replica.info.max_sequence_tokens,
        );
        if reason == FinishReason::Length && !full && open.position() < open.request.max_tokens {
            let (got, want) = (open.position(), open.request.max_tokens);
            return self.gap(id, format!("finished for length after {got} of {want} tokens"));
        }
        // A stop token is reported like any other, so the log must end with one.
        if reason == FinishReason::Stop && open.complete() != Some(FinishReason::Stop) {
            return self.gap(id, format!("stopped, but not by token {:?}", open.output.last()));
        }
        self.release(id);
        self.finish(id, reason);
    }
}
