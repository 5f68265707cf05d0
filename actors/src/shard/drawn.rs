//! Tokens that go from one step straight into a later one.
//!
//! A scheduler with overlap plans steps while earlier ones run, so the tokens that those draw are
//! not in the plan. Every shard puts them in before it computes anything: then the batch is what
//! it would have been, had it been planned when they were known, and so are plan hash, KV entries,
//! claims and draws. How the tokens get from the shard that draws to the others is `feedback.rs`.
//!
//! Invariant: a place is filled from the step that it names, or the step fails. Where that step
//! drew no finite token the request has ended by the time this step's answer arrives, so any token
//! will do.

use crate::messages::Place;
use dunlin_model::engine::{Batch, Sampled};
use std::collections::{BTreeMap, HashMap};

/// Steps whose tokens are kept. Places name steps in flight, of which there are fewer: 64 at most
/// by configuration, and one that is planned ahead.
const KEPT_STEPS: usize = 66;

/// What the last steps drew: by step, by request.
#[derive(Debug, Default)]
pub struct Drawn(BTreeMap<u64, HashMap<u64, u32>>);

impl Drawn {
    /// Puts tokens into the places of `batch` that wait for one.
    ///
    /// # Errors
    /// Names a request that drew nothing in the step it was to draw in, or a place that does not
    /// exist.
    pub fn fill(&self, batch: &mut Batch, places: &[Place]) -> Result<(), String> {
        for &Place { seq: index, step } in places {
            let seqs = batch.seqs.len();
            let Some(seq) = batch.seqs.get_mut(index as usize) else {
                return Err(format!("sequence {index} of {seqs} waits for a token"));
            };
            let Some(&token) = self.0.get(&step).and_then(|drawn| drawn.get(&seq.request)) else {
                let request = seq.request;
                return Err(format!("request {request} drew nothing in step {step}"));
            };
            seq.tokens.iter_mut().for_each(|empty| *empty = token);
            if let Some(spec) = seq.sample.as_mut().filter(|spec| spec.params.needs_history()) {
                spec.output.push(token);
            }
        }
        Ok(())
    }

    pub fn keep(&mut self, step: u64, sampled: &[Sampled]) {
        self.put(step, sampled.iter().map(token_of));
    }

    /// The same from (request, token).
    pub fn put(&mut self, step: u64, tokens: impl Iterator<Item = (u64, u32)>) {
        self.0.insert(step, tokens.collect());
        while self.0.len() > KEPT_STEPS {
            self.0.pop_first();
        }
    }

    pub fn has(&self, step: u64) -> bool {
        self.0.contains_key(&step)
    }
}

/// Request and token, any one where none was drawn.
pub fn token_of(one: &Sampled) -> (u64, u32) {
    (one.request, one.token.unwrap_or(0))
}
