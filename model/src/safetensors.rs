//! Weights in safetensors files, one or many, over memory maps.
//!
//! The header is parsed by the crate `safetensors`, which checks that the tensors tile the data
//! without holes or overlaps; sizes, dtypes and shard names are checked here. Tensors of types
//! this crate does not compute with (masks, position ids) may be present but cannot be asked for.

use crate::error::LoadError;
use crate::map::{Mapped, map_file, read_json};
use bytes::Bytes;
use dunlin_backend::{DType, HostTensor};
use safetensors::tensor::{Dtype, Metadata};
use std::collections::BTreeMap;
use std::path::{Component, Path, PathBuf};

/// The largest header a file may have, as the reference implementation says.
const MAX_HEADER: u64 = 100_000_000;
const MAX_INDEX: u64 = 64 << 20;
const MAX_SHARDS: usize = 4096;
pub const INDEX: &str = "model.safetensors.index.json";
pub const SINGLE: &str = "model.safetensors";

/// All tensors of a checkpoint, by name.
#[derive(Debug, Clone)]
pub struct SafeTensors {
    path: PathBuf,
    tensors: BTreeMap<String, Entry>,
    shards: Vec<Shard>,
    maps: Vec<Mapped>,
}

/// One mapped file.
#[derive(Debug, Clone)]
pub struct Shard {
    pub path: PathBuf,
    pub file: Bytes,
    /// Where the JSON header ends and the data begins.
    data_start: usize,
}

#[derive(Debug, Clone)]
struct Entry {
    shard: usize,
    dtype: Dtype,
    shape: Vec<usize>,
    /// Byte range within the shard's data.
    start: usize,
    end: usize,
}

impl SafeTensors {
    /// Opens the weights of a model folder: the files of its index, or its only file.
    pub fn open_folder(folder: &Path) -> Result<Self, LoadError> {
        let index = folder.join(INDEX);
        if index.exists() {
            return Self::open_sharded(folder, &index);
        }
        Self::map(vec![folder.join(SINGLE)])
    }

    fn open_sharded(folder: &Path, index: &Path) -> Result<Self, LoadError> {
        let map = weight_map(index, &read_json(index, MAX_INDEX)?)?;
        let mut names: Vec<&String> = map.values().collect();
        names.sort();
        names.dedup();
        if names.len() > MAX_SHARDS {
            let reason = format!("names {} files, the limit is {MAX_SHARDS}", names.len());
            return Err(LoadError::unsupported(index, reason));
        }
        let all = Self::map(names.into_iter().map(|name| folder.join(name)).collect())?;
        for (tensor, file) in &map {
            let found = all.tensors.get(tensor).and_then(|e| all.shards.get(e.shard));
            if found.is_none_or(|s| s.path != folder.join(file)) {
                let reason = format!("is not in '{file}', where the index says it is");
                return Err(LoadError::tensor(index, tensor, reason));
            }
        }
        Ok(all)
    }

    fn map(paths: Vec<PathBuf>) -> Result<Self, LoadError> {
        let maps = paths.iter().map(|path| map_file(path)).collect::<Result<Vec<_>, _>>()?;
        let files: Vec<_> = paths.into_iter().zip(maps.iter().map(Mapped::bytes)).collect();
        Ok(Self { maps, ..Self::parse(&files)? })
    }

    /// See [`Mapped::release`].
    pub fn release(&self) {
        self.maps.iter().for_each(Mapped::release);
    }

    /// Checks the given files; paths are only for messages.
    pub fn parse(files: &[(PathBuf, Bytes)]) -> Result<Self, LoadError> {
        let path = files.first().map(|f| f.0.clone()).unwrap_or_default();
        let mut all = Self { path, tensors: BTreeMap::new(), shards: Vec::new(), maps: Vec::new() };
        for (path, file) in files {
            let (header, data_start) = header(path, file)?;
            let size = file.len() - data_start;
            if header.data_len() != size {
                return Err(LoadError::Damaged {
                    path: path.clone(),
                    at: file.len() as u64,
                    reason: format!("tensors need {} bytes, {size} are there", header.data_len()),
                });
            }
            for (name, info) in header.tensors() {
                let (start, end) = info.data_offsets;
                let entry = Entry {
                    shard: all.shards.len(),
                    dtype: info.dtype,
                    shape: info.shape.clone(),
                    start,
                    end,
                };
                if all.tensors.insert(name.clone(), entry).is_some() {
                    return Err(LoadError::tensor(path, &name, "is also in an earlier file"));
                }
            }
            all.shards.push(Shard { path: path.clone(), file: file.clone(), data_start });
        }
        Ok(all)
    }

    pub fn has(&self, name: &str) -> bool {
        self.tensors.contains_key(name)
    }

    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.tensors.keys().map(String::as_str)
    }

    pub fn shards(&self) -> &[Shard] {
        &self.shards
    }

    /// The tensor as a matrix; all but the last dimension are rows. Borrows the map.
    pub fn tensor(&self, name: &str) -> Result<HostTensor, LoadError> {
        let refuse = |reason: String| LoadError::tensor(&self.path, name, reason);
        let entry = self.tensors.get(name).ok_or_else(|| refuse("is missing".into()))?;
        let dtype = match entry.dtype {
            Dtype::F32 => DType::F32,
            Dtype::F16 => DType::F16,
            Dtype::BF16 => DType::BF16,
            other => {
                let reason = format!("has type {other:?}; supported are F32, F16 and BF16");
                return Err(refuse(reason));
            }
        };
        let (cols, rows) = match entry.shape.split_last() {
            Some((cols, rest)) => (*cols, rest.iter().product()),
            None => (1, 1),
        };
        let shard = self.shards.get(entry.shard);
        let data = shard
            .and_then(|s| Some((s, s.data_start.checked_add(entry.start)?, entry.end)))
            .and_then(|(s, start, end)| Some((s, start, s.data_start.checked_add(end)?)))
            .filter(|(s, start, end)| start <= end && *end <= s.file.len())
            .map(|(s, start, end)| s.file.slice(start..end))
            .ok_or_else(|| refuse("lies outside its file".into()))?;
        HostTensor::new(name, dtype, rows, cols, data).map_err(|e| refuse(e.to_string()))
    }
}

impl Shard {
    /// Length prefix and JSON header.
    pub fn header(&self) -> Bytes {
        self.file.slice(..self.data_start)
    }
}

/// Parses the header; returns it with the offset of the data.
fn header(path: &Path, file: &Bytes) -> Result<(Metadata, usize), LoadError> {
    let damaged = |at: u64, reason: String| LoadError::Damaged { path: path.into(), at, reason };
    let Some((prefix, _)) = file.split_first_chunk::<8>() else {
        return Err(damaged(0, "is too short for a safetensors header".into()));
    };
    let len = u64::from_le_bytes(*prefix);
    let left = (file.len() - 8) as u64;
    if len > left || len > MAX_HEADER {
        let reason = format!("the header claims {len} bytes, the file has {left} more");
        return Err(damaged(0, reason));
    }
    let data_start = 8 + len as usize;
    let json = file.slice(8..data_start);
    let header = serde_json::from_slice::<Metadata>(&json)
        .map_err(|e| damaged(8, format!("the safetensors header is not valid: {e}")))?;
    Ok((header, data_start))
}

/// The index's `weight_map`; file names that lead out of the folder are refused.
fn weight_map(
    index: &Path,
    json: &serde_json::Value,
) -> Result<BTreeMap<String, String>, LoadError> {
    let map = json.get("weight_map").and_then(|m| m.as_object());
    let map = map.ok_or_else(|| LoadError::config(index, "weight_map", "must be an object"))?;
    let mut out = BTreeMap::new();
    for (tensor, file) in map {
        let name = file.as_str().unwrap_or_default();
        let mut parts = Path::new(name).components();
        let plain = matches!((parts.next(), parts.next()), (Some(Component::Normal(_)), None));
        if !plain {
            let reason = format!("'{tensor}' must name a file in the same folder, is {file}");
            return Err(LoadError::config(index, "weight_map", reason));
        }
        out.insert(tensor.clone(), name.to_owned());
    }
    Ok(out)
}
