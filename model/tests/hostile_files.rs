//! Damaged, truncated and hostile model files: refused with an error that names the place, never
//! a panic, never an absurd allocation.
//!
//! As a fuzzer: `PROPTEST_CASES=100000 cargo test --release -p dunlin-model --test hostile_files`.

mod common;

use bytes::Bytes;
use cap::Cap;
use common::gguf::{self, Gguf, Tensor, array, string};
use dunlin_model::chat::ChatInput;
use dunlin_model::error::LoadError;
use dunlin_model::gguf as reader;
use dunlin_model::loader::ModelFiles;
use dunlin_model::safetensors::SafeTensors;
use proptest::prelude::*;
use proptest::sample::Index;
use std::alloc::System;
use std::path::{Path, PathBuf};

/// The whole test process may not hold more than this: going over it aborts the test.
#[global_allocator]
static MEMORY: Cap<System> = Cap::new(System, 512 << 20);

fn parse(file: Vec<u8>) -> Result<reader::Gguf, LoadError> {
    reader::Gguf::parse(Path::new("m.gguf"), Bytes::from(file))
}

/// Opens the file and asks for everything in it.
fn use_all(file: &[u8]) -> Result<(), LoadError> {
    let gguf = parse(file.to_vec())?;
    for name in gguf.tensors().keys() {
        gguf.tensor(name)?;
    }
    for array in gguf.metadata().values().filter_map(reader::Value::array) {
        let strings = array.strings().map(|s| s.count());
        let others = [array.ints().map(|i| i.count()), array.floats().map(|f| f.count())];
        for n in others.into_iter().chain([strings]).flatten() {
            assert_eq!(n, array.len());
        }
    }
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("m.gguf");
    std::fs::write(&path, file).unwrap();
    let model = ModelFiles::open(&path)?;
    model.model_hash();
    let tokenizer = model.tokenizer()?;
    if let Ok(ids) = tokenizer.encode("the 12 ď<|end|>", true) {
        tokenizer.decode(&ids, false);
    }
    let message = serde_json::json!({"role": "user", "content": "x"});
    let input = ChatInput { messages: vec![message], ..Default::default() };
    let _ = model.chat_template(&tokenizer)?.render(&input);
    Ok(())
}

#[test]
fn the_undamaged_file_opens() {
    let file = gguf::llama().build();
    use_all(&file).unwrap();
    let model = parse(file).unwrap();
    let t = model.tensor("token_embd.weight").unwrap();
    assert_eq!((t.rows, t.cols), (260, 8));
    assert_eq!(t.row(1)[..4], 0.125f32.to_le_bytes());
}

#[test]
fn every_truncation_is_refused() {
    let file = gguf::llama().build();
    for len in 0..file.len() {
        assert!(parse(file[..len].to_vec()).is_err(), "{len} of {} bytes", file.len());
    }
}

/// Every place in the header is overwritten with values that break counts, lengths, types,
/// dimensions and offsets.
#[test]
fn no_value_anywhere_makes_it_panic() {
    let file = gguf::llama().build();
    let header = parse(file.clone()).unwrap().header().len();
    let values: [u64; 9] =
        [0, 1, 2, 0xFF, 0x7FFF_FFFF, 0xFFFF_FFFF, 1 << 40, i64::MAX as u64, u64::MAX];
    // The vocabulary is long and all alike: every byte before and after it, some within.
    for at in (0..header).filter(|at| *at < 900 || *at > header - 900 || at % 37 == 0) {
        for value in values {
            for width in [1, 4, 8] {
                let mut bad = file.clone();
                let end = (at + width).min(bad.len());
                bad[at..end].copy_from_slice(&value.to_le_bytes()[..end - at]);
                if let Ok(gguf) = parse(bad) {
                    gguf.tensors().keys().for_each(|t| drop(gguf.tensor(t)));
                }
            }
        }
    }
}

proptest! {
    #[test]
    fn random_bytes_are_refused(mut bytes in prop::collection::vec(any::<u8>(), 0..400)) {
        prop_assert!(parse(bytes.clone()).is_err());
        let mut with_magic = b"GGUF\x03\0\0\0".to_vec();
        with_magic.append(&mut bytes);
        let _ = parse(with_magic);
    }

    #[test]
    fn mutated_files_are_opened_or_refused(
        changes in prop::collection::vec((any::<Index>(), any::<u8>()), 1..8),
        cut in prop::option::weighted(0.2, any::<Index>()),
        head_only in any::<bool>(),
    ) {
        let mut file = gguf::llama().build();
        for (at, byte) in changes {
            // Half of the runs aim at the keys before the vocabulary.
            let range = if head_only { 600 } else { file.len() };
            let at = at.index(range);
            file[at] = byte;
        }
        if let Some(cut) = cut {
            file.truncate(cut.index(file.len()));
        }
        let _ = use_all(&file);
    }
}

fn refused(file: &Gguf, words: &[&str]) {
    let error = use_all(&file.build()).expect_err(words[0]).to_string();
    for word in words.iter().chain(&["m.gguf"]) {
        assert!(error.contains(word), "{error:?} does not say {word:?}");
    }
}

/// `llama()` with one tensor changed.
fn with_tensor(change: impl Fn(&mut Tensor)) -> Gguf {
    let mut file = gguf::llama();
    change(&mut file.tensors[2]);
    file
}

/// `llama()` with one metadata value replaced.
fn with_value(key: &str, kind: u32, value: Vec<u8>) -> Gguf {
    let mut file = gguf::llama();
    file.metadata.retain(|(k, _)| k != key);
    file.raw(key, kind, value)
}

#[test]
fn errors_name_the_place_and_the_reason() {
    const T: &str = "blk.0.attn_q.weight";
    let u32 = |v: u32| v.to_le_bytes().to_vec();
    let u64 = |v: u64| v.to_le_bytes().to_vec();
    let cases: Vec<(Gguf, Vec<&str>)> = vec![
        (Gguf { version: 2, ..gguf::llama() }, vec!["version 2", "only version 3"]),
        (Gguf { version: 3 << 24, ..gguf::llama() }, vec!["big-endian"]),
        (with_tensor(|t| t.dims = vec![]), vec![T, "0 dimensions"]),
        (with_tensor(|t| t.dims = vec![1; 5]), vec![T, "5 dimensions"]),
        (with_tensor(|t| t.dims = vec![8, 0]), vec![T, "dimension of 0"]),
        (with_tensor(|t| t.dims = vec![1 << 47, 1 << 47]), vec![T, "absurdly large"]),
        (
            with_tensor(|t| t.dims = vec![u64::MAX; 4]),
            vec![T, "a dimension of 18446744073709551615"],
        ),
        (with_tensor(|t| t.dims = vec![8, 1 << 40]), vec![T, "truncated"]),
        (with_tensor(|t| t.offset = Some(u64::MAX - 31)), vec![T, "truncated"]),
        (with_tensor(|t| t.offset = Some(33)), vec![T, "not aligned to 32"]),
        (with_tensor(|t| t.offset = Some(32)), vec![T, "overlaps tensor 'token_embd.weight'"]),
        (with_tensor(|t| t.kind = 10), vec![T, "Q2_K", "supported are F32"]),
        (with_tensor(|t| t.kind = 999), vec![T, "unknown type", "999"]),
        (with_tensor(|t| t.kind = 8), vec![T, "rows of 8 elements", "multiple of 32"]),
        (with_tensor(|t| t.name = "output_norm.weight".into()), vec!["appears twice"]),
        (gguf::llama().u32("llama.block_count", 1), vec!["llama.block_count", "twice"]),
        (gguf::llama().raw("x", 99, vec![]), vec!["'x'", "unknown value type 99"]),
        (gguf::llama().raw("x", 7, vec![2]), vec!["'x'", "neither true nor false"]),
        (gguf::llama().raw("x", 9, [u32(8), u64(1 << 60)].concat()), vec!["'x'", "elements"]),
        (gguf::llama().raw("x", 9, array(8, &[vec![255; 8]])), vec!["x", "needs"]),
        (gguf::llama().raw("x", 9, array(42, &[])), vec!["'x'", "unknown type 42"]),
        (gguf::llama().raw("x", 8, [u64(1), vec![0xFF]].concat()), vec!["'x'", "UTF-8"]),
        (gguf::llama().u32("general.alignment", 48), vec!["general.alignment", "power of two"]),
        (gguf::llama().u32("general.alignment", 0), vec!["general.alignment", "power of two"]),
        (gguf::llama().u32("split.count", 3), vec!["split GGUF", "merge"]),
        (with_value("general.architecture", 8, string("rwkv")), vec!["'rwkv'", "qwen3"]),
        (with_value("general.architecture", 4, u32(1)), vec!["general.architecture", "string"]),
        (with_value("llama.block_count", 8, string("x")), vec!["llama.block_count", "number"]),
        (with_value("llama.block_count", 4, u32(0)), vec!["block_count", "between 1 and 1024"]),
        (with_value("llama.attention.head_count_kv", 4, u32(3)), vec!["head_count_kv", "divide"]),
        (with_value("llama.attention.head_count", 4, u32(0)), vec!["head_count"]),
        (gguf::llama().u32("llama.rope.dimension_count", 2), vec!["rope.dimension_count", "2"]),
        (gguf::llama().str("llama.rope.scaling.type", "yarn"), vec!["yarn", "llama3"]),
        (with_value("tokenizer.ggml.pre", 8, string("x-9")), vec!["tokenizer.ggml.pre", "x-9"]),
        (with_value("tokenizer.ggml.model", 8, string("bert")), vec!["bert", "gpt2 and llama"]),
        (with_value("tokenizer.ggml.eos_token_id", 4, u32(260)), vec!["eos_token_id", "260"]),
        (
            with_value("tokenizer.ggml.merges", 9, array(8, &[string("Ġ Ġ")])),
            vec!["tokenizer.ggml.merges", "does not make a token"],
        ),
        (
            with_value("tokenizer.chat_template", 8, string("{% for %}")),
            vec!["chat_template", "does not compile", "line 1"],
        ),
    ];
    for (file, words) in &cases {
        refused(file, words);
    }
}

#[test]
fn arrays_cannot_nest_without_end() {
    let mut nested = array(4, &[]);
    for _ in 0..2000 {
        nested = array(9, &[nested]);
    }
    refused(&gguf::llama().raw("x", 9, nested), &["'x'", "nests arrays"]);
}

#[test]
fn counts_are_bounded_by_the_file() {
    for (tensors, keys) in [(u64::MAX, 0), (0, u64::MAX), (1 << 19, 1), (1, 1 << 15)] {
        let mut file = b"GGUF\x03\0\0\0".to_vec();
        file.extend(tensors.to_le_bytes());
        file.extend(keys.to_le_bytes());
        file.resize(1000, 0);
        let error = parse(file).unwrap_err().to_string();
        assert!(error.contains("cannot be in a file of 1000 bytes"), "{error}");
    }
}

// Safetensors.

fn safetensors(header: &str, data: usize) -> Vec<u8> {
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend(header.as_bytes());
    file.resize(file.len() + data, 7);
    file
}

fn small() -> Vec<u8> {
    safetensors(
        r#"{"a":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]},
            "b":{"dtype":"BF16","shape":[4],"data_offsets":[24,32]},
            "mask":{"dtype":"BOOL","shape":[2],"data_offsets":[32,34]}}"#,
        34,
    )
}

fn parse_safetensors(file: Vec<u8>) -> Result<SafeTensors, LoadError> {
    let all = SafeTensors::parse(&[(PathBuf::from("m.safetensors"), Bytes::from(file))])?;
    let names: Vec<String> = all.names().map(str::to_owned).collect();
    names.iter().for_each(|n| drop(all.tensor(n)));
    Ok(all)
}

#[test]
fn safetensors_are_read_and_their_truncations_refused() {
    let file = small();
    let all = parse_safetensors(file.clone()).unwrap();
    assert_eq!((all.tensor("a").unwrap().rows, all.tensor("a").unwrap().cols), (2, 3));
    assert_eq!((all.tensor("b").unwrap().rows, all.tensor("b").unwrap().cols), (1, 4));
    assert!(all.tensor("mask").unwrap_err().to_string().contains("BOOL"));
    for len in 0..file.len() {
        assert!(parse_safetensors(file[..len].to_vec()).is_err(), "{len}");
    }
}

#[test]
fn safetensors_errors_name_the_reason() {
    let entry = |shape: &str, offsets: &str| {
        format!(r#"{{"a":{{"dtype":"F32","shape":{shape},"data_offsets":{offsets}}}}}"#)
    };
    let max = u64::MAX;
    for header in [
        entry("[2,3]", "[0,20]"),
        entry("[2,3]", "[4,28]"),
        entry("[2,3]", "[24,0]"),
        entry(&format!("[{max},{max}]"), "[0,24]"),
        entry("[4611686018427387904]", &format!("[0,{max}]")),
        entry("[-1]", "[0,24]"),
        "{".repeat(10_000),
        "[".repeat(100_000),
        "null".into(),
    ] {
        let error = parse_safetensors(safetensors(&header, 24)).unwrap_err().to_string();
        assert!(error.contains("m.safetensors"), "{error}");
    }
    let mut long = small();
    long[..8].copy_from_slice(&u64::MAX.to_le_bytes());
    assert!(parse_safetensors(long).unwrap_err().to_string().contains("header claims"));
}

proptest! {
    #[test]
    fn mutated_safetensors_are_opened_or_refused(
        changes in prop::collection::vec((any::<Index>(), any::<u8>()), 1..6),
        random in prop::collection::vec(any::<u8>(), 0..100),
    ) {
        let mut file = small();
        for (at, byte) in changes {
            let at = at.index(file.len());
            file[at] = byte;
        }
        let _ = parse_safetensors(file);
        let _ = parse_safetensors(random.clone());
        let _ = parse_safetensors(safetensors(&String::from_utf8_lossy(&random), 10));
    }

    /// Sizes that add up to more than there are bytes in memory.
    #[test]
    fn absurd_offsets_are_refused(ends in prop::collection::vec(any::<u64>(), 1..6)) {
        let mut start = 0u64;
        let mut entries = Vec::new();
        for (i, end) in ends.iter().enumerate() {
            let size = end.wrapping_sub(start);
            entries.push(format!(
                r#""t{i}":{{"dtype":"U8","shape":[{size}],"data_offsets":[{start},{end}]}}"#
            ));
            start = *end;
        }
        prop_assume!(start > 100);
        let header = format!("{{{}}}", entries.join(","));
        let parsed = parse_safetensors(safetensors(&header, 100));
        prop_assert!(parsed.is_err());
    }

    /// Random edits of a tokenizer.json.
    #[test]
    fn mutated_tokenizers_are_built_or_refused(
        changes in prop::collection::vec((any::<Index>(), any::<u8>()), 1..4),
    ) {
        let mut json = TOKENIZER.as_bytes().to_vec();
        for (at, byte) in changes {
            let at = at.index(json.len());
            json[at] = byte;
        }
        let dir = folder(&small_model(), &String::from_utf8_lossy(&json));
        if let Ok(tokenizer) = ModelFiles::open(dir.path()).unwrap().tokenizer() {
            let _ = tokenizer.encode("abc ab<s> ď", true);
        }
    }
}

const TOKENIZER: &str = r#"{"version":"1.0","added_tokens":[{"id":4,"content":"<s>","special":true,
"single_word":false,"lstrip":false,"rstrip":false,"normalized":false}],"normalizer":null,
"pre_tokenizer":{"type":"ByteLevel","add_prefix_space":false,"trim_offsets":false,"use_regex":true},
"post_processor":null,"decoder":{"type":"ByteLevel","add_prefix_space":false,"trim_offsets":false,"use_regex":true},
"model":{"type":"BPE","vocab":{"a":0,"b":1,"ab":2,"c":3},"merges":["a b"]}}"#;

const CONFIG: &str = r#"{"model_type":"llama","num_hidden_layers":1,"hidden_size":4,
"intermediate_size":8,"num_attention_heads":2,"vocab_size":5,"max_position_embeddings":16}"#;

fn small_model() -> Vec<u8> {
    safetensors(
        r#"{"model.embed_tokens.weight":{"dtype":"F16","shape":[5,4],"data_offsets":[0,40]}}"#,
        40,
    )
}

fn folder(weights: &[u8], tokenizer: &str) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("config.json"), CONFIG).unwrap();
    std::fs::write(dir.path().join("model.safetensors"), weights).unwrap();
    std::fs::write(dir.path().join("tokenizer.json"), tokenizer).unwrap();
    dir
}

#[test]
fn tokenizers_that_the_library_would_choke_on_are_refused() {
    let tokenizer = |json: &str| {
        let dir = folder(&small_model(), json);
        ModelFiles::open(dir.path()).unwrap().tokenizer()
    };
    let good = tokenizer(TOKENIZER).unwrap();
    assert_eq!(good.encode("ab<s>c", true).unwrap(), [2, 4, 3]);
    for (from, to, word) in [
        (r#""a b""#, r#""ab c""#, "does not make a token"),
        (r#""a b""#, r#"["ab","ab"]"#, "does not make a token"),
        (r#""a b""#, "7", "does not make a token"),
        ("\"BPE\"", "\"Unigram\"", "supported is BPE"),
        ("\"merges\"", "\"dropout\":0.5,\"merges\"", "dropout"),
        ("\"merges\"", "\"continuing_subword_prefix\":\"####\",\"merges\"", "not supported"),
        ("\"c\":3", "\"c\":4294967295", "token id"),
        ("{", "", "not valid JSON"),
    ] {
        let error = tokenizer(&TOKENIZER.replacen(from, to, 1)).unwrap_err().to_string();
        assert!(error.contains(word) && error.contains("tokenizer.json"), "{error}");
    }
}

#[test]
fn an_index_cannot_lead_out_of_its_folder() {
    let dir = folder(&small_model(), TOKENIZER);
    for name in ["../model.safetensors", "/etc/passwd", "a/b", "", "."] {
        let index = format!(r#"{{"weight_map":{{"x":"{name}"}}}}"#);
        std::fs::write(dir.path().join("model.safetensors.index.json"), index).unwrap();
        let error = ModelFiles::open(dir.path()).unwrap_err().to_string();
        assert!(error.contains("weight_map") && error.contains("same folder"), "{error}");
    }
}
