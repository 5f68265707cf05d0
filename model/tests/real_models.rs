//! The real models: their files open, and describe what their papers say.

mod common;

use common::{gemma, smollm2};
use dunlin_model::loader::ModelFiles;
use dunlin_model::spec::Family;

#[test]
fn smollm2_is_described_from_its_metadata() {
    let model = ModelFiles::open(&smollm2()).unwrap();
    let s = model.spec();
    assert_eq!(s.family, Family::Llama);
    assert_eq!((s.layers, s.hidden, s.ffn, s.vocab), (30, 576, 1536, 49152));
    assert_eq!((s.heads, s.kv_heads, s.head_dim, s.context), (9, 3, 64, 8192));
    assert_eq!(s.rope.theta, 100_000.0);
    assert_eq!(s.attention_scale, 0.125);
    assert!(s.tied_head && !s.qk_norm && !s.qkv_bias && s.moe.is_none());
    assert_eq!(model.tensor("token_embd.weight").unwrap().rows, 49152);
    assert_eq!(
        model.weights_sha256(),
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
    );
    assert_eq!(model.model_hash(), ModelFiles::open(&smollm2()).unwrap().model_hash());
}

#[test]
fn gemma3_is_described_with_what_its_file_leaves_out() {
    let model = ModelFiles::open(&gemma()).unwrap();
    let s = model.spec();
    assert_eq!(s.family, Family::Gemma3);
    assert_eq!((s.layers, s.hidden, s.ffn, s.vocab), (18, 640, 2048, 262_144));
    assert_eq!((s.heads, s.kv_heads, s.head_dim, s.context), (4, 1, 256, 32768));
    assert_eq!((s.window, s.global_every), (Some(512), Some(6)));
    assert_eq!((s.rope.theta, s.rope_local.as_ref().unwrap().theta), (1e6, 1e4));
    assert!(s.qk_norm && s.post_norms && s.tied_head);
    assert_eq!(s.embed_scale, 640f32.sqrt());
}
