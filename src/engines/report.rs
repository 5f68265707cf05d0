//! All devices of all backends on this machine, with what they reach.

use std::time::Instant;

use dunlin_backend::{Backend, BackendError, DType, DeviceInfo, HostTensor, LinearPart, Part};
use dunlin_cpu::{CpuBackend, CpuOptions};
use dunlin_wgpu::WgpuBackend;

use super::machine_memory;

/// A device of this machine, for people.
#[derive(Debug, Clone, serde::Serialize)]
pub struct DeviceReport {
    /// As cluster.toml names it.
    pub id: String,
    pub description: String,
    pub memory_bytes: u64,
    pub features: Vec<String>,
    pub rates: Option<DeviceRates>,
    /// Why it could not be opened or measured.
    pub trouble: Option<String>,
}

/// What a device reached just now.
#[derive(Debug, Clone, serde::Serialize)]
pub struct DeviceRates {
    pub bytes_per_s: f64,
    /// What moved those bytes.
    pub bandwidth_of: &'static str,
    pub matmul_flops_per_s: f64,
    pub matmul_of: &'static str,
}

/// All devices of all backends, measured one after another if asked.
pub fn devices(measure: bool) -> Vec<DeviceReport> {
    let mut all = vec![cpu_report(measure)];
    all.extend(dunlin_wgpu::adapters().into_iter().map(|adapter| {
        let rates = measure.then(|| adapter_rates(&adapter.id)).transpose();
        let (rates, trouble) = match rates {
            Ok(rates) => (rates, None),
            Err(trouble) => (None, Some(trouble)),
        };
        DeviceReport {
            description: format!("{} ({}; {})", adapter.name, adapter.kind, adapter.driver),
            memory_bytes: adapter.memory_bytes,
            features: adapter.features.iter().map(ToString::to_string).collect(),
            id: adapter.id,
            rates,
            trouble,
        }
    }));
    all
}

fn adapter_rates(id: &str) -> Result<DeviceRates, String> {
    let backend = WgpuBackend::open(id).map_err(|e| e.to_string())?;
    let rates = backend.measure().map_err(|e| e.to_string())?;
    Ok(DeviceRates {
        bytes_per_s: rates.copy_bytes,
        bandwidth_of: "copy",
        matmul_flops_per_s: rates.matmul_flops,
        matmul_of: "float32, 512 x 512 x 512",
    })
}

fn cpu_report(measure: bool) -> DeviceReport {
    let report = |info: Option<DeviceInfo>, rates, trouble| {
        let (machine, _) = machine_memory();
        DeviceReport {
            id: "cpu".into(),
            description: info.map_or_else(|| "processor".into(), |info| info.description),
            memory_bytes: machine,
            features: Vec::new(),
            rates,
            trouble,
        }
    };
    let backend = match CpuBackend::new(CpuOptions::default()) {
        Ok(backend) => backend,
        Err(e) => return report(None, None, Some(e.to_string())),
    };
    let info = Some(backend.info());
    if !measure {
        return report(info, None, None);
    }
    match cpu_rates(&backend) {
        Ok(rates) => report(info, Some(rates), None),
        Err(e) => report(info, None, Some(e.to_string())),
    }
}

/// A product with one row streams its weight once; one with many rows computes.
fn cpu_rates(backend: &CpuBackend) -> Result<DeviceRates, BackendError> {
    const SIDE: usize = 512;
    let product = |outs: usize, cols: usize, rows: usize| -> Result<f64, BackendError> {
        let values = vec![0u8; outs * cols * size_of::<f32>()];
        let t = HostTensor::new("a measurement", DType::F32, outs, cols, values.into())?;
        let weight = backend.weight(&t, &Part::all(&t))?;
        let (x, mut out) = (backend.tensor(rows, cols)?, backend.tensor(rows, outs)?);
        let mut best = f64::MAX;
        for _ in 0..4 {
            let start = Instant::now();
            let part = LinearPart { weight: &weight, bias: None, out: &mut out };
            backend.linear(&x, &mut [part])?;
            best = best.min(start.elapsed().as_secs_f64());
        }
        Ok(best.max(1e-9))
    };
    let (outs, cols) = (4096, 4096);
    Ok(DeviceRates {
        bytes_per_s: (outs * cols * size_of::<f32>()) as f64 / product(outs, cols, 1)?,
        bandwidth_of: "read",
        matmul_flops_per_s: 2.0 * (SIDE as f64).powi(3) / product(SIDE, SIDE, SIDE)?,
        matmul_of: "float32, 512 x 512 x 512",
    })
}
