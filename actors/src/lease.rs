//! What a node may do whose lease has run out: nothing.
//!
//! The head may have placed this node's replicas elsewhere by then. Epochs keep what such a node
//! computes from mattering; this keeps it from computing.

use dunlin_runtime::{Lease, Node};
use tokio::sync::watch;

/// Watches the node's lease for one actor.
pub(crate) struct LeaseGuard {
    lease: watch::Receiver<Lease>,
    /// The first heartbeat grants it, which may be a moment after the first message.
    was_live: bool,
}

impl LeaseGuard {
    pub fn new(node: &Node) -> Self {
        Self { lease: node.lease(), was_live: false }
    }

    /// Says what to do about it if the lease has run out since this actor began.
    pub fn check(&mut self) -> Result<(), String> {
        let live = self.lease.borrow().is_live();
        let ran_out = self.was_live && !live;
        self.was_live |= live;
        match ran_out {
            true => Err("this node's lease ran out: the head was not heard in time".into()),
            false => Ok(()),
        }
    }
}
