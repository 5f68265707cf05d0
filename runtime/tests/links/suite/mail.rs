//! Calls and casts.

use super::ms;
use crate::harness::*;
use dunlin_runtime::{Address, CallError, CastError, PeerEvent};
use tokio::time::Instant;

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
        assert!(started.elapsed() < 10 * SECOND, "an error took long: {:?}", started.elapsed());
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
