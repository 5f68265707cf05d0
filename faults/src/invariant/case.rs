//! One run as checkers see it: the record, the resolved plan, and indexes over both.

use crate::fault::{Expect, Kind, Target};
use crate::record::{Event, FaultRun, Record, RequestInfo, What};
use crate::resolved::{Options, RequestSpec, Resolved};
use dunlin_runtime::config::ClusterConfig;
use std::collections::BTreeMap;

/// A run with its plan.
pub struct Case<'a> {
    pub resolved: &'a Resolved,
    pub record: &'a Record,
    /// `None` if the cluster file cannot be read any more.
    pub config: Option<ClusterConfig>,
    pub streams: BTreeMap<u64, Stream<'a>>,
    pub specs: BTreeMap<u64, &'a RequestSpec>,
    /// Facts in order: when, and what.
    pub facts: Vec<Fact<'a>>,
    ids: BTreeMap<u64, u64>,
}

/// A fact of the record.
#[derive(Debug, Clone, Copy)]
pub struct Fact<'a> {
    pub us: u64,
    pub node: &'a str,
    pub name: &'a str,
    pub subject: &'a str,
    pub key: u64,
    pub value: u64,
}

/// A request from its client's side, in the order seen.
#[derive(Debug, Default)]
pub struct Stream<'a> {
    pub submitted: Option<u64>,
    pub accepted: Vec<u64>,
    pub refused: Option<(u64, &'a str)>,
    /// When, position, id.
    pub tokens: Vec<(u64, u32, &'a str)>,
    /// When, code, message.
    pub ends: Vec<(u64, &'a str, &'a str)>,
    /// Tokens that came after the first end.
    pub late: Vec<u64>,
}

/// Codes of an end that is nobody's failure.
pub const WELL: [&str; 3] = ["finished", "cancelled", "gone"];

impl<'a> Stream<'a> {
    /// The first end, if it was a failure.
    pub fn failure(&self) -> Option<(u64, &'a str, &'a str)> {
        self.ends.first().filter(|(_, code, _)| !WELL.contains(code)).copied()
    }

    pub fn finished(&self) -> bool {
        self.ends.first().is_some_and(|(_, code, _)| *code == "finished")
    }

    pub fn ended_us(&self) -> Option<u64> {
        self.ends.first().map(|(us, _, _)| *us)
    }

    pub fn begin_us(&self) -> u64 {
        self.submitted.or(self.accepted.first().copied()).unwrap_or(0)
    }
}

impl<'a> Case<'a> {
    pub fn new(resolved: &'a Resolved, record: &'a Record) -> Self {
        let mut streams: BTreeMap<u64, Stream<'a>> = BTreeMap::new();
        let mut facts = Vec::new();
        for event in &record.events {
            index(event, &mut streams, &mut facts);
        }
        let ids = record.requests.iter().filter_map(|(n, info)| Some((info.router_id?, *n)));
        let ids = ids.collect();
        let (config, specs) = (resolved.cluster.config().ok(), resolved.requests_by_number());
        Self { resolved, record, config, streams, specs, facts, ids }
    }

    pub fn options(&self) -> &Options {
        &self.resolved.invariants
    }

    pub fn info(&self, request: u64) -> Option<&'a RequestInfo> {
        self.record.requests.get(&request)
    }

    /// The workload's number of a request that the router calls `id`.
    pub fn number(&self, id: u64) -> Option<u64> {
        self.ids.get(&id).copied()
    }

    pub fn facts_of(&self, name: &str) -> impl Iterator<Item = &Fact<'a>> {
        self.facts.iter().filter(move |fact| fact.name == name)
    }

    pub fn lease_us(&self) -> u64 {
        let lease = self.config.as_ref().map_or(1000, |config| config.membership.lease_ms);
        lease.saturating_mul(1000)
    }

    pub fn block_tokens(&self) -> u64 {
        self.config.as_ref().map_or(16, |config| u64::from(config.kv.block_tokens))
    }

    pub fn head(&self) -> &str {
        let own = self.record.nodes.iter().find(|node| node.role == "head");
        own.map(|node| node.name.as_str()).unwrap_or_default()
    }

    /// When the head went down: what its router knew is gone with it, request ids too.
    pub fn head_losses(&self) -> Vec<u64> {
        let head = self.head();
        let losses = self.record.events.iter().filter(|event| {
            matches!(&event.what, What::Node { node, state } if node == head && state == "down")
        });
        losses.map(|event| event.us).collect()
    }

    /// Did every fact reach the record? A mode that lost some says so.
    pub fn facts_complete(&self) -> bool {
        self.record.env.get("facts_lost").is_none_or(|lost| lost == "0")
    }

    /// When the record's last event was.
    pub fn end_us(&self) -> u64 {
        let last = self.record.events.iter().map(|event| event.us).max().unwrap_or(0);
        last.max(self.record.phases.settle_us)
    }

    /// Faults that fired.
    pub fn fired(&self) -> impl Iterator<Item = (u64, &'a FaultRun)> {
        self.record.faults.iter().filter_map(|run| Some((run.began_us?, run)))
    }

    pub fn until(&self, run: &FaultRun) -> u64 {
        until(self.record, run)
    }

    /// Does the fault lie on this node, by its target?
    pub fn on_node(&self, run: &FaultRun, node: &str) -> bool {
        match &run.fault.target {
            Target::Node(name) => name == node,
            Target::Actor { node: name, .. } => name == node,
            Target::Shard { replica, stage, rank } => self.shard_on(replica, *stage, *rank, node),
            Target::Links(links) => links.iter().any(|(a, b)| a == node || b == node),
            Target::Request(_) | Target::All => true,
        }
    }

    /// Was the shard ever on this node: by the cluster file, or a placement?
    fn shard_on(&self, replica: &str, stage: usize, rank: usize, node: &str) -> bool {
        let planned = self.config.iter().flat_map(|config| &config.replicas).any(|own| {
            let place = own.stages.get(stage).and_then(|group| group.get(rank));
            own.name == replica && place.is_some_and(|place| place.node.as_str() == node)
        });
        planned
            || self.record.events.iter().any(|event| match &event.what {
                What::Placement { replica: name, shards, .. } => {
                    name == replica
                        && shards
                            .iter()
                            .any(|s| s.stage == stage && s.rank == rank && s.node == node)
                }
                _ => false,
            })
    }

    /// Did a fault that may change tokens by design fire before `us`?
    pub fn measured_before(&self, us: u64) -> bool {
        self.fired().any(|(began, run)| run.expect() == Expect::Measure && began <= us)
    }

    pub fn fired_kind(&self, kinds: &[Kind], from: u64, to: u64) -> bool {
        self.fired().any(|(began, run)| {
            kinds.contains(&run.kind()) && began <= to && self.until(run).max(began) >= from
        })
    }
}

/// Until when a fault may show: its end, or the heal where it has none.
pub(super) fn until(record: &Record, run: &FaultRun) -> u64 {
    let own = run.ended_us.or(run.began_us.zip(run.fault.lasts_us).map(|(a, b)| a + b));
    own.unwrap_or(record.phases.chaos_us)
}

fn index<'a>(event: &'a Event, streams: &mut BTreeMap<u64, Stream<'a>>, facts: &mut Vec<Fact<'a>>) {
    let us = event.us;
    match &event.what {
        What::Submitted { request } => {
            streams.entry(*request).or_default().submitted.get_or_insert(us);
        }
        What::Accepted { request } => streams.entry(*request).or_default().accepted.push(us),
        What::Refused { request, code } => {
            streams.entry(*request).or_default().refused = Some((us, code));
        }
        What::Token { request, position, id } => {
            let stream = streams.entry(*request).or_default();
            stream.tokens.push((us, *position, id));
            if !stream.ends.is_empty() {
                stream.late.push(us);
            }
        }
        What::Ended { request, code, message } => {
            streams.entry(*request).or_default().ends.push((us, code, message));
        }
        What::Fact { node, name, subject, key, value } => {
            facts.push(Fact { us, node, name, subject, key: *key, value: *value });
        }
        What::Node { .. } | What::Gauge { .. } | What::Placement { .. } | What::Served { .. } => {}
    }
}
