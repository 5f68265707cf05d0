//! What may be set about scheduling, and what follows from the replica.

use std::time::Duration;

/// `[scheduler]` of cluster.toml.
#[derive(Debug, Clone, PartialEq)]
pub struct SchedulerConfig {
    /// Most tokens of one step, over all its sequences.
    pub step_tokens: usize,
    /// Most prompt tokens of one sequence in one step.
    pub chunk_tokens: usize,
    /// Most sequences that hold KV blocks at a time.
    pub max_running: usize,
    /// Look prompts up in the prefix cache, and keep blocks for later ones.
    pub prefix_cache: bool,
    /// Batches in flight at a time; `None`: one for each pipeline stage.
    pub in_flight: Option<usize>,
    /// Plan the next step while this one runs: see [`Limits::overlap`].
    pub overlap: bool,
    /// Where sequences decode, prompt chunks shrink so that a step takes about this long: a bound
    /// on the time between tokens. `None`: `step_stretch` bounds it.
    pub step_target: Option<Duration>,
    /// The same bound in terms of what a step takes that only decodes: see
    /// [`Limits::step_stretch`].
    pub step_stretch: u32,
    pub batching: Batching,
    /// A step that is not done by then breaks the replica.
    pub step_deadline: Duration,
}

/// When waiting requests join those that run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Batching {
    /// As soon as there is room, step by step.
    #[default]
    Continuous,
    /// Only when all of the batch before have ended: the naive twin, kept for comparison.
    Static,
}

impl Default for SchedulerConfig {
    fn default() -> Self {
        Self {
            step_tokens: 512,
            chunk_tokens: 512,
            max_running: 64,
            prefix_cache: true,
            in_flight: None,
            overlap: true,
            step_target: None,
            step_stretch: 2,
            batching: Batching::Continuous,
            step_deadline: Duration::from_secs(10),
        }
    }
}

/// The same for one replica, every value settled and at least 1.
#[derive(Debug, Clone, PartialEq)]
pub struct Limits {
    pub step_tokens: usize,
    pub chunk_tokens: usize,
    pub max_running: usize,
    pub prefix_cache: bool,
    /// Batches that decoding sequences are shared among, each in a step of its own.
    pub in_flight: usize,
    /// One step more is planned than there are batches: whoever draws a token in a step in flight
    /// is put into it with a place for that token, which the shards fill in.
    pub overlap: bool,
    pub step_target: Option<Duration>,
    /// A step with chunks of one prompt takes at most so many times as long as one that only
    /// decodes; with more prompts to run, longer in proportion to all that it serves. 0: as long as
    /// the budget makes it.
    pub step_stretch: u32,
    pub batching: Batching,
    pub step_deadline: Duration,
    /// Prompt and output of one sequence at most.
    pub context_tokens: u32,
}

impl Limits {
    /// Most steps in flight.
    pub fn steps(&self) -> usize {
        self.in_flight + usize::from(self.overlap)
    }
}

impl SchedulerConfig {
    /// For a replica of so many stages. `batch_tokens`: what the shards' workspaces hold.
    pub fn limits(&self, stages: usize, batch_tokens: usize, context_tokens: u32) -> Limits {
        Limits {
            step_tokens: self.step_tokens.min(batch_tokens).max(1),
            chunk_tokens: self.chunk_tokens.max(1),
            prefix_cache: self.prefix_cache,
            max_running: self.max_running.max(1),
            in_flight: self.in_flight.unwrap_or(stages).max(1),
            overlap: self.overlap,
            step_target: self.step_target,
            step_stretch: self.step_stretch,
            batching: self.batching,
            // Shards speak first: they can say who waits for what.
            step_deadline: self.step_deadline + self.step_deadline / 4,
            context_tokens: context_tokens.max(1),
        }
    }
}
