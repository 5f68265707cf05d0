//! Ops that treat each row alone: norms, additions, gated activations.

use crate::lanes::{Kernel, LANES, Lanes, load_part, store_part};
use crate::math::{exp, gelu_tanh, silu};
use dunlin_backend::Activation;

/// Root mean square norm of the segments of one row: 16 lane sums in order, then the fixed tree.
pub(crate) struct RmsNorm<'a> {
    pub x: *const f32,
    pub out: *mut f32,
    pub weight: &'a [f32],
    pub segments: usize,
    pub eps: f32,
}

impl Kernel for RmsNorm<'_> {
    /// # Safety
    /// `x` and `out` point to `segments * weight.len()` floats and are equal or apart.
    #[inline(always)]
    unsafe fn run<L: Lanes>(self) {
        let n = self.weight.len();
        for s in 0..self.segments {
            // SAFETY: all offsets are below `segments * n`.
            unsafe {
                let (x, out) = (self.x.add(s * n), self.out.add(s * n));
                let factor = L::splat(norm_factor::<L>(x, n, self.eps));
                for e in (0..n).step_by(LANES) {
                    let part = LANES.min(n - e);
                    let v = load_part::<L>(x.add(e), part).mul(factor);
                    let w = load_part::<L>(self.weight.as_ptr().add(e), part);
                    store_part(v.mul(w), out.add(e), part);
                }
            }
        }
    }
}

/// What a root mean square norm multiplies the `n` elements of `x` with, before the weight.
///
/// # Safety
/// `x` points to `n` readable floats.
#[inline(always)]
pub(crate) unsafe fn norm_factor<L: Lanes>(x: *const f32, n: usize, eps: f32) -> f32 {
    let mut sums = L::splat(0.0);
    for e in (0..n).step_by(LANES) {
        // SAFETY: within the `n` floats.
        let v = unsafe { load_part::<L>(x.add(e), LANES.min(n - e)) };
        sums = v.fma(v, sums);
    }
    1.0 / (sums.sum() / n as f32 + eps).sqrt()
}

/// `x += delta * factor` with `factor` 1, else fused: `x = fma(factor, delta, x)`.
pub(crate) struct Add {
    pub x: *mut f32,
    pub delta: *const f32,
    pub factor: f32,
    /// Whole vectors.
    pub vectors: usize,
}

impl Kernel for Add {
    /// # Safety
    /// Both point to `16 * vectors` floats.
    #[inline(always)]
    unsafe fn run<L: Lanes>(self) {
        let factor = L::splat(self.factor);
        for v in 0..self.vectors {
            // SAFETY: within the bounds promised above. With factor 1 this is a plain addition.
            unsafe {
                let x = self.x.add(v * LANES);
                factor.fma(L::load(self.delta.add(v * LANES)), L::load(x)).store(x);
            }
        }
    }
}

/// `gate = activation(gate) * up`
pub(crate) struct Gated {
    pub gate: *mut f32,
    pub up: *const f32,
    pub activation: Activation,
    /// Whole vectors.
    pub vectors: usize,
}

impl Kernel for Gated {
    /// # Safety
    /// Both point to `16 * vectors` floats.
    #[inline(always)]
    unsafe fn run<L: Lanes>(self) {
        for v in 0..self.vectors {
            // SAFETY: within the bounds promised above.
            unsafe {
                let gate = self.gate.add(v * LANES);
                activate(L::load(gate), self.activation)
                    .mul(L::load(self.up.add(v * LANES)))
                    .store(gate);
            }
        }
    }
}

#[inline(always)]
pub(crate) fn activate<L: Lanes>(x: L, activation: Activation) -> L {
    match activation {
        Activation::Silu => silu(x),
        Activation::GeluTanh => gelu_tanh(x),
    }
}

/// Softmax of one row, in place: 16 lane sums in order, then the fixed tree.
pub(crate) struct Softmax<'a>(pub &'a mut [f32]);

impl Kernel for Softmax<'_> {
    /// # Safety
    /// None beyond the slice's own.
    #[inline(always)]
    unsafe fn run<L: Lanes>(self) {
        let n = self.0.len();
        let x = self.0.as_mut_ptr();
        let low = L::splat(f32::NEG_INFINITY);
        // SAFETY: all offsets are below `n`.
        unsafe {
            let mut largest = low;
            for e in (0..n).step_by(LANES) {
                let part = LANES.min(n - e);
                largest = largest.max(load_part::<L>(x.add(e), part).keep(0, part, low));
            }
            let largest = L::splat(largest.largest());
            let mut sums = L::splat(0.0);
            for e in (0..n).step_by(LANES) {
                let part = LANES.min(n - e);
                let v = load_part::<L>(x.add(e), part).keep(0, part, low);
                let p = exp(v.sub(largest));
                sums = sums.add(p);
                store_part(p, x.add(e), part);
            }
            let total = L::splat(sums.sum());
            for e in (0..n).step_by(LANES) {
                let part = LANES.min(n - e);
                store_part(load_part::<L>(x.add(e), part).div(total), x.add(e), part);
            }
        }
    }
}
