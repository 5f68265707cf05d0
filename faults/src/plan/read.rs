//! From the TOML tree to a [`Plan`]: types, ranges, defaults, unknown keys.

use super::fault;
use super::sweep;
use super::values::{Span, conflict, duration, durations, float, numbers, word};
use super::{Arrivals, PLAN_SCHEMA, Plan, Sampling, Swarm, Workload};
use crate::fault::{Kind, Mode};
use crate::resolved::{
    ClusterSpec, FailOn, Heal, Keep, Options, Oracle, PhaseSpec, ReportSpec, Tolerance,
};
use dunlin_runtime::config::tree::{Reader, Source, Value};
use dunlin_runtime::config::{ClusterConfig, ConfigError, Problem};
use std::io;
use std::path::Path;

type Load<'a> = &'a dyn Fn(&Path) -> io::Result<String>;
/// Numbers that TOML and JSON both keep exactly.
const EXACT: u64 = 1 << 53;

pub(super) fn plan(source: Source, text: &str, load: Load<'_>) -> Result<Plan, ConfigError> {
    let mut root = Reader::root(&source);
    schema(&mut root)?;
    let name = root.string("name")?.map(str::to_string);
    let name = name.ok_or_else(|| root.missing("name", "add name = \"what-breaks\""))?;
    if name.is_empty() || !name.chars().all(|c| c.is_ascii_alphanumeric() || "-_.".contains(c)) {
        return Err(root.bad("name", "not a name", "use letters, digits, '-', '_' and '.'"));
    }
    let about = root.string("about")?.unwrap_or_default().to_string();
    let seed = root.integer("seed", 0, EXACT)?.unwrap_or(0);
    let modes = modes(&mut root)?;
    let (cluster, config) = cluster(root.section("cluster")?, load)?;
    let phases = phases(root.section("phases")?)?;
    let workload = workload(root.section("workload")?, &config)?;
    let tolerance = tolerance(root.section("tolerance")?)?;
    let faults = fault::all(&mut root, &config)?;
    let swarm = match root.node("swarm") {
        Some(node) => Some(swarm(Reader::of(&source, "swarm".into(), node)?)?),
        None => None,
    };
    let sweep = sweep::read(root.section("sweep")?)?;
    let options = options(&mut root)?;
    let report = report(root.section("report")?)?;
    root.finish()?;
    Ok(Plan {
        name,
        about,
        seed,
        modes,
        cluster,
        workload,
        phases,
        tolerance,
        faults,
        swarm,
        sweep,
        options,
        report,
        config,
        text: text.to_string(),
        source,
    })
}

fn schema(root: &mut Reader<'_>) -> Result<(), ConfigError> {
    let mend = format!("write schema = \"{PLAN_SCHEMA}\"");
    match root.string("schema")? {
        Some(PLAN_SCHEMA) => Ok(()),
        Some(_) => Err(root.bad("schema", "not a schema that this build reads", mend)),
        None => Err(root.missing("schema", mend)),
    }
}

fn modes(root: &mut Reader<'_>) -> Result<Vec<Mode>, ConfigError> {
    let mend = "write modes = [\"sim\", \"process\"], or one of them";
    let Some(items) = root.list("modes")? else { return Ok(vec![Mode::Sim]) };
    let mut modes = Vec::new();
    for (at, item) in items.iter().enumerate() {
        let mode = match &item.value {
            Value::String(text) if text == "sim" => Mode::Sim,
            Value::String(text) if text == "process" => Mode::Process,
            _ => return Err(root.bad(&format!("modes.{at}"), "not a mode", mend)),
        };
        if modes.contains(&mode) {
            return Err(root.bad(&format!("modes.{at}"), "listed twice", mend));
        }
        modes.push(mode);
    }
    if modes.is_empty() {
        return Err(root.bad("modes", "a plan without a mode", mend));
    }
    Ok(modes)
}

fn cluster(
    mut table: Reader<'_>,
    load: Load<'_>,
) -> Result<(ClusterSpec, ClusterConfig), ConfigError> {
    let mend = "add file = \"clusters/three-cpu.toml\", relative to the plan";
    let name = table.string("file")?.ok_or_else(|| table.missing("file", mend))?;
    let path = Plan::folder(&table.source().file).join(name);
    let text = load(&path).map_err(|e| {
        table.bad("file", format!("{} cannot be read: {e}", path.display()), "check the path")
    })?;
    let file = path.display().to_string();
    let mut config = ClusterConfig::parse(&text, &file)?;
    let mut set = Vec::new();
    if let Some(node) = table.node("set") {
        let at = Reader::of(table.source(), table.child("set"), node)?;
        for (key, value) in at.entries() {
            let written = match &value.value {
                Value::Table(_) | Value::Datetime => {
                    let mend = "write it as \"section.key\" = value";
                    return Err(at.wrong_type_at(&at.child(key), "a value", value, mend));
                }
                value => value.shown(),
            };
            config.set(key, &written).map_err(|e| {
                let reason = format!("`{key}` cannot be set in {file}: {}", e.problem);
                let problem = Problem::Conflict { reason };
                at.source().error_at(&at.child(key), value, problem, e.mend.clone())
            })?;
            set.push((key.clone(), written));
        }
    }
    table.finish()?;
    Ok((ClusterSpec { file, text, set }, config))
}

fn phases(mut table: Reader<'_>) -> Result<PhaseSpec, ConfigError> {
    let phases = PhaseSpec {
        warmup_us: duration(&mut table, "warmup")?.unwrap_or(5_000_000),
        chaos_us: duration(&mut table, "chaos")?.unwrap_or(60_000_000),
        heal: word(&mut table, "heal", [("all", Heal::All), ("core", Heal::Core)])?
            .unwrap_or_default(),
        settle_us: duration(&mut table, "settle")?.unwrap_or(20_000_000),
    };
    if phases.chaos_us == 0 {
        return Err(table.bad("chaos", "no time for a fault", "write chaos = \"30s\""));
    }
    table.finish()?;
    Ok(phases)
}

fn workload(mut table: Reader<'_>, config: &ClusterConfig) -> Result<Workload, ConfigError> {
    let requests = table.integer("requests", 1, 1_000_000)?;
    let requests = requests.ok_or_else(|| table.missing("requests", "add requests = 40"))?;
    let arrivals = arrivals(&mut table)?;
    let prompt_tokens =
        numbers(&mut table, "prompt_tokens", 1, 1 << 20)?.unwrap_or(Span { from: 8, to: 65 });
    let output_tokens =
        numbers(&mut table, "output_tokens", 1, 1 << 20)?.unwrap_or(Span { from: 16, to: 65 });
    let sampling = sampling(&mut table)?;
    let tenants = table.integer("tenants", 1, 1000)?.unwrap_or(1);
    let shared_prefix = float(&mut table, "shared_prefix", 0.0, 1.0)?.unwrap_or(0.0);
    let cancel = float(&mut table, "cancel", 0.0, 1.0)?.unwrap_or(0.0);
    let limit = config.limits.request_deadline_ms.saturating_mul(1000);
    let deadline_us = duration(&mut table, "deadline")?.unwrap_or(limit);
    let ignore_eos = table.boolean("ignore_eos", true)?;
    if let dunlin_runtime::config::EngineSection::Hash(engine) = &config.engine {
        let longest = prompt_tokens.last() + output_tokens.last();
        if longest > u64::from(engine.context) {
            let reason = format!(
                "prompts and outputs may take {longest} tokens together; the engine's context is {}",
                engine.context
            );
            let mend = "write smaller ranges, or set \"engine.context\" in [cluster]";
            return Err(conflict(&table, "output_tokens", reason, mend));
        }
    }
    table.finish()?;
    Ok(Workload {
        requests,
        arrivals,
        prompt_tokens,
        output_tokens,
        sampling,
        tenants,
        shared_prefix,
        cancel,
        deadline_us,
        ignore_eos,
    })
}

fn arrivals(table: &mut Reader<'_>) -> Result<Arrivals, ConfigError> {
    let Some(node) = table.node("arrivals") else {
        return Ok(Arrivals::Poisson { per_second: 4.0 });
    };
    let mut of = Reader::of(table.source(), table.child("arrivals"), node)?;
    let known = ["poisson", "uniform", "bursts", "at-once"].map(|word| (word, word));
    let kind = word(&mut of, "kind", known)?
        .ok_or_else(|| of.missing("kind", "add kind = \"poisson\""))?;
    let arrivals = match kind {
        "poisson" | "uniform" => {
            let mend = "add per_second = 4.0";
            let per_second = float(&mut of, "per_second", 0.001, 100_000.0)?
                .ok_or_else(|| of.missing("per_second", mend))?;
            match kind {
                "poisson" => Arrivals::Poisson { per_second },
                _ => Arrivals::Uniform { per_second },
            }
        }
        "bursts" => Arrivals::Bursts {
            every_us: duration(&mut of, "every")?
                .ok_or_else(|| of.missing("every", "add every = \"1s\""))?,
            size: of
                .integer("size", 1, 100_000)?
                .ok_or_else(|| of.missing("size", "add size = 8"))?,
        },
        _ => Arrivals::AtOnce,
    };
    of.finish()?;
    Ok(arrivals)
}

fn sampling(table: &mut Reader<'_>) -> Result<Sampling, ConfigError> {
    let mend = "write \"greedy\" or { temperature = 0.8, seed = \"per-request\" }";
    let Some(node) = table.node("sampling") else { return Ok(Sampling::Greedy) };
    match &node.value {
        Value::String(text) if text == "greedy" => return Ok(Sampling::Greedy),
        Value::Table(_) => {}
        _ => return Err(table.bad("sampling", "not a way to sample", mend)),
    }
    let mut of = Reader::of(table.source(), table.child("sampling"), node)?;
    let temperature = float(&mut of, "temperature", 0.0, 2.0)?
        .ok_or_else(|| of.missing("temperature", "add temperature = 0.8"))?;
    let seed = match of.node("seed") {
        None => None,
        Some(node) => match &node.value {
            Value::String(text) if text == "per-request" => None,
            Value::Integer(_) => Some(of.integer_at(&of.child("seed"), node, 0, EXACT)?),
            _ => return Err(of.bad("seed", "not a seed", "write \"per-request\" or a number")),
        },
    };
    of.finish()?;
    Ok(Sampling::Random { temperature, seed })
}

fn tolerance(mut table: Reader<'_>) -> Result<Tolerance, ConfigError> {
    let default = Tolerance::default();
    let keep = [
        ("one live copy of every stage, and the head", Keep::StageAndHead),
        ("the head", Keep::Head),
    ];
    let tolerance = Tolerance {
        nodes_down: table.u32("nodes_down", default.nodes_down, 0, 10_000)?,
        keep: word(&mut table, "keep", keep)?.unwrap_or(default.keep),
    };
    table.finish()?;
    Ok(tolerance)
}

fn swarm(mut table: Reader<'_>) -> Result<Swarm, ConfigError> {
    let mut kinds = Vec::new();
    if let Some(node) = table.node("kinds") {
        let of = Reader::of(table.source(), table.child("kinds"), node)?;
        for (name, weight) in of.entries() {
            let kind = Kind::parse(name).ok_or_else(|| {
                let names = Kind::ALL.map(Kind::name);
                let mend = super::values::did_you_mean(name, names.iter().copied());
                let problem = Problem::NotFound { what: "kind", value: name.clone() };
                of.source().error_at(&of.child(name), weight, problem, mend)
            })?;
            let Value::Integer(number) = &weight.value else {
                let mend = "write a whole number; 0 leaves the kind out";
                return Err(of.wrong_type_at(&of.child(name), "a weight", weight, mend));
            };
            let number = u64::try_from(*number).ok().filter(|weight| *weight <= 1000);
            let number = number.ok_or_else(|| {
                let problem =
                    Problem::OutOfRange { value: weight.value.shown(), min: 0, max: 1000 };
                of.source().error_at(&of.child(name), weight, problem, "write 0 to 1000")
            })?;
            kinds.push((kind, number));
        }
    }
    let buggify = match table.node("buggify") {
        None => None,
        Some(node) => {
            let mut of = Reader::of(table.source(), table.child("buggify"), node)?;
            let on = float(&mut of, "site_on", 0.0, 1.0)?.unwrap_or(0.25);
            let fires = float(&mut of, "fires", 0.0, 1.0)?.unwrap_or(0.05);
            of.finish()?;
            Some((on, fires))
        }
    };
    let swarm = Swarm {
        kinds,
        mean_gap_us: duration(&mut table, "mean_gap")?.unwrap_or(4_000_000).max(1000),
        max_active: table.integer("max_active", 1, 1000)?.unwrap_or(2),
        buggify,
    };
    table.finish()?;
    Ok(swarm)
}

fn options(root: &mut Reader<'_>) -> Result<Options, ConfigError> {
    let mut options = Options::default();
    let Some(node) = root.node("invariant") else { return Ok(options) };
    let Value::Array(items) = &node.value else {
        let mend = "write it with two brackets: [[invariant]]";
        return Err(root.wrong_type("invariant", "a list of tables", node, mend));
    };
    let mut seen: Vec<&str> = Vec::new();
    for (at, item) in items.iter().enumerate() {
        let mut table = Reader::of(root.source(), format!("invariant.{at}"), item)?;
        let id = table.string("id")?;
        let id = id.ok_or_else(|| table.missing("id", "add id = \"tokens\""))?;
        let Some(known) = crate::invariant::find(id) else {
            let names = crate::invariant::ALL.iter().map(|invariant| invariant.name);
            let mend = super::values::did_you_mean(id, names);
            let problem = Problem::NotFound { what: "invariant", value: id.to_string() };
            return Err(root.source().error(&table.child("id"), problem, mend));
        };
        if seen.contains(&known.id) {
            return Err(table.bad("id", "listed twice", "keep one of the two"));
        }
        seen.push(known.id);
        if !table.boolean("on", true)? {
            options.off.insert(known.id.to_string());
        } else if !known.by_default {
            options.on.insert(known.id.to_string());
        }
        own_options(&mut table, known.name, &mut options)?;
        table.finish()?;
    }
    Ok(options)
}

/// The options that this invariant has; every other key is unknown there.
fn own_options(
    table: &mut Reader<'_>,
    name: &str,
    options: &mut Options,
) -> Result<(), ConfigError> {
    match name {
        "tokens" => {
            let oracles = [("bitwise", Oracle::Bitwise), ("margin", Oracle::Margin)];
            options.oracle = word(table, "oracle", oracles)?.unwrap_or_default();
        }
        "restart-intensity" => {
            options.restart_max = table.u32("max", 0, 1, 1000)?;
            options.restart_within_us = duration(table, "within")?.unwrap_or(0);
        }
        "deadline" => {
            options.grace_us = duration(table, "grace")?.unwrap_or(options.grace_us);
        }
        "progress" => {
            options.progress_us = duration(table, "within")?.unwrap_or(options.progress_us);
        }
        "containment" => {
            options.stall_us = duration(table, "stall")?.unwrap_or(options.stall_us);
        }
        "wall-clock-free" => {
            options.clock_window_us = duration(table, "window")?.unwrap_or(options.clock_window_us);
        }
        _ => {}
    }
    Ok(())
}

fn report(mut table: Reader<'_>) -> Result<ReportSpec, ConfigError> {
    let compare = table.string("compare")?.map(str::to_string);
    let mut report = ReportSpec { compare, ..ReportSpec::default() };
    if let Some(node) = table.node("slo") {
        let mut slo = Reader::of(table.source(), table.child("slo"), node)?;
        let within = |span: Option<Span>, default| span.map_or(default, |span| span.from);
        report.slo_ttft_us = within(durations(&mut slo, "ttft")?, report.slo_ttft_us);
        report.slo_gap_us = within(durations(&mut slo, "gap")?, report.slo_gap_us);
        slo.finish()?;
    }
    if let Some(items) = table.list("fail_on")? {
        report.fail_on.clear();
        for (at, item) in items.iter().enumerate() {
            let known = match &item.value {
                Value::String(text) => match text.as_str() {
                    "invariant" => Some(FailOn::Invariant),
                    "unverified-fault" => Some(FailOn::UnverifiedFault),
                    "fault-never-fired" => Some(FailOn::FaultNeverFired),
                    _ => None,
                },
                _ => None,
            };
            let mend = "use \"invariant\", \"unverified-fault\", \"fault-never-fired\"";
            let bad = || table.bad(&format!("fail_on.{at}"), "nothing to fail on", mend);
            report.fail_on.insert(known.ok_or_else(bad)?);
        }
    }
    table.finish()?;
    Ok(report)
}
