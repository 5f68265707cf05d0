//! Which replica gets a request.
//!
//! Among ready replicas that have room, the lowest cost wins: tokens to be prefilled (what the
//! replica has queued, plus this request's tokens less its cached prefix) plus tokens of KV held
//! (Dynamo's cost, in tokens so that unlike block sizes compare). Ties go to the fewest requests,
//! then to the name. A replica that is not ready is no candidate, whatever its cache holds.
//!
//! The block keys come with the request; the router hashes only what was drawn since, and prompts
//! that came without keys or with those of another kind of replica. Wrong keys would cost a worse
//! choice: what a replica shares, it names itself.

use super::fleet::{Replica, Slot};
use super::log::{Open, Share};
use super::{Note, Output, Router};
use crate::messages::{KeySpace, RequestId, SchedulerCast};

/// The outcome of a decision.
struct Choice {
    slot: Slot,
    cost: u64,
    hit_tokens: u64,
    candidates: usize,
    /// The keys of its prompt were computed here.
    hashed: bool,
}

impl Router {
    /// Hands out waiting requests, in order of arrival, while replicas have room.
    pub(super) fn place_waiting(&mut self) {
        if self.waiting.is_empty() || !self.any_room() {
            return;
        }
        let line: Vec<RequestId> = self.waiting.values().copied().collect();
        for id in line {
            if !self.any_room() {
                return;
            }
            self.place(id);
        }
    }

    fn any_room(&self) -> bool {
        self.fleet.ready().any(|(_, replica)| self.has_room(replica))
    }

    fn has_room(&self, replica: &Replica) -> bool {
        let limit = replica.info.max_running.saturating_add(self.config.queue_ahead.max(1));
        let open = !replica.draining && replica.shunned_until <= self.now;
        open && replica.assigned.len() < limit as usize
    }

    fn place(&mut self, id: RequestId) {
        let Some(choice) = self.choose(id) else { return };
        let Some(open) = self.open.get_mut(&id) else { return };
        let Some(replica) = self.fleet.get(choice.slot) else { return };
        open.attempt += 1;
        open.trouble.moved = false;
        let share = Share {
            slot: choice.slot,
            epoch: replica.info.epoch,
            prefill_tokens: open.len() - choice.hit_tokens,
            held_tokens: open.len(),
        };
        let to = replica.info.scheduler.clone();
        let name = replica.info.replica.clone();
        let cast = SchedulerCast::Submit { epoch: share.epoch, work: Box::new(open.work()) };
        let attempt = open.attempt();
        self.waiting.remove(&open.arrival);
        self.fleet.assign(id, &share);
        open.share = Some(share);
        self.out.push(Output::Send { to, cast });
        if choice.hashed {
            self.note(Note::Hashed { request: id });
        }
        self.note(Note::Placed {
            request: id,
            attempt,
            replica: name,
            cost: choice.cost,
            hit_tokens: choice.hit_tokens,
            candidates: choice.candidates,
        });
    }

    fn choose(&mut self, id: RequestId) -> Option<Choice> {
        let mut open = self.open.remove(&id)?;
        let choice = self.choose_for(&mut open);
        self.open.insert(id, open);
        choice
    }

    fn choose_for(&self, open: &mut Open) -> Option<Choice> {
        let need = open.reserved_tokens();
        let length = open.len();
        let slots = self.fleet.slots();
        // One chain and one walk of the index per kind of replica; usually there is one kind.
        let mut walks: Vec<(KeySpace, Vec<u32>)> = Vec::new();
        let mut hashed = false;
        let mut best: Option<(_, Choice)> = None;
        let mut candidates = 0;
        // It is not sent twice to where it could not be sent, as long as there is anywhere else.
        let unreachable = open.trouble.unreachable.clone();
        let avoided =
            |slot: Slot, replica: &Replica| unreachable.contains(&(slot, replica.info.epoch));
        let elsewhere = self.fleet.ready().any(|(slot, replica)| {
            !avoided(slot, replica) && !replica.draining && replica.info.max_sequence_tokens >= need
        });
        for (slot, replica) in self.fleet.ready() {
            let info = &replica.info;
            if info.max_sequence_tokens < need || !self.has_room(replica) {
                continue;
            }
            if elsewhere && avoided(slot, replica) {
                continue;
            }
            candidates += 1;
            let space = info.key_space();
            let known = walks.iter().position(|(known, _)| *known == space);
            let walk = known.unwrap_or_else(|| {
                let mut walk = self.fleet.index.walk(slots);
                hashed |= open.walk_keys(space, |key| walk.goes_on(key));
                walks.push((space, walk.end()));
                walks.len() - 1
            });
            let blocks = walks[walk].1.get(slot.0).copied().unwrap_or(0);
            // The last token is always computed: its logits are what is wanted.
            let hit_tokens =
                (u64::from(blocks) * u64::from(info.block_tokens)).min(length.saturating_sub(1));
            let prefill = replica.prefill_tokens + length - hit_tokens;
            let cost = prefill + replica.held_tokens + length;
            let rank = (cost, replica.assigned.len());
            // Names come in order, so the first of equals is the lowest name.
            if best.as_ref().is_none_or(|(lowest, _)| rank < *lowest) {
                best = Some((rank, Choice { slot, cost, hit_tokens, candidates, hashed }));
            }
        }
        best.map(|(_, choice)| Choice { candidates, hashed, ..choice })
    }
}
