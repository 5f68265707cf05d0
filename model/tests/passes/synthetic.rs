//! Small models of every family with seeded weights, made in memory under Hugging Face names.

use bytes::Bytes;
use dunlin_backend::{Activation, DType, HostTensor, RopeStyle};
use dunlin_model::error::LoadError;
use dunlin_model::spec::{Family, ModelSpec, MoeSpec, RopeScaling, RopeSpec};
use dunlin_model::weights::{NameLayout, WeightSource};

pub struct Synthetic(pub ModelSpec);

/// One of each kind of arithmetic: plain, biased, normed with windows and caps, a mixture.
pub const FAMILIES: [Family; 5] =
    [Family::Llama, Family::Qwen2, Family::Qwen3, Family::Gemma3, Family::Mixtral];

/// Nine query and three KV heads, so that two ranks split unevenly.
pub fn model(family: Family) -> Synthetic {
    let gemma = family == Family::Gemma3;
    let rope = |theta| RopeSpec { style: RopeStyle::HalfSplit, theta, scaling: RopeScaling::None };
    Synthetic(ModelSpec {
        family,
        layers: 4,
        hidden: 48,
        ffn: 160,
        heads: 9,
        kv_heads: 3,
        head_dim: 32,
        vocab: 101,
        context: 256,
        rms_eps: 1e-6,
        activation: if gemma { Activation::GeluTanh } else { Activation::Silu },
        embed_scale: if gemma { (48f32).sqrt() } else { 1.0 },
        attention_scale: 32f32.powf(-0.5),
        rope: rope(100_000.0),
        rope_local: gemma.then(|| rope(10_000.0)),
        window: gemma.then_some(20),
        global_every: gemma.then_some(2),
        qk_norm: gemma || family == Family::Qwen3,
        qkv_bias: family == Family::Qwen2,
        post_norms: gemma,
        tied_head: gemma,
        moe: (family == Family::Mixtral).then_some(MoeSpec {
            experts: 4,
            top_k: 2,
            normalise: true,
            ffn: 96,
        }),
        final_softcap: gemma.then_some(20.0),
        attention_softcap: gemma.then_some(30.0),
    })
}

impl WeightSource for Synthetic {
    fn spec(&self) -> &ModelSpec {
        &self.0
    }

    fn layout(&self) -> NameLayout {
        NameLayout::HuggingFace
    }

    fn tensor(&self, name: &str) -> Result<HostTensor, LoadError> {
        let (rows, cols) = self.shape(name).unwrap_or_else(|| panic!("no tensor '{name}'"));
        let mut random = Random::new(name);
        let norm = name.contains("norm");
        let (base, spread) = match rows {
            1 if norm && self.0.family == Family::Gemma3 => (0.0, 0.1),
            1 if norm => (1.0, 0.1),
            1 => (0.0, 0.1),
            _ => (0.0, 2.0 / (cols as f32).sqrt()),
        };
        let values = (0..rows * cols).map(|_| base + spread * random.next());
        let data: Vec<u8> = values.flat_map(f32::to_le_bytes).collect();
        Ok(HostTensor::new(name, DType::F32, rows, cols, Bytes::from(data)).expect("its shape"))
    }

    fn has(&self, name: &str) -> bool {
        self.shape(name).is_some()
    }
}

impl Synthetic {
    fn shape(&self, name: &str) -> Option<(usize, usize)> {
        let s = &self.0;
        let (q, kv) = (s.heads * s.head_dim, s.kv_heads * s.head_dim);
        let moe = s.moe.as_ref();
        let last = name.rsplit('.').nth(1)?;
        Some(match last {
            "embed_tokens" => (s.vocab, s.hidden),
            "lm_head" if s.tied_head => return None,
            "lm_head" => (s.vocab, s.hidden),
            "q_proj" | "k_proj" | "v_proj" => {
                let rows = if last == "q_proj" { q } else { kv };
                if name.ends_with(".bias") { (1, rows) } else { (rows, s.hidden) }
            }
            "o_proj" => (s.hidden, q),
            "q_norm" | "k_norm" => (1, s.head_dim),
            "gate_proj" | "up_proj" => (s.ffn, s.hidden),
            "down_proj" => (s.hidden, s.ffn),
            "gate" => (moe?.experts, s.hidden),
            "w1" | "w3" => (moe?.ffn, s.hidden),
            "w2" => (s.hidden, moe?.ffn),
            name if name.contains("norm") => (1, s.hidden),
            _ => return None,
        })
    }
}

/// Uniform numbers in -1..1 from a seed of text (SplitMix64 over an FNV hash).
struct Random(u64);

impl Random {
    fn new(seed: &str) -> Self {
        let fnv = |h: u64, b: u8| (h ^ u64::from(b)).wrapping_mul(0x100_0000_01b3);
        Self(seed.bytes().fold(0xcbf2_9ce4_8422_2325, fnv))
    }

    fn next(&mut self) -> f32 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        let z = z ^ (z >> 31);
        (z >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    }
}
