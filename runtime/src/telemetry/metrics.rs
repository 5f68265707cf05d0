//! The metrics recorder. Every metric is declared in a table, with its buckets, before it is used.

use std::sync::OnceLock;
use std::time::Duration;

use metrics_exporter_prometheus::{Matcher, PrometheusBuilder, PrometheusHandle};

use super::process::process_stats;

/// One metric family.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Metric {
    pub name: &'static str,
    pub kind: Kind,
    pub help: &'static str,
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Kind {
    /// Its name ends in `_total`.
    Counter,
    Gauge,
    /// Upper bounds of its buckets, rising; `+Inf` is added.
    Histogram(&'static [f64]),
}

impl Metric {
    pub const fn counter(name: &'static str, help: &'static str) -> Metric {
        Metric { name, kind: Kind::Counter, help }
    }

    pub const fn gauge(name: &'static str, help: &'static str) -> Metric {
        Metric { name, kind: Kind::Gauge, help }
    }

    pub const fn histogram(
        name: &'static str,
        buckets: &'static [f64],
        help: &'static str,
    ) -> Metric {
        Metric { name, kind: Kind::Histogram(buckets), help }
    }
}

/// Buckets from 100 us to 10 s, for the time that anything inside takes.
pub const LATENCY_SECONDS: &[f64] = &[
    0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0,
    10.0,
];

/// What this crate measures, and what it says of the process (the latter by the names that
/// Prometheus' own clients use).
pub const RUNTIME_METRICS: &[Metric] = &[
    Metric::counter(
        "dunlin_actor_restarts_total",
        "Restarts by a supervisor, by actor (supervisor/child) and reason (stopped, killed, failed, \
         start_failed)",
    ),
    Metric::counter(
        "dunlin_node_process_restarts_total",
        "Restarts of node processes by `dunlin up`, by node and reason (exited, signal, start_failed)",
    ),
    Metric::gauge("dunlin_mailbox_bytes", "Bytes held in an exported mailbox, by role"),
    Metric::gauge("dunlin_quic_rtt_seconds", "Smoothed round-trip time to a peer"),
    Metric::counter("dunlin_quic_lost_packets_total", "Packets to a peer that were lost"),
    Metric::counter("dunlin_control_frames_total", "Control-plane frames, by direction"),
    Metric::counter("dunlin_frames_refused_total", "Frames refused before decoding, by reason"),
    Metric::counter("dunlin_hellos_refused_total", "Connections refused at the hello"),
    Metric::gauge("process_resident_memory_bytes", "Resident memory of this process"),
    Metric::gauge("process_cpu_seconds_total", "CPU time of this process, user and system"),
    Metric::gauge("process_threads", "Threads of this process"),
    Metric::gauge("process_open_fds", "Open file descriptors of this process"),
];

/// Histograms hold raw samples until they are drained; unscraped processes drain by themselves.
const UPKEEP_EVERY: Duration = Duration::from_secs(5);

/// Renders what has been recorded. Cheap to clone.
#[derive(Clone)]
pub struct Metrics(PrometheusHandle);

impl Metrics {
    /// The exposition text (version 0.0.4), process figures included.
    pub fn render(&self) -> String {
        let stats = process_stats();
        metrics::gauge!("process_resident_memory_bytes").set(stats.resident_bytes as f64);
        metrics::gauge!("process_cpu_seconds_total").set(stats.cpu_seconds);
        metrics::gauge!("process_threads").set(stats.threads as f64);
        metrics::gauge!("process_open_fds").set(stats.open_files as f64);
        self.0.render()
    }
}

/// Installs the recorder with these tables of metrics, or returns the one that is installed.
///
/// The first call decides the buckets: pass every table of the program in it.
pub fn init_metrics(tables: &[&[Metric]]) -> Metrics {
    static METRICS: OnceLock<Metrics> = OnceLock::new();
    METRICS.get_or_init(|| install(tables)).clone()
}

fn install(tables: &[&[Metric]]) -> Metrics {
    let all = || tables.iter().flat_map(|table| table.iter());
    let mut builder = PrometheusBuilder::new();
    for metric in all() {
        if let Kind::Histogram(buckets) = metric.kind {
            let matcher = Matcher::Full(metric.name.to_string());
            // Fails for an empty list alone, which the tables' tests refuse.
            let with_buckets = builder.set_buckets_for_metric(matcher, buckets);
            builder = with_buckets.unwrap_or_else(|_| PrometheusBuilder::new());
        }
    }
    let recorder = builder.build_recorder();
    let handle = recorder.handle();
    if metrics::set_global_recorder(recorder).is_err() {
        tracing::error!("another metrics recorder is installed: /metrics stays empty");
    }
    for metric in all() {
        match metric.kind {
            Kind::Counter => metrics::describe_counter!(metric.name, metric.help),
            Kind::Gauge => metrics::describe_gauge!(metric.name, metric.help),
            Kind::Histogram(_) => metrics::describe_histogram!(metric.name, metric.help),
        }
    }
    let upkeep = handle.clone();
    let spawned = std::thread::Builder::new().name("metrics-upkeep".into()).spawn(move || {
        loop {
            std::thread::sleep(UPKEEP_EVERY);
            upkeep.run_upkeep();
        }
    });
    if let Err(e) = spawned {
        tracing::error!("no thread for the metrics' upkeep: {e}; they grow until scraped");
    }
    Metrics(handle)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_is_well_formed() {
        for metric in RUNTIME_METRICS {
            let ours = metric.name.starts_with("dunlin_") || metric.name.starts_with("process_");
            assert!(ours, "{}", metric.name);
            if metric.kind == Kind::Counter {
                assert!(metric.name.ends_with("_total"), "{}", metric.name);
            }
            let twins = RUNTIME_METRICS.iter().filter(|other| other.name == metric.name);
            assert_eq!(twins.count(), 1, "{}", metric.name);
        }
        assert!(LATENCY_SECONDS.is_sorted());
    }

    #[test]
    fn what_is_recorded_is_rendered_with_its_help_and_buckets() {
        const TABLE: &[Metric] = &[
            Metric::histogram("dunlin_test_seconds", &[0.5, 1.0], "A test's time"),
            Metric::counter("dunlin_test_things_total", "A test's things"),
        ];
        init_metrics(&[RUNTIME_METRICS, TABLE]);
        let again = init_metrics(&[]);
        metrics::histogram!("dunlin_test_seconds", "node" => "left").record(0.7);
        metrics::counter!("dunlin_test_things_total").increment(3);
        metrics::counter!("dunlin_actor_restarts_total", "actor" => "a/b", "reason" => "failed")
            .increment(1);
        let text = again.render();
        for line in [
            "# HELP dunlin_test_seconds A test's time",
            "# TYPE dunlin_test_seconds histogram",
            "dunlin_test_seconds_bucket{node=\"left\",le=\"0.5\"} 0",
            "dunlin_test_seconds_bucket{node=\"left\",le=\"1\"} 1",
            "dunlin_test_seconds_bucket{node=\"left\",le=\"+Inf\"} 1",
            "dunlin_test_things_total 3",
            "dunlin_actor_restarts_total{actor=\"a/b\",reason=\"failed\"}",
        ] {
            assert!(text.contains(line), "no {line:?} in\n{text}");
        }
        let resident = text.lines().find(|line| line.starts_with("process_resident_memory_bytes"));
        let bytes: f64 = resident.unwrap().rsplit(' ').next().unwrap().parse().unwrap();
        assert!(bytes > 1e6, "{resident:?}");
    }
}
