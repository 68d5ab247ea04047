//! What can be wrong with a save or a checkpoint, each named with its file.

use std::io;
use std::path::{Path, PathBuf};

use gpurun_types::{Bytes, Rank};
use thiserror::Error;

/// Why a data source could not deliver (a device copy failed, for example).
pub type SourceError = Box<dyn std::error::Error + Send + Sync>;

/// What is wrong with a file of a checkpoint.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum Damage {
    /// The file is not there.
    #[error("the file is missing")]
    Missing,
    /// The file ends too early.
    #[error("truncated at byte {found} of {expected}")]
    Truncated {
        /// Bytes that should be there.
        expected: u64,
        /// Bytes that are there.
        found: u64,
    },
    /// The file goes on after its end.
    #[error("{found} bytes long, {expected} expected")]
    TooLong {
        /// Bytes that should be there.
        expected: u64,
        /// Bytes that are there.
        found: u64,
    },
    /// The header's bytes are not those that were written.
    #[error("checksum mismatch in the header (bytes 0 to {end})")]
    HeaderChecksum {
        /// End of the header in the file.
        end: u64,
    },
    /// The header cannot be understood, or contradicts itself or the manifest.
    #[error("header: {0}")]
    Header(String),
    /// The bytes of a piece are not those that were written.
    #[error("checksum mismatch in piece {piece} (bytes {start} to {end})")]
    PieceChecksum {
        /// The piece's key in the file, `section/tensor@start`.
        piece: String,
        /// First byte of the piece in the file.
        start: u64,
        /// End of the piece in the file.
        end: u64,
    },
    /// The manifest's bytes are not those that were written.
    #[error("checksum mismatch, or cut short")]
    ManifestChecksum,
    /// The manifest contradicts itself.
    #[error("{0}")]
    Manifest(String),
}

/// Failure of a save, an open or a read.
#[derive(Debug, Error)]
pub enum Error {
    /// The operating system refused.
    #[error("cannot {doing} {}: {source}", path.display())]
    Io {
        /// What was tried, for example `write`.
        doing: &'static str,
        /// On which file or folder.
        path: PathBuf,
        /// Its answer.
        source: io::Error,
    },
    /// No room for the checkpoint. What had been written of it is removed.
    #[error(
        "disk full: {} needs {needed}{}; free space there, or lower --keep. {}",
        folder.display(),
        free.map_or_else(String::new, |free| format!(" and its disk has {free} left")),
        previous.as_ref().map_or_else(
            || "There is no earlier checkpoint.".to_owned(),
            |path| format!("The previous checkpoint {} is intact.", path.display()),
        )
    )]
    DiskFull {
        /// Where the checkpoint was being written.
        folder: PathBuf,
        /// What the file that failed needs in all.
        needed: Bytes,
        /// What the file system has left, where it says.
        free: Option<Bytes>,
        /// The checkpoint to fall back on.
        previous: Option<PathBuf>,
    },
    /// A file of a checkpoint, or a weights file, is not what was written.
    #[error("{}: {damage}", path.display())]
    Damaged {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        damage: Damage,
    },
    /// Written by a version that this one cannot read.
    #[error("{}: unknown version {found} of the checkpoint format, this program reads version {supported}", path.display())]
    UnknownVersion {
        /// The manifest.
        path: PathBuf,
        /// The version that it states.
        found: u64,
        /// The version that this program reads.
        supported: u64,
    },
    /// A rank's part of a save is not there when it is committed: a rank committed before all had written.
    #[error("{}: {rank} has written no part of this checkpoint", folder.display())]
    MissingPart {
        /// The unfinished folder.
        folder: PathBuf,
        /// Whose part.
        rank: Rank,
    },
    /// The parts do not cover every element of every tensor exactly once.
    #[error("{}: the parts of the ranks do not make a whole: {what}", folder.display())]
    NotWhole {
        /// The unfinished folder.
        folder: PathBuf,
        /// First fault found.
        what: String,
    },
    /// The data of a tensor could not be had from its source.
    #[error("cannot get the data of {key} to save it: {source}")]
    Source {
        /// The piece's key.
        key: String,
        /// Why.
        source: SourceError,
    },
    /// A tensor is asked for that is not there.
    #[error("{} holds no tensor {name}{}", path.display(), nearest.as_ref().map_or_else(String::new, |n| format!("; did you mean {n}?")))]
    NoTensor {
        /// The checkpoint or weights folder.
        path: PathBuf,
        /// The name asked for.
        name: String,
        /// A name that is there and looks like it.
        nearest: Option<String>,
    },
    /// A range is asked for that leaves its tensor.
    #[error("{}: elements {start} to {end} of {name}, which has {elements}", path.display())]
    OutOfRange {
        /// The checkpoint or weights folder.
        path: PathBuf,
        /// The tensor.
        name: String,
        /// First element asked for.
        start: u64,
        /// End of the range asked for.
        end: u64,
        /// Elements of the tensor.
        elements: u64,
    },
    /// A folder is no folder of weights.
    #[error("{}: {what}", path.display())]
    NotWeights {
        /// The folder or file.
        path: PathBuf,
        /// What is missing or unsupported, and what would work.
        what: String,
    },
}

impl Error {
    pub(crate) fn io(doing: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Self {
        let path = path.to_owned();
        move |source| Self::Io { doing, path, source }
    }

    pub(crate) fn damaged(path: &Path, damage: Damage) -> Self {
        Self::Damaged { path: path.to_owned(), damage }
    }

    pub(crate) fn header(path: &Path, what: impl Into<String>) -> Self {
        Self::damaged(path, Damage::Header(what.into()))
    }

    pub(crate) fn manifest(path: &Path, what: impl Into<String>) -> Self {
        Self::damaged(path, Damage::Manifest(what.into()))
    }
}

/// A checkpoint that was passed over, and why.
#[derive(Debug)]
pub struct Refused {
    /// Its folder.
    pub path: PathBuf,
    /// What is wrong with it.
    pub reason: Error,
}

/// No checkpoint can be used.
#[derive(Debug, Error)]
#[error("no usable checkpoint in {}{}", out.display(), list_refused(refused))]
pub struct NoCheckpoint {
    /// Where it was looked for.
    pub out: PathBuf,
    /// Those that are there and cannot be used, newest first.
    pub refused: Vec<Refused>,
}

fn list_refused(refused: &[Refused]) -> String {
    let reasons: Vec<String> = refused.iter().map(|r| r.reason.to_string()).collect();
    if reasons.is_empty() { String::new() } else { format!(": {}", reasons.join("; ")) }
}
