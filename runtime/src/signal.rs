//! A value that tasks can wait on. Unlike tokio's `watch`, it wakes its waiters in the order in
//! which they came, so that simulations repeat.

use parking_lot::Mutex;
use tokio::sync::Notify;

#[derive(Debug, Default)]
pub(crate) struct Signal<T> {
    value: Mutex<T>,
    changed: Notify,
}

impl<T: Clone> Signal<T> {
    pub fn new(value: T) -> Self {
        Self { value: Mutex::new(value), changed: Notify::new() }
    }

    pub fn get(&self) -> T {
        self.value.lock().clone()
    }

    pub fn with<R>(&self, look: impl FnOnce(&T) -> R) -> R {
        look(&self.value.lock())
    }

    pub fn set(&self, value: T) {
        *self.value.lock() = value;
        self.changed.notify_waiters();
    }

    /// Changes the value and wakes the waiters, unless `change` says that nothing changed.
    pub fn update(&self, change: impl FnOnce(&mut T) -> bool) {
        if change(&mut self.value.lock()) {
            self.changed.notify_waiters();
        }
    }

    /// Waits until `find` finds what it looks for.
    pub async fn until<R>(&self, find: impl Fn(&T) -> Option<R>) -> R {
        loop {
            let mut changed = std::pin::pin!(self.changed.notified());
            changed.as_mut().enable();
            if let Some(found) = find(&self.value.lock()) {
                return found;
            }
            changed.await;
        }
    }
}
