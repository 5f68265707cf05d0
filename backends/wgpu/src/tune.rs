//! Which kernel of several suits an adapter: measured once for each adapter, driver and set of
//! shaders, and kept on disk where there is a folder for it. All variants give the same bits, and
//! one that does not on the adapter at hand is never used; so the choice, and a bad moment to
//! measure, cost time alone.

use crate::attend::Attend;
use crate::backend::WgpuBackend;
use crate::kernels::Kernel;
use bytes::Bytes;
use dunlin_backend::{
    AttentionParams, Backend, BackendError, DType, Draw, HostTensor, KV_TILE, KvSpec, LinearPart,
    Part, Precision, Samples, SeqRows, Want,
};
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// A kernel for products.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Product {
    /// So many rows of so many columns a thread.
    Rows(u32, u32),
    /// One row; threads share a column.
    Split,
    /// Weights unpacked into workgroup memory.
    Tiled,
}

/// Shapes of kernels.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Tuning {
    pub one_row: Product,
    pub many_rows: Product,
    /// For one row and for many, in fast mode: products that multiply bytes, where those are much
    /// faster here. That is another arithmetic, so it has to be worth it: like adapters must not
    /// come to differ by a bad moment.
    pub packed: Option<(Product, Product)>,
    pub attention: Attend,
    /// Whether the scan of logits reduces by subgroups.
    pub(crate) subgroup_scan: bool,
    /// Whether float16 keys and values are read as the adapter's own float16.
    pub(crate) native_f16: bool,
    /// Whether float16 weights stay so in workgroup memory.
    pub(crate) half_tiles: bool,
    /// Threads that share a norm. Not measured: another number is another order of sums.
    pub(crate) norm_lanes: u32,
}

/// Rows from which a call counts as having many.
const MANY: usize = 2;

/// A matrix like those of a small model.
const SHAPE: (usize, usize) = (1024, 1024);
const MANY_ROWS: usize = 32;
/// Runs of each variant after a first, which compiles.
const RUNS: usize = 3;

impl Product {
    pub const ONE_ROW: [Product; 3] = [Product::Rows(1, 1), Product::Rows(1, 4), Product::Split];
    pub const MANY_ROWS: [Product; 3] = [Product::Rows(8, 1), Product::Rows(4, 4), Product::Tiled];

    pub const PACKED_ONE_ROW: [Product; 2] = [Product::Rows(1, 1), Product::Rows(1, 4)];
    pub const PACKED_MANY_ROWS: [Product; 3] = Self::MANY_ROWS;

    /// With int8 activations; [`Product::Split`] has no such kernel.
    pub(crate) fn packed_kernel(self, dtype: DType) -> (Kernel, u32) {
        match self {
            Product::Rows(rows, cols) => (Kernel::LinearPacked { dtype, rows, cols }, rows),
            Product::Split => (Kernel::LinearPacked { dtype, rows: 1, cols: 1 }, 1),
            Product::Tiled => (Kernel::LinearPackedTiled(dtype), 32),
        }
    }
}

impl Tuning {
    /// Before anything is measured. A barrier is dear on a software adapter and eight lanes are one
    /// vector; elsewhere barriers are cheap.
    pub(crate) fn start(software: bool) -> Self {
        Self {
            one_row: Product::Rows(1, 4),
            many_rows: Product::Rows(4, 4),
            packed: None,
            attention: Attend::ALL[0],
            subgroup_scan: false,
            native_f16: false,
            half_tiles: false,
            norm_lanes: if software { 8 } else { 64 },
        }
    }

    /// Whether a measurement could have come to this.
    pub(crate) fn is_possible(&self) -> bool {
        Product::ONE_ROW.contains(&self.one_row)
            && Product::MANY_ROWS.contains(&self.many_rows)
            && Attend::ALL.contains(&self.attention)
            && self.packed.is_none_or(|(one, many)| {
                Product::PACKED_ONE_ROW.contains(&one) && Product::PACKED_MANY_ROWS.contains(&many)
            })
    }

    /// The kernel of a product of so many rows, and how many of them one workgroup makes.
    pub(crate) fn kernel(&self, dtype: DType, rows: usize) -> (Kernel, u32) {
        match if rows < MANY { self.one_row } else { self.many_rows } {
            Product::Rows(rows, cols) => (Kernel::Linear { dtype, rows, cols }, rows),
            Product::Split => (Kernel::LinearSplit(dtype), 1),
            Product::Tiled => {
                let half = self.half_tiles && dtype == DType::F16;
                (Kernel::LinearTiled { dtype, half }, 32)
            }
        }
    }

    pub(crate) fn packed_product(&self, rows: usize) -> Product {
        let (one, many) = self.packed.unwrap_or((Product::Rows(1, 1), Product::Rows(1, 1)));
        if rows < MANY { one } else { many }
    }
}

/// What this process measured, or read from disk, for adapters of these descriptions.
static KNOWN: Mutex<BTreeMap<String, Tuning>> = Mutex::new(BTreeMap::new());

impl WgpuBackend {
    /// Chooses among the variants: by what an earlier opening measured, by what is on disk, or by
    /// measuring now.
    pub(crate) fn tune(&mut self) -> Result<(), BackendError> {
        let adapter = self.gpu.description.clone();
        let subgroups = self.gpu.has(wgpu::Features::SUBGROUP);
        let halves = self.gpu.has(wgpu::Features::SHADER_F16);
        let fits = |t: &Tuning, start: &Tuning| {
            t.norm_lanes == start.norm_lanes
                && (subgroups || !t.subgroup_scan)
                && (halves || !(t.native_f16 || t.half_tiles))
        };
        // Held while measuring: two openings at once would disturb each other.
        let mut known = KNOWN.lock();
        let store = self.gpu.store.as_ref();
        let kept = store.and_then(|s| s.tuning()).filter(|t| fits(t, &self.tuning));
        let found = known.get(&adapter).copied();
        let best = match (found, kept) {
            (Some(found), _) => found,
            (None, Some(kept)) => kept,
            (None, None) => {
                let start = Instant::now();
                self.measure_variants(subgroups, halves)?;
                let (took, tuning) = (start.elapsed(), self.tuning);
                tracing::info!(%adapter, ?tuning, ?took, "measured the variants of kernels");
                tuning
            }
        };
        known.insert(adapter, best);
        self.tuning = best;
        if let Some(store) = self.gpu.store.as_ref().filter(|_| kept != Some(best)) {
            store.keep_tuning(&best);
        }
        Ok(())
    }

    fn measure_variants(&mut self, subgroups: bool, halves: bool) -> Result<(), BackendError> {
        let plain = |b: &mut Self, product| {
            (b.tuning.one_row, b.tuning.many_rows) = (product, product);
        };
        let packed = |b: &mut Self, product| b.tuning.packed = Some((product, product));
        const TYPE: DType = DType::Q8_0;
        let precision = std::mem::replace(&mut self.precision, Precision::Exact);
        let one = self.fastest_product(TYPE, 1, &Product::ONE_ROW, plain)?;
        let many = self.fastest_product(TYPE, MANY_ROWS, &Product::MANY_ROWS, plain)?;
        if halves {
            self.tuning.many_rows = Product::Tiled;
            let set = |b: &mut Self, half| b.tuning.half_tiles = half;
            let half = self.fastest_product(DType::F16, MANY_ROWS, &[false, true], set)?;
            self.tuning.half_tiles = half.1;
        }
        self.precision = Precision::Fast;
        let packed_one = self.fastest_product(TYPE, 1, &Product::PACKED_ONE_ROW, packed)?;
        let packed_many =
            self.fastest_product(TYPE, MANY_ROWS, &Product::PACKED_MANY_ROWS, packed)?;
        self.precision = precision;
        (self.tuning.one_row, self.tuning.many_rows) = (one.1, many.1);
        let worth = is_worth_it([one.0, many.0], [packed_one.0, packed_many.0]);
        tracing::debug!(?one, ?many, ?packed_one, ?packed_many, worth, "products");
        self.tuning.packed = worth.then_some((packed_one.1, packed_many.1));
        // As fast mode keeps them, unless asked otherwise.
        let kept = std::mem::replace(&mut self.kv, Precision::Fast.kv());
        self.tuning.attention = self.fastest_attention(&Attend::ALL, |b, how| {
            b.tuning.attention = how;
        })?;
        if halves {
            self.tuning.native_f16 = self.fastest_attention(&[false, true], |b, native| {
                b.tuning.native_f16 = native;
            })?;
        }
        self.kv = kept;
        if subgroups {
            self.tuning.subgroup_scan = self.fastest_scan()?.1;
        }
        Ok(())
    }

    fn fastest_product<V: Copy>(
        &mut self,
        dtype: DType,
        rows: usize,
        of: &[V],
        set: impl Fn(&mut Self, V),
    ) -> Result<(Duration, V), BackendError> {
        let (outs, cols) = SHAPE;
        let bytes = dtype.row_bytes(cols).unwrap_or(0) * outs;
        // Any codes, and scales (or floats) below one.
        let high = dtype.block_bytes();
        let value = |i: usize| if i % high == 1 { 0x20 } else { (i * 37 % 251) as u8 };
        let values = Bytes::from_iter((0..bytes).map(value));
        let t = HostTensor::new("a measurement", dtype, outs, cols, values)?;
        let weight = self.weight(&t, &Part::all(&t))?;
        let (mut x, mut y) = (self.tensor(rows, cols)?, self.tensor(rows, outs)?);
        self.upload(&ramp(rows * cols), &mut x)?;
        self.fastest(of, |b, variant| {
            set(b, variant);
            b.linear(&x, &mut [LinearPart { weight: &weight, bias: None, out: &mut y }])?;
            bits(b, &y)
        })
    }

    fn fastest_attention<V: Copy>(
        &mut self,
        of: &[V],
        set: impl Fn(&mut Self, V),
    ) -> Result<V, BackendError> {
        const TOKENS: usize = 1024;
        const HEAD_DIM: usize = 64;
        const HEADS_OF_MODEL: usize = 8;
        let blocks = TOKENS / KV_TILE;
        let spec =
            KvSpec { layers: 1, kv_heads: 2, head_dim: HEAD_DIM, blocks, block_tokens: KV_TILE };
        let mut kv = self.kv(&spec)?;
        let all = |rows, position| SeqRows { rows, position, blocks: (0..blocks as u32).collect() };
        let mut k = self.tensor(TOKENS, 2 * HEAD_DIM)?;
        self.upload(&ramp(TOKENS * 2 * HEAD_DIM), &mut k)?;
        self.kv_write(&mut kv, 0, &k, &k, &[all(0..TOKENS, 0)])?;
        let params = AttentionParams {
            heads: HEADS_OF_MODEL,
            kv_heads: 2,
            head_dim: HEAD_DIM,
            scale: 0.125,
            window: None,
            softcap: None,
            kv_head_of: (0..HEADS_OF_MODEL).map(|h| h / 4).collect(),
        };
        let cols = HEADS_OF_MODEL * HEAD_DIM;
        let (mut q, mut out) = (self.tensor(1, cols)?, self.tensor(1, cols)?);
        self.upload(&ramp(cols), &mut q)?;
        let seqs = [all(0..1, TOKENS - 1)];
        let found = self.fastest(of, |b, variant| {
            set(b, variant);
            b.attention(&q, &kv, 0, &seqs, &params, &mut out)?;
            bits(b, &out)
        });
        Ok(found?.1)
    }

    fn fastest_scan(&mut self) -> Result<(Duration, bool), BackendError> {
        const VOCAB: usize = 1 << 16;
        let mut logits = self.tensor(1, VOCAB)?;
        self.upload(&ramp(VOCAB), &mut logits)?;
        let greedy = Draw::greedy();
        let wants = [Want::Token(greedy)];
        self.fastest(&[false, true], |b, subgroups| {
            b.tuning.subgroup_scan = subgroups;
            let mut out = Samples::default();
            b.sample(&mut logits, &wants, &mut out)?;
            Ok(out.tokens.into_iter().map(|t| t.unwrap_or(u32::MAX)).collect())
        })
    }

    /// The fastest variant of those that give the first one's bits.
    fn fastest<V: Copy>(
        &mut self,
        of: &[V],
        mut run: impl FnMut(&mut Self, V) -> Result<Vec<u32>, BackendError>,
    ) -> Result<(Duration, V), BackendError> {
        let mut best = (Duration::MAX, of[0]);
        let mut want: Option<Vec<u32>> = None;
        for &variant in of {
            let got = run(self, variant)?;
            if got != *want.get_or_insert_with(|| got.clone()) {
                tracing::warn!(device = %self.gpu.id, "a kernel's bits differ: it is not used");
                continue;
            }
            for _ in 0..RUNS {
                let start = Instant::now();
                run(self, variant)?;
                if start.elapsed() < best.0 {
                    best = (start.elapsed(), variant);
                }
            }
        }
        Ok(best)
    }

    /// Fixes how attention is cut, likewise.
    #[doc(hidden)]
    pub fn use_attention(&mut self, how: Attend) {
        self.tuning.attention = how;
    }

    /// Whether float16 is read as the adapter's own, likewise; gives whether it can be.
    #[doc(hidden)]
    pub fn use_native_f16(&mut self, native: bool) -> bool {
        let can = self.gpu.has(wgpu::Features::SHADER_F16);
        self.tuning.native_f16 = native && can;
        can
    }

    /// Whether float16 weights stay so in workgroup memory, likewise.
    #[doc(hidden)]
    pub fn use_half_tiles(&mut self, half: bool) -> bool {
        let can = self.gpu.has(wgpu::Features::SHADER_F16);
        self.tuning.half_tiles = half && can;
        can
    }

    /// Whether logits are scanned by subgroups, likewise; gives whether they can be.
    #[doc(hidden)]
    pub fn use_subgroups(&mut self, subgroups: bool) -> bool {
        let can = self.gpu.has(wgpu::Features::SUBGROUP);
        self.tuning.subgroup_scan = subgroups && can;
        can
    }

    /// Fixes the arithmetic and variants of fast mode, likewise.
    #[doc(hidden)]
    pub fn use_packed(&mut self, one_row: Product, many_rows: Product) {
        self.precision = Precision::Fast;
        self.tuning.packed = Some((one_row, many_rows));
    }

    /// Fixes the variants, for tests that compare them.
    #[doc(hidden)]
    pub fn use_variants(&mut self, one_row: Product, many_rows: Product) {
        (self.tuning.one_row, self.tuning.many_rows) = (one_row, many_rows);
    }
}

/// Whether multiplying bytes is much faster than floats, for one row and for many: half as fast again on
/// the whole, and not slower by more than a little for either.
fn is_worth_it(floats: [Duration; 2], bytes: [Duration; 2]) -> bool {
    let ratios = [0, 1].map(|i| bytes[i].as_secs_f64() / floats[i].as_secs_f64().max(1e-9));
    ratios[0] * ratios[1] <= 1.0 / 1.5 && ratios.iter().all(|ratio| *ratio <= 1.1)
}

/// Values in -1..1 without much of a pattern.
fn ramp(n: usize) -> Vec<f32> {
    (0..n).map(|i| ((i * 7919) % 1009) as f32 / 504.5 - 1.0).collect()
}

fn bits(b: &WgpuBackend, t: &crate::tensor::WgpuTensor) -> Result<Vec<u32>, BackendError> {
    let mut out = Vec::new();
    b.download(t, &mut out)?;
    Ok(out.into_iter().map(f32::to_bits).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_have_to_be_much_faster() {
        let worth = |floats: [u64; 2], bytes: [u64; 2]| {
            is_worth_it(floats.map(Duration::from_micros), bytes.map(Duration::from_micros))
        };
        assert!(worth([100, 1000], [80, 800]) && worth([100, 1000], [105, 500]));
        assert!(!worth([100, 1000], [90, 900]) && !worth([100, 1000], [40, 1200]));
        assert!(!worth([100, 1000], [150, 100]));
    }
}
