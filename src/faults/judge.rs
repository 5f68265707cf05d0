//! From a record to a verdict and a report; and the names of what many runs must have met.

use dunlin_faults::coverage;
use dunlin_faults::record::Record;
use dunlin_faults::report::Report;
use dunlin_faults::resolved::Resolved;
use dunlin_faults::verdict;

/// The report of a run, and the moments of the "sometimes" list that it met.
pub fn judge<'a>(resolved: &Resolved, record: &'a Record) -> (Report<'a>, Vec<String>) {
    let verdict = verdict::judge(resolved, record);
    (Report::of(resolved, record, &verdict), verdict.coverage)
}

/// Every moment that can be met: id and statement.
pub fn moments() -> impl Iterator<Item = (&'static str, &'static str)> {
    let demanded = coverage::ALL.iter().filter(|moment| moment.needs.is_none());
    demanded.map(|moment| (moment.id, moment.statement))
}
