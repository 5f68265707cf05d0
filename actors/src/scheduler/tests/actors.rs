//! The actors on a real node: mailboxes, codec and supervision included; shards and router are
//! stand-ins.

use super::fake::Shard;
use super::*;
use crate::kv::{KvArgs, start_kv};
use crate::scheduler::{ROLE, SchedulerArgs, SchedulerConfig, start_scheduler};
use crate::shard::Drawn;
use dunlin_model::engine::StageSpec;
use dunlin_runtime::{
    Address, Export, Inbound, MemoryNetwork, Node, NodeName, NodeOptions, Protocol,
};
use ractor::{Actor, ActorCell, ActorProcessingErr, ActorRef, SupervisionEvent};
use std::collections::HashMap;
use std::sync::Arc;
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};

/// Stands above the actors; tells how they end.
struct Watcher;

impl Actor for Watcher {
    type Msg = ();
    type State = tokio::sync::mpsc::UnboundedSender<String>;
    type Arguments = Self::State;

    async fn pre_start(
        &self,
        _: ActorRef<()>,
        ends: Self::State,
    ) -> Result<Self::State, ActorProcessingErr> {
        Ok(ends)
    }

    async fn handle_supervisor_evt(
        &self,
        _: ActorRef<()>,
        event: SupervisionEvent,
        ends: &mut Self::State,
    ) -> Result<(), ActorProcessingErr> {
        if let SupervisionEvent::ActorFailed(_, error) = event {
            let _ = ends.send(error.to_string());
        }
        Ok(())
    }
}

struct Replica {
    node: Node,
    scheduler: Address,
    events: UnboundedReceiver<SchedulerEvent>,
    broken: UnboundedReceiver<PlacementCast>,
    ends: UnboundedReceiver<String>,
    _exports: Vec<Export>,
}

/// Casts to a stand-in arrive at a channel.
fn listen<P: Protocol>(
    node: &Node,
    role: &str,
    name: &str,
) -> (UnboundedReceiver<P::Cast>, Export) {
    let (sender, receiver) = unbounded_channel();
    let export = node.export::<P>(role, name, move |inbound| {
        if let Inbound::Cast { msg, .. } = inbound {
            let _ = sender.send(msg);
        }
    });
    (receiver, export.unwrap())
}

impl Replica {
    /// `answers`: whether the shard does its work, or never reports.
    async fn start(name: &str, answers: bool, step_deadline: Duration) -> Self {
        let options = NodeOptions::new(NodeName::new(name).unwrap(), "test", "memory:0");
        let node = Node::start(options, Arc::new(MemoryNetwork::new(1))).await.unwrap();
        let spec = StageSpec::whole(1, 64, 4, 64);
        let (device, stage) = ("cpu".to_string(), 0);
        let place = ShardPlace { node: node.name().clone(), device, stage, spec };
        let plan = ReplicaPlan {
            replica: "r0".into(),
            epoch: EPOCH,
            model: "fake".into(),
            shards: vec![place],
            stages: 1,
        };
        let scheduler = node.address(ROLE, "r0");
        let (mut router, router_export) = listen::<RouterProtocol>(&node, "router", "main");
        let (broken, placement_export) = listen::<PlacementProtocol>(&node, "placement", "main");
        let (mut steps, shard_export) = listen::<ShardProtocol>(&node, "shard", "r0/0/0");
        let (sender, events) = unbounded_channel();
        tokio::spawn(async move {
            while let Some(RouterCast::Scheduler { events, .. }) = router.recv().await {
                events.into_iter().for_each(|event| drop(sender.send(event)));
            }
        });
        let (from, to) = (node.clone(), scheduler.clone());
        tokio::spawn(async move {
            let mut shard = Shard::new(64, 4);
            let mut last = Drawn::default();
            while let Some(ShardCast::Run { epoch, step, mut batch, drawn, .. }) =
                steps.recv().await
            {
                last.fill(&mut batch, &drawn).unwrap();
                let owners: HashMap<_, _> = batch.seqs.iter().map(|s| (s.request, 1)).collect();
                let sampled = shard.run(&batch, &owners);
                last.keep(step, &sampled);
                let done = SchedulerCast::StepDone { epoch, step, sampled, micros: 1 };
                if answers {
                    from.cast::<SchedulerProtocol>(&to, &done).unwrap();
                }
            }
        });
        let (sender, ends) = unbounded_channel();
        let (watcher, _) = Actor::spawn(None, Watcher, sender).await.unwrap();
        let above: ActorCell = watcher.get_cell();
        let kv_args = KvArgs { node: node.clone(), plan: plan.clone(), namespace: [0; 16] };
        let (_, kv) = start_kv(kv_args, above.clone()).await.unwrap();
        let args = SchedulerArgs {
            node: node.clone(),
            plan,
            config: SchedulerConfig { step_deadline, ..Default::default() },
            context: 200,
            kv,
            shards: vec![node.address("shard", "r0/0/0")],
            router: node.address("router", "main"),
            placement: node.address("placement", "main"),
        };
        start_scheduler(args, above).await.unwrap();
        let _exports = vec![router_export, placement_export, shard_export];
        Self { node, scheduler, events, broken, ends, _exports }
    }

    fn submit(&self, id: u64, max_tokens: u32) {
        let tokens: Vec<u32> = (0..10).collect();
        let work = Box::new(Work {
            request: RequestId(id),
            attempt: Attempt(1),
            tenant: "1".into(),
            cache_salt: String::new(),
            prompt_len: tokens.len() as u32,
            tokens,
            sampling: SamplingParams::default(),
            max_tokens,
            min_tokens: 0,
            stop_tokens: Vec::new(),
            prompt_logprobs: None,
            suspect: false,
        });
        self.cast(SchedulerCast::Submit { epoch: EPOCH, work });
    }

    fn cast(&self, cast: SchedulerCast) {
        self.node.cast::<SchedulerProtocol>(&self.scheduler, &cast).unwrap();
    }

    async fn call(&self, call: SchedulerCall) -> SchedulerReply {
        let deadline = Duration::from_secs(10);
        self.node.call::<SchedulerProtocol>(&self.scheduler, &call, deadline).await.unwrap()
    }

    /// The next event that is about a request.
    async fn next(&mut self) -> SchedulerEvent {
        loop {
            match within(self.events.recv()).await.unwrap() {
                SchedulerEvent::Load(_) | SchedulerEvent::KvEvents { .. } => {}
                event => return event,
            }
        }
    }
}

async fn within<T>(what: impl Future<Output = T>) -> T {
    tokio::time::timeout(Duration::from_secs(60), what).await.expect("nothing for 60 s")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_request_goes_through_the_actors() {
    let mut replica = Replica::start("through", true, Duration::from_secs(10)).await;
    replica.submit(1, 5);
    for expected in 0..5 {
        let event = replica.next().await;
        let SchedulerEvent::Tokens { position, .. } = event else { panic!("{event:?}") };
        assert_eq!(position, expected);
    }
    let reason = FinishReason::Length;
    let (request, attempt) = (RequestId(1), Attempt(1));
    assert_eq!(replica.next().await, SchedulerEvent::Finished { request, attempt, reason });
    assert_eq!(replica.call(SchedulerCall::Audit).await, SchedulerReply::Audit(Ok(())));
    assert!(replica.ends.try_recv().is_err());
}

/// C70: no new request, and within a second the router has heard that nothing runs.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn gauges_fall_after_everything_was_cancelled() {
    let mut replica = Replica::start("gauges", true, Duration::from_secs(10)).await;
    (1..=20).for_each(|id| replica.submit(id, 180));
    replica.next().await;
    for id in 1..=20 {
        let (request, attempt) = (RequestId(id), Attempt(1));
        replica.cast(SchedulerCast::Cancel { epoch: EPOCH, request, attempt });
    }
    let SchedulerReply::Status(_) = replica.call(SchedulerCall::Status).await else { panic!() };
    let idle = async {
        loop {
            if let Some(SchedulerEvent::Load(load)) = replica.events.recv().await
                && (load.running, load.waiting, load.kv_blocks_live) == (0, 0, 0)
            {
                return;
            }
        }
    };
    // One second is promised; the rest is for a busy machine.
    tokio::time::timeout(Duration::from_secs(10), idle).await.expect("a report of an idle replica");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_step_that_never_ends_breaks_the_replica() {
    let mut replica = Replica::start("hangs", false, Duration::from_millis(300)).await;
    replica.submit(1, 5);
    let PlacementCast::ReplicaBroken { reason, suspects, epoch, .. } =
        within(replica.broken.recv()).await.unwrap()
    else {
        panic!()
    };
    assert_eq!((epoch, suspects), (EPOCH, vec![RequestId(1)]));
    for part in ["step 1", "stage 0 on hangs/cpu", "375ms"] {
        assert!(reason.contains(part), "{reason}");
    }
    assert_eq!(within(replica.ends.recv()).await.unwrap(), reason, "and ends the actor");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_shard_that_cannot_be_reached_breaks_the_replica() {
    let mut replica = Replica::start("gone", true, Duration::from_secs(60)).await;
    drop(replica._exports.pop());
    replica.submit(1, 5);
    let PlacementCast::ReplicaBroken { reason, .. } = within(replica.broken.recv()).await.unwrap()
    else {
        panic!()
    };
    assert!(reason.contains("shard") && reason.contains("step 1"), "{reason}");
}
