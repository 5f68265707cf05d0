//! Batches that do not fit are refused with a reason; nothing panics and nothing is computed.

use crate::harness::{BLOCKS, MAX_TOKENS, seq, stage};
use crate::synthetic::model;
use dunlin_backend::Reference;
use dunlin_model::engine::{Alone, Batch, Engine, EngineError, SampleFailure, StageOutput};
use dunlin_model::hash_engine::{HashEngine, HashSpec};
use dunlin_model::spec::Family;
use dunlin_model::stage::StageWeights;
use dunlin_model::transformer::TransformerEngine;
use proptest::prelude::*;
use std::ops::Range;
use std::sync::Arc;

fn transformer(layers: Range<usize>) -> TransformerEngine<Reference> {
    let spec = stage(layers, 4, 0, 1);
    let source = model(Family::Llama);
    let weights = StageWeights::load(&Reference, &source, &spec).expect("weights");
    TransformerEngine::new(Arc::new(Reference), Arc::new(weights), spec).expect("an engine")
}

fn hash(layers: Range<usize>) -> HashEngine {
    let spec = HashSpec { vocab: 101, layers: 4, context: 256, ..HashSpec::default() };
    HashEngine::new(spec, stage(layers, 4, 0, 1)).expect("an engine")
}

/// One good batch and every way to spoil it.
fn bad_batches() -> Vec<(&'static str, Batch)> {
    let good = || seq(1, &[1, 2, 3], 0, &[0]);
    let mut all: Vec<(&'static str, Batch)> = Vec::new();
    let mut with = |name, change: &dyn Fn(&mut Batch)| {
        let mut batch = Batch { seqs: vec![good()], copies: vec![] };
        change(&mut batch);
        all.push((name, batch));
    };
    with("no tokens", &|b| b.seqs[0].tokens.clear());
    with("no sequences", &|b| b.seqs.clear());
    with("a token past the vocabulary", &|b| b.seqs[0].tokens[1] = 101);
    with("a block past the store", &|b| b.seqs[0].blocks = vec![BLOCKS as u32]);
    with("no block", &|b| b.seqs[0].blocks.clear());
    with("too few blocks", &|b| b.seqs[0].position = 14);
    with("a position past every block", &|b| b.seqs[0].position = u32::MAX);
    with("past the context", &|b| {
        b.seqs[0].position = 255;
        b.seqs[0].blocks = (0..17).collect();
    });
    with("too many tokens", &|b| {
        b.seqs[0].tokens = vec![1; MAX_TOKENS + 1];
        b.seqs[0].blocks = (0..20).collect();
    });
    with("a copy from past the store", &|b| b.copies.push((BLOCKS as u32, 0)));
    with("a copy past the store", &|b| b.copies.push((0, u32::MAX)));
    all
}

fn refuses(engine: &mut dyn Engine, later: &mut dyn Engine) {
    let refused = |result: Result<StageOutput, EngineError>, why: &str| {
        assert!(matches!(result, Err(EngineError::BadBatch(_))), "{why}: {result:?}");
    };
    for (why, batch) in bad_batches() {
        refused(engine.step(&batch, None, &mut Alone), why);
    }
    let good = Batch { seqs: vec![seq(1, &[1, 2, 3], 0, &[0])], copies: vec![] };
    let width = engine.hidden();
    refused(engine.step(&good, Some(&vec![0.0; 3 * width]), &mut Alone), "input to the first");
    refused(later.step(&good, None, &mut Alone), "no input to a later stage");
    refused(later.step(&good, Some(&vec![0.0; 3 * width - 1]), &mut Alone), "a short input");
    refused(engine.step(&good, None, &mut crate::group::group(2)[0]), "a group of another size");
    assert!(matches!(engine.step(&good, None, &mut Alone), Ok(StageOutput::Hidden(_))));
    assert!(matches!(
        later.step(&good, Some(&vec![0.5; 3 * width]), &mut Alone),
        Ok(StageOutput::Sampled(_))
    ));
}

#[test]
fn the_transformer_refuses_what_does_not_fit() {
    refuses(&mut transformer(0..2), &mut transformer(2..4));
}

#[test]
fn the_hash_engine_refuses_what_does_not_fit() {
    refuses(&mut hash(0..2), &mut hash(2..4));
}

/// Weights of another part of the model are no part of this stage.
#[test]
fn weights_of_another_stage_are_refused() {
    let source = model(Family::Llama);
    let load = |layers, rank, ranks| {
        StageWeights::load(&Reference, &source, &stage(layers, 4, rank, ranks)).expect("weights")
    };
    for (held, wanted) in [
        (load(0..2, 0, 1), stage(2..4, 4, 0, 1)),
        (load(0..4, 0, 2), stage(0..4, 4, 1, 2)),
        (load(0..4, 0, 2), stage(0..4, 4, 0, 1)),
        (load(1..3, 0, 1), stage(2..4, 4, 0, 1)),
    ] {
        let engine = TransformerEngine::new(Arc::new(Reference), Arc::new(held), wanted.clone());
        assert!(engine.is_err(), "weights of another stage taken for {wanted:?}");
    }
}

#[test]
fn activations_that_are_not_numbers_are_never_drawn_from() {
    for mut last in [Box::new(transformer(2..4)) as Box<dyn Engine>, Box::new(hash(2..4))] {
        // The second sequence's activations are not finite, then its logits alone.
        let seqs = vec![seq(1, &[1], 0, &[0]), seq(2, &[1], 0, &[1])];
        let batch = Batch { seqs, copies: vec![] };
        let mut input = vec![1.0; 2 * last.hidden()];
        let hidden = last.hidden();
        let drawn =
            |last: &mut dyn Engine, input: &[f32]| match last.step(&batch, Some(input), &mut Alone)
            {
                Ok(StageOutput::Sampled(all)) => all,
                other => panic!("{other:?}"),
            };
        let right = drawn(&mut *last, &input);
        assert!(right.iter().all(|one| one.token.is_ok()));
        last.poison(2).expect("the last stage");
        let poisoned = drawn(&mut *last, &input);
        assert_eq!((&poisoned[0], poisoned[1].token), (&right[0], Err(SampleFailure::NotFinite)));
        assert_eq!(drawn(&mut *last, &input), right, "it lasts one step");
        input[hidden..].fill(f32::NAN);
        let spoiled = drawn(&mut *last, &input);
        let blamed = Err(SampleFailure::NotFiniteInput);
        assert_eq!((&spoiled[0], spoiled[1].token), (&right[0], blamed));
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Any batch at all is refused or run; it never panics.
    #[test]
    fn any_batch_is_run_or_refused(
        tokens in prop::collection::vec(prop_oneof![0u32..101, any::<u32>()], 0..6),
        position in prop_oneof![0u32..300, any::<u32>()],
        blocks in prop::collection::vec(prop_oneof![0u32..40, any::<u32>()], 0..20),
        copies in prop::collection::vec((prop_oneof![0u32..40, any::<u32>()], 0u32..41), 0..2),
    ) {
        let batch = Batch { seqs: vec![seq(1, &tokens, position as usize, &blocks)], copies };
        for engine in [&mut transformer(0..1) as &mut dyn Engine, &mut hash(0..1)] {
            match engine.step(&batch, None, &mut Alone) {
                Ok(_) | Err(EngineError::BadBatch(_)) => {}
                Err(other) => prop_assert!(false, "{}", other),
            }
        }
    }
}
