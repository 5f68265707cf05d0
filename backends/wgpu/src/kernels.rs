//! The kernels: how each is put together from the texts in `shaders/`, and its pipeline, made at
//! first use and kept.

use crate::gpu::Gpu;
use dunlin_backend::{BackendError, DType, KvDtype};
use std::collections::HashMap;

/// One compiled entry point. Its fields are constants of the shader.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Kernel {
    /// `rows` rows of `cols` output columns a thread; `cols` divides 32.
    Linear {
        dtype: DType,
        rows: u32,
        cols: u32,
    },
    /// The same, with int8 activations.
    LinearPacked {
        dtype: DType,
        rows: u32,
        cols: u32,
    },
    /// The same, 32 rows of 32 columns a workgroup.
    LinearPackedTiled(DType),
    /// Activations to int8.
    Quantise,
    /// One row, four threads a column.
    LinearSplit(DType),
    /// 32 rows of 32 columns a workgroup. `half`: float16 weights stay so in workgroup memory.
    LinearTiled {
        dtype: DType,
        half: bool,
    },
    Embed(DType),
    Norm {
        in_place: bool,
        lanes: u32,
    },
    Add,
    GatedSilu,
    GatedGelu,
    Clear,
    Rope,
    KvWrite {
        dim: u32,
        kept: KvDtype,
    },
    /// `slots` groups of up to `queries` query heads a workgroup; `part`: of one split.
    Attention {
        dim: u32,
        slots: u32,
        queries: u32,
        part: bool,
        kept: Kept,
    },
    AttentionMerge {
        dim: u32,
    },
    Gather,
    KvCopy,
    Route,
    /// `subgroups`: fewer steps through workgroup memory where the adapter has them.
    SampleScan {
        subgroups: bool,
    },
    SampleAdjust,
    SampleDraw,
}

/// What keys and values are, as a kernel reads them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Kept {
    /// In shaders that any adapter takes.
    Plain(KvDtype),
    /// Float16 by the adapter's own.
    NativeF16,
}

macro_rules! text {
    ($name:literal) => {
        include_str!(concat!("../../../shaders/", $name, ".wgsl"))
    };
}

impl Kernel {
    /// Read-only bindings, then writable ones.
    pub fn bindings(self) -> (u32, u32) {
        match self {
            Kernel::Linear { .. } | Kernel::LinearSplit(_) | Kernel::LinearTiled { .. } => (5, 1),
            Kernel::LinearPacked { .. } | Kernel::LinearPackedTiled(_) => (6, 1),
            Kernel::Quantise => (1, 2),
            Kernel::Embed(_) => (3, 1),
            Kernel::Norm { in_place: true, .. } => (1, 1),
            Kernel::Norm { in_place: false, .. } => (2, 1),
            Kernel::Add | Kernel::GatedSilu | Kernel::GatedGelu | Kernel::Clear => (1, 1),
            Kernel::Rope | Kernel::Route => (1, 1),
            Kernel::KvWrite { .. } => (3, 2),
            Kernel::Attention { .. } => (4, 1),
            Kernel::AttentionMerge { .. } => (2, 1),
            Kernel::Gather => (2, 1),
            Kernel::KvCopy => (1, 2),
            Kernel::SampleScan { .. } | Kernel::SampleAdjust => (1, 1),
            Kernel::SampleDraw => (3, 1),
        }
    }

    fn entry(self) -> &'static str {
        match self {
            Kernel::Add => "add",
            Kernel::GatedSilu => "gated_silu",
            Kernel::GatedGelu => "gated_gelu",
            Kernel::Clear => "clear",
            _ => "main",
        }
    }

    fn text(self) -> String {
        let weights = |dtype, rest: &str| unpack(dtype) + rest;
        let linear = only(text!("linear"), "@plain", "@packed");
        let packed = |dtype| {
            let (keep, drop) =
                if dtype == DType::Q6_K { ("@two", "@one") } else { ("@one", "@two") };
            let shared = only(text!("linear_packed"), keep, drop);
            unpack(dtype) + &only(text!("linear"), "@packed", "@plain") + &shared
        };
        let body = match self {
            Kernel::Linear { dtype, rows, cols } => {
                let body = repeat(text!("linear_rows"), "@row", "$r", rows);
                let body = repeat(&body, "@col", "$c", cols);
                let head = format!("const ROWS = {rows}u;\nconst LANES = {}u;\n", 32 / cols);
                head + &weights(dtype, &linear) + &body
            }
            Kernel::LinearPacked { dtype, rows, cols } => {
                let body = repeat(text!("linear_packed_rows"), "@row", "$r", rows);
                let body = repeat(&body, "@col", "$c", cols);
                let head = format!("const ROWS = {rows}u;\nconst LANES = {}u;\n", 32 / cols);
                head + &packed(dtype) + &body
            }
            Kernel::LinearPackedTiled(dtype) => {
                packed(dtype) + &repeat(text!("linear_packed_tiled"), "@row", "$r", 8)
            }
            Kernel::Quantise => repeat(text!("quantise"), "@v", "$", 8),
            Kernel::LinearSplit(dtype) => weights(dtype, &linear) + text!("linear_split"),
            Kernel::LinearTiled { dtype, half } => {
                let body = repeat(text!("linear_tiled"), "@row", "$r", 8);
                let held = if half { "f16" } else { "f32" };
                format!("alias Held = vec4<{held}>;\n") + &weights(dtype, &linear) + &body
            }
            Kernel::Embed(dtype) => weights(dtype, text!("embed")),
            Kernel::Norm { in_place, lanes } => {
                let load = if in_place { IN_PLACE } else { APART };
                format!("const LANES = {lanes}u;\n{load}{}", text!("norm"))
            }
            Kernel::Add | Kernel::GatedSilu | Kernel::GatedGelu | Kernel::Clear => {
                text!("elementwise").to_owned()
            }
            Kernel::Rope => text!("rope").to_owned(),
            Kernel::KvWrite { dim, kept } => {
                let kept = Kept::Plain(kept);
                [&head(dim), kept.text(), &kept.marked(text!("kv_write"))].concat()
            }
            Kernel::Attention { dim, slots, queries, part, kept } => {
                let dim4 = dim.div_ceil(4);
                let held = dim4.min(if queries == 1 { HELD } else { 2 * HELD / queries });
                let (keep, drop) = if part { ("@part", "@whole") } else { ("@whole", "@part") };
                let body = blocks(text!("attention"), "@held", "$h", held);
                let body = blocks(&body, "@own", "$o", dim4.div_ceil(16));
                let body = kept.marked(&only(&body, keep, drop));
                let body = repeat(&body, "@q", "$q", queries);
                let counts = format!(
                    "const SLOTS = {slots}u;\nconst QUERIES = {queries}u;\nconst HELD = {held}u;\n"
                );
                [&head(dim), kept.text(), &counts, text!("merge"), &body].concat()
            }
            Kernel::AttentionMerge { dim } => {
                [&head(dim), text!("merge"), text!("attention_merge")].concat()
            }
            Kernel::Gather => text!("gather").to_owned(),
            Kernel::KvCopy => text!("kv_copy").to_owned(),
            Kernel::Route => text!("route").to_owned(),
            Kernel::SampleScan { subgroups } => {
                let (keep, drop) = match subgroups {
                    true => ("@subgroup", "@plain"),
                    false => ("@plain", "@subgroup"),
                };
                [text!("sample"), &only(text!("sample_scan"), keep, drop)].concat()
            }
            Kernel::SampleAdjust => [text!("sample"), text!("sample_adjust")].concat(),
            Kernel::SampleDraw => [text!("sample"), text!("sample_draw")].concat(),
        };
        let requires = match self {
            Kernel::LinearPacked { .. } | Kernel::LinearPackedTiled(_) => {
                "requires packed_4x8_integer_dot_product;\n"
            }
            Kernel::Attention { kept: Kept::NativeF16, .. }
            | Kernel::LinearTiled { half: true, .. } => "enable f16;\n",
            _ => "",
        };
        [requires, text!("common"), &body].concat()
    }
}

impl Kept {
    fn text(self) -> &'static str {
        match self {
            Kept::Plain(KvDtype::F32) => text!("kv/f32"),
            Kept::Plain(KvDtype::F16) => text!("kv/f16"),
            Kept::Plain(KvDtype::Int8) => text!("kv/int8"),
            Kept::NativeF16 => text!("kv/f16_native"),
        }
    }

    /// `text` for types with a scale, or without.
    fn marked(self, text: &str) -> String {
        match self {
            Kept::Plain(KvDtype::Int8) => only(text, "@scaled", "@exact"),
            _ => only(text, "@exact", "@scaled"),
        }
    }
}

/// The two ways in which a norm reads its input.
const APART: &str = "
@group(0) @binding(0) var<storage, read> x: array<f32>;
@group(0) @binding(1) var<storage, read> weight: array<f32>;
@group(0) @binding(2) var<storage, read_write> out: array<f32>;
fn load(i: u32) -> f32 { return x[i]; }
";
const IN_PLACE: &str = "
@group(0) @binding(0) var<storage, read> weight: array<f32>;
@group(0) @binding(1) var<storage, read_write> out: array<f32>;
fn load(i: u32) -> f32 { return out[i]; }
";

/// Writes each line that begins with `mark` `count` times, `number` being 0, 1, ... there. Software
/// adapters keep arrays that loops index in memory, so such loops are unrolled in the text.
fn repeat(text: &str, mark: &str, number: &str, count: u32) -> String {
    let mut out = String::with_capacity(2 * text.len());
    for line in text.lines() {
        match line.strip_prefix(mark) {
            Some(rest) => (0..count).for_each(|n| {
                out.push_str(&rest.replace(number, &n.to_string()));
                out.push('\n');
            }),
            None => {
                out.push_str(line);
                out.push('\n');
            }
        }
    }
    out
}

/// Writes what stands between the lines `mark{` and `@}` `count` times, as [`repeat`] does a line.
fn blocks(text: &str, mark: &str, number: &str, count: u32) -> String {
    let begin = format!("{mark}{{");
    let mut out = String::with_capacity(2 * text.len());
    let mut block: Option<String> = None;
    for line in text.lines() {
        match &mut block {
            None if line == begin => block = Some(String::new()),
            Some(inner) if line == "@}" => {
                (0..count).for_each(|n| out.push_str(&inner.replace(number, &n.to_string())));
                block = None;
            }
            inner => {
                let to = inner.as_mut().unwrap_or(&mut out);
                to.push_str(line);
                to.push('\n');
            }
        }
    }
    out
}

/// The lines marked `keep` or not at all.
fn only(text: &str, keep: &str, drop: &str) -> String {
    repeat(&repeat(text, keep, "\0", 1), drop, "\0", 0)
}

/// vec4s of a query that attention keeps in registers: a head of 128 elements; of a group's queries,
/// twice as many in all.
const HELD: u32 = 32;

fn head(dim: u32) -> String {
    format!("const DIM = {dim}u;\nconst DIM4 = {}u;\n", dim.div_ceil(4))
}

/// How a type's elements are had.
fn unpack(dtype: DType) -> String {
    let own = match dtype {
        DType::F32 => text!("types/f32"),
        DType::F16 => text!("types/f16"),
        DType::BF16 => text!("types/bf16"),
        DType::Q8_0 => text!("types/q8_0"),
        DType::Q4_0 => text!("types/q4_0"),
        DType::Q4_1 => text!("types/q4_1"),
        DType::Q5_0 => text!("types/q5_0"),
        DType::Q5_1 => text!("types/q5_1"),
        DType::Q4_K => text!("types/q4_k"),
        DType::Q5_K => text!("types/q5_k"),
        DType::Q6_K => text!("types/q6_k"),
    };
    let shared = if dtype.block_elements() > 1 { text!("quantised") } else { "" };
    [text!("weights"), shared, own].concat()
}

/// Name, text and entry point of every kernel, for checks that need no adapter; head dimensions
/// and the like are examples.
pub fn shader_texts() -> Vec<(String, String, &'static str)> {
    let mut all = Vec::new();
    for dtype in DType::ALL {
        let shapes = [(1, 1), (8, 1), (1, 4), (4, 4)];
        all.extend(shapes.map(|(rows, cols)| Kernel::Linear { dtype, rows, cols }));
        let tiled = Kernel::LinearTiled { dtype, half: false };
        all.extend([Kernel::LinearSplit(dtype), tiled, Kernel::Embed(dtype)]);
        if dtype.block_elements() > 1 {
            all.extend(shapes.map(|(rows, cols)| Kernel::LinearPacked { dtype, rows, cols }));
            all.push(Kernel::LinearPackedTiled(dtype));
        }
    }
    for lanes in [8, 64] {
        all.extend([true, false].map(|in_place| Kernel::Norm { in_place, lanes }));
    }
    for dim in [2, 24, 64, 80, 128, 256] {
        all.extend(KvDtype::ALL.map(|kept| Kernel::KvWrite { dim, kept }));
        for (slots, queries) in [(1, 1), (1, 3), (1, 4), (4, 1)] {
            for kept in KvDtype::ALL.map(Kept::Plain).into_iter().chain([Kept::NativeF16]) {
                let kernel = |part| Kernel::Attention { dim, slots, queries, part, kept };
                all.extend([false, true].map(kernel));
            }
        }
        all.push(Kernel::AttentionMerge { dim });
    }
    all.extend([
        Kernel::LinearTiled { dtype: DType::F16, half: true },
        Kernel::Add,
        Kernel::GatedSilu,
        Kernel::GatedGelu,
        Kernel::Clear,
        Kernel::Rope,
        Kernel::Gather,
        Kernel::KvCopy,
        Kernel::Route,
        Kernel::SampleScan { subgroups: false },
        Kernel::SampleScan { subgroups: true },
        Kernel::SampleAdjust,
        Kernel::SampleDraw,
        Kernel::Quantise,
    ]);
    all.into_iter().map(|k| (format!("{k:?}"), k.text(), k.entry())).collect()
}

/// Bytes of immediates that every pipeline has: the most that a kernel's parameters take.
pub(crate) const IMMEDIATES: u32 = 64;

/// Pipelines and bind group layouts, made at first use.
pub(crate) struct Kernels {
    layouts: HashMap<(u32, u32), (wgpu::BindGroupLayout, wgpu::PipelineLayout)>,
    pipelines: HashMap<Kernel, wgpu::ComputePipeline>,
    /// The driver's own, where it has one and there is a place to keep it.
    cache: Option<wgpu::PipelineCache>,
    /// Pipelines of which the kept cache knows nothing.
    unkept: bool,
}

impl Kernels {
    pub fn new(gpu: &Gpu) -> Self {
        let store = gpu.store.as_ref().filter(|_| gpu.has(wgpu::Features::PIPELINE_CACHE));
        let cache = store.map(|store| {
            let data = store.pipelines();
            let descriptor = wgpu::PipelineCacheDescriptor {
                label: None,
                data: data.as_deref(),
                fallback: true,
            };
            // SAFETY: the data came from `get_data` on this adapter and driver: the store gives
            // only what carries a sum of itself and of these.
            unsafe { gpu.device.create_pipeline_cache(&descriptor) }
        });
        let (layouts, pipelines) = Default::default();
        Self { layouts, pipelines, cache, unkept: false }
    }

    /// Keeps what was compiled since the last call.
    pub fn keep(&mut self, gpu: &Gpu) {
        if !std::mem::take(&mut self.unkept) {
            return;
        }
        if let (Some(store), Some(cache)) = (&gpu.store, &self.cache)
            && let Some(data) = cache.get_data()
        {
            store.keep_pipelines(&data);
        }
    }

    pub fn layout(&mut self, gpu: &Gpu, bindings: (u32, u32)) -> &wgpu::BindGroupLayout {
        &self.layouts_of(gpu, bindings).0
    }

    fn layouts_of(
        &mut self,
        gpu: &Gpu,
        (read, write): (u32, u32),
    ) -> &(wgpu::BindGroupLayout, wgpu::PipelineLayout) {
        self.layouts.entry((read, write)).or_insert_with(|| {
            let entry = |binding| wgpu::BindGroupLayoutEntry {
                binding,
                visibility: wgpu::ShaderStages::COMPUTE,
                ty: wgpu::BindingType::Buffer {
                    ty: wgpu::BufferBindingType::Storage { read_only: binding < read },
                    has_dynamic_offset: false,
                    min_binding_size: None,
                },
                count: None,
            };
            let entries: Vec<_> = (0..read + write).map(entry).collect();
            let group = gpu.device.create_bind_group_layout(&wgpu::BindGroupLayoutDescriptor {
                label: None,
                entries: &entries,
            });
            let all = gpu.device.create_pipeline_layout(&wgpu::PipelineLayoutDescriptor {
                label: None,
                bind_group_layouts: &[Some(&group)],
                immediate_size: IMMEDIATES,
            });
            (group, all)
        })
    }

    pub fn pipeline(
        &mut self,
        gpu: &Gpu,
        kernel: Kernel,
    ) -> Result<wgpu::ComputePipeline, BackendError> {
        if let Some(made) = self.pipelines.get(&kernel) {
            return Ok(made.clone());
        }
        let name = format!("{kernel:?}");
        let invalid = gpu.device.push_error_scope(wgpu::ErrorFilter::Validation);
        let internal = gpu.device.push_error_scope(wgpu::ErrorFilter::Internal);
        let source = wgpu::ShaderSource::Wgsl(kernel.text().into());
        let descriptor = wgpu::ShaderModuleDescriptor { label: Some(&name), source };
        let checks = wgpu::ShaderRuntimeChecks { force_loop_bounding: false, ..Default::default() };
        // SAFETY: what is left out is the guard against endless loops. The texts are this crate's
        // own; every loop counts up to a bound. Indices are still checked.
        let module = unsafe { gpu.device.create_shader_module_trusted(descriptor, checks) };
        let layout = self.layouts_of(gpu, kernel.bindings()).1.clone();
        let made = gpu.device.create_compute_pipeline(&wgpu::ComputePipelineDescriptor {
            label: Some(&name),
            layout: Some(&layout),
            module: &module,
            entry_point: Some(kernel.entry()),
            compilation_options: wgpu::PipelineCompilationOptions {
                // Every kernel writes its workgroup memory before it reads it.
                zero_initialize_workgroup_memory: false,
                ..Default::default()
            },
            cache: self.cache.as_ref(),
        });
        let internal = pollster::block_on(internal.pop());
        let invalid = pollster::block_on(invalid.pop());
        if let Some(e) = internal.or(invalid) {
            return Err(gpu.lost(format!("kernel {name} was refused: {e}")));
        }
        gpu.count(|c| c.pipelines += 1);
        self.pipelines.insert(kernel, made.clone());
        self.unkept = true;
        Ok(made)
    }
}
