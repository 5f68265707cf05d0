//! Frames damaged, repeated and held above TLS: nothing is lost, nothing is taken twice.

use super::ms;
use crate::harness::*;
use bytes::Bytes;
use dunlin_runtime::faults::names;
use dunlin_runtime::transport::LaneClass;
use dunlin_runtime::{
    Action, Fact, FaultHook, Faults, FlowClass, FlowError, FlowFrame, FlowId, Node, Site,
    StartError,
};
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::sync::Arc;
use tokio::time::Instant;

type Choose = Box<dyn Fn(&Site<'_>, u64) -> Option<Action> + Send + Sync>;

/// A hook that does what its closure says about the `n`th site, and remembers all facts.
struct Plan {
    choose: Choose,
    asked: Mutex<u64>,
    facts: Mutex<Vec<Fact>>,
}

impl FaultHook for Plan {
    fn decide(&self, site: &Site<'_>) -> Option<Action> {
        let mut asked = self.asked.lock();
        *asked += 1;
        (self.choose)(site, *asked)
    }

    fn observe(&self, fact: &Fact) {
        self.facts.lock().push(fact.clone());
    }
}

impl Plan {
    fn new(choose: impl Fn(&Site<'_>, u64) -> Option<Action> + Send + Sync + 'static) -> Arc<Self> {
        let choose: Choose = Box::new(choose);
        Arc::new(Self { choose, asked: Mutex::default(), facts: Mutex::default() })
    }

    fn count(&self, name: &str) -> usize {
        self.facts.lock().iter().filter(|fact| fact.name == name).count()
    }
}

async fn pair_under<H: Harness>(harness: &H, plan: &Arc<Plan>) -> (Node, Node) {
    let mut options = options(harness, &["a", "b"]);
    options.iter_mut().for_each(|o| o.faults = Faults::armed(plan.clone()));
    let (a, b) = (start(harness, &options[0]).await, start(harness, &options[1]).await);
    linked(&a, "b").await;
    linked(&b, "a").await;
    (a, b)
}

/// SplitMix64's finaliser: the same draws in every run.
fn mix(n: u64) -> u64 {
    let n = n.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let n = (n ^ (n >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    n ^ (n >> 27)
}

/// Damages or repeats one frame in `every` that `matches`.
fn chaos(every: u64, draw: u64) -> Option<Action> {
    let draw = mix(draw);
    let action = match draw % 4 {
        0 => Action::Corrupt { at: draw >> 20, mask: (draw >> 8) as u8 | 1 },
        1 => Action::Truncate { keep: draw >> 20 },
        2 => Action::Duplicate,
        _ => Action::Stale,
    };
    (draw >> 32).is_multiple_of(every).then_some(action)
}

pub async fn damaged_frames_lose_no_mail_and_double_none<H: Harness>() {
    let harness = H::new();
    // Hellos and heartbeats too.
    let plan = Plan::new(|site, n| match site {
        Site::FrameOut { .. } => chaos(20, n),
        _ => None,
    });
    let (a, b) = pair_under(&harness, &plan).await;
    let (_export, to, mut casts) = echo(&b, "x");
    let mut sent = Vec::new();
    for i in 0..400u64 {
        if a.cast::<Echo>(&to, &i).is_ok() {
            sent.push(i);
        }
        if i % 4 == 0 {
            let bytes = vec![i as u8; (i as usize * 37) % 3000];
            assert_eq!(ask(&a, &to, Ask::Echo(bytes.clone())).await, Ok(bytes), "call {i}");
        }
    }
    // The last call came behind all casts of its lane.
    assert_eq!(ask(&a, &to, Ask::Echo(vec![])).await, Ok(vec![]));
    let mut got = Vec::new();
    while let Ok(i) = casts.try_recv() {
        got.push(i);
    }
    assert_eq!(got, sent);
    let (done, refused) = (plan.count(names::FAULT_DONE), plan.count(names::FRAME_REFUSED));
    assert!(done > 20 && refused > 10, "{done} done, {refused} refused");
    assert!(plan.count(names::PEER_DOWN) > 4, "damaged frames end their link");
    assert!(plan.count(names::PEER_UP) > 4);
}

pub async fn flows_under_damage_tell_the_truth_or_say_so<H: Harness>() {
    let harness = H::new();
    let plan = Plan::new(|site, n| match site {
        Site::FrameOut { message: "flow", .. } => chaos(12, n),
        _ => None,
    });
    let (a, b) = pair_under(&harness, &plan).await;
    let mut receiver = b.accept_flow(a.name(), FlowId(1));
    let sender = a.open_flow(b.name(), FlowId(1), FlowClass::Activations);
    let payload = |step: u64| Bytes::from(vec![step as u8; 200 + (step as usize * 71) % 3000]);
    let sending = tokio::spawn(async move {
        let mut failures = 0;
        for step in 0..300 {
            tokio::time::sleep(ms(2)).await;
            let frame = FlowFrame { epoch: 1, step, tag: !step, payload: payload(step) };
            match sender.send(frame).await {
                Ok(()) => {}
                Err(FlowError::LinkDown { .. } | FlowError::Closed { .. }) => failures += 1,
                Err(other) => panic!("{other}"),
            }
        }
        drop(sender);
        failures
    });
    let (mut last, mut got, mut down) = (None, 0, 0);
    loop {
        let Ok(received) = tokio::time::timeout(2 * SECOND, receiver.recv()).await else {
            // The end itself was damaged.
            assert!(sending.is_finished(), "nothing comes, and nothing is said");
            break;
        };
        match received {
            Ok(frame) => {
                assert!(last.is_none_or(|last| frame.step > last), "{} twice", frame.step);
                assert_eq!((frame.tag, &frame.payload), (!frame.step, &payload(frame.step)));
                last = Some(frame.step);
                got += 1;
            }
            Err(FlowError::LinkDown { .. }) => down += 1,
            Err(FlowError::Closed { .. }) => break,
            Err(other) => panic!("{other}"),
        }
    }
    let failures = sending.await.unwrap();
    assert!(got > 100 && down > 2 && failures > 0, "{got} got, {down} down, {failures} failed");
}

/// One of each repetition: they change nothing but the counts.
pub async fn repeated_frames_have_no_effect<H: Harness>() {
    let harness = H::new();
    let plan = Plan::new(|site, n| match site {
        Site::FrameOut { message: "hello" | "open", .. } => None,
        Site::FrameOut { .. } if n % 3 == 0 => Some(Action::Duplicate),
        Site::FrameOut { .. } if n % 3 == 1 => Some(Action::Stale),
        _ => None,
    });
    let (a, b) = pair_under(&harness, &plan).await;
    let (mut events_a, mut events_b) = (a.watch(), b.watch());
    let (_export, to, mut casts) = echo(&b, "x");
    let mut receiver = b.accept_flow(a.name(), FlowId(1));
    let sender = a.open_flow(b.name(), FlowId(1), FlowClass::Activations);
    for step in 0..200u64 {
        a.cast::<Echo>(&to, &step).unwrap();
        let payload = Bytes::from(vec![step as u8; 100]);
        let frame = FlowFrame { epoch: 1, step, tag: 0, payload };
        sender.send(frame.clone()).await.unwrap();
        assert_eq!(receiver.recv().await, Ok(frame));
    }
    tokio::time::sleep(ms(700)).await;
    assert_eq!(ask(&a, &to, Ask::Echo(vec![7])).await, Ok(vec![7]));
    for step in 0..200 {
        assert_eq!(casts.recv().await, Some(step));
    }
    assert!(casts.try_recv().is_err(), "a cast came twice");
    assert!(events_a.try_recv().is_err() && events_b.try_recv().is_err(), "the link was lost");
    let (done, refused) = (plan.count(names::FAULT_DONE), plan.count(names::FRAME_REFUSED));
    assert!(done > 200, "{done} repetitions");
    // The last of a lane may still be under way.
    assert!(refused <= done && refused + 20 > done, "{done} repeated, {refused} refused");
}

/// Kind `stream.stall`: one lane stands, the others do not wait for it.
pub async fn a_stalled_flow_holds_up_nothing_else<H: Harness>() {
    let harness = H::new();
    let stalled = Mutex::new(BTreeMap::new());
    let plan = Plan::new(move |site, _| match site {
        Site::FrameOut { node, lane: LaneClass::Kv, .. } => {
            let first = stalled.lock().insert(node.to_string(), ()).is_none();
            first.then_some(Action::Delay(ms(1500)))
        }
        _ => None,
    });
    let (a, b) = pair_under(&harness, &plan).await;
    let (_export, to, _) = echo(&b, "x");
    let mut receiver = b.accept_flow(a.name(), FlowId(1));
    let sender = a.open_flow(b.name(), FlowId(1), FlowClass::Kv);
    let began = Instant::now();
    let frame = FlowFrame { epoch: 1, step: 5, tag: 0, payload: Bytes::from_static(b"late") };
    let sending = tokio::spawn(async move { sender.send(frame).await });
    for _ in 0..50 {
        ask(&a, &to, Ask::Echo(vec![1])).await.unwrap();
    }
    assert!(began.elapsed() < ms(1400), "calls waited for the flow: {:?}", began.elapsed());
    assert_eq!(receiver.recv().await.unwrap().step, 5);
    assert!(began.elapsed() >= ms(1500), "not held: {:?}", began.elapsed());
    sending.await.unwrap().unwrap();
    assert!(is_up(&a, "b"));
    assert_eq!(plan.count(names::FAULT_DONE), 1);
}

/// Every link breaks with its first heartbeat: the two try again and again, but ever less often.
pub async fn a_link_that_never_holds_is_not_dialled_without_pause<H: Harness>() {
    let harness = H::new();
    let plan = Plan::new(|site, _| match site {
        Site::FrameOut { message: "ping", .. } => Some(Action::Truncate { keep: 20 }),
        _ => None,
    });
    let mut options = options(&harness, &["a", "b"]);
    options.iter_mut().for_each(|o| o.faults = Faults::armed(plan.clone()));
    let _nodes = [start(&harness, &options[0]).await, start(&harness, &options[1]).await];
    tokio::time::sleep(3 * SECOND).await;
    let ups = plan.count(names::PEER_UP);
    assert!((4..80).contains(&ups), "{ups} ends of links in 3 s");
}

pub async fn a_start_fails_as_often_as_the_plan_says<H: Harness>() {
    let harness = H::new();
    let plan = Plan::new(|site, n| match site {
        Site::Start { .. } if n <= 2 => {
            Some(Action::Fail { text: "injected".into(), sticky: false })
        }
        _ => None,
    });
    let mut all = options(&harness, &["a", "b"]);
    all[0].faults = Faults::armed(plan.clone());
    for _ in 0..2 {
        let error = Node::start(all[0].clone(), harness.transport("a")).await.unwrap_err();
        assert!(matches!(&error, StartError::Injected { text, .. } if text == "injected"));
    }
    start(&harness, &all[0]).await;
    assert_eq!(plan.count(names::FAULT_DONE), 2);
}
