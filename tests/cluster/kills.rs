//! A worker dies while it serves: the client reads on, and reads the same.

use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::harness::{Cluster, Signal, wait_until};
use crate::http::{Answer, Reader};

const BLOCK: usize = 16;
const TOKENS: usize = 56;
const PROMPT: &str = "The dunlin is a small wader that breeds around the Arctic and winters on \
     estuaries far to the south. Great flocks of dunlins turn together in the air as if they were \
     one bird, and where one of them drops out the others close the gap at once. Write down, in \
     plain words and in good order, how such a flock could keep its shape without a leader:";

/// Greedy, and with temperature and a seed.
fn bodies(cluster: &Cluster) -> [(&'static str, Value); 2] {
    let greedy = cluster.body(PROMPT, TOKENS);
    let mut sampled = greedy.clone();
    sampled["temperature"] = json!(0.8);
    sampled["seed"] = json!(20_240_229);
    [("greedy", greedy), ("sampled", sampled)]
}

/// Asks without the help of blocks that an earlier request left behind, so that the prompt takes a
/// while and the worker is known before the first token.
fn cold(body: &Value, salt: &str) -> Value {
    let mut body = body.clone();
    body["cache_salt"] = json!(salt);
    body
}

/// Asks for `body` and kills the node that `pick` names once there are `at` tokens. The client
/// must read `whole` all the same. Returns how often requests were replayed for it.
///
/// On a busy machine this thread may hear of its token when all of them have been made, so that
/// the kill hits nobody; then it is done again.
fn killed(
    cluster: &Cluster,
    (body, whole): (&Value, &Answer),
    at: usize,
    what: &str,
    pick: impl Fn(&Cluster) -> String,
) -> u64 {
    for attempt in 1..=5 {
        let before = cluster.replays();
        let mut stream = cluster.open(&cold(body, &format!("{what} {attempt}")));
        let node = pick(cluster);
        let pid = cluster.pid(&node);
        stream.until(at);
        cluster.signal(&node, Signal::KILL);
        let seen = stream.answer.tokens.len();
        let begun = Instant::now();
        let answer = stream.finish();
        let took = begun.elapsed();
        answer.check(what, TOKENS);
        answer.check_same(whole, what);
        let replays = cluster.replays() - before;
        println!("{what}: {node}, {seen} tokens read by then, {replays} replays, {took:?} more");
        cluster.wait_restarted(&node, pid);
        if replays > 0 {
            return replays;
        }
    }
    panic!("{what}: the kill hit nobody");
}

#[test]
fn a_killed_worker_does_not_change_what_its_client_reads() {
    let cluster = Cluster::start("cluster.toml", &["kv.memory=128MiB"]);
    let [greedy, sampled] = bodies(&cluster).map(|(_, body)| cluster.ask(&body).text);
    assert_ne!(greedy, sampled, "sampling does something");
    for (name, body) in bodies(&cluster) {
        let whole = cluster.ask(&body);
        whole.check(name, TOKENS);
        // The output token that fills a block of the cache, with at least half a block before it.
        let prompt = whole.prompt_tokens();
        let edge = (BLOCK / 2..).find(|at| (prompt + at).is_multiple_of(BLOCK)).expect("one in 16");
        for at in [1, edge, edge + BLOCK / 2] {
            let what = format!("{name}, killed at token {at} after {prompt} of prompt");
            let replays = killed(&cluster, (&body, &whole), at, &what, Cluster::busy_node);
            assert_eq!(replays, 1, "{what}: it was handed out once more");
        }
    }
    assert_eq!(cluster.failures(), 0);
}

/// Equal loads are broken in favour of the first replica; here the first one has work already.
#[test]
fn the_other_worker_may_be_killed_as_well() {
    let cluster = Cluster::start("cluster.toml", &["kv.memory=128MiB"]);
    let [(name, body), _] = bodies(&cluster);
    let whole = cluster.ask(&body);
    whole.check(name, TOKENS);
    let long = cluster.body("Count as far as you can: one, two,", 1500);
    let occupied = Reader::start(cluster.http, long);
    let first = cluster.busy_node();
    let other = |cluster: &Cluster| {
        let mut found = None;
        wait_until("the other worker has work", || {
            found = cluster.busy_nodes().into_iter().find(|node| *node != first);
            found.is_some()
        });
        found.expect("waited for")
    };
    let replays = killed(&cluster, (&body, &whole), 8, "the other worker", other);
    assert_eq!(replays, 1, "the long one was not touched");
    let open = occupied.abandon();
    assert!(open.errors.is_empty(), "{:?}", open.errors);
    assert_eq!(cluster.failures(), 0);
}

/// A replica that spans nodes dies with each of them, and comes back with it.
fn each_part_may_be_killed(file: &str) {
    let cluster = Cluster::start(file, &["kv.memory=128MiB"]);
    let nodes = cluster.serving_nodes();
    assert!(nodes.len() >= 2, "{file} spreads one replica over nodes: {nodes:?}");
    for (name, body) in bodies(&cluster) {
        let whole = cluster.ask(&body);
        whole.check(name, TOKENS);
        for (number, node) in nodes.iter().enumerate() {
            let what = format!("{file}, {name}, part {number}");
            killed(&cluster, (&body, &whole), 5 + 6 * number, &what, |_| node.clone());
        }
    }
    assert_eq!(cluster.failures(), 0);
}

#[test]
fn a_killed_pipeline_stage_does_not_change_what_its_client_reads() {
    each_part_may_be_killed("examples/pipeline.toml");
}

#[test]
fn a_killed_tensor_rank_does_not_change_what_its_client_reads() {
    each_part_may_be_killed("examples/tensor.toml");
}

#[test]
fn a_stream_waits_for_its_only_worker_to_come_back() {
    let cluster = Cluster::start_with_one_worker(&["kv.memory=128MiB"]);
    for (name, body) in bodies(&cluster) {
        let whole = cluster.ask(&body);
        whole.check(name, TOKENS);
        killed(&cluster, (&body, &whole), 5, name, |_| "left".to_string());
    }
    assert_eq!(cluster.failures(), 0);
}

#[test]
fn a_stream_whose_worker_stays_away_ends_with_one_error_by_its_deadline() {
    const DEADLINE: Duration = Duration::from_secs(3);
    let cluster = Cluster::start_with_one_worker(&[
        "engine.kind=hash",
        "engine.step_micros=10000",
        "kv.memory=16MiB",
        "limits.request_deadline_ms=3000",
    ]);
    let body = cluster.body("one worker", 80);
    let whole = cluster.ask(&body);
    whole.check("undisturbed", 80);

    let begun = Instant::now();
    let mut stream = cluster.open(&body);
    stream.until(5);
    cluster.signal("left", Signal::STOP);
    let answer = stream.finish();
    let took = begun.elapsed();
    assert_eq!((answer.status, answer.done), (200, 1), "{answer:?}");
    assert_eq!((answer.errors.len(), answer.error_code()), (1, "deadline_exceeded"), "{answer:?}");
    assert!(answer.errors[0]["message"].as_str().is_some_and(|text| text.len() > 10));
    assert_eq!((answer.finishes.len(), answer.usage.len()), (0, 0), "{answer:?}");
    assert!(whole.text.starts_with(&answer.text), "what came before the error is right");
    // The rest is for a busy machine.
    assert!(took < DEADLINE + Duration::from_secs(20), "{took:?}");

    cluster.signal("left", Signal::CONT);
    cluster.wait_ready();
    let again = cluster.ask(&body);
    again.check("after it came back", 80);
    again.check_same(&whole, "after it came back");
}
