//! The server's own figures of a run: what its replicas' steps took, from its `/metrics`.
//!
//! Knows nothing of what the steps computed. A server of another kind has no such metrics, and then
//! there is nothing to report.

use crate::client::Client;
use serde_json::{Value, json};
use std::fmt;

/// Sums over all replicas of the node that was asked.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Steps {
    count: f64,
    /// From plan, or the end of the step before, to the tokens.
    seconds: f64,
    /// The last stage's device at work.
    device_seconds: f64,
}

impl Steps {
    pub async fn read(client: &Client) -> Option<Self> {
        client.text("/metrics").await.ok().map(|text| Self::parse(&text))
    }

    fn parse(text: &str) -> Self {
        let sum = |name: &str| -> f64 {
            let of = |line: &str| {
                let (labelled, value) = line.rsplit_once(' ')?;
                let found = labelled.split('{').next() == Some(name);
                found.then(|| value.parse::<f64>().ok()).flatten()
            };
            text.lines().filter_map(of).sum()
        };
        Self {
            count: sum("dunlin_step_seconds_count"),
            seconds: sum("dunlin_step_seconds_sum"),
            device_seconds: sum("dunlin_step_device_seconds_sum"),
        }
    }

    /// What came in between; `None` if that was no step.
    pub fn between(before: Option<Self>, after: Option<Self>) -> Option<Self> {
        let (before, after) = (before?, after?);
        let steps = Self {
            count: after.count - before.count,
            seconds: after.seconds - before.seconds,
            device_seconds: after.device_seconds - before.device_seconds,
        };
        (steps.count > 0.0 && steps.seconds > 0.0).then_some(steps)
    }

    pub fn mean_ms(&self) -> f64 {
        self.seconds / self.count * 1e3
    }

    /// The share of a step in which the device was not at work.
    pub fn beside_percent(&self) -> f64 {
        (1.0 - self.device_seconds / self.seconds) * 100.0
    }

    pub fn as_json(&self) -> Value {
        json!({
            "count": self.count,
            "mean_ms": self.mean_ms(),
            "device_ms": self.device_seconds / self.count * 1e3,
            "beside_percent": self.beside_percent(),
        })
    }
}

impl fmt::Display for Steps {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "steps        {} of {:.3} ms, the device {:.3} ms of it: {:.1} % beside it",
            self.count,
            self.mean_ms(),
            self.device_seconds / self.count * 1e3,
            self.beside_percent()
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sums_are_over_replicas_and_nothing_else() {
        let text = "\
# TYPE dunlin_step_seconds histogram
dunlin_step_seconds_bucket{replica=\"r0\",le=\"+Inf\"} 9
dunlin_step_seconds_sum{replica=\"r0\"} 1.5
dunlin_step_seconds_count{replica=\"r0\"} 10
dunlin_step_seconds_sum{replica=\"r1\"} 0.5
dunlin_step_seconds_count{replica=\"r1\"} 10
dunlin_step_device_seconds_sum{replica=\"r0\"} 1.8
other 7";
        let steps = Steps::parse(text);
        assert_eq!(steps, Steps { count: 20.0, seconds: 2.0, device_seconds: 1.8 });
        let all = Steps::between(Some(Steps::default()), Some(steps)).expect("steps");
        assert!((all.mean_ms() - 100.0).abs() < 1e-9);
        assert!((all.beside_percent() - 10.0).abs() < 1e-9);
        assert_eq!(Steps::between(Some(steps), Some(steps)), None);
        assert_eq!(Steps::parse("nothing here"), Steps::default());
    }
}
