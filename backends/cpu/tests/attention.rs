//! Attention over the paged store: against float64, on every path, and cut into any chunks.

mod common;

use common::*;
use dunlin_backend::KvDtype;
use dunlin_cpu::{CpuBackend, Path, Precision};
use dunlin_suite::attention;
use proptest::prelude::{ProptestConfig, any, prop_assert, prop_assert_eq, proptest};

/// A case of the suite, and what its keys and values are kept as.
struct Case {
    any: attention::Case,
    dtype: KvDtype,
}

/// Of up to 200 tokens, with windows of up to 100: several spans of keys.
fn case(seed: u64) -> Case {
    let dtype = KvDtype::ALL[Random::new(seed ^ 5).below(3)];
    Case { any: attention::case_of(seed, 200), dtype }
}

impl Case {
    fn backend(&self, path: Path, threads: usize) -> CpuBackend {
        backend_with_kv(path, threads, self.dtype)
    }

    fn run(&self, path: Path, threads: usize) -> Vec<f32> {
        self.any.run(&self.backend(path, threads), &[self.any.tokens])
    }

    fn reference(&self) -> Vec<f64> {
        let c = self.any.kept(self.dtype);
        let (p, d) = (&c.params, c.params.head_dim);
        let mut out = Vec::new();
        for row in 0..c.tokens {
            for h in 0..p.heads {
                let q = &c.q[(row * p.heads + h) * d..][..d];
                let first = p.window.map_or(0, |w| (row + 1).saturating_sub(w));
                let at = |j: usize| (j * p.kv_heads + p.kv_head_of[h]) * d;
                let scores: Vec<f64> = (first..=row)
                    .map(|j| {
                        let k = &c.k[at(j)..][..d];
                        let dot: f64 = q.iter().zip(k).map(|(q, k)| *q as f64 * *k as f64).sum();
                        let s = dot * p.scale as f64;
                        p.softcap.map_or(s, |c| c as f64 * (s / c as f64).tanh())
                    })
                    .collect();
                let top = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                let weights: Vec<f64> = scores.iter().map(|s| (s - top).exp()).collect();
                let total: f64 = weights.iter().sum();
                for e in 0..d {
                    let sum = (first..=row).zip(&weights).map(|(j, w)| w * c.v[at(j) + e] as f64);
                    out.push(sum.sum::<f64>() / total);
                }
            }
        }
        out
    }
}

fn best() -> Path {
    *paths().last().unwrap()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(150))]

    #[test]
    fn close_to_float64_and_alike_on_all_paths(seed in any::<u64>()) {
        let c = case(seed);
        let want = c.reference();
        let scalar = c.run(Path::Scalar, 1);
        prop_assert_eq!(scalar.len(), want.len());
        for (g, w) in scalar.iter().zip(&want) {
            prop_assert!((*g as f64 - w).abs() < c.any.tolerance as f64, "{g} instead of {w}");
        }
        for path in paths() {
            for threads in [1, 3] {
                let got = c.run(path, threads);
                prop_assert!(same_bits(&got, &scalar), "{:?} on {} threads", path, threads);
            }
        }
    }

    #[test]
    fn chunks_make_no_difference(seed in any::<u64>()) {
        let c = case(seed);
        c.any.check_chunks(&c.backend(best(), 2), seed);
    }

    #[test]
    fn other_sequences_make_no_difference(seed in any::<u64>()) {
        let c = case(seed);
        c.any.check_company(&c.backend(best(), 2));
    }

    #[test]
    fn copied_blocks_attend_alike(seed in any::<u64>()) {
        let c = case(seed);
        c.any.check_copies(&c.backend(best(), 1));
    }
}

#[test]
fn wrong_calls_are_refused() {
    attention::refuses_wrong_calls(&backend(Path::Scalar, Precision::Exact, 1));
}
