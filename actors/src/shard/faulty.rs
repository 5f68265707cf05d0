//! What an armed fault plan does to a device: when it loads, and step by step.
//!
//! [`FaultyEngine`] asks at each step what is to go wrong, does it, and tells `fault.done` with what
//! it read back. What happens once (a flipped bit) happens in [`Engine::begin`]; what shapes the
//! step stays until the next one begins, since simulations run a step more than once.

use super::checked::CheckedEngine;
use crate::engines::{BuildError, Compute, Engines};
use crate::facts::{KV_MISMATCH, MEMORY_RESERVED, WEIGHTS_LOADED, WEIGHTS_REFUSED};
use crate::messages::{ReplicaPlan, ShardPlace};
use dunlin_backend::BackendError;
use dunlin_model::engine::{
    Batch, BatchSeq, Collective, Engine, EngineError, Flip, StageOutput, StageSpec,
};
use dunlin_runtime::faults::names::FAULT_DONE;
use dunlin_runtime::{Action, Fact, Faults, Node, NodeName, Site};
use std::sync::Arc;
use std::time::Duration;

/// Builds the engine of shard `index` of `plan`, with whatever a fault plan says about it. The
/// error names node and device.
pub async fn build(
    node: &Node,
    engines: &Arc<dyn Engines>,
    plan: &ReplicaPlan,
    index: usize,
    compute: Compute,
) -> Result<Box<dyn Engine>, String> {
    let place = plan.shards[index].clone();
    let who = format!("node {}: device {}", node.name(), place.device);
    let told = Told::of(node);
    let (device, stage, rank) = (place.device.as_str(), place.stage, place.spec.rank);
    let action = told.faults.decide(Site::Load { node: node.name(), device, stage, rank });
    match &action {
        Some(Action::Fail { text, .. }) => {
            told.done(&format!("{who} fails to load stage {stage}: {text}"), (0, 0));
            return Err(lost(&who, text).to_string());
        }
        Some(Action::OutOfMemory { bytes }) => {
            told.done(&format!("{who} has no memory for stage {stage}"), (*bytes, 0));
            return Err(no_memory(&who, format!("loading stage {stage}"), *bytes).to_string());
        }
        Some(Action::Delay(pause) | Action::Hang(pause)) => {
            told.done(&format!("{who} takes longer to load stage {stage}"), (micros(*pause), 0));
            tokio::time::sleep(*pause).await;
        }
        _ => {}
    }
    told.reserving(engines, plan, index);
    let (make, spec) = (engines.clone(), place.spec.clone());
    let built = compute.blocking(move || make.build(&place.device, &spec)).await;
    let built = built.map_err(|panic| format!("{who}: building the engine: {panic}"))?;
    if let Err(BuildError::Weights(text)) = &built {
        told.fact(WEIGHTS_REFUSED, || format!("{who}: {text}"), (0, 0));
    }
    let mut engine = built.map_err(|error| error.to_string())?;
    if let Some(Action::FlipWeight { index, bit }) = action {
        match engine.flip_weight(index, bit) {
            Ok(flip) => told.flipped(&format!("{who}: loading stage {stage}: "), &flip),
            Err(error) => tracing::warn!(who, %error, "a fault has no effect"),
        }
        if let Err(error) = engine.verify() {
            told.fact(WEIGHTS_REFUSED, || format!("{who}: {error}"), (0, 0));
            return Err(format!("{who}: {error}"));
        }
    }
    told.loaded(engine.as_ref(), &plan.shards[index]);
    Ok(engine)
}

/// Puts the content check (in debug builds and under a fault plan) and the fault plan around an
/// engine.
pub fn wrap(
    node: &Node,
    plan: &ReplicaPlan,
    index: usize,
    engine: Box<dyn Engine>,
) -> Box<dyn Engine> {
    let told = Told::of(node);
    if !told.faults.is_armed() {
        return match cfg!(debug_assertions) {
            true => Box::new(CheckedEngine::new(engine)),
            false => engine,
        };
    }
    let inner = CheckedEngine::new(engine);
    let (place, epoch) = (&plan.shards[index], plan.epoch.0);
    let (stage, replica) = (place.stage, plan.replica.clone());
    let who = format!("{replica}/{stage}/{} on {}/{}", place.spec.rank, place.node, place.device);
    Box::new(FaultyEngine { inner, told, who, replica, stage, epoch, now: Now::default() })
}

struct FaultyEngine {
    inner: CheckedEngine,
    told: Told,
    /// For people.
    who: String,
    replica: String,
    stage: usize,
    epoch: u64,
    now: Now,
}

/// What shapes the step at hand.
#[derive(Default)]
struct Now {
    action: Option<Action>,
    /// The batch with a changed block table.
    batch: Option<Batch>,
    /// A block and what it held before the step.
    keep: Option<(u32, Vec<u8>)>,
    proven: bool,
}

impl Engine for FaultyEngine {
    fn stage(&self) -> &StageSpec {
        self.inner.stage()
    }

    fn hidden(&self) -> usize {
        self.inner.hidden()
    }

    fn begin(&mut self, step: u64, batch: &Batch, claims: &[u64]) -> Duration {
        self.now = Now::default();
        self.inner.begin(step, batch, claims);
        let requests: Vec<u64> = batch.seqs.iter().map(|seq| seq.request).collect();
        let action = self.told.faults.decide(Site::Step {
            node: &self.told.node,
            replica: &self.replica,
            stage: self.stage,
            rank: self.inner.stage().rank,
            epoch: self.epoch,
            step,
            requests: &requests,
        });
        let Some(action) = action else { return Duration::ZERO };
        if let Action::Hang(pause) | Action::Delay(pause) = action {
            self.told
                .done(&format!("{} takes longer at step {step}", self.who), (micros(pause), 0));
            return pause;
        }
        if let Err(error) = self.prepare(step, batch, &action) {
            tracing::warn!(shard = self.who, step, ?action, %error, "a fault has no effect");
            return Duration::ZERO;
        }
        self.now.action = Some(action);
        Duration::ZERO
    }

    fn step(
        &mut self,
        batch: &Batch,
        input: Option<&[f32]>,
        group: &mut dyn Collective,
    ) -> Result<StageOutput, EngineError> {
        let result = match self.now.action.take() {
            None => self.inner.step(batch, input, group),
            Some(action) => {
                let result = self.act(&action, batch, input, group);
                // Kept, since the step may be run again.
                self.now.action = Some(action);
                result
            }
        };
        if let Err(error @ EngineError::Content { request, .. }) = &result {
            let (node, subject) = (self.told.node.clone(), format!("{}: {error}", self.who));
            let fact = Fact { node, name: KV_MISMATCH, subject, key: *request, value: 0 };
            self.told.faults.tell(|| fact);
        }
        result
    }

    fn beside(&mut self, work: Box<dyn FnOnce() + Send>) {
        self.inner.beside(work);
    }

    fn verify(&self) -> Result<(), EngineError> {
        self.inner.verify()
    }
}

impl FaultyEngine {
    /// What is done once, before the step.
    fn prepare(&mut self, step: u64, batch: &Batch, action: &Action) -> Result<(), EngineError> {
        match action {
            Action::FlipKv { request, layer, position, bit } => {
                let seq = find(batch, *request)?;
                let written = u64::from(seq.position);
                if written == 0 {
                    return Err(EngineError::Unsupported("flip what is not yet written"));
                }
                let position = (position % written) as usize;
                let size = self.inner.stage().block_tokens;
                let layer = local(self.inner.stage(), *layer);
                let block = seq.blocks.get(position / size).copied().unwrap_or_default();
                let flip = self.inner.flip_kv(layer, block, position % size, *bit)?;
                self.told.flipped("", &flip);
            }
            Action::FlipWeight { index, bit } => {
                let flip = self.inner.flip_weight(*index, *bit)?;
                self.told.flipped("", &flip);
            }
            Action::NotFinite { request } => {
                find(batch, *request)?;
                let stage = self.inner.stage();
                if stage.last && stage.rank == 0 {
                    self.inner.poison(*request)?;
                } else if stage.last && stage.first {
                    return Err(EngineError::Unsupported("spoil logits of another rank"));
                }
            }
            Action::SwapBlocks { request, a, b } => {
                let mut changed = batch.clone();
                let seq = changed.seqs.iter_mut().find(|seq| seq.request == *request);
                let Some(seq) = seq.filter(|seq| seq.blocks.len() > 1) else {
                    return Err(EngineError::Unsupported("swap: the table has one block"));
                };
                let count = seq.blocks.len() as u64;
                let a = (a % count) as usize;
                let b = (b % count) as usize;
                let b = if a == b { (b + 1) % seq.blocks.len() } else { b };
                let before = (seq.blocks[a], seq.blocks[b]);
                seq.blocks.swap(a, b);
                let after = (seq.blocks[a], seq.blocks[b]);
                let proof = format!(
                    "{}: step {step}: request {request}: entries {a} and {b} of the block table \
                     are {after:?}, planned were {before:?}",
                    self.who
                );
                self.told.done(&proof, (before.0.into(), before.1.into()));
                self.now.batch = Some(changed);
            }
            Action::StaleBlock { request } => {
                let seq = find(batch, *request)?;
                let end = seq.position as usize + seq.tokens.len();
                let newest = end.saturating_sub(1) / self.inner.stage().block_tokens;
                let Some(&block) = seq.blocks.get(newest) else {
                    return Err(EngineError::Unsupported("lose a write: the table is too short"));
                };
                self.now.keep = Some((block, self.inner.read_block(block)?));
            }
            Action::Panic(_) | Action::Fail { .. } | Action::OutOfMemory { .. } => {}
            _ => return Err(EngineError::Unsupported("do this to a step")),
        }
        Ok(())
    }

    fn act(
        &mut self,
        action: &Action,
        batch: &Batch,
        input: Option<&[f32]>,
        group: &mut dyn Collective,
    ) -> Result<StageOutput, EngineError> {
        match action {
            Action::Panic(text) => {
                self.prove(&format!("{} panics", self.who), (0, 0));
                panic!("{text}");
            }
            Action::Fail { text, .. } => {
                // A device that can really be lost is, and says so itself.
                if self.inner.lose().is_ok()
                    && let Err(error) = self.inner.step(batch, input, group)
                {
                    self.prove(&format!("{} fails: {error}", self.who), (0, 0));
                    return Err(error);
                }
                self.prove(&format!("{} fails: {text}", self.who), (0, 0));
                Err(EngineError::Backend(lost(&self.who, text)))
            }
            Action::OutOfMemory { bytes } => {
                self.prove(&format!("{} has no memory left", self.who), (*bytes, 0));
                let error = no_memory(&self.who, "the step's workspace".into(), *bytes);
                Err(EngineError::Backend(error))
            }
            Action::SwapBlocks { .. } => {
                let changed = self.now.batch.clone();
                self.inner.step(changed.as_ref().unwrap_or(batch), input, group)
            }
            Action::StaleBlock { .. } => {
                let output = self.inner.step(batch, input, group)?;
                self.lose_write()?;
                Ok(output)
            }
            Action::NotFinite { request } => self.not_finite(*request, batch, input, group),
            _ => self.inner.step(batch, input, group),
        }
    }

    /// Puts the block's old content back, and reads it to prove it.
    fn lose_write(&mut self) -> Result<(), EngineError> {
        let Some((block, old)) = self.now.keep.take() else { return Ok(()) };
        let new = self.inner.read_block(block)?;
        self.inner.write_block(block, &old)?;
        let same = self.inner.read_block(block)? == old;
        if same && new != old {
            let (was, is) = (short(&new), short(&old));
            let proof =
                format!("{}: block {block} holds {is:016x}, written was {was:016x}", self.who);
            self.prove(&proof, (was, is));
        }
        Ok(())
    }

    /// The last stage's first rank has been told to spoil the logits. Others spoil what they hand
    /// on, or what they were given.
    fn not_finite(
        &mut self,
        request: u64,
        batch: &Batch,
        input: Option<&[f32]>,
        group: &mut dyn Collective,
    ) -> Result<StageOutput, EngineError> {
        let hidden = self.inner.hidden();
        let rows = rows_of(batch, request);
        let rows = rows.start * hidden..rows.end * hidden;
        let (last, rank) = (self.inner.stage().last, self.inner.stage().rank);
        let spoil = |values: &mut [f32]| {
            let own = values.get_mut(rows.clone()).unwrap_or_default();
            own.fill(f32::NAN);
            own.iter().filter(|value| value.is_nan()).count() as u64
        };
        if last && rank > 0 {
            let mut given = input.unwrap_or_default().to_vec();
            let spoiled = spoil(&mut given);
            self.prove(&format!("{}: {spoiled} activations are NaN", self.who), (spoiled, 0));
            return self.inner.step(batch, Some(&given), group);
        }
        let mut output = self.inner.step(batch, input, group)?;
        match &mut output {
            StageOutput::Hidden(values) => {
                let spoiled = spoil(values);
                self.prove(&format!("{}: {spoiled} activations are NaN", self.who), (spoiled, 0));
            }
            StageOutput::Sampled(drawn) => {
                let refused =
                    |d: &&dunlin_model::engine::Sampled| d.request == request && d.token.is_err();
                if let Some(refused) = drawn.iter().find(refused) {
                    let proof =
                        format!("{}: request {request}: drawn {:?}", self.who, refused.token);
                    self.prove(&proof, (request, 0));
                }
            }
        }
        Ok(output)
    }

    /// Tells the proof once, however often the step is run.
    fn prove(&mut self, proof: &str, numbers: (u64, u64)) {
        if !std::mem::replace(&mut self.now.proven, true) {
            self.told.done(proof, numbers);
        }
    }
}

/// Whom to ask and tell.
struct Told {
    faults: Faults,
    node: NodeName,
}

impl Told {
    fn of(node: &Node) -> Self {
        Self { faults: node.faults().clone(), node: node.name().clone() }
    }

    fn fact(&self, name: &'static str, subject: impl FnOnce() -> String, (key, value): (u64, u64)) {
        let node = || self.node.clone();
        self.faults.tell(|| Fact { node: node(), name, subject: subject(), key, value });
    }

    fn done(&self, proof: &str, numbers: (u64, u64)) {
        self.fact(FAULT_DONE, || proof.to_string(), numbers);
    }

    /// Told only where what was read back differs.
    fn flipped(&self, at: &str, flip: &Flip) {
        let Flip { place, before, after } = flip;
        if before != after {
            let proof = format!("{at}{place}: {before:x} before, {after:x} after");
            self.done(&proof, (*before, *after));
        }
    }

    /// What the shard takes of its device, and what the device has.
    fn reserving(&self, engines: &Arc<dyn Engines>, plan: &ReplicaPlan, index: usize) {
        if !self.faults.is_armed() {
            return;
        }
        let place = &plan.shards[index];
        let (shape, spec) = (engines.shape(), &place.spec);
        let kv = shape.kv_block_bytes(spec).saturating_mul(spec.kv_blocks as u64);
        let bytes = shape.stage_bytes(spec).saturating_add(kv);
        let devices = engines.describe().devices;
        let own = devices.iter().find(|device| device.id == place.device);
        let free = own.map_or(0, |device| device.free_bytes);
        let subject = || format!("{}/{}/{}", plan.replica, place.stage, spec.rank);
        self.fact(MEMORY_RESERVED, subject, (bytes, free));
    }

    fn loaded(&self, engine: &dyn Engine, place: &ShardPlace) {
        let Some(numbers) = engine.weights().filter(|_| self.faults.is_armed()) else { return };
        let subject = || {
            let StageSpec { layers, rank, ranks, .. } = &place.spec;
            format!("layers {layers:?} of rank {rank}/{ranks} on {}/{}", place.node, place.device)
        };
        self.fact(WEIGHTS_LOADED, subject, numbers);
    }
}

fn find(batch: &Batch, request: u64) -> Result<&BatchSeq, EngineError> {
    let found = batch.seqs.iter().find(|seq| seq.request == request);
    found.ok_or(EngineError::Unsupported("hit a request that is not in the step"))
}

fn rows_of(batch: &Batch, request: u64) -> std::ops::Range<usize> {
    let before = batch.seqs.iter().take_while(|seq| seq.request != request);
    let begin = before.map(|seq| seq.tokens.len()).sum();
    let own = batch.seqs.iter().find(|seq| seq.request == request);
    begin..begin + own.map_or(0, |seq| seq.tokens.len())
}

/// A layer as plans count, over the whole model, or any number: that of this stage which it means.
fn local(stage: &StageSpec, layer: u64) -> usize {
    let (count, first) = (stage.layers.len().max(1) as u64, stage.layers.start as u64);
    match stage.layers.contains(&(layer as usize)) {
        true => (layer - first) as usize,
        false => (layer % count) as usize,
    }
}

fn lost(device: &str, text: &str) -> BackendError {
    BackendError::DeviceLost { device: device.into(), reason: text.into() }
}

fn no_memory(device: &str, what: String, need: u64) -> BackendError {
    BackendError::OutOfMemory { device: device.into(), what, need, free: 0 }
}

fn micros(pause: Duration) -> u64 {
    u64::try_from(pause.as_micros()).unwrap_or(u64::MAX)
}

fn short(content: &[u8]) -> u64 {
    let mut first = [0; 8];
    first.copy_from_slice(&blake3::hash(content).as_bytes()[..8]);
    u64::from_le_bytes(first)
}
