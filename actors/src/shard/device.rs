//! The device thread: runs batches in order and turns panics into failures.

use super::flows::Wires;
use crate::messages::RequestId;
use dunlin_model::engine::{Batch, Engine, EngineError, Sampled, StageOutput};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Instant;

/// One step to run.
pub struct Job {
    pub step: u64,
    pub batch: Batch,
}

/// How a step ended.
pub enum Outcome {
    /// `sampled` is empty on every stage but the last.
    Done { step: u64, sampled: Vec<Sampled>, micros: u64 },
    /// Nothing of the step was delivered. `suspects` are the requests that were in it, where this
    /// shard itself failed (and not a peer it waited for).
    Failed { step: u64, reason: String, suspects: Vec<RequestId> },
}

/// Handle to the thread. The queue's length is bounded by the scheduler's credit: at most as many
/// steps are in flight as the replica has stages.
pub struct Device {
    jobs: Option<Sender<Job>>,
}

impl Device {
    pub fn start(
        name: String,
        engine: Box<dyn Engine>,
        wires: Wires,
        report: impl Fn(Outcome) + Send + 'static,
    ) -> std::io::Result<Self> {
        let (jobs, queue) = channel();
        std::thread::Builder::new()
            .name(format!("shard {name}"))
            .spawn(move || serve(engine, wires, queue, report))?;
        Ok(Self { jobs: Some(jobs) })
    }

    pub fn run(&self, job: Job) -> Result<(), String> {
        let gone = || "the device thread has ended".to_string();
        self.jobs.as_ref().ok_or_else(gone)?.send(job).map_err(|_| gone())
    }

    /// Lets the thread end after the step it is in. Does not wait: the step may hang.
    pub fn stop(&mut self) {
        self.jobs = None;
    }
}

fn serve(
    mut engine: Box<dyn Engine>,
    mut wires: Wires,
    queue: Receiver<Job>,
    report: impl Fn(Outcome),
) {
    while let Ok(job) = queue.recv() {
        let begun = Instant::now();
        let result = catch_unwind(AssertUnwindSafe(|| step(engine.as_mut(), &mut wires, &job)));
        let failure = match result {
            Ok(Ok(sampled)) => {
                let micros = begun.elapsed().as_micros().try_into().unwrap_or(u64::MAX);
                report(Outcome::Done { step: job.step, sampled, micros });
                continue;
            }
            Ok(Err(failure)) => failure,
            Err(panic) => Failure { reason: format!("panic: {}", panic_text(&panic)), own: true },
        };
        let suspects = match failure.own {
            true => job.batch.seqs.iter().map(|s| RequestId(s.request)).collect(),
            false => Vec::new(),
        };
        report(Outcome::Failed { step: job.step, reason: failure.reason, suspects });
        return;
    }
}

struct Failure {
    reason: String,
    /// This shard's own doing, rather than a peer's.
    own: bool,
}

fn step(engine: &mut dyn Engine, wires: &mut Wires, job: &Job) -> Result<Vec<Sampled>, Failure> {
    let peer = |reason: String| Failure { reason, own: false };
    wires.begin(job.step, &job.batch);
    let input = wires.receive(job.batch.tokens() * engine.hidden()).map_err(peer)?;
    let output = engine.step(&job.batch, input.as_deref(), wires.group()).map_err(|error| {
        let own = !matches!(error, EngineError::Collective(_));
        Failure { reason: error.to_string(), own }
    })?;
    match output {
        StageOutput::Hidden(values) => {
            wires.send(&values).map_err(peer)?;
            Ok(Vec::new())
        }
        StageOutput::Sampled(sampled) => Ok(sampled),
    }
}

fn panic_text(panic: &(dyn std::any::Any + Send)) -> String {
    panic
        .downcast_ref::<&str>()
        .map(|s| s.to_string())
        .or_else(|| panic.downcast_ref::<String>().cloned())
        .unwrap_or_else(|| "no message".into())
}
