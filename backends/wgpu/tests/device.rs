//! What goes wrong on a device is a typed error, and only that.

mod common;

use common::*;
use dunlin_backend::{Backend, BackendError, DType, KvSpec, LinearPart, Part};
use dunlin_wgpu::{WgpuBackend, WgpuError, adapters};

#[test]
fn a_lost_device_refuses_work_and_a_new_one_takes_it() {
    let b = open();
    let t = matrix(&mut Random::new(1), DType::Q4_0, 40, 64);
    let w = b.weight(&t, &Part::all(&t)).unwrap();
    let (x, mut y) = (b.tensor(3, 64).unwrap(), b.tensor(3, 40).unwrap());
    let run = |y: &mut _| {
        b.linear(&x, &mut [LinearPart { weight: &w, bias: None, out: y }])?;
        b.download(y, &mut Vec::new())
    };
    run(&mut y).expect("a sound device");
    assert!(!b.broken());
    b.lose();
    let lost = |r: Result<(), BackendError>| match r {
        Err(BackendError::DeviceLost { device, .. }) => assert!(device.starts_with("wgpu:")),
        other => panic!("{other:?}"),
    };
    // The loss is told when the device is next waited for.
    lost(run(&mut y));
    assert!(b.broken());
    lost(run(&mut y));
    lost(b.tensor(1, 1).map(drop));
    lost(b.weight(&t, &Part::all(&t)).map(drop));
    lost(b.upload(&[0.0; 40], &mut y));
    assert!(!open().broken());
}

#[test]
fn too_much_is_out_of_memory_with_numbers() {
    let b = device();
    let spec = KvSpec { layers: 2, kv_heads: 4, head_dim: 64, blocks: 1 << 30, block_tokens: 16 };
    for blocks in [1 << 30, 1 << 58, usize::MAX] {
        match b.kv(&KvSpec { blocks, ..spec.clone() }) {
            Err(BackendError::OutOfMemory { need, free, .. }) => assert!(need > free),
            other => panic!("{:?}", other.map(|kv| kv.spec().clone())),
        }
    }
    let huge = b.tensor(1 << 26, 1 << 14);
    assert!(matches!(huge.map(drop), Err(BackendError::OutOfMemory { .. })));
    assert!(!b.broken(), "a refusal must not spoil the device");
}

#[test]
fn memory_is_given_back() {
    let b = open();
    let before = b.tensor(1, 1).map(|_| ()).and(Ok::<_, BackendError>(b.info())).unwrap();
    let t = b.tensor(1 << 14, 1 << 10).unwrap();
    let during = b.info();
    drop(t);
    assert!(before.total_bytes >= before.free_bytes && during.free_bytes <= during.total_bytes);
    // Enough rounds to run out if nothing were given back.
    for _ in 0..2000 {
        drop(b.tensor(1 << 14, 1 << 10).unwrap());
    }
}

#[test]
fn adapters_are_chosen_by_place_api_and_name() {
    let all = adapters();
    assert!(!all.is_empty(), "no adapter: run tools/test, which installs a software driver");
    assert_eq!(all[0].id, "wgpu:0");
    let word = all[0].name.split_whitespace().next().unwrap().to_uppercase();
    assert!(WgpuBackend::open(&format!("wgpu:{word}")).is_ok(), "{word}");
    match WgpuBackend::open("wgpu:200").map(drop) {
        Err(WgpuError::NoSuchAdapter { have, .. }) => assert!(have.contains("wgpu:0"), "{have}"),
        other => panic!("{other:?}"),
    }
    assert!(matches!(WgpuBackend::open("wgpu:").map(drop), Err(WgpuError::BadId { .. })));
}
