//! Makes every draw of a plan, for one seed and one mode.

use super::{FaultPlan, Plan, PlanError, When, check, swarm, target, workload};
use crate::catalog;
use crate::draw::Draws;
use crate::fault::{Fault, Mode, Params, Target, Trigger};
use crate::resolved::{RESOLVED_SCHEMA, Resolved};
use dunlin_runtime::config::Problem;

impl Plan {
    /// Every fault and request, concrete. Fails where the mode is not one of the plan's or cannot
    /// inject one of its kinds.
    pub fn resolve(&self, seed: u64, mode: Mode) -> Result<Resolved, PlanError> {
        if !self.modes.contains(&mode) {
            let reason = format!("the plan is not for mode {}", format!("{mode:?}").to_lowercase());
            let mend = "add the mode to `modes`, or run it in one that is there";
            return Err(self.source.error("modes", Problem::Conflict { reason }, mend));
        }
        check::in_mode(self, mode)?;
        let mut faults = Vec::new();
        for fault in &self.faults {
            faults.extend(self.fault(fault, seed));
        }
        if let Some(swarm) = &self.swarm {
            faults.extend(swarm::draw(self, swarm, seed, mode));
        }
        let mut invariants = self.options.clone();
        if invariants.restart_max == 0 {
            invariants.restart_max = self.config.restart.max;
        }
        if invariants.restart_within_us == 0 {
            invariants.restart_within_us = self.config.restart.within_ms.saturating_mul(1000);
        }
        Ok(Resolved {
            schema: RESOLVED_SCHEMA.to_string(),
            name: self.name.clone(),
            about: self.about.clone(),
            plan: self.file().to_string(),
            mode,
            seed,
            set: self.overrides().to_vec(),
            cluster: self.cluster.clone(),
            phases: self.phases,
            tolerance: self.tolerance,
            invariants,
            report: self.report.clone(),
            faults,
            requests: workload::requests(self, seed),
        })
    }

    /// One `[[fault]]`: as many concrete faults as it has targets. The first keeps the id.
    fn fault(&self, plan: &FaultPlan, seed: u64) -> Vec<Fault> {
        let draws = Draws::new(seed, format!("fault/{}", plan.id));
        let row = catalog::row(plan.kind);
        let requests = self.workload.requests;
        let targets =
            target::resolve(&plan.target, row, &self.config, requests, &draws.sub("target"));
        let when = trigger(&plan.when, &draws.sub("when"));
        let one = |(at, target): (usize, Target)| Fault {
            id: if at == 0 { plan.id.clone() } else { format!("{}#{}", plan.id, at + 1) },
            kind: plan.kind,
            target,
            when: when.clone(),
            lasts_us: plan.lasts.map(|span| span.draw(&mut draws.sub("for"))),
            times: u32::try_from(plan.times.draw(&mut draws.sub("times"))).unwrap_or(u32::MAX),
            params: params(plan, &draws),
            expect: plan.expect,
        };
        targets.into_iter().enumerate().map(one).collect()
    }
}

fn trigger(when: &When, draws: &Draws) -> Trigger {
    let mut own = draws.sub("value");
    match when {
        When::At(at) => Trigger::At { us: at.draw(&mut own) },
        When::Token { request, token } => Trigger::Token {
            request: *request,
            token: u32::try_from(token.draw(&mut own)).unwrap_or(u32::MAX),
        },
        When::Step { replica, step } => {
            Trigger::Step { replica: replica.clone(), step: step.draw(&mut own) }
        }
        When::Message { link, message, nth } => Trigger::Message {
            links: link.clone().into_iter().collect(),
            message: message.clone(),
            nth: nth.draw(&mut own),
        },
        When::Event { name, nth } => Trigger::Event { name: name.clone(), nth: nth.draw(&mut own) },
        When::After { fault, edge, delay } => {
            Trigger::After { fault: fault.clone(), edge: *edge, delay_us: delay.draw(&mut own) }
        }
        When::Site { site, nth } => Trigger::Site { site: site.clone(), nth: nth.draw(&mut own) },
    }
}

fn params(plan: &FaultPlan, draws: &Draws) -> Params {
    let drawn =
        |name: &str, span: Option<super::Span>| span.map(|span| span.draw(&mut draws.sub(name)));
    let of = &plan.drawn;
    Params {
        nth: drawn("nth", of.nth),
        layer: drawn("layer", of.layer),
        position: drawn("position", of.position),
        bit: drawn("bit", of.bit).and_then(|bit| u32::try_from(bit).ok()),
        index: drawn("index", of.index),
        count: drawn("count", of.count),
        ..plan.params.clone()
    }
}
