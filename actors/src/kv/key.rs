//! Names of KV blocks: a chained hash over everything that decides what a block holds.
//!
//! `root = H(0, schema, namespace, tenant, salt)`, `key[i] = H(1, key[i-1], tokens of block i)`,
//! with `H` = BLAKE3 cut to 128 bits, integers little-endian and strings length-prefixed. Nothing
//! random and no address enters, so that every process names the same block alike: the router
//! computes the keys of a prompt and looks for the replica that holds them.
//!
//! A property that changes the KV of the same tokens must be part of the namespace (model hash,
//! KV format, rope scaling, adapter) or of the salt. Whoever changes this file raises
//! [`KEY_SCHEMA`]; golden vectors in the tests hold it still.

use crate::messages::BlockKey;
use dunlin_runtime::mutated;
use std::sync::Arc;

/// Version of the key's definition; part of every key, so that unlike versions never match.
pub const KEY_SCHEMA: u32 = 1;

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
    root: BlockKey,
    block_tokens: usize,
    keys: Vec<BlockKey>,
}

impl Chain {
    /// `namespace` stands for the model's content and the KV format; `block_tokens` is at least 1.
    pub fn new(namespace: &[u8; 16], block_tokens: u32, tenant: &str, salt: &str) -> Self {
        let (tenant, salt) = if mutated("drop-salt") { ("", "") } else { (tenant, salt) };
        let root = root_key(namespace, tenant, salt);
        let scope = Arc::new(Scope { tenant: tenant.into(), salt: salt.into() });
        Self { scope, root, block_tokens: block_tokens.max(1) as usize, keys: Vec::new() }
    }

    /// Computes the keys of the full blocks of `tokens` that are still missing. `tokens` starts
    /// with what earlier calls were given.
    pub fn extend(&mut self, tokens: &[u32]) {
        let full = tokens.chunks_exact(self.block_tokens);
        for block in full.skip(self.keys.len()) {
            let parent = self.keys.last().unwrap_or(&self.root);
            self.keys.push(child_key(parent, block));
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

fn root_key(namespace: &[u8; 16], tenant: &str, salt: &str) -> BlockKey {
    let mut hash = blake3::Hasher::new();
    hash.update(&[0]).update(&KEY_SCHEMA.to_le_bytes()).update(namespace);
    for text in [tenant, salt] {
        hash.update(&(text.len() as u64).to_le_bytes()).update(text.as_bytes());
    }
    cut(&hash)
}

fn child_key(parent: &BlockKey, tokens: &[u32]) -> BlockKey {
    let mut hash = blake3::Hasher::new();
    hash.update(&[1]).update(&parent.0);
    // Through a buffer, since feeding the hasher four bytes at a time costs more than hashing.
    let mut bytes = [0; 256];
    for part in tokens.chunks(bytes.len() / 4) {
        for (slot, token) in bytes.chunks_exact_mut(4).zip(part) {
            slot.copy_from_slice(&token.to_le_bytes());
        }
        hash.update(&bytes[..part.len() * 4]);
    }
    cut(&hash)
}

fn cut(hash: &blake3::Hasher) -> BlockKey {
    let mut key = [0; 16];
    key.copy_from_slice(&hash.finalize().as_bytes()[..16]);
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

    const GOLDEN_ACME: [&str; 3] = [
        "9cb62c81c61bf3398b789740d95c0fad",
        "7b0aacc995e28fad0bde87a281d5081c",
        "b7a765316afb5d0446430c38e754c052",
    ];
    const GOLDEN_SALTED: [&str; 2] =
        ["91a91f5e3e7f4d9b90a6e10e53a49e3b", "f93593482f4564b310c93c216892fc4c"];
    const GOLDEN_WIDE: [&str; 1] = ["66080d43d31deba9beee974942255e90"];
}
