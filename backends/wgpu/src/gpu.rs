//! An opened device: its health, its buffers and what they take, and reading back.
//!
//! wgpu's default is to panic on an error that nobody caught. Here every error is caught: creation
//! runs in error scopes, and what still slips through, like the loss of the device, makes the
//! device unusable: every later call is refused with the first reason.

use crate::adapter::WgpuOptions;
use crate::memory;
use crate::store::Store;
use dunlin_backend::BackendError;
use parking_lot::Mutex;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc;
use std::time::Duration;

/// How long one submission may take before the device counts as hung.
const PATIENCE: Duration = Duration::from_secs(120);

/// Bytes written to new buffers before the copies are waited for: bounds the host's staging memory.
const UPLOAD_STEP: u64 = 64 << 20;

pub(crate) struct Gpu {
    pub device: wgpu::Device,
    pub queue: wgpu::Queue,
    /// As `cluster.toml` has it.
    pub id: String,
    pub description: String,
    /// The adapter computes on the host's processor.
    pub software: bool,
    pub limits: wgpu::Limits,
    /// What is kept on disk, if anything is.
    pub store: Option<Store>,
    binding_bytes: u64,
    total: u64,
    used: AtomicU64,
    uploaded: AtomicU64,
    next_buffer: AtomicU64,
    /// Ids of buffers that are gone: what was cached for them can go too.
    dropped: Mutex<Vec<u64>>,
    broken: Arc<Mutex<Option<String>>>,
    counts: Mutex<Counts>,
}

/// What was asked of a driver so far.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Counts {
    pub submissions: u64,
    pub waits: u64,
    pub buffers: u64,
    pub bind_groups: u64,
    pub pipelines: u64,
    /// Bytes that came back to the host.
    pub bytes_read: u64,
}

/// A device buffer with an id that is never used again.
pub(crate) struct Buffer {
    pub raw: wgpu::Buffer,
    pub id: u64,
    pub bytes: u64,
    gpu: Arc<Gpu>,
}

impl Gpu {
    pub fn new(
        id: &str,
        adapter: &wgpu::Adapter,
        options: &WgpuOptions,
        device: wgpu::Device,
        queue: wgpu::Queue,
    ) -> Self {
        let info = adapter.get_info();
        let broken = Arc::new(Mutex::new(None));
        let first = |slot: &Mutex<Option<String>>, reason: String| {
            tracing::error!(%reason, "graphics device broken");
            slot.lock().get_or_insert(reason);
        };
        let slot = broken.clone();
        device.on_uncaptured_error(Arc::new(move |e: wgpu::Error| first(&slot, e.to_string())));
        let slot = broken.clone();
        device.set_device_lost_callback(move |why, text| {
            first(&slot, format!("{why:?}: {text}"));
        });
        let limits = device.limits();
        let own = limits.max_storage_buffer_binding_size.min(limits.max_buffer_size);
        Self {
            binding_bytes: options.binding_bytes.map_or(own, |most| most.min(own)),
            store: options.cache.as_ref().map(|folder| Store::new(folder, &info)),
            limits,
            device,
            queue,
            id: id.to_owned(),
            description: format!("{}, {} {}", info.name, info.driver, info.driver_info),
            software: info.device_type == wgpu::DeviceType::Cpu,
            total: memory::total(adapter),
            used: AtomicU64::new(0),
            uploaded: AtomicU64::new(0),
            next_buffer: AtomicU64::new(0),
            dropped: Mutex::new(Vec::new()),
            broken,
            counts: Mutex::default(),
        }
    }

    /// Refuses work where the device is lost or has failed before.
    pub fn check(&self) -> Result<(), BackendError> {
        let reason = self.broken.lock().clone();
        match reason {
            Some(reason) => Err(BackendError::DeviceLost { device: self.id.clone(), reason }),
            None => Ok(()),
        }
    }

    /// The error of a device that has failed, from now on for every call.
    pub fn lost(&self, reason: impl Into<String>) -> BackendError {
        let reason = self.broken.lock().get_or_insert(reason.into()).clone();
        BackendError::DeviceLost { device: self.id.clone(), reason }
    }

    pub fn counts(&self) -> Counts {
        *self.counts.lock()
    }

    pub fn count(&self, note: impl FnOnce(&mut Counts)) {
        note(&mut self.counts.lock());
    }

    /// Hands over commands.
    pub fn submit(&self, commands: Option<wgpu::CommandBuffer>) -> wgpu::SubmissionIndex {
        self.count(|c| c.submissions += 1);
        self.queue.submit(commands)
    }

    /// Whether the device was opened with a feature.
    pub fn has(&self, feature: wgpu::Features) -> bool {
        self.device.features().contains(feature)
    }

    pub fn total_bytes(&self) -> u64 {
        self.total
    }

    pub fn free_bytes(&self) -> u64 {
        let rest = self.total.saturating_sub(self.used.load(Ordering::Relaxed));
        if self.software { rest.min(memory::system_free()) } else { rest }
    }

    /// The most bytes of a buffer that kernels can bind.
    pub fn binding_bytes(&self) -> u64 {
        self.binding_bytes
    }

    /// A zeroed buffer that kernels can use.
    pub fn storage(self: &Arc<Self>, bytes: u64, what: &str) -> Result<Buffer, BackendError> {
        let usage = wgpu::BufferUsages::STORAGE
            | wgpu::BufferUsages::COPY_DST
            | wgpu::BufferUsages::COPY_SRC;
        self.buffer(bytes, usage, self.binding_bytes(), what)
    }

    /// A buffer that the host reads.
    pub fn staging(self: &Arc<Self>, bytes: u64) -> Result<Buffer, BackendError> {
        let usage = wgpu::BufferUsages::MAP_READ | wgpu::BufferUsages::COPY_DST;
        self.buffer(bytes, usage, self.limits.max_buffer_size, "a staging buffer")
    }

    fn buffer(
        self: &Arc<Self>,
        bytes: u64,
        usage: wgpu::BufferUsages,
        most: u64,
        what: &str,
    ) -> Result<Buffer, BackendError> {
        self.check()?;
        let free = self.free_bytes();
        let refuse = |free| BackendError::OutOfMemory {
            device: self.id.clone(),
            what: what.to_owned(),
            need: bytes,
            free,
        };
        if bytes > free {
            return Err(refuse(free));
        }
        if bytes > most {
            return Err(refuse(most));
        }
        let size = bytes.max(16).next_multiple_of(16);
        let descriptor =
            wgpu::BufferDescriptor { label: Some(what), size, usage, mapped_at_creation: false };
        let invalid = self.device.push_error_scope(wgpu::ErrorFilter::Validation);
        let memory = self.device.push_error_scope(wgpu::ErrorFilter::OutOfMemory);
        let raw = self.device.create_buffer(&descriptor);
        let memory = pollster::block_on(memory.pop());
        let invalid = pollster::block_on(invalid.pop());
        if memory.is_some() {
            return Err(refuse(free));
        }
        if let Some(e) = invalid {
            return Err(self.lost(e.to_string()));
        }
        self.used.fetch_add(size, Ordering::Relaxed);
        self.count(|c| c.buffers += 1);
        let id = self.next_buffer.fetch_add(1, Ordering::Relaxed);
        Ok(Buffer { raw, id, bytes: size, gpu: self.clone() })
    }

    /// Fills a new buffer (no recorded work may use it yet) and waits now and then.
    pub fn fill(&self, buffer: &Buffer, words: &[u32]) -> Result<(), BackendError> {
        if words.is_empty() {
            return Ok(());
        }
        self.queue.write_buffer(&buffer.raw, 0, bytemuck::cast_slice(words));
        let pending = self.uploaded.fetch_add(buffer.bytes, Ordering::Relaxed) + buffer.bytes;
        if pending > UPLOAD_STEP {
            self.uploaded.store(0, Ordering::Relaxed);
            let submission = self.submit(None);
            self.wait(submission)?;
        }
        self.check()
    }

    /// Waits for a submission.
    pub fn wait(&self, submission: wgpu::SubmissionIndex) -> Result<(), BackendError> {
        let poll =
            wgpu::PollType::Wait { submission_index: Some(submission), timeout: Some(PATIENCE) };
        self.count(|c| c.waits += 1);
        let waited = self.device.poll(poll);
        self.check()?;
        waited.map(drop).map_err(|e| self.lost(format!("waiting {PATIENCE:?}: {e}")))
    }

    /// Reads the first `bytes` of a staging buffer after `submission`.
    pub fn read(
        &self,
        staging: &Buffer,
        bytes: u64,
        submission: wgpu::SubmissionIndex,
        mut take: impl FnMut(&[u8]),
    ) -> Result<(), BackendError> {
        let (send, receive) = mpsc::channel();
        staging.raw.map_async(wgpu::MapMode::Read, 0..bytes, move |result| {
            // Nobody listens any more where waiting failed.
            let _ = send.send(result);
        });
        self.wait(submission)?;
        self.count(|c| c.bytes_read += bytes);
        let mapped = receive.try_recv().map_err(|_| self.lost("a mapping got no answer"))?;
        mapped.map_err(|e| self.lost(format!("mapping: {e}")))?;
        {
            let view = staging.raw.get_mapped_range(0..bytes);
            let view = view.map_err(|e| self.lost(format!("mapping: {e}")))?;
            take(&view);
        }
        staging.raw.unmap();
        Ok(())
    }

    /// Buffers that went since the last call.
    pub fn take_dropped(&self) -> Vec<u64> {
        std::mem::take(&mut *self.dropped.lock())
    }
}

impl Counts {
    /// What came after `before`.
    pub fn since(&self, before: &Counts) -> Counts {
        Counts {
            submissions: self.submissions - before.submissions,
            waits: self.waits - before.waits,
            buffers: self.buffers - before.buffers,
            bind_groups: self.bind_groups - before.bind_groups,
            pipelines: self.pipelines - before.pipelines,
            bytes_read: self.bytes_read - before.bytes_read,
        }
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        self.gpu.used.fetch_sub(self.bytes, Ordering::Relaxed);
        self.gpu.dropped.lock().push(self.id);
    }
}
