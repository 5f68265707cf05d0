//! The actor around the core: mailbox, clock, sending, metrics.
//!
//! What it adds to the core: a cast that cannot be sent comes back to the core as an input, so
//! that nothing waits for what never left; and events for a gateway whose link is lost are kept
//! for as long as the same life of that node may come back, then its requests are cancelled.

use super::{Input, Note, Output, Router, RouterConfig};
use crate::facts::{self, tell};
use crate::messages::{
    GatewayCast, GatewayProtocol, ReplicaEpoch, RouterCall, RouterCast, RouterProtocol,
    RouterReply, SchedulerCast, SchedulerEvent, SchedulerProtocol, StreamEvent,
};
use dunlin_runtime::{
    Address, CastError, Export, Inbound, Incarnation, Node, NodeName, PeerEvent, ReplyPort,
};
use ractor::{Actor, ActorCell, ActorProcessingErr, ActorRef};
use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;
use tokio::sync::broadcast::error::RecvError;
use tokio::time::Instant;

/// Mailbox role and instance of the router.
pub const ROLE: &str = "router";
pub const INSTANCE: &str = "main";

/// How long a lost gateway node may take to come back in the same life.
const GATEWAY_GRACE: Duration = Duration::from_secs(5);
/// Events kept for one such node, at most; beyond it the node counts as gone.
const KEPT_EVENTS: usize = 16_384;

/// What a router needs.
pub struct RouterArgs {
    pub node: Node,
    pub config: RouterConfig,
}

/// Starts the actor under `supervisor` and exports its mailbox.
pub async fn start_router(args: RouterArgs, supervisor: ActorCell) -> Result<ActorCell, String> {
    let (actor, _) = Actor::spawn_linked(None, RouterActor, args, supervisor)
        .await
        .map_err(|error| error.to_string())?;
    Ok(actor.get_cell())
}

struct RouterActor;

enum Msg {
    Input(Input),
    Scheduler {
        replica: String,
        epoch: ReplicaEpoch,
        events: Vec<SchedulerEvent>,
    },
    Call(Input, ReplyPort<RouterReply>),
    Peer(PeerEvent),
    /// The link events were lost by lagging behind: look at the peers themselves.
    PeersUnknown,
    Wakeup,
    /// The grace of a gateway's node is over, unless it is linked again.
    GatewayGrace(Lost),
}

/// A life of a gateway's node that was last seen at this time of the router's clock.
struct Lost {
    node: NodeName,
    life: Incarnation,
    at: Duration,
}

struct State {
    myself: ActorRef<Msg>,
    node: Node,
    core: Router,
    clock: Instant,
    /// When the next [`Msg::Wakeup`] comes.
    armed: Option<Duration>,
    /// Events for gateways that are away, oldest first.
    kept: BTreeMap<NodeName, VecDeque<(Address, GatewayCast)>>,
    spans: BTreeMap<u64, tracing::Span>,
    _export: Export,
}

impl Actor for RouterActor {
    type Msg = Msg;
    type State = State;
    type Arguments = RouterArgs;

    async fn pre_start(
        &self,
        myself: ActorRef<Msg>,
        args: RouterArgs,
    ) -> Result<State, ActorProcessingErr> {
        tokio::spawn(watch_peers(args.node.clone(), myself.clone()));
        let inbox = myself.clone();
        let export = args.node.export::<RouterProtocol>(ROLE, INSTANCE, move |inbound| {
            // A router that is gone drops the port, and the caller learns of it.
            let _ = inbox.cast(match inbound {
                Inbound::Cast { msg, .. } => cast_msg(msg),
                Inbound::Call { msg, reply, .. } => Msg::Call(call_input(msg), reply),
            });
        })?;
        Ok(State {
            myself,
            node: args.node,
            core: Router::new(args.config),
            clock: Instant::now(),
            armed: None,
            kept: BTreeMap::new(),
            spans: BTreeMap::new(),
            _export: export,
        })
    }

    async fn handle(
        &self,
        _: ActorRef<Msg>,
        msg: Msg,
        state: &mut State,
    ) -> Result<(), ActorProcessingErr> {
        crate::faulty::message(&state.node, ROLE, INSTANCE, msg.name()).await;
        match msg {
            Msg::Input(input) => state.feed(input, None),
            Msg::Scheduler { replica, epoch, events } => {
                for event in events {
                    let replica = replica.clone();
                    state.feed(Input::Scheduler { replica, epoch, event }, None);
                }
            }
            Msg::Call(input, reply) => state.feed(input, Some(reply)),
            Msg::Peer(event) => state.peer(event),
            Msg::PeersUnknown => state.recheck(),
            Msg::Wakeup => {
                state.armed = None;
                state.feed(Input::Tick, None);
            }
            Msg::GatewayGrace(lost) => state.grace_over(lost),
        }
        state.arm();
        Ok(())
    }
}

impl Msg {
    fn name(&self) -> &'static str {
        match self {
            Msg::Input(input) | Msg::Call(input, _) => match input {
                Input::Submit(_) => "Submit",
                Input::Status => "Status",
                Input::Drain => "Drain",
                Input::Cancel { .. } => "Cancel",
                Input::Scheduler { .. } => "Scheduler",
                Input::ReplicaUp(_) => "ReplicaUp",
                Input::ReplicaDown { .. } => "ReplicaDown",
                Input::ReplicaDraining { .. } => "ReplicaDraining",
                Input::GatewayDown { .. } => "GatewayDown",
                Input::Unreachable { .. } => "Unreachable",
                Input::Undeliverable(_) => "Undeliverable",
                Input::Tick => "Tick",
            },
            Msg::Scheduler { .. } => "Scheduler",
            Msg::Peer(_) => "Peer",
            Msg::PeersUnknown => "PeersUnknown",
            Msg::Wakeup => "Wakeup",
            Msg::GatewayGrace(_) => "GatewayGrace",
        }
    }
}

fn cast_msg(cast: RouterCast) -> Msg {
    Msg::Input(match cast {
        RouterCast::Cancel { request, stopped } => Input::Cancel { request, stopped },
        RouterCast::Scheduler { replica, epoch, events } => {
            return Msg::Scheduler { replica, epoch, events };
        }
        RouterCast::ReplicaUp(info) => Input::ReplicaUp(info),
        RouterCast::ReplicaDown { replica, epoch, reason, suspects } => {
            Input::ReplicaDown { replica, epoch, reason, suspects }
        }
        RouterCast::ReplicaDraining { replica, epoch } => Input::ReplicaDraining { replica, epoch },
    })
}

fn call_input(call: RouterCall) -> Input {
    match call {
        RouterCall::Submit(request) => Input::Submit(request),
        RouterCall::Status => Input::Status,
        RouterCall::Drain => Input::Drain,
    }
}

/// Ends with the actor or the node.
async fn watch_peers(node: Node, router: ActorRef<Msg>) {
    let mut events = node.watch();
    drop(node);
    loop {
        let msg = match events.recv().await {
            Ok(event) => Msg::Peer(event),
            Err(RecvError::Lagged(_)) => Msg::PeersUnknown,
            Err(RecvError::Closed) => return,
        };
        if router.cast(msg).is_err() {
            return;
        }
    }
}

impl State {
    /// Runs the core until it has nothing left to say: sending may fail, which is input again.
    fn feed(&mut self, input: Input, mut reply: Option<ReplyPort<RouterReply>>) {
        let mut inputs = VecDeque::from([input]);
        while let Some(input) = inputs.pop_front() {
            let now = self.clock.elapsed();
            for output in self.core.handle(now, input) {
                match output {
                    Output::Reply(answer) => {
                        if let Some(port) = reply.take() {
                            port.send(answer);
                        }
                    }
                    Output::Send { to, cast } => inputs.extend(self.send(&to, cast)),
                    Output::Deliver { to, cast } => inputs.extend(self.deliver(to, cast)),
                    Output::Note(note) => self.note(&note),
                }
            }
        }
        let (open, waiting) = self.core.open_and_waiting();
        metrics::gauge!("dunlin_router_requests_open").set(open as f64);
        metrics::gauge!("dunlin_router_requests_waiting").set(waiting as f64);
    }

    fn send(&mut self, to: &Address, cast: SchedulerCast) -> Option<Input> {
        let error = self.node.cast::<SchedulerProtocol>(to, &cast).err()?;
        count_failed(&error);
        tracing::warn!(%error, "a scheduler could not be reached");
        match cast {
            SchedulerCast::Submit { work, .. } => Some(Input::Unreachable {
                request: work.request,
                attempt: work.attempt,
                reason: error.to_string(),
            }),
            // A scheduler that goes on with cancelled work is told again by its next report.
            _ => None,
        }
    }

    fn deliver(&mut self, to: Address, cast: GatewayCast) -> Option<Input> {
        self.tell_delivery(&cast);
        self.post(to, cast)
    }

    fn post(&mut self, to: Address, cast: GatewayCast) -> Option<Input> {
        let GatewayCast::Event { request, .. } = &cast;
        let request = *request;
        // Behind what is kept already, or the order breaks.
        if let Some(kept) = self.kept.get_mut(&to.node) {
            kept.push_back((to, cast));
            return (kept.len() > KEPT_EVENTS).then_some(Input::Undeliverable(request));
        }
        let error = self.node.cast::<GatewayProtocol>(&to, &cast).err()?;
        count_failed(&error);
        let peer = self.node.peers().into_iter().find(|peer| peer.node == to.node);
        if let CastError::NodeDown { .. } = error
            && let Some(life) = peer.and_then(|peer| peer.incarnation)
        {
            self.lost(to.node.clone(), life);
            self.kept.entry(to.node.clone()).or_default().push_back((to, cast));
            return None;
        }
        tracing::warn!(request = request.0, %error, "a gateway could not be reached");
        Some(Input::Undeliverable(request))
    }

    fn tell_delivery(&self, cast: &GatewayCast) {
        let GatewayCast::Event { request, event } = cast;
        let ended = |subject: &dyn Fn() -> String| {
            tell(&self.node, facts::REQUEST_ENDED, subject, (request.0, 0));
        };
        match event {
            StreamEvent::PromptLogprobs(_) => {}
            StreamEvent::Tokens { position, ids, .. } => {
                for at in (u64::from(*position)..).take(ids.len()) {
                    tell(&self.node, facts::TOKEN_DELIVERED, String::new, (request.0, at));
                }
            }
            StreamEvent::Finished { .. } => ended(&|| "finished".into()),
            StreamEvent::Cancelled { .. } => ended(&|| "cancelled".into()),
            StreamEvent::Failed { code, .. } => ended(&|| format!("{code:?}")),
        }
    }

    fn peer(&mut self, event: PeerEvent) {
        match event {
            PeerEvent::Up { peer } => self.flush(&peer.node),
            PeerEvent::Down { peer, .. } => self.lost(peer.node, peer.incarnation),
            PeerEvent::Undelivered { error } => {
                count_failed(&error);
                if let CastError::ActorDown { to } = error
                    && to.role == "gateway"
                {
                    let lost = self.clock.elapsed();
                    self.feed(Input::GatewayDown { node: to.node, lost }, None);
                }
            }
        }
    }

    fn lost(&mut self, node: NodeName, life: Incarnation) {
        let at = self.clock.elapsed();
        self.myself.send_after(GATEWAY_GRACE, move || Msg::GatewayGrace(Lost { node, life, at }));
    }

    /// Sends what was kept, up to the next failure.
    fn flush(&mut self, node: &NodeName) {
        let Some(kept) = self.kept.remove(node) else { return };
        for (to, cast) in kept {
            if let Some(input) = self.post(to, cast) {
                self.feed(input, None);
            }
        }
    }

    /// A gateway in a new life knows nothing of the old one's requests; one that stays away has
    /// no clients any more.
    fn grace_over(&mut self, lost: Lost) {
        let Lost { node, life, at } = lost;
        let peers = self.node.peers();
        let back = peers.iter().any(|p| p.node == node && p.up && p.incarnation == Some(life));
        if !back {
            self.kept.remove(&node);
            self.feed(Input::GatewayDown { node, lost: at }, None);
        }
    }

    fn recheck(&mut self) {
        for peer in self.node.peers() {
            if peer.up {
                self.flush(&peer.node);
            }
        }
    }

    fn arm(&mut self) {
        let Some(at) = self.core.next_wakeup() else { return };
        if self.armed.is_none_or(|armed| at < armed) {
            self.armed = Some(at);
            let wait = at.saturating_sub(self.clock.elapsed());
            self.myself.send_after(wait, || Msg::Wakeup);
        }
    }

    /// Metrics count, logs tell; the request's span holds what happened to it.
    fn note(&mut self, note: &Note) {
        use metrics::{counter, histogram};
        self.tell_note(note);
        match note {
            Note::Logged { .. } => {}
            Note::Accepted { request, .. } => {
                self.spans.insert(request.0, tracing::info_span!("request", id = request.0));
            }
            Note::Refused { request, why } => {
                counter!("dunlin_router_requests_refused_total", "reason" => *why).increment(1);
                tracing::info!(request = request.0, why, "refused");
            }
            Note::Placed { request, attempt, replica, cost, hit_tokens, candidates } => {
                let _in = self.span(request.0);
                let attempt = attempt.0;
                tracing::debug!(attempt, replica, cost, hit_tokens, candidates, "placed");
            }
            Note::Hashed { request } => {
                counter!("dunlin_router_prompts_hashed_total").increment(1);
                let _in = self.span(request.0);
                tracing::debug!("its block keys did not come with it");
            }
            Note::Replay { request, cause, .. } => {
                counter!("dunlin_stream_replays_total", "cause" => *cause).increment(1);
                let _in = self.span(request.0);
                tracing::info!(request = request.0, cause, "replayed");
            }
            Note::Resumed { request, after } => {
                histogram!("dunlin_recovery_seconds").record(after.as_secs_f64());
                let _in = self.span(request.0);
                tracing::info!(request = request.0, ?after, "resumed");
            }
            Note::Duplicate { tokens, .. } => {
                counter!("dunlin_stream_duplicate_tokens_dropped_total").increment(*tokens as u64);
            }
            Note::Diverged { request, position } => {
                counter!("dunlin_stream_diverged_total").increment(1);
                tracing::error!(request = request.0, position, "a replayed token differs");
            }
            Note::Gap { request, reason } => {
                counter!("dunlin_stream_gap_total").increment(1);
                let _in = self.span(request.0);
                tracing::error!(request = request.0, reason, "gap");
            }
            Note::Stale { kind } => {
                counter!("dunlin_stale_epoch_messages_total", "kind" => *kind).increment(1);
            }
            Note::IndexForgotten { replica } => {
                counter!("dunlin_router_index_forgotten_total").increment(1);
                tracing::warn!(replica, "KV events had a gap; its cache is unknown again");
            }
            Note::Ended { request, outcome, usage, elapsed, to_first_token, attempts } => {
                counter!("dunlin_router_requests_ended_total", "outcome" => *outcome).increment(1);
                let span = self.spans.remove(&request.0);
                let _in = span.as_ref().map(tracing::Span::enter);
                let tokens = usage.completion_tokens;
                tracing::debug!(outcome, tokens, ?elapsed, ?to_first_token, attempts, "ended");
            }
        }
    }

    fn tell_note(&self, note: &Note) {
        match note {
            Note::Accepted { request, prompt_tokens } => {
                let key = (request.0, u64::from(*prompt_tokens));
                tell(&self.node, facts::REQUEST_ACCEPTED, String::new, key);
            }
            Note::Logged { request, position, tokens, epoch, attempt } => {
                let from = || format!("epoch {} attempt {}", epoch.0, attempt.0);
                for at in (u64::from(*position)..).take(*tokens as usize) {
                    tell(&self.node, facts::TOKEN_LOGGED, from, (request.0, at));
                }
            }
            Note::Replay { request, cause, tokens } => {
                let key = (request.0, *tokens);
                tell(&self.node, facts::REQUEST_REPLAYED, || (*cause).into(), key);
            }
            Note::Stale { kind } => {
                tell(&self.node, facts::STALE_REFUSED, || (*kind).into(), (0, 1));
            }
            _ => {}
        }
    }

    fn span(&self, request: u64) -> Option<tracing::span::Entered<'_>> {
        self.spans.get(&request).map(tracing::Span::enter)
    }
}

fn count_failed(error: &CastError) {
    let kind = match error {
        CastError::NodeDown { .. } => "node_down",
        CastError::ActorDown { .. } => "actor_down",
        CastError::Overloaded { .. } => "overloaded",
        _ => "other",
    };
    metrics::counter!("dunlin_router_casts_failed_total", "error" => kind).increment(1);
}
