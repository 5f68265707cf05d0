//! A drain: what runs may finish within `limits.drain_ms`; what is left then moves once.

use super::{judged, of_pair, run};
use dunlin_actors::facts::{DRAIN, REQUEST_REPLAYED, TOKEN_DELIVERED};
use dunlin_faults::record::{Record, What};
use dunlin_faults::report::metrics::{Slo, metrics};
use std::collections::BTreeMap;

/// Eight long answers, half of them on the node that is drained when one has 20 tokens.
fn drained(within_ms: u64) -> Record {
    let plan = of_pair(&format!(
        "drain\nset = {{ \"limits.drain_ms\" = {within_ms} }}\n\
         [workload]\nrequests = 8\narrivals = {{ kind = \"at-once\" }}\nprompt_tokens = 24\n\
         output_tokens = 200\n\
         [phases]\nwarmup = \"500ms\"\nchaos = \"20s\"\nsettle = \"10s\"\n\
         [[fault]]\nid = \"drain\"\nkind = \"process.stop\"\ntarget = {{ node = \"left\" }}\n\
         when = {{ request = \"any\", token = 20 }}\n"
    ));
    let record = run(&plan);
    // Every answer is whole, and each of its tokens the undisturbed one.
    assert_eq!(judged(&plan, &record), "");
    record
}

/// Of each request that was handed out again: how often, the tokens that were computed anew, and
/// prompt and delivered tokens when it was.
fn replays(record: &Record) -> BTreeMap<u64, (u64, u64, u64)> {
    let (mut delivered, mut replays) = (BTreeMap::new(), BTreeMap::new());
    for event in &record.events {
        let What::Fact { name, key, value, .. } = &event.what else { continue };
        match name.as_str() {
            TOKEN_DELIVERED => *delivered.entry(*key).or_insert(0) += 1,
            REQUEST_REPLAYED => {
                let have = 24 + delivered.get(key).copied().unwrap_or(0);
                let (count, computed, due) = replays.entry(*key).or_insert((0, 0, 0));
                (*count, *computed, *due) = (*count + 1, *computed + value, *due + have);
            }
            _ => {}
        }
    }
    replays
}

/// Requests that the drain left, as the node said when it ended.
fn left_over(record: &Record) -> u64 {
    let ended = |what: &What| match what {
        What::Fact { name, subject, value, .. } if name == DRAIN && subject == "ended" => {
            Some(*value)
        }
        _ => None,
    };
    record.events.iter().find_map(|event| ended(&event.what)).expect("the drain ended")
}

#[test]
fn what_is_left_of_a_short_drain_moves_once() {
    let record = drained(100);
    let replays = replays(&record);
    assert_eq!(replays.len(), 4, "half of the requests ran there: {replays:?}");
    assert_eq!(left_over(&record), 4);
    for (request, (count, computed, due)) in &replays {
        assert_eq!(*count, 1, "request {request} was handed out again {count} times");
        assert_eq!(computed, due, "request {request}: prompt and delivered tokens, each once");
    }
    let all: u64 = replays.values().map(|(_, computed, _)| computed).sum();
    assert_eq!(metrics(&record, Slo::default()).recomputed_tokens, all);
}

#[test]
fn a_long_drain_moves_nothing() {
    let record = drained(30_000);
    assert_eq!((replays(&record).len(), left_over(&record)), (0, 0));
}
