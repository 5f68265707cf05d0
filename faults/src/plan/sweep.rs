//! The researcher's grid: which values of which keys, and every cell of it.

use super::{Plan, PlanError};
use dunlin_runtime::config::tree::{Reader, Value};
use dunlin_runtime::config::{ConfigError, Problem};

/// Most cells of a grid.
const MOST: usize = 100_000;

/// One key of the plan and the values it takes, as TOML.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Axis {
    pub key: String,
    pub values: Vec<String>,
}

pub(super) fn read(table: Reader<'_>) -> Result<Vec<Axis>, ConfigError> {
    let mut axes = Vec::new();
    let mut cells = 1usize;
    for (key, node) in table.entries() {
        let wrong = |reason: &str| {
            let problem =
                Problem::BadValue { value: node.value.shown(), reason: reason.to_string() };
            let mend = "write a range like \"0..64\" (half-open), or a list of values";
            table.source().error_at(&table.child(key), node, problem, mend)
        };
        let values: Vec<String> = match &node.value {
            Value::String(text) => {
                let ends = text.split_once("..");
                let ends = ends.and_then(|(a, b)| Some((a.parse().ok()?, b.parse().ok()?)));
                let (from, to): (u64, u64) = ends.ok_or_else(|| wrong("not a range"))?;
                if to.saturating_sub(from) > MOST as u64 {
                    return Err(wrong("too many values"));
                }
                (from..to).map(|value| value.to_string()).collect()
            }
            Value::Array(items) => items.iter().map(|item| item.value.shown()).collect(),
            _ => return Err(wrong("not a range and not a list")),
        };
        if values.is_empty() {
            return Err(wrong("no values"));
        }
        cells = cells.saturating_mul(values.len());
        if cells > MOST {
            return Err(wrong(&format!("the grid has more than {MOST} cells")));
        }
        axes.push(Axis { key: key.clone(), values });
    }
    Ok(axes)
}

impl Plan {
    /// Every cell of the grid as what is to be [set](Plan::set), the last key running fastest. One
    /// empty cell where the plan sweeps nothing.
    pub fn cells(&self) -> Vec<Vec<(String, String)>> {
        let mut cells = vec![Vec::new()];
        for axis in &self.sweep {
            let with = |cell: &Vec<(String, String)>| {
                let cell = cell.clone();
                axis.values.iter().map(move |value| {
                    let mut cell = cell.clone();
                    cell.push((axis.key.clone(), value.clone()));
                    cell
                })
            };
            cells = cells.iter().flat_map(with).collect();
        }
        cells
    }

    /// The plan of one cell.
    pub fn cell(&self, cell: &[(String, String)]) -> Result<Plan, PlanError> {
        let mut plan = self.clone();
        for (key, value) in cell {
            plan.set(key, value)?;
        }
        Ok(plan)
    }
}
