//! The endpoints: what each answers, in which order a request is checked, and how it is read.
//!
//! A request that may start work is checked in this order: drain, API key, content type, size,
//! JSON, fields, context length; then the router accepts or refuses it. Nothing runs before that.

use super::auth::Keys;
use super::error::ApiError;
use super::exchange::{Exchange, Opening, Update};
use super::limits::Limits;
use super::prepare::prepare;
use super::registry::Registry;
use super::request::{Asked, Endpoint, Known};
use super::sse::Sse;
use super::text::TextModel;
use super::wire::{Shapes, Whole};
use super::{MetricsText, Ready, StatusJson};
use crate::messages::KeySpace;
use axum::body::{Body, Bytes};
use axum::extract::{Path, Query, Request, State};
use axum::http::{HeaderMap, HeaderName, HeaderValue, StatusCode, header};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use dunlin_runtime::{Address, wall};
use futures_util::{FutureExt, StreamExt};
use serde_json::{Value, json};
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use tokio::sync::watch;
use tracing::Instrument;

/// Ask for Dunlin's own object beside the usage: which nodes and devices served the request.
pub const DETAILS: HeaderName = HeaderName::from_static("x-dunlin-details");

/// Bodies below this are tokenised where they are; larger ones on a thread of their own.
const INLINE_BYTES: usize = 8 << 10;

/// What every connection shares.
pub struct Shared {
    pub registry: Arc<Registry>,
    pub model: Arc<dyn TextModel>,
    pub key_space: KeySpace,
    /// Names the model answers to; the first is the one it is listed under.
    pub models: Vec<String>,
    pub fingerprint: String,
    pub limits: Limits,
    pub keys: Keys,
    pub reply_to: Address,
    pub ready: Ready,
    pub metrics: MetricsText,
    pub status: StatusJson,
    pub started: u64,
    pub draining: AtomicBool,
    /// Requests that may have work with the router.
    pub busy: watch::Sender<usize>,
}

/// Counts one request as busy for as long as it lives.
pub struct Busy(Arc<Shared>);

impl Drop for Busy {
    fn drop(&mut self) {
        self.0.busy.send_modify(|count| *count = count.saturating_sub(1));
    }
}

pub fn routes(shared: Arc<Shared>) -> Router {
    let chat = |State(shared): State<Arc<Shared>>, request: Request| {
        generate(shared, Endpoint::Chat, request)
    };
    let completions = |State(shared): State<Arc<Shared>>, request: Request| {
        generate(shared, Endpoint::Completions, request)
    };
    Router::new()
        .route("/v1/chat/completions", post(chat))
        .route("/v1/completions", post(completions))
        .route("/v1/models", get(models))
        .route("/v1/models/{*id}", get(model))
        .route("/health", get(health))
        .route("/live", get(|| async { Json(json!({"status": "live"})) }))
        .route("/metrics", get(metrics_text))
        .route("/cluster/status", get(cluster_status))
        .fallback(not_found)
        .method_not_allowed_fallback(method_not_allowed)
        .layer(middleware::from_fn(observe))
        .with_state(shared)
}

impl Shared {
    /// Counted before the flag is read: a drain sees either the count or the refusal.
    fn enter(self: &Arc<Self>) -> Result<Busy, ApiError> {
        self.busy.send_modify(|count| *count += 1);
        let busy = Busy(self.clone());
        if self.draining.load(Ordering::SeqCst) {
            let message = "This node is draining; it finishes what it has and takes nothing new.";
            return Err(ApiError::unavailable("draining", message, Duration::from_secs(5)));
        }
        Ok(busy)
    }

    fn model_object(&self, id: &str) -> Value {
        json!({
            "id": id,
            "object": "model",
            "created": self.started,
            "owned_by": "dunlin",
            "max_model_len": self.model.context(),
        })
    }
}

async fn generate(
    shared: Arc<Shared>,
    endpoint: Endpoint,
    request: Request,
) -> Result<Response, ApiError> {
    let began = Instant::now();
    let busy = shared.enter()?;
    let tenant = shared.keys.tenant(request.headers())?.to_owned();
    let details = request.headers().contains_key(DETAILS);
    check_content_type(request.headers())?;
    let body = read_body(request, &shared.limits).await?;
    let (asked, prompts) = understand(&shared, endpoint, body, &tenant).await?;
    let opening = Opening {
        registry: &shared.registry,
        model: &shared.model,
        limits: &shared.limits,
        reply_to: shared.reply_to.clone(),
        tenant: &tenant,
        endpoint,
        began,
    };
    let exchange = opening.open(&asked, &prompts).await?;
    drop(prompts);
    let prefix = if endpoint == Endpoint::Chat { "chatcmpl" } else { "cmpl" };
    let shapes = Shapes {
        endpoint,
        id: format!("{prefix}-{:016x}", exchange.first_id()),
        created: wall::unix_seconds(),
        model: shared.models.first().cloned().unwrap_or_default(),
        fingerprint: shared.fingerprint.clone(),
        text_model: shared.model.clone(),
        logprobs: asked.sampling.logprobs,
        include_usage: asked.include_usage,
        details,
    };
    let span = tracing::info_span!("request", id = %shapes.id, %tenant);
    let id = HeaderValue::from_str(&shapes.id);
    let mut response = if asked.stream {
        streamed(shapes, exchange, busy, &shared.limits).instrument(span).await?
    } else {
        whole(shapes, exchange).instrument(span).await?
    };
    if let Ok(id) = id {
        response.headers_mut().insert("x-request-id", id);
    }
    Ok(response)
}

async fn streamed(
    shapes: Shapes,
    mut exchange: Exchange,
    busy: Busy,
    limits: &Limits,
) -> Result<Response, ApiError> {
    // Until the first event, a failure is still an HTTP status.
    let first = tokio::time::timeout(limits.first_event, exchange.next()).await;
    let first = match first {
        Ok(Some(Err(error))) => return Err(error),
        Ok(Some(Ok(update))) => Some(update),
        Ok(None) | Err(_) => None,
    };
    let mut sse = Sse::new(shapes, exchange, limits.keep_alive, busy);
    if let Some(update) = first {
        sse.update(&update);
    }
    Ok(sse.into_response())
}

async fn whole(shapes: Shapes, mut exchange: Exchange) -> Result<Response, ApiError> {
    let mut answers = vec![Whole::default(); exchange.answers()];
    while let Some(update) = exchange.next().await {
        match update? {
            Update::Piece { choice, piece } => {
                if let Some(answer) = answers.get_mut(choice) {
                    answer.text.push_str(&piece.text);
                    answer.entries.extend(piece.entries);
                }
            }
            Update::Finished { choice, reason } => {
                if let Some(answer) = answers.get_mut(choice) {
                    answer.reason = Some(reason);
                }
            }
        }
    }
    let totals = exchange.settle().await;
    let json = HeaderValue::from_static("application/json");
    Ok(([(header::CONTENT_TYPE, json)], shapes.whole(&answers, &totals)).into_response())
}

async fn understand(
    shared: &Arc<Shared>,
    endpoint: Endpoint,
    body: Bytes,
    tenant: &str,
) -> Result<(Asked, Vec<super::prepare::Prompt>), ApiError> {
    let long = body.len() > INLINE_BYTES;
    let (shared, tenant) = (shared.clone(), tenant.to_owned());
    let work = move || {
        let known =
            Known { models: &shared.models, vocab: shared.model.vocab(), limits: &shared.limits };
        let mut asked = Asked::parse(&body, endpoint, &known)?;
        let prompts = prepare(&mut asked, endpoint, &shared.model, (shared.key_space, &tenant))?;
        Ok((asked, prompts))
    };
    if !long {
        return work();
    }
    // A long prompt takes milliseconds, which other streams on this thread would feel.
    let done = tokio::task::spawn_blocking(work).await;
    done.unwrap_or_else(|error| Err(ApiError::internal(format!("tokenisation: {error}"))))
}

fn check_content_type(headers: &HeaderMap) -> Result<(), ApiError> {
    let Some(value) = headers.get(header::CONTENT_TYPE) else { return Ok(()) };
    let kind = value.to_str().unwrap_or("").split(';').next().unwrap_or("").trim();
    if kind.eq_ignore_ascii_case("application/json") {
        return Ok(());
    }
    let message = format!("Content-Type is '{kind}'; expected 'application/json'.");
    Err(ApiError::client(StatusCode::UNSUPPORTED_MEDIA_TYPE, "unsupported_media_type", message))
}

async fn read_body(request: Request, limits: &Limits) -> Result<Bytes, ApiError> {
    let mut frames = request.into_body().into_data_stream();
    let mut body = Vec::new();
    let read = async {
        while let Some(frame) = frames.next().await {
            let frame = frame.map_err(|error| {
                ApiError::invalid(format!("The request body could not be read: {error}."))
            })?;
            if body.len().saturating_add(frame.len()) > limits.body_bytes {
                return Err(too_large(limits));
            }
            body.extend_from_slice(&frame);
        }
        Ok(())
    };
    match tokio::time::timeout(limits.body_read, read).await {
        Ok(Ok(())) => Ok(body.into()),
        Ok(Err(error)) => {
            // A client that is still sending would miss the answer: take a while to listen.
            let rest = async { while let Some(Ok(_)) = frames.next().await {} };
            let _ = tokio::time::timeout(Duration::from_secs(1), rest).await;
            Err(error)
        }
        Err(_) => {
            let seconds = limits.body_read.as_secs();
            let message = format!("The request body did not arrive within {seconds} s.");
            Err(ApiError::client(StatusCode::REQUEST_TIMEOUT, "body_timeout", message))
        }
    }
}

fn too_large(limits: &Limits) -> ApiError {
    let message = format!("The request body is larger than {} bytes.", limits.body_bytes);
    ApiError::client(StatusCode::PAYLOAD_TOO_LARGE, "request_too_large", message)
}

async fn models(
    State(shared): State<Arc<Shared>>,
    headers: HeaderMap,
) -> Result<Json<Value>, ApiError> {
    shared.keys.tenant(&headers)?;
    let data: Vec<Value> = shared.models.iter().map(|id| shared.model_object(id)).collect();
    Ok(Json(json!({"object": "list", "data": data})))
}

async fn model(
    State(shared): State<Arc<Shared>>,
    headers: HeaderMap,
    Path(id): Path<String>,
) -> Result<Json<Value>, ApiError> {
    shared.keys.tenant(&headers)?;
    if shared.models.contains(&id) {
        return Ok(Json(shared.model_object(&id)));
    }
    let message = format!("The model '{id}' is not served here.");
    let error = ApiError::client(StatusCode::NOT_FOUND, "model_not_found", message);
    Err(ApiError { param: Some("model".into()), ..error })
}

async fn health(State(shared): State<Arc<Shared>>) -> Response {
    let state = if shared.draining.load(Ordering::SeqCst) {
        Err("draining".to_owned())
    } else {
        (shared.ready)()
    };
    let (code, mut body) = match state {
        Ok(missing) if missing.is_empty() => (StatusCode::OK, json!({"status": "ready"})),
        Ok(missing) => (StatusCode::OK, json!({"status": "degraded", "reason": missing})),
        Err(reason) => {
            let body = json!({"status": "not ready", "reason": reason});
            (StatusCode::SERVICE_UNAVAILABLE, body)
        }
    };
    if shared.registry.node.faults().is_armed() {
        body["faults"] = json!("ARMED: this node breaks on purpose");
    }
    (code, Json(body)).into_response()
}

/// This process's, or those of `?node=NAME`.
async fn metrics_text(
    State(shared): State<Arc<Shared>>,
    Query(asked): Query<MetricsQuery>,
) -> Result<Response, ApiError> {
    let text = match asked.node {
        Some(name) => {
            super::metrics::of_node(&shared.registry.node, &shared.metrics, &name).await?
        }
        None => (shared.metrics)(),
    };
    let kind = HeaderValue::from_static("text/plain; version=0.0.4; charset=utf-8");
    Ok(([(header::CONTENT_TYPE, kind)], text).into_response())
}

#[derive(serde::Deserialize)]
struct MetricsQuery {
    node: Option<String>,
}

async fn cluster_status(
    State(shared): State<Arc<Shared>>,
    headers: HeaderMap,
) -> Result<Json<Value>, ApiError> {
    shared.keys.tenant(&headers)?;
    Ok(Json((shared.status)().await))
}

async fn not_found(request: Request) -> ApiError {
    let message = format!("Unknown path: {} {}.", request.method(), request.uri().path());
    ApiError::client(StatusCode::NOT_FOUND, "unknown_url", message)
}

async fn method_not_allowed(request: Request) -> ApiError {
    let (method, path) = (request.method(), request.uri().path());
    let message = format!("Not allowed: {method} {path}.");
    ApiError::client(StatusCode::METHOD_NOT_ALLOWED, "method_not_allowed", message)
}

/// Counts every response under a path from a closed list, and turns a panic into a 500: the
/// client learns what happened, and the connection's other requests go on.
async fn observe(request: Request, next: Next) -> Response {
    let path = label(request.uri().path());
    let answered = AssertUnwindSafe(next.run(request)).catch_unwind().await;
    let response = answered.unwrap_or_else(|_| {
        ApiError::internal("the gateway failed on this request").into_response()
    });
    let code = response.status().as_str().to_owned();
    metrics::counter!("dunlin_http_requests_total", "path" => path, "code" => code).increment(1);
    response.map(Body::new)
}

fn label(path: &str) -> &'static str {
    const KNOWN: [&str; 7] = [
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/models",
        "/health",
        "/live",
        "/metrics",
        "/cluster/status",
    ];
    match KNOWN.iter().find(|known| **known == path) {
        Some(known) => known,
        None if path.starts_with("/v1/models/") => "/v1/models",
        None => "other",
    }
}
