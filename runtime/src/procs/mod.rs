//! Supervision of node processes on this machine, for `dunlin up`.
//!
//! The decisions are those of [`crate::supervise::core`], with the same restart intensity and backoff;
//! this module knows only how to start, hear, stop and bury operating-system processes.
//!
//! - A child says on its standard output, as lines of JSON, `{"ready": ...}` once it works, or
//!   `{"error": "..."}` before it gives up. All else that it prints goes to its log file.
//! - A child that reports an error before it has ever been ready ends the whole start at once: a
//!   wrong configuration is not cured by restarts.
//! - No child outlives this process, however it ends: each is the leader of a process group that is
//!   killed when [`Processes`] is dropped, and [`follow_parent`] covers the rest from the child's side.

mod child;
mod parent;
mod run;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::net::{IpAddr, UdpSocket};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use serde_json::Value;
use tokio::sync::{mpsc, watch};

use self::child::Live;
pub use self::parent::{follow_parent, report_error, report_ready};
use crate::supervise::{Backoff, Intensity};

/// One process to keep running.
#[derive(Debug, Clone)]
pub struct ProcessSpec {
    /// The node's name.
    pub name: String,
    pub program: PathBuf,
    pub args: Vec<OsString>,
    /// Added to this process's own environment.
    pub env: Vec<(String, String)>,
    /// What it prints is appended here.
    pub log_file: PathBuf,
    /// Also print it to standard error, each line behind the name.
    pub echo: bool,
    /// An instance that is not ready by then is killed, which counts as a failure.
    pub ready_within: Duration,
    /// From SIGTERM to SIGKILL.
    pub stop_within: Duration,
}

/// All processes, in start order; they stop in reverse order, one after the other.
#[derive(Debug, Clone)]
pub struct ProcessesSpec {
    pub intensity: Intensity,
    pub backoff: Backoff,
    pub processes: Vec<ProcessSpec>,
}

/// What happens, for whoever watches.
#[derive(Debug, Clone, PartialEq)]
pub enum ProcessEvent {
    Started {
        name: String,
        pid: u32,
    },
    Ready {
        name: String,
        report: Value,
        after: Duration,
    },
    /// `how` names the exit code or signal.
    Exited {
        name: String,
        how: String,
    },
    Restarting {
        name: String,
        how: String,
        delay: Duration,
    },
}

/// A process now.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct ProcessState {
    /// `None` while it does not run.
    pub pid: Option<u32>,
    /// What it reported when it became ready; `None` while it is not.
    pub ready: Option<Value>,
    pub restarts: u32,
    pub last_exit: Option<String>,
}

/// Why the processes ended or did not start.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ProcessesError {
    #[error("node {name} did not start: {reason}")]
    NotStarted { name: String, reason: String },
    #[error(
        "node {name} {how}, more than {max} restarts within {within:?}; its log is {log}{tail}"
    )]
    TooManyRestarts {
        name: String,
        how: String,
        max: u32,
        within: Duration,
        log: String,
        /// The last lines of the log, each on a line of its own; may be empty.
        tail: String,
    },
    #[error("stopped before it was ready")]
    Stopped,
}

#[derive(Debug, Clone, Default)]
struct Snapshot {
    processes: BTreeMap<String, ProcessState>,
    /// Set once, when all processes are gone.
    ended: Option<Result<(), ProcessesError>>,
}

/// Running processes. Dropping it kills them; [`Processes::stop`] lets them drain.
pub struct Processes {
    notes: mpsc::UnboundedSender<run::Note>,
    snapshot: watch::Receiver<Snapshot>,
    live: Arc<Live>,
}

impl Processes {
    /// Starts all and returns at once. The receiver gets every event; it may be dropped.
    pub fn start(spec: ProcessesSpec) -> (Processes, mpsc::UnboundedReceiver<ProcessEvent>) {
        let (notes, inbox) = mpsc::unbounded_channel();
        let (events, watch_events) = mpsc::unbounded_channel();
        let (publish, snapshot) = watch::channel(Snapshot::default());
        let live = Arc::new(Live::default());
        run::spawn(spec, notes.clone(), inbox, publish, events, live.clone());
        (Processes { notes, snapshot, live }, watch_events)
    }

    /// Waits until every process is ready; an error if they ended first, after they are gone.
    pub async fn ready(&self) -> Result<(), ProcessesError> {
        let mut snapshot = self.snapshot.clone();
        let settled = snapshot.wait_for(|snapshot| {
            let all = snapshot.processes.values().all(|process| process.ready.is_some());
            snapshot.ended.is_some() || (all && !snapshot.processes.is_empty())
        });
        match settled.await.map(|snapshot| snapshot.ended.clone()) {
            Ok(None) => Ok(()),
            Ok(Some(Err(error))) => Err(error),
            Ok(Some(Ok(()))) | Err(_) => Err(ProcessesError::Stopped),
        }
    }

    /// Waits until all are gone: `Ok` after [`Processes::stop`], else what went wrong.
    pub async fn wait(&self) -> Result<(), ProcessesError> {
        self.ended().await
    }

    /// As [`Processes::wait`], for who must not keep them running.
    pub fn ended(&self) -> impl Future<Output = Result<(), ProcessesError>> + Send + use<> {
        let mut snapshot = self.snapshot.clone();
        async move {
            let ended = snapshot.wait_for(|snapshot| snapshot.ended.is_some()).await;
            match ended.map(|snapshot| snapshot.ended.clone()) {
                Ok(Some(result)) => result,
                _ => Err(ProcessesError::Stopped),
            }
        }
    }

    /// Stops the processes in reverse order: SIGTERM, and SIGKILL after each one's bound.
    pub async fn stop(&self) -> Result<(), ProcessesError> {
        // If nobody receives it, they have ended.
        let _ = self.notes.send(run::Note::Stop);
        self.wait().await
    }

    /// Kills all at once, without draining.
    pub fn kill(&self) {
        let _ = self.notes.send(run::Note::Stop);
        self.live.kill_all();
    }

    pub fn states(&self) -> BTreeMap<String, ProcessState> {
        self.snapshot.borrow().processes.clone()
    }
}

impl Drop for Processes {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Does this machine have this address? Loopback is always here.
pub fn is_local_address(ip: IpAddr) -> bool {
    ip.is_loopback() || UdpSocket::bind((ip, 0)).is_ok()
}
