//! The text side of a real model: its own tokenizer and chat template.

use super::text::{ChatMessage, Detokenizer, TextError, TextModel};
use dunlin_model::chat::{ChatError, ChatInput, ChatTemplate};
use dunlin_model::tokenizer::{self, Tokenizer};
use serde_json::json;
use std::borrow::Cow;
use std::sync::Arc;

/// A tokenizer and a template as the model's files declare them.
#[derive(Debug)]
pub struct ModelText {
    tokenizer: Arc<Tokenizer>,
    template: ChatTemplate,
    stop_tokens: Vec<u32>,
    vocab: u32,
    context: u32,
}

impl ModelText {
    /// `vocab` is the number of logits, which may be more than the tokenizer has ids; `context` is
    /// the longest sequence, in tokens.
    pub fn new(tokenizer: Tokenizer, template: ChatTemplate, vocab: u32, context: u32) -> Self {
        let stop_tokens = tokenizer.stop_ids().iter().copied().collect();
        Self { tokenizer: Arc::new(tokenizer), template, stop_tokens, vocab, context }
    }
}

impl TextModel for ModelText {
    fn vocab(&self) -> u32 {
        self.vocab
    }

    fn context(&self) -> u32 {
        self.context
    }

    fn encode(&self, text: &str) -> Result<Vec<u32>, TextError> {
        let ids = self.tokenizer.encode_prompt(text, true);
        ids.map_err(|error| TextError::Tokenizer(error.to_string()))
    }

    fn render_chat(&self, messages: &[ChatMessage]) -> Result<Vec<u32>, TextError> {
        let messages = messages.iter().map(|m| json!({"role": m.role, "content": m.content}));
        let now = i64::try_from(super::http::unix_seconds()).unwrap_or(i64::MAX);
        let input = ChatInput {
            messages: messages.collect(),
            tools: None,
            add_generation_prompt: true,
            now,
        };
        let prompt = self.template.render(&input).map_err(|error| match error {
            ChatError::Compile(_) => TextError::Tokenizer(error.to_string()),
            // Either way the template would take other messages: the client's to mend.
            ChatError::Refused(_) | ChatError::Failed(_) | ChatError::Unbounded => {
                TextError::Template(error.to_string())
            }
        })?;
        self.encode(&prompt)
    }

    fn stop_tokens(&self) -> &[u32] {
        &self.stop_tokens
    }

    fn token_bytes(&self, id: u32) -> Cow<'_, [u8]> {
        Cow::Borrowed(self.tokenizer.id_to_bytes(id))
    }

    fn detokenizer(self: Arc<Self>) -> Box<dyn Detokenizer> {
        Box::new(tokenizer::Detokenizer::new(self.tokenizer.clone(), true))
    }
}

impl Detokenizer for tokenizer::Detokenizer {
    fn push(&mut self, id: u32) -> String {
        tokenizer::Detokenizer::push(self, id)
    }

    fn finish(&mut self) -> String {
        self.clone().finish()
    }
}
