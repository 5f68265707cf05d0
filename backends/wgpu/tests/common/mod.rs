//! The adapter that the tests run on.
#![allow(dead_code)]

use dunlin_backend::KvDtype;
use dunlin_wgpu::{WgpuBackend, WgpuOptions};
use std::sync::OnceLock;

#[allow(unused_imports)]
pub use dunlin_suite::random::*;

/// The first adapter, or the one that `DUNLIN_TEST_WGPU` names. Without one a test fails: what it
/// is about was not looked at.
pub fn device() -> &'static WgpuBackend {
    keeping(KvDtype::F32)
}

/// The same, with KV stores of this type.
pub fn keeping(kv: KvDtype) -> &'static WgpuBackend {
    static DEVICES: [OnceLock<WgpuBackend>; 3] = [const { OnceLock::new() }; 3];
    DEVICES[kv as usize].get_or_init(|| open_keeping(kv))
}

/// The adapter that tests run on.
pub fn test_id() -> String {
    std::env::var("DUNLIN_TEST_WGPU").unwrap_or_else(|_| "wgpu:0".into())
}

/// One of the test's own, to be broken.
pub fn open() -> WgpuBackend {
    open_keeping(KvDtype::F32)
}

pub fn open_keeping(kv: KvDtype) -> WgpuBackend {
    let options = WgpuOptions { kv: Some(kv), ..WgpuOptions::default() };
    WgpuBackend::open_with(&test_id(), &options)
        .unwrap_or_else(|e| panic!("{e}: run tools/test, which installs a software driver"))
}
