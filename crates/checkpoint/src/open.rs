//! Opening, verifying and reading a checkpoint.

use std::collections::HashMap;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

use crate::error::{Damage, Error};
use crate::manifest::{DataFile, MANIFEST, Manifest, Meta, Piece, PieceIndex, Section, piece_key};
use crate::tensors::{open_file, read_at, read_header, read_values};

/// Bytes that are read and checked at a time.
const VERIFY_CHUNK: usize = 1 << 22;

/// Files that are verified at a time: enough to keep a disk busy.
const VERIFY_THREADS: usize = 4;

/// A checkpoint on disk. Reads may come from several threads at once.
#[derive(Debug)]
pub struct Checkpoint {
    dir: PathBuf,
    manifest: Manifest,
    index: PieceIndex,
    tensors: HashMap<String, usize>,
    files: Vec<File>,
}

impl Checkpoint {
    /// Opens the checkpoint in folder `dir`: checks the manifest, that its pieces make a whole, each file's size and
    /// header. Checks no data: see [`Self::verify`].
    ///
    /// # Errors
    /// Names the file and what is wrong with it.
    pub fn open(dir: impl AsRef<Path>) -> Result<Self, Error> {
        let dir = dir.as_ref();
        let path = dir.join(MANIFEST);
        let manifest = Manifest::read(&path)?;
        let index = PieceIndex::new(&manifest.meta.tensors, &manifest.pieces).map_err(|e| Error::manifest(&path, e))?;
        let mut tensors = HashMap::new();
        for (i, tensor) in manifest.meta.tensors.iter().enumerate() {
            if tensors.insert(tensor.name.clone(), i).is_some() {
                return Err(Error::manifest(&path, format!("tensor {} is there twice", tensor.name)));
            }
        }
        let files = (0..manifest.files.len()).map(|i| open_data_file(dir, &manifest, i)).collect::<Result<_, _>>()?;
        Ok(Self { dir: dir.to_owned(), manifest, index, tensors, files })
    }

    /// Its folder.
    #[must_use]
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// What it says of itself.
    #[must_use]
    pub fn meta(&self) -> &Meta {
        &self.manifest.meta
    }

    /// Ranks that wrote it. Any number can read it.
    #[must_use]
    pub fn world(&self) -> u32 {
        self.manifest.world
    }

    /// Bytes of its tensor files.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.manifest.files.iter().map(|f| f.bytes).sum()
    }

    /// Reads all data once and compares the checksums, in bounded memory.
    ///
    /// # Errors
    /// The first damaged piece, by name.
    pub fn verify(&self) -> Result<(), Error> {
        let next = AtomicUsize::new(0);
        let first_error = Mutex::new(None);
        let work = || {
            loop {
                let file = next.fetch_add(1, Ordering::Relaxed);
                if file >= self.files.len() {
                    return;
                }
                if let Err(error) = self.verify_file(file) {
                    let mut first = first_error.lock().unwrap_or_else(PoisonError::into_inner);
                    if first.as_ref().is_none_or(|(other, _)| file < *other) {
                        *first = Some((file, error));
                    }
                }
            }
        };
        std::thread::scope(|scope| {
            for _ in 1..self.files.len().min(VERIFY_THREADS) {
                scope.spawn(work);
            }
            work();
        });
        let first = first_error.into_inner().unwrap_or_else(PoisonError::into_inner);
        first.map_or(Ok(()), |(_, error)| Err(error))
    }

    fn verify_file(&self, file: usize) -> Result<(), Error> {
        let path = self.path(file);
        // Again: the header may have changed since `open`, and its bytes belong to the file.
        check_header(&self.files[file], &path, &self.manifest, file)?;
        let mut pieces: Vec<&Piece> = self.manifest.pieces.iter().filter(|p| p.file == file).collect();
        pieces.sort_by_key(|p| p.offset);
        let mut bytes = vec![0; VERIFY_CHUNK];
        for piece in pieces {
            let mut crc = crc32fast::Hasher::new();
            let end = piece.offset + piece.bytes();
            let mut at = piece.offset;
            while at < end {
                let part = &mut bytes[..(end - at).min(VERIFY_CHUNK as u64) as usize];
                read_at(&self.files[file], &path, at, part)?;
                crc.update(part);
                at += part.len() as u64;
            }
            if crc.finalize() != piece.crc32 {
                let name = &self.manifest.meta.tensors[piece.tensor].name;
                let piece_name = piece_key(piece.section, name, piece.start);
                let damage = Damage::PieceChecksum { piece: piece_name, start: piece.offset, end };
                return Err(Error::damaged(&path, damage));
            }
        }
        Ok(())
    }

    /// Reads elements `start..start + out.len()` of a tensor in one section, from whatever pieces hold them.
    ///
    /// # Errors
    /// No such tensor or range, or a file that can no longer be read.
    pub fn read(&self, tensor: &str, section: Section, start: u64, out: &mut [f32]) -> Result<(), Error> {
        let &t = self.tensors.get(tensor).ok_or_else(|| self.no_tensor(tensor))?;
        let elements = self.manifest.meta.tensors[t].elements();
        let end = start.saturating_add(out.len() as u64);
        if end > elements {
            return Err(Error::OutOfRange { path: self.dir.clone(), name: tensor.to_owned(), start, end, elements });
        }
        let pieces = self.index.pieces(t, section);
        let first = pieces.partition_point(|&i| self.manifest.pieces[i].end() <= start);
        let mut at = start;
        for piece in pieces[first..].iter().map(|&i| &self.manifest.pieces[i]) {
            if at == end {
                break;
            }
            let stop = piece.end().min(end);
            let part = &mut out[(at - start) as usize..(stop - start) as usize];
            let offset = piece.offset + (at - piece.start) * piece.dtype.size() as u64;
            read_values(&self.files[piece.file], &self.path(piece.file), offset, piece.dtype, part)?;
            at = stop;
        }
        assert_eq!(at, end, "the pieces of {section} of {tensor} cover it: checked when the checkpoint was opened");
        Ok(())
    }

    fn path(&self, file: usize) -> PathBuf {
        self.dir.join(&self.manifest.files[file].name)
    }

    fn no_tensor(&self, name: &str) -> Error {
        let nearest = nearest(name, self.tensors.keys());
        Error::NoTensor { path: self.dir.clone(), name: name.to_owned(), nearest }
    }
}

/// The candidate most like `name`, when one is much like it.
pub(crate) fn nearest<'a>(name: &str, candidates: impl Iterator<Item = &'a String>) -> Option<String> {
    candidates
        .map(|c| (strsim::jaro_winkler(name, c), c))
        .filter(|(likeness, _)| *likeness > 0.8)
        .max_by(|a, b| a.0.total_cmp(&b.0).then_with(|| b.1.cmp(a.1)))
        .map(|(_, c)| c.clone())
}

fn open_data_file(dir: &Path, manifest: &Manifest, index: usize) -> Result<File, Error> {
    let DataFile { name, bytes, .. } = &manifest.files[index];
    let path = dir.join(name);
    let file = open_file(&path)?;
    let found = file.metadata().map_err(Error::io("examine", &path))?.len();
    if found < *bytes {
        return Err(Error::damaged(&path, Damage::Truncated { expected: *bytes, found }));
    }
    if found > *bytes {
        return Err(Error::damaged(&path, Damage::TooLong { expected: *bytes, found }));
    }
    check_header(&file, &path, manifest, index)?;
    Ok(file)
}

/// The file's header must be the one that was written, and say the same as the manifest.
fn check_header(file: &File, path: &Path, manifest: &Manifest, index: usize) -> Result<(), Error> {
    let written = &manifest.files[index];
    let mut bytes = vec![0; usize::try_from(written.header_bytes.min(written.bytes)).unwrap_or(usize::MAX)];
    read_at(file, path, 0, &mut bytes)?;
    if crc32fast::hash(&bytes) != written.header_crc32 {
        return Err(Error::damaged(path, Damage::HeaderChecksum { end: written.header_bytes }));
    }
    let header = read_header(file, path)?;
    let entries: HashMap<&str, _> = header.entries.iter().map(|e| (e.key.as_str(), e)).collect();
    let mut pieces = 0;
    for piece in manifest.pieces.iter().filter(|p| p.file == index) {
        let key = piece_key(piece.section, &manifest.meta.tensors[piece.tensor].name, piece.start);
        let entry = entries
            .get(key.as_str())
            .ok_or_else(|| Error::header(path, format!("the manifest's piece {key} is not there")))?;
        if (entry.dtype, entry.offset, entry.bytes) != (piece.dtype, piece.offset, piece.bytes()) {
            return Err(Error::header(path, format!("piece {key} is not where and what the manifest says")));
        }
        pieces += 1;
    }
    if pieces != entries.len() {
        return Err(Error::header(path, format!("{} tensors, the manifest has {pieces} pieces here", entries.len())));
    }
    Ok(())
}
