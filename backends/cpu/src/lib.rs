//! SIMD CPU backend of Dunlin: the embedded default, and the oracle of the other backends.
//!
//! **One arithmetic, many paths.** Every output element is computed in one lane by one fixed
//! sequence of IEEE operations (integer block dot products, one chain of fused multiply-adds over
//! the inner dimension in ascending order), and kernels are written once over a 16-lane vector
//! with three implementations. So plain Rust, AVX2, AVX-512 VNNI, and AMX (whose tiles compute the
//! same integers) give the same bits, whatever the number of threads, the rows that share a batch, or where a prompt was cut into chunks.
//!
//! Two precisions (see [`Precision`]): *exact* multiplies dequantised weights with float32
//! activations; *fast* quantises activations to int8 per row and block of 32. Plain float weights
//! (F32, F16, BF16) take float32 activations in both.
//!
//! Weights are repacked at load into panels of 16 interleaved rows and stay quantised. This crate
//! knows nothing of models, actors or files.

mod activations;
mod aside;
mod attention;
mod backend;
mod bind;
mod element;
mod experts;
mod fused;
mod kv;
mod lanes;
mod linear;
mod math;
mod memory;
mod path;
mod pool;
mod rope;
mod rowops;
mod tensor;
#[cfg_attr(not(target_arch = "x86_64"), allow(dead_code))]
mod tiles;
mod weight;

pub use backend::{CpuBackend, CpuOptions};
pub use dunlin_backend::Precision;
pub use kv::CpuKv;
pub use path::{PATH_VARIABLE, Path};
pub use tensor::CpuTensor;
pub use weight::CpuWeight;

/// Why a CPU backend could not be made.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CpuError {
    #[error(
        "cpu: {PATH_VARIABLE}='{given}' is no instruction path; use scalar, avx2, avx512 or amx"
    )]
    UnknownPath { given: String },
    #[error(
        "cpu: this processor cannot take the instruction path '{path}', it has {has}; \
         unset {PATH_VARIABLE} to use the fastest of them"
    )]
    PathUnavailable { path: &'static str, has: String },
    #[error("cpu: threads = {given}; give a number from 1 to {most}")]
    Threads { given: usize, most: usize },
    #[error("cpu: worker thread {index} could not be started: {reason}")]
    Spawn { index: usize, reason: String },
}
