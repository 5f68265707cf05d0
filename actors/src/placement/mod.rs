//! Placement: the head decides which replica runs where and tells each node's agent.
//!
//! [`core`] decides; the actor here only turns links going up and down, agents' answers and the
//! clock into its inputs, and its outputs into calls. It knows nothing of requests beyond the ids
//! that a failing shard names.

pub mod core;
pub mod planner;

use crate::facts::{self, tell};
use crate::messages::{
    AgentCall, AgentProtocol, AgentReply, NodeDescription, PlacementCall, PlacementCast,
    PlacementProtocol, PlacementReply, ReplicaEpoch, ReplicaPlan, RouterCast, RouterProtocol,
};
use core::{Input, Output, Placement};
use dunlin_runtime::{Address, Export, Inbound, Node, NodeName, Peer, PeerEvent, ReplyPort};
use ractor::{Actor, ActorCell, ActorProcessingErr, ActorRef};
use std::time::Duration;
use tokio::sync::mpsc::UnboundedSender;
use tokio::time::Instant;

/// Mailbox role and instance.
pub const ROLE: &str = "placement";
pub const INSTANCE: &str = "main";

const TICK: Duration = Duration::from_millis(200);
/// Reading a large model from a cold disk takes minutes; a node that dies meanwhile is noticed by
/// its link, so this bound is only for a load that hangs.
const LOAD_DEADLINE: Duration = Duration::from_secs(600);
const CALL_DEADLINE: Duration = Duration::from_secs(10);

/// What the placement actor needs.
pub struct PlacementArgs {
    pub node: Node,
    pub core: Placement,
    pub router: Address,
    /// Configuration errors that no waiting will mend; the host ends the process with them.
    pub impossible: UnboundedSender<String>,
}

/// Starts the actor under `supervisor`.
pub async fn start_placement(
    args: PlacementArgs,
    supervisor: ActorCell,
) -> Result<ActorCell, String> {
    let (actor, _) = Actor::spawn_linked(None, PlacementActor, args, supervisor)
        .await
        .map_err(|error| error.to_string())?;
    Ok(actor.get_cell())
}

struct PlacementActor;

enum Msg {
    Peer(PeerEvent),
    Described(Peer, NodeDescription, Vec<ReplicaPlan>),
    Input(Input),
    Status(ReplyPort<PlacementReply>),
}

struct State {
    node: Node,
    core: Placement,
    router: Address,
    impossible: UnboundedSender<String>,
    begun: Instant,
    tasks: Vec<tokio::task::JoinHandle<()>>,
    _export: Export,
}

impl Actor for PlacementActor {
    type Msg = Msg;
    type State = State;
    type Arguments = PlacementArgs;

    async fn pre_start(
        &self,
        myself: ActorRef<Msg>,
        args: PlacementArgs,
    ) -> Result<State, ActorProcessingErr> {
        let inbox = myself.clone();
        let export = args.node.export::<PlacementProtocol>(ROLE, INSTANCE, move |inbound| {
            let msg = match inbound {
                Inbound::Cast { msg, .. } => Msg::Input(match msg {
                    PlacementCast::ReplicaBroken { replica, epoch, reason, suspects } => {
                        Input::Broken { replica, epoch, reason, suspects }
                    }
                    PlacementCast::NodeDraining { node } => Input::NodeDraining { node },
                    PlacementCast::RouterRestarted => Input::RouterRestarted,
                }),
                Inbound::Call { msg: PlacementCall::Status, reply, .. } => Msg::Status(reply),
            };
            let _ = inbox.cast(msg);
        })?;
        // Watch first, list second: a peer that comes in between is then seen twice, not missed.
        let mut events = args.node.watch();
        for peer in up_peers(&args.node) {
            let _ = myself.cast(Msg::Peer(PeerEvent::Up { peer }));
        }
        let own = Peer { node: args.node.name().clone(), incarnation: args.node.incarnation() };
        let _ = myself.cast(Msg::Peer(PeerEvent::Up { peer: own }));
        let (watcher, ticker) = (myself.clone(), myself.clone());
        let tasks = vec![
            tokio::spawn(async move {
                loop {
                    use tokio::sync::broadcast::error::RecvError;
                    match events.recv().await {
                        Ok(event) => drop(watcher.cast(Msg::Peer(event))),
                        Err(RecvError::Lagged(_)) => {}
                        Err(RecvError::Closed) => return,
                    }
                }
            }),
            tokio::spawn(async move {
                loop {
                    tokio::time::sleep(TICK).await;
                    let _ = ticker.cast(Msg::Input(Input::Tick));
                }
            }),
        ];
        Ok(State {
            node: args.node,
            core: args.core,
            router: args.router,
            impossible: args.impossible,
            begun: Instant::now(),
            tasks,
            _export: export,
        })
    }

    async fn handle(
        &self,
        myself: ActorRef<Msg>,
        msg: Msg,
        state: &mut State,
    ) -> Result<(), ActorProcessingErr> {
        crate::faulty::message(&state.node, ROLE, INSTANCE, msg.name()).await;
        let now = state.begun.elapsed();
        let outputs = match msg {
            Msg::Peer(PeerEvent::Up { peer }) => {
                describe(state.node.clone(), myself.clone(), peer);
                return Ok(());
            }
            Msg::Peer(PeerEvent::Down { peer, reason }) => {
                state.core.handle(now, Input::NodeDown { peer, reason })
            }
            // Loads, leads and retirements are calls; each reports its own failure.
            Msg::Peer(PeerEvent::Undelivered { .. }) => return Ok(()),
            Msg::Described(peer, description, hosted) => {
                state.core.handle(now, Input::NodeUp { peer, description, hosted })
            }
            Msg::Input(input) => state.core.handle(now, input),
            Msg::Status(reply) => {
                reply.send(PlacementReply::Status(state.core.states(now)));
                return Ok(());
            }
        };
        state.tell(&outputs);
        for output in outputs {
            state.perform(&myself, output);
        }
        Ok(())
    }

    async fn post_stop(
        &self,
        _: ActorRef<Msg>,
        state: &mut State,
    ) -> Result<(), ActorProcessingErr> {
        state.tasks.iter().for_each(|task| task.abort());
        Ok(())
    }
}

impl Msg {
    fn name(&self) -> &'static str {
        match self {
            Msg::Peer(PeerEvent::Up { .. }) => "PeerUp",
            Msg::Peer(PeerEvent::Down { .. }) => "PeerDown",
            Msg::Peer(PeerEvent::Undelivered { .. }) => "Undelivered",
            Msg::Described(..) => "Described",
            Msg::Input(input) => match input {
                Input::NodeUp { .. } => "NodeUp",
                Input::NodeDown { .. } => "NodeDown",
                Input::NodeDraining { .. } => "NodeDraining",
                Input::RouterRestarted => "RouterRestarted",
                Input::Loaded { .. } => "Loaded",
                Input::Leading { .. } => "Leading",
                Input::Broken { .. } => "ReplicaBroken",
                Input::Tick => "Tick",
            },
            Msg::Status(_) => "Status",
        }
    }
}

impl State {
    /// What a fault plan may wait for. An epoch is new with the first load of its plan.
    fn tell(&self, outputs: &[Output]) {
        let mut bumped = None;
        for output in outputs {
            let (name, subject, epoch) = match output {
                Output::Load { plan, .. } if bumped == Some(plan.epoch) => continue,
                Output::Load { plan, .. } => {
                    bumped = Some(plan.epoch);
                    (facts::EPOCH_BUMPED, plan.replica.clone(), plan.epoch)
                }
                Output::Up(info) => (facts::REPLICA_UP, info.replica.clone(), info.epoch),
                Output::Down { replica, epoch, reason, .. } => {
                    (facts::REPLICA_DOWN, format!("{replica}: {reason}"), *epoch)
                }
                _ => continue,
            };
            tell(&self.node, name, || subject, (epoch.0, 0));
        }
    }

    fn perform(&self, myself: &ActorRef<Msg>, output: Output) {
        match output {
            Output::Load { node, plan } => load(self.node.clone(), myself.clone(), node, plan),
            Output::Lead { node, plan } => lead(self.node.clone(), myself.clone(), node, plan),
            Output::Retire { node, replica, epoch } => {
                retire(self.node.clone(), node, replica, epoch)
            }
            Output::Up(info) => self.tell_router(RouterCast::ReplicaUp(info)),
            Output::Down { replica, epoch, reason, suspects } => {
                tracing::warn!(replica, epoch = epoch.0, reason, "replica is down");
                self.tell_router(RouterCast::ReplicaDown { replica, epoch, reason, suspects });
            }
            Output::Draining { replica, epoch } => {
                self.tell_router(RouterCast::ReplicaDraining { replica, epoch })
            }
            Output::Note(text) => tracing::info!("{text}"),
            Output::Impossible(text) => {
                tracing::error!("{text}");
                let _ = self.impossible.send(text);
            }
        }
    }

    fn tell_router(&self, cast: RouterCast) {
        // The router lives on this node; it is gone only while the whole head restarts.
        if let Err(error) = self.node.cast::<RouterProtocol>(&self.router, &cast) {
            tracing::warn!(%error, "could not tell the router");
        }
    }
}

/// Asks a node what it has, until it answers or its link goes down.
fn describe(node: Node, myself: ActorRef<Msg>, peer: Peer) {
    tokio::spawn(async move {
        let to = agent(&peer.node);
        for _ in 0..20 {
            match node.call::<AgentProtocol>(&to, &AgentCall::Describe, CALL_DEADLINE).await {
                Ok(AgentReply::Described { description, hosted }) => {
                    let _ = myself.cast(Msg::Described(peer, description, hosted));
                    return;
                }
                Ok(other) => tracing::warn!(node = %peer.node, ?other, "answered beside the point"),
                // Its link may be up a moment before its agent is.
                Err(error) => tracing::debug!(node = %peer.node, %error, "not described yet"),
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    });
}

fn load(node: Node, myself: ActorRef<Msg>, to: NodeName, plan: ReplicaPlan) {
    tokio::spawn(async move {
        let (replica, epoch) = (plan.replica.clone(), plan.epoch);
        let call = AgentCall::Load(Box::new(plan));
        let result = match node.call::<AgentProtocol>(&agent(&to), &call, LOAD_DEADLINE).await {
            Ok(AgentReply::Loaded(result)) => result,
            Ok(other) => Err(format!("answered {other:?} to a load")),
            Err(error) => Err(error.to_string()),
        };
        let _ = myself.cast(Msg::Input(Input::Loaded { replica, epoch, node: to, result }));
    });
}

fn lead(node: Node, myself: ActorRef<Msg>, to: NodeName, plan: ReplicaPlan) {
    tokio::spawn(async move {
        let (replica, epoch) = (plan.replica.clone(), plan.epoch);
        let call = AgentCall::Lead(Box::new(plan));
        let result = match node.call::<AgentProtocol>(&agent(&to), &call, CALL_DEADLINE).await {
            Ok(AgentReply::Leading(result)) => result,
            Ok(other) => Err(format!("answered {other:?} to a lead")),
            Err(error) => Err(error.to_string()),
        };
        let _ = myself.cast(Msg::Input(Input::Leading { replica, epoch, result }));
    });
}

fn retire(node: Node, to: NodeName, replica: String, epoch: ReplicaEpoch) {
    tokio::spawn(async move {
        let call = AgentCall::Retire { replica, epoch };
        if let Err(error) = node.call::<AgentProtocol>(&agent(&to), &call, CALL_DEADLINE).await {
            // Its epoch is stale from now on: whatever it still sends is refused.
            tracing::debug!(node = %to, %error, "retire was not heard");
        }
    });
}

/// The peers that have a link now.
pub fn up_peers(node: &Node) -> Vec<Peer> {
    let linked = node.peers().into_iter().filter(|p| p.up);
    linked.filter_map(|p| Some(Peer { node: p.node, incarnation: p.incarnation? })).collect()
}

fn agent(node: &NodeName) -> Address {
    Address { node: node.clone(), role: crate::host::AGENT_ROLE.into(), instance: "main".into() }
}

#[cfg(test)]
mod tests;
