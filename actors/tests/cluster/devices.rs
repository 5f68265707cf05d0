//! Faults of devices and of what they hold, injected as a fault plan would: each must be proven by
//! what was read back, and none may change a token that is delivered.

use crate::harness::*;
use crate::hook::{Hook, holds, step_of};
use dunlin_actors::facts;
use dunlin_actors::host::HostError;
use dunlin_actors::messages::*;
use dunlin_runtime::{Action, Site};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

const X: u64 = 2;

async fn armed(mut setup: Setup) -> (LocalCluster, Arc<Hook>) {
    let hook = Hook::new();
    setup.hook = Some(hook.clone());
    (LocalCluster::start(setup).await, hook)
}

/// Streams 1..=6 run, long enough to be hit; `X` is one of them.
async fn streams(cluster: &LocalCluster, tokens: u32) -> Vec<Stream> {
    let mut streams = Vec::new();
    for id in 1..=6 {
        let mut stream = cluster.submit(&cluster.mixed(id, 20 + id as u32, tokens)).await;
        stream.take(3).await;
        streams.push(stream);
    }
    streams
}

/// The fault is masked: every stream ends well with the right tokens. Gives the proofs.
async fn masked(setup: Setup, action: Action, at: (usize, usize)) -> (Vec<String>, Arc<Hook>) {
    let (cluster, hook) = armed(setup).await;
    let streams = streams(&cluster, 150).await;
    hook.arm(1, action, move |site| holds(site, at, X));
    for stream in streams {
        stream.finished().await;
    }
    cluster.probe(1000).await;
    cluster.settled(SOON).await;
    let proofs = hook.proofs();
    assert_eq!(proofs.len(), 1, "{proofs:?}");
    (proofs, hook)
}

fn one() -> Setup {
    Setup::replicas(&["left"])
}

fn pipeline() -> Setup {
    Setup::new(vec![want("r", &[&["a/cpu:0"], &["b/cpu:0"]])])
}

fn ranks() -> Setup {
    Setup::new(vec![want("r", &[&["a/cpu:0", "b/cpu:0"]])])
}

fn failures(hook: &Hook) -> Vec<String> {
    hook.facts(facts::STEP_FAILED).into_iter().map(|fact| fact.subject).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn swapped_blocks_are_refused_and_the_text_stays_right() {
    let swap = Action::SwapBlocks { request: X, a: 0, b: 3 };
    let (proofs, hook) = masked(one(), swap, (0, 0)).await;
    assert!(proofs[0].contains("entries 0 and 3"), "{proofs:?}");
    let failed = failures(&hook);
    assert!(failed.iter().any(|reason| reason.contains("the table claims")), "{failed:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lost_write_is_refused_on_every_stage_and_rank() {
    let stale = Action::StaleBlock { request: X };
    for (setup, at) in
        [(one(), (0, 0)), (pipeline(), (0, 0)), (pipeline(), (1, 0)), (ranks(), (0, 1))]
    {
        let (proofs, hook) = masked(setup, stale.clone(), at).await;
        assert!(proofs[0].contains("written was"), "{proofs:?}");
        let failed = failures(&hook);
        assert!(failed.iter().any(|reason| reason.contains("the table claims")), "{failed:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn devices_that_fail_panic_or_have_no_memory_are_replaced() {
    let fail = Action::Fail { text: "launch failed".into(), sticky: false };
    for (action, said) in [
        (fail, "launch failed"),
        (Action::Panic("injected".into()), "panic: injected"),
        (Action::OutOfMemory { bytes: 4096 }, "4096 bytes"),
        (Action::Delay(Duration::from_millis(300)), ""),
    ] {
        let (_, hook) = masked(pipeline(), action, (1, 0)).await;
        let failed = failures(&hook);
        assert!(said.is_empty() || failed.iter().any(|r| r.contains(said)), "{said}: {failed:?}");
        assert_eq!(said.is_empty(), failed.is_empty(), "{failed:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_load_that_fails_names_node_device_and_bytes_and_is_tried_again() {
    let (cluster, hook) = armed(one()).await;
    let mut stream = cluster.submit(&cluster.mixed(1, 20, 200)).await;
    stream.take(3).await;
    hook.arm(1, Action::OutOfMemory { bytes: 12345 }, |site| matches!(site, Site::Load { .. }));
    hook.arm(1, Action::FlipWeight { index: 2, bit: 5 }, |site| matches!(site, Site::Load { .. }));
    hook.arm(1, Action::Panic("injected".into()), |site| step_of(site, (0, 0), 1));
    stream.finished().await;
    let down: Vec<_> = hook.facts(facts::REPLICA_DOWN).into_iter().map(|f| f.subject).collect();
    let names =
        |parts: [&str; 3]| down.iter().any(|reason| parts.iter().all(|part| reason.contains(part)));
    assert!(names(["node left", "device cpu:0", "12345 bytes"]), "{down:?}");
    assert!(names(["node left", "device cpu:0", "weight 'layer 2'"]), "{down:?}");
    cluster.settled(SOON).await;
}

/// A sticky failure, as of a dead CUDA context: only a new process gets the device back.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_device_that_stays_lost_ends_its_process_and_the_next_one_serves() {
    let (mut cluster, hook) = armed(one()).await;
    let mut stream = cluster.submit(&cluster.mixed(1, 20, 400)).await;
    stream.take(3).await;
    let dead = Arc::new(AtomicBool::new(true));
    let (fail, is_dead) = (Action::Fail { text: "lost".into(), sticky: true }, dead.clone());
    hook.arm(usize::MAX, fail, move |site| {
        is_dead.load(Ordering::SeqCst) && matches!(site, Site::Step { .. } | Site::Load { .. })
    });
    let ended = tokio::time::timeout(SOON, cluster.hosts["left"].failed()).await;
    let error = ended.expect("the host gives up");
    assert!(matches!(error, HostError::Escalated { .. }), "{error}");
    dead.store(false, Ordering::SeqCst);
    let zombie = cluster.crash("left");
    cluster.start_host("left").await;
    stream.finished().await;
    cluster.settled(SOON).await;
    zombie.stop().await;
}

/// Detected by nobody, as such faults are in the field: the text may change, nothing else may.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn flipped_bits_are_proven_and_touch_no_other_request() {
    let (cluster, hook) = armed(one()).await;
    let mut all = streams(&cluster, 150).await;
    let flip = Action::FlipKv { request: X, layer: 3, position: 11, bit: 40 };
    hook.arm(1, flip, |site| holds(site, (0, 0), X));
    let victim = all.remove(X as usize - 1);
    for stream in all {
        stream.finished().await;
    }
    let tokens = victim.drain().await;
    assert_eq!(tokens.len(), 150);
    let right = crate::engines::oracle(&cluster.setup.spec, &cluster.mixed(X, 20 + X as u32, 150));
    assert_ne!(tokens, right, "the flip did not reach the text");
    let proofs = hook.proofs();
    assert!(proofs.len() == 1 && proofs[0].contains("before"), "{proofs:?}");
    cluster.settled(SOON).await;
}

async fn not_finite(setup: Setup, at: (usize, usize), named: &str) {
    let (cluster, hook) = armed(setup).await;
    let mut all = streams(&cluster, 150).await;
    hook.arm(1, Action::NotFinite { request: X }, move |site| holds(site, at, X));
    let (code, message) = all.remove(X as usize - 1).failed().await;
    assert_eq!(code, FailureCode::NotFinite, "{message}");
    assert!(message.contains(named), "{message}");
    for mate in all {
        mate.finished().await;
    }
    assert_eq!(hook.proofs().len(), 1, "{:?}", hook.proofs());
    assert!(failures(&hook).is_empty(), "{:?}", failures(&hook));
    cluster.probe(1000).await;
    cluster.settled(SOON).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_not_finite_is_never_sampled_and_its_stage_is_named() {
    not_finite(one(), (0, 0), "in stage 0 (layers 0..6 on left/cpu:0)").await;
    not_finite(pipeline(), (1, 0), "in stage 1 (layers 3..6 on b/cpu:0)").await;
    not_finite(pipeline(), (0, 0), "when they left stage 0 (layers 0..3 on a/cpu:0)").await;
}

/// A weight that spoils everything is found when the first logits are not finite, and loaded anew.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nan_from_a_changed_weight_costs_no_request() {
    let (cluster, hook) = armed(pipeline()).await;
    let all = streams(&cluster, 150).await;
    hook.arm(1, Action::FlipWeight { index: 1, bit: 3 }, |site| step_of(site, (1, 0), 1));
    // In the very next step, before a wrong token can be drawn: the hash engine has no NaN.
    hook.arm(1, Action::NotFinite { request: X }, |site| holds(site, (1, 0), X));
    for stream in all {
        drop(stream.drain().await);
    }
    let failed = failures(&hook);
    assert!(failed.iter().any(|r| r.contains("in the memory of")), "{failed:?}");
    cluster.probe(1000).await;
    cluster.settled(SOON).await;
}
