//! What a test needs of a transport: nodes that know each other, and ways to harm their links.

use dunlin_runtime::{
    Address, Export, Inbound, Incarnation, MemoryNetwork, Node, NodeName, NodeOptions, PeerEvent,
    Protocol, Transport,
};
use serde::{Deserialize, Serialize};
use std::sync::Arc;
use std::time::Duration;

pub const SECOND: Duration = Duration::from_secs(1);

pub fn name(name: &str) -> NodeName {
    NodeName::new(name).unwrap()
}

/// A network that nodes of a test share.
pub trait Harness: Sized + Send + Sync + 'static {
    /// Frames of 100 kB that a flow takes in while nobody reads.
    const ROOM: u64 = 8;
    fn new() -> Self;
    fn transport(&self, node: &str) -> Arc<dyn Transport>;
    /// A free address for each node, fixed before any starts.
    fn addresses(&self, nodes: &[&str]) -> Vec<String>;
    /// Frames and datagrams between the two vanish, or are held, until [`Self::heal`].
    fn partition(&self, a: &str, b: &str);
    fn heal(&self, a: &str, b: &str);
}

pub struct MemoryHarness(pub MemoryNetwork);

impl Harness for MemoryHarness {
    fn new() -> Self {
        Self(MemoryNetwork::new(7))
    }

    fn transport(&self, _node: &str) -> Arc<dyn Transport> {
        Arc::new(self.0.clone())
    }

    fn addresses(&self, nodes: &[&str]) -> Vec<String> {
        nodes.iter().map(|node| format!("{node}:7400")).collect()
    }

    fn partition(&self, a: &str, b: &str) {
        self.0.partition(&name(a), &name(b));
    }

    fn heal(&self, a: &str, b: &str) {
        self.0.heal(&name(a), &name(b));
    }
}

/// Options of `nodes`, each knowing all others. Tests change them before they start nodes.
pub fn options<H: Harness>(harness: &H, nodes: &[&str]) -> Vec<NodeOptions> {
    let addresses = harness.addresses(nodes);
    let mut all = Vec::new();
    for (i, node) in nodes.iter().enumerate() {
        let mut options = NodeOptions::new(name(node), "lab", addresses[i].clone());
        options.seed = i as u64;
        options.life = i as u64 + 100;
        for (j, other) in nodes.iter().enumerate().filter(|(j, _)| *j != i) {
            options = options.peer(name(other), addresses[j].clone());
        }
        all.push(options);
    }
    all
}

pub async fn start<H: Harness>(harness: &H, options: &NodeOptions) -> Node {
    Node::start(options.clone(), harness.transport(options.name.as_str())).await.unwrap()
}

/// Starts a node's next life; the old one's port may take a moment to be free.
pub async fn start_again<H: Harness>(harness: &H, options: &NodeOptions) -> Node {
    for _ in 0..1000 {
        match Node::start(options.clone(), harness.transport(options.name.as_str())).await {
            Ok(node) => return node,
            Err(_) => tokio::time::sleep(Duration::from_millis(20)).await,
        }
    }
    panic!("{} does not start again", options.name);
}

/// Two nodes with a link between them.
pub async fn pair<H: Harness>(harness: &H) -> (Node, Node) {
    let options = options(harness, &["a", "b"]);
    let (a, b) = (start(harness, &options[0]).await, start(harness, &options[1]).await);
    linked(&a, "b").await;
    linked(&b, "a").await;
    (a, b)
}

pub fn is_up(node: &Node, peer: &str) -> bool {
    node.peers().iter().any(|p| p.node == name(peer) && p.up)
}

/// Far beyond what anything takes on a busy machine.
pub const PATIENCE: Duration = Duration::from_secs(30);

/// Waits for the condition.
pub async fn eventually(what: &str, mut condition: impl FnMut() -> bool) {
    let began = tokio::time::Instant::now();
    while !condition() {
        assert!(began.elapsed() < PATIENCE, "not within {PATIENCE:?}: {what}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// Waits until the echo actor holds `count` calls that it does not answer.
pub async fn held(node: &Node, to: &Address, count: u8) {
    while ask(node, to, Ask::Held).await != Ok(vec![count]) {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

pub async fn linked(node: &Node, peer: &str) {
    eventually(&format!("{} linked with {peer}: {:?}", node.name(), node.peers()), || {
        is_up(node, peer)
    })
    .await;
}

pub async fn down_event(
    events: &mut tokio::sync::broadcast::Receiver<PeerEvent>,
) -> (Incarnation, String) {
    loop {
        match tokio::time::timeout(PATIENCE, events.recv()).await {
            Ok(Ok(PeerEvent::Down { peer, reason })) => return (peer.incarnation, reason),
            Ok(Ok(_)) => {}
            other => panic!("no Down event: {other:?}"),
        }
    }
}

// ---- an actor to talk to -------------------------------------------------------------------

pub struct Echo;

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub enum Ask {
    Echo(Vec<u8>),
    /// Never answered, the port dropped.
    Drop,
    /// Never answered, the port kept.
    Hold,
    /// As `Hold`, with a body.
    HoldBytes(Vec<u8>),
    /// How many calls are held.
    Held,
    Panic,
    /// Answered after so many milliseconds.
    Late(u64),
    Big(usize),
}

impl Protocol for Echo {
    const NAME: &'static str = "echo";
    const VERSION: u16 = 1;
    type Cast = u64;
    type Call = Ask;
    type Reply = Vec<u8>;
}

/// The same name, another version.
pub struct EchoTwo;

impl Protocol for EchoTwo {
    const NAME: &'static str = "echo";
    const VERSION: u16 = 2;
    type Cast = u64;
    type Call = Ask;
    type Reply = Vec<u8>;
}

/// The same name and version, other types: what a message garbled above TLS looks like.
pub struct Garbled;

impl Protocol for Garbled {
    const NAME: &'static str = "echo";
    const VERSION: u16 = 1;
    type Cast = String;
    type Call = (u8, u8);
    type Reply = Vec<u8>;
}

/// Exports an echo actor; casts go to the returned receiver.
pub fn echo(
    node: &Node,
    instance: &str,
) -> (Export, Address, tokio::sync::mpsc::UnboundedReceiver<u64>) {
    let (casts, received) = tokio::sync::mpsc::unbounded_channel();
    let held = parking_lot::Mutex::new(Vec::new());
    let handler = move |message: Inbound<Echo>| match message {
        Inbound::Cast { msg, .. } => {
            assert_ne!(msg, u64::MAX, "a cast that panics");
            let _ = casts.send(msg);
        }
        Inbound::Call { msg, reply, .. } => match msg {
            Ask::Echo(bytes) => reply.send(bytes),
            Ask::Big(bytes) => reply.send(vec![1; bytes]),
            Ask::Drop => drop(reply),
            Ask::Hold | Ask::HoldBytes(_) => held.lock().push(reply),
            Ask::Held => reply.send(vec![held.lock().len() as u8]),
            Ask::Panic => panic!("asked to"),
            Ask::Late(ms) => {
                tokio::spawn(async move {
                    tokio::time::sleep(Duration::from_millis(ms)).await;
                    reply.send(vec![9]);
                });
            }
        },
    };
    let export = node.export::<Echo>("echo", instance, handler).unwrap();
    (export, node.address("echo", instance), received)
}

pub async fn ask(
    node: &Node,
    to: &Address,
    what: Ask,
) -> Result<Vec<u8>, dunlin_runtime::CallError> {
    node.call::<Echo>(to, &what, 20 * SECOND).await
}
