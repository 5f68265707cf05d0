//! What `GET /cluster/status` answers and `dunlin status` prints.

use crate::messages::{ActorStatus, ReplicaState, RouterStatus};
use serde::{Deserialize, Serialize};

/// The cluster as the asked node sees it.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct ClusterStatus {
    pub cluster: String,
    pub model: String,
    pub version: String,
    pub head: String,
    /// Whether a token has gone through the whole pipeline since this node started.
    pub ready: bool,
    /// Whether the asked node takes injected faults (`dunlin node --faults`).
    #[serde(default)]
    pub faults_armed: bool,
    pub nodes: Vec<NodeStatus>,
    pub replicas: Vec<ReplicaState>,
    /// `None` while the head cannot be reached.
    pub router: Option<RouterStatus>,
}

/// One node of `cluster.toml`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct NodeStatus {
    pub name: String,
    pub address: String,
    /// `up`, `down`, or `self` for the node that answers.
    pub state: String,
    pub incarnation: Option<u64>,
    /// Why it is down, or what went wrong last.
    pub reason: Option<String>,
    /// Smoothed round-trip time of its control link, in microseconds.
    pub rtt_us: Option<u64>,
    pub lost_packets: Option<u64>,
    /// `id: description` of each device.
    pub devices: Vec<String>,
    /// The node's supervision tree, parents before children.
    pub actors: Vec<ActorStatus>,
}
