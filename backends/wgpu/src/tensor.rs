//! Activations on the device.

use crate::gpu::{Buffer, Gpu};
use dunlin_backend::BackendError;
use std::sync::Arc;

/// Float32 rows. A row takes a multiple of 32 elements, zero beyond `cols`, so that kernels read
/// whole blocks.
pub struct WgpuTensor {
    pub(crate) buffer: Buffer,
    pub(crate) capacity: usize,
    pub(crate) rows: usize,
    pub(crate) cols: usize,
    pub(crate) stride: usize,
}

impl WgpuTensor {
    pub(crate) fn new(gpu: &Arc<Gpu>, capacity: usize, cols: usize) -> Result<Self, BackendError> {
        let size = cols.max(1).checked_next_multiple_of(32).and_then(|stride| {
            let bytes = capacity.checked_mul(stride)?.checked_mul(size_of::<f32>())?;
            Some((stride, u64::try_from(bytes).ok()?))
        });
        let (stride, bytes) = size.ok_or_else(|| {
            shape("tensor", format!("[{capacity}, {cols}] is too large to be counted"))
        })?;
        let buffer = gpu.storage(bytes, "activations")?;
        Ok(Self { buffer, capacity, rows: capacity, cols, stride })
    }

    pub fn rows(&self) -> usize {
        self.rows
    }

    pub fn cols(&self) -> usize {
        self.cols
    }

    pub(crate) fn set_rows(&mut self, op: &'static str, rows: usize) -> Result<(), BackendError> {
        if rows > self.capacity {
            return Err(shape(op, format!("{rows} rows, room for {}", self.capacity)));
        }
        self.rows = rows;
        Ok(())
    }

    /// vec4s of the rows in use.
    pub(crate) fn vectors(&self) -> u32 {
        word(self.rows * self.stride / 4)
    }
}

pub(crate) fn shape(op: &'static str, detail: impl Into<String>) -> BackendError {
    BackendError::Shape { op, detail: detail.into() }
}

/// Refuses where `have` is not `want`.
pub(crate) fn same(
    op: &'static str,
    what: &str,
    have: usize,
    want: usize,
) -> Result<(), BackendError> {
    if have == want { Ok(()) } else { Err(shape(op, format!("{have} {what}, not {want}"))) }
}

/// A size that lies within a buffer: buffers are smaller than 4 GiB, so it fits.
pub(crate) fn word(n: usize) -> u32 {
    u32::try_from(n).expect("sizes within a buffer fit 32 bits")
}
