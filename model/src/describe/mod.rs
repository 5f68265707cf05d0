//! Fills a [`ModelSpec`] from a checkpoint's own description: GGUF metadata or `config.json`.

mod config;
mod metadata;

pub use config::from_config;
pub use metadata::from_gguf;

use crate::error::LoadError;
use crate::spec::{ModelSpec, RopeScaling, RopeSpec};
use std::path::Path;

/// Local rope base of gemma3; not in its GGUF files.
const GEMMA3_LOCAL_THETA: f64 = 10_000.0;
/// Every sixth layer of gemma3 attends to everything; not in its GGUF files either.
const GEMMA3_PATTERN: usize = 6;

/// Refuses shapes that no model has, before anything is sized by them. `key_of` names a field
/// as the checkpoint does.
fn check(path: &Path, spec: &ModelSpec, key_of: fn(&str) -> String) -> Result<(), LoadError> {
    let bounded = [
        ("layers", spec.layers, 1024),
        ("hidden", spec.hidden, 1 << 17),
        ("ffn", spec.ffn, 1 << 20),
        ("heads", spec.heads, 1 << 12),
        ("kv_heads", spec.kv_heads, 1 << 12),
        ("head_dim", spec.head_dim, 1 << 12),
        ("vocab", spec.vocab, crate::sampler::MAX_VOCAB),
        ("context", spec.context, 1 << 28),
        ("experts", spec.moe.as_ref().map_or(1, |m| m.experts), 4096),
        ("expert_ffn", spec.moe.as_ref().map_or(1, |m| m.ffn), 1 << 20),
        ("window", spec.window.unwrap_or(1), 1 << 28),
        ("pattern", spec.global_every.unwrap_or(1), 1024),
    ];
    for (field, value, limit) in bounded {
        if value == 0 || value > limit {
            let reason = format!("must be between 1 and {limit}, is {value}");
            return Err(LoadError::config(path, &key_of(field), reason));
        }
    }
    if !spec.heads.is_multiple_of(spec.kv_heads) {
        let reason = format!("{} does not divide {} heads", spec.kv_heads, spec.heads);
        return Err(LoadError::config(path, &key_of("kv_heads"), reason));
    }
    if !spec.head_dim.is_multiple_of(2) {
        let reason = format!("must be even, is {}", spec.head_dim);
        return Err(LoadError::config(path, &key_of("head_dim"), reason));
    }
    if let Some(moe) = &spec.moe
        && (moe.top_k == 0 || moe.top_k > moe.experts)
    {
        let reason = format!("must be between 1 and {} experts, is {}", moe.experts, moe.top_k);
        return Err(LoadError::config(path, &key_of("top_k"), reason));
    }
    if !(spec.rms_eps > 0.0 && spec.rms_eps < 1.0) {
        let reason = format!("must be between 0 and 1, is {}", spec.rms_eps);
        return Err(LoadError::config(path, &key_of("rms_eps"), reason));
    }
    for cap in [spec.final_softcap, spec.attention_softcap].into_iter().flatten() {
        if !(cap.is_finite() && cap > 0.0) {
            let reason = format!("must be positive, is {cap}");
            return Err(LoadError::config(path, &key_of("softcap"), reason));
        }
    }
    for scale in [spec.attention_scale, spec.embed_scale] {
        if !(scale.is_finite() && scale > 0.0) {
            let reason = format!("gives a scale of {scale}");
            return Err(LoadError::config(path, &key_of("scale"), reason));
        }
    }
    for rope in std::iter::once(&spec.rope).chain(&spec.rope_local) {
        check_rope(path, rope, spec.head_dim, key_of)?;
    }
    Ok(())
}

fn check_rope(
    path: &Path,
    rope: &RopeSpec,
    head_dim: usize,
    key_of: fn(&str) -> String,
) -> Result<(), LoadError> {
    let refuse = |field, reason| Err(LoadError::config(path, &key_of(field), reason));
    if !(rope.theta.is_finite() && rope.theta >= 1.0) {
        return refuse("theta", format!("must be at least 1, is {}", rope.theta));
    }
    let sound = |x: &f64| x.is_finite() && *x > 0.0;
    match &rope.scaling {
        RopeScaling::None => Ok(()),
        RopeScaling::Linear { factor } if sound(factor) => Ok(()),
        RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_context }
            if [factor, low_freq_factor, high_freq_factor].into_iter().all(sound)
                && high_freq_factor > low_freq_factor
                && *original_context > 0 =>
        {
            Ok(())
        }
        RopeScaling::Factors(f)
            if f.len() == head_dim / 2 && f.iter().all(|x| x.is_finite() && *x > 0.0) =>
        {
            Ok(())
        }
        other => refuse("scaling", format!("makes no sense: {other:?}")),
    }
}
