//! Whole hosts in one process, on an in-memory network, with the hash engine: what must hold while
//! engines panic, nodes vanish, clients leave and memory runs out. The oracle is the hash engine
//! run by itself, one sequence at a time, so a lost or foreign block shows in the text.

mod cache;
mod devices;
mod engines;
mod failures;
mod harness;
mod hook;
mod limits;
mod metrics;
mod placing;
mod watchdog;
