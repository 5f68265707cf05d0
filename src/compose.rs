//! Puts a node together: configuration, certificates, transport, model and engines into a
//! [`Host`]. What each part does is elsewhere; what goes where is here.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result};
use dunlin_actors::engines::{Compute, Engines};
use dunlin_actors::gateway::{ByteModel, TextModel};
use dunlin_actors::host::config::{hash_spec, host_options, node_options};
use dunlin_actors::host::{Host, HostParts};
use dunlin_actors::telemetry::ACTOR_METRICS;
use dunlin_backend::KvDtype;
use dunlin_faults::process::inside::Inside;
use dunlin_faults::process::reach::Reach;
use dunlin_model::loader::ModelFiles;
use dunlin_runtime::certs::NodeIdentity;
use dunlin_runtime::config::{ClusterConfig, EngineSection, KvType, NodeConfig, Precision};
use dunlin_runtime::telemetry::{RUNTIME_METRICS, init_metrics};
use dunlin_runtime::transport::quic::{QuicOptions, QuicTransport};
use dunlin_runtime::{Incarnation, Node, NodeName, StartError};

use crate::engines::{self, ModelEngines, NodeDevices};
use crate::models;
use crate::text::ModelText;

/// What lets a fault runner break this node.
pub struct Armed {
    pub inside: Inside,
    pub reach: Arc<Reach>,
}

/// Starts everything that the node `name` hosts.
pub async fn start(
    config: &ClusterConfig,
    name: &NodeName,
    identity: NodeIdentity,
    incarnation: u64,
    join_deadline: Duration,
    armed: Option<&Armed>,
) -> Result<Host> {
    let own = config.nodes.get(name).context("a node of the configuration")?.clone();
    let metrics = init_metrics(&[RUNTIME_METRICS, ACTOR_METRICS]);
    let (engines, text) = computing(config, name, &own).await?;
    for replica in &config.replicas {
        config.check_layers(replica, engines.shape().layers())?;
    }
    let node = node(config, name, &own, identity, Incarnation(incarnation), armed).await?;
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
        precision: precision(config),
        kv: kv_dtype(config),
        memory: own.memory,
    };
    if let EngineSection::Hash(options) = &config.engine {
        let spec = hash_spec(config, options);
        let text = ByteModel::new(spec.vocab, options.context);
        let text = own.http.map(|_| Arc::new(text) as Arc<dyn TextModel>);
        return Ok((Arc::new(engines::hash_engines(spec, &devices)), text));
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

/// What blocks hold in the whole cluster.
fn kv_dtype(config: &ClusterConfig) -> KvDtype {
    match config.kv.dtype {
        Some(KvType::F32) => KvDtype::F32,
        Some(KvType::F16) => KvDtype::F16,
        Some(KvType::Int8) => KvDtype::Int8,
        None => precision(config).kv(),
    }
}

fn precision(config: &ClusterConfig) -> dunlin_backend::Precision {
    match config.cluster.precision {
        Precision::Fast => dunlin_backend::Precision::Fast,
        Precision::Exact => dunlin_backend::Precision::Exact,
    }
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

async fn node(
    config: &ClusterConfig,
    name: &NodeName,
    own: &NodeConfig,
    identity: NodeIdentity,
    incarnation: Incarnation,
    armed: Option<&Armed>,
) -> Result<Node> {
    let membership = &config.membership;
    let (heartbeat_ms, lease_ms) = (membership.heartbeat_ms, membership.lease_ms);
    let mut quic = QuicOptions {
        idle_ms: lease_ms,
        keep_alive_ms: heartbeat_ms,
        local_lanes: config.cluster.local_lanes,
        ..QuicOptions::default()
    };
    let mut options = node_options(config, name, own);
    options.incarnation = incarnation;
    options.faults = armed.map(|armed| armed.inside.faults()).unwrap_or_default();
    quic.wire = armed.map(|armed| armed.reach.wire());
    let transport = Arc::new(QuicTransport::new(Arc::new(identity), quic));
    let started = Node::start(options, transport.clone()).await;
    if let (Ok(node), Some(armed)) = (&started, armed) {
        armed.reach.set_transport(transport);
        armed.inside.attach(node.clone(), tokio::runtime::Handle::current());
    }
    started.map_err(|e| match e {
        StartError::Bind { error, .. } => {
            let mend = "stop what uses the address, or choose another";
            config.complain(&format!("node.{name}.address"), error.to_string(), mend).into()
        }
        other => other.into(),
    })
}
