//! What every backend is held to, and measured by: random inputs and cases for the tests of
//! `backends/*`, and the roofline behind `dunlin bench --device`, `dunlin devices` and the benches.
//!
//! Generic over the `Backend` trait; it knows no backend by name, no models, and no files. Cases
//! panic where they do not hold: they are for tests.

pub mod attention;
pub mod faults;
pub mod layer;
pub mod ops;
pub mod random;
pub mod roofline;
