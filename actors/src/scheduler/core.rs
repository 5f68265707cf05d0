//! The scheduler's state and what it does with each input.

use super::config::Limits;
use super::fairness::Tenants;
use super::load::{Pace, Totals};
use super::plan::Step;
use super::sequence::{Claim, Echo, Phase, Queue, Run, Sequence, Slot};
use crate::kv::{Kv, KvError};
use crate::messages::{
    Attempt, FailureCode, FinishReason, LoadReport, Place, ReplicaEpoch, RequestId, SchedulerEvent,
    Work,
};
use dunlin_model::engine::{Batch, SampleFailure, Sampled};
use dunlin_runtime::mutated;
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::time::Duration;

/// A load report goes out at least this often, changed or not.
const REPORT_EVERY: Duration = Duration::from_secs(1);

#[derive(Debug)]
pub enum Input {
    Submit {
        epoch: ReplicaEpoch,
        work: Box<Work>,
    },
    Cancel {
        epoch: ReplicaEpoch,
        request: RequestId,
        attempt: Attempt,
    },
    StepDone {
        epoch: ReplicaEpoch,
        step: u64,
        sampled: Vec<Sampled>,
        micros: u64,
    },
    StepFailed {
        epoch: ReplicaEpoch,
        step: u64,
        reason: String,
    },
    /// A few times a second: looks for overdue steps, reports the load.
    Tick,
}

#[derive(Debug, Clone, PartialEq)]
pub enum Output {
    /// For every shard of the replica. Steps rise by one, from 1. `claims[i]` names the tokens
    /// below sequence `i`'s position (see [`super::sequence::Claim`]). `drawn` lists the sequences
    /// whose token is one that a step in flight draws for them; what stands there is no token.
    Run { step: u64, batch: Batch, claims: Vec<u64>, drawn: Vec<Place> },
    /// For the router.
    Event(SchedulerEvent),
    /// A shard reported that a step failed. Nothing more is planned; the shard has told placement.
    Halted { reason: String },
    /// The replica does not work, as only the scheduler can tell: placement must hear of it, and
    /// nothing more is planned. `suspects` were in the step that did not end.
    Broken { reason: String, suspects: Vec<RequestId> },
    /// For the metrics.
    Measured(Measure),
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Measure {
    /// From submission to the first step.
    Queued(Duration),
    /// From the first step to the first token.
    Prefilled(Duration),
    /// Between two tokens of one request is not measured here: the gateway sees what clients see.
    /// `took`: since it was planned, or since the step before was done; `micros`: of that, what
    /// the last stage's device worked on it.
    Step {
        tokens: usize,
        took: Duration,
        micros: u64,
    },
    Ended(FinishReason),
    /// A sequence lost its blocks to others.
    Preempted {
        request: RequestId,
    },
    /// So many of its tokens came from the prefix cache.
    PrefixHit {
        request: RequestId,
        tokens: u32,
    },
}

/// The pure core. Holds no KV blocks itself: `kv` is passed in, and must always be the same.
#[derive(Debug)]
pub struct Scheduler {
    pub(super) epoch: ReplicaEpoch,
    pub(super) limits: Limits,
    pub(super) seqs: Vec<Option<Sequence>>,
    pub(super) vacant: Vec<Slot>,
    /// The attempt at a request that has not ended.
    pub(super) by_request: HashMap<RequestId, Slot>,
    /// Ended attempts whose blocks are still in flight.
    pub(super) ending: Vec<Slot>,
    /// Sequences with KV blocks, the one longest without a step first.
    pub(super) running: Vec<Slot>,
    /// The suspect among them.
    pub(super) suspect: Option<Slot>,
    pub(super) suspects: BTreeMap<u64, Slot>,
    pub(super) resumed: BTreeMap<u64, Slot>,
    pub(super) tenants: Tenants,
    pub(super) steps: VecDeque<Step>,
    pub(super) next_step: u64,
    next_arrival: u64,
    broken: bool,
    pub(super) totals: Totals,
    pub(super) pace: Pace,
    /// With static batching: how many may still join the batch.
    pub(super) batch_left: usize,
    kv_seq: u64,
    reported: Option<(Duration, LoadReport)>,
    /// What messages call the last stage and those before it.
    last: String,
    earlier: String,
    /// What happened that a fault plan may wait for.
    pub(super) happened: Vec<Measure>,
}

impl Scheduler {
    pub fn new(epoch: ReplicaEpoch, limits: Limits) -> Self {
        Self {
            epoch,
            limits,
            seqs: Vec::new(),
            vacant: Vec::new(),
            by_request: HashMap::new(),
            ending: Vec::new(),
            running: Vec::new(),
            suspect: None,
            suspects: BTreeMap::new(),
            resumed: BTreeMap::new(),
            tenants: Tenants::default(),
            steps: VecDeque::new(),
            next_step: 1,
            next_arrival: 1,
            broken: false,
            totals: Totals::default(),
            pace: Pace::default(),
            batch_left: 0,
            kv_seq: 0,
            reported: None,
            last: "the last stage".into(),
            earlier: "the stages before the last".into(),
            happened: Vec::new(),
        }
    }

    /// What messages are to call the last stage and those before it.
    pub fn name_stages(&mut self, last: String, earlier: String) {
        (self.last, self.earlier) = (last, earlier);
    }

    /// `now` is monotonic time from any fixed start.
    pub fn handle(&mut self, kv: &mut Kv, now: Duration, input: Input) -> Vec<Output> {
        let mut out = Vec::new();
        let result = self.take(kv, now, input, &mut out).and_then(|()| match self.broken {
            true => Ok(()),
            false => self.plan(kv, now, &mut out),
        });
        if let Err(error) = result {
            let reason = format!("scheduler and KV block manager disagree: {error}");
            self.break_down(reason, Vec::new(), &mut out);
        }
        if cfg!(debug_assertions) && !self.broken {
            let audit = self.audit(kv);
            debug_assert!(audit.is_ok(), "audit: {:#?}", audit.err());
        }
        out.extend(self.happened.drain(..).map(Output::Measured));
        if let Some((stored, removed)) = kv.take_changes() {
            self.kv_seq += 1;
            let seq = self.kv_seq;
            out.push(Output::Event(SchedulerEvent::KvEvents { seq, stored, removed }));
        }
        out
    }

    pub fn load(&self, kv: &Kv) -> LoadReport {
        let usage = kv.usage();
        let left = |seq: &Sequence| {
            let done = seq.run().map_or(0, |run| run.computed);
            u64::from(seq.prompt_len.saturating_sub(done))
        };
        let open = self.seqs.iter().flatten().filter(|s| !matches!(s.phase, Phase::Ending { .. }));
        LoadReport {
            running: self.running.len() as u32,
            waiting: self.waiting() as u32,
            queued_prompt_tokens: open.map(left).sum(),
            kv_blocks_total: usage.total.into(),
            kv_blocks_free: usage.free.into(),
            kv_blocks_live: usage.live.into(),
            kv_blocks_cached: usage.cached.into(),
            preemptions_total: self.totals.preemptions,
            steps_total: self.totals.steps,
            tokens_total: self.totals.drawn_tokens,
            prefix_queries_total: self.totals.prefix_queries,
            prefix_hits_total: self.totals.prefix_hits,
            tokens_per_second: self.pace.tokens_per_second(),
        }
    }

    pub fn running(&self) -> usize {
        self.running.len()
    }

    pub fn waiting(&self) -> usize {
        self.tenants.waiting() + self.resumed.len() + self.suspects.len()
    }

    /// Nothing runs, waits, or is in flight.
    pub fn is_idle(&self) -> bool {
        self.by_request.is_empty() && self.steps.is_empty()
    }

    /// Whether some attempt at the request waits or runs.
    pub fn is_live(&self, request: RequestId) -> bool {
        self.by_request.contains_key(&request)
    }

    /// Steps in flight, the oldest first.
    pub fn steps_in_flight(&self) -> impl Iterator<Item = u64> {
        self.steps.iter().map(|step| step.number)
    }

    pub fn is_broken(&self) -> bool {
        self.broken
    }

    /// Prompt tokens computed so far; a preempted prompt counts again.
    pub fn prompt_tokens_total(&self) -> u64 {
        self.totals.prompt_tokens
    }

    /// Late, duplicate or foreign messages so far.
    pub fn refused_total(&self) -> u64 {
        self.totals.refused
    }

    fn take(
        &mut self,
        kv: &mut Kv,
        now: Duration,
        input: Input,
        out: &mut Vec<Output>,
    ) -> Result<(), KvError> {
        let epoch = match &input {
            Input::Submit { epoch, .. }
            | Input::Cancel { epoch, .. }
            | Input::StepDone { epoch, .. }
            | Input::StepFailed { epoch, .. } => *epoch,
            Input::Tick => {
                self.tick(kv, now, out);
                return Ok(());
            }
        };
        if epoch != self.epoch || self.broken {
            self.totals.refused += 1;
            return Ok(());
        }
        match input {
            Input::Submit { work, .. } => self.submit(kv, now, *work, out),
            Input::Cancel { request, attempt, .. } => self.cancel(kv, request, attempt),
            Input::StepDone { step, sampled, micros, .. } => {
                self.step_done(kv, now, step, sampled, micros, out)
            }
            Input::StepFailed { step, reason, .. } => {
                self.broken = true;
                out.push(Output::Halted { reason: format!("step {step}: {reason}") });
                Ok(())
            }
            Input::Tick => Ok(()),
        }
    }

    fn submit(
        &mut self,
        kv: &mut Kv,
        now: Duration,
        work: Work,
        out: &mut Vec<Output>,
    ) -> Result<(), KvError> {
        if let Some(&slot) = self.by_request.get(&work.request) {
            let live = self.seqs[slot].as_ref().map(|seq| seq.attempt);
            if live.is_some_and(|attempt| attempt >= work.attempt) {
                self.totals.refused += 1;
                return Ok(());
            }
            self.end(kv, slot, true)?;
        }
        let (request, attempt) = (work.request, work.attempt);
        let limit = match admissible(kv, &self.limits, &work) {
            Ok(limit) => limit,
            Err((code, message)) => {
                let failed = SchedulerEvent::Failed { request, attempt, code, message };
                out.push(Output::Event(failed));
                return Ok(());
            }
        };
        if let Some(reason) = complete(&work, limit) {
            out.push(Output::Event(SchedulerEvent::Finished { request, attempt, reason }));
            return Ok(());
        }
        self.enqueue(kv, now, work, limit);
        Ok(())
    }

    fn enqueue(&mut self, kv: &Kv, now: Duration, work: Work, limit: u32) {
        let arrival = self.next_arrival;
        self.next_arrival += 1;
        let queue = if work.suspect { Queue::Suspect } else { Queue::Fresh };
        // A replay of a request with output: its prompt's logprobs are delivered already.
        let fresh = work.tokens.len() == work.prompt_len as usize;
        let owed = work.prompt_logprobs.filter(|_| fresh);
        let seq = Sequence {
            arrival,
            request: work.request,
            attempt: work.attempt,
            tenant: self.tenants.open(&work.tenant),
            prompt_len: work.prompt_len,
            limit,
            min_tokens: work.min_tokens,
            stop_tokens: work.stop_tokens,
            sampling: work.sampling,
            echo: owed.map(|top| Echo { top, entries: Vec::new() }),
            suspect: work.suspect,
            chain: kv.chain(&work.tenant, &work.cache_salt),
            claim: Claim::new(self.epoch, &work.tenant, &work.cache_salt),
            tokens: work.tokens,
            cached_tokens: None,
            submitted: now,
            scheduled: None,
            moved: false,
            phase: Phase::Waiting(queue),
        };
        let (request, tenant) = (seq.request, seq.tenant);
        let slot = self.vacant.pop().unwrap_or_else(|| {
            self.seqs.push(None);
            self.seqs.len() - 1
        });
        self.seqs[slot] = Some(seq);
        self.by_request.insert(request, slot);
        match queue {
            Queue::Suspect => drop(self.suspects.insert(arrival, slot)),
            _ => self.tenants.push(tenant, arrival, slot),
        }
    }

    fn cancel(&mut self, kv: &mut Kv, request: RequestId, attempt: Attempt) -> Result<(), KvError> {
        let slot = self.by_request.get(&request).copied();
        let seq = slot.and_then(|slot| self.seqs[slot].as_ref());
        match slot {
            Some(slot) if seq.is_some_and(|seq| seq.attempt <= attempt) => {
                if mutated("keep-after-cancel")
                    && let Some(run) = seq.and_then(Sequence::run)
                {
                    let _ = kv.fork(run.table)?;
                }
                self.end(kv, slot, true)
            }
            // It has ended by itself, or a newer attempt runs.
            _ => {
                self.totals.refused += 1;
                Ok(())
            }
        }
    }

    fn step_done(
        &mut self,
        kv: &mut Kv,
        now: Duration,
        number: u64,
        sampled: Vec<Sampled>,
        micros: u64,
        out: &mut Vec<Output>,
    ) -> Result<(), KvError> {
        let oldest = self.steps.front().map_or(self.next_step, |step| step.number);
        if number < oldest || number >= self.next_step {
            self.totals.refused += 1;
            return Ok(());
        }
        let expected = self.steps.front().map(|step| self.answers_of(step)).unwrap_or_default();
        let answered: Vec<_> = sampled.iter().map(|s| RequestId(s.request)).collect();
        if number != oldest || answered != expected {
            let reason = format!(
                "step {number} was answered for {answered:?}; step {oldest} for {expected:?} is due"
            );
            self.break_down(reason, Vec::new(), out);
            return Ok(());
        }
        let Some(step) = self.steps.pop_front() else { return Ok(()) };
        kv.copies_done(step.copies);
        self.totals.steps += 1;
        let (prefill, decode) = (step.prefill_tokens, step.decode_tokens);
        let took = self.pace.step_done(now, step.planned_at, prefill, decode);
        let tokens = prefill + decode;
        out.push(Output::Measured(Measure::Step { tokens, took, micros }));
        let mut answers = sampled.into_iter();
        for part in &step.parts {
            let answer = if part.answers { answers.next() } else { None };
            self.part_done(kv, now, part.slot, part.upto, answer, out)?;
        }
        Ok(())
    }

    /// One sequence's share of a step is computed.
    fn part_done(
        &mut self,
        kv: &mut Kv,
        now: Duration,
        slot: Slot,
        upto: u32,
        answer: Option<Sampled>,
        out: &mut Vec<Output>,
    ) -> Result<(), KvError> {
        let Some(seq) = self.seqs[slot].as_mut() else { return Ok(()) };
        let run = match &mut seq.phase {
            Phase::Waiting(_) => return Ok(()),
            Phase::Running(run) | Phase::Ending { run, .. } => run,
        };
        run.in_flight -= 1;
        run.computed = upto;
        let run = *run;
        if let Phase::Ending { trusted, .. } = seq.phase {
            if run.in_flight > 0 {
                return Ok(());
            }
            let spoiled = answer.is_some_and(|answer| not_finite(&answer));
            if trusted && !spoiled && self.limits.prefix_cache {
                let content = &seq.tokens[..seq.tokens.len().min(upto as usize)];
                kv.commit(run.table, &mut seq.chain, content, true)?;
            }
            return self.close(kv, slot);
        }
        let answer = match answer {
            Some(found) if mutated("sample-nan") => {
                Some(Sampled { token: found.token.or(Ok(0)), ..found })
            }
            found => found,
        };
        let after = upto - 1;
        let message = match &answer {
            Some(Sampled { token: Err(SampleFailure::NotFinite), .. }) => {
                Some(format!("the logits after position {after} were not finite in {}", self.last))
            }
            Some(Sampled { token: Err(SampleFailure::NotFiniteInput), .. }) => Some(format!(
                "the activations up to position {after} were not finite when they left {}",
                self.earlier
            )),
            _ => None,
        };
        if let Some(message) = message {
            return self.fail(kv, slot, FailureCode::NotFinite, message, out);
        }
        if self.limits.prefix_cache {
            let settled = run.in_flight == 0;
            kv.commit(run.table, &mut seq.chain, &seq.tokens[..upto as usize], settled)?;
        }
        match answer {
            Some(answer) => self.answer(kv, now, slot, run, answer, out),
            None => Ok(()),
        }
    }

    fn answer(
        &mut self,
        kv: &mut Kv,
        now: Duration,
        slot: Slot,
        run: Run,
        answer: Sampled,
        out: &mut Vec<Output>,
    ) -> Result<(), KvError> {
        let Some(seq) = self.seqs[slot].as_mut() else { return Ok(()) };
        let last = run.computed == seq.known();
        if let Some(echo) = &mut seq.echo {
            echo.entries.extend(answer.prompt_logprobs);
            if last {
                let (request, attempt) = (seq.request, seq.attempt);
                let logprobs = seq.echo.take().map(|echo| echo.entries).unwrap_or_default();
                let want = seq.prompt_len as usize - 1;
                if logprobs.len() != want {
                    let message = format!("{} prompt logprobs came, not {want}", logprobs.len());
                    return self.fail(kv, slot, FailureCode::Internal, message, out);
                }
                let event = SchedulerEvent::PromptLogprobs { request, attempt, logprobs };
                out.push(Output::Event(event));
            }
        }
        if !last {
            return Ok(());
        }
        if !seq.draws_after(run.computed) {
            return self.finish(kv, slot, FinishReason::Length, out);
        }
        match answer.token {
            Ok(token) => self.draw(kv, now, slot, token, answer.logprob, out),
            Err(failure) => {
                let message = format!("no token was drawn: {failure:?}");
                self.fail(kv, slot, FailureCode::Internal, message, out)
            }
        }
    }

    fn tick(&mut self, kv: &Kv, now: Duration, out: &mut Vec<Output>) {
        let overdue =
            |step: &&Step| now > self.pace.begun(step.planned_at) + self.limits.step_deadline;
        if let Some(step) = self.steps.front().filter(overdue).filter(|_| !self.broken) {
            let reason = format!(
                "step {} ({} sequences) was not done by the last stage within {:?}",
                step.number,
                step.parts.len(),
                self.limits.step_deadline
            );
            let suspects = self.requests_in(step);
            self.break_down(reason, suspects, out);
        }
        let load = self.load(kv);
        let due = self
            .reported
            .as_ref()
            .is_none_or(|(when, last)| *last != load || now.saturating_sub(*when) >= REPORT_EVERY);
        if due {
            self.reported = Some((now, load.clone()));
            out.push(Output::Event(SchedulerEvent::Load(load)));
        }
    }

    /// Gives up on the replica. What runs is for the router to replay.
    fn break_down(&mut self, reason: String, suspects: Vec<RequestId>, out: &mut Vec<Output>) {
        self.broken = true;
        out.push(Output::Broken { reason, suspects });
    }

    /// The requests that a step's answer must be about, in order.
    fn answers_of(&self, step: &Step) -> Vec<RequestId> {
        let answering = step.parts.iter().filter(|part| part.answers);
        answering.filter_map(|part| Some(self.seqs[part.slot].as_ref()?.request)).collect()
    }

    fn requests_in(&self, step: &Step) -> Vec<RequestId> {
        let all = step.parts.iter();
        all.filter_map(|part| Some(self.seqs[part.slot].as_ref()?.request)).collect()
    }
}

fn not_finite(answer: &Sampled) -> bool {
    matches!(answer.token, Err(SampleFailure::NotFinite | SampleFailure::NotFiniteInput))
}

/// The sequence's length limit, or why it can never run here.
fn admissible(kv: &Kv, limits: &Limits, work: &Work) -> Result<u32, (FailureCode, String)> {
    let known = u32::try_from(work.tokens.len()).unwrap_or(u32::MAX);
    if work.prompt_len == 0 || work.prompt_len > known {
        let message = format!("a prompt of {} tokens in {known} tokens", work.prompt_len);
        return Err((FailureCode::Internal, message));
    }
    let whole = work.prompt_len.saturating_add(work.max_tokens);
    let limit = whole.min(limits.context_tokens).max(known);
    if known > limits.context_tokens || !kv.feasible(limit.into()) {
        let message = format!(
            "{limit} tokens are needed; the context holds {} and the KV pool {}",
            limits.context_tokens,
            kv.capacity_tokens()
        );
        return Err((FailureCode::NeverFits, message));
    }
    Ok(limit)
}

/// Why there is nothing left to do: a replay of what was delivered to its end.
fn complete(work: &Work, limit: u32) -> Option<FinishReason> {
    let output = work.tokens.get(work.prompt_len as usize..).unwrap_or_default();
    if output.last().is_some_and(|last| work.stop_tokens.contains(last)) {
        return Some(FinishReason::Stop);
    }
    let owed = output.is_empty() && work.prompt_logprobs.is_some();
    (work.tokens.len() >= limit as usize && !owed).then_some(FinishReason::Length)
}
