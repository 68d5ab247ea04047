//! Saving: every rank writes its own part beside the checkpoints, then one rank makes them a checkpoint by a rename.

use std::collections::{HashMap, HashSet};
use std::fs::{self, File, OpenOptions};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

use gpurun_types::{Bytes, DType, Rank};
use rustix::fs::{CWD, FallocateFlags, RenameFlags, fallocate, renameat_with, statvfs};
use serde::{Deserialize, Serialize};

use crate::error::{Error, SourceError};
use crate::find::{folder_name, list, step_of};
use crate::manifest::{DataFile, MANIFEST, Manifest, Meta, Piece, PieceIndex, Section, piece_key};
use crate::open::Checkpoint;
use crate::tensors::{Outgoing, StreamError, encode_header, stream};

const PARTIAL: &str = "partial";
const REMOVED: &str = "removed";

/// Bytes of small writes that are gathered into one.
const BUFFER: usize = 1 << 20;

/// A folder's or receipt's size on disk, for the message of a full disk: a block.
const BLOCK: Bytes = Bytes(4096);

/// A run of elements of a tensor that a rank owns, and where its values come from.
pub struct PieceSource<'a> {
    /// Full name of the tensor.
    pub tensor: String,
    /// Kind of state.
    pub section: Section,
    /// First element of the tensor that is in the piece.
    pub start: u64,
    /// Elements. A piece of none is left out.
    pub len: u64,
    /// How the values are stored: `F32` or `Bf16` (rounded to the nearest; exact for values that were bf16).
    pub dtype: DType,
    /// Delivers the values, counted from the start of the piece, a few MiB at a time.
    pub fill: crate::Fill<'a>,
}

impl<'a> PieceSource<'a> {
    /// A piece stored as `F32` with its values in memory.
    #[must_use]
    pub fn from_slice(tensor: impl Into<String>, section: Section, start: u64, values: &'a [f32]) -> Self {
        let fill = move |at: u64, out: &mut [f32]| {
            out.copy_from_slice(&values[at as usize..at as usize + out.len()]);
            Ok::<(), SourceError>(())
        };
        let len = values.len() as u64;
        Self { tensor: tensor.into(), section, start, len, dtype: DType::F32, fill: Box::new(fill) }
    }
}

/// What a rank leaves beside its file for the rank that commits.
#[derive(Serialize, Deserialize)]
struct Receipt {
    file: DataFile,
    pieces: Vec<ReceiptPiece>,
}

#[derive(Serialize, Deserialize)]
struct ReceiptPiece {
    tensor: String,
    section: Section,
    start: u64,
    len: u64,
    dtype: DType,
    offset: u64,
    crc32: u32,
}

/// A save under way. Every rank calls [`begin`](Self::begin) and [`write_rank`](Self::write_rank); when all have
/// succeeded (a barrier, which is the caller's), rank 0 calls [`commit`](Self::commit). When any has failed, one rank
/// calls [`abort`](Self::abort).
///
/// Saves of one run are begun and committed in the order of their steps.
#[derive(Clone, Debug)]
pub struct Save {
    out: PathBuf,
    step: u64,
    partial: PathBuf,
}

/// Creates the folder `out` if need be and checks that files can be made there, so that a run need not train for an hour
/// to find out.
///
/// # Errors
/// When it cannot be created or written.
pub fn check_out(out: impl AsRef<Path>) -> Result<(), Error> {
    let out = out.as_ref();
    create_folder(out)?;
    let probe = out.join(format!(".probe-{}", std::process::id()));
    File::create(&probe).map_err(Error::io("write in", out))?;
    fs::remove_file(&probe).map_err(Error::io("remove", &probe))
}

impl Save {
    /// Starts the save of `step` in folder `out`. Any number of ranks may do so at once.
    ///
    /// What an interrupted save of this step left is overwritten part by part, and the rest of it dropped by the commit.
    ///
    /// # Errors
    /// When the folders cannot be created.
    pub fn begin(out: impl AsRef<Path>, step: u64) -> Result<Self, Error> {
        let out = out.as_ref().to_owned();
        let partial = hidden(&out, step, PARTIAL);
        let save = Self { out, step, partial };
        create_folder(&save.out).map_err(|e| save.explain(e, BLOCK))?;
        fs::create_dir_all(&save.partial)
            .map_err(|e| save.explain(Error::io("create folder", &save.partial)(e), BLOCK))?;
        Ok(save)
    }

    /// Writes the part of `rank` in bounded memory and makes it durable; returns its size.
    ///
    /// # Errors
    /// What had been written of the part is removed. A full disk is [`Error::DiskFull`].
    ///
    /// # Panics
    /// When two pieces are the same: a bug of the caller.
    pub fn write_rank<'a>(
        &self,
        rank: Rank,
        pieces: impl IntoIterator<Item = PieceSource<'a>>,
    ) -> Result<Bytes, Error> {
        self.remove_part(rank)?;
        let path = self.partial.join(data_name(rank));
        let file = OpenOptions::new()
            .write(true)
            .create_new(true)
            .open(&path)
            .map_err(|e| self.explain(Error::io("create", &path)(e), BLOCK))?;
        self.write_part(rank, file, pieces)
    }

    /// As [`Self::write_rank`], into a file that is open and empty.
    fn write_part<'a>(
        &self,
        rank: Rank,
        file: File,
        pieces: impl IntoIterator<Item = PieceSource<'a>>,
    ) -> Result<Bytes, Error> {
        let mut parts = Vec::new();
        let mut outgoing = Vec::new();
        let mut sources: Vec<PieceSource<'a>> = pieces.into_iter().filter(|p| p.len > 0).collect();
        // Wider types first, so that each value lies at a multiple of its size.
        sources.sort_by_key(|p| std::cmp::Reverse(p.dtype.size()));
        let mut keys = HashSet::new();
        for PieceSource { tensor, section, start, len, dtype, fill } in sources {
            let key = piece_key(section, &tensor, start);
            assert!(keys.insert(key.clone()), "{rank} saves piece {key} twice");
            outgoing.push(Outgoing { key, shape: vec![len as usize], dtype, fill });
            parts.push(ReceiptPiece { tensor, section, start, len, dtype, offset: 0, crc32: 0 });
        }
        let header = encode_header(&outgoing, ("gpurun", format!("step {}, {rank}", self.step)));
        let total = Bytes(header.len() as u64 + outgoing.iter().map(Outgoing::bytes).sum::<u64>());
        let written = self
            .write_data(rank, file, &header, total, &mut outgoing)
            .and_then(|crcs| self.write_receipt(rank, &header, total, parts, &crcs));
        written.map(|()| total).map_err(|error| {
            // The first error is the one to report.
            if let Err(second) = self.remove_part(rank) {
                tracing::warn!("{second}");
            }
            self.explain(error, total)
        })
    }

    fn write_data(
        &self,
        rank: Rank,
        file: File,
        header: &[u8],
        total: Bytes,
        outgoing: &mut [Outgoing<'_>],
    ) -> Result<Vec<u32>, Error> {
        let path = self.partial.join(data_name(rank));
        reserve(&file, total).map_err(Error::io("write", &path))?;
        let mut out = BufWriter::with_capacity(BUFFER, file);
        let crcs = out.write_all(header).map_err(StreamError::from).and_then(|()| stream(&mut out, outgoing));
        let crcs = crcs.map_err(|error| match error {
            StreamError::Write(source) => Error::io("write", &path)(source),
            StreamError::Source { key, source } => Error::Source { key, source },
        });
        // Taken apart, so that the buffer is not written once more when it is dropped after a failure.
        let (file, rest) = out.into_parts();
        let crcs = crcs?;
        (&file)
            .write_all(&rest.expect("no writer panicked: the panic would have passed here"))
            .map_err(Error::io("write", &path))?;
        file.sync_all().map_err(Error::io("write", &path))?;
        Ok(crcs)
    }

    fn write_receipt(
        &self,
        rank: Rank,
        header: &[u8],
        total: Bytes,
        mut pieces: Vec<ReceiptPiece>,
        crcs: &[u32],
    ) -> Result<(), Error> {
        let mut offset = header.len() as u64;
        for (piece, crc32) in pieces.iter_mut().zip(crcs) {
            (piece.offset, piece.crc32) = (offset, *crc32);
            offset += piece.dtype.bytes(piece.len as usize).0;
        }
        let file = DataFile {
            name: data_name(rank),
            bytes: total.0,
            header_bytes: header.len() as u64,
            header_crc32: crc32fast::hash(header),
        };
        let json = serde_json::to_vec(&Receipt { file, pieces }).expect("names and numbers can always be written");
        write_durable(&self.partial.join(receipt_name(rank)), &json)?;
        sync_folder(&self.partial)
    }

    /// Makes the parts of ranks `0..world` a checkpoint and returns its folder: checks that they make a whole, writes the
    /// manifest, makes all durable, renames, makes the rename durable. Then prunes: of the checkpoints up to this step,
    /// the newest `keep` good ones stay (this one always does), and none that is older; with `None`, all stay.
    ///
    /// A checkpoint of the same step that is there already is replaced in one atomic exchange.
    ///
    /// # Errors
    /// When the parts do not make a whole, or a write fails; earlier checkpoints are as they were.
    ///
    /// # Panics
    /// When `meta.step` is not the step of [`Self::begin`].
    pub fn commit(&self, meta: Meta, world: u32, keep: Option<usize>) -> Result<PathBuf, Error> {
        assert_eq!(meta.step, self.step, "the manifest of another step");
        let manifest = self.gather(meta, world)?;
        self.drop_strangers(world)?;
        let bytes = manifest.to_bytes();
        let path = self.partial.join(MANIFEST);
        if let Err(error) = write_durable(&path, &bytes).and_then(|()| sync_folder(&self.partial)) {
            remove_folder(&self.partial);
            return Err(self.explain(error, Bytes(bytes.len() as u64)));
        }
        let folder = self.publish()?;
        for rank in 0..world {
            remove_if_there(&folder.join(receipt_name(Rank(rank))), "a receipt that is no longer needed");
        }
        self.prune(keep);
        Ok(folder)
    }

    /// Gives the save up: removes all that was written of it.
    ///
    /// # Errors
    /// When it cannot be removed.
    pub fn abort(&self) -> Result<(), Error> {
        match fs::remove_dir_all(&self.partial) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(Error::io("remove", &self.partial)(error)),
            _ => Ok(()),
        }
    }

    /// The manifest of all parts, if they make a whole.
    fn gather(&self, meta: Meta, world: u32) -> Result<Manifest, Error> {
        let not_whole = |what| Error::NotWhole { folder: self.partial.clone(), what };
        let tensors: HashMap<&str, usize> =
            meta.tensors.iter().enumerate().map(|(i, t)| (t.name.as_str(), i)).collect();
        let (mut files, mut pieces) = (Vec::new(), Vec::new());
        for rank in (0..world).map(Rank) {
            let receipt = self.receipt(rank)?;
            let size = fs::metadata(self.partial.join(&receipt.file.name)).map_or(0, |m| m.len());
            if size != receipt.file.bytes {
                return Err(not_whole(format!("{} has {size} of {} bytes", receipt.file.name, receipt.file.bytes)));
            }
            for piece in receipt.pieces {
                pieces.push(place(piece, files.len(), &tensors).map_err(not_whole)?);
            }
            files.push(receipt.file);
        }
        PieceIndex::new(&meta.tensors, &pieces).map_err(not_whole)?;
        Ok(Manifest::new(meta, world, files, pieces))
    }

    fn receipt(&self, rank: Rank) -> Result<Receipt, Error> {
        let path = self.partial.join(receipt_name(rank));
        let json = fs::read(&path).map_err(|source| match source.kind() {
            io::ErrorKind::NotFound => Error::MissingPart { folder: self.partial.clone(), rank },
            _ => Error::io("read", &path)(source),
        })?;
        serde_json::from_slice(&json).map_err(|e| Error::manifest(&path, e.to_string()))
    }

    /// Removes what belongs to no rank of this save: parts of an interrupted one by more ranks.
    fn drop_strangers(&self, world: u32) -> Result<(), Error> {
        let known: HashSet<String> =
            (0..world).map(Rank).flat_map(|rank| [data_name(rank), receipt_name(rank)]).collect();
        for entry in fs::read_dir(&self.partial).map_err(Error::io("read folder", &self.partial))? {
            let entry = entry.map_err(Error::io("read folder", &self.partial))?;
            if entry.file_name().to_str().is_none_or(|name| !known.contains(name)) {
                fs::remove_file(entry.path()).map_err(Error::io("remove", &entry.path()))?;
            }
        }
        Ok(())
    }

    /// Gives the finished folder its name.
    fn publish(&self) -> Result<PathBuf, Error> {
        let folder = self.out.join(folder_name(self.step));
        let renamed = if folder.exists() { self.replace(&folder) } else { fs::rename(&self.partial, &folder) };
        renamed.map_err(Error::io("rename to", &folder))?;
        sync_folder(&self.out)?;
        Ok(folder)
    }

    /// Puts the finished folder in the place of an older one of the same step.
    fn replace(&self, folder: &Path) -> io::Result<()> {
        match renameat_with(CWD, &self.partial, CWD, folder, RenameFlags::EXCHANGE) {
            // The file system cannot exchange: two renames, and between them this step is under neither name.
            Err(rustix::io::Errno::INVAL | rustix::io::Errno::NOSYS | rustix::io::Errno::OPNOTSUPP) => {
                let aside = hidden(&self.out, self.step, REMOVED);
                remove_folder(&aside);
                fs::rename(folder, &aside)?;
                fs::rename(&self.partial, folder)?;
                remove_folder(&aside);
                Ok(())
            }
            Err(errno) => Err(errno.into()),
            Ok(()) => {
                remove_folder(&self.partial);
                Ok(())
            }
        }
    }

    /// Removes checkpoints beyond `keep`, and what interrupted saves and removals of earlier steps left. Newer steps than
    /// this one, left by a run that was taken up again at an earlier step, are not touched. The save itself has succeeded,
    /// so a folder that cannot be removed is a warning.
    fn prune(&self, keep: Option<usize>) {
        if let Some(keep) = keep {
            self.remove_beyond(keep.max(1));
        }
        let Ok(entries) = fs::read_dir(&self.out) else { return };
        for entry in entries.flatten() {
            if entry.file_name().to_str().and_then(leftover_step).is_some_and(|step| step < self.step) {
                remove_folder(&entry.path());
            }
        }
    }

    /// Removes checkpoints up to this step that are older than the newest `keep` good ones.
    fn remove_beyond(&self, keep: usize) {
        let found = list(&self.out).unwrap_or_else(|error| {
            tracing::warn!("older checkpoints are not pruned: {error}");
            Vec::new()
        });
        let mut good = 0;
        for (step, folder) in found.iter().filter(|(step, _)| *step <= self.step).rev() {
            if good < keep {
                // A damaged one does not count: it would take the place of one that can be used.
                good += usize::from(*step == self.step || Checkpoint::open(folder).is_ok());
                continue;
            }
            // Renamed first, so that a removal cut short leaves no half of a checkpoint.
            let aside = hidden(&self.out, *step, REMOVED);
            match fs::rename(folder, &aside) {
                Ok(()) => remove_folder(&aside),
                Err(error) => tracing::warn!("cannot remove {}: {error}", folder.display()),
            }
        }
    }

    fn remove_part(&self, rank: Rank) -> Result<(), Error> {
        for name in [receipt_name(rank), data_name(rank)] {
            let path = self.partial.join(name);
            match fs::remove_file(&path) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(Error::io("remove", &path)(error)),
                _ => {}
            }
        }
        Ok(())
    }

    /// Turns "no space" into the error that says what it means for the run.
    fn explain(&self, error: Error, needed: Bytes) -> Error {
        let Error::Io { source, .. } = &error else { return error };
        if !matches!(source.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded) {
            return error;
        }
        let found = list(&self.out).unwrap_or_default();
        let previous = found.into_iter().rev().map(|(_, path)| path).find(|path| Checkpoint::open(path).is_ok());
        let free = statvfs(&self.out).ok().map(|s| Bytes(s.f_bavail * s.f_frsize));
        Error::DiskFull { folder: self.partial.clone(), needed, free, previous }
    }
}

/// A piece of a receipt, as a piece of the manifest.
fn place(piece: ReceiptPiece, file: usize, tensors: &HashMap<&str, usize>) -> Result<Piece, String> {
    let ReceiptPiece { tensor, section, start, len, dtype, offset, crc32 } = piece;
    let &index =
        tensors.get(tensor.as_str()).ok_or_else(|| format!("a piece of {tensor}, which is no tensor of the model"))?;
    Ok(Piece { tensor: index, section, start, len, dtype, file, offset, crc32 })
}

fn data_name(rank: Rank) -> String {
    format!("rank-{}.safetensors", rank.0)
}

fn receipt_name(rank: Rank) -> String {
    format!("rank-{}.json", rank.0)
}

fn hidden(out: &Path, step: u64, what: &str) -> PathBuf {
    out.join(format!(".{}.{what}", folder_name(step)))
}

/// The step of a folder that an interrupted save or removal left.
fn leftover_step(name: &str) -> Option<u64> {
    let name = name.strip_prefix('.')?;
    let name = name.strip_suffix(PARTIAL).or_else(|| name.strip_suffix(REMOVED))?;
    step_of(name.strip_suffix('.')?)
}

fn create_folder(folder: &Path) -> Result<(), Error> {
    if folder.is_dir() {
        return Ok(());
    }
    fs::create_dir_all(folder).map_err(Error::io("create folder", folder))?;
    match folder.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => sync_folder(parent),
        _ => sync_folder(Path::new(".")),
    }
}

/// Claims the space of the whole file before its first byte, where the file system can: a full disk is found out at once.
fn reserve(file: &File, bytes: Bytes) -> io::Result<()> {
    match fallocate(file, FallocateFlags::empty(), 0, bytes.0) {
        Err(errno @ (rustix::io::Errno::NOSPC | rustix::io::Errno::DQUOT | rustix::io::Errno::FBIG)) => {
            Err(errno.into())
        }
        // Not all file systems can; then the writes tell.
        _ => Ok(()),
    }
}

pub(crate) fn write_durable(path: &Path, bytes: &[u8]) -> Result<(), Error> {
    let mut file = File::create(path).map_err(Error::io("create", path))?;
    file.write_all(bytes).and_then(|()| file.sync_all()).map_err(Error::io("write", path))
}

/// Makes the names in a folder durable.
pub(crate) fn sync_folder(folder: &Path) -> Result<(), Error> {
    match File::open(folder).and_then(|f| f.sync_all()) {
        // Some network and user-space file systems keep names durable by themselves and refuse to be told.
        Err(error) if matches!(error.kind(), io::ErrorKind::InvalidInput | io::ErrorKind::Unsupported) => Ok(()),
        other => other.map_err(Error::io("sync folder", folder)),
    }
}

fn remove_folder(folder: &Path) {
    match fs::remove_dir_all(folder) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            tracing::warn!("cannot remove {}: {error}", folder.display());
        }
        _ => {}
    }
}

fn remove_if_there(file: &Path, what: &str) {
    match fs::remove_file(file) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            tracing::warn!("cannot remove {what}, {}: {error}", file.display());
        }
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Works where no small disk can be mounted: the kernel's own full device in the place of the file.
    #[test]
    fn a_write_that_finds_no_space_is_explained() {
        let _limit = testkit::time_limit(20);
        let out = tempfile::tempdir().expect("a temporary folder");
        for elements in [1, 10, 3_000_000] {
            let values = vec![1.0; elements];
            let save = Save::begin(out.path(), 7).expect("begin");
            let full = OpenOptions::new().write(true).open("/dev/full").expect("/dev/full");
            let piece = PieceSource::from_slice("w", Section::Weight, 0, &values);
            let error = save.write_part(Rank(0), full, [piece]).expect_err("no space");
            let Error::DiskFull { folder, needed, previous: None, .. } = &error else { panic!("{error}") };
            assert_eq!(*folder, out.path().join(".step-00000007.partial"));
            assert!(needed.0 > elements as u64 * 4, "{needed}");
            assert!(error.to_string().ends_with("There is no earlier checkpoint."), "{error}");
        }
    }

    #[test]
    fn only_leftovers_are_taken_for_leftovers() {
        let _limit = testkit::time_limit(10);
        assert_eq!(leftover_step(".step-00000012.partial"), Some(12));
        assert_eq!(leftover_step(".step-123456789.removed"), Some(123_456_789));
        for other in ["step-00000012", "step-00000012.partial", ".step-12.partial", ".step-00000012.", ".git"] {
            assert_eq!(leftover_step(other), None, "{other}");
        }
    }
}
