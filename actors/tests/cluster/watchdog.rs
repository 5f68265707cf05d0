//! Stalls are named and fenced within the step deadline; ranks that disagree fail at once; what an
//! older life still sends changes nothing.

use crate::engines::{Fault, Target};
use crate::harness::*;
use crate::hook::{Hook, step_of};
use dunlin_actors::facts;
use dunlin_actors::messages::*;
use dunlin_actors::router;
use dunlin_model::engine::Batch;
use dunlin_runtime::faults::names::FAULT_DONE;
use dunlin_runtime::{Action, Address, Site};
use std::sync::Arc;
use std::time::Duration;

const DEADLINE: Duration = Duration::from_millis(1500);

fn ranks() -> Setup {
    let mut setup = Setup::new(vec![want("r", &[&["a/cpu:0", "b/cpu:0"]])]);
    setup.scheduler.step_deadline = DEADLINE;
    setup
}

async fn armed(mut setup: Setup) -> (LocalCluster, Arc<Hook>) {
    let hook = Hook::new();
    setup.hook = Some(hook.clone());
    (LocalCluster::start(setup).await, hook)
}

async fn streams(cluster: &LocalCluster, count: u64) -> Vec<Stream> {
    long_streams(cluster, count, 200).await
}

async fn long_streams(cluster: &LocalCluster, count: u64, tokens: u32) -> Vec<Stream> {
    let mut streams = Vec::new();
    for id in 1..=count {
        let mut stream = cluster.submit(&cluster.mixed(id, 20, tokens)).await;
        stream.take(2).await;
        streams.push(stream);
    }
    streams
}

async fn finish(cluster: &LocalCluster, streams: Vec<Stream>) {
    for stream in streams {
        stream.finished().await;
    }
    cluster.probe(1000).await;
    cluster.settled(SOON).await;
}

fn subjects(hook: &Hook, name: &str) -> Vec<String> {
    hook.facts(name).into_iter().map(|fact| fact.subject).collect()
}

/// Until the replica was down, from when the fault took effect.
fn detected(hook: &Hook) -> Duration {
    let (done, down) = (hook.first(FAULT_DONE), hook.first(facts::REPLICA_DOWN));
    down.expect("a replica went down") - done.expect("the fault took effect")
}

/// C01: one rank's device thread hangs inside a step, for longer than anyone waits.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn c01_a_rank_that_stalls_is_named_fenced_and_replaced() {
    let (cluster, hook) = armed(ranks()).await;
    let built = cluster.engines.builds();
    let streams = streams(&cluster, 8).await;
    let hang = 2 * DEADLINE + Duration::from_secs(1);
    hook.arm(1, Action::Hang(hang), |site| step_of(site, (0, 1), 40));
    finish(&cluster, streams).await;
    // Ticks of a busy machine come late.
    assert!(detected(&hook) < DEADLINE + Duration::from_millis(900), "{:?}", detected(&hook));
    let failed = subjects(&hook, facts::STEP_FAILED);
    let named = ["b/shard/r/0/1", "step", "its device does not answer"];
    assert!(failed.iter().any(|why| named.iter().all(|part| why.contains(part))), "{failed:?}");
    assert_eq!(cluster.engines.builds(), built + 2, "both ranks, once");
    // The thread wakes up at last: nobody takes what it has.
    let late = async {
        while !subjects(&hook, facts::STALE_REFUSED).iter().any(|who| who.contains("outcome of b/"))
        {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(SOON, late).await.expect("the late result is refused and told");
    cluster.probe(1001).await;
    cluster.settled(SOON).await;
}

/// The same in a pipeline: the stage that waits does not get the blame.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_stage_that_stalls_is_named_and_not_the_one_that_waits() {
    let mut setup = Setup::new(vec![want("r", &[&["a/cpu:0"], &["b/cpu:0"]])]);
    setup.scheduler.step_deadline = DEADLINE;
    let (cluster, hook) = armed(setup).await;
    let streams = streams(&cluster, 4).await;
    hook.arm(1, Action::Hang(2 * DEADLINE), |site| step_of(site, (0, 0), 20));
    finish(&cluster, streams).await;
    let down = subjects(&hook, facts::REPLICA_DOWN);
    assert!(down[0].contains("a/shard/r/0/0") && down[0].contains("not answer"), "{down:?}");
}

/// C04: the engine of one rank has dropped a sequence that the other's has not.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn c04_ranks_that_disagree_fail_at_once() {
    let mut setup = ranks();
    setup.scheduler.step_deadline = Duration::from_secs(30);
    let (cluster, hook) = armed(setup).await;
    let streams = streams(&cluster, 4).await;
    let begun = tokio::time::Instant::now();
    cluster.inject(Fault::Lacks(Target::Request(2)));
    finish(&cluster, streams).await;
    assert!(begun.elapsed() < Duration::from_secs(20), "it waited for the deadline");
    let failed = subjects(&hook, facts::STEP_FAILED);
    assert!(failed.iter().any(|why| why.contains("values, expected")), "{failed:?}");
}

/// C04: one control message to one rank is damaged under way, so that it never runs that step.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn c04_a_rank_that_misses_a_message_fails_the_step_at_once() {
    let mut setup = ranks();
    setup.scheduler.step_deadline = Duration::from_secs(30);
    let (cluster, hook) = armed(setup).await;
    let streams = streams(&cluster, 4).await;
    let begun = tokio::time::Instant::now();
    hook.arm(1, Action::Corrupt { at: 200, mask: 4 }, |site| {
        matches!(site, Site::FrameOut { to, message, .. } if to.as_str() == "b" && *message == "shard")
    });
    finish(&cluster, streams).await;
    assert!(begun.elapsed() < Duration::from_secs(20), "it waited for the deadline");
    assert_eq!(hook.proofs().len(), 1, "{:?}", hook.proofs());
}

/// C02: a rank takes part in none of a step's collectives.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn c02_a_rank_that_skips_its_collectives_is_found_at_once() {
    let mut setup = ranks();
    setup.scheduler.step_deadline = Duration::from_secs(30);
    let (cluster, hook) = armed(setup).await;
    let streams = streams(&cluster, 4).await;
    let begun = tokio::time::Instant::now();
    cluster.inject(Fault::Skips(Target::Request(3)));
    finish(&cluster, streams).await;
    assert!(begun.elapsed() < Duration::from_secs(20), "it waited for the deadline");
    let failed = subjects(&hook, facts::STEP_FAILED);
    assert!(failed.iter().any(|why| why.contains("has ended this step")), "{failed:?}");
    assert!(!hook.facts(facts::PLAN_MISMATCH).is_empty());
}

fn message(site: &Site<'_>, at: &str, what: &str) -> bool {
    matches!(site, Site::Message { role, message, .. } if *role == at && *message == what)
}

/// An actor that hangs for good in its `handle` is found by its silence.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_scheduler_that_hangs_is_replaced_and_costs_no_token() {
    let mut setup = Setup::replicas(&["left"]);
    setup.scheduler.step_deadline = DEADLINE;
    let (cluster, hook) = armed(setup).await;
    let streams = streams(&cluster, 4).await;
    let hang = Action::Hang(Duration::from_secs(3600));
    hook.arm(1, hang, |site| message(site, "scheduler", "StepDone"));
    finish(&cluster, streams).await;
    let down = subjects(&hook, facts::REPLICA_DOWN);
    assert!(down[0].contains("scheduler/left on left does not answer"), "{down:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_placement_that_hangs_is_replaced_while_streams_go_on() {
    let mut setup = Setup::replicas(&["left"]);
    setup.scheduler.step_deadline = DEADLINE;
    let (cluster, hook) = armed(setup).await;
    let streams = long_streams(&cluster, 2, 1500).await;
    let hang = Action::Hang(Duration::from_secs(3600));
    hook.arm(1, hang, |site| message(site, "placement", "Tick"));
    for stream in streams {
        stream.finished().await;
    }
    // It answers again, and still places what breaks.
    hook.arm(1, Action::Panic("injected".into()), |site| step_of(site, (0, 0), 1));
    cluster.probe(1000).await;
    assert_eq!(hook.proofs().len(), 2, "{:?}", hook.proofs());
    cluster.settled(SOON).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn health_says_degraded_while_a_replica_is_away() {
    async fn until(cluster: &LocalCluster, what: &str) {
        let asked = async {
            loop {
                let (code, answer) = cluster.get("/health").await;
                assert_eq!(code, 200, "{answer}");
                if answer.contains(what) {
                    return;
                }
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        };
        let done = tokio::time::timeout(SOON, asked).await;
        done.unwrap_or_else(|_| panic!("/health never said {what}"));
    }
    let mut cluster = LocalCluster::start(Setup::replicas(&["left", "right"])).await;
    until(&cluster, r#""status":"ready""#).await;
    let zombie = cluster.crash("right");
    until(&cluster, "degraded").await;
    until(&cluster, "replica right").await;
    cluster.start_host("right").await;
    until(&cluster, r#""status":"ready""#).await;
    zombie.stop().await;
}

/// Everything that an older life of a replica, or an older attempt, can still send.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_an_older_life_sends_is_refused_and_counted() {
    let (cluster, hook) = armed(Setup::replicas(&["left"])).await;
    // The replica is placed anew once, so that there is an older epoch.
    hook.arm(1, Action::Panic("injected".into()), |site| step_of(site, (0, 0), 5));
    let streams = long_streams(&cluster, 3, 2000).await;
    let up = |s: &RouterStatus| s.replicas.len() == 1 && s.replicas[0].assigned > 0;
    let status = cluster.until("the new life has work", up).await;
    let info = &status.replicas[0].info;
    let (now, old) = (info.epoch, ReplicaEpoch(info.epoch.0 - 1));
    let node = cluster.hosts["left"].node();
    let router = Address::new(name("head"), router::ROLE, router::INSTANCE);
    let (scheduler, shard) = (info.scheduler.clone(), Address::new(name("left"), "shard", "r/0/0"));
    let request = RequestId(1);
    let tokens = |attempt| SchedulerEvent::Tokens {
        request,
        attempt: Attempt(attempt),
        position: streams[0].tokens.len() as u32,
        ids: vec![666],
        logprobs: Vec::new(),
        cached_tokens: None,
    };
    let ended = |attempt| SchedulerEvent::Finished {
        request,
        attempt: Attempt(attempt),
        reason: FinishReason::Length,
    };
    let before = hook.facts(facts::STALE_REFUSED).len();
    let replica = || info.replica.clone();
    for (epoch, event) in
        [(old, tokens(1)), (old, tokens(2)), (now, tokens(1)), (now, tokens(9)), (now, ended(1))]
    {
        let cast = RouterCast::Scheduler { replica: replica(), epoch, events: vec![event] };
        node.cast::<RouterProtocol>(&router, &cast).expect("sent");
    }
    for cast in [
        SchedulerCast::StepDone { epoch: old, step: 1, sampled: Vec::new(), micros: 1 },
        SchedulerCast::StepDone { epoch: now, step: 1, sampled: Vec::new(), micros: 1 },
        SchedulerCast::StepFailed { epoch: old, step: 1, reason: "old".into() },
        SchedulerCast::Cancel { epoch: old, request, attempt: Attempt(9) },
        SchedulerCast::Cancel { epoch: now, request, attempt: Attempt(0) },
    ] {
        node.cast::<SchedulerProtocol>(&scheduler, &cast).expect("sent");
    }
    let (batch, claims, drawn) = (Batch::default(), Vec::new(), Vec::new());
    let run = ShardCast::Run { epoch: old, step: 1, batch, claims, drawn };
    node.cast::<ShardProtocol>(&shard, &run).expect("sent");
    finish(&cluster, streams).await;
    let refused = hook.facts(facts::STALE_REFUSED).len() - before;
    assert!(refused >= 11, "{refused} of 11 were told as refused");
}

/// A node comes back under its name while its old life still runs somewhere, cut off; the old life
/// cannot answer for the new one, and the streams of both go on as one.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_that_was_replaced_under_its_name_adds_nothing() {
    let (mut cluster, hook) = armed(Setup::replicas(&["left", "right"])).await;
    let streams = streams(&cluster, 8).await;
    let old = cluster.crash("left");
    cluster.until("the old life is seen as gone", |s| s.replicas.len() == 1).await;
    cluster.start_host("left").await;
    cluster.until("the new life serves", |s| s.replicas.len() == 2).await;
    // What the old life says now goes nowhere: it is not linked, and may not be again.
    let to = Address::new(name("head"), router::ROLE, router::INSTANCE);
    let event = SchedulerEvent::Load(LoadReport::default());
    let cast = RouterCast::Scheduler {
        replica: "left".into(),
        epoch: ReplicaEpoch(1),
        events: vec![event],
    };
    assert!(old.node().cast::<RouterProtocol>(&to, &cast).is_err());
    finish(&cluster, streams).await;
    let ups = hook.facts(facts::REPLICA_UP);
    let last = ups.last().map(|f| f.key);
    let highest = ups.iter().map(|f| f.key).max();
    assert!(ups.len() >= 3 && last == highest, "the new life has the highest epoch: {ups:?}");
    old.stop().await;
}
