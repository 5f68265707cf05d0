//! The gateway against a scripted router: raw bytes to a real socket, raw bytes back.

mod connections;
mod disconnects;
mod endings;
mod harness;
mod refusals;
mod shapes;
mod streams;
