//! Topology and company do not change the text: the real model behind the real scheduler and KV
//! block manager gives bit-identical tokens and log-probabilities for any number of stages, any
//! chunk size, alone or among others, with a cold or a warm prefix cache, preempted or not.
//!
//! Each variant is held to the plainest one: one stage, one chunk, alone, cold.

mod replica;
mod wgpu;
mod window;

use dunlin_backend::Backend;
use dunlin_cpu::Precision;
use dunlin_model::sampling::SamplingParams;
use replica::{Models, Setup, Text, work};

const OUTPUT: u32 = 20;

/// A prompt over several KV blocks, not a multiple of one.
fn prompt() -> Vec<u32> {
    (0..90).map(|i| 504 + (i * 7919) % 4000).collect()
}

fn others() -> impl Iterator<Item = (u64, Vec<u32>)> {
    (0..15u64).map(|i| {
        let length = 5 + 13 * i as u32;
        (100 + i, (0..length).map(|j| 700 + (j * 104_729 + i as u32 * 31) % 9000).collect())
    })
}

fn samplings() -> [SamplingParams; 2] {
    let greedy = SamplingParams { logprobs: Some(10), ..SamplingParams::default() };
    let sampled = SamplingParams { temperature: 0.8, top_p: 0.95, seed: 11, ..greedy.clone() };
    [greedy, sampled]
}

/// The text of request 1 under `setup`, with company or without.
fn text<B: Backend>(
    models: &Models<B>,
    setup: &Setup,
    sampling: &SamplingParams,
    company: bool,
) -> Text {
    let mut replica = models.replica(setup);
    let mut works = vec![work(1, prompt(), OUTPUT, sampling)];
    if company {
        works.extend(others().map(|(id, prompt)| work(id, prompt, OUTPUT, sampling)));
    }
    replica.run(works).remove(&1).expect("request 1 has a text")
}

fn nothing_changes_the_text(precision: Precision) {
    let models = Models::on_cpu(precision);
    let plain = Setup::default();
    for sampling in &samplings() {
        let want = text(&models, &plain, sampling, false);
        assert_eq!(want.ids.len(), OUTPUT as usize);
        for stages in [2, 3] {
            let setup = Setup { stages, ..plain.clone() };
            assert_eq!(text(&models, &setup, sampling, false), want, "{stages} stages");
            assert_eq!(text(&models, &setup, sampling, true), want, "{stages} stages, company");
        }
        for chunk in [1, 7, 64] {
            let setup = Setup { chunk, ..plain.clone() };
            assert_eq!(text(&models, &setup, sampling, false), want, "chunks of {chunk}");
        }
        assert_eq!(text(&models, &plain, sampling, true), want, "among 15 others");

        let mut replica = models.replica(&plain);
        for run in ["cold", "warm"] {
            let got = replica.run(vec![work(1, prompt(), OUTPUT, sampling)]);
            assert_eq!(got[&1], want, "{run} prefix cache");
        }
        assert!(replica.load().prefix_hits_total >= 80, "the second run was not warm");

        // Too few blocks for all: somebody must give way and be computed again.
        let setup = Setup { blocks: 24, chunk: 32, ..plain.clone() };
        let mut replica = models.replica(&setup);
        let crowd = (1..=6).map(|id| work(id, prompt(), OUTPUT, sampling)).map(|mut work| {
            work.cache_salt = work.request.0.to_string();
            work
        });
        for (id, got) in replica.run(crowd.collect()) {
            assert_eq!(got, want, "request {id} in a crowd that preempts");
        }
        assert!(replica.load().preemptions_total > 0, "nobody was preempted");
    }
}

#[test]
fn nothing_changes_the_text_in_fast_mode() {
    nothing_changes_the_text(Precision::Fast);
}

#[test]
fn nothing_changes_the_text_in_exact_mode() {
    nothing_changes_the_text(Precision::Exact);
}
