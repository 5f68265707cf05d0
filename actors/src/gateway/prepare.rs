//! From what was asked to token ids that fit the model's context, and the names of their KV blocks.

use super::error::ApiError;
use super::request::{Asked, Endpoint, Input};
use super::text::{TextError, TextModel};
use crate::kv::key::Chain;
use crate::messages::{KeySpace, PromptKeys};
use std::sync::Arc;

/// OpenAI's default for `/v1/completions`.
const COMPLETION_TOKENS: u32 = 16;

/// A prompt that fits.
#[derive(Debug, Clone, PartialEq)]
pub struct Prompt {
    pub ids: Vec<u32>,
    /// How replicas name the blocks of `ids`, for this tenant and salt.
    pub keys: PromptKeys,
    /// The text as it was given, for `echo`.
    pub text: Option<String>,
    /// Output tokens to show. 0: only the prompt is scored.
    pub max_tokens: u32,
}

/// Tokenises every prompt and names its blocks.
///
/// # Errors
/// 400 if a prompt is empty or does not fit the context together with its answer.
pub fn prepare(
    asked: &mut Asked,
    endpoint: Endpoint,
    model: &Arc<dyn TextModel>,
    (space, tenant): (KeySpace, &str),
) -> Result<Vec<Prompt>, ApiError> {
    let param = prompt_param(endpoint);
    let mut prompts = Vec::with_capacity(asked.inputs.len());
    for input in std::mem::take(&mut asked.inputs) {
        let (ids, text) = match input {
            Input::Chat(messages) => (model.render_chat(&messages), None),
            Input::Text(text) => (model.encode(&text), asked.echo.then_some(text)),
            Input::Ids(ids) => (Ok(ids), None),
        };
        let ids = ids.map_err(|error| match error {
            TextError::Template(_) => ApiError::field(param, "invalid_value", error.to_string()),
            TextError::Tokenizer(_) => ApiError::internal(error.to_string()),
        })?;
        let max_tokens = fit(ids.len(), asked.max_tokens, endpoint, model.context())?;
        let keys = Chain::of_prompt(space, tenant, &asked.cache_salt, &ids);
        prompts.push(Prompt { ids, keys, text, max_tokens });
    }
    Ok(prompts)
}

/// The field that holds the prompt.
pub fn prompt_param(endpoint: Endpoint) -> &'static str {
    match endpoint {
        Endpoint::Chat => "messages",
        Endpoint::Completions => "prompt",
    }
}

/// The seed of answer `index` of `n`: the first has the request's own, so that asking for more
/// answers does not change it; the others are far apart (SplitMix64's finaliser).
pub fn choice_seed(seed: u64, index: u32) -> u64 {
    if index == 0 {
        return seed;
    }
    let mut z = seed.wrapping_add(u64::from(index).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

fn fit(
    prompt: usize,
    max_tokens: Option<u32>,
    endpoint: Endpoint,
    context: u32,
) -> Result<u32, ApiError> {
    let param = prompt_param(endpoint);
    if prompt == 0 {
        let message = format!("Invalid '{param}': it has no tokens; at least one is needed.");
        return Err(ApiError::field(param, "invalid_value", message));
    }
    let room = usize::try_from(context).unwrap_or(usize::MAX).saturating_sub(prompt);
    let room = u32::try_from(room).unwrap_or(u32::MAX);
    // One token is drawn even where only the prompt is scored.
    let need = max_tokens.unwrap_or(1).max(1);
    if need > room {
        let total = prompt.saturating_add(need as usize);
        let message = format!(
            "This model's maximum context length is {context} tokens. However, you requested \
             {total} tokens ({prompt} in the {param}, {need} in the completion). Please reduce \
             the length of the {param} or completion."
        );
        return Err(ApiError::field(param, "context_length_exceeded", message));
    }
    Ok(max_tokens.unwrap_or(match endpoint {
        Endpoint::Chat => room,
        Endpoint::Completions => room.min(COMPLETION_TOKENS),
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_prompt_and_its_answer_must_fit_and_the_message_has_both_numbers() {
        assert_eq!(fit(10, None, Endpoint::Chat, 64), Ok(54));
        assert_eq!(fit(10, None, Endpoint::Completions, 64), Ok(16));
        assert_eq!(fit(60, None, Endpoint::Completions, 64), Ok(4));
        assert_eq!(fit(10, Some(54), Endpoint::Chat, 64), Ok(54));
        let error = fit(10, Some(55), Endpoint::Chat, 64).unwrap_err();
        assert!(error.message.contains("64 tokens") && error.message.contains("65 tokens"));
        assert_eq!(error.code, Some("context_length_exceeded"));
        assert!(fit(64, None, Endpoint::Chat, 64).is_err());
        assert!(fit(0, None, Endpoint::Completions, 64).is_err());
        assert!(fit(64, Some(0), Endpoint::Completions, 64).is_err());
    }

    #[test]
    fn seeds_of_one_request_differ_and_the_first_is_its_own() {
        let seeds: std::collections::BTreeSet<u64> = (0..128).map(|i| choice_seed(7, i)).collect();
        assert_eq!(seeds.len(), 128);
        assert_eq!(choice_seed(7, 0), 7);
    }
}
