//! What a client sees: I1 to I6, I23.

use super::Found;
use super::case::{Case, Fact, Stream};
use crate::events::wanted::DRAFT_VERIFIED;
use crate::fault::Mode;
use dunlin_actors::facts::{REQUEST_ACCEPTED, REQUEST_ENDED, TOKEN_DELIVERED, TOKEN_LOGGED};
use std::collections::{BTreeMap, BTreeSet};

pub(super) fn ends_once(case: &Case<'_>, found: &mut Found) {
    for (&request, stream) in &case.streams {
        let mut add = |slug, at, what: String| found.add(slug, at, Some(request), what);
        if stream.accepted.len() > 1 {
            add("accepted-twice", stream.accepted[1], "it was accepted twice".to_string());
        }
        if let Some((at, code, _)) = stream.ends.get(1) {
            let first = stream.ends[0].1;
            add("ended-twice", *at, format!("it ended as {first}, then as {code}"));
        }
        if let Some(at) = stream.late.first() {
            add("after-end", *at, "a token came after its end".to_string());
        }
        if stream.ends.is_empty() {
            let at = case.end_us();
            if !stream.accepted.is_empty() {
                add("never-ended", at, "it was accepted and never ended".to_string());
            } else if stream.refused.is_none() {
                add("no-answer", at, "it was neither accepted nor refused".to_string());
            }
        }
    }
    router_ends_once(case, found);
}

/// The same from the router's facts; a head that died has forgotten its requests.
fn router_ends_once(case: &Case<'_>, found: &mut Found) {
    let losses = case.head_losses();
    let mut ends: BTreeMap<Key, u64> = BTreeMap::new();
    for fact in &case.facts {
        match fact.name {
            REQUEST_ACCEPTED => {
                ends.insert(key_of(&losses, fact), 0);
            }
            REQUEST_ENDED => {
                let count = ends.entry(key_of(&losses, fact)).or_insert(0);
                *count += 1;
                if *count == 2 {
                    let what = format!("the router ended request {} twice", fact.key);
                    found.add("router-ended-twice", fact.us, case.number(fact.key), what);
                }
            }
            _ => {}
        }
    }
}

/// A request of one life of the head.
type Key = (usize, u64);

fn key_of(losses: &[u64], fact: &Fact<'_>) -> Key {
    (losses.iter().filter(|loss| **loss <= fact.us).count(), fact.key)
}

/// Where the delivered text leaves the reference: the position, what came, what should have.
/// Token by token in the simulator; by text in the process mode, where pieces may be merged.
pub(crate) fn diverges(
    case: &Case<'_>,
    request: u64,
    stream: &Stream<'_>,
) -> Option<(u64, String)> {
    let reference = &case.info(request)?.reference;
    if reference.is_empty() {
        return None;
    }
    let at_end = stream.ended_us().unwrap_or(0);
    if case.record.mode == Mode::Process {
        let text: String = stream.tokens.iter().map(|(_, _, piece)| *piece).collect();
        let right: String = reference.concat();
        if !right.starts_with(&text) {
            let same = text.bytes().zip(right.bytes()).take_while(|(a, b)| a == b).count();
            let at = stream.tokens.last().map_or(0, |(us, _, _)| *us);
            return Some((at, format!("the text leaves the reference at byte {same}")));
        }
        let short = stream.finished() && text.len() < right.len();
        return short.then(|| {
            (at_end, format!("it finished with {} of {} bytes", text.len(), right.len()))
        });
    }
    for (us, position, id) in &stream.tokens {
        match reference.get(*position as usize) {
            Some(right) if right == id => {}
            Some(right) => {
                return Some((*us, format!("token {position} is {id}, the reference has {right}")));
            }
            None => return Some((*us, format!("token {position} is past the reference's end"))),
        }
    }
    let (have, need) = (stream.tokens.len(), reference.len());
    let short = stream.finished() && have < need;
    short.then(|| (at_end, format!("it finished with {have} of {need} tokens")))
}

fn sampled(case: &Case<'_>, request: u64) -> bool {
    case.specs.get(&request).is_some_and(|spec| spec.temperature > 0.0)
}

pub(super) fn tokens(case: &Case<'_>, found: &mut Found) {
    differing(case, false, found);
}

pub(super) fn position_keyed(case: &Case<'_>, found: &mut Found) {
    differing(case, true, found);
}

fn differing(case: &Case<'_>, of_sampled: bool, found: &mut Found) {
    for (&request, stream) in &case.streams {
        if sampled(case, request) != of_sampled {
            continue;
        }
        // Tokens may change by design: reported as masked, detected or silent, not enforced.
        let end = stream.ended_us().unwrap_or(u64::MAX);
        if case.measured_before(end) {
            continue;
        }
        if let Some((at, what)) = diverges(case, request, stream) {
            let slug = if what.starts_with("it finished") { "short" } else { "wrong-token" };
            found.add(slug, at, Some(request), what);
        }
    }
}

pub(super) fn exactly_once(case: &Case<'_>, found: &mut Found) {
    for (&request, stream) in &case.streams {
        for (next, (us, position, _)) in (0u32..).zip(&stream.tokens) {
            if *position != next {
                let slug = if *position < next { "repeated" } else { "gap" };
                let what = format!("position {position} came where {next} was next");
                found.add(slug, *us, Some(request), what);
                break;
            }
        }
    }
    if !case.facts_complete() {
        return;
    }
    // The router's own word, too.
    let losses = case.head_losses();
    let mut next: BTreeMap<Key, u64> = BTreeMap::new();
    for fact in case.facts_of(TOKEN_DELIVERED) {
        let expected = next.entry(key_of(&losses, fact)).or_insert(0);
        if fact.value != *expected {
            let what =
                format!("the router delivered position {} after {expected} of them", fact.value);
            found.add("router-order", fact.us, case.number(fact.key), what);
        }
        *expected = fact.value + 1;
    }
}

pub(super) fn log_before_deliver(case: &Case<'_>, found: &mut Found) {
    if !case.facts_complete() {
        return;
    }
    let mut logged: BTreeSet<(u64, u64)> = BTreeSet::new();
    for fact in &case.facts {
        let token = (fact.key, fact.value);
        if fact.name == TOKEN_LOGGED {
            logged.insert(token);
        } else if fact.name == TOKEN_DELIVERED && !logged.contains(&token) {
            let what = format!("position {} was delivered before it was logged", fact.value);
            found.add("not-logged", fact.us, case.number(fact.key), what);
        }
    }
    // And nothing reaches a client that was never logged.
    if logged.is_empty() {
        return;
    }
    for (&request, stream) in &case.streams {
        let Some(id) = case.info(request).and_then(|info| info.router_id) else { continue };
        let unlogged =
            |(_, position, _): &&(u64, u32, &str)| !logged.contains(&(id, u64::from(*position)));
        if case.record.mode == Mode::Sim
            && let Some((us, position, _)) = stream.tokens.iter().find(unlogged)
        {
            let what = format!("the client has position {position}, the log has not");
            found.add("client-ahead", *us, Some(request), what);
        }
    }
}

pub(super) fn drafter_invisible(case: &Case<'_>, found: &mut Found) {
    for fact in case.facts_of(DRAFT_VERIFIED).filter(|fact| fact.value == 0) {
        let what = "a verify step committed no token";
        found.add("no-commit", fact.us, case.number(fact.key), what);
    }
}

pub(super) fn deadline(case: &Case<'_>, found: &mut Found) {
    let grace = case.options().grace_us;
    for (&request, stream) in &case.streams {
        let Some(info) = case.info(request) else { continue };
        if stream.refused.is_some() && stream.ends.is_empty() {
            continue;
        }
        // `deadline_us` counts from the request's arrival.
        let last = stream.begin_us().saturating_add(info.deadline_us).saturating_add(grace);
        let end = stream.ended_us().unwrap_or_else(|| case.end_us());
        if info.deadline_us > 0 && end > last {
            let late = (end - last) / 1000;
            found.add("late", end, Some(request), format!("it ended {late} ms too late"));
        }
    }
}
