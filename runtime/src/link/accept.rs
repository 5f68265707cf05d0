//! Accepting: the hello of a peer that dialled, within bounded time.

use super::{Lanes, put};
use crate::address::{Incarnation, Peer};
use crate::frame::{self, Frame, FrameError, Hello, MAX_SMALL_FRAME, Refusal, RefusalCode};
use crate::lane::{LaneError, LaneIn, LaneOut};
use crate::membership;
use crate::node::Core;
use crate::options::ms;
use crate::peer::PeerShell;
use crate::transport::{CloseCode, CloseReason, LaneClass, Link, LinkError};
use std::sync::Arc;
use tokio::time::timeout;

/// Greets a link that a peer dialled, within bounded time.
pub(crate) async fn accept(core: Arc<Core>, link: Arc<dyn Link>) {
    let after_ms = core.options.timing.hello_ms;
    let mut token = None;
    let met = timeout(ms(after_ms), meet(&core, &link, &mut token)).await;
    let reason = match met {
        Ok(Ok((peer, joined, lanes))) => {
            if peer.up(joined, Some(link.clone()), false) {
                return core.link_up(peer, link, joined, lanes);
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

type Met = (Arc<PeerShell>, u64, Lanes);

async fn meet(
    core: &Arc<Core>,
    link: &Arc<dyn Link>,
    joining: &mut Option<(Arc<PeerShell>, u64)>,
) -> Result<Met, String> {
    let text = |error: LinkError| error.to_string();
    let proven = link.proven_names().join(", ");
    let mut source = LaneIn::new(link.accept().await.map_err(text)?, &core.guard, &proven);
    let read = match source.recv(MAX_SMALL_FRAME).await {
        Ok(Some(bytes)) => frame::decode(bytes),
        Ok(None) => return Err("no hello".into()),
        Err(LaneError::Frame(error)) => Err(error),
        Err(LaneError::Link(error)) => return Err(text(error)),
    };
    let judged = match read {
        Ok((_, Frame::Hello(hello))) => judge(core, link, hello),
        Ok(_) => Err(membership::refuse_frame(&FrameError::Unexpected)),
        Err(error) => Err(membership::refuse_frame(&error)),
    };
    let name = match &judged {
        Ok((peer, ..)) => &peer.name,
        Err(_) => &core.me.name,
    };
    let mut sink =
        LaneOut::open(link, LaneClass::Heartbeat, &core.guard, name).await.map_err(text)?;
    let (peer, token, welcome, replaced) = match judged {
        Ok(judged) => judged,
        Err(refusal) => {
            if refusal.code != RefusalCode::Busy {
                tracing::warn!(peers = proven, %refusal, "hello refused");
                core.guard.refused(&proven, "hello");
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
    let read = match source.recv(MAX_SMALL_FRAME).await {
        Ok(Some(bytes)) => frame::decode(bytes),
        Ok(None) => return Err("no ready".into()),
        Err(LaneError::Frame(error)) => Err(error),
        Err(LaneError::Link(error)) => return Err(text(error)),
    };
    match read {
        Ok((_, Frame::Ready { out_session })) => peer.ready(token, out_session),
        other => {
            let error = other.err().unwrap_or(FrameError::Unexpected);
            core.guard.refused(&proven, error.kind());
            return Err(format!("expected the ready frame: {error}"));
        }
    }
    Ok((peer, token, (sink, source)))
}

type Judged = (Arc<PeerShell>, u64, Hello, Option<Incarnation>);

fn judge(core: &Core, link: &Arc<dyn Link>, hello: Hello) -> Result<Judged, Refusal> {
    membership::check(&core.me, &hello, &link.proven_names(), None)?;
    let peer = core.peers.read().get(&hello.node).cloned().ok_or_else(|| Refusal {
        code: RefusalCode::UnknownNode,
        ours: format!("{} knows no such node", core.me.name),
        theirs: hello.node.to_string(),
    })?;
    if core.stands_back_from(&peer.name) {
        let ours = format!("{} is another process than its head knows", core.me.name);
        return Err(Refusal { code: RefusalCode::Busy, ours, theirs: peer.name.to_string() });
    }
    let resume_ms = core.options.timing.resume_ms;
    let (token, welcome, replaced) = peer.admit(&core.me, &hello, resume_ms)?;
    Ok((peer, token, welcome, replaced))
}
