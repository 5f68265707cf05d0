//! Links between nodes, tested from outside: the same tests over both transports, and over
//! QUIC where its lanes are Unix sockets.

#[macro_use]
mod suite;
mod harness;
#[cfg(target_os = "linux")]
mod local_only;
mod memory_faults;
mod memory_only;
mod quic_only;
mod wire_faults;

mod memory {
    suite_for!(lossy crate::harness::MemoryHarness);
}

mod quic {
    suite_for!(lossy crate::quic_only::QuicHarness);
}

mod local {
    suite_for!(crate::quic_only::QuicHarness<true>);
}
