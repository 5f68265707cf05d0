//! Every answer ends exactly once: well, with one error, or by drain.

use super::harness::*;
use crate::gateway::{GatewayArgs, drain};
use crate::messages::*;
use dunlin_runtime::{Incarnation, MemoryNetwork, Node, NodeName, NodeOptions};
use serde_json::json;
use std::time::{Duration, Instant};

fn failing(text: &str, code: FailureCode) -> Script {
    Script::Run(Run { end: End::Failed(code, "stage 1 broke"), ..run(text) })
}

#[tokio::test]
async fn a_failure_before_the_first_byte_is_a_status() {
    for (code, status) in [
        (FailureCode::Deadline, 504),
        (FailureCode::Poison, 500),
        (FailureCode::NotFinite, 500),
        (FailureCode::NeverFits, 500),
        (FailureCode::Internal, 500),
    ] {
        let world = world(failing("", code)).await;
        for stream in [false, true] {
            let response = world.complete(json!({"stream": stream})).await;
            assert_eq!(response.status, status);
            assert_eq!(response.error()["message"], "stage 1 broke");
            assert_eq!(response.error()["type"], "server_error");
        }
    }
}

#[tokio::test]
async fn a_failure_in_a_stream_is_one_event_before_the_end() {
    let world = world(failing("abc", FailureCode::NotFinite)).await;
    let mut client = world.client().await;
    client.post("/v1/completions", &completion(json!({"stream": true})).to_string()).await;
    let response = client.response().await;
    assert_eq!(response.status, 200);
    let events = response.events();
    let errors: Vec<_> = events.iter().filter(|e| e.get("error").is_some()).collect();
    assert_eq!(errors.len(), 1);
    assert_eq!(events.last(), errors.first().copied());
    assert_eq!(errors[0]["error"]["code"], "logits_not_finite");
    assert!(events.iter().all(|e| e["choices"][0]["finish_reason"].is_null()));
    // The connection is as good as before.
    client.send("GET /live HTTP/1.1\r\nhost: x\r\n\r\n").await;
    assert_eq!(client.response().await.status, 200);
    // Not streamed: a status, and none of the text.
    let whole = world.complete(json!({})).await;
    assert_eq!((whole.status, whole.error()["code"].as_str()), (500, Some("logits_not_finite")));
}

#[tokio::test]
async fn one_failed_answer_ends_them_all() {
    let plan: Plan = Box::new(|request: &Request| match request.sampling.seed {
        7 => Script::Run(Run { pace: Duration::from_millis(5), ..run(&"x".repeat(500)) }),
        _ => failing("ab", FailureCode::Internal),
    });
    let world = world_with(plan, |_| {}).await;
    let ask = json!({"n": 2, "seed": 7, "max_tokens": 500, "stream": true});
    let events = world.complete(ask).await.events();
    assert!(events.last().unwrap().get("error").is_some());
    assert!(world.quiet().await);
}

#[tokio::test]
async fn a_router_that_falls_silent_ends_the_answer_by_its_deadline() {
    let mute = |text: &str| Script::Run(Run { end: End::Nothing, ..run(text) });
    let short = |args: &mut GatewayArgs| args.limits.deadline = Duration::from_millis(100);
    for text in ["", "abc"] {
        let script = mute(text);
        let world = world_with(Box::new(move |_| script.clone()), short).await;
        let began = Instant::now();
        let whole = world.complete(json!({})).await;
        assert_eq!(whole.status, 504);
        assert_eq!(whole.error()["code"], "deadline_exceeded");
        let stream = world.complete(json!({"stream": true})).await;
        assert_eq!(stream.events().last().unwrap()["error"]["code"], "deadline_exceeded");
        assert!(began.elapsed() < Duration::from_secs(8));
        assert_eq!(world.seen.lock().cancelled.len(), 2);
    }
}

/// A router on another node that dies and comes back has forgotten its requests: they end at
/// once, not at their deadline. One that was only cut off for a while has not.
#[tokio::test]
async fn a_router_that_was_restarted_ends_what_it_lost() {
    let network = std::sync::Arc::new(MemoryNetwork::new(1));
    let name = |name: &str| NodeName::new(name).unwrap();
    let start = |own: &str, peer: &str, life: u64| {
        let mut options = NodeOptions::new(name(own), "test", format!("{own}:1"));
        options.incarnation = Incarnation(life);
        Node::start(options.peer(name(peer), format!("{peer}:1")), network.clone())
    };
    let mute = || -> Plan { Box::new(|_| Script::Run(Run { end: End::Nothing, ..run("abc") })) };
    let head = start("head", "front", 1).await.unwrap();
    let seen = std::sync::Arc::new(parking_lot::Mutex::new(Seen::default()));
    let router = start_router(&head, seen.clone(), mute());
    let front = start("front", "head", 1).await.unwrap();
    let at_head = head.address("router", "main");
    let world = world_on(front, mute(), |args| args.router = at_head).await;

    let mut client = world.client().await;
    client.post("/v1/completions", &completion(json!({"stream": true})).to_string()).await;
    client.until("\"c\"").await;
    network.partition(&name("front"), &name("head"));
    tokio::time::sleep(Duration::from_millis(1200)).await;
    network.heal(&name("front"), &name("head"));
    let early = tokio::time::timeout(Duration::from_millis(500), client.until("[DONE]")).await;
    assert!(early.is_err(), "ended by a router that still has it");

    drop(router);
    head.shutdown().await;
    let head = start("head", "front", 2).await.unwrap();
    let _router = start_router(&head, seen, mute());
    let rest = client.until("data: [DONE]\n\n").await;
    assert!(rest.contains("was restarted and has lost this request"), "{rest}");
    assert_eq!(rest.matches("\"error\"").count(), 1);
}

#[tokio::test]
async fn missing_tokens_are_an_error_and_surplus_ones_are_bounded() {
    let world = world(Script::Run(Run { end: End::Nothing, ..run("") })).await;
    let wrong = [
        StreamEvent::Tokens { position: 1, ids: vec![65], logprobs: vec![] },
        StreamEvent::Tokens { position: 0, ids: vec![65; 17], logprobs: vec![] },
        StreamEvent::Cancelled { usage: Usage::default() },
    ];
    for event in wrong {
        let world = &world;
        let asked = world.complete(json!({}));
        let forge = async {
            let count = world.seen.lock().requests.len();
            while world.seen.lock().requests.len() == count {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
            let request = world.seen.lock().requests.last().unwrap().clone();
            let cast = GatewayCast::Event { request: request.id, event };
            world.node.cast::<GatewayProtocol>(&request.reply_to, &cast).unwrap();
        };
        let (response, ()) = tokio::join!(asked, forge);
        assert_eq!(response.status, 500, "{}", response.body);
    }
}

#[tokio::test]
async fn work_that_nobody_waits_for_is_cancelled() {
    let world = world(Script::Run(run(""))).await;
    let request = RequestId(99);
    let tokens = StreamEvent::Tokens { position: 0, ids: vec![65], logprobs: vec![] };
    let to = world.node.address("gateway", "main");
    let cast = GatewayCast::Event { request, event: tokens };
    world.node.cast::<GatewayProtocol>(&to, &cast).unwrap();
    until("cancelled", || world.seen.lock().cancelled.contains_key(&request)).await;
}

/// C74: a drain lets running streams end, refuses new requests, and then closes.
#[tokio::test]
async fn a_drain_ends_what_runs_and_takes_nothing_new() {
    let slow = Run { pace: Duration::from_millis(50), ..run(&"abcdefgh".repeat(5)) };
    let world = world(Script::Run(slow)).await;
    let mut running = Vec::new();
    for stream in [true, true, false] {
        let mut client = world.client().await;
        let body = completion(json!({"stream": stream, "max_tokens": 99})).to_string();
        client.post("/v1/completions", &body).await;
        running.push((client, stream));
    }
    let mut idle = world.client().await;
    while world.seen.lock().running.len() < 3 {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    let gateway = world.gateway.clone();
    let drained = tokio::spawn(async move { drain(&gateway, PATIENCE).await });
    while world.get("/health").await.status != 503 {}
    let refused = world.complete(json!({})).await;
    assert_eq!((refused.status, refused.error()["code"].as_str()), (503, Some("draining")));
    assert!(refused.headers.contains_key("retry-after"));
    assert_eq!(world.get("/health").await.status, 503);
    assert_eq!(world.get("/live").await.status, 200);
    for (mut client, stream) in running {
        let response = client.response().await;
        assert_eq!(response.status, 200);
        let text = match stream {
            true => response.streamed_text(0),
            false => response.json()["choices"][0]["text"].as_str().unwrap().to_owned(),
        };
        assert_eq!(text, "abcdefgh".repeat(5));
        assert!(client.closed().await);
    }
    assert!(drained.await.unwrap());
    assert!(idle.closed().await);
    assert!(tokio::net::TcpStream::connect(world.address).await.is_err());
    assert!(world.seen.lock().cancelled.is_empty());
}

/// However the actor ends, its address, its mailbox and its work are free again.
#[tokio::test]
async fn a_killed_gateway_leaves_nothing_behind() {
    let slow = Run { pace: Duration::from_millis(10), ..run(&"x".repeat(900)) };
    let world = world(Script::Run(slow)).await;
    let mut client = world.client().await;
    let body = completion(json!({"stream": true, "max_tokens": 900})).to_string();
    client.post("/v1/completions", &body).await;
    client.head().await;
    world.gateway.kill();
    assert!(world.quiet().await);
    until("the address is free", || std::net::TcpListener::bind(world.address).is_ok()).await;
    assert!(world.node.export::<GatewayProtocol>("gateway", "main", |_| {}).is_ok());
}
