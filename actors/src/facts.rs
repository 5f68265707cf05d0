//! Names of what the actors tell a fault hook ([`dunlin_runtime::Fact`]), for triggers and checks.
//! Beside each name: what `subject`, `key` and `value` of the fact are.

use dunlin_runtime::{Fact, Node};

/// The router accepted a request: `key` its id, `value` the prompt's length in tokens.
pub const REQUEST_ACCEPTED: &str = "request.accepted";
/// The router appended a token to its log: `subject` epoch and attempt that drew it, `key` the
/// request, `value` the output position.
pub const TOKEN_LOGGED: &str = "token.logged";
/// The router delivered a token to the gateway: `key` the request, `value` the output position.
pub const TOKEN_DELIVERED: &str = "token.delivered";
/// A request ended: `subject` is `finished`, `cancelled` or the failure's code, `key` the request.
pub const REQUEST_ENDED: &str = "request.ended";
/// The router hands a request out again: `subject` the cause, `key` the request, `value` the tokens
/// (prompt and delivered) that are computed anew at most.
pub const REQUEST_REPLAYED: &str = "request.replayed";
/// Placement raised a replica's epoch: `subject` the replica, `key` the epoch.
pub const EPOCH_BUMPED: &str = "epoch.bumped";
/// A replica may be given work: `subject` the replica, `key` the epoch.
pub const REPLICA_UP: &str = "replica.up";
/// A replica is lost: `subject` `REPLICA: reason`, `key` the epoch.
pub const REPLICA_DOWN: &str = "replica.down";
/// A scheduler planned a step: `subject` the replica, `key` the step, `value` its tokens.
pub const STEP_PLANNED: &str = "step.planned";
/// A shard ran a step: `subject` `REPLICA/STAGE/RANK`, `key` the step, `value` microseconds.
pub const STEP_DONE: &str = "step.done";
/// A step failed: `subject` who and why, `key` the step.
pub const STEP_FAILED: &str = "step.failed";
/// The scheduler took a sequence's blocks away: `key` the request.
pub const PREEMPTED: &str = "sequence.preempted";
/// Blocks came from the prefix cache: `key` the request, `value` tokens.
pub const PREFIX_HIT: &str = "prefix.hit";
/// Cached blocks were evicted: `value` how many.
pub const EVICTED: &str = "blocks.evicted";
/// A message of an older epoch or attempt was refused: `subject` its kind.
pub const STALE_REFUSED: &str = "stale.refused";
/// Two shards disagreed on a step's plan: `subject` who, `key` the step.
pub const PLAN_MISMATCH: &str = "plan.mismatch";
/// The books of a scheduler or KV block manager do not balance: `subject` what is wrong.
pub const AUDIT_FAILED: &str = "audit.failed";
/// A KV block does not hold what its table claims: `subject` where, `key` the request.
pub const KV_MISMATCH: &str = "kv.mismatch";
/// A shard has reserved device memory: `subject` `REPLICA/STAGE/RANK`, `key` the bytes of its
/// weights, KV blocks and workspace, `value` the device's free bytes before.
pub const MEMORY_RESERVED: &str = "memory.reserved";
/// A stage's weights were loaded: `subject` which layers of which rank on which device, `key` a hash
/// over all matrices as they lie there, `value` their bytes.
pub const WEIGHTS_LOADED: &str = "weights.loaded";
/// Weights were not what they must be, and the load was refused: `subject` which and why.
pub const WEIGHTS_REFUSED: &str = "weights.refused";
/// A drain began or ended: `subject` `begun` or `ended`, `value` requests left.
pub const DRAIN: &str = "node.drain";

/// Tells `node`'s fault hook, if one is armed.
#[inline]
pub fn tell(
    node: &Node,
    name: &'static str,
    subject: impl FnOnce() -> String,
    (key, value): (u64, u64),
) {
    let faults = node.faults();
    faults.tell(|| Fact { node: node.name().clone(), name, subject: subject(), key, value });
}
