//! The only room of bincode: message to bytes and back, never more than a frame.

use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::frame::MAX_FRAME;

/// Why bytes are no message, or a message no bytes.
#[derive(Debug, thiserror::Error)]
pub enum CodecError {
    /// The message is larger than a frame may be, or cannot be written.
    #[error("cannot encode a message: {0}")]
    Encode(String),
    /// The bytes are no message.
    #[error("cannot decode a message: {0}")]
    Decode(String),
    /// Bytes are left over behind the message.
    #[error("{0} bytes are left over behind a message")]
    Trailing(usize),
}

fn config() -> impl bincode::config::Config {
    bincode::config::standard().with_limit::<MAX_FRAME>()
}

/// The bytes of a message.
///
/// # Errors
/// When they would exceed [`MAX_FRAME`].
pub fn encode<T: Serialize>(message: &T) -> Result<Vec<u8>, CodecError> {
    let bytes = bincode::serde::encode_to_vec(message, config()).map_err(|e| CodecError::Encode(e.to_string()))?;
    if bytes.len() > MAX_FRAME {
        return Err(CodecError::Encode(format!("{} bytes exceed the limit of {MAX_FRAME}", bytes.len())));
    }
    Ok(bytes)
}

/// The message that `bytes` are, all of them.
///
/// # Errors
/// When they are none, or claim to be larger than [`MAX_FRAME`].
pub fn decode<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, CodecError> {
    let (message, used) =
        bincode::serde::decode_from_slice(bytes, config()).map_err(|e| CodecError::Decode(e.to_string()))?;
    if used != bytes.len() {
        return Err(CodecError::Trailing(bytes.len() - used));
    }
    Ok(message)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn round_trip_and_leftovers() {
        let _limit = testkit::time_limit(10);
        let bytes = encode(&("a".to_owned(), 7u32, vec![1u8, 2])).unwrap();
        assert_eq!(decode::<(String, u32, Vec<u8>)>(&bytes).unwrap(), ("a".to_owned(), 7, vec![1, 2]));
        let mut more = bytes.clone();
        more.push(0);
        assert!(matches!(decode::<(String, u32, Vec<u8>)>(&more), Err(CodecError::Trailing(1))));
        assert!(matches!(decode::<(String, u32, Vec<u8>)>(&bytes[..3]), Err(CodecError::Decode(_))));
    }

    #[test]
    fn a_length_beyond_the_limit_allocates_nothing() {
        let _limit = testkit::time_limit(10);
        // A vector that claims 2^60 elements.
        let mut bytes = vec![253u8];
        bytes.extend((1u64 << 60).to_le_bytes());
        assert!(matches!(decode::<Vec<u8>>(&bytes), Err(CodecError::Decode(_))));
        assert!(matches!(encode(&vec![0u8; MAX_FRAME + 1]), Err(CodecError::Encode(_))));
    }
}
