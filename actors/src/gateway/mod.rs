//! The gateway: OpenAI's HTTP API in front of the router.
//!
//! A request's path through these files: [`server`] (connection) -> [`http`] (endpoint) ->
//! [`request`] (what was asked) -> [`prepare`] (tokens) -> [`exchange`] (the router's events) ->
//! [`answer`] (text) -> [`wire`] (OpenAI's objects), whole or through [`sse`].
//!
//! Invariants: everything is validated before work starts; every response ends exactly once; a
//! stream's text equals the whole answer's; work whose client is gone is cancelled, because each
//! request with the router is held by a guard in the handler or body that waits for it.
//!
//! The gateway knows nothing of replicas, schedulers, KV blocks or devices. What it knows of a
//! model is [`TextModel`], and how the blocks of a prompt are named ([`KeySpace`]): it computes the
//! names, on the tasks of its connections, so that the one router has no prompt to hash.

mod answer;
mod auth;
mod error;
mod exchange;
mod fields;
mod http;
mod limits;
mod metrics;
mod prepare;
mod registry;
mod request;
mod server;
mod sse;
#[cfg(test)]
mod tests;
mod text;
mod wire;

pub use auth::{ApiKey, DEFAULT_TENANT};
pub use http::DETAILS;
pub use limits::Limits;
pub use metrics::export_metrics;
pub use text::{ByteModel, ChatMessage, Detokenizer, TextError, TextModel};

use crate::messages::{GatewayCall, GatewayCast, GatewayProtocol, KeySpace};
use auth::Keys;
use dunlin_runtime::{Address, Export, ExportError, Inbound, Node, PeerEvent};
use http::Shared;
use ractor::{Actor, ActorCell, ActorProcessingErr, ActorRef, RpcReplyPort};
use registry::Registry;
use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio::task::{AbortHandle, JoinHandle};

const ROUTER_RESTARTED: &str = "the router was restarted and has lost this request";

/// Whether the cluster can serve; if not, why. Where it serves with less than it should have, what
/// is missing; else an empty text.
pub type Ready = Arc<dyn Fn() -> Result<String, String> + Send + Sync>;
/// Metrics in Prometheus' text format.
pub type MetricsText = Arc<dyn Fn() -> String + Send + Sync>;
/// The answer of `/cluster/status`.
pub type StatusJson =
    Arc<dyn Fn() -> Pin<Box<dyn Future<Output = serde_json::Value> + Send>> + Send + Sync>;

/// What a gateway is made of.
pub struct GatewayArgs {
    pub node: Node,
    /// Where requests go.
    pub router: Address,
    /// Where HTTP is served; port 0 takes a free one.
    pub http: SocketAddr,
    pub model: Arc<dyn TextModel>,
    /// How this node's configuration names KV blocks; replicas of another kind cost the router.
    pub key_space: KeySpace,
    /// Names the model answers to; the first is the one it is listed and reported under.
    pub models: Vec<String>,
    /// Changes with what can change an answer (model, version).
    pub fingerprint: String,
    pub limits: Limits,
    /// Empty: no key is needed.
    pub api_keys: Vec<ApiKey>,
    pub ready: Ready,
    pub metrics: MetricsText,
    pub status: StatusJson,
}

/// Why a gateway did not start.
#[derive(Debug, thiserror::Error)]
pub enum GatewayError {
    #[error(
        "[node.{node}] http = \"{address}\" cannot be listened on: {source}; stop what uses the \
         address, or choose another"
    )]
    Bind { node: String, address: SocketAddr, source: io::Error },
    #[error("the gateway's mailbox cannot be exported: {0}")]
    Export(#[from] ExportError),
    #[error("the gateway's actor cannot be spawned: {0}")]
    Spawn(String),
}

/// What the gateway's actor understands.
pub enum GatewayMessage {
    /// Refuse new requests, let running ones end, then stop; answers when all have ended.
    Drain(RpcReplyPort<()>),
    /// The last request of a drain ended.
    Drained,
    /// The server's task is over: by drain, or because it broke.
    ServerEnded,
    /// Is anybody there?
    Ping(RpcReplyPort<()>),
    /// A message from the router, which takes this way only while a fault plan is armed.
    Cast(GatewayCast),
}

impl GatewayMessage {
    fn name(&self) -> &'static str {
        match self {
            GatewayMessage::Drain(_) => "Drain",
            GatewayMessage::Drained => "Drained",
            GatewayMessage::ServerEnded => "ServerEnded",
            GatewayMessage::Ping(_) => "Ping",
            GatewayMessage::Cast(GatewayCast::Event { .. }) => "Event",
        }
    }
}

/// Starts a gateway under `supervisor` and tells where it listens.
///
/// # Errors
/// The address is not free, the mailbox is taken, or the actor cannot be spawned.
pub async fn start_gateway(
    args: GatewayArgs,
    supervisor: ActorCell,
) -> Result<(ActorCell, SocketAddr), GatewayError> {
    let node = args.node.name().to_string();
    let bind = |source| GatewayError::Bind { node: node.clone(), address: args.http, source };
    let listener = TcpListener::bind(args.http).await.map_err(bind)?;
    let address = listener.local_addr().map_err(bind)?;
    let registry = Registry::new(args.node.clone(), args.router.clone());
    let inbox = registry.clone();
    // Where a fault plan is armed, events go through the actor, whose handling may then be hit.
    let armed = args.node.faults().is_armed();
    let actor: Arc<OnceLock<ActorRef<GatewayMessage>>> = Arc::default();
    let through = actor.clone();
    let export =
        args.node.export::<GatewayProtocol>("gateway", "main", move |inbound| match inbound {
            Inbound::Cast { msg, .. } => match through.get().filter(|_| armed) {
                Some(actor) => drop(actor.cast(GatewayMessage::Cast(msg))),
                None => inbox.dispatch(msg),
            },
            Inbound::Call { msg: GatewayCall::RouterRestarted, reply, .. } => {
                inbox.fail_all(ROUTER_RESTARTED);
                reply.send(());
            }
        })?;
    let shared = Arc::new(Shared {
        registry,
        reply_to: args.node.address("gateway", "main"),
        model: args.model,
        key_space: args.key_space,
        models: args.models,
        fingerprint: args.fingerprint,
        limits: args.limits,
        keys: Keys::new(&args.api_keys),
        ready: args.ready,
        metrics: args.metrics,
        status: args.status,
        started: dunlin_runtime::wall::unix_seconds(),
        draining: AtomicBool::new(false),
        busy: watch::Sender::new(0),
    });
    let parts = Parts { listener, export, shared };
    let spawned = Actor::spawn_linked(None, Gateway, parts, supervisor).await;
    let (spawned, _) = spawned.map_err(|error| GatewayError::Spawn(error.to_string()))?;
    let _ = actor.set(spawned.clone());
    Ok((spawned.get_cell(), address))
}

/// Refuses new requests and waits until the running ones have ended and the server is closed, at
/// most `patience`. Tells whether it got that far.
pub async fn drain(gateway: &ActorCell, patience: Duration) -> bool {
    let gateway: ActorRef<GatewayMessage> = gateway.clone().into();
    let answer = gateway.call(GatewayMessage::Drain, Some(patience)).await;
    matches!(answer, Ok(ractor::rpc::CallResult::Success(())))
}

/// Whether the gateway's actor answers within `patience`; also true if it has ended.
pub async fn answers(gateway: &ActorCell, patience: Duration) -> bool {
    let gateway: ActorRef<GatewayMessage> = gateway.clone().into();
    let answer = gateway.call(GatewayMessage::Ping, Some(patience)).await;
    !matches!(answer, Ok(ractor::rpc::CallResult::Timeout))
}

/// The actor: owns the mailbox and the server, and ends both.
struct Gateway;

struct Parts {
    listener: TcpListener,
    export: Export,
    shared: Arc<Shared>,
}

struct State {
    shared: Arc<Shared>,
    closing: watch::Sender<bool>,
    waiting: Vec<RpcReplyPort<()>>,
    _export: Export,
    _tasks: Vec<AbortOnDrop>,
}

/// However the actor ends, by stop, kill or panic, its tasks end with its state.
struct AbortOnDrop(AbortHandle);

impl Drop for AbortOnDrop {
    fn drop(&mut self) {
        self.0.abort();
    }
}

impl From<JoinHandle<()>> for AbortOnDrop {
    fn from(task: JoinHandle<()>) -> Self {
        Self(task.abort_handle())
    }
}

impl Actor for Gateway {
    type Msg = GatewayMessage;
    type State = State;
    type Arguments = Parts;

    async fn pre_start(
        &self,
        myself: ActorRef<Self::Msg>,
        parts: Parts,
    ) -> Result<State, ActorProcessingErr> {
        let Parts { listener, export, shared } = parts;
        let (closing, closed) = watch::channel(false);
        let serving = server::serve(listener, shared.clone(), closed);
        let server = tokio::spawn(async move {
            serving.await;
            let _ = myself.cast(GatewayMessage::ServerEnded);
        });
        let peers = tokio::spawn(watch_router(shared.registry.clone()));
        let tasks = vec![server.into(), peers.into()];
        Ok(State { shared, closing, waiting: Vec::new(), _export: export, _tasks: tasks })
    }

    async fn handle(
        &self,
        myself: ActorRef<Self::Msg>,
        message: Self::Msg,
        state: &mut State,
    ) -> Result<(), ActorProcessingErr> {
        let node = &state.shared.registry.node;
        crate::faulty::message(node, "gateway", "main", message.name()).await;
        match message {
            GatewayMessage::Ping(reply) => drop(reply.send(())),
            GatewayMessage::Cast(cast) => state.shared.registry.dispatch(cast),
            GatewayMessage::Drain(reply) => {
                state.waiting.push(reply);
                let first = !state.shared.draining.swap(true, Ordering::SeqCst);
                if first {
                    let mut busy = state.shared.busy.subscribe();
                    tokio::spawn(async move {
                        let _ = busy.wait_for(|count| *count == 0).await;
                        let _ = myself.cast(GatewayMessage::Drained);
                    });
                }
            }
            GatewayMessage::Drained => {
                state.closing.send_replace(true);
            }
            GatewayMessage::ServerEnded => {
                let drained = *state.closing.borrow();
                for reply in state.waiting.drain(..) {
                    let _ = reply.send(());
                }
                if !drained {
                    return Err("the http server ended by itself".into());
                }
                myself.stop(Some("drained".into()));
            }
        }
        Ok(())
    }
}

/// A router that came back as a new life of its node has forgotten every request it had.
async fn watch_router(registry: Arc<Registry>) {
    let mut events = registry.node.watch();
    let peers = registry.node.peers();
    let router = peers.into_iter().find(|peer| peer.node == registry.router.node);
    let mut known = router.and_then(|peer| peer.incarnation);
    loop {
        match events.recv().await {
            Ok(PeerEvent::Up { peer }) if peer.node == registry.router.node => {
                let before = known.replace(peer.incarnation);
                if before.is_some_and(|before| before != peer.incarnation) {
                    registry.fail_all(ROUTER_RESTARTED);
                }
            }
            Ok(_) | Err(tokio::sync::broadcast::error::RecvError::Lagged(_)) => {}
            Err(tokio::sync::broadcast::error::RecvError::Closed) => return,
        }
    }
}
