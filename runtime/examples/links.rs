//! Measures links between two processes of one machine, over Unix sockets and over QUIC, next to plain
//! TCP in the same run.
//!
//!     cargo run --release -p dunlin-runtime --example links

use bytes::Bytes;
use dunlin_runtime::certs::{self, NodeIdentity};
use dunlin_runtime::{
    FlowClass, FlowFrame, FlowId, Inbound, Node, NodeName, NodeOptions, Protocol, QuicOptions,
    QuicTransport,
};
use std::error::Error;
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream, UdpSocket};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

type Result<T> = std::result::Result<T, Box<dyn Error + Send + Sync>>;

const BULK_FRAME: usize = 1 << 20;
const BULK_FRAMES: u64 = 1024;
const BULK: FlowId = FlowId(1);
const DONE: FlowId = FlowId(2);
const PING: FlowId = FlowId(3);
const PONG: FlowId = FlowId(4);
const LONG: Duration = Duration::from_secs(60);

struct Echo;

impl Protocol for Echo {
    const NAME: &'static str = "echo";
    const VERSION: u16 = 1;
    type Cast = ();
    type Call = Bytes;
    type Reply = Bytes;
}

fn main() -> Result<()> {
    let args: Vec<String> = std::env::args().collect();
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    if let [_, mode, dir, quic_a, quic_b, tcp] = &args[..] {
        let local = mode == LOCAL;
        return runtime.block_on(server(dir, (quic_a, quic_b), tcp, local));
    }
    let dir = tempfile::tempdir()?;
    certs::ensure(dir.path(), "bench", &["a".to_owned(), "b".to_owned()])?;
    for mode in [LOCAL, "over QUIC"] {
        println!("== lanes {mode}");
        let (quic_a, quic_b, tcp) = (udp_port()?, udp_port()?, tcp_port()?);
        let mut child = std::process::Command::new(std::env::current_exe()?)
            .args([mode, &dir.path().to_string_lossy(), &quic_a, &quic_b, &tcp])
            .spawn()?;
        let local = mode == LOCAL;
        let measured = runtime.block_on(client(dir.path(), (&quic_a, &quic_b), &tcp, local));
        child.kill()?;
        child.wait()?;
        measured?;
        println!();
    }
    Ok(())
}

const LOCAL: &str = "over Unix sockets";

async fn node(
    dir: &Path,
    (me, my): (&str, &str),
    (other, theirs): (&str, &str),
    local_lanes: bool,
) -> Result<Node> {
    let identity = Arc::new(NodeIdentity::load(dir, me)?);
    let options =
        NodeOptions::new(NodeName::new(me)?, "bench", my).peer(NodeName::new(other)?, theirs);
    let quic = QuicOptions { local_lanes, ..QuicOptions::default() };
    let transport = Arc::new(QuicTransport::new(identity, quic));
    Ok(Node::start(options, transport).await?)
}

async fn server(dir: &str, (quic_a, quic_b): (&str, &str), tcp: &str, local: bool) -> Result<()> {
    let node = node(Path::new(dir), ("b", quic_b), ("a", quic_a), local).await?;
    let _echo = node.export::<Echo>("echo", "x", |message| {
        if let Inbound::Call { msg, reply, .. } = message {
            reply.send(msg);
        }
    })?;
    let a = NodeName::new("a")?;
    let (mut bulk, done) =
        (node.accept_flow(&a, BULK), node.open_flow(&a, DONE, FlowClass::Activations));
    tokio::spawn(async move {
        while let Ok(frame) = bulk.recv().await {
            if frame.tag == 1 {
                let _ = done.send(FlowFrame { payload: Bytes::new(), ..frame }).await;
            }
        }
    });
    let (mut ping, pong) =
        (node.accept_flow(&a, PING), node.open_flow(&a, PONG, FlowClass::Activations));
    std::thread::spawn(move || {
        while let Ok(frame) = ping.blocking_recv(LONG) {
            let _ = pong.blocking_send(frame);
        }
    });
    let listener = TcpListener::bind(tcp)?;
    std::thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            std::thread::spawn(move || tcp_echo(stream));
        }
    });
    std::future::pending().await
}

/// First byte 1: echoes messages of 64 bytes; 2: of 16 KiB; 0: drains until the end, then answers.
fn tcp_echo(mut stream: TcpStream) -> std::io::Result<()> {
    stream.set_nodelay(true)?;
    let mut mode = [0];
    stream.read_exact(&mut mode)?;
    if mode[0] == 0 {
        let mut buffer = vec![0; 256 << 10];
        let mut left = BULK_FRAME * BULK_FRAMES as usize;
        while left > 0 {
            left = left.saturating_sub(stream.read(&mut buffer)?);
        }
        return stream.write_all(&[1]);
    }
    let mut buffer = vec![0; if mode[0] == 1 { 64 } else { 16 << 10 }];
    loop {
        stream.read_exact(&mut buffer)?;
        stream.write_all(&buffer)?;
    }
}

async fn client(dir: &Path, (quic_a, quic_b): (&str, &str), tcp: &str, local: bool) -> Result<()> {
    let node = node(dir, ("a", quic_a), ("b", quic_b), local).await?;
    let b = NodeName::new("b")?;
    let to = dunlin_runtime::Address::new(b.clone(), "echo", "x");
    node.call::<Echo>(&to, &Bytes::new(), LONG).await?;

    println!("{:<44} {:>10} {:>10}", "round trip", "p50 us", "p99 us");
    for (mode, size) in [(1, 64), (2, 16 << 10)] {
        let tcp = tcp.to_owned();
        let times =
            tokio::task::spawn_blocking(move || tcp_round_trips(&tcp, mode, size)).await??;
        report(&format!("TCP, {size} B"), times);
    }
    for size in [64, 1 << 10, 16 << 10] {
        report(&format!("call, {size} B"), calls(&node, &to, size, 5000).await?);
    }
    let (ping, mut pong) =
        (node.open_flow(&b, PING, FlowClass::Activations), node.accept_flow(&b, PONG));
    let times = tokio::task::spawn_blocking(move || -> Result<Vec<Duration>> {
        let payload = Bytes::from(vec![1; 16 << 10]);
        let mut times = Vec::new();
        for step in 0..5000 {
            let began = Instant::now();
            let frame = FlowFrame { epoch: 0, step, tag: 0, payload: payload.clone() };
            ping.blocking_send(frame)?;
            pong.blocking_recv(LONG)?;
            times.push(began.elapsed());
        }
        Ok(times)
    });
    report("flow frame there and back, 16384 B, threads", times.await??);

    println!("\n{:<44} {:>10}", "throughput, 1 GiB", "MB/s");
    let tcp = tcp.to_owned();
    let tcp_rate = tokio::task::spawn_blocking(move || tcp_throughput(&tcp)).await??;
    println!("{:<44} {tcp_rate:>10.0}", "TCP");
    let bulk = Arc::new(node.open_flow(&b, BULK, FlowClass::Weights));
    let mut done = node.accept_flow(&b, DONE);
    let payload = Bytes::from(vec![1; BULK_FRAME]);
    for _ in 0..2 {
        let began = Instant::now();
        for step in 0..BULK_FRAMES {
            let tag = u64::from(step + 1 == BULK_FRAMES);
            bulk.send(FlowFrame { epoch: 0, step, tag, payload: payload.clone() }).await?;
        }
        done.recv().await?;
        let rate = BULK_FRAME as f64 * BULK_FRAMES as f64 / 1e6 / began.elapsed().as_secs_f64();
        println!("{:<44} {rate:>10.0}", "flow, frames of 1 MiB");
    }

    let stop = Arc::new(AtomicBool::new(false));
    let (stopped, sender) = (stop.clone(), bulk.clone());
    let background = tokio::spawn(async move {
        let mut frames = 0u64;
        while !stopped.load(Ordering::Relaxed) {
            let frame = FlowFrame { epoch: 0, step: 0, tag: 0, payload: payload.clone() };
            if sender.send(frame).await.is_err() {
                break;
            }
            frames += 1;
        }
        frames
    });
    println!("\n{:<44} {:>10} {:>10}", "while bulk runs", "p50 us", "p99 us");
    let began = Instant::now();
    report("call, 64 B", calls(&node, &to, 64, 3000).await?);
    stop.store(true, Ordering::Relaxed);
    let frames = background.await?;
    let rate = frames as f64 * BULK_FRAME as f64 / 1e6 / began.elapsed().as_secs_f64();
    println!("{:<44} {rate:>10.0} MB/s", "bulk meanwhile");
    let status = node.peers();
    println!("lost packets {}, rtt {:?}", status[0].lost_packets, status[0].rtt);
    node.shutdown().await;
    Ok(())
}

async fn calls(
    node: &Node,
    to: &dunlin_runtime::Address,
    size: usize,
    count: usize,
) -> Result<Vec<Duration>> {
    let body = Bytes::from(vec![1; size]);
    let (node, to) = (node.clone(), to.clone());
    // On a worker, as actors are; the thread in block_on pays for every wake.
    tokio::spawn(async move {
        let mut times = Vec::new();
        for _ in 0..count {
            let began = Instant::now();
            node.call::<Echo>(&to, &body, LONG).await?;
            times.push(began.elapsed());
        }
        Ok(times)
    })
    .await?
}

fn tcp_round_trips(address: &str, mode: u8, size: usize) -> Result<Vec<Duration>> {
    let mut stream = TcpStream::connect(address)?;
    stream.set_nodelay(true)?;
    stream.write_all(&[mode])?;
    let mut buffer = vec![1; size];
    let mut times = Vec::new();
    for _ in 0..5000 {
        let began = Instant::now();
        stream.write_all(&buffer)?;
        stream.read_exact(&mut buffer)?;
        times.push(began.elapsed());
    }
    Ok(times)
}

fn tcp_throughput(address: &str) -> Result<f64> {
    let mut stream = TcpStream::connect(address)?;
    stream.write_all(&[0])?;
    let buffer = vec![1; BULK_FRAME];
    let began = Instant::now();
    for _ in 0..BULK_FRAMES {
        stream.write_all(&buffer)?;
    }
    stream.read_exact(&mut [0])?;
    Ok(BULK_FRAME as f64 * BULK_FRAMES as f64 / 1e6 / began.elapsed().as_secs_f64())
}

fn report(what: &str, mut times: Vec<Duration>) {
    // The first tenth warms up.
    times.drain(..times.len() / 10);
    times.sort();
    let at = |share: usize| times[(times.len() - 1) * share / 100].as_secs_f64() * 1e6;
    println!("{what:<44} {:>10.1} {:>10.1}", at(50), at(99));
}

fn udp_port() -> Result<String> {
    Ok(UdpSocket::bind("127.0.0.1:0")?.local_addr()?.to_string())
}

fn tcp_port() -> Result<String> {
    Ok(TcpListener::bind("127.0.0.1:0")?.local_addr()?.to_string())
}
