//! What the hook inside the nodes carries out: actors, devices, memory, frames, clocks.

use dunlin_faults::fault::{Expect, Fault, Kind, Target};
use dunlin_faults::record::Record;
use dunlin_faults::resolved::Resolved;

use crate::harness::{
    HASH, MIXED, PIPELINE, check_fault, check_masked, fault, got, node, plan, run,
};

fn first_shard() -> Target {
    Target::Shard { replica: "r0".into(), stage: 0, rank: 0 }
}

fn actor(role: &str) -> Target {
    Target::Actor { node: "left".into(), role: role.into(), instance: String::new() }
}

/// Six requests of 40 tokens, and one fault.
fn carried_out(file: &str, fault: Fault) -> Record {
    let name = fault.kind.name();
    let mut plan: Resolved = plan(file, name, 6, 40);
    plan.faults = vec![fault];
    let record = run(&plan);
    check_fault(&record);
    record
}

fn masked(file: &str, fault: Fault) {
    check_masked(&carried_out(file, fault));
}

#[test]
fn a_shard_that_panics() {
    masked(HASH, fault(Kind::ActorPanic, first_shard(), 10));
}

#[test]
fn a_scheduler_that_panics() {
    masked(HASH, fault(Kind::ActorPanic, actor("scheduler"), 10));
}

#[test]
fn a_shard_that_hangs() {
    let mut hang = fault(Kind::ActorHang, actor("shard"), 10);
    hang.lasts_us = Some(4_000_000);
    masked(HASH, hang);
}

#[test]
fn a_slow_scheduler() {
    let mut slow = fault(Kind::ActorSlow, actor("scheduler"), 10);
    (slow.params.p50_us, slow.params.p99_us) = (Some(5_000), Some(20_000));
    slow.lasts_us = Some(500_000);
    masked(HASH, slow);
}

#[test]
fn a_device_without_memory() {
    masked(HASH, fault(Kind::DeviceOom, first_shard(), 10));
}

#[test]
fn a_kernel_that_cannot_be_launched() {
    masked(HASH, fault(Kind::DeviceLaunchError, first_shard(), 10));
}

fn adapters_shard() -> Target {
    Target::Shard { replica: "r0".into(), stage: 1, rank: 0 }
}

/// The adapter is really given up, and opened anew for the shard that follows.
#[test]
fn an_adapter_that_is_lost_in_the_middle_of_streams() {
    let record = carried_out(MIXED, fault(Kind::DeviceLaunchError, adapters_shard(), 10));
    check_masked(&record);
    let proof = record.faults.iter().find_map(|fault| fault.proof.as_deref()).unwrap_or_default();
    assert!(proof.contains("fails: wgpu:0: device lost"), "{proof}");
}

#[test]
fn an_adapter_without_memory() {
    masked(MIXED, fault(Kind::DeviceOom, adapters_shard(), 10));
}

#[test]
fn a_device_that_hangs() {
    let mut hang = fault(Kind::DeviceHang, first_shard(), 10);
    hang.lasts_us = Some(4_000_000);
    masked(HASH, hang);
}

#[test]
fn a_slow_device() {
    let mut slow = fault(Kind::DeviceSlow, first_shard(), 10);
    slow.params.factor = Some(5.0);
    slow.lasts_us = Some(800_000);
    masked(HASH, slow);
}

#[test]
fn a_flipped_bit_of_the_cache() {
    let mut flip = fault(Kind::BitsKv, first_shard(), 10);
    flip.expect = Expect::Measure;
    carried_out(HASH, flip);
}

#[test]
fn a_block_that_keeps_old_content() {
    let mut stale = fault(Kind::KvStale, first_shard(), 10);
    stale.expect = Expect::Measure;
    carried_out(HASH, stale);
}

#[test]
fn two_exchanged_blocks() {
    let mut swap = fault(Kind::KvSwap, first_shard(), 10);
    swap.expect = Expect::Measure;
    carried_out(HASH, swap);
}

#[test]
fn logits_that_are_no_numbers() {
    let record = carried_out(HASH, fault(Kind::LogitsNan, first_shard(), 10));
    let mut failed = 0;
    for (number, info) in &record.requests {
        let got = got(&record, *number);
        assert_eq!(got.ends.len(), 1, "request {number}: {got:?}");
        assert_eq!(got.tokens[..], info.reference[..got.tokens.len()], "request {number}");
        failed += usize::from(got.ends[0] == "logits_not_finite");
    }
    assert_eq!(failed, 1, "the one that was hit fails, its batch-mates go on");
}

#[test]
fn a_frame_with_a_changed_byte() {
    let links = Target::Links(vec![("left".into(), "right".into())]);
    masked(PIPELINE, fault(Kind::FrameCorrupt, links, 10));
}

#[test]
fn a_frame_that_is_cut() {
    let links = Target::Links(vec![("right".into(), "front".into())]);
    masked(PIPELINE, fault(Kind::FrameTruncate, links, 10));
}

#[test]
fn a_frame_that_comes_twice() {
    let links = Target::Links(vec![("left".into(), "front".into())]);
    let mut twice = fault(Kind::FrameDup, links, 10);
    twice.times = 3;
    masked(PIPELINE, twice);
}

#[test]
fn an_old_frame_that_comes_again() {
    let links = Target::Links(vec![("left".into(), "right".into())]);
    masked(PIPELINE, fault(Kind::FrameStale, links, 10));
}

#[test]
fn a_clock_that_jumps() {
    let mut jump = fault(Kind::ClockJump, node("left"), 10);
    jump.params.ms = Some(-3_600_000);
    masked(HASH, jump);
}
