//! Leaving without breaking anything: SIGTERM to the whole cluster, and to one worker.

use std::time::{Duration, Instant};

use crate::harness::{Cluster, PATIENCE, Signal, runs};
use crate::http::{Answer, Reader};

/// With 10 ms a step, a stream takes four seconds and more.
const TOKENS: usize = 400;
const HASH: &str = "examples/hash.toml";
const STEP: &str = "engine.step_micros=10000";

/// Eight streams, each with a prompt of its own.
fn streams(cluster: &Cluster) -> Vec<Reader> {
    let body = |n: usize| cluster.body(&format!("stream {n}"), TOKENS);
    (0..8).map(|n| Reader::start(cluster.http, body(n))).collect()
}

fn all(readers: Vec<Reader>) -> Vec<Answer> {
    let answers: Vec<Answer> = readers.into_iter().map(Reader::finish).collect();
    for (number, answer) in answers.iter().enumerate() {
        answer.check(&format!("stream {number}"), TOKENS);
    }
    answers
}

#[test]
fn a_drain_ends_what_is_open_and_refuses_what_is_new() {
    let mut cluster = Cluster::start(HASH, &[STEP]);
    let undisturbed = all(streams(&cluster));
    let pids = ["front", "left", "right"].map(|node| cluster.pid(node));
    let readers = streams(&cluster);
    Reader::all_have(&readers, TOKENS / 2);
    cluster.signal_up(Signal::TERM);
    // The signal takes its way to the gateway; until then a request is served.
    let end = Instant::now() + PATIENCE;
    let refused = loop {
        let answer = cluster.ask(&cluster.body("late", 1));
        if answer.status != 200 {
            break answer;
        }
        assert!(Instant::now() < end, "a draining cluster takes requests");
    };
    assert_eq!(refused.status, 503, "{refused:?}");
    assert_eq!(refused.error_code(), "draining", "{refused:?}");
    assert!(refused.retry_after.is_some_and(|seconds| seconds >= 1), "{refused:?}");
    assert!(!readers.iter().all(Reader::ended), "refused while streams were open");
    for (number, answer) in all(readers).iter().enumerate() {
        answer.check_same(&undisturbed[number], &format!("stream {number}"));
    }
    assert!(cluster.wait_exit().success());
    assert!(pids.iter().all(|pid| !runs(*pid)), "nothing is left behind");
}

#[test]
fn a_second_signal_ends_a_drain_at_once() {
    let mut cluster = Cluster::start(HASH, &[STEP, "limits.drain_ms=100000"]);
    // Ten seconds and more of work.
    let body = cluster.body("long", 1000);
    let reader = Reader::start(cluster.http, body);
    Reader::all_have(std::slice::from_ref(&reader), 5);
    cluster.signal_up(Signal::TERM);
    while cluster.ask(&cluster.body("late", 1)).status == 200 {}
    let begun = Instant::now();
    cluster.signal_up(Signal::TERM);
    assert_eq!(cluster.wait_exit().code(), Some(130));
    // One second is promised, and a drain would take ten; the rest is for a busy machine.
    let took = begun.elapsed();
    assert!(took < Duration::from_secs(5), "{took:?}");
    println!("ended {took:?} after the second signal");
    assert_eq!(reader.finish().finishes.len(), 0, "it was cut off");
}

#[test]
fn a_worker_that_leaves_fails_none_of_its_streams() {
    let cluster = Cluster::start(HASH, &[STEP]);
    let undisturbed = all(streams(&cluster));
    let readers = streams(&cluster);
    Reader::all_have(&readers, TOKENS / 4);
    let node = cluster.busy_node();
    let pid = cluster.pid(&node);
    cluster.signal(&node, Signal::TERM);
    for (number, answer) in all(readers).iter().enumerate() {
        answer.check_same(&undisturbed[number], &format!("stream {number}"));
    }
    cluster.wait_restarted(&node, pid);
    assert_eq!(cluster.failures(), 0);
}
