//! A TOML document as a tree of values that know where they stand, and a strict reader of tables.
//! Shared with other files of the house that are written by hand, such as fault plans.

use std::ops::Range;

use toml::de::{DeTable, DeValue};

use super::error::{ConfigError, ErrorDetails, Place, Problem, nearest};

/// A parsed file with the values set over it.
#[derive(Debug, Clone, PartialEq)]
pub struct Source {
    pub file: String,
    pub overrides: Vec<(String, String)>,
    text: String,
    pub root: Node,
}

/// A value and where it is.
#[derive(Debug, Clone, PartialEq)]
pub struct Node {
    pub value: Value,
    origin: Origin,
    /// Of the key it stands under; of a table, of its header.
    key: Origin,
}

#[derive(Debug, Clone, PartialEq)]
enum Origin {
    Text(Range<usize>),
    /// Index into [`Source::overrides`].
    Override(usize),
}

#[derive(Debug, Clone, PartialEq)]
pub enum Value {
    String(String),
    Integer(i128),
    Float(f64),
    Boolean(bool),
    Datetime,
    Array(Vec<Node>),
    /// In file order.
    Table(Vec<(String, Node)>),
}

impl Value {
    pub fn kind(&self) -> &'static str {
        match self {
            Value::String(_) => "a string",
            Value::Integer(_) => "an integer",
            Value::Float(_) => "a number with a fraction",
            Value::Boolean(_) => "true or false",
            Value::Datetime => "a date",
            Value::Array(_) => "a list",
            Value::Table(_) => "a table",
        }
    }

    pub fn shown(&self) -> String {
        match self {
            Value::String(text) => format!("{text:?}"),
            Value::Integer(number) => number.to_string(),
            Value::Float(number) => number.to_string(),
            Value::Boolean(flag) => flag.to_string(),
            Value::Array(items) => {
                let items: Vec<String> = items.iter().map(|item| item.value.shown()).collect();
                format!("[{}]", items.join(", "))
            }
            Value::Datetime | Value::Table(_) => self.kind().to_string(),
        }
    }
}

impl Source {
    pub fn parse(text: &str, file: &str) -> Result<Source, ConfigError> {
        let empty = Origin::Text(0..0);
        let root =
            Node { value: Value::Table(Vec::new()), origin: empty.clone(), key: empty.clone() };
        let mut source =
            Source { file: file.to_string(), overrides: Vec::new(), text: text.to_string(), root };
        match DeTable::parse(text) {
            Ok(table) => source.root.value = convert_table(table.get_ref()),
            Err(e) => return Err(source.syntax(e.message(), e.span())),
        }
        Ok(source)
    }

    /// Puts a value over the file's.
    pub fn set(&mut self, key: &str, value: &str) -> Result<(), ConfigError> {
        let origin = Origin::Override(self.overrides.len());
        self.overrides.push((key.to_string(), value.to_string()));
        let mut new = match DeValue::parse(value) {
            Ok(parsed) => convert(parsed.get_ref(), origin.clone(), origin.clone()),
            Err(_) => {
                let value = Value::String(value.to_string());
                Node { value, origin: origin.clone(), key: origin.clone() }
            }
        };
        new.rebase(&origin);
        let mut at = &mut self.root;
        let parts: Vec<&str> = key.split('.').collect();
        for part in &parts {
            let next = match &mut at.value {
                Value::Table(entries) => {
                    let found = entries.iter().position(|(name, _)| name == part);
                    let index = found.unwrap_or_else(|| {
                        let value = Value::Table(Vec::new());
                        let node = Node { value, origin: origin.clone(), key: origin.clone() };
                        entries.push((part.to_string(), node));
                        entries.len() - 1
                    });
                    entries.get_mut(index).map(|(_, node)| node)
                }
                Value::Array(items) => {
                    let index = element(items, part);
                    index.and_then(|index| items.get_mut(index))
                }
                _ => None,
            };
            let Some(next) = next else {
                let problem = Problem::NotFound { what: "key", value: key.to_string() };
                let mend = "name it as SECTION.KEY, node.NAME.KEY or replica.NAME.KEY";
                return Err(self.located(key, Some(&origin), problem, mend));
            };
            at = next;
        }
        *at = new;
        Ok(())
    }

    /// An error at the value of `key`, or at the nearest table around it that exists.
    pub fn error(&self, key: &str, problem: Problem, mend: impl Into<String>) -> ConfigError {
        let (node, whole) = self.find(key);
        let origin = node.filter(|_| !key.is_empty()).map(|node| {
            let of_table = matches!(node.value, Value::Table(_));
            if whole && !of_table { &node.origin } else { &node.key }
        });
        self.located(key, origin, problem, mend)
    }

    /// An error at a value of this document; `key` is its dotted path, for the message.
    pub fn error_at(
        &self,
        key: &str,
        node: &Node,
        problem: Problem,
        mend: impl Into<String>,
    ) -> ConfigError {
        let of_table = matches!(node.value, Value::Table(_));
        let origin = if of_table { &node.key } else { &node.origin };
        self.located(key, Some(origin), problem, mend)
    }

    /// The value of `key`, as written.
    pub fn shown(&self, key: &str) -> Option<String> {
        match self.find(key) {
            (Some(node), true) => Some(node.value.shown()),
            _ => None,
        }
    }

    /// `line N`, or the override, of a key that is there.
    pub fn whereabouts(&self, key: &str) -> String {
        match self.find(key).0.map(|node| &node.origin) {
            Some(Origin::Text(span)) => format!("in line {}", self.place(span).line),
            Some(Origin::Override(index)) => self.override_text(*index),
            None => self.file.clone(),
        }
    }

    fn located(
        &self,
        key: &str,
        origin: Option<&Origin>,
        problem: Problem,
        mend: impl Into<String>,
    ) -> ConfigError {
        let (mut place, mut from_override) = (None, None);
        match origin {
            Some(Origin::Text(span)) => place = Some(self.place(span)),
            Some(Origin::Override(index)) => from_override = Some(self.override_text(*index)),
            None => {}
        }
        let (file, key, mend) = (self.file.clone(), key.to_string(), mend.into());
        ErrorDetails { file, key, problem, mend, place, from_override }.into()
    }

    fn override_text(&self, index: usize) -> String {
        let (key, value) = &self.overrides[index];
        format!("--set {key}={value}")
    }

    /// The node at the key, and true; or the last table on the way, and false.
    fn find(&self, key: &str) -> (Option<&Node>, bool) {
        let mut at = &self.root;
        for part in key.split('.').filter(|part| !part.is_empty()) {
            let next = match &at.value {
                Value::Table(entries) => {
                    entries.iter().find(|(name, _)| name == part).map(|(_, node)| node)
                }
                Value::Array(items) => element(items, part).and_then(|index| items.get(index)),
                _ => None,
            };
            match next {
                Some(node) => at = node,
                None if std::ptr::eq(at, &self.root) => return (None, false),
                None => return (Some(at), false),
            }
        }
        (Some(at), true)
    }

    fn place(&self, span: &Range<usize>) -> Place {
        let start = self.floor(span.start);
        let before = &self.text[..start];
        let line_start = before.rfind('\n').map_or(0, |at| at + 1);
        let line_end = self.text[start..].find('\n').map_or(self.text.len(), |at| start + at);
        let end = self.floor(span.end.clamp(start, line_end));
        let text = self.text[line_start..line_end].trim_end().replace('\t', " ");
        Place {
            line: before.matches('\n').count() + 1,
            column: self.text[line_start..start].chars().count() + 1,
            width: self.text[start..end].chars().count().max(1),
            text,
        }
    }

    /// The nearest character boundary at or below an offset.
    fn floor(&self, offset: usize) -> usize {
        let mut offset = offset.min(self.text.len());
        while !self.text.is_char_boundary(offset) {
            offset -= 1;
        }
        offset
    }

    /// What the TOML parser found; a key that is there twice gets words of our own.
    fn syntax(&self, message: &str, span: Option<Range<usize>>) -> ConfigError {
        let origin = span.clone().map(Origin::Text);
        if !message.contains("duplicate key") {
            let problem = Problem::Syntax { message: message.to_string() };
            let mend = "see https://toml.io for the syntax; strings need quotes";
            return self.located("", origin.as_ref(), problem, mend);
        }
        let place = span.map(|span| self.place(&span));
        let line = place.as_ref().map(|place| place.text.trim().to_string()).unwrap_or_default();
        let same = |text: &str| match line.split_once('=') {
            Some((key, _)) if !line.starts_with('[') => {
                text.split_once('=').is_some_and(|(other, _)| other.trim() == key.trim())
            }
            _ => text.trim() == line,
        };
        let last = place.as_ref().map_or(0, |place| place.line);
        let before = self.text.lines().take(last.saturating_sub(1)).enumerate();
        let first = before.filter(|(_, text)| same(text)).last();
        let first = first.map_or("above".to_string(), |(at, _)| format!("in line {}", at + 1));
        let (what, value, mend) = if let Some(name) = line.strip_prefix("[node.") {
            let name = name.trim_end_matches(']').to_string();
            ("node", name, "give each node a name of its own")
        } else {
            let key = line.split('=').next().unwrap_or(&line).trim().to_string();
            ("key", format!("`{key}`"), "keep one of the two")
        };
        self.located("", origin.as_ref(), Problem::Duplicate { what, value, first }, mend)
    }
}

impl Node {
    fn rebase(&mut self, to: &Origin) {
        (self.origin, self.key) = (to.clone(), to.clone());
        match &mut self.value {
            Value::Array(items) => items.iter_mut().for_each(|item| item.rebase(to)),
            Value::Table(entries) => entries.iter_mut().for_each(|(_, node)| node.rebase(to)),
            _ => {}
        }
    }
}

/// An element of a list by number, else of a list of tables by its `name` or `id`.
fn element(items: &[Node], part: &str) -> Option<usize> {
    let named = items.iter().position(|item| match &item.value {
        Value::Table(entries) => entries.iter().any(|(key, node)| {
            let names = key == "name" || key == "id";
            names && matches!(&node.value, Value::String(name) if name == part)
        }),
        _ => false,
    });
    part.parse().ok().filter(|index| *index < items.len()).or(named)
}

fn convert_table(table: &DeTable<'_>) -> Value {
    let mut entries: Vec<(String, Node)> = Vec::new();
    for (key, value) in table.iter() {
        let node = convert(value.get_ref(), Origin::Text(value.span()), Origin::Text(key.span()));
        entries.push((key.get_ref().to_string(), node));
    }
    entries.sort_by_key(|(_, node)| match &node.key {
        Origin::Text(span) => span.start,
        Origin::Override(_) => usize::MAX,
    });
    Value::Table(entries)
}

fn convert(value: &DeValue<'_>, origin: Origin, key: Origin) -> Node {
    let value = match value {
        DeValue::String(text) => Value::String(text.to_string()),
        // TOML's integers fit i64; what does not is out of every range here.
        DeValue::Integer(number) => Value::Integer(
            i128::from_str_radix(number.as_str(), number.radix()).unwrap_or(i128::MAX),
        ),
        DeValue::Float(number) => Value::Float(number.as_str().parse().unwrap_or(f64::NAN)),
        DeValue::Boolean(flag) => Value::Boolean(*flag),
        DeValue::Datetime(_) => Value::Datetime,
        DeValue::Array(items) => Value::Array(
            items
                .iter()
                .map(|item| {
                    let at = Origin::Text(item.span());
                    convert(item.get_ref(), at.clone(), at)
                })
                .collect(),
        ),
        DeValue::Table(table) => convert_table(table),
    };
    Node { value, origin, key }
}

/// Reads one table. Every key must be asked for; [`Reader::finish`] refuses the rest.
pub struct Reader<'a> {
    source: &'a Source,
    /// Dotted path, empty for the root.
    pub path: String,
    entries: &'a [(String, Node)],
    asked: Vec<&'static str>,
}

impl<'a> Reader<'a> {
    pub fn root(source: &'a Source) -> Reader<'a> {
        let entries: &[_] = match &source.root.value {
            Value::Table(entries) => entries,
            _ => &[],
        };
        Reader { source, path: String::new(), entries, asked: Vec::new() }
    }

    pub fn source(&self) -> &'a Source {
        self.source
    }

    /// A reader of the table at `path`, which is `node`.
    pub fn of(source: &'a Source, path: String, node: &'a Node) -> Result<Reader<'a>, ConfigError> {
        match &node.value {
            Value::Table(entries) => Ok(Reader { source, path, entries, asked: Vec::new() }),
            _ => {
                let key = path.clone();
                let problem =
                    Problem::WrongType { key, expected: "a table", found: node.value.kind() };
                Err(source.error(&path, problem, format!("write it as a section: [{path}]")))
            }
        }
    }

    /// A section of the root; an absent one reads as empty.
    pub fn section(&mut self, name: &'static str) -> Result<Reader<'a>, ConfigError> {
        match self.node(name) {
            Some(node) => Reader::of(self.source, self.child(name), node),
            None => Ok(Reader {
                source: self.source,
                path: self.child(name),
                entries: &[],
                asked: Vec::new(),
            }),
        }
    }

    pub fn entries(&self) -> &'a [(String, Node)] {
        self.entries
    }

    pub fn node(&mut self, key: &'static str) -> Option<&'a Node> {
        self.asked.push(key);
        self.entries.iter().find(|(name, _)| name == key).map(|(_, node)| node)
    }

    pub fn child(&self, key: &str) -> String {
        if self.path.is_empty() { key.to_string() } else { format!("{}.{key}", self.path) }
    }

    pub fn string(&mut self, key: &'static str) -> Result<Option<&'a str>, ConfigError> {
        match self.node(key) {
            None => Ok(None),
            Some(Node { value: Value::String(text), .. }) => Ok(Some(text)),
            Some(node) => Err(self.wrong_type(key, "a string", node, "put it in quotes")),
        }
    }

    pub fn boolean(&mut self, key: &'static str, default: bool) -> Result<bool, ConfigError> {
        match self.node(key) {
            None => Ok(default),
            Some(Node { value: Value::Boolean(flag), .. }) => Ok(*flag),
            Some(node) => {
                Err(self.wrong_type(key, "true or false", node, "write true or false, no quotes"))
            }
        }
    }

    pub fn integer(
        &mut self,
        key: &'static str,
        min: u64,
        max: u64,
    ) -> Result<Option<u64>, ConfigError> {
        match self.node(key) {
            None => Ok(None),
            Some(node) => self.integer_at(&self.child(key), node, min, max).map(Some),
        }
    }

    pub fn integer_at(
        &self,
        path: &str,
        node: &Node,
        min: u64,
        max: u64,
    ) -> Result<u64, ConfigError> {
        let Value::Integer(number) = &node.value else {
            let mend = "write a whole number without quotes";
            return Err(self.wrong_type_at(path, "an integer", node, mend));
        };
        match u64::try_from(*number).ok().filter(|number| (min..=max).contains(number)) {
            Some(number) => Ok(number),
            None => {
                let problem = Problem::OutOfRange { value: number.to_string(), min, max };
                Err(self.source.error(path, problem, "write a number within the range"))
            }
        }
    }

    pub fn u32(
        &mut self,
        key: &'static str,
        default: u32,
        min: u32,
        max: u32,
    ) -> Result<u32, ConfigError> {
        let number = self.integer(key, min.into(), max.into())?;
        Ok(number.and_then(|number| u32::try_from(number).ok()).unwrap_or(default))
    }

    pub fn list(&mut self, key: &'static str) -> Result<Option<&'a [Node]>, ConfigError> {
        match self.node(key) {
            None => Ok(None),
            Some(Node { value: Value::Array(items), .. }) => Ok(Some(items)),
            Some(node) => Err(self.wrong_type(key, "a list", node, "put it in [brackets]")),
        }
    }

    /// An error for a key that must be there.
    pub fn missing(&self, key: &'static str, mend: impl Into<String>) -> ConfigError {
        let problem = Problem::Missing { key: key.to_string(), section: self.title() };
        self.source.error(&self.child(key), problem, mend)
    }

    pub fn wrong_type(
        &self,
        key: &str,
        expected: &'static str,
        node: &Node,
        mend: &str,
    ) -> ConfigError {
        self.wrong_type_at(&self.child(key), expected, node, mend)
    }

    pub fn wrong_type_at(
        &self,
        path: &str,
        expected: &'static str,
        node: &Node,
        mend: &str,
    ) -> ConfigError {
        let found = node.value.kind();
        let problem = Problem::WrongType { key: path.to_string(), expected, found };
        self.source.error(path, problem, mend)
    }

    /// An error about the value of a key.
    pub fn bad(
        &self,
        key: &str,
        reason: impl Into<String>,
        mend: impl Into<String>,
    ) -> ConfigError {
        let path = self.child(key);
        let value = self.source.shown(&path).unwrap_or_default();
        self.source.error(&path, Problem::BadValue { value, reason: reason.into() }, mend)
    }

    /// Refuses keys that nobody asked for.
    pub fn finish(self) -> Result<(), ConfigError> {
        for (key, node) in self.entries {
            if self.asked.contains(&key.as_str()) {
                continue;
            }
            let mend = match nearest(key, self.asked.iter().copied()) {
                Some(known) => format!("did you mean `{known}`?"),
                None => format!("known here: {}", self.asked.join(", ")),
            };
            let problem = Problem::UnknownKey { key: key.clone(), section: self.title() };
            let path = self.child(key);
            return Err(self.source.located(&path, Some(&node.key), problem, mend));
        }
        Ok(())
    }

    fn title(&self) -> String {
        match self.path.split_once('.') {
            None if self.path.is_empty() => "the file".to_string(),
            Some((list, which)) if which.parse::<usize>().is_ok() => format!("[[{list}]] {which}"),
            _ => format!("[{}]", self.path),
        }
    }
}
