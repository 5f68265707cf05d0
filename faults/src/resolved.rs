//! A plan with every draw made, for one seed and one mode: all that a mode needs to carry it out.
//!
//! It is written as `resolved.toml` into the run folder; reading that file back and running it is
//! a replay. Every number fits the 53 bits that TOML and JSON both keep.

use crate::fault::{Fault, Mode};
use dunlin_runtime::config::{ClusterConfig, ConfigError};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};

/// What `schema` must be.
pub const RESOLVED_SCHEMA: &str = "fault-resolved/1";

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Resolved {
    pub schema: String,
    pub name: String,
    #[serde(default)]
    pub about: String,
    /// The plan's file, for the line that repeats the run.
    #[serde(default)]
    pub plan: String,
    pub mode: Mode,
    pub seed: u64,
    /// What a sweep set for this cell, and what the command line set.
    #[serde(default)]
    pub set: Vec<(String, String)>,
    pub cluster: ClusterSpec,
    pub phases: PhaseSpec,
    #[serde(default)]
    pub tolerance: Tolerance,
    #[serde(default)]
    pub invariants: Options,
    #[serde(default)]
    pub report: ReportSpec,
    #[serde(default)]
    pub faults: Vec<Fault>,
    #[serde(default)]
    pub requests: Vec<RequestSpec>,
}

/// The cluster file's text and what is set over it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ClusterSpec {
    pub file: String,
    pub text: String,
    #[serde(default)]
    pub set: Vec<(String, String)>,
}

impl ClusterSpec {
    pub fn config(&self) -> Result<ClusterConfig, ConfigError> {
        let mut config = ClusterConfig::parse(&self.text, &self.file)?;
        for (key, value) in &self.set {
            config.set(key, value)?;
        }
        Ok(config)
    }
}

/// Lengths of the phases. Faults lie in the chaos phase, which begins after the warm-up.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct PhaseSpec {
    pub warmup_us: u64,
    pub chaos_us: u64,
    pub settle_us: u64,
    #[serde(default)]
    pub heal: Heal,
}

/// What is undone when the chaos phase ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Heal {
    #[default]
    All,
    /// Only what tolerance needs: faults that it would mask stay; see [`crate::heal`].
    Core,
}

/// What the system promises to mask; the swarm stays inside.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Tolerance {
    /// Nodes that may be out of service (down, paused, cut off) at once.
    pub nodes_down: u32,
    pub keep: Keep,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Keep {
    /// `one live copy of every stage, and the head`
    StageAndHead,
    /// `the head`
    Head,
}

impl Default for Tolerance {
    fn default() -> Self {
        Self { nodes_down: 1, keep: Keep::StageAndHead }
    }
}

/// One request of the workload.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RequestSpec {
    /// Counts from 0 in order of arrival; what [`crate::fault::Target::Request`] names.
    pub number: u64,
    pub arrival_us: u64,
    pub tenant: String,
    /// Token ids below the vocabulary of the hash engine, or plain ids of any tokenizer's first
    /// thousands. [`RequestSpec::text`] says the same as text.
    pub prompt: Vec<u32>,
    pub max_tokens: u32,
    /// Go on past the end-of-text token, so that the answer is `max_tokens` long.
    #[serde(default)]
    pub ignore_eos: bool,
    /// 0 is greedy.
    #[serde(default)]
    pub temperature: f64,
    #[serde(default)]
    pub seed: u64,
    /// The client cancels once it has so many tokens (0: before the first).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cancel_after: Option<u32>,
    /// From its arrival.
    pub deadline_us: u64,
}

const WORDS: [&str; 64] = [
    "the", "river", "was", "slow", "and", "a", "bird", "stood", "on", "one", "leg", "while",
    "water", "ran", "under", "stones", "that", "had", "been", "there", "for", "years", "no",
    "wind", "came", "from", "north", "but", "clouds", "moved", "over", "fields", "where", "people",
    "cut", "grass", "they", "sang", "old", "songs", "about", "ships", "which", "never", "returned",
    "in", "winter", "when", "ice", "closed", "harbour", "all", "of", "them", "went", "home", "to",
    "bread", "fire", "stories", "long", "as", "night", "itself",
];

impl RequestSpec {
    /// The prompt as text: one common English word for each token; alike prompts begin alike.
    pub fn text(&self) -> String {
        let words = self.prompt.iter().map(|id| {
            let index = *id as usize % WORDS.len();
            WORDS.get(index).copied().unwrap_or("the")
        });
        words.collect::<Vec<_>>().join(" ")
    }
}

/// Options of the invariants, from the plan's `[[invariant]]` entries.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Options {
    /// Ids that are switched off. The verdict names them.
    pub off: BTreeSet<String>,
    /// Ids that are checked only where a plan asks for them.
    pub on: BTreeSet<String>,
    /// I2.
    pub oracle: Oracle,
    /// I15: of each supervisor; 0 means the cluster file's.
    pub restart_max: u32,
    pub restart_within_us: u64,
    /// I23: how long after its deadline a request may end.
    pub grace_us: u64,
    /// L1: an open request gets a token at least so often once all is healed.
    pub progress_us: u64,
    /// Length of a token gap from which a request counts as stalled (blast radius).
    pub stall_us: u64,
    /// I22: how long after a clock jump no decision may follow from it.
    pub clock_window_us: u64,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            off: BTreeSet::new(),
            on: BTreeSet::new(),
            oracle: Oracle::Bitwise,
            restart_max: 0,
            restart_within_us: 0,
            grace_us: 5_000_000,
            progress_us: 15_000_000,
            stall_us: 500_000,
            clock_window_us: 3_000_000,
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Oracle {
    #[default]
    Bitwise,
    /// The mode teacher-forces the delivered sequence and records as reference what passed.
    Margin,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct ReportSpec {
    /// Folder of an earlier run.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub compare: Option<String>,
    /// For goodput: time to first token, and longest gap between tokens.
    pub slo_ttft_us: u64,
    pub slo_gap_us: u64,
    pub fail_on: BTreeSet<FailOn>,
}

impl Default for ReportSpec {
    fn default() -> Self {
        let fail_on = [FailOn::Invariant, FailOn::UnverifiedFault, FailOn::FaultNeverFired];
        Self {
            compare: None,
            slo_ttft_us: 2_000_000,
            slo_gap_us: 250_000,
            fail_on: fail_on.into_iter().collect(),
        }
    }
}

/// What keeps a run from passing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum FailOn {
    Invariant,
    UnverifiedFault,
    FaultNeverFired,
}

/// A resolved plan that cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum ResolvedError {
    #[error("{file} is not a resolved plan: {reason}; `dunlin faults resolve PLAN` writes one")]
    Syntax { file: String, reason: String },
    #[error("{file} has schema {found:?}, this build reads {RESOLVED_SCHEMA:?}; resolve it anew")]
    Schema { file: String, found: String },
    #[error("the resolved plan cannot be written as TOML: {0}")]
    Write(String),
}

impl Resolved {
    pub fn to_toml(&self) -> Result<String, ResolvedError> {
        toml::to_string(self).map_err(|e| ResolvedError::Write(e.to_string()))
    }

    pub fn from_toml(text: &str, file: &str) -> Result<Resolved, ResolvedError> {
        let found: Resolved = toml::from_str(text).map_err(|e| {
            let (file, reason) = (file.to_string(), e.to_string());
            ResolvedError::Syntax { file, reason }
        })?;
        if found.schema != RESOLVED_SCHEMA {
            return Err(ResolvedError::Schema { file: file.to_string(), found: found.schema });
        }
        Ok(found)
    }

    pub fn fault(&self, id: &str) -> Option<&Fault> {
        self.faults.iter().find(|fault| fault.id == id)
    }

    pub fn requests_by_number(&self) -> BTreeMap<u64, &RequestSpec> {
        self.requests.iter().map(|request| (request.number, request)).collect()
    }
}
