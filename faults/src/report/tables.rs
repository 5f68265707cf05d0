//! The tables of a run's page.

use super::html::{Cell, Table};
use super::metrics::Metrics;
use super::svg::{digits, duration};
use super::{InvariantState, Report};
use crate::fault::{Expect, Target};
use crate::record::{Record, What};
use dunlin_actors::facts;
use dunlin_runtime::faults::names;

/// Rows of the events table; the middle of a longer story is in the JSON alone.
const FIRST_EVENTS: usize = 70;
const LAST_EVENTS: usize = 30;
const MAX_FAULTS: usize = 200;
const MAX_VIOLATIONS: usize = 5;

pub fn faults(report: &Report<'_>, caption: &str) -> String {
    let heads =
        ["", "fault", "target", "#at", "#lasted", "#MTTD", "#MTTR", "proof", "expected", "seen"];
    let mut table = Table::new("faults", caption, &heads);
    let rows = report.record.faults.iter().zip(&report.metrics.faults).enumerate();
    for (i, (run, m)) in rows.take(MAX_FAULTS) {
        let lasted = match (run.began_us, run.ended_us) {
            (Some(began), Some(ended)) => duration(ended.saturating_sub(began) as f64),
            _ => "–".to_string(),
        };
        let proof = match &run.proof {
            Some(proof) => Cell::Text(proof.clone()),
            None => Cell::Tagged("none".to_string(), "bad"),
        };
        let seen = if run.began_us.is_none() { "bad" } else { "" };
        table.row(vec![
            Cell::Number((i + 1).to_string()),
            Cell::Html(format!(
                "{}<br><code>{}</code>",
                super::svg::Escaped(&run.fault.id),
                run.kind().name()
            )),
            Cell::Text(target(&run.fault.target)),
            Cell::Number(time(run.began_us)),
            Cell::Number(lasted),
            Cell::Number(time(m.mttd_us)),
            Cell::Number(time(m.mttr_us)),
            proof,
            Cell::Text(expect(run.expect()).to_string()),
            Cell::Tagged(m.seen.clone(), seen),
        ]);
    }
    table.finish()
}

pub fn invariants(report: &Report<'_>, caption: &str) -> String {
    let mut table = Table::new("invariants", caption, &["", "invariant", "statement", "found"]);
    for row in &report.invariants {
        let (text, class) = match row.state {
            InvariantState::Held => ("✓ held", "good"),
            InvariantState::Violated => ("✗ violated", "bad"),
            InvariantState::NotChecked => ("– not checked", "dim"),
        };
        let mut found = format!("<span class=\"{class}\">{text}</span>");
        if !row.checked.is_empty() {
            found +=
                &format!("<br><span class=\"dim\">{}</span>", super::svg::Escaped(&row.checked));
        }
        for violation in row.violations.iter().take(MAX_VIOLATIONS) {
            found += &format!("<br>{}", super::svg::Escaped(violation));
        }
        if let Some(more) = row.violations.len().checked_sub(MAX_VIOLATIONS).filter(|n| *n > 0) {
            found += &format!("<br>and {more} more");
        }
        table.row(vec![
            Cell::Text(row.id.clone()),
            Cell::Text(row.name.clone()),
            Cell::Text(row.statement.clone()),
            Cell::Html(found),
        ]);
    }
    table.finish()
}

/// One figure of a run with its unit; `better` says which way is good, for the delta.
pub struct Row {
    pub group: &'static str,
    pub name: &'static str,
    pub value: Option<f64>,
    pub unit: Unit,
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Unit {
    Time,
    Count,
    Rate,
    Share,
}

impl Unit {
    pub fn show(self, value: Option<f64>) -> String {
        let Some(value) = value else { return "–".to_string() };
        match self {
            Unit::Time => duration(value),
            Unit::Count => digits(value),
            Unit::Rate => format!("{} tok/s", digits(value)),
            Unit::Share => format!("{} %", digits(value * 100.0)),
        }
    }
}

/// Every metric that is one number, in the order of the table.
pub fn rows(m: &Metrics) -> Vec<Row> {
    let time = |v: Option<u64>| v.map(|us| us as f64);
    let accepted = (m.accepted > 0).then(|| m.ended_well as f64 / m.accepted as f64);
    let recompute = (m.tokens > 0).then(|| m.recomputed_tokens as f64 / m.tokens as f64);
    let row = |group, name, value, unit| Row { group, name, value, unit };
    let n = |value: u64| Some(value as f64);
    use Unit::{Count, Rate, Share, Time};
    vec![
        row("Recovery", "MTTD, worst fault", time(m.mttd_us), Time),
        row("Recovery", "MTTR, worst fault", time(m.mttr_us), Time),
        row("Recovery", "longest token gap", time(m.longest_gap_us), Time),
        row("Recovery", "back at 95 % of goodput", time(m.recovered_us), Time),
        row("Recovery", "false deaths", n(m.false_deaths), Count),
        row("Recovery", "lost goodput, tokens", m.lost_goodput_tokens, Count),
        row("Service", "goodput before", m.goodput_before, Rate),
        row("Service", "goodput during", m.goodput_during, Rate),
        row("Service", "goodput after", m.goodput_after, Rate),
        row("Service", "availability", accepted, Share),
        row("Service", "fairness, slowest tenant to fastest", m.fairness, Share),
        row("Service", "requests asked", n(m.asked), Count),
        row("Service", "refused at admission", n(m.refused), Count),
        row("Service", "failed", n(m.failed), Count),
        row("Work", "tokens delivered", n(m.tokens), Count),
        row("Work", "replays", n(m.replays), Count),
        row("Work", "tokens recomputed, at most", n(m.recomputed_tokens), Count),
        row("Work", "recompute ratio", recompute, Share),
        row("Work", "weight bytes loaded anew", n(m.weight_bytes), Count),
        row("Work", "prefix-cache tokens", n(m.prefix_hit_tokens), Count),
        row("Work", "epochs begun", n(m.epochs), Count),
        row("Work", "actor restarts", n(m.restarts), Count),
        row("Work", "escalations", n(m.escalations), Count),
        row("Work", "stale or bad messages refused", n(m.stale_refused), Count),
        row("Harm", "blast radius, worst fault", m.blast_radius, Share),
        row("Harm", "tokens duplicated", n(m.duplicated_tokens), Count),
        row("Harm", "tokens lost", n(m.lost_tokens), Count),
    ]
}

pub fn metrics(report: &Report<'_>, earlier: Option<&Report<'_>>, caption: &str) -> String {
    let heads: &[&str] = match earlier {
        Some(_) => &["metric", "#this run", "#earlier", "#change"],
        None => &["metric", "#value"],
    };
    let mut table = Table::new("metrics", caption, heads);
    let theirs = earlier.map(|e| rows(&e.metrics));
    let mut group = "";
    for (i, row) in rows(&report.metrics).into_iter().enumerate() {
        if row.group != group {
            group = row.group;
            table.group(group, heads.len());
        }
        let mut cells =
            vec![Cell::Text(row.name.to_string()), Cell::Number(row.unit.show(row.value))];
        if let Some(theirs) = &theirs {
            let old = theirs.get(i).and_then(|r| r.value);
            cells.push(Cell::Number(row.unit.show(old)));
            cells.push(Cell::Number(change(old, row.value)));
        }
        table.row(cells);
    }
    table.finish()
}

fn change(old: Option<f64>, new: Option<f64>) -> String {
    match (old, new) {
        (Some(old), Some(new)) if old == new => "=".to_string(),
        (Some(old), Some(new)) if old.abs() > 1e-9 => {
            let percent = (new - old) / old.abs() * 100.0;
            let sign = if percent >= 0.0 { "+" } else { "−" };
            format!("{sign}{} %", digits(percent.abs()))
        }
        _ => "–".to_string(),
    }
}

pub fn latencies(report: &Report<'_>, earlier: Option<&Report<'_>>, caption: &str) -> String {
    let heads = ["", "#before", "#during", "#after"];
    let mut table = Table::new("latencies", caption, &heads);
    let mut add = |of: &Report<'_>, note: &str| {
        for (name, spreads) in [("TTFT", of.metrics.ttft), ("ITL", of.metrics.itl)] {
            for (tail, pick) in [("p50", 0), ("p99", 1)] {
                let mut cells = vec![Cell::Text(format!("{name} {tail}{note}"))];
                for spread in spreads {
                    let value = if pick == 0 { spread.p50 } else { spread.p99 };
                    cells.push(Cell::Number(Unit::Time.show(value.map(|us| us as f64))));
                }
                table.row(cells);
            }
        }
    };
    add(report, "");
    if let Some(earlier) = earlier {
        add(earlier, ", earlier run");
    }
    table.finish()
}

/// Supervision, membership and node states, in order; equal ones at once are one row.
pub fn events(record: &Record, caption: &str) -> String {
    let told = story(record);
    let mut table = Table::new("events", caption, &["#time", "node", "event", "of"]);
    let row = |table: &mut Table, told: &Told| {
        let count = if told.count > 1 { format!(" ({}×)", told.count) } else { String::new() };
        table.row(vec![
            Cell::Number(duration(told.us as f64)),
            Cell::Text(told.nodes.join(", ")),
            Cell::Tagged(told.name.clone() + &count, if told.is_fault { "bad" } else { "" }),
            Cell::Text(told.subject.clone()),
        ]);
    };
    let cut = told.len() > FIRST_EVENTS + LAST_EVENTS;
    let first = if cut { FIRST_EVENTS } else { told.len() };
    told.iter().take(first).for_each(|t| row(&mut table, t));
    if cut {
        let left_out = told.len() - FIRST_EVENTS - LAST_EVENTS;
        table.group(&format!("{left_out} events left out here"), 4);
        told.iter().skip(first + left_out).for_each(|t| row(&mut table, t));
    }
    table.finish()
}

/// Something of the events table.
struct Told {
    us: u64,
    nodes: Vec<String>,
    name: String,
    subject: String,
    count: u64,
    is_fault: bool,
}

fn story(record: &Record) -> Vec<Told> {
    let mut told: Vec<Told> = Vec::new();
    for (i, run) in record.faults.iter().enumerate() {
        for (at, edge) in [(run.began_us, "begins"), (run.ended_us, "ends")] {
            let Some(us) = at else { continue };
            told.push(Told {
                us,
                nodes: Vec::new(),
                name: format!("fault {} {edge}", i + 1),
                subject: format!("{} ({})", run.fault.id, run.kind().name()),
                count: 1,
                is_fault: true,
            });
        }
    }
    let nobody = String::new();
    for event in &record.events {
        let (node, name, subject) = match &event.what {
            What::Fact { node, name, subject, key, .. } if is_supervision(name) => {
                let subject = match name.as_str() {
                    facts::EPOCH_BUMPED | facts::REPLICA_UP => format!("{subject}, epoch {key}"),
                    facts::REQUEST_REPLAYED => format!("request {key}: {subject}"),
                    _ => subject.clone(),
                };
                (node, name.clone(), subject)
            }
            What::Node { node, state } if event.us > 0 => {
                (node, format!("node {state}"), String::new())
            }
            What::Placement { replica, epoch, shards } => {
                let all = shards.iter().map(|s| format!("{}.{} on {}", s.stage, s.rank, s.node));
                let all = all.collect::<Vec<_>>().join(", ");
                (&nobody, "placed".to_string(), format!("{replica}, epoch {epoch}: {all}"))
            }
            _ => continue,
        };
        told.push(Told {
            us: event.us,
            nodes: Some(node).filter(|n| !n.is_empty()).cloned().into_iter().collect(),
            name,
            subject,
            count: 1,
            is_fault: false,
        });
    }
    told.sort_by_key(|t| t.us);
    merge(told)
}

/// The same thing within a tenth of a second is told once, with all who told it.
fn merge(told: Vec<Told>) -> Vec<Told> {
    let mut merged: Vec<Told> = Vec::with_capacity(told.len());
    for next in told {
        let same = merged
            .iter_mut()
            .rev()
            .take_while(|t| next.us - t.us < 100_000)
            .find(|t| t.name == next.name && t.subject == next.subject && !next.is_fault);
        match same {
            Some(t) => {
                t.count += 1;
                for node in next.nodes {
                    if !t.nodes.contains(&node) {
                        t.nodes.push(node);
                    }
                }
            }
            None => merged.push(next),
        }
    }
    merged
}

fn is_supervision(name: &str) -> bool {
    matches!(
        name,
        names::PEER_UP
            | names::PEER_DOWN
            | names::ACTOR_RESTARTED
            | names::ESCALATED
            | names::LEASE_EXPIRED
            | names::LEASE_LIVE
            | names::FRAME_REFUSED
            | facts::EPOCH_BUMPED
            | facts::REPLICA_UP
            | facts::REPLICA_DOWN
            | facts::REQUEST_REPLAYED
            | facts::STEP_FAILED
            | facts::PLAN_MISMATCH
            | facts::AUDIT_FAILED
            | facts::DRAIN
    )
}

/// Requests that failed or were refused.
pub fn unhappy(record: &Record, caption: &str) -> Option<String> {
    let mut table = Table::new("unhappy", caption, &["#time", "#request", "code", "message"]);
    let mut any = false;
    for event in &record.events {
        let (request, code, message) = match &event.what {
            What::Refused { request, code } => (request, code, ""),
            What::Ended { request, code, message } if !super::client::is_good(code) => {
                (request, code, message.as_str())
            }
            _ => continue,
        };
        any = true;
        table.row(vec![
            Cell::Number(duration(event.us as f64)),
            Cell::Number(request.to_string()),
            Cell::Code(code.clone()),
            Cell::Text(message.to_string()),
        ]);
    }
    any.then(|| table.finish())
}

/// What was held at rest, and the environment.
pub fn facts_of_run(record: &Record, caption: &str) -> String {
    let mut table = Table::new("env", caption, &["", ""]);
    let mut row = |name: &str, value: String| {
        table.row(vec![Cell::Text(name.to_string()), Cell::Text(value)]);
    };
    for (name, value) in &record.env {
        row(name, value.clone());
    }
    let devices = record.nodes.iter().take(12).map(|n| match n.devices.as_slice() {
        [] => format!("{} ({})", n.name, n.role),
        devices => format!("{} ({}: {})", n.name, n.role, devices.join(", ")),
    });
    let more = match record.nodes.len().saturating_sub(12) {
        0 => String::new(),
        n => format!(", and {n} more"),
    };
    row("nodes", devices.collect::<Vec<_>>().join(", ") + &more);
    if let Some(hash) = &record.trace_hash {
        row("trace hash", hash.clone());
    }
    match &record.rest {
        None => row("at rest", "the cluster never came to rest".to_string()),
        Some(rest) => {
            row(
                "at rest",
                format!(
                    "{} open and {} waiting requests, {} live blocks, {} of {} replicas up, a fresh \
                     request was answered {}",
                    rest.open_requests,
                    rest.waiting_requests,
                    rest.live_blocks,
                    rest.replicas_up,
                    rest.replicas_wanted,
                    if rest.probe_right { "rightly" } else { "wrongly or not at all" }
                ),
            );
            let blocks = rest.blocks.iter().map(|(r, (sum, all))| format!("{r}: {sum} of {all}"));
            row("free + cached + live", blocks.collect::<Vec<_>>().join("; "));
            rest.audits.iter().for_each(|audit| row("audit", audit.clone()));
        }
    }
    table.finish()
}

fn time(us: Option<u64>) -> String {
    us.map_or_else(|| "–".to_string(), |us| duration(us as f64))
}

pub fn target(target: &Target) -> String {
    match target {
        Target::Node(node) => node.clone(),
        Target::Actor { node, role, instance } if instance.is_empty() => {
            format!("{role} on {node}")
        }
        Target::Actor { node, role, instance } => format!("{role} {instance} on {node}"),
        Target::Shard { replica, stage, rank } => format!("{replica}, stage {stage}, rank {rank}"),
        Target::Links(links) => {
            let all = links.iter().take(4).map(|(from, to)| format!("{from} → {to}"));
            let more = if links.len() > 4 {
                format!(" and {} more", links.len() - 4)
            } else {
                String::new()
            };
            all.collect::<Vec<_>>().join(", ") + &more
        }
        Target::Request(request) => format!("request {request}"),
        Target::All => "all".to_string(),
    }
}

fn expect(expect: Expect) -> &'static str {
    match expect {
        Expect::Masked => "masked",
        Expect::Retried => "retried",
        Expect::FailedOnce => "failed-once",
        Expect::Refused => "refused",
        Expect::Unavailable => "unavailable",
        Expect::Measure => "measure",
    }
}
