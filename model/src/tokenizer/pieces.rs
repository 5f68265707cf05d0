//! Token ids to bytes.

/// The bytes of every token, in one allocation.
#[derive(Debug, Clone, Default)]
pub struct Pieces {
    bytes: Vec<u8>,
    /// End of each token's bytes; it begins where the one before it ends.
    ends: Vec<u32>,
    special: Vec<bool>,
}

impl Pieces {
    /// Adds the next id's bytes.
    pub fn push(&mut self, bytes: &[u8], special: bool) {
        self.bytes.extend_from_slice(bytes);
        // A vocabulary of 4 GiB does not get here: model files bound both tokens and text.
        self.ends.push(u32::try_from(self.bytes.len()).unwrap_or(u32::MAX));
        self.special.push(special);
    }

    pub fn get(&self, id: u32) -> Option<&[u8]> {
        let i = id as usize;
        let end = *self.ends.get(i)?;
        let start = if i == 0 { 0 } else { *self.ends.get(i - 1)? };
        self.bytes.get(start as usize..end as usize)
    }

    pub fn is_special(&self, id: u32) -> bool {
        self.special.get(id as usize).copied().unwrap_or(false)
    }

    pub fn len(&self) -> usize {
        self.ends.len()
    }

    pub fn is_empty(&self) -> bool {
        self.ends.is_empty()
    }
}

/// How the tokens of a vocabulary spell bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Spelling {
    /// GPT-2: every byte is a printable character.
    ByteLevel,
    /// SentencePiece: `▁` is a space, `<0x0A>` a byte.
    SentencePiece,
    /// As it is written.
    Plain,
}

impl Spelling {
    /// The bytes of an ordinary token.
    pub(super) fn bytes(self, token: &str) -> Vec<u8> {
        match self {
            Spelling::Plain => token.as_bytes().to_vec(),
            Spelling::SentencePiece => match byte_token(token) {
                Some(byte) => vec![byte],
                None => token.replace('▁', " ").into_bytes(),
            },
            Spelling::ByteLevel => {
                let mut out = Vec::with_capacity(token.len());
                for c in token.chars() {
                    match byte_of(c) {
                        Some(byte) => out.push(byte),
                        None => out.extend_from_slice(c.encode_utf8(&mut [0; 4]).as_bytes()),
                    }
                }
                out
            }
        }
    }
}

/// The byte of a SentencePiece byte token, `<0x41>`.
pub(super) fn byte_token(token: &str) -> Option<u8> {
    let digits = token.strip_prefix("<0x")?.strip_suffix('>')?;
    let hex = digits.len() == 2 && digits.bytes().all(|b| b.is_ascii_hexdigit());
    hex.then(|| u8::from_str_radix(digits, 16).ok())?
}

/// The inverse of GPT-2's `bytes_to_unicode`: printable Latin-1 stands for itself, the 68 other
/// bytes are numbered from U+0100 in ascending order.
fn byte_of(c: char) -> Option<u8> {
    let code = u32::from(c);
    match code {
        0x21..=0x7E | 0xA1..=0xAC | 0xAE..=0xFF => u8::try_from(code).ok(),
        // 0x00-0x20, 0x7F-0xA0, 0xAD
        0x100..=0x120 => u8::try_from(code - 0x100).ok(),
        0x121..=0x142 => u8::try_from(code - 0x121 + 0x7F).ok(),
        0x143 => Some(0xAD),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn byte_level_spelling_is_a_bijection() {
        let alphabet = tokenizers::pre_tokenizers::byte_level::ByteLevel::alphabet();
        let mut bytes: Vec<u8> = alphabet.iter().filter_map(|c| byte_of(*c)).collect();
        bytes.sort_unstable();
        assert_eq!(bytes, (0..=255).collect::<Vec<u8>>());
        assert_eq!(byte_of('Ġ'), Some(b' '));
        assert_eq!(byte_of('Ċ'), Some(b'\n'));
        assert_eq!(byte_of('ł'), Some(0xA0));
    }

    #[test]
    fn byte_tokens_are_exact() {
        assert_eq!(byte_token("<0x0A>"), Some(10));
        for not in ["<0x>", "<0x0>", "<0x+1>", "<0x0AA>", "0x0A"] {
            assert_eq!(byte_token(not), None, "{not}");
        }
    }
}
