//! The actors of a Dunlin cluster. Each folder holds a pure core and the thin actor around it.
//!
//! A request's path: [`gateway`] accepts it, [`router`] logs and places it, [`scheduler`] plans
//! each step over [`kv`] blocks, [`shard`] runs the plan.

pub mod engines;
pub mod facts;
pub mod faulty;
pub mod gateway;
pub mod hash_engines;
pub mod host;
pub mod kv;
mod lease;
pub mod messages;
pub mod placement;
pub mod router;
pub mod scheduler;
pub mod shard;
pub mod status;
pub mod telemetry;
