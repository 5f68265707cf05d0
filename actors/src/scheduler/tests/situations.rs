//! Single situations, most of them once a bug somewhere (design cases by number).

use super::super::Output;
use super::*;
use dunlin_model::engine::Batch;

fn setup(blocks: u32, step_tokens: usize, in_flight: usize) -> Setup {
    Setup {
        blocks,
        block_tokens: 16,
        key_bits: 128,
        limits: Limits {
            step_tokens,
            chunk_tokens: step_tokens,
            prefix_cache: true,
            max_running: 64,
            in_flight,
            overlap: false,
            step_target: None,
            step_stretch: 0,
            batching: Batching::Continuous,
            step_deadline: Duration::from_secs(10),
            context_tokens: 4096,
        },
    }
}

fn work(length: usize, max_tokens: u32) -> Work {
    Work {
        request: RequestId(0),
        attempt: Attempt(1),
        tenant: "1".into(),
        cache_salt: String::new(),
        tokens: (0..length as u32).map(|i| i * 7 % 11).collect(),
        prompt_len: length as u32,
        sampling: SamplingParams::default(),
        max_tokens,
        min_tokens: 0,
        stop_tokens: Vec::new(),
        prompt_logprobs: None,
        suspect: false,
    }
}

fn batch(world: &World) -> &Batch {
    &world.flying.back().unwrap().1
}

/// C38: what can never fit is refused at once, and blocks nobody.
#[test]
fn a_prompt_larger_than_the_pool_fails_and_the_next_is_served() {
    let mut world = World::new(setup(64, 512, 1));
    let (large, small) = (world.submit(work(2000, 10), 0), world.submit(work(10, 10), 0));
    let code = FailureCode::NeverFits;
    assert_eq!(world.clients[&large].end, Some(End::Failed(code.clone())));
    world.drain();
    assert_eq!(world.clients[&small].end, Some(End::Finished(FinishReason::Length)));
    let refused = Box::new(work(2000, 10));
    let input = Input::Submit { epoch: EPOCH, work: refused };
    let message = match &world.scheduler.handle(&mut world.kv, world.now, input)[..] {
        [Output::Event(SchedulerEvent::Failed { message, .. })] => message.clone(),
        other => panic!("{other:?}"),
    };
    assert!(message.contains("2010") && message.contains("1024"), "{message}");
}

/// C70: after everything is aborted the gauges fall with no new request, within a tick.
#[test]
fn aborting_all_empties_the_gauges() {
    let mut world = World::new(setup(64, 64, 2));
    for _ in 0..106 {
        world.submit(work(20, 50), 0);
    }
    for _ in 0..20 {
        world.step_done(None);
    }
    world.input(Input::Tick);
    assert!(world.load.as_ref().unwrap().running > 0);
    for id in world.open() {
        world.cancel(id);
    }
    while world.step_done(None) {}
    world.input(Input::Tick);
    let load = world.load.unwrap();
    assert_eq!((load.running, load.waiting, load.kv_blocks_live), (0, 0, 0));
}

/// C30: a prompt longer than any window, four times, cold and warm.
#[test]
fn four_like_runs_give_the_same_tokens() {
    let mut world = World::new(setup(128, 512, 2));
    let mut outputs = Vec::new();
    for _ in 0..4 {
        let id = world.submit(work(1464, 20), 0);
        world.drain();
        outputs.push(world.clients[&id].got.clone());
    }
    assert!(outputs.iter().all(|output| *output == outputs[0] && output.len() == 20));
    assert_eq!(world.scheduler.load(&world.kv).prefix_hits_total, 3 * 1456);
}

#[test]
fn a_long_prompt_does_not_hold_up_who_decodes() {
    let mut world = World::new(setup(128, 16, 1));
    let decoding = world.submit(work(4, 100), 0);
    world.step_done(None);
    let long = world.submit(work(600, 1), 0);
    let mut chunks = 0;
    while world.clients[&long].end.is_none() {
        world.step_done(None);
        let has = |id: RequestId| batch(&world).seqs.iter().any(|seq| seq.request == id.0);
        assert!(has(decoding), "every step carries the decoding sequence");
        chunks += usize::from(has(long));
    }
    assert!(chunks >= 600 / 15);
}

#[test]
fn micro_batches_share_the_decoding_sequences() {
    let mut world = World::new(setup(64, 512, 2));
    for i in 0..8 {
        world.submit(work(4 + i, 50), 0);
    }
    for _ in 0..6 {
        world.step_done(None);
    }
    let sizes: Vec<_> = world.flying.iter().map(|(_, batch)| batch.seqs.len()).collect();
    assert_eq!(sizes, [4, 4]);
}

#[test]
fn the_chunks_of_one_prompt_are_in_flight_together() {
    let mut world = World::new(setup(64, 16, 3));
    world.submit(work(40, 1), 0);
    let chunks: Vec<_> = world.flying.iter().map(|(_, batch)| batch.tokens()).collect();
    assert_eq!(chunks, [16, 16, 8]);
}

#[test]
fn the_sampler_gets_history_and_forbidden_tokens_only_where_needed() {
    let mut world = World::new(setup(64, 64, 1));
    world.submit(work(4, 3), 0);
    let spec = batch(&world).seqs[0].sample.clone().unwrap();
    assert!(spec.prompt.is_empty() && spec.output.is_empty() && spec.forbidden.is_empty());
    world.drain();
    let mut wanting = work(4, 3);
    wanting.sampling.frequency_penalty = 0.5;
    wanting.min_tokens = 1;
    wanting.stop_tokens = vec![99];
    world.submit(wanting, 0);
    let spec = batch(&world).seqs[0].sample.clone().unwrap();
    assert_eq!((spec.prompt.len(), spec.output.len(), spec.forbidden), (4, 0, vec![99]));
    world.step_done(None);
    let spec = batch(&world).seqs[0].sample.clone().unwrap();
    assert_eq!((spec.prompt.len(), spec.output.len(), spec.forbidden), (4, 1, vec![]));
}

#[test]
fn a_suspect_runs_alone_until_it_has_moved() {
    let mut world = World::new(setup(64, 16, 2));
    world.submit(work(4, 50), 0);
    world.step_done(None);
    let suspect = world.submit(Work { suspect: true, ..work(40, 5) }, 0);
    let mut alone = 0;
    while world.clients[&suspect].got.is_empty() {
        world.step_done(None);
        let seqs = &batch(&world).seqs;
        if seqs.len() == 1 && seqs[0].request == suspect.0 && world.flying.len() == 1 {
            alone += 1;
        }
    }
    assert_eq!(alone, 3);
    assert!(world.flying.iter().any(|(_, b)| b.seqs.iter().any(|s| s.request != suspect.0)));
    world.drain();
}

#[test]
fn a_failed_step_ends_planning() {
    let mut world = World::new(setup(64, 64, 1));
    world.submit(work(4, 50), 0);
    let failed = Input::StepFailed { epoch: EPOCH, step: 1, reason: "device lost".into() };
    let out = world.scheduler.handle(&mut world.kv, world.now, failed);
    let reason = "step 1: device lost".to_string();
    assert_eq!(out[0], Output::Halted { reason });
    let late = Input::StepDone { epoch: EPOCH, step: 1, sampled: vec![], micros: 0 };
    assert!(world.scheduler.handle(&mut world.kv, world.now, late).iter().all(|output| {
        !matches!(output, Output::Run { .. } | Output::Event(SchedulerEvent::Tokens { .. }))
    }));
}

#[test]
fn an_overdue_step_breaks_the_replica_once() {
    let mut world = World::new(setup(64, 64, 1));
    world.submit(work(4, 50), 0);
    world.now += Duration::from_secs(9);
    world.input(Input::Tick);
    assert_eq!(world.broken, None);
    world.now += Duration::from_secs(2);
    world.input(Input::Tick);
    let reason = world.broken.take().unwrap();
    assert!(reason.contains("step 1 (1 sequences)"), "{reason}");
    world.input(Input::Tick);
    assert_eq!(world.broken, None);
}

#[test]
fn an_answer_about_other_requests_breaks_the_replica() {
    let mut world = World::new(setup(64, 64, 1));
    world.submit(work(4, 50), 0);
    world.flying.clear();
    world.input(Input::StepDone { epoch: EPOCH, step: 1, sampled: vec![], micros: 0 });
    let reason = world.broken.unwrap();
    assert!(reason.contains("RequestId(1)"), "{reason}");
}

#[test]
fn a_replay_of_what_was_complete_ends_at_once() {
    let mut world = World::new(setup(64, 64, 1));
    let all = work(4, 5);
    let id = world.submit(all, 5);
    assert_eq!(world.clients[&id].end, Some(End::Finished(FinishReason::Length)));
    let mut stopping = work(4, 50);
    stopping.stop_tokens = (0..fake::VOCAB).collect();
    let id = world.submit(stopping, 1);
    assert_eq!(world.clients[&id].end, Some(End::Finished(FinishReason::Stop)));
    let id = world.submit(work(4, 0), 0);
    assert_eq!(world.clients[&id].end, Some(End::Finished(FinishReason::Length)));
    assert!(world.flying.is_empty());
}

#[test]
fn without_the_prefix_cache_nothing_is_kept() {
    let mut setup = setup(64, 64, 1);
    setup.limits.prefix_cache = false;
    let mut world = World::new(setup);
    for _ in 0..2 {
        world.submit(work(40, 3), 0);
        world.drain();
    }
    let load = world.scheduler.load(&world.kv);
    let kept = (load.prefix_queries_total, load.prefix_hits_total, load.kv_blocks_cached);
    assert_eq!(kept, (0, 0, 0));
}

#[test]
fn a_busy_tenant_does_not_keep_a_new_one_waiting() {
    let mut quick = setup(64, 64, 1);
    quick.limits.max_running = 1;
    let mut world = World::new(quick);
    for _ in 0..20 {
        world.submit(work(20, 10), 0);
    }
    let other = world.submit(Work { tenant: "2".into(), ..work(20, 10) }, 0);
    while world.clients[&other].end.is_none() {
        assert!(world.step_done(None));
    }
    assert!(world.seen.finished <= 3, "{} were served before it", world.seen.finished);
}

fn overlapping(step_tokens: usize) -> World {
    let mut setup = setup(64, step_tokens, 1);
    setup.limits.overlap = true;
    World::new(setup)
}

#[test]
fn the_next_step_is_planned_before_this_one_is_done() {
    let mut world = overlapping(64);
    let id = world.submit(work(4, 5), 0);
    let tokens: Vec<_> = world.flying.iter().map(|(_, batch)| batch.tokens()).collect();
    assert_eq!(tokens, [4, 1], "the prompt, and the token that it draws");
    for drawn in 1..5 {
        world.step_done(None);
        assert_eq!(world.clients[&id].got.len(), drawn);
        // Nothing is planned beyond the last token.
        assert_eq!(world.flying.len(), (5 - drawn).min(2));
    }
    world.drain();
    assert_eq!(world.scheduler.load(&world.kv).steps_total, 5, "and no step was for nothing");
}

/// Two batches that take turns on two stages: the third step is the first batch's next one.
#[test]
fn batches_in_turn_are_planned_ahead_as_well() {
    let mut setup = setup(64, 64, 2);
    setup.limits.overlap = true;
    let mut world = World::new(setup);
    world.submit(work(4, 40), 0);
    world.submit(work(5, 40), 0);
    for _ in 0..20 {
        world.step_done(None);
        let seqs = world.flying.iter().map(|(_, batch)| &batch.seqs[..]);
        let who: Vec<Vec<u64>> = seqs.map(|s| s.iter().map(|s| s.request).collect()).collect();
        assert_eq!((who.len(), who[0].len(), who[1].len()), (3, 1, 1), "{who:?}");
        assert!(who[0] == who[2] && who[0] != who[1], "{who:?}");
    }
    assert!(world.seen.overlapped > 15);
    world.drain();
}

#[test]
fn a_stop_token_is_the_last_one_that_is_told_and_costs_one_place() {
    let mut world = overlapping(64);
    let other = world.submit(work(5, 30), 0);
    let mut stopping = work(4, 30);
    stopping.stop_tokens = (0..fake::VOCAB).collect();
    stopping.min_tokens = 3;
    let id = world.submit(stopping, 0);
    while world.clients[&id].end.is_none() {
        world.step_done(None);
    }
    let in_flight = |world: &World, id: RequestId| {
        world.flying.iter().filter(|(_, b)| b.seqs.iter().any(|s| s.request == id.0)).count()
    };
    assert_eq!(in_flight(&world, id), 1, "in the step that was planned already");
    world.step_done(None);
    assert_eq!((in_flight(&world, id), in_flight(&world, other)), (0, 2));
    world.drain();
    assert_eq!(world.clients[&id].end, Some(End::Finished(FinishReason::Stop)));
}

/// Whoever lacks a block must get one in the end, though all others are in some step at all times.
#[test]
fn the_oldest_gets_its_blocks_from_those_who_overlap() {
    let mut setup = setup(6, 64, 1);
    setup.limits.overlap = true;
    let mut world = World::new(setup);
    let first = world.submit(work(10, 80), 0);
    world.submit(work(10, 80), 0);
    world.submit(work(10, 80), 0);
    while world.clients[&first].end.is_none() {
        assert!(world.step_done(None));
        assert!(world.clients.values().all(|c| c.got.len() <= world.clients[&first].got.len()));
    }
    assert!(world.scheduler.load(&world.kv).preemptions_total > 0);
    world.drain();
}

/// One prompt beside a decoding sequence: no step takes more than twice the decoding alone.
#[test]
fn chunks_beside_decoding_follow_the_measured_pace() {
    let mut setup = setup(256, 512, 1);
    setup.limits.step_stretch = 2;
    let mut world = World::new(setup);
    let decoding = |world: &mut World| {
        for _ in 0..4 {
            world.submit(work(4, 4000), 0);
        }
        (0..20).for_each(|_| timed_step(world));
    };
    decoding(&mut world);
    let long = world.submit(work(600, 1), 0);
    let mut chunks = Vec::new();
    while world.clients[&long].end.is_none() {
        let seqs = &batch(&world).seqs;
        chunks.extend(seqs.iter().filter(|s| s.request == long.0).map(|s| s.tokens.len()));
        timed_step(&mut world);
    }
    // Decoding takes 10 ms and a prompt token half of one.
    assert!(chunks.iter().all(|chunk| *chunk <= 21), "{chunks:?}");
    assert!(chunks[10..chunks.len() - 1].iter().all(|c| (17..=21).contains(c)), "{chunks:?}");
    // Twelve prompts beside four sequences: twice (4 + 12 - 1) / 4 times as long, 75 ms.
    for i in 0..12 {
        world.submit(work(600 + i, 1), 0);
    }
    // Each submission took the world a millisecond, which is none of the step's in flight.
    world.now -= Duration::from_millis(12);
    // One of the steps may be of decoding alone, to measure it anew.
    let mut tokens = [0; 3];
    for tokens in &mut tokens {
        timed_step(&mut world);
        *tokens = batch(&world).tokens();
    }
    let most = tokens.into_iter().max();
    assert!(most.is_some_and(|most| (124..=144).contains(&most)), "{tokens:?}");
}

fn timed_step(world: &mut World) {
    step_that_takes(world, |prefill, _| 10_000 + 500 * prefill);
}

/// Micros, from tokens of prompts and the number of sequences that decode.
fn step_that_takes(world: &mut World, micros: impl Fn(u64, u64) -> u64) {
    let (_, batch) = world.flying.front().unwrap();
    let lengths = || batch.seqs.iter().map(|s| s.tokens.len() as u64);
    let decoding = lengths().filter(|n| *n == 1).count() as u64;
    let prefill = lengths().filter(|n| *n > 1).sum();
    // The world's own clock adds a millisecond a step.
    world.now += Duration::from_micros(micros(prefill, decoding) - 1000);
    world.step_done(None);
}

/// Many streams at once, where only one was ever seen to decode alone: chunks were once sized by
/// what that one took, and took five seconds to let in what two suffice for.
#[test]
fn a_crowd_is_let_in_at_the_pace_of_a_crowd() {
    let serve = |stretch, streams: usize| {
        let mut setup = setup(4096, 512, 1);
        (setup.limits.step_stretch, setup.limits.overlap) = (stretch, true);
        let mut world = World::new(setup);
        let cost = |prefill, decoding| 2_400 + 500 * prefill + 650 * decoding;
        let warm_up = world.submit(work(128, 64), 0);
        while world.clients[&warm_up].end.is_none() {
            step_that_takes(&mut world, cost);
        }
        let begun = world.now;
        let prompt = |i: usize| {
            let mut work = work(128, 96);
            work.tokens
                .iter_mut()
                .enumerate()
                .for_each(|(at, token)| *token = (i * at) as u32 % 11);
            work
        };
        let ids: Vec<_> = (0..streams).map(|i| world.submit(prompt(i), 0)).collect();
        let mut first = Duration::ZERO;
        while ids.iter().any(|id| world.clients[id].end.is_none()) {
            if ids.iter().any(|id| world.clients[id].got.is_empty()) {
                first = world.now - begun;
            }
            step_that_takes(&mut world, cost);
        }
        (first.as_secs_f64(), (world.now - begun).as_secs_f64())
    };
    for streams in [16, 32, 48] {
        let (first, all) = serve(2, streams);
        let (first_unbounded, all_unbounded) = serve(0, streams);
        assert!(first < 2.0 * first_unbounded, "{streams}: {first} against {first_unbounded} s");
        assert!(all < 1.08 * all_unbounded, "{streams}: {all} against {all_unbounded} s");
    }
}

#[test]
fn a_static_batch_takes_nobody_in_before_all_have_ended() {
    let mut setup = setup(64, 512, 1);
    setup.limits.batching = Batching::Static;
    let mut world = World::new(setup);
    world.submit(work(4, 3), 0);
    let batch_of_two = [world.submit(work(5, 4), 0), world.submit(work(6, 9), 0)];
    let in_step = |world: &World| {
        let (_, batch) = world.flying.back().unwrap();
        batch.seqs.iter().map(|seq| seq.request).collect::<Vec<_>>()
    };
    repeat(3, || world.step_done(None));
    let ids = batch_of_two.map(|id| id.0).to_vec();
    assert_eq!(in_step(&world), ids);
    let late = world.submit(work(7, 2), 0);
    while world.clients[&batch_of_two[1]].end.is_none() {
        assert!(!in_step(&world).contains(&late.0));
        world.step_done(None);
    }
    assert_eq!(in_step(&world), [late.0]);
    world.drain();
}
