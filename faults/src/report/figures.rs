//! The figures of a run's page: goodput, token gaps, and the state of each node, over one time
//! axis, with the faults as bands. Each is drawn for a wide and for a narrow page.

use super::client::{self, Seen};
use super::metrics::{Metrics, Slo, Windows, is_within};
use super::svg::{Plot, Scale, digits, duration, short};
use crate::fault::Target;
use crate::record::{FaultRun, Record, What};
use std::collections::{BTreeMap, BTreeSet};

/// Widths in CSS pixels: of a text column on a screen or on A4, and of a telephone.
pub const WIDE: f64 = 720.0;
pub const NARROW: f64 = 350.0;

/// Nodes that get a line of their own.
const MAX_LANES: usize = 24;
const MAX_BINS: u64 = 180;
const MAX_DOTS: usize = 600;

/// What the figures of one run share.
pub struct Story<'a> {
    record: &'a Record,
    seen: BTreeMap<u64, Seen>,
    slo: Slo,
    windows: Windows,
    /// End of the time axis.
    end: u64,
}

/// Tokens over time. Values are per second, bins in microseconds.
struct Rates {
    bin: u64,
    good: Vec<f64>,
    all: Vec<f64>,
}

impl<'a> Story<'a> {
    pub fn new(record: &'a Record, slo: Slo) -> Story<'a> {
        let seen = client::seen(record);
        let windows = Windows::of(record);
        Story { record, seen, slo, windows, end: windows.end + windows.end / 50 }
    }

    fn rates(&self, end: u64) -> Rates {
        let tokens: usize = self.seen.values().map(|s| s.tokens.len()).sum();
        // Eight tokens a bin, so that a line shows the rate and not single tokens.
        let bins = (tokens as u64 / 8).clamp(24, MAX_BINS);
        let bin = end.div_ceil(bins).max(1);
        let mut rates =
            Rates { bin, good: vec![0.0; bins as usize], all: vec![0.0; bins as usize] };
        for seen in self.seen.values() {
            let good = is_within(seen, self.slo);
            for us in &seen.tokens {
                let at = (us / bin) as usize;
                let one = 1e6 / bin as f64;
                rates.all.get_mut(at).into_iter().for_each(|v| *v += one);
                rates.good.get_mut(at).filter(|_| good).into_iter().for_each(|v| *v += one);
            }
        }
        rates
    }

    /// Tokens a second; `other` is an earlier run.
    pub fn goodput(&self, metrics: &Metrics, other: Option<&Story<'_>>, width: f64) -> String {
        let end = self.end.max(other.map_or(0, |o| o.end));
        let rates = self.rates(end);
        let theirs = other.map(|o| o.rates(end));
        let peak = rates.all.iter().chain(theirs.iter().flat_map(|r| &r.good));
        let top = peak.copied().fold(1.0, f64::max) * 1.08;
        let mut plot = self.frame(width, 232.0, end, |range| Scale::linear((0.0, top), range));
        plot.y_axis(4, digits);
        let marked = self.bands(&mut plot);
        plot.area(rates.bin as f64, &rates.good, "fill-a");
        let some = |values: &[f64]| values.iter().copied().map(Some).collect::<Vec<_>>();
        if rates.all != rates.good {
            plot.steps(rates.bin as f64, &some(&rates.all), "line-c");
        }
        plot.steps(rates.bin as f64, &some(&rates.good), "line-a");
        if let Some(theirs) = &theirs {
            plot.steps(theirs.bin as f64, &some(&theirs.good), "line-b");
        }
        if let Some(level) = metrics.goodput_before {
            let y = plot.y.at(level);
            plot.line((plot.left, y), (plot.right, y), "level");
        }
        self.x_axis(&mut plot, end);
        self.labels(&mut plot, marked);
        plot.finish(&class(width), "Goodput in tokens per second over time, with fault bands")
    }

    /// Each wait between two tokens of a request, by when it ended; log scale.
    pub fn gaps(&self, metrics: &Metrics, other: Option<&Story<'_>>, width: f64) -> String {
        let end = self.end.max(other.map_or(0, |o| o.end));
        let gaps: Vec<(u64, u64, u64)> = self
            .seen
            .iter()
            .flat_map(|(n, s)| s.gaps().map(|(us, gap)| (us, gap, *n)).collect::<Vec<_>>())
            .collect();
        let theirs: Vec<(u64, u64, u64)> = other.map_or_else(Vec::new, |o| {
            let gaps = o.seen.iter().flat_map(|(n, s)| s.gaps().map(move |(u, g)| (u, g, *n)));
            gaps.collect()
        });
        let mut sizes: Vec<u64> = gaps.iter().chain(&theirs).map(|(_, gap, _)| *gap).collect();
        sizes.sort_unstable();
        // The smallest of all would stretch the scale for nothing.
        let least = sizes.get(sizes.len() / 100).copied().unwrap_or(1_000).max(1);
        let most = sizes.last().copied().into_iter().chain(self.slo.gap_us).max().unwrap_or(10_000);
        let (least, most) = (least as f64, most as f64);
        let mut plot = self.frame(width, 216.0, end, |range| Scale::log((least, most), range));
        plot.y_axis(4, duration);
        let marked = self.bands(&mut plot);
        if let Some(limit) = self.slo.gap_us {
            let y = plot.y.at(limit as f64);
            plot.line((plot.left, y), (plot.right, y), "level");
        }
        let bin = end.div_ceil(72).max(1);
        // The largest are drawn; what is left out lies under the median line's neighbourhood.
        let mut largest = gaps.clone();
        largest.sort_unstable_by_key(|(us, gap, n)| (std::cmp::Reverse(*gap), *us, *n));
        for (us, gap, n) in largest.iter().take(MAX_DOTS) {
            let at = (plot.x.at(*us as f64), plot.y.at((*gap).max(1) as f64));
            plot.dot(at, 1.4, "dot", &format!("request {n}: {}", duration(*gap as f64)));
        }
        if !theirs.is_empty() {
            plot.steps(bin as f64, &per_bin(&theirs, bin, u64::MAX), "line-b");
        }
        plot.steps(bin as f64, &per_bin(&gaps, bin, 50), "line-a");
        if let (Some((n, us)), Some(gap)) = (metrics.longest_gap_of, metrics.longest_gap_us) {
            let at = (plot.x.at(us as f64), plot.y.at(gap.max(1) as f64));
            plot.dot(at, 3.5, "ring", "the longest gap");
            let late = at.0 > (plot.left + plot.right) / 2.0;
            let (x, side) = if late { (at.0 - 7.0, "end") } else { (at.0 + 7.0, "start") };
            let text = format!("request {n}: {}", duration(gap as f64));
            plot.text(x, at.1 + 3.5, &format!("note {side}"), &text);
        }
        self.x_axis(&mut plot, end);
        self.labels(&mut plot, marked);
        plot.finish(&class(width), "Gaps between tokens over time on a log scale, with fault bands")
    }

    /// One line a node: up, starting, paused, draining, down; marks where a fault hit it.
    /// Returns how many nodes have no line.
    pub fn lanes(&self, width: f64) -> (String, usize) {
        let (lanes, left_out) = self.lane_nodes();
        let step = 22.0;
        let height = 64.0 + step * lanes.len() as f64;
        let mut plot =
            self.frame(width, height, self.end, |range| Scale::linear((0.0, 1.0), range));
        let marked = self.bands(&mut plot);
        for (i, node) in lanes.iter().enumerate() {
            let middle = plot.top + step * (i as f64 + 0.5);
            plot.text(plot.left - 6.0, middle + 3.5, "lane end", &short(node, 9));
            for (from, to, state) in self.states(node) {
                let x = (plot.x.at(from as f64), plot.x.at(to as f64));
                let half = if state == "down" { 1.0 } else { 5.0 };
                let class = format!("state {}", state_class(&state));
                let title = format!(
                    "{node}: {state}, {} to {}",
                    duration(from as f64),
                    duration(to as f64)
                );
                plot.rect(x, (middle - half, middle + half), &class, &title);
            }
            for (number, fault) in self.fired() {
                let Some(began) = fault.began_us.filter(|_| self.hits(fault, node)) else {
                    continue;
                };
                let x = plot.x.at(began as f64);
                let title = format!("{number}: {} ({})", fault.fault.id, fault.kind().name());
                plot.mark((x, middle + 1.0), "mark", &title);
            }
        }
        self.x_axis(&mut plot, self.end);
        self.labels(&mut plot, marked);
        (plot.finish(&class(width), "State of each node over time, with fault marks"), left_out)
    }

    /// Space for a plot of this height, with its time axis.
    fn frame(&self, width: f64, height: f64, end: u64, y: impl Fn((f64, f64)) -> Scale) -> Plot {
        let (left, top, right, bottom) = (58.0, 20.0, width - 8.0, height - 36.0);
        let x = Scale::linear((0.0, end as f64), (left, right));
        Plot::new((width, height), (left, top, right, bottom), x, y((bottom, top)))
    }

    fn x_axis(&self, plot: &mut Plot, end: u64) {
        let seconds = Scale::linear((0.0, end as f64 / 1e6), (plot.left, plot.right));
        let about = if plot.width > 500.0 { 9 } else { 5 };
        plot.x_axis(seconds, about, "time since the workload began, s", digits);
    }

    fn fired(&self) -> impl Iterator<Item = (usize, &FaultRun)> {
        let numbered = self.record.faults.iter().enumerate().map(|(i, f)| (i + 1, f));
        numbered.filter(|(_, f)| f.began_us.is_some())
    }

    /// Draws faults and phases behind the data; returns where each number belongs.
    fn bands(&self, plot: &mut Plot) -> Vec<(f64, usize)> {
        let mut last = plot.left;
        for (edge, name) in [
            (self.record.phases.warmup_us, "warm-up"),
            (self.record.phases.chaos_us, "chaos"),
            (self.record.phases.settle_us, "settle"),
        ] {
            if edge > 0 && edge < self.end {
                let x = plot.x.at(edge as f64);
                plot.line((x, plot.top), (x, plot.bottom), "phase");
                // A short phase has no room for its name.
                if plot.width > 500.0 && x - last >= 48.0 {
                    plot.text(x - 3.0, plot.bottom - 4.0, "phase-name end", name);
                }
                last = x;
            }
        }
        let mut marks = Vec::new();
        for (number, fault) in self.fired() {
            let Some(began) = fault.began_us else { continue };
            let x = plot.x.at(began as f64);
            let end = fault.ended_us.map_or(x, |us| plot.x.at(us as f64));
            let title = format!(
                "{number}: {} ({}) at {}",
                fault.fault.id,
                fault.kind().name(),
                duration(began as f64)
            );
            if end - x >= 1.5 {
                plot.rect((x, end), (plot.top, plot.bottom), "band", &title);
            }
            plot.line((x, plot.top), (x, plot.bottom), "fault");
            marks.push((x, number));
        }
        marks.sort_by(|a, b| a.0.total_cmp(&b.0));
        marks
    }

    /// Fault numbers above the plot; where they would overlap, the later one is left out.
    fn labels(&self, plot: &mut Plot, marks: Vec<(f64, usize)>) {
        let mut free = f64::NEG_INFINITY;
        for (x, number) in marks {
            let text = number.to_string();
            let half = 3.5 * text.len() as f64 + 2.0;
            if x - half >= free {
                plot.text(x, plot.top - 6.0, "number mid", &text);
                free = x + half;
            }
        }
    }

    /// Nodes that something happened to first; how many others are left out.
    fn lane_nodes(&self) -> (Vec<String>, usize) {
        let nodes = &self.record.nodes;
        if nodes.len() <= MAX_LANES {
            return (nodes.iter().map(|n| n.name.clone()).collect(), 0);
        }
        let mut touched = BTreeSet::new();
        for event in &self.record.events {
            if let What::Node { node, state } = &event.what
                && !(state == "up" && event.us == 0)
            {
                touched.insert(node.as_str());
            }
        }
        let is_hit = |name: &str| self.fired().any(|(_, f)| self.hits(f, name));
        let interesting = |name: &str| touched.contains(name) || is_hit(name);
        let mut names: Vec<&str> = nodes.iter().map(|n| n.name.as_str()).collect();
        names.sort_by_key(|name| !interesting(name));
        let lanes: Vec<_> = names.iter().take(MAX_LANES).map(ToString::to_string).collect();
        (lanes, nodes.len() - MAX_LANES)
    }

    /// Does the fault lie on this node? A shard's is where it was placed last.
    fn hits(&self, run: &FaultRun, node: &str) -> bool {
        match &run.fault.target {
            Target::Node(name) | Target::Actor { node: name, .. } => name == node,
            Target::Links(links) => links.iter().any(|(from, to)| from == node || to == node),
            Target::Shard { replica, stage, rank } => {
                let began = run.began_us.unwrap_or(0);
                let mut placed = self.record.events.iter().filter_map(|event| match &event.what {
                    What::Placement { replica: of, shards, .. }
                        if of == replica && event.us <= began =>
                    {
                        shards.iter().find(|s| s.stage == *stage && s.rank == *rank)
                    }
                    _ => None,
                });
                placed.next_back().is_some_and(|shard| shard.node == node)
            }
            Target::Request(_) | Target::All => false,
        }
    }

    /// (from, to, state); a node of which nothing was told is up throughout.
    fn states(&self, node: &str) -> Vec<(u64, u64, String)> {
        let mut segments = Vec::new();
        let (mut from, mut state) = (0, "up".to_string());
        for event in &self.record.events {
            let What::Node { node: whose, state: now } = &event.what else { continue };
            if whose != node {
                continue;
            }
            let us = event.us.min(self.windows.end);
            if us > from {
                segments.push((from, us, state));
            }
            (from, state) = (us, now.clone());
        }
        segments.push((from, self.end, state));
        segments
    }
}

fn class(width: f64) -> String {
    (if width > 500.0 { "wide" } else { "narrow" }).to_string()
}

/// Known states have a look of their own, anything else is shown as trouble.
fn state_class(state: &str) -> &'static str {
    match state {
        "up" => "up",
        "starting" => "starting",
        "draining" => "draining",
        "paused" => "paused",
        "down" => "down",
        _ => "other",
    }
}

/// The percentile of each bin's gaps; above 100: the largest.
fn per_bin(gaps: &[(u64, u64, u64)], bin: u64, percent: u64) -> Vec<Option<f64>> {
    let mut bins: BTreeMap<u64, Vec<u64>> = BTreeMap::new();
    for (us, gap, _) in gaps {
        bins.entry(us / bin).or_default().push(*gap);
    }
    let last = bins.keys().last().copied().unwrap_or(0);
    (0..=last)
        .map(|i| {
            let values = bins.get_mut(&i)?;
            values.sort_unstable();
            let at = (values.len() as u64 * percent.min(100)).div_ceil(100).max(1) - 1;
            values.get(at as usize).map(|gap| *gap as f64)
        })
        .collect()
}
