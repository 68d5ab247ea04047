//! From what was written to what is meant: files and flags merged, defaults filled in, everything checked.

use std::path::PathBuf;

use gpurun_model::Dropout;
use gpurun_plan::{Mesh, Recompute};
use gpurun_types::DType;
use serde::Deserialize;

use super::args::{TrainArgs, spelled};
use super::config::{self, FileOptions};
use super::error::{OptionsError, Origins};
use super::model::{ModelChoice, ModelOptions};
use super::{
    Choice, Device, Length, MicroBatches, Offload, PipelineSchedule, Resume, Schedule, Tokenizer, TrainOptions,
};

/// Most sequences that a micro-batch gets when it is not given.
const MICRO_BATCH: usize = 8;

/// Divides among 1, 2, 3, 4, 6, 8, 12 and 24 ranks.
const GLOBAL_BATCH: usize = 24;

const STEPS: u64 = 300;
const LR: f64 = 3e-3;
const LOSS_SCALE: f64 = 65536.0;

/// 20 steps, or a tenth of a short run.
pub(crate) fn default_warmup(steps: u64) -> u64 {
    20.min(steps / 10)
}

impl TrainArgs {
    /// Merges the options with those of the configuration file, fills in defaults and checks them.
    ///
    /// # Errors
    /// The first mistake: where it is, what is wrong, how to mend it.
    pub fn resolve(self) -> Result<TrainOptions, OptionsError> {
        let file = self.config.as_deref().map(config::read).transpose()?.unwrap_or_default();
        self.resolve_with(file)
    }

    pub(crate) fn resolve_with(self, file: FileOptions) -> Result<TrainOptions, OptionsError> {
        let FileOptions { args: in_file, model: table, origins } = file;
        // A name is that of the flag where the flag is given.
        let given = self.given();
        let origins = Origins(origins.0.into_iter().filter(|(name, _)| !given.contains(name)).collect());
        let args = self.or(in_file);
        let given = args.given();
        let check = Check { origins: &origins };
        let dropout = if args.dropout.is_some() { Dropout::Ignore } else { Dropout::Refuse };
        let model = ModelOptions::new(args.model.as_deref(), table, dropout, &origins)?;
        check.folder("dropout", args.dropout.is_some(), &model)?;
        check.numbers(&args)?;
        check.combinations(&args)?;
        check.paths(&args)?;
        let lr = args.lr.unwrap_or(LR);
        let dtype = args.dtype.unwrap_or(DType::F32);
        let tokenizer = tokenizer(args.tokenizer.as_deref(), &model);
        let options = TrainOptions {
            tokenizer,
            model,
            data: args.data,
            eval_data: args.eval_data,
            eval_every: Some(args.eval_every.unwrap_or(100)).filter(|n| *n > 0),
            seq_len: args.seq_len.unwrap_or(128),
            micro_batch: args.micro_batch.and_then(Choice::given),
            global_batch: args.global_batch.unwrap_or(GLOBAL_BATCH),
            length: args.epochs.map_or(Length::Steps(args.steps.unwrap_or(STEPS)), Length::Epochs),
            lr,
            min_lr: args.min_lr.unwrap_or(lr / 10.0),
            warmup: args.warmup,
            schedule: args.schedule.unwrap_or(Schedule::Cosine),
            weight_decay: args.weight_decay.unwrap_or(0.1),
            beta1: args.beta1.unwrap_or(0.9),
            beta2: args.beta2.unwrap_or(0.95),
            eps: args.eps.unwrap_or(1e-8),
            clip: Some(args.clip.unwrap_or(1.0)).filter(|x| *x > 0.0),
            dtype,
            adam_dtype: args.adam_dtype.unwrap_or(DType::F32),
            loss_scale: (dtype == DType::F16).then(|| args.loss_scale.unwrap_or(LOSS_SCALE)),
            zero: args.zero.unwrap_or(0),
            offload: args.offload.unwrap_or(Offload::None),
            offload_via: args.offload_via.and_then(Choice::given),
            offload_fraction: args.offload_fraction.unwrap_or(Choice::Given(1.0)).given(),
            recompute: args.recompute.unwrap_or(Recompute::None),
            pp: args.pp.unwrap_or(1),
            pp_schedule: args.pp_schedule.unwrap_or(PipelineSchedule::OneFOneB),
            pp_chunks: match args.pp_schedule {
                Some(PipelineSchedule::Interleaved) => args.pp_chunks.unwrap_or(2),
                Some(PipelineSchedule::ZeroBubble) => args.pp_chunks.unwrap_or(1),
                _ => 1,
            },
            pp_split: Some(args.pp_split).filter(|split| !split.is_empty()),
            gpu_memory_limit: args.gpu_memory_limit,
            device: args.device.unwrap_or(Device::Auto),
            share_gpu: args.share_gpu.unwrap_or(false),
            threads: args.threads,
            seed: args.seed.unwrap_or(0),
            out: args.out,
            save_every: args.save_every.unwrap_or(500),
            keep: args.keep.unwrap_or(2),
            resume: args.resume.map(|r| if r == "auto" { Resume::Auto } else { Resume::From(r.into()) }),
            metrics: args.metrics,
            given,
            origins,
        };
        if let Length::Steps(steps) = options.length {
            options.learning_rate(steps)?;
        }
        Ok(options)
    }
}

fn tokenizer(given: Option<&str>, model: &ModelOptions) -> Tokenizer {
    match given {
        Some("bytes") => Tokenizer::Bytes,
        Some(file) => Tokenizer::File(file.into()),
        None => model.tokenizer_file().map_or(Tokenizer::Bytes, Tokenizer::File),
    }
}

struct Check<'a> {
    origins: &'a Origins,
}

impl Check<'_> {
    fn folder(&self, name: &str, given: bool, model: &ModelOptions) -> Result<(), OptionsError> {
        if given && !matches!(model.choice, ModelChoice::Folder(_)) {
            let what = "has no effect: models that start from a seed have no dropout";
            return Err(self.origins.invalid(name, what, "leave it out, or add --model HF_DIR"));
        }
        Ok(())
    }

    fn numbers(&self, a: &TrainArgs) -> Result<(), OptionsError> {
        self.positive("lr", a.lr, "such as 3e-3")?;
        self.positive("eps", a.eps, "such as 1e-8")?;
        self.positive("epochs", a.epochs, "such as 1")?;
        self.positive("loss-scale", a.loss_scale, "such as 65536")?;
        self.not_negative("min-lr", a.min_lr)?;
        self.not_negative("weight-decay", a.weight_decay)?;
        self.not_negative("clip", a.clip)?;
        self.within("beta1", a.beta1, |x| (0.0..1.0).contains(&x), "from 0 up to but not 1, such as 0.9")?;
        self.within("beta2", a.beta2, |x| (0.0..1.0).contains(&x), "from 0 up to but not 1, such as 0.95")?;
        let fraction = a.offload_fraction.and_then(Choice::given);
        self.within("offload-fraction", fraction, |x| (0.0..=1.0).contains(&x), "from 0 to 1")?;
        self.at_least_one("seq-len", a.seq_len, "such as 128")?;
        self.at_least_one("micro-batch", a.micro_batch.and_then(Choice::given), "such as 4")?;
        self.at_least_one("global-batch", a.global_batch, "such as 24")?;
        self.at_least_one("threads", a.threads, "or leave it out")?;
        self.at_least_one("pp", a.pp, "or leave it out")?;
        self.at_least_one("pp-chunks", a.pp_chunks, "or leave it out")?;
        self.at_least_one("keep", a.keep, "or leave it out to keep 2")?;
        self.at_least_one("steps", a.steps, "such as 300")?;
        self.at_least_one("save-every", a.save_every, "or leave it out to save every 500 steps")?;
        let (lr, min_lr) = (a.lr.unwrap_or(LR), a.min_lr.unwrap_or(0.0));
        if min_lr > lr {
            let what = format!("{min_lr} is above the highest learning rate, {lr}");
            return Err(self.origins.invalid("min-lr", what, "give at most that, or a higher --lr"));
        }
        Ok(())
    }

    /// Options that exclude each other, or that would have no effect.
    fn combinations(&self, a: &TrainArgs) -> Result<(), OptionsError> {
        let needs = |name: &str, given: bool, what: &str, met: bool, mend: &str| {
            if given && !met { Err(self.origins.invalid(name, what, mend)) } else { Ok(()) }
        };
        let no_out = "has no effect without a folder for checkpoints";
        let no_offload = "has no effect while nothing is offloaded";
        let offload = a.offload == Some(Offload::Optimizer);
        let fp16 = a.dtype == Some(DType::F16);
        needs("epochs", a.epochs.is_some(), "excludes --steps", a.steps.is_none(), "give one of the two")?;
        needs("save-every", a.save_every.is_some(), no_out, a.out.is_some(), "add --out DIR")?;
        needs("keep", a.keep.is_some(), no_out, a.out.is_some(), "add --out DIR")?;
        let auto = a.resume.as_deref() == Some("auto");
        needs(
            "resume",
            auto,
            "auto looks in the folder of --out, which is not given",
            a.out.is_some(),
            "add --out DIR",
        )?;
        needs(
            "loss-scale",
            a.loss_scale.is_some(),
            "has no effect but in fp16",
            fp16,
            "add --dtype fp16, or leave it out",
        )?;
        needs(
            "micro-batch",
            a.micro_batch == Some(Choice::Auto),
            "auto is the most that fits a limit, and there is none",
            a.gpu_memory_limit.is_some(),
            "add --gpu-memory-limit BYTES, or give a number",
        )?;
        let mend = "add --offload optimizer, or leave it out";
        needs("offload-via", a.offload_via.is_some(), no_offload, offload, mend)?;
        needs("offload-fraction", a.offload_fraction.is_some(), no_offload, offload, mend)?;
        needs(
            "offload-fraction",
            a.offload_fraction == Some(Choice::Auto),
            "auto is the least that fits a limit, and there is none",
            a.gpu_memory_limit.is_some(),
            "add --gpu-memory-limit BYTES, or give a number",
        )?;
        let piped = a.pp.is_some_and(|pp| pp > 1);
        let mend = "add --pp STAGES, or leave it out";
        let no_pipeline = "has no effect without a pipeline";
        needs("pp-schedule", a.pp_schedule.is_some(), no_pipeline, piped, mend)?;
        needs("pp-split", !a.pp_split.is_empty(), no_pipeline, piped, mend)?;
        let (interleaved, zero_bubble) = (PipelineSchedule::Interleaved, PipelineSchedule::ZeroBubble);
        let chunked = a.pp_schedule.is_some_and(|s| s == interleaved || s == zero_bubble);
        let mend = "add --pp-schedule interleaved or zero-bubble, or leave it out";
        needs("pp-chunks", a.pp_chunks.is_some(), "has no effect while stages have one chunk", chunked, mend)?;
        needs(
            "pp-chunks",
            a.pp_schedule == Some(zero_bubble) && a.pp_chunks.is_some_and(|chunks| chunks > 2),
            "is more than stages have with --pp-schedule zero-bubble",
            false,
            "use 1 (ZB-H1) or 2 (ZB-V), or --pp-schedule interleaved",
        )?;
        let evaluated = a.eval_every != Some(0);
        needs(
            "eval-data",
            !a.eval_data.is_empty(),
            "is not used with --eval-every 0",
            evaluated,
            "leave out one of the two",
        )?;
        let schedule = a.schedule.unwrap_or(Schedule::Cosine);
        let what = format!("has no effect with --schedule {}", spelled(schedule));
        let decays = schedule != Schedule::Constant;
        needs("min-lr", a.min_lr.is_some(), &what, decays, "leave it out, or choose another schedule")
    }

    fn paths(&self, a: &TrainArgs) -> Result<(), OptionsError> {
        let exists = |name: &str, path: &PathBuf| {
            if path.exists() {
                return Ok(());
            }
            let mend = "check the path; it is relative to the working folder";
            Err(self.origins.invalid(name, format!("{} does not exist", path.display()), mend))
        };
        a.data.iter().try_for_each(|path| exists("data", path))?;
        a.eval_data.iter().try_for_each(|path| exists("eval-data", path))?;
        if let Some(file) = a.tokenizer.as_deref().filter(|t| *t != "bytes")
            && !std::path::Path::new(file).is_file()
        {
            let what = format!("there is no file {file}");
            return Err(self.origins.invalid("tokenizer", what, "give `bytes` or the path of a tokenizer.json"));
        }
        if let Some(dir) = a.resume.as_deref().filter(|r| *r != "auto")
            && !std::path::Path::new(dir).is_dir()
        {
            let what = format!("there is no folder {dir}");
            return Err(self.origins.invalid("resume", what, "give `auto` or the folder of a checkpoint (step-...)"));
        }
        Ok(())
    }

    fn within(
        &self,
        name: &str,
        value: Option<f64>,
        good: impl Fn(f64) -> bool,
        range: &str,
    ) -> Result<(), OptionsError> {
        match value {
            Some(x) if !good(x) => {
                Err(self.origins.invalid(name, format!("{x} is out of range"), format!("give a number {range}")))
            }
            _ => Ok(()),
        }
    }

    fn positive(&self, name: &str, value: Option<f64>, example: &str) -> Result<(), OptionsError> {
        match value {
            Some(x) if !(x.is_finite() && x > 0.0) => Err(self.origins.invalid(
                name,
                format!("{x} is no positive number"),
                format!("give a number above 0 {example}"),
            )),
            _ => Ok(()),
        }
    }

    fn not_negative(&self, name: &str, value: Option<f64>) -> Result<(), OptionsError> {
        self.within(name, value, |x| x.is_finite() && x >= 0.0, "of 0 or above")
    }

    fn at_least_one<T: TryInto<u64>>(&self, name: &str, value: Option<T>, example: &str) -> Result<(), OptionsError> {
        match value.map(TryInto::try_into) {
            Some(Ok(0)) => Err(self.origins.invalid(name, "0 is too few", format!("give at least 1, {example}"))),
            _ => Ok(()),
        }
    }
}

impl TrainOptions {
    /// How `world` ranks are arranged: `--pp` stages, and the rest replicas.
    ///
    /// # Errors
    /// When the ranks cannot be shared out equally among the stages.
    pub fn mesh(&self, world: u32) -> Result<Mesh, OptionsError> {
        let (world, pp) = (world.max(1), self.pp.max(1));
        if !world.is_multiple_of(pp) {
            let ranks = if world == 1 { "1 rank".to_owned() } else { format!("{world} ranks") };
            let what = format!("{ranks} (--nproc) cannot be shared equally by {pp} stages");
            let divisors: Vec<String> =
                (1..=world).filter(|d| world.is_multiple_of(*d)).map(|d| d.to_string()).collect();
            let mend = format!("use --pp {}, or --nproc {}", divisors.join(" or "), world.next_multiple_of(pp));
            return Err(self.origins.invalid("pp", what, mend));
        }
        Ok(Mesh { dp: world / pp, pp })
    }

    /// How a step is cut among the replicas of `world` ranks, which each train on their own sequences.
    ///
    /// # Errors
    /// When the global batch or the ranks do not divide; names the nearest that do.
    pub fn micro_batches(&self, world: u32) -> Result<MicroBatches, OptionsError> {
        let mesh = self.mesh(world)?;
        let (batch, ranks) = (self.global_batch, mesh.dp as usize);
        let unit = ranks * self.micro_batch.unwrap_or(1);
        if !batch.is_multiple_of(unit) {
            let of = self.micro_batch.map_or_else(String::new, |m| format!(" with micro-batches of {m}"));
            let who = if mesh.pp > 1 { "replica" } else { "rank" };
            let plural = if ranks == 1 { "" } else { "s" };
            let what = format!("{batch} sequences cannot be shared equally by {ranks} {who}{plural}{of}");
            let (below, above) = (batch / unit * unit, batch.next_multiple_of(unit));
            let mend = if below == 0 { format!("use {above}") } else { format!("use {below} or {above}") };
            return Err(self.origins.invalid("global-batch", what, mend));
        }
        let share = batch / ranks;
        // Few micro-batches leave a pipeline idle: at least two for each stage, where there are that many sequences.
        let most = if mesh.pp > 1 { MICRO_BATCH.min(share / (2 * mesh.pp as usize)).max(1) } else { MICRO_BATCH };
        let sequences = self.micro_batch.unwrap_or_else(|| largest_divisor(share, most));
        Ok(MicroBatches { sequences, count: (share / sequences) as u32 })
    }

    /// True when the user gave this option, on the command line or in the file.
    pub(crate) fn was_given(&self, name: &str) -> bool {
        self.given.iter().any(|given| given == name)
    }

    /// Checks the sequence length against the longest that the model takes, if it is bounded.
    ///
    /// # Errors
    /// When sequences are longer than that.
    pub fn check_context(&self, longest: Option<usize>) -> Result<(), OptionsError> {
        match longest {
            Some(longest) if self.seq_len > longest => {
                let what = format!("{} tokens are more than the {longest} that the model takes", self.seq_len);
                let mend = format!("give at most {longest}, or a model with a longer context");
                Err(self.origins.invalid("seq-len", what, mend))
            }
            _ => Ok(()),
        }
    }
}

/// Options that, besides the model, shape the numbers of a run. When one of them changes between a checkpoint and its
/// resumption, it is no longer the same run.
pub(crate) const SHAPING: [&str; 20] = [
    "data",
    "eval_data",
    "tokenizer",
    "seq_len",
    "global_batch",
    "length",
    "lr",
    "min_lr",
    "warmup",
    "schedule",
    "weight_decay",
    "beta1",
    "beta2",
    "eps",
    "clip",
    "dtype",
    "adam_dtype",
    "loss_scale",
    "seed",
    "micro_batch",
];

impl TrainOptions {
    /// What a resumed run does otherwise than the run that wrote the checkpoint with the options `saved` (this struct as
    /// JSON): one line for each option that shapes the numbers, such as `lr was 0.003 and is 0.001`.
    ///
    /// Empty when the resumed run continues the same numbers, on the same number of ranks with the same bits.
    #[must_use]
    pub fn changes_since(&self, saved: &serde_json::Value) -> Vec<String> {
        let now = serde_json::to_value(self).expect("options are plain data");
        let changed = SHAPING.iter().filter(|name| saved[**name] != now[**name]);
        let mut lines: Vec<String> = changed
            .map(|name| format!("{} was {} and is {}", name.replace('_', "-"), saved[*name], now[*name]))
            .collect();
        // As values: an f32 has more than one spelling in JSON.
        match ModelOptions::deserialize(&saved["model"]) {
            Ok(model) if model == self.model => {}
            Ok(model) if model.choice == self.model.choice => lines.push("the model has other sizes".to_owned()),
            _ => lines.push(format!("model was {} and is {}", saved["model"]["choice"], now["model"]["choice"])),
        }
        lines
    }
}

/// The largest divisor of `n` up to `limit`.
fn largest_divisor(n: usize, limit: usize) -> usize {
    (1..=limit.min(n)).rev().find(|d| n.is_multiple_of(*d)).unwrap_or(1)
}
