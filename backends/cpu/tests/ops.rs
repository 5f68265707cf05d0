//! The ops that treat rows alone, and mixtures of experts: close to float64, alike on all paths.

mod common;

use common::*;
use dunlin_backend::{
    Activation, Backend, BackendError, DType, Experts, LinearPart, Part, Rope, RopeStyle,
};
use dunlin_cpu::{CpuBackend, CpuError, CpuOptions, Path, Precision};
use proptest::prelude::{ProptestConfig, any, prop_assert, prop_assert_eq, proptest};

/// Runs `f` on every path and returns the common result.
fn alike(f: impl Fn(&CpuBackend) -> Vec<f32>) -> Vec<f32> {
    let want = f(&backend(Path::Scalar, Precision::Fast, 1));
    for path in paths() {
        for threads in [1, 3] {
            let got = f(&backend(path, Precision::Fast, threads));
            assert_eq!(got.len(), want.len());
            for (i, (g, w)) in got.iter().zip(&want).enumerate() {
                assert_eq!(g.to_bits(), w.to_bits(), "{path:?} {threads} at {i}: {g} {w}");
            }
        }
    }
    want
}

fn close(got: &[f32], want: impl IntoIterator<Item = f64>, relative: f64) {
    for (i, (g, w)) in got.iter().zip(want).enumerate() {
        assert!((*g as f64 - w).abs() <= relative * w.abs().max(1e-3), "{i}: {g} instead of {w}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(100))]

    #[test]
    fn norms(seed in any::<u64>()) {
        let mut r = Random::new(seed);
        let segment = 1 + r.below(150);
        let (rows, count) = (1 + r.below(5), 1 + r.below(4));
        let x = r.floats(rows * count * segment);
        let w = r.floats(segment);
        let got = alike(|b| {
            let x = upload(b, count * segment, &x);
            let w = upload(b, segment, &w);
            let mut out = b.tensor(rows, count * segment).unwrap();
            b.rms_norm(&x, &w, 1e-5, segment, &mut out).unwrap();
            let mut inplace = x;
            b.rms_norm_inplace(&mut inplace, &w, 1e-5, segment).unwrap();
            assert_eq!(bits(b, &inplace), bits(b, &out));
            download(b, &out)
        });
        let want = x.chunks_exact(segment).flat_map(|x| {
            let mean = x.iter().map(|v| (*v as f64).powi(2)).sum::<f64>() / segment as f64;
            let factor = 1.0 / (mean + 1e-5f32 as f64).sqrt();
            x.iter().zip(&w).map(move |(x, w)| *x as f64 * factor * *w as f64).collect::<Vec<_>>()
        });
        close(&got, want, 1e-6);
    }

    #[test]
    fn additions_and_gates(seed in any::<u64>()) {
        let mut r = Random::new(seed);
        let (rows, cols) = (1 + r.below(300), 1 + r.below(200));
        let x: Vec<f32> = r.floats(rows * cols).iter().map(|v| v * 9.0).collect();
        let y = r.floats(rows * cols);
        let sum = alike(|b| {
            let (mut x, y) = (upload(b, cols, &x), upload(b, cols, &y));
            b.add(&mut x, &y).unwrap();
            download(b, &x)
        });
        prop_assert_eq!(sum, x.iter().zip(&y).map(|(x, y)| x + y).collect::<Vec<_>>());
        for activation in [Activation::Silu, Activation::GeluTanh] {
            let got = alike(|b| {
                let (mut x, y) = (upload(b, cols, &x), upload(b, cols, &y));
                b.gated(&mut x, &y, activation).unwrap();
                download(b, &x)
            });
            close(&got, x.iter().zip(&y).map(|(x, y)| act(activation, *x as f64) * *y as f64), 2e-6);
        }
    }

    #[test]
    fn rotations(seed in any::<u64>()) {
        let mut r = Random::new(seed);
        let head_dim = 2 * (1 + r.below(70));
        let (rows, heads) = (1 + r.below(4), 1 + r.below(4));
        let inv_freq: Vec<f32> =
            (0..head_dim / 2).map(|i| 1e4f32.powf(-2.0 * i as f32 / head_dim as f32)).collect();
        let positions: Vec<u32> = (0..rows)
            .map(|_| [r.below(300), r.below(700), 2_000_000][r.below(3)] as u32)
            .collect();
        let x = r.floats(rows * heads * head_dim);
        for style in [RopeStyle::HalfSplit, RopeStyle::Interleaved] {
            let rope = Rope { style, head_dim, inv_freq: inv_freq.clone().into() };
            let got = alike(|b| {
                let mut x = upload(b, heads * head_dim, &x);
                b.rope(&mut x, &positions, &rope).unwrap();
                download(b, &x)
            });
            let mut want: Vec<f64> = x.iter().map(|v| *v as f64).collect();
            for (i, head) in want.chunks_exact_mut(head_dim).enumerate() {
                for (pair, inv_freq) in inv_freq.iter().enumerate() {
                    let angle = (positions[i / heads] as f32 * inv_freq) as f64;
                    let (a, b) = match style {
                        RopeStyle::HalfSplit => (pair, pair + head_dim / 2),
                        RopeStyle::Interleaved => (2 * pair, 2 * pair + 1),
                    };
                    let (x, y) = (head[a], head[b]);
                    head[a] = x * angle.cos() - y * angle.sin();
                    head[b] = x * angle.sin() + y * angle.cos();
                }
            }
            close(&got, want, 1e-3 * 0.3);
        }
    }

    #[test]
    fn experts_are_dense_layers_weighted(seed in any::<u64>()) {
        let mut r = Random::new(seed);
        let (n, rows, hidden, inner) = (2 + r.below(6), 1 + r.below(9), 64, 96);
        let top_k = 1 + r.below(n);
        let normalise = r.below(2) == 0;
        let activation = [Activation::Silu, Activation::GeluTanh][r.below(2)];
        let dtype = [DType::Q4_0, DType::Q8_0, DType::F16][r.below(3)];
        let mut list = |rows, cols| -> Vec<_> {
            (0..n).map(|_| matrix(&mut r, dtype, rows, cols)).collect()
        };
        let (gate, up, down) = (list(inner, hidden), list(inner, hidden), list(hidden, inner));
        let x = r.floats(rows * hidden);
        // Few distinct logits, so that ties happen.
        let logits: Vec<f32> = (0..rows * n).map(|_| r.below(4) as f32).collect();
        let got = alike(|b| {
            let load = |l: &[_]| -> Vec<_> {
                l.iter().map(|t| b.weight(t, &Part::all(t)).unwrap()).collect()
            };
            let (gate, up, down) = (load(&gate), load(&up), load(&down));
            let e = Experts { gate: &gate, up: &up, down: &down, top_k, normalise, activation };
            let (x, router) = (upload(b, hidden, &x), upload(b, n, &logits));
            let mut out = b.tensor(rows, hidden).unwrap();
            b.experts(&x, &router, &e, &mut out).unwrap();
            // Twice: scratch of the first call must not show.
            b.experts(&x, &router, &e, &mut out).unwrap();
            download(b, &out)
        });
        let b = backend(*paths().last().unwrap(), Precision::Fast, 1);
        for row in 0..rows {
            let logits = &logits[row * n..][..n];
            let total: f64 = logits.iter().map(|l| (*l as f64).exp()).sum();
            let mut order: Vec<usize> = (0..n).collect();
            order.sort_by(|a, b| logits[*b].total_cmp(&logits[*a]));
            let chosen = &order[..top_k];
            let prob = |i: usize| (logits[i] as f64).exp() / total;
            let norm = if normalise { chosen.iter().map(|i| prob(*i)).sum() } else { 1.0 };
            // Beside the sum, the sum of magnitudes: what roundings are relative to.
            let mut want = vec![(0.0f64, 0.0f64); hidden];
            for i in chosen {
                let x = &x[row * hidden..][..hidden];
                let g = linear(&b, &gate[*i], &Part::all(&gate[*i]), x);
                let u = linear(&b, &up[*i], &Part::all(&up[*i]), x);
                let (mut g, u) = (upload(&b, inner, &g), upload(&b, inner, &u));
                b.gated(&mut g, &u, activation).unwrap();
                let y = linear(&b, &down[*i], &Part::all(&down[*i]), &download(&b, &g));
                for ((w, size), y) in want.iter_mut().zip(y) {
                    let term = prob(*i) / norm * y as f64;
                    (*w, *size) = (*w + term, *size + term.abs());
                }
            }
            for (g, (w, size)) in got[row * hidden..][..hidden].iter().zip(&want) {
                prop_assert!((*g as f64 - w).abs() < 1e-5 * size.max(1.0), "{g} {w}");
            }
        }
    }
}

fn act(a: Activation, x: f64) -> f64 {
    match a {
        Activation::Silu => x / (1.0 + (-x).exp()),
        Activation::GeluTanh => {
            let u = (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x * x * x);
            0.5 * x * (1.0 + u.tanh())
        }
    }
}

#[test]
fn rows_are_gathered_and_counted() {
    let b = backend(Path::Scalar, Precision::Fast, 1);
    let x = upload(&b, 3, &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
    let mut out = b.tensor(4, 3).unwrap();
    assert_eq!((out.rows(), out.cols()), (4, 3));
    b.gather(&x, &[1, 1, 0], &mut out).unwrap();
    assert_eq!(download(&b, &out), [4.0, 5.0, 6.0, 4.0, 5.0, 6.0, 1.0, 2.0, 3.0]);
    b.set_rows(&mut out, 1).unwrap();
    assert_eq!(download(&b, &out), [4.0, 5.0, 6.0]);
    assert!(b.gather(&x, &[2], &mut out).is_err());
    assert!(b.set_rows(&mut out, 5).is_err());
    assert!(b.upload(&[0.0; 4], &mut out).is_err());
    assert!(b.upload(&[0.0; 15], &mut out).is_err());
}

#[test]
fn wrong_shapes_are_refused() {
    let shape = |r: Result<(), BackendError>| assert!(matches!(r, Err(BackendError::Shape { .. })));
    let mut r = Random::new(1);
    let b = backend(Path::Scalar, Precision::Fast, 1);
    let t = matrix(&mut r, DType::Q4_K, 20, 256);
    for part in [
        Part { rows: 0..21, cols: 0..256 },
        Part { rows: 5..5, cols: 0..256 },
        Part { rows: 0..20, cols: 16..256 },
        Part { rows: 0..20, cols: 0..272 },
        Part { rows: 0..20, cols: 64..64 },
    ] {
        assert!(matches!(b.weight(&t, &part), Err(BackendError::Shape { .. })), "{part:?}");
    }
    let w = b.weight(&t, &Part::all(&t)).unwrap();
    assert!(b.weight_bytes(&w) >= t.data.len() as u64);
    let x = upload(&b, 256, &r.floats(2 * 256));
    let narrow = upload(&b, 32, &r.floats(2 * 32));
    let mut out = b.tensor(2, 20).unwrap();
    let mut out2 = b.tensor(2, 20).unwrap();
    let mut small = b.tensor(1, 20).unwrap();
    let mut wide = b.tensor(2, 256).unwrap();
    for (x, bias, out) in [
        (&narrow, None, &mut out),
        (&x, Some(&narrow), &mut out2),
        (&x, None, &mut small),
        (&x, None, &mut wide),
    ] {
        shape(b.linear(x, &mut [LinearPart { weight: &w, bias, out }]));
    }
    shape(b.embed(&w, &[20], 1.0, &mut wide));
    shape(b.embed(&w, &[0, 1, 2], 1.0, &mut wide));
    shape(b.embed(&w, &[0], 1.0, &mut out));
    shape(b.add(&mut wide, &narrow));
    shape(b.gated(&mut wide, &narrow, Activation::Silu));
    shape(b.rms_norm(&x, &narrow, 1e-5, 256, &mut wide));
    shape(b.rms_norm(&x, &narrow, 1e-5, 32, &mut out));
    shape(b.rms_norm_inplace(&mut wide, &narrow, 1e-5, 0));
    let rope = |d: usize, n: usize| Rope {
        style: RopeStyle::HalfSplit,
        head_dim: d,
        inv_freq: vec![1.0; n].into(),
    };
    shape(b.rope(&mut wide, &[0], &rope(64, 32)));
    shape(b.rope(&mut wide, &[0, 1], &rope(60, 30)));
    shape(b.rope(&mut wide, &[0, 1], &rope(64, 31)));
    shape(b.rope(&mut wide, &[0, 1], &rope(0, 0)));
    assert!(matches!(b.tensor(usize::MAX / 8, 64), Err(BackendError::OutOfMemory { .. })));
    let e = Experts {
        gate: &[],
        up: &[],
        down: &[],
        top_k: 1,
        normalise: true,
        activation: Activation::Silu,
    };
    shape(b.experts(&x, &narrow, &e, &mut wide));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]

    #[test]
    fn fused_ops_are_the_ops_they_are_made_of(seed in any::<u64>()) {
        for path in paths() {
            for (precision, threads) in
                [(Precision::Fast, 1), (Precision::Fast, 3), (Precision::Exact, 2)]
            {
                let b = backend(path, precision, threads);
                dunlin_suite::layer::fused_is_composed(&b, &mut Random::new(seed));
            }
        }
    }
}

#[test]
fn options_are_checked() {
    let make = |threads, path| {
        CpuBackend::new(CpuOptions { threads, precision: Precision::Fast, kv: None, path })
    };
    assert!(matches!(make(0, None), Err(CpuError::Threads { .. })));
    assert!(matches!(Path::parse("avx1024"), Err(CpuError::UnknownPath { .. })));
    for path in Path::ALL {
        match make(1, Some(path)) {
            Ok(b) => assert_eq!(b.path(), path),
            Err(e) => {
                assert!(!path.available());
                let CpuError::PathUnavailable { path: refused, has } = &e else { panic!("{e}") };
                assert_eq!((*refused, has.split(", ").next()), (path.name(), Some("scalar")));
                assert!(!has.contains(path.name()), "{e}");
            }
        }
        assert_eq!(Path::parse(path.name()), Ok(path));
    }
    let info = make(2, Some(Path::Scalar)).unwrap().info();
    assert_eq!(info.id, "cpu");
    assert!(info.description.contains("scalar path, 2 threads"), "{}", info.description);
    assert!(info.free_bytes > 0 && info.free_bytes <= info.total_bytes);
}
