//! The goldens on a graphics adapter, software or not: wider bounds than the CPU's exact mode, whose
//! arithmetic it otherwise follows.

use crate::golden::{Golden, data, downloaded, steps_file, summary_file};
use crate::runner::{CHUNK, Runner, argmax, divergence};
use crate::{GEMMA3, MEAN_KL, SMOLLM2, compare_within, longest, rows};
use dunlin_backend::{KvDtype, Precision};
use dunlin_model::engine::Alone;
use dunlin_model::loader::ModelFiles;
use dunlin_wgpu::{Product, WgpuBackend, WgpuOptions};
use std::path::Path;

const LOGIT_BOUND: f32 = 2e-2;
const CLEAR_MARGIN: f32 = 0.05;

/// Of a few positions.
const FAST_AGREEMENT: f64 = 0.95;

fn adapter() -> WgpuBackend {
    opened(&WgpuOptions::default())
}

fn opened(options: &WgpuOptions) -> WgpuBackend {
    let id = std::env::var("DUNLIN_TEST_WGPU").unwrap_or_else(|_| "wgpu:0".into());
    WgpuBackend::open_with(&id, options)
        .unwrap_or_else(|e| panic!("{e}: run tools/test, which installs a software driver"))
}

#[test]
fn wgpu_matches_tiny_llama() {
    tiny("tiny-llama");
}

#[test]
fn wgpu_matches_tiny_mixtral() {
    tiny("tiny-mixtral");
}

#[test]
fn wgpu_matches_smollm2() {
    let file = data("golden/smollm2-135m-instruct-q4_1.logits.json");
    short_prompts(&downloaded(SMOLLM2), summary_file(&file), 40, 4);
}

/// Sliding windows, norms of heads and after blocks, Q4_K, Q5_0, Q6_K.
#[test]
fn wgpu_matches_gemma3() {
    let file = data("golden/gemma3-270m-q4_k_m.logits.json");
    short_prompts(&downloaded(GEMMA3), summary_file(&file), 30, 2);
}

/// Products of bytes, whatever the adapter would choose, and short types of KV.
#[test]
fn wgpu_fast_mode_stays_near_the_exact_one() {
    let model = ModelFiles::open(&downloaded(SMOLLM2)).expect("a model");
    let goldens = summary_file(&data("golden/smollm2-135m-instruct-q4_1.logits.json"));
    let short: Vec<Golden> = goldens.into_iter().filter(|g| g.prompt < 40).take(2).collect();
    let mut exact = Runner::new(adapter(), &model, longest(&short));
    let oracle: Vec<Vec<f32>> = short.iter().flat_map(|g| rows(&mut exact, g)).collect();
    for kv in [KvDtype::F16, KvDtype::Int8] {
        let options =
            WgpuOptions { precision: Precision::Fast, kv: Some(kv), ..Default::default() };
        let mut backend = opened(&options);
        backend.use_packed(Product::Rows(1, 4), Product::Rows(4, 4));
        let mut fast = Runner::new(backend, &model, longest(&short));
        let got = short.iter().flat_map(|g| rows(&mut fast, g));
        let (mut agreed, mut kl) = (0.0, 0.0);
        for (oracle, got) in oracle.iter().zip(got) {
            agreed += f64::from(u8::from(argmax(oracle) == argmax(&got)));
            kl += divergence(oracle, &got);
        }
        let (count, mean, share) =
            (oracle.len(), kl / oracle.len() as f64, agreed / oracle.len() as f64);
        println!("fast, {kv:?} KV: {count} positions, mean KL {mean:.5}, {share:.4} agree");
        assert!(count >= 30 && mean > 0.0, "{kv:?}: {count} positions, mean KL {mean}");
        assert!(mean <= MEAN_KL && share >= FAST_AGREEMENT, "{kv:?}: mean KL {mean}, {share}");
    }
}

#[test]
fn wgpu_gives_the_same_bits_for_any_chunks() {
    let model = ModelFiles::open(&downloaded(SMOLLM2)).expect("a model");
    let goldens = summary_file(&data("golden/smollm2-135m-instruct-q4_1.logits.json"));
    let long = goldens.iter().find(|g| g.name == "code_py").expect("a prompt of some length");
    const TOKENS: usize = 37;
    let mut runner = Runner::new(adapter(), &model, TOKENS);
    let mut bits = |chunk| -> Vec<Vec<u32>> {
        let rows = runner.logits_with(&long.ids[..TOKENS], TOKENS - 3, chunk, &mut Alone);
        rows.iter().map(|row| row.iter().map(|v| v.to_bits()).collect()).collect()
    };
    let want = bits(CHUNK);
    assert!(bits(1) == want, "token by token");
    assert!(bits(7) == want, "chunks of 7");
}

fn tiny(name: &str) {
    let goldens = steps_file(&data(name).join("golden.json"));
    check(&data(name), &goldens, 6);
}

fn short_prompts(model: &Path, goldens: Vec<Golden>, tokens: usize, least: usize) {
    let short: Vec<Golden> = goldens.into_iter().filter(|g| g.prompt < tokens).collect();
    check(model, &short, least);
}

fn check(model: &Path, goldens: &[Golden], least: usize) {
    assert!(goldens.len() >= least, "{} prompts", goldens.len());
    let model = ModelFiles::open(model).expect("a model");
    let mut runner = Runner::new(adapter(), &model, longest(goldens));
    for golden in goldens {
        compare_within(golden, &rows(&mut runner, golden), LOGIT_BOUND, CLEAR_MARGIN);
    }
}
