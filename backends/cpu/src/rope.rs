//! Rotary position embedding, with tables of cosines and sines by position.
//!
//! Angles are `pos * inv_freq[i]` in float32; cosine and sine come from crate `libm`, which
//! computes the same bits everywhere. A pair `(a, b)` becomes `(fma(b, -sin, a * cos),
//! fma(a, sin, b * cos))`.

use crate::lanes::{Kernel, LANES, Lanes, load_part, store_part};
use crate::tensor::{CpuTensor, same, shape};
use dunlin_backend::{BackendError, Rope, RopeStyle};

/// Positions kept in a table; later ones are computed each time.
const MOST_CACHED: usize = 32_768;

/// Positions that a table grows by.
const GROW: usize = 256;

/// Tables of the rotary embeddings in use.
#[derive(Default)]
pub(crate) struct Tables {
    tables: Vec<Table>,
}

pub(crate) struct Table {
    rope: Rope,
    /// Per position: `head_dim` factors of an element itself, then of its partner.
    rows: Vec<f32>,
    /// One row for a position beyond the table.
    spare: Vec<f32>,
}

pub(crate) fn check(x: &CpuTensor, positions: &[u32], rope: &Rope) -> Result<(), BackendError> {
    const OP: &str = "rope";
    let whole = rope.head_dim.is_multiple_of(2) && x.cols.is_multiple_of(rope.head_dim);
    if rope.head_dim == 0 || !whole {
        let detail = format!("{} columns do not hold heads of {}", x.cols, rope.head_dim);
        return Err(shape(OP, detail));
    }
    same(OP, "length of inv_freq", rope.inv_freq.len(), rope.head_dim / 2)?;
    same(OP, "number of positions", positions.len(), x.rows)
}

impl Tables {
    /// The table of `rope`, filled up to the largest of `positions` (or as far as it is kept).
    pub fn get(&mut self, rope: &Rope, positions: &[u32]) -> &mut Table {
        let found = self.tables.iter().position(|t| t.rope == *rope);
        let index = found.unwrap_or_else(|| {
            self.tables.push(Table {
                rope: rope.clone(),
                rows: Vec::new(),
                spare: vec![0.0; 2 * rope.head_dim],
            });
            self.tables.len() - 1
        });
        let table = &mut self.tables[index];
        let kept = positions.iter().map(|p| *p as usize + 1).filter(|end| *end <= MOST_CACHED);
        table.fill(kept.max().map_or(0, |end| end.next_multiple_of(GROW)));
        table
    }
}

impl Table {
    fn fill(&mut self, end: usize) {
        let width = 2 * self.rope.head_dim;
        let start = self.rows.len() / width;
        if end <= start {
            return;
        }
        self.rows.resize(end * width, 0.0);
        for (i, row) in self.rows[start * width..].chunks_exact_mut(width).enumerate() {
            fill_row(&self.rope, (start + i) as u32, row);
        }
    }

    /// Factors by position, where the table has those of all `positions`.
    pub fn kept<'t>(
        &'t self,
        positions: &[u32],
    ) -> Option<impl Fn(u32) -> &'t [f32] + Sync + use<'t>> {
        let width = 2 * self.rope.head_dim;
        let all = positions.iter().all(|p| (*p as usize + 1) * width <= self.rows.len());
        all.then_some(move |position: u32| &self.rows[position as usize * width..][..width])
    }

    /// Factors of one position, from the table or computed now.
    pub fn row(&mut self, position: u32) -> &[f32] {
        let width = 2 * self.rope.head_dim;
        let at = position as usize * width;
        if at + width <= self.rows.len() {
            return &self.rows[at..at + width];
        }
        fill_row(&self.rope, position, &mut self.spare);
        &self.spare
    }
}

fn fill_row(rope: &Rope, position: u32, row: &mut [f32]) {
    let (own, partner) = row.split_at_mut(rope.head_dim);
    for (i, inv_freq) in rope.inv_freq.iter().enumerate() {
        let angle = position as f32 * inv_freq;
        let (sin, cos) = (libm::sinf(angle), libm::cosf(angle));
        let (a, b) = match rope.style {
            RopeStyle::HalfSplit => (i, i + rope.head_dim / 2),
            RopeStyle::Interleaved => (2 * i, 2 * i + 1),
        };
        (own[a], own[b]) = (cos, cos);
        (partner[a], partner[b]) = (-sin, sin);
    }
}

/// Rotates all heads of one row.
pub(crate) struct Rotate<'a> {
    pub row: &'a mut [f32],
    pub factors: &'a [f32],
    pub style: RopeStyle,
}

impl Kernel for Rotate<'_> {
    /// # Safety
    /// `factors` holds two floats per element of a head; the row holds whole heads.
    #[inline(always)]
    unsafe fn run<L: Lanes>(self) {
        let d = self.factors.len() / 2;
        let (own, partner) = (self.factors.as_ptr(), self.factors[d..].as_ptr());
        for head in self.row.chunks_exact_mut(d) {
            let x = head.as_mut_ptr();
            // SAFETY: `n` elements from `e` (and from `half + e`) on are within the head.
            unsafe {
                match self.style {
                    RopeStyle::HalfSplit => {
                        let half = d / 2;
                        for e in (0..half).step_by(LANES) {
                            let n = LANES.min(half - e);
                            let a = load_part::<L>(x.add(e), n);
                            let b = load_part::<L>(x.add(half + e), n);
                            let cos = load_part::<L>(own.add(e), n);
                            let low = load_part::<L>(partner.add(e), n);
                            let high = load_part::<L>(partner.add(half + e), n);
                            store_part(b.fma(low, a.mul(cos)), x.add(e), n);
                            store_part(a.fma(high, b.mul(cos)), x.add(half + e), n);
                        }
                    }
                    RopeStyle::Interleaved => {
                        for e in (0..d).step_by(LANES) {
                            let n = LANES.min(d - e);
                            let v = load_part::<L>(x.add(e), n);
                            let cos = load_part::<L>(own.add(e), n);
                            let sin = load_part::<L>(partner.add(e), n);
                            store_part(v.swap_pairs().fma(sin, v.mul(cos)), x.add(e), n);
                        }
                    }
                }
            }
        }
    }
}
