//! What comes in and what is loaded: I18, I19, I20.

use super::Found;
use super::case::{Case, Fact};
use crate::events::wanted::{WEIGHTS_LOADED, WEIGHTS_REFUSED};
use crate::fault::Kind;
use crate::record::What;
use dunlin_actors::facts::{
    REPLICA_DOWN, REQUEST_ENDED, REQUEST_REPLAYED, STALE_REFUSED, STEP_FAILED, TOKEN_LOGGED,
};
use dunlin_runtime::faults::names::{ESCALATED, FRAME_REFUSED, PEER_DOWN};
use std::collections::BTreeMap;

pub(super) fn no_garbage(case: &Case<'_>, found: &mut Found) {
    stale_refused(case, found);
    for event in &case.record.events {
        let What::Node { node, state } = &event.what else { continue };
        let explained = || {
            let own = |fact: &Fact<'_>| fact.node == node && fact.us <= event.us;
            let gave_up = case.facts_of(ESCALATED).any(own);
            let takes_down = |kind: Kind| {
                kind.name().starts_with("process.")
                    || kind.name().starts_with("device.")
                    || kind.name().starts_with("control.")
                    // Actors that fail too often end their node, and say so.
                    || (kind.name().starts_with("actor.") && gave_up)
            };
            case.fired().any(|(began, run)| {
                takes_down(run.kind()) && began <= event.us && case.on_node(run, node)
            })
        };
        if state == "down" && event.us < case.record.phases.settle_us && !explained() {
            found.add("died", event.us, None, format!("{node} died and no fault did it"));
        }
    }
    // A frame that was changed is noticed: refused, or the link or step that read it is given up.
    let noticed = [FRAME_REFUSED, PEER_DOWN, STALE_REFUSED, STEP_FAILED, REPLICA_DOWN];
    for (began, run) in case.fired() {
        let changed = matches!(run.kind(), Kind::FrameCorrupt | Kind::FrameTruncate);
        let seen = case.facts.iter().any(|fact| noticed.contains(&fact.name) && fact.us >= began);
        if changed && run.proof.is_some() && !seen {
            let what = format!("{}: the changed frame was taken", run.fault.id);
            found.add("taken", began, None, what);
        }
    }
}

/// Once a request is handed out again, whoever had it before adds no token to it.
fn stale_refused(case: &Case<'_>, found: &mut Found) {
    // Who has drawn tokens of a request, and who of them was given up.
    let mut drew: BTreeMap<(u64, &str), bool> = BTreeMap::new();
    for fact in &case.facts {
        match fact.name {
            REQUEST_REPLAYED => {
                let own = drew.range_mut((fact.key, "")..).take_while(|((r, _), _)| *r == fact.key);
                own.for_each(|(_, given_up)| *given_up = true);
            }
            TOKEN_LOGGED
                if !fact.subject.is_empty()
                    && *drew.entry((fact.key, fact.subject)).or_insert(false) =>
            {
                let what = format!(
                    "token {} was taken of {}, which had been given up",
                    fact.value, fact.subject
                );
                found.add("stale-taken", fact.us, case.number(fact.key), what);
            }
            _ => {}
        }
    }
}

pub(super) fn weights_integrity(case: &Case<'_>, found: &mut Found) {
    // By what was loaded, where: another machine may hold them in another form.
    let mut hashes: BTreeMap<&str, u64> = BTreeMap::new();
    for fact in case.facts_of(WEIGHTS_LOADED) {
        let first = hashes.entry(fact.subject).or_insert(fact.key);
        if *first != fact.key {
            let what = format!("{} are other weights than before", fact.subject);
            found.add("other-weights", fact.us, None, what);
        }
    }
    // Weights that are wrong when they have been loaded are refused.
    for (began, run) in case.fired().filter(|(_, run)| run.kind() == Kind::BitsWeight) {
        let at_load = run.proof.as_ref().is_some_and(|proof| proof.contains(": loading stage "));
        let refused = case.facts_of(WEIGHTS_REFUSED).any(|fact| fact.us >= began);
        if at_load && !refused {
            let what = format!("{}: the wrong tensor was taken", run.fault.id);
            found.add("taken", began, None, what);
        }
    }
}

pub(super) fn no_silent_substitution(case: &Case<'_>, found: &mut Found) {
    let asked = case.record.env.get("model");
    for event in &case.record.events {
        let What::Served { request, model, served_by } = &event.what else { continue };
        if let Some(asked) = asked
            && asked != model
        {
            let what = format!("{model} answered, {asked} was asked");
            found.add("other-model", event.us, Some(*request), what);
        }
        let delivered = case.streams.get(request).is_some_and(|s| !s.tokens.is_empty());
        if served_by.is_empty() && delivered {
            let what = "the answer does not say what served it";
            found.add("unnamed", event.us, Some(*request), what);
        }
    }
    for (began, run) in case.fired().filter(|(_, run)| run.kind() == Kind::LogitsNan) {
        if run.proof.is_none() {
            continue;
        }
        let failed = case.streams.values().any(|stream| {
            stream
                .failure()
                .is_some_and(|(us, code, _)| us >= began && code.to_lowercase().contains("finite"))
        });
        // It may have been a request that is none of the workload's: a gateway's own question.
        let own = |fact: &Fact<'_>| fact.us >= began && fact.subject.contains("NotFinite");
        let failed = failed || case.facts_of(REQUEST_ENDED).any(own);
        // The client may have left in the same moment.
        let gone = run.touched.iter().any(|request| {
            let end = case.streams.get(request).and_then(|stream| stream.ends.first());
            end.is_some_and(|(us, code, _)| *us >= began && *code != "finished")
        });
        if !failed && !gone {
            let what = format!("{}: logits were NaN and nobody says so", run.fault.id);
            found.add("nan-sampled", began, run.touched.first().copied(), what);
        }
    }
}
