//! Frames: `g r`, protocol version (u16, little endian), payload length (u32, little endian), payload.
//!
//! The version stands in every frame, so it is checked before a payload is read as a message.

use crate::codec::{CodecError, decode, encode};
use serde::Serialize;
use serde::de::DeserializeOwned;

/// Version of the protocol. Launcher and workers must agree.
pub const VERSION: u16 = 2;

/// Largest payload of a frame, in bytes.
pub const MAX_FRAME: usize = 1 << 20;

const MAGIC: [u8; 2] = *b"gr";
const HEADER: usize = 8;

/// What is wrong with a stream of frames.
#[derive(Debug, thiserror::Error)]
pub enum FrameError {
    /// The peer does not speak this protocol.
    #[error("the peer does not speak the protocol of gpurun (first bytes {0:02x?})")]
    NotOurs([u8; 2]),
    /// The peer speaks another version.
    #[error(
        "the peer speaks version {theirs} of the protocol, this executable speaks {VERSION}: use one build of gpurun for launcher and workers"
    )]
    Version {
        /// Version of the peer.
        theirs: u16,
    },
    /// A frame is too long.
    #[error("a frame of {0} bytes exceeds the limit of {MAX_FRAME}")]
    TooLong(usize),
    /// The payload is no message.
    #[error(transparent)]
    Codec(#[from] CodecError),
}

/// A message as a frame.
///
/// # Errors
/// When it would exceed [`MAX_FRAME`].
pub fn frame<T: Serialize>(message: &T) -> Result<Vec<u8>, CodecError> {
    let payload = encode(message)?;
    let mut bytes = Vec::with_capacity(HEADER + payload.len());
    bytes.extend(MAGIC);
    bytes.extend(VERSION.to_le_bytes());
    bytes.extend((payload.len() as u32).to_le_bytes());
    bytes.extend(payload);
    Ok(bytes)
}

/// Cuts a stream of bytes into messages. Feed it what was read; ask it for messages until there are none.
#[derive(Debug, Default)]
pub struct FrameReader {
    buffer: Vec<u8>,
    start: usize,
}

impl FrameReader {
    /// An empty reader.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds bytes that were read.
    pub fn feed(&mut self, bytes: &[u8]) {
        if self.start > 0 {
            self.buffer.drain(..self.start);
            self.start = 0;
        }
        self.buffer.extend_from_slice(bytes);
    }

    /// The next whole message, if there is one.
    ///
    /// # Errors
    /// When the stream is not of this protocol. It cannot be read on then.
    pub fn next_message<T: DeserializeOwned>(&mut self) -> Result<Option<T>, FrameError> {
        let bytes = &self.buffer[self.start..];
        if bytes.len() < HEADER {
            return Ok(None);
        }
        let magic = [bytes[0], bytes[1]];
        if magic != MAGIC {
            return Err(FrameError::NotOurs(magic));
        }
        let theirs = u16::from_le_bytes([bytes[2], bytes[3]]);
        if theirs != VERSION {
            return Err(FrameError::Version { theirs });
        }
        let len = u32::from_le_bytes([bytes[4], bytes[5], bytes[6], bytes[7]]) as usize;
        if len > MAX_FRAME {
            return Err(FrameError::TooLong(len));
        }
        let Some(payload) = bytes.get(HEADER..HEADER + len) else { return Ok(None) };
        let message = decode(payload)?;
        self.start += HEADER + len;
        Ok(Some(message))
    }

    /// True when bytes of an unfinished frame are left.
    #[must_use]
    pub fn is_within_frame(&self) -> bool {
        self.start < self.buffer.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_cut_of_the_stream_gives_the_same_messages() {
        let _limit = testkit::time_limit(10);
        let sent: Vec<String> = vec!["".into(), "one".into(), "x".repeat(3000)];
        let stream: Vec<u8> = sent.iter().flat_map(|m| frame(m).unwrap()).collect();
        for cut in [1, 2, 3, 7, 8, 9, 100, stream.len()] {
            let mut reader = FrameReader::new();
            let mut got: Vec<String> = Vec::new();
            for part in stream.chunks(cut) {
                reader.feed(part);
                while let Some(message) = reader.next_message().unwrap() {
                    got.push(message);
                }
            }
            assert_eq!(got, sent, "cut every {cut} bytes");
            assert!(!reader.is_within_frame());
        }
    }

    #[test]
    fn foreign_streams_are_refused_by_name() {
        let _limit = testkit::time_limit(10);
        let mut reader = FrameReader::new();
        reader.feed(b"GET / HTTP/1.1\r\n");
        assert!(matches!(reader.next_message::<String>(), Err(FrameError::NotOurs([b'G', b'E']))));

        let mut other = frame(&1u32).unwrap();
        other[2] = 9;
        let mut reader = FrameReader::new();
        reader.feed(&other);
        let error = reader.next_message::<u32>().unwrap_err();
        assert!(matches!(error, FrameError::Version { theirs: 9 }));
        assert!(error.to_string().contains("version 9"), "{error}");

        let mut long = frame(&1u32).unwrap();
        long[4..8].copy_from_slice(&(MAX_FRAME as u32 + 1).to_le_bytes());
        let mut reader = FrameReader::new();
        reader.feed(&long);
        assert!(matches!(reader.next_message::<u32>(), Err(FrameError::TooLong(_))));
    }
}
