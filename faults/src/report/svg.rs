//! A small SVG and HTML writer: escaping, scales, axes, lines, areas, bands.
//!
//! Everything drawn carries a class and no colour, so that the page's style sheet decides how it
//! looks in light, in dark and on paper. (Plotting crates write colours into each element.)
//! Coordinates are in CSS pixels; a figure is drawn once for each width that it is shown at, so
//! that its text keeps its size.

use std::fmt::{self, Display};

/// Appends formatted text to a `String`, which cannot fail.
macro_rules! put {
    ($out:expr, $($arg:tt)*) => {{
        use std::fmt::Write as _;
        let _ = write!($out, $($arg)*);
    }};
}
pub(crate) use put;

/// Displays text safely inside elements and double-quoted attributes.
pub struct Escaped<'a>(pub &'a str);

impl Display for Escaped<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        use fmt::Write as _;
        for c in self.0.chars() {
            match c {
                '&' => f.write_str("&amp;")?,
                '<' => f.write_str("&lt;")?,
                '>' => f.write_str("&gt;")?,
                '"' => f.write_str("&quot;")?,
                '\'' => f.write_str("&#39;")?,
                // Control characters have no place in HTML; they are shown as what they are not.
                c if c.is_control() && c != '\n' && c != '\t' => f.write_char('\u{fffd}')?,
                c => f.write_char(c)?,
            }
        }
        Ok(())
    }
}

/// Maps a quantity to pixels.
#[derive(Debug, Clone, Copy)]
pub struct Scale {
    from: f64,
    to: f64,
    start: f64,
    end: f64,
    log: bool,
}

impl Scale {
    /// `range` in pixels; an empty or unordered domain is widened.
    pub fn linear(domain: (f64, f64), range: (f64, f64)) -> Scale {
        let to = if domain.1 > domain.0 { domain.1 } else { domain.0 + 1.0 };
        Scale { from: domain.0, to, start: range.0, end: range.1, log: false }
    }

    /// Whole decades around `domain`, which must be positive.
    pub fn log(domain: (f64, f64), range: (f64, f64)) -> Scale {
        let from = domain.0.max(1e-9).log10().floor();
        let to = domain.1.max(1e-9).log10().ceil().max(from + 1.0);
        Scale { from, to, start: range.0, end: range.1, log: true }
    }

    /// Values outside the domain are drawn at its edge.
    pub fn at(&self, value: f64) -> f64 {
        let value = if self.log { value.max(1e-9).log10() } else { value };
        let share = ((value - self.from) / (self.to - self.from)).clamp(0.0, 1.0);
        self.start + share * (self.end - self.start)
    }

    /// About `about` round values inside the domain; on a log scale powers of ten.
    pub fn ticks(&self, about: usize) -> Vec<f64> {
        if self.log {
            let decades = (self.to - self.from).round().clamp(1.0, 12.0) as i32;
            let between: &[f64] = if decades <= 2 { &[1.0, 2.0, 5.0] } else { &[1.0] };
            let all = (0..=decades).flat_map(|d| {
                between.iter().map(move |f| f * 10f64.powf(self.from + f64::from(d)))
            });
            let most = 10f64.powf(self.to) * 1.001;
            return all.filter(|v| *v <= most).collect();
        }
        let step = nice_step((self.to - self.from) / about.max(1) as f64);
        let first = (self.from / step).ceil();
        (0..64)
            .map(|i| (first + f64::from(i)) * step)
            .take_while(|&v| v <= self.to + step * 1e-6)
            .collect()
    }
}

/// The least of 1, 2, 5 times a power of ten that is not below `raw`.
fn nice_step(raw: f64) -> f64 {
    let power = 10f64.powf(raw.max(1e-12).log10().floor());
    let factors = [1.0, 2.0, 5.0, 10.0];
    factors.iter().map(|f| f * power).find(|&s| s >= raw * 0.999).unwrap_or(10.0 * power)
}

/// A figure being drawn: the plot area, its two scales, and what was drawn so far.
pub struct Plot {
    pub x: Scale,
    pub y: Scale,
    pub left: f64,
    pub right: f64,
    pub top: f64,
    pub bottom: f64,
    pub width: f64,
    pub height: f64,
    pub out: String,
}

impl Plot {
    /// Takes the frame `(left, top, right, bottom)` of the plot area.
    pub fn new(
        (width, height): (f64, f64),
        frame: (f64, f64, f64, f64),
        x: Scale,
        y: Scale,
    ) -> Plot {
        let (left, top, right, bottom) = frame;
        Plot { x, y, left, right, top, bottom, width, height, out: String::new() }
    }

    pub fn text(&mut self, x: f64, y: f64, class: &str, text: &str) {
        put!(self.out, r#"<text x="{x:.1}" y="{y:.1}" class="{class}">{}</text>"#, Escaped(text));
    }

    pub fn line(&mut self, (x1, y1): (f64, f64), (x2, y2): (f64, f64), class: &str) {
        put!(
            self.out,
            r#"<line x1="{x1:.1}" y1="{y1:.1}" x2="{x2:.1}" y2="{y2:.1}" class="{class}"/>"#
        );
    }

    /// `title` is what a pointer that rests on it reads; empty for none.
    pub fn rect(&mut self, x: (f64, f64), y: (f64, f64), class: &str, title: &str) {
        let (w, h) = ((x.1 - x.0).max(0.0), (y.1 - y.0).max(0.0));
        put!(
            self.out,
            r#"<rect x="{:.1}" y="{:.1}" width="{w:.1}" height="{h:.1}" class="{class}""#,
            x.0,
            y.0
        );
        if title.is_empty() {
            self.out.push_str("/>");
        } else {
            put!(self.out, "><title>{}</title></rect>", Escaped(title));
        }
    }

    pub fn dot(&mut self, (x, y): (f64, f64), radius: f64, class: &str, title: &str) {
        put!(self.out, r#"<circle cx="{x:.1}" cy="{y:.1}" r="{radius:.1}" class="{class}">"#);
        if !title.is_empty() {
            put!(self.out, "<title>{}</title>", Escaped(title));
        }
        self.out.push_str("</circle>");
    }

    /// A small triangle that points down at its place.
    pub fn mark(&mut self, (x, y): (f64, f64), class: &str, title: &str) {
        put!(
            self.out,
            r#"<path d="M{x:.1} {y:.1}l4 -7h-8z" class="{class}"><title>{}</title></path>"#,
            Escaped(title)
        );
    }

    /// Horizontal grid lines with their labels at the left.
    pub fn y_axis(&mut self, about: usize, label: impl Fn(f64) -> String) {
        for tick in self.y.ticks(about) {
            let y = self.y.at(tick);
            self.line((self.left, y), (self.right, y), "grid");
            self.text(self.left - 6.0, y + 3.5, "tick end", &label(tick));
        }
    }

    /// The base line with ticks, labels and the axis' name; `scale` is in the labels' unit.
    pub fn x_axis(
        &mut self,
        scale: Scale,
        about: usize,
        name: &str,
        label: impl Fn(f64) -> String,
    ) {
        let base = self.bottom;
        self.line((self.left, base), (self.right, base), "axis");
        for tick in scale.ticks(about) {
            let x = scale.at(tick);
            self.line((x, base), (x, base + 4.0), "axis");
            self.text(x, base + 15.0, "tick mid", &label(tick));
        }
        self.text((self.left + self.right) / 2.0, base + 29.0, "name mid", name);
    }

    /// A step line over bins: `values[i]` holds from `i * bin` to `(i + 1) * bin`; gaps at `None`.
    pub fn steps(&mut self, bin: f64, values: &[Option<f64>], class: &str) {
        let mut d = String::new();
        let mut pen_down = false;
        for (i, value) in values.iter().enumerate() {
            let Some(value) = value else {
                pen_down = false;
                continue;
            };
            let (x0, x1) = (self.x.at(i as f64 * bin), self.x.at((i + 1) as f64 * bin));
            let y = self.y.at(*value);
            if pen_down {
                put!(d, "V{y:.1}H{x1:.1}");
            } else {
                put!(d, "M{x0:.1} {y:.1}H{x1:.1}");
                pen_down = true;
            }
        }
        if !d.is_empty() {
            put!(self.out, r#"<path d="{d}" class="{class}"/>"#);
        }
    }

    /// The area between a step line and the axis.
    pub fn area(&mut self, bin: f64, values: &[f64], class: &str) {
        let base = self.y.at(0.0);
        let mut d = format!("M{:.1} {base:.1}", self.x.at(0.0));
        for (i, value) in values.iter().enumerate() {
            put!(d, "V{:.1}H{:.1}", self.y.at(*value), self.x.at((i + 1) as f64 * bin));
        }
        put!(d, "V{base:.1}Z");
        put!(self.out, r#"<path d="{d}" class="{class}"/>"#);
    }

    /// A line through points in data units.
    pub fn polyline(&mut self, points: &[(f64, f64)], class: &str) {
        let mut d = String::new();
        for (i, (x, y)) in points.iter().enumerate() {
            let pen = if i == 0 { 'M' } else { 'L' };
            put!(d, "{pen}{:.1} {:.1}", self.x.at(*x), self.y.at(*y));
        }
        if !d.is_empty() {
            put!(self.out, r#"<path d="{d}" class="{class}"/>"#);
        }
    }

    /// The whole element; `label` says in words what it shows.
    pub fn finish(self, class: &str, label: &str) -> String {
        let (w, h) = (self.width, self.height);
        format!(
            "<svg class=\"plot {class}\" viewBox=\"0 0 {w:.0} {h:.0}\" role=\"img\" \
             aria-label=\"{}\">{}</svg>",
            Escaped(label),
            self.out
        )
    }
}

/// Microseconds as a person writes them: three digits and a unit.
pub fn duration(us: f64) -> String {
    if us < 0.0 {
        return format!("−{}", duration(-us));
    }
    let (value, unit) = match us {
        us if us < 1e3 => (us, "µs"),
        us if us < 1e6 => (us / 1e3, "ms"),
        us if us < 600e6 => (us / 1e6, "s"),
        us => (us / 60e6, "min"),
    };
    format!("{} {unit}", digits(value))
}

/// Three significant digits, no needless zeros behind the point.
pub fn digits(value: f64) -> String {
    let size = value.abs();
    let text = match size {
        s if s >= 99.95 || s == 0.0 => format!("{value:.0}"),
        s if s >= 9.995 => format!("{value:.1}"),
        _ => format!("{value:.2}"),
    };
    if text.contains('.') {
        text.trim_end_matches('0').trim_end_matches('.').to_string()
    } else {
        text
    }
}

/// At most `most` characters, the rest as an ellipsis.
pub fn short(text: &str, most: usize) -> String {
    if text.chars().count() <= most {
        return text.to_string();
    }
    text.chars().take(most.saturating_sub(1)).chain(['…']).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn markup_in_text_stays_text() {
        let hostile = "<script>alert(\"1\")</script>&'\u{1b}";
        let safe = Escaped(hostile).to_string();
        assert_eq!(safe, "&lt;script&gt;alert(&quot;1&quot;)&lt;/script&gt;&amp;&#39;\u{fffd}");
    }

    #[test]
    fn ticks_are_round_and_inside() {
        let ticks = Scale::linear((0.0, 87.0), (0.0, 1.0)).ticks(5);
        assert_eq!(ticks, [0.0, 20.0, 40.0, 60.0, 80.0]);
        let ticks = Scale::log((0.3, 950.0), (0.0, 1.0)).ticks(5);
        assert_eq!(ticks.len(), 5);
        assert!((ticks[0] - 0.1).abs() < 1e-9 && (ticks[4] - 1000.0).abs() < 1e-6);
        // A domain of one point has an axis all the same.
        assert!(!Scale::linear((3.0, 3.0), (0.0, 1.0)).ticks(4).is_empty());
    }

    #[test]
    fn durations_keep_three_digits() {
        for (us, text) in [
            (0.0, "0 µs"),
            (812.0, "812 µs"),
            (4_250.0, "4.25 ms"),
            (40_000.0, "40 ms"),
            (1_384_000.0, "1.38 s"),
            (-2_000.0, "−2 ms"),
            (1_800e6, "30 min"),
        ] {
            assert_eq!(duration(us), text);
        }
    }
}
