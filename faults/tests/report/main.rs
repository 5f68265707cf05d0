//! Reports from made-up records: what their pages must say, and that they are one file each.
//! The pages are left in the target folder's `tmp/reports`, to be looked at.

mod sample;

use dunlin_actors::facts::WEIGHTS_LOADED;
use dunlin_faults::record::{Event, What};
use dunlin_faults::report::summary::{RunBrief, Summary};
use dunlin_faults::report::sweep::{Axis, Sweep, SweepCell};
use dunlin_faults::report::{Outcome, Report};
use dunlin_runtime::faults::names::PEER_DOWN;
use sample::{Sample, invariants, slo};
use std::path::PathBuf;

fn keep(name: &str, text: &str) {
    let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join("reports");
    std::fs::create_dir_all(&folder).expect("a folder for pages");
    std::fs::write(folder.join(name), text).expect("a page");
}

/// One file: nothing is fetched, nothing is run, and every tag that opens closes.
fn assert_is_one_sound_file(page: &str) {
    for outside in ["url(", "<script", "<link", "@import", "<img", "<iframe", "<object"] {
        assert!(!page.contains(outside), "the page must not contain {outside}");
    }
    for tag in page.split('<').skip(1).filter_map(|tag| tag.split('>').next()) {
        let fetches = ["http", " src=", " href=", " onload", " onerror"]
            .into_iter()
            .find(|word| tag.contains(word));
        assert_eq!(fetches, None, "in <{tag}>");
    }
    assert!(!page.contains("NaN") && !page.contains("inf\""), "a coordinate is no number");
    let mut open = Vec::new();
    for tag in page.split('<').skip(1) {
        let name: String =
            tag.chars().take_while(|c| c.is_ascii_alphanumeric() || *c == '/').collect();
        let void = ["meta", "br", "", "line", "rect", "path"].contains(&name.as_str());
        let inside = tag.split('>').next().unwrap_or_default();
        if let Some(closed) = name.strip_prefix('/') {
            assert_eq!(open.pop().as_deref(), Some(closed), "closed out of order");
        } else if !(inside.ends_with('/') || void && !["rect", "path"].contains(&name.as_str())) {
            open.push(name);
        }
    }
    assert!(open.is_empty(), "left open: {open:?}");
}

fn report(record: &dunlin_faults::record::Record, verdict: Outcome) -> Report<'_> {
    let why = match verdict {
        Outcome::Pass => Vec::new(),
        Outcome::Fail => {
            vec!["I3 exactly-once stream: request 17 got position 9 twice".to_string()]
        }
        Outcome::Invalid => vec!["fault 'late': never fired".to_string()],
    };
    let mut report = Report::new(record, verdict, why, invariants(verdict), slo());
    report.about = "Stage 1 dies at token 17; its node comes back behind a slow link.".to_string();
    report
}

#[test]
fn a_run_has_a_page_that_says_what_happened() {
    let record = Sample::default().record();
    let page = report(&record, Outcome::Pass).html(None);
    assert_is_one_sound_file(&page);
    for said in [
        "PASS",
        "shard-dies-mid-decode",
        "process.kill",
        "Figure 3.",
        "epoch.bumped",
        "dunlin faults run",
        "exactly-once stream",
        "MTTR",
    ] {
        assert!(page.contains(said), "the page does not say {said}");
    }
    keep("pass.html", &page);
}

#[test]
fn two_runs_are_compared() {
    let (old, new) = (Sample { stall_ms: 2_600, seed: 3, ..Sample::default() }, Sample::default());
    let (old, new) = (old.record(), new.record());
    let earlier = report(&old, Outcome::Pass);
    let page = report(&new, Outcome::Fail).html(Some(&earlier));
    assert_is_one_sound_file(&page);
    assert!(page.contains("earlier run") && page.contains("line-b") && page.contains("✗ FAIL"));
    keep("compared.html", &page);
}

#[test]
fn text_from_outside_is_never_markup() {
    let mut record = Sample::default().record();
    let hostile = "<script>alert('x')</script>\"><img src=x>";
    record.plan = hostile.to_string();
    record.repro = hostile.to_string();
    record.env.insert(hostile.to_string(), hostile.to_string());
    record.stuck = Some(hostile.to_string());
    for node in &mut record.nodes {
        node.name = hostile.to_string();
    }
    for fault in &mut record.faults {
        fault.fault.id = hostile.to_string();
        fault.proof = Some(hostile.to_string());
    }
    for event in &mut record.events {
        match &mut event.what {
            What::Fact { subject, .. } => *subject = hostile.to_string(),
            What::Ended { code, message, .. } => {
                (*code, *message) = (hostile.to_string(), hostile.to_string());
            }
            What::Node { node, state } => {
                (*node, *state) = (hostile.to_string(), hostile.to_string());
            }
            _ => {}
        }
    }
    let mut report = report(&record, Outcome::Invalid);
    report.about = hostile.to_string();
    report.why = vec![hostile.to_string()];
    for row in &mut report.invariants {
        row.violations = vec![hostile.to_string()];
    }
    assert_is_one_sound_file(&report.html(None));
}

#[test]
fn the_metrics_are_those_of_the_story() {
    let sample = Sample::default();
    let record = sample.record();
    let m = report(&record, Outcome::Pass).metrics;
    assert_eq!((m.duplicated_tokens, m.lost_tokens), (0, 0));
    assert_eq!(m.asked, sample.requests);
    let kill = &m.faults[0];
    assert_eq!(kill.mttd_us, Some(sample.stall_ms * 1000 / 4));
    // Who was streaming from the dead node waits for the stall; tokens were due up to 40 ms later.
    let stall = sample.stall_ms * 1000;
    assert!((stall - 40_000..stall + 400_000).contains(&kill.mttr_us.unwrap()), "{kill:?}");
    assert!(kill.stalled > 0 && kill.stalled <= kill.open);
    let longest = m.longest_gap_us.unwrap();
    assert!((stall..stall + 100_000).contains(&longest), "{longest}");
    assert!(m.lost_goodput_tokens.unwrap() > 0.0);
    assert!(m.recomputed_tokens > 0 && m.epochs == 1);
}

#[test]
fn lost_and_repeated_tokens_are_counted() {
    let mut record = Sample::default().record();
    let twice = record.events.iter().find(|e| matches!(e.what, What::Token { .. })).cloned();
    record.events.push(twice.unwrap());
    let last = record
        .events
        .iter()
        .rposition(|e| matches!(&e.what, What::Token { request, .. } if *request == 1));
    record.events.remove(last.unwrap());
    let m = report(&record, Outcome::Pass).metrics;
    assert_eq!((m.duplicated_tokens, m.lost_tokens), (1, 1));
}

#[test]
fn false_deaths_weights_and_fairness_are_counted() {
    let mut record = Sample::default().record();
    let before = report(&record, Outcome::Pass).metrics;
    assert_eq!((before.false_deaths, before.weight_bytes), (0, 0));
    let began = record.faults.iter().filter_map(|fault| fault.began_us).min().unwrap();
    let fact = |us: u64, name: &str, value: u64| Event {
        us,
        what: What::Fact {
            node: "left".into(),
            name: name.into(),
            subject: "right".into(),
            key: 1,
            value,
        },
    };
    // Before any fault nobody is to be given up, and what is loaded is the start's.
    record.events.push(fact(began - 1, PEER_DOWN, 0));
    record.events.push(fact(began - 1, WEIGHTS_LOADED, 500));
    record.events.push(fact(began + 1, WEIGHTS_LOADED, 70));
    record.events.push(fact(began + 2, WEIGHTS_LOADED, 7));
    // Every second request belongs to a tenant whose answers come at half the pace.
    for (number, info) in &mut record.requests {
        info.tenant = if number % 2 == 0 { "a" } else { "b" }.into();
    }
    let mut begun = std::collections::BTreeMap::new();
    record.events.sort_by_key(|event| event.us);
    for event in &mut record.events {
        match &event.what {
            What::Submitted { request } => _ = begun.insert(*request, event.us),
            What::Token { request, .. } | What::Ended { request, .. } if request % 2 == 1 => {
                let from = begun.get(request).copied().unwrap_or(event.us);
                event.us = from + 2 * (event.us - from);
            }
            _ => {}
        }
    }
    let after = report(&record, Outcome::Pass).metrics;
    assert_eq!((after.false_deaths, after.weight_bytes), (1, 77));
    let fairness = after.fairness.expect("two tenants");
    assert!((0.35..0.65).contains(&fairness), "{fairness}");
}

#[test]
fn an_empty_run_has_a_page_too() {
    let mut record = Sample::default().record();
    record.events.clear();
    record.faults.clear();
    record.rest = None;
    let report = report(&record, Outcome::Invalid);
    assert_is_one_sound_file(&report.html(None));
    let json: serde_json::Value = serde_json::from_str(&report.json(None).unwrap()).unwrap();
    assert_eq!(json["verdict"], "INVALID");
    assert_eq!(json["metrics"]["tokens"], 0);
}

#[test]
fn five_hundred_nodes_fit_on_a_page() {
    let mut record = Sample::default().record();
    for n in 0..500 {
        let mut node = record.nodes[1].clone();
        node.name = format!("node{n}");
        record.nodes.push(node);
    }
    let page = report(&record, Outcome::Pass).html(None);
    assert_is_one_sound_file(&page);
    assert!(page.contains("more nodes are not drawn"));
    assert!(page.len() < 600_000, "{} bytes", page.len());
}

#[test]
fn a_sweep_is_a_matrix_and_a_table_for_programs() {
    let axes = vec![
        Axis {
            name: "fault.kill.when.token".into(),
            values: (0..64).map(|v| v.to_string()).collect(),
        },
        Axis { name: "seed".into(), values: (1..13).map(|v| v.to_string()).collect() },
    ];
    let mut cells = Vec::new();
    for x in 0..64usize {
        for y in 0..12usize {
            let sample = Sample {
                requests: 6,
                stall_ms: 150 + 30 * x as u64 + 40 * (y as u64 % 3),
                seed: y as u64 + 1,
            };
            let record = sample.record();
            let verdict = match (x, y) {
                (41, 3) => Outcome::Fail,
                (12, 7) => Outcome::Invalid,
                _ => Outcome::Pass,
            };
            cells.push(SweepCell { at: vec![x, y], run: RunBrief::of(&report(&record, verdict)) });
        }
    }
    let mode = dunlin_faults::fault::Mode::Sim;
    let repro = "dunlin faults run plans/sweep.toml --mode sim".to_string();
    let sweep = Sweep { plan: "kill-at-each-token".into(), mode, repro, axes, cells };
    let page = sweep.html();
    assert_is_one_sound_file(&page);
    keep("sweep.html", &page);
    let csv = sweep.csv();
    assert_eq!(csv.lines().count(), 1 + 64 * 12);
    assert!(csv.starts_with("fault.kill.when.token,seed,verdict,mttd_worst_fault_us,"));
}

#[test]
fn many_seeds_are_one_page() {
    let runs: Vec<RunBrief> = (1..120)
        .map(|seed| {
            let sample = Sample { requests: 8, seed, stall_ms: 300 + seed * 17 % 900 };
            let record = sample.record();
            let verdict = if seed % 50 == 0 { Outcome::Fail } else { Outcome::Pass };
            RunBrief::of(&report(&record, verdict))
        })
        .collect();
    let repro = "dunlin faults run plans/swarm.toml --mode sim --seeds 1..120";
    let mut summary = Summary::new("swarm", dunlin_faults::fault::Mode::Sim, repro, 3.4, runs);
    summary.coverage.insert("replay at token 0".into(), 14);
    summary.coverage.insert("heal just before lease end".into(), 0);
    assert_eq!(summary.verdict(), Outcome::Fail);
    let page = summary.html();
    assert_is_one_sound_file(&page);
    assert!(page.contains("process.kill") && page.contains("never"));
    keep("summary.html", &page);
}
