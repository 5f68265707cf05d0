//! Where replicas run: pipelines, tensor ranks, drained nodes, and what cannot be placed.

use crate::harness::*;
use dunlin_actors::host::HostError;
use dunlin_actors::messages::RouterStatus;
use dunlin_actors::placement::core::Replan;
use std::time::Duration;
use tokio::time::timeout;

async fn same_text(setup: Setup) {
    let cluster = LocalCluster::start(setup).await;
    let mut streams = Vec::new();
    for id in 1..=8 {
        streams.push(cluster.submit(&cluster.mixed(id, 10 + 17 * id as u32, 60)).await);
    }
    for stream in streams {
        stream.finished().await;
    }
    cluster.settled(SOON).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pipeline_of_two_hosts_gives_the_text_of_one() {
    same_text(Setup::new(vec![want("r", &[&["a/cpu:0"], &["b/cpu:0"]])])).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pipeline_of_three_hosts_gives_the_text_of_one() {
    same_text(Setup::new(vec![want("r", &[&["a/cpu:0"], &["b/cpu:0"], &["c/cpu:0"]])])).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_tensor_ranks_give_the_text_of_one() {
    same_text(Setup::new(vec![want("r", &[&["a/cpu:0", "b/cpu:0"]])])).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ranks_and_stages_together_give_the_text_of_one() {
    let stages: [&[&str]; 2] = [&["a/cpu:0", "a/cpu:1"], &["b/cpu:0", "b/cpu:1"]];
    same_text(Setup::new(vec![want("r", &stages)])).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_crashed_stage_costs_no_token() {
    let mut cluster =
        LocalCluster::start(Setup::new(vec![want("r", &[&["a/cpu:0"], &["b/cpu:0"]])])).await;
    let mut streams = Vec::new();
    for id in 1..=4 {
        let mut stream = cluster.submit(&cluster.mixed(id, 20, 600)).await;
        stream.take(10).await;
        streams.push(stream);
    }
    let zombie = cluster.crash("b");
    cluster.until("the replica is seen as down", |s| s.replicas.is_empty()).await;
    cluster.start_host("b").await;
    for stream in streams {
        stream.finished().await;
    }
    cluster.settled(SOON).await;
    zombie.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_draining_node_finishes_what_it_has_and_gets_nothing_new() {
    let cluster = LocalCluster::start(Setup::replicas(&["left", "right"])).await;
    let mut old = Vec::new();
    for id in 1..=8 {
        let mut stream = cluster.submit(&cluster.mixed(id, 20, 600)).await;
        stream.take(1).await;
        old.push(stream);
    }
    let drain = cluster.hosts["left"].drain(SOON);
    let finish = async {
        let mut here = 0;
        for stream in old {
            let (_, served_by) = stream.finished().await;
            here += usize::from(served_by == ["left/cpu:0"]);
        }
        assert!(here > 0, "none of the old requests ended where it was");
    };
    let (left, ()) = tokio::join!(drain, finish);
    assert_eq!(left, 0);
    // More at a time than one replica would get if both could be given work.
    let mut new = Vec::new();
    for id in 100..110 {
        new.push(cluster.submit(&cluster.mixed(id, 20, 10)).await);
    }
    for stream in new {
        let id = stream.id;
        let (_, served_by) = stream.finished().await;
        assert_eq!(served_by, ["right/cpu:0"], "request {id}");
    }
    cluster.settled(SOON).await;
}

/// L39: never "running" without a worker, and never without a reason.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn l39_what_is_not_ready_says_why() {
    let mut cluster = LocalCluster::head_only(Setup::replicas(&["left"])).await;
    let states = timeout(SOON, async {
        loop {
            let states = cluster.states().await;
            if states.iter().any(|state| state.reason.contains("'left'")) {
                return states;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    });
    let states = states.await.expect("a reason that names the node");
    assert_eq!(states.len(), 1);
    assert_eq!(states[0].state, "waiting");
    cluster.start_host("left").await;
    cluster.await_ready().await;
    assert_eq!(cluster.states().await[0].state, "ready");
    let zombie = cluster.crash("left");
    cluster.until("the replica is seen as down", |s| s.replicas.is_empty()).await;
    let states = cluster.states().await;
    assert_eq!(states[0].state, "waiting", "{states:?}");
    assert!(states[0].reason.contains("left"), "{states:?}");
    zombie.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_impossible_configuration_ends_with_its_error() {
    let setup = Setup::new(vec![want("r", &[&["left/cpu:9"]])]);
    let mut cluster = LocalCluster::head_only(setup).await;
    cluster.start_host("left").await;
    let ended = timeout(SOON, cluster.head().ready()).await.expect("in time");
    match ended {
        Err(HostError::Impossible(text)) => assert!(text.contains("cpu:9"), "{text}"),
        other => panic!("expected the plan's error, got {other:?}"),
    }
}

/// The layers of a node that stays away are computed by the survivor, and go back to it later; no
/// stream loses a token either way.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lost_nodes_layers_move_to_the_survivor_and_back() {
    let mut setup = Setup::new(vec![want("r", &[&["a/cpu:0"], &["b/cpu:0"]])]);
    setup.replan =
        Replan { after: Duration::from_millis(200), back_after: Duration::from_millis(500) };
    let mut cluster = LocalCluster::start(setup).await;
    let mut streams = Vec::new();
    for id in 1..=4 {
        let mut stream = cluster.submit(&cluster.mixed(id, 20, 1200)).await;
        stream.take(10).await;
        streams.push(stream);
    }
    let zombie = cluster.crash("b");
    let on = |status: &RouterStatus, node: &str| {
        let place = format!("{node}/cpu:0");
        status.replicas.iter().any(|r| r.info.served_by.contains(&place))
    };
    let alone = |s: &RouterStatus| on(s, "a") && !on(s, "b");
    cluster.until("the survivor serves alone", alone).await;
    for stream in &mut streams {
        stream.take(200).await;
    }
    cluster.start_host("b").await;
    cluster.until("both serve again", |s| on(s, "a") && on(s, "b")).await;
    for stream in streams {
        stream.finished().await;
    }
    cluster.settled(Duration::from_secs(5)).await;
    zombie.stop().await;
}
