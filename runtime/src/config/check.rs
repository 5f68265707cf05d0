//! What the parts of the file say about each other.

use std::collections::BTreeMap;
use std::net::SocketAddr;

use super::error::{ConfigError, Problem, nearest};
use super::tree::Source;
use super::{ClusterConfig, ReplicaConfig, Serves, ShardDevice};
use crate::address::NodeName;

pub(super) fn all(config: &ClusterConfig) -> Result<(), ConfigError> {
    addresses(config)?;
    head(config)?;
    roles(config)?;
    replicas(config)?;
    timing(config)
}

/// Do the stages cover the model?
pub(super) fn layers(
    source: &Source,
    all: &[ReplicaConfig],
    replica: &ReplicaConfig,
    model_layers: usize,
) -> Result<(), ConfigError> {
    let index = all.iter().position(|other| other.name == replica.name).unwrap_or(0);
    let stages = replica.stages.len();
    let Some(layers) = &replica.layers else {
        if stages > model_layers {
            let reason = format!(
                "replica {} has {stages} stages, but the model has {model_layers} layers",
                replica.name
            );
            let mend = format!("use at most {model_layers} stages");
            let key = format!("replica.{index}.stages");
            return Err(source.error(&key, Problem::Conflict { reason }, mend));
        }
        return Ok(());
    };
    let total: usize = layers.iter().sum();
    if total == model_layers {
        return Ok(());
    }
    let what = if total < model_layers { "too few: a stage is missing" } else { "too many" };
    let reason = format!(
        "the stages of replica {} hold {total} layers, {what}; the model has {model_layers}",
        replica.name
    );
    let mend = format!("make `layers` add up to {model_layers}, or leave it out");
    Err(source.error(&format!("replica.{index}.layers"), Problem::Conflict { reason }, mend))
}

fn addresses(config: &ClusterConfig) -> Result<(), ConfigError> {
    for (key, what) in [("address", "address"), ("http", "http address")] {
        let mut seen: BTreeMap<SocketAddr, &NodeName> = BTreeMap::new();
        for (name, node) in &config.nodes {
            let address = if key == "address" { Some(node.address) } else { node.http };
            let Some(address) = address.filter(|address| address.port() != 0) else { continue };
            if let Some(first) = seen.insert(address, name) {
                let (first, second) = in_file_order(config, key, first, name);
                let problem = Problem::Duplicate {
                    what,
                    value: address.to_string(),
                    first: format!("[node.{first}] {}", at(config, key, first)),
                };
                let mend = "give each node a port of its own";
                let key = format!("node.{second}.{key}");
                return Err(config.source.error(&key, problem, mend));
            }
        }
    }
    Ok(())
}

fn at(config: &ClusterConfig, key: &str, node: &NodeName) -> String {
    config.source.whereabouts(&format!("node.{node}.{key}"))
}

/// Nodes are kept by name; a person reads the file from the top.
fn in_file_order<'a>(
    config: &ClusterConfig,
    key: &str,
    a: &'a NodeName,
    b: &'a NodeName,
) -> (&'a NodeName, &'a NodeName) {
    let line = |node: &NodeName| {
        let problem = Problem::Conflict { reason: String::new() };
        let error = config.source.error(&format!("node.{node}.{key}"), problem, "");
        error.place.as_ref().map_or(usize::MAX, |place| place.line)
    };
    if line(a) <= line(b) { (a, b) } else { (b, a) }
}

fn head(config: &ClusterConfig) -> Result<(), ConfigError> {
    let head = &config.cluster.head;
    if config.nodes.contains_key(head) {
        return Ok(());
    }
    let problem = Problem::NotFound { what: "node", value: head.to_string() };
    Err(config.source.error("cluster.head", problem, names(config, head.as_str())))
}

/// What to say when a node's name is not known.
fn names(config: &ClusterConfig, wrong: &str) -> String {
    let known = config.nodes.keys().map(NodeName::as_str);
    match nearest(wrong, known.clone()) {
        Some(near) => format!("did you mean \"{near}\"?"),
        None => format!("the nodes are: {}", known.collect::<Vec<_>>().join(", ")),
    }
}

/// Every node is good for something, and the cluster can be spoken to and can compute.
fn roles(config: &ClusterConfig) -> Result<(), ConfigError> {
    if config.nodes.values().all(|node| node.http.is_none()) {
        let reason = "no node has `http`: nobody could send a request".to_string();
        let mend = "add http = \"127.0.0.1:8080\" to a node";
        let key = format!("node.{}", config.cluster.head);
        return Err(config.source.error(&key, Problem::Conflict { reason }, mend));
    }
    if config.nodes.values().all(|node| node.devices.is_empty()) {
        let reason = "no node has `devices`: nothing could compute".to_string();
        let mend = "add devices = [\"cpu\"] to a node";
        let key = format!("node.{}", config.cluster.head);
        return Err(config.source.error(&key, Problem::Conflict { reason }, mend));
    }
    for (name, node) in &config.nodes {
        let idle = node.http.is_none() && node.devices.is_empty();
        if idle && *name != config.cluster.head {
            let reason =
                format!("node {name} has neither `http` nor `devices`: it would do nothing");
            let mend = "add devices = [\"cpu\"], or remove the node";
            let problem = Problem::Conflict { reason };
            return Err(config.source.error(&format!("node.{name}"), problem, mend));
        }
    }
    Ok(())
}

fn replicas(config: &ClusterConfig) -> Result<(), ConfigError> {
    let mut users: BTreeMap<&ShardDevice, &str> = BTreeMap::new();
    for (index, replica) in config.replicas.iter().enumerate() {
        let key = format!("replica.{index}");
        let twin = config.replicas[..index].iter().position(|other| other.name == replica.name);
        if let Some(first) = twin {
            let first = config.source.whereabouts(&format!("replica.{first}.name"));
            let value = replica.name.clone();
            let problem = Problem::Duplicate { what: "replica", value, first };
            let mend = "give each replica a name of its own";
            return Err(config.source.error(&format!("{key}.name"), problem, mend));
        }
        if replica.serves != Serves::All {
            let reason = format!("replica {}: only serves = \"all\" is built so far", replica.name);
            let mend = "write serves = \"all\", or leave it out";
            let problem = Problem::Conflict { reason };
            return Err(config.source.error(&format!("{key}.serves"), problem, mend));
        }
        for (at, group) in replica.stages.iter().enumerate() {
            for (rank, device) in group.iter().enumerate() {
                // A stage of one device may be written without its own brackets.
                let in_list = format!("{key}.stages.{at}.{rank}");
                let whole = format!("{key}.stages.{at}");
                let nested = config.source.shown(&in_list).is_some();
                let path = if nested { in_list } else { whole };
                shard_device(config, &path, device)?;
                if let Some(user) = users.insert(device, &replica.name) {
                    let reason = format!("device {device} is already used by replica {user}");
                    let mend = "use each device once; a CPU can be split into cpu:0, cpu:1, ...";
                    return Err(config.source.error(&path, Problem::Conflict { reason }, mend));
                }
            }
        }
        if let Some(layers) = &replica.layers
            && layers.len() != replica.stages.len()
        {
            let (have, need) = (layers.len(), replica.stages.len());
            let reason = format!("`layers` has {have} entries for {need} stages");
            let mend = "write one number of layers for each stage, or leave it out";
            let problem = Problem::Conflict { reason };
            return Err(config.source.error(&format!("{key}.layers"), problem, mend));
        }
    }
    Ok(())
}

fn shard_device(
    config: &ClusterConfig,
    path: &str,
    device: &ShardDevice,
) -> Result<(), ConfigError> {
    let Some(node) = config.nodes.get(&device.node) else {
        let problem = Problem::NotFound { what: "node", value: device.node.to_string() };
        return Err(config.source.error(path, problem, names(config, device.node.as_str())));
    };
    if node.devices.contains(&device.device) {
        return Ok(());
    }
    let value = format!("{} on node {}", device.device, device.node);
    let mend = if node.devices.is_empty() {
        format!("add devices = [\"{}\"] to [node.{}]", device.device, device.node)
    } else {
        format!("node {} has: {}", device.node, node.devices.join(", "))
    };
    Err(config.source.error(path, Problem::NotFound { what: "device", value }, mend))
}

fn timing(config: &ClusterConfig) -> Result<(), ConfigError> {
    let membership = &config.membership;
    if membership.lease_ms < 3 * membership.heartbeat_ms {
        let reason = format!(
            "lease_ms {} is shorter than three heartbeats of {} ms: live nodes would be declared dead",
            membership.lease_ms, membership.heartbeat_ms
        );
        let mend = format!("set lease_ms to {} or more", 3 * membership.heartbeat_ms);
        let problem = Problem::Conflict { reason };
        return Err(config.source.error("membership.lease_ms", problem, mend));
    }
    Ok(())
}
