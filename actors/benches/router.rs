//! What one routing decision costs: an 8,192-token prompt (512 blocks, whose keys the gateway has
//! sent along), N replicas, each with a warm prefix of its own length in its cache and
//! [`OTHER_BLOCKS`] blocks of other prompts, submit to hand-out and cancel.
//!
//! Percentiles come first, of single decisions one after the other; divan's tables follow. What the
//! gateway does for it, and what a prompt costs that came without keys, have lines of their own.
//!
//!     cargo bench -p dunlin-actors --bench router

use dunlin_actors::kv::key::Chain;
use dunlin_actors::messages::*;
use dunlin_actors::router::{Input, Output, Router, RouterConfig};
use dunlin_model::sampling::SamplingParams;
use dunlin_runtime::{Address, NodeName, codec};
use std::time::{Duration, Instant};

const PROMPT_TOKENS: u32 = 8192;
const BLOCK_TOKENS: u32 = 16;
/// Of each replica, so that the index is as large as that of a cluster at work.
const OTHER_BLOCKS: usize = 4096;
const SPACE: KeySpace = KeySpace { namespace: [7; 16], block_tokens: BLOCK_TOKENS };

/// Decisions that the percentiles are over.
const DECISIONS: u64 = 4000;

fn main() {
    println!("{:>10}{:>10}{:>10}{:>10}  us a decision", "replicas", "p50", "p99", "unkeyed");
    for replicas in [8, 64, 512] {
        let (given, unkeyed) = (decisions(replicas, true), decisions(replicas, false));
        let at = |took: &[Duration], percent: usize| {
            took[took.len() * percent / 100].as_secs_f64() * 1e6
        };
        println!(
            "{replicas:>10}{:>10.1}{:>10.1}{:>10.1}",
            at(&given, 50),
            at(&given, 99),
            at(&unkeyed, 50)
        );
    }
    println!();
    divan::main();
}

/// Submit to hand-out, each for a prompt of its own object; in order of time taken.
fn decisions(replicas: usize, keyed: bool) -> Vec<Duration> {
    let mut router = router(replicas);
    let prompt = prompt();
    let keys = Chain::of_prompt(SPACE, "lab", "", &prompt);
    let mut took = Vec::new();
    for id in (0..DECISIONS).map(RequestId) {
        let request = request(id, &prompt, keyed.then(|| keys.clone()));
        let begun = Instant::now();
        let outputs = router.handle(Duration::ZERO, Input::Submit(Box::new(request)));
        took.push(begun.elapsed());
        assert!(outputs.iter().any(|output| matches!(output, Output::Send { .. })));
        router.handle(Duration::ZERO, Input::Cancel { request: id, stopped: false });
    }
    took.sort_unstable();
    took
}

#[divan::bench(args = [8, 64, 512])]
fn place_8k_prompt(bencher: divan::Bencher, replicas: usize) {
    let mut router = router(replicas);
    let prompt = prompt();
    let keys = Chain::of_prompt(SPACE, "lab", "", &prompt);
    let mut next = 0;
    let requests = || {
        next += 1;
        Box::new(request(RequestId(next), &prompt, Some(keys.clone())))
    };
    bencher.with_inputs(requests).bench_local_values(|request| {
        let id = request.id;
        let outputs = router.handle(Duration::ZERO, Input::Submit(request));
        router.handle(Duration::ZERO, Input::Cancel { request: id, stopped: false });
        outputs
    });
}

/// What the gateway does, on the task of the request's connection.
#[divan::bench]
fn name_8k_prompt(bencher: divan::Bencher) {
    let prompt = prompt();
    bencher.bench_local(|| Chain::of_prompt(SPACE, "lab", "", &prompt));
}

/// The request to bytes and back, with and without keys: what they cost on the wire.
#[divan::bench(args = [false, true])]
fn send_8k_prompt(bencher: divan::Bencher, keyed: bool) {
    let prompt = prompt();
    let keys = keyed.then(|| Chain::of_prompt(SPACE, "lab", "", &prompt));
    let request = request(RequestId(1), &prompt, keys);
    bencher.bench_local(|| {
        let bytes = codec::encode(&request).expect("an encodable request");
        codec::decode::<Request>(&bytes).expect("the same request")
    });
}

/// A token for each of so many streams: logged, and one message each for its gateway made and read.
/// All that a message a step, instead of one a token, could save is in it.
#[divan::bench(args = [8, 32, 64], sample_count = 100, sample_size = 100)]
fn deliver_step(bencher: divan::Bencher, streams: u64) {
    let mut router = router(1);
    for id in 0..streams {
        let mut request = request(RequestId(id), &[5; 16], None);
        request.max_tokens = 30_000;
        router.handle(Duration::ZERO, Input::Submit(Box::new(request)));
    }
    let mut position = 0;
    bencher.bench_local(|| {
        for id in 0..streams {
            let event = SchedulerEvent::Tokens {
                request: RequestId(id),
                attempt: Attempt(1),
                position,
                ids: vec![7],
                logprobs: Vec::new(),
                cached_tokens: None,
            };
            let (replica, epoch) = ("r0".into(), ReplicaEpoch(1));
            for output in router.handle(Duration::ZERO, Input::Scheduler { replica, epoch, event })
            {
                let Output::Deliver { cast, .. } = output else { continue };
                let bytes = codec::encode(&cast).expect("an encodable event");
                divan::black_box(codec::decode::<GatewayCast>(&bytes).expect("the same event"));
            }
        }
        position += 1;
    });
    let (open, waiting) = router.open_and_waiting();
    assert_eq!((open as u64, waiting), (streams, 0));
}

fn address(node: &str, role: &str) -> Address {
    let node = NodeName::new(node).expect("a valid name");
    Address { node, role: role.into(), instance: "main".into() }
}

fn prompt() -> Vec<u32> {
    (0..PROMPT_TOKENS).map(|i| i * 7919 % 49_152).collect()
}

/// Keys of nobody's prompt.
fn other_keys(replica: usize) -> Vec<BlockKey> {
    let key = |i: usize| {
        let hash = (((replica << 32) + i + 1) as u128)
            .wrapping_mul(0x9e37_79b9_7f4a_7c15_f39c_c060_5ced_c835);
        BlockKey(hash.to_le_bytes())
    };
    (0..OTHER_BLOCKS).map(key).collect()
}

fn router(replicas: usize) -> Router {
    let mut router = Router::new(RouterConfig::default());
    let keys = Chain::of_prompt(SPACE, "lab", "", &prompt()).keys;
    for n in 0..replicas {
        let name = format!("r{n}");
        let epoch = ReplicaEpoch(1);
        let info = ReplicaInfo {
            replica: name.clone(),
            epoch,
            scheduler: address(&name, "scheduler"),
            max_sequence_tokens: 32_768,
            kv_blocks: 100_000,
            block_tokens: BLOCK_TOKENS,
            max_running: 256,
            served_by: vec![format!("{name}/cpu")],
            cache_namespace: SPACE.namespace,
        };
        router.handle(Duration::ZERO, Input::ReplicaUp(info));
        let mut stored = keys[..(n + 1) * keys.len() / replicas].to_vec();
        stored.extend(other_keys(n));
        let event = SchedulerEvent::KvEvents { seq: 0, stored, removed: Vec::new() };
        router.handle(Duration::ZERO, Input::Scheduler { replica: name, epoch, event });
    }
    router
}

fn request(id: RequestId, prompt: &[u32], keys: Option<PromptKeys>) -> Request {
    Request {
        id,
        tenant: "lab".into(),
        cache_salt: String::new(),
        prompt: prompt.to_vec(),
        keys,
        sampling: SamplingParams::default(),
        max_tokens: 64,
        min_tokens: 0,
        stop_tokens: vec![0],
        prompt_logprobs: None,
        deadline_ms: 60_000,
        reply_to: address("front", "gateway"),
    }
}
