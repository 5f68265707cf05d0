//! Links: dialling, the hello, and the tasks that move frames while a link is up.
//!
//! Any received frame counts as life. Heartbeats have a lane and a priority of their own, so that
//! bulk data does not delay them. This module decides nothing about whom to trust
//! (`membership.rs`) or what a message means (`node.rs`).

use crate::address::{Incarnation, Peer};
use crate::flow::{FlowId, Flows};
use crate::frame::{
    self, Content, Frame, FrameError, Hello, LANES, MAX_MAIL_HEAD, MAX_SMALL_FRAME, Refusal,
    RefusalCode, Stamp,
};
use crate::membership;
use crate::node::Core;
use crate::options::ms;
use crate::peer::PeerShell;
use crate::prng::{Prng, fnv};
use crate::session::Verdict;
use crate::transport::{
    CloseCode, CloseReason, FrameSink, FrameSource, LaneClass, Link, LinkError, OutFrame,
};
use bytes::Bytes;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::{Instant, timeout};

/// Acknowledge after so many bytes of mail, heartbeats apart.
const ACK_BYTES: usize = 64 << 10;
/// The larger name dials so much later, so that two nodes seldom dial each other at once.
const SECOND_DIALLER_MS: u64 = 100;

/// Why a link could not be set up.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum JoinError {
    #[error(transparent)]
    Dial(#[from] crate::transport::DialError),
    #[error("{address}: refused by {by}: {refusal}")]
    RefusedThere { address: String, by: String, refusal: Refusal },
    #[error("{address}: {refusal}")]
    RefusedHere { address: String, refusal: Refusal },
    #[error("{address}: {error}")]
    Link { address: String, error: LinkError },
    #[error("{address}: {error}")]
    Frame { address: String, error: FrameError },
    #[error("{address}: no answer within {after_ms} ms")]
    Silent { address: String, after_ms: u64 },
    #[error("another link is being set up")]
    Ahead,
}

// ---- dialling ------------------------------------------------------------------------------

/// Keeps a link to `peer` for as long as the node lives: dials whenever there is none.
pub(crate) async fn keep_linked(core: Arc<Core>, peer: Arc<PeerShell>) {
    let timing = core.options.timing;
    let seed = core.options.seed ^ fnv(&[core.me.name.as_str(), peer.name.as_str()]);
    let mut backoff = Backoff::new(timing.backoff_first_ms, timing.backoff_max_ms, seed);
    let head_start = match core.me.name < peer.name {
        true => 0,
        false => SECOND_DIALLER_MS,
    };
    let mut next = Instant::now() + ms(head_start);
    let mut was_up = false;
    loop {
        let up = peer.is_up();
        if was_up && !up {
            backoff.reset();
            next = Instant::now() + ms(head_start);
        }
        was_up = up;
        let addresses = peer.addresses();
        let idle = up || addresses.is_empty();
        tokio::select! {
            biased;
            _ = peer.wake.notified() => {}
            _ = until(peer.resume_until().filter(|_| !up)) => peer.give_up(),
            _ = until((!idle).then_some(next)) => {
                for address in addresses {
                    let Err(error) = dial(&core, &peer, &address).await else { break };
                    if peer.is_up() {
                        break;
                    }
                    tracing::debug!(peer = %peer.name, %error, "no link");
                    if error != JoinError::Ahead {
                        peer.failed(error.to_string());
                    }
                }
                next = Instant::now() + backoff.next();
            }
        }
    }
}

pub(crate) async fn until(at: Option<Instant>) {
    match at {
        Some(at) => tokio::time::sleep_until(at).await,
        None => std::future::pending().await,
    }
}

/// Doubling waits with jitter: each is 50 to 100 % of its step. Pure but for its seed.
#[derive(Debug)]
struct Backoff {
    first_ms: u64,
    max_ms: u64,
    step_ms: u64,
    rng: Prng,
}

impl Backoff {
    fn new(first_ms: u64, max_ms: u64, seed: u64) -> Self {
        let first_ms = first_ms.max(1);
        Self { first_ms, max_ms: max_ms.max(first_ms), step_ms: first_ms, rng: Prng::new(seed) }
    }

    fn reset(&mut self) {
        self.step_ms = self.first_ms;
    }

    fn next(&mut self) -> Duration {
        let wait = ms(self.step_ms).mul_f64(0.5 + 0.5 * self.rng.unit());
        self.step_ms = (self.step_ms * 2).min(self.max_ms);
        wait
    }
}

async fn dial(core: &Arc<Core>, peer: &Arc<PeerShell>, address: &str) -> Result<(), JoinError> {
    let after_ms = core.options.timing.dial_ms;
    let silent = |_| JoinError::Silent { address: address.to_owned(), after_ms };
    let link =
        timeout(ms(after_ms), core.endpoint.dial(&peer.name, address)).await.map_err(silent)??;
    let Some((token, hello)) = peer.greet(&core.me) else {
        link.close(CloseReason::new(CloseCode::Replaced, "another link came first"));
        return Err(JoinError::Ahead);
    };
    let greeted = timeout(ms(after_ms), greet(core, peer, address, &link, token, hello))
        .await
        .map_err(silent)
        .and_then(|result| result);
    match greeted {
        Ok((sink, source)) if peer.up(token, Some(link.clone()), true) => {
            core.clone().link_up(peer.clone(), link, token, sink, source);
            Ok(())
        }
        Ok(_) => {
            link.close(CloseReason::new(CloseCode::Replaced, "another link came first"));
            Err(JoinError::Ahead)
        }
        Err(error) => {
            peer.abandon(token);
            link.close(CloseReason::new(CloseCode::Refused, error.to_string()));
            Err(error)
        }
    }
}

type Lanes = (Box<dyn FrameSink>, Box<dyn FrameSource>);

async fn greet(
    core: &Core,
    peer: &PeerShell,
    address: &str,
    link: &Arc<dyn Link>,
    token: u64,
    hello: Hello,
) -> Result<Lanes, JoinError> {
    let address = || address.to_owned();
    let broken = |error| JoinError::Link { address: address(), error };
    let mut sink = link.open(LaneClass::Heartbeat).await.map_err(broken)?;
    put(&mut sink, core.stamp, &Frame::Hello(hello)).await.map_err(broken)?;
    let mut source = link.accept().await.map_err(broken)?;
    let bytes = source.recv(MAX_SMALL_FRAME).await.map_err(broken)?;
    let bytes = bytes.ok_or_else(|| broken(LinkError::Reset))?;
    let (_, answer) =
        frame::decode(bytes).map_err(|error| JoinError::Frame { address: address(), error })?;
    let hello = match answer {
        Frame::Welcome(hello) => hello,
        Frame::Refuse(refusal) => {
            let by = peer.name.to_string();
            return Err(JoinError::RefusedThere { address: address(), by, refusal });
        }
        _ => {
            let error = FrameError::Unexpected;
            return Err(JoinError::Frame { address: address(), error });
        }
    };
    let refused = |refusal| JoinError::RefusedHere { address: address(), refusal };
    membership::check(&core.me, &hello, &link.proven_names(), Some(&peer.name)).map_err(refused)?;
    let out_session = peer.welcomed(&core.me, token, &hello).map_err(refused)?;
    put(&mut sink, core.stamp, &Frame::Ready { out_session }).await.map_err(broken)?;
    Ok((sink, source))
}

async fn put(sink: &mut Box<dyn FrameSink>, stamp: Stamp, frame: &Frame) -> Result<(), LinkError> {
    let head = frame::encode(stamp, frame);
    sink.send(vec![OutFrame { head, body: Bytes::new() }]).await
}

// ---- accepting -----------------------------------------------------------------------------

/// Greets a link that a peer dialled, within bounded time.
pub(crate) async fn accept(core: Arc<Core>, link: Arc<dyn Link>) {
    let after_ms = core.options.timing.hello_ms;
    let mut token = None;
    let met = timeout(ms(after_ms), meet(&core, &link, &mut token)).await;
    let reason = match met {
        Ok(Ok((peer, joined, sink, source))) => {
            if peer.up(joined, Some(link.clone()), false) {
                return core.link_up(peer, link, joined, sink, source);
            }
            "another link came first".to_owned()
        }
        Ok(Err(reason)) => reason,
        Err(_) => format!("no hello within {after_ms} ms"),
    };
    if let Some((peer, token)) = token {
        peer.abandon(token);
    }
    tracing::debug!(%reason, "a link was not accepted");
    metrics::counter!("dunlin_hellos_refused_total").increment(1);
    link.close(CloseReason::new(CloseCode::Refused, reason));
}

type Met = (Arc<PeerShell>, u64, Box<dyn FrameSink>, Box<dyn FrameSource>);

async fn meet(
    core: &Arc<Core>,
    link: &Arc<dyn Link>,
    joining: &mut Option<(Arc<PeerShell>, u64)>,
) -> Result<Met, String> {
    let text = |error: LinkError| error.to_string();
    let mut source = link.accept().await.map_err(text)?;
    let bytes = source.recv(MAX_SMALL_FRAME).await.map_err(text)?.ok_or("no hello")?;
    let mut sink = link.open(LaneClass::Heartbeat).await.map_err(text)?;
    let judged = match frame::decode(bytes) {
        Ok((_, Frame::Hello(hello))) => judge(core, link, hello),
        Ok(_) => Err(membership::refuse_frame(&FrameError::Unexpected)),
        Err(error) => Err(membership::refuse_frame(&error)),
    };
    let (peer, token, welcome, replaced) = match judged {
        Ok(judged) => judged,
        Err(refusal) => {
            if refusal.code != RefusalCode::Busy {
                tracing::warn!(peers = ?link.proven_names(), %refusal, "hello refused");
            }
            put(&mut sink, core.stamp, &Frame::Refuse(refusal.clone())).await.map_err(text)?;
            sink.finish();
            // The dialler closes when it has read the refusal; closing first could lose it.
            link.closed().await;
            return Err(refusal.to_string());
        }
    };
    *joining = Some((peer.clone(), token));
    if let Some(incarnation) = replaced {
        let who = Peer { node: peer.name.clone(), incarnation };
        core.peer_down(who, "a new link takes its place");
    }
    put(&mut sink, core.stamp, &Frame::Welcome(welcome)).await.map_err(text)?;
    let bytes = source.recv(MAX_SMALL_FRAME).await.map_err(text)?.ok_or("no ready")?;
    match frame::decode(bytes) {
        Ok((_, Frame::Ready { out_session })) => peer.ready(out_session),
        _ => return Err("expected the ready frame".into()),
    }
    Ok((peer, token, sink, source))
}

type Judged = (Arc<PeerShell>, u64, Hello, Option<Incarnation>);

fn judge(core: &Core, link: &Arc<dyn Link>, hello: Hello) -> Result<Judged, Refusal> {
    membership::check(&core.me, &hello, &link.proven_names(), None)?;
    let peer = core.peers.read().get(&hello.node).cloned().ok_or_else(|| Refusal {
        code: RefusalCode::UnknownNode,
        ours: format!("{} knows no such node", core.me.name),
        theirs: hello.node.to_string(),
    })?;
    let resume_ms = core.options.timing.resume_ms;
    let (token, welcome, replaced) = peer.admit(&core.me, &hello, resume_ms)?;
    Ok((peer, token, welcome, replaced))
}

// ---- a link that is up ---------------------------------------------------------------------

/// What the tasks of one link share.
struct Run {
    core: Arc<Core>,
    peer: Arc<PeerShell>,
    from: Peer,
    link: Arc<dyn Link>,
    token: u64,
    /// To the heartbeat lane's writer. A full queue drops: the next heartbeat says it all again.
    small: mpsc::Sender<Frame>,
}

/// Runs the link until it ends; returns why.
pub(crate) async fn run(
    core: Arc<Core>,
    peer: Arc<PeerShell>,
    link: Arc<dyn Link>,
    token: u64,
    (sink, source): Lanes,
) -> CloseReason {
    let (small, queue) = mpsc::channel(64);
    let from = Peer { node: peer.name.clone(), incarnation: peer.incarnation() };
    let run = Arc::new(Run { core, peer, from, link: link.clone(), token, small });
    let mut tasks = JoinSet::new();
    tasks.spawn(beat(run.clone(), sink, queue));
    tasks.spawn(listen(run.clone(), source));
    for lane in 0..LANES {
        tasks.spawn(write_mail(run.clone(), lane));
    }
    tasks.spawn(accept_lanes(run.clone()));
    tokio::select! {
        biased;
        reason = link.closed() => reason,
        ended = tasks.join_next() => match ended {
            Some(Ok(reason)) => reason,
            Some(Err(error)) => CloseReason::new(CloseCode::Lost, error.to_string()),
            None => CloseReason::new(CloseCode::Lost, "no tasks"),
        },
    }
}

fn lost(error: LinkError) -> CloseReason {
    match error {
        LinkError::Down(reason) => reason,
        other => CloseReason::new(CloseCode::Lost, other.to_string()),
    }
}

fn broken(error: FrameError) -> CloseReason {
    metrics::counter!("dunlin_frames_refused_total", "reason" => error.kind()).increment(1);
    CloseReason::new(CloseCode::Protocol, error.to_string())
}

/// Sends heartbeats and acknowledgements, and notices silence.
async fn beat(
    run: Arc<Run>,
    mut sink: Box<dyn FrameSink>,
    mut queue: mpsc::Receiver<Frame>,
) -> CloseReason {
    let timing = run.core.options.timing;
    let mut ticks = tokio::time::interval(ms(timing.heartbeat_ms.max(1)));
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    let mut seq = 0;
    loop {
        let frame = tokio::select! {
            biased;
            _ = ticks.tick() => {
                let silent_ms = run.peer.silent_ms();
                if silent_ms > timing.dead_ms {
                    let text = format!("nothing heard for {silent_ms} ms");
                    return CloseReason::new(CloseCode::Lost, text);
                }
                seq += 1;
                run.core.lease_sent(&run.peer, seq);
                Frame::Ping { seq, received: run.peer.counts() }
            }
            frame = queue.recv() => match frame {
                Some(frame) => frame,
                None => return CloseReason::new(CloseCode::Lost, "the link has ended"),
            },
        };
        if let Err(error) = put(&mut sink, run.core.stamp, &frame).await {
            return lost(error);
        }
    }
}

/// Reads the peer's heartbeats and acknowledgements.
async fn listen(run: Arc<Run>, mut source: Box<dyn FrameSource>) -> CloseReason {
    loop {
        let bytes = match source.recv(MAX_SMALL_FRAME).await {
            Ok(Some(bytes)) => bytes,
            Ok(None) => return CloseReason::new(CloseCode::Lost, "the heartbeat lane ended"),
            Err(error) => return lost(error),
        };
        run.peer.heard();
        let frame = match run.open(bytes) {
            Ok(frame) => frame,
            Err(error) => return broken(error),
        };
        match frame {
            Frame::Ping { seq, received } => {
                run.peer.acked(run.token, &received);
                let lease_ms = run.core.grant(&run.peer);
                let received = run.peer.counts();
                let _ = run.small.try_send(Frame::Pong { seq, lease_ms, received });
            }
            Frame::Pong { seq, lease_ms, received } => {
                run.peer.acked(run.token, &received);
                run.core.lease_answered(&run.peer, seq, lease_ms, &run.link.stats());
            }
            Frame::Ack { received } => run.peer.acked(run.token, &received),
            _ => return broken(FrameError::Unexpected),
        }
    }
}

async fn write_mail(run: Arc<Run>, lane: usize) -> CloseReason {
    let mut sink: Option<Box<dyn FrameSink>> = None;
    let number = lane as u8;
    while let Some(frames) = run.peer.next_frames(run.token, lane, run.core.stamp).await {
        let count = frames.len() as u64;
        let sent = async {
            let sink = match &mut sink {
                Some(sink) => sink,
                None => {
                    let opened = sink.insert(run.link.open(LaneClass::Mail).await?);
                    put(opened, run.core.stamp, &Frame::OpenMail { lane: number }).await?;
                    opened
                }
            };
            sink.send(frames).await
        };
        if let Err(error) = sent.await {
            return lost(error);
        }
        metrics::counter!("dunlin_control_frames_total", "direction" => "sent").increment(count);
    }
    std::future::pending().await
}

/// Takes what the peer opens: mail lanes and flows.
async fn accept_lanes(run: Arc<Run>) -> CloseReason {
    let mut readers = JoinSet::new();
    loop {
        tokio::select! {
            biased;
            Some(ended) = readers.join_next() => match ended {
                Ok(Some(reason)) => return reason,
                Ok(None) => {}
                Err(error) => return CloseReason::new(CloseCode::Lost, error.to_string()),
            },
            lane = run.link.accept() => match lane {
                Ok(source) => { readers.spawn(read_lane(run.clone(), source)); }
                Err(error) => return lost(error),
            },
        }
    }
}

/// Reads one lane; `Some` if what it carried ends the link.
async fn read_lane(run: Arc<Run>, mut source: Box<dyn FrameSource>) -> Option<CloseReason> {
    let bytes = match source.recv(MAX_SMALL_FRAME).await {
        Ok(Some(bytes)) => bytes,
        // Opened and dropped, or the link is ending and says so itself.
        Ok(None) | Err(_) => return None,
    };
    run.peer.heard();
    match run.open(bytes) {
        Ok(Frame::OpenMail { lane }) => Some(read_mail(run, usize::from(lane), source).await),
        Ok(Frame::OpenFlow { flow, .. }) => {
            // On its own: what the flow still holds must reach its receiver after the link's end.
            let (peer, link) = (run.peer.clone(), run.link.clone());
            let incarnation = run.from.incarnation;
            run.core.handle.spawn(async move {
                let gone = async { link.closed().await.text };
                Flows::pump(&peer, FlowId(flow), incarnation, source, gone).await;
            });
            None
        }
        Ok(_) => Some(broken(FrameError::Unexpected)),
        Err(error) => Some(broken(error)),
    }
}

async fn read_mail(run: Arc<Run>, lane: usize, mut source: Box<dyn FrameSource>) -> CloseReason {
    let limit = run.core.options.limits.message_bytes.saturating_add(MAX_MAIL_HEAD);
    let mut unacknowledged = 0;
    loop {
        let bytes = match source.recv(limit).await {
            Ok(Some(bytes)) => bytes,
            Ok(None) => return CloseReason::new(CloseCode::Lost, "a mail lane ended"),
            Err(error @ LinkError::TooBig { .. }) => {
                metrics::counter!("dunlin_frames_refused_total", "reason" => "too_big")
                    .increment(1);
                return CloseReason::new(CloseCode::Protocol, error.to_string());
            }
            Err(error) => return lost(error),
        };
        run.peer.heard();
        unacknowledged += bytes.len() + crate::options::Limits::MESSAGE_OVERHEAD;
        let mail = match run.open(bytes) {
            Ok(Frame::Mail(mail)) => mail,
            Ok(_) => return broken(FrameError::Unexpected),
            Err(error) => return broken(error),
        };
        let Some((verdict, session)) = run.peer.received(run.token, lane, mail.seq) else {
            return CloseReason::new(CloseCode::Replaced, "a new link took its place");
        };
        match verdict {
            Verdict::Deliver => run.deliver(lane, session, mail.content),
            Verdict::Duplicate => {
                metrics::counter!("dunlin_frames_refused_total", "reason" => "duplicate")
                    .increment(1);
            }
            Verdict::Gap { expected } => {
                let text = format!("message {} came before {expected}", mail.seq);
                return CloseReason::new(CloseCode::Protocol, text);
            }
        }
        if unacknowledged > ACK_BYTES {
            unacknowledged = 0;
            let _ = run.small.try_send(Frame::Ack { received: run.peer.counts() });
        }
    }
}

impl Run {
    /// Decodes a frame and refuses what does not come from this link's peer.
    fn open(&self, bytes: Bytes) -> Result<Frame, FrameError> {
        let (stamp, frame) = frame::decode(bytes)?;
        if stamp.cluster != self.core.stamp.cluster {
            let (ours, theirs) = (self.core.stamp.cluster, stamp.cluster);
            return Err(FrameError::Cluster { ours, theirs });
        }
        if stamp.incarnation != self.from.incarnation {
            let (ours, theirs) = (self.from.incarnation, stamp.incarnation);
            return Err(FrameError::Incarnation { ours, theirs });
        }
        Ok(frame)
    }

    fn deliver(&self, lane: usize, session: u64, content: Content) {
        metrics::counter!("dunlin_control_frames_total", "direction" => "received").increment(1);
        self.core.deliver(&self.peer, self.from.clone(), lane, session, content);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_double_with_jitter_up_to_their_limit() {
        let mut backoff = Backoff::new(50, 400, 3);
        let steps = [50, 100, 200, 400, 400, 400];
        let waits: Vec<_> = steps.iter().map(|_| backoff.next()).collect();
        for (step, wait) in steps.iter().zip(&waits) {
            assert!((ms(step / 2)..=ms(*step)).contains(wait), "{wait:?} for {step}");
        }
        let mut again = Backoff::new(50, 400, 3);
        assert_eq!(waits, steps.iter().map(|_| again.next()).collect::<Vec<_>>());
        backoff.reset();
        assert!(backoff.next() <= ms(50));
    }
}
