//! The command line with real processes: the hash engine stands in for a model, so that only the
//! machinery around it is tested here.

use std::io::{BufRead, BufReader, Read};
use std::net::{TcpListener, UdpSocket};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::time::{Duration, Instant};

mod ports;
use ports::free_port;

/// Every wrong value must have been named by then.
const ERROR_WITHIN: Duration = Duration::from_secs(10);
/// Far beyond what starting takes on a busy machine.
const PATIENCE: Duration = Duration::from_secs(120);

struct Folder(tempfile::TempDir);

impl Folder {
    fn new() -> Folder {
        Folder(tempfile::tempdir().expect("a temporary folder"))
    }

    fn path(&self) -> &Path {
        self.0.path()
    }

    fn write(&self, name: &str, text: &str) -> PathBuf {
        let path = self.path().join(name);
        std::fs::write(&path, text).expect("a file in a temporary folder");
        path
    }

    fn dunlin(&self, args: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_dunlin"));
        command.args(args).current_dir(self.path()).env("DUNLIN_OFFLINE", "1");
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    }

    /// Runs to the end.
    fn run(&self, args: &[&str]) -> Output {
        self.dunlin(args).output().expect("dunlin runs")
    }

    fn log(&self, node: &str) -> String {
        let path = self.path().join(format!(".dunlin/logs/{node}.log"));
        std::fs::read_to_string(path).unwrap_or_default()
    }
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Three processes: front, and two workers with a replica each.
struct Ports {
    http: u16,
    nodes: [u16; 3],
}

impl Ports {
    fn new() -> Ports {
        Ports { http: free_port(), nodes: [free_port(), free_port(), free_port()] }
    }

    fn config(&self) -> String {
        let [front, left, right] = self.nodes;
        let http = self.http;
        format!(
            "[cluster]\nname = \"cli\"\nhead = \"front\"\n\
             [node.front]\naddress = \"127.0.0.1:{front}\"\nhttp = \"127.0.0.1:{http}\"\n\
             [node.left]\naddress = \"127.0.0.1:{left}\"\ndevices = [\"cpu\"]\n\
             [node.right]\naddress = \"127.0.0.1:{right}\"\ndevices = [\"cpu\"]\n\
             [[replica]]\nname = \"r0\"\nstages = [\"left/cpu\"]\n\
             [[replica]]\nname = \"r1\"\nstages = [\"right/cpu\"]\n\
             [engine]\nkind = \"hash\"\n[kv]\nmemory = \"16MiB\"\n[limits]\ndrain_ms = 5000\n"
        )
    }
}

/// `dunlin up`, killed when dropped.
struct Up {
    child: Child,
    lines: std::sync::mpsc::Receiver<String>,
    seen: Vec<String>,
}

impl Up {
    fn start(folder: &Folder, args: &[&str]) -> Up {
        let mut child = folder.dunlin(args).spawn().expect("dunlin runs");
        let stderr = child.stderr.take().expect("a pipe");
        let (send, lines) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            for line in BufReader::new(stderr).lines().map_while(Result::ok) {
                if send.send(line).is_err() {
                    break;
                }
            }
        });
        Up { child, lines, seen: Vec::new() }
    }

    /// Waits for a line with this in it.
    fn until(&mut self, part: &str) -> String {
        let end = Instant::now() + PATIENCE;
        loop {
            let left = end.saturating_duration_since(Instant::now());
            match self.lines.recv_timeout(left) {
                Ok(line) => {
                    self.seen.push(line.clone());
                    if line.contains(part) {
                        return line;
                    }
                }
                Err(_) => panic!("no {part:?} in {:#?}", self.seen),
            }
        }
    }

    fn signal(&self, name: &str) {
        signal(self.child.id(), name);
    }

    fn wait(&mut self) -> ExitStatus {
        let end = Instant::now() + PATIENCE;
        while Instant::now() < end {
            if let Some(status) = self.child.try_wait().expect("it can be waited for") {
                return status;
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        panic!("dunlin up does not end: {:#?}", self.seen);
    }
}

impl Drop for Up {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn signal(pid: u32, name: &str) {
    let status = Command::new("kill").args([format!("-{name}"), pid.to_string()]).status();
    assert!(status.expect("kill runs").success());
}

fn pid_of(line: &str) -> u32 {
    line.rsplit(' ').next().and_then(|pid| pid.parse().ok()).expect("a process id")
}

fn runs(pid: u32) -> bool {
    std::fs::read(format!("/proc/{pid}/cmdline")).is_ok_and(|line| !line.is_empty())
}

#[test]
fn every_subcommand_teaches() {
    let folder = Folder::new();
    for command in ["run", "chat", "up", "node", "status", "bench", "certs"] {
        let help = text(&folder.run(&[command, "--help"]).stdout);
        for part in ["Usage: dunlin", "Examples:", "--config <FILE>", "--set <KEY=VALUE>"] {
            assert!(help.contains(part), "{command} --help has no {part:?}:\n{help}");
        }
    }
}

/// A wrong start ends in time with an error that says all of `parts`, and leaves nothing behind.
fn refused(folder: &Folder, args: &[&str], parts: &[&str]) {
    let begun = Instant::now();
    let output = folder.run(args);
    let took = begun.elapsed();
    let error = text(&output.stderr);
    assert!(!output.status.success(), "{args:?} succeeded: {error}");
    for part in parts {
        assert!(error.contains(part), "{args:?}: no {part:?} in:\n{error}");
    }
    // Two seconds are for starting and stopping processes on a loaded machine.
    assert!(took < ERROR_WITHIN + Duration::from_secs(2), "{args:?} took {took:?}:\n{error}");
}

#[test]
fn wrong_values_are_named_in_time() {
    let folder = Folder::new();
    let ports = Ports::new();
    let good = ports.config();

    folder.write("cluster.toml", &good.replace("[kv]", "[kv]\nmemroy = 1"));
    refused(&folder, &["up"], &["unknown key `memroy` in [kv]", "cluster.toml:", "`memory`"]);

    folder.write("cluster.toml", &good);
    let left = format!("127.0.0.1:{}", ports.nodes[1]);
    let taken = UdpSocket::bind(&left).expect("the port is free");
    refused(&folder, &["up"], &["node left", "node.left.address", &left, "choose another"]);
    drop(taken);

    let http = format!("127.0.0.1:{}", ports.http);
    let taken = TcpListener::bind(&http).expect("the port is free");
    refused(&folder, &["up"], &["node front", &http, "choose another"]);
    drop(taken);

    let layers = good.replace("stages = [\"left/cpu\"]", "stages = [\"left/cpu\"]\nlayers = [3]");
    folder.write("cluster.toml", &layers);
    refused(&folder, &["up"], &["hold 3 layers", "a stage is missing", "the model has 4"]);

    folder.write("cluster.toml", &good);
    refused(
        &folder,
        &["up", "--set", "node.left.memory=1MiB"],
        &["r0 does not fit", "left/cpu", "memory"],
    );
    refused(
        &folder,
        &["node", "--name", "front", "--wait", "3"],
        &["node 'left'", "node 'right'", "has not joined", "--wait"],
    );
    refused(&folder, &["node", "--name", "middle"], &["has no node middle", "front, left, right"]);
    refused(&folder, &["node"], &["3 nodes of", "--name NAME"]);

    folder.write("cluster.toml", &good.replace("kind = \"hash\"", ""));
    refused(
        &folder,
        &["up", "--model", "no-such-model"],
        &["cluster.model = \"no-such-model\"", "aliases"],
    );
    refused(&folder, &["up", "--set", "node.left.devices=[\"cuda:0\"]"], &["left/cpu", "cuda:0"]);
    refused(&folder, &["status"], &["no cluster at http://", "dunlin up"]);
}

#[test]
fn a_cluster_comes_up_survives_a_kill_and_drains() {
    let folder = Folder::new();
    let ports = Ports::new();
    folder.write("cluster.toml", &ports.config());
    let mut up = Up::start(&folder, &["up"]);
    let mut pids = Vec::new();
    for node in ["left", "right", "front"] {
        pids.push(pid_of(&up.until(&format!("{node}: process"))));
    }
    up.until("ready: ");

    let status = folder.run(&["status"]);
    let shown = text(&status.stdout);
    assert!(status.status.success(), "{shown}{}", text(&status.stderr));
    for part in ["cluster cli", "front", "(head)", "r0", "left/cpu", "KV", "router: up", "rtt"] {
        assert!(shown.contains(part), "no {part:?} in\n{shown}");
    }

    // Uses the cluster that is up, and leaves it up.
    let answer = folder.run(&["run", "-n", "5", "hello"]);
    let summary = text(&answer.stderr);
    assert!(answer.status.success(), "{summary}");
    for part in ["TTFT", "5 tokens (length)", "served by"] {
        assert!(summary.contains(part), "no {part:?} in {summary}");
    }

    signal(pids[0], "KILL");
    up.until("left: was killed by signal 9 (SIGKILL)");
    let again = pid_of(&up.until("left: process"));
    up.until("left: ready");
    assert!(runs(again) && !runs(pids[0]));
    let status = text(&folder.run(&["status"]).stdout);
    assert!(status.contains("· ready"), "{status}");

    up.signal("TERM");
    up.until("stopped");
    assert!(up.wait().success());
    for pid in [again, pids[1], pids[2]] {
        assert!(!runs(pid), "process {pid} was left behind");
    }
    let log = folder.log("front");
    assert!(log.contains("draining"), "{log}");
}

/// L27: the ports are those of a cluster that runs.
#[test]
fn a_second_process_on_a_port_is_told_who_holds_it() {
    let (folder, other) = (Folder::new(), Folder::new());
    let config = Ports::new().config();
    folder.write("cluster.toml", &config);
    other.write("cluster.toml", &config);
    let mut up = Up::start(&folder, &["up"]);
    let pids = ["left", "right", "front"].map(|n| pid_of(&up.until(&format!("{n}: process"))));
    up.until("ready: ");
    for (node, pid) in ["left", "right", "front"].into_iter().zip(pids) {
        let key = format!("node.{node}.address");
        let holder = format!("is already in use by dunlin (pid {pid})");
        refused(&other, &["node", "--name", node], &[&key, &holder, "choose another"]);
    }
    refused(&other, &["up"], &["is already in use by dunlin (pid "]);
    // The holder has not noticed.
    let status = text(&folder.run(&["status"]).stdout);
    assert!(status.contains("· ready"), "{status}");
}

#[test]
fn run_starts_answers_and_stops() {
    let folder = Folder::new();
    folder.write("cluster.toml", &Ports::new().config());
    let begun = folder.run(&["run", "-n", "7", "hello"]);
    let summary = text(&begun.stderr);
    assert!(begun.status.success(), "{summary}\n{}", folder.log("front"));
    assert!(summary.contains("7 tokens"), "{summary}");
    let answer = text(&begun.stdout);
    assert!(!answer.trim().is_empty());
    let again = folder.run(&["run", "-n", "7", "hello"]);
    assert_eq!(text(&again.stdout), answer, "the same prompt has the same greedy answer");
    refused(&folder, &["status"], &["no cluster at"]);
}

#[test]
fn nothing_outlives_a_killed_up() {
    let folder = Folder::new();
    folder.write("cluster.toml", &Ports::new().config());
    let mut up = Up::start(&folder, &["up"]);
    let pids: Vec<u32> = ["left", "right", "front"]
        .map(|node| pid_of(&up.until(&format!("{node}: process"))))
        .to_vec();
    up.until("ready: ");
    up.signal("KILL");
    up.wait();
    let end = Instant::now() + PATIENCE;
    while pids.iter().any(|pid| runs(*pid)) {
        assert!(Instant::now() < end, "processes were left behind: {pids:?}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn a_second_interrupt_ends_at_once() {
    let folder = Folder::new();
    let ports = Ports::new();
    // A long drain, and a request that lasts.
    let slow = ports.config().replace("drain_ms = 5000", "drain_ms = 100000");
    folder.write("cluster.toml", &slow.replace("\"hash\"", "\"hash\"\nstep_micros = 200000"));
    let mut up = Up::start(&folder, &["up"]);
    up.until("ready: ");
    let mut asking = folder.dunlin(&["run", "-n", "1000", "hello"]).spawn().expect("dunlin runs");
    let mut first = [0];
    let stdout = asking.stdout.as_mut().expect("a pipe");
    stdout.read_exact(&mut first).expect("the answer begins");
    up.signal("INT");
    up.until("draining");
    std::thread::sleep(Duration::from_millis(500));
    let begun = Instant::now();
    up.signal("INT");
    assert_eq!(up.wait().code(), Some(130));
    // Far less than the drain would take, and room for a busy machine.
    assert!(begun.elapsed() < Duration::from_secs(10), "{:?}", begun.elapsed());
    let _ = asking.kill();
    let _ = asking.wait();
}

#[test]
fn certificates_are_made_and_explained() {
    let folder = Folder::new();
    let config = Ports::new().config().replace("address = \"127.0.0.1", "address = \"192.0.2.7");
    folder.write("cluster.toml", &config);
    refused(
        &folder,
        &["node", "--name", "left"],
        &["node left has no certificate", "dunlin certs", "bundle-NAME"],
    );
    let made = folder.run(&["certs"]);
    let shown = text(&made.stdout);
    assert!(made.status.success(), "{}", text(&made.stderr));
    for part in ["made the authority", "bundle-left", "scp -r", "192.0.2.7", "keep"] {
        assert!(shown.contains(part), "no {part:?} in\n{shown}");
    }
    assert!(!shown.contains("PRIVATE"));
    let again = text(&folder.run(&["certs"]).stdout);
    assert!(again.contains("kept") && !again.contains("made"), "{again}");
}
