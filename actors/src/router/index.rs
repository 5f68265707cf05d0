//! Which replica holds which prefix blocks.
//!
//! Keys are chained hashes, so a prompt's cached prefix on a replica is the leading run of its
//! keys that the replica holds. All replicas are walked at once: per block one look-up and one
//! AND over a bit set of slots, so the cost is `blocks * slots / 64`, not `blocks * slots`. The walk
//! ends with the first block that nobody holds, and keys beyond it need not be computed.

use super::fleet::Slot;
use crate::messages::BlockKey;
use foldhash::fast::RandomState;
use std::collections::{HashMap, HashSet};

/// Hash maps are looked up here, never iterated into a decision.
#[derive(Default)]
pub(super) struct PrefixIndex {
    holders: HashMap<BlockKey, Bits, RandomState>,
    by_slot: Vec<HashSet<BlockKey, RandomState>>,
}

/// One prompt's way through the index.
pub(super) struct Walk<'a> {
    index: &'a PrefixIndex,
    /// Slots that hold every block so far.
    running: Bits,
    depth: u32,
    overlaps: Vec<u32>,
}

impl PrefixIndex {
    pub fn insert(&mut self, slot: Slot, key: BlockKey) {
        if self.by_slot.len() <= slot.0 {
            self.by_slot.resize_with(slot.0 + 1, HashSet::default);
        }
        let Some(keys) = self.by_slot.get_mut(slot.0) else { return };
        if keys.insert(key) {
            self.holders.entry(key).or_default().set(slot.0);
        }
    }

    pub fn remove(&mut self, slot: Slot, key: &BlockKey) {
        if self.by_slot.get_mut(slot.0).is_some_and(|keys| keys.remove(key)) {
            self.drop_holder(slot, key);
        }
    }

    /// Drops everything known of a slot.
    pub fn forget(&mut self, slot: Slot) {
        let Some(keys) = self.by_slot.get_mut(slot.0) else { return };
        for key in std::mem::take(keys) {
            self.drop_holder(slot, &key);
        }
    }

    /// How many blocks a slot is known to hold.
    pub fn blocks(&self, slot: Slot) -> usize {
        self.by_slot.get(slot.0).map_or(0, HashSet::len)
    }

    /// Begins a walk over the slots `0..slots`.
    pub fn walk(&self, slots: usize) -> Walk<'_> {
        Walk { index: self, running: Bits::default(), depth: 0, overlaps: vec![0; slots] }
    }

    fn drop_holder(&mut self, slot: Slot, key: &BlockKey) {
        if let Some(holders) = self.holders.get_mut(key) {
            holders.clear(slot.0);
            if holders.is_empty() {
                self.holders.remove(key);
            }
        }
    }
}

impl Walk<'_> {
    /// The prompt's next block. False: no slot holds it after all those before.
    pub fn goes_on(&mut self, key: &BlockKey) -> bool {
        let Some(holders) = self.index.holders.get(key) else { return false };
        if self.depth == 0 {
            self.running = holders.clone();
        } else {
            let (depth, overlaps) = (self.depth, &mut self.overlaps);
            self.running.intersect(holders, |slot| note(overlaps, slot, depth));
        }
        if self.running.is_empty() {
            return false;
        }
        self.depth += 1;
        true
    }

    /// Per slot, how many of the leading blocks it holds.
    pub fn end(mut self) -> Vec<u32> {
        let (depth, overlaps) = (self.depth, &mut self.overlaps);
        self.running.each(|slot| note(overlaps, slot, depth));
        self.overlaps
    }
}

fn note(overlaps: &mut [u32], slot: usize, depth: u32) {
    if let Some(overlap) = overlaps.get_mut(slot) {
        *overlap = depth;
    }
}

/// A set of slots. The first 64 need no allocation.
#[derive(Debug, Clone, Default)]
struct Bits {
    first: u64,
    rest: Vec<u64>,
}

impl Bits {
    fn set(&mut self, slot: usize) {
        let (word, bit) = (slot / 64, 1 << (slot % 64));
        match word {
            0 => self.first |= bit,
            _ => {
                if self.rest.len() < word {
                    self.rest.resize(word, 0);
                }
                self.rest[word - 1] |= bit;
            }
        }
    }

    fn clear(&mut self, slot: usize) {
        let (word, bit) = (slot / 64, 1u64 << (slot % 64));
        match word {
            0 => self.first &= !bit,
            _ => {
                if let Some(bits) = self.rest.get_mut(word - 1) {
                    *bits &= !bit;
                }
            }
        }
    }

    fn is_empty(&self) -> bool {
        self.first == 0 && self.rest.iter().all(|word| *word == 0)
    }

    /// Keeps what `other` has too and names every slot that falls out.
    fn intersect(&mut self, other: &Bits, mut gone: impl FnMut(usize)) {
        each_bit(self.first & !other.first, 0, &mut gone);
        self.first &= other.first;
        for (i, word) in self.rest.iter_mut().enumerate() {
            let theirs = other.rest.get(i).copied().unwrap_or(0);
            each_bit(*word & !theirs, i + 1, &mut gone);
            *word &= theirs;
        }
    }

    fn each(&self, mut visit: impl FnMut(usize)) {
        each_bit(self.first, 0, &mut visit);
        for (i, word) in self.rest.iter().enumerate() {
            each_bit(*word, i + 1, &mut visit);
        }
    }
}

fn each_bit(mut bits: u64, word: usize, visit: &mut impl FnMut(usize)) {
    while bits != 0 {
        visit(word * 64 + bits.trailing_zeros() as usize);
        bits &= bits - 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// The definition: each slot's leading run, one slot at a time.
    fn naive(held: &[HashSet<BlockKey>], keys: &[BlockKey]) -> Vec<u32> {
        let run = |set: &HashSet<BlockKey>| keys.iter().take_while(|k| set.contains(k)).count();
        held.iter().map(|set| run(set) as u32).collect()
    }

    proptest! {
        #[test]
        fn overlaps_equal_the_naive_walk(
            slots in 1usize..140,
            changes in prop::collection::vec((0usize..140, 0u8..12, 0u8..10), 0..400),
            length in 0u8..12,
        ) {
            let key = |n: u8| BlockKey([n; 16]);
            let mut index = PrefixIndex::default();
            let mut held = vec![HashSet::new(); slots];
            for (slot, block, kind) in changes {
                let slot = slot % slots;
                match kind {
                    0 => { index.forget(Slot(slot)); held[slot].clear(); }
                    1..=2 => { index.remove(Slot(slot), &key(block)); held[slot].remove(&key(block)); }
                    _ => { index.insert(Slot(slot), key(block)); held[slot].insert(key(block)); }
                }
                prop_assert_eq!(index.blocks(Slot(slot)), held[slot].len());
            }
            let keys: Vec<BlockKey> = (0..length).map(key).collect();
            let mut walk = index.walk(slots);
            let shown = keys.iter().take_while(|key| walk.goes_on(key)).count();
            let want = naive(&held, &keys);
            prop_assert_eq!(shown, want.iter().copied().max().unwrap_or(0) as usize);
            prop_assert_eq!(walk.end(), want);
            for slot in 0..slots { index.forget(Slot(slot)); }
            prop_assert!(index.holders.is_empty(), "forgotten slots leave nothing behind");
        }
    }
}
