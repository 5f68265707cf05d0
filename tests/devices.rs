//! What the command line says of devices: all of them with what they reach, and one beside a copy and a
//! plain product. The adapter may be one in software (`tools/test` installs it).

use std::path::Path;
use std::process::{Command, Output};

use serde_json::Value;

const MODEL: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/data/tiny-llama");

fn dunlin(cache: &Path, args: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_dunlin"));
    command.args(args).env("DUNLIN_OFFLINE", "1").env("DUNLIN_CACHE", cache);
    command.output().expect("dunlin runs")
}

fn json(output: &Output) -> Value {
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{error}");
    serde_json::from_slice(&output.stdout).unwrap_or_else(|e| panic!("{e}: {error}"))
}

fn number(value: &Value, key: &str) -> f64 {
    value[key].as_f64().unwrap_or_else(|| panic!("{key} in {value}"))
}

#[test]
fn all_devices_are_listed_with_memory_features_and_rates() {
    let cache = tempfile::tempdir().expect("a folder");
    let found = json(&dunlin(cache.path(), &["devices", "--json"]));
    for id in ["cpu", "wgpu:0"] {
        let mut all = found.as_array().expect("a list").iter();
        let device = all.find(|d| d["id"] == id).unwrap_or_else(|| panic!("no {id} in {found}"));
        assert!(number(device, "memory_bytes") > 1e6, "{device}");
        assert_eq!(device["trouble"], Value::Null, "{device}");
        assert!(device["features"].is_array(), "{device}");
        let rates = &device["rates"];
        assert!(number(rates, "bytes_per_s") > 1e6, "{device}");
        assert!(number(rates, "matmul_flops_per_s") > 1e6, "{device}");
    }
    // What was measured of the adapter's kernels is kept for the next start.
    let kept = std::fs::read_dir(cache.path().join("adapters")).expect("a folder of adapters");
    let names = kept.map(|file| file.expect("a file").file_name().into_string().expect("a name"));
    assert!(names.into_iter().any(|name| name.ends_with(".tuning.json")));

    let listed = dunlin(cache.path(), &["devices", "--no-measure"]);
    let text = String::from_utf8_lossy(&listed.stdout).into_owned();
    assert!(text.starts_with("cpu  ") && text.contains("\nwgpu:0  "), "{text}");
}

#[test]
fn a_device_is_measured_beside_what_it_reaches() {
    let cache = tempfile::tempdir().expect("a folder");
    for device in ["cpu", "wgpu:0"] {
        let file = cache.path().join("roofline.json");
        let to = file.to_str().expect("a path");
        let args = ["bench", "--device", device, "--model", MODEL, "--json", to];
        let output = dunlin(cache.path(), &args);
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let text = std::fs::read_to_string(&file).expect("the report");
        let report: Value = serde_json::from_str(&text).expect("JSON");
        let ceiling = number(&report, "copy_bytes_per_s").max(number(&report, "read_bytes_per_s"));
        let steps = report["steps"].as_array().expect("steps");
        assert!(steps.len() >= 5, "{report}");
        for step in steps {
            let rate = number(step, "bytes") / number(step, "ms") * 1e3;
            let share = number(step, "share_of_bandwidth");
            assert!((rate / ceiling - share).abs() < 1e-6 * share, "{step}");
            assert!(number(step, "share_of_matmul") > 0.0, "{step}");
        }
        // A token of context is float16 keys and values: 4 layers of 4 heads of 8.
        let bytes = |past: u64| {
            let found = steps.iter().find(|s| s["rows"] == 1 && s["past"] == past);
            number(found.unwrap_or_else(|| panic!("a step after {past}")), "bytes")
        };
        assert_eq!(bytes(255) - bytes(0), 255.0 * 2.0 * 2.0 * 8.0 * 4.0 * 4.0, "{device}");
    }
    let unknown = dunlin(cache.path(), &["bench", "--device", "cuda:0", "--model", MODEL]);
    let text = String::from_utf8_lossy(&unknown.stderr).into_owned();
    assert!(!unknown.status.success() && text.contains("cuda:0"), "{text}");
}
