//! Deliberate bugs are caught: each check that the design rests on is left out in turn, at its real
//! place, and simulated runs of a fitting plan must find it, by the invariant that is meant for it,
//! within 500 seeds. The same seeds without the bug must pass, so that no invariant cries wolf.
//!
//!     cargo test --release -p dunlin-faults --features mutations --test mutations -- --nocapture
//!
//! prints the table that docs/faults.md shows.

use dunlin_faults::fault::Mode;
use dunlin_faults::plan::Plan;
use dunlin_faults::record::Record;
use dunlin_faults::resolved::Resolved;
use dunlin_faults::sim;
use dunlin_faults::verdict::{Outcome, Verdict, judge};
use dunlin_runtime::with_mutation;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

/// A bug must be found by then.
const SEEDS: u64 = 500;
/// Seeds of each plan that are run without a bug, beyond those that a bug was found with.
const SOUND: u64 = 12;
const THREADS: usize = 2;

struct Mutation {
    name: &'static str,
    /// What is left out.
    what: &'static str,
    /// In plans/mutations.
    plan: &'static str,
    /// The invariant that is meant for it.
    invariant: &'static str,
}

const fn mutation(
    name: &'static str,
    what: &'static str,
    plan: &'static str,
    invariant: &'static str,
) -> Mutation {
    Mutation { name, what, plan, invariant }
}

const MUTATIONS: [Mutation; 19] = [
    mutation("end-twice", "the router sends a request's end twice", "books", "I1"),
    mutation(
        "accept-stale-flow",
        "lanes and shards take activations that came before",
        "stale",
        "I2",
    ),
    mutation(
        "skip-plan-hash",
        "shards are told unlike plans and do not compare their hash",
        "stale",
        "I2",
    ),
    mutation(
        "trust-reports",
        "the router checks neither epoch, attempt nor position",
        "clog-pair",
        "I2",
    ),
    mutation("deliver-before-log", "the router delivers a token, then logs it", "books", "I4"),
    mutation("attempt-seed", "a draw depends on the attempt as well", "kill", "I6"),
    mutation("free-early", "a block is freed one holder early", "books", "I7"),
    mutation("double-free", "a block is put on the free list twice", "books", "I7"),
    mutation("lose-decrement", "a shared block's count does not fall", "books", "I7"),
    mutation("keep-after-cancel", "a cancelled request keeps its blocks", "cancels", "I8"),
    mutation(
        "trust-keys",
        "a hit trusts short keys and does not compare the tokens",
        "books",
        "I10",
    ),
    mutation("drop-salt", "tenant and salt are left out of block names", "books", "I11"),
    mutation("same-epoch", "placement gives a replica the epoch it had", "kill", "I12"),
    mutation("reuse-incarnation", "a node comes back as the life it was", "kill", "I13"),
    mutation("no-restart-intensity", "a supervisor never gives up", "restarts", "I15"),
    mutation("skip-fence", "the router checks neither epoch nor attempt", "clog", "I18"),
    mutation("skip-checksum", "a frame's checksum is not compared", "corrupt", "I18"),
    mutation("sample-nan", "a token is drawn of logits that are NaN", "nan", "I20"),
    mutation(
        "forget-replay",
        "one request of a lost replica is not handed out again",
        "kill",
        "L1",
    ),
];

struct Found {
    seed: u64,
    /// What the verdict says first, of this invariant.
    what: String,
    /// All invariants that broke in that run.
    broken: BTreeSet<String>,
}

#[test]
fn every_deliberate_bug_is_found_by_the_invariant_that_is_meant_for_it() {
    let plans = plans();
    let found = in_parallel(MUTATIONS.len(), |at| search(&MUTATIONS[at], &plans));
    let mut sound: BTreeSet<(&str, u64)> = BTreeSet::new();
    for (mutation, (found, _)) in MUTATIONS.iter().zip(&found) {
        sound.extend(found.iter().map(|found| (mutation.plan, found.seed)));
        sound.extend((1..=SOUND).map(|seed| (mutation.plan, seed)));
    }
    let sound: Vec<(&str, u64)> = sound.into_iter().collect();
    let wolves = in_parallel(sound.len(), |at| {
        let (plan, seed) = sound[at];
        let verdict = run(&plans[plan], seed, None);
        (verdict.outcome != Outcome::Pass)
            .then(|| format!("{plan} seed {seed}: {}: {}", verdict.outcome, verdict.reason))
    });
    let mut table = String::new();
    let mut missed = Vec::new();
    for (mutation, (found, seen)) in MUTATIONS.iter().zip(&found) {
        let Mutation { name, invariant, .. } = mutation;
        match found {
            Some(Found { seed, broken, what: how }) => {
                let others = broken.iter().filter(|id| id != invariant);
                let others = others.cloned().collect::<Vec<_>>().join(", ");
                let row = row(mutation, *seed);
                let _ = writeln!(table, "{row} {others} |");
                println!("{name}: {how}");
            }
            None => missed.push(format!("{name} ({invariant}); seen: {seen:?}")),
        }
    }
    println!("{table}");
    assert!(missed.is_empty(), "not found within {SEEDS} seeds:\n{}", missed.join("\n"));
    let wolves: Vec<String> = wolves.into_iter().flatten().collect();
    assert!(wolves.is_empty(), "without any bug:\n{}", wolves.join("\n"));
    println!("{} runs without a bug passed", sound.len());
}

/// The line of the manual's table, but for its last cell.
fn row(mutation: &Mutation, seed: u64) -> String {
    let Mutation { name, what, plan, invariant } = mutation;
    format!("| `{name}` | {what} | `{plan}` | {seed} | {invariant} |")
}

#[test]
fn the_manual_lists_every_deliberate_bug() {
    const MANUAL: &str = include_str!("../../../docs/faults.md");
    for mutation in &MUTATIONS {
        let any = |seed| MANUAL.contains(&row(mutation, seed));
        assert!((1..=SEEDS).any(any), "{} is not in docs/faults.md", mutation.name);
    }
}

/// The first seed with which the bug breaks its invariant; else how often others broke.
fn search(
    mutation: &Mutation,
    plans: &BTreeMap<&str, Plan>,
) -> (Option<Found>, BTreeMap<String, u64>) {
    let mut seen = BTreeMap::new();
    for seed in 1..=SEEDS {
        let verdict = run(&plans[mutation.plan], seed, Some(mutation.name));
        let broken: BTreeSet<String> =
            verdict.breaches.iter().map(|breach| breach.invariant.clone()).collect();
        let own = verdict.breaches.iter().find(|breach| breach.invariant == mutation.invariant);
        if let Some(own) = own {
            let what = format!("{} {}: {}", own.invariant, own.slug, own.what);
            return (Some(Found { seed, what, broken }), seen);
        }
        broken.into_iter().for_each(|id| *seen.entry(id).or_default() += 1);
    }
    (None, seen)
}

fn run(plan: &Plan, seed: u64, mutation: Option<&'static str>) -> Verdict {
    let resolved = plan.resolve(seed, Mode::Sim).unwrap_or_else(|error| panic!("{error}"));
    let record = with_mutation(mutation, || simulate(&resolved));
    judge(&resolved, &record)
}

fn simulate(plan: &Resolved) -> Record {
    sim::run_resolved(plan).unwrap_or_else(|error| panic!("{} {}: {error}", plan.name, plan.seed))
}

fn plans() -> BTreeMap<&'static str, Plan> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../plans/mutations");
    let read = |mutation: &Mutation| {
        let path = folder.join(format!("{}.toml", mutation.plan));
        (mutation.plan, Plan::read(&path).unwrap_or_else(|error| panic!("{error}")))
    };
    MUTATIONS.iter().map(read).collect()
}

/// `act(0..count)`, in order.
fn in_parallel<T: Send>(count: usize, act: impl Fn(usize) -> T + Sync) -> Vec<T> {
    let next = AtomicUsize::new(0);
    let done = Mutex::new(BTreeMap::new());
    std::thread::scope(|scope| {
        for _ in 0..THREADS {
            scope.spawn(|| {
                loop {
                    let at = next.fetch_add(1, Ordering::Relaxed);
                    if at >= count {
                        return;
                    }
                    let result = act(at);
                    done.lock().expect("no panic holds it").insert(at, result);
                }
            });
        }
    });
    done.into_inner().expect("no panic holds it").into_values().collect()
}
