//! What the run has seen so far, for injectors that wait for something to have happened.

use super::wire::NodeState;
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::Notify;

#[derive(Default)]
pub struct Board {
    seen: Mutex<Seen>,
    changed: Notify,
}

#[derive(Debug, Default)]
pub struct Seen {
    pub nodes: BTreeMap<String, NodeSeen>,
    /// All facts, in the order of arrival.
    pub facts: Vec<FactSeen>,
    /// By fault: what its hits did, and what was read back.
    pub hits: BTreeMap<String, Vec<String>>,
    pub proofs: BTreeMap<String, Vec<String>>,
    /// Microseconds of each node's steps, in order.
    pub steps: BTreeMap<String, Vec<u64>>,
    /// Requests (the cluster's ids) in the last step of each shard, by node and shard.
    pub running: BTreeMap<(String, String), Vec<u64>>,
    pub answers: BTreeMap<u64, NodeState>,
    /// The cluster's id of each request of the workload.
    pub ids: BTreeMap<u64, u64>,
    /// Requests that were sent and have not ended.
    pub open: std::collections::BTreeSet<u64>,
    /// Requests that have ended.
    pub over: std::collections::BTreeSet<u64>,
    /// Output tokens that each client has.
    pub tokens: BTreeMap<u64, u32>,
    pub facts_lost: u64,
}

/// A node's process, as its starter sees it.
#[derive(Debug, Clone, Default)]
pub struct NodeSeen {
    pub pid: Option<u32>,
    pub ready: bool,
    /// How often it was started, and became ready.
    pub starts: u32,
    pub readies: u32,
    /// Process, and how it ended.
    pub exits: Vec<(u32, String)>,
}

#[derive(Debug, Clone)]
pub struct FactSeen {
    pub us: u64,
    pub node: String,
    pub name: String,
    pub subject: String,
    pub key: u64,
    pub value: u64,
}

impl Board {
    pub fn new() -> Arc<Board> {
        Arc::new(Board::default())
    }

    pub fn change<T>(&self, change: impl FnOnce(&mut Seen) -> T) -> T {
        let result = change(&mut self.seen.lock());
        self.changed.notify_waiters();
        result
    }

    pub fn read<T>(&self, read: impl FnOnce(&Seen) -> T) -> T {
        read(&self.seen.lock())
    }

    /// Waits until `look` finds something; `None` if it has not by then.
    pub async fn wait<T>(
        &self,
        within: Duration,
        mut look: impl FnMut(&Seen) -> Option<T>,
    ) -> Option<T> {
        let waiting = async {
            loop {
                let changed = self.changed.notified();
                tokio::pin!(changed);
                // Registered before the look, so that no change falls in between.
                changed.as_mut().enable();
                if let Some(found) = look(&self.seen.lock()) {
                    return found;
                }
                changed.await;
            }
        };
        tokio::time::timeout(within, waiting).await.ok()
    }

    pub fn pid(&self, node: &str) -> Option<u32> {
        self.read(|seen| seen.nodes.get(node).and_then(|node| node.pid))
    }
}
