//! Drawing a token from a row of logits: the same token on every device.
//!
//! The steps, in order: what is added to logits; forbidden tokens; then greedy (the greatest logit,
//! ties to the lowest id), or: temperature, min-p, top-k, top-p (each on what the one before it
//! left), and one draw by a random number that the caller brings.
//!
//! **Why it is the same everywhere**: a logit meets float32 in one subtraction and two products,
//! which every device rounds alike (nothing here could be fused). From then on all is whole
//! numbers: how many halvings a token is less likely than the likeliest, in steps of 2^-25, and
//! from that its weight (the likeliest weighs 2^40). Sums do not depend on their order. Tokens less
//! than 2^-41 as likely as the likeliest weigh nothing.
//!
//! `shaders/sample_*.wgsl` follow this file; a property test holds them to it.

use std::cell::RefCell;

/// How the token of one row is drawn.
#[derive(Debug, Clone, PartialEq)]
pub struct Draw {
    /// 0 is greedy.
    pub temperature: f32,
    /// 0 is off.
    pub top_k: u32,
    /// 1 is off.
    pub top_p: f32,
    /// 0 is off.
    pub min_p: f32,
    /// 64 uniform bits; unused by a greedy draw.
    pub random: u64,
    /// Added to the logit of a token, one after the other; ids outside the row are passed over.
    pub add: Vec<(u32, f32)>,
    /// Never drawn.
    pub forbidden: Vec<u32>,
}

/// What is wanted of a row of logits.
#[derive(Debug, Clone, PartialEq)]
pub enum Want {
    /// The row itself, on the host.
    Logits,
    Token(Draw),
}

/// What [`Backend::sample`](crate::Backend::sample) gives.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Samples {
    /// One for each row. `None`: the row was wanted itself, or a logit was NaN or infinite, or there
    /// was nothing to draw from.
    pub tokens: Vec<Option<u32>>,
    /// The rows that were wanted themselves, one after the other.
    pub logits: Vec<f32>,
}

/// A [`Draw`] as whole numbers and one factor: what a device needs to know of it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Terms {
    pub greedy: bool,
    /// Halvings a unit of logit.
    pub scale: f32,
    /// The most steps that min-p leaves.
    pub bound: u32,
    /// 0 is off.
    pub top_k: u32,
    /// Share of the weight that top-p keeps, in units of 2^-32; `None` is off.
    pub top_p: Option<u32>,
    pub random: u64,
}

/// Bits of an id; `1 << ID_BITS` is the longest row.
pub const ID_BITS: u32 = 22;
const ID_MASK: u64 = (1 << ID_BITS) - 1;
/// Weight of the likeliest token.
pub const ONE: u64 = 1 << 40;
/// Steps of a halving, as a power of two.
const STEP_BITS: u32 = 25;
/// Halvings beyond which nothing is told apart.
const MOST_HALVINGS: f32 = 63.0;
/// First guess at how many tokens top-p keeps.
const TOP_P_GUESS: usize = 64;
/// `2^(g - 1)` for `g` in `0..=1` in units of 2^-31, lowest power first: interpolated at Chebyshev
/// points with both ends exact; relative error 1.5e-7.
const HALF_EXP2: [u32; 6] =
    [1_073_741_824, 744_265_486, 257_867_405, 59_953_470, 9_620_607, 2_034_856];
/// ln 2 in units of 2^-16.
const LN_2: u32 = 45_426;

impl Draw {
    /// The likeliest token of the row as it is.
    pub fn greedy() -> Self {
        Self {
            temperature: 0.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            random: 0,
            add: Vec::new(),
            forbidden: Vec::new(),
        }
    }

    /// See [`Terms`].
    pub fn terms(&self) -> Terms {
        let least = ((f64::from(self.min_p) * ONE as f64).ceil() as u64).clamp(1, ONE);
        let share = (f64::from(self.top_p) * (1u64 << 32) as f64).ceil() as u64;
        Terms {
            greedy: self.temperature <= 0.0,
            // Bounded, so that neither infinity nor zero meets the differences.
            scale: (std::f32::consts::LOG2_E / self.temperature).clamp(1e-30, 1e30),
            bound: most_steps(least),
            top_k: self.top_k,
            top_p: if self.top_p < 1.0 { u32::try_from(share).ok() } else { None },
            random: self.random,
        }
    }
}

/// Draws from one row, which it changes by what is added and forbidden. `None` where a logit is NaN
/// or infinite before anything was added, or NaN or +infinite afterwards, or nothing is left.
pub fn draw(logits: &mut [f32], how: &Draw) -> Option<u32> {
    if !all_finite(logits) || logits.len() as u64 > ID_MASK + 1 {
        return None;
    }
    for &(id, bias) in &how.add {
        if let Some(logit) = logits.get_mut(id as usize) {
            *logit += bias;
        }
    }
    for &id in &how.forbidden {
        if let Some(logit) = logits.get_mut(id as usize) {
            *logit = f32::NEG_INFINITY;
        }
    }
    let greatest = greatest(logits);
    if !greatest.is_finite() || !how.add.is_empty() && logits.iter().any(|l| l.is_nan()) {
        return None;
    }
    let terms = how.terms();
    if terms.greedy {
        return logits.iter().position(|l| *l == greatest).and_then(|i| u32::try_from(i).ok());
    }
    SCRATCH.with_borrow_mut(|Scratch { steps, keys }| {
        // In a loop of its own, which the compiler turns into vector instructions.
        steps.clear();
        steps.extend(logits.iter().map(|logit| steps_below(greatest, *logit, terms.scale)));
        pick(steps, &terms, keys)
    })
}

/// What [`Backend::sample`](crate::Backend::sample) does, on rows that are on the host already: `out.logits`
/// holds all rows, of `cols` elements.
pub fn sample_rows(cols: usize, wants: &[Want], out: &mut Samples) {
    out.tokens.clear();
    let mut kept = 0;
    for (row, want) in wants.iter().enumerate() {
        let at = row * cols..(row + 1) * cols;
        match want {
            Want::Token(how) => {
                out.tokens.push(out.logits.get_mut(at).and_then(|logits| draw(logits, how)));
            }
            Want::Logits => {
                out.logits.copy_within(at, kept * cols);
                out.tokens.push(None);
                kept += 1;
            }
        }
    }
    out.logits.truncate(kept * cols);
}

/// The greatest value; -inf for none. NaNs are passed over.
pub fn greatest(values: &[f32]) -> f32 {
    let mut lanes = [f32::NEG_INFINITY; 8];
    for chunk in values.chunks(8) {
        for (lane, v) in lanes.iter_mut().zip(chunk) {
            *lane = if *v > *lane { *v } else { *lane };
        }
    }
    lanes.iter().copied().fold(f32::NEG_INFINITY, f32::max)
}

pub fn all_finite(values: &[f32]) -> bool {
    values.iter().fold(true, |all, v| all & v.is_finite())
}

/// Buffers that a thread keeps, so that drawing allocates nothing. Their content means nothing
/// between two draws.
#[derive(Default)]
struct Scratch {
    steps: Vec<u32>,
    keys: Vec<u64>,
}

thread_local! {
    static SCRATCH: RefCell<Scratch> = RefCell::default();
}

/// How many steps of 2^-25 halvings a token is less likely than the likeliest.
pub fn steps_below(greatest: f32, logit: f32, scale: f32) -> u32 {
    let halvings = ((greatest - logit) * scale).min(MOST_HALVINGS);
    (halvings * (1u32 << STEP_BITS) as f32) as i32 as u32
}

/// Weight of a token so many steps below: `2^(40 - steps / 2^25)`, rounded down but for a relative
/// error of 2e-7. Falls, or stays, where `steps` grows.
pub fn weight(steps: u32) -> u64 {
    let fraction = steps & ((1 << STEP_BITS) - 1);
    // The upper 16 bits by a polynomial, the rest by its slope.
    let (x, rest) = (65_536 - (fraction >> 9), fraction & 511);
    let [c0, c1, c2, c3, c4, c5] = HALF_EXP2;
    let m = c4 + scaled(c5, x);
    let m = c3 + scaled(m, x);
    let m = c2 + scaled(m, x);
    let m = c1 + scaled(m, x);
    let m = c0 + scaled(m, x);
    let m = m - (((((m >> 15) * rest) >> 9) * LN_2) >> 17);
    (u64::from(m) << 9) >> (steps >> STEP_BITS)
}

/// `r * x / 2^16`, rounded down, in 32 bits: `r` is at most 2^31 and `x` 2^16.
fn scaled(r: u32, x: u32) -> u32 {
    (r >> 16) * x + (((r & 0xffff) * x) >> 16)
}

/// The most steps at which a token weighs at least `least` (which is 1 to [`ONE`]).
fn most_steps(least: u64) -> u32 {
    let (mut fits, mut too_many) = (0, 42 << STEP_BITS);
    while too_many - fits > 1 {
        let middle = fits + (too_many - fits) / 2;
        if weight(middle) >= least { fits = middle } else { too_many = middle }
    }
    fits
}

/// A kept token. Ascending order is by likelihood, then by id.
fn pack(steps: u32, id: u32) -> u64 {
    u64::from(steps) << ID_BITS | u64::from(id)
}

fn weight_of(key: u64) -> u64 {
    weight((key >> ID_BITS) as u32)
}

fn id_of(key: u64) -> u32 {
    (key & ID_MASK) as u32
}

/// Filters and draws. `None` only where no token is left.
fn pick(steps: &[u32], terms: &Terms, keys: &mut Vec<u64>) -> Option<u32> {
    keys.clear();
    for (id, &steps) in (0u32..).zip(steps) {
        if steps <= terms.bound {
            keys.push(pack(steps, id));
        }
    }
    let mut in_order = true;
    let k = terms.top_k as usize;
    if k > 0 && k < keys.len() {
        keys.select_nth_unstable(k - 1);
        keys.truncate(k);
        in_order = false;
    }
    if let Some(share) = terms.top_p {
        keep_top_p(keys, share);
        in_order = false;
    }
    if !in_order {
        keys.sort_unstable_by_key(|k| id_of(*k));
    }
    let total: u64 = keys.iter().map(|k| weight_of(*k)).sum();
    let mut target = ((u128::from(terms.random) * u128::from(total)) >> 64) as u64;
    for key in keys {
        let w = weight_of(*key);
        if target < w {
            return Some(id_of(*key));
        }
        target -= w;
    }
    None
}

/// The fewest likeliest tokens that hold at least this share of the weight; at least one. Sorts
/// only as many as it needs.
fn keep_top_p(keys: &mut Vec<u64>, share: u32) {
    let total: u64 = keys.iter().map(|k| weight_of(*k)).sum();
    let need = (u128::from(total) * u128::from(share) + u128::from(u32::MAX)) >> 32;
    let mut n = TOP_P_GUESS;
    loop {
        n = n.min(keys.len());
        if n < keys.len() {
            keys.select_nth_unstable(n);
        }
        keys[..n].sort_unstable();
        let mut mass = 0;
        for i in 0..n {
            mass += u128::from(weight_of(keys[i]));
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn weights_are_powers_of_two_and_fall() {
        let mut last = u64::MAX;
        for steps in (0..42 << STEP_BITS).step_by(4_093) {
            let (w, want) = (weight(steps), (40.0 - f64::from(steps) / 33_554_432.0).exp2());
            assert!((w as f64 - want).abs() <= 3e-7 * want + 1.0, "{steps}: {w} {want}");
            assert!(w <= last, "{steps}");
            last = w;
        }
        assert_eq!((weight(0), weight(40 << STEP_BITS)), (ONE, 1));
        assert_eq!(weight((40 << STEP_BITS) + 1), 0);
    }

    #[test]
    fn bounds_are_where_weights_cross() {
        for least in [1, 2, 3, 1000, ONE / 3, ONE - 1, ONE] {
            let steps = most_steps(least);
            assert!(weight(steps) >= least && weight(steps + 1) < least, "{least}");
        }
    }

    #[test]
    fn rows_that_are_wanted_move_up() {
        let greedy = Draw::greedy();
        let wants = [Want::Token(greedy.clone()), Want::Logits, Want::Token(greedy)];
        let mut out = Samples { logits: vec![1.0, 2.0, 3.0, 4.0, 5.0, f32::NAN], tokens: vec![] };
        sample_rows(2, &wants, &mut out);
        assert_eq!((out.tokens, out.logits), (vec![Some(1), None, None], vec![3.0, 4.0]));
    }
}
