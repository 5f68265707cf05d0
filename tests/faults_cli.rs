//! `dunlin faults`, as a person and as CI run it: every plan of the corpus, fresh seeds of the
//! swarm, files and exit codes.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::{Duration, Instant};

/// What CI may take for the fresh seeds and the corpus together, on two cores, optimised.
const CI_BUDGET: Duration = Duration::from_secs(300);
const FRESH_SEEDS: u64 = 300;

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn dunlin(args: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_dunlin"));
    command.arg("faults").args(args).current_dir(root()).env("DUNLIN_OFFLINE", "1");
    command.output().expect("dunlin runs")
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Both streams, for messages.
fn said(output: &Output) -> String {
    format!("{}{}", text(&output.stdout), text(&output.stderr))
}

/// Every plan of the corpus, relative to the repository.
fn corpus() -> Vec<PathBuf> {
    let mut plans = Vec::new();
    let mut folders = vec![PathBuf::from("plans")];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(root().join(&folder)).expect("plans/ is there") {
            let entry = entry.expect("an entry of plans/");
            let path = folder.join(entry.file_name());
            if entry.path().is_dir() {
                folders.extend((entry.file_name() != "clusters").then_some(path));
            } else if path.extension().is_some_and(|e| e == "toml") {
                plans.push(path);
            }
        }
    }
    plans.sort();
    assert!(plans.len() >= 38, "the corpus is gone: {plans:?}");
    plans
}

/// Different for each commit and each day, and the same for both runs of a failing day.
fn fresh_base() -> u64 {
    if let Some(base) = std::env::var("DUNLIN_FAULT_SEED").ok().and_then(|s| s.parse().ok()) {
        return base;
    }
    let commit = Command::new("git").args(["rev-parse", "HEAD"]).current_dir(root()).output();
    let commit = commit.map(|o| text(&o.stdout)).unwrap_or_default();
    let commit = u64::from_str_radix(commit.get(..8).unwrap_or("0"), 16).unwrap_or(0);
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    let day = now.map_or(0, |since| since.as_secs() / 86_400);
    (commit ^ (day << 32)) * 1000
}

/// What `run --seeds` says of the runs that do not pass: why, and the line that repeats each.
fn failed(output: &Output) -> String {
    let all = said(output);
    let told = all.lines().skip_while(|line| !line.starts_with("  report:")).skip(1);
    told.collect::<Vec<_>>().join("\n")
}

/// A run that fails names the one line that repeats it, and that line fails in the same way.
#[test]
fn a_failing_seed_is_repeated_by_the_line_that_it_names() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = |name: &str| folder.path().join(name).display().to_string();
    // No token can come by such a deadline.
    let plan = std::fs::read_to_string(root().join("plans/kinds/process.kill.toml")).unwrap();
    let cluster = root().join("plans/clusters").display().to_string();
    let plan = plan
        .replace("../clusters", &cluster)
        .replace("[workload]", "[workload]\ndeadline = \"1ms\"");
    let file = path("late.toml");
    std::fs::write(&file, plan).unwrap();
    let many = dunlin(&["run", &file, "--mode", "sim", "--seeds", "3..5", "--out", &path("many")]);
    assert_ne!(many.status.code(), Some(0), "{}", said(&many));
    let failed = failed(&many);
    let line = failed.lines().find(|line| line.contains("--seed 3")).unwrap_or_else(|| {
        panic!("no line repeats seed 3:\n{}", said(&many));
    });
    let words: Vec<&str> = line.split_whitespace().collect();
    assert_eq!(words.get(..2), Some(["dunlin", "faults"].as_slice()), "{line}");
    let one = dunlin(&[&words[2..], &["--out", &path("one")]].concat());
    assert_eq!(one.status.code(), many.status.code(), "{}", said(&one));
    let why = failed.lines().next().and_then(|why| why.trim().split_once(": "));
    let why = why.and_then(|(_, why)| why.split("; ").next()).unwrap_or_default();
    assert!(!why.is_empty() && said(&one).contains(why), "{why:?} in {}", said(&one));
}

#[test]
fn every_plan_of_the_corpus_is_right() {
    let plans = corpus();
    let plans: Vec<_> = plans.iter().map(|p| p.to_str().expect("a plan's name")).collect();
    let output = dunlin(&[&["check"], plans.as_slice()].concat());
    assert_eq!(output.status.code(), Some(0), "{}", said(&output));
    assert_eq!(text(&output.stdout).lines().count(), plans.len());
}

#[test]
fn fresh_seeds_and_the_corpus_hold_within_the_budget() {
    let began = Instant::now();
    let folder = tempfile::tempdir().expect("a folder");
    let out = |name: &str| folder.path().join(name).display().to_string();
    let base = fresh_base();
    let seeds = format!("{base}..{}", base + FRESH_SEEDS);
    let run =
        ["run", "plans/swarm.toml", "--mode", "sim", "--seeds", &seeds, "--out", &out("swarm")];
    println!("fresh seeds: dunlin faults {}", run.join(" "));
    let output = dunlin(&run);
    println!("{}", said(&output));
    let mut wrong = Vec::new();
    if output.status.code() != Some(0) {
        let all = format!("dunlin faults run plans/swarm.toml --mode sim --seeds {seeds}");
        wrong.push(format!("{all}\nof which\n{}", failed(&output)));
    }
    // Long cases have a test of their own; those of the deliberate bugs belong to theirs.
    let aside = |plan: &PathBuf| {
        ["long", "mutations"].iter().any(|f| plan.parent().is_some_and(|p| p.ends_with(f)))
    };
    for plan in corpus().into_iter().filter(|plan| !aside(plan)) {
        let source = std::fs::read_to_string(root().join(&plan)).expect("a plan");
        let modes = source.lines().find(|line| line.starts_with("modes")).unwrap_or_default();
        if !modes.is_empty() && !modes.contains("\"sim\"") || plan.ends_with("swarm.toml") {
            continue;
        }
        let name = plan.display().to_string();
        let output = dunlin(&["run", &name, "--mode", "sim", "--out", &out("corpus")]);
        if output.status.code() != Some(0) {
            wrong.push(format!("dunlin faults run {name} --mode sim\n{}", said(&output)));
        }
    }
    println!("fresh seeds and corpus: {:.0} s", began.elapsed().as_secs_f64());
    assert!(wrong.is_empty(), "these runs do not pass; repeat with:\n{}", wrong.join("\n"));
    let late = began.elapsed() > CI_BUDGET;
    assert!(cfg!(debug_assertions) || !late, "took {:?}, allowed {CI_BUDGET:?}", began.elapsed());
}

/// Hours of kills, ten thousand requests, a full context: seconds of virtual time's computing.
#[test]
fn the_long_plans_run_to_their_end() {
    let folder = tempfile::tempdir().expect("a folder");
    let out = folder.path().join("long").display().to_string();
    let long: Vec<_> = corpus().into_iter().filter(|p| p.starts_with("plans/long")).collect();
    assert!(long.len() >= 4, "long plans are gone: {long:?}");
    for plan in long {
        let name = plan.display().to_string();
        let output = dunlin(&["run", &name, "--mode", "sim", "--out", &out]);
        assert_eq!(output.status.code(), Some(0), "{name}\n{}", said(&output));
        println!("{}", text(&output.stdout).lines().next().unwrap_or_default());
    }
}

#[test]
fn a_run_leaves_its_folder_and_can_be_replayed() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = |name: &str| folder.path().join(name).display().to_string();
    let plan = "plans/kinds/process.kill.toml";
    let output = dunlin(&["run", plan, "--mode", "sim", "--seed", "5", "--out", &path("a")]);
    assert_eq!(output.status.code(), Some(0), "{}", said(&output));
    assert!(text(&output.stdout).contains("--seed 5"), "{}", said(&output));
    for file in [
        "verdict.json",
        "plan.toml",
        "resolved.toml",
        "record.json",
        "faults.jsonl",
        "history.jsonl",
        "metrics.csv",
        "env.json",
        "trace.hash",
        "report.html",
    ] {
        let size = std::fs::metadata(folder.path().join("a").join(file)).map(|m| m.len());
        assert!(size.is_ok_and(|bytes| bytes > 0), "{file} is missing or empty");
    }
    let output = dunlin(&["replay", &path("a/resolved.toml"), "--out", &path("b")]);
    assert_eq!(output.status.code(), Some(0), "{}", said(&output));
    let hash = |run: &str| std::fs::read_to_string(folder.path().join(run).join("trace.hash"));
    assert_eq!(hash("a").unwrap(), hash("b").unwrap(), "a replay is not the same run");

    let compared = path("compared.html");
    let output = dunlin(&["report", &path("b"), &path("a"), "--out", &compared]);
    assert_eq!(output.status.code(), Some(0), "{}", said(&output));
    assert!(std::fs::read_to_string(&compared).unwrap().contains("earlier run"));
    let output = dunlin(&["report", &path("a"), "--json"]);
    let json: serde_json::Value = serde_json::from_slice(&output.stdout).expect("JSON");
    assert_eq!((&json["verdict"], &json["seed"]), (&"PASS".into(), &5.into()));
}

#[test]
fn many_seeds_make_a_summary() {
    let folder = tempfile::tempdir().expect("a folder");
    let out = folder.path().join("many");
    let plan = "plans/kinds/process.kill.toml";
    let run = ["run", plan, "--mode", "sim", "--seeds", "3..9", "--out", out.to_str().unwrap()];
    let output = dunlin(&run);
    assert_eq!(output.status.code(), Some(0), "{}", said(&output));
    assert!(text(&output.stdout).contains("6 passed, 0 failed, 0 invalid"), "{}", said(&output));
    let summary = std::fs::read_to_string(out.join("summary.json")).expect("a summary");
    let summary: serde_json::Value = serde_json::from_str(&summary).expect("JSON");
    assert_eq!(summary["runs"].as_array().map(Vec::len), Some(6));
    assert!(std::fs::read_to_string(out.join("report.html")).unwrap().contains("process.kill"));
}

#[test]
fn what_is_wrong_is_named_with_file_and_line() {
    let folder = tempfile::tempdir().expect("a folder");
    let good = std::fs::read_to_string(root().join("plans/kinds/process.kill.toml")).unwrap();
    let cluster = root().join("plans/clusters").display().to_string();
    let good = good.replace("../clusters", &cluster);
    for (was, is, named) in [
        ("kind   = \"process.kill\"", "kind   = \"process.kil\"", "process.kill"),
        ("[phases]", "[phases]\nwarmpu = \"1s\"", "warmpu"),
        ("role = \"shard\"", "role = \"shrad\"", "shrad"),
    ] {
        assert!(good.contains(was), "the plan changed: no {was}");
        let path = folder.path().join("wrong.toml");
        std::fs::write(&path, good.replacen(was, is, 1)).unwrap();
        for verb in ["check", "run"] {
            let output = dunlin(&[verb, path.to_str().unwrap()]);
            let said = said(&output);
            assert_eq!(output.status.code(), Some(3), "{verb}: {said}");
            assert!(said.contains("wrong.toml:") && said.contains(named), "{verb}: {said}");
        }
    }
    for args in [
        vec!["run", "no-such-plan.toml"],
        vec!["run", "plans/swarm.toml", "--seeds", "9..3"],
        vec!["run", "plans/swarm.toml", "--mode", "device"],
        vec!["frobnicate"],
        vec!["report", "no-such-folder"],
        vec!["soak", "--budget", "soon"],
    ] {
        let output = dunlin(&args);
        assert_eq!(output.status.code(), Some(3), "{args:?}: {}", said(&output));
    }
}

#[test]
fn kinds_and_help_teach() {
    let kinds = text(&dunlin(&["kinds"]).stdout);
    for kind in ["process.kill", "link.partition", "frame.stale", "logits.nan", "client.burst"] {
        assert!(kinds.contains(kind), "{kind} is not listed");
    }
    let help = text(&dunlin(&["--help"]).stdout);
    assert!(help.contains("INVALID") && help.contains("Examples:"), "{help}");
}
