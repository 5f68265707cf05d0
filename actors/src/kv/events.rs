//! What changed in the prefix index since the last report: the net effect, not the history.

use crate::messages::BlockKey;
use std::collections::HashSet;

#[derive(Debug, Default)]
pub struct Changes {
    /// Key, and whether it was indexed at the last report; in order of first change.
    touched: Vec<(BlockKey, bool)>,
    seen: HashSet<BlockKey>,
}

impl Changes {
    /// `before`: whether the key was indexed before this change.
    pub fn note(&mut self, key: BlockKey, before: bool) {
        if self.seen.insert(key) {
            self.touched.push((key, before));
        }
    }

    pub fn is_empty(&self) -> bool {
        self.touched.is_empty()
    }

    /// (stored, removed), given what is indexed now; forgets them.
    pub fn split(&mut self, now: impl Fn(&BlockKey) -> bool) -> (Vec<BlockKey>, Vec<BlockKey>) {
        self.seen.clear();
        let (mut stored, mut removed) = (Vec::new(), Vec::new());
        for (key, before) in self.touched.drain(..) {
            match (before, now(&key)) {
                (false, true) => stored.push(key),
                (true, false) => removed.push(key),
                _ => {}
            }
        }
        (stored, removed)
    }
}
