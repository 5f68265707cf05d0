//! Draws the next token from a row of logits.
//!
//! The steps, in order: repetition, presence and frequency penalties; logit bias; forbidden
//! tokens; then greedy (the greatest logit, ties to the lowest id), or: temperature, min-p,
//! top-k, top-p (each on what the one before it left), and one draw.
//!
//! **The draw depends on (seed, position) and the logits alone.** Its uniform number comes from
//! Philox, a counter-based generator, so a replay on another node draws the same token without
//! any state being carried. Probabilities are integers (the likeliest token weighs 2^40), so
//! that sums do not depend on their order, and `exp` is our own polynomial, so that they do not
//! depend on the machine's libm. Tokens less than 2^-41 as likely as the likeliest weigh nothing.
//!
//! Logprobs are those of the model itself, before any of these steps, as OpenAI's are.

use crate::engine::SampleFailure;
use crate::sampling::{SamplingParams, TokenLogprob};
use std::cell::RefCell;

/// The largest vocabulary that can be sampled from; larger models are refused when opened.
pub const MAX_VOCAB: usize = 1 << ID_BITS;

const ID_BITS: u32 = 22;
const ID_MASK: u64 = (1 << ID_BITS) - 1;
/// Weight of the likeliest token.
const ONE: u64 = 1 << 40;
/// The least logprob reported; what OpenAI's interface uses for "practically never".
const LEAST_LOGPROB: f32 = -9999.0;
/// First guess at how many tokens top-p keeps.
const TOP_P_GUESS: usize = 64;

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
    SCRATCH.with_borrow_mut(|Scratch { raw, keys }| {
        if params.logprobs.is_some() {
            raw.clear();
            raw.extend_from_slice(logits);
        }
        adjust(logits, params, prompt, output, forbidden);
        // Biases may make -inf, which is never drawn; anything else not finite is an error.
        let greatest = greatest(logits);
        if !greatest.is_finite() || logits.iter().any(|l| l.is_nan()) {
            return Err(SampleFailure::NotFinite);
        }
        let token = if params.temperature <= 0.0 {
            first_at(logits, greatest)
        } else {
            draw(logits, greatest, params, uniform(params.seed, position), keys)
        };
        let token = token.ok_or(SampleFailure::NotFinite)?;
        Ok((token, params.logprobs.map(|top| logprob_of(raw, token, top))))
    })
}

/// Buffers that a thread keeps, so that drawing allocates nothing. Their content means nothing
/// between two draws.
#[derive(Default)]
struct Scratch {
    raw: Vec<f32>,
    keys: Vec<u64>,
}

thread_local! {
    static SCRATCH: RefCell<Scratch> = RefCell::default();
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

/// Penalties, biases, forbidden tokens.
fn adjust(
    logits: &mut [f32],
    params: &SamplingParams,
    prompt: &[u32],
    output: &[u32],
    forbidden: &[u32],
) {
    penalise(logits, params, prompt, output);
    for &(id, bias) in &params.logit_bias {
        if let Some(logit) = logits.get_mut(id as usize) {
            *logit += bias;
        }
    }
    for &id in forbidden {
        if let Some(logit) = logits.get_mut(id as usize) {
            *logit = f32::NEG_INFINITY;
        }
    }
}

fn penalise(logits: &mut [f32], params: &SamplingParams, prompt: &[u32], output: &[u32]) {
    if params.repetition_penalty != 1.0 {
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
    if params.presence_penalty != 0.0 || params.frequency_penalty != 0.0 {
        let mut counted = output.to_vec();
        counted.sort_unstable();
        for run in counted.chunk_by(|a, b| a == b) {
            if let Some(logit) = run.first().and_then(|id| logits.get_mut(*id as usize)) {
                let count = run.len() as f32;
                *logit -= params.presence_penalty + params.frequency_penalty * count;
            }
        }
    }
}

/// A kept token: weight above, complement of the id below, so that descending order is by
/// weight, then by ascending id.
fn pack(weight: u64, id: u32) -> u64 {
    weight << ID_BITS | (ID_MASK - u64::from(id))
}

fn weight_of(key: u64) -> u64 {
    key >> ID_BITS
}

fn id_of(key: u64) -> u32 {
    (ID_MASK - (key & ID_MASK)) as u32
}

/// Filters and draws; turns `logits` into weights. `None` only where no token has any weight.
fn draw(
    logits: &mut [f32],
    greatest: f32,
    params: &SamplingParams,
    random: u64,
    keys: &mut Vec<u64>,
) -> Option<u32> {
    let least = ((f64::from(params.min_p) * ONE as f64).ceil() as u64).clamp(1, ONE);
    // In a loop of its own, which the compiler turns into vector instructions.
    for logit in logits.iter_mut() {
        *logit = exp((*logit - greatest) / params.temperature);
    }
    keys.clear();
    for (id, &probability) in (0u32..).zip(&*logits) {
        let w = weight(probability);
        if w >= least {
            keys.push(pack(w, id));
        }
    }
    let mut in_order = true;
    let k = params.top_k as usize;
    if k > 0 && k < keys.len() {
        keys.select_nth_unstable_by(k - 1, |a, b| b.cmp(a));
        keys.truncate(k);
        in_order = false;
    }
    if params.top_p < 1.0 {
        keep_top_p(keys, params.top_p);
        in_order = false;
    }
    if !in_order {
        keys.sort_unstable_by_key(|k| id_of(*k));
    }
    let total: u64 = keys.iter().map(|k| weight_of(*k)).sum();
    let mut target = ((u128::from(random) * u128::from(total)) >> 64) as u64;
    for key in keys {
        let w = weight_of(*key);
        if target < w {
            return Some(id_of(*key));
        }
        target -= w;
    }
    None
}

/// The fewest likeliest tokens that hold at least `top_p` of the weight; at least one. Sorts
/// only as many as it needs.
fn keep_top_p(keys: &mut Vec<u64>, top_p: f32) {
    let total: u64 = keys.iter().map(|k| weight_of(*k)).sum();
    let need = (f64::from(top_p) * total as f64).ceil() as u64;
    let mut n = TOP_P_GUESS;
    loop {
        n = n.min(keys.len());
        if n < keys.len() {
            keys.select_nth_unstable_by(n, |a, b| b.cmp(a));
        }
        keys[..n].sort_unstable_by(|a, b| b.cmp(a));
        let mut mass = 0;
        for i in 0..n {
            mass += weight_of(keys[i]);
            if mass >= need {
                keys.truncate(i + 1);
                return;
            }
        }
        if n == keys.len() {
            return;
        }
        n *= 8;
    }
}

/// A probability (relative to the likeliest, at most 1) as a whole number, rounded down.
fn weight(probability: f32) -> u64 {
    (probability * ONE as f32) as i64 as u64
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

fn all_finite(values: &[f32]) -> bool {
    values.iter().fold(true, |all, v| all & v.is_finite())
}

/// The greatest value; -inf for none. NaNs are passed over.
fn greatest(values: &[f32]) -> f32 {
    let mut lanes = [f32::NEG_INFINITY; 8];
    for chunk in values.chunks(8) {
        for (lane, v) in lanes.iter_mut().zip(chunk) {
            *lane = if *v > *lane { *v } else { *lane };
        }
    }
    lanes.iter().copied().fold(f32::NEG_INFINITY, f32::max)
}

fn first_at(values: &[f32], value: f32) -> Option<u32> {
    values.iter().position(|v| *v == value).and_then(|i| u32::try_from(i).ok())
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
