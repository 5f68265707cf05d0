//! SentencePiece BPE: merge the neighbouring pair whose union has the best score, leftmost first,
//! until no union is in the vocabulary; characters that are not in it become byte tokens.
//!
//! Source: Kudo and Richardson, "SentencePiece", EMNLP 2018, and its `bpe_model.cc`. Control
//! tokens are never formed from text.

use std::collections::{BinaryHeap, HashMap};
use tokenizers::Token;

/// Vocabulary and scores.
pub(super) struct SentencePiece {
    tokens: Vec<String>,
    /// Ordinary tokens only: what text may become, with its score.
    mergeable: HashMap<String, (u32, f32)>,
    /// Every token, for look-ups by name.
    ids: HashMap<String, u32>,
    /// The token of each byte.
    bytes: Vec<Option<u32>>,
    unknown: Option<u32>,
}

/// What a token of the vocabulary is, as GGUF's `token_type` numbers it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum TokenKind {
    Normal,
    Unknown,
    Control,
    UserDefined,
    Unused,
    Byte,
}

impl SentencePiece {
    pub(super) fn new(
        tokens: Vec<String>,
        scores: &[f32],
        kinds: &[TokenKind],
        unknown: Option<u32>,
    ) -> Self {
        let mut mergeable = HashMap::with_capacity(tokens.len());
        let mut ids = HashMap::with_capacity(tokens.len());
        let mut bytes = vec![None; 256];
        for (id, token) in (0u32..).zip(&tokens) {
            let kind = kinds.get(id as usize).copied().unwrap_or(TokenKind::Normal);
            let score = scores.get(id as usize).copied().unwrap_or(0.0);
            ids.insert(token.clone(), id);
            match kind {
                TokenKind::Normal | TokenKind::Unused => {
                    mergeable.insert(token.clone(), (id, score));
                }
                TokenKind::Byte => {
                    if let Some(b) = super::pieces::byte_token(token) {
                        bytes[usize::from(b)] = Some(id);
                    }
                }
                TokenKind::Unknown | TokenKind::Control | TokenKind::UserDefined => {}
            }
        }
        Self { tokens, mergeable, ids, bytes, unknown }
    }

    pub(super) fn tokenize(&self, text: &str) -> Vec<Token> {
        let mut out = Vec::new();
        for (start, end) in self.merge(text) {
            let piece = text.get(start..end).unwrap_or_default();
            match self.mergeable.get(piece) {
                Some((id, _)) => out.push(Token::new(*id, piece.to_owned(), (start, end))),
                None => self.fall_back(piece, (start, end), &mut out),
            }
        }
        out
    }

    pub(super) fn token_to_id(&self, token: &str) -> Option<u32> {
        self.ids.get(token).copied()
    }

    pub(super) fn id_to_token(&self, id: u32) -> Option<&str> {
        self.tokens.get(id as usize).map(String::as_str)
    }

    pub(super) fn vocab(&self) -> HashMap<String, u32> {
        self.ids.clone()
    }

    pub(super) fn len(&self) -> usize {
        self.tokens.len()
    }

    /// Byte ranges of the merged symbols, in order.
    fn merge(&self, text: &str) -> Vec<(usize, usize)> {
        let mut symbols = Symbols::new(text);
        let mut queue = BinaryHeap::new();
        for left in 0..symbols.list.len() {
            self.offer(&mut queue, text, &symbols, left);
        }
        while let Some(pair) = queue.pop() {
            if symbols.join(&pair) {
                if let Some(before) = symbols.list[pair.left].before {
                    self.offer(&mut queue, text, &symbols, before);
                }
                self.offer(&mut queue, text, &symbols, pair.left);
            }
        }
        symbols.list.iter().filter(|s| s.end > s.start).map(|s| (s.start, s.end)).collect()
    }

    /// Queues the union of `left` and its neighbour, if there is such a token.
    fn offer(&self, queue: &mut BinaryHeap<Pair>, text: &str, symbols: &Symbols, left: usize) {
        let Some(right) = symbols.list[left].after else { return };
        let (start, end) = (symbols.list[left].start, symbols.list[right].end);
        let union = text.get(start..end).unwrap_or_default();
        if let Some((_, score)) = self.mergeable.get(union) {
            queue.push(Pair { score: *score, left, right, start, end });
        }
    }

    fn fall_back(&self, piece: &str, at: (usize, usize), out: &mut Vec<Token>) {
        let ids: Option<Vec<u32>> =
            piece.bytes().map(|b| self.bytes.get(usize::from(b)).copied().flatten()).collect();
        let ids = ids.unwrap_or_else(|| self.unknown.into_iter().collect());
        for id in ids {
            out.push(Token::new(id, self.id_to_token(id).unwrap_or_default().to_owned(), at));
        }
    }
}

/// A run of text that will be one token; linked to its neighbours, empty once joined to the left.
struct Symbol {
    start: usize,
    end: usize,
    before: Option<usize>,
    after: Option<usize>,
}

struct Symbols {
    list: Vec<Symbol>,
}

impl Symbols {
    fn new(text: &str) -> Self {
        let mut list: Vec<Symbol> = text
            .char_indices()
            .enumerate()
            .map(|(i, (start, c))| Symbol {
                start,
                end: start + c.len_utf8(),
                before: i.checked_sub(1),
                after: Some(i + 1),
            })
            .collect();
        if let Some(last) = list.last_mut() {
            last.after = None;
        }
        Self { list }
    }

    /// Joins the pair, unless one of its halves has changed since it was queued.
    fn join(&mut self, pair: &Pair) -> bool {
        let (left, right) = (&self.list[pair.left], &self.list[pair.right]);
        let same = left.end > left.start
            && right.end > right.start
            && left.start == pair.start
            && right.end == pair.end
            && left.after == Some(pair.right);
        if !same {
            return false;
        }
        let after = right.after;
        self.list[pair.left].end = pair.end;
        self.list[pair.left].after = after;
        self.list[pair.right].start = pair.end;
        if let Some(after) = after {
            self.list[after].before = Some(pair.left);
        }
        true
    }
}

/// A possible merge. The greatest is the best: highest score, then leftmost.
struct Pair {
    score: f32,
    left: usize,
    right: usize,
    start: usize,
    end: usize,
}

impl Ord for Pair {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.score.total_cmp(&other.score).then(other.left.cmp(&self.left))
    }
}
impl PartialOrd for Pair {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}
impl PartialEq for Pair {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other).is_eq()
    }
}
impl Eq for Pair {}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const WORDS: [(&str, f32); 9] = [
        ("a", -5.0),
        ("b", -5.0),
        ("c", -5.0),
        ("ab", -1.0),
        ("bc", -2.0),
        ("abc", -3.0),
        ("aa", -1.0),
        ("ca", -4.0),
        ("abab", -2.0),
    ];

    fn small() -> SentencePiece {
        let mut tokens: Vec<String> = WORDS.iter().map(|w| w.0.to_owned()).collect();
        let mut scores: Vec<f32> = WORDS.iter().map(|w| w.1).collect();
        let mut kinds = vec![TokenKind::Normal; tokens.len()];
        for b in 0..=255u8 {
            tokens.push(format!("<0x{b:02X}>"));
            scores.push(0.0);
            kinds.push(TokenKind::Byte);
        }
        SentencePiece::new(tokens, &scores, &kinds, None)
    }

    /// Looks at every pair before every merge.
    fn naive(model: &SentencePiece, text: &str) -> Vec<String> {
        let mut parts: Vec<String> = text.chars().map(String::from).collect();
        loop {
            let mut best: Option<(usize, f32)> = None;
            for i in 1..parts.len() {
                let union = format!("{}{}", parts[i - 1], parts[i]);
                if let Some((_, s)) = model.mergeable.get(&union)
                    && best.is_none_or(|(_, b)| *s > b)
                {
                    best = Some((i, *s));
                }
            }
            let Some((i, _)) = best else { return parts };
            let right = parts.remove(i);
            parts[i - 1].push_str(&right);
        }
    }

    proptest! {
        #[test]
        fn the_queue_merges_as_a_full_search_does(text in "[abc]{0,24}") {
            let model = small();
            let got: Vec<String> = model.tokenize(&text).into_iter().map(|t| t.value).collect();
            prop_assert_eq!(got, naive(&model, &text));
        }
    }

    #[test]
    fn unknown_characters_fall_back_to_bytes() {
        let ids: Vec<String> = small().tokenize("aď").into_iter().map(|t| t.value).collect();
        assert_eq!(ids, ["a", "<0xC4>", "<0x8F>"]);
    }
}
