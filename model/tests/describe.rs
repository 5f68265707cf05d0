//! Model descriptions from `config.json` and GGUF metadata, family by family.

mod common;

use common::gguf::Gguf;
use dunlin_backend::{Activation, RopeStyle};
use dunlin_model::describe::{from_config, from_gguf};
use dunlin_model::error::LoadError;
use dunlin_model::gguf;
use dunlin_model::spec::{Family, ModelSpec, RopeScaling};
use serde_json::{Value, json};
use std::path::Path;

fn config(json: Value) -> Result<ModelSpec, LoadError> {
    from_config(Path::new("config.json"), &json)
}

/// A valid configuration with `more` on top.
fn base(model_type: &str, more: Value) -> Value {
    let mut all = json!({
        "model_type": model_type, "num_hidden_layers": 12, "hidden_size": 64,
        "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2,
        "vocab_size": 100, "max_position_embeddings": 256, "rms_norm_eps": 1e-5
    });
    for (key, value) in more.as_object().unwrap() {
        all[key] = value.clone();
    }
    all
}

#[test]
fn llama_and_mistral() {
    let s = config(base("llama", json!({"rope_theta": 500000.0}))).unwrap();
    assert_eq!((s.family, s.head_dim, s.kv_heads), (Family::Llama, 16, 2));
    assert_eq!((s.rope.theta, s.rope.style), (500_000.0, RopeStyle::HalfSplit));
    assert_eq!((s.rope.scaling, s.window, s.tied_head), (RopeScaling::None, None, false));
    assert_eq!((s.activation, s.embed_scale, s.attention_scale), (Activation::Silu, 1.0, 0.25));
    let s = config(base("mistral", json!({"sliding_window": 32}))).unwrap();
    assert!((0..12).all(|l| s.is_local(l)) && s.window == Some(32));
    let s = config(base("mistral", json!({"sliding_window": null, "head_dim": 32}))).unwrap();
    assert_eq!((s.window, s.head_dim), (None, 32));
}

#[test]
fn rope_scaling_in_both_layouts() {
    let llama3 = json!({
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192, "rope_theta": 500000.0
    });
    let want = RopeScaling::Llama3 {
        factor: 8.0,
        low_freq_factor: 1.0,
        high_freq_factor: 4.0,
        original_context: 8192,
    };
    let old = base("llama", json!({"rope_theta": 500000.0, "rope_scaling": llama3}));
    let new = base("llama", json!({"rope_parameters": llama3}));
    for c in [old, new] {
        let s = config(c).unwrap();
        assert_eq!((s.rope.scaling, s.rope.theta), (want.clone(), 500_000.0));
    }
    let linear = json!({"rope_scaling": {"type": "linear", "factor": 4}});
    let s = config(base("llama", linear)).unwrap();
    assert_eq!(s.rope.scaling, RopeScaling::Linear { factor: 4.0 });
}

#[test]
fn qwen() {
    let more = json!({"sliding_window": 32, "use_sliding_window": false, "max_window_layers": 6});
    let s = config(base("qwen2", more)).unwrap();
    assert!(s.qkv_bias && !s.qk_norm && s.window.is_none());
    let s = config(base("qwen3", json!({"head_dim": 32, "attention_bias": false}))).unwrap();
    assert!(!s.qkv_bias && s.qk_norm);
    assert_eq!((s.head_dim, s.attention_scale), (32, 1.0 / 32f32.sqrt()));
}

#[test]
fn gemma3_in_both_layouts() {
    let types: Vec<&str> =
        (1..=12).map(|l| if l % 6 == 0 { "full_attention" } else { "sliding_attention" }).collect();
    let old = json!({
        "sliding_window": 512, "sliding_window_pattern": 6, "rope_theta": 1000000.0,
        "rope_local_base_freq": 10000.0, "query_pre_attn_scalar": 256, "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh", "rope_scaling": {"rope_type": "linear", "factor": 8.0}
    });
    let new = json!({
        "sliding_window": 512, "layer_types": types, "query_pre_attn_scalar": 256, "head_dim": 256,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0}
        }
    });
    for more in [old, new] {
        let s = config(base("gemma3_text", more)).unwrap();
        assert_eq!((s.window, s.global_every), (Some(512), Some(6)));
        assert!(s.is_local(0) && s.is_local(4) && !s.is_local(5));
        assert_eq!(s.rope.scaling, RopeScaling::Linear { factor: 8.0 });
        let local = s.rope_local.unwrap();
        assert_eq!((s.rope.theta, local.theta, local.scaling), (1e6, 1e4, RopeScaling::None));
        assert_eq!((s.activation, s.embed_scale), (Activation::GeluTanh, 8.0));
        assert_eq!(s.attention_scale, 1.0 / 16.0);
        assert!(s.qk_norm && s.post_norms && s.tied_head);
    }
}

#[test]
fn mixtral() {
    let more = json!({"num_local_experts": 8, "num_experts_per_tok": 2});
    let s = config(base("mixtral", more)).unwrap();
    let moe = s.moe.unwrap();
    assert_eq!((moe.experts, moe.top_k, moe.ffn, moe.normalise), (8, 2, 128, true));
}

#[test]
fn what_cannot_be_run_is_refused_by_name() {
    for (more, word) in [
        (json!({"model_type": "mamba"}), "'mamba' is not supported; supported are llama"),
        (json!({"attention_bias": true}), "attention_bias"),
        (json!({"quantization_config": {"bits": 4}}), "quantization_config"),
        (json!({"rope_scaling": {"rope_type": "yarn"}}), "yarn"),
        (json!({"rope_scaling": {"rope_type": "linear", "factor": 0.0}}), "rope_scaling"),
        (json!({"rope_scaling": {"rope_type": "linear"}}), "factor"),
        (json!({"rope_scaling": []}), "must be an object"),
        (json!({"hidden_act": "relu"}), "relu"),
        (json!({"hidden_size": "64"}), "'hidden_size' must be a whole number, is \"64\""),
        (json!({"hidden_size": -64}), "hidden_size"),
        (json!({"hidden_size": null}), "'hidden_size' is missing"),
        (json!({"vocab_size": 1u64 << 40}), "vocab_size"),
        (json!({"num_attention_heads": 0}), "num_attention_heads"),
        (json!({"num_key_value_heads": 3}), "num_key_value_heads"),
        (json!({"head_dim": 7}), "must be even"),
        (json!({"rms_norm_eps": 2.0}), "rms_norm_eps"),
        (json!({"rope_theta": 0.0}), "rope_theta"),
        (json!({"sliding_window": 8, "layer_types": ["full_attention"]}), "layer_types"),
    ] {
        let error = config(base("llama", more)).unwrap_err().to_string();
        assert!(error.contains(word) && error.contains("config.json"), "{error}: {word}");
    }
    let split = json!({"sliding_window": 8, "use_sliding_window": true, "max_window_layers": 6});
    let error = config(base("qwen2", split)).unwrap_err().to_string();
    assert!(error.contains("max_window_layers"), "{error}");
}

fn metadata(arch: &str, change: impl Fn(Gguf) -> Gguf) -> ModelSpec {
    try_metadata(arch, change).unwrap()
}

fn try_metadata(arch: &str, change: impl Fn(Gguf) -> Gguf) -> Result<ModelSpec, LoadError> {
    let key = |k: &str| format!("{arch}.{k}");
    let file = Gguf::new()
        .str("general.architecture", arch)
        .u32(&key("block_count"), 12)
        .u32(&key("context_length"), 256)
        .u32(&key("embedding_length"), 64)
        .u32(&key("feed_forward_length"), 128)
        .u32(&key("attention.head_count"), 4)
        .u32(&key("attention.head_count_kv"), 2)
        .f32(&key("attention.layer_norm_rms_epsilon"), 1e-5)
        .tensor("token_embd.weight", &[64, 10]);
    let bytes = change(file).build();
    from_gguf(&gguf::Gguf::parse(Path::new("m.gguf"), bytes.into())?)
}

#[test]
fn gguf_families() {
    let s = metadata("llama", |g| g.tensor("output.weight", &[64, 10]));
    assert_eq!((s.family, s.rope.style), (Family::Llama, RopeStyle::Interleaved));
    assert!(!s.tied_head && s.vocab == 10);
    let s = metadata("llama", |g| g.u32("llama.expert_count", 8).u32("llama.expert_used_count", 2));
    assert_eq!((s.family, s.moe.unwrap().top_k), (Family::Mixtral, 2));
    let s = metadata("qwen2", |g| g);
    assert!(s.qkv_bias && s.tied_head && s.rope.style == RopeStyle::HalfSplit);
    let s = metadata("qwen3", |g| g.u32("qwen3.attention.key_length", 32));
    assert!(s.qk_norm && s.head_dim == 32);
    let s = metadata("gemma3", |g| g.u32("gemma3.attention.sliding_window", 512));
    assert_eq!((s.window, s.global_every), (Some(512), Some(6)));
    assert_eq!(s.rope_local.unwrap().theta, 10_000.0);
}

#[test]
fn gguf_rope_scaling() {
    let s = metadata("llama", |g| {
        g.str("llama.rope.scaling.type", "linear").f32("llama.rope.scaling.factor", 4.0)
    });
    assert_eq!(s.rope.scaling, RopeScaling::Linear { factor: 4.0 });
    // Llama 3: a table of divisors. The test's tensor counts from 0, which no divisor may be.
    let table = |offset: f32| {
        move |g: Gguf| {
            let mut g = g.tensor("rope_freqs.weight", &[8]);
            let last = g.tensors.last_mut().unwrap();
            last.data = (0..8).flat_map(|i| (i as f32 + offset).to_le_bytes()).collect();
            g
        }
    };
    let s = metadata("llama", table(1.0));
    assert_eq!(s.rope.scaling, RopeScaling::Factors((1..=8).map(|i| i as f32).collect()));
    let error = try_metadata("llama", table(0.0)).unwrap_err().to_string();
    assert!(error.contains("rope.scaling"), "{error}");
}
