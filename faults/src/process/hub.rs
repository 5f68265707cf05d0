//! The runner's end of the nodes' sockets: who is connected, and what is armed where.
//!
//! A node that starts waits for the word to go on. It gets it with everything that is armed, so
//! that a restarted node is under the same faults as before; or not, as long as it is held away.

use super::Note;
use super::wire::{FromNode, ToNode};
use crate::fault::Fault;
use parking_lot::Mutex;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Arc;
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::mpsc::{UnboundedSender, unbounded_channel};

#[derive(Clone)]
pub struct Hub(Arc<Mutex<Inner>>);

struct Inner {
    seed: u64,
    nodes: BTreeMap<String, Connected>,
    /// Armed faults by node.
    armed: BTreeMap<String, Vec<Fault>>,
    /// Nodes that may not go on with their start, and why many times.
    held: BTreeMap<String, BTreeSet<String>>,
}

struct Connected {
    pid: u32,
    to: UnboundedSender<ToNode>,
    gone_on: bool,
}

impl Hub {
    /// Listens on `socket`; what nodes say goes to `notes`. Ends with the runtime's task set.
    ///
    /// # Errors
    /// The socket cannot be made.
    pub fn listen(
        socket: &Path,
        seed: u64,
        notes: UnboundedSender<Note>,
    ) -> std::io::Result<(Hub, tokio::task::JoinHandle<()>)> {
        let listener = UnixListener::bind(socket)?;
        let hub = Hub(Arc::new(Mutex::new(Inner {
            seed,
            nodes: BTreeMap::new(),
            armed: BTreeMap::new(),
            held: BTreeMap::new(),
        })));
        let own = hub.clone();
        let task = tokio::spawn(async move {
            let mut connections = tokio::task::JoinSet::new();
            while let Ok((stream, _)) = listener.accept().await {
                connections.spawn(own.clone().serve(stream, notes.clone()));
            }
        });
        Ok((hub, task))
    }

    /// Arms it on these nodes, now and whenever they start again.
    pub fn arm(&self, fault: &Fault, nodes: &[String]) {
        let mut inner = self.0.lock();
        for node in nodes {
            inner.armed.entry(node.clone()).or_default().push(fault.clone());
            inner.send(node, ToNode::Arm(fault.clone()));
        }
    }

    /// Has these nodes count the sites that trigger it.
    pub fn watch(&self, fault: &Fault, nodes: &[String]) {
        let inner = self.0.lock();
        nodes.iter().for_each(|node| _ = inner.send(node, ToNode::Watch(fault.clone())));
    }

    /// Ends it everywhere.
    pub fn disarm(&self, fault: &str) {
        let mut inner = self.0.lock();
        inner.armed.values_mut().for_each(|armed| armed.retain(|armed| armed.id != fault));
        let on: Vec<String> = inner.nodes.keys().cloned().collect();
        for node in on {
            inner.send(&node, ToNode::Disarm(fault.to_string()));
        }
    }

    /// Arms it only for the node's next starts.
    pub fn arm_start(&self, fault: &Fault, node: &str) {
        self.0.lock().armed.entry(node.to_string()).or_default().push(fault.clone());
    }

    /// A start of this node does not go on until `why` is released.
    pub fn hold(&self, node: &str, why: &str) {
        self.0.lock().held.entry(node.to_string()).or_default().insert(why.to_string());
    }

    pub fn release(&self, node: &str, why: &str) {
        let mut inner = self.0.lock();
        if let Some(reasons) = inner.held.get_mut(node) {
            reasons.remove(why);
        }
        inner.go(node);
    }

    pub fn tell_all(&self, message: &ToNode) {
        let inner = self.0.lock();
        inner.nodes.keys().for_each(|node| _ = inner.send(node, message.clone()));
    }

    /// False if the node is not connected.
    pub fn tell(&self, node: &str, message: ToNode) -> bool {
        self.0.lock().send(node, message)
    }

    async fn serve(self, stream: UnixStream, notes: UnboundedSender<Note>) {
        let (read, mut write) = stream.into_split();
        let mut lines = BufReader::new(read).lines();
        let Ok(Some(first)) = lines.next_line().await else { return };
        let Ok(FromNode::Hello { node, pid }) = serde_json::from_str(&first) else { return };
        let (to, mut outbox) = unbounded_channel();
        {
            let mut inner = self.0.lock();
            let connected = Connected { pid, to, gone_on: false };
            inner.nodes.insert(node.clone(), connected);
            inner.go(&node);
        }
        let writing = tokio::spawn(async move {
            while let Some(message) = outbox.recv().await {
                let Ok(mut line) = serde_json::to_string(&message) else { continue };
                line.push('\n');
                if write.write_all(line.as_bytes()).await.is_err() {
                    return;
                }
            }
        });
        while let Ok(Some(line)) = lines.next_line().await {
            match serde_json::from_str(&line) {
                Ok(said) => {
                    if notes.send(Note::Node { node: node.clone(), said }).is_err() {
                        break;
                    }
                }
                Err(error) => tracing::warn!(node, %error, "a node said {line:.100}"),
            }
        }
        let mut inner = self.0.lock();
        if inner.nodes.get(&node).is_some_and(|connected| connected.pid == pid) {
            inner.nodes.remove(&node);
        }
        drop(inner);
        writing.abort();
    }
}

impl Inner {
    fn send(&self, node: &str, message: ToNode) -> bool {
        let connected = self.nodes.get(node).filter(|connected| connected.gone_on);
        connected.is_some_and(|connected| connected.to.send(message).is_ok())
    }

    /// Lets a node that waits go on, unless it is held.
    fn go(&mut self, node: &str) {
        if self.held.get(node).is_some_and(|reasons| !reasons.is_empty()) {
            return;
        }
        let faults = self.armed.get(node).cloned().unwrap_or_default();
        let seed = self.seed;
        if let Some(connected) = self.nodes.get_mut(node).filter(|c| !c.gone_on) {
            connected.gone_on = connected.to.send(ToNode::Go { seed, faults }).is_ok();
        }
    }
}
