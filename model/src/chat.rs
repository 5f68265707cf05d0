//! Chat templates: a list of messages to the text a model was trained on.
//!
//! Templates are Jinja as Hugging Face runs it: blocks are trimmed, Python's string, list and
//! mapping methods work, `raise_exception`, `strftime_now` and `tojson` exist. A template comes
//! with the model and is not trusted: it runs on limited fuel, its output is limited, it can read
//! nothing but what it is given. (Memory inside a template is limited only by its fuel.)
//!
//! A model without a template gets a documented default, see [`ChatTemplate::fallback`].

use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, Serde, Value, ValueKind};
use minijinja::{Environment, Error, ErrorKind, Output, State};
use serde::Serialize;
use std::io::Write;

/// Instructions one rendering may take; a template uses tens per message.
const FUEL: u64 = 5_000_000;
/// The most text one rendering may make.
const MAX_OUTPUT: usize = 16 << 20;
const NAME: &str = "chat_template";

/// A compiled template, with the special tokens it may name.
#[derive(Debug)]
pub struct ChatTemplate {
    environment: Environment<'static>,
    source: String,
    bos_token: String,
    eos_token: String,
    fallback: bool,
}

/// What a template is given.
#[derive(Debug, Clone, Default, Serialize)]
pub struct ChatInput {
    /// Objects with `role` and `content`, as in OpenAI's interface.
    pub messages: Vec<serde_json::Value>,
    /// Function descriptions, as in OpenAI's interface; none is no tools.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tools: Option<serde_json::Value>,
    /// Ask for the beginning of the assistant's turn.
    pub add_generation_prompt: bool,
    /// Seconds since 1970 (UTC), for templates that name the date.
    #[serde(skip)]
    pub now: i64,
}

/// A chat could not be turned into a prompt.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ChatError {
    /// The template itself is wrong: refused when the model is opened.
    #[error("the chat template does not compile: {0}")]
    Compile(String),
    /// The template refused the messages (`raise_exception`): the client's mistake.
    #[error("the model's chat template refuses these messages: {0}")]
    Refused(String),
    #[error("the chat template failed on these messages: {0}")]
    Failed(String),
    #[error("the chat template did not end within {FUEL} instructions and {MAX_OUTPUT} bytes")]
    Unbounded,
}

impl ChatTemplate {
    /// Compiles `source`. The tokens are what the template sees as `bos_token` and `eos_token`.
    pub fn new(source: &str, bos_token: &str, eos_token: &str) -> Result<Self, ChatError> {
        let mut environment = environment();
        environment
            .add_template_owned(NAME, source.to_owned())
            .map_err(|e| ChatError::Compile(describe(&e)))?;
        Ok(Self {
            environment,
            source: source.to_owned(),
            bos_token: bos_token.to_owned(),
            eos_token: eos_token.to_owned(),
            fallback: false,
        })
    }

    /// The default of a model without a template. `has_token` tells which special tokens its
    /// vocabulary has; the first that fits is taken:
    /// 1. `<|im_start|>`: ChatML;
    /// 2. `<start_of_turn>`: Gemma's turns (a system message goes before the first user's);
    /// 3. otherwise `Role: text` paragraphs, ending in `Assistant:`.
    pub fn fallback(has_token: impl Fn(&str) -> bool, bos: &str, eos: &str) -> Self {
        let source = if has_token("<|im_start|>") {
            CHATML
        } else if has_token("<start_of_turn>") {
            GEMMA
        } else {
            PLAIN
        };
        let built_in = Self::new(source, bos, eos).map(|t| Self { fallback: true, ..t });
        built_in.unwrap_or_else(|e| unreachable!("tested to compile: {e}"))
    }

    /// Whether this is the default, since the model has no template of its own.
    pub fn is_fallback(&self) -> bool {
        self.fallback
    }

    pub fn source(&self) -> &str {
        &self.source
    }

    /// The prompt for `input`. Special tokens in it are meant to be recognised when tokenised.
    pub fn render(&self, input: &ChatInput) -> Result<String, ChatError> {
        let template = self.environment.get_template(NAME).map_err(|e| failure(&e))?;
        let now = input.now;
        let context = minijinja::context! {
            bos_token => self.bos_token.as_str(),
            eos_token => self.eos_token.as_str(),
            strftime_now => Value::from_function(move |format: String| strftime(&format, now)),
            ..Value::from(Serde(input))
        };
        let mut out = Bounded::default();
        match template.render_captured_to(context, &mut out) {
            Ok(_) => String::from_utf8(out.bytes).map_err(|e| ChatError::Failed(e.to_string())),
            Err(_) if out.full => Err(ChatError::Unbounded),
            Err(e) => Err(failure(&e)),
        }
    }
}

const CHATML: &str = "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' \
    + message['content'] + '<|im_end|>' + '\\n' }}{% endfor %}\
    {% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}";

const GEMMA: &str = "{{ bos_token }}{% set ns = namespace(system='') %}\
    {% for message in messages %}{% if message['role'] == 'system' %}\
    {% set ns.system = message['content'] + '\\n\\n' %}{% else %}\
    {{ '<start_of_turn>' + ('model' if message['role'] == 'assistant' else message['role']) \
    + '\\n' + ns.system + message['content'] + '<end_of_turn>\\n' }}\
    {% set ns.system = '' %}{% endif %}{% endfor %}\
    {% if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}";

const PLAIN: &str = "{% for message in messages %}{{ message['role'] | capitalize }}: \
    {{ message['content'] }}\n\n{% endfor %}{% if add_generation_prompt %}Assistant:{% endif %}";

fn environment() -> Environment<'static> {
    let mut env = Environment::new();
    env.set_syntax(
        SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build().unwrap_or_default(),
    );
    env.set_fuel(Some(FUEL));
    env.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
    env.set_formatter(format_like_python);
    env.add_function("raise_exception", |message: String| -> Result<Value, Error> {
        Err(Error::new(ErrorKind::InvalidOperation, "refused").with_source(Refusal(message)))
    });
    env.add_filter("tojson", to_json);
    env
}

/// Carries the message of `raise_exception` through the engine.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct Refusal(String);

/// Truth values and nothing as Python writes them; the rest as it is.
fn format_like_python(out: &mut Output, state: &mut State, value: &Value) -> Result<(), Error> {
    let text = match value.kind() {
        ValueKind::Bool if value.is_true() => "True",
        ValueKind::Bool => "False",
        ValueKind::None => "None",
        _ => return minijinja::escape_formatter(out, state, value),
    };
    out.write_str(text).map_err(Error::from)
}

/// `json.dumps(value, ensure_ascii=False)` with its `indent`: `, ` and `: ` between things, and
/// nothing escaped for HTML.
fn to_json(value: &Value, kwargs: Kwargs) -> Result<Value, Error> {
    let indent: Option<usize> = kwargs.get("indent")?;
    // Accepted as Hugging Face does; the output is the same with or without.
    for key in ["ensure_ascii", "sort_keys", "separators"] {
        let _: Option<Value> = kwargs.get(key)?;
    }
    kwargs.assert_all_used()?;
    let bad = |e: serde_json::Error| Error::new(ErrorKind::BadSerialization, e.to_string());
    let value = serde_json::to_value(value).map_err(bad)?;
    let mut out = String::new();
    write_json(&value, indent.map(|n| n.min(16)), 0, &mut out);
    Ok(Value::from_safe_string(out))
}

fn write_json(value: &serde_json::Value, indent: Option<usize>, depth: usize, out: &mut String) {
    use serde_json::Value as Json;
    let line = |depth: usize, out: &mut String| {
        if let Some(n) = indent {
            out.push('\n');
            out.extend(std::iter::repeat_n(' ', n * depth));
        }
    };
    let comma = if indent.is_some() { "," } else { ", " };
    match value {
        Json::Array(items) if !items.is_empty() => {
            out.push('[');
            for (i, item) in items.iter().enumerate() {
                out.push_str(if i == 0 { "" } else { comma });
                line(depth + 1, out);
                write_json(item, indent, depth + 1, out);
            }
            line(depth, out);
            out.push(']');
        }
        Json::Object(map) if !map.is_empty() => {
            out.push('{');
            for (i, (key, item)) in map.iter().enumerate() {
                out.push_str(if i == 0 { "" } else { comma });
                line(depth + 1, out);
                out.push_str(&Json::from(key.as_str()).to_string());
                out.push_str(": ");
                write_json(item, indent, depth + 1, out);
            }
            line(depth, out);
            out.push('}');
        }
        other => out.push_str(&other.to_string()),
    }
}

fn failure(error: &Error) -> ChatError {
    let mut source: Option<&(dyn std::error::Error + 'static)> = Some(error);
    while let Some(e) = source {
        if let Some(Refusal(message)) = e.downcast_ref::<Refusal>() {
            return ChatError::Refused(message.clone());
        }
        source = e.source();
    }
    match error.kind() {
        ErrorKind::OutOfFuel => ChatError::Unbounded,
        _ => ChatError::Failed(describe(error)),
    }
}

/// The engine's message with its line.
fn describe(error: &Error) -> String {
    let line = error.line().map(|l| format!(" (line {l} of the template)")).unwrap_or_default();
    format!("{}{line}", error.detail().unwrap_or(&error.kind().to_string()))
}

/// Output up to a limit.
#[derive(Default)]
struct Bounded {
    bytes: Vec<u8>,
    full: bool,
}

impl Write for Bounded {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        if self.bytes.len() + bytes.len() > MAX_OUTPUT {
            self.full = true;
            return Err(std::io::Error::other("too much text"));
        }
        self.bytes.extend_from_slice(bytes);
        Ok(bytes.len())
    }
    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];
const DAYS: [&str; 7] =
    ["Thursday", "Friday", "Saturday", "Sunday", "Monday", "Tuesday", "Wednesday"];

/// The common directives of `strftime`, in UTC; unknown ones stay as they are.
fn strftime(format: &str, now: i64) -> String {
    let days = now.div_euclid(86_400);
    let second = now.rem_euclid(86_400);
    let (year, month, day) = civil(days);
    let name = |list: &[&'static str], i: i64| {
        usize::try_from(i).ok().and_then(|i| list.get(i)).copied().unwrap_or_default()
    };
    let month_name = name(&MONTHS, month - 1);
    let day_name = name(&DAYS, days.rem_euclid(7));
    let mut out = String::new();
    let mut chars = format.chars();
    while let Some(c) = chars.next() {
        if c != '%' {
            out.push(c);
            continue;
        }
        let padded = |n: i64| format!("{n:02}");
        match chars.next() {
            Some('Y') => out.push_str(&year.to_string()),
            Some('y') => out.push_str(&padded(year.rem_euclid(100))),
            Some('m') => out.push_str(&padded(month)),
            Some('d') => out.push_str(&padded(day)),
            Some('e') => out.push_str(&format!("{day:2}")),
            Some('B') => out.push_str(month_name),
            Some('b') => out.push_str(&month_name[..3]),
            Some('A') => out.push_str(day_name),
            Some('a') => out.push_str(&day_name[..3]),
            Some('H') => out.push_str(&padded(second / 3600)),
            Some('I') => out.push_str(&padded((second / 3600 + 11) % 12 + 1)),
            Some('p') => out.push_str(if second < 43_200 { "AM" } else { "PM" }),
            Some('M') => out.push_str(&padded(second / 60 % 60)),
            Some('S') => out.push_str(&padded(second % 60)),
            Some('-') => match chars.next() {
                Some('d') => out.push_str(&day.to_string()),
                Some('m') => out.push_str(&month.to_string()),
                other => out.extend(['%', '-'].into_iter().chain(other)),
            },
            Some('%') => out.push('%'),
            other => out.extend(['%'].into_iter().chain(other)),
        }
    }
    out
}

/// Year, month, day of a day counted from 1970-01-01 (Howard Hinnant, "chrono-compatible
/// low-level date algorithms").
fn civil(days: i64) -> (i64, i64, i64) {
    let z = days + 719_468;
    let era = z.div_euclid(146_097);
    let doe = z.rem_euclid(146_097);
    let yoe = (doe - doe / 1460 + doe / 36_524 - doe / 146_096) / 365;
    let doy = doe - (365 * yoe + yoe / 4 - yoe / 100);
    let mp = (5 * doy + 2) / 153;
    let month = if mp < 10 { mp + 3 } else { mp - 9 };
    let year = yoe + era * 400 + i64::from(month <= 2);
    (year, month, doy - (153 * mp + 2) / 5 + 1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn chat() -> ChatInput {
        ChatInput {
            messages: vec![
                json!({"role": "system", "content": "Be brief."}),
                json!({"role": "user", "content": "Hi <b>&'\""}),
            ],
            tools: None,
            add_generation_prompt: true,
            now: 1_764_412_743, // 2025-11-29 10:39:03, a Saturday
        }
    }

    fn render(source: &str) -> Result<String, ChatError> {
        ChatTemplate::new(source, "<s>", "</s>")?.render(&chat())
    }

    #[test]
    fn fallbacks_render() {
        let with = |token: &'static str| {
            ChatTemplate::fallback(|t| t == token, "<bos>", "<eos>").render(&chat()).unwrap()
        };
        assert_eq!(
            with("<|im_start|>"),
            "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi <b>&'\"<|im_end|>\n\
             <|im_start|>assistant\n"
        );
        assert_eq!(
            with("<start_of_turn>"),
            "<bos><start_of_turn>user\nBe brief.\n\nHi <b>&'\"<end_of_turn>\n<start_of_turn>model\n"
        );
        assert_eq!(with(""), "System: Be brief.\n\nUser: Hi <b>&'\"\n\nAssistant:");
    }

    #[test]
    fn python_is_spoken() {
        let cases = [
            ("{{ messages[0].content.strip('.').upper() }}", "BE BRIEF"),
            ("{{ messages[0]['content'].split(' ')[-1] }}", "brief."),
            ("{{ messages[0].get('nothing', 'none') }}", "none"),
            (
                "{% for k, v in messages[0].items() %}{{ k }}={{ v }};{% endfor %}",
                "role=system;content=Be brief.;",
            ),
            ("{{ true }} {{ none }} {{ messages[0]['role'].startswith('sys') }}", "True None True"),
            ("{{ messages[1] | tojson }}", r#"{"role": "user", "content": "Hi <b>&'\""}"#),
            (
                "{{ {'a': [1, 2.5], 'b': {}} | tojson(indent=2) }}",
                "{\n  \"a\": [\n    1,\n    2.5\n  ],\n  \"b\": {}\n}",
            ),
            (
                "{{ strftime_now('%d %b %Y %A %H:%M:%S %I%p %-d') }}",
                "29 Nov 2025 Saturday 10:39:03 10AM 29",
            ),
            (
                "{% if tools is defined and tools %}x{% endif %}{{ bos_token }}{{ eos_token }}",
                "<s></s>",
            ),
            ("a\n  {% if true %}\nb\n  {% endif %}\nc\n", "a\nb\nc"),
            (
                "{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{{ m.role }}\
              {% break %}{% endfor %}",
                "user",
            ),
        ];
        for (source, want) in cases {
            assert_eq!(render(source).as_deref(), Ok(want), "{source}");
        }
    }

    #[test]
    fn a_template_may_refuse() {
        let got = render(
            "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}\
                          {% endif %}",
        );
        assert_eq!(got, Err(ChatError::Refused("no system".into())));
        let inner = "{% macro f() %}{{ raise_exception('deep') }}{% endmacro %}{{ f() }}";
        assert_eq!(render(inner), Err(ChatError::Refused("deep".into())));
    }

    #[test]
    fn hostile_templates_end() {
        let forever =
            "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}";
        assert_eq!(render(forever), Err(ChatError::Unbounded));
        let large = "{% for a in range(99999) %}{{ 'x' * 1000 }}{% endfor %}";
        assert_eq!(render(large), Err(ChatError::Unbounded));
        let deep = "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}";
        assert!(render(deep).is_err());
        assert!(matches!(render("{% for %}"), Err(ChatError::Compile(_))));
        assert!(matches!(render("{{ messages.x.y }}"), Err(ChatError::Failed(_))));
        assert!(render("{% include '/etc/passwd' %}").is_err());
    }

    #[test]
    fn dates_are_right() {
        assert_eq!(civil(0), (1970, 1, 1));
        assert_eq!(civil(-1), (1969, 12, 31));
        assert_eq!(civil(11_016), (2000, 2, 29));
        assert_eq!(strftime("%Y-%m-%d %a %q", 0), "1970-01-01 Thu %q");
    }
}
