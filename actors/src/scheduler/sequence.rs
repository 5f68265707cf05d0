//! One attempt at a request, as the scheduler sees it.

use crate::kv::{Chain, TableId};
use crate::messages::{Attempt, RequestId};
use dunlin_model::engine::{PromptLogprobs, SampleSpec};
use dunlin_model::sampling::{SamplingParams, TokenLogprob};
use std::time::Duration;

/// Place in the scheduler's slab of sequences.
pub type Slot = usize;

#[derive(Debug)]
pub struct Sequence {
    /// Rises with each submission; kept through preemption.
    pub arrival: u64,
    pub request: RequestId,
    pub attempt: Attempt,
    /// Account of its tenant.
    pub tenant: usize,
    /// Prompt, then output; all of them known.
    pub tokens: Vec<u32>,
    pub prompt_len: u32,
    /// It ends when it has this many tokens.
    pub limit: u32,
    pub min_tokens: u32,
    pub stop_tokens: Vec<u32>,
    pub sampling: SamplingParams,
    /// Logprobs of the prompt that are owed to the client.
    pub echo: Option<Echo>,
    pub suspect: bool,
    pub chain: Chain,
    /// From the first schedule; taken by the first report.
    pub cached_tokens: Option<u32>,
    pub submitted: Duration,
    pub scheduled: Option<Duration>,
    /// It drew a token under this attempt.
    pub moved: bool,
    pub phase: Phase,
}

#[derive(Debug)]
pub struct Echo {
    pub top: u32,
    pub entries: Vec<TokenLogprob>,
}

#[derive(Debug)]
pub enum Phase {
    Waiting(Queue),
    Running(Run),
    /// It has ended, and steps in flight still use its blocks. `trusted`: they may be hit later.
    Ending {
        run: Run,
        trusted: bool,
    },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Queue {
    /// Its tenant's line.
    Fresh,
    /// Preempted: before everyone fresh.
    Resumed,
    Suspect,
}

/// What a sequence with KV blocks has done. `computed <= planned <= known`.
#[derive(Debug, Clone, Copy)]
pub struct Run {
    pub table: TableId,
    pub computed: u32,
    pub planned: u32,
    /// Steps in flight that it is in.
    pub in_flight: u32,
    /// The last step it was planned in.
    pub last_step: u64,
}

impl Sequence {
    pub fn known(&self) -> u32 {
        self.tokens.len() as u32
    }

    pub fn output_len(&self) -> u32 {
        self.known() - self.prompt_len
    }

    pub fn run(&self) -> Option<&Run> {
        match &self.phase {
            Phase::Waiting(_) => None,
            Phase::Running(run) | Phase::Ending { run, .. } => Some(run),
        }
    }

    /// Of a sequence that runs and has not ended.
    pub fn running(&mut self) -> Option<&mut Run> {
        match &mut self.phase {
            Phase::Running(run) => Some(run),
            _ => None,
        }
    }

    /// Known tokens not yet in any step.
    pub fn unplanned(&self) -> u32 {
        self.known() - self.run().map_or(0, |run| run.planned)
    }

    /// The next token comes after the last known one is computed, unless it may have no more.
    pub fn draws_after(&self, upto: u32) -> bool {
        upto == self.known() && self.known() < self.limit
    }

    pub fn sample_spec(&self) -> SampleSpec {
        let (prompt, output) = match self.sampling.needs_history() {
            true => self.tokens.split_at(self.prompt_len as usize),
            false => (&[][..], &[][..]),
        };
        let early = self.output_len() < self.min_tokens;
        SampleSpec {
            params: self.sampling.clone(),
            prompt: prompt.to_vec(),
            output: output.to_vec(),
            forbidden: if early { self.stop_tokens.clone() } else { Vec::new() },
        }
    }

    /// Prompt logprobs to ask for with a chunk that ends before `upto`. While they are owed,
    /// there is no output yet, so every known token is of the prompt.
    pub fn echo_spec(&self, upto: u32) -> Option<PromptLogprobs> {
        let echo = self.echo.as_ref()?;
        Some(PromptLogprobs { top: echo.top, next: self.tokens.get(upto as usize).copied() })
    }
}
