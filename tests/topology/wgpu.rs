//! The same on a graphics adapter, software or not: fewer variants, since it may be slow.

use crate::replica::{Models, Setup, work};
use dunlin_backend::Precision;
use dunlin_model::sampling::SamplingParams;
use dunlin_wgpu::{Product, WgpuBackend, WgpuOptions};

const OUTPUT: u32 = 6;

#[test]
fn nothing_changes_the_text_on_an_adapter() {
    nothing_changes_the_text(adapter(Precision::Exact));
}

/// Products of bytes, whatever the adapter would choose, and float16 KV.
#[test]
fn nothing_changes_the_text_on_an_adapter_in_fast_mode() {
    let mut backend = adapter(Precision::Fast);
    backend.use_packed(Product::Rows(1, 4), Product::Rows(4, 4));
    nothing_changes_the_text(backend);
}

fn adapter(precision: Precision) -> WgpuBackend {
    let options = WgpuOptions { precision, ..WgpuOptions::default() };
    WgpuBackend::open_with("wgpu:0", &options).unwrap_or_else(|e| panic!("{e}: run tools/test"))
}

fn nothing_changes_the_text(backend: WgpuBackend) {
    let models = Models::load(backend);
    let plain = Setup::default();
    let sampling = SamplingParams { logprobs: Some(10), ..SamplingParams::default() };
    let prompt: Vec<u32> = (0..37).map(|i| 504 + (i * 7919) % 4000).collect();
    let mine = || work(1, prompt.clone(), OUTPUT, &sampling);
    let alone = |setup: &Setup| models.replica(setup).run(vec![mine()]).remove(&1);
    let want = alone(&plain).expect("request 1 has a text");
    assert_eq!(want.ids.len(), OUTPUT as usize);
    for stages in [2, 3] {
        let setup = Setup { stages, ..plain.clone() };
        assert_eq!(alone(&setup).as_ref(), Some(&want), "{stages} stages");
    }
    let setup = Setup { chunk: 7, ..plain.clone() };
    assert_eq!(alone(&setup).as_ref(), Some(&want), "chunks of 7");
    let mut works = vec![mine()];
    works.extend((2..5).map(|id| {
        let prompt = (0..11 * id as u32).map(|j| 700 + (j * 104_729) % 9000).collect();
        work(id, prompt, OUTPUT, &sampling)
    }));
    let got = models.replica(&plain).run(works);
    assert_eq!(got.get(&1), Some(&want), "among 3 others");
    let mut replica = models.replica(&plain);
    for run in ["cold", "warm"] {
        assert_eq!(replica.run(vec![mine()]).get(&1), Some(&want), "{run} prefix cache");
    }
}
