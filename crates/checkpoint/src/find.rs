//! Finding the newest good checkpoint among those of a run.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use crate::error::{Error, NoCheckpoint, Refused};
use crate::open::Checkpoint;

/// Name of the folder of a step's checkpoint.
pub(crate) fn folder_name(step: u64) -> String {
    format!("step-{step:08}")
}

/// The step of a checkpoint's folder name, if it is one. Hidden names (`.step-00000100.partial`) are none.
pub(crate) fn step_of(name: &str) -> Option<u64> {
    let digits = name.strip_prefix("step-")?;
    let step = digits.parse().ok()?;
    (folder_name(step) == name).then_some(step)
}

/// Steps and folders of the checkpoints in `out`, oldest first, good or not. None when there is no folder `out`.
///
/// # Errors
/// When `out` cannot be read.
pub fn list(out: impl AsRef<Path>) -> Result<Vec<(u64, PathBuf)>, Error> {
    let out = out.as_ref();
    let entries = match fs::read_dir(out) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        other => other.map_err(Error::io("read folder", out))?,
    };
    let mut found = Vec::new();
    for entry in entries {
        let entry = entry.map_err(Error::io("read folder", out))?;
        if let Some(step) = entry.file_name().to_str().and_then(step_of) {
            found.push((step, entry.path()));
        }
    }
    found.sort();
    Ok(found)
}

/// The newest checkpoint in `out` whose every byte is what was written, and the newer ones that were refused.
///
/// Reads the whole of it once, so in a job one rank calls this and tells the others the folder to
/// [`open`](Checkpoint::open).
///
/// # Errors
/// When there is none; says why each that is there was refused.
pub fn latest(out: impl AsRef<Path>) -> Result<(Checkpoint, Vec<Refused>), NoCheckpoint> {
    let out = out.as_ref();
    let mut refused = Vec::new();
    let found = match list(out) {
        Ok(found) => found,
        Err(reason) => {
            refused.push(Refused { path: out.to_owned(), reason });
            Vec::new()
        }
    };
    for (_, path) in found.into_iter().rev() {
        match Checkpoint::open(&path).and_then(|checkpoint| checkpoint.verify().map(|()| checkpoint)) {
            Ok(checkpoint) => return Ok((checkpoint, refused)),
            Err(reason) => refused.push(Refused { path, reason }),
        }
    }
    Err(NoCheckpoint { out: out.to_owned(), refused })
}
