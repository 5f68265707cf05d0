//! The router's core, driven without clock or network: directed cases, and a model that throws
//! losses, duplicates, cancels and deadlines at it and checks every output.

mod cases;
mod model;
mod support;
