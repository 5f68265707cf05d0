//! What happens below TLS, at the UDP sockets of the nodes, and to connections.

use dunlin_faults::fault::{Fault, Kind, Target};

use crate::harness::{HASH, PIPELINE, check_fault, check_masked, fault, node, plan, run};

fn both(a: &str, b: &str) -> Target {
    Target::Links(vec![(a.into(), b.into()), (b.into(), a.into())])
}

fn one_way(a: &str, b: &str) -> Target {
    Target::Links(vec![(a.into(), b.into())])
}

/// Six requests of 60 tokens; the fault lasts so many milliseconds.
fn masked(file: &str, kind: Kind, links: Target, ms: u64, with: impl FnOnce(&mut Fault)) {
    let mut plan = plan(file, kind.name(), 6, 60);
    let mut broken = fault(kind, links, 10);
    broken.lasts_us = (ms > 0).then_some(ms * 1000);
    with(&mut broken);
    plan.faults = vec![broken];
    let record = run(&plan);
    check_fault(&record);
    check_masked(&record);
}

#[test]
fn a_partition_of_a_worker() {
    masked(HASH, Kind::LinkPartition, both("left", "front"), 1500, |_| {});
}

#[test]
fn a_partition_one_way() {
    masked(HASH, Kind::LinkPartition, one_way("left", "front"), 1500, |_| {});
}

#[test]
fn a_partition_between_two_stages() {
    masked(PIPELINE, Kind::LinkPartition, both("left", "right"), 1500, |_| {});
}

#[test]
fn a_slow_link() {
    masked(PIPELINE, Kind::LinkDelay, both("left", "right"), 1000, |fault| {
        (fault.params.p50_us, fault.params.p99_us) = (Some(5_000), Some(40_000));
    });
}

#[test]
fn a_link_that_loses_datagrams() {
    masked(PIPELINE, Kind::LinkLoss, both("left", "right"), 1500, |fault| {
        fault.params.p = Some(0.05);
    });
}

#[test]
fn a_narrow_link() {
    masked(PIPELINE, Kind::LinkBandwidth, both("left", "right"), 1500, |fault| {
        fault.params.bits_per_second = Some(200_000);
    });
}

#[test]
fn a_clogged_link() {
    masked(PIPELINE, Kind::LinkClog, both("left", "right"), 1500, |_| {});
}

#[test]
fn a_connection_that_moves_to_another_port() {
    masked(PIPELINE, Kind::LinkRebind, node("left"), 0, |_| {});
}

#[test]
fn a_connection_that_one_end_forgets() {
    masked(HASH, Kind::ConnHalfOpen, one_way("left", "front"), 1500, |_| {});
}

#[test]
fn a_stream_that_stalls() {
    masked(PIPELINE, Kind::StreamStall, one_way("left", "right"), 500, |fault| {
        fault.params.message = Some("flow".into());
    });
}
