//! How many processes a model is spread over does not show in its answers.

use serde_json::json;

use crate::harness::Cluster;
use crate::http::Answer;

const TOKENS: usize = 24;
const PROMPT: &str = "A pipeline passes its work from one machine to the next. Explain in a few \
     sentences why the answer must not depend on how many machines there are:";

/// Two answers of a greedy and a sampled request: the second finds the first one's blocks.
fn answers(file: &str, precision: &str) -> Vec<Answer> {
    let set = format!("cluster.precision={precision}");
    let cluster = Cluster::start(file, &[&set, "kv.memory=128MiB"]);
    let greedy = cluster.body(PROMPT, TOKENS);
    let mut sampled = greedy.clone();
    sampled["temperature"] = json!(0.8);
    sampled["seed"] = json!(7);
    [&greedy, &sampled, &greedy, &sampled].map(|body| cluster.ask(body)).to_vec()
}

fn every_topology_answers_alike(precision: &str) {
    let alone = answers("examples/one-process.toml", precision);
    for (number, answer) in alone.iter().enumerate() {
        answer.check(&format!("one process, {precision}, answer {number}"), TOKENS);
    }
    assert_ne!(alone[0].text, alone[1].text, "sampling does something");
    for file in ["cluster.toml", "examples/pipeline.toml", "examples/pipeline3.toml"] {
        for (number, answer) in answers(file, precision).iter().enumerate() {
            let what = format!("{file}, {precision}, answer {number}");
            answer.check(&what, TOKENS);
            answer.check_same(&alone[number], &what);
        }
    }
    alone[2].check_same(&alone[0], "a warm prefix");
}

#[test]
fn every_topology_answers_alike_in_fast_mode() {
    every_topology_answers_alike("fast");
}

#[test]
fn every_topology_answers_alike_in_exact_mode() {
    every_topology_answers_alike("exact");
}
