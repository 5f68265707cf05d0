//! Every op but attention against the plain reference, on random shapes; and the bits of a row in
//! any company.

mod common;

use common::*;
use dunlin_backend::{Backend, DType, Part, Reference};
use dunlin_suite::ops::{
    check_expert_rows, check_samples, experts, linear, random_part, refuses_wrong_calls, row_ops,
};
use dunlin_wgpu::{Product, WgpuBackend};
use proptest::prelude::{ProptestConfig, any, prop_assert, prop_assert_eq, proptest};
use std::sync::OnceLock;

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]

    #[test]
    fn linear_is_the_reference_and_rows_do_not_depend_on_company(seed in any::<u64>()) {
        let mut r = Random::new(seed);
        let (t, part) = random_part(&mut r);
        let cols = part.cols.len();
        let rows = 1 + r.below(14);
        let x = r.floats(rows * cols);
        let bias = (r.below(2) == 0).then(|| r.floats(part.rows.len()));
        let got = linear(device(), &t, &part, bias.as_deref(), &x);
        let want = linear(&Reference, &t, &part, bias.as_deref(), &x);
        prop_assert_eq!(far(&got, &want, 1e-5), None, "{:?} {:?}", t.dtype, part);
        let row = r.below(rows);
        let one = linear(device(), &t, &part, bias.as_deref(), &x[row * cols..][..cols]);
        prop_assert!(same_bits(&one, &got[row * part.rows.len()..][..part.rows.len()]));
    }

    #[test]
    fn embed_is_the_reference(seed in any::<u64>()) {
        fn run<B: Backend>(b: &B, t: &dunlin_backend::HostTensor, part: &Part, ids: &[u32]) -> Vec<f32> {
            let table = b.weight(t, part).unwrap();
            let mut out = b.tensor(ids.len(), part.cols.len()).unwrap();
            b.embed(&table, ids, 1.5, &mut out).unwrap();
            download(b, &out)
        }
        let mut r = Random::new(seed);
        let (t, part) = random_part(&mut r);
        let ids: Vec<u32> =
            (0..1 + r.below(9)).map(|_| r.below(part.rows.len()) as u32).collect();
        let (got, want) = (run(device(), &t, &part, &ids), run(&Reference, &t, &part, &ids));
        prop_assert_eq!(far(&got, &want, 1e-6), None, "{:?} {:?}", t.dtype, part);
    }

    #[test]
    fn row_ops_are_the_reference(seed in any::<u64>()) {
        let mut r = Random::new(seed);
        let want = row_ops(&Reference, &mut Random::new(seed ^ 5));
        let got = row_ops(device(), &mut Random::new(seed ^ 5));
        for ((op, got), (_, want)) in got.iter().zip(&want) {
            prop_assert_eq!(far(got, want, 2e-6), None, "{}", op);
        }
        prop_assert!(r.below(2) < 2 && got.len() == want.len());
    }

    #[test]
    fn experts_are_the_reference(seed in any::<u64>()) {
        let got = experts(device(), &mut Random::new(seed));
        let want = experts(&Reference, &mut Random::new(seed));
        prop_assert_eq!(far(&got, &want, 1e-4), None);
        check_expert_rows(device(), seed);
    }

    #[test]
    fn experts_of_bytes_are_near_the_reference(seed in any::<u64>()) {
        let got = experts(multiplying_bytes(), &mut Random::new(seed));
        let want = experts(&Reference, &mut Random::new(seed));
        // Three products of bytes one after the other, with rows of 32: 3 % in one case of some
        // thousand. An element that is wrong is off by as much as it is large.
        prop_assert_eq!(far(&got, &want, 6e-2), None);
        check_expert_rows(multiplying_bytes(), seed);
    }
}

/// An adapter in fast mode, whatever it would choose.
fn multiplying_bytes() -> &'static WgpuBackend {
    static DEVICE: OnceLock<WgpuBackend> = OnceLock::new();
    DEVICE.get_or_init(|| {
        let mut b = open();
        b.use_packed(Product::Rows(1, 1), Product::Rows(4, 4));
        b
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(150))]

    #[test]
    fn samples_are_those_of_the_host(seed in any::<u64>()) {
        check_samples(device(), seed);
    }
}

/// With subgroups, where the adapter has any, and without.
#[test]
fn both_scans_of_logits_draw_the_same() {
    let mut b = open();
    for subgroups in [false, true] {
        println!("subgroups: {}", b.use_subgroups(subgroups) && subgroups);
        (0..60).for_each(|seed| check_samples(&b, seed));
    }
}

#[test]
fn wrong_calls_are_refused() {
    refuses_wrong_calls(device());
}

/// All variants of a product, many rows at once and one after another.
#[test]
fn variants_and_numbers_of_rows_give_the_same_bits() {
    const ROWS: usize = 41;
    let mut r = Random::new(3);
    let mut b = open();
    for dtype in DType::ALL {
        let t = matrix(&mut r, dtype, 70, 1280);
        let part = Part { rows: 3..70, cols: 32..1248 };
        let x = r.floats(ROWS * part.cols.len());
        let mut first: Option<Vec<f32>> = None;
        let variants = Product::ONE_ROW.into_iter().zip(Product::MANY_ROWS);
        let variants =
            variants.map(|both| (both, false)).chain([((Product::Split, Product::Tiled), true)]);
        for ((one_row, many_rows), half) in variants {
            b.use_variants(one_row, many_rows);
            b.use_half_tiles(half);
            let all = linear(&b, &t, &part, None, &x);
            let want = first.get_or_insert_with(|| all.clone());
            assert!(same_bits(&all, want), "{dtype:?}, {many_rows:?}");
            for row in [0, 17, ROWS - 1] {
                let x = &x[row * part.cols.len()..][..part.cols.len()];
                let one = linear(&b, &t, &part, None, x);
                let want = &all[row * part.rows.len()..][..part.rows.len()];
                assert!(same_bits(&one, want), "{dtype:?}, {one_row:?}, row {row}");
            }
        }
    }
}

/// In fast mode too, and float32's result where int8 rounds nothing away.
#[test]
fn products_of_bytes_have_their_bits_in_any_company() {
    const ROWS: usize = 41;
    let mut r = Random::new(4);
    let mut b = open();
    let one_row = Product::PACKED_ONE_ROW.into_iter().cycle();
    let shapes = one_row.zip(Product::PACKED_MANY_ROWS);
    for dtype in DType::ALL {
        let t = matrix(&mut r, dtype, 70, 768);
        let part = Part { rows: 3..70, cols: 32..736 };
        let cols = part.cols.len();
        let whole = |i: usize, r: &mut Random| match i % 32 {
            7 => 127.0 / 64.0,
            _ => (r.below(255) as f32 - 127.0) / 64.0,
        };
        let x: Vec<f32> = (0..ROWS * cols).map(|i| whole(i, &mut r)).collect();
        let want = linear(&Reference, &t, &part, None, &x);
        let mut first: Option<Vec<f32>> = None;
        for (one_row, many_rows) in shapes.clone() {
            b.use_packed(one_row, many_rows);
            let all = linear(&b, &t, &part, None, &x);
            assert_eq!(far(&all, &want, 1e-5), None, "{dtype:?}, {many_rows:?}");
            let bits = first.get_or_insert_with(|| all.clone());
            assert!(same_bits(&all, bits), "{dtype:?}, {many_rows:?}");
            for row in [0, 5, ROWS - 1] {
                let one = linear(&b, &t, &part, None, &x[row * cols..][..cols]);
                let want = &all[row * part.rows.len()..][..part.rows.len()];
                assert!(same_bits(&one, want), "{dtype:?}, {one_row:?}, row {row}");
            }
        }
        // What int8 cannot hold is not hidden, and stays in its row.
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let mut x = x.clone();
            x[cols + 77] = bad;
            let got = linear(&b, &t, &part, None, &x);
            let row = |n: usize| &got[n * part.rows.len()..][..part.rows.len()];
            assert!(row(1).iter().all(|v| !v.is_finite()), "{dtype:?} {bad}");
            assert!([row(0), row(2)].concat().iter().all(|v| v.is_finite()), "{dtype:?} {bad}");
        }
    }
}

/// Ordinary activations lose little by being int8.
#[test]
fn products_of_bytes_are_near_the_reference() {
    let mut r = Random::new(5);
    let mut b = open();
    b.use_packed(Product::Rows(1, 1), Product::Rows(4, 4));
    for dtype in DType::ALL {
        let t = matrix(&mut r, dtype, 40, 512);
        let x = r.floats(3 * 512);
        let (part, near) = (Part::all(&t), 1e-2);
        let want = linear(&Reference, &t, &part, None, &x);
        assert_eq!(far(&linear(&b, &t, &part, None, &x), &want, near), None, "{dtype:?}");
    }
}
