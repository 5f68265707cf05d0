//! The hash engine's text over ranks, stages and damaged tables.

use crate::group::group;
use crate::harness::{MAX_TOKENS, Seen, cuts, generate, seq, stage, step};
use dunlin_model::engine::{Alone, Batch};
use dunlin_model::hash_engine::{HashEngine, HashSpec};
use proptest::prelude::*;

fn spec() -> HashSpec {
    HashSpec { vocab: 1 << 20, layers: 4, context: 256, heads: 4, ..HashSpec::default() }
}

fn engines(stages: usize, rank: usize, ranks: usize) -> Vec<HashEngine> {
    let engine = |cut| HashEngine::new(spec(), stage(cut, 4, rank, ranks)).expect("an engine");
    cuts(4, stages).into_iter().map(engine).collect()
}

fn in_ranks(stages: usize, ranks: usize, prompt: &[u32]) -> Seen {
    let blocks: Vec<u32> = (0..12).collect();
    std::thread::scope(|scope| {
        let run = |(rank, mut member)| {
            let blocks = &blocks;
            scope.spawn(move || {
                let mut engines = engines(stages, rank, ranks);
                generate(&mut engines, prompt, 16, blocks, 5, &mut member)
            })
        };
        let threads: Vec<_> = group(ranks).into_iter().enumerate().map(run).collect();
        let mut all = threads.into_iter().map(|t| t.join().expect("a rank"));
        all.next().expect("rank 0")
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]

    #[test]
    fn ranks_and_stages_change_no_token(
        prompt in prop::collection::vec(0u32..101, 1..60),
        ranks in 1usize..=4,
        stages in 1usize..=3,
    ) {
        let blocks: Vec<u32> = (0..12).rev().collect();
        let mut whole = engines(1, 0, 1);
        let want = generate(&mut whole, &prompt, MAX_TOKENS, &blocks, 5, &mut Alone);
        prop_assert_eq!(in_ranks(stages, ranks, &prompt), want);
    }

    /// Any block of the table that is not the sequence's own shows in the next token.
    #[test]
    fn a_wrong_block_changes_the_next_token(
        prompt in prop::collection::vec(0u32..101, 33..100),
        pick in any::<prop::sample::Index>(),
        kind in 0usize..3,
    ) {
        let mut engine = engines(1, 0, 1);
        let table: Vec<u32> = (0..7).collect();
        let run = |engine: &mut Vec<HashEngine>, tokens: &[u32], position, blocks: &[u32]| {
            let batch = Batch { seqs: vec![seq(1, tokens, position, blocks)], copies: vec![] };
            step(engine, &batch, &mut Alone)[0].token.expect("a token")
        };
        // Another sequence of the same prompt but for its first token, in blocks of its own.
        let other: Vec<u32> = (20..27).collect();
        let mut prompt_of_other = prompt.clone();
        prompt_of_other[0] = (prompt[0] + 1) % 101;
        run(&mut engine, &prompt_of_other, 0, &other);
        run(&mut engine, &prompt, 0, &table);
        let good = run(&mut engine, &[5], prompt.len(), &table);
        prop_assert_eq!(run(&mut engine, &[5], prompt.len(), &table), good);
        let full = prompt.len() / 16;
        let at = pick.index(full);
        let mut wrong = table.clone();
        match kind {
            0 => wrong[at] = 39,                       // lost: never written
            1 => wrong[at] = other[at],                // foreign
            _ => wrong.swap(at, (at + 1) % full),      // swapped
        }
        prop_assert_ne!(run(&mut engine, &[5], prompt.len(), &wrong), good);
    }
}

#[test]
fn more_ranks_than_heads_are_refused() {
    assert!(HashEngine::new(spec(), stage(0..4, 4, 0, 5)).is_err());
}
