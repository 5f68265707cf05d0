//! The cluster under test: a production `cluster.toml` on free ports of this machine, in a
//! temporary folder. Every node is a real process under a supervisor of its own, as if each had its
//! machine and its `dunlin up`: one that is given up takes no other along.

use super::client::Gateway;
use super::ports::free_port;
use super::{Note, ProcessError};
use crate::resolved::Resolved;
use dunlin_runtime::NodeName;
use dunlin_runtime::certs::{bundle_path, ensure};
use dunlin_runtime::config::{ClusterConfig, EngineSection};
use dunlin_runtime::procs::{ProcessSpec, Processes, ProcessesSpec};
use dunlin_runtime::supervise::{Backoff, Intensity};
use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsString;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};
use tokio::sync::mpsc::UnboundedSender;

/// Loading a large model may take so long.
const READY_WITHIN: Duration = Duration::from_secs(300);
/// How long the processes may take to be gone once they were killed.
const GONE_WITHIN: Duration = Duration::from_secs(10);
/// Nodes' incarnations begin so far ahead of the clock, in seconds, that a copy of a node made from
/// a backup of its certificates, which counts from the clock, is older than the node itself.
const AHEAD: u64 = 100_000;

/// Not a cluster yet: files, ports and certificates.
pub struct Site {
    pub config: ClusterConfig,
    pub socket: PathBuf,
    file: PathBuf,
    set: Vec<(String, String)>,
    binary: PathBuf,
    env: Vec<(String, String)>,
    // Removed last.
    folder: tempfile::TempDir,
}

/// Running processes. Dropping it kills them all and waits until they are gone.
pub struct Cluster {
    pub site: Site,
    /// By node.
    processes: parking_lot::Mutex<BTreeMap<String, Arc<Processes>>>,
    notes: UnboundedSender<Note>,
    pids: Pids,
}

type Pids = Arc<parking_lot::Mutex<BTreeSet<u32>>>;

impl Site {
    /// Puts the plan's cluster on this machine.
    ///
    /// # Errors
    /// The cluster file is wrong, or folders, ports or certificates cannot be had.
    pub fn prepare(
        plan: &Resolved,
        binary: &Path,
        env: &[(String, String)],
    ) -> Result<Site, ProcessError> {
        let failed = |what: &'static str| {
            move |e: std::io::Error| ProcessError::Prepare { what, reason: e.to_string() }
        };
        // Short, because the path of a socket may have no more than 107 bytes.
        let folder = tempfile::Builder::new().prefix("dunlin-faults-").tempdir();
        let folder = folder.map_err(failed("a temporary folder"))?;
        let file = folder.path().join("cluster.toml");
        std::fs::write(&file, &plan.cluster.text).map_err(failed("the cluster file"))?;
        let mut config = plan.cluster.config().map_err(ProcessError::Config)?;
        let mut set = plan.cluster.set.clone();
        let mut also = |config: &mut ClusterConfig, key: String, value: String| {
            config.set(&key, &value).map_err(ProcessError::Config)?;
            set.push((key, value));
            Ok::<(), ProcessError>(())
        };
        let state = serde_json::json!(folder.path().join("state")).to_string();
        also(&mut config, "cluster.state_dir".into(), state)?;
        let nodes: Vec<(NodeName, bool)> =
            config.nodes.iter().map(|(name, node)| (name.clone(), node.http.is_some())).collect();
        for (name, http) in &nodes {
            let address = || {
                let port = free_port().ok_or_else(|| ProcessError::Prepare {
                    what: "a free port",
                    reason: "there is none on loopback".into(),
                })?;
                Ok::<String, ProcessError>(format!("\"127.0.0.1:{port}\""))
            };
            also(&mut config, format!("node.{name}.address"), address()?)?;
            if *http {
                also(&mut config, format!("node.{name}.http"), address()?)?;
            }
        }
        let tenants: BTreeSet<&str> = plan.requests.iter().map(|r| r.tenant.as_str()).collect();
        let known: BTreeSet<&str> =
            config.cluster.api_keys.iter().map(|key| key.tenant.as_str()).collect();
        if tenants.len() > 1 && !tenants.is_subset(&known) {
            let keys =
                tenants.iter().map(|t| format!("{{ tenant = \"{t}\", key = \"key-of-{t}\" }}"));
            let keys = format!("[{}]", keys.collect::<Vec<_>>().join(", "));
            also(&mut config, "cluster.api_keys".into(), keys)?;
        }
        let certs = config.state_dir().join("certs");
        let names: Vec<String> = config.nodes.keys().map(NodeName::to_string).collect();
        ensure(&certs, &config.cluster.name, &names)
            .map_err(|e| ProcessError::Prepare { what: "certificates", reason: e.to_string() })?;
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
        for name in &names {
            let path = bundle_path(&certs, name).join("incarnation");
            std::fs::write(path, format!("{}\n", now + AHEAD))
                .map_err(failed("incarnation numbers"))?;
        }
        let socket = folder.path().join("runner");
        Ok(Site { config, socket, file, set, binary: binary.into(), env: env.to_vec(), folder })
    }

    pub fn nodes(&self) -> Vec<String> {
        self.config.nodes.keys().map(NodeName::to_string).collect()
    }

    /// The head's gateway, or the first one.
    pub fn gateway(&self) -> Result<Gateway, ProcessError> {
        let gateways = self.config.gateways();
        let address: SocketAddr =
            gateways.first().map(|(_, address)| *address).ok_or_else(|| ProcessError::Prepare {
                what: "a gateway",
                reason: "no node has http".into(),
            })?;
        let keys = self.config.cluster.api_keys.iter();
        Ok(Gateway {
            address,
            model: self.config.cluster.model.clone(),
            keys: keys.map(|key| (key.tenant.clone(), key.key.clone())).collect(),
            ids: matches!(self.config.engine, EngineSection::Hash(_)),
        })
    }

    /// Starts every node's process: workers first, gateways and the head last.
    pub fn start(self, notes: UnboundedSender<Note>) -> Cluster {
        let mut nodes = self.nodes();
        nodes.sort_by_key(|name| {
            let http = self.config.node(name).is_some_and(|node| node.http.is_some());
            (name == self.config.cluster.head.as_str(), http)
        });
        let cluster =
            Cluster { site: self, processes: Default::default(), notes, pids: Default::default() };
        nodes.iter().for_each(|node| cluster.supervise(node));
        cluster
    }

    fn spec(&self, node: &str, log: &str, more: Vec<OsString>) -> ProcessSpec {
        let mut args: Vec<OsString> = vec!["node".into(), "--name".into(), node.into()];
        args.extend(["--wait".into(), "0".into(), "--config".into(), self.file.clone().into()]);
        for (key, value) in &self.set {
            args.extend(["--set".into(), format!("{key}={value}").into()]);
        }
        args.extend(more);
        // Looking up the symbols of a backtrace takes seconds, and a panicking actor is not gone
        // before: that would be measured as the cluster's time to notice.
        let env = [("RUST_BACKTRACE".to_string(), "0".to_string())].into_iter();
        ProcessSpec {
            name: log.to_string(),
            program: self.binary.clone(),
            args,
            env: env.chain(self.env.clone()).collect(),
            log_file: self.log_file(log),
            echo: false,
            ready_within: READY_WITHIN,
            stop_within: Duration::from_millis(self.config.limits.drain_ms + 5000),
        }
    }

    fn log_file(&self, name: &str) -> PathBuf {
        self.folder.path().join("logs").join(format!("{name}.log"))
    }

    /// The last lines of every log, for messages.
    pub fn story(&self) -> String {
        let mut story = String::new();
        for node in self.nodes() {
            let text = self.log(&node);
            let lines: Vec<&str> = text.lines().collect();
            let end = lines.get(lines.len().saturating_sub(15)..).unwrap_or_default();
            story.push_str(&format!("\n-- {node}\n{}", end.join("\n")));
        }
        story
    }

    pub fn log(&self, name: &str) -> String {
        std::fs::read_to_string(self.log_file(name)).unwrap_or_default()
    }

    /// Copies the logs to `to`.
    pub fn keep_logs(&self, to: &Path) -> std::io::Result<()> {
        std::fs::create_dir_all(to)?;
        for entry in std::fs::read_dir(self.folder.path().join("logs"))? {
            let entry = entry?;
            std::fs::copy(entry.path(), to.join(entry.file_name()))?;
        }
        Ok(())
    }
}

impl Cluster {
    /// Waits until each process says that it is ready.
    pub async fn ready(&self) -> Result<(), ProcessError> {
        let all: Vec<Arc<Processes>> = self.processes.lock().values().cloned().collect();
        for process in all {
            process.ready().await.map_err(|e| ProcessError::Start {
                reason: e.to_string(),
                story: self.site.story(),
            })?;
        }
        Ok(())
    }

    /// Starts the node's process and keeps it running; [`Note::GaveUp`] says that it was restarted
    /// too often. Called again for a node that was given up, it starts it anew.
    pub fn supervise(&self, node: &str) {
        let faults = vec!["--faults".into(), self.site.socket.clone().into()];
        let spec = ProcessesSpec {
            intensity: self.site.config.restart.intensity(),
            backoff: Backoff::default(),
            processes: vec![self.site.spec(node, node, faults)],
        };
        let processes = Arc::new(run(spec, None, self.notes.clone(), self.pids.clone()));
        let (notes, name) = (self.notes.clone(), node.to_string());
        let watched = Arc::downgrade(&processes);
        self.processes.lock().insert(node.to_string(), processes);
        tokio::spawn(async move {
            let Some(ended) = watched.upgrade().map(|processes| processes.ended()) else { return };
            if let Err(error) = ended.await {
                let _ = notes.send(Note::GaveUp { node: name, reason: error.to_string() });
            }
        });
    }

    /// A second process of node `node`, as from a backup of its folder made before it was started,
    /// with these values set over its configuration. It ends when it is dropped.
    ///
    /// # Errors
    /// Its folder cannot be made.
    pub fn twin(&self, node: &str, fault: &str, set: &[(String, String)]) -> std::io::Result<Twin> {
        let folder = self.site.folder.path().join(format!("twin-{fault}"));
        copy(&self.site.folder.path().join("state/certs"), &folder.join("certs"))?;
        let counter = bundle_path(&folder.join("certs"), node).join("incarnation");
        if counter.exists() {
            std::fs::remove_file(counter)?;
        }
        let port = || {
            let none = || std::io::Error::other("no free port");
            Ok::<_, std::io::Error>(format!("\"127.0.0.1:{}\"", free_port().ok_or_else(none)?))
        };
        let mut all = vec![
            ("cluster.state_dir".to_string(), serde_json::json!(folder).to_string()),
            (format!("node.{node}.address"), port()?),
        ];
        if self.site.config.node(node).is_some_and(|n| n.http.is_some()) {
            all.push((format!("node.{node}.http"), port()?));
        }
        all.extend_from_slice(set);
        let more = all.iter().flat_map(|(key, value)| {
            [OsString::from("--set"), OsString::from(format!("{key}={value}"))]
        });
        let name = format!("twin-{fault}");
        let spec = ProcessesSpec {
            intensity: Intensity { max: 0, within: Duration::from_secs(1) },
            backoff: Backoff::default(),
            processes: vec![self.site.spec(node, &name, more.collect())],
        };
        let processes = run(spec, Some(name.clone()), self.notes.clone(), self.pids.clone());
        Ok(Twin { processes, name })
    }

    /// Kills everything and waits until it is gone.
    pub fn kill(&self) {
        self.processes.lock().values().for_each(|processes| processes.kill());
        let end = Instant::now() + GONE_WITHIN;
        loop {
            let left = self.pids.lock().iter().any(|pid| runs(*pid));
            if !left || Instant::now() > end {
                return;
            }
            std::thread::sleep(Duration::from_millis(2));
        }
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        self.kill();
    }
}

/// A second process of a node.
pub struct Twin {
    processes: Processes,
    pub name: String,
}

impl Drop for Twin {
    fn drop(&mut self) {
        self.processes.kill();
    }
}

/// Whether a process runs; one that nobody has waited for yet does not.
pub fn runs(pid: u32) -> bool {
    std::fs::read(format!("/proc/{pid}/cmdline")).is_ok_and(|line| !line.is_empty())
}

/// Starts the processes, and passes on what happens to them: the twin's not to `notes`.
fn run(
    spec: ProcessesSpec,
    twin: Option<String>,
    notes: UnboundedSender<Note>,
    pids: Pids,
) -> Processes {
    let (processes, mut events) = Processes::start(spec);
    tokio::spawn(async move {
        while let Some(event) = events.recv().await {
            if let dunlin_runtime::procs::ProcessEvent::Started { pid, .. } = &event {
                pids.lock().insert(*pid);
            }
            if twin.is_none() {
                let _ = notes.send(Note::Process(event));
            }
        }
    });
    processes
}

fn copy(from: &Path, to: &Path) -> std::io::Result<()> {
    std::fs::create_dir_all(to)?;
    std::fs::set_permissions(to, std::fs::metadata(from)?.permissions())?;
    for entry in std::fs::read_dir(from)? {
        let entry = entry?;
        let target = to.join(entry.file_name());
        match entry.file_type()?.is_dir() {
            true => copy(&entry.path(), &target)?,
            // Keeps the mode.
            false => drop(std::fs::copy(entry.path(), target)?),
        }
    }
    Ok(())
}
