//! A weight that is wrong once it is loaded: the load is refused, and the next one is right (I19).

use super::{judged, plans, run};
use dunlin_actors::facts::{WEIGHTS_LOADED, WEIGHTS_REFUSED};
use dunlin_faults::fault::Mode;
use dunlin_faults::plan::Plan;
use dunlin_faults::record::{Record, What};
use dunlin_faults::verdict::judge;

#[test]
fn a_wrong_weight_is_refused_where_it_is_loaded() {
    let plan = Plan::read(&plans().join("weights-at-load.toml")).unwrap_or_else(|e| panic!("{e}"));
    let plan = plan.resolve(7, Mode::Sim).unwrap_or_else(|e| panic!("{e}"));
    let mut record = run(&plan);
    assert_eq!(judged(&plan, &record), "");
    let told = |name: &str| {
        let is = |what: &What| matches!(what, What::Fact { name: n, .. } if n == name);
        record.events.iter().filter(|event| is(&event.what)).count()
    };
    assert_eq!(told(WEIGHTS_REFUSED), 1);
    // Two replicas at the start, and r0 again once its weights were right.
    assert_eq!(told(WEIGHTS_LOADED), 3);

    let breach = |record: &Record| {
        let print = judge(&plan, record).fingerprint;
        print.map(|print| print.to_string()).unwrap_or_default()
    };
    let whole = record.clone();
    record
        .events
        .retain(|event| !matches!(&event.what, What::Fact { name, .. } if name == WEIGHTS_REFUSED));
    assert_eq!(breach(&record), "I19/taken");
    record = whole;
    for event in record.events.iter_mut().rev() {
        if let What::Fact { name, key, .. } = &mut event.what
            && name == WEIGHTS_LOADED
        {
            *key ^= 1;
            break;
        }
    }
    assert_eq!(breach(&record), "I19/other-weights");
}
