//! How a peer's link comes and goes: handshakes, and what each outcome means for its session.

use super::{PeerShell, Pending, State, Up, View, fail_all};
use crate::address::Incarnation;
use crate::frame::{self, Hello};
use crate::membership::{Admission, Life, Me, Situation};
use crate::options::ms;
use crate::session::Incoming;
use crate::transport::{CloseCode, CloseReason, Link};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use tokio::sync::Notify;
use tokio::time::Instant;

impl PeerShell {
    /// This node is connected by its own dial: reserves the handshake. `None` if a link came up
    /// meanwhile or another handshake is ahead.
    pub fn greet(&self, me: &Me) -> Option<(u64, Hello)> {
        let mut state = self.state.lock();
        if state.link.is_some() || state.joining.is_some() || state.closing {
            return None;
        }
        let token = state.fresh();
        state.joining = Some((token, true));
        Some((token, state.hello(me, &self.name)))
    }

    /// A handshake failed.
    pub fn abandon(&self, token: u64) {
        let mut state = self.state.lock();
        if state.joining.is_some_and(|(t, _)| t == token) {
            state.joining = None;
        }
    }

    /// A peer's hello came in on a link that it dialled: admits or refuses it. On admission the
    /// old link, if there was one, is over; with whom it was is returned.
    pub fn admit(
        &self,
        me: &Me,
        hello: &Hello,
        resume_ms: u64,
    ) -> Result<(u64, Hello, Option<Incarnation>), frame::Refusal> {
        let heard_ms_ago = self.silent_ms();
        let mut state = self.state.lock();
        let situation = match (&state.link, state.joining) {
            (Some(up), _) => Situation::Linked { dialled_by_me: up.dialled, heard_ms_ago },
            (None, Some((_, true))) => Situation::Greeting,
            _ => Situation::Apart,
        };
        let held = state.held();
        let admission = match crate::membership::admit(me, state.life, held, situation, hello) {
            Ok(admission) => admission,
            Err(refusal) => {
                if refusal.code != frame::RefusalCode::Busy {
                    state.last_error = Some(refusal.to_string());
                }
                return Err(refusal);
            }
        };
        let token = state.fresh();
        state.joining = Some((token, false));
        let old = state.link.take();
        let replaced = old.as_ref().map(|_| self.incarnation());
        if let Some(up) = old {
            if let Some(link) = up.link {
                link.close(CloseReason::new(
                    CloseCode::Replaced,
                    format!("replaced by a new link with {}", hello.incarnation),
                ));
            }
            state.lost();
            state.resume_until = Some(Instant::now() + ms(resume_ms));
            self.wake.notify_one();
            state.reason = "a new link takes its place".into();
            self.view.set(None);
        }
        let failed = self.meet(&mut state, admission, hello);
        let reply = state.hello(me, &self.name);
        drop(state);
        fail_all(failed, &over_reason(admission, hello));
        Ok((token, reply, replaced))
    }

    /// The peer welcomed this node's dial. Returns the session for the closing `Ready`.
    pub fn welcomed(&self, me: &Me, token: u64, hello: &Hello) -> Result<u64, frame::Refusal> {
        let mut state = self.state.lock();
        if state.joining.is_none_or(|(t, _)| t != token) || state.closing {
            let (ours, theirs) = ("another link came first".into(), hello.node.to_string());
            return Err(frame::Refusal { code: frame::RefusalCode::Busy, ours, theirs });
        }
        let held = state.held();
        let admission = crate::membership::admit(me, state.life, held, Situation::Apart, hello)?;
        let mut failed = self.meet(&mut state, admission, hello);
        failed.extend(state.follow(hello.out_session));
        let session = state.out.id;
        drop(state);
        fail_all(failed, &over_reason(admission, hello));
        Ok(session)
    }

    /// The dialler of handshake `token` is ready and sends `session` from now on. Of a handshake that
    /// another one has overtaken, it says nothing any more.
    pub fn ready(&self, token: u64, session: u64) {
        let mut state = self.state.lock();
        if state.joining.is_none_or(|(t, _)| t != token) {
            return;
        }
        let failed = state.follow(session);
        drop(state);
        fail_all(failed, "the peer gave up the session");
    }

    /// Goes on with the old session or starts a new one.
    fn meet(&self, state: &mut State, admission: Admission, hello: &Hello) -> Vec<Pending> {
        let resumed = admission == Admission::SameLife
            && hello.in_session == state.out.id
            && state.out.can_resume(&hello.received);
        if admission == Admission::NewLife {
            state.life = Some(Life { incarnation: hello.incarnation, nonce: hello.life });
            state.inc = Incoming::default();
            self.incarnation.store(hello.incarnation.0, Ordering::Release);
        }
        if resumed {
            state.out.ack(&hello.received);
            state.out.rewind();
            return Vec::new();
        }
        state.end_session()
    }

    /// The handshake `token` is complete: this is the link now. False if it came too late.
    pub fn up(&self, token: u64, link: Option<Arc<dyn Link>>, dialled: bool) -> bool {
        let mut state = self.state.lock();
        if link.is_some() && (state.joining.is_none_or(|(t, _)| t != token) || state.closing) {
            return false;
        }
        state.joining = None;
        state.link = Some(Up { token, dialled, link: link.clone() });
        state.since = Instant::now();
        state.resume_until = None;
        state.last_error = None;
        self.heard();
        for (lane, item) in std::mem::take(&mut state.waiting) {
            // Calls that gave up meanwhile are not sent.
            if let Some(pending) = state.pending.get_mut(&item.id) {
                pending.waiting = false;
                state.out.push(lane, item);
            }
        }
        state.waiting_bytes = 0;
        drop(state);
        if let Some(link) = link {
            self.view.set(Some(View { token, link }));
        }
        self.lane_ready.iter().for_each(Notify::notify_one);
        true
    }

    /// The link `token` has ended. `over`: the peer's life is known to be over, or this node's.
    /// False if it was not the link any more.
    pub fn down(&self, token: Option<u64>, reason: &str, over: bool, resume_ms: u64) -> bool {
        let mut state = self.state.lock();
        let current = state.link.as_ref().map(|up| up.token);
        let was_up = current.is_some() && (token.is_none() || token == current);
        if was_up {
            if let Some(link) = state.link.take().and_then(|up| up.link) {
                link.close(CloseReason::new(CloseCode::Lost, reason));
            }
            state.lost();
            state.reason = reason.to_owned();
            state.last_error = Some(reason.to_owned());
            state.resume_until = Some(Instant::now() + ms(resume_ms));
            self.view.set(None);
        }
        let failed = match over && (was_up || token.is_none()) {
            true => state.end_session(),
            false => Vec::new(),
        };
        drop(state);
        fail_all(failed, reason);
        if was_up {
            self.lane_ready.iter().for_each(Notify::notify_one);
            self.wake.notify_one();
        }
        was_up
    }

    /// When the lost session can no longer be resumed.
    pub fn resume_until(&self) -> Option<Instant> {
        self.state.lock().resume_until
    }

    /// The time to resume is over: calls in flight fail.
    pub fn give_up(&self) {
        let mut state = self.state.lock();
        if state.link.is_some() {
            return;
        }
        let failed = state.end_session();
        let reason = state.reason.clone();
        drop(state);
        fail_all(failed, &reason);
    }

    /// No more mail, and every call fails.
    pub fn close(&self, reason: &str) {
        let mut state = self.state.lock();
        state.closing = true;
        state.reason = reason.to_owned();
        let mut failed = state.end_session();
        failed.extend(std::mem::take(&mut state.pending).into_values());
        state.waiting.clear();
        drop(state);
        fail_all(failed, reason);
    }
}

/// Why calls fail when two lives meet and do not go on with their session.
fn over_reason(admission: Admission, hello: &Hello) -> String {
    match admission {
        Admission::NewLife => format!("it was started again as {}", hello.incarnation),
        Admission::SameLife => "the link was lost for too long".into(),
    }
}
