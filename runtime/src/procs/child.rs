//! One operating-system process: start, pipes, signals, burial.

use std::collections::{BTreeMap, VecDeque};
use std::fs::{File, OpenOptions};
use std::io::Write;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{ExitStatus, Stdio};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process_group};
use serde_json::Value;
use tokio::io::{AsyncRead, AsyncReadExt};
use tokio::process::{Child, Command};

use super::ProcessSpec;
use super::parent::PARENT_VARIABLE;

/// A log file larger than this is moved to `NAME.log.old` at the next start.
const ROTATE_BYTES: u64 = 16 << 20;
/// A longer line is split.
const LINE_BYTES: usize = 64 << 10;
/// Lines kept for error messages.
const TAIL_LINES: usize = 12;
/// A grandchild may hold the pipes open; wait this long for what is left in them.
const PIPES_WITHIN: Duration = Duration::from_millis(500);

/// Process groups that run, so that they can be killed from anywhere.
#[derive(Debug, Default)]
pub(super) struct Live(Mutex<BTreeMap<String, Pid>>);

impl Live {
    fn groups(&self) -> MutexGuard<'_, BTreeMap<String, Pid>> {
        // A panic elsewhere leaves the map whole.
        self.0.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    pub fn kill_all(&self) {
        for group in self.groups().values() {
            let _ = kill_process_group(*group, Signal::KILL);
        }
    }

    pub fn signal(&self, name: &str, signal: Signal) {
        if let Some(group) = self.groups().get(name) {
            let _ = kill_process_group(*group, signal);
        }
    }
}

/// What a child says by the protocol.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Report {
    Ready(Value),
    Error(String),
}

/// A started process.
pub(super) struct Running {
    pub pid: u32,
    child: Child,
    group: Pid,
    log: Arc<Log>,
    /// Closes when this process dies, however it does: the child's lifeline.
    lifeline: Option<tokio::process::ChildStdin>,
}

/// How a process ended.
#[derive(Debug)]
pub(super) struct End {
    pub how: String,
    pub tail: Vec<String>,
}

/// Starts the process. Must run on a thread that lives as long as the child may: the kernel's
/// parent-death signal goes by thread.
pub(super) fn start(spec: &ProcessSpec, live: &Live) -> Result<Running, String> {
    let log = Log::open(spec)?;
    let mut command = std::process::Command::new(&spec.program);
    command
        .args(&spec.args)
        .envs(spec.env.iter().map(|(key, value)| (key, value)))
        .env(PARENT_VARIABLE, std::process::id().to_string())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .process_group(0);
    let mut groups = live.groups();
    let mut child = Command::from(command)
        .spawn()
        .map_err(|e| format!("{} cannot be run: {e}", spec.program.display()))?;
    let pid = child.id().ok_or("it ended at once")?;
    let raw = i32::try_from(pid).map_err(|e| e.to_string())?;
    let group = Pid::from_raw(raw).ok_or("it has no process id")?;
    groups.insert(spec.name.clone(), group);
    let lifeline = child.stdin.take();
    Ok(Running { pid, child, group, log: Arc::new(log), lifeline })
}

impl Running {
    /// Passes on what the child prints until it ends; then nothing of its group is left.
    pub async fn watch(
        mut self,
        name: &str,
        live: &Live,
        report: impl Fn(Report) + Send + Sync + 'static,
    ) -> End {
        let (stdout, stderr) = (self.child.stdout.take(), self.child.stderr.take());
        let log = self.log.clone();
        let out = tokio::spawn(async move {
            read_lines(stdout, |line| match parse_report(line) {
                Some(said) => report(said),
                None => log.line(line),
            })
            .await;
        });
        let log = self.log.clone();
        let err = tokio::spawn(async move { read_lines(stderr, |line| log.line(line)).await });
        let status = self.child.wait().await;
        let _ = kill_process_group(self.group, Signal::KILL);
        live.groups().retain(|other, group| other != name || *group != self.group);
        drop(self.lifeline.take());
        for pipe in [out, err] {
            let abort = pipe.abort_handle();
            if tokio::time::timeout(PIPES_WITHIN, pipe).await.is_err() {
                abort.abort();
            }
        }
        let how = match status {
            Ok(status) => describe(status),
            Err(e) => format!("cannot be waited for: {e}"),
        };
        self.log.line(&format!("(the process {how})"));
        End { how, tail: self.log.tail() }
    }
}

/// `exited with code 101 (a panic)`, `was killed by signal 9 (SIGKILL)`.
fn describe(status: ExitStatus) -> String {
    match (status.code(), status.signal()) {
        (Some(101), _) => "exited with code 101 (a panic)".to_string(),
        (Some(code), _) => format!("exited with code {code}"),
        (None, Some(signal)) => {
            let name = match signal {
                2 => "SIGINT",
                4 => "SIGILL",
                6 => "SIGABRT",
                7 => "SIGBUS",
                8 => "SIGFPE",
                9 => "SIGKILL",
                11 => "SIGSEGV",
                15 => "SIGTERM",
                _ => "see signal(7)",
            };
            format!("was killed by signal {signal} ({name})")
        }
        (None, None) => status.to_string(),
    }
}

fn parse_report(line: &str) -> Option<Report> {
    let Value::Object(mut object) = serde_json::from_str(line).ok()? else { return None };
    if let Some(ready) = object.remove("ready") {
        return Some(Report::Ready(ready));
    }
    match object.remove("error") {
        Some(Value::String(message)) => Some(Report::Error(message)),
        _ => None,
    }
}

/// Calls `each` with every line, without its end; a line that is too long comes in pieces.
async fn read_lines(pipe: Option<impl AsyncRead + Unpin>, mut each: impl FnMut(&str)) {
    let Some(mut pipe) = pipe else { return };
    let mut held: Vec<u8> = Vec::new();
    let mut chunk = vec![0; 8192];
    loop {
        let count = match pipe.read(&mut chunk).await {
            Ok(0) | Err(_) => break,
            Ok(count) => count,
        };
        held.extend_from_slice(&chunk[..count]);
        while let Some(end) = held.iter().position(|byte| *byte == b'\n') {
            let line: Vec<u8> = held.drain(..=end).collect();
            each(String::from_utf8_lossy(&line).trim_end_matches(['\n', '\r']));
        }
        if held.len() >= LINE_BYTES {
            each(&String::from_utf8_lossy(&std::mem::take(&mut held)));
        }
    }
    if !held.is_empty() {
        each(&String::from_utf8_lossy(&held));
    }
}

/// A node's log file, the end of which is remembered.
struct Log {
    file: Mutex<(File, VecDeque<String>)>,
    /// Printed before each echoed line; `None`: nothing is echoed.
    prefix: Option<String>,
}

impl Log {
    fn open(spec: &ProcessSpec) -> Result<Log, String> {
        let path = &spec.log_file;
        let failed =
            |e: std::io::Error| format!("its log {} cannot be written: {e}", path.display());
        if let Some(folder) = path.parent() {
            std::fs::create_dir_all(folder).map_err(failed)?;
        }
        if std::fs::metadata(path).is_ok_and(|meta| meta.len() > ROTATE_BYTES) {
            let mut old = path.as_os_str().to_owned();
            old.push(".old");
            std::fs::rename(path, old).map_err(failed)?;
        }
        let file = OpenOptions::new().create(true).append(true).open(path).map_err(failed)?;
        let prefix = spec.echo.then(|| spec.name.clone());
        Ok(Log { file: Mutex::new((file, VecDeque::new())), prefix })
    }

    fn line(&self, line: &str) {
        if let Some(name) = &self.prefix {
            eprintln!("{name:>8} | {line}");
        }
        let mut log = self.file.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        let (file, tail) = &mut *log;
        // A full disk must not stop the node.
        let _ = writeln!(file, "{line}");
        if tail.len() == TAIL_LINES {
            tail.pop_front();
        }
        tail.push_back(line.chars().take(300).collect());
    }

    fn tail(&self) -> Vec<String> {
        let log = self.file.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        log.1.iter().cloned().collect()
    }
}
