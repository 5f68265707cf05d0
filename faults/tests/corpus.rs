//! Every plan of the corpus is valid, and every kind has all that belongs to it.

use dunlin_faults::catalog::row;
use dunlin_faults::fault::{Kind, Mode};
use dunlin_faults::plan::Plan;
use dunlin_faults::resolved::Resolved;
use std::path::{Path, PathBuf};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// All plans, but for the cluster files.
fn plans() -> Vec<PathBuf> {
    let mut found = Vec::new();
    for folder in ["plans", "plans/kinds", "plans/cases", "plans/long"] {
        let folder = root().join(folder);
        let entries = std::fs::read_dir(&folder)
            .unwrap_or_else(|e| panic!("{} cannot be read: {e}", folder.display()));
        let paths = entries.map(|entry| entry.unwrap().path());
        found.extend(paths.filter(|path| path.extension().is_some_and(|ext| ext == "toml")));
    }
    found.sort();
    found
}

#[test]
fn every_plan_is_valid_in_each_of_its_modes() {
    let mut wrong = Vec::new();
    for path in plans() {
        let plan = match Plan::read(&path) {
            Ok(plan) => plan,
            Err(e) => {
                wrong.push(e.to_string());
                continue;
            }
        };
        let stem = path.file_stem().unwrap().to_string_lossy();
        assert_eq!(stem, plan.name, "the plan's name is its file's");
        for mode in &plan.modes {
            let resolved = match plan.resolve(plan.seed, *mode) {
                Ok(resolved) => resolved,
                Err(e) => {
                    wrong.push(e.to_string());
                    continue;
                }
            };
            resolved.cluster.config().unwrap_or_else(|e| panic!("{e}"));
            let text = resolved.to_toml().unwrap();
            assert_eq!(Resolved::from_toml(&text, "r").unwrap(), resolved, "{}", path.display());
            if plan.swarm.is_none() {
                assert!(!resolved.faults.is_empty(), "{} breaks nothing", path.display());
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n\n"));
}

#[test]
fn every_kind_has_a_plan_of_its_own() {
    for kind in Kind::ALL {
        let path = root().join(format!("plans/kinds/{}.toml", kind.name()));
        let plan = Plan::read(&path).unwrap_or_else(|e| panic!("{e}"));
        assert!(plan.faults.iter().any(|fault| fault.kind == kind), "{}", path.display());
        assert_eq!(plan.modes, row(kind).modes, "{}", path.display());
    }
}

#[test]
fn every_case_that_a_plan_can_say_has_one() {
    const CASES: [&str; 21] = [
        "C01", "C02", "C04", "C05", "C06", "C08", "C09", "C14", "C19", "L01", "L03", "L05", "L07",
        "L09", "L11", "L13", "L15", "L21", "L23", "L25", "L35",
    ];
    for case in CASES.into_iter().chain(["L31", "L31-sampled", "L31-model"]) {
        let path = root().join(format!("plans/cases/{case}.toml"));
        assert!(path.exists(), "{} is missing", path.display());
    }
}

/// The catalogue says of each kind where it can be injected, and the modes agree.
#[test]
fn the_modes_inject_what_the_catalogue_says() {
    for kind in Kind::ALL {
        let said = |mode| row(kind).in_mode(mode);
        let process = dunlin_faults::process::can_inject(kind);
        assert_eq!(process, said(Mode::Process), "{}", kind.name());
        let sim = dunlin_faults::sim::can_inject(kind);
        assert_eq!(sim, said(Mode::Sim), "{}", kind.name());
    }
}
