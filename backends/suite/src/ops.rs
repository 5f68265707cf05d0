//! Every op but attention: run on random shapes, and what must hold on every backend.

use crate::random::{Random, download, matrix, same_bits, upload};
use dunlin_backend::draw::sample_rows;
use dunlin_backend::{
    Activation, Backend, BackendError, DType, Draw, Experts, HostTensor, LinearPart, Part, Rope,
    RopeStyle, Samples, Want,
};

/// `x * part(t)^T (+ bias)`
pub fn linear<B: Backend>(
    b: &B,
    t: &HostTensor,
    part: &Part,
    bias: Option<&[f32]>,
    x: &[f32],
) -> Vec<f32> {
    let w = b.weight(t, part).expect("an op");
    let x = upload(b, part.cols.len(), x);
    let bias = bias.map(|v| upload(b, v.len(), v));
    let rows = download(b, &x).len() / part.cols.len();
    let mut out = b.tensor(rows, part.rows.len()).expect("an op");
    b.linear(&x, &mut [LinearPart { weight: &w, bias: bias.as_ref(), out: &mut out }])
        .expect("an op");
    download(b, &out)
}

/// A matrix and a part of it: any rows, columns on multiples of 32 (any, for floats).
pub fn random_part(r: &mut Random) -> (HostTensor, Part) {
    let dtype = DType::ALL[r.below(DType::ALL.len())];
    let wide = dtype.block_elements();
    let cols = if wide == 1 { 1 + r.below(200) } else { wide * (1 + r.below(640 / wide)) };
    let rows = 1 + r.below(90);
    let t = matrix(r, dtype, rows, cols);
    let step = if wide == 1 { 1 } else { 32 };
    let first = r.below(cols / step);
    let end = first + 1 + r.below(cols / step - first);
    let begin = r.below(t.rows);
    let part =
        Part { rows: begin..begin + 1 + r.below(t.rows - begin), cols: first * step..end * step };
    (t, part)
}

/// Norms, rotary embedding, activations, sums and picked rows over one random tensor.
pub fn row_ops<B: Backend>(b: &B, r: &mut Random) -> Vec<(&'static str, Vec<f32>)> {
    let mut results = Vec::new();
    let dim = 2 * (1 + r.below(70));
    let (heads, rows) = (1 + r.below(5), 1 + r.below(9));
    let cols = heads * dim;
    let mut x = upload(b, cols, &r.floats(rows * cols));
    let whole = upload(b, cols, &r.floats(cols));
    let head = upload(b, dim, &r.floats(dim));
    let mut y = b.tensor(rows, cols).expect("an op");
    b.rms_norm(&x, &whole, 1e-5, cols, &mut y).expect("an op");
    results.push(("rms_norm", download(b, &y)));
    b.rms_norm_inplace(&mut y, &head, 1e-6, dim).expect("an op");
    results.push(("rms_norm_inplace", download(b, &y)));
    let positions: Vec<u32> = (0..rows).map(|_| r.below(9000) as u32).collect();
    let inv_freq = (0..dim / 2).map(|i| 1e4f32.powf(-2.0 * i as f32 / dim as f32)).collect();
    let style = [RopeStyle::HalfSplit, RopeStyle::Interleaved][r.below(2)];
    let rope = Rope { style, head_dim: dim, inv_freq };
    b.rope(&mut y, &positions, &rope).expect("an op");
    results.push(("rope", download(b, &y)));
    b.add(&mut x, &y).expect("an op");
    results.push(("add", download(b, &x)));
    let activation = [Activation::Silu, Activation::GeluTanh][r.below(2)];
    let mut gate =
        upload(b, cols, &r.floats(rows * cols).iter().map(|v| v * 30.0).collect::<Vec<_>>());
    b.gated(&mut gate, &x, activation).expect("an op");
    results.push(("gated", download(b, &gate)));
    let picked: Vec<u32> = (0..1 + r.below(rows)).map(|_| r.below(rows) as u32).collect();
    let mut out = b.tensor(rows, cols).expect("an op");
    b.gather(&x, &picked, &mut out).expect("an op");
    results.push(("gather", download(b, &out)));
    results
}

/// A mixture of experts over random rows, with ties among the scores.
pub fn experts<B: Backend>(b: &B, r: &mut Random) -> Vec<f32> {
    let m = Mixture::new(b, r);
    m.run(b, 0..m.rows)
}

/// A row's bits do not depend on the rows beside it.
pub fn check_expert_rows<B: Backend>(b: &B, seed: u64) {
    let mut r = Random::new(seed);
    let m = Mixture::new(b, &mut r);
    let all = m.run(b, 0..m.rows);
    let row = r.below(m.rows);
    let want = &all[row * m.hidden..][..m.hidden];
    assert!(same_bits(&m.run(b, row..row + 1), want), "row {row} of {}", m.rows);
}

struct Mixture<B: Backend> {
    gate: Vec<B::Weight>,
    up: Vec<B::Weight>,
    down: Vec<B::Weight>,
    hidden: usize,
    rows: usize,
    top_k: usize,
    normalise: bool,
    x: Vec<f32>,
    scores: Vec<f32>,
}

impl<B: Backend> Mixture<B> {
    fn new(b: &B, r: &mut Random) -> Self {
        let (count, hidden, ffn) = (1 + r.below(7), 32 * (1 + r.below(3)), 32 * (1 + r.below(4)));
        let (rows, top_k) = (1 + r.below(9), 1 + r.below(count));
        let mut list = |rows, cols| -> Vec<B::Weight> {
            let types =
                DType::ALL.map(|t| (t, t.block_elements())).into_iter().filter(|(_, n)| *n <= 32);
            let types: Vec<_> = types.map(|(t, _)| t).collect();
            let one = |_| {
                let dtype = types[r.below(types.len())];
                let t = matrix(r, dtype, rows, cols);
                b.weight(&t, &Part::all(&t)).expect("an op")
            };
            (0..count).map(one).collect()
        };
        let (gate, up, down) = (list(ffn, hidden), list(ffn, hidden), list(hidden, ffn));
        let x = r.floats(rows * hidden);
        // Coarse values, so that there are ties.
        let scores = (0..rows * count).map(|_| r.below(5) as f32 - 2.0).collect();
        let normalise = r.below(2) == 0;
        Self { gate, up, down, hidden, rows, top_k, normalise, x, scores }
    }

    fn run(&self, b: &B, rows: std::ops::Range<usize>) -> Vec<f32> {
        let cut =
            |data: &[f32], cols: usize| upload(b, cols, &data[rows.start * cols..rows.end * cols]);
        let x = cut(&self.x, self.hidden);
        let router = cut(&self.scores, self.gate.len());
        let mut out = b.tensor(rows.len(), self.hidden).expect("an op");
        let experts = Experts {
            gate: &self.gate,
            up: &self.up,
            down: &self.down,
            top_k: self.top_k,
            normalise: self.normalise,
            activation: Activation::Silu,
        };
        // Twice, so that what the first run left behind would show.
        for _ in 0..2 {
            b.experts(&x, &router, &experts, &mut out).expect("an op");
        }
        download(b, &out)
    }
}

/// Calls whose shapes do not fit are errors, and only that.
pub fn refuses_wrong_calls<B: Backend>(b: &B) {
    let mut r = Random::new(1);
    let t = matrix(&mut r, DType::Q8_0, 8, 64);
    let shape = |e: Result<(), BackendError>| matches!(e, Err(BackendError::Shape { .. }));
    for part in [
        Part { rows: 0..9, cols: 0..64 },
        Part { rows: 0..8, cols: 0..96 },
        Part { rows: 0..8, cols: 1..33 },
    ] {
        assert!(shape(b.weight(&t, &part).map(drop)), "{part:?}");
    }
    let w = b.weight(&t, &Part::all(&t)).expect("an op");
    let (x, mut y) = (b.tensor(2, 32).expect("an op"), b.tensor(2, 8).expect("an op"));
    let mut short = b.tensor(1, 64).expect("an op");
    assert!(shape(b.linear(&x, &mut [LinearPart { weight: &w, bias: None, out: &mut y }])));
    assert!(shape(b.embed(&w, &[8], 1.0, &mut short)));
    assert!(shape(b.embed(&w, &[0, 1], 1.0, &mut short)));
    assert!(shape(b.add(&mut short, &x)));
    assert!(shape(b.gather(&x, &[2], &mut y)));
    assert!(shape(b.upload(&[0.0; 33], &mut y)));
    assert!(shape(b.set_rows(&mut y, 3)));
    assert!(b.tensor(usize::MAX / 8, 64).is_err());
}

/// Parameters of a draw as requests have them, rare ones often.
pub fn any_draw(r: &mut Random, cols: usize) -> Draw {
    let ids = |r: &mut Random, n: usize| -> Vec<u32> {
        (0..r.below(n)).map(|_| r.below(cols + 2) as u32).collect()
    };
    let unit = |r: &mut Random| r.float().abs();
    Draw {
        temperature: [0.0, 1.0, 0.1 + 2.0 * unit(r), 1e-40][r.below(4)],
        top_k: [0, 1 + r.below(2 * cols) as u32, 1 + r.below(9) as u32][r.below(3)],
        top_p: [1.0, unit(r), 0.0, 0.001 * unit(r)][r.below(4)],
        min_p: [0.0, unit(r), 0.01 * unit(r), 1.0][r.below(4)],
        random: r.bits(),
        add: ids(r, 4)
            .into_iter()
            .map(|id| (id, [9.0 * r.float(), f32::NEG_INFINITY][r.below(2)]))
            .collect(),
        forbidden: ids(r, 5),
    }
}

/// Samples of random logits are those of the host, to the bit, whatever the company.
pub fn check_samples<B: Backend>(b: &B, seed: u64) {
    let mut r = Random::new(seed);
    let most = [5, 300, 9000][r.below(3)];
    let cols = 1 + r.below(most);
    let rows = 1 + r.below(5);
    let (size, whole) = ([1.0, 20.0, 1e-3][r.below(3)], r.below(2) == 0);
    // Whole numbers now and then, so that ties happen.
    let value = |v: f32| if whole { (v * 3.0).round() } else { v * size };
    let mut logits: Vec<f32> = r.floats(rows * cols).into_iter().map(value).collect();
    if r.below(4) == 0 {
        let at = r.below(rows * cols);
        logits[at] = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, -0.0, 3e38][r.below(5)];
    }
    let want = |r: &mut Random| match r.below(4) {
        0 => Want::Logits,
        _ => Want::Token(any_draw(r, cols)),
    };
    let wants: Vec<Want> = (0..rows).map(|_| want(&mut r)).collect();
    let mut t = upload(b, cols, &logits);
    let mut got = Samples::default();
    b.sample(&mut t, &wants, &mut got).expect("samples");
    let mut want = Samples { logits, tokens: vec![] };
    sample_rows(cols, &wants, &mut want);
    assert_eq!(got.tokens, want.tokens, "{wants:?}");
    assert!(same_bits(&got.logits, &want.logits), "rows of logits");
    assert!(b.sample(&mut t, &wants[1..], &mut got).is_err(), "a want for each row");
}
