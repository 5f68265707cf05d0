//! Turns what the configuration wants, the nodes that are there and the model's shape into a
//! [`ReplicaPlan`], or into an error that names every number needed to mend it.

use crate::engines::ModelShape;
use crate::messages::{NodeDescription, ReplicaEpoch, ReplicaPlan, ShardPlace};
use dunlin_model::engine::StageSpec;
use dunlin_runtime::NodeName;
use std::collections::BTreeMap;

/// A replica as wanted: stages in order, each a list of (node, device) ranks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReplicaWant {
    pub name: String,
    pub stages: Vec<Vec<(NodeName, String)>>,
    /// Layers per stage, where the configuration says so.
    pub layers: Option<Vec<usize>>,
}

impl ReplicaWant {
    /// The nodes that have a part in it, each once, in stage order.
    pub fn nodes(&self) -> Vec<NodeName> {
        let mut nodes: Vec<NodeName> = Vec::new();
        for (node, _) in self.stages.iter().flatten() {
            if !nodes.contains(node) {
                nodes.push(node.clone());
            }
        }
        nodes
    }

    /// Every device once, for messages: `a/cpu, b/cpu`.
    pub fn places(&self) -> String {
        let mut places: Vec<String> = Vec::new();
        for (node, device) in self.stages.iter().flatten() {
            let place = format!("{node}/{device}");
            if !places.contains(&place) {
                places.push(place);
            }
        }
        places.join(", ")
    }
}

/// Bytes in use, by device.
pub type Taken = BTreeMap<(NodeName, String), u64>;

/// Sizes that hold for every replica.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PlanLimits {
    pub block_tokens: usize,
    /// KV bytes per device.
    pub kv_bytes: u64,
    pub step_tokens: usize,
}

/// Why a replica cannot be placed as wanted. Permanent until the configuration or a device
/// changes.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PlanError {
    #[error(
        "[[replica]] {replica}: `stages` names device '{device}' of node '{node}', which has {have:?}"
    )]
    NoDevice { replica: String, node: NodeName, device: String, have: Vec<String> },
    #[error(
        "[[replica]] {replica}: `layers` = {layers:?} add up to {sum}, the model {model} has {have}"
    )]
    Layers { replica: String, layers: Vec<usize>, sum: usize, model: String, have: usize },
    #[error(
        "[[replica]] {replica}: {stages} stages for a model of {layers} layers leave some empty"
    )]
    TooManyStages { replica: String, stages: usize, layers: usize },
    #[error("[[replica]] {replica}: stage {stage} cannot be split over {ranks} ranks: {reason}")]
    Ranks { replica: String, stage: usize, ranks: usize, reason: String },
    #[error(
        "[[replica]] {replica} does not fit: {node}/{device} needs {need} bytes (weights {weights}, \
         KV {kv}) and has {have}; {mend}"
    )]
    DoesNotFit {
        replica: String,
        node: NodeName,
        device: String,
        need: u64,
        weights: u64,
        kv: u64,
        have: u64,
        mend: String,
    },
    #[error(
        "node '{node}' has model {have}, node '{other}' has {expected}; give both the same file"
    )]
    ModelDiffers { node: NodeName, have: String, other: NodeName, expected: String },
}

/// Plans `want` over `nodes` (which must hold all of its nodes).
pub fn plan(
    want: &ReplicaWant,
    epoch: ReplicaEpoch,
    nodes: &BTreeMap<NodeName, NodeDescription>,
    model: &dyn ModelShape,
    limits: &PlanLimits,
) -> Result<ReplicaPlan, PlanError> {
    same_model(want, nodes)?;
    let counts = layer_counts(want, model)?;
    let stages = want.stages.len();
    let mut shards = Vec::new();
    let mut begin = 0;
    for (stage, ranks) in want.stages.iter().enumerate() {
        model.check_ranks(ranks.len()).map_err(|reason| PlanError::Ranks {
            replica: want.name.clone(),
            stage,
            ranks: ranks.len(),
            reason,
        })?;
        for (rank, (node, device)) in ranks.iter().enumerate() {
            let spec = StageSpec {
                layers: begin..begin + counts[stage],
                first: stage == 0,
                last: stage + 1 == stages,
                rank,
                ranks: ranks.len(),
                kv_blocks: 0,
                block_tokens: limits.block_tokens,
                max_tokens: limits.step_tokens,
            };
            shards.push(ShardPlace { node: node.clone(), device: device.clone(), stage, spec });
        }
        begin += counts[stage];
    }
    let blocks = shared_blocks(&shards, model, limits);
    for place in &mut shards {
        place.spec.kv_blocks = blocks;
    }
    fits(want, &shards, nodes, model)?;
    Ok(ReplicaPlan {
        replica: want.name.clone(),
        epoch,
        model: model.name().into(),
        shards,
        stages,
    })
}

/// Without a `[[replica]]`: one replica per device where each device holds the whole model, else
/// one pipeline over all of them, weighted by memory. Also says why, for the log.
pub fn plan_by_itself(
    nodes: &BTreeMap<NodeName, NodeDescription>,
    model: &dyn ModelShape,
    limits: &PlanLimits,
) -> (Vec<ReplicaWant>, String) {
    let devices: Vec<(NodeName, String, u64)> = nodes
        .iter()
        .flat_map(|(name, node)| {
            node.devices.iter().map(|d| (name.clone(), d.id.clone(), d.free_bytes))
        })
        .collect();
    let whole = StageSpec::whole(model.layers(), 0, limits.block_tokens, limits.step_tokens);
    let need = model.stage_bytes(&whole) + limits.kv_bytes;
    if devices.iter().all(|(_, _, free)| *free >= need) {
        let wants = devices
            .iter()
            .enumerate()
            .map(|(i, (node, device, _))| ReplicaWant {
                name: format!("r{i}"),
                stages: vec![vec![(node.clone(), device.clone())]],
                layers: None,
            })
            .collect();
        let why = format!(
            "each of the {} devices holds the whole model ({need} bytes with KV): one replica each",
            devices.len()
        );
        return (wants, why);
    }
    let weights: Vec<f32> = devices.iter().map(|(_, _, free)| *free as f32).collect();
    let want = ReplicaWant {
        name: "r0".into(),
        stages: devices.iter().map(|(n, d, _)| vec![(n.clone(), d.clone())]).collect(),
        layers: Some(model.split_layers(&weights)),
    };
    let why = format!(
        "the whole model needs {need} bytes, more than the smallest device has: one pipeline of {} \
         stages, layers by free memory",
        devices.len()
    );
    (vec![want], why)
}

/// Where `want` can stand while some of its nodes are away: each lost shard goes to the device
/// that is least used and has the most room, `taken` bytes being used by other replicas. A device
/// that another replica computes on is taken only for the `last` replica: elsewhere it would slow
/// down what works. `Err` says why there is no such place.
pub fn substitute(
    want: &ReplicaWant,
    there: &BTreeMap<NodeName, NodeDescription>,
    taken: &Taken,
    last: bool,
    model: &dyn ModelShape,
    limits: &PlanLimits,
) -> Result<ReplicaWant, String> {
    let devices = |(name, node): (&NodeName, &NodeDescription)| {
        let name = name.clone();
        let of =
            node.devices.clone().into_iter().map(move |d| ((name.clone(), d.id), d.free_bytes));
        of.collect::<Vec<_>>()
    };
    let used = |place: &(NodeName, String)| taken.get(place).copied().unwrap_or(0);
    let mut room: BTreeMap<(NodeName, String), u64> = there
        .iter()
        .flat_map(devices)
        .filter(|(place, _)| last || used(place) == 0)
        .map(|(place, free)| (place.clone(), free.saturating_sub(used(&place))))
        .collect();
    if room.is_empty() {
        return Err("no other device is idle".into());
    }
    let counts = layer_counts(want, model).map_err(|e| e.to_string())?;
    // Without KV, whose blocks are shared out anew once all shards have a place.
    let bytes = |stage: usize, ranks: usize| {
        let begin: usize = counts[..stage].iter().sum();
        let end = stage + 1 == counts.len();
        let layers = begin..begin + counts[stage];
        let (block_tokens, max_tokens) = (limits.block_tokens, limits.step_tokens);
        let first = stage == 0;
        model.stage_bytes(&StageSpec {
            layers,
            first,
            last: end,
            rank: 0,
            ranks,
            kv_blocks: 0,
            block_tokens,
            max_tokens,
        })
    };
    let mut stand_in = want.clone();
    let mut load: BTreeMap<(NodeName, String), usize> = BTreeMap::new();
    for (stage, ranks) in want.stages.iter().enumerate() {
        for place in ranks.iter().filter(|(node, _)| there.contains_key(node)) {
            *load.entry(place.clone()).or_default() += 1;
            if let Some(room) = room.get_mut(place) {
                *room = room.saturating_sub(bytes(stage, ranks.len()));
            }
        }
    }
    for (stage, ranks) in stand_in.stages.iter_mut().enumerate() {
        let need = bytes(stage, ranks.len());
        for place in ranks.iter_mut().filter(|(node, _)| !there.contains_key(node)) {
            let best = room
                .iter()
                .filter(|(_, room)| **room > need)
                .min_by_key(|(place, room)| {
                    let shards = load.get(place).copied().unwrap_or(0);
                    (used(place) > 0, shards, std::cmp::Reverse(**room))
                })
                .map(|(place, _)| place.clone());
            let Some(best) = best else {
                return Err(format!("no survivor has {need} bytes for stage {stage}"));
            };
            *load.entry(best.clone()).or_default() += 1;
            if let Some(room) = room.get_mut(&best) {
                *room -= need;
            }
            *place = best;
        }
    }
    let less = less_taken(there, taken);
    plan(&stand_in, ReplicaEpoch(0), &less, model, limits).map_err(|e| e.to_string())?;
    Ok(stand_in)
}

/// The nodes with what is `taken` of their devices not free any more.
pub fn less_taken(
    there: &BTreeMap<NodeName, NodeDescription>,
    taken: &Taken,
) -> BTreeMap<NodeName, NodeDescription> {
    let mut less = there.clone();
    for (name, node) in &mut less {
        for device in &mut node.devices {
            let used = taken.get(&(name.clone(), device.id.clone())).copied().unwrap_or(0);
            device.free_bytes = device.free_bytes.saturating_sub(used);
        }
    }
    less
}

fn same_model(
    want: &ReplicaWant,
    nodes: &BTreeMap<NodeName, NodeDescription>,
) -> Result<(), PlanError> {
    let mut first: Option<(&NodeName, &str)> = None;
    for name in want.nodes() {
        let Some((name, node)) = nodes.get_key_value(&name) else { continue };
        match first {
            None => first = Some((name, &node.model_hash)),
            Some((other, expected)) if expected != node.model_hash => {
                return Err(PlanError::ModelDiffers {
                    node: name.clone(),
                    have: node.model_hash.clone(),
                    other: other.clone(),
                    expected: expected.into(),
                });
            }
            Some(_) => {}
        }
    }
    Ok(())
}

fn layer_counts(want: &ReplicaWant, model: &dyn ModelShape) -> Result<Vec<usize>, PlanError> {
    let stages = want.stages.len();
    if stages > model.layers() {
        let replica = want.name.clone();
        return Err(PlanError::TooManyStages { replica, stages, layers: model.layers() });
    }
    let counts = match &want.layers {
        Some(layers) => layers.clone(),
        None => model.split_layers(&vec![1.0; stages]),
    };
    let sum: usize = counts.iter().sum();
    if sum != model.layers() || counts.len() != stages || counts.contains(&0) {
        return Err(PlanError::Layers {
            replica: want.name.clone(),
            layers: counts,
            sum,
            model: model.name().into(),
            have: model.layers(),
        });
    }
    Ok(counts)
}

/// All shards use the same block ids, so the replica has as many blocks as its tightest shard.
fn shared_blocks(shards: &[ShardPlace], model: &dyn ModelShape, limits: &PlanLimits) -> usize {
    // No sequence is longer than the context, and `step_tokens` of them run at the most: more
    // blocks than that could never be used.
    let useful = model.context().div_ceil(limits.block_tokens).saturating_mul(limits.step_tokens);
    shards
        .iter()
        .map(|place| {
            let sharing = shards.iter().filter(|p| same_device(p, place)).count() as u64;
            let bytes = limits.kv_bytes / sharing / model.kv_block_bytes(&place.spec).max(1);
            usize::try_from(bytes).unwrap_or(usize::MAX)
        })
        .min()
        .unwrap_or(0)
        .min(useful)
}

fn same_device(a: &ShardPlace, b: &ShardPlace) -> bool {
    a.node == b.node && a.device == b.device
}

fn fits(
    want: &ReplicaWant,
    shards: &[ShardPlace],
    nodes: &BTreeMap<NodeName, NodeDescription>,
    model: &dyn ModelShape,
) -> Result<(), PlanError> {
    for place in shards {
        let Some(node) = nodes.get(&place.node) else { continue };
        let Some(device) = node.devices.iter().find(|d| d.id == place.device) else {
            return Err(PlanError::NoDevice {
                replica: want.name.clone(),
                node: place.node.clone(),
                device: place.device.clone(),
                have: node.devices.iter().map(|d| d.id.clone()).collect(),
            });
        };
        let here = || shards.iter().filter(|p| same_device(p, place));
        let weights: u64 = here().map(|p| model.stage_bytes(&p.spec)).sum();
        let kv: u64 = here().map(|p| p.spec.kv_blocks as u64 * model.kv_block_bytes(&p.spec)).sum();
        let (need, have) = (weights + kv, device.free_bytes);
        let blocks = place.spec.kv_blocks;
        if need > have || blocks == 0 {
            let mend = if have > weights && blocks > 0 {
                format!("set [kv] memory to at most {} bytes", have - weights)
            } else if blocks == 0 {
                let least: u64 = here().map(|p| model.kv_block_bytes(&p.spec)).sum();
                format!("raise [kv] memory to at least {least} bytes, the size of one block")
            } else {
                "add a stage on another device, or use a smaller model".into()
            };
            return Err(PlanError::DoesNotFit {
                replica: want.name.clone(),
                node: place.node.clone(),
                device: place.device.clone(),
                need,
                weights,
                kv,
                have,
                mend,
            });
        }
    }
    Ok(())
}
