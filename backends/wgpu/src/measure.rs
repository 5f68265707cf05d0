//! What an adapter reaches: the rates that plans and rooflines start from.

use crate::backend::WgpuBackend;
use crate::kernels::Kernel;
use crate::tensor::WgpuTensor;
use bytes::Bytes;
use dunlin_backend::{Backend, BackendError, DType, HostTensor, LinearPart, Part};
use std::time::{Duration, Instant};

/// Measured rates of one adapter; the best of a few runs.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Rates {
    /// Bytes per second, read and written, of a copy within device memory.
    pub copy_bytes: f64,
    /// Float32 operations per second of a product of two square matrices.
    pub matmul_flops: f64,
    /// From handing over one small dispatch to having its result on the host.
    pub round_trip: Duration,
}

/// Bytes of the copy; more than caches hold, less than any adapter's binding.
const COPY_BYTES: usize = 64 << 20;
/// Rows and columns of the product.
const SIDE: usize = 512;
const RUNS: usize = 3;

impl WgpuBackend {
    /// Takes about a second on a software adapter.
    pub fn measure(&self) -> Result<Rates, BackendError> {
        let floats = COPY_BYTES / size_of::<f32>();
        let (source, target) =
            (self.tensor(floats / 1024, 1024)?, self.tensor(floats / 1024, 1024)?);
        let mut small = self.tensor(1, 32)?;
        let copy = self.best(&mut small, |b| b.copy(&source, &target))?;
        let values = vec![0u8; SIDE * SIDE * size_of::<f32>()];
        let t = HostTensor::new("a measurement", DType::F32, SIDE, SIDE, Bytes::from(values))?;
        let weight = self.weight(&t, &Part::all(&t))?;
        let (x, mut y) = (self.tensor(SIDE, SIDE)?, self.tensor(SIDE, SIDE)?);
        let matmul = self.best(&mut small, |b| {
            b.linear(&x, &mut [LinearPart { weight: &weight, bias: None, out: &mut y }])
        })?;
        let idle = self.best(&mut small, |_| Ok(()))?;
        let net = |t: Duration| t.saturating_sub(idle).as_secs_f64().max(1e-9);
        Ok(Rates {
            copy_bytes: 2.0 * COPY_BYTES as f64 / net(copy),
            matmul_flops: 2.0 * (SIDE as f64).powi(3) / net(matmul),
            round_trip: idle,
        })
    }

    fn copy(&self, from: &WgpuTensor, to: &WgpuTensor) -> Result<(), BackendError> {
        self.record(|rec| self.flat(rec, Kernel::Copy, &from.buffer, to))
    }

    /// The shortest time from recording to a small download, over a few runs after a first.
    fn best(
        &self,
        small: &mut WgpuTensor,
        mut work: impl FnMut(&Self) -> Result<(), BackendError>,
    ) -> Result<Duration, BackendError> {
        let mut best = Duration::MAX;
        let mut out = Vec::new();
        for run in 0..=RUNS {
            let start = Instant::now();
            work(self)?;
            self.record(|rec| self.flat(rec, Kernel::Clear, &self.nothing, small))?;
            self.download(small, &mut out)?;
            // The first run compiles.
            if run > 0 {
                best = best.min(start.elapsed());
            }
        }
        Ok(best)
    }
}
