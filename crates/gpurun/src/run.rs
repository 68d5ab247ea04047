//! The worker's main: options from the command line, a place among the ranks, training, an exit code.

use std::ffi::OsString;
use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

use clap::Parser;
use gpurun_comm::{Fabric, FabricOptions};
use gpurun_data::Progress;
use gpurun_engine::{Observer, Phase, StepMetrics, Summary, Watcher};
use gpurun_model::{Model, ModelError};
use gpurun_types::Rank;
use gpurun_wire::{Level, Phase as WirePhase, StepReport};

use crate::options::{TrainArgs, TrainOptions, one_line};
use crate::train::{Board, RankPlace, TrainError, TrainObserver, train};
use crate::worker::{Reporter, WorkFailure, Worker};

/// How much longer than the supervisor's deadline a rank waits for another: the supervisor knows better whom to name.
const PATIENCE: Duration = Duration::from_secs(10);

/// A wait without a supervisor's deadline.
const FOREVER: Duration = Duration::from_secs(100 * 365 * 86400);

/// How long ranks wait for what rank 0 has to say before the first step: it may verify a large checkpoint.
const BOARD: Duration = Duration::from_secs(3600);

#[derive(Parser)]
#[command(name = "train", about = "Train a language model", max_term_width = 110)]
struct CommandLine {
    #[command(flatten)]
    train: TrainArgs,
}

/// Trains a user's model: the whole `main` of a program that the launcher starts (or that is run by itself).
///
/// Options are those of `gpurun train`; `--model` and the `[model]` table are the program's to heed or not.
pub fn run(model: impl Fn(&TrainOptions) -> Result<Model, ModelError>) -> ExitCode {
    let name = std::env::args_os().next().unwrap_or_default();
    ExitCode::from(train_main(&name, std::env::args_os().skip(1), &model))
}

/// `train` with these arguments; the process's exit code.
pub fn train_main(
    name: &std::ffi::OsStr,
    arguments: impl IntoIterator<Item = OsString>,
    model: &dyn Fn(&TrainOptions) -> Result<Model, ModelError>,
) -> u8 {
    in_worker(name, arguments, |worker, line: CommandLine| {
        let options = line.train.resolve().map_err(|e| WorkFailure::from(TrainError::from(e)))?;
        work(worker, &options, model)
    })
}

/// Does the work of one rank with the arguments that are given to all; the process's exit code.
pub(crate) fn in_worker<A: Parser>(
    name: &std::ffi::OsStr,
    arguments: impl IntoIterator<Item = OsString>,
    work: impl FnOnce(&Worker, A) -> Result<String, WorkFailure>,
) -> u8 {
    let worker = match Worker::from_env() {
        Ok(worker) => worker,
        Err(error) => {
            eprintln!("gpurun: {error}");
            return 2;
        }
    };
    diagnostics();
    let command = std::iter::once(name.to_owned()).chain(arguments);
    let args = match A::try_parse_from(command) {
        Ok(args) => Ok(args),
        // `--help`: asked for, and not a mistake.
        Err(error) if !error.use_stderr() => {
            if worker.rank() == 0 {
                // A closed pipe is the reader's choice.
                let _ = error.print();
            }
            return 0;
        }
        Err(error) => Err(one_line(&error)),
    };
    worker.run(|worker| match args {
        Ok(args) => work(worker, args),
        Err(message) => Err(WorkFailure { message, exit_code: 2, secondary: false }),
    })
}

/// Lines of `tracing` to stderr, as `RUST_LOG` asks; warnings by default.
pub(crate) fn diagnostics() {
    let filter = tracing_subscriber::EnvFilter::try_from_default_env()
        .unwrap_or_else(|_| tracing_subscriber::EnvFilter::new("warn"));
    // A program that has set its own up keeps it.
    let _ =
        tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).with_target(false).try_init();
}

fn work(
    worker: &Worker,
    options: &TrainOptions,
    model: &dyn Fn(&TrainOptions) -> Result<Model, ModelError>,
) -> Result<String, WorkFailure> {
    let place = place(worker)?;
    let observer = Told::new(worker);
    Ok(describe(&train(options, model, &place, &observer)?))
}

impl From<TrainError> for WorkFailure {
    fn from(error: TrainError) -> Self {
        Self { message: error.to_string(), exit_code: error.exit_code(), secondary: error.is_secondary() }
    }
}

pub(crate) fn place(worker: &Worker) -> Result<RankPlace<'_>, WorkFailure> {
    let failed = |e: std::io::Error| WorkFailure {
        message: format!("the shared memory of the job: {e}"),
        exit_code: 4,
        secondary: false,
    };
    let (rank, world) = (Rank(worker.rank()), worker.world());
    let timeout = worker.hang_timeout().map_or(FOREVER, |t| t + PATIENCE);
    let fabric = match worker.shared_memory() {
        Some(memory) if world > 1 => {
            Some(Fabric::process(memory, rank, world, FabricOptions { timeout }).map_err(failed)?)
        }
        _ => None,
    };
    let board = (world > 1).then_some(worker as &dyn Board);
    let local_rank = worker.place().local_rank;
    let (threads, restarted) = (worker.threads(), worker.restart() > 0);
    Ok(RankPlace { rank, world, local_rank, timeout, fabric, threads, restarted, board })
}

impl Board for Worker {
    fn put(&self, key: &str, value: &[u8]) -> Result<(), String> {
        self.set(key, value).map_err(|e| e.to_string())
    }

    fn get(&self, key: &str) -> Result<Vec<u8>, String> {
        let value = Self::get(self, key, BOARD).map_err(|e| e.to_string())?;
        value.ok_or_else(|| "a single rank has no store".to_owned())
    }
}

/// Passes on to the launcher what a run does.
pub(crate) struct Told {
    pub(crate) reporter: Reporter,
    steps: std::sync::atomic::AtomicU64,
}

impl Told {
    pub(crate) fn new(worker: &Worker) -> Self {
        Self { reporter: worker.reporter().clone(), steps: 0.into() }
    }
}

impl Watcher for Told {
    fn at(&self, instr: u32) {
        self.reporter.at(instr);
    }

    fn waiting_for(&self, instr: u32) {
        self.reporter.waiting_in(instr);
    }

    fn progressed(&self) {
        self.reporter.progressed();
    }
}

impl Observer for Told {
    fn phase(&self, step: u64, phase: Phase) {
        let phase = match phase {
            Phase::Step => WirePhase::Step,
            Phase::Evaluate => WirePhase::Evaluating,
            Phase::Save => WirePhase::Saving,
            Phase::Boundary => WirePhase::Boundary,
        };
        self.reporter.phase(step, phase);
    }

    fn step_done(&self, m: &StepMetrics) {
        self.reporter.step_done(&StepReport {
            step: m.step,
            total_steps: self.steps.load(std::sync::atomic::Ordering::Relaxed),
            loss: m.loss,
            grad_norm: f64::from(m.grad_norm),
            lr: m.lr,
            tokens: m.tokens,
            tokens_per_second: m.tokens_per_second,
            step_seconds: m.step_seconds,
            mfu: m.mfu,
            memory_planned: m.device_peak_bytes,
            memory_used: m.device_used_bytes,
            loss_scale: Some(f64::from(m.loss_scale)).filter(|s| *s != 1.0),
            skipped: m.skipped,
            eval_loss: m.eval_loss,
        });
    }

    fn saved(&self, step: u64, dir: &Path) {
        self.reporter.saved(step, dir);
    }

    fn stop_requested(&self) -> bool {
        self.reporter.stop_requested()
    }
}

impl TrainObserver for Told {
    fn tokenising(&self, progress: &Progress<'_>) {
        self.reporter.phase(0, WirePhase::Tokenising);
        self.reporter.progressed();
        if progress.total > 0 {
            self.reporter.task("tokenising", progress.done, progress.total);
        }
    }

    fn started(&self, steps: u64, train: &[String], evaluate: &[String]) {
        self.steps.store(steps, std::sync::atomic::Ordering::Relaxed);
        self.reporter.words(train, evaluate);
    }

    fn note(&self, line: &str) {
        self.reporter.line(Level::Note, line);
    }
}

/// A few lines on how a run ended.
fn describe(s: &Summary) -> String {
    let mut text = format!("{} after step {}", if s.stopped { "stopped" } else { "done" }, s.steps);
    if let (Some(first), Some(last)) = (s.first_loss, s.last_loss) {
        text += &format!(": loss {first:.4} -> {last:.4}");
    }
    if let Some(loss) = s.eval_loss {
        text += &format!(", held-out {loss:.4}");
    }
    if s.seconds > 0.0 {
        text += &format!(", {:.0} tokens/s", s.tokens as f64 / s.seconds);
    }
    if let Some(mfu) = s.mfu {
        text += &format!(", mfu {:.1} %", 100.0 * mfu);
    }
    if s.tokens > 0 {
        text += &memory_words(s);
    }
    if s.skipped > 0 {
        text += &format!(", {} steps skipped by loss scaling", s.skipped);
    }
    if let Some(dir) = &s.checkpoint {
        text += &format!("\ncheckpoint: {}", dir.display());
    }
    text
}

/// What rank 0 was to hold and what it took.
fn memory_words(s: &Summary) -> String {
    let (device, host) = s.planned;
    let host = if host.0 > 0 { format!(" and {host} of host memory") } else { String::new() };
    let used = s.used.device.map_or_else(String::new, |used| format!(", {used} used"));
    format!("; memory {device}{host} planned{used}")
}

/// The built-in models' `model` for [`train_main`].
///
/// # Errors
/// When the sizes do not make a model.
pub fn builtin_model(options: &TrainOptions) -> Result<Model, ModelError> {
    options.model.config.build()
}
