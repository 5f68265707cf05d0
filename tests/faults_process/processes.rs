//! Signals to node processes, and starts that fail.

use dunlin_faults::fault::Kind;
use dunlin_faults::record::What;

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
