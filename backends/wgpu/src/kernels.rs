//! The kernels: how each is put together from the texts in `shaders/`, and its pipeline, made at
//! first use and kept.

use crate::gpu::Gpu;
use dunlin_backend::{BackendError, DType};
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
    /// One row, four threads a column.
    LinearSplit(DType),
    /// 32 rows of 32 columns a workgroup.
    LinearTiled(DType),
    Embed(DType),
    Norm {
        in_place: bool,
        lanes: u32,
    },
    Add,
    GatedSilu,
    GatedGelu,
    Clear,
    Copy,
    Rope,
    KvWrite {
        dim: u32,
    },
    /// `heads` query heads a workgroup.
    Attention {
        dim: u32,
        heads: u32,
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

macro_rules! text {
    ($name:literal) => {
        include_str!(concat!("../../../shaders/", $name, ".wgsl"))
    };
}

impl Kernel {
    /// Read-only bindings, then writable ones.
    pub fn bindings(self) -> (u32, u32) {
        match self {
            Kernel::Linear { .. } | Kernel::LinearSplit(_) | Kernel::LinearTiled(_) => (5, 1),
            Kernel::Embed(_) => (3, 1),
            Kernel::Norm { in_place: true, .. } => (1, 1),
            Kernel::Norm { in_place: false, .. } => (2, 1),
            Kernel::Add | Kernel::GatedSilu | Kernel::GatedGelu | Kernel::Clear | Kernel::Copy => {
                (1, 1)
            }
            Kernel::Rope | Kernel::Route => (1, 1),
            Kernel::KvWrite { .. } => (3, 2),
            Kernel::Attention { .. } => (4, 1),
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
            Kernel::Copy => "copy",
            _ => "main",
        }
    }

    fn text(self) -> String {
        let weights = |dtype, rest: &str| [text!("weights"), unpack(dtype), rest].concat();
        let body = match self {
            Kernel::Linear { dtype, rows, cols } => {
                let body = repeat(text!("linear_rows"), "@row", "$r", rows);
                let body = repeat(&body, "@col", "$c", cols);
                let head = format!("const ROWS = {rows}u;\nconst LANES = {}u;\n", 32 / cols);
                head + &weights(dtype, text!("linear")) + &body
            }
            Kernel::LinearSplit(dtype) => weights(dtype, text!("linear")) + text!("linear_split"),
            Kernel::LinearTiled(dtype) => {
                let body = repeat(text!("linear_tiled"), "@row", "$r", 8);
                weights(dtype, text!("linear")) + &body
            }
            Kernel::Embed(dtype) => weights(dtype, text!("embed")),
            Kernel::Norm { in_place, lanes } => {
                let load = if in_place { IN_PLACE } else { APART };
                format!("const LANES = {lanes}u;\n{load}{}", text!("norm"))
            }
            Kernel::Add | Kernel::GatedSilu | Kernel::GatedGelu | Kernel::Clear | Kernel::Copy => {
                text!("elementwise").to_owned()
            }
            Kernel::Rope => text!("rope").to_owned(),
            Kernel::KvWrite { dim } => format!("{}{}", head(dim), text!("kv_write")),
            Kernel::Attention { dim, heads } => {
                let body = repeat(text!("attention"), "@own", "$", dim.div_ceil(4).div_ceil(16));
                let held = dim.div_ceil(4).min(HELD);
                let body = repeat(&body, "@held", "$", held);
                let counts = format!("const HEADS = {heads}u;\nconst HELD = {held}u;\n");
                head(dim) + &counts + &body
            }
            Kernel::Gather => text!("gather").to_owned(),
            Kernel::KvCopy => text!("kv_copy").to_owned(),
            Kernel::Route => text!("route").to_owned(),
            Kernel::SampleScan { subgroups } => {
                let (keep, drop) = match subgroups {
                    true => ("@subgroup", "@plain"),
                    false => ("@plain", "@subgroup"),
                };
                let body = repeat(&repeat(text!("sample_scan"), keep, "$", 1), drop, "$", 0);
                [text!("sample"), &body].concat()
            }
            Kernel::SampleAdjust => [text!("sample"), text!("sample_adjust")].concat(),
            Kernel::SampleDraw => [text!("sample"), text!("sample_draw")].concat(),
        };
        [text!("common"), &body].concat()
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

/// vec4s of a query that attention keeps in registers: a head of 128 elements.
const HELD: u32 = 32;

fn head(dim: u32) -> String {
    format!("const DIM = {dim}u;\nconst DIM4 = {}u;\n", dim.div_ceil(4))
}

fn unpack(dtype: DType) -> &'static str {
    match dtype {
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
    }
}

/// Name, text and entry point of every kernel, for checks that need no adapter; head dimensions
/// and the like are examples.
pub fn shader_texts() -> Vec<(String, String, &'static str)> {
    let types = [
        DType::F32,
        DType::F16,
        DType::BF16,
        DType::Q8_0,
        DType::Q4_0,
        DType::Q4_1,
        DType::Q5_0,
        DType::Q5_1,
        DType::Q4_K,
        DType::Q5_K,
        DType::Q6_K,
    ];
    let mut all = Vec::new();
    for dtype in types {
        let shapes = [(1, 1), (8, 1), (1, 4), (4, 4)];
        all.extend(shapes.map(|(rows, cols)| Kernel::Linear { dtype, rows, cols }));
        all.extend([Kernel::LinearSplit(dtype), Kernel::LinearTiled(dtype), Kernel::Embed(dtype)]);
    }
    for lanes in [8, 64] {
        all.extend([true, false].map(|in_place| Kernel::Norm { in_place, lanes }));
    }
    for dim in [2, 24, 64, 80, 128, 256] {
        all.push(Kernel::KvWrite { dim });
        all.extend([1, 4].map(|heads| Kernel::Attention { dim, heads }));
    }
    all.extend([
        Kernel::Add,
        Kernel::GatedSilu,
        Kernel::GatedGelu,
        Kernel::Clear,
        Kernel::Copy,
        Kernel::Rope,
        Kernel::Gather,
        Kernel::KvCopy,
        Kernel::Route,
        Kernel::SampleScan { subgroups: false },
        Kernel::SampleScan { subgroups: true },
        Kernel::SampleAdjust,
        Kernel::SampleDraw,
    ]);
    all.into_iter().map(|k| (format!("{k:?}"), k.text(), k.entry())).collect()
}

/// Bytes of immediates that every pipeline has: the most that a kernel's parameters take.
pub(crate) const IMMEDIATES: u32 = 64;

/// Pipelines and bind group layouts, made at first use.
#[derive(Default)]
pub(crate) struct Kernels {
    layouts: HashMap<(u32, u32), (wgpu::BindGroupLayout, wgpu::PipelineLayout)>,
    pipelines: HashMap<Kernel, wgpu::ComputePipeline>,
}

impl Kernels {
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
        let (_, layout) = self.layouts_of(gpu, kernel.bindings());
        let made = gpu.device.create_compute_pipeline(&wgpu::ComputePipelineDescriptor {
            label: Some(&name),
            layout: Some(layout),
            module: &module,
            entry_point: Some(kernel.entry()),
            compilation_options: wgpu::PipelineCompilationOptions {
                // Every kernel writes its workgroup memory before it reads it.
                zero_initialize_workgroup_memory: false,
                ..Default::default()
            },
            cache: None,
        });
        let internal = pollster::block_on(internal.pop());
        let invalid = pollster::block_on(invalid.pop());
        if let Some(e) = internal.or(invalid) {
            return Err(gpu.lost(format!("kernel {name} was refused: {e}")));
        }
        self.pipelines.insert(kernel, made.clone());
        Ok(made)
    }
}
