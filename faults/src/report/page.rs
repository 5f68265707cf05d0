//! The page of one run.

use super::figures::Story;
use super::html::{badge, document, figure};
use super::svg::{Escaped, duration, put};
use super::tables::{self, Unit};
use super::{Outcome, Report};
use crate::fault::Mode;

pub fn page(report: &Report<'_>, earlier: Option<&Report<'_>>) -> String {
    let mut out = String::new();
    head(&mut out, report, earlier);
    keys(&mut out, report);
    figures(&mut out, report, earlier);
    out.push_str("<h2>Faults and what came of them</h2>\n");
    out += &tables::faults(
        report,
        "<b>Table 1.</b> Faults, numbered as in the figures. MTTD: until the first fact about it; \
         MTTR: until the last delayed request went on.",
    );
    out += &tables::invariants(report, "<b>Table 2.</b> Invariants.");
    if let Some(stuck) = &report.record.stuck {
        put!(out, "<p class=\"bad\">Stuck: {}</p>\n", Escaped(stuck));
    }
    if let Some(measured) = &report.measured {
        let text = measured.to_string();
        put!(
            out,
            "<p>Answers under faults that may change tokens by design: {}.</p>\n",
            Escaped(&text)
        );
    }
    let unhappy = "<b>Table 3.</b> Requests that failed or were refused.";
    out += &tables::unhappy(report.record, unhappy)
        .unwrap_or_else(|| "<p>No request failed, none was refused.</p>\n".to_string());
    out.push_str("<h2>Figures</h2>\n");
    let class = if earlier.is_some() { "pair wide" } else { "pair" };
    put!(out, "<div class=\"{class}\">\n<div>");
    out += &tables::metrics(
        report,
        earlier,
        "<b>Table 4.</b> Metrics, as docs/faults.md defines them.",
    );
    out.push_str("</div>\n<div>");
    out += &tables::latencies(
        report,
        earlier,
        "<b>Table 5.</b> Time to first token and time between tokens, before the first fault, until \
         everything was healed, and after.",
    );
    out.push_str("</div>\n</div>\n<h2>What the nodes told</h2>\n");
    out += &tables::events(
        report.record,
        "<b>Table 6.</b> Supervision, membership and placement, with the faults in red.",
    );
    out +=
        &tables::facts_of_run(report.record, "<b>Table 7.</b> Environment, and the books at rest.");
    put!(out, "<footer>Repeat this run: <code>{}</code></footer>\n", Escaped(&report.record.repro));
    let title = format!("{}: {}", report.record.plan, report.verdict);
    document(&title, &out)
}

fn head(out: &mut String, report: &Report<'_>, earlier: Option<&Report<'_>>) {
    let record = report.record;
    let mode = match record.mode {
        Mode::Sim => "simulated, virtual time",
        Mode::Process => "real node processes",
    };
    put!(
        out,
        "<header><p class=\"kicker\">Dunlin fault run · {mode} · {} nodes · seed {}</p>\n<h1>{}{}</h1>\n",
        record.nodes.len(),
        record.seed,
        Escaped(&record.plan),
        badge(report.verdict)
    );
    if !report.about.is_empty() {
        put!(out, "<p class=\"about\">{}</p>\n", Escaped(&report.about));
    }
    if !report.why.is_empty() {
        let class = if report.verdict == Outcome::Fail { "why" } else { "why warn" };
        put!(out, "<ul class=\"{class}\">");
        for line in &report.why {
            put!(out, "<li>{}</li>", Escaped(line));
        }
        out.push_str("</ul>\n");
    }
    put!(out, "<pre>{}</pre>\n", Escaped(&record.repro));
    if let Some(earlier) = earlier {
        let r = earlier.record;
        put!(
            out,
            "<p>Compared with {} (seed {}, {}).</p>\n",
            Escaped(&r.plan),
            r.seed,
            earlier.verdict
        );
    }
    out.push_str("</header>\n");
}

fn keys(out: &mut String, report: &Report<'_>) {
    let m = &report.metrics;
    let time = |us: Option<u64>| Unit::Time.show(us.map(|us| us as f64));
    let harm = m.duplicated_tokens + m.lost_tokens;
    let fired = report.record.faults.iter().filter(|f| f.began_us.is_some()).count();
    out.push_str("<dl class=\"keys\">");
    for (name, value) in [
        ("answered / accepted", format!("{} / {}", m.ended_well, m.accepted)),
        ("tokens lost or repeated", harm.to_string()),
        ("faults fired", format!("{fired} / {}", report.record.faults.len())),
        ("longest token gap", time(m.longest_gap_us)),
        ("MTTD, worst", time(m.mttd_us)),
        ("MTTR, worst", time(m.mttr_us)),
    ] {
        put!(out, "<div><dt>{name}</dt><dd>{}</dd></div>", Escaped(&value));
    }
    out.push_str("</dl>\n");
}

fn figures(out: &mut String, report: &Report<'_>, earlier: Option<&Report<'_>>) {
    let story = Story::new(report.record, report.slo);
    let other = earlier.map(|e| Story::new(e.record, e.slo));
    let band = "<span class=\"box band\"></span> faults, by number";
    let objective = match (report.slo.ttft_us, report.slo.gap_us) {
        (None, None) => String::new(),
        (ttft, gap) => {
            let one = |name: &str, us: Option<u64>| {
                us.map(|us| format!("{name} ≤ {}", duration(us as f64)))
            };
            let all: Vec<_> = one("TTFT", ttft).into_iter().chain(one("gap", gap)).collect();
            format!(" within {}", all.join(", "))
        }
    };
    let compared = if other.is_some() { "; <span class=\"key b\"></span> earlier run" } else { "" };
    figure(
        out,
        &format!(
            "<b>Figure 1.</b> Goodput, tokens/s. <span class=\"key a\"></span> tokens of requests that \
             ended well{objective}; <span class=\"key c\"></span> all tokens, where they differ; \
             <span class=\"key level\"></span> level before the first fault{compared}; {band}."
        ),
        |width| story.goodput(&report.metrics, other.as_ref(), width),
    );
    let compared =
        if other.is_some() { "; <span class=\"key b\"></span> largest, earlier run" } else { "" };
    let limit = match report.slo.gap_us {
        Some(_) => "; <span class=\"key level\"></span> objective",
        None => "",
    };
    figure(
        out,
        &format!(
            "<b>Figure 2.</b> Gaps between the tokens of a request, by when they ended. Dots: single \
             gaps; <span class=\"key a\"></span> median{limit}{compared}; ○ the longest."
        ),
        |width| story.gaps(&report.metrics, other.as_ref(), width),
    );
    let left_out = match story.lanes(super::figures::WIDE).1 {
        0 => String::new(),
        n => format!(" {n} more nodes are not drawn; nothing above happened to them first."),
    };
    figure(
        out,
        &format!(
            "<b>Figure 3.</b> Nodes: <span class=\"box up\"></span> up, <span class=\"box starting\"></span> \
             starting, <span class=\"box paused\"></span> paused, <span class=\"box draining\"></span> \
             draining, <span class=\"box down\"></span> down; ▾ a fault that names the node.{left_out}"
        ),
        |width| story.lanes(width).0,
    );
}
