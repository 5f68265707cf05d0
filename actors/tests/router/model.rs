//! The router against a model of the world: replicas that draw tokens by a fixed function of all
//! tokens before, messages that come late, twice or never, and clients that leave.

use crate::support::*;
use dunlin_actors::messages::*;
use dunlin_actors::router::{Input, Note, RouterConfig};
use proptest::prelude::*;
use proptest::strategy::ValueTree;
use proptest::test_runner::TestRunner;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

const REPLICAS: [&str; 3] = ["a", "b", "c"];

#[derive(Debug, Clone)]
enum Op {
    Submit {
        prompt: u8,
        max_tokens: u8,
        deadline_ms: u32,
    },
    /// Every sequence of a replica draws this many tokens.
    Step {
        replica: usize,
        tokens: u8,
    },
    /// This many reports of a replica arrive.
    Mail {
        replica: usize,
        count: u8,
    },
    /// The replica is gone; its reports on the way arrive never, or late.
    Kill {
        replica: usize,
        suspects: u8,
        late: bool,
    },
    Revive {
        replica: usize,
    },
    /// A report that had arrived, or had come too late, arrives again.
    Again {
        nth: usize,
    },
    /// A report with tokens is lost although the replica lives.
    Lose {
        replica: usize,
    },
    Cancel {
        nth: usize,
        stopped: bool,
    },
    /// Hand-outs to this replica fail at once from now on, or no more.
    Reachable {
        replica: usize,
        reachable: bool,
    },
    Undeliverable {
        nth: usize,
    },
    GatewayDown,
    Wait {
        ms: u16,
    },
    Drain,
}

fn op() -> impl Strategy<Value = Op> {
    let replica = || 0..REPLICAS.len();
    prop_oneof![
        6 => (1u8..40, 0u8..12, 1u32..40_000).prop_map(|(prompt, max_tokens, deadline_ms)| {
            Op::Submit { prompt, max_tokens, deadline_ms }
        }),
        10 => (replica(), 1u8..4).prop_map(|(replica, tokens)| Op::Step { replica, tokens }),
        10 => (replica(), 1u8..9).prop_map(|(replica, count)| Op::Mail { replica, count }),
        3 => (replica(), 0u8..4, any::<bool>())
            .prop_map(|(replica, suspects, late)| Op::Kill { replica, suspects, late }),
        4 => replica().prop_map(|replica| Op::Revive { replica }),
        4 => any::<usize>().prop_map(|nth| Op::Again { nth }),
        1 => replica().prop_map(|replica| Op::Lose { replica }),
        2 => (any::<usize>(), any::<bool>())
            .prop_map(|(nth, stopped)| Op::Cancel { nth, stopped }),
        1 => (replica(), any::<bool>())
            .prop_map(|(replica, reachable)| Op::Reachable { replica, reachable }),
        1 => any::<usize>().prop_map(|nth| Op::Undeliverable { nth }),
        1 => Just(Op::GatewayDown),
        4 => (0u16..3000).prop_map(|ms| Op::Wait { ms }),
    ]
}

/// The only model there is: the next token is a hash of all before. 0 ends the text.
fn draw(tokens: &[u32]) -> u32 {
    let mix = |h: u64, t: &u32| (h ^ u64::from(*t)).wrapping_mul(0x0100_0000_01b3);
    (tokens.iter().fold(0xcbf2_9ce4_8422_2325, mix) >> 24) as u32 % 13
}

/// What a request's whole output must be.
fn reference(request: &Request) -> Vec<u32> {
    let mut tokens = request.prompt.clone();
    while tokens.len() - request.prompt.len() < request.max_tokens as usize {
        let token = draw(&tokens);
        tokens.push(token);
        if token == 0 {
            break;
        }
    }
    tokens.split_off(request.prompt.len())
}

struct Replica {
    name: &'static str,
    epoch: u64,
    up: bool,
    reachable: bool,
    running: BTreeMap<RequestId, Work>,
    mail: VecDeque<Input>,
    kv_seq: u64,
}

/// What a client has seen.
struct Client {
    request: Request,
    output: Vec<u32>,
    ended: Option<StreamEvent>,
    attempt: u32,
    deadline: Duration,
    stopped_early: bool,
}

struct World {
    bench: Bench,
    config: RouterConfig,
    replicas: Vec<Replica>,
    clients: BTreeMap<RequestId, Client>,
    old: Vec<Input>,
    draining: bool,
    /// What has happened, for the test of the test.
    seen: BTreeSet<String>,
}

impl World {
    fn new() -> Self {
        let config = RouterConfig {
            max_open: 40,
            max_waiting: 5,
            queue_ahead: 2,
            remember_ended: 16,
            ..RouterConfig::default()
        };
        let replicas = REPLICAS.map(|name| Replica {
            name,
            epoch: 0,
            up: false,
            reachable: true,
            running: BTreeMap::new(),
            mail: VecDeque::new(),
            kv_seq: 0,
        });
        Self {
            bench: Bench::new(config.clone()),
            config,
            replicas: replicas.into(),
            clients: BTreeMap::new(),
            old: Vec::new(),
            draining: false,
            seen: BTreeSet::new(),
        }
    }

    fn run(&mut self, op: Op) {
        match op {
            Op::Submit { prompt, max_tokens, deadline_ms } => {
                self.submit(prompt, max_tokens, deadline_ms);
            }
            Op::Step { replica, tokens } => self.step(replica, tokens),
            Op::Mail { replica, count } => {
                for _ in 0..count {
                    let Some(input) = self.replicas[replica].mail.pop_front() else { break };
                    self.old.push(input.clone());
                    self.handle(input);
                }
            }
            Op::Kill { replica, suspects, late } => self.kill(replica, suspects, late),
            Op::Revive { replica } => self.revive(replica),
            Op::Again { nth } => {
                if !self.old.is_empty() {
                    let input = self.old[nth % self.old.len()].clone();
                    self.handle(input);
                }
            }
            Op::Lose { replica } => {
                // Only where a later report shows the hole.
                let mail = &mut self.replicas[replica].mail;
                if let [first, next, ..] = mail.make_contiguous()
                    && same_request(first, next)
                {
                    mail.pop_front();
                }
            }
            Op::Cancel { nth, stopped } => {
                if let Some(id) = self.nth(nth) {
                    self.clients.get_mut(&id).expect("known").stopped_early |= stopped;
                    self.handle(Input::Cancel { request: id, stopped });
                }
            }
            Op::Reachable { replica, reachable } => self.replicas[replica].reachable = reachable,
            Op::Undeliverable { nth } => {
                if let Some(id) = self.nth(nth) {
                    self.handle(Input::Undeliverable(id));
                }
            }
            Op::GatewayDown => {
                self.handle(Input::GatewayDown { node: node("side"), lost: Duration::MAX })
            }
            Op::Wait { ms } => {
                self.bench.now += Duration::from_millis(ms.into());
                self.handle(Input::Tick);
            }
            Op::Drain => {
                self.draining = true;
                self.handle(Input::Drain);
            }
        }
    }

    fn nth(&self, nth: usize) -> Option<RequestId> {
        let count = self.clients.len().max(1);
        self.clients.keys().nth(nth % count).copied()
    }

    fn submit(&mut self, prompt: u8, max_tokens: u8, deadline_ms: u32) {
        let id = self.clients.len() as u64;
        // Prompts share prefixes, so that affinity plays a part.
        let ids = (0..u32::from(prompt)).map(|i| i + id as u32 % 3).collect();
        let mut new = request(id, ids, max_tokens.into());
        new.keys = id.is_multiple_of(2).then(|| prompt_keys(&new.prompt));
        new.deadline_ms = deadline_ms.into();
        if id % 5 == 4 {
            new.reply_to = address("side", "gateway");
        }
        let before = self.bench.status();
        let deadline = self.bench.now + Duration::from_millis(new.deadline_ms);
        let client = Client {
            request: new.clone(),
            output: Vec::new(),
            ended: None,
            attempt: 0,
            deadline,
            stopped_early: false,
        };
        self.clients.insert(RequestId(id), client);
        let outputs = self.bench.handle(Input::Submit(Box::new(new)));
        self.observe(&Outputs { notes: outputs.notes.clone(), ..Outputs::default() });
        let refused = match &outputs.replies[..] {
            [RouterReply::Submitted(result)] => result.clone().err(),
            other => panic!("one answer, got {other:?}"),
        };
        match refused {
            None => assert!(!self.draining && before.waiting_requests < 5, "{before:?}"),
            Some(Refusal::Overloaded { waiting, retry_after_ms }) => {
                assert!(waiting >= 5 || before.open_requests >= 40, "{before:?}");
                assert!(retry_after_ms > 0);
            }
            Some(Refusal::Draining) => assert!(self.draining),
            Some(Refusal::NotReady { .. }) => {
                assert!(self.replicas.iter().all(|replica| replica.epoch == 0));
            }
            Some(other) => panic!("unexpected refusal {other:?}"),
        }
        if refused.is_some() {
            assert!(outputs.events.is_empty() && outputs.sends.is_empty());
            // As if it never was, to the checks at the end.
            self.clients.get_mut(&RequestId(id)).expect("just added").ended =
                Some(StreamEvent::Cancelled { usage: Usage::default() });
            return;
        }
        self.absorb(outputs);
    }

    /// Draws tokens; the reports go into the mail, in order.
    fn step(&mut self, replica: usize, tokens: u8) {
        let Replica { name, epoch, up, running, mail, kv_seq, .. } = &mut self.replicas[replica];
        if !*up {
            return;
        }
        let mut post = |event| {
            let (replica, epoch) = (name.to_string(), ReplicaEpoch(*epoch));
            mail.push_back(Input::Scheduler { replica, epoch, event });
        };
        let mut done = Vec::new();
        for (id, work) in running.iter_mut() {
            for _ in 0..tokens {
                let position = work.tokens.len() as u32 - work.prompt_len;
                let mut reason = None;
                if position < work.max_tokens {
                    let token = draw(&work.tokens);
                    work.tokens.push(token);
                    post(SchedulerEvent::Tokens {
                        request: *id,
                        attempt: work.attempt,
                        position,
                        ids: vec![token],
                        logprobs: vec![],
                        cached_tokens: Some(position),
                    });
                    reason = (token == 0).then_some(FinishReason::Stop);
                }
                if work.tokens.len() as u32 - work.prompt_len >= work.max_tokens {
                    reason = reason.or(Some(FinishReason::Length));
                }
                if let Some(reason) = reason {
                    let attempt = work.attempt;
                    post(SchedulerEvent::Finished { request: *id, attempt, reason });
                    done.push(*id);
                    break;
                }
            }
        }
        // What it has read by now is in its prefix cache.
        let stored = running.values().flat_map(|work| block_keys(&work.tokens)).collect();
        post(SchedulerEvent::KvEvents { seq: *kv_seq, stored, removed: vec![] });
        *kv_seq += 1;
        for id in done {
            running.remove(&id);
        }
    }

    fn kill(&mut self, replica: usize, suspects: u8, late: bool) {
        let dead = &mut self.replicas[replica];
        if !dead.up {
            return;
        }
        dead.up = false;
        let suspects = dead.running.keys().copied().take(suspects.into()).collect();
        dead.running.clear();
        let mail = std::mem::take(&mut dead.mail);
        if late {
            self.old.extend(mail);
        }
        let (replica, epoch) = (dead.name.to_string(), ReplicaEpoch(dead.epoch));
        let reason = "killed".into();
        self.handle(Input::ReplicaDown { replica, epoch, reason, suspects });
    }

    fn revive(&mut self, replica: usize) {
        let new = &mut self.replicas[replica];
        if !new.up {
            new.up = true;
            new.epoch += 1;
            let info = crate::support::replica(new.name, new.epoch);
            self.handle(Input::ReplicaUp(info));
        }
    }

    fn handle(&mut self, input: Input) {
        let outputs = self.bench.handle(input);
        self.absorb(outputs);
    }

    /// Checks every output and carries it out; what fails comes back as input.
    fn absorb(&mut self, outputs: Outputs) {
        self.observe(&outputs);
        for (id, event) in outputs.events {
            let client = self.clients.get_mut(&id).expect("an event of a known request");
            assert!(client.ended.is_none(), "{id:?}: {event:?} after {:?}", client.ended);
            match event {
                StreamEvent::Tokens { position, ids, .. } => {
                    assert_eq!(position as usize, client.output.len(), "{id:?}: position");
                    assert!(!ids.is_empty());
                    client.output.extend(ids);
                    let whole = reference(&client.request);
                    assert!(whole.starts_with(&client.output), "{id:?}: a wrong token");
                }
                StreamEvent::PromptLogprobs(_) => panic!("nobody asked"),
                terminal => client.ended = Some(terminal),
            }
        }
        let mut failed = Vec::new();
        for (to, cast) in outputs.sends {
            let at = self.replicas.iter_mut().find(|r| r.name == to.node.as_str());
            let at = at.expect("a known replica");
            match cast {
                SchedulerCast::Submit { epoch, work } => {
                    assert!(at.up && epoch.0 == at.epoch, "work for a dead replica {}", at.name);
                    let client = self.clients.get_mut(&work.request).expect("known");
                    assert!(client.ended.is_none(), "work for an ended request");
                    assert!(self.bench.now < client.deadline);
                    assert!(work.attempt.0 > client.attempt, "attempts rise");
                    client.attempt = work.attempt.0;
                    let sofar = [&client.request.prompt[..], &client.output].concat();
                    assert_eq!(work.tokens, sofar, "the log is the prompt of a replay");
                    if !at.reachable {
                        failed.push((work.request, work.attempt));
                        continue;
                    }
                    at.running.insert(work.request, *work);
                    let room = 4 + self.config.queue_ahead as usize;
                    // Finished ones may still be on their way to the router.
                    assert!(at.running.len() <= room, "more than {} can take", at.name);
                }
                SchedulerCast::Cancel { epoch, request, attempt } => {
                    if at.up
                        && epoch.0 == at.epoch
                        && at.running.get(&request).is_some_and(|work| work.attempt == attempt)
                    {
                        at.running.remove(&request);
                    }
                }
                other => panic!("not for a router to send: {other:?}"),
            }
        }
        for (request, attempt) in failed {
            self.handle(Input::Unreachable { request, attempt, reason: "no link".into() });
        }
    }

    fn observe(&mut self, outputs: &Outputs) {
        for note in &outputs.notes {
            self.seen.insert(match note {
                Note::Replay { request, cause, .. } => {
                    let tokens = self.clients[request].output.len();
                    let at = match tokens {
                        0 => "token 0",
                        n if (self.clients[request].request.prompt.len() + n).is_multiple_of(4) => {
                            "block edge"
                        }
                        _ => "mid-block",
                    };
                    format!("replay {cause} at {at}")
                }
                Note::Stale { kind } => format!("stale {kind}"),
                Note::Refused { why, .. } => format!("refused {why}"),
                Note::Ended { outcome, attempts, .. } => {
                    format!("{outcome}{}", if *attempts > 1 { " after replay" } else { "" })
                }
                Note::Placed { hit_tokens: 0, .. } => "placed cold".into(),
                Note::Placed { .. } => "placed warm".into(),
                Note::Duplicate { .. } => "duplicate".into(),
                Note::Gap { .. } => "gap".into(),
                other => format!("{other:?}").chars().take_while(|c| c.is_alphanumeric()).collect(),
            });
        }
        for (_, event) in &outputs.events {
            if let StreamEvent::Failed { code, .. } = event {
                self.seen.insert(format!("failed {code:?}"));
            }
        }
    }

    /// Heals everything and runs until nothing is left, then checks every client's story.
    fn settle(&mut self) {
        for round in 0.. {
            assert!(round < 500, "no progress: {:#?}", self.bench.status());
            for replica in 0..self.replicas.len() {
                self.replicas[replica].reachable = true;
                self.run(Op::Revive { replica });
                self.run(Op::Step { replica, tokens: 4 });
                self.run(Op::Mail { replica, count: u8::MAX });
            }
            self.run(Op::Wait { ms: 300 });
            let busy = self.replicas.iter().any(|r| !r.running.is_empty() || !r.mail.is_empty());
            if self.bench.status().open_requests == 0 && !busy {
                break;
            }
        }
        for (id, client) in &self.clients {
            match client.ended.as_ref().unwrap_or_else(|| panic!("{id:?} never ended")) {
                StreamEvent::Finished { reason, usage, .. } => {
                    assert_eq!(usage.completion_tokens as usize, client.output.len());
                    let whole = reference(&client.request);
                    if !client.stopped_early {
                        assert_eq!(client.output, whole, "{id:?}: cut short");
                        let stop = whole.last() == Some(&0);
                        assert_eq!(stop, *reason == FinishReason::Stop, "{id:?}");
                    }
                }
                StreamEvent::Failed { usage, code, .. } => {
                    assert_eq!(usage.completion_tokens as usize, client.output.len());
                    assert!(matches!(
                        code,
                        FailureCode::Deadline | FailureCode::Poison | FailureCode::Internal
                    ));
                }
                _ => {}
            }
        }
        let status = self.bench.status();
        assert_eq!((status.open_requests, status.waiting_requests), (0, 0));
        assert!(status.replicas.iter().all(|replica| replica.assigned == 0));
        assert_eq!(self.bench.router.next_wakeup(), None, "an idle router sleeps");
    }
}

fn same_request(first: &Input, next: &Input) -> bool {
    let of = |input: &Input| match input {
        Input::Scheduler { event: SchedulerEvent::Tokens { request, attempt, .. }, .. } => {
            Some((*request, *attempt))
        }
        _ => None,
    };
    of(first).is_some() && of(first) == of(next)
}

fn story() -> impl Strategy<Value = (Vec<Op>, Option<usize>)> {
    (prop::collection::vec(op(), 1..160), prop::option::weighted(0.1, 0usize..160))
}

fn play((ops, drain_at): (Vec<Op>, Option<usize>)) -> BTreeSet<String> {
    let mut world = World::new();
    for (at, op) in ops.into_iter().enumerate() {
        if Some(at) == drain_at {
            world.run(Op::Drain);
        }
        world.run(op);
    }
    world.settle();
    world.seen
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 500, ..ProptestConfig::default() })]

    #[test]
    fn every_story_ends_once_and_tells_the_same_text(story in story()) {
        play(story);
    }
}

/// The stories above are worth something only if they reach the corners.
#[test]
fn stories_reach_the_corners() {
    let mut runner = TestRunner::deterministic();
    let mut seen = BTreeSet::new();
    for _ in 0..300 {
        seen.extend(play(story().new_tree(&mut runner).expect("a story").current()));
    }
    let wanted = [
        "abort",
        "abort after replay",
        "duplicate",
        "failed Deadline",
        "failed Poison",
        "gap",
        "length after replay",
        "placed warm",
        "refused draining",
        "refused overloaded",
        "replay gap at mid-block",
        "replay replica_down at block edge",
        "replay replica_down at mid-block",
        "replay replica_down at token 0",
        "replay step_failed at mid-block",
        "stale attempt",
        "stale ended",
        "stale epoch",
        "stop after replay",
    ];
    let missing: Vec<_> = wanted.iter().filter(|what| !seen.contains(**what)).collect();
    assert!(missing.is_empty(), "never happened: {missing:?}; seen: {seen:#?}");
}
