//! What a fault's target means in a cluster: reads `target`, lists what it may be, and draws.

use super::values::{conflict, did_you_mean, float, word};
use super::{Pick, Select, Shape, ShardPlace, TargetPlan};
use crate::catalog::{Hits, Row};
use crate::draw::Draws;
use crate::fault::{Kind, Target};
use dunlin_runtime::config::tree::{Reader, Value};
use dunlin_runtime::config::{ClusterConfig, ConfigError, Problem};
use std::collections::BTreeSet;
use std::slice::from_ref;

/// Mailbox roles, then roles of nodes.
pub const ROLES: [&str; 9] =
    ["router", "scheduler", "shard", "placement", "agent", "gateway", "kv", "head", "worker"];

const FORMS: &str = "write one of { node = \"left\" }, { role = \"shard\", stage = 1 }, \
    { device = \"left/cpu\" }, { link = { from = \"a\", to = \"b\" } }, { shape = \"halves\" }, \
    { groups = [[\"a\"], [\"b\"]] }, { request = \"any\" }, \"all\"";

/// Reads `target`, and the `message` that may stand in it.
pub(super) fn read(
    table: &mut Reader<'_>,
    row: &Row,
    config: &ClusterConfig,
) -> Result<(TargetPlan, Option<String>), ConfigError> {
    let all = TargetPlan { select: Select::All, pick: Pick::All };
    let Some(node) = table.node("target") else {
        // Clients together are the natural target of a client fault.
        if row.hits == Hits::Client {
            return Ok((all, None));
        }
        return Err(table.missing("target", FORMS));
    };
    if matches!(&node.value, Value::String(text) if text == "all") {
        fits(table, &all, row, config)?;
        return Ok((all, None));
    }
    let mut of = Reader::of(table.source(), table.child("target"), node)?;
    let select = select(&mut of, config)?;
    let pick = pick(&mut of)?;
    let message = super::fault::message(&mut of)?;
    of.finish()?;
    let target = TargetPlan { select, pick };
    fits(table, &target, row, config)?;
    Ok((target, message))
}

fn select(of: &mut Reader<'_>, config: &ClusterConfig) -> Result<Select, ConfigError> {
    let forms = ["role", "device", "link", "groups", "shape", "request"];
    let has = |key: &str| of.entries().iter().any(|(name, _)| name == key);
    let found: Vec<&str> = forms.into_iter().filter(|form| has(form)).collect();
    if let [one, two, ..] = found.as_slice() {
        let reason = format!("`{one}` and `{two}` are two targets");
        return Err(conflict(of, two, reason, FORMS));
    }
    Ok(match found.first().copied() {
        Some("role") => role(of, config)?,
        Some("device") => device(of, config)?,
        Some("link") => {
            let Some(node) = of.node("link") else { return Err(of.missing("link", FORMS)) };
            let mut link = Reader::of(of.source(), of.child("link"), node)?;
            let (from, to) =
                (any_node(&mut link, "from", config)?, any_node(&mut link, "to", config)?);
            let both = link.boolean("both", false)?;
            if from.is_some() && from == to {
                return Err(link.bad("to", "a node has no link to itself", "name another node"));
            }
            link.finish()?;
            Select::Link { from, to, both }
        }
        Some("groups") => {
            let groups = groups(of, config)?;
            Select::Groups { groups, both: of.boolean("both", true)? }
        }
        Some("shape") => {
            let shapes = [
                ("one", Shape::One),
                ("halves", Shape::Halves),
                ("ring", Shape::Ring),
                ("bridge", Shape::Bridge),
            ];
            let shape = word(of, "shape", shapes)?.unwrap_or(Shape::One);
            Select::Shape { shape, both: of.boolean("both", true)? }
        }
        Some(_) => Select::Request(super::fault::request(of)?),
        None if has("node") => Select::Node(any_node(of, "node", config)?),
        None => return Err(conflict(of, "", "it does not say what is hit", FORMS)),
    })
}

fn role(of: &mut Reader<'_>, config: &ClusterConfig) -> Result<Select, ConfigError> {
    let role = word(of, "role", ROLES.map(|role| (role, role)))?.unwrap_or_default().to_string();
    let node = any_node(of, "node", config)?;
    let replica = super::fault::replica(of, config)?;
    let place =
        ShardPlace { stage: of.integer("stage", 0, 10_000)?, rank: of.integer("rank", 0, 1000)? };
    if place != ShardPlace::default() && role != "shard" {
        let mend = "write role = \"shard\", or leave stage and rank out";
        let key = if place.stage.is_some() { "stage" } else { "rank" };
        return Err(conflict(of, key, format!("a {role} has no {key}"), mend));
    }
    Ok(Select::Role { role, node, replica, place })
}

fn device(of: &mut Reader<'_>, config: &ClusterConfig) -> Result<Select, ConfigError> {
    let text = of.string("device")?.unwrap_or_default();
    let mend = "write \"NODE/DEVICE\", like \"left/cpu\"";
    let (node, device) = text.split_once('/').ok_or_else(|| of.bad("device", "no device", mend))?;
    let known = config.node(node).is_some_and(|node| node.devices.iter().any(|d| d == device));
    if !known {
        let all = config.nodes.iter().flat_map(|(name, node)| {
            node.devices.iter().map(move |device| format!("{name}/{device}"))
        });
        let all: Vec<String> = all.collect();
        let problem = Problem::NotFound { what: "device", value: text.to_string() };
        let mend = did_you_mean(text, all.iter().map(String::as_str));
        return Err(of.source().error(&of.child("device"), problem, mend));
    }
    Ok(Select::Device { node: node.to_string(), device: device.to_string() })
}

fn groups(of: &mut Reader<'_>, config: &ClusterConfig) -> Result<Vec<Vec<String>>, ConfigError> {
    let mend = "write two groups or more, like [[\"front\"], [\"left\", \"right\"]]";
    let mut groups: Vec<Vec<String>> = Vec::new();
    for (at, group) in of.list("groups")?.unwrap_or_default().iter().enumerate() {
        let Value::Array(names) = &group.value else {
            return Err(of.wrong_type(&format!("groups.{at}"), "a list of nodes", group, mend));
        };
        let mut members = Vec::new();
        for (index, name) in names.iter().enumerate() {
            let key = format!("groups.{at}.{index}");
            let Value::String(text) = &name.value else {
                return Err(of.wrong_type(&key, "a node's name", name, mend));
            };
            check_node(of, &key, text, config)?;
            if members.contains(text) || groups.iter().any(|group| group.contains(text)) {
                return Err(of.bad(&key, "in two places", "put each node into one group"));
            }
            members.push(text.clone());
        }
        groups.push(members);
    }
    if groups.len() < 2 || groups.iter().any(Vec::is_empty) {
        return Err(of.bad("groups", "fewer than two groups with nodes", mend));
    }
    Ok(groups)
}

fn pick(of: &mut Reader<'_>) -> Result<Pick, ConfigError> {
    let mend = "write \"one\", \"all\", { count = 2 } or { share = 0.5 }";
    let Some(node) = of.node("pick") else { return Ok(Pick::One) };
    match &node.value {
        Value::String(text) if text == "one" => return Ok(Pick::One),
        Value::String(text) if text == "all" => return Ok(Pick::All),
        Value::Table(_) => {}
        _ => return Err(of.bad("pick", "not a way to pick", mend)),
    }
    let mut table = Reader::of(of.source(), of.child("pick"), node)?;
    let pick = match (table.integer("count", 1, 100_000)?, float(&mut table, "share", 0.0, 1.0)?) {
        (Some(count), None) => Pick::Count(count),
        (None, Some(share)) => Pick::Share(share),
        _ => return Err(of.bad("pick", "not a way to pick", mend)),
    };
    table.finish()?;
    Ok(pick)
}

/// A node's name; `None` if the key is absent.
pub(super) fn node_name(
    of: &mut Reader<'_>,
    key: &'static str,
    config: &ClusterConfig,
) -> Result<Option<String>, ConfigError> {
    let Some(name) = of.string(key)? else { return Ok(None) };
    check_node(of, key, name, config)?;
    Ok(Some(name.to_string()))
}

/// As [`node_name`]; `any` is `None`, too, and `head` is the head's name.
fn any_node(
    of: &mut Reader<'_>,
    key: &'static str,
    config: &ClusterConfig,
) -> Result<Option<String>, ConfigError> {
    match of.string(key)? {
        Some("any") => Ok(None),
        Some("head") if config.node("head").is_none() => Ok(Some(config.cluster.head.to_string())),
        _ => node_name(of, key, config),
    }
}

fn check_node(
    of: &Reader<'_>,
    key: &str,
    name: &str,
    config: &ClusterConfig,
) -> Result<(), ConfigError> {
    if config.node(name).is_some() {
        return Ok(());
    }
    let known: Vec<&str> = config.nodes.keys().map(|name| name.as_str()).collect();
    let problem = Problem::NotFound { what: "node", value: name.to_string() };
    let mend = did_you_mean(name, known.iter().copied());
    Err(of.source().error(&of.child(key), problem, mend))
}

/// Refuses a target that the kind cannot hit, or that is nothing in this cluster.
fn fits(
    table: &Reader<'_>,
    target: &TargetPlan,
    row: &Row,
    config: &ClusterConfig,
) -> Result<(), ConfigError> {
    // Requests are checked against the workload later; one of them stands for all here.
    let mut draws = Draws::new(0, "check");
    let found = candidates(&target.select, row, config, 1, &mut draws);
    match found {
        Ok(found) if !found.is_empty() => Ok(()),
        Ok(_) => {
            let reason = "nothing in the cluster is that".to_string();
            let mend = "shards are known where the cluster file has [[replica]] sections; check \
                        role, stage, rank, replica and node";
            Err(conflict(table, "target", reason, mend))
        }
        Err(wanted) => {
            let reason = format!("{} hits {wanted}", row.kind.name());
            Err(conflict(table, "target", reason, hint(row.hits)))
        }
    }
}

fn hint(hits: Hits) -> &'static str {
    match hits {
        Hits::Node => "write { node = \"left\" }, or { role = \"worker\" }",
        Hits::Actor => "write { role = \"shard\", stage = 0 }, or another role of an actor",
        Hits::Shard => {
            "write { role = \"shard\", stage = 0 }, { device = \"left/cpu\" } or a request"
        }
        Hits::Link => {
            "write { link = { from = \"a\", to = \"b\" } }, { shape = \"halves\" } or a node"
        }
        Hits::Client => "write { request = 3 }, { request = \"any\" } or \"all\"",
    }
}

/// The concrete targets of one fault, drawn.
pub(super) fn resolve(
    target: &TargetPlan,
    row: &Row,
    config: &ClusterConfig,
    requests: u64,
    draws: &Draws,
) -> Vec<Target> {
    let mut own = draws.sub("shape");
    let found = candidates(&target.select, row, config, requests, &mut own).unwrap_or_default();
    let mut draws = draws.sub("pick");
    let count = match target.pick {
        Pick::One => 1,
        Pick::All => found.len(),
        Pick::Count(count) => usize::try_from(count).unwrap_or(usize::MAX),
        Pick::Share(share) => ((found.len() as f64 * share).round() as usize).max(1),
    };
    draws.some(&found, count)
}

/// Everything that the selection may be; `Err` says what the kind hits instead.
fn candidates(
    select: &Select,
    row: &Row,
    config: &ClusterConfig,
    requests: u64,
    draws: &mut Draws,
) -> Result<Vec<Target>, &'static str> {
    match row.hits {
        Hits::Node => nodes_of(select, config)
            .map(|nodes| nodes.into_iter().map(Target::Node).collect())
            .ok_or("node processes"),
        Hits::Actor => actors_of(select, config).ok_or("actors"),
        Hits::Shard => shards_of(select, row.kind, config, requests).ok_or("shards and requests"),
        Hits::Link => links_of(select, config, draws).ok_or("links"),
        Hits::Client => match select {
            Select::All => Ok(vec![Target::All]),
            Select::Request(Some(number)) => Ok(vec![Target::Request(*number)]),
            Select::Request(None) => Ok((0..requests).map(Target::Request).collect()),
            _ => Err("clients and their requests"),
        },
    }
}

/// A shard of the cluster file.
struct Shard {
    replica: String,
    stage: usize,
    rank: usize,
    node: String,
    device: String,
}

fn shards(config: &ClusterConfig) -> Vec<Shard> {
    let mut shards = Vec::new();
    for replica in &config.replicas {
        for (stage, group) in replica.stages.iter().enumerate() {
            for (rank, place) in group.iter().enumerate() {
                let (replica, node) = (replica.name.clone(), place.node.to_string());
                shards.push(Shard { replica, stage, rank, node, device: place.device.clone() });
            }
        }
    }
    shards
}

fn role_shards(
    config: &ClusterConfig,
    node: Option<&str>,
    replica: Option<&str>,
    place: ShardPlace,
) -> Vec<Shard> {
    let is = |wanted: Option<u64>, at: usize| wanted.is_none_or(|wanted| wanted == at as u64);
    let fits = |shard: &Shard| {
        node.is_none_or(|node| node == shard.node)
            && replica.is_none_or(|replica| replica == shard.replica)
            && is(place.stage, shard.stage)
            && is(place.rank, shard.rank)
    };
    shards(config).into_iter().filter(fits).collect()
}

/// Nodes on which a role is found, by name.
fn role_nodes(
    config: &ClusterConfig,
    role: &str,
    node: Option<&str>,
    replica: Option<&str>,
    place: ShardPlace,
) -> Vec<String> {
    let head = config.cluster.head.as_str();
    let names = config.nodes.keys().map(|name| name.to_string());
    let found: BTreeSet<String> = match role {
        "head" | "router" | "placement" => [head.to_string()].into(),
        "worker" => names
            .filter(|name| name != head)
            .filter(|name| config.node(name).is_some_and(|node| !node.devices.is_empty()))
            .collect(),
        "gateway" => {
            names.filter(|name| config.node(name).is_some_and(|n| n.http.is_some())).collect()
        }
        "agent" => names.collect(),
        // The scheduler and its KV book-keeping live with the first shard.
        "scheduler" | "kv" => {
            let first = ShardPlace { stage: Some(0), rank: Some(0) };
            role_shards(config, None, replica, first).into_iter().map(|shard| shard.node).collect()
        }
        _ => role_shards(config, None, replica, place).into_iter().map(|s| s.node).collect(),
    };
    found.into_iter().filter(|name| node.is_none_or(|node| node == name)).collect()
}

fn nodes_of(select: &Select, config: &ClusterConfig) -> Option<Vec<String>> {
    match select {
        Select::Node(Some(name)) => Some(vec![name.clone()]),
        Select::Node(None) | Select::All => {
            Some(config.nodes.keys().map(|name| name.to_string()).collect())
        }
        Select::Device { node, .. } => Some(vec![node.clone()]),
        Select::Role { role, node, replica, place } => {
            Some(role_nodes(config, role, node.as_deref(), replica.as_deref(), *place))
        }
        _ => None,
    }
}

fn to_target(shard: Shard) -> Target {
    Target::Shard { replica: shard.replica, stage: shard.stage, rank: shard.rank }
}

fn actors_of(select: &Select, config: &ClusterConfig) -> Option<Vec<Target>> {
    match select {
        Select::Role { role, .. } if role == "head" || role == "worker" => None,
        Select::Role { role, node, replica, place } if role == "shard" => {
            let found = role_shards(config, node.as_deref(), replica.as_deref(), *place);
            Some(found.into_iter().map(to_target).collect())
        }
        Select::Role { role, node, replica, place } => {
            let nodes = role_nodes(config, role, node.as_deref(), replica.as_deref(), *place);
            let actor = |node| {
                let (role, instance) = (role.clone(), replica.clone().unwrap_or_default());
                Target::Actor { node, role, instance }
            };
            Some(nodes.into_iter().map(actor).collect())
        }
        Select::Device { .. } => shards_of(select, Kind::ActorPanic, config, 0),
        _ => None,
    }
}

fn shards_of(
    select: &Select,
    kind: Kind,
    config: &ClusterConfig,
    requests: u64,
) -> Option<Vec<Target>> {
    let of_requests = matches!(
        kind,
        Kind::BitsKv | Kind::LogitsNan | Kind::KvStale | Kind::KvSwap | Kind::DeviceLaunchError
    );
    match select {
        Select::All => Some(vec![Target::All]),
        Select::Node(name) => {
            let place = ShardPlace::default();
            let found = role_shards(config, name.as_deref(), None, place);
            Some(found.into_iter().map(to_target).collect())
        }
        Select::Device { node, device } => {
            let found = shards(config).into_iter();
            Some(found.filter(|s| s.node == *node && s.device == *device).map(to_target).collect())
        }
        Select::Role { role, node, replica, place } if role == "shard" => {
            let found = role_shards(config, node.as_deref(), replica.as_deref(), *place);
            Some(found.into_iter().map(to_target).collect())
        }
        Select::Request(Some(number)) if of_requests => Some(vec![Target::Request(*number)]),
        Select::Request(None) if of_requests => Some((0..requests).map(Target::Request).collect()),
        _ => None,
    }
}

type Links = Vec<(String, String)>;

fn links_of(select: &Select, config: &ClusterConfig, draws: &mut Draws) -> Option<Vec<Target>> {
    let names: Vec<String> = config.nodes.keys().map(|name| name.to_string()).collect();
    let cut = |links: Links| vec![Target::Links(links)];
    Some(match select {
        Select::All => cut(between(&names, &names, false)),
        Select::Link { from, to, both } => {
            let ends = |end: &Option<String>| match end {
                Some(name) => vec![name.clone()],
                None => names.clone(),
            };
            let links = between(&ends(from), &ends(to), false).into_iter();
            let with_back = |(a, b): (String, String)| {
                let back = (b.clone(), a.clone());
                Target::Links(if *both { vec![(a, b), back] } else { vec![(a, b)] })
            };
            links.map(with_back).collect()
        }
        Select::Groups { groups, both } => {
            let mut links = Vec::new();
            for (at, one) in groups.iter().enumerate() {
                for other in &groups[at + 1..] {
                    links.extend(between(one, other, *both));
                }
            }
            cut(links)
        }
        Select::Shape { shape, both } => cut(shaped(*shape, *both, &names, draws)),
        Select::Node(_) | Select::Device { .. } | Select::Role { .. } => {
            let nodes = nodes_of(select, config)?;
            nodes.into_iter().map(|node| Target::Links(between(&[node], &names, true))).collect()
        }
        Select::Request(_) => return None,
    })
}

/// Directed links from each of `from` to each of `to`, and back if `both`.
fn between(from: &[String], to: &[String], both: bool) -> Links {
    let mut links = Vec::new();
    for a in from {
        for b in to.iter().filter(|b| *b != a) {
            links.push((a.clone(), b.clone()));
            if both {
                links.push((b.clone(), a.clone()));
            }
        }
    }
    links
}

fn shaped(shape: Shape, both: bool, names: &[String], draws: &mut Draws) -> Links {
    let Some(one) = draws.pick(names).cloned() else { return Vec::new() };
    let others: Vec<String> = names.iter().filter(|name| **name != one).cloned().collect();
    match shape {
        Shape::One => between(&[one], &others, both),
        Shape::Halves => halves(names, both, draws),
        // The one that is left out of both halves sees them both.
        Shape::Bridge => halves(&others, both, draws),
        Shape::Ring => {
            let count = names.len();
            let near = |a: usize, b: usize| (a + 1) % count == b || (b + 1) % count == a;
            let mut links = Vec::new();
            for (i, a) in names.iter().enumerate() {
                for (j, b) in names.iter().enumerate().skip(i + 1) {
                    if !near(i, j) {
                        links.extend(between(from_ref(a), from_ref(b), both));
                    }
                }
            }
            links
        }
    }
}

fn halves(names: &[String], both: bool, draws: &mut Draws) -> Links {
    let left = draws.some(names, names.len() / 2);
    let right: Vec<String> = names.iter().filter(|name| !left.contains(name)).cloned().collect();
    between(&left, &right, both)
}

/// Nodes that a concrete target takes with it when it fails, as the cluster file places shards.
pub(super) fn nodes_hit(target: &Target, config: &ClusterConfig) -> BTreeSet<String> {
    let head = config.cluster.head.as_str();
    match target {
        Target::Node(name) => [name.clone()].into(),
        Target::Actor { node, .. } => [node.clone()].into(),
        Target::Shard { replica, stage, rank } => shards(config)
            .into_iter()
            .filter(|s| s.replica == *replica && s.stage == *stage && s.rank == *rank)
            .map(|shard| shard.node)
            .collect(),
        // The head is the quorum: of a cut link, the other end is out.
        Target::Links(links) => links
            .iter()
            .map(|(from, to)| if from == head { to.clone() } else { from.clone() })
            .collect(),
        Target::Request(_) => BTreeSet::new(),
        Target::All => config.nodes.keys().map(|name| name.to_string()).collect(),
    }
}
