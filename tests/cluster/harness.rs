//! A cluster of this repository's own configuration files, on free ports, in a temporary folder.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use dunlin_runtime::config::ClusterConfig;
use serde_json::{Value, json};

use crate::http::{self, Answer, Stream};
use crate::ports::free_port;

pub use rustix::process::Signal;

/// Far beyond what anything here takes on a busy machine.
pub const PATIENCE: Duration = Duration::from_secs(120);

/// One cluster at a time: each wants the whole machine.
static MACHINE: Mutex<()> = Mutex::new(());

/// `dunlin up`. Dropping it kills all its processes.
pub struct Cluster {
    up: Child,
    pub http: u16,
    model: String,
    said: Arc<Mutex<Said>>,
    state: tempfile::TempDir,
    _machine: MutexGuard<'static, ()>,
}

/// What `up` has printed.
#[derive(Default)]
struct Said {
    lines: Vec<String>,
    /// The process of each node, the latest one; all of them.
    pids: BTreeMap<String, u32>,
    all_pids: Vec<u32>,
    ready: bool,
}

impl Cluster {
    /// Starts `file` of the repository with `sets` over it, and waits until it is ready.
    pub fn start(file: &str, sets: &[&str]) -> Cluster {
        Self::start_at(&Path::new(env!("CARGO_MANIFEST_DIR")).join(file), sets)
    }

    /// One worker, `left`, beside the head.
    pub fn start_with_one_worker(sets: &[&str]) -> Cluster {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let file = folder.path().join("one-worker.toml");
        let text = "[cluster]\nname = \"one-worker\"\nhead = \"front\"\n\
             [node.front]\naddress = \"127.0.0.1:1\"\nhttp = \"127.0.0.1:1\"\n\
             [node.left]\naddress = \"127.0.0.1:2\"\ndevices = [\"cpu\"]\n\
             [[replica]]\nname = \"r0\"\nstages = [\"left/cpu\"]\n";
        std::fs::write(&file, text).expect("a file in a temporary folder");
        // A node that starts again reads it again: it stays for as long as the cluster.
        Self::start_in(folder, &file, sets)
    }

    fn start_at(file: &Path, sets: &[&str]) -> Cluster {
        Self::start_in(tempfile::tempdir().expect("a temporary folder"), file, sets)
    }

    fn start_in(state: tempfile::TempDir, file: &Path, sets: &[&str]) -> Cluster {
        let machine = MACHINE.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        let config = ClusterConfig::load(file).expect("the file is right");
        let mut command = Command::new(env!("CARGO_BIN_EXE_dunlin"));
        command.arg("up").arg("--config").arg(file).current_dir(state.path());
        let mut set = |text: String| {
            command.args(["--set", &text]);
        };
        set(format!("cluster.state_dir={}", json!(state.path().join("state"))));
        let mut http = 0;
        for (name, node) in &config.nodes {
            set(format!("node.{name}.address=\"127.0.0.1:{}\"", free_port()));
            if node.http.is_some() {
                http = free_port();
                set(format!("node.{name}.http=\"127.0.0.1:{http}\""));
            }
        }
        // A test may kill more often than a crash loop is allowed to.
        set("restart.max=1000".to_string());
        sets.iter().for_each(|text| set(text.to_string()));
        command.env("DUNLIN_CACHE", models()).env("DUNLIN_OFFLINE", "1");
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
        let mut up = command.spawn().expect("dunlin runs");
        let said = listen(&mut up);
        let mut cluster =
            Cluster { up, http, model: String::new(), said, state, _machine: machine };
        cluster.wait("ready", |cluster| cluster.said().ready);
        cluster.wait_ready();
        let models: Value = cluster.get("/v1/models");
        cluster.model = models["data"][0]["id"].as_str().expect("a model").to_string();
        cluster
    }

    /// Waits until `/health` is 200 and every configured replica takes requests.
    pub fn wait_ready(&self) {
        self.wait("ready to serve", |cluster| {
            let health = http::get(cluster.http, "/health");
            let status = cluster.get("/cluster/status");
            let count = |list: &Value| list.as_array().map_or(0, Vec::len);
            let serving = count(&status["router"]["replicas"]);
            let placed = |state: &Value| state["state"] == "ready";
            health.is_ok_and(|(code, _)| code == 200)
                && serving > 0
                && serving == count(&status["replicas"])
                && status["replicas"].as_array().is_some_and(|all| all.iter().all(placed))
        });
    }

    /// A streamed completion of exactly `tokens` tokens.
    pub fn body(&self, prompt: &str, tokens: usize) -> Value {
        json!({
            "model": self.model,
            "prompt": prompt,
            "max_tokens": tokens,
            "ignore_eos": true,
            "temperature": 0,
            "logprobs": 0,
            "stream": true,
            "stream_options": {"include_usage": true},
        })
    }

    pub fn open(&self, body: &Value) -> Stream {
        Stream::open(self.http, body)
    }

    pub fn ask(&self, body: &Value) -> Answer {
        self.open(body).finish()
    }

    pub fn status(&self) -> Value {
        self.get("/cluster/status")
    }

    /// Waits until a node of a replica has a request and names it.
    pub fn busy_node(&self) -> String {
        let mut found = None;
        self.wait("a node with work", |cluster| {
            found = cluster.busy_nodes().into_iter().next();
            found.is_some()
        });
        found.expect("waited for")
    }

    /// The leading node of each replica that has a request.
    pub fn busy_nodes(&self) -> Vec<String> {
        let busy = |replica: &Value| replica["assigned"].as_u64().unwrap_or(0) > 0;
        self.places(busy).into_iter().filter_map(|nodes| nodes.into_iter().next()).collect()
    }

    /// All nodes that hold a part of a replica, in the order of stages and ranks.
    pub fn serving_nodes(&self) -> Vec<String> {
        self.places(|_| true).concat()
    }

    /// The nodes of each replica that `wanted` holds for.
    fn places(&self, wanted: impl Fn(&Value) -> bool) -> Vec<Vec<String>> {
        let status = self.status();
        let replicas = status["router"]["replicas"].as_array().cloned().unwrap_or_default();
        let node = |place: &Value| Some(place.as_str()?.split_once('/')?.0.to_string());
        let nodes = |replica: &Value| -> Vec<String> {
            let places = replica["info"]["served_by"].as_array();
            places.into_iter().flatten().filter_map(node).collect()
        };
        replicas.iter().filter(|replica| wanted(replica)).map(nodes).collect()
    }

    pub fn replays(&self) -> u64 {
        self.status()["router"]["replays_total"].as_u64().expect("the router answers")
    }

    pub fn failures(&self) -> u64 {
        self.status()["router"]["failed_total"].as_u64().expect("the router answers")
    }

    pub fn pid(&self, node: &str) -> u32 {
        *self.said().pids.get(node).unwrap_or_else(|| panic!("no node {node}"))
    }

    pub fn signal(&self, node: &str, signal: Signal) {
        send(self.pid(node), signal);
    }

    pub fn signal_up(&self, signal: Signal) {
        send(self.up.id(), signal);
    }

    /// Waits until the node's process is another one than `old` and the cluster is whole.
    pub fn wait_restarted(&self, node: &str, old: u32) {
        // Its word that it is ready comes over its link to the head, which knows by then that the
        // old life is over, and so does not count that one's replicas any more.
        self.wait("started again and ready", |cluster| {
            let said = cluster.said();
            let began = format!("{node}: process ");
            let last = said.lines.iter().rposition(|line| line.starts_with(&began));
            let ready = format!("{node}: ready");
            said.pids[node] != old
                && last.is_some_and(|at| said.lines[at..].iter().any(|l| l.starts_with(&ready)))
        });
        self.wait_ready();
    }

    /// Waits until `up` has ended.
    pub fn wait_exit(&mut self) -> ExitStatus {
        let end = Instant::now() + PATIENCE;
        loop {
            if let Some(status) = self.up.try_wait().expect("it can be waited for") {
                return status;
            }
            assert!(Instant::now() < end, "up does not end\n{}", self.story());
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    fn wait(&self, what: &str, mut holds: impl FnMut(&Cluster) -> bool) {
        let end = Instant::now() + PATIENCE;
        while !holds(self) {
            let dead = self.said().lines.iter().any(|line| line.starts_with("error: "));
            assert!(!dead && Instant::now() < end, "never {what}\n{}", self.story());
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    fn get(&self, path: &str) -> Value {
        let answer = http::get(self.http, path);
        answer.ok().and_then(|(_, text)| serde_json::from_str(&text).ok()).unwrap_or_default()
    }

    fn said(&self) -> MutexGuard<'_, Said> {
        self.said.lock().expect("no panic while it is held")
    }

    /// What happened, for a message.
    fn story(&self) -> String {
        let said = self.said();
        let mut story = said.lines.join("\n");
        for node in said.pids.keys() {
            let log = self.state.path().join(format!("state/logs/{node}.log"));
            let log = std::fs::read_to_string(log).unwrap_or_default();
            let lines: Vec<&str> = log.lines().collect();
            let end = lines.get(lines.len().saturating_sub(20)..).unwrap_or_default();
            story.push_str(&format!("\n-- {node}\n{}", end.join("\n")));
        }
        story
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("{}", self.story());
        }
        // Its nodes end with it, also those that a signal has stopped.
        let _ = self.up.kill();
        let _ = self.up.wait();
        let left = || self.said().all_pids.iter().any(|pid| runs(*pid));
        let end = Instant::now() + PATIENCE;
        while left() && Instant::now() < end {
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

pub fn wait_until(what: &str, mut holds: impl FnMut() -> bool) {
    let end = Instant::now() + PATIENCE;
    while !holds() {
        assert!(Instant::now() < end, "never: {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Whether a process runs; one that nobody has waited for yet does not.
pub fn runs(pid: u32) -> bool {
    std::fs::read(format!("/proc/{pid}/cmdline")).is_ok_and(|line| !line.is_empty())
}

/// Reads what `up` prints to the end, so that it never waits for its reader.
fn listen(up: &mut Child) -> Arc<Mutex<Said>> {
    let stderr = up.stderr.take().expect("a pipe");
    let said = Arc::new(Mutex::new(Said::default()));
    let shared = said.clone();
    std::thread::spawn(move || {
        for line in BufReader::new(stderr).lines().map_while(Result::ok) {
            let Ok(mut said) = shared.lock() else { return };
            if let Some((node, pid)) = line.split_once(": process ") {
                let pid = pid.parse().expect("a process id");
                said.pids.insert(node.to_string(), pid);
                said.all_pids.push(pid);
            }
            said.ready |= line.starts_with("ready: ");
            said.lines.push(line);
        }
    });
    said
}

fn send(pid: u32, signal: Signal) {
    let pid = i32::try_from(pid).ok().and_then(rustix::process::Pid::from_raw);
    rustix::process::kill_process(pid.expect("a process id"), signal).expect("it runs");
}

/// The folder with the default model's file.
fn models() -> PathBuf {
    let given = std::env::var_os("DUNLIN_TEST_MODELS").map(PathBuf::from);
    let cache = || Some(PathBuf::from(std::env::var_os("HOME")?).join(".cache/dunlin/models"));
    let folder = given.or_else(cache).unwrap_or_default();
    let file = folder.join("SmolLM2-135M-Instruct.Q4_1.gguf");
    assert!(file.is_file(), "{} is not there: run tools/test, which fetches it", file.display());
    folder
}
