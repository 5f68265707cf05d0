//! Models on the Hugging Face hub, through the crate `hf-hub`.
//!
//! The 0.5 line of the crate is used on purpose: 1.0 speaks the Xet protocol and brings over a
//! hundred more crates (a second TLS stack built from C among them) for the same two questions we
//! ask, "what is in this repository" and "give me this file". Version 0.5 sets no time-outs, so
//! every use here runs under a watchdog: a probe of two seconds, then an end when nothing has
//! arrived for thirty.

use super::verify::{Incoming, sha256_of};
use super::{Alias, ModelError, Options, progress_bar};
use hf_hub::api::Progress;
use hf_hub::api::sync::{Api, ApiBuilder, ApiRepo};
use hf_hub::{Cache, Repo, RepoType};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fs;
use std::net::{TcpStream, ToSocketAddrs};
use std::path::{Component, Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

const PROBE: Duration = Duration::from_secs(2);
const STALL: Duration = Duration::from_secs(30);
/// Lists what was fetched, once all of it is there.
const COMPLETE: &str = ".dunlin-complete.json";
/// Files of a model folder beside its weights.
const COMPANIONS: [&str; 5] = [
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
];

/// `owner/name[@revision][:file]`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct HubId {
    repo: String,
    revision: String,
    file: Option<String>,
}

/// What [`COMPLETE`] holds: sizes by file.
#[derive(Debug, Serialize, Deserialize)]
struct Complete {
    files: BTreeMap<String, u64>,
}

impl HubId {
    pub(super) fn new(repo: &str, revision: Option<&str>, file: Option<&str>) -> Self {
        let revision = revision.unwrap_or("main").to_owned();
        Self { repo: repo.to_owned(), revision, file: file.map(str::to_owned) }
    }

    pub(super) fn parse(name: &str) -> Option<Self> {
        let (rest, file) = match name.split_once(':') {
            Some((rest, file)) => (rest, Some(file)),
            None => (name, None),
        };
        let (repo, revision) = match rest.split_once('@') {
            Some((repo, revision)) => (repo, Some(revision)),
            None => (rest, None),
        };
        let word = |s: &str| {
            !s.is_empty()
                && !s.starts_with('.')
                && s.chars().all(|c| c.is_ascii_alphanumeric() || "-_.".contains(c))
        };
        let (owner, model) = repo.split_once('/')?;
        let fine = word(owner)
            && word(model)
            && revision.is_none_or(|r| !r.is_empty() && r.split('/').all(word))
            && file.is_none_or(is_plain);
        fine.then(|| Self::new(repo, revision, file))
    }

    fn repo(&self) -> Repo {
        Repo::with_revision(self.repo.clone(), RepoType::Model, self.revision.clone())
    }
}

/// The model, if all of it was fetched before and is still as large as it was.
pub(super) fn cached(id: &HubId, options: &Options) -> Option<PathBuf> {
    let folder = snapshot(id, options)?;
    let complete = fs::read_to_string(folder.join(COMPLETE)).ok()?;
    let complete: Complete = serde_json::from_str(&complete).ok()?;
    let whole = |(name, size): (&String, &u64)| {
        is_plain(name) && fs::metadata(folder.join(name)).is_ok_and(|m| m.len() == *size)
    };
    let has = |file: &String| complete.files.contains_key(file);
    let wanted = match &id.file {
        Some(file) => has(file),
        None => true,
    };
    (wanted && complete.files.iter().all(whole)).then(|| path_of(&folder, &complete, id))
}

/// Fetches the model with what belongs to it; returns the file or folder to open.
pub(super) fn fetch(id: &HubId, options: &Options) -> Result<PathBuf, ModelError> {
    let api = connect(options)?;
    let repo = Arc::new(api.repo(id.repo()));
    let asked = repo.clone();
    let info = watched("asking for the list of files", Progressed::default(), move |_| {
        asked.info().map_err(|e| refuse(e.to_string()))
    })?;
    let listed: Vec<String> = info.siblings.into_iter().map(|s| s.rfilename).collect();
    let mut complete = Complete { files: BTreeMap::new() };
    let mut folder = None;
    for file in choose(id, &listed)? {
        let path = fetch_file(&api, &repo, &file, options)?;
        let size = fs::metadata(&path).map_err(|e| ModelError::io("look at", &path, e))?.len();
        complete.files.insert(file, size);
        folder = path.parent().map(Path::to_owned);
    }
    let folder = folder.ok_or_else(|| refuse("nothing was fetched".into()))?;
    let mark = folder.join(COMPLETE);
    let text = serde_json::to_string(&complete).map_err(|e| refuse(e.to_string()))?;
    fs::write(&mark, text).map_err(|e| ModelError::io("write", &mark, e))?;
    Ok(path_of(&folder, &complete, id))
}

/// Fetches the one file of an alias, if the hub's has the right checksum.
pub(super) fn fetch_exact(id: &HubId, alias: &Alias, options: &Options) -> Result<(), ModelError> {
    let api = connect(options)?;
    let repo = Arc::new(api.repo(id.repo()));
    let file = id.file.clone().unwrap_or_default();
    let (asked, url) = (api.clone(), repo.url(&file));
    let metadata = watched("asking for the checksum", Progressed::default(), move |_| {
        asked.metadata(&url).map_err(|e| refuse(e.to_string()))
    })?;
    if metadata.etag() != alias.sha256 {
        return Err(ModelError::Damaged {
            what: format!("the hub's {file}"),
            want: alias.sha256.to_owned(),
            got: metadata.etag().to_owned(),
        });
    }
    let path = fetch_file(&api, &repo, &file, options)?;
    let mut incoming = Incoming::new(alias, &options.cache)?;
    let mut from = fs::File::open(&path).map_err(|e| ModelError::io("open", &path, e))?;
    incoming.append(&mut from)?;
    incoming.finish()?;
    // The file has its place; the hub's copy of it would only double the space.
    let blob = fs::canonicalize(&path).unwrap_or_else(|_| path.clone());
    let _ = fs::remove_file(&path);
    let _ = fs::remove_file(blob);
    Ok(())
}

/// Downloads one file into the hub's cache layout and checks it.
fn fetch_file(
    api: &Api,
    repo: &Arc<ApiRepo>,
    file: &str,
    options: &Options,
) -> Result<PathBuf, ModelError> {
    let (asked, url) = (api.clone(), repo.url(file));
    let what = format!("asking for {file}");
    let metadata = watched(&what, Progressed::default(), move |_| {
        asked.metadata(&url).map_err(|e| refuse(format!("{e}")))
    })?;
    let bar = progress_bar(options, file, metadata.size() as u64);
    let (repo, name) = (repo.clone(), file.to_owned());
    let progress = Progressed { bar: Some(bar.clone()), count: Arc::default() };
    let path = watched(&format!("downloading {file}"), progress, move |progress| {
        repo.download_with_progress(&name, progress).map_err(|e| refuse(format!("{name}: {e}")))
    })?;
    bar.finish_and_clear();
    let size = fs::metadata(&path).map_err(|e| ModelError::io("look at", &path, e))?.len();
    // Large files have their SHA-256 as tag, small ones git's hash.
    let want = metadata.etag();
    let hashed = want.len() == 64 && want.bytes().all(|b| b.is_ascii_hexdigit());
    let got = if hashed { sha256_of(&path)? } else { want.to_owned() };
    if size != metadata.size() as u64 || got != want {
        // Out of the way, or the next attempt would find it.
        let blob = fs::canonicalize(&path).unwrap_or_else(|_| path.clone());
        let _ = fs::remove_file(&path);
        let _ = fs::remove_file(blob);
        return Err(ModelError::Damaged {
            what: format!("what was fetched as {file} ({size} of {} bytes)", metadata.size()),
            want: want.to_owned(),
            got,
        });
    }
    Ok(path)
}

/// Which files to fetch, weights last.
fn choose(id: &HubId, listed: &[String]) -> Result<Vec<String>, ModelError> {
    if let Some(file) = &id.file {
        return match listed.contains(file) {
            true => Ok(vec![file.clone()]),
            false => Err(refuse(format!("{} has no file '{file}'", id.repo))),
        };
    }
    let top: Vec<&String> = listed.iter().filter(|f| !f.contains('/') && is_plain(f)).collect();
    let with = |extension: &str| -> Vec<String> {
        let of = |f: &&&String| Path::new(f.as_str()).extension().is_some_and(|e| e == extension);
        top.iter().filter(of).map(|f| (*f).clone()).collect()
    };
    let weights: Vec<String> = with("safetensors");
    let config = top.iter().any(|f| *f == "config.json");
    if config && weights.iter().any(|f| f.starts_with("model")) {
        let mut files: Vec<String> =
            COMPANIONS.iter().map(|c| (*c).to_owned()).filter(|c| listed.contains(c)).collect();
        let index = "model.safetensors.index.json".to_owned();
        files.extend(listed.contains(&index).then_some(index));
        files.extend(weights.into_iter().filter(|f| f.starts_with("model")));
        return Ok(files);
    }
    match with("gguf").as_slice() {
        [one] => Ok(vec![one.clone()]),
        [] => Err(refuse(format!("{} has neither model*.safetensors nor a .gguf", id.repo))),
        many => {
            let names = many.join(", ");
            let reason = format!(
                "{0} has {1} .gguf files; name one as {0}:FILE. They are {names}",
                id.repo,
                many.len()
            );
            Err(refuse(reason))
        }
    }
}

/// The file asked for, the only GGUF, or the folder.
fn path_of(folder: &Path, complete: &Complete, id: &HubId) -> PathBuf {
    let only =
        complete.files.keys().next().filter(|f| complete.files.len() == 1 && f.ends_with(".gguf"));
    match id.file.as_ref().or(only) {
        Some(file) => folder.join(file),
        None => folder.to_owned(),
    }
}

fn cache(options: &Options) -> Cache {
    Cache::new(options.cache.join("hub"))
}

/// The folder of the revision that was fetched last under this name.
fn snapshot(id: &HubId, options: &Options) -> Option<PathBuf> {
    let repo = cache(options).repo(id.repo());
    let root = options.cache.join("hub").join(id.repo().folder_name());
    let commit = fs::read_to_string(root.join("refs").join(&id.revision)).ok()?;
    is_plain(commit.trim()).then(|| repo.pointer_path(commit.trim()))
}

fn connect(options: &Options) -> Result<Api, ModelError> {
    let Some(endpoint) = &options.hub else {
        return Err(refuse("ruled out by HF_HUB_OFFLINE".into()));
    };
    probe(endpoint)?;
    let token = Cache::from_env().token();
    let api = ApiBuilder::from_cache(cache(options)).with_endpoint(endpoint.clone());
    api.with_token(token).with_progress(false).build().map_err(|e| refuse(e.to_string()))
}

/// Whether anything answers at the endpoint, within [`PROBE`]. Skipped where a proxy stands
/// between.
fn probe(endpoint: &str) -> Result<(), ModelError> {
    let proxies = ["HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"];
    if proxies.iter().any(|p| std::env::var_os(p).is_some_and(|v| !v.is_empty())) {
        return Ok(());
    }
    let (scheme, rest) = endpoint.split_once("://").unwrap_or(("https", endpoint));
    let host = rest.split('/').next().unwrap_or_default().to_owned();
    let port = if scheme == "http" { 80 } else { 443 };
    let address = if host.contains(':') { host.clone() } else { format!("{host}:{port}") };
    let (done, answer) = mpsc::channel();
    std::thread::spawn(move || {
        let connected = address.to_socket_addrs().and_then(|mut all| {
            let none = std::io::Error::other("the name has no address");
            let first = all.next().ok_or(none)?;
            TcpStream::connect_timeout(&first, PROBE)
        });
        let _ = done.send(connected.map(drop).map_err(|e| e.to_string()));
    });
    let silence = Err(format!("no answer within {} s", PROBE.as_secs()));
    let answer = answer.recv_timeout(PROBE).unwrap_or(silence);
    answer.map_err(|e| refuse(format!("{host} is not reachable ({e})")))
}

/// Runs `work` on a thread of its own; gives up on it when its progress has stood still for
/// [`STALL`]. The thread then ends with the process.
fn watched<T: Send + 'static>(
    what: &str,
    progress: Progressed,
    work: impl FnOnce(Progressed) -> Result<T, ModelError> + Send + 'static,
) -> Result<T, ModelError> {
    let count = progress.count.clone();
    let (done, answer) = mpsc::channel();
    std::thread::spawn(move || done.send(work(progress)).ok());
    let (mut seen, mut since) = (0, Instant::now());
    loop {
        match answer.recv_timeout(Duration::from_millis(200)) {
            Ok(result) => return result,
            Err(mpsc::RecvTimeoutError::Disconnected) => {
                return Err(refuse(format!("{what}: the hub's client panicked")));
            }
            Err(mpsc::RecvTimeoutError::Timeout) => {
                let now = count.load(Ordering::Relaxed);
                if now != seen {
                    (seen, since) = (now, Instant::now());
                } else if since.elapsed() > STALL {
                    let reason = format!("{what}: nothing came for {} s", STALL.as_secs());
                    return Err(refuse(reason));
                }
            }
        }
    }
}

/// Counts bytes for the watchdog and the bar.
#[derive(Default)]
struct Progressed {
    bar: Option<indicatif::ProgressBar>,
    count: Arc<AtomicU64>,
}

impl Progress for Progressed {
    fn init(&mut self, _: usize, _: &str) {}
    fn update(&mut self, bytes: usize) {
        self.count.fetch_add(bytes as u64, Ordering::Relaxed);
        if let Some(bar) = &self.bar {
            bar.inc(bytes as u64);
        }
    }
    fn finish(&mut self) {}
}

fn refuse(reason: String) -> ModelError {
    ModelError::Source { reason }
}

/// A relative path that stays below its folder.
fn is_plain(name: &str) -> bool {
    !name.is_empty() && Path::new(name).components().all(|c| matches!(c, Component::Normal(_)))
}
