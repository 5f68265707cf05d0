//! The router: owner of every open request's truth.
//!
//! It accepts a request into its **token log** (prompt, parameters, delivered tokens), places it
//! on a replica, checks each token's epoch, attempt and position, logs it, and only then delivers
//! it. When a replica is lost, its requests are handed out again under a higher attempt, with
//! the logged tokens as part of their prompt.
//!
//! [`Router`] is a pure core: no clock, no I/O, no randomness, one input in, outputs out, and no
//! hash-map order reaches a decision.
//!
//! Invariants ([`Router::audit`] checks what can be checked from inside):
//! - an accepted request gets exactly one terminal event, by its deadline, and nothing after it;
//! - token positions are delivered 0, 1, 2, ... each once, and only after they were logged;
//! - per replica, what is assigned and how many tokens it holds equals the sum over its requests;
//! - open and waiting requests and logged tokens are bounded; an ended request leaves only its id,
//!   in a ring.
//!
//! The router knows nothing of blocks, steps, text or sockets.

mod actor;
mod admission;
mod fleet;
mod index;
mod log;
mod place;
mod recent;
mod replay;
mod serve;

pub use actor::{INSTANCE, ROLE, RouterArgs, start_router};

use crate::messages::{
    Attempt, GatewayCast, ReplicaEpoch, ReplicaInfo, ReplicaStatus, Request, RequestId,
    RouterReply, RouterStatus, SchedulerCast, SchedulerEvent, StreamEvent, Usage,
};
use dunlin_runtime::{Address, NodeName};
use fleet::Fleet;
use log::Open;
use recent::Recent;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// Bounds and thresholds. `docs/limits.md` lists the defaults.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RouterConfig {
    /// Accepted requests that have not ended, at most.
    pub max_open: usize,
    /// Of these, requests that no replica has been given yet, at most.
    pub max_waiting: usize,
    /// Sum of `prompt + max_tokens` over open requests, at most: bounds the log's memory.
    pub max_log_tokens: u64,
    /// How many requests a replica may have beyond the `max_running` it can run at once. Small,
    /// so that a request is bound to a replica late; at least 1, so that a slot never idles.
    pub queue_ahead: u32,
    /// Failures of a step that held this request alone, without a token in between, until it is
    /// failed as poison.
    pub max_strikes: u32,
    /// Losses of any kind without a token in between, until a request is failed as poison.
    pub max_fruitless: u32,
    /// How often a request may be in a failed step over its whole life.
    pub max_suspicions: u32,
    /// How long a replica that could not be reached is left alone.
    pub shun: Duration,
    /// How many ended requests are remembered, to recognise duplicate ids and late messages.
    pub remember_ended: usize,
}

impl Default for RouterConfig {
    fn default() -> Self {
        Self {
            max_open: 8192,
            max_waiting: 1024,
            max_log_tokens: 1 << 26,
            queue_ahead: 8,
            max_strikes: 2,
            max_fruitless: 5,
            max_suspicions: 8,
            shun: Duration::from_millis(250),
            remember_ended: 4096,
        }
    }
}

/// What can happen to a router.
#[derive(Debug, Clone, PartialEq)]
pub enum Input {
    /// These three answer with exactly one [`Output::Reply`].
    Submit(Box<Request>),
    Status,
    Drain,
    Cancel {
        request: RequestId,
        stopped: bool,
    },
    Scheduler {
        replica: String,
        epoch: ReplicaEpoch,
        event: SchedulerEvent,
    },
    ReplicaUp(ReplicaInfo),
    ReplicaDown {
        replica: String,
        epoch: ReplicaEpoch,
        reason: String,
        suspects: Vec<RequestId>,
    },
    /// No new work for this replica; what it has goes on.
    ReplicaDraining {
        replica: String,
        epoch: ReplicaEpoch,
    },
    /// The node of a gateway was lost at this time, and with it every client it had then.
    GatewayDown {
        node: NodeName,
        lost: Duration,
    },
    /// A hand-out could not even be sent.
    Unreachable {
        request: RequestId,
        attempt: Attempt,
        reason: String,
    },
    /// An event could not be sent to the request's gateway.
    Undeliverable(RequestId),
    /// Time has passed; see [`Router::next_wakeup`].
    Tick,
}

/// What a router wants done, in this order.
#[derive(Debug, Clone, PartialEq)]
pub enum Output {
    Reply(RouterReply),
    Deliver {
        to: Address,
        cast: GatewayCast,
    },
    Send {
        to: Address,
        cast: SchedulerCast,
    },
    /// For metrics and logs; nothing depends on it.
    Note(Note),
}

/// Facts worth counting or logging.
#[derive(Debug, Clone, PartialEq)]
pub enum Note {
    Accepted {
        request: RequestId,
        prompt_tokens: u32,
    },
    /// Tokens from this output position on are in the log; they are delivered after this.
    Logged {
        request: RequestId,
        position: u32,
        tokens: u32,
        /// Who reported them.
        epoch: ReplicaEpoch,
        attempt: Attempt,
    },
    Refused {
        request: RequestId,
        why: &'static str,
    },
    /// A placement decision: the cost of the chosen replica among `candidates`.
    Placed {
        request: RequestId,
        attempt: Attempt,
        replica: String,
        cost: u64,
        hit_tokens: u64,
        candidates: usize,
    },
    /// The keys of its prompt did not come with it, and were computed here.
    Hashed {
        request: RequestId,
    },
    Replay {
        request: RequestId,
        cause: &'static str,
        /// Prompt and logged tokens, which are computed anew where no cache has them.
        tokens: u64,
    },
    /// The first token after a loss: how long the stream stood still.
    Resumed {
        request: RequestId,
        after: Duration,
    },
    /// Tokens that had been delivered already; dropped.
    Duplicate {
        request: RequestId,
        tokens: usize,
    },
    /// A duplicate that differs from the log: sampling was not a function of seed and position.
    Diverged {
        request: RequestId,
        position: u32,
    },
    /// A message that would have left a hole in the stream; the request replays.
    Gap {
        request: RequestId,
        reason: String,
    },
    /// A message of an older epoch or attempt, or about an ended request; dropped.
    Stale {
        kind: &'static str,
    },
    /// A replica's KV events did not follow on: its part of the prefix index was dropped.
    IndexForgotten {
        replica: String,
    },
    Ended {
        request: RequestId,
        /// `stop`, `length`, `abort` or `error`, as in the metric's label.
        outcome: &'static str,
        usage: Usage,
        elapsed: Duration,
        to_first_token: Option<Duration>,
        attempts: u32,
    },
}

/// See the module's page.
pub struct Router {
    config: RouterConfig,
    /// Time of the input in hand.
    now: Duration,
    draining: bool,
    open: BTreeMap<RequestId, Open>,
    /// Requests without a replica, by arrival. A replayed request keeps its place in line.
    waiting: BTreeMap<u64, RequestId>,
    arrivals: u64,
    deadlines: BTreeSet<(Duration, RequestId)>,
    log_tokens: u64,
    fleet: Fleet,
    ended: Recent,
    /// Cancels that overtook their request.
    early_cancels: Recent,
    totals: Totals,
    out: Vec<Output>,
}

#[derive(Debug, Clone, Default)]
struct Totals {
    finished: u64,
    failed: u64,
    cancelled: u64,
    replays: u64,
    /// Moving average of output lengths, for honest waiting times.
    output_tokens: f64,
}

impl Router {
    pub fn new(config: RouterConfig) -> Self {
        let ended = Recent::new(config.remember_ended);
        let early_cancels = Recent::new(config.remember_ended);
        Self {
            config,
            now: Duration::ZERO,
            draining: false,
            open: BTreeMap::new(),
            waiting: BTreeMap::new(),
            arrivals: 0,
            deadlines: BTreeSet::new(),
            log_tokens: 0,
            fleet: Fleet::default(),
            ended,
            early_cancels,
            totals: Totals::default(),
            out: Vec::new(),
        }
    }

    /// Takes one input at time `now` (any monotonic clock) and says what to do.
    pub fn handle(&mut self, now: Duration, input: Input) -> Vec<Output> {
        self.now = self.now.max(now);
        self.expire();
        match input {
            Input::Submit(request) => self.submit(*request),
            Input::Status => self.out.push(Output::Reply(RouterReply::Status(self.status()))),
            Input::Drain => {
                self.draining = true;
                self.out.push(Output::Reply(RouterReply::Draining));
            }
            Input::Cancel { request, stopped } => self.cancel(request, stopped),
            Input::Scheduler { replica, epoch, event } => self.event(&replica, epoch, event),
            Input::ReplicaUp(info) => self.replica_up(info),
            Input::ReplicaDown { replica, epoch, reason, suspects } => {
                self.replica_down(&replica, epoch, reason, &suspects);
            }
            Input::ReplicaDraining { replica, epoch } => self.fleet.drain(&replica, epoch),
            Input::GatewayDown { node, lost } => self.gateway_down(&node, lost),
            Input::Unreachable { request, attempt, reason } => {
                self.unreachable(request, attempt, reason);
            }
            Input::Undeliverable(request) => self.cancel(request, false),
            Input::Tick => {}
        }
        self.place_waiting();
        std::mem::take(&mut self.out)
    }

    /// When to send the next [`Input::Tick`], if nothing else happens before.
    pub fn next_wakeup(&self) -> Option<Duration> {
        let deadline = self.deadlines.first().map(|(at, _)| *at);
        let retry = match self.waiting.is_empty() {
            true => None,
            false => self.fleet.next_unshun(self.now),
        };
        deadline.into_iter().chain(retry).min()
    }

    pub fn open_and_waiting(&self) -> (usize, usize) {
        (self.open.len(), self.waiting.len())
    }

    pub fn status(&self) -> RouterStatus {
        let replicas = self.fleet.ready().map(|(_, replica)| ReplicaStatus {
            info: replica.info.clone(),
            load: replica.load.clone(),
            assigned: replica.assigned.len() as u64,
        });
        RouterStatus {
            draining: self.draining,
            open_requests: self.open.len() as u64,
            waiting_requests: self.waiting.len() as u64,
            finished_total: self.totals.finished,
            failed_total: self.totals.failed,
            cancelled_total: self.totals.cancelled,
            replays_total: self.totals.replays,
            replicas: replicas.collect(),
        }
    }

    /// Checks what must hold between inputs; `Err` lists every breach.
    pub fn audit(&self) -> Result<(), Vec<String>> {
        let mut wrong = Vec::new();
        let mut check = |holds: bool, what: String| {
            if !holds {
                wrong.push(what);
            }
        };
        let queued = self.open.values().filter(|o| o.share.is_none()).count();
        check(queued == self.waiting.len(), format!("{queued} unplaced, queue disagrees"));
        check(self.deadlines.len() == self.open.len(), "one deadline per request".into());
        let tokens: u64 = self.open.values().map(|o| o.reserved_tokens()).sum();
        check(tokens == self.log_tokens, format!("{tokens} logged, counted {}", self.log_tokens));
        check(self.open.len() <= self.config.max_open, "more open than allowed".into());
        for (slot, replica) in self.fleet.all() {
            let on = || self.open.values().filter_map(|o| o.share.as_ref());
            let on = || on().filter(|share| share.slot == slot);
            let name = &replica.info.replica;
            check(replica.assigned.len() == on().count(), format!("{name}: assigned"));
            let prefill: u64 = on().map(|share| share.prefill_tokens).sum();
            check(replica.prefill_tokens == prefill, format!("{name}: prefill tokens"));
            let held: u64 = on().map(|share| share.held_tokens).sum();
            check(replica.held_tokens == held, format!("{name}: held tokens"));
            check(
                replica.ready || replica.assigned.is_empty(),
                format!("{name}: work on a dead replica"),
            );
        }
        match wrong.is_empty() {
            true => Ok(()),
            false => Err(wrong),
        }
    }

    fn deliver(&mut self, to: Address, request: RequestId, event: StreamEvent) {
        self.out.push(Output::Deliver { to, cast: GatewayCast::Event { request, event } });
    }

    fn note(&mut self, note: Note) {
        self.out.push(Output::Note(note));
    }
}
