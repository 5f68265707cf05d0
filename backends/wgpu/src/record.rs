//! Recorded work: dispatches of a step, the small data that the host adds to it, and the one
//! submission at its end.

use crate::gpu::{Buffer, Gpu};
use crate::kernels::{IMMEDIATES, Kernel, Kernels};
use dunlin_backend::BackendError;
use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

/// Words that the arena has at first.
const ARENA_WORDS: usize = 64 << 10;

/// Recorded commands after which they are submitted without waiting for the step's end: bounds
/// what an engine that never downloads could pile up.
const MOST_COMMANDS: usize = 1 << 14;

/// Bindings of the kernel with the most.
const MOST_BINDINGS: usize = 7;

/// One op at a time (behind a lock), in program order.
pub(crate) struct Recorder {
    gpu: Arc<Gpu>,
    kernels: Kernels,
    commands: Vec<Dispatch>,
    /// Bind groups by layout and buffers.
    groups: HashMap<((u32, u32), [u64; MOST_BINDINGS]), wgpu::BindGroup>,
    arena: Arc<Buffer>,
    words: Vec<u32>,
    /// Where each piece of `words` lies: a step repeats its pieces in every layer.
    pieces: Vec<Range<usize>>,
    staging: Option<Buffer>,
}

struct Dispatch {
    pipeline: wgpu::ComputePipeline,
    group: wgpu::BindGroup,
    immediates: [u32; IMMEDIATES as usize / 4],
    size: (u32, u32),
}

impl Recorder {
    pub fn new(gpu: Arc<Gpu>) -> Result<Self, BackendError> {
        let arena = Arc::new(gpu.storage((ARENA_WORDS * 4) as u64, "a step's arena")?);
        Ok(Self {
            kernels: Kernels::new(&gpu),
            gpu,
            commands: Vec::new(),
            groups: HashMap::new(),
            arena,
            words: Vec::new(),
            pieces: Vec::new(),
            staging: None,
        })
    }

    /// Begins an op that [puts](Self::put) pieces of `words` words together.
    pub fn begin(&mut self, words: usize) -> Result<(), BackendError> {
        self.gpu.check()?;
        let capacity = (self.arena.bytes / 4) as usize;
        if self.words.len() + words > capacity || self.commands.len() >= MOST_COMMANDS {
            self.submit()?;
        }
        if words > capacity {
            let bytes = (words.next_power_of_two() * 4) as u64;
            self.arena = Arc::new(self.gpu.storage(bytes, "a step's arena")?);
        }
        Ok(())
    }

    /// Adds a piece to the arena, or finds it there; returns its offset in words.
    pub fn put(&mut self, piece: &[u32]) -> u32 {
        let known = self.pieces.iter().find(|at| self.words[(*at).clone()] == *piece);
        let start = known.map(|at| at.start).unwrap_or_else(|| {
            let start = self.words.len();
            self.words.extend_from_slice(piece);
            self.pieces.push(start..self.words.len());
            start
        });
        debug_assert!(self.words.len() * 4 <= self.arena.bytes as usize);
        crate::tensor::word(start)
    }

    /// The buffer that the pieces of the op under way will be in.
    pub fn arena(&self) -> Arc<Buffer> {
        self.arena.clone()
    }

    /// Records a kernel over `size` workgroups. `params` are the words of its parameters.
    pub fn dispatch(
        &mut self,
        kernel: Kernel,
        read: &[&Buffer],
        write: &[&Buffer],
        params: &[u32],
        size: (u32, u32),
    ) -> Result<(), BackendError> {
        if size.0 == 0 || size.1 == 0 {
            return Ok(());
        }
        let most = self.gpu.limits.max_compute_workgroups_per_dimension;
        if size.0 > most || size.1 > most {
            let detail = format!("{kernel:?}: {size:?} workgroups, {most} a dimension is the most");
            return Err(BackendError::Shape { op: "dispatch", detail });
        }
        let pipeline = self.kernels.pipeline(&self.gpu, kernel)?;
        let group = self.group(kernel.bindings(), read, write);
        let mut immediates = [0; IMMEDIATES as usize / 4];
        immediates[..params.len()].copy_from_slice(params);
        self.commands.push(Dispatch { pipeline, group, immediates, size });
        Ok(())
    }

    fn group(
        &mut self,
        bindings: (u32, u32),
        read: &[&Buffer],
        write: &[&Buffer],
    ) -> wgpu::BindGroup {
        debug_assert_eq!(bindings, (read.len() as u32, write.len() as u32));
        let mut ids = [u64::MAX; MOST_BINDINGS];
        for (id, buffer) in ids.iter_mut().zip(read.iter().chain(write)) {
            *id = buffer.id;
        }
        if let Some(made) = self.groups.get(&(bindings, ids)) {
            return made.clone();
        }
        let entries: Vec<_> = read
            .iter()
            .chain(write)
            .zip(0..)
            .map(|(buffer, binding)| wgpu::BindGroupEntry {
                binding,
                resource: buffer.raw.as_entire_binding(),
            })
            .collect();
        let layout = self.kernels.layout(&self.gpu, bindings);
        let made = self.gpu.device.create_bind_group(&wgpu::BindGroupDescriptor {
            label: None,
            layout,
            entries: &entries,
        });
        self.gpu.count(|c| c.bind_groups += 1);
        self.groups.insert((bindings, ids), made.clone());
        made
    }

    /// Hands all that is recorded to the device.
    pub fn submit(&mut self) -> Result<(), BackendError> {
        if self.commands.is_empty() {
            self.words.clear();
            self.pieces.clear();
            return Ok(());
        }
        let encoder = self.encode();
        self.gpu.submit(Some(encoder.finish()));
        self.gpu.check()
    }

    /// The same, followed by reading these parts of buffers, which `take` gets one after the other:
    /// the step's one wait. Parts begin and end on whole words.
    pub fn read(
        &mut self,
        from: &[(&Buffer, Range<u64>)],
        take: impl FnMut(&[u8]),
    ) -> Result<(), BackendError> {
        self.gpu.check()?;
        let size = |part: &Range<u64>| part.end - part.start;
        let bytes = from.iter().map(|(_, part)| size(part)).sum();
        if bytes == 0 {
            return Ok(());
        }
        if self.staging.as_ref().is_none_or(|s| s.bytes < bytes) {
            self.staging = Some(self.gpu.staging(bytes)?);
        }
        let mut encoder = self.encode();
        let Some(staging) = &self.staging else { return Err(self.gpu.lost("no staging buffer")) };
        let mut to = 0;
        for (buffer, part) in from.iter().filter(|(_, part)| size(part) > 0) {
            encoder.copy_buffer_to_buffer(&buffer.raw, part.start, &staging.raw, to, size(part));
            to += size(part);
        }
        let submission = self.gpu.submit(Some(encoder.finish()));
        let read = self.gpu.read(staging, bytes, submission, take);
        if read.is_err() {
            // It may be mapped still.
            self.staging = None;
        }
        self.kernels.keep(&self.gpu);
        read
    }

    /// Encodes what is recorded, and forgets it and what belonged to buffers that are gone.
    fn encode(&mut self) -> wgpu::CommandEncoder {
        if !self.words.is_empty() {
            self.gpu.queue.write_buffer(&self.arena.raw, 0, bytemuck::cast_slice(&self.words));
        }
        let mut encoder = self.gpu.device.create_command_encoder(&Default::default());
        {
            let mut pass = encoder.begin_compute_pass(&Default::default());
            for d in &self.commands {
                pass.set_pipeline(&d.pipeline);
                pass.set_bind_group(0, &d.group, &[]);
                pass.set_immediates(0, bytemuck::cast_slice(&d.immediates));
                pass.dispatch_workgroups(d.size.0, d.size.1, 1);
            }
        }
        self.commands.clear();
        self.words.clear();
        self.pieces.clear();
        let gone = self.gpu.take_dropped();
        if !gone.is_empty() {
            self.groups.retain(|(_, ids), _| !ids.iter().any(|id| gone.contains(id)));
        }
        encoder
    }
}
