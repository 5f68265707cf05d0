//! Who is let in. A request is refused here, before anything was started, or it is accepted and
//! will get its terminal event.

use super::log::{Open, reserved_tokens};
use super::{Note, Output, Router};
use crate::messages::{Refusal, Request, RequestId, RouterReply};

/// Told to clients while no replica has measured its speed yet.
const RETRY_UNKNOWN_MS: u64 = 1_000;
const RETRY_MIN_MS: u64 = 100;
const RETRY_MAX_MS: u64 = 120_000;

impl Router {
    pub(super) fn submit(&mut self, request: Request) {
        let id = request.id;
        if let Err(refusal) = self.admit(&request) {
            self.note(Note::Refused { request: id, why: label(&refusal) });
            self.out.push(Output::Reply(RouterReply::Submitted(Err(refusal))));
            return;
        }
        let prompt_tokens = u32::try_from(request.prompt.len()).unwrap_or(u32::MAX);
        self.note(Note::Accepted { request: id, prompt_tokens });
        self.out.push(Output::Reply(RouterReply::Submitted(Ok(()))));
        self.accept(request);
        if self.early_cancels.contains(id) {
            return self.cancel(id, false);
        }
        if let Some(reason) = self.open.get(&id).and_then(Open::complete) {
            self.finish(id, reason);
        }
    }

    fn admit(&self, request: &Request) -> Result<(), Refusal> {
        if self.open.contains_key(&request.id) || self.ended.contains(request.id) {
            return Err(Refusal::Duplicate(request.id));
        }
        if self.draining {
            return Err(Refusal::Draining);
        }
        let Some(have) = self.fleet.all().map(|(_, r)| r.info.max_sequence_tokens).max() else {
            let reason = "none has finished loading since the cluster started".into();
            return Err(Refusal::NotReady { reason });
        };
        let need = reserved_tokens(request);
        if need > have {
            return Err(Refusal::NeverFits { need, have });
        }
        let full = self.open.len() >= self.config.max_open
            || self.log_tokens.saturating_add(need) > self.config.max_log_tokens
            || (self.waiting.len() >= self.config.max_waiting);
        if full {
            let waiting = self.waiting.len() as u64;
            return Err(Refusal::Overloaded { waiting, retry_after_ms: self.retry_after_ms() });
        }
        Ok(())
    }

    fn accept(&mut self, request: Request) {
        let id = request.id;
        let open = Open::new(request, self.arrivals, self.now);
        self.arrivals += 1;
        self.log_tokens += open.reserved_tokens();
        self.deadlines.insert((open.deadline, id));
        self.waiting.insert(open.arrival, id);
        self.open.insert(id, open);
    }

    /// How long the work now in line will take at the measured rate: prompts not yet computed,
    /// and for each waiting request the output to expect of it.
    fn retry_after_ms(&self) -> u64 {
        let rate: f64 = self.fleet.ready().map(|(_, r)| r.load.tokens_per_second).sum();
        if !(rate.is_finite() && rate > 0.0) {
            return RETRY_UNKNOWN_MS;
        }
        let prefill: u64 = self.fleet.ready().map(|(_, r)| r.prefill_tokens).sum();
        let waiting = self.waiting.values().filter_map(|id| self.open.get(id)).map(|open| {
            let left = open.request.max_tokens.saturating_sub(open.position());
            open.len() as f64 + f64::from(left).min(self.totals.output_tokens.max(1.0))
        });
        let tokens = prefill as f64 + waiting.sum::<f64>();
        // `as` saturates, and the clamp follows.
        ((tokens / rate * 1e3).ceil() as u64).clamp(RETRY_MIN_MS, RETRY_MAX_MS)
    }

    /// Ends what is past its deadline, saying what it was waiting for.
    pub(super) fn expire(&mut self) {
        while let Some(&(deadline, id)) = self.deadlines.first()
            && deadline <= self.now
        {
            let message = self.overdue(id);
            self.fail(id, crate::messages::FailureCode::Deadline, message);
        }
    }

    fn overdue(&self, id: RequestId) -> String {
        let Some(open) = self.open.get(&id) else { return String::new() };
        let state = match &open.share {
            Some(share) => {
                let name = self.fleet.get(share.slot).map_or("?", |r| r.info.replica.as_str());
                format!("it was running on replica {name}")
            }
            None => format!("it was waiting: {}", self.why_waiting(open)),
        };
        format!(
            "the deadline of {} ms passed after {} tokens and {} attempts; {state}",
            open.request.deadline_ms,
            open.output.len(),
            open.attempt
        )
    }

    fn why_waiting(&self, open: &Open) -> String {
        let ready = self.fleet.ready().count();
        if ready == 0 {
            let mut reasons: Vec<String> = self
                .fleet
                .all()
                .map(|(_, r)| format!("{}: {}", r.info.replica, r.down_reason))
                .collect();
            let more = reasons.len().saturating_sub(4);
            reasons.truncate(4);
            let more = if more > 0 { format!(" and {more} more") } else { String::new() };
            return format!("no replica is ready ({}{more})", reasons.join("; "));
        }
        let need = open.reserved_tokens();
        if !self.fleet.ready().any(|(_, r)| r.info.max_sequence_tokens >= need) {
            return format!("none of {ready} ready replicas holds its {need} tokens");
        }
        format!("all {ready} ready replicas are full, draining or unreachable")
    }
}

fn label(refusal: &Refusal) -> &'static str {
    match refusal {
        Refusal::NeverFits { .. } => "never_fits",
        Refusal::Overloaded { .. } => "overloaded",
        Refusal::Draining => "draining",
        Refusal::NotReady { .. } => "not_ready",
        Refusal::Duplicate(_) => "duplicate",
    }
}
