//! Every actor of a small cluster is killed at every message that it gets in a run of some forty
//! messages, one run each: every stream ends, once, with the right tokens.
//!
//! How many messages an actor gets is not written down here: its `nth` rises until a run says that
//! the fault never fired.

use dunlin_faults::fault::{Expect, Fault, Kind, Mode, Params, Target, Trigger};
use dunlin_faults::plan::Plan;
use dunlin_faults::record::{Record, What};
use dunlin_faults::resolved::Resolved;
use dunlin_faults::sim;
use dunlin_faults::verdict::{Outcome, judge};
use std::path::Path;
use std::sync::Mutex;

/// Those that tick get messages for as long as the run goes on.
const MOST: u64 = 200;

/// Actors by node and role; the last says whether its loss is masked. A router's is not: it takes
/// its open requests with it, and says so with a code.
const ACTORS: [(&str, &str, bool); 8] = [
    ("front", "placement", true),
    ("front", "router", false),
    ("left", "agent", true),
    ("left", "kv", true),
    ("left", "scheduler", true),
    ("left", "shard", true),
    ("right", "agent", true),
    ("right", "shard", true),
];

fn small() -> Resolved {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../plans/mutations/small.toml");
    let plan = Plan::read(&path).unwrap_or_else(|error| panic!("{error}"));
    plan.resolve(1, Mode::Sim).unwrap_or_else(|error| panic!("{error}"))
}

fn killed(node: &str, role: &str, masked: bool, nth: u64) -> Resolved {
    let mut plan = small();
    plan.name = format!("{role} on {node} dies at its message {nth}");
    plan.faults = vec![Fault {
        id: "kill".into(),
        kind: Kind::ActorPanic,
        target: Target::Actor { node: node.into(), role: role.into(), instance: String::new() },
        when: Trigger::At { us: 0 },
        lasts_us: None,
        times: 1,
        params: Params { nth: Some(nth), ..Params::default() },
        expect: if masked { Expect::Masked } else { Expect::Unavailable },
    }];
    plan
}

fn run(plan: &Resolved) -> Record {
    sim::run_resolved(plan).unwrap_or_else(|error| panic!("{}: {error}", plan.name))
}

/// What is wrong, if anything; `None` where the actor got no such message any more.
fn complaint(plan: &Resolved, masked: bool) -> Option<String> {
    let record = run(plan);
    let verdict = judge(plan, &record);
    if !verdict.unverified.is_empty() || !verdict.never_fired.is_empty() {
        return None;
    }
    if verdict.outcome != Outcome::Pass {
        let stuck = record.stuck.as_deref().unwrap_or_default();
        return Some(format!("{}: {}: {}\n{stuck}", plan.name, verdict.outcome, verdict.reason));
    }
    // What the invariants hold is said once more in plain words.
    for request in plan.requests.iter().filter(|_| masked) {
        let info = &record.requests[&request.number];
        let got: Vec<&String> = record
            .events
            .iter()
            .filter_map(|event| match &event.what {
                What::Token { request: number, id, .. } if *number == request.number => Some(id),
                _ => None,
            })
            .collect();
        let right: Vec<&String> = info.reference.iter().collect();
        if got != right || got.len() != request.max_tokens as usize {
            return Some(format!("{}: request {} got {got:?}", plan.name, request.number));
        }
    }
    Some(String::new())
}

#[test]
fn an_undisturbed_run_has_some_forty_messages() {
    let plan = small();
    let record = run(&plan);
    let verdict = judge(&plan, &record);
    assert_eq!(verdict.outcome, Outcome::Pass, "{}", verdict.reason);
    // A shard gets a message for each step, and one when its device is done.
    let steps = record.events.iter().filter(|event| {
        matches!(&event.what, What::Fact { name, .. } if name == dunlin_actors::facts::STEP_PLANNED)
    });
    let steps = steps.count();
    assert!((15..=45).contains(&steps), "{steps} steps");
}

#[test]
fn every_actor_may_die_at_every_message() {
    let next = Mutex::new(ACTORS.to_vec());
    let found = Mutex::new(Vec::new());
    let counts = Mutex::new(Vec::new());
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                loop {
                    let Some((node, role, masked)) = next.lock().expect("whole").pop() else {
                        return;
                    };
                    let mut hit = 0;
                    for nth in 1..=MOST {
                        match complaint(&killed(node, role, masked, nth), masked) {
                            None => break,
                            Some(words) if words.is_empty() => hit += 1,
                            Some(words) => found.lock().expect("whole").push(words),
                        }
                    }
                    counts.lock().expect("whole").push((format!("{role} on {node}"), hit));
                }
            });
        }
    });
    let found = found.into_inner().expect("whole");
    let counts = counts.into_inner().expect("whole");
    println!("killed at so many messages each: {counts:?}");
    assert!(found.is_empty(), "{} complaints:\n{}", found.len(), found.join("\n"));
    assert!(counts.iter().all(|(_, hit)| *hit > 0), "some actor was never hit: {counts:?}");
}
