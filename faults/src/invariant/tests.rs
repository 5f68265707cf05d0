//! A good run, and for each invariant a run that breaks it and nothing that it should not.

use super::*;
use crate::events::wanted;
use crate::fault::{Expect, Fault, Kind, Mode, Params, Target, Trigger};
use crate::plan::Plan;
use crate::record::{
    Event, FaultRun, NodeInfo, Phases, PlacedShard, Record, RequestInfo, Rest, What, gauges,
};
use crate::resolved::Resolved;
use dunlin_actors::facts;
use dunlin_runtime::faults::names;
use std::collections::BTreeMap;

const CLUSTER: &str = r#"
[cluster]
head = "front"
model = "m"
[node.front]
address = "127.0.0.1:7400"
http = "127.0.0.1:8080"
[node.a]
address = "127.0.0.1:7401"
devices = ["cpu"]
[node.b]
address = "127.0.0.1:7402"
devices = ["cpu"]
[[replica]]
name = "r0"
stages = ["a/cpu"]
[[replica]]
name = "r1"
stages = ["b/cpu"]
[kv]
block_tokens = 4
[engine]
kind = "hash"
"#;

const PLAN: &str = r#"
schema = "fault-plan/1"
name = "good"
modes = ["sim", "process"]
[cluster]
file = "c.toml"
[workload]
requests = 3
prompt_tokens = 8
output_tokens = 6
[phases]
warmup = "1s"
chaos = "9s"
settle = "5s"
[[fault]]
id = "kill"
kind = "process.kill"
target = { node = "a" }
when = { at = "2s" }
"#;

/// A run that can be broken.
pub(crate) struct Run {
    pub resolved: Resolved,
    pub record: Record,
}

impl Run {
    pub fn parts(self) -> (Resolved, Record) {
        (self.resolved, self.record)
    }

    pub fn push(&mut self, us: u64, what: What) {
        let at = self.record.events.partition_point(|event| event.us <= us);
        self.record.events.insert(at, Event { us, what });
    }

    pub fn fact(&mut self, us: u64, node: &str, name: &str, subject: &str, key: u64, value: u64) {
        let (node, name, subject) = (node.into(), name.into(), subject.into());
        self.push(us, What::Fact { node, name, subject, key, value });
    }

    fn gauge(&mut self, us: u64, node: &str, name: &str, value: f64) {
        self.push(us, What::Gauge { node: node.into(), name: name.into(), value });
    }

    fn node(&mut self, us: u64, node: &str, state: &str) {
        self.push(us, What::Node { node: node.into(), state: state.into() });
    }

    fn token(&mut self, us: u64, request: u64, position: u32, id: &str) {
        self.push(us, What::Token { request, position, id: id.into() });
    }

    fn end(&mut self, us: u64, request: u64, code: &str) {
        let (code, message) = (code.into(), String::new());
        self.push(us, What::Ended { request, code, message });
    }

    /// Removes what `of` accepts.
    pub fn drop_events(&mut self, of: impl Fn(&What) -> bool) {
        self.record.events.retain(|event| !of(&event.what));
    }

    /// Request `n` ends as `code` instead of well, before its last token.
    pub fn fail(&mut self, n: u64, code: &str) {
        self.drop_events(|what| matches!(what, What::Ended { request, .. } if *request == n));
        self.drop_events(
            |what| matches!(what, What::Token { request, position: 5, .. } if *request == n),
        );
        self.end(3_900_000, n, code);
    }

    fn rest(&mut self) -> &mut Rest {
        self.record.rest.as_mut().expect("a good run comes to rest")
    }

    pub fn fault(&mut self, id: &str, kind: Kind, began: u64, expect: Expect) {
        let fault = Fault {
            id: id.into(),
            kind,
            target: Target::Node("a".into()),
            when: Trigger::At { us: began },
            lasts_us: None,
            times: 1,
            params: Params::default(),
            expect,
        };
        self.resolved.faults.push(fault.clone());
        self.record.faults.push(FaultRun {
            fault,
            began_us: Some(began),
            ended_us: Some(began + 100_000),
            proof: Some("seen".into()),
            detected_us: None,
            touched: vec![],
        });
    }

    fn breaches(&self) -> Vec<Breach> {
        let case = Case::new(&self.resolved, &self.record);
        check_all(&case).into_iter().flat_map(|(_, breaches)| breaches).collect()
    }

    /// `INVARIANT/slug` of each breach, once.
    pub fn slugs(&self) -> Vec<String> {
        let mut slugs: Vec<String> = Vec::new();
        for breach in self.breaches() {
            let slug = format!("{}/{}", breach.invariant, breach.slug);
            if !slugs.contains(&slug) {
                slugs.push(slug);
            }
        }
        slugs
    }
}

/// Three requests of six tokens; node a is killed in the middle of the second, which is replayed
/// on b; a comes back.
pub(crate) fn good() -> Run {
    let plan = Plan::parse_with(PLAN, "p.toml", &|_| Ok(CLUSTER.into()));
    let plan = plan.unwrap_or_else(|e| panic!("{e}"));
    let resolved = plan.resolve(1, Mode::Sim).unwrap_or_else(|e| panic!("{e}"));
    let mut record = Record {
        plan: "good".into(),
        mode: Mode::Sim,
        seed: 1,
        repro: "dunlin faults run good.toml --seed 1".into(),
        env: BTreeMap::from([("model".into(), "m".into())]),
        nodes: vec![],
        phases: Phases { warmup_us: 1_000_000, chaos_us: 10_000_000, settle_us: 15_000_000 },
        requests: BTreeMap::new(),
        faults: vec![],
        events: vec![],
        outside: Default::default(),
        rest: None,
        stuck: None,
        trace_hash: Some("0".into()),
    };
    for (name, role) in [("front", "head"), ("a", "worker"), ("b", "worker")] {
        let devices = if role == "head" { vec![] } else { vec!["cpu".into()] };
        record.nodes.push(NodeInfo { name: name.into(), role: role.into(), devices });
    }
    let mut run = Run { resolved, record };
    for n in 0..3u64 {
        request(&mut run, n);
    }
    kill(&mut run);
    let views = |names: [&str; 2], incarnation: [u64; 2]| {
        names.map(String::from).into_iter().zip(incarnation).collect::<BTreeMap<String, u64>>()
    };
    run.record.rest = Some(Rest {
        blocks: BTreeMap::from([("r0".into(), (64, 64)), ("r1".into(), (64, 64))]),
        replicas_up: 2,
        replicas_wanted: 2,
        views: BTreeMap::from([
            ("front".into(), views(["a", "b"], [2, 1])),
            ("a".into(), views(["front", "b"], [1, 1])),
            ("b".into(), views(["front", "a"], [1, 2])),
        ]),
        probe_right: true,
        ..Rest::default()
    });
    run
}

/// Request `n` begins at n + 0.5 s and has a token each 200 ms.
fn request(run: &mut Run, n: u64) {
    let id = 100 + n;
    let begin = 500_000 + n * 1_000_000;
    let prompt = run.resolved.requests[n as usize].prompt.len();
    let reference: Vec<String> = (0..6).map(|at| (10 * n + at).to_string()).collect();
    run.push(begin, What::Submitted { request: n });
    run.push(begin + 1000, What::Accepted { request: n });
    run.fact(begin + 1000, "front", facts::REQUEST_ACCEPTED, "", id, prompt as u64);
    run.fact(begin + 2000, "a", facts::STEP_PLANNED, "r0", n + 1, 8);
    for (at, token) in reference.iter().enumerate() {
        let us = begin + 100_000 + at as u64 * 200_000;
        run.fact(us, "front", facts::TOKEN_LOGGED, "", id, at as u64);
        run.fact(us, "front", facts::TOKEN_DELIVERED, "", id, at as u64);
        run.token(us + 10, n, at as u32, token);
    }
    let end = begin + 1_300_000;
    run.fact(end, "front", facts::REQUEST_ENDED, "finished", id, 0);
    run.push(end, What::Served { request: n, model: "m".into(), served_by: vec!["a/cpu".into()] });
    run.end(end + 10, n, "finished");
    let info = RequestInfo {
        router_id: Some(id),
        tenant: run.resolved.requests[n as usize].tenant.clone(),
        prompt_tokens: prompt as u32,
        max_tokens: 6,
        cancels: false,
        deadline_us: 60_000_000,
        reference,
    };
    run.record.requests.insert(n, info);
}

fn kill(run: &mut Run) {
    let at = 2_000_000;
    run.node(at, "a", "down");
    run.fact(at + 1_000, "front", names::PEER_DOWN, "a", 1, 0);
    run.fact(at + 1_100, "front", facts::EPOCH_BUMPED, "r0", 2, 0);
    run.fact(at + 1_200, "front", facts::REPLICA_DOWN, "r0: node a is gone", 1, 0);
    run.fact(at + 1_300, "front", facts::REQUEST_REPLAYED, "node a is gone", 101, 10);
    run.node(at + 500_000, "a", "starting");
    run.node(at + 600_000, "a", "up");
    run.fact(at + 700_000, "front", names::PEER_UP, "a", 2, 0);
    run.fact(at + 800_000, "front", facts::REPLICA_UP, "r0", 2, 0);
    run.push(at + 800_000, placement(&[("a", 0, (0, 4))]));
    let fault = run.resolved.faults[0].clone();
    run.record.faults.push(FaultRun {
        fault,
        began_us: Some(at),
        ended_us: Some(at + 600_000),
        proof: Some("no process, exit by signal 9".into()),
        detected_us: Some(at + 1_000),
        touched: vec![1],
    });
}

fn placement(shards: &[(&str, usize, (u64, u64))]) -> What {
    let shard = |(node, stage, layers): &(&str, usize, (u64, u64))| PlacedShard {
        node: node.to_string(),
        device: "cpu".into(),
        stage: *stage,
        rank: 0,
        layers: *layers,
    };
    let shards = shards.iter().map(shard).collect();
    What::Placement { replica: "r0".into(), epoch: 2, shards }
}

#[test]
fn a_good_run_breaks_nothing() {
    assert_eq!(good().breaches(), []);
}

/// What is done to a good run, and the one breach that must come of it.
type Broken = (&'static str, fn(&mut Run));

const BROKEN: &[Broken] = &[
    ("I1/ended-twice", |run| run.end(5_000_000, 1, "finished")),
    ("I1/after-end", |run| {
        // A text that ends early and then goes on.
        run.drop_events(|w| matches!(w, What::Ended { request: 1, .. }));
        run.end(2_500_000, 1, "cancelled");
    }),
    ("I1/never-ended", |run| {
        run.drop_events(|w| matches!(w, What::Ended { request: 2, .. }));
        run.record.requests.get_mut(&2).unwrap().deadline_us = 0;
        run.resolved.invariants.progress_us = 60_000_000;
    }),
    ("I1/no-answer", |run| {
        run.record.requests.insert(7, RequestInfo::default());
        run.push(4_000_000, What::Submitted { request: 7 });
        run.resolved.invariants.progress_us = 60_000_000;
    }),
    ("I1/accepted-twice", |run| run.push(1_600_000, What::Accepted { request: 1 })),
    ("I1/router-ended-twice", |run| {
        run.fact(5_000_000, "front", facts::REQUEST_ENDED, "finished", 101, 0);
    }),
    ("I2/wrong-token", |run| run.record.requests.get_mut(&1).unwrap().reference[4] = "99".into()),
    ("I2/short", |run| run.record.requests.get_mut(&1).unwrap().reference.push("16".into())),
    ("I3/gap", |run| {
        let third = |w: &What| matches!(w, What::Token { request: 1, position: 3, .. });
        run.drop_events(third);
        run.drop_events(|w| matches!(w, What::Ended { request: 1, .. }));
        run.end(2_900_000, 1, "cancelled");
    }),
    ("I3/repeated", |run| run.token(2_300_000, 1, 2, "12")),
    ("I3/router-order", |run| {
        run.fact(2_300_000, "front", facts::TOKEN_DELIVERED, "", 101, 1);
    }),
    ("I4/not-logged", |run| {
        run.drop_events(|w| {
            matches!(w, What::Fact { name, key: 101, value: 3, .. } if name == facts::TOKEN_LOGGED)
        });
        // Logged after it was delivered.
        run.fact(5_000_000, "front", facts::TOKEN_LOGGED, "", 101, 3);
    }),
    ("I4/client-ahead", |run| {
        run.drop_events(|w| {
            matches!(w, What::Fact { name, key: 101, value: 5, .. }
                if name == facts::TOKEN_LOGGED || name == facts::TOKEN_DELIVERED)
        });
    }),
    ("I5/no-commit", |run| run.fact(3_000_000, "a", wanted::DRAFT_VERIFIED, "r0", 101, 0)),
    ("I6/wrong-token", |run| {
        run.resolved.requests[1].temperature = 0.8;
        run.record.requests.get_mut(&1).unwrap().reference[4] = "99".into();
    }),
    ("I7/blocks", |run| {
        run.rest().blocks.insert("r0".into(), (63, 64));
    }),
    ("I7/audit", |run| {
        run.fact(3_000_000, "a", facts::AUDIT_FAILED, "block 3 has no holder", 0, 0)
    }),
    ("I7/audit", |run| run.rest().audits.push("r0: block 3".into())),
    ("I8/live-blocks", |run| run.rest().live_blocks = 1),
    ("I8/open-requests", |run| run.rest().open_requests = 1),
    ("I8/queued", |run| {
        run.rest().queued.insert("a/flow".into(), 3);
    }),
    ("I9/over-reserved", |run| {
        run.gauge(3_000_000, "a", gauges::MEMORY_RESERVED, 100.0);
        run.gauge(3_000_001, "a", gauges::MEMORY_USED, 101.0);
    }),
    ("I9/over-free", |run| {
        run.fact(3_000_000, "a", facts::MEMORY_RESERVED, "r0/0/0", 100, 100);
        run.fact(3_000_001, "a", facts::MEMORY_RESERVED, "r0/0/0", 101, 100);
    }),
    ("I10/mismatch", |run| run.fact(3_000_000, "a", wanted::KV_MISMATCH, "block 3", 101, 0)),
    ("I10/unnoticed", |run| run.fault("swap", Kind::KvSwap, 3_000_000, Expect::Refused)),
    ("I11/foreign-hit", |run| {
        // The same prompt as request 0, by another tenant.
        run.resolved.requests[1].prompt = run.resolved.requests[0].prompt.clone();
        run.record.requests.get_mut(&1).unwrap().tenant = "other".into();
        run.fact(1_510_000, "a", facts::PREFIX_HIT, "r0", 101, 8);
    }),
    ("I12/not-head", |run| run.fact(3_000_000, "b", facts::EPOCH_BUMPED, "r9", 9, 0)),
    ("I12/epoch-fell", |run| run.fact(3_000_000, "front", facts::EPOCH_BUMPED, "r0", 2, 0)),
    ("I13/went-back", |run| run.fact(3_000_000, "front", names::PEER_UP, "a", 1, 0)),
    ("I13/reused", |run| {
        run.node(5_000_000, "a", "starting");
        run.fact(5_200_000, "front", names::PEER_UP, "a", 2, 0);
    }),
    ("I14/layers", |run| run.push(3_000_000, placement(&[("a", 0, (0, 2)), ("b", 1, (3, 4))]))),
    ("I14/layers", |run| run.push(3_000_000, placement(&[]))),
    ("I14/dead-node", |run| {
        run.node(3_000_000, "a", "down");
        run.push(9_000_000, placement(&[("a", 0, (0, 4))]));
    }),
    ("I15/not-escalated", |run| {
        run.resolved.invariants.restart_max = 3;
        for at in 0..4 {
            let us = 3_000_000 + at * 1000;
            run.fact(us, "a", names::ACTOR_RESTARTED, "node/replica r0", at, 0);
        }
    }),
    ("I15/not-escalated", |run| {
        run.resolved.invariants.restart_max = 2;
        // One start is in the good run already.
        for at in 0..3 {
            run.node(4_000_000 + at * 1000, "a", "starting");
        }
    }),
    ("I16/recomputed", |run| {
        run.fact(2_350_000, "front", facts::REQUEST_REPLAYED, "again", 101, 30);
    }),
    ("I16/replays", |run| {
        for at in 0..3 {
            run.fact(2_350_000 + at, "front", facts::REQUEST_REPLAYED, "again", 101, 8);
        }
    }),
    ("I17/over-limit", |run| {
        run.gauge(3_000_000, "a", "limit.mailbox", 10.0);
        run.gauge(3_000_001, "a", "queue.mailbox", 11.0);
    }),
    ("I18/died", |run| run.node(5_000_000, "b", "down")),
    ("I18/stale-taken", |run| {
        let drawn = "epoch 1 attempt 1";
        run.fact(2_350_000, "front", facts::TOKEN_LOGGED, drawn, 101, 6);
        run.fact(2_350_001, "front", facts::REQUEST_REPLAYED, "again", 101, 8);
        run.fact(2_350_002, "front", facts::TOKEN_LOGGED, drawn, 101, 7);
    }),
    ("I18/taken", |run| run.fault("flip", Kind::FrameCorrupt, 9_000_000, Expect::Refused)),
    ("I19/other-weights", |run| {
        run.fact(1_000, "a", wanted::WEIGHTS_LOADED, "r0/0/0", 7, 30);
        run.fact(3_000_000, "a", wanted::WEIGHTS_LOADED, "r0/0/0", 8, 30);
    }),
    ("I19/taken", |run| {
        run.fault("flip", Kind::BitsWeight, 3_000_000, Expect::Refused);
        let proof = "node a: device cpu: loading stage 0: weight of layer 3: 0 before, 8 after";
        run.record.faults[1].proof = Some(proof.into());
    }),
    ("I17/over-limit", |run| {
        // Three open at once, where two are allowed.
        run.resolved.cluster.set.push(("limits.max_open_requests".into(), "2".into()));
        for key in 200..203 {
            run.fact(3_000_000, "front", facts::REQUEST_ACCEPTED, "", key, 8);
        }
    }),
    ("I20/other-model", |run| {
        run.record.env.insert("model".into(), "another".into());
    }),
    ("I20/nan-sampled", |run| run.fault("nan", Kind::LogitsNan, 3_000_000, Expect::FailedOnce)),
    ("I22/decision", |run| {
        run.record.faults.clear();
        run.resolved.faults.clear();
        run.drop_events(|w| matches!(w, What::Node { .. }));
        run.drop_events(|w| matches!(w, What::Fact { name, .. } if name == names::PEER_UP));
        run.fault("jump", Kind::ClockJump, 1_900_000, Expect::Masked);
    }),
    ("I23/late", |run| {
        run.record.requests.get_mut(&1).unwrap().deadline_us = 1_000_000;
        run.resolved.invariants.grace_us = 100_000;
    }),
    ("L1/stalled", |run| {
        run.drop_events(|w| matches!(w, What::Ended { request: 2, .. }));
        run.end(14_000_000, 2, "finished");
        run.resolved.invariants.progress_us = 3_000_000;
    }),
    ("L2/views", |run| {
        run.rest().views.get_mut("b").unwrap().insert("a".into(), 1);
    }),
    ("L2/missing", |run| {
        run.rest().views.get_mut("b").unwrap().remove("a");
    }),
    ("L3/replicas", |run| run.rest().replicas_up = 1),
    ("L4/probe", |run| run.rest().probe_right = false),
    ("L5/cold", |run| {
        run.fact(600_000, "a", facts::PREFIX_HIT, "r0", 100, 4);
        let first = run.resolved.requests[0].clone();
        let own = good().record.requests[&0].clone();
        for n in 10..18 {
            run.resolved.requests.push(crate::resolved::RequestSpec { number: n, ..first.clone() });
            let us = 11_000_000 + n;
            run.push(us, What::Submitted { request: n });
            run.push(us, What::Accepted { request: n });
            for (at, id) in own.reference.iter().enumerate() {
                run.token(us, n, at as u32, id);
            }
            run.end(us, n, "finished");
            run.record.requests.insert(n, RequestInfo { router_id: None, ..own.clone() });
        }
    }),
    ("L6/stuck", |run| run.record.stuck = Some("r0 waits for a".into())),
    ("E2/gave-up", |run| {
        run.resolved.invariants.on.insert("E2".into());
        run.record.faults[0].fault.kind = Kind::LinkDelay;
    }),
    ("E1/failed", |run| run.fail(1, "internal_error")),
    ("E1/refused", |run| {
        run.record
            .requests
            .insert(7, RequestInfo { reference: vec!["1".into()], ..Default::default() });
        run.push(2_100_000, What::Submitted { request: 7 });
        run.push(2_200_000, What::Refused { request: 7, code: "not_ready".into() });
    }),
];

#[test]
fn each_broken_run_breaks_what_it_must() {
    for (index, (wanted, break_it)) in BROKEN.iter().enumerate() {
        let mut run = good();
        break_it(&mut run);
        let found = run.slugs();
        assert!(found.iter().any(|slug| slug == wanted), "case {index}: {wanted} not in {found:?}");
    }
}

/// Most breaks are one breach of one invariant: a checker that fires along with another tells nothing.
#[test]
fn few_breaks_are_seen_by_two_checkers() {
    let mut alone = 0;
    for (_, break_it) in BROKEN {
        let mut run = good();
        break_it(&mut run);
        alone += usize::from(run.slugs().len() == 1);
    }
    assert!(alone * 4 >= BROKEN.len() * 3, "{alone} of {}", BROKEN.len());
}

#[test]
fn every_invariant_has_a_run_that_breaks_it() {
    let containment = ["I21"];
    for invariant in &ALL {
        let prefix = format!("{}/", invariant.id);
        let broken = BROKEN.iter().any(|(slug, _)| slug.starts_with(&prefix));
        assert!(broken || containment.contains(&invariant.id), "{} is never broken", invariant.id);
        assert!(find(invariant.id).is_some() && find(invariant.name).is_some());
    }
}

#[test]
fn i11_a_hit_of_its_own_tenant_or_of_itself_is_none() {
    let hit = |same: bool, replayed: bool| {
        let mut run = good();
        run.resolved.requests[1].prompt = run.resolved.requests[0].prompt.clone();
        if !same {
            run.record.requests.get_mut(&1).unwrap().tenant = "other".into();
        }
        // Request 101 is replayed at 2.0 s.
        let us = if replayed { 2_010_000 } else { 1_510_000 };
        run.fact(us, "a", facts::PREFIX_HIT, "r0", 101, 8);
        run.slugs()
    };
    assert!(hit(true, false).is_empty() && hit(false, true).is_empty());
    assert_eq!(hit(false, false), ["I11/foreign-hit"]);
}

#[test]
fn i21_a_bystander_must_not_fail() {
    let mut run = good();
    run.record.faults[0].began_us = Some(9_000_000);
    run.record.faults[0].ended_us = Some(9_100_000);
    run.record.faults[0].touched.clear();
    run.fail(1, "internal_error");
    assert!(run.slugs().contains(&"I21/bystander".to_string()), "{:?}", run.slugs());
    run.record.faults[0].touched = vec![1];
    assert!(!run.slugs().contains(&"I21/bystander".to_string()));
}

#[test]
fn expectations_allow_what_they_say() {
    let with = |expect: Expect, times: u32, fails: &[u64]| {
        let mut run = good();
        let fault = &mut run.record.faults[0].fault;
        (fault.expect, fault.times) = (expect, times);
        run.record.faults[0].touched = vec![1, 2];
        for n in fails {
            run.fail(*n, "internal_error");
        }
        run.slugs()
    };
    assert_eq!(with(Expect::Masked, 1, &[1]), ["E1/failed"]);
    assert_eq!(with(Expect::Retried, 1, &[1]), ["E1/failed"]);
    assert!(with(Expect::FailedOnce, 1, &[1]).is_empty());
    assert_eq!(with(Expect::FailedOnce, 1, &[1, 2]), ["E1/failed"], "one firing, one failure");
    assert!(with(Expect::FailedOnce, 2, &[1, 2]).is_empty());
    assert!(with(Expect::Unavailable, 1, &[1, 2]).is_empty());
}

#[test]
fn measured_faults_may_change_tokens_and_nothing_else() {
    let mut run = good();
    run.record.faults[0].fault.expect = Expect::Measure;
    run.record.requests.get_mut(&1).unwrap().reference[4] = "99".into();
    assert!(run.slugs().is_empty(), "{:?}", run.slugs());
    run.rest().live_blocks = 2;
    assert_eq!(run.slugs(), ["I8/live-blocks"]);
    // What ended before it is not excused.
    run.record.requests.get_mut(&0).unwrap().reference[4] = "99".into();
    assert!(run.slugs().contains(&"I2/wrong-token".to_string()));
}

#[test]
fn in_process_mode_pieces_of_text_may_be_merged() {
    let mut run = good();
    run.record.mode = Mode::Process;
    let info = run.record.requests.get_mut(&1).unwrap();
    info.reference = vec!["101112".into(), "13".into(), "1415".into()];
    assert!(run.slugs().is_empty(), "{:?}", run.slugs());
    run.record.requests.get_mut(&1).unwrap().reference[2] = "1416".into();
    assert_eq!(run.slugs(), ["I2/wrong-token"]);
}

#[test]
fn what_is_off_is_not_checked() {
    let mut run = good();
    run.record.stuck = Some("x".into());
    run.resolved.invariants.off.insert("L6".into());
    assert!(run.slugs().is_empty());
}

#[test]
fn the_clock_changes_no_trace() {
    let (a, b) = (good().record, good().record);
    assert!(same_without_clock(&a, &b).is_ok());
    let b = Record { trace_hash: Some("1".into()), ..b };
    assert!(same_without_clock(&a, &b).is_err());
    assert!(same_without_clock(&a, &Record { trace_hash: None, ..b }).is_err());
}
