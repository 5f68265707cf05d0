//! One attempt at a request, as the scheduler sees it.

use crate::kv::{Chain, TableId};
use crate::messages::{Attempt, ReplicaEpoch, RequestId};
use dunlin_model::engine::{PromptLogprobs, SampleSpec};
use dunlin_model::sampling::{SamplingParams, TokenLogprob};
use dunlin_runtime::mutated;
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
    pub claim: Claim,
    /// From the first schedule; taken by the first report.
    pub cached_tokens: Option<u32>,
    pub submitted: Duration,
    pub scheduled: Option<Duration>,
    /// It drew a token under this attempt.
    pub moved: bool,
    pub phase: Phase,
}

/// A running hash over a sequence's tokens: what its blocks must hold below a position. It begins
/// with replica epoch, tenant and salt, so that no block of another scope or life passes for one of
/// this. Shards compute it along with what they write (`shard::checked`) and compare before they
/// read.
#[derive(Debug, Clone, Copy)]
pub struct Claim {
    seed: u64,
    upto: u32,
    hash: u64,
}

impl Claim {
    pub fn new(epoch: ReplicaEpoch, tenant: &str, salt: &str) -> Self {
        let mut hash = blake3::Hasher::new();
        hash.update(&epoch.0.to_le_bytes());
        for text in [tenant, salt] {
            hash.update(&(text.len() as u64).to_le_bytes()).update(text.as_bytes());
        }
        let mut first = [0; 8];
        first.copy_from_slice(&hash.finalize().as_bytes()[..8]);
        let seed = u64::from_le_bytes(first);
        Self { seed, upto: 0, hash: seed }
    }

    /// The hash over `tokens[..upto]`; costs what is new since the last call.
    pub fn at(&mut self, tokens: &[u32], upto: u32) -> u64 {
        if upto < self.upto {
            (self.upto, self.hash) = (0, self.seed);
        }
        let new = tokens.get(self.upto as usize..upto as usize).unwrap_or_default();
        self.hash = new.iter().fold(self.hash, |hash, token| claim_step(hash, *token));
        self.upto = upto;
        self.hash
    }
}

/// One more token: the finaliser of SplitMix64 over both (Steele, Lea, Flood 2014).
pub fn claim_step(hash: u64, token: u32) -> u64 {
    let z = (hash ^ (u64::from(token) + 1)).wrapping_add(0x9e37_79b9_7f4a_7c15);
    let z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
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

/// What a sequence with KV blocks has done. `computed <= planned <= known`, or one more than known
/// while the token after those is being drawn.
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
        self.known().saturating_sub(self.run().map_or(0, |run| run.planned))
    }

    /// The next token comes after the last known one is computed, unless it may have no more.
    pub fn draws_after(&self, upto: u32) -> bool {
        upto == self.known() && self.known() < self.limit
    }

    /// `coming`: one more token will have been drawn by then; the shard adds it to the history.
    pub fn sample_spec(&self, coming: bool) -> SampleSpec {
        let (prompt, output) = match self.sampling.needs_history() {
            true => self.tokens.split_at(self.prompt_len as usize),
            false => (&[][..], &[][..]),
        };
        let early = self.output_len() + u32::from(coming) < self.min_tokens;
        let mut params = self.sampling.clone();
        if mutated("attempt-seed") {
            params.seed += u64::from(self.attempt.0);
        }
        SampleSpec {
            params,
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
