//! What only lanes between processes of one machine can be tested for: that they are taken, and
//! that strangers get nothing from their sockets.

use super::harness::*;
use super::quic_only::QuicHarness;
use dunlin_runtime::{FlowClass, FlowFrame, FlowId};
use std::io::{ErrorKind, Read, Write};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixStream};
use std::time::Duration;

/// The sockets of all nodes of this machine; their names are no secret.
fn listeners() -> Vec<SocketAddr> {
    let sockets = std::fs::read_to_string("/proc/net/unix").unwrap();
    let names = sockets.lines().filter_map(|line| line.split_once("@dunlin-"));
    let address = |name: &str| SocketAddr::from_abstract_name(format!("dunlin-{name}")).unwrap();
    names.map(|(_, name)| address(name)).collect()
}

fn frame(step: u64) -> FlowFrame {
    FlowFrame { epoch: 1, step, tag: 3, payload: vec![7; 5000].into() }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lanes_of_one_machine_do_not_lead_over_the_network() {
    let harness = QuicHarness::<true>::new();
    let (a, b) = pair(&harness).await;
    let (_export, to, _) = echo(&b, "x");
    let mut receiver = b.accept_flow(a.name(), FlowId(1));
    let sender = a.open_flow(b.name(), FlowId(1), FlowClass::Activations);
    // From here on datagrams are lost; the link lives until that is noticed.
    harness.partition("a", "b");
    assert_eq!(ask(&a, &to, Ask::Echo(vec![1])).await, Ok(vec![1]));
    sender.send(frame(1)).await.unwrap();
    assert_eq!(receiver.recv().await.unwrap(), frame(1));
    // And then nothing passes, sockets or not.
    eventually("the link is down", || !is_up(&a, "b") && !is_up(&b, "a")).await;
    assert!(sender.send(frame(2)).await.is_err());
    assert!(receiver.recv().await.is_err());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn strangers_get_nothing_and_stop_nothing() {
    let harness = QuicHarness::<true>::new();
    let (a, b) = pair(&harness).await;
    let (_export, to, _) = echo(&b, "x");
    // Some show a wrong key, and are shown out; some show none, for as long as they may.
    let mut silent = Vec::new();
    let mut wrong = Vec::new();
    for address in listeners() {
        for n in 0..40 {
            // Those of other tests may have gone.
            let Ok(mut stream) = UnixStream::connect_addr(&address) else { break };
            if n % 2 == 0 {
                silent.push(stream);
            } else if stream.write_all(&[n; 4096]).is_ok() {
                wrong.push(stream);
            }
        }
    }
    assert!(!silent.is_empty() && !wrong.is_empty());
    for step in 0..20 {
        assert_eq!(ask(&a, &to, Ask::Echo(vec![2; 100])).await, Ok(vec![2; 100]));
        // A new flow each time: it takes a socket, or a QUIC stream while strangers queue up.
        let mut receiver = b.accept_flow(a.name(), FlowId(step));
        let sender = a.open_flow(b.name(), FlowId(step), FlowClass::Activations);
        sender.send(frame(step)).await.unwrap();
        assert_eq!(receiver.recv().await.unwrap(), frame(step));
    }
    assert!(is_up(&a, "b") && is_up(&b, "a"));
    let ended = move || {
        for mut stream in silent.into_iter().chain(wrong) {
            stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
            match stream.read(&mut [0; 16]) {
                Ok(0) => {}
                Ok(_) => panic!("a stranger was told something"),
                Err(error) => assert_eq!(error.kind(), ErrorKind::ConnectionReset, "{error}"),
            }
        }
    };
    tokio::task::spawn_blocking(ended).await.unwrap();
}
