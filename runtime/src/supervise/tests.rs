//! The supervisor with real actors.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use ractor::{Actor, ActorCell, ActorProcessingErr, ActorRef};

use super::{
    Backoff, ChildSpec, Exit, Intensity, Observer, Restart, Strategy, SuperviseError, Supervisor,
    SupervisorHandle, SupervisorSpec, Verdict,
};

/// What happened, in order: `+a` started, `-a` stopped or failed.
type Journal = Arc<Mutex<Vec<String>>>;

struct Worker(Journal, String);

enum Do {
    Panic,
    Fail,
    /// Never returns, but can be killed.
    Hang,
}

impl Actor for Worker {
    type Msg = Do;
    type State = ();
    type Arguments = ();

    async fn pre_start(&self, _: ActorRef<Do>, (): ()) -> Result<(), ActorProcessingErr> {
        self.0.lock().unwrap().push(format!("+{}", self.1));
        Ok(())
    }

    async fn post_stop(&self, _: ActorRef<Do>, (): &mut ()) -> Result<(), ActorProcessingErr> {
        self.0.lock().unwrap().push(format!("-{}", self.1));
        Ok(())
    }

    async fn handle(
        &self,
        _: ActorRef<Do>,
        message: Do,
        (): &mut (),
    ) -> Result<(), ActorProcessingErr> {
        match message {
            Do::Panic => panic!("worker {} panics", self.1),
            Do::Fail => Err("worker fails".into()),
            Do::Hang => {
                tokio::time::sleep(Duration::from_secs(100_000)).await;
                Ok(())
            }
        }
    }
}

fn worker(journal: &Journal, id: &str, restart: Restart) -> ChildSpec {
    let (journal, name) = (journal.clone(), id.to_string());
    ChildSpec::new(id, restart, move |supervisor| {
        let worker = Worker(journal.clone(), name.clone());
        async move {
            let spawned = Actor::spawn_linked(None, worker, (), supervisor).await;
            spawned.map(|(actor, _)| actor.get_cell()).map_err(|e| e.to_string())
        }
    })
}

fn spec(strategy: Strategy, max: u32, children: Vec<ChildSpec>) -> SupervisorSpec {
    SupervisorSpec {
        name: "node".into(),
        strategy,
        intensity: Intensity { max, within: Duration::from_secs(10) },
        backoff: Backoff::default(),
        children,
        observer: Observer::none(),
    }
}

async fn started(strategy: Strategy, max: u32, children: Vec<ChildSpec>) -> SupervisorHandle {
    let handle = Supervisor::spawn(spec(strategy, max, children), None).await.unwrap();
    handle.ready().await.unwrap();
    handle
}

async fn cell(handle: &SupervisorHandle, id: &str) -> ActorCell {
    handle.child(id).await.unwrap().unwrap()
}

async fn send(handle: &SupervisorHandle, id: &str, message: Do) {
    ActorRef::<Do>::from(cell(handle, id).await).cast(message).unwrap();
}

/// Waits until the journal has this many entries, then returns and empties it.
async fn entries(journal: &Journal, count: usize) -> Vec<String> {
    for _ in 0..10_000 {
        if journal.lock().unwrap().len() >= count {
            break;
        }
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    std::mem::take(&mut journal.lock().unwrap())
}

async fn restarts_of(handle: &SupervisorHandle, id: &str) -> u32 {
    let tree = handle.tree().await.unwrap();
    tree.children.iter().find(|child| child.id == id).unwrap().restarts
}

#[tokio::test(start_paused = true)]
async fn a_panic_restarts_that_child_alone() {
    let journal = Journal::default();
    let children =
        ["a", "b", "c"].map(|id| worker(&journal, id, Restart::Permanent)).into_iter().collect();
    let handle = started(Strategy::OneForOne, 3, children).await;
    assert_eq!(entries(&journal, 3).await, ["+a", "+b", "+c"]);
    send(&handle, "b", Do::Panic).await;
    assert_eq!(entries(&journal, 1).await, ["+b"]);
    handle.ready().await.unwrap();
    let tree = handle.tree().await.unwrap();
    let b = tree.children.iter().find(|child| child.id == "b").unwrap();
    assert_eq!(b.restarts, 1);
    assert!(b.last_exit.as_ref().unwrap().contains("worker b panics"), "{b:?}");
    assert_eq!(handle.stop().await, Verdict::Stopped);
    assert_eq!(entries(&journal, 3).await, ["-c", "-b", "-a"]);
}

#[tokio::test(start_paused = true)]
async fn rest_for_one_restarts_what_came_after() {
    let journal = Journal::default();
    let children =
        ["kv", "scheduler", "shard"].map(|id| worker(&journal, id, Restart::Permanent)).into();
    let handle = started(Strategy::RestForOne, 3, children).await;
    entries(&journal, 3).await;
    send(&handle, "scheduler", Do::Fail).await;
    assert_eq!(entries(&journal, 3).await, ["-shard", "+scheduler", "+shard"]);
    handle.restart_child("kv").await.unwrap();
    assert_eq!(
        entries(&journal, 6).await,
        ["-shard", "-scheduler", "-kv", "+kv", "+scheduler", "+shard"]
    );
    handle.stop().await;
}

#[tokio::test(start_paused = true)]
async fn a_killed_transient_child_comes_back_and_a_stopped_one_does_not() {
    let journal = Journal::default();
    let children = vec![
        worker(&journal, "killed", Restart::Transient),
        worker(&journal, "stopped", Restart::Transient),
        worker(&journal, "temporary", Restart::Temporary),
    ];
    let handle = started(Strategy::OneForOne, 3, children).await;
    entries(&journal, 3).await;
    cell(&handle, "stopped").await.stop(Some("work is done".into()));
    assert_eq!(entries(&journal, 1).await, ["-stopped"]);
    send(&handle, "temporary", Do::Fail).await;
    cell(&handle, "killed").await.kill();
    assert_eq!(entries(&journal, 1).await, ["+killed"]);
    let tree = handle.tree().await.unwrap();
    let states: Vec<_> =
        tree.children.iter().map(|child| (child.id.as_str(), child.state.as_str())).collect();
    assert_eq!(states, [("killed", "up"), ("stopped", "down")]);
    handle.stop().await;
}

#[tokio::test(start_paused = true)]
async fn crossing_the_intensity_stops_the_siblings_and_names_the_child() {
    let journal = Journal::default();
    let children =
        ["a", "b"].map(|id| worker(&journal, id, Restart::Permanent)).into_iter().collect();
    let handle = started(Strategy::OneForOne, 2, children).await;
    entries(&journal, 2).await;
    for round in 0..3 {
        send(&handle, "a", Do::Panic).await;
        let expected = if round < 2 { "+a" } else { "-b" };
        assert_eq!(entries(&journal, 1).await, [expected]);
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    match handle.wait().await {
        Verdict::Escalated { child, exit: Exit::Failed(reason) } => {
            assert_eq!(child, "a");
            assert!(reason.contains("worker a panics"), "{reason}");
        }
        other => panic!("{other:?}"),
    }
    assert!(matches!(handle.tree().await, Err(SuperviseError::Gone { .. })));
}

#[tokio::test(start_paused = true)]
async fn an_escalation_restarts_the_inner_supervisor_and_then_ends_the_outer_one() {
    let journal = Journal::default();
    let for_inner = journal.clone();
    let inner = ChildSpec::supervisor("replica", Restart::Permanent, move || {
        let children = ["kv", "shard"].map(|id| worker(&for_inner, id, Restart::Permanent));
        let mut spec = spec(Strategy::RestForOne, 0, children.into());
        spec.name = "node/replica".into();
        spec
    });
    let children = vec![worker(&journal, "membership", Restart::Permanent), inner];
    let handle = started(Strategy::OneForOne, 1, children).await;
    assert_eq!(entries(&journal, 3).await, ["+membership", "+kv", "+shard"]);
    let tree = handle.tree().await.unwrap();
    let paths: Vec<String> = tree.flatten().into_iter().map(|(path, _)| path).collect();
    assert_eq!(
        paths,
        ["node", "node/membership", "node/replica", "node/replica/kv", "node/replica/shard"]
    );
    for expected in [vec!["-shard", "+kv", "+shard"], vec!["-shard", "-membership"]] {
        let supervisor = cell(&handle, "replica").await;
        let kv = supervisor.get_children().into_iter().min_by_key(|cell| cell.get_id()).unwrap();
        ActorRef::<Do>::from(kv).cast(Do::Panic).unwrap();
        assert_eq!(entries(&journal, expected.len()).await, expected);
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    let verdict = handle.wait().await.to_string();
    assert!(verdict.contains("replica") && verdict.contains("kv"), "{verdict}");
}

#[tokio::test(start_paused = true)]
async fn a_slow_start_delays_neither_siblings_nor_the_end() {
    let journal = Journal::default();
    let slow = ChildSpec::new("slow", Restart::Permanent, |_| async {
        tokio::time::sleep(Duration::from_secs(3600)).await;
        Err("never".to_string())
    });
    let children = vec![worker(&journal, "quick", Restart::Permanent), slow];
    let handle = Supervisor::spawn(spec(Strategy::OneForAll, 3, children), None).await.unwrap();
    assert_eq!(entries(&journal, 1).await, ["+quick"]);
    send(&handle, "quick", Do::Panic).await;
    assert_eq!(entries(&journal, 1).await, ["+quick"]);
    let before = tokio::time::Instant::now();
    assert_eq!(handle.stop().await, Verdict::Stopped);
    assert!(before.elapsed() < Duration::from_secs(1));
    assert_eq!(handle.ready().await, Err(Verdict::Stopped));
}

#[tokio::test(start_paused = true)]
async fn a_cancelled_start_leaves_no_actor_behind() {
    let journal = Journal::default();
    let inner = worker(&journal, "half", Restart::Permanent);
    let half = ChildSpec::new("half", Restart::Permanent, move |supervisor| {
        let made = (inner.start)(supervisor);
        async move {
            let cell = made.await?;
            tokio::time::sleep(Duration::from_secs(3600)).await;
            Ok(cell)
        }
    });
    let children = vec![worker(&journal, "whole", Restart::Permanent), half];
    let handle = Supervisor::spawn(spec(Strategy::OneForAll, 3, children), None).await.unwrap();
    assert_eq!(entries(&journal, 2).await, ["+whole", "+half"]);
    let first: Vec<_> = handle.cell().get_children();
    assert_eq!(first.len(), 2);
    send(&handle, "whole", Do::Panic).await;
    assert_eq!(entries(&journal, 2).await, ["+whole", "+half"]);
    tokio::time::sleep(Duration::from_millis(10)).await;
    assert_eq!(handle.cell().get_children().len(), 2, "the half-started actor is gone");
    let cells = handle.cell().get_children();
    handle.stop().await;
    for cell in first.into_iter().chain(cells) {
        cell.wait(Some(Duration::from_secs(1))).await.expect("no actor outlives its supervisor");
    }
}

#[tokio::test(start_paused = true)]
async fn starts_that_fail_panic_or_hang_are_counted_and_named() {
    type Start = fn() -> super::BoxFuture<Result<ActorCell, String>>;
    let cases: [(Start, &str); 3] = [
        (|| Box::pin(async { Err("port 7400 is in use".into()) }), "port 7400 is in use"),
        (|| Box::pin(async { panic!("boom at start") }), "panicked: boom at start"),
        (|| Box::pin(std::future::pending()), "not ready within 2s"),
    ];
    for (start, expected) in cases {
        let tries = Arc::new(AtomicU32::new(0));
        let counter = tries.clone();
        let mut child = ChildSpec::new("bad", Restart::Permanent, move |_| {
            counter.fetch_add(1, Ordering::Relaxed);
            start()
        });
        child.start_within = Duration::from_secs(2);
        let handle =
            Supervisor::spawn(spec(Strategy::OneForOne, 2, vec![child]), None).await.unwrap();
        let verdict = handle.ready().await.unwrap_err().to_string();
        assert!(verdict.contains("bad") && verdict.contains(expected), "{verdict}");
        assert_eq!(tries.load(Ordering::Relaxed), 3);
    }
}

#[tokio::test(start_paused = true)]
async fn a_child_that_ignores_its_stop_is_killed_at_the_bound() {
    let journal = Journal::default();
    let mut child = worker(&journal, "stuck", Restart::Permanent);
    child.stop_within = Duration::from_secs(3);
    let handle = started(Strategy::OneForOne, 3, vec![child]).await;
    send(&handle, "stuck", Do::Hang).await;
    tokio::time::sleep(Duration::from_millis(10)).await;
    let before = tokio::time::Instant::now();
    handle.stop().await;
    let took = before.elapsed();
    assert!(took >= Duration::from_secs(3) && took < Duration::from_secs(4), "{took:?}");
}

/// Keeps what a fault hook hears.
#[derive(Default)]
struct Ears(std::sync::Mutex<Vec<(&'static str, String, u64)>>);

impl crate::FaultHook for Ears {
    fn decide(&self, _: &crate::Site<'_>) -> Option<crate::Action> {
        None
    }

    fn observe(&self, fact: &crate::Fact) {
        self.0.lock().unwrap().push((fact.name, fact.subject.clone(), fact.key));
    }
}

#[tokio::test(start_paused = true)]
async fn a_fault_hook_hears_of_restarts_and_of_giving_up() {
    let (journal, ears) = (Journal::default(), Arc::new(Ears::default()));
    let mut spec = spec(Strategy::OneForOne, 2, vec![worker(&journal, "a", Restart::Permanent)]);
    let node = crate::NodeName::new("n").unwrap();
    spec.observer = Observer::new(&node, &crate::Faults::armed(ears.clone()));
    let handle = Supervisor::spawn(spec, None).await.unwrap();
    handle.ready().await.unwrap();
    for _ in 0..3 {
        entries(&journal, 1).await;
        send(&handle, "a", Do::Panic).await;
    }
    assert!(matches!(handle.wait().await, Verdict::Escalated { .. }));
    let heard = ears.0.lock().unwrap().clone();
    let restarted = |times| ("actor.restarted", "node/a".to_string(), times);
    let gave_up = ("supervisor.escalated", "node".to_string(), 0);
    assert_eq!(heard, [restarted(1), restarted(2), gave_up]);
}

#[tokio::test(start_paused = true)]
async fn children_come_and_go_at_run_time() {
    let journal = Journal::default();
    let handle = started(Strategy::OneForOne, 3, Vec::new()).await;
    handle.add_child(worker(&journal, "a", Restart::Permanent)).await.unwrap();
    let again = handle.add_child(worker(&journal, "a", Restart::Permanent)).await;
    assert!(matches!(again, Err(SuperviseError::DuplicateChild { .. })));
    let broken = ChildSpec::new("b", Restart::Permanent, |_| async { Err("no".to_string()) });
    let refused = handle.add_child(broken).await.unwrap_err();
    assert_eq!(refused.to_string(), "child b of supervisor node did not start: no");
    assert!(matches!(handle.remove_child("b").await, Err(SuperviseError::NoSuchChild { .. })));
    handle.remove_child("a").await.unwrap();
    assert_eq!(entries(&journal, 2).await, ["+a", "-a"]);
    handle.add_child(worker(&journal, "a", Restart::Permanent)).await.unwrap();
    send(&handle, "a", Do::Panic).await;
    assert_eq!(entries(&journal, 2).await, ["+a", "+a"]);
    assert_eq!(restarts_of(&handle, "a").await, 1);
    handle.stop().await;
}

#[tokio::test(start_paused = true)]
async fn stopping_the_actor_itself_still_stops_its_children_in_order() {
    let journal = Journal::default();
    let children = ["a", "b"].map(|id| worker(&journal, id, Restart::Permanent)).into();
    let handle = started(Strategy::OneForOne, 3, children).await;
    entries(&journal, 2).await;
    handle.cell().stop(None);
    assert_eq!(handle.wait().await, Verdict::Stopped);
    assert_eq!(entries(&journal, 2).await, ["-b", "-a"]);
    let killed = started(Strategy::OneForOne, 3, Vec::new()).await;
    killed.cell().kill();
    assert_eq!(killed.wait().await, Verdict::Killed);
}
