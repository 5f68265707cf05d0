//! The actors of a Dunlin cluster. Each folder holds a pure core and the thin actor around it.
//!
//! A request's path: [`gateway`] accepts it, [`router`] logs and places it, [`scheduler`] plans
//! each step over [`kv`] blocks, [`shard`] runs the plan.

pub mod kv;
pub mod messages;
pub mod router;
pub mod scheduler;
pub mod telemetry;
