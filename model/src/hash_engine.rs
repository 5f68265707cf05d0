//! The hash engine: a stand-in for a transformer that costs microseconds and forgives nothing.
//!
//! A KV entry is a hash of (layer, head, position, input, entry before it); a layer's output is a
//! hash over *all* entries up to the position, read through the block table; the next token is a
//! hash of the last layer's output. So any lost, stale, swapped or foreign block changes the text
//! at once, and the text is the same whatever the batch, the chunks, the stages or the ranks.
//!
//! What is not finite stays so: NaN that comes in marks the entries it reaches, and nothing is drawn
//! from those.
//!
//! A chunk reads the entries before it once and its own as it writes them, so its cost is
//! proportional to context plus chunk. Sampling parameters beyond temperature, seed and forbidden
//! tokens have no meaning here and are ignored.

use crate::engine::{
    Batch, BatchSeq, Collective, Engine, EngineError, Flip, SampleFailure, Sampled, StageOutput,
    StageSpec,
};
use crate::sampling::TokenLogprob;
use serde::{Deserialize, Serialize};
use std::time::Duration;

/// Values per token between stages: a 64-bit state in four 16-bit limbs, each exact in float32.
const LIMBS: usize = 4;

/// The entry and the state that stand for NaN. A hash is never taken for it in practice (2^-64).
const NOT_FINITE: u64 = 0x7ff8_0bad_f00d_7ff8;

/// Shape of the pretended model.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct HashSpec {
    pub vocab: u32,
    pub layers: usize,
    pub context: usize,
    /// Most tensor ranks that it can be split over.
    pub heads: usize,
    /// Draw `eos` about once in so many tokens.
    pub eos: Option<(u32, u32)>,
    /// Time that a step takes beyond the hashing: per step, and per token.
    pub step_cost: Duration,
    pub token_cost: Duration,
}

impl Default for HashSpec {
    fn default() -> Self {
        Self {
            vocab: 4096,
            layers: 6,
            context: 8192,
            heads: 1,
            eos: None,
            step_cost: Duration::ZERO,
            token_cost: Duration::ZERO,
        }
    }
}

/// One stage of the pretended model.
pub struct HashEngine {
    spec: HashSpec,
    stage: StageSpec,
    heads: std::ops::Range<usize>,
    /// `[layer][block][slot][head]`, local layers and heads.
    entries: Vec<u64>,
    /// One word a layer, 0 unless a fault has flipped a bit of it; part of every entry's hash.
    weights: Vec<u64>,
    /// The requests whose logits are NaN in the coming step.
    poisoned: Vec<u64>,
}

impl HashEngine {
    pub fn new(spec: HashSpec, stage: StageSpec) -> Result<Self, EngineError> {
        if stage.ranks == 0 || stage.ranks > spec.heads || stage.rank >= stage.ranks {
            let (heads, rank, ranks) = (spec.heads, stage.rank, stage.ranks);
            return Err(EngineError::BadBatch(format!(
                "rank {rank} of {ranks} for a hash model of {heads} heads"
            )));
        }
        let cut = |rank: usize| spec.heads * rank / stage.ranks;
        let heads = cut(stage.rank)..cut(stage.rank + 1);
        let slots = stage.kv_blocks * stage.block_tokens;
        let entries = vec![0; stage.layers.len() * slots * heads.len()];
        let weights = vec![0; stage.layers.len()];
        Ok(Self { spec, stage, heads, entries, weights, poisoned: Vec::new() })
    }

    /// Bytes of one KV block of a stage.
    pub fn kv_block_bytes(spec: &HashSpec, stage: &StageSpec) -> u64 {
        (stage.layers.len() * stage.block_tokens * spec.heads * size_of::<u64>()) as u64
    }
}

impl Engine for HashEngine {
    fn stage(&self) -> &StageSpec {
        &self.stage
    }

    fn hidden(&self) -> usize {
        LIMBS
    }

    fn step(
        &mut self,
        batch: &Batch,
        input: Option<&[f32]>,
        group: &mut dyn Collective,
    ) -> Result<StageOutput, EngineError> {
        self.check(batch, input, group)?;
        let tokens = batch.tokens();
        let pause = self.spec.step_cost + self.spec.token_cost * tokens as u32;
        if !pause.is_zero() {
            std::thread::sleep(pause);
        }
        for (from, to) in &batch.copies {
            self.copy(*from as usize, *to as usize);
        }
        let mut states: Vec<u64> = match input {
            Some(values) => values.chunks_exact(LIMBS).map(from_limbs).collect(),
            None => {
                let ids = batch.seqs.iter().flat_map(|s| s.tokens.iter());
                ids.map(|id| mix(u64::from(*id) + 1)).collect()
            }
        };
        let given_finite = finite_sequences(batch, &states);
        for layer in 0..self.stage.layers.len() {
            let mut begin = 0;
            for seq in &batch.seqs {
                let end = begin + seq.tokens.len();
                self.run_layer(layer, seq, &mut states[begin..end]);
                begin = end;
            }
            if group.size() > 1 {
                // Sums of 16-bit limbs stay exact in float32, so ranks add up without loss.
                let mut limbs: Vec<f32> = states.iter().flat_map(|s| to_limbs(*s)).collect();
                group.all_reduce(&mut limbs)?;
                states = limbs.chunks_exact(LIMBS).map(from_limbs).collect();
            }
            states.iter_mut().filter(|s| **s != NOT_FINITE).for_each(|s| *s = mix(*s));
        }
        if !self.stage.last {
            return Ok(StageOutput::Hidden(states.iter().flat_map(|s| to_limbs(*s)).collect()));
        }
        let mut begin = 0;
        let mut drawn = Vec::new();
        for (seq, given_finite) in batch.seqs.iter().zip(given_finite) {
            let end = begin + seq.tokens.len();
            drawn.extend(self.draw(seq, &states[begin..end], given_finite));
            begin = end;
        }
        self.poisoned.clear();
        Ok(StageOutput::Sampled(drawn))
    }

    fn weights(&self) -> Option<(u64, u64)> {
        let hash = self.weights.iter().fold(0, |hash, word| mix(hash ^ word));
        Some((hash, size_of_val(self.weights.as_slice()) as u64))
    }

    fn verify(&self) -> Result<(), EngineError> {
        let Some(layer) = self.weights.iter().position(|w| *w != 0) else { return Ok(()) };
        let tensor = format!("layer {}", self.stage.layers.start + layer);
        let (device, is) = ("the hash engine".into(), self.weights[layer]);
        Err(EngineError::Weights { device, tensor, was: 0, is })
    }

    fn flip_kv(
        &mut self,
        layer: usize,
        block: u32,
        slot: usize,
        bit: u32,
    ) -> Result<Flip, EngineError> {
        let size = self.stage.block_tokens;
        let inside = layer < self.weights.len() && slot < size;
        let at = (layer * self.stage.kv_blocks + block as usize) * size + slot;
        let entry = self.entries.get_mut(at * self.heads.len()).filter(|_| inside);
        let Some(entry) = entry else {
            return Err(EngineError::BadBatch(format!("no slot {slot} of block {block}")));
        };
        let before = *entry;
        *entry ^= 1 << (bit % 64);
        let place = format!("KV entry at slot {slot} of block {block}, layer {layer}");
        Ok(Flip { place, before, after: *entry })
    }

    fn flip_weight(&mut self, index: u64, bit: u32) -> Result<Flip, EngineError> {
        let layer = (index % self.weights.len().max(1) as u64) as usize;
        let Some(weight) = self.weights.get_mut(layer) else {
            return Err(EngineError::Unsupported("flip a weight: the stage has no layers"));
        };
        let before = *weight;
        *weight ^= 1 << (bit % 64);
        let place = format!("weight of layer {}", self.stage.layers.start + layer);
        Ok(Flip { place, before, after: *weight })
    }

    fn poison(&mut self, request: u64) -> Result<(), EngineError> {
        if !self.stage.last {
            return Err(EngineError::Unsupported("spoil logits: only the last stage has any"));
        }
        self.poisoned.push(request);
        Ok(())
    }

    fn read_block(&self, block: u32) -> Result<Vec<u8>, EngineError> {
        let parts = self.block_ranges(block)?;
        let entries = parts.flat_map(|part| &self.entries[part]);
        Ok(entries.flat_map(|entry| entry.to_le_bytes()).collect())
    }

    fn write_block(&mut self, block: u32, content: &[u8]) -> Result<(), EngineError> {
        let parts: Vec<_> = self.block_ranges(block)?.collect();
        let places = parts.into_iter().flatten();
        for (at, bytes) in places.zip(content.chunks_exact(8)) {
            let mut word = [0; 8];
            word.copy_from_slice(bytes);
            self.entries[at] = u64::from_le_bytes(word);
        }
        Ok(())
    }
}

impl HashEngine {
    /// Where a block's entries lie, layer by layer.
    fn block_ranges(
        &self,
        block: u32,
    ) -> Result<impl Iterator<Item = std::ops::Range<usize>> + use<>, EngineError> {
        let blocks = self.stage.kv_blocks;
        if block as usize >= blocks {
            return Err(EngineError::BadBatch(format!("block {block} of {blocks}")));
        }
        let width = self.stage.block_tokens * self.heads.len();
        let begin = move |layer: usize| (layer * blocks + block as usize) * width;
        Ok((0..self.stage.layers.len()).map(move |l| begin(l)..begin(l) + width))
    }

    fn check(
        &self,
        batch: &Batch,
        input: Option<&[f32]>,
        group: &dyn Collective,
    ) -> Result<(), EngineError> {
        let bad = |what: String| Err(EngineError::BadBatch(what));
        if group.size() != self.stage.ranks {
            return bad(format!("a group of {} for {} ranks", group.size(), self.stage.ranks));
        }
        let tokens = batch.tokens();
        if tokens == 0 || tokens > self.stage.max_tokens {
            return bad(format!("{tokens} tokens, the stage takes 1 to {}", self.stage.max_tokens));
        }
        if input.is_none() != self.stage.first {
            return bad("activations where none belong, or none where they do".into());
        }
        if input.is_some_and(|values| values.len() != tokens * LIMBS) {
            return bad("activations of the wrong size".into());
        }
        let blocks = self.stage.kv_blocks as u32;
        if batch.copies.iter().any(|(from, to)| *from >= blocks || *to >= blocks) {
            return bad(format!("a block copy outside 0..{blocks}"));
        }
        for seq in &batch.seqs {
            let end = seq.position as usize + seq.tokens.len();
            if seq.tokens.is_empty()
                || end > seq.blocks.len() * self.stage.block_tokens
                || end > self.spec.context
                || seq.blocks.iter().any(|b| *b >= blocks)
                || seq.tokens.iter().any(|t| *t >= self.spec.vocab)
            {
                return bad(format!("request {}: tokens or blocks out of range", seq.request));
            }
        }
        Ok(())
    }

    /// Replaces each token's input by the sum over all entries up to it (this rank's heads).
    fn run_layer(&mut self, layer: usize, seq: &BatchSeq, states: &mut [u64]) {
        let begin = seq.position as usize;
        let global = (self.stage.layers.start + layer) as u64;
        let weight = self.weights[layer];
        let (mut sum, mut finite) = self.sum_before(layer, seq, begin);
        for (offset, state) in states.iter_mut().enumerate() {
            let position = begin + offset;
            let slot = self.slot(layer, seq, position);
            finite &= *state != NOT_FINITE;
            for (i, head) in self.heads.clone().enumerate() {
                let before = match position {
                    0 => 0,
                    _ => self.entries[self.slot(layer, seq, position - 1) + i],
                };
                let place = mix(global << 32 ^ (head as u64) << 48 ^ position as u64);
                let entry = match finite {
                    true => mix(place ^ weight ^ mix(*state) ^ before.rotate_left(17)),
                    false => NOT_FINITE,
                };
                self.entries[slot + i] = entry;
                sum = sum.wrapping_add(read(entry, position));
            }
            *state = if finite { sum } else { NOT_FINITE };
        }
    }

    /// The sum over all entries of positions `0..end`, block by block through the table, and
    /// whether all of them were finite.
    fn sum_before(&self, layer: usize, seq: &BatchSeq, end: usize) -> (u64, bool) {
        let (size, heads) = (self.stage.block_tokens, self.heads.len());
        let (mut sum, mut finite) = (0u64, true);
        for first in (0..end).step_by(size) {
            let slot = self.slot(layer, seq, first);
            let slots = size.min(end - first);
            let entries = &self.entries[slot..slot + slots * heads];
            finite &= !entries.contains(&NOT_FINITE);
            for (position, heads) in (first..).zip(entries.chunks_exact(heads)) {
                sum = heads.iter().fold(sum, |sum, e| sum.wrapping_add(read(*e, position)));
            }
        }
        (sum, finite)
    }

    fn slot(&self, layer: usize, seq: &BatchSeq, position: usize) -> usize {
        let size = self.stage.block_tokens;
        let block = seq.blocks[position / size] as usize;
        let slots = self.stage.kv_blocks * size;
        (layer * slots + block * size + position % size) * self.heads.len()
    }

    fn copy(&mut self, from: usize, to: usize) {
        let width = self.stage.block_tokens * self.heads.len();
        let layer_width = self.stage.kv_blocks * width;
        for layer in 0..self.stage.layers.len() {
            let base = layer * layer_width;
            let source = base + from * width;
            self.entries.copy_within(source..source + width, base + to * width);
        }
    }

    fn draw(&self, seq: &BatchSeq, states: &[u64], given_finite: bool) -> Option<Sampled> {
        if seq.sample.is_none() && seq.prompt_logprobs.is_none() {
            return None;
        }
        let mut sampled = Sampled {
            request: seq.request,
            token: Err(SampleFailure::NotAsked),
            logprob: None,
            prompt_logprobs: Vec::new(),
        };
        if states.contains(&NOT_FINITE) || self.poisoned.contains(&seq.request) {
            let input = !self.stage.first && !given_finite;
            let why = if input { SampleFailure::NotFiniteInput } else { SampleFailure::NotFinite };
            sampled.token = Err(why);
            return Some(sampled);
        }
        if let Some(ask) = &seq.prompt_logprobs {
            let next = |i: usize| seq.tokens.get(i + 1).copied().or(ask.next);
            let known = states.iter().enumerate().filter(|(i, _)| next(*i).is_some());
            sampled.prompt_logprobs = known.map(|(_, s)| self.logprob(*s, ask.top)).collect();
        }
        if let (Some(ask), Some(state)) = (&seq.sample, states.last()) {
            let position = u64::from(seq.position) + seq.tokens.len() as u64;
            let drawn = match ask.params.temperature > 0.0 {
                true => mix(*state ^ mix(ask.params.seed) ^ mix(position).rotate_left(9)),
                false => *state,
            };
            sampled.token = Ok(self.token(drawn, &ask.forbidden));
            sampled.logprob = ask.params.logprobs.map(|top| self.logprob(drawn, top));
        }
        Some(sampled)
    }

    fn token(&self, drawn: u64, forbidden: &[u32]) -> u32 {
        let vocab = self.spec.vocab.max(1);
        let mut token = (mix(drawn) % u64::from(vocab)) as u32;
        match self.spec.eos {
            Some((eos, every)) if drawn.is_multiple_of(u64::from(every.max(1))) => {
                token = eos % vocab
            }
            // Otherwise never by accident, so that lengths are what was asked for.
            Some((eos, _)) if token == eos => token = (token + 1) % vocab,
            _ => {}
        }
        while forbidden.contains(&token) && forbidden.len() < vocab as usize {
            token = (token + 1) % vocab;
        }
        token
    }

    /// A stable number in place of a probability.
    fn logprob(&self, drawn: u64, top: u32) -> TokenLogprob {
        let logprob = -((drawn % 512) as f32) / 128.0;
        let vocab = u64::from(self.spec.vocab.max(1));
        let alternative = |i: u32| {
            let token = (mix(drawn ^ u64::from(i)) % vocab) as u32;
            (token, logprob - i as f32)
        };
        TokenLogprob { logprob, top: (0..top).map(alternative).collect() }
    }
}

/// Of each sequence, whether all its states are finite.
fn finite_sequences(batch: &Batch, states: &[u64]) -> Vec<bool> {
    let mut rest = states;
    let lengths = batch.seqs.iter().map(|seq| seq.tokens.len());
    let finite = lengths.map(|length| {
        let (own, after) = rest.split_at(length.min(rest.len()));
        rest = after;
        !own.contains(&NOT_FINITE)
    });
    finite.collect()
}

fn read(entry: u64, position: usize) -> u64 {
    mix(entry ^ (position as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15))
}

/// The finaliser of SplitMix64 (Steele, Lea, Flood 2014).
fn mix(z: u64) -> u64 {
    let z = z.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

fn to_limbs(state: u64) -> [f32; LIMBS] {
    if state == NOT_FINITE {
        return [f32::NAN; LIMBS];
    }
    std::array::from_fn(|i| ((state >> (16 * i)) & 0xffff) as f32)
}

fn from_limbs(limbs: &[f32]) -> u64 {
    if limbs.iter().any(|limb| !limb.is_finite()) {
        return NOT_FINITE;
    }
    limbs.iter().enumerate().fold(0u64, |sum, (i, v)| {
        // A sum over ranks may exceed 16 bits; the carry goes into the next limb.
        sum.wrapping_add((*v as u64) << (16 * i))
    })
}

#[cfg(test)]
#[path = "hash_engine_tests.rs"]
mod tests;
