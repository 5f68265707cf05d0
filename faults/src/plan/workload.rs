//! From a [`Workload`] to a list of concrete requests.

use super::{Arrivals, Plan, Sampling};
use crate::draw::Draws;
use crate::resolved::RequestSpec;
use dunlin_runtime::config::EngineSection;

/// Ids of a real tokenizer's plain words: past the special tokens and single bytes of every
/// vocabulary that is supported.
const PLAIN: std::ops::Range<u64> = 300..4000;

pub(super) fn requests(plan: &Plan, seed: u64) -> Vec<RequestSpec> {
    let arrivals = arrivals(plan, seed);
    arrivals.into_iter().zip(0..).map(|(at, number)| request(plan, seed, number, at)).collect()
}

fn arrivals(plan: &Plan, seed: u64) -> Vec<u64> {
    let mut draws = Draws::new(seed, "arrivals");
    let mut at = 0.0;
    let mut next = |n: u64| match plan.workload.arrivals {
        Arrivals::Poisson { per_second } => {
            at += draws.gap(1e6 / per_second);
            at as u64
        }
        Arrivals::Uniform { per_second } => (n as f64 * 1e6 / per_second) as u64,
        Arrivals::Bursts { every_us, size } => n / size * every_us,
        Arrivals::AtOnce => plan.phases.warmup_us,
    };
    (0..plan.workload.requests).map(&mut next).collect()
}

fn request(plan: &Plan, seed: u64, number: u64, arrival_us: u64) -> RequestSpec {
    let workload = &plan.workload;
    let draws = Draws::new(seed, format!("request/{number}"));
    let ids = match &plan.config.engine {
        EngineSection::Hash(engine) => 1..u64::from(engine.vocab),
        EngineSection::Transformer => PLAIN,
    };
    let length = workload.prompt_tokens.draw(&mut draws.sub("prompt_tokens"));
    // The common prefix is three quarters of the prompt, so that blocks of it are shared.
    let shared = match draws.sub("shared").chance(workload.shared_prefix) {
        true => length - length / 4,
        false => 0,
    };
    let (mut common, mut own) = (Draws::new(seed, "prefix"), draws.sub("prompt"));
    let mut token = |at: u64| {
        let from = if at < shared { &mut common } else { &mut own };
        u32::try_from(from.range(ids.start, ids.end)).unwrap_or(1)
    };
    let prompt: Vec<u32> = (0..length).map(&mut token).collect();
    let max_tokens = workload.output_tokens.draw(&mut draws.sub("output_tokens"));
    let max_tokens = u32::try_from(max_tokens).unwrap_or(u32::MAX);
    let (temperature, seed) = match workload.sampling {
        Sampling::Greedy => (0.0, 0),
        Sampling::Random { temperature, seed } => {
            (temperature, seed.unwrap_or_else(|| draws.sub("seed").seed()))
        }
    };
    let mut cancel = draws.sub("cancel");
    let cancel_after = cancel
        .chance(workload.cancel)
        .then(|| u32::try_from(cancel.below(u64::from(max_tokens))).unwrap_or(0));
    RequestSpec {
        number,
        arrival_us,
        tenant: format!("tenant-{}", draws.sub("tenant").below(workload.tenants)),
        prompt,
        max_tokens,
        ignore_eos: workload.ignore_eos,
        temperature,
        seed,
        cancel_after,
        deadline_us: workload.deadline_us,
    }
}
