//! A device without a thread: steps run on a task of the runtime, for simulations on one thread.
//!
//! An engine reduces with its group in the middle of a step, which cannot wait on a task. So the
//! step is run with what the group has answered so far; where that is not enough, the task waits
//! for the missing exchange and runs the step again from its beginning. Engines for this mode write
//! the same into their KV cache however often a step is run.

use super::device::{Failure, Job, Outcome, Scrub, look_at_weights, panic_text};
use super::feedback::Feedback;
use super::flows::Wires;
use dunlin_model::engine::{
    Collective, CollectiveError, Engine, EngineError, Sampled, StageOutput,
};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;
use tokio::sync::mpsc::UnboundedReceiver;
use tokio::time::Instant;

/// As the device thread's loop; each step takes (per step, per token) of the runtime's clock.
pub async fn serve(
    mut engine: Box<dyn Engine>,
    (mut wires, mut feedback): (Wires, Feedback),
    mut queue: UnboundedReceiver<Job>,
    (costs, mut scrub): ((Duration, Duration), Scrub),
    report: impl Fn(Outcome) + Send + 'static,
) {
    while let Some(mut job) = queue.recv().await {
        let begun = Instant::now();
        let run = async {
            feedback.fill(&mut job.batch, &job.drawn).await.map_err(Failure::peer)?;
            step(&mut *engine, &mut wires, &job, (costs, &mut scrub)).await
        };
        let failure = match run.await {
            Ok(sampled) => {
                let micros = begun.elapsed().as_micros().try_into().unwrap_or(u64::MAX);
                let drawn = feedback.keep(job.step, &sampled);
                report(Outcome::Done { step: job.step, sampled, micros });
                match feedback.send(drawn).await {
                    Ok(()) => continue,
                    Err(reason) => Failure::peer(reason),
                }
            }
            Err(failure) => failure,
        };
        report(failure.outcome(&job));
        // As the thread does: the flows stay open until this shard has spoken.
        while queue.recv().await.is_some() {}
        return;
    }
}

async fn step(
    engine: &mut dyn Engine,
    wires: &mut Wires,
    job: &Job,
    ((step_cost, token_cost), scrub): ((Duration, Duration), &mut Scrub),
) -> Result<Vec<Sampled>, Failure> {
    let tokens = job.batch.tokens();
    wires.begin(job.step, &job.batch);
    let input = wires.receive_async(tokens * engine.hidden()).await.map_err(Failure::peer)?;
    let pause = engine.begin(job.step, &job.batch, &job.claims);
    let cost = pause + step_cost + token_cost * u32::try_from(tokens).unwrap_or(u32::MAX);
    if !cost.is_zero() {
        tokio::time::sleep(cost).await;
    }
    let mut recorded = Recorded { size: wires.group().size(), ..Recorded::default() };
    let output = loop {
        recorded.call = 0;
        let run = || engine.step(&job.batch, input.as_deref(), &mut recorded);
        let result = catch_unwind(AssertUnwindSafe(run)).map_err(|panic| Failure {
            reason: format!("panic: {}", panic_text(&*panic)),
            own: true,
        })?;
        let Some(mine) = recorded.asked.take() else {
            break result.map_err(|error| Failure::engine(&error))?;
        };
        let all = wires.group().exchange_async(&mine).await;
        let all = all.map_err(|error| Failure::engine(&EngineError::Collective(error)))?;
        recorded.answers.push(all);
    };
    look_at_weights(engine, &output, scrub)?;
    wires.end_async().await.map_err(Failure::peer)?;
    match output {
        StageOutput::Hidden(values) => {
            wires.send_async(&values).await.map_err(Failure::peer)?;
            Ok(Vec::new())
        }
        StageOutput::Sampled(sampled) => Ok(sampled),
    }
}

/// Answers from what was exchanged before; the first call that was not is noted and fails.
#[derive(Default)]
struct Recorded {
    size: usize,
    /// All ranks' values of each exchange of this step.
    answers: Vec<Vec<Vec<f32>>>,
    call: usize,
    asked: Option<Vec<f32>>,
}

impl Recorded {
    fn exchange(&mut self, mine: &[f32]) -> Result<&[Vec<f32>], CollectiveError> {
        let call = self.call;
        self.call += 1;
        match self.answers.get(call) {
            Some(all) => Ok(all),
            None => {
                self.asked.get_or_insert_with(|| mine.to_vec());
                Err(CollectiveError { rank: 0, reason: "is not answered yet".into() })
            }
        }
    }
}

impl Collective for Recorded {
    fn size(&self) -> usize {
        self.size
    }

    fn all_reduce(&mut self, values: &mut [f32]) -> Result<(), CollectiveError> {
        if self.size == 1 {
            return Ok(());
        }
        super::flows::sum(self.exchange(values)?, values)
    }

    fn all_gather(&mut self, rows: usize, values: &[f32]) -> Result<Vec<f32>, CollectiveError> {
        if self.size == 1 || rows == 0 {
            return Ok(values.to_vec());
        }
        super::flows::join(self.exchange(values)?, rows)
    }
}
