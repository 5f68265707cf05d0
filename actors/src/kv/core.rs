//! Block tables over the pool: start with a prefix hit, extend, commit, release.
//!
//! The life of a table: [`Kv::start`] attaches cached blocks; [`Kv::extend`] makes room for the
//! tokens of a step; once that step is done, [`Kv::commit`] indexes the blocks that became full;
//! [`Kv::release`] ends it, leaving its indexed blocks cached. Invariants:
//!
//! - free + cached + live = total, and a block's count equals its holders (tables and pending
//!   copies).
//! - A block is written by one table only, and never once it is shared or indexed: a table that
//!   must write into such a block gets a copy first.
//! - Only computed content is indexed, so a hit never reads what a step in flight still writes.
//! - A hit leaves at least the last token to compute: its logits are needed.
//! - With sliding-window layers, blocks outside the window are kept, so nothing is ever reused
//!   while a table names it.
//!
//! A table whose content turns out to be in the index already (two like prompts computed at once)
//! changes over to the indexed blocks: memory is shared, and the tail of a chain always holds its
//! head, so that tails are evicted before heads.

use super::key::Chain;
use super::pool::{BlockId, Pool};
use crate::messages::BlockKey;
use std::collections::BTreeMap;

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KvConfig {
    pub blocks: u32,
    pub block_tokens: u32,
    /// Stands for the model's content and the KV format (see [`super::key`]).
    pub namespace: [u8; 16],
    /// Bits of a block key that the index uses: 128, or fewer to try collisions.
    pub key_bits: u32,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum KvError {
    #[error("{need} KV blocks are needed and {available} are free or evictable")]
    NotNow { need: u32, available: u32 },
    #[error("{0:?} is not a live KV table")]
    NoTable(TableId),
    #[error("a sequence needs at least one token")]
    Empty,
    #[error("{tokens} tokens were committed to a table written up to {written}")]
    Beyond { tokens: u32, written: u32 },
    #[error("a KV pool needs at least one block of at least one token")]
    NoBlocks,
}

/// Blocks by state. `free + cached + live = total`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct KvUsage {
    pub total: u32,
    pub free: u32,
    /// Held by no table; may be hit, or evicted.
    pub cached: u32,
    pub live: u32,
}

/// Names a live table. A released one's name is never taken for a later table's.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct TableId {
    slot: u32,
    serial: u32,
}

/// Block copies (from, to) a step must make before it writes anything. The sources stay held
/// until [`Kv::copies_done`].
#[derive(Debug, Default)]
#[must_use = "the sources stay held until `Kv::copies_done`"]
pub struct Copies(Vec<(BlockId, BlockId)>);

impl Copies {
    pub fn pairs(&self) -> &[(BlockId, BlockId)] {
        &self.0
    }
}

#[derive(Debug)]
pub(super) struct Table {
    serial: u32,
    pub(super) blocks: Vec<BlockId>,
    /// Positions below this are written or planned to be.
    pub(super) written: u32,
    /// Leading blocks that were indexed when last looked at.
    indexed: usize,
}

#[derive(Debug)]
pub struct Kv {
    config: KvConfig,
    pub(super) pool: Pool,
    pub(super) tables: Vec<Option<Table>>,
    vacant: Vec<u32>,
    next_serial: u32,
    /// Planned and not yet taken.
    copies: Vec<(BlockId, BlockId)>,
    /// Sources of copies that are not yet done, with how many.
    pub(super) copying: BTreeMap<BlockId, u32>,
}

impl Kv {
    pub fn new(config: KvConfig) -> Result<Self, KvError> {
        // The pool's links use the last id as 'none'.
        if config.blocks == 0 || config.blocks == u32::MAX || config.block_tokens == 0 {
            return Err(KvError::NoBlocks);
        }
        Ok(Self {
            pool: Pool::new(config.blocks, config.block_tokens, config.key_bits),
            config,
            tables: Vec::new(),
            vacant: Vec::new(),
            next_serial: 0,
            copies: Vec::new(),
            copying: BTreeMap::new(),
        })
    }

    pub fn config(&self) -> &KvConfig {
        &self.config
    }

    pub fn usage(&self) -> KvUsage {
        let (total, free, cached) = (self.pool.total(), self.pool.free(), self.pool.cached());
        KvUsage { total, free, cached, live: total - free - cached }
    }

    /// Blocks that can be had now, by evicting every cached one.
    pub fn available(&self) -> u32 {
        self.pool.available()
    }

    /// Blocks that `tokens` tokens fill or begin.
    pub fn blocks_for(&self, tokens: u32) -> u32 {
        tokens.div_ceil(self.config.block_tokens)
    }

    /// Whether a sequence of this length fits when it has the whole pool to itself.
    pub fn feasible(&self, tokens: u64) -> bool {
        tokens <= self.capacity_tokens()
    }

    pub fn capacity_tokens(&self) -> u64 {
        u64::from(self.config.blocks) * u64::from(self.config.block_tokens)
    }

    /// Begins a sequence's block names. Sequences of unlike tenants or salts share no block.
    pub fn chain(&self, tenant: &str, salt: &str) -> Chain {
        Chain::new(&self.config.namespace, self.config.block_tokens, tenant, salt)
    }

    /// Opens a table for `tokens`, with as much of them as the prefix cache holds (if `lookup`),
    /// but never the last one. Returns the tokens covered. Allocates nothing.
    pub fn start(
        &mut self,
        chain: &mut Chain,
        tokens: &[u32],
        lookup: bool,
    ) -> Result<(TableId, u32), KvError> {
        let last = tokens.len().checked_sub(1).ok_or(KvError::Empty)?;
        let mut blocks = if lookup { self.find_prefix(chain, tokens) } else { Vec::new() };
        for &id in &blocks {
            self.pool.hold(id);
        }
        let size = self.block_tokens();
        if blocks.len() * size > last && (size == 1 || self.pool.available() == 0) {
            // The last block would have to be copied: for nothing, or with nowhere to copy it to.
            blocks.pop().into_iter().for_each(|id| self.pool.drop_hold(id));
        }
        let covered = last.min(blocks.len() * size) as u32;
        let table = Table { serial: 0, indexed: blocks.len(), blocks, written: covered };
        Ok((self.open(table), covered))
    }

    /// Blocks that `extend` would allocate.
    pub fn missing(&self, table: TableId, upto: u32) -> Result<u32, KvError> {
        let size = self.config.block_tokens;
        let table = self.table_ref(table)?;
        let more = upto.div_ceil(size).saturating_sub(table.blocks.len() as u32);
        let copy = upto > table.written && self.must_copy(table).is_some();
        Ok(more + u32::from(copy))
    }

    /// Makes the positions up to `upto` writable; all or nothing. A copy that this needs is handed
    /// out by [`Kv::take_copies`].
    pub fn extend(&mut self, id: TableId, upto: u32) -> Result<(), KvError> {
        let (need, available) = (self.missing(id, upto)?, self.pool.available());
        if need > available {
            return Err(KvError::NotNow { need, available });
        }
        let table = self.table_ref(id)?;
        if upto <= table.written {
            return Ok(());
        }
        let copy = self.must_copy(table);
        let mut blocks = std::mem::take(&mut self.table_mut(id)?.blocks);
        let wanted = blocks.len() + need as usize - usize::from(copy.is_some());
        if let Some(at) = copy {
            let to = self.allocate();
            let from = std::mem::replace(&mut blocks[at], to);
            // The table's hold on the source becomes the copy's.
            *self.copying.entry(from).or_default() += 1;
            self.copies.push((from, to));
        }
        while blocks.len() < wanted {
            blocks.push(self.allocate());
        }
        let table = self.table_mut(id)?;
        table.indexed = table.indexed.min(copy.unwrap_or(usize::MAX));
        table.blocks = blocks;
        table.written = upto;
        Ok(())
    }

    /// The copies planned since the last call; they belong to the step that is being planned.
    pub fn take_copies(&mut self) -> Copies {
        Copies(std::mem::take(&mut self.copies))
    }

    /// The step with these copies is done.
    pub fn copies_done(&mut self, copies: Copies) {
        for (from, _) in copies.0 {
            match self.copying.get_mut(&from) {
                Some(1) => drop(self.copying.remove(&from)),
                Some(count) => *count -= 1,
                None => unreachable!("copies are made by take_copies alone, and taken once"),
            }
            self.pool.drop_hold(from);
        }
    }

    /// The content of `tokens` (from the sequence's start) is computed: indexes the blocks that
    /// are full. `settled`: no step in flight was sent this table, so that duplicates of indexed
    /// blocks may be changed over.
    pub fn commit(
        &mut self,
        id: TableId,
        chain: &mut Chain,
        tokens: &[u32],
        settled: bool,
    ) -> Result<(), KvError> {
        let size = self.block_tokens();
        let table = self.table_ref(id)?;
        if tokens.len() as u64 > u64::from(table.written) {
            let tokens = u32::try_from(tokens.len()).unwrap_or(u32::MAX);
            return Err(KvError::Beyond { tokens, written: table.written });
        }
        let full = tokens.len() / size;
        let mut done = table.indexed;
        if done >= full {
            return Ok(());
        }
        // A block may have lost its entry to a colliding key: index again from there.
        while done > 0 && !self.pool.is_indexed(table.blocks[done - 1]) {
            done -= 1;
        }
        chain.extend(&tokens[..full * size]);
        let mut blocks = std::mem::take(&mut self.table_mut(id)?.blocks);
        while done < full {
            let content = &tokens[done * size..(done + 1) * size];
            if !self.index_block(chain, &mut blocks, done, content, settled) {
                break;
            }
            done += 1;
        }
        let table = self.table_mut(id)?;
        table.blocks = blocks;
        table.indexed = done;
        Ok(())
    }

    /// A second table with the same content; whoever writes first into a shared block copies it.
    pub fn fork(&mut self, id: TableId) -> Result<TableId, KvError> {
        let from = self.table_ref(id)?;
        let table = Table {
            serial: 0,
            blocks: from.blocks.clone(),
            written: from.written,
            indexed: from.indexed,
        };
        for &block in &table.blocks {
            self.pool.hold(block);
        }
        Ok(self.open(table))
    }

    /// Ends a table that no step in flight uses, its copies included. The last blocks become
    /// evictable first.
    pub fn release(&mut self, id: TableId) -> Result<(), KvError> {
        let table = self.close(id)?;
        for &block in table.blocks.iter().rev() {
            self.pool.drop_hold(block);
        }
        Ok(())
    }

    /// Like `release`, but nothing of its content is ever hit again: it is not to be trusted.
    pub fn discard(&mut self, id: TableId) -> Result<(), KvError> {
        for &block in &self.close(id)?.blocks {
            self.pool.uncache(block);
            self.pool.drop_hold(block);
        }
        Ok(())
    }

    /// Cached blocks that had to make room so far.
    pub fn evicted_total(&self) -> u64 {
        self.pool.evicted()
    }

    /// Tables opened so far; tells whether anything happened.
    pub fn opened(&self) -> u32 {
        self.next_serial
    }

    /// Block ids in order of position.
    pub fn table(&self, id: TableId) -> Result<&[BlockId], KvError> {
        Ok(&self.table_ref(id)?.blocks)
    }

    /// Keys (stored, removed) since the last call, as the net effect; `None` if nothing changed.
    pub fn take_changes(&mut self) -> Option<(Vec<BlockKey>, Vec<BlockKey>)> {
        if !self.pool.has_changes() {
            return None;
        }
        let (stored, removed) = self.pool.take_changes();
        (!stored.is_empty() || !removed.is_empty()).then_some((stored, removed))
    }

    /// Every key a prefix hit could start from, sorted.
    pub fn indexed_keys(&self) -> Vec<BlockKey> {
        self.pool.keys()
    }

    fn block_tokens(&self) -> usize {
        self.config.block_tokens as usize
    }

    fn find_prefix(&self, chain: &mut Chain, tokens: &[u32]) -> Vec<BlockId> {
        chain.extend(tokens);
        let mut found = Vec::new();
        for (key, content) in chain.keys().iter().zip(tokens.chunks_exact(self.block_tokens())) {
            let parent = self.pool.parent(found.last().copied(), chain.scope());
            let Some(parent) = parent else { break };
            let Some(id) = self.pool.find(key, &parent, content) else { break };
            found.push(id);
        }
        found
    }

    /// Place of the block that the next write would change under someone else's eyes.
    fn must_copy(&self, table: &Table) -> Option<usize> {
        let at = (table.written / self.config.block_tokens) as usize;
        let shared = |&id: &BlockId| self.pool.is_shared(id);
        table.blocks.get(at).is_some_and(shared).then_some(at)
    }

    /// Indexes block `at` of a table, whose earlier blocks are indexed. False: not now.
    fn index_block(
        &mut self,
        chain: &Chain,
        blocks: &mut [BlockId],
        at: usize,
        content: &[u32],
        settled: bool,
    ) -> bool {
        let (own, key) = (blocks[at], chain.keys()[at]);
        let previous = at.checked_sub(1).map(|before| blocks[before]);
        let Some(parent) = self.pool.parent(previous, chain.scope()) else { return false };
        match self.pool.find(&key, &parent, content) {
            Some(same) if same == own => true,
            Some(_) if !settled => false,
            Some(same) => {
                self.pool.hold(same);
                self.pool.drop_hold(own);
                blocks[at] = same;
                true
            }
            None => {
                self.pool.index(own, key, parent, content);
                // With shortened keys the new entry may have displaced its own parent's.
                previous.is_none_or(|id| self.pool.is_indexed(id))
            }
        }
    }

    fn allocate(&mut self) -> BlockId {
        self.pool.allocate().unwrap_or_else(|| unreachable!("`extend` counted the blocks first"))
    }

    fn open(&mut self, mut table: Table) -> TableId {
        self.next_serial = self.next_serial.wrapping_add(1);
        table.serial = self.next_serial;
        let slot = self.vacant.pop().unwrap_or_else(|| {
            self.tables.push(None);
            self.tables.len() as u32 - 1
        });
        self.tables[slot as usize] = Some(table);
        TableId { slot, serial: self.next_serial }
    }

    fn close(&mut self, id: TableId) -> Result<Table, KvError> {
        self.table_ref(id)?;
        self.vacant.push(id.slot);
        self.tables[id.slot as usize].take().ok_or(KvError::NoTable(id))
    }

    fn table_ref(&self, id: TableId) -> Result<&Table, KvError> {
        let table = self.tables.get(id.slot as usize).and_then(Option::as_ref);
        table.filter(|table| table.serial == id.serial).ok_or(KvError::NoTable(id))
    }

    fn table_mut(&mut self, id: TableId) -> Result<&mut Table, KvError> {
        let table = self.tables.get_mut(id.slot as usize).and_then(Option::as_mut);
        table.filter(|table| table.serial == id.serial).ok_or(KvError::NoTable(id))
    }
}
