//! Logs and spans, to standard error and to a file.

use std::fs::{File, OpenOptions};
use std::io::IsTerminal;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};

use crate::wall;
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::time::FormatTime;
use tracing_subscriber::fmt::writer::BoxMakeWriter;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{EnvFilter, Layer, Registry, fmt};

/// How to log. `DUNLIN_LOG` overrides `filter`, `DUNLIN_LOG_FORMAT` (`text` or `json`) overrides
/// `json`.
#[derive(Debug, Clone, Default)]
pub struct LogOptions {
    /// A `tracing` filter: `info`, `warn,dunlin_runtime=debug`. Empty means `info`.
    pub filter: String,
    pub json: bool,
    /// Also append to this file, without colours.
    pub file: Option<PathBuf>,
}

#[derive(Debug, thiserror::Error)]
pub enum LogError {
    #[error(
        "DUNLIN_LOG={filter}: {reason}\n  = help: write a level (error, warn, info, debug, trace), or \
         parts like dunlin_runtime=debug separated by commas"
    )]
    Filter { filter: String, reason: String },
    #[error("DUNLIN_LOG_FORMAT={0}: not a format\n  = help: write text or json")]
    Format(String),
    #[error("the log file {path} cannot be written: {reason}\n  = help: check the folder")]
    File { path: PathBuf, reason: String },
}

/// Installs the subscriber; once it is there, further calls change nothing.
pub fn init_log(options: &LogOptions) -> Result<(), LogError> {
    let layers = layers(options)?;
    // An error says that a subscriber is there: another node of this process, or a test's.
    let _ = tracing_subscriber::registry().with(layers).try_init();
    Ok(())
}

type Layers = Vec<Box<dyn Layer<Registry> + Send + Sync>>;

fn layers(options: &LogOptions) -> Result<Layers, LogError> {
    let var = |name| std::env::var(name).ok().filter(|text| !text.is_empty());
    let default = if options.filter.is_empty() { "info" } else { &options.filter };
    let filter = var("DUNLIN_LOG").unwrap_or_else(|| default.to_string());
    let json = match var("DUNLIN_LOG_FORMAT").as_deref() {
        None => options.json,
        Some("json") => true,
        Some("text") => false,
        Some(other) => return Err(LogError::Format(other.to_string())),
    };
    let mut layers: Layers = Vec::new();
    let colours = std::io::stderr().is_terminal() && std::env::var_os("NO_COLOR").is_none();
    let stderr = BoxMakeWriter::new(std::io::stderr);
    layers.push(layer(stderr, json, colours, parse(&filter)?));
    if let Some(path) = &options.file {
        let file = open(path)?;
        layers.push(layer(BoxMakeWriter::new(file), json, false, parse(&filter)?));
    }
    Ok(layers)
}

fn parse(filter: &str) -> Result<EnvFilter, LogError> {
    EnvFilter::builder()
        .parse(filter)
        .map_err(|e| LogError::Filter { filter: filter.to_string(), reason: e.to_string() })
}

fn layer(
    writer: BoxMakeWriter,
    json: bool,
    colours: bool,
    filter: EnvFilter,
) -> Box<dyn Layer<Registry> + Send + Sync> {
    let layer = fmt::layer().with_timer(WallTime).with_writer(writer).with_ansi(colours);
    let layer = layer.with_target(true);
    if json { layer.json().with_filter(filter).boxed() } else { layer.with_filter(filter).boxed() }
}

/// Microseconds of the process's wall clock, in UTC (RFC 3339).
struct WallTime;

impl FormatTime for WallTime {
    fn format_time(&self, to: &mut Writer<'_>) -> std::fmt::Result {
        let since = wall::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
        let (seconds, micros) = (since.as_secs(), since.subsec_micros());
        let (year, month, day) = date(seconds / 86_400);
        let (hour, minute, second) = (seconds / 3600 % 24, seconds / 60 % 60, seconds % 60);
        write!(to, "{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}.{micros:06}Z")
    }
}

/// Year, month and day of a day since 1970 (Hinnant, "chrono-compatible low-level date
/// algorithms": years that begin in March put the leap day last).
fn date(days: u64) -> (u64, u64, u64) {
    let days = days + 719_468;
    let (era, day) = (days / 146_097, days % 146_097);
    let year = (day - day / 1460 + day / 36_524 - day / 146_096) / 365;
    let day = day - (365 * year + year / 4 - year / 100);
    let month = (5 * day + 2) / 153;
    let day = day - (153 * month + 2) / 5 + 1;
    let month = if month < 10 { month + 3 } else { month - 9 };
    (era * 400 + year + u64::from(month <= 2), month, day)
}

fn open(path: &PathBuf) -> Result<Arc<LogFile>, LogError> {
    let failed = |e: std::io::Error| LogError::File { path: path.clone(), reason: e.to_string() };
    if let Some(folder) = path.parent() {
        std::fs::create_dir_all(folder).map_err(failed)?;
    }
    let file = OpenOptions::new().create(true).append(true).open(path).map_err(failed)?;
    Ok(Arc::new(LogFile(Mutex::new(file))))
}

struct LogFile(Mutex<File>);

impl std::io::Write for &LogFile {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        // A panic while writing leaves at worst half a line.
        self.0.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).write(bytes)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bad_filters_are_refused_and_good_ones_are_not() {
        for good in ["info", "warn,dunlin_runtime=debug", "dunlin_runtime::link=trace,error"] {
            parse(good).unwrap();
        }
        let error = parse("dunlin=loud").unwrap_err().to_string();
        assert!(error.contains("DUNLIN_LOG=dunlin=loud") && error.contains("help"), "{error}");
    }

    #[test]
    fn days_have_the_dates_of_the_calendar() {
        for (days, expected) in [
            (0, (1970, 1, 1)),
            (11_016, (2000, 2, 29)),
            (11_017, (2000, 3, 1)),
            (20_786, (2026, 11, 29)),
            (47_540, (2100, 2, 28)),
            (47_541, (2100, 3, 1)),
        ] {
            assert_eq!(date(days), expected);
        }
    }

    #[test]
    fn lines_go_to_the_file() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("logs/node.log");
        let options = LogOptions { file: Some(path.clone()), ..LogOptions::default() };
        let subscriber = tracing_subscriber::registry().with(layers(&options).unwrap());
        tracing::subscriber::with_default(subscriber, || {
            tracing::info!("a line for the file");
        });
        let text = std::fs::read_to_string(&path).unwrap();
        assert!(text.contains("a line for the file"), "{text:?}");
        let (stamp, _) = text.split_once(' ').unwrap();
        let shape: String =
            stamp.chars().map(|c| if c.is_ascii_digit() { '0' } else { c }).collect();
        assert_eq!(shape, "0000-00-00T00:00:00.000000Z", "{stamp}");
    }
}
