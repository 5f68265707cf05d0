//! Element types of model files, and host tensors that borrow the mapped file.

use bytes::Bytes;
use serde::{Deserialize, Serialize};
use std::ops::Range;

/// Element type of a stored tensor. Quantised types are GGUF's block formats.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[allow(non_camel_case_types)]
pub enum DType {
    F32,
    F16,
    BF16,
    Q8_0,
    Q4_0,
    Q4_1,
    Q5_0,
    Q5_1,
    Q4_K,
    Q5_K,
    Q6_K,
}

impl DType {
    pub const ALL: [DType; 11] = [
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

    /// Elements in one block (1 for plain floats, 32 or 256 for quantised types).
    pub const fn block_elements(self) -> usize {
        match self {
            DType::F32 | DType::F16 | DType::BF16 => 1,
            DType::Q8_0 | DType::Q4_0 | DType::Q4_1 | DType::Q5_0 | DType::Q5_1 => 32,
            DType::Q4_K | DType::Q5_K | DType::Q6_K => 256,
        }
    }

    /// Bytes of one block.
    pub const fn block_bytes(self) -> usize {
        match self {
            DType::F32 => 4,
            DType::F16 | DType::BF16 => 2,
            DType::Q8_0 => 34,
            DType::Q4_0 => 18,
            DType::Q4_1 => 20,
            DType::Q5_0 => 22,
            DType::Q5_1 => 24,
            DType::Q4_K => 144,
            DType::Q5_K => 176,
            DType::Q6_K => 210,
        }
    }

    /// Bytes of a row of `cols` elements, or `None` where `cols` does not fill whole blocks.
    pub const fn row_bytes(self, cols: usize) -> Option<usize> {
        if !cols.is_multiple_of(self.block_elements()) {
            return None;
        }
        (cols / self.block_elements()).checked_mul(self.block_bytes())
    }
}

/// A row-major matrix `[rows, cols]` on the host, in its file's form. `data` usually borrows the
/// mapped file, so cloning and slicing rows copy nothing. A vector is a matrix of one row.
#[derive(Debug, Clone)]
pub struct HostTensor {
    pub name: String,
    pub dtype: DType,
    pub rows: usize,
    pub cols: usize,
    /// Exactly `rows * dtype.row_bytes(cols)` bytes; no alignment is promised.
    pub data: Bytes,
}

impl HostTensor {
    /// Checks that `data` holds exactly the matrix.
    pub fn new(
        name: impl Into<String>,
        dtype: DType,
        rows: usize,
        cols: usize,
        data: Bytes,
    ) -> Result<Self, crate::BackendError> {
        let name = name.into();
        let need = dtype.row_bytes(cols).and_then(|row| row.checked_mul(rows));
        if need != Some(data.len()) {
            return Err(crate::BackendError::Shape {
                op: "host tensor",
                detail: format!(
                    "'{name}' [{rows}, {cols}] of {dtype:?} needs {need:?} bytes, has {}",
                    data.len()
                ),
            });
        }
        Ok(Self { name, dtype, rows, cols, data })
    }

    /// Bytes of one row.
    pub fn row_bytes(&self) -> usize {
        self.dtype.row_bytes(self.cols).expect("checked in new")
    }

    /// The bytes of row `row`.
    pub fn row(&self, row: usize) -> &[u8] {
        let n = self.row_bytes();
        &self.data[row * n..(row + 1) * n]
    }

    /// Rows `range` as a tensor of their own, without a copy.
    pub fn slice_rows(&self, range: Range<usize>) -> HostTensor {
        let n = self.row_bytes();
        HostTensor {
            name: self.name.clone(),
            dtype: self.dtype,
            rows: range.len(),
            cols: self.cols,
            data: self.data.slice(range.start * n..range.end * n),
        }
    }
}
