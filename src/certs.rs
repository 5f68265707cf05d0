//! `dunlin certs`: the cluster's authority and its nodes' certificates.

use std::path::PathBuf;

use anyhow::{Result, bail};
use dunlin_runtime::NodeName;
use dunlin_runtime::certs::{Ensured, bundle_path, ensure};
use dunlin_runtime::config::ClusterConfig;
use dunlin_runtime::procs::is_local_address;

use crate::config::ConfigArgs;

/// Make the cluster's certificate authority and a certificate for each node, where there are none.
///
/// Nodes talk over QUIC with mutual TLS; only certificates of this authority are let in. `up` does
/// this by itself for a cluster that lives on one machine. For several machines, run `certs` on one
/// of them and copy each node's bundle to its machine.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  dunlin certs --config examples/three-machines.toml
  scp -r .dunlin/certs/bundle-left lab2:dunlin/.dunlin/certs/

A bundle holds the node's private key: copy it by a channel that you trust.")]
pub struct Args {
    #[command(flatten)]
    config: ConfigArgs,
}

pub fn run(args: Args) -> Result<()> {
    let config = args.config.load()?;
    let nodes: Vec<String> = config.nodes.keys().map(NodeName::to_string).collect();
    let ensured = ensure(&certs_dir(&config), &config.cluster.name, &nodes)?;
    print(&config, &ensured);
    Ok(())
}

pub fn certs_dir(config: &ClusterConfig) -> PathBuf {
    config.state_dir().join("certs")
}

/// Sees to it that `nodes` have certificates here. An authority is made without being asked for only
/// if the whole cluster is on this machine: two machines must not each make their own.
pub fn prepare(config: &ClusterConfig, nodes: &[NodeName]) -> Result<()> {
    let dir = certs_dir(config);
    let here = config.nodes_where(is_local_address).len();
    let names: Vec<String> = nodes.iter().map(NodeName::to_string).collect();
    let lacking = names.iter().find(|name| !bundle_path(&dir, name).exists());
    if let Some(node) = lacking
        && here < config.nodes.len()
        && !dir.join("ca.key").exists()
    {
        bail!(
            "node {node} has no certificate in {dir}, and the cluster is on several machines\n  \
             = help: run `dunlin certs --config {file}` on ONE machine, then copy its folders \
             {dir}/bundle-NAME into {dir} on the machine of each node",
            dir = dir.display(),
            file = config.file(),
        );
    }
    ensure(&dir, &config.cluster.name, &names)?;
    Ok(())
}

fn print(config: &ClusterConfig, ensured: &Ensured) {
    let dir = ensured.dir.display();
    if ensured.made_authority {
        println!("made the authority of cluster \"{}\" in {dir}", config.cluster.name);
        println!("  keep {dir}/ca.key on this machine; no node needs it");
    }
    for (what, nodes) in
        [("made", &ensured.made), ("renewed", &ensured.renewed), ("kept", &ensured.present)]
    {
        for node in nodes {
            println!("{what} {}", bundle_path(&ensured.dir, node).display());
        }
    }
    let mut away =
        config.nodes.iter().filter(|(_, node)| !is_local_address(node.address.ip())).peekable();
    if away.peek().is_some() {
        println!("copy to the other machines, into the folder beside their {}:", config.file());
    }
    for (name, node) in away {
        let bundle = bundle_path(&ensured.dir, name.as_str());
        println!("  scp -r {} {}:PATH/{dir}/", bundle.display(), node.address.ip());
    }
}
