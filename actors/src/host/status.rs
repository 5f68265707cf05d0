//! Gathers [`ClusterStatus`] from router, placement, agents and links.

use super::probe::Readiness;
use super::{AGENT_ROLE, HostOptions};
use crate::messages::{
    AgentCall, AgentProtocol, AgentReply, PlacementCall, PlacementProtocol, PlacementReply,
    RouterCall, RouterProtocol, RouterReply,
};
use crate::status::{ClusterStatus, NodeStatus};
use dunlin_runtime::supervise::BoxFuture;
use dunlin_runtime::{Address, Node, NodeName};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;

/// A status page must not hang because a node does.
const DEADLINE: Duration = Duration::from_millis(1500);

/// Asks anew at every call.
pub type StatusSource = Arc<dyn Fn() -> BoxFuture<ClusterStatus> + Send + Sync>;

pub fn source(
    node: Node,
    options: Arc<HostOptions>,
    router: Address,
    placement: Address,
    ready: watch::Receiver<Readiness>,
) -> StatusSource {
    Arc::new(move || {
        let (node, options) = (node.clone(), options.clone());
        let (router, placement, ready) = (router.clone(), placement.clone(), ready.clone());
        Box::pin(async move {
            let nodes = options.nodes.iter().map(|(name, address)| {
                let (node, name, address) = (node.clone(), name.clone(), address.clone());
                tokio::spawn(async move { look_at(&node, name, address).await })
            });
            let nodes: Vec<_> = nodes.collect();
            let router = node.call::<RouterProtocol>(&router, &RouterCall::Status, DEADLINE).await;
            let replicas =
                node.call::<PlacementProtocol>(&placement, &PlacementCall::Status, DEADLINE).await;
            let mut status = ClusterStatus {
                cluster: options.cluster.clone(),
                model: options.model.clone(),
                version: env!("CARGO_PKG_VERSION").into(),
                head: options.head.to_string(),
                ready: ready.borrow().ready,
                faults_armed: node.faults().is_armed(),
                nodes: Vec::new(),
                replicas: match replicas {
                    Ok(PlacementReply::Status(states)) => states,
                    Err(_) => Vec::new(),
                },
                router: match router {
                    Ok(RouterReply::Status(status)) => Some(status),
                    _ => None,
                },
            };
            for task in nodes {
                status.nodes.extend(task.await);
            }
            status
        })
    })
}

async fn look_at(node: &Node, name: NodeName, address: String) -> NodeStatus {
    let to = Address::new(name.clone(), AGENT_ROLE, "main");
    let link = node.peers().into_iter().find(|peer| peer.node == name);
    let own = name == *node.name();
    let up = own || link.as_ref().is_some_and(|l| l.up);
    let mut status = NodeStatus {
        name: name.to_string(),
        address,
        state: if own {
            "self"
        } else if up {
            "up"
        } else {
            "down"
        }
        .into(),
        incarnation: match own {
            true => Some(node.incarnation().0),
            false => link.as_ref().and_then(|l| l.incarnation).map(|i| i.0),
        },
        reason: link.as_ref().filter(|_| !up).and_then(|l| l.last_error.clone()),
        rtt_us: link
            .as_ref()
            .and_then(|l| l.rtt)
            .map(|rtt| u64::try_from(rtt.as_micros()).unwrap_or(u64::MAX)),
        lost_packets: link.as_ref().map(|l| l.lost_packets),
        devices: Vec::new(),
        actors: Vec::new(),
    };
    if !up {
        return status;
    }
    let describe = node.call::<AgentProtocol>(&to, &AgentCall::Describe, DEADLINE).await;
    if let Ok(AgentReply::Described { description, .. }) = describe {
        let line = |d: &crate::messages::DeviceDescription| format!("{}: {}", d.id, d.description);
        status.devices = description.devices.iter().map(line).collect();
    }
    if let Ok(AgentReply::Tree(actors)) =
        node.call::<AgentProtocol>(&to, &AgentCall::Tree, DEADLINE).await
    {
        status.actors = actors;
    }
    status
}
