//! What every backend shares: the [`Backend`] trait, host-side tensors in their file's quantised
//! form, drawing a token, and plain reference operations.
//!
//! This crate knows nothing of models, actors, sockets or particular devices.

mod backend;
mod checksum;
pub mod draw;
mod error;
pub mod quant;
mod reference;
mod tensor;

pub use backend::*;
pub use checksum::checksum;
pub use draw::{Draw, Samples, Want};
pub use error::BackendError;
pub use reference::{Reference, ReferenceKv, ReferenceTensor, ReferenceWeight};
pub use tensor::*;
