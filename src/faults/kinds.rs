//! `dunlin faults kinds`: the catalogue as a table.

use anyhow::Result;
use dunlin_faults::catalog::{Lasts, ROWS, Row};
use std::process::ExitCode;

/// Everything that can be broken: kind, parameters, modes, injector, proof, expected outcome.
#[derive(Debug, clap::Args)]
pub struct KindsArgs {
    /// As the table of docs/faults.md
    #[arg(long)]
    markdown: bool,
    /// Only kinds whose name holds this word
    word: Option<String>,
}

pub fn run(args: &KindsArgs) -> Result<ExitCode> {
    let wanted =
        |row: &&Row| args.word.as_ref().is_none_or(|w| row.kind.name().contains(w.as_str()));
    let rows: Vec<&Row> = ROWS.iter().filter(wanted).collect();
    anyhow::ensure!(
        !rows.is_empty(),
        "no kind's name holds {:?}",
        args.word.as_deref().unwrap_or("")
    );
    if args.markdown {
        print!("{}", markdown(&rows));
        return Ok(ExitCode::SUCCESS);
    }
    for row in rows {
        println!("{:<20} {}, {}", row.kind.name(), modes(row), lasts(row));
        let parameters = parameters(row);
        if !parameters.is_empty() {
            println!("{:20} takes {parameters}", "");
        }
        println!("{:20} injected by: {}", "", row.injector);
        println!("{:20} proof: {}; expected: {}", "", row.proof, expect(row));
    }
    Ok(ExitCode::SUCCESS)
}

/// The rows as docs/faults.md has them; a test compares the two.
fn markdown(rows: &[&Row]) -> String {
    let mut text = String::from(
        "| kind | parameters | modes | injected by | proof | expected |\n|---|---|---|---|---|---|\n",
    );
    for row in rows {
        let parameters = match (parameters(row), lasts(row)) {
            (parameters, "once") if parameters.is_empty() => "–".to_string(),
            (parameters, "once") => parameters,
            (parameters, lasts) if parameters.is_empty() => lasts.to_string(),
            (parameters, lasts) => format!("{parameters}; {lasts}"),
        };
        text += &format!(
            "| `{}` | {parameters} | {} | {} | {} | {} |\n",
            row.kind.name(),
            modes(row),
            row.injector,
            row.proof,
            expect(row)
        );
    }
    text
}

fn modes(row: &Row) -> String {
    row.modes.iter().map(|m| super::mode_name(*m)).collect::<Vec<_>>().join(" ")
}

fn lasts(row: &Row) -> &'static str {
    match row.lasts {
        Lasts::Once => "once",
        Lasts::ToHeal => "`for`, else to the heal phase",
        Lasts::Away => "`for`, else as its supervisor says",
        Lasts::Needed => "`for` (required)",
    }
}

fn parameters(row: &Row) -> String {
    let one = |take: &dunlin_faults::catalog::Take| {
        let name = take.param.name();
        let note = if take.required { "required" } else { take.default };
        format!("`{name}` ({note})")
    };
    let times = row.repeats.then(|| "`times` (1)".to_string());
    row.takes.iter().map(one).chain(times).collect::<Vec<_>>().join(", ")
}

fn expect(row: &Row) -> String {
    let name = serde_json::to_value(row.expect).ok();
    name.and_then(|v| v.as_str().map(ToString::to_string)).unwrap_or_default()
}
