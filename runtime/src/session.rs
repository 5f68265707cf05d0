//! A session: mail between two lives of two nodes, exactly once and in order per lane, over as
//! many links as it takes. Pure: no clock, no I/O.
//!
//! The sender keeps what the receiver has not acknowledged. When a link breaks and the same two
//! lives meet again, each tells how far it has heard the other, and the rest is sent again; what
//! arrives twice is dropped here. When either life is new, the session ends: what was in it comes
//! back to the caller, which must assume that it may or may not have been handled.

use crate::frame::LANES;
use std::collections::VecDeque;

/// What a queue must know about a message: its cost in bytes, overhead included.
pub(crate) trait Cost {
    fn cost(&self) -> usize;
}

/// The sending half. Lane numbers must be below [`LANES`].
#[derive(Debug)]
pub(crate) struct Outgoing<T> {
    pub id: u64,
    lanes: [Lane<T>; LANES],
    bytes: usize,
}

#[derive(Debug)]
struct Lane<T> {
    /// Sequence number of the queue's front: everything before it was acknowledged.
    base: u64,
    queue: VecDeque<T>,
    /// How many of the queue were handed to the link.
    sent: usize,
    bytes: usize,
}

impl<T: Cost + Clone> Outgoing<T> {
    pub fn new(id: u64) -> Self {
        let lane = || Lane { base: 0, queue: VecDeque::new(), sent: 0, bytes: 0 };
        Self { id, lanes: std::array::from_fn(|_| lane()), bytes: 0 }
    }

    /// Bytes not yet acknowledged.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    pub fn lane_bytes(&self, lane: usize) -> usize {
        self.lanes[lane].bytes
    }

    pub fn push(&mut self, lane: usize, message: T) {
        let cost = message.cost();
        self.bytes += cost;
        self.lanes[lane].bytes += cost;
        self.lanes[lane].queue.push_back(message);
    }

    /// Messages to hand to the link now, with their numbers: at least one if any waits, then more
    /// up to `max_bytes`.
    pub fn next_batch(&mut self, lane: usize, max_bytes: usize) -> Vec<(u64, T)> {
        let lane = &mut self.lanes[lane];
        let mut batch = Vec::new();
        let mut bytes = 0;
        while let Some(message) = lane.queue.get(lane.sent) {
            if !batch.is_empty() && bytes + message.cost() > max_bytes {
                break;
            }
            bytes += message.cost();
            batch.push((lane.base + lane.sent as u64, message.clone()));
            lane.sent += 1;
        }
        batch
    }

    /// The peer has received everything before `received[lane]`. Counts beyond what was sent are
    /// ignored: they can only come from a confused peer.
    pub fn ack(&mut self, received: &[u64; LANES]) {
        for (lane, upto) in self.lanes.iter_mut().zip(received) {
            let gone = upto.saturating_sub(lane.base).min(lane.sent as u64) as usize;
            for message in lane.queue.drain(..gone) {
                lane.bytes -= message.cost();
                self.bytes -= message.cost();
            }
            lane.base += gone as u64;
            lane.sent -= gone;
        }
    }

    /// Can the session go on with a peer that has received so much? Not with one that lacks what it
    /// has acknowledged, for that is gone here: the two would disagree for ever.
    pub fn can_resume(&self, received: &[u64; LANES]) -> bool {
        self.lanes.iter().zip(received).all(|(lane, upto)| lane.base <= *upto)
    }

    /// The link is lost: what is not acknowledged is to be sent again.
    pub fn rewind(&mut self) {
        self.lanes.iter_mut().for_each(|lane| lane.sent = 0);
    }

    /// Ends the session, starts session `id`, and returns what the old one still held.
    pub fn end(&mut self, id: u64) -> Vec<T> {
        let old = std::mem::replace(self, Self::new(id));
        old.lanes.into_iter().flat_map(|lane| lane.queue).collect()
    }
}

/// The receiving half.
#[derive(Debug, Clone, Default)]
pub(crate) struct Incoming {
    /// The peer's session; 0 before the first.
    pub id: u64,
    pub received: [u64; LANES],
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Verdict {
    Deliver,
    Duplicate,
    /// Messages are missing: the peer or the transport is broken.
    Gap {
        expected: u64,
    },
}

impl Incoming {
    /// The peer sends session `id` from now on.
    pub fn follow(&mut self, id: u64) {
        if self.id != id {
            *self = Self { id, received: [0; LANES] };
        }
    }

    pub fn receive(&mut self, lane: usize, seq: u64) -> Verdict {
        let expected = self.received[lane];
        match seq.cmp(&expected) {
            std::cmp::Ordering::Less => Verdict::Duplicate,
            std::cmp::Ordering::Greater => Verdict::Gap { expected },
            std::cmp::Ordering::Equal => {
                self.received[lane] += 1;
                Verdict::Deliver
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    impl Cost for u32 {
        fn cost(&self) -> usize {
            10
        }
    }

    #[test]
    fn a_session_ends_where_the_peer_forgot_what_it_acknowledged() {
        let mut out = Outgoing::new(7);
        out.push(2, 1u32);
        out.push(2, 2);
        assert_eq!(out.next_batch(2, usize::MAX).len(), 2);
        let received = |upto| std::array::from_fn(|lane| if lane == 2 { upto } else { 0 });
        assert!(out.can_resume(&received(0)));
        out.ack(&received(1));
        assert!(out.can_resume(&received(1)) && out.can_resume(&received(2)));
        assert!(!out.can_resume(&received(0)));
    }

    #[derive(Debug, Clone)]
    enum Op {
        Push(usize),
        Send(usize, usize),
        /// Delivers this many of what is on the wire.
        Arrive(usize),
        Ack,
        /// The wire loses everything; the two meet again.
        Break,
    }

    fn op() -> impl Strategy<Value = Op> {
        prop_oneof![
            4 => (0..LANES).prop_map(Op::Push),
            4 => (0..LANES, 1usize..60).prop_map(|(lane, max)| Op::Send(lane, max)),
            4 => (0usize..5).prop_map(Op::Arrive),
            2 => Just(Op::Ack),
            1 => Just(Op::Break),
        ]
    }

    proptest! {
        #[test]
        fn every_message_arrives_once_and_in_order(ops in prop::collection::vec(op(), 1..200)) {
            let mut out = Outgoing::new(7);
            let mut inc = Incoming::default();
            inc.follow(7);
            let mut wire: VecDeque<(usize, u64, u32)> = VecDeque::new();
            let mut pushed = vec![Vec::new(); LANES];
            let mut got = vec![Vec::new(); LANES];
            let mut next = 0u32;
            let all = (0..LANES).map(|lane| Op::Send(lane, usize::MAX));
            let finish = [Op::Break].into_iter().chain(all).chain([Op::Arrive(usize::MAX), Op::Ack]);
            for op in ops.into_iter().chain(finish) {
                match op {
                    Op::Push(lane) => {
                        out.push(lane, next);
                        pushed[lane].push(next);
                        next += 1;
                    }
                    Op::Send(lane, max) => {
                        let batch = out.next_batch(lane, max);
                        wire.extend(batch.into_iter().map(|(seq, m)| (lane, seq, m)));
                    }
                    Op::Arrive(n) => {
                        for (lane, seq, message) in wire.drain(..n.min(wire.len())) {
                            match inc.receive(lane, seq) {
                                Verdict::Deliver => got[lane].push(message),
                                Verdict::Duplicate => {}
                                Verdict::Gap { expected } => prop_assert!(false, "gap at {expected}"),
                            }
                        }
                    }
                    Op::Ack => out.ack(&inc.received),
                    Op::Break => {
                        wire.clear();
                        out.ack(&inc.received);
                        out.rewind();
                    }
                }
                let held: usize = (0..LANES).map(|lane| out.lane_bytes(lane)).sum();
                prop_assert_eq!(held, out.bytes());
            }
            prop_assert_eq!(got, pushed);
            prop_assert_eq!(out.bytes(), 0);
        }
    }

    #[test]
    fn an_ack_of_what_was_never_sent_frees_nothing() {
        let mut out = Outgoing::new(1);
        out.push(0, 1u32);
        out.push(0, 2u32);
        assert_eq!(out.next_batch(0, 1).len(), 1);
        out.ack(&[u64::MAX; LANES]);
        assert_eq!(out.bytes(), 10);
        assert_eq!(out.end(2), vec![2]);
        assert_eq!((out.id, out.bytes()), (2, 0));
    }
}
