//! What the operating system says of this process. Linux only; zeros elsewhere.

/// A process's own figures.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct ProcessStats {
    pub resident_bytes: u64,
    /// User and system time since the start.
    pub cpu_seconds: f64,
    pub threads: u64,
    pub open_files: u64,
}

/// Reads `/proc/self`; a figure that cannot be read is 0.
pub fn process_stats() -> ProcessStats {
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
    let open_files = std::fs::read_dir("/proc/self/fd").map_or(0, |entries| entries.count() as u64);
    ProcessStats { open_files, ..parse(&stat) }
}

/// `proc_pid_stat(5)`: the command in parentheses may hold anything, so fields count from its end.
fn parse(stat: &str) -> ProcessStats {
    let rest = stat.rsplit_once(')').map_or("", |(_, rest)| rest);
    let fields: Vec<&str> = rest.split_whitespace().collect();
    let number = |field: usize| -> u64 {
        // Field 3 is the first after the command.
        fields.get(field - 3).and_then(|text| text.parse().ok()).unwrap_or(0)
    };
    // The kernel reports these in units of USER_HZ, which is 100 on every Linux architecture that
    // Rust runs on, and pages, which are 4 KiB on x86-64 and on most arm64 systems.
    let ticks = number(14) + number(15);
    ProcessStats {
        resident_bytes: number(24) * page_bytes(),
        cpu_seconds: ticks as f64 / 100.0,
        threads: number(20),
        open_files: 0,
    }
}

/// From `/proc/self/smaps`' first mapping, so that no call into libc is needed.
fn page_bytes() -> u64 {
    static PAGE: std::sync::OnceLock<u64> = std::sync::OnceLock::new();
    *PAGE.get_or_init(|| {
        let smaps = std::fs::read_to_string("/proc/self/smaps").unwrap_or_default();
        let line = smaps.lines().find(|line| line.starts_with("KernelPageSize:"));
        let kib = line.and_then(|line| line.split_whitespace().nth(1)?.parse::<u64>().ok());
        kib.unwrap_or(4) * 1024
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_are_found_behind_an_odd_command() {
        let stat = "17 (a) b) (c) S 1 17 17 0 -1 4194560 100 0 0 0 150 50 0 0 20 0 9 0 100 \
                    1000000 300 18446744073709551615";
        let stats = parse(stat);
        assert_eq!(stats.cpu_seconds, 2.0);
        assert_eq!(stats.threads, 9);
        assert_eq!(stats.resident_bytes, 300 * page_bytes());
        assert_eq!(parse(""), ProcessStats::default());
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn this_process_has_figures() {
        let stats = process_stats();
        assert!(stats.resident_bytes > 1 << 20 && stats.resident_bytes < 1 << 36, "{stats:?}");
        assert!(stats.threads >= 1 && stats.open_files >= 3, "{stats:?}");
    }
}
