//! Ports for the processes of tests, each given out once.
//!
//! They lie below the range from which systems take ports for clients (32768 and up on Linux,
//! 49152 elsewhere), so that no connection that a test or a node opens meanwhile can take one, and
//! test programs that run side by side begin at different places.

use std::net::{TcpListener, UdpSocket};
use std::sync::atomic::{AtomicU32, Ordering};

const FIRST: u32 = 15_000;
const COUNT: u32 = 15_000;

/// Free for TCP and UDP on loopback, and nobody else's in this process.
pub fn free_port() -> u16 {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    for _ in 0..COUNT {
        let at = NEXT.fetch_add(1, Ordering::Relaxed);
        let offset = std::process::id().wrapping_mul(97).wrapping_add(at) % COUNT;
        let port = u16::try_from(FIRST + offset).expect("below 65536");
        let free = TcpListener::bind(("127.0.0.1", port)).is_ok()
            && UdpSocket::bind(("127.0.0.1", port)).is_ok();
        if free {
            return port;
        }
    }
    panic!("no free port between {FIRST} and {}", FIRST + COUNT);
}
