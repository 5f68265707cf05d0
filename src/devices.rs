//! `dunlin devices`: what of this machine can compute, and how fast.

use std::process::ExitCode;

use anyhow::Result;

use crate::engines::report::{DeviceReport, devices};

/// Devices of this machine as cluster.toml names them, with memory, features and measured rates.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// List without measuring
    #[arg(long)]
    no_measure: bool,
    /// As JSON, for programs
    #[arg(long)]
    json: bool,
}

pub async fn run(args: Args) -> Result<ExitCode> {
    let measure = !args.no_measure;
    let found = tokio::task::spawn_blocking(move || devices(measure)).await?;
    if args.json {
        println!("{}", serde_json::to_string_pretty(&found)?);
        return Ok(ExitCode::SUCCESS);
    }
    for device in &found {
        print(device);
    }
    Ok(ExitCode::SUCCESS)
}

fn print(device: &DeviceReport) {
    const GIB: f64 = (1u64 << 30) as f64;
    println!("{}  {}", device.id, device.description);
    println!("    {:<12}{:.1} GiB", "memory", device.memory_bytes as f64 / GIB);
    if !device.features.is_empty() {
        println!("    {:<12}{}", "features", device.features.join(", "));
    }
    match (&device.rates, &device.trouble) {
        (Some(rates), _) => {
            println!("    {:<12}{:.1} GB/s", rates.bandwidth_of, rates.bytes_per_s / 1e9);
            let flops = rates.matmul_flops_per_s / 1e9;
            println!("    {:<12}{flops:.1} GFLOP/s ({})", "matmul", rates.matmul_of);
        }
        (None, Some(trouble)) => println!("    {:<12}{trouble}", "trouble"),
        (None, None) => {}
    }
}
