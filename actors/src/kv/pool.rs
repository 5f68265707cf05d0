//! The fixed set of KV blocks: reference counts, the free list, and the prefix cache's index.
//!
//! A block is **live** (held by at least one table or pending copy), **cached** (held by nobody,
//! but its content is named in the index and may be hit), or **free**. Every verb is O(1): the
//! cached blocks form an intrusive doubly linked list in order of last use, so that a hit takes a
//! block out of its middle and an eviction takes its head.
//!
//! An index entry names its content exactly, not only by hash: the block's own tokens, and the
//! entry before it by block id and generation (at the chain's start: the scope). By induction two
//! chains that verify are the same tokens in the same scope, so a colliding hash costs a miss,
//! never a wrong block.

use super::events::Changes;
use super::key::Scope;
use crate::messages::BlockKey;
use dunlin_runtime::mutated;
use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};
use std::sync::Arc;

/// Index of a block in every shard's KV store.
pub type BlockId = u32;

const NIL: u32 = u32::MAX;

/// What comes before a cached block.
#[derive(Debug, Clone)]
pub enum Parent {
    Start(Arc<Scope>),
    /// A cached block, as it was when its generation had this value.
    Block {
        id: BlockId,
        generation: u32,
    },
}

#[derive(Debug)]
struct Entry {
    key: BlockKey,
    parent: Parent,
}

#[derive(Debug)]
struct Block {
    refs: u32,
    /// Rises whenever the block's entry leaves the index.
    generation: u32,
    entry: Option<Entry>,
    /// Neighbours in the list of cached blocks; `NIL` elsewhere.
    before: u32,
    after: u32,
}

#[derive(Debug)]
pub struct Pool {
    blocks: Vec<Block>,
    /// Tokens of cached blocks, `block_tokens` each, at the block's own place.
    tokens: Vec<u32>,
    block_tokens: usize,
    free: Vec<BlockId>,
    oldest: u32,
    newest: u32,
    cached: u32,
    evicted: u64,
    index: HashMap<u128, BlockId, BuildHasherDefault<KeyHasher>>,
    key_mask: u128,
    changes: Changes,
}

impl Pool {
    /// `key_bits` below 128 shortens the index's keys, to try what collisions do.
    pub fn new(blocks: u32, block_tokens: u32, key_bits: u32) -> Self {
        let block = |_| Block { refs: 0, generation: 0, entry: None, before: NIL, after: NIL };
        let key_mask = if key_bits >= 128 { u128::MAX } else { (1 << key_bits) - 1 };
        Self {
            blocks: (0..blocks).map(block).collect(),
            tokens: vec![0; blocks as usize * block_tokens as usize],
            block_tokens: block_tokens as usize,
            free: (0..blocks).rev().collect(),
            oldest: NIL,
            newest: NIL,
            cached: 0,
            evicted: 0,
            index: HashMap::default(),
            key_mask,
            changes: Changes::default(),
        }
    }

    pub fn total(&self) -> u32 {
        self.blocks.len() as u32
    }

    pub fn free(&self) -> u32 {
        self.free.len() as u32
    }

    pub fn cached(&self) -> u32 {
        self.cached
    }

    pub fn evicted(&self) -> u64 {
        self.evicted
    }

    /// Blocks that `allocate` can hand out: free ones, then cached ones.
    pub fn available(&self) -> u32 {
        self.free() + self.cached
    }

    /// A block held once, with undefined content; evicts the cached block unused for longest.
    pub fn allocate(&mut self) -> Option<BlockId> {
        if self.free.is_empty() && self.oldest != NIL {
            self.uncache(self.oldest);
            self.evicted += 1;
        }
        let id = self.free.pop()?;
        self.blocks[id as usize].refs = 1;
        Some(id)
    }

    /// One more holder of a live or cached block.
    pub fn hold(&mut self, id: BlockId) {
        if self.blocks[id as usize].refs == 0 {
            self.unlink(id);
        }
        self.blocks[id as usize].refs += 1;
    }

    /// One holder less. The last one leaves the block cached if its content is indexed, else free.
    pub fn drop_hold(&mut self, id: BlockId) {
        let block = &mut self.blocks[id as usize];
        assert!(block.refs > 0, "KV block {id} released more often than held");
        if block.refs > 1 && mutated("lose-decrement") {
            return;
        }
        block.refs -= 1;
        if block.refs > 0 && !mutated("free-early") {
            return;
        }
        match block.entry {
            Some(_) => self.link_newest(id),
            None => self.free.push(id),
        }
        if self.blocks[id as usize].entry.is_none() && mutated("double-free") {
            self.free.push(id);
        }
    }

    /// Whether a write would be seen by someone else: another holder, or a later prefix hit.
    pub fn is_shared(&self, id: BlockId) -> bool {
        let block = &self.blocks[id as usize];
        block.refs > 1 || block.entry.is_some()
    }

    pub fn is_indexed(&self, id: BlockId) -> bool {
        self.blocks[id as usize].entry.is_some()
    }

    /// What a block after `previous` names as its parent; `None` if `previous` is not indexed.
    pub fn parent(&self, previous: Option<BlockId>, scope: &Arc<Scope>) -> Option<Parent> {
        let Some(id) = previous else { return Some(Parent::Start(scope.clone())) };
        let generation = self.blocks[id as usize].generation;
        self.is_indexed(id).then_some(Parent::Block { id, generation })
    }

    /// The indexed block with this parent and content, found by its key. A key alone proves nothing.
    pub fn find(&self, key: &BlockKey, parent: &Parent, tokens: &[u32]) -> Option<BlockId> {
        let id = *self.index.get(&self.short(key))?;
        let entry = self.blocks[id as usize].entry.as_ref()?;
        if mutated("trust-keys") {
            return Some(id);
        }
        (entry.parent.is(parent) && self.content(id) == tokens).then_some(id)
    }

    /// Indexes a live block's content. Another block under the same (shortened) key loses its
    /// entry: it holds something else, or can no longer be reached.
    pub fn index(&mut self, id: BlockId, key: BlockKey, parent: Parent, tokens: &[u32]) {
        self.uncache(id);
        if let Some(&other) = self.index.get(&self.short(&key)) {
            self.uncache(other);
        }
        let at = id as usize * self.block_tokens;
        self.tokens[at..at + self.block_tokens].copy_from_slice(tokens);
        self.blocks[id as usize].entry = Some(Entry { key, parent });
        self.index.insert(self.short(&key), id);
        self.changes.note(key, false);
    }

    /// Takes the block's content out of the index, if it is there.
    pub fn uncache(&mut self, id: BlockId) {
        let block = &mut self.blocks[id as usize];
        let Some(entry) = block.entry.take() else { return };
        block.generation = block.generation.wrapping_add(1);
        if block.refs == 0 {
            self.unlink(id);
            self.free.push(id);
        }
        self.index.remove(&self.short(&entry.key));
        self.changes.note(entry.key, true);
    }

    /// Keys that came into and left the index since the last call, each in order of first change.
    pub fn take_changes(&mut self) -> (Vec<BlockKey>, Vec<BlockKey>) {
        let mut changes = std::mem::take(&mut self.changes);
        changes.split(|key| self.has(key))
    }

    pub fn has_changes(&self) -> bool {
        !self.changes.is_empty()
    }

    /// All indexed keys, sorted.
    pub fn keys(&self) -> Vec<BlockKey> {
        let entries = self.blocks.iter().filter_map(|block| block.entry.as_ref());
        let mut keys: Vec<_> = entries.map(|entry| entry.key).collect();
        keys.sort_unstable();
        keys
    }

    fn has(&self, key: &BlockKey) -> bool {
        let id = self.index.get(&self.short(key));
        let entry = id.and_then(|&id| self.blocks[id as usize].entry.as_ref());
        entry.is_some_and(|entry| entry.key == *key)
    }

    fn content(&self, id: BlockId) -> &[u32] {
        let at = id as usize * self.block_tokens;
        &self.tokens[at..at + self.block_tokens]
    }

    fn short(&self, key: &BlockKey) -> u128 {
        u128::from_le_bytes(key.0) & self.key_mask
    }

    fn link_newest(&mut self, id: BlockId) {
        let before = std::mem::replace(&mut self.newest, id);
        self.blocks[id as usize].before = before;
        match before {
            NIL => self.oldest = id,
            _ => self.blocks[before as usize].after = id,
        }
        self.cached += 1;
    }

    fn unlink(&mut self, id: BlockId) {
        let block = &mut self.blocks[id as usize];
        let before = std::mem::replace(&mut block.before, NIL);
        let after = std::mem::replace(&mut block.after, NIL);
        match before {
            NIL => self.oldest = after,
            _ => self.blocks[before as usize].after = after,
        }
        match after {
            NIL => self.newest = before,
            _ => self.blocks[after as usize].before = before,
        }
        self.cached -= 1;
    }

    /// Checks the pool against `holders[id]`, the holds that the caller can account for.
    pub(super) fn audit(&self, holders: &[u32], wrong: &mut Vec<String>) {
        let mut listed = vec![0u32; self.blocks.len()];
        for &id in &self.free {
            listed[id as usize] += 1;
            if self.is_indexed(id) {
                wrong.push(format!("block {id} is free and in the prefix index"));
            }
        }
        let (mut id, mut before, mut length) = (self.oldest, NIL, 0);
        while id != NIL && length <= self.total() {
            listed[id as usize] += 1;
            if self.blocks[id as usize].before != before || !self.is_indexed(id) {
                wrong.push(format!("block {id} is linked wrongly among the cached ones"));
            }
            (before, length) = (id, length + 1);
            id = self.blocks[id as usize].after;
        }
        if length != self.cached || before != self.newest {
            wrong.push(format!("{length} blocks are linked as cached, {} counted", self.cached));
        }
        for (id, block) in self.blocks.iter().enumerate() {
            if block.refs != holders[id] {
                let held = holders[id];
                wrong.push(format!("block {id} counts {} holders and has {held}", block.refs));
            }
            if listed[id] != u32::from(block.refs == 0) {
                let times = listed[id];
                wrong.push(format!("block {id}, {} holders, is listed {times} times", block.refs));
            }
            let key = block.entry.as_ref().map(|entry| self.short(&entry.key));
            if key.is_some_and(|key| self.index.get(&key) != Some(&(id as u32))) {
                wrong.push(format!("block {id} has an entry that the index does not know"));
            }
        }
        let entries = self.blocks.iter().filter(|block| block.entry.is_some()).count();
        if entries != self.index.len() {
            wrong.push(format!("{entries} blocks have an entry, the index {}", self.index.len()));
        }
    }

    /// Indexed blocks whose parent has left the index: they cannot be hit any more.
    #[cfg(test)]
    pub fn orphans(&self) -> usize {
        let lost = |entry: &Entry| match entry.parent {
            Parent::Start(_) => false,
            Parent::Block { id, generation } => {
                let parent = &self.blocks[id as usize];
                parent.entry.is_none() || parent.generation != generation
            }
        };
        self.blocks.iter().filter(|block| block.entry.as_ref().is_some_and(lost)).count()
    }
}

impl Parent {
    fn is(&self, other: &Parent) -> bool {
        match (self, other) {
            (Parent::Start(a), Parent::Start(b)) => Arc::ptr_eq(a, b) || a == b,
            (Parent::Block { id: a, generation: x }, Parent::Block { id: b, generation: y }) => {
                a == b && x == y
            }
            _ => false,
        }
    }
}

/// The keys are hashes already; their low bits serve as they are.
#[derive(Default)]
struct KeyHasher(u64);

impl Hasher for KeyHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for chunk in bytes.chunks(8) {
            let mut word = [0; 8];
            word[..chunk.len()].copy_from_slice(chunk);
            self.0 ^= u64::from_le_bytes(word);
        }
    }

    fn write_u128(&mut self, key: u128) {
        // hashbrown takes its control bytes from the top bits and the place from the bottom ones.
        self.0 = key as u64;
    }
}
