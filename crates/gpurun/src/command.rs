//! What the commands that run without workers share: reading arguments, one-line errors, exit codes.

use std::ffi::OsString;
use std::io::Write;
use std::path::Path;

use clap::Parser;
use gpurun_checkpoint::{Checkpoint, latest};
use gpurun_data::DataError;
use gpurun_engine::EngineError;

use crate::options::{OptionsError, one_line};
use crate::train::TrainError;
use crate::worker::WorkFailure;

/// Why a command failed.
#[derive(Debug)]
pub(crate) struct Failure {
    message: String,
    exit_code: u8,
}

impl Failure {
    pub(crate) fn new(exit_code: u8, message: impl Into<String>) -> Self {
        Self { message: message.into(), exit_code }
    }
}

impl From<Failure> for WorkFailure {
    fn from(failure: Failure) -> Self {
        Self { message: failure.message, exit_code: failure.exit_code, secondary: false }
    }
}

impl From<EngineError> for Failure {
    fn from(error: EngineError) -> Self {
        Self::new(error.exit_code(), error.to_string())
    }
}

impl From<TrainError> for Failure {
    fn from(error: TrainError) -> Self {
        Self::new(error.exit_code(), error.to_string())
    }
}

impl From<DataError> for Failure {
    fn from(error: DataError) -> Self {
        Self::from(EngineError::from(error))
    }
}

impl From<gpurun_checkpoint::Error> for Failure {
    fn from(error: gpurun_checkpoint::Error) -> Self {
        Self::from(EngineError::from(error))
    }
}

impl From<OptionsError> for Failure {
    fn from(error: OptionsError) -> Self {
        Self::new(2, error.to_string())
    }
}

/// Reads the arguments of command `name`, runs it, and reports: the process's exit code.
pub(crate) fn command<A: Parser>(
    name: &str,
    arguments: impl IntoIterator<Item = OsString>,
    run: impl FnOnce(A) -> Result<(), Failure>,
) -> u8 {
    crate::run::diagnostics();
    let words = std::iter::once(OsString::from(name)).chain(arguments);
    let outcome = match A::try_parse_from(words) {
        Ok(args) => run(args),
        // `--help`: asked for, and not a mistake. A closed pipe is the reader's choice.
        Err(error) if !error.use_stderr() => {
            let _ = error.print();
            Ok(())
        }
        Err(error) => Err(Failure::new(2, one_line(&error))),
    };
    match outcome {
        Ok(()) => 0,
        Err(failure) => {
            eprintln!("gpurun: {}", failure.message);
            failure.exit_code
        }
    }
}

/// Writes to standard output. A closed pipe is the reader's choice.
pub(crate) fn print(text: &str) {
    let _ = std::io::stdout().lock().write_all(text.as_bytes());
}

/// A checkpoint, verified; of a folder of checkpoints the newest good one.
pub(crate) fn open_checkpoint(dir: &Path) -> Result<Checkpoint, Failure> {
    if dir.join("manifest.json").is_file() {
        let checkpoint = Checkpoint::open(dir)?;
        checkpoint.verify()?;
        return Ok(checkpoint);
    }
    let (checkpoint, refused) = latest(dir).map_err(|e| Failure::new(5, e.to_string()))?;
    for refused in refused {
        eprintln!("gpurun: passed over {}: {}", refused.path.display(), refused.reason);
    }
    Ok(checkpoint)
}
