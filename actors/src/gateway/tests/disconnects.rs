//! C62: a client that goes away stops its work, at whatever moment, streamed or not.

use super::harness::*;
use serde_json::json;
use std::time::Duration;

/// Long enough that it would still run at the end of the test, were it not cancelled.
fn long() -> Run {
    Run { pace: Duration::from_millis(100), ..run(&"x".repeat(3000)) }
}

async fn steps(world: &World) -> u32 {
    world.seen.lock().sent.values().sum()
}

/// All requests are cancelled, within two steps of the last one's close.
async fn all_stopped(world: &World, clients: usize) {
    assert!(world.quiet().await, "{:?}", world.seen.lock().running);
    let seen = world.seen.lock();
    assert_eq!(seen.requests.len(), clients);
    assert_eq!(seen.cancelled.len(), clients);
    assert!(seen.cancelled.values().all(|stopped| !stopped));
}

#[tokio::test]
async fn clients_that_close_at_every_stage() {
    let world = world(Script::Run(long())).await;
    let mut clients = Vec::new();
    for number in 0..100 {
        let stream = number % 4 != 3;
        let mut client = world.client().await;
        let body = completion(json!({"stream": stream, "max_tokens": 3000})).to_string();
        client.post("/v1/completions", &body).await;
        clients.push((number, client));
    }
    while world.seen.lock().running.len() < 100 {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    for (number, client) in &mut clients {
        match *number % 4 {
            // Closed before the headers were read; after the first chunk; in mid-stream.
            0 | 3 => {}
            1 => drop((client.head().await, client.chunk().await)),
            _ => {
                client.head().await;
                for _ in 0..3 {
                    client.chunk().await;
                }
            }
        }
    }
    let before = steps(&world).await;
    drop(clients);
    all_stopped(&world, 100).await;
    let after = steps(&world).await - before;
    assert!(after <= 200, "{after} steps were run for 100 clients that had gone");
    // It serves as if nothing had been.
    assert_eq!(world.complete(json!({"max_tokens": 1})).await.status, 200);
}

#[tokio::test]
async fn each_client_alone_stops_within_two_steps() {
    let world = world(Script::Run(long())).await;
    for (count, stream) in [true, false, true, false].into_iter().enumerate() {
        let mut client = world.client().await;
        let body = chat(json!({"stream": stream, "max_tokens": 3000})).to_string();
        client.post("/v1/chat/completions", &body).await;
        while world.seen.lock().sent.len() <= count {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        if count >= 2 {
            // A reset, not a farewell.
            client.stream.set_zero_linger().unwrap();
        }
        let before = steps(&world).await;
        drop(client);
        assert!(world.quiet().await);
        let after = steps(&world).await - before;
        assert!(after <= 2, "{after} steps after the client had gone (stream: {stream})");
    }
}

#[tokio::test]
async fn several_answers_stop_together() {
    let world = world(Script::Run(long())).await;
    let mut client = world.client().await;
    let body = completion(json!({"stream": true, "max_tokens": 3000, "n": 5})).to_string();
    client.post("/v1/completions", &body).await;
    client.head().await;
    client.chunk().await;
    drop(client);
    all_stopped(&world, 5).await;
}

#[tokio::test]
async fn closing_between_the_last_token_and_done_disturbs_nothing() {
    let world = world(Script::Run(run("abc"))).await;
    for _ in 0..20 {
        let mut client = world.client().await;
        client.post("/v1/completions", &completion(json!({"stream": true})).to_string()).await;
        client.until("\"c\"").await;
        drop(client);
    }
    assert!(world.quiet().await);
    assert_eq!(world.complete(json!({})).await.status, 200);
}

#[tokio::test]
async fn a_client_that_leaves_while_the_router_decides_starts_no_lasting_work() {
    let world = world(Script::Silent).await;
    let mut client = world.client().await;
    client.post("/v1/completions", &completion(json!({})).to_string()).await;
    while world.seen.lock().requests.is_empty() {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    drop(client);
    until("cancelled", || world.seen.lock().cancelled.len() == 1).await;
}

#[tokio::test]
async fn a_body_that_never_comes_starts_nothing() {
    let short = |args: &mut crate::gateway::GatewayArgs| {
        args.limits.body_read = Duration::from_millis(100);
    };
    let world = world_with(Box::new(|_| Script::Run(run("x"))), short).await;
    let mut client = world.client().await;
    client.send("POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 50\r\n\r\n{").await;
    assert_eq!(client.response().await.status, 408);
    // Cut off in the middle of a body.
    let mut client = world.client().await;
    client.send("POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 50\r\n\r\n{").await;
    drop(client);
    tokio::time::sleep(Duration::from_millis(50)).await;
    assert!(world.seen.lock().requests.is_empty());
}

#[tokio::test]
async fn a_reader_that_takes_nothing_is_given_up() {
    let short = |args: &mut crate::gateway::GatewayArgs| {
        args.limits.write_stall = Duration::from_millis(200);
    };
    let plan: Plan = Box::new(|_| Script::Run(Run { pace: Duration::from_micros(100), ..long() }));
    let world = world_with(plan, short).await;
    let mut client = world.client().await;
    // Many answers with log probabilities fill the socket's buffers.
    let ask = json!({"stream": true, "max_tokens": 3000, "n": 16, "logprobs": 20});
    client.post("/v1/completions", &completion(ask).to_string()).await;
    let given_up = || {
        let seen = world.seen.lock();
        seen.requests.len() == 16 && seen.running.is_empty()
    };
    until("given up", given_up).await;
    // The server closed the connection without waiting for ever: the stream has no end.
    let mut bytes = Vec::new();
    tokio::time::sleep(Duration::from_millis(400)).await;
    let _ = tokio::io::AsyncReadExt::read_to_end(&mut client.stream, &mut bytes).await;
    assert!(!String::from_utf8_lossy(&bytes).contains("[DONE]"));
}
