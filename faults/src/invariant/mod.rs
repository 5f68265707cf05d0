//! What must hold, read from the record of a run.
//!
//! Safety (`I1` ... `I23`) holds at every step, under all faults, also beyond the tolerance;
//! liveness (`L1` ... `L6`) once all is healed (or the core alone, see [`crate::heal`]); `E1` holds
//! each fault to its `expect`, `E2` is checked where a plan asks. A checker
//! reads a [`Case`] and lists every [`Breach`]; it knows nothing of modes, and a fact that a mode
//! does not tell breaks nothing.

mod case;
mod control;
mod expectation;
mod input;
mod kv;
mod live;
mod stream;
#[cfg(test)]
pub(crate) mod tests;
mod work;

pub use self::case::{Case, Stream};

use serde::{Deserialize, Serialize};

/// One thing that must hold.
#[derive(Debug, Clone, Copy)]
pub struct Invariant {
    /// `I1` ... `I23`, `L1` ... `L6`, `E1`, `E2`.
    pub id: &'static str,
    pub name: &'static str,
    pub statement: &'static str,
    /// Checked without being asked for.
    pub by_default: bool,
    check: fn(&Case<'_>, &mut Found),
}

/// One time that it did not.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Breach {
    /// Id of the invariant.
    pub invariant: String,
    /// Kind of breach in one word; with the invariant it is the failure's fingerprint.
    pub slug: String,
    pub what: String,
    pub at_us: u64,
    pub request: Option<u64>,
}

/// What a checker found so far.
#[derive(Debug, Default)]
pub struct Found {
    id: &'static str,
    breaches: Vec<Breach>,
}

/// A checker that finds more than this stops listing: the first ones say it all.
const MOST: usize = 100;

impl Found {
    fn add(&mut self, slug: &str, at_us: u64, request: Option<u64>, what: impl Into<String>) {
        if self.breaches.len() < MOST {
            let (invariant, slug) = (self.id.to_string(), slug.to_string());
            self.breaches.push(Breach { invariant, slug, what: what.into(), at_us, request });
        }
    }
}

impl Invariant {
    pub fn check(&self, case: &Case<'_>) -> Vec<Breach> {
        let mut found = Found { id: self.id, breaches: Vec::new() };
        (self.check)(case, &mut found);
        found.breaches
    }
}

/// By id or name.
pub fn find(id: &str) -> Option<&'static Invariant> {
    ALL.iter().find(|invariant| invariant.id == id || invariant.name == id)
}

/// All that are on, with what each found, in the order of [`ALL`].
pub fn check_all(case: &Case<'_>) -> Vec<(&'static Invariant, Vec<Breach>)> {
    let (on, off) = (&case.options().on, &case.options().off);
    let checked = ALL.iter().filter(|invariant| {
        !off.contains(invariant.id) && (invariant.by_default || on.contains(invariant.id))
    });
    checked.map(|invariant| (invariant, invariant.check(case))).collect()
}

const fn row(
    id: &'static str,
    name: &'static str,
    statement: &'static str,
    check: fn(&Case<'_>, &mut Found),
) -> Invariant {
    Invariant { id, name, statement, by_default: true, check }
}

pub static ALL: [Invariant; 31] = [
    row(
        "I1",
        "ends-once",
        "each accepted request has exactly one terminal event, and nothing after it",
        stream::ends_once,
    ),
    row("I2", "tokens", "greedy output equals the fault-free reference", stream::tokens),
    row(
        "I3",
        "exactly-once-stream",
        "positions 0..n-1, no gap, no repeat; what was delivered is a prefix of the final sequence",
        stream::exactly_once,
    ),
    row(
        "I4",
        "log-before-deliver",
        "no token leaves the router that its log has not",
        stream::log_before_deliver,
    ),
    row(
        "I5",
        "drafter-invisible",
        "each verify step commits at least one token, and no draft shows in the text",
        stream::drafter_invisible,
    ),
    row(
        "I6",
        "position-keyed-sampling",
        "a draw depends on seed and position alone: sampled output equals the reference as well",
        stream::position_keyed,
    ),
    row(
        "I7",
        "kv-conservation",
        "free + cached + live = total; reference counts equal holders; no block is both free and held",
        kv::conservation,
    ),
    row(
        "I8",
        "quiesce-clean",
        "with no open request nothing is held, nothing waits and every queue is empty",
        kv::quiesce_clean,
    ),
    row("I9", "memory-bound", "used <= reserved <= free at load", kv::memory_bound),
    row(
        "I10",
        "kv-content",
        "a block is read only if its content is what the table claims",
        kv::content,
    ),
    row("I11", "tenant-isolation", "no block is hit across tenants", kv::tenant_isolation),
    row(
        "I12",
        "one-authority",
        "one head; a replica's epoch only rises, and only the head raises it",
        control::one_authority,
    ),
    row(
        "I13",
        "one-incarnation",
        "one live incarnation for each node name; a dead one never comes back",
        control::one_incarnation,
    ),
    row(
        "I14",
        "placement-valid",
        "a published placement covers each layer once, on live members",
        control::placement_valid,
    ),
    row(
        "I15",
        "restart-intensity",
        "each supervisor restarts at most R times in T, else it escalates",
        work::restart_intensity,
    ),
    row(
        "I16",
        "bounded-work",
        "recomputed tokens <= (prompt + delivered) for each recovery",
        work::bounded_work,
    ),
    row(
        "I17",
        "bounded-queues",
        "each queue is within its limit; overload is refused before acceptance",
        work::bounded_queues,
    ),
    row(
        "I18",
        "no-garbage",
        "what cannot be decoded or is of another epoch is refused and counted; nothing dies of it",
        input::no_garbage,
    ),
    row(
        "I19",
        "weights-integrity",
        "each loaded tensor's hash equals the manifest",
        input::weights_integrity,
    ),
    row(
        "I20",
        "no-silent-substitution",
        "the answer names model and shards as asked; NaN and infinity are never sampled",
        input::no_silent_substitution,
    ),
    row(
        "I21",
        "containment",
        "requests without a stage, block or link on a target do not fail",
        expectation::containment,
    ),
    row(
        "I22",
        "wall-clock-free",
        "jumps of the wall clock change no decision",
        control::wall_clock_free,
    ),
    row(
        "I23",
        "deadline",
        "a request ends by its deadline and a grace, even if nothing else can progress",
        stream::deadline,
    ),
    row("L1", "progress", "every open request progresses once all is healed", live::progress),
    row("L2", "agreement", "all live nodes agree on who is there", live::agreement),
    row("L3", "capacity", "capacity returns to what the cluster file asks for", live::capacity),
    row("L4", "backlog", "the backlog drains and a fresh request is answered", live::backlog),
    row("L5", "cache-returns", "the prefix cache comes back into use", live::cache_returns),
    row("L6", "no-deadlock", "something can run while a request is open", live::no_deadlock),
    row(
        "E1",
        "expectation",
        "a request fails, is refused or changes only where a fault's `expect` allows it",
        expectation::expectation,
    ),
    Invariant {
        id: "E2",
        name: "no-false-death",
        statement: "nobody is declared dead who is only slow or far away",
        by_default: false,
        check: expectation::no_false_death,
    },
];

pub use self::control::same_without_clock;
pub use self::expectation::false_deaths;
pub(crate) use self::stream::diverges;
