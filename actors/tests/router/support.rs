//! What both kinds of test build on: requests, replicas, and a router with its outputs sorted.

use dunlin_actors::kv::key::Chain;
use dunlin_actors::messages::*;
use dunlin_actors::router::{Input, Note, Output, Router, RouterConfig};
use dunlin_model::sampling::SamplingParams;
use dunlin_runtime::{Address, NodeName};
use std::time::Duration;

pub const BLOCK_TOKENS: u32 = 4;

pub fn node(name: &str) -> NodeName {
    NodeName::new(name).expect("a valid node name")
}

pub fn address(name: &str, role: &str) -> Address {
    Address { node: node(name), role: role.into(), instance: "main".into() }
}

pub fn request(id: u64, prompt: Vec<u32>, max_tokens: u32) -> Request {
    Request {
        id: RequestId(id),
        tenant: "lab".into(),
        cache_salt: String::new(),
        prompt,
        keys: None,
        sampling: SamplingParams::default(),
        max_tokens,
        min_tokens: 0,
        stop_tokens: vec![0],
        prompt_logprobs: None,
        deadline_ms: 60_000,
        reply_to: address("front", "gateway"),
    }
}

pub fn replica(name: &str, epoch: u64) -> ReplicaInfo {
    ReplicaInfo {
        replica: name.into(),
        epoch: ReplicaEpoch(epoch),
        scheduler: address(name, "scheduler"),
        max_sequence_tokens: 512,
        kv_blocks: 4096,
        block_tokens: BLOCK_TOKENS,
        max_running: 4,
        served_by: vec![format!("{name}/cpu")],
        cache_namespace: [7; 16],
    }
}

/// A router and a clock.
pub struct Bench {
    pub router: Router,
    pub now: Duration,
}

/// Outputs of one input, by kind.
#[derive(Debug, Default)]
pub struct Outputs {
    pub replies: Vec<RouterReply>,
    pub events: Vec<(RequestId, StreamEvent)>,
    pub sends: Vec<(Address, SchedulerCast)>,
    pub notes: Vec<Note>,
}

impl Bench {
    pub fn new(config: RouterConfig) -> Self {
        Self { router: Router::new(config), now: Duration::ZERO }
    }

    pub fn with_replicas(names: &[&str]) -> Self {
        let mut bench = Self::new(RouterConfig::default());
        for name in names {
            bench.handle(Input::ReplicaUp(replica(name, 1)));
        }
        bench
    }

    pub fn handle(&mut self, input: Input) -> Outputs {
        let text = format!("{input:?}");
        let outputs = self.router.handle(self.now, input);
        if let Err(wrong) = self.router.audit() {
            panic!("audit after {text}: {wrong:#?}");
        }
        let mut sorted = Outputs::default();
        for output in outputs {
            match output {
                Output::Reply(reply) => sorted.replies.push(reply),
                Output::Deliver { cast: GatewayCast::Event { request, event }, .. } => {
                    sorted.events.push((request, event));
                }
                Output::Send { to, cast } => sorted.sends.push((to, cast)),
                Output::Note(note) => sorted.notes.push(note),
            }
        }
        sorted
    }

    pub fn wait(&mut self, time: Duration) -> Outputs {
        self.now += time;
        self.handle(Input::Tick)
    }

    pub fn submit(&mut self, request: Request) -> (Result<(), Refusal>, Outputs) {
        let mut outputs = self.handle(Input::Submit(Box::new(request)));
        match outputs.replies.pop() {
            Some(RouterReply::Submitted(result)) => (result, outputs),
            other => panic!("expected one answer to Submit, got {other:?}"),
        }
    }

    /// Submits and returns the hand-out that follows at once.
    pub fn place(&mut self, request: Request) -> Work {
        let (result, outputs) = self.submit(request);
        result.expect("accepted");
        outputs.work().expect("placed at once").1
    }

    pub fn report(&mut self, replica: &str, epoch: u64, event: SchedulerEvent) -> Outputs {
        let epoch = ReplicaEpoch(epoch);
        self.handle(Input::Scheduler { replica: replica.into(), epoch, event })
    }

    pub fn down(&mut self, replica: &str, epoch: u64, suspects: &[u64]) -> Outputs {
        self.handle(Input::ReplicaDown {
            replica: replica.into(),
            epoch: ReplicaEpoch(epoch),
            reason: "node down".into(),
            suspects: suspects.iter().map(|id| RequestId(*id)).collect(),
        })
    }

    pub fn status(&mut self) -> RouterStatus {
        match self.handle(Input::Status).replies.pop() {
            Some(RouterReply::Status(status)) => status,
            other => panic!("expected a status, got {other:?}"),
        }
    }
}

impl Outputs {
    /// The replica and work of the only hand-out, if there is one.
    pub fn work(&self) -> Option<(String, Work)> {
        let mut works = self.works();
        assert!(works.len() <= 1, "expected at most one hand-out: {works:?}");
        works.pop()
    }

    pub fn works(&self) -> Vec<(String, Work)> {
        let submit = |(to, cast): &(Address, SchedulerCast)| match cast {
            SchedulerCast::Submit { work, .. } => Some((to.node.to_string(), (**work).clone())),
            _ => None,
        };
        self.sends.iter().filter_map(submit).collect()
    }

    /// The replica of the first placement, and how much of the request it is taken to hold.
    pub fn placed(&self) -> Option<(String, u64)> {
        self.notes.iter().find_map(|note| match note {
            Note::Placed { hit_tokens, replica, .. } => Some((replica.clone(), *hit_tokens)),
            _ => None,
        })
    }

    pub fn cancels(&self) -> Vec<(String, RequestId, Attempt)> {
        let cancel = |(to, cast): &(Address, SchedulerCast)| match cast {
            SchedulerCast::Cancel { request, attempt, .. } => {
                Some((to.node.to_string(), *request, *attempt))
            }
            _ => None,
        };
        self.sends.iter().filter_map(cancel).collect()
    }

    pub fn terminal(&self) -> Option<&StreamEvent> {
        self.events.iter().map(|(_, event)| event).find(|event| event.is_terminal())
    }
}

pub fn tokens(id: u64, attempt: u32, position: u32, ids: &[u32]) -> SchedulerEvent {
    SchedulerEvent::Tokens {
        request: RequestId(id),
        attempt: Attempt(attempt),
        position,
        ids: ids.to_vec(),
        logprobs: Vec::new(),
        cached_tokens: None,
    }
}

pub fn finished(id: u64, attempt: u32, reason: FinishReason) -> SchedulerEvent {
    SchedulerEvent::Finished { request: RequestId(id), attempt: Attempt(attempt), reason }
}

/// What a gateway sends along with a prompt.
pub fn prompt_keys(prompt: &[u32]) -> PromptKeys {
    let space = KeySpace { namespace: [7; 16], block_tokens: BLOCK_TOKENS };
    Chain::of_prompt(space, "lab", "", prompt)
}

/// Keys of the full blocks of `tokens`, as the replicas above name them.
pub fn block_keys(tokens: &[u32]) -> Vec<BlockKey> {
    let mut chain = Chain::new(&[7; 16], BLOCK_TOKENS, "lab", "");
    chain.extend(tokens);
    chain.keys().to_vec()
}
