//! Everything that is refused, with its status, `param` and shape, before any work starts.

use super::harness::*;
use crate::gateway::{ApiKey, Limits};
use crate::messages::*;
use serde_json::{Value, json};

#[tokio::test]
async fn wrong_fields_are_400_and_named() {
    let world = world(Script::Run(run("x"))).await;
    let chat_cases = [
        (json!({"messages": null}), "messages"),
        (json!({"messages": "hi"}), "messages"),
        (json!({"messages": []}), "messages"),
        (json!({"messages": ["hi"]}), "messages[0]"),
        (json!({"messages": [{"content": "x"}]}), "messages[0].role"),
        (json!({"messages": [{"role": "tool", "content": "x"}]}), "messages[0].role"),
        (json!({"messages": [{"role": "user"}]}), "messages[0].content"),
        (json!({"messages": [{"role": "user", "content": 5}]}), "messages[0].content"),
        (
            json!({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}),
            "messages[0].content[0].type",
        ),
        (
            json!({"messages": [{"role": "assistant", "content": "x", "tool_calls": [1]}]}),
            "messages[0].tool_calls",
        ),
        (json!({"tools": [{"type": "function"}]}), "tools"),
        (json!({"functions": [{"name": "f"}]}), "functions"),
        (json!({"tool_choice": "required"}), "tool_choice"),
        (json!({"response_format": {"type": "json_object"}}), "response_format.type"),
        (json!({"response_format": "text"}), "response_format"),
        (json!({"modalities": ["text", "audio"]}), "modalities"),
        (json!({"audio": {"voice": "x"}}), "audio"),
        (json!({"reasoning_effort": "high"}), "reasoning_effort"),
        (json!({"logprobs": 3}), "logprobs"),
        (json!({"top_logprobs": 3}), "top_logprobs"),
        (json!({"logprobs": true, "top_logprobs": 21}), "top_logprobs"),
        (json!({"max_tokens": 3, "max_completion_tokens": 4}), "max_completion_tokens"),
        (json!({"prompt": "x"}), "prompt"),
        (json!({"best_of": 1}), "best_of"),
    ];
    for (fields, param) in chat_cases {
        let response = world.chat(fields.clone()).await;
        assert_eq!((response.status, response.param().as_str()), (400, param), "{fields}");
        assert_eq!(response.error()["type"], "invalid_request_error");
    }
    let cases = [
        (json!({"prompt": null}), "prompt"),
        (json!({"prompt": ""}), "prompt"),
        (json!({"prompt": []}), "prompt"),
        (json!({"prompt": 5}), "prompt"),
        (json!({"prompt": [true]}), "prompt[0]"),
        (json!({"prompt": ["a", 5]}), "prompt[1]"),
        (json!({"prompt": [5, "a"]}), "prompt[1]"),
        (json!({"prompt": [512]}), "prompt[0]"),
        (json!({"prompt": [-1]}), "prompt[0]"),
        (json!({"prompt": [1.5]}), "prompt[0]"),
        (json!({"prompt": [[1], [9999]]}), "prompt[1][0]"),
        (json!({"prompt": [[1], []]}), "prompt"),
        (json!({"n": 0}), "n"),
        (json!({"n": 129}), "n"),
        (json!({"n": 1.0}), "n"),
        (json!({"n": 100, "prompt": ["a", "b"]}), "prompt"),
        (json!({"n": 18446744073709551615u64}), "n"),
        (json!({"best_of": 2}), "best_of"),
        (json!({"logprobs": true}), "logprobs"),
        (json!({"logprobs": -1}), "logprobs"),
        (json!({"max_tokens": 0}), "max_tokens"),
        (json!({"max_tokens": -5}), "max_tokens"),
        (json!({"max_tokens": "5"}), "max_tokens"),
        (json!({"max_tokens": 5, "min_tokens": 6}), "min_tokens"),
        (json!({"temperature": -0.1}), "temperature"),
        (json!({"temperature": 2.1}), "temperature"),
        (json!({"temperature": "hot"}), "temperature"),
        (json!({"temperature": [1]}), "temperature"),
        (json!({"top_p": 1.1}), "top_p"),
        (json!({"top_p": -0.5}), "top_p"),
        (json!({"top_k": -2}), "top_k"),
        (json!({"top_k": 1.5}), "top_k"),
        (json!({"min_p": 2}), "min_p"),
        (json!({"repetition_penalty": 0}), "repetition_penalty"),
        (json!({"presence_penalty": 2.5}), "presence_penalty"),
        (json!({"frequency_penalty": -2.5}), "frequency_penalty"),
        (json!({"logit_bias": [1]}), "logit_bias"),
        (json!({"logit_bias": {"x": 1}}), "logit_bias"),
        (json!({"logit_bias": {"512": 1}}), "logit_bias"),
        (json!({"logit_bias": {"-1": 1}}), "logit_bias"),
        (json!({"logit_bias": {"7": 1, "07": 2}}), "logit_bias"),
        (json!({"logit_bias": {"7": 101}}), "logit_bias.7"),
        (json!({"logit_bias": {"7": "1"}}), "logit_bias.7"),
        (json!({"stop": 5}), "stop"),
        (json!({"stop": ""}), "stop"),
        (json!({"stop": ["a", 5]}), "stop[1]"),
        (json!({"stop": ["a", "b", "c", "d", "e"]}), "stop"),
        (json!({"stop": "x".repeat(1025)}), "stop"),
        (json!({"seed": 1.5}), "seed"),
        (json!({"seed": "1"}), "seed"),
        (json!({"stream": "yes"}), "stream"),
        (json!({"stream_options": {"include_usage": true}}), "stream_options"),
        (json!({"stream": true, "stream_options": 5}), "stream_options"),
        (
            json!({"stream": true, "stream_options": {"include_usage": 1}}),
            "stream_options.include_usage",
        ),
        (json!({"stream": true, "stream_options": {"x": 1}}), "stream_options.x"),
        (json!({"echo": "yes"}), "echo"),
        (json!({"suffix": "x"}), "suffix"),
        (json!({"messages": []}), "messages"),
        (json!({"max_completion_tokens": 5}), "max_completion_tokens"),
        (json!({"ignore_eos": 1}), "ignore_eos"),
        (json!({"cache_salt": 1}), "cache_salt"),
        (json!({"temprature": 0.5}), "temprature"),
        (json!({"model": null}), "model"),
        (json!({"model": 5}), "model"),
    ];
    for (fields, param) in cases {
        let response = world.complete(fields.clone()).await;
        assert_eq!((response.status, response.param().as_str()), (400, param), "{fields}");
    }
    assert!(world.seen.lock().requests.is_empty(), "work was started for a refused request");
}

#[tokio::test]
async fn harmless_fields_and_nulls_are_accepted() {
    let world = world(Script::Run(run("x"))).await;
    let fields = json!({
        "user": "u", "metadata": {"a": "b"}, "store": false, "service_tier": "auto",
        "tools": [], "tool_choice": "none", "parallel_tool_calls": true, "modalities": ["text"],
        "response_format": {"type": "text"}, "audio": null, "temperature": null, "stop": null,
        "n": null, "stream": null, "prediction": null, "top_k": -1, "top_p": 0,
        "messages": [
            {"role": "developer", "content": "d", "name": "x"},
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"role": "assistant", "content": "c", "tool_calls": null},
            {"role": "user", "content": ""},
        ],
    });
    let response = world.chat(fields).await;
    assert_eq!(response.status, 200, "{}", response.body);
    let prompt: Vec<u8> = world.seen.lock().requests[0]
        .prompt
        .iter()
        .filter_map(|id| (*id).try_into().ok())
        .collect();
    assert_eq!(
        String::from_utf8(prompt).unwrap(),
        "system\nduser\nabassistant\ncuser\nassistant\n"
    );
}

#[tokio::test]
async fn another_model_does_not_answer() {
    let world = world(Script::Run(run("x"))).await;
    let response = world.chat(json!({"model": "gpt-4"})).await;
    let error = response.error();
    assert_eq!((response.status, error["code"].as_str()), (404, Some("model_not_found")));
    assert_eq!(error["param"], "model");
    // A second name of the one model is that model.
    assert_eq!(world.chat(json!({"model": "org/tiny"})).await.json()["model"], "tiny");
}

#[tokio::test]
async fn what_does_not_fit_is_refused_with_both_numbers() {
    let world = world(Script::Run(run("x"))).await;
    let response = world.complete(json!({"prompt": "x".repeat(5000)})).await;
    let error = response.error();
    assert_eq!((response.status, error["code"].as_str()), (400, Some("context_length_exceeded")));
    let message = error["message"].as_str().unwrap();
    assert!(message.contains("4096 tokens") && message.contains("5001 tokens"), "{message}");
    let response = world.complete(json!({"max_tokens": 4095})).await;
    assert_eq!((response.status, response.param().as_str()), (400, "prompt"));
    assert!(world.seen.lock().requests.is_empty());
    // The default is what there is room for.
    world.chat(json!({})).await;
    assert_eq!(world.seen.lock().requests[0].max_tokens, 4096 - 20);
}

#[tokio::test]
async fn a_default_length_shrinks_to_the_largest_replica() {
    let plan: Plan = Box::new(|request: &Request| {
        let need = request.prompt.len() as u64 + u64::from(request.max_tokens);
        match need <= 1024 {
            true => Script::Run(run("x")),
            false => Script::Refuse(Refusal::NeverFits { need, have: 1024 }),
        }
    });
    let world = world_with(plan, |_| {}).await;
    assert_eq!(world.chat(json!({})).await.status, 200);
    assert_eq!(world.seen.lock().requests.last().unwrap().max_tokens, 1024 - 20);
    // What the client asked for is not changed (C38).
    for fields in [json!({"max_tokens": 2000}), json!({"prompt": "x".repeat(2000)})] {
        let response = world.complete(fields).await;
        let message = response.error()["message"].as_str().unwrap().to_owned();
        assert_eq!(response.status, 400);
        assert!(message.contains("1024") && message.contains("20"), "{message}");
    }
    assert_eq!(world.complete(json!({"prompt": "0123456789"})).await.status, 200);
}

#[tokio::test]
async fn refusals_of_the_router_have_their_status() {
    let cases = [
        (Refusal::NeverFits { need: 9, have: 8 }, 400, None),
        (Refusal::Overloaded { waiting: 9, retry_after_ms: 1200 }, 429, Some("2")),
        (Refusal::Overloaded { waiting: 9, retry_after_ms: 1 }, 429, Some("1")),
        (Refusal::Draining, 503, Some("5")),
        (Refusal::NotReady { reason: "loading".into() }, 503, Some("1")),
    ];
    for (refusal, status, retry_after) in cases {
        let world = world(Script::Refuse(refusal)).await;
        for stream in [true, false] {
            let response = world.complete(json!({"stream": stream, "max_tokens": 5})).await;
            assert_eq!(response.status, status);
            assert_eq!(response.headers.get("retry-after").map(String::as_str), retry_after);
            response.error();
        }
        assert!(world.seen.lock().cancelled.is_empty());
    }
}

#[tokio::test]
async fn one_refusal_among_several_answers_leaves_nothing_running() {
    let count = std::sync::atomic::AtomicU32::new(0);
    let plan: Plan = Box::new(move |_: &Request| {
        match count.fetch_add(1, std::sync::atomic::Ordering::SeqCst) {
            2 => Script::Refuse(Refusal::Overloaded { waiting: 1, retry_after_ms: 10 }),
            _ => Script::Run(Run {
                pace: std::time::Duration::from_millis(10),
                ..run(&"x".repeat(900))
            }),
        }
    });
    let world = world_with(plan, |_| {}).await;
    let response = world.complete(json!({"n": 3, "max_tokens": 900})).await;
    assert_eq!(response.status, 429);
    assert!(world.quiet().await);
    assert_eq!(world.seen.lock().cancelled.len(), 2);
}

#[tokio::test]
async fn a_missing_router_is_503() {
    let world = world(Script::Run(run("x"))).await;
    world.kill_router();
    let response = world.complete(json!({})).await;
    assert_eq!(response.status, 503);
    assert_eq!(response.error()["code"], "router_unavailable");
    assert!(response.headers.contains_key("retry-after"));
}

#[tokio::test]
async fn a_silent_router_is_503_and_is_told_to_cancel() {
    let short = |args: &mut crate::gateway::GatewayArgs| {
        args.limits.submit = std::time::Duration::from_millis(50);
    };
    let world = world_with(Box::new(|_| Script::Silent), short).await;
    assert_eq!(world.complete(json!({})).await.status, 503);
    until("cancelled", || !world.seen.lock().cancelled.is_empty()).await;
    let seen = world.seen.lock();
    assert_eq!(seen.cancelled.get(&seen.requests[0].id), Some(&false));
}

#[tokio::test]
async fn keys_are_needed_where_there_are_any_and_name_the_tenant() {
    let keyed = |args: &mut crate::gateway::GatewayArgs| {
        args.api_keys = vec![ApiKey { name: "ann".into(), secret: "s3cret".into() }];
    };
    let world = world_with(Box::new(|_| Script::Run(run("x"))), keyed).await;
    for path in ["/v1/models", "/v1/models/tiny", "/cluster/status"] {
        let response = world.get(path).await;
        assert_eq!(response.status, 401, "{path}");
        assert_eq!(response.error()["code"], "invalid_api_key");
    }
    assert_eq!(world.complete(json!({})).await.status, 401);
    for path in ["/health", "/live", "/metrics"] {
        assert_eq!(world.get(path).await.status, 200, "{path}");
    }
    let mut client = world.client().await;
    let text = post_text("/v1/completions", &completion(json!({})).to_string());
    client.send(&text.replace("host: x", "host: x\r\nauthorization: Bearer s3cret")).await;
    assert_eq!(client.response().await.status, 200);
    assert_eq!(world.seen.lock().requests[0].tenant, "ann");
}

#[tokio::test]
async fn what_is_no_request_is_refused_in_the_same_shape() {
    let small = |args: &mut crate::gateway::GatewayArgs| {
        args.limits = Limits { body_bytes: 4096, ..args.limits.clone() };
    };
    let world = world_with(Box::new(|_| Script::Run(run("x"))), small).await;
    let mut client = world.client().await;
    let bodies = [
        "",
        "{",
        "[]",
        "5",
        "nul",
        "{\"model\": \"tiny\", \"prompt\": \"\\ud800\"}",
        "{\"model\": \"tiny\", \"prompt\": \"x\", \"temperature\": 1e999}",
        "{\"model\": \"tiny\", \"prompt\": \"x\", \"temperature\": NaN}",
    ];
    for body in bodies {
        client.post("/v1/completions", body).await;
        let response = client.response().await;
        assert_eq!(response.status, 400, "{body}");
        response.error();
    }
    client.post("/v1/completions", "{\n  \"model\": tiny}").await;
    let message = client.response().await.error()["message"].as_str().unwrap().to_owned();
    assert!(message.contains("line 2 column"), "{message}");
    // Nested beyond reason: refused, not a stack overflow.
    client.post("/v1/completions", &"[".repeat(4000)).await;
    assert_eq!(client.response().await.status, 400);

    let text = post_text("/v1/completions", "{}");
    client.send(&text.replace("application/json", "text/plain")).await;
    assert_eq!(client.response().await.error()["code"], "unsupported_media_type");
    client.send(&text.replace("application/json", "Application/JSON; charset=utf-8")).await;
    assert_eq!(client.response().await.param(), "model");

    for (method, path, status) in [
        ("GET", "/v1/chat/completions", 405),
        ("DELETE", "/v1/models", 405),
        ("POST", "/health", 405),
        ("GET", "/", 404),
        ("POST", "/v1/embeddings", 404),
        ("GET", "/v1/../etc/passwd", 404),
    ] {
        client
            .send(&format!("{method} {path} HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n\r\n"))
            .await;
        let response = client.response().await;
        assert_eq!(response.status, status, "{method} {path}");
        response.error();
        assert_eq!(response.headers.contains_key("allow"), status == 405);
    }
    // Too large: told so, whether or not the length was announced.
    client.post("/v1/completions", &"x".repeat(5000)).await;
    let response = client.response().await;
    assert_eq!(
        (response.status, response.error()["code"].as_str()),
        (413, Some("request_too_large"))
    );
    let mut client = world.client().await;
    client
        .send("POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n")
        .await;
    for _ in 0..5 {
        client.send(&format!("400\r\n{}\r\n", "x".repeat(1024))).await;
    }
    client.send("0\r\n\r\n").await;
    assert_eq!(client.response().await.status, 413);
    assert!(world.seen.lock().requests.is_empty());
}

#[tokio::test]
async fn the_address_in_use_is_named_with_its_key() {
    let world = world(Script::Run(run("x"))).await;
    let error = std::net::TcpListener::bind(world.address).unwrap_err();
    let error = crate::gateway::GatewayError::Bind {
        node: "front".into(),
        address: world.address,
        source: error,
    };
    let text = error.to_string();
    assert!(text.contains("[node.front] http") && text.contains(&world.address.to_string()));
    let _: Value = json!(text);
}
