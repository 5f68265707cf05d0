//! Requests that are too large, and clients that leave.

use crate::harness::*;
use dunlin_actors::messages::*;
use std::time::Duration;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn c38_a_prompt_larger_than_the_pool_is_refused_with_both_numbers() {
    let mut setup = Setup::replicas(&["left"]);
    setup.kv_blocks = 256;
    let cluster = LocalCluster::start(setup).await;
    let refused = cluster.try_submit(&cluster.mixed(1, 2000, 10)).await;
    let expected = Refusal::NeverFits { need: 2010, have: 1024 };
    assert_eq!(refused.err().map(|r| r.to_string()), Some(expected.to_string()));
    cluster.submit(&cluster.mixed(2, 10, 10)).await.finished().await;
    let body = format!(r#"{{"model":"hash","prompt":"{}","max_tokens":10}}"#, "x".repeat(2000));
    let (code, answer) = cluster.post("/v1/completions", &body).await;
    assert_eq!(code, 400, "{answer}");
    assert!(answer.contains("2010") && answer.contains("1024"), "{answer}");
    cluster.settled(SOON).await;
}

/// C39, C70: running, prefilling and queued requests, all aborted at once.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn c70_gauges_are_zero_a_second_after_all_have_been_aborted() {
    let mut setup = Setup::replicas(&["left"]);
    setup.scheduler.max_running = 8;
    let cluster = LocalCluster::start(setup).await;
    let mut streams = Vec::new();
    for id in 1..=40 {
        streams.push(cluster.submit(&cluster.mixed(id, 200, 1000)).await);
    }
    cluster.until("requests run", |s| s.replicas.iter().any(|r| r.load.running >= 4)).await;
    streams.iter().for_each(|stream| cluster.cancel(stream.id));
    // One second is promised; the rest is for a busy machine.
    cluster.settled(Duration::from_secs(10)).await;
    for stream in &mut streams {
        let end = stream.end().await;
        assert!(matches!(end, StreamEvent::Cancelled { .. }), "{end:?}");
    }
    cluster.probe(1000).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn c62_clients_leave_at_any_moment_and_nothing_stays() {
    const SEED: u64 = 62;
    let mut setup = Setup::replicas(&["left", "right"]);
    setup.kv_blocks = 200;
    let cluster = LocalCluster::start(setup).await;
    let mut rng = Draws(SEED);
    let mut streams = Vec::new();
    for id in 1..=100u64 {
        let long = 1 + (rng.next() % 120) as u32;
        streams.push(cluster.submit(&cluster.mixed(id, 1 + (id % 60) as u32, long)).await);
        // An earlier one, this one at once, or none.
        let victim = 1 + rng.next() % id;
        cluster.cancel(victim);
        tokio::time::sleep(Duration::from_millis(rng.next() % 8)).await;
    }
    for id in 1..=100 {
        if rng.next().is_multiple_of(2) {
            cluster.cancel(id);
        }
    }
    let mut cancelled = 0;
    for mut stream in streams {
        match stream.end().await {
            StreamEvent::Cancelled { .. } => cancelled += 1,
            StreamEvent::Finished { .. } => {}
            other => panic!("request {} (seed {SEED}): {other:?}", stream.id),
        }
    }
    assert!(cancelled > 20, "only {cancelled} were cancelled while they ran");
    cluster.settled(SOON).await;
    cluster.probe(1000).await;
}

/// SplitMix64.
struct Draws(u64);

impl Draws {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }
}
