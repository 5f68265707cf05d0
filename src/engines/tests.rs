//! A graphics device that is lost costs its shard its step; the shard that follows computes the same.

use std::path::Path;

use dunlin_backend::BackendError;
use dunlin_model::engine::{Alone, Batch, BatchSeq, EngineError, StageOutput};

use super::*;

#[test]
fn a_lost_adapter_is_opened_anew_with_its_weights() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/tiny-llama");
    let files = ModelFiles::open(&folder).expect("a model");
    let spec = StageSpec {
        layers: 0..files.spec().layers,
        first: true,
        last: false,
        rank: 0,
        ranks: 1,
        kv_blocks: 2,
        block_tokens: 16,
        max_tokens: 16,
    };
    let open = || WgpuBackend::open("wgpu:0");
    let first = open().unwrap_or_else(|e| panic!("{e}: run tools/test, which installs a driver"));
    let held = Held::new(first, "an adapter".into(), open, WgpuBackend::broken);
    let seq = BatchSeq {
        request: 1,
        tokens: vec![1, 2, 3],
        position: 0,
        blocks: vec![1],
        sample: None,
        prompt_logprobs: None,
    };
    let batch = Batch { seqs: vec![seq], ..Batch::default() };

    let mut engine = held.build(&files, &spec).expect("an engine");
    let want = engine.step(&batch, None, &mut Alone).expect("a step");
    assert!(matches!(&want, StageOutput::Hidden(values) if values.iter().any(|v| *v != 0.0)));
    held.state().backend.lose().expect("an adapter can be lost");
    let lost = engine.step(&batch, None, &mut Alone);
    let told = matches!(&lost, Err(EngineError::Backend(BackendError::DeviceLost { .. })));
    assert!(told, "{lost:?}");
    let mut next = held.build(&files, &spec).expect("opened anew");
    assert_eq!(next.step(&batch, None, &mut Alone), Ok(want));
}

/// Blocks of one type are of no use to another: the caches of the three never meet.
#[test]
fn the_type_of_kv_is_part_of_the_cache_namespace_and_of_the_plan() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/tiny-llama");
    let shape = |kv| {
        let files = ModelFiles::open(&folder).expect("a model");
        TransformerShape::new("tiny", files, Precision::Fast, kv)
    };
    let stage = StageSpec {
        layers: 0..1,
        first: true,
        last: false,
        rank: 0,
        ranks: 1,
        kv_blocks: 2,
        block_tokens: 16,
        max_tokens: 16,
    };
    let [f32, f16, int8] = KvDtype::ALL.map(shape);
    let spaces = [&f32, &f16, &int8].map(|shape| shape.cache_namespace());
    assert!(spaces[0] != spaces[1] && spaces[1] != spaces[2] && spaces[0] != spaces[2]);
    let bytes = [&f32, &f16, &int8].map(|shape| shape.kv_block_bytes(&stage));
    assert!(bytes[0] == 2 * bytes[1] && bytes[1] > bytes[2], "{bytes:?}");
}
