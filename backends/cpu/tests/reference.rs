//! Exact mode against the plain reference backend, op by op, over the same random inputs.

mod common;

use common::{Random, matrix, paths};
use dunlin_backend::{
    Activation, AttentionParams, Backend, DType, Experts, HostTensor, KvSpec, LinearPart, Part,
    Reference, Rope, RopeStyle, SeqRows,
};
use dunlin_cpu::{CpuBackend, CpuOptions, Precision};
use proptest::prelude::{ProptestConfig, any, prop_assert, proptest};

const HIDDEN: usize = 256;
const INNER: usize = 512;
const HEAD_DIM: usize = 64;
const HEADS: usize = 4;
const KV_HEADS: usize = 2;
const EXPERTS: usize = 4;

/// One layer with every kind of op, in the order of a forward pass.
struct Layer {
    table: HostTensor,
    qkv: [HostTensor; 3],
    o: HostTensor,
    router: HostTensor,
    gate: Vec<HostTensor>,
    up: Vec<HostTensor>,
    down: Vec<HostTensor>,
    norm: Vec<f32>,
    head_norm: Vec<f32>,
    bias: Vec<f32>,
    window: Option<usize>,
    style: RopeStyle,
    activation: Activation,
}

fn layer(r: &mut Random) -> Layer {
    let mut any = |rows, cols| {
        let dtype = DType::ALL[r.below(DType::ALL.len())];
        matrix(r, dtype, rows, cols)
    };
    let kv = KV_HEADS * HEAD_DIM;
    let mut list = |rows, cols| (0..EXPERTS).map(|_| any(rows, cols)).collect::<Vec<_>>();
    let (gate, up, down) = (list(INNER, HIDDEN), list(INNER, HIDDEN), list(HIDDEN, INNER));
    Layer {
        table: any(50, HIDDEN),
        qkv: [any(HEADS * HEAD_DIM, HIDDEN), any(kv, HIDDEN), any(kv, HIDDEN)],
        o: any(HIDDEN, HEADS * HEAD_DIM),
        gate,
        up,
        down,
        router: matrix(r, DType::F32, EXPERTS, HIDDEN),
        norm: r.floats(HIDDEN),
        head_norm: r.floats(HEAD_DIM),
        bias: r.floats(HEADS * HEAD_DIM),
        window: (r.below(2) == 0).then(|| 1 + r.below(30)),
        style: [RopeStyle::HalfSplit, RopeStyle::Interleaved][r.below(2)],
        activation: [Activation::Silu, Activation::GeluTanh][r.below(2)],
    }
}

/// Runs the layer over chunks of one sequence and returns what each op gave, by name.
fn run<B: Backend>(b: &B, l: &Layer, ids: &[u32], chunk: usize) -> Vec<(&'static str, Vec<f32>)> {
    let weight = |t: &HostTensor| b.weight(t, &Part::all(t)).unwrap();
    let vector = |v: &[f32]| {
        let mut t = b.tensor(1, v.len()).unwrap();
        b.upload(v, &mut t).unwrap();
        t
    };
    let (table, o, router) = (weight(&l.table), weight(&l.o), weight(&l.router));
    let [wq, wk, wv] = l.qkv.each_ref().map(weight);
    let list = |l: &[HostTensor]| l.iter().map(weight).collect::<Vec<_>>();
    let (gate, up, down) = (list(&l.gate), list(&l.up), list(&l.down));
    let (norm, head_norm, bias) = (vector(&l.norm), vector(&l.head_norm), vector(&l.bias));
    let inv_freq = (0..HEAD_DIM / 2).map(|i| 1e4f32.powf(-(i as f32) / 32.0)).collect();
    let rope = Rope { style: l.style, head_dim: HEAD_DIM, inv_freq };
    let blocks = ids.len().div_ceil(16);
    let mut kv = b
        .kv(&KvSpec { layers: 1, kv_heads: KV_HEADS, head_dim: HEAD_DIM, blocks, block_tokens: 16 })
        .unwrap();
    let params = AttentionParams {
        heads: HEADS,
        kv_heads: KV_HEADS,
        head_dim: HEAD_DIM,
        scale: 0.125,
        window: l.window,
        softcap: None,
        kv_head_of: vec![0, 0, 1, 1],
    };
    let experts = Experts {
        gate: &gate,
        up: &up,
        down: &down,
        top_k: 2,
        normalise: true,
        activation: l.activation,
    };
    let mut results = Vec::new();
    for (i, ids) in ids.chunks(chunk).enumerate() {
        let rows = ids.len();
        let position = i * chunk;
        let tensor = |cols| b.tensor(rows, cols).unwrap();
        let (mut x, mut y) = (tensor(HIDDEN), tensor(HIDDEN));
        let (mut q, mut a) = (tensor(HEADS * HEAD_DIM), tensor(HEADS * HEAD_DIM));
        let (mut k, mut v) = (tensor(KV_HEADS * HEAD_DIM), tensor(KV_HEADS * HEAD_DIM));
        let mut routed = tensor(EXPERTS);
        let mut note = |what, t: &B::Tensor| {
            let mut out = Vec::new();
            b.download(t, &mut out).unwrap();
            results.push((what, out));
        };
        b.embed(&table, ids, 4.0, &mut x).unwrap();
        note("embed", &x);
        b.rms_norm(&x, &norm, 1e-5, HIDDEN, &mut y).unwrap();
        note("norm", &y);
        let mut parts = [
            LinearPart { weight: &wq, bias: Some(&bias), out: &mut q },
            LinearPart { weight: &wk, bias: None, out: &mut k },
            LinearPart { weight: &wv, bias: None, out: &mut v },
        ];
        b.linear(&y, &mut parts).unwrap();
        note("v", &v);
        let positions: Vec<u32> = (0..rows).map(|r| (position + r) as u32).collect();
        for t in [&mut q, &mut k] {
            b.rms_norm_inplace(t, &head_norm, 1e-6, HEAD_DIM).unwrap();
            b.rope(t, &positions, &rope).unwrap();
            note("rope", t);
        }
        let table = (0..blocks as u32).rev().collect();
        let seqs = [SeqRows { rows: 0..rows, position, blocks: table }];
        b.kv_write(&mut kv, 0, &k, &v, &seqs).unwrap();
        b.attention(&q, &kv, 0, &seqs, &params, &mut a).unwrap();
        note("attention", &a);
        b.linear(&a, &mut [LinearPart { weight: &o, bias: None, out: &mut y }]).unwrap();
        b.add(&mut x, &y).unwrap();
        note("add", &x);
        b.rms_norm(&x, &norm, 1e-5, HIDDEN, &mut y).unwrap();
        b.linear(&y, &mut [LinearPart { weight: &router, bias: None, out: &mut routed }]).unwrap();
        note("router", &routed);
        b.experts(&y, &routed, &experts, &mut a).unwrap();
        note("experts", &a);
    }
    results
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(12))]

    #[test]
    fn exact_mode_is_the_reference(seed in any::<u64>()) {
        let mut r = Random::new(seed);
        let l = layer(&mut r);
        let ids: Vec<u32> = (0..1 + r.below(60)).map(|_| r.below(50) as u32).collect();
        let chunk = 1 + r.below(ids.len());
        let want = run(&Reference, &l, &ids, chunk);
        let path = *paths().last().unwrap();
        let options = CpuOptions { threads: 2, precision: Precision::Exact, kv: None, path: Some(path) };
        let got = run(&CpuBackend::new(options).unwrap(), &l, &ids, chunk);
        prop_assert!(got.len() == want.len());
        for ((op, got), (_, want)) in got.iter().zip(&want) {
            prop_assert!(got.len() == want.len());
            let size = want.iter().fold(1e-3f32, |m, v| m.max(v.abs()));
            for (g, w) in got.iter().zip(want) {
                prop_assert!((g - w).abs() <= 2e-4 * size, "{op}: {g} instead of {w} (of {size})");
            }
        }
    }
}
