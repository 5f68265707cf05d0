//! Links between nodes, tested from outside: the same tests over both transports.

#[macro_use]
mod suite;
mod harness;
mod memory_faults;
mod memory_only;
mod quic_only;
mod wire_faults;

mod memory {
    suite_for!(crate::harness::MemoryHarness);
}

mod quic {
    suite_for!(crate::quic_only::QuicHarness);
}
