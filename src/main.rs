//! `dunlin`: the command line. Each subcommand has one file in this folder.

mod bench;
mod certs;
mod chat;
mod client;
mod cluster;
mod compose;
mod config;
mod devices;
mod engines;
mod faults;
mod models;
mod node;
mod pull;
mod run;
mod signals;
mod status;
mod talk;
mod text;
mod up;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// Serve language models from any number of machines, through the crash of any of them.
///
/// A cluster is what cluster.toml says: node processes, the replicas of the model that they form,
/// limits. `run` and `chat` start it for as long as they need it; `up` keeps it running.
#[derive(Debug, Parser)]
#[command(version, after_help = EXAMPLES)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

const EXAMPLES: &str = "\
Examples:
  dunlin run \"Why is the sky blue?\"            start the cluster, answer, stop it again
  dunlin chat --config examples/pipeline.toml  talk to a pipeline of two processes
  dunlin up                                    serve an OpenAI-compatible API until Ctrl-C
  dunlin status                                nodes, replicas and their health
  dunlin devices                               what of this machine can compute
  dunlin bench -c 8 -n 100                     load it and print latencies
  dunlin faults kinds                          what can be broken on purpose

Every subcommand has its own --help. Logs: DUNLIN_LOG=debug; node logs are in .dunlin/logs.";

#[derive(Debug, Subcommand)]
enum Command {
    Run(run::Args),
    Chat(chat::Args),
    Up(up::Args),
    Node(node::Args),
    Status(status::Args),
    Pull(pull::Args),
    Bench(Box<cluster::BenchCommand>),
    Certs(certs::Args),
    Faults(faults::Args),
    Devices(devices::Args),
}

#[tokio::main]
async fn main() -> ExitCode {
    let result = match Cli::try_parse().unwrap_or_else(|e| faults::refuse(&e)).command {
        Command::Run(args) => run::run(args).await,
        Command::Chat(args) => chat::run(args).await,
        Command::Up(args) => up::run(args).await,
        Command::Node(args) => node::run(args).await,
        Command::Status(args) => status::run(args).await,
        Command::Pull(args) => pull::run(args).await.map(|()| ExitCode::SUCCESS),
        Command::Bench(args) => cluster::bench(*args).await,
        Command::Certs(args) => certs::run(args).map(|()| ExitCode::SUCCESS),
        Command::Faults(args) => faults::run(args).await,
        Command::Devices(args) => devices::run(args).await,
    };
    result.unwrap_or_else(|e| {
        eprintln!("error: {}", explain(&e));
        ExitCode::FAILURE
    })
}

/// The error and its causes, without those that are part of what was said already.
fn explain(error: &anyhow::Error) -> String {
    let mut text = error.to_string();
    for cause in error.chain().skip(1).map(ToString::to_string) {
        if !text.contains(&cause) {
            text = format!("{text}: {cause}");
        }
    }
    text
}
