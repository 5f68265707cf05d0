//! What makes a replay bit-identical: whole real models give the same bits on every instruction
//! path, for any number of threads and any chunks.

use crate::golden::{data, downloaded, summary_file};
use crate::runner::{CHUNK, Runner};
use crate::{GEMMA3, SMOLLM2};
use dunlin_backend::Precision;
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

fn same_bits(model: &str, golden: &str, precision: Precision) {
    let model = ModelFiles::open(&downloaded(model)).expect("a model");
    let goldens = summary_file(&data(golden));
    let long = goldens.iter().find(|g| g.name == "code_py").expect("a prompt of some length");
    let ids = &long.ids[..TOKENS];
    let bits = |path, threads, chunk| -> Option<Vec<Vec<u32>>> {
        // A path that this processor lacks cannot be compared here.
        let options = CpuOptions { threads, precision, path };
        let backend = CpuBackend::new(options).ok()?;
        let rows =
            Runner::new(backend, &model, TOKENS).logits_with(ids, TOKENS - 5, chunk, &mut Alone);
        Some(rows.iter().map(|row| row.iter().map(|v| v.to_bits()).collect()).collect())
    };
    let want = bits(None, 2, CHUNK).expect("the default backend");
    assert_eq!(want.len(), 5);
    let mut compared = 0;
    for (path, threads, chunk) in [
        (None, 1, 1),
        (None, 3, 7),
        (Some(Path::Scalar), 2, CHUNK),
        (Some(Path::Avx2), 2, 5),
        (Some(Path::Avx512), 2, CHUNK),
    ] {
        let Some(got) = bits(path, threads, chunk) else { continue };
        compared += 1;
        assert!(got == want, "{precision:?}, {path:?}, {threads} threads, chunks of {chunk}");
    }
    assert!(compared >= 3, "the default and the scalar path run anywhere");
}
