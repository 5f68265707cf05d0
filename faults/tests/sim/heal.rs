//! `heal = "core"`: what tolerance can do without stays broken, and the rest is well all the same.

use super::{judged, of_pair, run};
use dunlin_faults::record::{Record, What};
use dunlin_faults::verdict::judge;

/// Left is broken by `faults` from 2 s on, when the chaos ends at 6 s as well.
fn after(heal: &str, faults: &str) -> (String, Record) {
    let plan = of_pair(&format!(
        "core\n\
         [workload]\nrequests = 24\narrivals = {{ kind = \"poisson\", per_second = 4.0 }}\n\
         prompt_tokens = [16, 48]\noutput_tokens = [24, 48]\n\
         [phases]\nwarmup = \"1s\"\nchaos = \"5s\"\nheal = \"{heal}\"\nsettle = \"10s\"\n{faults}"
    ));
    let record = run(&plan);
    (judged(&plan, &record), record)
}

const KILL: &str = "[[fault]]\nid = \"away\"\nkind = \"process.kill\"\n\
    target = { node = \"left\" }\nwhen = { at = \"2s\" }\nfor = \"60s\"\n";
const CUT: &str = "[[fault]]\nid = \"cut\"\nkind = \"link.partition\"\n\
    target = { node = \"left\" }\nwhen = { at = \"2s\" }\n";
const PAUSE: &str = "[[fault]]\nid = \"pause\"\nkind = \"process.pause\"\n\
    target = { node = \"left\" }\nwhen = { at = \"2s\" }\nfor = \"60s\"\n";

fn came_back(record: &Record) -> bool {
    record.events.iter().any(|event| {
        let up = |node: &str, state: &str| node == "left" && state == "up";
        event.us > 2_000_000 && matches!(&event.what, What::Node { node, state } if up(node, state))
    })
}

#[test]
fn what_is_outside_of_the_core_stays_broken() {
    for faults in [KILL, CUT, PAUSE] {
        let (words, record) = after("core", faults);
        assert_eq!(words, "");
        assert!(record.outside.iter().eq(["left"]), "{:?}", record.outside);
        assert!(!came_back(&record));
        let rest = record.rest.as_ref().expect("the core came to rest");
        assert_eq!((rest.replicas_up, rest.replicas_wanted), (1, 1));
        assert!(rest.views.keys().eq(["front", "right"]), "{:?}", rest.views);
        let ended = record.faults[0].ended_us.expect("the run's end is its end");
        assert!(ended >= record.phases.settle_us, "{ended}");
    }
}

#[test]
fn a_whole_heal_brings_everything_back() {
    let (words, record) = after("all", KILL);
    assert_eq!(words, "");
    assert!(record.outside.is_empty() && came_back(&record));
    assert_eq!(record.rest.map(|rest| (rest.replicas_up, rest.replicas_wanted)), Some((2, 2)));
}

#[test]
fn the_core_itself_is_healed() {
    let right = "[[fault]]\nid = \"other\"\nkind = \"link.partition\"\n\
        target = { node = \"right\" }\nwhen = { at = \"4s\" }\n";
    let (words, record) = after("core", &format!("{KILL}{right}"));
    assert_eq!(words, "");
    assert!(record.outside.iter().eq(["left"]), "{:?}", record.outside);
}

/// A core that does not serve is found out, whatever lies outside of it.
#[test]
fn liveness_is_asked_of_the_core() {
    let plan = of_pair(&format!(
        "core\n[workload]\nrequests = 2\nprompt_tokens = 8\noutput_tokens = 8\n\
         [phases]\nwarmup = \"1s\"\nchaos = \"3s\"\nheal = \"core\"\nsettle = \"10s\"\n{KILL}"
    ));
    let mut record = run(&plan);
    assert_eq!(judged(&plan, &record), "");
    record.rest.as_mut().expect("it came to rest").replicas_up = 0;
    let verdict = judge(&plan, &record);
    assert_eq!(verdict.fingerprint.map(|print| print.to_string()), Some("L3/replicas".into()));
}
