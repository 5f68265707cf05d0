//! The gateway's `/metrics` reaches every node.

use crate::harness::*;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_gateway_serves_the_metrics_of_every_node() {
    let mut cluster = LocalCluster::start(Setup::replicas(&["left", "right"])).await;
    for node in ["head", "left", "right"] {
        let (code, answer) = cluster.get(&format!("/metrics?node={node}")).await;
        assert_eq!(code, 200, "{answer}");
        assert!(answer.contains(&format!("test_node{{node=\"{node}\"}} 1")), "{answer}");
    }
    let (code, answer) = cluster.get("/metrics").await;
    assert!(code == 200 && answer.contains("node=\"head\""), "{answer}");
    let (code, answer) = cluster.get("/metrics?node=nobody").await;
    assert_eq!(code, 404, "{answer}");
    assert!(answer.contains("unknown_node") && answer.contains("'nobody'"), "{answer}");
    let zombie = cluster.crash("left");
    let (code, answer) = cluster.get("/metrics?node=left").await;
    assert_eq!(code, 503, "{answer}");
    assert!(answer.contains("node_unavailable") && answer.contains("left"), "{answer}");
    assert!(answer.to_lowercase().contains("retry-after: 1"), "{answer}");
    zombie.stop().await;
}
