//! Ten thousand requests, some of whose clients hang up, leave nothing behind.

use serde_json::Value;
use std::process::Command;

use crate::harness::{Cluster, wait_until};

/// What the memory of a process may still grow by once its pools are full: allocators and
/// buffers breathe. A leak of 3 KB a request would show.
const BREATH_KIB: u64 = 32 << 10;

#[test]
fn ten_thousand_requests_leave_nothing_behind() {
    // A KV pool that fills early, so that memory it has not touched yet is no growth later.
    let cluster = Cluster::start("examples/hash.toml", &["kv.memory=4MiB"]);
    load(&cluster, 5_000, 1);
    let before = memory(&cluster);
    let report = load(&cluster, 10_000, 2);
    let after = memory(&cluster);

    let count = |name: &str| report[name].as_u64().unwrap_or_else(|| panic!("{name}: {report}"));
    assert_eq!(count("done") + count("hung_up"), 10_000, "{report}");
    assert!((300..700).contains(&count("hung_up")), "{report}");
    for ((node, before), (_, after)) in before.iter().zip(&after) {
        assert!(*after <= before + BREATH_KIB, "{node} grew from {before} to {after} KiB");
    }
    wait_until("nothing is held", || {
        let router = &cluster.status()["router"];
        let idle = |replica: &Value| {
            let load = &replica["load"];
            ["running", "waiting", "kv_blocks_live"].iter().all(|name| load[*name] == 0)
        };
        router["open_requests"] == 0
            && router["replicas"]
                .as_array()
                .is_some_and(|all| all.len() == 2 && all.iter().all(idle))
    });
    assert_eq!((cluster.failures(), cluster.replays()), (0, 0));
}

/// Runs the project's own load generator; returns its report.
fn load(cluster: &Cluster, requests: usize, seed: u64) -> Value {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let file = folder.path().join("report.json");
    let output = Command::new(env!("CARGO_BIN_EXE_dunlin"))
        .args(["bench", "--url", &format!("http://127.0.0.1:{}", cluster.http)])
        .args(["-n", &requests.to_string(), "-c", "32", "--seed", &seed.to_string()])
        .args(["--prompt-tokens", "uniform:8..128", "--output-tokens", "uniform:4..48"])
        .args(["--disconnect", "0.05", "--shared-prefix", "0.3", "--token-ids", "10..200"])
        .arg("--json")
        .arg(&file)
        .output()
        .expect("the bench starts");
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{errors}");
    let text = std::fs::read_to_string(file).expect("the report is written");
    serde_json::from_str::<Value>(&text).expect("the report is JSON")["report"].clone()
}

/// Resident memory of each node's process, in KiB.
fn memory(cluster: &Cluster) -> Vec<(&'static str, u64)> {
    let resident = |node| {
        let path = format!("/proc/{}/status", cluster.pid(node));
        let text = std::fs::read_to_string(path).expect("the node runs");
        let line = text.lines().find(|line| line.starts_with("VmRSS:")).expect("a size");
        line.split_whitespace().nth(1).and_then(|n| n.parse().ok()).expect("a number")
    };
    ["front", "left", "right"].map(|node| (node, resident(node))).to_vec()
}
