//! What crosses between shards on the data plane: activations from stage to stage, and the
//! segments that tensor ranks reduce among themselves.
//!
//! Every frame carries the replica's epoch, the step, and the hash of the step's plan; a frame
//! that disagrees is a typed failure at once, never a hang and never a wrong sum. Payloads are
//! little-endian float32.

use super::feedback::source;
use crate::facts;
use crate::messages::{ReplicaPlan, ShardPlace};
use bytes::{Bytes, BytesMut};
use dunlin_model::engine::{Batch, Collective, CollectiveError};
use dunlin_runtime::{
    Fact, Faults, FlowClass, FlowFrame, FlowId, FlowReceiver, FlowSender, Node, NodeName, mutated,
};
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::Duration;
use tokio::time::{Instant, timeout_at};

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

/// What messages call a shard.
pub(super) fn label(place: &ShardPlace) -> String {
    format!("stage {} rank {} on {}", place.stage, place.spec.rank, place.node)
}

/// What a device is doing, for whoever watches it from outside.
#[derive(Debug)]
pub struct Doing {
    now: AtomicU8,
    from: String,
    to: String,
    peers: String,
    draws: String,
}

const COMPUTES: u8 = 0;
const RECEIVES: u8 = 1;
const REDUCES: u8 = 2;
const SENDS: u8 = 3;
pub(super) const TAKES_TOKENS: u8 = 4;
pub(super) const SENDS_TOKENS: u8 = 5;

impl Doing {
    pub(super) fn set(&self, now: u8) {
        self.now.store(now, Ordering::Relaxed);
    }

    /// Whether the device itself is at work, and does not wait for another shard.
    pub fn computes(&self) -> bool {
        self.now.load(Ordering::Relaxed) == COMPUTES
    }

    /// For messages: `SHARD ...`.
    pub fn text(&self) -> String {
        match self.now.load(Ordering::Relaxed) {
            RECEIVES => format!("waits for activations of {}", self.from),
            REDUCES => format!("waits for a reduction with {}", self.peers),
            TAKES_TOKENS => format!("waits for the tokens of {}", self.draws),
            SENDS_TOKENS => "waits until the other shards take its tokens".into(),
            SENDS => format!("waits until {} takes its activations", self.to),
            _ => "computes: its device does not answer".into(),
        }
    }
}

/// The data-plane ends of one shard.
pub struct Wires {
    me: String,
    doing: Arc<Doing>,
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
        // Every rank of a stage holds the same activations, so rank r of the next stage reads
        // from rank r modulo the size of this one.
        let from_previous: Option<(String, FlowReceiver)> = stage.checked_sub(1).map(|previous| {
            let size = members(previous).count();
            let source = members(previous).nth(rank % size).expect("a stage has a rank");
            let id = flow_id(plan, "act", (previous, source.spec.rank), (stage, rank));
            (label(source), node.accept_flow(&source.node, id))
        });
        let size = members(stage).count();
        let to_next: Vec<(String, FlowSender)> = members(stage + 1)
            .filter(|next| next.spec.rank % size == rank)
            .map(|next| {
                let id = flow_id(plan, "act", (stage, rank), (next.stage, next.spec.rank));
                (label(next), node.open_flow(&next.node, id, FlowClass::Activations))
            })
            .collect();
        let peers: Vec<GroupPeer> = members(stage)
            .filter(|peer| peer.spec.rank != rank)
            .map(|peer| {
                let there = (stage, peer.spec.rank);
                let out = flow_id(plan, "red", (stage, rank), there);
                let back = flow_id(plan, "red", there, (stage, rank));
                GroupPeer {
                    rank: peer.spec.rank,
                    label: label(peer),
                    to: node.open_flow(&peer.node, out, FlowClass::Activations),
                    from: node.accept_flow(&peer.node, back),
                }
            })
            .collect();
        let epoch = plan.epoch.0;
        let names = |labels: Vec<&String>| {
            labels.into_iter().map(String::as_str).collect::<Vec<_>>().join(", ")
        };
        let doing = Arc::new(Doing {
            now: AtomicU8::new(COMPUTES),
            from: names(from_previous.iter().map(|(label, _)| label).collect()),
            to: names(to_next.iter().map(|(label, _)| label).collect()),
            peers: names(peers.iter().map(|peer| &peer.label).collect()),
            draws: source(plan).map(label).unwrap_or_default(),
        });
        let me = label(place);
        let tell =
            Tell { faults: node.faults().clone(), node: node.name().clone(), me: me.clone() };
        let group = FlowGroup {
            doing: doing.clone(),
            tell,
            rank,
            peers,
            epoch,
            step: 0,
            hash: 0,
            call: 0,
            deadline,
        };
        Self { me, doing, epoch, step: 0, hash: 0, deadline, from_previous, to_next, group }
    }

    /// See [`Doing`].
    pub fn doing(&self) -> Arc<Doing> {
        self.doing.clone()
    }

    /// Tells the other ranks that this one has done the step, without waiting for them: one that
    /// still waits for a collective of it learns that none will come.
    pub fn end(&mut self) -> Result<(), String> {
        for peer in &self.group.peers {
            let sent = peer.to.blocking_send(self.group.last_frame());
            sent.map_err(|error| format!("{} ends a step with {}: {error}", self.me, peer.label))?;
        }
        Ok(())
    }

    /// [`Self::end`] for tasks.
    pub async fn end_async(&mut self) -> Result<(), String> {
        for peer in &self.group.peers {
            let sent = peer.to.send(self.group.last_frame()).await;
            sent.map_err(|error| format!("{} ends a step with {}: {error}", self.me, peer.label))?;
        }
        Ok(())
    }

    /// Sets what the frames of the coming step carry.
    pub fn begin(&mut self, step: u64, batch: &Batch) {
        self.doing.set(COMPUTES);
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
        self.doing.set(RECEIVES);
        let payload = receive(flow, expected, until, &self.group.tell)
            .map_err(|e| format!("{} waits for activations of {from}: {e}", self.me))?;
        self.doing.set(COMPUTES);
        activations(from, &payload, values).map(Some)
    }

    /// [`Self::receive`] for tasks.
    pub async fn receive_async(&mut self, values: usize) -> Result<Option<Vec<f32>>, String> {
        let Some((from, flow)) = &mut self.from_previous else { return Ok(None) };
        let until = Instant::now() + self.deadline;
        let expected = (self.epoch, self.step, self.hash);
        self.doing.set(RECEIVES);
        let payload = receive_async(flow, expected, until, self.deadline, &self.group.tell)
            .await
            .map_err(|e| format!("{} waits for activations of {from}: {e}", self.me))?;
        self.doing.set(COMPUTES);
        activations(from, &payload, values).map(Some)
    }

    /// [`Self::send`] for tasks.
    pub async fn send_async(&mut self, values: &[f32]) -> Result<(), String> {
        self.doing.set(SENDS);
        let payload = to_bytes(values);
        for (to, flow) in &self.to_next {
            let (epoch, step, tag) = (self.epoch, self.step, self.hash);
            flow.send(FlowFrame { epoch, step, tag, payload: payload.clone() })
                .await
                .map_err(|e| format!("{} sends activations to {to}: {e}", self.me))?;
        }
        Ok(())
    }

    /// Hands activations to the next stage's ranks.
    pub fn send(&mut self, values: &[f32]) -> Result<(), String> {
        self.doing.set(SENDS);
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
    doing: Arc<Doing>,
    tell: Tell,
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

/// Tag of a rank's last frame of a step.
const ENDED: u64 = u64::MAX;

/// Where mismatches are told.
struct Tell {
    faults: Faults,
    node: NodeName,
    me: String,
}

impl Tell {
    fn fact(&self, name: &'static str, subject: impl FnOnce() -> String, (key, value): (u64, u64)) {
        let node = self.node.clone();
        self.faults.tell(|| Fact { node, name, subject: subject(), key, value });
    }
}

struct GroupPeer {
    rank: usize,
    label: String,
    to: FlowSender,
    from: FlowReceiver,
}

impl FlowGroup {
    fn last_frame(&self) -> FlowFrame {
        let (epoch, step) = (self.epoch, self.step);
        FlowFrame { epoch, step, tag: ENDED, payload: Bytes::new() }
    }

    /// Sends `mine` to every other rank and returns all ranks' values, in rank order.
    fn exchange(&mut self, mine: &[f32]) -> Result<Vec<Vec<f32>>, CollectiveError> {
        self.call += 1;
        let (epoch, step) = (self.epoch, self.step);
        let tag = self.hash.wrapping_add(self.call);
        let payload = to_bytes(mine);
        self.doing.set(REDUCES);
        for peer in &self.peers {
            peer.to
                .blocking_send(FlowFrame { epoch, step, tag, payload: payload.clone() })
                .map_err(|error| peer.failed(error.to_string()))?;
        }
        let until = Instant::now() + self.deadline;
        let mut all = vec![Vec::new(); self.peers.len() + 1];
        all[self.rank] = mine.to_vec();
        for peer in &mut self.peers {
            match receive(&mut peer.from, (epoch, step, tag), until, &self.tell) {
                Ok(bytes) => all[peer.rank] = to_floats(&bytes),
                Err(reason) => return Err(peer.failed(reason)),
            }
        }
        self.doing.set(COMPUTES);
        Ok(all)
    }
}

impl FlowGroup {
    /// `exchange` for tasks.
    pub(super) async fn exchange_async(
        &mut self,
        mine: &[f32],
    ) -> Result<Vec<Vec<f32>>, CollectiveError> {
        self.call += 1;
        let (epoch, step) = (self.epoch, self.step);
        let tag = self.hash.wrapping_add(self.call);
        let payload = to_bytes(mine);
        self.doing.set(REDUCES);
        for peer in &self.peers {
            let frame = FlowFrame { epoch, step, tag, payload: payload.clone() };
            peer.to.send(frame).await.map_err(|error| peer.failed(error.to_string()))?;
        }
        let until = Instant::now() + self.deadline;
        let mut all = vec![Vec::new(); self.peers.len() + 1];
        all[self.rank] = mine.to_vec();
        for peer in &mut self.peers {
            let expected = (epoch, step, tag);
            let tell = &self.tell;
            match receive_async(&mut peer.from, expected, until, self.deadline, tell).await {
                Ok(bytes) => all[peer.rank] = to_floats(&bytes),
                Err(reason) => return Err(peer.failed(reason)),
            }
        }
        self.doing.set(COMPUTES);
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
        sum(&self.exchange(values)?, values)
    }

    fn all_gather(&mut self, rows: usize, values: &[f32]) -> Result<Vec<f32>, CollectiveError> {
        if self.peers.is_empty() || rows == 0 {
            return Ok(values.to_vec());
        }
        join(&self.exchange(values)?, rows)
    }
}

/// Sums all ranks' values in rank order, so that every rank ends with the same bits.
pub(super) fn sum(all: &[Vec<f32>], values: &mut [f32]) -> Result<(), CollectiveError> {
    for (rank, part) in all.iter().enumerate() {
        if part.len() != values.len() {
            let reason = format!("sent {} values, expected {}", part.len(), values.len());
            return Err(CollectiveError { rank, reason });
        }
    }
    for (i, value) in values.iter_mut().enumerate() {
        *value = all[1..].iter().fold(all[0][i], |sum, part| sum + part[i]);
    }
    Ok(())
}

/// Joins all ranks' `[rows, cols]` along columns, in rank order.
pub(super) fn join(all: &[Vec<f32>], rows: usize) -> Result<Vec<f32>, CollectiveError> {
    for (rank, part) in all.iter().enumerate() {
        if part.len() % rows != 0 {
            let reason = format!("sent {} values for {rows} rows", part.len());
            return Err(CollectiveError { rank, reason });
        }
    }
    let mut joined = Vec::with_capacity(all.iter().map(Vec::len).sum());
    for row in 0..rows {
        for part in all {
            let cols = part.len() / rows;
            joined.extend_from_slice(&part[row * cols..(row + 1) * cols]);
        }
    }
    Ok(joined)
}

/// Takes the frame of (epoch, step, tag); frames of older epochs or steps are dropped.
fn receive(
    flow: &mut FlowReceiver,
    expected: (u64, u64, u64),
    until: Instant,
    tell: &Tell,
) -> Result<Bytes, String> {
    loop {
        let left = until.saturating_duration_since(Instant::now());
        let frame = flow.blocking_recv(left).map_err(|error| error.to_string())?;
        if let Some(payload) = judge(frame, expected, tell)? {
            return Ok(payload);
        }
    }
}

/// [`receive`] for tasks; `deadline` is what `until` was made of.
async fn receive_async(
    flow: &mut FlowReceiver,
    expected: (u64, u64, u64),
    until: Instant,
    deadline: Duration,
    tell: &Tell,
) -> Result<Bytes, String> {
    loop {
        let frame = match timeout_at(until, flow.recv()).await {
            Ok(frame) => frame.map_err(|error| error.to_string())?,
            Err(_) => return Err(format!("nothing within {} ms", deadline.as_millis())),
        };
        if let Some(payload) = judge(frame, expected, tell)? {
            return Ok(payload);
        }
    }
}

/// The payload of the frame that was expected; `None` for one to drop.
fn judge(
    frame: FlowFrame,
    (epoch, step, tag): (u64, u64, u64),
    tell: &Tell,
) -> Result<Option<Bytes>, String> {
    if mutated("accept-stale-flow") && frame.tag != ENDED {
        return Ok(Some(frame.payload));
    }
    if (frame.epoch, frame.step) < (epoch, step) {
        if frame.tag == ENDED {
            return Ok(None);
        }
        tell.fact(facts::STALE_REFUSED, || "flow".into(), (frame.step, 1));
        metrics::counter!("dunlin_stale_epoch_messages_total", "kind" => "flow").increment(1);
        return Ok(None);
    }
    if (frame.epoch, frame.step) > (epoch, step) {
        return Err(format!(
            "is ahead: it is in epoch {} step {}, this shard in epoch {epoch} step {step}",
            frame.epoch, frame.step
        ));
    }
    if frame.tag == ENDED {
        let why = "has ended this step without the collective that is due";
        tell.fact(facts::PLAN_MISMATCH, || format!("{}: a peer {why}", tell.me), (step, 0));
        return Err(why.into());
    }
    if frame.tag != tag && !mutated("skip-plan-hash") {
        let who = || format!("{}: a peer runs another plan", tell.me);
        tell.fact(facts::PLAN_MISMATCH, who, (step, frame.tag));
        metrics::counter!("dunlin_plan_hash_mismatch_total").increment(1);
        return Err(format!("runs another plan for step {step} (hash {:x})", frame.tag));
    }
    Ok(Some(frame.payload))
}

fn activations(from: &str, payload: &[u8], values: usize) -> Result<Vec<f32>, String> {
    let input = to_floats(payload);
    match input.len() == values {
        true => Ok(input),
        false => Err(format!("{from} sent {} values, the plan needs {values}", input.len())),
    }
}

/// Both ends compute the same id from the plan; a new epoch has new flows.
pub(super) fn flow_id(
    plan: &ReplicaPlan,
    kind: &str,
    from: (usize, usize),
    to: (usize, usize),
) -> FlowId {
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
