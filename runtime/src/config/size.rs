//! Sizes in bytes, as people write them.

/// `"512MiB"`, `"1.5GiB"`, `"100 MB"`, `"4096"`: a number with an optional unit, decimal (kB, MB,
/// GB, TB) or binary (KiB, MiB, GiB, TiB). `None` if it is not that, or above 2^60.
pub fn parse_size(text: &str) -> Option<u64> {
    let text = text.trim();
    let split = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, unit) = text.split_at(split);
    let factor: u64 = match unit.trim().to_ascii_lowercase().as_str() {
        "" | "b" => 1,
        "kb" => 1_000,
        "mb" => 1_000_000,
        "gb" => 1_000_000_000,
        "tb" => 1_000_000_000_000,
        "kib" => 1 << 10,
        "mib" => 1 << 20,
        "gib" => 1 << 30,
        "tib" => 1 << 40,
        _ => return None,
    };
    let most = 1u64 << 60;
    let bytes = match number.parse::<u64>() {
        Ok(whole) => whole.checked_mul(factor)?,
        Err(_) => {
            let bytes = number.parse::<f64>().ok()? * factor as f64;
            if !(0.0..=most as f64).contains(&bytes) {
                return None;
            }
            bytes as u64
        }
    };
    (bytes <= most).then_some(bytes)
}

/// `1.5 GiB`: three digits at most, binary units.
pub fn format_size(bytes: u64) -> String {
    let units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
    let mut value = bytes as f64;
    let mut unit = 0;
    while value >= 1024.0 && unit + 1 < units.len() {
        value /= 1024.0;
        unit += 1;
    }
    let digits = if unit == 0 || value >= 100.0 || value.fract() == 0.0 { 0 } else { 1 };
    format!("{value:.digits$} {}", units[unit])
}
