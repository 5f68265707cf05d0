//! Links that break, nodes that restart, hellos that are refused, leases.

use super::ms;
use crate::harness::*;
use dunlin_runtime::{Address, CallError, CastError, Incarnation, Lease, Node};
use tokio::time::Instant;

pub async fn a_cast_to_a_peer_that_is_down_fails_at_once<H: Harness>() {
    let harness = H::new();
    let all = options(&harness, &["a", "b"]);
    let a = start(&harness, &all[0]).await;
    let to = Address::new(name("b"), "echo", "x");
    let error = a.cast::<Echo>(&to, &1).unwrap_err();
    assert!(matches!(error, CastError::NodeDown { .. }), "{error}");
    // A call waits within its deadline, and then says which node was missing.
    let error = a.call::<Echo>(&to, &Ask::Drop, ms(300)).await.unwrap_err();
    assert!(matches!(error, CallError::NodeDown { .. }), "{error}");
    let waiting = ask(&a, &to, Ask::Echo(vec![4]));
    let later = async {
        tokio::time::sleep(ms(300)).await;
        let b = start(&harness, &all[1]).await;
        let export = echo(&b, "x");
        (b, export)
    };
    let (answer, _b) = tokio::join!(waiting, later);
    assert_eq!(answer, Ok(vec![4]));
}

pub async fn a_higher_incarnation_takes_over_at_once<H: Harness>() {
    let harness = H::new();
    let mut all = options(&harness, &["a", "b"]);
    let (a, b) = (start(&harness, &all[0]).await, start(&harness, &all[1]).await);
    linked(&a, "b").await;
    let (_export, to, _) = echo(&b, "x");
    let mut events = a.watch();
    let in_flight = {
        let (a, to) = (a.clone(), to.clone());
        tokio::spawn(async move { a.call::<Echo>(&to, &Ask::Hold, 30 * SECOND).await })
    };
    held(&a, &to, 1).await;
    // The old life vanishes without a word.
    harness.partition("a", "b");
    drop((b, _export));
    all[1].incarnation = Incarnation(2);
    all[1].life += 1;
    let b = start_again(&harness, &all[1]).await;
    let (_export, to, _) = echo(&b, "x");
    harness.heal("a", "b");
    let error = in_flight.await.unwrap().unwrap_err();
    assert!(matches!(error, CallError::NodeDown { .. }), "{error}");
    assert_eq!(down_event(&mut events).await.0, Incarnation(1));
    assert_eq!(ask(&a, &to, Ask::Echo(vec![1])).await, Ok(vec![1]));
    assert_eq!(a.peers()[0].incarnation, Some(Incarnation(2)));
}

pub async fn a_stale_incarnation_is_refused<H: Harness>() {
    let harness = H::new();
    let mut all = options(&harness, &["a", "b"]);
    all[1].incarnation = Incarnation(5);
    let a = start(&harness, &all[0]).await;
    let b = start(&harness, &all[1]).await;
    linked(&a, "b").await;
    b.shutdown().await;
    (all[1].incarnation, all[1].life) = (Incarnation(4), 7);
    let old = start_again(&harness, &all[1]).await;
    let told = || old.peers()[0].last_error.clone().unwrap_or_default();
    eventually("the old life is told", || told().contains("incarnation refused")).await;
    assert!(told().contains("knows b #5"), "{}", told());
    // On a busy machine the old life is told before the new one's end has reached `a`.
    eventually("a has lost b", || !is_up(&a, "b")).await;
    old.shutdown().await;
    all[1].incarnation = Incarnation(6);
    let b = start_again(&harness, &all[1]).await;
    linked(&a, "b").await;
    drop(b);
}

/// `a` is the head and knows `b`; `c` has met the second `b` first. That one waits, also for `c`,
/// until the first is gone.
pub async fn a_process_started_twice_does_not_keep_the_first_out<H: Harness>() {
    let harness = H::new();
    let mut all = options(&harness, &["a", "b", "c"]);
    all.iter_mut().for_each(|o| o.head = Some(name("a")));
    let mut second = all[1].clone();
    second.life += 1;
    second.listen = harness.addresses(&["elsewhere"]).remove(0);
    // It does not find the head at first.
    second.peers.insert(name("a"), harness.addresses(&["nowhere"]));
    let (c, second) = (start(&harness, &all[2]).await, start(&harness, &second).await);
    linked(&c, "b").await;
    let (a, b) = (start(&harness, &all[0]).await, start(&harness, &all[1]).await);
    linked(&a, "b").await;
    let told = |node: &Node, by: &str| {
        let peer = node.peers().into_iter().find(|peer| peer.node == name(by));
        peer.and_then(|peer| peer.last_error).unwrap_or_default()
    };
    let refused = "incarnation of another process refused";
    eventually("c refuses the first", || told(&b, "c").contains(refused)).await;

    second.add_peer(name("a"), vec![all[0].listen.clone()]);
    eventually("a refuses the second", || told(&second, "a").contains(refused)).await;
    linked(&b, "c").await;
    let (_export, to, _) = echo(&b, "x");
    assert_eq!(ask(&c, &to, Ask::Echo(vec![1])).await, Ok(vec![1]));
    assert!(is_up(&a, "b") && !is_up(&second, "a") && !is_up(&second, "c"));

    b.shutdown().await;
    linked(&second, "a").await;
    linked(&second, "c").await;
}

pub async fn another_cluster_or_schema_is_refused_by_name<H: Harness>() {
    for what in ["cluster", "key schema version"] {
        let harness = H::new();
        let mut all = options(&harness, &["a", "b"]);
        match what {
            "cluster" => all[1].cluster = "home".into(),
            _ => all[1].schema = 9,
        }
        let (a, b) = (start(&harness, &all[0]).await, start(&harness, &all[1]).await);
        let told = |node: &Node| node.peers()[0].last_error.clone().unwrap_or_default();
        eventually("both are told", || {
            [&a, &b].iter().all(|node| told(node).contains(&format!("{what} refused")))
        })
        .await;
        let (ours, theirs) = if what == "cluster" { ("lab", "home") } else { ("1", "9") };
        assert!(told(&a).contains(ours) && told(&a).contains(theirs), "{}", told(&a));
        assert!(!is_up(&a, "b") && !is_up(&b, "a"));
    }
}

pub async fn a_node_that_is_not_listed_is_refused<H: Harness>() {
    let harness = H::new();
    let mut all = options(&harness, &["a", "b"]);
    all[0].peers.clear();
    let (a, b) = (start(&harness, &all[0]).await, start(&harness, &all[1]).await);
    let told = || b.peers()[0].last_error.clone().unwrap_or_default();
    eventually("b is told", || told().contains("unknown node refused")).await;
    a.add_peer(name("b"), vec![all[1].listen.clone()]);
    linked(&a, "b").await;
}

pub async fn a_short_partition_fails_no_call<H: Harness>() {
    let harness = H::new();
    let (a, b) = pair(&harness).await;
    let (_export, to, mut casts) = echo(&b, "x");
    let mut events = a.watch();
    let late = a.call::<Echo>(&to, &Ask::Late(700), 20 * SECOND);
    let story = async {
        tokio::time::sleep(ms(100)).await;
        harness.partition("a", "b");
        for i in 0..10 {
            a.cast::<Echo>(&to, &i).unwrap();
        }
        let call = ask(&a, &to, Ask::Echo(vec![3]));
        let heal = async {
            down_event(&mut events).await;
            harness.heal("a", "b");
        };
        tokio::join!(call, heal).0
    };
    let (late, during) = tokio::join!(late, story);
    assert_eq!((late, during), (Ok(vec![9]), Ok(vec![3])));
    for i in 0..10 {
        assert_eq!(casts.recv().await, Some(i));
    }
    assert_eq!(ask(&a, &to, Ask::Echo(vec![])).await, Ok(vec![]));
    assert!(casts.try_recv().is_err(), "a cast arrived twice");
}

pub async fn a_long_partition_fails_what_was_in_flight<H: Harness>() {
    let harness = H::new();
    let mut all = options(&harness, &["a", "b"]);
    all.iter_mut().for_each(|o| o.timing.resume_ms = 500);
    let (a, b) = (start(&harness, &all[0]).await, start(&harness, &all[1]).await);
    linked(&a, "b").await;
    let (_export, to, _) = echo(&b, "x");
    assert_eq!(ask(&a, &to, Ask::Echo(vec![1])).await, Ok(vec![1]));
    let in_flight = a.call::<Echo>(&to, &Ask::Hold, 20 * SECOND);
    let cut = async {
        tokio::time::sleep(ms(100)).await;
        harness.partition("a", "b");
    };
    let began = Instant::now();
    let (error, ()) = tokio::join!(in_flight, cut);
    assert!(matches!(error, Err(CallError::NodeDown { .. })), "{error:?}");
    // Long before its own deadline; the rest is for a busy machine.
    assert!(began.elapsed() < 10 * SECOND, "{:?}", began.elapsed());
    let call = ask(&a, &to, Ask::Echo(vec![2]));
    let heal = async {
        tokio::time::sleep(ms(500)).await;
        harness.heal("a", "b");
    };
    assert_eq!(tokio::join!(call, heal).0, Ok(vec![2]));
}

pub async fn a_shutdown_is_seen_at_once<H: Harness>() {
    let harness = H::new();
    let (a, b) = pair(&harness).await;
    let (_export, to, _) = echo(&b, "x");
    let mut events = a.watch();
    let in_flight = {
        let (a, to) = (a.clone(), to.clone());
        tokio::spawn(async move { a.call::<Echo>(&to, &Ask::Hold, 30 * SECOND).await })
    };
    held(&a, &to, 1).await;
    let began = Instant::now();
    let (_, (_, reason)) = tokio::join!(b.shutdown(), down_event(&mut events));
    assert!(reason.contains("b is shutting down"), "{reason}");
    let error = in_flight.await.unwrap().unwrap_err();
    assert!(error.to_string().contains("b is shutting down"), "{error}");
    // The reasons say that it was told and not found out; the rest is for a busy machine.
    assert!(began.elapsed() < 10 * SECOND, "{:?}", began.elapsed());
    let error = b.call::<Echo>(&to, &Ask::Drop, SECOND).await.unwrap_err();
    assert!(matches!(error, CallError::NodeDown { .. }), "{error}");
}

pub async fn the_supervisors_word_ends_a_peer_at_once<H: Harness>() {
    let harness = H::new();
    let (a, b) = pair(&harness).await;
    let (_export, to, _) = echo(&b, "x");
    let in_flight = {
        let (a, to) = (a.clone(), to.clone());
        tokio::spawn(async move { a.call::<Echo>(&to, &Ask::Hold, 30 * SECOND).await })
    };
    held(&a, &to, 1).await;
    let mut events = a.watch();
    a.declare_down(&name("b"), "process b exited with signal 9");
    assert_eq!(down_event(&mut events).await.1, "process b exited with signal 9");
    let error = in_flight.await.unwrap().unwrap_err();
    assert!(error.to_string().contains("signal 9"), "{error}");
}

pub async fn two_that_dial_at_once_end_with_one_steady_link<H: Harness>() {
    for _ in 0..5 {
        let harness = H::new();
        let mut all = options(&harness, &["a", "b", "c"]);
        // A busy machine is no reason for a link to end here.
        all.iter_mut().for_each(|o| o.timing.dead_ms = 20_000);
        let nodes = tokio::join!(
            start(&harness, &all[0]),
            start(&harness, &all[1]),
            start(&harness, &all[2])
        );
        let nodes = [nodes.0, nodes.1, nodes.2];
        for node in &nodes {
            for other in nodes.iter().filter(|n| n.name() != node.name()) {
                linked(node, other.name().as_str()).await;
            }
        }
        let mut watchers: Vec<_> = nodes.iter().map(Node::watch).collect();
        tokio::time::sleep(ms(400)).await;
        for watcher in &mut watchers {
            assert!(watcher.try_recv().is_err(), "a link flaps");
        }
    }
}

pub async fn leases_come_from_the_head_and_run_out<H: Harness>() {
    let harness = H::new();
    let mut all = options(&harness, &["a", "b"]);
    all.iter_mut().for_each(|o| o.head = Some(name("a")));
    let (a, b) = (start(&harness, &all[0]).await, start(&harness, &all[1]).await);
    assert_eq!(*a.lease().borrow(), Lease::Permanent);
    let mut lease = b.lease();
    lease.wait_for(Lease::is_live).await.unwrap();
    let until = |lease: &Lease| match lease {
        Lease::Live { until } => Some(*until),
        _ => None,
    };
    let first = until(&lease.borrow_and_update()).expect("live");
    let renewed = |lease: &Lease| until(lease).is_some_and(|until| until > first + ms(300));
    lease.wait_for(renewed).await.unwrap();
    assert!(a.peers()[0].lease_granted.unwrap() > ms(0));
    harness.partition("a", "b");
    let mut last = first;
    loop {
        match &*lease.borrow_and_update() {
            Lease::Expired { since } => {
                assert!(*since >= last && Instant::now() >= last, "before its time");
                break;
            }
            live => last = until(live).expect("live"),
        }
        lease.changed().await.unwrap();
    }
    harness.heal("a", "b");
    lease.wait_for(Lease::is_live).await.unwrap();
}
