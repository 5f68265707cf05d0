//! Small plans, run on real node processes.

use std::path::{Path, PathBuf};
use std::sync::Mutex;

use dunlin_faults::fault::{Expect, Fault, Kind, Mode, Params, Target, Trigger};
use dunlin_faults::process::{self, How};
use dunlin_faults::record::{FaultRun, Record, What};
use dunlin_faults::resolved::{ClusterSpec, PhaseSpec, RESOLVED_SCHEMA, RequestSpec, Resolved};

/// One cluster at a time: each wants the whole machine.
static MACHINE: Mutex<()> = Mutex::new(());

/// Two replicas on two workers, the hash engine.
pub const HASH: &str = "examples/hash.toml";
/// One replica on two workers, so that frames and activations cross a link.
pub const PIPELINE: &str = "examples/pipeline.toml";
/// Two replicas on two workers, the default model.
pub const MODEL: &str = "cluster.toml";
/// A pipeline of a processor and a graphics adapter, the repository's tiny model.
pub const MIXED: &str = "examples/mixed.toml";

/// A plan of `requests` requests, `tokens` tokens each, a few milliseconds apart.
pub fn plan(file: &str, name: &str, requests: u64, tokens: u32) -> Resolved {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(file);
    let text = std::fs::read_to_string(path).expect("a file of the repository");
    let hash = file != MODEL && file != MIXED;
    let mut set = vec![("kv.memory".to_string(), "\"64MiB\"".to_string())];
    let mut also = |key: &str, value: &str| set.push((key.to_string(), value.to_string()));
    also("membership.lease_ms", "1000");
    also("membership.heartbeat_ms", "100");
    // An adapter in software compiles its kernels at the first step.
    also("scheduler.step_deadline_ms", if file == MIXED { "60000" } else { "2000" });
    also("restart.max", "1000");
    if file == MIXED {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/tiny-llama");
        also("cluster.model", &serde_json::json!(folder).to_string());
    }
    if hash {
        also("engine.kind", "\"hash\"");
        also("engine.step_micros", "4000");
    }
    let request = |number: u64| RequestSpec {
        number,
        arrival_us: number * 5_000,
        tenant: "t0".into(),
        prompt: (0..20).map(|at| u32::try_from(number % 7 * 31 + at).expect("small")).collect(),
        max_tokens: tokens,
        ignore_eos: true,
        // Every other request is sampled.
        temperature: if number.is_multiple_of(2) { 0.0 } else { 0.8 },
        seed: 1000 + number,
        cancel_after: None,
        deadline_us: 60_000_000,
    };
    Resolved {
        schema: RESOLVED_SCHEMA.into(),
        name: name.into(),
        about: String::new(),
        plan: format!("{name}.toml"),
        mode: Mode::Process,
        seed: 7,
        set: Vec::new(),
        cluster: ClusterSpec { file: file.into(), text, set },
        phases: PhaseSpec {
            warmup_us: 0,
            chaos_us: 60_000_000,
            settle_us: 30_000_000,
            heal: Default::default(),
        },
        tolerance: Default::default(),
        invariants: Default::default(),
        report: Default::default(),
        faults: Vec::new(),
        requests: (0..requests).map(request).collect(),
    }
}

/// A fault that begins when any client has token `token`.
pub fn fault(kind: Kind, target: Target, token: u32) -> Fault {
    Fault {
        id: "f".into(),
        kind,
        target,
        when: Trigger::Token { request: None, token },
        lasts_us: None,
        times: 1,
        params: Params::default(),
        expect: Expect::Masked,
    }
}

pub fn node(name: &str) -> Target {
    Target::Node(name.into())
}

pub fn run(plan: &Resolved) -> Record {
    let _machine = MACHINE.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    let how = How {
        binary: PathBuf::from(env!("CARGO_BIN_EXE_dunlin")),
        env: vec![("DUNLIN_CACHE".into(), models(plan)), ("DUNLIN_OFFLINE".into(), "1".into())],
        keep_logs: std::env::var_os("DUNLIN_TEST_LOGS").map(|to| Path::new(&to).join(&plan.name)),
        progress: None,
    };
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build();
    let runtime = runtime.expect("a runtime");
    let record = runtime.block_on(process::run(plan, &how));
    let record = record.unwrap_or_else(|error| panic!("{}: {error}", plan.name));
    if let Some(folder) = std::env::var_os("DUNLIN_TEST_LOGS") {
        let text = serde_json::to_string_pretty(&record).expect("plain data");
        let file = Path::new(&folder).join(format!("{}.json", plan.name));
        std::fs::create_dir_all(&folder)
            .and_then(|()| std::fs::write(file, text))
            .expect("written");
    }
    record
}

/// The folder with the default model's file, where the plan needs it.
fn models(plan: &Resolved) -> String {
    if plan.cluster.file != MODEL {
        return String::new();
    }
    let given = std::env::var_os("DUNLIN_TEST_MODELS").map(PathBuf::from);
    let cache = || Some(PathBuf::from(std::env::var_os("HOME")?).join(".cache/dunlin/models"));
    let folder = given.or_else(cache).unwrap_or_default();
    let file = folder.join("SmolLM2-135M-Instruct.Q4_1.gguf");
    assert!(file.is_file(), "{} is not there: run tools/test, which fetches it", file.display());
    folder.display().to_string()
}

/// What a client has got of a request.
#[derive(Debug, Default)]
pub struct Got {
    pub tokens: Vec<String>,
    pub ends: Vec<String>,
    pub refused: Vec<String>,
}

pub fn got(record: &Record, number: u64) -> Got {
    let mut got = Got::default();
    for event in &record.events {
        match &event.what {
            What::Token { request, position, id } if *request == number => {
                assert_eq!(*position as usize, got.tokens.len(), "request {number}: a gap");
                assert!(got.ends.is_empty(), "request {number}: a token after its end");
                got.tokens.push(id.clone());
            }
            What::Ended { request, code, .. } if *request == number => got.ends.push(code.clone()),
            What::Refused { request, code } if *request == number => got.refused.push(code.clone()),
            _ => {}
        }
    }
    got
}

/// Panics unless the fault began, was proved, and the cluster is whole again.
pub fn check_fault(record: &Record) -> &FaultRun {
    let run = &record.faults[0];
    let name = &record.plan;
    assert!(run.began_us.is_some(), "{name}: it never began");
    let proof = run.proof.as_deref().unwrap_or("");
    println!(
        "{name}: began {:?} us, detected after {:?} us, touched {:?}, proof: {proof}",
        run.began_us,
        run.detected_us.zip(run.began_us).map(|(seen, began)| seen.saturating_sub(began)),
        run.touched,
    );
    assert!(!proof.is_empty(), "{name}: nothing proves it");
    assert!(run.ended_us.is_some(), "{name}: it never ended");
    let rest = record.rest.as_ref().unwrap_or_else(|| panic!("{name}: it never settled"));
    assert!(rest.probe_right, "{name}: a fresh request is answered wrongly");
    assert_eq!((rest.open_requests, rest.live_blocks), (0, 0), "{name}: {rest:?}");
    run
}

/// Panics unless every request of the workload was answered with the undisturbed tokens.
pub fn check_masked(record: &Record) {
    for (number, info) in &record.requests {
        let got = got(record, *number);
        let what = format!("{}: request {number}: {got:?}", record.plan);
        assert_eq!(got.ends, ["finished"], "{what}");
        assert_eq!(got.tokens, info.reference, "{what}");
        assert!(!info.reference.is_empty(), "{what}");
    }
}
