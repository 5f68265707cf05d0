//! Puts a node together: configuration, certificates, transport, model and engines into a
//! [`Host`]. What each part does is elsewhere; what goes where is here.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result};
use dunlin_actors::engines::{Compute, Engines};
use dunlin_actors::gateway::{self, ByteModel, TextModel};
use dunlin_actors::host::{Host, HostOptions, HostParts};
use dunlin_actors::kv::KEY_SCHEMA;
use dunlin_actors::placement::core::{Intensity, Replan};
use dunlin_actors::placement::planner::{PlanLimits, ReplicaWant};
use dunlin_actors::router::RouterConfig;
use dunlin_actors::scheduler::SchedulerConfig;
use dunlin_actors::telemetry::ACTOR_METRICS;
use dunlin_faults::process::inside::Inside;
use dunlin_model::hash_engine::HashSpec;
use dunlin_model::loader::ModelFiles;
use dunlin_runtime::certs::NodeIdentity;
use dunlin_runtime::config::{ClusterConfig, EngineSection, HashEngine, NodeConfig, Precision};
use dunlin_runtime::telemetry::{RUNTIME_METRICS, init_metrics};
use dunlin_runtime::transport::quic::{QuicOptions, QuicTransport};
use dunlin_runtime::{Incarnation, Node, NodeName, NodeOptions, StartError, Timing};

use crate::engines::{self, HashEngines, ModelEngines, NodeDevices};
use crate::models;
use crate::text::ModelText;

/// How long a replica rests after it has failed too often.
const REPLICA_REST: Duration = Duration::from_secs(5);

/// Starts everything that the node `name` hosts.
pub async fn start(
    config: &ClusterConfig,
    name: &NodeName,
    identity: NodeIdentity,
    incarnation: u64,
    join_deadline: Duration,
    inside: Option<&Inside>,
) -> Result<Host> {
    let own = config.nodes.get(name).context("a node of the configuration")?.clone();
    let metrics = init_metrics(&[RUNTIME_METRICS, ACTOR_METRICS]);
    let (engines, text) = computing(config, name, &own).await?;
    for replica in &config.replicas {
        config.check_layers(replica, engines.shape().layers())?;
    }
    let node = node(config, name, &own, identity, Incarnation(incarnation), inside).await?;
    let options = host_options(config, &own, join_deadline);
    let metrics = Arc::new(move || metrics.render());
    let parts = HostParts { node, engines, compute: Compute::Threads, text, metrics };
    Ok(Host::start(options, parts).await?)
}

type Computing = (Arc<dyn Engines>, Option<Arc<dyn TextModel>>);

/// Engines, and the text side where the node has a gateway.
async fn computing(config: &ClusterConfig, name: &NodeName, own: &NodeConfig) -> Result<Computing> {
    let cores = std::thread::available_parallelism().map_or(1, |cores| cores.get());
    let devices = NodeDevices {
        ids: own.devices.clone(),
        threads: config.threads_of(name, cores),
        precision: match config.cluster.precision {
            Precision::Fast => dunlin_cpu::Precision::Fast,
            Precision::Exact => dunlin_cpu::Precision::Exact,
        },
        memory: own.memory,
    };
    if let EngineSection::Hash(options) = &config.engine {
        let spec = hash_spec(config, options);
        let text = ByteModel::new(spec.vocab, options.context);
        let text = own.http.map(|_| Arc::new(text) as Arc<dyn TextModel>);
        return Ok((Arc::new(HashEngines::new(spec, &devices)), text));
    }
    if let Some(at) = own.devices.iter().position(|id| !engines::is_known(id)) {
        let key = format!("node.{name}.devices.{at}");
        let reason = "this build has no backend for the device";
        return Err(config.complain(&key, reason, "use cpu, cpu:N, wgpu:N or wgpu:NAME").into());
    }
    let model = config.cluster.model.clone();
    let has_gateway = own.http.is_some();
    let opened = tokio::task::spawn_blocking(move || open_model(&model, &devices, has_gateway));
    let opened = opened.await.context("opening the model")?;
    opened.map_err(|e| {
        let mend = "name a model that can be had and read";
        config.complain("cluster.model", crate::explain(&e), mend).into()
    })
}

fn open_model(model: &str, devices: &NodeDevices, has_gateway: bool) -> Result<Computing> {
    let located = models::locate(model, &models::Options::from_env()?)?;
    let files = ModelFiles::open(&located.path)?;
    let text = match has_gateway {
        true => Some(Arc::new(ModelText::open(&files)?) as Arc<dyn TextModel>),
        false => None,
    };
    let engines = ModelEngines::new(model, files, devices)?;
    Ok((Arc::new(engines), text))
}

fn hash_spec(config: &ClusterConfig, options: &HashEngine) -> HashSpec {
    let ranks = config.replicas.iter().flat_map(|replica| &replica.stages).map(Vec::len);
    HashSpec {
        // The text side has 256 bytes and two special tokens.
        vocab: options.vocab.max(258),
        layers: options.layers as usize,
        context: options.context as usize,
        heads: ranks.max().unwrap_or(1),
        eos: None,
        step_cost: Duration::from_micros(options.step_micros),
        token_cost: Duration::from_micros(options.token_micros),
    }
}

async fn node(
    config: &ClusterConfig,
    name: &NodeName,
    own: &NodeConfig,
    identity: NodeIdentity,
    incarnation: Incarnation,
    inside: Option<&Inside>,
) -> Result<Node> {
    let membership = &config.membership;
    let (heartbeat_ms, lease_ms) = (membership.heartbeat_ms, membership.lease_ms);
    let quic =
        QuicOptions { idle_ms: lease_ms, keep_alive_ms: heartbeat_ms, ..QuicOptions::default() };
    let mut options = NodeOptions::new(name.clone(), &config.cluster.name, own.address.to_string());
    options.incarnation = incarnation;
    options.head = Some(config.cluster.head.clone());
    options.schema = KEY_SCHEMA;
    options.faults = inside.map(Inside::faults).unwrap_or_default();
    options.timing = Timing {
        heartbeat_ms,
        dead_ms: lease_ms,
        lease_ms: lease_ms + lease_ms / 2,
        resume_ms: 2 * lease_ms,
        ..Timing::default()
    };
    for (peer, node) in config.nodes.iter().filter(|(peer, _)| *peer != name) {
        options = options.peer(peer.clone(), node.address.to_string());
    }
    let transport = QuicTransport::new(Arc::new(identity), quic);
    let started = Node::start(options, Arc::new(transport)).await;
    if let (Ok(node), Some(inside)) = (&started, inside) {
        inside.attach(node.clone(), tokio::runtime::Handle::current());
    }
    started.map_err(|e| match e {
        StartError::Bind { error, .. } => {
            let mend = "stop what uses the address, or choose another";
            config.complain(&format!("node.{name}.address"), error.to_string(), mend).into()
        }
        other => other.into(),
    })
}

fn host_options(config: &ClusterConfig, own: &NodeConfig, join_deadline: Duration) -> HostOptions {
    let nodes = config.nodes.iter();
    let (scheduler, limits) = (&config.scheduler, &config.limits);
    let step_deadline = Duration::from_millis(scheduler.step_deadline_ms);
    HostOptions {
        cluster: config.cluster.name.clone(),
        model: config.cluster.model.clone(),
        head: config.cluster.head.clone(),
        nodes: nodes.clone().map(|(name, node)| (name.clone(), node.address.to_string())).collect(),
        workers: nodes
            .filter(|(_, n)| !n.devices.is_empty())
            .map(|(name, _)| name.clone())
            .collect(),
        http: own.http,
        wants: wants(config),
        limits: PlanLimits {
            block_tokens: config.kv.block_tokens as usize,
            kv_bytes: config.kv.memory,
            step_tokens: scheduler.step_tokens as usize,
        },
        replica_intensity: Intensity {
            max: config.restart.max as usize,
            within: Duration::from_millis(config.restart.within_ms),
            rest: REPLICA_REST,
        },
        replan: Replan {
            after: Duration::from_millis(config.restart.replan_after_ms),
            back_after: Duration::from_millis(config.restart.return_after_ms),
        },
        node_intensity: config.restart.intensity(),
        scheduler: SchedulerConfig {
            step_tokens: scheduler.step_tokens as usize,
            chunk_tokens: scheduler.chunk_tokens as usize,
            max_running: scheduler.max_running as usize,
            prefix_cache: config.kv.prefix_cache,
            in_flight: scheduler.steps_in_flight.map(|steps| steps as usize),
            step_target: None,
            step_deadline,
        },
        router: RouterConfig {
            max_open: limits.max_open_requests as usize,
            max_waiting: scheduler.max_waiting as usize,
            ..RouterConfig::default()
        },
        gateway: gateway::Limits {
            body_bytes: usize::try_from(limits.max_body_bytes).unwrap_or(usize::MAX),
            deadline: Duration::from_millis(limits.request_deadline_ms),
            ..gateway::Limits::default()
        },
        api_keys: api_keys(config),
        step_deadline,
        join_deadline,
    }
}

fn wants(config: &ClusterConfig) -> Vec<ReplicaWant> {
    let wanted = config.replicas.iter().map(|replica| {
        let ranks = |group: &Vec<dunlin_runtime::config::ShardDevice>| {
            group.iter().map(|shard| (shard.node.clone(), shard.device.clone())).collect()
        };
        ReplicaWant {
            name: replica.name.clone(),
            stages: replica.stages.iter().map(ranks).collect(),
            layers: replica.layers.clone(),
        }
    });
    wanted.collect()
}

fn api_keys(config: &ClusterConfig) -> Vec<gateway::ApiKey> {
    let keys = config.cluster.api_keys.iter();
    keys.map(|key| gateway::ApiKey { name: key.tenant.clone(), secret: key.key.clone() }).collect()
}
