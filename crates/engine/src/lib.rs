//! Runs plans: the interpreter, one rank's model in memory, the training loop, sampling.
#![forbid(unsafe_code)]

pub mod checkpoint;
mod control;
mod describe;
mod error;
mod inference;
mod interpreter;
mod metrics;
mod network;
mod sample;
mod session;
mod trainer;

pub use control::Control;
pub use describe::model_spec;
pub use error::{At, EngineError};
pub use inference::Inference;
pub use interpreter::{AdamOptions, HostBatch, StepInputs, Watcher};
pub use metrics::{HighWater, MetricsFile, StepMetrics};
pub use network::{HostNetwork, Links, Network};
pub use sample::Sampler;
pub use session::{Session, SessionOptions, State, StepOutcome, Stretch};
pub use trainer::{Observer, Phase, Summary, TrainSettings, Trainer};
