//! Directed cases: admission, placement, replay, poison, cancel, deadlines.

use crate::support::*;
use dunlin_actors::kv::key::Chain;
use dunlin_actors::messages::*;
use dunlin_actors::router::{Input, Note, RouterConfig};
use dunlin_model::sampling::TokenLogprob;
use std::time::Duration;

#[test]
fn refuses_before_acceptance_and_says_why() {
    let mut bench = Bench::new(RouterConfig { max_waiting: 2, ..RouterConfig::default() });
    let (result, _) = bench.submit(request(1, vec![5; 8], 8));
    assert!(matches!(result, Err(Refusal::NotReady { .. })), "{result:?}");

    bench.handle(Input::ReplicaUp(replica("left", 1)));
    let (result, _) = bench.submit(request(2, vec![5; 500], 13));
    assert_eq!(result, Err(Refusal::NeverFits { need: 513, have: 512 }));

    bench.place(request(3, vec![5; 8], 8));
    assert_eq!(bench.submit(request(3, vec![5; 8], 8)).0, Err(Refusal::Duplicate(RequestId(3))));
    bench.handle(Input::Cancel { request: RequestId(3), stopped: false });
    let again = bench.submit(request(3, vec![5; 8], 8)).0;
    assert_eq!(again, Err(Refusal::Duplicate(RequestId(3))), "ended ids are remembered");

    bench.handle(Input::Drain);
    assert_eq!(bench.submit(request(4, vec![5; 8], 8)).0, Err(Refusal::Draining));
}

#[test]
fn overload_is_refused_with_the_time_the_line_will_take() {
    let config = RouterConfig { max_waiting: 3, queue_ahead: 1, ..RouterConfig::default() };
    let mut bench = Bench::new(config);
    bench.handle(Input::ReplicaUp(replica("left", 1)));
    for id in 0..8 {
        // 4 run, 1 is ahead, 3 wait.
        bench.submit(request(id, vec![5; 100], 8)).0.expect("accepted");
    }
    assert_eq!(bench.status().waiting_requests, 3);
    let unknown = bench.submit(request(8, vec![5; 8], 8)).0;
    assert_eq!(unknown, Err(Refusal::Overloaded { waiting: 3, retry_after_ms: 1000 }));
    // 5 prompts of 100 on the replica, 3 in line with at least one token each: 803 tokens.
    let load = LoadReport { tokens_per_second: 100.0, ..LoadReport::default() };
    bench.report("left", 1, SchedulerEvent::Load(load));
    let slow = bench.submit(request(8, vec![5; 8], 8)).0;
    assert_eq!(slow, Err(Refusal::Overloaded { waiting: 3, retry_after_ms: 8030 }));
    // An end makes room at once.
    bench.handle(Input::Cancel { request: RequestId(0), stopped: false });
    assert_eq!(bench.status().waiting_requests, 2);
    bench.submit(request(8, vec![5; 8], 8)).0.expect("accepted");
}

#[test]
fn replay_continues_where_the_log_ends() {
    let mut bench = Bench::with_replicas(&["left", "right"]);
    let work = bench.place(request(1, vec![5, 6], 8));
    assert_eq!((work.attempt, work.tokens), (Attempt(1), vec![5, 6]));
    let mut first = tokens(1, 1, 0, &[10, 11]);
    if let SchedulerEvent::Tokens { cached_tokens, .. } = &mut first {
        *cached_tokens = Some(1);
    }
    bench.report("left", 1, first);
    let outputs = bench.down("left", 1, &[]);
    let (to, work) = outputs.work().expect("handed out again");
    assert_eq!((to.as_str(), work.attempt, work.suspect), ("right", Attempt(2), false));
    assert_eq!((work.tokens, work.prompt_len, work.max_tokens), (vec![5, 6, 10, 11], 2, 8));

    // The old attempt is fenced by epoch and by attempt.
    for (name, attempt) in [("left", 1), ("right", 1)] {
        let outputs = bench.report(name, 1, tokens(1, attempt, 2, &[99]));
        assert!(outputs.events.is_empty(), "{outputs:?}");
        assert!(outputs.notes.iter().any(|n| matches!(n, Note::Stale { .. })));
    }
    let mut second = tokens(1, 2, 2, &[12]);
    if let SchedulerEvent::Tokens { cached_tokens, .. } = &mut second {
        *cached_tokens = Some(4);
    }
    let outputs = bench.report("right", 1, second);
    let event = StreamEvent::Tokens { position: 2, ids: vec![12], logprobs: vec![] };
    assert_eq!(outputs.events, [(RequestId(1), event)]);
    bench.report("right", 1, tokens(1, 2, 3, &[0]));
    let outputs = bench.report("right", 1, finished(1, 2, FinishReason::Stop));
    let usage = Usage { prompt_tokens: 2, completion_tokens: 4, cached_tokens: 1 };
    let served_by = vec!["left/cpu".to_string(), "right/cpu".to_string()];
    let want = StreamEvent::Finished { reason: FinishReason::Stop, usage, served_by };
    assert_eq!(outputs.terminal(), Some(&want));
    assert_eq!(bench.status().open_requests, 0);
}

#[test]
fn a_complete_log_needs_no_replay() {
    for (last, max, reason) in [(9, 2, FinishReason::Length), (0, 5, FinishReason::Stop)] {
        let mut bench = Bench::with_replicas(&["left", "right"]);
        bench.place(request(1, vec![5; 4], max));
        bench.report("left", 1, tokens(1, 1, 0, &[9, last]));
        let outputs = bench.down("left", 1, &[1]);
        assert!(outputs.works().is_empty());
        let terminal = outputs.terminal().expect("it ends");
        assert!(matches!(terminal, StreamEvent::Finished { reason: r, .. } if *r == reason));
    }
}

#[test]
fn gaps_and_duplicates_never_reach_the_client() {
    let mut bench = Bench::with_replicas(&["left"]);
    bench.place(request(1, vec![5; 4], 8));
    bench.report("left", 1, tokens(1, 1, 0, &[1, 2]));
    // Partly known: only the new token is delivered.
    let outputs = bench.report("left", 1, tokens(1, 1, 1, &[2, 3]));
    let event = StreamEvent::Tokens { position: 2, ids: vec![3], logprobs: vec![] };
    assert_eq!(outputs.events, [(RequestId(1), event)]);
    assert!(outputs.notes.contains(&Note::Duplicate { request: RequestId(1), tokens: 1 }));
    let outputs = bench.report("left", 1, tokens(1, 1, 0, &[1, 7]));
    assert!(outputs.notes.contains(&Note::Diverged { request: RequestId(1), position: 1 }));
    // A hole: nothing is delivered, the attempt is recalled, the request replays.
    let outputs = bench.report("left", 1, tokens(1, 1, 4, &[5]));
    assert!(outputs.events.is_empty());
    assert_eq!(outputs.cancels(), [("left".to_string(), RequestId(1), Attempt(1))]);
    let (_, work) = outputs.work().expect("replayed");
    assert_eq!((work.attempt, work.tokens.len()), (Attempt(2), 7));
    // Cut short: an end for length before max_tokens is a gap as well.
    let outputs = bench.report("left", 1, finished(1, 2, FinishReason::Length));
    assert!(outputs.terminal().is_none());
    assert_eq!(outputs.work().expect("replayed").1.attempt, Attempt(3));
}

/// C12: one request makes the forward pass panic; it alone fails, with an error.
#[test]
fn a_poisonous_request_fails_alone() {
    let mut bench = Bench::with_replicas(&["left"]);
    for id in 1..=3 {
        bench.place(request(id, vec![5; 4], 8));
    }
    let outputs = bench.down("left", 1, &[1, 2, 3]);
    assert!(outputs.terminal().is_none(), "no verdict on a batch: {outputs:?}");
    let works = bench.handle(Input::ReplicaUp(replica("left", 2))).works();
    assert!(works.iter().all(|(_, work)| work.suspect), "{works:?}");
    // The first to move on by a token is cleared.
    bench.report("left", 2, tokens(1, 2, 0, &[9]));
    bench.down("left", 2, &[2]);
    let works = bench.handle(Input::ReplicaUp(replica("left", 3))).works();
    let suspects: Vec<_> = works.iter().map(|(_, w)| (w.request.0, w.suspect)).collect();
    assert_eq!(suspects, [(1, false), (2, true), (3, true)], "3 has not moved on yet");
    let outputs = bench.down("left", 3, &[2]);
    match outputs.terminal() {
        Some(StreamEvent::Failed { code: FailureCode::Poison, message, .. }) => {
            assert!(message.contains("request 2") && message.contains("alone"), "{message}");
        }
        other => panic!("expected poison, got {other:?}"),
    }
    assert_eq!(outputs.events.len(), 1, "its batch-mates go on");
    let works = bench.handle(Input::ReplicaUp(replica("left", 4))).works();
    assert_eq!(works.len(), 2);
}

#[test]
fn losses_without_progress_are_bounded_and_node_losses_are_no_strikes() {
    let mut bench = Bench::with_replicas(&["left"]);
    bench.place(request(1, vec![5; 4], 100));
    for epoch in 1..20 {
        // A token each time: may go on for ever.
        let outputs = bench.report("left", epoch, tokens(1, epoch as u32, epoch as u32 - 1, &[9]));
        assert_eq!(outputs.events.len(), 1);
        assert!(bench.down("left", epoch, &[]).terminal().is_none());
        bench.handle(Input::ReplicaUp(replica("left", epoch + 1)));
    }
    for epoch in 20..24 {
        // Without one, four times.
        assert!(bench.down("left", epoch, &[]).terminal().is_none(), "epoch {epoch}");
        bench.handle(Input::ReplicaUp(replica("left", epoch + 1)));
    }
    let outputs = bench.down("left", 24, &[]);
    assert!(matches!(
        outputs.terminal(),
        Some(StreamEvent::Failed { code: FailureCode::Poison, .. })
    ));
}

/// C09: affinity never beats liveness.
#[test]
fn a_dead_replica_gets_nothing_however_warm_its_cache() {
    let mut bench = Bench::with_replicas(&["left", "right"]);
    let prompt: Vec<u32> = (0..256).collect();
    let keys = block_keys(&prompt);
    let warm = |seq| SchedulerEvent::KvEvents { seq, stored: keys.clone(), removed: vec![] };
    bench.report("right", 1, warm(0));
    let (_, outputs) = bench.submit(request(1, prompt.clone(), 8));
    assert_eq!(outputs.work().expect("placed").0, "right", "the warm one");
    bench.handle(Input::Cancel { request: RequestId(1), stopped: false });
    bench.down("right", 1, &[]);
    for id in 2..6 {
        let (_, outputs) = bench.submit(request(id, prompt.clone(), 8));
        assert_eq!(outputs.work().expect("placed").0, "left");
    }
    // Late events of the dead epoch teach nothing; the new epoch starts cold.
    bench.report("right", 1, warm(1));
    bench.handle(Input::ReplicaUp(replica("right", 2)));
    let (_, outputs) = bench.submit(request(7, prompt, 8));
    assert_eq!(outputs.placed(), Some(("right".to_string(), 0)));
}

/// Keys that came with a request serve as those that the router computes, also for what is drawn
/// after them; wrong in number or of another kind, they are not used.
#[test]
fn given_keys_place_as_computed_ones_do() {
    let prompt: Vec<u32> = (0..64).collect();
    let longer: Vec<u32> = prompt.iter().copied().chain([9, 8, 7, 6, 5]).collect();
    let space = prompt_keys(&prompt).space;
    let given = |space, tokens: &[u32]| Some(Chain::of_prompt(space, "lab", "", tokens));
    let elsewhere = KeySpace { namespace: [8; 16], ..space };
    let all = [
        (given(space, &prompt), false),
        (None, true),
        (given(space, &prompt[..60]), true),
        (given(elsewhere, &prompt), true),
        (given(KeySpace { block_tokens: 8, ..space }, &prompt), true),
    ];
    for (keys, hashes) in all {
        let mut bench = Bench::with_replicas(&["left", "middle", "right"]);
        let warm = |tokens: &[u32]| SchedulerEvent::KvEvents {
            seq: 0,
            stored: block_keys(tokens),
            removed: vec![],
        };
        bench.report("middle", 1, warm(&prompt));
        let mut asked = request(1, prompt.clone(), 16);
        asked.keys = keys;
        let (_, outputs) = bench.submit(asked);
        assert_eq!(outputs.placed(), Some(("middle".to_string(), 63)));
        let hashed = outputs.notes.contains(&Note::Hashed { request: RequestId(1) });
        assert_eq!(hashed, hashes);
        // The replay finds what was drawn as well.
        bench.report("middle", 1, tokens(1, 1, 0, &longer[64..]));
        bench.report("right", 1, warm(&longer));
        let outputs = bench.down("middle", 1, &[]);
        assert_eq!(outputs.placed(), Some(("right".to_string(), 68)));
        assert!(!outputs.notes.contains(&Note::Hashed { request: RequestId(1) }));
    }
}

#[test]
fn a_gap_in_kv_events_forgets_the_replica() {
    let mut bench = Bench::with_replicas(&["left", "right"]);
    let prompt: Vec<u32> = (0..64).collect();
    let keys = block_keys(&prompt);
    let events = |seq, stored| SchedulerEvent::KvEvents { seq, stored, removed: vec![] };
    bench.report("right", 1, events(5, keys.clone()));
    let (_, outputs) = bench.submit(request(1, prompt.clone(), 8));
    assert_eq!(outputs.work().expect("placed").0, "right");
    bench.handle(Input::Cancel { request: RequestId(1), stopped: false });
    let outputs = bench.report("right", 1, events(7, vec![]));
    assert!(outputs.notes.contains(&Note::IndexForgotten { replica: "right".into() }));
    let (_, outputs) = bench.submit(request(2, prompt, 8));
    assert_eq!(outputs.work().expect("placed").0, "left", "no more affinity: by name");
}

#[test]
fn load_spreads_and_ties_go_by_name() {
    let mut bench = Bench::with_replicas(&["b", "a", "c"]);
    let mut order = Vec::new();
    for id in 0..6 {
        let (_, outputs) = bench.submit(request(id, vec![id as u32; 8], 8));
        order.push(outputs.work().expect("placed").0);
    }
    assert_eq!(order, ["a", "b", "c", "a", "b", "c"]);
}

/// C10: what could not be sent is sent elsewhere, and the failure is shared.
#[test]
fn an_unreachable_replica_is_tried_once() {
    let mut bench = Bench::with_replicas(&["left", "right"]);
    let work = bench.place(request(1, vec![5; 4], 8));
    let unreachable = |attempt| Input::Unreachable {
        request: RequestId(1),
        attempt,
        reason: "node left is down".into(),
    };
    let outputs = bench.handle(unreachable(work.attempt));
    assert_eq!(outputs.work().expect("placed elsewhere").0, "right");
    let (_, outputs) = bench.submit(request(2, vec![5; 4], 8));
    assert_eq!(outputs.work().expect("placed").0, "right", "left is shunned for all");
    // Nobody left: it waits, and is tried again when the shunning ends.
    let outputs = bench.handle(unreachable(Attempt(2)));
    assert!(outputs.works().is_empty());
    let wakeup = bench.router.next_wakeup().expect("a retry is due");
    assert_eq!(wakeup, bench.now + Duration::from_millis(250));
    let outputs = bench.wait(Duration::from_millis(250));
    assert_eq!(outputs.work().expect("tried again").1.attempt, Attempt(3));
}

/// C10: a worker is dead for two seconds before anyone hears of it, under more load than the other
/// one takes at once. What is sent to it is refused on the way.
#[test]
fn at_most_one_attempt_of_a_request_meets_a_dead_worker() {
    const REQUESTS: u64 = 60;
    let tick = Duration::from_millis(10);
    let mut bench = Bench::with_replicas(&["left", "right"]);
    let mut met = std::collections::BTreeMap::<RequestId, u32>::new();
    let mut running: Vec<(u64, RequestId, u32)> = Vec::new();
    let (mut submitted, mut done, mut ticks) = (0, 0, 0);
    while done < REQUESTS {
        let mut works = bench.wait(tick).works();
        ticks += 1;
        assert!(ticks < 10_000, "{done} of {REQUESTS} after {ticks} ticks");
        if submitted < REQUESTS {
            submitted += 1;
            let (result, outputs) = bench.submit(request(submitted, vec![5; 20], 4));
            result.expect("accepted");
            works.extend(outputs.works());
        }
        if ticks == 200 {
            works.extend(bench.down("left", 1, &[]).works());
        }
        // Each takes half a second, longer than the dead one is left alone for.
        for (id, attempt) in running.extract_if(.., |(at, ..)| *at == ticks).map(|(_, i, a)| (i, a))
        {
            let RequestId(number) = id;
            for position in 0..4 {
                bench.report("right", 1, tokens(number, attempt, position, &[9]));
            }
            let end = bench.report("right", 1, finished(number, attempt, FinishReason::Length));
            assert!(matches!(end.terminal(), Some(StreamEvent::Finished { .. })), "{end:?}");
            done += 1;
            works.extend(end.works());
        }
        while let Some((node, work)) = works.pop() {
            if node == "right" {
                running.push((ticks + 50, work.request, work.attempt.0));
                continue;
            }
            *met.entry(work.request).or_default() += 1;
            let (request, attempt) = (work.request, work.attempt);
            let reason = "node left is down".into();
            works.extend(bench.handle(Input::Unreachable { request, attempt, reason }).works());
        }
    }
    assert!(met.len() >= 2, "the dead worker was tried by {} requests", met.len());
    assert!(met.values().all(|count| *count == 1), "{met:?}");
}

/// C62: a cancel ends the request once and reaches the scheduler, wherever the request is.
#[test]
fn cancel_in_every_state() {
    let mut bench = Bench::with_replicas(&["left"]);
    let cancel = |id, stopped| Input::Cancel { request: RequestId(id), stopped };
    // Before it arrived.
    bench.handle(cancel(1, false));
    let (result, outputs) = bench.submit(request(1, vec![5; 4], 8));
    assert!(result.is_ok() && outputs.works().is_empty());
    assert!(matches!(outputs.terminal(), Some(StreamEvent::Cancelled { .. })));
    // Running, without and with tokens.
    for (id, stopped) in [(2, false), (3, true)] {
        bench.place(request(id, vec![5; 4], 8));
        bench.report("left", 1, tokens(id, 1, 0, &[1]));
        let outputs = bench.handle(cancel(id, stopped));
        assert_eq!(outputs.cancels(), [("left".to_string(), RequestId(id), Attempt(1))]);
        match (stopped, outputs.terminal()) {
            (false, Some(StreamEvent::Cancelled { usage })) => {
                assert_eq!(usage.completion_tokens, 1);
            }
            (true, Some(StreamEvent::Finished { reason: FinishReason::Stop, .. })) => {}
            other => panic!("{other:?}"),
        }
        // Twice is once; a late token has the cancel repeated, as it may have been lost.
        assert!(bench.handle(cancel(id, stopped)).events.is_empty());
        let outputs = bench.report("left", 1, tokens(id, 1, 1, &[1]));
        assert!(outputs.events.is_empty());
        assert_eq!(outputs.cancels().len(), 1);
        let outputs = bench.report("left", 1, finished(id, 1, FinishReason::Length));
        assert!(outputs.events.is_empty() && outputs.sends.is_empty());
    }
    // Waiting for a replica.
    bench.down("left", 1, &[]);
    bench.submit(request(4, vec![5; 4], 8)).0.expect("accepted");
    let outputs = bench.handle(cancel(4, false));
    assert!(matches!(outputs.terminal(), Some(StreamEvent::Cancelled { .. })));
    assert!(outputs.sends.is_empty());
    // C70: nothing is left in any gauge.
    let status = bench.status();
    assert_eq!((status.open_requests, status.waiting_requests), (0, 0));
    assert_eq!((status.cancelled_total, status.finished_total), (3, 1));
}

#[test]
fn a_lost_gateway_cancels_what_it_had_asked_for() {
    let mut bench = Bench::with_replicas(&["left"]);
    bench.place(request(1, vec![5; 4], 8));
    let mut other = request(2, vec![5; 4], 8);
    other.reply_to = address("side", "gateway");
    bench.place(other);
    let outputs = bench.handle(Input::GatewayDown { node: node("front"), lost: Duration::MAX });
    assert_eq!(outputs.cancels(), [("left".to_string(), RequestId(1), Attempt(1))]);
    let outputs = bench.handle(Input::Undeliverable(RequestId(2)));
    assert_eq!(outputs.cancels(), [("left".to_string(), RequestId(2), Attempt(1))]);
    assert_eq!(bench.status().replicas[0].assigned, 0);
}

#[test]
fn a_deadline_ends_a_request_and_says_what_was_missing() {
    let mut bench = Bench::with_replicas(&["left"]);
    bench.place(request(1, vec![5; 4], 8));
    bench.report("left", 1, tokens(1, 1, 0, &[1]));
    bench.down("left", 1, &[]);
    assert_eq!(bench.router.next_wakeup(), Some(Duration::from_secs(60)));
    assert!(bench.wait(Duration::from_millis(59_999)).terminal().is_none());
    let outputs = bench.wait(Duration::from_millis(1));
    match outputs.terminal() {
        Some(StreamEvent::Failed { code: FailureCode::Deadline, message, usage }) => {
            assert!(message.contains("no replica is ready (left: node down)"), "{message}");
            assert_eq!(usage.completion_tokens, 1);
        }
        other => panic!("{other:?}"),
    }
    assert_eq!(bench.router.next_wakeup(), None);
    // Running ones are recalled.
    bench.handle(Input::ReplicaUp(replica("left", 2)));
    bench.place(request(2, vec![5; 4], 8));
    let outputs = bench.wait(Duration::from_secs(60));
    assert!(outputs.terminal().is_some());
    assert_eq!(outputs.cancels().len(), 1);
}

#[test]
fn prompt_logprobs_are_delivered_once() {
    let lp = |n: usize| vec![TokenLogprob { logprob: -(n as f32), top: vec![] }; n];
    let report = |attempt, logprobs| SchedulerEvent::PromptLogprobs {
        request: RequestId(1),
        attempt: Attempt(attempt),
        logprobs,
    };
    let mut bench = Bench::with_replicas(&["left"]);
    let mut asked = request(1, vec![5; 6], 8);
    asked.prompt_logprobs = Some(0);
    assert_eq!(bench.place(asked).prompt_logprobs, Some(0));
    // In pieces, interrupted by a loss: the pieces of the lost attempt do not count.
    assert!(bench.report("left", 1, report(1, lp(3))).events.is_empty());
    bench.down("left", 1, &[]);
    let (_, work) = bench.handle(Input::ReplicaUp(replica("left", 2))).work().expect("replayed");
    assert_eq!(work.prompt_logprobs, Some(0));
    assert!(bench.report("left", 2, report(2, lp(3))).events.is_empty());
    let outputs = bench.report("left", 2, report(2, lp(2)));
    assert!(
        matches!(&outputs.events[..], [(_, StreamEvent::PromptLogprobs(all))] if all.len() == 5)
    );
    bench.report("left", 2, tokens(1, 2, 0, &[9]));
    bench.down("left", 2, &[]);
    let (_, work) = bench.handle(Input::ReplicaUp(replica("left", 3))).work().expect("replayed");
    assert_eq!(work.prompt_logprobs, None);
    assert!(bench.report("left", 3, report(3, lp(5))).events.is_empty());
}

#[test]
fn a_replica_placed_anew_without_a_word_loses_its_work_too() {
    let mut bench = Bench::with_replicas(&["left"]);
    bench.place(request(1, vec![5; 4], 8));
    let outputs = bench.handle(Input::ReplicaUp(replica("left", 3)));
    assert_eq!(outputs.work().expect("replayed").1.attempt, Attempt(2));
    // Neither an older announcement nor an older loss means anything now.
    assert!(bench.handle(Input::ReplicaUp(replica("left", 2))).works().is_empty());
    assert!(bench.down("left", 2, &[1]).works().is_empty());
    assert_eq!(bench.status().replicas[0].info.epoch, ReplicaEpoch(3));
}

#[test]
fn a_draining_replica_finishes_what_it_has() {
    let mut bench = Bench::with_replicas(&["left", "right"]);
    bench.place(request(1, vec![5; 4], 8));
    bench.handle(Input::ReplicaDraining { replica: "left".into(), epoch: ReplicaEpoch(1) });
    for id in 2..5 {
        let (_, outputs) = bench.submit(request(id, vec![5; 4], 8));
        assert_eq!(outputs.work().expect("placed").0, "right");
    }
    assert_eq!(bench.report("left", 1, tokens(1, 1, 0, &[9])).events.len(), 1);
    bench.handle(Input::ReplicaDraining { replica: "right".into(), epoch: ReplicaEpoch(1) });
    assert!(bench.submit(request(5, vec![5; 4], 8)).1.works().is_empty(), "it waits");
    let outputs = bench.handle(Input::ReplicaUp(replica("left", 2)));
    assert_eq!(outputs.works().len(), 2, "the one that waited, and the one left had");
}
