//! Many runs of a plan on one page: verdicts, figures by kind, what was covered, what failed.

use super::html::{Cell, Table, badge, document, figure};
use super::metrics::{FaultMetrics, Metrics, Spread};
use super::svg::{Escaped, Plot, Scale, digits, duration, put};
use super::{Outcome, Report};
use crate::fault::Mode;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

const MAX_FAILING: usize = 100;

/// What is kept of one run among many.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RunBrief {
    pub seed: u64,
    pub verdict: Outcome,
    pub why: Vec<String>,
    pub repro: String,
    pub metrics: Metrics,
    /// Kinds of the faults that fired with a proof, in the order of `metrics.faults`.
    pub proven: Vec<bool>,
}

impl RunBrief {
    pub fn of(report: &Report<'_>) -> RunBrief {
        let faults = &report.record.faults;
        RunBrief {
            seed: report.record.seed,
            verdict: report.verdict,
            why: report.why.clone(),
            repro: report.record.repro.clone(),
            metrics: report.metrics.clone(),
            proven: faults.iter().map(|f| f.began_us.is_some() && f.proof.is_some()).collect(),
        }
    }

    fn faults(&self) -> impl Iterator<Item = (&FaultMetrics, bool)> {
        let proven = self.proven.iter().copied().chain(std::iter::repeat(false));
        self.metrics.faults.iter().zip(proven)
    }
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Summary {
    pub schema: String,
    pub plan: String,
    pub mode: Mode,
    pub repro: String,
    /// How long all runs took together, in seconds of real time.
    pub seconds: f64,
    pub runs: Vec<RunBrief>,
    /// The "sometimes" list: what was to happen at least once, and in how many runs it did.
    pub coverage: BTreeMap<String, u64>,
}

/// Figures of one kind over all runs.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct KindFigures {
    pub faults: u64,
    pub fired: u64,
    pub proven: u64,
    pub stalled_or_failed: u64,
    pub mttd: Spread,
    pub mttr: Spread,
}

impl Summary {
    pub fn new(plan: &str, mode: Mode, repro: &str, seconds: f64, runs: Vec<RunBrief>) -> Summary {
        Summary {
            schema: "fault-summary/1".to_string(),
            plan: plan.to_string(),
            mode,
            repro: repro.to_string(),
            seconds,
            runs,
            coverage: BTreeMap::new(),
        }
    }

    /// The worst of all verdicts: a failure, else a run that showed nothing, else a pass.
    pub fn verdict(&self) -> Outcome {
        let worst = |v: &Outcome| match v {
            Outcome::Pass => 0,
            Outcome::Invalid => 1,
            Outcome::Fail => 2,
        };
        self.runs.iter().map(|r| r.verdict).max_by_key(worst).unwrap_or(Outcome::Invalid)
    }

    pub fn count(&self, verdict: Outcome) -> usize {
        self.runs.iter().filter(|r| r.verdict == verdict).count()
    }

    /// By kind's name.
    pub fn kinds(&self) -> BTreeMap<String, KindFigures> {
        let mut kinds: BTreeMap<String, (KindFigures, Vec<u64>, Vec<u64>)> = BTreeMap::new();
        for (m, proven) in self.runs.iter().flat_map(RunBrief::faults) {
            let (figures, mttd, mttr) = kinds.entry(m.kind.clone()).or_default();
            figures.faults += 1;
            figures.fired += u64::from(m.seen != super::metrics::NEVER_FIRED);
            figures.proven += u64::from(proven);
            figures.stalled_or_failed += u64::from(m.stalled + m.failed > 0);
            mttd.extend(m.mttd_us);
            mttr.extend(m.mttr_us);
        }
        let close =
            |(kind, (mut figures, mttd, mttr)): (String, (KindFigures, Vec<u64>, Vec<u64>))| {
                (figures.mttd, figures.mttr) = (Spread::of(&mttd), Spread::of(&mttr));
                (kind, figures)
            };
        kinds.into_iter().map(close).collect()
    }

    pub fn html(&self) -> String {
        let mut out = String::new();
        self.head(&mut out);
        figure(
            &mut out,
            "<b>Figure 1.</b> Share of runs whose longest token gap \
             (<span class=\"key a\"></span>) and MTTR of the worst fault \
             (<span class=\"key b\"></span>) are at most so long.",
            |width| self.distribution(width),
        );
        out += &self.kinds_table();
        if !self.coverage.is_empty() {
            let caption = "<b>Table 2.</b> What has to happen in some run.";
            let mut table = Table::new("coverage", caption, &["situation", "runs"]);
            for (name, runs) in &self.coverage {
                let class = if *runs == 0 { "bad" } else { "" };
                let runs = if *runs == 0 { "never".to_string() } else { runs.to_string() };
                table.row(vec![Cell::Text(name.clone()), Cell::Tagged(runs, class)]);
            }
            out += &table.finish();
        }
        out += &self.failing_table();
        put!(out, "<footer>Repeat: <code>{}</code></footer>\n", Escaped(&self.repro));
        document(&format!("{}: {} runs", self.plan, self.runs.len()), &out)
    }

    fn head(&self, out: &mut String) {
        let mode = match self.mode {
            Mode::Sim => "simulated",
            Mode::Process => "real node processes",
        };
        put!(
            out,
            "<header><p class=\"kicker\">Dunlin fault runs · {mode}</p><h1>{}, {} runs{}</h1>\n\
             <pre>{}</pre></header>\n<dl class=\"keys\">",
            Escaped(&self.plan),
            self.runs.len(),
            badge(self.verdict()),
            Escaped(&self.repro)
        );
        let harm: u64 =
            self.runs.iter().map(|r| r.metrics.duplicated_tokens + r.metrics.lost_tokens).sum();
        let tokens: u64 = self.runs.iter().map(|r| r.metrics.tokens).sum();
        let a_minute = self.runs.len() as f64 * 60.0 / self.seconds.max(1e-3);
        for (name, value) in [
            ("passed", self.count(Outcome::Pass).to_string()),
            ("failed", self.count(Outcome::Fail).to_string()),
            ("invalid", self.count(Outcome::Invalid).to_string()),
            ("tokens delivered", tokens.to_string()),
            ("lost or repeated", harm.to_string()),
            ("runs a minute", digits(a_minute)),
        ] {
            put!(out, "<div><dt>{name}</dt><dd>{}</dd></div>", Escaped(&value));
        }
        out.push_str("</dl>\n");
    }

    /// Cumulative distributions over the runs.
    fn distribution(&self, width: f64) -> String {
        let gaps = sorted(self.runs.iter().filter_map(|r| r.metrics.longest_gap_us));
        let mttr = sorted(self.runs.iter().filter_map(|r| r.metrics.mttr_us));
        let all = || gaps.iter().chain(&mttr).map(|us| (*us).max(1) as f64);
        let least = all().fold(1e6, f64::min);
        let most = all().fold(1e3, f64::max);
        let (left, top, right, bottom) = (58.0, 10.0, width - 22.0, 184.0);
        let x = Scale::log((least, most), (left, right));
        let y = Scale::linear((0.0, 1.0), (bottom, top));
        let mut plot = Plot::new((width, 220.0), (left, top, right, bottom), x, y);
        plot.y_axis(4, |v| format!("{} %", digits(v * 100.0)));
        for (values, class) in [(&gaps, "line-a"), (&mttr, "line-b")] {
            let n = values.len() as f64;
            let step = values.len().div_ceil(200).max(1);
            let points: Vec<_> = values
                .iter()
                .enumerate()
                .filter(|(i, _)| i % step == 0 || i + 1 == values.len())
                .map(|(i, us)| ((*us).max(1) as f64, (i + 1) as f64 / n))
                .collect();
            plot.polyline(&points, class);
        }
        plot.x_axis(x, 5, "time", duration);
        let class = if width > 500.0 { "wide" } else { "narrow" };
        plot.finish(class, "Cumulative distribution of longest gap and MTTR over the runs")
    }

    fn kinds_table(&self) -> String {
        let heads = [
            "kind",
            "#faults",
            "#fired",
            "#proven",
            "#harmful",
            "#MTTD p50",
            "#p99",
            "#MTTR p50",
            "#p99",
        ];
        let caption = "<b>Table 1.</b> By kind. Harmful: some request stalled or failed.";
        let mut table = Table::new("kinds", caption, &heads);
        let time = |us: Option<u64>| {
            Cell::Number(us.map_or_else(|| "–".to_string(), |us| duration(us as f64)))
        };
        for (kind, k) in self.kinds() {
            let count = |n: u64| Cell::Number(n.to_string());
            table.row(vec![
                Cell::Code(kind),
                count(k.faults),
                count(k.fired),
                count(k.proven),
                count(k.stalled_or_failed),
                time(k.mttd.p50),
                time(k.mttd.p99),
                time(k.mttr.p50),
                time(k.mttr.p99),
            ]);
        }
        table.finish()
    }

    fn failing_table(&self) -> String {
        let failing: Vec<_> = self.runs.iter().filter(|r| r.verdict != Outcome::Pass).collect();
        if failing.is_empty() {
            return "<p>Every run passed.</p>\n".to_string();
        }
        let caption = "<b>Table 3.</b> Runs that did not pass, and what repeats each.";
        let mut table = Table::new("seeds", caption, &["#seed", "", "why", "repeat"]);
        for run in failing.iter().take(MAX_FAILING) {
            table.row(vec![
                Cell::Number(run.seed.to_string()),
                Cell::Html(badge(run.verdict)),
                Cell::Text(run.why.join("; ")),
                Cell::Code(run.repro.clone()),
            ]);
        }
        if let Some(more) = failing.len().checked_sub(MAX_FAILING).filter(|n| *n > 0) {
            table.group(&format!("and {more} more, in summary.json"), 4);
        }
        table.finish()
    }
}

fn sorted(values: impl Iterator<Item = u64>) -> Vec<u64> {
    let mut values: Vec<u64> = values.collect();
    values.sort_unstable();
    values
}
