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

mod checked;
mod device;
mod drawn;
mod faulty;
mod feedback;
mod flows;
mod inline;
mod watch;

use crate::engines::Compute;
use crate::facts::{self, tell};
use crate::lease::LeaseGuard;
use crate::messages::{
    PlacementCast, PlacementProtocol, ReplicaEpoch, ReplicaPlan, RequestId, SchedulerCast,
    SchedulerProtocol, ShardCast, ShardProtocol,
};
use device::{Device, Job, Outcome, Scrub};
use dunlin_model::engine::Engine;
use dunlin_runtime::{Address, Export, Inbound, Node};
use feedback::Feedback;
use ractor::{Actor, ActorCell, ActorProcessingErr, ActorRef};
use std::time::Duration;
use watch::{Look, Watch};

pub use drawn::Drawn;
pub use faulty::build as build_engine;
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
    /// Weights in memory are looked at again after so long.
    pub scrub: Option<Duration>,
    pub compute: Compute,
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
    /// Time to look whether the device still moves.
    Look,
}

struct ShardState {
    node: Node,
    epoch: ReplicaEpoch,
    replica: String,
    me: String,
    /// `REPLICA/STAGE/RANK`
    instance: String,
    next_step: Option<u64>,
    watch: Watch,
    device: Device,
    lease: LeaseGuard,
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
        // A shard that waits gives the one it waits for the time to speak for itself.
        let patience = args.step_deadline + args.step_deadline / 8;
        let wires = flows::Wires::open(&args.node, &args.plan, args.index, patience);
        let doing = wires.doing();
        let feedback =
            Feedback::open(&args.node, &args.plan, args.index, (patience, doing.clone()));
        let outcome = myself.clone();
        let engine = faulty::wrap(&args.node, &args.plan, args.index, args.engine);
        let (node, me) = (args.node.clone(), own.to_string());
        let report = move |result: Outcome| {
            let step = result.step();
            // A device that hung may come back when its actor is gone: its result is refused.
            if outcome.cast(ShardMsg::Outcome(result)).is_err() {
                metrics::counter!("dunlin_stale_epoch_messages_total", "kind" => "outcome")
                    .increment(1);
                tell(&node, facts::STALE_REFUSED, || format!("outcome of {me}"), (step, 1));
            }
        };
        let how = (args.compute, Scrub::new(args.scrub));
        let device = Device::start(own.instance.clone(), engine, (wires, feedback), how, report)?;
        let lease = LeaseGuard::new(&args.node);
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
            instance: own.instance,
            next_step: None,
            watch: Watch::new(args.step_deadline, doing),
            device,
            lease,
            reports,
            scheduler: args.scheduler,
            placement: args.placement,
            _export: export,
        })
    }

    async fn handle(
        &self,
        myself: ActorRef<ShardMsg>,
        msg: ShardMsg,
        state: &mut ShardState,
    ) -> Result<(), ActorProcessingErr> {
        crate::faulty::message(&state.node, ROLE, &state.instance, msg.name()).await;
        match msg {
            ShardMsg::Run(ShardCast::Run { epoch, step, batch, claims, drawn }) => {
                if epoch != state.epoch {
                    metrics::counter!("dunlin_stale_epoch_messages_total", "kind" => "run")
                        .increment(1);
                    tracing::debug!(shard = state.me, ?epoch, step, "refused a stale step");
                    tell(&state.node, facts::STALE_REFUSED, || "run".into(), (step, 1));
                    return Ok(());
                }
                if state.next_step.is_some_and(|next| next != step) {
                    let reason =
                        format!("{}: got step {step}, expected {:?}", state.me, state.next_step);
                    return state.broken(reason, Vec::new());
                }
                if let Err(reason) = state.lease.check() {
                    let reason = format!("{}: step {step}: {reason}", state.me);
                    return state.broken(reason, Vec::new());
                }
                state.next_step = Some(step + 1);
                let requests = batch.seqs.iter().map(|seq| RequestId(seq.request)).collect();
                if let Some(wait) = state.watch.given(step, requests) {
                    myself.send_after(wait, || ShardMsg::Look);
                }
                state.device.run(Job { step, batch, claims, drawn })?;
                Ok(())
            }
            ShardMsg::Look => match state.watch.look() {
                Look::Idle => Ok(()),
                Look::Again(wait) => {
                    myself.send_after(wait, || ShardMsg::Look);
                    Ok(())
                }
                Look::Stalled { step, text, suspects } => {
                    let reason = format!("{}: step {step}: {text}", state.me);
                    tell(&state.node, facts::STEP_FAILED, || reason.clone(), (step, 0));
                    state.broken(reason, suspects)
                }
            },
            ShardMsg::Outcome(Outcome::Done { step, sampled, micros }) => {
                state.watch.done();
                tell(&state.node, facts::STEP_DONE, || state.instance.clone(), (step, micros));
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
                tell(&state.node, facts::STEP_FAILED, || reason.clone(), (step, 0));
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

impl ShardMsg {
    fn name(&self) -> &'static str {
        match self {
            ShardMsg::Run(_) => "Run",
            ShardMsg::Look => "Look",
            ShardMsg::Outcome(Outcome::Done { .. }) => "StepDone",
            ShardMsg::Outcome(Outcome::Failed { .. }) => "StepFailed",
        }
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
