//! Signals to processes, and what `/proc` says of them.

use rustix::process::{Pid, Signal, kill_process};

/// False if there is no such process.
pub fn send(pid: u32, signal: Signal) -> bool {
    let pid = i32::try_from(pid).ok().and_then(Pid::from_raw);
    pid.is_some_and(|pid| kill_process(pid, signal).is_ok())
}

/// A signal by its name without SIG.
pub fn named(name: &str) -> Option<Signal> {
    Some(match name {
        "KILL" => Signal::KILL,
        "TERM" => Signal::TERM,
        "INT" => Signal::INT,
        "ABRT" => Signal::ABORT,
        "SEGV" => Signal::SEGV,
        "QUIT" => Signal::QUIT,
        _ => return None,
    })
}

/// The state letter of a process: `R` runs, `S` sleeps, `T` is stopped.
pub fn state(pid: u32) -> Option<char> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name before it may hold anything, also parentheses.
    text.rsplit_once(") ")?.1.chars().next()
}

/// Bytes of resident memory.
pub fn resident(pid: u32) -> Option<u64> {
    status_bytes(pid, "VmRSS:")
}

/// Those that are its own: not the mapped model file, which the machine may take back.
pub fn private(pid: u32) -> Option<u64> {
    status_bytes(pid, "RssAnon:")
}

fn status_bytes(pid: u32, field: &str) -> Option<u64> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let line = text.lines().find(|line| line.starts_with(field))?;
    let kib: u64 = line.split_whitespace().nth(1)?.parse().ok()?;
    Some(kib * 1024)
}
