//! How a model is cut: layers over pipeline stages, heads and columns over tensor ranks.
//!
//! Pure arithmetic over a [`ModelSpec`]; every cut covers the whole once.

use crate::spec::ModelSpec;
use std::ops::Range;

/// Columns of a quantised matrix can be cut at multiples of its block.
pub const COLUMN_UNIT: usize = 32;

/// What one tensor rank holds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RankSplit {
    pub heads: Range<usize>,
    pub kv_heads: Range<usize>,
    /// Columns of the feed-forward (of each expert's, in a mixture).
    pub ffn: Range<usize>,
    pub vocab: Range<usize>,
}

/// Why a model cannot be split over so many ranks.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SplitError {
    #[error("a group needs at least one rank")]
    NoRanks,
    #[error("the model has {kv_heads} KV heads, so at most {kv_heads} ranks, not {ranks}")]
    TooFewHeads { kv_heads: usize, ranks: usize },
    #[error("{heads} heads are no multiple of {kv_heads} KV heads")]
    UnevenGroups { heads: usize, kv_heads: usize },
    #[error(
        "rank {rank} would hold attention columns {begin}..{end}; quantised weights can only be \
         cut at multiples of {COLUMN_UNIT}, so use fewer ranks"
    )]
    HeadsCutBlocks { rank: usize, begin: usize, end: usize },
    #[error(
        "the feed-forward has {ffn} columns, in units of {COLUMN_UNIT} fewer than {ranks} ranks"
    )]
    FfnTooNarrow { ffn: usize, ranks: usize },
}

/// Splits heads, feed-forward columns and vocabulary over `ranks`, as evenly as whole KV heads
/// and column units allow; the first ranks get what is left over.
pub fn plan_split(spec: &ModelSpec, ranks: usize) -> Result<Vec<RankSplit>, SplitError> {
    if ranks == 0 {
        return Err(SplitError::NoRanks);
    }
    if ranks > spec.kv_heads {
        return Err(SplitError::TooFewHeads { kv_heads: spec.kv_heads, ranks });
    }
    if spec.kv_heads == 0 || !spec.heads.is_multiple_of(spec.kv_heads) {
        let (heads, kv_heads) = (spec.heads, spec.kv_heads);
        return Err(SplitError::UnevenGroups { heads, kv_heads });
    }
    let group = spec.heads / spec.kv_heads;
    let ffn = spec.moe.as_ref().map_or(spec.ffn, |moe| moe.ffn);
    if ranks > 1 && (!ffn.is_multiple_of(COLUMN_UNIT) || ffn / COLUMN_UNIT < ranks) {
        return Err(SplitError::FfnTooNarrow { ffn, ranks });
    }
    let unit = if ranks > 1 { COLUMN_UNIT } else { 1 };
    let kv = shares(spec.kv_heads, ranks);
    let columns = shares(ffn / unit, ranks);
    let vocab = shares(spec.vocab, ranks);
    let mut splits = Vec::with_capacity(ranks);
    for rank in 0..ranks {
        let kv_heads = kv[rank].clone();
        let heads = kv_heads.start * group..kv_heads.end * group;
        let (begin, end) = (heads.start * spec.head_dim, heads.end * spec.head_dim);
        if ranks > 1 && (begin % COLUMN_UNIT != 0 || end % COLUMN_UNIT != 0) {
            return Err(SplitError::HeadsCutBlocks { rank, begin, end });
        }
        let ffn = columns[rank].start * unit..columns[rank].end * unit;
        splits.push(RankSplit { heads, kv_heads, ffn, vocab: vocab[rank].clone() });
    }
    Ok(splits)
}

/// Layers per stage, proportional to the stages' `weights` (speed or memory), each at least one;
/// sums to `layers`. Needs `1 <= weights.len() <= layers`.
pub fn split_layers(layers: usize, weights: &[f32]) -> Vec<usize> {
    let stages = weights.len().clamp(1, layers.max(1));
    let good = |w: f32| if w.is_finite() && w > 0.0 { f64::from(w) } else { 0.0 };
    let sum: f64 = weights.iter().map(|w| good(*w)).sum();
    let mut counts = vec![1; stages];
    for _ in stages..layers {
        // The next layer goes where it is furthest from its due.
        let due = |i: usize| match sum > 0.0 {
            true => good(weights[i]) / sum * layers as f64,
            false => layers as f64 / stages as f64,
        };
        let lack = |i: usize| due(i) - counts[i] as f64;
        let next =
            (0..stages).max_by(|&a, &b| lack(a).total_cmp(&lack(b)).then(b.cmp(&a))).unwrap_or(0);
        counts[next] += 1;
    }
    counts
}

/// `0..n` in `parts` contiguous ranges whose sizes differ by at most one, larger ones first.
fn shares(n: usize, parts: usize) -> Vec<Range<usize>> {
    let (size, extra) = (n / parts, n % parts);
    let begin = |i: usize| i * size + i.min(extra);
    (0..parts).map(|i| begin(i)..begin(i + 1)).collect()
}
