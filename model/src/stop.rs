//! Stop strings: text ends before the first of them, and nothing of it is ever given out.
//!
//! Text is held back only while it may be the beginning of a stop string. The outcome does not
//! depend on how the text is cut into pieces: the stop string that is complete first wins; of
//! several complete at the same place, the one that began first.

/// Watches one text for stop strings.
#[derive(Debug, Clone, Default)]
pub struct StopMatcher {
    stops: Vec<String>,
    held: String,
    stopped: bool,
}

/// What a piece of text let through.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Passed {
    pub text: String,
    /// Which stop string ended the text (index as given to [`StopMatcher::new`]).
    pub stop: Option<usize>,
}

impl StopMatcher {
    /// Empty stop strings never match.
    pub fn new(stops: &[String]) -> Self {
        Self { stops: stops.to_vec(), held: String::new(), stopped: false }
    }

    /// Takes the next piece of text; gives out what can no longer be part of a stop string.
    /// After a match nothing comes out any more.
    pub fn push(&mut self, piece: &str) -> Passed {
        if self.stopped {
            return Passed::default();
        }
        let mut text = std::mem::take(&mut self.held);
        text.push_str(piece);
        if let Some((start, stop)) = self.first_match(&text) {
            self.stopped = true;
            text.truncate(start);
            return Passed { text, stop: Some(stop) };
        }
        let hold = self.hold(&text);
        self.held = text.split_off(text.len() - hold);
        Passed { text, stop: None }
    }

    /// The text ended without a match: what was held is text after all.
    pub fn finish(&mut self) -> String {
        std::mem::take(&mut self.held)
    }

    /// Bytes held back at the moment.
    pub fn held(&self) -> usize {
        self.held.len()
    }

    /// Start and index of the match that ends first (then begins first, then is listed first).
    fn first_match(&self, text: &str) -> Option<(usize, usize)> {
        let at = |(i, stop): (usize, &String)| {
            let start = if stop.is_empty() { None } else { text.find(stop.as_str()) }?;
            Some((start + stop.len(), start, i))
        };
        self.stops.iter().enumerate().filter_map(at).min().map(|(_, start, i)| (start, i))
    }

    /// Length of the longest end of `text` that begins a stop string.
    fn hold(&self, text: &str) -> usize {
        let longest = |stop: &String| {
            let most = text.len().min(stop.len().saturating_sub(1));
            (1..=most)
                .rev()
                .find(|n| text.as_bytes().ends_with(&stop.as_bytes()[..*n]))
                .filter(|n| text.is_char_boundary(text.len() - n))
                .unwrap_or(0)
        };
        self.stops.iter().map(longest).max().unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn run(stops: &[&str], pieces: &[&str]) -> (Vec<String>, Option<usize>) {
        let stops: Vec<String> = stops.iter().map(|s| (*s).to_owned()).collect();
        let mut matcher = StopMatcher::new(&stops);
        let mut out = Vec::new();
        for piece in pieces {
            let passed = matcher.push(piece);
            out.push(passed.text);
            if passed.stop.is_some() {
                return (out, passed.stop);
            }
        }
        out.push(matcher.finish());
        (out, None)
    }

    /// Case C49: nothing of the stop string gets out, and what only looked like it does.
    #[test]
    fn a_stop_string_in_pieces_is_held_back() {
        let pieces = ["ABC", "DEF", "G", "HI", "J", "K"];
        let (out, stop) = run(&["DEFGHIJ"], &pieces);
        assert_eq!((out.concat().as_str(), stop), ("ABC", Some(0)));
        let (out, stop) = run(&["DEX"], &pieces);
        assert_eq!((out.concat().as_str(), stop), ("ABCDEFGHIJK", None));
        let (out, _) = run(&["DEX"], &["ABCDE"]);
        assert_eq!(out, ["ABC", "DE"]);
    }

    #[test]
    fn overlapping_beginnings_are_not_missed() {
        assert_eq!(run(&["aab"], &["a", "a", "a", "b"]).0.concat(), "a");
        assert_eq!(run(&["bcd", "abc"], &["xabcd"]), (vec!["x".into()], Some(1)));
        assert_eq!(run(&["c", "abc"], &["xabc"]), (vec!["x".into()], Some(1)));
    }

    /// Character by character, looking at the whole text each time.
    fn naive(stops: &[String], text: &str) -> (String, Option<usize>) {
        for (at, c) in text.char_indices() {
            let so_far = &text[..at + c.len_utf8()];
            let ends = |s: &String| !s.is_empty() && so_far.ends_with(s.as_str());
            let best = (0..stops.len())
                .filter(|i| ends(&stops[*i]))
                .min_by_key(|i| (so_far.len() - stops[*i].len(), *i));
            if let Some(i) = best {
                return (so_far[..so_far.len() - stops[i].len()].to_owned(), Some(i));
            }
        }
        (text.to_owned(), None)
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(4000))]

        #[test]
        fn any_cut_gives_what_the_whole_text_gives(
            stops in prop::collection::vec("[abď🫠]{0,4}", 0..4),
            pieces in prop::collection::vec("[abcď🫠]{0,5}", 0..8),
        ) {
            let mut matcher = StopMatcher::new(&stops);
            let (mut out, mut stop) = (String::new(), None);
            for piece in &pieces {
                let passed = matcher.push(piece);
                out.push_str(&passed.text);
                stop = stop.or(passed.stop);
                // Never more is held than could be needed, never a character too many.
                prop_assert!(matcher.held() < stops.iter().map(String::len).max().unwrap_or(0).max(1));
            }
            out.push_str(&matcher.finish());
            prop_assert_eq!((out, stop), naive(&stops, &pieces.concat()));
        }
    }
}
