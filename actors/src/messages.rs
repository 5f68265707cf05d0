//! Every message that actors exchange, in one place. Nouns are facts, verbs are commands.
//!
//! Two numbers fence what is late. A **replica epoch** rises whenever the head places a replica
//! anew; a scheduler or shard of an older epoch is refused. An **attempt** rises whenever the
//! router hands a request out again; tokens of an older attempt are refused.

use dunlin_model::engine::Batch;
use dunlin_model::engine::{Sampled, StageSpec};
use dunlin_model::sampling::{SamplingParams, TokenLogprob};
use dunlin_runtime::{Address, NodeName, Protocol};
use serde::{Deserialize, Serialize};

/// Names a request for its whole life, across replays. Unique in the cluster.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct RequestId(pub u64);

/// How often a request has been handed to a replica; starts at 1.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Attempt(pub u32);

/// How often a replica has been placed; starts at 1.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize,
)]
pub struct ReplicaEpoch(pub u64);

/// A validated request, as the gateway hands it to the router.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Request {
    pub id: RequestId,
    /// Cache isolation and fairness unit.
    pub tenant: String,
    /// Extra salt of the prefix cache (OpenAI-style `cache_salt`), empty if none.
    pub cache_salt: String,
    pub prompt: Vec<u32>,
    /// Block keys of the prompt, so that the router has none to compute; `None`: it computes them.
    pub keys: Option<PromptKeys>,
    pub sampling: SamplingParams,
    pub max_tokens: u32,
    pub min_tokens: u32,
    /// Drawing one of these ends the request with [`FinishReason::Stop`].
    pub stop_tokens: Vec<u32>,
    /// Logprobs of the prompt's own tokens (`echo` with `logprobs`), with this many alternatives.
    pub prompt_logprobs: Option<u32>,
    /// Time left until the request must have ended.
    pub deadline_ms: u64,
    /// Where [`GatewayCast`]s about this request go.
    pub reply_to: Address,
}

/// The keys of a prompt's full blocks as replicas of one kind name them, computed where the prompt
/// was tokenised. They decide where a request is placed and nothing else: a replica names what it
/// computes by itself.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PromptKeys {
    pub space: KeySpace,
    pub keys: Vec<BlockKey>,
    /// Link of the last block: where the keys of the output's blocks go on.
    pub tip: [u8; 32],
}

/// What a replica's kind has to do with its block keys; unlike kinds share none.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct KeySpace {
    /// Model hash, KV format, precision.
    pub namespace: [u8; 16],
    pub block_tokens: u32,
}

/// Why a request was not accepted. Nothing was started.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
pub enum Refusal {
    #[error(
        "the prompt and max_tokens need {need} tokens of KV cache; the largest replica holds {have}"
    )]
    NeverFits { need: u64, have: u64 },
    #[error("{waiting} requests are waiting; try again in {retry_after_ms} ms")]
    Overloaded { waiting: u64, retry_after_ms: u64 },
    #[error("the cluster is draining")]
    Draining,
    #[error("no replica is ready: {reason}")]
    NotReady { reason: String },
    #[error("request id {0:?} is already in use")]
    Duplicate(RequestId),
}

/// Why a request ended well.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum FinishReason {
    /// A stop token (or, decided by the gateway, a stop string).
    Stop,
    /// `max_tokens` or the context length.
    Length,
}

/// Why a request failed after acceptance.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum FailureCode {
    /// No replica could serve it before its deadline.
    Deadline,
    /// It was on a replica each time that replica failed.
    Poison,
    /// Logits were NaN or infinite; names stage and layer range.
    NotFinite,
    /// The scheduler found it can never run (a bug upstream or a shrunken replica).
    NeverFits,
    Internal,
}

/// Token counts for the usage block.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Usage {
    pub prompt_tokens: u32,
    pub completion_tokens: u32,
    /// Prompt tokens found in the prefix cache at first schedule.
    pub cached_tokens: u32,
}

/// What a client sees of its request, in order, ending with exactly one terminal event.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum StreamEvent {
    /// About the prompt's tokens 1.. (the first has no predecessor); before any `Tokens`.
    PromptLogprobs(Vec<TokenLogprob>),
    /// `ids[0]` is output token number `position`; `logprobs` is empty or as long as `ids`.
    Tokens {
        position: u32,
        ids: Vec<u32>,
        logprobs: Vec<TokenLogprob>,
    },
    Finished {
        reason: FinishReason,
        usage: Usage,
        served_by: Vec<String>,
    },
    Failed {
        code: FailureCode,
        message: String,
        usage: Usage,
    },
    Cancelled {
        usage: Usage,
    },
}

impl StreamEvent {
    pub fn is_terminal(&self) -> bool {
        !matches!(self, StreamEvent::PromptLogprobs(_) | StreamEvent::Tokens { .. })
    }
}

// ---- gateway ------------------------------------------------------------------------------

/// Role `gateway`.
pub struct GatewayProtocol;

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum GatewayCast {
    Event { request: RequestId, event: StreamEvent },
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum GatewayCall {
    /// The router was restarted inside its node and has forgotten every request.
    RouterRestarted,
}

impl Protocol for GatewayProtocol {
    const NAME: &'static str = "gateway";
    const VERSION: u16 = 1;
    type Cast = GatewayCast;
    type Call = GatewayCall;
    type Reply = ();
}

// ---- router -------------------------------------------------------------------------------

/// Role `router`, on the head.
pub struct RouterProtocol;

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum RouterCall {
    Submit(Box<Request>),
    Status,
    /// Stop accepting; answers at once. `Status` tells how many requests are open.
    Drain,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum RouterReply {
    Submitted(Result<(), Refusal>),
    Status(RouterStatus),
    Draining,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum RouterCast {
    /// The client is gone, or a stop string matched (`stopped`: end as `Finished(Stop)`).
    Cancel {
        request: RequestId,
        stopped: bool,
    },
    /// What came of one input: the tokens of a whole step are one message.
    Scheduler {
        replica: String,
        epoch: ReplicaEpoch,
        events: Vec<SchedulerEvent>,
    },
    /// From placement: this replica may be given work, or may not any more.
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
}

impl Protocol for RouterProtocol {
    const NAME: &'static str = "router";
    const VERSION: u16 = 3;
    type Cast = RouterCast;
    type Call = RouterCall;
    type Reply = RouterReply;
}

/// A replica that is ready to serve.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ReplicaInfo {
    pub replica: String,
    pub epoch: ReplicaEpoch,
    pub scheduler: Address,
    /// Capacity for one sequence: min(KV pool, context length), in tokens.
    pub max_sequence_tokens: u64,
    pub kv_blocks: u64,
    pub block_tokens: u32,
    pub max_running: u32,
    /// `node/device` of every shard, for `run`'s summary and `status`.
    pub served_by: Vec<String>,
    /// Namespace of the prefix cache (model hash, KV format): part of every block key.
    pub cache_namespace: [u8; 16],
}

impl ReplicaInfo {
    pub fn key_space(&self) -> KeySpace {
        KeySpace { namespace: self.cache_namespace, block_tokens: self.block_tokens }
    }
}

#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct RouterStatus {
    pub draining: bool,
    pub open_requests: u64,
    pub waiting_requests: u64,
    pub finished_total: u64,
    pub failed_total: u64,
    pub cancelled_total: u64,
    pub replays_total: u64,
    pub replicas: Vec<ReplicaStatus>,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ReplicaStatus {
    pub info: ReplicaInfo,
    pub load: LoadReport,
    pub assigned: u64,
}

// ---- scheduler ----------------------------------------------------------------------------

/// Role `scheduler`, one per replica, on the node of its first shard.
pub struct SchedulerProtocol;

/// A request as a replica sees it: for a replay, `tokens` already holds what was delivered.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Work {
    pub request: RequestId,
    pub attempt: Attempt,
    pub tenant: String,
    pub cache_salt: String,
    /// Prompt, then output tokens already delivered.
    pub tokens: Vec<u32>,
    pub prompt_len: u32,
    pub sampling: SamplingParams,
    /// Over the whole request, delivered tokens included.
    pub max_tokens: u32,
    pub min_tokens: u32,
    pub stop_tokens: Vec<u32>,
    pub prompt_logprobs: Option<u32>,
    /// It was in a step that failed: run it alone until it has moved on by a token.
    pub suspect: bool,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum SchedulerCast {
    Submit {
        epoch: ReplicaEpoch,
        work: Box<Work>,
    },
    Cancel {
        epoch: ReplicaEpoch,
        request: RequestId,
        attempt: Attempt,
    },
    /// From the last stage's rank 0.
    StepDone {
        epoch: ReplicaEpoch,
        step: u64,
        sampled: Vec<Sampled>,
        micros: u64,
    },
    /// From any shard: the step's batch is lost; the replica is about to be placed anew.
    StepFailed {
        epoch: ReplicaEpoch,
        step: u64,
        reason: String,
    },
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum SchedulerCall {
    Status,
    /// Runs `audit()` on scheduler and KV; `Err` lists what is wrong.
    Audit,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum SchedulerReply {
    Status(LoadReport),
    Audit(Result<(), Vec<String>>),
}

impl Protocol for SchedulerProtocol {
    const NAME: &'static str = "scheduler";
    const VERSION: u16 = 1;
    type Cast = SchedulerCast;
    type Call = SchedulerCall;
    type Reply = SchedulerReply;
}

/// What a scheduler tells the router.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum SchedulerEvent {
    PromptLogprobs {
        request: RequestId,
        attempt: Attempt,
        logprobs: Vec<TokenLogprob>,
    },
    Tokens {
        request: RequestId,
        attempt: Attempt,
        /// Output position of `ids[0]`.
        position: u32,
        ids: Vec<u32>,
        logprobs: Vec<TokenLogprob>,
        /// Prompt tokens served from the prefix cache (first report of an attempt only).
        cached_tokens: Option<u32>,
    },
    Finished {
        request: RequestId,
        attempt: Attempt,
        reason: FinishReason,
    },
    Failed {
        request: RequestId,
        attempt: Attempt,
        code: FailureCode,
        message: String,
    },
    Load(LoadReport),
    /// Prefix blocks that came into or left the cache since the last report. `seq` rises by one;
    /// after a gap the router forgets what it knew of this replica.
    KvEvents {
        seq: u64,
        stored: Vec<BlockKey>,
        removed: Vec<BlockKey>,
    },
}

/// Chained hash of a full KV block: namespace, tenant and salt, all tokens up to its end.
/// One number on the wire: thousands of them are a message, and bytes are encoded one by one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(from = "u128", into = "u128")]
pub struct BlockKey(pub [u8; 16]);

impl From<u128> for BlockKey {
    fn from(number: u128) -> Self {
        Self(number.to_le_bytes())
    }
}

impl From<BlockKey> for u128 {
    fn from(key: BlockKey) -> Self {
        u128::from_le_bytes(key.0)
    }
}

#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct LoadReport {
    pub running: u32,
    pub waiting: u32,
    /// Prompt tokens not yet computed, over running and waiting requests.
    pub queued_prompt_tokens: u64,
    pub kv_blocks_total: u64,
    pub kv_blocks_free: u64,
    pub kv_blocks_live: u64,
    pub kv_blocks_cached: u64,
    pub preemptions_total: u64,
    pub steps_total: u64,
    pub tokens_total: u64,
    pub prefix_queries_total: u64,
    pub prefix_hits_total: u64,
    /// Measured over recent steps; 0 while unknown.
    pub tokens_per_second: f64,
}

// ---- shard --------------------------------------------------------------------------------

/// Role `shard`, instance `REPLICA/STAGE/RANK`.
pub struct ShardProtocol;

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum ShardCast {
    /// Steps of one epoch run in the order of `step`, which rises by one. `claims[i]` is the hash
    /// of the tokens that sequence `i`'s blocks hold below its position. The sequences at `drawn`
    /// have one token, which an earlier step draws for the same request: the step was planned
    /// before that was known.
    Run { epoch: ReplicaEpoch, step: u64, batch: Batch, claims: Vec<u64>, drawn: Vec<Place> },
}

/// Sequence `seq` of a batch waits for the token that `step` draws for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Place {
    pub seq: u32,
    pub step: u64,
}

impl Protocol for ShardProtocol {
    const NAME: &'static str = "shard";
    const VERSION: u16 = 4;
    type Cast = ShardCast;
    type Call = ();
    type Reply = ();
}

// ---- agent and placement ------------------------------------------------------------------

/// Role `agent`, one per node: starts and stops this node's part of replicas.
pub struct AgentProtocol;

/// One shard's place: which slice of the model on which device of which node.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ShardPlace {
    pub node: NodeName,
    pub device: String,
    pub stage: usize,
    pub spec: StageSpec,
}

/// A whole replica's plan; the same value goes to every node that has a part in it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ReplicaPlan {
    pub replica: String,
    pub epoch: ReplicaEpoch,
    pub model: String,
    /// Stages in order, ranks within a stage adjacent.
    pub shards: Vec<ShardPlace>,
    pub stages: usize,
}

impl ReplicaPlan {
    /// The node that runs the scheduler and the KV block manager: that of the first shard.
    pub fn leader(&self) -> &NodeName {
        &self.shards[0].node
    }
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum AgentCall {
    /// Devices, memory and model facts of this node.
    Describe,
    /// Load this node's shards of the plan; answers when they are ready to run.
    Load(Box<ReplicaPlan>),
    /// All shards are loaded: the leader starts KV block manager and scheduler.
    Lead(Box<ReplicaPlan>),
    Retire {
        replica: String,
        epoch: ReplicaEpoch,
    },
    /// Actor tree with restarts, for `dunlin status`.
    Tree,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum AgentReply {
    Described {
        description: NodeDescription,
        /// The replicas that run here, loaded and not ended.
        hosted: Vec<ReplicaPlan>,
    },
    Loaded(Result<(), String>),
    Leading(Result<ReplicaInfo, String>),
    Retired,
    Tree(Vec<ActorStatus>),
}

impl Protocol for AgentProtocol {
    const NAME: &'static str = "agent";
    const VERSION: u16 = 2;
    type Cast = ();
    type Call = AgentCall;
    type Reply = AgentReply;
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct NodeDescription {
    pub devices: Vec<DeviceDescription>,
    /// Content hash of the model file this node has; all nodes of a replica must agree.
    pub model_hash: String,
    pub version: String,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct DeviceDescription {
    pub id: String,
    pub description: String,
    pub total_bytes: u64,
    pub free_bytes: u64,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ActorStatus {
    /// Slash-separated place in the node's supervision tree.
    pub path: String,
    pub state: String,
    pub restarts: u32,
}

/// Role `placement`, on the head.
pub struct PlacementProtocol;

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum PlacementCast {
    /// A shard or scheduler of this epoch is gone; `suspects` were in the failing step.
    ReplicaBroken { replica: String, epoch: ReplicaEpoch, reason: String, suspects: Vec<RequestId> },
    /// The sending node wants to leave: its replicas get nothing new until it has come back.
    NodeDraining { node: NodeName },
    /// The router was restarted: it knows no replica, and what runs belongs to nobody.
    RouterRestarted,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum PlacementCall {
    Status,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum PlacementReply {
    Status(Vec<ReplicaState>),
}

impl Protocol for PlacementProtocol {
    const NAME: &'static str = "placement";
    const VERSION: u16 = 1;
    type Cast = PlacementCast;
    type Call = PlacementCall;
    type Reply = PlacementReply;
}

/// Where a replica is on its way to serving; every non-final state has a reason and an age.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ReplicaState {
    pub replica: String,
    pub epoch: ReplicaEpoch,
    /// `waiting`, `loading`, `starting`, `ready`, `failed`.
    pub state: String,
    pub reason: String,
    pub since_ms: u64,
    pub shards: Vec<String>,
    /// What each shard of the plan at hand holds; empty while there is none.
    #[serde(default)]
    pub places: Vec<ShardPlace>,
}
