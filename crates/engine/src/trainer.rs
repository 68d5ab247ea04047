//! The training loop: data in, steps, evaluation, checkpoints, metrics out.

use std::path::{Path, PathBuf};
use std::time::Instant;

use gpurun_data::Dataset;
use gpurun_device::ScalarSlot;
use gpurun_types::Bytes;

use crate::checkpoint::{self, Position, Provenance};
use crate::control::Control;
use crate::error::EngineError;
use crate::interpreter::{HostBatch, StepInputs, Watcher};
use crate::metrics::{HighWater, MetricsFile, StepMetrics};
use crate::session::{Session, StepOutcome};

/// Steps in a row with gradients that are not finite after which a run is given up. Dynamic loss scaling needs about
/// 16 to come down from its largest scale.
const MAX_SKIPPED_IN_A_ROW: u32 = 40;

/// First steps of a run after each of which memory in use is looked at, and how often it is later.
const LOOKED_AT: u64 = 3;
const LOOK_EVERY: u64 = 100;

/// What the loop is in, for progress and for who hangs where.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// In a training step.
    Step,
    /// Evaluating held-out data.
    Evaluate,
    /// Writing a checkpoint.
    Save,
    /// Waiting for other ranks at a step boundary.
    Boundary,
}

/// Who is told what happens, and who may ask the loop to stop.
pub trait Observer: Watcher {
    /// The loop enters a phase in `step` (from 1).
    fn phase(&self, step: u64, phase: Phase);
    /// A step is done. Called on every rank.
    fn step_done(&self, metrics: &StepMetrics);
    /// A checkpoint is complete.
    fn saved(&self, step: u64, dir: &Path);
    /// True when the run is to end at the next step boundary.
    fn stop_requested(&self) -> bool;
}

/// What to do besides the model and the plan.
pub struct TrainSettings {
    /// Last step.
    pub steps: u64,
    /// Sequences per step, over all ranks.
    pub global_batch: usize,
    /// Learning rate of a step, counted from 0.
    pub learning_rate: Box<dyn Fn(u64) -> f64 + Send + Sync>,
    /// Evaluate after every so many steps, and after the last.
    pub eval_every: Option<u64>,
    /// Held-out sequences per evaluation, at most.
    pub eval_sequences: usize,
    /// Where checkpoints go.
    pub out: Option<PathBuf>,
    /// Save after every so many steps; the last step is saved in any case.
    pub save_every: Option<u64>,
    /// Checkpoints to keep.
    pub keep: Option<usize>,
    /// Metrics file (rank 0 writes).
    pub metrics: Option<PathBuf>,
    /// FLOP/s of all devices, for MFU.
    pub peak_flops: Option<f64>,
    /// What this rank's process holds now, as the system counts it.
    pub memory_in_use: Box<dyn Fn() -> HighWater + Send + Sync>,
    /// Written into checkpoints.
    pub provenance: Provenance,
}

/// How a run ended.
#[derive(Clone, Debug, PartialEq)]
pub struct Summary {
    /// Steps done in all.
    pub steps: u64,
    /// Loss of the first step of this run.
    pub first_loss: Option<f64>,
    /// Loss of the last step.
    pub last_loss: Option<f64>,
    /// Last held-out loss.
    pub eval_loss: Option<f64>,
    /// Tokens seen by this run.
    pub tokens: u64,
    /// Wall-clock seconds of this run's steps.
    pub seconds: f64,
    /// Model FLOPs over the devices' peak; `None` where the peak is unknown.
    pub mfu: Option<f64>,
    /// Planned device and host arenas of this rank.
    pub planned: (Bytes, Bytes),
    /// Most memory that this rank has taken.
    pub used: HighWater,
    /// Steps skipped by loss scaling since the start of training.
    pub skipped: u32,
    /// True when asked to stop before the last step.
    pub stopped: bool,
    /// The last checkpoint written.
    pub checkpoint: Option<PathBuf>,
}

/// Trains from `start` to the end.
pub struct Trainer<'a> {
    /// The model in memory.
    pub session: &'a Session,
    /// Where sequences come from.
    pub dataset: &'a Dataset,
    /// Agreement between ranks outside steps.
    pub control: &'a Control,
    /// What to do.
    pub settings: &'a TrainSettings,
    /// Who is told.
    pub observer: &'a dyn Observer,
}

impl Trainer<'_> {
    /// Runs the loop.
    pub fn run(&self, start: Position) -> Result<Summary, EngineError> {
        let mut metrics = match &self.settings.metrics {
            Some(path) if self.session.rank().0 == 0 => Some(MetricsFile::open(path, start.step)?),
            _ => None,
        };
        let mut summary = Summary {
            steps: start.step,
            first_loss: None,
            last_loss: None,
            eval_loss: None,
            tokens: 0,
            seconds: 0.0,
            mfu: None,
            planned: self.session.planned_bytes(),
            used: HighWater::default(),
            skipped: self.session.scalars()?[ScalarSlot::SkippedSteps as usize] as u32,
            stopped: false,
            checkpoint: None,
        };
        let mut saved_at = start.step;
        for step in start.step + 1..=self.settings.steps {
            self.observer.phase(step, Phase::Boundary);
            if self.control.any(self.observer.stop_requested())? {
                summary.stopped = true;
                break;
            }
            let done = self.one_step(step, &mut summary)?;
            if let Some(file) = &mut metrics {
                file.write(&done)?;
            }
            self.observer.step_done(&done);
            if self.settings.save_every.is_some_and(|n| step % n == 0) {
                summary.checkpoint = self.save(step)?;
                saved_at = step;
            }
        }
        if self.settings.out.is_some() && saved_at < summary.steps {
            summary.checkpoint = self.save(summary.steps)?;
        }
        Ok(summary)
    }

    fn one_step(&self, step: u64, summary: &mut Summary) -> Result<StepMetrics, EngineError> {
        self.observer.phase(step, Phase::Step);
        let began = Instant::now();
        let index = step - 1;
        let lr = (self.settings.learning_rate)(index);
        let outcome = self.session.step(step, self.step_inputs(index, lr), self.observer)?;
        let seconds = began.elapsed().as_secs_f64();
        let tokens = (self.settings.global_batch * self.session.shape().seq) as u64;
        let loss = outcome.loss_sum / tokens as f64;
        check_finite(step, loss, &outcome)?;
        let last = step == self.settings.steps;
        let due = self.settings.eval_every.is_some_and(|n| step.is_multiple_of(n) || last);
        let eval_loss = if due && self.dataset.eval_windows() > 0 { Some(self.evaluate(step)?) } else { None };
        summary.steps = step;
        summary.first_loss.get_or_insert(loss);
        summary.last_loss = Some(loss);
        summary.eval_loss = eval_loss.or(summary.eval_loss);
        summary.tokens += tokens;
        summary.seconds += seconds;
        summary.skipped = outcome.skipped_in_all;
        let mfu = |tokens: u64, seconds: f64| {
            let flops = self.session.step_flops_per_token() * tokens as f64;
            self.settings.peak_flops.map(|peak| flops / seconds / peak)
        };
        summary.mfu = mfu(summary.tokens, summary.seconds);
        // Nothing large is allocated after the first steps, so a look now and then is enough.
        if summary.tokens <= LOOKED_AT * tokens || last || step.is_multiple_of(LOOK_EVERY) {
            summary.used = summary.used.max((self.settings.memory_in_use)());
        }
        let ((device, host), used) = (summary.planned, summary.used);
        Ok(StepMetrics {
            step,
            loss,
            grad_norm: outcome.grad_norm,
            lr,
            tokens: step * tokens,
            tokens_per_second: tokens as f64 / seconds,
            mfu: mfu(tokens, seconds),
            device_peak_bytes: device.0,
            host_peak_bytes: host.0,
            device_used_bytes: used.device.map(|b| b.0),
            host_used_bytes: used.host.map(|b| b.0),
            step_seconds: seconds,
            loss_scale: outcome.loss_scale,
            skipped: outcome.skipped,
            eval_loss,
        })
    }

    /// This rank's sequences of a step. Sequence `i` of micro-batch `m` of replica `r` is number `(m * dp + r) * b + i` of
    /// the global batch, so the batch is the same set of sequences whatever the number of ranks.
    fn step_inputs(&self, index: u64, lr: f64) -> StepInputs {
        let shape = self.session.shape();
        let (replica, replicas) = self.session.replica();
        let micros = self.settings.global_batch / (replicas * shape.batch);
        let first = index * self.settings.global_batch as u64;
        let micros = (0..micros)
            .map(|micro| {
                let offset = ((micro * replicas + replica) * shape.batch) as u64;
                self.batch(|i, t, y, s| self.dataset.fill(first + offset + i as u64, t, y, s))
            })
            .collect();
        let tokens = self.settings.global_batch * shape.seq;
        StepInputs { micros, learning_rate: lr as f32, loss_factor: 1.0 / tokens as f32 }
    }

    fn batch(&self, fill: impl Fn(usize, &mut [i32], &mut [i32], &mut [i32])) -> HostBatch {
        let shape = self.session.shape();
        let n = shape.tokens();
        let mut batch = HostBatch { tokens: vec![0; n], targets: vec![-1; n], starts: vec![0; n] };
        for i in 0..shape.batch {
            let at = i * shape.seq..(i + 1) * shape.seq;
            fill(i, &mut batch.tokens[at.clone()], &mut batch.targets[at.clone()], &mut batch.starts[at]);
        }
        batch
    }

    /// Mean loss per token over the first held-out sequences, shared out over the replicas.
    pub fn evaluate(&self, step: u64) -> Result<f64, EngineError> {
        self.observer.phase(step, Phase::Evaluate);
        let shape = self.session.shape();
        let (replica, replicas) = self.session.replica();
        let windows = (self.dataset.eval_windows() as usize).min(self.settings.eval_sequences.max(1));
        let mut total = 0.0;
        for round in 0..windows.div_ceil(replicas * shape.batch) {
            let first = (round * replicas + replica) * shape.batch;
            let batch = self.batch(|i, t, y, s| {
                // Rows past the end keep target -1: no loss.
                if first + i < windows {
                    self.dataset.eval_window((first + i) as u64, t, y, s);
                }
            });
            let inputs = StepInputs { micros: vec![batch], learning_rate: 0.0, loss_factor: 1.0 };
            total += self.session.evaluate(step, inputs, self.observer)?;
        }
        Ok(total / (windows * shape.seq) as f64)
    }

    fn save(&self, step: u64) -> Result<Option<PathBuf>, EngineError> {
        let Some(out) = &self.settings.out else { return Ok(None) };
        self.observer.phase(step, Phase::Save);
        let tokens = step * (self.settings.global_batch * self.session.shape().seq) as u64;
        let position = Position { step, tokens };
        let settings = self.settings;
        let dir = checkpoint::save(self.session, self.control, out, position, &settings.provenance, settings.keep)?;
        self.observer.saved(step, &dir);
        Ok(Some(dir))
    }
}

fn check_finite(step: u64, loss: f64, outcome: &StepOutcome) -> Result<(), EngineError> {
    if outcome.skipped_in_a_row >= MAX_SKIPPED_IN_A_ROW {
        return Err(EngineError::NonFinite { step, steps: outcome.skipped_in_a_row, loss });
    }
    Ok(())
}
