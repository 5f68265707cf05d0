//! The same bits whatever the stages, the chunks, the blocks and the company.

use crate::harness::{self, MAX_TOKENS, Seen, cuts, forced, generate, seq, stage};
use crate::synthetic::{FAMILIES, Synthetic, model};
use dunlin_backend::Reference;
use dunlin_model::engine::{Alone, Batch};
use dunlin_model::spec::Family;
use dunlin_model::stage::StageWeights;
use dunlin_model::transformer::TransformerEngine;
use dunlin_model::weights::WeightSource;
use proptest::prelude::*;
use std::sync::Arc;

type Stages = Vec<TransformerEngine<Reference>>;

fn pipeline(source: &Synthetic, stages: usize) -> Stages {
    let layers = source.spec().layers;
    let engine = |cut| {
        let spec = stage(cut, layers, 0, 1);
        let weights = StageWeights::load(&Reference, source, &spec).expect("weights");
        TransformerEngine::new(Arc::new(Reference), Arc::new(weights), spec).expect("an engine")
    };
    cuts(layers, stages).into_iter().map(engine).collect()
}

/// Twelve blocks in a shuffled order that no two sequences share.
fn table(first: u32) -> Vec<u32> {
    (0..12).map(|i| (i * 7 + first) % 20 * 2 + first % 2).collect()
}

fn family() -> impl Strategy<Value = Family> {
    prop::sample::select(FAMILIES.to_vec())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn stages_chunks_and_blocks_change_no_bit(
        family in family(),
        prompt in prop::collection::vec(0u32..101, 2..80),
        stages in 1usize..=3,
        chunk in prop::sample::select(vec![1usize, 7, 64]),
    ) {
        let source = model(family);
        let plain: Vec<u32> = (0..12).collect();
        let whole = generate(
            &mut pipeline(&source, 1), &prompt, MAX_TOKENS, &plain, 3, &mut Alone,
        );
        prop_assert_eq!(whole.tokens.len(), 4);
        let parts = generate(
            &mut pipeline(&source, stages), &prompt, chunk, &table(1), 3, &mut Alone,
        );
        prop_assert_eq!(parts, whole);
    }

    #[test]
    fn company_changes_no_bit(
        family in family(),
        ours in prop::collection::vec(0u32..101, 2..40),
        others in prop::collection::vec(0u32..101, 2..40),
        ours_first in any::<bool>(),
    ) {
        let source = model(family);
        let alone = generate(
            &mut pipeline(&source, 1), &ours, MAX_TOKENS, &table(0), 3, &mut Alone,
        );
        let mut stages = pipeline(&source, 2);
        let mut seen = Seen::default();
        for round in 0..4 {
            // Prompts first, then a token each.
            let part = |prompt: &[u32]| match round {
                0 => (prompt.to_vec(), 0),
                _ => {
                    let position = prompt.len() + round - 1;
                    (vec![forced(prompt, position)], position)
                }
            };
            let ((a, at), (b, bt)) = (part(&ours), part(&others));
            let mut seqs = vec![seq(1, &a, at, &table(0)), seq(2, &b, bt, &table(1))];
            if !ours_first {
                seqs.reverse();
            }
            let batch = Batch { seqs, copies: vec![] };
            let sampled = harness::step(&mut stages, &batch, &mut Alone);
            prop_assert_eq!(sampled.len(), 2);
            for s in sampled.iter().filter(|s| s.request == 1) {
                if round == 0 {
                    // The same order as `generate` notes a prompt.
                    seen.logprobs.extend(s.prompt_logprobs.clone());
                    seen.tokens.push(s.token.expect("a token"));
                    seen.logprobs.extend(s.logprob.clone());
                } else {
                    seen.note(s);
                }
            }
        }
        prop_assert_eq!(seen, alone);
    }
}

/// A prefix that was copied to another block goes on as if it had been computed there.
#[test]
fn copied_blocks_carry_on() {
    let source = model(Family::Llama);
    let prompt: Vec<u32> = (0..40).map(|i| i * 5 % 101).collect();
    let run = |stages: &mut Stages, batch: &Batch| {
        let mut seen = Seen::default();
        harness::step(stages, batch, &mut Alone).iter().for_each(|s| seen.note(s));
        seen
    };
    let mut stages = pipeline(&source, 2);
    run(&mut stages, &Batch { seqs: vec![seq(1, &prompt, 0, &[3, 4, 5])], copies: vec![] });
    let next = |blocks: &[u32]| vec![seq(1, &[9], 40, blocks)];
    let plain = run(&mut stages, &Batch { seqs: next(&[3, 4, 5]), copies: vec![] });
    let copies = vec![(5, 20), (3, 21)];
    let copied = run(&mut stages, &Batch { seqs: next(&[21, 4, 20]), copies });
    assert_eq!(copied, plain);
    let foreign = run(&mut stages, &Batch { seqs: next(&[21, 4, 30]), copies: vec![] });
    assert_ne!(foreign, plain, "a block that was never written must show");
}
