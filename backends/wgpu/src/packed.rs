//! Activations as int8, for products that multiply bytes.

use crate::gpu::{Buffer, Gpu};
use crate::kernels::Kernel;
use crate::record::Recorder;
use crate::tensor::{WgpuTensor, word};
use dunlin_backend::BackendError;
use std::sync::Arc;

/// Codes and scales of one tensor at a time, made at first use for the largest.
#[derive(Default)]
pub(crate) struct Scratch {
    made: Option<(Buffer, Buffer)>,
}

impl Scratch {
    /// Records the rounding of `x`, and gives where its codes and scales will be.
    pub fn of(
        &mut self,
        gpu: &Arc<Gpu>,
        rec: &mut Recorder,
        x: &WgpuTensor,
    ) -> Result<(&Buffer, &Buffer), BackendError> {
        let blocks = x.stride / 32;
        let (codes, scales) = (32 * (blocks * x.capacity) as u64, 8 * (blocks * x.capacity) as u64);
        if !self.made.as_ref().is_some_and(|(c, s)| c.bytes >= codes && s.bytes >= scales) {
            let make = |bytes| gpu.storage(bytes, "activations as int8");
            self.made = Some((make(codes)?, make(scales)?));
        }
        let (codes, scales) =
            self.made.as_ref().ok_or_else(|| gpu.lost("no room for int8 activations"))?;
        let size = (word(blocks).div_ceil(32), word(x.rows));
        let params = [word(blocks)];
        rec.dispatch(Kernel::Quantise, &[&x.buffer], &[codes, scales], &params, size)?;
        Ok((codes, scales))
    }
}
