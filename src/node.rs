//! `dunlin node`: one node, in this process.

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail};
use dunlin_actors::host::Host;
use dunlin_faults::process::inside::Inside;
use dunlin_faults::process::reach::Reach;
use dunlin_runtime::NodeName;
use dunlin_runtime::certs::{NodeIdentity, next_incarnation};
use dunlin_runtime::config::ClusterConfig;
use dunlin_runtime::procs;
use dunlin_runtime::telemetry::{LogOptions, init_log};
use serde_json::json;

use crate::cluster::JOIN_SECONDS;
use crate::compose::Armed;
use crate::config::ConfigArgs;
use crate::signals::{INTERRUPTED, Signals};
use crate::{certs, compose};

/// Run one node of the cluster in this process until Ctrl-C.
///
/// This is what `up` starts for each node of its machine. By hand it is for a cluster on several
/// machines where a process manager of yours keeps the nodes running. Ctrl-C (or SIGTERM) lets what
/// runs here end or move; a second one ends at once.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  dunlin node --config lab.toml --name left --wait 0
  DUNLIN_LOG=debug DUNLIN_LOG_FORMAT=json dunlin node --name left")]
pub struct Args {
    #[command(flatten)]
    config: ConfigArgs,
    /// Which node of the file [default: the one whose address is on this machine]
    #[arg(long)]
    name: Option<String>,
    /// How many seconds to wait for the other nodes; 0: for ever
    #[arg(long, value_name = "SECONDS", default_value_t = JOIN_SECONDS)]
    wait: u64,
    /// Take injected faults from the runner at this unix socket (docs/faults.md). For tests only
    #[arg(long, value_name = "SOCKET", hide = true)]
    faults: Option<PathBuf>,
}

pub async fn run(args: Args) -> Result<ExitCode> {
    // First of all, so that it cannot outlive `up`.
    let supervised = procs::follow_parent();
    let result = serve(&args, supervised).await;
    if let (Err(e), true) = (&result, supervised) {
        procs::report_error(&crate::explain(e));
    }
    result
}

async fn serve(args: &Args, supervised: bool) -> Result<ExitCode> {
    let mut signals = Signals::catch()?;
    init_log(&LogOptions::default())?;
    let config = args.config.load()?;
    let name = which(&config, args.name.as_deref())?;
    let Some(armed) = signals.or(arm(args.faults.as_deref(), &name)).await else {
        return Ok(ExitCode::from(INTERRUPTED));
    };
    let armed = armed?;
    certs::prepare(&config, std::slice::from_ref(&name))?;
    let dir = certs::certs_dir(&config);
    let identity = NodeIdentity::load(&dir, name.as_str())?;
    let incarnation = next_incarnation(&dir, name.as_str())?;
    let join = Duration::from_secs(args.wait);
    let start = compose::start(&config, &name, identity, incarnation, join, armed.as_ref());
    let Some(host) = signals.or(start).await else { return Ok(ExitCode::from(INTERRUPTED)) };
    let host = host?;
    let http = host.http().map(|address| address.to_string());
    tracing::info!(incarnation, http, "this node is up");
    let outcome = watch(&host, &mut signals, supervised).await;
    let bound = Duration::from_millis(config.limits.drain_ms);
    match outcome {
        Err(e) => {
            host.stop().await;
            Err(e)
        }
        Ok(()) => {
            tracing::info!(?bound, "draining");
            let drained = signals.or(host.drain(bound)).await;
            match drained {
                Some(0) => {}
                Some(left) => tracing::warn!(left, "requests were cut off by the drain's bound"),
                None => return Ok(ExitCode::from(INTERRUPTED)),
            }
            match signals.or(host.stop()).await {
                Some(()) => Ok(ExitCode::SUCCESS),
                None => Ok(ExitCode::from(INTERRUPTED)),
            }
        }
    }
}

/// Lets a fault runner reach into this node, and waits until it lets the node start.
async fn arm(socket: Option<&Path>, name: &NodeName) -> Result<Option<Armed>> {
    let Some(socket) = socket else { return Ok(None) };
    tracing::warn!(
        socket = %socket.display(),
        "FAULTS ARMED: this node breaks on purpose when the runner says so; never serve users with it"
    );
    // On a thread of its own: a runner that wants the node to stay away lets it wait.
    let (tell, told) = tokio::sync::oneshot::channel();
    let (path, node) = (socket.to_path_buf(), name.clone());
    std::thread::Builder::new()
        .name("faults-join".into())
        .spawn(move || tell.send(Inside::connect(&path, &node)))
        .context("a thread for --faults")?;
    let inside = told.await.context("--faults")??;
    let reach = Reach::new(name.clone());
    inside.set_reach(reach.clone());
    Ok(Some(Armed { inside, reach }))
}

/// Until a signal (`Ok`) or a failure.
async fn watch(host: &Host, signals: &mut Signals, supervised: bool) -> Result<()> {
    match signals.or(host.ready()).await {
        None => return Ok(()),
        Some(result) => result?,
    }
    tracing::info!("a token has gone through the cluster: ready");
    if supervised {
        procs::report_ready(&json!({ "http": host.http().map(|address| address.to_string()) }));
    }
    match signals.or(host.failed()).await {
        None => Ok(()),
        Some(error) => Err(error.into()),
    }
}

fn which(config: &ClusterConfig, name: Option<&str>) -> Result<NodeName> {
    let all = || config.nodes.keys().map(NodeName::as_str).collect::<Vec<_>>().join(", ");
    if let Some(name) = name {
        let known = config.nodes.keys().find(|node| node.as_str() == name);
        return known.cloned().ok_or_else(|| {
            anyhow!("{} has no node {name}\n  = help: the nodes are {}", config.file(), all())
        });
    }
    let mut here = config.nodes_where(procs::is_local_address);
    match here.len() {
        1 => here.pop().context("one node"),
        0 => bail!(
            "no node of {} has an address of this machine\n  = help: name one: --name NAME ({})",
            config.file(),
            all()
        ),
        _ => bail!(
            "{} nodes of {} are on this machine\n  = help: name one, --name NAME ({}), or start all \
             with `dunlin up`",
            here.len(),
            config.file(),
            all()
        ),
    }
}
