//! Text to token ids and back.
//!
//! A tokenizer is built from `tokenizer.json` or from a GGUF file's own metadata; either way the
//! crate `tokenizers` finds special and added tokens, normalises and pre-tokenises, and a [`model`]
//! (its BPE, or our SentencePiece) does the rest. Decoding is ours: ids map to bytes
//! ([`Pieces`]), and bytes become text only in whole characters ([`Detokenizer`]).
//!
//! Not known here: chat templates, stop strings, who asks.

mod detokenizer;
mod from_gguf;
mod from_json;
mod model;
mod pieces;
mod sentencepiece;

pub use detokenizer::{Detokenizer, decode_bytes};
pub(crate) use from_gguf::from_gguf;
pub(crate) use from_json::{Settings, from_json};
pub use pieces::Pieces;

use model::Engine;
use std::collections::BTreeSet;

/// A model's tokenizer. Share it in an `Arc`.
pub struct Tokenizer {
    /// The same engine twice, with special tokens recognised and taken as plain text.
    recognising: Engine,
    plain: Engine,
    pieces: Pieces,
    bos: Option<u32>,
    add_bos: bool,
    stop_ids: BTreeSet<u32>,
}

/// Text could not be turned into tokens.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("cannot tokenise {bytes} bytes of text: {reason}")]
pub struct EncodeError {
    pub bytes: usize,
    pub reason: String,
}

impl Tokenizer {
    fn new(
        engine: Engine,
        pieces: Pieces,
        bos: Option<u32>,
        add_bos: bool,
        stop_ids: BTreeSet<u32>,
    ) -> Self {
        let mut plain = engine.clone();
        plain.set_encode_special_tokens(true);
        let add_bos = add_bos && bos.is_some();
        Self { recognising: engine, plain, pieces, bos, add_bos, stop_ids }
    }

    /// The ids of `text`, nothing added. With `recognise_special`, special tokens written out in
    /// the text (`<|im_end|>`) become themselves; without, they are text like any other.
    pub fn encode(&self, text: &str, recognise_special: bool) -> Result<Vec<u32>, EncodeError> {
        let engine = if recognise_special { &self.recognising } else { &self.plain };
        match engine.encode_fast(text, false) {
            Ok(encoding) => Ok(encoding.get_ids().to_vec()),
            Err(e) => Err(EncodeError { bytes: text.len(), reason: e.to_string() }),
        }
    }

    /// As [`encode`](Self::encode), with the beginning-of-sequence token in front where the model
    /// wants one and the text (a rendered chat template, say) does not begin with it.
    pub fn encode_prompt(
        &self,
        text: &str,
        recognise_special: bool,
    ) -> Result<Vec<u32>, EncodeError> {
        let mut ids = self.encode(text, recognise_special)?;
        if let Some(bos) = self.bos.filter(|_| self.add_bos)
            && ids.first() != Some(&bos)
        {
            ids.insert(0, bos);
        }
        Ok(ids)
    }

    /// The text of `ids`: the same that a [`Detokenizer`] gives piece by piece.
    pub fn decode(&self, ids: &[u32], skip_special: bool) -> String {
        let mut bytes = Vec::new();
        for id in ids {
            if !(skip_special && self.is_special(*id)) {
                bytes.extend_from_slice(self.id_to_bytes(*id));
            }
        }
        decode_bytes(&bytes)
    }

    /// The bytes that `id` stands for; none for an id outside the vocabulary.
    pub fn id_to_bytes(&self, id: u32) -> &[u8] {
        self.pieces.get(id).unwrap_or_default()
    }

    /// Whether `id` is a control token, which has no place in text meant for people.
    pub fn is_special(&self, id: u32) -> bool {
        self.pieces.is_special(id)
    }

    /// The id of a token by its exact text, special tokens included.
    pub fn token_to_id(&self, token: &str) -> Option<u32> {
        self.recognising.token_to_id(token)
    }

    /// One more than the greatest id. The model's own vocabulary may be padded beyond it.
    pub fn vocab_size(&self) -> usize {
        self.pieces.len()
    }

    /// The beginning-of-sequence token, and whether prompts get it.
    pub fn bos(&self) -> Option<u32> {
        self.bos
    }
    pub fn adds_bos(&self) -> bool {
        self.add_bos
    }

    /// Tokens that end a generation: end of sequence, of turn, of message, as the model's files
    /// declare them. Ascending.
    pub fn stop_ids(&self) -> &BTreeSet<u32> {
        &self.stop_ids
    }
}

impl std::fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tokenizer")
            .field("vocab_size", &self.vocab_size())
            .field("bos", &self.bos)
            .field("add_bos", &self.add_bos)
            .field("stop_ids", &self.stop_ids)
            .finish_non_exhaustive()
    }
}
