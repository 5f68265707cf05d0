//! What a process tells about itself: metrics in Prometheus' text format, logs and spans.
//!
//! There is one recorder and one subscriber per process. Several nodes may live in one process, so
//! both can be set up any number of times, and a metric that must tell nodes apart has a label for it.

mod log;
mod metrics;
mod process;

pub use self::log::{LogError, LogOptions, init_log};
pub use self::metrics::{Kind, LATENCY_SECONDS, Metric, Metrics, RUNTIME_METRICS, init_metrics};
pub use self::process::{ProcessStats, process_stats};
