//! Read-only memory maps, and bounded reads of small files beside them.

use crate::error::LoadError;
use bytes::Bytes;
use memmap2::Mmap;
use std::fs::File;
use std::io::Read;
use std::path::Path;

/// Maps a whole file. Slices of the result share the map and keep it alive.
pub fn map_file(path: &Path) -> Result<Bytes, LoadError> {
    let file = File::open(path).map_err(|e| LoadError::io(path, "open", e))?;
    let meta = file.metadata().map_err(|e| LoadError::io(path, "read the size", e))?;
    if !meta.is_file() {
        return Err(LoadError::not_a_model(path, "is not a regular file"));
    }
    if meta.len() == 0 {
        return Err(LoadError::not_a_model(path, "is empty"));
    }
    // SAFETY: the map is private and read-only, and the file is only ever replaced by renaming a
    // new one over it (`dunlin pull`), which leaves the mapped inode as it is. Someone who
    // truncates a model in place while it is served gets SIGBUS, as with any mapped file.
    let map = unsafe { Mmap::map(&file) }.map_err(|e| LoadError::io(path, "map", e))?;
    Ok(Bytes::from_owner(map))
}

/// Reads a text file of at most `limit` bytes.
pub fn read_text(path: &Path, limit: u64) -> Result<String, LoadError> {
    let file = File::open(path).map_err(|e| LoadError::io(path, "open", e))?;
    let mut text = String::new();
    let mut bounded = file.take(limit + 1);
    bounded.read_to_string(&mut text).map_err(|e| LoadError::io(path, "read", e))?;
    if text.len() as u64 > limit {
        return Err(LoadError::unsupported(path, format!("is larger than {limit} bytes")));
    }
    Ok(text)
}

/// Reads and parses a JSON file of at most `limit` bytes.
pub fn read_json(path: &Path, limit: u64) -> Result<serde_json::Value, LoadError> {
    let text = read_text(path, limit)?;
    serde_json::from_str(&text)
        .map_err(|e| LoadError::not_a_model(path, format!("is not valid JSON: {e}")))
}
