//! Which `cluster.toml`, and what is set over it.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use dunlin_runtime::config::ClusterConfig;

/// The file that is read when none is named.
const DEFAULT_FILE: &str = "cluster.toml";
/// What it says where there is none.
const BUILT_IN: &str = include_str!("../cluster.toml");

#[derive(Debug, Clone, Default, clap::Args)]
pub struct ConfigArgs {
    /// The cluster's file [default: ./cluster.toml, else a built-in one: three processes here]
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Serve this model instead: alias, file, folder, or hub id
    #[arg(long, value_name = "MODEL")]
    pub model: Option<String>,
    /// Set one value over the file's, like --set scheduler.step_tokens=64
    #[arg(long = "set", value_name = "KEY=VALUE", value_parser = key_value)]
    pub set: Vec<(String, String)>,
}

fn key_value(text: &str) -> Result<(String, String), String> {
    let parts = text.split_once('=').ok_or("write it as KEY=VALUE")?;
    Ok((parts.0.trim().to_string(), parts.1.trim().to_string()))
}

impl ConfigArgs {
    pub fn load(&self) -> Result<ClusterConfig> {
        let default = Path::new(DEFAULT_FILE);
        let mut config = match &self.config {
            Some(file) => ClusterConfig::load(file)?,
            None if default.exists() => ClusterConfig::load(default)?,
            None => ClusterConfig::parse(BUILT_IN, DEFAULT_FILE).context("built-in")?,
        };
        if let Some(model) = &self.model {
            // As a TOML string, whatever it looks like.
            config.set("cluster.model", &serde_json::to_string(model)?)?;
        }
        for (key, value) in &self.set {
            config.set(key, value)?;
        }
        Ok(config)
    }

    /// Arguments that give a child process the same configuration.
    pub fn for_child(&self, config: &ClusterConfig) -> Vec<std::ffi::OsString> {
        let mut args = Vec::new();
        if let Some(file) = &self.config {
            args.extend(["--config".into(), file.into()]);
        }
        for (key, value) in config.overrides() {
            args.extend(["--set".into(), format!("{key}={value}").into()]);
        }
        args
    }
}
