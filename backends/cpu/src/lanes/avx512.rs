//! Lanes as one 512-bit register (AVX-512 F, BW, VL, DQ and VNNI).

use super::{Codes, Kernel, Lanes};
use std::arch::x86_64::*;

#[derive(Clone, Copy)]
pub(crate) struct Avx512(__m512);

/// Runs `kernel` with the instruction set enabled.
///
/// # Safety
/// As [`Kernel::run`], on a processor that has all the features named here.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
pub(super) unsafe fn enter<K: Kernel>(kernel: K) {
    // SAFETY: the caller vouches for the kernel.
    unsafe { kernel.run::<Avx512>() }
}

macro_rules! op {
    ($e:expr) => {
        // SAFETY: `dispatch` entered through `enter`, so the instruction set is there; pointers
        // are the caller's promise.
        unsafe { $e }
    };
}

/// The fixed tree from 16 lanes down to one.
macro_rules! tree {
    ($v:expr, $wide:ident, $ps:ident, $ss:ident) => {{
        let v = $v;
        let eight = $wide(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps::<1>(v));
        let four = $ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps::<1>(eight));
        let two = $ps(four, _mm_movehl_ps(four, four));
        _mm_cvtss_f32($ss(two, _mm_shuffle_ps::<1>(two, two)))
    }};
}

// SAFETY: only `enter` names this type, after the processor was checked.
unsafe impl Lanes for Avx512 {
    type I = __m512i;
    const SIGNED_BYTES: bool = false;
    const REGISTERS: usize = 32;

    #[inline(always)]
    fn splat(x: f32) -> Self {
        op!(Self(_mm512_set1_ps(x)))
    }
    #[inline(always)]
    unsafe fn load(p: *const f32) -> Self {
        op!(Self(_mm512_loadu_ps(p)))
    }
    #[inline(always)]
    unsafe fn store(self, p: *mut f32) {
        op!(_mm512_storeu_ps(p, self.0))
    }
    #[inline(always)]
    fn add(self, o: Self) -> Self {
        op!(Self(_mm512_add_ps(self.0, o.0)))
    }
    #[inline(always)]
    fn sub(self, o: Self) -> Self {
        op!(Self(_mm512_sub_ps(self.0, o.0)))
    }
    #[inline(always)]
    fn mul(self, o: Self) -> Self {
        op!(Self(_mm512_mul_ps(self.0, o.0)))
    }
    #[inline(always)]
    fn div(self, o: Self) -> Self {
        op!(Self(_mm512_div_ps(self.0, o.0)))
    }
    #[inline(always)]
    fn fma(self, b: Self, c: Self) -> Self {
        op!(Self(_mm512_fmadd_ps(self.0, b.0, c.0)))
    }
    #[inline(always)]
    fn neg(self) -> Self {
        op!(Self(_mm512_xor_ps(self.0, _mm512_set1_ps(-0.0))))
    }
    #[inline(always)]
    fn round(self) -> Self {
        const NEAREST: i32 = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
        op!(Self(_mm512_roundscale_ps::<NEAREST>(self.0)))
    }
    #[inline(always)]
    fn min(self, o: Self) -> Self {
        op!(Self(_mm512_min_ps(self.0, o.0)))
    }
    #[inline(always)]
    fn max(self, o: Self) -> Self {
        op!(Self(_mm512_max_ps(self.0, o.0)))
    }
    #[inline(always)]
    fn if_less(a: Self, b: Self, x: Self, y: Self) -> Self {
        op!(Self(_mm512_mask_blend_ps(_mm512_cmp_ps_mask::<_CMP_LT_OQ>(a.0, b.0), y.0, x.0)))
    }
    #[inline(always)]
    fn keep(self, lo: usize, hi: usize, o: Self) -> Self {
        // Bits `lo..hi` of a 16-bit mask.
        let below = |n: usize| (1u32 << n.min(16)) - 1;
        let mask = (below(hi) & !below(lo)) as u16;
        op!(Self(_mm512_mask_blend_ps(mask, o.0, self.0)))
    }
    #[inline(always)]
    fn pow2(self) -> Self {
        op!({
            let e = _mm512_add_epi32(_mm512_cvtps_epi32(self.0), _mm512_set1_epi32(127));
            Self(_mm512_castsi512_ps(_mm512_slli_epi32::<23>(e)))
        })
    }
    #[inline(always)]
    fn swap_pairs(self) -> Self {
        op!(Self(_mm512_permute_ps::<0b10_11_00_01>(self.0)))
    }
    #[inline(always)]
    fn sum(self) -> f32 {
        op!(tree!(self.0, _mm256_add_ps, _mm_add_ps, _mm_add_ss))
    }
    #[inline(always)]
    fn largest(self) -> f32 {
        op!(tree!(self.0, _mm256_max_ps, _mm_max_ps, _mm_max_ss))
    }

    #[inline(always)]
    unsafe fn load_f16(p: *const u8) -> Self {
        op!(Self(_mm512_cvtph_ps(_mm256_loadu_si256(p.cast()))))
    }
    #[inline(always)]
    unsafe fn store_f16(self, p: *mut u8) {
        op!({
            let halves = _mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(self.0);
            _mm256_storeu_si256(p.cast(), halves);
        })
    }
    #[inline(always)]
    unsafe fn load_bf16(p: *const u8) -> Self {
        op!({
            let v = _mm512_cvtepu16_epi32(_mm256_loadu_si256(p.cast()));
            Self(_mm512_castsi512_ps(_mm512_slli_epi32::<16>(v)))
        })
    }
    #[inline(always)]
    unsafe fn i_load(p: *const u8) -> Self::I {
        op!(_mm512_loadu_si512(p.cast()))
    }
    #[inline(always)]
    unsafe fn i_store(v: Self::I, p: *mut u8) {
        op!(_mm512_storeu_si512(p.cast(), v))
    }
    #[inline(always)]
    unsafe fn i_load_u8(p: *const u8) -> Self::I {
        op!(_mm512_cvtepu8_epi32(_mm_loadu_si128(p.cast())))
    }
    #[inline(always)]
    unsafe fn i_load_i8(p: *const u8) -> Self::I {
        op!(_mm512_cvtepi8_epi32(_mm_loadu_si128(p.cast())))
    }
    #[inline(always)]
    unsafe fn i_store_i8(v: Self::I, p: *mut i8) {
        op!(_mm_storeu_si128(p.cast(), _mm512_cvtepi32_epi8(v)))
    }
    #[inline(always)]
    fn i_splat(x: i32) -> Self::I {
        op!(_mm512_set1_epi32(x))
    }
    #[inline(always)]
    fn i_add(a: Self::I, b: Self::I) -> Self::I {
        op!(_mm512_add_epi32(a, b))
    }
    #[inline(always)]
    fn i_mul(a: Self::I, b: Self::I) -> Self::I {
        op!(_mm512_mullo_epi32(a, b))
    }
    #[inline(always)]
    fn i_max(a: Self::I, b: Self::I) -> Self::I {
        op!(_mm512_max_epi32(a, b))
    }
    #[inline(always)]
    fn i_largest(a: Self::I) -> i32 {
        op!(_mm512_reduce_max_epi32(a))
    }
    #[inline(always)]
    fn i_sum(a: Self::I) -> i32 {
        op!(_mm512_reduce_add_epi32(a))
    }
    #[inline(always)]
    fn low_nibbles(v: Self::I) -> Self::I {
        op!(_mm512_and_si512(v, _mm512_set1_epi8(15)))
    }
    #[inline(always)]
    fn high_nibbles(v: Self::I) -> Self::I {
        op!(_mm512_and_si512(_mm512_srli_epi16::<4>(v), _mm512_set1_epi8(15)))
    }
    #[inline(always)]
    fn byte<const J: u32>(v: Self::I) -> Self::I {
        op!({
            let shifted = _mm512_srl_epi32(v, _mm_cvtsi32_si128(8 * J as i32));
            _mm512_and_si512(shifted, _mm512_set1_epi32(255))
        })
    }
    #[inline(always)]
    fn to_f32(v: Self::I) -> Self {
        op!(Self(_mm512_cvtepi32_ps(v)))
    }
    #[inline(always)]
    fn to_i32(self) -> Self::I {
        op!(_mm512_cvtps_epi32(self.0))
    }
    #[inline(always)]
    fn abs_bits(self) -> Self::I {
        op!(_mm512_and_si512(_mm512_castps_si512(self.0), _mm512_set1_epi32(0x7fff_ffff)))
    }

    #[inline(always)]
    unsafe fn dot<const N: usize>(
        _: Codes,
        chains: usize,
        w: &[Self::I; N],
        a: *const i8,
        bias: i32,
    ) -> Self::I {
        op!({
            // Two chains hide the latency of vpdpbusd; integers add up alike in any order.
            let mut even = _mm512_set1_epi32(bias);
            let mut odd = _mm512_setzero_si512();
            for (g, w) in w.iter().enumerate() {
                let a = _mm512_set1_epi32(a.add(4 * g).cast::<i32>().read_unaligned());
                if chains == 1 || g % 2 == 0 {
                    even = _mm512_dpbusd_epi32(even, *w, a);
                } else {
                    odd = _mm512_dpbusd_epi32(odd, *w, a);
                }
            }
            if chains == 1 { even } else { _mm512_add_epi32(even, odd) }
        })
    }
}
