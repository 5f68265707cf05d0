//! `dunlin`: the command line. Each subcommand has one file in this folder.
fn main() {}
