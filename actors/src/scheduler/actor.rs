//! The actor around the scheduler: receives, calls the core, sends what it returned.
//!
//! Steps go to every shard of the replica, events to the router. What cannot be sent breaks the
//! replica: placement is told, the actor ends, and so does this node's part of the replica. A load
//! report or a cache event that is lost costs nothing but a worse choice by the router.

use super::config::SchedulerConfig;
use super::core::{Input, Measure, Output, Scheduler};
use crate::facts::{self, tell};
use crate::kv::SharedKv;
use crate::lease::LeaseGuard;
use crate::messages::{
    LoadReport, PlacementCast, PlacementProtocol, ReplicaPlan, RequestId, RouterCast,
    RouterProtocol, SchedulerCall, SchedulerCast, SchedulerEvent, SchedulerProtocol,
    SchedulerReply, ShardCast, ShardProtocol,
};
use dunlin_runtime::{Address, CastError, Export, Inbound, Node, PeerEvent, ReplyPort, mutated};
use metrics::{Counter, Gauge, Histogram};
use ractor::{Actor, ActorCell, ActorProcessingErr, ActorRef};
use std::time::Duration;
use tokio::sync::broadcast::error::RecvError;
use tokio::time::Instant;

/// Mailbox role of schedulers; the instance is the replica's name.
pub const ROLE: &str = "scheduler";

/// Also bounds how long gauges lag behind after everything was cancelled.
const TICK: Duration = Duration::from_millis(100);

/// Steps from one audit to the next, while a fault plan is armed.
const AUDIT_EVERY: u64 = 8;

pub struct SchedulerArgs {
    pub node: Node,
    pub plan: ReplicaPlan,
    pub config: SchedulerConfig,
    /// Context length of the model, in tokens.
    pub context: usize,
    pub kv: SharedKv,
    /// As `plan.shards`.
    pub shards: Vec<Address>,
    pub router: Address,
    pub placement: Address,
}

/// Starts the actor under `supervisor`. It is reachable as `scheduler/REPLICA` of this node.
pub async fn start_scheduler(
    args: SchedulerArgs,
    supervisor: ActorCell,
) -> Result<ActorCell, String> {
    let (actor, _) = Actor::spawn_linked(None, SchedulerActor, args, supervisor)
        .await
        .map_err(|error| error.to_string())?;
    Ok(actor.get_cell())
}

struct SchedulerActor;

enum Msg {
    Cast(SchedulerCast),
    Call(SchedulerCall, ReplyPort<SchedulerReply>),
    Tick,
    /// A cast to this address did not reach its actor.
    Undelivered(String),
}

struct State {
    core: Scheduler,
    started: Instant,
    node: Node,
    plan: ReplicaPlan,
    kv: SharedKv,
    shards: Vec<Address>,
    router: Address,
    placement: Address,
    meters: Meters,
    lease: LeaseGuard,
    _export: Export,
}

impl Actor for SchedulerActor {
    type Msg = Msg;
    type State = State;
    type Arguments = SchedulerArgs;

    async fn pre_start(
        &self,
        myself: ActorRef<Msg>,
        args: SchedulerArgs,
    ) -> Result<State, ActorProcessingErr> {
        let batch_tokens = args.plan.shards.iter().map(|place| place.spec.max_tokens).min();
        let context = u32::try_from(args.context).unwrap_or(u32::MAX);
        let stages = args.plan.stages;
        let limits = args.config.limits(stages, batch_tokens.unwrap_or(1), context);
        let inbox = myself.clone();
        let export =
            args.node.export::<SchedulerProtocol>(ROLE, &args.plan.replica, move |inbound| {
                // Fails only if the actor has ended; the export goes with it.
                let _ = match inbound {
                    Inbound::Cast { msg, .. } => inbox.cast(Msg::Cast(msg)),
                    Inbound::Call { msg, reply, .. } => inbox.cast(Msg::Call(msg, reply)),
                };
            })?;
        watch(&args.node, args.shards.clone(), myself.clone());
        drop(myself.send_interval(TICK, || Msg::Tick));
        let mut core = Scheduler::new(args.plan.epoch, limits);
        let (last, earlier) = stage_names(&args.plan);
        core.name_stages(last, earlier);
        Ok(State {
            core,
            started: Instant::now(),
            meters: Meters::new(args.node.name().as_str(), &args.plan.replica),
            lease: LeaseGuard::new(&args.node),
            node: args.node,
            plan: args.plan,
            kv: args.kv,
            shards: args.shards,
            router: args.router,
            placement: args.placement,
            _export: export,
        })
    }

    async fn handle(
        &self,
        _: ActorRef<Msg>,
        msg: Msg,
        state: &mut State,
    ) -> Result<(), ActorProcessingErr> {
        crate::faulty::message(&state.node, ROLE, &state.plan.replica, msg.name()).await;
        match msg {
            Msg::Cast(cast) => state.input(cast.into()),
            Msg::Tick => state.input(Input::Tick),
            Msg::Undelivered(reason) if !state.core.is_broken() => state.broken(reason, Vec::new()),
            Msg::Undelivered(_) => Ok(()),
            Msg::Call(SchedulerCall::Status, reply) => {
                reply.send(SchedulerReply::Status(state.core.load(&state.kv.lock())));
                Ok(())
            }
            Msg::Call(SchedulerCall::Audit, reply) => {
                let result = state.core.audit(&state.kv.lock());
                if let Err(wrong) = &result {
                    let who = || format!("scheduler {}: {}", state.plan.replica, wrong.join("; "));
                    tell(&state.node, facts::AUDIT_FAILED, who, (0, 0));
                }
                reply.send(SchedulerReply::Audit(result));
                Ok(())
            }
        }
    }

    async fn post_stop(
        &self,
        _: ActorRef<Msg>,
        state: &mut State,
    ) -> Result<(), ActorProcessingErr> {
        state.meters.running.set(0.0);
        state.meters.waiting.set(0.0);
        Ok(())
    }
}

impl Msg {
    fn name(&self) -> &'static str {
        match self {
            Msg::Cast(SchedulerCast::Submit { .. }) => "Submit",
            Msg::Cast(SchedulerCast::Cancel { .. }) => "Cancel",
            Msg::Cast(SchedulerCast::StepDone { .. }) => "StepDone",
            Msg::Cast(SchedulerCast::StepFailed { .. }) => "StepFailed",
            Msg::Call(SchedulerCall::Status, _) => "Status",
            Msg::Call(SchedulerCall::Audit, _) => "Audit",
            Msg::Tick => "Tick",
            Msg::Undelivered(_) => "Undelivered",
        }
    }
}

/// What messages call the last stage of the plan, and those before it.
fn stage_names(plan: &ReplicaPlan) -> (String, String) {
    let stage = |s: usize| {
        let places = plan.shards.iter().filter(|place| place.stage == s);
        let at: Vec<_> = places.map(|p| format!("{}/{}", p.node, p.device)).collect();
        let layers = plan.shards.iter().find(|p| p.stage == s).map(|p| p.spec.layers.clone());
        let layers = layers.unwrap_or_default();
        format!("stage {s} (layers {}..{} on {})", layers.start, layers.end, at.join(", "))
    };
    let last = plan.stages.saturating_sub(1);
    let earlier: Vec<_> = (0..last).map(stage).collect();
    (stage(last), earlier.join(" or "))
}

/// Passes on casts to shards that were accepted but did not arrive. Ends with the actor.
fn watch(node: &Node, shards: Vec<Address>, myself: ActorRef<Msg>) {
    let mut events = node.watch();
    tokio::spawn(async move {
        loop {
            let event = tokio::select! {
                biased;
                event = events.recv() => event,
                _ = myself.wait(None) => return,
            };
            let error = match event {
                Ok(PeerEvent::Undelivered { error }) if shards.contains(target(&error)) => error,
                Ok(_) | Err(RecvError::Lagged(_)) => continue,
                Err(RecvError::Closed) => return,
            };
            if myself.cast(Msg::Undelivered(error.to_string())).is_err() {
                return;
            }
        }
    });
}

fn target(error: &CastError) -> &Address {
    match error {
        CastError::NodeDown { to, .. }
        | CastError::ActorDown { to }
        | CastError::Decode { to, .. }
        | CastError::Overloaded { to, .. }
        | CastError::Version { to, .. }
        | CastError::TooBig { to, .. }
        | CastError::Encode { to, .. } => to,
    }
}

impl State {
    fn input(&mut self, input: Input) -> Result<(), ActorProcessingErr> {
        self.lease.check().or_else(|reason| self.broken(reason, Vec::new()))?;
        let now = self.started.elapsed();
        let (kind, refused) = (kind(&input), self.core.refused_total());
        let (outputs, load, evicted) = {
            let mut kv = self.kv.lock();
            let evicted = kv.evicted_total();
            let outputs = self.core.handle(&mut kv, now, input);
            (outputs, self.core.load(&kv), kv.evicted_total() - evicted)
        };
        self.meters.load(&load);
        if evicted > 0 {
            let subject = || self.plan.replica.clone();
            tell(&self.node, facts::EVICTED, subject, (0, evicted));
        }
        let refused = self.core.refused_total() - refused;
        if refused > 0 {
            metrics::counter!("dunlin_stale_epoch_messages_total", "kind" => kind)
                .increment(refused);
            tell(&self.node, facts::STALE_REFUSED, || kind.into(), (0, refused));
        }
        // The device before the router: it is what everyone waits for.
        let (mut events, mut outcome) = (Vec::new(), Ok(()));
        for output in outputs {
            match output {
                Output::Run { step, batch, claims, drawn } => {
                    let epoch = self.plan.epoch;
                    let run = ShardCast::Run { epoch, step, batch, claims, drawn };
                    outcome = outcome.and_then(|()| self.run(run));
                }
                Output::Event(event) => events.push(event),
                Output::Measured(Measure::Preempted { request }) => {
                    tell(&self.node, facts::PREEMPTED, String::new, (request.0, 0));
                }
                Output::Measured(Measure::PrefixHit { request, tokens }) => {
                    let key = (request.0, tokens.into());
                    tell(&self.node, facts::PREFIX_HIT, String::new, key);
                }
                Output::Measured(measure) => self.meters.measure(measure),
                Output::Halted { reason } => {
                    tracing::warn!(replica = self.plan.replica, reason, "planning stopped");
                }
                Output::Broken { reason, suspects } => {
                    outcome = outcome.and_then(|()| self.broken(reason, suspects));
                }
            }
        }
        let told = if events.is_empty() { Ok(()) } else { self.tell_router(events) };
        outcome.and(told)
    }

    fn run(&mut self, run: ShardCast) -> Result<(), ActorProcessingErr> {
        let ShardCast::Run { step, ref batch, .. } = run;
        let (seqs, tokens) = (batch.seqs.len(), batch.tokens());
        let span = tracing::debug_span!("step", replica = self.plan.replica, step, seqs, tokens);
        let _entered = span.enter();
        tracing::debug!(copies = batch.copies.len(), "planned");
        let planned = (step, tokens as u64);
        tell(&self.node, facts::STEP_PLANNED, || self.plan.replica.clone(), planned);
        if step.is_multiple_of(AUDIT_EVERY) && self.node.faults().is_armed() {
            self.look_at_books();
        }
        for (index, shard) in self.shards.iter().enumerate() {
            // A deliberate bug: shards are told unlike plans, and their hash is not compared.
            let unlike = (mutated("skip-plan-hash") && index + 1 < self.shards.len()).then(|| {
                let ShardCast::Run { epoch, step, mut batch, mut claims, drawn } = run.clone();
                batch.seqs.reverse();
                claims.reverse();
                ShardCast::Run { epoch, step, batch, claims, drawn }
            });
            let run = unlike.as_ref().unwrap_or(&run);
            if let Err(error) = self.node.cast::<ShardProtocol>(shard, run) {
                return self.broken(format!("step {step}: {error}"), Vec::new());
            }
        }
        Ok(())
    }

    /// Every so often while a fault plan is armed.
    fn look_at_books(&self) {
        if let Err(wrong) = self.core.audit(&self.kv.lock()) {
            let who = || format!("scheduler {}: {}", self.plan.replica, wrong.join("; "));
            tell(&self.node, facts::AUDIT_FAILED, who, (0, 0));
        }
    }

    fn tell_router(&mut self, events: Vec<SchedulerEvent>) -> Result<(), ActorProcessingErr> {
        let spare = events.iter().all(|event| {
            matches!(event, SchedulerEvent::Load(_) | SchedulerEvent::KvEvents { .. })
        });
        let (replica, epoch) = (self.plan.replica.clone(), self.plan.epoch);
        let cast = RouterCast::Scheduler { replica, epoch, events };
        match self.node.cast::<RouterProtocol>(&self.router, &cast) {
            Ok(()) => Ok(()),
            Err(error) if spare => {
                tracing::debug!(%error, "a load report was lost");
                Ok(())
            }
            Err(error) => self.broken(error.to_string(), Vec::new()),
        }
    }

    /// Tells placement, and ends this actor with the same reason.
    fn broken(&self, reason: String, suspects: Vec<RequestId>) -> Result<(), ActorProcessingErr> {
        let replica = self.plan.replica.clone();
        let reason = match self.core.steps_in_flight().next() {
            // The last stage reports; what it waits for, only its own log can say.
            Some(step) => {
                let last = self.plan.shards.last();
                let waits = last.map(|p| format!("stage {} on {}/{}", p.stage, p.node, p.device));
                format!("{reason} (step {step} waits for {})", waits.unwrap_or_default())
            }
            None => reason,
        };
        tracing::warn!(replica, reason, "replica broken");
        let epoch = self.plan.epoch;
        let cast =
            PlacementCast::ReplicaBroken { replica, epoch, reason: reason.clone(), suspects };
        if let Err(error) = self.node.cast::<PlacementProtocol>(&self.placement, &cast) {
            tracing::warn!(%error, "could not tell placement");
        }
        Err(reason.into())
    }
}

/// What a refused input is counted as.
fn kind(input: &Input) -> &'static str {
    match input {
        Input::Submit { .. } => "submit",
        Input::Cancel { .. } => "cancel",
        Input::StepDone { .. } => "step_done",
        Input::StepFailed { .. } => "step_failed",
        Input::Tick => "tick",
    }
}

impl From<SchedulerCast> for Input {
    fn from(cast: SchedulerCast) -> Self {
        match cast {
            SchedulerCast::Submit { epoch, work } => Input::Submit { epoch, work },
            SchedulerCast::Cancel { epoch, request, attempt } => {
                Input::Cancel { epoch, request, attempt }
            }
            SchedulerCast::StepDone { epoch, step, sampled, micros } => {
                Input::StepDone { epoch, step, sampled, micros }
            }
            SchedulerCast::StepFailed { epoch, step, reason } => {
                Input::StepFailed { epoch, step, reason }
            }
        }
    }
}

/// Handles of this replica's metrics.
struct Meters {
    running: Gauge,
    waiting: Gauge,
    usage: Gauge,
    preemptions: Counter,
    queries: Counter,
    hits: Counter,
    queue_time: Histogram,
    prefill_time: Histogram,
    step_tokens: Histogram,
    step_time: Histogram,
    device_time: Histogram,
    last: LoadReport,
}

impl Meters {
    fn new(node: &str, replica: &str) -> Self {
        let labels = [("node", node.to_string()), ("replica", replica.to_string())];
        let labels = &labels;
        Self {
            running: metrics::gauge!("dunlin_num_requests_running", labels),
            waiting: metrics::gauge!("dunlin_num_requests_waiting", labels),
            usage: metrics::gauge!("dunlin_kv_cache_usage_perc", labels),
            preemptions: metrics::counter!("dunlin_num_preemptions_total", labels),
            queries: metrics::counter!("dunlin_prefix_cache_queries_total", labels),
            hits: metrics::counter!("dunlin_prefix_cache_hits_total", labels),
            queue_time: metrics::histogram!("dunlin_request_queue_time_seconds", labels),
            prefill_time: metrics::histogram!("dunlin_request_prefill_time_seconds", labels),
            step_tokens: metrics::histogram!("dunlin_iteration_tokens_total", labels),
            step_time: metrics::histogram!("dunlin_step_seconds", labels),
            device_time: metrics::histogram!("dunlin_step_device_seconds", labels),
            last: LoadReport::default(),
        }
    }

    fn load(&mut self, load: &LoadReport) {
        self.running.set(f64::from(load.running));
        self.waiting.set(f64::from(load.waiting));
        self.usage.set(load.kv_blocks_live as f64 / load.kv_blocks_total as f64);
        let rise = |now: u64, then: u64| now.saturating_sub(then);
        self.preemptions.increment(rise(load.preemptions_total, self.last.preemptions_total));
        self.queries.increment(rise(load.prefix_queries_total, self.last.prefix_queries_total));
        self.hits.increment(rise(load.prefix_hits_total, self.last.prefix_hits_total));
        self.last = load.clone();
    }

    fn measure(&self, measure: Measure) {
        match measure {
            Measure::Queued(took) => self.queue_time.record(took),
            Measure::Prefilled(took) => self.prefill_time.record(took),
            Measure::Step { tokens, took, micros } => {
                self.step_tokens.record(tokens as f64);
                self.step_time.record(took);
                self.device_time.record(Duration::from_micros(micros));
            }
            Measure::Ended(_) | Measure::Preempted { .. } | Measure::PrefixHit { .. } => {}
        }
    }
}
