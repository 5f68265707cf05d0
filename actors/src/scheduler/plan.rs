//! What goes into the next step.
//!
//! In order: a suspect, alone; else running sequences that need one token, the one longest without
//! a step first; then chunks of running prompts, oldest first; then, if nobody lacked blocks,
//! waiting requests, preempted ones first and the others by [`super::fairness`]. With several
//! batches in flight each takes its share of the decoding sequences, so that all stages have work.
//!
//! With overlap one step more is planned: every sequence that draws a token in a step in flight is
//! taken to go on with it, and its place is left open. If it ends instead
//! (a stop token, a cancel, a failure), what that one step computes of it is dropped when it is
//! done. Such a place never takes blocks from another sequence: it may not be needed.
//!
//! Where sequences decode, chunks of prompts are as large as the measured pace allows: beside one
//! prompt a step should take no more than `step_stretch` times what the decoding alone takes. Each
//! further prompt that could run weighs as much as a sequence that decodes: the bound grows with how
//! many the step serves, so that a lone prompt is kept back for the sake of many, and many are let
//! in at the expense of few.
//!
//! A running sequence that lacks blocks takes them from the latest arrived that is in no step: it
//! is preempted, and computed anew when its turn comes (its blocks stay cached while they can).
//! The oldest can always do so, hence it always ends. A request is admitted when all its tokens
//! find room beside what running prompts still need, so that prompts do not evict each other.

use super::config::Batching;
use super::core::{Measure, Output, Scheduler};
use super::sequence::{Phase, Queue, Run, Sequence, Slot};
use crate::kv::{Copies, Kv, KvError, TableId};
use crate::messages::{FailureCode, Place};
use dunlin_model::engine::{Batch, BatchSeq};
use std::time::Duration;

/// Prompt chunks do not shrink below this for the sake of those who decode.
const LEAST_CHUNK: usize = 8;
/// And are this long at first, while nobody knows what a prompt token costs.
const FIRST_CHUNK: usize = 32;

/// A step in flight.
#[derive(Debug)]
pub struct Step {
    pub number: u64,
    pub planned_at: Duration,
    pub parts: Vec<Part>,
    pub copies: Copies,
    /// It has a suspect in it: nothing else may be in flight, even if that has ended.
    pub alone: bool,
    pub prefill_tokens: usize,
    pub decode_tokens: usize,
}

/// One sequence's share of a step.
#[derive(Debug, Clone, Copy)]
pub struct Part {
    pub slot: Slot,
    /// Known tokens below this are computed once the step is done.
    pub upto: u32,
    /// The last stage reports on it.
    pub answers: bool,
}

/// The step being put together.
struct Plan {
    now: Duration,
    budget: usize,
    chunk_tokens: usize,
    /// Most of it that may go to prompt chunks.
    prefill_budget: usize,
    parts: Vec<Part>,
    seqs: Vec<BatchSeq>,
    claims: Vec<u64>,
    drawn: Vec<Place>,
    prefill_tokens: usize,
    decode_tokens: usize,
    /// Somebody lacked blocks: admit nobody.
    pressed: bool,
}

impl Scheduler {
    /// Plans steps while there may be more in flight, and holds the progress rule.
    pub(super) fn plan(
        &mut self,
        kv: &mut Kv,
        now: Duration,
        out: &mut Vec<Output>,
    ) -> Result<(), KvError> {
        loop {
            while self.steps.len() < self.limits.steps() && self.plan_step(kv, now, out)? {}
            if !self.steps.is_empty() {
                return Ok(());
            }
            // Nothing is in flight, so no block is held but by sequences that could have run.
            let Some(stuck) = self.first_in_line() else { return Ok(()) };
            debug_assert!(false, "progress rule: {:?} can neither run nor wait", self.seqs[stuck]);
            let usage = kv.usage();
            let message = format!("it could not be scheduled with the KV pool at {usage:?}");
            self.fail(kv, stuck, FailureCode::Internal, message, out)?;
        }
    }

    /// Puts one step together. False: there is none to run now.
    fn plan_step(
        &mut self,
        kv: &mut Kv,
        now: Duration,
        out: &mut Vec<Output>,
    ) -> Result<bool, KvError> {
        let budget = self.limits.step_tokens;
        let mut plan = Plan {
            now,
            budget,
            chunk_tokens: self.limits.chunk_tokens,
            prefill_budget: budget,
            parts: Vec::new(),
            seqs: Vec::new(),
            claims: Vec::new(),
            drawn: Vec::new(),
            prefill_tokens: 0,
            decode_tokens: 0,
            pressed: false,
        };
        let suspect = self.suspect.or_else(|| self.suspects.values().next().copied());
        match suspect {
            Some(_) if !self.steps.is_empty() => return Ok(false),
            Some(slot) => self.plan_suspect(kv, slot, &mut plan, out)?,
            None if self.steps.front().is_some_and(|step| step.alone) => return Ok(false),
            None => {
                self.plan_decodes(kv, &mut plan)?;
                self.plan_prefills(kv, &mut plan)?;
                self.admit(kv, &mut plan, out)?;
            }
        }
        if plan.parts.is_empty() {
            return Ok(false);
        }
        self.dispatch(kv, plan, out);
        Ok(true)
    }

    /// Running sequences that need one token.
    fn plan_decodes(&mut self, kv: &mut Kv, plan: &mut Plan) -> Result<(), KvError> {
        let all = self.running.iter().filter(|&&slot| self.decodes(slot)).count();
        let mut share = all.div_ceil(self.limits.in_flight).min(plan.budget);
        for slot in self.running.clone() {
            if share == 0 {
                break;
            }
            let ready = self.ready(slot).filter(|_| self.decodes(slot));
            let Some((run, arrival, _)) = ready else { continue };
            let room = match self.guesses(slot) {
                true => self.has_room(kv, run.table, run.planned + 1, plan)?,
                false => self.make_room(kv, slot, arrival, run.table, run.planned + 1, plan)?,
            };
            if room {
                self.schedule(kv, slot, 1, plan)?;
                share -= 1;
            }
        }
        if !plan.parts.is_empty() {
            plan.prefill_budget = self.prefill_budget(plan.parts.len(), all, plan.budget);
        }
        Ok(())
    }

    /// How many prompt tokens may be computed beside `decoding` sequences of the step, out of `all`
    /// that decode. None at all where what the decoding takes must be measured first.
    fn prefill_budget(&mut self, decoding: usize, all: usize, budget: usize) -> usize {
        let prefilling = self.running.len().saturating_sub(all);
        let places = self.limits.max_running.saturating_sub(self.running.len());
        let prompts = prefilling + places.min(self.waiting());
        let stretch = self.limits.step_stretch;
        let bounded = stretch > 0 || self.limits.step_target.is_some();
        if prompts == 0 || !bounded {
            return budget;
        }
        if self.pace.measure_now(decoding) {
            return 0;
        }
        let target = self.limits.step_target.or_else(|| {
            Some(self.pace.decoding(decoding)?.mul_f64(stretched(stretch, all, prompts)))
        });
        let fits = target.and_then(|target| self.pace.prefill_within(target, decoding));
        fits.unwrap_or(FIRST_CHUNK).max(LEAST_CHUNK).min(budget)
    }

    /// Next chunks of prompts that run already.
    fn plan_prefills(&mut self, kv: &mut Kv, plan: &mut Plan) -> Result<(), KvError> {
        let due = |&slot: &Slot| {
            let ready = self.ready(slot).filter(|_| !self.decodes(slot));
            ready.map(|(_, arrival, _)| (arrival, slot))
        };
        let mut prefilling: Vec<_> = self.running.iter().filter_map(due).collect();
        prefilling.sort_unstable();
        for (arrival, slot) in prefilling {
            let Some((run, _, unplanned)) = self.ready(slot) else { continue };
            let chunk = plan.chunk(unplanned);
            if chunk == 0 {
                return Ok(());
            }
            if self.make_room(kv, slot, arrival, run.table, run.planned + chunk, plan)? {
                self.schedule(kv, slot, chunk, plan)?;
            }
        }
        Ok(())
    }

    /// Waiting requests, while there is budget and room.
    fn admit(
        &mut self,
        kv: &mut Kv,
        plan: &mut Plan,
        out: &mut Vec<Output>,
    ) -> Result<(), KvError> {
        if plan.pressed || self.waiting() == 0 {
            return Ok(());
        }
        if self.running.is_empty() && self.ending.is_empty() {
            self.batch_left = self.waiting();
        }
        let mut promised = self.promised(kv)?;
        let joins = self.limits.batching == Batching::Continuous;
        while self.running.len() < self.limits.max_running && plan.chunk(u32::MAX) > 0 {
            if !joins && self.batch_left == 0 {
                break;
            }
            let next = self.resumed.values().next().copied().or_else(|| self.tenants.next());
            let Some(slot) = next else { break };
            let Some(seq) = self.seqs[slot].as_mut() else { break };
            // An older attempt at it is still in flight: request ids are unique among the live.
            let request = seq.request;
            let same =
                |&other: &Slot| self.seqs[other].as_ref().is_some_and(|s| s.request == request);
            if self.ending.iter().any(same) {
                break;
            }
            let Some(seq) = self.seqs[slot].as_mut() else { break };
            let lookup = self.limits.prefix_cache && seq.echo.is_none();
            let (table, covered) = kv.start(&mut seq.chain, &seq.tokens, lookup)?;
            let need = kv.missing(table, seq.known())?;
            if kv.available() < need + promised {
                kv.release(table)?;
                break;
            }
            let chunk = plan.chunk(seq.known() - covered);
            self.begin(slot, table, covered, plan.now, out);
            self.batch_left = self.batch_left.saturating_sub(1);
            self.schedule(kv, slot, chunk, plan)?;
            promised += self.remaining_blocks(kv, slot)?;
        }
        Ok(())
    }

    /// One suspect, and nothing else. It takes blocks, and its place, from whoever runs.
    fn plan_suspect(
        &mut self,
        kv: &mut Kv,
        slot: Slot,
        plan: &mut Plan,
        out: &mut Vec<Output>,
    ) -> Result<(), KvError> {
        if self.suspect.is_none() {
            while self.running.len() >= self.limits.max_running {
                let Some(victim) = self.latest_idle(slot, 0) else { return Ok(()) };
                self.preempt(kv, victim)?;
            }
            let Some(seq) = self.seqs[slot].as_mut() else { return Ok(()) };
            let lookup = self.limits.prefix_cache && seq.echo.is_none();
            let (table, covered) = kv.start(&mut seq.chain, &seq.tokens, lookup)?;
            self.begin(slot, table, covered, plan.now, out);
            self.suspect = Some(slot);
        }
        let Some((run, _, unplanned)) = self.ready(slot) else { return Ok(()) };
        let chunk = plan.chunk(unplanned);
        if self.make_room(kv, slot, 0, run.table, run.planned + chunk, plan)? {
            self.schedule(kv, slot, chunk, plan)?;
        }
        Ok(())
    }

    /// Whether a running sequence needs one more token at most, in flight or not.
    fn decodes(&self, slot: Slot) -> bool {
        let seq = self.seqs[slot].as_ref();
        seq.is_some_and(|seq| seq.run().is_some_and(|run| run.computed + 1 >= seq.known()))
            || self.guesses(slot)
    }

    /// Whether the next step may compute the token that a step in flight draws for this sequence:
    /// it draws one in the last step that it is in, and may draw another after it.
    fn guesses(&self, slot: Slot) -> bool {
        let seq = self.seqs[slot].as_ref().filter(|_| self.limits.overlap);
        let Some(seq) = seq else { return false };
        let Phase::Running(run) = seq.phase else { return false };
        let draws = run.in_flight > 0 && run.planned == seq.known();
        draws && seq.known() + 1 < seq.limit && seq.echo.is_none() && !seq.suspect
    }

    /// A running sequence with tokens to plan: its run, arrival and how many.
    fn ready(&self, slot: Slot) -> Option<(Run, u64, u32)> {
        let seq = self.seqs[slot].as_ref()?;
        let Phase::Running(run) = seq.phase else { return None };
        let unplanned = seq.unplanned().max(u32::from(self.guesses(slot)));
        (unplanned > 0).then_some((run, seq.arrival, unplanned))
    }

    /// Whether the table can grow to `upto` without taking anything from anyone. Not while somebody
    /// lacks blocks: those who wait for this sequence to be in no step would wait for ever.
    fn has_room(
        &self,
        kv: &Kv,
        table: TableId,
        upto: u32,
        plan: &mut Plan,
    ) -> Result<bool, KvError> {
        plan.pressed |= kv.missing(table, upto)? > kv.available();
        Ok(!plan.pressed)
    }

    /// Sees to it that the table can grow to `upto`, by preempting sequences that arrived after
    /// `arrival` and are in no step, the latest first. False: not in this step.
    fn make_room(
        &mut self,
        kv: &mut Kv,
        slot: Slot,
        arrival: u64,
        table: TableId,
        upto: u32,
        plan: &mut Plan,
    ) -> Result<bool, KvError> {
        while kv.missing(table, upto)? > kv.available() {
            plan.pressed = true;
            let Some(victim) = self.latest_idle(slot, arrival) else { return Ok(false) };
            self.preempt(kv, victim)?;
        }
        Ok(true)
    }

    /// The latest arrived running sequence after `arrival` that is in no step, not `slot` itself.
    fn latest_idle(&self, slot: Slot, arrival: u64) -> Option<Slot> {
        let idle = |other: &Slot| {
            let seq = self.seqs[*other].as_ref().filter(|_| *other != slot)?;
            let idle = seq.run().is_some_and(|run| run.in_flight == 0);
            (idle && seq.arrival > arrival).then_some((seq.arrival, *other))
        };
        self.running.iter().filter_map(idle).max().map(|(_, victim)| victim)
    }

    fn preempt(&mut self, kv: &mut Kv, slot: Slot) -> Result<(), KvError> {
        let Some(seq) = self.seqs[slot].as_mut() else { return Ok(()) };
        let Phase::Running(run) = seq.phase else { return Ok(()) };
        seq.phase = Phase::Waiting(Queue::Resumed);
        if let Some(echo) = &mut seq.echo {
            echo.entries.clear();
        }
        let request = seq.request;
        self.resumed.insert(seq.arrival, slot);
        self.running.retain(|&other| other != slot);
        self.totals.preemptions += 1;
        self.batch_left += 1;
        self.happened.push(Measure::Preempted { request });
        kv.release(run.table)
    }

    /// A waiting sequence has a table now.
    fn begin(
        &mut self,
        slot: Slot,
        table: TableId,
        covered: u32,
        now: Duration,
        out: &mut Vec<Output>,
    ) {
        let Some(seq) = self.seqs[slot].as_mut() else { return };
        let Phase::Waiting(queue) = seq.phase else { return };
        seq.phase = Phase::Running(Run {
            table,
            computed: covered,
            planned: covered,
            in_flight: 0,
            last_step: 0,
        });
        if self.limits.prefix_cache && seq.echo.is_none() {
            self.totals.prefix_queries += u64::from(seq.known());
            self.totals.prefix_hits += u64::from(covered);
        }
        if seq.scheduled.is_none() {
            seq.scheduled = Some(now);
            seq.cached_tokens = Some(covered.min(seq.prompt_len));
            self.tenants.charge_prompt(seq.tenant, seq.known() - covered);
            out.push(Output::Measured(Measure::Queued(now.saturating_sub(seq.submitted))));
        }
        if covered > 0 {
            let request = seq.request;
            out.push(Output::Measured(Measure::PrefixHit { request, tokens: covered }));
        }
        self.unqueue(slot, queue);
        self.running.push(slot);
    }

    /// Puts the sequence's next `count` tokens into the plan, known ones or the one that the last
    /// step it is in draws. There is room for them.
    fn schedule(
        &mut self,
        kv: &mut Kv,
        slot: Slot,
        count: u32,
        plan: &mut Plan,
    ) -> Result<(), KvError> {
        let number = self.next_step;
        let Some(seq) = self.seqs[slot].as_mut() else { return Ok(()) };
        let Some(run) = seq.running() else { return Ok(()) };
        let (table, from, upto) = (run.table, run.planned, run.planned + count);
        kv.extend(table, upto)?;
        let draws_in = run.last_step;
        run.planned = upto;
        run.in_flight += 1;
        run.last_step = number;
        let coming = upto > seq.known();
        let sample = (coming || seq.draws_after(upto)).then(|| seq.sample_spec(coming));
        let prompt_logprobs = seq.echo_spec(upto);
        let answers = sample.is_some() || prompt_logprobs.is_some();
        let mut tokens = seq.tokens[from as usize..(upto - u32::from(coming)) as usize].to_vec();
        if coming {
            tokens.push(0);
            let seq = u32::try_from(plan.seqs.len()).unwrap_or(u32::MAX);
            plan.drawn.push(Place { seq, step: draws_in });
        }
        plan.parts.push(Part { slot, upto, answers });
        plan.claims.push(seq.claim.at(&seq.tokens, from));
        plan.seqs.push(BatchSeq {
            request: seq.request.0,
            tokens,
            position: from,
            blocks: kv.table(table)?.to_vec(),
            sample,
            prompt_logprobs,
        });
        plan.take(count as usize, is_prefill(seq, from, count));
        Ok(())
    }

    fn dispatch(&mut self, kv: &mut Kv, plan: Plan, out: &mut Vec<Output>) {
        let copies = kv.take_copies();
        let batch = Batch { seqs: plan.seqs, copies: copies.pairs().to_vec() };
        let number = self.next_step;
        self.next_step += 1;
        self.totals.prompt_tokens += plan.prefill_tokens as u64;
        // Who was in this step goes behind those who were not.
        let planned = |slot: &Slot| {
            let run = self.seqs[*slot].as_ref().and_then(Sequence::run);
            run.is_some_and(|run| run.last_step == number)
        };
        let (mut order, behind): (Vec<_>, Vec<_>) = self.running.iter().partition(|s| !planned(s));
        order.extend(behind);
        self.running = order;
        self.steps.push_back(Step {
            number,
            planned_at: plan.now,
            parts: plan.parts,
            copies,
            alone: self.suspect.is_some(),
            prefill_tokens: plan.prefill_tokens,
            decode_tokens: plan.decode_tokens,
        });
        out.push(Output::Run { step: number, batch, claims: plan.claims, drawn: plan.drawn });
    }

    /// Blocks that running prompts will still need for what is known of them.
    fn promised(&self, kv: &Kv) -> Result<u32, KvError> {
        self.running.iter().try_fold(0, |sum, &slot| Ok(sum + self.remaining_blocks(kv, slot)?))
    }

    fn remaining_blocks(&self, kv: &Kv, slot: Slot) -> Result<u32, KvError> {
        match self.ready(slot) {
            Some((run, _, unplanned)) => kv.missing(run.table, run.planned + unplanned),
            None => Ok(0),
        }
    }

    /// Who would have to run next if nothing does.
    fn first_in_line(&self) -> Option<Slot> {
        let suspect = self.suspect.or_else(|| self.suspects.values().next().copied());
        let running = || {
            let arrival = |slot: &&Slot| self.seqs[**slot].as_ref().map(|seq| seq.arrival);
            self.running.iter().min_by_key(arrival).copied()
        };
        let resumed = || self.resumed.values().next().copied();
        suspect.or_else(running).or_else(resumed).or_else(|| self.tenants.next())
    }
}

impl Plan {
    /// How much of `unplanned` tokens of a prompt fits.
    fn chunk(&self, unplanned: u32) -> u32 {
        let most = self.budget.min(self.prefill_budget).min(self.chunk_tokens);
        unplanned.min(u32::try_from(most).unwrap_or(u32::MAX))
    }

    fn take(&mut self, tokens: usize, prefill: bool) {
        self.budget -= tokens;
        if prefill {
            self.prefill_budget = self.prefill_budget.saturating_sub(tokens);
            self.prefill_tokens += tokens;
        } else {
            self.decode_tokens += tokens;
        }
    }
}

/// How many times as long as one that only decodes a step may take beside so many prompts.
fn stretched(stretch: u32, decoding: usize, prompts: usize) -> f64 {
    let served = (decoding + prompts).saturating_sub(1).max(decoding);
    f64::from(stretch) * served as f64 / decoding.max(1) as f64
}

/// Prompt work, including what a preempted sequence computes anew.
fn is_prefill(seq: &Sequence, from: u32, count: u32) -> bool {
    count > 1 || from + 1 < seq.known() || from < seq.prompt_len
}
