//! The tests, generic over the transport.

use super::harness::*;
use bytes::Bytes;
use dunlin_runtime::{
    Address, CallError, CastError, FlowClass, FlowError, FlowFrame, FlowId, Incarnation, Node,
    PeerEvent,
};
use std::time::Duration;
use tokio::time::Instant;

/// Instantiates every test of this module for one harness.
#[macro_export]
macro_rules! suite_for {
    (@ $harness:ty: $($test:ident)*) => {
        $(
            #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $test() {
                let time = std::time::Duration::from_secs(60);
                tokio::time::timeout(time, $crate::suite::$test::<$harness>()).await.unwrap();
            }
        )*
    };
    ($harness:ty) => {
        $crate::suite_for!(@ $harness:
            calls_are_answered_with_what_they_asked
            every_failure_has_its_own_error
            casts_keep_their_order_and_arrive_once
            a_cast_that_nobody_takes_is_told
            queues_are_bounded_in_bytes
            a_cast_to_a_peer_that_is_down_fails_at_once
            a_higher_incarnation_takes_over_at_once
            a_stale_incarnation_is_refused
            another_cluster_or_schema_is_refused_by_name
            a_node_that_is_not_listed_is_refused
            a_short_partition_fails_no_call
            a_long_partition_fails_what_was_in_flight
            a_shutdown_is_seen_at_once
            the_supervisors_word_ends_a_peer_at_once
            two_that_dial_at_once_end_with_one_steady_link
            leases_come_from_the_head_and_run_out
            flows_keep_order_and_content
            a_flow_waits_for_its_reader
            a_flow_whose_reader_is_gone_says_so
            a_flow_reopens_after_the_link_was_lost
            device_threads_can_block_on_flows
            bulk_does_not_hold_up_small_calls
        );
    };
}

fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

pub async fn calls_are_answered_with_what_they_asked<H: Harness>() {
    let harness = H::new();
    let (a, b) = pair(&harness).await;
    let (_export, to, _) = echo(&b, "x");
    let (_own_export, own, _) = echo(&a, "x");
    for size in [0, 1, 1000, 1 << 20, 5 << 20] {
        let bytes: Vec<u8> = (0..size).map(|i| (i * 7) as u8).collect();
        assert_eq!(ask(&a, &to, Ask::Echo(bytes.clone())).await, Ok(bytes.clone()));
        assert_eq!(ask(&a, &own, Ask::Echo(bytes.clone())).await, Ok(bytes));
    }
    let mut calls = tokio::task::JoinSet::new();
    for i in 0..200u8 {
        let (a, to) = (a.clone(), to.clone());
        calls.spawn(async move { (i, ask(&a, &to, Ask::Echo(vec![i; 100])).await) });
    }
    while let Some(result) = calls.join_next().await {
        let (i, answer) = result.unwrap();
        assert_eq!(answer, Ok(vec![i; 100]));
    }
}

pub async fn every_failure_has_its_own_error<H: Harness>() {
    let harness = H::new();
    let mut all = options(&harness, &["a", "b"]);
    all.iter_mut().for_each(|o| o.limits.message_bytes = 10_000);
    let (a, b) = (start(&harness, &all[0]).await, start(&harness, &all[1]).await);
    linked(&a, "b").await;
    let (export, far, _) = echo(&b, "x");
    let (own_export, own, _) = echo(&a, "x");
    for to in [far.clone(), own.clone()] {
        let started = Instant::now();
        assert_eq!(ask(&a, &to, Ask::Drop).await, Err(CallError::NoReply { to: to.clone() }));
        assert_eq!(ask(&a, &to, Ask::Panic).await, Err(CallError::ActorDown { to: to.clone() }));
        let nobody = Address::new(to.node.clone(), "echo", "nobody");
        let error = ask(&a, &nobody, Ask::Drop).await;
        assert_eq!(error, Err(CallError::ActorDown { to: nobody }));
        let error = a.call::<EchoTwo>(&to, &Ask::Drop, SECOND).await.unwrap_err();
        assert!(error.to_string().contains("sender speaks echo 2, receiver echo 1"), "{error}");
        let error = a.call::<Garbled>(&to, &(200, 3), SECOND).await;
        assert!(matches!(error, Err(CallError::Decode { .. })), "{error:?}");
        let error = ask(&a, &to, Ask::Echo(vec![0; 11_000])).await;
        assert!(matches!(error, Err(CallError::TooBig { .. })), "{error:?}");
        let error = ask(&a, &to, Ask::Big(11_000)).await;
        assert!(matches!(error, Err(CallError::TooBig { .. })), "{error:?}");
        assert!(started.elapsed() < 3 * SECOND, "an error took long: {:?}", started.elapsed());
        let error = a.call::<Echo>(&to, &Ask::Hold, ms(100)).await;
        assert_eq!(error, Err(CallError::Deadline { to: to.clone(), after_ms: 100 }));
        assert_eq!(ask(&a, &to, Ask::Late(50)).await, Ok(vec![9]));
    }
    drop((export, own_export));
    for to in [far, own] {
        let error = ask(&a, &to, Ask::Echo(vec![])).await;
        assert_eq!(error, Err(CallError::ActorDown { to }));
    }
    let unknown = Address::new(name("z"), "echo", "x");
    let error = ask(&a, &unknown, Ask::Drop).await.unwrap_err();
    assert!(error.to_string().contains("a knows no node z"), "{error}");
}

pub async fn casts_keep_their_order_and_arrive_once<H: Harness>() {
    let harness = H::new();
    let (a, b) = pair(&harness).await;
    let (_x, to_x, mut got_x) = echo(&b, "x");
    let (_y, to_y, mut got_y) = echo(&b, "y");
    let (_own, to_own, mut got_own) = echo(&a, "own");
    for i in 0..5000 {
        for to in [&to_x, &to_y, &to_own] {
            while let Err(error) = a.cast::<Echo>(to, &i) {
                assert!(matches!(error, CastError::Overloaded { .. }), "{error}");
                tokio::time::sleep(ms(1)).await;
            }
        }
    }
    for got in [&mut got_x, &mut got_y, &mut got_own] {
        for i in 0..5000 {
            assert_eq!(got.recv().await, Some(i));
        }
    }
}

pub async fn a_cast_that_nobody_takes_is_told<H: Harness>() {
    let harness = H::new();
    let (a, b) = pair(&harness).await;
    let (_export, to, _casts) = echo(&b, "x");
    let (_own_export, own, _own_casts) = echo(&a, "x");
    let mut events = a.watch();
    for to in [to, own] {
        let nobody = Address::new(to.node.clone(), "echo", "nobody");
        a.cast::<Echo>(&nobody, &1).unwrap();
        a.cast::<EchoTwo>(&to, &1).unwrap();
        a.cast::<Garbled>(&to, &"text".to_owned()).unwrap();
        a.cast::<Echo>(&to, &u64::MAX).unwrap();
        let mut told = Vec::new();
        while told.len() < 4 {
            match events.recv().await.unwrap() {
                PeerEvent::Undelivered { error } => told.push(error),
                other => panic!("{other:?}"),
            }
        }
        assert!(told.contains(&CastError::ActorDown { to: nobody }), "{told:?}");
        assert!(told.iter().any(|e| matches!(e, CastError::Version { .. })), "{told:?}");
        assert!(told.iter().any(|e| matches!(e, CastError::Decode { .. })), "{told:?}");
        assert!(told.contains(&CastError::ActorDown { to: to.clone() }), "{told:?}");
    }
}

pub async fn queues_are_bounded_in_bytes<H: Harness>() {
    let harness = H::new();
    let mut all = options(&harness, &["a", "b"]);
    for options in &mut all {
        options.limits.peer_queue_bytes = 1 << 20;
        options.limits.mailbox_bytes = 600_000;
    }
    let (a, b) = (start(&harness, &all[0]).await, start(&harness, &all[1]).await);
    linked(&a, "b").await;
    let (_export, to, mut casts) = echo(&b, "x");

    // Calls that the actor does not answer fill its mailbox.
    let mut held = tokio::task::JoinSet::new();
    for _ in 0..20 {
        let (a, to) = (a.clone(), to.clone());
        held.spawn(async move { a.call::<Echo>(&to, &Ask::Hold, 2 * SECOND).await });
    }
    let mut calls = tokio::task::JoinSet::new();
    for _ in 0..10 {
        let (a, to) = (a.clone(), to.clone());
        calls.spawn(
            async move { a.call::<Echo>(&to, &Ask::HoldBytes(vec![0; 100_000]), SECOND).await },
        );
    }
    let mut refused = 0;
    while let Some(result) = calls.join_next().await {
        match result.unwrap() {
            Err(CallError::Overloaded { .. }) => refused += 1,
            Err(CallError::Deadline { .. }) => {}
            other => panic!("{other:?}"),
        }
    }
    assert!((4..=6).contains(&refused), "{refused} of 10 refused");
    held.abort_all();

    // A peer that does not answer fills the sender's queue.
    harness.partition("a", "b");
    let mut sent = Vec::new();
    let error = loop {
        match a.cast::<Echo>(&to, &(sent.len() as u64)) {
            Ok(()) => sent.push(sent.len() as u64),
            Err(error) => break error,
        }
    };
    assert!(matches!(error, CastError::Overloaded { .. }), "{error}");
    assert!((1000..9000).contains(&sent.len()), "{} casts accepted", sent.len());
    harness.heal("a", "b");
    for i in sent {
        assert_eq!(casts.recv().await, Some(i));
    }
}

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

/// Starts a node's next life; the old one's port may take a moment to be free.
async fn start_again<H: Harness>(harness: &H, options: &dunlin_runtime::NodeOptions) -> Node {
    for _ in 0..200 {
        match Node::start(options.clone(), harness.transport(options.name.as_str())).await {
            Ok(node) => return node,
            Err(_) => tokio::time::sleep(ms(20)).await,
        }
    }
    panic!("{} does not start again", options.name);
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
    tokio::time::sleep(ms(50)).await;
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
    // An older life, and another process with the same number.
    for (incarnation, life) in [(4, 7), (5, 7)] {
        all[1].incarnation = Incarnation(incarnation);
        all[1].life = life;
        let old = start_again(&harness, &all[1]).await;
        let told = || old.peers()[0].last_error.clone().unwrap_or_default();
        eventually("the old life is told", || told().contains("incarnation refused")).await;
        assert!(told().contains("knows b #5"), "{}", told());
        assert!(!is_up(&a, "b"));
        old.shutdown().await;
    }
    all[1].incarnation = Incarnation(6);
    let b = start_again(&harness, &all[1]).await;
    linked(&a, "b").await;
    drop(b);
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
            let began = Instant::now();
            let (_, reason) = down_event(&mut events).await;
            assert!(began.elapsed() < ms(1800), "noticed after {:?}: {reason}", began.elapsed());
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
    assert!(began.elapsed() < 4 * SECOND, "{:?}", began.elapsed());
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
    tokio::time::sleep(ms(100)).await;
    let began = Instant::now();
    let (_, (_, reason)) = tokio::join!(b.shutdown(), down_event(&mut events));
    assert!(reason.contains("b is shutting down"), "{reason}");
    let error = in_flight.await.unwrap().unwrap_err();
    assert!(error.to_string().contains("b is shutting down"), "{error}");
    assert!(began.elapsed() < SECOND, "{:?}", began.elapsed());
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
    tokio::time::sleep(ms(100)).await;
    let mut events = a.watch();
    a.declare_down(&name("b"), "process b exited with signal 9");
    assert_eq!(down_event(&mut events).await.1, "process b exited with signal 9");
    let error = in_flight.await.unwrap().unwrap_err();
    assert!(error.to_string().contains("signal 9"), "{error}");
}

pub async fn two_that_dial_at_once_end_with_one_steady_link<H: Harness>() {
    for _ in 0..5 {
        let harness = H::new();
        let all = options(&harness, &["a", "b", "c"]);
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
    assert_eq!(*a.lease().borrow(), dunlin_runtime::Lease::Permanent);
    let mut lease = b.lease();
    lease.wait_for(dunlin_runtime::Lease::is_live).await.unwrap();
    tokio::time::sleep(2 * SECOND).await;
    assert!(lease.borrow_and_update().is_live(), "the lease is renewed");
    let granted = a.peers()[0].lease_granted.unwrap();
    assert!(granted > ms(500), "{granted:?}");
    let began = Instant::now();
    harness.partition("a", "b");
    lease.wait_for(|lease| !lease.is_live()).await.unwrap();
    let after = began.elapsed();
    assert!((ms(1000)..ms(1800)).contains(&after), "{after:?}");
    harness.heal("a", "b");
    lease.wait_for(dunlin_runtime::Lease::is_live).await.unwrap();
}

// ---- flows ---------------------------------------------------------------------------------

fn frame(step: u64, size: usize) -> FlowFrame {
    FlowFrame { epoch: 1, step, tag: step * 3, payload: Bytes::from(vec![step as u8; size]) }
}

pub async fn flows_keep_order_and_content<H: Harness>() {
    let harness = H::new();
    let (a, b) = pair(&harness).await;
    for (from, to, id) in [(&a, &b, 1), (&b, &a, 2), (&a, &a, 3)] {
        let early = id != 2;
        let flow = FlowId(id);
        let receiver = early.then(|| to.accept_flow(from.name(), flow));
        let sender = from.open_flow(to.name(), flow, FlowClass::Activations);
        let sending = tokio::spawn(async move {
            for step in 0..200 {
                let size = [0, 1, 100, 1000, 20_000, 300_000][step as usize % 6];
                sender.send(frame(step, size)).await.unwrap();
            }
            sender
        });
        if !early {
            tokio::time::sleep(ms(100)).await;
        }
        let mut receiver = receiver.unwrap_or_else(|| to.accept_flow(from.name(), flow));
        for step in 0..200 {
            let got = receiver.recv().await.unwrap();
            let size = [0, 1, 100, 1000, 20_000, 300_000][step as usize % 6];
            assert_eq!(got, frame(step, size));
        }
        let sender = sending.await.unwrap();
        let error = sender.send(frame(0, 65 << 20)).await.unwrap_err();
        assert!(matches!(error, FlowError::TooBig { .. }), "{error}");
        sender.send(frame(9, 8 << 20)).await.unwrap();
        assert_eq!(receiver.recv().await.unwrap(), frame(9, 8 << 20));
        drop(sender);
        let error = receiver.recv().await.unwrap_err();
        assert!(matches!(error, FlowError::Closed { .. }), "{error}");
    }
}

pub async fn a_flow_waits_for_its_reader<H: Harness>() {
    let harness = H::new();
    let (a, b) = pair(&harness).await;
    for to in [&b, &a] {
        let mut receiver = to.accept_flow(a.name(), FlowId(1));
        let sender = a.open_flow(to.name(), FlowId(1), FlowClass::Kv);
        let mut sent = 0u64;
        while tokio::time::timeout(ms(300), sender.send(frame(sent, 100_000))).await.is_ok() {
            sent += 1;
            assert!(sent < 200, "no backpressure");
        }
        assert!(sent >= 8, "{sent} frames in flight");
        for step in 0..sent {
            assert_eq!(receiver.recv().await.unwrap().step, step);
        }
        if to.name() == a.name() {
            continue; // A local send that was dropped has not begun.
        }
        // The send that timed out had begun: the next one completes it first.
        sender.send(frame(sent + 1, 10)).await.unwrap();
        let rest = [receiver.recv().await.unwrap().step, receiver.recv().await.unwrap().step];
        assert_eq!(rest, [sent, sent + 1]);
    }
}

pub async fn a_flow_whose_reader_is_gone_says_so<H: Harness>() {
    let harness = H::new();
    let (a, b) = pair(&harness).await;
    for to in [&b, &a] {
        let mut receiver = to.accept_flow(a.name(), FlowId(1));
        let sender = a.open_flow(to.name(), FlowId(1), FlowClass::Kv);
        sender.send(frame(1, 100)).await.unwrap();
        assert_eq!(receiver.recv().await.unwrap().step, 1);
        drop(receiver);
        let error = loop {
            match sender.send(frame(2, 100)).await {
                Ok(()) => tokio::time::sleep(ms(5)).await,
                Err(error) => break error,
            }
        };
        assert!(matches!(error, FlowError::Closed { .. }), "{error}");
        let mut receiver = to.accept_flow(a.name(), FlowId(1));
        sender.send(frame(3, 100)).await.unwrap();
        assert_eq!(receiver.recv().await.unwrap().step, 3);
    }
}

pub async fn a_flow_reopens_after_the_link_was_lost<H: Harness>() {
    let harness = H::new();
    let (a, b) = pair(&harness).await;
    let mut receiver = b.accept_flow(a.name(), FlowId(1));
    let sender = a.open_flow(b.name(), FlowId(1), FlowClass::Activations);
    sender.send(frame(1, 1000)).await.unwrap();
    assert_eq!(receiver.recv().await.unwrap().step, 1);
    let mut events = a.watch();
    harness.partition("a", "b");
    down_event(&mut events).await;
    let error = sender.send(frame(2, 1000)).await.unwrap_err();
    assert!(matches!(error, FlowError::LinkDown { .. }), "{error}");
    harness.heal("a", "b");
    sender.send(frame(3, 1000)).await.unwrap();
    let error = receiver.recv().await.unwrap_err();
    assert!(matches!(error, FlowError::LinkDown { .. }), "{error}");
    assert_eq!(receiver.recv().await.unwrap().step, 3);
}

pub async fn device_threads_can_block_on_flows<H: Harness>() {
    let harness = H::new();
    let (a, b) = pair(&harness).await;
    let (there, back) = (FlowId(1), FlowId(2));
    let (to_b, mut at_b) =
        (a.open_flow(b.name(), there, FlowClass::Activations), b.accept_flow(a.name(), there));
    let (to_a, mut at_a) =
        (b.open_flow(a.name(), back, FlowClass::Activations), a.accept_flow(b.name(), back));
    let echo = std::thread::spawn(move || {
        for _ in 0..100 {
            to_a.blocking_send(at_b.blocking_recv(5 * SECOND).unwrap()).unwrap();
        }
        (to_a, at_b)
    });
    let ask = std::thread::spawn(move || {
        for step in 0..100 {
            to_b.blocking_send(frame(step, 16_384)).unwrap();
            assert_eq!(at_a.blocking_recv(5 * SECOND).unwrap(), frame(step, 16_384));
        }
        let error = at_a.blocking_recv(ms(50)).unwrap_err();
        assert!(matches!(error, FlowError::Deadline { after_ms: 50, .. }), "{error}");
    });
    tokio::task::spawn_blocking(move || (echo.join().unwrap(), ask.join().unwrap())).await.unwrap();
}

pub async fn bulk_does_not_hold_up_small_calls<H: Harness>() {
    let harness = H::new();
    let (a, b) = pair(&harness).await;
    let (_export, to, _) = echo(&b, "x");
    let mut receiver = b.accept_flow(a.name(), FlowId(1));
    let sender = a.open_flow(b.name(), FlowId(1), FlowClass::Weights);
    let bulk = tokio::spawn(async move {
        loop {
            sender.send(frame(0, 8 << 20)).await.unwrap();
        }
    });
    let drain = tokio::spawn(async move {
        let mut bytes = 0;
        while let Ok(frame) = receiver.recv().await {
            bytes += frame.payload.len();
            if bytes > 1 << 40 {
                break;
            }
        }
    });
    let mut times = Vec::new();
    for _ in 0..200 {
        let began = Instant::now();
        assert_eq!(ask(&a, &to, Ask::Echo(vec![1; 64])).await, Ok(vec![1; 64]));
        times.push(began.elapsed());
        tokio::time::sleep(ms(2)).await;
    }
    bulk.abort();
    drain.abort();
    times.sort();
    // A frame of 8 MiB alone takes longer than this in a debug build.
    assert!(times[100] < ms(100), "median {:?}", times[100]);
    assert!(is_up(&a, "b"), "heartbeats starved");
}
