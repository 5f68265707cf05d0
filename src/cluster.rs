//! The cluster of a configuration, as the other subcommands use it: the one that is up, or one that
//! is started for as long as it is needed.

use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use dunlin_runtime::NodeName;
use dunlin_runtime::config::{ClusterConfig, EngineSection};
use dunlin_runtime::procs::{
    ProcessEvent, ProcessSpec, Processes, ProcessesSpec, is_local_address,
};
use dunlin_runtime::supervise::Backoff;
use indicatif::{ProgressBar, ProgressStyle};
use tokio::sync::mpsc::UnboundedReceiver;
use tokio::time::timeout;

use crate::bench::{self, BenchArgs};
use crate::client::{Client, ClientError};
use crate::config::ConfigArgs;
use crate::signals::{INTERRUPTED, Signals};
use crate::{certs, models};

/// How long a gateway that is there may take to say so.
const HEALTH_WITHIN: Duration = Duration::from_secs(2);
/// Past joining, a node may need this long to load its part of a large model.
const LOAD_WITHIN: Duration = Duration::from_secs(1800);
/// A node's own drain is bounded by the configuration; after this much more it is killed.
const STOP_GRACE: Duration = Duration::from_secs(5);

/// A cluster that answers.
pub struct Cluster {
    pub url: String,
    pub client: Client,
    /// Those that were started here; `None` if the cluster was up already.
    processes: Option<Processes>,
}

impl Cluster {
    /// Uses the cluster if it is up, else starts this machine's nodes, quietly, and waits until a
    /// token has gone through. Dropping the future stops what it has started.
    pub async fn open(args: &ConfigArgs) -> Result<Cluster> {
        let config = args.load()?;
        let url = gateway_url(&config)?;
        let key = config.cluster.api_keys.first().map(|entry| entry.key.clone());
        let client = Client::new(&url, key)?.with_details();
        match health(&client).await {
            Health::Ready => return Ok(Cluster { url, client, processes: None }),
            Health::NotReady(reason) => {
                bail!("the cluster at {url} is up, but not ready: {reason}");
            }
            Health::Nobody => {}
        }
        let nodes = local_nodes(&config)?;
        if nodes.len() < config.nodes.len() {
            bail!(
                "the cluster of {} is on several machines and does not answer at {url}\n  \
                 = help: run `dunlin up --config {0}` on each of them",
                config.file()
            );
        }
        prepare(&config, &nodes).await?;
        let spinner = spinner();
        let start = start(args, &config, &nodes, Start { wait: JOIN_SECONDS, echo: false })?;
        let (processes, mut events) = start;
        let ready = {
            let ready = processes.ready();
            tokio::pin!(ready);
            let mut progress = Progress::new(nodes.len());
            loop {
                tokio::select! {
                    result = &mut ready => break result,
                    Some(event) = events.recv() => spinner.set_message(progress.note(&event)),
                    () = tokio::time::sleep(Duration::from_millis(100)) => spinner.tick(),
                }
            }
        };
        spinner.finish_and_clear();
        ready?;
        Ok(Cluster { url, client, processes: Some(processes) })
    }

    /// Stops what was started here, letting it drain. A signal meanwhile kills it at once.
    pub async fn close(self, signals: &mut Signals) -> Result<()> {
        let Some(processes) = &self.processes else { return Ok(()) };
        match signals.or(processes.stop()).await {
            Some(result) => Ok(result?),
            None => {
                processes.kill();
                Ok(())
            }
        }
    }
}

/// Load a cluster, or any OpenAI-compatible endpoint, and report what its clients see.
///
/// Without --url it is the cluster of the configuration, which is started if it is not up.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  dunlin bench -c 8 -n 100                               8 at a time
  dunlin bench -c 1,4,16,32 --per-stream 4               a row of figures each
  dunlin bench -c 8 -n 8 --output-tokens 900 --intrude 4000@4
                                                         gaps while a long prompt arrives
  dunlin bench --rate 2 -n 200 --slo-ttft-ms 500         two a second, and goodput
  dunlin bench --prompt-tokens uniform:16..512 --shared-prefix 0.5 --prefix-tokens 256
  dunlin bench --url http://127.0.0.1:9000 --json other.json
  dunlin bench --device wgpu:0                           one device, beside a copy and a matmul
  dunlin bench --device cpu --model smollm2-135m-instruct")]
pub struct BenchCommand {
    #[command(flatten)]
    config: ConfigArgs,
    #[command(flatten)]
    bench: BenchArgs,
}

/// `dunlin bench`: against `--url`, or the cluster of the configuration.
pub async fn bench(BenchCommand { config, bench: args }: BenchCommand) -> Result<ExitCode> {
    let mut signals = Signals::catch()?;
    if let Some(device) = args.device.clone() {
        let measured = bench::device::run(device, config.model.clone(), args.json.as_deref());
        return finish(signals.or(measured).await);
    }
    if let Some(url) = args.url.clone() {
        let done = signals.or(bench::run(&args, &url)).await;
        return finish(done);
    }
    let Some(cluster) = signals.or(Cluster::open(&config)).await else {
        return Ok(ExitCode::from(INTERRUPTED));
    };
    let cluster = cluster?;
    let mut args = args;
    if args.api_key.is_none() {
        args.api_key = config.load()?.cluster.api_keys.first().map(|entry| entry.key.clone());
    }
    let url = cluster.url.clone();
    let done = signals.or(bench::run(&args, &url)).await;
    cluster.close(&mut signals).await?;
    finish(done)
}

fn finish(done: Option<Result<()>>) -> Result<ExitCode> {
    match done {
        Some(result) => result.map(|()| ExitCode::SUCCESS),
        None => Ok(ExitCode::from(INTERRUPTED)),
    }
}

enum Health {
    Ready,
    NotReady(String),
    Nobody,
}

async fn health(client: &Client) -> Health {
    match timeout(HEALTH_WITHIN, client.get("/health")).await {
        Ok(Ok(_)) => Health::Ready,
        Ok(Err(ClientError::Connect { .. })) => Health::Nobody,
        Ok(Err(ClientError::Refused { message, .. })) => Health::NotReady(message),
        Ok(Err(e)) => Health::NotReady(format!("what listens there is no Dunlin gateway ({e})")),
        Err(_) => Health::NotReady(format!("no answer within {HEALTH_WITHIN:?}")),
    }
}

/// Where the first gateway can be reached from here.
pub fn gateway_url(config: &ClusterConfig) -> Result<String> {
    let gateways = config.gateways();
    let (name, mut address) = *gateways.first().context("no node has http")?;
    if address.ip().is_unspecified() {
        let node = config.nodes.get(name).context("a gateway's node")?;
        address.set_ip(node.address.ip());
    }
    Ok(format!("http://{address}"))
}

/// The nodes to start here: workers first, gateways and the head last, so that they stop first and
/// drain while the workers still work.
pub fn local_nodes(config: &ClusterConfig) -> Result<Vec<NodeName>> {
    let mut nodes = config.nodes_where(is_local_address);
    if nodes.is_empty() {
        let all: Vec<String> =
            config.nodes.iter().map(|(name, n)| format!("{name} at {}", n.address)).collect();
        bail!(
            "no node of {} has an address of this machine: {}\n  \
             = help: run it on their machines, or correct the addresses",
            config.file(),
            all.join(", ")
        );
    }
    nodes.sort_by_key(|name| {
        let has_http = config.nodes.get(name).is_some_and(|node| node.http.is_some());
        (*name == config.cluster.head, has_http)
    });
    Ok(nodes)
}

/// What nodes need before they start, done once here instead of in each: certificates, the model.
pub async fn prepare(config: &ClusterConfig, nodes: &[NodeName]) -> Result<()> {
    certs::prepare(config, nodes)?;
    if config.engine == EngineSection::Transformer {
        let model = config.cluster.model.clone();
        let locate = move || models::locate(&model, &models::Options::from_env()?);
        let located = tokio::task::spawn_blocking(locate).await.context("fetching the model")?;
        located.map_err(|e| {
            config.complain("cluster.model", e.to_string(), "name a model that can be had")
        })?;
    }
    Ok(())
}

/// How long a node waits for the others, unless it is told.
pub const JOIN_SECONDS: u64 = 10;

#[derive(Debug, Clone, Copy)]
pub struct Start {
    /// Seconds that nodes wait for each other; 0: for ever.
    pub wait: u64,
    /// Print the nodes' logs.
    pub echo: bool,
}

/// Starts one process a node.
pub fn start(
    args: &ConfigArgs,
    config: &ClusterConfig,
    nodes: &[NodeName],
    start: Start,
) -> Result<(Processes, UnboundedReceiver<ProcessEvent>)> {
    let program = std::env::current_exe().context("where this program is")?;
    let logs = config.state_dir().join("logs");
    let wait = Duration::from_secs(start.wait);
    let process = |name: &NodeName| {
        let mut own = vec!["node".into(), "--name".into(), name.as_str().into()];
        own.extend(["--wait".into(), start.wait.to_string().into()]);
        own.extend(args.for_child(config));
        ProcessSpec {
            name: name.to_string(),
            program: program.clone(),
            args: own,
            env: Vec::new(),
            log_file: logs.join(format!("{name}.log")),
            echo: start.echo,
            ready_within: if wait.is_zero() {
                Duration::from_secs(1 << 30)
            } else {
                wait + LOAD_WITHIN
            },
            stop_within: Duration::from_millis(config.limits.drain_ms) + STOP_GRACE,
        }
    };
    Ok(Processes::start(ProcessesSpec {
        intensity: config.restart.intensity(),
        backoff: Backoff { seed: u64::from(std::process::id()), ..Backoff::default() },
        processes: nodes.iter().map(process).collect(),
    }))
}

/// Only drawn on a terminal.
fn spinner() -> ProgressBar {
    let style = ProgressStyle::with_template("{spinner} {msg} ({elapsed})");
    let spinner = ProgressBar::new_spinner();
    spinner.set_style(style.unwrap_or_else(|_| ProgressStyle::default_spinner()));
    spinner.set_message("starting");
    spinner
}

/// One line about how far the start is.
struct Progress {
    total: usize,
    ready: std::collections::BTreeSet<String>,
}

impl Progress {
    fn new(total: usize) -> Progress {
        Progress { total, ready: Default::default() }
    }

    fn note(&mut self, event: &ProcessEvent) -> String {
        match event {
            ProcessEvent::Ready { name, .. } => {
                self.ready.insert(name.clone());
            }
            ProcessEvent::Exited { name, .. } => {
                self.ready.remove(name);
            }
            _ => {}
        }
        let so_far = format!("starting: {} of {} nodes ready", self.ready.len(), self.total);
        match event {
            ProcessEvent::Restarting { name, how, .. } => format!("{so_far}; {name} {how}"),
            _ => so_far,
        }
    }
}
