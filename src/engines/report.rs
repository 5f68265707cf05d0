//! All devices of all backends on this machine, with what they reach; and one device beside what a
//! copy and a plain product reach on it.

use std::sync::Arc;

use dunlin_backend::{Backend, DeviceInfo, KvDtype, Precision};
use dunlin_cpu::{CpuBackend, CpuOptions};
use dunlin_model::engine::{Alone, Batch, BatchSeq, Engine, SampleSpec, StageSpec};
use dunlin_model::loader::ModelFiles;
use dunlin_model::sampling::SamplingParams;
use dunlin_model::spec::ModelSpec;
use dunlin_model::stage::StageWeights;
use dunlin_model::transformer::TransformerEngine;
use dunlin_suite::roofline::{Ceilings, Cost, Meter, Model, STEPS, Shape, Step};
use dunlin_wgpu::{WgpuBackend, WgpuOptions};

use super::{is_cpu, is_known, machine_memory};
use crate::models;

/// A device of this machine, for people.
#[derive(Debug, Clone, serde::Serialize)]
pub struct DeviceReport {
    /// As cluster.toml names it.
    pub id: String,
    pub description: String,
    pub memory_bytes: u64,
    pub features: Vec<String>,
    pub rates: Option<DeviceRates>,
    /// Why it could not be opened or measured.
    pub trouble: Option<String>,
}

/// What a device reached just now.
#[derive(Debug, Clone, serde::Serialize)]
pub struct DeviceRates {
    pub bytes_per_s: f64,
    /// What moved those bytes.
    pub bandwidth_of: &'static str,
    pub matmul_flops_per_s: f64,
    pub matmul_of: &'static str,
}

/// All devices of all backends, measured one after another if asked.
pub fn devices(measure: bool) -> Vec<DeviceReport> {
    let mut all = vec![cpu_report(measure)];
    all.extend(dunlin_wgpu::adapters().into_iter().map(|adapter| {
        let rates = measure.then(|| adapter_rates(&adapter.id)).transpose();
        let (rates, trouble) = match rates {
            Ok(rates) => (rates, None),
            Err(trouble) => (None, Some(trouble)),
        };
        DeviceReport {
            description: format!("{} ({}; {})", adapter.name, adapter.kind, adapter.driver),
            memory_bytes: adapter.memory_bytes,
            features: adapter.features.iter().map(ToString::to_string).collect(),
            id: adapter.id,
            rates,
            trouble,
        }
    }));
    all
}

fn adapter_rates(id: &str) -> Result<DeviceRates, String> {
    rates(&open_adapter(id)?)
}

fn open_adapter(id: &str) -> Result<WgpuBackend, String> {
    let (precision, cache) = (Precision::Fast, models::adapter_folder());
    let options = WgpuOptions { precision, cache, ..WgpuOptions::default() };
    WgpuBackend::open_with(id, &options).map_err(|e| e.to_string())
}

fn rates<B: Backend>(backend: &B) -> Result<DeviceRates, String> {
    let ceilings = Ceilings::measure(backend, METER).map_err(|e| e.to_string())?;
    let (copy, read) = (ceilings.copy.per_second(), ceilings.read.per_second());
    Ok(DeviceRates {
        bytes_per_s: copy.max(read),
        bandwidth_of: if copy >= read { "copy" } else { "read" },
        matmul_flops_per_s: ceilings.product.per_second(),
        matmul_of: "float32, 512 x 512 x 512",
    })
}

const METER: Meter = Meter { runs: 3, busy: None };

fn cpu_report(measure: bool) -> DeviceReport {
    let report = |info: Option<DeviceInfo>, rates, trouble| {
        let (machine, _) = machine_memory();
        DeviceReport {
            id: "cpu".into(),
            description: info.map_or_else(|| "processor".into(), |info| info.description),
            memory_bytes: machine,
            features: Vec::new(),
            rates,
            trouble,
        }
    };
    let backend = match CpuBackend::new(CpuOptions::default()) {
        Ok(backend) => backend,
        Err(e) => return report(None, None, Some(e.to_string())),
    };
    let info = Some(backend.info());
    if !measure {
        return report(info, None, None);
    }
    match rates(&backend) {
        Ok(rates) => report(info, Some(rates), None),
        Err(e) => report(info, None, Some(e)),
    }
}

/// One device: its ceilings, and the steps of a model beside them.
#[derive(Debug, Clone, serde::Serialize)]
pub struct Roofline {
    pub device: String,
    pub description: String,
    /// What was stepped.
    pub model: String,
    pub weight_bytes: u64,
    pub copy_bytes_per_s: f64,
    /// Streaming a float32 matrix once.
    pub read_bytes_per_s: f64,
    /// Of two float32 matrices, 512 x 512 x 512.
    pub matmul_flops_per_s: f64,
    pub round_trip_ms: f64,
    pub steps: Vec<StepReport>,
}

#[derive(Debug, Clone, serde::Serialize)]
pub struct StepReport {
    pub rows: usize,
    pub past: usize,
    pub ms: f64,
    /// Of weights and KV.
    pub bytes: f64,
    pub operations: f64,
    /// Of the copy or the read, whichever was faster.
    pub share_of_bandwidth: f64,
    pub share_of_matmul: f64,
    /// Milliseconds of each kind of op, all layers of it alone; empty for a real model.
    pub parts: Vec<(String, f64)>,
}

/// Measures one device with `model`, or with a random one in the shape of the default model.
pub fn roofline(id: &str, model: Option<&ModelFiles>) -> Result<Roofline, String> {
    if !is_known(id) {
        return Err(format!("device {id}: this build has no backend for it; use cpu or wgpu:N"));
    }
    if is_cpu(id) {
        let backend = CpuBackend::new(CpuOptions::default()).map_err(|e| e.to_string())?;
        return roofline_of(id, backend, model);
    }
    roofline_of(id, open_adapter(id)?, model)
}

fn roofline_of<B: Backend>(
    id: &str,
    backend: B,
    model: Option<&ModelFiles>,
) -> Result<Roofline, String> {
    let text = |e: dunlin_backend::BackendError| e.to_string();
    let ceilings = Ceilings::measure(&backend, METER).map_err(text)?;
    let description = backend.info().description;
    let mut steps = Vec::new();
    let (name, weight_bytes) = match model {
        None => {
            let mut model = Model::new(&backend, Shape::SMOLLM2_135M).map_err(text)?;
            for step in STEPS {
                let cost = model.step(step, METER).map_err(text)?;
                let parts = model.parts(step, METER).map_err(text)?;
                let parts = parts.into_iter().map(|(what, t)| (what.to_string(), ms(t.clock)));
                steps.push(StepReport { parts: parts.collect(), ..line(step, &cost, &ceilings) });
            }
            ("random, in the shape of SmolLM2-135M Q4_1".to_string(), model.bytes)
        }
        Some(files) => {
            let mut subject = Subject::load(Arc::new(backend), files)?;
            for step in STEPS.into_iter().filter(|s| s.rows + s.past <= files.spec().context) {
                steps.push(line(step, &subject.step(step)?, &ceilings));
            }
            (files.model_hash(), subject.weight_bytes)
        }
    };
    Ok(Roofline {
        device: id.to_string(),
        description,
        model: name,
        weight_bytes,
        copy_bytes_per_s: ceilings.copy.per_second(),
        read_bytes_per_s: ceilings.read.per_second(),
        matmul_flops_per_s: ceilings.product.per_second(),
        round_trip_ms: ms(ceilings.round_trip.clock),
        steps,
    })
}

fn line(step: Step, cost: &Cost, ceilings: &Ceilings) -> StepReport {
    StepReport {
        rows: step.rows,
        past: step.past,
        ms: ms(cost.times.clock),
        bytes: cost.bytes,
        operations: cost.operations,
        share_of_bandwidth: cost.bytes_per_second() / ceilings.bytes_per_second(),
        share_of_matmul: cost.operations_per_second() / ceilings.product.per_second(),
        parts: Vec::new(),
    }
}

fn ms(t: std::time::Duration) -> f64 {
    t.as_secs_f64() * 1e3
}

/// A real model, whole, on one device.
struct Subject<B: Backend> {
    engine: TransformerEngine<B>,
    spec: ModelSpec,
    /// All that a step reads: not the embedding table, where the head is another matrix.
    weight_bytes: u64,
    kv: KvDtype,
}

const BLOCK_TOKENS: usize = 16;

impl<B: Backend> Subject<B> {
    fn load(backend: Arc<B>, files: &ModelFiles) -> Result<Self, String> {
        let spec = files.spec().clone();
        let room = STEPS.iter().map(|s| s.rows + s.past).max().unwrap_or(1);
        let stage = StageSpec::whole(
            spec.layers,
            room.div_ceil(BLOCK_TOKENS),
            BLOCK_TOKENS,
            STEPS.iter().map(|s| s.rows).max().unwrap_or(1),
        );
        let weights = StageWeights::load(backend.as_ref(), files, &stage);
        let weights = Arc::new(weights.map_err(|e| e.to_string())?);
        let table = weights.embedding.as_ref().filter(|_| weights.head.is_some());
        let unread = table.map_or(0, |table| backend.weight_bytes(table));
        let weight_bytes = weights.bytes(backend.as_ref()) - unread;
        let kv = backend.kv_dtype();
        let engine = TransformerEngine::new(backend, weights, stage).map_err(|e| e.to_string())?;
        Ok(Self { engine, spec, weight_bytes, kv })
    }

    fn step(&mut self, step: Step) -> Result<Cost, String> {
        let Step { rows, past } = step;
        let (prompt, output, forbidden) = Default::default();
        let params = SamplingParams::default();
        let seq = BatchSeq {
            request: 1,
            tokens: (0..rows as u32).map(|i| 1 + i % self.spec.vocab.max(2) as u32 / 2).collect(),
            position: past as u32,
            blocks: (0..(past + rows).div_ceil(BLOCK_TOKENS) as u32).collect(),
            sample: Some(SampleSpec { params, prompt, output, forbidden }),
            prompt_logprobs: None,
        };
        let batch = Batch { seqs: vec![seq], ..Batch::default() };
        let mut failed = None;
        let times = METER.best(|| {
            if let Err(error) = self.engine.step(&batch, None, &mut Alone) {
                failed.get_or_insert(error.to_string());
            }
            Ok(())
        });
        let times = times.map_err(|e| e.to_string())?;
        if let Some(error) = failed {
            return Err(error);
        }
        let s = &self.spec;
        let shape = Shape {
            hidden: s.hidden,
            inner: s.moe.as_ref().map_or(s.ffn, |moe| moe.top_k * moe.ffn),
            layers: s.layers,
            heads: s.heads,
            kv_heads: s.kv_heads,
            head_dim: s.head_dim,
            vocab: s.vocab,
            ..Shape::SMOLLM2_135M
        };
        Ok(shape.cost(step, self.weight_bytes, self.kv, times))
    }
}
