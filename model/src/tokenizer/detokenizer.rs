//! Tokens to text, as they arrive.
//!
//! The rule: text is given out in whole characters. Bytes that cannot begin or continue any
//! character become U+FFFD, one for each unbroken run of them. Bytes that could still become a
//! character are held; where the tokens end in the middle of one (max_tokens), they are dropped,
//! since they are not wrong, only unfinished.

use super::Tokenizer;
use std::sync::Arc;

const REPLACEMENT: char = char::REPLACEMENT_CHARACTER;

/// Turns a stream of ids into pieces of text; all pieces together are
/// [`Tokenizer::decode`] of all ids.
#[derive(Debug, Clone)]
pub struct Detokenizer {
    tokenizer: Arc<Tokenizer>,
    skip_special: bool,
    decoder: Utf8,
}

impl Detokenizer {
    /// `skip_special` leaves control tokens out of the text.
    pub fn new(tokenizer: Arc<Tokenizer>, skip_special: bool) -> Self {
        Self { tokenizer, skip_special, decoder: Utf8::default() }
    }

    /// The text that `id` completes; often one word, empty in the middle of a character.
    pub fn push(&mut self, id: u32) -> String {
        let mut text = String::new();
        if !(self.skip_special && self.tokenizer.is_special(id)) {
            self.decoder.push(self.tokenizer.id_to_bytes(id), &mut text);
        }
        text
    }

    /// Ends the stream. The bytes of an unfinished character are dropped, so there is no text
    /// left to give; the value is for symmetry with what else can end a stream.
    pub fn finish(self) -> String {
        String::new()
    }

    /// Bytes held for a character that is not complete yet (at most three).
    pub fn held(&self) -> &[u8] {
        &self.decoder.held
    }
}

/// The text of `bytes` under the rule above.
pub fn decode_bytes(bytes: &[u8]) -> String {
    let mut text = String::with_capacity(bytes.len());
    Utf8::default().push(bytes, &mut text);
    text
}

/// An incremental UTF-8 decoder.
#[derive(Debug, Clone, Default)]
struct Utf8 {
    /// The valid beginning of a character.
    held: Vec<u8>,
    /// The last character given out stands for invalid bytes.
    in_invalid_run: bool,
}

impl Utf8 {
    fn push(&mut self, bytes: &[u8], out: &mut String) {
        let joined;
        let mut rest = bytes;
        if !self.held.is_empty() {
            joined = [std::mem::take(&mut self.held).as_slice(), bytes].concat();
            rest = &joined;
        }
        loop {
            let (valid, bad, after) = split(rest);
            if !valid.is_empty() {
                out.push_str(valid);
                self.in_invalid_run = false;
            }
            if bad == 0 {
                self.held = after.to_vec();
                return;
            }
            if !self.in_invalid_run {
                out.push(REPLACEMENT);
                self.in_invalid_run = true;
            }
            rest = after;
        }
    }
}

/// The valid beginning of `bytes`; how many invalid bytes follow it; and what comes after those.
/// With no invalid bytes, what comes after may yet become a character.
fn split(bytes: &[u8]) -> (&str, usize, &[u8]) {
    match std::str::from_utf8(bytes) {
        Ok(text) => (text, 0, &[]),
        Err(e) => {
            let (valid, rest) = bytes.split_at(e.valid_up_to());
            let bad = e.error_len().unwrap_or(0);
            (std::str::from_utf8(valid).unwrap_or_default(), bad, &rest[bad..])
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn pieces(all: &[&[u8]]) -> Vec<String> {
        let mut decoder = Utf8::default();
        all.iter()
            .map(|bytes| {
                let mut text = String::new();
                decoder.push(bytes, &mut text);
                text
            })
            .collect()
    }

    #[test]
    fn characters_wait_until_they_are_whole() {
        let text = "ď🫠";
        let bytes: Vec<&[u8]> = text.as_bytes().chunks(1).collect();
        assert_eq!(pieces(&bytes), ["", "ď", "", "", "", "🫠"]);
    }

    #[test]
    fn invalid_bytes_become_one_replacement_and_unfinished_ones_none() {
        assert_eq!(decode_bytes(b"a\xF0\x9F\xAB"), "a");
        assert_eq!(decode_bytes(b"a\xF0\x9F\xABb"), "a\u{FFFD}b");
        assert_eq!(decode_bytes(b"a\x80\x80\xFF\x80b\xC4"), "a\u{FFFD}b");
        assert_eq!(decode_bytes(b"\xC4\xC4\x8F"), "\u{FFFD}ď");
        assert_eq!(pieces(&[b"\x80", b"\x80", b"x", b"\xFF"]), ["\u{FFFD}", "", "x", "\u{FFFD}"]);
        // A replacement character of the model's own is text.
        assert_eq!(pieces(&["\u{FFFD}".as_bytes(), "\u{FFFD}".as_bytes()]).concat().len(), 6);
    }

    proptest! {
        #[test]
        fn cutting_the_bytes_anywhere_changes_nothing(
            bytes in prop::collection::vec(
                prop_oneof![any::<u8>(), 0x80u8..0xC0, Just(0xC4), Just(0xE2), Just(0xF0), Just(b'a')],
                0..40),
            cuts in prop::collection::vec(0usize..40, 0..10),
        ) {
            let mut at = 0;
            let mut parts = Vec::new();
            let mut cuts = cuts;
            cuts.sort_unstable();
            for cut in cuts {
                let cut = cut.clamp(at, bytes.len());
                parts.push(&bytes[at..cut]);
                at = cut;
            }
            parts.push(&bytes[at..]);
            prop_assert_eq!(pieces(&parts).concat(), decode_bytes(&bytes));
        }

        #[test]
        fn valid_text_is_itself(text in any::<String>()) {
            prop_assert_eq!(decode_bytes(text.as_bytes()), text);
        }
    }
}
