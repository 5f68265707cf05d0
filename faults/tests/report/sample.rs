//! A made-up run, drawn from a seed: two replicas, one of which dies in the middle.

use dunlin_faults::fault::{Edge, Expect, Fault, Kind, Mode, Params, Target, Trigger};
use dunlin_faults::record::{Event, FaultRun, NodeInfo, Phases, Record, RequestInfo, Rest, What};
use dunlin_faults::report::{InvariantRow, InvariantState, Outcome, Slo};
use std::collections::BTreeMap;

pub struct Sample {
    pub seed: u64,
    pub requests: u64,
    /// How long the requests of the dead node wait.
    pub stall_ms: u64,
}

const KILL_US: u64 = 12_000_000;
const BACK_US: u64 = 19_000_000;

impl Default for Sample {
    fn default() -> Sample {
        Sample { seed: 7, requests: 60, stall_ms: 1_300 }
    }
}

impl Sample {
    pub fn record(&self) -> Record {
        let mut draw = Draw(self.seed);
        let mut events: Vec<Event> = ["front", "left", "right"]
            .into_iter()
            .map(|node| at(0, What::Node { node: node.into(), state: "up".into() }))
            .collect();
        let mut requests = BTreeMap::new();
        let mut touched = Vec::new();
        for request in 0..self.requests {
            let hit = self.story(request, &mut draw, &mut events, &mut requests);
            touched.extend(hit.then_some(request));
        }
        self.cluster(&touched, &mut events);
        events.sort_by_key(|event| event.us);
        Record {
            plan: "shard-dies-mid-decode".into(),
            mode: Mode::Sim,
            seed: self.seed,
            repro: format!(
                "dunlin faults run plans/shard-dies.toml --mode sim --seed {}",
                self.seed
            ),
            env: BTreeMap::from([
                ("version".into(), "0.1.0".into()),
                ("engine".into(), "hash".into()),
            ]),
            nodes: nodes(),
            phases: Phases { warmup_us: 8_000_000, chaos_us: 25_000_000, settle_us: 34_000_000 },
            requests,
            faults: self.faults(touched),
            events,
            outside: Default::default(),
            rest: Some(Rest {
                blocks: BTreeMap::from([("r0".into(), (128, 128)), ("r1".into(), (128, 128))]),
                replicas_up: 2,
                replicas_wanted: 2,
                probe_right: true,
                ..Rest::default()
            }),
            stuck: None,
            trace_hash: Some("9f2c61d0a7be4413".into()),
        }
    }

    /// One request's tokens; true if the kill stalled it.
    fn story(
        &self,
        request: u64,
        draw: &mut Draw,
        events: &mut Vec<Event>,
        requests: &mut BTreeMap<u64, RequestInfo>,
    ) -> bool {
        let submitted = request * 26_000_000 / self.requests + draw.below(200_000);
        let tokens = 16 + draw.below(48) as u32;
        // Every other one streams from the node that dies.
        let on_left = request.is_multiple_of(2);
        let info = RequestInfo {
            router_id: Some(request),
            tenant: "a".into(),
            prompt_tokens: 24,
            max_tokens: tokens,
            cancels: false,
            deadline_us: submitted + 30_000_000,
            reference: (0..tokens).map(|t| t.to_string()).collect(),
        };
        requests.insert(request, info);
        events.push(at(submitted, What::Submitted { request }));
        events.push(at(submitted + 900, What::Accepted { request }));
        let mut us = submitted + 60_000 + draw.below(50_000);
        let mut stalled = false;
        for position in 0..tokens {
            let early = us.saturating_sub(40_000);
            if on_left && !stalled && early < KILL_US && us >= KILL_US && submitted < KILL_US {
                stalled = true;
                us = us + self.stall_ms * 1_000 + draw.below(30_000);
            }
            let slow = if (20_000_000..24_000_000).contains(&us) && on_left { 3 } else { 1 };
            events.push(at(us, What::Token { request, position, id: position.to_string() }));
            us += (28_000 + draw.below(12_000)) * slow;
        }
        let code = "finished".to_string();
        events.push(at(us, What::Ended { request, code, message: String::new() }));
        stalled
    }

    fn cluster(&self, touched: &[u64], events: &mut Vec<Event>) {
        let seen = KILL_US + self.stall_ms * 250;
        let mut fact = |us, node: &str, name: &str, subject: &str, (key, value): (u64, u64)| {
            let (node, name, subject) = (node.into(), name.into(), subject.into());
            events.push(at(us, What::Fact { node, name, subject, key, value }));
        };
        fact(seen, "front", "peer.down", "left", (1, 0));
        fact(seen, "right", "peer.down", "left", (1, 0));
        fact(seen + 500, "front", "epoch.bumped", "r0", (2, 0));
        fact(seen + 600, "front", "replica.down", "r0: left is down", (1, 0));
        for request in touched {
            fact(seen + 700, "front", "request.replayed", "r0 is down", (*request, 40));
        }
        fact(BACK_US + 400_000, "front", "peer.up", "left", (2, 0));
        fact(BACK_US + 900_000, "front", "replica.up", "r0", (2, 0));
        fact(BACK_US + 1_900_000, "left", "frame.refused", "front", (0, 1));
        for (us, state) in [(KILL_US, "down"), (BACK_US, "starting"), (BACK_US + 900_000, "up")] {
            events.push(at(us, What::Node { node: "left".into(), state: state.into() }));
        }
        events.push(at(22_000_000, What::Node { node: "right".into(), state: "paused".into() }));
        events.push(at(22_800_000, What::Node { node: "right".into(), state: "up".into() }));
    }

    fn faults(&self, touched: Vec<u64>) -> Vec<FaultRun> {
        let links = Target::Links(vec![("left".into(), "front".into())]);
        let after = Trigger::After { fault: "kill".into(), edge: Edge::Start, delay_us: 8_000_000 };
        vec![
            FaultRun {
                fault: fault(
                    "kill",
                    Kind::ProcessKill,
                    Target::Node("left".into()),
                    Expect::Masked,
                ),
                began_us: Some(KILL_US),
                ended_us: Some(BACK_US),
                proof: Some("pid 4711 gone, signal 9".into()),
                detected_us: Some(KILL_US + self.stall_ms * 250),
                touched,
            },
            FaultRun {
                fault: Fault {
                    when: after,
                    lasts_us: Some(4_000_000),
                    ..fault("slow-return", Kind::LinkDelay, links, Expect::Masked)
                },
                began_us: Some(20_000_000),
                ended_us: Some(24_000_000),
                proof: Some("214 frames held, median 5.1 ms".into()),
                detected_us: None,
                touched: Vec::new(),
            },
            FaultRun {
                fault: fault(
                    "pause",
                    Kind::ProcessPause,
                    Target::Node("right".into()),
                    Expect::Masked,
                ),
                began_us: Some(22_000_000),
                ended_us: Some(22_800_000),
                proof: Some("state T".into()),
                detected_us: Some(22_500_000),
                touched: Vec::new(),
            },
        ]
    }
}

fn fault(id: &str, kind: Kind, target: Target, expect: Expect) -> Fault {
    let when = Trigger::Token { request: None, token: 17 };
    let params = Params::default();
    Fault { id: id.into(), kind, target, when, lasts_us: None, times: 1, params, expect }
}

fn nodes() -> Vec<NodeInfo> {
    let node = |name: &str, role: &str, devices: &[&str]| NodeInfo {
        name: name.into(),
        role: role.into(),
        devices: devices.iter().map(ToString::to_string).collect(),
    };
    vec![
        node("front", "head", &[]),
        node("left", "worker", &["cpu"]),
        node("right", "worker", &["cpu"]),
    ]
}

pub fn slo() -> Slo {
    Slo { ttft_us: Some(2_000_000), gap_us: Some(250_000), stall_us: None }
}

pub fn invariants(verdict: Outcome) -> Vec<InvariantRow> {
    let row = |id: &str, name: &str, statement: &str, state| InvariantRow {
        id: id.into(),
        name: name.into(),
        statement: statement.into(),
        state,
        checked: String::new(),
        violations: Vec::new(),
    };
    let mut rows = vec![
        row(
            "I1",
            "ends-once",
            "each accepted request has exactly one terminal event",
            InvariantState::Held,
        ),
        row("I2", "tokens", "output equals the fault-free reference", InvariantState::Held),
        row(
            "I3",
            "exactly-once stream",
            "positions 0..n-1, no gap, no repeat",
            InvariantState::Held,
        ),
        row(
            "I5",
            "drafter-invisible",
            "output with drafter equals output without",
            InvariantState::NotChecked,
        ),
    ];
    rows[1].checked = "60 requests, 2,391 tokens, bitwise".into();
    rows[3].checked = "the plan has no drafter".into();
    if verdict == Outcome::Fail {
        rows[2].state = InvariantState::Violated;
        rows[2].violations = vec!["request 17 got position 9 twice, at 12.4 s and 13.1 s".into()];
    }
    rows
}

fn at(us: u64, what: What) -> Event {
    Event { us, what }
}

/// SplitMix64.
struct Draw(u64);

impl Draw {
    fn below(&mut self, n: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % n.max(1)
    }
}
