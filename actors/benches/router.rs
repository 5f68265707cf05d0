//! What one routing decision costs: an 8,192-token prompt (512 blocks, hashed anew), N replicas,
//! each with a warm prefix of its own length in its cache, submit to hand-out and cancel.
//!
//! Percentiles come first, of single decisions one after the other; divan's tables follow.
//!
//!     cargo bench -p dunlin-actors --bench router

use dunlin_actors::kv::key::Chain;
use dunlin_actors::messages::*;
use dunlin_actors::router::{Input, Output, Router, RouterConfig};
use dunlin_model::sampling::SamplingParams;
use dunlin_runtime::{Address, NodeName};
use std::time::{Duration, Instant};

const PROMPT_TOKENS: u32 = 8192;
const BLOCK_TOKENS: u32 = 16;

/// Decisions that the percentiles are over.
const DECISIONS: u64 = 4000;

fn main() {
    println!("{:>10}{:>10}{:>10}  us a decision", "replicas", "p50", "p99");
    for replicas in [8, 64, 512] {
        let mut took = decisions(replicas);
        took.sort_unstable();
        let at = |percent: usize| took[took.len() * percent / 100].as_secs_f64() * 1e6;
        println!("{replicas:>10}{:>10.1}{:>10.1}", at(50), at(99));
    }
    println!();
    divan::main();
}

/// Submit to hand-out, each for a prompt of its own object.
fn decisions(replicas: usize) -> Vec<Duration> {
    let mut router = router(replicas);
    let mut took = Vec::new();
    for id in (0..DECISIONS).map(RequestId) {
        let input = Input::Submit(Box::new(request(id)));
        let begun = Instant::now();
        let outputs = router.handle(Duration::ZERO, input);
        took.push(begun.elapsed());
        assert!(outputs.iter().any(|output| matches!(output, Output::Send { .. })));
        router.handle(Duration::ZERO, Input::Cancel { request: id, stopped: false });
    }
    took
}

#[divan::bench(args = [8, 64, 512])]
fn place_8k_prompt(bencher: divan::Bencher, replicas: usize) {
    let mut router = router(replicas);
    let mut next = 0;
    bencher.bench_local(|| {
        let id = RequestId(next);
        next += 1;
        let outputs = router.handle(Duration::ZERO, Input::Submit(Box::new(request(id))));
        assert!(outputs.iter().any(|output| matches!(output, Output::Send { .. })));
        router.handle(Duration::ZERO, Input::Cancel { request: id, stopped: false })
    });
}

/// The part of it that hashes the prompt, which no router can do without.
#[divan::bench]
fn hash_8k_prompt(bencher: divan::Bencher) {
    bencher.bench_local(keys);
}

fn address(node: &str, role: &str) -> Address {
    let node = NodeName::new(node).expect("a valid name");
    Address { node, role: role.into(), instance: "main".into() }
}

fn keys() -> Vec<BlockKey> {
    let mut chain = Chain::new(&[7; 16], BLOCK_TOKENS, "lab", "");
    chain.extend(&(0..PROMPT_TOKENS).collect::<Vec<_>>());
    chain.keys().to_vec()
}

fn router(replicas: usize) -> Router {
    let mut router = Router::new(RouterConfig::default());
    let keys = keys();
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
            cache_namespace: [7; 16],
        };
        router.handle(Duration::ZERO, Input::ReplicaUp(info));
        let stored = keys[..(n + 1) * keys.len() / replicas].to_vec();
        let event = SchedulerEvent::KvEvents { seq: 0, stored, removed: Vec::new() };
        router.handle(Duration::ZERO, Input::Scheduler { replica: name, epoch, event });
    }
    router
}

fn request(id: RequestId) -> Request {
    Request {
        id,
        tenant: "lab".into(),
        cache_salt: String::new(),
        prompt: (0..PROMPT_TOKENS).collect(),
        sampling: SamplingParams::default(),
        max_tokens: 64,
        min_tokens: 0,
        stop_tokens: vec![0],
        prompt_logprobs: None,
        deadline_ms: 60_000,
        reply_to: address("front", "gateway"),
    }
}
