//! The clients of a run: each sends its request when it is due and tells all that it sees.

use super::Note;
use super::http::{self, Answer, Events};
use super::wire::now_us;
use crate::resolved::RequestSpec;
use serde_json::{Value, json};
use std::net::SocketAddr;
use std::time::Duration;
use tokio::sync::mpsc::UnboundedSender;
use tokio::sync::watch;

/// Past its deadline an answer is not waited for any longer than this.
const GRACE: Duration = Duration::from_secs(15);

/// Where and how requests are sent.
#[derive(Debug, Clone)]
pub struct Gateway {
    pub address: SocketAddr,
    pub model: String,
    /// Keys by tenant; empty where everybody is let in.
    pub keys: std::collections::BTreeMap<String, String>,
    /// Prompts are sent as token ids (the hash engine) or as text.
    pub ids: bool,
}

/// What a client is made to do by a fault.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Orders {
    /// Hang up at the next token that comes once so many have been read.
    pub hang_up_after: Option<u32>,
    /// Wait so long before each read.
    pub slow: Option<Duration>,
}

/// What a client sees.
#[derive(Debug, Clone, PartialEq)]
pub enum Seen {
    Submitted,
    /// The router's id, where the answer names it.
    Accepted {
        id: Option<u64>,
    },
    Refused {
        code: String,
    },
    Token {
        position: u32,
        text: String,
    },
    /// `prompt_tokens` is told by the usage block.
    Usage {
        prompt_tokens: u32,
        served_by: Vec<String>,
        model: String,
    },
    Ended {
        code: String,
        message: String,
    },
    /// Bytes that waited in the client's socket while it read slowly.
    Unread(u64),
}

impl Gateway {
    pub fn body(&self, request: &RequestSpec, salt: &str) -> Value {
        let prompt = if self.ids { json!(request.prompt) } else { json!(request.text()) };
        json!({
            "model": self.model,
            "prompt": prompt,
            "max_tokens": request.max_tokens,
            "ignore_eos": request.ignore_eos,
            "temperature": request.temperature,
            "seed": request.seed,
            "logprobs": 0,
            "stream": true,
            "stream_options": {"include_usage": true},
            "cache_salt": salt,
        })
    }

    fn headers(&self, tenant: &str) -> Vec<(&'static str, String)> {
        let mut headers = vec![("x-dunlin-details", "1".to_string())];
        if let Some(key) = self.keys.get(tenant) {
            headers.push(("Authorization", format!("Bearer {key}")));
        }
        headers
    }

    /// A GET, as JSON; `None` if there was no answer, or no JSON.
    pub async fn get(&self, path: &str) -> Option<(u16, Value)> {
        let key = self.keys.keys().next().map(|tenant| self.headers(tenant));
        let headers = key.unwrap_or_default();
        let headers: Vec<(&str, &str)> = headers.iter().map(|(n, v)| (*n, v.as_str())).collect();
        let asked = async {
            let answer = http::ask(self.address, ("GET", path), &headers, b"").await.ok()?;
            let status = answer.status;
            let text = answer.text().await.ok()?;
            Some((status, serde_json::from_str(&text).unwrap_or_default()))
        };
        tokio::time::timeout(Duration::from_secs(5), asked).await.ok()?
    }

    /// Sends one request and follows it to its end; every event goes to `tell`, with its time.
    pub async fn follow(
        &self,
        request: &RequestSpec,
        salt: &str,
        orders: &mut watch::Receiver<Orders>,
        tell: &mut (impl FnMut(u64, Seen) + Send),
    ) {
        tell(now_us(), Seen::Submitted);
        let body = self.body(request, salt).to_string();
        let within = Duration::from_micros(request.deadline_us) + GRACE;
        let mut follower = Follower::new(request.cancel_after);
        let following = follower.run(self, &request.tenant, body.as_bytes(), orders, tell);
        if tokio::time::timeout(within, following).await.is_err() {
            let message = format!("nothing had ended it {within:?} after it was sent");
            tell(now_us(), Seen::Ended { code: "client_gave_up".into(), message });
        }
    }
}

struct Follower {
    cancel_after: Option<u32>,
    tokens: u32,
    finished: bool,
    /// A terminal event was told.
    over: bool,
}

impl Follower {
    fn new(cancel_after: Option<u32>) -> Self {
        Self { cancel_after, tokens: 0, finished: false, over: false }
    }

    async fn run(
        &mut self,
        gateway: &Gateway,
        tenant: &str,
        body: &[u8],
        orders: &mut watch::Receiver<Orders>,
        tell: &mut (impl FnMut(u64, Seen) + Send),
    ) {
        let headers = gateway.headers(tenant);
        let headers: Vec<(&str, &str)> = headers.iter().map(|(n, v)| (*n, v.as_str())).collect();
        let sent = http::ask(gateway.address, ("POST", "/v1/completions"), &headers, body).await;
        let mut answer = match sent {
            Ok(answer) => answer,
            Err(error) => {
                let refused = error.kind() == std::io::ErrorKind::ConnectionRefused;
                let code = if refused { "connection_refused" } else { "connection_lost" };
                tell(now_us(), Seen::Refused { code: code.into() });
                return;
            }
        };
        if answer.status != 200 {
            return refuse(answer, tell).await;
        }
        let id = answer.headers.get("x-request-id").and_then(|id| id.rsplit_once('-'));
        let id = id.and_then(|(_, hex)| u64::from_str_radix(hex, 16).ok());
        tell(now_us(), Seen::Accepted { id });
        let mut events = Events::default();
        loop {
            if self.leaves(orders) {
                let message = format!("it hung up after {} tokens", self.tokens);
                return tell(now_us(), Seen::Ended { code: "gone".into(), message });
            }
            let slow = orders.borrow_and_update().slow;
            if let Some(wait) = slow {
                tokio::select! {
                    () = tokio::time::sleep(wait) => {}
                    Ok(()) = orders.changed() => {}
                }
                tell(now_us(), Seen::Unread(answer.unread()));
            }
            let piece = tokio::select! {
                piece = answer.piece() => piece,
                // A piece is never half taken: only the order to leave drops the read.
                () = ordered_away(orders, self.tokens) => continue,
            };
            match piece {
                Ok(Some(piece)) => {
                    events.push(&piece).iter().for_each(|data| self.event(data, tell));
                }
                Ok(None) if self.over => return,
                Ok(None) => return self.lost("the stream ended without [DONE]", tell),
                Err(_) if self.over => return,
                Err(error) => return self.lost(&error.to_string(), tell),
            }
        }
    }

    fn leaves(&self, orders: &watch::Receiver<Orders>) -> bool {
        let ordered = orders.borrow().hang_up_after.is_some_and(|after| self.tokens >= after);
        (ordered || self.cancel_after.is_some_and(|after| self.tokens >= after)) && !self.over
    }

    fn lost(&mut self, message: &str, tell: &mut impl FnMut(u64, Seen)) {
        let code = "connection_lost".to_string();
        tell(now_us(), Seen::Ended { code, message: message.to_string() });
    }

    fn event(&mut self, data: &str, tell: &mut impl FnMut(u64, Seen)) {
        let us = now_us();
        if data == "[DONE]" {
            if self.finished {
                self.over = true;
                tell(us, Seen::Ended { code: "finished".into(), message: String::new() });
            } else if !self.over {
                let message = "[DONE] without a finish reason".to_string();
                self.over = true;
                tell(us, Seen::Ended { code: "unfinished".into(), message });
            }
            return;
        }
        let Ok(event) = serde_json::from_str::<Value>(data) else {
            let message = format!("{data:.200}");
            return tell(us, Seen::Ended { code: "malformed_event".into(), message });
        };
        if let Some(error) = event.get("error") {
            self.over = true;
            let (code, message) = code_of(error);
            return tell(us, Seen::Ended { code, message });
        }
        let choice = &event["choices"][0];
        for token in choice["logprobs"]["tokens"].as_array().into_iter().flatten() {
            let text = token.as_str().unwrap_or_default().to_string();
            tell(us, Seen::Token { position: self.tokens, text });
            self.tokens += 1;
        }
        self.finished |= choice["finish_reason"].is_string();
        if let Some(prompt) = event["usage"]["prompt_tokens"].as_u64() {
            let served = event["dunlin"]["served_by"].as_array().cloned().unwrap_or_default();
            let served = served.iter().filter_map(|s| s.as_str().map(str::to_string));
            tell(
                us,
                Seen::Usage {
                    prompt_tokens: u32::try_from(prompt).unwrap_or(u32::MAX),
                    served_by: served.collect(),
                    model: event["model"].as_str().unwrap_or_default().to_string(),
                },
            );
        }
    }
}

/// Ready once the client is ordered to hang up now.
async fn ordered_away(orders: &mut watch::Receiver<Orders>, tokens: u32) {
    let away = |orders: &Orders| orders.hang_up_after.is_some_and(|after| tokens >= after);
    if orders.wait_for(away).await.is_err() {
        // Nobody gives orders any more.
        std::future::pending::<()>().await;
    }
}

async fn refuse(answer: Answer, tell: &mut impl FnMut(u64, Seen)) {
    let status = answer.status;
    let text = answer.text().await.unwrap_or_default();
    let value: Value = serde_json::from_str(&text).unwrap_or_default();
    let (code, message) = code_of(&value["error"]);
    let code = if code == "unknown" { format!("http_{status}") } else { code };
    let us = now_us();
    // A request that failed before its first event: it had been taken.
    if matches!(status, 500 | 504) {
        tell(us, Seen::Accepted { id: None });
        return tell(us, Seen::Ended { code, message });
    }
    tell(us, Seen::Refused { code });
}

fn code_of(error: &Value) -> (String, String) {
    let text = |name: &str| error[name].as_str().unwrap_or_default().to_string();
    let code = Some(text("code")).filter(|code| !code.is_empty());
    (code.unwrap_or_else(|| "unknown".into()), text("message"))
}

/// Starts a client of its own task; what it sees goes to `notes` under its number.
pub fn start(
    gateway: Gateway,
    request: RequestSpec,
    salt: String,
    begin_us: u64,
    mut orders: watch::Receiver<Orders>,
    notes: UnboundedSender<Note>,
) -> tokio::task::JoinHandle<()> {
    tokio::spawn(async move {
        let wait = begin_us.saturating_sub(now_us());
        tokio::time::sleep(Duration::from_micros(wait)).await;
        let number = request.number;
        let mut tell = |us, seen| {
            let _ = notes.send(Note::Client { request: number, us, seen });
        };
        gateway.follow(&request, &salt, &mut orders, &mut tell).await;
    })
}
