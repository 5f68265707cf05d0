//! What serves fault injection and integrity checks: bits are flipped where they are said to be,
//! sums notice it, and blocks come back as they were read.

use crate::random::{Random, download, matrix, upload};
use dunlin_backend::{AttentionParams, Backend, DType, KvDtype, KvSpec, Part, SeqRows};

/// A flipped weight changes the sum, and flips back.
pub fn flips_weights<B: Backend>(b: &B) {
    for dtype in DType::ALL {
        let mut rng = Random::new(7);
        let t = matrix(&mut rng, dtype, 20, 256);
        let w = b.weight(&t, &Part::all(&t)).expect("an op");
        let sum = b.weight_sum(&w).expect("a sum");
        assert_eq!(
            b.weight_sum(&b.weight(&t, &Part::all(&t)).expect("an op")),
            Some(sum),
            "{dtype:?}"
        );
        let words = b.weight_bytes(&w) / 4;
        for word in [0, 1, words / 2, words - 1] {
            let (before, after) = b.weight_flip(&w, word, 9).expect("an op");
            assert_eq!(before ^ after, 1 << 9, "{dtype:?}");
            assert_ne!(b.weight_sum(&w), Some(sum), "{dtype:?} word {word}");
            assert_eq!(b.weight_flip(&w, word, 9).expect("an op"), (after, before));
            assert_eq!(b.weight_sum(&w), Some(sum), "{dtype:?} word {word}");
        }
        assert!(b.weight_flip(&w, words, 0).is_err());
    }
}

/// A flipped bit of float32 KV is that of its token, and a block can be put back.
pub fn flips_kv<B: Backend>(b: &B) {
    let spec = KvSpec { layers: 2, kv_heads: 2, head_dim: 24, blocks: 3, block_tokens: 32 };
    let (tokens, width) = (40, spec.kv_heads * spec.head_dim);
    let mut rng = Random::new(3);
    let (k, v) = (rng.floats(tokens * width), rng.floats(tokens * width));
    let mut kv = b.kv(&spec).expect("an op");
    let seqs = [SeqRows { rows: 0..tokens, position: 0, blocks: vec![2, 1] }];
    for layer in 0..2 {
        let (k, v) = (upload(b, width, &k), upload(b, width, &v));
        b.kv_write(&mut kv, layer, &k, &v, &seqs).expect("an op");
    }
    let before = b.kv_read(&kv, 2).expect("an op");
    for (slot, element) in [(0, 0), (17, 30), (31, width + 5), (16, 2 * width - 1)] {
        let from = if element < width {
            &k[slot * width + element]
        } else {
            &v[slot * width + element - width]
        };
        let bit = element as u32 * 32 + 22;
        let (was, is) = b.kv_flip(&mut kv, 1, 2, slot, bit).expect("an op");
        assert_eq!((was, is), (from.to_bits(), from.to_bits() ^ 1 << 22));
        let after = b.kv_read(&kv, 2).expect("an op");
        let changed = before.iter().zip(&after).filter(|(a, b)| a != b).count();
        assert_eq!(changed, 1, "one byte of the block");
        b.kv_put(&mut kv, 2, &before).expect("an op");
        assert_eq!(b.kv_read(&kv, 2).expect("an op"), before);
    }
    assert!(b.kv_flip(&mut kv, 2, 0, 0, 0).is_err() && b.kv_flip(&mut kv, 0, 3, 0, 0).is_err());
    assert!(b.kv_read(&kv, 3).is_err() && b.kv_put(&mut kv, 2, &before[1..]).is_err());
}

/// Sign on top, exponent below it, in a narrower element too; and int8 scales travel with a block.
pub fn flips_narrow_kv<B: Backend>(b: &B) {
    let dtype = b.kv_dtype();
    let top = if dtype == KvDtype::F16 { 15 } else { 7 };
    let spec = KvSpec { layers: 1, kv_heads: 2, head_dim: 24, blocks: 2, block_tokens: 16 };
    let width = spec.kv_heads * spec.head_dim;
    let values = Random::new(4).floats(16 * width);
    let mut kv = b.kv(&spec).expect("an op");
    let seqs = [SeqRows { rows: 0..16, position: 0, blocks: vec![1] }];
    let t = upload(b, width, &values);
    b.kv_write(&mut kv, 0, &t, &t, &seqs).expect("an op");
    let before = b.kv_read(&kv, 1).expect("an op");
    for (bit, flipped) in [(31, top), (30, top - 1), (0, 0)] {
        let (was, is) = b.kv_flip(&mut kv, 0, 1, 3, 32 * 5 + bit).expect("an op");
        assert_eq!(was ^ is, 1 << flipped, "{dtype:?}, bit {bit}");
        b.kv_put(&mut kv, 1, &before).expect("an op");
    }
    // Another store that is given the block attends alike.
    let params = AttentionParams {
        heads: 2,
        kv_heads: 2,
        head_dim: 24,
        scale: 0.2,
        window: None,
        softcap: None,
        kv_head_of: vec![0, 1],
    };
    let mut other = b.kv(&spec).expect("an op");
    b.kv_put(&mut other, 1, &before).expect("an op");
    let attend = |kv| {
        let mut out = b.tensor(16, width).expect("an op");
        b.attention(&t, kv, 0, &seqs, &params, &mut out).expect("an op");
        download(b, &out).into_iter().map(f32::to_bits).collect::<Vec<_>>()
    };
    assert_eq!(attend(&kv), attend(&other), "{dtype:?}");
}
