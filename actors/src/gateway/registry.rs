//! Which HTTP request waits for which router request, and the numbers that are counted on the way.
//!
//! Events are handed over as they arrive, without waiting: a slow reader's events queue up in its
//! own channel, which holds no more than the tokens the request may have. Time to first token and
//! the like are measured here, so that a slow reader does not look like a slow model.

use crate::messages::{
    FailureCode, FinishReason, GatewayCast, RequestId, RouterCast, RouterProtocol, StreamEvent,
    Usage,
};
use dashmap::DashMap;
use dunlin_runtime::{Address, Node};
use std::sync::Arc;
use std::time::Instant;
use tokio::sync::mpsc;

/// An event and the answer of the HTTP request that it is about.
pub type Delivery = (usize, StreamEvent);

/// All requests that this gateway has with the router.
pub struct Registry {
    pub node: Node,
    pub router: Address,
    open: DashMap<RequestId, Entry>,
}

struct Entry {
    choice: usize,
    events: mpsc::UnboundedSender<Delivery>,
    /// Tokens the request may still deliver: the bound of its channel.
    left: u32,
    clock: Clock,
}

/// One request's times.
struct Clock {
    began: Instant,
    last_token: Option<Instant>,
}

impl Registry {
    pub fn new(node: Node, router: Address) -> Arc<Self> {
        Arc::new(Self { node, router, open: DashMap::new() })
    }

    /// Expects events about `id`. The guard says so for as long as it lives.
    pub fn register(
        self: &Arc<Self>,
        id: RequestId,
        choice: usize,
        max_tokens: u32,
        began: Instant,
        events: mpsc::UnboundedSender<Delivery>,
    ) -> Guard {
        let clock = Clock { began, last_token: None };
        self.open.insert(id, Entry { choice, events, left: max_tokens, clock });
        metrics::gauge!("dunlin_gateway_requests_open").increment(1.0);
        Guard { registry: self.clone(), id, cancelled: false, over: false }
    }

    /// Hands an event to whom it concerns. Work that nobody waits for is cancelled: a cancel may
    /// have been lost, or have overtaken its submit.
    pub fn dispatch(&self, cast: GatewayCast) {
        let GatewayCast::Event { request, event } = cast;
        let Some(mut entry) = self.open.get_mut(&request) else {
            if !event.is_terminal() {
                self.cancel(request, false);
            }
            return;
        };
        let event = entry.checked(event);
        entry.clock.record(&event);
        let delivery = (entry.choice, event);
        // The receiver lives as long as the guard, or is about to drop it.
        let _ = entry.events.send(delivery);
    }

    /// The router's memory is gone: whatever was open ends now, with one clear error.
    pub fn fail_all(&self, message: &str) {
        for entry in &self.open {
            let event = StreamEvent::Failed {
                code: FailureCode::Internal,
                message: message.to_owned(),
                usage: Usage::default(),
            };
            let _ = entry.events.send((entry.choice, event));
        }
    }

    fn cancel(&self, request: RequestId, stopped: bool) {
        let cast = RouterCast::Cancel { request, stopped };
        if let Err(error) = self.node.cast::<RouterProtocol>(&self.router, &cast) {
            tracing::warn!(?request, %error, "cancel not sent; the next event will send another");
        }
    }
}

impl Entry {
    /// Refuses more tokens than were asked for: they are what bounds the channel.
    fn checked(&mut self, event: StreamEvent) -> StreamEvent {
        let StreamEvent::Tokens { ids, logprobs, .. } = &event else { return event };
        let count = u32::try_from(ids.len()).unwrap_or(u32::MAX);
        let wrong = if count > self.left {
            Some(format!("{count} tokens came where {} were left", self.left))
        } else if !logprobs.is_empty() && logprobs.len() != ids.len() {
            Some(format!("{count} tokens came with {} log probabilities", logprobs.len()))
        } else {
            None
        };
        self.left = self.left.saturating_sub(count);
        match wrong {
            None => event,
            Some(message) => StreamEvent::Failed {
                code: FailureCode::Internal,
                message,
                usage: Usage::default(),
            },
        }
    }
}

impl Clock {
    fn record(&mut self, event: &StreamEvent) {
        let now = Instant::now();
        let seconds = |from: Instant| now.duration_since(from).as_secs_f64();
        let (outcome, usage) = match event {
            StreamEvent::PromptLogprobs(_) => return,
            StreamEvent::Tokens { ids, .. } => {
                metrics::counter!("dunlin_generation_tokens_total").increment(ids.len() as u64);
                match self.last_token.replace(now) {
                    None => metrics::histogram!("dunlin_time_to_first_token_seconds")
                        .record(seconds(self.began)),
                    // Tokens that came together share the wait.
                    Some(last) => metrics::histogram!("dunlin_inter_token_latency_seconds")
                        .record_many(seconds(last) / ids.len().max(1) as f64, ids.len()),
                }
                return;
            }
            StreamEvent::Finished { reason: FinishReason::Stop, usage, .. } => ("stop", usage),
            StreamEvent::Finished { reason: FinishReason::Length, usage, .. } => ("length", usage),
            StreamEvent::Failed { usage, .. } => ("error", usage),
            StreamEvent::Cancelled { usage } => ("abort", usage),
        };
        ended(outcome);
        metrics::histogram!("dunlin_e2e_request_latency_seconds").record(seconds(self.began));
        metrics::histogram!("dunlin_request_prompt_tokens").record(f64::from(usage.prompt_tokens));
        metrics::histogram!("dunlin_request_generation_tokens")
            .record(f64::from(usage.completion_tokens));
        metrics::counter!("dunlin_prompt_tokens_total").increment(usage.prompt_tokens.into());
        metrics::counter!("dunlin_prompt_tokens_cached_total")
            .increment(usage.cached_tokens.into());
    }
}

fn ended(outcome: &'static str) {
    metrics::counter!("dunlin_request_success_total", "finished_reason" => outcome).increment(1);
}

/// One request with the router. Dropping it before the terminal event cancels the work, which is
/// how a client that went away is noticed: its handler or body is dropped, and this with it.
pub struct Guard {
    registry: Arc<Registry>,
    pub id: RequestId,
    cancelled: bool,
    over: bool,
}

impl Guard {
    /// A stop string ended the answer; the terminal event is still to come.
    pub fn stop(&mut self) {
        if !self.cancelled && !self.over {
            self.cancelled = true;
            self.registry.cancel(self.id, true);
        }
    }

    /// The terminal event came, or the request was not accepted: nothing to cancel.
    pub fn over(&mut self) {
        self.over = true;
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        self.registry.open.remove(&self.id);
        metrics::gauge!("dunlin_gateway_requests_open").decrement(1.0);
        if !self.cancelled && !self.over {
            self.registry.cancel(self.id, false);
            // Its own terminal event finds nobody any more.
            ended("abort");
        }
    }
}
