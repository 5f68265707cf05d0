//! The [`Backend`](dunlin_backend::Backend) trait on WGSL compute shaders, through wgpu: any
//! Vulkan, Metal or DX12 adapter, a software one included.
//!
//! - Weights stay quantised in device memory, in tiles of 32 interleaved rows ([`pack`]); the
//!   shaders (`shaders/` of the repository) unpack them.
//! - Ops are recorded; [`download`](dunlin_backend::Backend::download) and
//!   [`sample`](dunlin_backend::Backend::sample) submit all of them at once and wait. What the host adds to a step (ids, positions, block tables) goes through one small
//!   arena buffer.
//! - Arithmetic is float32 over dequantised weights, or (fast mode, where the adapter gains by it)
//!   int8 activations times codes within blocks of 32; in a fixed order: a row's bits do not depend
//!   on its company, on chunks, or on which variant of a kernel ran.
//! - Variants of kernels are chosen by measuring, and kept on disk with compiled pipelines ([`store`]).
//! - Whatever goes wrong on the device (lost, out of memory, a refused shader) is a
//!   [`BackendError`](dunlin_backend::BackendError): nothing panics or aborts.
//!
//! This crate knows nothing of models, actors or configuration files.

mod adapter;
mod attend;
mod backend;
mod experts;
mod gpu;
mod kernels;
mod kv;
mod memory;
mod memory_access;
mod pack;
mod packed;
mod record;
mod sample;
mod store;
mod tensor;
mod tune;

pub use adapter::{AdapterSummary, Wanted, WgpuError, WgpuOptions, adapters};
pub use attend::Attend;
pub use backend::WgpuBackend;
pub use gpu::Counts;
pub use kernels::shader_texts;
pub use kv::WgpuKv;
pub use pack::WgpuWeight;
pub use tensor::WgpuTensor;
pub use tune::{Product, Tuning};
