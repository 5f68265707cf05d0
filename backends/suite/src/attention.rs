//! Attention over the paged store: random cases, and what must not change their bits.

use crate::random::{Random, download, same_bits, upload};
use dunlin_backend::{AttentionParams, Backend, BackendError, KvDtype, KvSpec, SeqRows};
use half::f16;

/// One sequence's keys, values and queries for all positions, and how they are attended.
#[derive(Clone)]
pub struct Case {
    pub params: AttentionParams,
    pub spec: KvSpec,
    pub tokens: usize,
    pub blocks: Vec<u32>,
    pub q: Vec<f32>,
    pub k: Vec<f32>,
    pub v: Vec<f32>,
    pub tolerance: f32,
}

pub fn case(seed: u64) -> Case {
    case_of(seed, 90)
}

/// With fewer tokens than `most`.
pub fn case_of(seed: u64, most: usize) -> Case {
    let mut r = Random::new(seed);
    let head_dim = [2, 8, 16, 24, 64, 80, 128, 256][r.below(8)];
    let kv_heads = 1 + r.below(3);
    let heads = kv_heads + r.below(7);
    // Uneven groups too: tensor parallelism may cut them anywhere.
    let kv_head_of = (0..heads).map(|h| if h < kv_heads { h } else { r.below(kv_heads) }).collect();
    let tokens = 1 + r.below(most);
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
        window: (r.below(2) == 0).then(|| 1 + r.below(most / 2)),
        softcap: (r.below(3) == 0).then_some(5.0),
        kv_head_of,
    };
    let size = [1.0, 8.0][r.below(2)];
    let mut floats = |n: usize| r.floats(n).into_iter().map(|v| v * size).collect::<Vec<_>>();
    Case {
        q: floats(tokens * heads * head_dim),
        k: floats(tokens * kv_heads * head_dim),
        v: floats(tokens * kv_heads * head_dim),
        // Scores grow with the square of the inputs, and their rounding errors with them.
        tolerance: if size == 1.0 { 1e-5 } else { 2e-3 },
        params,
        spec,
        tokens,
        blocks,
    }
}

impl Case {
    pub fn seq(&self, rows: std::ops::Range<usize>, position: usize) -> SeqRows {
        SeqRows { rows, position, blocks: self.blocks.clone() }
    }

    pub fn tensors<B: Backend>(&self, b: &B, range: std::ops::Range<usize>) -> [B::Tensor; 3] {
        let cut = |data: &[f32]| {
            let cols = data.len() / self.tokens;
            upload(b, cols, &data[range.start * cols..range.end * cols])
        };
        [cut(&self.q), cut(&self.k), cut(&self.v)]
    }

    /// A store whose blocks hold NaN wherever nothing is written.
    pub fn store<B: Backend>(&self, b: &B) -> B::Kv {
        let mut kv = b.kv(&self.spec).expect("an op");
        let n = self.spec.block_tokens;
        let cols = self.spec.kv_heads * self.spec.head_dim;
        let nan = upload(b, cols, &vec![f32::NAN; n * cols]);
        for block in 0..self.spec.blocks as u32 {
            let all = [SeqRows { rows: 0..n, position: 0, blocks: vec![block] }];
            for layer in 0..self.spec.layers {
                b.kv_write(&mut kv, layer, &nan, &nan, &all).expect("an op");
            }
        }
        kv
    }

    /// With keys and values as a store of this type has them.
    pub fn kept(&self, dtype: KvDtype) -> Case {
        let head = |head: &[f32]| -> Vec<f32> {
            let largest = head.iter().fold(0f32, |m, x| m.max(x.abs()));
            let inverse = if largest > 0.0 { 127.0 / largest } else { 0.0 };
            let one = |x: &f32| match dtype {
                KvDtype::F32 => *x,
                KvDtype::F16 => f16::from_f32(*x).to_f32(),
                KvDtype::Int8 => (x * inverse).round_ties_even() * (largest / 127.0),
            };
            head.iter().map(one).collect()
        };
        let all = |data: &[f32]| data.chunks_exact(self.spec.head_dim).flat_map(head).collect();
        Case { k: all(&self.k), v: all(&self.v), ..self.clone() }
    }

    /// Writes and attends chunk by chunk.
    pub fn run<B: Backend>(&self, b: &B, chunks: &[usize]) -> Vec<f32> {
        let mut kv = self.store(b);
        let mut all = Vec::new();
        let mut start = 0;
        for n in chunks {
            let [q, k, v] = self.tensors(b, start..start + n);
            let seqs = [self.seq(0..*n, start)];
            b.kv_write(&mut kv, 1, &k, &v, &seqs).expect("an op");
            let mut out = b.tensor(*n, self.params.heads * self.params.head_dim).expect("an op");
            b.attention(&q, &kv, 1, &seqs, &self.params, &mut out).expect("an op");
            all.extend(download(b, &out));
            start += n;
        }
        assert_eq!(start, self.tokens);
        all
    }
}

impl Case {
    /// The sequence cut into random chunks, and token by token.
    pub fn check_chunks<B: Backend>(&self, b: &B, seed: u64) {
        let mut r = Random::new(seed ^ 77);
        let whole = self.run(b, &[self.tokens]);
        let mut chunks = Vec::new();
        let mut left = self.tokens;
        while left > 0 {
            let n = 1 + r.below(left.min(30));
            chunks.push(n);
            left -= n;
        }
        assert!(same_bits(&self.run(b, &chunks), &whole), "chunks {chunks:?}");
        assert!(same_bits(&self.run(b, &vec![1; self.tokens]), &whole), "token by token");
    }

    /// The same sequence thrice in one store, under tables of its own.
    pub fn check_company<B: Backend>(&self, b: &B) {
        let alone = self.run(b, &[self.tokens]);
        let copies = 3;
        let each = self.spec.blocks;
        let spec = KvSpec { blocks: each * copies, ..self.spec.clone() };
        let mut kv = b.kv(&spec).expect("a store");
        let seqs: Vec<SeqRows> = (0..copies)
            .map(|i| SeqRows {
                rows: i * self.tokens..(i + 1) * self.tokens,
                position: 0,
                blocks: self.blocks.iter().map(|b| b + (i * each) as u32).collect(),
            })
            .collect();
        let many = |data: &[f32]| upload(b, data.len() / self.tokens, &data.repeat(copies));
        let (q, k, v) = (many(&self.q), many(&self.k), many(&self.v));
        b.kv_write(&mut kv, 0, &k, &v, &seqs).expect("written");
        let cols = self.params.heads * self.params.head_dim;
        let mut out = b.tensor(self.tokens * copies, cols).expect("a tensor");
        b.attention(&q, &kv, 0, &seqs, &self.params, &mut out).expect("attended");
        assert!(same_bits(&download(b, &out), &alone.repeat(copies)), "among others");
    }

    /// Copied blocks attend as the originals did, whatever becomes of those.
    pub fn check_copies<B: Backend>(&self, b: &B) {
        let alone = self.run(b, &[self.tokens]);
        let each = self.spec.blocks as u32;
        let spec = KvSpec { blocks: 2 * each as usize, ..self.spec.clone() };
        let mut kv = b.kv(&spec).expect("a store");
        let [q, k, v] = self.tensors(b, 0..self.tokens);
        b.kv_write(&mut kv, 1, &k, &v, &[self.seq(0..self.tokens, 0)]).expect("written");
        let pairs: Vec<(u32, u32)> = self.blocks.iter().map(|b| (*b, *b + each)).collect();
        b.kv_copy(&mut kv, &pairs).expect("copied");
        let cols = self.spec.kv_heads * self.spec.head_dim;
        let nan = upload(b, cols, &vec![f32::NAN; self.tokens * cols]);
        b.kv_write(&mut kv, 1, &nan, &nan, &[self.seq(0..self.tokens, 0)]).expect("written");
        let blocks = self.blocks.iter().map(|b| *b + each).collect();
        let seqs = [SeqRows { rows: 0..self.tokens, position: 0, blocks }];
        let cols = self.params.heads * self.params.head_dim;
        let mut out = b.tensor(self.tokens, cols).expect("a tensor");
        b.attention(&q, &kv, 1, &seqs, &self.params, &mut out).expect("attended");
        assert!(same_bits(&download(b, &out), &alone), "copies");
    }
}

/// Calls that would read or write where they must not are errors, and only that.
pub fn refuses_wrong_calls<B: Backend>(b: &B) {
    let c = case(1);
    let mut kv = c.store(b);
    let [q, k, v] = c.tensors(b, 0..c.tokens);
    let cols = c.params.heads * c.params.head_dim;
    let mut out = b.tensor(c.tokens, cols).expect("a tensor");
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
