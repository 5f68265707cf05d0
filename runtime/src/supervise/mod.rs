//! Supervision of actors: OTP's strategies, restart rules and intensity over `ractor`.
//!
//! `ractor` links actors and reports their ends; what to do about an end is decided here, by a pure
//! [`core`] that a thin actor ([`Supervisor`]) serves. Starts and stops run in their own tasks, so a
//! slow one delays neither the supervision of its siblings nor a shutdown.
//!
//! Children are keyed by the id of their spec. No actor gets a name in `ractor`'s global registry,
//! because several nodes may live in one process.

pub mod core;
#[cfg(test)]
mod core_tests;
mod shell;
mod spec;
#[cfg(test)]
mod tests;

use std::pin::Pin;
use std::time::Duration;

use ractor::{Actor, ActorCell, ActorRef};
use serde::{Deserialize, Serialize};
use tokio::sync::{oneshot, watch};

pub use self::core::ChildState;
use self::shell::{Lifecycle, Message, Shell};
pub use self::spec::{
    Backoff, ChildSpec, Exit, Intensity, Observer, Restart, StartChild, Strategy, SupervisorSpec,
    Verdict,
};

pub type BoxFuture<T> = Pin<Box<dyn Future<Output = T> + Send>>;

/// How long a supervisor may take to answer a question; it never waits in its handlers.
const ANSWER_WITHIN: Duration = Duration::from_secs(5);

/// Why a supervisor did not do what it was asked.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SuperviseError {
    #[error("supervisor {supervisor} was not started: {reason}")]
    NotSpawned { supervisor: String, reason: String },
    #[error("supervisor {supervisor} has two children called {id}; give each its own id")]
    DuplicateChild { supervisor: String, id: String },
    #[error("supervisor {supervisor} has no child {id}")]
    NoSuchChild { supervisor: String, id: String },
    #[error("child {id} of supervisor {supervisor} did not start: {reason}")]
    ChildNotStarted { supervisor: String, id: String, reason: String },
    #[error("supervisor {supervisor} is stopping or gone")]
    Gone { supervisor: String },
}

/// A child's place and state in the tree below a supervisor.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TreeNode {
    pub id: String,
    /// `up`, `starting`, `stopping`, `waiting` (backoff), `down`.
    pub state: String,
    pub restarts: u32,
    /// How it ended last, if it did.
    pub last_exit: Option<String>,
    /// Of a supervisor, in start order.
    pub children: Vec<TreeNode>,
}

impl TreeNode {
    /// This node and all below it, depth first, as (slash-separated path, node).
    pub fn flatten(&self) -> Vec<(String, &TreeNode)> {
        let mut out = vec![(self.id.clone(), self)];
        for child in &self.children {
            let below = child.flatten();
            out.extend(below.into_iter().map(|(path, node)| (format!("{}/{path}", self.id), node)));
        }
        out
    }
}

/// Starts supervisors.
pub struct Supervisor;

impl Supervisor {
    /// Starts a supervisor and returns at once; its children start in order in the background
    /// ([`SupervisorHandle::ready`] waits for them). With a `parent`, its end is the parent's event.
    pub async fn spawn(
        spec: SupervisorSpec,
        parent: Option<ActorCell>,
    ) -> Result<SupervisorHandle, SuperviseError> {
        let name = spec.name.clone();
        for (index, child) in spec.children.iter().enumerate() {
            if spec.children[..index].iter().any(|earlier| earlier.id == child.id) {
                let id = child.id.clone();
                return Err(SuperviseError::DuplicateChild { supervisor: name, id });
            }
        }
        let (lifecycle, watch) = watch::channel(Lifecycle::Starting);
        let args = (spec, lifecycle);
        let spawned = match parent {
            Some(parent) => Actor::spawn_linked(None, Shell, args, parent).await,
            None => Actor::spawn(None, Shell, args).await,
        };
        match spawned {
            Ok((actor, _)) => Ok(SupervisorHandle { name, actor, lifecycle: watch }),
            Err(e) => Err(SuperviseError::NotSpawned { supervisor: name, reason: e.to_string() }),
        }
    }
}

/// Talks to one running supervisor. Dropping it stops nothing.
#[derive(Clone)]
pub struct SupervisorHandle {
    name: String,
    actor: ActorRef<Message>,
    lifecycle: watch::Receiver<Lifecycle>,
}

impl SupervisorHandle {
    pub fn name(&self) -> &str {
        &self.name
    }

    pub fn cell(&self) -> ActorCell {
        self.actor.get_cell()
    }

    /// Waits until every child has been up; `Err` if the supervisor ended before that.
    pub async fn ready(&self) -> Result<(), Verdict> {
        let mut watch = self.lifecycle.clone();
        let reached = watch.wait_for(|state| *state != Lifecycle::Starting).await;
        match reached.map(|state| state.clone()) {
            Ok(Lifecycle::Exited(verdict)) => Err(verdict),
            Ok(_) => Ok(()),
            Err(_) => Err(Verdict::Killed),
        }
    }

    /// Every child has been up, and the supervisor has not ended.
    pub fn is_running(&self) -> bool {
        self.lifecycle.has_changed().is_ok() && *self.lifecycle.borrow() == Lifecycle::Ready
    }

    /// Waits until the supervisor has ended and says why. This is how the top of a tree hears of
    /// an escalation.
    pub async fn wait(&self) -> Verdict {
        let mut watch = self.lifecycle.clone();
        let ended = watch.wait_for(|state| matches!(state, Lifecycle::Exited(_))).await;
        match ended.map(|state| state.clone()) {
            Ok(Lifecycle::Exited(verdict)) => verdict,
            _ => Verdict::Killed,
        }
    }

    /// The tree below, nested supervisors included.
    pub async fn tree(&self) -> Result<TreeNode, SuperviseError> {
        self.ask(Message::Tree).await
    }

    /// The actor of a child that is up.
    pub async fn child(&self, id: &str) -> Result<Option<ActorCell>, SuperviseError> {
        self.ask(|reply| Message::Child { id: id.to_string(), reply }).await
    }

    /// Appends a child and waits until it is up. If its first start fails it is not kept.
    pub async fn add_child(&self, spec: ChildSpec) -> Result<ActorCell, SuperviseError> {
        let within = spec.start_within + ANSWER_WITHIN;
        self.ask_within(within, |reply| Message::Add { spec, reply }).await?
    }

    /// Stops a child, waits until it is gone, and drops its spec.
    pub async fn remove_child(&self, id: &str) -> Result<(), SuperviseError> {
        let ask = |reply| Message::Remove { id: id.to_string(), reply };
        self.ask_within(Duration::MAX, ask).await?
    }

    /// Stops a child and starts it again, siblings as the strategy says. Answers at once; the
    /// intensity does not count it.
    pub async fn restart_child(&self, id: &str) -> Result<(), SuperviseError> {
        self.ask(|reply| Message::Restart { id: id.to_string(), reply }).await?
    }

    /// Stops all children in reverse order, each within its bound, and waits for the end.
    pub async fn stop(&self) -> Verdict {
        // A supervisor that is gone already has its verdict.
        let _ = self.actor.cast(Message::Stop);
        self.wait().await
    }

    async fn ask<T>(
        &self,
        message: impl FnOnce(oneshot::Sender<T>) -> Message,
    ) -> Result<T, SuperviseError> {
        self.ask_within(ANSWER_WITHIN, message).await
    }

    async fn ask_within<T>(
        &self,
        within: Duration,
        message: impl FnOnce(oneshot::Sender<T>) -> Message,
    ) -> Result<T, SuperviseError> {
        let gone = || SuperviseError::Gone { supervisor: self.name.clone() };
        let (reply, answer) = oneshot::channel();
        self.actor.cast(message(reply)).map_err(|_| gone())?;
        match tokio::time::timeout(within, answer).await {
            Ok(Ok(answer)) => Ok(answer),
            _ => Err(gone()),
        }
    }
}
