//! Tensor parallelism: splits cover everything once, and ranks together compute what one does.

use crate::group::group;
use crate::harness::{MAX_TOKENS, Seen, cuts, generate, stage};
use crate::synthetic::{FAMILIES, Synthetic, model};
use dunlin_backend::{KvDtype, Reference};
use dunlin_model::engine::Alone;
use dunlin_model::spec::Family;
use dunlin_model::split::{COLUMN_UNIT, SplitError, plan_split, split_layers};
use dunlin_model::stage::{StageWeights, kv_block_bytes, stage_bytes};
use dunlin_model::transformer::TransformerEngine;
use dunlin_model::weights::WeightSource;
use proptest::prelude::*;
use std::ops::Range;
use std::sync::Arc;

fn engines(
    source: &Synthetic,
    stages: usize,
    rank: usize,
    ranks: usize,
) -> Vec<TransformerEngine<Reference>> {
    let layers = source.spec().layers;
    let engine = |cut| {
        let spec = stage(cut, layers, rank, ranks);
        let weights = StageWeights::load(&Reference, source, &spec).expect("weights");
        TransformerEngine::new(Arc::new(Reference), Arc::new(weights), spec).expect("an engine")
    };
    cuts(layers, stages).into_iter().map(engine).collect()
}

fn in_ranks(source: &Synthetic, stages: usize, ranks: usize, prompt: &[u32]) -> Vec<Seen> {
    let blocks: Vec<u32> = (0..12).rev().collect();
    std::thread::scope(|scope| {
        let run = |(rank, mut member)| {
            let blocks = &blocks;
            scope.spawn(move || {
                let mut engines = engines(source, stages, rank, ranks);
                generate(&mut engines, prompt, 16, blocks, 3, &mut member)
            })
        };
        let threads: Vec<_> = group(ranks).into_iter().enumerate().map(run).collect();
        threads.into_iter().map(|t| t.join().expect("a rank")).collect()
    })
}

#[test]
fn two_and_three_ranks_compute_what_one_does() {
    let prompt: Vec<u32> = (0..37).map(|i| (i * i + 3) % 101).collect();
    for family in FAMILIES {
        let source = model(family);
        let blocks: Vec<u32> = (0..12).collect();
        let mut whole = engines(&source, 1, 0, 1);
        let want = generate(&mut whole, &prompt, MAX_TOKENS, &blocks, 3, &mut Alone);
        for (ranks, stages) in [(2, 1), (3, 2)] {
            let all = in_ranks(&source, stages, ranks, &prompt);
            let got = &all[0];
            assert_eq!(got.tokens, want.tokens, "{family:?} over {ranks} ranks");
            assert_eq!(got.logprobs.len(), want.logprobs.len());
            for (g, w) in got.logprobs.iter().zip(&want.logprobs) {
                let near = |a: f32, b: f32| (a - b).abs() < 1e-4;
                assert!(near(g.logprob, w.logprob), "{family:?} x{ranks}: {g:?}, alone {w:?}");
                for ((_, g), (_, w)) in g.top.iter().zip(&w.top) {
                    assert!(near(*g, *w), "{family:?} over {ranks} ranks");
                }
            }
        }
    }
}

fn covers(parts: impl Iterator<Item = Range<usize>>, whole: usize) -> Result<(), TestCaseError> {
    let mut at = 0;
    for part in parts {
        prop_assert_eq!(part.start, at);
        prop_assert!(part.end > part.start, "an empty share {:?}", part);
        at = part.end;
    }
    prop_assert_eq!(at, whole);
    Ok(())
}

proptest! {
    /// Every node count with every head count either covers all once, evenly, or says why not.
    #[test]
    fn a_split_covers_everything_once_or_is_refused(
        ranks in 1usize..=8,
        kv_heads in 1usize..=16,
        group in 1usize..=8,
        head_dim in prop::sample::select(vec![8usize, 16, 32, 64, 80, 128]),
        ffn in 1usize..2000,
        vocab in 8usize..5000,
    ) {
        let mut spec = model(Family::Llama).0;
        let heads = kv_heads * group;
        (spec.kv_heads, spec.heads, spec.head_dim) = (kv_heads, heads, head_dim);
        (spec.ffn, spec.vocab) = (ffn, vocab);
        match plan_split(&spec, ranks) {
            Ok(splits) => {
                prop_assert_eq!(splits.len(), ranks);
                covers(splits.iter().map(|s| s.kv_heads.clone()), kv_heads)?;
                covers(splits.iter().map(|s| s.heads.clone()), heads)?;
                covers(splits.iter().map(|s| s.ffn.clone()), ffn)?;
                covers(splits.iter().map(|s| s.vocab.clone()), vocab)?;
                let lens: Vec<usize> = splits.iter().map(|s| s.kv_heads.len()).collect();
                prop_assert!(lens.iter().max().unwrap() - lens.iter().min().unwrap() <= 1);
                for s in &splits {
                    prop_assert_eq!(s.heads.start, s.kv_heads.start * group);
                    prop_assert_eq!(s.heads.end, s.kv_heads.end * group);
                    if ranks > 1 {
                        let ends = [s.heads.start * head_dim, s.heads.end * head_dim];
                        let ends = ends.into_iter().chain([s.ffn.start, s.ffn.end]);
                        prop_assert!(ends.into_iter().all(|e| e % COLUMN_UNIT == 0));
                    }
                }
            }
            Err(SplitError::TooFewHeads { .. }) => prop_assert!(ranks > kv_heads),
            Err(SplitError::FfnTooNarrow { .. }) => {
                prop_assert!(ranks > 1 && (ffn % COLUMN_UNIT != 0 || ffn / COLUMN_UNIT < ranks));
            }
            Err(SplitError::HeadsCutBlocks { begin, end, .. }) => {
                prop_assert!(begin % COLUMN_UNIT != 0 || end % COLUMN_UNIT != 0);
            }
            Err(other) => prop_assert!(false, "unexpected refusal: {}", other),
        }
    }

    #[test]
    fn layers_are_split_in_proportion(
        layers in 1usize..100,
        weights in prop::collection::vec(0.1f32..10.0, 1..8),
    ) {
        prop_assume!(weights.len() <= layers);
        let counts = split_layers(layers, &weights);
        prop_assert_eq!(counts.len(), weights.len());
        prop_assert_eq!(counts.iter().sum::<usize>(), layers);
        prop_assert!(counts.iter().all(|c| *c >= 1));
        let sum: f32 = weights.iter().sum();
        for (count, weight) in counts.iter().zip(&weights) {
            let due = weight / sum * layers as f32;
            // A stage gets more than its due only as its first layer, or to round up.
            prop_assert!(*count == 1 || *count as f32 <= due + 1.0, "{counts:?} {weights:?}");
        }
    }
}

#[test]
fn nine_heads_over_two_ranks_split_unevenly() {
    let splits = plan_split(&model(Family::Llama).0, 2).expect("a split");
    assert_eq!((splits[0].heads.clone(), splits[0].kv_heads.clone()), (0..6, 0..2));
    assert_eq!((splits[1].heads.clone(), splits[1].kv_heads.clone()), (6..9, 2..3));
    assert_eq!((splits[0].ffn.clone(), splits[1].ffn.clone()), (0..96, 96..160));
}

/// What placement is told a stage needs is what loading it takes, and the parts add up.
#[test]
fn announced_bytes_are_those_loaded() {
    for family in FAMILIES {
        let source = model(family);
        let layers = source.spec().layers;
        let (mut kv, mut halves) = (0, 0);
        for ranks in 1..=3 {
            for cut in cuts(layers, 2) {
                for rank in 0..ranks {
                    let spec = stage(cut.clone(), layers, rank, ranks);
                    let weights = StageWeights::load(&Reference, &source, &spec).expect("weights");
                    let told = stage_bytes(&source, &spec) as f64;
                    // The reference keeps whole rows of a column slice, so only rows compare.
                    if ranks == 1 {
                        assert_eq!(told, weights.bytes(&Reference) as f64, "{family:?}");
                    }
                    kv += kv_block_bytes(source.spec(), &spec, KvDtype::F32);
                    halves += kv_block_bytes(source.spec(), &spec, KvDtype::F16);
                }
            }
        }
        let block = 2 * layers * 3 * 32 * 4 * crate::harness::BLOCK_TOKENS;
        assert_eq!((kv, halves), (3 * block as u64, 3 * block as u64 / 2), "{family:?}");
    }
}
