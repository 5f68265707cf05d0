//! What the parts of a plan say about each other.

use super::values::did_you_mean;
use super::{Plan, Select, When};
use crate::catalog;
use crate::fault::{Kind, Mode};
use dunlin_runtime::config::{ConfigError, Problem};

pub(super) fn all(plan: &Plan) -> Result<(), ConfigError> {
    for mode in &plan.modes {
        in_mode(plan, *mode)?;
    }
    for (at, fault) in plan.faults.iter().enumerate() {
        let key = format!("fault.{at}");
        trigger(plan, &key, &fault.when)?;
        if let Select::Request(Some(number)) = fault.target.select
            && number >= plan.workload.requests
        {
            return Err(no_request(plan, &format!("{key}.target.request"), number));
        }
    }
    cycles(plan)?;
    sweep(plan)
}

/// Refuses kinds that cannot be injected in this mode, named or in the swarm.
pub(super) fn in_mode(plan: &Plan, mode: Mode) -> Result<(), ConfigError> {
    let word = match mode {
        Mode::Sim => "sim",
        Mode::Process => "process",
    };
    let complain = |key: &str, kind: Kind| {
        let reason = format!("{} cannot be injected in mode {word}", kind.name());
        let modes = catalog::row(kind).modes.iter().map(|mode| format!("{mode:?}").to_lowercase());
        let mend = format!("its modes: {}", modes.collect::<Vec<_>>().join(", "));
        plan.source.error(key, Problem::Conflict { reason }, mend)
    };
    for (at, fault) in plan.faults.iter().enumerate() {
        if !catalog::row(fault.kind).in_mode(mode) {
            return Err(complain(&format!("fault.{at}.kind"), fault.kind));
        }
    }
    let swarm = plan.swarm.iter().flat_map(|swarm| &swarm.kinds);
    for (kind, weight) in swarm {
        if *weight > 0 && !catalog::row(*kind).in_mode(mode) {
            return Err(complain("swarm.kinds", *kind));
        }
    }
    Ok(())
}

fn trigger(plan: &Plan, key: &str, when: &When) -> Result<(), ConfigError> {
    let (from, to) =
        (plan.phases.warmup_us, plan.phases.warmup_us.saturating_add(plan.phases.chaos_us));
    match when {
        When::At(at) if at.from < from || at.last() >= to => {
            let reason = format!(
                "outside the chaos phase, which is from {} ms to {} ms",
                from / 1000,
                to / 1000
            );
            let key = format!("{key}.when.at");
            let value = plan.source.shown(&key).unwrap_or_default();
            let mend = "choose a time in the chaos phase; nothing is injected in the warm-up";
            Err(plan.source.error(&key, Problem::BadValue { value, reason }, mend))
        }
        When::Token { request: Some(number), .. } if *number >= plan.workload.requests => {
            Err(no_request(plan, &format!("{key}.when.request"), *number))
        }
        When::Token { token, .. } if token.from >= plan.workload.output_tokens.last() => {
            let longest = plan.workload.output_tokens.last();
            let reason = format!("no output is longer than {longest} tokens");
            let key = format!("{key}.when.token");
            let value = plan.source.shown(&key).unwrap_or_default();
            let mend = format!("write a token below {longest}");
            Err(plan.source.error(&key, Problem::BadValue { value, reason }, mend))
        }
        When::After { fault, .. } if plan.faults.iter().all(|other| other.id != *fault) => {
            let ids = plan.faults.iter().map(|fault| fault.id.as_str());
            let mend = did_you_mean(fault, ids);
            let problem = Problem::NotFound { what: "fault", value: fault.clone() };
            Err(plan.source.error(&format!("{key}.when.after"), problem, mend))
        }
        _ => Ok(()),
    }
}

fn no_request(plan: &Plan, key: &str, number: u64) -> ConfigError {
    let (value, requests) = (number.to_string(), plan.workload.requests);
    let problem = Problem::OutOfRange { value, min: 0, max: requests - 1 };
    plan.source.error(key, problem, format!("the workload has {requests} requests, from 0"))
}

/// A fault that waits for itself never fires.
fn cycles(plan: &Plan) -> Result<(), ConfigError> {
    for (at, fault) in plan.faults.iter().enumerate() {
        let mut waits = &fault.when;
        for _ in 0..=plan.faults.len() {
            let When::After { fault: next, .. } = waits else { break };
            if *next == fault.id {
                let reason = format!("fault {} waits for itself", fault.id);
                let mend = "let one fault of the ring wait for something else";
                let key = format!("fault.{at}.when.after");
                return Err(plan.source.error(&key, Problem::Conflict { reason }, mend));
            }
            let Some(found) = plan.faults.iter().find(|other| other.id == *next) else { break };
            waits = &found.when;
        }
    }
    Ok(())
}

/// Each axis at its first and last value is a valid plan.
fn sweep(plan: &Plan) -> Result<(), ConfigError> {
    if plan.sweep.is_empty() || !plan.source.overrides.is_empty() {
        return Ok(());
    }
    for axis in &plan.sweep {
        for value in axis.values.first().into_iter().chain(axis.values.last()) {
            plan.clone().set(&axis.key, value)?;
        }
    }
    Ok(())
}
