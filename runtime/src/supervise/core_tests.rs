//! The core against OTP's rules, and against random orders of events.

use std::collections::BTreeMap;
use std::time::Duration;

use proptest::prelude::*;

use super::core::{ChildState, Core, Generation, Input, Output};
use super::{Backoff, Exit, Intensity, Restart, Strategy as Kind, Verdict};

const NO_BACKOFF: Backoff = Backoff { base: Duration::ZERO, max: Duration::ZERO, seed: 0 };

fn millis(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

fn named(restarts: &[Restart]) -> Vec<(String, Restart)> {
    restarts.iter().enumerate().map(|(index, restart)| (format!("c{index}"), *restart)).collect()
}

fn kinds() -> impl Strategy<Value = Kind> {
    prop_oneof![Just(Kind::OneForOne), Just(Kind::OneForAll), Just(Kind::RestForOne)]
}

fn restarts() -> impl Strategy<Value = Vec<Restart>> {
    let one =
        prop_oneof![Just(Restart::Permanent), Just(Restart::Transient), Just(Restart::Temporary)];
    prop::collection::vec(one, 1..6)
}

/// `supervisor.erl` written down directly: everything happens at once.
struct Otp {
    kind: Kind,
    intensity: Intensity,
    children: Vec<(String, Restart, bool)>,
    restarts: Vec<Duration>,
    log: Vec<String>,
    ended: bool,
}

impl Otp {
    fn new(kind: Kind, intensity: Intensity, children: Vec<(String, Restart)>) -> Otp {
        let children: Vec<_> =
            children.into_iter().map(|(id, restart)| (id, restart, true)).collect();
        let log = children.iter().map(|(id, _, _)| format!("start {id}")).collect();
        Otp { kind, intensity, children, restarts: Vec::new(), log, ended: false }
    }

    fn exit(&mut self, now: Duration, id: &str, normal: bool) {
        let Some(index) = self.children.iter().position(|(name, _, up)| name == id && *up) else {
            return;
        };
        self.children[index].2 = false;
        match self.children[index].1 {
            Restart::Temporary => drop(self.children.remove(index)),
            Restart::Transient if normal => {}
            _ => self.restart(now, index),
        }
    }

    fn restart(&mut self, now: Duration, index: usize) {
        self.restarts.push(now);
        let recent = |at: &&Duration| now - **at <= self.intensity.within;
        if self.restarts.iter().filter(recent).count() > self.intensity.max as usize {
            self.terminate(0);
            self.ended = true;
            return;
        }
        let from = match self.kind {
            Kind::OneForOne => {
                self.children[index].2 = true;
                self.log.push(format!("start {}", self.children[index].0));
                return;
            }
            Kind::OneForAll => 0,
            Kind::RestForOne => index,
        };
        self.terminate(from);
        let mut at = from;
        while at < self.children.len() {
            self.children[at].2 = true;
            self.log.push(format!("start {}", self.children[at].0));
            at += 1;
        }
    }

    /// `terminate_children`: in reverse order; temporary ones are dropped.
    fn terminate(&mut self, from: usize) {
        for (id, _, up) in self.children[from..].iter_mut().rev() {
            if std::mem::take(up) {
                self.log.push(format!("stop {id}"));
            }
        }
        let mut at = 0;
        self.children.retain(|(_, restart, _)| {
            at += 1;
            at <= from || *restart != Restart::Temporary
        });
    }
}

/// Drives a core whose starts and stops succeed at once.
struct Instant {
    core: Core,
    log: Vec<String>,
    up: BTreeMap<String, Generation>,
    verdict: Option<Verdict>,
}

impl Instant {
    fn feed(&mut self, now: Duration, input: Input) {
        let mut inputs = std::collections::VecDeque::from([input]);
        while let Some(input) = inputs.pop_front() {
            for output in self.core.handle(now, input) {
                match output {
                    Output::Start { id, generation } => {
                        self.log.push(format!("start {id}"));
                        self.up.insert(id.clone(), generation);
                        inputs.push_back(Input::Started { id, generation });
                    }
                    Output::Stop { id, generation } => {
                        self.log.push(format!("stop {id}"));
                        self.up.remove(&id);
                        let exit = Exit::Normal(None);
                        inputs.push_back(Input::Exited { id, generation, exit });
                    }
                    Output::Exit(verdict) => self.verdict = Some(verdict),
                    Output::CancelStart { .. } => panic!("nothing is ever half started here"),
                    _ => {}
                }
            }
        }
    }
}

proptest! {
    #[test]
    fn decides_as_otp_does(
        kind in kinds(),
        restarts in restarts(),
        max in 0u32..4,
        within in 1u64..40,
        exits in prop::collection::vec((0usize..6, any::<bool>(), 0u64..30), 0..30),
    ) {
        let intensity = Intensity { max, within: millis(within) };
        let mut otp = Otp::new(kind, intensity, named(&restarts));
        let core = Core::new(kind, intensity, NO_BACKOFF, named(&restarts));
        let mut ours = Instant { core, log: Vec::new(), up: BTreeMap::new(), verdict: None };
        ours.feed(Duration::ZERO, Input::Begin);
        let mut now = Duration::ZERO;
        for (index, normal, later) in exits {
            now += millis(later);
            let id = format!("c{index}");
            if !otp.ended {
                otp.exit(now, &id, normal);
            }
            if let Some(generation) = ours.up.remove(&id) {
                let exit = if normal { Exit::Normal(None) } else { Exit::Failed("x".into()) };
                ours.feed(now, Input::Exited { id, generation, exit });
            }
            prop_assert_eq!(&otp.log, &ours.log);
            prop_assert_eq!(otp.ended, ours.verdict.is_some());
        }
    }
}

/// An instance as the world outside the core knows it.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Instance {
    Starting,
    Cancelling,
    Up,
    Stopping,
}

/// What the outside does next; indices pick among what is possible.
#[derive(Debug, Clone)]
enum Event {
    Finish { pick: usize, well: bool },
    Crash { pick: usize, how: u8 },
    Later(u64),
    Add(Restart),
    Remove(usize),
    Restart(usize),
    Stop,
}

fn events() -> impl Strategy<Value = Event> {
    let rule = prop_oneof![Just(Restart::Permanent), Just(Restart::Transient)];
    prop_oneof![
        8 => (any::<usize>(), prop::bool::weighted(0.8))
            .prop_map(|(pick, well)| Event::Finish { pick, well }),
        4 => (any::<usize>(), 0u8..3).prop_map(|(pick, how)| Event::Crash { pick, how }),
        4 => (1u64..50).prop_map(Event::Later),
        1 => rule.prop_map(Event::Add),
        1 => any::<usize>().prop_map(Event::Remove),
        1 => any::<usize>().prop_map(Event::Restart),
        1 => prop::bool::weighted(0.2)
            .prop_map(|stop| if stop { Event::Stop } else { Event::Later(1) }),
    ]
}

/// Starts and stops take as long as the events say, and end in any order.
struct World {
    kind: Kind,
    intensity: Intensity,
    core: Core,
    now: Duration,
    instances: BTreeMap<(String, Generation), Instance>,
    counted: Vec<Duration>,
    added: usize,
    done: bool,
}

impl World {
    fn feed(&mut self, input: Input) {
        let outputs = self.core.handle(self.now, input);
        assert!(!self.done || outputs.is_empty(), "{outputs:?} after the end");
        for output in outputs {
            self.check(output);
        }
    }

    fn check(&mut self, output: Output) {
        match output {
            Output::Start { id, generation } => {
                assert!(!self.lives(&id), "{id} started while an instance is there");
                if self.kind != Kind::OneForOne {
                    let before = self.core.children(self.now).into_iter();
                    for child in before.take_while(|child| child.id != id) {
                        let settled = matches!(child.state, ChildState::Up | ChildState::Down);
                        assert!(settled, "{id} started before {child:?} was up");
                    }
                }
                self.instances.insert((id, generation), Instance::Starting);
            }
            Output::CancelStart { id, generation } => {
                let was = self.instances.insert((id, generation), Instance::Cancelling);
                assert_eq!(was, Some(Instance::Starting));
            }
            Output::Stop { id, generation } => {
                let stopping = self.instances.values().filter(|i| **i == Instance::Stopping);
                assert_eq!(stopping.count(), 0, "two stops at once");
                let was = self.instances.insert((id, generation), Instance::Stopping);
                assert_eq!(was, Some(Instance::Up));
            }
            Output::Restarting { delay, .. } => {
                self.counted.push(self.now);
                let within = self.intensity.within;
                let recent = self.counted.iter().filter(|at| self.now - **at <= within).count();
                assert!(recent <= self.intensity.max as usize, "too many restarts");
                assert!(delay <= within / (self.intensity.max + 2), "the backoff hides failures");
            }
            Output::Removed { id } => assert!(!self.lives(&id)),
            Output::Exit(_) => {
                assert!(self.instances.is_empty(), "left behind: {:?}", self.instances);
                self.done = true;
            }
            Output::Admitted { .. } | Output::Ready => {}
        }
    }

    fn apply(&mut self, event: Event) {
        let ids: Vec<String> =
            self.core.children(self.now).into_iter().map(|child| child.id).collect();
        let pick = |index: usize| (!ids.is_empty()).then(|| ids[index % ids.len()].clone());
        match event {
            Event::Finish { pick, well } => self.finish(pick, well),
            Event::Crash { pick, how } => {
                let up: Vec<_> = self.of(&[Instance::Up]);
                if let Some((id, generation)) = (!up.is_empty()).then(|| &up[pick % up.len()]) {
                    self.instances.remove(&(id.clone(), *generation));
                    let exit = match how {
                        0 => Exit::Normal(None),
                        1 => Exit::Killed,
                        _ => Exit::Failed("crash".into()),
                    };
                    self.feed(Input::Exited { id: id.clone(), generation: *generation, exit });
                }
            }
            Event::Later(ms) => {
                self.now += millis(ms);
                self.feed(Input::Tick);
            }
            Event::Add(restart) => {
                self.added += 1;
                self.feed(Input::Add { id: format!("a{}", self.added), restart });
            }
            Event::Remove(index) => {
                pick(index).into_iter().for_each(|id| self.feed(Input::Remove { id }));
            }
            Event::Restart(index) => {
                pick(index).into_iter().for_each(|id| self.feed(Input::Restart { id }));
            }
            Event::Stop => self.feed(Input::Stop),
        }
    }

    /// One start or stop under way comes to its end. A cancelled start may still succeed.
    fn finish(&mut self, pick: usize, well: bool) {
        let busy = self.of(&[Instance::Starting, Instance::Cancelling, Instance::Stopping]);
        if busy.is_empty() {
            return;
        }
        let (id, generation) = busy[pick % busy.len()].clone();
        let key = (id.clone(), generation);
        if self.instances.remove(&key) == Some(Instance::Stopping) {
            self.feed(Input::Exited { id, generation, exit: Exit::Normal(None) });
        } else if well {
            self.instances.insert(key, Instance::Up);
            self.feed(Input::Started { id, generation });
        } else {
            self.feed(Input::StartFailed { id, generation, reason: "no".into() });
        }
    }

    fn lives(&self, id: &str) -> bool {
        self.instances.keys().any(|key| key.0 == id)
    }

    fn of(&self, which: &[Instance]) -> Vec<(String, Generation)> {
        let wanted = self.instances.iter().filter(|(_, instance)| which.contains(instance));
        wanted.map(|(key, _)| key.clone()).collect()
    }

    /// From here on everything works: it must come to rest, all up or all gone.
    fn settle(&mut self) {
        for _ in 0..1000 {
            if !self.of(&[Instance::Starting, Instance::Cancelling, Instance::Stopping]).is_empty()
            {
                self.finish(0, true);
            } else if let Some(at) = self.core.next_wake(self.now) {
                self.now = at;
                self.feed(Input::Tick);
            } else {
                return;
            }
        }
        panic!("it never comes to rest: {:?}", self.core);
    }
}

proptest! {
    #[test]
    fn holds_its_invariants_in_any_order_of_events(
        kind in kinds(),
        restarts in restarts(),
        max in 0u32..5,
        within in 20u64..200,
        seed in any::<u64>(),
        events in prop::collection::vec(events(), 0..80),
    ) {
        let intensity = Intensity { max, within: millis(within) };
        let backoff = Backoff { base: millis(3), max: millis(100), seed };
        let core = Core::new(kind, intensity, backoff, named(&restarts));
        let mut world = World {
            kind, intensity, core, now: Duration::ZERO, instances: BTreeMap::new(),
            counted: Vec::new(), added: 0, done: false,
        };
        world.feed(Input::Begin);
        for event in events {
            world.apply(event);
        }
        world.settle();
        if !world.done {
            for child in world.core.children(world.now) {
                let finished = child.state == ChildState::Down
                    && child.restart == Restart::Transient
                    && matches!(child.last_exit, Some(Exit::Normal(_)));
                prop_assert!(child.state == ChildState::Up || finished, "{child:?} is stuck");
            }
            world.feed(Input::Stop);
            world.settle();
        }
        prop_assert!(world.done, "it did not end: {:?}", world.core);
    }
}

#[test]
fn a_child_that_always_fails_crosses_the_intensity_despite_its_backoff() {
    for max in 0..6 {
        let intensity = Intensity { max, within: Duration::from_secs(1) };
        let backoff = Backoff { base: millis(500), max: Duration::from_secs(60), seed: 7 };
        let mut core = Core::new(Kind::OneForOne, intensity, backoff, named(&[Restart::Permanent]));
        let mut now = Duration::ZERO;
        let mut outputs = core.handle(now, Input::Begin);
        for _ in 0..=max {
            let Some(Output::Start { id, generation }) = outputs.pop() else {
                panic!("no start in {outputs:?}")
            };
            let reason = "broken".to_string();
            outputs = core.handle(now, Input::StartFailed { id, generation, reason });
            if let Some(at) = core.next_wake(now) {
                now = at;
                outputs = core.handle(now, Input::Tick);
            }
        }
        let escalated = matches!(&outputs[..], [Output::Exit(Verdict::Escalated { child, .. })] if child == "c0");
        assert!(escalated, "max {max}: {outputs:?}");
    }
}
