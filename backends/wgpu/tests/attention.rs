//! Attention over the paged store: against the reference, and cut into any chunks; for every type of
//! keys and values.

mod common;

use common::*;
use dunlin_backend::{AttentionParams, Backend, BackendError, KvDtype, KvSpec, Reference, SeqRows};
use dunlin_suite::attention::{Case, case, case_of, refuses_wrong_calls};
use dunlin_wgpu::{Attend, WgpuBackend};
use half::f16;
use proptest::prelude::{ProptestConfig, any, prop_assert_eq, proptest};

/// A case, and an adapter that keeps keys and values as one of the types.
fn any_kept(seed: u64) -> (Case, &'static WgpuBackend) {
    (case(seed), keeping(KvDtype::ALL[Random::new(seed ^ 5).below(3)]))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(25))]

    #[test]
    fn attention_is_the_reference(seed in any::<u64>()) {
        let (c, b) = any_kept(seed);
        let want = c.kept(b.kv_dtype()).run(&Reference, &[c.tokens]);
        prop_assert_eq!(far(&c.run(b, &[c.tokens]), &want, c.tolerance), None);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(16))]

    #[test]
    fn chunks_make_no_difference(seed in any::<u64>()) {
        let (c, b) = any_kept(seed);
        c.check_chunks(b, seed);
    }

    #[test]
    fn other_sequences_make_no_difference(seed in any::<u64>()) {
        let (c, b) = any_kept(seed);
        c.check_company(b);
    }

    #[test]
    fn copied_blocks_attend_alike(seed in any::<u64>()) {
        let (c, b) = any_kept(seed);
        c.check_copies(b);
    }
}

#[test]
fn wrong_calls_are_refused() {
    KvDtype::ALL.into_iter().for_each(|kv| refuses_wrong_calls(keeping(kv)));
}

/// However attention is cut: contexts of several splits, in one call and token by token.
#[test]
fn all_ways_of_cutting_give_the_same_bits() {
    let kinds = KvDtype::ALL.map(|kv| (kv, false)).into_iter().chain([(KvDtype::F16, true)]);
    let mut float16: Vec<Vec<f32>> = Vec::new();
    for (kv, native) in kinds {
        let mut b = open_keeping(kv);
        if native && !b.use_native_f16(true) {
            println!("{}: no float16 of its own", b.info().description);
            continue;
        }
        b.use_native_f16(native);
        for seed in 0..if kv == KvDtype::F32 { 3 } else { 1 } {
            let c = case_of(seed, 700);
            let mut want: Option<Vec<f32>> = None;
            for how in Attend::ALL {
                b.use_attention(how);
                // Few rows at the end, which may be split.
                let few = c.tokens.min(5);
                let most = vec![c.tokens - few; usize::from(c.tokens > few)];
                let chunks = [most, vec![1; few]].concat();
                for chunks in [&chunks, &vec![c.tokens]] {
                    let got = c.run(&b, chunks);
                    let want = want.get_or_insert_with(|| {
                        let want = c.kept(kv).run(&Reference, &[c.tokens]);
                        assert_eq!(far(&got, &want, c.tolerance), None, "seed {seed}, {kv:?}");
                        got.clone()
                    });
                    let ways = format!("{kv:?} ({native}), {how:?}, {} chunks", chunks.len());
                    assert!(same_bits(&got, want), "seed {seed}, {ways}");
                }
            }
            let want = want.expect("there are ways");
            match (kv, native) {
                (KvDtype::F16, false) => float16.push(want),
                (_, true) => assert!(same_bits(&want, &float16[seed as usize]), "native float16"),
                _ => {}
            }
        }
    }
}

/// One key, so that what comes out is the value as it is kept.
fn values_kept(b: &WgpuBackend, values: &[f32]) -> Vec<f32> {
    let dim = values.len();
    let spec = KvSpec { layers: 1, kv_heads: 1, head_dim: dim, blocks: 1, block_tokens: 16 };
    let mut kv = b.kv(&spec).expect("a store");
    let seqs = [SeqRows { rows: 0..1, position: 0, blocks: vec![0] }];
    let (q, v) = (upload(b, dim, &vec![0.0; dim]), upload(b, dim, values));
    b.kv_write(&mut kv, 0, &q, &v, &seqs).expect("written");
    let params = AttentionParams {
        heads: 1,
        kv_heads: 1,
        head_dim: dim,
        scale: 1.0,
        window: None,
        softcap: None,
        kv_head_of: vec![0],
    };
    let mut out = b.tensor(1, dim).expect("a tensor");
    b.attention(&q, &kv, 0, &seqs, &params, &mut out).expect("attended");
    download(b, &out)
}

/// To nearest, ties to even, as processors do it: numbers of all sizes, ties, what is too large and
/// too small.
#[test]
fn float16_is_rounded_as_by_the_processor() {
    let mut r = Random::new(8);
    let mut values =
        vec![0.0, -0.0, 65504.0, 65519.9, 65520.0, -1e9, 6.1e-5, 5.96e-8, 2.98e-8, 1e-30];
    values.extend([f32::INFINITY, f32::NEG_INFINITY, f32::NAN]);
    while values.len() < 4096 {
        let size = 2f32.powi(r.below(44) as i32 - 27);
        let tie = f16::from_f32(r.float() * size);
        let above = f16::from_bits(tie.to_bits() + 1);
        values.extend([r.float() * size, (tie.to_f32() + above.to_f32()) / 2.0]);
    }
    values.truncate(4096);
    let mut b = open_keeping(KvDtype::F16);
    for native in [false, true] {
        b.use_native_f16(native);
        for values in values.chunks(128) {
            for (got, value) in values_kept(&b, values).iter().zip(values) {
                let want = f16::from_f32(*value).to_f32();
                let same = got.to_bits() == want.to_bits() || (got.is_nan() && want.is_nan());
                // Zero's sign is lost where shares are summed.
                assert!(same || (*got == 0.0 && want == 0.0), "{value}: {got} instead of {want}");
            }
        }
    }
}

/// What int8 cannot hold is not hidden.
#[test]
fn what_is_not_finite_stays_so() {
    for kv in KvDtype::ALL {
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let got = values_kept(keeping(kv), &[1.0, bad, 2.0, 3.0]);
            assert!(!got[1].is_finite(), "{kv:?}, {bad}: {got:?}");
        }
    }
}

/// What the last token of a case attends to.
fn last_row<B: Backend>(b: &B, c: &Case) -> Vec<f32> {
    let (mut kv, last) = (c.store(b), c.tokens - 1);
    let [_, k, v] = c.tensors(b, 0..c.tokens);
    b.kv_write(&mut kv, 1, &k, &v, &[c.seq(0..c.tokens, 0)]).expect("written");
    let [q, ..] = c.tensors(b, last..c.tokens);
    let mut out = b.tensor(1, c.params.heads * c.params.head_dim).expect("a tensor");
    b.attention(&q, &kv, 1, &[c.seq(0..1, last)], &c.params, &mut out).expect("attended");
    download(b, &out)
}

/// Nodes of a tree of drafted tokens lie side by side in the store; each sees the text before and its
/// own branch, as if that branch were all there is.
#[test]
fn a_tree_mask_shows_a_row_its_own_branch() {
    for seed in 0..9 {
        let mut r = Random::new(seed);
        let c = case_of(seed, 300);
        let c = Case { params: AttentionParams { window: None, ..c.params.clone() }, ..c };
        let kv = KvDtype::ALL[seed as usize % 3];
        let b = keeping(kv);
        // The last of the tokens become nodes, each with an earlier one (or the text) for a parent.
        let nodes = (1 + r.below(32)).min(c.tokens);
        let trunk = c.tokens - nodes;
        let mut ancestors: Vec<u32> = Vec::new();
        for i in 0..nodes {
            let parent = r.below(i + 1);
            let before = if parent == 0 { 0 } else { ancestors[parent - 1] };
            ancestors.push(before | 1 << i);
        }
        let mut store = c.store(b);
        if trunk > 0 {
            let [_, k, v] = c.tensors(b, 0..trunk);
            b.kv_write(&mut store, 1, &k, &v, &[c.seq(0..trunk, 0)]).expect("written");
        }
        let [q, k, v] = c.tensors(b, trunk..c.tokens);
        let seqs = [c.seq(0..nodes, trunk)];
        b.kv_write(&mut store, 1, &k, &v, &seqs).expect("written");
        let cols = c.params.heads * c.params.head_dim;
        let mut out = b.tensor(nodes, cols).expect("a tensor");
        b.attend_trees(&q, &store, 1, (&seqs, &ancestors), &c.params, &mut out).expect("attended");
        let got = download(b, &out);
        for (node, mask) in ancestors.iter().enumerate() {
            let branch = (0..nodes).filter(|i| mask >> i & 1 == 1).map(|i| trunk + i);
            let path: Vec<usize> = (0..trunk).chain(branch).collect();
            let pick = |data: &[f32]| -> Vec<f32> {
                let cols = data.len() / c.tokens;
                path.iter().flat_map(|i| &data[i * cols..][..cols]).copied().collect()
            };
            let alone = Case {
                tokens: path.len(),
                q: pick(&c.q),
                k: pick(&c.k),
                v: pick(&c.v),
                ..c.clone()
            };
            let want = last_row(&Reference, &alone.kept(kv));
            assert_eq!(far(&got[node * cols..][..cols], &want, c.tolerance), None, "node {node}");
        }
        // A mask of a plain text is no mask.
        let plain: Vec<u32> =
            (0..nodes as u32).map(|i| (2u64 << i).wrapping_sub(1) as u32).collect();
        b.attend_trees(&q, &store, 1, (&seqs, &plain), &c.params, &mut out).expect("attended");
        let masked = download(b, &out);
        b.attention(&q, &store, 1, &seqs, &c.params, &mut out).expect("attended");
        assert!(same_bits(&download(b, &out), &masked), "seed {seed}");
        // A row that does not see itself, or what comes after it.
        for wrong in [0, 1 << 31] {
            let masks = vec![wrong; nodes];
            let refused = b.attend_trees(&q, &store, 1, (&seqs, &masks), &c.params, &mut out);
            assert!(matches!(refused, Err(BackendError::Shape { .. })), "{wrong:#b}");
        }
    }
}
