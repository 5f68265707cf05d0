//! Attention over the paged store: against the reference, and cut into any chunks.

mod common;

use common::*;
use dunlin_backend::Reference;
use dunlin_suite::attention::{case, case_of, refuses_wrong_calls};
use dunlin_wgpu::Attend;
use proptest::prelude::{ProptestConfig, any, prop_assert_eq, proptest};

proptest! {
    #![proptest_config(ProptestConfig::with_cases(30))]

    #[test]
    fn attention_is_the_reference(seed in any::<u64>()) {
        let c = case(seed);
        let (want, got) = (c.run(&Reference, &[c.tokens]), c.run(device(), &[c.tokens]));
        prop_assert_eq!(far(&got, &want, c.tolerance), None);
    }

    #[test]
    fn chunks_make_no_difference(seed in any::<u64>()) {
        case(seed).check_chunks(device(), seed);
    }

    #[test]
    fn other_sequences_make_no_difference(seed in any::<u64>()) {
        case(seed).check_company(device());
    }

    #[test]
    fn copied_blocks_attend_alike(seed in any::<u64>()) {
        case(seed).check_copies(device());
    }
}

#[test]
fn wrong_calls_are_refused() {
    refuses_wrong_calls(device());
}

/// However attention is cut: contexts of several splits, in one call and token by token.
#[test]
fn all_ways_of_cutting_give_the_same_bits() {
    let mut b = open();
    for seed in 0..3 {
        let c = case_of(seed, 700);
        let mut want: Option<Vec<f32>> = None;
        for how in Attend::ALL {
            b.use_attention(how);
            // Few rows at the end, which may be split.
            let few = c.tokens.min(5);
            let chunks = [vec![c.tokens - few; usize::from(c.tokens > few)], vec![1; few]].concat();
            for chunks in [&chunks, &vec![c.tokens]] {
                let got = c.run(&b, chunks);
                let want = want.get_or_insert_with(|| {
                    let want = c.run(&Reference, &[c.tokens]);
                    assert_eq!(far(&got, &want, c.tolerance), None, "seed {seed}");
                    got.clone()
                });
                assert!(same_bits(&got, want), "seed {seed}, {how:?}, {} chunks", chunks.len());
            }
        }
    }
}
