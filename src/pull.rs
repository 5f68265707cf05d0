//! `dunlin pull MODEL`: fetch a model, check it, say where it lies.

use crate::models::{self, Options};
use anyhow::{Context, Result};
use dunlin_model::loader::ModelFiles;

/// Fetch a model into the local cache and check it.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// A file, a folder, a hub id (owner/name[@revision][:file.gguf]) or an alias.
    #[arg(default_value = models::DEFAULT)]
    model: String,
}

/// Fetches, opens and describes the model; its path is the last line on standard output.
pub async fn run(args: Args) -> Result<()> {
    let name = args.model.clone();
    let located = tokio::task::spawn_blocking(move || -> Result<models::Located> {
        Ok(models::locate(&name, &Options::from_env()?)?)
    })
    .await
    .context("fetching the model was interrupted")??;
    let path = located.path.clone();
    let files = tokio::task::spawn_blocking(move || ModelFiles::open(&path))
        .await
        .context("opening the model was interrupted")??;
    let spec = files.spec();
    let how = if located.fetched { "fetched" } else { "already here" };
    eprintln!(
        "dunlin: {} {how}: {:?}, {} layers, hidden {}, vocabulary {}, context {}, {} MB",
        args.model,
        spec.family,
        spec.layers,
        spec.hidden,
        spec.vocab,
        spec.context,
        files.bytes() / 1_000_000,
    );
    println!("{}", located.path.display());
    Ok(())
}
