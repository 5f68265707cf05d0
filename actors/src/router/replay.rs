//! Losing a replica, and handing its requests out again.

use super::log::PromptReport;
use super::{Note, Router};
use crate::messages::{Attempt, FailureCode, ReplicaEpoch, ReplicaInfo, RequestId};
use dunlin_runtime::mutated;

/// How an attempt was lost.
enum Loss<'a> {
    /// The replica went; `named` if this request was in the step that failed, `alone` if no
    /// other was (a suspect runs alone, so a second failure of its own is told from bad luck).
    Replica { reason: &'a str, named: bool, alone: bool },
    /// The scheduler's reports do not add up.
    Gap,
}

impl Router {
    pub(super) fn replica_up(&mut self, info: ReplicaInfo) {
        if let Some(slot) = self.fleet.find(&info.replica)
            && let Some(known) = self.fleet.get(slot)
        {
            if info.epoch < known.fence || (info.epoch == known.fence && !known.ready) {
                return self.note(Note::Stale { kind: "epoch" });
            }
            if info.epoch == known.fence {
                // Announced again; what runs there goes on.
                if let Some(replica) = self.fleet.get_mut(slot) {
                    replica.info = info;
                    replica.shunned_until = self.now;
                }
                return;
            }
            let before = known.info.epoch;
            let name = info.replica.clone();
            self.replica_down(&name, before, "placed anew".into(), &[]);
        }
        self.fleet.install(info);
    }

    pub(super) fn replica_down(
        &mut self,
        name: &str,
        epoch: ReplicaEpoch,
        reason: String,
        suspects: &[RequestId],
    ) {
        let Some(slot) = self.fleet.find(name) else { return };
        let Some(replica) = self.fleet.get(slot) else { return };
        if !replica.ready || epoch < replica.info.epoch {
            self.fleet.fence(slot, epoch);
            return self.note(Note::Stale { kind: "epoch" });
        }
        let lost: Vec<RequestId> = replica.assigned.iter().copied().collect();
        let alone = suspects.len() == 1;
        self.fleet.take_down(slot, epoch, reason.clone());
        let forgotten = usize::from(mutated("forget-replay"));
        for id in lost.into_iter().skip(forgotten) {
            let named = suspects.contains(&id);
            self.lose(id, Loss::Replica { reason: &reason, named, alone });
        }
    }

    /// The hand-out never left: no loss, but the replica is left alone for a while.
    pub(super) fn unreachable(&mut self, id: RequestId, attempt: Attempt, reason: String) {
        let Some(open) = self.open.get_mut(&id) else { return };
        if open.attempt() != attempt {
            return;
        }
        let Some(share) = &open.share else { return };
        let life = (share.slot, share.epoch);
        if !open.trouble.unreachable.contains(&life) {
            open.trouble.unreachable.push(life);
        }
        if let Some(replica) = self.fleet.get_mut(share.slot) {
            replica.shunned_until = self.now.saturating_add(self.config.shun);
            replica.down_reason = reason;
        }
        self.release(id);
    }

    /// A report that would leave a hole: never delivered, never guessed at.
    pub(super) fn gap(&mut self, id: RequestId, reason: String) {
        self.note(Note::Gap { request: id, reason });
        self.recall(id);
        self.lose(id, Loss::Gap);
    }

    /// Back in line, at its old place; or to its end, if the log or its record says so.
    fn lose(&mut self, id: RequestId, loss: Loss) {
        self.release(id);
        let Some(open) = self.open.get_mut(&id) else { return };
        if let Some(reason) = open.complete() {
            return self.finish(id, reason);
        }
        if let PromptReport::Collecting(part) = &mut open.prompt_report {
            part.clear();
        }
        let trouble = &mut open.trouble;
        trouble.fruitless += u32::from(!trouble.moved);
        trouble.lost_at.get_or_insert(self.now);
        let (cause, code, last) = match loss {
            Loss::Replica { reason, named, alone } => {
                if named {
                    trouble.suspicions += 1;
                    trouble.strikes += u32::from(alone);
                    trouble.suspect = true;
                }
                (if named { "step_failed" } else { "replica_down" }, FailureCode::Poison, reason)
            }
            Loss::Gap => ("gap", FailureCode::Internal, "reports with a gap"),
        };
        let limits = &self.config;
        let verdict = if trouble.strikes >= limits.max_strikes {
            Some(format!("the step failed {} times with this request alone in it", trouble.strikes))
        } else if trouble.suspicions >= limits.max_suspicions {
            Some(format!("it was in {} failing steps", trouble.suspicions))
        } else if trouble.fruitless >= limits.max_fruitless {
            Some(format!("{} attempts in a row were lost without a token", trouble.fruitless))
        } else {
            None
        };
        match verdict {
            Some(why) => {
                let message = format!("request {} is given up: {why}; last: {last}", id.0);
                self.fail(id, code, message);
            }
            None => {
                let tokens = open.len();
                self.totals.replays += 1;
                self.note(Note::Replay { request: id, cause, tokens });
            }
        }
    }
}
