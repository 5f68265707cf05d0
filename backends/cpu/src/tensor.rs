//! Float32 activations on the host.

use crate::lanes::LANES;
use crate::memory::Buf;
use dunlin_backend::BackendError;

/// Float32 activations `[rows <= capacity, cols]`. Each row is padded to whole vectors and aligned,
/// so that kernels may read and write whole vectors; the padding means nothing.
pub struct CpuTensor {
    pub(crate) data: Buf<f32>,
    pub(crate) rows: usize,
    pub(crate) cols: usize,
    pub(crate) capacity: usize,
    pub(crate) stride: usize,
}

impl CpuTensor {
    pub(crate) fn new(capacity: usize, cols: usize) -> Result<Self, BackendError> {
        // An impossible size saturates to one that the allocation refuses.
        let stride = cols.checked_next_multiple_of(LANES).unwrap_or(usize::MAX);
        let len = capacity.saturating_mul(stride);
        let data = Buf::new(len, &format!("a tensor [{capacity}, {cols}]"), false)?;
        Ok(Self { data, rows: capacity, cols, capacity, stride })
    }

    /// Rows in use.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Elements in a row.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// Row `i` of those in use.
    pub fn row(&self, i: usize) -> &[f32] {
        assert!(i < self.rows, "row {i} of {}", self.rows);
        &self.data[i * self.stride..][..self.cols]
    }

    pub(crate) fn row_mut(&mut self, i: usize) -> &mut [f32] {
        &mut self.data[i * self.stride..][..self.cols]
    }

    pub(crate) fn set_rows(&mut self, op: &'static str, rows: usize) -> Result<(), BackendError> {
        if rows > self.capacity {
            return Err(shape(
                op,
                format!("{rows} rows do not fit a tensor with room for {}", self.capacity),
            ));
        }
        self.rows = rows;
        Ok(())
    }
}

pub(crate) fn shape(op: &'static str, detail: String) -> BackendError {
    BackendError::Shape { op, detail }
}

/// Refuses unless `got == want`; `what` names the quantity.
pub(crate) fn same(
    op: &'static str,
    what: &str,
    got: usize,
    want: usize,
) -> Result<(), BackendError> {
    if got == want { Ok(()) } else { Err(shape(op, format!("{what} is {got}, must be {want}"))) }
}
