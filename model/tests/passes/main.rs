//! Promises of the forward pass and the engines that need no golden files: a sequence's numbers
//! do not depend on stages, chunks or company, and tensor ranks add up.

mod group;
mod harness;
mod hash;
mod invariance;
mod ranks;
mod refusals;
mod synthetic;
