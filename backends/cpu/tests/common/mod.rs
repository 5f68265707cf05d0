//! One backend per instruction path.
#![allow(dead_code)]

use dunlin_backend::quant::dequantize_row;
use dunlin_backend::{Backend, HostTensor, KvDtype, LinearPart, Part};
use dunlin_cpu::{CpuBackend, CpuOptions, CpuTensor, Path, Precision};

#[allow(unused_imports)]
pub use dunlin_suite::random::{Random, download, matrix, same_bits, upload};

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

pub fn bits(b: &CpuBackend, t: &CpuTensor) -> Vec<u32> {
    download(b, t).into_iter().map(f32::to_bits).collect()
}

/// `x * part(t)^T` as the backend computes it.
pub fn linear(b: &CpuBackend, t: &HostTensor, part: &Part, x: &[f32]) -> Vec<f32> {
    let w = b.weight(t, part).unwrap();
    let x = upload(b, part.cols.len(), x);
    let mut out = b.tensor(x.rows(), part.rows.len()).unwrap();
    b.linear(&x, &mut [LinearPart { weight: &w, bias: None, out: &mut out }]).unwrap();
    download(b, &out)
}
