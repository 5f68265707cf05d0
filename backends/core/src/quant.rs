//! GGUF's block formats, in plain Rust: the definition that every backend is held to.
//!
//! Every quantised type is read as sub-blocks of 32 elements whose values are
//! `scale[i / 16] * (code[i] - offset) + min`. The products `scale * (code - offset)` have at most
//! 24 significant bits, so they are exact in float32 and the only rounding is that of `+ min`:
//! fused or separate multiply-add give the same bits, which are those of ggml's
//! `dequantize_row_*`. (A type without minimum has `min = -0.0`, which changes no sum.)
//!
//! Layouts: `ggml-common.h` (`block_q4_0` ... `block_q6_K`); float16 fields are little-endian.
//! This file knows nothing of tensors, slices or devices.

use crate::DType;
use half::{bf16, f16};

/// Elements of a sub-block: the unit that all quantised types share.
pub const SUB_BLOCK: usize = 32;

/// 32 consecutive elements of a quantised row, as unsigned codes.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SubBlock {
    /// Unsigned codes, in element order.
    pub codes: [u8; SUB_BLOCK],
    /// What is subtracted from a code: [`code_offset`] of the type.
    pub offset: i32,
    /// Scales of elements `0..16` and `16..32`.
    pub scale: [f32; 2],
    /// Added to every element; `-0.0` where the type has no minimum.
    pub min: f32,
}

/// The constant that turns a type's unsigned codes into signed weights.
pub const fn code_offset(dtype: DType) -> i32 {
    match dtype {
        DType::Q8_0 => 128,
        DType::Q4_0 => 8,
        DType::Q5_0 => 16,
        DType::Q6_K => 32,
        DType::F32 | DType::F16 | DType::BF16 => 0,
        DType::Q4_1 | DType::Q5_1 | DType::Q4_K | DType::Q5_K => 0,
    }
}

/// Dequantises a whole row into `out`, whose length is the row's column count.
///
/// # Panics
/// Where `src` is not exactly `dtype.row_bytes(out.len())` bytes long: a caller's mistake, since
/// [`crate::HostTensor::new`] has checked what came from a file.
pub fn dequantize_row(dtype: DType, src: &[u8], out: &mut [f32]) {
    assert_eq!(dtype.row_bytes(out.len()), Some(src.len()), "{dtype:?} row of {}", out.len());
    match dtype {
        DType::F32 => {
            for (o, b) in out.iter_mut().zip(src.chunks_exact(4)) {
                *o = f32::from_le_bytes([b[0], b[1], b[2], b[3]]);
            }
        }
        DType::F16 => {
            for (o, b) in out.iter_mut().zip(src.chunks_exact(2)) {
                *o = f16::from_le_bytes([b[0], b[1]]).to_f32();
            }
        }
        DType::BF16 => {
            for (o, b) in out.iter_mut().zip(src.chunks_exact(2)) {
                *o = bf16::from_le_bytes([b[0], b[1]]).to_f32();
            }
        }
        _ => {
            let (wide, bytes) = (dtype.block_elements(), dtype.block_bytes());
            for (o, block) in out.chunks_exact_mut(wide).zip(src.chunks_exact(bytes)) {
                for (sub, o) in o.chunks_exact_mut(SUB_BLOCK).enumerate() {
                    sub_block(dtype, block, sub).values(o);
                }
            }
        }
    }
}

impl SubBlock {
    /// Writes the 32 values.
    pub fn values(&self, out: &mut [f32]) {
        for (i, (o, &code)) in out.iter_mut().zip(&self.codes).enumerate() {
            *o = self.scale[i / 16] * (code as i32 - self.offset) as f32 + self.min;
        }
    }
}

/// Sub-block `sub` of one block (`sub` is 0 for the 32-wide types, `0..8` for the k-quants).
///
/// # Panics
/// Where `block` is shorter than `dtype.block_bytes()`, `sub` is past the block's end, or `dtype`
/// is a plain float type, which has no blocks.
pub fn sub_block(dtype: DType, block: &[u8], sub: usize) -> SubBlock {
    let offset = code_offset(dtype);
    let mut codes = [0u8; SUB_BLOCK];
    let scale;
    let mut min = -0.0f32;
    match dtype {
        DType::Q8_0 => {
            scale = [half_at(block, 0); 2];
            for (c, &q) in codes.iter_mut().zip(&block[2..34]) {
                *c = q ^ 0x80;
            }
        }
        DType::Q4_0 => {
            scale = [half_at(block, 0); 2];
            nibbles(&block[2..18], &mut codes);
        }
        DType::Q4_1 => {
            scale = [half_at(block, 0); 2];
            min = half_at(block, 2);
            nibbles(&block[4..20], &mut codes);
        }
        DType::Q5_0 => {
            scale = [half_at(block, 0); 2];
            nibbles(&block[6..22], &mut codes);
            fifth_bits(&block[2..6], &mut codes);
        }
        DType::Q5_1 => {
            scale = [half_at(block, 0); 2];
            min = half_at(block, 2);
            nibbles(&block[8..24], &mut codes);
            fifth_bits(&block[4..8], &mut codes);
        }
        DType::Q4_K | DType::Q5_K => {
            let (sc, m) = scale_min_k4(&block[4..16], sub);
            scale = [half_at(block, 0) * sc as f32; 2];
            min = -(half_at(block, 2) * m as f32);
            let low = if dtype == DType::Q4_K { &block[16..144] } else { &block[48..176] };
            let shift = 4 * (sub % 2);
            for (c, &q) in codes.iter_mut().zip(&low[32 * (sub / 2)..]) {
                *c = (q >> shift) & 0x0f;
            }
            if dtype == DType::Q5_K {
                for (c, &h) in codes.iter_mut().zip(&block[16..48]) {
                    *c |= ((h >> sub) & 1) << 4;
                }
            }
        }
        DType::Q6_K => {
            let d = half_at(block, 208);
            scale = [2 * sub, 2 * sub + 1].map(|s| d * (block[192 + s] as i8) as f32);
            // Two halves of 128 elements; in each, four runs of 32 share low bytes pairwise.
            let (half, run) = (sub / 4, sub % 4);
            let low = &block[64 * half + 32 * (run % 2)..];
            let high = &block[128 + 32 * half..];
            for (i, c) in codes.iter_mut().enumerate() {
                *c = ((low[i] >> (4 * (run / 2))) & 0x0f) | (((high[i] >> (2 * run)) & 3) << 4);
            }
        }
        DType::F32 | DType::F16 | DType::BF16 => panic!("{dtype:?} has no blocks"),
    }
    SubBlock { codes, offset, scale, min }
}

/// Six-bit scale and minimum of sub-block `sub` (`0..8`) from a k-quant's 12 packed bytes.
pub fn scale_min_k4(packed: &[u8], sub: usize) -> (u8, u8) {
    if sub < 4 {
        (packed[sub] & 63, packed[sub + 4] & 63)
    } else {
        (
            (packed[sub + 4] & 0x0f) | ((packed[sub - 4] >> 6) << 4),
            (packed[sub + 4] >> 4) | ((packed[sub] >> 6) << 4),
        )
    }
}

fn half_at(block: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([block[at], block[at + 1]]).to_f32()
}

/// Low nibbles are elements `0..16`, high nibbles `16..32`.
fn nibbles(packed: &[u8], codes: &mut [u8; SUB_BLOCK]) {
    for (i, &q) in packed.iter().enumerate() {
        codes[i] = q & 0x0f;
        codes[i + 16] = q >> 4;
    }
}

/// Bit `i` of the little-endian word is bit 4 of element `i`.
fn fifth_bits(packed: &[u8], codes: &mut [u8; SUB_BLOCK]) {
    for (i, c) in codes.iter_mut().enumerate() {
        *c |= ((packed[i / 8] >> (i % 8)) & 1) << 4;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(dtype: DType, src: &[u8]) -> Vec<f32> {
        let n = src.len() / dtype.block_bytes() * dtype.block_elements();
        let mut out = vec![0.0; n];
        dequantize_row(dtype, src, &mut out);
        out
    }

    /// Deterministic bytes with float16 fields that are ordinary numbers.
    fn block(dtype: DType, seed: u64, halves: &[usize]) -> Vec<u8> {
        let mut s = seed | 1;
        let mut out: Vec<u8> = (0..dtype.block_bytes())
            .map(|_| {
                s = s.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                (s >> 56) as u8
            })
            .collect();
        for &at in halves {
            let v = f16::from_f32(((s >> (8 + at % 7)) % 1000) as f32 * 1e-3 - 0.4);
            out[at..at + 2].copy_from_slice(&v.to_le_bytes());
        }
        out
    }

    fn h(b: &[u8], at: usize) -> f32 {
        f16::from_le_bytes([b[at], b[at + 1]]).to_f32()
    }

    // The loops below follow ggml-quants.c statement by statement.

    #[test]
    fn five_bit_types_follow_ggml() {
        for seed in 0..50 {
            let b = block(DType::Q5_1, seed, &[0, 2]);
            let (d, m) = (h(&b, 0), h(&b, 2));
            let qh = u32::from_le_bytes([b[4], b[5], b[6], b[7]]);
            let y = row(DType::Q5_1, &b);
            for j in 0..16 {
                let xh0 = ((qh >> j) << 4) & 0x10;
                let xh1 = (qh >> (j + 12)) & 0x10;
                let x0 = (b[8 + j] & 0x0f) as u32 | xh0;
                let x1 = (b[8 + j] >> 4) as u32 | xh1;
                assert_eq!(y[j], x0 as f32 * d + m);
                assert_eq!(y[j + 16], x1 as f32 * d + m);
            }
            let b = block(DType::Q5_0, seed, &[0]);
            let d = h(&b, 0);
            let qh = u32::from_le_bytes([b[2], b[3], b[4], b[5]]);
            let y = row(DType::Q5_0, &b);
            for j in 0..16 {
                let x0 = ((b[6 + j] & 0x0f) as u32 | ((qh >> j) << 4) & 0x10) as i32 - 16;
                let x1 = ((b[6 + j] >> 4) as u32 | (qh >> (j + 12)) & 0x10) as i32 - 16;
                assert_eq!((y[j], y[j + 16]), (x0 as f32 * d, x1 as f32 * d));
            }
        }
    }

    #[test]
    fn four_and_eight_bit_types_follow_ggml() {
        for seed in 0..50 {
            let b = block(DType::Q4_0, seed, &[0]);
            let y = row(DType::Q4_0, &b);
            let z = block(DType::Q4_1, seed, &[0, 2]);
            let w = row(DType::Q4_1, &z);
            for j in 0..16 {
                assert_eq!(y[j], ((b[2 + j] & 0x0f) as i32 - 8) as f32 * h(&b, 0));
                assert_eq!(y[j + 16], ((b[2 + j] >> 4) as i32 - 8) as f32 * h(&b, 0));
                assert_eq!(w[j], (z[4 + j] & 0x0f) as f32 * h(&z, 0) + h(&z, 2));
                assert_eq!(w[j + 16], (z[4 + j] >> 4) as f32 * h(&z, 0) + h(&z, 2));
            }
            let b = block(DType::Q8_0, seed, &[0]);
            for (j, y) in row(DType::Q8_0, &b).into_iter().enumerate() {
                assert_eq!(y, (b[2 + j] as i8) as f32 * h(&b, 0));
            }
        }
    }

    #[test]
    fn k_quants_follow_ggml() {
        for seed in 0..50 {
            for dtype in [DType::Q4_K, DType::Q5_K] {
                let b = block(dtype, seed, &[0, 2]);
                let (d, min) = (h(&b, 0), h(&b, 2));
                let (qh, mut q) = if dtype == DType::Q4_K { (0, 16) } else { (16, 48) };
                let mut want = Vec::new();
                let (mut is, mut u1, mut u2) = (0, 1u8, 2u8);
                for _ in 0..4 {
                    let (sc, m) = scale_min_k4(&b[4..16], is);
                    let (d1, m1) = (d * sc as f32, min * m as f32);
                    let (sc, m) = scale_min_k4(&b[4..16], is + 1);
                    let (d2, m2) = (d * sc as f32, min * m as f32);
                    let high = |l: usize, u: u8| {
                        if qh != 0 && b[qh + l] & u != 0 { 16 } else { 0 }
                    };
                    for l in 0..32 {
                        want.push(d1 * ((b[q + l] & 0x0f) + high(l, u1)) as f32 - m1);
                    }
                    for l in 0..32 {
                        want.push(d2 * ((b[q + l] >> 4) + high(l, u2)) as f32 - m2);
                    }
                    (q, is, u1, u2) = (q + 32, is + 2, u1.rotate_left(2), u2.rotate_left(2));
                }
                assert_eq!(row(dtype, &b), want);
            }
        }
    }

    #[test]
    fn q6_k_follows_ggml() {
        for seed in 0..50 {
            let b = block(DType::Q6_K, seed, &[208]);
            let d = h(&b, 208);
            let mut want = vec![0.0; 256];
            for n in 0..2 {
                let (ql, qh, sc) = (64 * n, 128 + 32 * n, 192 + 8 * n);
                for l in 0..32 {
                    let is = l / 16;
                    let s = |k: usize| (b[sc + is + k] as i8) as f32;
                    let q = |low: u8, shift: u8| {
                        ((low | (((b[qh + l] >> shift) & 3) << 4)) as i8 - 32) as f32
                    };
                    want[128 * n + l] = d * s(0) * q(b[ql + l] & 0x0f, 0);
                    want[128 * n + l + 32] = d * s(2) * q(b[ql + l + 32] & 0x0f, 2);
                    want[128 * n + l + 64] = d * s(4) * q(b[ql + l] >> 4, 4);
                    want[128 * n + l + 96] = d * s(6) * q(b[ql + l + 32] >> 4, 6);
                }
            }
            assert_eq!(row(DType::Q6_K, &b), want);
        }
    }

    #[test]
    fn plain_floats_are_read_little_endian() {
        assert_eq!(row(DType::F32, &1.5f32.to_le_bytes()), [1.5]);
        assert_eq!(row(DType::F16, &f16::from_f32(-2.25).to_le_bytes()), [-2.25]);
        assert_eq!(row(DType::BF16, &bf16::from_f32(3.0).to_le_bytes()), [3.0]);
    }
}
