//! `heal = "core"`: which nodes must serve again when the chaos ends, and which stay broken.
//!
//! A cluster that is well once everything is mended proves less than one that is well while what it
//! promises to do without is still missing (TigerBeetle's VOPR ends its runs in the same way). So
//! the heal leaves as many broken nodes as the tolerance allows, the *outside*: what holds only
//! them, or a link of theirs, goes on. All others are the *core*. It has the head, every gateway
//! and one whole replica at least, so that it can serve, and liveness is asked of it alone.
//!
//! Pure: the modes say what holds whom.

use crate::fault::Target;
use crate::resolved::{Heal, PhaseSpec, Tolerance};
use dunlin_runtime::config::{ClusterConfig, ReplicaConfig};
use std::collections::BTreeSet;

/// What a fault that is in force holds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Hold {
    Nodes(BTreeSet<String>),
    Links(Vec<(String, String)>),
    /// Clients, or everything: always healed.
    All,
}

impl Hold {
    /// `at`: the nodes where a shard's or actor's fault lies, as the mode knows.
    pub fn of(target: &Target, at: impl FnOnce() -> Vec<String>) -> Hold {
        match target {
            Target::Links(links) => Hold::Links(links.clone()),
            Target::Request(_) | Target::All => Hold::All,
            Target::Node(_) | Target::Actor { .. } | Target::Shard { .. } => {
                Hold::Nodes(at().into_iter().collect())
            }
        }
    }

    /// Does it hold nothing of the core?
    pub fn stays(&self, outside: &BTreeSet<String>) -> bool {
        match self {
            Hold::Nodes(nodes) => !nodes.is_empty() && nodes.is_subset(outside),
            Hold::Links(links) => {
                let leaves = |(a, b): &(String, String)| outside.contains(a) || outside.contains(b);
                !links.is_empty() && links.iter().all(leaves)
            }
            Hold::All => false,
        }
    }

    fn nodes(&self) -> BTreeSet<&String> {
        match self {
            Hold::Nodes(nodes) => nodes.iter().collect(),
            Hold::Links(links) => links.iter().flat_map(|(a, b)| [a, b]).collect(),
            Hold::All => BTreeSet::new(),
        }
    }
}

/// The nodes that the heal leaves as they are; none unless the plan says `heal = "core"`.
pub fn outside(
    config: &ClusterConfig,
    phases: &PhaseSpec,
    tolerance: &Tolerance,
    holds: &[Hold],
) -> BTreeSet<String> {
    let mut outside = BTreeSet::new();
    if phases.heal == Heal::All {
        return outside;
    }
    let held: BTreeSet<&String> = holds.iter().flat_map(Hold::nodes).collect();
    for node in held {
        if outside.len() >= tolerance.nodes_down as usize {
            break;
        }
        let mut more = outside.clone();
        more.insert(node.clone());
        let gains = holds.iter().any(|hold| hold.stays(&more) && !hold.stays(&outside));
        if gains && may_leave(config, &more) {
            outside = more;
        }
    }
    outside
}

/// Can all others serve by themselves?
fn may_leave(config: &ClusterConfig, outside: &BTreeSet<String>) -> bool {
    let needed = |node: &String| {
        let found = config.nodes.iter().find(|(name, _)| name.as_str() == node);
        found.is_none_or(|(name, node)| *name == config.cluster.head || node.http.is_some())
    };
    // Without replicas in the file the planner places on any node that is left.
    let spare = || {
        let on =
            |(name, node): (&dunlin_runtime::NodeName, &dunlin_runtime::config::NodeConfig)| {
                !node.devices.is_empty() && !outside.contains(name.as_str())
            };
        config.nodes.iter().any(on)
    };
    let serves = match config.replicas.is_empty() {
        true => spare(),
        false => config.replicas.iter().any(|replica| is_of_core(replica, outside)),
    };
    serves && !outside.iter().any(needed)
}

fn is_of_core(replica: &ReplicaConfig, outside: &BTreeSet<String>) -> bool {
    replica.stages.iter().flatten().all(|shard| !outside.contains(shard.node.as_str()))
}

/// How many replicas of the cluster file the core must bring back.
pub fn wanted(config: &ClusterConfig, outside: &BTreeSet<String>) -> u64 {
    let whole = config.replicas.iter().filter(|replica| is_of_core(replica, outside)).count();
    if config.replicas.is_empty() { 1 } else { whole as u64 }
}

/// Does all of what answers as `served_by` (`node/device`) lie in the core?
pub fn serves(served_by: &[String], outside: &BTreeSet<String>) -> bool {
    served_by.iter().all(|place| {
        let node = place.split_once('/').map_or(place.as_str(), |(node, _)| node);
        !outside.contains(node)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::resolved::Keep;

    const PAIR: &str = include_str!("../../plans/clusters/pair.toml");
    const PIPELINES: &str = include_str!("../../plans/clusters/pipelines.toml");

    fn set(nodes: &[&str]) -> BTreeSet<String> {
        nodes.iter().map(|node| node.to_string()).collect()
    }

    fn left(file: &str, heal: Heal, nodes_down: u32, holds: &[Hold]) -> BTreeSet<String> {
        let config = ClusterConfig::parse(file, "c.toml").expect("a file of the repository");
        let phases = PhaseSpec { warmup_us: 0, chaos_us: 1, settle_us: 1, heal };
        let tolerance = Tolerance { nodes_down, keep: Keep::StageAndHead };
        outside(&config, &phases, &tolerance, holds)
    }

    fn nodes(names: &[&str]) -> Hold {
        Hold::Nodes(set(names))
    }

    fn links(pairs: &[(&str, &str)]) -> Hold {
        Hold::Links(pairs.iter().map(|(a, b)| (a.to_string(), b.to_string())).collect())
    }

    #[test]
    fn what_tolerance_can_do_without_stays_broken() {
        let one = |hold| left(PAIR, Heal::Core, 1, &[hold]);
        assert_eq!(one(nodes(&["left"])), set(&["left"]));
        assert_eq!(left(PAIR, Heal::All, 1, &[nodes(&["left"])]), set(&[]));
        assert_eq!(left(PAIR, Heal::Core, 0, &[nodes(&["left"])]), set(&[]));
        // The head is always of the core; of a link the other end leaves.
        assert_eq!(one(nodes(&["front"])), set(&[]));
        assert_eq!(one(links(&[("front", "right"), ("right", "front")])), set(&["right"]));
        // One whole replica stays, whatever the tolerance says.
        let both = [nodes(&["left"]), nodes(&["right"])];
        assert_eq!(left(PAIR, Heal::Core, 2, &both), set(&["left"]));
        // What holds the core as well is healed, and so are clients.
        assert_eq!(one(nodes(&["front", "left"])), set(&[]));
        assert_eq!(one(Hold::All), set(&[]));
    }

    #[test]
    fn liveness_is_asked_of_what_the_core_can_serve() {
        let config = ClusterConfig::parse(PAIR, "c.toml").expect("a file of the repository");
        assert_eq!((wanted(&config, &set(&[])), wanted(&config, &set(&["left"]))), (2, 1));
        assert!(serves(&["right/cpu".into()], &set(&["left"])));
        assert!(!serves(&["right/cpu".into(), "left/cpu".into()], &set(&["left"])));
        // A pipeline without one of its nodes is no capacity.
        let config = ClusterConfig::parse(PIPELINES, "c.toml").expect("a file of the repository");
        let node = config.replicas[0].stages[0][0].node.to_string();
        let all = wanted(&config, &set(&[]));
        assert_eq!(wanted(&config, &BTreeSet::from([node.clone()])), all - 1);
        let left = left(PIPELINES, Heal::Core, 1, &[nodes(&[&node])]);
        assert_eq!(left, BTreeSet::from([node]), "the other pipeline can serve");
    }
}
