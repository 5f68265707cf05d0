//! The counter that tells a node's lives apart.

use std::path::Path;

use super::{CertError, bundle_path, files};

/// A number higher than any before for this node, kept in its bundle before it is returned.
///
/// It is seconds since 1970, or one more than the last if that is higher (a clock that went back,
/// lives shorter than a second): so it also rises when the bundle is copied to a new machine. It fits
/// 40 bits for as long as clocks are sane.
pub fn next_incarnation(dir: &Path, node: &str) -> Result<u64, CertError> {
    next_at(dir, node, crate::wall::unix_seconds())
}

pub(super) fn next_at(dir: &Path, node: &str, now: u64) -> Result<u64, CertError> {
    let bundle = bundle_path(dir, node);
    if !bundle.is_dir() {
        return Err(CertError::NoBundle { node: node.to_string(), dir: dir.to_path_buf() });
    }
    let path = bundle.join("incarnation");
    let _lock = files::lock(&bundle.join("lock"))?;
    let last = if path.exists() { Some(parse(&path)?) } else { None };
    let next = last.map_or(now, |last| now.max(last.saturating_add(1)));
    files::write(&path, format!("{next}\n").as_bytes(), false)?;
    Ok(next)
}

fn parse(path: &Path) -> Result<u64, CertError> {
    let bytes = files::read(path)?;
    let text = std::str::from_utf8(&bytes).unwrap_or_default().trim();
    text.parse().map_err(|_| CertError::File {
        path: path.to_path_buf(),
        reason: "it does not hold a number".to_string(),
        mend: "remove it; the next life then counts from the clock".to_string(),
    })
}
