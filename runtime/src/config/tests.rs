use std::path::{Path, PathBuf};

use proptest::prelude::*;

use super::*;

fn folder(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(path)
}

fn tomls(folder: &Path) -> Vec<PathBuf> {
    let mut files: Vec<PathBuf> = std::fs::read_dir(folder)
        .unwrap_or_else(|e| panic!("{}: {e}", folder.display()))
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.extension().is_some_and(|extension| extension == "toml"))
        .collect();
    files.sort();
    files
}

fn default_text() -> String {
    std::fs::read_to_string(folder("../cluster.toml")).unwrap()
}

fn default_config() -> ClusterConfig {
    ClusterConfig::parse(&default_text(), "cluster.toml").unwrap()
}

fn name(text: &str) -> NodeName {
    NodeName::new(text).unwrap()
}

/// Each `NAME.toml` is refused with the words of `NAME.txt`.
/// `DUNLIN_UPDATE_GOLDENS=1` writes the latter anew: read the difference before committing it.
#[test]
fn every_wrong_file_gets_its_message() {
    let update = std::env::var_os("DUNLIN_UPDATE_GOLDENS").is_some();
    let files = tomls(&folder("tests/data/config"));
    assert!(files.len() > 40, "only {} cases", files.len());
    let mut wrong = Vec::new();
    for file in files {
        let text = std::fs::read_to_string(&file).unwrap();
        let message = match ClusterConfig::parse(&text, "cluster.toml") {
            Ok(_) => panic!("{} was accepted", file.display()),
            Err(e) => format!("{e}\n"),
        };
        let golden = file.with_extension("txt");
        if update {
            std::fs::write(&golden, &message).unwrap();
        } else if std::fs::read_to_string(&golden).unwrap_or_default() != message {
            wrong.push(format!("{}:\n{message}", golden.display()));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn the_default_cluster_and_all_examples_are_accepted() {
    let mut files = tomls(&folder("../examples"));
    assert!(files.len() >= 7, "only {} examples", files.len());
    files.push(folder("../cluster.toml"));
    let mut ports = BTreeMap::new();
    for file in files {
        let config = ClusterConfig::load(&file).unwrap_or_else(|e| panic!("{e}"));
        for node in config.nodes.values() {
            for address in [Some(node.address), node.http].into_iter().flatten() {
                let other = ports.insert(address, file.clone());
                assert_eq!(other, None, "{address} is in two examples");
            }
        }
        let mut devices: Vec<_> = config.replicas.iter().flat_map(|r| r.stages.concat()).collect();
        devices.sort();
        devices.dedup();
        let count: usize = config.replicas.iter().flat_map(|r| &r.stages).map(Vec::len).sum();
        assert_eq!(devices.len(), count, "{}", file.display());
    }
}

#[test]
fn the_default_cluster_reads_as_written() {
    let config = default_config();
    assert_eq!(config.cluster.head, name("front"));
    assert_eq!(config.cluster.model, DEFAULT_MODEL);
    assert_eq!(config.cluster.precision, Precision::Fast);
    let names: Vec<&str> = config.nodes.keys().map(NodeName::as_str).collect();
    assert_eq!(names, ["front", "left", "right"]);
    assert_eq!(config.gateways(), [(&name("front"), "127.0.0.1:8080".parse().unwrap())]);
    assert_eq!(config.replicas.len(), 2);
    assert_eq!(config.replicas[1].stages[0][0].to_string(), "right/cpu");
    assert_eq!(config.scheduler.step_tokens, 512);
    assert_eq!(config.scheduler.chunk_tokens, 512);
    assert_eq!(config.kv.memory, 1 << 30);
    assert_eq!(config.kv.dtype, None);
    assert_eq!(config.engine, EngineSection::Transformer);
    assert_eq!(config.nodes_where(|ip| ip.is_loopback()).len(), 3);
    assert_eq!(config.threads_of(&name("left"), 2), 1);
    assert_eq!(config.threads_of(&name("left"), 16), 8);
    assert_eq!(config.threads_of(&name("front"), 16), 1);
}

#[test]
fn the_state_folder_is_next_to_the_file() {
    let config = ClusterConfig::parse(&default_text(), "/etc/dunlin/cluster.toml").unwrap();
    assert_eq!(config.state_dir(), Path::new("/etc/dunlin/.dunlin"));
    assert_eq!(default_config().state_dir(), Path::new(".dunlin"));
}

#[test]
fn values_are_set_over_the_file() {
    let mut config = default_config();
    config.set("scheduler.step_tokens", "64").unwrap();
    config.set("cluster.precision", "exact").unwrap();
    config.set("cluster.local_lanes", "false").unwrap();
    config.set("node.left.threads", "3").unwrap();
    config.set("replica.r1.layers", "[30]").unwrap();
    config.set("kv.memory", "64MiB").unwrap();
    config.set("kv.dtype", "int8").unwrap();
    config.set("cluster.name", "lab").unwrap();
    assert_eq!(config.scheduler.step_tokens, 64);
    assert_eq!(config.scheduler.chunk_tokens, 64);
    assert_eq!(config.cluster.precision, Precision::Exact);
    assert!(!config.cluster.local_lanes && default_config().cluster.local_lanes);
    assert_eq!(config.node("left").unwrap().threads, Some(3));
    assert_eq!(config.replicas[1].layers, Some(vec![30]));
    assert_eq!(config.kv.memory, 64 << 20);
    assert_eq!(config.kv.dtype, Some(KvType::Int8));
    assert_eq!(config.cluster.name, "lab");
    assert_eq!(config.overrides().len(), 8);

    let before = config.clone();
    let error = config.set("scheduler.step_token", "64").unwrap_err().to_string();
    assert_eq!(
        error,
        "unknown key `step_token` in [scheduler]\n  \
         --> --set scheduler.step_token=64 (over cluster.toml)\n  \
         = help: did you mean `step_tokens`?"
    );
    let error = config.set("replica.r7.layers", "[30]").unwrap_err().to_string();
    assert!(error.contains("there is no key replica.r7.layers"), "{error}");
    let error = config.set("node.left.address", "127.0.0.1:7400").unwrap_err().to_string();
    assert!(error.contains("127.0.0.1:7400 is there twice"), "{error}");
    let error = config.set("kv.block_tokens", "zero").unwrap_err().to_string();
    assert!(error.contains("must be an integer, not a string"), "{error}");
    let error = config.set("kv.dtype", "fp16").unwrap_err().to_string();
    assert!(error.contains("not a known word") && error.contains("f16"), "{error}");
    assert_eq!(config, before);
}

#[test]
fn layers_must_cover_the_model() {
    let mut config = default_config();
    config.check_layers(&config.replicas[0], 30).unwrap();
    config.set("replica.r1.layers", "[29]").unwrap();
    let error = config.check_layers(&config.replicas[1], 30).unwrap_err().to_string();
    assert!(error.contains("r1 hold 29 layers, too few: a stage is missing"), "{error}");
    assert!(error.contains("the model has 30") && error.contains("replica.r1.layers"), "{error}");
    let text = default_text().replace("[\"left/cpu\"]", "[\"left/cpu\"]\nlayers = [31]");
    let config = ClusterConfig::parse(&text, "cluster.toml").unwrap();
    let error = config.check_layers(&config.replicas[0], 30).unwrap_err().to_string();
    assert!(error.contains("too many") && error.contains("layers = [31]"), "{error}");
}

#[test]
fn what_shows_later_names_file_key_and_value() {
    let config = default_config();
    let error = config.complain("node.left.address", "the port is in use", "stop what uses it");
    assert_eq!(error.key, "node.left.address");
    let text = error.to_string();
    assert!(text.contains("node.left.address = \"127.0.0.1:7401\": the port is in use"), "{text}");
    assert!(text.contains("cluster.toml:14:11"), "{text}");
    let error = config.complain("kv.memory", "does not fit", "lower it").to_string();
    assert!(error.contains("(default): does not fit") && error.contains("key kv.memory"));
}

#[test]
fn a_missing_file_says_what_to_do() {
    let error = ClusterConfig::load(Path::new("no/such/cluster.toml")).unwrap_err();
    assert!(matches!(error.problem, Problem::Unreadable { .. }));
    assert!(error.to_string().contains("--config FILE"), "{error}");
}

#[test]
fn api_keys_stay_secret() {
    let text = default_text()
        .replace("[cluster]", "[cluster]\napi_keys = [\"s3cr3t\", {tenant=\"t\", key=\"t0p\"}]");
    let config = ClusterConfig::parse(&text, "cluster.toml").unwrap();
    assert_eq!(config.cluster.api_keys[0].tenant, "key-1");
    assert_eq!(config.cluster.api_keys[1].key, "t0p");
    let debug = format!("{:?}", config.cluster);
    assert!(!debug.contains("s3cr3t") && !debug.contains("t0p"), "{debug}");
}

#[test]
fn sizes() {
    let cases = [
        ("1GiB", Some(1 << 30)),
        ("1.5 GiB", Some(3 << 29)),
        ("512mib", Some(512 << 20)),
        ("100MB", Some(100_000_000)),
        ("4096", Some(4096)),
        ("", None),
        ("GiB", None),
        ("1GiBs", None),
        ("-1GiB", None),
        ("1e9", None),
        ("99999999TiB", None),
        ("1.2.3MB", None),
    ];
    for (text, bytes) in cases {
        assert_eq!(parse_size(text), bytes, "{text:?}");
    }
    assert_eq!(format_size(1 << 30), "1 GiB");
    assert_eq!(format_size(1_500_000), "1.4 MiB");
    assert_eq!(format_size(17), "17 B");
}

proptest! {
    /// Any text is read or refused with a message; nothing panics.
    #[test]
    fn no_text_panics(cut in 0usize..2000, insert in "\\PC{0,12}", at in 0usize..2000) {
        let mut text: String = default_text().chars().take(cut).collect();
        let at = text.char_indices().map(|(at, _)| at).nth(at % (text.chars().count() + 1));
        text.insert_str(at.unwrap_or(text.len()), &insert);
        if let Err(e) = ClusterConfig::parse(&text, "cluster.toml") {
            prop_assert!(e.to_string().contains("= help: "));
        }
    }

    #[test]
    fn no_override_panics(key in "[a-z0-9_.]{0,24}", value in "\\PC{0,12}") {
        let mut config = default_config();
        if let Err(e) = config.set(&key, &value) {
            prop_assert!(e.to_string().contains("= help: "));
        }
    }
}
