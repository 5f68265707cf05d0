//! Ports on loopback for a cluster of this machine, each given out once.
//!
//! They lie below the range from which systems take ports for clients (32768 and up on Linux,
//! 49152 elsewhere), so that no connection opened meanwhile can take one; runs side by side begin
//! at different places.

use std::net::{TcpListener, UdpSocket};
use std::sync::atomic::{AtomicU32, Ordering};

const FIRST: u32 = 10_000;
const COUNT: u32 = 20_000;

/// Free for TCP and UDP, and nobody else's in this process; `None` if there is none.
pub fn free_port() -> Option<u16> {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    (0..COUNT).find_map(|_| {
        let at = NEXT.fetch_add(1, Ordering::Relaxed);
        let offset = std::process::id().wrapping_mul(97).wrapping_add(at) % COUNT;
        let port = u16::try_from(FIRST + offset).ok()?;
        let free = TcpListener::bind(("127.0.0.1", port)).is_ok()
            && UdpSocket::bind(("127.0.0.1", port)).is_ok();
        free.then_some(port)
    })
}
