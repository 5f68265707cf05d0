//! A model described as data: what the forward pass needs to know about a checkpoint.
//!
//! Adding a family adds a way to fill a [`ModelSpec`], not a forward pass and not a backend.

use dunlin_backend::{Activation, RopeStyle};
use serde::{Deserialize, Serialize};

/// Model families, named as GGUF's `general.architecture` and Hugging Face's `model_type` do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Family {
    Llama,
    Qwen2,
    Qwen3,
    Gemma3,
    Mixtral,
}

/// Rotary frequencies before they are expanded to a table.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RopeSpec {
    pub style: RopeStyle,
    pub theta: f64,
    pub scaling: RopeScaling,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum RopeScaling {
    None,
    Linear {
        factor: f64,
    },
    Llama3 {
        factor: f64,
        low_freq_factor: f64,
        high_freq_factor: f64,
        original_context: usize,
    },
    /// `inv_freq[i] /= factors[i]`: GGUF's `rope_freqs.weight`, `head_dim / 2` values. It is how
    /// llama3 scaling is stored there.
    Factors(Vec<f32>),
}

/// Mixture-of-experts block in place of the dense feed-forward.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct MoeSpec {
    pub experts: usize,
    pub top_k: usize,
    pub normalise: bool,
    pub ffn: usize,
}

/// The shape and arithmetic of a decoder-only transformer.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ModelSpec {
    pub family: Family,
    pub layers: usize,
    pub hidden: usize,
    pub ffn: usize,
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    pub vocab: usize,
    pub context: usize,
    pub rms_eps: f32,
    pub activation: Activation,
    /// Embeddings are multiplied by this (sqrt(hidden) for gemma3, else 1).
    pub embed_scale: f32,
    /// Attention score scale (usually 1/sqrt(head_dim)).
    pub attention_scale: f32,
    /// Rope of global (full-attention) layers.
    pub rope: RopeSpec,
    /// Rope of local layers where it differs (gemma3).
    pub rope_local: Option<RopeSpec>,
    /// Sliding window of local layers, in tokens.
    pub window: Option<usize>,
    /// Every `n`-th layer (1-based) is global, the others local; `None`: all alike
    /// (all local if `window` is set, else all global).
    pub global_every: Option<usize>,
    pub qk_norm: bool,
    pub qkv_bias: bool,
    /// Norms after attention and feed-forward as well (gemma3).
    pub post_norms: bool,
    pub tied_head: bool,
    pub moe: Option<MoeSpec>,
    pub final_softcap: Option<f32>,
    pub attention_softcap: Option<f32>,
}

impl ModelSpec {
    /// Whether layer `layer` (0-based) attends through the sliding window.
    pub fn is_local(&self, layer: usize) -> bool {
        self.window.is_some() && self.global_every.is_none_or(|n| !(layer + 1).is_multiple_of(n))
    }
}
