//! The device thread: runs batches in order and turns panics into failures. In simulations a task
//! takes its place (see `inline.rs`).

use super::feedback::Feedback;
use super::flows::Wires;
use super::inline;
use crate::engines::Compute;
use crate::messages::{Place, RequestId};
use dunlin_model::engine::{Batch, Engine, EngineError, SampleFailure, Sampled, StageOutput};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;
use tokio::sync::mpsc::{UnboundedSender, unbounded_channel};
use tokio::time::Instant;

/// One step to run.
pub struct Job {
    pub step: u64,
    pub batch: Batch,
    /// See [`Engine::begin`].
    pub claims: Vec<u64>,
    /// See [`crate::messages::ShardCast::Run`].
    pub drawn: Vec<Place>,
}

/// How a step ended.
pub enum Outcome {
    /// `sampled` is empty on every stage but the last.
    Done { step: u64, sampled: Vec<Sampled>, micros: u64 },
    /// Nothing of the step was delivered, or, if it is done already, the other shards lack what it
    /// drew. `suspects` are the requests that were in it, where this
    /// shard itself failed (and not a peer it waited for).
    Failed { step: u64, reason: String, suspects: Vec<RequestId> },
}

impl Outcome {
    pub fn step(&self) -> u64 {
        match self {
            Outcome::Done { step, .. } | Outcome::Failed { step, .. } => *step,
        }
    }
}

/// Handle to the thread. The queue's length is bounded by the scheduler's credit
/// ([`Limits::steps`](crate::scheduler::Limits::steps)).
pub struct Device {
    jobs: Jobs,
}

enum Jobs {
    Thread(Sender<Job>),
    Task(UnboundedSender<Job>),
    Stopped,
}

impl Device {
    pub fn start(
        name: String,
        engine: Box<dyn Engine>,
        (wires, feedback): (Wires, Feedback),
        (compute, scrub): (Compute, Scrub),
        report: impl Fn(Outcome) + Send + Sync + 'static,
    ) -> std::io::Result<Self> {
        if let Compute::Inline { step_cost, token_cost } = compute {
            let (jobs, queue) = unbounded_channel();
            let costs = (step_cost, token_cost);
            tokio::spawn(inline::serve(engine, (wires, feedback), queue, (costs, scrub), report));
            return Ok(Self { jobs: Jobs::Task(jobs) });
        }
        let (jobs, queue) = channel();
        std::thread::Builder::new()
            .name(format!("shard {name}"))
            .spawn(move || serve(engine, (wires, feedback), queue, scrub, report))?;
        Ok(Self { jobs: Jobs::Thread(jobs) })
    }

    pub fn run(&self, job: Job) -> Result<(), String> {
        let taken = match &self.jobs {
            Jobs::Thread(jobs) => jobs.send(job).is_ok(),
            Jobs::Task(jobs) => jobs.send(job).is_ok(),
            Jobs::Stopped => false,
        };
        if taken { Ok(()) } else { Err("the device thread has ended".to_string()) }
    }

    /// Lets the thread end after the step it is in. Does not wait: the step may hang.
    pub fn stop(&mut self) {
        self.jobs = Jobs::Stopped;
    }
}

fn serve(
    mut engine: Box<dyn Engine>,
    (mut wires, mut feedback): (Wires, Feedback),
    queue: Receiver<Job>,
    mut scrub: Scrub,
    report: impl Fn(Outcome) + Send + Sync + 'static,
) {
    let report = Arc::new(report);
    let tell = |engine: &mut dyn Engine, outcome: Outcome| {
        let report = report.clone();
        engine.beside(Box::new(move || report(outcome)));
    };
    while let Ok(mut job) = queue.recv() {
        let begun = Instant::now();
        let run = || -> Result<(), Failure> {
            feedback.blocking_fill(&mut job.batch, &job.drawn).map_err(Failure::peer)?;
            let sampled = step(engine.as_mut(), &mut wires, &job, &mut scrub)?;
            let micros = begun.elapsed().as_micros().try_into().unwrap_or(u64::MAX);
            let drawn = feedback.keep(job.step, &sampled);
            // Before the other shards: on the same machine one of them is woken on this
            // thread's processor, which would have its next turn when that one's step is over.
            tell(&mut *engine, Outcome::Done { step: job.step, sampled, micros });
            feedback.blocking_send(drawn).map_err(Failure::peer)
        };
        let failure = match catch_unwind(AssertUnwindSafe(run)) {
            Ok(Ok(())) => continue,
            Ok(Err(failure)) => failure,
            Err(panic) => Failure { reason: format!("panic: {}", panic_text(&*panic)), own: true },
        };
        tell(&mut *engine, failure.outcome(&job));
        // Peers must not see the flows close before this shard has said why: wait for its end.
        while queue.recv().is_ok() {}
        return;
    }
}

/// Why a step failed.
pub struct Failure {
    pub reason: String,
    /// This shard's own doing, rather than a peer's.
    pub own: bool,
}

impl Failure {
    pub fn peer(reason: String) -> Self {
        Self { reason, own: false }
    }

    pub fn engine(error: &EngineError) -> Self {
        // No request is to blame for a peer, or for weights that have changed in memory.
        let others = matches!(error, EngineError::Collective(_) | EngineError::Weights { .. });
        Self { reason: error.to_string(), own: !others }
    }

    pub fn outcome(self, job: &Job) -> Outcome {
        let suspects = match self.own {
            true => job.batch.seqs.iter().map(|s| RequestId(s.request)).collect(),
            false => Vec::new(),
        };
        Outcome::Failed { step: job.step, reason: self.reason, suspects }
    }
}

fn step(
    engine: &mut dyn Engine,
    wires: &mut Wires,
    job: &Job,
    scrub: &mut Scrub,
) -> Result<Vec<Sampled>, Failure> {
    let peer = Failure::peer;
    wires.begin(job.step, &job.batch);
    let input = wires.receive(job.batch.tokens() * engine.hidden()).map_err(peer)?;
    let pause = engine.begin(job.step, &job.batch, &job.claims);
    if !pause.is_zero() {
        std::thread::sleep(pause);
    }
    let output = engine.step(&job.batch, input.as_deref(), wires.group());
    let output = output.map_err(|error| Failure::engine(&error))?;
    look_at_weights(engine, &output, scrub)?;
    wires.end().map_err(peer)?;
    match output {
        StageOutput::Hidden(values) => {
            wires.send(&values).map_err(peer)?;
            Ok(Vec::new())
        }
        StageOutput::Sampled(sampled) => Ok(sampled),
    }
}

/// When the weights in memory are compared again with what was loaded, whatever they give.
pub struct Scrub {
    every: Option<Duration>,
    last: Instant,
}

impl Scrub {
    pub fn new(every: Option<Duration>) -> Self {
        Self { every, last: Instant::now() }
    }

    fn is_due(&mut self) -> bool {
        let due = self.every.is_some_and(|every| self.last.elapsed() >= every);
        if due {
            self.last = Instant::now();
        }
        due
    }
}

/// Where numbers are not finite, or it is time, the weights may have changed in memory: then this
/// is the shard's failure, nothing of the step is used, and the requests are computed again with
/// weights that were loaded anew.
pub fn look_at_weights(
    engine: &dyn Engine,
    output: &StageOutput,
    scrub: &mut Scrub,
) -> Result<(), Failure> {
    let finite = match output {
        StageOutput::Hidden(values) => values.iter().all(|value| value.is_finite()),
        StageOutput::Sampled(drawn) => {
            let spoiled = |one: &Sampled| one.token == Err(SampleFailure::NotFinite);
            !drawn.iter().any(spoiled)
        }
    };
    if !scrub.is_due() && finite {
        return Ok(());
    }
    engine.verify().map_err(|error| Failure::engine(&error))
}

pub fn panic_text(panic: &(dyn std::any::Any + Send)) -> String {
    panic
        .downcast_ref::<&str>()
        .map(|s| s.to_string())
        .or_else(|| panic.downcast_ref::<String>().cloned())
        .unwrap_or_else(|| "no message".into())
}
