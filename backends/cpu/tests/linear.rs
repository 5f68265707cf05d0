//! Matrix products: the same bits on every path, in every batch, on any number of threads, and
//! close to float64.

mod common;

use common::*;
use dunlin_backend::{Backend, DType, LinearPart, Part};
use dunlin_cpu::{Path, Precision};
use proptest::prelude::{ProptestConfig, any, prop_assert, prop_assert_eq, proptest};

const PRECISIONS: [Precision; 2] = [Precision::Exact, Precision::Fast];

/// A matrix of any type, and a slice of it.
fn case(seed: u64) -> (dunlin_backend::HostTensor, Part, Vec<f32>, usize) {
    let mut rng = Random::new(seed);
    let dtype = DType::ALL[rng.below(DType::ALL.len())];
    let blocks = 1 + rng.below(3);
    let cols = match dtype.block_elements() {
        1 => 1 + rng.below(200),
        n => n * blocks,
    };
    let t_rows = 1 + rng.below(70);
    let t = matrix(&mut rng, dtype, t_rows, cols);
    let first = rng.below(t_rows);
    let rows = first..first + 1 + rng.below(t_rows - first);
    let unit = if dtype.block_elements() == 1 { 1 } else { 32 };
    let first = rng.below(cols / unit);
    let last = first + 1 + rng.below(cols / unit - first);
    let part = Part { rows, cols: first * unit..last * unit };
    let batch = 1 + rng.below(21);
    let mut x = rng.floats(batch * part.cols.len());
    // Some rows large, some tiny, some zero.
    for row in x.chunks_exact_mut(part.cols.len()) {
        let size = [1.0, 1e6, 1e-6, 0.0, 1e-35][rng.below(5)];
        row.iter_mut().for_each(|v| *v *= size);
    }
    (t, part, x, batch)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn paths_and_threads_give_the_same_bits(seed in any::<u64>()) {
        let (t, part, x, _) = case(seed);
        for precision in PRECISIONS {
            let want = linear(&backend(Path::Scalar, precision, 1), &t, &part, &x);
            for path in paths() {
                for threads in [1, 3] {
                    let got = linear(&backend(path, precision, threads), &t, &part, &x);
                    for (i, (g, w)) in got.iter().zip(&want).enumerate() {
                        prop_assert_eq!(
                            g.to_bits(), w.to_bits(),
                            "{:?} {:?} {} of {:?} {:?} at {}: {} {}",
                            path, precision, threads, t.dtype, part, i, g, w
                        );
                    }
                }
            }
        }
    }

    #[test]
    fn a_row_alone_is_that_row_among_others(seed in any::<u64>()) {
        let (t, part, x, batch) = case(seed);
        for precision in PRECISIONS {
            for path in paths().into_iter().filter(|p| *p != Path::Scalar) {
                let b = backend(path, precision, 2);
                let all = linear(&b, &t, &part, &x);
                for row in 0..batch {
                    let n = part.cols.len();
                    let alone = linear(&b, &t, &part, &x[row * n..(row + 1) * n]);
                    let among = &all[row * part.rows.len()..][..part.rows.len()];
                    prop_assert!(alone.iter().zip(among).all(|(a, b)| a.to_bits() == b.to_bits()));
                }
            }
        }
    }

    #[test]
    fn close_to_float64(seed in any::<u64>()) {
        let (t, part, x, batch) = case(seed);
        let weights = dequantised(&t, &part);
        let n = part.cols.len();
        let path = *paths().last().unwrap();
        for precision in PRECISIONS {
            let got = linear(&backend(path, precision, 1), &t, &part, &x);
            for row in 0..batch {
                let x = &x[row * n..(row + 1) * n];
                for (r, w) in weights.iter().enumerate() {
                    let terms = w.iter().zip(x).map(|(w, x)| *w as f64 * *x as f64);
                    let (sum, size) = terms.fold((0.0, 0.0), |(s, a), t| (s + t, a + t.abs()));
                    // Fast: an activation is off by half a step of its block's largest, at most.
                    let quantised = t.dtype.block_elements() > 1 && precision == Precision::Fast;
                    let step = if quantised {
                        w.chunks(32).zip(x.chunks(32)).map(|(w, x)| {
                            let largest = x.iter().fold(0.0f32, |m, v| m.max(v.abs())) as f64;
                            w.iter().map(|w| w.abs() as f64).sum::<f64>() * largest / 127.0 * 0.51
                        }).sum::<f64>()
                    } else {
                        0.0
                    };
                    let got = got[row * weights.len() + r] as f64;
                    let bound = step + size * 1e-5 + 1e-30;
                    prop_assert!((got - sum).abs() <= bound,
                        "{:?} {:?}: {} instead of {} (+-{})", t.dtype, precision, got, sum, bound);
                }
            }
        }
    }

    #[test]
    fn embedding_rows_are_those_of_the_definition(seed in any::<u64>()) {
        let (t, part, _, _) = case(seed);
        let want = dequantised(&t, &part);
        let b = backend(Path::Scalar, Precision::Fast, 1);
        let table = b.weight(&t, &part).unwrap();
        let ids: Vec<u32> = (0..part.rows.len() as u32).rev().collect();
        let mut out = b.tensor(ids.len(), part.cols.len()).unwrap();
        b.embed(&table, &ids, 1.0, &mut out).unwrap();
        for (i, id) in ids.iter().enumerate() {
            for (g, w) in out.row(i).iter().zip(&want[*id as usize]) {
                prop_assert_eq!(g.to_bits(), w.to_bits());
            }
        }
    }
}

/// Largest codes times largest activations: nothing may saturate, on any path.
#[test]
fn extreme_codes_are_exact() {
    let mut rng = Random::new(5);
    for dtype in DType::ALL.into_iter().filter(|t| t.block_elements() > 1) {
        for fill in [0x00u8, 0xff, 0x7f, 0x80, 0x0f, 0xf0] {
            let t = matrix(&mut rng, dtype, 33, 512);
            let mut data = t.data.to_vec();
            for block in data.chunks_exact_mut(dtype.block_bytes()) {
                let scales: Vec<u8> = block.to_vec();
                block.fill(fill);
                let keep = match dtype {
                    DType::Q6_K => 208..210,
                    DType::Q4_1 | DType::Q5_1 | DType::Q4_K | DType::Q5_K => 0..4,
                    _ => 0..2,
                };
                block[keep.clone()].copy_from_slice(&scales[keep]);
            }
            let t = dunlin_backend::HostTensor { data: data.into(), ..t };
            for sign in [[1.0, 1.0], [-1.0, -1.0], [1.0, -1.0]] {
                let x: Vec<f32> = (0..512 * 9).map(|i| sign[i % 2] * 3.0).collect();
                let part = Part::all(&t);
                let want = linear(&backend(Path::Scalar, Precision::Fast, 1), &t, &part, &x);
                for path in paths() {
                    let got = linear(&backend(path, Precision::Fast, 1), &t, &part, &x);
                    assert_eq!(got, want, "{path:?} {dtype:?} {fill:#x}");
                }
                // Activations of +-127 are exact, so fast differs from exact by rounding alone.
                let exact = linear(&backend(Path::Scalar, Precision::Exact, 1), &t, &part, &x);
                let sizes: Vec<f32> = dequantised(&t, &part)
                    .iter()
                    .map(|w| w.iter().map(|w| 3.0 * w.abs()).sum())
                    .collect();
                for (i, (f, e)) in want.iter().zip(&exact).enumerate() {
                    let bound = 1e-5 * sizes[i % 33];
                    assert!((f - e).abs() <= bound, "{dtype:?} {fill:#x} {f} {e}");
                }
            }
        }
    }
}

#[test]
fn infinities_and_nan_are_not_hidden() {
    let mut rng = Random::new(9);
    for dtype in [DType::Q4_0, DType::Q8_0, DType::Q4_1, DType::Q6_K, DType::BF16] {
        let t = matrix(&mut rng, dtype, 20, 256);
        for bad in [f32::INFINITY, f32::NEG_INFINITY, f32::NAN] {
            let mut x = rng.floats(3 * 256);
            x[256 + 77] = bad;
            for path in paths() {
                let got = linear(&backend(path, Precision::Fast, 1), &t, &Part::all(&t), &x);
                assert!(got[..20].iter().chain(&got[40..]).all(|v| v.is_finite()));
                assert!(got[20..40].iter().all(|v| !v.is_finite()), "{path:?} {dtype:?}");
            }
        }
    }
}

#[test]
fn fused_parts_of_many_types_and_biases() {
    let mut rng = Random::new(3);
    let x = rng.floats(5 * 256);
    for path in paths() {
        for precision in PRECISIONS {
            let b = backend(path, precision, 2);
            let xt = upload(&b, 256, &x);
            let host: Vec<_> = DType::ALL.iter().map(|t| matrix(&mut rng, *t, 37, 256)).collect();
            let weights: Vec<_> =
                host.iter().map(|t| b.weight(t, &Part::all(t)).unwrap()).collect();
            let bias = rng.floats(37);
            let bias_t = upload(&b, 37, &bias);
            let mut outs: Vec<_> = host.iter().map(|_| b.tensor(5, 37).unwrap()).collect();
            let mut parts: Vec<_> = weights
                .iter()
                .zip(&mut outs)
                .map(|(weight, out)| LinearPart { weight, bias: Some(&bias_t), out })
                .collect();
            b.linear(&xt, &mut parts).unwrap();
            for (t, out) in host.iter().zip(&outs) {
                let plain = linear(&b, t, &Part::all(t), &x);
                for (row, plain) in plain.chunks_exact(37).enumerate() {
                    let want: Vec<f32> = plain.iter().zip(&bias).map(|(p, b)| p + b).collect();
                    assert_eq!(out.row(row), want, "{path:?} {precision:?} {:?}", t.dtype);
                }
            }
        }
    }
}
