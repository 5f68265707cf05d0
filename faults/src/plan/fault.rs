//! Reads `[[fault]]`: kind, target, trigger and the parameters that the kind takes.

use super::target;
use super::values::{
    Span, bytes, conflict, did_you_mean, duration, durations, float, numbers, parse_duration, rate,
    signed, word,
};
use super::{Drawn, FaultPlan, TargetPlan, When};
use crate::catalog::{self, Hits, Lasts, Param, Row};
use crate::events::{self, EVENTS, MESSAGES};
use crate::fault::{Edge, Expect, Kind, Params, SITES};
use dunlin_runtime::config::tree::{Reader, Value};
use dunlin_runtime::config::{ClusterConfig, ConfigError, Problem};

const MANY: u64 = 1 << 40;

pub(super) fn all(
    root: &mut Reader<'_>,
    config: &ClusterConfig,
) -> Result<Vec<FaultPlan>, ConfigError> {
    let Some(node) = root.node("fault") else { return Ok(Vec::new()) };
    let Value::Array(items) = &node.value else {
        let mend = "write it with two brackets: [[fault]]";
        return Err(root.wrong_type("fault", "a list of tables", node, mend));
    };
    let mut faults: Vec<FaultPlan> = Vec::new();
    for (at, item) in items.iter().enumerate() {
        let table = Reader::of(root.source(), format!("fault.{at}"), item)?;
        let fault = one(table, config)?;
        if let Some(first) = faults.iter().position(|other| other.id == fault.id) {
            let first = root.source().whereabouts(&format!("fault.{first}.id"));
            let problem = Problem::Duplicate { what: "fault", value: fault.id, first };
            let mend = "give each fault an id of its own";
            return Err(root.source().error(&format!("fault.{at}.id"), problem, mend));
        }
        faults.push(fault);
    }
    Ok(faults)
}

fn one(mut table: Reader<'_>, config: &ClusterConfig) -> Result<FaultPlan, ConfigError> {
    let id = table.string("id")?.map(str::to_string);
    let id = id.ok_or_else(|| table.missing("id", "add id = \"kill\", to name it in reports"))?;
    // A concrete fault of several targets is called `id#2`; a swarm's `swarm-3`.
    if id.is_empty() || !id.chars().all(|c| c.is_ascii_alphanumeric() || "-_".contains(c)) {
        return Err(table.bad("id", "not an id", "use letters, digits, '-' and '_'"));
    }
    let kind = kind(&mut table)?;
    let row = catalog::row(kind);
    let (target, message) = target(&mut table, row, config)?;
    let when = when(&mut table, config)?;
    let lasts = lasts(&mut table, row)?;
    let times = times(&mut table, row)?;
    let (mut params, drawn) = params(&mut table, row)?;
    if let Some(message) = message {
        if params.message.is_some() {
            let mend = "keep one of the two";
            return Err(conflict(&table, "message", "the target names a message as well", mend));
        }
        params.message = Some(message);
    }
    let expect = expect(&mut table)?.unwrap_or(row.expect);
    table.finish()?;
    Ok(FaultPlan { id, kind, target, when, lasts, times, params, drawn, expect })
}

fn kind(table: &mut Reader<'_>) -> Result<Kind, ConfigError> {
    let name = table.string("kind")?;
    let name = name.ok_or_else(|| table.missing("kind", "add kind = \"process.kill\""))?;
    Kind::parse(name).ok_or_else(|| {
        let names = Kind::ALL.map(Kind::name);
        let problem = Problem::NotFound { what: "kind", value: name.to_string() };
        let mend = did_you_mean(name, names.iter().copied());
        table.source().error(&table.child("kind"), problem, mend)
    })
}

fn target(
    table: &mut Reader<'_>,
    row: &Row,
    config: &ClusterConfig,
) -> Result<(TargetPlan, Option<String>), ConfigError> {
    let (target, message) = target::read(table, row, config)?;
    if message.is_some() && row.takes(Param::Message).is_none() {
        let reason = format!("{} reads no `message`", row.kind.name());
        return Err(conflict(table, "target.message", reason, "leave it out"));
    }
    Ok((target, message))
}

/// A name of a message, checked.
pub(super) fn message(table: &mut Reader<'_>) -> Result<Option<String>, ConfigError> {
    let Some(name) = table.string("message")? else { return Ok(None) };
    match events::message(name) {
        Some(name) => Ok(Some(name.to_string())),
        None => {
            let problem = Problem::NotFound { what: "message", value: name.to_string() };
            let mend = did_you_mean(name, MESSAGES.iter().copied());
            Err(table.source().error(&table.child("message"), problem, mend))
        }
    }
}

const FORMS: &str = "write one of at; request + token; step; message + nth; event + nth; \
    after + edge + delay; site + nth";

fn when(table: &mut Reader<'_>, config: &ClusterConfig) -> Result<When, ConfigError> {
    let Some(node) = table.node("when") else { return Err(table.missing("when", FORMS)) };
    let mut of = Reader::of(table.source(), table.child("when"), node)?;
    let has = |key: &str| of.entries().iter().any(|(name, _)| name == key);
    let forms = ["at", "token", "step", "message", "event", "after", "site"];
    let found: Vec<&str> = forms.into_iter().filter(|form| has(form)).collect();
    let form = match found.as_slice() {
        [form] => *form,
        [] => {
            let unknown = of.entries().iter().find(|(name, _)| {
                !["request", "nth", "edge", "delay", "replica", "link"].contains(&name.as_str())
            });
            return Err(match unknown {
                Some((name, node)) => {
                    let key = of.child(name);
                    let section = format!("[{}]", of.path);
                    let problem = Problem::UnknownKey { key: name.clone(), section };
                    of.source().error_at(&key, node, problem, FORMS)
                }
                None => conflict(table, "when", "it does not say when", FORMS),
            });
        }
        [one, two, ..] => {
            let reason = format!("`{one}` and `{two}` are two forms of a trigger");
            return Err(conflict(&of, two, reason, FORMS));
        }
    };
    let when = form_of(form, &mut of, config)?;
    of.finish()?;
    Ok(when)
}

fn form_of(form: &str, of: &mut Reader<'_>, config: &ClusterConfig) -> Result<When, ConfigError> {
    // The form's own key was seen, so that no default here ever holds.
    let zero = Span::one(0);
    Ok(match form {
        "at" => When::At(durations(of, "at")?.unwrap_or(zero)),
        "token" => When::Token {
            request: request(of)?,
            token: numbers(of, "token", 0, MANY)?.unwrap_or(zero),
        },
        "step" => When::Step {
            replica: replica(of, config)?,
            step: numbers(of, "step", 0, MANY)?.unwrap_or(zero),
        },
        "message" => When::Message {
            message: message(of)?.unwrap_or_default(),
            link: link(of, config)?,
            nth: nth(of)?,
        },
        "event" => {
            let name = of.string("event")?.unwrap_or_default().to_string();
            if !EVENTS.contains(&name.as_str()) {
                let mend = did_you_mean(&name, EVENTS.iter().copied());
                let problem = Problem::NotFound { what: "event", value: name };
                return Err(of.source().error(&of.child("event"), problem, mend));
            }
            When::Event { name, nth: nth(of)? }
        }
        "after" => When::After {
            fault: of.string("after")?.unwrap_or_default().to_string(),
            edge: word(of, "edge", [("start", Edge::Start), ("end", Edge::End)])?
                .unwrap_or(Edge::Start),
            delay: durations(of, "delay")?.unwrap_or(zero),
        },
        _ => {
            let site = of.string("site")?.unwrap_or_default().to_string();
            let name = site.split_once('.').map_or(site.as_str(), |(name, _)| name);
            if !SITES.contains(&name) {
                let mend = did_you_mean(name, SITES.iter().copied());
                let problem = Problem::NotFound { what: "site", value: site };
                return Err(of.source().error(&of.child("site"), problem, mend));
            }
            When::Site { site, nth: nth(of)? }
        }
    })
}

fn nth(of: &mut Reader<'_>) -> Result<Span, ConfigError> {
    Ok(numbers(of, "nth", 1, MANY)?.unwrap_or(Span::one(1)))
}

/// `request = "any"`, or its number.
pub(super) fn request(of: &mut Reader<'_>) -> Result<Option<u64>, ConfigError> {
    match of.node("request") {
        None => Ok(None),
        Some(node) => match &node.value {
            Value::String(text) if text == "any" => Ok(None),
            Value::Integer(_) => of.integer_at(&of.child("request"), node, 0, MANY).map(Some),
            _ => Err(of.bad("request", "not a request", "write \"any\", or its number from 0")),
        },
    }
}

pub(super) fn replica(
    of: &mut Reader<'_>,
    config: &ClusterConfig,
) -> Result<Option<String>, ConfigError> {
    let Some(name) = of.string("replica")? else { return Ok(None) };
    let known: Vec<&str> = config.replicas.iter().map(|replica| replica.name.as_str()).collect();
    if known.contains(&name) {
        return Ok(Some(name.to_string()));
    }
    let problem = Problem::NotFound { what: "replica", value: name.to_string() };
    let mend = if known.is_empty() {
        "the cluster file has no [[replica]] sections; write them".to_string()
    } else {
        did_you_mean(name, known.iter().copied())
    };
    Err(of.source().error(&of.child("replica"), problem, mend))
}

fn link(
    of: &mut Reader<'_>,
    config: &ClusterConfig,
) -> Result<Option<(String, String)>, ConfigError> {
    let Some(node) = of.node("link") else { return Ok(None) };
    let mut link = Reader::of(of.source(), of.child("link"), node)?;
    let mut end = |key| {
        let name = target::node_name(&mut link, key, config)?;
        name.ok_or_else(|| link.missing(key, "write { from = \"a\", to = \"b\" }"))
    };
    let ends = (end("from")?, end("to")?);
    link.finish()?;
    Ok(Some(ends))
}

fn lasts(table: &mut Reader<'_>, row: &Row) -> Result<Option<Span>, ConfigError> {
    let lasts = durations(table, "for")?;
    let name = row.kind.name();
    match (row.lasts, lasts) {
        (Lasts::Once, Some(_)) => {
            let mend = "leave `for` out";
            Err(conflict(table, "for", format!("{name} happens once and does not last"), mend))
        }
        (Lasts::Needed, None) => Err(table.missing("for", format!("{name} needs for = \"2s\""))),
        (_, lasts) => Ok(lasts),
    }
}

fn times(table: &mut Reader<'_>, row: &Row) -> Result<Span, ConfigError> {
    match numbers(table, "times", 1, u64::from(u32::MAX))? {
        Some(_) if !row.repeats => {
            let reason = format!("{} reads no `times`", row.kind.name());
            Err(conflict(table, "times", reason, "leave it out, or write several faults"))
        }
        times => Ok(times.unwrap_or(Span::one(1))),
    }
}

fn expect(table: &mut Reader<'_>) -> Result<Option<Expect>, ConfigError> {
    let known = [
        ("masked", Expect::Masked),
        ("retried", Expect::Retried),
        ("failed-once", Expect::FailedOnce),
        ("refused", Expect::Refused),
        ("unavailable", Expect::Unavailable),
        ("measure", Expect::Measure),
    ];
    word(table, "expect", known)
}

/// Reads every parameter there is, and refuses those that the kind does not take.
fn params(table: &mut Reader<'_>, row: &Row) -> Result<(Params, Drawn), ConfigError> {
    let (mut params, mut drawn) = (Params::default(), Drawn::default());
    for param in Param::ALL {
        let present = table.entries().iter().any(|(name, _)| name == param.name());
        match row.takes(param) {
            None if present => return Err(not_taken(table, row, param)),
            None => continue,
            Some(take) if take.required && !present => {
                let mend = format!("{} needs it; {}", row.kind.name(), example(param));
                return Err(table.missing(param.name(), mend));
            }
            Some(_) => read_param(table, row, param, &mut params, &mut drawn)?,
        }
    }
    Ok((params, drawn))
}

fn not_taken(table: &Reader<'_>, row: &Row, param: Param) -> ConfigError {
    let reason = format!("{} does not read `{}`", row.kind.name(), param.name());
    let known: Vec<&str> = row.takes.iter().map(|take| take.param.name()).collect();
    let mend = match known.as_slice() {
        [] => "it takes no parameters".to_string(),
        known => format!("it reads: {}", known.join(", ")),
    };
    conflict(table, param.name(), reason, mend)
}

fn example(param: Param) -> &'static str {
    match param {
        Param::Factor => "write factor = 4.0",
        Param::Delay => "write delay = \"20ms\" or { p50 = \"5ms\", p99 = \"200ms\" }",
        Param::P => "write p = 0.05",
        Param::BitsPerSecond => "write bits_per_second = \"10Mbit/s\"",
        Param::Ms => "write ms = 500",
        _ => "write it",
    }
}

fn read_param(
    table: &mut Reader<'_>,
    row: &Row,
    param: Param,
    params: &mut Params,
    drawn: &mut Drawn,
) -> Result<(), ConfigError> {
    match param {
        Param::Signal => {
            let known = ["KILL", "TERM", "INT", "ABRT", "SEGV"].map(|word| (word, word));
            params.signal = word(table, "signal", known)?.map(str::to_string);
        }
        Param::Factor => params.factor = float(table, "factor", 1.0, 1000.0)?,
        Param::Delay => delay(table, params)?,
        Param::P => params.p = float(table, "p", 0.0, 1.0)?,
        Param::BitsPerSecond => params.bits_per_second = rate(table, "bits_per_second")?,
        Param::Bytes => params.bytes = bytes(table, "bytes")?,
        Param::Ms => params.ms = signed(table, "ms", 10 * 365 * 86_400_000)?,
        // An actor's own message; of frames, the protocol.
        Param::Message if row.hits == Hits::Actor => {
            params.message = table.string("message")?.map(str::to_string);
        }
        Param::Message => params.message = message(table)?,
        Param::Nth => drawn.nth = numbers(table, "nth", 1, MANY)?,
        Param::Sticky => {
            if table.node("sticky").is_some() {
                params.sticky = Some(table.boolean("sticky", false)?);
            }
        }
        Param::Layer => drawn.layer = numbers(table, "layer", 0, 100_000)?,
        Param::Position => drawn.position = numbers(table, "position", 0, 1 << 24)?,
        Param::Bit => drawn.bit = numbers(table, "bit", 0, 63)?,
        Param::Index => drawn.index = numbers(table, "index", 0, MANY)?,
        Param::Count => drawn.count = numbers(table, "count", 0, 100_000)?,
    }
    Ok(())
}

/// `"5ms"`, or `{ p50, p99, shape = "lognormal" }`.
fn delay(table: &mut Reader<'_>, params: &mut Params) -> Result<(), ConfigError> {
    let Some(node) = table.node("delay") else { return Ok(()) };
    if let Value::String(text) = &node.value {
        let us = parse_duration(text);
        let mend = "write a duration like \"20ms\"";
        let us = us.ok_or_else(|| table.bad("delay", "not a duration", mend))?;
        (params.p50_us, params.p99_us) = (Some(us), Some(us));
        return Ok(());
    }
    let mut of = Reader::of(table.source(), table.child("delay"), node)?;
    let p50 = duration(&mut of, "p50")?;
    let p50 = p50.ok_or_else(|| of.missing("p50", "add p50 = \"5ms\", the median"))?;
    let p99 = duration(&mut of, "p99")?.unwrap_or(p50);
    word(&mut of, "shape", [("lognormal", ())])?;
    if p99 < p50 {
        return Err(of.bad("p99", "below the median", "write a p99 of at least p50"));
    }
    of.finish()?;
    (params.p50_us, params.p99_us) = (Some(p50), Some(p99));
    Ok(())
}
