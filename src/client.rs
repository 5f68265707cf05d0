//! A small client for OpenAI-compatible servers: JSON in, JSON or server-sent events out.
//!
//! Plain HTTP/1.1, one connection a request: dropping an [`EventStream`] hangs up, and hanging up
//! is how a client cancels. It knows nothing of models or prompts.

use http_body_util::{BodyExt, Full};
use hyper::body::{Bytes, Incoming};
use hyper::client::conn::http1;
use hyper::{Method, Request, Response, StatusCode, Uri, header};
use hyper_util::rt::TokioIo;
use serde_json::Value;
use std::time::Duration;
use tokio::net::TcpStream;

/// The largest JSON body and the largest single event taken, in bytes.
const MAX_BODY_BYTES: usize = 64 << 20;

/// A server, and how to reach it.
#[derive(Debug, Clone)]
pub struct Client {
    /// `host:port`.
    authority: String,
    /// Path in front of `/v1/...`, without a slash at its end.
    prefix: String,
    api_key: Option<String>,
    /// Ask which nodes and devices served a request.
    details: bool,
}

/// Why a request got no answer.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    #[error("{url:?} is not a server's address: use http://HOST:PORT (https is not supported)")]
    BadUrl { url: String },
    #[error("could not connect to {authority}: {source}")]
    Connect { authority: String, source: std::io::Error },
    #[error("{authority}: {source}")]
    Http { authority: String, source: hyper::Error },
    /// The server answered, with an error; `message` is its own.
    #[error("{status}: {message}")]
    Refused {
        status: StatusCode,
        message: String,
        code: Option<String>,
        retry_after: Option<Duration>,
    },
    /// An error event inside a stream.
    #[error("the stream failed: {message}")]
    Failed { message: String, code: Option<String> },
    #[error("the stream ended without [DONE]")]
    Truncated,
    #[error("the server's answer is no {expected}: {detail}")]
    Malformed { expected: &'static str, detail: String },
}

impl Client {
    /// `url`: `http://host:port`, with or without `/v1` or another path at its end.
    ///
    /// # Errors
    /// [`ClientError::BadUrl`] for anything but plain http.
    pub fn new(url: &str, api_key: Option<String>) -> Result<Self, ClientError> {
        let bad = || ClientError::BadUrl { url: url.into() };
        let full = if url.contains("://") { url.to_owned() } else { format!("http://{url}") };
        let uri: Uri = full.parse().map_err(|_| bad())?;
        if uri.scheme_str() != Some("http") {
            return Err(bad());
        }
        let host = uri.host().filter(|host| !host.is_empty()).ok_or_else(bad)?;
        let authority = format!("{host}:{}", uri.port_u16().unwrap_or(80));
        let path = uri.path().trim_end_matches('/');
        let prefix = path.strip_suffix("/v1").unwrap_or(path).to_owned();
        Ok(Self { authority, prefix, api_key, details: false })
    }

    /// Asks a Dunlin gateway for its own object in answers (`dunlin.served_by`).
    pub fn with_details(self) -> Self {
        Self { details: true, ..self }
    }

    pub fn authority(&self) -> &str {
        &self.authority
    }

    /// # Errors
    /// Any [`ClientError`]; a status of 400 or more is [`ClientError::Refused`].
    pub async fn get(&self, path: &str) -> Result<Value, ClientError> {
        let response = self.send(Method::GET, path, Bytes::new()).await?;
        self.json(response).await
    }

    /// # Errors
    /// As [`Self::get`].
    pub async fn text(&self, path: &str) -> Result<String, ClientError> {
        let response = self.send(Method::GET, path, Bytes::new()).await?;
        let body = self.read(response).await?;
        Ok(String::from_utf8_lossy(&body).into_owned())
    }

    /// Posts a body that asks for `"stream": true`.
    ///
    /// # Errors
    /// As [`Self::get`]; errors inside the stream come from [`EventStream::next`].
    pub async fn stream(&self, path: &str, body: &Value) -> Result<EventStream, ClientError> {
        let response = self.send(Method::POST, path, body.to_string().into()).await?;
        Ok(EventStream {
            authority: self.authority.clone(),
            body: response.into_body(),
            events: Events::default(),
        })
    }

    async fn send(
        &self,
        method: Method,
        path: &str,
        body: Bytes,
    ) -> Result<Response<Incoming>, ClientError> {
        let socket = TcpStream::connect(&self.authority)
            .await
            .map_err(|source| ClientError::Connect { authority: self.authority.clone(), source })?;
        // Requests are small and latency is measured.
        let _ = socket.set_nodelay(true);
        let http = |source| ClientError::Http { authority: self.authority.clone(), source };
        let (mut sender, connection) =
            http1::handshake(TokioIo::new(socket)).await.map_err(http)?;
        // Ends when the response's body has been read or dropped.
        tokio::spawn(connection);
        let mut request = Request::builder()
            .method(method)
            .uri(format!("{}{path}", self.prefix))
            .header(header::HOST, &self.authority)
            .header(header::CONTENT_TYPE, "application/json");
        if let Some(key) = &self.api_key {
            request = request.header(header::AUTHORIZATION, format!("Bearer {key}"));
        }
        if self.details {
            request = request.header("x-dunlin-details", "1");
        }
        let request = request.body(Full::new(body)).map_err(|error| ClientError::Malformed {
            expected: "request",
            detail: error.to_string(),
        })?;
        let response = sender.send_request(request).await.map_err(http)?;
        match response.status() {
            status if status.is_client_error() || status.is_server_error() => {
                Err(self.refusal(status, response).await)
            }
            _ => Ok(response),
        }
    }

    async fn refusal(&self, status: StatusCode, response: Response<Incoming>) -> ClientError {
        let after = response.headers().get(header::RETRY_AFTER);
        let after = after.and_then(|value| value.to_str().ok()?.parse().ok());
        let body = self.read(response).await.unwrap_or_default();
        let value: Value = serde_json::from_slice(&body).unwrap_or_default();
        let (message, code) = error_of(&value)
            .unwrap_or_else(|| (String::from_utf8_lossy(&body).chars().take(300).collect(), None));
        ClientError::Refused { status, message, code, retry_after: after.map(Duration::from_secs) }
    }

    async fn json(&self, response: Response<Incoming>) -> Result<Value, ClientError> {
        let body = self.read(response).await?;
        serde_json::from_slice(&body)
            .map_err(|error| ClientError::Malformed { expected: "JSON", detail: error.to_string() })
    }

    async fn read(&self, response: Response<Incoming>) -> Result<Vec<u8>, ClientError> {
        let mut body = response.into_body();
        let mut bytes = Vec::new();
        while let Some(frame) = body.frame().await {
            let frame = frame.map_err(|source| ClientError::Http {
                authority: self.authority.clone(),
                source,
            })?;
            bytes.extend_from_slice(frame.data_ref().unwrap_or(&Bytes::new()));
            if bytes.len() > MAX_BODY_BYTES {
                let detail = format!("more than {MAX_BODY_BYTES} bytes");
                return Err(ClientError::Malformed { expected: "answer", detail });
            }
        }
        Ok(bytes)
    }
}

/// A streamed answer. Dropping it closes the connection.
#[derive(Debug)]
pub struct EventStream {
    authority: String,
    body: Incoming,
    events: Events,
}

impl EventStream {
    /// The next event's JSON; `None` after `[DONE]`. Cancellation-safe.
    ///
    /// # Errors
    /// An error event, a stream that ends without `[DONE]`, or a broken connection.
    pub async fn next(&mut self) -> Result<Option<Value>, ClientError> {
        loop {
            if let Some(data) = self.events.pop() {
                if data == "[DONE]" {
                    return Ok(None);
                }
                let value: Value = serde_json::from_str(&data).map_err(|error| {
                    let detail = format!("{error} in {data:.200}");
                    ClientError::Malformed { expected: "JSON event", detail }
                })?;
                return match error_of(&value) {
                    Some((message, code)) => Err(ClientError::Failed { message, code }),
                    None => Ok(Some(value)),
                };
            }
            let frame = self.body.frame().await.ok_or(ClientError::Truncated)?;
            let frame = frame.map_err(|source| ClientError::Http {
                authority: self.authority.clone(),
                source,
            })?;
            self.events.push(frame.data_ref().unwrap_or(&Bytes::new()))?;
        }
    }
}

/// `message` and `code` of OpenAI's error object.
fn error_of(value: &Value) -> Option<(String, Option<String>)> {
    let error = value.get("error")?;
    let message = error.get("message").and_then(Value::as_str).map(str::to_owned);
    let code = error.get("code").and_then(Value::as_str).map(str::to_owned);
    Some((message.unwrap_or_else(|| error.to_string()), code))
}

/// Cuts a byte stream into server-sent events, wherever the pieces break.
#[derive(Debug, Default)]
struct Events {
    bytes: Vec<u8>,
    /// No event ends before this byte.
    searched: usize,
}

impl Events {
    fn push(&mut self, bytes: &[u8]) -> Result<(), ClientError> {
        self.bytes.extend_from_slice(bytes);
        if self.bytes.len() > MAX_BODY_BYTES {
            let detail = format!("an event of more than {MAX_BODY_BYTES} bytes");
            return Err(ClientError::Malformed { expected: "event stream", detail });
        }
        Ok(())
    }

    /// The data of the next whole event that has any.
    fn pop(&mut self) -> Option<String> {
        loop {
            let (end, next) = self.find_end()?;
            let text = String::from_utf8_lossy(&self.bytes[..end]).into_owned();
            self.bytes.drain(..next);
            self.searched = 0;
            let lines = text.lines().filter_map(|line| line.strip_prefix("data:"));
            let data: Vec<&str> =
                lines.map(|line| line.strip_prefix(' ').unwrap_or(line)).collect();
            if !data.is_empty() {
                return Some(data.join("\n"));
            }
        }
    }

    /// Where the first event ends and the next begins: at an empty line.
    fn find_end(&mut self) -> Option<(usize, usize)> {
        for at in self.searched..self.bytes.len() {
            for blank in [&b"\n\n"[..], b"\r\n\r\n"] {
                if self.bytes[at..].starts_with(blank) {
                    return Some((at, at + blank.len()));
                }
            }
        }
        // The blank line may be cut anywhere.
        self.searched = self.bytes.len().saturating_sub(3);
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_understood_or_refused() {
        for (url, authority, prefix) in [
            ("http://127.0.0.1:8080", "127.0.0.1:8080", ""),
            ("127.0.0.1:8080/", "127.0.0.1:8080", ""),
            ("http://box/v1", "box:80", ""),
            ("http://[::1]:9/api/v1/", "[::1]:9", "/api"),
        ] {
            let client = Client::new(url, None).expect(url);
            assert_eq!((client.authority(), client.prefix.as_str()), (authority, prefix));
        }
        for url in ["https://box", "", "http://", "ftp://box"] {
            assert!(matches!(Client::new(url, None), Err(ClientError::BadUrl { .. })), "{url}");
        }
    }

    #[test]
    fn events_survive_any_cut() {
        let text =
            ": hi\n\ndata: {\"a\":\"é\"}\r\n\r\nevent: x\ndata:1\ndata: 2\n\ndata: [DONE]\n\n";
        let want = ["{\"a\":\"é\"}", "1\n2", "[DONE]"];
        for size in 1..text.len() {
            let mut events = Events::default();
            let mut got = Vec::new();
            for piece in text.as_bytes().chunks(size) {
                events.push(piece).expect("small");
                got.extend(std::iter::from_fn(|| events.pop()));
            }
            assert_eq!(got, want, "pieces of {size}");
        }
    }
}
