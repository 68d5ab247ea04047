use std::fmt;
use std::path::PathBuf;

use gpurun_checkpoint::Error as CheckpointError;
use gpurun_comm::CommError;
use gpurun_data::DataError;
use gpurun_device::DeviceError;
use gpurun_plan::PlanError;
use gpurun_types::Bytes;

/// Where in a run something happened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct At {
    /// Training step, from 0.
    pub step: u64,
    /// Index of the instruction in its program.
    pub instr: usize,
    /// The instruction, for example `backward h.2 micro 0`.
    pub label: String,
}

impl fmt::Display for At {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "step {}, instruction {} ({})", self.step, self.instr, self.label)
    }
}

/// What can end a run.
#[derive(Debug, thiserror::Error)]
pub enum EngineError {
    /// Settings that do not go together.
    #[error("{0}")]
    Config(String),
    /// No plan can be made of these settings.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// An arena could not be allocated.
    #[error("does not fit: {0}")]
    DoesNotFit(DeviceError),
    /// The plan needs more than the limit allows.
    #[error("does not fit: {what} needs {needed}, and {limit} may be used")]
    OverLimit {
        /// Which memory.
        what: &'static str,
        /// Bytes of the plan.
        needed: Bytes,
        /// Bytes allowed.
        limit: Bytes,
    },
    /// An operation failed.
    #[error("{at}: {source}")]
    Device {
        /// Where.
        at: At,
        /// What.
        source: DeviceError,
    },
    /// A collective failed.
    #[error("{at}: {source}")]
    Comm {
        /// Where.
        at: At,
        /// What.
        source: CommError,
    },
    /// An operation failed outside a step.
    #[error("{what}: {source}")]
    SetUp {
        /// What was being done.
        what: &'static str,
        /// What failed.
        source: DeviceError,
    },
    /// A collective failed outside a step.
    #[error("{what}: {source}")]
    Control {
        /// What was being done.
        what: &'static str,
        /// What failed.
        source: CommError,
    },
    /// The data cannot be used.
    #[error(transparent)]
    Data(#[from] DataError),
    /// A checkpoint could not be written or read.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// Another rank failed to write its part of a checkpoint.
    #[error("another rank could not write its part of the checkpoint in {}", out.display())]
    SaveElsewhere {
        /// Folder of the checkpoints.
        out: PathBuf,
    },
    /// A checkpoint of another model, or one that lacks something.
    #[error("{0}")]
    Resume(String),
    /// The metrics file cannot be written.
    #[error("cannot write metrics to {path}: {source}")]
    Metrics {
        /// The file.
        path: String,
        /// What the system said.
        source: std::io::Error,
    },
    /// Gradients were not finite for many steps in a row.
    #[error(
        "step {step}: gradients were not finite for {steps} steps in a row (last loss {loss}); \
         lower --lr, raise --warmup, or use --dtype bf16 or fp32"
    )]
    NonFinite {
        /// The last of these steps.
        step: u64,
        /// How many.
        steps: u32,
        /// Loss of the last of them.
        loss: f64,
    },
}

impl EngineError {
    /// The process's exit code: an interface that job managers act on.
    #[must_use]
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Config(_) | Self::Plan(_) | Self::Data(_) | Self::Metrics { .. } => 2,
            Self::DoesNotFit(_) | Self::OverLimit { .. } => 3,
            Self::Resume(_) => 5,
            Self::Checkpoint(error) => checkpoint_exit_code(error),
            Self::SaveElsewhere { .. } => 4,
            Self::Comm { source, .. } | Self::Control { source, .. } => match source {
                CommError::Timeout { .. } | CommError::Stuck { .. } => 6,
                _ => 4,
            },
            Self::NonFinite { .. } => 7,
            Self::Device { .. } | Self::SetUp { .. } => 4,
        }
    }

    /// True when this rank only noticed that another one failed.
    #[must_use]
    pub const fn is_secondary(&self) -> bool {
        match self {
            Self::Comm { source, .. } | Self::Control { source, .. } => source.is_secondary(),
            Self::SaveElsewhere { .. } => true,
            _ => false,
        }
    }
}

/// A checkpoint that cannot be used is 5, a folder that holds no weights is the user's to mend, a disk that fails is 4.
const fn checkpoint_exit_code(error: &CheckpointError) -> u8 {
    match error {
        CheckpointError::Damaged { .. }
        | CheckpointError::UnknownVersion { .. }
        | CheckpointError::NoTensor { .. }
        | CheckpointError::OutOfRange { .. } => 5,
        CheckpointError::NotWeights { .. } => 2,
        _ => 4,
    }
}
