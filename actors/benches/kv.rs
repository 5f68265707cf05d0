//! What the block tables cost: a sequence of 1,024 tokens in blocks of 16, from start to release,
//! on a pool of 8,192 blocks.
//!
//! `cargo bench -p dunlin-actors --bench kv`

use divan::Bencher;
use dunlin_actors::kv::{Chain, Kv, KvConfig, TableId};

const PROMPT: u32 = 1024;

fn main() {
    divan::main();
}

/// Nothing is cached: hash, allocate, index, release; from the 129th prompt on with eviction.
#[divan::bench]
fn miss(bencher: Bencher) {
    let mut kv = kv();
    let mut seed = 0;
    bencher.bench_local(|| {
        seed += 1;
        let prompt = prompt(seed);
        let (table, covered) = run(&mut kv, &prompt);
        assert_eq!(covered, 0);
        kv.release(table).expect("a live table");
    });
    assert_eq!(kv.usage().live, 0);
}

/// All of the prompt but its last token is cached.
#[divan::bench]
fn hit(bencher: Bencher) {
    let mut kv = kv();
    let prompt = prompt(1);
    let (table, _) = run(&mut kv, &prompt);
    kv.release(table).expect("a live table");
    bencher.bench_local(|| {
        let (table, covered) = run(&mut kv, &prompt);
        assert_eq!(covered, PROMPT - 1);
        kv.release(table).expect("a live table");
    });
    assert_eq!(kv.usage().live, 0);
}

/// One decode step of so many sequences: room for a token each, and its commit.
#[divan::bench(args = [8, 64, 256])]
fn one_token_each(bencher: Bencher, sequences: u32) {
    const OUTPUT: usize = 256;
    let mut kv = kv();
    let mut all: Vec<(TableId, Chain, Vec<u32>)> = Vec::new();
    let begin = |kv: &mut Kv, all: &mut Vec<(TableId, Chain, Vec<u32>)>| {
        for (table, ..) in all.drain(..) {
            kv.release(table).expect("a live table");
        }
        for n in 0..sequences {
            let mut chain = kv.chain("lab", "");
            let tokens = vec![n + 1; 16];
            let (table, _) = kv.start(&mut chain, &tokens, false).expect("a table");
            kv.extend(table, 16).expect("room");
            all.push((table, chain, tokens));
        }
    };
    bencher.bench_local(|| {
        if all.first().is_none_or(|(.., tokens)| tokens.len() == OUTPUT) {
            begin(&mut kv, &mut all);
        }
        for (table, chain, tokens) in &mut all {
            tokens.push(7);
            kv.extend(*table, tokens.len() as u32).expect("room");
            kv.commit(*table, chain, tokens, true).expect("a live table");
        }
        let copies = kv.take_copies();
        kv.copies_done(copies);
    });
}

fn kv() -> Kv {
    let config = KvConfig { blocks: 8192, block_tokens: 16, namespace: [7; 16], key_bits: 128 };
    Kv::new(config).expect("a pool")
}

fn prompt(seed: u32) -> Vec<u32> {
    (0..PROMPT).map(|i| i.wrapping_mul(7919) ^ seed).collect()
}

/// Starts, fills and commits a sequence; what the cache had of it.
fn run(kv: &mut Kv, prompt: &[u32]) -> (TableId, u32) {
    let mut chain = kv.chain("lab", "");
    let (table, covered) = kv.start(&mut chain, prompt, true).expect("a table");
    kv.extend(table, PROMPT).expect("room");
    let copies = kv.take_copies();
    kv.copies_done(copies);
    kv.commit(table, &mut chain, prompt, true).expect("a live table");
    (table, covered)
}
