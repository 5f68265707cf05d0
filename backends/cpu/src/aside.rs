//! Work that a worker does between two ops, so that the caller need not.
//!
//! What ends a step (telling others of it) wakes threads, and the kernel puts them on the processor
//! of the thread that wakes them, though another is about to be idle: a virtual machine's idle
//! processors look as if their host had taken them. On the caller's they stop the next step; on a
//! worker's, which is spinning for an op, they stop nobody that has work.
//!
//! Invariants: work is done once, in the order in which it was given, one at a time.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

pub(crate) type Work = Box<dyn FnOnce() + Send>;

/// What a panic in such work left, for the caller.
pub(crate) type Panic = Box<dyn Any + Send>;

#[derive(Default)]
pub(crate) struct Aside {
    waiting: AtomicBool,
    /// Held while the work is done: that is what keeps the order.
    work: Mutex<Option<Work>>,
}

impl Aside {
    /// Leaves `work` for whoever calls [`Self::run`] first. What was left before is done first.
    pub fn put(&self, work: Work) -> Result<(), Panic> {
        let mut place = self.place();
        let before = place.take().map_or(Ok(()), done);
        *place = Some(work);
        // Against a worker that counts itself among the sleepers and then looks here.
        self.waiting.store(true, Ordering::SeqCst);
        before
    }

    /// Does what waits, if anything does.
    pub fn run(&self) -> Result<(), Panic> {
        if !self.waiting.load(Ordering::SeqCst) {
            return Ok(());
        }
        let mut place = self.place();
        self.waiting.store(false, Ordering::SeqCst);
        place.take().map_or(Ok(()), done)
    }

    fn place(&self) -> MutexGuard<'_, Option<Work>> {
        self.work.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn done(work: Work) -> Result<(), Panic> {
    catch_unwind(AssertUnwindSafe(work))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;

    #[test]
    fn work_is_done_once_and_in_order_and_panics_come_back() {
        let (aside, seen) = (Aside::default(), Arc::new(Mutex::new(Vec::new())));
        let note = |n: u32| -> Work {
            let seen = seen.clone();
            Box::new(move || seen.lock().expect("no panic").push(n))
        };
        assert!(aside.run().is_ok());
        assert!(aside.put(note(1)).is_ok());
        assert!(aside.put(note(2)).is_ok());
        assert_eq!(*seen.lock().expect("no panic"), [1]);
        assert!(aside.run().is_ok() && aside.run().is_ok());
        assert_eq!(*seen.lock().expect("no panic"), [1, 2]);
        assert!(aside.put(Box::new(|| panic!("as told"))).is_ok());
        assert!(aside.run().is_err());
        assert!(aside.put(note(3)).is_ok() && aside.run().is_ok());
        assert_eq!(*seen.lock().expect("no panic"), [1, 2, 3]);
    }
}
