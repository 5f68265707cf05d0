//! Where a fault enters an actor: at the head of its `handle`, before it looks at the message.
//!
//! While no plan is armed this is one test of an `Option`.

use dunlin_runtime::faults::names::FAULT_DONE;
use dunlin_runtime::{Action, Node, Site};

/// The actor `role/instance` is about to handle `message`. Panics, or takes its time, if that is
/// what a fault plan says.
#[inline]
pub async fn message(node: &Node, role: &str, instance: &str, message: &'static str) {
    if node.faults().is_armed() {
        injected(node, role, instance, message).await;
    }
}

async fn injected(node: &Node, role: &str, instance: &str, message: &'static str) {
    let site = Site::Message { node: node.name(), role, instance, message };
    let Some(action) = node.faults().decide(site) else { return };
    let done = |what: &str, micros: u64| {
        let proof = || format!("{role}/{instance} {what} at {message}");
        crate::facts::tell(node, FAULT_DONE, proof, (micros, 0));
    };
    match action {
        Action::Panic(text) => {
            done("panics", 0);
            panic!("{text}");
        }
        Action::Hang(pause) | Action::Delay(pause) => {
            done("waits", u64::try_from(pause.as_micros()).unwrap_or(u64::MAX));
            tokio::time::sleep(pause).await;
        }
        other => tracing::warn!(role, instance, message, ?other, "has no meaning at a message"),
    }
}
