//! A long prompt among running streams: how much longer their gaps are while it is computed.
//!
//! Undisturbed are the gaps between the last stream's first token and the moment the prompt was
//! sent; disturbed those that end between that moment and the prompt's own first token.

use super::plan::{self, Lengths, Options, Planned};
use super::stats::{Sample, Spread, spread};
use anyhow::{Context, Result, ensure};
use std::fmt;
use std::str::FromStr;
use std::time::Duration;

/// `TOKENS@SECONDS`
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Intruder {
    tokens: u32,
    pub after: Duration,
}

impl FromStr for Intruder {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let bad = || format!("{text:?} is no prompt and time: use TOKENS@SECONDS, like 4000@5");
        let (tokens, seconds) = text.split_once('@').ok_or_else(bad)?;
        let tokens = tokens.parse().ok().filter(|n| *n > 0).ok_or_else(bad)?;
        let seconds: f64 = seconds.trim_end_matches('s').parse().map_err(|_| bad())?;
        let after = Duration::try_from_secs_f64(seconds).map_err(|_| bad())?;
        Ok(Self { tokens, after })
    }
}

impl Intruder {
    /// The prompt is like the others', and one token is drawn.
    pub fn request(self, options: &Options) -> Planned {
        let one = Options {
            requests: 1,
            prompt: Lengths::Fixed(self.tokens),
            output: Lengths::Fixed(1),
            shared_prefix: 0.0,
            disconnect: 0.0,
            seed: !options.seed.rotate_left(7),
            ..options.clone()
        };
        plan::plan(&one).remove(0)
    }
}

/// Both spreads of gaps, and the prompt's own time.
#[derive(Debug, Clone, PartialEq)]
pub struct Judged {
    before: Spread,
    during: Spread,
    prompt: (u64, f64),
}

/// # Errors
/// The prompt failed, or came where there were no gaps to compare.
pub fn judge(streams: &[Sample], intruder: &Sample) -> Result<Judged> {
    let ttft = intruder
        .ttft
        .with_context(|| format!("the intruding prompt got no token ({:?})", intruder.outcome))?;
    let (sent, done) = (intruder.sent, intruder.sent + ttft);
    let all = || streams.iter().flat_map(|s| s.gaps.iter().zip(&s.ends));
    let first_tokens = streams.iter().filter(|s| s.sent < sent);
    let steady = first_tokens.filter_map(|s| Some(s.sent + s.ttft?)).fold(0.0, f64::max);
    let before = |&(gap, end): &(&f64, &f64)| end - gap >= steady && *end <= sent;
    let during = |&(_, end): &(&f64, &f64)| *end > sent && *end <= done;
    let before = spread(all().filter(before).map(|(gap, _)| *gap));
    let during = spread(all().filter(during).map(|(gap, _)| *gap));
    ensure!(before.count > 0, "no gap before the prompt: let it come later (--intrude ...@S)");
    ensure!(
        during.count > 0,
        "no gap beside the prompt: let it come earlier, or outputs be longer"
    );
    Ok(Judged { before, during, prompt: (intruder.prompt_tokens, ttft) })
}

impl fmt::Display for Judged {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (tokens, seconds) = self.prompt;
        let of = |s: &Spread| format!("{:.2} / {:.2} ms over {} gaps", s.p50, s.p99, s.count);
        writeln!(f, "intruder     {tokens} prompt tokens, the first token after {seconds:.2} s")?;
        writeln!(f, "ITL p50/p99  undisturbed {}", of(&self.before))?;
        writeln!(f, "             beside it   {}", of(&self.during))?;
        let ratio = |a: f64, b: f64| if b > 0.0 { a / b } else { f64::INFINITY };
        let (p50, p99) =
            (ratio(self.during.p50, self.before.p50), ratio(self.during.p99, self.before.p99));
        write!(f, "             ratio       {p50:.2} / {p99:.2}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn intruders_are_read_or_refused() {
        let want = Intruder { tokens: 4000, after: Duration::from_millis(2500) };
        assert_eq!("4000@2.5".parse(), Ok(want));
        assert_eq!("4000@2.5s".parse(), Ok(want));
        for bad in ["4000", "@5", "0@5", "4000@-1", "4000@x", "4000@1e30"] {
            assert!(bad.parse::<Intruder>().is_err(), "{bad}");
        }
    }

    #[test]
    fn gaps_are_told_apart_by_when_they_ended() {
        let stream = |ttft: f64, gaps: &[f64]| {
            let ends = gaps.iter().scan(ttft, |at, gap| {
                *at += gap;
                Some(*at)
            });
            let ends = ends.collect();
            Sample { ttft: Some(ttft), gaps: gaps.to_vec(), ends, ..Sample::default() }
        };
        // The first stream is disturbed by the second one's prompt, until 0.5.
        let streams = [stream(0.1, &[0.4, 0.1, 0.1, 0.3, 0.3, 0.1]), stream(0.5, &[0.1, 0.1])];
        let intruder = Sample { sent: 0.75, ttft: Some(0.6), ..Sample::default() };
        let judged = judge(&streams, &intruder).unwrap();
        assert_eq!((judged.before.count, judged.during.count), (4, 2));
        assert!(
            (judged.before.max - 100.0).abs() < 1e-6 && (judged.during.p50 - 300.0).abs() < 1e-6
        );
        let early = Sample { sent: 0.2, ttft: Some(0.1), ..Sample::default() };
        assert!(judge(&streams, &early).is_err());
        assert!(judge(&streams, &Sample::default()).is_err());
    }
}
