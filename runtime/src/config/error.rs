//! What is wrong with a configuration, where, and how to mend it.

use std::fmt;
use std::ops::Deref;

/// One error in a configuration. Its `Display` shows the line, as rustc does.
#[derive(Debug, Clone, PartialEq)]
pub struct ConfigError(Box<ErrorDetails>);

/// What a [`ConfigError`] derefs to.
#[derive(Debug, Clone, PartialEq)]
pub struct ErrorDetails {
    pub file: String,
    /// Dotted path of the key; empty if there is none.
    pub key: String,
    pub problem: Problem,
    /// What to do about it.
    pub mend: String,
    /// `None` for a value that the file does not hold.
    pub place: Option<Place>,
    /// `--set KEY=VALUE`, if the value came from there.
    pub from_override: Option<String>,
}

/// A stretch of one line.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Place {
    /// From 1.
    pub line: usize,
    /// From 1, in characters.
    pub column: usize,
    /// In characters, at least 1.
    pub width: usize,
    pub text: String,
}

#[derive(Debug, Clone, PartialEq)]
pub enum Problem {
    Unreadable {
        reason: String,
    },
    Syntax {
        message: String,
    },
    UnknownKey {
        key: String,
        section: String,
    },
    Missing {
        key: String,
        section: String,
    },
    WrongType {
        key: String,
        expected: &'static str,
        found: &'static str,
    },
    /// The right type, but not a value that can be used.
    BadValue {
        value: String,
        reason: String,
    },
    OutOfRange {
        value: String,
        min: u64,
        max: u64,
    },
    /// `first` says where the other one is.
    Duplicate {
        what: &'static str,
        value: String,
        first: String,
    },
    NotFound {
        what: &'static str,
        value: String,
    },
    /// It contradicts something else in the file.
    Conflict {
        reason: String,
    },
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Problem::Unreadable { reason } => write!(f, "the file cannot be read: {reason}"),
            Problem::Syntax { message } => write!(f, "not TOML: {message}"),
            Problem::UnknownKey { key, section } => write!(f, "unknown key `{key}` in {section}"),
            Problem::Missing { key, section } => write!(f, "{section} has no `{key}`"),
            Problem::WrongType { key, expected, found } => {
                write!(f, "`{key}` must be {expected}, not {found}")
            }
            Problem::BadValue { value, reason } => write!(f, "{value}: {reason}"),
            Problem::OutOfRange { value, min, max } if *max == u64::MAX => {
                write!(f, "{value} is too small; the least is {min}")
            }
            Problem::OutOfRange { value, min, max } => {
                write!(f, "{value} is out of range: from {min} to {max}")
            }
            Problem::Duplicate { what, value, first } => {
                write!(f, "{what} {value} is there twice; the first is {first}")
            }
            Problem::NotFound { what, value } => write!(f, "there is no {what} {value}"),
            Problem::Conflict { reason } => f.write_str(reason),
        }
    }
}

impl From<ErrorDetails> for ConfigError {
    fn from(details: ErrorDetails) -> ConfigError {
        ConfigError(Box::new(details))
    }
}

impl Deref for ConfigError {
    type Target = ErrorDetails;

    fn deref(&self) -> &ErrorDetails {
        &self.0
    }
}

impl ConfigError {
    pub fn unreadable(file: &str, error: &std::io::Error) -> ConfigError {
        let mend = match error.kind() {
            std::io::ErrorKind::NotFound => {
                "name the file with --config FILE, or run in the folder that holds cluster.toml"
            }
            _ => "check the file and its permissions",
        };
        let details = ErrorDetails {
            file: file.to_string(),
            key: String::new(),
            problem: Problem::Unreadable { reason: error.to_string() },
            mend: mend.to_string(),
            place: None,
            from_override: None,
        };
        details.into()
    }
}

impl std::error::Error for ConfigError {}

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if matches!(self.problem, Problem::BadValue { .. } | Problem::OutOfRange { .. }) {
            write!(f, "{} = ", self.key)?;
        }
        write!(f, "{}", self.problem)?;
        match (&self.from_override, &self.place) {
            (Some(set), _) => write!(f, "\n  --> {set} (over {})", self.file)?,
            (None, Some(place)) => {
                let number = place.line.to_string();
                let gutter = " ".repeat(number.len());
                let indent = " ".repeat(place.column - 1);
                let marks = "^".repeat(place.width);
                write!(f, "\n{gutter} --> {}:{}:{}", self.file, place.line, place.column)?;
                write!(f, "\n{gutter} |\n{number} | {}", place.text)?;
                write!(f, "\n{gutter} | {indent}{marks}")?;
            }
            (None, None) if self.key.is_empty() => write!(f, "\n  --> {}", self.file)?,
            (None, None) => write!(f, "\n  --> {} (key {})", self.file, self.key)?,
        }
        write!(f, "\n  = help: {}", self.mend)
    }
}

/// The known word nearest to `word`, if it is near enough to be meant.
pub fn nearest<'a>(word: &str, known: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    let near = (word.chars().count() / 3).max(1);
    let scored = known.into_iter().map(|candidate| (distance(word, candidate), candidate));
    scored.filter(|(score, _)| *score <= near).min_by_key(|(score, _)| *score).map(|(_, c)| c)
}

/// Edits between two words: insert, delete, replace, or swap two neighbours (optimal string
/// alignment).
fn distance(a: &str, b: &str) -> usize {
    let (a, b): (Vec<char>, Vec<char>) = (a.chars().collect(), b.chars().collect());
    let mut rows: Vec<Vec<usize>> = vec![(0..=b.len()).collect()];
    for i in 1..=a.len() {
        let mut row = vec![i];
        for j in 1..=b.len() {
            let differ = usize::from(a[i - 1] != b[j - 1]);
            let mut best =
                (rows[i - 1][j] + 1).min(row[j - 1] + 1).min(rows[i - 1][j - 1] + differ);
            if i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1] {
                best = best.min(rows[i - 2][j - 2] + 1);
            }
            row.push(best);
        }
        rows.push(row);
    }
    rows[a.len()][b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn near_words_are_found_and_far_ones_are_not() {
        let known = ["step_tokens", "max_running", "max_waiting"];
        assert_eq!(nearest("step_token", known), Some("step_tokens"));
        assert_eq!(nearest("max_runing", known), Some("max_running"));
        assert_eq!(nearest("tsep_tokens", known), Some("step_tokens"));
        assert_eq!(nearest("colour", known), None);
        assert_eq!(nearest("htpp", ["http", "address"]), Some("http"));
    }
}
