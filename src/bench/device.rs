//! `dunlin bench --device ID`: what a device reaches by itself, without a cluster.
//!
//! Beside each step stands what a copy and a plain product of matrices reach in the same run: a
//! decode step cannot be faster than its bytes allow, a prefill step not faster than its
//! operations do. A random model in the default model's shape is stepped unless one is named.

use std::path::Path;

use anyhow::{Context, Result, anyhow};
use dunlin_model::loader::ModelFiles;

use crate::engines::report::{Roofline, roofline};
use crate::models;

/// Measures and prints; `json` is written as well.
pub async fn run(id: String, model: Option<String>, json: Option<&Path>) -> Result<()> {
    let measured = tokio::task::spawn_blocking(move || -> Result<Roofline> {
        let files = model.map(|name| open(&name)).transpose()?;
        roofline(&id, files.as_ref()).map_err(|e| anyhow!(e))
    });
    let report = measured.await??;
    print(&report);
    if let Some(path) = json {
        let text = serde_json::to_string_pretty(&report)?;
        std::fs::write(path, text + "\n").with_context(|| format!("writing {}", path.display()))?;
    }
    Ok(())
}

fn open(name: &str) -> Result<ModelFiles> {
    let located = models::locate(name, &models::Options::from_env()?)?;
    Ok(ModelFiles::open(&located.path)?)
}

fn print(r: &Roofline) {
    println!("{}  {}", r.device, r.description);
    println!("copy         {:.1} GB/s read and written", r.copy_bytes_per_s / 1e9);
    println!("read         {:.1} GB/s of a float32 matrix", r.read_bytes_per_s / 1e9);
    println!("matmul       {:.1} GFLOP/s, float32, 512 x 512 x 512", r.matmul_flops_per_s / 1e9);
    println!("round trip   {:.2} ms", r.round_trip_ms);
    println!("model        {}, {:.1} MB of weights", r.model, r.weight_bytes as f64 / 1e6);
    println!();
    let head = ["rows", "past", "ms", "tokens/s", "MB", "GFLOP", "of bandwidth", "of matmul"];
    println!("{}", head.map(|name| format!("{name:>13}")).concat());
    for s in &r.steps {
        let row = [
            s.rows.to_string(),
            s.past.to_string(),
            format!("{:.2}", s.ms),
            format!("{:.1}", s.rows as f64 / s.ms * 1e3),
            format!("{:.1}", s.bytes / 1e6),
            format!("{:.2}", s.operations / 1e9),
            format!("{:.2}", s.share_of_bandwidth),
            format!("{:.2}", s.share_of_matmul),
        ];
        println!("{}", row.map(|cell| format!("{cell:>13}")).concat());
        let parts: Vec<String> =
            s.parts.iter().map(|(what, ms)| format!("{what} {ms:.2}")).collect();
        if !parts.is_empty() {
            println!("{:>13}  ms alone: {}", "", parts.join(", "));
        }
    }
}
