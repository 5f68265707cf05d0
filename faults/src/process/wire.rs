//! What the runner and the nodes of its cluster say to each other: lines of JSON over a unix socket.
//!
//! Times are microseconds of the system's monotonic clock, which all processes of a machine share.

use crate::fault::Fault;
use dunlin_actors::messages::{LoadReport, ReplicaState, RouterStatus};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// From the runner to a node.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ToNode {
    /// Answers [`FromNode::Hello`]; the node's start waits for it. These faults are armed already.
    Go {
        seed: u64,
        faults: Vec<Fault>,
    },
    Arm(Fault),
    /// Its trigger is a site of this node: count, and arm it when it is met.
    Watch(Fault),
    /// What the fault does ends; its id.
    Disarm(String),
    /// Request number `number` of the workload has this id in the cluster.
    Name {
        number: u64,
        id: u64,
    },
    /// Answered by [`FromNode::Answer`] with the same id.
    Ask {
        id: u64,
        replicas: Vec<String>,
    },
    /// Answered by [`FromNode::Sample`]: the same books, without audits.
    Sample {
        replicas: Vec<String>,
    },
}

/// From a node to the runner.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FromNode {
    Hello {
        node: String,
        pid: u32,
    },
    /// `fault` is whose effect the fact proves, for `fault.done`.
    Fact {
        us: u64,
        name: String,
        subject: String,
        key: u64,
        value: u64,
        fault: Option<String>,
    },
    /// A fault has hit a site.
    Hit {
        us: u64,
        fault: String,
        action: String,
    },
    /// The trigger of a watched fault is met.
    Reached {
        us: u64,
        fault: String,
    },
    /// What was read back of a fault that has no site (a link, a clock).
    Proof {
        us: u64,
        fault: String,
        text: String,
    },
    /// A shard's steps have other requests in them than before.
    Running {
        us: u64,
        shard: String,
        requests: Vec<u64>,
    },
    Answer {
        id: u64,
        state: Box<NodeState>,
    },
    Sample {
        us: u64,
        state: Box<NodeState>,
    },
    /// So many messages did not fit the queue to the runner.
    Lost(u64),
}

/// A node's books, as it sees them.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct NodeState {
    pub incarnation: u64,
    /// Peers with a link, and their incarnation.
    pub peers: BTreeMap<String, u64>,
    /// Bytes of mail that each peer has not acknowledged, where there are any.
    pub queued: BTreeMap<String, u64>,
    /// Of the schedulers on this node: load, and what their audit found.
    pub schedulers: BTreeMap<String, (LoadReport, Vec<String>)>,
    /// Of the router and placement, on the head.
    pub router: Option<RouterStatus>,
    pub replicas: Vec<ReplicaState>,
}

/// Microseconds of the monotonic clock.
pub fn now_us() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    let (seconds, nanos) = (u64::try_from(now.tv_sec), u64::try_from(now.tv_nsec));
    seconds.unwrap_or(0) * 1_000_000 + nanos.unwrap_or(0) / 1000
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_survive_the_wire() {
        let fact = FromNode::Fact {
            us: 1,
            name: "peer.down".into(),
            subject: "left\n\"".into(),
            key: u64::MAX,
            value: 0,
            fault: None,
        };
        let line = serde_json::to_string(&fact).expect("plain data");
        assert!(!line.contains('\n'));
        assert_eq!(serde_json::from_str::<FromNode>(&line).expect("as written"), fact);
        assert!(now_us() > 0);
    }
}
