//! Connections: kept alive, pipelined, slow, malformed.

use super::harness::*;
use serde_json::json;
use std::time::Duration;

#[tokio::test]
async fn a_connection_serves_many_requests() {
    let world = world(Script::Run(run("abc"))).await;
    let mut client = world.client().await;
    for round in 0..20 {
        let stream = round % 2 == 0;
        let body = completion(json!({"stream": stream})).to_string();
        client.post("/v1/completions", &body).await;
        let response = client.response().await;
        assert_eq!(response.status, 200);
        if stream {
            assert_eq!(response.streamed_text(0), "abc");
        }
    }
}

#[tokio::test]
async fn pipelined_requests_are_answered_in_order() {
    let world = world(Script::Run(run("abc"))).await;
    let mut client = world.client().await;
    let mut all = String::new();
    for number in 0..10 {
        let body = completion(json!({"stream": number % 2 == 0, "max_tokens": number + 1}));
        all.push_str(&post_text("/v1/completions", &body.to_string()));
    }
    client.send(&all).await;
    for number in 0..10u32 {
        let response = client.response().await;
        let text = match number % 2 {
            0 => response.streamed_text(0),
            _ => response.json()["choices"][0]["text"].as_str().unwrap().to_owned(),
        };
        assert_eq!(text, &"abc"[..3.min(number as usize + 1)]);
    }
}

#[tokio::test]
async fn a_request_may_come_byte_by_byte() {
    let world = world(Script::Run(run("abc"))).await;
    let mut client = world.client().await;
    let text = post_text("/v1/completions", &completion(json!({})).to_string());
    for byte in text.chars() {
        client.send(&byte.to_string()).await;
        tokio::task::yield_now().await;
    }
    assert_eq!(client.response().await.json()["choices"][0]["text"], "abc");
}

#[tokio::test]
async fn connection_close_is_honoured_and_http_1_0_served() {
    let world = world(Script::Run(run("abc"))).await;
    for stream in [true, false] {
        let text = post_text("/v1/completions", &completion(json!({"stream": stream})).to_string());
        let mut client = world.client().await;
        client.send(&text.replace("host: x", "host: x\r\nconnection: close")).await;
        assert_eq!(client.response().await.status, 200);
        assert!(client.closed().await);
        // HTTP/1.0 has no chunks: the end of the connection ends the stream.
        let mut client = world.client().await;
        client.send(&text.replace("HTTP/1.1", "HTTP/1.0")).await;
        let head = client.head().await;
        assert_eq!(head.status, 200);
        assert!(!head.headers.contains_key("transfer-encoding"));
        if stream {
            client.until("data: [DONE]\n\n").await;
            assert!(client.closed().await);
        }
    }
}

#[tokio::test]
async fn malformed_http_is_refused_and_the_server_lives() {
    let world = world(Script::Run(run("x"))).await;
    let wrong = [
        "\0\0\0\0\r\n\r\n".to_owned(),
        "GET\r\n\r\n".to_owned(),
        "GET / HTTP/9.9\r\n\r\n".to_owned(),
        "POST /v1/completions HTTP/1.1\r\ncontent-length: x\r\n\r\n".to_owned(),
        "POST /v1/completions HTTP/1.1\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\n"
            .to_owned(),
        "GET / HTTP/1.1\r\nbad header\r\n\r\n".to_owned(),
        format!("GET /{} HTTP/1.1\r\n\r\n", "x".repeat(1 << 20)),
        format!("GET / HTTP/1.1\r\n{}\r\n", "a: b\r\n".repeat(1000)),
        "\x16\x03\x01\x02\0\x01\0\x01\u{fc}\x03\x03".to_owned() + &"\0".repeat(600),
    ];
    for text in wrong {
        let mut client = world.client().await;
        // The server may close before it has read everything.
        let _ = tokio::io::AsyncWriteExt::write_all(&mut client.stream, text.as_bytes()).await;
        let mut answer = Vec::new();
        let read = tokio::io::AsyncReadExt::read_to_end(&mut client.stream, &mut answer);
        let _ = tokio::time::timeout(PATIENCE, read).await.expect("not closed");
        if !answer.is_empty() {
            assert!(answer.starts_with(b"HTTP/1.1 4"), "{}", String::from_utf8_lossy(&answer));
        }
    }
    assert_eq!(world.get("/live").await.status, 200);
}

#[tokio::test]
async fn a_head_that_never_ends_is_given_up() {
    let short = |args: &mut crate::gateway::GatewayArgs| {
        args.limits.head_read = Duration::from_millis(100);
    };
    let world = world_with(Box::new(|_| Script::Run(run("x"))), short).await;
    let mut client = world.client().await;
    client.send("POST /v1/completions HTTP/1.1\r\nhost").await;
    let mut rest = Vec::new();
    let read = tokio::io::AsyncReadExt::read_to_end(&mut client.stream, &mut rest);
    let _ = tokio::time::timeout(PATIENCE, read).await.expect("not closed");
    // So is one that never begins.
    let mut idle = world.client().await;
    assert!(idle.closed().await);
}

#[tokio::test]
async fn more_connections_than_allowed_wait_their_turn() {
    let few = |args: &mut crate::gateway::GatewayArgs| args.limits.connections = 2;
    let world = world_with(Box::new(|_| Script::Run(run("x"))), few).await;
    let (one, two) = (world.client().await, world.client().await);
    let mut three = world.client().await;
    three.send("GET /live HTTP/1.1\r\nhost: x\r\n\r\n").await;
    let early = tokio::time::timeout(Duration::from_millis(100), three.head()).await;
    assert!(early.is_err());
    drop((one, two));
    assert_eq!(three.response().await.status, 200);
}
