//! The hash engine behind the actors' seam, with faults for chosen requests, and its oracle.

use dunlin_actors::engines::{BuildError, Engines, ModelShape};
use dunlin_actors::messages::{DeviceDescription, NodeDescription, Request};
use dunlin_model::engine::{
    Alone, Batch, BatchSeq, Collective, Engine, EngineError, Flip, SampleFailure, SampleSpec,
    StageOutput, StageSpec,
};
use dunlin_model::hash_engine::{HashEngine, HashSpec};
use dunlin_model::split::split_layers;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

/// Which sequences a fault is about.
#[derive(Debug, Clone)]
pub enum Target {
    Request(u64),
    /// Its prompt begins so.
    Prompt(Vec<u32>),
}

/// What goes wrong in a step that holds a target.
#[derive(Debug, Clone)]
pub enum Fault {
    Panic(Target),
    NotFinite(Target),
    Fail(Target),
    /// Once, on rank 1 alone: it computes as if the sequence were not there.
    Lacks(Target),
    /// Once, on rank 1 alone: it takes part in none of the step's collectives.
    Skips(Target),
}

impl Target {
    fn hits(&self, seq: &BatchSeq) -> bool {
        match self {
            Target::Request(id) => seq.request == *id,
            Target::Prompt(start) => seq.position == 0 && seq.tokens.starts_with(start),
        }
    }
}

/// All nodes' engines; what is built and what goes wrong is shared.
#[derive(Clone)]
pub struct TestEngines {
    shape: Arc<Shape>,
    devices: usize,
    pub faults: Arc<Mutex<Vec<Fault>>>,
    pub built: Arc<AtomicUsize>,
}

struct Shape(HashSpec);

impl TestEngines {
    pub fn new(spec: HashSpec) -> Self {
        let (faults, built) = (Arc::default(), Arc::default());
        Self { shape: Arc::new(Shape(spec)), devices: 0, faults, built }
    }

    /// The same with `devices` devices, `cpu:0`, `cpu:1`, ...
    pub fn of_node(&self, devices: usize) -> Self {
        Self { devices, ..self.clone() }
    }

    pub fn builds(&self) -> usize {
        self.built.load(Ordering::SeqCst)
    }
}

impl Engines for TestEngines {
    fn describe(&self) -> NodeDescription {
        let device = |i: usize| DeviceDescription {
            id: format!("cpu:{i}"),
            description: "hash engine".into(),
            total_bytes: 1 << 40,
            free_bytes: 1 << 40,
        };
        NodeDescription {
            devices: (0..self.devices).map(device).collect(),
            model_hash: "hash".into(),
            version: "test".into(),
        }
    }

    fn shape(&self) -> &dyn ModelShape {
        self.shape.as_ref()
    }

    fn build(&self, _: &str, spec: &StageSpec) -> Result<Box<dyn Engine>, BuildError> {
        let inner = HashEngine::new(self.shape.0.clone(), spec.clone());
        let inner = inner.map_err(|error| error.to_string())?;
        self.built.fetch_add(1, Ordering::SeqCst);
        Ok(Box::new(FaultyEngine { inner, faults: self.faults.clone() }))
    }
}

impl ModelShape for Shape {
    fn name(&self) -> &str {
        "hash"
    }
    fn layers(&self) -> usize {
        self.0.layers
    }
    fn context(&self) -> usize {
        self.0.context
    }
    fn split_layers(&self, weights: &[f32]) -> Vec<usize> {
        split_layers(self.0.layers, weights)
    }
    fn check_ranks(&self, ranks: usize) -> Result<(), String> {
        match ranks <= self.0.heads {
            true => Ok(()),
            false => Err(format!("the hash engine splits over {} ranks", self.0.heads)),
        }
    }
    fn stage_bytes(&self, _: &StageSpec) -> u64 {
        0
    }
    fn kv_block_bytes(&self, spec: &StageSpec) -> u64 {
        HashEngine::kv_block_bytes(&self.0, spec)
    }
    fn cache_namespace(&self) -> [u8; 16] {
        [7; 16]
    }
}

struct FaultyEngine {
    inner: HashEngine,
    faults: Arc<Mutex<Vec<Fault>>>,
}

impl Engine for FaultyEngine {
    fn stage(&self) -> &StageSpec {
        self.inner.stage()
    }

    fn hidden(&self) -> usize {
        self.inner.hidden()
    }

    fn step(
        &mut self,
        batch: &Batch,
        input: Option<&[f32]>,
        group: &mut dyn Collective,
    ) -> Result<StageOutput, EngineError> {
        let faults = self.faults.lock().expect("no test panics while it holds this").clone();
        let held = |target: &Target| batch.seqs.iter().any(|seq| target.hits(seq));
        let mut poisoned = Vec::new();
        if self.inner.stage().rank == 1
            && let Some(outcome) = self.strays(batch, input, group)
        {
            return outcome;
        }
        for fault in faults {
            match fault {
                Fault::Panic(target) if held(&target) => panic!("injected by the test"),
                Fault::Fail(target) if held(&target) => {
                    return Err(EngineError::BadBatch("injected by the test".into()));
                }
                Fault::NotFinite(target) => {
                    let hit = batch.seqs.iter().filter(|seq| target.hits(seq));
                    poisoned.extend(hit.map(|seq| seq.request));
                }
                _ => {}
            }
        }
        let mut output = self.inner.step(batch, input, group)?;
        if let StageOutput::Sampled(drawn) = &mut output {
            for one in drawn.iter_mut().filter(|one| poisoned.contains(&one.request)) {
                one.token = Err(SampleFailure::NotFinite);
            }
        }
        Ok(output)
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

    fn read_block(&self, block: u32) -> Result<Vec<u8>, EngineError> {
        self.inner.read_block(block)
    }

    fn write_block(&mut self, block: u32, content: &[u8]) -> Result<(), EngineError> {
        self.inner.write_block(block, content)
    }
}

impl FaultyEngine {
    /// A step of [`Fault::Lacks`] or [`Fault::Skips`], which is over with that.
    fn strays(
        &mut self,
        batch: &Batch,
        input: Option<&[f32]>,
        group: &mut dyn Collective,
    ) -> Option<Result<StageOutput, EngineError>> {
        let held = |target: &Target| batch.seqs.iter().any(|seq| target.hits(seq));
        let hit = |fault: &Fault| match fault {
            Fault::Lacks(target) => held(target) && batch.seqs.len() > 1,
            Fault::Skips(target) => held(target),
            _ => false,
        };
        let fault = {
            let mut faults = self.faults.lock().expect("no test panics while it holds this");
            let at = faults.iter().position(hit)?;
            faults.remove(at)
        };
        Some(match fault {
            Fault::Lacks(target) => {
                let mut batch = batch.clone();
                batch.seqs.retain(|seq| !target.hits(seq));
                self.inner.step(&batch, input, group)
            }
            _ => Ok(StageOutput::Sampled(Vec::new())),
        })
    }
}

/// What the request's output must be: the engine alone, token by token.
pub fn oracle(spec: &HashSpec, request: &Request) -> Vec<u32> {
    let total = request.prompt.len() + request.max_tokens as usize;
    let (block_tokens, mut spec) = (16, spec.clone());
    (spec.step_cost, spec.token_cost) = Default::default();
    let blocks = total.div_ceil(block_tokens);
    let stage = StageSpec::whole(spec.layers, blocks, block_tokens, total);
    let mut engine = HashEngine::new(spec, stage).expect("a whole stage");
    let (mut tokens, mut position, mut output) = (request.prompt.clone(), 0, Vec::new());
    while output.len() < request.max_tokens as usize {
        let sample = SampleSpec {
            params: request.sampling.clone(),
            prompt: Vec::new(),
            output: Vec::new(),
            forbidden: Vec::new(),
        };
        let next = position + tokens.len() as u32;
        let seq = BatchSeq {
            request: 1,
            tokens: std::mem::take(&mut tokens),
            position,
            blocks: (0..blocks as u32).collect(),
            sample: Some(sample),
            prompt_logprobs: None,
        };
        let batch = Batch { seqs: vec![seq], copies: Vec::new() };
        let drawn = match engine.step(&batch, None, &mut Alone).expect("a good batch") {
            StageOutput::Sampled(mut drawn) => drawn.remove(0).token.expect("a token"),
            StageOutput::Hidden(_) => panic!("the last stage samples"),
        };
        output.push(drawn);
        (tokens, position) = (vec![drawn], next);
    }
    output
}
