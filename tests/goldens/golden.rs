//! Golden files and where models lie.

use serde_json::Value;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// One prompt with what transformers continued it with.
pub struct Golden {
    pub name: String,
    /// Prompt, then the greedy continuation.
    pub ids: Vec<u32>,
    /// Length of the prompt.
    pub prompt: usize,
    /// How far the likeliest token was ahead, for every token drawn.
    pub margins: Vec<f32>,
    /// The ten highest logits before the token of a step; some or all steps.
    pub tops: BTreeMap<usize, Vec<(u32, f32)>>,
}

impl Golden {
    pub fn drawn(&self) -> &[u32] {
        &self.ids[self.prompt..]
    }
}

/// A file of the repository's test data.
pub fn data(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data").join(name)
}

/// A model that `tools/test` fetches.
pub fn downloaded(file: &str) -> PathBuf {
    let given = std::env::var_os("DUNLIN_TEST_MODELS").map(PathBuf::from);
    let cache =
        || Some(PathBuf::from(std::env::var_os("HOME")?).join(".cache").join("dunlin/models"));
    let path = given.or_else(cache).unwrap_or_default().join(file);
    assert!(path.is_file(), "{} is not there: run tools/test, which fetches it", path.display());
    path
}

/// Files with the top logits of every step: `steps: [{ token, top: [[id, logit], ..] }]`.
pub fn steps_file(path: &Path) -> Vec<Golden> {
    prompts(path)
        .iter()
        .enumerate()
        .map(|(index, prompt)| {
            let steps = array(&prompt["steps"]);
            let pair = |p: &Value| (id(&p[0]), number(&p[1]));
            let tops: Vec<Vec<(u32, f32)>> =
                steps.iter().map(|s| array(&s["top"]).iter().map(pair).collect()).collect();
            let prompt_ids = array(&prompt["prompt_ids"]);
            Golden {
                name: prompt["name"].as_str().map_or(format!("prompt {index}"), str::to_owned),
                ids: prompt_ids.iter().chain(steps.iter().map(|s| &s["token"])).map(id).collect(),
                prompt: prompt_ids.len(),
                margins: tops.iter().map(|top| top[0].1 - top[1].1).collect(),
                tops: tops.into_iter().enumerate().collect(),
            }
        })
        .collect()
}

/// Files with the top logits of a few steps: `logits_last_prompt`, `logits_at: { step: .. }`.
pub fn summary_file(path: &Path) -> Vec<Golden> {
    prompts(path)
        .iter()
        .map(|prompt| {
            let prompt_ids = array(&prompt["prompt_ids"]);
            let greedy = array(&prompt["greedy_ids"]);
            let top = |v: &Value| -> Vec<(u32, f32)> {
                let ids = array(&v["ids"]).iter().map(id);
                ids.zip(array(&v["logits"]).iter().map(number)).collect()
            };
            let later = prompt["logits_at"].as_object().expect("logits_at");
            let mut tops: BTreeMap<usize, _> =
                later.iter().map(|(step, v)| (step.parse().expect("a step"), top(v))).collect();
            tops.insert(0, top(&prompt["logits_last_prompt"]));
            Golden {
                name: prompt["id"].as_str().expect("an id").to_owned(),
                ids: prompt_ids.iter().chain(greedy).map(id).collect(),
                prompt: prompt_ids.len(),
                margins: array(&prompt["margins"]).iter().map(number).collect(),
                tops,
            }
        })
        .collect()
}

fn prompts(path: &Path) -> Vec<Value> {
    let text = std::fs::read_to_string(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    let file: Value = serde_json::from_str(&text).expect("JSON");
    array(&file["prompts"]).clone()
}

fn array(value: &Value) -> &Vec<Value> {
    value.as_array().expect("an array")
}

fn id(value: &Value) -> u32 {
    value.as_u64().and_then(|v| u32::try_from(v).ok()).expect("a token id")
}

fn number(value: &Value) -> f32 {
    value.as_f64().expect("a number") as f32
}
