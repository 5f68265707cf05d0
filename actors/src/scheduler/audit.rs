//! The scheduler's invariants, checked from scratch.

use super::core::Scheduler;
use super::sequence::{Phase, Queue, Sequence, Slot};
use crate::kv::Kv;

impl Scheduler {
    /// Every invariant of scheduler and KV; `Err` lists what is wrong. O(sequences + blocks).
    pub fn audit(&self, kv: &Kv) -> Result<(), Vec<String>> {
        let mut wrong = kv.audit().err().unwrap_or_default();
        for (slot, seq) in self.seqs.iter().enumerate() {
            if let Some(seq) = seq {
                self.audit_sequence(slot, seq, kv, &mut wrong);
            }
        }
        let live: Vec<&Sequence> = self.seqs.iter().flatten().collect();
        let with_table = live.iter().filter(|seq| seq.run().is_some()).count();
        if with_table != kv.open_tables() {
            wrong.push(format!("{with_table} sequences run, {} KV tables live", kv.open_tables()));
        }
        let open = live.len() - self.ending.len();
        let listed = self.running.len() + self.waiting();
        if open != listed || open != self.by_request.len() || open != self.tenants.open_requests() {
            wrong.push(format!(
                "{open} sequences are open, {listed} listed, {} known by request, {} by tenant",
                self.by_request.len(),
                self.tenants.open_requests()
            ));
        }
        if self.steps.len() > self.limits.steps() {
            wrong.push(format!("{} steps are in flight", self.steps.len()));
        }
        if self.is_idle() && kv.usage().live != 0 {
            wrong.push(format!("idle, and {} KV blocks are held", kv.usage().live));
        }
        if self.steps.is_empty() && !self.by_request.is_empty() && !self.is_broken() {
            wrong.push(format!("{open} sequences are open and no step is in flight"));
        }
        if wrong.is_empty() { Ok(()) } else { Err(wrong) }
    }

    fn audit_sequence(&self, slot: Slot, seq: &Sequence, kv: &Kv, wrong: &mut Vec<String>) {
        let mut say = |what: String| wrong.push(format!("{:?}: {what}", seq.request));
        let parts: Vec<_> = self
            .steps
            .iter()
            .flat_map(|step| step.parts.iter().map(move |part| (step.number, *part)))
            .filter(|(_, part)| part.slot == slot)
            .collect();
        let listed = match seq.phase {
            Phase::Waiting(Queue::Fresh) => self.tenants.queued().any(|other| other == slot),
            Phase::Waiting(Queue::Resumed) => self.resumed.get(&seq.arrival) == Some(&slot),
            Phase::Waiting(Queue::Suspect) => self.suspects.get(&seq.arrival) == Some(&slot),
            Phase::Running(_) => self.running.contains(&slot),
            Phase::Ending { .. } => self.ending.contains(&slot),
        };
        if !listed {
            say(format!("{:?} and not listed as such", seq.phase));
        }
        let Some(run) = seq.run() else {
            if !parts.is_empty() {
                say(format!("waits and is in steps {parts:?}"));
            }
            return;
        };
        if run.in_flight as usize != parts.len() {
            say(format!("counts {} steps in flight, is in {parts:?}", run.in_flight));
        }
        let planned = parts.last().map_or(run.computed, |(_, part)| part.upto);
        let rising = parts.windows(2).all(|pair| pair[0].1.upto < pair[1].1.upto);
        // One token more than is known only while a step in flight draws that one.
        let coming = u32::from(run.in_flight > 1 && self.limits.overlap);
        let beyond = planned > seq.known() + coming && matches!(seq.phase, Phase::Running(_));
        if planned != run.planned || run.computed > planned || beyond || !rising {
            say(format!("{run:?} of {} known tokens in {parts:?}", seq.known()));
        }
        let blocks = kv.table(run.table).map_or(0, <[_]>::len) as u32;
        if blocks != kv.blocks_for(run.planned) {
            say(format!("holds {blocks} blocks for {} tokens", run.planned));
        }
        let alone = self.steps.iter().all(|step| step.parts.len() == 1);
        if seq.suspect && !parts.is_empty() && (!alone || self.steps.len() != 1) {
            say("is under suspicion and runs beside others".into());
        }
    }
}
