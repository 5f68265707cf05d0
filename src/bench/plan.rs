//! What a load test sends: every request of a run, drawn from one seed before it starts.
//!
//! Pure: the same options and seed give the same requests at the same times.

use std::str::FromStr;

/// A distribution of lengths, in tokens, always at least 1.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Lengths {
    Fixed(u32),
    /// Both ends included.
    Uniform(u32, u32),
    /// `exp(N(ln median, sigma))`, cut at `max`.
    LogNormal {
        median: f64,
        sigma: f64,
        max: u32,
    },
}

impl FromStr for Lengths {
    type Err = String;

    /// `128`, `uniform:16..512`, `lognormal:MEDIAN,SIGMA,MAX`.
    fn from_str(text: &str) -> Result<Self, String> {
        let bad = || {
            format!("{text:?} is no length: use N, uniform:LOW..HIGH or lognormal:MEDIAN,SIGMA,MAX")
        };
        let lengths = if let Some(range) = text.strip_prefix("uniform:") {
            let (low, high) = range.split_once("..").ok_or_else(bad)?;
            Self::Uniform(low.parse().map_err(|_| bad())?, high.parse().map_err(|_| bad())?)
        } else if let Some(parts) = text.strip_prefix("lognormal:") {
            let parts: Vec<&str> = parts.split(',').collect();
            let [median, sigma, max] = parts[..] else { return Err(bad()) };
            Self::LogNormal {
                median: median.parse().map_err(|_| bad())?,
                sigma: sigma.parse().map_err(|_| bad())?,
                max: max.parse().map_err(|_| bad())?,
            }
        } else {
            Self::Fixed(text.parse().map_err(|_| bad())?)
        };
        let sound = match lengths {
            Self::Fixed(n) => n >= 1,
            Self::Uniform(low, high) => low >= 1 && low <= high,
            Self::LogNormal { median, sigma, max } => {
                median >= 1.0 && median.is_finite() && (0.0..10.0).contains(&sigma) && max >= 1
            }
        };
        if sound { Ok(lengths) } else { Err(bad()) }
    }
}

impl Lengths {
    fn draw(self, random: &mut Random) -> u32 {
        match self {
            Self::Fixed(n) => n,
            Self::Uniform(low, high) => {
                let span = u64::from(high - low) + 1;
                // Below `span`, hence within u32.
                low + random.below(span) as u32
            }
            Self::LogNormal { median, sigma, max } => {
                let length = (median.ln() + sigma * random.normal()).exp();
                // `as` saturates; the clamp follows.
                (length.round() as u32).clamp(1, max)
            }
        }
    }
}

/// When requests are sent.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Arrivals {
    /// This many at any time, each following the end of another.
    Closed { concurrency: usize },
    /// A Poisson process, whatever the server does.
    Poisson { per_second: f64 },
    /// This many at once, the next so many when all have ended; each computes as many tokens as
    /// the longest of its batch. So spends its time a server that batches whole requests (Yu et
    /// al. 2022, "Orca", section 3): rows that are done are computed on as padding.
    Batches { size: usize },
}

#[derive(Debug, Clone, PartialEq)]
pub struct Options {
    pub requests: usize,
    pub arrivals: Arrivals,
    pub prompt: Lengths,
    pub output: Lengths,
    /// Share of requests whose prompt begins with a prefix that others have too.
    pub shared_prefix: f64,
    pub prefix_tokens: u32,
    pub prefix_groups: u32,
    /// Share of requests whose client hangs up before the end.
    pub disconnect: f64,
    /// Token ids to draw prompts from: low (included) to high (excluded).
    pub ids: (u32, u32),
    pub seed: u64,
}

/// One request of a run.
#[derive(Debug, Clone, PartialEq)]
pub struct Planned {
    /// Seconds after the start of the run; 0 in a closed loop.
    pub due: f64,
    pub prompt: Vec<u32>,
    pub output_tokens: u32,
    /// How many the server is asked for: more than `output_tokens` only in padded batches.
    pub computed_tokens: u32,
    /// Hang up after this many chunks; 0: before the first.
    pub hang_up_after: Option<u32>,
}

/// Draws a whole run.
pub fn plan(options: &Options) -> Vec<Planned> {
    let mut random = Random(options.seed);
    let prefixes: Vec<Vec<u32>> = (0..options.prefix_groups.max(1))
        .map(|_| ids(&mut random, options.prefix_tokens, options.ids))
        .collect();
    let mut due = 0.0;
    let mut plan: Vec<Planned> = (0..options.requests)
        .map(|_| {
            // Every request draws the same number of decisions, so that changing one share does
            // not reshuffle the rest.
            let [gap, share, group, hang_up, hang_up_at] = [(); 5].map(|()| random.unit());
            if let Arrivals::Poisson { per_second } = options.arrivals {
                due -= (1.0 - gap).ln() / per_second;
            }
            let length = options.prompt.draw(&mut random);
            let output_tokens = options.output.draw(&mut random);
            let mut tail = Random(random.next());
            let prefix = &prefixes[(group * prefixes.len() as f64) as usize % prefixes.len()];
            let mut prompt = Vec::new();
            if share < options.shared_prefix {
                // At least one token is the request's own.
                let shared = (length as usize - 1).min(prefix.len());
                prompt.extend_from_slice(&prefix[..shared]);
            }
            let rest = length.saturating_sub(u32::try_from(prompt.len()).unwrap_or(u32::MAX));
            prompt.extend(ids(&mut tail, rest, options.ids));
            let hang_up_after = (hang_up < options.disconnect)
                .then_some((hang_up_at * f64::from(output_tokens)) as u32);
            Planned { due, prompt, output_tokens, computed_tokens: output_tokens, hang_up_after }
        })
        .collect();
    if let Arrivals::Batches { size } = options.arrivals {
        for batch in plan.chunks_mut(size.max(1)) {
            let longest = batch.iter().map(|request| request.output_tokens).max().unwrap_or(0);
            batch.iter_mut().for_each(|request| request.computed_tokens = longest);
        }
    }
    plan
}

fn ids(random: &mut Random, count: u32, (low, high): (u32, u32)) -> Vec<u32> {
    let span = u64::from(high.saturating_sub(low)).max(1);
    (0..count).map(|_| low.saturating_add(random.below(span) as u32)).collect()
}

/// splitmix64 (Steele, Lea, Flood 2014).
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// In `0..1`.
    fn unit(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1u64 << 53) as f64
    }

    fn below(&mut self, span: u64) -> u64 {
        // Multiply-shift; the bias is below span / 2^64.
        ((u128::from(self.next()) * u128::from(span)) >> 64) as u64
    }

    /// Box-Muller.
    fn normal(&mut self) -> f64 {
        let radius = (-2.0 * (1.0 - self.unit()).ln()).sqrt();
        radius * (std::f64::consts::TAU * self.unit()).cos()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn options() -> Options {
        Options {
            requests: 4000,
            arrivals: Arrivals::Poisson { per_second: 20.0 },
            prompt: Lengths::Uniform(8, 64),
            output: Lengths::LogNormal { median: 32.0, sigma: 0.5, max: 400 },
            shared_prefix: 0.3,
            prefix_tokens: 16,
            prefix_groups: 2,
            disconnect: 0.05,
            ids: (100, 200),
            seed: 7,
        }
    }

    #[test]
    fn lengths_are_read_or_refused() {
        assert_eq!("128".parse(), Ok(Lengths::Fixed(128)));
        assert_eq!("uniform:1..9".parse(), Ok(Lengths::Uniform(1, 9)));
        let want = Lengths::LogNormal { median: 90.0, sigma: 0.6, max: 500 };
        assert_eq!("lognormal:90,0.6,500".parse(), Ok(want));
        for bad in ["0", "-1", "", "uniform:9..1", "uniform:3", "lognormal:9,1", "normal:3"] {
            assert!(bad.parse::<Lengths>().is_err(), "{bad}");
        }
    }

    #[test]
    fn a_plan_follows_its_options_and_its_seed() {
        let all = plan(&options());
        assert_eq!(all, plan(&options()), "one seed, one plan");
        assert_ne!(all, plan(&Options { seed: 8, ..options() }));
        let share = |count: usize| count as f64 / all.len() as f64;
        let rate = all.len() as f64 / all.last().expect("some").due;
        assert!((rate - 20.0).abs() < 1.5, "{rate} a second");
        assert!(all.windows(2).all(|pair| pair[0].due <= pair[1].due));
        assert!(all.iter().all(|p| (8..=64).contains(&p.prompt.len())));
        assert!(all.iter().flat_map(|p| &p.prompt).all(|id| (100..200).contains(id)));
        let mut outputs: Vec<u32> = all.iter().map(|p| p.output_tokens).collect();
        outputs.sort_unstable();
        assert!((30..=34).contains(&outputs[2000]), "median {}", outputs[2000]);
        let hang_ups = share(all.iter().filter(|p| p.hang_up_after.is_some()).count());
        assert!((hang_ups - 0.05).abs() < 0.015, "{hang_ups}");
        let within = |p: &Planned| p.hang_up_after.is_none_or(|at| at < p.output_tokens);
        assert!(all.iter().all(within));
        // Seven ids of a hundred agree by chance almost never.
        let mut heads: Vec<&[u32]> = all.iter().map(|p| &p.prompt[..7]).collect();
        heads.sort_unstable();
        let alike = heads.iter().filter(|h| heads.iter().filter(|o| o == h).count() > 1).count();
        assert!((share(alike) - 0.3).abs() < 0.04, "{}", share(alike));
    }

    #[test]
    fn a_share_does_not_reshuffle_the_rest() {
        let (with, without) = (plan(&options()), plan(&Options { disconnect: 0.0, ..options() }));
        assert!(with.iter().zip(&without).all(|(a, b)| a.prompt == b.prompt && a.due == b.due));
    }
}
