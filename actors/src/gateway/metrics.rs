//! Every node's metrics from one address: a gateway asks the node for what it would serve itself.

use super::MetricsText;
use super::error::ApiError;
use axum::http::StatusCode;
use dunlin_runtime::{Address, CallError, Export, ExportError, Inbound, Node, NodeName, Protocol};
use std::time::Duration;

const ROLE: &str = "metrics";

/// A scrape must not hang because a node does.
const DEADLINE: Duration = Duration::from_millis(1500);

/// The call is a scrape, the reply the exposition.
struct MetricsProtocol;

impl Protocol for MetricsProtocol {
    const NAME: &'static str = "metrics";
    const VERSION: u16 = 1;
    type Cast = ();
    type Call = ();
    type Reply = String;
}

/// Lets gateways read this process's metrics for as long as the result lives.
pub fn export_metrics(node: &Node, text: MetricsText) -> Result<Export, ExportError> {
    node.export::<MetricsProtocol>(ROLE, "main", move |inbound| {
        if let Inbound::Call { reply, .. } = inbound {
            let text = text.clone();
            tokio::task::spawn_blocking(move || reply.send(text()));
        }
    })
}

/// The metrics of the node of this name.
pub(super) async fn of_node(
    node: &Node,
    own: &MetricsText,
    name: &str,
) -> Result<String, ApiError> {
    let known = |name: &NodeName| node.peers().iter().any(|peer| peer.node == *name);
    let name = match NodeName::new(name) {
        Ok(name) if name == *node.name() => return Ok(own()),
        Ok(name) if known(&name) => name,
        _ => {
            let message = format!("There is no node '{name}'; /cluster/status lists all nodes.");
            let error = ApiError::client(StatusCode::NOT_FOUND, "unknown_node", message);
            return Err(ApiError { param: Some("node".into()), ..error });
        }
    };
    let to = Address::new(name, ROLE, "main");
    let answer = node.call::<MetricsProtocol>(&to, &(), DEADLINE).await;
    answer.map_err(|error: CallError| {
        let message = format!("Its metrics cannot be read: {error}.");
        ApiError::unavailable("node_unavailable", message, Duration::from_secs(1))
    })
}
