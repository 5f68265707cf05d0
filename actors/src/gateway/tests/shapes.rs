//! OpenAI's objects, field for field.

use super::harness::*;
use crate::kv::key::Chain;
use crate::messages::*;
use serde_json::{Value, json};

fn keys(value: &Value) -> Vec<&str> {
    value.as_object().unwrap().keys().map(String::as_str).collect()
}

#[tokio::test]
async fn a_chat_completion() {
    let mut script = run("Hello");
    script.cached = 3;
    let world = world(Script::Run(script)).await;
    let response = world.chat(json!({"max_tokens": 5})).await;
    assert_eq!(response.status, 200);
    assert_eq!(response.headers["content-type"], "application/json");
    let body = response.json();
    assert_eq!(
        keys(&body),
        ["id", "object", "created", "model", "choices", "usage", "system_fingerprint"]
    );
    assert!(body["id"].as_str().unwrap().starts_with("chatcmpl-"));
    assert_eq!(response.headers["x-request-id"], body["id"].as_str().unwrap());
    assert_eq!(body["object"], "chat.completion");
    assert!(body["created"].as_u64().unwrap() > 1_700_000_000);
    assert_eq!(body["model"], "tiny");
    assert_eq!(body["system_fingerprint"], "fp_test");
    assert_eq!(
        body["choices"],
        json!([{
            "index": 0,
            "message": {"role": "assistant", "content": "Hello", "refusal": null},
            "logprobs": null,
            "finish_reason": "length",
        }])
    );
    // <|message|>user\nHi<|end|><|message|>assistant\n
    let prompt = 1 + 7 + 1 + 1 + 10;
    assert_eq!(body["usage"]["prompt_tokens"], prompt);
    assert_eq!(body["usage"]["completion_tokens"], 5);
    assert_eq!(body["usage"]["total_tokens"], prompt + 5);
    assert_eq!(body["usage"]["prompt_tokens_details"]["cached_tokens"], 3);
}

#[tokio::test]
async fn a_chat_stream_with_usage() {
    let mut script = run("Hé");
    script.cached = 2;
    let world = world(Script::Run(script)).await;
    let response =
        world.chat(json!({"stream": true, "stream_options": {"include_usage": true}})).await;
    assert_eq!(response.status, 200);
    assert_eq!(response.headers["content-type"], "text/event-stream; charset=utf-8");
    let events = response.events();
    for event in &events {
        assert_eq!(event["object"], "chat.completion.chunk");
        assert_eq!(event["id"], events[0]["id"]);
        assert_eq!(event["created"], events[0]["created"]);
    }
    let (last, chunks) = events.split_last().unwrap();
    assert!(chunks.iter().all(|c| c.as_object().unwrap().get("usage") == Some(&Value::Null)));
    let choices: Vec<&Value> = chunks.iter().map(|c| &c["choices"][0]).collect();
    let delta = json!({"role": "assistant", "content": "", "refusal": null});
    assert_eq!(
        choices,
        [
            &json!({"index": 0, "delta": delta, "logprobs": null, "finish_reason": null}),
            &json!({"index": 0, "delta": {"content": "H"}, "logprobs": null, "finish_reason": null}),
            &json!({"index": 0, "delta": {"content": "é"}, "logprobs": null, "finish_reason": null}),
            &json!({"index": 0, "delta": {}, "logprobs": null, "finish_reason": "stop"}),
        ]
    );
    assert_eq!(last["choices"], json!([]));
    assert_eq!(last["usage"]["completion_tokens"], 3);
    assert_eq!(last["usage"]["prompt_tokens_details"]["cached_tokens"], 2);
}

#[tokio::test]
async fn a_stream_without_usage_has_no_such_field() {
    let world = world(Script::Run(run("Hi"))).await;
    for event in world.chat(json!({"stream": true})).await.events() {
        assert!(event.get("usage").is_none());
        assert_eq!(event["choices"].as_array().unwrap().len(), 1);
    }
}

#[tokio::test]
async fn a_completion_and_its_stream() {
    let world = world(Script::Run(run("there"))).await;
    let whole = world.complete(json!({})).await.json();
    assert_eq!(whole["object"], "text_completion");
    assert!(whole["id"].as_str().unwrap().starts_with("cmpl-"));
    assert_eq!(
        whole["choices"],
        json!([{"text": "there", "index": 0, "logprobs": null, "finish_reason": "stop"}])
    );
    assert_eq!(whole["usage"]["prompt_tokens"], 2);
    let stream = world.complete(json!({"stream": true})).await;
    assert!(stream.events().iter().all(|e| e["object"] == "text_completion"));
    assert_eq!(stream.streamed_text(0), "there");
    assert_eq!(stream.events().last().unwrap()["choices"][0]["finish_reason"], "stop");
}

#[tokio::test]
async fn chat_logprobs() {
    let world = world(Script::Run(run("Aé"))).await;
    let body = world.chat(json!({"logprobs": true, "top_logprobs": 2})).await.json();
    let content = &body["choices"][0]["logprobs"]["content"];
    assert_eq!(body["choices"][0]["logprobs"]["refusal"], Value::Null);
    assert_eq!(content.as_array().unwrap().len(), 3);
    assert_eq!(keys(&content[0]), ["token", "logprob", "bytes", "top_logprobs"]);
    assert_eq!(content[0]["token"], "A");
    assert_eq!(content[0]["logprob"], json!(-0.12695313));
    assert_eq!(content[0]["bytes"], json!([65]));
    let top = json!([
        {"token": "A", "logprob": -1.0, "bytes": [65]},
        {"token": "B", "logprob": -1.0, "bytes": [66]},
    ]);
    assert_eq!(content[0]["top_logprobs"], top);
    // Half characters have their bytes.
    assert_eq!(content[1]["bytes"], json!([0xc3]));
    assert_eq!(content[2]["bytes"], json!([0xa9]));
    // The stream lists the same tokens.
    let stream = world.chat(json!({"logprobs": true, "top_logprobs": 2, "stream": true})).await;
    let events = stream.events();
    let listed: Vec<Value> = events
        .iter()
        .flat_map(|e| {
            e["choices"][0]["logprobs"]["content"].as_array().cloned().unwrap_or_default()
        })
        .collect();
    assert_eq!(&Value::Array(listed), content);
    // top_logprobs alone is zero alternatives.
    let body = world.chat(json!({"logprobs": true})).await.json();
    assert_eq!(body["choices"][0]["logprobs"]["content"][0]["top_logprobs"], json!([]));
}

#[tokio::test]
async fn legacy_logprobs() {
    let world = world(Script::Run(run("Bé"))).await;
    let body = world.complete(json!({"logprobs": 1})).await.json();
    let logprobs = &body["choices"][0]["logprobs"];
    assert_eq!(keys(logprobs), ["tokens", "token_logprobs", "top_logprobs", "text_offset"]);
    assert_eq!(logprobs["tokens"], json!(["B", "bytes:\\xc3", "bytes:\\xa9"]));
    assert_eq!(logprobs["text_offset"], json!([0, 1, 1]));
    assert_eq!(logprobs["token_logprobs"][0], json!(-0.12890625));
    assert_eq!(logprobs["top_logprobs"][0], json!({"A": -1.0, "B": -0.12890625}));
}

#[tokio::test]
async fn echo_shows_the_prompt_and_its_logprobs() {
    let world = world(Script::Run(run("!"))).await;
    let body = world.complete(json!({"echo": true, "max_tokens": 1})).await.json();
    assert_eq!(body["choices"][0]["text"], "Hi!");
    let request = json!({"echo": true, "logprobs": 0, "max_tokens": 1, "prompt": "éi"});
    let body = world.complete(request.clone()).await.json();
    let logprobs = &body["choices"][0]["logprobs"];
    assert_eq!(body["choices"][0]["text"], "éi!");
    assert_eq!(logprobs["tokens"], json!(["bytes:\\xc3", "bytes:\\xa9", "i", "!"]));
    assert_eq!(logprobs["text_offset"], json!([0, 0, 1, 2]));
    assert_eq!(logprobs["token_logprobs"][0], Value::Null);
    assert_eq!(logprobs["top_logprobs"][0], Value::Null);
    assert_eq!(logprobs["token_logprobs"][2], json!(-0.20507813));
    assert_eq!(body["usage"]["completion_tokens"], 1);
    // Streamed: the same text and the same lists.
    let mut streamed = request.clone();
    streamed["stream"] = json!(true);
    let stream = world.complete(streamed).await;
    assert_eq!(stream.streamed_text(0), "éi!");
    // Scoring only: nothing is generated as far as the client can see.
    let mut scored = request;
    scored["max_tokens"] = json!(0);
    let body = world.complete(scored).await.json();
    assert_eq!(body["choices"][0]["text"], "éi");
    assert_eq!(body["choices"][0]["logprobs"]["tokens"].as_array().unwrap().len(), 3);
    assert_eq!(body["choices"][0]["finish_reason"], "length");
    assert_eq!(body["usage"]["completion_tokens"], 0);
    // Ids are shown as their text.
    let body = world.complete(json!({"echo": true, "prompt": [72, 72]})).await.json();
    assert_eq!(body["choices"][0]["text"], "HH!");
}

#[tokio::test]
async fn several_prompts_and_several_answers() {
    let plan: Plan = Box::new(|request: &Request| {
        let prompt: String = request.prompt.iter().map(|id| *id as u8 as char).collect();
        Script::Run(run(&format!("{prompt}-{}", request.sampling.seed % 10)))
    });
    let world = world_with(plan, |_| {}).await;
    let ask = json!({"prompt": ["a", "bcd"], "n": 2, "seed": 7});
    let body = world.complete(ask.clone()).await.json();
    let texts: Vec<&str> =
        body["choices"].as_array().unwrap().iter().map(|c| c["text"].as_str().unwrap()).collect();
    assert_eq!((texts[0], texts[2]), ("a-7", "bcd-7"));
    // An answer's seed depends on its number alone, not on the prompts beside it.
    assert_eq!(texts[1][2..], texts[3][4..]);
    assert!(body["choices"].as_array().unwrap().iter().enumerate().all(|(i, c)| c["index"] == i));
    // Each prompt counts once: 1 + 3 tokens.
    assert_eq!(body["usage"]["prompt_tokens"], 4);
    assert_eq!(body["usage"]["completion_tokens"], 3 + 3 + 5 + 5);
    let mut stream = ask;
    stream["stream"] = json!(true);
    let stream = world.complete(stream).await;
    for (index, text) in texts.iter().enumerate() {
        assert_eq!(&stream.streamed_text(index as u64), text);
    }
    for prompt in [json!([97]), json!([[97]]), json!(["a"])] {
        let body = world.complete(json!({"prompt": prompt, "seed": 7})).await.json();
        assert_eq!(body["choices"][0]["text"], "a-7");
    }
}

#[tokio::test]
async fn models_and_probes() {
    let world = world(Script::Run(run("x"))).await;
    let body = world.get("/v1/models").await.json();
    assert_eq!(body["object"], "list");
    assert_eq!(body["data"][0]["id"], "tiny");
    assert_eq!(body["data"][0]["object"], "model");
    assert_eq!(body["data"][0]["owned_by"], "dunlin");
    assert_eq!(body["data"][0]["max_model_len"], 4096);
    assert_eq!(world.get("/v1/models/tiny").await.json()["id"], "tiny");
    assert_eq!(world.get("/v1/models/org/tiny").await.json()["id"], "org/tiny");
    assert_eq!(world.get("/v1/models/org%2Ftiny").await.json()["id"], "org/tiny");
    let missing = world.get("/v1/models/gpt-4").await;
    assert_eq!((missing.status, missing.error()["code"].as_str()), (404, Some("model_not_found")));

    assert_eq!(world.get("/health").await.status, 200);
    world.set_ready(Err("replica r0: loading".into()));
    let unready = world.get("/health").await;
    assert_eq!(
        (unready.status, unready.json()["reason"].as_str()),
        (503, Some("replica r0: loading"))
    );
    assert_eq!(world.get("/live").await.status, 200);
    let metrics = world.get("/metrics").await;
    assert_eq!(metrics.body, "dunlin_up 1\n");
    assert!(metrics.headers["content-type"].starts_with("text/plain; version=0.0.4"));
    assert_eq!(world.get("/cluster/status").await.json(), json!({"nodes": 1}));
}

#[tokio::test]
async fn every_sampling_field_reaches_the_router() {
    let world = world(Script::Run(run("x"))).await;
    let fields = json!({
        "temperature": 0.5, "top_p": 0.25, "top_k": 7, "min_p": 0.125, "seed": -1,
        "repetition_penalty": 1.5, "presence_penalty": -1.0, "frequency_penalty": 2.0,
        "logit_bias": {"65": -100, "9": 1.5}, "max_tokens": 9, "min_tokens": 2,
        "ignore_eos": true, "cache_salt": "s", "logprobs": 3, "user": "u",
        "stop": ["a", "b"], "best_of": 1, "echo": true,
    });
    world.complete(fields).await;
    let request = world.seen.lock().requests[0].clone();
    let sampling = &request.sampling;
    assert_eq!((sampling.temperature, sampling.top_p, sampling.top_k), (0.5, 0.25, 7));
    assert_eq!((sampling.min_p, sampling.repetition_penalty), (0.125, 1.5));
    assert_eq!((sampling.presence_penalty, sampling.frequency_penalty), (-1.0, 2.0));
    assert_eq!(sampling.logit_bias, [(9, 1.5), (65, -100.0)]);
    assert_eq!((sampling.seed, sampling.logprobs), (u64::MAX, Some(3)));
    assert_eq!((request.max_tokens, request.min_tokens), (9, 2));
    assert_eq!((request.cache_salt.as_str(), request.tenant.as_str()), ("s", "default"));
    let space = KeySpace { namespace: [7; 16], block_tokens: 4 };
    let keys = Chain::of_prompt(space, "default", "s", &request.prompt);
    assert_eq!(request.keys, Some(keys), "the router has nothing to hash");
    assert_eq!((request.stop_tokens.len(), request.prompt_logprobs), (0, Some(3)));
    // Defaults: OpenAI's, a seed of its own for each request, the model's stop tokens.
    world.complete(json!({})).await;
    world.complete(json!({})).await;
    let seen = world.seen.lock();
    let (one, two) = (&seen.requests[1], &seen.requests[2]);
    assert_ne!(one.sampling.seed, two.sampling.seed);
    assert_ne!(one.id, two.id);
    assert_eq!((one.sampling.temperature, one.sampling.top_p), (1.0, 1.0));
    assert_eq!((one.max_tokens, one.stop_tokens.as_slice()), (16, [256].as_slice()));
    assert_eq!(one.deadline_ms, 600_000);
}

#[tokio::test]
async fn details_name_what_served_the_request() {
    let world = world(Script::Run(run("x"))).await;
    for stream in [false, true] {
        let mut client = world.client().await;
        let body = completion(json!({"stream": stream})).to_string();
        let text = post_text("/v1/completions", &body);
        client.send(&text.replace("host: x", "host: x\r\nx-dunlin-details: 1")).await;
        let response = client.response().await;
        let last = if stream { response.events().pop().unwrap() } else { response.json() };
        assert_eq!(last["dunlin"], json!({"served_by": ["left/cpu"]}));
    }
}
