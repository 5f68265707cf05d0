//! Lanes as two 256-bit registers (AVX2, FMA, F16C).

use super::{Codes, Kernel, Lanes};
use std::arch::x86_64::*;

#[derive(Clone, Copy)]
pub(crate) struct Avx2(__m256, __m256);

/// Runs `kernel` with the instruction set enabled.
///
/// # Safety
/// As [`Kernel::run`], on a processor that has AVX2, FMA and F16C.
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) unsafe fn enter<K: Kernel>(kernel: K) {
    // SAFETY: the caller vouches for the kernel.
    unsafe { kernel.run::<Avx2>() }
}

macro_rules! op {
    ($e:expr) => {
        // SAFETY: `dispatch` entered through `enter`, so the instruction set is there; pointers
        // are the caller's promise.
        unsafe { $e }
    };
}

/// The 8-lane half of the fixed tree, from 8 lanes down to one.
macro_rules! tree {
    ($v:expr, $ps:ident, $ss:ident) => {{
        let v = $v;
        let four = $ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps::<1>(v));
        let two = $ps(four, _mm_movehl_ps(four, four));
        _mm_cvtss_f32($ss(two, _mm_shuffle_ps::<1>(two, two)))
    }};
}

const INDEX: [i32; 16] = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15];

/// One 256-bit half (8 rows) of [`Lanes::dot`].
macro_rules! half_dot {
    ($codes:expr, $w:expr, $at:tt, $a:expr, $n:expr, $bias:expr) => {{
        let ones = _mm256_set1_epi16(1);
        let mut acc = _mm256_set1_epi32($bias);
        // Pairs of products sum to at most 15 * 127 * 2 = 3810 (nibbles): eight groups still fit
        // into int16. Six-bit codes reach 16002: two groups fit.
        let mut wide = _mm256_setzero_si256();
        for g in 0..$n {
            let a = _mm256_set1_epi32($a.add(4 * g).cast::<i32>().read_unaligned());
            match $codes {
                Codes::Nibble => {
                    wide = _mm256_add_epi16(wide, _mm256_maddubs_epi16($w[g].$at, a));
                }
                Codes::Six => {
                    wide = _mm256_add_epi16(wide, _mm256_maddubs_epi16($w[g].$at, a));
                    if g % 2 == 1 {
                        acc = _mm256_add_epi32(acc, _mm256_madd_epi16(wide, ones));
                        wide = _mm256_setzero_si256();
                    }
                }
                Codes::Byte => {
                    // |w| <= 128 and |a| <= 127: a pair is at most 32512, so nothing saturates.
                    let w = _mm256_xor_si256($w[g].$at, _mm256_set1_epi8(-128));
                    let pair = _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(a, w));
                    acc = _mm256_add_epi32(acc, _mm256_madd_epi16(pair, ones));
                }
            }
        }
        if matches!($codes, Codes::Nibble) {
            acc = _mm256_add_epi32(acc, _mm256_madd_epi16(wide, ones));
        }
        acc
    }};
}

// SAFETY: only `enter` names this type, after the processor was checked.
unsafe impl Lanes for Avx2 {
    type I = (__m256i, __m256i);
    const SIGNED_BYTES: bool = true;
    const REGISTERS: usize = 8;

    #[inline(always)]
    fn splat(x: f32) -> Self {
        op!(Self(_mm256_set1_ps(x), _mm256_set1_ps(x)))
    }
    #[inline(always)]
    unsafe fn load(p: *const f32) -> Self {
        op!(Self(_mm256_loadu_ps(p), _mm256_loadu_ps(p.add(8))))
    }
    #[inline(always)]
    unsafe fn store(self, p: *mut f32) {
        op!({
            _mm256_storeu_ps(p, self.0);
            _mm256_storeu_ps(p.add(8), self.1);
        })
    }
    #[inline(always)]
    fn add(self, o: Self) -> Self {
        op!(Self(_mm256_add_ps(self.0, o.0), _mm256_add_ps(self.1, o.1)))
    }
    #[inline(always)]
    fn sub(self, o: Self) -> Self {
        op!(Self(_mm256_sub_ps(self.0, o.0), _mm256_sub_ps(self.1, o.1)))
    }
    #[inline(always)]
    fn mul(self, o: Self) -> Self {
        op!(Self(_mm256_mul_ps(self.0, o.0), _mm256_mul_ps(self.1, o.1)))
    }
    #[inline(always)]
    fn div(self, o: Self) -> Self {
        op!(Self(_mm256_div_ps(self.0, o.0), _mm256_div_ps(self.1, o.1)))
    }
    #[inline(always)]
    fn fma(self, b: Self, c: Self) -> Self {
        op!(Self(_mm256_fmadd_ps(self.0, b.0, c.0), _mm256_fmadd_ps(self.1, b.1, c.1)))
    }
    #[inline(always)]
    fn neg(self) -> Self {
        op!({
            let sign = _mm256_set1_ps(-0.0);
            Self(_mm256_xor_ps(self.0, sign), _mm256_xor_ps(self.1, sign))
        })
    }
    #[inline(always)]
    fn round(self) -> Self {
        const NEAREST: i32 = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
        op!(Self(_mm256_round_ps::<NEAREST>(self.0), _mm256_round_ps::<NEAREST>(self.1)))
    }
    #[inline(always)]
    fn min(self, o: Self) -> Self {
        op!(Self(_mm256_min_ps(self.0, o.0), _mm256_min_ps(self.1, o.1)))
    }
    #[inline(always)]
    fn max(self, o: Self) -> Self {
        op!(Self(_mm256_max_ps(self.0, o.0), _mm256_max_ps(self.1, o.1)))
    }
    #[inline(always)]
    fn if_less(a: Self, b: Self, x: Self, y: Self) -> Self {
        op!(Self(
            _mm256_blendv_ps(y.0, x.0, _mm256_cmp_ps::<_CMP_LT_OQ>(a.0, b.0)),
            _mm256_blendv_ps(y.1, x.1, _mm256_cmp_ps::<_CMP_LT_OQ>(a.1, b.1)),
        ))
    }
    #[inline(always)]
    fn keep(self, lo: usize, hi: usize, o: Self) -> Self {
        op!({
            // Lane indices are below 16, so int32 holds every bound that matters.
            let lo = _mm256_set1_epi32(lo.min(16) as i32 - 1);
            let hi = _mm256_set1_epi32(hi.min(16) as i32);
            let i0 = _mm256_loadu_si256(INDEX.as_ptr().cast());
            let i1 = _mm256_loadu_si256(INDEX.as_ptr().add(8).cast());
            let k0 = _mm256_and_si256(_mm256_cmpgt_epi32(i0, lo), _mm256_cmpgt_epi32(hi, i0));
            let k1 = _mm256_and_si256(_mm256_cmpgt_epi32(i1, lo), _mm256_cmpgt_epi32(hi, i1));
            Self(
                _mm256_blendv_ps(o.0, self.0, _mm256_castsi256_ps(k0)),
                _mm256_blendv_ps(o.1, self.1, _mm256_castsi256_ps(k1)),
            )
        })
    }
    #[inline(always)]
    fn pow2(self) -> Self {
        op!({
            let bias = _mm256_set1_epi32(127);
            let a = _mm256_add_epi32(_mm256_cvtps_epi32(self.0), bias);
            let b = _mm256_add_epi32(_mm256_cvtps_epi32(self.1), bias);
            Self(
                _mm256_castsi256_ps(_mm256_slli_epi32::<23>(a)),
                _mm256_castsi256_ps(_mm256_slli_epi32::<23>(b)),
            )
        })
    }
    #[inline(always)]
    fn swap_pairs(self) -> Self {
        op!(Self(
            _mm256_permute_ps::<0b10_11_00_01>(self.0),
            _mm256_permute_ps::<0b10_11_00_01>(self.1),
        ))
    }
    #[inline(always)]
    fn sum(self) -> f32 {
        op!(tree!(_mm256_add_ps(self.0, self.1), _mm_add_ps, _mm_add_ss))
    }
    #[inline(always)]
    fn largest(self) -> f32 {
        op!(tree!(_mm256_max_ps(self.0, self.1), _mm_max_ps, _mm_max_ss))
    }

    #[inline(always)]
    unsafe fn load_f16(p: *const u8) -> Self {
        op!(Self(
            _mm256_cvtph_ps(_mm_loadu_si128(p.cast())),
            _mm256_cvtph_ps(_mm_loadu_si128(p.add(16).cast())),
        ))
    }
    #[inline(always)]
    unsafe fn store_f16(self, p: *mut u8) {
        op!({
            _mm_storeu_si128(p.cast(), _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(self.0));
            _mm_storeu_si128(
                p.add(16).cast(),
                _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(self.1),
            );
        })
    }
    #[inline(always)]
    unsafe fn load_bf16(p: *const u8) -> Self {
        op!({
            let a = _mm256_cvtepu16_epi32(_mm_loadu_si128(p.cast()));
            let b = _mm256_cvtepu16_epi32(_mm_loadu_si128(p.add(16).cast()));
            Self(
                _mm256_castsi256_ps(_mm256_slli_epi32::<16>(a)),
                _mm256_castsi256_ps(_mm256_slli_epi32::<16>(b)),
            )
        })
    }
    #[inline(always)]
    unsafe fn i_load(p: *const u8) -> Self::I {
        op!((_mm256_loadu_si256(p.cast()), _mm256_loadu_si256(p.add(32).cast())))
    }
    #[inline(always)]
    unsafe fn i_store(v: Self::I, p: *mut u8) {
        op!({
            _mm256_storeu_si256(p.cast(), v.0);
            _mm256_storeu_si256(p.add(32).cast(), v.1);
        })
    }
    #[inline(always)]
    unsafe fn i_load_u8(p: *const u8) -> Self::I {
        op!((
            _mm256_cvtepu8_epi32(_mm_loadl_epi64(p.cast())),
            _mm256_cvtepu8_epi32(_mm_loadl_epi64(p.add(8).cast())),
        ))
    }
    #[inline(always)]
    unsafe fn i_load_i8(p: *const u8) -> Self::I {
        op!((
            _mm256_cvtepi8_epi32(_mm_loadl_epi64(p.cast())),
            _mm256_cvtepi8_epi32(_mm_loadl_epi64(p.add(8).cast())),
        ))
    }
    #[inline(always)]
    unsafe fn i_store_i8(v: Self::I, p: *mut i8) {
        op!({
            // Values fit into int8, so the saturating packs change nothing.
            let words = _mm256_permute4x64_epi64::<0b11_01_10_00>(_mm256_packs_epi32(v.0, v.1));
            let low = _mm256_castsi256_si128(words);
            let high = _mm256_extracti128_si256::<1>(words);
            _mm_storeu_si128(p.cast(), _mm_packs_epi16(low, high));
        })
    }
    #[inline(always)]
    fn i_splat(x: i32) -> Self::I {
        op!((_mm256_set1_epi32(x), _mm256_set1_epi32(x)))
    }
    #[inline(always)]
    fn i_add(a: Self::I, b: Self::I) -> Self::I {
        op!((_mm256_add_epi32(a.0, b.0), _mm256_add_epi32(a.1, b.1)))
    }
    #[inline(always)]
    fn i_mul(a: Self::I, b: Self::I) -> Self::I {
        op!((_mm256_mullo_epi32(a.0, b.0), _mm256_mullo_epi32(a.1, b.1)))
    }
    #[inline(always)]
    fn i_max(a: Self::I, b: Self::I) -> Self::I {
        op!((_mm256_max_epi32(a.0, b.0), _mm256_max_epi32(a.1, b.1)))
    }
    #[inline(always)]
    fn i_largest(a: Self::I) -> i32 {
        op!({
            let v = _mm256_max_epi32(a.0, a.1);
            let v = _mm_max_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256::<1>(v));
            let v = _mm_max_epi32(v, _mm_shuffle_epi32::<0b01_00_11_10>(v));
            _mm_cvtsi128_si32(_mm_max_epi32(v, _mm_shuffle_epi32::<0b10_11_00_01>(v)))
        })
    }
    #[inline(always)]
    fn i_sum(a: Self::I) -> i32 {
        op!({
            let v = _mm256_add_epi32(a.0, a.1);
            let v = _mm_add_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256::<1>(v));
            let v = _mm_add_epi32(v, _mm_shuffle_epi32::<0b01_00_11_10>(v));
            _mm_cvtsi128_si32(_mm_add_epi32(v, _mm_shuffle_epi32::<0b10_11_00_01>(v)))
        })
    }
    #[inline(always)]
    fn low_nibbles(v: Self::I) -> Self::I {
        op!({
            let mask = _mm256_set1_epi8(15);
            (_mm256_and_si256(v.0, mask), _mm256_and_si256(v.1, mask))
        })
    }
    #[inline(always)]
    fn high_nibbles(v: Self::I) -> Self::I {
        op!({
            let mask = _mm256_set1_epi8(15);
            (
                _mm256_and_si256(_mm256_srli_epi16::<4>(v.0), mask),
                _mm256_and_si256(_mm256_srli_epi16::<4>(v.1), mask),
            )
        })
    }
    #[inline(always)]
    fn byte<const J: u32>(v: Self::I) -> Self::I {
        op!({
            let (mask, by) = (_mm256_set1_epi32(255), _mm_cvtsi32_si128(8 * J as i32));
            (
                _mm256_and_si256(_mm256_srl_epi32(v.0, by), mask),
                _mm256_and_si256(_mm256_srl_epi32(v.1, by), mask),
            )
        })
    }
    #[inline(always)]
    fn to_f32(v: Self::I) -> Self {
        op!(Self(_mm256_cvtepi32_ps(v.0), _mm256_cvtepi32_ps(v.1)))
    }
    #[inline(always)]
    fn to_i32(self) -> Self::I {
        op!((_mm256_cvtps_epi32(self.0), _mm256_cvtps_epi32(self.1)))
    }
    #[inline(always)]
    fn abs_bits(self) -> Self::I {
        op!({
            let mask = _mm256_set1_epi32(0x7fff_ffff);
            (
                _mm256_and_si256(_mm256_castps_si256(self.0), mask),
                _mm256_and_si256(_mm256_castps_si256(self.1), mask),
            )
        })
    }

    #[inline(always)]
    unsafe fn dot<const N: usize>(
        codes: Codes,
        _: usize,
        w: &[Self::I; N],
        a: *const i8,
        bias: i32,
    ) -> Self::I {
        op!((half_dot!(codes, w, 0, a, N, bias), half_dot!(codes, w, 1, a, N, bias)))
    }
}
