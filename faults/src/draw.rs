//! Random draws that do not depend on each other: each stream is `hash(seed, name, counter)`.
//!
//! A stream is named after what it decides (`fault/kill/target`, `request/7`), so that adding a
//! fault, a request or a parameter leaves every other draw as it was.

/// One draw, for those who count on their own.
pub fn draw(seed: u64, name: &str, counter: u64) -> u64 {
    let mut hash = blake3::Hasher::new();
    hash.update(&seed.to_le_bytes());
    hash.update(name.as_bytes());
    hash.update(&[0xff]);
    hash.update(&counter.to_le_bytes());
    let mut first = [0; 8];
    hash.finalize_xof().fill(&mut first);
    u64::from_le_bytes(first)
}

/// Log-normal with this median and 99th percentile.
pub fn log_normal(p50: u64, p99: u64, seed: u64, name: &str, counter: u64) -> u64 {
    const Z99: f64 = 2.326_347_874;
    let unit = |salt| (draw(seed, name, salt) >> 11) as f64 / (1u64 << 53) as f64;
    let (a, b) = (unit(counter.wrapping_mul(2)), unit(counter.wrapping_mul(2).wrapping_add(1)));
    // Box and Muller (1958); 1 - a is in (0, 1].
    let normal = (-2.0 * (1.0 - a).ln()).sqrt() * (std::f64::consts::TAU * b).cos();
    let (median, high) = (p50.max(1) as f64, p99.max(p50).max(1) as f64);
    let sigma = (high / median).ln() / Z99;
    // At most a hundred times the percentile: nothing in a plan may stall a run for good.
    (median * (sigma * normal).exp()).min(high * 100.0) as u64
}

/// One stream of draws.
#[derive(Debug, Clone)]
pub struct Draws {
    seed: u64,
    name: String,
    counter: u64,
}

impl Draws {
    pub fn new(seed: u64, name: impl Into<String>) -> Self {
        Self { seed, name: name.into(), counter: 0 }
    }

    /// A stream of its own under this one's name; independent of what was drawn here so far.
    pub fn sub(&self, name: &str) -> Self {
        Self::new(self.seed, format!("{}/{name}", self.name))
    }

    pub fn bits(&mut self) -> u64 {
        let counter = self.counter;
        self.counter += 1;
        draw(self.seed, &self.name, counter)
    }

    /// A number that every format keeps exactly (53 bits).
    pub fn seed(&mut self) -> u64 {
        self.bits() >> 11
    }

    /// Uniform in [0, 1).
    pub fn unit(&mut self) -> f64 {
        (self.bits() >> 11) as f64 / (1u64 << 53) as f64
    }

    pub fn chance(&mut self, p: f64) -> bool {
        self.unit() < p
    }

    /// Uniform in `0..n`; 0 if `n` is 0. (The bias of 2^-64 n does not matter here.)
    pub fn below(&mut self, n: u64) -> u64 {
        ((u128::from(self.bits()) * u128::from(n)) >> 64) as u64
    }

    /// Uniform in the half-open range; `from` if it is empty.
    pub fn range(&mut self, from: u64, to: u64) -> u64 {
        from + self.below(to.saturating_sub(from))
    }

    /// Exponential, with this mean.
    pub fn gap(&mut self, mean: f64) -> f64 {
        -mean * (1.0 - self.unit()).ln()
    }

    pub fn pick<'a, T>(&mut self, items: &'a [T]) -> Option<&'a T> {
        let index = self.below(items.len() as u64);
        items.get(usize::try_from(index).ok()?)
    }

    /// `count` of the items, in their own order; all of them if there are fewer.
    pub fn some<T: Clone>(&mut self, items: &[T], count: usize) -> Vec<T> {
        let mut left = count.min(items.len()) as u64;
        let mut chosen = Vec::new();
        for (index, item) in items.iter().enumerate() {
            let ahead = (items.len() - index) as u64;
            if self.below(ahead) < left {
                chosen.push(item.clone());
                left -= 1;
            }
        }
        chosen
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn the_same_name_draws_the_same_and_another_does_not() {
        let draws = |name: &str| {
            let mut draws = Draws::new(7, name);
            (0..32).map(|_| draws.bits()).collect::<Vec<_>>()
        };
        assert_eq!(draws("fault/a"), draws("fault/a"));
        assert_ne!(draws("fault/a"), draws("fault/b"));
        let mut all = draws("fault/a");
        all.sort_unstable();
        all.dedup();
        assert_eq!(all.len(), 32, "the counter enters the hash");
    }

    #[test]
    fn a_sub_stream_does_not_see_what_was_drawn() {
        let mut used = Draws::new(7, "x");
        used.bits();
        assert_eq!(used.sub("y").bits(), Draws::new(7, "x").sub("y").bits());
    }

    #[test]
    fn log_normal_keeps_median_and_percentile() {
        let mut drawn: Vec<u64> =
            (0..10_000).map(|n| log_normal(1_000, 20_000, 3, "delay", n)).collect();
        drawn.sort_unstable();
        assert!((900..1_100).contains(&drawn[5_000]), "{}", drawn[5_000]);
        assert!((15_000..26_000).contains(&drawn[9_900]), "{}", drawn[9_900]);
    }

    proptest! {
        #[test]
        fn draws_stay_in_range(seed: u64, from in 0u64..1000, len in 1u64..1000) {
            let mut draws = Draws::new(seed, "p");
            let drawn = draws.range(from, from + len);
            prop_assert!((from..from + len).contains(&drawn));
            prop_assert!((0.0..1.0).contains(&draws.unit()));
            prop_assert!(draws.gap(3.0) >= 0.0);
        }

        #[test]
        fn some_draws_so_many_in_order(seed: u64, n in 0usize..20, count in 0usize..25) {
            let items: Vec<usize> = (0..n).collect();
            let chosen = Draws::new(seed, "s").some(&items, count);
            prop_assert_eq!(chosen.len(), count.min(n));
            prop_assert!(chosen.is_sorted_by(|a, b| a < b));
        }
    }

    #[test]
    fn draws_are_even() {
        let mut draws = Draws::new(1, "even");
        let mut counts = [0u32; 10];
        for _ in 0..10_000 {
            counts[draws.below(10) as usize] += 1;
        }
        assert!(counts.iter().all(|count| (850..1150).contains(count)), "{counts:?}");
        let mean: f64 = (0..10_000).map(|_| draws.gap(4.0)).sum::<f64>() / 10_000.0;
        assert!((3.8..4.2).contains(&mean), "{mean}");
    }
}
