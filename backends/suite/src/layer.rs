//! The ops that follow each other in a layer, in one go and one by one: the same bits.

use crate::random::{Random, download, matrix, same_bits, upload};
use dunlin_backend::{
    Activation, AttentionParams, Backend, DType, FeedForward, FeedForwardRoom, HostTensor, KvSpec,
    LinearPart, Norm, Part, Rope, RopeStyle, SeqRows,
};

/// Tokens of a KV block.
const BLOCK: usize = 16;

/// A layer of any shape and weights, and rows of some sequences.
struct Layer {
    hidden: usize,
    ffn: usize,
    params: AttentionParams,
    rope: Rope,
    activation: Activation,
    /// q, k, v, o, gate, up, down.
    weights: Vec<HostTensor>,
    norm: Vec<f32>,
    bias: Vec<f32>,
    x: Vec<f32>,
    positions: Vec<u32>,
    seqs: Vec<SeqRows>,
    blocks: usize,
}

/// Runs a random layer with fused ops and with those that they are made of.
pub fn fused_is_composed<B: Backend>(b: &B, r: &mut Random) {
    let layer = Layer::random(r);
    let (fused, composed) = (layer.run(b, true), layer.run(b, false));
    assert_eq!(fused.len(), composed.len());
    for ((what, fused), (_, composed)) in fused.iter().zip(&composed) {
        assert!(same_bits(fused, composed), "{what} of {} rows", layer.positions.len());
    }
}

impl Layer {
    fn random(r: &mut Random) -> Self {
        // Heads that are whole blocks of int8, and others.
        let head_dim = [32, 64, 40][r.below(3)];
        let kv_heads = 1 + r.below(3);
        let heads = kv_heads * (1 + r.below(3));
        // A width of the feed-forward block that is whole blocks, and others.
        let hidden = 32 * (1 + r.below(5));
        let ffn = if r.below(5) == 0 { 1 + r.below(90) } else { 32 * (1 + r.below(7)) };
        let mut weight = |rows, cols: usize| {
            let fits = |t: &DType| cols.is_multiple_of(t.block_elements());
            let types: Vec<DType> = DType::ALL.into_iter().filter(fits).collect();
            let dtype = types[r.below(types.len())];
            matrix(r, dtype, rows, cols)
        };
        let (wide, narrow) = (heads * head_dim, kv_heads * head_dim);
        let weights = vec![
            weight(wide, hidden),
            weight(narrow, hidden),
            weight(narrow, hidden),
            weight(hidden, wide),
            weight(ffn, hidden),
            weight(ffn, hidden),
            weight(hidden, ffn),
        ];
        let (mut positions, mut seqs, mut blocks) = (Vec::new(), Vec::new(), 0);
        for _ in 0..1 + r.below(4) {
            let (begin, position, rows) = (positions.len(), r.below(40), 1 + r.below(40));
            positions.extend((position..position + rows).map(|p| p as u32));
            let count = (position + rows).div_ceil(BLOCK);
            seqs.push(SeqRows {
                rows: begin..positions.len(),
                position,
                blocks: (blocks..blocks + count).map(|b| b as u32).collect(),
            });
            blocks += count;
        }
        let inv_freq = (0..head_dim / 2).map(|i| 1e4f32.powf(-(i as f32) / 20.0)).collect();
        Self {
            hidden,
            ffn,
            params: AttentionParams {
                heads,
                kv_heads,
                head_dim,
                scale: 0.2,
                window: (r.below(2) == 0).then(|| 1 + r.below(30)),
                softcap: None,
                kv_head_of: (0..heads).map(|h| h * kv_heads / heads).collect(),
            },
            rope: Rope {
                style: [RopeStyle::HalfSplit, RopeStyle::Interleaved][r.below(2)],
                head_dim,
                inv_freq,
            },
            activation: [Activation::Silu, Activation::GeluTanh][r.below(2)],
            weights,
            norm: r.floats(hidden),
            bias: r.floats(wide),
            x: r.floats(positions.len() * hidden),
            positions,
            seqs,
            blocks,
        }
    }

    /// What there is after each op, by name.
    fn run<B: Backend>(&self, b: &B, fused: bool) -> Vec<(&'static str, Vec<f32>)> {
        let Self { hidden, ffn, params, rope, seqs, positions, .. } = self;
        let (rows, mut seen) = (positions.len(), Vec::new());
        let wide = params.heads * params.head_dim;
        let narrow = params.kv_heads * params.head_dim;
        let load = |t: &HostTensor| b.weight(t, &Part::all(t)).expect("a weight");
        let loaded: Vec<B::Weight> = self.weights.iter().map(load).collect();
        let [wq, wk, wv, wo, gate, up, down] = &loaded[..] else { panic!("seven weights") };
        let (weight, bias) = (upload(b, *hidden, &self.norm), upload(b, wide, &self.bias));
        let tensor = |cols: usize| b.tensor(rows, cols).expect("a tensor");
        let mut x = upload(b, *hidden, &self.x);
        let (mut normed, mut delta, mut a) = (tensor(*hidden), tensor(*hidden), tensor(wide));
        let (mut q, mut k, mut v) = (tensor(wide), tensor(narrow), tensor(narrow));
        let (mut g, mut u) = (tensor(*ffn), tensor(*ffn));
        let spec = KvSpec {
            layers: 2,
            kv_heads: params.kv_heads,
            head_dim: params.head_dim,
            blocks: self.blocks,
            block_tokens: BLOCK,
        };
        let mut kv = b.kv(&spec).expect("a store");
        let norm = Norm { weight: &weight, cols: *hidden, eps: 1e-5 };
        for residual in [false, true] {
            let mut parts = [
                LinearPart { weight: wq, bias: Some(&bias), out: &mut q },
                LinearPart { weight: wk, bias: None, out: &mut k },
                LinearPart { weight: wv, bias: None, out: &mut v },
            ];
            if fused {
                b.norm_linear(&x, &norm, &mut normed, &mut parts).expect("an op");
            } else {
                b.rms_norm(&x, &weight, 1e-5, *hidden, &mut normed).expect("an op");
                b.linear(&normed, &mut parts).expect("an op");
            }
            seen.extend([("q", download(b, &q)), ("v", download(b, &v))]);
            if fused {
                let qkv = (&mut q, &mut k, &v);
                b.rope_write(qkv, positions, rope, &mut kv, 1, seqs).expect("an op");
            } else {
                b.rope(&mut q, positions, rope).expect("an op");
                b.rope(&mut k, positions, rope).expect("an op");
                b.kv_write(&mut kv, 1, &k, &v, seqs).expect("an op");
            }
            seen.extend([("rotated q", download(b, &q)), ("rotated k", download(b, &k))]);
            if fused {
                let (kv, sum) = ((&kv, 1), residual.then_some(&mut x));
                b.attention_linear(&q, kv, seqs, params, wo, &mut a, &mut delta, sum)
                    .expect("an op");
            } else {
                b.attention(&q, &kv, 1, seqs, params, &mut a).expect("an op");
                let out = &mut delta;
                b.linear(&a, &mut [LinearPart { weight: wo, bias: None, out }]).expect("an op");
                if residual {
                    b.add(&mut x, &delta).expect("an op");
                }
            }
            let sum = if residual { &x } else { &delta };
            seen.push(("attention", download(b, sum)));
            if fused {
                let weights = FeedForward { gate, up, down, activation: self.activation };
                let room = FeedForwardRoom { normed: &mut normed, gate: &mut g, up: &mut u };
                b.feed_forward(&mut x, &norm, &weights, room, &mut delta, residual).expect("an op");
            } else {
                b.rms_norm(&x, &weight, 1e-5, *hidden, &mut normed).expect("an op");
                let parts = &mut [
                    LinearPart { weight: gate, bias: None, out: &mut g },
                    LinearPart { weight: up, bias: None, out: &mut u },
                ];
                b.linear(&normed, parts).expect("an op");
                b.gated(&mut g, &u, self.activation).expect("an op");
                let out = &mut delta;
                b.linear(&g, &mut [LinearPart { weight: down, bias: None, out }]).expect("an op");
                if residual {
                    b.add(&mut x, &delta).expect("an op");
                }
            }
            let sum = if residual { &x } else { &delta };
            seen.push(("feed forward", download(b, sum)));
        }
        seen
    }
}
