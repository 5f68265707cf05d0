//! Samples of the nodes' books, as both modes put them into the record: what waits where, the
//! bound that the cluster file sets for it, and memory. I9 and I17 read them.
//!
//! A value is recorded when it has changed; a limit once, before the first value that it is for.
//! It knows nothing of clocks or sockets: a mode says what it has seen.

use crate::record::{What, gauges};
use dunlin_actors::host::config::host_options;
use dunlin_actors::messages::{LoadReport, RouterStatus};
use dunlin_runtime::Limits;
use dunlin_runtime::config::ClusterConfig;
use std::collections::BTreeMap;
use std::time::Duration;

/// A node's own part of its memory: program, tokenizer, threads, buffers of a few steps.
const OWN_BYTES: u64 = 384 << 20;

/// What was sampled so far, so that only changes are recorded.
#[derive(Debug)]
pub struct Gauges {
    bounds: Bounds,
    told: BTreeMap<(String, String), f64>,
    /// Bytes that each shard on a node has reserved, by node and `REPLICA/STAGE/RANK`.
    reserved: BTreeMap<(String, String), u64>,
}

/// What the cluster file allows.
#[derive(Debug, Clone, Copy)]
struct Bounds {
    open: u64,
    waiting: u64,
    /// Sequences on one replica: running, and sent ahead.
    assigned: u64,
    /// Bytes of mail for one peer.
    mail: u64,
    peers: u64,
}

impl Gauges {
    pub fn new(config: &ClusterConfig) -> Self {
        let peers = config.nodes.len().saturating_sub(1) as u64;
        let mut bounds = Bounds {
            open: config.limits.max_open_requests.into(),
            waiting: config.scheduler.max_waiting.into(),
            assigned: config.scheduler.max_running.into(),
            mail: Limits::default().peer_queue_bytes as u64,
            peers,
        };
        if let Some(own) = config.nodes.values().next() {
            let ahead = host_options(config, own, Duration::ZERO).router.queue_ahead;
            bounds.assigned += u64::from(ahead.max(1));
        }
        Self { bounds, told: BTreeMap::new(), reserved: BTreeMap::new() }
    }

    /// Bytes that wait for a peer.
    pub fn mail(&mut self, node: &str, peer: &str, bytes: u64, to: &mut Vec<What>) {
        self.queue(node, &format!("mail to {peer}"), (bytes, self.bounds.mail), to);
    }

    pub fn router(&mut self, node: &str, status: &RouterStatus, to: &mut Vec<What>) {
        let Bounds { open, waiting, assigned, .. } = self.bounds;
        self.queue(node, "open requests", (status.open_requests, open), to);
        // What was accepted once is never refused: a replay waits beside the others.
        let most = waiting.max(open);
        self.queue(node, "requests without a replica", (status.waiting_requests, most), to);
        for replica in &status.replicas {
            let name = format!("requests on {}", replica.info.replica);
            self.queue(node, &name, (replica.assigned, assigned), to);
        }
    }

    pub fn scheduler(&mut self, node: &str, replica: &str, load: &LoadReport, to: &mut Vec<What>) {
        let sequences = u64::from(load.running) + u64::from(load.waiting);
        let name = format!("sequences of {replica}");
        self.queue(node, &name, (sequences, self.bounds.assigned), to);
        let held = load.kv_blocks_live + load.kv_blocks_cached;
        let name = format!("KV blocks of {replica}");
        self.queue(node, &name, (held, load.kv_blocks_total), to);
    }

    /// A shard has reserved so much for its weights, KV blocks and workspace.
    pub fn reserved(&mut self, node: &str, shard: &str, bytes: u64, to: &mut Vec<What>) {
        self.reserved.insert((node.to_string(), shard.to_string()), bytes);
        let of = |(name, _): &(&(String, String), &u64)| name.0 == node;
        let devices: u64 = self.reserved.iter().filter(of).map(|(_, bytes)| bytes).sum();
        // A node without a device holds its own things alone.
        let own = OWN_BYTES + self.bounds.peers * self.bounds.mail;
        self.value(node, gauges::MEMORY_RESERVED.to_string(), own + devices, to);
    }

    /// Bytes that the node's process has to itself.
    pub fn memory(&mut self, node: &str, used: u64, to: &mut Vec<What>) {
        self.value(node, gauges::MEMORY_USED.to_string(), used, to);
    }

    /// The process has ended, and what it held with it.
    pub fn gone(&mut self, node: &str) {
        self.reserved.retain(|(of, _), _| of != node);
        self.told.retain(|(of, _), _| of != node);
    }

    fn queue(&mut self, node: &str, name: &str, (value, limit): (u64, u64), to: &mut Vec<What>) {
        self.value(node, format!("{}{name}", gauges::LIMIT), limit, to);
        self.value(node, format!("{}{name}", gauges::QUEUE), value, to);
    }

    fn value(&mut self, node: &str, name: String, value: u64, to: &mut Vec<What>) {
        let value = value as f64;
        let key = (node.to_string(), name);
        if self.told.get(&key) == Some(&value) {
            return;
        }
        to.push(What::Gauge { node: key.0.clone(), name: key.1.clone(), value });
        self.told.insert(key, value);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::invariant::tests::good;

    const PAIR: &str = include_str!("../../plans/clusters/pair.toml");

    fn gauges() -> Gauges {
        Gauges::new(&ClusterConfig::parse(PAIR, "pair.toml").expect("a file of the repository"))
    }

    /// What the invariants say of a good run with these samples in it.
    fn breaks(samples: Vec<What>) -> Vec<String> {
        let mut run = good();
        samples.into_iter().for_each(|what| run.push(3_000_000, what));
        run.slugs()
    }

    #[test]
    fn what_is_within_its_limit_breaks_nothing_and_what_is_over_it_does() {
        type Sample = fn(&mut Gauges, u64, &mut Vec<What>);
        let cases: [(Sample, u64); 5] = [
            (|g, n, to| g.mail("front", "left", n, to), 64 << 20),
            (
                |g, n, to| {
                    let status = RouterStatus { open_requests: n, ..Default::default() };
                    g.router("front", &status, to);
                },
                1024,
            ),
            (
                |g, n, to| {
                    let waiting = u32::try_from(n).expect("small");
                    let load = LoadReport { running: 0, waiting, ..Default::default() };
                    g.scheduler("left", "r0", &load, to);
                },
                gauges().bounds.assigned,
            ),
            (
                |g, n, to| {
                    let load = LoadReport {
                        kv_blocks_live: n,
                        kv_blocks_cached: 2,
                        kv_blocks_total: 512,
                        ..Default::default()
                    };
                    g.scheduler("left", "r0", &load, to);
                },
                510,
            ),
            (
                |g, n, to| {
                    g.reserved("left", "r0/0/0", 1 << 20, to);
                    g.memory("left", n, to);
                },
                OWN_BYTES + 2 * (64 << 20) + (1 << 20),
            ),
        ];
        for (at, (sample, limit)) in cases.iter().enumerate() {
            let with = |value: u64| {
                let mut to = Vec::new();
                sample(&mut gauges(), value, &mut to);
                breaks(to)
            };
            assert!(with(*limit).is_empty(), "case {at}: {:?}", with(*limit));
            let id = if at == 4 { "I9/over-reserved" } else { "I17/over-limit" };
            assert_eq!(with(limit + 1), [id], "case {at}");
        }
    }

    #[test]
    fn only_changes_are_recorded() {
        let (mut gauges, mut to) = (gauges(), Vec::new());
        gauges.mail("front", "left", 7, &mut to);
        gauges.mail("front", "left", 7, &mut to);
        assert_eq!(to.len(), 2, "the limit and one value: {to:?}");
        gauges.mail("front", "left", 8, &mut to);
        assert_eq!(to.len(), 3);
        gauges.gone("front");
        gauges.mail("front", "left", 8, &mut to);
        assert_eq!(to.len(), 5, "of another life: {to:?}");
    }
}
