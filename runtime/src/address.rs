//! Who is who: node names, incarnations, and the addresses of mailboxes.
//!
//! A mailbox is addressed by (node, role, instance), never by a process-global name, so that many
//! nodes can live in one process.

use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

/// Longest node name: one DNS label, so that it fits a certificate's alternative name.
pub const MAX_NAME_BYTES: usize = 63;

/// A node's name in its cluster: `[a-z0-9-]`, 1 to 63 bytes.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NodeName(Arc<str>);

/// Why a text is not a node name.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not a node name: use 1 to 63 of a-z, 0-9 and '-'")]
pub struct BadName(pub String);

impl NodeName {
    pub fn new(name: &str) -> Result<Self, BadName> {
        let ok = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-';
        if name.is_empty() || name.len() > MAX_NAME_BYTES || !name.bytes().all(ok) {
            return Err(BadName(name.chars().take(80).collect()));
        }
        Ok(Self(name.into()))
    }

    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for NodeName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Debug for NodeName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", &*self.0)
    }
}

impl AsRef<str> for NodeName {
    fn as_ref(&self) -> &str {
        &self.0
    }
}

impl FromStr for NodeName {
    type Err = BadName;
    fn from_str(name: &str) -> Result<Self, BadName> {
        Self::new(name)
    }
}

impl TryFrom<&str> for NodeName {
    type Error = BadName;
    fn try_from(name: &str) -> Result<Self, BadName> {
        Self::new(name)
    }
}

impl TryFrom<String> for NodeName {
    type Error = BadName;
    fn try_from(name: String) -> Result<Self, BadName> {
        Self::new(&name)
    }
}

impl Serialize for NodeName {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.serialize_str(&self.0)
    }
}

impl<'de> Deserialize<'de> for NodeName {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        let name = String::deserialize(from)?;
        Self::new(&name).map_err(serde::de::Error::custom)
    }
}

/// A life of a node: a restarted node must have a higher one, or its peers refuse it.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize,
)]
pub struct Incarnation(pub u64);

impl fmt::Display for Incarnation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "#{}", self.0)
    }
}

/// Where a mailbox is: `left/scheduler/r0`.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Address {
    pub node: NodeName,
    pub role: String,
    pub instance: String,
}

impl Address {
    pub fn new(node: NodeName, role: impl Into<String>, instance: impl Into<String>) -> Self {
        Self { node, role: role.into(), instance: instance.into() }
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}/{}", self.node, self.role, self.instance)
    }
}

/// The node at the other end, in the life that a message came from.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Peer {
    pub node: NodeName,
    pub incarnation: Incarnation,
}

impl fmt::Display for Peer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{}", self.node, self.incarnation)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_checked_on_every_way_in() {
        for good in ["a", "left-2", "0", &"x".repeat(63)] {
            assert_eq!(NodeName::new(good).unwrap().as_str(), good);
        }
        for bad in ["", "Left", "a.b", "a/b", "ü", &"x".repeat(64)] {
            assert!(NodeName::new(bad).is_err(), "{bad:?}");
            let bytes = crate::codec::encode(&bad.to_string()).unwrap();
            assert!(crate::codec::decode::<NodeName>(&bytes).is_err(), "{bad:?}");
        }
    }
}
