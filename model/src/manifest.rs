//! What each tensor of a model file holds, written down when the file was first read, so that a
//! later load notices a file that has changed under its name (I19 of the fault invariants).
//!
//! The manifest lies beside the model as `.FILE.tensors.json`: BLAKE3 of the header and of every
//! tensor's bytes. It is made once; each load then hashes what it reads and compares. A file with
//! another header or size is another model and gets a manifest of its own; one with the same header
//! and other bytes is refused, and the error says which file to fetch again or delete.

use crate::error::LoadError;
use crate::loader::ModelFiles;
use crate::map::read_text;
use dunlin_backend::HostTensor;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};

/// A name of 1 KiB and its hash for each of 2^16 tensors.
const MAX_MANIFEST: u64 = 96 << 20;
const VERSION: u32 = 1;

/// Hashes of a model's tensors, by the names in the file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Manifest {
    version: u32,
    /// Of all weight files together.
    size: u64,
    /// BLAKE3 of the GGUF header, or of all safetensors headers.
    header: String,
    tensors: BTreeMap<String, String>,
}

impl Manifest {
    /// Where the manifest of `model` (a file, or a folder) lies.
    pub fn path(model: &Path) -> PathBuf {
        if model.is_dir() {
            return model.join(".tensors.json");
        }
        let name = model.file_name().unwrap_or_default().to_string_lossy();
        model.with_file_name(format!(".{name}.tensors.json"))
    }

    /// The manifest beside the model, if it is about this model.
    pub fn read(files: &ModelFiles) -> Option<Manifest> {
        let text = read_text(&Self::path(files.path()), MAX_MANIFEST).ok()?;
        let manifest: Manifest = serde_json::from_str(&text).ok()?;
        let same = manifest.version == VERSION
            && manifest.size == files.bytes()
            && manifest.header == files.header_hash();
        same.then_some(manifest)
    }

    /// Hashes every tensor, on `threads` threads.
    pub fn make(files: &ModelFiles, threads: usize) -> Manifest {
        let names = files.tensor_names();
        let next = AtomicUsize::new(0);
        let work = || {
            let mut done = Vec::new();
            while let Some(name) = names.get(next.fetch_add(1, Ordering::Relaxed)) {
                // One of a type that is never computed with cannot be loaded either.
                if let Ok(tensor) = files.tensor(name) {
                    done.push((name.clone(), hash(&tensor.data)));
                }
            }
            done
        };
        let tensors = std::thread::scope(|scope| {
            let workers: Vec<_> = (0..threads.max(1)).map(|_| scope.spawn(work)).collect();
            workers.into_iter().flat_map(|worker| worker.join().unwrap_or_default()).collect()
        });
        let (size, header) = (files.bytes(), files.header_hash());
        Manifest { version: VERSION, size, header, tensors }
    }

    /// Puts the manifest beside the model, whole or not at all.
    ///
    /// # Errors
    /// The folder cannot be written to; then there is nothing to compare with next time.
    pub fn write(&self, files: &ModelFiles) -> Result<(), LoadError> {
        let path = Self::path(files.path());
        let text = serde_json::to_string(self)
            .map_err(|e| LoadError::not_a_model(&path, format!("cannot be written: {e}")))?;
        let half = path.with_extension(format!("{}.half", std::process::id()));
        std::fs::write(&half, text).map_err(|e| LoadError::io(&half, "write", e))?;
        std::fs::rename(&half, &path).map_err(|e| LoadError::io(&path, "rename to", e))
    }

    /// Whether the tensor, as it is in the file now, is what the manifest says.
    ///
    /// # Errors
    /// Names file, tensor and both hashes.
    pub fn check(&self, path: &Path, tensor: &HostTensor) -> Result<(), LoadError> {
        let found = hash(&tensor.data);
        match self.tensors.get(&tensor.name) {
            Some(right) if *right == found => Ok(()),
            Some(right) => Err(LoadError::Changed {
                path: path.to_owned(),
                tensor: tensor.name.clone(),
                reason: format!(
                    "has changed: BLAKE3 {found}, at first it was {right}; fetch the file again, \
                     or delete '{}' if it was replaced on purpose",
                    Self::path(path).display()
                ),
            }),
            None => Err(LoadError::tensor(path, &tensor.name, "is not in the manifest")),
        }
    }
}

fn hash(bytes: &[u8]) -> String {
    blake3::hash(bytes).to_hex().to_string()
}
