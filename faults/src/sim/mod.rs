//! The simulator: a whole cluster in one thread, in virtual time, from one seed.
//!
//! The nodes are the real ones: every actor, its core, its mailbox and its frames, on one
//! current-thread runtime with a paused clock, over [`MemoryNetwork`](dunlin_runtime::MemoryNetwork)
//! and the hash engine. What is pretended is the model, the time that things take, the processes
//! (a node is dropped and started anew as `dunlin up` would) and the HTTP clients, which talk to
//! the router as the gateway does. The same plan with the same seed gives the same trace hash.
//!
//! - `shared`: what the nodes' fault hooks write into, and the faults that wait at sites.
//! - `cluster`: the nodes' lives. `clients`: the workload. `inject`: faults that have no site.
//! - `drive`: the loop over phases, faults and requests. `rest`: what is held at the end.
//!
//! It judges nothing: it writes a [`Record`].

mod clients;
mod cluster;
mod drive;
mod inject;
mod oracle;
mod rest;
mod shared;

use crate::armory::Armory;
use crate::fault::{Fault, Kind};
use crate::record::Record;
use crate::resolved::{PhaseSpec, RequestSpec, Resolved, Tolerance};
use dunlin_actors::host::config::hash_spec;
use dunlin_model::hash_engine::HashSpec;
use dunlin_runtime::config::{ClusterConfig, ConfigError, EngineSection, HashEngine};
use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Once;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

/// KV blocks that a device holds at most: enough for any plan, and cheap to make.
const MOST_BLOCKS: u64 = 512;
/// What a step takes where the cluster file pretends no cost: in microseconds, and for each token.
const STEP_US: (u64, u64) = (1_000, 20);
/// Beyond so many nodes, only those of a replica and the head are linked.
const FULL_MESH: usize = 64;

/// What a run needs besides its seed and faults.
#[derive(Debug, Clone)]
pub struct Setup {
    pub name: String,
    /// Line that repeats the run.
    pub repro: String,
    pub config: ClusterConfig,
    pub requests: Vec<RequestSpec>,
    pub phases: PhaseSpec,
    /// What a heal of the core may do without.
    pub tolerance: Tolerance,
    pub spec: HashSpec,
    /// The undisturbed answers, in the order of `requests`.
    pub references: Vec<Vec<u32>>,
}

/// Why there is no record.
#[derive(Debug, thiserror::Error)]
pub enum SimError {
    #[error(transparent)]
    Config(#[from] ConfigError),
    #[error("the cluster did not come up within {waited:?}, without any fault: {reason}")]
    Start { waited: Duration, reason: String },
    #[error("the simulator itself failed: {0}; this is a bug in it")]
    Panic(String),
    #[error("cannot build a runtime: {0}")]
    Runtime(std::io::Error),
}

impl Setup {
    pub fn of(plan: &Resolved) -> Result<Setup, SimError> {
        let config = plan.cluster.config()?;
        let file = if plan.plan.is_empty() { &plan.name } else { &plan.plan };
        let repro = format!("dunlin faults run {file} --mode sim --seed {}", plan.seed);
        let requests = plan.requests.clone();
        let setup = Self::new(plan.name.clone(), repro, config, requests, plan.phases);
        Ok(Setup { tolerance: plan.tolerance, ..setup })
    }

    pub fn new(
        name: String,
        repro: String,
        mut config: ClusterConfig,
        requests: Vec<RequestSpec>,
        phases: PhaseSpec,
    ) -> Setup {
        let spec = pretend(&mut config, &requests);
        let references = requests.iter().map(|r| oracle::answer(&spec, r)).collect();
        let tolerance = Tolerance::default();
        Setup { name, repro, config, requests, phases, tolerance, spec, references }
    }
}

/// The hash engine in place of whatever the file names, on devices that hold little.
fn pretend(config: &mut ClusterConfig, requests: &[RequestSpec]) -> HashSpec {
    // A replica that names its layers must find as many.
    let layers = config.replicas.iter().find_map(|r| r.layers.as_ref()).map(|l| l.iter().sum());
    let mut options = match &config.engine {
        EngineSection::Hash(options) => options.clone(),
        EngineSection::Transformer => HashEngine {
            vocab: 4096,
            layers: layers.unwrap_or(4) as u32,
            context: 4096,
            step_micros: 0,
            token_micros: 0,
        },
    };
    let largest = requests.iter().flat_map(|r| &r.prompt).max().copied().unwrap_or(0);
    options.vocab = options.vocab.max(largest.saturating_add(1));
    if options.step_micros == 0 {
        (options.step_micros, options.token_micros) = STEP_US;
    }
    let mut spec = hash_spec(config, &options);
    spec.heads = spec.heads.max(1);
    let block = spec.layers * spec.heads * config.kv.block_tokens as usize * size_of::<u64>();
    config.kv.memory = config.kv.memory.min(MOST_BLOCKS * block as u64);
    for node in config.nodes.values_mut().filter(|node| node.devices.is_empty()) {
        node.memory = None;
    }
    spec
}

/// Runs the plan's own faults under its own seed.
pub fn run_resolved(plan: &Resolved) -> Result<Record, SimError> {
    run(&Setup::of(plan)?, plan.seed, &plan.faults)
}

/// One run, on this thread.
///
/// # Errors
/// The cluster does not come up by itself; a cluster that breaks under its faults is no error but
/// a record.
pub fn run(setup: &Setup, seed: u64, faults: &[Fault]) -> Result<Record, SimError> {
    quiet_injected_panics();
    INSIDE.set(true);
    let result = catch_unwind(AssertUnwindSafe(|| {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_time()
            .start_paused(true)
            .build()
            .map_err(SimError::Runtime)?;
        runtime.block_on(drive::run(setup, seed, faults))
    }));
    INSIDE.set(false);
    result.unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<&str>().map(|text| text.to_string());
        let text = text.or_else(|| panic.downcast_ref::<String>().cloned());
        Err(SimError::Panic(text.unwrap_or_else(|| "a panic without a message".into())))
    })
}

/// Can this mode inject the kind?
pub fn can_inject(kind: Kind) -> bool {
    Armory::takes(kind) || inject::carries_out(kind)
}

/// Runs `plan(i)` for all `i` below `count` on `threads` threads; `done` gets each record as it is
/// ready, on the thread that made it.
pub fn run_many<P, D>(count: usize, threads: usize, plan: P, done: D)
where
    P: Fn(usize) -> Result<Resolved, SimError> + Sync,
    D: Fn(usize, Result<(Resolved, Record), SimError>) + Sync,
{
    let next = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for _ in 0..threads.max(1) {
            scope.spawn(|| {
                loop {
                    let at = next.fetch_add(1, Ordering::Relaxed);
                    if at >= count {
                        return;
                    }
                    let result = plan(at).and_then(|plan| {
                        let record = run_resolved(&plan)?;
                        Ok((plan, record))
                    });
                    done(at, result);
                }
            });
        }
    });
}

thread_local! {
    static INSIDE: Cell<bool> = const { Cell::new(false) };
}

/// A panic that was injected is not worth a line on stderr, let alone a backtrace.
fn quiet_injected_panics() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let before = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            let text = info.payload().downcast_ref::<String>().map(String::as_str);
            let text = text.or_else(|| info.payload().downcast_ref::<&str>().copied());
            let injected = text.is_some_and(|text| text.starts_with("injected: "));
            if !(injected && INSIDE.get()) {
                before(info);
            }
        }));
    });
}
