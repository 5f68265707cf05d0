//! The nodes' lives: started from the cluster file as `dunlin node` does it, ended as a kill, a
//! drain or an escalation does it, and started again as `dunlin up` does it.

use super::shared::{Hook, Order, Shared};
use super::{FULL_MESH, Setup};
use crate::draw::draw;
use crate::record::What;
use dunlin_actors::engines::Compute;
use dunlin_actors::hash_engines::HashEngines;
use dunlin_actors::host::config::{host_options, node_options};
use dunlin_actors::host::{Host, HostParts};
use dunlin_actors::messages::DeviceDescription;
use dunlin_runtime::config::NodeConfig;
use dunlin_runtime::supervise::Backoff;
use dunlin_runtime::transport::memory::Rules;
use dunlin_runtime::{
    Action, Export, FaultHook, Faults, Incarnation, MemoryNetwork, Node, NodeName, NodeOptions,
    Site, mutated,
};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// What the wall clock says when a simulation begins, in seconds since 1970.
const WALL_S: i64 = 1_800_000_000;
/// A healthy path, one way.
pub const PATH: Duration = Duration::from_micros(200);
/// From the fork to the node's first task.
const START_COST: Duration = Duration::from_millis(150);
/// What a device pretends to hold.
const DEVICE_BYTES: u64 = 1 << 40;

/// A node whose actors are up.
pub struct Running {
    pub host: Arc<Host>,
    pub export: Option<Export>,
    pub watcher: tokio::task::JoinHandle<()>,
}

#[derive(Default)]
pub struct Life {
    /// Of the newest life; 0 before the first.
    pub incarnation: u64,
    /// Of the newest life that came up: a start may fail.
    pub reached: u64,
    pub hook: Option<Arc<Hook>>,
    pub running: Option<Running>,
    pub starting: bool,
    /// Restarts, for the intensity.
    restarts: VecDeque<u64>,
    failures: u32,
    /// Faults that keep it away.
    held: BTreeSet<usize>,
    /// Faults that are over once it is up again.
    pub mends: Vec<usize>,
    /// No restart any more: the intensity was crossed.
    pub given_up: bool,
}

pub struct Cluster {
    pub setup: Arc<Setup>,
    pub seed: u64,
    pub network: MemoryNetwork,
    pub shared: Arc<Shared>,
    pub lives: BTreeMap<String, Life>,
    /// Nodes with a gateway, the head first.
    pub gateways: Vec<String>,
    /// What jumps have added to the wall clock.
    pub wall_ms: i64,
}

impl Cluster {
    pub fn new(setup: Arc<Setup>, seed: u64, shared: Arc<Shared>) -> Self {
        let network = MemoryNetwork::new(seed);
        network.set_rules(Rules { delay: PATH, ..Rules::default() });
        let names = setup.config.nodes.keys().map(NodeName::to_string);
        let lives = names.map(|name| (name, Life::default())).collect();
        let mut gateways: Vec<String> =
            setup.config.gateways().iter().map(|(name, _)| name.to_string()).collect();
        if gateways.is_empty() {
            gateways.push(setup.config.cluster.head.to_string());
        }
        Self { setup, seed, network, shared, lives, gateways, wall_ms: 0 }
    }

    pub fn head(&self) -> &str {
        self.setup.config.cluster.head.as_str()
    }

    pub fn names(&self) -> Vec<String> {
        self.lives.keys().cloned().collect()
    }

    pub fn node(&self, name: &str) -> Option<&Node> {
        Some(self.lives.get(name)?.running.as_ref()?.host.node())
    }

    /// Begins a new life; [`Order::Started`] says how that went.
    pub fn start(&mut self, name: &str) {
        let now_s = WALL_S + self.wall_ms / 1000 + (self.shared.us() / 1_000_000) as i64;
        let Some((node_name, own)) = self.config_of(name) else { return };
        let options = self.options(&node_name, &own);
        let Some(life) = self.lives.get_mut(name) else { return };
        if life.running.is_some() || life.starting || !life.held.is_empty() || life.given_up {
            return;
        }
        // As the node keeps it in its bundle.
        let next = match life.incarnation {
            last if last > 0 && mutated("reuse-incarnation") => last,
            last => u64::try_from(now_s).unwrap_or(0).max(last + 1),
        };
        let shared = self.shared.clone();
        let hook = Arc::new(Hook { shared, node: name.to_string(), alive: AtomicBool::new(true) });
        (life.incarnation, life.starting) = (next, true);
        life.hook = Some(hook.clone());
        self.shared.push(state(name, "starting"));
        let mut options = options;
        options.incarnation = Incarnation(next);
        options.seed = draw(self.seed, name, 0);
        options.life = draw(self.seed, name, next);
        options.faults = Faults::armed(hook.clone());
        let gateway = self.gateways.iter().any(|gateway| gateway == name);
        let start = Start {
            setup: self.setup.clone(),
            network: self.network.clone(),
            shared: self.shared.clone(),
            hook,
            own,
            gateway,
        };
        let (shared, node) = (self.shared.clone(), name.to_string());
        tokio::spawn(async move {
            let result = start.run(options).await;
            shared.order(Order::Started { node, life: next, result });
        });
    }

    /// The start has ended. True if the node is up now.
    pub fn started(
        &mut self,
        name: &str,
        incarnation: u64,
        result: Result<Running, String>,
    ) -> bool {
        let Some(life) = self.lives.get_mut(name) else { return false };
        let current = life.incarnation == incarnation && life.starting;
        match result {
            Ok(running) if current => {
                life.starting = false;
                life.running = Some(running);
                life.reached = incarnation;
                self.shared.push(state(name, "up"));
                true
            }
            // It was killed while it started.
            Ok(running) => {
                end(running);
                false
            }
            Err(reason) => {
                if current {
                    life.starting = false;
                    if let Some(hook) = life.hook.take() {
                        hook.alive.store(false, Ordering::Relaxed);
                    }
                    tracing::debug!(name, reason, "not started");
                    self.shared.push(state(name, "down"));
                }
                false
            }
        }
    }

    /// The process is gone at once, without a word. Says which life ended.
    pub fn kill(&mut self, name: &str) -> Option<u64> {
        let life = self.lives.get_mut(name)?;
        if life.running.is_none() && !life.starting {
            return None;
        }
        life.starting = false;
        if let Some(hook) = life.hook.take() {
            hook.alive.store(false, Ordering::Relaxed);
        }
        if let Ok(name) = NodeName::new(name) {
            self.network.crash(&name);
        }
        if let Some(running) = life.running.take() {
            end(running);
        }
        let ended = life.incarnation;
        self.shared.with(|inner| {
            inner.armory.process_ended(name);
            inner.running.retain(|_, (node, _)| node != name);
            inner.pause(name, None);
        });
        self.shared.push(state(name, "down"));
        Some(ended)
    }

    /// SIGTERM: it drains, leaves so that its peers see it, and ends.
    pub fn stop(&mut self, name: &str) -> bool {
        let Some(life) = self.lives.get(name) else { return false };
        let Some(running) = &life.running else { return false };
        let (host, incarnation) = (running.host.clone(), life.incarnation);
        let within = Duration::from_millis(self.setup.config.limits.drain_ms);
        let (shared, node) = (self.shared.clone(), name.to_string());
        self.shared.push(state(name, "draining"));
        tokio::spawn(async move {
            host.drain(within).await;
            host.node().shutdown().await;
            shared.order(Order::Drained { node, life: incarnation });
        });
        true
    }

    /// When to start it again; `None` if too many starts crossed the intensity.
    pub fn restart_at(&mut self, name: &str) -> Option<u64> {
        let now = self.shared.us();
        let restart = &self.setup.config.restart;
        let (max, within_us) = (restart.max as usize, restart.within_ms * 1000);
        let life = self.lives.get_mut(name)?;
        if life.restarts.back().is_none_or(|last| now - last > within_us) {
            life.failures = 0;
        }
        life.restarts.retain(|at| now - at <= within_us);
        if life.restarts.len() >= max {
            life.given_up = true;
            self.shared.push(state(name, "given up"));
            return None;
        }
        life.restarts.push_back(now);
        life.failures += 1;
        let backoff = Backoff { seed: self.seed, ..Backoff::default() };
        let wait = backoff.delay(life.failures, name, life.incarnation) + START_COST;
        Some(now + wait.as_micros() as u64)
    }

    pub fn hold(&mut self, name: &str, fault: usize) {
        if let Some(life) = self.lives.get_mut(name) {
            life.held.insert(fault);
        }
    }

    /// Nodes that only this fault kept away.
    pub fn release(&mut self, fault: usize) -> Vec<String> {
        let mut free = Vec::new();
        for (name, life) in &mut self.lives {
            if life.held.remove(&fault) && life.held.is_empty() && life.running.is_none() {
                free.push(name.clone());
            }
        }
        free
    }

    pub fn is_held(&self, name: &str) -> bool {
        self.lives.get(name).is_some_and(|life| !life.held.is_empty())
    }

    /// All but `outside` are healed: nobody is kept away, and who gave up is started by hand.
    pub fn pardon(&mut self, outside: &BTreeSet<String>) -> Vec<String> {
        let mut down = Vec::new();
        for (name, life) in self.lives.iter_mut().filter(|(name, _)| !outside.contains(*name)) {
            life.held.clear();
            if std::mem::take(&mut life.given_up) {
                life.restarts.clear();
            }
            if life.running.is_none() && !life.starting {
                down.push(name.clone());
            }
        }
        down
    }

    pub fn config_of(&self, name: &str) -> Option<(NodeName, NodeConfig)> {
        let found = self.setup.config.nodes.iter().find(|(node, _)| node.as_str() == name);
        found.map(|(node, own)| (node.clone(), own.clone()))
    }

    pub fn options(&self, name: &NodeName, own: &NodeConfig) -> NodeOptions {
        let config = &self.setup.config;
        let mut options = node_options(config, name, own);
        if config.nodes.len() > FULL_MESH {
            let mates = |replica: &&dunlin_runtime::config::ReplicaConfig| {
                replica.stages.iter().flatten().any(|shard| shard.node == *name)
            };
            let linked: BTreeSet<&NodeName> = config
                .replicas
                .iter()
                .filter(mates)
                .flat_map(|replica| replica.stages.iter().flatten().map(|shard| &shard.node))
                .chain([&config.cluster.head])
                .collect();
            if *name != config.cluster.head {
                options.peers.retain(|peer, _| linked.contains(peer));
            }
        }
        options
    }
}

fn end(running: Running) {
    running.watcher.abort();
    running.host.crash();
    drop(running.export);
}

pub fn state(node: &str, state: &str) -> What {
    What::Node { node: node.to_string(), state: state.to_string() }
}

struct Start {
    setup: Arc<Setup>,
    network: MemoryNetwork,
    shared: Arc<Shared>,
    hook: Arc<Hook>,
    own: NodeConfig,
    gateway: bool,
}

impl Start {
    async fn run(self, options: NodeOptions) -> Result<Running, String> {
        let (name, incarnation) = (options.name.clone(), options.incarnation.0);
        match self.hook.decide(&Site::Start { node: &name }) {
            Some(Action::Fail { text, .. }) => return Err(text),
            Some(Action::Delay(wait) | Action::Hang(wait)) => tokio::time::sleep(wait).await,
            _ => {}
        }
        let node = Node::start(options, Arc::new(self.network.clone()));
        let node = node.await.map_err(|error| error.to_string())?;
        let export = match self.gateway {
            true => Some(super::clients::export(&node, &self.shared)?),
            false => None,
        };
        let spec = &self.setup.spec;
        let compute = Compute::Inline { step_cost: spec.step_cost, token_cost: spec.token_cost };
        let mut free = spec.clone();
        (free.step_cost, free.token_cost) = Default::default();
        let devices = self.own.devices.iter().map(|id| DeviceDescription {
            id: id.clone(),
            description: "hash engine".into(),
            total_bytes: DEVICE_BYTES,
            free_bytes: DEVICE_BYTES,
        });
        let engines = HashEngines::new(free, devices.collect());
        let mut host = host_options(&self.setup.config, &self.own, Duration::ZERO);
        // Requests come from the simulator's own clients.
        host.http = None;
        let parts = HostParts {
            node,
            engines: Arc::new(engines),
            compute,
            text: None,
            metrics: Arc::new(String::new),
        };
        let host = Host::start(host, parts).await.map_err(|error| error.to_string())?;
        let host = Arc::new(host);
        let (shared, watched, node) = (self.shared, host.clone(), name.to_string());
        let watcher = tokio::spawn(async move {
            let reason = watched.failed().await.to_string();
            shared.order(Order::Escalated { node, life: incarnation, reason });
        });
        Ok(Running { host, export, watcher })
    }
}
