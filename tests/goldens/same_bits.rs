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

/// The start of it on the paths with instructions of their own: little enough for an emulated
/// processor (`tools/amx_emulated`). Two whole tiles of rows and one row more, then three rows.
#[test]
fn smollm2_starts_with_the_same_bits_on_every_vector_path() {
    let model = ModelFiles::open(&downloaded(SMOLLM2)).expect("a model");
    let ids = &prompt("golden/smollm2-135m-instruct-q4_1.logits.json")[..20];
    let of = |path| {
        let precision = Precision::Fast;
        bits(&model, ids, CpuOptions { threads: 1, precision, kv: None, path: Some(path) }, 17)
    };
    let mut paths = Path::here().filter(|path| *path != Path::Scalar);
    let Some(first) = paths.next() else { return };
    let want = of(first);
    for path in paths {
        println!("{} beside {}", path.name(), first.name());
        assert!(of(path) == want, "{path:?} beside {first:?}");
    }
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
    let ids = &prompt(golden)[..TOKENS];
    let of = |path, threads, chunk| {
        bits(&model, ids, CpuOptions { threads, precision, kv, path }, chunk)
    };
    let want = of(None, 2, CHUNK);
    let cuts = [(None, 1, 1), (None, 3, 7)];
    let every = Path::here().zip([CHUNK, 5, 9, 16]).map(|(path, chunk)| (Some(path), 2, chunk));
    for (path, threads, chunk) in cuts.into_iter().chain(every) {
        let got = of(path, threads, chunk);
        assert!(got == want, "{precision:?}, {path:?}, {threads} threads, chunks of {chunk}");
    }
}

/// The ids of a prompt of some length.
fn prompt(golden: &str) -> Vec<u32> {
    let goldens = summary_file(&data(golden));
    goldens.into_iter().find(|g| g.name == "code_py").expect("a prompt of some length").ids
}

/// Logits of the last five positions.
fn bits(model: &ModelFiles, ids: &[u32], options: CpuOptions, chunk: usize) -> Vec<Vec<u32>> {
    let backend = CpuBackend::new(options).expect("a path of this machine");
    let rows =
        Runner::new(backend, model, ids.len()).logits_with(ids, ids.len() - 5, chunk, &mut Alone);
    assert_eq!(rows.len(), 5);
    rows.iter().map(|row| row.iter().map(|v| v.to_bits()).collect()).collect()
}
