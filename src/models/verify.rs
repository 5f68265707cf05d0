//! Checksums, and files that appear only when they are whole.

use super::{Alias, ModelError};
use sha2::{Digest, Sha256};
use std::fs::{self, File};
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use tempfile::NamedTempFile;

/// Begins the names of unfinished files and folders.
pub(super) const UNFINISHED: &str = ".fetch-";
/// Unfinished files older than this belong to no living process.
const STALE: Duration = Duration::from_secs(24 * 3600);

/// Whether `path` is there with this checksum (hexadecimal). A wrong one is an error. The check
/// is remembered beside the file, by size and time of change.
pub(super) fn checked(path: &Path, sha256: &str) -> Result<bool, ModelError> {
    let meta = match fs::metadata(path) {
        Ok(meta) => meta,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(false),
        Err(e) => return Err(ModelError::io("look at", path, e)),
    };
    let stamp = stamp(&meta, sha256);
    if fs::read_to_string(stamp_path(path)).is_ok_and(|s| s == stamp) {
        return Ok(true);
    }
    let got = sha256_of(path)?;
    if got != sha256 {
        return Err(ModelError::Damaged {
            what: path.display().to_string(),
            want: sha256.to_owned(),
            got,
        });
    }
    // Only a convenience: a read-only cache is hashed each time.
    let _ = fs::write(stamp_path(path), stamp);
    Ok(true)
}

/// SHA-256 of a file, in hexadecimal.
pub(super) fn sha256_of(path: &Path) -> Result<String, ModelError> {
    let read = |e| ModelError::io("read", path, e);
    let mut file = File::open(path).map_err(read)?;
    let mut hash = Sha256::new();
    let mut buffer = vec![0; 1 << 20];
    loop {
        match file.read(&mut buffer).map_err(read)? {
            0 => return Ok(dunlin_model::loader::hex(&hash.finalize())),
            n => hash.update(buffer.get(..n).unwrap_or_default()),
        }
    }
}

/// A file in the making, hashed as it grows.
pub(super) struct Incoming<'a> {
    alias: &'a Alias,
    target: PathBuf,
    file: NamedTempFile,
    hash: Sha256,
    bytes: u64,
}

impl<'a> Incoming<'a> {
    pub(super) fn new(alias: &'a Alias, cache: &Path) -> Result<Self, ModelError> {
        fs::create_dir_all(cache).map_err(|e| ModelError::io("make", cache, e))?;
        let file = tempfile::Builder::new()
            .prefix(UNFINISHED)
            .tempfile_in(cache)
            .map_err(|e| ModelError::io("make a file in", cache, e))?;
        let target = cache.join(alias.file);
        Ok(Self { alias, target, file, hash: Sha256::new(), bytes: 0 })
    }

    /// Appends all of `from`; stops at once where there is more than there should be.
    pub(super) fn append(&mut self, from: &mut dyn Read) -> Result<(), ModelError> {
        let mut buffer = vec![0; 1 << 20];
        loop {
            let n = from.read(&mut buffer).map_err(|e| ModelError::io("fetch", &self.target, e))?;
            if n == 0 {
                return Ok(());
            }
            let chunk = buffer.get(..n).unwrap_or_default();
            self.bytes += chunk.len() as u64;
            if self.bytes > self.alias.bytes {
                return Err(ModelError::Damaged {
                    what: format!("what was fetched as {}", self.alias.file),
                    want: format!("{} ({} bytes)", self.alias.sha256, self.alias.bytes),
                    got: "of more bytes".to_owned(),
                });
            }
            self.hash.update(chunk);
            let write = self.file.write_all(chunk);
            write.map_err(|e| ModelError::io("write", self.file.path(), e))?;
        }
    }

    /// Checks the whole and gives it its name.
    pub(super) fn finish(self) -> Result<(), ModelError> {
        let got = dunlin_model::loader::hex(&self.hash.finalize());
        if got != self.alias.sha256 {
            return Err(ModelError::Damaged {
                what: format!("what was fetched as {} ({} bytes)", self.alias.file, self.bytes),
                want: self.alias.sha256.to_owned(),
                got,
            });
        }
        let path = self.file.path().to_owned();
        let synced = readable(&path).and_then(|()| self.file.as_file().sync_all());
        synced.map_err(|e| ModelError::io("write", &path, e))?;
        self.file
            .persist(&self.target)
            .map_err(|e| ModelError::io("rename to", &self.target, e.error))?;
        if let Ok(meta) = fs::metadata(&self.target) {
            let _ = fs::write(stamp_path(&self.target), stamp(&meta, self.alias.sha256));
        }
        Ok(())
    }
}

/// Removes what processes that were killed left behind.
pub(super) fn sweep(cache: &Path) -> Result<(), ModelError> {
    let Ok(list) = fs::read_dir(cache) else { return Ok(()) };
    for entry in list.flatten() {
        let old = entry
            .metadata()
            .and_then(|m| m.modified())
            .is_ok_and(|t| SystemTime::now().duration_since(t).is_ok_and(|age| age > STALE));
        if old && entry.file_name().to_string_lossy().starts_with(UNFINISHED) {
            let path = entry.path();
            let removed =
                if path.is_dir() { fs::remove_dir_all(&path) } else { fs::remove_file(&path) };
            removed.map_err(|e| ModelError::io("remove", &path, e))?;
        }
    }
    Ok(())
}

fn stamp_path(path: &Path) -> PathBuf {
    let name = path.file_name().map(|n| n.to_string_lossy().into_owned()).unwrap_or_default();
    path.with_file_name(format!(".{name}.checked"))
}

fn stamp(meta: &fs::Metadata, sha256: &str) -> String {
    let modified = meta.modified().ok().and_then(|t| t.duration_since(UNIX_EPOCH).ok());
    format!("{sha256} {} {}\n", meta.len(), modified.map_or(0, |t| t.as_nanos()))
}

/// Temporary files are private; models are for every user of the cache.
fn readable(path: &Path) -> std::io::Result<()> {
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt;
        fs::set_permissions(path, fs::Permissions::from_mode(0o644))?;
    }
    #[cfg(not(unix))]
    let _ = path;
    Ok(())
}
