//! Random inputs, and one backend per instruction path.
#![allow(dead_code)]

use bytes::Bytes;
use dunlin_backend::quant::dequantize_row;
use dunlin_backend::{Backend, DType, HostTensor, KvDtype, LinearPart, Part};
use dunlin_cpu::{CpuBackend, CpuOptions, CpuTensor, Path, Precision};
use half::{bf16, f16};

pub const TYPES: [DType; 11] = [
    DType::F32,
    DType::F16,
    DType::BF16,
    DType::Q8_0,
    DType::Q4_0,
    DType::Q4_1,
    DType::Q5_0,
    DType::Q5_1,
    DType::Q4_K,
    DType::Q5_K,
    DType::Q6_K,
];

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
    HostTensor::new("test", dtype, rows, cols, Bytes::from(data)).unwrap()
}

pub fn dequantised(t: &HostTensor, part: &Part) -> Vec<Vec<f32>> {
    let mut row = vec![0.0; t.cols];
    part.rows
        .clone()
        .map(|r| {
            dequantize_row(t.dtype, t.row(r), &mut row);
            row[part.cols.clone()].to_vec()
        })
        .collect()
}

pub fn backend(path: Path, precision: Precision, threads: usize) -> CpuBackend {
    CpuBackend::new(CpuOptions { threads, precision, kv: None, path: Some(path) }).unwrap()
}

/// A backend in fast mode whose KV stores hold `kv`.
pub fn backend_with_kv(path: Path, threads: usize, kv: KvDtype) -> CpuBackend {
    let precision = Precision::Fast;
    CpuBackend::new(CpuOptions { threads, precision, kv: Some(kv), path: Some(path) }).unwrap()
}

/// The paths of this machine; a test of equality wants more than one.
pub fn paths() -> Vec<Path> {
    Path::ALL.into_iter().filter(|p| p.available()).collect()
}

pub fn upload(b: &CpuBackend, cols: usize, data: &[f32]) -> CpuTensor {
    let mut t = b.tensor(data.len() / cols, cols).unwrap();
    b.upload(data, &mut t).unwrap();
    t
}

pub fn bits(b: &CpuBackend, t: &CpuTensor) -> Vec<u32> {
    download(b, t).into_iter().map(f32::to_bits).collect()
}

pub fn download(b: &CpuBackend, t: &CpuTensor) -> Vec<f32> {
    let mut out = Vec::new();
    b.download(t, &mut out).unwrap();
    out
}

/// `x * part(t)^T` as the backend computes it.
pub fn linear(b: &CpuBackend, t: &HostTensor, part: &Part, x: &[f32]) -> Vec<f32> {
    let w = b.weight(t, part).unwrap();
    let x = upload(b, part.cols.len(), x);
    let mut out = b.tensor(x.rows(), part.rows.len()).unwrap();
    b.linear(&x, &mut [LinearPart { weight: &w, bias: None, out: &mut out }]).unwrap();
    download(b, &out)
}
