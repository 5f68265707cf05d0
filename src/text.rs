//! The real tokenizer and chat template, as the gateway wants them.

use std::borrow::Cow;
use std::sync::Arc;

use dunlin_actors::gateway::{ChatMessage, Detokenizer, TextError, TextModel};
use dunlin_model::chat::{ChatError, ChatInput, ChatTemplate};
use dunlin_model::error::LoadError;
use dunlin_model::loader::ModelFiles;
use dunlin_model::tokenizer::{self, Tokenizer};
use serde_json::json;

/// A model's text side.
pub struct ModelText {
    tokenizer: Arc<Tokenizer>,
    template: ChatTemplate,
    stop: Vec<u32>,
    vocab: u32,
    context: u32,
}

impl ModelText {
    pub fn open(files: &ModelFiles) -> Result<ModelText, LoadError> {
        let tokenizer = Arc::new(files.tokenizer()?);
        let template = files.chat_template(&tokenizer)?;
        let stop = tokenizer.stop_ids().iter().copied().collect();
        let size = |size: usize| u32::try_from(size).unwrap_or(u32::MAX);
        let (vocab, context) = (size(files.spec().vocab), size(files.spec().context));
        Ok(ModelText { tokenizer, template, stop, vocab, context })
    }
}

impl TextModel for ModelText {
    fn vocab(&self) -> u32 {
        self.vocab
    }

    fn context(&self) -> u32 {
        self.context
    }

    /// Special tokens written out in a plain prompt are recognised, as other servers do.
    fn encode(&self, text: &str) -> Result<Vec<u32>, TextError> {
        let encoded = self.tokenizer.encode_prompt(text, true);
        encoded.map_err(|e| TextError::Tokenizer(e.to_string()))
    }

    fn render_chat(&self, messages: &[ChatMessage]) -> Result<Vec<u32>, TextError> {
        let message = |m: &ChatMessage| json!({"role": m.role, "content": m.content});
        let now = dunlin_runtime::wall::unix_seconds();
        let input = ChatInput {
            messages: messages.iter().map(message).collect(),
            tools: None,
            add_generation_prompt: true,
            now: i64::try_from(now).unwrap_or(0),
        };
        let text = self.template.render(&input).map_err(|e| match e {
            ChatError::Refused(reason) => TextError::Template(reason),
            other => TextError::Template(other.to_string()),
        })?;
        self.encode(&text)
    }

    fn stop_tokens(&self) -> &[u32] {
        &self.stop
    }

    fn token_bytes(&self, id: u32) -> Cow<'_, [u8]> {
        Cow::Borrowed(self.tokenizer.id_to_bytes(id))
    }

    fn detokenizer(self: Arc<Self>) -> Box<dyn Detokenizer> {
        let inner = tokenizer::Detokenizer::new(self.tokenizer.clone(), true);
        Box::new(Incremental(Some(inner)))
    }
}

/// `finish` takes the model's detokenizer, which ends by value.
struct Incremental(Option<tokenizer::Detokenizer>);

impl Detokenizer for Incremental {
    fn push(&mut self, id: u32) -> String {
        self.0.as_mut().map(|inner| inner.push(id)).unwrap_or_default()
    }

    fn finish(&mut self) -> String {
        self.0.take().map(|inner| inner.finish()).unwrap_or_default()
    }
}
