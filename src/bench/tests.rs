//! The load generator against a server of a few lines, which counts what it sees.

use super::*;
use clap::Parser;
use std::sync::atomic::{AtomicUsize, Ordering};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

/// Between two tokens, and before the first.
const STEP: Duration = Duration::from_millis(5);

#[derive(Debug, Parser)]
struct Command {
    #[command(flatten)]
    args: BenchArgs,
}

#[derive(Default)]
struct Seen {
    completions: AtomicUsize,
    hang_ups: AtomicUsize,
    busy: AtomicUsize,
    most_busy: AtomicUsize,
    tokens: AtomicUsize,
}

/// Refuses every `refuse`th request, streams tokens to the others.
async fn server(refuse: usize) -> (String, Arc<Seen>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let url = format!("http://{}", listener.local_addr().expect("an address"));
    let seen = Arc::new(Seen::default());
    let counts = seen.clone();
    tokio::spawn(async move {
        while let Ok((socket, _)) = listener.accept().await {
            let counts = counts.clone();
            tokio::spawn(async move {
                let busy = counts.busy.fetch_add(1, Ordering::SeqCst) + 1;
                counts.most_busy.fetch_max(busy, Ordering::SeqCst);
                if serve(socket, &counts, refuse).await.is_err() {
                    counts.hang_ups.fetch_add(1, Ordering::SeqCst);
                }
                counts.busy.fetch_sub(1, Ordering::SeqCst);
            });
        }
    });
    (url, seen)
}

async fn serve(mut socket: TcpStream, seen: &Seen, refuse: usize) -> std::io::Result<()> {
    let mut request = Vec::new();
    let body = loop {
        let mut piece = [0; 4096];
        let count = socket.read(&mut piece).await?;
        request.extend_from_slice(&piece[..count]);
        let text = String::from_utf8_lossy(&request).into_owned();
        let Some((head, body)) = text.split_once("\r\n\r\n") else { continue };
        let length = head.lines().find_map(|line| line.strip_prefix("content-length: "));
        if body.len() >= length.map_or(0, |n| n.parse().expect("a number")) {
            break body.to_owned();
        }
    };
    if body.is_empty() {
        return answer(&mut socket, "200 OK", r#"{"data":[{"id":"tiny"}]}"#).await;
    }
    let number = seen.completions.fetch_add(1, Ordering::SeqCst) + 1;
    if number.is_multiple_of(refuse) {
        let error = r#"{"error":{"message":"later","code":"overloaded"}}"#;
        return answer(&mut socket, "429 Too Many Requests", error).await;
    }
    let body: Value = serde_json::from_str(&body).expect("JSON");
    let (prompt, output) = (body["prompt"].as_array().expect("ids").len(), &body["max_tokens"]);
    assert_eq!(body["model"], "tiny");
    socket.write_all(b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n").await?;
    for _ in 0..output.as_u64().expect("a number") {
        tokio::time::sleep(STEP).await;
        seen.tokens.fetch_add(1, Ordering::SeqCst);
        socket.write_all(b"data: {\"choices\":[{\"text\":\"a\"}],\"usage\":null}\n\n").await?;
    }
    let usage = json!({"prompt_tokens": prompt, "completion_tokens": output});
    let last = format!("data: {}\n\ndata: [DONE]\n\n", json!({"choices": [], "usage": usage}));
    socket.write_all(last.as_bytes()).await
}

async fn answer(socket: &mut TcpStream, status: &str, body: &str) -> std::io::Result<()> {
    let length = body.len();
    let head = format!("HTTP/1.1 {status}\r\ncontent-length: {length}\r\n\r\n");
    socket.write_all((head + body).as_bytes()).await
}

async fn load(url: &str, flags: &str) -> Value {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("report.json");
    let words = ["bench"].into_iter().chain(flags.split_whitespace());
    let mut args = Command::try_parse_from(words).expect("flags").args;
    args.json = Some(path.clone());
    run(&args, url).await.expect("a report");
    serde_json::from_slice(&std::fs::read(path).expect("a file")).expect("JSON")
}

#[tokio::test]
async fn figures_are_what_the_server_did() {
    let (url, seen) = server(usize::MAX).await;
    let flags = "-n 12 -c 3 --warmup 1 --prompt-tokens 20 --output-tokens 8 --slo-e2e-ms 60000";
    let report = &load(&url, flags).await["report"];
    assert_eq!(seen.completions.load(Ordering::SeqCst), 13, "warm-up included");
    assert_eq!(seen.most_busy.load(Ordering::SeqCst), 3, "concurrency is kept");
    assert_eq!((&report["requests"], &report["done"]), (&json!(12), &json!(12)));
    assert_eq!((&report["prompt_tokens"], &report["output_tokens"]), (&json!(240), &json!(96)));
    assert_eq!((&report["good"], &report["tokens_per_chunk"]), (&json!(12), &json!(1.0)));
    assert_eq!(report["itl_ms"]["count"], 12 * 7);
    // The server sleeps at least so long; how much longer is the machine's affair.
    let at_least = |name: &str, ms: f64| {
        let mean = report[name]["mean"].as_f64().expect("a number");
        assert!(mean >= ms * 0.99, "{name}: {mean} ms");
    };
    at_least("ttft_ms", 5.0);
    at_least("itl_ms", 4.0);
    at_least("tpot_ms", 4.0);
    at_least("e2e_ms", 40.0);
}

#[tokio::test]
async fn refusals_and_hang_ups_are_told_apart() {
    let (url, seen) = server(5).await;
    let flags = "-n 40 --rate 400 --warmup 0 --output-tokens 40 --disconnect 0.5 --seed 3";
    let report = &load(&url, flags).await["report"];
    let count = |name: &str| report[name].as_u64().expect("a number");
    assert_eq!(report["errors"], json!({"429 overloaded": 8}));
    assert_eq!(count("done") + count("hung_up") + count("failed"), 40);
    assert!((5..30).contains(&count("hung_up")), "{report}");
    // The server learns of a hang-up at its next write or two.
    for _ in 0..200 {
        if seen.busy.load(Ordering::SeqCst) == 0 {
            break;
        }
        tokio::time::sleep(STEP).await;
    }
    assert_eq!(seen.busy.load(Ordering::SeqCst), 0, "no connection is left open");
    assert!(seen.hang_ups.load(Ordering::SeqCst) > 0);
}

#[tokio::test]
async fn several_concurrencies_are_rows_of_one_table() {
    let (url, seen) = server(usize::MAX).await;
    let rows = load(&url, "-c 1,3 --per-stream 2 --warmup 0 --output-tokens 4").await;
    let done = |row: usize| &rows[row]["report"]["done"];
    assert_eq!((done(0), done(1)), (&json!(2), &json!(6)));
    assert_eq!(seen.completions.load(Ordering::SeqCst), 8);
    assert_eq!(seen.most_busy.load(Ordering::SeqCst), 3);
    assert_ne!(rows[0]["seed"], rows[1]["seed"], "no row finds the prompts of another");
}

#[tokio::test]
async fn padded_batches_compute_the_longest_and_count_what_was_asked() {
    let (url, seen) = server(usize::MAX).await;
    let flags = "-n 8 --static-batches 4 --warmup 0 --output-tokens uniform:1..20 --seed 5";
    let report = &load(&url, flags).await["report"];
    let options = Options {
        requests: 8,
        arrivals: Arrivals::Batches { size: 4 },
        prompt: Lengths::Fixed(128),
        output: Lengths::Uniform(1, 20),
        shared_prefix: 0.0,
        prefix_tokens: 64,
        prefix_groups: 1,
        disconnect: 0.0,
        ids: (1000, 20000),
        seed: 5,
    };
    let plan = plan::plan(&options);
    let asked: u32 = plan.iter().map(|request| request.output_tokens).sum();
    let longest = |batch: &[Planned]| batch.iter().map(|request| request.output_tokens).max();
    let computed: u32 = plan.chunks(4).filter_map(longest).map(|longest| 4 * longest).sum();
    assert!(asked < computed, "{asked} of {computed}");
    assert_eq!(report["output_tokens"], asked);
    assert_eq!(seen.tokens.load(Ordering::SeqCst), computed as usize);
    assert_eq!(seen.most_busy.load(Ordering::SeqCst), 4, "a batch waits for the one before");
    assert_eq!(report["itl_ms"]["count"], asked - 8, "padding has no gaps");
}
