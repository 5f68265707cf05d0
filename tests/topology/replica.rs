//! A replica without actors: scheduler, KV block manager, and one engine a stage, run in turn.

use dunlin_actors::kv::{Kv, KvConfig};
use dunlin_actors::messages::{
    Attempt, LoadReport, Place, ReplicaEpoch, RequestId, SchedulerEvent, Work,
};
use dunlin_actors::scheduler::{Input, Output, Scheduler, SchedulerConfig};
use dunlin_actors::shard::Drawn;
use dunlin_backend::Backend;
use dunlin_cpu::{CpuBackend, CpuOptions, Precision};
use dunlin_model::engine::{Alone, Batch, Engine, Sampled, StageOutput, StageSpec};
use dunlin_model::loader::ModelFiles;
use dunlin_model::sampling::SamplingParams;
use dunlin_model::split::split_layers;
use dunlin_model::stage::StageWeights;
use dunlin_model::transformer::TransformerEngine;
use std::collections::{BTreeMap, VecDeque};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

const EPOCH: ReplicaEpoch = ReplicaEpoch(1);
const BLOCK_TOKENS: usize = 16;

/// What a client sees, log-probabilities by their bits.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Text {
    pub ids: Vec<u32>,
    pub logprobs: Vec<Vec<(u32, u32)>>,
}

#[derive(Debug, Clone)]
pub struct Setup {
    pub stages: usize,
    pub chunk: usize,
    pub blocks: usize,
}

impl Default for Setup {
    fn default() -> Self {
        Self { stages: 1, chunk: 512, blocks: 512 }
    }
}

/// The default model on one device, cut into one, two and three stages.
pub struct Models<B: Backend> {
    backend: Arc<B>,
    cuts: Vec<Vec<(StageSpec, Arc<StageWeights<B>>)>>,
    context: usize,
}

impl Models<CpuBackend> {
    pub fn on_cpu(precision: Precision) -> Self {
        let threads = std::thread::available_parallelism().map_or(1, |n| n.get());
        let options = CpuOptions { threads, precision, kv: None, path: None };
        Self::load(CpuBackend::new(options).expect("a CPU"))
    }
}

impl<B: Backend> Models<B> {
    pub fn load(backend: B) -> Self {
        Self::open(backend, &model())
    }

    pub fn open(backend: B, path: &Path) -> Self {
        let files = ModelFiles::open(path).expect("the model opens");
        let backend = Arc::new(backend);
        let cut = |stages: usize| {
            let mut begin = 0;
            let counts = split_layers(files.spec().layers, &vec![1.0; stages]);
            let part = |(index, count): (usize, usize)| {
                let layers = begin..begin + count;
                begin = layers.end;
                let stage = StageSpec {
                    layers,
                    first: index == 0,
                    last: index + 1 == stages,
                    rank: 0,
                    ranks: 1,
                    kv_blocks: 0,
                    block_tokens: BLOCK_TOKENS,
                    max_tokens: 512,
                };
                let weights = StageWeights::load(backend.as_ref(), &files, &stage);
                (stage, Arc::new(weights.expect("the stage loads")))
            };
            counts.into_iter().enumerate().map(part).collect()
        };
        let cuts = (1..=3).map(cut).collect();
        Self { context: files.spec().context, backend, cuts }
    }

    pub fn replica(&self, setup: &Setup) -> Replica<B> {
        let engines = self.cuts[setup.stages - 1].iter().map(|(stage, weights)| {
            let stage = StageSpec { kv_blocks: setup.blocks, ..stage.clone() };
            let engine = TransformerEngine::new(self.backend.clone(), weights.clone(), stage);
            engine.expect("the engine fits")
        });
        let config = SchedulerConfig { chunk_tokens: setup.chunk, ..SchedulerConfig::default() };
        let context = u32::try_from(self.context).expect("a sane context");
        let kv = KvConfig {
            blocks: u32::try_from(setup.blocks).expect("few blocks"),
            block_tokens: BLOCK_TOKENS as u32,
            namespace: [7; 16],
            key_bits: 128,
        };
        Replica {
            engines: engines.collect(),
            scheduler: Scheduler::new(EPOCH, config.limits(setup.stages, 512, context)),
            kv: Kv::new(kv).expect("a pool"),
            drawn: Drawn::default(),
            now: Duration::ZERO,
        }
    }
}

pub fn work(id: u64, prompt: Vec<u32>, output: u32, sampling: &SamplingParams) -> Work {
    Work {
        request: RequestId(id),
        attempt: Attempt(1),
        tenant: "t".into(),
        cache_salt: String::new(),
        prompt_len: u32::try_from(prompt.len()).expect("a short prompt"),
        tokens: prompt,
        sampling: sampling.clone(),
        max_tokens: output,
        min_tokens: 0,
        stop_tokens: vec![],
        prompt_logprobs: None,
        suspect: false,
    }
}

pub struct Replica<B: Backend> {
    engines: Vec<TransformerEngine<B>>,
    scheduler: Scheduler,
    kv: Kv,
    drawn: Drawn,
    now: Duration,
}

impl<B: Backend> Replica<B> {
    /// Runs all of `works`, submitted at once, to their ends.
    pub fn run(&mut self, works: Vec<Work>) -> BTreeMap<u64, Text> {
        let mut texts: BTreeMap<u64, Text> = BTreeMap::new();
        let mut steps = VecDeque::new();
        let mut open = works.len();
        for work in works {
            let input = Input::Submit { epoch: EPOCH, work: Box::new(work) };
            open -= self.feed(input, &mut steps, &mut texts);
        }
        while let Some((step, mut batch, places)) = steps.pop_front() {
            self.drawn.fill(&mut batch, &places).expect("drawn by then");
            let sampled = self.step(&batch);
            self.drawn.keep(step, &sampled);
            let done = Input::StepDone { epoch: EPOCH, step, sampled, micros: 1 };
            open -= self.feed(done, &mut steps, &mut texts);
        }
        assert_eq!(open, 0, "requests are open and no step is planned");
        self.scheduler.audit(&self.kv).expect("nothing is held");
        texts
    }

    pub fn load(&self) -> LoadReport {
        self.scheduler.load(&self.kv)
    }

    /// Returns how many requests ended.
    fn feed(
        &mut self,
        input: Input,
        steps: &mut VecDeque<(u64, Batch, Vec<Place>)>,
        texts: &mut BTreeMap<u64, Text>,
    ) -> usize {
        self.now += Duration::from_millis(1);
        let mut ended = 0;
        for output in self.scheduler.handle(&mut self.kv, self.now, input) {
            match output {
                Output::Run { step, batch, drawn, .. } => steps.push_back((step, batch, drawn)),
                Output::Event(SchedulerEvent::Tokens {
                    request, position, ids, logprobs, ..
                }) => {
                    let text = texts.entry(request.0).or_default();
                    assert_eq!(position as usize, text.ids.len(), "positions are gapless");
                    text.ids.extend(ids);
                    text.logprobs.extend(logprobs.into_iter().map(|l| {
                        l.top.into_iter().map(|(id, p)| (id, p.to_bits())).collect::<Vec<_>>()
                    }));
                }
                Output::Event(SchedulerEvent::Finished { .. }) => ended += 1,
                Output::Event(SchedulerEvent::Failed { message, .. }) => panic!("{message}"),
                Output::Broken { reason, .. } | Output::Halted { reason } => panic!("{reason}"),
                Output::Event(_) | Output::Measured(_) => {}
            }
        }
        ended
    }

    fn step(&mut self, batch: &Batch) -> Vec<Sampled> {
        let mut input: Option<Vec<f32>> = None;
        for engine in &mut self.engines {
            match engine.step(batch, input.as_deref(), &mut Alone).expect("the batch suits") {
                StageOutput::Hidden(values) => input = Some(values),
                StageOutput::Sampled(sampled) => return sampled,
            }
        }
        unreachable!("the last stage samples")
    }
}

/// `tools/test` fetches it.
fn model() -> PathBuf {
    let cache = || Some(PathBuf::from(std::env::var_os("HOME")?).join(".cache/dunlin/models"));
    let folder = std::env::var_os("DUNLIN_TEST_MODELS").map(PathBuf::from).or_else(cache);
    let path = folder.unwrap_or_default().join("SmolLM2-135M-Instruct.Q4_1.gguf");
    assert!(path.is_file(), "{} is not there: run tools/test, which fetches it", path.display());
    path
}
