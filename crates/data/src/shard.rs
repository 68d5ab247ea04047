//! Token streams: in memory, or in a file of our own that is mapped. Tokenised once, whoever asks.

use std::fs::File;
use std::io::{BufWriter, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, UNIX_EPOCH};

use rustix::fs::{FlockOperation, flock};

use crate::source::{Sink, Source, read};
use crate::{DataError, Progress, Tokenizer};

const MAGIC: &[u8; 8] = b"gpurtok1";
const HEADER: usize = 64;

/// Pause between two looks at a lock that another rank holds.
const LOOK: Duration = Duration::from_millis(100);

/// Tokens, u16 or u32.
pub(crate) struct Tokens {
    bytes: Bytes,
    wide: bool,
    len: u64,
    highest: u32,
}

enum Bytes {
    Memory(Vec<u8>),
    Mapped(memmap2::Mmap),
}

impl Tokens {
    pub(crate) const fn len(&self) -> u64 {
        self.len
    }

    /// The largest token id.
    pub(crate) const fn highest(&self) -> u32 {
        self.highest
    }

    /// Tokens `start..start + out.len()`.
    pub(crate) fn read(&self, start: u64, out: &mut [u32]) {
        let all: &[u8] = match &self.bytes {
            Bytes::Memory(bytes) => bytes,
            Bytes::Mapped(map) => map,
        };
        let width = if self.wide { 4 } else { 2 };
        let from = HEADER + start as usize * width;
        let raw = &all[from..from + out.len() * width];
        if self.wide {
            for (o, b) in out.iter_mut().zip(raw.chunks_exact(4)) {
                *o = u32::from_le_bytes([b[0], b[1], b[2], b[3]]);
            }
        } else {
            for (o, b) in out.iter_mut().zip(raw.chunks_exact(2)) {
                *o = u32::from(u16::from_le_bytes([b[0], b[1]]));
            }
        }
    }

    /// Position and id of the first token that is not below `vocabulary`.
    pub(crate) fn first_outside(&self, vocabulary: usize) -> Option<(u64, u32)> {
        let mut piece = vec![0; 1 << 16];
        let mut start = 0;
        while start < self.len {
            let n = piece.len().min((self.len - start) as usize);
            self.read(start, &mut piece[..n]);
            if let Some(at) = piece[..n].iter().position(|t| *t as usize >= vocabulary) {
                return Some((start + at as u64, piece[at]));
            }
            start += n as u64;
        }
        None
    }

    /// A file that [`write_stream`] wrote; `None` when it is not, or not whole.
    fn open(path: &Path) -> Option<Self> {
        let file = File::open(path).ok()?;
        Self::map(&file)
    }

    #[allow(unsafe_code)]
    fn map(file: &File) -> Option<Self> {
        // SAFETY: the file is one of our own cache, published whole by a rename (or without a name), and nobody writes it
        // afterwards. Whoever cuts it short behind our back ends the process, as with any mapped program file.
        let map = unsafe { memmap2::Mmap::map(file) }.ok()?;
        let header = map.get(..HEADER)?;
        let (wide, len, highest) = parse(header)?;
        let whole = HEADER as u64 + len * if wide { 4 } else { 2 };
        (map.len() as u64 == whole).then_some(Self { bytes: Bytes::Mapped(map), wide, len, highest })
    }
}

fn header(wide: bool, len: u64, highest: u32) -> [u8; HEADER] {
    let mut header = [0; HEADER];
    header[..8].copy_from_slice(MAGIC);
    header[8] = u8::from(wide);
    header[16..24].copy_from_slice(&len.to_le_bytes());
    header[24..28].copy_from_slice(&highest.to_le_bytes());
    let check = blake3::hash(&header[..32]);
    header[32..].copy_from_slice(check.as_bytes());
    header
}

fn parse(bytes: &[u8]) -> Option<(bool, u64, u32)> {
    let wide = bytes[8] == 1;
    let len = u64::from_le_bytes(bytes[16..24].try_into().ok()?);
    let highest = u32::from_le_bytes(bytes[24..28].try_into().ok()?);
    (header(wide, len, highest) == bytes).then_some((wide, len, highest))
}

/// Writes documents, each behind end-of-text.
struct Writer<'a, W: Write> {
    out: W,
    wide: bool,
    len: u64,
    highest: u32,
    done: u64,
    total: u64,
    what: String,
    progress: &'a mut dyn FnMut(Progress<'_>),
    failed: Box<dyn Fn(std::io::Error) -> DataError + 'a>,
}

impl<W: Write> Writer<'_, W> {
    fn put(&mut self, token: u32) -> Result<(), DataError> {
        let bytes = token.to_le_bytes();
        let width = if self.wide { 4 } else { 2 };
        self.out.write_all(&bytes[..width]).map_err(&self.failed)?;
        self.len += 1;
        self.highest = self.highest.max(token);
        Ok(())
    }
}

impl<W: Write> Sink for Writer<'_, W> {
    fn begin(&mut self, end_of_text: u32) -> Result<(), DataError> {
        self.put(end_of_text)
    }

    fn tokens(&mut self, tokens: &[u32]) -> Result<(), DataError> {
        tokens.iter().try_for_each(|t| self.put(*t))
    }

    fn read(&mut self, bytes: u64) {
        self.done += bytes;
        (self.progress)(Progress { what: &self.what, done: self.done, total: self.total });
    }
}

/// Tokenises sources into an open file: header, then tokens.
fn write_stream(
    file: &mut File,
    path: &Path,
    sources: &[Source],
    tokenizer: &Tokenizer,
    progress: &mut dyn FnMut(Progress<'_>),
) -> Result<(), DataError> {
    // Ids of a .bin shard are u16 whatever the tokenizer; those of others are below its vocabulary.
    let wide = tokenizer.vocabulary() > 1 << 16;
    file.write_all(&[0; HEADER]).map_err(DataError::io("write", path))?;
    let owned = path.to_owned();
    let mut writer = Writer {
        out: BufWriter::with_capacity(1 << 20, &mut *file),
        wide,
        len: 0,
        highest: 0,
        done: 0,
        total: sources.iter().map(|s| s.bytes).sum(),
        what: String::new(),
        progress,
        failed: Box::new(move |e| DataError::io("write", owned.clone())(e)),
    };
    for source in sources {
        writer.what = source.path.display().to_string();
        read(source, tokenizer, &mut writer)?;
    }
    writer.out.flush().map_err(DataError::io("write", path))?;
    let head = header(wide, writer.len, writer.highest);
    drop(writer);
    file.seek(SeekFrom::Start(0)).map_err(DataError::io("write", path))?;
    file.write_all(&head).map_err(DataError::io("write", path))?;
    file.sync_all().map_err(DataError::io("write", path))
}

/// Name of the cached tokens of these sources.
fn key(sources: &[Source], tokenizer: &Tokenizer) -> String {
    let mut hash = blake3::Hasher::new();
    hash.update(MAGIC).update(&tokenizer.digest());
    for source in sources {
        let path = source.path.canonicalize().unwrap_or_else(|_| source.path.clone());
        let changed = source.path.metadata().and_then(|m| m.modified()).ok();
        let changed = changed.and_then(|t| t.duration_since(UNIX_EPOCH).ok()).map_or(0, |d| d.as_nanos());
        let name = path.as_os_str().as_encoded_bytes();
        hash.update(&(name.len() as u64).to_le_bytes()).update(name);
        hash.update(&source.bytes.to_le_bytes()).update(&changed.to_le_bytes());
    }
    hash.finalize().to_hex()[..32].to_owned()
}

/// Where caches go when nobody says.
fn default_folder() -> Option<PathBuf> {
    let set = |name| std::env::var_os(name).filter(|v| !v.is_empty()).map(PathBuf::from);
    let base = set("XDG_CACHE_HOME").or_else(|| set("HOME").map(|home| home.join(".cache")))?;
    Some(base.join("gpurun/tokens"))
}

/// The tokens of sources: from the cache, or tokenised now. Of several ranks that ask at once, one does the work.
pub(crate) fn cached(
    sources: &[Source],
    tokenizer: &Tokenizer,
    folder: Option<&Path>,
    progress: &mut dyn FnMut(Progress<'_>),
) -> Result<Tokens, DataError> {
    let folder = folder.map(Path::to_owned).or_else(default_folder);
    match folder.as_deref().map(|f| open_lock(f, &key(sources, tokenizer))) {
        Some(Ok((lock, path))) => {
            while flock(&lock, FlockOperation::NonBlockingLockExclusive).is_err() {
                progress(Progress { what: "another rank is tokenising", done: 0, total: 0 });
                std::thread::sleep(LOOK);
            }
            publish(&path, sources, tokenizer, progress)
        }
        other => {
            if let Some(Err(error)) = other {
                tracing::warn!("tokens are not cached: {error}");
            }
            let path = std::env::temp_dir();
            let mut file = tempfile::tempfile().map_err(DataError::io("create a file in", &path))?;
            write_stream(&mut file, &path, sources, tokenizer, progress)?;
            Ok(Tokens::map(&file).expect("the file just written is whole"))
        }
    }
}

fn open_lock(folder: &Path, key: &str) -> Result<(File, PathBuf), DataError> {
    std::fs::create_dir_all(folder).map_err(DataError::io("create folder", folder))?;
    let lock = folder.join(format!("{key}.lock"));
    let file = File::options().create(true).truncate(false).write(true).open(&lock);
    Ok((file.map_err(DataError::io("open", lock))?, folder.join(format!("{key}.tokens"))))
}

/// Under the lock: what is there, if it is whole; else tokenises beside it and renames.
fn publish(
    path: &Path,
    sources: &[Source],
    tokenizer: &Tokenizer,
    progress: &mut dyn FnMut(Progress<'_>),
) -> Result<Tokens, DataError> {
    if let Some(tokens) = Tokens::open(path) {
        return Ok(tokens);
    }
    let beside = path.with_extension("partial");
    let mut file = File::options().create(true).truncate(true).read(true).write(true).open(&beside);
    let file = file.as_mut().map_err(|e| DataError::io("create", &beside)(std::io::Error::from(e.kind())))?;
    let written = write_stream(file, &beside, sources, tokenizer, progress);
    if let Err(error) = written {
        // The first error is the one to report.
        let _ = std::fs::remove_file(&beside);
        return Err(error);
    }
    std::fs::rename(&beside, path).map_err(DataError::io("rename to", path))?;
    Ok(Tokens::map(file).expect("the file just written is whole"))
}

/// The tokens of documents in memory.
pub(crate) fn in_memory(documents: &[(&str, &[u8])], tokenizer: &Tokenizer) -> Result<Tokens, DataError> {
    let wide = tokenizer.vocabulary() > 1 << 16;
    let mut bytes = vec![0; HEADER];
    let (mut len, mut highest) = (0, 0);
    let mut put = |token: u32| {
        bytes.extend_from_slice(&token.to_le_bytes()[..if wide { 4 } else { 2 }]);
        len += 1;
        highest = highest.max(token);
    };
    for (name, document) in documents.iter().filter(|d| !d.1.is_empty()) {
        put(tokenizer.end_of_text());
        if tokenizer.takes_bytes() {
            document.iter().for_each(|b| put(u32::from(*b)));
        } else {
            let text = std::str::from_utf8(document)
                .map_err(|e| DataError::NotUtf8 { path: name.into(), offset: e.valid_up_to() as u64 })?;
            tokenizer.encode(text)?.into_iter().for_each(&mut put);
        }
    }
    Ok(Tokens { bytes: Bytes::Memory(bytes), wide, len, highest })
}

/// Writes a token shard in llm.c's format; returns its number of tokens.
///
/// # Errors
/// When an input is wrong, the tokenizer has more than 65536 tokens, or the file cannot be written.
pub fn write_bin(
    paths: &[PathBuf],
    tokenizer: &Tokenizer,
    out: &Path,
    progress: &mut dyn FnMut(Progress<'_>),
) -> Result<u64, DataError> {
    use crate::source::{HEADER, MAGIC, VERSION};
    let wrong = |problem: String| DataError::Shard { path: out.to_owned(), problem };
    if tokenizer.vocabulary() > 1 << 16 {
        return Err(wrong(format!("{} token ids do not fit 16 bits", tokenizer.vocabulary())));
    }
    let sources = crate::source::list(paths)?;
    let folder = out.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let mut file = tempfile::NamedTempFile::new_in(folder).map_err(DataError::io("create a file in", folder))?;
    file.write_all(&[0; HEADER]).map_err(DataError::io("write", out))?;
    let mut writer = Writer {
        out: BufWriter::with_capacity(1 << 20, file.as_file_mut()),
        wide: false,
        len: 0,
        highest: 0,
        done: 0,
        total: sources.iter().map(|s| s.bytes).sum(),
        what: String::new(),
        progress,
        failed: Box::new(|e| DataError::io("write", out)(e)),
    };
    for source in &sources {
        writer.what = source.path.display().to_string();
        read(source, tokenizer, &mut writer)?;
    }
    writer.out.flush().map_err(DataError::io("write", out))?;
    let tokens = writer.len;
    drop(writer);
    if tokens == 0 {
        let what = paths.iter().map(|p| p.display().to_string()).collect::<Vec<_>>().join(", ");
        return Err(DataError::Empty { what });
    }
    let count =
        i32::try_from(tokens).map_err(|_| wrong(format!("{tokens} tokens are more than one shard can hold")))?;
    let mut head = [0; HEADER];
    for (i, word) in [MAGIC, VERSION, count].into_iter().enumerate() {
        head[4 * i..4 * i + 4].copy_from_slice(&word.to_le_bytes());
    }
    let handle = file.as_file_mut();
    handle.seek(SeekFrom::Start(0)).map_err(DataError::io("write", out))?;
    handle.write_all(&head).map_err(DataError::io("write", out))?;
    handle.sync_all().map_err(DataError::io("write", out))?;
    file.persist(out).map_err(|e| DataError::io("rename to", out)(e.error))?;
    Ok(tokens)
}
