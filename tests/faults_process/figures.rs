//! Figures of docs/faults.md: how soon trouble is noticed and over, kind by kind. Not run by
//! default: they take minutes and want a quiet machine.
//!
//! `cargo test --release --test faults_process -- --ignored --nocapture figures::`

use dunlin_faults::fault::{Expect, Fault, Kind, Params, Target, Trigger};
use dunlin_faults::record::{Record, What};
use dunlin_faults::report::Slo;
use dunlin_faults::report::metrics::metrics;
use dunlin_faults::resolved::Resolved;

use crate::harness::{HASH, MODEL, node, plan, run};

/// Faults of a kind in one run, and how far apart.
const COUNT: u64 = 12;
const APART_US: u64 = 4_000_000;
const FIRST_US: u64 = 2_000_000;

/// Requests of `tokens` tokens, one each `apart_us`, for as long as the faults come.
fn steady(file: &str, name: &str, tokens: u32, apart_us: u64, for_us: u64) -> Resolved {
    let mut plan = plan(file, name, for_us / apart_us, tokens);
    for request in &mut plan.requests {
        request.arrival_us = request.number * apart_us;
    }
    plan.phases.chaos_us = for_us + 30_000_000;
    plan
}

fn at(kind: Kind, target: Target, us: u64, lasts_ms: u64) -> Fault {
    Fault {
        id: format!("{}-{us}", kind.name()),
        kind,
        target,
        when: Trigger::At { us },
        lasts_us: (lasts_ms > 0).then_some(lasts_ms * 1000),
        times: 1,
        params: Params::default(),
        expect: Expect::Masked,
    }
}

fn percentile(mut values: Vec<u64>, percent: usize) -> String {
    values.sort_unstable();
    let at = (values.len() * percent).div_ceil(100).saturating_sub(1);
    values.get(at).map_or("-".into(), |us| format!("{:.0}", *us as f64 / 1000.0))
}

/// One row: kind, number, time to detect and to recover, in milliseconds.
fn row(name: &str, record: &Record) {
    let slo = Slo { stall_us: Some(60_000), ttft_us: Some(500_000), gap_us: Some(60_000) };
    let metrics = metrics(record, slo);
    let detect: Vec<u64> = metrics.faults.iter().filter_map(|f| f.mttd_us).collect();
    let recover: Vec<u64> = metrics.faults.iter().filter_map(|f| f.mttr_us).collect();
    let proved = record.faults.iter().filter(|run| run.proof.is_some()).count();
    println!(
        "| {name} | {} ({proved} proved) | {} / {} ({}) | {} / {} ({}) | {} | {} | {} |",
        record.faults.len(),
        percentile(detect.clone(), 50),
        percentile(detect.clone(), 99),
        detect.len(),
        percentile(recover.clone(), 50),
        percentile(recover.clone(), 99),
        recover.len(),
        metrics.longest_gap_us.map_or("-".into(), |us| format!("{:.0}", us as f64 / 1000.0)),
        metrics.failed,
        metrics.lost_tokens + metrics.duplicated_tokens,
    );
}

fn of_kind(name: &str, make: impl Fn(u64) -> Fault) {
    let for_us = FIRST_US + COUNT * APART_US;
    let mut plan = steady(HASH, name, 150, 250_000, for_us);
    plan.faults = (0..COUNT).map(|n| make(FIRST_US + n * APART_US)).collect();
    for (n, fault) in plan.faults.iter_mut().enumerate() {
        fault.id = format!("f{n}");
    }
    row(name, &run(&plan));
}

fn both(a: &str, b: &str) -> Target {
    Target::Links(vec![(a.into(), b.into()), (b.into(), a.into())])
}

fn shard() -> Target {
    Target::Shard { replica: "r0".into(), stage: 0, rank: 0 }
}

#[test]
#[ignore = "figures"]
fn detection_and_recovery() {
    println!(
        "| kind | faults | MTTD p50 / p99 ms (n) | MTTR p50 / p99 ms (n) | longest gap ms | failed \
         | tokens lost or doubled |\n|---|---|---|---|---|---|---|"
    );
    of_kind("process.kill", |us| at(Kind::ProcessKill, node("left"), us, 0));
    of_kind("process.stop", |us| at(Kind::ProcessStop, node("left"), us, 0));
    of_kind("process.pause 1.5 s", |us| at(Kind::ProcessPause, node("left"), us, 1500));
    of_kind("actor.panic shard", |us| at(Kind::ActorPanic, shard(), us, 0));
    of_kind("device.launch_error", |us| at(Kind::DeviceLaunchError, shard(), us, 0));
    of_kind("device.oom", |us| at(Kind::DeviceOom, shard(), us, 0));
    of_kind("device.hang 3 s", |us| at(Kind::DeviceHang, shard(), us, 3000));
    of_kind("link.partition 1.5 s", |us| at(Kind::LinkPartition, both("left", "front"), us, 1500));
    of_kind("link.clog 1.5 s", |us| at(Kind::LinkClog, both("left", "front"), us, 1500));
    of_kind("conn.half_open", |us| {
        let link = Target::Links(vec![("left".into(), "front".into())]);
        at(Kind::ConnHalfOpen, link, us, 1500)
    });
    of_kind("frame.corrupt", |us| {
        let link = Target::Links(vec![("left".into(), "front".into())]);
        at(Kind::FrameCorrupt, link, us, 0)
    });
    of_kind("logits.nan", |us| at(Kind::LogitsNan, shard(), us, 0));
}

/// Tokens that reached clients by half second, from `from_us` to `to_us`, a second.
fn goodput(record: &Record, from_us: u64, to_us: u64) -> f64 {
    let tokens = record.events.iter().filter(|event| {
        (from_us..to_us).contains(&event.us) && matches!(event.what, What::Token { .. })
    });
    tokens.count() as f64 / ((to_us - from_us) as f64 / 1e6)
}

#[test]
#[ignore = "figures"]
fn goodput_during_a_rolling_kill() {
    let make = |name: &str| {
        let mut plan = steady(MODEL, name, 48, 700_000, 24_000_000);
        plan.cluster.set.push(("membership.lease_ms".into(), "1000".into()));
        plan
    };
    let quiet = run(&make("rolling-kill-undisturbed"));
    let mut plan = make("rolling-kill");
    plan.faults = [("left", 4), ("right", 10), ("left", 16), ("right", 20)]
        .map(|(name, second)| at(Kind::ProcessKill, node(name), second * 1_000_000, 0))
        .to_vec();
    let record = run(&plan);
    let (from, to) = (4_000_000, 24_000_000);
    let (with, without) = (goodput(&record, from, to), goodput(&quiet, from, to));
    row("rolling kill, default model", &record);
    println!(
        "goodput: {with:.1} tokens/s with each worker killed twice within 20 s, {without:.1} \
         undisturbed: {:.3}",
        with / without
    );
}

const EACH_US: u64 = 1_000_000;

/// One worker, the default model: what comes back is the same shard.
fn one_worker(name: &str, fault: impl Fn(u64) -> Fault) {
    let text = "[cluster]\nname = \"one-worker\"\nhead = \"front\"\n\
         [node.front]\naddress = \"127.0.0.1:1\"\nhttp = \"127.0.0.1:1\"\n\
         [node.left]\naddress = \"127.0.0.1:2\"\ndevices = [\"cpu\"]\n\
         [[replica]]\nname = \"r0\"\nstages = [\"left/cpu\"]\n";
    let for_us = FIRST_US + COUNT * APART_US;
    let mut plan = steady(MODEL, name, 120, EACH_US, for_us);
    plan.cluster.text = text.into();
    plan.faults = (0..COUNT).map(|n| fault(FIRST_US + n * APART_US)).collect();
    for (n, fault) in (0..).zip(&mut plan.faults) {
        fault.id = format!("f{n}");
        // In the middle of a stream, however fast that is.
        let request = (FIRST_US + n * APART_US) / EACH_US;
        fault.when = Trigger::Token { request: Some(request), token: 40 };
    }
    row(name, &run(&plan));
}

#[test]
#[ignore = "figures"]
fn a_shard_restarts_with_and_without_its_weights() {
    one_worker("shard restart, weights kept (actor.panic)", |us| {
        at(Kind::ActorPanic, shard(), us, 0)
    });
    one_worker("shard restart, weights read anew (process.kill)", |us| {
        at(Kind::ProcessKill, node("left"), us, 0)
    });
}
