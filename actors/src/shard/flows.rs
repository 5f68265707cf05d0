//! What crosses between shards on the data plane: activations from stage to stage, and the
//! segments that tensor ranks reduce among themselves.
//!
//! Every frame carries the replica's epoch, the step, and the hash of the step's plan; a frame
//! that disagrees is a typed failure at once, never a hang and never a wrong sum. Payloads are
//! little-endian float32.

use crate::messages::ReplicaPlan;
use bytes::{Bytes, BytesMut};
use dunlin_model::engine::{Batch, Collective, CollectiveError};
use dunlin_runtime::{FlowClass, FlowFrame, FlowId, FlowReceiver, FlowSender, Node, NodeName};
use std::time::{Duration, Instant};

/// Hash of what a step computes. Ranks and stages compare it before they mix their numbers.
pub fn plan_hash(step: u64, batch: &Batch) -> u64 {
    let mut hash = blake3::Hasher::new();
    hash.update(&step.to_le_bytes());
    for seq in &batch.seqs {
        hash.update(&seq.request.to_le_bytes());
        hash.update(&seq.position.to_le_bytes());
        hash.update(&(seq.tokens.len() as u64).to_le_bytes());
        for token in seq.tokens.iter().chain(&seq.blocks) {
            hash.update(&token.to_le_bytes());
        }
    }
    let mut first = [0; 8];
    first.copy_from_slice(&hash.finalize().as_bytes()[..8]);
    u64::from_le_bytes(first)
}

/// The data-plane ends of one shard.
pub struct Wires {
    me: String,
    epoch: u64,
    step: u64,
    hash: u64,
    deadline: Duration,
    from_previous: Option<(String, FlowReceiver)>,
    to_next: Vec<(String, FlowSender)>,
    group: FlowGroup,
}

impl Wires {
    /// Opens every flow that shard `index` of `plan` takes part in. Opening never waits.
    pub fn open(node: &Node, plan: &ReplicaPlan, index: usize, deadline: Duration) -> Self {
        let place = &plan.shards[index];
        let (stage, rank) = (place.stage, place.spec.rank);
        let members = |s: usize| plan.shards.iter().filter(move |p| p.stage == s);
        let name = |s: usize, r: usize, n: &NodeName| format!("stage {s} rank {r} on {n}");
        // Every rank of a stage holds the same activations, so rank r of the next stage reads
        // from rank r modulo the size of this one.
        let from_previous = stage.checked_sub(1).map(|previous| {
            let size = members(previous).count();
            let source = members(previous).nth(rank % size).expect("a stage has a rank");
            let id = flow_id(plan, "act", (previous, source.spec.rank), (stage, rank));
            let label = name(previous, source.spec.rank, &source.node);
            (label, node.accept_flow(&source.node, id))
        });
        let size = members(stage).count();
        let to_next = members(stage + 1)
            .filter(|next| next.spec.rank % size == rank)
            .map(|next| {
                let id = flow_id(plan, "act", (stage, rank), (next.stage, next.spec.rank));
                let label = name(next.stage, next.spec.rank, &next.node);
                (label, node.open_flow(&next.node, id, FlowClass::Activations))
            })
            .collect();
        let peers = members(stage)
            .filter(|peer| peer.spec.rank != rank)
            .map(|peer| {
                let there = (stage, peer.spec.rank);
                let out = flow_id(plan, "red", (stage, rank), there);
                let back = flow_id(plan, "red", there, (stage, rank));
                GroupPeer {
                    rank: peer.spec.rank,
                    label: name(stage, peer.spec.rank, &peer.node),
                    to: node.open_flow(&peer.node, out, FlowClass::Activations),
                    from: node.accept_flow(&peer.node, back),
                }
            })
            .collect();
        let epoch = plan.epoch.0;
        let group = FlowGroup { rank, peers, epoch, step: 0, hash: 0, call: 0, deadline };
        let me = name(stage, rank, &place.node);
        Self { me, epoch, step: 0, hash: 0, deadline, from_previous, to_next, group }
    }

    /// Sets what the frames of the coming step carry.
    pub fn begin(&mut self, step: u64, batch: &Batch) {
        self.step = step;
        self.hash = plan_hash(step, batch);
        self.group.step = step;
        self.group.hash = self.hash;
        self.group.call = 0;
    }

    /// Waits for the previous stage's activations; `None` on the first stage.
    pub fn receive(&mut self, values: usize) -> Result<Option<Vec<f32>>, String> {
        let Some((from, flow)) = &mut self.from_previous else { return Ok(None) };
        let until = Instant::now() + self.deadline;
        let expected = (self.epoch, self.step, self.hash);
        let payload = receive(flow, expected, until)
            .map_err(|e| format!("{} waits for activations of {from}: {e}", self.me))?;
        let input = to_floats(&payload);
        if input.len() != values {
            return Err(format!("{from} sent {} values, the plan needs {values}", input.len()));
        }
        Ok(Some(input))
    }

    /// Hands activations to the next stage's ranks.
    pub fn send(&mut self, values: &[f32]) -> Result<(), String> {
        let payload = to_bytes(values);
        for (to, flow) in &self.to_next {
            let (epoch, step, tag) = (self.epoch, self.step, self.hash);
            flow.blocking_send(FlowFrame { epoch, step, tag, payload: payload.clone() })
                .map_err(|e| format!("{} sends activations to {to}: {e}", self.me))?;
        }
        Ok(())
    }

    pub fn group(&mut self) -> &mut FlowGroup {
        &mut self.group
    }
}

/// The tensor-parallel ranks of one stage, each on its own flow.
pub struct FlowGroup {
    rank: usize,
    peers: Vec<GroupPeer>,
    epoch: u64,
    step: u64,
    hash: u64,
    /// Collectives since the step began; part of each frame's tag, so that a rank that skipped
    /// one is found at the next.
    call: u64,
    deadline: Duration,
}

struct GroupPeer {
    rank: usize,
    label: String,
    to: FlowSender,
    from: FlowReceiver,
}

impl FlowGroup {
    /// Sends `mine` to every other rank and returns all ranks' values, in rank order.
    fn exchange(&mut self, mine: &[f32]) -> Result<Vec<Vec<f32>>, CollectiveError> {
        self.call += 1;
        let (epoch, step) = (self.epoch, self.step);
        let tag = self.hash.wrapping_add(self.call);
        let payload = to_bytes(mine);
        for peer in &self.peers {
            peer.to
                .blocking_send(FlowFrame { epoch, step, tag, payload: payload.clone() })
                .map_err(|error| peer.failed(error.to_string()))?;
        }
        let until = Instant::now() + self.deadline;
        let mut all = vec![Vec::new(); self.peers.len() + 1];
        all[self.rank] = mine.to_vec();
        for peer in &mut self.peers {
            match receive(&mut peer.from, (epoch, step, tag), until) {
                Ok(bytes) => all[peer.rank] = to_floats(&bytes),
                Err(reason) => return Err(peer.failed(reason)),
            }
        }
        Ok(all)
    }
}

impl GroupPeer {
    fn failed(&self, reason: String) -> CollectiveError {
        CollectiveError { rank: self.rank, reason: format!("{}: {reason}", self.label) }
    }
}

impl Collective for FlowGroup {
    fn size(&self) -> usize {
        self.peers.len() + 1
    }

    fn all_reduce(&mut self, values: &mut [f32]) -> Result<(), CollectiveError> {
        if self.peers.is_empty() {
            return Ok(());
        }
        let all = self.exchange(values)?;
        for (rank, part) in all.iter().enumerate() {
            if part.len() != values.len() {
                let reason = format!("sent {} values, expected {}", part.len(), values.len());
                return Err(CollectiveError { rank, reason });
            }
        }
        // Rank order, so that every rank ends with the same bits.
        for (i, value) in values.iter_mut().enumerate() {
            *value = all[1..].iter().fold(all[0][i], |sum, part| sum + part[i]);
        }
        Ok(())
    }

    fn all_gather(&mut self, rows: usize, values: &[f32]) -> Result<Vec<f32>, CollectiveError> {
        if self.peers.is_empty() || rows == 0 {
            return Ok(values.to_vec());
        }
        let all = self.exchange(values)?;
        for (rank, part) in all.iter().enumerate() {
            if part.len() % rows != 0 {
                let reason = format!("sent {} values for {rows} rows", part.len());
                return Err(CollectiveError { rank, reason });
            }
        }
        let mut joined = Vec::with_capacity(all.iter().map(Vec::len).sum());
        for row in 0..rows {
            for part in &all {
                let cols = part.len() / rows;
                joined.extend_from_slice(&part[row * cols..(row + 1) * cols]);
            }
        }
        Ok(joined)
    }
}

/// Takes the frame of (epoch, step, tag); frames of older epochs or steps are dropped.
fn receive(
    flow: &mut FlowReceiver,
    (epoch, step, tag): (u64, u64, u64),
    until: Instant,
) -> Result<Bytes, String> {
    loop {
        let left = until.saturating_duration_since(Instant::now());
        let frame = flow.blocking_recv(left).map_err(|error| error.to_string())?;
        if (frame.epoch, frame.step) < (epoch, step) {
            metrics::counter!("dunlin_stale_epoch_messages_total", "kind" => "flow").increment(1);
            continue;
        }
        if (frame.epoch, frame.step) > (epoch, step) {
            return Err(format!(
                "is ahead: it is in epoch {} step {}, this shard in epoch {epoch} step {step}",
                frame.epoch, frame.step
            ));
        }
        if frame.tag != tag {
            metrics::counter!("dunlin_plan_hash_mismatch_total").increment(1);
            return Err(format!("runs another plan for step {step} (hash {:x})", frame.tag));
        }
        return Ok(frame.payload);
    }
}

/// Both ends compute the same id from the plan; a new epoch has new flows.
fn flow_id(plan: &ReplicaPlan, kind: &str, from: (usize, usize), to: (usize, usize)) -> FlowId {
    let mut hash = blake3::Hasher::new();
    hash.update(plan.replica.as_bytes());
    hash.update(&[0]);
    hash.update(kind.as_bytes());
    for number in [plan.epoch.0, from.0 as u64, from.1 as u64, to.0 as u64, to.1 as u64] {
        hash.update(&number.to_le_bytes());
    }
    let mut first = [0; 8];
    first.copy_from_slice(&hash.finalize().as_bytes()[..8]);
    FlowId(u64::from_le_bytes(first))
}

fn to_bytes(values: &[f32]) -> Bytes {
    let mut bytes = BytesMut::with_capacity(values.len() * 4);
    values.iter().for_each(|v| bytes.extend_from_slice(&v.to_le_bytes()));
    bytes.freeze()
}

fn to_floats(bytes: &[u8]) -> Vec<f32> {
    bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect()
}
