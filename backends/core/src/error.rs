//! Errors of a backend, with the numbers a person needs to act on them.

/// Why a device could not do what it was asked.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum BackendError {
    /// A buffer did not fit into the device's memory.
    #[error("{device}: out of memory: {what} needs {need} bytes, {free} bytes are free")]
    OutOfMemory { device: String, what: String, need: u64, free: u64 },
    /// A weight's element type has no kernel on this device.
    #[error("{device}: tensor '{tensor}' has type {dtype:?}, which this backend cannot read")]
    UnsupportedType { device: String, tensor: String, dtype: crate::DType },
    /// A weight, slice or activation has a shape the operation cannot take.
    #[error("{op}: {detail}")]
    Shape { op: &'static str, detail: String },
    /// The device is gone or refuses work; the process that owns it should be replaced.
    #[error("{device}: device lost: {reason}")]
    DeviceLost { device: String, reason: String },
}
