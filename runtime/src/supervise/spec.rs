//! What a supervisor is told: strategy, restart rules, intensity, backoff, children.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use ractor::ActorCell;
use serde::{Deserialize, Serialize};

use super::{BoxFuture, Supervisor};
use crate::Node;
use crate::address::NodeName;
use crate::faults::{Fact, Faults, names};

/// What a child's failure means for its siblings.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Strategy {
    /// Nothing: it alone is restarted.
    OneForOne,
    /// All are stopped, then all are started in order.
    OneForAll,
    /// Those after it are stopped, then it and they are started in order.
    RestForOne,
}

/// When a child that ended is started again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Restart {
    /// Always.
    Permanent,
    /// After a failure, not after a normal end. Being killed is a failure.
    Transient,
    /// Never; its spec is dropped when it ends.
    Temporary,
}

/// At most `max` restarts within any span of `within`; one more ends the supervisor, and its
/// parent decides. There is no default on purpose.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Intensity {
    pub max: u32,
    pub within: Duration,
}

/// Waits between restarts: `base` doubled per failure in a row up to `max`, times a factor in
/// [0.5, 1) drawn from `seed`, the child's id and its generation.
///
/// A delay never exceeds `within / (max + 2)` of the intensity, so that it cannot hide a child
/// that always fails.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Backoff {
    pub base: Duration,
    pub max: Duration,
    pub seed: u64,
}

impl Default for Backoff {
    /// 10 ms doubling up to 5 s, seed 0.
    fn default() -> Backoff {
        Backoff { base: Duration::from_millis(10), max: Duration::from_secs(5), seed: 0 }
    }
}

impl Backoff {
    /// The wait after the `failures`-th failure in a row (from 1).
    pub fn delay(&self, failures: u32, id: &str, draw: u64) -> Duration {
        let doublings = failures.saturating_sub(1).min(20);
        let full = self.base.saturating_mul(1 << doublings).min(self.max);
        let mut hash = self.seed ^ draw.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        for byte in id.bytes() {
            hash = mix(hash ^ u64::from(byte));
        }
        let unit = (mix(hash) >> 40) as f64 / (1u64 << 24) as f64;
        full.mul_f64(0.5 + 0.5 * unit)
    }
}

/// The finaliser of SplitMix64 (Steele, Lea, Flood 2014).
fn mix(mut z: u64) -> u64 {
    z = z.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// How a child ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
pub enum Exit {
    /// It stopped by itself or was asked to, with the reason if it gave one.
    #[error("stopped{}", .0.as_ref().map(|reason| format!(": {reason}")).unwrap_or_default())]
    Normal(Option<String>),
    #[error("killed")]
    Killed,
    /// It panicked or returned an error.
    #[error("failed: {0}")]
    Failed(String),
    #[error("did not start: {0}")]
    StartFailed(String),
}

impl Exit {
    /// A word for metrics.
    pub fn class(&self) -> &'static str {
        match self {
            Exit::Normal(_) => "stopped",
            Exit::Killed => "killed",
            Exit::Failed(_) => "failed",
            Exit::StartFailed(_) => "start_failed",
        }
    }
}

/// Why a supervisor ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
pub enum Verdict {
    #[error("stopped on request")]
    Stopped,
    /// The restart intensity was crossed; `child` is the one whose failure did it.
    #[error("restart intensity crossed by {child}, which {exit}")]
    Escalated { child: String, exit: Exit },
    #[error("the supervisor itself was killed")]
    Killed,
}

/// Starts one instance of a child, linked to the supervisor that it is given
/// (`Actor::spawn_linked`), and returns when the child is ready to work.
///
/// It runs in a task of its own and may take its time; it is dropped at an await point when the
/// supervisor stops meanwhile.
pub type StartChild = Arc<dyn Fn(ActorCell) -> BoxFuture<Result<ActorCell, String>> + Send + Sync>;

/// One child.
#[derive(Clone)]
pub struct ChildSpec {
    /// Unique under its supervisor.
    pub id: String,
    pub restart: Restart,
    pub start: StartChild,
    /// A start that takes longer has failed.
    pub start_within: Duration,
    /// After this long a stop becomes a kill.
    pub stop_within: Duration,
}

impl ChildSpec {
    /// A worker with the default bounds: 10 min to start, 5 s to stop.
    pub fn new<F, Fut>(id: impl Into<String>, restart: Restart, start: F) -> ChildSpec
    where
        F: Fn(ActorCell) -> Fut + Send + Sync + 'static,
        Fut: Future<Output = Result<ActorCell, String>> + Send + 'static,
    {
        ChildSpec {
            id: id.into(),
            restart,
            start: Arc::new(move |supervisor| Box::pin(start(supervisor))),
            start_within: Duration::from_secs(600),
            stop_within: Duration::from_secs(5),
        }
    }

    /// A supervisor below this one; it is up when all its children are.
    pub fn supervisor<F>(id: impl Into<String>, restart: Restart, spec: F) -> ChildSpec
    where
        F: Fn() -> SupervisorSpec + Send + Sync + 'static,
    {
        let start = move |parent: ActorCell| {
            let spec = spec();
            async move {
                let handle =
                    Supervisor::spawn(spec, Some(parent)).await.map_err(|e| e.to_string())?;
                handle.ready().await.map_err(|verdict| verdict.to_string())?;
                Ok(handle.cell())
            }
        };
        let mut child = ChildSpec::new(id, restart, start);
        child.stop_within = Duration::from_secs(60);
        child
    }
}

/// A whole supervisor.
#[derive(Clone)]
pub struct SupervisorSpec {
    /// Its place in the tree, for logs and metrics (`front/replica-r0`).
    pub name: String,
    pub strategy: Strategy,
    pub intensity: Intensity,
    pub backoff: Backoff,
    /// In start order.
    pub children: Vec<ChildSpec>,
    pub observer: Observer,
}

/// Where a supervisor tells of restarts and escalations, besides logs and metrics.
#[derive(Clone, Default)]
pub struct Observer(Option<(NodeName, Faults)>);

impl Observer {
    pub const fn none() -> Observer {
        Observer(None)
    }

    /// Tells the fault hook of the node that the tree belongs to, if one is armed.
    pub fn of(node: &Node) -> Observer {
        Observer::new(node.name(), node.faults())
    }

    pub fn new(node: &NodeName, faults: &Faults) -> Observer {
        Observer(faults.is_armed().then(|| (node.clone(), faults.clone())))
    }

    pub(super) fn restarted(&self, actor: &str, times: u32) {
        self.tell(names::ACTOR_RESTARTED, actor, times.into());
    }

    pub(super) fn escalated(&self, supervisor: &str) {
        self.tell(names::ESCALATED, supervisor, 0);
    }

    fn tell(&self, name: &'static str, subject: &str, key: u64) {
        let Some((node, faults)) = &self.0 else { return };
        let (node, subject) = (node.clone(), subject.to_owned());
        faults.tell(|| Fact { node, name, subject, key, value: 0 });
    }
}

impl fmt::Debug for Observer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.0.is_some() { "Observer(armed)" } else { "Observer(none)" })
    }
}
