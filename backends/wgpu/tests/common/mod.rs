//! The adapter that the tests run on.
#![allow(dead_code)]

use dunlin_wgpu::WgpuBackend;
use std::sync::OnceLock;

#[allow(unused_imports)]
pub use dunlin_suite::random::*;

/// The first adapter, or the one that `DUNLIN_TEST_WGPU` names. Without one a test fails: what it
/// is about was not looked at.
pub fn device() -> &'static WgpuBackend {
    static DEVICE: OnceLock<WgpuBackend> = OnceLock::new();
    DEVICE.get_or_init(open)
}

/// The adapter that tests run on.
pub fn test_id() -> String {
    std::env::var("DUNLIN_TEST_WGPU").unwrap_or_else(|_| "wgpu:0".into())
}

/// One of the test's own, to be broken.
pub fn open() -> WgpuBackend {
    WgpuBackend::open(&test_id())
        .unwrap_or_else(|e| panic!("{e}: run tools/test, which installs a software driver"))
}
