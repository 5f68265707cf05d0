//! The wall clock, for what people read: timestamps of answers, dates in prompts, the numbers that
//! tell a node's lives apart. Nothing that a running node decides depends on it.
//!
//! It can be made to jump, to show just that.

use std::sync::atomic::{AtomicI64, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

static OFFSET_MS: AtomicI64 = AtomicI64::new(0);

/// The time of day, as this process sees it.
pub fn now() -> SystemTime {
    let offset = OFFSET_MS.load(Ordering::Relaxed);
    let by = Duration::from_millis(offset.unsigned_abs());
    let now = SystemTime::now();
    let moved = if offset < 0 { now.checked_sub(by) } else { now.checked_add(by) };
    moved.unwrap_or(now)
}

/// Whole seconds since 1970; 0 before.
pub fn unix_seconds() -> u64 {
    now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

/// From now on this process sees a time so much later (earlier, if negative). Says how far it is
/// off in all.
pub fn jump(ms: i64) -> i64 {
    OFFSET_MS.fetch_add(ms, Ordering::Relaxed).saturating_add(ms)
}
