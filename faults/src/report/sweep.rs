//! A sweep: one run a cell of a grid, as a matrix page and as CSV.

use super::Outcome;
use super::html::{Cell, Table, badge, document, figure};
use super::summary::RunBrief;
use super::svg::{Escaped, Plot, Scale, duration, put, short};
use super::tables;
use crate::fault::Mode;
use serde::{Deserialize, Serialize};

/// A swept key of the plan (or `seed`) and its values.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Axis {
    pub name: String,
    pub values: Vec<String>,
}

/// One run; `at` has the index of its value on each axis.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct SweepCell {
    pub at: Vec<usize>,
    pub run: RunBrief,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Sweep {
    pub plan: String,
    pub mode: Mode,
    pub repro: String,
    pub axes: Vec<Axis>,
    pub cells: Vec<SweepCell>,
}

/// Which two axes span the matrix; the others are folded, the worst value counting.
struct Grid<'a> {
    x: usize,
    y: Option<usize>,
    sweep: &'a Sweep,
}

impl Sweep {
    /// One row a cell: the axes, the verdict, every metric of the report's table, the repro line.
    pub fn csv(&self) -> String {
        let mut out = String::new();
        let mut head: Vec<String> = self.axes.iter().map(|a| a.name.clone()).collect();
        head.push("verdict".to_string());
        head.extend(tables::rows(&Default::default()).iter().map(|row| slug(row.name, row.unit)));
        head.push("repro".to_string());
        put!(out, "{}\n", line(&head));
        for cell in &self.cells {
            let mut row: Vec<String> = cell
                .at
                .iter()
                .zip(&self.axes)
                .map(|(at, axis)| axis.values.get(*at).cloned().unwrap_or_default())
                .collect();
            row.push(cell.run.verdict.to_string());
            let metrics = tables::rows(&cell.run.metrics);
            row.extend(metrics.iter().map(|r| r.value.map_or_else(String::new, |v| v.to_string())));
            row.push(cell.run.repro.clone());
            put!(out, "{}\n", line(&row));
        }
        out
    }

    pub fn html(&self) -> String {
        let mut out = String::new();
        let count = |v| self.cells.iter().filter(|c| c.run.verdict == v).count();
        let worst = if count(Outcome::Fail) > 0 {
            Outcome::Fail
        } else if count(Outcome::Invalid) > 0 || self.cells.is_empty() {
            Outcome::Invalid
        } else {
            Outcome::Pass
        };
        put!(
            out,
            "<header><p class=\"kicker\">Dunlin sweep · {} runs: {} passed, {} failed, {} invalid</p>\
             <h1>{}{}</h1><pre>{}</pre></header>\n",
            self.cells.len(),
            count(Outcome::Pass),
            count(Outcome::Fail),
            count(Outcome::Invalid),
            Escaped(&self.plan),
            badge(worst),
            Escaped(&self.repro)
        );
        let grid = self.grid();
        figure(
            &mut out,
            "<b>Figure 1.</b> Verdicts: <span class=\"box up\"></span> PASS, \
             <span class=\"box starting\"></span> INVALID, <span class=\"box fail\"></span> FAIL. Of several runs in a cell the worst counts.",
            |width| grid.verdicts(width),
        );
        for (number, name, pick) in [
            (2, "Longest token gap", longest_gap as fn(&RunBrief) -> Option<u64>),
            (3, "MTTR of the worst fault", |r| r.metrics.mttr_us),
        ] {
            let values = || self.cells.iter().filter_map(|c| pick(&c.run));
            let (Some(least), Some(most)) = (values().min(), values().max()) else { continue };
            let caption = format!(
                "<b>Figure {number}.</b> {name}: palest {}, darkest {} (log scale).",
                duration(least as f64),
                duration(most as f64)
            );
            figure(&mut out, &caption, |width| grid.heat(width, (least, most), pick));
        }
        let failing: Vec<_> =
            self.cells.iter().filter(|c| c.run.verdict != Outcome::Pass).take(100).collect();
        if failing.is_empty() {
            out.push_str("<p>Every cell passed.</p>\n");
        } else {
            let caption = "<b>Table 1.</b> Cells that did not pass.";
            let mut table = Table::new("seeds", caption, &["cell", "", "why", "repeat"]);
            for cell in failing {
                table.row(vec![
                    Cell::Text(self.name(&cell.at)),
                    Cell::Html(badge(cell.run.verdict)),
                    Cell::Text(cell.run.why.join("; ")),
                    Cell::Code(cell.run.repro.clone()),
                ]);
            }
            out += &table.finish();
        }
        document(&format!("{}: sweep", self.plan), &out)
    }

    /// The two axes with the most values.
    fn grid(&self) -> Grid<'_> {
        let mut order: Vec<usize> = (0..self.axes.len()).collect();
        let size = |i: &usize| self.axes.get(*i).map_or(0, |a| a.values.len());
        order.sort_by_key(|i| std::cmp::Reverse(size(i)));
        Grid { x: order.first().copied().unwrap_or(0), y: order.get(1).copied(), sweep: self }
    }

    fn name(&self, at: &[usize]) -> String {
        let one = |(axis, at): (&Axis, &usize)| {
            format!("{} = {}", axis.name, axis.values.get(*at).map_or("?", String::as_str))
        };
        self.axes.iter().zip(at).map(one).collect::<Vec<_>>().join(", ")
    }
}

impl Grid<'_> {
    fn size(&self, axis: Option<usize>) -> usize {
        axis.and_then(|i| self.sweep.axes.get(i)).map_or(1, |a| a.values.len().max(1))
    }

    fn runs(&self, x: usize, y: usize) -> impl Iterator<Item = &RunBrief> {
        let here = move |cell: &&SweepCell| {
            let at = |axis: usize| cell.at.get(axis).copied().unwrap_or(0);
            at(self.x) == x && self.y.is_none_or(|axis| at(axis) == y)
        };
        self.sweep.cells.iter().filter(here).map(|cell| &cell.run)
    }

    fn verdicts(&self, width: f64) -> String {
        self.matrix(width, "Verdict of each cell", |runs| {
            let all: Vec<Outcome> = runs.iter().map(|r| r.verdict).collect();
            let has = |v| all.contains(&v);
            let class = match () {
                () if all.is_empty() => "none",
                () if has(Outcome::Fail) => "fail",
                () if has(Outcome::Invalid) => "invalid",
                () => "pass",
            };
            (class, 1.0, all.iter().map(ToString::to_string).collect::<Vec<_>>().join(", "))
        })
    }

    fn heat(
        &self,
        width: f64,
        (least, most): (u64, u64),
        pick: fn(&RunBrief) -> Option<u64>,
    ) -> String {
        let log = |us: u64| (us.max(1) as f64).ln();
        let span = (log(most) - log(least)).max(1e-9);
        self.matrix(width, "Heat map over the cells", |runs| {
            match runs.iter().filter_map(|r| pick(r)).max() {
                None => ("none", 1.0, "–".to_string()),
                Some(us) => {
                    let share = (log(us) - log(least)) / span;
                    ("heat", 0.08 + 0.92 * share, duration(us as f64))
                }
            }
        })
    }

    /// `look`: class, opacity and text of a cell with these runs.
    fn matrix(
        &self,
        width: f64,
        label: &str,
        look: impl Fn(&[&RunBrief]) -> (&'static str, f64, String),
    ) -> String {
        let (columns, rows) = (self.size(Some(self.x)), self.size(self.y));
        let (left, top, right) = (58.0, 8.0, width - 8.0);
        let side = (right - left) / columns as f64;
        let tall = side.clamp(5.0, 22.0);
        let bottom = top + tall * rows as f64;
        let x = Scale::linear((0.0, columns as f64), (left, right));
        let y = Scale::linear((0.0, rows as f64), (top, bottom));
        let mut plot = Plot::new((width, bottom + 36.0), (left, top, right, bottom), x, y);
        for column in 0..columns {
            for row in 0..rows {
                let runs: Vec<_> = self.runs(column, row).collect();
                let (class, opacity, text) = look(&runs);
                let (cx, cy) = (left + side * column as f64, top + tall * row as f64);
                let title = format!("{}: {text}", self.title(column, row));
                put!(
                    plot.out,
                    "<rect x=\"{cx:.1}\" y=\"{cy:.1}\" width=\"{side:.1}\" height=\"{tall:.1}\" \
                     class=\"cell {class}\" fill-opacity=\"{opacity:.2}\"><title>{}</title></rect>",
                    Escaped(&title)
                );
            }
        }
        self.names(&mut plot, (side, tall));
        plot.finish(if width > 500.0 { "wide" } else { "narrow" }, label)
    }

    /// Values beside the cells, as many as have room, and the axes' names.
    fn names(&self, plot: &mut Plot, (side, tall): (f64, f64)) {
        let (left, top, bottom) = (plot.left, plot.top, plot.bottom);
        if let Some(axis) = self.sweep.axes.get(self.x) {
            let every = (34.0 / side).ceil().max(1.0) as usize;
            for (i, value) in axis.values.iter().enumerate().step_by(every) {
                let x = left + side * (i as f64 + 0.5);
                plot.text(x, bottom + 14.0, "tick mid", &short(value, 8));
            }
            let middle = (left + plot.right) / 2.0;
            plot.text(middle, bottom + 29.0, "name mid", &axis.name);
        }
        if let Some(axis) = self.y.and_then(|i| self.sweep.axes.get(i)) {
            let every = (13.0 / tall).ceil().max(1.0) as usize;
            for (i, value) in axis.values.iter().enumerate().step_by(every) {
                let y = top + tall * (i as f64 + 0.5);
                plot.text(left - 6.0, y + 4.0, "tick end", &short(value, 8));
            }
            plot.text(2.0, bottom + 29.0, "name", &format!("rows: {}", axis.name));
        }
    }

    fn title(&self, x: usize, y: usize) -> String {
        let value = |axis: usize, at: usize| {
            let axis = self.sweep.axes.get(axis)?;
            Some(format!("{} = {}", axis.name, axis.values.get(at)?))
        };
        let x = value(self.x, x);
        let y = self.y.and_then(|axis| value(axis, y));
        x.into_iter().chain(y).collect::<Vec<_>>().join(", ")
    }
}

fn longest_gap(run: &RunBrief) -> Option<u64> {
    run.metrics.longest_gap_us
}

/// A column's name: lower case, and the unit where it has one.
fn slug(name: &str, unit: tables::Unit) -> String {
    let words = name.split(|c: char| !c.is_ascii_alphanumeric()).filter(|w| !w.is_empty());
    let name = words.collect::<Vec<_>>().join("_").to_lowercase();
    match unit {
        tables::Unit::Time => name + "_us",
        tables::Unit::Rate => name + "_tokens_per_second",
        tables::Unit::Count | tables::Unit::Share => name,
    }
}

/// RFC 4180: quotes around what holds a comma, a quote or a line's end.
fn line(fields: &[String]) -> String {
    let quote = |field: &String| {
        if field.contains([',', '"', '\n', '\r']) {
            format!("\"{}\"", field.replace('"', "\"\""))
        } else {
            field.clone()
        }
    };
    fields.iter().map(quote).collect::<Vec<_>>().join(",")
}
