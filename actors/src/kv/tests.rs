//! Random operations against the naive twin, and against a model of the shards' memory.

use super::naive::NaiveKv;
use super::*;
use proptest::prelude::*;
use proptest::strategy::ValueTree;

#[derive(Debug, Clone)]
enum Op {
    /// `bits` choose the tokens (of two), so that prefixes are often shared.
    Start {
        tenant: u8,
        bits: u16,
        length: usize,
        lookup: bool,
    },
    Advance {
        which: usize,
        more: usize,
        settled: bool,
    },
    Fork {
        which: usize,
    },
    Release {
        which: usize,
    },
    Discard {
        which: usize,
    },
    CopiesDone,
}

fn ops(discard: bool) -> impl Strategy<Value = Vec<Op>> {
    let start = (0..2u8, any::<u16>(), 1..24usize, prop::bool::weighted(0.9));
    let op = prop_oneof![
        3 => start.prop_map(|(tenant, bits, length, lookup)| {
            Op::Start { tenant, bits: bits & 0x1103, length, lookup }
        }),
        6 => (any::<usize>(), 1..9usize, any::<bool>())
            .prop_map(|(which, more, settled)| Op::Advance { which, more, settled }),
        1 => any::<usize>().prop_map(|which| Op::Fork { which }),
        2 => any::<usize>().prop_map(|which| Op::Release { which }),
        u32::from(discard) => any::<usize>().prop_map(|which| Op::Discard { which }),
        2 => Just(Op::CopiesDone),
    ];
    prop::collection::vec(op, 1..120)
}

struct Seq {
    table: TableId,
    naive: usize,
    chain: Chain,
    /// Grown by what a decode would draw; a function of the tokens before.
    tokens: Vec<u32>,
    written: usize,
    salt: u32,
}

/// Real manager, twin, and what every shard's memory would hold.
struct World {
    kv: Kv,
    naive: Option<NaiveKv>,
    seqs: Vec<Seq>,
    memory: Vec<Vec<u64>>,
    copies: Vec<Copies>,
    size: usize,
    forks: u32,
    hits: usize,
    /// A table was forked while it had a block of its own beside an indexed one with the same
    /// content. If one of the two then changes over to that one, the other goes on holding the
    /// blocks that come after it without holding it, and it may be evicted first. That costs
    /// hits, never content.
    forked_duplicate: bool,
}

impl World {
    fn new(blocks: u32, size: u32, key_bits: u32, twin: bool) -> Self {
        let config = KvConfig { blocks, block_tokens: size, namespace: [7; 16], key_bits };
        Self {
            kv: Kv::new(config).unwrap(),
            naive: twin.then(|| NaiveKv::new(blocks as usize, size as usize)),
            seqs: Vec::new(),
            memory: vec![vec![0; size as usize]; blocks as usize],
            copies: Vec::new(),
            size: size as usize,
            forks: 0,
            hits: 0,
            forked_duplicate: false,
        }
    }

    fn apply(&mut self, op: &Op) {
        match *op {
            Op::Start { tenant, bits, length, lookup } => self.start(tenant, bits, length, lookup),
            Op::Advance { which, more, settled } => {
                if let Some(at) = self.pick(which) {
                    self.advance(at, more, settled);
                }
            }
            Op::Fork { which } => {
                if let Some(at) = self.pick(which) {
                    self.fork(at);
                }
            }
            Op::Release { which } => {
                // A table outlives the steps it is in, hence their copies.
                self.copies_done();
                if let Some(at) = self.pick(which) {
                    let seq = self.seqs.remove(at);
                    self.kv.release(seq.table).unwrap();
                    assert_eq!(self.kv.release(seq.table), Err(KvError::NoTable(seq.table)));
                    if let Some(naive) = &mut self.naive {
                        naive.release(seq.naive);
                    }
                }
            }
            Op::Discard { which } => {
                if let Some(at) = self.pick(which) {
                    let seq = self.seqs.remove(at);
                    self.kv.discard(seq.table).unwrap();
                }
            }
            Op::CopiesDone => self.copies_done(),
        }
        self.check();
    }

    fn copies_done(&mut self) {
        for copies in self.copies.drain(..) {
            self.kv.copies_done(copies);
        }
        if let Some(naive) = &mut self.naive {
            naive.copies_done();
        }
    }

    fn pick(&self, which: usize) -> Option<usize> {
        (!self.seqs.is_empty()).then(|| which % self.seqs.len())
    }

    fn start(&mut self, tenant: u8, bits: u16, length: usize, lookup: bool) {
        let tokens: Vec<u32> = (0..length).map(|i| u32::from(bits >> (i % 16) & 1)).collect();
        let mut chain = self.kv.chain(&format!("tenant {tenant}"), "");
        let (table, covered) = self.kv.start(&mut chain, &tokens, lookup).unwrap();
        self.hits += usize::from(covered > 0);
        let mut naive = 0;
        if let Some(twin) = &mut self.naive {
            let expected = twin.start(chain.scope(), &tokens, lookup);
            naive = expected.0;
            assert_eq!(covered as usize, expected.1);
        }
        let salt = u32::from(bits);
        self.seqs.push(Seq { table, naive, chain, tokens, written: covered as usize, salt });
    }

    fn advance(&mut self, at: usize, more: usize, settled: bool) {
        let seq = &mut self.seqs[at];
        let upto = seq.written + more;
        let room = self.kv.extend(seq.table, upto as u32);
        if let Some(twin) = &mut self.naive {
            assert_eq!(room.is_ok(), twin.extend(seq.naive, upto), "{room:?}");
        }
        if room.is_err() {
            return;
        }
        while seq.tokens.len() < upto {
            seq.tokens.push(seq.salt % 2);
        }
        let copies = self.kv.take_copies();
        for &(from, to) in copies.pairs() {
            self.memory[to as usize] = self.memory[from as usize].clone();
        }
        self.copies.push(copies);
        let table = self.kv.table(seq.table).unwrap();
        for position in seq.written..upto {
            let block = table[position / self.size] as usize;
            self.memory[block][position % self.size] = content(seq, position);
        }
        seq.written = upto;
        self.kv.commit(seq.table, &mut seq.chain, &seq.tokens[..upto], settled).unwrap();
        if let Some(twin) = &mut self.naive {
            twin.commit(seq.naive, seq.chain.scope(), &seq.tokens[..upto], settled);
        }
    }

    fn fork(&mut self, at: usize) {
        self.forks += 1;
        let from = &self.seqs[at];
        let blocks = self.kv.table(from.table).unwrap();
        let full = &blocks[..from.written / self.size];
        self.forked_duplicate |= full.iter().any(|&id| !self.kv.pool.is_indexed(id));
        let table = self.kv.fork(from.table).unwrap();
        let naive = self.naive.as_mut().map_or(0, |twin| twin.fork(from.naive));
        let (chain, written) = (from.chain.clone(), from.written);
        let tokens = from.tokens[..written].to_vec();
        let salt = from.salt + self.forks;
        // Cut to what is written: the fork draws its own tokens from here on.
        let chain = if tokens.len() < from.tokens.len() { fresh(&chain, &self.kv) } else { chain };
        self.seqs.push(Seq { table, naive, chain, tokens, written, salt });
    }

    fn check(&mut self) {
        self.kv.audit().unwrap_or_else(|wrong| panic!("{wrong:#?}"));
        for seq in &self.seqs {
            let table = self.kv.table(seq.table).unwrap();
            for position in 0..seq.written {
                let block = table[position / self.size] as usize;
                let held = self.memory[block][position % self.size];
                assert_eq!(held, content(seq, position), "position {position} of {table:?}");
            }
        }
        let Some(twin) = &self.naive else { return };
        let usage = self.kv.usage();
        let real = (usage.free as usize, usage.cached as usize, usage.live as usize);
        assert_eq!(real, twin.usage());
        let orphans = self.kv.pool.orphans();
        assert!(orphans == 0 || self.forked_duplicate, "a head was evicted before its tail");
        let mut expected: Vec<_> =
            twin.contents().iter().map(|(s, t)| key(&self.kv, s, t)).collect();
        expected.sort_unstable();
        assert_eq!(self.kv.indexed_keys(), expected);
        for seq in &self.seqs {
            let (blocks, written) = twin.table(seq.naive);
            assert_eq!(self.kv.table(seq.table).unwrap().len(), blocks.len());
            assert_eq!(seq.written, *written);
        }
    }
}

/// What a KV store holds at a position: a digest of all tokens up to it, and whose they are.
fn content(seq: &Seq, position: usize) -> u64 {
    let mut hash = blake3::Hasher::new();
    hash.update(seq.chain.scope().tenant.as_bytes());
    for token in &seq.tokens[..=position] {
        hash.update(&token.to_le_bytes());
    }
    u64::from_le_bytes(hash.finalize().as_bytes()[..8].try_into().unwrap())
}

fn fresh(chain: &Chain, kv: &Kv) -> Chain {
    kv.chain(&chain.scope().tenant, &chain.scope().salt)
}

fn key(kv: &Kv, scope: &Scope, prefix: &[u32]) -> crate::messages::BlockKey {
    let mut chain = kv.chain(&scope.tenant, &scope.salt);
    chain.extend(prefix);
    *chain.keys().last().unwrap()
}

/// Applies the operations, then lets everything go; events must add up to what is indexed.
fn run(mut world: World, ops: &[Op]) -> World {
    let mut told = std::collections::BTreeSet::new();
    for (count, op) in ops.iter().enumerate() {
        world.apply(op);
        if count % 3 != 0 {
            continue;
        }
        if let Some((stored, removed)) = world.kv.take_changes() {
            stored.into_iter().for_each(|key| assert!(told.insert(key), "stored twice"));
            removed.iter().for_each(|key| assert!(told.remove(key), "removed, never stored"));
        }
        assert_eq!(told.iter().copied().collect::<Vec<_>>(), world.kv.indexed_keys());
    }
    while !world.seqs.is_empty() {
        world.apply(&Op::Release { which: 0 });
    }
    world.apply(&Op::CopiesDone);
    assert_eq!(world.kv.usage().live, 0);
    world
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..Default::default() })]

    #[test]
    fn equals_the_naive_twin(ops in ops(false), blocks in 1..24u32, size in 1..5u32) {
        run(World::new(blocks, size, 128, true), &ops);
    }

    /// C29: with keys of 8 bits (and of 2) collisions are common, and every block is still right.
    #[test]
    fn colliding_keys_never_give_a_wrong_block(
        ops in ops(true),
        blocks in 1..24u32,
        size in 1..5u32,
        bits in prop::sample::select(vec![1, 2, 8, 128]),
    ) {
        run(World::new(blocks, size, bits, false), &ops);
    }
}

/// The properties above mean something only if hits, forks and collisions do occur.
#[test]
fn random_operations_reach_the_interesting_states() {
    let mut runner = proptest::test_runner::TestRunner::deterministic();
    let (mut hits, mut forks) = (0, 0);
    for _ in 0..50 {
        let ops = ops(false).new_tree(&mut runner).unwrap().current();
        let world = run(World::new(16, 2, 8, false), &ops);
        (hits, forks) = (hits + world.hits, forks + world.forks);
    }
    assert!(hits > 50 && forks > 50, "{hits} hits, {forks} forks");
}

fn kv(blocks: u32, size: u32) -> Kv {
    Kv::new(KvConfig { blocks, block_tokens: size, namespace: [0; 16], key_bits: 128 }).unwrap()
}

/// Runs a whole prompt and lets it go; returns the tokens that were cached.
fn serve(kv: &mut Kv, tenant: &str, salt: &str, tokens: &[u32]) -> u32 {
    let mut chain = kv.chain(tenant, salt);
    let (table, cached) = kv.start(&mut chain, tokens, true).unwrap();
    kv.extend(table, tokens.len() as u32).unwrap();
    let copies = kv.take_copies();
    kv.commit(table, &mut chain, tokens, true).unwrap();
    kv.copies_done(copies);
    kv.release(table).unwrap();
    kv.audit().unwrap();
    cached
}

#[test]
fn a_hit_never_covers_the_last_token() {
    let mut kv = kv(8, 4);
    let tokens: Vec<u32> = (0..16).collect();
    assert_eq!(serve(&mut kv, "t", "", &tokens), 0);
    assert_eq!(serve(&mut kv, "t", "", &tokens), 15);
    assert_eq!(serve(&mut kv, "t", "", &tokens[..13]), 12);
    assert_eq!(serve(&mut kv, "t", "", &tokens[..4]), 3);
}

/// C28: whatever changes the KV of like tokens is in the scope or the namespace.
#[test]
fn another_tenant_or_salt_hits_nothing() {
    let mut kv = kv(64, 4);
    let tokens: Vec<u32> = (0..16).collect();
    for (tenant, salt) in [("a", ""), ("b", ""), ("a", "b"), ("ab", ""), ("", "ab"), ("", "")] {
        assert_eq!(serve(&mut kv, tenant, salt, &tokens), 0, "{tenant}/{salt}");
        assert_eq!(serve(&mut kv, tenant, salt, &tokens), 15, "{tenant}/{salt}");
    }
}

/// A pool that a sequence fills to the last block has no room for a copy of a cached one.
#[test]
fn a_full_hit_without_room_to_copy_gives_up_its_last_block() {
    let mut kv = kv(2, 4);
    let tokens: Vec<u32> = (0..8).collect();
    assert_eq!(serve(&mut kv, "t", "", &tokens), 0);
    assert_eq!(serve(&mut kv, "t", "", &tokens), 4);
}

#[test]
fn like_prompts_computed_at_once_end_up_in_the_same_blocks() {
    let mut kv = kv(8, 4);
    let tokens: Vec<u32> = (0..8).collect();
    let (mut one, mut two) = (kv.chain("t", ""), kv.chain("t", ""));
    let (a, _) = kv.start(&mut one, &tokens, true).unwrap();
    let (b, _) = kv.start(&mut two, &tokens, true).unwrap();
    kv.extend(a, 8).unwrap();
    kv.extend(b, 8).unwrap();
    kv.commit(a, &mut one, &tokens, true).unwrap();
    kv.commit(b, &mut two, &tokens, false).unwrap();
    assert_eq!(kv.usage().live, 4, "a step in flight still reads the duplicates");
    kv.commit(b, &mut two, &tokens, true).unwrap();
    assert_eq!(kv.usage().live, 2);
    assert_eq!(kv.table(a), kv.table(b));
}

#[test]
fn discarded_content_is_never_hit_again() {
    let mut kv = kv(8, 4);
    let tokens: Vec<u32> = (0..12).collect();
    serve(&mut kv, "t", "", &tokens);
    let mut chain = kv.chain("t", "");
    let (table, cached) = kv.start(&mut chain, &tokens[..6], true).unwrap();
    assert_eq!(cached, 4);
    kv.discard(table).unwrap();
    kv.audit().unwrap();
    assert_eq!(serve(&mut kv, "t", "", &tokens), 0, "its successors cannot be reached either");
}

#[test]
fn wrong_use_is_a_typed_error() {
    let zero = KvConfig { blocks: 0, block_tokens: 4, namespace: [0; 16], key_bits: 128 };
    assert_eq!(Kv::new(zero).err(), Some(KvError::NoBlocks));
    let mut kv = kv(2, 4);
    let mut chain = kv.chain("t", "");
    assert_eq!(kv.start(&mut chain, &[], true), Err(KvError::Empty));
    let (table, _) = kv.start(&mut chain, &[1, 2, 3], true).unwrap();
    assert_eq!(kv.extend(table, 9), Err(KvError::NotNow { need: 3, available: 2 }));
    kv.extend(table, 3).unwrap();
    let beyond = Err(KvError::Beyond { tokens: 8, written: 3 });
    assert_eq!(kv.commit(table, &mut chain, &[0; 8], true), beyond);
    assert!(kv.feasible(8) && !kv.feasible(9));
}
