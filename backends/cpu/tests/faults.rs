//! What serves fault injection and integrity checks: bits are flipped where they are said to be,
//! sums notice it, and blocks come back as they were read.

mod common;

use common::*;
use dunlin_backend::{Backend, KvSpec, Part, SeqRows};
use dunlin_cpu::Precision;

#[test]
fn a_flipped_weight_changes_the_sum_and_the_product_and_flips_back() {
    let b = backend(paths()[0], Precision::Exact, 1);
    for dtype in TYPES {
        let mut rng = Random::new(7);
        let t = matrix(&mut rng, dtype, 20, 256);
        let w = b.weight(&t, &Part::all(&t)).unwrap();
        let sum = b.weight_sum(&w).expect("a sum");
        assert_eq!(b.weight_sum(&b.weight(&t, &Part::all(&t)).unwrap()), Some(sum), "{dtype:?}");
        let words = b.weight_bytes(&w) / 4;
        for word in [0, 1, words / 2, words - 1] {
            let (before, after) = b.weight_flip(&w, word, 9).unwrap();
            assert_eq!(before ^ after, 1 << 9, "{dtype:?}");
            assert_ne!(b.weight_sum(&w), Some(sum), "{dtype:?} word {word}");
            assert_eq!(b.weight_flip(&w, word, 9).unwrap(), (after, before));
            assert_eq!(b.weight_sum(&w), Some(sum), "{dtype:?} word {word}");
        }
        assert!(b.weight_flip(&w, words, 0).is_err());
    }
}

#[test]
fn a_flipped_kv_bit_is_that_of_its_token_and_a_block_can_be_put_back() {
    let b = backend(paths()[0], Precision::Exact, 1);
    let spec = KvSpec { layers: 2, kv_heads: 2, head_dim: 24, blocks: 3, block_tokens: 32 };
    let (tokens, width) = (40, spec.kv_heads * spec.head_dim);
    let mut rng = Random::new(3);
    let (k, v) = (rng.floats(tokens * width), rng.floats(tokens * width));
    let mut kv = b.kv(&spec).unwrap();
    let seqs = [SeqRows { rows: 0..tokens, position: 0, blocks: vec![2, 1] }];
    for layer in 0..2 {
        let (k, v) = (upload(&b, width, &k), upload(&b, width, &v));
        b.kv_write(&mut kv, layer, &k, &v, &seqs).unwrap();
    }
    let before = b.kv_read(&kv, 2).unwrap();
    for (slot, element) in [(0, 0), (17, 30), (31, width + 5), (16, 2 * width - 1)] {
        let from = if element < width {
            &k[slot * width + element]
        } else {
            &v[slot * width + element - width]
        };
        let bit = element as u32 * 32 + 22;
        let (was, is) = b.kv_flip(&mut kv, 1, 2, slot, bit).unwrap();
        assert_eq!((was, is), (from.to_bits(), from.to_bits() ^ 1 << 22));
        let after = b.kv_read(&kv, 2).unwrap();
        let changed = before.iter().zip(&after).filter(|(a, b)| a != b).count();
        assert_eq!(changed, 1, "one byte of the block");
        b.kv_put(&mut kv, 2, &before).unwrap();
        assert_eq!(b.kv_read(&kv, 2).unwrap(), before);
    }
    assert!(b.kv_flip(&mut kv, 2, 0, 0, 0).is_err() && b.kv_flip(&mut kv, 0, 3, 0, 0).is_err());
    assert!(b.kv_read(&kv, 3).is_err() && b.kv_put(&mut kv, 2, &before[1..]).is_err());
}
