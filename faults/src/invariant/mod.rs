//! What must hold.

/// One thing that must hold.
#[derive(Debug)]
pub struct Invariant {
    /// `I1` ... `I23`, `L1` ... `L6`.
    pub id: &'static str,
    pub name: &'static str,
    pub statement: &'static str,
}

pub static ALL: [Invariant; 0] = [];

/// By id or name.
pub fn find(id: &str) -> Option<&'static Invariant> {
    ALL.iter().find(|invariant| invariant.id == id || invariant.name == id)
}
