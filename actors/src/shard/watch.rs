//! Whether the device still moves: the shard's own timer over the step that its device is in.
//!
//! A device that computes must be done by the step deadline. One that waits for another shard gets
//! a quarter more, so that the shard which is the cause is the first to be named, by its own actor.
//! Only a look at a clock: it works while the device thread hangs inside the engine.

use super::flows::Doing;
use crate::messages::RequestId;
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::Instant;

pub struct Watch {
    deadline: Duration,
    doing: Arc<Doing>,
    /// Steps given to the device and not yet done, oldest first.
    given: VecDeque<(u64, Vec<RequestId>)>,
    /// Since when the oldest of them is the device's own.
    since: Instant,
    /// A look is due some time.
    armed: bool,
}

pub enum Look {
    Idle,
    Again(Duration),
    /// `suspects` only where the device itself does not answer.
    Stalled {
        step: u64,
        text: String,
        suspects: Vec<RequestId>,
    },
}

impl Watch {
    pub fn new(deadline: Duration, doing: Arc<Doing>) -> Self {
        let (given, since) = (VecDeque::new(), Instant::now());
        Self { deadline, doing, given, since, armed: false }
    }

    /// The device got a step. When to look, if no look is due already.
    pub fn given(&mut self, step: u64, requests: Vec<RequestId>) -> Option<Duration> {
        if self.given.is_empty() {
            self.since = Instant::now();
        }
        self.given.push_back((step, requests));
        (!std::mem::replace(&mut self.armed, true)).then_some(self.deadline)
    }

    /// The oldest step is done.
    pub fn done(&mut self) {
        self.given.pop_front();
        self.since = Instant::now();
    }

    pub fn look(&mut self) -> Look {
        let Some((step, requests)) = self.given.front() else {
            self.armed = false;
            return Look::Idle;
        };
        let computes = self.doing.computes();
        let bound = if computes { self.deadline } else { self.deadline + self.deadline / 4 };
        let took = self.since.elapsed();
        if took < bound {
            return Look::Again((bound - took).max(Duration::from_millis(1)));
        }
        let text = format!("not done after {took:.1?}: it {}", self.doing.text());
        let suspects = if computes { requests.clone() } else { Vec::new() };
        Look::Stalled { step: *step, text, suspects }
    }
}
