//! Which pieces of one call's attention the threads take, and in which order.
//!
//! Pieces never change a bit of a result: each query walks the keys in their order by itself. Costly
//! ones come first, and where what is left is less than one for each thread, pieces get smaller, so
//! that no thread waits long for the last one. Three KV heads on two threads would otherwise take as
//! long as four.

use dunlin_backend::{AttentionParams, SeqRows};
use std::cmp::Reverse;
use std::ops::Range;

/// Query rows in one task, at most: they share the tiles that the cache holds.
const ROWS_PER_TASK: usize = 16;

/// Queries that a kernel takes at a time; pieces are cut at multiples of it.
const AT_A_TIME: usize = 6;

/// Query rows of one sequence, over the query heads of one KV head (or over one of them).
#[derive(Debug, Clone)]
pub(crate) struct Task {
    pub seq: usize,
    pub rows: Range<usize>,
    pub kv_head: usize,
    pub heads: Range<usize>,
}

/// Lists the tasks of one call: one per KV head and some rows, or per query head where that has the
/// threads done sooner.
pub(crate) fn plan(tasks: &mut Vec<Task>, threads: usize, seqs: &[SeqRows], p: &AttentionParams) {
    tasks.clear();
    let chunks: usize = seqs.iter().map(|s| s.rows.len().div_ceil(ROWS_PER_TASK)).sum();
    let group = p.heads.div_ceil(p.kv_heads);
    // Loading a key costs about what one query's product with it does.
    let together = (chunks * p.kv_heads).div_ceil(threads) * (1 + group);
    let apart = (chunks * p.heads).div_ceil(threads) * 2;
    for (seq, s) in seqs.iter().enumerate() {
        for start in s.rows.clone().step_by(ROWS_PER_TASK) {
            let rows = start..s.rows.end.min(start + ROWS_PER_TASK);
            if apart < together {
                for (head, &kv_head) in p.kv_head_of.iter().enumerate() {
                    tasks.push(Task { seq, rows: rows.clone(), kv_head, heads: head..head + 1 });
                }
            } else {
                for kv_head in 0..p.kv_heads {
                    tasks.push(Task { seq, rows: rows.clone(), kv_head, heads: 0..p.heads });
                }
            }
        }
    }
    let cost = |t: &Task| {
        let s = &seqs[t.seq];
        let keys = s.position + t.rows.end - s.rows.start;
        let keys = p.window.map_or(keys, |w| keys.min(w + t.rows.len()));
        keys * (1 + t.rows.len() * group.min(t.heads.len()))
    };
    tasks.sort_by_key(|t| Reverse(cost(t)));
    cut(tasks, threads, group, cost);
}

/// Cuts tasks that cost more than a thread's share of what is left, in whole rows.
fn cut(tasks: &mut Vec<Task>, threads: usize, group: usize, cost: impl Fn(&Task) -> usize) {
    let unit = (1..AT_A_TIME).find(|rows| (rows * group).is_multiple_of(AT_A_TIME));
    let unit = unit.unwrap_or(AT_A_TIME);
    let mut left: usize = tasks.iter().map(&cost).sum();
    let mut at = 0;
    while at < tasks.len() {
        let Range { start, end } = tasks[at].rows;
        let rows = (end - start) * (left / threads) / cost(&tasks[at]).max(1);
        let rows = (rows / unit * unit).max(unit);
        if rows < end - start {
            let rest = Task { rows: start..end - rows, ..tasks[at].clone() };
            tasks[at].rows.start = end - rows;
            tasks.insert(at + 1, rest);
        }
        left = left.saturating_sub(cost(&tasks[at]));
        at += 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn params(heads: usize, kv_heads: usize) -> AttentionParams {
        AttentionParams {
            heads,
            kv_heads,
            head_dim: 64,
            scale: 1.0,
            window: None,
            softcap: None,
            kv_head_of: (0..heads).map(|h| h * kv_heads / heads).collect(),
        }
    }

    /// Sequences of so many rows behind so many tokens.
    fn planned(threads: usize, shapes: &[(usize, usize)], p: &AttentionParams) -> Vec<Task> {
        let mut first = 0;
        let seqs: Vec<SeqRows> = shapes
            .iter()
            .map(|&(rows, position)| {
                first += rows;
                SeqRows { rows: first - rows..first, position, blocks: vec![] }
            })
            .collect();
        let mut tasks = Vec::new();
        plan(&mut tasks, threads, &seqs, p);
        let mut times = vec![0; first * p.heads];
        for t in &tasks {
            assert!(seqs[t.seq].rows.start <= t.rows.start && t.rows.end <= seqs[t.seq].rows.end);
            let heads = t.heads.clone().filter(|h| p.kv_head_of[*h] == t.kv_head);
            heads.for_each(|h| t.rows.clone().for_each(|row| times[row * p.heads + h] += 1));
        }
        assert!(times.iter().all(|n| *n == 1), "{tasks:?}");
        tasks
    }

    /// Rows that the busiest thread computes, where each takes the next task when it is free.
    fn busiest(threads: usize, tasks: &[Task]) -> usize {
        let mut busy = vec![0; threads];
        for t in tasks {
            *busy.iter_mut().min().expect("a thread") += t.rows.len() * t.heads.len();
        }
        busy.into_iter().max().expect("a thread")
    }

    #[test]
    fn every_head_of_every_row_is_computed_once() {
        for threads in [1, 2, 3, 16] {
            for (heads, kv_heads) in [(9, 3), (4, 4), (7, 1), (8, 2), (1, 1)] {
                for shapes in
                    [&[(1, 0)][..], &[(1, 255), (9, 2000), (1, 3)], &[(512, 0)], &[(0, 0)]]
                {
                    planned(threads, shapes, &params(heads, kv_heads));
                }
            }
        }
    }

    #[test]
    fn three_heads_keep_two_threads_busy() {
        let p = params(9, 3);
        for rows in [4, 9, 16, 48] {
            let tasks = planned(2, &[(rows, 2000)], &p);
            let (most, all) = (busiest(2, &tasks), rows * 3 * p.heads);
            assert!(most <= all.div_ceil(2) + p.heads, "{rows} rows: {most} of {all}");
        }
    }

    #[test]
    fn a_long_prompt_comes_before_short_sequences() {
        let tasks = planned(2, &[(1, 255), (1, 255), (9, 2000)], &params(9, 3));
        assert!(tasks[..3].iter().all(|t| t.seq == 2), "{tasks:?}");
    }
}
