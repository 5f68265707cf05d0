//! From a JSON body to what was asked, checked field by field before any work starts.
//!
//! A field that would change the answer and is not supported is refused; one that would not is
//! ignored; one that nobody knows is refused, so that a misspelt field is not silently dropped.
//! This file knows the vocabulary's size, and nothing else of the model.

use super::error::ApiError;
use super::fields::{Fields, token_id, wrong_type};
use super::limits::Limits;
use super::text::ChatMessage;
use axum::http::StatusCode;
use dunlin_model::sampling::SamplingParams;
use serde_json::{Map, Value};

/// Which of the two endpoints.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Endpoint {
    Chat,
    Completions,
}

/// A prompt before tokenisation.
#[derive(Debug, Clone, PartialEq)]
pub enum Input {
    Chat(Vec<ChatMessage>),
    Text(String),
    Ids(Vec<u32>),
}

/// A request that is well formed. Whether it fits the model's context is not known yet.
#[derive(Debug, Clone, PartialEq)]
pub struct Asked {
    pub inputs: Vec<Input>,
    pub n: u32,
    pub stream: bool,
    pub include_usage: bool,
    pub echo: bool,
    /// `None`: the endpoint's default.
    pub max_tokens: Option<u32>,
    pub min_tokens: u32,
    pub stop: Vec<String>,
    pub ignore_eos: bool,
    pub cache_salt: String,
    /// Without its seed.
    pub sampling: SamplingParams,
    pub seed: Option<u64>,
}

/// What the parser needs to know of the cluster.
pub struct Known<'a> {
    pub models: &'a [String],
    pub vocab: u32,
    pub limits: &'a Limits,
}

const COMMON: &[&str] = &[
    "model",
    "n",
    "stream",
    "stream_options",
    "max_tokens",
    "min_tokens",
    "stop",
    "seed",
    "logit_bias",
    "logprobs",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "ignore_eos",
    "cache_salt",
];
const CHAT: &[&str] = &["messages", "max_completion_tokens", "top_logprobs"];
const COMPLETIONS: &[&str] = &["prompt", "best_of", "echo"];
/// Known to OpenAI, and the answer is the same without them.
const IGNORED: &[&str] = &[
    "user",
    "metadata",
    "store",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
    "prediction",
];

impl Asked {
    /// Reads a body.
    ///
    /// # Errors
    /// 400 with the field's name, or 404 for a model that is not served here.
    pub fn parse(body: &[u8], endpoint: Endpoint, known: &Known) -> Result<Self, ApiError> {
        let value: Value = serde_json::from_slice(body).map_err(|error| {
            // serde_json's text ends with "at line L column C".
            ApiError { code: Some("invalid_json"), ..invalid_json(&error) }
        })?;
        let Value::Object(map) = &value else {
            return Err(ApiError::invalid("The request body must be a JSON object."));
        };
        let fields = Fields::new(map, "");
        check_model(&fields, known.models)?;
        check_names(&fields, endpoint)?;

        let n = fields.uint("n", 1..=known.limits.max_choices)?.unwrap_or(1);
        let inputs = match endpoint {
            Endpoint::Chat => vec![Input::Chat(messages(&fields, known.limits)?)],
            Endpoint::Completions => prompts(&fields, known.vocab)?,
        };
        check_choices(inputs.len(), n, known.limits)?;
        let stream = fields.bool("stream")?.unwrap_or(false);
        let echo = match endpoint {
            Endpoint::Chat => false,
            Endpoint::Completions => {
                check_best_of(&fields, n)?;
                fields.bool("echo")?.unwrap_or(false)
            }
        };
        let max_tokens = max_tokens(&fields, endpoint, echo)?;
        let min_tokens = fields.uint("min_tokens", 0..=u32::MAX)?.unwrap_or(0);
        if max_tokens.is_some_and(|max| min_tokens > max) {
            let message = format!(
                "Invalid 'min_tokens': {min_tokens} is more than the {} of max_tokens.",
                max_tokens.unwrap_or(0)
            );
            return Err(ApiError::field("min_tokens", "invalid_value", message));
        }
        Ok(Self {
            inputs,
            n,
            stream,
            include_usage: include_usage(&fields, stream)?,
            echo,
            max_tokens,
            min_tokens,
            stop: stop(&fields, known.limits)?,
            ignore_eos: fields.bool("ignore_eos")?.unwrap_or(false),
            cache_salt: fields.str("cache_salt")?.unwrap_or("").to_owned(),
            sampling: sampling(&fields, endpoint, known)?,
            // Any integer is a seed; a negative one keeps its bits.
            seed: fields.int("seed", i64::MIN..=i64::MAX)?.map(i64::cast_unsigned),
        })
    }
}

fn invalid_json(error: &serde_json::Error) -> ApiError {
    ApiError::invalid(format!("The request body is not valid JSON: {error}."))
}

fn check_model(fields: &Fields, models: &[String]) -> Result<(), ApiError> {
    let Some(model) = fields.str("model")? else {
        return Err(missing("model"));
    };
    if models.iter().any(|known| known == model) {
        return Ok(());
    }
    // No other model answers in its place.
    Err(ApiError {
        param: Some("model".into()),
        ..ApiError::client(
            StatusCode::NOT_FOUND,
            "model_not_found",
            format!(
                "The model '{model}' is not served here. Served: {}.",
                models.first().map_or("none", String::as_str)
            ),
        )
    })
}

fn missing(param: &str) -> ApiError {
    let message = format!("Missing required parameter: '{param}'.");
    ApiError::field(param, "missing_required_parameter", message)
}

fn check_names(fields: &Fields, endpoint: Endpoint) -> Result<(), ApiError> {
    let own = if endpoint == Endpoint::Chat { CHAT } else { COMPLETIONS };
    for name in fields.names() {
        if COMMON.contains(&name) || own.contains(&name) || IGNORED.contains(&name) {
            continue;
        }
        if endpoint == Endpoint::Chat && neutral_for_chat(fields, name)? {
            continue;
        }
        let (code, message) = if UNSUPPORTED.contains(&name) {
            let message = format!("Unsupported parameter: '{name}' is not supported here.");
            ("unsupported_parameter", message)
        } else {
            ("unknown_parameter", format!("Unknown parameter: '{name}'."))
        };
        return Err(ApiError::field(name, code, message));
    }
    Ok(())
}

/// Known to OpenAI, and the answer would be another one.
const UNSUPPORTED: &[&str] = &[
    "tools",
    "tool_choice",
    "functions",
    "function_call",
    "response_format",
    "audio",
    "modalities",
    "web_search_options",
    "reasoning_effort",
    "verbosity",
    "parallel_tool_calls",
    "suffix",
    "max_completion_tokens",
    "top_logprobs",
    "messages",
    "prompt",
    "best_of",
    "echo",
];

/// Whether an unsupported field has the one value that asks for nothing.
fn neutral_for_chat(fields: &Fields, name: &str) -> Result<bool, ApiError> {
    let Some(value) = fields.get(name) else { return Ok(true) };
    Ok(match name {
        "tools" | "functions" => value.as_array().is_some_and(Vec::is_empty),
        "tool_choice" | "function_call" => matches!(value.as_str(), Some("none" | "auto")),
        "parallel_tool_calls" => value.is_boolean(),
        "modalities" => value == &serde_json::json!(["text"]),
        "response_format" => {
            let Some(format) = fields.object(name)? else { return Ok(false) };
            match format.str("type")? {
                Some("text") => true,
                other => {
                    let message = format!(
                        "Unsupported value: 'response_format.type' is '{}'; only 'text' is \
                         supported here.",
                        other.unwrap_or("missing")
                    );
                    let param = "response_format.type";
                    return Err(ApiError::field(param, "unsupported_value", message));
                }
            }
        }
        _ => false,
    })
}

fn messages(fields: &Fields, limits: &Limits) -> Result<Vec<ChatMessage>, ApiError> {
    let items = match fields.get("messages") {
        None => return Err(missing("messages")),
        Some(Value::Array(items)) => items,
        Some(other) => return Err(fields.wrong_type("messages", "an array", other)),
    };
    if items.is_empty() || items.len() > limits.max_messages {
        let message = format!(
            "Invalid 'messages': expected 1 to {} messages, but got {} instead.",
            limits.max_messages,
            items.len()
        );
        return Err(ApiError::field("messages", "invalid_value", message));
    }
    items.iter().enumerate().map(|(i, item)| message(i, item)).collect()
}

fn message(index: usize, item: &Value) -> Result<ChatMessage, ApiError> {
    let at = format!("messages[{index}]");
    let Value::Object(map) = item else {
        return Err(wrong_type(&at, "an object", item));
    };
    let fields = Fields::new(map, format!("{at}."));
    let Some(role) = fields.str("role")? else { return Err(missing(&fields.param("role"))) };
    let role = match role {
        "system" | "developer" => "system",
        "user" => "user",
        "assistant" => "assistant",
        other => {
            let message = format!(
                "Invalid '{at}.role': expected one of 'system', 'developer', 'user' and \
                 'assistant', but got '{other}' instead."
            );
            return Err(ApiError::field(fields.param("role"), "invalid_value", message));
        }
    };
    for name in fields.names() {
        if !matches!(name, "role" | "content" | "name") {
            // `tool_calls`, `function_call`, `audio`, `refusal`: the template cannot show them.
            let message = format!("Unsupported parameter: '{at}.{name}' is not supported here.");
            return Err(ApiError::field(fields.param(name), "unsupported_parameter", message));
        }
    }
    Ok(ChatMessage { role: role.to_owned(), content: content(&fields)? })
}

fn content(fields: &Fields) -> Result<String, ApiError> {
    match fields.get("content") {
        None => Err(missing(&fields.param("content"))),
        Some(Value::String(text)) => Ok(text.clone()),
        Some(Value::Array(parts)) => parts
            .iter()
            .enumerate()
            .map(|(i, part)| text_part(&format!("{}[{i}]", fields.param("content")), part))
            .collect(),
        Some(other) => Err(fields.wrong_type("content", "a string or an array of parts", other)),
    }
}

fn text_part<'a>(at: &str, part: &'a Value) -> Result<&'a str, ApiError> {
    let Value::Object(map) = part else {
        return Err(wrong_type(at, "an object", part));
    };
    let fields = Fields::new(map, format!("{at}."));
    match fields.str("type")? {
        Some("text") => fields.str("text")?.ok_or_else(|| missing(&fields.param("text"))),
        Some(other) => {
            let message = format!(
                "Invalid '{at}.type': content of type '{other}' is not supported here, only 'text'."
            );
            Err(ApiError::field(fields.param("type"), "unsupported_value", message))
        }
        None => Err(missing(&fields.param("type"))),
    }
}

/// A string, a list of strings, token ids, or a list of id lists.
fn prompts(fields: &Fields, vocab: u32) -> Result<Vec<Input>, ApiError> {
    let expected = "a string, an array of strings, an array of token ids, or an array of arrays \
                    of token ids";
    let items = match fields.get("prompt") {
        None => return Err(missing("prompt")),
        Some(Value::String(text)) => return Ok(vec![Input::Text(text.clone())]),
        Some(Value::Array(items)) => items,
        Some(other) => return Err(fields.wrong_type("prompt", expected, other)),
    };
    let ids = |items: &[Value], at: &str| -> Result<Input, ApiError> {
        let named = items.iter().enumerate();
        let ids = named.map(|(i, id)| token_id(id, &format!("{at}[{i}]"), vocab));
        Ok(Input::Ids(ids.collect::<Result<_, _>>()?))
    };
    match items.first() {
        None => {
            let message = "Invalid 'prompt': expected a non-empty array.";
            Err(ApiError::field("prompt", "invalid_value", message))
        }
        Some(Value::Number(_)) => Ok(vec![ids(items, "prompt")?]),
        Some(Value::String(_) | Value::Array(_)) => items
            .iter()
            .enumerate()
            .map(|(i, item)| {
                let at = format!("prompt[{i}]");
                match (item, items.first()) {
                    (Value::String(text), Some(Value::String(_))) => Ok(Input::Text(text.clone())),
                    (Value::Array(list), Some(Value::Array(_))) => ids(list, &at),
                    (other, Some(Value::String(_))) => Err(wrong_type(&at, "a string", other)),
                    (other, _) => Err(wrong_type(&at, "an array of token ids", other)),
                }
            })
            .collect(),
        Some(other) => Err(wrong_type("prompt[0]", "a string, a token id or an array", other)),
    }
}

fn check_choices(prompts: usize, n: u32, limits: &Limits) -> Result<(), ApiError> {
    let choices = (prompts as u64).saturating_mul(u64::from(n));
    if choices <= u64::from(limits.max_choices) {
        return Ok(());
    }
    let message = format!(
        "{prompts} prompts with n = {n} ask for {choices} answers; one request may ask for {}.",
        limits.max_choices
    );
    let param = if prompts > 1 { "prompt" } else { "n" };
    Err(ApiError::field(param, "invalid_value", message))
}

fn check_best_of(fields: &Fields, n: u32) -> Result<(), ApiError> {
    match fields.uint("best_of", 1..=u32::MAX)? {
        Some(best_of) if best_of != n => {
            let message = format!(
                "Unsupported value: 'best_of' is {best_of}; only best_of equal to n ({n}) is \
                 supported here."
            );
            Err(ApiError::field("best_of", "unsupported_value", message))
        }
        _ => Ok(()),
    }
}

fn max_tokens(fields: &Fields, endpoint: Endpoint, echo: bool) -> Result<Option<u32>, ApiError> {
    // Scoring a prompt is `echo` with nothing to generate.
    let range = u32::from(!echo)..=u32::MAX;
    let max = fields.uint("max_tokens", range.clone())?;
    if endpoint == Endpoint::Completions {
        return Ok(max);
    }
    let new = fields.uint("max_completion_tokens", range)?;
    match (max, new) {
        (Some(old), Some(new)) if old != new => {
            let message = format!(
                "'max_tokens' is {old} and 'max_completion_tokens' is {new}: give only one of them."
            );
            Err(ApiError::field("max_completion_tokens", "invalid_value", message))
        }
        (old, new) => Ok(new.or(old)),
    }
}

fn include_usage(fields: &Fields, stream: bool) -> Result<bool, ApiError> {
    let Some(options) = fields.object("stream_options")? else { return Ok(false) };
    if !stream {
        let message = "The 'stream_options' parameter is only allowed when 'stream' is enabled.";
        return Err(ApiError::field("stream_options", "invalid_value", message));
    }
    for name in options.names() {
        if !matches!(name, "include_usage" | "include_obfuscation") {
            let param = options.param(name);
            let message = format!("Unknown parameter: '{param}'.");
            return Err(ApiError::field(param, "unknown_parameter", message));
        }
    }
    // Obfuscation pads chunks against traffic analysis; its absence changes no answer.
    options.bool("include_obfuscation")?;
    Ok(options.bool("include_usage")?.unwrap_or(false))
}

fn stop(fields: &Fields, limits: &Limits) -> Result<Vec<String>, ApiError> {
    let stops: Vec<&str> = match fields.get("stop") {
        None => return Ok(Vec::new()),
        Some(Value::String(one)) => vec![one],
        Some(Value::Array(items)) => {
            let named = items.iter().enumerate();
            let texts = named.map(|(i, item)| {
                item.as_str().ok_or_else(|| wrong_type(&format!("stop[{i}]"), "a string", item))
            });
            texts.collect::<Result<_, _>>()?
        }
        Some(other) => {
            return Err(fields.wrong_type("stop", "a string or an array of strings", other));
        }
    };
    if stops.len() > 4 {
        let message = format!(
            "Invalid 'stop': array too long. Expected an array with maximum length 4, but got an \
             array with length {} instead.",
            stops.len()
        );
        return Err(ApiError::field("stop", "array_above_max_length", message));
    }
    if let Some(wrong) = stops.iter().find(|s| s.is_empty() || s.len() > limits.stop_bytes) {
        let message = format!(
            "Invalid 'stop': a stop string has 1 to {} bytes, but got one with {} instead.",
            limits.stop_bytes,
            wrong.len()
        );
        return Err(ApiError::field("stop", "invalid_value", message));
    }
    Ok(stops.into_iter().map(str::to_owned).collect())
}

fn sampling(
    fields: &Fields,
    endpoint: Endpoint,
    known: &Known,
) -> Result<SamplingParams, ApiError> {
    let float = |name, range, default: f64| -> Result<f32, ApiError> {
        Ok(fields.float(name, range)?.unwrap_or(default) as f32)
    };
    let temperature = float("temperature", 0.0..=2.0, 1.0)?;
    let top_p = float("top_p", 0.0..=1.0, 1.0)?;
    let repetition_penalty = float("repetition_penalty", 0.0..=10.0, 1.0)?;
    if repetition_penalty <= 0.0 {
        let message = "Invalid 'repetition_penalty': expected a value above 0.";
        return Err(ApiError::field("repetition_penalty", "decimal_below_min_value", message));
    }
    // -1 is how vLLM's clients say "off".
    let top_k = fields.int("top_k", -1..=i64::from(u32::MAX))?.unwrap_or(0);
    Ok(SamplingParams {
        // Below this a draw is greedy in float32 anyway, and dividing by it overflows.
        temperature: if temperature < 1e-4 { 0.0 } else { temperature },
        top_k: u32::try_from(top_k).unwrap_or(0),
        // 0 keeps the most likely token alone, as the definition of the nucleus has it.
        top_p: top_p.max(f32::MIN_POSITIVE),
        min_p: float("min_p", 0.0..=1.0, 0.0)?,
        repetition_penalty,
        presence_penalty: float("presence_penalty", -2.0..=2.0, 0.0)?,
        frequency_penalty: float("frequency_penalty", -2.0..=2.0, 0.0)?,
        logit_bias: logit_bias(fields, known)?,
        seed: 0,
        logprobs: match endpoint {
            Endpoint::Chat => chat_logprobs(fields, known.limits)?,
            Endpoint::Completions => fields.uint("logprobs", 0..=known.limits.max_logprobs)?,
        },
    })
}

fn chat_logprobs(fields: &Fields, limits: &Limits) -> Result<Option<u32>, ApiError> {
    let wanted = fields.bool("logprobs")?.unwrap_or(false);
    let top = fields.uint("top_logprobs", 0..=limits.max_logprobs)?;
    match (wanted, top) {
        (true, top) => Ok(Some(top.unwrap_or(0))),
        (false, None | Some(0)) => Ok(None),
        (false, Some(_)) => {
            let message = "'top_logprobs' needs 'logprobs' to be true.";
            Err(ApiError::field("top_logprobs", "invalid_value", message))
        }
    }
}

fn logit_bias(fields: &Fields, known: &Known) -> Result<Vec<(u32, f32)>, ApiError> {
    let map: &Map<String, Value> = match fields.get("logit_bias") {
        None => return Ok(Vec::new()),
        Some(Value::Object(map)) => map,
        Some(other) => return Err(fields.wrong_type("logit_bias", "an object", other)),
    };
    if map.len() > known.limits.max_logit_bias {
        let message = format!(
            "Invalid 'logit_bias': expected at most {} tokens, but got {} instead.",
            known.limits.max_logit_bias,
            map.len()
        );
        return Err(ApiError::field("logit_bias", "invalid_value", message));
    }
    let entries = Fields::new(map, "logit_bias.");
    let mut biases = Vec::with_capacity(map.len());
    for name in map.keys() {
        let id: Option<u32> = name.parse().ok().filter(|id| *id < known.vocab);
        let Some(id) = id else {
            let message = format!(
                "Invalid key in 'logit_bias': '{name}' is not a token id of this model (0..{}).",
                known.vocab
            );
            return Err(ApiError::field("logit_bias", "invalid_value", message));
        };
        if let Some(bias) = entries.float(name, -100.0..=100.0)? {
            biases.push((id, bias as f32));
        }
    }
    // "7" and "07" are the same token; the order in the JSON text must not matter.
    biases.sort_by_key(|(id, _)| *id);
    if biases.windows(2).any(|pair| matches!(pair, [a, b] if a.0 == b.0)) {
        let message = "Invalid 'logit_bias': the same token twice.";
        return Err(ApiError::field("logit_bias", "invalid_value", message));
    }
    Ok(biases)
}
