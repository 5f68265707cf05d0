//! What the scheduler measures: how fast steps go, and what they add up to.

use std::time::Duration;

/// Weight of what was measured before; a step's own share is the rest.
const KEEP: f64 = 0.95;
/// Weight of a step's own share in the means that chunks are sized by: these follow a prompt whose
/// tokens cost more the further it gets.
const PACE_SHARE: f64 = 0.2;

#[derive(Debug, Default)]
pub struct Totals {
    pub preemptions: u64,
    pub steps: u64,
    pub prompt_tokens: u64,
    pub drawn_tokens: u64,
    pub prefix_queries: u64,
    pub prefix_hits: u64,
    /// Late, duplicate or foreign messages that were refused.
    pub refused: u64,
}

/// Binary logarithms of how many sequences a step has.
const SIZE_CLASSES: usize = 32;
/// After so many steps a class is measured anew, if none of them was of decoding alone.
const MEASURED_FOR: u64 = 64;

/// Step times, so far as planning needs them.
///
/// A step that mixes decoding and prompts does not tell what either took: the one is measured in
/// steps without prompts, the other is what is left. So while prompts wait without end, a step of
/// decoding alone is due now and then ([`Pace::measure_now`]), and at once where so many sequences
/// have never decoded alone: else chunks would be sized by what some smaller batch took, be as small
/// as they can be, and let the waiting prompts in at that pace for ever.
#[derive(Debug, Default)]
pub struct Pace {
    tokens: f64,
    seconds: f64,
    last_done: Duration,
    steps: u64,
    /// Steps that only decode, by the binary logarithm of how many sequences.
    decode: [Option<Decoding>; SIZE_CLASSES],
    /// When a class was last measured, or was to be: number of steps done by then.
    measured: [Option<u64>; SIZE_CLASSES],
    /// What prompt chunks took beyond decoding: tokens and micros, recent ones weighing most.
    prefill: (f64, f64),
}

/// Means over recent steps that only decode.
#[derive(Debug, Clone, Copy)]
struct Decoding {
    sequences: f64,
    micros: f64,
}

impl Pace {
    /// Returns how long the step took: since it was planned, or since the step before was done
    /// where that was later.
    pub fn step_done(
        &mut self,
        now: Duration,
        planned: Duration,
        prefill: usize,
        decode: usize,
    ) -> Duration {
        let took = now.saturating_sub(self.begun(planned));
        self.last_done = now;
        self.steps += 1;
        self.tokens = self.tokens * KEEP + (prefill + decode) as f64;
        self.seconds = self.seconds * KEEP + took.as_secs_f64();
        let micros = took.as_secs_f64() * 1e6;
        if prefill == 0 {
            let class = size_class(decode);
            let new = Decoding { sequences: decode as f64, micros };
            let old = self.decode[class].unwrap_or(new);
            let mean = |old: f64, new: f64| old + (new - old) * PACE_SHARE;
            self.decode[class] = Some(Decoding {
                sequences: mean(old.sequences, new.sequences),
                micros: mean(old.micros, new.micros),
            });
            self.measured[class] = Some(self.steps);
        } else {
            // A step of prompts alone reads all weights once as well.
            let beside = self.decoding(decode.max(1)).map_or(0.0, |took| took.as_secs_f64() * 1e6);
            let (tokens, own) = self.prefill;
            let keep = 1.0 - PACE_SHARE;
            self.prefill =
                (tokens * keep + prefill as f64, own * keep + (micros - beside).max(0.0));
        }
        took
    }

    /// With several steps in flight, only the time since the last one is a step's own.
    pub fn begun(&self, planned: Duration) -> Duration {
        planned.max(self.last_done)
    }

    /// Tokens computed per second of work, prompts included; 0 while unknown.
    pub fn tokens_per_second(&self) -> f64 {
        if self.seconds > 0.0 { self.tokens / self.seconds } else { 0.0 }
    }

    /// Whether the next step should only decode so many sequences, so that it tells what that takes.
    /// Not said again before [`MEASURED_FOR`] more steps are done.
    pub fn measure_now(&mut self, sequences: usize) -> bool {
        let (steps, measured) = (self.steps, &mut self.measured[size_class(sequences)]);
        let due = measured.is_none_or(|at| steps.saturating_sub(at) >= MEASURED_FOR);
        if due {
            *measured = Some(steps);
        }
        due
    }

    /// What a step takes that only decodes so many sequences: as the nearest number of them that was
    /// seen, where each one more takes what a prompt token takes, but no more than each of those.
    pub fn decoding(&self, sequences: usize) -> Option<Duration> {
        let class = size_class(sequences);
        let (below, above) = self.decode.split_at(class);
        let (own, above) = above.split_first()?;
        let mut nearest =
            own.iter().chain(below.iter().rev().flatten()).chain(above.iter().flatten());
        let seen = nearest.next()?;
        let (tokens, micros) = self.prefill;
        let each = if tokens > 0.0 { micros / tokens } else { 0.0 };
        let sequences = sequences.max(1) as f64;
        let grown = seen.micros + each * (sequences - seen.sequences);
        let in_proportion = seen.micros * sequences / seen.sequences.max(1.0);
        let micros = match sequences > seen.sequences {
            true => grown.min(in_proportion),
            false => grown.max(in_proportion),
        };
        Some(Duration::from_secs_f64(micros / 1e6))
    }

    /// Prompt tokens that fit a step of this length beside so many decoding sequences; `None`
    /// while unknown.
    pub fn prefill_within(&self, target: Duration, decoding: usize) -> Option<usize> {
        let (tokens, micros) = self.prefill;
        if tokens <= 0.0 {
            return None;
        }
        let left = target.saturating_sub(self.decoding(decoding).unwrap_or_default());
        // `as` saturates where prompts seemed to cost nothing.
        Some((left.as_secs_f64() * 1e6 * tokens / micros.max(1.0)) as usize)
    }
}

fn size_class(sequences: usize) -> usize {
    (sequences.max(1).ilog2() as usize).min(SIZE_CLASSES - 1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn chunks_are_sized_by_what_steps_took() {
        let mut pace = Pace::default();
        assert_eq!(pace.prefill_within(Duration::from_millis(50), 4), None);
        let mut now = Duration::ZERO;
        let mut step = |prefill, decode, millis| {
            let planned = now;
            now += Duration::from_millis(millis);
            pace.step_done(now, planned, prefill, decode);
        };
        (0..50).for_each(|_| step(0, 4, 10));
        (0..50).for_each(|_| step(100, 4, 110));
        let fits = pace.prefill_within(Duration::from_millis(50), 4).unwrap();
        assert!((39..=41).contains(&fits), "{fits}");
        let rate = pace.tokens_per_second();
        assert!((850.0..960.0).contains(&rate), "{rate}");
    }

    proptest! {
        /// On a machine whose steps take so long and so much for each row, decoding is foretold
        /// from what smaller or larger batches took, and chunks fill the time that they are given.
        #[test]
        fn unseen_batches_are_foretold_by_rows(
            (fixed, row) in (1_000u32..20_000, 10u32..2_000),
            seen in 1usize..40,
            asked in 1usize..64,
            chunk in 64usize..512,
        ) {
            let micros = |rows: usize| f64::from(fixed) + f64::from(row) * rows as f64;
            let mut pace = Pace::default();
            let mut now = Duration::ZERO;
            let mut step = |prefill: usize, decode: usize| {
                let planned = now;
                now += Duration::from_secs_f64(micros(prefill + decode) / 1e6);
                pace.step_done(now, planned, prefill, decode);
            };
            (0..40).for_each(|_| step(0, seen));
            (0..40).for_each(|_| step(chunk, seen));
            let foretold = pace.decoding(asked).unwrap().as_secs_f64() * 1e6;
            let off = (foretold / micros(asked) - 1.0).abs();
            prop_assert!(off < 0.02, "{foretold} for {}", micros(asked));
            let target = Duration::from_secs_f64(3.0 * micros(asked) / 1e6);
            let fits = pace.prefill_within(target, asked).unwrap();
            let took = micros(asked + fits) / 1e6 / target.as_secs_f64();
            prop_assert!((0.9..1.02).contains(&took) || fits < 8, "{fits}: {took}");
        }
    }

    #[test]
    fn a_class_is_measured_at_first_and_then_now_and_again() {
        let mut pace = Pace::default();
        let mut due = Vec::new();
        for at in 0..200u64 {
            if pace.measure_now(20) {
                due.push(at);
            }
            assert_eq!(pace.measure_now(9), at % 64 == 0, "other sizes have their own times");
            pace.step_done(Duration::from_millis(at), Duration::ZERO, 8, 20);
        }
        assert_eq!(due, [0, 64, 128, 192]);
        pace.step_done(Duration::from_secs(1), Duration::ZERO, 0, 17);
        assert!((0..60).all(|_| !pace.measure_now(31)));
    }
}
