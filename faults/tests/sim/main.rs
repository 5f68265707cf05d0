//! The simulator: the same seed twice, every kind, many nodes.

mod drain;
mod heal;
mod weights;

use dunlin_faults::fault::Mode;
use dunlin_faults::plan::Plan;
use dunlin_faults::record::{Record, What};
use dunlin_faults::resolved::Resolved;
use dunlin_faults::sim;
use dunlin_faults::verdict::{Outcome, judge};
use std::path::{Path, PathBuf};
use std::sync::Mutex;

const CLUSTER: &str = r#"
[cluster]
name = "sim"
head = "front"

[node.front]
address = "127.0.0.1:7400"
http    = "127.0.0.1:8080"

[node.left]
address = "127.0.0.1:7401"
devices = ["cpu"]

[node.right]
address = "127.0.0.1:7402"
devices = ["cpu"]

[[replica]]
name   = "r0"
stages = ["left/cpu", "right/cpu"]

[scheduler]
step_deadline_ms = 2000

[restart]
max = 100

[kv]
memory = "256KiB"
"#;

const PLAN: &str = r#"
schema = "fault-plan/1"
name   = "plain"
modes  = ["sim"]

[cluster]
file = "cluster.toml"

[workload]
requests      = 6
arrivals      = { kind = "poisson", per_second = 20.0 }
prompt_tokens = [4, 40]
output_tokens = [4, 24]
tenants       = 2
shared_prefix = 0.3

[phases]
warmup = "0s"
chaos  = "4s"
settle = "20s"
"#;

fn plans() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../plans")
}

fn plain(seed: u64) -> Resolved {
    let folder = tempfile::tempdir().expect("a folder");
    std::fs::write(folder.path().join("cluster.toml"), CLUSTER).expect("written");
    let file = folder.path().join("plain.toml");
    std::fs::write(&file, PLAN).expect("written");
    let plan = Plan::read(&file).unwrap_or_else(|error| panic!("{error}"));
    plan.resolve(seed, Mode::Sim).unwrap_or_else(|error| panic!("{error}"))
}

/// A plan of its own text, of two workers with a replica each.
fn of_pair(text: &str) -> Resolved {
    let head = "schema = \"fault-plan/1\"\nmodes = [\"sim\"]\n[cluster]\nfile = \"pair.toml\"\n";
    let (name, text) = text.split_once('\n').expect("a first line with the name");
    let text = format!("name = \"{name}\"\n{head}{text}");
    let load = |_: &Path| std::fs::read_to_string(plans().join("clusters/pair.toml"));
    let plan = Plan::parse_with(&text, name, &load).unwrap_or_else(|error| panic!("{error}"));
    plan.resolve(7, Mode::Sim).unwrap_or_else(|error| panic!("{error}"))
}

fn run(plan: &Resolved) -> Record {
    sim::run_resolved(plan).unwrap_or_else(|error| panic!("{}: {error}", plan.name))
}

/// The verdict in words, empty if it is PASS.
fn judged(plan: &Resolved, record: &Record) -> String {
    let verdict = judge(plan, record);
    if verdict.outcome == Outcome::Pass {
        return String::new();
    }
    let breaches = verdict.breaches.iter().take(4);
    let breaches: Vec<String> = breaches
        .map(|b| {
            format!("  {} {} at {} us, {:?}: {}", b.invariant, b.slug, b.at_us, b.request, b.what)
        })
        .collect();
    let stuck = record.stuck.as_deref().unwrap_or_default();
    format!(
        "{} seed {}: {:?}: {}\n{}\n{stuck}",
        plan.name,
        plan.seed,
        verdict.outcome,
        verdict.reason,
        breaches.join("\n")
    )
}

/// Runs on two threads; all complaints together.
fn all(plans: &[Resolved]) -> Vec<String> {
    let found = Mutex::new(Vec::new());
    let plan = |at: usize| Ok(plans[at].clone());
    sim::run_many(plans.len(), 2, plan, |at, result| {
        let words = match result {
            Ok((plan, record)) => judged(&plan, &record),
            Err(error) => format!("{}: {error}", plans[at].name),
        };
        if !words.is_empty() {
            found.lock().expect("no panic in here").push(words);
        }
    });
    found.into_inner().expect("no panic in here")
}

#[test]
fn without_faults_every_request_gets_its_undisturbed_answer() {
    let plan = plain(1);
    let record = run(&plan);
    assert_eq!(judged(&plan, &record), "");
    let finished = |event: &&dunlin_faults::record::Event| matches!(&event.what, What::Ended { code, .. } if code == "finished");
    assert_eq!(record.events.iter().filter(finished).count(), plan.requests.len());
    assert!(record.rest.expect("it settled").probe_right);
}

#[test]
fn the_same_seed_gives_the_same_trace() {
    let swarm = Plan::read(&plans().join("swarm.toml")).unwrap_or_else(|e| panic!("{e}"));
    for seed in 1..=12 {
        let plan = swarm.resolve(seed, Mode::Sim).unwrap_or_else(|error| panic!("{error}"));
        let (first, second) = (run(&plan), run(&plan));
        let differs = first.events.iter().zip(&second.events).find(|(a, b)| a != b);
        assert_eq!(differs, None, "seed {seed}");
        assert_eq!(first.trace_hash, second.trace_hash, "seed {seed}");
        let other = swarm.resolve(seed + 1000, Mode::Sim).unwrap_or_else(|e| panic!("{e}"));
        assert_ne!(run(&other).trace_hash, first.trace_hash, "another seed is another run");
    }
}

#[test]
fn every_kind_has_its_effect_and_no_other() {
    let mut kinds = Vec::new();
    let folder = std::fs::read_dir(plans().join("kinds")).expect("plans/kinds");
    for file in folder {
        let file = file.expect("an entry").path();
        let plan = Plan::read(&file).unwrap_or_else(|error| panic!("{error}"));
        if let Ok(resolved) = plan.resolve(7, Mode::Sim) {
            kinds.push(resolved);
        }
    }
    kinds.sort_by(|a, b| a.name.cmp(&b.name));
    assert!(kinds.len() >= 30, "{} plans", kinds.len());
    let found = all(&kinds);
    assert!(found.is_empty(), "{} of {}:\n{}", found.len(), kinds.len(), found.join("\n"));
}

#[test]
fn five_hundred_nodes_fit_into_one_run() {
    let mut text = String::from("[cluster]\nname = \"many\"\nhead = \"n0\"\n");
    for node in 0..500 {
        let devices = if node == 0 { "" } else { "devices = [\"cpu\"]\n" };
        let http = if node == 0 { "http = \"127.0.0.1:8080\"\n" } else { "" };
        let port = 10_000 + node;
        text += &format!("[node.n{node}]\naddress = \"127.0.0.1:{port}\"\n{http}{devices}");
    }
    for replica in 0..249 {
        let (a, b) = (1 + 2 * replica, 2 + 2 * replica);
        text +=
            &format!("[[replica]]\nname = \"r{replica}\"\nstages = [\"n{a}/cpu\", \"n{b}/cpu\"]\n");
    }
    text += "[kv]\nmemory = \"64KiB\"\n[membership]\nheartbeat_ms = 500\nlease_ms = 3000\n";
    let mut plan = plain(3);
    plan.name = "five hundred".into();
    plan.cluster.text = text;
    let record = run(&plan);
    assert_eq!(judged(&plan, &record), "");
}
