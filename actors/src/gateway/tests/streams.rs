//! A stream is its whole answer in pieces, whoever reads it and however it was generated.

use super::harness::*;
use crate::gateway::ByteModel;
use proptest::prelude::*;
use proptest::test_runner::TestRunner;
use serde_json::json;
use std::time::Duration;

const CZECH: &str = "ďábelské 🫠 龜 👩‍👩‍👧 T́";

#[tokio::test]
async fn characters_are_never_cut() {
    let world = world(Script::Run(run(CZECH))).await;
    let stream = world.complete(json!({"stream": true, "max_tokens": 100})).await;
    // The client checks that every chunk of bytes is UTF-8; every event must be too, alone.
    assert!(stream.events().iter().all(|e| !e.to_string().contains('\u{fffd}')));
    assert_eq!(stream.streamed_text(0), CZECH);
    // Ended by max_tokens in mid-character: what is whole, and nothing else.
    for cut in 1..CZECH.len() {
        let whole = world.complete(json!({"max_tokens": cut})).await.json();
        let text = whole["choices"][0]["text"].as_str().unwrap().to_owned();
        let valid = CZECH.as_bytes()[..cut].utf8_chunks().next().unwrap().valid();
        assert_eq!(text, valid);
    }
}

#[tokio::test]
async fn a_stop_string_holds_back_and_lets_go() {
    for group in [1, 2, 3, 10] {
        let world = world(Script::Run(Run { group, ..run("ABCDEFGHIJ") })).await;
        let stop = json!({"stop": ["DEFGHIJ"], "stream": true});
        let stream = world.complete(stop).await;
        assert_eq!(stream.streamed_text(0), "ABC");
        assert_eq!(stream.events().last().unwrap()["choices"][0]["finish_reason"], "stop");
        let stream = world.complete(json!({"stop": "DEX", "stream": true})).await;
        assert_eq!(stream.streamed_text(0), "ABCDEFGHIJ");
        // A stop string that the end of the answer cuts short is text.
        let stream = world.complete(json!({"stop": "JK", "stream": true})).await;
        assert_eq!(stream.streamed_text(0), "ABCDEFGHIJ");
    }
}

#[tokio::test]
async fn a_stop_string_stops_the_work_and_counts_what_it_took() {
    let slow = Run { pace: Duration::from_millis(5), ..run(&"abc".repeat(300)) };
    let world = world(Script::Run(slow)).await;
    for stream in [false, true] {
        let ask = json!({
            "stop": ["bca"], "max_tokens": 900, "stream": stream,
            "stream_options": if stream { json!({"include_usage": true}) } else { json!(null) },
        });
        let response = world.complete(ask).await;
        let usage = match stream {
            true => response.events().last().unwrap()["usage"].clone(),
            false => response.json()["usage"].clone(),
        };
        assert_eq!(usage["completion_tokens"], 4);
        assert!(world.quiet().await);
    }
    let seen = world.seen.lock();
    assert!(seen.cancelled.values().all(|stopped| *stopped) && seen.cancelled.len() == 2);
    assert!(seen.sent.values().all(|sent| *sent <= 4 + 2), "{:?}", seen.sent);
}

#[tokio::test]
async fn the_stop_token_is_not_shown_unless_it_is_ignored() {
    let ids = vec![65, ByteModel::END, 66];
    let world = world(Script::Run(ids_run(ids))).await;
    let whole = world.complete(json!({"logprobs": 0})).await.json();
    assert_eq!(whole["choices"][0]["text"], "AB");
    assert_eq!(whole["choices"][0]["logprobs"]["tokens"], json!(["A", "B"]));
    let whole = world.complete(json!({"logprobs": 0, "ignore_eos": true})).await.json();
    assert_eq!(whole["choices"][0]["logprobs"]["tokens"], json!(["A", "<|end|>", "B"]));
}

#[tokio::test]
async fn a_slow_reader_gets_every_token() {
    let text: String = (0..400).map(|i| format!("{i} ")).collect();
    let world = world(Script::Run(Run { group: 4, ..run(&text) })).await;
    let mut client = world.client().await;
    let body = completion(json!({"stream": true, "max_tokens": 3000})).to_string();
    client.post("/v1/completions", &body).await;
    let mut response = client.head().await;
    let mut chunks = 0;
    while let Some(chunk) = client.chunk().await {
        response.body.push_str(&chunk);
        chunks += 1;
        if chunks < 20 {
            tokio::time::sleep(Duration::from_millis(25)).await;
        }
    }
    assert_eq!(response.streamed_text(0), text);
    assert!(chunks > 3, "the answer came in {chunks} chunks");
}

#[tokio::test]
async fn a_stream_that_waits_is_kept_alive() {
    let slow = Run { pace: Duration::from_millis(120), ..run("abc") };
    let short = |args: &mut crate::gateway::GatewayArgs| {
        args.limits.keep_alive = Duration::from_millis(40);
    };
    let world = world_with(Box::new(move |_| Script::Run(slow.clone())), short).await;
    let stream = world.complete(json!({"stream": true})).await;
    assert!(stream.body.contains(": keep-alive\n\n"));
    assert_eq!(stream.streamed_text(0), "abc");
}

/// C54: for any tokens, grouping, stop strings and readers, the stream is the whole answer.
#[test]
fn stream_and_whole_answer_are_equal() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let strategy = (
        prop::collection::vec(prop_oneof![97u32..100, 0u32..300, Just(0xc3u32), Just(0xa9)], 0..60),
        1usize..11,
        prop::collection::vec("[a-cé]{1,4}", 0..4),
        any::<bool>(),
        1u32..50,
    );
    let config = ProptestConfig { cases: 200, ..ProptestConfig::default() };
    let mut runner = TestRunner::new(config);
    let result = runner.run(&strategy, |(ids, group, stop, chat_endpoint, max_tokens)| {
        runtime.block_on(async {
            let world = world(Script::Run(Run { group, ..ids_run(ids) })).await;
            let ask = |stream: bool| {
                let mut ask = json!({
                    "stop": stop, "max_tokens": max_tokens, "stream": stream, "n": 2,
                });
                ask["logprobs"] = if chat_endpoint { json!(true) } else { json!(1) };
                if stream {
                    ask["stream_options"] = json!({"include_usage": true});
                }
                ask
            };
            let (whole, stream) = if chat_endpoint {
                (world.chat(ask(false)).await, world.chat(ask(true)).await)
            } else {
                (world.complete(ask(false)).await, world.complete(ask(true)).await)
            };
            let (whole, events) = (whole.json(), stream.events());
            for index in 0..2 {
                let choice = &whole["choices"][index];
                let text = choice["text"].as_str().or(choice["message"]["content"].as_str());
                prop_assert_eq!(text.unwrap(), stream.streamed_text(index as u64));
                let ends: Vec<_> = events
                    .iter()
                    .flat_map(|e| e["choices"].as_array().unwrap())
                    .filter(|c| c["index"] == index && !c["finish_reason"].is_null())
                    .collect();
                prop_assert_eq!(ends.len(), 1);
                prop_assert_eq!(&ends[0]["finish_reason"], &choice["finish_reason"]);
                let listed = |choice: &serde_json::Value| {
                    let logprobs = &choice["logprobs"];
                    let list = logprobs["content"].as_array().or(logprobs["tokens"].as_array());
                    list.cloned().unwrap_or_default()
                };
                let streamed: Vec<_> = events
                    .iter()
                    .flat_map(|e| e["choices"].as_array().unwrap())
                    .filter(|c| c["index"] == index)
                    .flat_map(listed)
                    .collect();
                prop_assert_eq!(listed(choice), streamed);
            }
            prop_assert_eq!(&events.last().unwrap()["usage"], &whole["usage"]);
            Ok(())
        })
    });
    if let Err(error) = result {
        panic!("{error}\nrepeat with PROPTEST_RNG_SEED, or the regression line above");
    }
}
