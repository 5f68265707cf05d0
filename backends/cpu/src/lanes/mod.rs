//! Sixteen float32 lanes: the one vector that every kernel of this crate is written in.
//!
//! [`Scalar`] is plain Rust, `avx2` a pair of 256-bit registers, `avx512` one register. Every
//! operation here is either exact (integers, moves, comparisons) or correctly rounded by IEEE 754
//! (add, multiply, divide, square root, fused multiply-add), so a kernel written against the trait
//! computes the same bits on all of them. NaN payloads are the one thing left open.
//!
//! A kernel implements [`Kernel`] and runs through [`dispatch`], which enters a function that has
//! the instruction set enabled; everything below is inlined into that function.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod scalar;
pub(crate) use scalar::Scalar;

use crate::path::Path;

/// Lanes of a vector, and rows of a weight panel.
pub(crate) const LANES: usize = 16;

/// How large the unsigned codes of a dot product may be; decides how AVX2 multiplies bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Codes {
    /// At most 15.
    Nibble,
    /// At most 63.
    Six,
    /// Any byte, standing for `code - 128`.
    Byte,
}

/// Sixteen float32 lanes. Loads and stores need no alignment.
///
/// # Safety
/// Methods of an implementation may run only where its instruction set is available: they are
/// reached through [`dispatch`] alone, whose `path` was checked when the backend was made.
pub(crate) unsafe trait Lanes: Copy + 'static {
    /// Sixteen int32 lanes, or 64 bytes.
    type I: Copy;
    /// How many values of lanes fit into registers, about.
    const REGISTERS: usize;

    fn splat(x: f32) -> Self;
    /// # Safety
    /// `p` points to 16 readable floats.
    unsafe fn load(p: *const f32) -> Self;
    /// # Safety
    /// `p` points to 16 writable floats.
    unsafe fn store(self, p: *mut f32);
    fn add(self, o: Self) -> Self;
    fn sub(self, o: Self) -> Self;
    fn mul(self, o: Self) -> Self;
    fn div(self, o: Self) -> Self;
    /// `self * b + c`, rounded once.
    fn fma(self, b: Self, c: Self) -> Self;
    fn neg(self) -> Self;
    /// To the nearest integer, ties to even.
    fn round(self) -> Self;
    /// `if self < o { self } else { o }`
    fn min(self, o: Self) -> Self;
    /// `if self > o { self } else { o }`
    fn max(self, o: Self) -> Self;
    /// `if a < b { x } else { y }`
    fn if_less(a: Self, b: Self, x: Self, y: Self) -> Self;
    /// Lanes `lo..hi` of `self`, the others of `o`.
    fn keep(self, lo: usize, hi: usize, o: Self) -> Self;
    /// `2^self` for whole numbers in `-126..=127`.
    fn pow2(self) -> Self;
    /// Exchanges lanes `2i` and `2i + 1`.
    fn swap_pairs(self) -> Self;
    /// Sum by the fixed tree 16 -> 8 -> 4 -> 2 -> 1 (lane `i` and `i + half`).
    fn sum(self) -> f32;
    /// Largest lane by the same tree of [`Lanes::max`].
    fn largest(self) -> f32;

    /// # Safety
    /// `p` points to 16 readable float16 values.
    unsafe fn load_f16(p: *const u8) -> Self;
    /// Stores float16 values, rounded to nearest, ties to even.
    /// # Safety
    /// `p` points to 32 writable bytes.
    unsafe fn store_f16(self, p: *mut u8);
    /// # Safety
    /// `p` points to 16 readable bfloat16 values.
    unsafe fn load_bf16(p: *const u8) -> Self;
    /// # Safety
    /// `p` points to 64 readable bytes.
    unsafe fn i_load(p: *const u8) -> Self::I;
    /// # Safety
    /// `p` points to 64 writable bytes.
    unsafe fn i_store(v: Self::I, p: *mut u8);
    /// Sixteen bytes, zero-extended.
    /// # Safety
    /// `p` points to 16 readable bytes.
    unsafe fn i_load_u8(p: *const u8) -> Self::I;
    /// Sixteen bytes, sign-extended.
    /// # Safety
    /// `p` points to 16 readable bytes.
    unsafe fn i_load_i8(p: *const u8) -> Self::I;
    /// Stores the low byte of every lane.
    /// # Safety
    /// `p` points to 16 writable bytes.
    unsafe fn i_store_i8(v: Self::I, p: *mut i8);
    fn i_splat(x: i32) -> Self::I;
    fn i_add(a: Self::I, b: Self::I) -> Self::I;
    fn i_mul(a: Self::I, b: Self::I) -> Self::I;
    fn i_max(a: Self::I, b: Self::I) -> Self::I;
    fn i_largest(a: Self::I) -> i32;
    fn i_sum(a: Self::I) -> i32;
    /// `v & 0x0f` of every byte.
    fn low_nibbles(v: Self::I) -> Self::I;
    /// `v >> 4` of every byte.
    fn high_nibbles(v: Self::I) -> Self::I;
    /// Byte `j` of every lane, zero-extended.
    fn byte<const J: u32>(v: Self::I) -> Self::I;
    fn to_f32(v: Self::I) -> Self;
    /// Nearest integer, ties to even; lanes must be within int32.
    fn to_i32(self) -> Self::I;
    /// Bits of the absolute value.
    fn abs_bits(self) -> Self::I;

    /// `bias + sum over g of dot4(w[g], a[4g..4g+4])` in every lane: unsigned codes times signed
    /// activations, four per lane and group, exact. With [`Codes::Byte`] the dot product is that of
    /// `code - 128` where [`Lanes::SIGNED_BYTES`] says so. `chains` (1 or 2, a constant) is how many
    /// sums to keep in flight: a tile of many rows hides latency by itself.
    /// # Safety
    /// `a` points to `4 * N` readable activations within `-127..=127`.
    unsafe fn dot<const N: usize>(
        codes: Codes,
        chains: usize,
        w: &[Self::I; N],
        a: *const i8,
        bias: i32,
    ) -> Self::I;
    /// Whether [`Lanes::dot`] already subtracts 128 from codes of kind [`Codes::Byte`].
    const SIGNED_BYTES: bool;
}

/// A computation written in lanes. `run` must be `#[inline(always)]`, as must all it calls.
pub(crate) trait Kernel {
    /// # Safety
    /// The pointers the kernel carries are valid for what its definition says.
    unsafe fn run<L: Lanes>(self);
}

/// Runs `kernel` on the instruction path `path`.
///
/// # Safety
/// As [`Kernel::run`]. `path` was found available on this processor.
pub(crate) unsafe fn dispatch<K: Kernel>(path: Path, kernel: K) {
    match path {
        // SAFETY: the caller vouches for the kernel; plain Rust needs no instruction set.
        Path::Scalar => unsafe { kernel.run::<Scalar>() },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: the caller vouches for both.
        Path::Avx2 => unsafe { avx2::enter(kernel) },
        #[cfg(target_arch = "x86_64")]
        // SAFETY: the caller vouches for both.
        Path::Avx512 | Path::Amx => unsafe { avx512::enter(kernel) },
        #[cfg(not(target_arch = "x86_64"))]
        // SAFETY: as above; other paths cannot be chosen on this architecture.
        _ => unsafe { kernel.run::<Scalar>() },
    }
}

/// Runs `kernel` on 512-bit lanes: for kernels that only processors with them have a use for.
///
/// # Safety
/// As [`dispatch`], for the path [`Path::Avx512`].
#[cfg(target_arch = "x86_64")]
pub(crate) unsafe fn dispatch_wide<K: Kernel>(kernel: K) {
    // SAFETY: the caller vouches for both.
    unsafe { avx512::enter(kernel) }
}

/// Loads `n <= 16` floats, the other lanes zero.
///
/// # Safety
/// `p` points to `n` readable floats.
#[inline(always)]
pub(crate) unsafe fn load_part<L: Lanes>(p: *const f32, n: usize) -> L {
    let mut tmp = [0.0f32; LANES];
    // SAFETY: `n` floats are readable and fit into `tmp`.
    unsafe {
        if n >= LANES {
            return L::load(p);
        }
        std::ptr::copy_nonoverlapping(p, tmp.as_mut_ptr(), n);
        L::load(tmp.as_ptr())
    }
}

/// Stores the first `n <= 16` lanes.
///
/// # Safety
/// `p` points to `n` writable floats.
#[inline(always)]
pub(crate) unsafe fn store_part<L: Lanes>(v: L, p: *mut f32, n: usize) {
    let mut tmp = [0.0f32; LANES];
    // SAFETY: `n` floats are writable and `tmp` holds as many.
    unsafe {
        if n >= LANES {
            return v.store(p);
        }
        v.store(tmp.as_mut_ptr());
        std::ptr::copy_nonoverlapping(tmp.as_ptr(), p, n);
    }
}

/// Asks for the cache line of `p`, which need not be readable. A hint: it changes no result.
#[inline(always)]
pub(crate) fn prefetch(p: *const u8) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a hint, which faults for no address.
    unsafe {
        std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T0 }>(p.cast())
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = p;
}

/// Asks for the cache line of `p` to write to: lines that another core read last are fetched all at
/// once then, not one after the other as they are stored to.
#[inline(always)]
pub(crate) fn prefetch_write(p: *const u8) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a hint, which faults for no address; processors without it take it for no operation.
    unsafe {
        std::arch::asm!("prefetchw [{}]", in(reg) p, options(nostack, preserves_flags, readonly))
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = p;
}
