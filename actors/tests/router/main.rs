//! The router: its core without clock or network (directed cases, and a model that throws losses,
//! duplicates, cancels and deadlines at it and checks every output), and its actor between real
//! nodes on an in-memory network.

mod actor;
mod cases;
mod model;
mod support;
