//! A whole replica in one thread: engines in a row, one sequence or several through them.

use dunlin_model::engine::{
    Batch, BatchSeq, Collective, Engine, PromptLogprobs, SampleSpec, Sampled, StageOutput,
    StageSpec,
};
use dunlin_model::sampling::{SamplingParams, TokenLogprob};
use std::ops::Range;

pub const BLOCK_TOKENS: usize = 16;
pub const BLOCKS: usize = 40;
pub const MAX_TOKENS: usize = 160;

/// `layers` of a model of `all` layers.
pub fn stage(layers: Range<usize>, all: usize, rank: usize, ranks: usize) -> StageSpec {
    StageSpec {
        first: layers.start == 0,
        last: layers.end == all,
        layers,
        rank,
        ranks,
        kv_blocks: BLOCKS,
        block_tokens: BLOCK_TOKENS,
        max_tokens: MAX_TOKENS,
    }
}

/// Layer ranges of a pipeline of `stages`.
pub fn cuts(layers: usize, stages: usize) -> Vec<Range<usize>> {
    let begin = |i: usize| i * layers / stages;
    (0..stages).map(|i| begin(i)..begin(i + 1)).collect()
}

/// A chunk that asks for everything there is to see: logprobs of each token and a draw.
pub fn seq(request: u64, tokens: &[u32], position: usize, blocks: &[u32]) -> BatchSeq {
    let params =
        SamplingParams { temperature: 0.7, seed: 5, logprobs: Some(3), ..Default::default() };
    BatchSeq {
        request,
        tokens: tokens.to_vec(),
        position: position as u32,
        blocks: blocks.to_vec(),
        sample: Some(SampleSpec { params, prompt: vec![], output: vec![], forbidden: vec![] }),
        prompt_logprobs: Some(PromptLogprobs { top: 4, next: None }),
    }
}

/// Runs one batch through a pipeline. Ranks other than the first draw nothing.
pub fn step<E: Engine>(
    stages: &mut [E],
    batch: &Batch,
    group: &mut dyn Collective,
) -> Vec<Sampled> {
    let mut input: Option<Vec<f32>> = None;
    for engine in stages {
        match engine.step(batch, input.as_deref(), group).expect("a step") {
            StageOutput::Hidden(values) => input = Some(values),
            StageOutput::Sampled(sampled) => return sampled,
        }
    }
    panic!("no last stage")
}

/// What a sequence looked like from outside.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Seen {
    pub tokens: Vec<u32>,
    pub logprobs: Vec<TokenLogprob>,
}

impl Seen {
    pub fn note(&mut self, sampled: &Sampled) {
        self.tokens.push(sampled.token.expect("a token"));
        self.logprobs.extend(sampled.logprob.clone());
        self.logprobs.extend(sampled.prompt_logprobs.clone());
    }
}

/// Prompt in chunks, then `count` tokens one by one, each alone in its batch.
///
/// Only the last chunk's draw counts. Logprobs of prompt tokens across a chunk's end need the
/// next token, which is given.
pub fn generate<E: Engine>(
    stages: &mut [E],
    prompt: &[u32],
    chunk: usize,
    blocks: &[u32],
    count: usize,
    group: &mut dyn Collective,
) -> Seen {
    let mut seen = Seen::default();
    for (index, part) in prompt.chunks(chunk).enumerate() {
        let position = index * chunk;
        let next = prompt.get(position + part.len()).copied();
        let mut asked = seq(1, part, position, blocks);
        asked.prompt_logprobs = Some(PromptLogprobs { top: 4, next });
        if next.is_some() {
            asked.sample = None;
        }
        let batch = Batch { seqs: vec![asked], copies: vec![] };
        for sampled in step(stages, &batch, group) {
            match next {
                Some(_) => seen.logprobs.extend(sampled.prompt_logprobs),
                None => {
                    seen.logprobs.extend(sampled.prompt_logprobs.clone());
                    seen.tokens.push(sampled.token.expect("a token"));
                    seen.logprobs.extend(sampled.logprob);
                }
            }
        }
    }
    for position in (prompt.len()..).take(count) {
        // Ranks that draw nothing feed what rank 0 drew, as the scheduler would tell them.
        let token = forced(prompt, position);
        let batch = Batch { seqs: vec![seq(1, &[token], position, blocks)], copies: vec![] };
        step(stages, &batch, group).iter().for_each(|s| seen.note(s));
    }
    seen
}

/// Generation is teacher-forced, so that one early difference cannot hide behind another text.
pub fn forced(prompt: &[u32], position: usize) -> u32 {
    (prompt[position % prompt.len()] * 7 + position as u32) % 101
}
