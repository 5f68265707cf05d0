//! A stand-in for a shard whose numbers depend on every KV entry it reads through the block
//! tables, and the same function computed from the tokens alone.

use dunlin_model::engine::{Batch, BatchSeq, SampleSpec, Sampled};
use dunlin_model::sampling::TokenLogprob;
use std::collections::HashMap;

pub const VOCAB: u32 = 11;

/// FNV-1a over words: quick, and good enough to tell unlike inputs apart.
fn mix(words: impl IntoIterator<Item = u64>) -> u64 {
    let step = |hash: u64, word: u64| (hash ^ word).wrapping_mul(0x100_0000_01b3).rotate_left(23);
    words.into_iter().fold(0xcbf2_9ce4_8422_2325, step)
}

fn entry(before: u64, token: u32, owner: u64) -> u64 {
    mix([before, u64::from(token), owner])
}

fn pick(entries: &[u64], spec: &SampleSpec) -> u32 {
    let history = spec.prompt.iter().chain(&spec.output).map(|&token| u64::from(token));
    let all = entries.iter().copied().chain([spec.params.seed]).chain(history);
    let first = (mix(all) % u64::from(VOCAB)) as u32;
    let allowed = |token: &u32| !spec.forbidden.contains(token);
    (0..VOCAB).map(|i| (first + i) % VOCAB).find(allowed).unwrap_or(first)
}

fn successor(entry: u64, position: usize, next: u32) -> TokenLogprob {
    let logprob = -((mix([entry, u64::from(next)]) % 1000) as f32);
    TokenLogprob { logprob, top: vec![(position as u32, logprob)] }
}

/// KV entries of a token sequence. `owner` stands for tenant and salt.
fn entries(tokens: &[u32], owner: u64) -> Vec<u64> {
    let grow = |before: &mut u64, &token: &u32| {
        *before = entry(*before, token, owner);
        Some(*before)
    };
    tokens.iter().scan(0, grow).collect()
}

/// The next token, without any KV store.
pub fn reference_token(tokens: &[u32], owner: u64, spec: &SampleSpec) -> u32 {
    pick(&entries(tokens, owner), spec)
}

/// Logprobs of the tokens after the first, likewise.
pub fn reference_echo(tokens: &[u32], owner: u64) -> Vec<TokenLogprob> {
    let entries = entries(tokens, owner);
    (1..tokens.len()).map(|next| successor(entries[next - 1], next - 1, tokens[next])).collect()
}

/// One stage's KV store.
pub struct Shard {
    blocks: Vec<Vec<u64>>,
    size: usize,
}

impl Shard {
    pub fn new(blocks: u32, size: u32) -> Self {
        // Unwritten entries are not zero, so that reading one shows.
        Self { blocks: vec![vec![0xdead; size as usize]; blocks as usize], size: size as usize }
    }

    pub fn run(&mut self, batch: &Batch, owners: &HashMap<u64, u64>) -> Vec<Sampled> {
        for &(from, to) in &batch.copies {
            self.blocks[to as usize] = self.blocks[from as usize].clone();
        }
        batch.seqs.iter().filter_map(|seq| self.run_one(seq, owners[&seq.request])).collect()
    }

    fn run_one(&mut self, seq: &BatchSeq, owner: u64) -> Option<Sampled> {
        let start = seq.position as usize;
        let end = start + seq.tokens.len();
        assert_eq!(seq.blocks.len(), end.div_ceil(self.size), "the table covers the chunk");
        for (i, &token) in seq.tokens.iter().enumerate() {
            let before = if start + i == 0 { 0 } else { self.read(seq, start + i - 1) };
            let block = seq.blocks[(start + i) / self.size] as usize;
            self.blocks[block][(start + i) % self.size] = entry(before, token, owner);
        }
        if seq.sample.is_none() && seq.prompt_logprobs.is_none() {
            return None;
        }
        let entries: Vec<u64> = (0..end).map(|position| self.read(seq, position)).collect();
        let next = seq.prompt_logprobs.as_ref().and_then(|echo| echo.next);
        let following = seq.tokens.iter().skip(1).copied().chain(next).enumerate();
        let echo = following.map(|(i, next)| successor(entries[start + i], start + i, next));
        Some(Sampled {
            request: seq.request,
            token: match &seq.sample {
                Some(spec) => Ok(pick(&entries, spec)),
                None => Err(dunlin_model::engine::SampleFailure::NotAsked),
            },
            logprob: None,
            prompt_logprobs: if seq.prompt_logprobs.is_some() { echo.collect() } else { vec![] },
        })
    }

    fn read(&self, seq: &BatchSeq, position: usize) -> u64 {
        self.blocks[seq.blocks[position / self.size] as usize][position % self.size]
    }
}
