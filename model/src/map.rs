//! Read-only memory maps, and bounded reads of small files beside them.

use crate::error::LoadError;
use bytes::Bytes;
use memmap2::Mmap;
use std::fs::File;
use std::io::Read;
use std::path::Path;
use std::sync::Arc;

/// A mapped file. Clones share the map.
#[derive(Debug, Clone)]
pub struct Mapped(Arc<Mmap>);

impl AsRef<[u8]> for Mapped {
    fn as_ref(&self) -> &[u8] {
        &self.0
    }
}

impl Mapped {
    /// The whole file. Slices of it share the map and keep it alive.
    pub fn bytes(&self) -> Bytes {
        Bytes::from_owner(self.clone())
    }

    /// Gives back the memory that what was read of the file takes in this process. Whoever reads
    /// there again gets the same bytes, from the page cache or the disk. After weights have been
    /// copied to a device the pages of the file would else count twice.
    pub fn release(&self) {
        #[cfg(unix)]
        {
            use memmap2::UncheckedAdvice::DontNeed;
            // SAFETY: the map is of a file and was never written to, so that a page that is
            // dropped is read from the file again. That holds while others borrow from the map.
            if let Err(error) = unsafe { self.0.unchecked_advise(DontNeed) } {
                tracing::debug!(%error, "pages of a mapped file stay in memory");
            }
        }
    }
}

/// Maps a whole file.
pub fn map_file(path: &Path) -> Result<Mapped, LoadError> {
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
    Ok(Mapped(Arc::new(map)))
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

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

    /// KiB that the process holds of `path`, as the kernel counts.
    fn resident(path: &Path) -> u64 {
        let maps = std::fs::read_to_string("/proc/self/smaps").unwrap();
        let name = path.to_str().unwrap();
        let own = maps.lines().skip_while(|line| !line.ends_with(name));
        let line = own.into_iter().find(|line| line.starts_with("Rss:")).unwrap();
        line.split_whitespace().nth(1).unwrap().parse().unwrap()
    }

    #[test]
    fn a_released_file_takes_no_memory_and_can_still_be_read() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("weights");
        let written: Vec<u8> = (0..8 << 20).map(|i: u32| ((i * 31) >> 7) as u8).collect();
        std::fs::write(&path, &written).unwrap();
        let map = map_file(&path).unwrap();
        let bytes = map.bytes();
        assert!(bytes == written);
        assert!(resident(&path) > 4096, "{} KiB", resident(&path));
        map.release();
        assert!(resident(&path) < 1024, "{} KiB", resident(&path));
        assert!(bytes == written);
    }
}
