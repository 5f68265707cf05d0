//! When each fault of a plan begins and ends, from the clock and from what the system tells.
//!
//! Pure: time comes in as microseconds since the workload began. Nothing begins before the warmup
//! is over or after the heal; a trigger that comes during the warmup is kept until its end.

use crate::fault::{Edge, Fault, Trigger, site_is};
use dunlin_actors::facts::{STEP_PLANNED, TOKEN_DELIVERED};
use dunlin_runtime::Site;
use std::collections::{BTreeMap, BTreeSet};

#[derive(Debug)]
pub struct Schedule {
    plans: Vec<Plan>,
    /// Facts so far, by name.
    counts: BTreeMap<String, u64>,
    opens_us: u64,
    healed: bool,
    ids: BTreeMap<u64, u64>,
}

#[derive(Debug)]
struct Plan {
    fault: Fault,
    state: State,
    /// Sites so far that match its trigger.
    seen: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Waiting,
    /// Triggered; begins at this time.
    Due(u64),
    /// `until`: ends by itself.
    Active {
        until: Option<u64>,
    },
    Over,
}

/// What is to be done now; the number is the fault's place in the plan.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Due {
    Begin(usize),
    End(usize),
}

impl Schedule {
    /// `opens_us`: the end of the warmup.
    pub fn new(faults: &[Fault], opens_us: u64) -> Self {
        let plan = |fault: &Fault| {
            let state = match fault.when {
                Trigger::At { us } => State::Due(us.max(opens_us)),
                _ => State::Waiting,
            };
            Plan { fault: fault.clone(), state, seen: 0 }
        };
        let plans = faults.iter().map(plan).collect();
        let (counts, ids) = (BTreeMap::new(), BTreeMap::new());
        Self { plans, counts, opens_us, healed: false, ids }
    }

    /// Request number `number` of the workload is known inside the cluster as `id`.
    pub fn name_request(&mut self, number: u64, id: u64) {
        self.ids.insert(number, id);
    }

    /// When [`Self::tick`] has something to say next.
    pub fn next_us(&self) -> Option<u64> {
        let next = self.plans.iter().filter_map(|plan| match plan.state {
            State::Due(at) if !self.healed => Some(at),
            State::Active { until } => until,
            _ => None,
        });
        next.min()
    }

    /// What begins or ends by `now_us`, in the order of its time.
    pub fn tick(&mut self, now_us: u64) -> Vec<Due> {
        let mut due = Vec::new();
        while let Some(at) = self.next_us().filter(|at| *at <= now_us) {
            for index in 0..self.plans.len() {
                match self.plans[index].state {
                    State::Due(begin) if begin <= at && !self.healed => {
                        let lasts = self.plans[index].fault.lasts_us;
                        let until = lasts.map(|us| begin + us);
                        self.plans[index].state = State::Active { until };
                        due.push(Due::Begin(index));
                        self.edge(index, Edge::Start, begin);
                    }
                    State::Active { until: Some(end) } if end <= at => {
                        self.plans[index].state = State::Over;
                        due.push(Due::End(index));
                        self.edge(index, Edge::End, end);
                    }
                    _ => {}
                }
            }
        }
        due
    }

    /// A fact was told. What it triggers comes with the next [`Self::tick`].
    pub fn observe(&mut self, now_us: u64, name: &str, subject: &str, key: u64, value: u64) {
        let count = match self.counts.get_mut(name) {
            Some(count) => {
                *count += 1;
                *count
            }
            None => {
                self.counts.insert(name.to_string(), 1);
                1
            }
        };
        for plan in self.plans.iter_mut().filter(|plan| plan.state == State::Waiting) {
            let met = match &plan.fault.when {
                Trigger::Token { request, token } => {
                    let own = |number: &u64| *self.ids.get(number).unwrap_or(number) == key;
                    name == TOKEN_DELIVERED
                        && request.as_ref().is_none_or(own)
                        && value >= u64::from(*token)
                }
                Trigger::Step { replica, step } => {
                    name == STEP_PLANNED
                        && replica.as_ref().is_none_or(|replica| replica == subject)
                        && key >= *step
                }
                Trigger::Event { name: wanted, nth } => name == wanted && count == *nth,
                Trigger::At { .. }
                | Trigger::After { .. }
                | Trigger::Message { .. }
                | Trigger::Site { .. } => false,
            };
            if met {
                plan.state = State::Due(now_us.max(self.opens_us));
            }
        }
    }

    /// A site is reached. True if that triggers something: then [`Self::tick`] has it at once, and
    /// it is in force for this very site.
    pub fn reach(&mut self, now_us: u64, site: &Site<'_>) -> bool {
        let mut any = false;
        if self.healed {
            return false;
        }
        for plan in self.plans.iter_mut().filter(|plan| plan.state == State::Waiting) {
            let (met, nth) = match &plan.fault.when {
                Trigger::Message { links, message, nth } => (on_link(site, links, message), *nth),
                Trigger::Site { site: name, nth } => (site_is(name, site), *nth),
                _ => continue,
            };
            plan.seen += u64::from(met);
            if met && plan.seen >= nth {
                plan.state = State::Due(now_us.max(self.opens_us));
                any |= now_us >= self.opens_us;
            }
        }
        any
    }

    /// Its trigger was met elsewhere (at a site of a node process).
    pub fn trigger(&mut self, index: usize, now_us: u64) {
        if let Some(plan) = self.plans.get_mut(index)
            && plan.state == State::Waiting
            && !self.healed
        {
            plan.state = State::Due(now_us.max(self.opens_us));
        }
    }

    /// The injector says that the fault is over (a killed process runs again).
    pub fn ended(&mut self, index: usize, now_us: u64) {
        if let Some(plan) = self.plans.get_mut(index)
            && plan.state != State::Over
        {
            plan.state = State::Over;
            self.edge(index, Edge::End, now_us);
        }
    }

    /// The chaos phase is over: what is active ends, but for what `stays` (until its own end, if it
    /// has one), and nothing begins any more.
    pub fn heal(&mut self, stays: &BTreeSet<usize>) -> Vec<Due> {
        self.healed = true;
        let mut due = Vec::new();
        for (index, plan) in self.plans.iter_mut().enumerate() {
            if let State::Active { .. } = plan.state
                && !stays.contains(&index)
            {
                plan.state = State::Over;
                due.push(Due::End(index));
            }
        }
        due
    }

    /// Triggers what waits for this edge of the fault.
    fn edge(&mut self, index: usize, edge: Edge, at: u64) {
        let id = self.plans[index].fault.id.clone();
        for plan in self.plans.iter_mut().filter(|plan| plan.state == State::Waiting) {
            if let Trigger::After { fault, edge: wanted, delay_us } = &plan.fault.when
                && *fault == id
                && *wanted == edge
            {
                plan.state = State::Due(at + delay_us);
            }
        }
    }
}

fn on_link(site: &Site<'_>, links: &[(String, String)], wanted: &str) -> bool {
    let Site::FrameOut { node, to, message, .. } = site else { return false };
    let here = |(a, b): &(String, String)| node.as_str() == a && to.as_str() == b;
    *message == wanted && (links.is_empty() || links.iter().any(here))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fault::{Expect, Kind, Params, Target};

    fn fault(id: &str, when: Trigger, lasts_us: Option<u64>) -> Fault {
        Fault {
            id: id.into(),
            kind: Kind::LinkLoss,
            target: Target::All,
            when,
            lasts_us,
            times: 1,
            params: Params::default(),
            expect: Expect::Masked,
        }
    }

    #[test]
    fn faults_follow_the_clock_and_each_other() {
        let after = |edge, delay_us| Trigger::After { fault: "a".into(), edge, delay_us };
        let faults = [
            fault("a", Trigger::At { us: 100 }, Some(50)),
            fault("b", after(Edge::Start, 10), None),
            fault("c", after(Edge::End, 20), Some(1)),
        ];
        let mut schedule = Schedule::new(&faults, 0);
        assert_eq!(schedule.next_us(), Some(100));
        assert_eq!(schedule.tick(99), []);
        assert_eq!(schedule.tick(100), [Due::Begin(0)]);
        assert_eq!(schedule.next_us(), Some(110));
        let late = [Due::Begin(1), Due::End(0), Due::Begin(2), Due::End(2)];
        assert_eq!(schedule.tick(1000), late);
        assert_eq!(schedule.heal(&BTreeSet::new()), [Due::End(1)]);
        assert_eq!(schedule.next_us(), None);
    }

    #[test]
    fn progress_triggers_wait_for_the_warmup() {
        let token = Trigger::Token { request: Some(3), token: 17 };
        let event = Trigger::Event { name: "epoch.bumped".into(), nth: 2 };
        let step = Trigger::Step { replica: None, step: 5 };
        let faults = [fault("a", token, None), fault("b", event, None), fault("c", step, None)];
        let mut schedule = Schedule::new(&faults, 500);
        schedule.name_request(3, 1003);
        schedule.observe(10, TOKEN_DELIVERED, "", 3, 17);
        assert_eq!(schedule.next_us(), None, "another request");
        schedule.observe(10, TOKEN_DELIVERED, "", 1003, 17);
        assert_eq!(schedule.next_us(), Some(500));
        assert_eq!(schedule.tick(500), [Due::Begin(0)]);
        schedule.observe(600, "epoch.bumped", "", 0, 0);
        schedule.observe(601, STEP_PLANNED, "r0", 5, 0);
        assert_eq!(schedule.tick(601), [Due::Begin(2)]);
        schedule.observe(700, "epoch.bumped", "", 0, 0);
        assert_eq!(schedule.tick(700), [Due::Begin(1)]);
        schedule.ended(1, 800);
        assert_eq!(schedule.heal(&BTreeSet::from([2])), [Due::End(0)]);
        assert_eq!(schedule.heal(&BTreeSet::new()), [Due::End(2)]);
    }
}
