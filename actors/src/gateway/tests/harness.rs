//! A router that does what a script says, a gateway in front of it, and a client of bytes.

use super::super::*;
use crate::messages::*;
use dunlin_model::sampling::TokenLogprob;
use dunlin_runtime::MemoryNetwork;
use dunlin_runtime::{NodeName, NodeOptions};
use parking_lot::Mutex;
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

/// What the router does with a request.
#[derive(Clone)]
pub enum Script {
    Refuse(Refusal),
    Run(Run),
    /// Never answers the call.
    Silent,
}

/// A generation.
#[derive(Clone)]
pub struct Run {
    pub ids: Vec<u32>,
    /// Tokens per event.
    pub group: usize,
    /// Between events.
    pub pace: Duration,
    pub cached: u32,
    pub end: End,
}

#[derive(Clone, PartialEq)]
pub enum End {
    Finished,
    Failed(FailureCode, &'static str),
    /// No terminal event ever.
    Nothing,
}

pub fn run(text: &str) -> Run {
    ids_run(text.bytes().map(u32::from).collect())
}

pub fn ids_run(ids: Vec<u32>) -> Run {
    Run { ids, group: 1, pace: Duration::ZERO, cached: 0, end: End::Finished }
}

pub type Plan = Box<dyn Fn(&Request) -> Script + Send + Sync>;

/// What the router saw.
#[derive(Default)]
pub struct Seen {
    pub requests: Vec<Request>,
    pub cancelled: BTreeMap<RequestId, bool>,
    /// Events sent after the cancel, per request: the router itself stops at once.
    pub sent: BTreeMap<RequestId, u32>,
    pub running: BTreeSet<RequestId>,
}

pub struct World {
    pub address: SocketAddr,
    pub gateway: ActorCell,
    pub seen: Arc<Mutex<Seen>>,
    pub node: Node,
    router: Mutex<Option<Export>>,
    ready: Arc<Mutex<Result<(), String>>>,
}

struct Root;

impl Actor for Root {
    type Msg = ();
    type State = ();
    type Arguments = ();
    async fn pre_start(&self, _: ActorRef<()>, (): ()) -> Result<(), ActorProcessingErr> {
        Ok(())
    }
}

/// Everybody gets `script`.
pub async fn world(script: Script) -> World {
    world_with(Box::new(move |_| script.clone()), |_| {}).await
}

pub async fn world_with(plan: Plan, change: impl FnOnce(&mut GatewayArgs)) -> World {
    let name = NodeName::new("front").unwrap();
    let options = NodeOptions::new(name, "test", "front:1");
    let node = Node::start(options, Arc::new(MemoryNetwork::new(1))).await.unwrap();
    world_on(node, plan, change).await
}

/// The gateway, and unless `change` says otherwise the router, on `node`.
pub async fn world_on(node: Node, plan: Plan, change: impl FnOnce(&mut GatewayArgs)) -> World {
    let seen = Arc::new(Mutex::new(Seen::default()));
    let router = start_router(&node, seen.clone(), plan);
    let ready = Arc::new(Mutex::new(Ok(())));
    let asked = ready.clone();
    let mut args = GatewayArgs {
        node: node.clone(),
        router: node.address("router", "main"),
        http: ([127, 0, 0, 1], 0).into(),
        model: Arc::new(ByteModel::new(512, 4096)),
        key_space: KeySpace { namespace: [7; 16], block_tokens: 4 },
        models: vec!["tiny".into(), "org/tiny".into()],
        fingerprint: "fp_test".into(),
        limits: Limits { first_event: Duration::from_millis(200), ..Limits::default() },
        api_keys: vec![],
        ready: Arc::new(move || asked.lock().clone().map(|()| String::new())),
        metrics: Arc::new(|| "dunlin_up 1\n".into()),
        status: Arc::new(|| Box::pin(async { serde_json::json!({"nodes": 1}) })),
    };
    change(&mut args);
    let (root, _) = Actor::spawn(None, Root, ()).await.unwrap();
    let (gateway, address) = start_gateway(args, root.get_cell()).await.unwrap();
    World { address, gateway, seen, node, router: Mutex::new(Some(router)), ready }
}

pub fn start_router(node: &Node, seen: Arc<Mutex<Seen>>, plan: Plan) -> Export {
    let home = node.clone();
    node.export::<RouterProtocol>("router", "main", move |inbound| match inbound {
        Inbound::Call { msg: RouterCall::Submit(request), reply, .. } => {
            let script = plan(&request);
            seen.lock().requests.push((*request).clone());
            match script {
                Script::Silent => std::mem::forget(reply),
                Script::Refuse(refusal) => reply.send(RouterReply::Submitted(Err(refusal))),
                Script::Run(run) => {
                    reply.send(RouterReply::Submitted(Ok(())));
                    seen.lock().running.insert(request.id);
                    tokio::spawn(generate(home.clone(), seen.clone(), *request, run));
                }
            }
        }
        Inbound::Call { reply, .. } => reply.send(RouterReply::Draining),
        Inbound::Cast { msg: RouterCast::Cancel { request, stopped }, .. } => {
            seen.lock().cancelled.insert(request, stopped);
        }
        Inbound::Cast { .. } => {}
    })
    .unwrap()
}

async fn generate(node: Node, seen: Arc<Mutex<Seen>>, request: Request, run: Run) {
    let tell = |event| {
        let cast = GatewayCast::Event { request: request.id, event };
        let _ = node.cast::<GatewayProtocol>(&request.reply_to, &cast);
    };
    let logprob = |id: &u32| TokenLogprob {
        logprob: -(*id as f32) / 512.0,
        top: (0..request.sampling.logprobs.unwrap_or(0)).map(|i| (65 + i, -1.0)).collect(),
    };
    if request.prompt_logprobs.is_some() {
        let rest = request.prompt.get(1..).unwrap_or_default();
        tell(StreamEvent::PromptLogprobs(rest.iter().map(logprob).collect()));
    }
    let limit = run.ids.len().min(request.max_tokens as usize);
    let mut usage = Usage {
        prompt_tokens: request.prompt.len() as u32,
        completion_tokens: 0,
        cached_tokens: run.cached,
    };
    for group in run.ids[..limit].chunks(run.group) {
        let cancelled = seen.lock().cancelled.get(&request.id).copied();
        if let Some(stopped) = cancelled {
            let served_by = vec![];
            let reason = FinishReason::Stop;
            tell(match stopped {
                true => StreamEvent::Finished { reason, usage, served_by },
                false => StreamEvent::Cancelled { usage },
            });
            seen.lock().running.remove(&request.id);
            return;
        }
        let asked = request.sampling.logprobs.is_some();
        let logprobs = group.iter().filter(|_| asked).map(logprob).collect();
        let position = usage.completion_tokens;
        tell(StreamEvent::Tokens { position, ids: group.to_vec(), logprobs });
        usage.completion_tokens += group.len() as u32;
        *seen.lock().sent.entry(request.id).or_default() += 1;
        if run.pace.is_zero() {
            tokio::task::yield_now().await;
        } else {
            tokio::time::sleep(run.pace).await;
        }
    }
    let at_limit = limit == request.max_tokens as usize;
    match run.end {
        End::Finished => tell(StreamEvent::Finished {
            reason: if at_limit { FinishReason::Length } else { FinishReason::Stop },
            usage,
            served_by: vec!["left/cpu".into()],
        }),
        End::Failed(code, message) => {
            tell(StreamEvent::Failed { code, message: message.into(), usage });
        }
        End::Nothing => return,
    }
    seen.lock().running.remove(&request.id);
}

impl World {
    pub async fn client(&self) -> Client {
        let stream = TcpStream::connect(self.address).await.unwrap();
        Client { stream, buffer: Vec::new() }
    }

    pub async fn post(&self, path: &str, body: Value) -> Response {
        let mut client = self.client().await;
        client.post(path, &body.to_string()).await;
        client.response().await
    }

    pub async fn get(&self, path: &str) -> Response {
        let mut client = self.client().await;
        client.send(&format!("GET {path} HTTP/1.1\r\nhost: x\r\n\r\n")).await;
        client.response().await
    }

    /// A completion of a fixed prompt with `more` fields.
    pub async fn complete(&self, more: Value) -> Response {
        self.post("/v1/completions", completion(more)).await
    }

    pub async fn chat(&self, more: Value) -> Response {
        self.post("/v1/chat/completions", chat(more)).await
    }

    pub fn set_ready(&self, ready: Result<(), String>) {
        *self.ready.lock() = ready;
    }

    pub fn kill_router(&self) {
        self.router.lock().take();
    }

    /// Waits until nothing runs, and tells whether that came about.
    pub async fn quiet(&self) -> bool {
        holds_soon(|| self.seen.lock().running.is_empty()).await
    }
}

/// Far beyond what anything takes on a busy machine.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// Waits for the condition, and panics if it never holds.
pub async fn until(what: &str, condition: impl FnMut() -> bool) {
    assert!(holds_soon(condition).await, "never: {what}");
}

async fn holds_soon(mut condition: impl FnMut() -> bool) -> bool {
    let began = std::time::Instant::now();
    while !condition() {
        if began.elapsed() > PATIENCE {
            return false;
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    true
}

fn merged(mut base: Value, more: Value) -> Value {
    for (name, value) in more.as_object().unwrap() {
        base[name] = value.clone();
    }
    base
}

pub fn completion(more: Value) -> Value {
    merged(serde_json::json!({"model": "tiny", "prompt": "Hi"}), more)
}

pub fn chat(more: Value) -> Value {
    let messages = serde_json::json!([{"role": "user", "content": "Hi"}]);
    merged(serde_json::json!({"model": "tiny", "messages": messages}), more)
}

/// A connection. Reads exactly what belongs to a response, so that the next one is intact.
pub struct Client {
    pub stream: TcpStream,
    pub buffer: Vec<u8>,
}

#[derive(Debug, Clone)]
pub struct Response {
    pub status: u16,
    pub headers: BTreeMap<String, String>,
    pub body: String,
    /// The chunks of a chunked body; each must be valid UTF-8.
    pub chunks: Vec<String>,
}

impl Client {
    pub async fn send(&mut self, text: &str) {
        self.stream.write_all(text.as_bytes()).await.unwrap();
    }

    pub async fn post(&mut self, path: &str, body: &str) {
        self.send(&post_text(path, body)).await;
    }

    /// Reads until the buffer holds `end`, and returns everything up to and including it.
    pub async fn until(&mut self, end: &str) -> String {
        let end = end.as_bytes();
        loop {
            if let Some(at) = self.buffer.windows(end.len()).position(|w| w == end) {
                let rest = self.buffer.split_off(at + end.len());
                let head = std::mem::replace(&mut self.buffer, rest);
                return String::from_utf8(head).unwrap();
            }
            assert!(self.fill().await > 0, "closed: {:?}", String::from_utf8_lossy(&self.buffer));
        }
    }

    async fn exactly(&mut self, count: usize) -> String {
        while self.buffer.len() < count {
            assert!(self.fill().await > 0, "closed after {} of {count}", self.buffer.len());
        }
        let rest = self.buffer.split_off(count);
        String::from_utf8(std::mem::replace(&mut self.buffer, rest)).unwrap()
    }

    async fn fill(&mut self) -> usize {
        let mut bytes = [0; 4096];
        let read = self.stream.read(&mut bytes);
        let count = tokio::time::timeout(PATIENCE, read).await.unwrap().unwrap();
        self.buffer.extend_from_slice(&bytes[..count]);
        count
    }

    pub async fn head(&mut self) -> Response {
        let head = self.until("\r\n\r\n").await;
        let mut lines = head.trim_end().split("\r\n");
        let status = lines.next().unwrap().split(' ').nth(1).unwrap().parse().unwrap();
        let headers = lines.map(|line| {
            let (name, value) = line.split_once(": ").unwrap_or((line, ""));
            (name.to_lowercase(), value.to_owned())
        });
        let headers = headers.collect();
        Response { status, headers, body: String::new(), chunks: vec![] }
    }

    /// One chunk of a chunked body; `None` after the last.
    pub async fn chunk(&mut self) -> Option<String> {
        let size = self.until("\r\n").await;
        let size = usize::from_str_radix(size.trim(), 16).unwrap();
        let chunk = self.exactly(size).await;
        assert_eq!(self.exactly(2).await, "\r\n");
        (size > 0).then_some(chunk)
    }

    pub async fn response(&mut self) -> Response {
        let mut response = self.head().await;
        if let Some(length) = response.headers.get("content-length") {
            response.body = self.exactly(length.parse().unwrap()).await;
        } else if response.headers.get("transfer-encoding").is_some_and(|t| t == "chunked") {
            while let Some(chunk) = self.chunk().await {
                response.body.push_str(&chunk);
                response.chunks.push(chunk);
            }
        }
        response
    }

    /// Whether the server has closed the connection, with nothing more to read.
    pub async fn closed(&mut self) -> bool {
        self.buffer.is_empty() && self.fill().await == 0
    }
}

pub fn post_text(path: &str, body: &str) -> String {
    format!(
        "POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n\
         content-length: {}\r\n\r\n{body}",
        body.len()
    )
}

impl Response {
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|e| panic!("{e}: {}", self.body))
    }

    /// The `error` object, whose shape is checked.
    pub fn error(&self) -> Value {
        let json = self.json();
        let object = json.as_object().unwrap();
        assert_eq!(object.len(), 1);
        let error = object["error"].as_object().unwrap();
        let names: Vec<&String> = error.keys().collect();
        assert_eq!(names, ["message", "type", "param", "code"]);
        assert!(error["message"].as_str().is_some_and(|m| !m.is_empty()));
        json["error"].clone()
    }

    pub fn param(&self) -> String {
        self.error()["param"].as_str().unwrap_or("null").to_owned()
    }

    /// The data of all events; the last must be `[DONE]`, once.
    pub fn events(&self) -> Vec<Value> {
        let mut events: Vec<&str> = self
            .body
            .split("\n\n")
            .filter(|e| !e.is_empty() && !e.starts_with(':'))
            .map(|e| e.strip_prefix("data: ").unwrap())
            .collect();
        assert_eq!(events.pop(), Some("[DONE]"), "{}", self.body);
        events.iter().map(|e| serde_json::from_str(e).unwrap()).collect()
    }

    /// Text of answer `index` over all chunks of a stream, chat or not.
    pub fn streamed_text(&self, index: u64) -> String {
        let events = self.events();
        let choices = events.iter().flat_map(|e| e["choices"].as_array().into_iter().flatten());
        choices
            .filter(|c| c["index"] == index)
            .map(|c| c["text"].as_str().or(c["delta"]["content"].as_str()).unwrap_or(""))
            .collect()
    }
}
