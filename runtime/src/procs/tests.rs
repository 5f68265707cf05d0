//! With real, small processes.

use std::path::Path;
use std::time::Instant;

use super::*;

fn sh(dir: &Path, name: &str, script: &str) -> ProcessSpec {
    ProcessSpec {
        name: name.to_string(),
        program: "/bin/sh".into(),
        args: vec!["-c".into(), script.into()],
        env: vec![("DIR".to_string(), dir.display().to_string())],
        log_file: dir.join(format!("logs/{name}.log")),
        echo: false,
        ready_within: Duration::from_secs(20),
        stop_within: Duration::from_secs(20),
    }
}

fn spec(max: u32, processes: Vec<ProcessSpec>) -> ProcessesSpec {
    let intensity = Intensity { max, within: Duration::from_secs(30) };
    ProcessesSpec { intensity, backoff: Backoff::default(), processes }
}

/// Ready at once, then sleeps in small steps so that its signals are handled soon.
const READY: &str = "echo '{\"ready\": {\"port\": 7}}'; while true; do sleep 0.05; done";

fn alive(pid: u32) -> bool {
    // A zombie has no command line.
    std::fs::read(format!("/proc/{pid}/cmdline")).is_ok_and(|line| !line.is_empty())
}

async fn until(what: &str, condition: impl Fn() -> bool) {
    let began = Instant::now();
    while !condition() {
        assert!(began.elapsed() < Duration::from_secs(30), "never: {what}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

fn read(path: impl AsRef<Path>) -> String {
    std::fs::read_to_string(path).unwrap_or_default()
}

#[tokio::test]
async fn processes_become_ready_and_drain_in_reverse_order() {
    let dir = tempfile::tempdir().unwrap();
    let drain = |name: &str| {
        let script = format!("trap 'echo {name} >> $DIR/order; sleep 0.2; exit 0' TERM; {READY}");
        sh(dir.path(), name, &script)
    };
    let (processes, _) = Processes::start(spec(3, vec![drain("left"), drain("front")]));
    processes.ready().await.unwrap();
    let states = processes.states();
    assert_eq!(states["left"].ready, Some(serde_json::json!({"port": 7})));
    let pids: Vec<u32> = states.values().filter_map(|state| state.pid).collect();
    assert!(pids.len() == 2 && pids.iter().all(|pid| alive(*pid)));
    processes.stop().await.unwrap();
    assert_eq!(read(dir.path().join("order")), "front\nleft\n");
    assert!(pids.iter().all(|pid| !alive(*pid)));
}

#[tokio::test]
async fn a_killed_process_comes_back() {
    let dir = tempfile::tempdir().unwrap();
    let noisy = format!("echo to stderr >&2; echo plain; {READY}");
    let (processes, mut events) = Processes::start(spec(3, vec![sh(dir.path(), "left", &noisy)]));
    processes.ready().await.unwrap();
    let pid = processes.states()["left"].pid.unwrap();
    let group = rustix::process::Pid::from_raw(pid as i32).unwrap();
    rustix::process::kill_process(group, rustix::process::Signal::KILL).unwrap();
    until("a new process", || {
        let state = processes.states()["left"].clone();
        state.ready.is_some() && state.pid.is_some_and(|new| new != pid)
    })
    .await;
    let state = processes.states()["left"].clone();
    assert_eq!(state.restarts, 1);
    assert_eq!(state.last_exit.as_deref(), Some("was killed by signal 9 (SIGKILL)"));
    let mut seen = Vec::new();
    while let Ok(event) = events.try_recv() {
        seen.push(match event {
            ProcessEvent::Started { .. } => "started",
            ProcessEvent::Ready { .. } => "ready",
            ProcessEvent::Exited { .. } => "exited",
            ProcessEvent::Restarting { .. } => "restarting",
        });
    }
    assert_eq!(seen, ["started", "ready", "exited", "restarting", "started", "ready"]);
    processes.stop().await.unwrap();
    let log = read(dir.path().join("logs/left.log"));
    assert_eq!(log.matches("to stderr").count(), 2, "{log}");
    assert!(log.contains("plain") && log.contains("was killed by signal 9"), "{log}");
    assert!(!log.contains("ready"), "the protocol is not logged: {log}");
}

#[tokio::test]
async fn a_process_that_always_fails_ends_the_others_and_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let bad = sh(dir.path(), "bad", "echo run >> $DIR/runs; echo 'cannot find it' >&2; exit 3");
    let good = sh(dir.path(), "good", READY);
    let (processes, _) = Processes::start(spec(2, vec![good, bad]));
    let error = processes.ready().await.unwrap_err();
    let text = error.to_string();
    assert!(matches!(error, ProcessesError::TooManyRestarts { max: 2, .. }), "{text}");
    for part in ["node bad exited with code 3", "more than 2 restarts", "bad.log", "cannot find it"]
    {
        assert!(text.contains(part), "no {part:?} in {text}");
    }
    assert_eq!(read(dir.path().join("runs")).lines().count(), 3);
    assert!(processes.states().values().all(|state| state.pid.is_none()));
}

#[tokio::test]
async fn an_error_at_the_first_start_is_final() {
    let dir = tempfile::tempdir().unwrap();
    let script = "echo run >> $DIR/runs; echo '{\"error\": \"port 7400 is in use\"}'; exit 1";
    let bad = sh(dir.path(), "front", script);
    let good = sh(dir.path(), "left", READY);
    let (processes, _) = Processes::start(spec(5, vec![good, bad]));
    let error = processes.ready().await.unwrap_err();
    assert_eq!(error.to_string(), "node front did not start: port 7400 is in use");
    assert_eq!(read(dir.path().join("runs")), "run\n");

    let mut missing = sh(dir.path(), "ghost", "");
    missing.program = "/no/such/program".into();
    let (processes, _) = Processes::start(spec(5, vec![missing]));
    let error = processes.ready().await.unwrap_err().to_string();
    assert!(error.contains("node ghost did not start: /no/such/program cannot be run"), "{error}");
}

#[tokio::test]
async fn one_that_is_never_ready_is_killed_and_counted() {
    let dir = tempfile::tempdir().unwrap();
    let mut slow = sh(dir.path(), "slow", "while true; do sleep 0.05; done");
    slow.ready_within = Duration::from_millis(100);
    let (processes, _) = Processes::start(spec(1, vec![slow]));
    let error = processes.ready().await.unwrap_err().to_string();
    assert!(error.contains("node slow was not ready within 100ms"), "{error}");
}

#[tokio::test]
async fn one_that_ignores_sigterm_is_killed_with_its_children() {
    let dir = tempfile::tempdir().unwrap();
    let script = format!("trap '' TERM; sleep 1000 & echo $! > $DIR/grandchild; {READY}");
    let mut deaf = sh(dir.path(), "deaf", &script);
    deaf.stop_within = Duration::from_millis(200);
    let (processes, _) = Processes::start(spec(1, vec![deaf]));
    processes.ready().await.unwrap();
    let grandchild: u32 = read(dir.path().join("grandchild")).trim().parse().unwrap();
    // Forked, but perhaps not yet past `exec`, where its command line is empty for a moment.
    until("the grandchild runs", || alive(grandchild)).await;
    let began = Instant::now();
    processes.stop().await.unwrap();
    assert!(began.elapsed() >= Duration::from_millis(200));
    until("the grandchild is gone", || !alive(grandchild)).await;
}

#[tokio::test]
async fn dropping_the_handle_kills_all() {
    let dir = tempfile::tempdir().unwrap();
    let (processes, _) = Processes::start(spec(1, vec![sh(dir.path(), "a", READY)]));
    processes.ready().await.unwrap();
    let pid = processes.states()["a"].pid.unwrap();
    drop(processes);
    until("it is gone", || !alive(pid)).await;
}

/// This test runs itself twice more: as a supervisor that is killed with SIGKILL, and as its child,
/// which must not outlive it.
#[tokio::test]
async fn no_child_outlives_a_killed_supervisor() {
    const ROLE: &str = "DUNLIN_TEST_ROLE";
    let me = "procs::tests::no_child_outlives_a_killed_supervisor";
    let as_role = |role: &str, dir: &Path| ProcessSpec {
        name: role.to_string(),
        program: std::env::current_exe().unwrap(),
        args: ["--exact", me, "--nocapture"].iter().map(Into::into).collect(),
        env: vec![
            (ROLE.to_string(), role.to_string()),
            ("DIR".to_string(), dir.display().to_string()),
        ],
        ..sh(dir, role, "")
    };
    let dir = std::env::var("DIR").unwrap_or_default();
    match std::env::var(ROLE).as_deref() {
        Ok("child") => {
            assert!(follow_parent());
            std::fs::write(format!("{dir}/child"), std::process::id().to_string()).unwrap();
            std::thread::sleep(Duration::from_secs(600));
        }
        Ok("supervisor") => {
            let (_processes, _) =
                Processes::start(spec(1, vec![as_role("child", Path::new(&dir))]));
            tokio::time::sleep(Duration::from_secs(600)).await;
        }
        _ => {
            let dir = tempfile::tempdir().unwrap();
            let (processes, _) = Processes::start(spec(1, vec![as_role("supervisor", dir.path())]));
            let file = dir.path().join("child");
            until("the child runs", || !read(&file).is_empty()).await;
            let child: u32 = read(&file).parse().unwrap();
            assert!(alive(child));
            // The child leads a group of its own: only its supervisor's death can end it.
            processes.kill();
            until("the child is gone", || !alive(child)).await;
        }
    }
}

#[test]
fn loopback_is_local_and_other_machines_are_not() {
    assert!(is_local_address("127.0.0.1".parse().unwrap()));
    assert!(!is_local_address("192.0.2.1".parse().unwrap()), "an address of no machine");
}
