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
    /// Steps in flight at a time; `None`: one for each pipeline stage.
    pub in_flight: Option<usize>,
    /// Where sequences decode, prompt chunks shrink so that a step takes about this long: a bound
    /// on the time between tokens. `None`: chunks are as large as the budget.
    pub step_target: Option<Duration>,
    /// A step that is not done by then breaks the replica.
    pub step_deadline: Duration,
}

impl Default for SchedulerConfig {
    fn default() -> Self {
        Self {
            step_tokens: 512,
            chunk_tokens: 512,
            max_running: 64,
            prefix_cache: true,
            in_flight: None,
            step_target: None,
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
    pub in_flight: usize,
    pub step_target: Option<Duration>,
    pub step_deadline: Duration,
    /// Prompt and output of one sequence at most.
    pub context_tokens: u32,
}

impl SchedulerConfig {
    /// `batch_tokens`: what the shards' workspaces hold.
    pub fn limits(&self, stages: usize, batch_tokens: usize, context_tokens: u32) -> Limits {
        Limits {
            step_tokens: self.step_tokens.min(batch_tokens).max(1),
            chunk_tokens: self.chunk_tokens.max(1),
            prefix_cache: self.prefix_cache,
            max_running: self.max_running.max(1),
            in_flight: self.in_flight.unwrap_or(stages).max(1),
            step_target: self.step_target,
            // Shards speak first: they can say who waits for what.
            step_deadline: self.step_deadline + self.step_deadline / 4,
            context_tokens: context_tokens.max(1),
        }
    }
}
