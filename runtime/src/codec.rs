//! Message bodies to bytes and back: the only module that knows bincode.
//!
//! Decoding is bounded: no input allocates more than [`MAX_BODY_BYTES`], none panics, and bytes
//! after the value are refused (they would mean that the two ends disagree about its type).

use bytes::Bytes;
use serde::{Serialize, de::DeserializeOwned};

/// No message body is longer than this, encoded or claimed.
pub const MAX_BODY_BYTES: usize = 64 << 20;

/// Why a value was not encoded or bytes were not decoded.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CodecError {
    #[error("cannot encode the message: {0}")]
    Encode(String),
    #[error("cannot decode the message: {0}")]
    Decode(String),
    #[error("{left} bytes are left after the message")]
    Trailing { left: usize },
}

pub fn encode<T: Serialize + ?Sized>(value: &T) -> Result<Bytes, CodecError> {
    bincode::serde::encode_to_vec(value, config())
        .map(Bytes::from)
        .map_err(|e| CodecError::Encode(e.to_string()))
}

pub fn decode<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, CodecError> {
    let (value, used) = bincode::serde::decode_from_slice(bytes, config())
        .map_err(|e| CodecError::Decode(e.to_string()))?;
    match bytes.len().saturating_sub(used) {
        0 => Ok(value),
        left => Err(CodecError::Trailing { left }),
    }
}

fn config() -> bincode::config::Configuration<
    bincode::config::LittleEndian,
    bincode::config::Varint,
    bincode::config::Limit<MAX_BODY_BYTES>,
> {
    bincode::config::standard().with_limit::<MAX_BODY_BYTES>()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use serde::Deserialize;
    use std::collections::BTreeMap;

    #[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
    enum Sample {
        Unit,
        Text(String),
        Map(BTreeMap<String, Vec<u64>>),
        Deep { bytes: Vec<u8>, inner: Option<Box<Sample>>, float: f64 },
    }

    fn sample() -> impl Strategy<Value = Sample> {
        let leaf = prop_oneof![
            Just(Sample::Unit),
            ".{0,20}".prop_map(Sample::Text),
            prop::collection::btree_map(".{0,5}", prop::collection::vec(any::<u64>(), 0..5), 0..4)
                .prop_map(Sample::Map),
        ];
        leaf.prop_recursive(3, 8, 1, |inner| {
            (prop::collection::vec(any::<u8>(), 0..40), prop::option::of(inner), -1e9..1e9)
                .prop_map(|(bytes, inner, float)| Sample::Deep {
                    bytes,
                    inner: inner.map(Box::new),
                    float,
                })
        })
    }

    proptest! {
        #[test]
        fn what_was_encoded_is_decoded(value in sample()) {
            let bytes = encode(&value).unwrap();
            prop_assert_eq!(decode::<Sample>(&bytes).unwrap(), value);
        }

        #[test]
        fn any_input_is_answered_without_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            let _ = decode::<Sample>(&bytes);
            let _ = decode::<Vec<String>>(&bytes);
        }

        #[test]
        fn a_cut_or_lengthened_message_is_refused(value in sample(), extra in 1usize..9) {
            let bytes = encode(&value).unwrap();
            prop_assert!(decode::<Sample>(&bytes[..bytes.len() - 1]).is_err());
            let mut long = bytes.to_vec();
            long.resize(bytes.len() + extra, 0);
            prop_assert_eq!(decode::<Sample>(&long), Err(CodecError::Trailing { left: extra }));
        }
    }

    #[test]
    fn a_huge_claimed_length_is_refused_before_it_is_allocated() {
        // Varint marker 253 announces a u64 length.
        let mut bytes = vec![253];
        bytes.extend_from_slice(&u64::MAX.to_le_bytes());
        assert!(decode::<Vec<u8>>(&bytes).is_err());
        assert!(decode::<String>(&bytes).is_err());
    }
}
