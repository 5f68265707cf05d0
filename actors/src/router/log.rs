//! One request's entry in the token log, and what the router knows about its way.

use super::fleet::Slot;
use crate::kv::key::Chain;
use crate::messages::{
    Attempt, BlockKey, FinishReason, KeySpace, ReplicaEpoch, Request, Usage, Work,
};
use dunlin_model::sampling::TokenLogprob;
use std::time::Duration;

/// An accepted request that has not ended. Logprobs are delivered and not kept: no replay needs
/// them.
pub(super) struct Open {
    pub request: Request,
    /// Its place in line.
    pub arrival: u64,
    pub accepted: Duration,
    pub deadline: Duration,
    /// Every token delivered so far; `output.len()` is the next position.
    pub output: Vec<u32>,
    /// Number of hand-outs so far, and the only attempt whose tokens are taken.
    pub attempt: u32,
    /// Where it runs; `None` while it waits.
    pub share: Option<Share>,
    pub first_token: Option<Duration>,
    pub cached_tokens: Option<u32>,
    pub prompt_report: PromptReport,
    /// `node/device` of everything that drew a token of it, in order of first use.
    pub served_by: Vec<String>,
    pub trouble: Trouble,
    /// Block keys of its tokens: one chain per kind of replica, the first as it came with the
    /// request.
    chains: Vec<(KeySpace, Chain)>,
}

/// What a request takes up on its replica. Freed as one piece, so the sums stay exact.
pub(super) struct Share {
    pub slot: Slot,
    pub epoch: ReplicaEpoch,
    /// Tokens that this attempt has yet to compute before its first token.
    pub prefill_tokens: u64,
    /// Tokens of KV that it holds.
    pub held_tokens: u64,
}

/// Bad luck so far; decides when a request is given up as poison.
#[derive(Default)]
pub(super) struct Trouble {
    /// It was in a failed step and has not drawn a token since.
    pub suspect: bool,
    /// It has drawn a token in this attempt.
    pub moved: bool,
    /// When the attempt before was lost.
    pub lost_at: Option<Duration>,
    pub strikes: u32,
    pub fruitless: u32,
    pub suspicions: u32,
    /// Lives of replicas that it could not be sent to.
    pub unreachable: Vec<(Slot, ReplicaEpoch)>,
}

impl Trouble {
    /// A token was drawn: what follows is judged anew, but for the lifetime count. Returns when
    /// the loss before it was, if there was one.
    pub fn moved(&mut self) -> Option<Duration> {
        let lost_at = self.lost_at;
        *self = Self { moved: true, suspicions: self.suspicions, ..Self::default() };
        lost_at
    }
}

/// The prompt's own logprobs may arrive in pieces, are delivered in one, and never twice.
pub(super) enum PromptReport {
    NotAsked,
    Collecting(Vec<TokenLogprob>),
    Delivered,
}

impl Open {
    pub fn new(mut request: Request, arrival: u64, now: Duration) -> Self {
        // A prompt of one token has no predecessor to score it.
        let prompt_report = match request.prompt_logprobs {
            Some(_) if request.prompt.len() > 1 => PromptReport::Collecting(Vec::new()),
            _ => PromptReport::NotAsked,
        };
        let deadline = now.saturating_add(Duration::from_millis(request.deadline_ms));
        let given = request.keys.take().and_then(|given| {
            let Request { tenant, cache_salt, prompt, .. } = &request;
            Some((given.space, Chain::resume(given, tenant, cache_salt, prompt.len())?))
        });
        Self {
            request,
            arrival,
            accepted: now,
            deadline,
            output: Vec::new(),
            attempt: 0,
            share: None,
            first_token: None,
            cached_tokens: None,
            prompt_report,
            served_by: Vec::new(),
            trouble: Trouble::default(),
            chains: given.into_iter().collect(),
        }
    }

    /// The most tokens it can come to hold.
    pub fn reserved_tokens(&self) -> u64 {
        reserved_tokens(&self.request)
    }

    pub fn len(&self) -> u64 {
        (self.request.prompt.len() + self.output.len()) as u64
    }

    pub fn position(&self) -> u32 {
        saturate(self.output.len())
    }

    /// Why it has ended, if the log alone tells.
    pub fn complete(&self) -> Option<FinishReason> {
        if matches!(self.prompt_report, PromptReport::Collecting(_)) {
            return None;
        }
        let stopped = self.output.last().is_some_and(|t| self.request.stop_tokens.contains(t));
        if stopped {
            return Some(FinishReason::Stop);
        }
        (self.position() >= self.request.max_tokens).then_some(FinishReason::Length)
    }

    pub fn usage(&self) -> Usage {
        Usage {
            prompt_tokens: saturate(self.request.prompt.len()),
            completion_tokens: self.position(),
            cached_tokens: self.cached_tokens.unwrap_or(0),
        }
    }

    /// Shows the block keys of its tokens, as replicas of this kind compute them, for as long as
    /// `goes_on` says so. True: none had come with the request, and they were computed here.
    pub fn walk_keys(&mut self, space: KeySpace, goes_on: impl FnMut(&BlockKey) -> bool) -> bool {
        let known = self.chains.iter().position(|(known, _)| *known == space);
        let at = known.unwrap_or_else(|| {
            let Request { tenant, cache_salt, .. } = &self.request;
            let chain = Chain::new(&space.namespace, space.block_tokens, tenant, cache_salt);
            self.chains.push((space, chain));
            self.chains.len() - 1
        });
        let Some((_, chain)) = self.chains.get_mut(at) else { return false };
        match self.output.is_empty() {
            true => chain.walk(&self.request.prompt, goes_on),
            false => chain.walk(&[&self.request.prompt[..], &self.output].concat(), goes_on),
        }
        known.is_none() && !chain.keys().is_empty()
    }

    /// Prompt and output.
    fn tokens(&self) -> Vec<u32> {
        [self.request.prompt.as_slice(), &self.output].concat()
    }

    pub fn attempt(&self) -> Attempt {
        Attempt(self.attempt)
    }

    /// The hand-out of the current attempt: what was delivered has become part of the prompt.
    pub fn work(&self) -> Work {
        let request = &self.request;
        Work {
            request: request.id,
            attempt: self.attempt(),
            tenant: request.tenant.clone(),
            cache_salt: request.cache_salt.clone(),
            tokens: self.tokens(),
            prompt_len: saturate(request.prompt.len()),
            sampling: request.sampling.clone(),
            max_tokens: request.max_tokens,
            min_tokens: request.min_tokens,
            stop_tokens: request.stop_tokens.clone(),
            prompt_logprobs: match self.prompt_report {
                PromptReport::Collecting(_) => request.prompt_logprobs,
                PromptReport::NotAsked | PromptReport::Delivered => None,
            },
            suspect: self.trouble.suspect,
        }
    }
}

pub(super) fn reserved_tokens(request: &Request) -> u64 {
    request.prompt.len() as u64 + u64::from(request.max_tokens)
}

fn saturate(count: usize) -> u32 {
    u32::try_from(count).unwrap_or(u32::MAX)
}
