//! The real models: their files open, and describe what their papers say.

mod common;

use common::{data, gemma, smollm2};
use dunlin_model::loader::ModelFiles;
use dunlin_model::spec::Family;

#[test]
fn smollm2_is_described_from_its_metadata() {
    let model = ModelFiles::open(&smollm2()).unwrap();
    let s = model.spec();
    assert_eq!(s.family, Family::Llama);
    assert_eq!((s.layers, s.hidden, s.ffn, s.vocab), (30, 576, 1536, 49152));
    assert_eq!((s.heads, s.kv_heads, s.head_dim, s.context), (9, 3, 64, 8192));
    assert_eq!(s.rope.theta, 100_000.0);
    assert_eq!(s.attention_scale, 0.125);
    assert!(s.tied_head && !s.qk_norm && !s.qkv_bias && s.moe.is_none());
    assert_eq!(model.tensor("token_embd.weight").unwrap().rows, 49152);
    assert_eq!(
        model.weights_sha256(),
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
    );
    assert_eq!(model.model_hash(), ModelFiles::open(&smollm2()).unwrap().model_hash());
}

#[test]
fn gemma3_is_described_with_what_its_file_leaves_out() {
    let model = ModelFiles::open(&gemma()).unwrap();
    let s = model.spec();
    assert_eq!(s.family, Family::Gemma3);
    assert_eq!((s.layers, s.hidden, s.ffn, s.vocab), (18, 640, 2048, 262_144));
    assert_eq!((s.heads, s.kv_heads, s.head_dim, s.context), (4, 1, 256, 32768));
    assert_eq!((s.window, s.global_every), (Some(512), Some(6)));
    assert_eq!((s.rope.theta, s.rope_local.as_ref().unwrap().theta), (1e6, 1e4));
    assert!(s.qk_norm && s.post_norms && s.tied_head);
    assert_eq!(s.embed_scale, 640f32.sqrt());
}

/// A checkpoint in several files is the same model as in one.
#[test]
fn shards_add_up_to_the_whole() {
    let whole = ModelFiles::open(&data("tiny-llama")).unwrap();
    let dir = tempfile::tempdir().unwrap();
    let config = data("tiny-llama").join("config.json");
    std::fs::copy(config, dir.path().join("config.json")).unwrap();
    let all = std::fs::read(data("tiny-llama").join("model.safetensors")).unwrap();
    let all = safetensors::SafeTensors::deserialize(&all).unwrap();
    let mut names: Vec<&str> = all.names();
    names.sort_unstable();
    let mut map = serde_json::Map::new();
    for (i, part) in names.chunks(names.len().div_ceil(3)).enumerate() {
        let file = format!("model-0000{}-of-00003.safetensors", i + 1);
        let views: Vec<_> = part.iter().map(|n| (*n, all.tensor(n).unwrap())).collect();
        safetensors::serialize_to_file(views, None, &dir.path().join(&file)).unwrap();
        part.iter().for_each(|n| drop(map.insert((*n).into(), file.clone().into())));
    }
    let index = dir.path().join("model.safetensors.index.json");
    let write = |map: &serde_json::Map<String, serde_json::Value>| {
        std::fs::write(&index, serde_json::json!({"weight_map": map}).to_string()).unwrap();
    };
    write(&map);
    let sharded = ModelFiles::open(dir.path()).unwrap();
    assert_eq!(sharded.spec(), whole.spec());
    for name in &names {
        let (a, b) = (whole.tensor(name).unwrap(), sharded.tensor(name).unwrap());
        assert_eq!((a.rows, a.cols, a.data), (b.rows, b.cols, b.data), "{name}");
    }
    // A tensor that is not where the index says.
    map.insert(names[0].into(), "model-00003-of-00003.safetensors".into());
    write(&map);
    let error = ModelFiles::open(dir.path()).unwrap_err().to_string();
    assert!(error.contains(names[0]) && error.contains("index says"), "{error}");
    std::fs::remove_file(dir.path().join("model-00002-of-00003.safetensors")).unwrap();
    let error = ModelFiles::open(dir.path()).unwrap_err().to_string();
    assert!(error.contains("00002-of-00003"), "{error}");
}

/// Equal files have equal hashes wherever they lie; one changed weight or word changes them.
#[test]
fn the_model_hash_names_the_content() {
    let dir = tempfile::tempdir().unwrap();
    let copy = dir.path().join("other-name");
    std::fs::create_dir(&copy).unwrap();
    for file in ["config.json", "model.safetensors"] {
        std::fs::copy(data("tiny-llama").join(file), copy.join(file)).unwrap();
    }
    let hash = |path: &std::path::Path| ModelFiles::open(path).unwrap().model_hash();
    let original = hash(&data("tiny-llama"));
    assert_eq!(hash(&copy), original);
    assert_ne!(hash(&data("tiny-mixtral")), original);
    let weights = copy.join("model.safetensors");
    let mut bytes = std::fs::read(&weights).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    std::fs::write(&weights, bytes).unwrap();
    assert_ne!(hash(&copy), original);
    std::fs::copy(data("tiny-llama").join("model.safetensors"), &weights).unwrap();
    assert_eq!(hash(&copy), original);
    let config = std::fs::read_to_string(copy.join("config.json")).unwrap();
    let config =
        config.replace("\"max_position_embeddings\": 1024", "\"max_position_embeddings\": 512");
    std::fs::write(copy.join("config.json"), config).unwrap();
    assert_ne!(hash(&copy), original);
}
