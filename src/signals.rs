//! Ctrl-C and SIGTERM: the first one asks to end well, the second ends at once.

use anyhow::{Context, Result};
use tokio::signal::unix::{Signal, SignalKind, signal};

/// What a shell reports for a program that Ctrl-C ended.
pub const INTERRUPTED: u8 = 130;

pub struct Signals {
    interrupt: Signal,
    terminate: Signal,
}

impl Signals {
    /// From now on the signals no longer end the process by themselves.
    pub fn catch() -> Result<Signals> {
        let catch = |kind| signal(kind).context("signals cannot be caught");
        Ok(Signals {
            interrupt: catch(SignalKind::interrupt())?,
            terminate: catch(SignalKind::terminate())?,
        })
    }

    /// The next one. Cancellation-safe.
    pub async fn next(&mut self) {
        tokio::select! {
            _ = self.interrupt.recv() => {}
            _ = self.terminate.recv() => {}
        }
    }

    /// Finishes `work`, unless a signal comes first: then `None`.
    pub async fn or<T>(&mut self, work: impl Future<Output = T>) -> Option<T> {
        tokio::select! {
            biased;
            () = self.next() => None,
            done = work => Some(done),
        }
    }
}
