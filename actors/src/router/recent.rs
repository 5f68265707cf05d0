//! A bounded set that forgets its oldest members.

use crate::messages::RequestId;
use std::collections::{BTreeSet, VecDeque};

pub(super) struct Recent {
    limit: usize,
    order: VecDeque<RequestId>,
    members: BTreeSet<RequestId>,
}

impl Recent {
    pub fn new(limit: usize) -> Self {
        Self { limit, order: VecDeque::new(), members: BTreeSet::new() }
    }

    pub fn insert(&mut self, id: RequestId) {
        if !self.members.insert(id) {
            return;
        }
        self.order.push_back(id);
        if self.order.len() > self.limit
            && let Some(oldest) = self.order.pop_front()
        {
            self.members.remove(&oldest);
        }
    }

    pub fn contains(&self, id: RequestId) -> bool {
        self.members.contains(&id)
    }
}
