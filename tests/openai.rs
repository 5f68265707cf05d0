//! The API of a cluster of three processes, held to OpenAI's own Python client.
//!
//! `openai_conformance.py` has the checks; this starts what they talk to. `tools/test` installs the
//! client and fetches the model.

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

mod ports;
use ports::free_port;

/// Far beyond what starting takes on a busy machine.
const PATIENCE: Duration = Duration::from_secs(120);

#[test]
fn the_api_suits_openais_own_client() {
    let python = python();
    let cluster = Cluster::start(&model());
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/openai_conformance.py");
    let output = Command::new(python)
        .arg(script)
        .arg(format!("http://127.0.0.1:{}/v1", cluster.http))
        .env_remove("OPENAI_API_KEY")
        .output()
        .expect("python runs");
    let shown = String::from_utf8_lossy(&output.stdout).into_owned();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{shown}\n{errors}\n{}", cluster.log());
    println!("{shown}");
    // A script that checks nothing does not pass either.
    let last = shown.lines().last().unwrap_or_default();
    let passed: u32 = last.split(' ').next().and_then(|n| n.parse().ok()).unwrap_or(0);
    assert!(passed >= 30 && last.ends_with(" 0 failed"), "{last}");
}

/// The interpreter that has the `openai` package.
fn python() -> PathBuf {
    let own = || Path::new(env!("CARGO_MANIFEST_DIR")).join("target/test-venv/bin/python");
    let python = std::env::var_os("DUNLIN_TEST_PYTHON").map_or_else(own, PathBuf::from);
    let found = Command::new(&python).args(["-c", "import openai"]).status();
    let found = found.is_ok_and(|status| status.success());
    assert!(
        found,
        "{} with the package openai is not there: run tools/test, which installs it",
        python.display()
    );
    python
}

fn model() -> PathBuf {
    let given = std::env::var_os("DUNLIN_TEST_MODELS").map(PathBuf::from);
    let cache =
        || Some(PathBuf::from(std::env::var_os("HOME")?).join(".cache").join("dunlin/models"));
    let folder = given.or_else(cache).unwrap_or_default();
    let path = folder.join("SmolLM2-135M-Instruct.Q4_1.gguf");
    assert!(path.is_file(), "{} is not there: run tools/test, which fetches it", path.display());
    path
}

/// A head with the gateway, and two workers with a replica each. Stopped when dropped.
struct Cluster {
    up: Child,
    http: u16,
    folder: tempfile::TempDir,
}

impl Cluster {
    fn start(model: &Path) -> Cluster {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let [http, front, left, right] = std::array::from_fn(|_| free_port());
        let config = format!(
            "[cluster]\nname = \"openai\"\nmodel = \"{}\"\nhead = \"front\"\n\
             [node.front]\naddress = \"127.0.0.1:{front}\"\nhttp = \"127.0.0.1:{http}\"\n\
             [node.left]\naddress = \"127.0.0.1:{left}\"\ndevices = [\"cpu\"]\n\
             [node.right]\naddress = \"127.0.0.1:{right}\"\ndevices = [\"cpu\"]\n\
             [[replica]]\nname = \"r0\"\nstages = [\"left/cpu\"]\n\
             [[replica]]\nname = \"r1\"\nstages = [\"right/cpu\"]\n\
             [kv]\nmemory = \"256MiB\"\n",
            model.display()
        );
        std::fs::write(folder.path().join("cluster.toml"), config).expect("a file");
        let mut up = Command::new(env!("CARGO_BIN_EXE_dunlin"))
            .arg("up")
            .current_dir(folder.path())
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .expect("dunlin runs");
        let stderr = up.stderr.take().expect("a pipe");
        let (send, lines) = channel();
        // Reads to the end, so that `up` never waits for its reader.
        std::thread::spawn(move || {
            for line in BufReader::new(stderr).lines().map_while(Result::ok) {
                let _ = send.send(line);
            }
        });
        let cluster = Cluster { up, http, folder };
        cluster.wait_ready(&lines);
        cluster
    }

    fn wait_ready(&self, lines: &Receiver<String>) {
        let mut seen = Vec::new();
        loop {
            match lines.recv_timeout(PATIENCE) {
                Ok(line) if line.starts_with("ready: ") => return,
                Ok(line) => seen.push(line),
                Err(_) => panic!("the cluster is not ready: {seen:#?}\n{}", self.log()),
            }
        }
    }

    fn log(&self) -> String {
        let log = |node| self.folder.path().join(format!(".dunlin/logs/{node}.log"));
        let text = |node| std::fs::read_to_string(log(node)).unwrap_or_default();
        ["front", "left", "right"].map(|node| format!("-- {node}\n{}", text(node))).concat()
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        // The nodes end with what started them.
        let _ = self.up.kill();
        let _ = self.up.wait();
    }
}
