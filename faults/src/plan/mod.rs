//! Fault plans as people write them: TOML, strict, `schema = "fault-plan/1"`.
//!
//! [`Plan::read`] reads and checks a whole plan together with its cluster file: an unknown key,
//! kind, target, node, event or message, a parameter that a kind does not read, or a kind that a
//! mode cannot inject is an error that names file, line, key, value and the mend.
//! [`Plan::resolve`] makes every draw for one seed and one mode.

mod check;
mod fault;
mod read;
mod resolve;
mod swarm;
mod sweep;
mod target;
#[cfg(test)]
mod tests;
mod values;
mod workload;

use crate::fault::{Edge, Expect, Kind, Mode, Params};
use crate::resolved::{ClusterSpec, Options, PhaseSpec, ReportSpec, Tolerance};
use dunlin_runtime::config::tree::Source;
use dunlin_runtime::config::{ClusterConfig, ConfigError};
use std::io;
use std::path::{Path, PathBuf};

pub use self::sweep::Axis;
pub use self::values::{Span, parse_duration};

/// An error in a plan or its cluster file; shows the line as rustc does.
pub type PlanError = ConfigError;

/// What `schema` must be.
pub const PLAN_SCHEMA: &str = "fault-plan/1";

/// A plan, read and checked.
#[derive(Debug, Clone)]
pub struct Plan {
    pub name: String,
    pub about: String,
    pub seed: u64,
    pub modes: Vec<Mode>,
    pub cluster: ClusterSpec,
    pub workload: Workload,
    pub phases: PhaseSpec,
    pub tolerance: Tolerance,
    pub faults: Vec<FaultPlan>,
    pub swarm: Option<Swarm>,
    pub sweep: Vec<Axis>,
    pub options: Options,
    pub report: ReportSpec,
    /// The cluster file with everything set over it.
    pub config: ClusterConfig,
    source: Source,
    text: String,
}

#[derive(Debug, Clone, PartialEq)]
pub struct Workload {
    pub requests: u64,
    pub arrivals: Arrivals,
    pub prompt_tokens: Span,
    pub output_tokens: Span,
    pub sampling: Sampling,
    pub tenants: u64,
    /// Share of the requests whose prompts begin alike.
    pub shared_prefix: f64,
    /// Share of the requests that their client cancels.
    pub cancel: f64,
    pub deadline_us: u64,
    pub ignore_eos: bool,
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Arrivals {
    Poisson {
        per_second: f64,
    },
    Uniform {
        per_second: f64,
    },
    /// `size` at once, each `every_us`.
    Bursts {
        every_us: u64,
        size: u64,
    },
    /// All at once, at the start of the chaos phase.
    AtOnce,
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Sampling {
    Greedy,
    /// `seed`: the same for all requests, or drawn for each.
    Random {
        temperature: f64,
        seed: Option<u64>,
    },
}

/// One `[[fault]]`.
#[derive(Debug, Clone, PartialEq)]
pub struct FaultPlan {
    pub id: String,
    pub kind: Kind,
    pub target: TargetPlan,
    pub when: When,
    /// Microseconds.
    pub lasts: Option<Span>,
    pub times: Span,
    /// The fixed ones; those that are drawn are in `drawn`.
    pub params: Params,
    pub drawn: Drawn,
    pub expect: Expect,
}

/// Parameters that may be ranges.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Drawn {
    pub nth: Option<Span>,
    pub layer: Option<Span>,
    pub position: Option<Span>,
    pub bit: Option<Span>,
    pub index: Option<Span>,
    pub count: Option<Span>,
}

#[derive(Debug, Clone, PartialEq)]
pub struct TargetPlan {
    pub select: Select,
    pub pick: Pick,
}

/// What a target may be.
#[derive(Debug, Clone, PartialEq)]
pub enum Select {
    /// `None`: any.
    Node(Option<String>),
    Role {
        role: String,
        node: Option<String>,
        replica: Option<String>,
        place: ShardPlace,
    },
    Device {
        node: String,
        device: String,
    },
    /// Ends are nodes; `None` is any.
    Link {
        from: Option<String>,
        to: Option<String>,
        both: bool,
    },
    Groups {
        groups: Vec<Vec<String>>,
        both: bool,
    },
    Shape {
        shape: Shape,
        both: bool,
    },
    Request(Option<u64>),
    All,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ShardPlace {
    pub stage: Option<u64>,
    pub rank: Option<u64>,
}

/// How a partition cuts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Shape {
    /// One node from all others.
    One,
    /// Two halves.
    Halves,
    /// Each node sees only its two neighbours in a ring.
    Ring,
    /// Two halves, and one node that sees both.
    Bridge,
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Pick {
    One,
    All,
    Count(u64),
    Share(f64),
}

/// When a fault begins, before the draws.
#[derive(Debug, Clone, PartialEq)]
pub enum When {
    At(Span),
    Token { request: Option<u64>, token: Span },
    Step { replica: Option<String>, step: Span },
    Message { link: Option<(String, String)>, message: String, nth: Span },
    Event { name: String, nth: Span },
    After { fault: String, edge: Edge, delay: Span },
    Site { site: String, nth: Span },
}

/// The random part.
#[derive(Debug, Clone, PartialEq)]
pub struct Swarm {
    /// Empty: all kinds, by the catalogue's weights.
    pub kinds: Vec<(Kind, u64)>,
    pub mean_gap_us: u64,
    pub max_active: u64,
    /// Chance that a site is on in a run, and that it fires when it is reached.
    pub buggify: Option<(f64, f64)>,
}

impl Plan {
    /// Reads and checks a plan. Its cluster file is found relative to it.
    pub fn read(path: &Path) -> Result<Plan, PlanError> {
        let file = path.display().to_string();
        let text = std::fs::read_to_string(path).map_err(|e| ConfigError::unreadable(&file, &e))?;
        Self::parse(&text, &file)
    }

    pub fn parse(text: &str, file: &str) -> Result<Plan, PlanError> {
        Self::parse_with(text, file, &|path| std::fs::read_to_string(path))
    }

    /// As [`Plan::parse`], with another way to get at the cluster file.
    pub fn parse_with(
        text: &str,
        file: &str,
        load: &dyn Fn(&Path) -> io::Result<String>,
    ) -> Result<Plan, PlanError> {
        Self::from_source(Source::parse(text, file)?, text, load)
    }

    /// Sets one value over the file's, as a sweep or `--set fault.kill.when.token=17` does: faults
    /// by their id. On an error nothing changes.
    pub fn set(&mut self, key: &str, value: &str) -> Result<(), PlanError> {
        let mut source = self.source.clone();
        source.set(key, value)?;
        // Every cell of a sweep is of the very same cluster file.
        let load = |path: &Path| match path == Path::new(&self.cluster.file) {
            true => Ok(self.cluster.text.clone()),
            false => std::fs::read_to_string(path),
        };
        let read = Self::from_source(source, &self.text, &load)?;
        *self = read;
        Ok(())
    }

    /// Everything that was set over the file.
    pub fn overrides(&self) -> &[(String, String)] {
        &self.source.overrides
    }

    pub fn file(&self) -> &str {
        &self.source.file
    }

    /// The file as it was read.
    pub fn text(&self) -> &str {
        &self.text
    }

    fn from_source(
        source: Source,
        text: &str,
        load: &dyn Fn(&Path) -> io::Result<String>,
    ) -> Result<Plan, PlanError> {
        let plan = read::plan(source, text, load)?;
        check::all(&plan)?;
        Ok(plan)
    }

    fn folder(file: &str) -> PathBuf {
        Path::new(file).parent().map(Path::to_path_buf).unwrap_or_default()
    }
}
