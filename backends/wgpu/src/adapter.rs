//! Which adapters there are, and opening the one that a device id names.

use crate::gpu::Gpu;
use crate::memory;
use dunlin_backend::{KvDtype, Precision};
use std::path::PathBuf;
use std::sync::Arc;

/// Why an adapter could not be opened.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum WgpuError {
    #[error(
        "device {id}: no graphics adapter was found; install a Vulkan driver (on Debian, the \
         software one is in mesa-vulkan-drivers)"
    )]
    NoAdapter { id: String },
    #[error("device {id}: there is no such adapter; the adapters are {have}")]
    NoSuchAdapter { id: String, have: String },
    #[error("device {id}: {adapter} lacks {what}, which the kernels need")]
    Lacking { id: String, adapter: String, what: &'static str },
    #[error("device {id}: {adapter} could not be opened: {reason}")]
    Refused { id: String, adapter: String, reason: String },
    #[error("device id '{id}': use wgpu:N, wgpu:vulkan:N or wgpu:NAME")]
    BadId { id: String },
}

/// How an adapter is opened.
#[derive(Debug, Clone)]
pub struct WgpuOptions {
    /// In fast mode products with quantised weights take activations as int8 where the adapter is
    /// much faster at it; else, and for all else, arithmetic is float32.
    pub precision: Precision,
    /// What KV stores hold; `None`: what is usual in this precision.
    pub kv: Option<KvDtype>,
    /// A folder for what was measured and compiled, so that the next start need not; `None` keeps
    /// nothing.
    pub cache: Option<PathBuf>,
    /// The most bytes that a kernel binds at once, where that is to be less than the adapter's own
    /// limit: larger tensors are split.
    pub binding_bytes: Option<u64>,
}

impl Default for WgpuOptions {
    /// Exact, keeping nothing.
    fn default() -> Self {
        Self { precision: Precision::Exact, kv: None, cache: None, binding_bytes: None }
    }
}

/// What a device id asks for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Wanted {
    /// `wgpu:N`: the adapter's place in [`adapters`].
    Index(usize),
    /// `wgpu:vulkan:N`: the place among the adapters of one API.
    Api(wgpu::Backend, usize),
    /// `wgpu:NAME`: the first whose name contains this, whatever the case.
    Name(String),
}

impl Wanted {
    /// Reads a device id as `cluster.toml` has it.
    pub fn parse(id: &str) -> Result<Self, WgpuError> {
        let bad = || WgpuError::BadId { id: id.to_owned() };
        let rest = id.strip_prefix("wgpu:").filter(|rest| !rest.is_empty()).ok_or_else(bad)?;
        if let Ok(index) = rest.parse() {
            return Ok(Self::Index(index));
        }
        let Some((api, number)) = rest.split_once(':') else {
            return Ok(Self::Name(rest.to_lowercase()));
        };
        let api = match api {
            "vulkan" => wgpu::Backend::Vulkan,
            "metal" => wgpu::Backend::Metal,
            "dx12" => wgpu::Backend::Dx12,
            _ => return Err(bad()),
        };
        Ok(Self::Api(api, number.parse().map_err(|_| bad())?))
    }

    fn pick<'a>(&self, found: &'a [wgpu::Adapter]) -> Option<&'a wgpu::Adapter> {
        match self {
            Self::Index(n) => found.get(*n),
            Self::Api(api, n) => found.iter().filter(|a| a.get_info().backend == *api).nth(*n),
            Self::Name(name) => {
                found.iter().find(|a| a.get_info().name.to_lowercase().contains(name))
            }
        }
    }
}

/// An adapter as it is listed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AdapterSummary {
    /// `wgpu:N`
    pub id: String,
    pub name: String,
    /// Driver and API.
    pub driver: String,
    /// Discrete, integrated, software, ...
    pub kind: String,
    pub memory_bytes: u64,
    /// What the adapter has of what kernels may use.
    pub features: Vec<&'static str>,
    /// The most bytes of one binding; larger tensors are split.
    pub binding_bytes: u64,
}

/// All adapters: discrete ones first, software ones last.
pub fn adapters() -> Vec<AdapterSummary> {
    let found = enumerate();
    let one = |(n, adapter): (usize, &wgpu::Adapter)| {
        let (info, limits) = (adapter.get_info(), adapter.limits());
        AdapterSummary {
            id: format!("wgpu:{n}"),
            driver: format!("{} {}, {:?}", info.driver, info.driver_info, info.backend),
            kind: format!("{:?}", info.device_type).to_lowercase(),
            memory_bytes: memory::total(adapter),
            features: features(adapter.features()),
            binding_bytes: limits.max_storage_buffer_binding_size,
            name: info.name,
        }
    };
    found.iter().enumerate().map(one).collect()
}

fn features(have: wgpu::Features) -> Vec<&'static str> {
    let known = [
        (wgpu::Features::SHADER_F16, "f16"),
        (wgpu::Features::SUBGROUP, "subgroups"),
        (wgpu::Features::SHADER_INT64, "int64"),
        (wgpu::Features::TIMESTAMP_QUERY, "timestamps"),
        (wgpu::Features::PIPELINE_CACHE, "pipeline-cache"),
        (wgpu::Features::EXPERIMENTAL_COOPERATIVE_MATRIX, "cooperative-matrix"),
    ];
    known.into_iter().filter(|(f, _)| have.contains(*f)).map(|(_, name)| name).collect()
}

/// What kernels use where an adapter has it.
const USED: wgpu::Features = wgpu::Features::SUBGROUP
    .union(wgpu::Features::SHADER_F16)
    .union(wgpu::Features::PIPELINE_CACHE);

/// Opens what `id` names.
pub(crate) fn open(id: &str, options: &WgpuOptions) -> Result<Arc<Gpu>, WgpuError> {
    let wanted = Wanted::parse(id)?;
    let found = enumerate();
    if found.is_empty() {
        return Err(WgpuError::NoAdapter { id: id.to_owned() });
    }
    let adapter = wanted.pick(&found).ok_or_else(|| {
        let names = found.iter().enumerate().map(|(n, a)| {
            let info = a.get_info();
            format!("wgpu:{n} ({}, {:?})", info.name, info.backend)
        });
        WgpuError::NoSuchAdapter { id: id.to_owned(), have: names.collect::<Vec<_>>().join(", ") }
    })?;
    let name = adapter.get_info().name;
    // Parameters of a dispatch travel as immediates (push constants).
    if !adapter.features().contains(wgpu::Features::IMMEDIATES) {
        let what = "immediates (push constants)";
        return Err(WgpuError::Lacking { id: id.to_owned(), adapter: name, what });
    }
    let asked = pollster::block_on(adapter.request_device(&wgpu::DeviceDescriptor {
        label: Some("dunlin"),
        required_features: wgpu::Features::IMMEDIATES | (adapter.features() & USED),
        required_limits: adapter.limits(),
        memory_hints: wgpu::MemoryHints::MemoryUsage,
        ..Default::default()
    }));
    let (device, queue) = asked.map_err(|e| WgpuError::Refused {
        id: id.to_owned(),
        adapter: name,
        reason: e.to_string(),
    })?;
    Ok(Arc::new(Gpu::new(id, adapter, options, device, queue)))
}

fn enumerate() -> Vec<wgpu::Adapter> {
    let backends = wgpu::Backends::PRIMARY;
    let instance = wgpu::Instance::new(wgpu::InstanceDescriptor {
        backends,
        ..wgpu::InstanceDescriptor::new_without_display_handle()
    });
    let mut found = pollster::block_on(instance.enumerate_adapters(backends));
    // A stable sort: drivers list like devices in an order of their own, which is kept.
    found.sort_by_key(|a| match a.get_info().device_type {
        wgpu::DeviceType::DiscreteGpu => 0,
        wgpu::DeviceType::IntegratedGpu => 1,
        wgpu::DeviceType::VirtualGpu => 2,
        wgpu::DeviceType::Other => 3,
        wgpu::DeviceType::Cpu => 4,
    });
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_are_read() {
        assert_eq!(Wanted::parse("wgpu:2"), Ok(Wanted::Index(2)));
        assert_eq!(Wanted::parse("wgpu:vulkan:0"), Ok(Wanted::Api(wgpu::Backend::Vulkan, 0)));
        assert_eq!(Wanted::parse("wgpu:LLVMpipe"), Ok(Wanted::Name("llvmpipe".into())));
        for id in ["wgpu", "wgpu:", "cuda:0", "wgpu:glide:0", "wgpu:vulkan:x", "wgpu:vulkan:"] {
            assert!(matches!(Wanted::parse(id), Err(WgpuError::BadId { .. })), "{id}");
        }
    }
}
