//! From measured requests to figures. Pure; all times in seconds.

use serde::Serialize;
use std::collections::BTreeMap;

/// What a client saw of one request.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Sample {
    /// To the first chunk that holds text.
    pub ttft: Option<f64>,
    /// Between chunks that hold text.
    pub gaps: Vec<f64>,
    /// When each of those ended, since the run began.
    pub ends: Vec<f64>,
    /// When the request was sent, likewise.
    pub sent: f64,
    /// To the last byte.
    pub elapsed: f64,
    pub prompt_tokens: u64,
    pub cached_tokens: u64,
    pub output_tokens: u64,
    pub outcome: Outcome,
}

#[derive(Debug, Clone, PartialEq, Default)]
pub enum Outcome {
    #[default]
    Done,
    /// The client hung up, as planned.
    HungUp,
    /// By kind of error, such as `429 overloaded`.
    Failed(String),
}

/// What a request must meet to count as good; `None`: not asked.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize)]
pub struct Slo {
    pub ttft_ms: Option<f64>,
    /// Mean over the request's output: `(elapsed - TTFT) / (tokens - 1)`.
    pub tpot_ms: Option<f64>,
    pub e2e_ms: Option<f64>,
}

/// Percentiles of one quantity, in milliseconds.
#[derive(Debug, Clone, PartialEq, Default, Serialize)]
pub struct Spread {
    pub count: usize,
    pub mean: f64,
    pub p50: f64,
    pub p90: f64,
    pub p95: f64,
    pub p99: f64,
    pub max: f64,
}

#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Report {
    pub requests: usize,
    pub done: usize,
    pub hung_up: usize,
    pub failed: usize,
    pub errors: BTreeMap<String, usize>,
    pub wall_s: f64,
    pub prompt_tokens: u64,
    pub cached_tokens: u64,
    pub output_tokens: u64,
    pub requests_per_s: f64,
    pub output_tokens_per_s: f64,
    /// Prompt tokens (cached ones too) and output tokens.
    pub total_tokens_per_s: f64,
    pub ttft_ms: Spread,
    pub itl_ms: Spread,
    pub tpot_ms: Spread,
    pub e2e_ms: Spread,
    /// Output tokens per chunk with text; gaps are between chunks, not tokens, where it is not 1.
    pub tokens_per_chunk: f64,
    pub slo: Slo,
    pub good: usize,
    /// Requests a second that ended well and met every objective.
    pub goodput_requests_per_s: f64,
    pub goodput_tokens_per_s: f64,
}

/// `wall_s`: from the first request's start to the last one's end. Latencies are those of
/// requests that were done; hung-up and failed ones count in their own rows only.
pub fn report(samples: &[Sample], wall_s: f64, slo: Slo) -> Report {
    let done: Vec<&Sample> = samples.iter().filter(|s| s.outcome == Outcome::Done).collect();
    let mut errors = BTreeMap::new();
    for sample in samples {
        if let Outcome::Failed(kind) = &sample.outcome {
            *errors.entry(kind.clone()).or_insert(0) += 1;
        }
    }
    let failed = errors.values().sum();
    let sum = |of: fn(&Sample) -> u64| done.iter().map(|s| of(s)).sum::<u64>();
    let (prompt_tokens, output_tokens) = (sum(|s| s.prompt_tokens), sum(|s| s.output_tokens));
    let chunks: usize = done.iter().map(|s| s.gaps.len() + usize::from(s.ttft.is_some())).sum();
    let good: Vec<&&Sample> = done.iter().filter(|s| meets(s, slo)).collect();
    let good_tokens: u64 = good.iter().map(|s| s.output_tokens).sum();
    let rate = |count: f64| if wall_s > 0.0 { count / wall_s } else { 0.0 };
    Report {
        requests: samples.len(),
        done: done.len(),
        hung_up: samples.len() - done.len() - failed,
        failed,
        errors,
        wall_s,
        prompt_tokens,
        cached_tokens: sum(|s| s.cached_tokens),
        output_tokens,
        requests_per_s: rate(done.len() as f64),
        output_tokens_per_s: rate(output_tokens as f64),
        total_tokens_per_s: rate((prompt_tokens + output_tokens) as f64),
        ttft_ms: spread(done.iter().filter_map(|s| s.ttft)),
        itl_ms: spread(done.iter().flat_map(|s| s.gaps.iter().copied())),
        tpot_ms: spread(done.iter().filter_map(|s| tpot(s))),
        e2e_ms: spread(done.iter().map(|s| s.elapsed)),
        tokens_per_chunk: if chunks > 0 { output_tokens as f64 / chunks as f64 } else { 0.0 },
        slo,
        good: good.len(),
        goodput_requests_per_s: rate(good.len() as f64),
        goodput_tokens_per_s: rate(good_tokens as f64),
    }
}

/// Time per output token after the first.
fn tpot(sample: &Sample) -> Option<f64> {
    let after_first = sample.output_tokens.checked_sub(1).filter(|n| *n > 0)?;
    Some((sample.elapsed - sample.ttft?) / after_first as f64)
}

/// What was asked for and could not be measured is not met; a single token has no TPOT to miss.
fn meets(sample: &Sample, slo: Slo) -> bool {
    let within = |seconds: f64, limit_ms: f64| seconds * 1e3 <= limit_ms;
    slo.ttft_ms.is_none_or(|limit| sample.ttft.is_some_and(|ttft| within(ttft, limit)))
        && slo.tpot_ms.is_none_or(|limit| tpot(sample).is_none_or(|tpot| within(tpot, limit)))
        && slo.e2e_ms.is_none_or(|limit| within(sample.elapsed, limit))
}

pub fn spread(seconds: impl Iterator<Item = f64>) -> Spread {
    let mut ms: Vec<f64> = seconds.map(|s| s * 1e3).collect();
    ms.sort_by(f64::total_cmp);
    if ms.is_empty() {
        return Spread::default();
    }
    Spread {
        count: ms.len(),
        mean: ms.iter().sum::<f64>() / ms.len() as f64,
        p50: percentile(&ms, 50.0),
        p90: percentile(&ms, 90.0),
        p95: percentile(&ms, 95.0),
        p99: percentile(&ms, 99.0),
        max: percentile(&ms, 100.0),
    }
}

/// Linear interpolation between closest ranks (numpy's default, Hyndman and Fan's type 7).
fn percentile(sorted: &[f64], percent: f64) -> f64 {
    let Some(last) = sorted.len().checked_sub(1) else { return 0.0 };
    let rank = percent / 100.0 * last as f64;
    let below = (rank.floor() as usize).min(last);
    let above = (below + 1).min(last);
    sorted[below] + (sorted[above] - sorted[below]) * (rank - below as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(ttft: f64, gaps: &[f64], tokens: u64) -> Sample {
        Sample {
            ttft: Some(ttft),
            gaps: gaps.to_vec(),
            ends: Vec::new(),
            sent: 0.0,
            elapsed: ttft + gaps.iter().sum::<f64>(),
            prompt_tokens: 10,
            cached_tokens: 4,
            output_tokens: tokens,
            outcome: Outcome::Done,
        }
    }

    #[test]
    fn percentiles_interpolate_as_numpy_does() {
        let values: Vec<f64> = (1..=10).map(f64::from).collect();
        for (percent, want) in [(0.0, 1.0), (50.0, 5.5), (90.0, 9.1), (99.0, 9.91), (100.0, 10.0)] {
            assert!((percentile(&values, percent) - want).abs() < 1e-12, "p{percent}");
        }
        assert_eq!(percentile(&[3.0], 99.0), 3.0);
        assert_eq!(spread(std::iter::empty()), Spread::default());
    }

    #[test]
    fn figures_add_up() {
        let failed = |kind: &str| Sample {
            outcome: Outcome::Failed(kind.into()),
            output_tokens: 99,
            ..Sample::default()
        };
        let samples = [
            sample(0.1, &[0.01, 0.03], 3),
            sample(0.3, &[0.02], 2),
            Sample { outcome: Outcome::HungUp, ..sample(0.1, &[], 1) },
            failed("429 overloaded"),
            failed("429 overloaded"),
        ];
        let slo = Slo { ttft_ms: Some(200.0), tpot_ms: Some(20.5), e2e_ms: None };
        let got = report(&samples, 2.0, slo);
        assert_eq!((got.requests, got.done, got.hung_up, got.failed), (5, 2, 1, 2));
        assert_eq!(got.errors["429 overloaded"], 2);
        assert_eq!((got.prompt_tokens, got.cached_tokens, got.output_tokens), (20, 8, 5));
        assert_eq!((got.output_tokens_per_s, got.total_tokens_per_s), (2.5, 12.5));
        assert!((got.ttft_ms.p50 - 200.0).abs() < 1e-9);
        assert_eq!(got.itl_ms.count, 3);
        assert!((got.tpot_ms.max - 20.0).abs() < 1e-9);
        assert_eq!(got.tokens_per_chunk, 1.0);
        // Only the first meets its TTFT.
        assert_eq!((got.good, got.goodput_tokens_per_s), (1, 1.5));
        let all = report(&samples, 2.0, Slo::default());
        assert_eq!(all.good, 2, "without objectives, what is done is good");
    }
}
