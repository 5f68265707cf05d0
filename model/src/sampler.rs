//! Draws the next token from a row of logits, on the host or on the device that has them.
//!
//! The steps, in order: repetition, presence and frequency penalties; logit bias; forbidden
//! tokens; then what [`dunlin_backend::draw`] does, the same on every device. [`drawing`] says
//! whether a device can take all of them; else [`sample`] does, with the logits on the host.
//!
//! **The draw depends on (seed, position) and the logits alone.** Its uniform number comes from
//! Philox, a counter-based generator, so a replay on another node draws the same token without
//! any state being carried.
//!
//! Logprobs are those of the model itself, before any of these steps, as OpenAI's are. Their `exp`
//! is our own polynomial, so that they do not depend on the machine's libm.

use crate::engine::SampleFailure;
use crate::sampling::{SamplingParams, TokenLogprob};
use dunlin_backend::Draw;
use dunlin_backend::draw::{self, ID_BITS, all_finite, greatest};
use std::cell::RefCell;

/// The largest vocabulary that can be sampled from; larger models are refused when opened.
pub const MAX_VOCAB: usize = 1 << ID_BITS;

/// The least logprob reported; what OpenAI's interface uses for "practically never".
const LEAST_LOGPROB: f32 = -9999.0;

/// The whole draw as a device does it, or `None` where the host must have the logits: for logprobs,
/// and for the repetition penalty, whose division devices round in ways of their own.
pub fn drawing(
    params: &SamplingParams,
    position: u32,
    output: &[u32],
    forbidden: &[u32],
) -> Option<Draw> {
    let here = params.logprobs.is_some() || params.repetition_penalty != 1.0;
    (!here).then(|| draw_of(params, position, output, forbidden))
}

/// Draws the token for `position` (counted from the start of prompt and output). `prompt` and
/// `output` matter only where `params.needs_history()`. Uses `logits` as scratch.
///
/// Fails, and draws nothing, where a logit is NaN or infinite or nothing is left to draw from.
pub fn sample(
    logits: &mut [f32],
    params: &SamplingParams,
    position: u32,
    prompt: &[u32],
    output: &[u32],
    forbidden: &[u32],
) -> Result<(u32, Option<TokenLogprob>), SampleFailure> {
    if !all_finite(logits) || logits.len() > MAX_VOCAB {
        return Err(SampleFailure::NotFinite);
    }
    RAW.with_borrow_mut(|raw| {
        if params.logprobs.is_some() {
            raw.clear();
            raw.extend_from_slice(logits);
        }
        penalise_repetition(logits, params, prompt, output);
        let token = draw::draw(logits, &draw_of(params, position, output, forbidden));
        let token = token.ok_or(SampleFailure::NotFinite)?;
        Ok((token, params.logprobs.map(|top| logprob_of(raw, token, top))))
    })
}

thread_local! {
    /// The model's own logits of the draw under way, so that drawing allocates nothing.
    static RAW: RefCell<Vec<f32>> = RefCell::default();
}

/// Log-probability of `token` under softmax of `logits`, with the `top` likeliest tokens
/// (descending, ties to the lower id). Logits are taken to be finite.
pub fn logprob_of(logits: &[f32], token: u32, top: u32) -> TokenLogprob {
    let max = greatest(logits);
    let norm = f64::from(max) + libm::log(sum_exp(logits, max));
    let of = |logit: f32| {
        let value = (f64::from(logit) - norm) as f32;
        if value.is_nan() { LEAST_LOGPROB } else { value.clamp(LEAST_LOGPROB, 0.0) }
    };
    let own = logits.get(token as usize).copied().unwrap_or(f32::NEG_INFINITY);
    let top = top_logits(logits, top as usize);
    TokenLogprob { logprob: of(own), top: top.into_iter().map(|(id, l)| (id, of(l))).collect() }
}

/// 64 uniform bits that depend on `seed` and `position` alone.
pub fn uniform(seed: u64, position: u32) -> u64 {
    let key = [seed as u32, (seed >> 32) as u32];
    let [a, b, ..] = philox([position, 0, 0, 0], key);
    u64::from(a) | u64::from(b) << 32
}

/// All but logprobs and the repetition penalty.
fn draw_of(params: &SamplingParams, position: u32, output: &[u32], forbidden: &[u32]) -> Draw {
    let mut add = presence_and_frequency(params, output);
    add.extend(&params.logit_bias);
    Draw {
        temperature: params.temperature,
        top_k: params.top_k,
        top_p: params.top_p,
        min_p: params.min_p,
        random: uniform(params.seed, position),
        add,
        forbidden: forbidden.to_vec(),
    }
}

fn penalise_repetition(
    logits: &mut [f32],
    params: &SamplingParams,
    prompt: &[u32],
    output: &[u32],
) {
    if params.repetition_penalty == 1.0 {
        return;
    }
    let mut seen: Vec<u32> = prompt.iter().chain(output).copied().collect();
    seen.sort_unstable();
    seen.dedup();
    for id in seen {
        if let Some(logit) = logits.get_mut(id as usize) {
            let p = params.repetition_penalty;
            *logit = if *logit > 0.0 { *logit / p } else { *logit * p };
        }
    }
}

/// What these penalties add to the logits of tokens that were drawn before.
fn presence_and_frequency(params: &SamplingParams, output: &[u32]) -> Vec<(u32, f32)> {
    if params.presence_penalty == 0.0 && params.frequency_penalty == 0.0 {
        return Vec::new();
    }
    let mut counted = output.to_vec();
    counted.sort_unstable();
    let penalty = |run: &[u32]| {
        let penalty = params.presence_penalty + params.frequency_penalty * run.len() as f32;
        run.first().map(|id| (*id, -penalty))
    };
    counted.chunk_by(|a, b| a == b).filter_map(penalty).collect()
}

/// `e^x` for `x <= 0`, with a relative error below 3e-7: one reduction to `[-ln2/2, ln2/2]`, a
/// polynomial of degree 6 (Taylor), and the exponent by bits. Plain multiplications and
/// additions, which give the same bits on every machine. Exactly 1 at 0, 0 below -87.
fn exp(x: f32) -> f32 {
    const LOG2_E: f32 = std::f32::consts::LOG2_E;
    // ln 2 in two parts, the first with few enough bits that multiples of it are exact.
    const LN2_HIGH: f32 = 0.693_359_4;
    const LN2_LOW: f32 = -2.121_944_4e-4;
    // Adding and subtracting 1.5 * 2^23 rounds to a whole number.
    const ROUND: f32 = 12_582_912.0;
    let reduced = x.max(-87.0);
    let rounded = reduced * LOG2_E + ROUND;
    let n = rounded - ROUND;
    let r = (reduced - n * LN2_HIGH) - n * LN2_LOW;
    let p = 1.0 / 720.0;
    let p = p * r + 1.0 / 120.0;
    let p = p * r + 1.0 / 24.0;
    let p = p * r + 1.0 / 6.0;
    let p = p * r + 0.5;
    let p = p * r + 1.0;
    let p = p * r + 1.0;
    // The low bits of `rounded` are n; they move into the exponent.
    let exponent = rounded.to_bits().wrapping_sub(ROUND.to_bits()).wrapping_add(127) << 23;
    if x > -87.0 { p * f32::from_bits(exponent) } else { 0.0 }
}

/// Sum of `exp(logit - max)` in eight lanes, a fixed order.
fn sum_exp(logits: &[f32], max: f32) -> f64 {
    let mut lanes = [0f64; 8];
    for chunk in logits.chunks(8) {
        for (lane, logit) in lanes.iter_mut().zip(chunk) {
            *lane += f64::from(exp(logit - max));
        }
    }
    lanes.iter().sum()
}

/// The `n` greatest logits, descending, ties to the lower id.
fn top_logits(logits: &[f32], n: usize) -> Vec<(u32, f32)> {
    let mut top: Vec<(u32, f32)> = Vec::with_capacity(n.min(logits.len()) + 1);
    for (id, &logit) in (0u32..).zip(logits) {
        if top.len() == n && top.last().is_none_or(|(_, least)| logit <= *least) {
            continue;
        }
        let at = top.partition_point(|(_, other)| *other >= logit);
        top.insert(at, (id, logit));
        top.truncate(n);
    }
    top
}

/// Philox 4x32-10: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
fn philox(mut counter: [u32; 4], mut key: [u32; 2]) -> [u32; 4] {
    for _ in 0..10 {
        let a = u64::from(counter[0]) * 0xD251_1F53;
        let b = u64::from(counter[2]) * 0xCD9E_8D57;
        counter = [
            (b >> 32) as u32 ^ counter[1] ^ key[0],
            b as u32,
            (a >> 32) as u32 ^ counter[3] ^ key[1],
            a as u32,
        ];
        key = [key[0].wrapping_add(0x9E37_79B9), key[1].wrapping_add(0xBB67_AE85)];
    }
    counter
}

#[cfg(test)]
#[path = "sampler_tests.rs"]
mod tests;
