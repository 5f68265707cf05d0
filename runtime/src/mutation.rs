//! Deliberate bugs, so that a test can show that a simulated run notices them.
//!
//! Each sits at the place of the check that it leaves out, as a call of [`mutated`] with its name.
//! Without the feature `mutations` that is the constant `false` and nothing of it is compiled; no
//! program that ships has the feature. With it a bug is active on one thread at most at a time: a
//! simulated run keeps to its thread. Which there are, `faults/tests/mutations.rs` lists.

#[cfg(feature = "mutations")]
mod active {
    use std::cell::Cell;

    thread_local! {
        static ACTIVE: Cell<Option<&'static str>> = const { Cell::new(None) };
    }

    /// Whether the bug of this name is active on this thread.
    pub fn mutated(name: &str) -> bool {
        ACTIVE.get() == Some(name)
    }

    /// Runs `act` with a bug on this thread, or with none.
    pub fn with_mutation<T>(name: Option<&'static str>, act: impl FnOnce() -> T) -> T {
        struct Restore(Option<&'static str>);
        impl Drop for Restore {
            fn drop(&mut self) {
                ACTIVE.set(self.0);
            }
        }
        let _restore = Restore(ACTIVE.replace(name));
        act()
    }
}

#[cfg(feature = "mutations")]
pub use active::{mutated, with_mutation};

/// Whether the bug of this name is active: in this build there is none.
#[cfg(not(feature = "mutations"))]
#[inline(always)]
pub const fn mutated(_: &str) -> bool {
    false
}
