//! What came of faults that may change tokens by design: masked, detected, or silent corruption.

use crate::fault::Expect;
use crate::invariant::{Case, diverges};
use serde::{Deserialize, Serialize};
use std::fmt;

/// Answers that were open when such a fault fired or after, and what became of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Corruption {
    /// Answered as if nothing had been.
    pub masked: u64,
    /// Ended with a code: somebody noticed.
    pub detected: u64,
    /// Other tokens, and nobody said so.
    pub silent: u64,
    /// Output position of the first token that is another; over all of the silent ones.
    pub first_position: Option<u64>,
    /// Tokens that are not the reference's, and all of them. In the process mode pieces of text,
    /// which each run may cut in other places: there it is an upper bound.
    pub changed_tokens: u64,
    pub tokens: u64,
}

impl fmt::Display for Corruption {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} masked, {} detected, {} silent", self.masked, self.detected, self.silent)?;
        if self.silent > 0 {
            write!(f, " ({} of {} tokens changed)", self.changed_tokens, self.tokens)?;
        }
        Ok(())
    }
}

/// `None` if no fault of the run was to be measured, or none fired.
pub fn corruption(case: &Case<'_>) -> Option<Corruption> {
    let measured = case.fired().filter(|(_, run)| run.expect() == Expect::Measure);
    let first = measured.map(|(began, _)| began).min()?;
    let mut found = Corruption::default();
    for (&request, stream) in &case.streams {
        let Some(info) = case.info(request).filter(|info| !info.reference.is_empty()) else {
            continue;
        };
        if stream.ended_us().is_some_and(|end| end < first) || stream.refused.is_some() {
            continue;
        }
        found.tokens += stream.tokens.len() as u64;
        let other = |(_, position, id): &&(u64, u32, &str)| {
            info.reference.get(*position as usize).is_none_or(|right| right != id)
        };
        if stream.failure().is_some() {
            found.detected += 1;
        } else if diverges(case, request, stream).is_none() {
            found.masked += 1;
        } else {
            found.silent += 1;
            found.changed_tokens += stream.tokens.iter().filter(other).count() as u64;
            let position = stream.tokens.iter().find(other).map(|(_, at, _)| u64::from(*at));
            let earliest = found.first_position.into_iter().chain(position).min();
            found.first_position = earliest;
        }
    }
    Some(found)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::invariant::tests::good;

    #[test]
    fn answers_are_masked_detected_or_silently_wrong() {
        let mut run = good();
        assert_eq!(corruption(&Case::new(&run.resolved, &run.record)), None);
        run.record.faults[0].fault.expect = Expect::Measure;
        run.record.requests.get_mut(&1).unwrap().reference[4] = "99".into();
        run.fail(2, "internal_error");
        let found = corruption(&Case::new(&run.resolved, &run.record)).unwrap();
        // Request 0 ended before the fault.
        assert_eq!((found.masked, found.detected, found.silent), (0, 1, 1));
        assert_eq!((found.first_position, found.changed_tokens), (Some(4), 1));
        assert_eq!(found.to_string(), "0 masked, 1 detected, 1 silent (1 of 11 tokens changed)");
    }
}
