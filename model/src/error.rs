//! Why a model could not be opened. Every variant names the file, the thing in it, and where it
//! helps, the mend.

use std::path::{Path, PathBuf};

/// The families this crate can run, as named in error messages.
pub const SUPPORTED: &str = "llama (SmolLM2, Mistral), mixtral, qwen2, qwen3, gemma3 (text)";

/// A model file was refused. Nothing of it is kept.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    #[error("{path}: cannot {action}: {source}")]
    Io { path: PathBuf, action: &'static str, source: std::io::Error },
    /// The path leads to something that holds no model.
    #[error("{path}: {reason}")]
    NotAModel { path: PathBuf, reason: String },
    /// The bytes contradict the format (damaged, truncated or hostile).
    #[error("{path}: damaged at byte {at}: {reason}; fetch the file again")]
    Damaged { path: PathBuf, at: u64, reason: String },
    /// A valid file of a kind this crate does not read.
    #[error("{path}: {reason}")]
    Unsupported { path: PathBuf, reason: String },
    #[error("{path}: architecture '{found}' is not supported; supported are {}", SUPPORTED)]
    UnknownArchitecture { path: PathBuf, found: String },
    /// A configuration value is missing, of the wrong kind, or makes no sense.
    #[error("{path}: '{key}' {reason}")]
    Config { path: PathBuf, key: String, reason: String },
    #[error("{path}: tensor '{tensor}' {reason}")]
    Tensor { path: PathBuf, tensor: String, reason: String },
    /// Its bytes are not what they were when the file was first read.
    #[error("{path}: tensor '{tensor}' {reason}")]
    Changed { path: PathBuf, tensor: String, reason: String },
    #[error("{path}: tokenizer: {reason}")]
    Tokenizer { path: PathBuf, reason: String },
}

impl LoadError {
    pub(crate) fn io(path: &Path, action: &'static str, source: std::io::Error) -> Self {
        Self::Io { path: path.to_owned(), action, source }
    }
    pub(crate) fn not_a_model(path: &Path, reason: impl Into<String>) -> Self {
        Self::NotAModel { path: path.to_owned(), reason: reason.into() }
    }
    pub(crate) fn unsupported(path: &Path, reason: impl Into<String>) -> Self {
        Self::Unsupported { path: path.to_owned(), reason: reason.into() }
    }
    pub(crate) fn config(path: &Path, key: &str, reason: impl Into<String>) -> Self {
        Self::Config { path: path.to_owned(), key: key.to_owned(), reason: reason.into() }
    }
    pub(crate) fn tensor(path: &Path, tensor: &str, reason: impl Into<String>) -> Self {
        Self::Tensor { path: path.to_owned(), tensor: tensor.to_owned(), reason: reason.into() }
    }
    pub(crate) fn tokenizer(path: &Path, reason: impl Into<String>) -> Self {
        Self::Tokenizer { path: path.to_owned(), reason: reason.into() }
    }
}
