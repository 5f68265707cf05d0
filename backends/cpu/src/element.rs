//! Element types that are read as float32 lanes: of plain weights, and of the KV store.

use crate::lanes::{LANES, Lanes, load_part};
use dunlin_backend::KvDtype;

/// A stored type whose values are float32 values (for [`I8`], times a scale kept elsewhere).
pub(crate) trait Element: 'static {
    const BYTES: usize;
    /// # Safety
    /// `p` points to 16 readable elements.
    unsafe fn load<L: Lanes>(p: *const u8) -> L;
}

/// An element type of the KV store.
pub(crate) trait KvElement: Element {
    /// Whether every head of a token has scales.
    const SCALED: bool = false;

    /// Writes `n` floats as elements `to[i * step]` and gives their scale.
    ///
    /// # Safety
    /// `from` points to `n` readable floats; all places of `to` are writable.
    unsafe fn write<L: Lanes>(from: *const f32, n: usize, to: *mut u8, step: usize) -> f32;
}

pub(crate) struct F32;
pub(crate) struct F16;
pub(crate) struct BF16;
pub(crate) struct I8;

/// Runs `$body` with `$e` as the element type of `$dtype`.
macro_rules! with_kv_element {
    ($dtype:expr, $e:ident => $body:expr) => {
        match $dtype {
            dunlin_backend::KvDtype::F32 => {
                type $e = crate::element::F32;
                $body
            }
            dunlin_backend::KvDtype::F16 => {
                type $e = crate::element::F16;
                $body
            }
            dunlin_backend::KvDtype::Int8 => {
                type $e = crate::element::I8;
                $body
            }
        }
    };
}
pub(crate) use with_kv_element;

/// Bytes of an element.
pub(crate) fn kv_element_bytes(dtype: KvDtype) -> usize {
    with_kv_element!(dtype, E => E::BYTES)
}

impl Element for F32 {
    const BYTES: usize = 4;
    #[inline(always)]
    unsafe fn load<L: Lanes>(p: *const u8) -> L {
        // SAFETY: 16 floats are readable.
        unsafe { L::load(p.cast()) }
    }
}

impl Element for F16 {
    const BYTES: usize = 2;
    #[inline(always)]
    unsafe fn load<L: Lanes>(p: *const u8) -> L {
        // SAFETY: 16 elements are readable.
        unsafe { L::load_f16(p) }
    }
}

impl Element for BF16 {
    const BYTES: usize = 2;
    #[inline(always)]
    unsafe fn load<L: Lanes>(p: *const u8) -> L {
        // SAFETY: 16 elements are readable.
        unsafe { L::load_bf16(p) }
    }
}

impl Element for I8 {
    const BYTES: usize = 1;
    #[inline(always)]
    unsafe fn load<L: Lanes>(p: *const u8) -> L {
        // SAFETY: 16 elements are readable.
        L::to_f32(unsafe { L::i_load_i8(p) })
    }
}

impl KvElement for F32 {
    #[inline(always)]
    unsafe fn write<L: Lanes>(from: *const f32, n: usize, to: *mut u8, step: usize) -> f32 {
        // SAFETY: the caller's promise; elements need no alignment.
        unsafe {
            if step == 1 {
                std::ptr::copy_nonoverlapping(from.cast(), to, n * Self::BYTES);
            } else {
                scatter::<f32>(from, n, to, step);
            }
        }
        1.0
    }
}

impl KvElement for F16 {
    #[inline(always)]
    unsafe fn write<L: Lanes>(from: *const f32, n: usize, to: *mut u8, step: usize) -> f32 {
        let mut halves = [0u16; LANES];
        for e in (0..n).step_by(LANES) {
            let part = LANES.min(n - e);
            // SAFETY: `part` floats from `e` on are within `n`; `halves` holds 16 elements.
            unsafe {
                load_part::<L>(from.add(e), part).store_f16(halves.as_mut_ptr().cast());
                scatter(halves.as_ptr(), part, to.add(e * step * Self::BYTES), step);
            }
        }
        1.0
    }
}

impl KvElement for I8 {
    const SCALED: bool = true;

    /// `scale = amax / 127`, `q = round(x * (127 / amax))`, ties to even; as activations are
    /// quantised, over the whole head. An infinity or NaN makes the scale NaN.
    #[inline(always)]
    unsafe fn write<L: Lanes>(from: *const f32, n: usize, to: *mut u8, step: usize) -> f32 {
        const TINY: f32 = f32::from_bits((127 - 100) << 23);
        let mut bits = L::i_splat(0);
        for e in (0..n).step_by(LANES) {
            // SAFETY: within the `n` floats.
            let x = unsafe { load_part::<L>(from.add(e), LANES.min(n - e)) };
            bits = L::i_max(bits, x.abs_bits());
        }
        let amax = f32::from_bits(L::i_largest(bits) as u32);
        let (scale, inverse) = match amax {
            amax if amax < TINY => (0.0, 0.0),
            amax if amax <= f32::MAX => (amax / 127.0, 127.0 / amax),
            _ => return f32::NAN,
        };
        let mut bytes = [0i8; LANES];
        for e in (0..n).step_by(LANES) {
            let part = LANES.min(n - e);
            // SAFETY: `part` floats from `e` on are within `n`; `bytes` holds 16 elements.
            unsafe {
                let x = load_part::<L>(from.add(e), part).mul(L::splat(inverse));
                L::i_store_i8(x.to_i32(), bytes.as_mut_ptr());
                scatter(bytes.as_ptr(), part, to.add(e * step), step);
            }
        }
        scale
    }
}

/// `to[i * step] = from[i]`
///
/// # Safety
/// `n` elements are readable, and writable at those places.
#[inline(always)]
unsafe fn scatter<T: Copy>(from: *const T, n: usize, to: *mut u8, step: usize) {
    let to = to.cast::<T>();
    for i in 0..n {
        // SAFETY: the caller's promise.
        unsafe { to.add(i * step).write_unaligned(*from.add(i)) };
    }
}
