//! A conversation over the HTTP API: one streamed answer at a time, printed as it comes.

use std::collections::BTreeSet;
use std::io::Write;
use std::time::Duration;

use anyhow::Result;
use serde_json::{Value, json};
use tokio::time::Instant;

use crate::client::{Client, ClientError};

/// How to answer.
#[derive(Debug, Clone, clap::Args)]
pub struct AnswerArgs {
    /// Most tokens of an answer
    #[arg(long, short = 'n', default_value_t = 512, value_name = "N")]
    max_tokens: u32,
    /// 0 takes the likeliest token each time
    #[arg(long, short, default_value_t = 0.0)]
    temperature: f64,
    /// Sample from the smallest set of tokens with this much probability
    #[arg(long, value_name = "P")]
    top_p: Option<f64>,
    /// The same seed gives the same answer
    #[arg(long)]
    seed: Option<u64>,
    /// Tell the model how to behave
    #[arg(long, value_name = "TEXT")]
    pub system: Option<String>,
}

/// What a finished answer was like.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Answer {
    pub text: String,
    pub finish_reason: String,
    pub prompt_tokens: u64,
    pub cached_tokens: u64,
    pub tokens: u64,
    pub first_token: Option<Duration>,
    pub took: Duration,
    /// `node/device` of each shard that worked on it.
    pub served_by: Vec<String>,
}

impl Answer {
    /// `TTFT 120 ms · 35.2 tokens/s · 128 tokens (stop) · served by left/cpu`
    pub fn summary(&self) -> String {
        let mut parts = Vec::new();
        if let Some(first) = self.first_token {
            parts.push(format!("TTFT {:.0} ms", first.as_secs_f64() * 1000.0));
            let rest = (self.took - first).as_secs_f64();
            if self.tokens > 1 && rest > 0.0 {
                parts.push(format!("{:.1} tokens/s", (self.tokens - 1) as f64 / rest));
            }
        }
        let cached = match self.cached_tokens {
            0 => String::new(),
            cached => format!(", {cached} cached"),
        };
        parts.push(format!(
            "{} tokens ({}) after {} of prompt{cached}",
            self.tokens, self.finish_reason, self.prompt_tokens
        ));
        if !self.served_by.is_empty() {
            parts.push(format!("served by {}", self.served_by.join(", ")));
        }
        parts.join(" · ")
    }
}

/// Asks for an answer to the conversation and prints it on standard output while it streams.
/// Dropping the future cancels the answer.
pub async fn answer(
    client: &Client,
    model: &str,
    messages: &[Value],
    args: &AnswerArgs,
) -> Result<Answer, ClientError> {
    let mut body = json!({
        "model": model,
        "messages": messages,
        "max_completion_tokens": args.max_tokens,
        "temperature": args.temperature,
        "stream": true,
        "stream_options": {"include_usage": true},
    });
    if let Some(top_p) = args.top_p {
        body["top_p"] = json!(top_p);
    }
    if let Some(seed) = args.seed {
        body["seed"] = json!(seed);
    }
    let begun = Instant::now();
    let mut stream = client.stream("/v1/chat/completions", &body).await?;
    let mut answer = Answer::default();
    while let Some(event) = stream.next().await? {
        if let Some(text) = note(&mut answer, &event, begun.elapsed()) {
            print(&text);
        }
    }
    answer.took = begun.elapsed();
    Ok(answer)
}

/// A reader that closed our standard output loses the text, not the summary.
fn print(text: &str) {
    let mut out = std::io::stdout().lock();
    let _ = out.write_all(text.as_bytes()).and_then(|()| out.flush());
}

/// Takes up one event; the text to print, if it has any.
fn note(answer: &mut Answer, event: &Value, at: Duration) -> Option<String> {
    if let Some(usage) = event.get("usage").filter(|usage| usage.is_object()) {
        answer.tokens = usage["completion_tokens"].as_u64().unwrap_or(0);
        answer.prompt_tokens = usage["prompt_tokens"].as_u64().unwrap_or(0);
        let details = &usage["prompt_tokens_details"];
        answer.cached_tokens = details["cached_tokens"].as_u64().unwrap_or(0);
    }
    if let Some(places) = event["dunlin"]["served_by"].as_array() {
        let places: BTreeSet<&str> = places.iter().filter_map(Value::as_str).collect();
        answer.served_by = places.into_iter().map(str::to_string).collect();
    }
    let choice = event["choices"].get(0)?;
    if let Some(reason) = choice["finish_reason"].as_str() {
        answer.finish_reason = reason.to_string();
    }
    let text = choice["delta"]["content"].as_str().filter(|text| !text.is_empty())?;
    answer.first_token.get_or_insert(at);
    answer.text.push_str(text);
    Some(text.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_add_up_to_an_answer() {
        let mut answer = Answer::default();
        let delta = |text: &str| json!({"choices": [{"delta": {"content": text}}], "usage": null});
        let events = [
            json!({"choices": [{"delta": {"role": "assistant", "content": ""}}]}),
            delta("Hel"),
            delta("lo"),
            json!({"choices": [{"delta": {}, "finish_reason": "stop"}]}),
            json!({
                "choices": [],
                "usage": {
                    "prompt_tokens": 9, "completion_tokens": 3,
                    "prompt_tokens_details": {"cached_tokens": 8}
                },
                "dunlin": {"served_by": ["right/cpu", "left/cpu", "left/cpu"]}
            }),
        ];
        for (second, event) in events.iter().enumerate() {
            note(&mut answer, event, Duration::from_secs(second as u64));
        }
        answer.took = Duration::from_secs(5);
        assert_eq!(answer.text, "Hello");
        assert_eq!(
            answer.summary(),
            "TTFT 1000 ms · 0.5 tokens/s · 3 tokens (stop) after 9 of prompt, 8 cached · \
             served by left/cpu, right/cpu"
        );
    }
}
