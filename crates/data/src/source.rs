//! Files and folders to documents.

use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};

use crate::{DataError, Tokenizer};

/// What a file holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Format {
    Text,
    JsonLines,
    Tokens,
}

/// A file to read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Source {
    pub path: PathBuf,
    pub format: Format,
    pub bytes: u64,
}

/// Endings of files that are no text.
const NO_TEXT: [&str; 34] = [
    "parquet",
    "arrow",
    "gz",
    "zst",
    "xz",
    "bz2",
    "zip",
    "tar",
    "7z",
    "png",
    "jpg",
    "jpeg",
    "gif",
    "webp",
    "pdf",
    "mp3",
    "mp4",
    "wav",
    "so",
    "o",
    "a",
    "exe",
    "pt",
    "pth",
    "npy",
    "npz",
    "safetensors",
    "gguf",
    "pickle",
    "pkl",
    "sqlite",
    "db",
    "pyc",
    "wasm",
];

fn format(path: &Path) -> Option<Format> {
    let ending = path.extension().and_then(|e| e.to_str()).unwrap_or_default().to_ascii_lowercase();
    match ending.as_str() {
        "jsonl" | "ndjson" => Some(Format::JsonLines),
        "bin" => Some(Format::Tokens),
        other if NO_TEXT.contains(&other) => None,
        _ => Some(Format::Text),
    }
}

/// The files of paths, in the order given; those of a folder by name, hidden ones left out.
pub(crate) fn list(paths: &[PathBuf]) -> Result<Vec<Source>, DataError> {
    let mut found = Vec::new();
    for path in paths {
        if !path.exists() {
            return Err(DataError::Missing(path.clone()));
        }
        if path.is_dir() {
            walk(path, &mut found)?;
        } else {
            let format = format(path).ok_or_else(|| DataError::Unsupported(path.clone()))?;
            found.push(source(path, format)?);
        }
    }
    Ok(found)
}

fn source(path: &Path, format: Format) -> Result<Source, DataError> {
    let bytes = path.metadata().map_err(DataError::io("read", path))?.len();
    Ok(Source { path: path.to_owned(), format, bytes })
}

fn walk(folder: &Path, found: &mut Vec<Source>) -> Result<(), DataError> {
    let entries = std::fs::read_dir(folder).map_err(DataError::io("read folder", folder))?;
    let mut paths: Vec<PathBuf> =
        entries.map(|e| e.map(|e| e.path())).collect::<Result<_, _>>().map_err(DataError::io("read folder", folder))?;
    paths.sort();
    for path in paths {
        let hidden = path.file_name().is_some_and(|n| n.as_encoded_bytes().starts_with(b"."));
        if hidden {
            continue;
        }
        if path.is_dir() {
            walk(&path, found)?;
        } else if let Some(format) = format(&path) {
            found.push(source(&path, format)?);
        } else {
            tracing::warn!("{}: skipped, it is no text", path.display());
        }
    }
    Ok(())
}

/// Bytes of a text file read at a time with the byte tokenizer.
const PIECE: usize = 1 << 20;

/// Gets the tokens of documents as they are read.
pub(crate) trait Sink {
    /// A document begins, with this token.
    fn begin(&mut self, end_of_text: u32) -> Result<(), DataError>;
    /// Some tokens of it.
    fn tokens(&mut self, tokens: &[u32]) -> Result<(), DataError>;
    /// So many bytes of input have been read.
    fn read(&mut self, bytes: u64);
}

/// Reads a file, document by document.
pub(crate) fn read(source: &Source, tokenizer: &Tokenizer, sink: &mut dyn Sink) -> Result<(), DataError> {
    match source.format {
        Format::Text => text(source, tokenizer, sink),
        Format::JsonLines => json_lines(source, tokenizer, sink),
        Format::Tokens => shard(source, tokenizer, sink),
    }
}

fn text(source: &Source, tokenizer: &Tokenizer, sink: &mut dyn Sink) -> Result<(), DataError> {
    let path = &source.path;
    let mut file = File::open(path).map_err(DataError::io("read", path))?;
    if source.bytes == 0 {
        return Ok(());
    }
    sink.begin(tokenizer.end_of_text())?;
    if tokenizer.takes_bytes() {
        let mut piece = vec![0; PIECE];
        loop {
            let n = file.read(&mut piece).map_err(DataError::io("read", path))?;
            if n == 0 {
                return Ok(());
            }
            let tokens: Vec<u32> = piece[..n].iter().map(|b| u32::from(*b)).collect();
            sink.tokens(&tokens)?;
            sink.read(n as u64);
        }
    }
    let mut bytes = Vec::new();
    file.read_to_end(&mut bytes).map_err(DataError::io("read", path))?;
    let text = std::str::from_utf8(&bytes)
        .map_err(|e| DataError::NotUtf8 { path: path.clone(), offset: e.valid_up_to() as u64 })?;
    sink.tokens(&encode(tokenizer, text, &path.display().to_string())?)?;
    sink.read(bytes.len() as u64);
    Ok(())
}

fn encode(tokenizer: &Tokenizer, text: &str, place: &str) -> Result<Vec<u32>, DataError> {
    tokenizer.encode(text).map_err(|e| match e {
        DataError::Encode { problem, .. } => DataError::Encode { place: place.to_owned(), problem },
        other => other,
    })
}

fn json_lines(source: &Source, tokenizer: &Tokenizer, sink: &mut dyn Sink) -> Result<(), DataError> {
    let path = &source.path;
    let mut reader = BufReader::with_capacity(PIECE, File::open(path).map_err(DataError::io("read", path))?);
    let mut raw = Vec::new();
    for line in 1.. {
        raw.clear();
        let n = reader.read_until(b'\n', &mut raw).map_err(DataError::io("read", path))?;
        if n == 0 {
            break;
        }
        sink.read(n as u64);
        if raw.iter().all(u8::is_ascii_whitespace) {
            continue;
        }
        let wrong = |problem: String| DataError::Line { path: path.clone(), line, problem };
        let value: serde_json::Value = serde_json::from_slice(&raw)
            .map_err(|e| wrong(format!("not JSON (column {}): {}", e.column(), reason(&e))))?;
        let text = match value.get("text") {
            Some(serde_json::Value::String(text)) => text,
            Some(_) => return Err(wrong("its `text` is not a string".into())),
            None => {
                return Err(wrong("it has no `text` field; each line is an object such as {\"text\": \"...\"}".into()));
            }
        };
        if !text.is_empty() {
            sink.begin(tokenizer.end_of_text())?;
            sink.tokens(&encode(tokenizer, text, &format!("{}:{line}", path.display()))?)?;
        }
    }
    Ok(())
}

/// What serde says, without its own line and column: the file's line is named before it.
fn reason(error: &serde_json::Error) -> String {
    let text = error.to_string();
    text.split(" at line ").next().unwrap_or(&text).to_owned()
}

/// Header of a token shard in llm.c's format: 256 little-endian i32, of which three are used.
pub(crate) const HEADER: usize = 1024;
pub(crate) const MAGIC: i32 = 20_240_520;
pub(crate) const VERSION: i32 = 1;

/// End-of-text of GPT-2's tokens. A shard that begins with it was made with them; no tokenizer need be named to train on it.
const GPT2_END: u32 = 50_256;

fn shard(source: &Source, tokenizer: &Tokenizer, sink: &mut dyn Sink) -> Result<(), DataError> {
    let path = &source.path;
    let mut file = BufReader::with_capacity(PIECE, File::open(path).map_err(DataError::io("read", path))?);
    let tokens = shard_tokens(path, source.bytes, &mut file)?;
    let mut end = tokenizer.end_of_text();
    let mut raw = vec![0; PIECE];
    let (mut left, mut first) = (tokens * 2, true);
    while left > 0 {
        let n = (left as usize).min(PIECE);
        file.read_exact(&mut raw[..n]).map_err(DataError::io("read", path))?;
        let ids: Vec<u32> = raw[..n].chunks_exact(2).map(|b| u32::from(u16::from_le_bytes([b[0], b[1]]))).collect();
        // Documents carry their own end-of-text; a shard that begins in the middle of one begins a document all the same.
        if first && tokenizer.takes_bytes() && ids[0] == GPT2_END {
            end = GPT2_END;
        }
        if first && ids[0] != end {
            sink.begin(end)?;
        }
        first = false;
        for (i, document) in ids.split(|t| *t == end).enumerate() {
            if i > 0 {
                sink.begin(end)?;
            }
            sink.tokens(document)?;
        }
        left -= n as u64;
        sink.read(n as u64);
    }
    Ok(())
}

/// Checks a shard's header and size; the number of its tokens.
fn shard_tokens(path: &Path, bytes: u64, file: &mut impl Read) -> Result<u64, DataError> {
    let wrong = |problem: String| DataError::Shard { path: path.to_owned(), problem };
    if bytes < HEADER as u64 {
        return Err(wrong(format!("{bytes} bytes are less than the header of {HEADER}")));
    }
    let mut header = [0; HEADER];
    file.read_exact(&mut header).map_err(DataError::io("read", path))?;
    let word = |i: usize| i32::from_le_bytes([header[4 * i], header[4 * i + 1], header[4 * i + 2], header[4 * i + 3]]);
    if word(0) != MAGIC {
        return Err(wrong(format!("its first number is {}, not {MAGIC} (llm.c's format)", word(0))));
    }
    if word(1) != VERSION {
        return Err(wrong(format!("its version is {}, and only {VERSION} (u16 tokens) can be read", word(1))));
    }
    let tokens = u64::try_from(word(2)).map_err(|_| wrong(format!("it claims {} tokens", word(2))))?;
    if HEADER as u64 + 2 * tokens != bytes {
        let holds = (bytes - HEADER as u64) / 2;
        return Err(wrong(format!("its header claims {tokens} tokens, and it holds {holds}")));
    }
    Ok(tokens)
}
