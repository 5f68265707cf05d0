//! The engine: a `tokenizers` pipeline around one of two models, shared by reference.

use super::sentencepiece::SentencePiece;
use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use tokenizers::models::bpe::BpeTrainer;
use tokenizers::models::{ModelWrapper, TrainerWrapper};
use tokenizers::{
    DecoderWrapper, Model, NormalizerWrapper, PostProcessorWrapper, PreTokenizerWrapper, Result,
    Token, TokenizerImpl,
};

/// A tokenizer of the crate `tokenizers` around [`AnyModel`].
pub(super) type Engine = TokenizerImpl<
    AnyModel,
    NormalizerWrapper,
    PreTokenizerWrapper,
    PostProcessorWrapper,
    DecoderWrapper,
>;

/// One model behind any number of engines.
#[derive(Clone)]
pub(super) enum AnyModel {
    Library(Arc<ModelWrapper>),
    SentencePiece(Arc<SentencePiece>),
}

impl Model for AnyModel {
    type Trainer = TrainerWrapper;

    fn tokenize(&self, sequence: &str) -> Result<Vec<Token>> {
        match self {
            AnyModel::Library(m) => m.tokenize(sequence),
            AnyModel::SentencePiece(m) => Ok(m.tokenize(sequence)),
        }
    }
    fn token_to_id(&self, token: &str) -> Option<u32> {
        match self {
            AnyModel::Library(m) => m.token_to_id(token),
            AnyModel::SentencePiece(m) => m.token_to_id(token),
        }
    }
    fn id_to_token(&self, id: u32) -> Option<String> {
        match self {
            AnyModel::Library(m) => m.id_to_token(id),
            AnyModel::SentencePiece(m) => m.id_to_token(id).map(str::to_owned),
        }
    }
    fn get_vocab(&self) -> HashMap<String, u32> {
        match self {
            AnyModel::Library(m) => m.get_vocab(),
            AnyModel::SentencePiece(m) => m.vocab(),
        }
    }
    fn get_vocab_size(&self) -> usize {
        match self {
            AnyModel::Library(m) => m.get_vocab_size(),
            AnyModel::SentencePiece(m) => m.len(),
        }
    }
    fn save(&self, _: &Path, _: Option<&str>) -> Result<Vec<PathBuf>> {
        Err("tokenizers are only read here".into())
    }
    fn get_trainer(&self) -> TrainerWrapper {
        TrainerWrapper::BpeTrainer(BpeTrainer::default())
    }
}
