//! Node processes and what connects them: configuration, QUIC links, mailboxes, supervision,
//! membership, telemetry.
//!
//! This crate knows nothing of inference: no token, no tensor, no model.

pub mod certs;
pub mod supervise;
