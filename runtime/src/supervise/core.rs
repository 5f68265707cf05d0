//! The decisions of a supervisor, as a state machine without clock, tokio, randomness or actors.
//!
//! The core is told what happened and answers what to do. Semantics are OTP's (`supervisor(3)`),
//! with three differences: starts and stops take time, restarts wait for a backoff, and a start
//! that fails counts as a restart.
//!
//! Invariants:
//! - A child never has two instances: an instance is started only after the one before is gone.
//! - Children stop one at a time, in reverse order of their specs.
//! - Under `OneForAll` and `RestForOne` a child starts only when all before it are up.
//! - More than `intensity.max` restarts within `intensity.within` end the supervisor: all children
//!   are stopped, then [`Output::Exit`] is the last output. A backoff is capped so that a child
//!   that always fails at once does cross the intensity.

use std::collections::VecDeque;
use std::time::Duration;

use super::{Backoff, Exit, Intensity, Restart, Strategy, Verdict};
use crate::mutation::mutated;

/// Counts the instances of one child; an event of an older instance is ignored.
pub type Generation = u64;

/// What happened. Times are since the supervisor's start.
#[derive(Debug, Clone, PartialEq)]
pub enum Input {
    /// Start the children. Once, first.
    Begin,
    /// The time named by [`Core::next_wake`] has come.
    Tick,
    Started {
        id: String,
        generation: Generation,
    },
    /// Also the answer to [`Output::CancelStart`].
    StartFailed {
        id: String,
        generation: Generation,
        reason: String,
    },
    Exited {
        id: String,
        generation: Generation,
        exit: Exit,
    },
    /// Append a child. The id must be new: ask [`Core::contains`].
    Add {
        id: String,
        restart: Restart,
    },
    Remove {
        id: String,
    },
    /// Stop and start again, siblings as the strategy says; not counted as a restart.
    Restart {
        id: String,
    },
    /// Stop everything in reverse order, then exit.
    Stop,
}

/// What to do. Every `Start`, `CancelStart` and `Stop` must be answered by an input sooner or later.
#[derive(Debug, Clone, PartialEq)]
pub enum Output {
    Start {
        id: String,
        generation: Generation,
    },
    CancelStart {
        id: String,
        generation: Generation,
    },
    Stop {
        id: String,
        generation: Generation,
    },
    /// A child added at run time is up, or failed its first start and is not kept.
    Admitted {
        id: String,
        result: Result<(), String>,
    },
    /// The spec is gone and nothing of it runs.
    Removed {
        id: String,
    },
    /// A child failed and will be started again after `delay`.
    Restarting {
        id: String,
        exit: Exit,
        delay: Duration,
    },
    /// All children that should run are up, for the first time.
    Ready,
    /// All children are gone; nothing follows.
    Exit(Verdict),
}

/// Where a child is, for status.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ChildState {
    /// Not running: ended normally, or waits for its turn.
    Down,
    /// Waits for its backoff.
    Waiting,
    Starting,
    Up,
    Stopping,
}

#[derive(Debug, Clone, PartialEq)]
enum State {
    Down,
    Starting(Generation),
    Up(Generation),
    Stopping(Generation),
}

#[derive(Debug)]
struct Child {
    id: String,
    restart: Restart,
    state: State,
    generation: Generation,
    /// Should run when it is down.
    wanted: bool,
    /// Must be stopped before anything else happens to it.
    doomed: bool,
    /// Drop the spec once it is down.
    remove: bool,
    /// Added at run time and not up yet.
    admission: bool,
    started_once: bool,
    not_before: Duration,
    up_since: Duration,
    /// Failures in a row, for the backoff.
    failures: u32,
    restarts: u32,
    last_exit: Option<Exit>,
}

#[derive(Debug, PartialEq)]
enum Phase {
    New,
    Running,
    Ending(Verdict),
    Done,
}

/// One supervisor's decisions. See the module's documentation.
#[derive(Debug)]
pub struct Core {
    strategy: Strategy,
    intensity: Intensity,
    backoff: Backoff,
    children: Vec<Child>,
    /// Times of counted restarts within the intensity's window.
    restarts: VecDeque<Duration>,
    restarts_total: u64,
    phase: Phase,
    ready: bool,
}

/// A child as status shows it.
#[derive(Debug, Clone, PartialEq)]
pub struct ChildView {
    pub id: String,
    pub restart: Restart,
    pub state: ChildState,
    pub generation: Generation,
    pub restarts: u32,
    pub last_exit: Option<Exit>,
}

impl Core {
    /// `children`: ids (each once) with restart rules, in start order.
    pub fn new(
        strategy: Strategy,
        intensity: Intensity,
        backoff: Backoff,
        children: Vec<(String, Restart)>,
    ) -> Core {
        let children = children.into_iter().map(|(id, restart)| Child::new(id, restart)).collect();
        Core {
            strategy,
            intensity,
            backoff,
            children,
            restarts: VecDeque::new(),
            restarts_total: 0,
            phase: Phase::New,
            ready: false,
        }
    }

    pub fn handle(&mut self, now: Duration, input: Input) -> Vec<Output> {
        let mut out = Vec::new();
        if self.phase == Phase::Done {
            return out;
        }
        match input {
            Input::Begin => self.phase = Phase::Running,
            Input::Tick => {}
            Input::Started { id, generation } => self.started(now, &id, generation, &mut out),
            Input::StartFailed { id, generation, reason } => {
                self.start_failed(now, &id, generation, reason, &mut out);
            }
            Input::Exited { id, generation, exit } => {
                self.exited(now, &id, generation, exit, &mut out);
            }
            Input::Add { id, restart } => self.add(id, restart),
            Input::Remove { id } => self.remove(&id),
            Input::Restart { id } => self.restart(&id),
            Input::Stop => self.end(Verdict::Stopped),
        }
        self.reconcile(now, &mut out);
        out
    }

    /// When [`Input::Tick`] is due, if any backoff is running.
    pub fn next_wake(&self, now: Duration) -> Option<Duration> {
        if self.phase != Phase::Running {
            return None;
        }
        let waiting = |child: &&Child| child.is_down() && child.wanted && child.not_before > now;
        self.children.iter().filter(waiting).map(|child| child.not_before).min()
    }

    pub fn contains(&self, id: &str) -> bool {
        self.children.iter().any(|child| child.id == id)
    }

    /// Neither stopping nor stopped.
    pub fn accepts(&self) -> bool {
        matches!(self.phase, Phase::New | Phase::Running)
    }

    pub fn restarts_total(&self) -> u64 {
        self.restarts_total
    }

    /// In start order.
    pub fn children(&self, now: Duration) -> Vec<ChildView> {
        self.children.iter().map(|child| child.view(now)).collect()
    }

    fn started(&mut self, now: Duration, id: &str, generation: Generation, out: &mut Vec<Output>) {
        let Some(child) = self.find(id) else { return };
        match child.state {
            State::Starting(current) if current == generation => {
                child.state = State::Up(generation);
                child.up_since = now;
                child.started_once = true;
                if std::mem::take(&mut child.admission) {
                    out.push(Output::Admitted { id: id.to_string(), result: Ok(()) });
                }
            }
            // The start outran its cancellation: what it made must be stopped.
            State::Stopping(current) if current == generation => {
                out.push(Output::Stop { id: id.to_string(), generation });
            }
            _ => {}
        }
    }

    fn start_failed(
        &mut self,
        now: Duration,
        id: &str,
        generation: Generation,
        reason: String,
        out: &mut Vec<Output>,
    ) {
        let Some(index) = self.index(id) else { return };
        let child = &mut self.children[index];
        match child.state {
            State::Stopping(current) if current == generation => child.state = State::Down,
            State::Starting(current) if current == generation => {
                child.state = State::Down;
                if child.admission {
                    child.admission = false;
                    child.remove = true;
                    child.wanted = false;
                    out.push(Output::Admitted { id: id.to_string(), result: Err(reason) });
                } else if !child.doomed {
                    self.failed(now, index, Exit::StartFailed(reason), out);
                }
            }
            _ => {}
        }
    }

    fn exited(
        &mut self,
        now: Duration,
        id: &str,
        generation: Generation,
        exit: Exit,
        out: &mut Vec<Output>,
    ) {
        let Some(index) = self.index(id) else { return };
        let child = &mut self.children[index];
        match child.state {
            State::Stopping(current) if current == generation => child.state = State::Down,
            State::Up(current) if current == generation => {
                child.state = State::Down;
                if child.doomed {
                    return;
                }
                child.last_exit = Some(exit.clone());
                if now.saturating_sub(child.up_since) > self.intensity.within {
                    child.failures = 0;
                }
                let normal = matches!(exit, Exit::Normal(_));
                match child.restart {
                    Restart::Transient if normal => child.wanted = false,
                    _ => self.failed(now, index, exit, out),
                }
            }
            _ => {}
        }
    }

    /// A child that should run does not: count, then restart or give up.
    fn failed(&mut self, now: Duration, index: usize, exit: Exit, out: &mut Vec<Output>) {
        let child = &mut self.children[index];
        child.last_exit = Some(exit.clone());
        if child.restart == Restart::Temporary {
            child.wanted = false;
            child.remove = true;
            return;
        }
        let id = child.id.clone();
        if !self.count_restart(now) {
            self.end(Verdict::Escalated { child: id, exit });
            return;
        }
        let child = &mut self.children[index];
        child.restarts += 1;
        child.failures = child.failures.saturating_add(1);
        let (failures, draw) = (child.failures, child.generation);
        let delay = self.backoff.delay(failures, &id, draw).min(self.longest_delay());
        self.restart_group(index, now + delay);
        out.push(Output::Restarting { id, exit, delay });
    }

    /// True if one more restart is allowed at `now`.
    fn count_restart(&mut self, now: Duration) -> bool {
        while self.restarts.front().is_some_and(|at| now - *at > self.intensity.within) {
            self.restarts.pop_front();
        }
        self.restarts.push_back(now);
        let allowed =
            self.restarts.len() <= self.intensity.max as usize || mutated("no-restart-intensity");
        self.restarts_total += u64::from(allowed);
        allowed
    }

    /// `max + 1` failures with this delay between them fall within the window.
    fn longest_delay(&self) -> Duration {
        self.intensity.within / (self.intensity.max.saturating_add(2))
    }

    /// Marks `index` and, as the strategy says, its siblings to run anew from `not_before` on.
    fn restart_group(&mut self, index: usize, not_before: Duration) {
        let group = match self.strategy {
            Strategy::OneForOne => index..index + 1,
            Strategy::OneForAll => 0..self.children.len(),
            Strategy::RestForOne => index..self.children.len(),
        };
        for (at, child) in self.children.iter_mut().enumerate() {
            if !group.contains(&at) || child.remove {
                continue;
            }
            if at != index && child.restart == Restart::Temporary && child.started_once {
                child.wanted = false;
                child.remove = true;
            } else {
                child.wanted = true;
                child.not_before = child.not_before.max(not_before);
            }
            child.doomed = !child.is_down();
        }
    }

    fn add(&mut self, id: String, restart: Restart) {
        if self.accepts() && !self.contains(&id) {
            let mut child = Child::new(id, restart);
            child.admission = true;
            self.children.push(child);
        }
    }

    fn remove(&mut self, id: &str) {
        if let Some(child) = self.find(id) {
            child.wanted = false;
            child.remove = true;
            child.doomed = !child.is_down();
        }
    }

    fn restart(&mut self, id: &str) {
        if let Some(index) = self.index(id)
            && self.accepts()
        {
            self.children[index].not_before = Duration::ZERO;
            self.restart_group(index, Duration::ZERO);
        }
    }

    fn end(&mut self, verdict: Verdict) {
        if !self.accepts() {
            return;
        }
        self.phase = Phase::Ending(verdict);
        for child in &mut self.children {
            child.wanted = false;
            child.doomed = !child.is_down();
        }
    }

    /// Issues the stops and starts that the marks ask for.
    fn reconcile(&mut self, now: Duration, out: &mut Vec<Output>) {
        self.stop_next(out);
        self.drop_removed(out);
        match &self.phase {
            Phase::Running => self.start_next(now, out),
            Phase::Ending(verdict) if self.children.iter().all(Child::is_down) => {
                out.push(Output::Exit(verdict.clone()));
                self.phase = Phase::Done;
                return;
            }
            _ => return,
        }
        let up = |child: &Child| !child.wanted || matches!(child.state, State::Up(_));
        if !self.ready && self.children.iter().all(up) {
            self.ready = true;
            out.push(Output::Ready);
        }
    }

    /// One stop at a time, the last child first.
    fn stop_next(&mut self, out: &mut Vec<Output>) {
        let mut busy = false;
        for child in &mut self.children {
            child.doomed &= !child.is_down();
            busy |= matches!(child.state, State::Stopping(_));
        }
        if busy {
            return;
        }
        for child in self.children.iter_mut().rev() {
            let id = || child.id.clone();
            match child.state {
                State::Up(generation) if child.doomed => {
                    out.push(Output::Stop { id: id(), generation });
                    child.state = State::Stopping(generation);
                    return;
                }
                State::Starting(generation) if child.doomed => {
                    out.push(Output::CancelStart { id: id(), generation });
                    child.state = State::Stopping(generation);
                    return;
                }
                _ => {}
            }
        }
    }

    fn drop_removed(&mut self, out: &mut Vec<Output>) {
        self.children.retain(|child| {
            let gone = child.remove && child.is_down();
            if gone {
                out.push(Output::Removed { id: child.id.clone() });
            }
            !gone
        });
    }

    fn start_next(&mut self, now: Duration, out: &mut Vec<Output>) {
        let ordered = self.strategy != Strategy::OneForOne;
        if ordered && self.children.iter().any(|child| child.doomed) {
            return;
        }
        for child in &mut self.children {
            let due = child.is_down() && child.wanted && !child.doomed && now >= child.not_before;
            if due {
                child.generation += 1;
                child.state = State::Starting(child.generation);
                out.push(Output::Start { id: child.id.clone(), generation: child.generation });
            }
            let opens = match self.strategy {
                Strategy::OneForOne => child.started_once || child.admission || !child.wanted,
                _ => !child.wanted || matches!(child.state, State::Up(_)),
            };
            if !opens {
                return;
            }
        }
    }

    fn index(&self, id: &str) -> Option<usize> {
        self.children.iter().position(|child| child.id == id)
    }

    fn find(&mut self, id: &str) -> Option<&mut Child> {
        self.children.iter_mut().find(|child| child.id == id)
    }
}

impl Child {
    fn new(id: String, restart: Restart) -> Child {
        Child {
            id,
            restart,
            state: State::Down,
            generation: 0,
            wanted: true,
            doomed: false,
            remove: false,
            admission: false,
            started_once: false,
            not_before: Duration::ZERO,
            up_since: Duration::ZERO,
            failures: 0,
            restarts: 0,
            last_exit: None,
        }
    }

    fn is_down(&self) -> bool {
        self.state == State::Down
    }

    fn view(&self, now: Duration) -> ChildView {
        let state = match self.state {
            State::Down if self.wanted && self.not_before > now => ChildState::Waiting,
            State::Down => ChildState::Down,
            State::Starting(_) => ChildState::Starting,
            State::Up(_) => ChildState::Up,
            State::Stopping(_) => ChildState::Stopping,
        };
        ChildView {
            id: self.id.clone(),
            restart: self.restart,
            state,
            generation: self.generation,
            restarts: self.restarts,
            last_exit: self.last_exit.clone(),
        }
    }
}
