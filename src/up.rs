//! `dunlin up`: this machine's nodes, started and kept running.

use std::process::ExitCode;
use std::time::Duration;

use anyhow::Result;
use dunlin_runtime::NodeName;
use dunlin_runtime::config::ClusterConfig;
use dunlin_runtime::procs::{ProcessEvent, Processes};
use dunlin_runtime::telemetry::{LogOptions, init_log};
use tokio::sync::mpsc::UnboundedReceiver;

use crate::cluster::{self, JOIN_SECONDS, Start};
use crate::config::ConfigArgs;
use crate::signals::{INTERRUPTED, Signals};

/// Start this machine's nodes of the cluster and keep them running until Ctrl-C.
///
/// A node is this machine's if its address is. Each runs as a process of its own and is started
/// again when it dies, at most as often as [restart] of the file allows. Ctrl-C (or SIGTERM) takes no
/// new requests and lets the open ones end; a second one ends everything at once.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  dunlin up                                     the cluster of ./cluster.toml
  dunlin up --config examples/tensor.toml       another one
  dunlin up --model gemma3-270m                 another model
  dunlin up --config lab.toml --wait 0          on each machine of a lab, in any order

Then, from anywhere:
  curl http://127.0.0.1:8080/v1/chat/completions -H 'content-type: application/json' \\
    -d '{\"model\": \"smollm2-135m-instruct\", \"messages\": [{\"role\": \"user\", \"content\": \"Hi!\"}]}'")]
pub struct Args {
    #[command(flatten)]
    config: ConfigArgs,
    /// How many seconds to wait for nodes on other machines; 0: for ever
    #[arg(long, value_name = "SECONDS", default_value_t = JOIN_SECONDS)]
    wait: u64,
    /// Print the nodes' logs here too (they are in STATE_DIR/logs)
    #[arg(long, short)]
    verbose: bool,
}

pub async fn run(args: Args) -> Result<ExitCode> {
    let mut signals = Signals::catch()?;
    init_log(&LogOptions { filter: "warn".to_string(), ..LogOptions::default() })?;
    let config = args.config.load()?;
    let nodes = cluster::local_nodes(&config)?;
    let Some(prepared) = signals.or(cluster::prepare(&config, &nodes)).await else {
        return Ok(ExitCode::from(INTERRUPTED));
    };
    prepared?;
    let start = Start { wait: args.wait, echo: args.verbose };
    let (processes, events) = cluster::start(&args.config, &config, &nodes, start)?;
    let printing = tokio::spawn(print_events(events));
    eprintln!("starting {} (logs: {})", list(&nodes), config.state_dir().join("logs").display());
    let ended = serve(&processes, &config, &mut signals).await;
    // The last events were sent before the processes counted as ended.
    let _ = tokio::time::timeout(Duration::from_millis(200), printing).await;
    if let Ok(ExitCode::SUCCESS) = ended {
        eprintln!("stopped");
    }
    ended
}

async fn serve(
    processes: &Processes,
    config: &ClusterConfig,
    signals: &mut Signals,
) -> Result<ExitCode> {
    match signals.or(processes.ready()).await {
        Some(result) => result?,
        None => return stop(processes, config, signals).await,
    }
    eprintln!("ready: {}", describe(config)?);
    match signals.or(processes.wait()).await {
        Some(ended) => {
            ended?;
            Ok(ExitCode::SUCCESS)
        }
        None => stop(processes, config, signals).await,
    }
}

async fn stop(
    processes: &Processes,
    config: &ClusterConfig,
    signals: &mut Signals,
) -> Result<ExitCode> {
    let bound = Duration::from_millis(config.limits.drain_ms);
    eprintln!("draining for at most {bound:?}; Ctrl-C again to end at once");
    match signals.or(processes.stop()).await {
        Some(result) => {
            result?;
            Ok(ExitCode::SUCCESS)
        }
        None => {
            processes.kill();
            Ok(ExitCode::from(INTERRUPTED))
        }
    }
}

async fn print_events(mut events: UnboundedReceiver<ProcessEvent>) {
    while let Some(event) = events.recv().await {
        match event {
            ProcessEvent::Started { name, pid } => eprintln!("{name}: process {pid}"),
            ProcessEvent::Ready { name, after, .. } => {
                eprintln!("{name}: ready after {:.1} s", after.as_secs_f64());
            }
            ProcessEvent::Exited { name, how } => {
                // What a node reported is said in full where it ends the start; its log has it too.
                eprintln!("{name}: {}", how.lines().next().unwrap_or("ended"));
            }
            ProcessEvent::Restarting { name, delay, .. } => {
                eprintln!("{name}: starting again in {} ms", delay.as_millis());
            }
        }
    }
}

fn describe(config: &ClusterConfig) -> Result<String> {
    let url = cluster::gateway_url(config)?;
    Ok(format!("{} on {url}/v1 (Ctrl-C to stop)", config.cluster.model))
}

fn list(nodes: &[NodeName]) -> String {
    nodes.iter().map(NodeName::as_str).collect::<Vec<_>>().join(", ")
}
