//! What is kept on disk for an adapter, so that a start need not measure and compile anew: which
//! variants of kernels were fastest, and the driver's own compiled pipelines.
//!
//! A file counts only if it was written for just this adapter, driver and these shaders, and is
//! whole; anything else is passed over and written anew. Nothing here is an error for the caller:
//! without a file there is a measurement. Files appear whole (a temporary name, then a rename), so
//! processes may share the folder.

use crate::kernels::shader_texts;
use crate::tune::Tuning;
use dunlin_backend::checksum;
use serde::{Deserialize, Serialize};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

/// The files of one adapter.
pub(crate) struct Store {
    tuning: PathBuf,
    pipelines: PathBuf,
    key: Key,
}

/// What a file's content depends on.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Key {
    /// Rises when the meaning of these files changes.
    format: u32,
    adapter: String,
    driver: String,
    api: String,
    /// Over the texts of all kernels.
    shaders: u64,
}

#[derive(Serialize, Deserialize)]
struct Kept {
    key: Key,
    tuning: Tuning,
}

impl Store {
    pub fn new(folder: &Path, info: &wgpu::AdapterInfo) -> Self {
        let key = Key {
            format: 1,
            adapter: info.name.clone(),
            driver: format!("{} {}", info.driver, info.driver_info),
            api: format!("{:?}", info.backend),
            shaders: shaders_sum(),
        };
        // The shaders are not in the name: a new build writes over what the old one kept.
        let name = [&key.adapter, &key.driver, &key.api].map(String::as_str).join("\n");
        let name = format!("{:016x}", checksum(name.as_bytes()));
        Self {
            tuning: folder.join(format!("{name}.tuning.json")),
            pipelines: folder.join(format!("{name}.pipelines")),
            key,
        }
    }

    /// What was measured, if it was for this key and is something that could be measured.
    pub fn tuning(&self) -> Option<Tuning> {
        let text = std::fs::read(&self.tuning).ok()?;
        let kept: Option<Kept> = serde_json::from_slice(&text).ok();
        let kept = kept.filter(|kept| kept.key == self.key && kept.tuning.is_possible());
        if kept.is_none() {
            tracing::info!(file = %self.tuning.display(), "passing over what was measured before");
        }
        kept.map(|kept| kept.tuning)
    }

    pub fn keep_tuning(&self, tuning: &Tuning) {
        let kept = Kept { key: self.key.clone(), tuning: *tuning };
        let text = serde_json::to_vec_pretty(&kept).map_err(io::Error::other);
        let written = text.and_then(|text| write(&self.tuning, &text));
        self.note(&self.tuning, written);
    }

    /// The driver's compiled pipelines, as it gave them.
    pub fn pipelines(&self) -> Option<Vec<u8>> {
        let bytes = std::fs::read(&self.pipelines).ok()?;
        let (head, data) = bytes.split_at_checked(16)?;
        (head == self.head(data)).then(|| data.to_vec())
    }

    pub fn keep_pipelines(&self, data: &[u8]) {
        let mut bytes = self.head(data).to_vec();
        bytes.extend_from_slice(data);
        self.note(&self.pipelines, write(&self.pipelines, &bytes));
    }

    /// Sums of the key and of the data: drivers check little of what they are given.
    fn head(&self, data: &[u8]) -> [u8; 16] {
        let key = checksum(format!("{:?}", self.key).as_bytes());
        let mut head = [0; 16];
        head[..8].copy_from_slice(&key.to_le_bytes());
        head[8..].copy_from_slice(&checksum(data).to_le_bytes());
        head
    }

    fn note(&self, file: &Path, written: io::Result<()>) {
        if let Err(error) = written {
            tracing::info!(file = %file.display(), %error, "the next start measures anew");
        }
    }
}

fn shaders_sum() -> u64 {
    static SUM: OnceLock<u64> = OnceLock::new();
    *SUM.get_or_init(|| {
        let texts: Vec<String> =
            shader_texts().into_iter().map(|(name, text, _)| name + &text).collect();
        checksum(texts.concat().as_bytes())
    })
}

fn write(file: &Path, bytes: &[u8]) -> io::Result<()> {
    if let Some(folder) = file.parent() {
        std::fs::create_dir_all(folder)?;
    }
    let own = file.with_extension(format!("{}.tmp", std::process::id()));
    std::fs::write(&own, bytes)?;
    std::fs::rename(&own, file)
}
