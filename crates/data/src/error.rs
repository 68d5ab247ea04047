//! What can be wrong with data, in one line each: what, where, how to mend it.

use std::io;
use std::path::PathBuf;

/// Why data cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum DataError {
    /// The operating system refused.
    #[error("cannot {doing} {}: {source}", path.display())]
    Io {
        /// What was tried.
        doing: &'static str,
        /// On which file or folder.
        path: PathBuf,
        /// Its answer.
        source: io::Error,
    },
    /// A path that is not there.
    #[error("{}: no such file or folder", .0.display())]
    Missing(PathBuf),
    /// A file of a kind that cannot be read.
    #[error("{}: cannot be read as training data; give text, .jsonl with a `text` field, or .bin token shards", .0.display())]
    Unsupported(PathBuf),
    /// Nothing to train on.
    #[error("{what}: no text in it; give files or folders that hold some")]
    Empty {
        /// The paths.
        what: String,
    },
    /// A line of a JSON Lines file.
    #[error("{}:{line}: {problem}", path.display())]
    Line {
        /// The file.
        path: PathBuf,
        /// Its line, from 1.
        line: u64,
        /// What is wrong with it.
        problem: String,
    },
    /// Bytes that are no UTF-8, for a tokenizer that needs text.
    #[error("{}: byte {offset} is not UTF-8; mend the file, or use --tokenizer bytes", path.display())]
    NotUtf8 {
        /// The file.
        path: PathBuf,
        /// Offset of the first broken byte.
        offset: u64,
    },
    /// A token shard with a wrong header or size.
    #[error("{}: no token shard: {problem}", path.display())]
    Shard {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        problem: String,
    },
    /// A file that is no tokenizer.
    #[error("{}: no tokenizer: {problem}; give a Hugging Face tokenizer.json, or `bytes`", path.display())]
    Tokenizer {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        problem: String,
    },
    /// Text that the tokenizer refuses.
    #[error("{place}: the tokenizer refuses it: {problem}")]
    Encode {
        /// Which text.
        place: String,
        /// What it says.
        problem: String,
    },
    /// A token that the model has no row for.
    #[error(
        "{place}: token {token} is not below the model's vocabulary of {vocabulary}; use a model with a larger vocabulary, or the tokenizer that it was made for"
    )]
    Vocabulary {
        /// File and offset or line.
        place: String,
        /// The token id.
        token: u32,
        /// Rows of the model's table.
        vocabulary: usize,
    },
    /// Sequences longer than the data.
    #[error("{what} has {tokens} tokens, and a sequence of {seq_len} needs {}; give more data or a smaller --seq-len", seq_len + 1)]
    TooShort {
        /// Which data.
        what: &'static str,
        /// Its tokens.
        tokens: u64,
        /// Tokens per sequence.
        seq_len: usize,
    },
}

impl DataError {
    pub(crate) fn io(doing: &'static str, path: impl Into<PathBuf>) -> impl FnOnce(io::Error) -> Self {
        let path = path.into();
        move |source| Self::Io { doing, path, source }
    }
}
