//! Readiness: whether a request that comes now would be served, and if not, why.
//!
//! A node is ready once one real token has gone through the whole pipeline (a request of one
//! token by the probe itself) and as long as the router has a replica to give work to.

use crate::messages::{
    GatewayCast, GatewayProtocol, PlacementCall, PlacementProtocol, PlacementReply, ReplicaState,
    Request, RequestId, RouterCall, RouterProtocol, RouterReply, StreamEvent,
};
use dunlin_model::sampling::SamplingParams;
use dunlin_runtime::{Address, Inbound, Node};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinHandle;

const DEADLINE: Duration = Duration::from_secs(5);
const FIRST_TOKEN_DEADLINE: Duration = Duration::from_secs(60);
const PERIOD_BEFORE: Duration = Duration::from_millis(50);
const PERIOD_AFTER: Duration = Duration::from_millis(500);

/// The state and, while not ready, the reason. A reason beside `ready`: some replica is missing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Readiness {
    pub ready: bool,
    pub reason: String,
}

/// Starts the probe; it ends with the returned task.
pub fn start(
    node: Node,
    router: Address,
    placement: Address,
    draining: watch::Receiver<bool>,
) -> (watch::Receiver<Readiness>, JoinHandle<()>) {
    let first = Readiness { ready: false, reason: "nothing has been asked yet".into() };
    let (tell, watch) = watch::channel(first);
    let task = tokio::spawn(async move {
        let (mut proven, mut probes) = (false, 0);
        loop {
            let state = look(&node, &router, &placement, &draining, &mut proven, &mut probes).await;
            tell.send_if_modified(|old| std::mem::replace(old, state.clone()) != state);
            tokio::time::sleep(if proven { PERIOD_AFTER } else { PERIOD_BEFORE }).await;
        }
    });
    (watch, task)
}

/// What the gateway asks before it answers `/health`.
pub fn as_closure(
    watch: watch::Receiver<Readiness>,
) -> Arc<dyn Fn() -> Result<String, String> + Send + Sync> {
    Arc::new(move || {
        let state = watch.borrow();
        if state.ready { Ok(state.reason.clone()) } else { Err(state.reason.clone()) }
    })
}

async fn look(
    node: &Node,
    router: &Address,
    placement: &Address,
    draining: &watch::Receiver<bool>,
    proven: &mut bool,
    probes: &mut u64,
) -> Readiness {
    let not = |reason: String| Readiness { ready: false, reason };
    if *draining.borrow() {
        return not("the node is draining".into());
    }
    let status = match node.call::<RouterProtocol>(router, &RouterCall::Status, DEADLINE).await {
        Ok(RouterReply::Status(status)) => status,
        Ok(_) => return not("the router answered beside the point".into()),
        Err(error) => return not(format!("the router cannot be reached: {error}")),
    };
    if status.draining {
        return not("the cluster is draining".into());
    }
    if status.replicas.is_empty() {
        return not(why_no_replica(node, placement).await);
    }
    if !*proven {
        *probes += 1;
        if let Err(reason) = one_token(node, router, *probes).await {
            return not(reason);
        }
        *proven = true;
    }
    Readiness { ready: true, reason: missing(node, placement).await }
}

/// The replicas that do not serve, and why; empty if all do.
async fn missing(node: &Node, placement: &Address) -> String {
    match node.call::<PlacementProtocol>(placement, &PlacementCall::Status, DEADLINE).await {
        Ok(PlacementReply::Status(states)) => {
            describe(states.iter().filter(|state| state.state != "ready"))
        }
        Err(error) => format!("placement cannot be reached: {error}"),
    }
}

fn describe<'a>(states: impl Iterator<Item = &'a ReplicaState>) -> String {
    let one = |s: &ReplicaState| format!("replica {} is {}: {}", s.replica, s.state, s.reason);
    states.map(one).collect::<Vec<_>>().join("; ")
}

async fn why_no_replica(node: &Node, placement: &Address) -> String {
    match node.call::<PlacementProtocol>(placement, &PlacementCall::Status, DEADLINE).await {
        Ok(PlacementReply::Status(states)) if states.is_empty() => {
            "no replica is planned yet: waiting for all nodes with devices".into()
        }
        Ok(PlacementReply::Status(states)) => describe(states.iter()),
        Err(error) => format!("placement cannot be reached: {error}"),
    }
}

/// Sends a request of one token through the router, as any client's would go.
async fn one_token(node: &Node, router: &Address, count: u64) -> Result<(), String> {
    // The id is unique in the cluster: node and incarnation name this life of this node, which
    // counts its probes.
    let mut hash = blake3::Hasher::new();
    hash.update(node.name().as_str().as_bytes());
    hash.update(&node.incarnation().0.to_le_bytes());
    hash.update(&count.to_le_bytes());
    let mut first = [0; 8];
    first.copy_from_slice(&hash.finalize().as_bytes()[..8]);
    let id = RequestId(u64::from_le_bytes(first));
    let instance = format!("probe-{count}");
    let (tell, mut events) = mpsc::unbounded_channel();
    let _export = node
        .export::<GatewayProtocol>("probe", &instance, move |inbound| {
            if let Inbound::Cast { msg: GatewayCast::Event { event, .. }, .. } = inbound {
                let _ = tell.send(event);
            }
        })
        .map_err(|error| error.to_string())?;
    let request = Request {
        id,
        tenant: "dunlin-probe".into(),
        cache_salt: String::new(),
        prompt: vec![1],
        keys: None,
        sampling: SamplingParams::default(),
        max_tokens: 1,
        min_tokens: 0,
        stop_tokens: Vec::new(),
        prompt_logprobs: None,
        deadline_ms: u64::try_from(FIRST_TOKEN_DEADLINE.as_millis()).unwrap_or(u64::MAX),
        reply_to: node.address("probe", &instance),
    };
    let call = RouterCall::Submit(Box::new(request));
    match node.call::<RouterProtocol>(router, &call, DEADLINE).await {
        Ok(RouterReply::Submitted(Ok(()))) => {}
        Ok(RouterReply::Submitted(Err(refusal))) => return Err(refusal.to_string()),
        Ok(_) => return Err("the router answered beside the point".into()),
        Err(error) => return Err(error.to_string()),
    }
    loop {
        match tokio::time::timeout(FIRST_TOKEN_DEADLINE, events.recv()).await {
            Ok(Some(StreamEvent::Finished { .. })) => return Ok(()),
            Ok(Some(StreamEvent::Failed { message, .. })) => return Err(message),
            Ok(Some(StreamEvent::Cancelled { .. })) | Ok(None) => {
                return Err("the probe was cancelled".into());
            }
            Ok(Some(_)) => {}
            Err(_) => return Err(format!("no token within {FIRST_TOKEN_DEADLINE:?}")),
        }
    }
}
