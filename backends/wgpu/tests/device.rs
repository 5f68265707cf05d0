//! What goes wrong on a device is a typed error, and only that.

mod common;

use common::*;
use dunlin_backend::{Backend, BackendError, DType, KvSpec, LinearPart, Part};
use dunlin_suite::attention::case;
use dunlin_suite::ops::linear;
use dunlin_suite::roofline::{Meter, Model, Shape, Step};
use dunlin_wgpu::{Counts, Product, WgpuBackend, WgpuError, WgpuOptions, adapters};

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
    b.lose().unwrap();
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
    // The API's name stands in the driver's description.
    let api = all[0].driver.rsplit(", ").next().unwrap().to_lowercase();
    assert!(WgpuBackend::open(&format!("wgpu:{api}:0")).is_ok(), "{api}");
    match WgpuBackend::open("wgpu:200").map(drop) {
        Err(WgpuError::NoSuchAdapter { have, .. }) => assert!(have.contains("wgpu:0"), "{have}"),
        other => panic!("{other:?}"),
    }
    assert!(matches!(WgpuBackend::open("wgpu:").map(drop), Err(WgpuError::BadId { .. })));
}

/// Weights stay as the file has them: what is uploaded is the blocks in another order.
#[test]
fn weights_take_what_their_file_takes() {
    for dtype in DType::ALL {
        let t = matrix(&mut Random::new(2), dtype, 96, 1024);
        let bytes = device().weight_bytes(&device().weight(&t, &Part::all(&t)).unwrap());
        let most = t.data.len() as u64 * 101 / 100 + 32;
        assert!(bytes <= most, "{dtype:?}: {bytes} bytes for {}", t.data.len());
    }
}

/// A step is one submission and one wait, allocates and makes nothing, and brings back a token: no
/// logits.
#[test]
fn a_step_is_one_submission_that_makes_nothing_and_brings_back_ids() {
    const STEPS: u64 = 4;
    let shape = Shape {
        hidden: 64,
        inner: 128,
        layers: 3,
        heads: 4,
        kv_heads: 2,
        head_dim: 16,
        vocab: 4000,
        dtypes: (DType::Q4_0, DType::Q8_0),
    };
    for fast in [false, true] {
        let mut b = open();
        if fast {
            b.use_packed(Product::Rows(1, 1), Product::Rows(4, 4));
        }
        let mut model = Model::new(&b, shape).unwrap();
        for step in [Step { rows: 1, past: 40 }, Step { rows: 5, past: 600 }] {
            let mut made = |runs| {
                let before = b.counts();
                model.step(step, Meter { runs, busy: None }).unwrap();
                b.counts().since(&before)
            };
            made(1);
            // What a run of some steps costs beside a run of fewer: the tensors are the same.
            let few = made(1);
            let more = made(1 + STEPS as usize).since(&few);
            let bytes_read = more.bytes_read;
            assert!(bytes_read <= 64 * STEPS, "{bytes_read} bytes read in {STEPS} steps");
            let want = Counts { submissions: STEPS, waits: STEPS, bytes_read, ..Counts::default() };
            assert_eq!(more, want, "{step:?}");
        }
    }
}

fn open_in(folder: &std::path::Path) -> WgpuBackend {
    let options = WgpuOptions { cache: Some(folder.into()), ..WgpuOptions::default() };
    WgpuBackend::open_with(&test_id(), &options).expect("an adapter")
}

/// A file that is damaged, of another driver, or impossible is passed over and written anew.
#[test]
fn what_was_measured_is_kept_and_never_trusted_blindly() {
    let folder = tempfile::tempdir().unwrap();
    let first = open_in(folder.path());
    let files = |end: &str| -> Vec<std::path::PathBuf> {
        let all = std::fs::read_dir(folder.path()).unwrap().map(|f| f.unwrap().path());
        all.filter(|f| f.to_str().unwrap().ends_with(end)).collect()
    };
    let [file] = &files(".tuning.json")[..] else { panic!("{:?}", files("")) };
    let good = std::fs::read_to_string(file).unwrap();
    assert!(files(".tmp").is_empty());
    let other_driver = good.replace("\"driver\": \"", "\"driver\": \"another ");
    let other_shaders = good.replace("\"shaders\": ", "\"shaders\": 1");
    let impossible = good.replace("\"slots\": ", "\"slots\": 9");
    for bad in [
        "",
        "{}",
        "\u{0}\u{1}",
        &good[..good.len() / 2],
        &other_driver,
        &other_shaders,
        &impossible,
    ] {
        assert_ne!(bad, good, "the file has other fields");
        std::fs::write(file, bad).unwrap();
        assert_eq!(open_in(folder.path()).tuning(), first.tuning());
        assert_eq!(std::fs::read_to_string(file).unwrap(), good);
    }
    // Where it cannot be written, that is no error.
    let file = folder.path().join("no-folder");
    std::fs::write(&file, "").unwrap();
    assert_eq!(open_in(&file).tuning(), first.tuning());

    // Compiled pipelines, where the driver gives any: damaged ones as well.
    for file in files(".pipelines") {
        let good = std::fs::read(&file).unwrap();
        assert!(good.len() > 16);
        for bad in [&good[..7], &good[..good.len() - 1], &[0; 64][..]] {
            std::fs::write(&file, bad).unwrap();
            let b = open_in(folder.path());
            let x = b.tensor(2, 40).unwrap();
            let mut y = b.tensor(2, 40).unwrap();
            b.add(&mut y, &x).unwrap();
            assert_eq!(download(&b, &y), [0.0; 80]);
            drop(b);
            let anew = std::fs::read(&file).unwrap();
            assert_ne!(anew, bad);
        }
    }
}

/// Weights are cut by rows and KV stores by heads where a binding is too small for them; what cannot
/// be cut is refused.
#[test]
fn a_small_binding_changes_no_bits() {
    const LIMIT: u64 = 512 << 10;
    let options = WgpuOptions { binding_bytes: Some(LIMIT), ..WgpuOptions::default() };
    let small = WgpuBackend::open_with(&test_id(), &options).expect("an adapter");
    let mut r = Random::new(9);
    for dtype in [DType::F32, DType::Q8_0, DType::Q4_K, DType::Q5_1] {
        let t = matrix(&mut r, dtype, 1700, 1024);
        assert!(t.data.len() as u64 > LIMIT, "{dtype:?} has to be cut");
        let (part, x) = (Part::all(&t), r.floats(3 * 1024));
        let bias = r.floats(1700);
        let want = linear(device(), &t, &part, Some(&bias), &x);
        assert!(same_bits(&linear(&small, &t, &part, Some(&bias), &x), &want), "{dtype:?}");
        let ids = [0, 1699, 733, 5];
        let embed = |b: &WgpuBackend| {
            let (table, mut out) = (b.weight(&t, &part).unwrap(), b.tensor(4, 1024).unwrap());
            b.embed(&table, &ids, 0.5, &mut out).unwrap();
            download(b, &out)
        };
        assert!(same_bits(&embed(&small), &embed(device())), "{dtype:?}");
    }
    let mut cut = 0;
    for seed in 0..40 {
        let mut c = case(seed);
        // Two heads of this store fit a binding, or one of its copies.
        let head = c.spec.head_dim.div_ceil(4) * 16 * c.spec.block_tokens;
        c.spec.blocks = (LIMIT as usize * 3 / 8) / head;
        if c.spec.blocks <= c.blocks.len() || 4 * c.q.len() as u64 > LIMIT {
            continue;
        }
        cut += 1;
        let want = c.run(device(), &[c.tokens]);
        assert!(same_bits(&c.run(&small, &[c.tokens]), &want), "seed {seed}");
        c.check_copies(&small);
    }
    assert!(cut > 5, "{cut} stores were cut");
    match small.tensor(1 << 10, 1 << 10).map(drop) {
        Err(BackendError::OutOfMemory { need, free, .. }) => assert!(need > free),
        other => panic!("{other:?}"),
    }
}
