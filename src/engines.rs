//! What computes: the model on this node's devices, or the hash engine in its place. The only module
//! that names a concrete backend.

pub mod report;

use std::collections::BTreeMap;
use std::fmt::Display;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use dunlin_actors::engines::{BuildError, Engines, ModelShape};
use dunlin_actors::hash_engines::HashEngines;
use dunlin_actors::messages::{DeviceDescription, NodeDescription};
use dunlin_backend::{Backend, KvDtype};
use dunlin_cpu::{CpuBackend, CpuError, CpuOptions, Precision};
use dunlin_model::engine::{Engine, StageSpec};
use dunlin_model::error::LoadError;
use dunlin_model::hash_engine::HashSpec;
use dunlin_model::loader::ModelFiles;
use dunlin_model::manifest::Manifest;
use dunlin_model::split::{plan_split, split_layers};
use dunlin_model::stage::{Changed, StageError, StageWeights, kv_block_bytes, stage_bytes};
use dunlin_model::transformer::TransformerEngine;
use dunlin_wgpu::{WgpuBackend, WgpuError, WgpuOptions};

use crate::models;

/// Changes when the bytes of KV blocks change their meaning, beside their type.
const KV_FORMAT: &str = "kv 2";
/// Activations of a step, per token and hidden value: what a workspace takes at most, roughly.
const WORKSPACE_BYTES: u64 = 64;

/// This node's devices, as the file names them, and its limits.
#[derive(Debug, Clone)]
pub struct NodeDevices {
    pub ids: Vec<String>,
    /// Shared evenly by the CPU devices.
    pub threads: usize,
    pub precision: Precision,
    /// What every KV store of the cluster holds.
    pub kv: KvDtype,
    /// Bytes for weights and KV; `None`: what the machine has.
    pub memory: Option<u64>,
}

/// The transformer on this node's devices.
pub struct ModelEngines {
    shape: TransformerShape,
    devices: BTreeMap<String, Box<dyn Holder>>,
    memory: Option<u64>,
}

/// Why a device could not be opened.
#[derive(Debug, thiserror::Error)]
pub enum DeviceError {
    #[error(transparent)]
    Cpu(#[from] CpuError),
    #[error(transparent)]
    Wgpu(#[from] WgpuError),
    #[error("device {0}: this build has no backend for it; use cpu, cpu:N or wgpu:N")]
    Unknown(String),
}

impl ModelEngines {
    /// Opens the devices. `name` is the model as users name it.
    pub fn new(
        name: &str,
        mut files: ModelFiles,
        devices: &NodeDevices,
    ) -> Result<ModelEngines, DeviceError> {
        hold_to_manifest(&mut files);
        let cpus = devices.ids.iter().filter(|id| is_cpu(id)).count();
        let threads = (devices.threads / cpus.max(1)).max(1);
        let options =
            CpuOptions { threads, precision: devices.precision, kv: Some(devices.kv), path: None };
        let open = |id: &String| Ok((id.clone(), open_device(id, options)?));
        let made = devices.ids.iter().map(open).collect::<Result<_, DeviceError>>()?;
        let shape = TransformerShape::new(name, files, devices.precision, devices.kv);
        Ok(ModelEngines { shape, devices: made, memory: devices.memory })
    }
}

/// Has every tensor compared, as it is loaded, with what it was when this file was first read. The
/// first time there is nothing to compare with: then the manifest is made, beside the load.
fn hold_to_manifest(files: &mut ModelFiles) {
    if let Some(manifest) = Manifest::read(files) {
        return files.hold_to(manifest);
    }
    let files = files.clone();
    std::thread::spawn(move || {
        if let Err(error) = Manifest::make(&files, 1).write(&files) {
            tracing::info!(%error, "later loads cannot be compared with this one");
        }
        files.release();
    });
}

/// Whether this build computes on such a device.
pub fn is_known(id: &str) -> bool {
    is_cpu(id) || id.starts_with("wgpu:")
}

pub fn is_cpu(id: &str) -> bool {
    id == "cpu" || id.starts_with("cpu:")
}

fn open_device(id: &str, options: CpuOptions) -> Result<Box<dyn Holder>, DeviceError> {
    if is_cpu(id) {
        let open = move || CpuBackend::new(options);
        let about = |b: &CpuBackend| {
            let path = format!("{:?}", b.path()).to_lowercase();
            let plural = if options.threads == 1 { "" } else { "s" };
            format!("{} thread{plural}, {path}", options.threads)
        };
        let backend = open()?;
        let description = about(&backend);
        return Ok(Box::new(Held::new(backend, description, open, |_| false)));
    }
    if !is_known(id) {
        return Err(DeviceError::Unknown(id.to_owned()));
    }
    let name = id.to_owned();
    let (precision, kv, cache) = (options.precision, options.kv, models::adapter_folder());
    let options = WgpuOptions { precision, kv, cache, ..WgpuOptions::default() };
    let open = move || WgpuBackend::open_with(&name, &options);
    let backend = open()?;
    let description = backend.info().description;
    Ok(Box::new(Held::new(backend, description, open, WgpuBackend::broken)))
}

/// A device with what it holds, whatever computes on it.
trait Holder: Send + Sync {
    /// `limit` bytes are all that it may use.
    fn describe(&self, id: &str, limit: Option<u64>) -> DeviceDescription;
    /// Makes a shard's engine, with the weights that are there if they are the stage's.
    fn build(&self, files: &ModelFiles, spec: &StageSpec) -> Result<Box<dyn Engine>, BuildError>;
}

/// A device with the weights that it holds, kept over restarts of its shard. A device that broke is
/// opened anew, and its weights are read again.
struct Held<B: Backend> {
    description: String,
    open: Box<dyn Fn() -> Result<B, String> + Send + Sync>,
    broken: fn(&B) -> bool,
    state: Mutex<State<B>>,
}

struct State<B: Backend> {
    backend: Arc<B>,
    loaded: Option<Loaded<B>>,
}

struct Loaded<B: Backend> {
    part: Part,
    weights: Arc<StageWeights<B>>,
    bytes: u64,
}

/// What of a stage decides its weights.
#[derive(Debug, Clone, PartialEq)]
struct Part {
    layers: Range<usize>,
    first: bool,
    last: bool,
    rank: usize,
    ranks: usize,
}

impl<B: Backend> Held<B> {
    fn new<E: Display>(
        backend: B,
        description: String,
        open: impl Fn() -> Result<B, E> + Send + Sync + 'static,
        broken: fn(&B) -> bool,
    ) -> Self {
        let open = Box::new(move || open().map_err(|e| e.to_string()));
        let state = Mutex::new(State { backend: Arc::new(backend), loaded: None });
        Self { description, open, broken, state }
    }

    /// A panic while loading leaves what was there before.
    fn state(&self) -> MutexGuard<'_, State<B>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<B: Backend> State<B> {
    /// The part's weights, read only if they are not what the device holds.
    fn weights(
        &mut self,
        files: &ModelFiles,
        spec: &StageSpec,
    ) -> Result<Arc<StageWeights<B>>, BuildError> {
        let part = Part {
            layers: spec.layers.clone(),
            first: spec.first,
            last: spec.last,
            rank: spec.rank,
            ranks: spec.ranks,
        };
        if let Some(held) = self.loaded.as_ref().filter(|held| held.part == part) {
            match held.weights.verify(self.backend.as_ref()) {
                Ok(()) => {
                    metrics::counter!("dunlin_weights_reload_total", "avoided" => "true")
                        .increment(1);
                    return Ok(held.weights.clone());
                }
                // Whatever did it, the file still has the right ones.
                Err(Changed { tensor, was, is }) => {
                    let device = self.backend.info().id;
                    tracing::error!(device, tensor, was, is, "a weight has changed in memory");
                }
            }
        }
        // First, so that both are never held at once.
        self.loaded = None;
        metrics::counter!("dunlin_weights_reload_total", "avoided" => "false").increment(1);
        let weights = StageWeights::load(self.backend.as_ref(), files, spec);
        let weights = Arc::new(weights.map_err(|error| match &error {
            StageError::Load(LoadError::Changed { .. }) => BuildError::Weights(error.to_string()),
            _ => BuildError::Other(error.to_string()),
        })?);
        // The device has its own now.
        files.release();
        let bytes = weights.bytes(self.backend.as_ref());
        self.loaded = Some(Loaded { part, weights: weights.clone(), bytes });
        Ok(weights)
    }
}

impl<B: Backend> Holder for Held<B> {
    fn describe(&self, id: &str, limit: Option<u64>) -> DeviceDescription {
        let state = self.state();
        let info = state.backend.info();
        let held = state.loaded.as_ref().map_or(0, |loaded| loaded.bytes);
        let total = limit.unwrap_or(info.total_bytes);
        let free_bytes = total.min(info.free_bytes.saturating_add(held));
        let description = self.description.clone();
        DeviceDescription { id: id.to_string(), description, total_bytes: total, free_bytes }
    }

    fn build(&self, files: &ModelFiles, spec: &StageSpec) -> Result<Box<dyn Engine>, BuildError> {
        let mut state = self.state();
        if (self.broken)(&state.backend) {
            tracing::warn!(device = %state.backend.info().id, "opening a broken device anew");
            state.loaded = None;
            state.backend = Arc::new((self.open)()?);
        }
        let weights = state.weights(files, spec)?;
        let engine = TransformerEngine::new(state.backend.clone(), weights, spec.clone());
        Ok(Box::new(engine.map_err(|e| e.to_string())?))
    }
}

impl Engines for ModelEngines {
    fn describe(&self) -> NodeDescription {
        let share = self.memory.map(|limit| limit / self.devices.len().max(1) as u64);
        let devices = self.devices.iter().map(|(id, device)| device.describe(id, share));
        NodeDescription {
            devices: devices.collect(),
            model_hash: self.shape.hash.clone(),
            version: env!("CARGO_PKG_VERSION").to_string(),
        }
    }

    fn shape(&self) -> &dyn ModelShape {
        &self.shape
    }

    fn build(&self, device: &str, spec: &StageSpec) -> Result<Box<dyn Engine>, BuildError> {
        let known = self.devices.get(device);
        let on = known.ok_or_else(|| format!("this node has no device {device}"))?;
        on.build(&self.shape.files, spec).map_err(|error| error.at(&format!("device {device}")))
    }
}

/// Of a device that takes its share of the machine's memory, or of what the node may use.
fn device_description(
    id: &str,
    description: String,
    limit: Option<u64>,
    devices: u64,
) -> DeviceDescription {
    let (machine, available) = machine_memory();
    let total = limit.map_or(machine, |limit| limit / devices.max(1));
    let free = total.min(available);
    DeviceDescription { id: id.to_string(), description, total_bytes: total, free_bytes: free }
}

/// The hash engine on each of this node's devices.
pub fn hash_engines(spec: HashSpec, devices: &NodeDevices) -> HashEngines {
    let count = devices.ids.len() as u64;
    let one = |id: &String| device_description(id, "hash engine".into(), devices.memory, count);
    HashEngines::new(spec, devices.ids.iter().map(one).collect())
}

/// Total and available memory in bytes; without `/proc`, as much as it takes.
fn machine_memory() -> (u64, u64) {
    let text = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let field = |name: &str| {
        let line = text.lines().find(|line| line.starts_with(name))?;
        let kib: u64 = line.split_whitespace().nth(1)?.parse().ok()?;
        Some(kib * 1024)
    };
    let total = field("MemTotal:").unwrap_or(u64::MAX / 4);
    (total, field("MemAvailable:").unwrap_or(total))
}

/// The sizes of a real model.
struct TransformerShape {
    name: String,
    files: ModelFiles,
    hash: String,
    precision: Precision,
    kv: KvDtype,
}

impl TransformerShape {
    fn new(name: &str, files: ModelFiles, precision: Precision, kv: KvDtype) -> TransformerShape {
        let hash = files.model_hash();
        TransformerShape { name: name.to_string(), files, hash, precision, kv }
    }
}

impl ModelShape for TransformerShape {
    fn name(&self) -> &str {
        &self.name
    }

    fn layers(&self) -> usize {
        self.files.spec().layers
    }

    fn context(&self) -> usize {
        self.files.spec().context
    }

    fn split_layers(&self, weights: &[f32]) -> Vec<usize> {
        split_layers(self.layers(), weights)
    }

    fn check_ranks(&self, ranks: usize) -> Result<(), String> {
        plan_split(self.files.spec(), ranks).map(drop).map_err(|e| e.to_string())
    }

    fn stage_bytes(&self, spec: &StageSpec) -> u64 {
        let workspace = spec.max_tokens as u64 * self.files.spec().hidden as u64 * WORKSPACE_BYTES;
        stage_bytes(&self.files, spec) + workspace
    }

    fn kv_block_bytes(&self, spec: &StageSpec) -> u64 {
        kv_block_bytes(self.files.spec(), spec, self.kv)
    }

    fn cache_namespace(&self) -> [u8; 16] {
        let precision = format!("{:?}", self.precision);
        namespace(&[&self.hash, KV_FORMAT, self.kv.name(), &precision])
    }
}

fn namespace(parts: &[&str]) -> [u8; 16] {
    let mut hasher = blake3::Hasher::new();
    for part in parts {
        hasher.update(&(part.len() as u64).to_le_bytes());
        hasher.update(part.as_bytes());
    }
    let mut namespace = [0; 16];
    hasher.finalize_xof().fill(&mut namespace);
    namespace
}

#[cfg(test)]
mod tests;
