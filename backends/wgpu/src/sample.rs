//! Drawing tokens where the logits are: a step brings back an id a row, and whole rows only where
//! somebody wants them. The kernels follow `dunlin_backend::draw`, to the bit.

use crate::backend::WgpuBackend;
use crate::gpu::{Buffer, Gpu};
use crate::kernels::Kernel;
use crate::record::Recorder;
use crate::tensor::{WgpuTensor, same, shape, word};
use dunlin_backend::draw::ID_BITS;
use dunlin_backend::{BackendError, Draw, Samples, Want};
use std::sync::Arc;

/// Logits of a row that one workgroup of the scan reads.
const PIECE: usize = 4096;

/// What the scan found and what was drawn, made at first use for the capacity of a caller's logits.
#[derive(Default)]
pub(crate) struct Scratch {
    made: Option<(Buffer, Buffer)>,
}

/// See [`dunlin_backend::Backend::sample`].
pub(crate) fn run(
    backend: &WgpuBackend,
    rec: &mut Recorder,
    scratch: &mut Scratch,
    logits: &WgpuTensor,
    wants: &[Want],
    out: &mut Samples,
) -> Result<(), BackendError> {
    const OP: &str = "sample";
    same(OP, "wants", wants.len(), logits.rows)?;
    if logits.cols > 1 << ID_BITS {
        return Err(shape(OP, format!("{} columns of logits", logits.cols)));
    }
    let draws = wants.iter().any(|want| matches!(want, Want::Token(_)));
    let (parts, drawn) = scratch.of(&backend.gpu, logits)?;
    if draws {
        record(backend, rec, logits, wants, (parts, drawn))?;
    }
    let row_bytes = (logits.stride * 4) as u64;
    let mut reads = vec![(drawn, 0..if draws { 4 * wants.len() as u64 } else { 0 })];
    for (row, want) in (0u64..).zip(wants) {
        if *want == Want::Logits {
            reads.push((&logits.buffer, row * row_bytes..(row + 1) * row_bytes));
        }
    }
    let ids = if draws { 4 * wants.len() } else { 0 };
    out.logits.clear();
    out.tokens.clear();
    rec.read(&reads, |bytes| {
        let (drawn, rows) = bytes.split_at(ids.min(bytes.len()));
        let drawn: &[u32] = bytemuck::cast_slice(drawn);
        let token = |(row, want): (usize, &Want)| match want {
            Want::Token(_) => drawn.get(row).copied().filter(|id| *id != u32::MAX),
            Want::Logits => None,
        };
        out.tokens.extend(wants.iter().enumerate().map(token));
        for row in bytemuck::cast_slice::<_, f32>(rows).chunks_exact(logits.stride) {
            out.logits.extend_from_slice(&row[..logits.cols]);
        }
    })
}

fn record(
    backend: &WgpuBackend,
    rec: &mut Recorder,
    logits: &WgpuTensor,
    wants: &[Want],
    (parts, drawn): (&Buffer, &Buffer),
) -> Result<(), BackendError> {
    let (rows, pieces) = (word(wants.len()), word(logits.cols.div_ceil(PIECE)));
    let (cols, stride) = (word(logits.cols), word(logits.stride));
    let draws: Vec<u32> = wants.iter().flat_map(words).collect();
    let (lists, entries) = adjustments(wants);
    rec.begin(draws.len() + lists.len() + entries.len())?;
    let scan = Kernel::SampleScan { subgroups: backend.tuning.subgroup_scan };
    let look = |rec: &mut Recorder, first| {
        let params = [cols, stride, pieces, first];
        rec.dispatch(scan, &[&logits.buffer], &[parts], &params, (pieces, rows))
    };
    look(rec, 1)?;
    if !entries.is_empty() {
        let at = rec.put(&entries);
        let lists: Vec<u32> = lists.chunks_exact(3).flat_map(|l| [l[0] + at, l[1], l[2]]).collect();
        let (at, arena) = (rec.put(&lists), rec.arena());
        let params = [at, rows, cols, stride];
        let size = (rows.div_ceil(32), 1);
        rec.dispatch(Kernel::SampleAdjust, &[&arena], &[&logits.buffer], &params, size)?;
        look(rec, 0)?;
    }
    let (at, arena) = (rec.put(&draws), rec.arena());
    let params = [at, cols, stride, pieces];
    let read = [&*arena, &logits.buffer, parts];
    rec.dispatch(Kernel::SampleDraw, &read, &[drawn], &params, (rows, 1))
}

/// The words of one row's draw; see `shaders/sample_draw.wgsl`.
fn words(want: &Want) -> [u32; 8] {
    const SKIP: u32 = 2;
    let Want::Token(how) = want else { return [SKIP, 0, 0, 0, 0, 0, 0, 0] };
    let terms = how.terms();
    [
        u32::from(!terms.greedy),
        terms.scale.to_bits(),
        terms.bound,
        terms.top_k,
        u32::from(terms.top_p.is_some()),
        terms.top_p.unwrap_or(0),
        terms.random as u32,
        (terms.random >> 32) as u32,
    ]
}

/// (offset among the entries, additions, forbidden tokens) of each row, and the entries.
fn adjustments(wants: &[Want]) -> (Vec<u32>, Vec<u32>) {
    let (mut lists, mut entries) = (Vec::with_capacity(3 * wants.len()), Vec::new());
    for want in wants {
        let at = word(entries.len());
        let (add, forbidden): (&[(u32, f32)], &[u32]) = match want {
            Want::Token(Draw { add, forbidden, .. }) => (add, forbidden),
            Want::Logits => (&[], &[]),
        };
        entries.extend(add.iter().flat_map(|(id, bias)| [*id, bias.to_bits()]));
        entries.extend(forbidden);
        lists.extend([at, word(add.len()), word(forbidden.len())]);
    }
    (lists, entries)
}

impl Scratch {
    fn of(
        &mut self,
        gpu: &Arc<Gpu>,
        logits: &WgpuTensor,
    ) -> Result<(&Buffer, &Buffer), BackendError> {
        let pieces = logits.cols.div_ceil(PIECE);
        let (parts, drawn) = (16 * (pieces * logits.capacity) as u64, 4 * logits.capacity as u64);
        let fits = |(p, d): &(Buffer, Buffer)| p.bytes >= parts && d.bytes >= drawn;
        if !self.made.as_ref().is_some_and(fits) {
            let make = |bytes| gpu.storage(bytes, "a step's draws");
            self.made = Some((make(parts)?, make(drawn)?));
        }
        let made = self.made.as_ref();
        made.map(|(p, d)| (p, d)).ok_or_else(|| gpu.lost("no room for draws"))
    }
}
