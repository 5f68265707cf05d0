//! Attention over the paged store: against float64, on every path, and cut into any chunks.

mod common;

use common::*;
use dunlin_backend::{AttentionParams, Backend, BackendError, KvDtype, KvSpec, SeqRows};
use dunlin_cpu::{CpuBackend, CpuKv, CpuTensor, Path, Precision};
use half::f16;
use proptest::prelude::{ProptestConfig, any, prop_assert, prop_assert_eq, proptest};

/// One sequence's keys, values and queries for all positions, and how they are attended.
struct Case {
    params: AttentionParams,
    spec: KvSpec,
    dtype: KvDtype,
    tokens: usize,
    blocks: Vec<u32>,
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
    tolerance: f64,
}

fn case(seed: u64) -> Case {
    let mut r = Random::new(seed);
    let head_dim = [2, 8, 16, 24, 64, 80, 128, 256][r.below(8)];
    let kv_heads = 1 + r.below(3);
    let heads = kv_heads + r.below(7);
    // Uneven groups too: tensor parallelism may cut them anywhere.
    let kv_head_of = (0..heads).map(|h| if h < kv_heads { h } else { r.below(kv_heads) }).collect();
    let tokens = 1 + r.below(150);
    let block_tokens = 16 * (1 + r.below(3));
    let need = tokens.div_ceil(block_tokens);
    let mut blocks: Vec<u32> = (0..need as u32 + 3).collect();
    for i in (1..blocks.len()).rev() {
        blocks.swap(i, r.below(i + 1));
    }
    let spec = KvSpec { layers: 2, kv_heads, head_dim, blocks: need + 3, block_tokens };
    let params = AttentionParams {
        heads,
        kv_heads,
        head_dim,
        scale: 1.0 / (head_dim as f32).sqrt(),
        window: (r.below(2) == 0).then(|| 1 + r.below(100)),
        softcap: (r.below(3) == 0).then_some(5.0),
        kv_head_of,
    };
    let size = [1.0, 8.0][r.below(2)];
    let dtype = KvDtype::ALL[r.below(3)];
    let mut floats = |n: usize| r.floats(n).into_iter().map(|v| v * size).collect::<Vec<_>>();
    Case {
        q: floats(tokens * heads * head_dim),
        k: floats(tokens * kv_heads * head_dim),
        v: floats(tokens * kv_heads * head_dim),
        // Scores grow with the square of the inputs, and their rounding errors with them.
        tolerance: if size == 1.0 { 1e-5 } else { 2e-3 },
        params,
        spec,
        dtype,
        tokens,
        blocks,
    }
}

impl Case {
    fn seq(&self, rows: std::ops::Range<usize>, position: usize) -> SeqRows {
        SeqRows { rows, position, blocks: self.blocks.clone() }
    }

    fn tensors(&self, b: &CpuBackend, range: std::ops::Range<usize>) -> [CpuTensor; 3] {
        let cut = |data: &[f32]| {
            let cols = data.len() / self.tokens;
            upload(b, cols, &data[range.start * cols..range.end * cols])
        };
        [cut(&self.q), cut(&self.k), cut(&self.v)]
    }

    /// A store whose blocks hold NaN wherever nothing is written.
    fn store(&self, b: &CpuBackend) -> CpuKv {
        let mut kv = b.kv(&self.spec).unwrap();
        let n = self.spec.blocks * self.spec.block_tokens;
        let cols = self.spec.kv_heads * self.spec.head_dim;
        let nan = upload(b, cols, &vec![f32::NAN; n * cols]);
        let all =
            SeqRows { rows: 0..n, position: 0, blocks: (0..self.spec.blocks as u32).collect() };
        for layer in 0..self.spec.layers {
            b.kv_write(&mut kv, layer, &nan, &nan, std::slice::from_ref(&all)).unwrap();
        }
        kv
    }

    /// Writes and attends chunk by chunk.
    fn run(&self, b: &CpuBackend, chunks: &[usize]) -> Vec<f32> {
        let mut kv = self.store(b);
        let mut all = Vec::new();
        let mut start = 0;
        for n in chunks {
            let [q, k, v] = self.tensors(b, start..start + n);
            let seqs = [self.seq(0..*n, start)];
            b.kv_write(&mut kv, 1, &k, &v, &seqs).unwrap();
            let mut out = b.tensor(*n, q.cols()).unwrap();
            b.attention(&q, &kv, 1, &seqs, &self.params, &mut out).unwrap();
            all.extend(download(b, &out));
            start += n;
        }
        assert_eq!(start, self.tokens);
        all
    }

    /// What the store keeps of `data`.
    fn kept(&self, data: &[f32]) -> Vec<f32> {
        let heads = data.chunks_exact(self.spec.head_dim);
        match self.dtype {
            KvDtype::F32 => data.to_vec(),
            KvDtype::F16 => data.iter().map(|x| f16::from_f32(*x).to_f32()).collect(),
            KvDtype::Int8 => heads
                .flat_map(|head| {
                    let amax = head.iter().fold(0f32, |m, x| m.max(x.abs()));
                    let inverse = if amax > 0.0 { 127.0 / amax } else { 0.0 };
                    head.iter().map(move |x| (x * inverse).round_ties_even() * (amax / 127.0))
                })
                .collect(),
        }
    }

    fn reference(&self) -> Vec<f64> {
        let (p, d) = (&self.params, self.params.head_dim);
        let (keys, values) = (self.kept(&self.k), self.kept(&self.v));
        let mut out = Vec::new();
        for row in 0..self.tokens {
            for h in 0..p.heads {
                let q = &self.q[(row * p.heads + h) * d..][..d];
                let first = p.window.map_or(0, |w| (row + 1).saturating_sub(w));
                let at = |j: usize| (j * p.kv_heads + p.kv_head_of[h]) * d;
                let scores: Vec<f64> = (first..=row)
                    .map(|j| {
                        let k = &keys[at(j)..][..d];
                        let dot: f64 = q.iter().zip(k).map(|(q, k)| *q as f64 * *k as f64).sum();
                        let s = dot * p.scale as f64;
                        p.softcap.map_or(s, |c| c as f64 * (s / c as f64).tanh())
                    })
                    .collect();
                let top = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                let weights: Vec<f64> = scores.iter().map(|s| (s - top).exp()).collect();
                let total: f64 = weights.iter().sum();
                for e in 0..d {
                    let sum =
                        (first..=row).zip(&weights).map(|(j, w)| w * values[at(j) + e] as f64);
                    out.push(sum.sum::<f64>() / total);
                }
            }
        }
        out
    }
}

fn same_bits(a: &[f32], b: &[f32]) -> bool {
    a.len() == b.len() && a.iter().zip(b).all(|(a, b)| a.to_bits() == b.to_bits())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(150))]

    #[test]
    fn close_to_float64_and_alike_on_all_paths(seed in any::<u64>()) {
        let c = case(seed);
        let want = c.reference();
        let scalar = c.run(&backend_with_kv(Path::Scalar, 1, c.dtype), &[c.tokens]);
        for (g, w) in scalar.iter().zip(&want) {
            prop_assert!((*g as f64 - w).abs() < c.tolerance, "{g} instead of {w}");
        }
        for path in paths() {
            for threads in [1, 3] {
                let got = c.run(&backend_with_kv(path, threads, c.dtype), &[c.tokens]);
                prop_assert!(same_bits(&got, &scalar), "{:?} on {} threads", path, threads);
            }
        }
    }

    #[test]
    fn chunks_make_no_difference(seed in any::<u64>()) {
        let c = case(seed);
        let mut r = Random::new(seed ^ 77);
        let b = backend_with_kv(*paths().last().unwrap(), 2, c.dtype);
        let whole = c.run(&b, &[c.tokens]);
        let mut chunks = Vec::new();
        let mut left = c.tokens;
        while left > 0 {
            let n = 1 + r.below(left.min(30));
            chunks.push(n);
            left -= n;
        }
        prop_assert!(same_bits(&c.run(&b, &chunks), &whole), "chunks {:?}", chunks);
        prop_assert!(same_bits(&c.run(&b, &vec![1; c.tokens]), &whole), "token by token");
    }

    #[test]
    fn other_sequences_make_no_difference(seed in any::<u64>()) {
        let c = case(seed);
        let b = backend_with_kv(*paths().last().unwrap(), 2, c.dtype);
        let alone = c.run(&b, &[c.tokens]);
        // The same sequence thrice in one store, under tables of its own, rows 1.. of the call.
        let copies = 3;
        let each = c.spec.blocks;
        let spec = KvSpec { blocks: each * copies, ..c.spec.clone() };
        let mut kv = b.kv(&spec).unwrap();
        let seqs: Vec<SeqRows> = (0..copies)
            .map(|i| SeqRows {
                rows: i * c.tokens..(i + 1) * c.tokens,
                position: 0,
                blocks: c.blocks.iter().map(|b| b + (i * each) as u32).collect(),
            })
            .collect();
        let many = |data: &[f32]| upload(&b, data.len() / c.tokens, &data.repeat(copies));
        let (q, k, v) = (many(&c.q), many(&c.k), many(&c.v));
        b.kv_write(&mut kv, 0, &k, &v, &seqs).unwrap();
        let mut out = b.tensor(q.rows(), q.cols()).unwrap();
        b.attention(&q, &kv, 0, &seqs, &c.params, &mut out).unwrap();
        prop_assert!(same_bits(&download(&b, &out), &alone.repeat(copies)));
    }

    #[test]
    fn copied_blocks_attend_alike(seed in any::<u64>()) {
        let c = case(seed);
        let b = backend_with_kv(*paths().last().unwrap(), 1, c.dtype);
        let alone = c.run(&b, &[c.tokens]);
        let each = c.spec.blocks as u32;
        let spec = KvSpec { blocks: 2 * each as usize, ..c.spec.clone() };
        let mut kv = b.kv(&spec).unwrap();
        let [q, k, v] = c.tensors(&b, 0..c.tokens);
        b.kv_write(&mut kv, 1, &k, &v, &[c.seq(0..c.tokens, 0)]).unwrap();
        let pairs: Vec<(u32, u32)> = c.blocks.iter().map(|b| (*b, *b + each)).collect();
        b.kv_copy(&mut kv, &pairs).unwrap();
        // What happens to the originals afterwards is of no concern to the copies.
        let [_, k2, v2] = c.tensors(&b, 0..c.tokens).map(|t| {
            upload(&b, t.cols(), &vec![f32::NAN; t.rows() * t.cols()])
        });
        b.kv_write(&mut kv, 1, &k2, &v2, &[c.seq(0..c.tokens, 0)]).unwrap();
        let blocks = c.blocks.iter().map(|b| *b + each).collect();
        let seqs = [SeqRows { rows: 0..c.tokens, position: 0, blocks }];
        let mut out = b.tensor(c.tokens, q.cols()).unwrap();
        b.attention(&q, &kv, 1, &seqs, &c.params, &mut out).unwrap();
        prop_assert_eq!(download(&b, &out).len(), alone.len());
        prop_assert!(same_bits(&download(&b, &out), &alone));
    }
}

#[test]
fn wrong_calls_are_refused() {
    let c = case(1);
    let b = backend(Path::Scalar, Precision::Exact, 1);
    let mut kv = c.store(&b);
    let [q, k, v] = c.tensors(&b, 0..c.tokens);
    let mut out = b.tensor(c.tokens, q.cols()).unwrap();
    let good = c.seq(0..c.tokens, 0);
    let bad: Vec<Vec<SeqRows>> = vec![
        vec![SeqRows { rows: 0..c.tokens + 1, ..good.clone() }],
        vec![SeqRows { blocks: vec![], ..good.clone() }],
        vec![SeqRows { blocks: vec![c.spec.blocks as u32; 9], ..good.clone() }],
        vec![SeqRows { position: usize::MAX, ..good.clone() }],
        vec![good.clone(), good.clone()],
    ];
    let shape = |r: Result<(), BackendError>| matches!(r, Err(BackendError::Shape { .. }));
    for seqs in &bad {
        assert!(shape(b.kv_write(&mut kv, 0, &k, &v, seqs)), "{seqs:?}");
        assert!(shape(b.attention(&q, &kv, 0, seqs, &c.params, &mut out)), "{seqs:?}");
    }
    let seqs = [good];
    assert!(shape(b.kv_write(&mut kv, 2, &k, &v, &seqs)));
    assert!(shape(b.attention(&q, &kv, 2, &seqs, &c.params, &mut out)));
    let p = &c.params;
    for params in [
        AttentionParams { head_dim: p.head_dim + 1, ..p.clone() },
        AttentionParams { kv_heads: p.kv_heads + 1, ..p.clone() },
        AttentionParams { heads: p.heads + 1, ..p.clone() },
        AttentionParams { window: Some(0), ..p.clone() },
        AttentionParams { kv_head_of: vec![p.kv_heads; p.heads], ..p.clone() },
        AttentionParams { kv_head_of: vec![], ..p.clone() },
    ] {
        assert!(shape(b.attention(&q, &kv, 0, &seqs, &params, &mut out)), "{params:?}");
    }
    assert!(shape(b.kv_copy(&mut kv, &[(0, c.spec.blocks as u32)])));
    assert!(b.kv(&KvSpec { block_tokens: 17, ..c.spec.clone() }).is_err());
    for blocks in [1 << 40, usize::MAX] {
        let huge = KvSpec { blocks, ..c.spec.clone() };
        assert!(matches!(b.kv(&huge), Err(BackendError::OutOfMemory { .. })));
    }
}
