//! Invariant I22: a wall clock that jumps changes what people read, and no decision. In a process of
//! its own, because the clock is the process's.

use dunlin_runtime::certs::{self, NodeIdentity};
use dunlin_runtime::transport::memory::Rules;
use dunlin_runtime::{
    Inbound, MemoryNetwork, Node, NodeName, NodeOptions, PeerEvent, Protocol, QuicOptions,
    QuicTransport, wall,
};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::Mutex;
use tokio::time::Instant;

const DAY_MS: i64 = 86_400_000;

struct Count;

impl Protocol for Count {
    const NAME: &'static str = "count";
    const VERSION: u16 = 1;
    type Cast = ();
    type Call = u64;
    type Reply = u64;
}

fn name(name: &str) -> NodeName {
    NodeName::new(name).unwrap()
}

/// One test at a time may move the clock.
static CLOCK: Mutex<()> = Mutex::const_new(());

/// Two nodes with a head and a lease over a bad network; returns all that can be observed.
async fn story(jumps: &[(u64, i64)]) -> Vec<String> {
    let network = MemoryNetwork::new(5);
    let delay = Duration::from_millis(2);
    network.set_rules(Rules { delay, jitter: delay, loss: 0.02, reset: 0.002, ..Rules::default() });
    let mut nodes = Vec::new();
    for (i, (own, other)) in [("a", "b"), ("b", "a")].into_iter().enumerate() {
        let mut options = NodeOptions::new(name(own), "lab", format!("{own}:1"));
        (options.seed, options.life) = (i as u64, i as u64 + 10);
        options.head = Some(name("a"));
        let options = options.peer(name(other), format!("{other}:1"));
        nodes.push(Node::start(options, Arc::new(network.clone())).await.unwrap());
    }
    let handler = |message: Inbound<Count>| {
        if let Inbound::Call { msg, reply, .. } = message {
            reply.send(msg + 1);
        }
    };
    let _export = nodes[1].export::<Count>("count", "x", handler).unwrap();
    let to = nodes[1].address("count", "x");
    let (mut events, lease) = (nodes[0].watch(), nodes[1].lease());
    let (began, mut log) = (Instant::now(), Vec::new());
    for i in 0..200u64 {
        for (_, ms) in jumps.iter().filter(|(at, _)| *at == i) {
            wall::jump(*ms);
        }
        match i {
            80 => network.partition(&name("a"), &name("b")),
            120 => network.heal_all(),
            _ => {}
        }
        let answer = nodes[0].call::<Count>(&to, &i, Duration::from_millis(500)).await;
        log.push(format!("{:?} {answer:?} {:?}", began.elapsed(), lease.borrow().is_live()));
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    while let Ok(event) = events.try_recv() {
        log.push(format!("{event:?}"));
    }
    log.push(format!("{:?}", network.counts()));
    log
}

#[test]
fn a_jump_changes_nothing_that_nodes_do() {
    let _clock = CLOCK.blocking_lock();
    let run = |jumps: &[(u64, i64)]| {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .start_paused(true)
            .build()
            .unwrap();
        runtime.block_on(story(jumps))
    };
    let before = wall::now();
    let undisturbed = run(&[]);
    assert!(undisturbed.len() > 200, "no events");
    let jumps = [(10, 400 * DAY_MS), (60, -9_000 * DAY_MS), (100, 3_600_000), (150, -1)];
    let jumped = run(&jumps);
    let differ = undisturbed.iter().zip(&jumped).find(|(a, b)| a != b);
    assert_eq!((differ, jumped.len()), (None, undisturbed.len()));
    assert!(wall::now() < before - Duration::from_secs(8_000 * 86_400), "nothing has jumped");
    wall::jump(-jumps.iter().map(|(_, ms)| ms).sum::<i64>());
}

/// Certificates live for two years. The clock leaps past their end, the link breaks, and the nodes
/// find together again.
#[tokio::test]
async fn a_jump_past_the_certificates_cuts_no_running_node_off() {
    let _clock = CLOCK.lock().await;
    let dir = tempfile::tempdir().unwrap();
    let mut nodes = Vec::new();
    let sockets = [0, 1].map(|_| std::net::UdpSocket::bind("127.0.0.1:0").unwrap());
    let addresses = sockets.each_ref().map(|s| s.local_addr().unwrap().to_string());
    drop(sockets);
    let mut transports = Vec::new();
    for (i, (own, other)) in [("a", "b"), ("b", "a")].into_iter().enumerate() {
        certs::ensure(dir.path(), "lab", &[own.to_owned()]).unwrap();
        let identity = Arc::new(NodeIdentity::load(dir.path(), own).unwrap());
        let wire = Some(dunlin_runtime::transport::quic::WireFaults::new(1));
        let options = QuicOptions { wire, ..QuicOptions::default() };
        let transport = Arc::new(QuicTransport::new(identity, options));
        let options = NodeOptions::new(name(own), "lab", addresses[i].clone())
            .peer(name(other), addresses[1 - i].clone());
        nodes.push(Node::start(options, transport.clone()).await.unwrap());
        transports.push(transport);
    }
    let up = |node: &Node| node.peers().iter().all(|peer| peer.up);
    let linked = async || {
        while !(up(&nodes[0]) && up(&nodes[1])) {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    let patience = Duration::from_secs(30);
    tokio::time::timeout(patience, linked()).await.expect("no link at all");
    wall::jump(8_000 * DAY_MS);
    let mut events = nodes[0].watch();
    assert_eq!(transports[0].half_open(&name("b")), 1);
    let down = async { while !matches!(events.recv().await, Ok(PeerEvent::Down { .. })) {} };
    tokio::time::timeout(patience, down).await.expect("the link lives on");
    let again = tokio::time::timeout(patience, linked()).await;
    wall::jump(-8_000 * DAY_MS);
    again.expect("no link after the jump");
}

/// Whoever reads the wall clock reads it where it can be made to jump.
#[test]
fn nobody_reads_the_systems_clock_but_the_wall_clock() {
    let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut folders = vec![root.join("src"), root.join("../actors/src")];
    let mut files = 0;
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|e| e == "rs") && !path.ends_with("wall.rs") {
                files += 1;
                let text = std::fs::read_to_string(&path).unwrap();
                assert!(!text.contains("SystemTime::now"), "{}: use wall::now", path.display());
            }
        }
    }
    assert!(files > 50, "only {files} files");
}
