//! The reference's mixture of experts.

use super::attention::softmax;
use super::{Reference, ReferenceTensor, activate, matmul, require};
use crate::{BackendError, Experts};

/// `out = sum over the top_k experts of their probability times their feed-forward of x`.
pub(super) fn mix(
    x: &ReferenceTensor,
    router: &ReferenceTensor,
    experts: &Experts<'_, Reference>,
    out: &mut ReferenceTensor,
) -> Result<(), BackendError> {
    let count = experts.gate.len();
    let fits = router.cols == count
        && experts.up.len() == count
        && experts.down.len() == count
        && router.rows == x.rows
        && out.cols == x.cols
        && (1..=count).contains(&experts.top_k);
    require("experts", fits, || {
        let (up, down) = (experts.up.len(), experts.down.len());
        format!(
            "router [{}, {}], x [{}, {}], {count} gates, {up} ups, {down} downs, top {}",
            router.rows, router.cols, x.rows, x.cols, experts.top_k
        )
    })?;
    out.resize("experts", x.rows)?;
    for row in 0..x.rows {
        let mut sums = vec![0.0f64; x.cols];
        for (expert, share) in chosen(router.row(row), experts.top_k, experts.normalise) {
            let y = feed_forward(x.row(row), experts, expert)?;
            for (sum, y) in sums.iter_mut().zip(&y) {
                *sum += share * f64::from(*y);
            }
        }
        for (o, sum) in out.row_mut(row).iter_mut().zip(&sums) {
            *o = *sum as f32;
        }
    }
    Ok(())
}

/// The likeliest `top_k` experts with their shares, in ascending index.
fn chosen(router: &[f32], top_k: usize, normalise: bool) -> Vec<(usize, f64)> {
    let mut all: Vec<(usize, f64)> =
        softmax(router.iter().map(|r| f64::from(*r))).into_iter().enumerate().collect();
    // A stable sort leaves ties in ascending index.
    all.sort_by(|a, b| b.1.total_cmp(&a.1));
    all.truncate(top_k);
    if normalise {
        let sum: f64 = all.iter().map(|(_, p)| p).sum();
        all.iter_mut().for_each(|(_, p)| *p /= sum);
    }
    all.sort_by_key(|(expert, _)| *expert);
    all
}

fn feed_forward(
    x: &[f32],
    experts: &Experts<'_, Reference>,
    expert: usize,
) -> Result<Vec<f32>, BackendError> {
    let single = |data: Vec<f32>| {
        let cols = data.len();
        ReferenceTensor { data, rows: 1, cols, capacity: 1 }
    };
    let blank = |cols: usize| single(vec![0.0; cols]);
    let x = single(x.to_vec());
    let mut gate = blank(experts.gate[expert].row_count());
    let mut up = blank(experts.up[expert].row_count());
    let mut down = blank(x.cols);
    matmul(&x, &experts.gate[expert], None, &mut gate)?;
    matmul(&x, &experts.up[expert], None, &mut up)?;
    for (g, u) in gate.data.iter_mut().zip(&up.data) {
        *g = activate(*g, *u, experts.activation);
    }
    matmul(&gate, &experts.down[expert], None, &mut down)?;
    Ok(down.data)
}
