//! OpenAI's response objects, field for field: chat and legacy completions, whole and in chunks.

use super::answer::{Entry, Piece};
use super::request::Endpoint;
use super::text::TextModel;
use crate::messages::FinishReason;
use serde::Serialize;
use serde_json::{Map, Value, json};
use std::sync::Arc;

/// Token counts of a whole HTTP request.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Totals {
    /// Each prompt once, however many answers it has.
    pub prompt_tokens: u64,
    pub completion_tokens: u64,
    pub cached_tokens: u64,
    /// `node/device` of what served it.
    pub served_by: Vec<String>,
}

/// One answer of a response that is not streamed.
#[derive(Debug, Clone, Default)]
pub struct Whole {
    pub text: String,
    pub entries: Vec<Entry>,
    pub reason: Option<FinishReason>,
}

/// What all objects of one response share, and how to make them.
pub struct Shapes {
    pub endpoint: Endpoint,
    pub id: String,
    pub created: u64,
    pub model: String,
    pub fingerprint: String,
    pub text_model: Arc<dyn TextModel>,
    /// How many alternatives were asked for; `None`: no log probabilities.
    pub logprobs: Option<u32>,
    /// Chunks carry `usage`, null but in the last.
    pub include_usage: bool,
    /// Add Dunlin's own object to the usage: which nodes and devices served it.
    pub details: bool,
}

#[derive(Serialize)]
struct Envelope<'a> {
    id: &'a str,
    object: &'static str,
    created: u64,
    model: &'a str,
    choices: Vec<Value>,
    /// Absent, null, or the counts.
    #[serde(skip_serializing_if = "Option::is_none")]
    usage: Option<Option<Value>>,
    system_fingerprint: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    dunlin: Option<Value>,
}

impl Shapes {
    /// The chunk that begins an answer; legacy completions have none.
    pub fn first_chunk(&self, index: usize) -> Option<String> {
        match self.endpoint {
            Endpoint::Completions => None,
            Endpoint::Chat => {
                let delta = json!({"role": "assistant", "content": "", "refusal": null});
                Some(self.chunk(vec![chat_choice(index, delta, Value::Null, None)]))
            }
        }
    }

    /// The chunk that carries `piece`.
    pub fn piece_chunk(&self, index: usize, piece: &Piece) -> String {
        let choice = match self.endpoint {
            Endpoint::Chat => {
                let delta = json!({"content": piece.text});
                chat_choice(index, delta, self.logprobs_of(&piece.entries), None)
            }
            Endpoint::Completions => {
                let logprobs = self.logprobs_of(&piece.entries);
                text_choice(index, &piece.text, logprobs, None)
            }
        };
        self.chunk(vec![choice])
    }

    /// The chunk that ends an answer.
    pub fn finish_chunk(&self, index: usize, reason: FinishReason) -> String {
        let choice = match self.endpoint {
            Endpoint::Chat => chat_choice(index, json!({}), Value::Null, Some(reason)),
            Endpoint::Completions => text_choice(index, "", Value::Null, Some(reason)),
        };
        self.chunk(vec![choice])
    }

    /// The last chunk, with the counts and no answer; `None` where nobody asked.
    pub fn usage_chunk(&self, totals: &Totals) -> Option<String> {
        if !self.include_usage && !self.details {
            return None;
        }
        let usage = self.include_usage.then(|| Some(usage(totals)));
        Some(self.envelope(self.chunk_object(), vec![], usage, self.details_of(totals)))
    }

    /// A response that is not streamed.
    pub fn whole(&self, answers: &[Whole], totals: &Totals) -> String {
        let choices = answers.iter().enumerate().map(|(index, answer)| {
            let logprobs = self.logprobs_of(&answer.entries);
            match self.endpoint {
                Endpoint::Completions => text_choice(index, &answer.text, logprobs, answer.reason),
                Endpoint::Chat => json!({
                    "index": index,
                    "message": {"role": "assistant", "content": answer.text, "refusal": null},
                    "logprobs": logprobs,
                    "finish_reason": answer.reason.map(reason_name),
                }),
            }
        });
        let object = match self.endpoint {
            Endpoint::Chat => "chat.completion",
            Endpoint::Completions => "text_completion",
        };
        let usage = Some(Some(usage(totals)));
        self.envelope(object, choices.collect(), usage, self.details_of(totals))
    }

    fn chunk(&self, choices: Vec<Value>) -> String {
        self.envelope(self.chunk_object(), choices, self.include_usage.then_some(None), None)
    }

    fn chunk_object(&self) -> &'static str {
        match self.endpoint {
            Endpoint::Chat => "chat.completion.chunk",
            Endpoint::Completions => "text_completion",
        }
    }

    fn envelope(
        &self,
        object: &'static str,
        choices: Vec<Value>,
        usage: Option<Option<Value>>,
        dunlin: Option<Value>,
    ) -> String {
        let envelope = Envelope {
            id: &self.id,
            object,
            created: self.created,
            model: &self.model,
            choices,
            usage,
            system_fingerprint: &self.fingerprint,
            dunlin,
        };
        // Strings, numbers and maps with string keys: nothing here can fail to serialise.
        serde_json::to_string(&envelope).unwrap_or_default()
    }

    fn details_of(&self, totals: &Totals) -> Option<Value> {
        self.details.then(|| json!({"served_by": totals.served_by}))
    }

    fn logprobs_of(&self, entries: &[Entry]) -> Value {
        if self.logprobs.is_none() {
            return Value::Null;
        }
        match self.endpoint {
            Endpoint::Chat => {
                let content: Vec<Value> = entries.iter().map(|e| self.chat_logprob(e)).collect();
                json!({"content": content, "refusal": null})
            }
            Endpoint::Completions if entries.is_empty() => Value::Null,
            Endpoint::Completions => self.legacy_logprobs(entries),
        }
    }

    fn chat_logprob(&self, entry: &Entry) -> Value {
        let top = entry.logprob.iter().flat_map(|l| &l.top).take(self.wanted());
        let top: Vec<Value> = top.map(|(id, logprob)| self.token_logprob(*id, *logprob)).collect();
        let own = entry.logprob.as_ref().map_or(f32::NEG_INFINITY, |l| l.logprob);
        let mut value = self.token_logprob(entry.id, own);
        value["top_logprobs"] = Value::Array(top);
        value
    }

    fn token_logprob(&self, id: u32, logprob: f32) -> Value {
        let bytes = self.text_model.token_bytes(id);
        json!({
            "token": String::from_utf8_lossy(&bytes),
            "logprob": finite(logprob),
            "bytes": bytes.as_ref(),
        })
    }

    /// Four parallel lists; `top_logprobs` holds a map for each token, its own token included.
    fn legacy_logprobs(&self, entries: &[Entry]) -> Value {
        let tokens: Vec<String> = entries.iter().map(|e| self.token_name(e.id)).collect();
        let own = |e: &Entry| e.logprob.as_ref().map(|l| finite(l.logprob));
        let top: Vec<Value> = entries
            .iter()
            .map(|entry| {
                let Some(logprob) = &entry.logprob else { return Value::Null };
                let mut map = Map::new();
                for (id, value) in logprob.top.iter().take(self.wanted()) {
                    map.insert(self.token_name(*id), json!(finite(*value)));
                }
                map.entry(self.token_name(entry.id)).or_insert(json!(finite(logprob.logprob)));
                Value::Object(map)
            })
            .collect();
        json!({
            "tokens": tokens,
            "token_logprobs": entries.iter().map(own).collect::<Vec<_>>(),
            "top_logprobs": top,
            "text_offset": entries.iter().map(|e| e.offset).collect::<Vec<_>>(),
        })
    }

    /// A token that is no text of its own is named by its bytes, as OpenAI does, so that two
    /// halves of a character do not become the same key.
    fn token_name(&self, id: u32) -> String {
        let bytes = self.text_model.token_bytes(id);
        match std::str::from_utf8(&bytes) {
            Ok(text) => text.to_owned(),
            Err(_) => {
                let hex: String = bytes.iter().map(|b| format!("\\x{b:02x}")).collect();
                format!("bytes:{hex}")
            }
        }
    }

    fn wanted(&self) -> usize {
        self.logprobs.map_or(0, |top| usize::try_from(top).unwrap_or(usize::MAX))
    }
}

fn chat_choice(index: usize, delta: Value, logprobs: Value, reason: Option<FinishReason>) -> Value {
    json!({
        "index": index,
        "delta": delta,
        "logprobs": logprobs,
        "finish_reason": reason.map(reason_name),
    })
}

fn text_choice(index: usize, text: &str, logprobs: Value, reason: Option<FinishReason>) -> Value {
    json!({
        "text": text,
        "index": index,
        "logprobs": logprobs,
        "finish_reason": reason.map(reason_name),
    })
}

fn reason_name(reason: FinishReason) -> &'static str {
    match reason {
        FinishReason::Stop => "stop",
        FinishReason::Length => "length",
    }
}

fn usage(totals: &Totals) -> Value {
    json!({
        "prompt_tokens": totals.prompt_tokens,
        "completion_tokens": totals.completion_tokens,
        "total_tokens": totals.prompt_tokens + totals.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": totals.cached_tokens, "audio_tokens": 0},
        "completion_tokens_details": {
            "reasoning_tokens": 0,
            "audio_tokens": 0,
            "accepted_prediction_tokens": 0,
            "rejected_prediction_tokens": 0,
        },
    })
}

/// JSON has no infinity; OpenAI writes -9999 for "never". Rounded to what float32 holds.
fn finite(logprob: f32) -> f64 {
    if !logprob.is_finite() {
        return -9999.0;
    }
    // Shortest text that reads back as the same float32.
    logprob.to_string().parse().unwrap_or(f64::from(logprob))
}
