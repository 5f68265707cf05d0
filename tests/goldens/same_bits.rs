//! What makes a replay bit-identical: whole real models give the same bits on every instruction
//! path, for any number of threads and any chunks.

use crate::golden::{data, downloaded, summary_file};
use crate::runner::{CHUNK, Runner};
use crate::{GEMMA3, SMOLLM2};
use dunlin_backend::{KvDtype, Precision};
use dunlin_cpu::{CpuBackend, CpuOptions, Path};
use dunlin_model::engine::Alone;
use dunlin_model::loader::ModelFiles;

/// Tokens of the sequence: more than one KV tile, and short enough for plain loops.
const TOKENS: usize = 37;

#[test]
fn smollm2_gives_the_same_bits_on_every_path() {
    let golden = "golden/smollm2-135m-instruct-q4_1.logits.json";
    same_bits(SMOLLM2, golden, Precision::Fast);
    same_bits(SMOLLM2, golden, Precision::Exact);
}

#[test]
fn gemma3_gives_the_same_bits_on_every_path() {
    same_bits(GEMMA3, "golden/gemma3-270m-q4_k_m.logits.json", Precision::Fast);
}

/// Every type of KV, on every path.
#[test]
fn int8_and_float32_kv_give_the_same_bits_on_every_path() {
    let golden = "golden/smollm2-135m-instruct-q4_1.logits.json";
    same_bits_with(SMOLLM2, golden, Precision::Fast, Some(KvDtype::Int8));
    same_bits_with(SMOLLM2, golden, Precision::Fast, Some(KvDtype::F32));
}

fn same_bits(model: &str, golden: &str, precision: Precision) {
    same_bits_with(model, golden, precision, None);
}

fn same_bits_with(model: &str, golden: &str, precision: Precision, kv: Option<KvDtype>) {
    let model = ModelFiles::open(&downloaded(model)).expect("a model");
    let goldens = summary_file(&data(golden));
    let long = goldens.iter().find(|g| g.name == "code_py").expect("a prompt of some length");
    let ids = &long.ids[..TOKENS];
    let bits = |path, threads, chunk| -> Vec<Vec<u32>> {
        let options = CpuOptions { threads, precision, kv, path };
        let backend = CpuBackend::new(options).expect("a path of this machine");
        let rows =
            Runner::new(backend, &model, TOKENS).logits_with(ids, TOKENS - 5, chunk, &mut Alone);
        rows.iter().map(|row| row.iter().map(|v| v.to_bits()).collect()).collect()
    };
    let want = bits(None, 2, CHUNK);
    assert_eq!(want.len(), 5);
    let cuts = [(None, 1, 1), (None, 3, 7)];
    let every = Path::here().zip([CHUNK, 5, 9, 16]).map(|(path, chunk)| (Some(path), 2, chunk));
    for (path, threads, chunk) in cuts.into_iter().chain(every) {
        let got = bits(path, threads, chunk);
        assert!(got == want, "{precision:?}, {path:?}, {threads} threads, chunks of {chunk}");
    }
}
