//! The loop that keeps the processes running: feeds the supervisor's core and does what it says.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::mpsc as blocking;
use std::time::Duration;

use rustix::process::Signal;
use tokio::sync::{mpsc, watch};
use tokio::task::AbortHandle;
use tokio::time::Instant;

use super::child::{self, End, Live, Report, Running};
use super::{ProcessEvent, ProcessSpec, ProcessesError, ProcessesSpec, Snapshot};
use crate::supervise::core::{Core, Generation, Input, Output};
use crate::supervise::{Exit, Restart, Strategy, Verdict};

/// What the loop hears.
pub(super) enum Note {
    Spawned { id: String, generation: Generation, result: Result<Running, String> },
    Said { id: String, generation: Generation, report: Report },
    Ended { id: String, generation: Generation, end: End },
    NotReady { id: String, generation: Generation },
    NotStopped { id: String, generation: Generation },
    Tick,
    Stop,
}

type Notes = mpsc::UnboundedSender<Note>;

struct Instance {
    generation: Generation,
    since: Instant,
    /// Why this process is going to be killed by us.
    doom: Option<String>,
}

struct Loop {
    core: Core,
    origin: Instant,
    spec: ProcessesSpec,
    notes: Notes,
    spawner: blocking::Sender<(ProcessSpec, Generation)>,
    live: Arc<Live>,
    instances: BTreeMap<String, Instance>,
    snapshot: Snapshot,
    publish: watch::Sender<Snapshot>,
    events: mpsc::UnboundedSender<ProcessEvent>,
    /// The first error that a process reported before it was ever ready.
    fatal: Option<ProcessesError>,
    /// Last log lines of processes that ended.
    tails: BTreeMap<String, Vec<String>>,
    timer: Option<AbortHandle>,
}

/// Starts the loop, and the thread from which all processes are started.
pub(super) fn spawn(
    spec: ProcessesSpec,
    notes: Notes,
    inbox: mpsc::UnboundedReceiver<Note>,
    publish: watch::Sender<Snapshot>,
    events: mpsc::UnboundedSender<ProcessEvent>,
    live: Arc<Live>,
) {
    let policies = spec.processes.iter().map(|p| (p.name.clone(), Restart::Permanent)).collect();
    let core = Core::new(Strategy::OneForOne, spec.intensity, spec.backoff, policies);
    let names = spec.processes.iter().map(|p| (p.name.clone(), Default::default()));
    let snapshot = Snapshot { processes: names.collect(), ended: None };
    let spawner = spawner_thread(notes.clone(), live.clone());
    let state = Loop {
        core,
        origin: Instant::now(),
        spec,
        notes,
        spawner,
        live,
        instances: BTreeMap::new(),
        snapshot,
        publish,
        events,
        fatal: None,
        tails: BTreeMap::new(),
        timer: None,
    };
    tokio::spawn(state.run(inbox));
}

/// One thread starts all processes and lives as long as the loop: a child that asked for the
/// kernel's parent-death signal dies with the *thread* that started it.
fn spawner_thread(notes: Notes, live: Arc<Live>) -> blocking::Sender<(ProcessSpec, Generation)> {
    let (spawner, requests) = blocking::channel::<(ProcessSpec, Generation)>();
    let runtime = tokio::runtime::Handle::current();
    let body = move || {
        let _inside = runtime.enter();
        while let Ok((spec, generation)) = requests.recv() {
            let result = child::start(&spec, &live);
            let note = Note::Spawned { id: spec.name, generation, result };
            if notes.send(note).is_err() {
                live.kill_all();
            }
        }
    };
    let thread = std::thread::Builder::new().name("process-spawner".to_string()).spawn(body);
    if let Err(e) = thread {
        // The requests then fail, and the start with them.
        tracing::error!("no thread to start processes from: {e}");
    }
    spawner
}

impl Loop {
    async fn run(mut self, mut inbox: mpsc::UnboundedReceiver<Note>) {
        self.step(Input::Begin);
        while self.snapshot.ended.is_none() {
            let Some(note) = inbox.recv().await else { break };
            self.hear(note);
            self.publish.send_replace(self.snapshot.clone());
        }
        self.live.kill_all();
    }

    fn hear(&mut self, note: Note) {
        match note {
            Note::Spawned { id, generation, result } => self.spawned(id, generation, result),
            Note::Said { id, generation, report } => self.said(&id, generation, report),
            Note::Ended { id, generation, end } => self.ended(id, generation, end),
            Note::NotReady { id, generation } => {
                let ready = self.state(&id).ready.is_some();
                let bound =
                    self.process(&id).map_or(Duration::ZERO, |process| process.ready_within);
                if let Some(instance) = self.current(&id, generation)
                    && !ready
                {
                    instance.doom = Some(format!("was not ready within {bound:?}"));
                    self.live.signal(&id, Signal::KILL);
                }
            }
            Note::NotStopped { id, generation } => {
                if self.current(&id, generation).is_some() {
                    tracing::warn!(node = id, "does not stop in time; killing it");
                    self.live.signal(&id, Signal::KILL);
                }
            }
            Note::Tick => self.step(Input::Tick),
            Note::Stop => self.step(Input::Stop),
        }
    }

    fn spawned(&mut self, id: String, generation: Generation, result: Result<Running, String>) {
        let running = match result {
            Ok(running) => running,
            Err(reason) => {
                if self.state(&id).restarts == 0 {
                    self.give_up(&id, reason.clone());
                }
                self.step(Input::StartFailed { id, generation, reason });
                return;
            }
        };
        let pid = running.pid;
        let state = self.state(&id);
        (state.pid, state.ready) = (Some(pid), None);
        let instance = Instance { generation, since: Instant::now(), doom: None };
        self.instances.insert(id.clone(), instance);
        let _ = self.events.send(ProcessEvent::Started { name: id.clone(), pid });
        if let Some(within) = self.process(&id).map(|process| process.ready_within) {
            self.later(within, Note::NotReady { id: id.clone(), generation });
        }
        self.watch(id.clone(), generation, running);
        self.step(Input::Started { id, generation });
    }

    fn watch(&self, id: String, generation: Generation, running: Running) {
        let (notes, live) = (self.notes.clone(), self.live.clone());
        tokio::spawn(async move {
            let (to, name) = (notes.clone(), id.clone());
            let report = move |report| {
                let _ = to.send(Note::Said { id: name.clone(), generation, report });
            };
            let end = running.watch(&id, &live, report).await;
            let _ = notes.send(Note::Ended { id, generation, end });
        });
    }

    fn said(&mut self, id: &str, generation: Generation, report: Report) {
        let Some(instance) = self.current(id, generation) else { return };
        match report {
            Report::Ready(report) => {
                let after = instance.since.elapsed();
                self.state(id).ready = Some(report.clone());
                let name = id.to_string();
                let _ = self.events.send(ProcessEvent::Ready { name, report, after });
            }
            Report::Error(message) => {
                instance.doom = Some(format!("reported: {message}"));
                let never_ready = self.state(id).restarts == 0 && self.state(id).ready.is_none();
                if never_ready {
                    self.give_up(id, message);
                    self.step(Input::Stop);
                }
            }
        }
    }

    fn ended(&mut self, id: String, generation: Generation, end: End) {
        let Some(instance) = self.instances.get(&id) else { return };
        if instance.generation != generation {
            return;
        }
        let how = match &instance.doom {
            Some(reason) => reason.clone(),
            None => end.how,
        };
        self.instances.remove(&id);
        let state = self.state(&id);
        (state.pid, state.ready, state.last_exit) = (None, None, Some(how.clone()));
        self.tails.insert(id.clone(), end.tail);
        let _ = self.events.send(ProcessEvent::Exited { name: id.clone(), how: how.clone() });
        self.step(Input::Exited { id, generation, exit: Exit::Failed(how) });
    }

    fn give_up(&mut self, id: &str, reason: String) {
        let name = id.to_string();
        self.fatal.get_or_insert(ProcessesError::NotStarted { name, reason });
    }

    fn step(&mut self, input: Input) {
        for output in self.core.handle(self.origin.elapsed(), input) {
            match output {
                Output::Start { id, generation } => {
                    let Some(process) = self.process(&id).cloned() else { continue };
                    if self.spawner.send((process, generation)).is_err() {
                        let result = Err("no thread to start it from".to_string());
                        let _ = self.notes.send(Note::Spawned { id, generation, result });
                    }
                }
                // A start is quick: it is awaited, and what it made is stopped then.
                Output::CancelStart { .. } => {}
                Output::Stop { id, generation } => {
                    self.live.signal(&id, Signal::TERM);
                    if let Some(within) = self.process(&id).map(|process| process.stop_within) {
                        self.later(within, Note::NotStopped { id, generation });
                    }
                }
                Output::Restarting { id, exit, delay } => self.note_restart(id, &exit, delay),
                Output::Exit(verdict) => self.finish(verdict),
                Output::Admitted { .. } | Output::Removed { .. } | Output::Ready => {}
            }
        }
        if self.fatal.is_some() && self.core.accepts() {
            self.step(Input::Stop);
        }
        self.arm_timer();
    }

    fn note_restart(&mut self, id: String, exit: &Exit, delay: Duration) {
        self.state(&id).restarts += 1;
        let reason = match exit {
            Exit::StartFailed(_) => "start_failed",
            _ => "exited",
        };
        let labels = [("node", id.clone()), ("reason", reason.to_string())];
        metrics::counter!("dunlin_node_process_restarts_total", &labels).increment(1);
        let how = match exit {
            Exit::Failed(how) => how.clone(),
            other => other.to_string(),
        };
        let _ = self.events.send(ProcessEvent::Restarting { name: id, how, delay });
    }

    fn finish(&mut self, verdict: Verdict) {
        let result = match (self.fatal.take(), verdict) {
            (Some(fatal), _) => Err(fatal),
            (None, Verdict::Escalated { child, exit }) => {
                let how = match exit {
                    Exit::Failed(how) => how,
                    other => other.to_string(),
                };
                let lines = self.tails.remove(&child).unwrap_or_default();
                let tail = lines.iter().map(|line| format!("\n    {line}")).collect();
                let log =
                    self.process(&child).map(|process| process.log_file.display().to_string());
                Err(ProcessesError::TooManyRestarts {
                    name: child,
                    how,
                    max: self.spec.intensity.max,
                    within: self.spec.intensity.within,
                    log: log.unwrap_or_default(),
                    tail,
                })
            }
            (None, _) => Ok(()),
        };
        self.snapshot.ended = Some(result);
    }

    fn current(&mut self, id: &str, generation: Generation) -> Option<&mut Instance> {
        self.instances.get_mut(id).filter(|instance| instance.generation == generation)
    }

    fn state(&mut self, id: &str) -> &mut super::ProcessState {
        self.snapshot.processes.entry(id.to_string()).or_default()
    }

    fn process(&self, id: &str) -> Option<&ProcessSpec> {
        self.spec.processes.iter().find(|process| process.name == id)
    }

    fn later(&self, after: Duration, note: Note) {
        let notes = self.notes.clone();
        tokio::spawn(async move {
            tokio::time::sleep(after).await;
            let _ = notes.send(note);
        });
    }

    fn arm_timer(&mut self) {
        if let Some(timer) = self.timer.take() {
            timer.abort();
        }
        if let Some(at) = self.core.next_wake(self.origin.elapsed()) {
            let (notes, at) = (self.notes.clone(), self.origin + at);
            let timer = tokio::spawn(async move {
                tokio::time::sleep_until(at).await;
                let _ = notes.send(Note::Tick);
            });
            self.timer = Some(timer.abort_handle());
        }
    }
}
