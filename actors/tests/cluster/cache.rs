//! Who may find whose blocks, and memory that is too small for all.

use crate::harness::*;

/// C28: what is in the key keeps equal tokens apart.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn c28_tenants_and_salts_do_not_share_blocks() {
    let cluster = LocalCluster::start(Setup::replicas(&["left"])).await;
    let ask = |id: u64, tenant: &str, salt: &str| {
        let prompt = (0..40).map(|i| i * 3 + 1).collect();
        let mut request = cluster.request(id, prompt, 12);
        (request.tenant, request.cache_salt) = (tenant.into(), salt.into());
        request
    };
    let cases = [
        ("lab", "", false),
        ("other", "", false),
        ("lab", "salt", false),
        ("other", "salt", false),
        ("lab", "", true),
        ("other", "", true),
        ("lab", "salt", true),
    ];
    for (id, (tenant, salt, hits)) in (1..).zip(cases) {
        let stream = cluster.submit(&ask(id, tenant, salt)).await;
        let (usage, _) = stream.finished().await;
        let cached = usage.cached_tokens;
        assert_eq!(cached > 0, hits, "tenant {tenant:?}, salt {salt:?}: {cached} cached tokens");
    }
    cluster.settled(SOON).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn preempted_requests_give_the_undisturbed_text() {
    let mut setup = Setup::replicas(&["left"]);
    setup.kv_blocks = 40;
    let cluster = LocalCluster::start(setup).await;
    let mut streams = Vec::new();
    for id in 1..=16 {
        streams.push(cluster.submit(&cluster.mixed(id, 16, 100)).await);
    }
    for stream in streams {
        stream.finished().await;
    }
    let preempted = |s: &dunlin_actors::messages::RouterStatus| {
        s.replicas.iter().any(|r| r.load.preemptions_total > 0)
    };
    cluster.until("some were preempted", preempted).await;
    cluster.settled(SOON).await;
}
