//! A block is read only if it holds what the sequence's table says it does.
//!
//! Beside each slot of the KV store lies a tag: the running hash over the tokens of its sequence up
//! to and including the slot's, begun with epoch, tenant and salt (see [`Claim`]). The scheduler,
//! which knows the tokens, sends the hash that a sequence's blocks must have reached; before a step,
//! the block at the sequence's end must carry it, and each block must go on where the one before it
//! ended. A lost, stale, swapped or foreign block fails the step with a typed error, and the router
//! replays: nothing is computed from it.
//!
//! The check costs one comparison a block. It is put around an engine in debug builds and while a
//! fault plan is armed. It knows nothing of the numbers in a block: a flipped bit passes.
//!
//! [`Claim`]: crate::scheduler::Claim

use crate::scheduler::claim_step;
use dunlin_model::engine::{
    Batch, BatchSeq, Collective, Engine, EngineError, Flip, StageOutput, StageSpec,
};
use std::time::Duration;

pub struct CheckedEngine {
    inner: Box<dyn Engine>,
    size: usize,
    /// `[block][slot]`
    tags: Vec<u64>,
    /// `[block]`: the hash before the block's first slot.
    starts: Vec<u64>,
    /// Of the coming step.
    claims: Vec<u64>,
}

impl CheckedEngine {
    pub fn new(inner: Box<dyn Engine>) -> Self {
        let (blocks, size) = (inner.stage().kv_blocks, inner.stage().block_tokens);
        let (tags, starts) = (vec![0; blocks * size], vec![0; blocks]);
        Self { inner, size, tags, starts, claims: Vec::new() }
    }

    fn check(&self, seq: &BatchSeq, claims: u64) -> Result<(), EngineError> {
        let Some(last) = (seq.position as usize).checked_sub(1) else { return Ok(()) };
        let Some(read) = seq.blocks.get(..=last / self.size) else {
            return Err(EngineError::BadBatch(format!("request {}: too few blocks", seq.request)));
        };
        let mut claimed = (last, claims);
        for (index, &block) in read.iter().enumerate().rev() {
            let at = block as usize * self.size + claimed.0 % self.size;
            let holds = self.tags.get(at).copied().unwrap_or_default();
            if holds != claimed.1 {
                let (request, position) = (seq.request, claimed.0 as u32);
                let claims = claimed.1;
                return Err(EngineError::Content { request, block, position, holds, claims });
            }
            // What this block began with is what the one before must have reached.
            let start = self.starts.get(block as usize).copied().unwrap_or_default();
            claimed = ((index * self.size).saturating_sub(1), start);
        }
        Ok(())
    }

    fn note(&mut self, seq: &BatchSeq, claim: u64) {
        let mut hash = claim;
        for (position, token) in (seq.position as usize..).zip(&seq.tokens) {
            let Some(&block) = seq.blocks.get(position / self.size) else { return };
            let slot = position % self.size;
            if slot == 0
                && let Some(start) = self.starts.get_mut(block as usize)
            {
                *start = hash;
            }
            hash = claim_step(hash, *token);
            if let Some(tag) = self.tags.get_mut(block as usize * self.size + slot) {
                *tag = hash;
            }
        }
    }

    fn copy(&mut self, from: usize, to: usize) {
        let blocks = self.starts.len();
        if from < blocks && to < blocks {
            let source = from * self.size..(from + 1) * self.size;
            self.tags.copy_within(source, to * self.size);
            self.starts[to] = self.starts[from];
        }
    }
}

impl Engine for CheckedEngine {
    fn stage(&self) -> &StageSpec {
        self.inner.stage()
    }

    fn hidden(&self) -> usize {
        self.inner.hidden()
    }

    fn begin(&mut self, step: u64, batch: &Batch, claims: &[u64]) -> Duration {
        self.claims = claims.to_vec();
        self.inner.begin(step, batch, claims)
    }

    fn step(
        &mut self,
        batch: &Batch,
        input: Option<&[f32]>,
        group: &mut dyn Collective,
    ) -> Result<StageOutput, EngineError> {
        if self.claims.len() != batch.seqs.len() {
            return self.inner.step(batch, input, group);
        }
        let claims = self.claims.clone();
        batch.copies.iter().for_each(|(from, to)| self.copy(*from as usize, *to as usize));
        let claimed = || batch.seqs.iter().zip(&claims);
        claimed().try_for_each(|(seq, claim)| self.check(seq, *claim))?;
        let output = self.inner.step(batch, input, group)?;
        claimed().for_each(|(seq, claim)| self.note(seq, *claim));
        Ok(output)
    }

    fn beside(&mut self, work: Box<dyn FnOnce() + Send>) {
        self.inner.beside(work);
    }

    fn verify(&self) -> Result<(), EngineError> {
        self.inner.verify()
    }

    fn flip_kv(
        &mut self,
        layer: usize,
        block: u32,
        slot: usize,
        bit: u32,
    ) -> Result<Flip, EngineError> {
        self.inner.flip_kv(layer, block, slot, bit)
    }

    fn flip_weight(&mut self, index: u64, bit: u32) -> Result<Flip, EngineError> {
        self.inner.flip_weight(index, bit)
    }

    fn poison(&mut self, request: u64) -> Result<(), EngineError> {
        self.inner.poison(request)
    }

    fn lose(&mut self) -> Result<(), EngineError> {
        self.inner.lose()
    }

    /// The tags come first: they are part of the block, and share its fate.
    fn read_block(&self, block: u32) -> Result<Vec<u8>, EngineError> {
        let inner = self.inner.read_block(block)?;
        let at = block as usize;
        let Some(tags) = self.tags.get(at * self.size..(at + 1) * self.size) else {
            return Err(EngineError::BadBatch(format!("block {block}")));
        };
        let words = [self.starts[at]].into_iter().chain(tags.iter().copied());
        Ok(words.flat_map(u64::to_le_bytes).chain(inner).collect())
    }

    fn write_block(&mut self, block: u32, content: &[u8]) -> Result<(), EngineError> {
        let (at, own) = (block as usize, 8 * (self.size + 1));
        let (Some(head), Some(inner)) = (content.get(..own), content.get(own..)) else {
            return Err(EngineError::BadBatch(format!("{} bytes for a block", content.len())));
        };
        self.inner.write_block(block, inner)?;
        let mut words = head.chunks_exact(8).map(|bytes| {
            let mut word = [0; 8];
            word.copy_from_slice(bytes);
            u64::from_le_bytes(word)
        });
        self.starts[at] = words.next().unwrap_or_default();
        let tags = &mut self.tags[at * self.size..(at + 1) * self.size];
        tags.iter_mut().zip(words).for_each(|(tag, word)| *tag = word);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::messages::ReplicaEpoch;
    use crate::scheduler::Claim;
    use dunlin_model::engine::Alone;
    use dunlin_model::hash_engine::{HashEngine, HashSpec};

    const SIZE: usize = 4;

    fn engine() -> CheckedEngine {
        let stage = StageSpec::whole(2, 8, SIZE, 64);
        let spec = HashSpec { layers: 2, ..HashSpec::default() };
        CheckedEngine::new(Box::new(HashEngine::new(spec, stage).expect("a stage")))
    }

    struct Run {
        engine: CheckedEngine,
        claim: Claim,
        tokens: Vec<u32>,
    }

    impl Run {
        fn of(tenant: &str) -> Self {
            let claim = Claim::new(ReplicaEpoch(3), tenant, "");
            Self { engine: engine(), claim, tokens: (1..40).collect() }
        }

        fn step(
            &mut self,
            from: usize,
            upto: usize,
            blocks: &[u32],
            copies: &[(u32, u32)],
        ) -> Result<StageOutput, EngineError> {
            let claim = self.claim.at(&self.tokens, from as u32);
            let seq = BatchSeq {
                request: 7,
                tokens: self.tokens[from..upto].to_vec(),
                position: from as u32,
                blocks: blocks.to_vec(),
                sample: None,
                prompt_logprobs: None,
            };
            let batch = Batch { seqs: vec![seq], copies: copies.to_vec() };
            self.engine.begin(1, &batch, &[claim]);
            self.engine.step(&batch, None, &mut Alone)
        }

        fn refused(&mut self, from: usize, blocks: &[u32]) -> (u32, u32) {
            match self.step(from, from + 1, blocks, &[]) {
                Err(EngineError::Content { block, position, .. }) => (block, position),
                other => panic!("expected a refusal, got {other:?}"),
            }
        }
    }

    #[test]
    fn chunks_single_tokens_and_copies_pass() {
        let mut run = Run::of("a");
        run.step(0, 6, &[5, 2], &[]).expect("a chunk");
        run.step(6, 7, &[5, 2], &[]).expect("a token");
        run.step(7, 12, &[5, 2, 0], &[]).expect("over a block's edge");
        // Computing the prefix's last token again in a copy of its block.
        run.step(11, 14, &[5, 2, 3, 4], &[(0, 3)]).expect("copy on write");
        run.step(14, 15, &[5, 2, 3, 4], &[]).expect("after it");
    }

    #[test]
    fn swapped_foreign_and_unwritten_blocks_are_refused() {
        let mut run = Run::of("a");
        run.step(0, 11, &[5, 2, 0], &[]).expect("a chunk");
        assert_eq!(run.refused(11, &[2, 5, 0]), (5, 7));
        assert_eq!(run.refused(11, &[5, 0, 2]), (2, 10));
        assert_eq!(run.refused(11, &[7, 2, 0]), (7, 3));
        run.step(11, 12, &[5, 2, 0], &[]).expect("the right table");
        // The same tokens under another tenant are another content.
        run.claim = Claim::new(ReplicaEpoch(3), "b", "");
        assert_eq!(run.refused(8, &[5, 2, 0]), (2, 7));
        run.claim = Claim::new(ReplicaEpoch(4), "a", "");
        assert_eq!(run.refused(8, &[5, 2, 0]), (2, 7));
    }

    #[test]
    fn a_write_that_was_lost_is_found_at_the_next_step() {
        let mut run = Run::of("a");
        run.step(0, 6, &[5, 2], &[]).expect("a chunk");
        let before = run.engine.read_block(2).expect("a block");
        run.step(6, 7, &[5, 2], &[]).expect("a token");
        run.engine.write_block(2, &before).expect("written");
        assert_eq!(run.refused(7, &[5, 2]), (2, 6));
        run.step(6, 7, &[5, 2], &[]).expect("computed again");
        run.step(7, 8, &[5, 2], &[]).expect("and on");
    }
}
