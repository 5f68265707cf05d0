//! From the tree to the typed sections: types, ranges, defaults, unknown keys.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::PathBuf;

use super::error::{ConfigError, Problem, nearest};
use super::size::parse_size;
use super::tree::{Node, Reader, Source, Value};
use super::{
    ApiKey, ClusterConfig, ClusterSection, DEFAULT_MODEL, EngineSection, HashEngine, KvSection,
    KvType, LimitsSection, MembershipSection, NodeConfig, Precision, ReplicaConfig, RestartSection,
    SchedulerSection, Serves, ShardDevice, WeightsSection,
};
use crate::address::NodeName;

/// A day: no time-out in this file may be longer.
const DAY_MS: u64 = 86_400_000;

pub(super) fn config(source: Source) -> Result<ClusterConfig, ConfigError> {
    let mut root = Reader::root(&source);
    let nodes = nodes(&mut root)?;
    let cluster = cluster(root.section("cluster")?, &nodes)?;
    let replicas = replicas(&mut root)?;
    let scheduler = scheduler(root.section("scheduler")?)?;
    let kv = kv(root.section("kv")?)?;
    let membership = membership(root.section("membership")?)?;
    let limits = limits(root.section("limits")?)?;
    let restart = restart(root.section("restart")?)?;
    let weights = weights(root.section("weights")?)?;
    let engine = engine(root.section("engine")?)?;
    root.finish()?;
    Ok(ClusterConfig {
        cluster,
        nodes,
        replicas,
        scheduler,
        kv,
        membership,
        limits,
        restart,
        weights,
        engine,
        source,
    })
}

fn cluster(
    mut table: Reader<'_>,
    nodes: &BTreeMap<NodeName, NodeConfig>,
) -> Result<ClusterSection, ConfigError> {
    let name = table.string("name")?.unwrap_or("dunlin").to_string();
    if name.is_empty() || name.len() > 64 || name.chars().any(char::is_control) {
        return Err(table.bad("name", "not a name", "use 1 to 64 characters of one line"));
    }
    let model = table.string("model")?.unwrap_or(DEFAULT_MODEL).to_string();
    if model.trim().is_empty() {
        return Err(table.bad("model", "no model", "name an alias, a file, a folder or a hub id"));
    }
    let head = match table.string("head")? {
        Some(text) => {
            NodeName::new(text).map_err(|e| table.bad("head", e.to_string(), "name a node"))?
        }
        None => match nodes.keys().next() {
            Some(only) if nodes.len() == 1 => only.clone(),
            _ => return Err(table.missing("head", "add head = \"NAME\", the node that decides")),
        },
    };
    let precision = match table.string("precision")?.unwrap_or("fast") {
        "fast" => Precision::Fast,
        "exact" => Precision::Exact,
        word => return Err(unknown_word(&table, "precision", word, &["fast", "exact"])),
    };
    let state_dir = PathBuf::from(table.string("state_dir")?.unwrap_or(".dunlin"));
    let local_lanes = table.boolean("local_lanes", true)?;
    let api_keys = api_keys(&mut table)?;
    table.finish()?;
    Ok(ClusterSection { name, model, head, precision, state_dir, local_lanes, api_keys })
}

fn api_keys(table: &mut Reader<'_>) -> Result<Vec<ApiKey>, ConfigError> {
    let mut keys: Vec<ApiKey> = Vec::new();
    for (index, item) in table.list("api_keys")?.unwrap_or_default().iter().enumerate() {
        let path = table.child(&format!("api_keys.{index}"));
        let entry = match &item.value {
            Value::String(key) => ApiKey { tenant: format!("key-{}", index + 1), key: key.clone() },
            Value::Table(_) => {
                let mut entry = Reader::of(table.source(), path.clone(), item)?;
                let key = entry.string("key")?.map(str::to_string);
                let tenant = entry.string("tenant")?.map(str::to_string);
                let key = key.ok_or_else(|| entry.missing("key", "add key = \"SECRET\""))?;
                let tenant =
                    tenant.ok_or_else(|| entry.missing("tenant", "add tenant = \"NAME\""))?;
                entry.finish()?;
                ApiKey { tenant, key }
            }
            _ => {
                let mend = "write \"SECRET\" or { tenant = \"NAME\", key = \"SECRET\" }";
                return Err(table.wrong_type_at(&path, "a string or a table", item, mend));
            }
        };
        // The messages below keep the secret to themselves.
        let printable = entry.key.chars().all(|c| c.is_ascii_graphic());
        if entry.key.is_empty() || !printable {
            let reason = "an API key must be printable ASCII without spaces".to_string();
            let problem = Problem::Conflict { reason };
            return Err(table.source().error(&path, problem, "choose another key"));
        }
        if keys.iter().any(|other| other.key == entry.key) {
            let reason = "the same API key is there twice".to_string();
            let problem = Problem::Conflict { reason };
            return Err(table.source().error(&path, problem, "keep one of the two"));
        }
        keys.push(entry);
    }
    Ok(keys)
}

fn nodes(root: &mut Reader<'_>) -> Result<BTreeMap<NodeName, NodeConfig>, ConfigError> {
    let section = root.section("node")?;
    let mut nodes = BTreeMap::new();
    for (key, node) in section.entries() {
        let path = section.child(key);
        let name = NodeName::new(key).map_err(|e| {
            let problem = Problem::Conflict { reason: e.to_string() };
            root.source().error(&path, problem, "rename the node")
        })?;
        nodes.insert(name, node_config(Reader::of(root.source(), path, node)?)?);
    }
    if nodes.is_empty() {
        let mend = "add a section like [node.front] with address = \"127.0.0.1:7400\"";
        return Err(root.missing("node", mend));
    }
    Ok(nodes)
}

fn node_config(mut table: Reader<'_>) -> Result<NodeConfig, ConfigError> {
    let address = socket(&mut table, "address", 1)?;
    let address = address.ok_or_else(|| {
        table.missing("address", "add address = \"IP:PORT\" (UDP, for its peers)")
    })?;
    let http = socket(&mut table, "http", 0)?;
    let devices = devices(&mut table)?;
    let threads = table.integer("threads", 1, 4096)?;
    let threads = threads.and_then(|threads| usize::try_from(threads).ok());
    let memory = size(&mut table, "memory", 1 << 20)?;
    table.finish()?;
    Ok(NodeConfig { address, http, devices, threads, memory })
}

fn socket(
    table: &mut Reader<'_>,
    key: &'static str,
    least_port: u16,
) -> Result<Option<SocketAddr>, ConfigError> {
    let Some(text) = table.string(key)? else { return Ok(None) };
    let mend = "write IP:PORT, like 192.168.1.5:7400 or [fd00::5]:7400; names are not resolved";
    let address: SocketAddr = text.parse().map_err(|_| table.bad(key, "not an address", mend))?;
    if address.port() < least_port {
        return Err(table.bad(key, "peers cannot dial port 0", "write the port to listen on"));
    }
    if key == "address" && address.ip().is_unspecified() {
        let mend = "write the IP address by which the other nodes reach this one";
        return Err(table.bad(key, "peers cannot dial this address", mend));
    }
    Ok(Some(address))
}

fn devices(table: &mut Reader<'_>) -> Result<Vec<String>, ConfigError> {
    let mut devices: Vec<String> = Vec::new();
    for (index, item) in table.list("devices")?.unwrap_or_default().iter().enumerate() {
        let key = format!("devices.{index}");
        let Value::String(device) = &item.value else {
            return Err(table.wrong_type(&key, "a string", item, "write \"cpu\" or \"cuda:0\""));
        };
        if !is_device(device) {
            let mend = "use cpu, cpu:N, cuda:N, wgpu:N, wgpu:vulkan:N or wgpu:NAME";
            return Err(table.bad(&key, "unknown device", mend));
        }
        if devices.contains(device) {
            return Err(table.bad(&key, "listed twice", "list each device once"));
        }
        devices.push(device.clone());
    }
    Ok(devices)
}

fn is_device(text: &str) -> bool {
    let number = |n: &str| n.bytes().all(|b| b.is_ascii_digit()) && n.parse::<u8>().is_ok();
    match text.split_once(':') {
        None => text == "cpu",
        Some(("cpu" | "cuda", n)) => number(n),
        Some(("wgpu", which)) => match which.split_once(':') {
            None if which.bytes().all(|b| b.is_ascii_digit()) => number(which),
            // Part of an adapter's name. Stages are written NODE/DEVICE.
            None => !which.contains('/'),
            Some(("vulkan" | "metal" | "dx12", n)) => number(n),
            Some(_) => false,
        },
        Some(_) => false,
    }
}

fn replicas(root: &mut Reader<'_>) -> Result<Vec<ReplicaConfig>, ConfigError> {
    let Some(node) = root.node("replica") else { return Ok(Vec::new()) };
    let Value::Array(items) = &node.value else {
        let mend = "write it with two brackets: [[replica]]";
        return Err(root.wrong_type("replica", "a list of tables", node, mend));
    };
    let mut replicas = Vec::new();
    for (index, item) in items.iter().enumerate() {
        let table = Reader::of(root.source(), format!("replica.{index}"), item)?;
        replicas.push(replica(table, index)?);
    }
    Ok(replicas)
}

fn replica(mut table: Reader<'_>, index: usize) -> Result<ReplicaConfig, ConfigError> {
    let name = table.string("name")?.map_or_else(|| format!("r{index}"), str::to_string);
    if NodeName::new(&name).is_err() {
        return Err(table.bad("name", "not a name", "use 1 to 63 of a-z, 0-9 and '-'"));
    }
    let serves = match table.string("serves")?.unwrap_or("all") {
        "all" => Serves::All,
        "prefill" => Serves::Prefill,
        "decode" => Serves::Decode,
        word => return Err(unknown_word(&table, "serves", word, &["all", "prefill", "decode"])),
    };
    let example = "add stages = [\"NODE/DEVICE\", ...], one entry for each pipeline stage";
    let stages = table.list("stages")?.ok_or_else(|| table.missing("stages", example))?;
    if stages.is_empty() {
        return Err(table.bad("stages", "a replica without stages", example));
    }
    let stages: Result<_, ConfigError> =
        stages.iter().enumerate().map(|(at, stage)| group(&table, at, stage)).collect();
    let stages: Vec<Vec<ShardDevice>> = stages?;
    let layers = match table.list("layers")? {
        None => None,
        Some(items) => {
            let read = |(at, item): (usize, &Node)| {
                let path = table.child(&format!("layers.{at}"));
                let count = table.integer_at(&path, item, 1, 10_000)?;
                Ok::<_, ConfigError>(usize::try_from(count).unwrap_or(usize::MAX))
            };
            Some(items.iter().enumerate().map(read).collect::<Result<Vec<_>, ConfigError>>()?)
        }
    };
    table.finish()?;
    Ok(ReplicaConfig { name, serves, stages, layers })
}

/// One stage: `"node/device"`, or a list of them.
fn group(table: &Reader<'_>, at: usize, stage: &Node) -> Result<Vec<ShardDevice>, ConfigError> {
    let key = format!("stages.{at}");
    match &stage.value {
        Value::Array(ranks) if ranks.is_empty() => {
            Err(table.bad(&key, "a stage without devices", "list one \"NODE/DEVICE\" or more"))
        }
        Value::Array(ranks) => {
            let one = |(rank, item)| shard_device(table, &format!("{key}.{rank}"), item);
            ranks.iter().enumerate().map(one).collect()
        }
        _ => Ok(vec![shard_device(table, &key, stage)?]),
    }
}

fn shard_device(table: &Reader<'_>, key: &str, item: &Node) -> Result<ShardDevice, ConfigError> {
    let mend = "write \"NODE/DEVICE\", like \"left/cpu\"";
    let Value::String(text) = &item.value else {
        return Err(table.wrong_type(key, "a string or a list of strings", item, mend));
    };
    let parts = text.split_once('/').filter(|(_, device)| !device.is_empty());
    let (node, device) = parts.ok_or_else(|| table.bad(key, "not NODE/DEVICE", mend))?;
    let node = NodeName::new(node).map_err(|e| table.bad(key, e.to_string(), mend))?;
    Ok(ShardDevice { node, device: device.to_string() })
}

fn scheduler(mut table: Reader<'_>) -> Result<SchedulerSection, ConfigError> {
    let step_tokens = table.u32("step_tokens", 512, 1, 1 << 20)?;
    let section = SchedulerSection {
        step_tokens,
        chunk_tokens: table.u32("chunk_tokens", step_tokens, 1, 1 << 20)?,
        max_running: table.u32("max_running", 64, 1, 65_536)?,
        max_waiting: table.u32("max_waiting", 256, 0, 1 << 20)?,
        steps_in_flight: table
            .integer("steps_in_flight", 1, 64)?
            .and_then(|steps| u32::try_from(steps).ok()),
        overlap: table.boolean("overlap", true)?,
        step_stretch: table.u32("step_stretch", 2, 0, 1000)?,
        static_batches: table.boolean("static_batches", false)?,
        step_deadline_ms: table.integer("step_deadline_ms", 100, DAY_MS)?.unwrap_or(30_000),
    };
    table.finish()?;
    Ok(section)
}

fn kv(mut table: Reader<'_>) -> Result<KvSection, ConfigError> {
    let section = KvSection {
        block_tokens: table.u32("block_tokens", 16, 1, 1024)?,
        memory: size(&mut table, "memory", 1)?.unwrap_or(1 << 30),
        prefix_cache: table.boolean("prefix_cache", true)?,
        dtype: kv_type(&mut table)?,
    };
    table.finish()?;
    Ok(section)
}

fn kv_type(table: &mut Reader<'_>) -> Result<Option<KvType>, ConfigError> {
    Ok(match table.string("dtype")? {
        None => None,
        Some("f32") => Some(KvType::F32),
        Some("f16") => Some(KvType::F16),
        Some("int8") => Some(KvType::Int8),
        Some(word) => return Err(unknown_word(table, "dtype", word, &["f16", "f32", "int8"])),
    })
}

fn membership(mut table: Reader<'_>) -> Result<MembershipSection, ConfigError> {
    let section = MembershipSection {
        heartbeat_ms: table.integer("heartbeat_ms", 10, DAY_MS)?.unwrap_or(100),
        lease_ms: table.integer("lease_ms", 30, DAY_MS)?.unwrap_or(1000),
    };
    table.finish()?;
    Ok(section)
}

fn limits(mut table: Reader<'_>) -> Result<LimitsSection, ConfigError> {
    let section = LimitsSection {
        request_deadline_ms: table.integer("request_deadline_ms", 100, DAY_MS)?.unwrap_or(600_000),
        max_body_bytes: size(&mut table, "max_body_bytes", 1024)?.unwrap_or(4 << 20),
        max_open_requests: table.u32("max_open_requests", 1024, 1, 1 << 20)?,
        drain_ms: table.integer("drain_ms", 0, DAY_MS)?.unwrap_or(30_000),
    };
    table.finish()?;
    Ok(section)
}

fn weights(mut table: Reader<'_>) -> Result<WeightsSection, ConfigError> {
    let section = WeightsSection { scrub_ms: table.integer("scrub_ms", 0, DAY_MS)?.unwrap_or(0) };
    table.finish()?;
    Ok(section)
}

fn restart(mut table: Reader<'_>) -> Result<RestartSection, ConfigError> {
    let section = RestartSection {
        max: table.u32("max", 10, 0, 1000)?,
        within_ms: table.integer("within_ms", 100, DAY_MS)?.unwrap_or(60_000),
        replan_after_ms: table.integer("replan_after_ms", 0, DAY_MS)?.unwrap_or(5_000),
        return_after_ms: table.integer("return_after_ms", 0, DAY_MS)?.unwrap_or(10_000),
    };
    table.finish()?;
    Ok(section)
}

fn engine(mut table: Reader<'_>) -> Result<EngineSection, ConfigError> {
    let engine = match table.string("kind")?.unwrap_or("transformer") {
        "transformer" => {
            // Known, so that the message says what is wrong with them here.
            for key in ["vocab", "layers", "context", "step_micros", "token_micros"] {
                if table.node(key).is_some() {
                    let mend = "add kind = \"hash\", or leave the key out";
                    return Err(table.bad(key, "an option of the hash engine alone", mend));
                }
            }
            EngineSection::Transformer
        }
        "hash" => EngineSection::Hash(HashEngine {
            vocab: table.u32("vocab", 512, 2, 1 << 20)?,
            layers: table.u32("layers", 4, 1, 1024)?,
            context: table.u32("context", 4096, 16, 1 << 24)?,
            step_micros: table.integer("step_micros", 0, 10_000_000)?.unwrap_or(0),
            token_micros: table.integer("token_micros", 0, 10_000_000)?.unwrap_or(0),
        }),
        word => return Err(unknown_word(&table, "kind", word, &["transformer", "hash"])),
    };
    table.finish()?;
    Ok(engine)
}

/// A size in bytes: an integer, or a string with a unit.
fn size(table: &mut Reader<'_>, key: &'static str, least: u64) -> Result<Option<u64>, ConfigError> {
    let mend = "write a size like \"512MiB\", \"1.5GiB\" or a number of bytes";
    let Some(node) = table.node(key) else { return Ok(None) };
    let bytes = match &node.value {
        Value::Integer(number) => u64::try_from(*number).ok().filter(|bytes| *bytes <= 1 << 60),
        Value::String(text) => parse_size(text),
        _ => return Err(table.wrong_type(key, "a size", node, mend)),
    };
    let bytes = bytes.ok_or_else(|| table.bad(key, "not a size", mend))?;
    if bytes < least {
        return Err(table.bad(key, format!("less than {least} bytes"), mend));
    }
    Ok(Some(bytes))
}

fn unknown_word(table: &Reader<'_>, key: &str, word: &str, known: &[&str]) -> ConfigError {
    let mend = match nearest(word, known.iter().copied()) {
        Some(near) => format!("did you mean \"{near}\"?"),
        None => format!("use one of: {}", known.join(", ")),
    };
    table.bad(key, "not a known word", mend)
}
