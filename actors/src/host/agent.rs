//! The agent: one per node, starts and stops this node's part of replicas as the head says.
//!
//! A replica's actors hang under a supervisor of their own, in the order kv, scheduler, shards.
//! That supervisor restarts nothing: a shard that comes back has lost its KV, so the replica's
//! epoch must rise, and only the head may raise it. The supervisor's end is therefore reported to
//! placement, which loads the replica again. Weights stay in [`Engines`], so that costs no read.

use super::HostOptions;
use crate::engines::{Compute, Engines};
use crate::messages::{
    ActorStatus, AgentCall, AgentProtocol, AgentReply, PlacementCast, PlacementProtocol,
    ReplicaEpoch, ReplicaInfo, ReplicaPlan,
};
use crate::{kv, scheduler, shard};
use dunlin_runtime::supervise::{
    Backoff, ChildSpec, Intensity, Observer, Restart, Strategy, Supervisor, SupervisorHandle,
    SupervisorSpec, TreeNode, Verdict,
};
use dunlin_runtime::{Address, Export, Inbound, Node, NodeName, ReplyPort};
use ractor::{Actor, ActorCell, ActorProcessingErr, ActorRef, SupervisionEvent};
use std::collections::BTreeMap;
use std::sync::{Arc, OnceLock};
use std::time::Duration;
use tokio::sync::Mutex;

/// How long a load waits for this node's links to the other nodes of the replica.
const LINK_PATIENCE: Duration = Duration::from_secs(5);

/// Loads in a row that may find the device lost before the process is given up.
const DEVICE_TRIES: u32 = 3;

/// What the agent needs. `root` is filled once the node's tree is up.
#[derive(Clone)]
pub struct AgentArgs {
    pub node: Node,
    pub engines: Arc<dyn Engines>,
    pub compute: Compute,
    pub options: Arc<HostOptions>,
    pub placement: Address,
    pub router: Address,
    pub root: Arc<OnceLock<SupervisorHandle>>,
}

/// Starts the actor under `supervisor`.
pub async fn start_agent(args: AgentArgs, supervisor: ActorCell) -> Result<ActorCell, String> {
    let (actor, _) = Actor::spawn_linked(None, AgentActor, args, supervisor)
        .await
        .map_err(|error| error.to_string())?;
    Ok(actor.get_cell())
}

struct AgentActor;

struct Msg(AgentCall, ReplyPort<AgentReply>);

struct State {
    args: AgentArgs,
    /// One slot per replica; its lock orders loads and retirements of that replica.
    replicas: BTreeMap<String, Arc<Mutex<Slot>>>,
    _export: Export,
}

#[derive(Default)]
struct Slot {
    hosted: Option<Hosted>,
    loads: u32,
    /// Loads in a row that failed because the device was lost.
    lost: u32,
    newest: ReplicaEpoch,
}

struct Hosted {
    plan: ReplicaPlan,
    supervisor: SupervisorHandle,
}

impl Actor for AgentActor {
    type Msg = Msg;
    type State = State;
    type Arguments = AgentArgs;

    async fn pre_start(
        &self,
        myself: ActorRef<Msg>,
        args: AgentArgs,
    ) -> Result<State, ActorProcessingErr> {
        let export =
            args.node.export::<AgentProtocol>(super::AGENT_ROLE, "main", move |inbound| {
                if let Inbound::Call { msg, reply, .. } = inbound {
                    let _ = myself.cast(Msg(msg, reply));
                }
            })?;
        Ok(State { args, replicas: BTreeMap::new(), _export: export })
    }

    async fn handle(
        &self,
        myself: ActorRef<Msg>,
        Msg(call, reply): Msg,
        state: &mut State,
    ) -> Result<(), ActorProcessingErr> {
        let args = state.args.clone();
        crate::faulty::message(&args.node, super::AGENT_ROLE, "main", call_name(&call)).await;
        match call {
            AgentCall::Describe => {
                let slots: Vec<_> = state.replicas.values().cloned().collect();
                let compute = args.compute;
                tokio::spawn(async move {
                    let hosted = slots.iter().filter_map(running).collect();
                    // Reading memory figures may touch the disk or a driver.
                    let describe = move || {
                        let description = args.engines.describe();
                        reply.send(AgentReply::Described { description, hosted })
                    };
                    compute.blocking(describe).await
                });
            }
            AgentCall::Load(plan) => {
                let slot = state.slot(&plan.replica);
                let parent = myself.get_cell();
                tokio::spawn(async move {
                    reply.send(AgentReply::Loaded(load(args, *plan, slot, parent).await))
                });
            }
            AgentCall::Lead(plan) => {
                let slot = state.slot(&plan.replica);
                tokio::spawn(async move {
                    let hosted = slot.lock().await;
                    let current =
                        hosted.hosted.as_ref().is_some_and(|h| h.plan.epoch == plan.epoch);
                    let answer = match current {
                        true => Ok(replica_info(&args, &plan)),
                        false => Err(format!("epoch {} is not loaded here", plan.epoch.0)),
                    };
                    reply.send(AgentReply::Leading(answer))
                });
            }
            AgentCall::Retire { replica, epoch } => {
                let slot = state.slot(&replica);
                tokio::spawn(async move {
                    let mut slot = slot.lock().await;
                    slot.newest = slot.newest.max(epoch);
                    if slot.hosted.as_ref().is_some_and(|h| h.plan.epoch <= epoch) {
                        stop(&mut slot).await;
                    }
                    reply.send(AgentReply::Retired)
                });
            }
            AgentCall::Tree => {
                let slots: Vec<_> =
                    state.replicas.iter().map(|(n, s)| (n.clone(), s.clone())).collect();
                tokio::spawn(async move { reply.send(AgentReply::Tree(tree(&args, slots).await)) });
            }
        }
        Ok(())
    }

    /// The end of a replica's supervisor is handled by the task that waits for it.
    async fn handle_supervisor_evt(
        &self,
        _: ActorRef<Msg>,
        _: SupervisionEvent,
        _: &mut State,
    ) -> Result<(), ActorProcessingErr> {
        Ok(())
    }
}

fn call_name(call: &AgentCall) -> &'static str {
    match call {
        AgentCall::Describe => "Describe",
        AgentCall::Load(_) => "Load",
        AgentCall::Lead(_) => "Lead",
        AgentCall::Retire { .. } => "Retire",
        AgentCall::Tree => "Tree",
    }
}

impl State {
    fn slot(&mut self, replica: &str) -> Arc<Mutex<Slot>> {
        self.replicas.entry(replica.to_string()).or_default().clone()
    }
}

async fn load(
    args: AgentArgs,
    plan: ReplicaPlan,
    slot: Arc<Mutex<Slot>>,
    parent: ActorCell,
) -> Result<(), String> {
    linked(&args.node, &plan).await?;
    let mut slot = slot.lock().await;
    if slot.newest > plan.epoch {
        return Err(format!("epoch {} is older than {}", plan.epoch.0, slot.newest.0));
    }
    slot.newest = plan.epoch;
    stop(&mut slot).await;
    let spec = replica_spec(&args, &plan);
    let handle = Supervisor::spawn(spec, Some(parent)).await.map_err(|e| e.to_string())?;
    if let Err(verdict) = handle.ready().await {
        let reason = verdict.to_string();
        slot.lost = if reason.contains("device lost") { slot.lost + 1 } else { 0 };
        if slot.lost >= DEVICE_TRIES {
            give_up(&args, &reason);
        }
        return Err(reason);
    }
    slot.lost = 0;
    slot.hosted = Some(Hosted { plan: plan.clone(), supervisor: handle.clone() });
    slot.loads += 1;
    tokio::spawn(async move {
        let deadline = args.options.step_deadline;
        let reason = tokio::select! {
            biased;
            verdict = handle.wait() => match verdict {
                Verdict::Stopped => return,
                other => other.to_string(),
            },
            reason = super::watch::scheduler_silent(&args.node, &plan, deadline) => {
                // What hangs would not hear of a stop.
                handle.cell().kill();
                reason
            }
        };
        // A failing shard has reported itself, with its suspects, before it ended; placement
        // takes the first report of an epoch. This one covers what could not speak for itself.
        let (replica, epoch) = (plan.replica, plan.epoch);
        let suspects = Vec::new();
        let cast = PlacementCast::ReplicaBroken { replica, epoch, reason, suspects };
        if let Err(error) = args.node.cast::<PlacementProtocol>(&args.placement, &cast) {
            tracing::warn!(%error, "could not tell placement");
        }
    });
    Ok(())
}

/// A device that stays lost is lost to this process: only a new one may get it back.
fn give_up(args: &AgentArgs, reason: &str) {
    tracing::error!(node = %args.node.name(), reason, "the process ends, to be started anew");
    if let Some(root) = args.root.get() {
        root.cell().kill();
    }
}

/// Waits until this node is linked to all others of the plan. The head's links to them may be up
/// before theirs to each other; a replica that were announced then would lose its first steps,
/// and requests that did no wrong would be taken for what broke it.
async fn linked(node: &Node, plan: &ReplicaPlan) -> Result<(), String> {
    let until = tokio::time::Instant::now() + LINK_PATIENCE;
    loop {
        let peers = node.peers();
        let up = |name: &NodeName| peers.iter().any(|peer| peer.node == *name && peer.up);
        let others =
            plan.shards.iter().map(|place| &place.node).filter(|name| *name != node.name());
        let Some(missing) = others.into_iter().find(|name| !up(name)) else { return Ok(()) };
        if tokio::time::Instant::now() >= until {
            return Err(format!("no link to node '{missing}' within {LINK_PATIENCE:?}"));
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// The plan that the slot runs. One that is being loaded counts as none, and so does one that has
/// ended: its report may have been lost.
fn running(slot: &Arc<Mutex<Slot>>) -> Option<ReplicaPlan> {
    let slot = slot.try_lock().ok()?;
    let hosted = slot.hosted.as_ref()?;
    hosted.supervisor.is_running().then(|| hosted.plan.clone())
}

async fn stop(slot: &mut Slot) {
    if let Some(hosted) = slot.hosted.take() {
        hosted.supervisor.stop().await;
    }
}

/// The replica's actors on this node, in start order.
fn replica_spec(args: &AgentArgs, plan: &ReplicaPlan) -> SupervisorSpec {
    let mut children = Vec::new();
    if plan.leader() == args.node.name() {
        children.extend(leader_specs(args, plan));
    }
    for (index, place) in plan.shards.iter().enumerate() {
        if place.node == *args.node.name() {
            children.push(shard_spec(args, plan, index));
        }
    }
    SupervisorSpec {
        name: format!("{}/replica-{}", args.node.name(), plan.replica),
        strategy: Strategy::RestForOne,
        intensity: Intensity { max: 0, within: Duration::from_secs(1) },
        backoff: Backoff::default(),
        children,
        observer: Observer::of(&args.node),
    }
}

/// KV block manager and scheduler share the manager's handle through a cell: the scheduler takes
/// the one that the kv child, started just before it, has put there.
fn leader_specs(args: &AgentArgs, plan: &ReplicaPlan) -> [ChildSpec; 2] {
    let shared: Arc<parking_lot::Mutex<Option<kv::SharedKv>>> = Arc::default();
    let (kv_args, kv_plan, kv_cell) = (args.clone(), plan.clone(), shared.clone());
    let kv = ChildSpec::new("kv", Restart::Permanent, move |supervisor| {
        let (args, plan, cell) = (kv_args.clone(), kv_plan.clone(), kv_cell.clone());
        async move {
            let kv_args = kv::KvArgs {
                node: args.node.clone(),
                plan: plan.clone(),
                namespace: args.engines.shape().cache_namespace(),
            };
            let (actor, handle) = kv::start_kv(kv_args, supervisor).await?;
            *cell.lock() = Some(handle);
            Ok(actor)
        }
    });
    let (args, plan) = (args.clone(), plan.clone());
    let scheduler = ChildSpec::new("scheduler", Restart::Permanent, move |supervisor| {
        let (args, plan, kv) = (args.clone(), plan.clone(), shared.lock().clone());
        async move {
            let scheduler_args = scheduler::SchedulerArgs {
                node: args.node.clone(),
                context: args.engines.shape().context(),
                config: args.options.scheduler.clone(),
                kv: kv.ok_or("the KV block manager is not up")?,
                shards: (0..plan.shards.len()).map(|i| shard::address(&plan, i)).collect(),
                router: args.router.clone(),
                placement: args.placement.clone(),
                plan,
            };
            scheduler::start_scheduler(scheduler_args, supervisor).await
        }
    });
    [kv, scheduler]
}

fn shard_spec(args: &AgentArgs, plan: &ReplicaPlan, index: usize) -> ChildSpec {
    let place = &plan.shards[index];
    let id = format!("shard-{}-{}", place.stage, place.spec.rank);
    let (args, plan) = (args.clone(), plan.clone());
    ChildSpec::new(id, Restart::Permanent, move |supervisor| {
        let (args, plan) = (args.clone(), plan.clone());
        async move {
            let (node, engines) = (&args.node, &args.engines);
            let engine = shard::build_engine(node, engines, &plan, index, args.compute).await?;
            let leader = plan.leader().clone();
            let scheduler = Address::new(leader, scheduler::ROLE, plan.replica.clone());
            let shard_args = shard::ShardArgs {
                node: args.node.clone(),
                plan,
                index,
                engine,
                scheduler,
                placement: args.placement.clone(),
                step_deadline: args.options.step_deadline,
                scrub: args.options.scrub,
                compute: args.compute,
            };
            shard::start_shard(shard_args, supervisor).await
        }
    })
}

fn replica_info(args: &AgentArgs, plan: &ReplicaPlan) -> ReplicaInfo {
    let shape = args.engines.shape();
    let spec = &plan.shards[0].spec;
    let pool = spec.kv_blocks as u64 * spec.block_tokens as u64;
    ReplicaInfo {
        replica: plan.replica.clone(),
        epoch: plan.epoch,
        scheduler: Address::new(plan.leader().clone(), scheduler::ROLE, plan.replica.clone()),
        max_sequence_tokens: pool.min(shape.context() as u64),
        kv_blocks: spec.kv_blocks as u64,
        block_tokens: u32::try_from(spec.block_tokens).unwrap_or(u32::MAX),
        max_running: args.options.max_running(),
        served_by: plan.shards.iter().map(|p| format!("{}/{}", p.node, p.device)).collect(),
        cache_namespace: shape.cache_namespace(),
    }
}

async fn tree(args: &AgentArgs, slots: Vec<(String, Arc<Mutex<Slot>>)>) -> Vec<ActorStatus> {
    let line = |(path, node): (String, &TreeNode)| ActorStatus {
        path,
        state: node.state.clone(),
        restarts: node.restarts,
    };
    let mut all = Vec::new();
    if let Some(root) = args.root.get()
        && let Ok(tree) = root.tree().await
    {
        all.extend(tree.flatten().into_iter().map(line));
    }
    for (name, slot) in slots {
        // A slot that is being loaded is locked for as long as that takes.
        let Ok(slot) = slot.try_lock() else {
            let (path, state) = (format!("replica-{name}"), "loading".into());
            all.push(ActorStatus { path, state, restarts: 0 });
            continue;
        };
        let Some(hosted) = &slot.hosted else { continue };
        if let Ok(tree) = hosted.supervisor.tree().await {
            let mut lines: Vec<_> = tree.flatten().into_iter().map(line).collect();
            if let Some(first) = lines.first_mut() {
                first.restarts = slot.loads.saturating_sub(1);
            }
            all.extend(lines);
        }
    }
    all
}
