//! A scheduler, its KV manager, two stages' memories and every client's expectation.

use super::fake::{Shard, reference_echo, reference_token};
use crate::kv::{Kv, KvConfig};
use crate::messages::*;
use crate::scheduler::{Input, Limits, Output, Scheduler};
use crate::shard::Drawn;
use dunlin_model::engine::{Batch, SampleFailure, SampleSpec};
use dunlin_model::sampling::TokenLogprob;
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::time::Duration;

pub const EPOCH: ReplicaEpoch = ReplicaEpoch(3);

#[derive(Debug, Clone)]
pub struct Setup {
    pub blocks: u32,
    pub block_tokens: u32,
    pub key_bits: u32,
    pub limits: Limits,
}

/// What one request's client knows and may expect.
pub struct Client {
    pub work: Work,
    pub got: Vec<u32>,
    pub echo: Option<Vec<TokenLogprob>>,
    pub end: Option<End>,
    told_cached: bool,
    whole: Vec<u32>,
    reason: FinishReason,
    owner: u64,
}

#[derive(Debug, Clone, PartialEq)]
pub enum End {
    Finished(FinishReason),
    Failed(FailureCode),
    Cancelled,
}

/// How often the run met what it is for.
#[derive(Debug, Default, Clone, Copy)]
pub struct Seen {
    pub copies: usize,
    pub pipelined_chunks: usize,
    /// Sequences in a step that was planned before their token was known.
    pub overlapped: usize,
    /// Of those, how many had ended when that step was done.
    pub dropped: usize,
    pub suspects: usize,
    pub cancelled_in_flight: usize,
    pub cancelled_waiting: usize,
    pub not_finite: usize,
    pub finished: usize,
    pub replays: usize,
}

pub struct World {
    pub setup: Setup,
    pub kv: Kv,
    pub scheduler: Scheduler,
    pub now: Duration,
    pub clients: BTreeMap<RequestId, Client>,
    pub flying: VecDeque<(u64, Batch)>,
    places: VecDeque<Vec<Place>>,
    pub load: Option<LoadReport>,
    pub broken: Option<String>,
    pub seen: Seen,
    /// Runs each step as soon as it is planned, as a first stage may.
    early: Shard,
    /// Runs each step when it is reported done, as a last stage may.
    late: Shard,
    early_answers: VecDeque<Vec<dunlin_model::engine::Sampled>>,
    /// What each of them drew last.
    drawn: (Drawn, Drawn),
    owners: HashMap<u64, u64>,
    kv_seq: u64,
    index: std::collections::BTreeSet<BlockKey>,
    next_step: u64,
    next_request: u64,
}

impl World {
    pub fn new(setup: Setup) -> Self {
        let config = KvConfig {
            blocks: setup.blocks,
            block_tokens: setup.block_tokens,
            namespace: [1; 16],
            key_bits: setup.key_bits,
        };
        Self {
            kv: Kv::new(config).unwrap(),
            scheduler: Scheduler::new(EPOCH, setup.limits.clone()),
            now: Duration::ZERO,
            clients: BTreeMap::new(),
            flying: VecDeque::new(),
            places: VecDeque::new(),
            load: None,
            broken: None,
            seen: Seen::default(),
            early: Shard::new(setup.blocks, setup.block_tokens),
            late: Shard::new(setup.blocks, setup.block_tokens),
            early_answers: VecDeque::new(),
            drawn: Default::default(),
            owners: HashMap::new(),
            kv_seq: 0,
            index: Default::default(),
            next_step: 1,
            next_request: 1,
            setup,
        }
    }

    /// Submits under a fresh id; `delivered` tokens of its output are known already.
    pub fn submit(&mut self, mut work: Work, delivered: usize) -> RequestId {
        let id = RequestId(self.next_request);
        self.next_request += 1;
        work.request = id;
        let owner = u64::from_str_radix(&work.tenant, 36).unwrap();
        self.owners.insert(id.0, owner);
        let (whole, reason) = self.reference(&work, owner);
        let got = whole[..delivered.min(whole.len())].to_vec();
        work.tokens.extend(&got);
        let (echo, end) = (None, None);
        let told_cached = false;
        let client =
            Client { work: work.clone(), got, echo, end, told_cached, whole, reason, owner };
        self.clients.insert(id, client);
        self.input(Input::Submit { epoch: EPOCH, work: Box::new(work) });
        id
    }

    /// Hands an open request out again, as a router does that doubts the first attempt.
    pub fn replay(&mut self, id: RequestId) {
        let client = self.clients.get_mut(&id).unwrap();
        client.work.attempt.0 += 1;
        client.work.tokens.truncate(client.work.prompt_len as usize);
        client.work.tokens.extend(&client.got);
        client.told_cached = false;
        self.seen.replays += 1;
        let work = Box::new(client.work.clone());
        self.input(Input::Submit { epoch: EPOCH, work });
    }

    pub fn cancel(&mut self, id: RequestId) {
        let flying = self.flying.iter().any(|(_, b)| b.seqs.iter().any(|s| s.request == id.0));
        match flying {
            true => self.seen.cancelled_in_flight += 1,
            false => self.seen.cancelled_waiting += 1,
        }
        let client = self.clients.get_mut(&id).unwrap();
        client.end = Some(End::Cancelled);
        let attempt = client.work.attempt;
        self.input(Input::Cancel { epoch: EPOCH, request: id, attempt });
    }

    pub fn open(&self) -> Vec<RequestId> {
        self.clients.iter().filter(|(_, c)| c.end.is_none()).map(|(id, _)| *id).collect()
    }

    /// The oldest step is done. `corrupt`: that one of its answers has logits that are not finite.
    pub fn step_done(&mut self, corrupt: Option<usize>) -> bool {
        let Some((step, mut batch)) = self.flying.pop_front() else { return false };
        let places = self.places.pop_front().unwrap_or_default();
        for seq in places.iter().map(|place| &batch.seqs[place.seq as usize]) {
            self.seen.overlapped += 1;
            self.seen.dropped += usize::from(!self.scheduler.is_live(RequestId(seq.request)));
        }
        self.drawn.1.fill(&mut batch, &places).unwrap();
        let mut sampled = self.late.run(&batch, &self.owners);
        self.drawn.1.keep(step, &sampled);
        assert_eq!(Some(&sampled), self.early_answers.pop_front().as_ref(), "stages disagree");
        if let Some(which) = corrupt.filter(|_| !sampled.is_empty()) {
            let at = which % sampled.len();
            sampled[at].token = Err(SampleFailure::NotFinite);
            let id = RequestId(sampled[at].request);
            let client = self.clients.get_mut(&id).unwrap();
            // An attempt that was replaced or cancelled meanwhile is not failed by it.
            let live = self.scheduler.is_live(id) && client.end.is_none();
            self.seen.not_finite += usize::from(live);
        }
        self.input(Input::StepDone { epoch: EPOCH, step, sampled, micros: 1 });
        true
    }

    pub fn input(&mut self, input: Input) {
        self.now += Duration::from_millis(1);
        for output in self.scheduler.handle(&mut self.kv, self.now, input) {
            match output {
                Output::Run { step, batch, drawn, .. } => self.run(step, batch, drawn),
                Output::Event(event) => self.event(event),
                Output::Broken { reason, .. } | Output::Halted { reason } => {
                    self.broken = Some(reason);
                }
                Output::Measured(_) => {}
            }
        }
        if let Err(wrong) = self.scheduler.audit(&self.kv) {
            panic!("{wrong:#?}");
        }
    }

    /// Lets everything end.
    pub fn drain(&mut self) {
        let mut steps = 0;
        while self.step_done(None) {
            steps += 1;
            assert!(steps < 100_000, "no end in sight: {:?}", self.scheduler.load(&self.kv));
        }
        assert!(self.open().is_empty(), "open and nothing in flight: {:?}", self.open());
        assert!(self.scheduler.is_idle());
        assert_eq!(self.kv.usage().live, 0, "idle, and blocks are reserved");
        assert_eq!(self.kv.open_tables(), 0);
    }

    fn run(&mut self, step: u64, batch: Batch, places: Vec<Place>) {
        assert_eq!(step, self.next_step, "steps rise by one");
        self.next_step += 1;
        assert!(batch.tokens() <= self.setup.limits.step_tokens && batch.tokens() > 0);
        assert!(batch.seqs.len() <= self.setup.limits.max_running.max(1));
        let before: Vec<u64> =
            self.flying.iter().flat_map(|(_, b)| &b.seqs).map(|s| s.request).collect();
        for seq in &batch.seqs {
            assert_eq!(batch.seqs.iter().filter(|s| s.request == seq.request).count(), 1);
            self.seen.pipelined_chunks += usize::from(before.contains(&seq.request));
            let client = &self.clients[&RequestId(seq.request)];
            self.seen.suspects += usize::from(client.work.suspect);
        }
        self.seen.copies += batch.copies.len();
        self.flying.push_back((step, batch));
        assert!(self.flying.len() <= self.setup.limits.steps());
        assert!(places.is_empty() || self.setup.limits.overlap);
        self.check_writers();
        let (_, batch) = self.flying.back().unwrap();
        let mut batch = batch.clone();
        self.drawn.0.fill(&mut batch, &places).unwrap();
        let answers = self.early.run(&batch, &self.owners);
        self.drawn.0.keep(step, &answers);
        self.early_answers.push_back(answers);
        self.places.push_back(places);
    }

    /// No block that a step in flight writes is in the table of another sequence in flight.
    fn check_writers(&self) {
        let size = self.setup.block_tokens;
        let seqs = || self.flying.iter().flat_map(|(_, batch)| &batch.seqs);
        for writer in seqs() {
            let first = (writer.position / size) as usize;
            for block in &writer.blocks[first..] {
                let foreign =
                    seqs().find(|s| s.request != writer.request && s.blocks.contains(block));
                assert!(foreign.is_none(), "block {block} of {writer:?} is also in {foreign:?}");
            }
        }
    }

    fn event(&mut self, event: SchedulerEvent) {
        let clients = &mut self.clients;
        match event {
            SchedulerEvent::PromptLogprobs { request, attempt, logprobs } => {
                let client = listener(clients, request, attempt);
                assert!(client.got.is_empty(), "prompt logprobs come first");
                let prompt = &client.work.tokens[..client.work.prompt_len as usize];
                assert_eq!(logprobs, reference_echo(prompt, client.owner));
                assert_eq!(client.echo.replace(logprobs), None, "and once");
            }
            SchedulerEvent::Tokens { request, attempt, position, ids, cached_tokens, .. } => {
                let client = listener(clients, request, attempt);
                assert_eq!(position as usize, client.got.len(), "{request:?}");
                client.got.extend(&ids);
                assert!(client.whole.starts_with(&client.got), "{request:?} draws other tokens");
                assert_eq!(cached_tokens.is_some(), !client.told_cached);
                assert!(cached_tokens.is_none_or(|cached| cached <= client.work.prompt_len));
                client.told_cached = true;
                let owed = client.work.prompt_logprobs.is_some();
                assert!(client.echo.is_some() || !owed || position > 0);
            }
            SchedulerEvent::Finished { request, attempt, reason } => {
                let client = listener(clients, request, attempt);
                assert_eq!(client.got, client.whole, "{request:?} ended early");
                assert_eq!(reason, client.reason);
                client.end = Some(End::Finished(reason));
                self.seen.finished += 1;
            }
            SchedulerEvent::Failed { request, attempt, code, message } => {
                assert!(!message.is_empty());
                listener(clients, request, attempt).end = Some(End::Failed(code));
            }
            SchedulerEvent::Load(load) => self.load = Some(load),
            SchedulerEvent::KvEvents { seq, stored, removed } => {
                self.kv_seq += 1;
                assert_eq!(seq, self.kv_seq, "cache events have no gap");
                removed.iter().for_each(|key| assert!(self.index.remove(key)));
                stored.into_iter().for_each(|key| assert!(self.index.insert(key)));
                let now: Vec<_> = self.index.iter().copied().collect();
                assert_eq!(now, self.kv.indexed_keys(), "a router's copy of the index is right");
            }
        }
    }

    /// The whole output, computed one token at a time without scheduler or KV store.
    fn reference(&self, work: &Work, owner: u64) -> (Vec<u32>, FinishReason) {
        let mut tokens = work.tokens[..work.prompt_len as usize].to_vec();
        let mut output = Vec::new();
        let context = self.setup.limits.context_tokens as usize;
        while output.len() < work.max_tokens as usize && tokens.len() < context {
            let history = work.sampling.needs_history();
            let early = output.len() < work.min_tokens as usize;
            let spec = SampleSpec {
                params: work.sampling.clone(),
                prompt: if history { work.tokens.clone() } else { vec![] },
                output: if history { output.clone() } else { vec![] },
                forbidden: if early { work.stop_tokens.clone() } else { vec![] },
            };
            let token = reference_token(&tokens, owner, &spec);
            output.push(token);
            tokens.push(token);
            if work.stop_tokens.contains(&token) {
                return (output, FinishReason::Stop);
            }
        }
        (output, FinishReason::Length)
    }
}

fn listener(
    clients: &mut BTreeMap<RequestId, Client>,
    id: RequestId,
    attempt: Attempt,
) -> &mut Client {
    let client = clients.get_mut(&id).unwrap();
    assert_eq!(client.end, None, "{id:?} has ended, and hears {attempt:?}");
    assert_eq!(client.work.attempt, attempt);
    client
}
