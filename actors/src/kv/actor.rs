//! The actor around the KV block manager: owns it for the replica's life, publishes its gauges,
//! and audits it when it is idle.
//!
//! The scheduler is its only user, several times a step; it takes the lock instead of sending
//! messages. The lock is never held across an await.

use super::core::{Kv, KvConfig};
use crate::facts::{self, tell};
use crate::messages::ReplicaPlan;
use dunlin_runtime::{Node, mutated};
use ractor::{Actor, ActorCell, ActorProcessingErr, ActorRef};
use std::sync::Arc;
use std::time::Duration;

/// The replica's KV block manager.
pub type SharedKv = Arc<parking_lot::Mutex<Kv>>;

/// Role of KV block managers in fault plans; the instance is the replica's name.
const ROLE: &str = "kv";

const LOOK_EVERY: Duration = Duration::from_millis(200);

pub struct KvArgs {
    pub node: Node,
    pub plan: ReplicaPlan,
    /// Stands for the model's content and the KV format.
    pub namespace: [u8; 16],
}

/// Starts the actor under `supervisor`. The handle outlives the actor, and is of no use then.
pub async fn start_kv(
    args: KvArgs,
    supervisor: ActorCell,
) -> Result<(ActorCell, SharedKv), String> {
    let replica = args.plan.replica.clone();
    let specs = || args.plan.shards.iter().map(|place| &place.spec);
    let (Some(blocks), Some(tokens)) =
        (specs().map(|s| s.kv_blocks).min(), specs().map(|s| s.block_tokens).next())
    else {
        return Err(format!("replica {replica} has no shards"));
    };
    if specs().any(|spec| spec.block_tokens != tokens) {
        return Err(format!("replica {replica}: shards disagree about the tokens of a KV block"));
    }
    let config = KvConfig {
        blocks: u32::try_from(blocks).map_err(|_| format!("{blocks} KV blocks are too many"))?,
        block_tokens: u32::try_from(tokens).map_err(|_| format!("{tokens} tokens a block"))?,
        namespace: args.namespace,
        key_bits: if mutated("trust-keys") { 6 } else { 128 },
    };
    let kv = Kv::new(config).map_err(|error| format!("replica {replica}: {error}"))?;
    let kv = Arc::new(parking_lot::Mutex::new(kv));
    let labels = [("node", args.node.name().to_string()), ("replica", replica.clone())];
    let usage = metrics::gauge!("dunlin_kv_cache_usage_perc", &labels);
    let state = State { node: args.node, kv: kv.clone(), replica, usage, audited: 0 };
    let (actor, _) = Actor::spawn_linked(None, KvActor, state, supervisor)
        .await
        .map_err(|error| error.to_string())?;
    Ok((actor.get_cell(), kv))
}

struct KvActor;

struct Look;

struct State {
    node: Node,
    kv: SharedKv,
    replica: String,
    usage: metrics::Gauge,
    /// `opened()` at the last audit.
    audited: u32,
}

impl Actor for KvActor {
    type Msg = Look;
    type State = State;
    type Arguments = State;

    async fn pre_start(
        &self,
        myself: ActorRef<Look>,
        state: State,
    ) -> Result<State, ActorProcessingErr> {
        // Ends with the actor.
        drop(myself.send_interval(LOOK_EVERY, || Look));
        Ok(state)
    }

    async fn handle(
        &self,
        _: ActorRef<Look>,
        Look: Look,
        state: &mut State,
    ) -> Result<(), ActorProcessingErr> {
        crate::faulty::message(&state.node, ROLE, &state.replica, "Look").await;
        let kv = state.kv.lock();
        let usage = kv.usage();
        state.usage.set(f64::from(usage.live) / f64::from(usage.total));
        if usage.live > 0 || kv.opened() == state.audited {
            return Ok(());
        }
        state.audited = kv.opened();
        kv.audit().map_err(|wrong| {
            tracing::error!(replica = state.replica, ?wrong, "KV audit failed");
            let who = || format!("kv {}: {}", state.replica, wrong.join("; "));
            tell(&state.node, facts::AUDIT_FAILED, who, (0, 0));
            format!("KV audit failed: {}", wrong.join("; ")).into()
        })
    }

    async fn post_stop(
        &self,
        _: ActorRef<Look>,
        state: &mut State,
    ) -> Result<(), ActorProcessingErr> {
        state.usage.set(0.0);
        Ok(())
    }
}
