//! Which kernel of several suits an adapter: measured once a process for each adapter. All give the
//! same bits, so the choice, and a bad moment to measure, cost time alone.

use crate::backend::WgpuBackend;
use crate::kernels::Kernel;
use bytes::Bytes;
use dunlin_backend::{Backend, BackendError, DType, HostTensor, LinearPart, Part};
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// A kernel for products.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Product {
    /// So many rows of so many columns a thread.
    Rows(u32, u32),
    /// One row; threads share a column.
    Split,
    /// Weights unpacked into workgroup memory.
    Tiled,
}

/// Shapes of kernels.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Tuning {
    pub one_row: Product,
    pub many_rows: Product,
    /// Threads that share a norm.
    pub(crate) norm_lanes: u32,
    /// Query heads of an attention workgroup.
    pub(crate) attention_heads: u32,
    /// Whether the scan of logits reduces by subgroups.
    pub(crate) subgroup_scan: bool,
}

/// Rows from which a call counts as having many.
const MANY: usize = 2;

/// A matrix like those of a small model.
const SHAPE: (usize, usize) = (1024, 1024);
const MANY_ROWS: usize = 32;

impl Product {
    pub const ONE_ROW: [Product; 3] = [Product::Rows(1, 1), Product::Rows(1, 4), Product::Split];
    pub const MANY_ROWS: [Product; 3] = [Product::Rows(8, 1), Product::Rows(4, 4), Product::Tiled];

    /// The kernel, and how many rows of a call one workgroup makes.
    pub(crate) fn kernel(self, dtype: DType) -> (Kernel, u32) {
        match self {
            Product::Rows(rows, cols) => (Kernel::Linear { dtype, rows, cols }, rows),
            Product::Split => (Kernel::LinearSplit(dtype), 1),
            Product::Tiled => (Kernel::LinearTiled(dtype), 32),
        }
    }
}

impl Tuning {
    /// Before anything is measured. A barrier is dear on a software adapter and eight lanes are one
    /// vector; elsewhere barriers are cheap.
    pub(crate) fn start(software: bool, subgroups: bool) -> Self {
        let (norm_lanes, attention_heads) = if software { (8, 1) } else { (64, 4) };
        let (one_row, many_rows) = (Product::Rows(1, 4), Product::Rows(4, 4));
        Self { one_row, many_rows, norm_lanes, attention_heads, subgroup_scan: subgroups }
    }

    pub(crate) fn product(&self, rows: usize) -> Product {
        if rows < MANY { self.one_row } else { self.many_rows }
    }
}

/// What was measured for adapters of these descriptions.
static KNOWN: Mutex<BTreeMap<String, (Product, Product)>> = Mutex::new(BTreeMap::new());

impl WgpuBackend {
    /// Chooses among the variants by measuring them, or by what an earlier opening measured.
    pub(crate) fn tune(&mut self) -> Result<(), BackendError> {
        let adapter = self.gpu.description.clone();
        // Held while measuring: two openings at once would disturb each other.
        let mut known = KNOWN.lock();
        let best = match known.get(&adapter) {
            Some(best) => *best,
            None => {
                let one = self.fastest(1, Product::ONE_ROW)?;
                let many = self.fastest(MANY_ROWS, Product::MANY_ROWS)?;
                tracing::info!(%adapter, ?one, ?many, "measured the variants of products");
                known.insert(adapter, (one, many));
                (one, many)
            }
        };
        (self.tuning.one_row, self.tuning.many_rows) = best;
        Ok(())
    }

    fn fastest(&mut self, rows: usize, of: [Product; 3]) -> Result<Product, BackendError> {
        let (outs, cols) = SHAPE;
        let bytes = DType::Q4_0.row_bytes(cols).unwrap_or(0) * outs;
        let values = Bytes::from(vec![0u8; bytes]);
        let t = HostTensor::new("a measurement", DType::Q4_0, outs, cols, values)?;
        let weight = self.weight(&t, &Part::all(&t))?;
        let (x, mut y) = (self.tensor(rows, cols)?, self.tensor(rows, outs)?);
        let mut best = (Duration::MAX, of[0]);
        for product in of {
            (self.tuning.one_row, self.tuning.many_rows) = (product, product);
            // The first run compiles.
            for run in 0..3 {
                let start = Instant::now();
                self.linear(&x, &mut [LinearPart { weight: &weight, bias: None, out: &mut y }])?;
                self.download(&y, &mut Vec::new())?;
                if run > 0 && start.elapsed() < best.0 {
                    best = (start.elapsed(), product);
                }
            }
        }
        Ok(best.1)
    }

    /// Fixes the variants, for tests that compare them.
    #[doc(hidden)]
    pub fn use_variants(&mut self, one_row: Product, many_rows: Product) {
        (self.tuning.one_row, self.tuning.many_rows) = (one_row, many_rows);
    }
}
