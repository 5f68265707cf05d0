//! QUIC in the harness, and what only QUIC can be tested for: certificates, ports, raw bytes.

use super::harness::*;
use dunlin_runtime::certs::{self, NodeIdentity};
use dunlin_runtime::transport::quic::SocketHook;
use dunlin_runtime::{BindError, Node, QuicOptions, QuicTransport, StartError, Transport};
use parking_lot::Mutex;
use quinn::udp::{RecvMeta, Transmit};
use quinn::{AsyncUdpSocket, UdpPoller};
use std::collections::{BTreeMap, BTreeSet};
use std::io::{self, IoSliceMut};
use std::net::{SocketAddr, UdpSocket};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::time::Instant;

/// Real sockets on loopback, with certificates of an authority made for the test. With `LOCAL`
/// the lanes between its nodes are Unix sockets, which are ended by a partition only with the link.
pub struct QuicHarness<const LOCAL: bool = false> {
    certs: tempfile::TempDir,
    ports: Mutex<BTreeMap<String, u16>>,
    cut: Cut,
}

/// Pairs of ports between which datagrams vanish.
type Cut = Arc<Mutex<BTreeSet<(u16, u16)>>>;

impl<const LOCAL: bool> QuicHarness<LOCAL> {
    pub fn with(&self, node: &str, mut options: QuicOptions) -> QuicTransport {
        certs::ensure(self.certs.path(), "lab", &[node.to_owned()]).unwrap();
        let identity = NodeIdentity::load(self.certs.path(), node).unwrap();
        options.local_lanes = LOCAL;
        options.hook = Some(Arc::new(CutHook(self.cut.clone())));
        QuicTransport::new(Arc::new(identity), options)
    }
}

impl<const LOCAL: bool> Harness for QuicHarness<LOCAL> {
    const ROOM: u64 = if LOCAL { 2 } else { 8 };

    fn new() -> Self {
        let certs = tempfile::tempdir().unwrap();
        Self { certs, ports: Default::default(), cut: Default::default() }
    }

    fn transport(&self, node: &str) -> Arc<dyn Transport> {
        Arc::new(self.with(node, QuicOptions::default()))
    }

    fn addresses(&self, nodes: &[&str]) -> Vec<String> {
        let mut known = self.ports.lock();
        let addresses = nodes.iter().map(|node| {
            let port = free_port();
            known.insert((*node).to_owned(), port);
            format!("127.0.0.1:{port}")
        });
        addresses.collect()
    }

    fn partition(&self, a: &str, b: &str) {
        let ports = self.ports.lock();
        let (a, b) = (ports[a], ports[b]);
        self.cut.lock().extend([(a, b), (b, a)]);
    }

    fn heal(&self, a: &str, b: &str) {
        let ports = self.ports.lock();
        let (a, b) = (ports[a], ports[b]);
        self.cut.lock().retain(|pair| *pair != (a, b) && *pair != (b, a));
    }
}

/// Each is given out once, below the range from which systems take ports for clients: no other
/// test's socket can take one before its node binds it, nor between two lives of the node.
fn free_port() -> u16 {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    loop {
        let offset = std::process::id().wrapping_mul(97) + NEXT.fetch_add(1, Ordering::Relaxed);
        let port = 10_000 + (offset % 5_000) as u16;
        if UdpSocket::bind(("127.0.0.1", port)).is_ok() {
            return port;
        }
    }
}

#[derive(Debug)]
struct CutHook(Cut);

impl SocketHook for CutHook {
    fn wrap(&self, inner: Arc<dyn AsyncUdpSocket>) -> Arc<dyn AsyncUdpSocket> {
        Arc::new(CutSocket { inner, cut: self.0.clone() })
    }
}

#[derive(Debug)]
struct CutSocket {
    inner: Arc<dyn AsyncUdpSocket>,
    cut: Cut,
}

impl AsyncUdpSocket for CutSocket {
    fn create_io_poller(self: Arc<Self>) -> Pin<Box<dyn UdpPoller>> {
        self.inner.clone().create_io_poller()
    }

    fn try_send(&self, transmit: &Transmit) -> io::Result<()> {
        let path = (self.inner.local_addr()?.port(), transmit.destination.port());
        if self.cut.lock().contains(&path) { Ok(()) } else { self.inner.try_send(transmit) }
    }

    fn poll_recv(
        &self,
        cx: &mut Context,
        bufs: &mut [IoSliceMut<'_>],
        meta: &mut [RecvMeta],
    ) -> Poll<io::Result<usize>> {
        self.inner.poll_recv(cx, bufs, meta)
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        self.inner.local_addr()
    }

    fn max_transmit_segments(&self) -> usize {
        self.inner.max_transmit_segments()
    }

    fn max_receive_segments(&self) -> usize {
        self.inner.max_receive_segments()
    }

    fn may_fragment(&self) -> bool {
        self.inner.may_fragment()
    }
}

#[tokio::test]
async fn a_port_in_use_is_named_with_its_holder() {
    let harness = <QuicHarness>::new();
    let all = options(&harness, &["a", "b"]);
    let _a = start(&harness, &all[0]).await;
    let mut second = all[1].clone();
    second.listen = all[0].listen.clone();
    let error = Node::start(second, harness.transport("b")).await.unwrap_err();
    let text = error.to_string();
    assert!(matches!(error, StartError::Bind { error: BindError::InUse { .. }, .. }), "{text}");
    assert!(text.contains(&all[0].listen), "{text}");
    if cfg!(target_os = "linux") {
        assert!(text.contains(&format!("(pid {})", std::process::id())), "{text}");
    }
}

#[tokio::test]
async fn a_certificate_of_another_authority_is_refused_at_both_ends() {
    let (here, there) = (<QuicHarness>::new(), <QuicHarness>::new());
    let all = options(&here, &["a", "b"]);
    let a = start(&here, &all[0]).await;
    let b = Node::start(all[1].clone(), there.transport("b")).await.unwrap();
    let told = |node: &Node| node.peers()[0].last_error.clone().unwrap_or_default();
    eventually("both are told", || {
        told(&a).contains("not authenticated") && told(&b).contains("not authenticated")
    })
    .await;
    assert!(!is_up(&a, "b") && !is_up(&b, "a"));
}

#[tokio::test]
async fn a_node_cannot_start_under_a_name_that_is_not_its_certificates() {
    let harness = <QuicHarness>::new();
    let all = options(&harness, &["a", "b"]);
    let error = Node::start(all[1].clone(), harness.transport("a")).await.unwrap_err();
    assert!(error.to_string().contains("they belong to node a"), "{error}");
}

/// Case L15: handshakes that are begun and never finished must not keep a good node out.
#[tokio::test]
async fn half_open_handshakes_do_not_keep_others_out() {
    let harness = <QuicHarness>::new();
    let all = options(&harness, &["a", "b"]);
    let few = QuicOptions { half_open: 4, handshake_ms: 3000, ..QuicOptions::default() };
    let a = Node::start(all[0].clone(), Arc::new(harness.with("a", few))).await.unwrap();
    // Real first packets, from clients that fall silent at once: more than there is room for.
    let target: SocketAddr = all[0].listen.parse().unwrap();
    let mut silent = Vec::new();
    for i in 0..40 {
        let relay = UdpSocket::bind("127.0.0.1:0").unwrap();
        relay.set_read_timeout(Some(PATIENCE)).unwrap();
        let half = NodeIdentity::load(harness.certs.path(), "a").unwrap();
        let name = NodeIdentity::dns_name("a", &half.cluster_id);
        let mut endpoint = quinn::Endpoint::client("127.0.0.1:0".parse().unwrap()).unwrap();
        endpoint.set_default_client_config(client_config(&half));
        let connecting = endpoint.connect(relay.local_addr().unwrap(), &name).unwrap();
        let mut packet = [0; 2048];
        let task = tokio::spawn(async move {
            let _ = connecting.await;
        });
        let relayed = tokio::task::spawn_blocking(move || {
            let (size, _) = relay.recv_from(&mut packet).unwrap();
            relay.send_to(&packet[..size], target).unwrap();
            relay
        });
        silent.push((i, endpoint, task, relayed.await.unwrap()));
    }
    let began = Instant::now();
    let b = start(&harness, &all[1]).await;
    linked(&b, "a").await;
    linked(&a, "b").await;
    // In turn they would take half a minute.
    assert!(began.elapsed() < 15 * SECOND, "took {:?}", began.elapsed());
}

fn client_config(identity: &NodeIdentity) -> quinn::ClientConfig {
    let mut roots = rustls::RootCertStore::empty();
    roots.add(identity.ca.clone()).unwrap();
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let mut tls = rustls::ClientConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&rustls::version::TLS13])
        .unwrap()
        .with_root_certificates(roots)
        .with_client_auth_cert(identity.chain.clone(), identity.key.clone_key())
        .unwrap();
    tls.alpn_protocols = vec![b"dunlin/1".to_vec()];
    let tls = quinn::crypto::rustls::QuicClientConfig::try_from(tls).unwrap();
    quinn::ClientConfig::new(Arc::new(tls))
}

/// Raw bytes at a real socket: first at UDP, then above TLS from a node with a good certificate.
#[tokio::test]
async fn garbage_at_every_layer_is_refused_and_harms_nobody() {
    let harness = <QuicHarness>::new();
    let all = options(&harness, &["a", "b"]);
    let a = start(&harness, &all[0]).await;
    let target: SocketAddr = all[0].listen.parse().unwrap();
    let mut noise = 1u32;
    let mut next = move || {
        noise = noise.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (noise >> 24) as u8
    };
    let udp = UdpSocket::bind("127.0.0.1:0").unwrap();
    for size in [0, 1, 20, 1200, 1400] {
        let bytes: Vec<u8> = (0..size).map(|_| next()).collect();
        udp.send_to(&bytes, target).unwrap();
    }

    certs::ensure(harness.certs.path(), "lab", &["b".to_owned()]).unwrap();
    let identity = NodeIdentity::load(harness.certs.path(), "b").unwrap();
    let name = NodeIdentity::dns_name("a", &identity.cluster_id);
    for round in 0..20 {
        let mut endpoint = quinn::Endpoint::client("127.0.0.1:0".parse().unwrap()).unwrap();
        endpoint.set_default_client_config(client_config(&identity));
        let connection = endpoint.connect(target, &name).unwrap().await.unwrap();
        let mut stream = connection.open_uni().await.unwrap();
        let mut bytes: Vec<u8> = (0..round * 13).map(|_| next()).collect();
        match round {
            // A frame of four gigabytes; a frame of an odd length; a hello with another version.
            0 => bytes = vec![0xff; 64],
            1 => bytes = vec![200, 0, 0, 0, 1, 2, 3],
            2 => bytes = vec![3, 0, 0, 0, 9, 0, 1],
            _ => {}
        }
        let _ = stream.write_all(&bytes).await;
        let _ = stream.finish();
        if round == 2 {
            // The refusal names both versions.
            let mut answer = connection.accept_uni().await.unwrap();
            let answer = answer.read_to_end(4096).await.unwrap();
            let text = String::from_utf8_lossy(&answer);
            assert!(text.contains('2') && text.contains('9'), "{text:?}");
        }
        if round % 2 == 0 {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        connection.close(0u32.into(), b"");
    }

    let b = start(&harness, &all[1]).await;
    linked(&b, "a").await;
    let (_export, to, _) = echo(&a, "x");
    assert_eq!(ask(&b, &to, Ask::Echo(vec![1])).await, Ok(vec![1]));
}

/// Case C22: the connection dies of idleness, unnoticed by anyone who would use it.
#[tokio::test]
async fn a_call_after_the_connection_died_of_idleness_succeeds_at_once() {
    let harness = <QuicHarness>::new();
    let mut all = options(&harness, &["a", "b"]);
    let idle = QuicOptions { idle_ms: 400, keep_alive_ms: 0, ..QuicOptions::default() };
    let mut nodes = Vec::new();
    for options in &mut all {
        // No heartbeats either, and no dial on the callee's side.
        options.timing.heartbeat_ms = 3_600_000;
        options.timing.dead_ms = 7_200_000;
        options.timing.lease_ms = 7_200_000;
        let transport = Arc::new(harness.with(options.name.as_str(), idle.clone()));
        nodes.push(Node::start(options.clone(), transport).await.unwrap());
    }
    let (a, b) = (&nodes[0], &nodes[1]);
    linked(a, "b").await;
    let (_export, to, _) = echo(b, "x");
    assert_eq!(ask(a, &to, Ask::Echo(vec![1])).await, Ok(vec![1]));
    let mut events = a.watch();
    for _ in 0..3 {
        down_event(&mut events).await;
        assert_eq!(ask(a, &to, Ask::Echo(vec![2])).await, Ok(vec![2]));
    }
}

/// The old life's connection is reset as soon as the new life answers: no waiting for a timeout.
#[tokio::test]
async fn a_restarted_peer_is_noticed_by_a_stateless_reset() {
    let harness = <QuicHarness>::new();
    let mut all = options(&harness, &["a", "b"]);
    let slow = QuicOptions { idle_ms: 20_000, ..QuicOptions::default() };
    for options in &mut all {
        options.timing.dead_ms = 20_000;
    }
    // `a` is alone in knowing the other, so that only the reset can tell it.
    all[1].peers.values_mut().for_each(Vec::clear);
    let a = Node::start(all[0].clone(), Arc::new(harness.with("a", slow.clone()))).await.unwrap();
    let b = Node::start(all[1].clone(), Arc::new(harness.with("b", slow.clone()))).await.unwrap();
    linked(&a, "b").await;
    harness.partition("a", "b");
    drop(b);
    let mut events = a.watch();
    all[1].incarnation.0 += 1;
    let b = loop {
        let transport = Arc::new(harness.with("b", slow.clone()));
        match Node::start(all[1].clone(), transport).await {
            Ok(node) => break node,
            Err(_) => tokio::time::sleep(Duration::from_millis(50)).await,
        }
    };
    let began = Instant::now();
    harness.heal("a", "b");
    let (_, reason) = down_event(&mut events).await;
    assert!(reason.contains("restarted"), "{reason}");
    assert!(began.elapsed() < 10 * SECOND, "took {:?}", began.elapsed());
    linked(&a, "b").await;
    drop(b);
}
