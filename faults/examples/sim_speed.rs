//! How many simulated runs a minute, of a plan, on so many threads:
//!
//!     cargo run --release -p dunlin-faults --example sim_speed -- plans/swarm.toml 500 2

use dunlin_faults::fault::Mode;
use dunlin_faults::plan::Plan;
use dunlin_faults::sim;
use dunlin_faults::verdict::{Outcome, judge};
use std::path::Path;
use std::sync::Mutex;
use std::time::Instant;

fn main() {
    let args: Vec<String> = std::env::args().collect();
    let number = |at: usize, default: usize| {
        args.get(at).and_then(|text| text.parse().ok()).unwrap_or(default)
    };
    let file = args.get(1).map_or("plans/swarm.toml", String::as_str);
    let (runs, threads, first) = (number(2, 200), number(3, 2), number(4, 1));
    let plan = Plan::read(Path::new(file)).unwrap_or_else(|error| panic!("{error}"));
    let begun = Instant::now();
    let seen = Mutex::new((0usize, 0usize, 0u64));
    let resolve = |at: usize| {
        Ok(plan.resolve((first + at) as u64, Mode::Sim).unwrap_or_else(|e| panic!("{e}")))
    };
    sim::run_many(runs, threads, resolve, |at, result| {
        let (plan, record) = match result {
            Ok(both) => both,
            Err(error) => {
                println!("seed {}: {error}", first + at);
                return;
            }
        };
        let verdict = judge(&plan, &record);
        let mut seen = seen.lock().expect("no panic in here");
        seen.0 += 1;
        seen.2 += record.phases.settle_us;
        if verdict.outcome != Outcome::Pass {
            seen.1 += 1;
            println!("seed {}: {:?} {}", plan.seed, verdict.outcome, verdict.reason);
            for breach in verdict.breaches.iter().take(2) {
                let (id, slug) = (&breach.invariant, &breach.slug);
                println!("    {id} {slug} at {} us: {}", breach.at_us, breach.what);
            }
        }
    });
    let took = begun.elapsed().as_secs_f64();
    let (done, bad, virtual_us) = *seen.lock().expect("no panic in here");
    println!(
        "{done} runs in {took:.1} s on {threads} threads: {:.0} a minute; {bad} did not pass; \
         {:.0} virtual seconds a second",
        done as f64 * 60.0 / took,
        virtual_us as f64 / 1e6 / took
    );
}
