//! `cluster.toml`: what a cluster is made of. One file, the same copy on every machine.
//!
//! Reading is strict: an unknown key, a wrong type or a value that contradicts another is a
//! [`ConfigError`] that names file, line, key, value and the mend. Nothing is guessed and nothing is
//! ignored. What only the model can tell (layer counts, memory) is checked later, by
//! [`ClusterConfig::check_layers`] and through [`ClusterConfig::complain`].

mod check;
mod error;
mod read;
mod size;
#[cfg(test)]
mod tests;
pub mod tree;

use std::collections::BTreeMap;
use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::time::Duration;

pub use self::error::{ConfigError, ErrorDetails, Place, Problem, nearest};
pub use self::size::{format_size, parse_size};
use self::tree::Source;
use crate::address::NodeName;

/// The alias of the model that is served when none is named.
pub const DEFAULT_MODEL: &str = "smollm2-135m-instruct";

/// A whole `cluster.toml`, checked. Fields that are not in the file have their documented default.
#[derive(Debug, Clone, PartialEq)]
pub struct ClusterConfig {
    pub cluster: ClusterSection,
    /// `[node.NAME]`, by name.
    pub nodes: BTreeMap<NodeName, NodeConfig>,
    /// `[[replica]]`, in file order. Empty: the planner makes one from the devices.
    pub replicas: Vec<ReplicaConfig>,
    pub scheduler: SchedulerSection,
    pub kv: KvSection,
    pub membership: MembershipSection,
    pub limits: LimitsSection,
    pub restart: RestartSection,
    pub weights: WeightsSection,
    pub engine: EngineSection,
    source: Source,
}

/// `[cluster]`
#[derive(Debug, Clone, PartialEq)]
pub struct ClusterSection {
    /// For people, and in certificates. Default `dunlin`.
    pub name: String,
    /// Alias, file, folder or hub id. Default [`DEFAULT_MODEL`].
    pub model: String,
    /// The node with router, membership and placement. Default: the only node, if there is one only.
    pub head: NodeName,
    /// Default `fast`.
    pub precision: Precision,
    /// Certificates, logs, incarnations; relative to the file's folder. Default `.dunlin`.
    pub state_dir: PathBuf,
    /// Between processes of one machine messages and activations take Unix sockets. `false`: QUIC
    /// there as well. Default true.
    pub local_lanes: bool,
    /// Keys of the HTTP API; empty (the default) lets everybody in.
    pub api_keys: Vec<ApiKey>,
}

/// A key of the HTTP API: `"secret"` (tenant `key-1`, `key-2`, by position) or
/// `{ tenant = "lab", key = "secret" }`.
#[derive(Clone, PartialEq, Eq)]
pub struct ApiKey {
    /// Unit of cache isolation and fairness.
    pub tenant: String,
    pub key: String,
}

impl fmt::Debug for ApiKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ApiKey {{ tenant: {:?}, key: .. }}", self.tenant)
    }
}

/// How weights and activations are multiplied.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Precision {
    /// Integer dot products on the file's own quantised blocks.
    Fast,
    /// Dequantised weights and float32 activations: slow, the measure of the other.
    Exact,
}

/// `[node.NAME]`: one process.
#[derive(Debug, Clone, PartialEq)]
pub struct NodeConfig {
    /// Where it listens for its peers and where they dial it (UDP). Required.
    pub address: SocketAddr,
    /// Where its gateway listens (TCP); no gateway if absent. Port 0 takes any free port.
    pub http: Option<SocketAddr>,
    /// `cpu` or `cpu:N` (a share of the cores of its own), `cuda:N`, `wgpu:N`,
    /// `wgpu:vulkan:N` or `wgpu:` and a part of an adapter's name. Default none.
    pub devices: Vec<String>,
    /// Compute threads. Default: see [`ClusterConfig::threads_of`].
    pub threads: Option<usize>,
    /// Most bytes for weights and KV together. Default: what the devices have.
    pub memory: Option<u64>,
}

/// `[[replica]]`: one copy of the model.
#[derive(Debug, Clone, PartialEq)]
pub struct ReplicaConfig {
    /// Default `r0`, `r1`, ... by position.
    pub name: String,
    /// Default `all`.
    pub serves: Serves,
    /// Pipeline stages in order, each a tensor-parallel group of one or more ranks. Required.
    pub stages: Vec<Vec<ShardDevice>>,
    /// Layers of each stage. Default: by measured speed and memory.
    pub layers: Option<Vec<usize>>,
}

/// One shard's device: `"left/cpu"`.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct ShardDevice {
    pub node: NodeName,
    pub device: String,
}

impl fmt::Display for ShardDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.node, self.device)
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Serves {
    All,
    Prefill,
    Decode,
}

/// `[scheduler]`
#[derive(Debug, Clone, PartialEq)]
pub struct SchedulerSection {
    /// Most tokens in one step's batch. Default 512.
    pub step_tokens: u32,
    /// Most prompt tokens of one sequence in one step. Default: `step_tokens`.
    pub chunk_tokens: u32,
    /// Most sequences that run at once in a replica. Default 64.
    pub max_running: u32,
    /// Most requests that wait in a replica before new ones are refused. Default 256.
    pub max_waiting: u32,
    /// Steps in flight at once. Default: as many as the replica has stages.
    pub steps_in_flight: Option<u32>,
    /// Plan the next step while this one runs, where one shard is the whole replica. Default true.
    pub overlap: bool,
    /// A step with prompt chunks takes at most so many times as long as one without. 0: no such
    /// bound. Default 2.
    pub step_stretch: u32,
    /// Take new requests in only when all of the batch before have ended: for comparison. Default
    /// false.
    pub static_batches: bool,
    /// A step that is not done by then breaks its replica, which is then loaded anew. Default 30000.
    pub step_deadline_ms: u64,
}

/// `[kv]`
#[derive(Debug, Clone, PartialEq)]
pub struct KvSection {
    /// Tokens of one block. Default 16.
    pub block_tokens: u32,
    /// KV cache of each shard, in bytes. Default 1 GiB.
    pub memory: u64,
    /// Keep blocks of finished requests for prompts that begin alike. Default true.
    pub prefix_cache: bool,
    /// What blocks hold. Default: what suits precision and devices.
    pub dtype: Option<KvType>,
}

/// How keys and values are kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KvType {
    F32,
    F16,
    Int8,
}

/// `[weights]`
#[derive(Debug, Clone, PartialEq)]
pub struct WeightsSection {
    /// Weights in memory are summed up again, at the first step after so long, and compared with
    /// what was loaded. 0: only when a shard restarts or numbers are not finite. Default 0.
    pub scrub_ms: u64,
}

/// `[membership]`
#[derive(Debug, Clone, PartialEq)]
pub struct MembershipSection {
    /// Default 100.
    pub heartbeat_ms: u64,
    /// Silence for this long means dead. At least three heartbeats. Default 1000.
    pub lease_ms: u64,
}

/// `[limits]`
#[derive(Debug, Clone, PartialEq)]
pub struct LimitsSection {
    /// A request ends by then, one way or another. Default 600000.
    pub request_deadline_ms: u64,
    /// Largest HTTP request body. Default 4 MiB.
    pub max_body_bytes: u64,
    /// Most open requests in the whole cluster. Default 1024.
    pub max_open_requests: u32,
    /// How long a drain waits for open requests before it ends them. Default 30000.
    pub drain_ms: u64,
}

/// `[restart]`: intensity of every supervisor, of actors and of node processes.
#[derive(Debug, Clone, PartialEq)]
pub struct RestartSection {
    /// At most this many restarts ... Default 10.
    pub max: u32,
    /// ... within this time; one more escalates. Default 60000.
    pub within_ms: u64,
    /// A replica whose node is away for so long is planned onto the others, where they can hold its
    /// layers. Default 5000.
    pub replan_after_ms: u64,
    /// It returns once that node has been back for so long. Default 10000.
    pub return_after_ms: u64,
}

impl RestartSection {
    pub fn intensity(&self) -> crate::supervise::Intensity {
        crate::supervise::Intensity { max: self.max, within: Duration::from_millis(self.within_ms) }
    }
}

/// `[engine]`
#[derive(Debug, Clone, PartialEq)]
pub enum EngineSection {
    /// `kind = "transformer"`: the model. The default.
    Transformer,
    /// `kind = "hash"`: a stand-in whose tokens are hashes of everything before them, for tests of
    /// the machinery under load.
    Hash(HashEngine),
}

/// Options of `kind = "hash"`.
#[derive(Debug, Clone, PartialEq)]
pub struct HashEngine {
    /// Default 512.
    pub vocab: u32,
    /// Default 4.
    pub layers: u32,
    /// Context length in tokens. Default 4096.
    pub context: u32,
    /// What a step costs by itself, in microseconds. Default 0.
    pub step_micros: u64,
    /// What each token of a step costs on top. Default 0.
    pub token_micros: u64,
}

impl ClusterConfig {
    /// Reads and checks a whole file. `file` is its name in errors.
    pub fn parse(text: &str, file: &str) -> Result<ClusterConfig, ConfigError> {
        Self::from_source(Source::parse(text, file)?)
    }

    pub fn load(path: &Path) -> Result<ClusterConfig, ConfigError> {
        let file = path.display().to_string();
        match std::fs::read_to_string(path) {
            Ok(text) => Self::parse(&text, &file),
            Err(e) => Err(ConfigError::unreadable(&file, &e)),
        }
    }

    /// Sets one value over the file's, as `--set scheduler.step_tokens=64` does. A replica is named
    /// by its name or number (`replica.r0.layers`). What is not TOML counts as a string. On an error
    /// nothing changes.
    pub fn set(&mut self, key: &str, value: &str) -> Result<(), ConfigError> {
        let mut source = self.source.clone();
        source.set(key, value)?;
        *self = Self::from_source(source)?;
        Ok(())
    }

    /// Every [`ClusterConfig::set`] so far, so that a child process can be given the same.
    pub fn overrides(&self) -> &[(String, String)] {
        &self.source.overrides
    }

    /// The file's name, as given.
    pub fn file(&self) -> &str {
        &self.source.file
    }

    pub fn node(&self, name: &str) -> Option<&NodeConfig> {
        self.nodes.iter().find(|(node, _)| node.as_str() == name).map(|(_, node)| node)
    }

    /// The nodes with a gateway, the head first if it has one, then by name.
    pub fn gateways(&self) -> Vec<(&NodeName, SocketAddr)> {
        let with_http = self.nodes.iter().filter_map(|(name, node)| Some((name, node.http?)));
        let mut gateways: Vec<_> = with_http.collect();
        gateways.sort_by_key(|(name, _)| **name != self.cluster.head);
        gateways
    }

    /// [`ClusterSection::state_dir`], relative to the file's folder if it is relative.
    pub fn state_dir(&self) -> PathBuf {
        let folder = Path::new(&self.source.file).parent().unwrap_or(Path::new(""));
        folder.join(&self.cluster.state_dir)
    }

    /// The nodes whose address `is_local` accepts, by name.
    pub fn nodes_where(&self, is_local: impl Fn(IpAddr) -> bool) -> Vec<NodeName> {
        let here = self.nodes.iter().filter(|(_, node)| is_local(node.address.ip()));
        here.map(|(name, _)| name.clone()).collect()
    }

    /// Compute threads for the node: its own setting, else its share of the machine's `cores`, which
    /// all CPU devices at the same IP address divide evenly. At least 1.
    pub fn threads_of(&self, node: &NodeName, cores: usize) -> usize {
        let Some(config) = self.nodes.get(node) else { return 1 };
        if let Some(threads) = config.threads {
            return threads;
        }
        let cpus = |node: &NodeConfig| {
            node.devices.iter().filter(|device| device.starts_with("cpu")).count()
        };
        let neighbours = self.nodes.values().filter(|n| n.address.ip() == config.address.ip());
        let all: usize = neighbours.map(cpus).sum();
        (cores * cpus(config) / all.max(1)).max(1)
    }

    /// Do the replica's stages cover a model of `model_layers` layers?
    pub fn check_layers(
        &self,
        replica: &ReplicaConfig,
        model_layers: usize,
    ) -> Result<(), ConfigError> {
        check::layers(&self.source, self.replicas.as_slice(), replica, model_layers)
    }

    /// An error about a value of this file that only shows when it is used: a port that is taken, a
    /// replica that does not fit, a peer that does not answer. `key` is dotted; replicas by name or
    /// number.
    pub fn complain(
        &self,
        key: &str,
        reason: impl Into<String>,
        mend: impl Into<String>,
    ) -> ConfigError {
        let value = self.source.shown(key).unwrap_or_else(|| "(default)".to_string());
        let problem = Problem::BadValue { value, reason: reason.into() };
        self.source.error(key, problem, mend)
    }

    fn from_source(source: Source) -> Result<ClusterConfig, ConfigError> {
        let config = read::config(source)?;
        check::all(&config)?;
        Ok(config)
    }
}
