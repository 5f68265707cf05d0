//! docs/faults.md says what the code does: its tables are the catalogues', its plans are plans.
//! `dunlin faults kinds --markdown` prints the table of kinds.

use dunlin_faults::catalog::{self, Row};
use dunlin_faults::events::EVENTS;
use dunlin_faults::fault::Kind;
use dunlin_faults::invariant;
use dunlin_faults::plan::Plan;

const DOCS: &str = include_str!("../../docs/faults.md");

/// The cells of the one table row that begins with `` `name` `` (or `name`).
fn row(name: &str) -> Vec<&'static str> {
    let begins = |line: &&str| {
        line.starts_with(&format!("| `{name}` |")) || line.starts_with(&format!("| {name} |"))
    };
    let rows: Vec<&str> = DOCS.lines().filter(begins).collect();
    assert_eq!(rows.len(), 1, "docs/faults.md has {} rows of {name}", rows.len());
    rows[0].trim_matches('|').split(" | ").map(str::trim).collect()
}

fn word<T: serde::Serialize>(value: T) -> String {
    serde_json::to_value(value).unwrap().as_str().unwrap().to_string()
}

#[test]
fn every_kind_has_its_row() {
    for kind in Kind::ALL {
        let cells = row(kind.name());
        let &Row { takes, modes, injector, proof, expect, .. } = catalog::row(kind);
        let name = kind.name();
        let [_, parameters, in_modes, by, proven, expected] = cells.as_slice() else {
            panic!("{name}: six cells are wanted, not {}", cells.len());
        };
        for take in takes {
            let parameter = take.param.name();
            assert!(parameters.contains(&format!("`{parameter}`")), "{name} takes {parameter}");
        }
        let all: Vec<String> = modes.iter().map(word).collect();
        assert_eq!(*in_modes, all.join(" "), "{name}");
        assert_eq!((*by, *proven), (injector, proof), "{name}");
        assert_eq!(*expected, word(expect), "{name}");
    }
}

#[test]
fn every_invariant_has_its_row() {
    for known in &invariant::ALL {
        assert_eq!(row(known.id), [known.id, known.name, known.statement]);
    }
}

#[test]
fn every_event_has_its_row() {
    for event in EVENTS {
        assert_eq!(row(event).len(), 2, "{event}");
    }
}

/// Fenced blocks of TOML.
fn blocks() -> Vec<&'static str> {
    let blocks: Vec<&str> = DOCS.split("```toml\n").skip(1).collect();
    blocks.iter().map(|block| block.split("```").next().unwrap()).collect()
}

fn parse(text: &str) -> Plan {
    let plan = Plan::parse_with(text, "docs.toml", &|path| {
        let plans = concat!(env!("CARGO_MANIFEST_DIR"), "/../plans/");
        std::fs::read_to_string(std::path::Path::new(plans).join(path))
    });
    plan.unwrap_or_else(|e| panic!("{e}\n{text}"))
}

#[test]
fn the_worked_example_is_a_plan() {
    let blocks = blocks();
    let plan = parse(blocks[0]);
    for mode in plan.modes.clone() {
        plan.resolve(plan.seed, mode).expect("its draws");
    }
    assert!(blocks.len() >= 3, "the swarm and the sweep are gone");
    for part in &blocks[1..] {
        parse(&format!("{}\n{part}", blocks[0]));
    }
}

/// What stands in the first column of the table under this heading.
fn column(heading: &str) -> Vec<&'static str> {
    let section = DOCS.split(heading).nth(1).expect("the heading").split("\n#").next().unwrap();
    let cells = section.lines().filter_map(|line| line.strip_prefix("| ")?.split(" | ").next());
    let code = cells.flat_map(|cell| cell.split('`').skip(1).step_by(2));
    code.filter(|code| code.starts_with('{')).collect()
}

#[test]
fn triggers_and_targets_are_what_plans_read() {
    let plan = blocks()[0];
    let kill = "when   = { request = \"any\", token = 17 }";
    let node = "target = { node = \"left\" }";
    assert!(plan.contains(kill) && plan.contains(node));
    let triggers = column("### Triggers");
    assert!(triggers.len() >= 7, "{triggers:?}");
    for trigger in triggers {
        // A fault cannot wait for itself.
        let other = plan.replacen("delay = \"500ms\" }", "delay = \"500ms\" } # other", 1);
        let when = "when   = { after = \"kill\", edge = \"start\", delay = \"500ms\" } # other";
        assert!(other.contains(when));
        parse(&other.replace(when, &format!("when   = {trigger}")));
    }
    let targets = column("### Targets");
    assert!(targets.len() >= 9, "{targets:?}");
    for target in targets {
        let kind = match target {
            t if t.contains("link") || t.contains("shape") || t.contains("groups") => {
                "link.partition"
            }
            t if t.contains("request") => "client.disconnect",
            t if t.contains("device") || t.contains("stage") => "device.launch_error",
            t if t.contains("role") && !t.contains("worker") => "actor.panic",
            _ => "process.kill",
        };
        let own = plan.replacen("\"process.kill\"", &format!("{kind:?}"), 1);
        parse(&own.replace(node, &format!("target = {target}")));
    }
}
