//! One answer in the making: tokens in, text with its log probabilities out.
//!
//! A pure core. It detokenises, holds back what may be a stop string, and keeps a token's log
//! probability until the token's text is let go. A streamed and a whole answer are both made of
//! its pieces, so that the concatenated stream is the whole text by construction.
//!
//! Positions are checked: what comes twice is dropped, a gap is an error, never silence.

use super::text::Detokenizer;
use dunlin_model::sampling::TokenLogprob;
use dunlin_model::stop::StopMatcher;
use std::collections::VecDeque;

/// A token that may be shown, with its place in the text.
#[derive(Debug, Clone, PartialEq)]
pub struct Entry {
    pub id: u32,
    /// `None` for the very first token of a prompt, which nothing predicts.
    pub logprob: Option<TokenLogprob>,
    /// Where its text begins, in characters from the beginning of what is shown.
    pub offset: usize,
}

/// Text to show next. `entries` is empty unless log probabilities were asked for.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Piece {
    pub text: String,
    pub entries: Vec<Entry>,
    /// A stop string came after `text`: the answer is over.
    pub stopped: bool,
}

impl Piece {
    pub fn is_empty(&self) -> bool {
        self.text.is_empty() && self.entries.is_empty()
    }
}

/// Output tokens are missing: they must not be papered over.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("output token {expected} is missing: {got} came next")]
pub struct Gap {
    pub expected: u32,
    pub got: u32,
}

/// What the answer must know of its request.
#[derive(Debug, Clone, Default)]
pub struct Rules {
    pub stop: Vec<String>,
    /// Tokens that end the answer and have no text.
    pub stop_tokens: Vec<u32>,
    /// Stop strings count only after this many tokens.
    pub min_tokens: u32,
    pub logprobs: bool,
    /// More is never shown; 0 where only the prompt is to be scored.
    pub max_tokens: u32,
}

/// State of one answer.
pub struct Answer {
    detokenizer: Box<dyn Detokenizer>,
    matcher: StopMatcher,
    rules: Rules,
    /// Output tokens taken so far, which is the position expected next.
    taken: u32,
    /// Characters of text made, and of text let go, echo included.
    made: usize,
    shown: usize,
    /// Tokens whose text is not wholly let go, with the character after their last.
    held: VecDeque<(usize, Entry)>,
    over: bool,
}

impl Answer {
    pub fn new(detokenizer: Box<dyn Detokenizer>, rules: Rules) -> Self {
        let matcher = StopMatcher::new(&rules.stop);
        Self {
            detokenizer,
            matcher,
            rules,
            taken: 0,
            made: 0,
            shown: 0,
            held: VecDeque::new(),
            over: false,
        }
    }

    /// Shows the prompt in front of the answer (`echo`).
    pub fn echo(&mut self, text: &str, entries: Vec<Entry>) -> Piece {
        self.made += text.chars().count();
        self.shown = self.made;
        Piece { text: text.to_owned(), entries, stopped: false }
    }

    /// Output tokens taken so far, up to and including the one that completed a stop string.
    pub fn taken(&self) -> u32 {
        self.taken
    }

    /// Takes output tokens, the first of them at `position`.
    pub fn tokens(
        &mut self,
        position: u32,
        ids: &[u32],
        logprobs: Vec<TokenLogprob>,
    ) -> Result<Piece, Gap> {
        let mut piece = Piece::default();
        let mut logprobs = logprobs.into_iter();
        for (at, id) in (position..).zip(ids) {
            let logprob = logprobs.next();
            if self.over || at < self.taken || self.taken >= self.rules.max_tokens {
                continue;
            }
            if at > self.taken {
                return Err(Gap { expected: self.taken, got: at });
            }
            self.taken += 1;
            self.token(*id, logprob, &mut piece);
        }
        Ok(piece)
    }

    /// The answer ended otherwise than by a stop string: lets go of all that was held.
    pub fn finish(&mut self) -> Piece {
        let mut piece = Piece::default();
        if !self.over {
            self.over = true;
            let text = self.detokenizer.finish();
            self.made += text.chars().count();
            let released = self.matcher.push(&text);
            self.show(&released.text, &mut piece);
            if released.stop.is_some() {
                self.release(true, &mut piece);
            } else {
                let rest = self.matcher.finish();
                self.show(&rest, &mut piece);
                piece.entries.extend(self.held.drain(..).map(|(_, entry)| entry));
            }
        }
        piece
    }

    fn token(&mut self, id: u32, logprob: Option<TokenLogprob>, piece: &mut Piece) {
        if self.rules.stop_tokens.contains(&id) {
            return;
        }
        let offset = self.made;
        let text = self.detokenizer.push(id);
        self.made += text.chars().count();
        if self.rules.logprobs {
            self.held.push_back((self.made, Entry { id, logprob, offset }));
        }
        if self.taken <= self.rules.min_tokens {
            self.show(&text, piece);
            self.release(false, piece);
            return;
        }
        let released = self.matcher.push(&text);
        self.show(&released.text, piece);
        self.release(released.stop.is_some(), piece);
        if released.stop.is_some() {
            self.over = true;
            piece.stopped = true;
        }
    }

    fn show(&mut self, text: &str, piece: &mut Piece) {
        self.shown += text.chars().count();
        piece.text.push_str(text);
    }

    /// Lets go of tokens whose text is shown: all of it, or at the end of the answer some of it.
    fn release(&mut self, end: bool, piece: &mut Piece) {
        while let Some((last, entry)) = self.held.front() {
            let show = if end { entry.offset < self.shown } else { *last <= self.shown };
            if !show {
                break;
            }
            piece.entries.extend(self.held.pop_front().map(|(_, entry)| entry));
        }
        if end {
            self.held.clear();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::text::{ByteModel, TextModel};
    use super::*;
    use proptest::prelude::*;
    use std::sync::Arc;

    fn answer(rules: Rules) -> Answer {
        let rules = Rules { stop_tokens: vec![ByteModel::END], ..rules };
        Answer::new(Arc::new(ByteModel::new(512, 4096)).detokenizer(), rules)
    }

    fn logprob(id: u32) -> TokenLogprob {
        TokenLogprob { logprob: -(id as f32) / 100.0, top: vec![] }
    }

    /// Feeds `ids` in groups of `sizes` (the last group takes the rest).
    fn feed(mut answer: Answer, ids: &[u32], sizes: &[usize]) -> (String, Vec<Entry>, u32) {
        let (mut text, mut entries, mut at) = (String::new(), Vec::new(), 0);
        let mut sizes = sizes.iter().copied();
        while at < ids.len() {
            let end = (at + sizes.next().unwrap_or(ids.len()).max(1)).min(ids.len());
            let group = &ids[at..end];
            let logprobs = group.iter().map(|id| logprob(*id)).collect();
            let piece = answer.tokens(at as u32, group, logprobs).unwrap();
            text.push_str(&piece.text);
            entries.extend(piece.entries);
            if piece.stopped {
                return (text, entries, answer.taken());
            }
            at = end;
        }
        let piece = answer.finish();
        text.push_str(&piece.text);
        entries.extend(piece.entries);
        (text, entries, answer.taken())
    }

    #[test]
    fn log_probabilities_follow_their_text_and_end_with_it() {
        let rules =
            Rules { stop: vec!["DEF".into()], logprobs: true, max_tokens: 99, ..Rules::default() };
        let ids: Vec<u32> = "ABCDEFG".bytes().map(u32::from).collect();
        let (text, entries, taken) = feed(answer(rules), &ids, &[1; 7]);
        assert_eq!(text, "ABC");
        assert_eq!(entries.iter().map(|e| e.id).collect::<Vec<_>>(), [65, 66, 67]);
        assert_eq!(entries.iter().map(|e| e.offset).collect::<Vec<_>>(), [0, 1, 2]);
        assert_eq!(taken, 6);
    }

    #[test]
    fn a_token_half_cut_by_a_stop_string_is_listed() {
        let rules =
            Rules { stop: vec!["30".into()], logprobs: true, max_tokens: 9, ..Rules::default() };
        // " w300" loses its "300".
        let (text, entries, _) = feed(answer(rules), &[300, 301], &[]);
        assert_eq!(text, " w");
        assert_eq!(entries.iter().map(|e| e.id).collect::<Vec<_>>(), [300]);
    }

    #[test]
    fn stop_strings_wait_for_min_tokens() {
        let rules =
            Rules { stop: vec!["A".into()], min_tokens: 2, max_tokens: 9, ..Rules::default() };
        let (text, _, taken) = feed(answer(rules), &[65, 65, 66, 65, 66], &[1; 5]);
        assert_eq!((text.as_str(), taken), ("AAB", 4));
    }

    #[test]
    fn repeats_are_dropped_and_gaps_refused() {
        let mut a = answer(Rules { max_tokens: 9, ..Rules::default() });
        assert_eq!(a.tokens(0, &[65, 66], vec![]).unwrap().text, "AB");
        assert_eq!(a.tokens(1, &[66, 67], vec![]).unwrap().text, "C");
        assert_eq!(a.tokens(4, &[68], vec![]), Err(Gap { expected: 3, got: 4 }));
    }

    proptest! {
        /// However tokens are grouped, text, log probabilities and count are the same, and
        /// without stop strings every token but the stop token is listed.
        #[test]
        fn grouping_does_not_matter(
            text in "[ab\u{e9}\u{1fae0}]{0,20}",
            noise in prop::collection::vec(0u32..400, 0..20),
            stop in prop::collection::vec("[ab\u{e9}\u{1fae0}]{1,4}", 0..3),
            sizes in prop::collection::vec(1usize..6, 0..20),
            min_tokens in 0u32..6,
        ) {
            let ids: Vec<u32> = text.bytes().map(u32::from).chain(noise).collect();
            let rules = Rules {
                stop: stop.clone(), min_tokens, logprobs: true, max_tokens: 1000,
                ..Rules::default()
            };
            let singly = feed(answer(rules.clone()), &ids, &vec![1; ids.len()]);
            let grouped = feed(answer(rules), &ids, &sizes);
            prop_assert_eq!(&singly, &grouped);
            if stop.is_empty() {
                let listed: Vec<u32> = singly.1.iter().map(|e| e.id).collect();
                let all: Vec<u32> =
                    ids.iter().copied().filter(|id| *id != ByteModel::END).collect();
                prop_assert_eq!(listed, all);
            }
        }
    }
}
