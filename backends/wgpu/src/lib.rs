//! The [`Backend`](dunlin_backend::Backend) trait on WGSL compute shaders, through wgpu: any
//! Vulkan, Metal or DX12 adapter, a software one included.
//!
//! - Weights stay quantised in device memory, in tiles of 32 interleaved rows ([`pack`]); the
//!   shaders (`shaders/` of the repository) unpack them.
//! - Ops are recorded; [`download`](dunlin_backend::Backend::download) and
//!   [`sample`](dunlin_backend::Backend::sample) submit all of them at once and wait. What the host adds to a step (ids, positions, block tables) goes through one small
//!   arena buffer.
//! - Arithmetic is float32 over dequantised weights, in a fixed order: a row's bits do not depend
//!   on its company, on chunks, or on which variant of a kernel ran.
//! - Whatever goes wrong on the device (lost, out of memory, a refused shader) is a
//!   [`BackendError`](dunlin_backend::BackendError): nothing panics or aborts.
//!
//! This crate knows nothing of models, actors or configuration files.

mod adapter;
mod backend;
mod experts;
mod gpu;
mod kernels;
mod kv;
mod measure;
mod memory;
mod pack;
mod record;
mod sample;
mod tensor;
mod tune;

pub use adapter::{AdapterSummary, Wanted, WgpuError, adapters};
pub use backend::WgpuBackend;
pub use kernels::shader_texts;
pub use kv::WgpuKv;
pub use measure::Rates;
pub use pack::WgpuWeight;
pub use tensor::WgpuTensor;
pub use tune::{Product, Tuning};
