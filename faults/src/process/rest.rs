//! After the faults: waits until the cluster is whole again, and reads all its books.

use super::client::{Gateway, Orders, Seen};
use super::run::{Run, is_extra};
use super::signals;
use super::wire::{NodeState, ToNode};
use crate::heal;
use crate::record::Rest;
use dunlin_actors::messages::ReplicaStatus;
use dunlin_runtime::config::ClusterConfig;
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;
use tokio::sync::watch;

const PAUSE: Duration = Duration::from_millis(100);
const ANSWER_WITHIN: Duration = Duration::from_secs(5);
/// Questions to nodes are numbered from here, so that each run of a question has its own number.
const FIRST_QUESTION: u64 = 1;

/// Whether the gateway is ready and each configured replica takes requests.
pub async fn all_serve(gateway: &Gateway) -> bool {
    let healthy = matches!(gateway.get("/health").await, Some((200, _)));
    let Some((200, status)) = gateway.get("/cluster/status").await else { return false };
    let count = |list: &Value| list.as_array().map_or(0, Vec::len);
    let serving = count(&status["router"]["replicas"]);
    healthy && serving > 0 && serving == count(&status["replicas"])
}

/// Reads the books until they are clean or it is `until_us`; says which.
pub async fn settle(run: &mut Run<'_>, until_us: u64) -> (Rest, bool) {
    let mut question = FIRST_QUESTION;
    let mut rest = loop {
        let rest = look(run, &mut question).await;
        let open = run.board.read(|seen| seen.open.len());
        if (is_clean(&rest, run) && open == 0) || run.elapsed_us() >= until_us {
            break rest;
        }
        run.drive(tokio::time::sleep(PAUSE)).await;
    };
    let settled = is_clean(&rest, run) && run.board.read(|seen| seen.open.is_empty());
    rest.probe_right = probe(run).await;
    // The probe's own blocks go back with a step's delay.
    (rest, settled)
}

/// Nothing is held, all is there, and everybody agrees.
fn is_clean(rest: &Rest, run: &Run<'_>) -> bool {
    let core = run.nodes.len() - run.outside.len();
    let whole =
        rest.views.len() == core && rest.views.iter().all(|(_, view)| view.len() + 1 >= core);
    whole
        && rest.open_requests == 0
        && rest.waiting_requests == 0
        && rest.live_blocks == 0
        && rest.audits.is_empty()
        && rest.queued.is_empty()
        && rest.replicas_up >= rest.replicas_wanted
}

/// Of the cluster file, or as the planner may name them.
pub fn replica_names(config: &ClusterConfig) -> Vec<String> {
    match config.replicas.is_empty() {
        true => (0..config.nodes.len()).map(|at| format!("r{at}")).collect(),
        false => config.replicas.iter().map(|replica| replica.name.clone()).collect(),
    }
}

/// The books of the core: all nodes, unless the heal has left some broken.
async fn look(run: &mut Run<'_>, question: &mut u64) -> Rest {
    let config = &run.cluster.site.config;
    let names = replica_names(config);
    let wanted = heal::wanted(config, &run.outside);
    let mut rest = Rest { replicas_wanted: wanted, ..Rest::default() };
    let mut asked = BTreeMap::new();
    let core: Vec<String> =
        run.nodes.iter().filter(|node| !run.outside.contains(*node)).cloned().collect();
    for node in core {
        *question += 1;
        let ask = ToNode::Ask { id: *question, replicas: names.clone() };
        if run.hub.tell(&node, ask) {
            asked.insert(node.clone(), *question);
        }
        let pid = run.board.pid(&node);
        if let Some(bytes) = pid.and_then(signals::resident) {
            rest.memory.insert(node, bytes);
        }
    }
    for (node, id) in asked {
        let board = run.board.clone();
        let answer = board.wait(ANSWER_WITHIN, |seen| seen.answers.get(&id).cloned());
        match run.drive(answer).await {
            Some(state) => take(&mut rest, &node, state, &run.outside),
            None => rest.audits.push(format!("{node} does not answer")),
        }
    }
    rest
}

fn take(rest: &mut Rest, node: &str, mut state: NodeState, outside: &BTreeSet<String>) {
    state.peers.retain(|peer, _| !outside.contains(peer));
    rest.views.insert(node.to_string(), state.peers);
    state.queued.retain(|peer, _| !outside.contains(peer));
    for (peer, bytes) in state.queued {
        rest.queued.insert(format!("{node}/mail to {peer}"), bytes);
    }
    for (replica, (load, found)) in state.schedulers {
        rest.live_blocks += load.kv_blocks_live;
        let sum = load.kv_blocks_free + load.kv_blocks_cached + load.kv_blocks_live;
        rest.blocks.insert(replica.clone(), (sum, load.kv_blocks_total));
        rest.audits.extend(found.iter().map(|what| format!("{node}/{replica}: {what}")));
    }
    if let Some(router) = state.router {
        rest.open_requests = router.open_requests;
        rest.waiting_requests = router.waiting_requests;
        let core = |r: &&ReplicaStatus| heal::serves(&r.info.served_by, outside);
        rest.replicas_up = router.replicas.iter().filter(core).count() as u64;
    }
}

/// Asks one of the workload's requests again.
async fn probe(run: &mut Run<'_>) -> bool {
    let known = run
        .requests
        .iter()
        .find(|(number, info)| !is_extra(**number) && !info.reference.is_empty() && !info.cancels);
    let Some((number, reference)) = known.map(|(n, info)| (*n, info.reference.clone())) else {
        return false;
    };
    let Some(request) = run.spec(number) else { return false };
    let gateway = run.gateway.clone();
    let asking = async move {
        let (_keep, mut orders) = watch::channel(Orders::default());
        let mut tokens = Vec::new();
        let mut finished = false;
        let mut tell = |_, seen| match seen {
            Seen::Token { text, .. } => tokens.push(text),
            Seen::Ended { code, .. } => finished = code == "finished",
            _ => {}
        };
        gateway.follow(&request, "probe", &mut orders, &mut tell).await;
        finished && tokens == reference
    };
    run.drive(asking).await
}
