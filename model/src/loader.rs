//! Opens a model wherever it lies: a GGUF file, a Hugging Face folder, or a folder with one GGUF.
//!
//! Opening maps the weights and checks every header; it copies no tensor. What a model is called
//! and where it comes from is not known here (see the root package's `models`).

use crate::chat::ChatTemplate;
use crate::describe::{from_config, from_gguf};
use crate::error::LoadError;
use crate::gguf::Gguf;
use crate::manifest::Manifest;
use crate::map::{read_json, read_text};
use crate::safetensors::{INDEX, SINGLE, SafeTensors};
use crate::spec::ModelSpec;
use crate::tokenizer::{self, Settings, Tokenizer};
use dunlin_backend::HostTensor;
use serde_json::Value;
use sha2::{Digest, Sha256};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Largest JSON file read beside the weights (config, tokenizer settings).
const MAX_JSON: u64 = 16 << 20;
/// Largest `tokenizer.json`; that of a vocabulary of 262,144 tokens has 34 MB.
const MAX_TOKENIZER: u64 = 256 << 20;
/// Bytes of a tensor that [`ModelFiles::model_hash`] reads: all of it up to this many, else
/// [`SAMPLES`] evenly spread pieces that add up to it.
const SAMPLED_BYTES: usize = 64 << 10;
const SAMPLES: usize = 16;

/// An opened model. Clones share the maps.
#[derive(Debug, Clone)]
pub struct ModelFiles {
    path: PathBuf,
    spec: ModelSpec,
    weights: Weights,
    /// What the tensors must be, where that is known.
    manifest: Option<Arc<Manifest>>,
}

#[derive(Debug, Clone)]
enum Weights {
    Gguf(Gguf),
    Folder { folder: PathBuf, config: Value, tensors: SafeTensors },
}

impl ModelFiles {
    /// Opens a `.gguf` file, a folder with `config.json` and safetensors, or a folder with
    /// exactly one `.gguf`.
    pub fn open(path: &Path) -> Result<Self, LoadError> {
        let meta = std::fs::metadata(path).map_err(|e| LoadError::io(path, "open", e))?;
        if !meta.is_dir() {
            return Self::from_gguf(path);
        }
        let config = path.join("config.json");
        let has_weights = path.join(INDEX).exists() || path.join(SINGLE).exists();
        if config.exists() && has_weights {
            return Self::from_folder(path, &config);
        }
        match gguf_files(path)?.as_slice() {
            [one] => Self::from_gguf(one),
            [] if config.exists() => {
                let reason = format!("has config.json, but neither {SINGLE} nor {INDEX}");
                Err(LoadError::not_a_model(path, reason))
            }
            [] => {
                let reason = "has neither a .gguf file nor config.json with safetensors";
                Err(LoadError::not_a_model(path, reason))
            }
            many => {
                let reason = format!("has {} .gguf files; name the one to open", many.len());
                Err(LoadError::not_a_model(path, reason))
            }
        }
    }

    fn from_gguf(path: &Path) -> Result<Self, LoadError> {
        let file = Gguf::open(path)?;
        let spec = from_gguf(&file)?;
        Ok(Self { path: path.to_owned(), spec, weights: Weights::Gguf(file), manifest: None })
    }

    fn from_folder(folder: &Path, config_path: &Path) -> Result<Self, LoadError> {
        let config = read_json(config_path, MAX_JSON)?;
        let spec = from_config(config_path, &config)?;
        let tensors = SafeTensors::open_folder(folder)?;
        let weights = Weights::Folder { folder: folder.to_owned(), config, tensors };
        Ok(Self { path: folder.to_owned(), spec, weights, manifest: None })
    }

    /// Gives back the memory that the mapped files take; they stay readable. For when the weights
    /// have been loaded somewhere else.
    pub fn release(&self) {
        match &self.weights {
            Weights::Gguf(file) => file.release(),
            Weights::Folder { tensors, .. } => tensors.release(),
        }
    }

    /// From now on every tensor is compared with this as it is loaded.
    pub fn hold_to(&mut self, manifest: Manifest) {
        self.manifest = Some(Arc::new(manifest));
    }

    /// Whether the tensor's bytes are what the manifest says; all are well where there is none.
    pub fn verify(&self, tensor: &HostTensor) -> Result<(), LoadError> {
        match &self.manifest {
            Some(manifest) => manifest.check(&self.path, tensor),
            None => Ok(()),
        }
    }

    /// All tensors in the file, sorted.
    pub fn tensor_names(&self) -> Vec<String> {
        match &self.weights {
            Weights::Gguf(file) => file.tensors().keys().cloned().collect(),
            Weights::Folder { tensors, .. } => tensors.names().map(|n| n.to_string()).collect(),
        }
    }

    /// BLAKE3 of what describes the tensors: the GGUF header, or every safetensors header.
    pub fn header_hash(&self) -> String {
        let mut hash = blake3::Hasher::new();
        match &self.weights {
            Weights::Gguf(file) => sized(&mut hash, file.header()),
            Weights::Folder { tensors, .. } => {
                tensors.shards().iter().for_each(|shard| sized(&mut hash, &shard.header()));
            }
        }
        hash.finalize().to_hex().to_string()
    }

    /// What was opened: the file, or the folder.
    pub fn path(&self) -> &Path {
        &self.path
    }

    pub fn spec(&self) -> &ModelSpec {
        &self.spec
    }

    /// Whether the names and row orders are GGUF's (else Hugging Face's).
    pub fn is_gguf(&self) -> bool {
        matches!(self.weights, Weights::Gguf(_))
    }

    /// The tensor called `name` in the file; borrows the map.
    pub fn tensor(&self, name: &str) -> Result<HostTensor, LoadError> {
        match &self.weights {
            Weights::Gguf(file) => file.tensor(name),
            Weights::Folder { tensors, .. } => tensors.tensor(name),
        }
    }

    pub fn has(&self, name: &str) -> bool {
        match &self.weights {
            Weights::Gguf(file) => file.tensors().contains_key(name),
            Weights::Folder { tensors, .. } => tensors.has(name),
        }
    }

    /// Bytes of all weight files.
    pub fn bytes(&self) -> u64 {
        match &self.weights {
            Weights::Gguf(file) => file.bytes(),
            Weights::Folder { tensors, .. } => {
                tensors.shards().iter().map(|s| s.file.len() as u64).sum()
            }
        }
    }

    /// A content hash in hexadecimal that names this model in cache keys and handshakes: equal on
    /// every machine that holds the same files, whatever they are called.
    ///
    /// It is BLAKE3 over a version tag, the GGUF header (metadata and tensor table) or
    /// `config.json` and every safetensors header, then of every tensor, in name order, its name,
    /// size and up to 64 KiB of its bytes (16 evenly spread pieces where it is larger). So it
    /// reads some megabytes of any model, and tells apart files that differ in metadata or in a
    /// weight that was sampled; [`weights_sha256`](Self::weights_sha256) covers every byte.
    pub fn model_hash(&self) -> String {
        let mut hash = blake3::Hasher::new();
        hash.update(b"dunlin model hash 1");
        match &self.weights {
            Weights::Gguf(file) => {
                sized(&mut hash, file.header());
                for name in file.tensors().keys() {
                    sample(&mut hash, name, file.tensor(name).ok());
                }
            }
            Weights::Folder { config, tensors, .. } => {
                sized(&mut hash, config.to_string().as_bytes());
                for shard in tensors.shards() {
                    sized(&mut hash, &shard.header());
                }
                for name in tensors.names() {
                    sample(&mut hash, name, tensors.tensor(name).ok());
                }
            }
        }
        hash.finalize().to_hex().to_string()
    }

    /// SHA-256 of the weight file in hexadecimal, as `sha256sum` prints it; of a sharded model,
    /// that of its files concatenated in name order. Reads every byte.
    pub fn weights_sha256(&self) -> String {
        let mut hash = Sha256::new();
        match &self.weights {
            Weights::Gguf(file) => hash.update(file.file()),
            Weights::Folder { tensors, .. } => {
                for shard in tensors.shards() {
                    hash.update(&shard.file);
                }
            }
        }
        hex(&hash.finalize())
    }

    /// Builds the model's tokenizer (tenths of a second for large vocabularies).
    pub fn tokenizer(&self) -> Result<Tokenizer, LoadError> {
        match &self.weights {
            Weights::Gguf(file) => tokenizer::from_gguf(file),
            Weights::Folder { folder, config, .. } => {
                let path = folder.join("tokenizer.json");
                let json = read_text(&path, MAX_TOKENIZER)?;
                let part = |name| Ok(optional_json(folder, name)?.unwrap_or_default());
                let settings = Settings {
                    tokenizer: part("tokenizer_config.json")?,
                    generation: part("generation_config.json")?,
                    config: config.clone(),
                };
                tokenizer::from_json(&path, &json, &settings)
            }
        }
    }

    /// The model's chat template, or the documented default where it has none.
    pub fn chat_template(&self, tokenizer: &Tokenizer) -> Result<ChatTemplate, LoadError> {
        let text_of = |id: Option<u32>| {
            id.map(|id| String::from_utf8_lossy(tokenizer.id_to_bytes(id)).into_owned())
                .unwrap_or_default()
        };
        let (own, eos) = match &self.weights {
            Weights::Gguf(file) => {
                let value = |key| file.metadata().get(key);
                let eos = value("tokenizer.ggml.eos_token_id").and_then(|v| v.int());
                let eos = eos.and_then(|id| u32::try_from(id).ok());
                let own = value("tokenizer.chat_template").and_then(|v| v.str());
                (own.map(str::to_owned), text_of(eos))
            }
            Weights::Folder { folder, .. } => {
                let config = optional_json(folder, "tokenizer_config.json")?.unwrap_or_default();
                (folder_template(folder, &config)?, token_text(config.get("eos_token")))
            }
        };
        let bos = text_of(tokenizer.bos());
        match own {
            Some(source) => ChatTemplate::new(&source, &bos, &eos)
                .map_err(|e| LoadError::config(&self.path, "chat_template", e.to_string())),
            None => {
                let has = |token: &str| tokenizer.token_to_id(token).is_some();
                Ok(ChatTemplate::fallback(has, &bos, &eos))
            }
        }
    }
}

/// `chat_template.jinja`, or the template (the one called `default`) in the settings.
fn folder_template(folder: &Path, config: &Value) -> Result<Option<String>, LoadError> {
    if let Some(text) = optional_text(folder, "chat_template.jinja")? {
        return Ok(Some(text));
    }
    let own = match config.get("chat_template") {
        Some(Value::String(text)) => Some(text.clone()),
        Some(Value::Array(list)) => list
            .iter()
            .find(|t| t.get("name").and_then(Value::as_str) == Some("default"))
            .and_then(|t| Some(t.get("template")?.as_str()?.to_owned())),
        _ => None,
    };
    Ok(own)
}

/// The text of a token in `tokenizer_config.json`.
fn token_text(value: Option<&Value>) -> String {
    let text = value.and_then(|v| v.as_str().or_else(|| v.get("content")?.as_str()));
    text.unwrap_or_default().to_owned()
}

/// Lower-case hexadecimal.
pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}

/// A JSON file of a model folder that may be absent.
fn optional_json(folder: &Path, name: &str) -> Result<Option<Value>, LoadError> {
    let path = folder.join(name);
    if path.exists() { read_json(&path, MAX_JSON).map(Some) } else { Ok(None) }
}

/// A text file of a model folder that may be absent.
fn optional_text(folder: &Path, name: &str) -> Result<Option<String>, LoadError> {
    let path = folder.join(name);
    if path.exists() { read_text(&path, MAX_JSON).map(Some) } else { Ok(None) }
}

fn gguf_files(folder: &Path) -> Result<Vec<PathBuf>, LoadError> {
    let list = std::fs::read_dir(folder).map_err(|e| LoadError::io(folder, "list", e))?;
    let mut found = Vec::new();
    for entry in list {
        let path = entry.map_err(|e| LoadError::io(folder, "list", e))?.path();
        if path.extension().is_some_and(|e| e == "gguf") && path.is_file() {
            found.push(path);
        }
    }
    found.sort();
    Ok(found)
}

fn sized(hash: &mut blake3::Hasher, bytes: &[u8]) {
    hash.update(&(bytes.len() as u64).to_le_bytes());
    hash.update(bytes);
}

fn sample(hash: &mut blake3::Hasher, name: &str, tensor: Option<HostTensor>) {
    sized(hash, name.as_bytes());
    // A tensor of a type that is never computed with counts by name (and by the header).
    let Some(tensor) = tensor else { return };
    let data = &tensor.data;
    hash.update(&(data.len() as u64).to_le_bytes());
    if data.len() <= SAMPLED_BYTES {
        hash.update(data);
        return;
    }
    let piece = SAMPLED_BYTES / SAMPLES;
    for i in 0..SAMPLES {
        // From the first byte to the last, in u128 since the product may exceed 64 bits.
        let start = (data.len() - piece) as u128 * i as u128 / (SAMPLES - 1) as u128;
        hash.update(&data[start as usize..start as usize + piece]);
    }
}
