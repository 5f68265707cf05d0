//! How a path treats what crosses it. Pure: draws come from a seeded generator that is handed in.
//!
//! One set of rules serves the in-memory network, where they apply to frames, and the UDP shim of
//! real processes, where they apply to datagrams.

use crate::prng::Prng;
use serde::{Deserialize, Serialize};
use std::time::Duration;

/// What happens to what one node sends to another. The default is a perfect path.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Rules {
    /// One way; the median if `delay_p99` is longer.
    pub delay: Duration,
    /// 99th percentile of a log-normal delay with median `delay`.
    pub delay_p99: Duration,
    /// Added to the delay, uniform in [0, jitter).
    pub jitter: Duration,
    /// Chance that a datagram is lost. QUIC sends it again: in memory a lost frame comes later by
    /// the retransmission time, and only a burst that no connection outlives resets the link.
    pub loss: f64,
    /// Chance that the one after a lost one is lost too, if that is more than `loss`.
    pub burst: f64,
    /// In memory: chance that a frame resets its link.
    pub reset: f64,
    /// 0: without limit.
    pub bits_per_second: u64,
    /// Chance that a byte of a datagram is changed. QUIC drops it: in memory the same as `loss`.
    pub corrupt: f64,
}

impl Rules {
    pub(crate) fn draw_delay(&self, rng: &mut Prng) -> Duration {
        let mut delay = self.delay;
        if self.delay_p99 > self.delay && !self.delay.is_zero() {
            /// Of the standard normal distribution.
            const Z99: f64 = 2.326_347_874;
            let spread = (self.delay_p99.as_secs_f64() / self.delay.as_secs_f64()).ln() / Z99;
            // No further than 1 in 10^5: a path has no infinite delay.
            let z = normal(rng).clamp(-4.3, 4.3);
            delay = delay.mul_f64((spread * z).exp());
        }
        match self.jitter.is_zero() {
            true => delay,
            false => delay + self.jitter.mul_f64(rng.unit()),
        }
    }

    /// Whether the next one is lost; `bad` carries a burst from one to the next.
    pub(crate) fn draw_loss(&self, bad: &mut bool, rng: &mut Prng) -> bool {
        let chance = match *bad {
            true => self.burst.max(self.loss),
            false => self.loss,
        };
        *bad = chance > 0.0 && rng.unit() < chance;
        *bad
    }

    /// How long a link is busy with so many bytes.
    pub(crate) fn transmission(&self, bytes: usize) -> Duration {
        match self.bits_per_second {
            0 => Duration::ZERO,
            rate => Duration::from_secs_f64(bytes as f64 * 8.0 / rate as f64),
        }
    }
}

/// Standard normal, by Box and Muller (1958).
fn normal(rng: &mut Prng) -> f64 {
    let radius = (-2.0 * (1.0 - rng.unit()).ln()).sqrt();
    radius * (std::f64::consts::TAU * rng.unit()).cos()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    #[test]
    fn delays_have_the_median_and_tail_that_were_asked_for() {
        let rules = Rules { delay: ms(5), delay_p99: ms(400), ..Rules::default() };
        let mut rng = Prng::new(3);
        let mut delays: Vec<_> = (0..20_000).map(|_| rules.draw_delay(&mut rng)).collect();
        delays.sort();
        let near = |found: Duration, wanted: Duration| {
            let ratio = found.as_secs_f64() / wanted.as_secs_f64();
            assert!((0.85..1.18).contains(&ratio), "{found:?} for {wanted:?}");
        };
        near(delays[10_000], ms(5));
        near(delays[19_800], ms(400));
        let flat = Rules { delay: ms(5), ..Rules::default() };
        assert_eq!(flat.draw_delay(&mut rng), ms(5));
    }

    #[test]
    fn losses_come_as_often_and_in_bursts_as_long_as_was_asked_for() {
        let rules = Rules { loss: 0.01, burst: 0.75, ..Rules::default() };
        let (mut rng, mut bad, mut before) = (Prng::new(5), false, false);
        let (mut lost, mut bursts) = (0, 0);
        for _ in 0..100_000 {
            let now = rules.draw_loss(&mut bad, &mut rng);
            lost += u32::from(now);
            bursts += u32::from(now && !before);
            before = now;
        }
        assert!((800..1200).contains(&bursts), "{bursts} bursts");
        let mean = f64::from(lost) / f64::from(bursts);
        assert!((3.5..4.5).contains(&mean), "bursts of {mean}");
    }
}
