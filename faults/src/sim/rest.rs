//! The end of a run: what is still held, what the books say, whether a fresh request is answered;
//! and who waits for whom where one is not.

use super::clients::Clients;
use super::drive::Driver;
use super::oracle;
use crate::draw::draw;
use crate::heal;
use crate::record::{PlacedShard, Rest};
use crate::resolved::RequestSpec;
use dunlin_actors::messages::{
    PlacementCall, PlacementProtocol, PlacementReply, ReplicaState, ReplicaStatus, SchedulerCall,
    SchedulerProtocol, SchedulerReply,
};
use dunlin_actors::placement;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

const CALL: Duration = Duration::from_secs(2);
/// Number of the request that is asked at the very end.
const PROBE: u64 = 9_000_000;
const PROBE_WITHIN: Duration = Duration::from_secs(20);
/// How an audit begins that nobody answered.
const NO_ANSWER: &str = "no answer";
const BOOKS_TRIES: usize = 10;
const BOOKS_PAUSE: Duration = Duration::from_millis(200);

pub async fn gather(driver: &mut Driver) -> Rest {
    let mut rest = Rest { replicas_wanted: driver.wanted(), ..Rest::default() };
    rest.probe_right = probe(driver).await;
    let names = driver.cluster.names();
    for name in &names {
        let Some(node) = driver.cluster.node(name) else { continue };
        let mut view = BTreeMap::new();
        for peer in node.peers() {
            if let Some(incarnation) = peer.incarnation.filter(|_| peer.up) {
                view.insert(peer.node.to_string(), incarnation.0);
            }
        }
        rest.views.insert(name.clone(), view);
    }
    sparse_views(driver, &mut rest);
    rest.views.retain(|name, _| driver.is_core(name));
    rest.views.values_mut().for_each(|view| view.retain(|name, _| driver.is_core(name)));
    for _ in 0..BOOKS_TRIES {
        rest = books(driver, rest).await;
        if !rest.audits.iter().any(|audit| audit.starts_with(NO_ANSWER)) {
            break;
        }
        // A replica that is moved just now, to nodes that are back, has no books for a moment.
        tokio::time::sleep(BOOKS_PAUSE).await;
    }
    rest
}

/// What the router and each scheduler of the core have in their books.
async fn books(driver: &Driver, rest: Rest) -> Rest {
    let mut rest = Rest { audits: Vec::new(), blocks: BTreeMap::new(), live_blocks: 0, ..rest };
    let Some(status) = driver.status().await else {
        rest.audits.push(format!("{NO_ANSWER}: the router"));
        return rest;
    };
    rest.open_requests = status.open_requests;
    rest.waiting_requests = status.waiting_requests;
    let core = |r: &&ReplicaStatus| heal::serves(&r.info.served_by, &driver.outside);
    let replicas: Vec<&ReplicaStatus> = status.replicas.iter().filter(core).collect();
    rest.replicas_up = replicas.len() as u64;
    let Some(head) = driver.cluster.node(driver.cluster.head()) else { return rest };
    for replica in replicas {
        let (name, to) = (&replica.info.replica, &replica.info.scheduler);
        match head.call::<SchedulerProtocol>(to, &SchedulerCall::Status, CALL).await {
            Ok(SchedulerReply::Status(load)) => {
                rest.live_blocks += load.kv_blocks_live;
                let sum = load.kv_blocks_free + load.kv_blocks_cached + load.kv_blocks_live;
                rest.blocks.insert(name.clone(), (sum, load.kv_blocks_total));
            }
            other => rest.audits.push(format!("{NO_ANSWER}: scheduler {name}, status: {other:?}")),
        }
        match head.call::<SchedulerProtocol>(to, &SchedulerCall::Audit, CALL).await {
            Ok(SchedulerReply::Audit(Ok(()))) => {}
            Ok(SchedulerReply::Audit(Err(found))) => {
                rest.audits.extend(found.iter().map(|what| format!("{name}: {what}")));
            }
            other => rest.audits.push(format!("{NO_ANSWER}: scheduler {name}, audit: {other:?}")),
        }
    }
    rest
}

/// In a large cluster, nodes that share no replica are not linked: what they know of each other is
/// what their head knows.
fn sparse_views(driver: &Driver, rest: &mut Rest) {
    let head = driver.cluster.head();
    let Some(of_head) = rest.views.get(head).cloned() else { return };
    for (name, view) in rest.views.iter_mut().filter(|(name, _)| *name != head) {
        let Some((node, own)) = driver.cluster.config_of(name) else { continue };
        let linked = driver.cluster.options(&node, &own).peers;
        if linked.len() + 1 >= driver.cluster.lives.len() {
            return;
        }
        let linked: BTreeSet<&str> = linked.keys().map(|peer| peer.as_str()).collect();
        let others = of_head.iter().filter(|(peer, _)| *peer != name);
        view.extend(
            others
                .filter(|(peer, _)| !linked.contains(peer.as_str()))
                .map(|(peer, incarnation)| (peer.clone(), *incarnation)),
        );
    }
}

/// A fresh request, answered with the right tokens?
async fn probe(driver: &mut Driver) -> bool {
    let vocab = u64::from(driver.setup.spec.vocab).max(2);
    let request = RequestSpec {
        number: PROBE,
        arrival_us: 0,
        tenant: "probe".into(),
        prompt: (0..12).map(|i| (draw(driver.cluster.seed, "probe", i) % vocab) as u32).collect(),
        max_tokens: 8,
        ignore_eos: true,
        temperature: 0.0,
        seed: 0,
        cancel_after: None,
        deadline_us: PROBE_WITHIN.as_micros() as u64,
    };
    let right = oracle::answer(&driver.setup.spec, &request);
    let gateway = driver.gateway(0);
    Clients::submit(&driver.shared, gateway, &request, PROBE, true);
    for _ in 0..PROBE_WITHIN.as_millis() / 10 {
        tokio::time::sleep(Duration::from_millis(10)).await;
        let seen = driver.shared.clients().read(PROBE, |c| (c.end.clone(), c.tokens.clone()));
        let Some((end, tokens)) = seen else { return false };
        if let Some(end) = end {
            // What it held goes back with the step that is under way.
            tokio::time::sleep(Duration::from_millis(200)).await;
            return end == "finished" && tokens == right;
        }
    }
    false
}

/// Where placement has put a replica's layers.
pub fn placed(replica: &ReplicaState) -> Vec<PlacedShard> {
    let places = replica.places.iter().map(|place| PlacedShard {
        node: place.node.to_string(),
        device: place.device.clone(),
        stage: place.stage,
        rank: place.spec.rank,
        layers: (place.spec.layers.start as u64, place.spec.layers.end as u64),
    });
    places.collect()
}

/// What each part of the cluster last said and waits for.
pub async fn who_waits(driver: &Driver) -> String {
    let mut lines = Vec::new();
    for number in driver.shared.clients().open_numbers() {
        let line = driver.shared.clients().read(number, |client| {
            let (have, want) = (client.tokens.len(), client.spec.max_tokens);
            let accepted = if client.accepted { "accepted" } else { "not accepted yet" };
            format!("request {number} at {} ({accepted}) has {have} of {want} tokens", client.at)
        });
        lines.extend(line);
    }
    for (name, life) in &driver.cluster.lives {
        if life.running.is_none() {
            let what = if life.given_up { "has been given up" } else { "is down" };
            lines.push(format!("node {name} {what}"));
        }
    }
    match driver.status().await {
        None => lines.push("the router does not answer".into()),
        Some(status) => {
            lines.push(format!(
                "the router has {} open requests, {} of them waiting for a replica",
                status.open_requests, status.waiting_requests
            ));
            for replica in &status.replicas {
                lines.push(format!(
                    "replica {} epoch {} has {} requests: {} running, {} waiting, {} of {} \
                     blocks live",
                    replica.info.replica,
                    replica.info.epoch.0,
                    replica.assigned,
                    replica.load.running,
                    replica.load.waiting,
                    replica.load.kv_blocks_live,
                    replica.load.kv_blocks_total
                ));
            }
        }
    }
    if let Some(head) = driver.cluster.node(driver.cluster.head()) {
        let to = head.address(placement::ROLE, placement::INSTANCE);
        let call = PlacementCall::Status;
        match head.call::<PlacementProtocol>(&to, &call, CALL).await {
            Ok(PlacementReply::Status(states)) => {
                for state in states {
                    lines.push(format!(
                        "placement has {} {} at epoch {} for {} ms: {}",
                        state.replica, state.state, state.epoch.0, state.since_ms, state.reason
                    ));
                }
            }
            other => lines.push(format!("placement does not answer: {other:?}")),
        }
    }
    driver.shared.with(|inner| {
        for (from, (us, _, subject)) in &inner.last {
            lines.push(format!("{from} last at {us} us: {subject}"));
        }
    });
    lines.join("\n")
}
