//! Who may fail: E1 holds each fault to its `expect`, I21 keeps faults from reaching others.

use super::Found;
use super::case::{Case, Stream, until};
use crate::fault::{Expect, Kind, Target};
use crate::record::{FaultRun, Record, What};
use dunlin_runtime::faults::names::PEER_DOWN;
use std::collections::BTreeSet;

/// How long after its end a fault's effect may last.
const AFTERMATH_US: u64 = 10_000_000;

/// Was the fault (or its aftermath) there while the request was open?
fn while_open(case: &Case<'_>, began: u64, run: &FaultRun, stream: &Stream<'_>) -> bool {
    let end = stream.ended_us().or(stream.refused.map(|(us, _)| us)).unwrap_or(u64::MAX);
    began <= end && case.until(run).max(began) + AFTERMATH_US >= stream.begin_us()
}

pub(super) fn expectation(case: &Case<'_>, found: &mut Found) {
    let mut spent: BTreeSet<(usize, u32)> = BTreeSet::new();
    for (&request, stream) in &case.streams {
        if let Some((us, code)) = stream.refused
            && !may_be_refused(case, request, stream, code)
        {
            found.add("refused", us, Some(request), format!("it was refused as {code}"));
        }
        let Some((us, code, message)) = stream.failure() else { continue };
        if !may_fail(case, request, stream, code, &mut spent) {
            let what = format!("it failed as {code}: {message}");
            found.add("failed", us, Some(request), what);
        }
    }
}

/// Overload is the client's own doing, and so is a request that is none; anything else needs a
/// fault that says so.
fn may_be_refused(case: &Case<'_>, request: u64, stream: &Stream<'_>, code: &str) -> bool {
    let own = ["overloaded", "draining"].contains(&code);
    let malformed = case.info(request).is_none_or(|info| info.reference.is_empty())
        && case.fired().any(|(_, run)| run.kind() == Kind::ClientMalformed);
    let fault = case.fired().any(|(began, run)| {
        run.expect() == Expect::Unavailable && while_open(case, began, run, stream)
    });
    own || malformed || fault
}

fn may_fail(
    case: &Case<'_>,
    request: u64,
    stream: &Stream<'_>,
    code: &str,
    spent: &mut BTreeSet<(usize, u32)>,
) -> bool {
    // The client's own leaving may show as any code.
    if case.info(request).is_some_and(|info| info.cancels) {
        return true;
    }
    let mut breaks = 0;
    for (at, run) in case.record.faults.iter().enumerate() {
        let Some(began) = run.began_us else { continue };
        if !while_open(case, began, run, stream) {
            continue;
        }
        breaks += if breaks_replica(run.kind()) { run.fault.times } else { 0 };
        let hit = run.touched.is_empty() || run.touched.contains(&request);
        match run.expect() {
            Expect::Unavailable => return true,
            // A change that was detected ends the request with a code.
            Expect::Measure if hit => return true,
            // Each firing has one failure.
            Expect::FailedOnce if hit => {
                let free = (0..run.fault.times).find(|turn| !spent.contains(&(at, *turn)));
                if let Some(turn) = free {
                    spent.insert((at, turn));
                    return true;
                }
            }
            _ => {}
        }
    }
    // On a replica that was broken twice under it, it cannot be told from one that breaks replicas.
    code.to_lowercase().contains("poison") && breaks >= 2
}

fn breaks_replica(kind: Kind) -> bool {
    use Kind::*;
    matches!(kind, ActorPanic | ActorHang | DeviceOom | DeviceLaunchError | DeviceHang)
}

/// A request that no fault touched and that was not open while one forbade service must end well.
pub(super) fn containment(case: &Case<'_>, found: &mut Found) {
    for (&request, stream) in &case.streams {
        let Some((us, code, message)) = stream.failure() else { continue };
        if case.info(request).is_some_and(|info| info.cancels) {
            continue;
        }
        let touches = |(began, run): (u64, &FaultRun)| {
            let all = run.fault.target == Target::All || run.expect() == Expect::Unavailable;
            let open = while_open(case, began, run, stream);
            run.touched.contains(&request) || (open && (all || run.touched.is_empty()))
                // It may have been handed to the target only after the fault began.
                || (open && stream.begin_us() >= began)
        };
        if !case.fired().any(touches) {
            let what = format!("no fault touched it and it failed as {code}: {message}");
            found.add("bystander", us, Some(request), what);
        }
    }
}

pub(super) fn no_false_death(case: &Case<'_>, found: &mut Found) {
    for (us, node, peer) in false_deaths(case.record) {
        found.add("gave-up", us, None, format!("{node} gave {peer} up"));
    }
}

/// A peer that is given up needs a fault that takes it, its link or its actors away; being slow,
/// far or asked too much is none. When, who, whom.
pub fn false_deaths(record: &Record) -> impl Iterator<Item = (u64, &str, &str)> {
    use Kind::*;
    let slow = |kind: Kind| {
        matches!(
            kind,
            ProcessSlow
                | ActorSlow
                | DeviceSlow
                | LinkDelay
                | LinkLoss
                | LinkBandwidth
                | TimerLate
                | ClockJump
        ) || kind.name().starts_with("client.")
    };
    let explained = move |us: u64| {
        record.faults.iter().filter_map(|run| Some((run.began_us?, run))).any(|(began, run)| {
            !slow(run.kind()) && began <= us && us <= until(record, run).max(began) + AFTERMATH_US
        })
    };
    record.events.iter().filter_map(move |event| match &event.what {
        // While nodes are taken down for good, after the settle phase, nobody is wrong about it.
        What::Fact { node, name, subject, .. }
            if name == PEER_DOWN && event.us < record.phases.settle_us && !explained(event.us) =>
        {
            Some((event.us, node.as_str(), subject.as_str()))
        }
        _ => None,
    })
}
