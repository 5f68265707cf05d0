//! The clients, and the part of the gateway that faces the router: submits, cancels, and writes
//! down what comes back. Checks nothing.

use super::oracle;
use super::shared::{Order, Shared};
use crate::record::What;
use crate::resolved::RequestSpec;
use dunlin_actors::messages::{
    FailureCode, GatewayCall, GatewayCast, GatewayProtocol, Refusal, Request, RequestId,
    RouterCall, RouterCast, RouterProtocol, RouterReply, StreamEvent,
};
use dunlin_actors::router;
use dunlin_runtime::{Address, Export, Inbound, Node, NodeName};
use parking_lot::Mutex;
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

/// As the gateway waits for the router.
const SUBMIT_WITHIN: Duration = Duration::from_secs(5);
/// Events that the gateway keeps for a client that does not read; then it hangs up.
const UNREAD: usize = 256;

/// Mailbox of gateways.
const ROLE: &str = "gateway";

#[derive(Default)]
pub struct Clients {
    all: Mutex<BTreeMap<u64, Client>>,
}

pub struct Client {
    pub spec: RequestSpec,
    /// Node whose gateway it asked.
    pub at: String,
    pub accepted: bool,
    pub tokens: Vec<u32>,
    pub end: Option<String>,
    /// It does not listen any more.
    gone: bool,
    /// Not written down: the probe at the end.
    hidden: bool,
    slow: Option<Slow>,
}

/// A client that reads one event in so long.
struct Slow {
    unread: VecDeque<StreamEvent>,
    most: usize,
}

impl Shared {
    /// The clients of this simulation.
    pub fn clients(&self) -> &Clients {
        &self.clients
    }
}

/// The gateway's mailbox on this node.
pub fn export(node: &Node, shared: &Arc<Shared>) -> Result<Export, String> {
    let (shared, at) = (shared.clone(), node.name().to_string());
    let export = node.export::<GatewayProtocol>(ROLE, "main", move |inbound| match inbound {
        Inbound::Cast { msg: GatewayCast::Event { request, event }, .. } => {
            Clients::event(&shared, request.0, event);
        }
        Inbound::Call { msg: GatewayCall::RouterRestarted, reply, .. } => {
            Clients::lose(&shared, &at, "internal", "the router was restarted");
            reply.send(());
        }
    });
    export.map_err(|error| error.to_string())
}

impl Clients {
    pub fn read<T>(&self, number: u64, read: impl FnOnce(&Client) -> T) -> Option<T> {
        self.all.lock().get(&number).map(read)
    }

    pub fn open(&self) -> usize {
        self.all.lock().values().filter(|c| c.end.is_none() && !c.gone).count()
    }

    /// Numbers of those that have begun and not ended.
    pub fn open_numbers(&self) -> Vec<u64> {
        let all = self.all.lock();
        let open = all.iter().filter(|(_, c)| c.end.is_none() && !c.gone && !c.hidden);
        open.map(|(number, _)| *number).collect()
    }

    /// Sends the request; `id` is what the router knows it by.
    pub fn submit(
        shared: &Arc<Shared>,
        gateway: Option<(Node, NodeName)>,
        spec: &RequestSpec,
        id: u64,
        hidden: bool,
    ) {
        let number = spec.number;
        let at = gateway.as_ref().map(|(node, _)| node.name().to_string()).unwrap_or_default();
        let client = Client {
            spec: spec.clone(),
            at,
            accepted: false,
            tokens: Vec::new(),
            end: None,
            gone: false,
            hidden,
            slow: None,
        };
        shared.clients().all.lock().insert(number, client);
        if !hidden {
            shared.push(What::Submitted { request: number });
        }
        let Some((node, head)) = gateway else {
            return Self::refused(shared, number, "unreachable");
        };
        shared.with(|inner| inner.open.insert(number));
        let request = Request {
            id: RequestId(id),
            tenant: spec.tenant.clone(),
            cache_salt: String::new(),
            prompt: spec.prompt.clone(),
            keys: None,
            sampling: oracle::sampling(spec),
            max_tokens: spec.max_tokens,
            min_tokens: 0,
            stop_tokens: Vec::new(),
            prompt_logprobs: None,
            deadline_ms: spec.deadline_us / 1000,
            reply_to: node.address(ROLE, "main"),
        };
        let shared = shared.clone();
        tokio::spawn(async move {
            let to = Address::new(head, router::ROLE, router::INSTANCE);
            let call = RouterCall::Submit(Box::new(request));
            match node.call::<RouterProtocol>(&to, &call, SUBMIT_WITHIN).await {
                Ok(RouterReply::Submitted(Ok(()))) => {
                    Self::accepted(&shared, number);
                    if shared.clients().wants_to_leave(number) {
                        shared.order(Order::Cancel(number));
                    }
                }
                Ok(RouterReply::Submitted(Err(refusal))) => {
                    Self::refused(&shared, number, refusal_code(&refusal));
                }
                Ok(_) => Self::refused(&shared, number, "internal"),
                Err(_) => {
                    // It may have been accepted all the same.
                    let cast = RouterCast::Cancel { request: RequestId(id), stopped: false };
                    let _ = node.cast::<RouterProtocol>(&to, &cast);
                    Self::refused(&shared, number, "unreachable");
                }
            }
        });
    }

    /// The client hangs up without a word to anybody but its own gateway.
    pub fn leave(shared: &Shared, number: u64) -> bool {
        let mut all = shared.clients().all.lock();
        let Some(client) = all.get_mut(&number).filter(|c| c.end.is_none() && !c.gone) else {
            return false;
        };
        client.gone = true;
        drop(all);
        shared.with(|inner| inner.open.remove(&number));
        let (code, message) = ("gone".to_string(), "the client left".to_string());
        shared.push(What::Ended { request: number, code, message });
        true
    }

    /// From now on the client reads one event in each of these.
    pub fn slow_down(shared: &Arc<Shared>, number: u64, pause: Duration) -> bool {
        let mut all = shared.clients().all.lock();
        let Some(client) = all.get_mut(&number).filter(|c| c.end.is_none() && !c.gone) else {
            return false;
        };
        client.slow = Some(Slow { unread: VecDeque::new(), most: 0 });
        drop(all);
        let shared = shared.clone();
        tokio::spawn(async move {
            loop {
                tokio::time::sleep(pause).await;
                let mut all = shared.clients().all.lock();
                let Some(client) = all.get_mut(&number) else { return };
                if client.end.is_some() || client.gone {
                    return;
                }
                let Some(slow) = &mut client.slow else { return };
                let next = slow.unread.pop_front();
                drop(all);
                if let Some(event) = next {
                    Self::take(&shared, number, event);
                }
            }
        });
        true
    }

    /// It reads at once again; says how much lay unread at most.
    pub fn speed_up(shared: &Shared, number: u64) -> Option<usize> {
        let slow = shared.clients().all.lock().get_mut(&number)?.slow.take()?;
        for event in slow.unread {
            Self::take(shared, number, event);
        }
        Some(slow.most)
    }

    /// A gateway has lost its requests: its process ended, or its router did.
    pub fn lose(shared: &Shared, at: &str, code: &str, message: &str) {
        let lost: Vec<u64> = {
            let all = shared.clients().all.lock();
            let here = all.iter().filter(|(_, c)| c.at == at && c.end.is_none() && !c.gone);
            here.map(|(number, _)| *number).collect()
        };
        for number in lost {
            Self::ended(shared, number, code, message.to_string());
        }
    }

    fn wants_to_leave(&self, number: u64) -> bool {
        self.read(number, |client| {
            let have = client.tokens.len() as u32;
            client.end.is_none() && client.spec.cancel_after.is_some_and(|after| have >= after)
        }) == Some(true)
    }

    fn accepted(shared: &Shared, number: u64) {
        let mut all = shared.clients().all.lock();
        let Some(client) = all.get_mut(&number) else { return };
        if !client.accepted && client.end.is_none() && !client.gone {
            client.accepted = true;
            if !client.hidden {
                drop(all);
                shared.push(What::Accepted { request: number });
            }
        }
    }

    fn refused(shared: &Shared, number: u64, code: &str) {
        let mut all = shared.clients().all.lock();
        let Some(client) = all.get_mut(&number) else { return };
        if client.end.is_some() || client.gone {
            return;
        }
        // What was accepted and lost its answer on the way is the client's loss, not a refusal.
        let accepted = client.accepted;
        client.end = Some(code.to_string());
        client.gone = true;
        let hidden = client.hidden;
        drop(all);
        shared.with(|inner| inner.open.remove(&number));
        if hidden {
            return;
        }
        let code = code.to_string();
        shared.push(match accepted {
            true => What::Ended { request: number, code, message: "no answer".into() },
            false => What::Refused { request: number, code },
        });
    }

    fn event(shared: &Shared, number: u64, event: StreamEvent) {
        let mut all = shared.clients().all.lock();
        let Some(client) = all.get_mut(&number) else { return };
        if client.gone {
            return;
        }
        let Some(slow) = &mut client.slow else {
            drop(all);
            return Self::take(shared, number, event);
        };
        slow.unread.push_back(event);
        slow.most = slow.most.max(slow.unread.len());
        if slow.unread.len() > UNREAD {
            drop(all);
            if Self::leave(shared, number) {
                shared.order(Order::Cancel(number));
            }
        }
    }

    fn take(shared: &Shared, number: u64, event: StreamEvent) {
        Self::accepted(shared, number);
        match event {
            StreamEvent::PromptLogprobs(_) => {}
            StreamEvent::Tokens { position, ids, .. } => {
                let mut all = shared.clients().all.lock();
                let Some(client) = all.get_mut(&number) else { return };
                client.tokens.extend(&ids);
                let have = client.tokens.len() as u32;
                let hidden = client.hidden;
                let leaves = client.spec.cancel_after.is_some_and(|after| {
                    have >= after.max(1) && have - (ids.len() as u32) < after.max(1)
                });
                drop(all);
                if !hidden {
                    shared.with(|inner| {
                        for (position, id) in (position..).zip(&ids) {
                            let id = id.to_string();
                            inner.push(What::Token { request: number, position, id });
                        }
                    });
                }
                if leaves {
                    shared.order(Order::Cancel(number));
                }
            }
            StreamEvent::Finished { served_by, .. } => {
                if shared.clients().read(number, |c| c.hidden) == Some(false) {
                    let model = shared.model.clone();
                    shared.push(What::Served { request: number, model, served_by });
                }
                Self::ended(shared, number, "finished", String::new());
            }
            StreamEvent::Failed { code, message, .. } => {
                Self::ended(shared, number, failure_code(code), message);
            }
            StreamEvent::Cancelled { .. } => {
                Self::ended(shared, number, "cancelled", String::new());
            }
        }
    }

    fn ended(shared: &Shared, number: u64, code: &str, message: String) {
        let mut all = shared.clients().all.lock();
        let Some(client) = all.get_mut(&number) else { return };
        client.end.get_or_insert_with(|| code.to_string());
        let hidden = client.hidden;
        drop(all);
        shared.with(|inner| {
            inner.open.remove(&number);
            if !hidden {
                inner.push(What::Ended { request: number, code: code.to_string(), message });
            }
        });
        shared.wake.notify_one();
    }
}

fn refusal_code(refusal: &Refusal) -> &'static str {
    match refusal {
        Refusal::NeverFits { .. } => "never_fits",
        Refusal::Overloaded { .. } => "overloaded",
        Refusal::Draining => "draining",
        Refusal::NotReady { .. } => "not_ready",
        Refusal::Duplicate(_) => "duplicate",
    }
}

fn failure_code(code: FailureCode) -> &'static str {
    match code {
        FailureCode::Deadline => "deadline",
        FailureCode::Poison => "poison",
        FailureCode::NotFinite => "not_finite",
        FailureCode::NeverFits => "never_fits",
        FailureCode::Internal => "internal",
    }
}
