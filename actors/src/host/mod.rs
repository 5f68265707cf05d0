//! One node's actors, put together: the agent everywhere, router and placement on the head, the
//! gateway where the node has an HTTP address.
//!
//! A host knows which actors a node needs and how to start, drain and stop them. It does not know
//! where configuration comes from, which transport the node uses, or which devices there are.

mod agent;
pub mod config;
mod probe;
mod status;
mod watch;

use crate::engines::{Compute, Engines};
use crate::facts::{self, tell};
use crate::gateway::{self, TextModel};
use crate::messages::{
    GatewayCall, GatewayProtocol, KeySpace, PlacementCast, PlacementProtocol, RouterCall,
    RouterProtocol, RouterReply, RouterStatus,
};
use crate::placement::core::Placement;
use crate::placement::planner::{PlanLimits, ReplicaWant};
use crate::router::RouterConfig;
use crate::scheduler::SchedulerConfig;
use crate::{placement, router};
use agent::AgentArgs;
use dunlin_runtime::supervise::{
    Backoff, ChildSpec, Intensity, Observer, Restart, Strategy, Supervisor, SupervisorHandle,
    SupervisorSpec,
};
use dunlin_runtime::{Address, Export, Node, NodeName};
use ractor::ActorCell;
use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;
use tokio::sync::mpsc;

/// Mailbox role of agents.
pub const AGENT_ROLE: &str = "agent";

const GATEWAY: &str = "gateway";

const CALL_DEADLINE: Duration = Duration::from_secs(5);

/// What the configuration says, in the actors' terms.
#[derive(Debug, Clone)]
pub struct HostOptions {
    pub cluster: String,
    pub model: String,
    pub head: NodeName,
    /// All nodes of the cluster, with their addresses, for `status` and messages.
    pub nodes: Vec<(NodeName, String)>,
    /// Nodes with devices: the planner waits for all of them where no replica is configured.
    pub workers: BTreeSet<NodeName>,
    pub http: Option<SocketAddr>,
    pub wants: Vec<ReplicaWant>,
    pub limits: PlanLimits,
    pub replica_intensity: placement::core::Intensity,
    pub replan: placement::core::Replan,
    /// Of this node's own actors.
    pub node_intensity: Intensity,
    pub scheduler: SchedulerConfig,
    pub router: RouterConfig,
    pub gateway: gateway::Limits,
    pub api_keys: Vec<gateway::ApiKey>,
    /// How long a step may wait for another shard.
    pub step_deadline: Duration,
    /// Weights in memory are looked at again after so long.
    pub scrub: Option<Duration>,
    /// How long the first start may wait for other nodes; zero: as long as it takes.
    pub join_deadline: Duration,
}

impl HostOptions {
    pub fn max_running(&self) -> u32 {
        u32::try_from(self.scheduler.max_running).unwrap_or(u32::MAX)
    }
}

/// What composition supplies.
pub struct HostParts {
    pub node: Node,
    pub engines: Arc<dyn Engines>,
    pub compute: Compute,
    /// Needed where the node has an HTTP address.
    pub text: Option<Arc<dyn TextModel>>,
    /// Renders this process's metrics for Prometheus.
    pub metrics: gateway::MetricsText,
}

/// Why a host did not start or could not go on.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum HostError {
    #[error("node '{node}': {reason}")]
    Start { node: NodeName, reason: String },
    /// The configuration cannot work as it stands.
    #[error("{0}")]
    Impossible(String),
    #[error(
        "after {waited:?} {missing} has not joined; start it there with `dunlin node --name NAME`, \
         check that its `address` in cluster.toml can be reached by UDP, or wait longer with --wait"
    )]
    NotJoined { missing: String, waited: Duration },
    #[error("after {waited:?} the cluster is not ready: {reason}")]
    NotReady { waited: Duration, reason: String },
    #[error("node '{node}' gave up: {reason}")]
    Escalated { node: NodeName, reason: String },
}

/// A running node's actors.
pub struct Host {
    node: Node,
    options: Arc<HostOptions>,
    root: SupervisorHandle,
    http: Option<SocketAddr>,
    ready: tokio::sync::watch::Receiver<probe::Readiness>,
    impossible: tokio::sync::Mutex<mpsc::UnboundedReceiver<String>>,
    draining: tokio::sync::watch::Sender<bool>,
    probe: tokio::task::JoinHandle<()>,
    _metrics: Export,
}

impl Host {
    /// Starts everything this node hosts; returns when its own actors are up (replicas follow).
    pub async fn start(options: HostOptions, parts: HostParts) -> Result<Host, HostError> {
        let node = parts.node.clone();
        let start_error = |reason: String| HostError::Start { node: node.name().clone(), reason };
        let options = Arc::new(options);
        let head = |role: &str, instance: &str| Address::new(options.head.clone(), role, instance);
        let router = head(router::ROLE, router::INSTANCE);
        let placement = head(placement::ROLE, placement::INSTANCE);
        let metrics = gateway::export_metrics(&node, parts.metrics.clone())
            .map_err(|error| start_error(error.to_string()))?;
        let (impossible_in, impossible) = mpsc::unbounded_channel();
        let (draining, _) = tokio::sync::watch::channel(false);
        let (ready, probe) =
            probe::start(node.clone(), router.clone(), placement.clone(), draining.subscribe());
        let root_cell: Arc<OnceLock<SupervisorHandle>> = Arc::default();
        let agent_args = AgentArgs {
            node: node.clone(),
            engines: parts.engines.clone(),
            compute: parts.compute,
            options: options.clone(),
            placement: placement.clone(),
            router: router.clone(),
            root: root_cell.clone(),
        };
        let mut children =
            vec![child("agent", move |cell| agent::start_agent(agent_args.clone(), cell))];
        if options.head == *node.name() {
            children.extend(head_children(&options, &parts, router.clone(), impossible_in));
        }
        let http: Arc<OnceLock<SocketAddr>> = Arc::default();
        if let (Some(address), Some(text)) = (options.http, parts.text.clone()) {
            let status = status::source(
                node.clone(),
                options.clone(),
                router.clone(),
                placement.clone(),
                ready.clone(),
            );
            let seed = GatewaySeed {
                node: node.clone(),
                router,
                text,
                options: options.clone(),
                key_space: KeySpace {
                    namespace: parts.engines.shape().cache_namespace(),
                    block_tokens: u32::try_from(options.limits.block_tokens).unwrap_or(u32::MAX),
                },
                fingerprint: fingerprint(parts.engines.as_ref()),
                ready: probe::as_closure(ready.clone()),
                metrics: parts.metrics.clone(),
                status: Arc::new(move || {
                    let status = status();
                    Box::pin(async move {
                        serde_json::to_value(status.await).unwrap_or(serde_json::Value::Null)
                    })
                }),
            };
            children.push(seed.child(address, http.clone()));
        }
        let spec = SupervisorSpec {
            name: node.name().to_string(),
            strategy: Strategy::OneForOne,
            intensity: options.node_intensity,
            backoff: Backoff::default(),
            children,
            observer: Observer::of(&node),
        };
        let root =
            Supervisor::spawn(spec, None).await.map_err(|error| start_error(error.to_string()))?;
        if let Err(verdict) = root.ready().await {
            probe.abort();
            return Err(start_error(verdict.to_string()));
        }
        let _ = root_cell.set(root.clone());
        watch::start(node.clone(), root.clone(), options.clone());
        let impossible = tokio::sync::Mutex::new(impossible);
        let http = http.get().copied();
        Ok(Host {
            node,
            options,
            root,
            http,
            ready,
            impossible,
            draining,
            probe,
            _metrics: metrics,
        })
    }

    pub fn node(&self) -> &Node {
        &self.node
    }

    /// Where the gateway listens, if this node has one.
    pub fn http(&self) -> Option<SocketAddr> {
        self.http
    }

    /// Waits until one real token has gone through the cluster, or says why that cannot be.
    pub async fn ready(&self) -> Result<(), HostError> {
        let begun = tokio::time::Instant::now();
        let mut ready = self.ready.clone();
        let mut impossible = self.impossible.lock().await;
        let mut joining = !self.options.join_deadline.is_zero();
        let bound = tokio::time::sleep(self.options.join_deadline);
        tokio::pin!(bound);
        loop {
            tokio::select! {
                biased;
                Some(text) = impossible.recv() => return Err(HostError::Impossible(text)),
                changed = ready.wait_for(|state| state.ready) => {
                    return changed.map(|_| ()).map_err(|_| HostError::Escalated {
                        node: self.node.name().clone(),
                        reason: "the readiness probe has ended".into(),
                    });
                }
                () = &mut bound, if joining => {
                    let waited = begun.elapsed();
                    if let Some(missing) = self.missing() {
                        return Err(HostError::NotJoined { missing, waited });
                    }
                    // Everyone is there; loading a large model may take longer than joining.
                    joining = false;
                }
            }
        }
    }

    /// Waits until this node's own tree has given up (its restart intensity was crossed), or the
    /// configuration turned out impossible.
    pub async fn failed(&self) -> HostError {
        let mut impossible = self.impossible.lock().await;
        let node = self.node.name().clone();
        tokio::select! {
            biased;
            verdict = self.root.wait() => {
                HostError::Escalated { node, reason: verdict.to_string() }
            }
            Some(text) = impossible.recv() => HostError::Impossible(text),
        }
    }

    /// Takes no new work and waits, at most `bound`, until what runs here has ended. Says how many
    /// requests were left.
    pub async fn drain(&self, bound: Duration) -> u64 {
        let _ = self.draining.send(true);
        tell(&self.node, facts::DRAIN, || "begun".into(), (0, 0));
        let until = tokio::time::Instant::now() + bound;
        // The gateway refuses new requests at once and closes when the running ones have ended.
        let gateway = match self.root.child(GATEWAY).await {
            Ok(Some(gateway)) => {
                Some(tokio::spawn(async move { gateway::drain(&gateway, bound).await }))
            }
            _ => None,
        };
        let is_head = self.options.head == *self.node.name();
        let drains_all = is_head || self.options.http.is_some();
        if is_head {
            let _ = self.router(&RouterCall::Drain).await;
        } else {
            let to = Address::new(self.options.head.clone(), placement::ROLE, placement::INSTANCE);
            let leaving = PlacementCast::NodeDraining { node: self.node.name().clone() };
            if self.node.cast::<PlacementProtocol>(&to, &leaving).is_err() {
                return 0;
            }
        }
        loop {
            let left = match self.router(&RouterCall::Status).await {
                Some(RouterReply::Status(status)) if drains_all => status.open_requests,
                Some(RouterReply::Status(status)) => self.assigned_here(&status),
                // Nobody can give work to a node whose head is gone.
                _ => 0,
            };
            if left == 0 || tokio::time::Instant::now() >= until {
                tell(&self.node, facts::DRAIN, || "ended".into(), (0, left));
                if let Some(gateway) = gateway {
                    // Its clients may still be reading what has been generated.
                    let _ = tokio::time::timeout_at(until, gateway).await;
                }
                return left;
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    /// Ends one of this node's actors as if it had failed, for fault injection; its supervisor
    /// deals with it. False if there is none of this name.
    pub async fn kill(&self, child: &str) -> bool {
        let Ok(Some(cell)) = self.root.child(child).await else { return false };
        cell.kill();
        true
    }

    /// Ends all actors at once, as the end of the process would; peers are told nothing. For
    /// simulations, which let the network forget the node first.
    pub fn crash(&self) {
        self.probe.abort();
        self.root.cell().kill();
        self.node.crash();
    }

    /// Ends all actors and closes the links, so that peers see it at once.
    pub async fn stop(self) {
        self.probe.abort();
        self.root.stop().await;
        self.node.shutdown().await;
    }

    async fn router(&self, call: &RouterCall) -> Option<RouterReply> {
        let to = Address::new(self.options.head.clone(), router::ROLE, router::INSTANCE);
        self.node.call::<RouterProtocol>(&to, call, CALL_DEADLINE).await.ok()
    }

    fn assigned_here(&self, status: &RouterStatus) -> u64 {
        let prefix = format!("{}/", self.node.name());
        let here =
            |shards: &[String]| shards.iter().any(|place| place.starts_with(prefix.as_str()));
        status.replicas.iter().filter(|r| here(&r.info.served_by)).map(|r| r.assigned).sum()
    }

    /// On the head, the configured nodes that are not linked; elsewhere, the head if it is not.
    fn missing(&self) -> Option<String> {
        let up: BTreeSet<NodeName> =
            placement::up_peers(&self.node).into_iter().map(|p| p.node).collect();
        let is_head = self.options.head == *self.node.name();
        let lacking: Vec<String> = self
            .options
            .nodes
            .iter()
            .filter(|(name, _)| name != self.node.name() && !up.contains(name))
            .filter(|(name, _)| is_head || *name == self.options.head)
            .map(|(name, address)| format!("node '{name}' ([node.{name}] address = \"{address}\")"))
            .collect();
        (!lacking.is_empty()).then(|| lacking.join(", "))
    }
}

/// What every life of this node's gateway is made of.
#[derive(Clone)]
struct GatewaySeed {
    node: Node,
    router: Address,
    text: Arc<dyn TextModel>,
    options: Arc<HostOptions>,
    key_space: KeySpace,
    fingerprint: String,
    ready: gateway::Ready,
    metrics: gateway::MetricsText,
    status: gateway::StatusJson,
}

impl GatewaySeed {
    /// A drained gateway has ended well and stays down, hence transient.
    fn child(self, address: SocketAddr, bound: Arc<OnceLock<SocketAddr>>) -> ChildSpec {
        ChildSpec::new(GATEWAY, Restart::Transient, move |cell| {
            let args = gateway::GatewayArgs {
                node: self.node.clone(),
                router: self.router.clone(),
                // A restarted gateway takes the port it had, also where any was asked for.
                http: bound.get().copied().unwrap_or(address),
                model: self.text.clone(),
                key_space: self.key_space,
                models: vec![self.options.model.clone()],
                fingerprint: self.fingerprint.clone(),
                limits: self.options.gateway.clone(),
                api_keys: self.options.api_keys.clone(),
                ready: self.ready.clone(),
                metrics: self.metrics.clone(),
                status: self.status.clone(),
            };
            let bound = bound.clone();
            async move {
                let (actor, address) =
                    gateway::start_gateway(args, cell).await.map_err(|e| e.to_string())?;
                let _ = bound.set(address);
                Ok(actor)
            }
        })
    }
}

/// Changes with what can change an answer: model, KV format, precision, version.
fn fingerprint(engines: &dyn Engines) -> String {
    let namespace = engines.shape().cache_namespace();
    let short: String = namespace[..6].iter().map(|byte| format!("{byte:02x}")).collect();
    format!("dunlin-{}-{short}", env!("CARGO_PKG_VERSION"))
}

fn head_children(
    options: &Arc<HostOptions>,
    parts: &HostParts,
    router_address: Address,
    impossible: mpsc::UnboundedSender<String>,
) -> [ChildSpec; 2] {
    let (node, config) = (parts.node.clone(), options.router.clone());
    let placement_address = node.address(placement::ROLE, placement::INSTANCE);
    let nodes: Vec<NodeName> = options.nodes.iter().map(|(name, _)| name.clone()).collect();
    let routers = Arc::new(AtomicU64::new(0));
    let router_lives = routers.clone();
    let router = child("router", move |cell| {
        let again = router_lives.fetch_add(1, Ordering::Relaxed) > 0;
        let (node, config, placement) = (node.clone(), config.clone(), placement_address.clone());
        let nodes = nodes.clone();
        async move {
            let args = router::RouterArgs { node: node.clone(), config };
            let actor = router::start_router(args, cell).await?;
            if again {
                router_restarted(&node, &placement, &nodes);
            }
            Ok(actor)
        }
    });
    let (node, engines, options) = (parts.node.clone(), parts.engines.clone(), options.clone());
    // A later life of placement gives out higher epochs than every earlier one: the incarnation
    // rises with the process, the counter with restarts inside it.
    let lives = AtomicU64::new(0);
    // What runs may be taken over only while the router that gave it its work lives on.
    let known_routers = AtomicU64::new(0);
    let placement = child("placement", move |cell| {
        let life = lives.fetch_add(1, Ordering::Relaxed);
        let now = routers.load(Ordering::Relaxed);
        let same_router = known_routers.swap(now, Ordering::Relaxed) == now;
        let first_epoch = (node.incarnation().0 << 24) + (life << 16) + 1;
        let core = Placement::new(
            engines.clone(),
            options.wants.clone(),
            options.workers.clone(),
            options.limits.clone(),
            (options.replica_intensity, options.replan),
            first_epoch,
        );
        let core = if same_router { core.adopting() } else { core };
        let args = placement::PlacementArgs {
            node: node.clone(),
            core,
            router: router_address.clone(),
            impossible: impossible.clone(),
        };
        placement::start_placement(args, cell)
    });
    [router, placement]
}

/// What a router knew died with it: replicas are placed anew, open requests end with an error.
fn router_restarted(node: &Node, placement: &Address, nodes: &[NodeName]) {
    // Where placement is gone as well, its next life places everything anyway.
    let _ = node.cast::<PlacementProtocol>(placement, &PlacementCast::RouterRestarted);
    for name in nodes {
        let (node, to) = (node.clone(), Address::new(name.clone(), "gateway", "main"));
        tokio::spawn(async move {
            // Most nodes have no gateway; one that cannot be reached is lost to its router too.
            let call = GatewayCall::RouterRestarted;
            let _ = node.call::<GatewayProtocol>(&to, &call, CALL_DEADLINE).await;
        });
    }
}

fn child<F, Fut>(id: &str, start: F) -> ChildSpec
where
    F: Fn(ActorCell) -> Fut + Send + Sync + 'static,
    Fut: Future<Output = Result<ActorCell, String>> + Send + 'static,
{
    ChildSpec::new(id, Restart::Permanent, start)
}
