//! What a client is told when it does not get an answer: OpenAI's error object, one shape for
//! every status, in a body or (once a stream has begun) in an SSE event.

use crate::messages::{FailureCode, Refusal};
use axum::Json;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde::Serialize;
use std::time::Duration;

/// An error as the client sees it.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{status}: {message}")]
pub struct ApiError {
    pub status: StatusCode,
    pub message: String,
    /// OpenAI's `type`: whose fault it is.
    pub kind: &'static str,
    /// The request field that is to blame.
    pub param: Option<String>,
    pub code: Option<&'static str>,
    pub retry_after: Option<Duration>,
}

#[derive(Serialize)]
struct ErrorObject<'a> {
    message: &'a str,
    r#type: &'a str,
    param: Option<&'a str>,
    code: Option<&'a str>,
}

/// `{"error": {...}}`.
#[derive(Serialize)]
pub struct ErrorBody<'a> {
    error: ErrorObject<'a>,
}

impl ApiError {
    fn new(status: StatusCode, kind: &'static str, message: impl Into<String>) -> Self {
        let message = message.into();
        Self { status, message, kind, param: None, code: None, retry_after: None }
    }

    /// 400: the request as a whole is wrong.
    pub fn invalid(message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, "invalid_request_error", message)
    }

    /// 400: field `param` is wrong.
    pub fn field(param: impl Into<String>, code: &'static str, message: impl Into<String>) -> Self {
        Self { param: Some(param.into()), code: Some(code), ..Self::invalid(message) }
    }

    /// Any other 4xx.
    pub fn client(status: StatusCode, code: &'static str, message: impl Into<String>) -> Self {
        Self { code: Some(code), ..Self::new(status, "invalid_request_error", message) }
    }

    /// 500: ours.
    pub fn internal(message: impl Into<String>) -> Self {
        let status = StatusCode::INTERNAL_SERVER_ERROR;
        Self { code: Some("internal_error"), ..Self::new(status, "server_error", message) }
    }

    /// 503: nothing was started; the client may try again after `retry_after`.
    pub fn unavailable(
        code: &'static str,
        message: impl Into<String>,
        retry_after: Duration,
    ) -> Self {
        let mut error =
            Self::new(StatusCode::SERVICE_UNAVAILABLE, "service_unavailable_error", message);
        error.code = Some(code);
        error.retry_after = Some(retry_after);
        error
    }

    /// A refusal by the router. `param` is the field that sized the request.
    pub fn refused(refusal: &Refusal, param: &str) -> Self {
        let message = refusal.to_string();
        match refusal {
            Refusal::NeverFits { .. } => Self::field(param, "context_length_exceeded", message),
            Refusal::Overloaded { retry_after_ms, .. } => Self {
                kind: "rate_limit_error",
                retry_after: Some(Duration::from_millis(*retry_after_ms)),
                ..Self::client(StatusCode::TOO_MANY_REQUESTS, "overloaded", message)
            },
            Refusal::Draining => Self::unavailable("draining", message, Duration::from_secs(5)),
            Refusal::NotReady { .. } => {
                Self::unavailable("not_ready", message, Duration::from_secs(1))
            }
            Refusal::Duplicate(_) => Self::internal(message),
        }
    }

    /// A failure after acceptance.
    pub fn failed(code: FailureCode, message: &str) -> Self {
        let (status, code) = match code {
            FailureCode::Deadline => (StatusCode::GATEWAY_TIMEOUT, "deadline_exceeded"),
            FailureCode::Poison => (StatusCode::INTERNAL_SERVER_ERROR, "poison_request"),
            FailureCode::NotFinite => (StatusCode::INTERNAL_SERVER_ERROR, "logits_not_finite"),
            FailureCode::NeverFits => (StatusCode::INTERNAL_SERVER_ERROR, "never_fits"),
            FailureCode::Internal => (StatusCode::INTERNAL_SERVER_ERROR, "internal_error"),
        };
        Self { code: Some(code), ..Self::new(status, "server_error", message) }
    }

    /// The deadline passed and nobody told us why.
    pub fn timed_out(message: impl Into<String>) -> Self {
        let status = StatusCode::GATEWAY_TIMEOUT;
        Self { code: Some("deadline_exceeded"), ..Self::new(status, "server_error", message) }
    }

    pub fn body(&self) -> ErrorBody<'_> {
        ErrorBody {
            error: ErrorObject {
                message: &self.message,
                r#type: self.kind,
                param: self.param.as_deref(),
                code: self.code,
            },
        }
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let mut response = (self.status, Json(self.body())).into_response();
        if let Some(wait) = self.retry_after {
            // Whole seconds, rounded up: coming back sooner would only be refused again.
            let seconds = wait.as_millis().div_ceil(1000).max(1);
            if let Ok(value) = HeaderValue::from_str(&seconds.to_string()) {
                response.headers_mut().insert(header::RETRY_AFTER, value);
            }
        }
        if self.status == StatusCode::UNAUTHORIZED {
            let bearer = HeaderValue::from_static("Bearer");
            response.headers_mut().insert(header::WWW_AUTHENTICATE, bearer);
        }
        response
    }
}
