//! Actors that do not answer. A panic ends an actor and its supervisor sees it; an actor that hangs
//! in its `handle` does nothing at all. So the ones that can be asked are asked, and one that has
//! not answered within the deadline is killed: its supervisor starts it anew.

use super::{AGENT_ROLE, HostOptions};
use crate::messages::{
    AgentCall, AgentProtocol, PlacementCall, PlacementProtocol, ReplicaPlan, RouterCall,
    RouterProtocol, SchedulerCall, SchedulerProtocol,
};
use crate::{gateway, placement, router, scheduler};
use dunlin_runtime::supervise::SupervisorHandle;
use dunlin_runtime::{CallError, Node, Protocol};
use std::sync::Arc;
use std::time::Duration;

/// Watches this node's agent and gateway and, on the head, router and placement, for as long as `root` runs.
pub fn start(node: Node, root: SupervisorHandle, options: Arc<HostOptions>) {
    let deadline = options.step_deadline;
    let agent = (node.clone(), root.clone());
    tokio::spawn(async move {
        let (node, root) = agent;
        let ask = || silent::<AgentProtocol>(&node, AGENT_ROLE, "main", AgentCall::Tree, deadline);
        kill_silent(&root, "agent", deadline, ask).await;
    });
    if options.http.is_some() {
        let root = root.clone();
        tokio::spawn(async move {
            let ask = || async {
                match root.child(super::GATEWAY).await {
                    Ok(Some(cell)) => !gateway::answers(&cell, deadline).await,
                    _ => false,
                }
            };
            kill_silent(&root, super::GATEWAY, deadline, ask).await;
        });
    }
    if options.head != *node.name() {
        return;
    }
    let at_router = (node.clone(), root.clone());
    tokio::spawn(async move {
        let (node, root) = at_router;
        let ask = || {
            let (role, instance) = (router::ROLE, router::INSTANCE);
            silent::<RouterProtocol>(&node, role, instance, RouterCall::Status, deadline)
        };
        kill_silent(&root, "router", deadline, ask).await;
    });
    tokio::spawn(async move {
        let ask = || {
            let (role, instance) = (placement::ROLE, placement::INSTANCE);
            silent::<PlacementProtocol>(&node, role, instance, PlacementCall::Status, deadline)
        };
        kill_silent(&root, "placement", deadline, ask).await;
    });
}

/// Ends, with the reason, once the replica's scheduler on this node does not answer any more;
/// never where it runs on another node.
pub async fn scheduler_silent(node: &Node, plan: &ReplicaPlan, deadline: Duration) -> String {
    if plan.leader() != node.name() {
        return std::future::pending().await;
    }
    loop {
        tokio::time::sleep(deadline / 2).await;
        let (role, call) = (scheduler::ROLE, SchedulerCall::Status);
        let ask = silent::<SchedulerProtocol>(node, role, &plan.replica, call, deadline / 2);
        if ask.await {
            let replica = &plan.replica;
            return format!("scheduler/{replica} on {} does not answer", node.name());
        }
    }
}

/// Whether the actor is there and does not answer.
async fn silent<P: Protocol>(
    node: &Node,
    role: &str,
    instance: &str,
    call: P::Call,
    deadline: Duration,
) -> bool {
    let answer = node.call::<P>(&node.address(role, instance), &call, deadline).await;
    matches!(answer, Err(CallError::Deadline { .. }))
}

async fn kill_silent<F: Future<Output = bool>>(
    root: &SupervisorHandle,
    child: &str,
    period: Duration,
    ask: impl Fn() -> F,
) {
    loop {
        tokio::time::sleep(period / 2).await;
        if !root.is_running() {
            return;
        }
        if !ask().await {
            continue;
        }
        tracing::error!(supervisor = root.name(), child, "does not answer and is killed");
        if let Ok(Some(cell)) = root.child(child).await {
            cell.kill();
        }
    }
}
