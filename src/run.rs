//! `dunlin run PROMPT`: one answer.

use std::io::Read;
use std::process::ExitCode;

use anyhow::{Context, Result, bail};
use serde_json::{Value, json};

use crate::cluster::Cluster;
use crate::config::ConfigArgs;
use crate::signals::{INTERRUPTED, Signals};
use crate::talk::{self, AnswerArgs};

/// Answer one prompt: start the cluster if it is not up, stream the answer, stop what was started.
///
/// The answer goes to standard output; how fast it came and which nodes and devices served it, to
/// standard error.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  dunlin run \"Why is the sky blue?\"
  dunlin run --temperature 0.8 --seed 7 \"A limerick about dunlins\"
  dunlin run --config examples/tensor.toml \"Count to ten\"
  dunlin run --model ./my-model.gguf \"Hello\"
  git diff | dunlin run --system \"Write a commit message\" -")]
pub struct Args {
    /// What to ask; - reads it from standard input
    prompt: String,
    #[command(flatten)]
    config: ConfigArgs,
    #[command(flatten)]
    answer: AnswerArgs,
}

pub async fn run(args: Args) -> Result<ExitCode> {
    let mut signals = Signals::catch()?;
    let prompt = prompt(&args.prompt)?;
    let model = args.config.load()?.cluster.model;
    let Some(cluster) = signals.or(Cluster::open(&args.config)).await else {
        return Ok(ExitCode::from(INTERRUPTED));
    };
    let cluster = cluster?;
    let messages = messages(args.answer.system.as_deref(), &prompt);
    let answered = signals.or(talk::answer(&cluster.client, &model, &messages, &args.answer)).await;
    println!();
    let code = match &answered {
        Some(Ok(answer)) => {
            eprintln!("{}", answer.summary());
            ExitCode::SUCCESS
        }
        Some(Err(_)) => ExitCode::FAILURE,
        None => ExitCode::from(INTERRUPTED),
    };
    cluster.close(&mut signals).await?;
    match answered {
        Some(Err(e)) => Err(e.into()),
        _ => Ok(code),
    }
}

fn prompt(given: &str) -> Result<String> {
    let mut text = given.to_string();
    if given == "-" {
        text.clear();
        std::io::stdin().read_to_string(&mut text).context("standard input is not text")?;
    }
    if text.trim().is_empty() {
        bail!("the prompt is empty\n  = help: dunlin run \"Why is the sky blue?\"");
    }
    Ok(text)
}

fn messages(system: Option<&str>, prompt: &str) -> Vec<Value> {
    let system = system.map(|text| json!({"role": "system", "content": text}));
    system.into_iter().chain([json!({"role": "user", "content": prompt})]).collect()
}
