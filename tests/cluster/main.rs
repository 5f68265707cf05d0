//! Whole clusters, as users run them: `dunlin up` with real node processes, a real model or the hash
//! engine, and a plain HTTP client.
//!
//! What is compared is what the client gets: text, tokens, log probabilities, positions, the finish
//! and the usage. Times only bound how long a test may wait for something that must happen.

mod availability;
mod drains;
mod harness;
mod http;
mod kills;
mod load;
mod mixed;
#[path = "../ports/mod.rs"]
mod ports;
mod topologies;
