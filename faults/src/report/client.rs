//! What the clients of a run saw, request by request: the table that metrics and figures read.

use crate::record::{Record, What};
use std::collections::BTreeMap;

/// One request as its client saw it. Times in microseconds.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Seen {
    pub submitted: Option<u64>,
    pub accepted: bool,
    pub refused: Option<String>,
    /// When each token came, in the order in which they came.
    pub tokens: Vec<u64>,
    /// Tokens at a position that was delivered before, and positions left out.
    pub duplicated: u64,
    pub lost: u64,
    pub ended: Option<(u64, String)>,
    next: u64,
}

impl Seen {
    /// Ended as its client wished: with an answer, or because the client itself left.
    pub fn ended_well(&self) -> bool {
        matches!(&self.ended, Some((_, code)) if is_good(code))
    }

    pub fn failed(&self) -> bool {
        matches!(&self.ended, Some((_, code)) if !is_good(code))
    }

    /// Waits for a token: (from, to), the first of them from submission; and the wait that no token
    /// ended, up to the request's end or `until`.
    pub fn waits(&self, until: u64) -> Vec<(u64, u64)> {
        let Some(start) = self.submitted else { return Vec::new() };
        let mut from = start;
        let mut waits = Vec::with_capacity(self.tokens.len() + 1);
        for &token in &self.tokens {
            waits.push((from, token));
            from = token;
        }
        if !self.ended_well() {
            let to = self.ended.as_ref().map_or(until, |(us, _)| *us);
            if to > from {
                waits.push((from, to));
            }
        }
        waits
    }

    /// Gaps between tokens: (when the later came, gap).
    pub fn gaps(&self) -> impl Iterator<Item = (u64, u64)> + '_ {
        self.tokens.windows(2).filter_map(|pair| match pair {
            [a, b] => Some((*b, b.saturating_sub(*a))),
            _ => None,
        })
    }

    pub fn ttft(&self) -> Option<u64> {
        Some(self.tokens.first()?.saturating_sub(self.submitted?))
    }

    /// Was it open at some time in `from..=to`?
    pub fn open_in(&self, from: u64, to: u64) -> bool {
        let begun = self.submitted.is_some_and(|us| us <= to) && self.refused.is_none();
        begun && self.ended.as_ref().is_none_or(|(us, _)| *us >= from)
    }
}

/// `cancelled` and `gone` are the client's own doing.
pub fn is_good(code: &str) -> bool {
    matches!(code, "finished" | "cancelled" | "gone")
}

/// By request number.
pub fn seen(record: &Record) -> BTreeMap<u64, Seen> {
    let mut all: BTreeMap<u64, Seen> = BTreeMap::new();
    for event in &record.events {
        match &event.what {
            What::Submitted { request } => {
                all.entry(*request).or_default().submitted = Some(event.us);
            }
            What::Accepted { request } => all.entry(*request).or_default().accepted = true,
            What::Refused { request, code } => {
                all.entry(*request).or_default().refused = Some(code.clone());
            }
            What::Token { request, position, .. } => {
                let seen = all.entry(*request).or_default();
                let position = u64::from(*position);
                if position < seen.next {
                    seen.duplicated += 1;
                    continue;
                }
                seen.lost += position - seen.next;
                seen.next = position + 1;
                seen.tokens.push(event.us);
            }
            What::Ended { request, code, .. } => {
                let seen = all.entry(*request).or_default();
                if seen.ended.is_none() {
                    seen.ended = Some((event.us, code.clone()));
                }
            }
            _ => {}
        }
    }
    for (number, seen) in &mut all {
        // An answer that ended early lost its rest, too.
        let finished = matches!(&seen.ended, Some((_, code)) if code == "finished");
        if let (true, Some(info)) = (finished, record.requests.get(number)) {
            seen.lost += (info.reference.len() as u64).saturating_sub(seen.next);
        }
    }
    all
}

/// When the last thing that figures show happened.
pub fn end_us(record: &Record) -> u64 {
    let events = record.events.iter().filter_map(|event| match event.what {
        What::Fact { .. } | What::Gauge { .. } => None,
        _ => Some(event.us),
    });
    let faults = record.faults.iter().flat_map(|f| f.began_us.into_iter().chain(f.ended_us));
    events.chain(faults).max().unwrap_or(0).max(1)
}
