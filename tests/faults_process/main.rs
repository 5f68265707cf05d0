//! The process mode of fault plans: each kind is carried out on real node processes, proves that
//! it was, and the clients read what they read without it.

mod exhaustive;
mod figures;
mod harness;
mod inside;
mod links;
mod outside;
mod processes;
