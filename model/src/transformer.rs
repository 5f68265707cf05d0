//! The transformer engine: one stage of a real model on one device.
//!
//! It checks the batch, runs the forward pass, and has tokens drawn from the logits: on the device,
//! or here where the logits themselves are wanted. It knows nothing
//! of queues, of who owns which block, or of how activations travel.

use crate::engine::{
    Batch, BatchSeq, Collective, Engine, EngineError, Flip, SampleFailure, Sampled, StageOutput,
    StageSpec,
};
use crate::forward::{self, Row, Rows, Workspace};
use crate::sampler;
use crate::sampling::TokenLogprob;
use crate::stage::{Changed, SharedStage, StageWeights};
use dunlin_backend::{Backend, BackendError, Draw, KvSpec, SeqRows, Want};
use std::sync::Arc;

/// One shard's state: shared weights, its own KV store and workspace.
pub struct TransformerEngine<B: Backend> {
    backend: Arc<B>,
    weights: SharedStage<B>,
    stage: StageSpec,
    kv: B::Kv,
    workspace: Workspace<B>,
    /// The requests whose logits are NaN in the coming step.
    poisoned: Vec<u64>,
}

impl<B: Backend> TransformerEngine<B> {
    /// Makes KV store and workspace; the weights are there already, and must be those of `stage`.
    pub fn new(
        backend: Arc<B>,
        weights: Arc<StageWeights<B>>,
        stage: StageSpec,
    ) -> Result<Self, BackendError> {
        if !weights.serve(&stage) {
            let detail = format!("weights of {:?} for {stage:?}", weights.stage);
            return Err(BackendError::Shape { op: "engine", detail });
        }
        let kv = backend.kv(&KvSpec {
            layers: stage.layers.len(),
            kv_heads: weights.split.kv_heads.len(),
            head_dim: weights.spec.head_dim,
            blocks: stage.kv_blocks,
            block_tokens: stage.block_tokens,
        })?;
        let workspace = Workspace::new(backend.as_ref(), &weights, stage.max_tokens)?;
        Ok(Self { backend, weights, stage, kv, workspace, poisoned: Vec::new() })
    }
}

impl<B: Backend> Engine for TransformerEngine<B> {
    fn stage(&self) -> &StageSpec {
        &self.stage
    }

    fn hidden(&self) -> usize {
        self.weights.spec.hidden
    }

    fn step(
        &mut self,
        batch: &Batch,
        input: Option<&[f32]>,
        group: &mut dyn Collective,
    ) -> Result<StageOutput, EngineError> {
        self.check(batch, input, group)?;
        let backend = self.backend.as_ref();
        let (weights, ws) = (self.weights.as_ref(), &mut self.workspace);
        if !batch.copies.is_empty() {
            backend.kv_copy(&mut self.kv, &batch.copies)?;
        }
        let (seqs, positions) = rows(batch);
        ws.begin(backend, positions.len())?;
        match input {
            Some(values) => backend.upload(values, &mut ws.x)?,
            None => {
                let ids: Vec<u32> =
                    batch.seqs.iter().flat_map(|s| s.tokens.iter().copied()).collect();
                forward::embed(backend, weights, &ids, ws)?;
            }
        }
        let rows = Rows { seqs: &seqs, positions: &positions };
        forward::layers(backend, weights, &rows, &mut self.kv, group, ws)?;
        if self.stage.last {
            let mut drawn = self.draw(batch, group)?;
            self.poisoned.clear();
            blame_input(batch, input, self.weights.spec.hidden, &mut drawn);
            return Ok(StageOutput::Sampled(drawn));
        }
        let mut hidden = Vec::new();
        backend.download(&ws.x, &mut hidden)?;
        Ok(StageOutput::Hidden(hidden))
    }

    fn beside(&mut self, work: Box<dyn FnOnce() + Send>) {
        self.backend.beside(work);
    }

    fn weights(&self) -> Option<(u64, u64)> {
        Some((self.weights.fingerprint()?, self.weights.bytes(self.backend.as_ref())))
    }

    fn verify(&self) -> Result<(), EngineError> {
        self.weights.verify(self.backend.as_ref()).map_err(|changed| {
            let Changed { tensor, was, is } = changed;
            EngineError::Weights { device: self.backend.info().id, tensor, was, is }
        })
    }

    fn flip_kv(
        &mut self,
        layer: usize,
        block: u32,
        slot: usize,
        bit: u32,
    ) -> Result<Flip, EngineError> {
        let (before, after) = self.backend.kv_flip(&mut self.kv, layer, block, slot, bit)?;
        let place = format!("KV entry at slot {slot} of block {block}, layer {layer}");
        Ok(Flip { place, before: before.into(), after: after.into() })
    }

    fn flip_weight(&mut self, index: u64, bit: u32) -> Result<Flip, EngineError> {
        let backend = self.backend.as_ref();
        let matrices = self.weights.matrices();
        let words = |w: &B::Weight| backend.weight_bytes(w) / 4;
        let total: u64 = matrices.iter().map(|w| words(w)).sum();
        let mut word = index % total.max(1);
        for (i, matrix) in matrices.into_iter().enumerate() {
            if word < words(matrix) {
                let (before, after) = backend.weight_flip(matrix, word, bit % 32)?;
                let place = format!("word {word} of weight '{}'", self.weights.name_of(i));
                return Ok(Flip { place, before: before.into(), after: after.into() });
            }
            word -= words(matrix);
        }
        Err(EngineError::Unsupported("flip a weight: it has none"))
    }

    fn poison(&mut self, request: u64) -> Result<(), EngineError> {
        if !self.stage.last || self.stage.rank > 0 {
            let why = "spoil logits: only the first rank of the last stage draws from any";
            return Err(EngineError::Unsupported(why));
        }
        self.poisoned.push(request);
        Ok(())
    }

    fn lose(&mut self) -> Result<(), EngineError> {
        Ok(self.backend.lose()?)
    }

    fn read_block(&self, block: u32) -> Result<Vec<u8>, EngineError> {
        Ok(self.backend.kv_read(&self.kv, block)?)
    }

    fn write_block(&mut self, block: u32, content: &[u8]) -> Result<(), EngineError> {
        Ok(self.backend.kv_put(&mut self.kv, block, content)?)
    }
}

/// Logits of activations that were not finite already are the fault of an earlier stage.
fn blame_input(batch: &Batch, input: Option<&[f32]>, hidden: usize, drawn: &mut [Sampled]) {
    let Some(mut rest) = input else { return };
    if drawn.iter().all(|one| one.token != Err(SampleFailure::NotFinite)) {
        return;
    }
    for seq in &batch.seqs {
        let (rows, after) = rest.split_at((seq.tokens.len() * hidden).min(rest.len()));
        rest = after;
        if rows.iter().all(|value| value.is_finite()) {
            continue;
        }
        for one in drawn.iter_mut().filter(|one| one.request == seq.request) {
            if one.token == Err(SampleFailure::NotFinite) {
                one.token = Err(SampleFailure::NotFiniteInput);
            }
        }
    }
}

impl<B: Backend> TransformerEngine<B> {
    /// Refuses what would make an op read or write outside its buffers.
    fn check(
        &self,
        batch: &Batch,
        input: Option<&[f32]>,
        group: &dyn Collective,
    ) -> Result<(), EngineError> {
        let bad = |what: String| Err(EngineError::BadBatch(what));
        let (spec, stage) = (&self.weights.spec, &self.stage);
        let tokens = batch.tokens();
        if tokens == 0 || tokens > stage.max_tokens {
            return bad(format!("{tokens} tokens, the stage takes 1 to {}", stage.max_tokens));
        }
        if group.size() != stage.ranks {
            return bad(format!("a group of {} for {} ranks", group.size(), stage.ranks));
        }
        match input {
            None if !stage.first => return bad("no activations for a later stage".into()),
            Some(_) if stage.first => return bad("activations for the first stage".into()),
            Some(values) if values.len() != tokens * spec.hidden => {
                return bad(format!("{} activations for {tokens} tokens", values.len()));
            }
            _ => {}
        }
        let blocks = stage.kv_blocks as u32;
        let outside = |b: &u32| *b >= blocks;
        if batch.copies.iter().any(|(from, to)| outside(from) || outside(to)) {
            return bad(format!("a block copy outside 0..{blocks}"));
        }
        for seq in &batch.seqs {
            let end = seq.position as usize + seq.tokens.len();
            let covered = seq.blocks.len() * stage.block_tokens;
            if seq.tokens.is_empty() || end > covered || end > spec.context {
                let (request, context) = (seq.request, spec.context);
                return bad(format!(
                    "request {request}: {} tokens at {}, blocks for {covered}, context {context}",
                    seq.tokens.len(),
                    seq.position
                ));
            }
            if let Some(block) = seq.blocks.iter().find(|b| outside(b)) {
                return bad(format!("request {}: block {block} of {blocks}", seq.request));
            }
            if let Some(token) = seq.tokens.iter().find(|t| **t as usize >= spec.vocab) {
                return bad(format!("request {}: token {token} of {}", seq.request, spec.vocab));
            }
        }
        Ok(())
    }

    /// Logits for the rows that need them, and what is drawn from them. Every rank takes part in
    /// computing logits; rank 0 draws.
    fn draw(
        &mut self,
        batch: &Batch,
        group: &mut dyn Collective,
    ) -> Result<Vec<Sampled>, EngineError> {
        let mut wanted = Vec::new();
        let mut begin = 0;
        for (index, seq) in batch.seqs.iter().enumerate() {
            let end = begin + seq.tokens.len();
            if seq.prompt_logprobs.is_some() {
                wanted.extend((begin..end).map(|row| Wanted {
                    seq: index,
                    row,
                    offset: row - begin,
                    last: row + 1 == end,
                }));
            } else if seq.sample.is_some() {
                let offset = seq.tokens.len() - 1;
                wanted.push(Wanted { seq: index, row: end - 1, offset, last: true });
            }
            begin = end;
        }
        let rows: Vec<u32> = wanted.iter().map(|w| w.row as u32).collect();
        let mut draws: Vec<Option<Sampled>> = batch.seqs.iter().map(nothing_yet).collect();
        let draws_here = self.stage.rank == 0;
        let poisoned = |seq: &BatchSeq| self.poisoned.contains(&seq.request);
        let on_device = forward::draws_on_device(&self.weights);
        let want = |seq: &BatchSeq| match on_device && !poisoned(seq) {
            true => drawing(seq).map_or(Want::Logits, Want::Token),
            false => Want::Logits,
        };
        let wants: Vec<Want> = wanted.iter().map(|w| want(&batch.seqs[w.seq])).collect();
        let (backend, weights) = (self.backend.as_ref(), &self.weights);
        let ask = (&rows[..], &wants[..]);
        forward::logits(backend, weights, ask, group, &mut self.workspace, |i, row| {
            let want = &wanted[i];
            let seq = &batch.seqs[want.seq];
            let (true, Some(sampled)) = (draws_here, &mut draws[want.seq]) else { return };
            match row {
                Row::Token(token) => sampled.token = token.ok_or(SampleFailure::NotFinite),
                Row::Logits(logits) => {
                    if poisoned(seq) {
                        logits.fill(f32::NAN);
                    }
                    look(seq, want.offset, want.last, logits, sampled);
                }
            }
        })?;
        Ok(if draws_here { draws.into_iter().flatten().collect() } else { Vec::new() })
    }
}

/// What a device needs to draw this sequence's token, if that is all that is wanted of it.
fn drawing(seq: &BatchSeq) -> Option<Draw> {
    if seq.prompt_logprobs.is_some() {
        return None;
    }
    let ask = seq.sample.as_ref()?;
    sampler::drawing(&ask.params, next_position(seq), &ask.output, &ask.forbidden)
}

/// Where the token after this chunk goes.
fn next_position(seq: &BatchSeq) -> u32 {
    seq.position + seq.tokens.len() as u32
}

struct Wanted {
    seq: usize,
    row: usize,
    /// Of the row in its sequence's chunk.
    offset: usize,
    last: bool,
}

fn nothing_yet(seq: &BatchSeq) -> Option<Sampled> {
    (seq.sample.is_some() || seq.prompt_logprobs.is_some()).then(|| Sampled {
        request: seq.request,
        token: Err(SampleFailure::NotAsked),
        logprob: None,
        prompt_logprobs: Vec::new(),
    })
}

/// Reads what is wanted from the logits at `offset` of the chunk; may change them.
fn look(seq: &BatchSeq, offset: usize, last: bool, logits: &mut [f32], into: &mut Sampled) {
    if into.token == Err(SampleFailure::NotFinite) {
        return;
    }
    if let Some(ask) = &seq.prompt_logprobs {
        if logits.iter().any(|logit| !logit.is_finite()) {
            into.token = Err(SampleFailure::NotFinite);
            return;
        }
        let next = seq.tokens.get(offset + 1).copied().or(ask.next);
        if let Some(next) = next {
            let entry: TokenLogprob = sampler::logprob_of(logits, next, ask.top);
            into.prompt_logprobs.push(entry);
        }
    }
    if let (true, Some(ask)) = (last, &seq.sample) {
        let position = next_position(seq);
        let SampleDraw { token, logprob } = match sampler::sample(
            logits,
            &ask.params,
            position,
            &ask.prompt,
            &ask.output,
            &ask.forbidden,
        ) {
            Ok((token, logprob)) => SampleDraw { token: Ok(token), logprob },
            Err(failure) => SampleDraw { token: Err(failure), logprob: None },
        };
        into.token = token;
        into.logprob = logprob;
    }
}

struct SampleDraw {
    token: Result<u32, SampleFailure>,
    logprob: Option<TokenLogprob>,
}

fn rows(batch: &Batch) -> (Vec<SeqRows>, Vec<u32>) {
    let mut positions = Vec::with_capacity(batch.tokens());
    let seqs = batch
        .seqs
        .iter()
        .map(|seq| {
            let begin = positions.len();
            positions.extend((0..seq.tokens.len() as u32).map(|i| seq.position + i));
            SeqRows {
                rows: begin..positions.len(),
                position: seq.position as usize,
                blocks: seq.blocks.clone(),
            }
        })
        .collect();
    (seqs, positions)
}
