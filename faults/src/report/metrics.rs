//! The figures of a run, by the definitions of `docs/faults.md`.
//!
//! *Before* is up to the first fault, *during* from there until everything was healed (the end of
//! the chaos phase; without one, the end of the last fault), *after* is the rest. A request is
//! *delayed* by a wait for a token of more than five times the 99th percentile of *before*, and
//! *stalls* by one that is longer than the plan says (`stall_us`, else its objectives).

use super::client::{self, Seen};
use crate::record::{FaultRun, Record, What};
use dunlin_actors::facts;
use dunlin_runtime::faults::names;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Objectives that goodput is measured against; `None`: any.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Slo {
    pub ttft_us: Option<u64>,
    pub gap_us: Option<u64>,
    /// A wait for a further token that is longer is a stall.
    pub stall_us: Option<u64>,
}

/// A run in numbers. Times in microseconds; `None` where there was nothing to measure.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct Metrics {
    pub faults: Vec<FaultMetrics>,
    /// Of the worst fault.
    pub mttd_us: Option<u64>,
    pub mttr_us: Option<u64>,
    /// Tokens a second of requests that ended well and met the objectives.
    pub goodput_before: Option<f64>,
    pub goodput_during: Option<f64>,
    pub goodput_after: Option<f64>,
    /// Tokens that the level of *before* would have brought and that did not come, from the first
    /// fault until goodput was back at 95 % or the last request was asked.
    pub lost_goodput_tokens: Option<f64>,
    /// From the first fault until goodput was back at 95 % of *before*.
    pub recovered_us: Option<u64>,
    pub longest_gap_us: Option<u64>,
    /// Whose gap that is, and when it ended.
    pub longest_gap_of: Option<(u64, u64)>,
    pub ttft: [Spread; 3],
    pub itl: [Spread; 3],
    pub asked: u64,
    pub accepted: u64,
    pub refused: u64,
    pub ended_well: u64,
    pub failed: u64,
    pub tokens: u64,
    pub duplicated_tokens: u64,
    pub lost_tokens: u64,
    pub replays: u64,
    pub recomputed_tokens: u64,
    pub prefix_hit_tokens: u64,
    pub epochs: u64,
    pub restarts: u64,
    pub escalations: u64,
    pub stale_refused: u64,
    /// Peers that were given up while nothing took them, their links or their actors away.
    #[serde(default)]
    pub false_deaths: u64,
    /// Bytes of weights that shards loaded after the first fault: all that moves between machines
    /// in a recovery besides activations, since KV blocks are computed anew.
    #[serde(default)]
    pub weight_bytes: u64,
    /// The slowest tenant's tokens a second of open request, as a share of the fastest's.
    #[serde(default)]
    pub fairness: Option<f64>,
    /// Share of the requests open during a fault that stalled or failed; of the worst fault.
    pub blast_radius: Option<f64>,
}

/// Median and tail of a set of times.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
pub struct Spread {
    pub count: u64,
    pub p50: Option<u64>,
    pub p99: Option<u64>,
}

/// What one fault did.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct FaultMetrics {
    pub id: String,
    pub kind: String,
    /// Fault start to the first fact about the trouble.
    pub mttd_us: Option<u64>,
    /// Fault start to the first new token of the last request that it delayed; `None`: none was.
    pub mttr_us: Option<u64>,
    pub open: u64,
    pub stalled: u64,
    pub failed: u64,
    pub replayed: u64,
    pub refusals: u64,
    /// What clients saw, in words.
    pub seen: String,
}

/// What is `seen` of a fault that did not begin.
pub const NEVER_FIRED: &str = "never fired";

pub fn metrics(record: &Record, slo: Slo) -> Metrics {
    let seen = client::seen(record);
    let windows = Windows::of(record);
    let base = Baseline::of(&seen, &windows, slo);
    let faults: Vec<_> =
        record.faults.iter().map(|fault| one_fault(record, fault, &seen, base)).collect();
    let mut m = Metrics {
        mttd_us: faults.iter().filter_map(|f| f.mttd_us).max(),
        mttr_us: faults.iter().filter_map(|f| f.mttr_us).max(),
        blast_radius: faults
            .iter()
            .filter(|f| f.open > 0)
            .map(|f| (f.stalled + f.failed) as f64 / f.open as f64)
            .max_by(f64::total_cmp),
        faults,
        ..Metrics::default()
    };
    count_clients(&mut m, &seen);
    count_facts(&mut m, record, windows.first_fault);
    m.false_deaths = crate::invariant::false_deaths(record).count() as u64;
    m.fairness = fairness(record, &seen);
    m.ttft = windows.spread(seen.values().filter_map(|s| Some((*s.tokens.first()?, s.ttft()?))));
    m.itl = windows.spread(seen.values().flat_map(|s| s.gaps().collect::<Vec<_>>()));
    goodput(&mut m, &seen, &windows, slo);
    m
}

/// When *before* and *during* end.
#[derive(Debug, Clone, Copy)]
pub struct Windows {
    pub first_fault: Option<u64>,
    pub healed: u64,
    pub end: u64,
}

impl Windows {
    pub fn of(record: &Record) -> Windows {
        let first_fault = record.faults.iter().filter_map(|f| f.began_us).min();
        let end = client::end_us(record);
        let last =
            record.faults.iter().flat_map(|f| f.began_us.into_iter().chain(f.ended_us)).max();
        let healed = match record.phases.chaos_us {
            0 => last.unwrap_or(end),
            chaos => chaos.min(end),
        };
        Windows { first_fault, healed: healed.max(first_fault.unwrap_or(0)), end }
    }

    fn index(&self, us: u64) -> usize {
        match self.first_fault {
            Some(first) if us >= first => {
                if us < self.healed {
                    1
                } else {
                    2
                }
            }
            _ => 0,
        }
    }

    fn spread(&self, samples: impl Iterator<Item = (u64, u64)>) -> [Spread; 3] {
        let mut sets: [Vec<u64>; 3] = Default::default();
        for (us, value) in samples {
            if let Some(set) = sets.get_mut(self.index(us)) {
                set.push(value);
            }
        }
        sets.map(|set| Spread::of(&set))
    }
}

impl Spread {
    pub fn of(values: &[u64]) -> Spread {
        let mut sorted = values.to_vec();
        sorted.sort_unstable();
        Spread { count: sorted.len() as u64, p50: rank(&sorted, 50), p99: rank(&sorted, 99) }
    }
}

/// The nearest-rank percentile of sorted values.
fn rank(sorted: &[u64], percent: usize) -> Option<u64> {
    let index = (sorted.len() * percent).div_ceil(100).saturating_sub(1);
    sorted.get(index).copied()
}

/// For first and for further tokens: from where a wait is a delay, and from where a stall.
#[derive(Debug, Clone, Copy)]
struct Baseline {
    ttft: (u64, u64),
    gap: (u64, u64),
}

impl Baseline {
    fn of(seen: &BTreeMap<u64, Seen>, windows: &Windows, slo: Slo) -> Baseline {
        let before = |us: u64| windows.first_fault.is_none_or(|first| us < first);
        let ttft: Vec<u64> = seen
            .values()
            .filter(|s| s.tokens.first().is_some_and(|&us| before(us)))
            .filter_map(Seen::ttft)
            .collect();
        let gaps: Vec<u64> = seen
            .values()
            .flat_map(|s| s.gaps().filter(|(us, _)| before(*us)).collect::<Vec<_>>())
            .map(|(_, gap)| gap)
            .collect();
        // With nothing measured before, a tenth of a second is taken for usual.
        let usual = |values: &[u64]| Spread::of(values).p99.unwrap_or(100_000).max(1_000) * 5;
        let pair = |values: &[u64], most: Option<u64>| {
            let usual = usual(values);
            (usual.min(most.unwrap_or(usual)), most.unwrap_or(usual))
        };
        Baseline { ttft: pair(&ttft, slo.ttft_us), gap: pair(&gaps, slo.stall_us.or(slo.gap_us)) }
    }
}

fn one_fault(
    record: &Record,
    run: &FaultRun,
    seen: &BTreeMap<u64, Seen>,
    base: Baseline,
) -> FaultMetrics {
    let mut m = FaultMetrics {
        id: run.fault.id.clone(),
        kind: run.kind().name().to_string(),
        mttd_us: None,
        mttr_us: None,
        open: 0,
        stalled: 0,
        failed: 0,
        replayed: 0,
        refusals: 0,
        seen: NEVER_FIRED.to_string(),
    };
    let Some(began) = run.began_us else { return m };
    let horizon = horizon(record, run, began);
    m.mttd_us = run.detected_us.map(|us| us.saturating_sub(began));
    // Whoever asks before the last delayed request goes on was hit as well.
    let ended = run.ended_us.unwrap_or(began).max(began);
    count_harm(&mut m, seen, base, (began, ended));
    let until = ended.max(began + m.mttr_us.unwrap_or(0)).min(horizon);
    count_harm(&mut m, seen, base, (began, until));
    for event in &record.events {
        if let What::Fact { name, .. } = &event.what
            && (began..=horizon).contains(&event.us)
        {
            m.replayed += u64::from(name == facts::REQUEST_REPLAYED);
            m.refusals += u64::from(name == facts::STALE_REFUSED || name == names::FRAME_REFUSED);
        }
    }
    m.seen = in_words(&m);
    m
}

/// Of the requests open in the window: who stalled, who failed, and when the last delayed one went
/// on.
fn count_harm(
    m: &mut FaultMetrics,
    seen: &BTreeMap<u64, Seen>,
    base: Baseline,
    (began, until): (u64, u64),
) {
    (m.open, m.stalled, m.failed, m.mttr_us) = (0, 0, 0, None);
    for request in seen.values().filter(|s| s.open_in(began, until)) {
        m.open += 1;
        if request.failed() {
            m.failed += 1;
            continue;
        }
        let mut stalled = false;
        for (nth, (from, to)) in request.waits(u64::MAX).into_iter().enumerate() {
            if from > until || to <= began || to == u64::MAX {
                continue;
            }
            let wait = to - from;
            let (usual, most) = if nth == 0 { base.ttft } else { base.gap };
            stalled |= wait > most;
            if wait > usual {
                m.mttr_us = m.mttr_us.max(Some(to - began));
            }
        }
        m.stalled += u64::from(stalled);
    }
}

/// A fault answers for what happens up to its end, or until another one begins after that.
fn horizon(record: &Record, run: &FaultRun, began: u64) -> u64 {
    let ended = run.ended_us.unwrap_or(began).max(began);
    let later = record.faults.iter().filter_map(|f| f.began_us).filter(|&us| us > ended).min();
    later.unwrap_or(u64::MAX)
}

fn in_words(m: &FaultMetrics) -> String {
    let parts =
        [(m.stalled, "stalled"), (m.replayed, "replayed"), (m.refusals, "messages refused")];
    let parts = parts.iter().filter(|(n, _)| *n > 0).map(|(n, what)| format!("{what}: {n}"));
    let end = if m.failed > 0 { format!("{} failed", m.failed) } else { "masked".to_string() };
    std::iter::once(end).chain(parts).collect::<Vec<_>>().join("; ")
}

fn count_clients(m: &mut Metrics, seen: &BTreeMap<u64, Seen>) {
    for (number, s) in seen {
        m.asked += u64::from(s.submitted.is_some());
        m.accepted += u64::from(s.accepted);
        m.refused += u64::from(s.refused.is_some());
        m.ended_well += u64::from(s.ended_well());
        m.failed += u64::from(s.failed());
        m.tokens += s.tokens.len() as u64;
        m.duplicated_tokens += s.duplicated;
        m.lost_tokens += s.lost;
        for (us, gap) in s.gaps() {
            if m.longest_gap_us.is_none_or(|longest| gap > longest) {
                m.longest_gap_us = Some(gap);
                m.longest_gap_of = Some((*number, us));
            }
        }
    }
}

/// Of what tenants got while they waited for it; `None` with fewer than two of them.
fn fairness(record: &Record, seen: &BTreeMap<u64, Seen>) -> Option<f64> {
    let mut tenants: BTreeMap<&str, (u64, u64)> = BTreeMap::new();
    for (number, s) in seen.iter().filter(|(_, s)| s.ended_well()) {
        let (Some(info), Some(from)) = (record.requests.get(number), s.submitted) else { continue };
        let to = s.ended.as_ref().map_or(from, |(us, _)| *us);
        let (tokens, us) = tenants.entry(&info.tenant).or_default();
        (*tokens, *us) = (*tokens + s.tokens.len() as u64, *us + to.saturating_sub(from));
    }
    let rate = |(tokens, us): &(u64, u64)| (*us > 0).then(|| *tokens as f64 / *us as f64);
    let rates: Vec<f64> = tenants.values().filter_map(rate).collect();
    let most = rates.iter().copied().max_by(f64::total_cmp).filter(|most| *most > 0.0)?;
    let least = rates.iter().copied().min_by(f64::total_cmp)?;
    (rates.len() > 1).then_some(least / most)
}

fn count_facts(m: &mut Metrics, record: &Record, first_fault: Option<u64>) {
    for event in &record.events {
        let What::Fact { name, value, .. } = &event.what else { continue };
        match name.as_str() {
            facts::WEIGHTS_LOADED if first_fault.is_some_and(|first| first <= event.us) => {
                m.weight_bytes += value;
            }
            facts::REQUEST_REPLAYED => {
                m.replays += 1;
                m.recomputed_tokens += value;
            }
            facts::PREFIX_HIT => m.prefix_hit_tokens += value,
            facts::EPOCH_BUMPED => m.epochs += 1,
            names::ACTOR_RESTARTED => m.restarts += 1,
            names::ESCALATED => m.escalations += 1,
            facts::STALE_REFUSED | names::FRAME_REFUSED => m.stale_refused += 1,
            _ => {}
        }
    }
}

/// A request's tokens count as good if it ended well and met the objectives.
pub fn is_within(seen: &Seen, slo: Slo) -> bool {
    let ttft = slo.ttft_us.is_none_or(|most| seen.ttft().is_none_or(|ttft| ttft <= most));
    let gap = slo.gap_us.is_none_or(|most| seen.gaps().all(|(_, gap)| gap <= most));
    seen.ended_well() && ttft && gap
}

fn goodput(m: &mut Metrics, seen: &BTreeMap<u64, Seen>, windows: &Windows, slo: Slo) {
    let good: Vec<u64> = seen
        .values()
        .filter(|s| is_within(s, slo))
        .flat_map(|s| s.tokens.iter().copied())
        .collect();
    let rate = |from: u64, to: u64| {
        let inside = good.iter().filter(|us| (from..to).contains(*us)).count();
        (to > from).then(|| inside as f64 * 1e6 / (to - from) as f64)
    };
    // Where nothing was asked any more, silence is no loss.
    let last_asked = seen.values().filter_map(|s| s.submitted).max().unwrap_or(0);
    let last_good = good.iter().copied().max().unwrap_or(0);
    let Some(&start) = good.iter().min() else { return };
    let first = windows.first_fault.unwrap_or(last_good + 1);
    m.goodput_before = if first > start { rate(start, first) } else { None };
    if windows.first_fault.is_none() {
        return;
    }
    m.goodput_during = rate(first, windows.healed.min(last_good + 1).max(first));
    m.goodput_after = rate(windows.healed, last_good + 1);
    let Some(level) = m.goodput_before else { return };
    // In windows of the size of 20 tokens, so that single tokens make no dips.
    let bin = ((20e6 / level.max(1e-3)) as u64).clamp(50_000, 5_000_000);
    let (mut lost, mut from, mut back) = (0.0, first, None);
    while from < last_asked && back.is_none() {
        let to = (from + bin).min(last_asked);
        let now = rate(from, to).unwrap_or(level);
        if now >= 0.95 * level && from > first {
            back = Some(from - first);
        }
        lost += (level - now).max(0.0) * (to - from) as f64 / 1e6;
        from = to;
    }
    m.lost_goodput_tokens = Some(lost);
    m.recovered_us = back;
}
