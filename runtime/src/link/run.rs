//! A link that is up: heartbeats, mail lanes and flows, each in a task of its own.
//!
//! Any received frame counts as life. Heartbeats have a lane and a priority of their own, so that
//! bulk data does not delay them.

use super::{Lanes, put};
use crate::address::Peer;
use crate::flow::{FlowId, Flows};
use crate::frame::{self, Content, Frame, FrameError, LANES, MAX_MAIL_HEAD, MAX_SMALL_FRAME};
use crate::lane::{LaneError, LaneIn, LaneOut};
use crate::node::Core;
use crate::options::{Limits, ms};
use crate::peer::PeerShell;
use crate::session::Verdict;
use crate::transport::{CloseCode, CloseReason, LaneClass, Link, LinkError};
use bytes::Bytes;
use std::sync::Arc;
use tokio::sync::mpsc;
use tokio::task::JoinSet;

/// Acknowledge after so many bytes of mail, heartbeats apart.
const ACK_BYTES: usize = 64 << 10;

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
        reason = silence(&run) => reason,
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

/// Waits until nothing was heard for too long. Apart from the heartbeats, so that a write that is
/// held up does not hide it.
async fn silence(run: &Run) -> CloseReason {
    let dead_ms = run.core.options.timing.dead_ms;
    loop {
        let silent_ms = run.peer.silent_ms();
        if silent_ms > dead_ms {
            let text = format!("nothing heard for {silent_ms} ms");
            return CloseReason::new(CloseCode::Lost, text);
        }
        tokio::time::sleep(ms(dead_ms - silent_ms + 1)).await;
    }
}

/// Sends heartbeats and acknowledgements.
async fn beat(run: Arc<Run>, mut sink: LaneOut, mut queue: mpsc::Receiver<Frame>) -> CloseReason {
    let timing = run.core.options.timing;
    let mut ticks = tokio::time::interval(ms(timing.heartbeat_ms.max(1)));
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    let mut seq = 0;
    loop {
        let frame = tokio::select! {
            biased;
            _ = ticks.tick() => {
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
async fn listen(run: Arc<Run>, mut source: LaneIn) -> CloseReason {
    loop {
        let bytes = match source.recv(MAX_SMALL_FRAME).await {
            Ok(Some(bytes)) => bytes,
            Ok(None) => return CloseReason::new(CloseCode::Lost, "the heartbeat lane ended"),
            Err(error) => return run.failed(error),
        };
        run.peer.heard();
        let frame = match run.open(bytes) {
            Ok(frame) => frame,
            Err(error) => return run.broken(error),
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
            _ => return run.broken(FrameError::Unexpected),
        }
    }
}

async fn write_mail(run: Arc<Run>, lane: usize) -> CloseReason {
    let mut sink: Option<LaneOut> = None;
    let number = lane as u8;
    while let Some(frames) = run.peer.next_frames(run.token, lane, run.core.stamp).await {
        let count = frames.len() as u64;
        let sent = async {
            let sink = match &mut sink {
                Some(sink) => sink,
                None => {
                    let (class, guard) = (LaneClass::Mail, &run.core.guard);
                    let opened = LaneOut::open(&run.link, class, guard, &run.peer.name).await?;
                    let opened = sink.insert(opened);
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
                Ok(source) => {
                    let source = LaneIn::new(source, &run.core.guard, run.peer.name.as_str());
                    readers.spawn(read_lane(run.clone(), source));
                }
                Err(error) => return lost(error),
            },
        }
    }
}

/// Reads one lane; `Some` if what it carried ends the link.
async fn read_lane(run: Arc<Run>, mut source: LaneIn) -> Option<CloseReason> {
    let bytes = match source.recv(MAX_SMALL_FRAME).await {
        Ok(Some(bytes)) => bytes,
        // Opened and dropped, or the link is ending and says so itself.
        Ok(None) | Err(LaneError::Link(_)) => return None,
        Err(LaneError::Frame(error)) => return Some(run.broken(error)),
    };
    run.peer.heard();
    match run.open(bytes) {
        Ok(Frame::OpenMail { lane }) => Some(read_mail(run, usize::from(lane), source).await),
        Ok(Frame::OpenFlow { flow, .. }) => {
            // On its own: what the flow still holds must reach its receiver after the link's end.
            let (peer, link) = (run.peer.clone(), (run.link.clone(), run.token));
            let incarnation = run.from.incarnation;
            run.core.handle.spawn(async move {
                Flows::pump(&peer, FlowId(flow), incarnation, source, link).await;
            });
            None
        }
        Ok(_) => Some(run.broken(FrameError::Unexpected)),
        Err(error) => Some(run.broken(error)),
    }
}

async fn read_mail(run: Arc<Run>, lane: usize, mut source: LaneIn) -> CloseReason {
    let limit = run.core.options.limits.message_bytes.saturating_add(MAX_MAIL_HEAD);
    let mut unacknowledged = 0;
    loop {
        let bytes = match source.recv(limit).await {
            Ok(Some(bytes)) => bytes,
            Ok(None) => return CloseReason::new(CloseCode::Lost, "a mail lane ended"),
            Err(error) => return run.failed(error),
        };
        run.peer.heard();
        unacknowledged += bytes.len() + Limits::MESSAGE_OVERHEAD;
        let mail = match run.open(bytes) {
            Ok(Frame::Mail(mail)) => mail,
            Ok(_) => return run.broken(FrameError::Unexpected),
            Err(error) => return run.broken(error),
        };
        let Some((verdict, session)) = run.peer.received(run.token, lane, mail.seq) else {
            return CloseReason::new(CloseCode::Replaced, "a new link took its place");
        };
        match verdict {
            Verdict::Deliver => run.deliver(lane, session, mail.content),
            // What a resumed session sends again is no fault of the peer.
            Verdict::Duplicate => {
                metrics::counter!("dunlin_frames_refused_total", "reason" => "resent").increment(1);
            }
            Verdict::Gap { expected } => {
                return run.broken(FrameError::Gap { number: mail.seq, expected });
            }
        }
        if unacknowledged > ACK_BYTES {
            unacknowledged = 0;
            let _ = run.small.try_send(Frame::Ack { received: run.peer.counts() });
        }
    }
}

impl Run {
    fn failed(&self, error: LaneError) -> CloseReason {
        match error {
            LaneError::Frame(error) => self.broken(error),
            LaneError::Link(error @ LinkError::TooBig { .. }) => {
                self.core.guard.refused(self.peer.name.as_str(), "too_big");
                CloseReason::new(CloseCode::Protocol, error.to_string())
            }
            LaneError::Link(error) => lost(error),
        }
    }

    /// Refuses a frame. That ends the link: what else is under way cannot be trusted, and a new
    /// link has all mail sent again.
    fn broken(&self, error: FrameError) -> CloseReason {
        self.core.guard.refused(self.peer.name.as_str(), error.kind());
        CloseReason::new(CloseCode::Protocol, error.to_string())
    }

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
