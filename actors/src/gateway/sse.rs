//! A streamed answer: server-sent events made as the client takes them.
//!
//! The stream ends once, always with `data: [DONE]`. A failure after the first byte is one
//! `data: {"error": ...}` before it, as vLLM does; OpenAI's clients raise it.

use super::error::ApiError;
use super::exchange::{Exchange, Update};
use super::wire::Shapes;
use axum::body::{Body, Bytes};
use axum::http::{HeaderValue, header};
use axum::response::{IntoResponse, Response};
use futures_util::stream;
use std::convert::Infallible;
use std::time::Duration;

/// Events that are ready are sent together, up to about this many bytes.
const WRITE_BYTES: usize = 16 << 10;

/// What is left of a streamed response. Dropping it drops the exchange, which cancels its work.
pub struct Sse<T> {
    shapes: Shapes,
    exchange: Option<Exchange>,
    keep_alive: Duration,
    buffer: String,
    /// Held for as long as the stream lives.
    _open: T,
}

impl<T: Send + 'static> Sse<T> {
    /// A stream whose first events are already in its buffer.
    pub fn new(shapes: Shapes, exchange: Exchange, keep_alive: Duration, open: T) -> Self {
        let mut sse = Self {
            shapes,
            exchange: Some(exchange),
            keep_alive,
            buffer: String::new(),
            _open: open,
        };
        let answers = sse.exchange.as_ref().map_or(0, Exchange::answers);
        for index in 0..answers {
            if let Some(chunk) = sse.shapes.first_chunk(index) {
                sse.data(&chunk);
            }
        }
        sse
    }

    pub fn update(&mut self, update: &Update) {
        let chunk = match update {
            Update::Piece { choice, piece } => self.shapes.piece_chunk(*choice, piece),
            Update::Finished { choice, reason } => self.shapes.finish_chunk(*choice, *reason),
        };
        self.data(&chunk);
    }

    pub fn into_response(self) -> Response {
        let events = stream::unfold(self, |mut sse| async move {
            let bytes = sse.next().await?;
            Some((Ok::<Bytes, Infallible>(bytes), sse))
        });
        let mut response = Body::from_stream(events).into_response();
        let headers = response.headers_mut();
        let kind = HeaderValue::from_static("text/event-stream; charset=utf-8");
        headers.insert(header::CONTENT_TYPE, kind);
        headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
        // nginx would otherwise collect the events.
        headers.insert("x-accel-buffering", HeaderValue::from_static("no"));
        response
    }

    async fn next(&mut self) -> Option<Bytes> {
        if self.buffer.is_empty() {
            let exchange = self.exchange.as_mut()?;
            match tokio::time::timeout(self.keep_alive, exchange.next()).await {
                Err(_) => self.buffer.push_str(": keep-alive\n\n"),
                Ok(step) => self.step(step).await,
            }
        }
        while self.buffer.len() < WRITE_BYTES {
            let Some(step) = self.exchange.as_mut().and_then(Exchange::ready) else { break };
            self.step(Some(step)).await;
        }
        Some(Bytes::from(std::mem::take(&mut self.buffer)))
    }

    async fn step(&mut self, step: Option<Result<Update, ApiError>>) {
        match step {
            Some(Ok(update)) => return self.update(&update),
            Some(Err(error)) => {
                if let Ok(body) = serde_json::to_string(&error.body()) {
                    self.data(&body);
                }
            }
            None => {
                let Some(exchange) = &mut self.exchange else { return };
                // Nothing waits for the counts but their own chunk.
                if self.shapes.include_usage || self.shapes.details {
                    let totals = exchange.settle().await;
                    if let Some(chunk) = self.shapes.usage_chunk(&totals) {
                        self.data(&chunk);
                    }
                }
            }
        }
        self.data("[DONE]");
        self.exchange = None;
    }

    fn data(&mut self, data: &str) {
        self.buffer.push_str("data: ");
        self.buffer.push_str(data);
        self.buffer.push_str("\n\n");
    }
}
