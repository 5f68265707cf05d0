//! Plans that are read, refused and resolved.

use super::*;
use crate::fault::{Target, Trigger};
use crate::resolved::{Keep, RESOLVED_SCHEMA, Resolved};
use proptest::prelude::*;
use std::collections::BTreeSet;

const CLUSTER: &str = r#"
[cluster]
name = "lab"
head = "front"
[node.front]
address = "127.0.0.1:7400"
http = "127.0.0.1:8080"
[node.a]
address = "127.0.0.1:7401"
devices = ["cpu"]
[node.b]
address = "127.0.0.1:7402"
devices = ["cpu"]
[node.c]
address = "127.0.0.1:7403"
devices = ["cpu"]
[[replica]]
name = "r0"
stages = ["a/cpu", "b/cpu"]
[[replica]]
name = "r1"
stages = ["c/cpu"]
[engine]
kind = "hash"
"#;

const HEAD: &str = r#"schema = "fault-plan/1"
name = "test"
modes = ["sim", "process"]
[cluster]
file = "three.toml"
[workload]
requests = 40
"#;

/// The plan of the design, but for the keys of our own cluster file.
const DESIGN: &str = r#"
schema = "fault-plan/1"
name   = "shard-dies-mid-decode"
about  = "Stage 1 dies at token 17, comes back behind a slow one-way link; the client must not notice."
seed   = 7
modes  = ["sim", "process"]

[cluster]
file = "clusters/three-cpu.toml"
set  = { "membership.lease_ms" = 900 }

[workload]
requests = 40
arrivals = { kind = "poisson", per_second = 4.0 }
prompt_tokens = [8, 64]
output_tokens = [16, 64]
sampling = "greedy"
tenants = 2
shared_prefix = 0.3
cancel = 0.02

[phases]
warmup = "5s"
chaos  = "60s"
heal   = "all"
settle = "20s"

[tolerance]
nodes_down = 1
keep = "one live copy of every stage, and the head"

[[fault]]
id     = "kill"
kind   = "process.kill"
target = { role = "shard", stage = 1 }
when   = { request = "any", token = 17 }
expect = "masked"

[[fault]]
id     = "slow-return"
kind   = "link.delay"
target = { link = { from = "b", to = "a" } }
when   = { after = "kill", edge = "start", delay = "500ms" }
for    = "10s"
delay  = { p50 = "5ms", p99 = "400ms", shape = "lognormal" }

[[fault]]
id     = "stale-frame"
kind   = "frame.stale"
target = { link = { from = "b", to = "a" }, message = "Activations" }
when   = { event = "epoch.bumped", nth = 1 }
times  = 3
expect = "refused"

[swarm]
kinds = { "process.pause" = 2, "link.partition" = 3, "link.clog" = 1, "bits.kv" = 0 }
mean_gap = "4s"
max_active = 2
buggify  = { site_on = 0.25, fires = 0.05 }

[sweep]
"fault.kill.when.token" = "0..15"
seed = "1..20"

[[invariant]]
id = "tokens"
oracle = "bitwise"
[[invariant]]
id = "restart-intensity"
max = 3
within = "60s"

[report]
compare = "runs/baseline"
slo = { ttft = "2s", gap = "250ms" }
fail_on = ["invariant", "unverified-fault", "fault-never-fired"]
"#;

fn read(text: &str) -> Result<Plan, PlanError> {
    Plan::parse_with(text, "plans/test.toml", &|_| Ok(CLUSTER.to_string()))
}

fn with(fault: &str) -> Result<Plan, PlanError> {
    read(&format!("{HEAD}{fault}"))
}

/// The error of a plan whose last part is `fault`.
fn refused(fault: &str) -> String {
    match with(fault) {
        Ok(_) => panic!("was taken: {fault}"),
        Err(e) => e.to_string(),
    }
}

#[test]
fn the_design_s_plan_is_read_and_resolved() {
    let plan = read(DESIGN).unwrap_or_else(|e| panic!("{e}"));
    assert_eq!(plan.faults.len(), 3);
    assert_eq!(plan.config.membership.lease_ms, 900);
    assert_eq!(plan.tolerance.keep, Keep::StageAndHead);
    assert_eq!(plan.cells().len(), 15 * 19);
    assert_eq!(plan.options.restart_max, 3);
    let resolved = plan.resolve(7, Mode::Sim).unwrap_or_else(|e| panic!("{e}"));
    assert_eq!(resolved.schema, RESOLVED_SCHEMA);
    assert_eq!(resolved.requests.len(), 40);
    let kill = &resolved.faults[0];
    assert_eq!(kill.target, Target::Node("b".into()), "stage 1 is on b");
    assert_eq!(kill.when, Trigger::Token { request: None, token: 17 });
    let delay = &resolved.faults[1];
    assert_eq!(delay.target, Target::Links(vec![("b".into(), "a".into())]));
    assert_eq!((delay.params.p50_us, delay.params.p99_us), (Some(5_000), Some(400_000)));
    assert_eq!(delay.lasts_us, Some(10_000_000));
    let stale = &resolved.faults[2];
    assert_eq!(stale.params.message.as_deref(), Some("flow"));
    assert_eq!(stale.times, 3);
    let shared = resolved.requests.iter().filter(|r| r.prompt.len() > 4);
    let heads: Vec<&[u32]> = shared.map(|request| &request.prompt[..4]).collect();
    let alike = heads.iter().filter(|head| heads.iter().filter(|h| h == head).count() > 1).count();
    assert!((4..25).contains(&alike), "{alike} prompts begin alike");
}

#[test]
fn a_sweep_sets_the_key_of_each_cell() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::create_dir(folder.path().join("clusters")).unwrap();
    std::fs::write(folder.path().join("clusters/three-cpu.toml"), CLUSTER).unwrap();
    let path = folder.path().join("plan.toml");
    std::fs::write(&path, DESIGN).unwrap();
    let plan = Plan::read(&path).unwrap_or_else(|e| panic!("{e}"));
    let cells = plan.cells();
    let cell = plan.cell(&cells[cells.len() - 1]).unwrap_or_else(|e| panic!("{e}"));
    assert_eq!(cell.seed, 19);
    let resolved = cell.resolve(cell.seed, Mode::Sim).unwrap();
    assert_eq!(resolved.faults[0].when, Trigger::Token { request: None, token: 14 });
    assert_eq!(resolved.set.len(), 2);

    let wrong = DESIGN.replace("fault.kill.when.token", "fault.kill.when.tokne");
    std::fs::write(&path, wrong).unwrap();
    let error = Plan::read(&path).unwrap_err().to_string();
    assert!(error.contains("tokne"), "{error}");
}

/// What is wrong, and words that the error must hold.
const REFUSED: &[(&str, &[&str])] = &[
    ("\n[surprise]\nx = 1", &["unknown key `surprise`", "test.toml:9:2"]),
    ("prompt = 3", &["unknown key `prompt`", "known here: requests", ":8:1"]),
    ("[[fault]]\nkind = \"process.kill\"", &["no `id`"]),
    (
        "[[fault]]\nid = \"a\"\nkind = \"proces.kill\"",
        &["no kind proces.kill", "process.kill", ":10:8"],
    ),
    ("[[fault]]\nid = \"a\"\nkind = \"process.kill\"", &["no `target`"]),
    (
        "[[fault]]\nid = \"a\"\nkind = \"process.kill\"\ntarget = { node = \"delta\" }",
        &["no node delta", "front", ":11:19"],
    ),
    (
        "[[fault]]\nid = \"a\"\nkind = \"process.kill\"\ntarget = { role = \"shrad\" }",
        &["not a known word", "did you mean \"shard\""],
    ),
    (
        "[[fault]]\nid = \"a\"\nkind = \"process.kill\"\ntarget = { role = \"shard\", stage = 2 }",
        &["nothing in the cluster is that"],
    ),
    (
        "[[fault]]\nid = \"a\"\nkind = \"process.kill\"\ntarget = { request = 3 }",
        &["process.kill hits node processes"],
    ),
    ("[[fault]]\nid = \"a\"\nkind = \"process.kill\"\ntarget = { node = \"a\" }", &["no `when`"]),
    (
        "[[fault]]\nid = \"a\"\nkind = \"process.kill\"\ntarget = { node = \"a\" }\nwhen = { at = \"1s\" }",
        &["fault.0.when.at", "outside the chaos phase"],
    ),
    (
        "[[fault]]\nid = \"a\"\nkind = \"process.kill\"\ntarget = { node = \"a\" }\nwhen = { at = \"9s\", step = 3 }",
        &["`at` and `step` are two forms"],
    ),
    (
        "[[fault]]\nid = \"a\"\nkind = \"process.kill\"\ntarget = { node = \"a\" }\nwhen = { evnt = \"x\" }",
        &["unknown key `evnt`"],
    ),
    (
        "[[fault]]\nid = \"a\"\nkind = \"process.kill\"\ntarget = { node = \"a\" }\nwhen = { event = \"epoch.bump\" }",
        &["no event epoch.bump", "epoch.bumped"],
    ),
    (
        "[[fault]]\nid = \"a\"\nkind = \"process.kill\"\ntarget = { node = \"a\" }\nwhen = { message = \"Schedule\" }",
        &["no message Schedule", "scheduler"],
    ),
    (
        "[[fault]]\nid = \"a\"\nkind = \"process.kill\"\ntarget = { node = \"a\" }\nwhen = { site = \"stp\" }",
        &["no site stp", "step"],
    ),
    (
        "[[fault]]\nid = \"a\"\nkind = \"process.kill\"\ntarget = { node = \"a\" }\nwhen = { after = \"b\" }",
        &["no fault b"],
    ),
    (
        "[[fault]]\nid = \"a\"\nkind = \"process.kill\"\ntarget = { node = \"a\" }\nwhen = { after = \"a\" }",
        &["waits for itself"],
    ),
    (
        "[[fault]]\nid = \"a\"\nkind = \"process.kill\"\ntarget = { node = \"a\" }\nwhen = { token = 3, request = 40 }",
        &["40 is out of range", "0 to 39"],
    ),
    (
        "[[fault]]\nid = \"a\"\nkind = \"process.kill\"\ntarget = { node = \"a\" }\nwhen = { token = 64 }",
        &["no output is longer than 64"],
    ),
    (
        "[[fault]]\nid = \"a\"\nkind = \"process.kill\"\ntarget = { node = \"a\" }\nwhen = { step = 1 }\nfactor = 2",
        &["does not read `factor`", "it reads: signal"],
    ),
    (
        "[[fault]]\nid = \"a\"\nkind = \"process.kill\"\ntarget = { node = \"a\" }\nwhen = { step = 1 }\ntimes = 2",
        &["reads no `times`"],
    ),
    (
        "[[fault]]\nid = \"a\"\nkind = \"process.pause\"\ntarget = { node = \"a\" }\nwhen = { step = 1 }",
        &["no `for`"],
    ),
    (
        "[[fault]]\nid = \"a\"\nkind = \"actor.panic\"\ntarget = { role = \"shard\" }\nwhen = { step = 1 }\nfor = \"1s\"",
        &["happens once and does not last"],
    ),
    (
        "[[fault]]\nid = \"a\"\nkind = \"link.loss\"\ntarget = { node = \"a\" }\nwhen = { step = 1 }",
        &["no `p`", "write p = 0.05"],
    ),
    (
        "[[fault]]\nid = \"a\"\nkind = \"link.loss\"\ntarget = { node = \"a\" }\nwhen = { step = 1 }\np = 1.5",
        &["fault.0.p = 1.5", "out of range"],
    ),
    (
        "[[fault]]\nid = \"a\"\nkind = \"timer.late\"\ntarget = { node = \"a\" }\nwhen = { step = 1 }\nms = 5",
        &["timer.late cannot be injected in mode process", "its modes: sim"],
    ),
    (
        "[[fault]]\nid = \"a\"\nkind = \"link.clog\"\ntarget = { node = \"a\" }\nwhen = { step = 1 }\nfor = \"1 day\"",
        &["not a duration"],
    ),
    (
        "[[fault]]\nid = \"a\"\nkind = \"process.kill\"\ntarget = { node = \"a\" }\nwhen = { step = 1 }\n\
         [[fault]]\nid = \"a\"\nkind = \"process.kill\"\ntarget = { node = \"a\" }\nwhen = { step = 1 }",
        &["fault a is there twice", "in line 9"],
    ),
    ("[swarm]\nkinds = { \"process.pose\" = 1 }", &["no kind process.pose", "process.pause"]),
    ("[swarm]\nkinds = { \"timer.late\" = 1 }", &["timer.late cannot be injected"]),
    ("[[invariant]]\nid = \"tokns\"", &["no invariant tokns", "tokens"]),
    ("[[invariant]]\nid = \"tokens\"\nmax = 3", &["unknown key `max`"]),
    ("[report]\nfail_on = [\"nothing\"]", &["nothing to fail on"]),
    ("[sweep]\nseed = \"a..b\"", &["not a range"]),
    ("[sweep]\n\"workload.request\" = \"1..3\"", &["unknown key `request`"]),
    ("[tolerance]\nkeep = \"everything\"", &["not a known word"]),
    ("arrivals = { kind = \"poisson\" }", &["no `per_second`"]),
    ("prompt_tokens = [64, 8]", &["not a range"]),
    ("output_tokens = \"4000..5000\"", &["the engine's context is 4096"]),
];

#[test]
fn what_is_wrong_is_refused_with_its_place_and_the_mend() {
    let mut wrong = Vec::new();
    for (text, words) in REFUSED {
        let error = refused(text);
        let all = ["help: ", "plans/test.toml"];
        for word in all.iter().chain(*words).filter(|word| !error.contains(**word)) {
            wrong.push(format!("{word:?} is missing in\n{error}\n\nfor\n{text}\n"));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn other_files_and_schemas_are_refused() {
    let error = read("schema = \"fault-plan/2\"\nname = \"x\"").unwrap_err().to_string();
    assert!(error.contains("write schema = \"fault-plan/1\""), "{error}");
    let set =
        HEAD.replace("file = \"three.toml\"", "file = \"three.toml\"\nset = { \"kv.blok\" = 1 }");
    let error = read(&set).unwrap_err().to_string();
    assert!(error.contains("`kv.blok` cannot be set") && error.contains(":6:"), "{error}");
    let gone = Plan::parse_with(HEAD, "p.toml", &|_| Err(io::ErrorKind::NotFound.into()));
    let error = gone.unwrap_err().to_string();
    assert!(error.contains("three.toml cannot be read"), "{error}");
    let plan = read(&HEAD.replace(", \"process\"", "")).unwrap();
    let error = plan.resolve(1, Mode::Process).unwrap_err().to_string();
    assert!(error.contains("not for mode process"), "{error}");
}

const SWARM: &str = "[swarm]\nmean_gap = \"700ms\"\nmax_active = 3\n[phases]\nwarmup = \"1s\"\n";

fn targets(resolved: &Resolved, id: &str) -> Vec<Target> {
    let mine =
        |fault: &&crate::fault::Fault| fault.id == id || fault.id.starts_with(&format!("{id}#"));
    resolved.faults.iter().filter(mine).map(|fault| fault.target.clone()).collect()
}

#[test]
fn picks_draw_so_many_targets() {
    let text = |pick: &str| {
        format!(
            "[[fault]]\nid = \"k\"\nkind = \"process.kill\"\n\
             target = {{ role = \"worker\", pick = {pick} }}\nwhen = {{ step = 4 }}\n"
        )
    };
    for (pick, count) in
        [("\"one\"", 1), ("\"all\"", 3), ("{ count = 2 }", 2), ("{ share = 0.34 }", 1)]
    {
        let plan = with(&text(pick)).unwrap_or_else(|e| panic!("{e}"));
        let mut seen = BTreeSet::new();
        for seed in 0..40 {
            let found = targets(&plan.resolve(seed, Mode::Sim).unwrap(), "k");
            assert_eq!(found.len(), count, "{pick}");
            seen.extend(found);
        }
        assert_eq!(seen.len(), 3, "{pick} never reaches some of the workers");
    }
}

#[test]
fn partitions_cut_what_their_shape_says() {
    let links = |target: &str| {
        let text = format!(
            "[[fault]]\nid = \"p\"\nkind = \"link.partition\"\ntarget = {target}\nwhen = {{ step = 4 }}"
        );
        let plan = with(&text).unwrap_or_else(|e| panic!("{e}"));
        let resolved = plan.resolve(3, Mode::Sim).unwrap();
        match &resolved.faults[0].target {
            Target::Links(links) => links.len(),
            other => panic!("{other:?}"),
        }
    };
    // Four nodes: front, a, b, c.
    assert_eq!(links("{ link = { from = \"a\", to = \"b\" } }"), 1);
    assert_eq!(links("{ link = { from = \"a\", to = \"b\", both = true } }"), 2);
    assert_eq!(links("{ node = \"a\" }"), 6);
    assert_eq!(links("{ shape = \"one\" }"), 6);
    assert_eq!(links("{ shape = \"one\", both = false }"), 3);
    assert_eq!(links("{ shape = \"halves\" }"), 8);
    assert_eq!(links("{ shape = \"bridge\" }"), 4);
    assert_eq!(links("{ shape = \"ring\" }"), 4);
    assert_eq!(links("{ groups = [[\"front\"], [\"a\", \"b\"]] }"), 4);
    assert_eq!(links("\"all\""), 12);
}

proptest! {
    #[test]
    fn resolving_twice_gives_the_same_and_survives_toml(seed in 0u64..1 << 53) {
        let plan = with(SWARM).unwrap();
        let one = plan.resolve(seed, Mode::Sim).unwrap();
        let two = plan.resolve(seed, Mode::Sim).unwrap();
        prop_assert_eq!(&one, &two);
        let text = one.to_toml().unwrap();
        let back = Resolved::from_toml(&text, "resolved.toml").unwrap();
        prop_assert_eq!(&one, &back, "seed {}", seed);
        let json: Resolved = serde_json::from_str(&serde_json::to_string(&one).unwrap()).unwrap();
        prop_assert_eq!(&one, &json);
    }

    #[test]
    fn one_fault_more_changes_no_other(seed: u64) {
        let seed = seed >> 11;
        let first = "[[fault]]\nid = \"k\"\nkind = \"process.kill\"\n\
            target = { role = \"worker\" }\nwhen = { token = \"0..16\" }\nfor = \"1s..5s\"\n";
        let second = "[[fault]]\nid = \"x\"\nkind = \"link.clog\"\n\
            target = { shape = \"halves\" }\nwhen = { step = \"1..9\" }\nfor = \"1s\"\n";
        let alone = with(first).unwrap().resolve(seed, Mode::Sim).unwrap();
        let both = with(&format!("{second}{first}")).unwrap().resolve(seed, Mode::Sim).unwrap();
        prop_assert_eq!(alone.fault("k"), both.fault("k"));
        prop_assert_eq!(&alone.requests, &both.requests);
        let fault = alone.fault("k").unwrap();
        prop_assert!((1_000_000..5_000_000).contains(&fault.lasts_us.unwrap()));
        let Trigger::Token { token, .. } = fault.when else { panic!("{fault:?}") };
        prop_assert!(token < 16);
    }

    /// At every moment one replica and the head are whole, and few faults are active.
    #[test]
    fn a_swarm_stays_inside_the_tolerance(seed in 0u64..1 << 53) {
        let plan = with(SWARM).unwrap();
        let resolved = plan.resolve(seed, Mode::Sim).unwrap();
        let timed = resolved.faults.iter().filter_map(|fault| match fault.when {
            Trigger::At { us } => Some((us, us + fault.lasts_us.unwrap_or(1), fault)),
            _ => None,
        });
        let timed: Vec<_> = timed.collect();
        for (from, to, fault) in &timed {
            prop_assert!(*from >= 1_000_000 && *to < 61_000_000, "{:?}", fault);
            let active = timed.iter().filter(|(start, end, _)| start <= from && from < end);
            prop_assert!(active.count() <= 3, "seed {}", seed);
            let killed = |kind| matches!(kind, Kind::ProcessKill | Kind::ProcessPause);
            let down: BTreeSet<_> = timed
                .iter()
                .filter(|(start, end, fault)| killed(fault.kind) && start <= from && from < end)
                .map(|(_, _, fault)| fault.target.clone())
                .collect();
            prop_assert!(down.len() <= 1, "seed {}: {:?}", seed, down);
            prop_assert!(!down.contains(&Target::Node("front".into())));
        }
    }

    #[test]
    fn a_damaged_plan_is_an_error_and_never_a_panic(at in 0usize..2000, with in ".{0,3}") {
        let mut text = DESIGN.to_string();
        let at = (0..=at.min(text.len())).rev().find(|at| text.is_char_boundary(*at)).unwrap_or(0);
        text.insert_str(at, &with);
        if let Ok(plan) = read(&text) {
            let _ = plan.resolve(1, Mode::Sim);
        }
        let _ = read(&text[..at]);
    }
}

/// Over many seeds a swarm uses every kind that has a weight.
#[test]
fn a_swarm_reaches_every_kind() {
    let plan = with(SWARM).unwrap();
    let mut seen = BTreeSet::new();
    let mut runs_without_pause = 0;
    for seed in 0..200 {
        let resolved = plan.resolve(seed, Mode::Sim).unwrap();
        let kinds: BTreeSet<Kind> = resolved.faults.iter().map(|fault| fault.kind).collect();
        runs_without_pause += usize::from(!kinds.contains(&Kind::ProcessPause));
        seen.extend(kinds);
    }
    let weighted = crate::catalog::ROWS.iter().filter(|row| row.weight > 0);
    for row in weighted {
        assert!(seen.contains(&row.kind), "{} is never drawn", row.kind.name());
    }
    assert!((60..160).contains(&runs_without_pause), "kinds are off in half of the runs");
}
