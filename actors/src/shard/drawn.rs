//! Tokens that go from one step straight into the next.
//!
//! A scheduler with overlap plans a step while the one before runs, so the tokens that the latter
//! draws are not in the plan. The shard that drew them puts them in before it computes anything:
//! then the batch is what it would have been, had it been planned a step later, and so are plan
//! hash, KV entries, claims and draws.
//!
//! Invariant: a place is filled from the step directly before, or the step fails. Where that step
//! drew no finite token the request has ended by the time this step's answer arrives, so any token
//! will do.

use dunlin_model::engine::{Batch, Sampled};
use std::collections::HashMap;

/// What the last step drew, by request.
#[derive(Debug, Default)]
pub struct Drawn(HashMap<u64, u32>);

impl Drawn {
    /// Puts tokens into the places of `batch` that wait for one.
    ///
    /// # Errors
    /// Names a request that was not in the step before, or a place that does not exist.
    pub fn fill(&self, batch: &mut Batch, places: &[u32]) -> Result<(), String> {
        for &place in places {
            let seqs = batch.seqs.len();
            let Some(seq) = batch.seqs.get_mut(place as usize) else {
                return Err(format!("sequence {place} of {seqs} waits for a token"));
            };
            let Some(&token) = self.0.get(&seq.request) else {
                let request = seq.request;
                return Err(format!("request {request} drew nothing in the step before"));
            };
            seq.tokens.iter_mut().for_each(|empty| *empty = token);
            if let Some(spec) = seq.sample.as_mut().filter(|spec| spec.params.needs_history()) {
                spec.output.push(token);
            }
        }
        Ok(())
    }

    pub fn keep(&mut self, sampled: &[Sampled]) {
        self.0.clear();
        self.0.extend(sampled.iter().map(|one| (one.request, one.token.unwrap_or(0))));
    }
}
