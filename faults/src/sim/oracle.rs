//! The undisturbed answer: the hash engine alone, on one device, token by token.

use crate::resolved::RequestSpec;
use dunlin_model::engine::{Alone, Batch, BatchSeq, Engine, SampleSpec, StageOutput, StageSpec};
use dunlin_model::hash_engine::{HashEngine, HashSpec};
use dunlin_model::sampling::SamplingParams;

const BLOCK_TOKENS: usize = 16;

/// As the router gets it.
pub fn sampling(request: &RequestSpec) -> SamplingParams {
    let (temperature, seed) = (request.temperature as f32, request.seed);
    SamplingParams { temperature, seed, ..SamplingParams::default() }
}

/// Empty where the request cannot be run at all.
pub fn answer(spec: &HashSpec, request: &RequestSpec) -> Vec<u32> {
    complete(spec, request).unwrap_or_default()
}

fn complete(spec: &HashSpec, request: &RequestSpec) -> Option<Vec<u32>> {
    let total = request.prompt.len() + request.max_tokens as usize;
    if request.prompt.is_empty() || total > spec.context {
        return None;
    }
    let blocks = total.div_ceil(BLOCK_TOKENS);
    let stage = StageSpec::whole(spec.layers, blocks, BLOCK_TOKENS, total);
    let mut free = spec.clone();
    (free.step_cost, free.token_cost) = Default::default();
    let mut engine = HashEngine::new(free, stage).ok()?;
    let (mut tokens, mut position) = (request.prompt.clone(), 0);
    let mut output = Vec::with_capacity(request.max_tokens as usize);
    while output.len() < request.max_tokens as usize {
        let sample = SampleSpec {
            params: sampling(request),
            prompt: Vec::new(),
            output: Vec::new(),
            forbidden: Vec::new(),
        };
        let next = position + tokens.len() as u32;
        let seq = BatchSeq {
            request: 1,
            tokens: std::mem::take(&mut tokens),
            position,
            blocks: (0..blocks as u32).collect(),
            sample: Some(sample),
            prompt_logprobs: None,
        };
        let batch = Batch { seqs: vec![seq], copies: Vec::new() };
        let StageOutput::Sampled(drawn) = engine.step(&batch, None, &mut Alone).ok()? else {
            return None;
        };
        let token = drawn.into_iter().next()?.token.ok()?;
        output.push(token);
        (tokens, position) = (vec![token], next);
    }
    Some(output)
}
