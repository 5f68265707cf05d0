//! Every kernel's text is valid WGSL and translates to SPIR-V: no adapter is needed.

use dunlin_wgpu::shader_texts;
use naga::valid::{Capabilities, ValidationFlags, Validator};

/// What every adapter has: parameters as immediates, and reading float16 out of a word.
const FLOOR: Capabilities = Capabilities::IMMEDIATES.union(Capabilities::SHADER_FLOAT16_IN_FLOAT32);
/// What some kernels use where there is more.
fn more(name: &str) -> Capabilities {
    if name.contains("subgroups: true") {
        Capabilities::SUBGROUP
    } else if name.contains("NativeF16") || name.contains("half: true") {
        Capabilities::SHADER_FLOAT16
    } else {
        Capabilities::empty()
    }
}

#[test]
fn all_texts_are_valid() {
    let texts = shader_texts();
    assert!(texts.len() > 60, "{} kernels", texts.len());
    for (name, text, entry) in texts {
        let module = naga::front::wgsl::parse_str(&text)
            .unwrap_or_else(|e| panic!("{name}: {}", e.emit_to_string(&text)));
        let info = Validator::new(ValidationFlags::all(), FLOOR | more(&name))
            .validate(&module)
            .unwrap_or_else(|e| panic!("{name}: {}", e.emit_to_string(&text)));
        let points: Vec<_> = module.entry_points.iter().map(|p| p.name.as_str()).collect();
        assert!(points.contains(&entry), "{name}: no entry point {entry} among {points:?}");
        let options = naga::back::spv::Options::default();
        naga::back::spv::write_vec(&module, &info, &options, None)
            .unwrap_or_else(|e| panic!("{name}: {e}"));
    }
}

/// Vulkan promises no more than this; an adapter with less than the floor is refused at opening.
#[test]
fn kernels_stay_within_the_floor_of_limits() {
    const INVOCATIONS: u32 = 128;
    const STORAGE_BUFFERS: usize = 8;
    for (name, text, entry) in shader_texts() {
        let module = naga::front::wgsl::parse_str(&text).expect("valid, see above");
        let buffers = module
            .global_variables
            .iter()
            .filter(|(_, v)| matches!(v.space, naga::AddressSpace::Storage { .. }))
            .count();
        assert!(buffers <= STORAGE_BUFFERS, "{name}: {buffers} storage buffers");
        let point = module.entry_points.iter().find(|p| p.name == entry).expect("see above");
        let threads: u32 = point.workgroup_size.iter().product();
        assert!(threads <= INVOCATIONS, "{name}: {threads} threads a workgroup");
    }
}
