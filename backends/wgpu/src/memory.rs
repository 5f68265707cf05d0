//! How much memory an adapter has. WebGPU does not say, so it is asked of the driver where that is
//! known, and of the system for adapters that live in its memory.

/// Bytes that an adapter has in all.
pub(crate) fn total(adapter: &wgpu::Adapter) -> u64 {
    match adapter.get_info().device_type {
        wgpu::DeviceType::Cpu => meminfo("MemTotal:").unwrap_or(UNKNOWN),
        _ => device_local(adapter).unwrap_or(UNKNOWN),
    }
}

/// Bytes that the system could still give to an adapter that lives in its memory.
pub(crate) fn system_free() -> u64 {
    meminfo("MemAvailable:").unwrap_or(UNKNOWN)
}

/// Where nobody says, plan for a small device.
const UNKNOWN: u64 = 8 << 30;

/// The largest heap of device memory.
#[cfg(not(any(target_os = "macos", windows)))]
fn device_local(adapter: &wgpu::Adapter) -> Option<u64> {
    // SAFETY: the handles are used within this call only, for a query that changes nothing.
    let heaps = unsafe {
        let vulkan = adapter.as_hal::<wgpu::hal::api::Vulkan>()?;
        let instance = vulkan.shared_instance().raw_instance();
        instance.get_physical_device_memory_properties(vulkan.raw_physical_device())
    };
    let count = usize::try_from(heaps.memory_heap_count).ok()?;
    // Bit 0 of a heap's flags: device local.
    let local = heaps.memory_heaps.iter().take(count).filter(|h| h.flags.as_raw() & 1 != 0);
    local.map(|h| h.size).max()
}

#[cfg(any(target_os = "macos", windows))]
fn device_local(_: &wgpu::Adapter) -> Option<u64> {
    None
}

fn meminfo(key: &str) -> Option<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|l| l.strip_prefix(key))?;
    line.split_whitespace().next()?.parse::<u64>().ok()?.checked_mul(1024)
}
