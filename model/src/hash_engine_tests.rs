use super::*;
use crate::engine::{Alone, SampleSpec};
use crate::sampling::SamplingParams;
use proptest::prelude::*;

const BLOCK: usize = 4;
const BLOCKS: usize = 64;

fn stage(layers: std::ops::Range<usize>, of: usize) -> StageSpec {
    StageSpec {
        first: layers.start == 0,
        last: layers.end == of,
        layers,
        rank: 0,
        ranks: 1,
        kv_blocks: BLOCKS,
        block_tokens: BLOCK,
        max_tokens: 512,
    }
}

fn spec() -> HashSpec {
    HashSpec { vocab: 1000, layers: 3, heads: 3, ..HashSpec::default() }
}

fn seq(tokens: &[u32], position: usize, blocks: &[u32], temperature: f32) -> BatchSeq {
    let params = SamplingParams { temperature, seed: 9, ..SamplingParams::default() };
    let (prompt, output, forbidden) = (vec![], vec![], vec![]);
    BatchSeq {
        request: 1,
        tokens: tokens.to_vec(),
        position: position as u32,
        blocks: blocks.to_vec(),
        sample: Some(SampleSpec { params, prompt, output, forbidden }),
        prompt_logprobs: None,
    }
}

/// Runs chunks of the prompt, then decodes `n` tokens, through the given pipeline of stages.
fn generate(
    cuts: &[usize],
    prompt: &[u32],
    chunk: usize,
    blocks: &[u32],
    n: usize,
    t: f32,
) -> Vec<u32> {
    let mut bounds = vec![0];
    bounds.extend(cuts);
    bounds.push(3);
    let mut stages: Vec<HashEngine> = bounds
        .windows(2)
        .map(|w| HashEngine::new(spec(), stage(w[0]..w[1], 3)).expect("a good stage"))
        .collect();
    let mut run = |tokens: &[u32], position: usize| {
        let batch = Batch { seqs: vec![seq(tokens, position, blocks, t)], copies: vec![] };
        let mut input: Option<Vec<f32>> = None;
        for engine in &mut stages {
            match engine.step(&batch, input.as_deref(), &mut Alone).expect("a good batch") {
                StageOutput::Hidden(values) => input = Some(values),
                StageOutput::Sampled(drawn) => return drawn[0].token.expect("a token"),
            }
        }
        unreachable!("the last stage samples")
    };
    let mut next = 0;
    let mut position = 0;
    for part in prompt.chunks(chunk) {
        next = run(part, position);
        position += part.len();
    }
    let mut out = vec![next];
    for i in 0..n {
        next = run(&out[i..], position + i);
        out.push(next);
    }
    out
}

proptest! {
    #[test]
    fn neither_stages_nor_chunks_nor_blocks_change_the_text(
        prompt in prop::collection::vec(0u32..1000, 1..40),
        chunk in 1usize..50,
        cut in prop_oneof![Just(vec![]), Just(vec![1]), Just(vec![2]), Just(vec![1, 2])],
        rotate in 0u32..BLOCKS as u32,
        temperature in prop_oneof![Just(0.0f32), Just(0.8)],
    ) {
        let plain: Vec<u32> = (0..16).collect();
        let moved: Vec<u32> = (0..16).map(|b| (b * 3 + rotate) % BLOCKS as u32).collect();
        let reference = generate(&[], &prompt, prompt.len(), &plain, 8, temperature);
        prop_assert_eq!(generate(&cut, &prompt, chunk, &moved, 8, temperature), reference);
    }

    #[test]
    fn any_damaged_entry_changes_the_next_token(
        prompt in prop::collection::vec(0u32..1000, 8..40),
        pick in any::<prop::sample::Index>(),
        layer in 0usize..3,
    ) {
        let blocks: Vec<u32> = (0..16).collect();
        let wide = HashSpec { vocab: 1 << 30, ..spec() };
        let mut engine = HashEngine::new(wide, stage(0..3, 3)).unwrap();
        let run = |engine: &mut HashEngine, tokens: &[u32], position| {
            let batch = Batch { seqs: vec![seq(tokens, position, &blocks, 0.0)], copies: vec![] };
            match engine.step(&batch, None, &mut Alone).unwrap() {
                StageOutput::Sampled(drawn) => drawn[0].token.unwrap(),
                StageOutput::Hidden(_) => unreachable!(),
            }
        };
        run(&mut engine, &prompt, 0);
        let good = run(&mut engine, &[5], prompt.len());
        let position = pick.index(prompt.len());
        let slot = (layer * BLOCKS * BLOCK + position) * 3;
        engine.entries[slot] ^= 1;
        prop_assert_ne!(run(&mut engine, &[5], prompt.len()), good);
    }
}

#[test]
fn limbs_carry_sums_of_ranks_exactly() {
    let (a, b) = (0xffff_ffff_ffff_ffffu64, 0x1234_5678_9abc_def0u64);
    let sum: Vec<f32> = to_limbs(a).iter().zip(to_limbs(b)).map(|(x, y)| x + y).collect();
    assert_eq!(from_limbs(&sum), a.wrapping_add(b));
}

#[test]
fn a_batch_out_of_range_is_refused() {
    let mut engine = HashEngine::new(spec(), stage(0..3, 3)).unwrap();
    for bad in [seq(&[1], 0, &[], 0.0), seq(&[1], 0, &[64], 0.0), seq(&[1000], 0, &[0], 0.0)] {
        let batch = Batch { seqs: vec![bad], copies: vec![] };
        let result = engine.step(&batch, None, &mut Alone);
        assert!(matches!(result, Err(EngineError::BadBatch(_))), "{result:?}");
    }
}
