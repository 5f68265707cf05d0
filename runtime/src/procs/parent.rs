//! The child's side: it reports to the process that started it, and does not outlive it.

use std::io::{Read, Write};

use serde_json::{Value, json};

/// Tells a child which process supervises it.
pub(super) const PARENT_VARIABLE: &str = "DUNLIN_SUPERVISOR_PID";

/// If this process was started by [`super::Processes`], ties its life to the starter's: it ends when
/// its standard input, which the starter holds open, closes; on Linux the kernel kills it besides,
/// even if all its threads are stuck. Returns whether it is supervised.
///
/// Call it first in `main`, before there are other threads that read standard input.
pub fn follow_parent() -> bool {
    let Some(parent) = std::env::var(PARENT_VARIABLE).ok().and_then(|pid| pid.parse().ok()) else {
        return false;
    };
    kill_me_with(parent);
    let watch = std::thread::Builder::new().name("lifeline".to_string()).spawn(|| {
        let mut byte = [0];
        loop {
            match std::io::stdin().read(&mut byte) {
                Ok(0) => break,
                Ok(_) => {}
                Err(e) if e.kind() == std::io::ErrorKind::Interrupted => {}
                Err(_) => break,
            }
        }
        std::process::exit(EXIT_ORPHANED);
    });
    watch.is_ok()
}

/// The exit code of a node whose supervisor is gone.
const EXIT_ORPHANED: i32 = 71;

#[cfg(target_os = "linux")]
fn kill_me_with(parent: u32) {
    use rustix::process::{Signal, getppid, set_parent_process_death_signal};
    let _ = set_parent_process_death_signal(Some(Signal::KILL));
    // It may have died before the request.
    let alive = getppid().is_some_and(|pid| pid.as_raw_nonzero().get().unsigned_abs() == parent);
    if !alive {
        std::process::exit(EXIT_ORPHANED);
    }
}

#[cfg(not(target_os = "linux"))]
fn kill_me_with(_parent: u32) {}

/// Says that this process does its work from now on.
pub fn report_ready(report: &Value) {
    print_line(&json!({ "ready": report }));
}

/// Says why this process gives up. Exit afterwards.
pub fn report_error(message: &str) {
    print_line(&json!({ "error": message }));
}

/// A closed pipe means that nobody listens any more.
fn print_line(line: &Value) {
    let mut out = std::io::stdout().lock();
    let _ = writeln!(out, "{line}").and_then(|()| out.flush());
}
