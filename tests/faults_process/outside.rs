//! Clients that misbehave, and processes that have no business in the cluster.

use dunlin_faults::fault::{Expect, Kind, Target};

use crate::harness::{HASH, check_fault, check_masked, fault, got, node, plan, run};

#[test]
fn a_client_that_leaves() {
    let mut plan = plan(HASH, "client.disconnect", 6, 60);
    plan.faults = vec![fault(Kind::ClientDisconnect, Target::Request(2), 10)];
    let record = run(&plan);
    check_fault(&record);
    for (number, info) in &record.requests {
        let got = got(&record, *number);
        let end = if *number == 2 { "gone" } else { "finished" };
        assert_eq!(got.ends, [end], "request {number}: {got:?}");
        assert_eq!(got.tokens[..], info.reference[..got.tokens.len()], "request {number}");
    }
}

#[test]
fn a_client_that_reads_slowly() {
    let mut plan = plan(HASH, "client.slow_reader", 6, 60);
    let mut slow = fault(Kind::ClientSlowReader, Target::Request(2), 5);
    slow.params.p50_us = Some(50_000);
    slow.lasts_us = Some(1_000_000);
    plan.faults = vec![slow];
    let record = run(&plan);
    check_fault(&record);
    check_masked(&record);
}

#[test]
fn a_burst_of_clients() {
    let mut plan = plan(HASH, "client.burst", 4, 40);
    let mut burst = fault(Kind::ClientBurst, Target::All, 10);
    burst.params.count = Some(24);
    plan.faults = vec![burst];
    let record = run(&plan);
    check_fault(&record);
    assert_eq!(record.requests.len(), 28);
    check_masked(&record);
}

#[test]
fn clients_that_send_no_requests() {
    let mut plan = plan(HASH, "client.malformed", 4, 40);
    let mut malformed = fault(Kind::ClientMalformed, Target::All, 10);
    malformed.params.count = Some(7);
    malformed.expect = Expect::Refused;
    plan.faults = vec![malformed];
    let record = run(&plan);
    check_fault(&record);
    check_masked(&record);
}

#[test]
fn a_second_process_of_a_node() {
    let mut plan = plan(HASH, "control.dup_id", 6, 120);
    let mut twin = fault(Kind::ControlDupId, node("left"), 10);
    twin.expect = Expect::Refused;
    plan.faults = vec![twin];
    let record = run(&plan);
    check_fault(&record);
    check_masked(&record);
}

#[test]
fn a_process_of_another_cluster() {
    let mut plan = plan(HASH, "control.skew", 6, 120);
    let mut skew = fault(Kind::ControlSkew, node("left"), 10);
    skew.expect = Expect::Refused;
    plan.faults = vec![skew];
    let record = run(&plan);
    check_fault(&record);
    check_masked(&record);
}

#[test]
fn a_node_that_comes_and_goes() {
    let mut plan = plan(HASH, "control.churn", 6, 120);
    let mut churn = fault(Kind::ControlChurn, node("left"), 10);
    churn.params.count = Some(3);
    plan.faults = vec![churn];
    let record = run(&plan);
    let run = check_fault(&record);
    assert_eq!(run.proof.as_deref().unwrap_or("").matches("is gone").count(), 3, "{run:?}");
    check_masked(&record);
}
