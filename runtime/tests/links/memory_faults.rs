//! Each link fault of the in-memory network: what it does, that it counts, and that it ends.

use super::harness::*;
use dunlin_runtime::transport::memory::{Counters, Rules};
use dunlin_runtime::{MemoryNetwork, Node, PeerEvent};
use std::time::Duration;
use tokio::time::Instant;

fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

struct World {
    network: MemoryNetwork,
    a: Node,
    b: Node,
    to: dunlin_runtime::Address,
    _export: dunlin_runtime::Export,
}

impl World {
    async fn new() -> World {
        let network = MemoryNetwork::new(11);
        let (a, b) = pair(&MemoryHarness(network.clone())).await;
        let (_export, to, _) = echo(&b, "x");
        World { network, a, b, to, _export }
    }

    /// Time of one call from `a` to `b` and back.
    async fn call(&self) -> Duration {
        let began = Instant::now();
        assert_eq!(ask(&self.a, &self.to, Ask::Echo(vec![1; 100])).await, Ok(vec![1; 100]));
        began.elapsed()
    }

    fn there(&self) -> Counters {
        self.network.counters(&name("a"), &name("b"))
    }

    fn back(&self) -> Counters {
        self.network.counters(&name("b"), &name("a"))
    }
}

fn downs(events: &mut tokio::sync::broadcast::Receiver<PeerEvent>) -> usize {
    let mut downs = 0;
    while let Ok(event) = events.try_recv() {
        downs += usize::from(matches!(event, PeerEvent::Down { .. }));
    }
    downs
}

#[tokio::test(start_paused = true)]
async fn a_delay_is_one_way_and_slows_only() {
    let world = World::new().await;
    let mut events = world.a.watch();
    assert!(world.call().await < ms(1));
    let rules = Rules { delay: ms(40), delay_p99: ms(200), ..Rules::default() };
    world.network.set_rules_between(&name("a"), &name("b"), rules);
    let mut times = Vec::new();
    for _ in 0..101 {
        times.push(world.call().await);
    }
    times.sort();
    assert!((ms(30)..ms(55)).contains(&times[50]), "median {:?}", times[50]);
    assert!(times[98] > ms(100), "no tail: {:?}", times[98]);
    assert!(world.there().delayed >= 101);
    assert_eq!(world.back().delayed, 0);
    world.network.clear_rules_between(&name("a"), &name("b"));
    tokio::time::sleep(SECOND).await;
    assert!(world.call().await < ms(1));
    assert_eq!(downs(&mut events), 0);
}

#[tokio::test(start_paused = true)]
async fn a_loss_is_lateness_and_a_long_burst_a_broken_link() {
    let world = World::new().await;
    let mut events = world.a.watch();
    world.network.set_rules(Rules { loss: 0.05, ..Rules::default() });
    let mut late = 0;
    for _ in 0..300 {
        late += u32::from(world.call().await >= ms(25));
    }
    assert!((10..90).contains(&late), "{late} late");
    assert!(world.there().lost + world.back().lost > 20);
    assert_eq!(downs(&mut events), 0, "a link broke");
    world.network.set_rules(Rules { loss: 0.05, burst: 0.9, ..Rules::default() });
    for _ in 0..300 {
        // Some fail: a burst can also keep the next link from coming up in time.
        let _ = ask(&world.a, &world.to, Ask::Echo(vec![1])).await;
    }
    assert!(downs(&mut events) > 0, "bursts broke nothing");
    assert!(world.there().reset + world.back().reset > 0);
}

#[tokio::test(start_paused = true)]
async fn little_bandwidth_slows_only() {
    let world = World::new().await;
    let mut events = world.a.watch();
    world.network.change_rules_between(&name("a"), &name("b"), |rules| {
        rules.bits_per_second = 8_000_000;
    });
    let began = Instant::now();
    for _ in 0..3 {
        let bytes = vec![7; 1_000_000];
        assert_eq!(ask(&world.a, &world.to, Ask::Echo(bytes.clone())).await, Ok(bytes));
    }
    let took = began.elapsed();
    assert!((ms(3000)..ms(3300)).contains(&took), "{took:?} for 3 MB at 1 MB/s");
    assert!(world.there().throttled > 0);
    assert_eq!((world.back().throttled, downs(&mut events)), (0, 0));
}

#[tokio::test(start_paused = true)]
async fn a_clog_holds_and_then_releases_all_at_once() {
    let world = World::new().await;
    let mut events = world.a.watch();
    world.network.clog(&name("a"), &name("b"));
    let calls: Vec<_> = (0..20u8)
        .map(|i| {
            let (a, to) = (world.a.clone(), world.to.clone());
            tokio::spawn(async move { (ask(&a, &to, Ask::Echo(vec![i])).await, Instant::now()) })
        })
        .collect();
    tokio::time::sleep(ms(600)).await;
    assert!(calls.iter().all(|call| !call.is_finished()));
    let released = Instant::now();
    world.network.unclog(&name("a"), &name("b"));
    for (i, call) in calls.into_iter().enumerate() {
        let (answer, at) = call.await.unwrap();
        assert_eq!((answer, at - released < ms(1)), (Ok(vec![i as u8]), true));
    }
    assert!(world.there().clogged > 0);
    assert_eq!((world.back().clogged, downs(&mut events)), (0, 0));
}

#[tokio::test(start_paused = true)]
async fn a_one_way_cut_fences_and_heals() {
    let world = World::new().await;
    let mut events = world.b.watch();
    world.network.cut(&name("a"), &name("b"));
    // Only `b` hears nothing; it drops the link, and `a` learns of that.
    let (_, reason) = down_event(&mut events).await;
    assert!(reason.contains("nothing heard"), "{reason}");
    eventually("a knows", || !is_up(&world.a, "b")).await;
    tokio::time::sleep(5 * SECOND).await;
    assert!(!is_up(&world.a, "b") && !is_up(&world.b, "a"));
    assert!(world.there().cut > 0);
    assert_eq!(world.back().cut, 0);
    world.network.mend(&name("a"), &name("b"));
    linked(&world.a, "b").await;
    world.call().await;
}

#[tokio::test(start_paused = true)]
async fn a_half_open_link_is_replaced_and_loses_no_mail() {
    let world = World::new().await;
    let (_export, to, mut casts) = echo(&world.b, "y");
    let mut sent = Vec::new();
    for i in 0..50u64 {
        if i == 10 {
            assert_eq!(world.network.half_open(&name("a"), &name("b")), 1);
        }
        if i == 30 {
            assert_eq!(world.network.half_open(&name("b"), &name("a")), 1);
            // `b` knows and waits a moment before it dials; `a` notices nothing.
            tokio::time::sleep(ms(40)).await;
            assert!(is_up(&world.a, "b") && !is_up(&world.b, "a"));
        }
        if world.a.cast::<Echo>(&to, &i).is_ok() {
            sent.push(i);
        }
        tokio::time::sleep(ms(20)).await;
    }
    linked(&world.a, "b").await;
    world.call().await;
    tokio::time::sleep(SECOND).await;
    let mut got = Vec::new();
    while let Ok(i) = casts.try_recv() {
        got.push(i);
    }
    assert_eq!(got, sent);
    assert!(sent.len() > 25, "{sent:?}");
    assert_eq!((world.back().half_opened, world.there().half_opened), (1, 1));
    assert!(world.there().dropped + world.back().dropped > 0, "nothing was sent into the void");
}

#[tokio::test(start_paused = true)]
async fn a_rebind_is_not_to_be_seen() {
    let world = World::new().await;
    let mut events = world.a.watch();
    assert_eq!(world.network.rebind(&name("a"), &name("b")), 1);
    assert!(world.call().await < ms(1));
    assert_eq!((world.there().rebound, downs(&mut events)), (1, 0));
}

#[tokio::test(start_paused = true)]
async fn a_paused_node_is_silent_and_then_late() {
    let world = World::new().await;
    world.network.pause(&name("b"));
    tokio::time::sleep(ms(300)).await;
    let began = Instant::now();
    let (a, to) = (world.a.clone(), world.to.clone());
    let call = tokio::spawn(async move { ask(&a, &to, Ask::Echo(vec![1])).await });
    tokio::time::sleep(ms(400)).await;
    assert!(!call.is_finished() && is_up(&world.a, "b"));
    world.network.resume(&name("b"));
    assert_eq!(call.await.unwrap(), Ok(vec![1]));
    assert!(began.elapsed() < ms(410));
    assert!(world.there().paused > 0 && world.back().paused > 0);
    // A long pause is fenced, and over when it ends.
    let mut events = world.a.watch();
    world.network.pause(&name("b"));
    down_event(&mut events).await;
    world.network.resume(&name("b"));
    linked(&world.a, "b").await;
    world.call().await;
}

#[tokio::test(start_paused = true)]
async fn calm_ends_everything() {
    let world = World::new().await;
    let (a, b) = (name("a"), name("b"));
    let slow = Rules { delay: ms(400), loss: 0.3, bits_per_second: 10_000, ..Rules::default() };
    world.network.set_rules(slow);
    world.network.set_rules_between(&a, &b, slow);
    world.network.partition(&a, &b);
    world.network.clog(&b, &a);
    world.network.pause(&b);
    tokio::time::sleep(3 * SECOND).await;
    assert!(!is_up(&world.a, "b"));
    world.network.calm();
    linked(&world.a, "b").await;
    tokio::time::sleep(SECOND).await;
    assert!(world.call().await < ms(1));
}
