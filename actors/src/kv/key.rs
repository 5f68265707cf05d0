//! Names of KV blocks: a chained hash over everything that decides what a block holds.
//!
//! `link[0] = BLAKE3(schema, namespace, tenant, salt)`, `link[i] = BLAKE3 keyed by link[i-1] (tokens
//! of block i)`, integers little-endian and strings length-prefixed; a block's key is the first 128
//! bits of its link. Nothing random and no address enters, so that every process names the same
//! block alike: a gateway computes the keys of a prompt ([`Chain::of_prompt`]), and the router looks
//! for the replica that holds them.
//! As the link before is the key of the hash and not part of its input, a block of 16 tokens is one
//! compression.
//!
//! A property that changes the KV of the same tokens must be part of the namespace (model hash,
//! KV format, rope scaling, adapter) or of the salt. Whoever changes this file raises
//! [`KEY_SCHEMA`]; golden vectors in the tests hold it still.

use crate::messages::{BlockKey, KeySpace, PromptKeys};
use dunlin_runtime::mutated;
use std::sync::Arc;

/// Version of the key's definition; part of every key, so that unlike versions never match.
pub const KEY_SCHEMA: u32 = 2;

/// Who may share a block: one tenant, one salt. Prefix hits never cross scopes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Scope {
    pub tenant: String,
    pub salt: String,
}

/// The keys of one token sequence's full blocks, computed once and extended as it grows.
#[derive(Debug, Clone)]
pub struct Chain {
    scope: Arc<Scope>,
    /// Link of the last block in `keys`, or the root.
    tip: [u8; 32],
    block_tokens: usize,
    keys: Vec<BlockKey>,
}

impl Chain {
    /// `namespace` stands for the model's content and the KV format; `block_tokens` is at least 1.
    pub fn new(namespace: &[u8; 16], block_tokens: u32, tenant: &str, salt: &str) -> Self {
        let (tenant, salt) = if mutated("drop-salt") { ("", "") } else { (tenant, salt) };
        let tip = root(namespace, tenant, salt);
        let scope = Arc::new(Scope { tenant: tenant.into(), salt: salt.into() });
        Self { scope, tip, block_tokens: block_tokens.max(1) as usize, keys: Vec::new() }
    }

    /// The keys of a whole prompt, to be sent along with it.
    pub fn of_prompt(space: KeySpace, tenant: &str, salt: &str, prompt: &[u32]) -> PromptKeys {
        let mut chain = Self::new(&space.namespace, space.block_tokens, tenant, salt);
        chain.extend(prompt);
        PromptKeys { space, keys: chain.keys, tip: chain.tip }
    }

    /// Goes on from keys that came with a prompt of `tokens` tokens, as if computed here; `None` if
    /// there are too few or too many of them. That they are the right ones is not looked at.
    pub fn resume(given: PromptKeys, tenant: &str, salt: &str, tokens: usize) -> Option<Self> {
        let PromptKeys { space, keys, tip } = given;
        let block_tokens = usize::try_from(space.block_tokens).ok().filter(|tokens| *tokens > 0)?;
        let scope = Arc::new(Scope { tenant: tenant.into(), salt: salt.into() });
        (keys.len() == tokens / block_tokens).then_some(Self { scope, tip, block_tokens, keys })
    }

    /// Computes the keys of the full blocks of `tokens` that are still missing. `tokens` starts
    /// with what earlier calls were given.
    pub fn extend(&mut self, tokens: &[u32]) {
        self.keys.reserve((tokens.len() / self.block_tokens).saturating_sub(self.keys.len()));
        self.walk(tokens, |_| true);
    }

    /// Shows the keys of the full blocks of `tokens` in order, until `goes_on` says no; those that
    /// are missing are computed on the way, and no more than those. `tokens` as for `extend`.
    pub fn walk(&mut self, tokens: &[u32], mut goes_on: impl FnMut(&BlockKey) -> bool) {
        let blocks = tokens.len() / self.block_tokens;
        if !self.keys.iter().take(blocks).all(&mut goes_on) {
            return;
        }
        for block in tokens.chunks_exact(self.block_tokens).skip(self.keys.len()) {
            self.tip = link(&self.tip, block);
            let key = cut(&self.tip);
            self.keys.push(key);
            if !goes_on(&key) {
                return;
            }
        }
    }

    /// Keys of the full blocks seen so far, first block first.
    pub fn keys(&self) -> &[BlockKey] {
        &self.keys
    }

    pub fn scope(&self) -> &Arc<Scope> {
        &self.scope
    }

    pub fn block_tokens(&self) -> usize {
        self.block_tokens
    }
}

fn root(namespace: &[u8; 16], tenant: &str, salt: &str) -> [u8; 32] {
    let mut hash = blake3::Hasher::new();
    hash.update(&KEY_SCHEMA.to_le_bytes()).update(namespace);
    for text in [tenant, salt] {
        hash.update(&(text.len() as u64).to_le_bytes()).update(text.as_bytes());
    }
    *hash.finalize().as_bytes()
}

fn link(before: &[u8; 32], tokens: &[u32]) -> [u8; 32] {
    // Most blocks fit a buffer, and then hashing is one call without a hasher's state.
    let mut bytes = [0; 256];
    let fill = |bytes: &mut [u8], part: &[u32]| {
        for (slot, token) in bytes.chunks_exact_mut(4).zip(part) {
            slot.copy_from_slice(&token.to_le_bytes());
        }
    };
    if let Some(bytes) = bytes.get_mut(..tokens.len() * 4) {
        fill(bytes, tokens);
        return *blake3::keyed_hash(before, bytes).as_bytes();
    }
    let mut hash = blake3::Hasher::new_keyed(before);
    for part in tokens.chunks(bytes.len() / 4) {
        fill(&mut bytes, part);
        hash.update(&bytes[..part.len() * 4]);
    }
    *hash.finalize().as_bytes()
}

fn cut(link: &[u8; 32]) -> BlockKey {
    let mut key = [0; 16];
    key.copy_from_slice(&link[..16]);
    BlockKey(key)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hex(key: &BlockKey) -> String {
        key.0.iter().map(|b| format!("{b:02x}")).collect()
    }

    fn keys(namespace: u8, block: u32, tenant: &str, salt: &str, tokens: &[u32]) -> Vec<String> {
        let mut chain = Chain::new(&[namespace; 16], block, tenant, salt);
        chain.extend(tokens);
        chain.keys().iter().map(hex).collect()
    }

    /// Computed by an independent implementation (`tools/block_keys.py`, PyPI `blake3`).
    #[test]
    fn golden_vectors_hold_the_schema_still() {
        let tokens: Vec<u32> = (0..48).map(|i| i * 7919 + 3).collect();
        assert_eq!(keys(0xab, 16, "acme", "", &tokens), GOLDEN_ACME);
        assert_eq!(keys(0, 4, "", "pepper", &tokens[..9]), GOLDEN_SALTED);
        assert_eq!(keys(1, 80, "t", "s", &[5; 80]), GOLDEN_WIDE);
    }

    #[test]
    fn every_property_is_in_the_key() {
        let tokens: Vec<u32> = (0..16).collect();
        let mut seen = vec![
            keys(1, 16, "a", "b", &tokens),
            keys(2, 16, "a", "b", &tokens),
            keys(1, 16, "ab", "", &tokens),
            keys(1, 16, "", "ab", &tokens),
            keys(1, 16, "a", "", &tokens),
            keys(1, 8, "a", "b", &tokens[..8]),
        ];
        let count = seen.len();
        seen.sort();
        seen.dedup();
        assert_eq!(seen.len(), count);
    }

    #[test]
    fn a_walk_computes_no_more_than_it_shows() {
        let tokens: Vec<u32> = (0..40).collect();
        let mut whole = Chain::new(&[9; 16], 4, "t", "");
        whole.extend(&tokens);
        let mut chain = Chain::new(&[9; 16], 4, "t", "");
        for stop in [3, 1, 6, 10] {
            let mut seen = Vec::new();
            chain.walk(&tokens, |key| {
                seen.push(*key);
                seen.len() < stop
            });
            assert_eq!(seen, whole.keys()[..stop]);
            assert!(chain.keys().len() >= stop && chain.keys().len() <= stop.max(6));
        }
        chain.walk(&tokens[..9], |_| true);
        assert_eq!(chain.keys(), whole.keys());
    }

    #[test]
    fn growing_a_chain_equals_building_it_at_once() {
        let tokens: Vec<u32> = (0..40).collect();
        let mut grown = Chain::new(&[9; 16], 4, "t", "");
        for end in 0..=tokens.len() {
            grown.extend(&tokens[..end]);
            assert_eq!(grown.keys().len(), end / 4);
        }
        let mut whole = Chain::new(&[9; 16], 4, "t", "");
        whole.extend(&tokens);
        assert_eq!(grown.keys(), whole.keys());
    }

    #[test]
    fn a_chain_goes_on_from_a_prompt_s_keys() {
        let tokens: Vec<u32> = (0..40).collect();
        let mut whole = Chain::new(&[9; 16], 4, "t", "s");
        whole.extend(&tokens);
        let space = KeySpace { namespace: [9; 16], block_tokens: 4 };
        for prompt in [0, 3, 4, 17, 40] {
            let given = Chain::of_prompt(space, "t", "s", &tokens[..prompt]);
            assert_eq!(given.keys, whole.keys()[..prompt / 4]);
            let resume = |given, tokens| Chain::resume(given, "t", "s", tokens);
            let mut chain = resume(given.clone(), prompt).unwrap();
            chain.extend(&tokens);
            assert_eq!(chain.keys(), whole.keys());
            // Of another length, or of no block size.
            assert!(resume(given.clone(), prompt + 4).is_none());
            let sizeless = KeySpace { block_tokens: 0, ..space };
            assert!(resume(PromptKeys { space: sizeless, ..given }, prompt).is_none());
        }
    }

    const GOLDEN_ACME: [&str; 3] = [
        "b02c171c2e56eb774a0c8fbc2ca85ba6",
        "cb3c9df857e0b2133e41502a64ac5a38",
        "0eb10b63b191ff36375b71699841f38a",
    ];
    const GOLDEN_SALTED: [&str; 2] =
        ["9d201e0be609fb1779021e072cf17950", "171b2e6b7e127f063f2414edaeea1889"];
    const GOLDEN_WIDE: [&str; 1] = ["d469fd77f663b42c717dd2c8e6a1f0fe"];
}
