//! Sampling parameters and their outcome. The sampler itself lives beside them.

use serde::{Deserialize, Serialize};

/// How the next token is drawn. Every field is already validated and defaulted; `seed` is fixed
/// when a request is accepted, so that any replay draws the same tokens.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct SamplingParams {
    /// 0 is greedy.
    pub temperature: f32,
    /// 0 is off.
    pub top_k: u32,
    /// 1 is off.
    pub top_p: f32,
    /// 0 is off.
    pub min_p: f32,
    /// 1 is off. Applies to prompt and output (CTRL paper).
    pub repetition_penalty: f32,
    /// OpenAI's, over output tokens only; 0 is off.
    pub presence_penalty: f32,
    pub frequency_penalty: f32,
    pub logit_bias: Vec<(u32, f32)>,
    pub seed: u64,
    /// How many alternatives to report per position; `None`: no logprobs at all.
    pub logprobs: Option<u32>,
}

impl Default for SamplingParams {
    fn default() -> Self {
        Self {
            temperature: 0.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            repetition_penalty: 1.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            logit_bias: Vec::new(),
            seed: 0,
            logprobs: None,
        }
    }
}

impl SamplingParams {
    /// Whether drawing a token needs the tokens before it.
    pub fn needs_history(&self) -> bool {
        self.repetition_penalty != 1.0
            || self.presence_penalty != 0.0
            || self.frequency_penalty != 0.0
    }
}

/// Natural-log probability of a token, with the most likely alternatives (descending).
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TokenLogprob {
    pub logprob: f32,
    pub top: Vec<(u32, f32)>,
}
