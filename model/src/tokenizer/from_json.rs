//! A tokenizer from Hugging Face's `tokenizer.json` and the files beside it.

use super::Tokenizer;
use super::model::{AnyModel, Engine};
use super::pieces::{Pieces, Spelling};
use crate::error::LoadError;
use serde_json::Value;
use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;

/// What `tokenizer_config.json`, `generation_config.json` and `config.json` add.
#[derive(Debug, Clone, Default)]
pub(crate) struct Settings {
    pub(crate) tokenizer: Value,
    pub(crate) generation: Value,
    pub(crate) config: Value,
}

/// Builds the tokenizer described by `json`, the text of the file at `path`.
pub(crate) fn from_json(
    path: &Path,
    json: &str,
    settings: &Settings,
) -> Result<Tokenizer, LoadError> {
    let value: Value = serde_json::from_str(json)
        .map_err(|e| LoadError::not_a_model(path, format!("is not valid JSON: {e}")))?;
    check_model(path, &value)?;
    let whole = parse(path, json)?;
    let spelling = spelling(value.get("decoder"));

    let mut engine = Engine::new(AnyModel::Library(Arc::new(whole.get_model().clone())));
    let refuse = |e: tokenizers::Error| LoadError::tokenizer(path, e.to_string());
    engine.with_normalizer(whole.get_normalizer().cloned()).map_err(refuse)?;
    engine.with_pre_tokenizer(whole.get_pre_tokenizer().cloned());
    engine.with_post_processor(whole.get_post_processor().cloned());
    engine.with_added_vocabulary(whole.get_added_vocabulary().clone());

    let pieces = pieces(path, &whole, spelling)?;
    let (bos, add_bos) = bos(&engine, settings);
    let stop_ids = stop_ids(&engine, settings, pieces.len());
    Ok(Tokenizer::new(engine, pieces, bos, add_bos, stop_ids))
}

/// The library takes some things on trust that would make it panic or draw lots.
fn check_model(path: &Path, json: &Value) -> Result<(), LoadError> {
    let model = json.get("model").unwrap_or(&Value::Null);
    let refuse = |reason: String| Err(LoadError::tokenizer(path, reason));
    match model.get("type").and_then(Value::as_str) {
        Some("BPE") | None => {}
        Some(other) => {
            return refuse(format!("model type '{other}' is not supported; supported is BPE"));
        }
    }
    if model.get("dropout").is_some_and(|d| d.as_f64() != Some(0.0) && !d.is_null()) {
        return refuse("its merges are random (dropout), which is not supported".into());
    }
    for key in ["continuing_subword_prefix", "end_of_word_suffix"] {
        if model.get(key).and_then(Value::as_str).is_some_and(|s| !s.is_empty()) {
            return refuse(format!("model.{key} is not supported"));
        }
    }
    let Some(vocab) = model.get("vocab").and_then(Value::as_object) else {
        return refuse("model.vocab must be an object".into());
    };
    let merges = model.get("merges").and_then(Value::as_array);
    for merge in merges.into_iter().flatten() {
        let union = match merge {
            Value::String(pair) => pair.split_once(' ').map(|(a, b)| format!("{a}{b}")),
            Value::Array(pair) => match pair.as_slice() {
                [Value::String(a), Value::String(b)] => Some(format!("{a}{b}")),
                _ => None,
            },
            _ => None,
        };
        if union.is_none_or(|u| !vocab.contains_key(&u)) {
            return refuse(format!("the merge {merge} does not make a token"));
        }
    }
    Ok(())
}

/// Parses with the library; a panic in it is an error of the file.
fn parse(path: &Path, json: &str) -> Result<tokenizers::Tokenizer, LoadError> {
    let parsed = std::panic::catch_unwind(|| tokenizers::Tokenizer::from_bytes(json.as_bytes()));
    match parsed {
        Ok(Ok(whole)) => Ok(whole),
        Ok(Err(e)) => Err(LoadError::tokenizer(path, e.to_string())),
        Err(_) => Err(LoadError::tokenizer(path, "the file makes its parser panic")),
    }
}

/// How tokens spell bytes, by the decoder that would undo it.
fn spelling(decoder: Option<&Value>) -> Spelling {
    let text = decoder.map(Value::to_string).unwrap_or_default();
    if text.contains("\"ByteLevel\"") {
        Spelling::ByteLevel
    } else if text.contains("\"ByteFallback\"") || text.contains("\"Metaspace\"") {
        Spelling::SentencePiece
    } else {
        Spelling::Plain
    }
}

fn pieces(
    path: &Path,
    whole: &tokenizers::Tokenizer,
    spelling: Spelling,
) -> Result<Pieces, LoadError> {
    let vocab = whole.get_vocab(true);
    let len = vocab.values().max().map_or(0, |m| *m as usize + 1);
    if len > crate::sampler::MAX_VOCAB {
        return Err(LoadError::tokenizer(path, format!("has a token id of {}", len - 1)));
    }
    let mut bytes: Vec<Vec<u8>> = vec![Vec::new(); len];
    for (token, id) in &vocab {
        if let Some(slot) = bytes.get_mut(*id as usize) {
            *slot = spelling.bytes(token);
        }
    }
    let mut special = vec![false; len];
    for (id, token) in whole.get_added_tokens_decoder() {
        if let Some(slot) = bytes.get_mut(id as usize) {
            *slot = token.content.into_bytes();
        }
        if let Some(slot) = special.get_mut(id as usize) {
            *slot = token.special;
        }
    }
    let mut pieces = Pieces::default();
    for (bytes, special) in bytes.iter().zip(special) {
        pieces.push(bytes, special);
    }
    Ok(pieces)
}

/// The token that the post-processor puts before an empty text, or that the settings name.
fn bos(engine: &Engine, settings: &Settings) -> (Option<u32>, bool) {
    let named = token_id(engine, settings.tokenizer.get("bos_token"));
    let added = engine.encode_fast("", true).ok().and_then(|e| e.get_ids().first().copied());
    match added {
        // A post-processor that only appends an end is not a beginning.
        Some(id) if named.is_none_or(|n| n == id) => (Some(id), true),
        _ => {
            let wanted = settings.tokenizer.get("add_bos_token").and_then(Value::as_bool);
            (named, wanted == Some(true))
        }
    }
}

/// `generation_config.json` knows best (a number or a list), then the model's configuration,
/// then the tokenizer's `eos_token`; all that are there count.
fn stop_ids(engine: &Engine, settings: &Settings, vocab: usize) -> BTreeSet<u32> {
    let mut ids = BTreeSet::new();
    for json in [&settings.generation, &settings.config] {
        match json.get("eos_token_id") {
            Some(Value::Array(list)) => ids.extend(list.iter().filter_map(Value::as_u64)),
            Some(value) => ids.extend(value.as_u64()),
            None => {}
        }
    }
    let mut ids: BTreeSet<u32> = ids.into_iter().filter_map(|id| u32::try_from(id).ok()).collect();
    ids.retain(|id| (*id as usize) < vocab);
    ids.extend(token_id(engine, settings.tokenizer.get("eos_token")));
    ids
}

/// A token named in `tokenizer_config.json`: its text, or an object with its `content`.
fn token_id(engine: &Engine, value: Option<&Value>) -> Option<u32> {
    let text = value.and_then(|v| v.as_str().or_else(|| v.get("content")?.as_str()))?;
    engine.token_to_id(text)
}
