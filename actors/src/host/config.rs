//! What `cluster.toml` says, in the terms of nodes and hosts. Shared by the program and the
//! simulator, so that both run the same cluster.

use super::HostOptions;
use crate::gateway;
use crate::kv::KEY_SCHEMA;
use crate::placement::core::{Intensity, Replan};
use crate::placement::planner::{PlanLimits, ReplicaWant};
use crate::router::RouterConfig;
use crate::scheduler::{Batching, SchedulerConfig};
use dunlin_model::hash_engine::HashSpec;
use dunlin_runtime::config::{ClusterConfig, HashEngine, NodeConfig, ShardDevice};
use dunlin_runtime::{NodeName, NodeOptions, Timing};
use std::time::Duration;

/// How long a replica rests after it has failed too often.
const REPLICA_REST: Duration = Duration::from_secs(5);

/// The node `name` in its first life, with all others as peers.
pub fn node_options(config: &ClusterConfig, name: &NodeName, own: &NodeConfig) -> NodeOptions {
    let membership = &config.membership;
    let (heartbeat_ms, lease_ms) = (membership.heartbeat_ms, membership.lease_ms);
    let mut options = NodeOptions::new(name.clone(), &config.cluster.name, own.address.to_string());
    options.head = Some(config.cluster.head.clone());
    options.schema = KEY_SCHEMA;
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
    options
}

/// What runs on the node `own`.
pub fn host_options(
    config: &ClusterConfig,
    own: &NodeConfig,
    join_deadline: Duration,
) -> HostOptions {
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
            overlap: scheduler.overlap,
            step_target: None,
            step_stretch: scheduler.step_stretch,
            batching: match scheduler.static_batches {
                true => Batching::Static,
                false => Batching::Continuous,
            },
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
        scrub: match config.weights.scrub_ms {
            0 => None,
            ms => Some(Duration::from_millis(ms)),
        },
        join_deadline,
    }
}

/// The hash engine's pretended model.
pub fn hash_spec(config: &ClusterConfig, options: &HashEngine) -> HashSpec {
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

fn wants(config: &ClusterConfig) -> Vec<ReplicaWant> {
    let wanted = config.replicas.iter().map(|replica| {
        let ranks = |group: &Vec<ShardDevice>| {
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
