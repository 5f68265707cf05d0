//! Everything about a language model that is not a device and not a cluster: model files (GGUF,
//! safetensors), tokenizer and chat template, the forward pass, sampling.
//!
//! This crate knows nothing of actors, sockets, or files other than model files.

pub mod chat;
pub mod describe;
pub mod engine;
pub mod error;
pub mod forward;
pub mod gguf;
pub mod hash_engine;
pub mod loader;
pub mod manifest;
mod map;
pub mod safetensors;
pub mod sampler;
pub mod sampling;
pub mod spec;
pub mod split;
pub mod stage;
pub mod stop;
pub mod tokenizer;
pub mod transformer;
pub mod weights;
