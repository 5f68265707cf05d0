//! The actor around the supervisor's core: runs starts, stops and timers as tasks, maps actors to
//! children, and answers questions. It never waits in a handler.

use std::collections::{BTreeMap, HashMap};
use std::time::Duration;

use ractor::SupervisionEvent;
use ractor::{Actor, ActorCell, ActorId, ActorProcessingErr, ActorRef, ActorStatus};
use tokio::sync::{oneshot, watch};
use tokio::task::AbortHandle;
use tokio::time::Instant;

use super::core::{ChildState, Core, Generation, Input, Output};
use super::{ChildSpec, Exit, Observer, SuperviseError, SupervisorSpec, TreeNode, Verdict};

/// What `ractor` gives as the reason of an actor that was killed.
const KILLED: &str = "killed";

/// After this long a kill has failed: the actor blocks its thread and is given up.
const KILL_WITHIN: Duration = Duration::from_secs(2);

/// How long a nested supervisor may take to describe itself.
const TREE_WITHIN: Duration = Duration::from_secs(1);

#[derive(Debug, Clone, PartialEq)]
pub(super) enum Lifecycle {
    Starting,
    Ready,
    Exited(Verdict),
}

pub(super) enum Message {
    /// From a start task.
    StartDone {
        id: String,
        generation: Generation,
        result: Result<ActorCell, String>,
    },
    /// From a stop task: not even a kill ended it.
    GivenUp {
        id: String,
        generation: Generation,
    },
    Tick,
    Tree(oneshot::Sender<TreeNode>),
    Child {
        id: String,
        reply: oneshot::Sender<Option<ActorCell>>,
    },
    Add {
        spec: ChildSpec,
        reply: oneshot::Sender<Result<ActorCell, SuperviseError>>,
    },
    Remove {
        id: String,
        reply: oneshot::Sender<Result<(), SuperviseError>>,
    },
    Restart {
        id: String,
        reply: oneshot::Sender<Result<(), SuperviseError>>,
    },
    Stop,
}

pub(super) struct Shell;

pub(super) struct Running {
    name: String,
    core: Core,
    origin: Instant,
    specs: BTreeMap<String, ChildSpec>,
    /// The instance of each child that has come up and is not known to have ended.
    live: BTreeMap<String, (Generation, ActorCell)>,
    by_actor: HashMap<ActorId, (String, Generation)>,
    starting: BTreeMap<(String, Generation), AbortHandle>,
    /// Ends of actors that were not known yet: a child can die before its start is reported.
    early: HashMap<ActorId, Exit>,
    admitting: BTreeMap<String, oneshot::Sender<Result<ActorCell, SuperviseError>>>,
    removing: BTreeMap<String, Vec<oneshot::Sender<Result<(), SuperviseError>>>>,
    timer: Option<AbortHandle>,
    lifecycle: watch::Sender<Lifecycle>,
    observer: Observer,
}

impl Actor for Shell {
    type Msg = Message;
    type State = Running;
    type Arguments = (SupervisorSpec, watch::Sender<Lifecycle>);

    async fn pre_start(
        &self,
        _me: ActorRef<Message>,
        (spec, lifecycle): Self::Arguments,
    ) -> Result<Running, ActorProcessingErr> {
        let policies = spec.children.iter().map(|child| (child.id.clone(), child.restart));
        let core = Core::new(spec.strategy, spec.intensity, spec.backoff, policies.collect());
        Ok(Running {
            name: spec.name,
            core,
            origin: Instant::now(),
            specs: spec.children.into_iter().map(|child| (child.id.clone(), child)).collect(),
            live: BTreeMap::new(),
            by_actor: HashMap::new(),
            starting: BTreeMap::new(),
            early: HashMap::new(),
            admitting: BTreeMap::new(),
            removing: BTreeMap::new(),
            timer: None,
            lifecycle,
            observer: spec.observer,
        })
    }

    async fn post_start(
        &self,
        me: ActorRef<Message>,
        state: &mut Running,
    ) -> Result<(), ActorProcessingErr> {
        state.step(&me, Input::Begin)
    }

    async fn handle(
        &self,
        me: ActorRef<Message>,
        message: Message,
        state: &mut Running,
    ) -> Result<(), ActorProcessingErr> {
        match message {
            Message::StartDone { id, generation, result } => {
                state.start_done(&me, id, generation, result)
            }
            Message::GivenUp { id, generation } => {
                tracing::error!(supervisor = state.name, child = id, "not even a kill ended it");
                state.forget(&id, generation);
                state.step(&me, Input::Exited { id, generation, exit: Exit::Killed })
            }
            Message::Tick => state.step(&me, Input::Tick),
            Message::Tree(reply) => {
                state.describe(reply);
                Ok(())
            }
            Message::Child { id, reply } => {
                let cell = state.live.get(&id).map(|(_, cell)| cell.clone());
                let _ = reply.send(cell);
                Ok(())
            }
            Message::Add { spec, reply } => state.add(&me, spec, reply),
            Message::Remove { id, reply } => {
                if let Some(reply) = state.known(&id, reply) {
                    state.removing.entry(id.clone()).or_default().push(reply);
                    state.step(&me, Input::Remove { id })?;
                }
                Ok(())
            }
            Message::Restart { id, reply } => {
                if let Some(reply) = state.known(&id, reply) {
                    let _ = reply.send(Ok(()));
                    state.step(&me, Input::Restart { id })?;
                }
                Ok(())
            }
            Message::Stop => state.step(&me, Input::Stop),
        }
    }

    async fn handle_supervisor_evt(
        &self,
        me: ActorRef<Message>,
        event: SupervisionEvent,
        state: &mut Running,
    ) -> Result<(), ActorProcessingErr> {
        let (cell, exit) = match event {
            SupervisionEvent::ActorTerminated(cell, _, reason) => match reason.as_deref() {
                Some(KILLED) => (cell, Exit::Killed),
                _ => (cell, Exit::Normal(reason)),
            },
            SupervisionEvent::ActorFailed(cell, error) => (cell, Exit::Failed(error.to_string())),
            _ => return Ok(()),
        };
        match state.by_actor.remove(&cell.get_id()) {
            Some((id, generation)) => {
                state.live.remove(&id);
                state.step(&me, Input::Exited { id, generation, exit })
            }
            None => {
                if !state.starting.is_empty() {
                    state.early.insert(cell.get_id(), exit);
                }
                Ok(())
            }
        }
    }

    /// Reached with children alive only when someone stopped this actor past its protocol.
    async fn post_stop(
        &self,
        me: ActorRef<Message>,
        state: &mut Running,
    ) -> Result<(), ActorProcessingErr> {
        for task in state.starting.values() {
            task.abort();
        }
        let order: Vec<String> =
            state.core.children(Duration::ZERO).into_iter().map(|child| child.id).collect();
        for id in order.iter().rev() {
            if let Some((_, cell)) = state.live.remove(id) {
                let bound = state.specs.get(id).map(|spec| spec.stop_within);
                end_child(&cell, bound.unwrap_or(KILL_WITHIN)).await;
            }
        }
        me.stop_children(None);
        state.lifecycle.send_modify(|lifecycle| {
            if !matches!(lifecycle, Lifecycle::Exited(_)) {
                *lifecycle = Lifecycle::Exited(Verdict::Stopped);
            }
        });
        Ok(())
    }
}

impl Running {
    /// Feeds the core and does what it answers. `Err` ends this actor as failed: the escalation.
    fn step(&mut self, me: &ActorRef<Message>, input: Input) -> Result<(), ActorProcessingErr> {
        let outputs = self.core.handle(self.now(), input);
        let mut end = Ok(());
        for output in outputs {
            match output {
                Output::Start { id, generation } => self.start(me, id, generation),
                Output::CancelStart { id, generation } => {
                    if let Some(task) = self.starting.get(&(id, generation)) {
                        task.abort();
                    }
                }
                Output::Stop { id, generation } => self.stop(me, id, generation),
                Output::Admitted { id, result } => self.admitted(id, result),
                Output::Removed { id } => self.removed(&id),
                Output::Restarting { id, exit, delay } => self.note_restart(&id, &exit, delay),
                Output::Ready => {
                    self.lifecycle.send_replace(Lifecycle::Ready);
                }
                Output::Exit(verdict) => end = self.exit(me, verdict),
            }
        }
        self.arm_timer(me);
        end
    }

    fn now(&self) -> Duration {
        self.origin.elapsed()
    }

    /// Runs the start in a task; a panic, a time-out and an abort are all failures of the start.
    fn start(&mut self, me: &ActorRef<Message>, id: String, generation: Generation) {
        let Some(spec) = self.specs.get(&id) else { return };
        let (start, within, cell) = (spec.start.clone(), spec.start_within, me.get_cell());
        let task = tokio::spawn(async move {
            match tokio::time::timeout(within, start(cell)).await {
                Ok(result) => result,
                Err(_) => Err(format!("not ready within {within:?}")),
            }
        });
        self.starting.insert((id.clone(), generation), task.abort_handle());
        let me = me.clone();
        tokio::spawn(async move {
            let result = match task.await {
                Ok(result) => result,
                Err(e) if e.is_cancelled() => Err("cancelled".to_string()),
                Err(e) => Err(panic_text(e.into_panic())),
            };
            // A supervisor that is gone has killed its children.
            let _ = me.cast(Message::StartDone { id, generation, result });
        });
    }

    fn start_done(
        &mut self,
        me: &ActorRef<Message>,
        id: String,
        generation: Generation,
        result: Result<ActorCell, String>,
    ) -> Result<(), ActorProcessingErr> {
        self.starting.remove(&(id.clone(), generation));
        let end = match result {
            Ok(cell) => {
                let early = self.early.remove(&cell.get_id());
                let known = self.core.contains(&id);
                let linked = cell.try_get_supervisor().is_some_and(|s| s.get_id() == me.get_id());
                if early.is_none() && !linked && cell.get_status() < ActorStatus::Stopping {
                    cell.link(me.get_cell());
                }
                if known {
                    self.by_actor.insert(cell.get_id(), (id.clone(), generation));
                    self.live.insert(id.clone(), (generation, cell.clone()));
                }
                let started = Input::Started { id: id.clone(), generation };
                let mut end = self.step(me, started);
                if let Some(exit) = early {
                    self.forget(&id, generation);
                    end = end.and(self.step(me, Input::Exited { id, generation, exit }));
                }
                end
            }
            Err(reason) => self.step(me, Input::StartFailed { id, generation, reason }),
        };
        if self.starting.is_empty() {
            self.early.clear();
            self.sweep(me);
        }
        end
    }

    /// A cancelled start may have left an actor behind, linked to this one but known to nobody.
    fn sweep(&self, me: &ActorRef<Message>) {
        for cell in me.get_children() {
            if !self.by_actor.contains_key(&cell.get_id()) {
                cell.kill();
            }
        }
    }

    fn stop(&mut self, me: &ActorRef<Message>, id: String, generation: Generation) {
        let within = self.specs.get(&id).map_or(KILL_WITHIN, |spec| spec.stop_within);
        let cell = match self.live.get(&id) {
            Some((current, cell)) if *current == generation => cell.clone(),
            _ => return,
        };
        let me = me.clone();
        tokio::spawn(async move {
            if !end_child(&cell, within).await {
                let _ = me.cast(Message::GivenUp { id, generation });
            }
        });
    }

    fn forget(&mut self, id: &str, generation: Generation) {
        if self.live.get(id).is_some_and(|(current, _)| *current == generation)
            && let Some((_, cell)) = self.live.remove(id)
        {
            self.by_actor.remove(&cell.get_id());
        }
    }

    fn add(
        &mut self,
        me: &ActorRef<Message>,
        spec: ChildSpec,
        reply: oneshot::Sender<Result<ActorCell, SuperviseError>>,
    ) -> Result<(), ActorProcessingErr> {
        let (id, restart) = (spec.id.clone(), spec.restart);
        let supervisor = self.name.clone();
        if self.core.contains(&id) {
            let _ = reply.send(Err(SuperviseError::DuplicateChild { supervisor, id }));
        } else if !self.core.accepts() {
            let _ = reply.send(Err(SuperviseError::Gone { supervisor }));
        } else {
            self.specs.insert(id.clone(), spec);
            self.admitting.insert(id.clone(), reply);
            return self.step(me, Input::Add { id, restart });
        }
        Ok(())
    }

    /// Gives the reply back if there is such a child, else answers that there is none.
    fn known<T>(
        &self,
        id: &str,
        reply: oneshot::Sender<Result<T, SuperviseError>>,
    ) -> Option<oneshot::Sender<Result<T, SuperviseError>>> {
        if self.core.contains(id) {
            return Some(reply);
        }
        let (supervisor, id) = (self.name.clone(), id.to_string());
        let _ = reply.send(Err(SuperviseError::NoSuchChild { supervisor, id }));
        None
    }

    fn admitted(&mut self, id: String, result: Result<(), String>) {
        let Some(reply) = self.admitting.remove(&id) else { return };
        let supervisor = self.name.clone();
        let answer = match (result, self.live.get(&id)) {
            (Ok(()), Some((_, cell))) => Ok(cell.clone()),
            (Ok(()), None) => Err("it ended at once".to_string()),
            (Err(reason), _) => Err(reason),
        };
        let _ = reply.send(answer.map_err(|reason| SuperviseError::ChildNotStarted {
            supervisor,
            id,
            reason,
        }));
    }

    fn removed(&mut self, id: &str) {
        self.specs.remove(id);
        self.admitting.remove(id);
        for reply in self.removing.remove(id).unwrap_or_default() {
            let _ = reply.send(Ok(()));
        }
    }

    fn note_restart(&self, id: &str, exit: &Exit, delay: Duration) {
        let actor = format!("{}/{id}", self.name);
        tracing::warn!(actor, %exit, delay_ms = delay.as_millis() as u64, "restarting");
        let times = self.core.children(self.now()).into_iter().find(|child| child.id == id);
        self.observer.restarted(&actor, times.map_or(0, |child| child.restarts));
        let labels = [("actor", actor), ("reason", exit.class().to_string())];
        metrics::counter!("dunlin_actor_restarts_total", &labels).increment(1);
    }

    fn exit(&mut self, me: &ActorRef<Message>, verdict: Verdict) -> Result<(), ActorProcessingErr> {
        self.sweep(me);
        self.lifecycle.send_replace(Lifecycle::Exited(verdict.clone()));
        match verdict {
            Verdict::Escalated { .. } => {
                tracing::error!(supervisor = self.name, %verdict, "escalating");
                self.observer.escalated(&self.name);
                Err(verdict.to_string().into())
            }
            _ => {
                me.stop(None);
                Ok(())
            }
        }
    }

    fn arm_timer(&mut self, me: &ActorRef<Message>) {
        if let Some(timer) = self.timer.take() {
            timer.abort();
        }
        if let Some(at) = self.core.next_wake(self.now()) {
            let (me, at) = (me.clone(), self.origin + at);
            let timer = tokio::spawn(async move {
                tokio::time::sleep_until(at).await;
                let _ = me.cast(Message::Tick);
            });
            self.timer = Some(timer.abort_handle());
        }
    }

    /// Answers with the tree; nested supervisors are asked from a task.
    fn describe(&self, reply: oneshot::Sender<TreeNode>) {
        let mut nested = Vec::new();
        let mut root = TreeNode {
            id: self.name.clone(),
            state: if self.core.accepts() { "up" } else { "stopping" }.to_string(),
            restarts: 0,
            last_exit: None,
            children: Vec::new(),
        };
        for (index, child) in self.core.children(self.now()).into_iter().enumerate() {
            if let Some((_, cell)) = self.live.get(&child.id)
                && let Some(supervisor) = as_supervisor(cell)
            {
                nested.push((index, supervisor));
            }
            root.children.push(TreeNode {
                id: child.id,
                state: state_word(child.state).to_string(),
                restarts: child.restarts,
                last_exit: child.last_exit.map(|exit| exit.to_string()),
                children: Vec::new(),
            });
        }
        tokio::spawn(async move {
            for (index, supervisor) in nested {
                let (ask, answer) = oneshot::channel();
                let asked = supervisor.cast(Message::Tree(ask));
                if asked.is_ok()
                    && let Ok(Ok(below)) = tokio::time::timeout(TREE_WITHIN, answer).await
                    && let Some(node) = root.children.get_mut(index)
                {
                    node.children = below.children;
                }
            }
            let _ = reply.send(root);
        });
    }
}

/// Stops gracefully within the bound, else kills. False if the actor is still there.
async fn end_child(cell: &ActorCell, within: Duration) -> bool {
    match as_supervisor(cell) {
        // Its own protocol, so that its children stop in order too.
        Some(supervisor) => drop(supervisor.cast(Message::Stop)),
        None => cell.stop(None),
    }
    if cell.wait(Some(within)).await.is_ok() {
        return true;
    }
    tracing::warn!(actor = %cell.get_id(), ?within, "did not stop in time; killing it");
    cell.kill();
    cell.wait(Some(KILL_WITHIN)).await.is_ok()
}

fn as_supervisor(cell: &ActorCell) -> Option<ActorRef<Message>> {
    let is_one = cell.is_message_type_of::<Message>() == Some(true);
    is_one.then(|| ActorRef::from(cell.clone()))
}

fn state_word(state: ChildState) -> &'static str {
    match state {
        ChildState::Down => "down",
        ChildState::Waiting => "waiting",
        ChildState::Starting => "starting",
        ChildState::Up => "up",
        ChildState::Stopping => "stopping",
    }
}

fn panic_text(panic: Box<dyn std::any::Any + Send>) -> String {
    let text = panic.downcast_ref::<&str>().map(|text| text.to_string());
    let text = text.or_else(|| panic.downcast_ref::<String>().cloned());
    format!("panicked: {}", text.unwrap_or_else(|| "without a message".to_string()))
}
