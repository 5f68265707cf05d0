//! What the scheduler measures: how fast steps go, and what they add up to.

use std::time::Duration;

/// Weight of what was measured before; a step's own share is the rest.
const KEEP: f64 = 0.95;

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

/// Step times, so far as planning needs them.
#[derive(Debug, Default)]
pub struct Pace {
    tokens: f64,
    seconds: f64,
    last_done: Duration,
    /// Mean micros of a step that only decodes.
    decode_micros: f64,
    /// Mean micros per token of a prompt chunk, beyond that.
    prefill_micros: f64,
}

impl Pace {
    pub fn step_done(&mut self, now: Duration, planned: Duration, prefill: usize, decode: usize) {
        // With several steps in flight, only the time since the last one is this one's.
        let took = now.saturating_sub(planned.max(self.last_done)).as_secs_f64();
        self.last_done = now;
        self.tokens = self.tokens * KEEP + (prefill + decode) as f64;
        self.seconds = self.seconds * KEEP + took;
        let micros = took * 1e6;
        let mean =
            |old: f64, new: f64| if old == 0.0 { new } else { old * KEEP + new * (1.0 - KEEP) };
        if prefill == 0 {
            self.decode_micros = mean(self.decode_micros, micros);
        } else {
            let own = (micros - self.decode_micros).max(0.0) / prefill as f64;
            self.prefill_micros = mean(self.prefill_micros, own);
        }
    }

    /// Tokens computed per second of work, prompts included; 0 while unknown.
    pub fn tokens_per_second(&self) -> f64 {
        if self.seconds > 0.0 { self.tokens / self.seconds } else { 0.0 }
    }

    /// Prompt tokens that fit a decoding step of this length; `None` while unknown.
    pub fn prefill_within(&self, target: Duration) -> Option<usize> {
        if self.prefill_micros <= 0.0 {
            return None;
        }
        let left = target.as_secs_f64() * 1e6 - self.decode_micros;
        Some((left.max(0.0) / self.prefill_micros) as usize)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_are_sized_by_what_steps_took() {
        let mut pace = Pace::default();
        assert_eq!(pace.prefill_within(Duration::from_millis(50)), None);
        let mut now = Duration::ZERO;
        let mut step = |prefill, decode, millis| {
            let planned = now;
            now += Duration::from_millis(millis);
            pace.step_done(now, planned, prefill, decode);
        };
        (0..50).for_each(|_| step(0, 4, 10));
        (0..50).for_each(|_| step(100, 4, 110));
        let fits = pace.prefill_within(Duration::from_millis(50)).unwrap();
        assert!((39..=41).contains(&fits), "{fits}");
        let rate = pace.tokens_per_second();
        assert!((850.0..960.0).contains(&rate), "{rate}");
    }
}
