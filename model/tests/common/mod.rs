//! Where the tests find models.
#![allow(dead_code)]

pub mod gguf;

use std::path::PathBuf;

pub fn smollm2() -> PathBuf {
    model("SmolLM2-135M-Instruct.Q4_1.gguf")
}

pub fn gemma() -> PathBuf {
    model("gemma-3-270m-q4_k_m.gguf")
}

/// A file of the repository's `tests/data`.
pub fn data(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../tests/data").join(name)
}

fn model(file: &str) -> PathBuf {
    let folder = std::env::var_os("DUNLIN_TEST_MODELS").map(PathBuf::from).or_else(|| {
        std::env::var_os("HOME").map(|home| PathBuf::from(home).join(".cache/dunlin/models"))
    });
    let path = folder.unwrap_or_default().join(file);
    assert!(path.is_file(), "{} is not there: run tools/test, which fetches it", path.display());
    path
}
