//! The seam between the actors and what computes: devices of this node, the model's shape, and
//! engines for a stage. Composition (the `dunlin` binary, or a test) implements it.

use crate::messages::NodeDescription;
use dunlin_model::engine::{Engine, StageSpec};
use std::time::Duration;

/// What one node can run. Shared by every shard it hosts; keeps weights mapped across restarts
/// of shards, so that building the same stage again reads no file.
pub trait Engines: Send + Sync + 'static {
    fn describe(&self) -> NodeDescription;
    fn shape(&self) -> &dyn ModelShape;
    /// Builds the engine of one shard. Blocking and possibly slow: called off the tokio workers.
    /// The error names the device and the numbers that did not fit.
    fn build(&self, device: &str, spec: &StageSpec) -> Result<Box<dyn Engine>, BuildError>;
}

/// Why there is no engine.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum BuildError {
    /// A tensor is not what it was when its file was first read.
    #[error("{0}")]
    Weights(String),
    #[error("{0}")]
    Other(String),
}

impl From<String> for BuildError {
    fn from(text: String) -> Self {
        BuildError::Other(text)
    }
}

impl BuildError {
    /// Says before the text where it happened.
    pub fn at(self, place: &str) -> Self {
        match self {
            BuildError::Weights(text) => BuildError::Weights(format!("{place}: {text}")),
            BuildError::Other(text) => BuildError::Other(format!("{place}: {text}")),
        }
    }
}

/// Where a node's blocking work runs: describing devices, building engines, steps.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub enum Compute {
    /// Steps on a thread per shard, the rest on tokio's blocking threads.
    #[default]
    Threads,
    /// All of it on the runtime's own tasks, for simulations on one thread and a paused clock: a
    /// step blocks nobody but takes so much of that clock. Engines must cost no time themselves,
    /// and a step that is run again must give the same (see `shard/inline.rs`).
    Inline { step_cost: Duration, token_cost: Duration },
}

impl Compute {
    /// Runs what may block; `Err` if it panicked.
    pub(crate) async fn blocking<T: Send + 'static>(
        self,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, tokio::task::JoinError> {
        match self {
            Compute::Threads => tokio::task::spawn_blocking(work).await,
            Compute::Inline { .. } => tokio::spawn(async move { work() }).await,
        }
    }
}

/// The sizes that placing a model needs.
pub trait ModelShape: Send + Sync {
    /// As users name it.
    fn name(&self) -> &str;
    fn layers(&self) -> usize;
    /// Longest sequence, in tokens.
    fn context(&self) -> usize;
    /// Layers per stage for devices of these relative speeds; sums to `layers()`.
    fn split_layers(&self, weights: &[f32]) -> Vec<usize>;
    /// `Err` says why the model cannot be split over so many tensor ranks.
    fn check_ranks(&self, ranks: usize) -> Result<(), String>;
    /// Device bytes of a stage's weights and workspaces (not of its KV).
    fn stage_bytes(&self, spec: &StageSpec) -> u64;
    /// Device bytes of one KV block of a stage.
    fn kv_block_bytes(&self, spec: &StageSpec) -> u64;
    /// Namespace of prefix-cache keys: model hash, KV format, precision.
    fn cache_namespace(&self) -> [u8; 16];
}
