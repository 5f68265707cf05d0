//! QUIC through quinn: the transport of real clusters.
//!
//! One connection per pair of nodes, with stream priorities, rather than one for control and one
//! for data. Measured on loopback with bulk streams running: small calls p99 0.6-2.9 ms on one
//! connection with priorities, 5-53 ms on two that overflow each other's socket buffer; and one
//! connection has no half-up states. TLS 1.3 with certificates of the cluster's own authority,
//! both ways. A socket wrapper caps the segments of one send (see `socket.rs`) and is where wire
//! faults are injected. Between processes of one machine lanes are Unix sockets
//! (`local.rs`).

mod holder;
mod lanes;
#[cfg_attr(not(target_os = "linux"), path = "no_local.rs")]
mod local;
mod shim;
mod socket;
mod tls;
mod wire;

pub use super::rules::Rules;
pub use socket::SocketHook;
pub use wire::{WireCounters, WireFaults};

use super::{
    BindError, BoxFuture, CloseCode, CloseReason, DialError, Endpoint, FrameSink, FrameSource,
    LaneClass, Link, LinkError, LinkStats, Transport,
};
use crate::address::NodeName;
use crate::certs::NodeIdentity;
use crate::options::ms;
use local::LocalLanes;
use parking_lot::Mutex;
use quinn::{ConnectionError, TransportConfig, VarInt};
use shim::ShimSocket;
use std::net::SocketAddr;
use std::sync::{Arc, Weak};
use std::time::Duration;
use tokio::sync::{Semaphore, mpsc};

/// Settings of the transport. The defaults are measured; change them for unusual networks.
#[derive(Debug, Clone)]
pub struct QuicOptions {
    /// Largest UDP payload that path MTU discovery may reach; both ends accept as much.
    pub max_udp_payload: u16,
    /// A connection that hears nothing for so long is closed.
    pub idle_ms: u64,
    /// 0: none.
    pub keep_alive_ms: u64,
    /// Bytes of the socket's send and receive buffers; the system may cap them.
    pub socket_buffer: usize,
    /// Handshakes under way that were not dialled from here; more are refused.
    pub half_open: usize,
    /// Time for such a handshake.
    pub handshake_ms: u64,
    /// Streams that a peer may have open: mail lanes and flows.
    pub streams: u32,
    /// Between processes of one machine lanes are Unix sockets (`local.rs`). Never where `wire` is to
    /// reach what passes, and on Linux only.
    pub local_lanes: bool,
    /// Faults of this node's datagrams; only where a fault plan is armed.
    pub wire: Option<WireFaults>,
    /// Wraps the socket, for faults of other kinds.
    pub hook: Option<Arc<dyn SocketHook>>,
}

impl Default for QuicOptions {
    fn default() -> Self {
        Self {
            max_udp_payload: 8952,
            idle_ms: 1000,
            keep_alive_ms: 200,
            socket_buffer: 2 << 20,
            half_open: 64,
            handshake_ms: 2000,
            streams: 512,
            local_lanes: true,
            wire: None,
            hook: None,
        }
    }
}

/// The QUIC transport of one node.
pub struct QuicTransport {
    identity: Arc<NodeIdentity>,
    roster: Arc<Roster>,
}

/// What the links of a transport share. The links themselves, and the socket under them, are for
/// faults that hit a connection.
#[derive(Default)]
struct Roster {
    options: QuicOptions,
    links: Mutex<Vec<Weak<QuicLink>>>,
    shim: Mutex<Weak<ShimSocket>>,
}

impl QuicTransport {
    pub fn new(identity: Arc<NodeIdentity>, options: QuicOptions) -> Self {
        Self { identity, roster: Arc::new(Roster { options, ..Roster::default() }) }
    }

    /// Fault `conn.half_open`: this node drops the state of its connection with `peer` and tells
    /// nobody; what the peer goes on sending is not heard. Says how many there were; always 0
    /// without [`QuicOptions::wire`].
    pub fn half_open(&self, peer: &NodeName) -> usize {
        let Some(wire) = &self.roster.options.wire else { return 0 };
        let links = self.roster.links_with(peer);
        if !links.is_empty() {
            wire.forget(peer);
        }
        for link in &links {
            // The close frame does not pass the shim any more.
            link.close(CloseReason::new(CloseCode::Lost, "the connection's state was lost"));
        }
        links.len()
    }

    /// Fault `link.rebind`: the connection with `peer` goes on from another port, as behind a NAT
    /// that forgot it. Only the end that dialled can be moved, as in QUIC itself; `None` if that
    /// is the peer, or there is no link, or no [`QuicOptions::wire`].
    pub fn rebind(&self, peer: &NodeName) -> std::io::Result<Option<u16>> {
        let dialled = self.roster.links_with(peer).iter().any(|link| link.dialled);
        let shim = self.roster.shim.lock().upgrade();
        let (Some(wire), Some(shim), true) = (&self.roster.options.wire, shim, dialled) else {
            return Ok(None);
        };
        let port = shim.open_other()?;
        wire.moved(peer);
        Ok(Some(port))
    }

    fn bind_now(
        &self,
        name: &NodeName,
        address: SocketAddr,
        listen: &str,
    ) -> Result<QuicEndpoint, BindError> {
        let transport = Arc::new(transport_config(&self.roster.options));
        let server = tls::server(&self.identity, transport.clone(), &self.roster.options);
        let client = tls::client(&self.identity, transport);
        let bad = |detail: String| BindError::Certificate { node: name.clone(), detail };
        let (server, client) = (server.map_err(bad)?, client.map_err(bad)?);
        let socket::Opened { socket, shim } = socket::open(address, listen, &self.roster.options)?;
        *self.roster.shim.lock() = shim.as_ref().map_or_else(Weak::new, Arc::downgrade);
        let config = endpoint_config(&self.identity, &self.roster.options);
        let runtime = Arc::new(quinn::TokioRuntime);
        let failed = |e: std::io::Error| BindError::Socket {
            address: listen.to_owned(),
            detail: e.to_string(),
        };
        let endpoint =
            quinn::Endpoint::new_with_abstract_socket(config, Some(server), socket, runtime)
                .map_err(failed)?;
        let local = endpoint.local_addr().map_err(failed)?;
        let (links, accepted) = mpsc::channel(self.roster.options.half_open.max(1));
        let task = tokio::spawn(accept_all(
            endpoint.clone(),
            links,
            self.identity.cluster_id,
            self.roster.clone(),
        ));
        Ok(QuicEndpoint {
            endpoint: Mutex::new(Some(endpoint)),
            client,
            local,
            cluster_id: self.identity.cluster_id,
            roster: self.roster.clone(),
            accepted: tokio::sync::Mutex::new(accepted),
            task: task.abort_handle(),
        })
    }
}

impl Transport for QuicTransport {
    fn bind<'a>(
        &'a self,
        name: &'a NodeName,
        listen: &'a str,
    ) -> BoxFuture<'a, Result<Arc<dyn Endpoint>, BindError>> {
        Box::pin(async move {
            if self.identity.node != name.as_str() {
                let detail = format!("they belong to node {}", self.identity.node);
                return Err(BindError::Certificate { node: name.clone(), detail });
            }
            let bad = |detail: String| BindError::Address { address: listen.to_owned(), detail };
            let mut found =
                tokio::net::lookup_host(listen).await.map_err(|e| bad(e.to_string()))?;
            let address = found.next().ok_or_else(|| bad("it resolves to nothing".into()))?;
            Ok(Arc::new(self.bind_now(name, address, listen)?) as Arc<dyn Endpoint>)
        })
    }
}

fn transport_config(options: &QuicOptions) -> TransportConfig {
    let mut config = TransportConfig::default();
    let idle = VarInt::from_u64(options.idle_ms).unwrap_or(VarInt::MAX);
    let mut discovery = quinn::MtuDiscoveryConfig::default();
    discovery.upper_bound(options.max_udp_payload);
    config
        .max_idle_timeout(Some(idle.into()))
        .keep_alive_interval((options.keep_alive_ms > 0).then(|| ms(options.keep_alive_ms)))
        .max_concurrent_uni_streams(options.streams.into())
        .max_concurrent_bidi_streams(0u32.into())
        // Guessed until it is measured: a lost first packet costs three times this.
        .initial_rtt(Duration::from_millis(100))
        .initial_mtu(1200)
        .mtu_discovery_config(Some(discovery))
        .datagram_receive_buffer_size(None);
    config
}

fn endpoint_config(identity: &NodeIdentity, options: &QuicOptions) -> quinn::EndpointConfig {
    let reset_key = ring::hmac::Key::new(ring::hmac::HMAC_SHA256, &identity.reset_key);
    let mut config = quinn::EndpointConfig::new(Arc::new(reset_key));
    // Both keys outlive the process: a peer that still talks to its old life is answered with a
    // stateless reset at its next packet. Without the second, the reset is not recognised.
    let cid_key = identity.cid_key;
    config.cid_generator(move || {
        Box::new(quinn_proto::HashedConnectionIdGenerator::from_key(cid_key))
    });
    if config.max_udp_payload_size(options.max_udp_payload).is_err() {
        tracing::warn!(bytes = options.max_udp_payload, "max_udp_payload is not possible: ignored");
    }
    config
}

struct QuicEndpoint {
    /// Given up on close, which frees the port.
    endpoint: Mutex<Option<quinn::Endpoint>>,
    client: quinn::ClientConfig,
    local: SocketAddr,
    cluster_id: [u8; 16],
    roster: Arc<Roster>,
    accepted: tokio::sync::Mutex<mpsc::Receiver<Arc<dyn Link>>>,
    task: tokio::task::AbortHandle,
}

impl Endpoint for QuicEndpoint {
    fn local_address(&self) -> String {
        self.local.to_string()
    }

    fn dial<'a>(
        &'a self,
        peer: &'a NodeName,
        address: &'a str,
    ) -> BoxFuture<'a, Result<Arc<dyn Link>, DialError>> {
        Box::pin(async move {
            let endpoint = self.endpoint.lock().clone().ok_or(DialError::Closed)?;
            let resolve = |detail: String| DialError::Resolve { address: address.into(), detail };
            let found =
                tokio::net::lookup_host(address).await.map_err(|e| resolve(e.to_string()))?;
            let name = NodeIdentity::dns_name(peer.as_str(), &self.cluster_id);
            let mut last =
                resolve("it resolves to nothing that this node's socket can reach".into());
            for target in found.filter(|a| a.is_ipv4() || self.local.is_ipv6()) {
                if let Some(wire) = &self.roster.options.wire {
                    wire.name(peer, target);
                }
                let connecting = endpoint
                    .connect_with(self.client.clone(), target, &name)
                    .map_err(|e| match e {
                        quinn::ConnectError::EndpointStopping => DialError::Closed,
                        other => resolve(other.to_string()),
                    })?;
                match connecting.await {
                    Ok(connection) => {
                        let link = self.roster.link(connection, self.cluster_id, true);
                        return Ok(link as Arc<dyn Link>);
                    }
                    Err(error) => last = dial_error(address, error),
                }
            }
            Err(last)
        })
    }

    fn accept(&self) -> BoxFuture<'_, Option<Arc<dyn Link>>> {
        Box::pin(async move { self.accepted.lock().await.recv().await })
    }

    fn close(&self, reason: CloseReason) -> BoxFuture<'_, ()> {
        /// For the close frames to leave and be acknowledged.
        const LINGER: Duration = Duration::from_millis(500);
        Box::pin(async move {
            self.task.abort();
            let Some(endpoint) = self.endpoint.lock().take() else { return };
            endpoint.close(reason.code.to_wire().into(), cut(&reason.text));
            let _ = tokio::time::timeout(LINGER, endpoint.wait_idle()).await;
        })
    }
}

impl Drop for QuicEndpoint {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// Takes handshakes from outside, bounded in number and time; good ones go to `links`.
async fn accept_all(
    endpoint: quinn::Endpoint,
    links: mpsc::Sender<Arc<dyn Link>>,
    cluster_id: [u8; 16],
    roster: Arc<Roster>,
) {
    let options = &roster.options;
    let room = Arc::new(Semaphore::new(options.half_open.max(1)));
    while let Some(incoming) = endpoint.accept().await {
        // Half full: first make the sender prove that it is where it says.
        let scarce = room.available_permits() * 2 < options.half_open;
        if scarce && !incoming.remote_address_validated() && incoming.may_retry() {
            let _ = incoming.retry();
            continue;
        }
        let Ok(permit) = room.clone().try_acquire_owned() else {
            metrics::counter!("dunlin_frames_refused_total", "reason" => "half_open").increment(1);
            incoming.refuse();
            continue;
        };
        let (links, limit) = (links.clone(), ms(options.handshake_ms));
        let roster = roster.clone();
        tokio::spawn(async move {
            let from = incoming.remote_address();
            match tokio::time::timeout(limit, incoming).await {
                Ok(Ok(connection)) => {
                    let link = roster.link(connection, cluster_id, false);
                    if let Err(refused) = links.try_send(link) {
                        let reason = CloseReason::new(CloseCode::Refused, "too many links at once");
                        refused.into_inner().close(reason);
                    }
                }
                Ok(Err(error)) => {
                    tracing::warn!(%from, %error, "handshake failed");
                    metrics::counter!("dunlin_frames_refused_total", "reason" => "handshake")
                        .increment(1);
                }
                Err(_) => tracing::debug!(%from, "handshake timed out"),
            }
            drop(permit);
        });
    }
}

struct QuicLink {
    connection: quinn::Connection,
    cluster_id: [u8; 16],
    dialled: bool,
    wire: Option<WireFaults>,
    local: Option<LocalLanes>,
}

impl QuicLink {
    /// Tells the wire whose the peer's address is, which changes when the peer migrates.
    fn name_address(&self) {
        let Some(wire) = &self.wire else { return };
        for name in self.proven_names().iter().filter_map(|name| NodeName::new(name).ok()) {
            wire.name(&name, self.connection.remote_address());
        }
    }
}

impl Roster {
    fn link(
        &self,
        connection: quinn::Connection,
        cluster_id: [u8; 16],
        dialled: bool,
    ) -> Arc<QuicLink> {
        let options = &self.options;
        let wire = options.wire.clone();
        let local = options.local_lanes && wire.is_none();
        let local = local.then(|| LocalLanes::start(&connection, dialled, options)).flatten();
        let link = Arc::new(QuicLink { connection, cluster_id, dialled, wire, local });
        if options.wire.is_some() {
            link.name_address();
            let mut links = self.links.lock();
            links.retain(|link| link.strong_count() > 0);
            links.push(Arc::downgrade(&link));
        }
        link
    }

    /// Those that are open.
    fn links_with(&self, peer: &NodeName) -> Vec<Arc<QuicLink>> {
        let mut links: Vec<_> = self.links.lock().iter().filter_map(Weak::upgrade).collect();
        links.retain(|link| {
            let theirs = link.proven_names().iter().any(|name| name == peer.as_str());
            theirs && link.connection.close_reason().is_none()
        });
        links
    }
}

impl Link for QuicLink {
    fn proven_names(&self) -> Vec<String> {
        tls::proven_names(&self.connection, &self.cluster_id)
    }

    fn open(&self, class: LaneClass) -> BoxFuture<'_, Result<Box<dyn FrameSink>, LinkError>> {
        Box::pin(async move {
            if class >= LaneClass::Mail
                && let Some(sink) = self.local.as_ref().and_then(LocalLanes::open)
            {
                return Ok(sink);
            }
            let stream = self.connection.open_uni().await.map_err(|e| down(&e))?;
            let _ = stream.set_priority(class.priority());
            Ok(Box::new(lanes::QuicSink::new(stream)) as Box<dyn FrameSink>)
        })
    }

    fn accept(&self) -> BoxFuture<'_, Result<Box<dyn FrameSource>, LinkError>> {
        Box::pin(async move {
            let local = async {
                match &self.local {
                    Some(local) => local.accept().await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                biased;
                stream = self.connection.accept_uni() => {
                    let stream = stream.map_err(|e| down(&e))?;
                    Ok(Box::new(lanes::QuicSource::new(stream)) as Box<dyn FrameSource>)
                }
                source = local => Ok(source),
            }
        })
    }

    fn close(&self, reason: CloseReason) {
        self.connection.close(reason.code.to_wire().into(), cut(&reason.text));
    }

    fn closed(&self) -> BoxFuture<'_, CloseReason> {
        Box::pin(async move { close_reason(&self.connection.closed().await) })
    }

    fn stats(&self) -> LinkStats {
        self.name_address();
        let path = self.connection.stats().path;
        LinkStats { rtt: Some(path.rtt), lost_packets: path.lost_packets }
    }
}

/// A close frame must fit one packet.
fn cut(text: &str) -> &[u8] {
    &text.as_bytes()[..text.len().min(256)]
}

fn down(error: &ConnectionError) -> LinkError {
    LinkError::Down(close_reason(error))
}

fn close_reason(error: &ConnectionError) -> CloseReason {
    match error {
        ConnectionError::ApplicationClosed(close) => {
            let text = String::from_utf8_lossy(&close.reason).into_owned();
            CloseReason::new(CloseCode::from_wire(close.error_code.into_inner()), text)
        }
        ConnectionError::Reset => CloseReason::new(CloseCode::Lost, "reset: the peer restarted"),
        ConnectionError::TimedOut => CloseReason::new(CloseCode::Lost, "timed out: nothing heard"),
        other => CloseReason::new(CloseCode::Lost, other.to_string()),
    }
}

fn dial_error(address: &str, error: ConnectionError) -> DialError {
    let (address, detail) = (address.to_owned(), error.to_string());
    // Codes 0x100-0x1ff are TLS alerts, ours or the peer's.
    let code = match &error {
        ConnectionError::TransportError(e) => u64::from(e.code),
        ConnectionError::ConnectionClosed(close) => u64::from(close.error_code),
        _ => 0,
    };
    match (0x100..0x200).contains(&code) {
        true => DialError::Untrusted { address, detail },
        false => DialError::Unreachable { address, detail },
    }
}
