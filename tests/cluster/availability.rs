//! Nobody notices a dead worker under load, nor links that have been idle or cut off.

use std::time::{Duration, Instant};

use crate::harness::{Cluster, Signal, wait_until};
use crate::http::Reader;

const HASH: &str = "examples/hash.toml";

/// Ten requests a second for six seconds; one of two workers is killed in the middle.
#[test]
fn a_kill_under_load_fails_no_request() {
    const TOKENS: usize = 60;
    let cluster = Cluster::start(HASH, &["engine.step_micros=10000"]);
    let body = |n: usize| cluster.body(&format!("request {n}"), TOKENS);
    let begun = Instant::now();
    let mut readers = Vec::new();
    let mut killed = None;
    for n in 0..60 {
        let due = begun + Duration::from_millis(100) * u32::try_from(n).expect("small");
        std::thread::sleep(due.saturating_duration_since(Instant::now()));
        readers.push(Reader::start(cluster.http, body(n)));
        if n == 30 {
            let node = cluster.busy_node();
            killed = Some((node.clone(), cluster.pid(&node)));
            cluster.signal(&node, Signal::KILL);
        }
    }
    let answers: Vec<_> = readers.into_iter().map(Reader::finish).collect();
    for (n, answer) in answers.iter().enumerate() {
        answer.check(&format!("request {n}"), TOKENS);
    }
    let replays = cluster.replays();
    assert!(replays > 0, "the kill hit nobody");
    // Each request was on the dead worker once at most.
    assert!(replays <= 31, "{replays} replays");
    assert_eq!(cluster.failures(), 0);
    let (node, pid) = killed.expect("one was killed");
    cluster.wait_restarted(&node, pid);
    let again: Vec<_> = (0..60).map(|n| Reader::start(cluster.http, body(n))).collect();
    for (n, reader) in again.into_iter().enumerate() {
        reader.finish().check_same(&answers[n], &format!("request {n}, disturbed or not"));
    }
}

/// The idle time-out of a QUIC connection is the lease. Long enough for a busy machine.
const SHORT_LEASE: [&str; 2] = ["membership.heartbeat_ms=100", "membership.lease_ms=1500"];

#[test]
fn the_first_request_after_a_long_silence_succeeds() {
    let cluster = Cluster::start(HASH, &SHORT_LEASE);
    let body = cluster.body("after a silence", 20);
    let before = cluster.ask(&body);
    before.check("before", 20);
    std::thread::sleep(Duration::from_secs(6));
    for n in 0..4 {
        let after = cluster.ask(&body);
        after.check("the request after the silence", 20);
        after.check_same(&before, &format!("request {n} after the silence"));
    }
    assert_eq!((cluster.failures(), cluster.replays()), (0, 0));
}

/// Both workers stand still for longer than their links live, as a suspended machine does.
#[test]
fn the_first_request_after_the_links_were_lost_succeeds() {
    let cluster = Cluster::start(HASH, &SHORT_LEASE);
    let body = cluster.body("after an interruption", 20);
    let before = cluster.ask(&body);
    before.check("before", 20);
    let workers = ["left", "right"];
    let pids = workers.map(|node| cluster.pid(node));
    workers.iter().for_each(|node| cluster.signal(node, Signal::STOP));
    wait_until("both links are lost", || {
        let status = cluster.status();
        let down = |node: &&serde_json::Value| node["state"] == "down";
        status["nodes"].as_array().is_some_and(|nodes| nodes.iter().filter(down).count() == 2)
    });
    // One that comes while nobody can serve it waits, and the next one finds everything whole.
    let early = cluster.open(&body);
    workers.iter().for_each(|node| cluster.signal(node, Signal::CONT));
    let early = early.finish();
    early.check("the request in between", 20);
    early.check_same(&before, "the request in between");
    cluster.wait_ready();
    let after = cluster.ask(&body);
    after.check("the first request to the whole cluster", 20);
    after.check_same(&before, "the first request to the whole cluster");
    assert_eq!(workers.map(|node| cluster.pid(node)), pids, "no process was started anew");
}
