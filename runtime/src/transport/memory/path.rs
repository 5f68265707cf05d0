//! One direction between two nodes: when what is sent arrives, and what was done to it. Pure:
//! times come in, draws come from a generator of the path's own, so that a rule on one path
//! changes no draw on another.

use crate::address::NodeName;
use crate::prng::{Prng, fnv};
use crate::transport::LaneClass;
use crate::transport::rules::Rules;
use std::collections::BTreeSet;
use std::time::Duration;
use tokio::time::Instant;

/// A connection that gets nothing through for so long is closed by its idle timeout.
const OUTLIVES: Duration = Duration::from_millis(1000);
/// What QUIC waits for an acknowledgement beyond the round trip (RFC 9002, 6.2.1).
const ACK_DELAY: Duration = Duration::from_millis(25);
/// Bytes of a frame on the wire that are not frame.
const OVERHEAD: usize = 48;

/// From, to.
pub(super) type Pair = (NodeName, NodeName);

/// What one direction has seen. Each counts frames unless it says otherwise.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Counters {
    pub frames: u64,
    pub bytes: u64,
    /// Came later by a rule's delay or jitter.
    pub delayed: u64,
    /// Losses drawn; one frame can be lost several times.
    pub lost: u64,
    /// Links reset by a rule.
    pub reset: u64,
    /// Waited for bandwidth.
    pub throttled: u64,
    /// Held by a cut, and dials that waited for its end.
    pub cut: u64,
    pub clogged: u64,
    /// Held because one of the two nodes is paused.
    pub paused: u64,
    /// Sent into a half-open link or to a crashed node: never arrived.
    pub dropped: u64,
    /// Links whose state at one end vanished.
    pub half_opened: u64,
    /// Links that went on under another address of the sender.
    pub rebound: u64,
}

pub(super) struct Path {
    pub rules: Option<Rules>,
    pub counters: Counters,
    rng: Prng,
    /// In a burst of losses.
    bad: bool,
    /// When the link has sent everything of this class and the classes before it.
    free: [Option<Instant>; CLASSES.len()],
}

const CLASSES: [LaneClass; 5] = [
    LaneClass::Heartbeat,
    LaneClass::Mail,
    LaneClass::Activations,
    LaneClass::Kv,
    LaneClass::Weights,
];

/// The link does not outlive what happened to a frame.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Broken;

impl Path {
    pub fn new(seed: u64, pair: &Pair) -> Self {
        let rng = Prng::new(seed ^ fnv(&[pair.0.as_str(), pair.1.as_str()]));
        let counters = Counters::default();
        Self { rules: None, counters, rng, bad: false, free: [None; CLASSES.len()] }
    }

    /// When a frame of `class` that is sent now arrives.
    pub fn arrival(
        &mut self,
        now: Instant,
        class: LaneClass,
        bytes: usize,
        rules: &Rules,
    ) -> Result<Instant, Broken> {
        self.counters.frames += 1;
        self.counters.bytes += bytes as u64;
        if rules.reset > 0.0 && self.rng.unit() < rules.reset {
            self.counters.reset += 1;
            return Err(Broken);
        }
        let sent = self.transmit(now, class, bytes, rules);
        let delay = rules.draw_delay(&mut self.rng);
        self.counters.delayed += u64::from(!delay.is_zero());
        let again = self.retransmission(rules)?;
        Ok(sent + delay + again)
    }

    /// Bandwidth. What goes first by its class waits only for its like and its betters.
    fn transmit(&mut self, now: Instant, class: LaneClass, bytes: usize, rules: &Rules) -> Instant {
        let busy = rules.transmission(bytes + OVERHEAD);
        if busy.is_zero() {
            return now;
        }
        let rank = CLASSES.iter().position(|c| *c == class).unwrap_or(0);
        let start = self.free[rank].map_or(now, |free| free.max(now));
        self.counters.throttled += u64::from(start > now);
        for free in &mut self.free[rank..] {
            *free = Some(free.map_or(start, |free| free.max(start)) + busy);
        }
        start + busy
    }

    /// Extra time until a try gets through; waits double, as QUIC's do.
    fn retransmission(&mut self, rules: &Rules) -> Result<Duration, Broken> {
        let rules = &Rules { loss: rules.loss + rules.corrupt, ..*rules };
        let mut wait = rules.delay * 2 + ACK_DELAY;
        let mut extra = Duration::ZERO;
        while rules.draw_loss(&mut self.bad, &mut self.rng) {
            self.counters.lost += 1;
            extra += wait;
            wait *= 2;
            if extra > OUTLIVES {
                self.counters.reset += 1;
                return Err(Broken);
            }
        }
        Ok(extra)
    }
}

/// What is held at the moment.
#[derive(Debug, Clone, Default)]
pub(super) struct Gates {
    pub cut: BTreeSet<Pair>,
    pub clogged: BTreeSet<Pair>,
    pub paused: BTreeSet<NodeName>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Hold {
    Cut,
    Clog,
    Pause,
}

impl Gates {
    pub fn hold(&self, pair: &Pair) -> Option<Hold> {
        if self.cut.contains(pair) {
            return Some(Hold::Cut);
        }
        if self.clogged.contains(pair) {
            return Some(Hold::Clog);
        }
        let paused = self.paused.contains(&pair.0) || self.paused.contains(&pair.1);
        paused.then_some(Hold::Pause)
    }
}

impl Counters {
    pub(super) fn held(&mut self, hold: Hold) {
        match hold {
            Hold::Cut => self.cut += 1,
            Hold::Clog => self.clogged += 1,
            Hold::Pause => self.paused += 1,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn path() -> Path {
        let name = |name| NodeName::new(name).unwrap();
        Path::new(1, &(name("a"), name("b")))
    }

    #[test]
    fn what_goes_first_overtakes_bulk_on_a_slow_link() {
        let now = Instant::now();
        let rules = Rules { bits_per_second: 8_000_000, ..Rules::default() };
        let mut path = path();
        let ms = |at: Instant| (at - now).as_millis();
        let bulk = 1_000_000 - OVERHEAD;
        assert_eq!(ms(path.arrival(now, LaneClass::Kv, bulk, &rules).unwrap()), 1000);
        assert_eq!(ms(path.arrival(now, LaneClass::Kv, bulk, &rules).unwrap()), 2000);
        assert!(ms(path.arrival(now, LaneClass::Mail, 152, &rules).unwrap()) < 2);
        assert!(ms(path.arrival(now, LaneClass::Heartbeat, 152, &rules).unwrap()) < 2);
        assert_eq!(ms(path.arrival(now, LaneClass::Weights, bulk, &rules).unwrap()), 3000);
        assert_eq!(path.counters.throttled, 2);
    }

    #[test]
    fn a_loss_costs_time_and_only_a_long_burst_the_link() {
        let now = Instant::now();
        let mut path = path();
        let some = Rules { loss: 0.1, ..Rules::default() };
        let late =
            (0..1000).filter(|_| path.arrival(now, LaneClass::Mail, 10, &some).unwrap() > now);
        let late = late.count();
        assert!((60..150).contains(&late), "{late} late");
        assert_eq!(path.counters.reset, 0);
        let all = Rules { loss: 1.0, ..Rules::default() };
        assert_eq!(path.arrival(now, LaneClass::Mail, 10, &all), Err(Broken));
        assert_eq!(path.counters.reset, 1);
    }
}
