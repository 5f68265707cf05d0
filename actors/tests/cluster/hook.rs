//! A fault hook for tests: does what it is told at the sites that a test picks, keeps all facts.

use dunlin_runtime::{Action, Fact, FaultHook, Site};
use std::sync::{Arc, Mutex};
use std::time::Instant;

type Picks = Box<dyn Fn(&Site<'_>) -> bool + Send>;

#[derive(Default)]
pub struct Hook {
    armed: Mutex<Vec<(Picks, Action, usize)>>,
    facts: Mutex<Vec<(Instant, Fact)>>,
}

impl Hook {
    pub fn new() -> Arc<Self> {
        Arc::default()
    }

    /// The first `times` sites that `picks` accepts are hit.
    pub fn arm(
        &self,
        times: usize,
        action: Action,
        picks: impl Fn(&Site<'_>) -> bool + Send + 'static,
    ) {
        let mut armed = self.armed.lock().expect("never held in a panic");
        armed.push((Box::new(picks), action, times));
    }

    pub fn facts(&self, name: &str) -> Vec<Fact> {
        let facts = self.facts.lock().expect("never held in a panic");
        facts.iter().map(|(_, fact)| fact).filter(|fact| fact.name == name).cloned().collect()
    }

    /// When the first fact of this name was told.
    pub fn first(&self, name: &str) -> Option<Instant> {
        let facts = self.facts.lock().expect("never held in a panic");
        facts.iter().find(|(_, fact)| fact.name == name).map(|(when, _)| *when)
    }

    /// What came back as proof of faults that took effect.
    pub fn proofs(&self) -> Vec<String> {
        let done = self.facts(dunlin_runtime::faults::names::FAULT_DONE);
        done.into_iter().map(|fact| fact.subject).collect()
    }
}

impl FaultHook for Hook {
    fn decide(&self, site: &Site<'_>) -> Option<Action> {
        let mut armed = self.armed.lock().expect("never held in a panic");
        let hit = armed.iter_mut().find(|(picks, _, left)| *left > 0 && picks(site))?;
        hit.2 -= 1;
        Some(hit.1.clone())
    }

    fn observe(&self, fact: &Fact) {
        let told = (Instant::now(), fact.clone());
        self.facts.lock().expect("never held in a panic").push(told);
    }
}

/// A step, from number `from` on, of this stage and rank.
pub fn step_of(site: &Site<'_>, at: (usize, usize), from: u64) -> bool {
    matches!(site, Site::Step { stage, rank, step, .. } if (*stage, *rank) == at && *step >= from)
}

/// A step that holds the request, at a stage and rank.
pub fn holds(site: &Site<'_>, at: (usize, usize), request: u64) -> bool {
    matches!(site, Site::Step { stage, rank, requests, .. }
        if (*stage, *rank) == at && requests.contains(&request))
}
