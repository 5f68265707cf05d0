//! API keys. Without any configured, everybody is the tenant `default`.

use super::error::ApiError;
use axum::http::{HeaderMap, StatusCode, header};

/// The tenant of requests that bring no key, where none is needed.
pub const DEFAULT_TENANT: &str = "default";

/// A key and whose it is.
#[derive(Clone)]
pub struct ApiKey {
    /// The tenant: cache isolation and fairness go by it.
    pub name: String,
    pub secret: String,
}

impl std::fmt::Debug for ApiKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ApiKey").field("name", &self.name).finish_non_exhaustive()
    }
}

/// The keys' digests. Digests are compared in constant time, and their length tells nothing of
/// a key's.
#[derive(Clone, Default)]
pub struct Keys(Vec<(String, blake3::Hash)>);

impl Keys {
    pub fn new(keys: &[ApiKey]) -> Self {
        Self(keys.iter().map(|k| (k.name.clone(), blake3::hash(k.secret.as_bytes()))).collect())
    }

    /// The tenant that `headers` speak for.
    ///
    /// # Errors
    /// 401 if keys are configured and none of them was given.
    pub fn tenant(&self, headers: &HeaderMap) -> Result<&str, ApiError> {
        if self.0.is_empty() {
            return Ok(DEFAULT_TENANT);
        }
        let refused =
            |message: &str| ApiError::client(StatusCode::UNAUTHORIZED, "invalid_api_key", message);
        let Some(value) = headers.get(header::AUTHORIZATION) else {
            return Err(refused("No API key. Send it as 'Authorization: Bearer KEY'."));
        };
        let given = value.as_bytes();
        let bearer = given.get(..7).is_some_and(|scheme| scheme.eq_ignore_ascii_case(b"bearer "));
        let secret = if bearer { given.get(7..).unwrap_or_default() } else { &[] };
        let digest = blake3::hash(secret.trim_ascii());
        // Every key is compared, whichever matches.
        let found =
            self.0.iter().fold(
                None,
                |found, (name, known)| {
                    if *known == digest { Some(name.as_str()) } else { found }
                },
            );
        found.ok_or_else(|| refused("Incorrect API key."))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tenant(keys: &Keys, value: Option<&str>) -> Result<String, ApiError> {
        let mut headers = HeaderMap::new();
        if let Some(value) = value {
            headers.insert(header::AUTHORIZATION, value.parse().unwrap());
        }
        keys.tenant(&headers).map(str::to_owned)
    }

    #[test]
    fn a_key_names_its_tenant() {
        let key = |name: &str, secret: &str| ApiKey { name: name.into(), secret: secret.into() };
        let keys = Keys::new(&[key("ann", "s1"), key("bob", "s2")]);
        assert_eq!(tenant(&keys, Some("Bearer s2")).unwrap(), "bob");
        assert_eq!(tenant(&keys, Some("bearer s1")).unwrap(), "ann");
        for wrong in [None, Some("Bearer s3"), Some("Basic s1"), Some("Bearer "), Some("s1")] {
            let error = tenant(&keys, wrong).unwrap_err();
            assert_eq!(error.status, StatusCode::UNAUTHORIZED);
        }
        assert_eq!(tenant(&Keys::default(), None).unwrap(), DEFAULT_TENANT);
    }

    #[test]
    fn a_secret_is_not_printed() {
        let key = ApiKey { name: "ann".into(), secret: "hush".into() };
        assert!(!format!("{key:?}").contains("hush"));
    }
}
