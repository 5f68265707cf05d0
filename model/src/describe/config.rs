//! Hugging Face `config.json` to [`ModelSpec`].
//!
//! Reads the layouts of transformers 4 (`rope_theta`, `rope_scaling`) and 5 (`rope_parameters`).
//! A value of the wrong type is an error, never a default; what the forward pass cannot do
//! (biases on the output projection, partial rotary, mixed window layouts) is refused by name.

use super::{GEMMA3_LOCAL_THETA, GEMMA3_PATTERN, check};
use crate::error::LoadError;
use crate::spec::{Family, ModelSpec, MoeSpec, RopeScaling, RopeSpec};
use dunlin_backend::{Activation, RopeStyle};
use serde_json::Value;
use std::path::Path;

/// Describes the model whose `config.json` (at `path`) is `json`.
pub fn from_config(path: &Path, json: &Value) -> Result<ModelSpec, LoadError> {
    let keys = Keys { path, json };
    let family = family(&keys)?;
    let gemma = family == Family::Gemma3;
    refuse_unsupported(&keys)?;
    let layers = keys.need("num_hidden_layers")?;
    let hidden = keys.need("hidden_size")?;
    let ffn = keys.need("intermediate_size")?;
    let heads = keys.need("num_attention_heads")?;
    let head_dim = match (keys.usize("head_dim")?, gemma) {
        (Some(n), _) => n,
        (None, true) => 256,
        (None, false) => hidden.checked_div(heads).unwrap_or(0),
    };
    let (window, global_every) = windows(&keys, family, layers)?;
    let scale_width = match keys.float("query_pre_attn_scalar")? {
        Some(v) if gemma => v,
        _ => head_dim as f64,
    };
    let spec = ModelSpec {
        family,
        layers,
        hidden,
        ffn,
        heads,
        kv_heads: keys.usize("num_key_value_heads")?.unwrap_or(heads),
        head_dim,
        vocab: keys.need("vocab_size")?,
        context: keys.need("max_position_embeddings")?,
        rms_eps: keys.float("rms_norm_eps")?.unwrap_or(1e-6) as f32,
        activation: activation(&keys, gemma)?,
        embed_scale: if gemma { (hidden as f32).sqrt() } else { 1.0 },
        attention_scale: (1.0 / scale_width.sqrt()) as f32,
        rope: rope(&keys, gemma)?,
        rope_local: if gemma { Some(local_rope(&keys)?) } else { None },
        window,
        global_every,
        qk_norm: matches!(family, Family::Qwen3 | Family::Gemma3),
        qkv_bias: family == Family::Qwen2,
        post_norms: gemma,
        tied_head: keys.bool("tie_word_embeddings")?.unwrap_or(gemma),
        moe: moe(&keys, family, ffn)?,
        final_softcap: keys.float("final_logit_softcapping")?.map(|v| v as f32),
        attention_softcap: keys.float("attn_logit_softcapping")?.map(|v| v as f32),
    };
    check(path, &spec, name_of)?;
    Ok(spec)
}

/// Values of a JSON object; `null` counts as absent.
struct Keys<'a> {
    path: &'a Path,
    json: &'a Value,
}

impl<'a> Keys<'a> {
    fn get(&self, key: &str) -> Option<&'a Value> {
        self.json.get(key).filter(|v| !v.is_null())
    }

    fn wrong(&self, key: &str, want: &str) -> LoadError {
        let mut found = self.json.get(key).map(Value::to_string).unwrap_or_default();
        if let Some((cut, _)) = found.char_indices().nth(80) {
            found.truncate(cut);
        }
        LoadError::config(self.path, key, format!("must be {want}, is {found}"))
    }

    fn usize(&self, key: &str) -> Result<Option<usize>, LoadError> {
        let Some(value) = self.get(key) else { return Ok(None) };
        let number = value.as_u64().and_then(|v| usize::try_from(v).ok());
        number.map(Some).ok_or_else(|| self.wrong(key, "a whole number"))
    }

    fn need(&self, key: &str) -> Result<usize, LoadError> {
        self.usize(key)?.ok_or_else(|| LoadError::config(self.path, key, "is missing"))
    }

    fn float(&self, key: &str) -> Result<Option<f64>, LoadError> {
        let Some(value) = self.get(key) else { return Ok(None) };
        value.as_f64().map(Some).ok_or_else(|| self.wrong(key, "a number"))
    }

    fn bool(&self, key: &str) -> Result<Option<bool>, LoadError> {
        let Some(value) = self.get(key) else { return Ok(None) };
        value.as_bool().map(Some).ok_or_else(|| self.wrong(key, "true or false"))
    }

    fn str(&self, key: &str) -> Result<Option<&'a str>, LoadError> {
        let Some(value) = self.get(key) else { return Ok(None) };
        value.as_str().map(Some).ok_or_else(|| self.wrong(key, "a string"))
    }

    fn object(&self, key: &str) -> Result<Option<Keys<'a>>, LoadError> {
        let Some(value) = self.get(key) else { return Ok(None) };
        match value.is_object() {
            true => Ok(Some(Keys { path: self.path, json: value })),
            false => Err(self.wrong(key, "an object")),
        }
    }
}

fn family(keys: &Keys) -> Result<Family, LoadError> {
    let name = keys.str("model_type")?;
    let name = name.ok_or_else(|| LoadError::config(keys.path, "model_type", "is missing"))?;
    match name {
        "llama" | "mistral" => Ok(Family::Llama),
        "mixtral" => Ok(Family::Mixtral),
        "qwen2" => Ok(Family::Qwen2),
        "qwen3" => Ok(Family::Qwen3),
        "gemma3_text" => Ok(Family::Gemma3),
        other => Err(LoadError::UnknownArchitecture {
            path: keys.path.to_owned(),
            found: other.to_owned(),
        }),
    }
}

fn refuse_unsupported(keys: &Keys) -> Result<(), LoadError> {
    // Qwen 2 always has biases on q, k and v and never says so; elsewhere the key means a bias
    // on the output projection too.
    for key in ["attention_bias", "mlp_bias"] {
        if keys.bool(key)? == Some(true) {
            return Err(LoadError::config(keys.path, key, "is true, which is not supported"));
        }
    }
    if keys.get("quantization_config").is_some() {
        let reason = "is set; quantised safetensors are not supported, use a GGUF of the model";
        return Err(LoadError::config(keys.path, "quantization_config", reason));
    }
    if keys.float("partial_rotary_factor")?.is_some_and(|f| f != 1.0) {
        let reason = "is not 1, which is not supported";
        return Err(LoadError::config(keys.path, "partial_rotary_factor", reason));
    }
    Ok(())
}

fn activation(keys: &Keys, gemma: bool) -> Result<Activation, LoadError> {
    let key =
        if keys.get("hidden_activation").is_some() { "hidden_activation" } else { "hidden_act" };
    match keys.str(key)? {
        Some("silu") => Ok(Activation::Silu),
        Some("gelu_pytorch_tanh") => Ok(Activation::GeluTanh),
        None if gemma => Ok(Activation::GeluTanh),
        None => Ok(Activation::Silu),
        Some(other) => {
            let reason = format!("is '{other}'; supported are silu and gelu_pytorch_tanh");
            Err(LoadError::config(keys.path, key, reason))
        }
    }
}

/// Sliding window and the period of global layers.
fn windows(
    keys: &Keys,
    family: Family,
    layers: usize,
) -> Result<(Option<usize>, Option<usize>), LoadError> {
    let qwen = matches!(family, Family::Qwen2 | Family::Qwen3);
    let off = qwen && keys.bool("use_sliding_window")? != Some(true);
    let window = keys.usize("sliding_window")?.filter(|_| !off);
    let Some(window) = window else { return Ok((None, None)) };
    if let Some(types) = keys.get("layer_types") {
        return Ok(match period(keys, types, layers)? {
            1 => (None, None),
            n if n > layers => (Some(window), None),
            n => (Some(window), Some(n)),
        });
    }
    match family {
        Family::Gemma3 => {
            let own = keys.usize("sliding_window_pattern")?;
            let own = own.map_or_else(|| keys.usize("_sliding_window_pattern"), |n| Ok(Some(n)))?;
            Ok((Some(window), Some(own.unwrap_or(GEMMA3_PATTERN))))
        }
        // Layers below max_window_layers attend to everything.
        Family::Qwen2 | Family::Qwen3 => match keys.usize("max_window_layers")? {
            Some(0) => Ok((Some(window), None)),
            Some(n) if n >= layers => Ok((None, None)),
            _ => {
                let reason = "splits the layers in two kinds, which is not supported";
                Err(LoadError::config(keys.path, "max_window_layers", reason))
            }
        },
        _ => Ok((Some(window), None)),
    }
}

/// `n` such that exactly every `n`-th layer is global (above `layers`: none is).
fn period(keys: &Keys, types: &Value, layers: usize) -> Result<usize, LoadError> {
    let list = types.as_array().filter(|l| l.len() == layers);
    let list = list.ok_or_else(|| keys.wrong("layer_types", "one entry a layer"))?;
    let global = list
        .iter()
        .map(|t| match t.as_str() {
            Some("full_attention") => Ok(true),
            Some("sliding_attention") => Ok(false),
            _ => Err(keys.wrong("layer_types", "full_attention or sliding_attention")),
        })
        .collect::<Result<Vec<bool>, _>>()?;
    let n = global.iter().position(|g| *g).map_or(layers + 1, |i| i + 1);
    if global.iter().enumerate().any(|(i, g)| *g != (i + 1).is_multiple_of(n)) {
        let reason = "is not periodic, which is not supported";
        return Err(LoadError::config(keys.path, "layer_types", reason));
    }
    Ok(n)
}

fn rope(keys: &Keys, gemma: bool) -> Result<RopeSpec, LoadError> {
    let default = if gemma { 1_000_000.0 } else { 10_000.0 };
    let rope = rope_parameters(keys, "full_attention")?;
    let theta = match &rope {
        Some(r) => r.float("rope_theta")?,
        None => None,
    };
    let theta = theta.map_or_else(|| keys.float("rope_theta"), |t| Ok(Some(t)))?;
    let scaling = match rope.map_or_else(|| keys.object("rope_scaling"), |r| Ok(Some(r)))? {
        Some(r) => scaling(&r)?,
        None => RopeScaling::None,
    };
    Ok(RopeSpec { style: RopeStyle::HalfSplit, theta: theta.unwrap_or(default), scaling })
}

fn local_rope(keys: &Keys) -> Result<RopeSpec, LoadError> {
    let nested = rope_parameters(keys, "sliding_attention")?;
    let theta = match &nested {
        Some(r) => r.float("rope_theta")?,
        None => keys.float("rope_local_base_freq")?,
    };
    let theta = theta.unwrap_or(GEMMA3_LOCAL_THETA);
    Ok(RopeSpec { style: RopeStyle::HalfSplit, theta, scaling: RopeScaling::None })
}

/// `rope_parameters`, or its part for one kind of layer where it has parts.
fn rope_parameters<'a>(keys: &Keys<'a>, kind: &str) -> Result<Option<Keys<'a>>, LoadError> {
    match keys.object("rope_parameters")? {
        Some(all) => Ok(match all.object(kind)? {
            Some(part) => Some(part),
            None if kind == "full_attention" => Some(all),
            None => None,
        }),
        None => Ok(None),
    }
}

fn scaling(rope: &Keys) -> Result<RopeScaling, LoadError> {
    let kind = rope.str("rope_type")?.map_or_else(|| rope.str("type"), |k| Ok(Some(k)))?;
    let number = |key: &str| {
        let value = rope.float(key)?;
        value.ok_or_else(|| LoadError::config(rope.path, key, "is missing from the rope scaling"))
    };
    match kind {
        None | Some("default") => Ok(RopeScaling::None),
        Some("linear") => Ok(RopeScaling::Linear { factor: number("factor")? }),
        Some("llama3") => Ok(RopeScaling::Llama3 {
            factor: number("factor")?,
            low_freq_factor: number("low_freq_factor")?,
            high_freq_factor: number("high_freq_factor")?,
            original_context: rope.need("original_max_position_embeddings")?,
        }),
        Some(other) => {
            let reason = format!("is '{other}'; supported are default, linear and llama3");
            Err(LoadError::config(rope.path, "rope_type", reason))
        }
    }
}

fn moe(keys: &Keys, family: Family, ffn: usize) -> Result<Option<MoeSpec>, LoadError> {
    if family != Family::Mixtral {
        return Ok(None);
    }
    let experts = keys.need("num_local_experts")?;
    let top_k = keys.need("num_experts_per_tok")?;
    Ok(Some(MoeSpec { experts, top_k, normalise: true, ffn }))
}

fn name_of(field: &str) -> String {
    let key = match field {
        "layers" => "num_hidden_layers",
        "hidden" => "hidden_size",
        "ffn" | "expert_ffn" => "intermediate_size",
        "heads" => "num_attention_heads",
        "kv_heads" => "num_key_value_heads",
        "vocab" => "vocab_size",
        "context" => "max_position_embeddings",
        "experts" => "num_local_experts",
        "top_k" => "num_experts_per_tok",
        "rms_eps" => "rms_norm_eps",
        "window" => "sliding_window",
        "pattern" => "sliding_window_pattern",
        "theta" => "rope_theta",
        "scaling" => "rope_scaling",
        "scale" => "query_pre_attn_scalar",
        "softcap" => "logit_softcapping",
        other => other,
    };
    key.to_owned()
}
