//! Scheduler: decides, step by step, which tokens of which sequences a replica computes.
//!
//! [`Scheduler`] is the pure core. There is no prefill phase and no decode phase: a sequence has
//! tokens that are known (its prompt and what was drawn) and tokens that are computed, and a step
//! hands out computation until the second catch up with the first. Running sequences come first,
//! one token each; what is left of the token budget goes to chunks of prompts. Chunked prefill,
//! prefix hits, preemption and replay are all this one rule.
//!
//! Invariants (checked by `audit()`):
//!
//! - Positions of a request are reported 0, 1, 2, ...; nothing is reported twice, whatever was
//!   preempted in between.
//! - At most [`Limits::steps`] steps are out. A sequence is in two of them only with consecutive
//!   chunks of tokens that are known already, or, with overlap, with the one token that the last
//!   of these draws; stages run steps in order.
//! - Blocks that a step in flight was sent are released only when that step is done.
//! - **Progress**: if nothing is in flight and something waits or runs, a step is planned, or a
//!   request fails, at once. What can never fit is refused at the door (`feasible`).
//! - A request under suspicion of having brought a replica down runs alone until it has moved on
//!   by a token; all others wait for that long.
//!
//! Knows nothing of texts, clients, other replicas or devices.

mod actor;
mod audit;
mod config;
mod core;
mod end;
mod fairness;
mod load;
mod plan;
mod sequence;
#[cfg(test)]
mod tests;

pub use self::core::{Input, Measure, Output, Scheduler};
pub use actor::{ROLE, SchedulerArgs, start_scheduler};
pub use config::{Batching, Limits, SchedulerConfig};
pub use sequence::{Claim, claim_step};
