//! The end of the chaos: what is mended, and what stays (see [`crate::heal`]).

use super::inject::{self, Tools};
use super::run::Run;
use crate::fault::{Fault, Target};
use crate::heal::{Hold, outside};
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// For injectors to undo what they did, once they are told to end.
const UNDO_WITHIN: Duration = Duration::from_secs(30);

impl Run<'_> {
    /// Ends the faults of the core and starts what was given up there.
    pub async fn heal(&mut self, tools: &Tools) {
        let stays = self.choose_core();
        for due in self.schedule.heal(&stays) {
            self.due(due, tools);
        }
        self.undo(&stays).await;
        for node in std::mem::take(&mut self.gave_up) {
            match self.outside.contains(&node) {
                true => drop(self.gave_up.insert(node)),
                false => self.cluster.supervise(&node),
            }
        }
    }

    /// After all was judged: ends what has stayed, so that it is read back what it did.
    pub async fn end_what_stayed(&mut self) {
        if !self.injecting.is_empty() {
            self.undo(&BTreeSet::new()).await;
        }
    }

    /// Ends all faults but these, and waits until they are undone.
    async fn undo(&mut self, stays: &BTreeSet<usize>) {
        for (index, run) in self.faults.iter().enumerate() {
            if !stays.contains(&index) {
                self.hub.disarm(&run.fault.id);
            }
        }
        // What a plan's end does not end by itself.
        let over: Vec<usize> =
            self.active.keys().filter(|index| !stays.contains(index)).copied().collect();
        for end in over.iter().filter_map(|index| self.active.remove(index)) {
            let _ = end.send(());
        }
        let all = std::mem::take(&mut self.injecting);
        let (kept, over): (BTreeMap<_, _>, BTreeMap<_, _>) =
            all.into_iter().partition(|(index, _)| stays.contains(index));
        self.injecting = kept;
        let undone = async {
            for mut injecting in over.into_values() {
                let _ = (&mut injecting.0).await;
            }
        };
        if self.drive(tokio::time::timeout(UNDO_WITHIN, undone)).await.is_err() {
            tracing::warn!("an injector did not end in time");
        }
    }

    fn choose_core(&mut self) -> BTreeSet<usize> {
        let holds: BTreeMap<usize, Hold> = self
            .active
            .keys()
            .filter_map(|index| Some((*index, self.faults.get(*index)?)))
            .map(|(index, run)| (index, Hold::of(&run.fault.target, || self.at(&run.fault))))
            .collect();
        let (config, plan) = (&self.cluster.site.config, self.plan);
        let all: Vec<Hold> = holds.values().cloned().collect();
        self.outside = outside(config, &plan.phases, &plan.tolerance, &all);
        let stays = holds.iter().filter(|(_, hold)| hold.stays(&self.outside));
        stays.map(|(index, _)| *index).collect()
    }

    /// The nodes where it lies: of a shard, where it ran last.
    fn at(&self, fault: &Fault) -> Vec<String> {
        let Target::Shard { replica, stage, rank } = &fault.target else {
            return inject::nodes_of(&fault.target, &self.nodes);
        };
        let name = format!("{replica}/{stage}/{rank}");
        self.board.read(|seen| {
            let own = seen.running.keys().filter(|(_, shard)| *shard == name);
            own.map(|(node, _)| node.clone()).collect()
        })
    }
}
