//! Leases: how a node knows that the head may still count on it. Pure: times come in.
//!
//! The head answers every heartbeat with a lease. The holder counts it from the moment it *sent*
//! the heartbeat, the head from the moment it answered, which is later: so the holder always
//! falls silent before the head may act on its absence. Correctness across nodes rests on epochs;
//! leases bound how long a cut-off node goes on.

use std::collections::VecDeque;

/// Heartbeats that may wait for an answer; older ones are forgotten.
const MAX_UNANSWERED: usize = 64;

#[derive(Debug, Default)]
pub(crate) struct LeaseHolder {
    sent: VecDeque<(u64, u64)>,
    until_ms: u64,
}

impl LeaseHolder {
    pub fn sent(&mut self, seq: u64, now_ms: u64) {
        if self.sent.len() == MAX_UNANSWERED {
            self.sent.pop_front();
        }
        self.sent.push_back((seq, now_ms));
    }

    /// An answer came. Returns the round trip, if the heartbeat is one of ours not answered yet.
    pub fn answered(&mut self, seq: u64, lease_ms: u64, now_ms: u64) -> Option<u64> {
        let at = self.sent.iter().position(|(s, _)| *s == seq)?;
        let (_, sent_ms) = self.sent.drain(..=at).next_back()?;
        if lease_ms > 0 {
            self.until_ms = self.until_ms.max(sent_ms.saturating_add(lease_ms));
        }
        Some(now_ms.saturating_sub(sent_ms))
    }

    /// A new link: heartbeats of the old one will not be answered. The lease itself stays.
    pub fn new_link(&mut self) {
        self.sent.clear();
    }

    pub fn until_ms(&self) -> u64 {
        self.until_ms
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_lease_counts_from_when_the_heartbeat_was_sent() {
        let mut holder = LeaseHolder::default();
        holder.sent(1, 1000);
        assert_eq!(holder.answered(1, 1500, 1400), Some(400));
        assert_eq!(holder.until_ms(), 2500);
        assert_eq!(holder.answered(1, 1500, 9000), None, "an answer counts once");
        holder.sent(2, 2000);
        assert_eq!(holder.answered(2, 0, 2001), Some(1), "no grant from a node that is not head");
        assert_eq!(holder.until_ms(), 2500);
        holder.sent(3, 2100);
        holder.new_link();
        assert_eq!(holder.answered(3, 1500, 2200), None);
    }

    proptest! {
        /// Whatever is lost, late or out of order: the holder's end is never after the head's.
        #[test]
        fn the_holder_stops_before_the_head_gives_up(
            beats in prop::collection::vec((1u64..500, 0u64..400, 0u64..400, any::<bool>()), 1..100),
            lease in 1u64..2000,
        ) {
            let mut holder = LeaseHolder::default();
            let (mut now, mut head_until) = (0, 0);
            let mut answers = Vec::new();
            for (seq, (gap, there, back, lost)) in beats.into_iter().enumerate() {
                now += gap;
                holder.sent(seq as u64, now);
                if !lost {
                    head_until = head_until.max(now + there + lease);
                    answers.push((now + there + back, seq as u64));
                }
                answers.sort();
                while answers.first().is_some_and(|(at, _)| *at <= now) {
                    let (at, seq) = answers.remove(0);
                    holder.answered(seq, lease, at);
                    prop_assert!(holder.until_ms() <= head_until);
                }
            }
        }
    }
}
