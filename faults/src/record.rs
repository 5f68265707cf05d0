//! What a run leaves behind: everything that the invariants, the metrics and the report read.
//!
//! Times are microseconds since the workload began: virtual in the simulator, monotonic in the
//! process mode. Events are in the order in which they were seen.

use crate::fault::{Expect, Fault, Kind, Mode};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};

/// One run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Record {
    pub plan: String,
    pub mode: Mode,
    pub seed: u64,
    /// Line that repeats the run.
    pub repro: String,
    pub env: BTreeMap<String, String>,
    pub nodes: Vec<NodeInfo>,
    pub phases: Phases,
    pub requests: BTreeMap<u64, RequestInfo>,
    pub faults: Vec<FaultRun>,
    pub events: Vec<Event>,
    /// Nodes that the heal left broken (`heal = "core"`): liveness is asked of the others.
    #[serde(default)]
    pub outside: BTreeSet<String>,
    /// What was held after the settle phase, with no request open; `None` if it never settled.
    pub rest: Option<Rest>,
    /// "No runnable event and an open request": who waits for whom.
    pub stuck: Option<String>,
    /// Hash over all decoded frames and events, in the simulator.
    pub trace_hash: Option<String>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeInfo {
    pub name: String,
    /// `head` or `worker`.
    pub role: String,
    pub devices: Vec<String>,
}

/// When each phase ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Phases {
    pub warmup_us: u64,
    pub chaos_us: u64,
    pub settle_us: u64,
}

/// What a client asked, and what the fault-free run answers.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct RequestInfo {
    /// The router's id of it, which is what the facts about requests carry as `key`.
    #[serde(default)]
    pub router_id: Option<u64>,
    pub tenant: String,
    pub prompt_tokens: u32,
    pub max_tokens: u32,
    /// Of the client's own accord, or by a fault of this kind.
    pub cancels: bool,
    pub deadline_us: u64,
    /// Token ids (sim) or text pieces (process) of the undisturbed answer; a cancelled request is
    /// held to a prefix of it. Empty where it is not known (a malformed request).
    pub reference: Vec<String>,
}

/// One fault's story.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct FaultRun {
    pub fault: Fault,
    /// `None` if it never fired.
    pub began_us: Option<u64>,
    pub ended_us: Option<u64>,
    /// What was read back to show that it took effect; `None` if nothing could be.
    pub proof: Option<String>,
    /// First fact that the system told about the trouble (a peer down, a step failed, a refusal).
    pub detected_us: Option<u64>,
    /// Requests with a stage, block or link on the target when it fired.
    pub touched: Vec<u64>,
}

impl FaultRun {
    pub fn kind(&self) -> Kind {
        self.fault.kind
    }

    pub fn expect(&self) -> Expect {
        self.fault.expect
    }
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Event {
    pub us: u64,
    pub what: What,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum What {
    /// The client's side of a request.
    Submitted {
        request: u64,
    },
    Accepted {
        request: u64,
    },
    Refused {
        request: u64,
        code: String,
    },
    /// `id` is a token id (sim) or a piece of text (process).
    Token {
        request: u64,
        position: u32,
        id: String,
    },
    /// `code` is `finished`, `cancelled`, `gone` (the client left) or a failure's code.
    Ended {
        request: u64,
        code: String,
        message: String,
    },
    /// What a node told its fault hook; names are `runtime::faults::names` and `actors::facts`.
    Fact {
        node: String,
        name: String,
        subject: String,
        key: u64,
        value: u64,
    },
    /// `up`, `down`, `paused`, `draining`, `starting`: as the injector sees it, not as peers do.
    Node {
        node: String,
        state: String,
    },
    /// A sample of a node's books; see [`gauges`].
    Gauge {
        node: String,
        name: String,
        value: f64,
    },
    /// A replica was given out for work at this epoch: where each layer range lies. Recorded beside
    /// the `replica.up` fact, from placement's own state.
    Placement {
        replica: String,
        epoch: u64,
        shards: Vec<PlacedShard>,
    },
    /// What the answer says about itself, with its terminal event.
    Served {
        request: u64,
        model: String,
        served_by: Vec<String>,
    },
}

/// One shard of a published placement.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PlacedShard {
    pub node: String,
    pub device: String,
    pub stage: usize,
    pub rank: usize,
    /// Half-open.
    pub layers: (u64, u64),
}

/// Names of [`What::Gauge`]s that checkers read.
pub mod gauges {
    /// Bytes that a node's process has to itself, and what it has reserved: its own part, and each
    /// shard's weights, KV and workspace. What was free for those is in the fact `memory.reserved`.
    pub const MEMORY_USED: &str = "memory.used";
    pub const MEMORY_RESERVED: &str = "memory.reserved";
    /// `queue.NAME` is held to the `limit.NAME` of the same node.
    pub const QUEUE: &str = "queue.";
    pub const LIMIT: &str = "limit.";
}

/// What is held when nothing is asked any more.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct Rest {
    pub open_requests: u64,
    pub waiting_requests: u64,
    /// Blocks in use by no request.
    pub live_blocks: u64,
    /// `free + cached + live` and the total, by replica.
    pub blocks: BTreeMap<String, (u64, u64)>,
    /// What `audit()` of router, schedulers and KV block managers found, and who.
    pub audits: Vec<String>,
    /// Replicas that serve, and how many the cluster file asks for.
    pub replicas_up: u64,
    pub replicas_wanted: u64,
    /// Nodes, and what each thinks of the others: `node -> (peer -> incarnation)`.
    pub views: BTreeMap<String, BTreeMap<String, u64>>,
    /// A fresh request was answered with the right tokens.
    pub probe_right: bool,
    /// Bytes of resident memory by node, in the process mode.
    pub memory: BTreeMap<String, u64>,
    /// What still lies in mailboxes, flows and retry buffers, by `NODE/WHAT`; only what is not 0.
    #[serde(default)]
    pub queued: BTreeMap<String, u64>,
}
