//! C30: a model with a sliding window answers the same prompt alike each time, however the window
//! lies on the blocks, and whether its blocks are new, cached, or had to be evicted.

use crate::replica::{Models, Setup, work};
use dunlin_cpu::{CpuBackend, CpuOptions, Precision};
use dunlin_model::sampling::SamplingParams;
use std::path::Path;

const PROMPT: u32 = 1464;
const OUTPUT: u32 = 24;
/// Enough for one such request and little more: every other run evicts.
const BLOCKS: usize = 120;

fn prompt(seed: u32) -> Vec<u32> {
    (0..PROMPT).map(|i| 2 + (i * 7919 + seed * 131) % 500).collect()
}

/// The tiny model as Mistral writes it, with this window on all layers, or on every other one.
fn windowed(window: Option<u32>, mixed: bool) -> Models<CpuBackend> {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/tiny-llama");
    let folder = tempfile::tempdir().expect("a folder");
    for file in ["model.safetensors", "tokenizer.json", "tokenizer_config.json"] {
        std::fs::copy(source.join(file), folder.path().join(file)).expect("copied");
    }
    let text = std::fs::read_to_string(source.join("config.json")).expect("a config");
    let mut config: serde_json::Value = serde_json::from_str(&text).expect("JSON");
    config["model_type"] = "mistral".into();
    config["architectures"] = serde_json::json!(["MistralForCausalLM"]);
    config["max_position_embeddings"] = 4096.into();
    if let Some(window) = window {
        config["sliding_window"] = window.into();
    }
    if mixed {
        let (local, global) = ("sliding_attention", "full_attention");
        config["layer_types"] = serde_json::json!([local, global, local, global]);
    }
    std::fs::write(folder.path().join("config.json"), config.to_string()).expect("written");
    let options = CpuOptions { threads: 2, precision: Precision::Exact, kv: None, path: None };
    Models::open(CpuBackend::new(options).expect("a CPU"), folder.path())
}

#[test]
fn c30_a_sliding_window_gives_the_same_text_each_time() {
    let sampling = SamplingParams { logprobs: Some(10), ..SamplingParams::default() };
    let run = |replica: &mut crate::replica::Replica<CpuBackend>, id, seed| {
        let texts = replica.run(vec![work(id, prompt(seed), OUTPUT, &sampling)]);
        texts.into_values().next().expect("a text")
    };
    let setup = Setup { blocks: BLOCKS, chunk: 100, ..Setup::default() };
    let unlimited = run(&mut windowed(None, false).replica(&setup), 1, 0);
    // A window of four blocks, one token more, one less, and one that is no multiple at all.
    for (window, mixed) in [(64, false), (65, false), (63, true), (50, false), (64, true)] {
        let models = windowed(Some(window), mixed);
        let plain = Setup { blocks: BLOCKS, ..Setup::default() };
        let want = run(&mut models.replica(&plain), 1, 0);
        assert_ne!(want, unlimited, "a window of {window} changes nothing");
        let mut replica = models.replica(&setup);
        for id in 1..=4 {
            assert_eq!(run(&mut replica, id, 0), want, "run {id}, window {window}, mixed {mixed}");
            if id == 2 {
                // Takes the blocks of the first two runs.
                run(&mut replica, 99, 1);
            }
        }
        assert!(replica.load().prefix_hits_total > 1000, "no run was warm");
    }
}
