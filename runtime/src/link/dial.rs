//! Dialling: one task per peer, which works whenever there is no link.

use super::{Lanes, put};
use crate::frame::{self, Frame, FrameError, Hello, MAX_SMALL_FRAME, Refusal, RefusalCode};
use crate::lane::{LaneError, LaneIn, LaneOut};
use crate::membership;
use crate::node::Core;
use crate::options::ms;
use crate::peer::PeerShell;
use crate::prng::{Prng, fnv};
use crate::transport::{CloseCode, CloseReason, LaneClass, Link, LinkError};
use std::sync::Arc;
use std::time::Duration;
use tokio::time::{Instant, timeout};

/// The larger name dials so much later, so that two nodes seldom dial each other at once.
const SECOND_DIALLER_MS: u64 = 100;

/// A link that lived for less was not worth much: dialling again waits as after a failed dial.
const STEADY: Duration = Duration::from_secs(1);

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
    let mut seen = 0;
    loop {
        let up = peer.is_up();
        let (losses, lived) = peer.losses();
        if losses > seen && !up {
            let mut wait = ms(head_start);
            if lived < STEADY {
                wait += backoff.next();
            } else {
                backoff.reset();
            }
            next = Instant::now() + wait;
        }
        seen = losses;
        let addresses = peer.addresses();
        let idle = up || addresses.is_empty() || core.stands_back_from(&peer.name);
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
                    if let JoinError::RefusedThere { refusal, .. } = &error
                        && refusal.code == RefusalCode::Twin
                    {
                        core.stand_back(&peer.name, refusal);
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
        Ok(lanes) if peer.up(token, Some(link.clone()), true) => {
            core.clone().link_up(peer.clone(), link, token, lanes);
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
    let unreadable = |error: FrameError| {
        core.guard.refused(peer.name.as_str(), error.kind());
        JoinError::Frame { address: address(), error }
    };
    let class = LaneClass::Heartbeat;
    let mut sink = LaneOut::open(link, class, &core.guard, &peer.name).await.map_err(broken)?;
    put(&mut sink, core.stamp, &Frame::Hello(hello)).await.map_err(broken)?;
    let source = link.accept().await.map_err(broken)?;
    let mut source = LaneIn::new(source, &core.guard, peer.name.as_str());
    let bytes = source.recv(MAX_SMALL_FRAME).await.map_err(|error| match error {
        LaneError::Link(error) => broken(error),
        LaneError::Frame(error) => unreadable(error),
    })?;
    let bytes = bytes.ok_or_else(|| broken(LinkError::Reset))?;
    let hello = match frame::decode(bytes).map_err(unreadable)? {
        (_, Frame::Welcome(hello)) => hello,
        (_, Frame::Refuse(refusal)) => {
            let by = peer.name.to_string();
            return Err(JoinError::RefusedThere { address: address(), by, refusal });
        }
        _ => return Err(unreadable(FrameError::Unexpected)),
    };
    let refused = |refusal| JoinError::RefusedHere { address: address(), refusal };
    membership::check(&core.me, &hello, &link.proven_names(), Some(&peer.name)).map_err(refused)?;
    let out_session = peer.welcomed(&core.me, token, &hello).map_err(refused)?;
    put(&mut sink, core.stamp, &Frame::Ready { out_session }).await.map_err(broken)?;
    Ok((sink, source))
}

/// Why a link could not be set up.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
enum JoinError {
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
