//! The forward pass against outputs of Hugging Face transformers (float32), teacher-forced: the
//! golden ids are fed, and at every generated position our logits are compared with the golden's.
//!
//! Bounds. Exact: each of the ten golden logits within [`LOGIT_BOUND`], and the same likeliest
//! token wherever the golden's margin is above [`CLEAR_MARGIN`] (float32 itself is only good to
//! some 1e-4 here). Fast against exact, over the same positions: mean KL divergence at most
//! [`MEAN_KL`] nats, the same likeliest token in at least [`AGREEMENT`] of them ([`INT8_AGREEMENT`]
//! with int8 KV).
//!
//! The models are fetched by `tools/test`; the tiny ones lie in `tests/data`. How the goldens were
//! made: `tools/make_fixtures.py` and the `meta` of each file.

mod golden;
#[path = "../../model/tests/passes/group.rs"]
mod group;
mod runner;
mod same_bits;
mod wgpu;

use dunlin_backend::{Backend, KvDtype, Precision, Reference};
use dunlin_cpu::{CpuBackend, CpuOptions};
use dunlin_model::loader::ModelFiles;
use golden::{Golden, data, downloaded, steps_file, summary_file};
use runner::{CHUNK, Runner, argmax, divergence};

const SMOLLM2: &str = "SmolLM2-135M-Instruct.Q4_1.gguf";
const GEMMA3: &str = "gemma-3-270m-q4_k_m.gguf";

const LOGIT_BOUND: f32 = 5e-3;
const CLEAR_MARGIN: f32 = 0.01;
const MEAN_KL: f64 = 0.01;
const AGREEMENT: f64 = 0.97;
/// Of int8 KV, which nobody gets who did not ask for it.
const INT8_AGREEMENT: f64 = 0.95;

fn cpu(precision: Precision) -> CpuBackend {
    CpuBackend::new(CpuOptions { precision, ..CpuOptions::default() }).expect("a CPU backend")
}

#[test]
fn reference_matches_tiny_llama() {
    tiny("tiny-llama", Reference);
}

#[test]
fn reference_matches_tiny_mixtral() {
    tiny("tiny-mixtral", Reference);
}

#[test]
fn cpu_matches_tiny_llama() {
    tiny("tiny-llama", cpu(Precision::Exact));
}

#[test]
fn cpu_matches_tiny_mixtral() {
    tiny("tiny-mixtral", cpu(Precision::Exact));
}

#[test]
fn cpu_matches_smollm2() {
    let model = ModelFiles::open(&downloaded(SMOLLM2)).expect("a model");
    let mut goldens = steps_file(&data("golden/smollm2-135m-instruct-q4_1.steps.json"));
    goldens.extend(summary_file(&data("golden/smollm2-135m-instruct-q4_1.logits.json")));
    exact_and_fast(&model, &goldens);
}

#[test]
fn cpu_matches_gemma3() {
    let model = ModelFiles::open(&downloaded(GEMMA3)).expect("a model");
    let goldens = summary_file(&data("golden/gemma3-270m-q4_k_m.logits.json"));
    exact_and_fast(&model, &goldens);
}

/// Three ranks with a third of the heads, the feed-forward and the vocabulary each: slices of
/// quantised rows and columns.
#[test]
fn three_ranks_match_smollm2() {
    ranks_match_smollm2(3);
}

/// Two ranks: 6 heads and 2 KV heads on the one, 3 and 1 on the other.
#[test]
fn two_uneven_ranks_match_smollm2() {
    ranks_match_smollm2(2);
}

fn ranks_match_smollm2(ranks: usize) {
    let model = ModelFiles::open(&downloaded(SMOLLM2)).expect("a model");
    let all = summary_file(&data("golden/smollm2-135m-instruct-q4_1.logits.json"));
    let some: Vec<&Golden> = all.iter().filter(|g| g.prompt < 60).collect();
    assert!(some.len() >= 4, "{} short prompts", some.len());
    std::thread::scope(|scope| {
        for (rank, mut member) in group::group(ranks).into_iter().enumerate() {
            let (model, some) = (&model, &some);
            scope.spawn(move || {
                let options =
                    CpuOptions { threads: 1, precision: Precision::Exact, kv: None, path: None };
                let backend = CpuBackend::new(options).expect("a CPU backend");
                let mut runner = Runner::rank(backend, model, 128, rank, ranks);
                for golden in some {
                    let fed = &golden.ids[..golden.ids.len() - 1];
                    let rows = runner.logits_with(fed, golden.prompt - 1, CHUNK, &mut member);
                    compare(golden, &rows);
                }
            });
        }
    });
}

fn tiny<B: Backend>(name: &str, backend: B) {
    let model = ModelFiles::open(&data(name)).expect("a model");
    let goldens = steps_file(&data(name).join("golden.json"));
    assert!(goldens.len() >= 6, "{name} has {} prompts", goldens.len());
    let mut runner = Runner::new(backend, &model, longest(&goldens));
    for golden in &goldens {
        compare(golden, &rows(&mut runner, golden));
    }
}

/// Holds the exact mode to the goldens, and the fast mode, with each type of KV, to the exact one.
fn exact_and_fast(model: &ModelFiles, goldens: &[Golden]) {
    assert!(goldens.len() >= 12, "{} prompts", goldens.len());
    let mut exact = Runner::new(cpu(Precision::Exact), model, longest(goldens));
    let mut fast = KvDtype::ALL.map(|kv| {
        let options = CpuOptions { kv: Some(kv), ..CpuOptions::default() };
        Runner::new(CpuBackend::new(options).expect("a CPU backend"), model, longest(goldens))
    });
    let (mut count, mut agreed, mut kl) = (0, [0; 3], [0.0; 3]);
    for golden in goldens {
        let oracle = rows(&mut exact, golden);
        compare(golden, &oracle);
        count += oracle.len();
        for (i, fast) in fast.iter_mut().enumerate() {
            for (oracle, fast) in oracle.iter().zip(rows(fast, golden)) {
                agreed[i] += usize::from(argmax(oracle) == argmax(&fast));
                kl[i] += divergence(oracle, &fast);
            }
        }
    }
    for (i, kv) in KvDtype::ALL.into_iter().enumerate() {
        let (mean, share) = (kl[i] / count as f64, agreed[i] as f64 / count as f64);
        println!("fast, {kv:?} KV: {count} positions, mean KL {mean:.5}, {share:.4} agree");
        assert!(mean <= MEAN_KL, "{kv:?}: mean KL {mean} over {count} positions");
        let bound = if kv == KvDtype::Int8 { INT8_AGREEMENT } else { AGREEMENT };
        assert!(share >= bound, "{kv:?}: the same token in {share} of {count} positions");
    }
}

fn longest(goldens: &[Golden]) -> usize {
    goldens.iter().map(|g| g.ids.len()).max().expect("a golden")
}

/// Logits at every generated position.
fn rows<B: Backend>(runner: &mut Runner<B>, golden: &Golden) -> Vec<Vec<f32>> {
    let fed = &golden.ids[..golden.ids.len() - 1];
    let rows = runner.logits(fed, golden.prompt - 1);
    assert_eq!(rows.len(), golden.drawn().len());
    rows
}

fn compare(golden: &Golden, rows: &[Vec<f32>]) {
    compare_within(golden, rows, LOGIT_BOUND, CLEAR_MARGIN);
}

fn compare_within(golden: &Golden, rows: &[Vec<f32>], bound: f32, clear_margin: f32) {
    let mut worst = 0.0f32;
    for (&step, top) in &golden.tops {
        for &(id, want) in top {
            let got = rows[step][id as usize];
            worst = worst.max((got - want).abs());
            assert!(
                (got - want).abs() <= bound,
                "{}: step {step}, token {id}: logit {got}, golden {want}",
                golden.name
            );
        }
    }
    let mut clear = 0;
    for (step, (&token, &margin)) in golden.drawn().iter().zip(&golden.margins).enumerate() {
        if margin > clear_margin {
            clear += 1;
            let got = argmax(&rows[step]);
            assert_eq!(got, token, "{}: step {step}, margin {margin}", golden.name);
        }
    }
    println!(
        "{}: {} logits, worst {worst:.5}; {clear} of {} tokens clear",
        golden.name,
        golden.tops.values().map(Vec::len).sum::<usize>(),
        rows.len()
    );
}
