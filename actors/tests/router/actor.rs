//! The router's actor between real nodes on an in-memory network: fake schedulers on two nodes, a
//! fake gateway on a third.

use crate::support::*;
use dunlin_actors::messages::*;
use dunlin_actors::router::{INSTANCE, ROLE, RouterArgs, RouterConfig, start_router};
use dunlin_runtime::{
    Address, Export, Inbound, Limits, MemoryNetwork, Node, NodeName, NodeOptions,
};
use ractor::{Actor, ActorProcessingErr, ActorRef};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};
use tokio::time::timeout;

const NAMES: [&str; 4] = ["head", "front", "left", "right"];
const SOON: Duration = Duration::from_secs(20);

struct Root;

impl Actor for Root {
    type Msg = ();
    type State = ();
    type Arguments = ();
    async fn pre_start(&self, _: ActorRef<()>, (): ()) -> Result<(), ActorProcessingErr> {
        Ok(())
    }
}

struct World {
    network: MemoryNetwork,
    front: Node,
    nodes: Vec<Node>,
    router: Address,
    events: UnboundedReceiver<(RequestId, StreamEvent)>,
    /// What the fake schedulers were sent, by node.
    work: UnboundedReceiver<(&'static str, SchedulerCast)>,
    _exports: Vec<Export>,
    _root: ActorRef<()>,
}

async fn start(network: &MemoryNetwork, name: &str) -> Node {
    let mut options = NodeOptions::new(node(name), "test", format!("{name}:1"));
    options.limits = Limits::default();
    for peer in NAMES.iter().filter(|peer| **peer != name) {
        options = options.peer(node(peer), format!("{peer}:1"));
    }
    Node::start(options, Arc::new(network.clone())).await.expect("a node")
}

async fn linked(from: &Node, to: &NodeName) {
    let up = async {
        while !from.peers().iter().any(|peer| peer.node == *to && peer.up) {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    timeout(SOON, up).await.expect("linked");
}

async fn world() -> World {
    let network = MemoryNetwork::new(1);
    let mut nodes = Vec::new();
    for name in NAMES {
        nodes.push(start(&network, name).await);
    }
    for a in &nodes {
        for b in nodes.iter().filter(|b| b.name() != a.name()) {
            linked(a, b.name()).await;
        }
    }
    let (root, _) = Actor::spawn(None, Root, ()).await.expect("a root");
    let args = RouterArgs { node: nodes[0].clone(), config: RouterConfig::default() };
    start_router(args, root.get_cell()).await.expect("a router");
    let (heard, events) = unbounded_channel();
    let (sent, work) = unbounded_channel();
    let mut exports = vec![
        nodes[1]
            .export::<GatewayProtocol>("gateway", "main", move |inbound| {
                if let Inbound::Cast { msg: GatewayCast::Event { request, event }, .. } = inbound {
                    let _ = heard.send((request, event));
                }
            })
            .expect("a free name"),
    ];
    for (at, name) in NAMES.iter().enumerate().skip(2) {
        let sent = sent.clone();
        let export = nodes[at].export::<SchedulerProtocol>("scheduler", "main", move |inbound| {
            if let Inbound::Cast { msg, .. } = inbound {
                let _ = sent.send((*name, msg));
            }
        });
        exports.push(export.expect("a free name"));
    }
    let router = nodes[0].address(ROLE, INSTANCE);
    let front = nodes[1].clone();
    World { network, front, nodes, router, events, work, _exports: exports, _root: root }
}

impl World {
    fn tell(&self, from: &str, cast: RouterCast) {
        let node = self.nodes.iter().find(|n| n.name().as_str() == from).expect("a node");
        node.cast::<RouterProtocol>(&self.router, &cast).expect("taken");
    }

    fn report(&self, from: &'static str, epoch: u64, event: SchedulerEvent) {
        let epoch = ReplicaEpoch(epoch);
        self.tell(from, RouterCast::Scheduler { replica: from.into(), epoch, events: vec![event] });
    }

    async fn call(&self, call: RouterCall) -> RouterReply {
        self.front.call::<RouterProtocol>(&self.router, &call, SOON).await.expect("an answer")
    }

    async fn submit(&self, request: Request) {
        let reply = self.call(RouterCall::Submit(Box::new(request))).await;
        assert_eq!(reply, RouterReply::Submitted(Ok(())));
    }

    async fn status(&self) -> RouterStatus {
        match self.call(RouterCall::Status).await {
            RouterReply::Status(status) => status,
            other => panic!("{other:?}"),
        }
    }

    /// Waits until the router has heard of the replicas.
    async fn up(&self, names: &[&'static str], epoch: u64) {
        for name in names {
            self.tell("head", RouterCast::ReplicaUp(replica(name, epoch)));
        }
        let known = async {
            while self.status().await.replicas.len() < names.len() {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        timeout(SOON, known).await.expect("replicas are up");
    }

    async fn next_work(&mut self) -> (&'static str, SchedulerCast) {
        timeout(SOON, self.work.recv()).await.expect("in time").expect("open")
    }

    async fn next_submit(&mut self) -> (&'static str, Work) {
        match self.next_work().await {
            (node, SchedulerCast::Submit { work, .. }) => (node, *work),
            other => panic!("expected work, got {other:?}"),
        }
    }

    async fn next_event(&mut self) -> StreamEvent {
        timeout(SOON, self.events.recv()).await.expect("in time").expect("open").1
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stream_goes_on_when_its_replica_is_lost() {
    let mut world = world().await;
    world.up(&["left", "right"], 1).await;
    world.submit(request(1, vec![5, 6], 3)).await;
    let (on, work) = world.next_submit().await;
    assert_eq!((on, work.attempt), ("left", Attempt(1)));
    world.report("left", 1, tokens(1, 1, 0, &[10]));
    assert!(matches!(world.next_event().await, StreamEvent::Tokens { position: 0, .. }));
    world.tell(
        "head",
        RouterCast::ReplicaDown {
            replica: "left".into(),
            epoch: ReplicaEpoch(1),
            reason: "killed".into(),
            suspects: vec![],
        },
    );
    let (on, work) = world.next_submit().await;
    assert_eq!((on, work.attempt, work.tokens), ("right", Attempt(2), vec![5, 6, 10]));
    world.report("right", 1, tokens(1, 2, 1, &[11, 12]));
    world.report("right", 1, finished(1, 2, FinishReason::Length));
    let event = world.next_event().await;
    assert_eq!(event, StreamEvent::Tokens { position: 1, ids: vec![11, 12], logprobs: vec![] });
    match world.next_event().await {
        StreamEvent::Finished { reason: FinishReason::Length, usage, served_by } => {
            assert_eq!(usage.completion_tokens, 3);
            assert_eq!(served_by, ["left/cpu", "right/cpu"]);
        }
        other => panic!("{other:?}"),
    }
    let status = world.status().await;
    assert_eq!((status.open_requests, status.replays_total), (0, 1));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn work_that_cannot_be_sent_goes_elsewhere() {
    let mut world = world().await;
    world.up(&["left", "right"], 1).await;
    // Placement has not heard yet that the node is gone; the router's own cast has.
    let left = world.nodes.iter().position(|n| n.name().as_str() == "left").expect("left");
    world.nodes[left].shutdown().await;
    let gone = async {
        while world.nodes[0].peers().iter().any(|p| p.node == node("left") && p.up) {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    timeout(SOON, gone).await.expect("left is gone");
    world.submit(request(1, vec![5, 6], 3)).await;
    assert_eq!(world.next_submit().await.0, "right");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_deadline_comes_without_any_message() {
    let mut world = world().await;
    world.up(&["left"], 1).await;
    let mut hurried = request(1, vec![5, 6], 3);
    hurried.deadline_ms = 80;
    world.submit(hurried).await;
    world.next_submit().await;
    match world.next_event().await {
        StreamEvent::Failed { code: FailureCode::Deadline, message, .. } => {
            assert!(message.contains("running on replica left"), "{message}");
        }
        other => panic!("{other:?}"),
    }
    assert!(matches!(world.next_work().await, ("left", SchedulerCast::Cancel { .. })));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_short_break_of_the_gateways_link_loses_no_event() {
    let mut world = world().await;
    world.up(&["left"], 1).await;
    world.submit(request(1, vec![5, 6], 9)).await;
    world.next_submit().await;
    let (head, front) = (node("head"), node("front"));
    world.network.partition(&head, &front);
    world.network.reset(&head, &front);
    let down = async {
        while world.nodes[0].peers().iter().any(|p| p.node == front && p.up) {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    timeout(SOON, down).await.expect("the link is down");
    for position in 0..8 {
        world.report("left", 1, tokens(1, 1, position, &[9]));
    }
    tokio::time::sleep(Duration::from_millis(100)).await;
    world.network.heal(&head, &front);
    for position in 0..8 {
        let event = world.next_event().await;
        assert_eq!(event, StreamEvent::Tokens { position, ids: vec![9], logprobs: vec![] });
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_gateway_that_stays_away_has_its_work_cancelled() {
    let mut world = world().await;
    world.up(&["left"], 1).await;
    world.submit(request(1, vec![5, 6], 9)).await;
    world.next_submit().await;
    world.front.shutdown().await;
    match world.next_work().await {
        ("left", SchedulerCast::Cancel { request, attempt, .. }) => {
            assert_eq!((request, attempt), (RequestId(1), Attempt(1)));
        }
        other => panic!("expected a cancel, got {other:?}"),
    }
}
