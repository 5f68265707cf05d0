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

/// Step times, so far as planning needs them.
#[derive(Debug, Default)]
pub struct Pace {
    tokens: f64,
    seconds: f64,
    last_done: Duration,
    /// Mean micros of a step that only decodes, by the binary logarithm of how many sequences;
    /// 0 while unknown.
    decode_micros: [f64; SIZE_CLASSES],
    /// What prompt chunks took beyond that: tokens and micros, recent ones weighing most.
    prefill: (f64, f64),
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
        self.tokens = self.tokens * KEEP + (prefill + decode) as f64;
        self.seconds = self.seconds * KEEP + took.as_secs_f64();
        let micros = took.as_secs_f64() * 1e6;
        let mean =
            |old: f64, new: f64| if old == 0.0 { new } else { old + (new - old) * PACE_SHARE };
        if prefill == 0 {
            let decode_micros = &mut self.decode_micros[size_class(decode)];
            *decode_micros = mean(*decode_micros, micros);
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

    /// What a step takes that only decodes so many sequences, or the nearest number that was seen.
    pub fn decoding(&self, sequences: usize) -> Option<Duration> {
        let class = size_class(sequences);
        let (below, above) = self.decode_micros.split_at(class);
        let mut nearest = above.iter().chain(below.iter().rev());
        let micros = nearest.find(|micros| **micros > 0.0)?;
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
}
