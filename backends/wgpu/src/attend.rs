//! Attention: which groups of heads a kernel reads together, and where the results of splits lie.

use crate::backend::WgpuBackend;
use crate::gpu::{Buffer, Gpu};
use crate::kernels::{Kept, Kernel};
use crate::kv::{NONE, Store, WgpuKv};
use crate::record::Recorder;
use crate::tensor::{WgpuTensor, same, shape, word};
use dunlin_backend::{AttentionParams, BackendError, KvDtype, SeqRows};
use serde::{Deserialize, Serialize};
use std::sync::Arc;

/// Keys of a split, as in `shaders/merge.wgsl`.
const SPLIT: usize = 256;
/// Words of a row, as there.
const ROW_WORDS: usize = 4;
/// Rows of a call beyond which there is work enough without splits.
const FEW_ROWS: usize = 16;

/// How attention is cut into workgroups; all ways give the same bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Attend {
    /// Groups of heads that share a workgroup.
    pub slots: u32,
    /// The most query heads that read a key together.
    pub queries: u32,
    /// Whether long contexts of few rows are split among workgroups.
    pub split: bool,
}

impl Attend {
    pub const ALL: [Attend; 5] = [
        Attend { slots: 1, queries: 1, split: false },
        Attend { slots: 1, queries: 4, split: false },
        Attend { slots: 4, queries: 1, split: false },
        Attend { slots: 4, queries: 1, split: true },
        Attend { slots: 1, queries: 4, split: true },
    ];
}

/// Which keys of its own step a row sees.
#[derive(Clone, Copy)]
pub(crate) enum Mask<'a> {
    /// All up to its own.
    Causal,
    /// Rows of a sequence are nodes of a tree: bit `i` of a row's word is the sequence's row `i` of
    /// this step, set for the row's ancestors and itself. At most 32 rows a sequence.
    Tree(&'a [u32]),
}

/// Results of splits, made at first use and for the longest context so far.
#[derive(Default)]
pub(crate) struct Scratch {
    parts: Option<Buffer>,
}

/// What a call's kernels share.
struct Call<'a> {
    q: &'a WgpuTensor,
    params: &'a AttentionParams,
    out: &'a WgpuTensor,
    rows: usize,
    /// Arena offset of the rows' positions and tables.
    info: u32,
    how: Attend,
    queries: u32,
    kept: Kept,
    /// Zero: not split.
    splits: usize,
}

impl WgpuKv {
    #[allow(clippy::too_many_arguments)]
    pub(crate) fn attend(
        &self,
        backend: &WgpuBackend,
        (rec, scratch): (&mut Recorder, &mut Scratch),
        q: &WgpuTensor,
        layer: usize,
        (seqs, mask): (&[SeqRows], Mask<'_>),
        params: &AttentionParams,
        out: &mut WgpuTensor,
    ) -> Result<(), BackendError> {
        self.check_params(q, params, out)?;
        self.check("attention", layer, q.rows, seqs)?;
        mask.check(seqs, q.rows)?;
        out.set_rows("attention", q.rows)?;
        if seqs.is_empty() || params.heads == 0 {
            return Ok(());
        }
        let stores = &self.layers[layer];
        let rows = seqs.iter().map(|s| s.rows.end).max().unwrap_or(0);
        let (tables, words) = row_tables(seqs, rows, self.spec.block_tokens);
        // A group takes five words at most, and the list of heads a word each.
        rec.begin(words + 6 * params.heads * stores.len())?;
        let info = row_info(rec, seqs, mask, rows, &tables);
        let how = backend.tuning.attention;
        let largest = (0..params.kv_heads).map(|kv| heads_of(params, kv).count()).max();
        let longest = seqs.iter().map(|s| s.position + s.rows.len()).max().unwrap_or(0);
        let splits = longest.div_ceil(SPLIT);
        let split = how.split && rows <= FEW_ROWS && splits > 1;
        let mut call = Call {
            q,
            params,
            out,
            rows,
            info,
            how,
            queries: how.queries.min(word(largest.unwrap_or(1))).max(1),
            kept: match self.dtype {
                KvDtype::F16 if backend.tuning.native_f16 => Kept::NativeF16,
                plain => Kept::Plain(plain),
            },
            splits: if split { splits } else { 0 },
        };
        let parts = scratch.of(&backend.gpu, &call)?;
        if parts.is_none() {
            call.splits = 0;
        }
        stores.iter().try_for_each(|store| self.attend_store(rec, store, &call, parts))
    }

    fn attend_store(
        &self,
        rec: &mut Recorder,
        store: &Store,
        call: &Call<'_>,
        parts: Option<&Buffer>,
    ) -> Result<(), BackendError> {
        let (p, dim) = (call.params, word(call.params.head_dim));
        let groups = groups(p, store, call.queries);
        let count = word(groups.len()) / (call.queries + 1);
        if count == 0 {
            return Ok(());
        }
        let (groups, arena) = (rec.put(&groups), rec.arena());
        let window = p.window.map_or(0, |w| u32::try_from(w).unwrap_or(0));
        let params = [
            call.info,
            groups,
            count,
            word(store.heads.len()),
            word(self.spec.block_tokens),
            word(call.q.stride),
            word(call.out.stride),
            window,
            p.scale.to_bits(),
            p.softcap.unwrap_or(0.0).to_bits(),
            word(p.heads),
            word(call.splits),
        ];
        let (slots, queries) = (call.how.slots, call.queries);
        let (part, kept) = (parts.is_some(), call.kept);
        let kernel = Kernel::Attention { dim, slots, queries, part, kept };
        let size = (count.div_ceil(slots) * word(call.splits.max(1)), word(call.rows));
        let read = [&*arena, &call.q.buffer, &store.keys, &store.values];
        let Some(parts) = parts else {
            return rec.dispatch(kernel, &read, &[&call.out.buffer], &params, size);
        };
        rec.dispatch(kernel, &read, &[parts], &params, size)?;
        let heads: Vec<u32> = store.heads.clone().flat_map(|kv| heads_of(p, kv)).collect();
        let size = (word(heads.len()), word(call.rows));
        let (heads, arena) = (rec.put(&heads), rec.arena());
        let (splits, stride) = (word(call.splits), word(call.out.stride));
        let params = [call.info, heads, word(p.heads), splits, stride, window];
        let read = [&*arena, parts];
        rec.dispatch(Kernel::AttentionMerge { dim }, &read, &[&call.out.buffer], &params, size)
    }

    fn check_params(
        &self,
        q: &WgpuTensor,
        params: &AttentionParams,
        out: &WgpuTensor,
    ) -> Result<(), BackendError> {
        const OP: &str = "attention";
        let p = params;
        same(OP, "columns of q", q.cols, p.heads * p.head_dim)?;
        same(OP, "columns of out", out.cols, q.cols)?;
        same(OP, "KV heads", p.kv_heads, self.spec.kv_heads)?;
        same(OP, "elements of a head", p.head_dim, self.spec.head_dim)?;
        same(OP, "heads with a KV head", p.kv_head_of.len(), p.heads)?;
        let strange = p.kv_head_of.iter().any(|h| *h >= p.kv_heads);
        if strange || p.window == Some(0) {
            return Err(shape(OP, format!("{params:?}")));
        }
        Ok(())
    }
}

impl Scratch {
    /// Room for the splits' results; `None` where they are not split, or are too many for a binding.
    fn of(&mut self, gpu: &Arc<Gpu>, call: &Call<'_>) -> Result<Option<&Buffer>, BackendError> {
        let p = call.params;
        let vectors = call.rows * p.heads * call.splits * (p.head_dim.div_ceil(4) + 1);
        let bytes = 16 * vectors as u64;
        if bytes == 0 || bytes > gpu.binding_bytes() {
            return Ok(None);
        }
        if self.parts.as_ref().is_none_or(|parts| parts.bytes < bytes) {
            let bytes = bytes.next_power_of_two().min(gpu.binding_bytes());
            self.parts = Some(gpu.storage(bytes, "results of splits of a context")?);
        }
        Ok(self.parts.as_ref())
    }
}

/// Query heads that read a KV head.
fn heads_of(params: &AttentionParams, kv_head: usize) -> impl Iterator<Item = u32> {
    let of = params.kv_head_of.iter().zip(0u32..);
    of.filter(move |(kv, _)| **kv == kv_head).map(|(_, head)| head)
}

/// [KV head within the store, query heads, NONE where there are fewer] of each group.
fn groups(params: &AttentionParams, store: &Store, queries: u32) -> Vec<u32> {
    let mut all = Vec::new();
    for (local, kv_head) in (0u32..).zip(store.heads.clone()) {
        let heads: Vec<u32> = heads_of(params, kv_head).collect();
        for group in heads.chunks(queries as usize) {
            all.push(local);
            all.extend((0..queries as usize).map(|i| group.get(i).copied().unwrap_or(NONE)));
        }
    }
    all
}

/// The blocks that each sequence reads, and the words that they and the rows' own entries take.
fn row_tables(seqs: &[SeqRows], rows: usize, block_tokens: usize) -> (Vec<&[u32]>, usize) {
    let used = |s: &SeqRows| (s.position + s.rows.len()).div_ceil(block_tokens);
    let tables: Vec<&[u32]> = seqs.iter().map(|s| &s.blocks[..used(s)]).collect();
    let words = ROW_WORDS * rows + tables.iter().map(|t| t.len()).sum::<usize>();
    (tables, words)
}

/// Puts `struct Row` of `shaders/merge.wgsl` for each row; NONE where a row is nobody's.
fn row_info(
    rec: &mut Recorder,
    seqs: &[SeqRows],
    mask: Mask<'_>,
    rows: usize,
    tables: &[&[u32]],
) -> u32 {
    let mut info = vec![NONE; ROW_WORDS * rows];
    for (s, table) in seqs.iter().zip(tables) {
        let table = rec.put(table);
        for (i, row) in s.rows.clone().enumerate() {
            let slot = word(s.position + i);
            let (trunk, tree) = match mask {
                Mask::Causal => (slot + 1, 0),
                Mask::Tree(ancestors) => (word(s.position), ancestors[row]),
            };
            info[ROW_WORDS * row..][..ROW_WORDS].copy_from_slice(&[slot, table, trunk, tree]);
        }
    }
    rec.put(&info)
}

impl Mask<'_> {
    /// Refuses masks that are not of these rows, or in which a row's own bit is not the highest.
    fn check(self, seqs: &[SeqRows], rows: usize) -> Result<(), BackendError> {
        const OP: &str = "attention";
        let Mask::Tree(ancestors) = self else { return Ok(()) };
        same(OP, "rows of a mask", ancestors.len(), rows)?;
        for s in seqs {
            for (i, row) in s.rows.clone().enumerate() {
                if i >= 32 || ancestors[row].checked_ilog2() != Some(i as u32) {
                    let mask = ancestors[row];
                    return Err(shape(OP, format!("row {i} of a tree has the mask {mask:#b}")));
                }
            }
        }
        Ok(())
    }
}
