//! Names of facts and messages that plans may wait for, and that checkers read.
//!
//! Runtime and actors tell most of them (`runtime::faults::names`, `actors::facts`); those of
//! [`wanted`] are read by checkers where a mode or an engine can tell them.

use dunlin_actors::facts;
use dunlin_runtime::faults::names;

/// Facts that checkers know, beyond what runtime and actors tell by themselves.
pub mod wanted {
    pub use dunlin_actors::facts::{KV_MISMATCH, WEIGHTS_LOADED, WEIGHTS_REFUSED};
    /// A draft window was verified: `key` the request, `value` the tokens that it committed.
    pub const DRAFT_VERIFIED: &str = "draft.verified";
}

/// Every fact that a trigger may name.
pub const EVENTS: [&str; 31] = [
    names::PEER_UP,
    names::PEER_DOWN,
    names::FRAME_REFUSED,
    names::ACTOR_RESTARTED,
    names::ESCALATED,
    names::LEASE_EXPIRED,
    names::LEASE_LIVE,
    names::FAULT_DONE,
    facts::REQUEST_ACCEPTED,
    facts::TOKEN_LOGGED,
    facts::TOKEN_DELIVERED,
    facts::REQUEST_ENDED,
    facts::REQUEST_REPLAYED,
    facts::EPOCH_BUMPED,
    facts::REPLICA_UP,
    facts::REPLICA_DOWN,
    facts::STEP_PLANNED,
    facts::STEP_DONE,
    facts::STEP_FAILED,
    facts::PREEMPTED,
    facts::PREFIX_HIT,
    facts::EVICTED,
    facts::STALE_REFUSED,
    facts::PLAN_MISMATCH,
    facts::AUDIT_FAILED,
    facts::MEMORY_RESERVED,
    facts::DRAIN,
    wanted::KV_MISMATCH,
    wanted::WEIGHTS_LOADED,
    wanted::WEIGHTS_REFUSED,
    wanted::DRAFT_VERIFIED,
];

/// Protocols of control-plane frames, and `flow` for the data plane.
pub const MESSAGES: [&str; 7] =
    ["gateway", "router", "scheduler", "shard", "agent", "placement", "flow"];

/// The protocol that a plan means: its name, or what people call the frames of the data plane.
pub fn message(name: &str) -> Option<&'static str> {
    if name == "Activations" {
        return Some("flow");
    }
    MESSAGES.into_iter().find(|known| *known == name)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every name that the two catalogues declare can be waited for.
    #[test]
    fn no_fact_is_left_out() {
        let sources = [
            include_str!("../../actors/src/facts.rs"),
            include_str!("../../runtime/src/faults.rs"),
        ];
        let mut found = 0;
        for line in sources.iter().flat_map(|text| text.lines()) {
            let Some((_, value)) = line.split_once(": &str = \"") else { continue };
            let Some((name, _)) = value.split_once('"') else { continue };
            found += 1;
            assert!(EVENTS.contains(&name), "{name} is missing in EVENTS");
        }
        assert!(found >= 26, "the catalogues moved: only {found} names were found");
    }
}
