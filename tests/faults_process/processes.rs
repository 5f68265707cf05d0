//! Signals to node processes, and starts that fail.

use dunlin_faults::fault::Kind;
use dunlin_faults::record::{Record, What, gauges};
use dunlin_faults::resolved::Heal;
use dunlin_faults::verdict::{Outcome, judge};

use crate::harness::{HASH, MODEL, check_fault, check_masked, fault, node, plan, run};

#[test]
fn a_killed_process() {
    let mut plan = plan(HASH, "process.kill", 8, 40);
    plan.faults = vec![fault(Kind::ProcessKill, node("left"), 10)];
    let record = run(&plan);
    let run = check_fault(&record);
    assert!(run.proof.as_deref().is_some_and(|proof| proof.contains("signal 9")), "{run:?}");
    check_masked(&record);
    let states = |state: &str| {
        let is = |what: &What| matches!(what, What::Node { node, state: s } if node == "left" && s == state);
        record.events.iter().filter(|event| is(&event.what)).count()
    };
    assert!(states("down") > 0 && states("up") > 1, "its restart is told");
}

#[test]
fn a_killed_process_of_the_real_model() {
    let mut plan = plan(MODEL, "process.kill.model", 4, 32);
    plan.faults = vec![fault(Kind::ProcessKill, node("right"), 8)];
    let record = run(&plan);
    check_fault(&record);
    check_masked(&record);
}

#[test]
fn a_killed_process_that_stays_away() {
    let mut plan = plan(HASH, "process.kill.away", 8, 40);
    let mut kill = fault(Kind::ProcessKill, node("left"), 10);
    kill.lasts_us = Some(1_500_000);
    plan.faults = vec![kill];
    let record = run(&plan);
    let run = check_fault(&record);
    let away = run.ended_us.zip(run.began_us).map_or(0, |(end, begin)| end - begin);
    assert!(away >= 1_500_000, "{away}");
    check_masked(&record);
}

#[test]
fn a_stopped_process() {
    let mut plan = plan(HASH, "process.stop", 8, 40);
    plan.faults = vec![fault(Kind::ProcessStop, node("left"), 10)];
    let record = run(&plan);
    let run = check_fault(&record);
    assert!(run.proof.as_deref().is_some_and(|proof| proof.contains("code 0")), "{run:?}");
    check_masked(&record);
}

#[test]
fn a_paused_process() {
    let mut plan = plan(HASH, "process.pause", 8, 40);
    let mut pause = fault(Kind::ProcessPause, node("left"), 10);
    pause.lasts_us = Some(2_000_000);
    plan.faults = vec![pause];
    let record = run(&plan);
    let run = check_fault(&record);
    assert!(run.proof.as_deref().is_some_and(|proof| proof.contains("state T")), "{run:?}");
    check_masked(&record);
}

#[test]
fn a_slow_process() {
    let mut plan = plan(HASH, "process.slow", 8, 60);
    let mut slow = fault(Kind::ProcessSlow, node("left"), 10);
    slow.params.factor = Some(4.0);
    slow.lasts_us = Some(1_500_000);
    plan.faults = vec![slow];
    let record = run(&plan);
    check_fault(&record);
    check_masked(&record);
}

#[test]
fn a_process_that_cannot_start_again_twice() {
    let mut plan = plan(HASH, "process.start_fail", 8, 40);
    let mut fail = fault(Kind::ProcessStartFail, node("left"), 10);
    fail.times = 2;
    plan.faults = vec![fail];
    let record = run(&plan);
    let run = check_fault(&record);
    assert_eq!(run.proof.as_deref().unwrap_or("").matches("injected").count(), 2, "{run:?}");
    check_masked(&record);
}

fn states(record: &Record, node: &str, state: &str) -> usize {
    let is =
        |what: &What| matches!(what, What::Node { node: n, state: s } if n == node && s == state);
    record.events.iter().filter(|event| is(&event.what)).count()
}

/// Its supervisor gives it up; the others serve on, and the heal starts it by hand. I9 and I17 have
/// samples of every node to read.
#[test]
fn a_worker_that_is_given_up() {
    let mut plan = plan(HASH, "process.given_up", 8, 40);
    plan.cluster.set.push(("restart.max".into(), "2".into()));
    let mut fail = fault(Kind::ProcessStartFail, node("left"), 10);
    fail.times = 1000;
    plan.faults = vec![fail];
    plan.phases.chaos_us = 8_000_000;
    let record = run(&plan);
    let run = check_fault(&record);
    assert!(run.proof.as_deref().is_some_and(|proof| proof.contains("injected")), "{run:?}");
    check_masked(&record);
    assert_eq!(states(&record, "left", "given up"), 1);
    let verdict = judge(&plan, &record);
    assert_eq!(verdict.outcome, Outcome::Pass, "{}", verdict.reason);
    for node in &record.nodes {
        for wanted in [gauges::MEMORY_USED, gauges::MEMORY_RESERVED, "queue.mail to ", "limit."] {
            let is = |what: &What| matches!(what, What::Gauge { node: n, name, .. } if *n == node.name && name.starts_with(wanted));
            let found = record.events.iter().any(|event| is(&event.what));
            // A node without a device reserves nothing.
            let needed = wanted != gauges::MEMORY_RESERVED || !node.devices.is_empty();
            assert!(found || !needed, "{}: no sample of {wanted}", node.name);
        }
    }
}

/// With the head given up nobody is served: that is a record and a FAIL, not an error.
#[test]
fn a_head_that_is_given_up() {
    let mut plan = plan(HASH, "process.head_given_up", 4, 200);
    plan.cluster.set.push(("restart.max".into(), "1".into()));
    let head = plan.cluster.config().expect("a file of the repository").cluster.head;
    let mut fail = fault(Kind::ProcessStartFail, node(head.as_str()), 10);
    fail.times = 1000;
    plan.faults = vec![fail];
    plan.phases.chaos_us = 5_000_000;
    let record = run(&plan);
    assert_eq!(states(&record, head.as_str(), "given up"), 1);
    assert_eq!(judge(&plan, &record).outcome, Outcome::Fail);
}

#[test]
fn a_process_outside_of_the_core_stays_away() {
    let mut plan = plan(HASH, "heal.core", 8, 40);
    let mut kill = fault(Kind::ProcessKill, node("left"), 10);
    kill.lasts_us = Some(120_000_000);
    plan.faults = vec![kill];
    plan.phases.chaos_us = 5_000_000;
    plan.phases.heal = Heal::Core;
    let record = run(&plan);
    check_fault(&record);
    check_masked(&record);
    assert!(record.outside.iter().eq(["left"]), "{:?}", record.outside);
    let rest = record.rest.as_ref().expect("the core came to rest");
    assert_eq!((rest.replicas_up, rest.replicas_wanted), (1, 1));
    let verdict = judge(&plan, &record);
    assert_eq!(verdict.outcome, Outcome::Pass, "{}", verdict.reason);
}
