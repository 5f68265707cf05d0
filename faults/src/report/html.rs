//! What every page shares: its frame, captions, tables, and the two widths of a figure.

use super::svg::{Escaped, put};

const STYLE: &str = include_str!("style.css");

/// A page around `body`; both are HTML already, the title is text.
pub fn document(title: &str, body: &str) -> String {
    format!(
        "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
         <meta name=\"color-scheme\" content=\"light dark\">\n<title>{}</title>\n\
         <style>\n{STYLE}</style>\n</head>\n<body>\n<main>\n{body}</main>\n</body>\n</html>\n",
        Escaped(title)
    )
}

/// A numbered figure with a caption, drawn by `draw` for each width.
pub fn figure(out: &mut String, caption: &str, draw: impl Fn(f64) -> String) {
    put!(
        out,
        "<figure>{}{}<figcaption>{caption}</figcaption></figure>\n",
        draw(super::figures::WIDE),
        draw(super::figures::NARROW)
    );
}

/// A table being written. Cells are text and are escaped, unless they are `Cell::Html`.
pub struct Table {
    out: String,
}

/// One cell.
pub enum Cell {
    Text(String),
    /// A number, right-aligned.
    Number(String),
    /// A word in the colour of its meaning: `good`, `bad` or `dim`.
    Tagged(String, &'static str),
    Code(String),
    Html(String),
}

impl Table {
    /// `heads`: each column's name, `#` in front where it holds numbers; all empty: no head.
    pub fn new(class: &str, caption: &str, heads: &[&str]) -> Table {
        let mut out = format!(
            "<div class=\"table\"><p class=\"caption\">{caption}</p>\
             <div class=\"scroll\"><table class=\"{class}\"><thead><tr>"
        );
        if heads.iter().all(|head| head.is_empty()) {
            out.truncate(out.len() - "<thead><tr>".len());
            out.push_str("<tbody>\n");
            return Table { out };
        }
        for head in heads {
            match head.strip_prefix('#') {
                Some(head) => put!(out, "<th class=\"n\">{}</th>", Escaped(head)),
                None => put!(out, "<th>{}</th>", Escaped(head)),
            }
        }
        out.push_str("</tr></thead><tbody>\n");
        Table { out }
    }

    pub fn row(&mut self, cells: Vec<Cell>) {
        self.out.push_str("<tr>");
        for cell in cells {
            match cell {
                Cell::Text(text) => put!(self.out, "<td>{}</td>", Escaped(&text)),
                Cell::Number(text) => put!(self.out, "<td class=\"n\">{}</td>", Escaped(&text)),
                Cell::Tagged(text, class) => {
                    put!(self.out, "<td><span class=\"{class}\">{}</span></td>", Escaped(&text));
                }
                Cell::Code(text) => put!(self.out, "<td><code>{}</code></td>", Escaped(&text)),
                Cell::Html(html) => put!(self.out, "<td>{html}</td>"),
            }
        }
        self.out.push_str("</tr>\n");
    }

    /// A row over all columns that names the group below it.
    pub fn group(&mut self, name: &str, columns: usize) {
        put!(
            self.out,
            "<tr class=\"group\"><th colspan=\"{columns}\">{}</th></tr>\n",
            Escaped(name)
        );
    }

    pub fn finish(self) -> String {
        self.out + "</tbody></table></div></div>\n"
    }
}

/// The word of a verdict with its sign, so that colour is not all that tells it.
pub fn badge(verdict: super::Outcome) -> String {
    let (class, sign) = match verdict {
        super::Outcome::Pass => ("good", "✓"),
        super::Outcome::Fail => ("bad", "✗"),
        super::Outcome::Invalid => ("warn", "?"),
    };
    format!("<span class=\"badge {class}\">{sign} {verdict}</span>")
}
