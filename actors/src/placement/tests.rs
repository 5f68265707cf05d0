//! Placement's promises: epochs only rise, nothing is put on an absent node, every `Up` is
//! taken back before the next one, and what can be placed is placed in the end.

use super::core::{Input, Intensity, Output, Placement, Replan};
use super::planner::{PlanError, PlanLimits, ReplicaWant, plan, plan_by_itself};
use crate::engines::{BuildError, Engines, ModelShape};
use crate::messages::*;
use dunlin_model::engine::{Engine, StageSpec};
use dunlin_runtime::{Incarnation, NodeName, Peer};
use proptest::prelude::*;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

struct Shape;

impl ModelShape for Shape {
    fn name(&self) -> &str {
        "toy"
    }
    fn layers(&self) -> usize {
        6
    }
    fn context(&self) -> usize {
        1024
    }
    fn split_layers(&self, weights: &[f32]) -> Vec<usize> {
        let mut counts = vec![6 / weights.len(); weights.len()];
        counts[0] += 6 % weights.len();
        counts
    }
    fn check_ranks(&self, ranks: usize) -> Result<(), String> {
        if ranks <= 3 { Ok(()) } else { Err(format!("3 KV heads for {ranks} ranks")) }
    }
    fn stage_bytes(&self, spec: &StageSpec) -> u64 {
        100 * spec.layers.len() as u64
    }
    fn kv_block_bytes(&self, spec: &StageSpec) -> u64 {
        spec.layers.len() as u64
    }
    fn cache_namespace(&self) -> [u8; 16] {
        [0; 16]
    }
}

struct Toy;

impl Engines for Toy {
    fn describe(&self) -> NodeDescription {
        description(1000)
    }
    fn shape(&self) -> &dyn ModelShape {
        &Shape
    }
    fn build(&self, _: &str, _: &StageSpec) -> Result<Box<dyn Engine>, BuildError> {
        Err(BuildError::Other("placement builds no engine".into()))
    }
}

fn name(n: &str) -> NodeName {
    n.parse().expect("a good name")
}

fn description(free_bytes: u64) -> NodeDescription {
    let device = DeviceDescription {
        id: "cpu".into(),
        description: "toy".into(),
        total_bytes: free_bytes,
        free_bytes,
    };
    NodeDescription { devices: vec![device], model_hash: "h".into(), version: "0".into() }
}

fn want(replica: &str, stages: &[&[&str]]) -> ReplicaWant {
    let place = |n: &&str| (name(n), "cpu".to_string());
    ReplicaWant {
        name: replica.into(),
        stages: stages.iter().map(|s| s.iter().map(place).collect()).collect(),
        layers: None,
    }
}

const LIMITS: PlanLimits = PlanLimits { block_tokens: 16, kv_bytes: 300, step_tokens: 64 };
const INTENSITY: Intensity =
    Intensity { max: 3, within: Duration::from_secs(60), rest: Duration::from_secs(10) };
const REPLAN: Replan =
    Replan { after: Duration::from_secs(5), back_after: Duration::from_secs(10) };

fn placement(wants: Vec<ReplicaWant>) -> Placement {
    let expected = ["a", "b", "c"].iter().map(|n| name(n)).collect();
    Placement::new(Arc::new(Toy), wants, expected, LIMITS, (INTENSITY, REPLAN), 1)
}

fn nodes(free: &[(&str, u64)]) -> BTreeMap<NodeName, NodeDescription> {
    free.iter().map(|(n, bytes)| (name(n), description(*bytes))).collect()
}

fn peer(n: &str, incarnation: u64) -> Peer {
    Peer { node: name(n), incarnation: Incarnation(incarnation) }
}

#[test]
fn a_pipeline_covers_each_layer_once_and_shares_the_tightest_block_count() {
    let want = want("r0", &[&["a"], &["b"], &["c", "c"]]);
    let all = nodes(&[("a", 1000), ("b", 1000), ("c", 1000)]);
    let plan = plan(&want, ReplicaEpoch(1), &all, &Shape, &LIMITS).expect("fits");
    let layers: Vec<_> = plan.shards.iter().map(|s| s.spec.layers.clone()).collect();
    assert_eq!(layers, [0..2, 2..4, 4..6, 4..6]);
    // Node c holds two ranks of two layers on one device, so half of its KV bytes each.
    assert!(plan.shards.iter().all(|s| s.spec.kv_blocks == 300 / 2 / 2));
    assert_eq!(plan.shards[3].spec.rank, 1);
}

#[test]
fn what_does_not_fit_names_node_need_have_and_the_mend() {
    let all = nodes(&[("a", 700)]);
    let error = plan(&want("r0", &[&["a"]]), ReplicaEpoch(1), &all, &Shape, &LIMITS).unwrap_err();
    assert_eq!(
        error.to_string(),
        "[[replica]] r0 does not fit: a/cpu needs 900 bytes (weights 600, KV 300) and has 700; \
         set [kv] memory to at most 100 bytes"
    );
    let all = nodes(&[("a", 500)]);
    let error = plan(&want("r0", &[&["a"]]), ReplicaEpoch(1), &all, &Shape, &LIMITS).unwrap_err();
    assert!(error.to_string().contains("add a stage on another device"), "{error}");
}

#[test]
fn wrong_layers_ranks_devices_and_models_are_refused() {
    let all = nodes(&[("a", 1000), ("b", 1000)]);
    let try_plan = |w: &ReplicaWant, n: &BTreeMap<_, _>| {
        plan(w, ReplicaEpoch(1), n, &Shape, &LIMITS).unwrap_err()
    };
    let mut w = want("r0", &[&["a"], &["b"]]);
    w.layers = Some(vec![4, 4]);
    assert!(matches!(try_plan(&w, &all), PlanError::Layers { sum: 8, have: 6, .. }));
    let w = want("r0", &[&["a", "a", "b", "b"]]);
    assert!(matches!(try_plan(&w, &all), PlanError::Ranks { ranks: 4, .. }));
    let mut w = want("r0", &[&["a"]]);
    w.stages[0][0].1 = "cuda:0".into();
    assert!(matches!(try_plan(&w, &all), PlanError::NoDevice { .. }));
    let mut differing = all.clone();
    differing.get_mut(&name("b")).unwrap().model_hash = "other".into();
    assert!(matches!(
        try_plan(&want("r0", &[&["a"], &["b"]]), &differing),
        PlanError::ModelDiffers { .. }
    ));
}

#[test]
fn without_a_replica_section_the_planner_replicates_or_pipelines() {
    let roomy = nodes(&[("a", 1000), ("b", 1000)]);
    let (wants, _) = plan_by_itself(&roomy, &Shape, &LIMITS);
    assert_eq!(wants.len(), 2);
    let tight = nodes(&[("a", 650), ("b", 650)]);
    let (wants, why) = plan_by_itself(&tight, &Shape, &LIMITS);
    assert_eq!(wants.len(), 1);
    assert_eq!(wants[0].stages.len(), 2);
    assert!(why.contains("pipeline"), "{why}");
}

#[test]
fn a_replica_that_keeps_breaking_rests() {
    let mut core = placement(vec![want("r0", &[&["a"]])]);
    let up =
        Input::NodeUp { peer: peer("a", 1), description: description(1000), hosted: Vec::new() };
    let mut outputs = core.handle(Duration::ZERO, up);
    for second in 0..=INTENSITY.max as u64 {
        let [Output::Load { plan, .. }] = &outputs[outputs.len() - 1..] else {
            panic!("expected a load, got {outputs:?}");
        };
        let (replica, epoch) = ("r0".to_string(), plan.epoch);
        let (reason, suspects) = ("panic".to_string(), vec![]);
        let broken = Input::Broken { replica, epoch, reason, suspects };
        outputs = core.handle(Duration::from_secs(second), broken);
    }
    assert_eq!(core.states(Duration::from_secs(4))[0].state, "resting");
    assert!(core.handle(Duration::from_secs(5), Input::Tick).is_empty());
    let again = core.handle(Duration::from_secs(20), Input::Tick);
    assert!(matches!(again[..], [Output::Load { .. }]), "{again:?}");
}

fn up(n: &str, incarnation: u64, free: u64) -> Input {
    Input::NodeUp { peer: peer(n, incarnation), description: description(free), hosted: Vec::new() }
}

fn down(n: &str, incarnation: u64) -> Input {
    Input::NodeDown { peer: peer(n, incarnation), reason: "killed".into() }
}

/// Answers every load and lead of `outputs` well, and what those bring; returns the last outputs.
fn obey(core: &mut Placement, now: Duration, mut outputs: Vec<Output>) -> Vec<Output> {
    let mut all = outputs.clone();
    loop {
        let mut next = Vec::new();
        for output in &outputs {
            let answer = match output {
                Output::Load { node, plan } => Input::Loaded {
                    replica: plan.replica.clone(),
                    epoch: plan.epoch,
                    node: node.clone(),
                    result: Ok(()),
                },
                Output::Lead { plan, .. } => Input::Leading {
                    replica: plan.replica.clone(),
                    epoch: plan.epoch,
                    result: Ok(info(plan)),
                },
                _ => continue,
            };
            next.extend(core.handle(now, answer));
        }
        if next.is_empty() {
            return all;
        }
        all.extend(next.clone());
        outputs = next;
    }
}

fn shards_of(core: &Placement, replica: &str) -> (String, Vec<String>) {
    let states = core.states(Duration::ZERO);
    let state = states.into_iter().find(|s| s.replica == replica).expect("a known replica");
    (state.state, state.shards)
}

#[test]
fn a_lost_nodes_layers_go_to_a_survivor_and_back() {
    let second = Duration::from_secs;
    let mut core = placement(vec![want("r0", &[&["a"], &["b"]])]);
    core.handle(second(0), up("a", 1, 2000));
    let outputs = core.handle(second(0), up("b", 1, 2000));
    obey(&mut core, second(0), outputs);
    core.handle(second(10), down("b", 1));
    // It may be about to come back.
    let outputs = core.handle(second(14), Input::Tick);
    assert!(outputs.is_empty(), "{outputs:?}");
    let (state, shards) = shards_of(&core, "r0");
    assert_eq!((state.as_str(), shards.len()), ("waiting", 2));
    let outputs = core.handle(second(15), Input::Tick);
    assert!(
        outputs.iter().any(|o| matches!(o, Output::Note(text) if text.contains("onto a/cpu: it waits for node 'b'"))),
        "{outputs:?}"
    );
    let all = obey(&mut core, second(15), outputs);
    assert!(all.iter().any(|o| matches!(o, Output::Up(_))), "{all:?}");
    assert_eq!(shards_of(&core, "r0"), ("ready".into(), vec!["a/cpu".into(), "a/cpu".into()]));
    // Back, but perhaps not for long.
    let outputs = core.handle(second(20), up("b", 2, 2000));
    assert!(outputs.is_empty(), "{outputs:?}");
    assert!(core.handle(second(29), Input::Tick).is_empty());
    let outputs = core.handle(second(30), Input::Tick);
    assert!(outputs.iter().any(|o| matches!(o, Output::Down { .. })), "{outputs:?}");
    obey(&mut core, second(30), outputs);
    assert_eq!(shards_of(&core, "r0"), ("ready".into(), vec!["a/cpu".into(), "b/cpu".into()]));
}

#[test]
fn a_survivor_that_cannot_hold_the_layers_is_not_asked_and_the_reason_says_so() {
    let mut core = placement(vec![want("r0", &[&["a"], &["b"]])]);
    core.handle(Duration::ZERO, up("a", 1, 600));
    let outputs = core.handle(Duration::ZERO, up("b", 1, 600));
    obey(&mut core, Duration::ZERO, outputs);
    core.handle(Duration::from_secs(1), down("b", 1));
    core.handle(Duration::from_secs(7), Input::Tick);
    let states = core.states(Duration::from_secs(7));
    let reason = &states[0].reason;
    assert_eq!(states[0].state, "waiting");
    assert!(
        reason.contains("waits for node 'b'; no survivor has 300 bytes for stage 1"),
        "{reason}"
    );
}

#[test]
fn only_the_last_replica_moves_onto_a_device_in_use_but_any_takes_an_idle_one() {
    let second = Duration::from_secs;
    let started = |spare: bool| {
        let mut core = placement(vec![want("r0", &[&["a"]]), want("r1", &[&["b"]])]);
        for (n, wanted) in [("a", true), ("b", true), ("c", spare)] {
            if wanted {
                let outputs = core.handle(second(0), up(n, 1, 5000));
                obey(&mut core, second(0), outputs);
            }
        }
        core
    };
    let mut core = started(false);
    core.handle(second(1), down("b", 1));
    assert!(core.handle(second(9), Input::Tick).is_empty());
    assert!(core.states(second(9))[1].reason.contains("no other device is idle"));
    let mut core = started(true);
    core.handle(second(1), down("b", 1));
    let outputs = core.handle(second(9), Input::Tick);
    obey(&mut core, second(9), outputs);
    assert_eq!(shards_of(&core, "r1"), ("ready".into(), vec!["c/cpu".into()]));
}

#[test]
fn a_stand_in_makes_room_for_the_replica_that_belongs_there() {
    let second = Duration::from_secs;
    let mut core = placement(vec![want("r0", &[&["a"]]), want("r1", &[&["b"]])]);
    for n in ["a", "b"] {
        let outputs = core.handle(second(0), up(n, 1, 1000));
        obey(&mut core, second(0), outputs);
    }
    core.handle(second(1), down("a", 1));
    core.handle(second(1), down("b", 1));
    let outputs = core.handle(second(2), up("a", 2, 1000));
    // r0 is placed on a at once, and r1 must not be squeezed in beside it: 900 of 1000 are used.
    obey(&mut core, second(2), outputs);
    core.handle(second(9), Input::Tick);
    assert_eq!(shards_of(&core, "r1").0, "waiting");
    core.handle(second(10), down("a", 2));
    // Now r0 is away, and its device with it; c takes r0 in, until b's owner returns.
    let outputs = core.handle(second(20), up("c", 1, 1000));
    obey(&mut core, second(20), outputs);
    assert_eq!(shards_of(&core, "r0"), ("ready".into(), vec!["c/cpu".into()]));
    assert_eq!(shards_of(&core, "r1").0, "waiting");
}

#[test]
fn a_later_life_takes_over_what_runs_whole_and_places_the_rest_anew() {
    let mut first = placement(vec![want("r0", &[&["a"], &["b"]]), want("r1", &[&["c"]])]);
    let mut plans = BTreeMap::new();
    for n in ["a", "b", "c"] {
        let outputs = first.handle(Duration::ZERO, up(n, 1, 2000));
        for output in obey(&mut first, Duration::ZERO, outputs) {
            if let Output::Load { node, plan } = output {
                plans.insert(node, plan);
            }
        }
    }
    let second = || {
        let expected = ["a", "b", "c"].iter().map(|n| name(n)).collect();
        let wants = vec![want("r0", &[&["a"], &["b"]]), want("r1", &[&["c"]])];
        let how = (INTENSITY, REPLAN);
        Placement::new(Arc::new(Toy), wants, expected, LIMITS, how, 1000).adopting()
    };
    let hosting = |n: &str, plans: Vec<ReplicaPlan>| Input::NodeUp {
        peer: peer(n, 1),
        description: description(2000),
        hosted: plans,
    };
    let (r0, r1) = (plans[&name("a")].clone(), plans[&name("c")].clone());
    let mut core = second();
    let mut outputs = Vec::new();
    for (n, plan) in [("a", &r0), ("b", &r0), ("c", &r1)] {
        let first = core.handle(Duration::ZERO, hosting(n, vec![plan.clone()]));
        outputs.extend(obey(&mut core, Duration::ZERO, first));
    }
    assert!(!outputs.iter().any(|o| matches!(o, Output::Load { .. })), "{outputs:?}");
    let ups = outputs.iter().filter_map(|o| match o {
        Output::Up(info) => Some(info.epoch),
        _ => None,
    });
    assert_eq!(ups.collect::<Vec<_>>(), [r0.epoch, r1.epoch]);

    // b has lost its part: the replica is placed anew, under a higher epoch than it ever had.
    let mut core = second();
    core.handle(Duration::ZERO, hosting("a", vec![r0.clone()]));
    let outputs = core.handle(Duration::ZERO, hosting("b", Vec::new()));
    let loads =
        outputs.iter().filter(|o| matches!(o, Output::Load { plan, .. } if plan.epoch.0 > 1000));
    assert_eq!(loads.count(), 2, "{outputs:?}");
    // The router is new, too: nobody knows the work that runs.
    let mut core = second();
    core.handle(Duration::ZERO, Input::RouterRestarted);
    let outputs = core.handle(Duration::ZERO, hosting("c", vec![r1]));
    assert!(matches!(outputs[..], [Output::Load { .. }]), "{outputs:?}");
}

#[derive(Debug, Clone)]
enum Op {
    Up(usize),
    Down(usize),
    Answer(usize, bool),
    Break(usize),
    Wait(u64),
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        3 => (0..3usize).prop_map(Op::Up),
        2 => (0..3usize).prop_map(Op::Down),
        6 => (0..8usize, prop::bool::weighted(0.9)).prop_map(|(i, ok)| Op::Answer(i, ok)),
        1 => (0..2usize).prop_map(Op::Break),
        1 => (1..20u64).prop_map(Op::Wait),
    ]
}

/// Drives a placement and checks every output against a plain model of what was said before.
struct Driver {
    core: Placement,
    now: Duration,
    incarnations: BTreeMap<NodeName, u64>,
    present: BTreeSet<NodeName>,
    /// Loads and leads that were asked for and not answered.
    asked: Vec<Output>,
    up: BTreeMap<String, ReplicaEpoch>,
    highest: BTreeMap<String, ReplicaEpoch>,
}

impl Driver {
    fn feed(&mut self, input: Input) {
        for output in self.core.handle(self.now, input) {
            match &output {
                Output::Load { node, plan } => {
                    assert!(self.present.contains(node), "load on absent {node}");
                    let highest = self.highest.entry(plan.replica.clone()).or_insert(plan.epoch);
                    assert!(*highest <= plan.epoch, "epoch went back");
                    *highest = plan.epoch;
                    self.asked.push(output);
                }
                Output::Lead { node, .. } => {
                    assert!(self.present.contains(node), "lead on absent {node}");
                    self.asked.push(output);
                }
                Output::Up(info) => {
                    assert_eq!(self.highest.get(&info.replica), Some(&info.epoch));
                    let before = self.up.insert(info.replica.clone(), info.epoch);
                    assert_eq!(before, None, "up twice without a down");
                }
                Output::Down { replica, epoch, .. } => {
                    if let Some(up) = self.up.remove(replica) {
                        assert_eq!(up, *epoch);
                    }
                }
                Output::Retire { .. } | Output::Draining { .. } | Output::Note(_) => {}
                Output::Impossible(text) => panic!("nothing here is impossible: {text}"),
            }
        }
    }

    fn answer(&mut self, index: usize, ok: bool) {
        if self.asked.is_empty() {
            return;
        }
        match self.asked.remove(index % self.asked.len()) {
            Output::Load { node, plan } => {
                let result = if ok { Ok(()) } else { Err("no".into()) };
                let (replica, epoch) = (plan.replica, plan.epoch);
                self.feed(Input::Loaded { replica, epoch, node, result });
            }
            Output::Lead { plan, .. } => {
                let (replica, epoch) = (plan.replica.clone(), plan.epoch);
                let result = if ok { Ok(info(&plan)) } else { Err("no".into()) };
                self.feed(Input::Leading { replica, epoch, result });
            }
            other => panic!("never asked: {other:?}"),
        }
    }
}

fn info(plan: &ReplicaPlan) -> ReplicaInfo {
    ReplicaInfo {
        replica: plan.replica.clone(),
        epoch: plan.epoch,
        scheduler: dunlin_runtime::Address {
            node: plan.leader().clone(),
            role: "scheduler".into(),
            instance: plan.replica.clone(),
        },
        max_sequence_tokens: 1,
        kv_blocks: 1,
        block_tokens: 16,
        max_running: 1,
        served_by: vec![],
        cache_namespace: [0; 16],
    }
}

proptest! {
    #[test]
    fn any_history_keeps_the_promises_and_ends_ready(ops in prop::collection::vec(op(), 0..120)) {
        let wants = vec![want("r0", &[&["a"], &["b"]]), want("r1", &[&["c"]])];
        let mut driver = Driver {
            core: placement(wants),
            now: Duration::ZERO,
            incarnations: BTreeMap::new(),
            present: BTreeSet::new(),
            asked: Vec::new(),
            up: BTreeMap::new(),
            highest: BTreeMap::new(),
        };
        let all = ["a", "b", "c"];
        for op in ops {
            match op {
                Op::Up(i) => bring_up(&mut driver, all[i]),
                Op::Down(i) => {
                    let node = name(all[i]);
                    if driver.present.remove(&node) {
                        let incarnation = driver.incarnations[&node];
                        let peer = peer(all[i], incarnation);
                        driver.feed(Input::NodeDown { peer, reason: "killed".into() });
                    }
                }
                Op::Answer(i, ok) => driver.answer(i, ok),
                Op::Break(i) => {
                    let replica = format!("r{i}");
                    if let Some(epoch) = driver.up.get(&replica).copied() {
                        let (reason, suspects) = ("panic".to_string(), vec![]);
                        driver.feed(Input::Broken { replica, epoch, reason, suspects });
                    }
                }
                Op::Wait(seconds) => {
                    driver.now += Duration::from_secs(seconds);
                    driver.feed(Input::Tick);
                }
            }
        }
        all.iter().filter(|n| !driver.present.contains(&name(n))).copied().collect::<Vec<_>>()
            .into_iter().for_each(|n| bring_up(&mut driver, n));
        driver.now += Duration::from_secs(100);
        driver.feed(Input::Tick);
        while !driver.asked.is_empty() {
            driver.answer(0, true);
        }
        prop_assert_eq!(driver.up.len(), 2);
    }
}

fn bring_up(driver: &mut Driver, n: &str) {
    let node = name(n);
    let incarnation = driver.incarnations.entry(node.clone()).or_insert(0);
    *incarnation += 1;
    let peer = peer(n, *incarnation);
    driver.present.insert(node);
    driver.feed(Input::NodeUp { peer, description: description(1000), hosted: Vec::new() });
}
