//! Typed access to the fields of a JSON object, with errors that name the field in OpenAI's
//! words. `null` is the same as absent, as it is there.

use super::error::ApiError;
use serde_json::{Map, Value};
use std::fmt::Display;
use std::ops::RangeInclusive;

/// A JSON object and the path that leads to it (`""` for the body, `"stream_options."`...).
pub struct Fields<'a> {
    map: &'a Map<String, Value>,
    path: String,
}

impl<'a> Fields<'a> {
    pub fn new(map: &'a Map<String, Value>, path: impl Into<String>) -> Self {
        Self { map, path: path.into() }
    }

    pub fn param(&self, name: &str) -> String {
        format!("{}{name}", self.path)
    }

    pub fn get(&self, name: &str) -> Option<&'a Value> {
        self.map.get(name).filter(|v| !v.is_null())
    }

    /// Names of the fields that are present and not null.
    pub fn names(&self) -> impl Iterator<Item = &'a str> {
        self.map.iter().filter(|(_, v)| !v.is_null()).map(|(k, _)| k.as_str())
    }

    pub fn bool(&self, name: &str) -> Result<Option<bool>, ApiError> {
        match self.get(name) {
            None => Ok(None),
            Some(Value::Bool(b)) => Ok(Some(*b)),
            Some(other) => Err(self.wrong_type(name, "a boolean", other)),
        }
    }

    pub fn str(&self, name: &str) -> Result<Option<&'a str>, ApiError> {
        match self.get(name) {
            None => Ok(None),
            Some(Value::String(s)) => Ok(Some(s)),
            Some(other) => Err(self.wrong_type(name, "a string", other)),
        }
    }

    pub fn object(&self, name: &str) -> Result<Option<Fields<'a>>, ApiError> {
        match self.get(name) {
            None => Ok(None),
            Some(Value::Object(map)) => Ok(Some(Fields::new(map, format!("{}{name}.", self.path)))),
            Some(other) => Err(self.wrong_type(name, "an object", other)),
        }
    }

    pub fn float(&self, name: &str, range: RangeInclusive<f64>) -> Result<Option<f64>, ApiError> {
        let Some(value) = self.get(name) else { return Ok(None) };
        let Some(number) = value.as_f64().filter(|x| x.is_finite()) else {
            return Err(self.wrong_type(name, "a decimal", value));
        };
        self.within(name, "decimal", number, range).map(Some)
    }

    pub fn int(&self, name: &str, range: RangeInclusive<i64>) -> Result<Option<i64>, ApiError> {
        let Some(value) = self.get(name) else { return Ok(None) };
        let number = match value.as_i64() {
            Some(number) => number,
            // Beyond i64 is still an integer: say that it is too large, not that it is no integer.
            None if value.is_u64() => i64::MAX,
            None => return Err(self.wrong_type(name, "an integer", value)),
        };
        self.within(name, "integer", number, range).map(Some)
    }

    pub fn uint(&self, name: &str, range: RangeInclusive<u32>) -> Result<Option<u32>, ApiError> {
        let wide = i64::from(*range.start())..=i64::from(*range.end());
        Ok(self.int(name, wide)?.and_then(|number| u32::try_from(number).ok()))
    }

    pub fn wrong_type(&self, name: &str, expected: &str, got: &Value) -> ApiError {
        wrong_type(&self.param(name), expected, got)
    }

    fn within<T: PartialOrd + Display>(
        &self,
        name: &str,
        what: &str,
        number: T,
        range: RangeInclusive<T>,
    ) -> Result<T, ApiError> {
        let param = self.param(name);
        let (low, high) = (range.start(), range.end());
        if number < *low {
            let code = if what == "integer" {
                "integer_below_min_value"
            } else {
                "decimal_below_min_value"
            };
            let message = format!(
                "Invalid '{param}': {what} below minimum value. Expected a value >= {low}, but \
                 got {number} instead."
            );
            return Err(ApiError::field(param, code, message));
        }
        if number > *high {
            let code = if what == "integer" {
                "integer_above_max_value"
            } else {
                "decimal_above_max_value"
            };
            let message = format!(
                "Invalid '{param}': {what} above maximum value. Expected a value <= {high}, but \
                 got {number} instead."
            );
            return Err(ApiError::field(param, code, message));
        }
        Ok(number)
    }
}

pub fn wrong_type(param: &str, expected: &str, got: &Value) -> ApiError {
    let got = match got {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(n) if n.is_f64() => "a decimal number",
        Value::Number(_) => "an integer",
        Value::String(_) => "a string",
        Value::Array(_) => "an array",
        Value::Object(_) => "an object",
    };
    let message =
        format!("Invalid type for '{param}': expected {expected}, but got {got} instead.");
    ApiError::field(param, "invalid_type", message)
}

/// A token id within the vocabulary.
pub fn token_id(value: &Value, param: &str, vocab: u32) -> Result<u32, ApiError> {
    let Some(number) = value.as_i64() else {
        return Err(wrong_type(param, "an integer", value));
    };
    u32::try_from(number).ok().filter(|id| *id < vocab).ok_or_else(|| {
        let message =
            format!("Invalid '{param}': token id {number} is not in the vocabulary (0..{vocab}).");
        ApiError::field(param, "invalid_value", message)
    })
}
