//! GGUF metadata to [`ModelSpec`].
//!
//! Keys: <https://github.com/ggml-org/ggml/blob/master/docs/gguf.md>. A key of the wrong type is
//! an error, never a default. Mixtral files call themselves `llama` and have experts.

use super::{GEMMA3_LOCAL_THETA, GEMMA3_PATTERN, check};
use crate::error::LoadError;
use crate::gguf::{Gguf, Value};
use crate::spec::{Family, ModelSpec, MoeSpec, RopeScaling, RopeSpec};
use dunlin_backend::{Activation, RopeStyle};

/// Describes the model in `file`.
pub fn from_gguf(file: &Gguf) -> Result<ModelSpec, LoadError> {
    const ARCH: &str = "general.architecture";
    let arch = file.require(ARCH)?.str();
    let arch = arch.ok_or_else(|| LoadError::config(file.path(), ARCH, "must be a string"))?;
    let keys = Keys { file, arch };
    let experts = keys.usize("expert_count")?.unwrap_or(0);
    let family = match (arch, experts) {
        ("llama", 0) => Family::Llama,
        ("llama", _) => Family::Mixtral,
        ("qwen2", 0) => Family::Qwen2,
        ("qwen3", 0) => Family::Qwen3,
        ("gemma3", 0) => Family::Gemma3,
        _ => {
            let path = file.path().to_owned();
            return Err(LoadError::UnknownArchitecture { path, found: arch.to_owned() });
        }
    };
    let gemma = family == Family::Gemma3;
    let layers = keys.need("block_count")?;
    let hidden = keys.need("embedding_length")?;
    let ffn = keys.need("feed_forward_length")?;
    let heads = keys.need("attention.head_count")?;
    let head_dim = match keys.usize("attention.key_length")? {
        Some(n) => n,
        None => hidden.checked_div(heads).unwrap_or(0),
    };
    keys.same_as("attention.value_length", head_dim)?;
    keys.same_as("rope.dimension_count", head_dim)?;
    let vocab = file.tensors().get("token_embd.weight").and_then(|t| t.dims.get(1)).copied();
    let vocab = vocab
        .ok_or_else(|| LoadError::tensor(file.path(), "token_embd.weight", "is not a matrix"))?;
    let window = keys.usize("attention.sliding_window")?.filter(|w| *w > 0);
    let spec = ModelSpec {
        family,
        layers,
        hidden,
        ffn,
        heads,
        kv_heads: keys.usize("attention.head_count_kv")?.unwrap_or(heads),
        head_dim,
        vocab,
        context: keys.need("context_length")?,
        rms_eps: keys.need_float("attention.layer_norm_rms_epsilon")? as f32,
        activation: if gemma { Activation::GeluTanh } else { Activation::Silu },
        embed_scale: if gemma { (hidden as f32).sqrt() } else { 1.0 },
        attention_scale: attention_scale(&keys, gemma, layers, hidden, heads, head_dim)?,
        rope: rope(&keys, family)?,
        rope_local: if gemma { Some(local_rope(&keys)?) } else { None },
        window,
        global_every: if gemma && window.is_some() { Some(pattern(&keys)?) } else { None },
        qk_norm: matches!(family, Family::Qwen3 | Family::Gemma3),
        qkv_bias: family == Family::Qwen2,
        post_norms: gemma,
        tied_head: !file.tensors().contains_key("output.weight"),
        moe: moe(&keys, experts, ffn)?,
        final_softcap: keys.float("final_logit_softcapping")?.map(|v| v as f32),
        attention_softcap: keys.float("attn_logit_softcapping")?.map(|v| v as f32),
    };
    check(file.path(), &spec, name_of)?;
    Ok(spec)
}

/// Metadata of one architecture.
struct Keys<'a> {
    file: &'a Gguf,
    arch: &'a str,
}

impl Keys<'_> {
    fn get(&self, key: &str) -> (String, Option<&Value>) {
        let full = format!("{}.{key}", self.arch);
        let value = self.file.metadata().get(&full);
        (full, value)
    }

    fn wrong(&self, key: &str, want: &str, value: &Value) -> LoadError {
        let found = match value {
            Value::Array(a) => format!("an array of {}", a.len()),
            other => format!("{other:?}"),
        };
        LoadError::config(self.file.path(), key, format!("must be {want}, is {found}"))
    }

    /// An unsigned integer; an array (one entry a layer) only where all entries agree.
    fn usize(&self, key: &str) -> Result<Option<usize>, LoadError> {
        let (full, Some(value)) = self.get(key) else { return Ok(None) };
        let number = match value {
            Value::Int(v) => Some(*v),
            Value::Array(a) => a.ints().and_then(|mut all| {
                let first = all.next()?;
                all.all(|v| v == first).then_some(first)
            }),
            _ => None,
        };
        match number.and_then(|v| usize::try_from(v).ok()) {
            Some(v) => Ok(Some(v)),
            None => Err(self.wrong(&full, "one whole number, the same for all layers", value)),
        }
    }

    fn need(&self, key: &str) -> Result<usize, LoadError> {
        let full = format!("{}.{key}", self.arch);
        self.usize(key)?.ok_or_else(|| LoadError::config(self.file.path(), &full, "is missing"))
    }

    fn float(&self, key: &str) -> Result<Option<f64>, LoadError> {
        let (full, Some(value)) = self.get(key) else { return Ok(None) };
        value.float().map(Some).ok_or_else(|| self.wrong(&full, "a number", value))
    }

    fn need_float(&self, key: &str) -> Result<f64, LoadError> {
        let full = format!("{}.{key}", self.arch);
        self.float(key)?.ok_or_else(|| LoadError::config(self.file.path(), &full, "is missing"))
    }

    fn str(&self, key: &str) -> Result<Option<&str>, LoadError> {
        let (full, Some(value)) = self.get(key) else { return Ok(None) };
        value.str().map(Some).ok_or_else(|| self.wrong(&full, "a string", value))
    }

    fn same_as(&self, key: &str, head_dim: usize) -> Result<(), LoadError> {
        match self.usize(key)? {
            Some(v) if v != head_dim => {
                let full = format!("{}.{key}", self.arch);
                let reason = format!("is {v}, but only {head_dim} (the head size) is supported");
                Err(LoadError::config(self.file.path(), &full, reason))
            }
            _ => Ok(()),
        }
    }
}

fn rope(keys: &Keys, family: Family) -> Result<RopeSpec, LoadError> {
    let interleaved = matches!(family, Family::Llama | Family::Mixtral);
    let style = if interleaved { RopeStyle::Interleaved } else { RopeStyle::HalfSplit };
    let theta = keys.float("rope.freq_base")?.unwrap_or(10_000.0);
    let factor = match keys.float("rope.scaling.factor")? {
        Some(f) => Some(f),
        None => keys.float("rope.scale_linear")?,
    };
    let scaling = match (keys.str("rope.scaling.type")?, factor) {
        (None | Some("linear"), Some(factor)) if factor != 1.0 => RopeScaling::Linear { factor },
        (None | Some("none" | "linear"), _) => rope_factors(keys)?,
        (Some(other), _) => {
            let key = format!("{}.rope.scaling.type", keys.arch);
            let reason = format!("is '{other}'; supported are none, linear and llama3");
            return Err(LoadError::config(keys.file.path(), &key, reason));
        }
    };
    Ok(RopeSpec { style, theta, scaling })
}

/// Llama 3's scaling is a tensor of divisors.
fn rope_factors(keys: &Keys) -> Result<RopeScaling, LoadError> {
    const NAME: &str = "rope_freqs.weight";
    if !keys.file.tensors().contains_key(NAME) {
        return Ok(RopeScaling::None);
    }
    let tensor = keys.file.tensor(NAME)?;
    if tensor.dtype != dunlin_backend::DType::F32 || tensor.rows != 1 {
        return Err(LoadError::tensor(keys.file.path(), NAME, "must be a vector of F32"));
    }
    let (values, _) = tensor.data.as_chunks::<4>();
    Ok(RopeScaling::Factors(values.iter().map(|c| f32::from_le_bytes(*c)).collect()))
}

fn local_rope(keys: &Keys) -> Result<RopeSpec, LoadError> {
    let theta = keys.float("rope.freq_base_swa")?.unwrap_or(GEMMA3_LOCAL_THETA);
    Ok(RopeSpec { style: RopeStyle::HalfSplit, theta, scaling: RopeScaling::None })
}

fn pattern(keys: &Keys) -> Result<usize, LoadError> {
    Ok(keys.usize("attention.sliding_window_pattern")?.unwrap_or(GEMMA3_PATTERN))
}

/// Gemma 3 27B scales scores by its hidden size per head, not by its head size; its files say
/// nothing about it, so it is known by its 62 layers, as in llama.cpp.
fn attention_scale(
    keys: &Keys,
    gemma: bool,
    layers: usize,
    hidden: usize,
    heads: usize,
    head_dim: usize,
) -> Result<f32, LoadError> {
    if let Some(scale) = keys.float("attention.scale")?.filter(|s| *s != 0.0) {
        return Ok(scale as f32);
    }
    let width = if gemma && layers == 62 { hidden as f64 / heads as f64 } else { head_dim as f64 };
    Ok((1.0 / width.sqrt()) as f32)
}

fn moe(keys: &Keys, experts: usize, ffn: usize) -> Result<Option<MoeSpec>, LoadError> {
    if experts == 0 {
        return Ok(None);
    }
    let top_k = keys.need("expert_used_count")?;
    let ffn = keys.usize("expert_feed_forward_length")?.unwrap_or(ffn);
    Ok(Some(MoeSpec { experts, top_k, normalise: true, ffn }))
}

fn name_of(field: &str) -> String {
    let key = match field {
        "layers" => "block_count",
        "hidden" => "embedding_length",
        "ffn" => "feed_forward_length",
        "heads" => "attention.head_count",
        "kv_heads" => "attention.head_count_kv",
        "head_dim" => "attention.key_length",
        "context" => "context_length",
        "experts" => "expert_count",
        "expert_ffn" => "expert_feed_forward_length",
        "top_k" => "expert_used_count",
        "rms_eps" => "attention.layer_norm_rms_epsilon",
        "window" => "attention.sliding_window",
        "pattern" => "attention.sliding_window_pattern",
        "theta" => "rope.freq_base",
        "scaling" => "rope.scaling",
        "scale" => "attention.scale",
        "softcap" => "logit_softcapping",
        other => other,
    };
    key.to_owned()
}
