//! What a user may write, on the command line or in a file.

use std::path::PathBuf;

use clap::builder::{PossibleValuesParser, TypedValueParser};
use clap::{Args, ValueEnum};
use gpurun_plan::{OffloadVia, Recompute};
use gpurun_types::{Bytes, DType};

use super::{Choice, Device, Offload, PipelineSchedule, Schedule};

/// Options of `train`. Those that are absent come from the configuration file, and then from the defaults.
// Negative numbers are let through to the checks, which say what is wrong with them. Clap takes -1e-3 for flags unless
// any hyphen is allowed.
#[derive(Args, Clone, Debug, Default, PartialEq)]
pub struct TrainArgs {
    /// Model: a preset (tiny, gpt2-124m, gpt2-355m, gpt2-774m, gpt2-1558m, llama-1b, llama-7b) or a folder in Hugging
    /// Face's layout [default: tiny]
    #[arg(long, value_name = "PRESET|HF_DIR", help_heading = "Model and data")]
    pub model: Option<String>,
    /// Train without the dropout that the config.json of --model HF_DIR asks for
    #[arg(long, value_name = "0", value_parser = PossibleValuesParser::new(["0"]), help_heading = "Model and data")]
    pub dropout: Option<String>,
    /// Training data: text files, .jsonl, .bin token shards, or folders of them [default: a built-in corpus]
    #[arg(long, value_name = "PATH", num_args = 1.., help_heading = "Model and data")]
    pub data: Vec<PathBuf>,
    /// Held-out data [default: a part of the training data]
    #[arg(long, value_name = "PATH", num_args = 1.., help_heading = "Model and data")]
    pub eval_data: Vec<PathBuf>,
    /// Evaluate on held-out data every N steps and at the end; 0 means never [default: 100]
    #[arg(long, value_name = "N", allow_negative_numbers = true, help_heading = "Model and data")]
    pub eval_every: Option<u64>,
    /// Tokenizer: `bytes` or a tokenizer.json [default: that of --model HF_DIR, or bytes]
    #[arg(long, value_name = "bytes|FILE", help_heading = "Model and data")]
    pub tokenizer: Option<String>,
    /// Tokens per sequence [default: 128]
    #[arg(long, value_name = "TOKENS", allow_negative_numbers = true, help_heading = "Batch and length")]
    pub seq_len: Option<usize>,
    /// Sequences per micro-batch of a rank, or `auto`: the most that fit --gpu-memory-limit, with --pp those of the shortest
    /// estimated step [default: auto with a limit; without one, the most up to 8 that divides the rank's share of a step, into
    /// at least two micro-batches for each stage of --pp where the share allows]
    #[arg(long, value_name = "SEQUENCES|auto", value_parser = micro_batch, allow_negative_numbers = true, help_heading = "Batch and length")]
    pub micro_batch: Option<Choice<usize>>,
    /// Sequences per step over all ranks [default: 24]
    #[arg(long, value_name = "SEQUENCES", allow_negative_numbers = true, help_heading = "Batch and length")]
    pub global_batch: Option<usize>,
    /// Optimizer steps [default: 300]
    #[arg(long, value_name = "N", allow_negative_numbers = true, help_heading = "Batch and length")]
    pub steps: Option<u64>,
    /// Passes over the data, instead of --steps
    #[arg(long, value_name = "X", allow_hyphen_values = true, help_heading = "Batch and length")]
    pub epochs: Option<f64>,
    /// Highest learning rate [default: 3e-3]
    #[arg(long, value_name = "X", allow_hyphen_values = true, help_heading = "Optimizer")]
    pub lr: Option<f64>,
    /// Learning rate at the end [default: a tenth of --lr]
    #[arg(long, value_name = "X", allow_hyphen_values = true, help_heading = "Optimizer")]
    pub min_lr: Option<f64>,
    /// Steps of linear warm-up [default: 20, or a tenth of the steps where those are fewer than 200]
    #[arg(long, value_name = "N", allow_negative_numbers = true, help_heading = "Optimizer")]
    pub warmup: Option<u64>,
    /// Course of the learning rate after the warm-up [default: cosine]
    #[arg(long, value_enum, help_heading = "Optimizer")]
    pub schedule: Option<Schedule>,
    /// Decoupled weight decay of matrices and tables [default: 0.1]
    #[arg(long, value_name = "X", allow_hyphen_values = true, help_heading = "Optimizer")]
    pub weight_decay: Option<f64>,
    /// Adam's decay of the first moment [default: 0.9]
    #[arg(long, value_name = "X", allow_hyphen_values = true, help_heading = "Optimizer")]
    pub beta1: Option<f64>,
    /// Adam's decay of the second moment [default: 0.95]
    #[arg(long, value_name = "X", allow_hyphen_values = true, help_heading = "Optimizer")]
    pub beta2: Option<f64>,
    /// Added to the root of Adam's second moment [default: 1e-8]
    #[arg(long, value_name = "X", allow_hyphen_values = true, help_heading = "Optimizer")]
    pub eps: Option<f64>,
    /// Largest global norm of the gradient; 0 means no limit [default: 1]
    #[arg(long, value_name = "X", allow_hyphen_values = true, help_heading = "Optimizer")]
    pub clip: Option<f64>,
    /// Type of weights and activations [default: fp32]
    #[arg(long, value_parser = dtype(), help_heading = "Precision and memory")]
    pub dtype: Option<DType>,
    /// Type that Adam's moments are kept in; bf16 takes half the memory and is rounded stochastically [default: fp32]
    #[arg(long, value_parser = adam_dtype(), help_heading = "Precision and memory")]
    pub adam_dtype: Option<DType>,
    /// Starting loss scale of fp16 [default: 65536]
    #[arg(long, value_name = "X", allow_hyphen_values = true, help_heading = "Precision and memory")]
    pub loss_scale: Option<f64>,
    /// ZeRO stage: shard optimizer state (1), gradients too (2), parameters too (3) [default: 0]
    #[arg(long, value_name = "0..3", value_parser = zero(), help_heading = "Precision and memory")]
    pub zero: Option<u8>,
    /// State that is kept in host memory [default: none]
    #[arg(long, value_enum, help_heading = "Precision and memory")]
    pub offload: Option<Offload>,
    /// Who runs a host-side Adam: the host, the device through which its state streams, or whichever is estimated to make the
    /// shorter step from memory and link as they are measured at the start [default: auto]
    #[arg(long, value_parser = offload_via(), help_heading = "Precision and memory")]
    pub offload_via: Option<Choice<OffloadVia>>,
    /// Share of the units whose optimizer state is in host memory, 0 to 1, or `auto`: the least that fits --gpu-memory-limit
    /// [default: 1]
    #[arg(long, value_name = "X|auto", value_parser = offload_fraction, allow_hyphen_values = true, help_heading = "Precision and memory")]
    pub offload_fraction: Option<Choice<f64>>,
    /// What is computed again in the backward instead of being kept: nothing; the wide inside of each block's feed-forward
    /// part (one matrix product of a block), attention and the residual stream being kept; or whole blocks [default: none]
    #[arg(long, value_parser = recompute(), help_heading = "Precision and memory")]
    pub recompute: Option<Recompute>,
    /// Pipeline stages that the layers are placed on, one after the other; the ranks of each stage (the number of ranks over
    /// this) are data-parallel replicas [default: 1]
    #[arg(long, value_name = "STAGES", allow_negative_numbers = true, help_heading = "Pipeline")]
    pub pp: Option<u32>,
    /// Order of micro-batches on the stages of --pp [default: 1f1b]
    #[arg(long, value_enum, help_heading = "Pipeline")]
    pub pp_schedule: Option<PipelineSchedule>,
    /// Chunks of layers of each stage with --pp-schedule interleaved [default: 2] or zero-bubble: 1 or 2 [default: 1]
    #[arg(long, value_name = "N", allow_negative_numbers = true, help_heading = "Pipeline")]
    pub pp_chunks: Option<u32>,
    /// Layers of each stage, such as 6,6,7,5; of each chunk in their order where stages have several. Numbers that sum to two
    /// more than the layers count embedding and head too [default: balanced by cost]
    #[arg(long, value_name = "N,N,...", value_delimiter = ',', help_heading = "Pipeline")]
    pub pp_split: Vec<u32>,
    /// Most device memory of a rank, for example 24GiB: micro-batches become as large as fit, and what cannot fit is refused
    /// before the first step, with what would [default: no limit]
    #[arg(long, value_name = "BYTES", value_parser = bytes, help_heading = "Precision and memory")]
    pub gpu_memory_limit: Option<Bytes>,
    /// Where the model runs [default: auto]
    #[arg(long, value_enum, help_heading = "Run")]
    pub device: Option<Device>,
    /// Let several ranks compute on one GPU, which is slow and needs NCCL 2.30.3 or newer; without it each rank has a GPU of its
    /// own
    #[arg(long, value_name = "true|false", num_args = 0..=1, default_missing_value = "true", help_heading = "Run")]
    pub share_gpu: Option<bool>,
    /// Threads per rank [default: the processors divided among the ranks]
    #[arg(long, value_name = "N", allow_negative_numbers = true, help_heading = "Run")]
    pub threads: Option<usize>,
    /// Seed of weights and data order [default: 0]
    #[arg(long, value_name = "N", allow_negative_numbers = true, help_heading = "Run")]
    pub seed: Option<u64>,
    /// Folder of checkpoints
    #[arg(long, value_name = "DIR", help_heading = "Run")]
    pub out: Option<PathBuf>,
    /// Save a checkpoint every N steps; the last step is saved in any case [default: 500]
    #[arg(long, value_name = "N", allow_negative_numbers = true, help_heading = "Run")]
    pub save_every: Option<u64>,
    /// Checkpoints that are kept [default: 2]
    #[arg(long, value_name = "K", allow_negative_numbers = true, help_heading = "Run")]
    pub keep: Option<usize>,
    /// Start from the newest good checkpoint in --out (`auto`), or from this one
    #[arg(long, value_name = "auto|DIR", help_heading = "Run")]
    pub resume: Option<String>,
    /// Write one JSON object a step to this file
    #[arg(long, value_name = "FILE.jsonl", help_heading = "Run")]
    pub metrics: Option<PathBuf>,
    /// Options from a TOML file, under the same names; those on the command line win
    #[arg(long, value_name = "FILE.toml", help_heading = "Run")]
    pub config: Option<PathBuf>,
}

/// What is done with all options alike. The merge lists every field, so a new one cannot be forgotten.
macro_rules! for_all {
    ($($option:ident)*; $($list:ident)*) => {
        impl TrainArgs {
            fn merge(first: Self, second: Self) -> Self {
                Self {
                    config: first.config,
                    $($option: first.$option.or(second.$option),)*
                    $($list: if first.$list.is_empty() { second.$list } else { first.$list },)*
                }
            }

            /// Names of the options that are given, as flags spell them.
            pub(crate) fn given(&self) -> Vec<String> {
                let mut names = Vec::new();
                $(if self.$option.is_some() { names.push(stringify!($option).replace('_', "-")); })*
                $(if !self.$list.is_empty() { names.push(stringify!($list).replace('_', "-")); })*
                names
            }
        }
    };
}

for_all!(
    model dropout eval_every tokenizer seq_len micro_batch global_batch steps epochs lr min_lr warmup schedule weight_decay
    beta1 beta2 eps clip dtype adam_dtype loss_scale zero offload offload_via offload_fraction recompute pp pp_schedule pp_chunks gpu_memory_limit
    device share_gpu threads
    seed out
    save_every keep resume metrics;
    data eval_data pp_split
);

impl TrainArgs {
    /// Each option from `self` where it is given there, else from `file`.
    #[must_use]
    pub(crate) fn or(self, mut file: Self) -> Self {
        // Two ways to say one thing: a flag also wins over the other way in the file.
        if self.steps.is_some() || self.epochs.is_some() {
            (file.steps, file.epochs) = (None, None);
        }
        Self::merge(self, file)
    }
}

fn dtype() -> impl TypedValueParser<Value = DType> {
    PossibleValuesParser::new(["fp32", "bf16", "fp16"]).map(|s| match s.as_str() {
        "fp32" => DType::F32,
        "bf16" => DType::Bf16,
        _ => DType::F16,
    })
}

fn adam_dtype() -> impl TypedValueParser<Value = DType> {
    PossibleValuesParser::new(["fp32", "bf16"]).map(|s| if s == "bf16" { DType::Bf16 } else { DType::F32 })
}

fn zero() -> impl TypedValueParser<Value = u8> {
    PossibleValuesParser::new(["0", "1", "2", "3"]).map(|s| s.as_bytes()[0] - b'0')
}

/// A number of sequences, or `auto`.
fn micro_batch(text: &str) -> Result<Choice<usize>, String> {
    choice(text, "give a number of sequences, or auto")
}

/// A share, or `auto`.
fn offload_fraction(text: &str) -> Result<Choice<f64>, String> {
    choice(text, "give a number from 0 to 1, or auto")
}

fn choice<T: std::str::FromStr>(text: &str, mend: &str) -> Result<Choice<T>, String> {
    match text {
        "auto" => Ok(Choice::Auto),
        _ => text.parse().map(Choice::Given).map_err(|_| mend.to_owned()),
    }
}

/// `1500000000`, `512MiB`, `24GiB`, `1.5GB`.
fn bytes(text: &str) -> Result<Bytes, String> {
    const UNITS: [(&str, f64); 8] = [
        ("TiB", 1_099_511_627_776.0),
        ("GiB", 1_073_741_824.0),
        ("MiB", 1_048_576.0),
        ("KiB", 1024.0),
        ("TB", 1e12),
        ("GB", 1e9),
        ("MB", 1e6),
        ("KB", 1e3),
    ];
    let unit = UNITS.iter().find(|(unit, _)| text.ends_with(unit));
    let (number, factor) = unit.map_or((text, 1.0), |(unit, factor)| (&text[..text.len() - unit.len()], *factor));
    match number.trim().parse::<f64>() {
        Ok(n) if n.is_finite() && n * factor >= 1.0 => Ok(Bytes((n * factor) as u64)),
        _ => Err("give a number of bytes, such as 24GiB or 512MiB".to_owned()),
    }
}

fn offload_via() -> impl TypedValueParser<Value = Choice<OffloadVia>> {
    PossibleValuesParser::new(["auto", "host", "stream"]).map(|s| match s.as_str() {
        "auto" => Choice::Auto,
        "host" => Choice::Given(OffloadVia::Host),
        _ => Choice::Given(OffloadVia::Stream),
    })
}

fn recompute() -> impl TypedValueParser<Value = Recompute> {
    PossibleValuesParser::new(["none", "selective", "full"]).map(|s| match s.as_str() {
        "none" => Recompute::None,
        "selective" => Recompute::Selective,
        _ => Recompute::Full,
    })
}

/// The name of a value as the command line spells it.
pub(crate) fn spelled<T: ValueEnum>(value: T) -> String {
    value.to_possible_value().map_or_else(String::new, |v| v.get_name().to_owned())
}

/// What clap says of a mistake, on one line: its message, the possible values or nearest names, no usage.
#[must_use]
pub fn one_line(error: &clap::Error) -> String {
    let text = error.render().to_string();
    let lines = text.lines().map(str::trim).filter(|l| !l.is_empty());
    let said: Vec<&str> =
        lines.take_while(|l| !l.starts_with("Usage:") && !l.starts_with("For more information")).collect();
    let said = said.join(" ");
    said.strip_prefix("error: ").unwrap_or(&said).replace(" tip: ", "; ")
}
