//! Engines that panic or fail, nodes that vanish, actors of the head that are killed.

use crate::engines::{Fault, Target};
use crate::harness::*;
use dunlin_actors::messages::*;
use std::time::Duration;

const X: u64 = 666;

async fn one_bad_request(fault: Fault, expected: FailureCode, rebuilt: bool) {
    let cluster = LocalCluster::start(Setup::replicas(&["left"])).await;
    let built = cluster.engines.builds();
    cluster.inject(fault);
    let mut mates = Vec::new();
    for id in 1..=6 {
        let mut mate = cluster.submit(&cluster.mixed(id, 20, 150)).await;
        mate.take(1).await;
        mates.push(mate);
    }
    let bad = cluster.submit(&cluster.mixed(X, 20, 150)).await;
    let (code, message) = bad.failed().await;
    assert_eq!(code, expected, "{message}");
    for mate in mates {
        mate.finished().await;
    }
    cluster.probe(1000).await;
    assert_eq!(cluster.engines.builds() > built, rebuilt, "the engine built anew");
    if rebuilt {
        assert!(cluster.restarts("left").await > 0, "the status shows it");
    }
    cluster.settled(SOON).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn c12_a_panic_fails_its_request_alone() {
    let fault = Fault::Panic(Target::Request(X));
    one_bad_request(fault, FailureCode::Poison, true).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_failing_step_fails_its_request_alone() {
    let fault = Fault::Fail(Target::Request(X));
    one_bad_request(fault, FailureCode::Poison, true).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn logits_that_are_not_finite_fail_their_request_alone() {
    let fault = Fault::NotFinite(Target::Request(X));
    one_bad_request(fault, FailureCode::NotFinite, false).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn c12_a_poisonous_http_request_gets_500() {
    let cluster = LocalCluster::start(Setup::replicas(&["left"])).await;
    cluster.inject(Fault::Panic(Target::Prompt(b"POISON".map(u32::from).to_vec())));
    let mate = cluster.submit(&cluster.mixed(1, 20, 200)).await;
    let bad = r#"{"model":"hash","prompt":"POISON","max_tokens":4}"#;
    let (code, answer) = cluster.post("/v1/completions", bad).await;
    assert_eq!(code, 500, "{answer}");
    mate.finished().await;
    let good = r#"{"model":"hash","prompt":"good","max_tokens":4}"#;
    let (code, answer) = cluster.post("/v1/completions", good).await;
    assert_eq!(code, 200, "{answer}");
    assert!(answer.contains("\"completion_tokens\":4"), "{answer}");
    cluster.settled(SOON).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_crashed_node_costs_no_token() {
    let mut cluster = LocalCluster::start(Setup::replicas(&["left", "right"])).await;
    let mut streams = Vec::new();
    for id in 1..=12 {
        streams.push(cluster.submit(&cluster.mixed(id, 20, 600)).await);
    }
    for stream in &mut streams {
        stream.take(10).await;
    }
    let zombie = cluster.crash("left");
    for stream in streams {
        let (_, served_by) = stream.finished().await;
        assert!(served_by.iter().any(|at| at.starts_with("right/")), "{served_by:?}");
    }
    let status = cluster.status().await.expect("a status");
    assert!(status.replays_total > 0, "nothing ran on the crashed node: {status:#?}");
    cluster.probe(1000).await;
    cluster.settled(SOON).await;
    zombie.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_only_replica_comes_back_and_goes_on() {
    let mut cluster = LocalCluster::start(Setup::replicas(&["left"])).await;
    let mut streams = Vec::new();
    for id in 1..=4 {
        let mut stream = cluster.submit(&cluster.mixed(id, 20, 600)).await;
        stream.take(10).await;
        streams.push(stream);
    }
    let zombie = cluster.crash("left");
    cluster.until("the replica is seen as down", |s| s.replicas.is_empty()).await;
    // A request that comes now waits as well.
    let late = cluster.mixed(5, 20, 50);
    let late = cluster.try_submit(&late).await;
    cluster.start_host("left").await;
    for stream in streams {
        stream.finished().await;
    }
    match late {
        Ok(late) => drop(late.finished().await),
        Err(refusal) => assert!(matches!(refusal, Refusal::NotReady { .. }), "{refusal}"),
    }
    cluster.probe(1000).await;
    cluster.settled(SOON).await;
    zombie.stop().await;
}

/// The worker is cut off for longer than its lease and goes on computing: nothing wrong arrives.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_that_was_cut_off_delivers_nothing_stale() {
    let cluster = LocalCluster::start(Setup::replicas(&["left", "right"])).await;
    let mut streams = Vec::new();
    for id in 1..=8 {
        let mut stream = cluster.submit(&cluster.mixed(id, 20, 1500)).await;
        stream.take(5).await;
        streams.push(stream);
    }
    cluster.network.partition(&name("head"), &name("left"));
    cluster.until("the replica is seen as down", |s| s.replicas.len() == 1).await;
    tokio::time::sleep(Duration::from_millis(1500)).await;
    cluster.network.heal_all();
    for stream in streams {
        stream.finished().await;
    }
    cluster.await_ready().await;
    cluster.settled(SOON).await;
}

/// Its prompt takes many steps, which report nothing that would fail for want of the head.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_whose_lease_is_out_computes_no_more() {
    const STEP: Duration = Duration::from_millis(100);
    const PROMPT: u32 = 3000;
    let mut setup = Setup::replicas(&["left"]);
    setup.spec.step_cost = STEP;
    let whole = STEP * PROMPT / setup.scheduler.step_tokens as u32;
    let cluster = LocalCluster::start(setup).await;
    let submitted = tokio::time::Instant::now();
    let stream = cluster.submit(&cluster.mixed(1, PROMPT, 10)).await;
    cluster.until("it runs", |s| s.replicas.iter().any(|r| r.load.running > 0)).await;
    cluster.network.partition(&name("head"), &name("left"));
    let left = cluster.hosts["left"].node();
    let mut lease = left.lease();
    lease.wait_for(|lease| !lease.is_live()).await.expect("the node runs");
    let scheduler = left.address("scheduler", "left");
    let status = SchedulerCall::Status;
    while left.call::<SchedulerProtocol>(&scheduler, &status, SOON).await.is_ok() {
        let took = submitted.elapsed();
        assert!(took < whole, "the whole prompt was computed without a lease, in {took:?}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    cluster.network.heal_all();
    cluster.cancel(1);
    cluster.await_ready().await;
    cluster.settled(SOON).await;
    drop(stream);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_killed_placement_takes_over_what_runs() {
    let cluster = LocalCluster::start(Setup::replicas(&["left", "right"])).await;
    let epochs = |s: &RouterStatus| s.replicas.iter().map(|r| r.info.epoch).collect::<Vec<_>>();
    let old = epochs(&cluster.status().await.expect("a status"));
    let mut stream = cluster.submit(&cluster.mixed(1, 20, 600)).await;
    stream.take(5).await;
    assert!(cluster.head().kill("placement").await);
    let begun = tokio::time::Instant::now();
    loop {
        let states = cluster.states_now().await.unwrap_or_default();
        if states.len() == 2 && states.iter().all(|s| s.state == "ready") {
            break;
        }
        assert!(begun.elapsed() < SOON, "{states:?}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    stream.finished().await;
    let status = cluster.status().await.expect("a status");
    assert_eq!((epochs(&status), status.replays_total), (old, 0));
    // And it is in charge of them: what breaks from now on is placed anew.
    let mut zombies = Vec::new();
    let mut cluster = cluster;
    zombies.push(cluster.crash("left"));
    cluster.until("one is gone", |s| s.replicas.len() == 1).await;
    cluster.start_host("left").await;
    cluster.until("it is back", |s| s.replicas.len() == 2).await;
    cluster.probe(1000).await;
    cluster.settled(SOON).await;
    for zombie in zombies {
        zombie.stop().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_killed_router_gets_its_replicas_back_and_ends_what_was_open() {
    let cluster = LocalCluster::start(Setup::replicas(&["left", "right"])).await;
    let mut orphan = cluster.submit(&cluster.mixed(1, 20, 3000)).await;
    orphan.take(5).await;
    let open = r#"{"model":"hash","prompt":"open","max_tokens":3000}"#;
    let post = cluster.post("/v1/completions", open);
    let kill = async {
        cluster.until("both are open", |s| s.open_requests == 2).await;
        assert!(cluster.head().kill("router").await);
    };
    let ((code, answer), ()) = tokio::join!(post, kill);
    assert!(code >= 500, "the gateway's open request ends with an error: {answer}");
    cluster.until("replicas are announced again", |s| s.replicas.len() == 2).await;
    cluster.probe(1000).await;
    // The orphan's work is thrown away, not computed to its end.
    cluster.settled(SOON).await;
}
