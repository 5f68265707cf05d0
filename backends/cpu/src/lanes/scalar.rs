//! Lanes in plain Rust: slow without vectorisation, correct on every architecture.

use super::{Codes, LANES, Lanes};
use half::{bf16, f16};

#[derive(Clone, Copy)]
pub(crate) struct Scalar([f32; LANES]);

macro_rules! each {
    ($i:ident => $e:expr) => {{
        let mut out = [Default::default(); LANES];
        for $i in 0..LANES {
            out[$i] = $e;
        }
        out
    }};
}

/// Folds halves onto each other until one lane is left.
#[inline(always)]
fn fold<T: Copy>(mut v: [T; LANES], f: impl Fn(T, T) -> T) -> T {
    let mut half = LANES / 2;
    while half > 0 {
        for i in 0..half {
            v[i] = f(v[i], v[i + half]);
        }
        half /= 2;
    }
    v[0]
}

// SAFETY: plain Rust, which runs anywhere.
unsafe impl Lanes for Scalar {
    /// Little-endian bytes of a lane are bytes of the int32.
    type I = [i32; LANES];
    const SIGNED_BYTES: bool = false;
    const REGISTERS: usize = 1;

    #[inline(always)]
    fn splat(x: f32) -> Self {
        Self([x; LANES])
    }
    #[inline(always)]
    unsafe fn load(p: *const f32) -> Self {
        // SAFETY: 16 floats are readable; an array of them needs only a float's alignment.
        Self(unsafe { p.cast::<[f32; LANES]>().read_unaligned() })
    }
    #[inline(always)]
    unsafe fn store(self, p: *mut f32) {
        // SAFETY: 16 floats are writable.
        unsafe { p.cast::<[f32; LANES]>().write_unaligned(self.0) }
    }
    #[inline(always)]
    fn add(self, o: Self) -> Self {
        Self(each!(i => self.0[i] + o.0[i]))
    }
    #[inline(always)]
    fn sub(self, o: Self) -> Self {
        Self(each!(i => self.0[i] - o.0[i]))
    }
    #[inline(always)]
    fn mul(self, o: Self) -> Self {
        Self(each!(i => self.0[i] * o.0[i]))
    }
    #[inline(always)]
    fn div(self, o: Self) -> Self {
        Self(each!(i => self.0[i] / o.0[i]))
    }
    #[inline(always)]
    fn fma(self, b: Self, c: Self) -> Self {
        Self(each!(i => self.0[i].mul_add(b.0[i], c.0[i])))
    }
    #[inline(always)]
    fn neg(self) -> Self {
        Self(each!(i => -self.0[i]))
    }
    #[inline(always)]
    fn round(self) -> Self {
        Self(each!(i => self.0[i].round_ties_even()))
    }
    #[inline(always)]
    fn min(self, o: Self) -> Self {
        Self(each!(i => if self.0[i] < o.0[i] { self.0[i] } else { o.0[i] }))
    }
    #[inline(always)]
    fn max(self, o: Self) -> Self {
        Self(each!(i => if self.0[i] > o.0[i] { self.0[i] } else { o.0[i] }))
    }
    #[inline(always)]
    fn if_less(a: Self, b: Self, x: Self, y: Self) -> Self {
        Self(each!(i => if a.0[i] < b.0[i] { x.0[i] } else { y.0[i] }))
    }
    #[inline(always)]
    fn keep(self, lo: usize, hi: usize, o: Self) -> Self {
        Self(each!(i => if i >= lo && i < hi { self.0[i] } else { o.0[i] }))
    }
    #[inline(always)]
    fn pow2(self) -> Self {
        Self(each!(i => f32::from_bits(((self.0[i] as i32).wrapping_add(127) as u32) << 23)))
    }
    #[inline(always)]
    fn swap_pairs(self) -> Self {
        Self(each!(i => self.0[i ^ 1]))
    }
    #[inline(always)]
    fn sum(self) -> f32 {
        fold(self.0, |a, b| a + b)
    }
    #[inline(always)]
    fn largest(self) -> f32 {
        fold(self.0, |a, b| if a > b { a } else { b })
    }

    #[inline(always)]
    unsafe fn load_f16(p: *const u8) -> Self {
        // SAFETY: 32 bytes are readable.
        let raw = unsafe { p.cast::<[[u8; 2]; LANES]>().read_unaligned() };
        Self(each!(i => f16::from_le_bytes(raw[i]).to_f32()))
    }
    #[inline(always)]
    unsafe fn store_f16(self, p: *mut u8) {
        let raw: [[u8; 2]; LANES] = each!(i => f16::from_f32(self.0[i]).to_le_bytes());
        // SAFETY: 32 bytes are writable.
        unsafe { p.cast::<[[u8; 2]; LANES]>().write_unaligned(raw) }
    }
    #[inline(always)]
    unsafe fn load_bf16(p: *const u8) -> Self {
        // SAFETY: 32 bytes are readable.
        let raw = unsafe { p.cast::<[[u8; 2]; LANES]>().read_unaligned() };
        Self(each!(i => bf16::from_le_bytes(raw[i]).to_f32()))
    }
    #[inline(always)]
    unsafe fn i_load(p: *const u8) -> Self::I {
        // SAFETY: 64 bytes are readable.
        let raw = unsafe { p.cast::<[[u8; 4]; LANES]>().read_unaligned() };
        each!(i => i32::from_le_bytes(raw[i]))
    }
    #[inline(always)]
    unsafe fn i_store(v: Self::I, p: *mut u8) {
        let raw: [[u8; 4]; LANES] = each!(i => v[i].to_le_bytes());
        // SAFETY: 64 bytes are writable.
        unsafe { p.cast::<[[u8; 4]; LANES]>().write_unaligned(raw) }
    }
    #[inline(always)]
    unsafe fn i_load_u8(p: *const u8) -> Self::I {
        // SAFETY: 16 bytes are readable.
        let raw = unsafe { p.cast::<[u8; LANES]>().read_unaligned() };
        each!(i => raw[i] as i32)
    }
    #[inline(always)]
    unsafe fn i_load_i8(p: *const u8) -> Self::I {
        // SAFETY: 16 bytes are readable.
        let raw = unsafe { p.cast::<[i8; LANES]>().read_unaligned() };
        each!(i => raw[i] as i32)
    }
    #[inline(always)]
    unsafe fn i_store_i8(v: Self::I, p: *mut i8) {
        let out: [i8; LANES] = each!(i => v[i] as i8);
        // SAFETY: 16 bytes are writable.
        unsafe { p.cast::<[i8; LANES]>().write_unaligned(out) }
    }
    #[inline(always)]
    fn i_splat(x: i32) -> Self::I {
        [x; LANES]
    }
    #[inline(always)]
    fn i_add(a: Self::I, b: Self::I) -> Self::I {
        each!(i => a[i].wrapping_add(b[i]))
    }
    #[inline(always)]
    fn i_mul(a: Self::I, b: Self::I) -> Self::I {
        each!(i => a[i].wrapping_mul(b[i]))
    }
    #[inline(always)]
    fn i_max(a: Self::I, b: Self::I) -> Self::I {
        each!(i => a[i].max(b[i]))
    }
    #[inline(always)]
    fn i_largest(a: Self::I) -> i32 {
        fold(a, i32::max)
    }
    #[inline(always)]
    fn i_sum(a: Self::I) -> i32 {
        fold(a, i32::wrapping_add)
    }
    #[inline(always)]
    fn low_nibbles(v: Self::I) -> Self::I {
        each!(i => v[i] & 0x0f0f_0f0f)
    }
    #[inline(always)]
    fn high_nibbles(v: Self::I) -> Self::I {
        each!(i => (v[i] >> 4) & 0x0f0f_0f0f)
    }
    #[inline(always)]
    fn byte<const J: u32>(v: Self::I) -> Self::I {
        each!(i => (v[i] >> (8 * J)) & 0xff)
    }
    #[inline(always)]
    fn to_f32(v: Self::I) -> Self {
        Self(each!(i => v[i] as f32))
    }
    #[inline(always)]
    fn to_i32(self) -> Self::I {
        each!(i => self.0[i].round_ties_even() as i32)
    }
    #[inline(always)]
    fn abs_bits(self) -> Self::I {
        each!(i => (self.0[i].to_bits() & 0x7fff_ffff) as i32)
    }

    #[inline(always)]
    unsafe fn dot<const N: usize>(
        _: Codes,
        _: usize,
        w: &[Self::I; N],
        a: *const i8,
        bias: i32,
    ) -> Self::I {
        let mut acc = [bias; LANES];
        for (g, w) in w.iter().enumerate() {
            // SAFETY: `4 * N` activations are readable.
            let a = unsafe { a.add(4 * g).cast::<[i8; 4]>().read_unaligned() };
            for i in 0..LANES {
                let w = w[i].to_le_bytes();
                for (w, a) in w.into_iter().zip(a) {
                    acc[i] += w as i32 * a as i32;
                }
            }
        }
        acc
    }
}
