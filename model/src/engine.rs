//! What a shard runs: one stage of a model over one batch. Two engines exist: the transformer
//! (generic over a [`dunlin_backend::Backend`]) and the hash engine, which stands in for it where
//! microseconds matter more than meaning.

use crate::sampling::{SamplingParams, TokenLogprob};
use dunlin_backend::BackendError;
use serde::{Deserialize, Serialize};
use std::ops::Range;
use std::time::Duration;

/// Which part of a model an engine holds.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StageSpec {
    /// Global layer range of this pipeline stage.
    pub layers: Range<usize>,
    /// The first stage embeds, the last one has the head and samples.
    pub first: bool,
    pub last: bool,
    /// Tensor-parallel rank and group size.
    pub rank: usize,
    pub ranks: usize,
    pub kv_blocks: usize,
    pub block_tokens: usize,
    /// The most tokens one batch may hold.
    pub max_tokens: usize,
}

impl StageSpec {
    /// A model of so many layers on one device, with room for `kv_blocks` of `block_tokens`
    /// tokens.
    pub fn whole(layers: usize, kv_blocks: usize, block_tokens: usize, max_tokens: usize) -> Self {
        let (first, last, rank, ranks) = (true, true, 0, 1);
        Self { layers: 0..layers, first, last, rank, ranks, kv_blocks, block_tokens, max_tokens }
    }
}

/// One sequence's share of a step.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct BatchSeq {
    /// Unique among live sequences of a replica; for messages and fault injection only.
    pub request: u64,
    /// Tokens to run, the first at `position`.
    pub tokens: Vec<u32>,
    pub position: u32,
    /// Block table covering `0 .. position + tokens.len()`.
    pub blocks: Vec<u32>,
    /// Draw a token after the last of `tokens`.
    pub sample: Option<SampleSpec>,
    /// Report the logprob of each of these tokens' successors inside the chunk (echo), and of
    /// the token at `position + tokens.len()` where the caller names it.
    pub prompt_logprobs: Option<PromptLogprobs>,
}

/// What the sampler needs beyond the logits.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct SampleSpec {
    pub params: SamplingParams,
    /// Prompt ids and output ids so far, only where `params.needs_history()`.
    pub prompt: Vec<u32>,
    pub output: Vec<u32>,
    /// Tokens that must not be drawn yet (min_tokens), usually empty.
    pub forbidden: Vec<u32>,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct PromptLogprobs {
    pub top: u32,
    /// The token after this chunk, if it is still prompt.
    pub next: Option<u32>,
}

/// The sequences of one micro-batch. The same value goes to every stage and rank.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct Batch {
    pub seqs: Vec<BatchSeq>,
    /// KV blocks to copy (from, to) before anything is written.
    pub copies: Vec<(u32, u32)>,
}

impl Batch {
    pub fn tokens(&self) -> usize {
        self.seqs.iter().map(|s| s.tokens.len()).sum()
    }
}

/// A drawn token, one per sequence with `sample` set, in batch order.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Sampled {
    pub request: u64,
    pub token: Result<u32, SampleFailure>,
    pub logprob: Option<TokenLogprob>,
    /// For `prompt_logprobs`: entry `i` is about the token at `position + i + 1`.
    pub prompt_logprobs: Vec<TokenLogprob>,
}

/// Why no token could be drawn. Never answered by drawing anyway.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum SampleFailure {
    /// A logit was NaN or infinite.
    NotFinite,
    /// So were the activations that the last stage was given: an earlier stage is the cause.
    NotFiniteInput,
    /// The batch asked only for prompt logprobs.
    NotAsked,
}

/// What a stage hands on.
#[derive(Debug, Clone, PartialEq)]
pub enum StageOutput {
    /// Activations `[tokens, hidden]`, float32, for the next stage.
    Hidden(Vec<f32>),
    /// The last stage's draws: sequences with `sample` or `prompt_logprobs`, in batch order.
    Sampled(Vec<Sampled>),
}

/// Collective operations among the tensor-parallel ranks of one stage. Every rank calls the same
/// operations in the same order; sums are taken in rank order, so all ranks hold the same bits.
pub trait Collective {
    /// Ranks in the group.
    fn size(&self) -> usize;
    fn all_reduce(&mut self, values: &mut [f32]) -> Result<(), CollectiveError>;
    /// Concatenates each rank's `[rows, cols_r]` along columns, on every rank.
    fn all_gather(&mut self, rows: usize, values: &[f32]) -> Result<Vec<f32>, CollectiveError>;
}

/// A rank did not answer in time, or disagreed about what is being reduced.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("collective with rank {rank} failed: {reason}")]
pub struct CollectiveError {
    pub rank: usize,
    pub reason: String,
}

/// The collective of a group of one.
pub struct Alone;

impl Collective for Alone {
    fn size(&self) -> usize {
        1
    }
    fn all_reduce(&mut self, _: &mut [f32]) -> Result<(), CollectiveError> {
        Ok(())
    }
    fn all_gather(&mut self, _: usize, values: &[f32]) -> Result<Vec<f32>, CollectiveError> {
        Ok(values.to_vec())
    }
}

/// Why a step failed. The whole batch is affected; nothing of it was delivered.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum EngineError {
    #[error(transparent)]
    Backend(#[from] BackendError),
    #[error(transparent)]
    Collective(#[from] CollectiveError),
    /// The batch does not fit the engine (shapes, block ids, token ids): a bug upstream.
    #[error("batch refused: {0}")]
    BadBatch(String),
    /// A block does not hold the tokens that a sequence's table says it does. Nothing was computed.
    #[error(
        "request {request}: block {block} holds {holds:016x} at position {position}, \
         the table claims {claims:016x}"
    )]
    Content { request: u64, block: u32, position: u32, holds: u64, claims: u64 },
    /// A weight in device memory is not what was loaded: load it again before anything is computed.
    #[error("weight '{tensor}' in the memory of {device} is {is:016x}, loaded was {was:016x}")]
    Weights { device: String, tensor: String, was: u64, is: u64 },
    #[error("this engine cannot {0}")]
    Unsupported(&'static str),
}

/// A bit that was flipped on purpose, read back from where it lies.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Flip {
    /// Where, for people.
    pub place: String,
    /// The word that holds the bit.
    pub before: u64,
    pub after: u64,
}

/// One stage (and rank) of a model on one device, with its KV store.
pub trait Engine: Send {
    fn stage(&self) -> &StageSpec;
    /// Width of the activations between stages.
    fn hidden(&self) -> usize;
    /// Runs one micro-batch. `input` is `None` on the first stage, else `[tokens, hidden]`.
    fn step(
        &mut self,
        batch: &Batch,
        input: Option<&[f32]>,
        group: &mut dyn Collective,
    ) -> Result<StageOutput, EngineError>;

    /// Announces the batch that the next [`Engine::step`] runs. `claims[i]` is the hash of what
    /// sequence `i`'s blocks hold below its position; empty where nobody checks. The answer is how
    /// long the caller must wait before that step: not zero only where a fault is injected.
    fn begin(&mut self, _step: u64, _batch: &Batch, _claims: &[u64]) -> Duration {
        Duration::ZERO
    }

    /// Does `work`, which tells of a step that is over, where it keeps this thread from the next step
    /// least: at once, or on another thread before the next step has run; in the order of calls.
    fn beside(&mut self, work: Box<dyn FnOnce() + Send>) {
        work();
    }

    /// Whether the weights in device memory are still what was loaded.
    fn verify(&self) -> Result<(), EngineError> {
        Ok(())
    }

    /// What was loaded: a hash over every matrix as it lies in device memory, and their bytes.
    /// `None` where nobody sums them up.
    fn weights(&self) -> Option<(u64, u64)> {
        None
    }

    /// Fault injection: flips bit `bit` (modulo its size) of the KV entry of local layer `layer` at
    /// `slot` of `block`.
    fn flip_kv(
        &mut self,
        _layer: usize,
        _block: u32,
        _slot: usize,
        _bit: u32,
    ) -> Result<Flip, EngineError> {
        Err(EngineError::Unsupported("flip a bit of its KV store"))
    }

    /// Fault injection: flips bit `bit` (modulo 32) of word `index` (modulo how many there are) of
    /// the weights as they lie in device memory.
    fn flip_weight(&mut self, _index: u64, _bit: u32) -> Result<Flip, EngineError> {
        Err(EngineError::Unsupported("flip a bit of its weights"))
    }

    /// Fault injection: the logits of this request are NaN in the next step.
    fn poison(&mut self, _request: u64) -> Result<(), EngineError> {
        Err(EngineError::Unsupported("spoil its logits"))
    }

    /// Fault injection: the device is gone, as if it had been unplugged. Every step fails from now on.
    fn lose(&mut self) -> Result<(), EngineError> {
        Err(EngineError::Unsupported("lose its device"))
    }

    /// Everything that a KV block holds, in the engine's own form.
    fn read_block(&self, _block: u32) -> Result<Vec<u8>, EngineError> {
        Err(EngineError::Unsupported("read a KV block"))
    }

    /// Puts back what [`Engine::read_block`] gave.
    fn write_block(&mut self, _block: u32, _content: &[u8]) -> Result<(), EngineError> {
        Err(EngineError::Unsupported("write a KV block"))
    }
}
