//! Each fault of a real process's datagrams, over loopback: its counter, and what links make of it.

use super::harness::*;
use super::quic_only::QuicHarness;
use dunlin_runtime::transport::quic::{Rules, WireCounters, WireFaults};
use dunlin_runtime::{Node, PeerEvent, QuicOptions, QuicTransport};
use std::sync::Arc;
use std::time::Duration;
use tokio::time::Instant;

fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

struct World {
    wires: [WireFaults; 2],
    transports: [Arc<QuicTransport>; 2],
    a: Node,
    b: Node,
    to: dunlin_runtime::Address,
    _export: dunlin_runtime::Export,
}

impl World {
    async fn new() -> World {
        let harness = <QuicHarness>::new();
        let mut all = options(&harness, &["a", "b"]);
        // A busy machine is no fault.
        all.iter_mut().for_each(|options| {
            options.timing.dead_ms = 3000;
            options.timing.resume_ms = 10_000;
        });
        let wires = [WireFaults::new(1), WireFaults::new(2)];
        let transports = [0, 1].map(|i| {
            let wire = Some(wires[i].clone());
            let options = QuicOptions { wire, idle_ms: 5000, ..QuicOptions::default() };
            Arc::new(harness.with(["a", "b"][i], options))
        });
        let a = Node::start(all[0].clone(), transports[0].clone()).await.unwrap();
        let b = Node::start(all[1].clone(), transports[1].clone()).await.unwrap();
        linked(&a, "b").await;
        linked(&b, "a").await;
        let (_export, to, _) = echo(&b, "x");
        World { wires, transports, a, b, to, _export }
    }

    async fn call(&self, size: usize) -> Duration {
        let began = Instant::now();
        let bytes = vec![3; size];
        assert_eq!(ask(&self.a, &self.to, Ask::Echo(bytes.clone())).await, Ok(bytes));
        began.elapsed()
    }

    fn there(&self) -> WireCounters {
        self.wires[0].counters(&name("b"))
    }

    fn back(&self) -> WireCounters {
        self.wires[1].counters(&name("a"))
    }

    fn rule(&self, rules: Rules) {
        self.wires[0].set_rules(&name("b"), rules);
    }
}

fn downs(events: &mut tokio::sync::broadcast::Receiver<PeerEvent>) -> Vec<String> {
    let mut downs = Vec::new();
    while let Ok(event) = events.try_recv() {
        if let PeerEvent::Down { reason, .. } = event {
            downs.push(reason);
        }
    }
    downs
}

const NONE: Vec<String> = Vec::new();

#[tokio::test]
async fn a_delay_slows_one_way_and_ends() {
    let world = World::new().await;
    let mut events = world.a.watch();
    world.call(10).await;
    world.rule(Rules { delay: ms(60), delay_p99: ms(150), ..Rules::default() });
    let mut times = Vec::new();
    for _ in 0..15 {
        times.push(world.call(10).await);
    }
    times.sort();
    assert!(times[7] > ms(40), "median {:?}", times[7]);
    assert!(world.there().delayed > 15);
    assert_eq!(world.back().delayed, 0);
    world.wires[0].calm();
    tokio::time::sleep(ms(600)).await;
    let mut times = Vec::new();
    for _ in 0..15 {
        times.push(world.call(10).await);
    }
    times.sort();
    assert!(times[7] < ms(40), "median {:?} after the end", times[7]);
    assert_eq!(downs(&mut events), NONE);
}

#[tokio::test]
async fn losses_and_changed_bytes_are_sent_again() {
    let world = World::new().await;
    let mut events = world.a.watch();
    world.rule(Rules { loss: 0.1, burst: 0.3, ..Rules::default() });
    for _ in 0..60 {
        world.call(3000).await;
    }
    world.rule(Rules { corrupt: 0.1, ..Rules::default() });
    for _ in 0..60 {
        world.call(3000).await;
    }
    let there = world.there();
    assert!(there.lost > 5 && there.corrupted > 5, "{there:?}");
    assert_eq!(downs(&mut events), NONE);
}

#[tokio::test]
async fn little_bandwidth_slows_only() {
    let world = World::new().await;
    let mut events = world.a.watch();
    world.call(10).await;
    world.rule(Rules { bits_per_second: 4_000_000, ..Rules::default() });
    let took = world.call(400_000).await;
    assert!(took > ms(700), "{took:?} for 400 kB at 500 kB/s");
    assert!(world.there().throttled > 10);
    assert_eq!(downs(&mut events), NONE);
}

#[tokio::test]
async fn a_clog_holds_and_then_releases_all() {
    let world = World::new().await;
    let mut events = world.a.watch();
    world.wires[0].clog(&name("b"));
    let (a, to) = (world.a.clone(), world.to.clone());
    let call = tokio::spawn(async move { ask(&a, &to, Ask::Echo(vec![5])).await });
    tokio::time::sleep(ms(500)).await;
    assert!(!call.is_finished());
    let held = world.there().clogged;
    world.wires[0].unclog(&name("b"));
    assert_eq!(call.await.unwrap(), Ok(vec![5]));
    assert!(held > 0);
    assert_eq!(downs(&mut events), NONE);
}

#[tokio::test]
async fn a_one_way_cut_fences_and_heals() {
    let world = World::new().await;
    let mut events = world.b.watch();
    world.wires[0].cut(&name("b"));
    let (_, reason) = down_event(&mut events).await;
    assert!(reason.contains("nothing heard"), "{reason}");
    assert!(world.there().cut > 0);
    assert_eq!(world.back().cut, 0);
    world.wires[0].mend(&name("b"));
    eventually("both are linked", || is_up(&world.a, "b") && is_up(&world.b, "a")).await;
    world.call(10).await;
}

#[tokio::test]
async fn a_rebind_migrates_without_loss() {
    let world = World::new().await;
    let mut events = [world.a.watch(), world.b.watch()];
    world.call(10).await;
    let ports = [
        world.transports[0].rebind(&name("b")).unwrap(),
        world.transports[1].rebind(&name("a")).unwrap(),
    ];
    assert!(ports[0].is_some() != ports[1].is_some(), "one end dialled: {ports:?}");
    for _ in 0..20 {
        world.call(20_000).await;
    }
    let rebound = world.there().rebound + world.back().rebound;
    assert!(rebound > 20, "{rebound} from the new port");
    assert_eq!(events.each_mut().map(downs), [NONE, NONE]);
    // Its datagrams are known by the new address too, once a heartbeat was answered.
    tokio::time::sleep(ms(600)).await;
    world.wires.iter().for_each(|wire| {
        wire.set_rules(&name("a"), Rules { delay: ms(20), ..Rules::default() });
        wire.set_rules(&name("b"), Rules { delay: ms(20), ..Rules::default() });
    });
    assert!(world.call(10).await > ms(30));
}

#[tokio::test]
async fn a_half_open_connection_is_replaced_and_loses_no_mail() {
    let world = World::new().await;
    let (_export, to, mut casts) = echo(&world.b, "y");
    let mut sent = Vec::new();
    for i in 0..60u64 {
        if i == 20 {
            let mut events = world.a.watch();
            assert_eq!(world.transports[0].half_open(&name("b")), 1);
            down_event(&mut events).await;
        }
        if world.a.cast::<Echo>(&to, &i).is_ok() {
            sent.push(i);
        }
        tokio::time::sleep(ms(20)).await;
    }
    eventually("both are linked", || is_up(&world.a, "b") && is_up(&world.b, "a")).await;
    world.call(10).await;
    let mut got = Vec::new();
    while got.len() < sent.len()
        && let Ok(Some(i)) = tokio::time::timeout(PATIENCE, casts.recv()).await
    {
        got.push(i);
    }
    assert_eq!(got, sent);
    assert!(sent.len() > 25, "{sent:?}");
    let there = world.there();
    assert!(there.half_open > 0, "the close frame got out: {there:?}");
}
