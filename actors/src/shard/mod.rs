//! A shard: one stage (and tensor rank) of a replica on one device.
//!
//! The actor is a thin shell. It takes [`ShardCast::Run`] in step order, hands each batch to the
//! device thread (never a tokio worker), and reports the outcome: the last stage's first rank
//! sends `StepDone` to the scheduler; a failure of any shard breaks the replica, named with the
//! step and the requests that were in it, and ends the actor.
//!
//! Invariants: a batch of another epoch is refused and counted, a step out of order breaks the
//! replica, and activations are taken only if their epoch, step and plan hash are the batch's.
//! A shard knows nothing of queues, blocks' owners or clients.

mod device;
mod flows;

use crate::messages::{
    PlacementCast, PlacementProtocol, ReplicaEpoch, ReplicaPlan, RequestId, SchedulerCast,
    SchedulerProtocol, ShardCast, ShardProtocol,
};
use device::{Device, Job, Outcome};
use dunlin_model::engine::Engine;
use dunlin_runtime::{Address, Export, Inbound, Node};
use ractor::{Actor, ActorCell, ActorProcessingErr, ActorRef};
use std::time::Duration;

pub use flows::{FlowGroup, plan_hash};

/// Mailbox role of shards.
pub const ROLE: &str = "shard";

/// What a shard needs to run its place in `plan`.
pub struct ShardArgs {
    pub node: Node,
    pub plan: ReplicaPlan,
    /// Which of `plan.shards` this is.
    pub index: usize,
    pub engine: Box<dyn Engine>,
    pub scheduler: Address,
    pub placement: Address,
    /// How long a step may wait for another shard.
    pub step_deadline: Duration,
}

/// The mailbox address of shard `index` of `plan`.
pub fn address(plan: &ReplicaPlan, index: usize) -> Address {
    let place = &plan.shards[index];
    let instance = format!("{}/{}/{}", plan.replica, place.stage, place.spec.rank);
    Address { node: place.node.clone(), role: ROLE.into(), instance }
}

/// Starts the actor (and its device thread) under `supervisor`.
pub async fn start_shard(args: ShardArgs, supervisor: ActorCell) -> Result<ActorCell, String> {
    let (actor, _) = Actor::spawn_linked(None, ShardActor, args, supervisor)
        .await
        .map_err(|error| error.to_string())?;
    Ok(actor.get_cell())
}

struct ShardActor;

enum ShardMsg {
    Run(ShardCast),
    Outcome(Outcome),
}

struct ShardState {
    node: Node,
    epoch: ReplicaEpoch,
    replica: String,
    me: String,
    next_step: Option<u64>,
    device: Device,
    reports: bool,
    scheduler: Address,
    placement: Address,
    _export: Export,
}

impl Actor for ShardActor {
    type Msg = ShardMsg;
    type State = ShardState;
    type Arguments = ShardArgs;

    async fn pre_start(
        &self,
        myself: ActorRef<ShardMsg>,
        args: ShardArgs,
    ) -> Result<ShardState, ActorProcessingErr> {
        let own = address(&args.plan, args.index);
        let spec = &args.plan.shards[args.index].spec;
        let reports = spec.last && spec.rank == 0;
        let wires = flows::Wires::open(&args.node, &args.plan, args.index, args.step_deadline);
        let outcome = myself.clone();
        let device = Device::start(own.instance.clone(), args.engine, wires, move |result| {
            // The actor may be gone already; then nobody is left to tell.
            let _ = outcome.cast(ShardMsg::Outcome(result));
        })?;
        let inbox = myself.clone();
        let export = args.node.export::<ShardProtocol>(ROLE, &own.instance, move |inbound| {
            if let Inbound::Cast { msg, .. } = inbound {
                let _ = inbox.cast(ShardMsg::Run(msg));
            }
        })?;
        Ok(ShardState {
            node: args.node,
            epoch: args.plan.epoch,
            replica: args.plan.replica.clone(),
            me: own.to_string(),
            next_step: None,
            device,
            reports,
            scheduler: args.scheduler,
            placement: args.placement,
            _export: export,
        })
    }

    async fn handle(
        &self,
        _: ActorRef<ShardMsg>,
        msg: ShardMsg,
        state: &mut ShardState,
    ) -> Result<(), ActorProcessingErr> {
        match msg {
            ShardMsg::Run(ShardCast::Run { epoch, step, batch }) => {
                if epoch != state.epoch {
                    metrics::counter!("dunlin_stale_epoch_messages_total", "kind" => "run")
                        .increment(1);
                    tracing::debug!(shard = state.me, ?epoch, step, "refused a stale step");
                    return Ok(());
                }
                if state.next_step.is_some_and(|next| next != step) {
                    let reason =
                        format!("{}: got step {step}, expected {:?}", state.me, state.next_step);
                    return state.broken(reason, Vec::new());
                }
                state.next_step = Some(step + 1);
                state.device.run(Job { step, batch })?;
                Ok(())
            }
            ShardMsg::Outcome(Outcome::Done { step, sampled, micros }) => {
                if !state.reports {
                    return Ok(());
                }
                let done = SchedulerCast::StepDone { epoch: state.epoch, step, sampled, micros };
                match state.node.cast::<SchedulerProtocol>(&state.scheduler, &done) {
                    Ok(()) => Ok(()),
                    Err(error) => state.broken(format!("{}: {error}", state.me), Vec::new()),
                }
            }
            ShardMsg::Outcome(Outcome::Failed { step, reason, suspects }) => {
                let reason = format!("{}: step {step}: {reason}", state.me);
                let failed =
                    SchedulerCast::StepFailed { epoch: state.epoch, step, reason: reason.clone() };
                // The scheduler only stops planning; placement is what mends the replica.
                let _ = state.node.cast::<SchedulerProtocol>(&state.scheduler, &failed);
                state.broken(reason, suspects)
            }
        }
    }

    async fn post_stop(
        &self,
        _: ActorRef<ShardMsg>,
        state: &mut ShardState,
    ) -> Result<(), ActorProcessingErr> {
        state.device.stop();
        Ok(())
    }
}

impl ShardState {
    /// Reports the replica as broken and ends this actor with the same reason.
    fn broken(
        &mut self,
        reason: String,
        suspects: Vec<RequestId>,
    ) -> Result<(), ActorProcessingErr> {
        tracing::warn!(shard = self.me, reason, "shard failed");
        let cast = PlacementCast::ReplicaBroken {
            replica: self.replica.clone(),
            epoch: self.epoch,
            reason: reason.clone(),
            suspects,
        };
        if let Err(error) = self.node.cast::<PlacementProtocol>(&self.placement, &cast) {
            tracing::warn!(shard = self.me, %error, "could not tell placement");
        }
        Err(reason.into())
    }
}
