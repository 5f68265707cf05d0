//! `LocalCluster`: several hosts on one in-memory network, and a client of their router.

use crate::engines::{Fault, TestEngines, oracle};
use dunlin_actors::engines::Compute;
use dunlin_actors::gateway::{self, ByteModel};
use dunlin_actors::host::{Host, HostError, HostOptions, HostParts};
use dunlin_actors::messages::*;
use dunlin_actors::placement;
use dunlin_actors::placement::core::{Intensity, Replan};
use dunlin_actors::placement::planner::{PlanLimits, ReplicaWant};
use dunlin_actors::router::{self, RouterConfig};
use dunlin_actors::scheduler::SchedulerConfig;
use dunlin_model::hash_engine::HashSpec;
use dunlin_model::sampling::SamplingParams;
use dunlin_runtime::supervise;
use dunlin_runtime::{
    Address, Export, FaultHook, Faults, Inbound, Incarnation, MemoryNetwork, Node, NodeName,
    NodeOptions,
};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::time::{Instant, timeout};

pub const BLOCK_TOKENS: usize = 4;
/// Far beyond what anything takes; a test that reaches it has hung.
pub const SOON: Duration = Duration::from_secs(60);
const CALL: Duration = Duration::from_secs(20);
const HEAD: &str = "head";

pub fn name(name: &str) -> NodeName {
    NodeName::new(name).expect("a valid node name")
}

/// A replica of these stages; each is a list of ranks, `node/device`.
pub fn want(replica: &str, stages: &[&[&str]]) -> ReplicaWant {
    let place = |place: &&str| {
        let (node, device) = place.split_once('/').expect("node/device");
        (name(node), device.to_string())
    };
    let stages = stages.iter().map(|ranks| ranks.iter().map(place).collect()).collect();
    ReplicaWant { name: replica.into(), stages, layers: None }
}

/// What a test wants to differ.
#[derive(Clone)]
pub struct Setup {
    pub spec: HashSpec,
    pub wants: Vec<ReplicaWant>,
    /// Of a device that holds one whole model.
    pub kv_blocks: usize,
    pub scheduler: SchedulerConfig,
    pub replan: Replan,
    /// Injects faults at the sites of all nodes, and hears their facts.
    pub hook: Option<Arc<dyn FaultHook>>,
}

impl Setup {
    pub fn new(wants: Vec<ReplicaWant>) -> Self {
        let step_cost = Duration::from_millis(1);
        let spec = HashSpec { heads: 2, context: 4096, step_cost, ..HashSpec::default() };
        let scheduler = SchedulerConfig { step_tokens: 64, ..SchedulerConfig::default() };
        Self { spec, wants, kv_blocks: 1024, scheduler, replan: Replan::default(), hook: None }
    }

    /// One replica per node.
    pub fn replicas(nodes: &[&str]) -> Self {
        Self::new(nodes.iter().map(|n| want(n, &[&[format!("{n}/cpu:0").as_str()]])).collect())
    }

    fn workers(&self) -> Vec<NodeName> {
        let all: std::collections::BTreeSet<_> =
            self.wants.iter().flat_map(|want| want.nodes()).collect();
        all.into_iter().collect()
    }
}

/// The head (router, placement, gateway, no device) and a host per worker.
pub struct LocalCluster {
    pub setup: Setup,
    pub network: MemoryNetwork,
    pub engines: TestEngines,
    pub hosts: BTreeMap<String, Host>,
    lives: BTreeMap<String, u64>,
    streams: Streams,
    _client: Export,
}

type Streams = Arc<Mutex<BTreeMap<u64, UnboundedSender<StreamEvent>>>>;

impl LocalCluster {
    /// Starts everything and waits until all replicas serve.
    pub async fn start(setup: Setup) -> Self {
        let workers = setup.workers();
        let mut cluster = Self::head_only(setup).await;
        for worker in workers {
            cluster.start_host(worker.as_str()).await;
        }
        cluster.await_ready().await;
        cluster
    }

    pub async fn head_only(setup: Setup) -> Self {
        let network = MemoryNetwork::new(1);
        let engines = TestEngines::new(setup.spec.clone());
        let mut lives = BTreeMap::new();
        let head = start_host(&setup, &network, &engines, HEAD, &mut lives).await;
        let streams = Streams::default();
        let inbox = streams.clone();
        let export = head.node().export::<GatewayProtocol>("client", "main", move |inbound| {
            if let Inbound::Cast { msg: GatewayCast::Event { request, event }, .. } = inbound {
                let streams = inbox.lock().expect("never held in a panic");
                if let Some(stream) = streams.get(&request.0) {
                    let _ = stream.send(event);
                }
            }
        });
        let hosts = BTreeMap::from([(HEAD.to_string(), head)]);
        let _client = export.expect("a free role");
        Self { setup, network, engines, hosts, lives, streams, _client }
    }

    /// Starts the node, in a higher incarnation than before.
    pub async fn start_host(&mut self, node: &str) {
        let (setup, network) = (&self.setup, &self.network);
        let host = start_host(setup, network, &self.engines, node, &mut self.lives).await;
        self.hosts.insert(node.into(), host);
    }

    /// The node vanishes from the network without a word. What runs on it only notices later.
    pub fn crash(&mut self, node: &str) -> Host {
        self.network.crash(&name(node));
        self.hosts.remove(node).expect("a running node")
    }

    pub fn head(&self) -> &Host {
        &self.hosts[HEAD]
    }

    pub async fn await_ready(&self) {
        let ready = timeout(SOON, self.head().ready()).await.expect("ready in time");
        ready.expect("ready");
        let all = self.setup.wants.len();
        self.until("all replicas are up", |s| s.replicas.len() == all).await;
    }

    /// Waits until the router's status satisfies `what`.
    pub async fn until(&self, what: &str, holds: impl Fn(&RouterStatus) -> bool) -> RouterStatus {
        self.until_within(SOON, what, holds).await
    }

    pub async fn until_within(
        &self,
        bound: Duration,
        what: &str,
        holds: impl Fn(&RouterStatus) -> bool,
    ) -> RouterStatus {
        let begun = Instant::now();
        loop {
            let status = self.status().await;
            match status {
                Some(status) if holds(&status) => return status,
                status if begun.elapsed() > bound => panic!("{what}: not so: {status:#?}"),
                _ => tokio::time::sleep(Duration::from_millis(10)).await,
            }
        }
    }

    pub async fn status(&self) -> Option<RouterStatus> {
        let to = Address::new(name(HEAD), router::ROLE, router::INSTANCE);
        match self.head().node().call::<RouterProtocol>(&to, &RouterCall::Status, CALL).await {
            Ok(RouterReply::Status(status)) => Some(status),
            _ => None,
        }
    }

    /// How often replicas of the node were loaded again.
    pub async fn restarts(&self, node: &str) -> u32 {
        let to = Address::new(name(node), "agent", "main");
        let answer = self.head().node().call::<AgentProtocol>(&to, &AgentCall::Tree, CALL).await;
        let Ok(AgentReply::Tree(tree)) = answer else { panic!("the agent's tree: {answer:?}") };
        tree.iter().map(|line| line.restarts).sum()
    }

    pub async fn states(&self) -> Vec<ReplicaState> {
        self.states_now().await.expect("placement's status")
    }

    /// `None` while placement does not answer.
    pub async fn states_now(&self) -> Option<Vec<ReplicaState>> {
        let to = Address::new(name(HEAD), placement::ROLE, placement::INSTANCE);
        let call = PlacementCall::Status;
        let answer = self.head().node().call::<PlacementProtocol>(&to, &call, CALL).await;
        answer.ok().map(|PlacementReply::Status(states)| states)
    }

    /// Nothing is held anywhere `bound` from now: no request, no block, and the books agree.
    pub async fn settled(&self, bound: Duration) {
        let idle = |status: &RouterStatus| {
            let empty = |r: &ReplicaStatus| {
                let load = &r.load;
                r.assigned == 0
                    && load.running == 0
                    && load.waiting == 0
                    && load.kv_blocks_live == 0
            };
            status.open_requests == 0 && status.replicas.iter().all(empty)
        };
        let status = self.until_within(bound, "nothing is held", idle).await;
        for replica in status.replicas {
            let to = &replica.info.scheduler;
            let call = SchedulerCall::Audit;
            let answer = self.head().node().call::<SchedulerProtocol>(to, &call, CALL).await;
            assert_eq!(answer.expect("an audit"), SchedulerReply::Audit(Ok(())));
        }
    }

    pub fn inject(&self, fault: Fault) {
        self.engines.faults.lock().expect("never held in a panic").push(fault);
    }

    pub fn request(&self, id: u64, prompt: Vec<u32>, max_tokens: u32) -> Request {
        Request {
            id: RequestId(id),
            tenant: "lab".into(),
            cache_salt: String::new(),
            prompt,
            keys: None,
            sampling: SamplingParams::default(),
            max_tokens,
            min_tokens: 0,
            stop_tokens: Vec::new(),
            prompt_logprobs: None,
            deadline_ms: 120_000,
            reply_to: Address::new(name(HEAD), "client", "main"),
        }
    }

    /// Every third greedy, the others drawn with a seed of their own.
    pub fn mixed(&self, id: u64, prompt_len: u32, max_tokens: u32) -> Request {
        let prompt = (0..prompt_len).map(|i| (id as u32 * 131 + i * 7) % 4096).collect();
        let mut request = self.request(id, prompt, max_tokens);
        if !id.is_multiple_of(3) {
            request.sampling.temperature = 0.8;
            request.sampling.seed = id;
        }
        request
    }

    pub async fn try_submit(&self, request: &Request) -> Result<Stream, Refusal> {
        let (tell, events) = unbounded_channel();
        self.streams.lock().expect("never held in a panic").insert(request.id.0, tell);
        let to = Address::new(name(HEAD), router::ROLE, router::INSTANCE);
        let call = RouterCall::Submit(Box::new(request.clone()));
        match self.head().node().call::<RouterProtocol>(&to, &call, CALL).await {
            Ok(RouterReply::Submitted(result)) => result?,
            other => panic!("submitting: {other:?}"),
        }
        let (spec, request) = (self.setup.spec.clone(), request.clone());
        Ok(Stream { id: request.id.0, events, tokens: Vec::new(), spec, request })
    }

    pub async fn submit(&self, request: &Request) -> Stream {
        self.try_submit(request).await.expect("accepted")
    }

    pub fn cancel(&self, id: u64) {
        let to = Address::new(name(HEAD), router::ROLE, router::INSTANCE);
        let cast = RouterCast::Cancel { request: RequestId(id), stopped: false };
        self.head().node().cast::<RouterProtocol>(&to, &cast).expect("sent");
    }

    /// A fresh request gets the right answer.
    pub async fn probe(&self, id: u64) {
        let request = self.mixed(id, 24, 16);
        self.submit(&request).await.finished().await;
    }

    /// Status and body of a `POST`, as raw HTTP.
    pub async fn post(&self, path: &str, body: &str) -> (u16, String) {
        self.http("POST", path, body).await
    }

    pub async fn get(&self, path: &str) -> (u16, String) {
        self.http("GET", path, "").await
    }

    async fn http(&self, method: &str, path: &str, body: &str) -> (u16, String) {
        let at = self.head().http().expect("the head has a gateway");
        let mut stream = tokio::net::TcpStream::connect(at).await.expect("connected");
        let length = body.len();
        let text = format!(
            "{method} {path} HTTP/1.1\r\nhost: test\r\ncontent-type: application/json\r\n\
             connection: close\r\ncontent-length: {length}\r\n\r\n{body}"
        );
        stream.write_all(text.as_bytes()).await.expect("written");
        let mut answer = String::new();
        timeout(SOON, stream.read_to_string(&mut answer)).await.expect("in time").expect("read");
        let code = answer.split_whitespace().nth(1).and_then(|code| code.parse().ok());
        (code.unwrap_or_else(|| panic!("no status in {answer:?}")), answer)
    }
}

async fn start_host(
    setup: &Setup,
    network: &MemoryNetwork,
    engines: &TestEngines,
    node: &str,
    lives: &mut BTreeMap<String, u64>,
) -> Host {
    let life = lives.entry(node.into()).or_default();
    *life += 1;
    let mut names = setup.workers();
    names.push(name(HEAD));
    let at = |node: &NodeName| format!("{node}:1");
    let mut options = NodeOptions::new(name(node), "test", at(&name(node)));
    options.incarnation = Incarnation(*life);
    options.head = Some(name(HEAD));
    if let Some(hook) = &setup.hook {
        options.faults = Faults::armed(hook.clone());
    }
    for peer in names.iter().filter(|peer| peer.as_str() != node) {
        options = options.peer(peer.clone(), at(peer));
    }
    let started = Node::start(options, Arc::new(network.clone())).await.expect("a node");
    let is_head = node == HEAD;
    let text = ByteModel::new(setup.spec.vocab, setup.spec.context as u32);
    let whole = (setup.spec.layers * BLOCK_TOKENS * setup.spec.heads * 8) as u64;
    let options = HostOptions {
        cluster: "test".into(),
        model: "hash".into(),
        head: name(HEAD),
        nodes: names.iter().map(|name| (name.clone(), at(name))).collect(),
        workers: setup.workers().into_iter().collect(),
        http: is_head.then(|| "127.0.0.1:0".parse().expect("an address")),
        wants: setup.wants.clone(),
        limits: PlanLimits {
            block_tokens: BLOCK_TOKENS,
            kv_bytes: whole * setup.kv_blocks as u64,
            step_tokens: setup.scheduler.step_tokens,
        },
        replica_intensity: Intensity {
            max: 20,
            within: Duration::from_secs(10),
            rest: Duration::from_millis(500),
        },
        replan: setup.replan,
        node_intensity: supervise::Intensity { max: 5, within: Duration::from_secs(10) },
        scheduler: setup.scheduler.clone(),
        router: RouterConfig::default(),
        gateway: gateway::Limits::default(),
        api_keys: Vec::new(),
        step_deadline: setup.scheduler.step_deadline,
        scrub: None,
        join_deadline: Duration::ZERO,
    };
    let parts = HostParts {
        node: started,
        engines: Arc::new(engines.of_node(if is_head { 0 } else { 2 })),
        compute: Compute::Threads,
        text: is_head.then(|| Arc::new(text) as Arc<dyn gateway::TextModel>),
        metrics: {
            let node = node.to_owned();
            Arc::new(move || format!("test_node{{node=\"{node}\"}} 1\n"))
        },
    };
    Host::start(options, parts).await.unwrap_or_else(|error: HostError| panic!("{error}"))
}

/// A request's events, with positions checked as they come.
pub struct Stream {
    pub id: u64,
    events: UnboundedReceiver<StreamEvent>,
    pub tokens: Vec<u32>,
    spec: HashSpec,
    request: Request,
}

impl Stream {
    /// Takes events until there are `count` tokens.
    pub async fn take(&mut self, count: usize) {
        while self.tokens.len() < count {
            if let Some(end) = self.next().await {
                panic!("request {} ended after {} tokens: {end:?}", self.id, self.tokens.len());
            }
        }
    }

    /// The terminal event, after all others; what came before it must be right. The oracle runs
    /// only now, so as not to hold up submitting.
    pub async fn end(&mut self) -> StreamEvent {
        loop {
            if let Some(end) = self.next().await {
                let more = self.events.try_recv();
                assert!(more.is_err(), "request {}: {more:?} after {end:?}", self.id);
                let delivered = self.tokens.len() as u32;
                let asked = Request { max_tokens: delivered, ..self.request.clone() };
                let right = oracle(&self.spec, &asked);
                assert_eq!(self.tokens, right, "request {}: wrong text", self.id);
                return end;
            }
        }
    }

    /// Must end well and with all of the right tokens.
    pub async fn finished(mut self) -> (Usage, Vec<String>) {
        match self.end().await {
            StreamEvent::Finished { usage, served_by, .. } => {
                let (have, asked) = (self.tokens.len(), self.request.max_tokens as usize);
                assert_eq!(have, asked, "request {}: too short", self.id);
                (usage, served_by)
            }
            other => panic!("request {}: {other:?}", self.id),
        }
    }

    /// Takes everything to the end, which must be a good one, whatever the tokens are.
    pub async fn drain(mut self) -> Vec<u32> {
        loop {
            match self.next().await {
                None => {}
                Some(StreamEvent::Finished { .. }) => return self.tokens,
                Some(other) => panic!("request {}: {other:?}", self.id),
            }
        }
    }

    pub async fn failed(mut self) -> (FailureCode, String) {
        match self.end().await {
            StreamEvent::Failed { code, message, .. } => (code, message),
            other => panic!("request {}: {other:?}", self.id),
        }
    }

    async fn next(&mut self) -> Option<StreamEvent> {
        let event = timeout(SOON, self.events.recv()).await;
        let tokens = self.tokens.len();
        let event =
            event.unwrap_or_else(|_| panic!("request {} hangs after {tokens} tokens", self.id));
        match event.expect("the cluster keeps the sender") {
            StreamEvent::Tokens { position, ids, .. } => {
                assert_eq!(position as usize, tokens, "request {}: a gap", self.id);
                self.tokens.extend(ids);
                None
            }
            event if event.is_terminal() => Some(event),
            other => panic!("request {}: {other:?} was not asked for", self.id),
        }
    }
}
