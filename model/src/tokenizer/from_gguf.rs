//! A tokenizer from `tokenizer.ggml.*` metadata.
//!
//! Two models exist there for the families we run: `gpt2` (byte-level BPE with merges, whose
//! pre-tokenizer is known by name only) and `llama` (SentencePiece BPE by scores). The regular
//! expressions are those of llama.cpp's `llama-vocab.cpp`.

use super::Tokenizer;
use super::model::{AnyModel, Engine};
use super::pieces::{Pieces, Spelling};
use super::sentencepiece::{SentencePiece, TokenKind};
use crate::error::LoadError;
use crate::gguf::{Gguf, Value};
use std::collections::BTreeSet;
use std::sync::Arc;
use tokenizers::models::ModelWrapper;
use tokenizers::models::bpe::{BPE, Merges, Vocab};
use tokenizers::normalizers::{Prepend, Replace, Sequence as Normalizers};
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::pre_tokenizers::sequence::Sequence as PreTokenizers;
use tokenizers::pre_tokenizers::split::{Split, SplitPattern};
use tokenizers::{AddedToken, NormalizerWrapper, PreTokenizerWrapper, SplitDelimiterBehavior};

const GPT2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";
const LLAMA3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const QWEN2: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const TEKKEN: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const DIGIT: &str = r"\p{N}";

/// How a named pre-tokenizer splits text, and what goes with it.
struct Pre {
    /// Each splits what the ones before it left; matches stand alone.
    patterns: &'static [&'static str],
    /// A whole word that is a token is taken as it is.
    ignore_merges: bool,
    add_bos: bool,
}

/// Builds the tokenizer in `file`.
pub(crate) fn from_gguf(file: &Gguf) -> Result<Tokenizer, LoadError> {
    let vocab = Vocabulary::read(file)?;
    const MODEL: &str = "tokenizer.ggml.model";
    match file.require(MODEL)?.str() {
        Some("gpt2") => byte_level(file, vocab),
        Some("llama") => sentence_piece(file, vocab),
        other => {
            let found = other.unwrap_or("not a string");
            let reason = format!("is '{found}'; supported are gpt2 and llama");
            Err(LoadError::config(file.path(), MODEL, reason))
        }
    }
}

fn byte_level(file: &Gguf, vocab: Vocabulary) -> Result<Tokenizer, LoadError> {
    let pre = pre_tokenizer(file)?;
    let ids: Vocab = (0u32..).zip(&vocab.tokens).map(|(id, t)| (t.clone(), id)).collect();
    let merges = merges(file, &ids)?;
    let refuse = |e: tokenizers::Error| LoadError::tokenizer(file.path(), e.to_string());
    let bpe = BPE::builder()
        .vocab_and_merges(ids, merges)
        .ignore_merges(pre.ignore_merges)
        .build()
        .map_err(refuse)?;
    let mut engine = Engine::new(AnyModel::Library(Arc::new(ModelWrapper::BPE(bpe))));
    let mut steps: Vec<PreTokenizerWrapper> = Vec::new();
    for pattern in pre.patterns {
        let pattern = SplitPattern::Regex((*pattern).to_owned());
        let split = Split::new(pattern, SplitDelimiterBehavior::Isolated, false);
        steps.push(split.map_err(refuse)?.into());
    }
    steps.push(ByteLevel::new(false, false, false).into());
    engine.with_pre_tokenizer(Some(PreTokenizers::new(steps)));
    engine.add_tokens(vocab.added()).map_err(refuse)?;
    let add_bos = vocab.add_bos.unwrap_or(pre.add_bos);
    vocab.finish(engine, Spelling::ByteLevel, add_bos)
}

fn sentence_piece(file: &Gguf, vocab: Vocabulary) -> Result<Tokenizer, LoadError> {
    const SCORES: &str = "tokenizer.ggml.scores";
    let scores = file.require(SCORES)?.array().and_then(|a| a.floats());
    let scores: Vec<f32> = scores
        .ok_or_else(|| LoadError::config(file.path(), SCORES, "must be an array of floats"))?
        .map(|s| s as f32)
        .collect();
    if scores.len() != vocab.tokens.len() {
        let reason = format!("has {} entries for {} tokens", scores.len(), vocab.tokens.len());
        return Err(LoadError::config(file.path(), SCORES, reason));
    }
    let model = SentencePiece::new(vocab.tokens.clone(), &scores, &vocab.kinds, vocab.unknown);
    let mut engine = Engine::new(AnyModel::SentencePiece(Arc::new(model)));
    let refuse = |e: tokenizers::Error| LoadError::tokenizer(file.path(), e.to_string());
    let mut steps: Vec<NormalizerWrapper> = Vec::new();
    if vocab.add_space_prefix.unwrap_or(true) {
        steps.push(Prepend::new("▁".to_owned()).into());
    }
    steps.push(Replace::new(" ", "▁").map_err(refuse)?.into());
    engine.with_normalizer(Some(Normalizers::new(steps))).map_err(refuse)?;
    engine.add_tokens(vocab.added()).map_err(refuse)?;
    let add_bos = vocab.add_bos.unwrap_or(true);
    vocab.finish(engine, Spelling::SentencePiece, add_bos)
}

/// The metadata both models share.
struct Vocabulary {
    tokens: Vec<String>,
    kinds: Vec<TokenKind>,
    bos: Option<u32>,
    unknown: Option<u32>,
    stop_ids: BTreeSet<u32>,
    add_bos: Option<bool>,
    add_space_prefix: Option<bool>,
}

impl Vocabulary {
    fn read(file: &Gguf) -> Result<Self, LoadError> {
        const TOKENS: &str = "tokenizer.ggml.tokens";
        let tokens = file.require(TOKENS)?.array().and_then(|a| a.strings());
        let tokens: Vec<String> = tokens
            .ok_or_else(|| LoadError::config(file.path(), TOKENS, "must be an array of strings"))?
            .map(str::to_owned)
            .collect();
        if tokens.is_empty() || tokens.len() > crate::sampler::MAX_VOCAB {
            let reason = format!("has {} entries", tokens.len());
            return Err(LoadError::config(file.path(), TOKENS, reason));
        }
        let kinds = kinds(file, tokens.len())?;
        let id = |key: &str| id(file, key, tokens.len());
        let bos = id("tokenizer.ggml.bos_token_id")?;
        let unknown = id("tokenizer.ggml.unknown_token_id")?;
        let mut stop_ids = BTreeSet::new();
        for key in ["eos", "eot", "eom"] {
            stop_ids.extend(id(&format!("tokenizer.ggml.{key}_token_id"))?);
        }
        stop_ids.extend(well_known_ends(&tokens, &kinds));
        let add_bos = flag(file, "tokenizer.ggml.add_bos_token")?;
        let add_space_prefix = flag(file, "tokenizer.ggml.add_space_prefix")?;
        Ok(Self { tokens, kinds, bos, unknown, stop_ids, add_bos, add_space_prefix })
    }

    /// Tokens found in text before anything else looks at it.
    fn added(&self) -> Vec<AddedToken> {
        let token = |(text, kind): (&String, &TokenKind)| match kind {
            TokenKind::Control | TokenKind::Unknown => Some(AddedToken::from(text.clone(), true)),
            TokenKind::UserDefined => Some(AddedToken::from(text.clone(), false).normalized(false)),
            _ => None,
        };
        self.tokens.iter().zip(&self.kinds).filter_map(token).collect()
    }

    fn finish(
        self,
        engine: Engine,
        spelling: Spelling,
        add_bos: bool,
    ) -> Result<Tokenizer, LoadError> {
        let mut pieces = Pieces::default();
        for (token, kind) in self.tokens.iter().zip(&self.kinds) {
            match kind {
                TokenKind::Control | TokenKind::Unknown => pieces.push(token.as_bytes(), true),
                TokenKind::UserDefined => pieces.push(token.as_bytes(), false),
                _ => pieces.push(&spelling.bytes(token), false),
            }
        }
        Ok(Tokenizer::new(engine, pieces, self.bos, add_bos, self.stop_ids))
    }
}

/// Ends of a turn that many files carry as control tokens but do not declare.
fn well_known_ends(tokens: &[String], kinds: &[TokenKind]) -> Vec<u32> {
    const ENDS: [&str; 6] =
        ["<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<|endoftext|>", "</s>"];
    (0u32..)
        .zip(tokens.iter().zip(kinds))
        .filter(|(_, (t, k))| **k == TokenKind::Control && ENDS.contains(&t.as_str()))
        .map(|(id, _)| id)
        .collect()
}

fn kinds(file: &Gguf, tokens: usize) -> Result<Vec<TokenKind>, LoadError> {
    const KEY: &str = "tokenizer.ggml.token_type";
    let Some(value) = file.metadata().get(KEY) else {
        return Ok(vec![TokenKind::Normal; tokens]);
    };
    let refuse = |reason: String| LoadError::config(file.path(), KEY, reason);
    let list = value.array().and_then(|a| a.ints());
    let list = list.ok_or_else(|| refuse("must be an array of whole numbers".to_owned()))?;
    let kinds = list
        .map(|kind| match kind {
            0 | 1 => Ok(TokenKind::Normal),
            2 => Ok(TokenKind::Unknown),
            3 => Ok(TokenKind::Control),
            4 => Ok(TokenKind::UserDefined),
            5 => Ok(TokenKind::Unused),
            6 => Ok(TokenKind::Byte),
            other => Err(refuse(format!("has the unknown kind {other}"))),
        })
        .collect::<Result<Vec<_>, _>>()?;
    match kinds.len() == tokens {
        true => Ok(kinds),
        false => Err(refuse(format!("has {} entries for {tokens} tokens", kinds.len()))),
    }
}

fn id(file: &Gguf, key: &str, tokens: usize) -> Result<Option<u32>, LoadError> {
    let Some(value) = file.metadata().get(key) else { return Ok(None) };
    match value.int().and_then(|v| u32::try_from(v).ok()) {
        Some(id) if (id as usize) < tokens => Ok(Some(id)),
        _ => {
            let reason = format!("must be a token id below {tokens}, is {value:?}");
            Err(LoadError::config(file.path(), key, reason))
        }
    }
}

fn flag(file: &Gguf, key: &str) -> Result<Option<bool>, LoadError> {
    let value = file.metadata().get(key);
    let wrong =
        |v: &Value| LoadError::config(file.path(), key, format!("must be true or false, is {v:?}"));
    value.map(|v| v.bool().ok_or_else(|| wrong(v))).transpose()
}

/// Merges, each checked to make a token (the library assumes it).
fn merges(file: &Gguf, ids: &Vocab) -> Result<Merges, LoadError> {
    const KEY: &str = "tokenizer.ggml.merges";
    let refuse = |reason: String| LoadError::config(file.path(), KEY, reason);
    let list = file.require(KEY)?.array().and_then(|a| a.strings());
    let list = list.ok_or_else(|| refuse("must be an array of strings".to_owned()))?;
    list.map(|merge| {
        // The space cannot be the first character: it is what a space is spelt with otherwise.
        let at = merge.char_indices().skip(1).find(|(_, c)| *c == ' ').map(|(i, _)| i);
        let pair = at.and_then(|at| Some((merge.get(..at)?, merge.get(at + 1..)?)));
        match pair {
            Some((a, b)) if ids.contains_key(&format!("{a}{b}")) => Ok((a.into(), b.into())),
            _ => Err(refuse(format!("'{merge}' does not make a token"))),
        }
    })
    .collect()
}

fn pre_tokenizer(file: &Gguf) -> Result<Pre, LoadError> {
    const KEY: &str = "tokenizer.ggml.pre";
    let name = match file.metadata().get(KEY) {
        Some(value) => value.str().unwrap_or_default(),
        None => "default",
    };
    let plain = |patterns| Pre { patterns, ignore_merges: false, add_bos: false };
    Ok(match name {
        // What llama.cpp calls 'default' splits punctuation off before GPT-2's expression does
        // and cuts digits into threes after it.
        "default" => plain(&[r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]"]),
        "gpt-2" | "gpt2" | "mpt" | "olmo" | "phi-2" | "jina-es" | "jina-de" => plain(&[GPT2]),
        "smollm" | "starcoder" | "refact" | "command-r" | "codeshell" | "exaone" => {
            plain(&[DIGIT, GPT2])
        }
        "llama3" | "llama-v3" | "llama-bpe" | "falcon3" => {
            Pre { patterns: &[LLAMA3], ignore_merges: true, add_bos: true }
        }
        "tekken" => Pre { patterns: &[TEKKEN], ignore_merges: true, add_bos: true },
        "qwen2" | "deepseek-r1-qwen" | "stablelm2" => plain(&[QWEN2]),
        other => {
            let reason = format!(
                "is '{other}'; supported are default, gpt-2, smollm, starcoder, llama-bpe, \
                 qwen2 and tekken"
            );
            return Err(LoadError::config(file.path(), KEY, reason));
        }
    })
}
