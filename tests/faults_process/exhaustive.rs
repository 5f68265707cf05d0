//! `kill -9` of the worker that serves a request, at every token of it.

use dunlin_faults::fault::{Kind, Target, Trigger};
use dunlin_faults::record::What;
use dunlin_faults::report::Slo;
use dunlin_faults::report::metrics::metrics;
use dunlin_faults::resolved::Resolved;

use crate::harness::{MODEL, check_masked, fault, plan, run};

const TOKENS: u32 = 64;
/// Between two requests: the worker that was killed is back by then, as a rule.
const APART_US: u64 = 1_500_000;

/// One request a kill, greedy and sampled: the one at index `i` loses its worker when its client
/// has token `i`.
fn kills(stride: u32) -> Resolved {
    let indices: Vec<u32> = (0..TOKENS).step_by(stride as usize).collect();
    let count = 2 * indices.len() as u64;
    let mut plan = plan(MODEL, "exhaustive-kill", count, TOKENS);
    for (request, token) in plan.requests.iter_mut().zip(indices.iter().flat_map(|i| [i, i])) {
        request.arrival_us = request.number * APART_US;
        let mut kill = fault(Kind::ProcessKill, Target::Request(request.number), *token);
        kill.id = format!("kill-{}", request.number);
        kill.when = Trigger::Token { request: Some(request.number), token: *token };
        plan.faults.push(kill);
    }
    plan.phases.chaos_us = count * APART_US + 60_000_000;
    plan
}

fn exhaustive(stride: u32) {
    let plan = kills(stride);
    let record = run(&plan);
    check_masked(&record);
    let mut proved = 0;
    for run in &record.faults {
        let when = &run.fault.when;
        assert!(run.began_us.is_some(), "{when:?} never came");
        // At its last token a request may be over before its worker is found.
        let last = matches!(when, Trigger::Token { token, .. } if token + 3 >= TOKENS);
        let killed = run.proof.as_deref().is_some_and(|proof| proof.contains("signal 9"));
        assert!(killed || last, "{when:?}: {run:?}");
        proved += usize::from(killed);
    }
    let replays = record.events.iter().filter(
        |event| matches!(&event.what, What::Fact { name, .. } if name == "request.replayed"),
    );
    let metrics = metrics(&record, Slo { stall_us: Some(100_000), ..Slo::default() });
    println!(
        "{} kills at a token, {proved} proved, {} replays, {} requests, {} tokens; \
         lost {}, duplicated {}, failed {}; longest gap {:?} us",
        record.faults.len(),
        replays.count(),
        record.requests.len(),
        metrics.tokens,
        metrics.lost_tokens,
        metrics.duplicated_tokens,
        metrics.failed,
        metrics.longest_gap_us,
    );
    assert_eq!((metrics.lost_tokens, metrics.duplicated_tokens, metrics.failed), (0, 0, 0));
    assert!(record.rest.is_some_and(|rest| rest.probe_right), "whole again");
}

#[test]
fn a_kill_at_every_sixteenth_token() {
    exhaustive(16);
}

/// About four minutes: `cargo test --release --test faults_process -- --ignored every_token`.
#[test]
#[ignore = "takes minutes; a stride of it runs always"]
fn a_kill_at_every_token() {
    exhaustive(1);
}
