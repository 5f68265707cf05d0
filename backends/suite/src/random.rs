//! Random inputs, and how results are compared.

use bytes::Bytes;
use dunlin_backend::{Backend, DType, HostTensor};
use half::{bf16, f16};

/// A small generator, so that a test is a function of its seed.
pub struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ 0x1234_5678)
    }
    pub fn bits(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }
    pub fn below(&mut self, n: usize) -> usize {
        (self.bits() >> 33) as usize % n
    }
    /// In `-1..1`.
    pub fn float(&mut self) -> f32 {
        (self.bits() >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    }
    pub fn floats(&mut self, n: usize) -> Vec<f32> {
        (0..n).map(|_| self.float()).collect()
    }
}

/// A matrix with every code, and scales of ordinary size.
pub fn matrix(rng: &mut Random, dtype: DType, rows: usize, cols: usize) -> HostTensor {
    let mut data = Vec::new();
    let halves: &[usize] = match dtype {
        DType::Q8_0 | DType::Q4_0 | DType::Q5_0 => &[0],
        DType::Q4_1 | DType::Q5_1 | DType::Q4_K | DType::Q5_K => &[0, 2],
        DType::Q6_K => &[208],
        DType::F32 | DType::F16 | DType::BF16 => &[],
    };
    for _ in 0..rows * cols / dtype.block_elements() {
        match dtype {
            DType::F32 => data.extend(rng.float().to_le_bytes()),
            DType::F16 => data.extend(f16::from_f32(rng.float()).to_le_bytes()),
            DType::BF16 => data.extend(bf16::from_f32(rng.float()).to_le_bytes()),
            _ => {
                let at = data.len();
                data.extend((0..dtype.block_bytes()).map(|_| rng.bits() as u8));
                for h in halves {
                    let scale = f16::from_f32(rng.float() * 0.02);
                    data[at + h..at + h + 2].copy_from_slice(&scale.to_le_bytes());
                }
            }
        }
    }
    HostTensor::new("a random matrix", dtype, rows, cols, Bytes::from(data)).expect("whole blocks")
}

pub fn upload<B: Backend>(b: &B, cols: usize, data: &[f32]) -> B::Tensor {
    let mut t = b.tensor(data.len() / cols, cols).expect("a tensor");
    b.upload(data, &mut t).expect("an upload");
    t
}

pub fn download<B: Backend>(b: &B, t: &B::Tensor) -> Vec<f32> {
    let mut out = Vec::new();
    b.download(t, &mut out).expect("a download");
    out
}

pub fn same_bits(a: &[f32], b: &[f32]) -> bool {
    a.len() == b.len() && a.iter().zip(b).all(|(a, b)| a.to_bits() == b.to_bits())
}

/// The first element further from the wanted one than `bound` times the largest wanted one.
pub fn far(got: &[f32], want: &[f32], bound: f32) -> Option<String> {
    if got.len() != want.len() {
        return Some(format!("{} elements instead of {}", got.len(), want.len()));
    }
    let size = want.iter().fold(1e-3f32, |m, v| m.max(v.abs()));
    // A NaN is not near to anything.
    let near = |g: f32, w: f32| (g - w).abs() <= bound * size;
    let wrong = |(_, (g, w)): &(usize, (&f32, &f32))| !near(**g, **w);
    let (i, (g, w)) = got.iter().zip(want).enumerate().find(wrong)?;
    Some(format!("element {i}: {g} instead of {w} (of {size})"))
}
