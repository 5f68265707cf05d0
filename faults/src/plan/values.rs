//! Values as plans write them: durations, rates, sizes, and half-open ranges from which one value
//! is drawn for each run.

use crate::draw::Draws;
use dunlin_runtime::config::tree::{Node, Reader, Value};
use dunlin_runtime::config::{ConfigError, Problem, nearest, parse_size};

/// A half-open range from which one value is drawn; a plain value is a range of one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Span {
    pub from: u64,
    pub to: u64,
}

impl Span {
    pub const fn one(value: u64) -> Self {
        Self { from: value, to: value.saturating_add(1) }
    }

    pub fn draw(self, draws: &mut Draws) -> u64 {
        draws.range(self.from, self.to)
    }

    /// The greatest value that can be drawn.
    pub fn last(self) -> u64 {
        self.to.saturating_sub(1)
    }
}

/// `250us`, `500ms`, `1.5s`, `2m`, `1h`, in microseconds. At most a week.
pub fn parse_duration(text: &str) -> Option<u64> {
    let digits = text.find(|c: char| !c.is_ascii_digit() && c != '.')?;
    let (number, unit) = text.split_at(digits);
    let scale = match unit.trim() {
        "us" => 1.0,
        "ms" => 1e3,
        "s" => 1e6,
        "m" | "min" => 60e6,
        "h" => 3600e6,
        _ => return None,
    };
    let us = number.parse::<f64>().ok()? * scale;
    (0.0..=604_800e6).contains(&us).then(|| us.round() as u64)
}

/// `800kbit/s`, `10Mbit/s`, `1.5Gbit/s`, in bits for each second.
pub fn parse_rate(text: &str) -> Option<u64> {
    let text = text.strip_suffix("/s").unwrap_or(text);
    let number = text.strip_suffix("bit")?;
    let (number, scale) = match number.chars().last()? {
        'k' => (number.strip_suffix('k')?, 1e3),
        'M' => (number.strip_suffix('M')?, 1e6),
        'G' => (number.strip_suffix('G')?, 1e9),
        _ => (number, 1.0),
    };
    let bits = number.trim().parse::<f64>().ok()? * scale;
    (1.0..=1e15).contains(&bits).then(|| bits.round() as u64)
}

/// `a..b`, half-open and not empty, by what parses its ends.
fn parse_range(text: &str, parse: impl Fn(&str) -> Option<u64>) -> Option<Span> {
    let (from, to) = text.split_once("..")?;
    let span = Span { from: parse(from.trim())?, to: parse(to.trim())? };
    (span.from < span.to).then_some(span)
}

const DURATION: &str = "write a duration like \"500ms\" or \"10s\", or a range like \"1s..3s\"";

/// A duration, or a range of them, in microseconds.
pub fn durations(table: &mut Reader<'_>, key: &'static str) -> Result<Option<Span>, ConfigError> {
    let Some(text) = table.string(key)? else { return Ok(None) };
    let span = parse_range(text, parse_duration).or_else(|| parse_duration(text).map(Span::one));
    span.map(Some).ok_or_else(|| table.bad(key, "not a duration", DURATION))
}

/// One duration in microseconds.
pub fn duration(table: &mut Reader<'_>, key: &'static str) -> Result<Option<u64>, ConfigError> {
    let Some(text) = table.string(key)? else { return Ok(None) };
    let us = parse_duration(text);
    let mend = "write a duration like \"500ms\" or \"10s\"";
    us.map(Some).ok_or_else(|| table.bad(key, "not a duration", mend))
}

/// A whole number, `"a..b"` (half-open) or `[a, b]` (both ends count), within bounds.
pub fn numbers(
    table: &mut Reader<'_>,
    key: &'static str,
    min: u64,
    max: u64,
) -> Result<Option<Span>, ConfigError> {
    let Some(node) = table.node(key) else { return Ok(None) };
    let mend = format!("write a number from {min} to {max}, or a range like \"{min}..{max}\"");
    let span = match &node.value {
        Value::Integer(_) => {
            Some(Span::one(table.integer_at(&table.child(key), node, min, max)?))
        }
        Value::String(text) => parse_range(text, |end| end.parse().ok()),
        Value::Array(ends) => match ends.as_slice() {
            [from, to] => pair(from, to),
            _ => None,
        },
        _ => return Err(table.wrong_type(key, "a number or a range", node, &mend)),
    };
    let Some(span) = span else { return Err(table.bad(key, "not a range", mend)) };
    if span.from < min || span.last() > max {
        return Err(table.bad(key, format!("not within {min} to {max}"), mend));
    }
    Ok(Some(span))
}

fn pair(from: &Node, to: &Node) -> Option<Span> {
    let (Value::Integer(from), Value::Integer(to)) = (&from.value, &to.value) else { return None };
    let (from, last) = (u64::try_from(*from).ok()?, u64::try_from(*to).ok()?);
    (from <= last).then(|| Span { from, to: last.saturating_add(1) })
}

/// A number with or without a fraction, within bounds.
pub fn float(
    table: &mut Reader<'_>,
    key: &'static str,
    min: f64,
    max: f64,
) -> Result<Option<f64>, ConfigError> {
    let Some(node) = table.node(key) else { return Ok(None) };
    let number = match &node.value {
        Value::Integer(number) => *number as f64,
        Value::Float(number) => *number,
        _ => return Err(table.wrong_type(key, "a number", node, "write it without quotes")),
    };
    if !(min..=max).contains(&number) {
        let mend = format!("write a number from {min} to {max}");
        return Err(table.bad(key, "out of range", mend));
    }
    Ok(Some(number))
}

/// A whole number that may be negative.
pub fn signed(
    table: &mut Reader<'_>,
    key: &'static str,
    most: i64,
) -> Result<Option<i64>, ConfigError> {
    let Some(node) = table.node(key) else { return Ok(None) };
    let Value::Integer(number) = &node.value else {
        return Err(table.wrong_type(key, "an integer", node, "write a whole number"));
    };
    let number = i64::try_from(*number).ok().filter(|number| number.abs() <= most);
    let mend = format!("write a number from -{most} to {most}");
    number.map(Some).ok_or_else(|| table.bad(key, "out of range", mend))
}

/// A size in bytes: an integer, or a string with a unit.
pub fn bytes(table: &mut Reader<'_>, key: &'static str) -> Result<Option<u64>, ConfigError> {
    let Some(node) = table.node(key) else { return Ok(None) };
    let bytes = match &node.value {
        Value::Integer(number) => u64::try_from(*number).ok().filter(|bytes| *bytes <= 1 << 50),
        Value::String(text) => parse_size(text),
        _ => None,
    };
    let mend = "write a size like \"512MiB\", or a number of bytes";
    bytes.map(Some).ok_or_else(|| table.bad(key, "not a size", mend))
}

/// A rate in bits for each second.
pub fn rate(table: &mut Reader<'_>, key: &'static str) -> Result<Option<u64>, ConfigError> {
    let Some(node) = table.node(key) else { return Ok(None) };
    let bits = match &node.value {
        Value::Integer(number) => u64::try_from(*number).ok().filter(|bits| *bits > 0),
        Value::String(text) => parse_rate(text),
        _ => None,
    };
    let mend = "write a rate like \"10Mbit/s\", or a number of bits for each second";
    bits.map(Some).ok_or_else(|| table.bad(key, "not a rate", mend))
}

/// One of a few words.
pub fn word<'a, T: Copy>(
    table: &mut Reader<'_>,
    key: &'static str,
    known: impl IntoIterator<Item = (&'a str, T)>,
) -> Result<Option<T>, ConfigError> {
    let Some(text) = table.string(key)? else { return Ok(None) };
    let known: Vec<(&str, T)> = known.into_iter().collect();
    match known.iter().find(|(word, _)| *word == text) {
        Some((_, value)) => Ok(Some(*value)),
        None => {
            let mend = did_you_mean(text, known.iter().map(|(word, _)| *word));
            Err(table.bad(key, "not a known word", mend))
        }
    }
}

/// What to write instead of `wrong`.
pub fn did_you_mean<'a>(wrong: &str, known: impl Iterator<Item = &'a str> + Clone) -> String {
    match nearest(wrong, known.clone()) {
        Some(near) => format!("did you mean \"{near}\"?"),
        None => format!("use one of: {}", known.collect::<Vec<_>>().join(", ")),
    }
}

/// An error about a key that is not allowed here.
pub fn conflict(
    table: &Reader<'_>,
    key: &str,
    reason: impl Into<String>,
    mend: impl Into<String>,
) -> ConfigError {
    let problem = Problem::Conflict { reason: reason.into() };
    table.source().error(&table.child(key), problem, mend)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn durations_and_rates() {
        assert_eq!(parse_duration("250us"), Some(250));
        assert_eq!(parse_duration("1.5s"), Some(1_500_000));
        assert_eq!(parse_duration("2m"), Some(120_000_000));
        for wrong in ["", "5", "s", "-1s", "1 day", "1e9s", "99999h"] {
            assert_eq!(parse_duration(wrong), None, "{wrong}");
        }
        assert_eq!(parse_rate("10Mbit/s"), Some(10_000_000));
        assert_eq!(parse_rate("800kbit"), Some(800_000));
        assert_eq!(parse_rate("10MB"), None);
        assert_eq!(parse_range("3..5", |n| n.parse().ok()), Some(Span { from: 3, to: 5 }));
        assert_eq!(parse_range("5..5", |n| n.parse().ok()), None);
    }

    proptest! {
        #[test]
        fn no_text_panics(text in ".{0,24}") {
            parse_duration(&text);
            parse_rate(&text);
            parse_range(&text, parse_duration);
        }
    }
}
