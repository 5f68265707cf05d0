//! The data plane.

use super::ms;
use crate::harness::*;
use bytes::Bytes;
use dunlin_runtime::{FlowClass, FlowError, FlowFrame, FlowId};
use tokio::time::Instant;

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
        // Where there must be room, only a busy machine makes a send take long.
        let patience = |sent| if sent < H::ROOM { PATIENCE } else { ms(300) };
        while tokio::time::timeout(patience(sent), sender.send(frame(sent, 100_000))).await.is_ok()
        {
            sent += 1;
            assert!(sent < 200, "no backpressure");
        }
        assert!(sent >= H::ROOM, "{sent} frames in flight");
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

pub async fn a_flow_whose_first_frame_was_lost_says_so<H: Harness>() {
    let harness = H::new();
    let (a, b) = pair(&harness).await;
    let mut receiver = b.accept_flow(a.name(), FlowId(1));
    let sender = a.open_flow(b.name(), FlowId(1), FlowClass::Activations);
    let mut events = a.watch();
    harness.partition("a", "b");
    // Taken for sending; it never arrives.
    sender.send(frame(1, 100)).await.unwrap();
    let waiting = tokio::spawn(async move { (receiver.recv().await, receiver) });
    down_event(&mut events).await;
    harness.heal("a", "b");
    let (error, mut receiver) = waiting.await.unwrap();
    assert!(matches!(error, Err(FlowError::LinkDown { .. })), "{error:?}");
    let error = sender.send(frame(2, 100)).await.unwrap_err();
    assert!(matches!(error, FlowError::LinkDown { .. }), "{error}");
    sender.send(frame(3, 100)).await.unwrap();
    assert_eq!(receiver.recv().await.unwrap().step, 3);
}

pub async fn frames_of_an_older_life_are_refused<H: Harness>() {
    let harness = H::new();
    let mut all = options(&harness, &["a", "b"]);
    let (a, b) = (start(&harness, &all[0]).await, start(&harness, &all[1]).await);
    linked(&a, "b").await;
    linked(&b, "a").await;
    let mut receiver = b.accept_flow(a.name(), FlowId(1));
    let sender = a.open_flow(b.name(), FlowId(1), FlowClass::Activations);
    for step in 1..4 {
        sender.send(frame(step, 100)).await.unwrap();
    }
    // Frame 1 has arrived, so the others wait in the receiver or are on their way.
    assert_eq!(receiver.recv().await.unwrap().step, 1);
    harness.partition("a", "b");
    drop((sender, a));
    all[0].incarnation.0 += 1;
    all[0].life += 1;
    let a = start_again(&harness, &all[0]).await;
    harness.heal("a", "b");
    linked(&a, "b").await;
    eventually("b knows the new life", || {
        is_up(&b, "a") && b.peers()[0].incarnation == Some(all[0].incarnation)
    })
    .await;
    let sender = a.open_flow(b.name(), FlowId(1), FlowClass::Activations);
    sender.send(frame(9, 100)).await.unwrap();
    let step = loop {
        match receiver.recv().await {
            Ok(frame) => break frame.step,
            Err(error) => assert!(!matches!(error, FlowError::TooBig { .. }), "{error}"),
        }
    };
    assert_eq!(step, 9);
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
            to_a.blocking_send(at_b.blocking_recv(PATIENCE).unwrap()).unwrap();
        }
        (to_a, at_b)
    });
    let ask = std::thread::spawn(move || {
        for step in 0..100 {
            to_b.blocking_send(frame(step, 16_384)).unwrap();
            assert_eq!(at_a.blocking_recv(PATIENCE).unwrap(), frame(step, 16_384));
        }
        let error = at_a.blocking_recv(ms(50)).unwrap_err();
        assert!(matches!(error, FlowError::Deadline { after_ms: 50, .. }), "{error}");
    });
    tokio::task::spawn_blocking(move || (echo.join().unwrap(), ask.join().unwrap())).await.unwrap();
}

pub async fn both_ends_may_send_before_either_reads<H: Harness>() {
    let harness = H::new();
    let (a, b) = pair(&harness).await;
    let ends = [(&a, &b, 1, 2), (&b, &a, 2, 1)].map(|(from, to, out, back)| {
        let sender = from.open_flow(to.name(), FlowId(out), FlowClass::Activations);
        (sender, from.accept_flow(to.name(), FlowId(back)))
    });
    // More than the buffers of a socket hold, as tensor ranks exchange it.
    let threads = ends.map(|(sender, mut receiver)| {
        std::thread::spawn(move || {
            for step in 0..20 {
                sender.blocking_send(frame(step, 1 << 20)).unwrap();
                assert_eq!(receiver.blocking_recv(PATIENCE).unwrap(), frame(step, 1 << 20));
            }
        })
    });
    let joined = move || threads.map(|thread| thread.join().unwrap());
    tokio::task::spawn_blocking(joined).await.unwrap();
}

pub async fn tasks_and_threads_may_take_turns_at_a_flow<H: Harness>() {
    let harness = H::new();
    let (a, b) = pair(&harness).await;
    let mut receiver = b.accept_flow(a.name(), FlowId(1));
    let sender = a.open_flow(b.name(), FlowId(1), FlowClass::Activations);
    for step in 0..20 {
        let sends = async {
            // Later than it is waited for.
            tokio::time::sleep(ms(2)).await;
            sender.send(frame(step, 3000)).await.unwrap();
        };
        let takes = async {
            if step % 2 == 0 {
                assert_eq!(receiver.recv().await.unwrap(), frame(step, 3000));
                assert!(receiver.try_recv().await.is_none());
                return receiver;
            }
            let wait = move || {
                assert_eq!(receiver.blocking_recv(PATIENCE).unwrap(), frame(step, 3000));
                assert!(receiver.blocking_try_recv().is_none());
                receiver
            };
            tokio::task::spawn_blocking(wait).await.unwrap()
        };
        receiver = tokio::join!(sends, takes).1;
    }
    drop(sender);
    let end = tokio::task::spawn_blocking(move || receiver.blocking_recv(PATIENCE)).await.unwrap();
    assert!(matches!(end, Err(FlowError::Closed { .. })), "{end:?}");
}

pub async fn an_end_is_told_to_those_who_only_look<H: Harness>() {
    let harness = H::new();
    let (a, b) = pair(&harness).await;
    let mut receiver = b.accept_flow(a.name(), FlowId(1));
    let sender = a.open_flow(b.name(), FlowId(1), FlowClass::Kv);
    sender.send(frame(0, 1 << 20)).await.unwrap();
    while tokio::time::timeout(ms(100), sender.send(frame(0, 1 << 20))).await.is_ok() {}
    // In the middle of a frame, so that it is no clean end.
    drop(sender);
    let error = loop {
        match receiver.try_recv().await {
            Some(Err(error)) => break error,
            Some(Ok(_)) => {}
            None => tokio::time::sleep(ms(5)).await,
        }
    };
    assert!(matches!(error, FlowError::LinkDown { .. }), "{error}");
    // And the flow may be opened again.
    let sender = a.open_flow(b.name(), FlowId(1), FlowClass::Kv);
    sender.send(frame(1, 100)).await.unwrap();
    assert_eq!(receiver.recv().await.unwrap().step, 1);
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
    let arrived = std::sync::Arc::new(std::sync::atomic::AtomicU32::new(0));
    let count = arrived.clone();
    let drain = tokio::spawn(async move {
        while receiver.recv().await.is_ok() {
            count.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        }
    });
    let whole = Instant::now();
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
    let frames = arrived.load(std::sync::atomic::Ordering::Relaxed);
    assert!(frames > 0, "no bulk was under way");
    // A call that waited its turn would wait for a whole frame at least.
    let bound = ms(100).max(whole.elapsed() / frames);
    assert!(times[100] < bound, "median {:?}, bound {bound:?}", times[100]);
    assert!(is_up(&a, "b"), "heartbeats starved");
}
