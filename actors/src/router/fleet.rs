//! The replicas a router knows, what it has given each of them, and what they hold in cache.

use super::index::PrefixIndex;
use super::log::Share;
use crate::messages::{BlockKey, LoadReport, ReplicaEpoch, ReplicaInfo, RequestId};
use dunlin_runtime::{Address, mutated};
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// A replica's number in this router; kept over its epochs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Slot(pub usize);

/// A replica by name: its latest epoch, and the load that this router put on it. The load is
/// counted here and not scraped, so that it is exact at the moment of the next decision.
pub(super) struct Replica {
    pub info: ReplicaInfo,
    pub ready: bool,
    /// Ready, but to be given nothing more.
    pub draining: bool,
    /// The highest epoch heard of; older ones are fenced off.
    pub fence: ReplicaEpoch,
    pub down_reason: String,
    pub load: LoadReport,
    pub assigned: BTreeSet<RequestId>,
    pub prefill_tokens: u64,
    pub held_tokens: u64,
    /// It could not be reached; not tried before this time.
    pub shunned_until: Duration,
    kv_seq: Option<u64>,
}

#[derive(Default)]
pub(super) struct Fleet {
    names: BTreeMap<String, Slot>,
    slots: Vec<Replica>,
    pub index: PrefixIndex,
}

impl Fleet {
    /// In the order of names.
    pub fn all(&self) -> impl Iterator<Item = (Slot, &Replica)> {
        self.names.values().filter_map(|slot| Some((*slot, self.slots.get(slot.0)?)))
    }

    pub fn ready(&self) -> impl Iterator<Item = (Slot, &Replica)> {
        self.all().filter(|(_, replica)| replica.ready)
    }

    pub fn get(&self, slot: Slot) -> Option<&Replica> {
        self.slots.get(slot.0)
    }

    pub fn get_mut(&mut self, slot: Slot) -> Option<&mut Replica> {
        self.slots.get_mut(slot.0)
    }

    pub fn slots(&self) -> usize {
        self.slots.len()
    }

    pub fn find(&self, name: &str) -> Option<Slot> {
        self.names.get(name).copied()
    }

    /// The slot of a replica that is ready under exactly this epoch.
    pub fn current(&self, name: &str, epoch: ReplicaEpoch) -> Option<Slot> {
        let slot = self.find(name)?;
        let replica = self.get(slot)?;
        let current = replica.ready && replica.info.epoch == epoch;
        (current || unfenced()).then_some(slot)
    }

    pub fn scheduler(&self, share: &Share) -> Option<Address> {
        let replica = self.get(share.slot)?;
        let current = replica.ready && replica.info.epoch == share.epoch;
        current.then(|| replica.info.scheduler.clone())
    }

    /// Takes up a ready replica. The caller has dealt with the work of its former epoch.
    pub fn install(&mut self, info: ReplicaInfo) -> Slot {
        let fresh = Replica {
            ready: true,
            draining: false,
            fence: info.epoch,
            down_reason: String::new(),
            load: LoadReport::default(),
            assigned: BTreeSet::new(),
            prefill_tokens: 0,
            held_tokens: 0,
            shunned_until: Duration::ZERO,
            kv_seq: None,
            info,
        };
        let slot = match self.find(&fresh.info.replica) {
            Some(slot) => slot,
            None => {
                let slot = Slot(self.slots.len());
                self.names.insert(fresh.info.replica.clone(), slot);
                self.slots.push(fresh);
                return slot;
            }
        };
        self.index.forget(slot);
        if let Some(place) = self.get_mut(slot) {
            *place = fresh;
        }
        slot
    }

    pub fn take_down(&mut self, slot: Slot, fence: ReplicaEpoch, reason: String) {
        self.index.forget(slot);
        if let Some(replica) = self.get_mut(slot) {
            replica.ready = false;
            replica.fence = replica.fence.max(fence);
            replica.down_reason = reason;
            replica.load = LoadReport::default();
            replica.kv_seq = None;
        }
    }

    pub fn drain(&mut self, name: &str, epoch: ReplicaEpoch) {
        if let Some(slot) = self.current(name, epoch)
            && let Some(replica) = self.get_mut(slot)
        {
            replica.draining = true;
        }
    }

    /// Refuses every epoch up to this one from now on.
    pub fn fence(&mut self, slot: Slot, epoch: ReplicaEpoch) {
        if let Some(replica) = self.get_mut(slot) {
            replica.fence = replica.fence.max(epoch);
        }
    }

    /// Counts a request in, under the share it will be counted out with.
    pub fn assign(&mut self, id: RequestId, share: &Share) {
        if let Some(replica) = self.get_mut(share.slot) {
            replica.assigned.insert(id);
            replica.prefill_tokens += share.prefill_tokens;
            replica.held_tokens += share.held_tokens;
        }
    }

    pub fn release(&mut self, id: RequestId, share: Share) {
        if let Some(replica) = self.get_mut(share.slot) {
            replica.assigned.remove(&id);
            replica.prefill_tokens -= share.prefill_tokens;
            replica.held_tokens -= share.held_tokens;
        }
    }

    /// Counts tokens that an attempt drew; the first of them ends its prefill.
    pub fn progress(&mut self, share: &mut Share, tokens: u64) {
        if let Some(replica) = self.get_mut(share.slot) {
            replica.prefill_tokens -= share.prefill_tokens;
            replica.held_tokens += tokens;
            share.prefill_tokens = 0;
            share.held_tokens += tokens;
        }
    }

    /// Applies a replica's cache changes. `false`: they did not follow on from what was known,
    /// and its part of the index starts anew.
    pub fn kv_events(
        &mut self,
        slot: Slot,
        seq: u64,
        stored: &[BlockKey],
        removed: &[BlockKey],
    ) -> bool {
        let Some(replica) = self.get_mut(slot) else { return true };
        let follows = replica.kv_seq.is_none_or(|last| last.checked_add(1) == Some(seq));
        replica.kv_seq = Some(seq);
        let room = replica.info.kv_blocks;
        if !follows {
            self.index.forget(slot);
        }
        for key in removed {
            self.index.remove(slot, key);
        }
        for key in stored {
            self.index.insert(slot, *key);
        }
        // More blocks than the replica has: events are wrong, and memory must stay bounded.
        let within = self.index.blocks(slot) as u64 <= room;
        if !within {
            self.index.forget(slot);
        }
        follows && within
    }

    pub fn next_unshun(&self, now: Duration) -> Option<Duration> {
        self.ready().map(|(_, r)| r.shunned_until).filter(|until| *until > now).min()
    }
}

/// A deliberate bug: whoever reports is believed.
pub(super) fn unfenced() -> bool {
    mutated("skip-fence") || mutated("trust-reports")
}
