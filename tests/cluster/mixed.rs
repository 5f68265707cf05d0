//! A pipeline of unlike devices in two node processes: a processor and a graphics adapter, which
//! may be one in software (`tools/test` installs it). The model is the repository's tiny one: the
//! real one's numbers on an adapter are held to the goldens.

use serde_json::json;

use crate::harness::{Cluster, Signal};

const TOKENS: usize = 16;
const PROMPT: &str = "A pipeline passes its work from one machine to the next. Explain why the \
     answer must not depend on what the machines are made of:";

/// The oracle is the processor alone. Then the adapter's node dies, twice, in the middle of a
/// stream, and the client reads the same to the last bit: the adapter repeats itself.
#[test]
fn a_processor_and_an_adapter_give_the_oracles_text_and_survive_a_kill() {
    let model = concat!("cluster.model=\"", env!("CARGO_MANIFEST_DIR"), "/tests/data/tiny-llama\"");
    let sets = [model, "cluster.precision=exact", "scheduler.step_deadline_ms=120000"];
    let oracle = {
        let cluster = Cluster::start("examples/one-process.toml", &sets);
        cluster.ask(&cluster.body(PROMPT, TOKENS))
    };
    oracle.check("the oracle", TOKENS);

    let cluster = Cluster::start("examples/mixed.toml", &sets);
    assert_eq!(cluster.serving_nodes(), ["left", "right"]);
    let body = cluster.body(PROMPT, TOKENS);
    let whole = cluster.ask(&body);
    whole.check("mixed", TOKENS);
    assert_eq!(whole.text, oracle.text, "the oracle's text");
    assert_eq!(whole.tokens, oracle.tokens, "the oracle's tokens");

    for (at, node) in [(2, "right"), (9, "left"), (TOKENS / 2, "right")] {
        let mut body = body.clone();
        body["cache_salt"] = json!(format!("{node} at {at}"));
        let before = (cluster.replays(), cluster.pid(node));
        let mut stream = cluster.open(&body);
        stream.until(at);
        cluster.signal(node, Signal::KILL);
        let answer = stream.finish();
        let what = format!("{node} killed after {at} tokens");
        answer.check(&what, TOKENS);
        answer.check_same(&whole, &what);
        println!("{what}: {} replays", cluster.replays() - before.0);
        cluster.wait_restarted(node, before.1);
    }
    assert!(cluster.replays() > 0, "no kill hit the stream");
    assert_eq!(cluster.failures(), 0);
}
