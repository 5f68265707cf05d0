use super::*;
use crate::{DType, KV_TILE};
use bytes::Bytes;

fn tensor(rows: usize, cols: usize, values: &[f32]) -> ReferenceTensor {
    let mut t = Reference.tensor(rows, cols).unwrap();
    Reference.upload(values, &mut t).unwrap();
    t
}

fn weight(rows: usize, cols: usize, values: &[f32]) -> ReferenceWeight {
    let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
    let host = HostTensor::new("w", DType::F32, rows, cols, Bytes::from(bytes)).unwrap();
    Reference.weight(&host, &Part::all(&host)).unwrap()
}

#[test]
fn linear_multiplies_by_the_transpose_and_adds_the_bias() {
    let x = tensor(2, 2, &[1.0, 2.0, 3.0, 4.0]);
    let w = weight(3, 2, &[1.0, 0.0, 0.0, 1.0, 1.0, 1.0]);
    let bias = tensor(1, 3, &[0.0, 0.0, 10.0]);
    let mut out = Reference.tensor(2, 3).unwrap();
    let part = LinearPart { weight: &w, bias: Some(&bias), out: &mut out };
    Reference.linear(&x, &mut [part]).unwrap();
    assert_eq!(out.data, [1.0, 2.0, 13.0, 3.0, 4.0, 17.0]);
}

#[test]
fn a_column_part_sees_only_its_columns() {
    let bytes: Vec<u8> = (0..8).flat_map(|v| (v as f32).to_le_bytes()).collect();
    let host = HostTensor::new("w", DType::F32, 2, 4, Bytes::from(bytes)).unwrap();
    let part = Part { rows: 1..2, cols: 1..3 };
    let w = Reference.weight(&host, &part).unwrap();
    let mut out = Reference.tensor(1, 1).unwrap();
    let x = tensor(1, 2, &[1.0, 10.0]);
    let part = LinearPart { weight: &w, bias: None, out: &mut out };
    Reference.linear(&x, &mut [part]).unwrap();
    assert_eq!(out.data, [65.0]);
}

#[test]
fn norms_act_on_each_segment() {
    let mut x = tensor(1, 4, &[3.0, 4.0, 0.0, 2.0]);
    let w = tensor(1, 2, &[1.0, 2.0]);
    Reference.rms_norm_inplace(&mut x, &w, 0.0, 2).unwrap();
    let root = |sum: f64| (sum / 2.0).sqrt();
    let want = [3.0 / root(25.0), 8.0 / root(25.0), 0.0, 4.0 / root(4.0)];
    assert_eq!(x.data, want.map(|v| v as f32));
}

#[test]
fn rope_turns_pairs_of_either_style() {
    let quarter = std::f32::consts::FRAC_PI_2;
    for (style, want) in [
        (RopeStyle::HalfSplit, [-3.0, -4.0, 1.0, 2.0]),
        (RopeStyle::Interleaved, [-2.0, 1.0, -4.0, 3.0]),
    ] {
        let mut x = tensor(1, 4, &[1.0, 2.0, 3.0, 4.0]);
        let rope = Rope { style, head_dim: 4, inv_freq: [quarter, quarter].into() };
        Reference.rope(&mut x, &[1], &rope).unwrap();
        for (got, want) in x.data.iter().zip(want) {
            assert!((got - want).abs() < 1e-6, "{style:?}: {:?}", x.data);
        }
    }
}

/// One head of one dimension: keys all alike, so that attention averages the values it sees.
#[test]
fn attention_sees_its_own_past_through_blocks_and_window() {
    let spec = KvSpec { layers: 2, kv_heads: 1, head_dim: 1, blocks: 4, block_tokens: KV_TILE };
    let mut kv = Reference.kv(&spec).unwrap();
    let count = 20;
    let values: Vec<f32> = (0..count).map(|v| v as f32).collect();
    let (k, v) = (tensor(count, 1, &vec![0.0; count]), tensor(count, 1, &values));
    let seq = SeqRows { rows: 0..count, position: 0, blocks: vec![3, 1] };
    Reference.kv_write(&mut kv, 1, &k, &v, std::slice::from_ref(&seq)).unwrap();
    let mut params = AttentionParams {
        heads: 1,
        kv_heads: 1,
        head_dim: 1,
        scale: 1.0,
        window: None,
        softcap: None,
        kv_head_of: vec![0],
    };
    let mut out = Reference.tensor(count, 1).unwrap();
    let q = tensor(count, 1, &vec![1.0; count]);
    Reference.attention(&q, &kv, 1, &[seq], &params, &mut out).unwrap();
    for (p, got) in out.data.iter().enumerate() {
        assert!((got - p as f32 / 2.0).abs() < 1e-6);
    }
    // The last row alone, through a copied first block, with a window of four.
    Reference.kv_copy(&mut kv, &[(3, 0)]).unwrap();
    params.window = Some(4);
    let last = SeqRows { rows: 0..1, position: count - 1, blocks: vec![0, 1] };
    let q = tensor(1, 1, &[1.0]);
    Reference.attention(&q, &kv, 1, &[last], &params, &mut out).unwrap();
    assert_eq!(out.data, [17.5]);
}

#[test]
fn experts_weigh_the_likeliest_and_break_ties_downwards() {
    let ones = |n: usize| weight(n, 1, &vec![1.0; n]);
    // Expert e: gate 1, up e + 1, down 1, so ffn_e(x) = silu(x) * (e + 1) * x.
    let gate = [ones(1), ones(1), ones(1)];
    let up: Vec<_> = (1..=3).map(|e| weight(1, 1, &[e as f32])).collect();
    let experts = Experts::<Reference> {
        gate: &gate,
        up: &up,
        down: &gate,
        top_k: 2,
        normalise: true,
        activation: Activation::Silu,
    };
    let (x, mut out) = (tensor(1, 1, &[1.0]), Reference.tensor(1, 1).unwrap());
    // Experts 0 and 1 tie with 2: the lower two are taken, half each.
    let router = tensor(1, 3, &[0.5, 0.5, 0.5]);
    Reference.experts(&x, &router, &experts, &mut out).unwrap();
    let silu = 1.0 / (1.0 + libm::exp(-1.0));
    assert!((f64::from(out.data[0]) - silu * 1.5).abs() < 1e-6);
    let router = tensor(1, 3, &[-100.0, 0.0, libm::log(3.0) as f32]);
    Reference.experts(&x, &router, &experts, &mut out).unwrap();
    assert!((f64::from(out.data[0]) - silu * (2.0 * 0.25 + 3.0 * 0.75)).abs() < 1e-6);
}

#[test]
fn wrong_shapes_are_errors() {
    let x = tensor(1, 3, &[1.0; 3]);
    let w = weight(1, 2, &[1.0; 2]);
    let mut out = Reference.tensor(1, 1).unwrap();
    let part = LinearPart { weight: &w, bias: None, out: &mut out };
    assert!(matches!(Reference.linear(&x, &mut [part]), Err(BackendError::Shape { .. })));
    assert!(Reference.embed(&w, &[1], 1.0, &mut Reference.tensor(1, 2).unwrap()).is_err());
    assert!(Reference.gather(&x, &[1], &mut Reference.tensor(1, 3).unwrap()).is_err());
    assert!(Reference.set_rows(&mut out, 2).is_err());
}
