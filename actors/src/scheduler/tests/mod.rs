//! Properties of the scheduler over random operations, and single situations by name.

mod actors;
mod fake;
mod situations;
mod world;

use super::{Batching, Input, Limits};
use crate::messages::*;
use dunlin_model::sampling::SamplingParams;
use proptest::prelude::*;
use proptest::strategy::ValueTree;
use proptest::test_runner::TestRunner;
use std::time::Duration;
use world::{EPOCH, End, Seen, Setup, World};

#[derive(Debug, Clone)]
enum Op {
    Submit {
        work: Box<Work>,
        delivered: usize,
    },
    Cancel {
        which: usize,
    },
    Replay {
        which: usize,
    },
    Done {
        steps: usize,
    },
    Corrupt {
        which: usize,
    },
    AbortAll,
    /// Messages that must change nothing.
    Noise {
        which: usize,
    },
    Tick,
}

fn any_work() -> impl Strategy<Value = Work> {
    let lengths = prop_oneof![3 => 1..40usize, 1 => Just(12), 1 => Just(24)];
    let prompt = (0..3u32, lengths, prop_oneof![1 => Just(0), 2 => 0..8u32]);
    let ends = (0..14u32, 0..4u32, prop::option::weighted(0.3, 0..fake::VOCAB));
    let flags = (
        prop::option::weighted(0.1, Just(1u32)),
        prop::bool::weighted(0.1),
        prop::bool::weighted(0.15),
    );
    (0..3u8, prompt, ends, flags, 0..3u64).prop_map(|(tenant, prompt, ends, flags, seed)| {
        let (family, length, turn) = prompt;
        // Prompts of a family are equal up to a point, then differ.
        let fork = length.saturating_sub(turn as usize);
        let token = |i: usize| (i as u32 * 3 + family + if i < fork { 0 } else { turn }) % 11;
        let penalty = if flags.1 { 1.5 } else { 1.0 };
        Work {
            request: RequestId(0),
            attempt: Attempt(1),
            tenant: format!("{tenant}"),
            cache_salt: String::new(),
            tokens: (0..length).map(token).collect(),
            prompt_len: length as u32,
            sampling: SamplingParams { repetition_penalty: penalty, seed, ..Default::default() },
            max_tokens: ends.0,
            min_tokens: ends.1,
            stop_tokens: ends.2.into_iter().collect(),
            prompt_logprobs: flags.0,
            suspect: flags.2,
        }
    })
}

fn any_op() -> impl Strategy<Value = Op> {
    let submit = (any_work(), prop_oneof![4 => Just(0), 1 => 0..15usize]);
    prop_oneof![
        6 => submit.prop_map(|(work, delivered)| Op::Submit { work: Box::new(work), delivered }),
        2 => any::<usize>().prop_map(|which| Op::Cancel { which }),
        1 => any::<usize>().prop_map(|which| Op::Replay { which }),
        12 => (1..6usize).prop_map(|steps| Op::Done { steps }),
        1 => any::<usize>().prop_map(|which| Op::Corrupt { which }),
        1 => prop::bool::weighted(0.2).prop_map(|all| if all { Op::AbortAll } else { Op::Tick }),
        1 => any::<usize>().prop_map(|which| Op::Noise { which }),
    ]
}

fn any_setup() -> impl Strategy<Value = Setup> {
    let target = prop::option::of(Just(Duration::from_millis(3)));
    let steps = (1..24usize, 1..7usize, 1..4usize, target, 1..24usize);
    let batching = prop_oneof![3 => Just(Batching::Continuous), 1 => Just(Batching::Static)];
    let rules = (any::<bool>(), 0..4u32, batching);
    let bits = prop_oneof![3 => Just(128u32), 1 => Just(8u32)];
    (2..24u32, 1..7u32, bits, (steps, rules), 20..70u32).prop_map(
        |(blocks, block_tokens, key_bits, (steps, rules), context_tokens)| Setup {
            blocks,
            block_tokens,
            key_bits,
            limits: Limits {
                step_tokens: steps.0,
                chunk_tokens: steps.4,
                prefix_cache: true,
                max_running: steps.1,
                in_flight: steps.2,
                overlap: rules.0,
                step_target: steps.3,
                step_stretch: rules.1,
                batching: rules.2,
                step_deadline: Duration::from_secs(10),
                context_tokens,
            },
        },
    )
}

fn apply(world: &mut World, op: Op) {
    let open = world.open();
    let pick = |which: usize| (!open.is_empty()).then(|| open[which % open.len()]);
    match op {
        Op::Submit { work, delivered } => {
            world.submit(*work, delivered);
        }
        Op::Cancel { which } => pick(which).into_iter().for_each(|id| world.cancel(id)),
        Op::Replay { which } => pick(which).into_iter().for_each(|id| world.replay(id)),
        Op::Done { steps } => repeat(steps, || world.step_done(None)),
        Op::Corrupt { which } => repeat(1, || world.step_done(Some(which))),
        Op::AbortAll => {
            open.iter().for_each(|&id| world.cancel(id));
            while world.step_done(None) {}
            world.input(Input::Tick);
            let load = world.load.clone().unwrap();
            let gauges = (load.running, load.waiting, load.kv_blocks_live);
            assert_eq!((gauges, load.queued_prompt_tokens), ((0, 0, 0), 0));
        }
        Op::Noise { which } => noise(world, which),
        Op::Tick => world.input(Input::Tick),
    }
}

fn repeat(times: usize, mut step: impl FnMut() -> bool) {
    for _ in 0..times {
        if !step() {
            return;
        }
    }
}

/// Late, foreign and repeated messages.
fn noise(world: &mut World, which: usize) {
    let refused = world.scheduler.refused_total();
    let old = ReplicaEpoch(EPOCH.0 - 1);
    let step = world.flying.front().map_or(u64::MAX, |(step, _)| *step);
    let request = RequestId(u64::MAX);
    let done = |epoch, step| Input::StepDone { epoch, step, sampled: vec![], micros: 0 };
    let sent = match which % 4 {
        0 => done(old, step),
        1 => done(EPOCH, 0),
        2 => Input::Cancel { epoch: EPOCH, request, attempt: Attempt(1) },
        _ => Input::StepFailed { epoch: old, step, reason: "late".into() },
    };
    world.input(sent);
    assert_eq!(world.scheduler.refused_total(), refused + 1);
}

fn run(setup: Setup, ops: Vec<Op>) -> World {
    let mut world = World::new(setup);
    for op in ops {
        apply(&mut world, op);
    }
    world.drain();
    assert_eq!(world.broken, None);
    for client in world.clients.values() {
        let fits = fits(&world.setup, client);
        match &client.end {
            Some(End::Failed(FailureCode::NeverFits)) => assert!(!fits),
            Some(End::Failed(code)) => assert_eq!(*code, FailureCode::NotFinite),
            Some(_) => {}
            None => unreachable!("drain checks that all have ended"),
        }
        assert!(fits || client.end != Some(End::Finished(FinishReason::Length)));
    }
    world
}

fn fits(setup: &Setup, client: &world::Client) -> bool {
    let prompt = client.work.prompt_len;
    let whole = (prompt + client.work.max_tokens).min(setup.limits.context_tokens).max(prompt);
    prompt <= setup.limits.context_tokens && whole <= setup.blocks * setup.block_tokens
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..Default::default() })]

    #[test]
    fn outputs_equal_the_sequential_reference(
        setup in any_setup(),
        ops in prop::collection::vec(any_op(), 1..150),
    ) {
        run(setup, ops);
    }
}

/// C39: idle means nothing is reserved, after 10,000 random operations with aborts in every state.
/// That the run meets those states is checked too.
#[test]
fn ten_thousand_operations_leave_nothing_reserved() {
    let mut runner = TestRunner::deterministic();
    let mut seen = Seen::default();
    let mut totals = LoadReport::default();
    for in_flight in 1..=3 {
        let mut setup = any_setup().new_tree(&mut runner).unwrap().current();
        setup = Setup { blocks: 20, block_tokens: 4, ..setup };
        setup.limits = Limits {
            step_tokens: 16,
            max_running: 6,
            in_flight,
            overlap: in_flight != 2,
            context_tokens: 70,
            batching: Batching::Continuous,
            ..setup.limits
        };
        let ops = prop::collection::vec(any_op(), 3400..3401);
        let world = run(setup, ops.new_tree(&mut runner).unwrap().current());
        let load = world.scheduler.load(&world.kv);
        totals.preemptions_total += load.preemptions_total;
        totals.prefix_hits_total += load.prefix_hits_total;
        let s = world.seen;
        seen.copies += s.copies;
        seen.pipelined_chunks += s.pipelined_chunks;
        seen.overlapped += s.overlapped;
        seen.dropped += s.dropped;
        seen.suspects += s.suspects;
        seen.cancelled_in_flight += s.cancelled_in_flight;
        seen.cancelled_waiting += s.cancelled_waiting;
        seen.not_finite += s.not_finite;
        seen.finished += s.finished;
        seen.replays += s.replays;
    }
    let counts = [
        seen.copies,
        seen.pipelined_chunks,
        seen.overlapped,
        seen.dropped,
        seen.suspects,
        seen.cancelled_in_flight,
        seen.cancelled_waiting,
        seen.not_finite,
        seen.replays,
        totals.preemptions_total as usize,
        totals.prefix_hits_total as usize,
    ];
    assert!(counts.iter().all(|&count| count >= 10), "{seen:?} {totals:?}");
    assert!(seen.finished > 500, "{seen:?}");
}
