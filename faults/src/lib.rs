//! Fault plans: what to break, when, in which mode; whether it broke; and whether all that must
//! hold still held.
//!
//! A [`fault::Fault`] is one fault with every draw made. A mode (the simulator in [`sim`], real
//! processes in [`process`]) carries a list of them out and writes a [`record::Record`]. The
//! invariants, the verdict, the metrics and the report read that record and nothing else, so both
//! modes are judged by the same code.
//!
//! This crate knows nothing of HTTP servers, models' weights or kernels.

pub mod armory;
pub mod catalog;
pub mod coverage;
pub mod draw;
pub mod events;
pub mod fault;
pub mod gauges;
pub mod heal;
pub mod invariant;
pub mod measure;
pub mod plan;
pub mod process;
pub mod record;
pub mod report;
pub mod resolved;
pub mod schedule;
pub mod shrink;
pub mod sim;
pub mod verdict;
