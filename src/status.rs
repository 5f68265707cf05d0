//! `dunlin status`: what the cluster says of itself.

use std::fmt::Write;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result};
use dunlin_actors::status::{ClusterStatus, NodeStatus};
use dunlin_runtime::config::ClusterConfig;

use crate::client::Client;
use crate::cluster::gateway_url;
use crate::config::ConfigArgs;

/// Show nodes, incarnations, supervision trees with restarts, replicas, KV use, round-trip times.
///
/// Asks the first gateway that answers. The exit code is 0 if the cluster is ready, 3 if it is not.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  dunlin status
  dunlin status --json | jq '.replicas'
  dunlin status --url http://192.168.1.10:8080")]
pub struct Args {
    #[command(flatten)]
    config: ConfigArgs,
    /// Ask this gateway instead of the file's
    #[arg(long)]
    url: Option<String>,
    /// Print the whole answer as JSON
    #[arg(long)]
    json: bool,
    /// Leave the supervision trees out
    #[arg(long)]
    short: bool,
}

/// The cluster answers, but does not serve.
const NOT_READY: u8 = 3;
const ANSWER_WITHIN: Duration = Duration::from_secs(5);

pub async fn run(args: Args) -> Result<ExitCode> {
    let config = args.config.load()?;
    let url = match &args.url {
        Some(url) => url.clone(),
        None => gateway_url(&config)?,
    };
    let answer = ask(&url, &config).await?;
    let status: ClusterStatus = serde_json::from_value(answer.clone())
        .context("the gateway's version differs from mine")?;
    if args.json {
        println!("{}", serde_json::to_string_pretty(&answer)?);
    } else {
        print!("{}", render(&status, !args.short));
    }
    Ok(if status.ready { ExitCode::SUCCESS } else { ExitCode::from(NOT_READY) })
}

async fn ask(url: &str, config: &ClusterConfig) -> Result<serde_json::Value> {
    let key = config.cluster.api_keys.first().map(|entry| entry.key.clone());
    let client = Client::new(url, key)?;
    let answer = tokio::time::timeout(ANSWER_WITHIN, client.get("/cluster/status")).await;
    let answer =
        answer.with_context(|| format!("no answer from {url} within {ANSWER_WITHIN:?}"))?;
    answer.with_context(|| format!("no cluster at {url}; start it with `dunlin up`"))
}

fn render(status: &ClusterStatus, trees: bool) -> String {
    let mut out = String::new();
    // Writing to a String does not fail.
    let _ = write_all(&mut out, status, trees);
    out
}

fn write_all(out: &mut String, status: &ClusterStatus, trees: bool) -> std::fmt::Result {
    let ready = match (status.ready, status.faults_armed) {
        (true, false) => "ready",
        (true, true) => "ready · FAULTS ARMED",
        (false, false) => "NOT READY",
        (false, true) => "NOT READY · FAULTS ARMED",
    };
    writeln!(
        out,
        "cluster {} · {} · dunlin {} · {ready}",
        status.cluster, status.model, status.version
    )?;
    if let Some(router) = &status.router {
        writeln!(
            out,
            "requests: {} open ({} waiting), {} finished, {} failed, {} cancelled, {} replays{}",
            router.open_requests,
            router.waiting_requests,
            router.finished_total,
            router.failed_total,
            router.cancelled_total,
            router.replays_total,
            if router.draining { " · draining" } else { "" }
        )?;
    } else {
        writeln!(out, "requests: the head ({}) cannot be reached", status.head)?;
    }
    writeln!(out, "\nnodes")?;
    for node in &status.nodes {
        write_node(out, node, node.name == status.head, trees)?;
    }
    writeln!(out, "\nreplicas")?;
    for replica in &status.replicas {
        let age = format_age(replica.since_ms);
        // The head's incarnation, and how many placements it has made: see the host's placement.
        let (head, placement) = (replica.epoch.0 >> 24, replica.epoch.0 & 0xff_ffff);
        let (name, state) = (&replica.replica, &replica.state);
        write!(out, "  {name:<8} {state:<8} for {age}, epoch {head}.{placement}")?;
        writeln!(out, "  on {}", replica.shards.join(" > "))?;
        if !replica.reason.is_empty() {
            writeln!(out, "    {}", replica.reason)?;
        }
        let serving = status.router.iter().flat_map(|router| &router.replicas);
        for serving in serving.filter(|serving| serving.info.replica == replica.replica) {
            let load = &serving.load;
            let used = load.kv_blocks_live + load.kv_blocks_cached;
            writeln!(
                out,
                "    {} running, {} waiting · KV {}/{} blocks ({} live, {} cached) · {:.1} tokens/s · \
                 {} preemptions · prefix hits {}",
                load.running,
                load.waiting,
                used,
                load.kv_blocks_total,
                load.kv_blocks_live,
                load.kv_blocks_cached,
                load.tokens_per_second,
                load.preemptions_total,
                percent(load.prefix_hits_total, load.prefix_queries_total)
            )?;
        }
    }
    if status.replicas.is_empty() {
        writeln!(out, "  none")?;
    }
    Ok(())
}

fn write_node(out: &mut String, node: &NodeStatus, head: bool, trees: bool) -> std::fmt::Result {
    let incarnation = node.incarnation.map_or("-".to_string(), |life| format!("#{life}"));
    let rtt =
        node.rtt_us.map_or(String::new(), |us| format!(" · rtt {:.2} ms", us as f64 / 1000.0));
    let lost = match node.lost_packets {
        Some(lost) if lost > 0 => format!(" · {lost} packets lost"),
        _ => String::new(),
    };
    let role = if head { " (head)" } else { "" };
    writeln!(
        out,
        "  {:<8} {:<5} {:<21} {incarnation}{role}{rtt}{lost}",
        node.name, node.state, node.address
    )?;
    if let Some(reason) = &node.reason {
        writeln!(out, "    {reason}")?;
    }
    for device in &node.devices {
        writeln!(out, "    {device}")?;
    }
    for actor in node.actors.iter().filter(|_| trees) {
        let depth = actor.path.matches('/').count();
        let name = actor.path.rsplit('/').next().unwrap_or(&actor.path);
        let restarts = match actor.restarts {
            0 => String::new(),
            1 => ", 1 restart".to_string(),
            many => format!(", {many} restarts"),
        };
        writeln!(out, "    {}{name}: {}{restarts}", "  ".repeat(depth), actor.state)?;
    }
    Ok(())
}

fn percent(part: u64, whole: u64) -> String {
    match whole {
        0 => "-".to_string(),
        whole => format!("{:.0} %", 100.0 * part as f64 / whole as f64),
    }
}

fn format_age(ms: u64) -> String {
    match ms / 1000 {
        s if s < 100 => format!("{s} s"),
        s if s < 6000 => format!("{} min", s / 60),
        s => format!("{} h", s / 3600),
    }
}

#[cfg(test)]
mod tests {
    use dunlin_actors::messages::{ActorStatus, ReplicaEpoch, ReplicaState};

    use super::*;

    #[test]
    fn a_status_is_readable() {
        let actor = |path: &str, restarts| ActorStatus {
            path: path.to_string(),
            state: "up".to_string(),
            restarts,
        };
        let status = ClusterStatus {
            cluster: "lab".into(),
            model: "m".into(),
            version: "0.1.0".into(),
            head: "front".into(),
            ready: true,
            faults_armed: false,
            nodes: vec![NodeStatus {
                name: "front".into(),
                address: "127.0.0.1:7400".into(),
                state: "self".into(),
                incarnation: Some(7),
                reason: None,
                rtt_us: Some(120),
                lost_packets: Some(0),
                devices: vec!["cpu: 2 threads".into()],
                actors: vec![actor("front", 0), actor("front/router", 2)],
            }],
            replicas: vec![ReplicaState {
                places: Vec::new(),
                replica: "r0".into(),
                epoch: ReplicaEpoch((7 << 24) + 3),
                state: "ready".into(),
                reason: String::new(),
                since_ms: 61_000,
                shards: vec!["left/cpu".into(), "right/cpu".into()],
            }],
            router: None,
        };
        let text = render(&status, true);
        for line in [
            "cluster lab · m · dunlin 0.1.0 · ready\n",
            "requests: the head (front) cannot be reached\n",
            "  front    self  127.0.0.1:7400        #7 (head) · rtt 0.12 ms\n",
            "      router: up, 2 restarts\n",
            "  r0       ready    for 61 s, epoch 7.3  on left/cpu > right/cpu\n",
        ] {
            assert!(text.contains(line), "no {line:?} in\n{text}");
        }
        assert!(!render(&status, false).contains("router: up"));
    }
}
