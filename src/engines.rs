//! What computes: the model on this node's devices, or the hash engine in its place. The only file
//! that names a concrete backend.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use dunlin_actors::engines::{Engines, ModelShape};
use dunlin_actors::messages::{DeviceDescription, NodeDescription};
use dunlin_cpu::{CpuBackend, CpuError, CpuOptions, Precision};
use dunlin_model::engine::{Engine, StageSpec};
use dunlin_model::hash_engine::{HashEngine, HashSpec};
use dunlin_model::loader::ModelFiles;
use dunlin_model::split::{plan_split, split_layers};
use dunlin_model::stage::{StageWeights, kv_block_bytes, stage_bytes};
use dunlin_model::transformer::TransformerEngine;

/// Changes when the bytes of KV blocks change their meaning.
const KV_FORMAT: &str = "kv f32 1";
/// Activations of a step, per token and hidden value: what a workspace takes at most, roughly.
const WORKSPACE_BYTES: u64 = 64;

/// This node's devices, as the file names them, and its limits.
#[derive(Debug, Clone)]
pub struct NodeDevices {
    pub ids: Vec<String>,
    /// Shared evenly by the CPU devices.
    pub threads: usize,
    pub precision: Precision,
    /// Bytes for weights and KV; `None`: what the machine has.
    pub memory: Option<u64>,
}

/// The transformer on CPU devices.
pub struct ModelEngines {
    shape: TransformerShape,
    devices: BTreeMap<String, CpuDevice>,
    memory: Option<u64>,
}

/// A device with the weights that it holds, kept over restarts of its shard.
struct CpuDevice {
    backend: Arc<CpuBackend>,
    threads: usize,
    loaded: Mutex<Option<Loaded>>,
}

struct Loaded {
    part: Part,
    weights: Arc<StageWeights<CpuBackend>>,
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

impl ModelEngines {
    /// Starts the devices' threads. `name` is the model as users name it.
    pub fn new(
        name: &str,
        files: ModelFiles,
        devices: &NodeDevices,
    ) -> Result<ModelEngines, CpuError> {
        let share = (devices.threads / devices.ids.len().max(1)).max(1);
        let mut made = BTreeMap::new();
        for id in &devices.ids {
            let options = CpuOptions { threads: share, precision: devices.precision, path: None };
            let backend = Arc::new(CpuBackend::new(options)?);
            let loaded = Mutex::new(None);
            made.insert(id.clone(), CpuDevice { backend, threads: share, loaded });
        }
        let shape = TransformerShape::new(name, files, devices.precision);
        Ok(ModelEngines { shape, devices: made, memory: devices.memory })
    }
}

impl CpuDevice {
    /// A panic while loading leaves what was there before.
    fn loaded(&self) -> MutexGuard<'_, Option<Loaded>> {
        self.loaded.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The part's weights, read only if they are not what the device holds.
    fn weights(
        &self,
        files: &ModelFiles,
        spec: &StageSpec,
    ) -> Result<Arc<StageWeights<CpuBackend>>, String> {
        let part = Part {
            layers: spec.layers.clone(),
            first: spec.first,
            last: spec.last,
            rank: spec.rank,
            ranks: spec.ranks,
        };
        let mut loaded = self.loaded();
        if let Some(held) = loaded.as_ref().filter(|held| held.part == part) {
            metrics::counter!("dunlin_weights_reload_total", "avoided" => "true").increment(1);
            return Ok(held.weights.clone());
        }
        // First, so that both are never held at once.
        *loaded = None;
        metrics::counter!("dunlin_weights_reload_total", "avoided" => "false").increment(1);
        let weights = StageWeights::load(self.backend.as_ref(), files, spec);
        let weights = Arc::new(weights.map_err(|e| e.to_string())?);
        let bytes = weights.bytes(self.backend.as_ref());
        *loaded = Some(Loaded { part, weights: weights.clone(), bytes });
        Ok(weights)
    }
}

impl Engines for ModelEngines {
    fn describe(&self) -> NodeDescription {
        let devices = self.devices.iter().map(|(id, device)| {
            let path = format!("{:?}", device.backend.path()).to_lowercase();
            let plural = if device.threads == 1 { "" } else { "s" };
            let held = device.loaded().as_ref().map_or(0, |loaded| loaded.bytes);
            let count = self.devices.len() as u64;
            device_description(
                id,
                format!("{} thread{plural}, {path}", device.threads),
                self.memory,
                held,
                count,
            )
        });
        NodeDescription {
            devices: devices.collect(),
            model_hash: self.shape.hash.clone(),
            version: env!("CARGO_PKG_VERSION").to_string(),
        }
    }

    fn shape(&self) -> &dyn ModelShape {
        &self.shape
    }

    fn build(&self, device: &str, spec: &StageSpec) -> Result<Box<dyn Engine>, String> {
        let known = self.devices.get(device);
        let on = known.ok_or_else(|| format!("this node has no device {device}"))?;
        let weights =
            on.weights(&self.shape.files, spec).map_err(|e| format!("device {device}: {e}"))?;
        let engine = TransformerEngine::new(on.backend.clone(), weights, spec.clone());
        Ok(Box::new(engine.map_err(|e| format!("device {device}: {e}"))?))
    }
}

/// Free is what the machine could still give, plus what the device already holds for its shard.
fn device_description(
    id: &str,
    description: String,
    limit: Option<u64>,
    held: u64,
    devices: u64,
) -> DeviceDescription {
    let (machine, available) = machine_memory();
    let total = limit.map_or(machine, |limit| limit / devices.max(1));
    let free = total.min(available + held);
    DeviceDescription { id: id.to_string(), description, total_bytes: total, free_bytes: free }
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
}

impl TransformerShape {
    fn new(name: &str, files: ModelFiles, precision: Precision) -> TransformerShape {
        let hash = files.model_hash();
        TransformerShape { name: name.to_string(), files, hash, precision }
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
        kv_block_bytes(self.files.spec(), spec)
    }

    fn cache_namespace(&self) -> [u8; 16] {
        namespace(&[&self.hash, KV_FORMAT, &format!("{:?}", self.precision)])
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

/// The hash engine on every device.
pub struct HashEngines {
    shape: HashShape,
    devices: Vec<String>,
    memory: Option<u64>,
}

struct HashShape(HashSpec);

impl HashEngines {
    pub fn new(spec: HashSpec, devices: &NodeDevices) -> HashEngines {
        let (devices, memory) = (devices.ids.clone(), devices.memory);
        HashEngines { shape: HashShape(spec), devices, memory }
    }
}

impl Engines for HashEngines {
    fn describe(&self) -> NodeDescription {
        let count = self.devices.len() as u64;
        let one = |id: &String| device_description(id, "hash engine".into(), self.memory, 0, count);
        NodeDescription {
            devices: self.devices.iter().map(one).collect(),
            model_hash: format!("hash {:?}", self.shape.0),
            version: env!("CARGO_PKG_VERSION").to_string(),
        }
    }

    fn shape(&self) -> &dyn ModelShape {
        &self.shape
    }

    fn build(&self, _: &str, spec: &StageSpec) -> Result<Box<dyn Engine>, String> {
        let engine = HashEngine::new(self.shape.0.clone(), spec.clone());
        Ok(Box::new(engine.map_err(|e| e.to_string())?))
    }
}

impl ModelShape for HashShape {
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
        let most = self.0.heads;
        if ranks <= most {
            Ok(())
        } else {
            Err(format!("the hash engine splits over {most} ranks"))
        }
    }

    fn stage_bytes(&self, _: &StageSpec) -> u64 {
        0
    }

    fn kv_block_bytes(&self, spec: &StageSpec) -> u64 {
        HashEngine::kv_block_bytes(&self.0, spec)
    }

    fn cache_namespace(&self) -> [u8; 16] {
        namespace(&["hash", &format!("{:?}", self.0)])
    }
}
