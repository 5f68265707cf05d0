//! Files that are written whole, and secrets that only their owner can read.

use std::fs::{File, OpenOptions};
use std::io::Write;
use std::path::Path;

use super::CertError;

pub(super) fn read(path: &Path) -> Result<Vec<u8>, CertError> {
    std::fs::read(path).map_err(|e| failed(path, &e))
}

/// Refuses a file that others can read.
pub(super) fn read_secret(path: &Path) -> Result<Vec<u8>, CertError> {
    let bytes = read(path)?;
    #[cfg(unix)]
    {
        use std::os::unix::fs::MetadataExt;
        let mode = std::fs::metadata(path).map_err(|e| failed(path, &e))?.mode() & 0o777;
        if mode & 0o077 != 0 {
            return Err(CertError::Exposed { path: path.to_path_buf(), mode });
        }
    }
    Ok(bytes)
}

/// Replaces the file atomically and durably; `secret` files get mode 0600 before their content.
pub(super) fn write(path: &Path, bytes: &[u8], secret: bool) -> Result<(), CertError> {
    let mut new = path.as_os_str().to_owned();
    new.push(format!(".new-{}", std::process::id()));
    let new = Path::new(&new);
    let written = write_new(new, bytes, secret).and_then(|()| std::fs::rename(new, path));
    if written.is_err() {
        let _ = std::fs::remove_file(new);
    }
    written.map_err(|e| failed(path, &e))
}

fn write_new(path: &Path, bytes: &[u8], secret: bool) -> std::io::Result<()> {
    let _ = std::fs::remove_file(path);
    let mut options = OpenOptions::new();
    options.write(true).create_new(true);
    #[cfg(unix)]
    {
        use std::os::unix::fs::OpenOptionsExt;
        options.mode(if secret { 0o600 } else { 0o644 });
    }
    #[cfg(not(unix))]
    let _ = secret;
    let mut file = options.open(path)?;
    file.write_all(bytes)?;
    file.sync_all()
}

pub(super) fn make_dir(path: &Path) -> Result<(), CertError> {
    std::fs::create_dir_all(path).map_err(|e| failed(path, &e))
}

/// Holds off other processes until dropped.
pub(super) fn lock(path: &Path) -> Result<File, CertError> {
    let file = OpenOptions::new().create(true).truncate(false).write(true).open(path);
    let file = file.map_err(|e| failed(path, &e))?;
    file.lock().map_err(|e| failed(path, &e))?;
    Ok(file)
}

fn failed(path: &Path, error: &std::io::Error) -> CertError {
    CertError::File {
        path: path.to_path_buf(),
        reason: error.to_string(),
        mend: "check that the folder exists, belongs to this user and has space".to_string(),
    }
}
