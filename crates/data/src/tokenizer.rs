//! Text to token ids and back.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};

use crate::DataError;

/// Which tokenizer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TokenizerChoice {
    /// One token a byte.
    Bytes,
    /// A `tokenizer.json` of Hugging Face.
    File(PathBuf),
}

/// Text to token ids and back.
pub struct Tokenizer(Kind);

enum Kind {
    Bytes,
    File { path: PathBuf, inner: Box<tokenizers::Tokenizer>, end_of_text: u32, vocabulary: usize, digest: [u8; 32] },
}

/// End-of-text of the byte tokenizer: the first id behind the bytes.
const BYTES_END: u32 = 256;

/// Names that tokenizers give the token between documents, the more specific first.
const END_NAMES: [&str; 7] = ["<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eot_id|>", "<|im_end|>", "[SEP]"];

impl Tokenizer {
    /// Opens a tokenizer.
    ///
    /// # Errors
    /// When the file cannot be read, is no tokenizer, or has no token between documents.
    pub fn open(choice: &TokenizerChoice) -> Result<Self, DataError> {
        let TokenizerChoice::File(path) = choice else { return Ok(Self(Kind::Bytes)) };
        let bytes = std::fs::read(path).map_err(|e| match e.kind() {
            std::io::ErrorKind::NotFound => DataError::Missing(path.clone()),
            _ => DataError::io("read", path)(e),
        })?;
        let wrong = |problem: String| DataError::Tokenizer { path: path.clone(), problem };
        // A crafted file can make the library panic while it loads.
        let loaded = catch_unwind(AssertUnwindSafe(|| tokenizers::Tokenizer::from_bytes(&bytes)));
        let inner = loaded.map_err(|_| wrong("it contradicts itself".into()))?.map_err(|e| wrong(one_line(&e)))?;
        let end_of_text = END_NAMES.iter().find_map(|name| inner.token_to_id(name));
        let end_of_text = end_of_text
            .ok_or_else(|| wrong(format!("it has no token between documents (one of {})", END_NAMES.join(", "))))?;
        let highest = inner.get_vocab(true).into_values().max().unwrap_or(0);
        let digest = *blake3::hash(&bytes).as_bytes();
        let vocabulary = highest as usize + 1;
        Ok(Self(Kind::File { path: path.clone(), inner: Box::new(inner), end_of_text, vocabulary, digest }))
    }

    /// Token ids are below this.
    #[must_use]
    pub fn vocabulary(&self) -> usize {
        match &self.0 {
            Kind::Bytes => BYTES_END as usize + 1,
            Kind::File { vocabulary, .. } => *vocabulary,
        }
    }

    /// The token that stands before every document.
    #[must_use]
    pub fn end_of_text(&self) -> u32 {
        match &self.0 {
            Kind::Bytes => BYTES_END,
            Kind::File { end_of_text, .. } => *end_of_text,
        }
    }

    /// True when any bytes are text to it.
    #[must_use]
    pub const fn takes_bytes(&self) -> bool {
        matches!(self.0, Kind::Bytes)
    }

    /// Token ids of a text, without end-of-text.
    ///
    /// # Errors
    /// When the tokenizer refuses the text.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>, DataError> {
        match &self.0 {
            Kind::Bytes => Ok(text.bytes().map(u32::from).collect()),
            Kind::File { inner, path, .. } => {
                let refused = |problem| DataError::Encode { place: path.display().to_string(), problem };
                let encoding = catch_unwind(AssertUnwindSafe(|| inner.encode_fast(text, false)));
                let encoding = encoding.map_err(|_| refused("it panicked".into()))?;
                Ok(encoding.map_err(|e| refused(one_line(&e)))?.get_ids().to_vec())
            }
        }
    }

    /// Byte of a text at which its token number `index` begins.
    pub(crate) fn offset_of(&self, text: &str, index: usize) -> Option<usize> {
        match &self.0 {
            Kind::Bytes => Some(index),
            Kind::File { inner, .. } => {
                let encoding = catch_unwind(AssertUnwindSafe(|| inner.encode(text, false))).ok()?.ok()?;
                encoding.get_offsets().get(index).map(|(start, _)| *start)
            }
        }
    }

    /// The text of token ids; parts that are no whole letter become U+FFFD, end-of-text and other special tokens vanish.
    #[must_use]
    pub fn decode(&self, tokens: &[u32]) -> String {
        match &self.0 {
            Kind::Bytes => {
                let bytes: Vec<u8> = tokens.iter().filter_map(|t| u8::try_from(*t).ok()).collect();
                String::from_utf8_lossy(&bytes).into_owned()
            }
            Kind::File { inner, .. } => inner.decode(tokens, true).unwrap_or_default(),
        }
    }

    /// Tells tokenizers apart, for the name of a cached shard.
    pub(crate) fn digest(&self) -> [u8; 32] {
        match &self.0 {
            Kind::Bytes => *blake3::hash(b"bytes").as_bytes(),
            Kind::File { digest, .. } => *digest,
        }
    }

    /// Where it comes from, for messages.
    pub(crate) fn path(&self) -> Option<&Path> {
        match &self.0 {
            Kind::Bytes => None,
            Kind::File { path, .. } => Some(path),
        }
    }
}

fn one_line(error: &dyn std::fmt::Display) -> String {
    error.to_string().split_whitespace().collect::<Vec<_>>().join(" ")
}
