//! The process mode: a plan carried out on real node processes of this machine.
//!
//! The runner starts the cluster's nodes as `dunlin up` would, from the production `cluster.toml`,
//! asks them first for the undisturbed answers, then sends the workload and breaks what the plan
//! says. What nodes and clients see is streamed to it, and becomes the [`Record`].
//!
//! - No root is needed. Processes get signals; links, devices and actors are reached through the
//!   hook that a node has only if it was started with `--faults` ([`inside`]).
//! - Nothing outlives a run, however it ends: dropping its future kills the processes, waits for
//!   their end and removes the folder.
//! - Faults begin on progress (a client's token, a node's fact, a site) as the plan says; only
//!   `at` goes by the clock.

mod board;
mod client;
mod cluster;
mod heal;
mod http;
mod hub;
mod inject;
pub mod inside;
mod ports;
pub mod reach;
mod record;
mod rest;
mod run;
mod signals;
pub mod wire;

use crate::fault::{Kind, Mode};
use crate::record::Record;
use crate::resolved::{RequestSpec, Resolved};
use dunlin_runtime::config::ConfigError;
use dunlin_runtime::procs::ProcessEvent;
use std::path::PathBuf;
use std::sync::Arc;

/// What a run needs besides its plan.
#[derive(Clone, Default)]
pub struct How {
    /// The `dunlin` program.
    pub binary: PathBuf,
    /// Added to the nodes' environment.
    pub env: Vec<(String, String)>,
    /// Copy the nodes' logs into this folder.
    pub keep_logs: Option<PathBuf>,
    /// Hears how far the run is, several times a second.
    pub progress: Option<Tell>,
}

/// Who hears of a run's progress.
pub type Tell = Arc<dyn Fn(&Progress) + Send + Sync>;

/// How far a run is.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Progress {
    /// `start`, `baseline`, `warmup`, `chaos`, `settle`, `rest`.
    pub phase: &'static str,
    /// Since the workload began.
    pub us: u64,
    pub requests: usize,
    pub ended: usize,
    pub open: usize,
    pub tokens: u64,
    /// Ids of the faults in force.
    pub active: Vec<String>,
}

/// Why there is no record.
#[derive(Debug, thiserror::Error)]
pub enum ProcessError {
    #[error("the plan is for mode {0:?}; resolve it for the process mode")]
    Mode(Mode),
    #[error(
        "fault {id}: {} cannot be injected into processes\n  = help: run the plan with --mode sim",
        kind.name()
    )]
    Kind { id: String, kind: Kind },
    #[error(transparent)]
    Config(ConfigError),
    #[error("cannot prepare {what}: {reason}")]
    Prepare { what: &'static str, reason: String },
    #[error("the cluster did not start: {reason}{story}")]
    Start { reason: String, story: String },
    #[error(
        "request {request} was not answered even without faults: {reason}\n  \
         = help: correct the plan's workload or cluster{story}"
    )]
    Baseline { request: u64, reason: String, story: String },
}

/// Carries out the plan. Dropping the future ends everything that it has started.
///
/// # Errors
/// The plan cannot run at all; a cluster that breaks under its faults is no error but a record.
pub async fn run(plan: &Resolved, how: &How) -> Result<Record, ProcessError> {
    if plan.mode != Mode::Process {
        return Err(ProcessError::Mode(plan.mode));
    }
    if let Some(fault) = plan.faults.iter().find(|fault| !can_inject(fault.kind)) {
        return Err(ProcessError::Kind { id: fault.id.clone(), kind: fault.kind });
    }
    run::run(plan, how).await
}

/// Can this mode inject the kind?
pub fn can_inject(kind: Kind) -> bool {
    kind != Kind::TimerLate
}

/// What the run's loop hears.
enum Note {
    Node {
        node: String,
        said: wire::FromNode,
    },
    Client {
        request: u64,
        us: u64,
        seen: client::Seen,
    },
    /// A request that a fault sends, and the one of the workload that it copies.
    Extra {
        request: RequestSpec,
        like: Option<u64>,
    },
    Process(ProcessEvent),
    /// A node's supervisor has restarted it too often, and does so no more.
    GaveUp {
        node: String,
        reason: String,
    },
    Began {
        index: usize,
        us: u64,
    },
    Proven {
        index: usize,
        text: String,
    },
    Ended {
        index: usize,
        us: u64,
    },
    State {
        us: u64,
        node: String,
        state: String,
    },
}
