//! What the gateway needs of a model's text side. The real tokenizer implements [`TextModel`] in
//! the composition; [`ByteModel`] is the one of the hash engine, which has no tokenizer.

use std::borrow::Cow;
use std::sync::Arc;

/// A chat message after validation: text only.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ChatMessage {
    /// `system`, `user` or `assistant`.
    pub role: String,
    pub content: String,
}

/// Why text did not become tokens.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TextError {
    /// The client's messages do not suit the model's template (400).
    #[error("the chat template refused these messages: {0}")]
    Template(String),
    /// Anything else is ours (500).
    #[error("tokenizer: {0}")]
    Tokenizer(String),
}

/// Turns text into tokens and back.
pub trait TextModel: Send + Sync + 'static {
    /// Number of token ids.
    fn vocab(&self) -> u32;
    /// Longest sequence the model knows, in tokens.
    fn context(&self) -> u32;
    /// Tokens of a plain prompt, with whatever the model wants in front of it (BOS).
    fn encode(&self, text: &str) -> Result<Vec<u32>, TextError>;
    /// Tokens of a conversation, up to where the assistant's answer begins.
    fn render_chat(&self, messages: &[ChatMessage]) -> Result<Vec<u32>, TextError>;
    /// Drawing one of these ends an answer; they are never shown.
    fn stop_tokens(&self) -> &[u32];
    /// A token's own bytes, not always whole characters; a special token's name.
    fn token_bytes(&self, id: u32) -> Cow<'_, [u8]>;
    /// Fresh state for one answer. Special tokens give no text.
    fn detokenizer(self: Arc<Self>) -> Box<dyn Detokenizer>;
}

/// Incremental detokenisation: the concatenation of all that is returned is the text.
pub trait Detokenizer: Send {
    /// Text that became complete with this token; never half a character.
    fn push(&mut self, id: u32) -> String;
    /// The answer is over: what could not be completed, if anything is to be shown of it.
    fn finish(&mut self) -> String;
}

/// Ids 0..256 are bytes, then come the specials, then words `w258`, `w259`, ...: any vocabulary
/// size, any sequence of ids has a text, and every UTF-8 text has ids.
#[derive(Debug, Clone)]
pub struct ByteModel {
    vocab: u32,
    context: u32,
}

impl ByteModel {
    /// Ends an answer.
    pub const END: u32 = 256;
    /// Begins a chat message.
    pub const MESSAGE: u32 = 257;

    /// `vocab` is at least 258.
    pub fn new(vocab: u32, context: u32) -> Self {
        Self { vocab: vocab.max(258), context }
    }
}

impl TextModel for ByteModel {
    fn vocab(&self) -> u32 {
        self.vocab
    }

    fn context(&self) -> u32 {
        self.context
    }

    fn encode(&self, text: &str) -> Result<Vec<u32>, TextError> {
        Ok(text.bytes().map(u32::from).collect())
    }

    fn render_chat(&self, messages: &[ChatMessage]) -> Result<Vec<u32>, TextError> {
        let mut ids = Vec::new();
        for message in messages {
            ids.push(Self::MESSAGE);
            ids.extend(format!("{}\n{}", message.role, message.content).bytes().map(u32::from));
            ids.push(Self::END);
        }
        ids.push(Self::MESSAGE);
        ids.extend(b"assistant\n".iter().map(|b| u32::from(*b)));
        Ok(ids)
    }

    fn stop_tokens(&self) -> &[u32] {
        &[Self::END]
    }

    fn token_bytes(&self, id: u32) -> Cow<'_, [u8]> {
        match (u8::try_from(id), id) {
            (Ok(byte), _) => Cow::Owned(vec![byte]),
            (_, Self::END) => Cow::Borrowed(b"<|end|>"),
            (_, Self::MESSAGE) => Cow::Borrowed(b"<|message|>"),
            _ => Cow::Owned(format!(" w{id}").into_bytes()),
        }
    }

    fn detokenizer(self: Arc<Self>) -> Box<dyn Detokenizer> {
        Box::new(ByteDetokenizer { model: self, held: Vec::new(), in_invalid_run: false })
    }
}

struct ByteDetokenizer {
    model: Arc<ByteModel>,
    /// Beginning of a character whose end has not come: at most three bytes.
    held: Vec<u8>,
    /// The last character given out stands for invalid bytes.
    in_invalid_run: bool,
}

impl Detokenizer for ByteDetokenizer {
    fn push(&mut self, id: u32) -> String {
        if matches!(id, ByteModel::END | ByteModel::MESSAGE) {
            return String::new();
        }
        self.held.extend_from_slice(&self.model.token_bytes(id));
        self.complete()
    }

    fn finish(&mut self) -> String {
        // A character that was cut off by the end of the answer is not invalid; it is not there.
        self.held.clear();
        String::new()
    }
}

impl ByteDetokenizer {
    /// The text of all whole characters. Bytes that can never become one are U+FFFD, one for an
    /// unbroken run of them, as the real detokenizer has it.
    fn complete(&mut self) -> String {
        let bytes = std::mem::take(&mut self.held);
        let mut text = String::new();
        let mut used = 0;
        for chunk in bytes.utf8_chunks() {
            text.push_str(chunk.valid());
            self.in_invalid_run &= chunk.valid().is_empty();
            used += chunk.valid().len() + chunk.invalid().len();
            let unfinished = std::str::from_utf8(chunk.invalid())
                .is_err_and(|error| error.error_len().is_none());
            if unfinished && used == bytes.len() {
                self.held.extend_from_slice(chunk.invalid());
            } else if !chunk.invalid().is_empty() && !self.in_invalid_run {
                self.in_invalid_run = true;
                text.push(char::REPLACEMENT_CHARACTER);
            }
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text_of(ids: &[u32]) -> Vec<String> {
        let mut detokenizer = Arc::new(ByteModel::new(512, 64)).detokenizer();
        let mut out: Vec<String> = ids.iter().map(|id| detokenizer.push(*id)).collect();
        out.push(detokenizer.finish());
        out
    }

    #[test]
    fn bytes_become_text_a_character_at_a_time() {
        let text = "ďábelské 🫠 龜 👩‍👩‍👧 T́";
        let ids: Vec<u32> = text.bytes().map(u32::from).collect();
        let pieces = text_of(&ids);
        assert_eq!(pieces.concat(), text);
        assert!(pieces.iter().all(|p| p.chars().count() <= 1));
    }

    #[test]
    fn a_character_cut_off_by_the_end_is_not_shown() {
        assert_eq!(text_of(&[0x61, 0xf0, 0x9f, 0xab]).concat(), "a");
    }

    #[test]
    fn bytes_that_are_no_character_are_one_replacement() {
        assert_eq!(text_of(&[0xf0, 0x9f, 0x61]).concat(), "\u{fffd}a");
        assert_eq!(text_of(&[0xff, 0xfe, 0xf0, 0x61, 0xff]).concat(), "\u{fffd}a\u{fffd}");
    }
}
