//! Accepting: the hello of a peer that dialled, within bounded time.

use super::put;
use crate::address::{Incarnation, Peer};
use crate::frame::{self, Frame, FrameError, Hello, MAX_SMALL_FRAME, Refusal, RefusalCode};
use crate::membership;
use crate::node::Core;
use crate::options::ms;
use crate::peer::PeerShell;
use crate::transport::{
    CloseCode, CloseReason, FrameSink, FrameSource, LaneClass, Link, LinkError,
};
use std::sync::Arc;
use tokio::time::timeout;

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
