//! What a step costs the scheduler: taking its answer, and planning the next one.
//!
//!     cargo bench -p dunlin-actors --bench scheduler

use divan::Bencher;
use dunlin_actors::kv::{Kv, KvConfig};
use dunlin_actors::messages::{Attempt, ReplicaEpoch, RequestId, Work};
use dunlin_actors::scheduler::{Input, Output, Scheduler, SchedulerConfig};
use dunlin_model::engine::{Batch, Sampled};
use dunlin_model::sampling::SamplingParams;
use std::time::Duration;

const EPOCH: ReplicaEpoch = ReplicaEpoch(1);
const PROMPT: u32 = 500;

fn main() {
    divan::main();
}

struct Replica {
    kv: Kv,
    scheduler: Scheduler,
    now: Duration,
    step: u64,
    batch: Batch,
}

impl Replica {
    fn new(sequences: usize) -> Self {
        let blocks = sequences as u32 * 400 + 64;
        let config = KvConfig { blocks, block_tokens: 16, namespace: [0; 16], key_bits: 128 };
        let limits = SchedulerConfig {
            step_tokens: 2048,
            chunk_tokens: 2048,
            max_running: sequences,
            overlap: false,
            ..Default::default()
        };
        Self {
            kv: Kv::new(config).unwrap(),
            scheduler: Scheduler::new(EPOCH, limits.limits(1, 1 << 20, 1 << 20)),
            now: Duration::ZERO,
            step: 0,
            batch: Batch::default(),
        }
    }

    /// All of `sequences` decode.
    fn decoding(sequences: usize) -> Self {
        let mut replica = Self::new(sequences);
        for i in 0..sequences as u32 {
            replica.input(submit(u64::from(i), i));
        }
        while replica.batch.tokens() != sequences || replica.batch.seqs.len() != sequences {
            let done = replica.answer();
            replica.input(done);
        }
        replica
    }

    fn input(&mut self, input: Input) {
        self.now += Duration::from_millis(1);
        for output in self.scheduler.handle(&mut self.kv, self.now, input) {
            if let Output::Run { step, batch, .. } = output {
                (self.step, self.batch) = (step, batch);
            }
        }
    }

    fn answer(&self) -> Input {
        let answering = self.batch.seqs.iter().filter(|seq| seq.sample.is_some());
        let sampled = |seq: &dunlin_model::engine::BatchSeq| Sampled {
            request: seq.request,
            token: Ok(seq.position % 1000),
            logprob: None,
            prompt_logprobs: Vec::new(),
        };
        let sampled = answering.map(sampled).collect();
        Input::StepDone { epoch: EPOCH, step: self.step, sampled, micros: 1000 }
    }
}

fn submit(request: u64, family: u32) -> Input {
    let work = Work {
        request: RequestId(request),
        attempt: Attempt(1),
        tenant: format!("tenant {}", family % 3),
        cache_salt: String::new(),
        tokens: (0..PROMPT).map(|i| i * 31 + family).collect(),
        prompt_len: PROMPT,
        sampling: SamplingParams::default(),
        max_tokens: 5000,
        min_tokens: 0,
        stop_tokens: vec![u32::MAX],
        prompt_logprobs: None,
        suspect: false,
    };
    Input::Submit { epoch: EPOCH, work: Box::new(work) }
}

/// One decode step over so many sequences of 500 tokens and more. One to a sample, since inputs
/// are made for a whole sample at once, and each answer must be about the step before.
#[divan::bench(args = [8, 64, 256, 1024], sample_count = 500, sample_size = 1)]
fn decode_step(bencher: Bencher, sequences: usize) {
    let replica = std::cell::RefCell::new(Replica::decoding(sequences));
    bencher
        .with_inputs(|| replica.borrow().answer())
        .bench_local_values(|done| replica.borrow_mut().input(done));
    assert_eq!(replica.borrow().scheduler.refused_total(), 0);
}

/// A prompt of 500 tokens that the prefix cache holds: queued, found, planned, cancelled, done.
#[divan::bench(sample_count = 50, sample_size = 10)]
fn cached_prompt(bencher: Bencher) {
    let mut replica = Replica::new(8);
    let mut serve = move || {
        replica.input(submit(1, 7));
        let (request, attempt) = (RequestId(1), Attempt(1));
        replica.input(Input::Cancel { epoch: EPOCH, request, attempt });
        let done = replica.answer();
        replica.input(done);
    };
    bencher.bench_local(&mut serve);
}
