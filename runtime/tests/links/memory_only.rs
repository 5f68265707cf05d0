//! What only the in-memory network can be tested for: virtual time, seeds, lost frames.

use super::harness::*;
use dunlin_runtime::transport::memory::Rules;
use dunlin_runtime::{MemoryNetwork, Node, NodeOptions};
use std::sync::Arc;
use std::time::Duration;
use tokio::time::Instant;

/// Five nodes under delay, jitter, loss and a partition; returns all that can be observed.
async fn story(seed: u64) -> Vec<String> {
    let network = MemoryNetwork::new(seed);
    let harness = MemoryHarness(network.clone());
    let names = ["a", "b", "c", "d", "e"];
    let rules = Rules {
        delay: Duration::from_millis(3),
        jitter: Duration::from_millis(4),
        loss: 0.01,
        reset: 0.002,
        ..Rules::default()
    };
    network.set_rules(rules);
    let began = Instant::now();
    let mut nodes: Vec<Node> = Vec::new();
    for options in options(&harness, &names) {
        nodes.push(start(&harness, &options).await);
    }
    let exports: Vec<_> = nodes.iter().map(|node| echo(node, "x")).collect();
    let mut log = Vec::new();
    let mut events = nodes[0].watch();
    for i in 0..60usize {
        match i {
            5 => network.change_rules_between(&name("c"), &name("d"), |rules| {
                (rules.delay_p99, rules.burst) = (Duration::from_millis(80), 0.6);
                rules.bits_per_second = 200_000;
            }),
            10 => network.clog(&name("d"), &name("e")),
            14 => network.unclog(&name("d"), &name("e")),
            20 => network.partition(&name("a"), &name("b")),
            35 => network.heal_all(),
            40 => network.pause(&name("e")),
            43 => network.resume(&name("e")),
            46 => assert!(network.half_open(&name("c"), &name("a")) <= 1),
            50 => assert!(network.rebind(&name("b"), &name("c")) <= 1),
            55 => network.calm(),
            _ => {}
        }
        let (from, to) = (i % 5, (i * 3 + 1) % 5);
        let call = Ask::Echo(vec![i as u8; 4]);
        let answer = nodes[from].call::<Echo>(&exports[to].1, &call, SECOND).await;
        let cast = nodes[from].cast::<Echo>(&exports[to].1, &(i as u64));
        log.push(format!("{:?} {i} {answer:?} {cast:?}", began.elapsed()));
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    while let Ok(event) = events.try_recv() {
        log.push(format!("{event:?}"));
    }
    for (from, to) in names.iter().flat_map(|a| names.iter().map(move |b| (a, b))) {
        log.push(format!("{from} {to} {:?}", network.counters(&name(from), &name(to))));
    }
    log.push(format!("{:?} {:x}", network.counts(), network.trace()));
    log
}

fn simulate(seed: u64) -> Vec<String> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .start_paused(true)
        .build()
        .unwrap();
    runtime.block_on(story(seed))
}

#[test]
fn the_same_seed_tells_the_same_story() {
    for seed in 1..4 {
        let (first, second) = (simulate(seed), simulate(seed));
        let differ = first.iter().zip(&second).find(|(a, b)| a != b);
        assert_eq!(differ, None, "seed {seed}");
        let lost = first.last().unwrap();
        assert!(!lost.contains(", 0)"), "nothing was lost: {lost}");
    }
    assert_ne!(simulate(1), simulate(2));
}

/// Links break all the time; mail between the same two lives arrives once and in order.
#[tokio::test(start_paused = true)]
async fn broken_links_lose_no_mail() {
    for seed in 0..5 {
        let network = MemoryNetwork::new(seed);
        let harness = MemoryHarness(network.clone());
        let (a, b) = pair(&harness).await;
        let (_export, to, mut casts) = echo(&b, "x");
        network.set_rules(Rules {
            delay: Duration::from_millis(1),
            reset: 0.01,
            ..Rules::default()
        });
        let mut sent = Vec::new();
        for i in 0..2000u64 {
            if a.cast::<Echo>(&to, &i).is_ok() {
                sent.push(i);
            }
            if i % 10 == 0 {
                let answer = ask(&a, &to, Ask::Echo(vec![i as u8])).await;
                assert_eq!(answer, Ok(vec![i as u8]), "seed {seed}, call {i}");
            }
        }
        network.set_rules(Rules::default());
        linked(&a, "b").await;
        assert_eq!(ask(&a, &to, Ask::Echo(vec![])).await, Ok(vec![]));
        let mut got = Vec::new();
        while let Ok(i) = casts.try_recv() {
            got.push(i);
        }
        assert_eq!(got, sent, "seed {seed}");
        assert!(network.counts().1 > 10, "too few losses for a test: {:?}", network.counts());
    }
}

#[tokio::test(start_paused = true)]
async fn a_crashed_node_says_nothing_and_its_next_life_takes_over() {
    let network = MemoryNetwork::new(1);
    let harness = MemoryHarness(network.clone());
    let mut all = options(&harness, &["a", "b"]);
    let a = start(&harness, &all[0]).await;
    let b = start(&harness, &all[1]).await;
    linked(&a, "b").await;
    let mut events = a.watch();
    let began = Instant::now();
    network.crash(&name("b"));
    // What its tasks do as they end is not to be seen either.
    drop(b);
    let (_, reason) = down_event(&mut events).await;
    assert!(reason.contains("nothing heard"), "{reason}");
    assert!(began.elapsed() > Duration::from_millis(900), "{:?}", began.elapsed());
    all[1].incarnation.0 += 1;
    let b2 = start(&harness, &all[1]).await;
    linked(&a, "b").await;
    assert_eq!(a.peers()[0].incarnation, Some(all[1].incarnation));
    drop(b2);
}

#[tokio::test]
async fn wrong_options_are_refused_at_start() {
    let network = MemoryNetwork::new(1);
    let start = |change: fn(&mut NodeOptions)| {
        let mut options = NodeOptions::new(name("a"), "lab", "here:1");
        change(&mut options);
        Node::start(options, Arc::new(network.clone()))
    };
    let message =
        |result: Result<Node, dunlin_runtime::StartError>| result.unwrap_err().to_string();
    let own = start(|o| *o = o.clone().peer(name("a"), "x:1")).await;
    assert!(message(own).contains("its own peer"));
    let head = start(|o| o.head = Some(name("z"))).await;
    assert!(message(head).contains("head z is not among its peers"));
    let beat = start(|o| o.timing.heartbeat_ms = 0).await;
    assert!(message(beat).contains("heartbeat_ms is 0, it must be at least 1"));
    let first = start(|_| {}).await.unwrap();
    let again = start(|_| {}).await;
    assert!(message(again).contains("here:1 is already in use by node a"));
    drop(first);
}
