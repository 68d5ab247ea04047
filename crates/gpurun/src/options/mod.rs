//! Options of a training run: command line, configuration file, and what they mean together.
//!
//! [`TrainArgs`] is what a user wrote, on the command line or, with the same names, in a TOML file; each option may be
//! absent. [`TrainArgs::resolve`] merges the two (flags win), fills in defaults and checks everything that can be checked
//! before data and model are opened. The result, [`TrainOptions`], is plain data that can be stored with a checkpoint.
//!
//! ```toml
//! # run.toml: used by `gpurun train --config run.toml`. Paths are relative to the working folder, as on the command line.
//! data = ["corpus/", "more.jsonl"]
//! seq-len = 256
//! lr = 1e-3
//!
//! [model]              # or: model = "gpt2-124m"
//! preset = "tiny"      # what the table does not give comes from here
//! layers = 6
//! ```

mod args;
mod config;
mod error;
mod model;
mod rate;
mod resolve;
#[cfg(test)]
mod tests;

use std::path::PathBuf;

use gpurun_plan::{OffloadVia, Recompute};
use gpurun_types::{Bytes, DType};
use serde::{Deserialize, Serialize};

pub(crate) use args::spelled;
pub use args::{TrainArgs, one_line};
pub use error::OptionsError;
pub use model::{ModelChoice, ModelOptions};
pub use rate::{LearningRate, Schedule};

/// Where training stops.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Length {
    /// After so many optimizer steps.
    Steps(u64),
    /// After so many passes over the data, rounded up to whole steps.
    Epochs(f64),
}

/// How text becomes token ids.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Tokenizer {
    /// One token a byte.
    Bytes,
    /// A `tokenizer.json` of Hugging Face.
    File(PathBuf),
}

/// State that is kept in host memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Offload {
    /// None.
    None,
    /// Master weights and Adam's moments.
    Optimizer,
}

/// Order of micro-batches on the stages of a pipeline.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum PipelineSchedule {
    /// All forwards, then all backwards; holds the activations of every micro-batch.
    Gpipe,
    /// One forward, one backward, after as many forwards as there are later stages.
    #[value(name = "1f1b")]
    #[serde(rename = "1f1b")]
    OneFOneB,
    /// Each stage has several chunks of the layers (--pp-chunks) and takes them in turn: less idle time, more messages.
    Interleaved,
    /// Gradients of weights are computed when there is nothing better to do: a third of the idle time of 1f1b (ZB-H1), or with
    /// --pp-chunks 2 a sixth (ZB-V, whose stages have one chunk on the way down and one on the way back).
    ZeroBubble,
}

/// What an option says that may be left to the program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Choice<T> {
    /// The program chooses.
    Auto,
    /// This.
    Given(T),
}

impl<T> Choice<T> {
    /// The value, if one is given.
    pub fn given(self) -> Option<T> {
        match self {
            Self::Auto => None,
            Self::Given(value) => Some(value),
        }
    }
}

/// Where the model runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Device {
    /// The best that the machine has.
    Auto,
    /// The processor.
    Cpu,
    /// A GPU of NVIDIA.
    Cuda,
}

/// Which checkpoint a run starts from.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Resume {
    /// The newest good one in the output folder; from the beginning when there is none.
    Auto,
    /// This one.
    From(PathBuf),
}

/// Options of a training run, complete and checked.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct TrainOptions {
    /// Model.
    pub model: ModelOptions,
    /// Files and folders of training data; none means the corpus that comes with the program.
    pub data: Vec<PathBuf>,
    /// Files and folders of held-out data; none means a part of the training data.
    pub eval_data: Vec<PathBuf>,
    /// Steps between evaluations; `None` means never.
    pub eval_every: Option<u64>,
    /// Text to tokens.
    pub tokenizer: Tokenizer,
    /// Tokens per sequence.
    pub seq_len: usize,
    /// Sequences per micro-batch of a rank; `None` means chosen by [`TrainOptions::micro_batches`].
    pub micro_batch: Option<usize>,
    /// Sequences per step over all ranks.
    pub global_batch: usize,
    /// Where training stops.
    pub length: Length,
    /// Highest learning rate.
    pub lr: f64,
    /// Learning rate at the end of the schedule.
    pub min_lr: f64,
    /// Steps of linear warm-up; `None` means chosen by [`TrainOptions::learning_rate`].
    pub warmup: Option<u64>,
    /// Course of the learning rate after the warm-up.
    pub schedule: Schedule,
    /// Decoupled weight decay of matrices and tables.
    pub weight_decay: f64,
    /// Adam's decay of the first moment.
    pub beta1: f64,
    /// Adam's decay of the second moment.
    pub beta2: f64,
    /// Added to the root of Adam's second moment.
    pub eps: f64,
    /// Largest global norm of the gradient; `None` means no limit.
    pub clip: Option<f64>,
    /// Type of weights and activations.
    pub dtype: DType,
    /// Type of Adam's moments: fp32, or bf16 with stochastic rounding.
    pub adam_dtype: DType,
    /// Starting loss scale; fp16 only.
    pub loss_scale: Option<f64>,
    /// ZeRO stage, 0 to 3.
    pub zero: u8,
    /// State in host memory.
    pub offload: Offload,
    /// Who runs a host-side Adam; `None` means chosen by measurement.
    pub offload_via: Option<OffloadVia>,
    /// Share of the units whose optimizer state is in host memory; `None` means the least that fits the limit.
    pub offload_fraction: Option<f64>,
    /// What is computed again in the backward.
    pub recompute: Recompute,
    /// Pipeline stages.
    pub pp: u32,
    /// Order of micro-batches on the stages.
    pub pp_schedule: PipelineSchedule,
    /// Chunks of layers of each stage; 1 in the orders that have no other number.
    pub pp_chunks: u32,
    /// Layers, or units, of each chunk; `None` means balanced by cost.
    pub pp_split: Option<Vec<u32>>,
    /// Most device memory of a rank; `None` means no limit.
    pub gpu_memory_limit: Option<Bytes>,
    /// Where the model runs.
    pub device: Device,
    /// Several ranks may compute on one GPU.
    pub share_gpu: bool,
    /// Threads per rank; `None` means the processors divided among the ranks of the machine.
    pub threads: Option<usize>,
    /// Seed of weights and data order.
    pub seed: u64,
    /// Folder of checkpoints.
    pub out: Option<PathBuf>,
    /// Steps between checkpoints. The last step is saved in any case.
    pub save_every: u64,
    /// Checkpoints that are kept.
    pub keep: usize,
    /// Where to start from; `None` means from the beginning.
    pub resume: Option<Resume>,
    /// File of metrics, one JSON object a line.
    pub metrics: Option<PathBuf>,
    /// Names of the options that were given, as flags spell them.
    #[serde(skip)]
    pub(crate) given: Vec<String>,
    /// Where each value was written, for errors that are found later.
    #[serde(skip)]
    pub(crate) origins: error::Origins,
}

/// A rank's part of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MicroBatches {
    /// Sequences of one micro-batch.
    pub sequences: usize,
    /// Micro-batches of a step.
    pub count: u32,
}
