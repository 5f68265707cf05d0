//! Every metric of the actors, with its buckets. Names follow vLLM's where it has one (prefix
//! `dunlin_`), so that its dashboards need little change.

use dunlin_runtime::telemetry::{LATENCY_SECONDS, Metric};

/// Time to first token, from milliseconds to minutes.
const TTFT_SECONDS: &[f64] = &[
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
];

/// Inter-token latency: vLLM's, and finer below 10 ms.
const ITL_SECONDS: &[f64] = &[
    0.0005, 0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75,
    1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
];

const REQUEST_SECONDS: &[f64] = &[
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0,
    480.0, 960.0, 1920.0, 7680.0,
];

/// A 1-2-5 series.
const TOKENS: &[f64] = &[
    1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0, 2000.0, 5000.0, 10000.0, 20000.0,
    50000.0, 100000.0,
];

const STEP_TOKENS: &[f64] =
    &[1.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0, 16384.0];

/// What `dunlin_runtime::telemetry::init_metrics` is given, beside the runtime's own table.
pub const ACTOR_METRICS: &[Metric] = &[
    // gateway
    Metric::gauge("dunlin_gateway_requests_open", "Requests between acceptance and their end"),
    Metric::counter("dunlin_http_requests_total", "HTTP requests, by path and status code"),
    Metric::counter("dunlin_request_success_total", "Ended requests, by finished_reason"),
    Metric::histogram(
        "dunlin_time_to_first_token_seconds",
        TTFT_SECONDS,
        "From acceptance to the first token",
    ),
    Metric::histogram(
        "dunlin_inter_token_latency_seconds",
        ITL_SECONDS,
        "Between two tokens of a request",
    ),
    Metric::histogram(
        "dunlin_e2e_request_latency_seconds",
        REQUEST_SECONDS,
        "From acceptance to the end",
    ),
    Metric::histogram("dunlin_request_prompt_tokens", TOKENS, "Prompt tokens of a request"),
    Metric::histogram("dunlin_request_generation_tokens", TOKENS, "Output tokens of a request"),
    Metric::counter("dunlin_prompt_tokens_total", "Prompt tokens of ended requests"),
    Metric::counter("dunlin_prompt_tokens_cached_total", "Prompt tokens found in the prefix cache"),
    Metric::counter("dunlin_generation_tokens_total", "Output tokens delivered"),
    // router
    Metric::gauge("dunlin_router_requests_open", "Requests in the token log that have not ended"),
    Metric::gauge("dunlin_router_requests_waiting", "Of these, not on any replica"),
    Metric::counter("dunlin_router_requests_refused_total", "Refused before acceptance, by reason"),
    Metric::counter("dunlin_router_requests_ended_total", "Ended requests, by outcome"),
    Metric::counter("dunlin_router_casts_failed_total", "Messages that were not taken, by error"),
    Metric::counter("dunlin_router_prompts_hashed_total", "Prompts that came without block keys"),
    Metric::counter(
        "dunlin_router_index_forgotten_total",
        "Replicas whose part of the prefix index was dropped after a gap in KV events",
    ),
    Metric::counter(
        "dunlin_stream_diverged_total",
        "Duplicate tokens that differ from the log; must stay 0",
    ),
    Metric::counter("dunlin_stream_replays_total", "Requests handed out again, by cause"),
    Metric::counter(
        "dunlin_stream_duplicate_tokens_dropped_total",
        "Tokens of an older attempt, or already logged, that were refused",
    ),
    Metric::counter("dunlin_stream_gap_total", "Gaps in a stream's positions; must stay 0"),
    Metric::histogram(
        "dunlin_recovery_seconds",
        TTFT_SECONDS,
        "From the loss of a replica to the next token of a request that was on it",
    ),
    // scheduler and kv
    Metric::gauge("dunlin_num_requests_running", "Sequences in the running batch, by replica"),
    Metric::gauge("dunlin_num_requests_waiting", "Sequences that wait, by replica"),
    Metric::gauge("dunlin_kv_cache_usage_perc", "Share of KV blocks in use (0 to 1), by replica"),
    Metric::counter("dunlin_num_preemptions_total", "Sequences preempted, by replica"),
    Metric::counter(
        "dunlin_prefix_cache_queries_total",
        "Prompt tokens looked up in the prefix cache",
    ),
    Metric::counter("dunlin_prefix_cache_hits_total", "Prompt tokens found in it"),
    Metric::histogram(
        "dunlin_request_queue_time_seconds",
        TTFT_SECONDS,
        "From arrival at a replica to the first step",
    ),
    Metric::histogram(
        "dunlin_request_prefill_time_seconds",
        TTFT_SECONDS,
        "From the first step to the first token",
    ),
    Metric::histogram("dunlin_iteration_tokens_total", STEP_TOKENS, "Tokens of a step"),
    Metric::histogram(
        "dunlin_step_seconds",
        LATENCY_SECONDS,
        "From a step's plan, or the end of the step before it, to its tokens",
    ),
    Metric::histogram(
        "dunlin_step_device_seconds",
        LATENCY_SECONDS,
        "Of that, what the last stage's device was at work, waits for other shards included",
    ),
    // shard
    Metric::histogram("dunlin_shard_step_seconds", LATENCY_SECONDS, "Compute time of a step"),
    Metric::counter(
        "dunlin_stale_epoch_messages_total",
        "Messages of an older replica epoch that were refused, by kind",
    ),
    Metric::counter(
        "dunlin_plan_hash_mismatch_total",
        "Activations whose plan differs from the step's; must stay 0",
    ),
    Metric::counter("dunlin_kv_stale_epoch_writes_total", "KV writes of an older epoch, refused"),
    Metric::counter("dunlin_weights_reload_total", "Model loads, by whether a restart avoided one"),
];

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::path::{Path, PathBuf};

    use dunlin_runtime::telemetry::{Kind, RUNTIME_METRICS};

    use super::*;

    #[test]
    fn the_table_is_well_formed() {
        let mut names = BTreeSet::new();
        for metric in ACTOR_METRICS.iter().chain(RUNTIME_METRICS) {
            assert!(names.insert(metric.name), "{} is there twice", metric.name);
            match metric.kind {
                Kind::Counter => assert!(metric.name.ends_with("_total"), "{}", metric.name),
                Kind::Gauge => {}
                Kind::Histogram(buckets) => {
                    assert!(!buckets.is_empty() && buckets.is_sorted(), "{}", metric.name);
                }
            }
        }
    }

    fn sources(folder: &Path, found: &mut Vec<PathBuf>) {
        for entry in std::fs::read_dir(folder).unwrap().map(Result::unwrap) {
            let path = entry.path();
            if path.is_dir() {
                sources(&path, found);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                found.push(path);
            }
        }
    }

    /// A metric that is not in a table has no help and no buckets.
    #[test]
    fn every_metric_that_is_recorded_is_in_a_table() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR"));
        let mut files = Vec::new();
        for folder in ["src", "../runtime/src"] {
            sources(&root.join(folder), &mut files);
        }
        let mut unknown = Vec::new();
        for file in files {
            let text = std::fs::read_to_string(&file).unwrap();
            for (at, _) in text.match_indices("!(").filter(|(at, _)| {
                ["counter", "gauge", "histogram"].iter().any(|kind| text[..*at].ends_with(kind))
            }) {
                let argument = text[at + 2..].trim_start();
                let Some(name) = argument.strip_prefix('"').and_then(|t| t.split('"').next())
                else {
                    continue;
                };
                let known = ACTOR_METRICS.iter().chain(RUNTIME_METRICS);
                let in_a_test = name.starts_with("dunlin_test_");
                if !in_a_test && known.clone().all(|metric| metric.name != name) {
                    unknown.push(format!("{name} in {}", file.display()));
                }
            }
        }
        assert!(unknown.is_empty(), "add to ACTOR_METRICS or RUNTIME_METRICS: {unknown:#?}");
    }
}
