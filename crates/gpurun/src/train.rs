//! `train` on one rank: from options to a finished run.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use gpurun_checkpoint::hf::HfWeights;
use gpurun_checkpoint::{Checkpoint, TensorShape, check_out, latest};
pub use gpurun_comm::Board;
use gpurun_comm::Fabric;
use gpurun_data::{DataConfig, Dataset, Progress, TokenizerChoice};
use gpurun_device::{Backend, CpuBackend, LossScaling};
use gpurun_engine::checkpoint::{Position, Provenance, load};
use gpurun_engine::{
    AdamOptions, Control, EngineError, Observer, Session, SessionOptions, State, StepInputs, Summary, TrainSettings,
    Trainer,
};
use gpurun_model::{BatchShape, Model, ModelError};
use gpurun_plan::{OffloadVia, PlanOptions, Policy, Schedule};
use gpurun_types::{Place, Rank};

use crate::corpus;
use crate::devices::{self, Devices};
use crate::fit::{DoesNotFit, Fitted, Planner, fitted};
use crate::measure::measured;
use crate::options::{ModelChoice, Offload, OptionsError, PipelineSchedule, Resume, Tokenizer, TrainOptions};
use crate::room;

/// Channel of votes and barriers; the plan's channels are below.
const CONTROL_CHANNEL: u32 = 63;

/// Held-out sequences per evaluation, at most: enough for a loss that is steady to about a percent.
const EVAL_SEQUENCES: usize = 64;

/// What can end `train`.
#[derive(Debug, thiserror::Error)]
pub enum TrainError {
    /// The options are wrong.
    #[error(transparent)]
    Options(#[from] OptionsError),
    /// The model cannot be built.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// The device cannot be used.
    #[error("{0}")]
    Device(String),
    /// There is no checkpoint to resume from.
    #[error("{0}")]
    NoCheckpoint(String),
    /// Ranks could not tell each other something before the first step.
    #[error("between the ranks, before the first step: {0}")]
    Board(String),
    /// The run does not fit the memory that it may use.
    #[error(transparent)]
    DoesNotFit(Box<DoesNotFit>),
    /// `--out` cannot be written.
    #[error("--out: {0}")]
    Out(gpurun_checkpoint::Error),
    /// The run failed.
    #[error(transparent)]
    Engine(#[from] EngineError),
}

impl TrainError {
    /// The process's exit code.
    #[must_use]
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Options(_) | Self::Model(_) | Self::Out(_) | Self::Device(_) => 2,
            Self::DoesNotFit(_) => 3,
            Self::NoCheckpoint(_) => 5,
            Self::Board(_) => 4,
            Self::Engine(error) => error.exit_code(),
        }
    }

    /// True when this rank only noticed that another one failed.
    #[must_use]
    pub const fn is_secondary(&self) -> bool {
        match self {
            Self::Engine(error) => error.is_secondary(),
            Self::Board(_) => true,
            _ => false,
        }
    }
}

impl From<gpurun_data::DataError> for TrainError {
    fn from(error: gpurun_data::DataError) -> Self {
        Self::Engine(error.into())
    }
}

impl From<gpurun_checkpoint::Error> for TrainError {
    fn from(error: gpurun_checkpoint::Error) -> Self {
        Self::Engine(error.into())
    }
}

/// One rank's place in the job.
pub struct RankPlace<'a> {
    /// Which rank.
    pub rank: Rank,
    /// Ranks in all.
    pub world: u32,
    /// Index among the ranks of this machine.
    pub local_rank: u32,
    /// How long a wait for another rank may last.
    pub timeout: Duration,
    /// Shared memory of the job; `None` for a single rank.
    pub fabric: Option<Arc<Fabric>>,
    /// Threads for this rank's CPU work.
    pub threads: usize,
    /// The run was started again after a failure: resume as with `--resume auto`.
    pub restarted: bool,
    /// How ranks tell each other a short text before communicators are up; `None` for a single rank.
    pub board: Option<&'a dyn Board>,
}

impl RankPlace<'_> {
    /// What every rank says of `what`, in rank order. Returns when all have spoken; all must be asked.
    pub(crate) fn exchange(&self, what: &str, mine: &[u8]) -> Result<Vec<Vec<u8>>, TrainError> {
        let Some(board) = self.board.filter(|_| self.world > 1) else { return Ok(vec![mine.to_vec()]) };
        let key = |rank: u32| format!("gpurun/{what}/{rank}");
        board.put(&key(self.rank.0), mine).map_err(TrainError::Board)?;
        (0..self.world).map(|rank| board.get(&key(rank)).map_err(TrainError::Board)).collect()
    }
}

impl RankPlace<'_> {
    /// What every rank says of `what`, in rank order, told to rank 0; the others get nothing and do not wait.
    pub(crate) fn tell_first(&self, what: &str, mine: Vec<u8>) -> Result<Option<Vec<Vec<u8>>>, TrainError> {
        let Some(board) = self.board.filter(|_| self.world > 1) else { return Ok(Some(vec![mine])) };
        let key = |rank: u32| format!("gpurun/{what}/{rank}");
        if self.rank != Rank(0) {
            board.put(&key(self.rank.0), &mine).map_err(TrainError::Board)?;
            return Ok(None);
        }
        let others = (1..self.world).map(|rank| board.get(&key(rank)).map_err(TrainError::Board));
        std::iter::once(Ok(mine)).chain(others).collect::<Result<_, _>>().map(Some)
    }
}

/// Told what a run does.
pub trait TrainObserver: Observer {
    /// Text is being turned into tokens.
    fn tokenising(&self, progress: &Progress<'_>);
    /// The run is about to start: total steps, words for the instructions.
    fn started(&self, steps: u64, train: &[String], evaluate: &[String]);
    /// A line for the user (rank 0).
    fn note(&self, line: &str);
}

/// Everything that a run on one rank holds.
struct Job<'a> {
    options: &'a TrainOptions,
    place: &'a RankPlace<'a>,
    observer: &'a dyn TrainObserver,
    dataset: Dataset,
    session: Session,
    control: Control,
}

/// Trains on one rank.
///
/// # Errors
/// See [`TrainError`]; whatever it is, checkpoints written before are whole.
pub fn train(
    options: &TrainOptions,
    build: &dyn Fn(&TrainOptions) -> Result<Model, ModelError>,
    place: &RankPlace<'_>,
    observer: &dyn TrainObserver,
) -> Result<Summary, TrainError> {
    let model = build(options)?;
    options.check_context(model.max_seq)?;
    let note = |line: &str| {
        if place.rank == Rank(0) {
            observer.note(line);
        }
    };
    let (devices, options) = ready(options, &model, place, &note)?;
    let options = &options;
    if let Some(out) = &options.out {
        check_out(out).map_err(TrainError::Out)?;
    }
    let dataset = open_data(options, &model, observer)?;
    let steps = options.steps(dataset.windows());
    let rate = options.learning_rate(steps)?;
    let control = open_control(place)?;
    let session = open_session(options, Arc::new(model), place, &devices)?;
    let job = Job { options, place, observer, dataset, session, control };
    let start = job.start()?;
    let (train, evaluate) = job.session.labels();
    observer.started(steps, train, evaluate);
    let settings = TrainSettings {
        steps,
        global_batch: options.global_batch,
        learning_rate: Box::new(move |step| rate.at(step)),
        eval_every: options.eval_every,
        eval_sequences: EVAL_SEQUENCES,
        out: options.out.clone(),
        save_every: Some(options.save_every),
        keep: Some(options.keep),
        metrics: options.metrics.clone(),
        peak_flops: devices.peak(options.dtype).map(|peak| peak.flops * f64::from(place.world)),
        memory_in_use: devices.memory_in_use(),
        provenance: provenance(options),
    };
    let trainer =
        Trainer { session: &job.session, dataset: &job.dataset, control: &job.control, settings: &settings, observer };
    let summary = trainer.run(start)?;
    if !summary.stopped && summary.tokens > 0 {
        job.show_sample(steps)?;
    }
    Ok(summary)
}

/// This rank's device, and the options with all chosen that they left open, so that the run fits.
pub(crate) fn ready<'a>(
    options: &TrainOptions,
    model: &Model,
    place: &'a RankPlace<'_>,
    note: &dyn Fn(&str),
) -> Result<(Devices<'a>, TrainOptions), TrainError> {
    let devices = devices::open(options, place, note)?;
    let backend = devices.backend.as_ref();
    let planner = Planner { model, world: place.world, sizes: backend };
    let table = devices.machine(options, place.world);
    let rates = |bytes| measured(table.clone(), backend, place, bytes);
    let Fitted { options, notes, .. } = fitted(&planner, options, &rates)?;
    notes.iter().for_each(|line| note(line));
    room::check(&planner, &options, place, devices.on_cpu())?;
    Ok((devices, options))
}

fn open_data(
    options: &TrainOptions,
    model: &Model,
    observer: &dyn TrainObserver,
) -> Result<Dataset, gpurun_data::DataError> {
    let config = DataConfig {
        paths: options.data.clone(),
        eval_paths: options.eval_data.clone(),
        tokenizer: match &options.tokenizer {
            Tokenizer::Bytes => TokenizerChoice::Bytes,
            Tokenizer::File(file) => TokenizerChoice::File(file.clone()),
        },
        seq_len: options.seq_len,
        seed: options.seed,
        held_out: HELD_OUT,
        vocabulary: model.vocabulary,
        cache_dir: None,
        embedded: options.data.is_empty().then_some(corpus::FILES),
    };
    Dataset::open(&config, &mut |progress| observer.tokenising(&progress))
}

/// Part of the data that is held out where no `--eval-data` is given.
const HELD_OUT: f64 = 0.05;

pub(crate) fn open_control(place: &RankPlace<'_>) -> Result<Control, EngineError> {
    let Some(fabric) = &place.fabric else { return Ok(Control::solo()) };
    let backend: Arc<dyn Backend> =
        Arc::new(CpuBackend::new(1).map_err(|source| EngineError::SetUp { what: "control memory", source })?);
    let members: Vec<Rank> = (0..place.world).map(Rank).collect();
    let link = fabric
        .communicator(CONTROL_CHANNEL, &members, backend.clone())
        .map_err(|source| EngineError::Control { what: "connecting the ranks", source })?;
    Control::new(Arc::new(link), backend)
}

pub(crate) fn open_session(
    options: &TrainOptions,
    model: Arc<Model>,
    place: &RankPlace<'_>,
    devices: &Devices<'_>,
) -> Result<Session, TrainError> {
    let micro = options.micro_batches(place.world)?;
    let settings = SessionOptions {
        plan: plan_options(options, place.world)?,
        shape: BatchShape { batch: micro.sequences, seq: options.seq_len },
        adam: adam_options(options),
        loss_scale: options.loss_scale.unwrap_or(1.0) as f32,
        device_limit: options.gpu_memory_limit,
    };
    Ok(Session::new(devices.backend.clone(), model, devices, place.rank, settings)?)
}

/// The plan that `world` ranks need for these options.
pub(crate) fn plan_options(options: &TrainOptions, world: u32) -> Result<PlanOptions, TrainError> {
    let optim = if options.offload == Offload::Optimizer { Place::Host } else { Place::Device };
    Ok(PlanOptions {
        mesh: options.mesh(world)?,
        micro_batches: options.micro_batches(world)?.count,
        policy: Policy::for_stage(options.zero, optim).map_err(EngineError::from)?,
        dtype: options.dtype,
        adam_dtype: options.adam_dtype,
        // What is left open is chosen before a plan is run; it has no effect while nothing is offloaded.
        offload_via: options.offload_via.unwrap_or(OffloadVia::Host),
        offload_fraction: options.offload_fraction.unwrap_or(1.0),
        recompute: options.recompute,
        schedule: match options.pp_schedule {
            PipelineSchedule::Gpipe => Schedule::Gpipe,
            PipelineSchedule::OneFOneB => Schedule::OneFOneB,
            PipelineSchedule::Interleaved => Schedule::Interleaved { chunks: options.pp_chunks },
            PipelineSchedule::ZeroBubble if options.pp_chunks == 1 => Schedule::ZeroBubble,
            PipelineSchedule::ZeroBubble => Schedule::ZeroBubbleV,
        },
        split: options.pp_split.clone(),
    })
}

fn adam_options(options: &TrainOptions) -> AdamOptions {
    AdamOptions {
        beta1: options.beta1 as f32,
        beta2: options.beta2 as f32,
        eps: options.eps as f32,
        weight_decay: options.weight_decay as f32,
        clip: options.clip.map_or(f32::INFINITY, |c| c as f32),
        seed: options.seed,
        scaling: options.loss_scale.map(|_| LossScaling {
            growth: 2.0,
            backoff: 0.5,
            interval: 2000,
            max: 16_777_216.0,
            min: 1.0,
        }),
    }
}

fn provenance(options: &TrainOptions) -> Provenance {
    let value = |v: Result<serde_json::Value, _>| v.expect("options are plain data");
    Provenance {
        model: value(serde_json::to_value(&options.model.config)),
        options: value(serde_json::to_value(options)),
    }
}

impl Job<'_> {
    /// Weights from a checkpoint, a folder of weights, or the seed.
    fn start(&self) -> Result<Position, TrainError> {
        if let Some(position) = self.resume()? {
            return Ok(position);
        }
        match &self.options.model.choice {
            ModelChoice::Folder(folder) => {
                self.load_folder(folder)?;
                self.note(&format!("starting from the weights in {}", folder.display()));
            }
            _ => self.session.initialise(self.options.seed)?,
        }
        Ok(Position::default())
    }

    fn resume(&self) -> Result<Option<Position>, TrainError> {
        let Some(dir) = self.resume_from()? else { return Ok(None) };
        let checkpoint = Checkpoint::open(&dir)?;
        let position = load(&self.session, &checkpoint)?;
        self.note(&format!("resuming after step {} from {}", position.step, dir.display()));
        for line in self.options.changes_since(&checkpoint.meta().options) {
            self.note(&format!("unlike the run that wrote it: {line}"));
        }
        Ok(Some(position))
    }

    /// The checkpoint to start from. Rank 0 chooses and verifies it, and tells the others.
    fn resume_from(&self) -> Result<Option<PathBuf>, TrainError> {
        const KEY: &str = "gpurun/resume-from";
        if self.options.resume.is_none() && !self.place.restarted {
            return Ok(None);
        }
        let board = self.place.board;
        if self.place.rank != Rank(0) {
            let board = board.expect("more than one rank have a board");
            let told = board.get(KEY).map_err(TrainError::Board)?;
            // Rank 0 failed, and says so itself.
            let told: Option<PathBuf> = serde_json::from_slice(&told).map_err(|e| TrainError::Board(e.to_string()))?;
            return Ok(told);
        }
        let chosen = self.choose_checkpoint()?;
        if let Some(board) = board {
            let text = serde_json::to_vec(&chosen).expect("a path is plain data");
            board.put(KEY, &text).map_err(TrainError::Board)?;
        }
        Ok(chosen)
    }

    fn choose_checkpoint(&self) -> Result<Option<PathBuf>, TrainError> {
        if let (Some(Resume::From(dir)), false) = (&self.options.resume, self.place.restarted) {
            Checkpoint::open(dir)?.verify()?;
            return Ok(Some(dir.clone()));
        }
        let Some(out) = &self.options.out else { return Ok(None) };
        match latest(out) {
            Ok((checkpoint, refused)) => {
                for refused in refused {
                    self.note(&format!("passed over {}: {}", refused.path.display(), refused.reason));
                }
                Ok(Some(checkpoint.dir().to_owned()))
            }
            // Nothing was saved yet: start as the options say.
            Err(none) if none.refused.is_empty() => match &self.options.resume {
                Some(Resume::From(dir)) => Ok(Some(dir.clone())),
                _ => Ok(None),
            },
            Err(none) => Err(TrainError::NoCheckpoint(none.to_string())),
        }
    }

    fn load_folder(&self, folder: &Path) -> Result<(), TrainError> {
        let weights = HfWeights::open(folder)?;
        let params = self.session.model().params();
        let shapes: Vec<_> = params.into_iter().map(|p| TensorShape { name: p.name, shape: p.shape }).collect();
        weights.check_params(&shapes)?;
        self.session.restore(|name, state, start, out| {
            match state {
                State::Master => weights.read_param(name, start as u64, out)?,
                State::M | State::V => out.fill(0.0),
            }
            Ok(())
        })?;
        Ok(())
    }

    fn note(&self, line: &str) {
        if self.place.rank == Rank(0) {
            self.observer.note(line);
        }
    }

    /// Some text from the trained model, so that a user sees that it learned. Every rank takes part: with sharded
    /// parameters no rank could do it alone.
    fn show_sample(&self, step: u64) -> Result<(), TrainError> {
        const TOKENS: usize = 120;
        if !self.dataset.speaks_tokenizer() {
            return Ok(());
        }
        let shape = self.session.shape();
        let tokenizer = self.dataset.tokenizer();
        let mut sampler = gpurun_engine::Sampler::new(0.8, Some(40), self.options.seed);
        let mut text = vec![tokenizer.end_of_text()];
        for _ in 0..TOKENS {
            let window = &text[text.len().saturating_sub(shape.seq)..];
            let mut batch = gpurun_engine::HostBatch {
                tokens: vec![0; shape.tokens()],
                targets: vec![-1; shape.tokens()],
                starts: vec![0; shape.tokens()],
            };
            for (to, token) in batch.tokens.iter_mut().zip(window) {
                *to = *token as i32;
            }
            let inputs = StepInputs { micros: vec![batch], learning_rate: 0.0, loss_factor: 1.0 };
            let logits = self.session.logits(window.len() - 1, step, inputs, self.observer)?;
            let chosen = logits.map(|mut logits| {
                logits.truncate(tokenizer.vocabulary());
                sampler.next(&logits) as u32
            });
            let next = self.agreed(chosen)?;
            if next == tokenizer.end_of_text() {
                break;
            }
            text.push(next);
        }
        self.note(&format!("sample: {}", tokenizer.decode(&text[1..])));
        Ok(())
    }

    /// The token that the last stage chose. Its replicas choose alike, and the other stages have nothing to choose from.
    fn agreed(&self, chosen: Option<u32>) -> Result<u32, EngineError> {
        match (chosen, self.session.stages()) {
            (Some(token), 1) => Ok(token),
            (chosen, _) => {
                let word = chosen.filter(|_| self.session.replica().0 == 0);
                Ok(self.control.told(word.map(f64::from))? as u32)
            }
        }
    }
}
